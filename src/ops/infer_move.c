/* Inference of views and of the ops that undo them, with the canonical forms of their attributes. May call: core,
 * ops/infer.h. */
#include <string.h>

#include "ops/infer.h"
#include "ops_gen.h"

static void share(wki_tensor *o, const wki_tensor *x) {
    o->dtype = x->dtype;
    o->st = x->st;
    o->off = x->off;
}

/* Old dimensions are merged into chunks that walk memory with one step; every new dimension must lie within a chunk. */
bool wki_view_strides_of(const wki_tensor *x, int ndim, const int64_t *size, int64_t *stride) {
    int old = x->ndim - 1;
    int64_t left = 1, step = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        while (left == 1 && size[d] != 1 && old >= 0) {
            step = x->stride[old];
            left = x->size[old--];
            while (old >= 0 && left > 1 && (x->size[old] == 1 || x->stride[old] == step * left))
                left *= x->size[old--];
        }
        int64_t rest =
            size[d] == left ? 1 : left / size[d]; /* the first case is common, and a division slow */
        if (rest * size[d] != left)
            return false;
        stride[d] = step;
        step *= size[d];
        left = rest;
    }
    return true;
}

bool wki_reshape_ok_slow(wk_ctx *c, const wki_tensor *x, int64_t n, const int64_t *size) {
    char sx[128], so[128];
    uint64_t numel = 1; /* wraps only where a later size is 0 */
    if (!wki_list_ok(c, n, "size") || !wki_size_ok(c, (int)n, size))
        return false;
    for (int i = 0; i < n; i++)
        numel *= (uint64_t)size[i];
    return numel == (uint64_t)x->numel ||
           wki_fail(c, WK_SHAPE, "shape %s of %lld elements cannot become %s of %lld",
                    wki_shape_text(sx, sizeof sx, x->ndim, x->size), (long long)x->numel,
                    wki_shape_text(so, sizeof so, (int)n, size), (long long)numel);
}

/* The common case in one pass: a contiguous tensor, no size 0. False: something else is the case. */
static inline bool reshape_plain(wki_tensor *o, const wki_tensor *x, int n, const int64_t *size) {
    int64_t step = 1;
    bool odd = !(x->flags & WKI_F_PLAIN);
    for (int d = n - 1; d >= 0; d--) {
        o->size[d] = size[d];
        o->stride[d] = step;
        odd |= (size[d] <= 0) | __builtin_mul_overflow(step, size[d], &step);
    }
    return !odd && step == x->numel;
}

static __attribute__((noinline)) bool reshape_other(wk_ctx *c, wki_tensor *o, const wki_tensor *x, int n,
                                                    const int64_t *size) {
    char sx[128], so[128];
    if (!wki_reshape_ok(c, x, n, size))
        return false;
    if (!wki_view_strides(x, n, size, o->stride))
        return wki_fail(c, WK_INTERNAL, "strides of shape %s do not allow a view as %s",
                        wki_shape_text(sx, sizeof sx, x->ndim, x->size),
                        wki_shape_text(so, sizeof so, n, size));
    for (int i = 0; i < n; i++)
        o->size[i] = size[i];
    return true;
}

bool wki_infer_reshape_view(wk_ctx *c, const wki_call *k) {
    const wki_tensor *x = k->in[0];
    wki_tensor *o = k->out[0];
    int n = (int)k->ia[0];
    if (!wki_list_ok(c, k->ia[0], "size"))
        return false;
    if (!reshape_plain(o, x, n, k->ia + 1) && !reshape_other(c, o, x, n, k->ia + 1))
        return false;
    share(o, x);
    o->ndim = (uint8_t)n;
    o->numel = x->numel;
    o->flags |= x->flags & WKI_F_PLAIN;
    return true;
}

static __attribute__((cold, noinline)) bool wrong_permutation(wk_ctx *c, const wki_tensor *x, int64_t d) {
    if (!wki_dim_ok(c, x, d))
        return false;
    return wki_fail(c, WK_SHAPE, "dimension %lld appears twice in `dims`", (long long)d);
}

bool wki_infer_permute(wk_ctx *c, const wki_call *k) {
    const wki_tensor *x = k->in[0];
    wki_tensor *o = k->out[0];
    uint32_t n = x->ndim, seen = 0;
    if (!wki_list_ok(c, k->ia[0], "dims"))
        return false;
    if (k->ia[0] != n)
        return wki_fail(c, WK_SHAPE, "`dims` has %lld items for %u dimensions", (long long)k->ia[0], n);
    for (uint32_t i = 0; i < n; i++) {
        int64_t d = k->ia[1 + i];
        if (__builtin_expect((uint64_t)d >= n || (seen >> d & 1), 0))
            return wrong_permutation(c, x, d);
        seen |= 1u << d;
        o->size[i] = x->size[d];
        o->stride[i] = x->stride[d];
    }
    share(o, x);
    o->ndim = x->ndim;
    return true;
}

