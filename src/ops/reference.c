/* The slow twins: every op that is not a loop program, written in terms of ops that are (and matrix products, themselves
 * checked against a sum). Tests compare kernels with these; nothing else calls them. Selections are products with a
 * matrix of zeros and ones, so inputs must be finite. May call: core, op wrappers. */
#include "ops/infer.h"
#include "ops_gen.h"

/* f32 values 0, 1, ..., on x's device, in the given shape. */
static wki_tensor *iota(wk_ctx *c, const wki_tensor *x, int ndim, const int64_t *size) {
    int64_t n = 1;
    for (int i = 0; i < ndim; i++)
        n *= size[i];
    float *v = wki_malloc((size_t)(n ? n : 1) * sizeof *v);
    if (!v) {
        wki_fail(c, WK_NOMEM, "no host memory for %lld indices", (long long)n);
        return wki_poison(c);
    }
    for (int64_t i = 0; i < n; i++)
        v[i] = (float)i;
    uint8_t dev = c->dev;
    c->dev = x->st ? x->st->dev : dev;
    wk_tensor *t = wk_from_data(c, WK_F32, ndim, size, v);
    c->dev = dev;
    wki_free(v);
    return wki_slot(t);
}

/* (L, n) f32: 1 where column == idx[row], for any idx of L elements. */
static wki_tensor *one_hot(wk_ctx *c, wki_tensor *idx, int64_t n) {
    wki_tensor *at = wki_cast(c, wki_reshape(c, idx, 2, (const int64_t[]){idx->numel, 1}), WK_F32);
    return wki_cast(c, wki_eq(c, at, iota(c, idx, 1, &n)), WK_F32);
}

wki_tensor *wki_ref_copy_wide(wk_ctx *c, wki_tensor *x) {
    wk_dtype d = (wk_dtype)x->dtype;
    return wki_cast(c, wki_cast(c, x, d == WK_I64 ? WK_I32 : WK_F32), d);
}

/* ---- products ------------------------------------------------------------------------------------------------------- */

wki_tensor *wki_ref_bmm(wk_ctx *c, wki_tensor *a, wki_tensor *b) {
    int64_t sa[WK_MAX_DIMS + 1], sb[WK_MAX_DIMS + 1];
    int n = a->ndim;
    for (int i = 0; i < n; i++) {
        sa[i] = a->size[i];
        sb[i < n - 1 ? i : n] = b->size[i];
    }
    sa[n] = 1;
    sb[n - 1] = b->size[n - 2];
    sb[n - 2] = 1;
    wki_tensor *terms = wki_mul(c, wki_reshape(c, a, n + 1, sa), wki_reshape(c, b, n + 1, sb));
    return wki_sum(c, terms, (const int64_t[]){-2}, 1, false);
}

wki_tensor *wki_ref_linear(wk_ctx *c, wki_tensor *x, wki_tensor *w, wki_tensor *b) {
    wki_tensor *y = wki_matmul(c, x, wki_transpose(c, w, 0, 1));
    return b ? wki_add(c, y, b) : y;
}

wki_tensor *wki_ref_linear_relu(wk_ctx *c, wki_tensor *x, wki_tensor *w, wki_tensor *b) {
    return wki_relu(c, wki_ref_linear(c, x, w, b));
}

/* ---- convolution ---------------------------------------------------------------------------------------------------- */

/* Selection as a product: dy (..., n along dim, ...) with the (n, size) matrix that is 1 at (j, start + j step). */
wki_tensor *wki_ref_pad_slice(wk_ctx *c, wki_tensor *dy, int ndim, const int64_t *size, int64_t dim,
                              int64_t start, int64_t step) {
    (void)ndim;
    wki_tensor *rows = iota(c, dy, 1, &dy->size[dim]);
    wki_tensor *select =
        one_hot(c, wki_add_scalar(c, wki_mul_scalar(c, rows, (double)step), (double)start), size[dim]);
    wki_tensor *last = wki_transpose(c, dy, (int)dim, -1);
    return wki_transpose(c, wki_matmul(c, last, select), (int)dim, -1);
}

typedef struct conv_shape {
    int64_t sh, sw, ph, pw;
    int64_t oh, ow;
} conv_shape;

static wki_tensor *pad_planes(wk_ctx *c, wki_tensor *x, const conv_shape *s) {
    int64_t size[4] = {x->size[0], x->size[1], x->size[2] + 2 * s->ph, x->size[3]};
    wki_tensor *t = wki_pad_slice(c, x, 4, size, 2, s->ph, 1);
    size[3] += 2 * s->pw;
    return wki_pad_slice(c, t, 4, size, 3, s->pw, 1);
}

