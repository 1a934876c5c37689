/* The loop executor for what the ABI guarantees. */
#define TIER(name) name##_baseline
#include "backend/cpu/loop_exec.inc"
