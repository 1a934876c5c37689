/* The scalar primitives over vectors, for files compiled once per instruction set: the width and the few
 * intrinsics follow from the flags of the including file, the results do not. Two faces, equal to the bit:
 *
 *   wkn_exp(wki_nf)  the native width, WKI_LANES lanes: 16 with AVX-512, 8 with AVX2, else 4; the fast one
 *   wkv_exp(wki_vf)  always 16 lanes, made of native pieces; with AVX-512 the same thing
 *
 * and so on for every row of prims.def, masks of -1/0 as that file says. wkn_uniform and wkn_normal(seed,
 * seq, base) give the elements base, base + 1, ... of an op's random stream; base must be a multiple of 4.
 *
 * Everything is inline, so how wide vectors are passed never matters; GCC notes it once a file all the same
 * unless given -Wno-psabi. Needs -ffp-contract=off and the vector extensions of GCC and Clang. May call
 * prim_scalar.h alone. */
#ifndef WKI_OPS_PRIM_VECTOR_H
#define WKI_OPS_PRIM_VECTOR_H

#include "prim_scalar.h"

#pragma GCC diagnostic ignored "-Wpsabi"

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define WKI_LANES 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define WKI_LANES 8
#else
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#define WKI_LANES 4
#endif

typedef float wki_vf __attribute__((vector_size(64)));
typedef int32_t wki_vi __attribute__((vector_size(64)));

typedef float wki_nf __attribute__((vector_size(4 * WKI_LANES)));
typedef int32_t wki_ni __attribute__((vector_size(4 * WKI_LANES)));
typedef uint32_t wki_nu __attribute__((vector_size(4 * WKI_LANES)));
typedef uint64_t wki_nu64 __attribute__((vector_size(4 * WKI_LANES)));

#define WK_FN static inline __attribute__((always_inline, unused))
#define WK_FN_RARE static __attribute__((noinline, cold, unused))
#define WK_F wki_nf
#define WK_I wki_ni

/* --- what differs by instruction set: comparisons, selection, sqrt, fma, the widening multiply --- */

#if WKI_LANES == 16

#define WK_M __mmask16
#define WK_LT(a, b) _mm512_cmp_ps_mask((__m512)(a), (__m512)(b), _CMP_LT_OQ)
#define WK_LE(a, b) _mm512_cmp_ps_mask((__m512)(a), (__m512)(b), _CMP_LE_OQ)
#define WK_EQ(a, b) _mm512_cmp_ps_mask((__m512)(a), (__m512)(b), _CMP_EQ_OQ)
#define WK_ILT(a, b) _mm512_cmp_epi32_mask((__m512i)(a), (__m512i)(b), _MM_CMPINT_LT)
#define WK_IEQ(a, b) _mm512_cmp_epi32_mask((__m512i)(a), (__m512i)(b), _MM_CMPINT_EQ)
#define WK_SEL(m, a, b) ((WK_F)_mm512_mask_blend_ps(m, (__m512)(b), (__m512)(a)))
#define WK_ISEL(m, a, b) ((WK_I)_mm512_mask_blend_epi32(m, (__m512i)(b), (__m512i)(a)))
#define WK_LOWER(a, b) ((WK_F)_mm512_min_ps((__m512)(a), (__m512)(b)))
#define WK_UPPER(a, b) ((WK_F)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define WK_SCALE(x, t) ((WK_F)_mm512_scalef_ps((__m512)(x), (__m512)((t)-WK_FC(WK_MAGIC))))
#define WK_MASK(m) ((WK_I)_mm512_movm_epi32(m))
#define WK_TEST(i) _mm512_movepi32_mask((__m512i)(i))
#define WK_SQRT(x) ((WK_F)wkn_newton_sqrt((__m512)(x)))
#define WK_FMA(a, b, c) ((WK_F)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define WKI_ANY(m) ((m) != 0)
#define WKI_MUL_EVEN(a, b) ((wki_nu64)_mm512_mul_epu32((__m512i)(a), (__m512i)(b)))

/* The correctly rounded root without the divider, which a division beside it keeps busy: root and half = 1 / (2 root) by a
 * step of Newton's method (Markstein 1990), then once more by the root's exact residue. Right for every estimate within
 * 2^-14, whatever the processor: tried out for all significands and all such estimates. Residues are exact from 2^-102 on. */
