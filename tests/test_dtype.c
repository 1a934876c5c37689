/* Promotion between dtypes: the ranks of dtype.def, and what ops make of them. */
#include <stdio.h>
#include <string.h>

#include "core/core.h"
#include "harness.h"

static int kind_order(wk_dtype d) {
    int k = wki_dtype_kind(d);
    return k == 'B' ? 0 : k == 'F' ? 2 : 1;
}

/* Floats are above integers and those above bool; within a kind wider is higher. Independent of the enum's order. */
TEST(dtype, ranks) {
    for (wk_dtype a = 0; a < WK_DTYPE_COUNT; a++)
        for (wk_dtype b = 0; b < WK_DTYPE_COUNT; b++) {
            int by_kind = kind_order(a) - kind_order(b), by_rank = wki_dtype_ranks[a] - wki_dtype_ranks[b];
            int by_bits = (int)wk_dtype_bits(a) - (int)wk_dtype_bits(b);
            if (a == b)
                continue;
            CHECK(by_rank != 0);
            if (by_kind || by_bits)
                CHECK((by_rank > 0) == (by_kind ? by_kind > 0 : by_bits > 0));
        }
}

/* Arithmetic on two dtypes computes in that of the higher rank, either way round: in f32 it works, and the error for the
   others names the dtype that the inputs became. */
TEST(dtype, promotion_of_every_pair) {
    wk_ctx *c = wk_ctx_new(NULL);
    REQUIRE(c != NULL);
    for (wk_dtype a = 0; a < WK_DTYPE_COUNT; a++)
        for (wk_dtype b = 0; b < WK_DTYPE_COUNT; b++) {
            wk_dtype want = wki_dtype_ranks[a] >= wki_dtype_ranks[b] ? a : b;
            char text[32];
            wk_error e;
            wk_scope_begin(c);
            wk_tensor *y = wk_add(wk_ones(c, a, 1, (int64_t[]){3}), wk_ones(c, b, 0, NULL));
            if (want == WK_F32) {
                CHECK_EQ_I(wk_dtype_of(y), WK_F32);
                CHECK_EQ_I(wk_item(wk_sum(y, NULL, 0, false)), 6);
                CHECK(!wk_error_take(c, NULL));
            } else {
                snprintf(text, sizeof text, "is %s,", wk_dtype_name(want));
                CHECK_EQ_I(wk_error_take(c, &e), WK_DTYPE);
                if (!strstr(e.message, text))
                    FAIL("%s and %s: %s", wk_dtype_name(a), wk_dtype_name(b), e.message);
            }
            wk_scope_end(c);
        }
    wk_ctx_free(c);
}
