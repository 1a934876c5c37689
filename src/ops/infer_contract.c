/* Inference of contractions, convolutions, pooling and indexing. May call: core, ops/infer.h. */
#include <string.h>

#include "ops/infer.h"
#include "ops_gen.h"

static bool two_shapes(wk_ctx *c, const wki_tensor *a, const wki_tensor *b, const char *what) {
    char sa[128], sb[128];
    return wki_fail(c, WK_SHAPE, "shapes %s and %s: %s", wki_shape_text(sa, sizeof sa, a->ndim, a->size),
                    wki_shape_text(sb, sizeof sb, b->ndim, b->size), what);
}

bool wki_infer_bmm(wk_ctx *c, const wki_call *k) {
    const wki_tensor *a = k->in[0], *b = k->in[1];
    wki_tensor *o = k->out[0];
    if (!wki_need_f32(c, a, "a") || !wki_need_f32(c, b, "b"))
        return false;
    int n = a->ndim;
    if (n < 2 || b->ndim != n)
        return two_shapes(c, a, b, "equal ranks of at least 2 are needed");
    if (a->size[n - 1] != b->size[n - 2])
        return two_shapes(c, a, b, "the inner sizes differ");
    for (int i = 0; i < n - 2; i++)
        if (a->size[i] != b->size[i])
            return two_shapes(c, a, b, "the batch dimensions differ");
    o->dtype = WK_F32;
    wki_same_shape(o, a);
    o->size[n - 1] = b->size[n - 1];
    return wki_size_ok(c, n, o->size);
}

static bool need_bias(wk_ctx *c, const wki_tensor *b, int64_t n) {
    char s[128];
    if (!b)
        return true;
    if (!wki_need_f32(c, b, "b"))
        return false;
    if (b->ndim != 1 || b->size[0] != n)
        return wki_fail(c, WK_SHAPE, "`b` has shape %s, (%lld) is needed",
                        wki_shape_text(s, sizeof s, b->ndim, b->size), (long long)n);
    return true;
}

bool wki_infer_linear(wk_ctx *c, const wki_call *k) {
    const wki_tensor *x = k->in[0], *w = k->in[1];
    wki_tensor *o = k->out[0];
    char sx[128], sw[128];
    if (!wki_need_f32(c, x, "x") || !wki_need_f32(c, w, "w") || !wki_need_ndim(c, w, "w", 2))
        return false;
    if (x->ndim == 0 || x->size[x->ndim - 1] != w->size[1])
        return wki_fail(c, WK_SHAPE, "`x` has shape %s, its last size must be the last of `w` %s",
                        wki_shape_text(sx, sizeof sx, x->ndim, x->size),
                        wki_shape_text(sw, sizeof sw, w->ndim, w->size));
    if (!need_bias(c, k->in[2], w->size[0]))
        return false;
    o->dtype = WK_F32;
    wki_same_shape(o, x);
    o->size[x->ndim - 1] = w->size[0];
    return wki_size_ok(c, o->ndim, o->size);
}

/* ---- convolution ---------------------------------------------------------------------------------------------------- */

/* *out: windows of size k that fit into n with padding on both sides. */
static bool windows(wk_ctx *c, int64_t n, int64_t k, int64_t stride, int64_t pad, int64_t *out) {
    if (k < 1)
        return wki_fail(c, WK_INVALID, "kernel size %lld, at least 1 is needed", (long long)k);
    if (stride < 1 || stride > INT32_MAX)
        return wki_fail(c, WK_INVALID, "stride %lld, 1 to %d is needed", (long long)stride, INT32_MAX);
    if (pad < 0 || pad > INT32_MAX)
        return wki_fail(c, WK_INVALID, "padding %lld, 0 to %d is needed", (long long)pad, INT32_MAX);
    if (n < 0 || n > INT64_MAX / 4 || n + 2 * pad < k)
        return wki_fail(c, WK_SHAPE, "a kernel of %lld does not fit into %lld with padding %lld",
                        (long long)k, (long long)n, (long long)pad);
    *out = (n + 2 * pad - k) / stride + 1;
    return true;
}

