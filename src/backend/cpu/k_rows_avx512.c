/* Row primitives in AVX-512: sixteen lanes, with masks for what is left over. Calls nothing. */
#include "backend/cpu/k_rows.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include "backend/cpu/k_conv.h"

#define LANES 16

/* Lanes 0 .. n-1; none for n <= 0. */
static inline __mmask16 first(int64_t n) {
    return (__mmask16)(n <= 0 ? 0 : n >= LANES ? 0xffff : (1u << n) - 1);
}

static void copy(float *dst, int64_t dld, const float *src, int64_t sld, int64_t rows, int64_t n, int64_t lo,
                 int64_t hi) {
    for (int64_t i = 0; i < n; i += LANES) {
        __mmask16 to = first(n - i), from = (__mmask16)(first(hi - i) & ~first(lo - i));
        for (int64_t r = 0; r < rows; r++)
            _mm512_mask_storeu_ps(dst + r * dld + i, to, _mm512_maskz_loadu_ps(from, src + r * sld + i));
    }
}

static void copy_even(float *dst, int64_t dld, const float *src, int64_t sld, int64_t rows, int64_t n,
                      int64_t lo, int64_t hi) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    for (int64_t i = 0; i < n; i += LANES) {
        __mmask16 to = first(n - i);
        __mmask16 a = (__mmask16)(first(2 * (hi - i) - 1) & ~first(2 * (lo - i)));
        __mmask16 b = (__mmask16)(first(2 * (hi - i) - 1 - LANES) & ~first(2 * (lo - i) - LANES));
        for (int64_t r = 0; r < rows; r++) {
            const float *s = src + r * sld + 2 * i;
            __m512 lower = _mm512_maskz_loadu_ps(a, s), upper = _mm512_maskz_loadu_ps(b, s + LANES);
            _mm512_mask_storeu_ps(dst + r * dld + i, to, _mm512_permutex2var_ps(lower, even, upper));
        }
    }
}

static void add(float *dst, int64_t dld, const float *src, int64_t sld, int64_t rows, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        __mmask16 m = first(n - i);
        for (int64_t r = 0; r < rows; r++) {
            __m512 s = _mm512_maskz_loadu_ps(m, src + r * sld + i),
                   d = _mm512_maskz_loadu_ps(m, dst + r * dld + i);
            _mm512_mask_storeu_ps(dst + r * dld + i, m, _mm512_add_ps(d, s));
        }
    }
}

typedef struct {
    __m512 best;
    __m512i where;
} winner;

static inline winner contest(winner w, __m512 v, __m512i at) {
    __mmask16 above = _mm512_cmp_ps_mask(v, w.best, _CMP_GT_OQ);
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    __mmask16 take = above | (nan & _mm512_cmp_ps_mask(w.best, w.best, _CMP_ORD_Q));
    return (winner){_mm512_mask_mov_ps(w.best, take, v), _mm512_mask_mov_epi32(w.where, take, at)};
}

static void pool2x2(float *y, int32_t *idx, const float *a, const float *b, int64_t n, int32_t at,
                    int32_t width) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (int64_t i = 0; i < n; i += LANES) {
        __mmask16 lo = first(2 * (n - i)), hi = first(2 * (n - i) - LANES), m = first(n - i);
        __m512 a0 = _mm512_maskz_loadu_ps(lo, a + 2 * i), a1 = _mm512_maskz_loadu_ps(hi, a + 2 * i + LANES);
        __m512 b0 = _mm512_maskz_loadu_ps(lo, b + 2 * i), b1 = _mm512_maskz_loadu_ps(hi, b + 2 * i + LANES);
        __m512i top = _mm512_add_epi32(_mm512_set1_epi32(at + 2 * (int32_t)i), even);
        __m512i low = _mm512_add_epi32(top, _mm512_set1_epi32(width)), one = _mm512_set1_epi32(1);
        winner w = {_mm512_permutex2var_ps(a0, even, a1), top};
        w = contest(w, _mm512_permutex2var_ps(a0, odd, a1), _mm512_add_epi32(top, one));
        w = contest(w, _mm512_permutex2var_ps(b0, even, b1), low);
        w = contest(w, _mm512_permutex2var_ps(b0, odd, b1), _mm512_add_epi32(low, one));
        _mm512_mask_storeu_ps(y + i, m, w.best);
        _mm512_mask_storeu_epi32(idx + i, m, w.where);
    }
}

#define BLOCK 16 /* vectors */

/* For vectors from element t0 of a plane on: the lanes whose column, moved by j - pw, lies in the plane. */
static void column_masks(const wki_conv *g, int64_t t0, int vectors,
                         __mmask16 masks[WKI_K_SHIFT_MAX][BLOCK]) {
    const __m512i iota = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i w = _mm512_set1_epi32((int)g->w), next = _mm512_set1_epi32((int)(LANES % g->w));
    __m512i column = _mm512_add_epi32(iota, _mm512_set1_epi32((int)(t0 % g->w)));
    for (int i = 0; i < LANES && _mm512_cmpge_epu32_mask(column, w); i++)
        column = _mm512_mask_sub_epi32(column, _mm512_cmpge_epu32_mask(column, w), column, w);
    for (int v = 0; v < vectors; v++) {
        for (int j = 0; j < g->kw; j++)
            masks[j][v] =
                _mm512_cmplt_epu32_mask(_mm512_add_epi32(column, _mm512_set1_epi32((int)(j - g->pw))), w);
        column = _mm512_add_epi32(column, next);
        column = _mm512_mask_sub_epi32(column, _mm512_cmpge_epu32_mask(column, w), column, w);
    }
}