WK_FN __m512 wkn_newton_sqrt(__m512 x) {
    const __m512 one_half = _mm512_set1_ps(0.5f);
    const __m512i least = _mm512_set1_epi32(0x0c800000), span = _mm512_set1_epi32(0x7f800000 - 0x0c800000);
    __mmask16 nonzero = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    __m512i above = _mm512_sub_epi32(_mm512_castps_si512(x), least);
    if (__builtin_expect(_mm512_mask_cmpge_epu32_mask(nonzero, above, span), 0))
        return _mm512_sqrt_ps(x);
    __m512 y = _mm512_maskz_rsqrt14_ps(nonzero, x);
    __m512 root = _mm512_mul_ps(x, y), half = _mm512_mul_ps(one_half, y);
    __m512 error = _mm512_fnmadd_ps(root, half, one_half);
    root = _mm512_fmadd_ps(root, error, root);
    half = _mm512_fmadd_ps(half, error, half);
    return _mm512_fmadd_ps(_mm512_fnmadd_ps(root, root, x), half, root);
}

#else

#define WK_M wki_ni
#define WK_LT(a, b) ((wki_ni)((a) < (b)))
#define WK_LE(a, b) ((wki_ni)((a) <= (b)))
#define WK_EQ(a, b) ((wki_ni)((a) == (b)))
#define WK_ILT(a, b) ((wki_ni)((a) < (b)))
#define WK_IEQ(a, b) ((wki_ni)((a) == (b)))
#define WK_SEL(m, a, b) ((WK_F)wkn_blend(m, (WK_I)(a), (WK_I)(b)))
#define WK_ISEL(m, a, b) wkn_blend(m, a, b)
#define WK_SCALE(x, t) wkn_scale(x, t)
#define WK_MASK(m) (m)
#define WK_TEST(i) (i)

WK_FN wki_ni wkn_blend(wki_ni m, wki_ni a, wki_ni b) { return (m & a) | (~m & b); }

#if WKI_LANES == 8
#define WK_LOWER(a, b) ((WK_F)_mm256_min_ps((__m256)(a), (__m256)(b)))
#define WK_UPPER(a, b) ((WK_F)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define WK_SQRT(x) ((WK_F)_mm256_sqrt_ps((__m256)(x)))
#define WKI_ANY(m) (_mm256_movemask_ps((__m256)(m)) != 0)
#define WKI_MUL_EVEN(a, b) ((wki_nu64)_mm256_mul_epu32((__m256i)(a), (__m256i)(b)))
#elif defined(__SSE2__)
#define WK_LOWER(a, b) ((WK_F)_mm_min_ps((__m128)(a), (__m128)(b)))
#define WK_UPPER(a, b) ((WK_F)_mm_max_ps((__m128)(a), (__m128)(b)))
#define WK_SQRT(x) ((WK_F)_mm_sqrt_ps((__m128)(x)))
#define WKI_ANY(m) (_mm_movemask_ps((__m128)(m)) != 0)
#define WKI_MUL_EVEN(a, b) ((wki_nu64)_mm_mul_epu32((__m128i)(a), (__m128i)(b)))
#else
#define WK_LOWER(a, b) WK_SEL(WK_LT(a, b), a, b)
#define WK_UPPER(a, b) WK_SEL(WK_LT(b, a), a, b)
#define WK_SQRT(x) wkn_lane_sqrt(x)
#define WKI_ANY(m) (((wki_nu64)(m))[0] != 0 || ((wki_nu64)(m))[1] != 0)
#define WKI_MUL_EVEN(a, b) (((wki_nu64)(a)&0xffffffffu) * ((wki_nu64)(b)&0xffffffffu))
WK_FN wki_nf wkn_lane_sqrt(wki_nf x) {
    for (int i = 0; i < WKI_LANES; i++)
        x[i] = __builtin_sqrtf(x[i]);
    return x;
}
#endif

