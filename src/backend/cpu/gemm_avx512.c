/* The AVX-512 tier of the packed GEMM: tiles of up to 14 rows by 32 columns, and packing by register transposes.
 * Calls nothing. A tile keeps 28 sums, 2 vectors of B and 1 element of A in the 32 registers, and so needs 16 loads
 * for 28 fused multiply-adds, of which the core starts two a cycle. */
#include "backend/cpu/gemm_tier.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define MR 14
#define NR 32
#define LANES 16
#define STEPS 4 /* of k, unrolled in tile_packed */

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

INLINE void fetch_c(const wki_gemm_tile *t, const int m, const int nv) {
    EACH(i, m) {
        EACH(v, nv) { _mm_prefetch((const char *)(t->c + i * t->c_rs + v * LANES), _MM_HINT_T0); }
    }
}

INLINE void start(__m512 acc[MR][2], const int m, const int nv) {
    EACH(i, m) {
        EACH(v, nv) { acc[i][v] = _mm512_setzero_ps(); }
    }
}

INLINE void step(__m512 acc[MR][2], const float *const row[(MR + 2) / 3], int64_t a_rs, const float *b,
                 __mmask16 last, const int m, const int nv) {
    __m512 bv[2];
    EACH(v, nv) { bv[v] = _mm512_maskz_loadu_ps(v == nv - 1 ? last : 0xffff, b + v * LANES); }
    EACH(i, m) {
        __m512 av = _mm512_set1_ps(row[i / 3][i % 3 * a_rs]);
        EACH(v, nv) { acc[i][v] = _mm512_fmadd_ps(av, bv[v], acc[i][v]); }
    }
}

/* m and nv are constants at every call, so `acc` lives in registers. Rows of A are reached from one pointer for
 * three rows (x86 addresses scale a stride by 1 or 2 elements): 14 pointers would not fit. */
INLINE void tile(const wki_gemm_tile *t, const int m, const int nv) {
    __mmask16 last = first_lanes(t->n - (nv - 1) * LANES);
    int64_t k = t->k, a_rs = t->a_rs, a_cs = t->a_cs, b_rs = t->b_rs, next_rs = t->next_rs;
    const float *b = t->b, *next = t->next;
    const float *row[(MR + 2) / 3];
    __m512 acc[MR][2];
    EACH(r, (m + 2) / 3) {
        row[r] = t->a + 3 * r * a_rs;
        __asm__("" : "+r"(row[r])); /* keeps the compiler from deriving the pointers from one another */
    }
    start(acc, m, nv);
    if (next) {
        fetch_c(t, m, nv);
        for (int64_t p = 0; p < k; p++, b += b_rs, next += next_rs) {
            step(acc, row, a_rs, b, last, m, nv);
            EACH(r, (m + 2) / 3) { row[r] += a_cs; }
            _mm_prefetch((const char *)next, _MM_HINT_T1);
        }
    } else {
        for (int64_t p = 0; p < k; p++, b += b_rs) {
            step(acc, row, a_rs, b, last, m, nv);
            EACH(r, (m + 2) / 3) { row[r] += a_cs; }
        }
    }
    finish(t, acc, last, m, nv);
}

INLINE void step_packed(__m512 acc[MR][2], const float *a, const float *b, const int m) {
    __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + LANES);
    EACH(i, m) {
        __m512 av = _mm512_set1_ps(a[i]);
        acc[i][0] = _mm512_fmadd_ps(av, b0, acc[i][0]);
        acc[i][1] = _mm512_fmadd_ps(av, b1, acc[i][1]);
    }
}

/* The same sums where both operands are packed and the tile is NR wide. Addresses are constants beside three
 * pointers, so that counting takes few of the slots in which the core could start a multiply-add. */
