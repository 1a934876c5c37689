/* The bench `overhead`: what the library costs beside the arithmetic. On the public API alone. */
#define _GNU_SOURCE
#include <errno.h>
#include <link.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "bench.h"
#include "cli/nets.h"
#include "gpt2.h"

extern char **environ;

/* ---- single ops ---------------------------------------------------------------------------------------------------- */

typedef struct pair {
    wk_tensor *a, *b;
} pair;

static void add(void *arg, int64_t calls) {
    pair *p = arg;
    for (int64_t i = 0; i < calls; i++)
        wk_drop(wk_add(p->a, p->b));
}

static void scope(void *arg, int64_t calls) {
    for (int64_t i = 0; i < calls; i++) {
        wk_scope_begin(arg);
        wk_scope_end(arg);
    }
}

static void ops(bench_run *r) {
    wk_ctx *c = wk_ctx_new(NULL);
    const int64_t size[2] = {4, 4};
    pair p = {wk_ones(c, WK_F32, 2, size), wk_ones(c, WK_F32, 2, size)};
    double t = bench_wants(r, "add_4x4") ? bench_time(add, &p) : 0;
    if (bench_ok(r, "add_4x4", c))
        bench_figure(r, "add_4x4", 1e9 * t, "ns");
    wk_requires_grad(p.a, true);
    t = bench_wants(r, "add_4x4_grad") ? bench_time(add, &p) : 0;
    if (bench_ok(r, "add_4x4_grad", c))
        bench_figure(r, "add_4x4_grad", 1e9 * t, "ns");
    t = bench_wants(r, "scope") ? bench_time(scope, c) : 0;
    if (bench_ok(r, "scope", c))
        bench_figure(r, "scope", 1e9 * t, "ns");
    wk_ctx_free(c);
}

/* ---- recording ----------------------------------------------------------------------------------------------------- */

typedef struct recording {
    gpt2 g;
    double seconds; /* spent inside the function */
} recording;

static void timed_step(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    recording *k = self;
    double start = bench_now();
    gpt2_step(c, &k->g, in, nin, out, nout);
    k->seconds = bench_now() - start;
}

/* Shape inference, autograd and hashing of a mixed graph: the training step of GPT-2 small's shape, recorded. `walked`: its
   loss is scaled by another number every time, so that no backward is like one before it and each is walked. */
static void record_op(bench_run *r, const char *name, bool walked) {
    enum { RUNS = 201, WARM = 5, ROWS = 4, LENGTH = 64 };
    if (!bench_wants(r, name))
        return;
    wk_ctx *c = wk_ctx_new(NULL);
    wk_use_device(c, WK_NULL);
    recording k;
    gpt2_init(&k.g, c, gpt2_small());
    wk_compiled *f = wk_compile(c, timed_step, &k, NULL);
    wk_tensor *in[2] = {wk_zeros(c, WK_I64, 2, (int64_t[]){ROWS, LENGTH}),
                        wk_zeros(c, WK_I64, 1, (int64_t[]){ROWS * LENGTH})};
    double v[RUNS];
    wk_stats before = {.struct_size = sizeof before}, after = before;
    for (int i = -WARM; i < RUNS && !wk_failed(c); i++) {
        k.g.scale = walked ? 1000 + i : 0;
        wk_scope_begin(c);
        wk_stats_get(c, &before);
        wk_call(f, in, 2);
        wk_stats_get(c, &after);
        wk_scope_end(c);
        if (i >= 0)
            v[i] = k.seconds / (double)(after.ops - before.ops);
    }
    if (bench_ok(r, name, c))
        bench_figure(r, name, 1e9 * bench_median(v, RUNS), "ns");
    wk_ctx_free(c);
}

/* ---- a small training step ----------------------------------------------------------------------------------------- */

typedef struct mlp {
    net_job job;
    wk_ctx *c;
    wk_compiled *f; /* NULL: eager */
    wk_tensor *in[2];
} mlp;

