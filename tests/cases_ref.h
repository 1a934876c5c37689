/* References of the ops in double, used by the rows of tests/cases.def. Each fills y and returns the number of outputs.
 * Plain C, written from the ops' descriptions and not from their code. */
#pragma once
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cases.h"
#include "ops/prim_scalar.h"

static dten *new_out(dten *y, wk_dtype dtype, int ndim, const int64_t *size) {
    *y = (dten){.dtype = dtype, .ndim = ndim, .n = 1};
    for (int i = 0; i < ndim; i++)
        y->n *= y->size[i] = size[i];
    y->v = calloc((size_t)y->n + 1, sizeof *y->v);
    y->mag = calloc((size_t)y->n + 1, sizeof *y->mag);
    if (!y->v || !y->mag)
        abort();
    return y;
}

static dten *same_out(dten *y, const dten *x) { return new_out(y, x->dtype, x->ndim, x->size); }

/* Errors of a sum of n terms grow with log n in a tree, with sqrt n where it is a chain. */
static double length(int64_t n) { return 1 + sqrt((double)n); }

/* ---- elementwise ----------------------------------------------------------------------------------------------------- */

/* Place in x of element i of y, to whose shape x broadcasts. */
static int64_t broadcast_place(const dten *x, const dten *y, int64_t i) {
    int64_t at = 0, step = 1;
    for (int d = x->ndim - 1, e = y->ndim - 1; d >= 0; d--, e--) {
        int64_t k = i % y->size[e];
        i /= y->size[e];
        at += x->size[d] == 1 ? 0 : k * step;
        step *= x->size[d];
    }
    return at;
}

static void broadcast_out(dten *y, wk_dtype dtype, const dten *x, int nx) {
    int64_t size[WK_MAX_DIMS];
    int nd = 0;
    for (int k = 0; k < nx; k++)
        nd = x[k].ndim > nd ? x[k].ndim : nd;
    for (int i = 1; i <= nd; i++) {
        size[nd - i] = 1;
        for (int k = 0; k < nx; k++)
            if (x[k].ndim >= i && x[k].size[x[k].ndim - i] != 1)
                size[nd - i] = x[k].size[x[k].ndim - i];
    }
    new_out(y, dtype, nd, size);
}

static double element(const dten *x, int k, int nx, const dten *y, int64_t i) {
    return k < nx ? x[k].v[broadcast_place(&x[k], y, i)] : 0;
}

/* y = expression of p, q, r, the elements of up to three inputs; `big` is what errors are relative to. */
#define EACH_AS(dtype_, nx, expression, big)                                                                 \
    ({                                                                                                       \
        broadcast_out(y, dtype_, x, nx);                                                                     \
        for (int64_t i = 0; i < y->n; i++) {                                                                 \
            double p = element(x, 0, nx, y, i), q = element(x, 1, nx, y, i), r = element(x, 2, nx, y, i);    \
            (void)p, (void)q, (void)r;                                                                       \
            y->v[i] = (expression);                                                                          \
            y->mag[i] = (big);                                                                               \
        }                                                                                                    \
        1;                                                                                                   \
    })
#define EACH(nx, expression, big) EACH_AS(WK_F32, nx, expression, big)

static double larger(double a, double b) { return isnan(a) || isnan(b) ? NAN : a > b ? a : b; }
static double smaller(double a, double b) { return isnan(a) || isnan(b) ? NAN : a < b ? a : b; }
static double sign_of(double a) { return a == 0 ? 0 : a > 0 ? 1 : a < 0 ? -1 : a; }
static double normal_cdf(double x) { return 0.5 * erfc(-x * M_SQRT1_2); }
static double normal_pdf(double x) { return exp(-0.5 * x * x) * 0.39894228040143267794; }
static double gelu_of(double x) { return x * normal_cdf(x); }
static double gelu_slope(double x) { return normal_cdf(x) + x * normal_pdf(x); }
static double gelu_tanh_of(double x) {
    return 0.5 * x * (1 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
}
static double gelu_tanh_slope(double x) {
    double t = tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x));
    double du = 0.79788456080286535588 * (1 + 3 * 0.044715 * x * x);
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * du;
}

