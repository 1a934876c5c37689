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

typedef struct wki_straight {
    int64_t n;                            /* elements */
    uint8_t fixed[WKI_LOOP_MAX_OPERANDS]; /* an operand that is one element for all */
} wki_straight;

/* Has r's program such code, and are all operands f32, contiguous or a single element? Whatever their addresses. */
bool wki_straight_fits(const wki_loop_run *r, wki_straight *s);
void wki_straight_run(const wki_loop_run *r, const wki_straight *s, wki_isa isa, wki_pool *pool);

#endif
