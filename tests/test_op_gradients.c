/* First and second derivatives of every differentiable row of the op table, composites included, against central
 * differences. Tests of internals: ops are called by their internal wrappers, so that helper ops are covered too. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"
#include "harness.h"
#include "ops_gen.h"

typedef wki_tensor T;
typedef struct env { /* inputs that carry no gradient */
    wk_ctx *c;
    T *mask, *idx, *target;
} env;
typedef T *(*function)(const env *e, T *const *x);

enum { MAX_X = 4 };
/* Values: uniform in -2..2; positive: 0.5..2; spaced: apart from each other and from 0, for ops with kinks. */
typedef enum fill { VALUES, POSITIVE, SPACED } fill;
typedef struct shape {
    fill how;
    int ndim;
    int64_t size[4];
} shape;
typedef struct grad_case {
    const char *name;
    function f;
    int n;
    shape in[MAX_X];
} grad_case;

/* ---- the ops -------------------------------------------------------------------------------------------------------- */

#define F(id, ...)                                                                                           \
    static T *f_##id(const env *e, T *const *x) {                                                            \
        wk_ctx *c = e->c;                                                                                    \
        (void)x;                                                                                             \
        return __VA_ARGS__;                                                                                  \
    }
#define LIST(...)                                                                                            \
    (const int64_t[]) { __VA_ARGS__ }
F(add, wki_add(c, x[0], x[1]))
F(sub, wki_sub(c, x[0], x[1]))
F(mul, wki_mul(c, x[0], x[1]))
F(div, wki_div(c, x[0], x[1]))
F(maximum, wki_maximum(c, x[0], x[1]))
F(minimum, wki_minimum(c, x[0], x[1]))
F(neg, wki_neg(c, x[0]))
F(abs, wki_abs(c, x[0]))
F(reciprocal, wki_reciprocal(c, x[0]))
F(exp, wki_exp(c, x[0]))
F(log, wki_log(c, x[0]))
F(sqrt, wki_sqrt(c, x[0]))
F(tanh, wki_tanh(c, x[0]))
F(sigmoid, wki_sigmoid(c, x[0]))
F(relu, wki_relu(c, x[0]))
F(relu_grad, wki_relu_grad(c, x[0], wki_relu(c, x[1])))
F(gelu, wki_gelu(c, x[0]))
F(gelu_grad, wki_gelu_grad(c, x[0], x[1]))
F(gelu_tanh, wki_gelu_tanh(c, x[0]))
F(gelu_tanh_grad, wki_gelu_tanh_grad(c, x[0], x[1]))
F(add_scalar, wki_add_scalar(c, x[0], 1.5))
F(mul_scalar, wki_mul_scalar(c, x[0], -1.5))
F(where, wki_where(c, e->mask, x[0], x[1]))
F(masked_fill, wki_masked_fill(c, x[0], e->mask, 2))
F(causal_fill, wki_softmax(c, wki_causal_fill(c, x[0]), -1))
F(causal_zero, wki_causal_zero(c, x[0]))
F(cast, wki_cast(c, x[0], WK_F32))
F(clone, wki_clone(c, x[0]))
F(dropout_apply, wki_dropout_apply(c, x[0], e->mask, 2))
F(sum_all, wki_sum(c, x[0], NULL, 0, false))
F(sum, wki_sum(c, x[0], LIST(-1, 0), 2, false))
F(sum_keep, wki_sum(c, x[0], LIST(1), 1, true))
F(max_all, wki_max(c, x[0], NULL, 0, false))
F(max, wki_max(c, x[0], LIST(1), 1, false))
F(max_keep, wki_max(c, x[0], LIST(0, 2), 2, true))
F(mean, wki_mean(c, x[0], LIST(-2), 1, false))
F(sum_to, wki_sum_to(c, x[0], 2, LIST(1, 4)))
F(softmax, wki_softmax(c, x[0], 1))
F(softmax_grad, wki_softmax_grad(c, x[0], x[1], 1))
F(log_softmax, wki_log_softmax(c, x[0], 0))
F(log_softmax_grad, wki_log_softmax_grad(c, x[0], x[1], -1))
F(layer_norm, wki_layer_norm(c, x[0], x[1], x[2], 1e-2))
F(norm, wki_norm(c, x[0], 1e-2, NULL))
F(norm_grad, wki_norm_grad(c, x[0], x[1], x[2]))
F(cross_entropy, wki_cross_entropy(c, x[0], e->target))
F(nll_rows_grad, wki_nll_rows_grad(c, x[0], x[1], e->target, x[2]))
F(reshape, wki_reshape(c, x[0], 2, LIST(4, -1)))
F(reshape_copy, wki_reshape(c, wki_transpose(c, x[0], 0, 1), 2, LIST(-1, 4)))
F(permute, wki_permute(c, x[0], LIST(2, 0, -2), 3))
F(expand, wki_expand(c, x[0], 4, LIST(2, -1, 3, 4)))
F(slice, wki_slice(c, x[0], -1, -3, 100, 2))
F(pad_slice, wki_pad_slice(c, x[0], 3, LIST(2, 9, 4), 1, 1, 3))
F(flatten, wki_flatten(c, x[0], 1))
F(bmm, wki_bmm(c, x[0], x[1]))
F(matmul, wki_matmul(c, x[0], x[1]))
F(linear, wki_linear(c, x[0], x[1], x[2]))
F(linear_no_bias, wki_linear(c, x[0], x[1], NULL))
F(conv2d, wki_conv2d(c, x[0], x[1], x[2], 2, 1, 1, 0))
F(conv2d_dx, wki_conv2d_dx(c, x[0], x[1], 5, 6, 2, 1, 1, 0))
F(conv2d_dw, wki_conv2d_dw(c, x[0], x[1], 3, 2, 2, 1, 1, 0))
F(max_pool2d, wki_max_pool2d(c, x[0], 2, 2, 2, 2, 0, 0, NULL))
F(max_pool2d_overlap, wki_max_pool2d(c, x[0], 3, 3, 1, 2, 1, 1, NULL))
F(embedding, wki_embedding(c, x[0], e->idx))
F(embedding_grad, wki_embedding_grad(c, x[0], e->idx, 5))
F(attention_causal, wki_attention(c, x[0], x[1], x[2], true, 0))
F(attention, wki_attention(c, x[0], x[1], x[2], false, 0.3))

