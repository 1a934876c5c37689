/* Row primitives of the CPU kernels, one set for each tier: what moves most of the bytes around the matrix
 * products. Calls nothing. */
#ifndef WKI_K_ROWS_H
#define WKI_K_ROWS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/cpu.h"

struct wki_conv;

typedef struct wki_k_rows {
    /* dst[r * dld + i] = src[r * sld + i] for lo <= i < hi, else 0, for r < rows and i < n. Reads nothing
       else. */
    void (*copy)(float *dst, int64_t dld, const float *src, int64_t sld, int64_t rows, int64_t n, int64_t lo,
                 int64_t hi);
    /* The same from src[r * sld + 2 * i]. */
    void (*copy_even)(float *dst, int64_t dld, const float *src, int64_t sld, int64_t rows, int64_t n,
                      int64_t lo, int64_t hi);
    /* dst[r * dld + i] += src[r * sld + i] for r < rows and i < n. */
    void (*add)(float *dst, int64_t dld, const float *src, int64_t sld, int64_t rows, int64_t n);
    /* n windows of 2 by 2 side by side in rows a and b: the largest element of each, a NaN counting as
       largest and the first of equals winning, and its number, where a[0] has number `at` and b[0] `at` +
       width. */
    void (*pool2x2)(float *y, int32_t *idx, const float *a, const float *b, int64_t n, int32_t at,
                    int32_t width);
    /* The two below are parts of k_conv.h, for strides of 1. The first may be NULL; it wants plain planes,
       windows as many as elements, kernels at most WKI_K_SHIFT_MAX wide, and ld a multiple of 16. */
    void (*shift)(const struct wki_conv *g, float *col, int64_t ld, const float *x, int64_t channel_stride,
                  int64_t nc, int64_t r0, int64_t nr);
    /* One channel of wki_col2im. */
    void (*fold)(const struct wki_conv *g, float *plane, const float *col, int64_t ld, int64_t r0, int64_t nr,
                 bool add);
} wki_k_rows;

#define WKI_K_SHIFT_MAX 8

const wki_k_rows *wki_k_rows_of(wki_isa isa);

extern const wki_k_rows wki_k_rows_baseline;
#if defined(__x86_64__)
extern const wki_k_rows wki_k_rows_avx512;
#endif

#endif
