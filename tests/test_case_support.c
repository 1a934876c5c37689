/* Instances of rows of the case table: values, layouts, reading back and comparing. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cases.h"
#include "harness.h"

/* ---- values ---------------------------------------------------------------------------------------------------------- */

dten case_like(const dten *d) {
    dten t = *d;
    t.mag = NULL;
    t.v = calloc((size_t)t.n + 1, sizeof *t.v);
    if (!t.v)
        abort();
    return t;
}

void case_free(dten *d) {
    free(d->v);
    free(d->mag);
    d->v = d->mag = NULL;
}

int64_t case_numel(const op_case *k) {
    int64_t sum = 0;
    for (int i = 0; i < k->nin; i++) {
        int64_t n = 1;
        for (int d = 0; d < k->in[i].ndim; d++)
            n *= k->in[i].size[d];
        sum += n;
    }
    return sum;
}

static bool exact(const op_case *k) {
    return wki_ops[k->op].klass == WKI_EW && wki_op_samples[k->op].ulp <= 0.5;
}

/* Values that arithmetic treats in its own way. The largest only where no intermediate result overflows before. */
static double special(const op_case *k, double otherwise) {
    static const double values[] = {NAN,   INFINITY, -INFINITY, 0.0,      -0.0,
                                    1e-45, -1e-40,   FLT_MAX,   -FLT_MAX, FLT_MIN};
    if (wkt_below(3))
        return otherwise;
    return (double)(float)values[wkt_below(exact(k) ? 10 : 7)];
}

/* Any size up to the largest whose products, at most three, stay finite. */
static double large(const op_case *k) {
    double most = exact(k) ? 38 : wki_ops[k->op].klass == WKI_EW ? 4 : 10, v = pow(10, wkt_uniform(0, most));
    return (double)(float)(wkt_below(2) ? v : -v);
}

static void fill(dten *t, const op_case *k, int input, case_values values) {
    const case_in *in = &k->in[input];
    const wki_op_sample *sample = &wki_op_samples[k->op];
    bool given = in->how == CASE_INTS || in->lo != 0 || in->hi != 0;
    double lo = given ? in->lo : sample->lo, hi = given ? in->hi : sample->hi;
    if (values == CASE_MILD) { /* where third derivatives are small */
        lo = fmax(lo, lo > 0 ? 0.5 : -2);
        hi = fmin(hi, 2);
    }
    const int64_t middle = t->n / 2;
    for (int64_t i = 0; i < t->n; i++) {
        if (in->how == CASE_INTS)
            t->v[i] = floor(wkt_uniform(lo, hi + 1));
        else if (in->how == CASE_SPACED)
            t->v[i] =
                (double)(float)(0.1 * (double)(i - middle) + (input ? 0.07 : 0.03)); /* inputs never tie */
        else
            t->v[i] = (double)(float)wkt_uniform(lo, hi);
    }
    for (int64_t i = t->n - 1; in->how == CASE_SPACED && i > 0; i--) {
        int64_t j = (int64_t)wkt_below((uint64_t)i + 1);
        double v = t->v[i];
        t->v[i] = t->v[j];
        t->v[j] = v;
    }
    bool may = wki_dtype_kind(t->dtype) == 'F' && !(input && k->flags & CASE_SPECIAL_FIRST);
    for (int64_t i = 0; may && i < t->n; i++) {
        if (values == CASE_SPECIAL)
            t->v[i] = special(k, t->v[i]);
        else if (values == CASE_LARGE)
            t->v[i] = large(k);
    }
}

/* All elements along dimension d are as the first. */
static void repeat(dten *t, int d) {
    int64_t inner = 1;
    for (int i = d + 1; i < t->ndim; i++)
        inner *= t->size[i];
    for (int64_t i = 0; i < t->n; i++)
        t->v[i] = t->v[i / (inner * t->size[d]) * inner * t->size[d] + i % inner];
}

void case_open(case_instance *t, const op_case *k, case_values values, const case_layout *layout) {
    *t = (case_instance){.k = k};
    for (int i = 0; i < k->nin; i++) {
        dten *x = &t->x[i];
        *x = (dten){.dtype = (wk_dtype)k->in[i].dtype, .ndim = k->in[i].ndim, .n = 1};
        for (int d = 0; d < x->ndim; d++)
            x->n *= x->size[d] = k->in[i].size[d];
        *x = case_like(x);
        fill(x, k, i, values);
        t->layout[i] = layout ? layout[i] : CASE_PLAIN;
        if (t->layout[i] == CASE_EXPANDED && (!x->ndim || k->writes >> i & 1))
            t->layout[i] = CASE_OFFSET; /* what is written cannot be expanded */
        if (t->layout[i] == CASE_EXPANDED) {
            t->expanded[i] = (int)wkt_below((uint64_t)x->ndim);
            if (x->n)
                repeat(x, t->expanded[i]);
        }
    }
    t->nout = k->ref(t->x, t->y);
}