static T *f_norm_both(const env *e, T *const *x) { /* a gradient arrives at both outputs */
    T *rstd, *y = wki_norm(e->c, x[0], 1e-2, &rstd);
    y = wki_sum(e->c, wki_mul(e->c, y, x[1]), LIST(-1), 1, false);
    return wki_add(e->c, y, wki_mul(e->c, rstd, rstd));
}

static T *f_nll_both(const env *e, T *const *x) {
    T *lse, *loss = wki_nll_rows(e->c, x[0], e->target, &lse);
    return wki_add(e->c, loss, wki_mul(e->c, lse, lse));
}

#define S(how, ...)                                                                                          \
    {                                                                                                        \
        how, (int)(sizeof(LIST(__VA_ARGS__)) / sizeof(int64_t)), { __VA_ARGS__ }                             \
    }
#define V(...) S(VALUES, __VA_ARGS__)
#define P(...) S(POSITIVE, __VA_ARGS__)
#define D(...) S(SPACED, __VA_ARGS__)
#define ROW1(id, a)                                                                                          \
    {                                                                                                        \
#id, f_##id, 1, { a }                                                                                \
    }
#define ROW2(id, a, b)                                                                                       \
    {                                                                                                        \
#id, f_##id, 2, { a, b }                                                                             \
    }
#define ROW3(id, a, b, c)                                                                                    \
    {                                                                                                        \
#id, f_##id, 3, { a, b, c }                                                                          \
    }
