/* The table of kernels, from the rows of kernels.def, and the choice among them. May call: base, core, the kernels. */
#include "backend/kernels.h"

#include <stdio.h>

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

/* One row's line: that it runs, or what it needs and what the operands are. */
static void say(const wki_launch *l, const wki_kernel *k, bool ok, const char *unfit) {
    char text[1024], shape[128];
    int n = snprintf(text, sizeof text, "wick dispatch: %s on %s: %s %s", l->op->name,
                     wk_device_name((wk_device)k->dev), k->name, ok ? "runs" : "does not fit");
    if (!ok && unfit)
        n += snprintf(text + n, sizeof text - (size_t)n, ", it needs %s", unfit);
    for (int i = 0; !ok && i < l->nin + l->nout && n < (int)sizeof text; i++) {
        const wki_view *v = i < l->nin ? &l->in[i] : &l->out[i - l->nin];
        const char *mark = i == 0 ? ":" : i == l->nin ? " ->" : ",";
        if (v->dtype == WK_DTYPE_COUNT)
            n += snprintf(text + n, sizeof text - (size_t)n, "%s absent", mark);
        else
            n += snprintf(text + n, sizeof text - (size_t)n, "%s %s %s%s", mark,
                          wk_dtype_name((wk_dtype)v->dtype),
                          wki_shape_text(shape, sizeof shape, v->ndim, v->size), v->plain ? "" : " strided");
    }
    fprintf(stderr, "%s\n", text);
}

static bool fits(const wki_launch *l, const wki_kernel *k) {
    if (!(l->c->rt->trace & WKI_TRACE_DISPATCH))
        return !k->ok || k->ok(l);
    const char *unfit = NULL;
    wki_launch asking = *l;
    asking.unfit = &unfit;
    bool ok = !k->ok || k->ok(&asking);
    say(l, k, ok, unfit);
    return ok;
}

const wki_kernel *wki_kernel_find(const wki_launch *l, wk_device dev) {
    for (const wki_kernel *k = wki_kernels_of(l->op->id); k && k->op == l->op->id; k++)
        if (k->dev == dev && fits(l, k))
            return k;
    return NULL;
}
