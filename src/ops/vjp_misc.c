/* Gradients of elementwise, view and contraction ops that take more than a line of the table. May call: core, op
 * wrappers. */
#include "ops_gen.h"

/* f = x / 2 (1 + t), t = tanh(u), u = k (x + a x^3). f'' = (1 - t^2) (u' + x u'' / 2 - x t u'^2). */
void wki_vjp_gelu_tanh_grad(const wki_vjp_args *args) {
    const double k = 0.79788456080286536, a = 0.044715;
    wk_ctx *c = args->c;
    wki_tensor *g = args->gout[0];
    if (!g)
        return;
    wki_tensor *dy = wki_saved_in(c, args->node, 0), *x = wki_saved_in(c, args->node, 1);
    if (args->need[0])
        args->gin[0] = wki_gelu_tanh_grad(c, g, x);
    if (!args->need[1])
        return;
    wki_tensor *xx = wki_mul(c, x, x);
    wki_tensor *u = wki_mul(c, x, wki_add_scalar(c, wki_mul_scalar(c, xx, k * a), k));
    wki_tensor *t = wki_tanh(c, u);
    wki_tensor *du = wki_add_scalar(c, wki_mul_scalar(c, xx, 3 * k * a), k);
    wki_tensor *half_x_ddu = wki_mul_scalar(c, xx, 3 * k * a);
    wki_tensor *bend = wki_mul(c, wki_mul(c, x, t), wki_mul(c, du, du));
    wki_tensor *slope = wki_add_scalar(c, wki_neg(c, wki_mul(c, t, t)), 1);
    wki_tensor *f2 = wki_mul(c, slope, wki_sub(c, wki_add(c, du, half_x_ddu), bend));
    args->gin[1] = wki_mul(c, wki_mul(c, g, dy), f2);
}

void wki_vjp_permute(const wki_vjp_args *a) {
    const int64_t *order = wki_node_ia(a->node); /* and its length before it */
    int64_t inverse[WK_MAX_DIMS];
    if (!a->need[0] || !a->gout[0])
        return;
    for (int i = 0; i < (int)order[0]; i++)
        inverse[order[1 + i]] = i;
    a->gin[0] = wki_permute(a->c, a->gout[0], inverse, (int)order[0]);
}

/* All dimensions but the last in one. */
static wki_tensor *rows(wk_ctx *c, wki_tensor *t) {
    int64_t n = 1;
    if (t->ndim == 0 || t->ndim == 2)
        return t;
    for (int i = 0; i + 1 < t->ndim; i++)
        n *= t->size[i];
    return wki_reshape(c, t, 2, (const int64_t[]){n, t->size[t->ndim - 1]});
}

void wki_vjp_linear(const wki_vjp_args *a) {
    wk_ctx *c = a->c;
    const wki_node *n = a->node;
    wki_tensor *g = a->gout[0];
    if (!g)
        return;
    if (a->need[0])
        a->gin[0] = wki_linear(c, g, wki_transpose(c, wki_saved_in(c, n, 1), 0, 1), NULL);
    if (!a->need[1] && !a->need[2])
        return;
    wki_tensor *g2 = rows(c, g);
    if (a->need[1])
        a->gin[1] = wki_bmm(c, wki_transpose(c, g2, 0, 1), rows(c, wki_saved_in(c, n, 0)));
    if (a->need[2])
        a->gin[2] = wki_sum(c, g2, (const int64_t[]){0}, 1, false);
}
