/* The case table as data, made from tests/cases.def, and what it must hold: a row for every op, and a gradient for every input
 * that has one. */
#include "cases_ref.h"
#include "harness.h"

#define NDIM(...) (uint8_t)(sizeof((int64_t[]){0, ##__VA_ARGS__}) / sizeof(int64_t) - 1)
#define V(...)                                                                                               \
    {                                                                                                        \
        .how = CASE_VALUES, .dtype = WK_F32, .ndim = NDIM(__VA_ARGS__), .size = { __VA_ARGS__ }              \
    }
#define U(lo_, hi_, ...)                                                                                     \
    {                                                                                                        \
        .how = CASE_VALUES, .dtype = WK_F32, .ndim = NDIM(__VA_ARGS__), .lo = lo_, .hi = hi_, .size = {      \
            __VA_ARGS__                                                                                      \
        }                                                                                                    \
    }
#define D(...)                                                                                               \
    {                                                                                                        \
        .how = CASE_SPACED, .dtype = WK_F32, .ndim = NDIM(__VA_ARGS__), .size = { __VA_ARGS__ }              \
    }
#define T(dtype_, lo_, hi_, ...)                                                                             \
    {                                                                                                        \
        .how = CASE_INTS, .dtype = WK_##dtype_, .ndim = NDIM(__VA_ARGS__), .lo = lo_, .hi = hi_, .size = {   \
            __VA_ARGS__                                                                                      \
        }                                                                                                    \
    }
#define RN(lo, hi, ...) T(F32, lo, hi, __VA_ARGS__)
#define M(...) T(BOOL, 0, 1, __VA_ARGS__)
#define N(count, ...) T(I64, 0, (count)-1, __VA_ARGS__)
#define W(count, ...) T(I32, 0, (count)-1, __VA_ARGS__)
#define L(...)                                                                                               \
    (const int64_t[]) { __VA_ARGS__ }
#define F(v) ((double)(float)(v)) /* VALUE attributes reach loops as floats */

/* What a row calls. */
#define CASE(op, suffix, flags, in, call, reference)                                                         \
    static void call_##op##_##suffix(wk_ctx *c, wki_tensor *const *x, wki_tensor **y) {                      \
        (void)c, (void)x, (void)y;                                                                           \
        call;                                                                                                \
    }                                                                                                        \
    static int ref_of_##op##_##suffix(const dten *x, dten *y) {                                              \
        (void)x;                                                                                             \
        return reference;                                                                                    \
    }
#define INPLACE(op, suffix, writes, in, call, reference)                                                     \
    static void call_##op##_##suffix(wk_ctx *c, wki_tensor *const *x, wki_tensor **y) {                      \
        y[0] = (call) ? x[0] : wki_poison(c);                                                                \
    }                                                                                                        \
    static int ref_of_##op##_##suffix(const dten *x, dten *y) { return reference; }
#define CREATE(op, suffix, call, reference) CASE(op, suffix, 0, , call, reference)
#include "cases.def"

/* The rows. */
#define IN(...)                                                                                              \
    (const case_in[]) { __VA_ARGS__ }
#define CASE(op_, suffix, flags_, in_, code, reference)                                                      \
    {.name = #op_ "/" #suffix,                                                                               \
     .op = WKI_OP_##op_,                                                                                     \
     .flags = (flags_),                                                                                      \
     .nin = sizeof(in_) / sizeof(case_in),                                                                   \
     .in = in_,                                                                                              \
     .call = call_##op_##_##suffix,                                                                          \
     .ref = ref_of_##op_##_##suffix},
#define INPLACE(op_, suffix, writes_, in_, code, reference)                                                  \
    {.name = #op_ "/" #suffix,                                                                               \
     .op = WKI_OP_##op_,                                                                                     \
     .flags = CASE_NO_GRAD | (WKI_OP_##op_ == WKI_OP_adamw_ ? CASE_NO_LARGE : 0),                            \
     .nin = sizeof(in_) / sizeof(case_in),                                                                   \
     .in = in_,                                                                                              \
     .writes = (writes_),                                                                                    \
     .call = call_##op_##_##suffix,                                                                          \
     .ref = ref_of_##op_##_##suffix},
#define CREATE(op_, suffix, code, reference)                                                                 \
    {.name = #op_ "/" #suffix,                                                                               \
     .op = WKI_OP_##op_,                                                                                     \
     .call = call_##op_##_##suffix,                                                                          \
     .ref = ref_of_##op_##_##suffix},
const op_case op_cases[] = {
#include "cases.def"
};
const int op_case_count = sizeof op_cases / sizeof *op_cases;

bool case_differentiable(const op_case *k, int input) {
    const wki_op *op = &wki_ops[k->op];
    if (k->flags & CASE_NO_GRAD || k->in[input].dtype != WK_F32)
        return false;
    return op->klass == WKI_COMPOSITE || op->diff;
}

TEST(case_table, every_op_has_a_row) {
    for (int op = 0; op < wki_op_count; op++) {
        bool found = false;
        for (int i = 0; i < op_case_count; i++)
            found |= op_cases[i].op == op;
        if (!found)
            FAIL("op %s has no row in tests/cases.def", wki_ops[op].name);
    }
}

/* Inputs that a gradient flows to appear in a row that differentiates. An op's own row calls it with as many inputs. */
TEST(case_table, every_gradient_has_a_row) {
    for (int op = 0; op < wki_op_count; op++) {
        uint32_t seen = 0;
        for (int i = 0; i < op_case_count; i++)
            for (int j = 0; op_cases[i].op == op && j < op_cases[i].nin; j++)
                if (case_differentiable(&op_cases[i], j) && case_numel(&op_cases[i]))
                    seen |= 1u << j;
        if (wki_ops[op].diff & ~seen)
            FAIL("op %s: no row differentiates with respect to inputs %#x", wki_ops[op].name,
                 (unsigned)(wki_ops[op].diff & ~seen));
    }
}

TEST(case_table, names_differ) {
    for (int i = 0; i < op_case_count; i++)
        for (int j = 0; j < i; j++)
            if (!strcmp(op_cases[i].name, op_cases[j].name))
                FAIL("two rows named %s", op_cases[i].name);
}
