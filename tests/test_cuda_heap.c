/* Tests of the CUDA backend's caching allocator on a made-up device: a model of streams proves that no block is
 * handed out before the work that used it, and a page map that memory is neither lost nor given out twice. */
#include "backend/cuda/cu_heap.h"
#include "base/alloc.h"
#include "harness.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define MIB ((size_t)1 << 20)
#define PAGE (2 * MIB)
#define GRAIN 512
#define BASE ((wki_cu_ptr)1 << 40)
#define MAX_PAGES 256
#define STREAMS 3
#define CODE(call) CHECK_EQ_I((call), WKI_CU_OK)

/* Work on a stream is counted; seen[s][t] is how much of t's work comes before what s queues next. */
typedef struct fake {
    size_t pages;
    uint16_t segment[MAX_PAGES]; /* 0: free, else 1 + the first page of the segment */
    int n_grow, n_release, n_after, n_settle;
    uint64_t queued[STREAMS], done[STREAMS], seen[STREAMS][STREAMS];
    struct use {
        uint8_t stream;
        uint64_t work; /* the last that touched the grain; 0: none */
    } last[MAX_PAGES * PAGE / GRAIN];
    wki_cu_heap *heap;
    wki_cu_pool *pool[STREAMS];
    int id[STREAMS]; /* what stands for the streams */
} fake;

static size_t stream_of(const fake *f, const void *stream) { return (size_t)((const int *)stream - f->id); }

static int fake_grow(void *self, size_t bytes, wki_cu_ptr *out, wki_cu_error *err) {
    fake *f = self;
    size_t need = bytes / PAGE, run = 0;
    CHECK_EQ_I(bytes % PAGE, 0);
    f->n_grow++;
    for (size_t i = 0; i < f->pages; i++) {
        run = f->segment[i] ? 0 : run + 1;
        if (run < need)
            continue;
        size_t first = i + 1 - need;
        for (size_t j = first; j <= i; j++)
            f->segment[j] = (uint16_t)(first + 1);
        *out = BASE + first * PAGE;
        return WKI_CU_OK;
    }
    if (err)
        snprintf(err->text, sizeof err->text, "full");
    return WKI_CU_DEVICE_MEMORY;
}

static bool is_done(const fake *f, const struct use *u) { return u->work <= f->done[u->stream]; }

static void fake_release(void *self, wki_cu_ptr p) {
    fake *f = self;
    size_t first = (p - BASE) / PAGE;
    CHECK_EQ_I(f->segment[first], first + 1);
    f->n_release++;
    for (size_t i = first; i < f->pages && f->segment[i] == first + 1; i++) {
        f->segment[i] = 0;
        for (size_t g = i * PAGE / GRAIN; g < (i + 1) * PAGE / GRAIN; g++)
            if (!is_done(f, &f->last[g])) {
                FAIL("memory is released under work of stream %u", f->last[g].stream);
                return;
            }
    }
}

static void finish(fake *f, size_t s) {
    f->done[s] = f->queued[s];
    for (size_t t = 0; t < STREAMS; t++)
        if (f->done[t] < f->seen[s][t])
            f->done[t] = f->seen[s][t];
}

static bool fake_idle(void *self, void *stream) {
    fake *f = self;
    size_t s = stream_of(f, stream);
    return f->done[s] == f->queued[s];
}

static int fake_after(void *self, void *stream, void *other, wki_cu_error *err) {
    fake *f = self;
    size_t s = stream_of(f, stream), o = stream_of(f, other);
    (void)err;
    f->n_after++;
    f->seen[s][o] = f->queued[o];
    for (size_t t = 0; t < STREAMS; t++)
        if (f->seen[s][t] < f->seen[o][t])
            f->seen[s][t] = f->seen[o][t];
    return WKI_CU_OK;
}

static int fake_settle(void *self, void *stream, wki_cu_error *err) {
    fake *f = self;
    (void)err;
    f->n_settle++;
    finish(f, stream_of(f, stream));
    return WKI_CU_OK;
}