void case_close(case_instance *t) {
    for (int i = 0; i < t->k->nin; i++)
        case_free(&t->x[i]);
    for (int i = 0; i < t->nout; i++)
        case_free(&t->y[i]);
}

/* ---- tensors --------------------------------------------------------------------------------------------------------- */

static void put(void *to, wk_dtype dtype, int64_t at, double v) {
    switch (dtype) {
    case WK_F32:
        ((float *)to)[at] = (float)v;
        break;
    case WK_F64:
        ((double *)to)[at] = v;
        break;
    case WK_I64:
        ((int64_t *)to)[at] = (int64_t)v;
        break;
    case WK_I32:
        ((int32_t *)to)[at] = (int32_t)v;
        break;
    default:
        ((uint8_t *)to)[at] = (uint8_t)v;
        break;
    }
}

static double get(const void *from, wk_dtype dtype, int64_t at) {
    switch (dtype) {
    case WK_F32:
        return (double)((const float *)from)[at];
    case WK_F64:
        return ((const double *)from)[at];
    case WK_I64:
        return (double)((const int64_t *)from)[at];
    case WK_I32:
        return ((const int32_t *)from)[at];
    default:
        return ((const uint8_t *)from)[at];
    }
}

/* A tensor in which d's element lies at `offset` + the sum of place * stride; what lies between must not be read. */
static wki_tensor *upload(wk_ctx *c, const dten *d, int ndim, const int64_t *size, const int64_t *stride,
                          int64_t offset) {
    int64_t n = 1;
    for (int i = 0; i < ndim; i++)
        n *= size[i];
    size_t each = wki_dtype_size(d->dtype);
    char *host = malloc((size_t)n * each + 1);
    if (!host)
        abort();
    for (int64_t i = 0; i < n; i++)
        put(host, d->dtype, i, wki_dtype_kind(d->dtype) == 'F' ? NAN : 99);
    for (int64_t i = 0; i < d->n; i++) {
        int64_t at = offset, rest = i;
        for (int k = d->ndim - 1; k >= 0; k--) {
            at += rest % d->size[k] * stride[k];
            rest /= d->size[k];
        }
        put(host, d->dtype, at, d->v[i]);
    }
    wk_tensor *t = wk_from_data(c, d->dtype, ndim, size, host);
    free(host);
    return wki_slot(t);
}

static wki_tensor *transposed(wk_ctx *c, const dten *d) {
    int64_t size[WK_MAX_DIMS], stride[WK_MAX_DIMS], dims[WK_MAX_DIMS], step = 1;
    for (int i = 0; i < d->ndim; i++) {
        size[d->ndim - 1 - i] = d->size[i];
        dims[i] = d->ndim - 1 - i;
        stride[i] = step;
        step *= d->size[i];
    }
    return wki_permute(c, upload(c, d, d->ndim, size, stride, 0), dims, d->ndim);
}

static wki_tensor *inside(wk_ctx *c, const dten *d) {
    int64_t size[WK_MAX_DIMS], stride[WK_MAX_DIMS], step = 1, offset = 0;
    for (int i = d->ndim - 1; i >= 0; i--) {
        int64_t by = i == d->ndim - 1 ? 2 : 1;
        size[i] = d->size[i] * by + 2;
        stride[i] = step * by;
        offset += step;
        step *= size[i];
    }
    wki_tensor *t = upload(c, d, d->ndim, size, stride, offset);
    for (int i = 0; i < d->ndim; i++)
        t = wki_slice(c, t, i, 1, size[i] - 1, i == d->ndim - 1 ? 2 : 1);
    return t;
}

static wki_tensor *expanded(wk_ctx *c, const dten *d, int dim) {
    int64_t size[WK_MAX_DIMS], stride[WK_MAX_DIMS], step = 1;
    if (!d->n)
        return upload(c, d, d->ndim, d->size, d->size, 0);
    for (int i = d->ndim - 1; i >= 0; i--) {
        size[i] = i == dim ? 1 : d->size[i];
        stride[i] = i == dim ? 0 : step;
        step *= size[i];
    }
    return wki_expand(c, upload(c, d, d->ndim, size, stride, 0), d->ndim, d->size);
}

wki_tensor *case_tensor(wk_ctx *c, const dten *d, case_layout layout, int dim) {
    int64_t stride[WK_MAX_DIMS], step = 1;
    wki_tensor *t;
    for (int i = d->ndim - 1; i >= 0; i--) {
        stride[i] = step;
        step *= d->size[i];
    }
    switch (layout) {
    case CASE_TRANSPOSED:
        t = transposed(c, d);
        break;
    case CASE_OFFSET:
        t = inside(c, d);
        break;
    case CASE_EXPANDED:
        t = expanded(c, d, dim);
        break;
    default:
        t = upload(c, d, d->ndim, d->size, stride, 0);
        break;
    }
    CHECK_EQ_I(t->numel, d->n);
    return t;
}