static int32_t to_int(double v) {
    return isnan(v) ? 0 : v >= INT32_MAX ? INT32_MAX : v <= INT32_MIN ? INT32_MIN : (int32_t)v;
}

/* Integers saturate; u8 wraps from 32 bits. */
static double converted(double v, wk_dtype from, wk_dtype to) {
    switch (to) {
    case WK_F64:
        return v;
    case WK_F32:
        return from == WK_F32 ? v : (double)(float)v; /* unrounded, for differences */
    case WK_BOOL:
        return v != 0;
    case WK_I64:
        return isnan(v) ? 0 : fmin(fmax(trunc(v), -0x1p63), 0x1p63) + 0.0;
    case WK_U8:
        return (double)(uint8_t)to_int(v);
    default:
        return (double)to_int(v);
    }
}

static int ref_cast(const dten *x, dten *y, wk_dtype to) {
    new_out(y, to, x->ndim, x->size);
    for (int64_t i = 0; i < y->n; i++)
        y->v[i] = converted(x->v[i], x->dtype, to);
    return 1;
}

/* dst keeps its dtype and shape; src broadcasts. */
static int ref_copy_into(const dten *x, dten *y) {
    same_out(y, &x[0]);
    for (int64_t i = 0; i < y->n; i++)
        y->v[i] = x[1].v[broadcast_place(&x[1], y, i)];
    return 1;
}

static int ref_same(const dten *x, dten *y) {
    same_out(y, x);
    memcpy(y->v, x->v, (size_t)x->n * sizeof *y->v);
    return 1;
}

static int ref_causal(const dten *x, dten *y, double fill) {
    int64_t keys = x->size[x->ndim - 1], queries = x->size[x->ndim - 2];
    ref_same(x, y);
    for (int64_t i = 0; i < y->n; i++)
        if (i % keys > i / keys % queries + keys - queries)
            y->v[i] = fill;
    return 1;
}

static int ref_full(dten *y, wk_dtype dtype, int ndim, const int64_t *size, double v) {
    new_out(y, dtype, ndim, size);
    for (int64_t i = 0; i < y->n; i++)
        y->v[i] = converted(v, WK_F32, dtype);
    return 1;
}

/* start + i * step; the op computes with both as floats and rounds once. */
static int ref_arange(dten *y, wk_dtype dtype, int64_t n, double start, double step) {
    new_out(y, dtype, 1, &n);
    for (int64_t i = 0; i < n; i++)
        y->v[i] = start + (double)i * step;
    return 1;
}

/* The first of the largest, or the first NaN, along dim. */
static int ref_argmax(const dten *x, dten *y, int dim, bool keepdim) {
    int64_t size[WK_MAX_DIMS] = {0}, inner = 1, n = x->ndim ? x->size[dim] : 1;
    int nd = 0;
    for (int d = 0; d < x->ndim; d++) {
        if (d != dim || keepdim)
            size[nd++] = d == dim ? 1 : x->size[d];
        inner *= d > dim ? x->size[d] : 1;
    }
    new_out(y, WK_I64, nd, size);
    for (int64_t i = 0; i < y->n; i++) {
        const double *v = x->v + i / inner * n * inner + i % inner;
        int64_t best = 0;
        for (int64_t k = 1; k < n && !isnan(v[best * inner]); k++)
            best = isnan(v[k * inner]) || v[k * inner] > v[best * inner] ? k : best;
        y->v[i] = (double)best;
    }
    return 1;
}

static int ref_random(dten *y, wk_dtype dtype, int ndim, const int64_t *size, double p) {
    new_out(y, dtype, ndim, size);
    for (int64_t i = 0; i < y->n; i++) {
        float u = wks_uniform(CASE_SEED, 0, (uint64_t)i);
        y->v[i] = dtype == WK_BOOL ? u >= (float)p
                  : p < 0          ? (double)wks_normal(CASE_SEED, 0, (uint64_t)i)
                                   : (double)u;
    }
    return 1;
}

static int ref_dropout(const dten *x, dten *y, double p) {
    same_out(y, x);
    for (int64_t i = 0; i < y->n; i++)
        y->v[i] =
            wks_uniform(CASE_SEED, 0, (uint64_t)i) >= (float)p ? x->v[i] * (double)(float)(1 / (1 - p)) : 0;
    return 1;
}