INLINE void tile_packed(const wki_gemm_tile *t, const int m) {
    int64_t k = t->k, next_rs = t->next_rs;
    const float *a = t->a, *b = t->b, *next = t->next;
    __m512 acc[MR][2];
    start(acc, m, 2);
    fetch_c(t, m, 2);
    for (; k >= STEPS; k -= STEPS) {
        EACH(u, STEPS) {
            step_packed(acc, a + u * m, b + u * NR, m);
            _mm_prefetch((const char *)(next + u * next_rs), _MM_HINT_T1);
        }
        a += STEPS * m;
        b += STEPS * NR;
        next += STEPS * next_rs;
    }
    for (; k > 0; k--, a += m, b += NR)
        step_packed(acc, a, b, m);
    finish(t, acc, 0xffff, m, 2);
}

#define FOR_EACH_M(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
#define DEFINE(m)                                                                                            \
    PLAIN static void tile_##m##x1(const wki_gemm_tile *t) { tile(t, m, 1); }                                \
    PLAIN static void tile_##m##x2(const wki_gemm_tile *t) { tile(t, m, 2); }
FOR_EACH_M(DEFINE)

PLAIN static void tile_12_packed(const wki_gemm_tile *t) { tile_packed(t, 12); }
PLAIN static void tile_13_packed(const wki_gemm_tile *t) { tile_packed(t, 13); }
PLAIN static void tile_14_packed(const wki_gemm_tile *t) { tile_packed(t, 14); }

static void run_tile(const wki_gemm_tile *t) {
#define ROW(m) {tile_##m##x1, tile_##m##x2},
    static void (*const tiles[MR][2])(const wki_gemm_tile *) = {FOR_EACH_M(ROW)};
    static void (*const packed[])(const wki_gemm_tile *) = {tile_12_packed, tile_13_packed, tile_14_packed};
    if (t->m >= 12 && t->n == NR && t->next && t->a_rs == 1 && t->a_cs == t->m && t->b_rs == NR)
        packed[t->m - 12](t);
    else
        tiles[t->m - 1][t->n > LANES](t);
}

/* Thirty-two partial sums for each of `m` rows from row i on, added pairwise at the end. */
INLINE void dot(const wki_gemm_tile *t, int i, const int m) {
    const float *a = t->a + i * t->a_rs, *b = t->b;
    __m512 acc[4][2];
    EACH(r, m) {
        EACH(v, 2) { acc[r][v] = _mm512_setzero_ps(); }
    }
    int64_t p = 0;
    for (; p + 2 * LANES <= t->k; p += 2 * LANES) {
        EACH(v, 2) {
            __m512 bv = _mm512_loadu_ps(b + p + v * LANES);
            EACH(r, m) {
                acc[r][v] = _mm512_fmadd_ps(_mm512_loadu_ps(a + r * t->a_rs + p + v * LANES), bv, acc[r][v]);
            }
        }
    }
    for (int v = 0; p < t->k; p += LANES, v++) {
        __mmask16 mask = first_lanes((int)(t->k - p));
        __m512 bv = _mm512_maskz_loadu_ps(mask, b + p);
        EACH(r, m) {
            __m512 sum = _mm512_maskz_loadu_ps(mask, a + r * t->a_rs + p);
            sum = _mm512_mask3_fmadd_ps(sum, bv, v ? acc[r][1] : acc[r][0], mask);
            acc[r][0] = v ? acc[r][0] : sum;
            acc[r][1] = v ? sum : acc[r][1];
        }
    }
    EACH(r, m) {
        float sum = _mm512_reduce_add_ps(_mm512_add_ps(acc[r][0], acc[r][1]));
        t->c[(i + r) * t->c_rs] = wki_gemm_finish(t, sum, i + r, 0);
    }
}

PLAIN static void run_dot(const wki_gemm_tile *t) {
    int i = 0;
    for (; i + 4 <= t->m; i += 4)
        dot(t, i, 4);
    for (; i < t->m; i++)
        dot(t, i, 1);
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

const wki_gemm_tier wki_gemm_avx512 = {.mr = MR,
                                       .nr = NR,
                                       .tails = 1,
                                       .kc = 256,
                                       .mc = 20 * MR,
                                       .nc = 96 * NR,
                                       .dot_kc = 4096,
                                       .tile = run_tile,
                                       .dot = run_dot,
                                       .pack = pack};

#endif
