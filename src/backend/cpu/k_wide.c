/* What loop programs, whose numbers have 32 bits, cannot say of i64 and f64: conversions that keep all their bits, and
 * comparisons of i64. Calls base/pool. */
#include <math.h>
#include <string.h>

#include "backend/cpu/k_util.h"
#include "backend/kernels.h"
#include "ops_gen.h"

enum { LOT = 16384 }; /* elements that a thread is worth */

/* ---- conversion ---------------------------------------------------------------------------------------- */

typedef union number {
    int64_t i; /* of integers and bool */
    double f;  /* of floats */
} number;

static bool is_float(int dtype) { return wki_dtype_kind((wk_dtype)dtype) == 'F'; }

static number load(const char *p, int dtype) {
    number v = {0};
    float f;
    int32_t i;
    switch (dtype) {
    case WK_F32:
        memcpy(&f, p, sizeof f);
        v.f = (double)f;
        break;
    case WK_F64:
    case WK_I64:
        memcpy(&v, p, sizeof v);
        break;
    case WK_I32:
        memcpy(&i, p, sizeof i);
        v.i = i;
        break;
    default: /* u8, bool */
        v.i = (uint8_t)*p;
        break;
    }
    return v;
}

/* Towards zero; NaN is 0, and what is too large the nearest there is. */
static int64_t whole(double v) {
    return isnan(v) ? 0 : v >= 0x1p63 ? INT64_MAX : v < -0x1p63 ? INT64_MIN : (int64_t)v;
}

static int32_t narrow(int64_t v) {
    return v > INT32_MAX ? INT32_MAX : v < INT32_MIN ? INT32_MIN : (int32_t)v;
}

static void store(char *p, int dtype, number v, bool floats) {
    int64_t i = floats ? whole(v.f) : v.i;
    int32_t i32 = narrow(i);
    float f32 = floats ? (float)v.f : (float)v.i;
    double f64 = floats ? v.f : (double)v.i;
    switch (dtype) {
    case WK_F32:
        memcpy(p, &f32, sizeof f32);
        break;
    case WK_F64:
        memcpy(p, &f64, sizeof f64);
        break;
    case WK_I64:
        memcpy(p, &i, sizeof i);
        break;
    case WK_I32:
        memcpy(p, &i32, sizeof i32);
        break;
    case WK_U8:
        *p = (char)(uint8_t)i32;
        break;
    default: /* bool */
        *p = floats ? v.f != 0 : v.i != 0;
        break;
    }
}

static void convert(void *arg, int64_t begin, int64_t end, int worker) {
    const wki_launch *l = arg;
    const wki_view *x = &l->in[0], *y = &l->out[0];
    int64_t from = (int64_t)wki_dtype_size((wk_dtype)x->dtype),
            to = (int64_t)wki_dtype_size((wk_dtype)y->dtype);
    bool floats = is_float(x->dtype);
    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        int64_t at = x->plain ? i : wki_k_offset(x, x->ndim, i);
        store((char *)y->data + i * to, y->dtype, load((const char *)x->data + at * from, x->dtype), floats);
    }
}

bool wki_k_cast_wide_reference_ok(const wki_launch *l) {
    (void)l;
    return true;
}

bool wki_k_cast_wide_reference_run(const wki_launch *l) {
    wki_launch job = *l;
    wki_pool_for(l->c->rt->pool, l->out[0].numel, convert, &job, LOT);
    return true;
}

/* ---- comparison ---------------------------------------------------------------------------------------- */

typedef struct comparison {
    const wki_view *y;
    const int64_t *a, *b;
    wki_view va, vb; /* in y's shape */
    int op;
} comparison;

static bool holds(int op, int64_t a, int64_t b) {
    switch (op) {
    case WKI_OP_lt:
        return a < b;
    case WKI_OP_le:
        return a <= b;
    case WKI_OP_gt:
        return a > b;
    case WKI_OP_ge:
        return a >= b;
    case WKI_OP_eq:
        return a == b;
    default:
        return a != b;
    }
}

static void compare(void *arg, int64_t begin, int64_t end, int worker) {
    const comparison *j = arg;
    uint8_t *y = j->y->data;
    int nd = j->y->ndim;
    (void)worker;
    for (int64_t i = begin; i < end; i++)
        y[i] = holds(j->op, j->a[wki_k_offset(&j->va, nd, i)], j->b[wki_k_offset(&j->vb, nd, i)]);
}

bool wki_k_compare_wide_reference_ok(const wki_launch *l) {
    return wki_k_needs(l, l->in[0].dtype == WK_I64 && l->in[1].dtype == WK_I64, "i64");
}

bool wki_k_compare_wide_reference_run(const wki_launch *l) {
    const wki_view *y = &l->out[0];
    int64_t sa[WK_MAX_DIMS], sb[WK_MAX_DIMS];
    comparison j = {.y = y, .a = l->in[0].data, .b = l->in[1].data, .op = l->op->id};
    wki_k_broadcast(&l->in[0], y, sa);
    wki_k_broadcast(&l->in[1], y, sb);
    j.va = j.vb = *y;
    j.va.stride = sa;
    j.vb.stride = sb;
    wki_pool_for(l->c->rt->pool, y->numel, compare, &j, LOT);
    return true;
}
