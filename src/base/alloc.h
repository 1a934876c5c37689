/* The library's only door to the heap: the C allocator with a count of calls and, for tests, a call chosen to
 * fail. May call the C library alone. Thread-safe. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* As malloc and friends, except that a size of 0 gives a block too, so NULL always means failure.
 * wki_realloc(p, 0) shrinks and never frees; when it fails, p is as before. */
void *wki_malloc(size_t n);
void *wki_calloc(size_t count, size_t size);
void *wki_realloc(void *p, size_t n);

/* n bytes at a multiple of align, a power of two; wki_free releases it, wki_realloc must not be given it. */
void *wki_aligned(size_t align, size_t n);
void wki_free(void *p);

/* Counted from 1, the n-th allocation from now on fails and so do all after it; n <= 0 ends the failing. The
 * `once` form fails that one alone. A wki_realloc is an allocation. */
void wki_alloc_fail_after(int64_t n);
void wki_alloc_fail_once(int64_t n);

/* Allocations asked for since the program began, failed ones included. */
int64_t wki_alloc_count(void);

/* Blocks held now. Exact when no other thread is inside these functions. */
int64_t wki_alloc_live(void);
