/* The table of kernels, from the rows of kernels.def. Calls nothing but the kernels. */
#include "backend/kernels.h"

#include "ops_gen.h"

static const wki_kernel rows[] = {
#define K(op, DEVICE, name, flags)                                                                           \
    {WKI_OP_##op,                                                                                            \
     WK_##DEVICE,                                                                                            \
     flags,                                                                                                  \
     #name,                                                                                                  \
     wki_k_##name##_ok,                                                                                      \
     (flags)&WKI_K_WORKSPACE ? wki_k_##name##_workspace : NULL,                                              \
     wki_k_##name##_run},
#include "backend/kernels.def"
#undef K
    {UINT16_MAX, 0, 0, NULL, NULL, NULL, NULL}, /* ends the last op's rows */
};

const wki_kernel *wki_kernels_of(uint16_t op) {
    for (const wki_kernel *k = rows; k->name; k++)
        if (k->op == op)
            return k;
    return NULL;
}
