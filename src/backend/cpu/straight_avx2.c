/* Straight-line elementwise ops, avx2 tier. */
#define TIER(name) name##_avx2
#include "backend/cpu/straight.inc"