static void fake_room(void *self, size_t *free, size_t *total) {
    fake *f = self;
    *free = 0;
    for (size_t i = 0; i < f->pages; i++)
        *free += f->segment[i] ? 0 : PAGE;
    *total = f->pages * PAGE;
}

static fake *fake_new(size_t pages, size_t limit) {
    fake *f = wki_calloc(1, sizeof *f);
    if (!f)
        return NULL;
    f->pages = pages;
    const wki_cu_heap_source source = {f,          fake_grow,   fake_release, fake_idle,
                                       fake_after, fake_settle, fake_room};
    CODE(wki_cu_heap_create(&source, limit, &f->heap, NULL));
    for (size_t s = 0; s < STREAMS; s++)
        CODE(wki_cu_pool_open(f->heap, &f->id[s], &f->pool[s], NULL));
    return f;
}

static void fake_free(fake *f) {
    wki_cu_heap_destroy(f->heap);
    wki_free(f);
}

/* Work on stream s that touches the block; the last use of each grain must come before it. */
static void touch(fake *f, size_t s, wki_cu_ptr p, size_t bytes) {
    f->queued[s]++;
    for (size_t g = (p - BASE) / GRAIN; g < (p - BASE + bytes + GRAIN - 1) / GRAIN; g++) {
        struct use *u = &f->last[g];
        if (u->stream != s && !is_done(f, u) && f->seen[s][u->stream] < u->work) {
            FAIL("stream %zu uses memory before work %llu of stream %u", s, (unsigned long long)u->work,
                 u->stream);
            return;
        }
        u->stream = (uint8_t)s;
        u->work = f->queued[s];
    }
}

typedef struct held {
    wki_cu_ptr p;
    size_t bytes, stream;
} held;

static size_t random_size(void) {
    switch (wkt_below(4)) {
    case 0:
        return 1 + wkt_below(4096);
    case 1:
        return 1 + wkt_below(MIB);
    case 2:
        return MIB + wkt_below(8 * MIB);
    default:
        return MIB + wkt_below(40 * MIB);
    }
}

static bool overlaps(const held *all, size_t n, const held *x) {
    for (size_t i = 0; i < n; i++)
        if (x->p < all[i].p + all[i].bytes && all[i].p < x->p + x->bytes)
            return true;
    return false;
}