#if WKI_LANES == 8 && defined(__FMA__)
#define WK_FMA(a, b, c) ((WK_F)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define WK_FMA(a, b, c) wkn_lane_fma(a, b, c)
WK_FN wki_nf wkn_lane_fma(wki_nf a, wki_nf b, wki_nf c) {
    for (int i = 0; i < WKI_LANES; i++)
        a[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return a;
}
#else
#define WK_FMA(a, b, c) wkn_double_fma(a, b, c)

typedef double wki_d2 __attribute__((vector_size(16)));
typedef int64_t wki_l2 __attribute__((vector_size(16)));

/* In double a*b is exact and a*b + c is rounded to odd (Boldo and Melquiond 2008): where the sum is inexact
 * and its last bit even, it moves one step towards the error that Knuth's two-sum finds. With 53 >= 2 * 24 +
 * 2 bits the rounding to float that follows is then the only one. Where s is infinite or NaN so is the error,
 * which moves nothing. */
WK_FN wki_nf wkn_double_fma(wki_nf a, wki_nf b, wki_nf c) {
    wki_nf r;
    for (int k = 0; k < WKI_LANES; k += 2) {
        wki_d2 x = {a[k], a[k + 1]}, y = {b[k], b[k + 1]}, z = {c[k], c[k + 1]};
        wki_d2 p = x * y, s = p + z;
        wki_d2 zz = s - p, error = (p - (s - zz)) + (z - zz);
        wki_l2 up = (wki_l2)(error > 0.0), down = (wki_l2)(error < 0.0), even = ((wki_l2)s & 1) - 1;
        wki_l2 negative = (wki_l2)(s < 0.0);
        /* up and down are -1 where true, and the bits of a negative s grow downwards. */
        wki_l2 step = ((down - up) ^ negative) - negative;
        s = (wki_d2)((wki_l2)s + (step & even));
        r[k] = (float)s[0];
        r[k + 1] = (float)s[1];
    }
    return r;
}
#endif

#endif

#define WK_NAME(n) wkn_##n
#define WK_FC(c) ((c) - (wki_nf){0}) /* 0 + -0 would be 0 */
#define WK_IC(c) ((wki_ni){0} + (c))
#define WK_AS_I(x) ((wki_ni)(x))
#define WK_AS_F(i) ((wki_nf)(i))
#define WK_TO_F(i) __builtin_convertvector(i, wki_nf)
#define WK_TO_I(x) __builtin_convertvector(x, wki_ni)
#define WK_IADD(a, b) ((wki_ni)((wki_nu)(a) + (wki_nu)(b)))
#define WK_ISUB(a, b) ((wki_ni)((wki_nu)(a) - (wki_nu)(b)))
#define WK_IMUL(a, b) ((wki_ni)((wki_nu)(a) * (wki_nu)(b)))
#define WK_SHL(i, n) ((wki_ni)((wki_nu)(i) << (n)))
#define WK_SHR(i, n) ((i) >> (n))
#define WK_USHR(i, n) ((wki_ni)((wki_nu)(i) >> (n)))
#define WK_TRIG_FAR(m, a, quarter, r) wkn_trig_far(m, a, quarter, r)

WK_FN_RARE wki_nf wkn_trig_far_lanes(wki_ni far, wki_nf a, int32_t quarter, wki_nf r) {
    for (int i = 0; i < WKI_LANES; i++)
        if (far[i])
            r[i] = wks_trig_far(a[i], quarter);
    return r;
}

WK_FN wki_nf wkn_trig_far(WK_M far, wki_nf a, int32_t quarter, wki_nf r) {
    return __builtin_expect(WKI_ANY(far), 0) ? wkn_trig_far_lanes(WK_MASK(far), a, quarter, r) : r;
}

#include "prim_math.inc"

/* --- random numbers: consecutive elements in consecutive lanes --- */

#if WKI_LANES == 16
#define WKI_PER_4(v, a, b, c, d)                                                                             \
    __builtin_shufflevector(v, v, a, b, c, d, a + 4, b + 4, c + 4, d + 4, a + 8, b + 8, c + 8, d + 8,        \
                            a + 12, b + 12, c + 12, d + 12)
#define WKI_PAIRS(a, b)                                                                                      \
    { a, b, a, b, a, b, a, b }
#define WKI_BLOCKS                                                                                           \
    { 0, 0, 1, 0, 2, 0, 3, 0 }
#elif WKI_LANES == 8
#define WKI_PER_4(v, a, b, c, d) __builtin_shufflevector(v, v, a, b, c, d, a + 4, b + 4, c + 4, d + 4)
#define WKI_PAIRS(a, b)                                                                                      \
    { a, b, a, b }
#define WKI_BLOCKS                                                                                           \
    { 0, 0, 1, 0 }
#else
#define WKI_PER_4(v, a, b, c, d) __builtin_shufflevector(v, v, a, b, c, d)
#define WKI_PAIRS(a, b)                                                                                      \
    { a, b }
#define WKI_BLOCKS                                                                                           \
    { 0, 0 }
#endif

/* WKI_LANES / 4 Philox blocks side by side, one in each four lanes (see wks_philox). The two multiplied words
 * of a block sit in even lanes, where the widening multiply wants them; its products, read backwards, are the
 * next round's words but for what is xored into the even lanes: the old odd words and the key. */
WK_FN wki_ni wkn_philox(uint64_t seed, uint64_t seq, uint64_t block) {
    wki_nu64 v = WKI_PAIRS(block, seq), blocks = WKI_BLOCKS;
    wki_nu64 multiplier = WKI_PAIRS(0xd2511f53u, 0xcd9e8d57u), weyl = WKI_PAIRS(0x9e3779b9u, 0xbb67ae85u);
    wki_nu64 key = WKI_PAIRS(seed & 0xffffffffu, seed >> 32);
    v += blocks;
    _Pragma("GCC unroll 10") for (int round = 0; round < 10; round++) {
        wki_nu product = (wki_nu)WKI_MUL_EVEN(v, multiplier);
        v = (wki_nu64)WKI_PER_4(product, 3, 2, 1, 0) ^ v >> 32 ^ key;
        key = (wki_nu64)((wki_nu)key + (wki_nu)weyl);
    }
    return (wki_ni)v;
}

WK_FN wki_nf wkn_uniform(uint64_t seed, uint64_t seq, uint64_t base) {
    return wkn_uniform_bits(wkn_philox(seed, seq, base >> 2));
}

WK_FN wki_nf wkn_normal(uint64_t seed, uint64_t seq, uint64_t base) {
    wki_ni bits = wkn_philox(seed, seq, base >> 2);
    wki_nu64 even = WKI_PAIRS(1, 1);
    return wkn_normal_bits(WKI_PER_4(bits, 0, 0, 2, 2), WKI_PER_4(bits, 1, 1, 3, 3), (wki_ni)even);
}

/* --- 16 lanes out of native pieces --- */

#define WKI_PIECES (16 / WKI_LANES)
typedef union {
    wki_vf v;
    wki_nf n[WKI_PIECES];
} wki_vf_pieces;
typedef union {
    wki_vi v;
    wki_ni n[WKI_PIECES];
} wki_vi_pieces;

#define WKI_EACH_PIECE _Pragma("GCC unroll 4") for (int k = 0; k < WKI_PIECES; k++)
#define WKI_WIDE_1(n_, R, A)                                                                                 \
    WK_FN wki_v##R wkv_##n_(wki_v##A a) {                                                                    \
        wki_v##A##_pieces x = {a};                                                                           \
        wki_v##R##_pieces r;                                                                                 \
        WKI_EACH_PIECE r.n[k] = wkn_##n_(x.n[k]);                                                            \
        return r.v;                                                                                          \
    }