static const grad_case elementwise[] = {
    ROW2(add, V(3, 4), V(3, 4)),
    ROW2(add, V(3, 1), V(2, 1, 4)),
    ROW2(sub, V(4), V(3, 4)),
    ROW2(mul, V(3, 4), V(1, 4)),
    ROW2(div, P(3, 4), P(4)),
    ROW2(div, P(1), P(3, 4)),
    ROW2(maximum, D(3, 4), D(1)),
    ROW2(minimum, D(3, 4), D(1)),
    ROW1(neg, V(5)),
    ROW1(abs, D(6)),
    ROW1(reciprocal, P(5)),
    ROW1(exp, V(5)),
    ROW1(log, P(5)),
    ROW1(sqrt, P(5)),
    ROW1(tanh, V(5)),
    ROW1(sigmoid, V(5)),
    ROW1(relu, D(6)),
    ROW2(relu_grad, V(6), D(6)),
    ROW1(gelu, V(7)),
    ROW2(gelu_grad, V(7), V(7)),
    ROW1(gelu_tanh, V(7)),
    ROW2(gelu_tanh_grad, V(7), V(7)),
    ROW1(add_scalar, V(3)),
    ROW1(mul_scalar, V(3)),
    ROW2(where, V(3, 4), V(4)),
    ROW1(masked_fill, V(3, 4)),
    ROW1(causal_fill, V(2, 3, 4)),
    ROW1(causal_zero, V(2, 3, 4)),
    ROW1(cast, V(3)),
    ROW1(clone, V(3)),
    ROW1(dropout_apply, V(3, 4)),
};
static const grad_case rows[] = {
    ROW1(sum_all, V(2, 3, 4)),
    ROW1(sum, V(2, 3, 4)),
    ROW1(sum_keep, V(2, 3, 4)),
    ROW1(max_all, D(2, 3, 4)),
    ROW1(max, D(2, 3, 4)),
    ROW1(max_keep, D(2, 3, 4)),
    ROW1(mean, V(2, 3, 4)),
    ROW1(sum_to, V(2, 3, 4)),
    ROW1(softmax, V(2, 3, 4)),
    ROW1(softmax, V(3, 4)),
    ROW2(softmax_grad, V(2, 3, 2), V(2, 3, 2)),
    ROW1(log_softmax, V(3, 4)),
    ROW2(log_softmax_grad, V(3, 4), V(3, 4)),
    ROW3(layer_norm, V(2, 3, 5), V(5), V(5)),
    ROW1(norm, V(3, 5)),
    ROW2(norm_both, V(3, 5), V(5)),
    ROW3(norm_grad, V(3, 5), V(3, 5), P(3)),
    ROW1(cross_entropy, V(3, 5)),
    ROW1(nll_both, V(3, 5)),
    ROW3(nll_rows_grad, V(3, 5), P(3), V(3)),
};
static const grad_case movement[] = {
    ROW1(reshape, V(2, 3, 4)), ROW1(reshape_copy, V(2, 3, 4)), ROW1(permute, V(2, 3, 4)),
    ROW1(expand, V(2, 1, 4)),  ROW1(slice, V(2, 7)),           ROW1(pad_slice, V(2, 3, 4)),
    ROW1(flatten, V(2, 3, 4)),
};
static const grad_case contractions[] = {
    ROW2(bmm, V(3, 4), V(4, 2)),
    ROW2(bmm, V(2, 3, 4), V(2, 4, 2)),
    ROW2(matmul, V(4), V(4)),
    ROW2(matmul, V(4), V(4, 3)),
    ROW2(matmul, V(3, 4), V(4)),
    ROW2(matmul, V(2, 3, 4), V(4, 2)),
    ROW2(matmul, V(2, 1, 3, 4), V(5, 4, 2)),
    ROW2(matmul, V(4), V(2, 4, 3)),
    ROW2(matmul, V(2, 3, 4), V(4)),
    ROW3(linear, V(2, 3, 4), V(5, 4), V(5)),
    ROW3(linear, V(4), V(5, 4), V(5)),
    ROW2(linear_no_bias, V(3, 4), V(5, 4)),
    ROW3(conv2d, V(2, 2, 5, 6), V(3, 2, 3, 2), V(3)),
    ROW2(conv2d_dx, V(2, 3, 3, 5), V(3, 2, 3, 2)),
    ROW2(conv2d_dw, V(2, 3, 3, 5), V(2, 2, 5, 6)),
    ROW1(max_pool2d, D(2, 2, 4, 6)),
    ROW1(max_pool2d_overlap, D(1, 2, 5, 5)),
    ROW1(embedding, V(5, 3)),
    ROW1(embedding_grad, V(2, 3, 3)),
    ROW3(attention_causal, V(1, 2, 3, 4), V(1, 2, 3, 4), V(1, 2, 3, 4)),
    ROW3(attention, V(1, 2, 3, 4), V(1, 2, 5, 4), V(1, 2, 5, 4)),
};