void case_inputs(wk_ctx *c, const case_instance *t, wki_tensor **x) {
    for (int i = 0; i < t->k->nin; i++)
        x[i] = case_tensor(c, &t->x[i], t->layout[i], t->expanded[i]);
}

dten case_read(wki_tensor *t) {
    dten d = {.dtype = (wk_dtype)t->dtype, .ndim = t->ndim, .n = t->numel};
    memcpy(d.size, t->size, sizeof d.size);
    d = case_like(&d);
    size_t bytes = (size_t)d.n * wki_dtype_size(d.dtype);
    char *host = malloc(bytes + 1);
    if (!host)
        abort();
    if (wk_read(wki_handle(t), host, bytes)) {
        for (int64_t i = 0; i < d.n; i++)
            d.v[i] = get(host, d.dtype, i);
    } else {
        FAIL("reading failed: %s", wk_message(t->ctx));
        case_free(&d);
        d.n = -1;
    }
    free(host);
    return d;
}

/* ---- comparing ------------------------------------------------------------------------------------------------------- */

static double ulp_of(double v) {
    float f = fabsf((float)v);
    return f >= FLT_MAX ? 0x1p104 : (double)nextafterf(f, INFINITY) - (double)f;
}

/* Of floats: infinite where the reference rounds to infinity, NaN where it is, else within the op's tolerance. */
static bool close_enough(const op_case *k, double got, double want, double mag, double slack) {
    double ulp = wki_op_samples[k->op].ulp, f = (double)(float)want;
    if (isnan(want) || isnan(got))
        return isnan(want) && isnan(got);
    if (exact(k) && got == 0 && f == 0)
        return signbit(got) == signbit(f);
    if (got == f)
        return true;
    double tolerance = ulp * ulp_of(want) * (ulp > 0.5 ? slack : 1 + 1e-9) + mag * CASE_EPS * slack;
    tolerance += ulp > 0.5 || mag > 0 ? FLT_MIN : 0; /* intermediate results may vanish */
    return fabs(got - want) <= tolerance;
}

static const char *layout_text(const case_instance *t, char *s, size_t n) {
    static const char *const names[] = {"plain", "transposed", "offset", "expanded"};
    size_t at = 0;
    *s = 0;
    for (int i = 0; i < t->k->nin && at < n; i++)
        at += (size_t)snprintf(s + at, n - at, "%s%s", i ? ", " : "", names[t->layout[i]]);
    return s;
}

void case_compare(const case_instance *t, int j, wki_tensor *tensor, double slack, const char *how) {
    const dten *want = &t->y[j];
    char layouts[100];
    layout_text(t, layouts, sizeof layouts);
    if (tensor->flags & WKI_F_POISON) {
        FAIL("%s, %s (%s): fails: %s", t->k->name, how, layouts, wk_message(tensor->ctx));
        wk_error_take(tensor->ctx, NULL);
        return;
    }
    dten got = case_read(tensor);
    if (got.n < 0) {
        FAIL("%s, %s (%s): cannot be read", t->k->name, how, layouts);
        wk_error_take(tensor->ctx, NULL);
        case_free(&got);
        return;
    }
    bool shape = got.ndim == want->ndim && got.dtype == want->dtype;
    for (int d = 0; shape && d < got.ndim; d++)
        shape = got.size[d] == want->size[d];
    if (!shape)
        FAIL("%s, %s (%s): output %d has another shape or dtype than the reference", t->k->name, how, layouts,
             j);
    for (int64_t i = 0; shape && i < got.n; i++) {
        bool same = wki_dtype_kind(got.dtype) == 'F'
                        ? got.dtype == WK_F64
                              ? got.v[i] == want->v[i] || (isnan(got.v[i]) && isnan(want->v[i]))
                              : close_enough(t->k, got.v[i], want->v[i], want->mag[i], slack)
                        : got.v[i] == want->v[i];
        if (same)
            continue;
        FAIL("%s, %s (%s): output %d, element %lld is %.9g, not %.9g", t->k->name, how, layouts, j,
             (long long)i, got.v[i], want->v[i]);
        break;
    }
    case_free(&got);
}

wk_device case_device(void) {
    const char *want = getenv("WICK_TEST_DEVICE");
    return want && !strcmp(want, "cuda") ? WK_CUDA : WK_CPU;
}

wk_ctx *case_context(wk_device d) {
    const char *why = "";
    wk_ctx *c = wk_ctx_new(NULL);
    if (!c)
        abort();
    if (!wk_device_available(c, d, &why)) {
        wkt_skip(__FILE__, __LINE__, "no %s device: %s", wk_device_name(d), why);
        wk_ctx_free(c);
        return NULL;
    }
    wk_use_device(c, d);
    return c;
}
