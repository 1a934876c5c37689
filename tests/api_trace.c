/* What WICK_TRACE makes the library write: which kernel runs, and why a better one does not. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "harness.h"
#include "util_api.h"

/* Standard error during the call, in a buffer to be freed. */
static char *said(void (*fn)(wk_ctx *c), wk_ctx *c) {
    FILE *f = tmpfile();
    int old = dup(2);
    char *text = calloc(1, 4096);
    if (!f || old < 0 || !text)
        abort();
    fflush(stderr);
    dup2(fileno(f), 2);
    fn(c);
    fflush(stderr);
    dup2(old, 2);
    close(old);
    rewind(f);
    size_t n = fread(text, 1, 4095, f);
    text[n] = 0;
    fclose(f);
    return text;
}

static void pool_of_3(wk_ctx *c) { wk_max_pool2d(wk_zeros(c, WK_F32, SIZE(1, 2, 6, 6)), 3); }

TEST(trace, dispatch_says_why) {
    wk_ctx *silent = wk_ctx_new(NULL);
    setenv("WICK_TRACE", "dispatch", 1);
    wk_runtime *rt = wk_runtime_new(NULL);
    unsetenv("WICK_TRACE");
    wk_ctx *c = wk_ctx_new(rt);
    REQUIRE(silent && rt && c);
    char *text = said(pool_of_3, c), *nothing = said(pool_of_3, silent);
    CHECK_STR(nothing, "");
    const char *why =
        "wick dispatch: max_pool2d on cpu: max_pool2d_2x2 does not fit, it needs 2 x 2 windows, stride 2 "
        "and no padding: f32 (1, 2, 6, 6) -> f32 (1, 2, 2, 2), i32 (1, 2, 2, 2)\n";
    const char *runs = "wick dispatch: max_pool2d on cpu: max_pool2d_any runs\n";
    if (!strstr(text, why) || !strstr(text, runs))
        FAIL("%s", text);
    free(text);
    free(nothing);
    api_end(c);
    api_end(silent);
    wk_runtime_free(rt);
}
