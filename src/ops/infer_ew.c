/* Inference of elementwise, reduction, row and creation ops. May call: core, ops/infer.h. */
#include <string.h>

#include "ops/infer.h"
#include "ops_gen.h"

/* ---- elementwise ---------------------------------------------------------------------------------------------------- */

bool wki_infer_unary(wk_ctx *c, const wki_call *k) {
    const wki_tensor *x = k->in[0];
    wki_tensor *o = k->out[0];
    if (!wki_need_f32(c, x, k->op->in_names[0]))
        return false;
    o->dtype = WK_F32;
    wki_same_shape(o, x);
    return true;
}

static bool __attribute__((noinline)) broadcast_failed(wk_ctx *c, const wki_tensor *a, const wki_tensor *b, int dim) {
    char sa[128], sb[128];
    return wki_fail(c, WK_SHAPE, "shapes %s and %s do not broadcast at dimension %d",
                    wki_shape_text(sa, sizeof sa, a->ndim, a->size), wki_shape_text(sb, sizeof sb, b->ndim, b->size), dim);
}

/* o := broadcast of o's shape so far (held by `acc`, for messages) and t. Sizes stay below the two inputs' product, which
   may overflow: checked. */
static bool __attribute__((noinline)) broadcast_into(wk_ctx *c, wki_tensor *o, const wki_tensor *t) {
    wki_tensor old;
    old.ndim = o->ndim;
    memcpy(old.size, o->size, sizeof old.size);
    int n = o->ndim > t->ndim ? o->ndim : t->ndim;
    for (int i = 1; i <= n; i++) {
        int64_t a = i <= old.ndim ? old.size[old.ndim - i] : 1, b = i <= t->ndim ? t->size[t->ndim - i] : 1;
        if (a != b && a != 1 && b != 1)
            return broadcast_failed(c, &old, t, n - i);
        o->size[n - i] = a == 1 ? b : a;
    }
    o->ndim = (uint8_t)n;
    return wki_size_ok(c, n, o->size);
}

static inline bool shapes_equal(const wki_tensor *a, const wki_tensor *b) {
    if (a->ndim != b->ndim)
        return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->size[i] != b->size[i])
            return false;
    return true;
}

static inline bool broadcast_all(wk_ctx *c, const wki_call *k) {
    wki_tensor *o = k->out[0];
    wki_same_shape(o, k->in[0]);
    for (int i = 1; i < k->nin; i++)
        if (__builtin_expect(!shapes_equal(o, k->in[i]), 0) && !broadcast_into(c, o, k->in[i]))
            return false;
    return true;
}

bool wki_infer_broadcast(wk_ctx *c, const wki_call *k) {
    for (int i = 0; i < k->nin; i++)
        if (!wki_need_f32(c, k->in[i], k->op->in_names[i]))
            return false;
    k->out[0]->dtype = WK_F32;
    return broadcast_all(c, k);
}

bool wki_infer_cast(wk_ctx *c, const wki_call *k) {
    if (k->ia[0] < 0 || k->ia[0] >= WK_DTYPE_COUNT)
        return wki_fail(c, WK_DTYPE, "dtype %lld does not exist", (long long)k->ia[0]);
    k->out[0]->dtype = (uint8_t)k->ia[0];
    wki_same_shape(k->out[0], k->in[0]);
    return true;
}

/* ---- reductions and rows -------------------------------------------------------------------------------------------- */

bool wki_infer_reduce(wk_ctx *c, const wki_call *k) {
    const wki_tensor *x = k->in[0];
    wki_tensor *o = k->out[0];
    int n = (int)k->ia[0];
    if (!wki_need_f32(c, x, k->op->in_names[0]) || !wki_list_ok(c, k->ia[0], "dims"))
        return false;
    uint32_t red = 0;
    for (int i = 0; i < n; i++) {
        int64_t d = k->ia[1 + i];
        if (!wki_dim_ok(c, x, d))
            return false;
        if (red >> d & 1)
            return wki_fail(c, WK_SHAPE, "dimension %lld appears twice in `dims`", (long long)d);
        red |= 1u << d;
    }
    bool keep = k->ia[1 + n];
    o->dtype = WK_F32;
    o->ndim = 0;
    for (int i = 0; i < x->ndim; i++) {
        if (!(red >> i & 1))
            o->size[o->ndim++] = x->size[i];
        else if (keep)
            o->size[o->ndim++] = 1;
    }
    return true;
}

static bool same_shapes(wk_ctx *c, const wki_call *k) {
    for (int i = 1; i < k->nin; i++)
        if (!shapes_equal(k->in[0], k->in[i])) {
            char sa[128], sb[128];
            return wki_fail(c, WK_SHAPE, "`%s` has shape %s and `%s` has %s, they must be equal", k->op->in_names[0],
                            wki_shape_text(sa, sizeof sa, k->in[0]->ndim, k->in[0]->size), k->op->in_names[i],
                            wki_shape_text(sb, sizeof sb, k->in[i]->ndim, k->in[i]->size));
        }
    return true;
}

/* Rows along attribute 0: all inputs and the output have one shape. */
bool wki_infer_row_same(wk_ctx *c, const wki_call *k) {
    for (int i = 0; i < k->nin; i++)
        if (!wki_need_f32(c, k->in[i], k->op->in_names[i]))
            return false;
    if (!same_shapes(c, k) || !wki_dim_ok(c, k->in[0], k->ia[0]))
        return false;
    k->out[0]->dtype = WK_F32;
    wki_same_shape(k->out[0], k->in[0]);
    return true;
}

/* ---- creation ------------------------------------------------------------------------------------------------------- */

bool wki_infer_create_f32(wk_ctx *c, const wki_call *k) {
    wki_tensor *o = k->out[0];
    if (!wki_list_ok(c, k->ia[0], "size") || !wki_size_ok(c, (int)k->ia[0], k->ia + 1))
        return false;
    o->dtype = WK_F32;
    o->ndim = (uint8_t)k->ia[0];
    memcpy(o->size, k->ia + 1, (size_t)o->ndim * sizeof *o->size);
    return true;
}
