/* The vector primitives of the AVX-512 tier against scalar C. Compiled for the tier by GCC's pragma, so that
 * the test needs no flags; elsewhere, and on processors without it, it is skipped. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#endif
#define WKT_TIER "AVX-512"
#include "prims_vector.inc"

TEST(prims, avx512_equals_scalar) {
#if WKI_LANES == 16
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        SKIP("no AVX-512 F, BW, DQ and VL here");
    compare_tier();
#else
    (void)compare_tier;
    SKIP("not compiled for this tier");
#endif
}
