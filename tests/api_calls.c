/* The contract of wick.h on compiled calls and random numbers, one test a rule. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"
#include "util_api.h"
#include "util_models.h"

/* ---- compiled calls ------------------------------------------------------------------------------------------------ */

typedef struct failing {
    wk_module *m;
    wk_optim *o;
    int fail_at; /* 0: never; 1: before any effect; 2: after backward; 3: after the optimizer; 4: as 3, with a read between */
    uint64_t sequence_at_read;
} failing;

static void failing_step(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)nin, (void)nout;
    failing *f = self;
    wk_tensor *bad = wk_ones(c, WK_F32, SIZE(7, 7)), *x = wk_dropout(in[0], 0.25);
    if (f->fail_at == 1)
        wk_add(x, bad);
    out[0] = wk_cross_entropy(wk_forward(f->m, x), in[1]);
    wk_backward(out[0]);
    if (f->fail_at == 2)
        wk_add(x, bad);
    wk_optim_step(f->o);
    if (f->fail_at == 4) {
        wk_item(wk_sum(wk_module_get(f->m, "fc1.weight"), NULL, 0,
                       false)); /* needs the step: it is run, and stays */
        wk_rng_get(c, NULL, &f->sequence_at_read);
        wk_dropout(in[0], 0.25);
    }
    if (f->fail_at >= 3)
        wk_add(x, bad);
}

TEST(calls, a_failed_call_leaves_parameters_gradients_and_rng_as_before) {
    wk_ctx *c = api_ctx(false);
    wk_module *m = model_mlp(c);
    failing f = {.m = m, .o = model_adamw(c, m, NULL)};
    wk_compiled *step = wk_compile(c, failing_step, &f, NULL);
    wk_tensor *in[2] = {api_normal(c, SIZE(8, MLP_FEATURES)), api_classes(c, 8, CLASSES)};
    wk_item(wk_call(step, in, 2));
    for (f.fail_at = 1; f.fail_at <= 3; f.fail_at++) {
        wk_tensor *bias = wk_module_get(m, "fc3.bias");
        wk_backward(wk_sum(wk_mul(bias, bias), NULL, 0, false)); /* a gradient that exists before the call */
        float *grad = api_read(wk_grad(bias));
        int64_t n, steps = wk_optim_steps(f.o);
        float *before = api_params(m, &n);
        uint64_t sequence, now;
        wk_rng_get(c, NULL, &sequence);
        CHECK(wk_is_poison(wk_call(step, in, 2)));
        CHECK_ERROR(c, WK_SHAPE);
        float *after = api_params(m, &n);
        CHECK_MEM(after, before, (size_t)n * sizeof(float));
        wk_rng_get(c, NULL, &now);
        CHECK_EQ_I(now, sequence);
        CHECK_EQ_I(wk_optim_steps(f.o), steps);
        CHECK(wk_grad(wk_module_get(m, "fc1.weight")) == NULL);
        REQUIRE(wk_grad(bias) != NULL);
        float *grad_after = api_read(wk_grad(bias));
        CHECK_MEM(grad_after, grad, CLASSES * sizeof(float));
        wk_zero_grad(bias);
        free(grad);
        free(grad_after);
        free(before);
        free(after);
    }
    f.fail_at = 0;
    CHECK(isfinite(wk_item(wk_call(step, in, 2))));
    api_end(c);
}

