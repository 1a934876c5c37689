/* What inference functions share: dtype and shape checks with the messages users see, and list attributes.
 * May call: core. */
#ifndef WKI_OPS_INFER_H
#define WKI_OPS_INFER_H

#include "core/core.h"

/* Lists longer than WK_MAX_DIMS, or NULL with a count, keep an impossible count, which wki_list_ok refuses. */
int wki_put_list(int64_t *ia, int n, const int64_t *v);
int wki_put_dims(int64_t *ia, const wki_tensor *x, int n,
                 const int64_t *v); /* sorted, counted from 0; none: all */
int wki_put_perm(int64_t *ia, const wki_tensor *x, int n, const int64_t *v); /* counted from 0 */

/* Can x be reduced over the canonical list? *red: bit i for dimension i. */
bool wki_reduce_ok(wk_ctx *c, const wki_tensor *x, const char *name, const int64_t *list, uint32_t *red);

/* Can a VALUE attribute make this number in an integer dtype? */
bool wki_integer_ok(wk_ctx *c, wk_dtype dtype, double v);

bool wki_wrong_list(wk_ctx *c, int64_t count, const char *name) __attribute__((cold));
static inline bool wki_list_ok(wk_ctx *c, int64_t count, const char *name) {
    return __builtin_expect((uint64_t)count <= WK_MAX_DIMS, 1) || wki_wrong_list(c, count, name);
}
bool wki_wrong_dtype(wk_ctx *c, const wki_tensor *t, const char *name, wk_dtype needed) __attribute__((cold));
static inline bool wki_need_dtype(wk_ctx *c, const wki_tensor *t, const char *name, wk_dtype d) {
    return __builtin_expect(t->dtype == d, 1) || wki_wrong_dtype(c, t, name, d);
}
static inline bool wki_need_f32(wk_ctx *c, const wki_tensor *t, const char *name) {
    return wki_need_dtype(c, t, name, WK_F32);
}
bool wki_need_ndim(wk_ctx *c, const wki_tensor *t, const char *name, int ndim);
bool wki_need_logits(wk_ctx *c, const wki_tensor *logits, const wki_tensor *target); /* (N, C) and i64 (N) */
/* A 0-dim tensor takes dimension 0, as if it had one of size 1. */
bool wki_wrong_dim(wk_ctx *c, const wki_tensor *x, int64_t dim) __attribute__((cold));
static inline bool wki_dim_ok(wk_ctx *c, const wki_tensor *x, int64_t dim) {
    return __builtin_expect((uint64_t)dim < (x->ndim ? x->ndim : 1u), 1) || wki_wrong_dim(c, x, dim);
}
/* Number of elements, where that is plain: -1 when a size is 0 or negative, or the bytes could overflow. */
static inline int64_t wki_numel_quick(int ndim, const int64_t *size) {
    int64_t n = 1;
    bool odd = false;
    for (int i = 0; i < ndim; i++)
        odd |= (size[i] <= 0) | __builtin_mul_overflow(n, size[i], &n);
    return odd || n > INT64_MAX / 16 ? -1 : n;
}
/* An error when a size is negative or the bytes overflow. */
bool wki_size_ok_slow(wk_ctx *c, int ndim, const int64_t *size);
static inline bool wki_size_ok(wk_ctx *c, int ndim, const int64_t *size) {
    return __builtin_expect(wki_numel_quick(ndim, size) > 0, 1) || wki_size_ok_slow(c, ndim, size);
}

/* Strides that show x's elements in row-major order as `size` (of equal numel); false when only a copy can. */
bool wki_view_strides_of(const wki_tensor *x, int ndim, const int64_t *size,
                         int64_t *stride); /* x not contiguous */
static inline bool wki_view_strides(const wki_tensor *x, int ndim, const int64_t *size, int64_t *stride) {
    if (!(x->flags & WKI_F_PLAIN))
        return wki_view_strides_of(x, ndim, size, stride);
    int64_t step = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        stride[d] = step;
        step *= size[d] > 0 ? size[d] : 1;
    }
    return true;
}
/* Has it as many elements? */
bool wki_reshape_ok_slow(wk_ctx *c, const wki_tensor *x, int64_t ndim, const int64_t *size)
    __attribute__((cold));
static inline bool wki_reshape_ok(wk_ctx *c, const wki_tensor *x, int64_t ndim, const int64_t *size) {
    bool plain = (uint64_t)ndim <= WK_MAX_DIMS && wki_numel_quick((int)ndim, size) == x->numel;
    return __builtin_expect(plain, 1) || wki_reshape_ok_slow(c, x, ndim, size);
}

bool wki_wrong_shapes(wk_ctx *c, const wki_tensor *a, const char *an, const wki_tensor *b, const char *bn)
    __attribute__((cold));
static inline bool wki_need_same_shape(wk_ctx *c, const wki_tensor *a, const char *an, const wki_tensor *b,
                                       const char *bn) {
    return __builtin_expect(wki_shapes_equal(a, b), 1) || wki_wrong_shapes(c, a, an, b, bn);
}
static inline void wki_same_shape(wki_tensor *o, const wki_tensor *x) {
    o->ndim = x->ndim;
    for (int i = 0; i < x->ndim; i++)
        o->size[i] = x->size[i];
}

/* Size of a dimension counted from the end (-1: the last); 1 where there is none. */
static inline int64_t wki_size_at(const wki_tensor *t, int dim) {
    return t->ndim + dim >= 0 ? t->size[t->ndim + dim] : 1;
}
static inline int64_t wki_meta_size(const wki_meta *m, int dim) {
    if (dim < 0)
        dim += m->ndim;
    return dim >= 0 && dim < m->ndim ? m->size[dim] : 1;
}

/* Which dimensions of input 0 a ROW op reduces, bit i: dimension i; 0 for other classes. */
uint32_t wki_op_reduced(const wki_op *op, int ndim, const int64_t *ia);
/* The loop program for these dtypes of input 0 and output 0 (WK_DTYPE_COUNT where there is none); NULL if none fits. */
const struct wki_loop *wki_op_loop(const wki_op *op, wk_dtype in0, wk_dtype out0);

#endif
