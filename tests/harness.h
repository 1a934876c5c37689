/* The test harness. A test file includes this, writes TEST(group, name) { ... } and is picked up by the
 * build; the program's main lives in harness.c. May call the C library and POSIX alone, so it serves both the
 * tests of internals and the tests that see only the public header. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct wkt_test {
    const char *group, *name, *file;
    int line;
    void (*run)(void);
    struct wkt_test *next;
} wkt_test;

/* Defines and registers the test "group.name". It fails when a check in it fails, and when it crashes, exits
 * or runs past its time. */
#define TEST(group_, name_)                                                                                  \
    static void wkt_run_##group_##_##name_(void);                                                            \
    __attribute__((constructor)) static void wkt_add_##group_##_##name_(void) {                              \
        static wkt_test t = {#group_, #name_, __FILE__, __LINE__, wkt_run_##group_##_##name_, NULL};         \
        wkt_register(&t);                                                                                    \
    }                                                                                                        \
    static void wkt_run_##group_##_##name_(void)

/* Checks record a failure with file, line and values, and let the test go on. Each is an expression that is
 * true when the check held. They may be used from any thread. */
#define CHECK(cond) wkt_check(!!(cond), __FILE__, __LINE__, "CHECK(" #cond ")")
#define CHECK_EQ_I(a, b)                                                                                     \
    wkt_check_i((int64_t)(a), (int64_t)(b), __FILE__, __LINE__, "CHECK_EQ_I(" #a ", " #b ")")
/* |a - b| <= tol, or a == b (infinities); a NaN on either side fails. */
#define CHECK_NEAR(a, b, tol)                                                                                \
    wkt_check_near((double)(a), (double)(b), (double)(tol), __FILE__, __LINE__, "CHECK_NEAR(" #a ", " #b ")")
#define CHECK_STR(a, b) wkt_check_str((a), (b), __FILE__, __LINE__, "CHECK_STR(" #a ", " #b ")")
/* n bytes equal. */
#define CHECK_MEM(a, b, n) wkt_check_mem((a), (b), (n), __FILE__, __LINE__, "CHECK_MEM(" #a ", " #b ")")
/* n floats with |a[i] - b[i]| <= atol + rtol * |b[i]|, or both NaN, or equal; reports the worst. */
#define CHECK_NEAR_F32(a, b, n, atol, rtol)                                                                  \
    wkt_check_near_f32((a), (b), (n), (atol), (rtol), __FILE__, __LINE__, "CHECK_NEAR_F32(" #a ", " #b ")")

/* As CHECK, and returns from the function it stands in when it fails; that function returns void. */
#define REQUIRE(cond)                                                                                        \
    do {                                                                                                     \
        bool wkt_held = !!(cond);                                                                            \
        wkt_check(wkt_held, __FILE__, __LINE__, "REQUIRE(" #cond ")");                                       \
        if (!wkt_held)                                                                                       \
            return;                                                                                          \
    } while (0)

/* Ends the function as skipped, for a printf-style reason. With WICK_REQUIRE_CUDA set a skip is a failure. */
#define SKIP(...)                                                                                            \
    do {                                                                                                     \
        wkt_skip(__FILE__, __LINE__, __VA_ARGS__);                                                           \
        return;                                                                                              \
    } while (0)

/* A failure in words, printf-style, where no macro above says it well. */
#define FAIL(...) wkt_fail(__FILE__, __LINE__, __VA_ARGS__)

void wkt_register(wkt_test *t);
bool wkt_check(bool ok, const char *file, int line, const char *text);
bool wkt_check_i(int64_t a, int64_t b, const char *file, int line, const char *text);
bool wkt_check_near(double a, double b, double tol, const char *file, int line, const char *text);
bool wkt_check_str(const char *a, const char *b, const char *file, int line, const char *text);
bool wkt_check_mem(const void *a, const void *b, size_t n, const char *file, int line, const char *text);
bool wkt_check_near_f32(const float *a, const float *b, size_t n, double atol, double rtol, const char *file,
                        int line, const char *text);
void wkt_skip(const char *file, int line, const char *format, ...) __attribute__((format(printf, 3, 4)));
void wkt_fail(const char *file, int line, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Random inputs, fresh in every run and reseeded for every test from the run's seed and the test's name, so a
 * failure repeats under WICK_TEST_SEED alone or with the others. Call them from the test's own thread. */
uint64_t wkt_seed(void);
uint64_t wkt_u64(void);
uint64_t wkt_below(uint64_t n);            /* 0 .. n-1; n is at least 1 */
int64_t wkt_range(int64_t lo, int64_t hi); /* lo .. hi, both included */
double wkt_uniform(double lo, double hi);  /* lo <= x < hi */
double wkt_normal(void);                   /* mean 0, variance 1 */
void wkt_fill_uniform(float *p, size_t n, double lo, double hi);
void wkt_fill_normal(float *p, size_t n, double scale);

/* True under --quick (sanitizer and CI subsets): tests with a size to choose take a small one. */
bool wkt_quick(void);

/* The tests' directory, where their data lies; WICK_TEST_DIR overrides it where the tree has moved. */
const char *wkt_dir(void);

/* Monotonic time in seconds. */
double wkt_now(void);
