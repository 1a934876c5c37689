/* Whole training steps on the command's device: the tiny MLP and the demo's network at batch 128, compiled. `_host` is the
 * median of one step and a wait for the device, by the host's clock; `_stream` the mean of a run of steps with one wait at its
 * end, what a loop that reads no loss pays. bench/peers/torch_cuda.py measures the same two ways. */
#include <stdlib.h>

#include "bench.h"
#include "cli/nets.h"

enum { WARM_UP = 20, STEPS = 200 };

typedef struct work {
    wk_ctx *c;
    net_job job;
    wk_compiled *f;
    wk_tensor *in[2];
} work;

static void step(work *w) {
    wk_scope_begin(w->c);
    wk_call(w->f, w->in, 2);
    wk_scope_end(w->c);
}

static void measure(bench_run *r, work *w, const char *host, const char *stream) {
    double v[STEPS];
    for (int i = 0; i < WARM_UP; i++)
        step(w);
    wk_sync(w->c);
    for (int i = 0; i < STEPS; i++) {
        double start = bench_now();
        step(w);
        wk_sync(w->c);
        v[i] = bench_now() - start;
    }
    double start = bench_now();
    for (int i = 0; i < STEPS; i++)
        step(w);
    wk_sync(w->c);
    double mean = (bench_now() - start) / STEPS;
    if (!bench_ok(r, host, w->c))
        return;
    bench_figure(r, host, 1e6 * bench_median(v, STEPS), "us");
    bench_figure(r, stream, 1e6 * mean, "us");
}

static void prepare(work *w, int64_t batch, int ndim, const int64_t *size) {
    int64_t labels[128];
    for (int64_t i = 0; i < batch; i++)
        labels[i] = i % NET_CLASSES;
    w->job.optim = net_adamw(w->c, w->job.model);
    w->in[0] = wk_rand(w->c, ndim, size);
    w->in[1] = wk_from_data(w->c, WK_I64, 1, &batch, labels);
    w->f = wk_compile(w->c, net_train_step, &w->job, NULL);
}

static bool begin(bench_run *r, work *w, const char *host, const char *stream) {
    *w = (work){0};
    if (!bench_wants(r, host) && !bench_wants(r, stream))
        return false;
    w->c = wk_ctx_new(NULL);
    if (!w->c) {
        bench_fail(r, host, "out of memory");
        return false;
    }
    wk_use_device(w->c, bench_device(r));
    return true;
}

static void mlp(bench_run *r) {
    work w;
    if (!begin(r, &w, "mlp_step_host", "mlp_step_stream"))
        return;
    w.job.model = net_tiny(w.c);
    prepare(&w, 32, 2, (int64_t[]){32, 64});
    measure(r, &w, "mlp_step_host", "mlp_step_stream");
    wk_ctx_free(w.c);
}

static void cnn(bench_run *r) {
    work w;
    if (!begin(r, &w, "cnn_step_b128_host", "cnn_step_b128_stream"))
        return;
    w.job.model = net_new(w.c, NET_CNN);
    prepare(&w, 128, 4, (int64_t[]){128, 1, NET_SIDE, NET_SIDE});
    measure(r, &w, "cnn_step_b128_host", "cnn_step_b128_stream");
    wk_ctx_free(w.c);
}

static void run(bench_run *r) {
    mlp(r);
    cnn(r);
}

static const char *const cases[] = {"mlp_step_host", "mlp_step_stream", "cnn_step_b128_host",
                                    "cnn_step_b128_stream", NULL};
const bench bench_train = {"train", "whole training steps on the device of --device", run, cases, true};
