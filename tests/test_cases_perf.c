/* What a steady call of every row of the case table costs: compiled on the null device, it makes no plan, asks the heap for
 * nothing and is one launch. WICK_TEST_PERF=FILE also writes what each row takes on the tests' device, eager and compiled,
 * as JSON lines: a figure to look at, no test, for a clock that shares its machine cannot fail one. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "cases.h"
#include "harness.h"

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A row on a context, ready to be called again and again. */
typedef struct row {
    case_instance t;
    case_program p;
    wk_ctx *c;
    wk_compiled *f;
    wki_tensor *x[CASE_MAX_IN];
    wk_tensor *in[CASE_MAX_IN];
} row;

static void row_open(row *r, wk_ctx *c, const op_case *k) {
    case_open(&r->t, k, CASE_NORMAL, NULL);
    case_program_open(&r->p, &r->t, 0);
    r->c = c;
    wk_scope_begin(c);
    case_inputs(c, &r->t, r->x);
    for (int i = 0; i < k->nin; i++)
        r->in[i] = wki_handle(r->x[i]);
    r->f = wk_compile(c, case_program_run, &r->p, NULL);
}

static void row_close(row *r) {
    wk_compiled_free(r->f);
    wk_scope_end(r->c);
    case_close(&r->t);
}

static void row_call(row *r, bool compiled) {
    wk_tensor *out[CASE_MAX_OUT] = {0};
    int n = case_program_nout(&r->p);
    wk_scope_begin(r->c);
    if (compiled)
        wk_call_n(r->f, r->in, r->t.k->nin, out, n);
    else
        case_program_run(r->c, &r->p, r->in, r->t.k->nin, out, n);
    wk_scope_end(r->c);
}

static wk_stats stats_of(wk_ctx *c) {
    wk_stats s = {.struct_size = sizeof s};
    wk_stats_get(c, &s);
    return s;
}

static bool wanted(const op_case *k) { return !wkt_quick() || case_numel(k) < 3000; }

TEST(case_perf, a_steady_call_is_one_launch) {
    enum { CALLS = 3 };
    wk_ctx *c = case_context(WK_NULL);
    int steady = 0;
    for (int i = 0; c && i < op_case_count; i++) {
        if (!wanted(&op_cases[i]))
            continue;
        row r;
        row_open(&r, c, &op_cases[i]);
        for (int warm = 0; warm < 2; warm++)
            row_call(&r, true);
        wk_stats a = stats_of(c);
        for (int call = 0; call < CALLS; call++)
            row_call(&r, true);
        wk_stats b = stats_of(c);
        int64_t runs = b.flushes - a.flushes; /* 0 where the results are views of the inputs */
        if (wk_failed(c) || b.host_allocs != a.host_allocs || b.shapes_made != a.shapes_made ||
            (runs && runs != CALLS) || b.graph_launches - a.graph_launches != runs)
            FAIL("%s: %lld allocations, %lld plans, %lld runs and %lld launches in %d calls %s", r.t.k->name,
                 (long long)(b.host_allocs - a.host_allocs), (long long)(b.shapes_made - a.shapes_made),
                 (long long)runs, (long long)(b.graph_launches - a.graph_launches), CALLS, wk_message(c));
        steady += runs == CALLS;
        row_close(&r);
    }
    CHECK(!c || steady > wki_op_count / 2);
    if (c)
        wk_ctx_free(c);
}

/* The least of a few runs, in nanoseconds a call. */
static double time_of(row *r, bool compiled) {
    double least = INFINITY;
    for (int run = 0; run < 5; run++) {
        enum { CALLS = 50 };
        double start = now();
        for (int call = 0; call < CALLS; call++)
            row_call(r, compiled);
        wk_sync(r->c);
        double ns = 1e9 * (now() - start) / CALLS;
        least = ns < least ? ns : least;
    }
    return least;
}

TEST(case_perf, times) {
    const char *path = getenv("WICK_TEST_PERF");
    if (!path)
        SKIP("WICK_TEST_PERF names no file");
    wk_ctx *c = case_context(case_device());
    FILE *f = c ? fopen(path, "w") : NULL;
    REQUIRE(f);
    for (int i = 0; i < op_case_count; i++) {
        row r;
        row_open(&r, c, &op_cases[i]);
        double eager = time_of(&r, false), compiled = time_of(&r, true);
        fprintf(
            f,
            "{\"case\":\"%s\",\"elements\":%lld,\"eager_ns\":%.0f,\"compiled_ns\":%.0f,\"device\":\"%s\"}\n",
            r.t.k->name, (long long)case_numel(r.t.k), eager, compiled, wk_device_name(case_device()));
        CHECK(!wk_failed(c) && eager > 0 && compiled > 0);
        row_close(&r);
    }
    CHECK(fclose(f) == 0);
    wk_ctx_free(c);
}
