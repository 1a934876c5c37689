/* The caching allocator apart from CUDA: which address serves which request. It sees streams as pools and the
 * device through wki_cu_heap_source, so that tests run it on made-up addresses. Calls base and cu_error. */
#pragma once
#include "backend/cuda/cu.h"

typedef struct wki_cu_heap wki_cu_heap;
typedef struct wki_cu_pool wki_cu_pool; /* the cached blocks last used on one stream */

/* The device. `stream` is what the pool was opened with. Called with the heap's lock held; the calls that take
 * a stream are never made for a frozen pool. */
typedef struct wki_cu_heap_source {
    void *self;
    /* WKI_CU_DEVICE_MEMORY means full, and may be followed by other attempts. */
    int (*grow)(void *self, size_t bytes, wki_cu_ptr *out, wki_cu_error *err);
    void (*release)(void *self, wki_cu_ptr p);
    bool (*idle)(void *self, void *stream);                                 /* nothing is queued */
    int (*after)(void *self, void *stream, void *other, wki_cu_error *err); /* as wki_cu_stream_wait */
    int (*settle)(void *self, void *stream, wki_cu_error *err);             /* as wki_cu_stream_sync */
    void (*room)(void *self, size_t *free, size_t *total);                  /* bytes on the device */
} wki_cu_heap_source;

int wki_cu_heap_create(const wki_cu_heap_source *source, size_t limit, wki_cu_heap **out, wki_cu_error *err);
void wki_cu_heap_destroy(wki_cu_heap *h); /* releases live blocks too */

int wki_cu_pool_open(wki_cu_heap *h, void *stream, wki_cu_pool **out, wki_cu_error *err);
/* The stream is idle and going away: its blocks become anybody's. */
void wki_cu_pool_close(wki_cu_heap *h, wki_cu_pool *pool);
/* While the stream is captured: its blocks stay where they are and it gets no new ones. */
void wki_cu_pool_freeze(wki_cu_heap *h, wki_cu_pool *pool, bool frozen);

int wki_cu_heap_alloc(wki_cu_heap *h, wki_cu_pool *pool, size_t bytes, const char *tag, wki_cu_ptr *out,
                      wki_cu_error *err);
int wki_cu_heap_free(wki_cu_heap *h, wki_cu_pool *pool, wki_cu_ptr p, wki_cu_error *err);
int wki_cu_heap_trim(wki_cu_heap *h, wki_cu_error *err);
void wki_cu_heap_stats(wki_cu_heap *h, wki_cu_memory_stats *out);