void wki_canon_expand(const wki_tensor *x, int64_t *ia) {
    if (ia[0] < x->ndim || ia[0] > WK_MAX_DIMS)
        return;
    int64_t *size = ia + 1 + (ia[0] - x->ndim);
    for (int i = 0; i < x->ndim; i++)
        if (size[i] == -1)
            size[i] = x->size[i];
}

bool wki_infer_expand(wk_ctx *c, const wki_call *k) {
    const wki_tensor *x = k->in[0];
    wki_tensor *o = k->out[0];
    int n = (int)k->ia[0], lead = n - x->ndim;
    const int64_t *size = k->ia + 1;
    char sx[128], so[128];
    if (!wki_list_ok(c, k->ia[0], "size") || !wki_size_ok(c, n, size))
        return false;
    bool fits = lead >= 0;
    for (int i = 0; fits && i < n; i++) {
        int j = i - lead;
        fits = j < 0 || x->size[j] == size[i] || x->size[j] == 1;
        o->size[i] = size[i];
        o->stride[i] = j < 0 || x->size[j] != size[i] ? 0 : x->stride[j];
    }
    if (!fits)
        return wki_fail(c, WK_SHAPE, "shape %s does not expand to %s",
                        wki_shape_text(sx, sizeof sx, x->ndim, x->size),
                        wki_shape_text(so, sizeof so, n, size));
    share(o, x);
    o->ndim = (uint8_t)n;
    return true;
}

static int64_t clamp_bound(int64_t at, int64_t n) {
    if (at < 0)
        at += n;
    return at < 0 ? 0 : at > n ? n : at;
}

/* ia: dim, start, stop, step. */
void wki_canon_slice(const wki_tensor *x, int64_t *ia) {
    if (ia[0] < 0 || ia[0] >= x->ndim)
        return;
    int64_t n = x->size[ia[0]];
    ia[1] = clamp_bound(ia[1], n);
    ia[2] = clamp_bound(ia[2], n);
    if (ia[2] < ia[1])
        ia[2] = ia[1];
}

bool wki_infer_slice(wk_ctx *c, const wki_call *k) {
    const wki_tensor *x = k->in[0];
    wki_tensor *o = k->out[0];
    int64_t dim = k->ia[0], start = k->ia[1], stop = k->ia[2], step = k->ia[3];
    if (x->ndim == 0)
        return wki_fail(c, WK_SHAPE, "`x` has no dimension to slice");
    if (!wki_dim_ok(c, x, dim))
        return false;
    if (step < 1)
        return wki_fail(c, WK_INVALID, "step %lld, at least 1 is needed", (long long)step);
    share(o, x);
    wki_same_shape(o, x);
    memcpy(o->stride, x->stride, sizeof o->stride);
    o->size[dim] = stop > start ? 1 + (stop - start - 1) / step : 0;
    if (o->size[dim]) { /* an empty view stays inside its storage */
        o->off += start * x->stride[dim];
        o->stride[dim] = o->size[dim] > 1 ? x->stride[dim] * step : x->stride[dim];
    }
    return true;
}

/* Do start, start + step, ..., n of them, lie below size? Without overflow. */
static bool fits(int64_t n, int64_t start, int64_t step, int64_t size) {
    return n == 0 || (start < size && n - 1 <= (size - 1 - start) / step);
}

/* ia: size list, dim, start, step, all from the record of a slice. */
bool wki_infer_pad_slice(wk_ctx *c, const wki_call *k) {
    const wki_tensor *dy = k->in[0];
    wki_tensor *o = k->out[0];
    if (!wki_need_f32(c, dy, "dy") || !wki_list_ok(c, k->ia[0], "size") ||
        !wki_size_ok(c, (int)k->ia[0], k->ia + 1))
        return false;
    int n = (int)k->ia[0];
    int64_t dim = k->ia[1 + n], start = k->ia[2 + n], step = k->ia[3 + n];
    bool ok = n == dy->ndim && dim >= 0 && dim < n && start >= 0 && step >= 1;
    for (int i = 0; ok && i < n; i++)
        ok = i == dim ? fits(dy->size[i], start, step, k->ia[1 + i]) : dy->size[i] == k->ia[1 + i];
    char sd[128], so[128];
    if (!ok)
        return wki_fail(c, WK_SHAPE, "`dy` of shape %s is no slice of %s",
                        wki_shape_text(sd, sizeof sd, dy->ndim, dy->size),
                        wki_shape_text(so, sizeof so, n, k->ia + 1));
    o->dtype = WK_F32;
    o->ndim = (uint8_t)n;
    memcpy(o->size, k->ia + 1, (size_t)n * sizeof *o->size);
    return true;
}