#define WKI_WIDE_2(n_, R, A, B)                                                                              \
    WK_FN wki_v##R wkv_##n_(wki_v##A a, wki_v##B b) {                                                        \
        wki_v##A##_pieces x = {a};                                                                           \
        wki_v##B##_pieces y = {b};                                                                           \
        wki_v##R##_pieces r;                                                                                 \
        WKI_EACH_PIECE r.n[k] = wkn_##n_(x.n[k], y.n[k]);                                                    \
        return r.v;                                                                                          \
    }
#define WKI_WIDE_3(n_, R, A, B, C)                                                                           \
    WK_FN wki_v##R wkv_##n_(wki_v##A a, wki_v##B b, wki_v##C c) {                                            \
        wki_v##A##_pieces x = {a};                                                                           \
        wki_v##B##_pieces y = {b};                                                                           \
        wki_v##C##_pieces z = {c};                                                                           \
        wki_v##R##_pieces r;                                                                                 \
        WKI_EACH_PIECE r.n[k] = wkn_##n_(x.n[k], y.n[k], z.n[k]);                                            \
        return r.v;                                                                                          \
    }
#define P_F_F(E, n) WKI_WIDE_1(n, f, f)
#define P_F_FF(E, n) WKI_WIDE_2(n, f, f, f)
#define P_F_FFF(E, n) WKI_WIDE_3(n, f, f, f, f)
#define P_I_FF(E, n) WKI_WIDE_2(n, i, f, f)
#define P_I_I(E, n) WKI_WIDE_1(n, i, i)
#define P_I_II(E, n) WKI_WIDE_2(n, i, i, i)
#define P_F_IFF(E, n) WKI_WIDE_3(n, f, i, f, f)
#define P_I_III(E, n) WKI_WIDE_3(n, i, i, i, i)
#define P_F_I(E, n) WKI_WIDE_1(n, f, i)
#define P_I_F(E, n) WKI_WIDE_1(n, i, f)
#define P_RNG(E, n_)                                                                                         \
    WK_FN wki_vf wkv_##n_(uint64_t seed, uint64_t seq, uint64_t base) {                                      \
        wki_vf_pieces r;                                                                                     \
        WKI_EACH_PIECE r.n[k] = wkn_##n_(seed, seq, base + (uint64_t)k * WKI_LANES);                         \
        return r.v;                                                                                          \
    }
#include "prims.def"

#include "prim_undef.inc"

#endif
