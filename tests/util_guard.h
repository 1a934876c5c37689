/* Buffers that end at a page which cannot be touched, so that a read or write past the end crashes the test.
 */
#pragma once
#include <stddef.h>

/* n bytes whose last one is the last before the forbidden page; NULL when memory is short. The start is as
 * aligned as n allows. */
void *wkt_guarded(size_t n);

/* Releases what wkt_guarded(n) gave; n must be the same. */
void wkt_guarded_free(void *p, size_t n);
