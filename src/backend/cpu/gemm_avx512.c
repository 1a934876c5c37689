/* The AVX-512 tier of the packed GEMM: tiles of up to 14 rows by 32 columns, and packing by register transposes.
 * Calls nothing. A tile keeps 28 sums, 2 vectors of B and 1 element of A in the 32 registers, and so needs 16 loads
 * for 28 fused multiply-adds, of which the core starts two a cycle. */
#include "backend/cpu/gemm_tier.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define MR 14
#define NR 32
#define LANES 16

/* Unrolled code with a check at every addition takes minutes to build under UBSan; memory stays checked. */
#define PLAIN __attribute__((no_sanitize("undefined")))
#define INLINE static inline __attribute__((always_inline)) PLAIN

INLINE __mmask16 first_lanes(int n) {
    return (__mmask16)_cvtu32_mask16(n >= LANES ? 0xffffu : (1u << n) - 1);
}

/* Scale, add, activate and store. In the order that gemm.h gives; each step is skipped when it does nothing. */
INLINE void finish(const wki_gemm_tile *t, __m512 acc[MR][2], __mmask16 last, const int m, const int nv) {
    if (t->alpha != 1) {
        __m512 alpha = _mm512_set1_ps(t->alpha);
        EACH(i, m) {
            EACH(v, nv) { acc[i][v] = _mm512_mul_ps(alpha, acc[i][v]); }
        }
    }
    if (t->beta != 0) {
        __m512 beta = _mm512_set1_ps(t->beta);
        EACH(i, m) {
            EACH(v, nv) {
                __mmask16 mask = v == nv - 1 ? last : 0xffff;
                __m512 c = _mm512_maskz_loadu_ps(mask, t->c + i * t->c_rs + v * LANES);
                acc[i][v] = _mm512_fmadd_ps(beta, c, acc[i][v]);
            }
        }
    }
    if (t->bias_n) {
        EACH(v, nv) {
            __m512 bias = _mm512_maskz_loadu_ps(v == nv - 1 ? last : 0xffff, t->bias_n + v * LANES);
            EACH(i, m) { acc[i][v] = _mm512_add_ps(acc[i][v], bias); }
        }
    }
    if (t->bias_m) {
        EACH(i, m) {
            __m512 bias = _mm512_set1_ps(t->bias_m[i]);
            EACH(v, nv) { acc[i][v] = _mm512_add_ps(acc[i][v], bias); }
        }
    }
    if (t->act == WKI_ACT_RELU) { /* MAXPS returns its second operand when either is NaN */
        EACH(i, m) {
            EACH(v, nv) { acc[i][v] = _mm512_max_ps(_mm512_setzero_ps(), acc[i][v]); }
        }
    }
    EACH(i, m) {
        EACH(v, nv) {
            _mm512_mask_storeu_ps(t->c + i * t->c_rs + v * LANES, v == nv - 1 ? last : 0xffff, acc[i][v]);
        }
    }
}

/* m and nv are constants at every call, so `acc` lives in registers. Rows of A are reached from one pointer for
 * three rows (x86 addresses scale a stride by 1 or 2 elements): 14 pointers would not fit. */
INLINE void tile(const wki_gemm_tile *t, const int m, const int nv) {
    __mmask16 last = first_lanes(t->n - (nv - 1) * LANES);
    int64_t k = t->k, a_rs = t->a_rs, a_cs = t->a_cs, b_rs = t->b_rs;
    const float *b = t->b;
    const float *row[(MR + 2) / 3];
    __m512 acc[MR][2];
    EACH(r, (m + 2) / 3) {
        row[r] = t->a + 3 * r * a_rs;
        __asm__("" : "+r"(row[r])); /* keeps the compiler from deriving the pointers from one another */
    }
    EACH(i, m) {
        EACH(v, nv) {
            _mm_prefetch((const char *)(t->c + i * t->c_rs + v * LANES), _MM_HINT_T0);
            acc[i][v] = _mm512_setzero_ps();
        }
    }
    for (int64_t p = 0; p < k; p++) {
        __m512 bv[2];
        EACH(v, nv) { bv[v] = _mm512_maskz_loadu_ps(v == nv - 1 ? last : 0xffff, b + v * LANES); }
        EACH(i, m) {
            __m512 av = _mm512_set1_ps(row[i / 3][i % 3 * a_rs]);
            EACH(v, nv) { acc[i][v] = _mm512_fmadd_ps(av, bv[v], acc[i][v]); }
        }
        EACH(r, (m + 2) / 3) { row[r] += a_cs; }
        b += b_rs;
    }
    finish(t, acc, last, m, nv);
}

