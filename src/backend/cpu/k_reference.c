/* The slow twins that define what the kernels compute: plain loops, any strides, sums in double and
 * rounded once. Tests compare with them, and they are the last row of each op. Calls core (errors). */
#include <math.h>
#include <string.h>

#include "backend/cpu/k_util.h"
#include "backend/kernels.h"

#define ALWAYS(name)                                                                                         \
    bool wki_k_##name##_ok(const wki_launch *l) {                                                            \
        (void)l;                                                                                             \
        return true;                                                                                         \
    }

static int64_t product(int nd, const int64_t *size) {
    int64_t n = 1;
    for (int i = 0; i < nd; i++)
        n *= size[i];
    return n;
}

static int64_t at4(const wki_view *v, int64_t i, int64_t j, int64_t k, int64_t l) {
    return i * v->stride[0] + j * v->stride[1] + k * v->stride[2] + l * v->stride[3];
}

/* ---- copies -------------------------------------------------------------------------------------------- */

ALWAYS(copy_wide_reference)
bool wki_k_copy_wide_reference_run(const wki_launch *l) {
    const wki_view *x = &l->in[0];
    int64_t bytes = (int64_t)wki_dtype_size((wk_dtype)x->dtype);
    const char *src = x->data;
    char *dst = l->out[0].data;
    for (int64_t i = 0; i < x->numel; i++)
        memcpy(dst + i * bytes, src + wki_k_offset(x, x->ndim, i) * bytes, (size_t)bytes);
    return true;
}

ALWAYS(pad_slice_reference)
bool wki_k_pad_slice_reference_run(const wki_launch *l) {
    const wki_view *dy = &l->in[0], *dx = &l->out[0];
    int nd = dx->ndim;
    int64_t dim = l->ia[1 + nd], start = l->ia[2 + nd], step = l->ia[3 + nd];
    const float *src = dy->data;
    float *dst = dx->data;
    for (int64_t i = 0; i < dx->numel; i++)
        dst[i] = 0;
    for (int64_t i = 0; i < dy->numel; i++) {
        int64_t rest = i, to = 0;
        for (int d = nd - 1; d >= 0; d--) {
            int64_t at = rest % dy->size[d];
            rest /= dy->size[d];
            to += (d == dim ? start + at * step : at) * dx->stride[d];
        }
        dst[to] = src[wki_k_offset(dy, nd, i)];
    }
    return true;
}

/* ---- matrix products ----------------------------------------------------------------------------------- */

ALWAYS(bmm_reference)
bool wki_k_bmm_reference_run(const wki_launch *l) {
    const wki_view *a = &l->in[0], *b = &l->in[1];
    int nd = a->ndim;
    int64_t m = a->size[nd - 2], k = a->size[nd - 1], n = b->size[nd - 1], batch = product(nd - 2, a->size);
    float *y = l->out[0].data;
    for (int64_t i = 0; i < batch; i++) {
        const float *pa = (const float *)a->data + wki_k_offset(a, nd - 2, i);
        const float *pb = (const float *)b->data + wki_k_offset(b, nd - 2, i);
        for (int64_t r = 0; r < m; r++) {
            for (int64_t c = 0; c < n; c++) {
                double sum = 0;
                for (int64_t p = 0; p < k; p++)
                    sum += (double)pa[r * a->stride[nd - 2] + p * a->stride[nd - 1]] *
                           (double)pb[p * b->stride[nd - 2] + c * b->stride[nd - 1]];
                *y++ = (float)sum;
            }
        }
    }
    return true;
}

ALWAYS(linear_reference)
bool wki_k_linear_reference_run(const wki_launch *l) {
    const wki_view *x = &l->in[0], *w = &l->in[1], *b = &l->in[2];
    int nd = x->ndim;
    int64_t rows = product(nd - 1, x->size), k = w->size[1], n = w->size[0];
    float *y = l->out[0].data;
    for (int64_t r = 0; r < rows; r++) {
        const float *px = (const float *)x->data + wki_k_offset(x, nd - 1, r);
        for (int64_t c = 0; c < n; c++) {
            double sum = wki_k_absent(b) ? 0 : (double)((const float *)b->data)[c * b->stride[0]];
            for (int64_t p = 0; p < k; p++)
                sum += (double)px[p * x->stride[nd - 1]] *
                       (double)((const float *)w->data)[c * w->stride[0] + p * w->stride[1]];
            *y++ = (float)sum;
        }
    }
    return true;
}

ALWAYS(linear_relu_reference)
bool wki_k_linear_relu_reference_run(const wki_launch *l) {
    if (!wki_k_linear_reference_run(l))
        return false;
    float *y = l->out[0].data;
    for (int64_t i = 0; i < l->out[0].numel; i++)
        y[i] = y[i] < 0 ? 0 : y[i];
    return true;
}