/* ---- rows ------------------------------------------------------------------------------------------------------------ */

/* Rows along a dimension: row r begins at first(r), its n elements are `step` apart. */
typedef struct lanes {
    int64_t rows, n, step;
} lanes;

static lanes lanes_of(const dten *x, int dim) {
    lanes l = {1, 1, 1};
    dim += dim < 0 ? x->ndim : 0;
    for (int i = 0; i < x->ndim; i++) {
        if (i == dim)
            l.n = x->size[i];
        else
            l.rows *= x->size[i];
        l.step *= i > dim ? x->size[i] : 1;
    }
    return l;
}

static int64_t first(const lanes *l, int64_t r) { return r / l->step * l->step * l->n + r % l->step; }

static int ref_reduce(const dten *x, dten *y, unsigned dims, bool keep, bool max, double scale) {
    int64_t size[WK_MAX_DIMS], terms = 1;
    int nd = 0;
    if (!dims)
        dims = (1u << x->ndim) - 1;
    for (int i = 0; i < x->ndim; i++) {
        if (!(dims >> i & 1))
            size[nd++] = x->size[i];
        else if (keep)
            size[nd++] = 1;
        terms *= dims >> i & 1 ? x->size[i] : 1;
    }
    new_out(y, WK_F32, nd, size);
    for (int64_t i = 0; max && i < y->n; i++)
        y->v[i] = -INFINITY;
    for (int64_t i = 0; i < x->n; i++) {
        int64_t at = 0, step = 1, rest = i;
        for (int d = x->ndim - 1; d >= 0; d--) {
            at += dims >> d & 1 ? 0 : rest % x->size[d] * step;
            step *= dims >> d & 1 ? 1 : x->size[d];
            rest /= x->size[d];
        }
        y->v[at] = max ? larger(y->v[at], x->v[i]) : y->v[at] + x->v[i];
        y->mag[at] += max ? 0 : fabs(x->v[i]) * length(terms);
    }
    for (int64_t i = 0; scale != 1 && i < y->n; i++) {
        y->v[i] *= scale;
        y->mag[i] *= scale;
    }
    return 1;
}

static int ref_mean(const dten *x, dten *y, unsigned dims, bool keep) {
    double n = 1;
    for (int i = 0; i < x->ndim; i++)
        n *= !dims || dims >> i & 1 ? (double)x->size[i] : 1;
    return ref_reduce(x, y, dims, keep, false, 1 / n);
}

static double row_max(const dten *x, const lanes *l, int64_t at) {
    double m = -INFINITY;
    for (int64_t k = 0; k < l->n; k++)
        m = larger(m, x->v[at + k * l->step]);
    return m;
}

/* exp of a rounded difference d is off by d eps: at most the 110 where f32 ends. */
static int ref_softmax(const dten *x, dten *y, int dim, bool logarithm) {
    lanes l = lanes_of(x, dim);
    same_out(y, x);
    for (int64_t r = 0; r < l.rows; r++) {
        int64_t at = first(&l, r);
        double m = row_max(x, &l, at), sum = 0;
        for (int64_t k = 0; k < l.n; k++)
            sum += exp(x->v[at + k * l.step] - m);
        for (int64_t k = 0; k < l.n; k++) {
            int64_t i = at + k * l.step;
            double d = x->v[i] - m, e = exp(d) / sum;
            y->v[i] = logarithm ? d - log(sum) : e;
            y->mag[i] = logarithm ? fabs(d) + log(sum) + length(l.n) : e * (length(l.n) + fmin(fabs(d), 110));
        }
    }
    return 1;
}

static int ref_softmax_grad(const dten *x, dten *y, int dim, bool logarithm) {
    lanes l = lanes_of(x, dim);
    const double *dy = x[0].v, *p = x[1].v;
    same_out(y, x);
    for (int64_t r = 0; r < l.rows; r++) {
        int64_t at = first(&l, r);
        double sum = 0, big = 0;
        for (int64_t k = 0; k < l.n; k++) {
            int64_t i = at + k * l.step;
            double t = logarithm ? dy[i] : dy[i] * p[i];
            sum += t;
            big += fabs(t);
        }
        for (int64_t k = 0; k < l.n; k++) {
            int64_t i = at + k * l.step;
            double f = logarithm ? exp(p[i]) : p[i];
            y->v[i] = logarithm ? dy[i] - f * sum : f * (dy[i] - sum);
            y->mag[i] = (fabs(f) * (fabs(dy[i]) + big) + fabs(dy[i])) * length(l.n);
        }
    }
    return 1;
}

