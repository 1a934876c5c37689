/* The thread pool. Each worker waits at a gate of its own, so a small job wakes only the threads that it uses; the
 * caller waits at one more gate, opened by the worker that finishes last. A gate spins for the gap between two
 * kernels and then sleeps. A worker must claim its part before it runs it, and so may the caller once it is done with
 * its own: a worker that is slow to wake, or has lost its CPU to another program, holds nobody up. Calls base/alloc,
 * base/cpu and POSIX threads. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/alloc.h"
#include "base/cpu.h"

#define SPIN_NS 30000 /* about what waking a sleeping thread costs */
#define MAX_THREADS 1024
#define LINE 64

/* A counter that one thread advances and one other waits on. */
typedef struct {
    char pad0[LINE];
    atomic_uint count;
    atomic_int asleep;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    char pad1[LINE];
} gate;

typedef struct {
    gate go;             /* counts the jobs that have a part for this worker */
    atomic_uint claimed; /* the last of those whose part somebody has taken */
    pthread_t thread;
    wki_pool *pool;
    int index;
} worker;

struct wki_pool {
    int size;
    /* 0 where threads outnumber CPUs: a spinning waiter would hold up the thread it waits for. */
    int64_t spin_ns;
    int stop;

    /* the job in flight; written by the thread that holds `busy`, before it opens the gates */
    void (*fn)(void *arg, int64_t begin, int64_t end, int worker);
    void *arg;
    int64_t n, grain;
    int parts;

    char pad0[LINE];
    atomic_flag busy;
    char pad1[LINE];
    atomic_int pending; /* parts other than the caller's that are not done */
    gate done;
    worker workers[]; /* size - 1; workers[i] runs part i + 1 */
};

