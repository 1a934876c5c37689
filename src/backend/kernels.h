/* Declarations of the functions behind the rows of kernels.def. A row without WKI_K_WORKSPACE has no
 * _workspace function. Included by the files that define kernels. */
#ifndef WKI_KERNELS_H
#define WKI_KERNELS_H

#include "backend/backend.h"

#define K(op, DEVICE, name, flags)                                                                           \
    bool wki_k_##name##_ok(const wki_launch *l);                                                             \
    size_t wki_k_##name##_workspace(const wki_launch *l);                                                    \
    bool wki_k_##name##_run(const wki_launch *l);
#include "backend/kernels.def"
#undef K

#endif
