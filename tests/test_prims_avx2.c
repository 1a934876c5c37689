/* The vector primitives of the AVX2 tier against scalar C. Compiled for the tier by GCC's pragma, so that the
 * test needs no flags; elsewhere, and on processors without it, it is skipped. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2,fma")
#endif
#define WKT_TIER "AVX2"
#include "prims_vector.inc"

TEST(prims, avx2_equals_scalar) {
#if WKI_LANES == 8
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        SKIP("no AVX2 and FMA here");
    compare_tier();
#else
    (void)compare_tier;
    SKIP("not compiled for this tier");
#endif
}
