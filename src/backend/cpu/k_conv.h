/* The geometry of a 2-d convolution and its column matrix, shared by the three ops of k_conv.c. Calls
 * k_rows. */
#ifndef WKI_K_CONV_H
#define WKI_K_CONV_H

#include "backend/cpu/k_rows.h"
#include "backend/cpu/k_util.h"

/* Image (n, c, h, w), kernel (o, c, kh, kw), result (n, o, oh, ow). The column matrix of an image has a
 * row for every (c, kh, kw) and a column for every (oh, ow): the image's element under that element of the
 * kernel in that window. */
typedef struct wki_conv {
    int64_t n, c, h, w, o, kh, kw, oh, ow;
    int64_t sh, sw, ph, pw;
    int64_t taps; /* kh * kw */
    const wki_k_rows *rows;
} wki_conv;

/* Indices i of [0, n) with 0 <= i * stride + from < limit are [lo, hi). */
typedef struct wki_span {
    int64_t lo, hi;
} wki_span;
wki_span wki_inside(int64_t n, int64_t stride, int64_t from, int64_t limit);

/* Row stride of a part of the column matrix with so many columns. */
int64_t wki_col_stride(int64_t columns);

/* Writes rows of channels [c0, c0 + nc) and columns of window rows [r0, r0 + nr) of image `x` (its first
 * element; strides xs of n, c, h, w) to `col`. */
void wki_im2col(const wki_conv *g, float *col, int64_t ld, const float *x, const int64_t *xs, int64_t c0,
                int64_t nc, int64_t r0, int64_t nr);

/* The transpose: gives each element of a plain image of nc channels the sum of the elements of `col` that
 * wki_im2col would make from it, or adds the sum to it. */
void wki_col2im(const wki_conv *g, float *image, const float *col, int64_t ld, int64_t nc, int64_t r0,
                int64_t nr, bool add);

#endif
