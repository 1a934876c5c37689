/* The column matrix of a convolution, made from an image and added back to one. Calls k_rows. */
#include <string.h>

#include "backend/cpu/k_conv.h"

/* Indices i of [0, n) with 0 <= i * stride + from < limit. */
typedef struct {
    int64_t lo, hi;
} range;

static range inside(int64_t n, int64_t stride, int64_t from, int64_t limit) {
    int64_t lo = from < 0 ? wki_k_ceil(-from, stride) : 0;
    int64_t hi = from < limit ? wki_k_ceil(limit - from, stride) : 0;
    lo = wki_k_min(lo, n);
    return (range){lo, wki_k_max(wki_k_min(hi, n), lo)};
}

static void zero(float *p, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        p[i] = 0;
}

/* One row of the column matrix, but for window rows outside the image. */
static void gather(const wki_conv *g, float *dst, const float *src, int64_t row_stride, int64_t step,
                   int64_t rows, range in) {
    if (step == 1) {
        g->rows->copy(dst, g->ow, src, row_stride, rows, g->ow, in.lo, in.hi);
        return;
    }
    for (int64_t r = 0; r < rows; r++, dst += g->ow, src += row_stride) {
        zero(dst, in.lo);
        for (int64_t i = in.lo; i < in.hi; i++)
            dst[i] = src[i * step];
        zero(dst + in.hi, g->ow - in.hi);
    }
}

void wki_im2col(const wki_conv *g, float *col, const float *x, const int64_t *xs, int64_t c0, int64_t nc,
                int64_t r0, int64_t nr) {
    for (int64_t c = c0; c < c0 + nc; c++) {
        for (int64_t i = 0; i < g->kh; i++) {
            range v = inside(nr, g->sh, r0 * g->sh + i - g->ph, g->h);
            for (int64_t j = 0; j < g->kw; j++, col += nr * g->ow) {
                range in = inside(g->ow, g->sw, j - g->pw, g->w);
                zero(col, v.lo * g->ow);
                zero(col + v.hi * g->ow, (nr - v.hi) * g->ow);
                if (v.lo < v.hi) {
                    int64_t top = (r0 + v.lo) * g->sh + i - g->ph;
                    gather(g, col + v.lo * g->ow, x + c * xs[1] + top * xs[2] + (j - g->pw) * xs[3],
                           g->sh * xs[2], g->sw * xs[3], v.hi - v.lo, in);
                }
            }
        }
    }
}

static void scatter(const wki_conv *g, float *dst, const float *src, int64_t rows, range in) {
    if (g->sw == 1) {
        g->rows->add(dst + in.lo, g->sh * g->w, src + in.lo, g->ow, rows, in.hi - in.lo);
        return;
    }
    for (int64_t r = 0; r < rows; r++, dst += g->sh * g->w, src += g->ow)
        for (int64_t i = in.lo; i < in.hi; i++)
            dst[i * g->sw] += src[i];
}

void wki_col2im(const wki_conv *g, float *image, const float *col, int64_t nc, int64_t r0, int64_t nr) {
    for (int64_t c = 0; c < nc; c++, image += g->h * g->w) {
        for (int64_t i = 0; i < g->kh; i++) {
            range v = inside(nr, g->sh, r0 * g->sh + i - g->ph, g->h);
            int64_t top = (r0 + v.lo) * g->sh + i - g->ph;
            for (int64_t j = 0; j < g->kw; j++, col += nr * g->ow)
                if (v.lo < v.hi)
                    scatter(g, image + top * g->w + j - g->pw, col + v.lo * g->ow, v.hi - v.lo,
                            inside(g->ow, g->sw, j - g->pw, g->w));
        }
    }
}