/* What kernel position (i, j) sees of padded planes: (N, C, oh, ow). */
static wki_tensor *window(wk_ctx *c, wki_tensor *padded, const conv_shape *s, int64_t i, int64_t j) {
    wki_tensor *t = wki_slice(c, padded, 2, i, i + s->sh * (s->oh - 1) + 1, s->sh);
    return wki_slice(c, t, 3, j, j + s->sw * (s->ow - 1) + 1, s->sw);
}

/* (N, C, h, w) as (N * h * w, C). */
static wki_tensor *pixels(wk_ctx *c, wki_tensor *t) {
    return wki_reshape(c, wki_permute(c, t, (const int64_t[]){0, 2, 3, 1}, 4), 2,
                       (const int64_t[]){-1, t->size[1]});
}

static wki_tensor *planes(wk_ctx *c, wki_tensor *t, int64_t n, int64_t channels, int64_t h, int64_t w) {
    wki_tensor *r = wki_reshape(c, t, 4, (const int64_t[]){n, h, w, channels});
    return wki_permute(c, r, (const int64_t[]){0, 3, 1, 2}, 4);
}

/* w[:, :, i, j] as (O, C). */
static wki_tensor *tap(wk_ctx *c, wki_tensor *w, int64_t i, int64_t j) {
    wki_tensor *t = wki_slice(c, wki_slice(c, w, 2, i, i + 1, 1), 3, j, j + 1, 1);
    return wki_reshape(c, t, 2, (const int64_t[]){w->size[0], w->size[1]});
}

static wki_tensor *accumulate(wk_ctx *c, wki_tensor *sum, wki_tensor *t) {
    return sum ? wki_add(c, sum, t) : t;
}

wki_tensor *wki_ref_conv2d(wk_ctx *c, wki_tensor *x, wki_tensor *w, wki_tensor *b, int64_t stride_h,
                           int64_t stride_w, int64_t pad_h, int64_t pad_w) {
    conv_shape s = {stride_h, stride_w, pad_h, pad_w, 0, 0};
    s.oh = (x->size[2] + 2 * pad_h - w->size[2]) / stride_h + 1;
    s.ow = (x->size[3] + 2 * pad_w - w->size[3]) / stride_w + 1;
    wki_tensor *padded = pad_planes(c, x, &s), *y = NULL;
    for (int64_t i = 0; i < w->size[2]; i++)
        for (int64_t j = 0; j < w->size[3]; j++) {
            wki_tensor *seen = pixels(c, window(c, padded, &s, i, j));
            y = accumulate(c, y, wki_matmul(c, seen, wki_transpose(c, tap(c, w, i, j), 0, 1)));
        }
    if (b)
        y = wki_add(c, y, b);
    return planes(c, y, x->size[0], w->size[0], s.oh, s.ow);
}

wki_tensor *wki_ref_conv2d_dx(wk_ctx *c, wki_tensor *dy, wki_tensor *w, int64_t H, int64_t W,
                              int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w) {
    wki_tensor *g = pixels(c, dy), *sum = NULL;
    int64_t n = dy->size[0], oh = dy->size[2], ow = dy->size[3];
    for (int64_t i = 0; i < w->size[2]; i++)
        for (int64_t j = 0; j < w->size[3]; j++) {
            wki_tensor *t = planes(c, wki_matmul(c, g, tap(c, w, i, j)), n, w->size[1], oh, ow);
            int64_t size[4] = {n, w->size[1], H + 2 * pad_h, ow};
            t = wki_pad_slice(c, t, 4, size, 2, i, stride_h);
            size[3] = W + 2 * pad_w;
            sum = accumulate(c, sum, wki_pad_slice(c, t, 4, size, 3, j, stride_w));
        }
    return wki_slice(c, wki_slice(c, sum, 2, pad_h, pad_h + H, 1), 3, pad_w, pad_w + W, 1);
}

