/* Inference of reductions and row ops. May call: core, ops/infer.h. */
#include "ops/infer.h"
#include "ops_gen.h"

static int64_t numel(const wki_tensor *t) {
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++)
        n *= t->size[i];
    return n;
}

bool wki_reduce_ok(wk_ctx *c, const wki_tensor *x, const char *name, const int64_t *list, uint32_t *red) {
    if (!wki_need_f32(c, x, name) || !wki_list_ok(c, list[0], "dims"))
        return false;
    *red = 0;
    for (int i = 0; i < (int)list[0]; i++) {
        int64_t d = list[1 + i];
        if (!wki_dim_ok(c, x, d))
            return false;
        if (*red >> d & 1)
            return wki_fail(c, WK_SHAPE, "dimension %lld appears twice in `dims`", (long long)d);
        *red |= 1u << d;
    }
    return true;
}

bool wki_infer_reduce(wk_ctx *c, const wki_call *k) {
    const wki_tensor *x = k->in[0];
    wki_tensor *o = k->out[0];
    int n = (int)k->ia[0];
    uint32_t red;
    if (!wki_reduce_ok(c, x, k->op->in_names[0], k->ia, &red))
        return false;
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

/* max has no identity: a row without elements is an error. */
bool wki_infer_max(wk_ctx *c, const wki_call *k) {
    if (!wki_infer_reduce(c, k))
        return false;
    for (int i = 0; i < (int)k->ia[0]; i++)
        if (k->in[0]->ndim && k->in[0]->size[k->ia[1 + i]] == 0 && numel(k->out[0]) > 0)
            return wki_fail(c, WK_SHAPE, "dimension %lld has no elements to take the largest of",
                            (long long)k->ia[1 + i]);
    return true;
}

static bool all_f32(wk_ctx *c, const wki_call *k) {
    for (int i = 0; i < k->nin; i++)
        if (!wki_need_f32(c, k->in[i], k->op->in_names[i]))
            return false;
    return true;
}

/* Rows along attribute 0: all inputs and the output have one shape. */
bool wki_infer_row_same(wk_ctx *c, const wki_call *k) {
    if (!all_f32(c, k) || !wki_dim_ok(c, k->in[0], k->ia[0]))
        return false;
    for (int i = 1; i < k->nin; i++)
        if (!wki_need_same_shape(c, k->in[0], k->op->in_names[0], k->in[i], k->op->in_names[i]))
            return false;
    k->out[0]->dtype = WK_F32;
    wki_same_shape(k->out[0], k->in[0]);
    return true;
}

/* The shape of one value per row of x's last dimension. */
static void row_shape(wki_tensor *o, const wki_tensor *x) {
    wki_same_shape(o, x);
    o->ndim--;
    o->dtype = WK_F32;
}

static bool need_row(wk_ctx *c, const wki_tensor *x, const wki_tensor *r, const char *name) {
    bool ok = r->ndim == x->ndim - 1;
    for (int i = 0; ok && i < r->ndim; i++)
        ok = r->size[i] == x->size[i];
    char sr[128], sx[128];
    return ok || wki_fail(c, WK_SHAPE, "`%s` has shape %s, one value per row of %s is needed", name,
                          wki_shape_text(sr, sizeof sr, r->ndim, r->size),
                          wki_shape_text(sx, sizeof sx, x->ndim, x->size));
}

bool wki_infer_argmax(wk_ctx *c, const wki_call *k) {
    const wki_tensor *x = k->in[0];
    if (!wki_need_f32(c, x, "x"))
        return false;
    if (x->ndim == 0 || x->size[x->ndim - 1] == 0)
        return wki_fail(c, WK_SHAPE, "`x` has no last dimension with elements");
    row_shape(k->out[0], x);
    k->out[0]->dtype = WK_I64;
    return true;
}

bool wki_infer_norm(wk_ctx *c, const wki_call *k) {
    const wki_tensor *x = k->in[0];
    if (!wki_need_f32(c, x, "x"))
        return false;
    if (x->ndim == 0)
        return wki_fail(c, WK_SHAPE, "`x` has no dimension to normalise over");
    k->out[0]->dtype = WK_F32;
    wki_same_shape(k->out[0], x);
    row_shape(k->out[1], x);
    return true;
}

bool wki_infer_norm_grad(wk_ctx *c, const wki_call *k) {
    if (!all_f32(c, k) || !wki_need_same_shape(c, k->in[0], "dy", k->in[1], "y") ||
        !need_row(c, k->in[0], k->in[2], "rstd"))
        return false;
    k->out[0]->dtype = WK_F32;
    wki_same_shape(k->out[0], k->in[0]);
    return true;
}

bool wki_need_logits(wk_ctx *c, const wki_tensor *logits, const wki_tensor *target) {
    char s[128];
    if (!wki_need_f32(c, logits, "logits") || !wki_need_dtype(c, target, "target", WK_I64))
        return false;
    if (logits->ndim != 2)
        return wki_fail(c, WK_SHAPE, "`logits` has shape %s, (N, C) is needed",
                        wki_shape_text(s, sizeof s, logits->ndim, logits->size));
    if (logits->size[1] == 0 && logits->size[0] > 0)
        return wki_fail(c, WK_SHAPE, "`logits` has no classes");
    return need_row(c, logits, target, "target");
}

bool wki_infer_nll(wk_ctx *c, const wki_call *k) {
    if (!wki_need_logits(c, k->in[0], k->in[1]))
        return false;
    row_shape(k->out[0], k->in[0]);
    row_shape(k->out[1], k->in[0]);
    return true;
}

bool wki_infer_nll_grad(wk_ctx *c, const wki_call *k) {
    const wki_tensor *logits = k->in[0];
    if (!wki_need_logits(c, logits, k->in[2]) || !wki_need_f32(c, k->in[1], "lse") ||
        !wki_need_f32(c, k->in[3], "dy") || !need_row(c, logits, k->in[1], "lse") ||
        !need_row(c, logits, k->in[3], "dy"))
        return false;
    k->out[0]->dtype = WK_F32;
    wki_same_shape(k->out[0], logits);
    return true;
}