TEST(cuda_rt, heap_random) {
    int64_t live = wki_alloc_live();
    fake *f = fake_new(128, 0);
    REQUIRE(f);
    static held all[400];
    size_t n = 0, requested = 0, refused = 0, frozen = STREAMS;
    for (int step = 0; step < (wkt_quick() ? 3000 : 20000); step++) {
        if (wkt_below(50) == 0)
            finish(f, wkt_below(STREAMS));
        if (wkt_below(200) == 0) {
            if (frozen < STREAMS)
                wki_cu_pool_freeze(f->heap, f->pool[frozen], false);
            frozen = wkt_below(2 * STREAMS);
            if (frozen < STREAMS)
                wki_cu_pool_freeze(f->heap, f->pool[frozen], true);
        }
        if (wkt_below(500) == 0)
            CODE(wki_cu_heap_trim(f->heap, NULL));
        if (n && (n == 400 || wkt_below(2))) {
            size_t i = wkt_below(n), s = wkt_below(4) ? all[i].stream : wkt_below(STREAMS);
            if (s != all[i].stream && (s == frozen || all[i].stream == frozen))
                s = all[i].stream;
            if (s != frozen) {
                touch(f, all[i].stream, all[i].p, all[i].bytes);
                if (s != all[i].stream) { /* what the user of two streams must do */
                    fake_after(f, &f->id[s], &f->id[all[i].stream], NULL);
                    touch(f, s, all[i].p, all[i].bytes);
                }
            }
            CODE(wki_cu_heap_free(f->heap, f->pool[s], all[i].p, NULL));
            requested -= all[i].bytes;
            all[i] = all[--n];
            continue;
        }
        held x = {.bytes = random_size(), .stream = wkt_below(STREAMS)};
        int code = wki_cu_heap_alloc(f->heap, f->pool[x.stream], x.bytes, "random", &x.p, NULL);
        if (code) {
            CHECK_EQ_I(code, x.stream == frozen ? WKI_CU_INVALID : WKI_CU_DEVICE_MEMORY);
            refused++;
            continue;
        }
        CHECK_EQ_I(x.p % GRAIN, 0);
        REQUIRE(x.stream != frozen && !overlaps(all, n, &x));
        touch(f, x.stream, x.p, x.bytes);
        requested += x.bytes;
        all[n++] = x;
    }
    CHECK(refused > 0 && f->n_after > 0 && f->n_release > 0);
    wki_cu_memory_stats st;
    wki_cu_heap_stats(f->heap, &st);
    CHECK_EQ_I(st.requested, requested);
    CHECK_EQ_I(st.live, n);
    CHECK(st.allocated >= requested && st.reserved >= st.allocated);
    if (frozen < STREAMS)
        wki_cu_pool_freeze(f->heap, f->pool[frozen], false);
    while (n--)
        CODE(wki_cu_heap_free(f->heap, f->pool[all[n].stream], all[n].p, NULL));
    CODE(wki_cu_heap_trim(f->heap, NULL));
    wki_cu_heap_stats(f->heap, &st);
    CHECK_EQ_I(st.reserved, 0);
    CHECK_EQ_I(st.allocated, 0);
    CHECK_EQ_I(st.largest_free, 0);
    CHECK_EQ_I(st.driver_allocs, st.driver_frees);
    fake_free(f);
    CHECK_EQ_I(wki_alloc_live(), live);
}

TEST(cuda_rt, heap_reuses_in_stream_order) {
    fake *f = fake_new(16, 0); /* 32 MiB: one shared segment and no more */
    REQUIRE(f);
    wki_cu_ptr a, b, c;
    CODE(wki_cu_heap_alloc(f->heap, f->pool[0], 20 * MIB, "a", &a, NULL));
    touch(f, 0, a, 20 * MIB);
    CODE(wki_cu_heap_free(f->heap, f->pool[0], a, NULL));
    CODE(wki_cu_heap_alloc(f->heap, f->pool[0], 20 * MIB, "b", &b, NULL));
    CHECK_EQ_I(a, b); /* at once on its own stream */
    CHECK_EQ_I(f->n_after, 0);
    touch(f, 0, b, 20 * MIB);
    CODE(wki_cu_heap_free(f->heap, f->pool[0], b, NULL));
    CODE(wki_cu_heap_alloc(f->heap, f->pool[1], 4 * MIB, "c", &c, NULL));
    CHECK_EQ_I(f->n_after, 0); /* memory is left: no waiting for a busy stream */
    CHECK(c < a || c >= a + 20 * MIB);
    CODE(wki_cu_heap_alloc(f->heap, f->pool[1], 20 * MIB, "d", &b, NULL));
    CHECK_EQ_I(a, b);
    CHECK_EQ_I(f->n_after, 1); /* none is left: behind an event */
    touch(f, 1, b, 20 * MIB);
    CODE(wki_cu_heap_free(f->heap, f->pool[1], b, NULL));
    finish(f, 1);
    CODE(wki_cu_heap_alloc(f->heap, f->pool[2], 20 * MIB, "e", &b, NULL));
    CHECK_EQ_I(a, b);
    CHECK_EQ_I(f->n_after, 1); /* the other stream is idle: at once */
    fake_free(f);
}