wki_tensor *wki_ref_conv2d_dw(wk_ctx *c, wki_tensor *dy, wki_tensor *x, int64_t kH, int64_t kW,
                              int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w) {
    conv_shape s = {stride_h, stride_w, pad_h, pad_w, dy->size[2], dy->size[3]};
    wki_tensor *padded = pad_planes(c, x, &s), *g = wki_transpose(c, pixels(c, dy), 0, 1), *sum = NULL;
    for (int64_t i = 0; i < kH; i++)
        for (int64_t j = 0; j < kW; j++) {
            int64_t size[4] = {dy->size[1], x->size[1], 1, 1};
            wki_tensor *t = wki_matmul(c, g, pixels(c, window(c, padded, &s, i, j)));
            t = wki_reshape(c, t, 4, size);
            size[2] = kH;
            t = wki_pad_slice(c, t, 4, size, 2, i, 1);
            size[3] = kW;
            sum = accumulate(c, sum, wki_pad_slice(c, t, 4, size, 3, j, 1));
        }
    return sum;
}

/* ---- pooling and indexing ------------------------------------------------------------------------------------------- */

wki_tensor *wki_ref_max_pool2d(wk_ctx *c, wki_tensor *x, int64_t kh, int64_t kw, int64_t stride_h,
                               int64_t stride_w, int64_t pad_h, int64_t pad_w, wki_tensor **idx) {
    conv_shape s = {stride_h, stride_w, pad_h, pad_w, 0, 0};
    s.oh = (x->size[2] + 2 * pad_h - kh) / stride_h + 1;
    s.ow = (x->size[3] + 2 * pad_w - kw) / stride_w + 1;
    wki_tensor *at = wki_expand(c, iota(c, x, 2, x->size + 2), 4, x->size);
    wki_tensor *outside = wki_logical_not(c, wki_cast(c, pad_planes(c, wki_full_like(c, x, 1), &s), WK_BOOL));
    wki_tensor *padded = wki_masked_fill(c, pad_planes(c, x, &s), outside, -__builtin_inf());
    wki_tensor *where = pad_planes(c, at, &s), *best = NULL, *best_at = NULL;
    for (int64_t i = 0; i < kh; i++)
        for (int64_t j = 0; j < kw; j++) {
            wki_tensor *v = window(c, padded, &s, i, j), *p = window(c, where, &s, i, j);
            wki_tensor *better = best ? wki_gt(c, v, best) : NULL;
            best = best ? wki_where(c, better, v, best) : v;
            best_at = better ? wki_where(c, better, p, best_at) : p;
        }
    if (idx)
        *idx = wki_cast(c, best_at, WK_I32);
    return wki_contiguous(c, best);
}

/* (N * C, outputs, H * W): 1 where an output came from an element. */
static wki_tensor *came_from(wk_ctx *c, wki_tensor *idx, int64_t plane) {
    int64_t n = idx->size[0] * idx->size[1], outputs = idx->size[2] * idx->size[3];
    return wki_reshape(c, one_hot(c, idx, plane), 3, (const int64_t[]){n, outputs, plane});
}

wki_tensor *wki_ref_max_pool2d_grad(wk_ctx *c, wki_tensor *dy, wki_tensor *idx, int64_t H, int64_t W) {
    int64_t n = dy->size[0] * dy->size[1], outputs = dy->size[2] * dy->size[3];
    wki_tensor *g = wki_reshape(c, dy, 3, (const int64_t[]){n, 1, outputs});
    wki_tensor *dx = wki_bmm(c, g, came_from(c, idx, H * W));
    return wki_reshape(c, dx, 4, (const int64_t[]){dy->size[0], dy->size[1], H, W});
}

wki_tensor *wki_ref_max_pool2d_gather(wk_ctx *c, wki_tensor *x, wki_tensor *idx) {
    int64_t plane = x->size[2] * x->size[3];
    wki_tensor *v = wki_reshape(c, x, 3, (const int64_t[]){x->size[0] * x->size[1], plane, 1});
    return wki_reshape(c, wki_bmm(c, came_from(c, idx, plane), v), 4, idx->size);
}

wki_tensor *wki_ref_embedding(wk_ctx *c, wki_tensor *weight, wki_tensor *idx) {
    int64_t size[WK_MAX_DIMS];
    for (int i = 0; i < idx->ndim; i++)
        size[i] = idx->size[i];
    size[idx->ndim] = weight->size[1];
    return wki_reshape(c, wki_bmm(c, one_hot(c, idx, weight->size[0]), weight), idx->ndim + 1, size);
}

wki_tensor *wki_ref_embedding_grad(wk_ctx *c, wki_tensor *dy, wki_tensor *idx, int64_t V) {
    wki_tensor *g = wki_reshape(c, dy, 2, (const int64_t[]){idx->numel, dy->size[dy->ndim - 1]});
    return wki_bmm(c, wki_transpose(c, one_hot(c, idx, V), 0, 1), g);
}
