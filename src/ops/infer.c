/* Checks and list attributes that inference functions share, and the two questions executors ask of a row: which program,
 * which dimensions. May call: core. */
#include "ops/infer.h"

#include <string.h>

#include "ops/loop.h"

int wki_put_list(int64_t *ia, int n, const int64_t *v) {
    ia[0] = n;
    if (n < 0 || n > WK_MAX_DIMS || (n && !v)) {
        ia[0] = n && n <= WK_MAX_DIMS ? -1 : n;
        return 1;
    }
    for (int i = 0; i < n; i++)
        ia[1 + i] = v[i];
    return 1 + n;
}

int wki_put_perm(int64_t *ia, const wki_tensor *x, int n, const int64_t *v) {
    int words = wki_put_list(ia, n, v);
    for (int i = 1; i < words; i++)
        ia[i] += ia[i] < 0 ? x->ndim : 0;
    return words;
}

int wki_put_dims(int64_t *ia, const wki_tensor *x, int n, const int64_t *v) {
    bool whole_scalar = x->ndim == 0 && n == 1 && v && (v[0] == 0 || v[0] == -1);
    if (n == 0 || whole_scalar) {
        ia[0] = x->ndim;
        for (int i = 0; i < x->ndim; i++)
            ia[1 + i] = i;
        return 1 + x->ndim;
    }
    int words = wki_put_perm(ia, x, n, v);
    for (int i = 2; i < words; i++) {
        int64_t d = ia[i];
        int j = i;
        for (; j > 1 && ia[j - 1] > d; j--)
            ia[j] = ia[j - 1];
        ia[j] = d;
    }
    return words;
}

bool wki_wrong_list(wk_ctx *c, int64_t count, const char *name) {
    if (count < 0)
        return wki_fail(c, WK_INVALID, "`%s` is NULL or its count is negative", name);
    return wki_fail(c, WK_SHAPE, "`%s` has %lld items, at most %d dimensions are supported", name,
                    (long long)count, WK_MAX_DIMS);
}

bool wki_wrong_dtype(wk_ctx *c, const wki_tensor *t, const char *name, wk_dtype needed) {
    return wki_fail(c, WK_DTYPE, "`%s` is %s, %s is needed (wk_cast converts)", name,
                    wk_dtype_name((wk_dtype)t->dtype), wk_dtype_name(needed));
}

bool wki_wrong_shapes(wk_ctx *c, const wki_tensor *a, const char *an, const wki_tensor *b, const char *bn) {
    char sa[128], sb[128];
    return wki_fail(c, WK_SHAPE, "`%s` has shape %s and `%s` has %s, they must be equal", an,
                    wki_shape_text(sa, sizeof sa, a->ndim, a->size), bn,
                    wki_shape_text(sb, sizeof sb, b->ndim, b->size));
}

bool wki_need_ndim(wk_ctx *c, const wki_tensor *t, const char *name, int ndim) {
    if (t->ndim == ndim)
        return true;
    char s[128];
    return wki_fail(c, WK_SHAPE, "`%s` has shape %s, %d dimensions are needed", name,
                    wki_shape_text(s, sizeof s, t->ndim, t->size), ndim);
}

bool wki_wrong_dim(wk_ctx *c, const wki_tensor *x, int64_t dim) {
    int n = x->ndim ? x->ndim : 1;
    char s[128];
    return wki_fail(c, WK_SHAPE, "dimension %lld is out of range for shape %s (%d to %d)",
                    (long long)(dim < 0 ? dim - n : dim), wki_shape_text(s, sizeof s, x->ndim, x->size), -n,
                    n - 1);
}

bool wki_size_ok_slow(wk_ctx *c, int ndim, const int64_t *size) {
    char s[200];
    int64_t n = 1;
    for (int i = 0; i < ndim; i++)
        if (size[i] < 0)
            return wki_fail(c, WK_SHAPE, "size %lld at dimension %d of %s is negative", (long long)size[i], i,
                            wki_shape_text(s, sizeof s, ndim, size));
    for (int i = 0; i < ndim; i++) /* the strides of an empty tensor must not overflow either */
        if (size[i] && (__builtin_mul_overflow(n, size[i], &n) || n > INT64_MAX / 16))
            return wki_fail(c, WK_SHAPE, "shape %s has too many elements",
                            wki_shape_text(s, sizeof s, ndim, size));
    return true;
}

uint32_t wki_op_reduced(const wki_op *op, int ndim, const int64_t *ia) {
    uint32_t m = 0;
    switch ((wki_red)op->red) {
    case WKI_RED_NONE:
        break;
    case WKI_RED_LAST:
        m = ndim ? 1u << (ndim - 1) : 0;
        break;
    case WKI_RED_DIM:
        m = ndim ? 1u << ia[0] : 0;
        break;
    case WKI_RED_DIMS:
        for (int64_t i = 1; i <= ia[0]; i++)
            m |= 1u << ia[i];
        break;
    }
    return m;
}

static char kind_of(wk_dtype d) {
    if (d >= WK_DTYPE_COUNT)
        return '*';
    int k = wki_dtype_kind(d);
    bool wide = wki_dtype_size(d) > 4;
    return k == 'F' ? (wide ? 'D' : 'F') : k == 'B' ? 'B' : wide ? 'L' : 'I';
}

const wki_loop *wki_op_loop(const wki_op *op, wk_dtype in0, wk_dtype out0) {
    if (!op->guard)
        return op->loop;
    char in = kind_of(in0), out = kind_of(out0);
    for (int i = 0; i < op->nloop; i++) {
        const wki_loop_guard *g = &op->guard[i];
        if ((g->in == '*' || g->in == in) && (g->out == '*' || g->out == out))
            return &op->loop[i];
    }
    return NULL;
}
