/* The bench `compile`: recording, matching and planning the training step of GPT-2 small's shape, on the null device, which
 * computes nothing. On the public API alone.
 */
#include <stdlib.h>

#include "bench.h"
#include "gpt2.h"

enum { ROWS = 4, LENGTH = 64 };
/* Lengths of one structure: odd multiples of 16, of one row-length bucket, and equal to no other size of the model. */
enum { FIRST_LENGTH = 272, NEXT_LENGTH = 32, NEW_LENGTHS = 7 };

typedef struct state {
    wk_runtime *rt;
    wk_ctx *c;
    gpt2 g;
    wk_compiled *f;
    double inside; /* seconds the function took in the last call: recording */
} state;

static void timed_step(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    state *s = self;
    double start = bench_now();
    gpt2_step(c, &s->g, in, nin, out, nout);
    s->inside = bench_now() - start;
}

/* A runtime of its own, so that no plan exists. */
static bool state_init(state *s) {
    wk_runtime_options o;
    wk_runtime_options_init(&o);
    o.threads = 1;
    s->rt = wk_runtime_new(&o);
    s->c = s->rt ? wk_ctx_new(s->rt) : NULL;
    if (!s->c)
        return false;
    wk_use_device(s->c, WK_NULL);
    gpt2_init(&s->g, s->c, gpt2_small());
    s->f = wk_compile(s->c, timed_step, s, NULL);
    return true;
}

static void state_free(state *s) {
    wk_ctx_free(s->c);
    wk_runtime_free(s->rt);
}

/* Seconds of one call at this sequence length. */
static double call(state *s, wk_tensor *ids, wk_tensor *targets) {
    wk_tensor *in[2] = {ids, targets};
    double start = bench_now();
    wk_scope_begin(s->c);
    wk_call(s->f, in, 2);
    wk_scope_end(s->c);
    return bench_now() - start;
}

static double call_at(state *s, int64_t length) {
    wk_scope_begin(s->c);
    wk_tensor *ids = wk_zeros(s->c, WK_I64, 2, (int64_t[]){ROWS, length});
    wk_tensor *targets = wk_zeros(s->c, WK_I64, 1, (int64_t[]){ROWS * length});
    double t = call(s, ids, targets);
    wk_scope_end(s->c);
    return t;
}

static wk_stats stats(wk_ctx *c) {
    wk_stats s = {.struct_size = sizeof s};
    wk_stats_get(c, &s);
    return s;
}

/* Steady state: time inside the function, of the whole call, and what a call allocates and launches. */
static void steady(bench_run *r, state *s) {
    enum { RUNS = 301, WARM = 10 };
    static double whole[RUNS], inside[RUNS];
    wk_tensor *ids = wk_zeros(s->c, WK_I64, 2, (int64_t[]){ROWS, LENGTH});
    wk_tensor *targets = wk_zeros(s->c, WK_I64, 1, (int64_t[]){ROWS * LENGTH});
    for (int i = 0; i < WARM; i++)
        call(s, ids, targets);
    wk_stats before = stats(s->c);
    for (int i = 0; i < RUNS; i++) {
        whole[i] = call(s, ids, targets);
        inside[i] = s->inside;
    }
    wk_stats after = stats(s->c);
    if (!bench_ok(r, "hit_gpt2", s->c))
        return;
    bench_figure(r, "ops_gpt2", (double)(after.ops - before.ops) / RUNS, "ops");
    bench_figure(r, "record_gpt2", 1e6 * bench_median(inside, RUNS), "us");
    bench_figure(r, "hit_gpt2", 1e6 * bench_median(whole, RUNS), "us");
    bench_figure(r, "allocs_gpt2", (double)(after.host_allocs - before.host_allocs) / RUNS, "allocations");
    bench_figure(r, "launches_gpt2", (double)(after.graph_launches - before.graph_launches) / RUNS,
                 "launches");
    bench_figure(r, "arena_gpt2", (double)after.arena_bytes / (double)after.arena_lower_bound, "ratio");
}

/* First calls at new lengths of a known structure; what they take beyond a steady-state call. */
static void new_shapes(bench_run *r, state *s) {
    enum { STEADY = 21 };
    double v[NEW_LENGTHS], base[STEADY];
    call_at(s, FIRST_LENGTH);
    int64_t structures = stats(s->c).structures_made;
    for (int i = 0; i < NEW_LENGTHS; i++)
        v[i] = call_at(s, FIRST_LENGTH + NEXT_LENGTH * (i + 1));
    int64_t made = stats(s->c).structures_made - structures;
    for (int i = 0; i < STEADY; i++)
        base[i] = call_at(s, FIRST_LENGTH);
    if (!bench_ok(r, "new_shape_gpt2", s->c))
        return;
    bench_figure(r, "new_shape_gpt2", 1e3 * (bench_median(v, NEW_LENGTHS) - bench_median(base, STEADY)),
                 "ms");
    bench_figure(r, "new_structures_gpt2", (double)made, "plans");
}

static void run(bench_run *r) {
    enum { FRESH = 3 };
    double first[FRESH];
    for (int i = 0; i < FRESH; i++) {
        state *s = malloc(sizeof *s);
        if (!s || !state_init(s)) {
            bench_fail(r, "plan_gpt2", "out of memory");
            free(s);
            return;
        }
        first[i] = call_at(s, LENGTH);
        bool ok = bench_ok(r, "plan_gpt2", s->c);
        if (ok && i + 1 == FRESH) {
            bench_figure(r, "plan_gpt2", 1e3 * bench_median(first, FRESH), "ms");
            steady(r, s);
            new_shapes(r, s);
        }
        state_free(s);
        free(s);
        if (!ok)
            return;
    }
}

static const char *const cases[] = {
    "plan_gpt2",  "ops_gpt2",       "record_gpt2",         "hit_gpt2", "allocs_gpt2", "launches_gpt2",
    "arena_gpt2", "new_shape_gpt2", "new_structures_gpt2", NULL};
const bench bench_compile = {"compile", "recording and planning a training step of GPT-2 small's shape", run,
                             cases, false};
