/* Tests of src/base/alloc: blocks, counts, faults on the chosen allocation, threads. */
#include "base/alloc.h"
#include "harness.h"

#include <pthread.h>
#include <string.h>

TEST(alloc, blocks_hold_what_was_written) {
    int64_t live = wki_alloc_live();
    for (int i = 0; i < 200; i++) {
        size_t n = wkt_below(5000), m = wkt_below(5000);
        unsigned char *p = wki_malloc(n);
        REQUIRE(p);
        memset(p, 0xa5, n);
        unsigned char *q = wki_realloc(p, m);
        REQUIRE(q);
        for (size_t k = 0; k < n && k < m; k++)
            REQUIRE(q[k] == 0xa5);
        wki_free(q);
    }
    CHECK_EQ_I(wki_alloc_live(), live);
}

TEST(alloc, calloc_is_zero) {
    size_t n = 1 + wkt_below(3000);
    unsigned char *p = wki_calloc(n, 3);
    REQUIRE(p);
    for (size_t i = 0; i < 3 * n; i++)
        CHECK_EQ_I(p[i], 0);
    wki_free(p);
}

TEST(alloc, aligned_is_aligned) {
    for (size_t align = 1; align <= 1 << 16; align *= 2) {
        char *p = wki_aligned(align, 1 + wkt_below(300));
        REQUIRE(p);
        CHECK_EQ_I((uintptr_t)p % align, 0);
        wki_free(p);
    }
}

TEST(alloc, size_zero_is_a_block) {
    int64_t live = wki_alloc_live();
    void *p[4] = {wki_malloc(0), wki_calloc(0, 8), wki_realloc(NULL, 0), wki_aligned(64, 0)};
    CHECK_EQ_I(wki_alloc_live(), live + 4);
    for (int i = 0; i < 4; i++) {
        CHECK(p[i]);
        wki_free(p[i]);
    }
    wki_free(NULL);
    CHECK_EQ_I(wki_alloc_live(), live);
}

TEST(alloc, impossible_sizes_are_null) {
    int64_t live = wki_alloc_live();
    void *p = wki_malloc(8);
    REQUIRE(p);
    CHECK(!wki_malloc(SIZE_MAX));
    CHECK(!wki_calloc(SIZE_MAX / 2, 3));
    CHECK(!wki_calloc(SIZE_MAX, 1));
    CHECK(!wki_aligned(64, SIZE_MAX));
    CHECK(!wki_realloc(p, SIZE_MAX));
    CHECK_EQ_I(wki_alloc_live(), live + 1);
    wki_free(p);
    CHECK_EQ_I(wki_alloc_live(), live);
}

/* Makes one allocation by the i-th of the four doors. */
static void *allocate(int i) {
    switch (i % 4) {
    case 0:
        return wki_malloc(16);
    case 1:
        return wki_calloc(4, 4);
    case 2:
        return wki_realloc(NULL, 16);
    default:
        return wki_aligned(32, 16);
    }
}

TEST(alloc, nth_fails) {
    for (int once = 0; once < 2; once++) {
        for (int n = 1; n <= 12; n++) {
            int64_t live = wki_alloc_live(), count = wki_alloc_count();
            int first_door = (int)wkt_below(4);
            if (once)
                wki_alloc_fail_once(n);
            else
                wki_alloc_fail_after(n);
            for (int i = 1; i <= 16; i++) {
                void *p = allocate(first_door + i);
                bool expected = once ? i != n : i < n;
                CHECK_EQ_I(p != NULL, expected);
                wki_free(p);
            }
            wki_alloc_fail_after(0);
            void *p = wki_malloc(1);
            CHECK(p);
            wki_free(p);
            CHECK_EQ_I(wki_alloc_count(), count + 17);
            CHECK_EQ_I(wki_alloc_live(), live);
        }
    }
}

TEST(alloc, failed_realloc_keeps_the_block) {
    int64_t live = wki_alloc_live();
    char *p = wki_malloc(16);
    REQUIRE(p);
    strcpy(p, "still here");
    wki_alloc_fail_once(1);
    CHECK(!wki_realloc(p, 4096));
    CHECK_STR(p, "still here");
    CHECK_EQ_I(wki_alloc_live(), live + 1);
    wki_free(p);
    CHECK_EQ_I(wki_alloc_live(), live);
}

enum { THREADS = 4, ROUNDS = 5000 };

static void *churn(void *arg) {
    void *held[8] = {0};
    for (int i = 0; i < ROUNDS; i++) {
        wki_free(held[i % 8]);
        held[i % 8] = allocate(i);
    }
    for (int i = 0; i < 8; i++)
        wki_free(held[i]);
    return arg;
}

TEST(alloc, counts_from_many_threads) {
    int64_t live = wki_alloc_live(), count = wki_alloc_count();
    pthread_t t[THREADS];
    for (int i = 0; i < THREADS; i++)
        REQUIRE(pthread_create(&t[i], NULL, churn, NULL) == 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(t[i], NULL);
    CHECK_EQ_I(wki_alloc_live(), live);
    CHECK_EQ_I(wki_alloc_count(), count + THREADS * ROUNDS);
}