/* One such row: elements [0, n) of `to`, of which [lo, hi) come from `from`. */
static inline void shift_row(float *to, const float *from, const __mmask16 *masks, int64_t n, int64_t lo,
                             int64_t hi) {
    int64_t t = 0;
    for (; t < n && t < lo; t += LANES) {
        __mmask16 m = (__mmask16)(masks[t / LANES] & first(hi - t) & ~first(lo - t));
        _mm512_storeu_ps(to + t, _mm512_maskz_loadu_ps(m, from + t));
    }
    for (; t + LANES <= hi; t += LANES)
        _mm512_storeu_ps(to + t, _mm512_maskz_loadu_ps(masks[t / LANES], from + t));
    for (; t < n; t += LANES)
        _mm512_storeu_ps(to + t,
                         _mm512_maskz_loadu_ps((__mmask16)(masks[t / LANES] & first(hi - t)), from + t));
}

/* A row of the column matrix is its plane moved by a number of elements, with zeros where that crosses a
 * border. */
static void shift(const wki_conv *g, float *col, int64_t ld, const float *x, int64_t channel_stride,
                  int64_t nc, int64_t r0, int64_t nr) {
    __mmask16 masks[WKI_K_SHIFT_MAX][BLOCK] = {{0}};
    for (int64_t t0 = 0; t0 < nr * g->w; t0 += BLOCK * LANES) {
        int64_t n = wki_k_min(nr * g->w - t0, BLOCK * LANES);
        float *to = col + t0;
        column_masks(g, t0, (int)wki_k_ceil(n, LANES), masks);
        for (int64_t c = 0; c < nc; c++) {
            for (int64_t i = 0; i < g->kh; i++) {
                wki_span rows = wki_inside(nr, 1, r0 + i - g->ph, g->h);
                int64_t lo = rows.lo * g->w - t0, hi = wki_k_min(rows.hi * g->w - t0, n);
                const float *from = x + c * channel_stride + (r0 + i - g->ph) * g->w - g->pw + t0;
                for (int64_t j = 0; j < g->kw; j++, to += ld)
                    shift_row(to, from + j, masks[j], n, lo, hi);
            }
        }
    }
}

/* Sixteen columns of a plane, from column v on, for taps j0 .. j0 + nj - 1 of each kernel row. */
static inline __attribute__((always_inline)) void fold_columns(const wki_conv *g, float *plane,
                                                               const float *col, int64_t ld, int64_t r0,
                                                               int64_t nr, bool add_to, int64_t v, int64_t j0,
                                                               int nj) {
    __mmask16 to = first(g->w - v), from[WKI_K_SHIFT_MAX];
    for (int j = 0; j < nj; j++) {
        int64_t move = j0 + j - g->pw;
        from[j] = (__mmask16)(to & first(g->ow + move - v) & ~first(move - v));
    }
    int64_t h0 = add_to ? wki_k_max(0, r0 - g->ph) : 0;
    int64_t h1 = add_to ? wki_k_min(g->h, r0 + nr - 1 + g->kh - g->ph) : g->h;
    for (int64_t h = h0; h < h1; h++) {
        int64_t i0 = wki_k_max(0, h + g->ph - (r0 + nr - 1)), i1 = wki_k_min(g->kh, h + g->ph - r0 + 1);
        float *dst = plane + h * g->w + v;
        __m512 sum = add_to ? _mm512_maskz_loadu_ps(to, dst) : _mm512_setzero_ps();
        for (int64_t i = i0; i < i1; i++) {
            const float *src = col + (i * g->kw + j0) * ld + (h + g->ph - i - r0) * g->ow + v + g->pw - j0;
#pragma GCC unroll 8
            for (int j = 0; j < nj; j++, src += ld - 1)
                sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(from[j], src));
        }
        _mm512_mask_storeu_ps(dst, to, sum);
    }
}

static void fold(const wki_conv *g, float *plane, const float *col, int64_t ld, int64_t r0, int64_t nr,
                 bool add_to) {
    for (int64_t v = 0; v < g->w; v += LANES) {
        for (int64_t j = 0; j < g->kw; j += WKI_K_SHIFT_MAX) {
            int nj = (int)wki_k_min(g->kw - j, WKI_K_SHIFT_MAX);
            if (nj == 3) /* with a constant the masks stay in registers */
                fold_columns(g, plane, col, ld, r0, nr, add_to || j > 0, v, j, 3);
            else
                fold_columns(g, plane, col, ld, r0, nr, add_to || j > 0, v, j, nj);
        }
    }
}

const wki_k_rows wki_k_rows_avx512 = {copy, copy_even, add, pool2x2, shift, fold};

#endif