/* ---- convolution --------------------------------------------------------------------------------------- */

/* Element (n, c, h, w), 0 in the padding around. */
static double padded(const wki_view *x, int64_t n, int64_t c, int64_t h, int64_t w) {
    if (h < 0 || h >= x->size[2] || w < 0 || w >= x->size[3])
        return 0;
    return (double)((const float *)x->data)[at4(x, n, c, h, w)];
}

ALWAYS(conv2d_reference)
bool wki_k_conv2d_reference_run(const wki_launch *l) {
    const wki_view *x = &l->in[0], *w = &l->in[1], *b = &l->in[2], *y = &l->out[0];
    int64_t sh = l->ia[0], sw = l->ia[1], ph = l->ia[2], pw = l->ia[3];
    float *dst = y->data;
    for (int64_t i = 0; i < y->numel; i++) {
        int64_t ow = i % y->size[3], oh = i / y->size[3] % y->size[2],
                o = i / y->size[3] / y->size[2] % y->size[1];
        int64_t n = i / y->size[3] / y->size[2] / y->size[1];
        double sum = wki_k_absent(b) ? 0 : (double)((const float *)b->data)[o * b->stride[0]];
        for (int64_t c = 0; c < w->size[1]; c++)
            for (int64_t kh = 0; kh < w->size[2]; kh++)
                for (int64_t kw = 0; kw < w->size[3]; kw++)
                    sum += padded(x, n, c, oh * sh + kh - ph, ow * sw + kw - pw) *
                           (double)((const float *)w->data)[at4(w, o, c, kh, kw)];
        dst[i] = (float)sum;
    }
    return true;
}

/* Where a window that covers position `at` with its element k begins, as a window number; -1 if none does. */
static int64_t window_at(int64_t at, int64_t k, int64_t stride, int64_t pad, int64_t windows) {
    int64_t from = at + pad - k;
    return from < 0 || from % stride || from / stride >= windows ? -1 : from / stride;
}

ALWAYS(conv2d_dx_reference)
bool wki_k_conv2d_dx_reference_run(const wki_launch *l) {
    const wki_view *dy = &l->in[0], *w = &l->in[1], *dx = &l->out[0];
    int64_t sh = l->ia[2], sw = l->ia[3], ph = l->ia[4], pw = l->ia[5];
    float *dst = dx->data;
    for (int64_t i = 0; i < dx->numel; i++) {
        int64_t x = i % dx->size[3], y = i / dx->size[3] % dx->size[2],
                c = i / dx->size[3] / dx->size[2] % dx->size[1];
        int64_t n = i / dx->size[3] / dx->size[2] / dx->size[1];
        double sum = 0;
        for (int64_t kh = 0; kh < w->size[2]; kh++) {
            int64_t oh = window_at(y, kh, sh, ph, dy->size[2]);
            for (int64_t kw = 0; oh >= 0 && kw < w->size[3]; kw++) {
                int64_t ow = window_at(x, kw, sw, pw, dy->size[3]);
                for (int64_t o = 0; ow >= 0 && o < w->size[0]; o++)
                    sum += (double)((const float *)dy->data)[at4(dy, n, o, oh, ow)] *
                           (double)((const float *)w->data)[at4(w, o, c, kh, kw)];
            }
        }
        dst[i] = (float)sum;
    }
    return true;
}

ALWAYS(conv2d_dw_reference)
bool wki_k_conv2d_dw_reference_run(const wki_launch *l) {
    const wki_view *dy = &l->in[0], *x = &l->in[1], *dw = &l->out[0];
    int64_t sh = l->ia[2], sw = l->ia[3], ph = l->ia[4], pw = l->ia[5];
    float *dst = dw->data;
    for (int64_t i = 0; i < dw->numel; i++) {
        int64_t kw = i % dw->size[3], kh = i / dw->size[3] % dw->size[2],
                c = i / dw->size[3] / dw->size[2] % dw->size[1];
        int64_t o = i / dw->size[3] / dw->size[2] / dw->size[1];
        double sum = 0;
        for (int64_t n = 0; n < dy->size[0]; n++)
            for (int64_t oh = 0; oh < dy->size[2]; oh++)
                for (int64_t ow = 0; ow < dy->size[3]; ow++)
                    sum += (double)((const float *)dy->data)[at4(dy, n, o, oh, ow)] *
                           padded(x, n, c, oh * sh + kh - ph, ow * sw + kw - pw);
        dst[i] = (float)sum;
    }
    return true;
}

/* ---- pooling ------------------------------------------------------------------------------------------- */