TEST(cuda_rt, heap_best_fit_and_merging) {
    fake *f = fake_new(64, 0);
    REQUIRE(f);
    wki_cu_ptr p[6], q;
    wki_cu_memory_stats st;
    const size_t kib[6] = {64, 16, 64, 8, 64, 32};
    for (int i = 0; i < 6; i++)
        CODE(wki_cu_heap_alloc(f->heap, f->pool[0], kib[i] << 10, "p", &p[i], NULL));
    CODE(wki_cu_heap_free(f->heap, f->pool[0], p[1], NULL));
    CODE(wki_cu_heap_free(f->heap, f->pool[0], p[3], NULL));
    CODE(wki_cu_heap_alloc(f->heap, f->pool[0], 7000, "q", &q, NULL));
    CHECK_EQ_I(q, p[3]); /* the 8 KiB hole, not the 16 KiB one */
    CODE(wki_cu_heap_free(f->heap, f->pool[0], q, NULL));
    CODE(wki_cu_heap_alloc(f->heap, f->pool[0], 9000, "q", &q, NULL));
    CHECK_EQ_I(q, p[1]);
    CODE(wki_cu_heap_free(f->heap, f->pool[0], q, NULL));
    CHECK_EQ_I(wki_cu_heap_free(f->heap, f->pool[0], q, NULL), WKI_CU_INVALID);
    /* Freed on different streams they do not merge, until the streams go. */
    CODE(wki_cu_heap_free(f->heap, f->pool[1], p[0], NULL));
    CODE(wki_cu_heap_free(f->heap, f->pool[0], p[2], NULL));
    CODE(wki_cu_heap_free(f->heap, f->pool[2], p[4], NULL));
    CODE(wki_cu_heap_free(f->heap, f->pool[1], p[5], NULL));
    wki_cu_heap_stats(f->heap, &st);
    CHECK(st.largest_free < PAGE && st.allocated == 0 && st.reserved == PAGE);
    for (int s = 0; s < STREAMS; s++)
        wki_cu_pool_close(f->heap, f->pool[s]);
    wki_cu_heap_stats(f->heap, &st);
    CHECK_EQ_I(st.largest_free, PAGE);
    CHECK_EQ_I(f->n_grow, 1);
    fake_free(f);
}

TEST(cuda_rt, heap_out_of_memory_text) {
    fake *f = fake_new(32, 0);
    REQUIRE(f);
    wki_cu_ptr p, first;
    wki_cu_error err;
    CODE(wki_cu_heap_alloc(f->heap, f->pool[0], 16 * MIB, "conv2d", &first, NULL));
    for (int i = 0; i < 2; i++)
        CODE(wki_cu_heap_alloc(f->heap, f->pool[0], 16 * MIB, "conv2d", &p, NULL));
    CODE(wki_cu_heap_alloc(f->heap, f->pool[0], 8 * MIB, "linear", &p, NULL));
    /* In a large block, since no other is left. */
    CODE(wki_cu_heap_alloc(f->heap, f->pool[0], 1000, NULL, &p, NULL));
    CODE(wki_cu_heap_free(f->heap, f->pool[0], first, NULL));
    REQUIRE(wki_cu_heap_alloc(f->heap, f->pool[0], 24 * MIB, "softmax", &p, &err) == WKI_CU_DEVICE_MEMORY);
    CHECK_EQ_I(p, 0);
    CHECK_EQ_I(err.code, WKI_CU_DEVICE_MEMORY);
    CHECK_STR(
        err.text,
        "out of device memory: softmax asked for 24.0 MiB; the device has 0 B free of 64.0 MiB; the "
        "allocator holds 64.0 MiB, 42.0 MiB of it in 4 live blocks; its largest free block is 16.0 MiB "
        "(fragmentation 27%); most is held by conv2d 32.0 MiB (2), linear 8.0 MiB (1), untagged 2.0 MiB "
        "(1)");
    CHECK(f->n_settle > 0);
    CHECK_EQ_I(wki_cu_heap_alloc(f->heap, f->pool[0], SIZE_MAX, "x", &p, &err), WKI_CU_DEVICE_MEMORY);
    fake_free(f);

    f = fake_new(128, 48 * MIB);
    REQUIRE(f);
    CODE(wki_cu_heap_alloc(f->heap, f->pool[0], 40 * MIB, "big", &p, NULL));
    REQUIRE(wki_cu_heap_alloc(f->heap, f->pool[0], 10 * MIB, "more", &p, &err) == WKI_CU_DEVICE_MEMORY);
    CHECK(strstr(err.text, "holds 40.0 MiB of a limit of 48.0 MiB") != NULL);
    CODE(wki_cu_heap_alloc(f->heap, f->pool[0], 6 * MIB, "less", &p, &err));
    fake_free(f);
}

