/* What an index that a CUDA kernel finds wrong leaves behind: all that is older than the failed step as it was, also by the
 * steps that were queued before the host could know. Skipped without a device. */
#include "harness.h"
#include "util_api.h"
#include "util_models.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NEED_DEVICE                                                                                          \
    do {                                                                                                     \
        const char *why = "";                                                                                \
        wk_ctx *probe = wk_ctx_new(NULL);                                                                    \
        bool there = wk_device_available(probe, WK_CUDA, &why);                                              \
        char text[256];                                                                                      \
        snprintf(text, sizeof text, "%s", why);                                                              \
        wk_ctx_free(probe);                                                                                  \
        if (!there)                                                                                          \
            SKIP("%s", text);                                                                                \
    } while (0)

#define FN(name)                                                                                             \
    static void name(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout)
#define USES(self_) (void)c, (void)nin, (void)nout, (void)self, (void)in

static wk_ctx *cuda_ctx(void) {
    wk_ctx *c = wk_ctx_new(NULL);
    wk_use_device(c, WK_CUDA);
    return c;
}

static wk_tensor *pair(wk_ctx *c, int64_t a, int64_t b) {
    return wk_from_data(c, WK_I64, SIZE(2), (int64_t[]){a, b});
}

/* All `n` elements have this value. */
static void check_all(wk_tensor *t, float want) {
    float *v = api_read(t);
    for (int64_t i = 0; i < wk_numel(t); i++)
        if (v[i] != want) {
            FAIL("element %lld is %g, not %g", (long long)i, (double)v[i], (double)want);
            break;
        }
    free(v);
}

/* ---- what is queued behind a fault --------------------------------------------------------------------------------------- */

typedef struct counter {
    wk_tensor *table, *state;
} counter;

FN(count_up) { /* checks an index, and counts */
    USES(self);
    counter *k = self;
    wk_copy_(k->state, wk_add_scalar(k->state, 1));
    out[0] = wk_sum(wk_embedding(k->table, in[0]), NULL, 0, false);
}

FN(just_count_up) { /* nothing can fail */
    USES(self);
    counter *k = self;
    wk_copy_(k->state, wk_add_scalar(k->state, 1));
    out[0] = wk_neg(in[0]);
}

/* The step fails when it runs for the first time, or as a graph; what follows it is new or a graph too. */
TEST(cuda_faults, steps_behind_a_failed_one_write_nothing) {
    NEED_DEVICE;
    wk_ctx *c = cuda_ctx(), *d = cuda_ctx();
    counter k = {wk_ones(c, WK_F32, SIZE(4, 3)), wk_zeros(c, WK_F32, SIZE(1001))};
    counter other = {wk_ones(d, WK_F32, SIZE(4, 3)), wk_zeros(d, WK_F32, SIZE(1001))};
    wk_compiled *f = wk_compile(c, count_up, &k, NULL), *g = wk_compile(c, just_count_up, &k, NULL);
    wk_compiled *h = wk_compile(d, just_count_up, &other, NULL);
    wk_tensor *good = pair(c, 0, 3), *wrong = pair(c, 2, 4), *x = wk_ones(c, WK_F32, SIZE(5));
    wk_tensor *elsewhere = wk_ones(d, WK_F32, SIZE(5));
    float count = 0;
    for (int round = 0; round < 7; round++) {
        wk_call(f, &wrong, 1);
        for (int i = 0; i < 3; i++) {
            wk_call(f, &good, 1);
            wk_call(g, &x, 1);
            wk_copy_(k.state, wk_mul_scalar(k.state, 2));
        }
        wk_call(h, &elsewhere, 1);
        check_all(other.state, (float)round + 1); /* another context goes on */
        wk_sync(c);
        CHECK(strstr(wk_message(c), "embedding") != NULL);
        CHECK_ERROR(c, WK_INDEX);
        check_all(k.state, count);
        for (int i = 0; i < 2; i++) {
            wk_call(f, &good, 1);
            wk_call(g, &x, 1);
            count += 2;
        }
        check_all(k.state, count);
    }
    CHECK(api_stats(c).graph_launches > 0);
    api_end(c);
    api_end(d);
}

FN(entropy) {
    USES(self);
    out[0] = wk_cross_entropy(self, in[0]);
}

TEST(cuda_faults, the_first_one_is_reported) {
    NEED_DEVICE;
    wk_ctx *c = cuda_ctx();
    counter k = {wk_ones(c, WK_F32, SIZE(4, 3)), wk_zeros(c, WK_F32, SIZE(2))};
    wk_tensor *logits = wk_ones(c, WK_F32, SIZE(2, 4));
    wk_compiled *f[2] = {wk_compile(c, count_up, &k, NULL), wk_compile(c, entropy, logits, NULL)};
    wk_tensor *wrong = pair(c, 2, 4);
    for (int i = 0; i < 8; i++) {
        wk_call(f[i % 2], &wrong, 1);
        wk_call(f[!(i % 2)], &wrong, 1);
        wk_sync(c);
        CHECK(strstr(wk_message(c), i % 2 ? "cross_entropy" : "embedding") != NULL);
        CHECK_ERROR(c, WK_INDEX);
    }
    check_all(k.state, 0);
    api_end(c);
}