/* ---- differences ---------------------------------------------------------------------------------------------------- */

static T *make(wk_ctx *c, fill how, int ndim, const int64_t *size) {
    int64_t n = 1;
    for (int i = 0; i < ndim; i++)
        n *= size[i];
    const int64_t middle = n / 2;
    float *v = malloc((size_t)n * sizeof *v);
    if (!v)
        abort();
    wkt_fill_uniform(v, (size_t)n, how == POSITIVE ? 0.5 : -2, 2);
    for (int64_t i = 0; how == SPACED && i < n; i++)
        v[i] = 0.1f * (float)(i - middle) + (n % 2 ? 0.08f : 0.03f); /* odd and even tensors never tie */
    for (int64_t i = n - 1; how == SPACED && i > 0; i--) {
        int64_t j = (int64_t)wkt_below((uint64_t)i + 1);
        float t = v[i];
        v[i] = v[j];
        v[j] = t;
    }
    wk_tensor *t = wk_from_data(c, WK_F32, ndim, size, v);
    free(v);
    return wki_slot(t);
}

/* A function to differentiate: f itself, or (wrt >= 0) its gradient with respect to input wrt, in which x[n] is the weight
   of the outputs. */
typedef struct subject {
    const env *e;
    const grad_case *k;
    int wrt;
} subject;

static T *gradient(T *y, T *w, T *x, bool create_graph) {
    wk_tensor *root = wki_handle(y), *weight = wki_handle(w), *in = wki_handle(x), *out = NULL;
    wk_backward_options o;
    wk_backward_options_init(&o);
    o.grads = &weight;
    o.inputs = &in;
    o.ninputs = 1;
    o.out = &out;
    o.create_graph = create_graph;
    wk_backward_ex(&root, 1, &o);
    return out ? wki_slot(out) : NULL;
}

static T *value(const subject *s, T *const *x) {
    T *y = s->k->f(s->e, x);
    return s->wrt < 0 ? y : gradient(y, x[s->k->n], x[s->wrt], true);
}

/* sum(w * value(x)), in double. */
static double weighted(const subject *s, T *const *x, const float *w) {
    wk_scope_begin(s->e->c);
    T *y = value(s, x);
    int64_t n = y->numel;
    float *v = malloc((size_t)n * sizeof *v);
    double sum = 0;
    if (!v || !wk_read(wki_handle(y), v, (size_t)n * sizeof *v))
        n = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)w[i] * (double)v[i];
    free(v);
    wk_scope_end(s->e->c);
    return sum;
}

/* Compares the gradient of input i with central differences of step h. The error of a difference is h^2 times a third
   derivative plus rounding, eps / h times the terms summed: 1e-2 keeps both below 5e-3 of the gradient's size here. */
