/* The column matrix of a convolution, made from an image and added back to one. Calls k_rows. */
#include "backend/cpu/k_conv.h"

wki_span wki_inside(int64_t n, int64_t stride, int64_t from, int64_t limit) {
    int64_t lo = from < 0 ? wki_k_ceil(-from, stride) : 0;
    int64_t hi = from < limit ? wki_k_ceil(limit - from, stride) : 0;
    lo = wki_k_min(lo, n);
    return (wki_span){lo, wki_k_max(wki_k_min(hi, n), lo)};
}

/* Rows start at cache lines, and not all in the same few sets of the first-level cache. */
int64_t wki_col_stride(int64_t columns) {
    int64_t ld = wki_k_ceil(columns, 16) * 16;
    return ld % 128 ? ld : ld + 16;
}

static void zero(float *p, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        p[i] = 0;
}

/* One row of the column matrix, but for window rows outside the image. */
static void gather(const wki_conv *g, float *dst, const float *src, int64_t row_stride, int64_t step,
                   int64_t rows, wki_span in) {
    if (step == 1) {
        g->rows->copy(dst, g->ow, src, row_stride, rows, g->ow, in.lo, in.hi);
        return;
    }
    if (step == 2) {
        g->rows->copy_even(dst, g->ow, src, row_stride, rows, g->ow, in.lo, in.hi);
        return;
    }
    for (int64_t r = 0; r < rows; r++, dst += g->ow, src += row_stride) {
        zero(dst, in.lo);
        for (int64_t i = in.lo; i < in.hi; i++)
            dst[i] = src[i * step];
        zero(dst + in.hi, g->ow - in.hi);
    }
}

void wki_im2col(const wki_conv *g, float *col, int64_t ld, const float *x, const int64_t *xs, int64_t c0,
                int64_t nc, int64_t r0, int64_t nr) {
    bool plain = xs[3] == 1 && xs[2] == g->w;
    if (g->rows->shift && plain && g->sh == 1 && g->sw == 1 && g->ow == g->w && g->kw <= WKI_K_SHIFT_MAX) {
        g->rows->shift(g, col, ld, x + c0 * xs[1], xs[1], nc, r0, nr);
        return;
    }
    for (int64_t c = c0; c < c0 + nc; c++) {
        for (int64_t i = 0; i < g->kh; i++) {
            wki_span v = wki_inside(nr, g->sh, r0 * g->sh + i - g->ph, g->h);
            for (int64_t j = 0; j < g->kw; j++, col += ld) {
                wki_span in = wki_inside(g->ow, g->sw, j - g->pw, g->w);
                if (v.lo == v.hi || in.lo == in.hi) {
                    zero(col, nr * g->ow);
                    continue;
                }
                int64_t top = (r0 + v.lo) * g->sh + i - g->ph;
                zero(col, v.lo * g->ow);
                gather(g, col + v.lo * g->ow, x + c * xs[1] + top * xs[2] + (j - g->pw) * xs[3],
                       g->sh * xs[2], g->sw * xs[3], v.hi - v.lo, in);
                zero(col + v.hi * g->ow, (nr - v.hi) * g->ow);
            }
        }
    }
}

static void scatter_channel(const wki_conv *g, float *plane, const float *col, int64_t ld, int64_t r0,
                            int64_t nr) {
    for (int64_t i = 0; i < g->kh; i++) {
        wki_span v = wki_inside(nr, g->sh, r0 * g->sh + i - g->ph, g->h);
        for (int64_t j = 0; j < g->kw; j++, col += ld) {
            wki_span in = wki_inside(g->ow, g->sw, j - g->pw, g->w);
            for (int64_t r = v.lo; r < v.hi; r++) {
                float *dst = plane + ((r0 + r) * g->sh + i - g->ph) * g->w + j - g->pw;
                for (int64_t k = in.lo; k < in.hi; k++)
                    dst[k * g->sw] += col[r * g->ow + k];
            }
        }
    }
}

void wki_col2im(const wki_conv *g, float *image, const float *col, int64_t ld, int64_t nc, int64_t r0,
                int64_t nr, bool add) {
    int64_t plane = g->h * g->w;
    for (int64_t c = 0; c < nc; c++, image += plane, col += g->taps * ld) {
        if (g->sh == 1 && g->sw == 1) {
            g->rows->fold(g, image, col, ld, r0, nr, add);
            continue;
        }
        if (!add)
            zero(image, plane);
        scatter_channel(g, image, col, ld, r0, nr);
    }
}
