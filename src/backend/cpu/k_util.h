/* What CPU kernels share: addresses in strided views, sizes that cannot overflow, and when threads pay.
 * Calls base/pool. */
#ifndef WKI_K_UTIL_H
#define WKI_K_UTIL_H

#include "backend/backend.h"

/* Sizes of scratch space, at most WKI_K_TOO_MUCH: that much can never be had, so the caller reports it as
 * out of memory. */
#define WKI_K_TOO_MUCH (SIZE_MAX / 8)
static inline size_t wki_k_mul(size_t a, size_t b) {
    size_t r;
    return __builtin_mul_overflow(a, b, &r) || r > WKI_K_TOO_MUCH ? WKI_K_TOO_MUCH : r;
}
static inline size_t wki_k_add(size_t a, size_t b) { return wki_k_mul(a + b, 1); } /* of two such sizes */
static inline size_t wki_k_align(size_t a) { return wki_k_add(a, 63) & ~(size_t)63; }

static inline int64_t wki_k_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t wki_k_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t wki_k_ceil(int64_t a, int64_t b) { return a / b + (a % b != 0); }

/* Offset of element `i`, counted row-major over the first `nd` dimensions. */
static inline int64_t wki_k_offset(const wki_view *v, int nd, int64_t i) {
    int64_t at = 0;
    for (int d = nd - 1; d >= 0; d--) {
        at += i % v->size[d] * v->stride[d];
        i /= v->size[d];
    }
    return at;
}

/* Strides of v, which broadcasts to y's shape, along y's dimensions. */
static inline void wki_k_broadcast(const wki_view *v, const wki_view *y, int64_t *stride) {
    for (int d = 0, lead = y->ndim - v->ndim; d < y->ndim; d++)
        stride[d] = d < lead || v->size[d - lead] == 1 ? 0 : v->stride[d - lead];
}

static inline bool wki_k_absent(const wki_view *v) { return v->dtype == WK_DTYPE_COUNT; }

#endif