static void shape4(wki_tensor *o, int64_t n, int64_t ch, int64_t h, int64_t w) {
    o->dtype = WK_F32;
    o->ndim = 4;
    o->size[0] = n;
    o->size[1] = ch;
    o->size[2] = h;
    o->size[3] = w;
}

static bool need_4d(wk_ctx *c, const wki_call *k) {
    for (int i = 0; i < 2; i++)
        if (!wki_need_f32(c, k->in[i], k->op->in_names[i]) ||
            !wki_need_ndim(c, k->in[i], k->op->in_names[i], 4))
            return false;
    return true;
}

bool wki_infer_conv2d(wk_ctx *c, const wki_call *k) {
    const wki_tensor *x = k->in[0], *w = k->in[1];
    if (!need_4d(c, k))
        return false;
    if (x->size[1] != w->size[1])
        return two_shapes(c, x, w, "`x` and `w` have different numbers of channels");
    if (!need_bias(c, k->in[2], w->size[0]))
        return false;
    int64_t oh = 0, ow = 0;
    if (!windows(c, x->size[2], w->size[2], k->ia[0], k->ia[2], &oh) ||
        !windows(c, x->size[3], w->size[3], k->ia[1], k->ia[3], &ow))
        return false;
    shape4(k->out[0], x->size[0], w->size[0], oh, ow);
    return wki_size_ok(c, 4, k->out[0]->size);
}

/* ia: H, W, stride_h, stride_w, pad_h, pad_w. */
bool wki_infer_conv2d_dx(wk_ctx *c, const wki_call *k) {
    const wki_tensor *dy = k->in[0], *w = k->in[1];
    if (!need_4d(c, k))
        return false;
    int64_t oh = 0, ow = 0;
    if (!windows(c, k->ia[0], w->size[2], k->ia[2], k->ia[4], &oh) ||
        !windows(c, k->ia[1], w->size[3], k->ia[3], k->ia[5], &ow))
        return false;
    if (dy->size[1] != w->size[0] || dy->size[2] != oh || dy->size[3] != ow)
        return two_shapes(c, dy, w, "`dy` is no output of a convolution with `w`");
    shape4(k->out[0], dy->size[0], w->size[1], k->ia[0], k->ia[1]);
    return wki_size_ok(c, 4, k->out[0]->size);
}

/* ia: kH, kW, stride_h, stride_w, pad_h, pad_w. */
bool wki_infer_conv2d_dw(wk_ctx *c, const wki_call *k) {
    const wki_tensor *dy = k->in[0], *x = k->in[1];
    if (!need_4d(c, k))
        return false;
    int64_t oh = 0, ow = 0;
    if (!windows(c, x->size[2], k->ia[0], k->ia[2], k->ia[4], &oh) ||
        !windows(c, x->size[3], k->ia[1], k->ia[3], k->ia[5], &ow))
        return false;
    if (dy->size[0] != x->size[0] || dy->size[2] != oh || dy->size[3] != ow)
        return two_shapes(c, dy, x, "`dy` is no output of a convolution of `x`");
    shape4(k->out[0], dy->size[1], x->size[1], k->ia[0], k->ia[1]);
    return wki_size_ok(c, 4, k->out[0]->size);
}

/* ---- pooling -------------------------------------------------------------------------------------------------------- */

