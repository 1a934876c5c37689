/* Straight-line elementwise ops, baseline tier. */
#define TIER(name) name##_baseline
#include "backend/cpu/straight.inc"
