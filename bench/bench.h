/* The benches behind `wick bench`. A bench measures its cases and hands each figure over. On the public API alone. */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include <wick.h>

typedef struct bench_run bench_run; /* the command's side */

typedef struct bench {
    const char *name, *doc;
    void (*run)(bench_run *r);
    const char *const *cases; /* NULL at the end */
    bool on_device;           /* the command's --device says where it runs */
} bench;
extern const bench bench_overhead, bench_compile, bench_train, bench_demo;

/* Is the case asked for? A bench may skip the work of one that is not. */
bool bench_wants(const bench_run *r, const char *name);
wk_device bench_device(const bench_run *r);     /* the command's --device */
const char *bench_data_dir(const bench_run *r); /* the command's --data-dir; NULL: the usual place */
/* One figure; NAN: it could not be measured, for the reason given by bench_fail. */
void bench_figure(bench_run *r, const char *name, double value, const char *unit);
/* A case that could not be measured, and why. The command then ends with a failure. */
void bench_fail(bench_run *r, const char *name, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Monotonic, seconds. */
double bench_now(void);
/* Seconds a call of fn takes: the median of 101 runs, each of as many calls as fill 2 ms. */
double bench_time(void (*fn)(void *arg, int64_t calls), void *arg);
double bench_median(double *v, int n); /* sorts v */

/* The context of a case, checked: when it failed, the case is reported so and false returned. */
bool bench_ok(bench_run *r, const char *name, wk_ctx *c);

/* A published figure to compare with; NULL where there is none. */
typedef struct bench_peer {
    const char *bench, *name, *peer, *unit;
    double value;
} bench_peer;
const bench_peer *bench_peer_of(const char *group, const char *name);
