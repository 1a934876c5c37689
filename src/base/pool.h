/* A fork-join thread pool: one parallel-for, static partition, no queue. Built on base/alloc and base/cpu. */
#pragma once

#include <stdint.h>

typedef struct wki_pool wki_pool;

/* A pool of `nthreads` threads, the caller of wki_pool_for counted as one of them. 0 means WICK_THREADS from the
 * environment if that is a number from 1 up, else wki_cpu_count(). Where the system refuses a thread the pool is
 * smaller: ask wki_pool_size. NULL if memory ran out. */
wki_pool *wki_pool_new(int nthreads);

/* Joins the threads. No wki_pool_for may be running. NULL is allowed. */
void wki_pool_free(wki_pool *p);

/* Number of threads; 1 for NULL. */
int wki_pool_size(const wki_pool *p);

/* Runs fn over [0, n) and returns when all of it is done. The range is cut into at most wki_pool_size(p) equal parts
 * whose inner borders are multiples of `grain` (below 1 counts as 1); part i runs as worker i, the caller being
 * worker 0, so `worker` indexes scratch that belongs to this call. What fn computes for an index must not depend on
 * the cut: the whole range runs inline as worker 0 when n <= grain, the pool has one thread or is NULL, or the pool
 * is busy, as it is when fn itself calls or another thread got there first. Thread-safe. */
void wki_pool_for(wki_pool *p, int64_t n, void (*fn)(void *arg, int64_t begin, int64_t end, int worker),
                  void *arg, int64_t grain);