static void compare(const subject *s, T *const *x, int i, T *w) {
    const float h = 1e-2f;
    wk_ctx *c = s->e->c;
    wk_scope_begin(c);
    T *g = gradient(value(s, x), w, x[i], false);
    size_t n = (size_t)x[i]->numel, nw = (size_t)w->numel;
    float *v = calloc(3 * n + nw, sizeof *v), *analytic = v + n, *wv = v + 3 * n;
    double worst = 0, scale = 1;
    wk_read(wki_handle(x[i]), v, n * sizeof *v);
    wk_read(wki_handle(w), wv, nw * sizeof *v);
    if (g)
        wk_read(wki_handle(g), analytic, n * sizeof *v);
    for (size_t j = 0; j < n; j++) {
        float old = v[j], up = old + h, down = old - h;
        v[j] = up;
        wk_write(wki_handle(x[i]), v, n * sizeof *v);
        double a = weighted(s, x, wv);
        v[j] = down;
        wk_write(wki_handle(x[i]), v, n * sizeof *v);
        double b = weighted(s, x, wv), d = (a - b) / ((double)up - (double)down);
        v[j] = old;
        worst = fmax(worst, isnan(d) ? INFINITY : fabs(d - (double)analytic[j]));
        scale = fmax(scale, fabs(d));
    }
    wk_write(wki_handle(x[i]), v, n * sizeof *v);
    if (wk_failed(c) || !(worst <= 5e-3 * scale))
        FAIL("%s, derivative %d, input %d: error %.3g of %.3g; %s", s->k->name, s->wrt < 0 ? 1 : 2, i, worst,
             scale, wk_message(c));
    wk_error_take(c, NULL);
    free(v);
    wk_scope_end(c);
}

static void check_case(const env *e, const grad_case *k) {
    wk_ctx *c = e->c;
    T *x[MAX_X + 1];
    subject s = {e, k, -1};
    wk_scope_begin(c);
    for (int i = 0; i < k->n; i++) {
        x[i] = make(c, k->in[i].how, k->in[i].ndim, k->in[i].size);
        wk_requires_grad(wki_handle(x[i]), true);
    }
    T *y = value(&s, x);
    x[k->n] = make(c, POSITIVE, y->ndim, y->size);
    for (int i = 0; i < k->n; i++)
        compare(&s, x, i, x[k->n]);
    wk_requires_grad(wki_handle(x[k->n]), true);
    for (s.wrt = 0; s.wrt < k->n; s.wrt++) {
        T *g = value(&s, x);
        if (!g || !wk_needs_grad(wki_handle(g))) /* the gradient is the weight itself, or 0 */
            continue;
        T *w = make(c, POSITIVE, g->ndim, g->size);
        for (int i = 0; i <= k->n; i++)
            compare(&s, x, i, w);
    }
    wk_scope_end(c);
}

static void check_all(const grad_case *k, size_t n) {
    env e = {.c = wk_ctx_new(NULL)};
    REQUIRE(e.c);
    e.mask = wki_gt(e.c, make(e.c, VALUES, 2, LIST(3, 4)), make(e.c, VALUES, 1, LIST(1)));
    e.idx = wki_slot(wk_from_data(e.c, WK_I64, 2, LIST(2, 3), LIST(0, 4, 1, 1, 3, 4)));
    e.target = wki_slot(wk_from_data(e.c, WK_I64, 1, LIST(3), LIST(0, 4, 2)));
    for (size_t i = 0; i < n; i++)
        check_case(&e, &k[i]);
    CHECK_STR(wk_message(e.c), "");
    wk_ctx_free(e.c);
}

TEST(op_gradients, elementwise) { check_all(elementwise, sizeof elementwise / sizeof *elementwise); }
TEST(op_gradients, rows) { check_all(rows, sizeof rows / sizeof *rows); }
TEST(op_gradients, movement) { check_all(movement, sizeof movement / sizeof *movement); }
TEST(op_gradients, contractions) { check_all(contractions, sizeof contractions / sizeof *contractions); }