/* The shape of one value per row of x's last dimension. */
static dten *row_out(dten *y, const dten *x) { return new_out(y, WK_F32, x->ndim - 1, x->size); }

static int ref_norm(const dten *x, dten *y, double eps) {
    lanes l = lanes_of(x, -1);
    same_out(&y[0], x);
    row_out(&y[1], x);
    for (int64_t r = 0; r < l.rows; r++) {
        const double *v = x->v + r * l.n;
        double mean = 0, var = 0, top = 0;
        for (int64_t k = 0; k < l.n; k++) {
            mean += v[k] / (double)l.n;
            top = fmax(top, fabs(v[k]));
        }
        for (int64_t k = 0; k < l.n; k++)
            var += (v[k] - mean) * (v[k] - mean) / (double)l.n;
        double rstd = 1 / sqrt(var + eps);
        y[1].v[r] = rstd;
        y[1].mag[r] = rstd * length(l.n) * (1 + top * rstd);
        for (int64_t k = 0; k < l.n; k++) {
            y[0].v[r * l.n + k] = (v[k] - mean) * rstd;
            y[0].mag[r * l.n + k] = top * rstd * length(l.n) * (1 + fabs(v[k] - mean) * rstd);
        }
    }
    return 2;
}

static int ref_norm_grad(const dten *x, dten *y) {
    lanes l = lanes_of(x, -1);
    same_out(y, x);
    for (int64_t r = 0; r < l.rows; r++) {
        const double *dy = x[0].v + r * l.n, *n = x[1].v + r * l.n;
        double a = 0, b = 0, big_a = 0, big_b = 0;
        for (int64_t k = 0; k < l.n; k++) {
            a += dy[k] / (double)l.n;
            b += dy[k] * n[k] / (double)l.n;
            big_a += fabs(dy[k]) / (double)l.n;
            big_b += fabs(dy[k] * n[k]) / (double)l.n;
        }
        for (int64_t k = 0; k < l.n; k++) {
            y->v[r * l.n + k] = x[2].v[r] * (dy[k] - a - n[k] * b);
            y->mag[r * l.n + k] = fabs(x[2].v[r]) * (fabs(dy[k]) + big_a + fabs(n[k]) * big_b) * length(l.n);
        }
    }
    return 1;
}

/* x: values, weight and bias where they are given (in the order of `affine`, bits 1 and 2). */
static int ref_layer_norm(const dten *x, dten *y, int affine, double eps) {
    dten t[2];
    int64_t n = x->ndim ? x->size[x->ndim - 1] : 1;
    const dten *w = affine & 1 ? &x[1] : NULL, *b = affine & 2 ? &x[affine & 1 ? 2 : 1] : NULL;
    ref_norm(x, t, eps);
    same_out(y, x);
    for (int64_t i = 0; i < y->n; i++) {
        double f = w ? w->v[i % n] : 1, add = b ? b->v[i % n] : 0;
        y->v[i] = t[0].v[i] * f + add;
        y->mag[i] = t[0].mag[i] * fabs(f) + fabs(add);
    }
    case_free(&t[0]);
    case_free(&t[1]);
    return 1;
}

static int ref_nll(const dten *x, dten *y) {
    lanes l = lanes_of(x, -1);
    row_out(&y[0], x);
    row_out(&y[1], x);
    for (int64_t r = 0; r < l.rows; r++) {
        double m = row_max(x, &l, r * l.n), sum = 0, t = x->v[r * l.n + (int64_t)x[1].v[r]];
        for (int64_t k = 0; k < l.n; k++)
            sum += exp(x->v[r * l.n + k] - m);
        y[1].v[r] = m + log(sum);
        y[0].v[r] = y[1].v[r] - t;
        y[1].mag[r] = fabs(m) + log(sum) + length(l.n);
        y[0].mag[r] = y[1].mag[r] + fabs(t);
    }
    return 2;
}

