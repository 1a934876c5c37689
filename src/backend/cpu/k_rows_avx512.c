/* Row primitives in AVX-512: sixteen lanes, with masks for what is left over. Calls nothing. */
#include "backend/cpu/k_rows.h"

#if defined(__x86_64__)

#include <immintrin.h>

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

const wki_k_rows wki_k_rows_avx512 = {copy, add, pool2x2};

#endif
