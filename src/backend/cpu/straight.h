/* Single elementwise ops as compiled code (straight.inc, per tier; straight.c decides when). Private to backend/cpu. */
#ifndef WKI_STRAIGHT_H
#define WKI_STRAIGHT_H

#include "base/cpu.h"
#include "base/pool.h"
#include "ops/loop.h"

#define WKI_STRAIGHT_TIER(tier)                                                                              \
    void wki_straight_##tier(int which, float *const *data, const uint8_t *fixed, const float *arg,          \
                             int64_t begin, int64_t end);
WKI_STRAIGHT_TIER(baseline)
WKI_STRAIGHT_TIER(avx2)
WKI_STRAIGHT_TIER(avx512)

/* Runs r that way when its program has such code and all operands are f32, contiguous or a single element. False: not done. */
bool wki_straight_run(const wki_loop_run *r, wki_isa isa, wki_pool *pool);

#endif
