/* Every row of the case table: results against the reference in double, in every layout and with special and large values;
 * compiled against eager, bit for bit, alone, fused with neighbours and with gradients; the same on a GPU, within tolerances.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cases.h"
#include "harness.h"

/* ---- against the reference ------------------------------------------------------------------------------------------- */

/* One call as a function to compile; outputs: all of the row's. */
static void call_row(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    const case_instance *t = self;
    wki_tensor *x[CASE_MAX_IN] = {0}, *y[CASE_MAX_OUT] = {0};
    for (int i = 0; i < nin; i++)
        x[i] = wki_slot(in[i]);
    t->k->call(c, x, y);
    for (int i = 0, j = 0; t->k->writes && y[0] != wki_poison(c) && i < nin; i++)
        if (t->k->writes >> i & 1)
            y[j++] = x[i];
    for (int j = 0; j < nout; j++)
        out[j] = wki_handle(y[j] ? y[j] : wki_poison(c));
}

static void check_against_reference(wk_ctx *c, const op_case *k, case_values values,
                                    const case_layout *layout, bool compiled, double slack, const char *how) {
    case_instance t;
    wki_tensor *x[CASE_MAX_IN];
    wk_tensor *in[CASE_MAX_IN], *out[CASE_MAX_OUT] = {0};
    double repeated = 1; /* equal terms of a sum all round the same way */
    case_open(&t, k, values, layout);
    wk_scope_begin(c);
    case_inputs(c, &t, x);
    for (int i = 0; i < k->nin; i++)
        in[i] = wki_handle(x[i]);
    wk_seed(c, CASE_SEED);
    if (compiled) {
        wk_compiled *f = wk_compile(c, call_row, &t, NULL);
        wk_call_n(f, in, k->nin, out, t.nout);
        wk_compiled_free(f);
    } else {
        call_row(c, &t, in, k->nin, out, t.nout);
    }
    for (int i = 0; i < k->nin; i++)
        if (t.layout[i] == CASE_EXPANDED)
            repeated = 6;
    for (int j = 0; j < t.nout; j++)
        case_compare(&t, j, wki_slot(out[j]), slack * repeated, how);
    wk_scope_end(c);
    case_close(&t);
}

static void random_layouts(case_layout *layout) {
    for (int i = 0; i < CASE_MAX_IN; i++)
        layout[i] = (case_layout)wkt_below(CASE_LAYOUTS);
}

/* In quick runs large rows are left out. */
static bool wanted(const op_case *k) { return !wkt_quick() || case_numel(k) < 3000; }

/* On a GPU almost every row needs a kernel compiled, so tests take a part of the rows each. */
enum { PARTS = 4, ALL_PARTS = -1 };

static bool in_part(int row, int part) { return part == ALL_PARTS || row % PARTS == part; }

static void check_layouts(wk_device d, bool compiled, double slack, int part) {
    wk_ctx *c = case_context(d);
    case_layout layout[CASE_MAX_IN];
    for (int i = 0; c && i < op_case_count; i++)
        for (int l = 0; in_part(i, part) && wanted(&op_cases[i]) && l < CASE_LAYOUTS + 1; l++) {
            random_layouts(layout);
            for (int j = 0; j < CASE_MAX_IN && l < CASE_LAYOUTS; j++)
                layout[j] = (case_layout)l;
            check_against_reference(c, &op_cases[i], CASE_NORMAL, layout, compiled, slack, "values");
        }
    if (c)
        wk_ctx_free(c);
}

static void check_values(wk_device d, case_values values, uint8_t unless, bool compiled, double slack,
                         const char *how, int part) {
    wk_ctx *c = case_context(d);
    case_layout layout[CASE_MAX_IN];
    for (int i = 0; c && i < op_case_count; i++) {
        if (op_cases[i].flags & unless || !in_part(i, part) || !wanted(&op_cases[i]))
            continue;
        random_layouts(layout);
        check_against_reference(c, &op_cases[i], values, NULL, compiled, slack, how);
        check_against_reference(c, &op_cases[i], values, layout, compiled, slack, how);
    }
    if (c)
        wk_ctx_free(c);
}

TEST(cases, in_every_layout) { check_layouts(case_device(), false, 1, ALL_PARTS); }
TEST(cases, special_values) {
    check_values(case_device(), CASE_SPECIAL, CASE_NO_SPECIAL, false, 1, "special values", ALL_PARTS);
}
TEST(cases, large_values) {
    check_values(case_device(), CASE_LARGE, CASE_NO_LARGE, false, 1, "large values", ALL_PARTS);
}

/* A GPU's exp, log and the like may be off by a few units more, and its sums are made in other orders. */
#define CUDA_TESTS(part)                                                                                     \
    TEST(cuda_cases, in_every_layout_##part) { check_layouts(WK_CUDA, false, 4, part); }                     \
    TEST(cuda_cases, compiled_in_every_layout_##part) { check_layouts(WK_CUDA, true, 4, part); }             \
    TEST(cuda_cases, special_values_##part) {                                                                \
        check_values(WK_CUDA, CASE_SPECIAL, CASE_NO_SPECIAL, false, 4, "special values", part);              \
    }                                                                                                        \
    TEST(cuda_cases, large_values_##part) {                                                                  \
        check_values(WK_CUDA, CASE_LARGE, CASE_NO_LARGE, true, 4, "large values", part);                     \
    }
CUDA_TESTS(0)
CUDA_TESTS(1)
CUDA_TESTS(2)
CUDA_TESTS(3)
