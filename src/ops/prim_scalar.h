/* The scalar primitives in C, one element at a time: wks_exp(x) and so on for every row of prims.def, with
 * masks of -1/0 as that file says, and wks_uniform/wks_normal(seed, seq, index). All inline; calls nothing
 * but libm's sqrtf and fmaf where the compiler has no instruction for them. Needs -ffp-contract=off. */
#ifndef WKI_OPS_PRIM_SCALAR_H
#define WKI_OPS_PRIM_SCALAR_H

#include <stdint.h>
#include <string.h>

static inline __attribute__((always_inline, unused)) int32_t wks_bits_of(float x) {
    int32_t i;
    memcpy(&i, &x, sizeof i);
    return i;
}

static inline __attribute__((always_inline, unused)) float wks_float_of(int32_t i) {
    float x;
    memcpy(&x, &i, sizeof x);
    return x;
}

#define WK_SCALAR 1
#define WK_F float
#define WK_I int32_t
#define WK_M int
#define WK_U32 uint32_t
#define WK_U64 uint64_t
#define WK_I64 int64_t
#define WK_FN static inline __attribute__((always_inline, unused))
#define WK_FN_RARE static __attribute__((noinline, cold, unused))
#define WK_NAME(n) wks_##n
#define WK_FC(c) (c)
#define WK_IC(c) (c)
#define WK_AS_I(x) wks_bits_of(x)
#define WK_AS_F(i) wks_float_of(i)
#define WK_TO_F(i) ((float)(i))
#define WK_TO_I(x) ((int32_t)(x))
#define WK_LT(a, b) ((a) < (b))
#define WK_LE(a, b) ((a) <= (b))
#define WK_EQ(a, b) ((a) == (b))
#define WK_ILT(a, b) ((a) < (b))
#define WK_IEQ(a, b) ((a) == (b))
#define WK_SEL(m, a, b) ((m) ? (a) : (b))
#define WK_ISEL(m, a, b) ((m) ? (a) : (b))
#define WK_LOWER(a, b) ((a) < (b) ? (a) : (b))
#define WK_UPPER(a, b) ((a) > (b) ? (a) : (b))
#define WK_MASK(m) (-(m))
#define WK_TEST(i) ((i) != 0)
#define WK_IADD(a, b) ((int32_t)((uint32_t)(a) + (uint32_t)(b)))
#define WK_ISUB(a, b) ((int32_t)((uint32_t)(a) - (uint32_t)(b)))
#define WK_IMUL(a, b) ((int32_t)((uint32_t)(a) * (uint32_t)(b)))
#define WK_SHL(i, n) ((int32_t)((uint32_t)(i) << (n)))
#define WK_SHR(i, n) ((i) >> (n))
#define WK_USHR(i, n) ((int32_t)((uint32_t)(i) >> (n)))
#define WK_SQRT(x) __builtin_sqrtf(x)
#define WK_FMA(a, b, c) __builtin_fmaf(a, b, c)
#define WK_SCALE(x, t) wks_scale(x, t)
#define WK_TRIG_FAR(m, a, quarter, r) ((m) ? wks_trig_far(a, quarter) : (r))

#include "prim_math.inc"

#include "prim_undef.inc"

#endif