/* A cached block of the wrong kind is given back to make room. */
TEST(cuda_rt, heap_gives_back_and_retries) {
    fake *f = fake_new(16, 0);
    REQUIRE(f);
    wki_cu_ptr small[20], big;
    for (int i = 0; i < 20; i++)
        CODE(wki_cu_heap_alloc(f->heap, f->pool[0], MIB - 1, "small", &small[i], NULL));
    for (int i = 0; i < 20; i++)
        CODE(wki_cu_heap_free(f->heap, f->pool[i % STREAMS], small[i], NULL));
    CODE(wki_cu_heap_alloc(f->heap, f->pool[0], 32 * MIB, "big", &big, NULL));
    CHECK_EQ_I(f->n_release, 10);
    fake_free(f);
}

TEST(cuda_rt, heap_survives_host_failures) {
    int64_t live = wki_alloc_live();
    for (int fail = 1; fail < 40; fail++) {
        fake *f = fake_new(64, 0);
        REQUIRE(f);
        wki_cu_ptr p[300];
        wki_cu_error err;
        int n = 0, code = 0;
        wki_alloc_fail_once(fail);
        while (n < 300 && !(code = wki_cu_heap_alloc(f->heap, f->pool[0], 512, "x", &p[n], &err)))
            n++;
        wki_alloc_fail_once(0);
        CHECK(n == 300 || (code == WKI_CU_HOST_MEMORY && err.code == code));
        CODE(wki_cu_heap_alloc(f->heap, f->pool[0], 512, "x", &p[0], &err));
        wki_cu_memory_stats st;
        wki_cu_heap_stats(f->heap, &st);
        CHECK_EQ_I(st.live, n + 1);
        fake_free(f);
    }
    CHECK_EQ_I(wki_alloc_live(), live);
}

typedef struct worker {
    fake *f;
    size_t stream;
    uint64_t rng;
    pthread_t thread;
} worker;

static void *work(void *arg) {
    worker *w = arg;
    wki_cu_ptr p[32] = {0};
    for (int step = 0; step < 5000; step++) {
        w->rng = w->rng * 6364136223846793005u + 1442695040888963407u;
        size_t i = w->rng >> 59, bytes = w->rng >> 40 & 0x1fffff;
        CODE(wki_cu_heap_free(w->f->heap, w->f->pool[w->stream], p[i], NULL));
        CODE(wki_cu_heap_alloc(w->f->heap, w->f->pool[w->stream], bytes, "thread", &p[i], NULL));
    }
    for (int i = 0; i < 32; i++)
        CODE(wki_cu_heap_free(w->f->heap, w->f->pool[w->stream], p[i], NULL));
    return NULL;
}

TEST(cuda_rt, heap_from_threads) {
    fake *f = fake_new(MAX_PAGES, 0);
    REQUIRE(f);
    worker w[STREAMS];
    for (size_t s = 0; s < STREAMS; s++) {
        w[s] = (worker){.f = f, .stream = s, .rng = wkt_u64()};
        REQUIRE(pthread_create(&w[s].thread, NULL, work, &w[s]) == 0);
    }
    for (size_t s = 0; s < STREAMS; s++)
        pthread_join(w[s].thread, NULL);
    wki_cu_memory_stats st;
    wki_cu_heap_stats(f->heap, &st);
    CHECK_EQ_I(st.live, 0);
    CHECK_EQ_I(st.allocated, 0);
    fake_free(f);
}