static int ref_nll_grad(const dten *x, dten *y) { /* logits, lse, target, dy */
    lanes l = lanes_of(x, -1);
    same_out(y, x);
    for (int64_t i = 0; i < y->n; i++) {
        int64_t r = i / l.n;
        double d = x[0].v[i] - x[1].v[r], e = exp(d);
        y->v[i] = x[3].v[r] * (e - (i % l.n == (int64_t)x[2].v[r]));
        y->mag[i] = fabs(x[3].v[r]) * (1 + e * (1 + fmin(fabs(d), 110)));
    }
    return 1;
}

static int ref_cross_entropy(const dten *x, dten *y) {
    dten t[2];
    ref_nll(x, t);
    new_out(y, WK_F32, 0, NULL);
    for (int64_t r = 0; r < t[0].n; r++) {
        y->v[0] += t[0].v[r] / (double)t[0].n;
        y->mag[0] += (t[0].mag[r] + length(t[0].n) * fabs(t[0].v[r])) / (double)t[0].n;
    }
    if (!t[0].n)
        y->v[0] = NAN;
    case_free(&t[0]);
    case_free(&t[1]);
    return 1;
}

/* ---- movement -------------------------------------------------------------------------------------------------------- */

static int ref_reshape(const dten *x, dten *y, int ndim, const int64_t *size) {
    new_out(y, x->dtype, ndim, size);
    memcpy(y->v, x->v, (size_t)x->n * sizeof *y->v);
    return 1;
}

static int ref_permute(const dten *x, dten *y, const int *dims) {
    int64_t size[WK_MAX_DIMS], stride[WK_MAX_DIMS], step = 1;
    for (int d = x->ndim - 1; d >= 0; d--) {
        stride[d] = step;
        step *= x->size[d];
    }
    for (int d = 0; d < x->ndim; d++)
        size[d] = x->size[dims[d]];
    new_out(y, x->dtype, x->ndim, size);
    for (int64_t i = 0; i < y->n; i++) {
        int64_t at = 0, rest = i;
        for (int d = y->ndim - 1; d >= 0; d--) {
            at += rest % y->size[d] * stride[dims[d]];
            rest /= y->size[d];
        }
        y->v[i] = x->v[at];
    }
    return 1;
}

static int ref_expand(const dten *x, dten *y, int ndim, const int64_t *size) {
    new_out(y, x->dtype, ndim, size);
    for (int64_t i = 0; i < y->n; i++)
        y->v[i] = x->v[broadcast_place(x, y, i)];
    return 1;
}

/* start and stop are in range here. */
static int ref_slice(const dten *x, dten *y, int dim, int64_t start, int64_t stop, int64_t step) {
    lanes l = lanes_of(x, dim);
    int64_t size[WK_MAX_DIMS];
    memcpy(size, x->size, sizeof size);
    size[dim] = stop > start ? (stop - start + step - 1) / step : 0;
    new_out(y, x->dtype, x->ndim, size);
    lanes m = lanes_of(y, dim);
    for (int64_t r = 0; r < m.rows; r++)
        for (int64_t k = 0; k < m.n; k++)
            y->v[first(&m, r) + k * m.step] = x->v[first(&l, r) + (start + k * step) * l.step];
    return 1;
}

static int ref_pad_slice(const dten *x, dten *y, const int64_t *size, int dim, int64_t start, int64_t step) {
    new_out(y, WK_F32, x->ndim, size);
    lanes l = lanes_of(x, dim), m = lanes_of(y, dim);
    for (int64_t r = 0; r < l.rows; r++)
        for (int64_t k = 0; k < l.n; k++)
            y->v[first(&m, r) + (start + k * step) * m.step] = x->v[first(&l, r) + k * l.step];
    return 1;
}

/* ---- products -------------------------------------------------------------------------------------------------------- */

