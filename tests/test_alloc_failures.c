/* The N-th allocation fails, for every N until none does: a whole small program (runtime, model, optimizer, loader, compiled
 * training steps, evaluation) ends with an error or without, never with a crash or a leak. */
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "harness.h"
#include "util_api.h"
#include "util_models.h"

enum { SAMPLES = 12, BATCH = 5 };

typedef struct program {
    wk_module *(*model)(wk_ctx *);
    wk_field fields[2];
    bool compiled;
} program;

static void run_steps(wk_ctx *c, const program *p) {
    wk_loader_options lo;
    wk_loader_options_init(&lo);
    lo.batch = BATCH;
    lo.shuffle = true;
    train_job job = {.model = p->model(c)};
    wk_tensor *params[64], *batch[2];
    job.optim = wk_adamw(c, params, wk_module_params(job.model, params, 64), NULL);
    wk_loader *l = wk_loader_new(c, p->fields, 2, SAMPLES, &lo);
    wk_compiled *f = p->compiled ? wk_compile(c, train_step, &job, NULL) : NULL;
    for (int epoch = 0; epoch < 2; epoch++)
        while (wk_loader_next(l, batch)) {
            wk_tensor *loss = NULL;
            if (f)
                loss = wk_call(f, batch, 2);
            else
                train_step(c, &job, batch, 2, &loss, 1);
            wk_item(loss);
        }
}

/* Runs the program; the status it ended with, WK_NOMEM also where not even a context could be made. */
static wk_status run(const program *p) {
    wk_runtime_options ro;
    wk_runtime_options_init(&ro);
    ro.threads = 1;
    wk_runtime *rt = wk_runtime_new(&ro);
    wk_ctx *c = rt ? wk_ctx_new(rt) : NULL;
    wk_status s = WK_NOMEM;
    if (c) {
        run_steps(c, p);
        s = wk_error_take(c, NULL);
    }
    wk_ctx_free(c);
    wk_runtime_free(rt);
    return s;
}

/* `once`: the one allocation fails; else all from it on. */
static void every_allocation(const program *p, bool once, int64_t stride) {
    int64_t live = wki_alloc_live();
    CHECK_EQ_I(run(p), WK_OK);
    CHECK_EQ_I(wki_alloc_live(), live);
    int64_t start = wki_alloc_count();
    run(p);
    int64_t total = wki_alloc_count() - start;
    for (int64_t n = 1; n <= total; n += stride) {
        if (once)
            wki_alloc_fail_once(n);
        else
            wki_alloc_fail_after(n);
        wk_status s = run(p);
        wki_alloc_fail_after(0);
        if (s != WK_NOMEM && !(once && s == WK_OK))
            FAIL("allocation %lld of %lld failed and the program ended with %s", (long long)n,
                 (long long)total, wk_status_name(s));
        if (wki_alloc_live() != live) {
            FAIL("allocation %lld of %lld failed and %lld blocks leaked", (long long)n, (long long)total,
                 (long long)(wki_alloc_live() - live));
            live = wki_alloc_live();
        }
    }
}

static wk_module *tiny_mlp(wk_ctx *c) {
    wk_module *layers[] = {wk_nn_linear(c, 4, 6, true), wk_nn_relu(c), wk_nn_layer_norm(c, 6, 1e-5),
                           wk_nn_dropout(c, 0.1), wk_nn_linear(c, 6, 3, true)};
    return wk_nn_sequential(c, layers, 5);
}

static void on_tiny_mlp(bool compiled, bool once) {
    static float x[SAMPLES][4];
    static int32_t y[SAMPLES];
    for (int i = 0; i < SAMPLES; i++)
        y[i] = i % 3;
    program p = {.model = tiny_mlp, .compiled = compiled};
    p.fields[0] = (wk_field){.dtype = WK_F32, .ndim = 1, .size = {4}, .data = x};
    p.fields[1] = (wk_field){.dtype = WK_I32, .data = y};
    every_allocation(&p, once, wkt_quick() ? 5 : 1);
}

TEST(allocation_failures, eager_one) { on_tiny_mlp(false, true); }
TEST(allocation_failures, eager_all_after) { on_tiny_mlp(false, false); }
TEST(allocation_failures, compiled_one) { on_tiny_mlp(true, true); }
TEST(allocation_failures, compiled_all_after) { on_tiny_mlp(true, false); }

TEST(allocation_failures, compiled_cnn) {
    static uint8_t x[SAMPLES][CNN_SIDE * CNN_SIDE], y[SAMPLES];
    program p = {.model = model_cnn, .compiled = true};
    p.fields[0] = (wk_field){.dtype = WK_U8, .ndim = 3, .size = {1, CNN_SIDE, CNN_SIDE}, .data = x};
    p.fields[1] = (wk_field){.dtype = WK_U8, .index = true, .data = y};
    every_allocation(&p, true, wkt_quick() ? 37 : 7);
}

/* Of the two losses one is not wanted. */
static void dead_loss(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)self, (void)nin, (void)nout;
    wk_sum(wk_mul(in[0], in[0]), NULL, 0, false);
    out[0] = wk_relu(wk_linear(in[0], in[0], NULL));
}

/* What is compiled in the end does not depend on which allocation failed before. */
TEST(allocation_failures, plans_are_the_same) {
    int64_t kernels = 0;
    wk_runtime_options o;
    wk_runtime_options_init(&o);
    o.threads = 1;
    for (int64_t n = 0; n < 200; n++) {
        wk_runtime *rt = wk_runtime_new(&o);
        wk_ctx *c = wk_ctx_new(rt);
        wk_tensor *x = wk_ones(c, WK_F32, 2, (int64_t[]){3, 3});
        wk_compiled *f = wk_compile(c, dead_loss, NULL, NULL);
        wki_alloc_fail_once(n);
        for (int i = 0; i < 2; i++) {
            wk_call(f, &x, 1);
            wki_alloc_fail_after(0);
            wk_error_take(c, NULL);
        }
        wk_stats s = {.struct_size = sizeof s};
        wk_stats_get(c, &s);
        kernels = n ? kernels : s.kernels_last;
        CHECK_EQ_I(s.kernels_last, kernels);
        wk_ctx_free(c);
        wk_runtime_free(rt);
    }
}

static void draws(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)self, (void)in, (void)nin, (void)nout;
    out[0] = wk_randn(c, 1, (int64_t[]){5});
}

/* A call that fails has drawn nothing, wherever it fails. */
TEST(allocation_failures, random_sequence) {
    for (int64_t n = 1; n < 60; n++) {
        wk_ctx *c = wk_ctx_new(NULL);
        wk_compiled *f = wk_compile(c, draws, NULL, NULL);
        uint64_t seed, sequence;
        wki_alloc_fail_once(n);
        wk_call(f, NULL, 0);
        wki_alloc_fail_after(0);
        wk_rng_get(c, &seed, &sequence);
        CHECK_EQ_I(sequence, !wk_failed(c));
        wk_ctx_free(c);
    }
}