TEST(calls, what_a_read_in_the_middle_flushed_is_committed) {
    wk_ctx *c = api_ctx(false), *d = api_ctx(false);
    wk_seed(c, 5);
    wk_seed(d, 5);
    wk_module *m = model_mlp(c), *reference = model_mlp(d);
    failing f = {.m = m, .o = model_adamw(c, m, NULL), .fail_at = 4};
    failing g = {.m = reference, .o = model_adamw(d, reference, NULL)};
    wk_compile_options strict;
    wk_compile_options_init(&strict);
    strict.strict = true;
    wk_compiled *step = wk_compile(c, failing_step, &f, &strict),
                *good = wk_compile(d, failing_step, &g, &strict);
    wk_tensor *x = api_normal(c, SIZE(8, MLP_FEATURES)), *y = api_classes(c, 8, CLASSES);
    wk_tensor *in[2] = {x, y}, *also[2] = {wk_share(d, x), wk_share(d, y)};
    CHECK(wk_is_poison(wk_call(step, in, 2)));
    CHECK_ERROR(c, WK_SHAPE);
    wk_call(good, also, 2);
    int64_t n;
    float *a = api_params(m, &n), *b = api_params(reference, &n);
    CHECK_MEM(a, b, (size_t)n * sizeof(float));
    uint64_t now;
    wk_rng_get(c, NULL, &now);
    CHECK_EQ_I(now, f.sequence_at_read);
    CHECK_EQ_I(wk_optim_steps(f.o), 1);
    free(a);
    free(b);
    api_end(c);
    api_end(d);
}

static void scaled_sum(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    out[0] = wk_mul_scalar(wk_sum(in[0], NULL, 0, false), *(double *)self);
}

TEST(calls, self_is_read_on_every_call) {
    wk_ctx *c = api_ctx(false);
    double factor = 1;
    wk_compiled *f = wk_compile(c, scaled_sum, &factor, NULL);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(4));
    for (; factor < 6; factor++)
        CHECK_NEAR(wk_item(wk_call(f, &x, 1)), 4 * factor, 0);
    CHECK_EQ_I(api_stats(c).structures_made, 1); /* a VALUE attribute is no part of the key */
    api_end(c);
}

TEST(calls, returned_tensors_stay_intact) {
    wk_ctx *c = api_ctx(false);
    double factor = 1;
    wk_compiled *f = wk_compile(c, scaled_sum, &factor, NULL);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(4)), *y[16];
    for (int i = 0; i < 16; i++) {
        factor = i;
        y[i] = wk_call(f, &x, 1);
    }
    for (int i = 0; i < 16; i++)
        CHECK_NEAR(wk_item(y[i]), 4 * i, 0);
    api_end(c);
}

TEST(calls, returning_an_input) {
    wk_ctx *c = api_ctx(false);
    wk_compiled *f = wk_compile(c, api_identity, NULL, NULL);
    wk_tensor *x = wk_scalar(c, 7), *out[2];
    CHECK_NEAR(wk_item(wk_call(f, &x, 1)), 7, 0);
    wk_call_n(f, &x, 1, out, 2);
    CHECK_NEAR(wk_item(out[0]), 7, 0);
    CHECK_NEAR(wk_item(out[1]), 7, 0);
    CHECK(wk_alive(c, x));
    api_end(c);
}

static void nothing(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)self, (void)in, (void)nin, (void)out, (void)nout;
}

TEST(calls, an_output_that_was_not_set_is_an_error) {
    wk_ctx *c = api_ctx(false);
    wk_compiled *f = wk_compile(c, nothing, NULL, NULL);
    wk_module *m = wk_module_new(c, "nothing", nothing, NULL, NULL);
    wk_tensor *x = wk_scalar(c, 7);
    CHECK(wk_is_poison(wk_call(f, &x, 1)));
    CHECK_ERROR(c, WK_INVALID);
    CHECK(wk_is_poison(wk_forward(m, x)));
    CHECK_ERROR(c, WK_INVALID);
    api_end(c);
}

typedef struct nest {
    wk_compiled *inner;
} nest;

static void nested(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    wk_tensor *x = wk_add_scalar(in[0], 1), *y = wk_call(((nest *)self)->inner, &x, 1);
    out[0] = wk_add(y, x);
}

TEST(calls, nest) {
    wk_ctx *c = api_ctx(false);
    double factor = 3;
    nest n = {wk_compile(c, scaled_sum, &factor, NULL)};
    wk_compiled *f = wk_compile(c, nested, &n, NULL);
    wk_tensor *x = wk_scalar(c, 1);
    for (int i = 0; i < 3; i++)
        CHECK_NEAR(wk_item(wk_call(f, &x, 1)), 3 * 2 + 2, 0);
    api_end(c);
}