/* As NumPy's matmul; an operand of one dimension is a row or a column. */
static int ref_matmul(const dten *x, dten *y) {
    dten a = x[0], b = x[1];
    if (a.ndim == 1)
        a.ndim = 2, a.size[1] = a.size[0], a.size[0] = 1;
    if (b.ndim == 1)
        b.ndim = 2, b.size[1] = 1;
    int64_t m = a.size[a.ndim - 2], k = a.size[a.ndim - 1], n = b.size[b.ndim - 1], size[WK_MAX_DIMS];
    dten batch_a = a, batch_b = b, batch;
    batch_a.ndim -= 2;
    batch_b.ndim -= 2;
    broadcast_out(&batch, WK_F32, (const dten[]){batch_a, batch_b}, 2);
    memcpy(size, batch.size, sizeof size);
    int nd = batch.ndim;
    if (x[0].ndim > 1)
        size[nd++] = m;
    if (x[1].ndim > 1)
        size[nd++] = n;
    new_out(y, WK_F32, nd, size);
    for (int64_t i = 0; i < y->n; i++) {
        int64_t at = i / (m * n), pa = broadcast_place(&batch_a, &batch, at) * m * k + i / n % m * k;
        int64_t pb = broadcast_place(&batch_b, &batch, at) * k * n + i % n;
        for (int64_t j = 0; j < k; j++) {
            y->v[i] += a.v[pa + j] * b.v[pb + j * n];
            y->mag[i] += fabs(a.v[pa + j] * b.v[pb + j * n]) * length(k);
        }
    }
    case_free(&batch);
    return 1;
}

static int ref_linear(const dten *x, dten *y, bool bias) {
    int64_t size[WK_MAX_DIMS], n = x[1].size[0], k = x[1].size[1];
    memcpy(size, x->size, sizeof size);
    size[x->ndim - 1] = n;
    new_out(y, WK_F32, x->ndim, size);
    for (int64_t i = 0; i < y->n; i++) {
        double b = bias ? x[2].v[i % n] : 0;
        y->v[i] = b;
        y->mag[i] = fabs(b);
        for (int64_t j = 0; j < k; j++) {
            double t = x[0].v[i / n * k + j] * x[1].v[i % n * k + j];
            y->v[i] += t;
            y->mag[i] += fabs(t) * length(k);
        }
    }
    return 1;
}

static int ref_linear_relu(const dten *x, dten *y, bool bias) {
    ref_linear(x, y, bias);
    for (int64_t i = 0; i < y->n; i++)
        y->v[i] = y->v[i] < 0 ? 0 : y->v[i];
    return 1;
}

typedef struct conv {
    int64_t n, c, h, w, o, kh, kw, oh, ow, sh, sw, ph, pw;
} conv;

/* Visits every product of a convolution: which = 0: y += x w, 1: x += y w, 2: w += y x; into t (and mag). */
static void convolve(const conv *s, int which, const double *a, const double *b, dten *t) {
    double len = length(which == 0   ? s->c * s->kh * s->kw
                        : which == 1 ? s->o * s->kh * s->kw
                                     : s->n * s->oh * s->ow);
    for (int64_t n = 0; n < s->n; n++)
        for (int64_t o = 0; o < s->o; o++)
            for (int64_t i = 0; i < s->oh * s->ow; i++)
                for (int64_t j = 0; j < s->c * s->kh * s->kw; j++) {
                    int64_t c = j / (s->kh * s->kw), kh = j / s->kw % s->kh, kw = j % s->kw;
                    int64_t h = i / s->ow * s->sh + kh - s->ph, w = i % s->ow * s->sw + kw - s->pw;
                    int64_t at_y = (n * s->o + o) * s->oh * s->ow + i, at_w = o * s->c * s->kh * s->kw + j;
                    int64_t at_x = ((n * s->c + c) * s->h + h) * s->w + w;
                    if (h < 0 || h >= s->h || w < 0 || w >= s->w)
                        continue;
                    int64_t to = which == 0 ? at_y : which == 1 ? at_x : at_w;
                    double p = which == 0   ? a[at_x] * b[at_w]
                               : which == 1 ? a[at_y] * b[at_w]
                                            : a[at_y] * b[at_x];
                    t->v[to] += p;
                    t->mag[to] += fabs(p) * len;
                }
}

static void out_size(conv *s) {
    s->oh = (s->h + 2 * s->ph - s->kh) / s->sh + 1;
    s->ow = (s->w + 2 * s->pw - s->kw) / s->sw + 1;
}

