/* Straight-line elementwise ops, avx512 tier. */
#define TIER(name) name##_avx512
#include "backend/cpu/straight.inc"
