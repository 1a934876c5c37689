/* Row primitives for any CPU: four lanes where the compiler has them, and the choice of the tier. Calls
 * nothing. */
#include "backend/cpu/k_rows.h"

#include <math.h>
#include <string.h>

#include "backend/cpu/k_conv.h"

typedef float f4 __attribute__((vector_size(16)));

static f4 load(const float *p) {
    f4 v;
    memcpy(&v, p, sizeof v);
    return v;
}

static void store(float *p, f4 v) { memcpy(p, &v, sizeof v); }

static void copy(float *dst, int64_t dld, const float *src, int64_t sld, int64_t rows, int64_t n, int64_t lo,
                 int64_t hi) {
    for (int64_t r = 0; r < rows; r++, dst += dld, src += sld) {
        int64_t i = 0;
        for (; i < lo; i++)
            dst[i] = 0;
        for (; i + 4 <= hi; i += 4)
            store(dst + i, load(src + i));
        for (; i < hi; i++)
            dst[i] = src[i];
        for (; i < n; i++)
            dst[i] = 0;
    }
}

static void copy_even(float *dst, int64_t dld, const float *src, int64_t sld, int64_t rows, int64_t n,
                      int64_t lo, int64_t hi) {
    for (int64_t r = 0; r < rows; r++, dst += dld, src += sld)
        for (int64_t i = 0; i < n; i++)
            dst[i] = i >= lo && i < hi ? src[2 * i] : 0;
}

static void add(float *dst, int64_t dld, const float *src, int64_t sld, int64_t rows, int64_t n) {
    for (int64_t r = 0; r < rows; r++, dst += dld, src += sld) {
        int64_t i = 0;
        for (; i + 4 <= n; i += 4)
            store(dst + i, load(dst + i) + load(src + i));
        for (; i < n; i++)
            dst[i] += src[i];
    }
}

static void pool2x2(float *y, int32_t *idx, const float *a, const float *b, int64_t n, int32_t at,
                    int32_t width) {
    for (int64_t i = 0; i < n; i++, a += 2, b += 2, at += 2) {
        float best = a[0];
        int32_t where = at;
        const float v[3] = {a[1], b[0], b[1]};
        const int32_t step[3] = {1, width, width + 1};
        for (int j = 0; j < 3; j++) {
            bool take = (v[j] > best) | (isnan(v[j]) & !isnan(best));
            best = take ? v[j] : best;
            where = take ? at + step[j] : where;
        }
        y[i] = best;
        idx[i] = where;
    }
}

static void fold(const wki_conv *g, float *plane, const float *col, int64_t ld, int64_t r0, int64_t nr,
                 bool add_to) {
    if (!add_to)
        memset(plane, 0, (size_t)(g->h * g->w) * sizeof *plane);
    for (int64_t h = 0; h < g->h; h++) {
        for (int64_t i = 0; i < g->kh; i++) {
            int64_t r = h + g->ph - i - r0;
            for (int64_t j = 0; r >= 0 && r < nr && j < g->kw; j++) {
                wki_span in = wki_inside(g->ow, 1, j - g->pw, g->w);
                add(plane + h * g->w + j - g->pw + in.lo, 0, col + (i * g->kw + j) * ld + r * g->ow + in.lo,
                    0, 1, in.hi - in.lo);
            }
        }
    }
}

const wki_k_rows wki_k_rows_baseline = {copy, copy_even, add, pool2x2, NULL, fold};

const wki_k_rows *wki_k_rows_of(wki_isa isa) {
#if defined(__x86_64__)
    if (isa == WKI_ISA_AVX512)
        return &wki_k_rows_avx512;
#endif
    (void)isa;
    return &wki_k_rows_baseline;
}