static int ref_conv2d(const dten *x, dten *y, bool bias, int64_t sh, int64_t sw, int64_t ph, int64_t pw) {
    const int64_t *a = x[0].size, *b = x[1].size;
    conv s = {a[0], a[1], a[2], a[3], b[0], b[2], b[3], 0, 0, sh, sw, ph, pw};
    out_size(&s);
    new_out(y, WK_F32, 4, (int64_t[]){s.n, s.o, s.oh, s.ow});
    for (int64_t i = 0; bias && i < y->n; i++) {
        y->v[i] = x[2].v[i / (s.oh * s.ow) % s.o];
        y->mag[i] = fabs(y->v[i]);
    }
    convolve(&s, 0, x[0].v, x[1].v, y);
    return 1;
}

static int ref_conv2d_dx(const dten *x, dten *y, int64_t H, int64_t W, int64_t sh, int64_t sw, int64_t ph,
                         int64_t pw) {
    const int64_t *a = x[0].size, *b = x[1].size;
    conv s = {a[0], b[1], H, W, b[0], b[2], b[3], a[2], a[3], sh, sw, ph, pw};
    convolve(&s, 1, x[0].v, x[1].v, new_out(y, WK_F32, 4, (int64_t[]){s.n, s.c, H, W}));
    return 1;
}

static int ref_conv2d_dw(const dten *x, dten *y, int64_t kh, int64_t kw, int64_t sh, int64_t sw, int64_t ph,
                         int64_t pw) {
    const int64_t *a = x[0].size, *b = x[1].size;
    conv s = {a[0], b[1], b[2], b[3], a[1], kh, kw, a[2], a[3], sh, sw, ph, pw};
    convolve(&s, 2, x[0].v, x[1].v, new_out(y, WK_F32, 4, (int64_t[]){s.o, s.c, kh, kw}));
    return 1;
}

/* ---- pooling and indexing -------------------------------------------------------------------------------------------- */

static int ref_max_pool2d(const dten *x, dten *y, int64_t kh, int64_t kw, int64_t sh, int64_t sw, int64_t ph,
                          int64_t pw) {
    conv s = {x->size[0], x->size[1], x->size[2], x->size[3], 1, kh, kw, 0, 0, sh, sw, ph, pw};
    out_size(&s);
    new_out(&y[0], WK_F32, 4, (int64_t[]){s.n, s.c, s.oh, s.ow});
    new_out(&y[1], WK_I32, 4, y[0].size);
    for (int64_t i = 0; i < y->n; i++) {
        int64_t plane = i / (s.oh * s.ow), top = i / s.ow % s.oh * sh - ph, left = i % s.ow * sw - pw,
                best = -1;
        for (int64_t h = top < 0 ? 0 : top; h < top + kh && h < s.h; h++)
            for (int64_t w = left < 0 ? 0 : left; w < left + kw && w < s.w; w++) {
                double v = x->v[plane * s.h * s.w + h * s.w + w],
                       b = best < 0 ? 0 : x->v[plane * s.h * s.w + best];
                if (best < 0 || v > b || (isnan(v) && !isnan(b))) /* the first of equals, a NaN above all */
                    best = h * s.w + w;
            }
        y[1].v[i] = (double)best;
        y[0].v[i] = x->v[plane * s.h * s.w + best];
    }
    return 2;
}

static int ref_scatter_planes(const dten *x, dten *y, int64_t H, int64_t W) {
    new_out(y, WK_F32, 4, (int64_t[]){x->size[0], x->size[1], H, W});
    int64_t windows = x->size[2] * x->size[3];
    for (int64_t i = 0; i < x->n; i++) {
        int64_t to = i / windows * H * W + (int64_t)x[1].v[i];
        y->v[to] += x->v[i];
        y->mag[to] += 2 * fabs(x->v[i]);
    }
    return 1;
}

static int ref_gather_planes(const dten *x, dten *y) {
    new_out(y, WK_F32, 4, x[1].size);
    int64_t plane = x->size[2] * x->size[3], windows = y->size[2] * y->size[3];
    for (int64_t i = 0; i < y->n; i++)
        y->v[i] = x->v[i / windows * plane + (int64_t)x[1].v[i]];
    return 1;
}

static int ref_embedding(const dten *x, dten *y) {
    int64_t size[WK_MAX_DIMS], width = x->size[1];
    memcpy(size, x[1].size, sizeof size);
    size[x[1].ndim] = width;
    new_out(y, WK_F32, x[1].ndim + 1, size);
    for (int64_t i = 0; i < y->n; i++)
        y->v[i] = x->v[(int64_t)x[1].v[i / width] * width + i % width];
    return 1;
}

