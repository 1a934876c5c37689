/* Gradients of reductions and row ops that take more than a line of the table. May call: core, ops/infer.h, op wrappers. */
#include "ops/infer.h"
#include "ops_gen.h"

/* g has the shape of a reduction of input 0, with or without the reduced dimensions: with them, of size 1. */
static wki_tensor *keep_dims(wk_ctx *c, const wki_node *n, wki_tensor *g) {
    const wki_meta *m = &wki_node_meta(n)[0];
    int64_t size[WK_MAX_DIMS];
    uint32_t red = wki_op_reduced(n->op, m->ndim, wki_node_ia(n));
    for (int i = 0; i < m->ndim; i++)
        size[i] = red >> i & 1 ? 1 : m->size[i];
    return g->ndim == m->ndim ? g : wki_reshape(c, g, m->ndim, size);
}

void wki_vjp_sum(const wki_vjp_args *a) {
    const wki_meta *m = &wki_node_meta(a->node)[0];
    if (a->need[0] && a->gout[0])
        a->gin[0] = wki_expand(a->c, keep_dims(a->c, a->node, a->gout[0]), m->ndim, m->size);
}

void wki_vjp_max(const wki_vjp_args *a) {
    wk_ctx *c = a->c;
    const wki_node *n = a->node;
    if (!a->need[0] || !a->gout[0])
        return;
    wki_tensor *x = wki_saved_in(c, n, 0), *y = keep_dims(c, n, wki_saved_out(c, n, 0));
    wki_tensor *hit = wki_cast(c, wki_eq(c, x, y), WK_F32);
    wki_tensor *count = wki_sum(c, hit, wki_node_ia(n) + 1, (int)wki_node_ia(n)[0], true);
    wki_tensor *share = wki_div(c, keep_dims(c, n, a->gout[0]), count);
    a->gin[0] = wki_mul(c, hit, share);
}

/* One value per row as a column, to combine with whole rows. */
static wki_tensor *column(wk_ctx *c, wki_tensor *r) {
    int64_t size[WK_MAX_DIMS];
    for (int i = 0; i < r->ndim; i++)
        size[i] = r->size[i];
    if (r->ndim == WK_MAX_DIMS) /* poison never has as many, rows one less than their tensor */
        return wki_poison(c);
    size[r->ndim] = 1;
    return wki_reshape(c, r, r->ndim + 1, size);
}

static wki_tensor *sum_last(wk_ctx *c, wki_tensor *x, bool keep) {
    return wki_sum(c, x, (const int64_t[]){-1}, 1, keep);
}

/* y = (x - mean) r with r = 1 / sqrt(var + eps); dr/dx = -r^2 y / n. */
void wki_vjp_norm(const wki_vjp_args *a) {
    wk_ctx *c = a->c;
    const wki_node *n = a->node;
    wki_tensor *dy = a->gout[0], *dr = a->gout[1], *gx = NULL;
    if (!a->need[0])
        return;
    wki_tensor *y = wki_saved_out(c, n, 0), *r = wki_saved_out(c, n, 1);
    if (dy)
        gx = wki_norm_grad(c, dy, y, r);
    if (dr) {
        wki_tensor *t = wki_mul_scalar(c, wki_mul(c, dr, wki_mul(c, r, r)), -wki_node_va(n)[1]);
        t = wki_mul(c, column(c, t), y);
        gx = gx ? wki_add(c, gx, t) : t;
    }
    a->gin[0] = gx;
}

/* z = r (dy - mean(dy) - y mean(dy y)), per row. */
void wki_vjp_norm_grad(const wki_vjp_args *a) {
    wk_ctx *c = a->c;
    const wki_node *n = a->node;
    wki_tensor *g = a->gout[0];
    if (!g)
        return;
    double inv_n = wki_node_va(n)[0];
    wki_tensor *dy = wki_saved_in(c, n, 0), *y = wki_saved_in(c, n, 1), *r = wki_saved_in(c, n, 2);
    if (a->need[0])
        a->gin[0] = wki_norm_grad(c, g, y, r);
    if (a->need[1]) {
        wki_tensor *m = wki_mul_scalar(c, sum_last(c, wki_mul(c, dy, y), true), inv_n);
        wki_tensor *k = wki_mul_scalar(c, sum_last(c, wki_mul(c, g, y), true), inv_n);
        wki_tensor *t = wki_add(c, wki_mul(c, g, m), wki_mul(c, dy, k));
        a->gin[1] = wki_neg(c, wki_mul(c, column(c, r), t));
    }
    if (a->need[2]) { /* z is linear in r, so dz/dr is z at r = 1 */
        wki_tensor *unit = wki_norm_grad(c, dy, y, wki_full_like(c, r, 1));
        a->gin[2] = sum_last(c, wki_mul(c, g, unit), false);
    }
}

/* loss = lse - logits[target]; dlse/dlogits = exp(logits - lse). */
void wki_vjp_nll(const wki_vjp_args *a) {
    wk_ctx *c = a->c;
    const wki_node *n = a->node;
    wki_tensor *dloss = a->gout[0], *dlse = a->gout[1], *gx = NULL;
    if (!a->need[0])
        return;
    wki_tensor *logits = wki_saved_in(c, n, 0), *target = wki_saved_in(c, n, 1),
               *lse = wki_saved_out(c, n, 1);
    if (dloss)
        gx = wki_nll_rows_grad(c, logits, lse, target, dloss);
    if (dlse) {
        wki_tensor *p = wki_exp(c, wki_sub(c, logits, column(c, lse)));
        wki_tensor *t = wki_mul(c, column(c, dlse), p);
        gx = gx ? wki_add(c, gx, t) : t;
    }
    a->gin[0] = gx;
}

/* z = dy (p - onehot) with p = exp(logits - lse). */
void wki_vjp_nll_grad(const wki_vjp_args *a) {
    wk_ctx *c = a->c;
    const wki_node *n = a->node;
    wki_tensor *g = a->gout[0];
    if (!g)
        return;
    wki_tensor *logits = wki_saved_in(c, n, 0), *lse = wki_saved_in(c, n, 1);
    wki_tensor *target = wki_saved_in(c, n, 2), *dy = wki_saved_in(c, n, 3);
    if (a->need[0] || a->need[1]) {
        wki_tensor *p = wki_exp(c, wki_sub(c, logits, column(c, lse)));
        wki_tensor *t = wki_mul(c, wki_mul(c, g, column(c, dy)), p);
        if (a->need[0])
            a->gin[0] = t;
        if (a->need[1])
            a->gin[1] = wki_neg(c, sum_last(c, t, false));
    }
    if (a->need[3]) {
        wki_tensor *unit = wki_nll_rows_grad(c, logits, lse, target, wki_full_like(c, dy, 1));
        a->gin[3] = sum_last(c, wki_mul(c, g, unit), false);
    }
}
