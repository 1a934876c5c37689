/* Allocation with counters and fault injection. The counters are of the whole process:
 * they are what tests compare before and after, so they cannot belong to a context. May call the C library.
 */
#include "base/alloc.h"

#include <stdatomic.h>
#include <stdlib.h>

/* A cache line each: threads that free do not slow threads that allocate, and the fault window, read on every
 * allocation, is not invalidated by either. */
static _Alignas(64) _Atomic int64_t asked;
static _Alignas(64) _Atomic int64_t released;
static _Alignas(64) struct {
    _Atomic int64_t first, last; /* tickets first..last fail; none when first is 0 */
    _Atomic int64_t failed;
} fault;

/* Takes the ticket of one allocation, the first being 1; false when it is to fail. */
static inline int take_ticket(void) {
    int64_t ticket = atomic_fetch_add_explicit(&asked, 1, memory_order_relaxed) + 1;
    int64_t first = atomic_load_explicit(&fault.first, memory_order_relaxed);
    return __builtin_expect(first == 0, 1) || ticket < first ||
           ticket > atomic_load_explicit(&fault.last, memory_order_relaxed);
}

static inline void *checked(void *p) {
    if (__builtin_expect(!p, 0))
        atomic_fetch_add_explicit(&fault.failed, 1, memory_order_relaxed);
    return p;
}

void *wki_malloc(size_t n) {
    if (!take_ticket() || n > PTRDIFF_MAX)
        return checked(NULL);
    return checked(malloc(n ? n : 1));
}

void *wki_calloc(size_t count, size_t size) {
    size_t n;
    if (!take_ticket() || __builtin_mul_overflow(count, size, &n) || n > PTRDIFF_MAX)
        return checked(NULL);
    return checked(calloc(1, n ? n : 1));
}

void *wki_realloc(void *p, size_t n) {
    if (!take_ticket() || n > PTRDIFF_MAX)
        return checked(NULL);
    void *q = checked(realloc(p, n ? n : 1));
    if (q && p) /* the old block is gone, the new one was counted by its ticket */
        atomic_fetch_add_explicit(&released, 1, memory_order_relaxed);
    return q;
}

void *wki_aligned(size_t align, size_t n) {
    void *p = NULL;
    if (align < sizeof(void *))
        align = sizeof(void *);
    if (!take_ticket() || n > PTRDIFF_MAX || posix_memalign(&p, align, n ? n : 1))
        return checked(NULL);
    return p;
}

void wki_free(void *p) {
    if (!p)
        return;
    atomic_fetch_add_explicit(&released, 1, memory_order_relaxed);
    free(p);
}

static void set_window(int64_t n, int once) {
    atomic_store_explicit(&fault.first, 0, memory_order_relaxed);
    if (n <= 0)
        return;
    int64_t first = atomic_load_explicit(&asked, memory_order_relaxed) + n;
    atomic_store_explicit(&fault.last, once ? first : INT64_MAX, memory_order_relaxed);
    atomic_store_explicit(&fault.first, first, memory_order_relaxed);
}

void wki_alloc_fail_after(int64_t n) { set_window(n, 0); }

void wki_alloc_fail_once(int64_t n) { set_window(n, 1); }

int64_t wki_alloc_count(void) { return atomic_load_explicit(&asked, memory_order_relaxed); }

int64_t wki_alloc_live(void) {
    return atomic_load_explicit(&asked, memory_order_relaxed) -
           atomic_load_explicit(&fault.failed, memory_order_relaxed) -
           atomic_load_explicit(&released, memory_order_relaxed);
}