static void host_write(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)nin, (void)nout;
    float v = 1;
    wk_tensor *borrowed = wk_from_data(c, WK_F32, 0, NULL, &v);
    v = 100; /* the host memory was copied at the call */
    wk_tensor *y = wk_add(in[0], borrowed);
    *(double *)self = wk_item(y); /* a read in the middle sees what was computed so far */
    out[0] = wk_add(y, borrowed);
}

TEST(calls, reads_and_host_memory) {
    wk_ctx *c = api_ctx(false);
    double seen = 0;
    wk_compiled *f = wk_compile(c, host_write, &seen, NULL);
    wk_tensor *x = wk_scalar(c, 1);
    for (int i = 0; i < 3; i++) {
        CHECK_NEAR(wk_item(wk_call(f, &x, 1)), 3, 0);
        CHECK_NEAR(seen, 2, 0);
    }
    api_end(c);
}

TEST(calls, a_write_after_the_call_does_not_reach_it) {
    wk_ctx *c = api_ctx(false);
    double factor = 1;
    wk_compiled *f = wk_compile(c, scaled_sum, &factor, NULL);
    float v[4] = {1, 2, 3, 4};
    wk_tensor *x = wk_requires_grad(api_vector(c, 4, v), true); /* so that the call stays pending */
    wk_tensor *y = wk_call(f, &x, 1);
    memset(v, 0, sizeof v);
    CHECK(wk_write(x, v, sizeof v));
    CHECK_NEAR(wk_item(y), 10, 0);
    CHECK_NEAR(wk_item(wk_call(f, &x, 1)), 0, 0);
    api_end(c);
}

static void noise(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)self, (void)nin, (void)nout;
    wk_tensor *dead = wk_randn(c, SIZE(5)); /* draws though nobody reads it */
    (void)dead;
    out[0] = wk_add(wk_dropout(in[0], 0.5), wk_randn(c, SIZE(64)));
}

TEST(rng, advances_identically_eager_and_compiled) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(64));
    uint64_t seed, start, sequence[2];
    float *got[2][3];
    for (int compiled = 0; compiled < 2; compiled++) {
        wk_seed(c, 42);
        wk_rng_get(c, &seed, &start);
        CHECK_EQ_I(seed, 42);
        CHECK_EQ_I(start, 0);
        api_run r = api_runner(c, noise, NULL, compiled);
        for (int i = 0; i < 3; i++)
            got[compiled][i] = api_read(api_call(&r, &x, 1));
        wk_rng_get(c, NULL, &sequence[compiled]);
    }
    CHECK_EQ_I(sequence[0], sequence[1]);
    CHECK_EQ_I(sequence[0], 9);
    for (int i = 0; i < 3; i++)
        CHECK_MEM(got[0][i], got[1][i], 64 * sizeof(float));
    CHECK(!api_same(got[0][0], got[0][1], 64));
    wk_rng_set(c, 42, 3); /* as after the first call */
    api_run r = api_runner(c, noise, NULL, true);
    float *again = api_read(api_call(&r, &x, 1));
    CHECK_MEM(again, got[0][1], 64 * sizeof(float));
    free(again);
    for (int i = 0; i < 6; i++)
        free(got[i / 3][i % 3]);
    api_end(c);
}

TEST(rng, contexts_of_one_runtime_differ_and_a_seed_repeats) {
    wk_runtime_options o;
    wk_runtime_options_init(&o);
    o.seed = 9;
    o.threads = 1;
    float v[2][2][8];
    for (int round = 0; round < 2; round++) {
        wk_runtime *rt = wk_runtime_new(&o);
        REQUIRE(rt != NULL);
        for (int i = 0; i < 2; i++) {
            wk_ctx *c = wk_ctx_new(rt);
            REQUIRE(c != NULL);
            CHECK(wk_read(wk_randn(c, SIZE(8)), v[round][i], sizeof v[round][i]));
            api_end(c);
        }
        wk_runtime_free(rt);
    }
    CHECK_MEM(v[0], v[1], sizeof v[0]);
    CHECK(!api_same(v[0][0], v[0][1], 8));
}