/* ia: kh, kw, stride_h, stride_w, pad_h, pad_w. */
bool wki_infer_max_pool2d(wk_ctx *c, const wki_call *k) {
    const wki_tensor *x = k->in[0];
    const int64_t *ia = k->ia;
    if (!wki_need_f32(c, x, "x") || !wki_need_ndim(c, x, "x", 4))
        return false;
    int64_t oh = 0, ow = 0;
    if (!windows(c, x->size[2], ia[0], ia[2], ia[4], &oh) ||
        !windows(c, x->size[3], ia[1], ia[3], ia[5], &ow))
        return false;
    if (ia[4] > ia[0] / 2 || ia[5] > ia[1] / 2) /* otherwise a window could lie in the padding */
        return wki_fail(c, WK_INVALID, "padding (%lld, %lld) is more than half of the kernel (%lld, %lld)",
                        (long long)ia[4], (long long)ia[5], (long long)ia[0], (long long)ia[1]);
    if (x->size[2] == 0 || x->size[3] == 0)
        return wki_fail(c, WK_SHAPE, "planes of %lld x %lld have no element to take the largest of",
                        (long long)x->size[2], (long long)x->size[3]);
    int64_t plane;
    if (__builtin_mul_overflow(x->size[2], x->size[3], &plane) || plane > INT32_MAX)
        return wki_fail(c, WK_SHAPE, "planes of more than 2^31 - 1 elements");
    shape4(k->out[0], x->size[0], x->size[1], oh, ow);
    shape4(k->out[1], x->size[0], x->size[1], oh, ow);
    k->out[1]->dtype = WK_I32;
    return wki_size_ok(c, 4, k->out[0]->size);
}

bool wki_infer_max_pool2d_grad(wk_ctx *c, const wki_call *k) {
    const wki_tensor *dy = k->in[0], *idx = k->in[1];
    if (!wki_need_f32(c, dy, "dy") || !wki_need_ndim(c, dy, "dy", 4) ||
        !wki_need_dtype(c, idx, "idx", WK_I32) || !wki_need_same_shape(c, dy, "dy", idx, "idx"))
        return false;
    shape4(k->out[0], dy->size[0], dy->size[1], k->ia[0], k->ia[1]);
    return wki_size_ok(c, 4, k->out[0]->size);
}

bool wki_infer_max_pool2d_gather(wk_ctx *c, const wki_call *k) {
    const wki_tensor *x = k->in[0], *idx = k->in[1];
    if (!wki_need_f32(c, x, "x") || !wki_need_ndim(c, x, "x", 4) || !wki_need_dtype(c, idx, "idx", WK_I32) ||
        !wki_need_ndim(c, idx, "idx", 4))
        return false;
    if (x->size[0] != idx->size[0] || x->size[1] != idx->size[1])
        return two_shapes(c, x, idx, "`x` and `idx` have different planes");
    shape4(k->out[0], idx->size[0], idx->size[1], idx->size[2], idx->size[3]);
    return true;
}

/* ---- indexing ------------------------------------------------------------------------------------------------------- */

bool wki_infer_embedding(wk_ctx *c, const wki_call *k) {
    const wki_tensor *w = k->in[0], *idx = k->in[1];
    wki_tensor *o = k->out[0];
    if (!wki_need_f32(c, w, "weight") || !wki_need_ndim(c, w, "weight", 2) ||
        !wki_need_dtype(c, idx, "idx", WK_I64))
        return false;
    if (idx->ndim == WK_MAX_DIMS)
        return wki_fail(c, WK_SHAPE, "the result would have more than %d dimensions", WK_MAX_DIMS);
    wki_same_shape(o, idx);
    o->dtype = WK_F32;
    o->size[o->ndim++] = w->size[1];
    return wki_size_ok(c, o->ndim, o->size);
}

bool wki_infer_embedding_grad(wk_ctx *c, const wki_call *k) {
    const wki_tensor *dy = k->in[0], *idx = k->in[1];
    wki_tensor *o = k->out[0];
    if (!wki_need_f32(c, dy, "dy") || !wki_need_dtype(c, idx, "idx", WK_I64))
        return false;
    bool ok = dy->ndim == idx->ndim + 1;
    for (int i = 0; ok && i < idx->ndim; i++)
        ok = dy->size[i] == idx->size[i];
    if (!ok)
        return two_shapes(c, dy, idx, "`dy` must have the shape of `idx` and one dimension more");
    if (k->ia[0] == 0 && idx->numel > 0)
        return wki_fail(c, WK_INDEX, "%lld indices into no rows", (long long)idx->numel);
    o->dtype = WK_F32;
    o->ndim = 2;
    o->size[0] = k->ia[0];
    o->size[1] = dy->size[dy->ndim - 1];
    return wki_size_ok(c, 2, o->size);
}