static int ref_embedding_grad(const dten *x, dten *y, int64_t rows) {
    int64_t width = x->size[x->ndim - 1];
    new_out(y, WK_F32, 2, (int64_t[]){rows, width});
    for (int64_t i = 0; i < x->n; i++) {
        int64_t to = (int64_t)x[1].v[i / width] * width + i % width;
        y->v[to] += x->v[i];
        y->mag[to] += fabs(x->v[i]) * length(x[1].n / (rows ? rows : 1) * 2); /* terms of a row: about */
    }
    return 1;
}

static int ref_attention(const dten *x, dten *y, bool causal, double scale) {
    int64_t t = x[0].size[2], s = x[1].size[2], d = x[0].size[3], e = x[2].size[3],
            heads = x[0].size[0] * x[0].size[1];
    new_out(y, WK_F32, 4, (int64_t[]){x->size[0], x->size[1], t, e});
    double *w = calloc((size_t)s + 1, sizeof *w);
    for (int64_t r = 0; w && r < heads * t; r++) {
        const double *q = x[0].v + r * d, *k = x[1].v + r / t * s * d, *v = x[2].v + r / t * s * e;
        double m = -INFINITY, sum = 0, big = 0;
        for (int64_t j = 0; j < s; j++) {
            double size = 0;
            w[j] = 0;
            for (int64_t i = 0; i < d; i++) {
                w[j] += q[i] * k[j * d + i] * scale;
                size += fabs(q[i] * k[j * d + i] * scale);
            }
            if (causal && j > r % t + s - t)
                w[j] = -INFINITY;
            else
                big = fmax(big, size);
            m = larger(m, w[j]);
        }
        for (int64_t j = 0; j < s; j++)
            sum += w[j] = exp(w[j] - m);
        for (int64_t i = 0; i < e; i++)
            for (int64_t j = 0; j < s; j++) {
                y->v[r * e + i] += w[j] / sum * v[j * e + i];
                y->mag[r * e + i] +=
                    w[j] / sum * fabs(v[j * e + i]) * (length(s) + length(d) * 2 * fmin(big, 110));
            }
    }
    free(w);
    return 1;
}

/* ---- optimizers: inputs in role order, n of each --------------------------------------------------------------------- */

static int ref_sgd(const dten *x, dten *y, int n, double lr, double momentum, double decay, bool nesterov) {
    for (int i = 0; i < n; i++) {
        dten *p = same_out(&y[i], &x[i]), *m = momentum != 0 ? same_out(&y[n + i], &x[i]) : NULL;
        for (int64_t k = 0; k < p->n; k++) {
            double g = x[n + i].v[k] + decay * x[i].v[k], step = g;
            if (m) {
                m->v[k] = momentum * x[2 * n + i].v[k] + g;
                m->mag[k] = fabs(x[2 * n + i].v[k]) + fabs(g) + fabs(x[i].v[k]);
                step = nesterov ? g + momentum * m->v[k] : m->v[k];
            }
            p->v[k] = x[i].v[k] - lr * step;
            p->mag[k] = fabs(x[i].v[k]) + lr * (m ? 2 * m->mag[k] : fabs(g));
        }
    }
    return momentum != 0 ? 2 * n : n;
}

static int ref_adamw(const dten *x, dten *y, double decay, double b1, double beta2, double b2, double step,
                     double inv_bias2, double eps) {
    dten *p = same_out(&y[0], &x[0]), *m = same_out(&y[1], &x[0]), *v = same_out(&y[2], &x[0]);
    for (int64_t k = 0; k < p->n; k++) {
        double g = x[1].v[k];
        m->v[k] = x[2].v[k] + (g - x[2].v[k]) * b1;
        m->mag[k] = fabs(x[2].v[k]) + fabs(g);
        v->v[k] = beta2 * x[3].v[k] + b2 * g * g;
        double root = sqrt(v->v[k]) * inv_bias2 + eps;
        p->v[k] = x[0].v[k] * decay - step * m->v[k] / root;
        p->mag[k] = fabs(x[0].v[k]) + step * 4 * m->mag[k] / root;
    }
    return 3;
}