ALWAYS(max_pool2d_reference)
bool wki_k_max_pool2d_reference_run(const wki_launch *l) {
    const wki_view *x = &l->in[0], *y = &l->out[0];
    int64_t kh = l->ia[0], kw = l->ia[1], sh = l->ia[2], sw = l->ia[3], ph = l->ia[4], pw = l->ia[5];
    float *val = y->data;
    int32_t *idx = l->out[1].data;
    if (x->numel == 0 && y->numel)
        return wki_fail(l->c, WK_SHAPE, "windows without elements");
    for (int64_t i = 0; i < y->numel; i++) {
        int64_t ow = i % y->size[3], oh = i / y->size[3] % y->size[2], plane = i / y->size[3] / y->size[2];
        const float *src = (const float *)x->data + wki_k_offset(x, 2, plane);
        float best = 0;
        int64_t where = -1;
        for (int64_t h = wki_k_max(oh * sh - ph, 0); h < wki_k_min(oh * sh - ph + kh, x->size[2]); h++) {
            for (int64_t w = wki_k_max(ow * sw - pw, 0); w < wki_k_min(ow * sw - pw + kw, x->size[3]); w++) {
                float v = src[h * x->stride[2] + w * x->stride[3]];
                if (where < 0 || v > best || (isnan(v) && !isnan(best))) {
                    best = v;
                    where = h * x->size[3] + w;
                }
            }
        }
        val[i] = best;
        idx[i] = (int32_t)where;
    }
    return true;
}

static bool bad_element(const wki_launch *l, int64_t at, int64_t plane) {
    return wki_fail(l->c, WK_INDEX, "element %lld of a plane of %lld", (long long)at, (long long)plane);
}

ALWAYS(max_pool2d_grad_reference)
bool wki_k_max_pool2d_grad_reference_run(const wki_launch *l) {
    const wki_view *dy = &l->in[0], *idx = &l->in[1], *dx = &l->out[0];
    int64_t plane = dx->size[2] * dx->size[3], windows = dy->size[2] * dy->size[3];
    float *dst = dx->data;
    for (int64_t i = 0; i < dx->numel; i++)
        dst[i] = 0;
    for (int64_t i = 0; i < dy->numel; i++) {
        int64_t at = ((const int32_t *)idx->data)[wki_k_offset(idx, 4, i)];
        if (at < 0 || at >= plane)
            return bad_element(l, at, plane);
        dst[i / windows * plane + at] += ((const float *)dy->data)[wki_k_offset(dy, 4, i)];
    }
    return true;
}

ALWAYS(max_pool2d_gather_reference)
bool wki_k_max_pool2d_gather_reference_run(const wki_launch *l) {
    const wki_view *x = &l->in[0], *idx = &l->in[1], *y = &l->out[0];
    int64_t plane = x->size[2] * x->size[3], windows = y->size[2] * y->size[3];
    float *dst = y->data;
    for (int64_t i = 0; i < y->numel; i++) {
        int64_t at = ((const int32_t *)idx->data)[wki_k_offset(idx, 4, i)];
        if (at < 0 || at >= plane)
            return bad_element(l, at, plane);
        dst[i] = ((const float *)x->data)[wki_k_offset(x, 4, i / windows * plane + at)];
    }
    return true;
}

/* ---- indexing ------------------------------------------------------------------------------------------ */

/* Row number at position i; -1 after an error. */
static int64_t row_at(const wki_launch *l, const wki_view *idx, int64_t i, int64_t rows) {
    int64_t r = ((const int64_t *)idx->data)[wki_k_offset(idx, idx->ndim, i)];
    if (r >= 0 && r < rows)
        return r;
    wki_fail(l->c, WK_INDEX, "index %lld at position %lld is out of range for %lld rows", (long long)r,
             (long long)i, (long long)rows);
    return -1;
}

ALWAYS(embedding_reference)
bool wki_k_embedding_reference_run(const wki_launch *l) {
    const wki_view *w = &l->in[0], *idx = &l->in[1];
    int64_t width = w->size[1];
    float *dst = l->out[0].data;
    for (int64_t i = 0; i < idx->numel; i++) {
        int64_t r = row_at(l, idx, i, w->size[0]);
        if (r < 0)
            return false;
        for (int64_t d = 0; d < width; d++)
            dst[i * width + d] = ((const float *)w->data)[r * w->stride[0] + d * w->stride[1]];
    }
    return true;
}

ALWAYS(embedding_grad_reference)
bool wki_k_embedding_grad_reference_run(const wki_launch *l) {
    const wki_view *dy = &l->in[0], *idx = &l->in[1], *dw = &l->out[0];
    int64_t width = dw->size[1];
    float *dst = dw->data;
    for (int64_t i = 0; i < dw->numel; i++)
        dst[i] = 0;
    for (int64_t i = 0; i < idx->numel; i++) {
        int64_t r = row_at(l, idx, i, dw->size[0]);
        if (r < 0)
            return false;
        for (int64_t d = 0; d < width; d++)
            dst[r * width + d] += ((const float *)dy->data)[wki_k_offset(dy, dy->ndim, i * width + d)];
    }
    return true;
}
