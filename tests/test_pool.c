/* The thread pool and CPU features (src/base/pool, src/base/cpu). */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/cpu.h"
#include "base/pool.h"
#include "harness.h"

/* Counts how often each index and each worker is visited, and whether borders keep to the grain. */
typedef struct {
    atomic_int *hits;
    atomic_int workers[64];
    atomic_int bad_border;
    int64_t n, grain;
} visit;

static void record(void *arg, int64_t begin, int64_t end, int worker) {
    visit *v = arg;
    if (begin % v->grain || (end % v->grain && end != v->n) || begin >= end)
        atomic_fetch_add(&v->bad_border, 1);
    atomic_fetch_add(&v->workers[worker], 1);
    for (int64_t i = begin; i < end; i++)
        atomic_fetch_add(&v->hits[i], 1);
}

static void check_cover(wki_pool *p, int64_t n, int64_t grain) {
    visit v = {.n = n, .grain = grain};
    v.hits = calloc((size_t)n + 1, sizeof *v.hits);
    REQUIRE(v.hits);
    wki_pool_for(p, n, record, &v, grain);
    int wrong = 0, parts = 0, repeats = 0;
    for (int64_t i = 0; i < n; i++)
        wrong += atomic_load(&v.hits[i]) != 1;
    for (int w = 0; w < 64; w++) {
        parts += atomic_load(&v.workers[w]);
        repeats += atomic_load(&v.workers[w]) > 1;
    }
    CHECK_EQ_I(wrong, 0);
    CHECK_EQ_I(repeats, 0);
    CHECK_EQ_I(atomic_load(&v.bad_border), 0);
    int64_t units = (n + grain - 1) / grain, size = wki_pool_size(p);
    CHECK_EQ_I(parts, units < size ? units : size);
    free(v.hits);
}

TEST(pool, every_index_once) {
    for (int threads = 1; threads <= 5; threads++) {
        wki_pool *p = wki_pool_new(threads);
        REQUIRE(p);
        CHECK_EQ_I(wki_pool_size(p), threads);
        for (int i = 0; i < 200; i++)
            check_cover(p, wkt_range(0, 300), wkt_range(1, 40));
        check_cover(p, 7, 7);
        check_cover(p, 8, 7);
        check_cover(p, 1, 1);
        wki_pool_free(p);
    }
}

typedef struct {
    int64_t begin, end;
} span;

static void note_span(void *arg, int64_t begin, int64_t end, int worker) {
    ((span *)arg)[worker] = (span){begin, end};
}

TEST(pool, huge_ranges_do_not_overflow) {
    wki_pool *p = wki_pool_new(4);
    REQUIRE(p);
    int64_t grains[] = {1, 3, 1024, INT64_MAX / 2, INT64_MAX - 1};
    for (size_t g = 0; g < sizeof grains / sizeof grains[0]; g++) {
        span s[4] = {{0, 0}};
        wki_pool_for(p, INT64_MAX, note_span, s, grains[g]);
        int64_t at = 0;
        for (int i = 0; i < 4 && s[i].end; i++) {
            CHECK_EQ_I(s[i].begin, at);
            CHECK(s[i].end > s[i].begin);
            at = s[i].end;
        }
        CHECK_EQ_I(at, INT64_MAX);
    }
    wki_pool_free(p);
}

TEST(pool, null_pool_and_empty_range) {
    span s = {-1, -1};
    wki_pool_for(NULL, 10, note_span, &s, 0);
    CHECK_EQ_I(s.begin, 0);
    CHECK_EQ_I(s.end, 10);
    s.end = -1;
    wki_pool_for(NULL, 0, note_span, &s, 1);
    wki_pool_for(NULL, -3, note_span, &s, 1);
    CHECK_EQ_I(s.end, -1);
    CHECK_EQ_I(wki_pool_size(NULL), 1);
    wki_pool_free(NULL);
}

/* Plain memory written by the workers must be visible to the caller, and the caller's to the workers. */
typedef struct {
    wki_pool *pool;
    int64_t *data;
    int64_t n;
    int depth;
} nest;

static void add_one(void *arg, int64_t begin, int64_t end, int worker) {
    int64_t *data = arg;
    (void)worker;
    for (int64_t i = begin; i < end; i++)
        data[i]++;
}

static void nested(void *arg, int64_t begin, int64_t end, int worker) {
    nest *s = arg;
    (void)worker;
    for (int64_t i = begin; i < end; i++)
        wki_pool_for(s->pool, s->n, add_one, s->data + i * s->n, 1);
}

TEST(pool, nested_calls_run_inline) {
    wki_pool *p = wki_pool_new(3);
    REQUIRE(p);
    nest s = {.pool = p, .n = 20};
    s.data = calloc(20 * 20, sizeof *s.data);
    REQUIRE(s.data);
    for (int round = 0; round < 50; round++)
        wki_pool_for(p, 20, nested, &s, 1);
    for (int i = 0; i < 20 * 20; i++)
        CHECK_EQ_I(s.data[i], 50);
    free(s.data);
    wki_pool_free(p);
}

