/* The loop executor for AVX-512. */
#define TIER(name) name##_avx512
#include "backend/cpu/loop_exec.inc"