static void mlp_steps(void *arg, int64_t calls) {
    mlp *m = arg;
    for (int64_t i = 0; i < calls; i++) {
        wk_tensor *loss;
        wk_scope_begin(m->c);
        if (m->f)
            wk_call(m->f, m->in, 2);
        else
            net_train_step(m->c, &m->job, m->in, 2, &loss, 1);
        wk_scope_end(m->c);
    }
    wk_sync(m->c);
}

/* 64-64-64-10, batch 32, AdamW: forward, cross-entropy, backward, update. */
static void mlp_case(bench_run *r, const char *name, bool compiled) {
    if (!bench_wants(r, name))
        return;
    wk_ctx *c = wk_ctx_new(NULL);
    int64_t labels[32];
    for (int i = 0; i < 32; i++)
        labels[i] = i % 10;
    mlp m = {.c = c, .job.model = net_tiny(c)};
    m.job.optim = net_adamw(c, m.job.model);
    m.in[0] = wk_randn(c, 2, (int64_t[]){32, 64});
    m.in[1] = wk_from_data(c, WK_I64, 1, (int64_t[]){32}, labels);
    if (compiled)
        m.f = wk_compile(c, net_train_step, &m.job, NULL);
    double t = bench_time(mlp_steps, &m);
    if (bench_ok(r, name, c))
        bench_figure(r, name, 1e6 * t, "us");
    wk_ctx_free(c);
}

/* ---- loading ------------------------------------------------------------------------------------------------------- */

/* A whole process that loads the library, prints its version and ends: an upper bound. */
static bool run_version(void) {
    char *argv[] = {(char *)"wick", (char *)"--version", NULL};
    posix_spawn_file_actions_t fa;
    pid_t pid;
    int status = -1;
    if (posix_spawn_file_actions_init(&fa))
        return false;
    posix_spawn_file_actions_addopen(&fa, 1, "/dev/null", 1 /* O_WRONLY */, 0);
    bool ok = !posix_spawn(&pid, "/proc/self/exe", &fa, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&fa);
    while (ok && waitpid(pid, &status, 0) < 0)
        ok = errno == EINTR;
    return ok && status == 0;
}

/* Adds up what is mapped of the object that holds wk_version: code and data, not debug information. */
static int library_size(struct dl_phdr_info *info, size_t n, void *bytes) {
    (void)n;
    double sum = 0;
    bool holds = false;
    uintptr_t at = (uintptr_t)wk_version;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        if (p->p_type != PT_LOAD)
            continue;
        uintptr_t base = info->dlpi_addr + p->p_vaddr;
        holds |= at >= base && at < base + p->p_memsz;
        sum += (double)p->p_filesz;
    }
    if (holds)
        *(double *)bytes = sum;
    return holds;
}

static void load(bench_run *r) {
    enum { RUNS = 21 };
    double v[RUNS], bytes = 0;
    for (int i = 0; i < RUNS && bench_wants(r, "load"); i++) {
        double start = bench_now();
        if (!run_version()) {
            bench_fail(r, "load", "the command could not be started");
            return;
        }
        v[i] = bench_now() - start;
    }
    if (bench_wants(r, "load"))
        bench_figure(r, "load", 1e3 * bench_median(v, RUNS), "ms");
    if (dl_iterate_phdr(library_size, &bytes))
        bench_figure(r, "size", 1e-6 * bytes, "MB");
    else
        bench_fail(r, "size", "the library was not found");
}

static void run(bench_run *r) {
    ops(r);
    record_op(r, "record_op", false);
    record_op(r, "record_op_walked", true);
    mlp_case(r, "mlp_step", false);
    mlp_case(r, "mlp_step_compiled", true);
    load(r);
}

static const char *const cases[] = {"add_4x4",  "add_4x4_grad",      "scope", "record_op", "record_op_walked",
                                    "mlp_step", "mlp_step_compiled", "load",  "size",      NULL};
const bench bench_overhead = {"overhead", "the library's cost beside the arithmetic", run, cases, false};