/* ---- slow twins ----------------------------------------------------------------------------------------------------- */

static void same(wk_ctx *c, const char *what, T *a, T *b) {
    bool shapes = a->dtype == b->dtype && a->ndim == b->ndim;
    for (int i = 0; shapes && i < a->ndim; i++)
        shapes = a->size[i] == b->size[i];
    if (wk_failed(c) || !shapes) {
        FAIL("%s: shapes or dtypes differ; %s", what, wk_message(c));
        wk_error_take(c, NULL);
        return;
    }
    size_t n = (size_t)a->numel;
    float *v = malloc((2 * n + 1) * sizeof *v);
    wk_read(wki_handle(wki_cast(c, a, WK_F32)), v, n * sizeof *v);
    wk_read(wki_handle(wki_cast(c, b, WK_F32)), v + n, n * sizeof *v);
    /* at most 100 terms of size below 4: 100 * 4 * eps */
    if (!CHECK_NEAR_F32(v, v + n, n, 5e-5, 0))
        FAIL("%s differs from its reference", what);
    free(v);
}

#define TWINS(op, ...) same(c, #op, wki_##op(c, __VA_ARGS__), wki_ref_##op(c, __VA_ARGS__))

TEST(op_references, agree) {
    wk_ctx *c = wk_ctx_new(NULL);
    REQUIRE(c);
    T *x = make(c, VALUES, 4, LIST(2, 3, 7, 6)), *w = make(c, VALUES, 4, LIST(4, 3, 3, 2)),
      *b = make(c, VALUES, 1, LIST(4));
    T *y = wki_conv2d(c, x, w, b, 2, 1, 1, 1), *g = make(c, VALUES, 4, y->size);
    TWINS(conv2d, x, w, b, 2, 1, 1, 1);
    TWINS(conv2d_dx, g, w, 7, 6, 2, 1, 1, 1);
    TWINS(conv2d_dw, g, x, 3, 2, 2, 1, 1, 1);
    T *ties = wki_full_like(c, x, 1), *idx, *ref_idx;
    same(c, "max_pool2d ties", wki_max_pool2d(c, ties, 3, 3, 1, 1, 1, 1, &idx),
         wki_ref_max_pool2d(c, ties, 3, 3, 1, 1, 1, 1, &ref_idx));
    same(c, "max_pool2d ties idx", idx, ref_idx);
    T *p = wki_max_pool2d(c, x, 3, 2, 2, 2, 1, 1, &idx), *pg = make(c, VALUES, 4, p->size);
    same(c, "max_pool2d", p, wki_ref_max_pool2d(c, x, 3, 2, 2, 2, 1, 1, &ref_idx));
    same(c, "max_pool2d idx", idx, ref_idx);
    TWINS(max_pool2d_grad, pg, idx, 7, 6);
    TWINS(max_pool2d_gather, x, idx);
    T *rows5 = wki_slot(wk_from_data(c, WK_I64, 2, LIST(2, 3), LIST(0, 4, 1, 1, 3, 4)));
    T *table = make(c, VALUES, 2, LIST(5, 4)), *x3 = make(c, VALUES, 3, LIST(2, 3, 4));
    T *bias = make(c, VALUES, 1, LIST(5)), *none = make(c, VALUES, 2, LIST(0, 4)),
      *right = make(c, VALUES, 3, LIST(2, 4, 5));
    TWINS(embedding, table, rows5);
    TWINS(embedding_grad, x3, rows5, 5);
    TWINS(linear, x3, table, NULL);
    TWINS(linear, x3, table, bias);
    TWINS(linear, none, table, NULL);
    TWINS(bmm, x3, right);
    TWINS(pad_slice, x3, 3, LIST(2, 9, 4), 1, 1, 3);
    TWINS(copy_wide, wki_transpose(c, rows5, 0, 1));
    wk_ctx_free(c);
}
