/* The slow twins of ops/reference.c: each op that has one gives the same with its kernels. Tests of internals. */
#include <stdlib.h>

#include "core/core.h"
#include "harness.h"
#include "ops_gen.h"

typedef wki_tensor T;

#define LIST(...)                                                                                            \
    (const int64_t[]) { __VA_ARGS__ }

/* f32, uniform in -2..2. */
static T *make(wk_ctx *c, int ndim, const int64_t *size) {
    int64_t n = 1;
    for (int i = 0; i < ndim; i++)
        n *= size[i];
    float *v = malloc((size_t)n * sizeof *v + 1);
    if (!v)
        abort();
    wkt_fill_uniform(v, (size_t)n, -2, 2);
    wk_tensor *t = wk_from_data(c, WK_F32, ndim, size, v);
    free(v);
    return wki_slot(t);
}

static void same(wk_ctx *c, const char *what, T *a, T *b) {
    bool shapes = a->dtype == b->dtype && wki_shapes_equal(a, b);
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

#define TWINS(op, ...)                                                                                       \
    (seen[WKI_OP_##op] = true, same(c, #op, wki_##op(c, __VA_ARGS__), wki_ref_##op(c, __VA_ARGS__)))

static void compare_pools(wk_ctx *c, T *x, int64_t kh, int64_t kw, int64_t stride, T **y, T **idx) {
    T *ref_idx, *ref = wki_ref_max_pool2d(c, x, kh, kw, stride, stride, 1, 1, &ref_idx);
    *y = wki_max_pool2d(c, x, kh, kw, stride, stride, 1, 1, idx);
    same(c, "max_pool2d", *y, ref);
    same(c, "max_pool2d idx", *idx, ref_idx);
}

TEST(references, agree) {
    wk_ctx *c = wk_ctx_new(NULL);
    REQUIRE(c);
    bool seen[WKI_OP_COUNT] = {[WKI_OP_max_pool2d] = true};
    T *x = make(c, 4, LIST(2, 3, 7, 6)), *w = make(c, 4, LIST(4, 3, 3, 2)), *b = make(c, 1, LIST(4));
    T *g = make(c, 4, wki_conv2d(c, x, w, b, 2, 1, 1, 1)->size), *p, *idx;
    TWINS(conv2d, x, w, b, 2, 1, 1, 1);
    TWINS(conv2d_dx, g, w, 7, 6, 2, 1, 1, 1);
    TWINS(conv2d_dw, g, x, 3, 2, 2, 1, 1, 1);
    compare_pools(c, wki_full_like(c, x, 1), 3, 3, 1, &p, &idx); /* all equal */
    compare_pools(c, x, 3, 2, 2, &p, &idx);
    T *pg = make(c, 4, p->size);
    TWINS(max_pool2d_grad, pg, idx, 7, 6);
    TWINS(max_pool2d_gather, x, idx);
    T *rows5 = wki_slot(wk_from_data(c, WK_I64, 2, LIST(2, 3), LIST(0, 4, 1, 1, 3, 4)));
    T *table = make(c, 2, LIST(5, 4)), *x3 = make(c, 3, LIST(2, 3, 4)), *bias = make(c, 1, LIST(5)),
      *none = make(c, 2, LIST(0, 4)), *right = make(c, 3, LIST(2, 4, 5));
    TWINS(embedding, table, rows5);
    TWINS(embedding_grad, x3, rows5, 5);
    TWINS(linear, x3, table, NULL);
    TWINS(linear, x3, table, bias);
    TWINS(linear, none, table, NULL);
    TWINS(linear_relu, x3, table, bias);
    TWINS(bmm, x3, right);
    TWINS(pad_slice, x3, 3, LIST(2, 9, 4), 1, 1, 3);
    TWINS(copy_wide, wki_transpose(c, rows5, 0, 1));
    for (int op = 0; op < WKI_OP_COUNT; op++)
        if (wki_op_references[op] && !seen[op])
            FAIL("the slow twin of %s is not compared", wki_ops[op].name);
    wk_ctx_free(c);
}