#define FOR_EACH_M(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
#define DEFINE(m)                                                                                            \
    PLAIN static void tile_##m##x1(const wki_gemm_tile *t) { tile(t, m, 1); }                                \
    PLAIN static void tile_##m##x2(const wki_gemm_tile *t) { tile(t, m, 2); }
FOR_EACH_M(DEFINE)

static void run_tile(const wki_gemm_tile *t) {
#define ROW(m) {tile_##m##x1, tile_##m##x2},
    static void (*const tiles[MR][2])(const wki_gemm_tile *) = {FOR_EACH_M(ROW)};
    tiles[t->m - 1][t->n > LANES](t);
}

/* Up to 16 lanes by 4 * quads steps of k, transposed. Loading quads of k from lanes r, r + 4, r + 8 and r + 12 into
 * one register leaves a 4 by 4 transpose inside each 128-bit part. */
INLINE void pack_block(float *dst, int64_t ld, const float *src, int64_t ls, int lanes, const int quads) {
    __m512 in[4][4];
    EACH(r, 4) {
        EACH(part, 4) {
            int lane = r + 4 * part;
            const float *s = src + (lane < lanes ? lane : lanes - 1) * ls;
            EACH(q, quads) {
                if (part == 0)
                    in[q][r] = _mm512_castps128_ps512(_mm_loadu_ps(s + 4 * q));
                else
                    in[q][r] = _mm512_mask_broadcast_f32x4(in[q][r], (__mmask16)(0xfu << 4 * part),
                                                           _mm_loadu_ps(s + 4 * q));
            }
        }
    }
    __mmask16 mask = first_lanes(lanes);
    EACH(q, quads) {
        __m512d lo01 = _mm512_castps_pd(_mm512_unpacklo_ps(in[q][0], in[q][1]));
        __m512d hi01 = _mm512_castps_pd(_mm512_unpackhi_ps(in[q][0], in[q][1]));
        __m512d lo23 = _mm512_castps_pd(_mm512_unpacklo_ps(in[q][2], in[q][3]));
        __m512d hi23 = _mm512_castps_pd(_mm512_unpackhi_ps(in[q][2], in[q][3]));
        float *d = dst + 4 * q * ld;
        _mm512_mask_storeu_ps(d, mask, _mm512_castpd_ps(_mm512_unpacklo_pd(lo01, lo23)));
        _mm512_mask_storeu_ps(d + ld, mask, _mm512_castpd_ps(_mm512_unpackhi_pd(lo01, lo23)));
        _mm512_mask_storeu_ps(d + 2 * ld, mask, _mm512_castpd_ps(_mm512_unpacklo_pd(hi01, hi23)));
        _mm512_mask_storeu_ps(d + 3 * ld, mask, _mm512_castpd_ps(_mm512_unpackhi_pd(hi01, hi23)));
    }
}

PLAIN static void pack_transposed(float *dst, int64_t ld, const float *src, int64_t ls, int64_t k,
                                  int lanes) {
    int64_t p = 0;
    for (; p + 16 <= k; p += 16)
        pack_block(dst + p * ld, ld, src + p, ls, lanes, 4);
    for (; p + 4 <= k; p += 4)
        pack_block(dst + p * ld, ld, src + p, ls, lanes, 1);
    for (; p < k; p++)
        for (int l = 0; l < lanes; l++)
            dst[p * ld + l] = src[p + l * ls];
}

PLAIN static void pack(float *dst, int64_t ld, const float *src, int64_t ps, int64_t ls, int64_t k,
                       int64_t lanes) {
    for (int64_t l = 0; l < lanes; l += LANES) {
        int width = (int)(lanes - l < LANES ? lanes - l : LANES);
        __mmask16 mask = first_lanes(width);
        float *d = dst + l;
        const float *s = src + l * ls;
        if (ls == 1) {
            for (int64_t p = 0; p < k; p++)
                _mm512_mask_storeu_ps(d + p * ld, mask, _mm512_maskz_loadu_ps(mask, s + p * ps));
        } else if (ps == 1) {
            pack_transposed(d, ld, s, ls, k, width);
        } else {
            for (int64_t p = 0; p < k; p++)
                for (int i = 0; i < width; i++)
                    d[p * ld + i] = s[p * ps + i * ls];
        }
    }
}

const wki_gemm_tier wki_gemm_avx512 = {
    .mr = MR, .nr = NR, .tails = 1, .kc = 256, .mc = 20 * MR, .nc = 96 * NR, .tile = run_tile, .pack = pack};

#endif