/* Many parameters in one launch: those of a model. */
TEST(cuda_faults, training_goes_on_behind_a_failed_step) {
    NEED_DEVICE;
    wk_ctx *c = cuda_ctx();
    wk_module *m = model_mlp(c);
    train_job job = {m, model_adamw(c, m, NULL)};
    wk_compiled *f = wk_compile(c, train_step, &job, NULL);
    wk_tensor *x = api_normal(c, SIZE(2, MLP_FEATURES));
    wk_tensor *good[2] = {x, pair(c, 0, CLASSES - 1)}, *wrong[2] = {x, pair(c, CLASSES, 0)};
    int64_t n = 0;
    for (int i = 0; i < 6; i++) {
        float *before = api_params(m, &n);
        wk_call(f, wrong, 2);
        for (int k = 0; k < 3; k++)
            wk_call(f, good, 2);
        CHECK(wk_item(wk_call(f, good, 2)) != 0);
        CHECK_ERROR(c, WK_INDEX);
        float *after = api_params(m, &n);
        CHECK(api_same(before, after, n));
        free(after);
        wk_call(f, good, 2);
        after = api_params(m, &n);
        CHECK(!api_same(before, after, n));
        free(before);
        free(after);
    }
    api_end(c);
}

/* ---- what is saved ------------------------------------------------------------------------------------------------------- */

enum { STATES = 70, ROWS = 5, WIDTH = 3 }; /* more than one launch saves */

typedef struct states {
    wk_tensor *t[STATES], *bytes;
} states;

/* Looks up a sum of all that it has written, so that the check cannot come first; in[0] is written too. */
FN(write_all_then_look_up) {
    USES(self);
    states *s = self;
    wk_copy_(in[0], wk_add_scalar(in[0], 1));
    wk_copy_(s->bytes, wk_cast(wk_add_scalar(wk_cast(s->bytes, WK_F32), 1), WK_U8));
    wk_tensor *sum = wk_add(in[0], wk_cast(s->bytes, WK_F32));
    for (int i = 0; i < STATES; i++) {
        wk_copy_(s->t[i], wk_add_scalar(s->t[i], 1));
        sum = wk_add(sum, s->t[i]);
    }
    out[0] = wk_sum(wk_embedding(sum, in[1]), NULL, 0, false);
}

static void check_states(const states *s, float want) {
    for (int i = 0; i < STATES; i += 3)
        check_all(s->t[i], want);
    check_all(s->t[STATES - 1], want);
    check_all(wk_cast(s->bytes, WK_F32), want);
}

/* Views that begin anywhere, in storage that lies still or is somewhere else in each call. */
TEST(cuda_faults, what_is_needed_by_a_check_is_put_back) {
    NEED_DEVICE;
    wk_ctx *c = cuda_ctx();
    states s;
    for (int i = 0; i < STATES; i++) {
        wk_tensor *whole = wk_zeros(c, WK_F32, SIZE(ROWS * WIDTH + 4));
        s.t[i] = wk_reshape(wk_slice(whole, 0, i % 5, i % 5 + ROWS * WIDTH, 1), SIZE(ROWS, WIDTH));
    }
    wk_tensor *whole = wk_cast(wk_zeros(c, WK_F32, SIZE(ROWS * WIDTH + 4)), WK_U8);
    s.bytes = wk_reshape(wk_slice(whole, 0, 1, 1 + ROWS * WIDTH, 1), SIZE(ROWS, WIDTH));
    wk_compiled *f = wk_compile(c, write_all_then_look_up, &s, NULL);
    wk_tensor *good = pair(c, 0, 3), *wrong = pair(c, ROWS, 1);
    float count = 0;
    for (int i = 0; i < 12; i++) {
        wk_scope_begin(c);
        for (int k = 0; i > 8 && k < i; k++) /* in a scope: where the next one lies */
            wk_empty(c, WK_F32, SIZE(ROWS, WIDTH));
        wk_tensor *moving = wk_zeros(c, WK_F32, SIZE(ROWS, WIDTH));
        wk_tensor *in[2] = {moving, i % 3 == 2 ? good : wrong};
        wk_call(f, in, 2);
        wk_sync(c);
        if (i % 3 == 2)
            count++;
        else
            CHECK_ERROR(c, WK_INDEX);
        check_all(moving, i % 3 == 2);
        check_states(&s, count);
        wk_scope_end(c);
    }
    CHECK(api_stats(c).graph_launches > 0);
    api_end(c);
}