static void *hammer(void *arg) {
    nest *s = arg;
    for (int round = 0; round < s->depth; round++)
        wki_pool_for(s->pool, s->n, add_one, s->data, 3);
    return NULL;
}

TEST(pool, several_callers) {
    enum { CALLERS = 4, N = 50 };
    int rounds = wkt_quick() ? 300 : 3000;
    wki_pool *p = wki_pool_new(3);
    REQUIRE(p);
    static int64_t data[CALLERS][N];
    memset(data, 0, sizeof data);
    nest s[CALLERS];
    pthread_t threads[CALLERS];
    int started = 0;
    for (; started < CALLERS; started++) {
        s[started] = (nest){p, data[started], N, rounds};
        if (!CHECK(pthread_create(&threads[started], NULL, hammer, &s[started]) == 0))
            break;
    }
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    for (int c = 0; c < started; c++)
        for (int i = 0; i < N; i++)
            CHECK_EQ_I(data[c][i], rounds);
    wki_pool_free(p);
}

/* Pauses around the time a waiter spins before it sleeps, so that both ways of waking are taken. */
TEST(pool, sleeping_workers_wake) {
    wki_pool *p = wki_pool_new(2);
    REQUIRE(p);
    int64_t data[2] = {0, 0};
    int rounds = wkt_quick() ? 200 : 2000;
    for (int i = 0; i < rounds; i++) {
        usleep((useconds_t)wkt_below(80));
        wki_pool_for(p, 2, add_one, data, 1);
    }
    CHECK_EQ_I(data[0], rounds);
    CHECK_EQ_I(data[1], rounds);
    wki_pool_free(p);
}

typedef struct {
    unsigned pause[2];
    int done[2], round;
} race;

static void pause_then_note(void *arg, int64_t begin, int64_t end, int worker) {
    race *r = arg;
    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        for (volatile unsigned spin = r->pause[i]; spin > 0; spin--) {
        }
        r->done[i] = r->round;
    }
}

/* Parts that end at nearly the same moment, in every order: a call may not return before all of them are done, nor
 * leave a trace that lets the next one do so. */
TEST(pool, parts_finish_together) {
    wki_pool *p = wki_pool_new(2);
    REQUIRE(p);
    race r = {.round = 0};
    int rounds = wkt_quick() ? 20000 : 200000, early = 0;
    for (r.round = 1; r.round <= rounds; r.round++) {
        for (int i = 0; i < 2; i++)
            r.pause[i] = 100 + (unsigned)wkt_below(100);
        wki_pool_for(p, 2, pause_then_note, &r, 1);
        for (int i = 0; i < 2; i++)
            early += r.done[i] != r.round;
    }
    CHECK_EQ_I(early, 0);
    wki_pool_free(p);
}

TEST(pool, born_and_freed_idle) {
    for (int i = 0; i < 50; i++)
        wki_pool_free(wki_pool_new(3));
}

TEST(pool, threads_from_environment) {
    const char *before = getenv("WICK_THREADS");
    char *saved = before ? strdup(before) : NULL;
    static const struct {
        const char *env;
        int asked, size; /* size 0: as many as CPUs */
    } cases[] = {{"3", 0, 3},   {"3", 2, 2},  {"0", 0, 0}, {"-2", 0, 0},
                 {"two", 0, 0}, {"2x", 0, 0}, {"", 0, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        setenv("WICK_THREADS", cases[i].env, 1);
        wki_pool *p = wki_pool_new(cases[i].asked);
        CHECK_EQ_I(wki_pool_size(p), cases[i].size ? cases[i].size : wki_cpu_count());
        wki_pool_free(p);
    }
    if (saved)
        setenv("WICK_THREADS", saved, 1);
    else
        unsetenv("WICK_THREADS");
    free(saved);
}

TEST(cpu, tier_from_environment) {
    const char *before = getenv("WICK_CPU_ISA");
    char *saved = before ? strdup(before) : NULL;
    unsetenv("WICK_CPU_ISA");
    wki_isa best = wki_cpu_isa();
    CHECK(!wki_cpu_isa_note());
    for (wki_isa isa = WKI_ISA_BASELINE; isa <= WKI_ISA_AVX512; isa++) {
        setenv("WICK_CPU_ISA", wki_isa_name(isa), 1);
        CHECK_EQ_I(wki_cpu_isa(), isa <= best ? isa : best);
        CHECK(!wki_cpu_isa_note() == (isa <= best));
    }
    setenv("WICK_CPU_ISA", "fast", 1);
    CHECK_EQ_I(wki_cpu_isa(), best);
    CHECK(wki_cpu_isa_note());
    setenv("WICK_CPU_ISA", "", 1);
    CHECK_EQ_I(wki_cpu_isa(), best);
    CHECK(!wki_cpu_isa_note());
    if (saved)
        setenv("WICK_CPU_ISA", saved, 1);
    else
        unsetenv("WICK_CPU_ISA");
    free(saved);
    CHECK(wki_cpu_count() >= 1);
}
