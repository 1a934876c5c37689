/* The CUDA text of the primitives, run on the CPU: the prelude and prim_math.inc as generated programs carry
 * them, under C definitions of the CUDA built-ins they use, against scalar C. */
#include "harness.h"
#include "prims.h"

#include <string.h>

#define __device__ __attribute__((unused))
#define __forceinline__ inline __attribute__((always_inline))

static inline int __float_as_int(float x) {
    int i;
    memcpy(&i, &x, sizeof i);
    return i;
}

static inline float __int_as_float(int i) {
    float x;
    memcpy(&x, &i, sizeof x);
    return x;
}

static inline float __int2float_rn(int i) { return (float)i; }
static inline int __float2int_rz(float x) { return (int)x; }
static inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

#include "backend/cuda/prims_prelude.cuh"
#include "ops/prim_math.inc"

#define WKT_TABLE cuda_table
#define WKT_TITLE "CUDA text"
#define WKT_LINKAGE static
#define WKT_CALL(n) wkc_##n
#define WKT_VF float
#define WKT_VI int
#define WKT_WIDTH 1
#include "prims_table.inc"

TEST(prims, cuda_text_equals_scalar) { wkt_prims_compare(&cuda_table); }
