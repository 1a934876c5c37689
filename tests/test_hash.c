/* Tests of src/base/hash: fixed values, reach of every byte and of the seed, avalanche, collisions, bounds.
 */
#include "base/hash.h"
#include "harness.h"
#include "util_guard.h"

#include <stdlib.h>
#include <string.h>

static void fill(unsigned char *p, size_t n) {
    for (size_t i = 0; i < n; i++)
        p[i] = (unsigned char)wkt_u64();
}

/* Names on disk are made of these values: a change here is a change of format. */
TEST(hash, values_are_fixed) {
    unsigned char p[200];
    for (int i = 0; i < 200; i++)
        p[i] = (unsigned char)(i * 7 + 1);
    CHECK_EQ_I(wki_hash(NULL, 0, 0), 0xaafbe2169e686282);
    CHECK_EQ_I(wki_hash(p, 7, 1), 0x0d44719b274fef94);
    CHECK_EQ_I(wki_hash(p, 16, 2), 0x3128a6b6a0ea4b7c);
    CHECK_EQ_I(wki_hash(p, 33, 3), 0xcc5fecfaf0fe9589);
    CHECK_EQ_I(wki_hash(p, 200, 4), 0x65975e036f3b61e5);
}

TEST(hash, address_does_not_matter) {
    unsigned char data[300], copy[300 + 16];
    fill(data, sizeof data);
    for (int i = 0; i < 500; i++) {
        size_t n = wkt_below(sizeof data), shift = wkt_below(16);
        uint64_t seed = wkt_u64();
        memcpy(copy + shift, data, n);
        CHECK_EQ_I(wki_hash(copy + shift, n, seed), wki_hash(data, n, seed));
    }
}

TEST(hash, reads_only_its_bytes) {
    for (size_t n = 1; n <= 200; n++) {
        unsigned char *p = wkt_guarded(n), copy[200];
        REQUIRE(p);
        fill(p, n);
        memcpy(copy, p, n);
        CHECK_EQ_I(wki_hash(p, n, n), wki_hash(copy, n, n));
        wkt_guarded_free(p, n);
    }
}

/* Flipping one input bit flips each output bit in half of the cases: over TRIALS random inputs the count for
 * one pair is binomial with deviation sqrt(TRIALS)/2, and 7 deviations are not met by chance in all the pairs
 * here. */
TEST(hash, avalanche) {
    enum { TRIALS = 1024, MOST = 150 };
    static const size_t lengths[] = {1, 3, 8, 13, 16, 17, 40, 64, 65, 130, 150};
    const int slack = 7 * 16; /* sqrt(1024) / 2 = 16 */
    unsigned char p[MOST];
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
        size_t n = lengths[l];
        for (int b = 0; b < 6; b++) {
            size_t bit = wkt_below(8 * n);
            int flips[64] = {0};
            for (int t = 0; t < TRIALS; t++) {
                fill(p, n);
                uint64_t seed = wkt_u64(), before = wki_hash(p, n, seed);
                p[bit / 8] ^= (unsigned char)(1u << bit % 8);
                uint64_t change = before ^ wki_hash(p, n, seed);
                for (int k = 0; k < 64; k++)
                    flips[k] += change >> k & 1;
            }
            for (int k = 0; k < 64; k++)
                CHECK_NEAR(flips[k], 0.5 * TRIALS, slack);
        }
    }
}

static int compare_u64(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* The number of equal pairs among n values, which it sorts. */
static size_t collisions(uint64_t *v, size_t n) {
    size_t found = 0;
    qsort(v, n, sizeof *v, compare_u64);
    for (size_t i = 1; i < n; i++)
        found += v[i] == v[i - 1];
    return found;
}

/* Inputs that differ little, as keys do: two bits set in a block of zeros, all lengths of zeros, counters,
 * seeds. Of fewer than 2^18 values, two are equal by chance once in 2^29. */
TEST(hash, similar_inputs_do_not_collide) {
    enum { BITS = 8 * 72, MOST = BITS * (BITS + 1) / 2 + 4096 + 30000 };
    uint64_t *v = malloc(MOST * sizeof *v);
    REQUIRE(v);
    size_t n = 0;
    unsigned char block[72] = {0};
    for (int i = 0; i < BITS; i++) {
        for (int j = 0; j <= i; j++) {
            block[i / 8] ^= (unsigned char)(1u << i % 8);
            if (j != i)
                block[j / 8] ^= (unsigned char)(1u << j % 8);
            v[n++] = wki_hash(block, sizeof block, 0);
            memset(block, 0, sizeof block);
        }
    }
    static const unsigned char zeros[4096];
    for (size_t i = 0; i < sizeof zeros; i++)
        v[n++] = wki_hash(zeros, i, 0);
    for (uint64_t i = 0; i < 10000; i++) {
        uint64_t key[2] = {i, 0};
        v[n++] = wki_hash(&i, sizeof i, 1);
        v[n++] = wki_hash(key, sizeof key, 1);
        v[n++] = wki_hash(zeros, 80, i + 1);
    }
    CHECK_EQ_I(n, MOST);
    CHECK_EQ_I(collisions(v, n), 0);
    free(v);
}

/* Rows of the same 8-byte words in other orders are other inputs: a lane must not be blind to position. */
TEST(hash, order_of_words_matters) {
    for (int t = 0; t < 2000; t++) {
        uint64_t words[24], swapped[24];
        size_t n = 2 + wkt_below(23), i = wkt_below(n), j = wkt_below(n);
        for (size_t k = 0; k < n; k++)
            words[k] = wkt_u64();
        memcpy(swapped, words, sizeof swapped);
        swapped[i] = words[j];
        swapped[j] = words[i];
        CHECK((wki_hash(words, 8 * n, 0) == wki_hash(swapped, 8 * n, 0)) == (i == j));
    }
}
