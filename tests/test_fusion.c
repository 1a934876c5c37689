/* Programs that the compiler once got wrong, found by random programs and kept small: compiled equals eager bit for bit.
 * Public API alone. */
#include <stdlib.h>
#include <string.h>

#include "harness.h"
#include "util_api.h"

enum { MAX_OUT = 4 };

/* Outputs of fn on fresh normal inputs of these shapes, eager and compiled; both twice. */
static void check_same(wk_fn fn, int nin, const int (*shape)[3], int nout) {
    wk_ctx *c = api_ctx(false);
    wk_compiled *f = wk_compile(c, fn, NULL, NULL);
    for (int round = 0; round < 2; round++) {
        wk_tensor *in[4], *out[2][MAX_OUT] = {{0}};
        wk_scope_begin(c);
        for (int i = 0; i < nin; i++) {
            int64_t size[2] = {shape[i][1], shape[i][2]};
            in[i] = api_normal(c, shape[i][0], size);
        }
        fn(c, NULL, in, nin, out[0], nout);
        wk_call_n(f, in, nin, out[1], nout);
        for (int i = 0; i < nout && !wk_failed(c); i++) {
            float *a = api_read(out[0][i]), *b = api_read(out[1][i]);
            CHECK_MEM(b, a, (size_t)wk_numel(out[0][i]) * sizeof *a);
            free(a);
            free(b);
        }
        wk_scope_end(c);
    }
    api_end(c);
}

#define PROGRAM(name)                                                                                        \
    static void name(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout)

/* A value per row that is made before the op which gives the loop its rows. */
PROGRAM(targets_made_inside) {
    (void)self, (void)nin, (void)nout;
    wk_tensor *logits = wk_mul_scalar(in[0], 0.5), *target = wk_full(c, WK_I64, SIZE(2), 1);
    out[0] = wk_cross_entropy(wk_add(logits, in[1]), target);
}
TEST(fusion, row_values_come_before_the_reduction) {
    check_same(targets_made_inside, 2, (const int[][3]){{2, 2, 7}, {1, 7}}, 1);
}

/* A reduction of a number is over that one element, also where its loop has columns. */
PROGRAM(sums_of_sums) {
    (void)c, (void)self, (void)nin, (void)nout;
    wk_tensor *s = wk_sum(in[0], NULL, 0, false);
    out[0] = wk_sum(wk_neg(wk_mean(s, NULL, 0, true)), NULL, 0, false);
    out[1] = wk_max(wk_neg(s), NULL, 0, false);
    out[2] = wk_softmax(s, 0);
}
TEST(fusion, reductions_of_a_number) { check_same(sums_of_sums, 1, (const int[][3]){{2, 33, 3}}, 3); }

/* With one column a value per element lies in memory as one per row does; only one of them is known to the rows. */
PROGRAM(one_column) {
    (void)c, (void)self, (void)nin, (void)nout;
    wk_tensor *y = wk_layer_norm(in[0], NULL, NULL, 1e-3);
    out[0] = wk_add_scalar(wk_reshape(y, SIZE(4)), 1);
}
TEST(fusion, elements_of_one_column_are_no_row_values) {
    check_same(one_column, 1, (const int[][3]){{2, 4, 1}}, 1);
}

/* ---- in-place writes and reads ------------------------------------------------------------------------------------- */

typedef struct written {
    wk_tensor *state;
    float seen;
} written;

PROGRAM(writes_and_returns_a_record) {
    (void)c, (void)nin, (void)nout;
    written *w = self;
    wk_copy_(w->state, in[1]);
    out[0] = wk_mul(in[0], in[0]);
}
TEST(fusion, a_read_after_the_call_sees_a_pending_write) {
    wk_ctx *c = api_ctx(false);
    written w = {.state = wk_zeros(c, WK_F32, SIZE(3))};
    wk_tensor *in[2] = {wk_requires_grad(wk_ones(c, WK_F32, SIZE(2)), true), wk_ones(c, WK_F32, SIZE(3))};
    wk_call(wk_compile(c, writes_and_returns_a_record, &w, NULL), in, 2);
    float *v = api_read(w.state);
    CHECK(v[0] == 1 && v[1] == 1 && v[2] == 1);
    free(v);
    api_end(c);
}

PROGRAM(writes_then_reads) {
    (void)c, (void)nin, (void)nout;
    written *w = self;
    wk_copy_(w->state, in[0]);
    float v[3] = {0};
    wk_read(w->state, v, sizeof v);
    w->seen = v[0];
    out[0] = wk_neg(in[0]);
}
TEST(fusion, a_read_in_the_middle_sees_a_pending_write) {
    wk_ctx *c = api_ctx(false);
    written w = {.state = wk_zeros(c, WK_F32, SIZE(3))};
    wk_tensor *in = wk_ones(c, WK_F32, SIZE(3));
    wk_call(wk_compile(c, writes_then_reads, &w, NULL), &in, 1);
    CHECK(w.seen == 1);
    api_end(c);
}

TEST(fusion, an_empty_tensor_is_not_an_expanded_one) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *x = wk_zeros(c, WK_F32, SIZE(3, 2, 0)); /* its strides are 0 */
    CHECK(wk_copy_(x, wk_ones(c, WK_F32, SIZE(2, 0))) == x);
    api_end(c);
}

/* One element for all of a vector's lanes, given as an operand or as an attribute, keeps its sign when it is 0. */
PROGRAM(negative_zeros) {
    (void)c, (void)self, (void)nin, (void)nout;
    wk_tensor *zero = wk_mul_scalar(in[0], -0.0);
    wk_tensor *wide = wk_expand(wk_mul_scalar(wk_abs(in[1]), -0.0), SIZE(40));
    out[0] = wk_mul(wk_add(wide, wk_neg(wk_abs(zero))), in[0]);
    out[1] = wk_masked_fill(zero, wk_lt(in[0], in[1]), -0.0);
}
TEST(fusion, negative_zeros) { check_same(negative_zeros, 2, (const int[][3]){{1, 40}, {1, 1}}, 2); }
