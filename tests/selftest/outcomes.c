/* Tests with known outcomes, for check_harness.sh: the harness is trusted only as far as it reports these. */
#include "harness.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

TEST(good, passes) {
    float a[3] = {1, NAN, INFINITY}, b[3] = {1, NAN, INFINITY};
    CHECK(1);
    CHECK_EQ_I(-1, -1);
    CHECK_NEAR(INFINITY, INFINITY, 0);
    CHECK_NEAR(1.0, 1.25, 0.25);
    CHECK_STR("a", "a");
    CHECK_MEM("abc", "abc", 4);
    CHECK_NEAR_F32(a, b, 3, 0, 0);
    REQUIRE(1);
}

TEST(good, random_stays_in_range) {
    for (int i = 0; i < 10000; i++) {
        uint64_t below = wkt_below(7);
        int64_t range = wkt_range(-3, 3);
        double u = wkt_uniform(-2, 5);
        CHECK(below < 7);
        CHECK(range >= -3 && range <= 3);
        CHECK(u >= -2 && u < 5);
        CHECK(isfinite(wkt_normal()));
    }
    CHECK(wkt_range(INT64_MIN, INT64_MAX) != wkt_range(INT64_MIN, INT64_MAX));
}

TEST(seeded, shows_its_number) { FAIL("number %llu", (unsigned long long)wkt_u64()); }

TEST(bad, check) { CHECK(1 + 1 == 3); }
TEST(bad, check_eq_i) { CHECK_EQ_I(40 + 1, 42); }
TEST(bad, check_near) { CHECK_NEAR(1.0, 1.5, 0.25); }
TEST(bad, check_near_nan) { CHECK_NEAR(NAN, NAN, 1); }
TEST(bad, check_str) { CHECK_STR("left", NULL); }
TEST(bad, check_mem) { CHECK_MEM("abcd", "abxd", 4); }
TEST(bad, check_near_f32) {
    float a[3] = {1, 2, 3}, b[3] = {1, 2.5f, NAN};
    CHECK_NEAR_F32(a, b, 3, 0.125, 0);
}
TEST(bad, require) {
    REQUIRE(0);
    FAIL("REQUIRE did not return");
}
TEST(bad, many) {
    for (int i = 0; i < 100; i++)
        CHECK_EQ_I(i, -1);
}

TEST(skips, skip) { SKIP("no %s here", "device"); }

TEST(dies, segv) {
    CHECK(1);
    raise(SIGSEGV);
}
TEST(dies, aborts) { abort(); }
TEST(dies, exits) { exit(0); }
TEST(dies, hangs) {
    for (;;)
        pause();
}
/* Side by side, the lines of these would mix. */
static void print_slowly(const char *who) {
    for (int i = 0; i < 3; i++) {
        printf("%s %d\n", who, i);
        fflush(stdout);
        fprintf(stderr, "%s %d, aside\n", who, i);
        usleep(100000);
    }
}
TEST(prints, slow) {
    usleep(300000);
    print_slowly("slow");
}
TEST(prints, one) { print_slowly("one"); }
TEST(prints, two) { print_slowly("two"); }
TEST(prints, three) { print_slowly("three"); }

TEST(last, still_runs) { CHECK(1); }
