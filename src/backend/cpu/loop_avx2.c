/* The loop executor for AVX2. */
#define TIER(name) name##_avx2
#include "backend/cpu/loop_exec.inc"
