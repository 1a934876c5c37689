/* Clocks and medians. C library only. */
#include <stdlib.h>
#include <time.h>

#include "bench.h"

double bench_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_median(double *v, int n) {
    qsort(v, (size_t)n, sizeof *v, by_value);
    return n % 2 ? v[n / 2] : 0.5 * (v[n / 2 - 1] + v[n / 2]);
}

double bench_time(void (*fn)(void *arg, int64_t calls), void *arg) {
    enum { RUNS = 101 };
    const double fill = 0.002; /* shorter than a scheduler's slice, so that most runs are undisturbed */
    double v[RUNS], took = 0;
    int64_t calls = 1;
    for (;;) { /* doubles as the warm-up */
        double start = bench_now();
        fn(arg, calls);
        took = bench_now() - start;
        if (took >= fill || calls > INT64_MAX / 4)
            break;
        calls = took > fill / 100 ? (int64_t)((double)calls * fill * 1.2 / took) + 1 : calls * 10;
    }
    for (int i = 0; i < RUNS; i++) {
        double start = bench_now();
        fn(arg, calls);
        v[i] = (bench_now() - start) / (double)calls;
    }
    return bench_median(v, RUNS);
}