static inline void relax(void) {
#if defined(__x86_64__)
    __asm__ volatile("pause");
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int gate_init(gate *g) {
    atomic_init(&g->count, 0);
    atomic_init(&g->asleep, 0);
    if (pthread_mutex_init(&g->lock, NULL))
        return 0;
    if (pthread_cond_init(&g->wake, NULL)) {
        pthread_mutex_destroy(&g->lock);
        return 0;
    }
    return 1;
}

static void gate_destroy(gate *g) {
    pthread_cond_destroy(&g->wake);
    pthread_mutex_destroy(&g->lock);
}

/* Here and in gate_wait `count` and `asleep` are sequentially consistent: either the opener sees the sleeper or the
 * sleeper sees the new count. */
static void gate_open(gate *g) {
    atomic_fetch_add(&g->count, 1);
    if (!atomic_load(&g->asleep))
        return;
    pthread_mutex_lock(&g->lock);
    pthread_cond_signal(&g->wake);
    pthread_mutex_unlock(&g->lock);
}

/* Returns the count once it is not `seen`. */
static unsigned gate_wait(gate *g, unsigned seen, int64_t spin_ns) {
    unsigned count = atomic_load(&g->count);
    if (count != seen)
        return count;
    if (spin_ns > 0) {
        int64_t until = now_ns() + spin_ns;
        do {
            for (int i = 0; i < 8; i++) {
                relax();
                count = atomic_load_explicit(&g->count, memory_order_acquire);
                if (count != seen)
                    return count;
            }
        } while (now_ns() < until);
    }
    pthread_mutex_lock(&g->lock);
    atomic_store(&g->asleep, 1);
    while ((count = atomic_load(&g->count)) == seen)
        pthread_cond_wait(&g->wake, &g->lock);
    atomic_store(&g->asleep, 0);
    pthread_mutex_unlock(&g->lock);
    return count;
}

/* True for one of those who ask for the part of job number `count`. Whoever gets it may read the job until it counts
 * the part as done. */
static int claim(worker *w, unsigned count) {
    unsigned before = count - 1;
    return atomic_compare_exchange_strong(&w->claimed, &before, count);
}

static void run_part(wki_pool *p, int part) {
    int64_t units = p->n / p->grain + (p->n % p->grain != 0);
    int64_t each = units / p->parts, extra = units % p->parts;
    int64_t first = part * each + (part < extra ? part : extra);
    int64_t last = first + each + (part < extra);
    p->fn(p->arg, first * p->grain, part == p->parts - 1 ? p->n : last * p->grain, part);
}

static void *worker_main(void *arg) {
    worker *w = arg;
    wki_pool *p = w->pool;
    for (unsigned seen = 0;;) {
        seen = gate_wait(&w->go, seen, p->spin_ns);
        if (!claim(w, seen))
            continue;
        if (p->stop)
            return NULL;
        run_part(p, w->index);
        if (atomic_fetch_sub(&p->pending, 1) == 1)
            gate_open(&p->done);
    }
}

static int pick_size(int nthreads) {
    const char *env = getenv("WICK_THREADS");
    if (nthreads <= 0 && env && *env) {
        char *end;
        long v = strtol(env, &end, 10);
        if (*end == '\0' && v >= 1)
            nthreads = v < MAX_THREADS ? (int)v : MAX_THREADS;
    }
    if (nthreads <= 0)
        nthreads = wki_cpu_count();
    return nthreads < MAX_THREADS ? nthreads : MAX_THREADS;
}

/* Signals stay with the program's own threads. */
static void start_workers(wki_pool *p, int want) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    for (int i = 0; i < want; i++) {
        worker *w = &p->workers[i];
        w->pool = p;
        w->index = i + 1;
        atomic_init(&w->claimed, 0);
        if (!gate_init(&w->go))
            break;
        if (pthread_create(&w->thread, NULL, worker_main, w)) {
            gate_destroy(&w->go);
            break;
        }
#if defined(__linux__)
        char name[16];
        snprintf(name, sizeof name, "wick-%d", w->index);
        pthread_setname_np(w->thread, name);
#endif
        p->size++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

wki_pool *wki_pool_new(int nthreads) {
    int want = pick_size(nthreads);
    wki_pool *p = wki_calloc(1, sizeof *p + (size_t)(want - 1) * sizeof p->workers[0]);
    if (!p)
        return NULL;
    if (!gate_init(&p->done)) {
        wki_free(p);
        return NULL;
    }
    p->size = 1;
    p->spin_ns = want <= wki_cpu_count() ? SPIN_NS : 0;
    atomic_flag_clear(&p->busy);
    atomic_init(&p->pending, 0);
    start_workers(p, want - 1);
    return p;
}

void wki_pool_free(wki_pool *p) {
    if (!p)
        return;
    p->stop = 1;
    for (int i = 0; i < p->size - 1; i++) {
        gate_open(&p->workers[i].go);
        pthread_join(p->workers[i].thread, NULL);
        gate_destroy(&p->workers[i].go);
    }
    gate_destroy(&p->done);
    wki_free(p);
}

int wki_pool_size(const wki_pool *p) { return p ? p->size : 1; }

static void run_job(wki_pool *p, void (*fn)(void *arg, int64_t begin, int64_t end, int worker), void *arg,
                    int64_t n, int64_t grain) {
    int64_t units = n / grain + (n % grain != 0);
    int parts = units < p->size ? (int)units : p->size;
    p->fn = fn;
    p->arg = arg;
    p->n = n;
    p->grain = grain;
    p->parts = parts;
    atomic_store_explicit(&p->pending, parts - 1, memory_order_relaxed);
    unsigned seen = atomic_load_explicit(&p->done.count, memory_order_relaxed);
    for (int i = 0; i < parts - 1; i++)
        gate_open(&p->workers[i].go);
    run_part(p, 0);
    int taken = 0;
    for (int i = parts - 2; i >= 0; i--) {
        worker *w = &p->workers[i];
        if (claim(w, atomic_load_explicit(&w->go.count, memory_order_relaxed))) {
            run_part(p, w->index);
            taken++;
        }
    }
    /* The gate opens exactly when a worker counts down to 0; having taken and counted the last parts, the caller
     * must not wait for that, nor may it leave an opening behind for the next job. */
    if (taken == 0 || atomic_fetch_sub(&p->pending, taken) > taken)
        gate_wait(&p->done, seen, p->spin_ns);
}

void wki_pool_for(wki_pool *p, int64_t n, void (*fn)(void *arg, int64_t begin, int64_t end, int worker),
                  void *arg, int64_t grain) {
    if (n <= 0)
        return;
    if (grain < 1)
        grain = 1;
    if (n <= grain || !p || p->size == 1 ||
        atomic_flag_test_and_set_explicit(&p->busy, memory_order_acquire)) {
        fn(arg, 0, n, 0);
        return;
    }
    run_job(p, fn, arg, n, grain);
    atomic_flag_clear_explicit(&p->busy, memory_order_release);
}
