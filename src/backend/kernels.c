/* The table of kernels, from the rows of kernels.def, and the choice among them. May call: base, core, the kernels. */
#include "backend/kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

const wki_kernel *wki_kernel_find(const wki_launch *l, wk_device dev) {
    const wki_kernel *k = wki_kernels_of(l->op->id);
    const char *trace = getenv("WICK_TRACE");
    bool say = trace && strstr(trace, "dispatch");
    for (; k && k->op == l->op->id; k++) {
        if (k->dev != dev)
            continue;
        bool ok = !k->ok || k->ok(l);
        if (say)
            fprintf(stderr, "wick dispatch: %s on %s: %s %s\n", l->op->name, wk_device_name(dev), k->name,
                    ok ? "runs" : "does not fit");
        if (ok)
            return k;
    }
    return NULL;
}
