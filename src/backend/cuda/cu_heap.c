/* The caching allocator (cu_heap.h). Memory comes from the device in segments that are cut into blocks. Blocks
 * under 1 MiB are multiples of 512 bytes in segments of 2 MiB; larger ones are multiples of 2 MiB in segments of
 * their own, or of 32 MiB shared by those up to 16 MiB. A free block belongs to the pool of the stream that used
 * it last and lies in one of the pool's bins, eight to each power of two, so that the best fit is the smallest
 * block of the first bin that has one large enough. Neighbours in one pool are merged when freed. Calls base,
 * cu_error and the heap's source. */
#include "backend/cuda/cu_heap.h"

#include "backend/cuda/cu_error.h"
#include "base/alloc.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define SMALL_GRANULE ((size_t)512)
#define SMALL_LIMIT ((size_t)1 << 20)
#define SMALL_SEGMENT ((size_t)2 << 20)
#define LARGE_GRANULE ((size_t)2 << 20)
#define SHARED_LIMIT ((size_t)16 << 20)
#define SHARED_SEGMENT ((size_t)32 << 20)
#define BINS 192 /* covers 2^26 granules: 128 TiB in large blocks */
#define NODES_AT_ONCE 128

typedef struct segment segment;
typedef struct block block;

struct block {
    wki_cu_ptr at;
    size_t size, requested;
    segment *seg;
    block *left, *right;  /* neighbours by address in the segment */
    block *above, *below; /* neighbours in a bin, while free; below also links unused nodes */
    wki_cu_pool *pool;    /* whose stream used it last, or uses it now */
    const char *tag;
    bool live;
};

struct segment {
    segment *next;
    block *first;
    size_t size;
    bool small;
};

typedef struct bins {
    block *head[BINS];
    uint64_t used[BINS / 64];
} bins;

struct wki_cu_pool {
    bins small, large;
    void *stream; /* NULL for the pool of blocks that no queued work uses */
    bool frozen;
    wki_cu_pool *next;
};

typedef struct node_slab {
    struct node_slab *next;
    block nodes[NODES_AT_ONCE];
} node_slab;

struct wki_cu_heap {
    pthread_mutex_t lock;
    wki_cu_heap_source source;
    size_t limit;
    wki_cu_pool *idle, *pools; /* idle is also the last of pools */
    segment *segments;
    block *spare;
    size_t n_spare;
    node_slab *slabs;
    block **live; /* open addressing by address, at most half full */
    size_t live_cap;
    wki_cu_memory_stats stats;
};

/* ---- Bins ------------------------------------------------------------------------------------------------ */

static size_t granule_of(const segment *seg) { return seg->small ? SMALL_GRANULE : LARGE_GRANULE; }

/* Sizes below 8 granules have a bin each; above, eight bins share each power of two. */
static size_t bin_of(size_t size, size_t granule) {
    size_t units = size / granule;
    if (units < 8)
        return units;
    size_t log = 63 - (size_t)__builtin_clzll(units);
    size_t bin = (log - 2) * 8 + ((units >> (log - 3)) & 7);
    return bin < BINS ? bin : BINS - 1;
}

static bins *bins_of(wki_cu_pool *pool, bool small) { return small ? &pool->small : &pool->large; }

static void bin_insert(block *b, wki_cu_pool *pool) {
    bins *set = bins_of(pool, b->seg->small);
    size_t i = bin_of(b->size, granule_of(b->seg));
    b->pool = pool;
    b->above = NULL;
    b->below = set->head[i];
    if (b->below)
        b->below->above = b;
    set->head[i] = b;
    set->used[i / 64] |= (uint64_t)1 << i % 64;
}

static void bin_remove(block *b) {
    bins *set = bins_of(b->pool, b->seg->small);
    size_t i = bin_of(b->size, granule_of(b->seg));
    if (b->below)
        b->below->above = b->above;
    if (b->above)
        b->above->below = b->below;
    else if (!(set->head[i] = b->below))
        set->used[i / 64] &= ~((uint64_t)1 << i % 64);
}

/* The smallest block of the bin that holds size, the lowest address among equals. */
static block *best_in_bin(block *head, size_t size) {
    block *best = NULL;
    for (block *b = head; b; b = b->below)
        if (b->size >= size && (!best || b->size < best->size || (b->size == best->size && b->at < best->at)))
            best = b;
    return best;
}

static block *best_fit(wki_cu_pool *pool, size_t size, bool small) {
    bins *set = bins_of(pool, small);
    size_t i = bin_of(size, small ? SMALL_GRANULE : LARGE_GRANULE);
    for (size_t word = i / 64; word < BINS / 64; word++) {
        uint64_t used = set->used[word];
        if (word == i / 64)
            used &= ~(uint64_t)0 << i % 64;
        for (; used; used &= used - 1) {
            block *b = best_in_bin(set->head[word * 64 + (size_t)__builtin_ctzll(used)], size);
            if (b)
                return b;
        }
    }
    return NULL;
}

/* ---- Bookkeeping memory ---------------------------------------------------------------------------------- */

static bool reserve_nodes(wki_cu_heap *h, size_t n) {
    if (h->n_spare >= n)
        return true;
    node_slab *slab = wki_malloc(sizeof *slab);
    if (!slab)
        return false;
    slab->next = h->slabs;
    h->slabs = slab;
    for (size_t i = 0; i < NODES_AT_ONCE; i++) {
        slab->nodes[i].below = h->spare;
        h->spare = &slab->nodes[i];
    }
    h->n_spare += NODES_AT_ONCE;
    return true;
}

static block *take_node(wki_cu_heap *h) {
    block *b = h->spare;
    h->spare = b->below;
    h->n_spare--;
    memset(b, 0, sizeof *b);
    return b;
}

static void drop_node(wki_cu_heap *h, block *b) {
    b->below = h->spare;
    h->spare = b;
    h->n_spare++;
}

/* Addresses are multiples of 512; the multiplier is 2^64 over the golden ratio (Knuth 6.4). */
static size_t live_home(const wki_cu_heap *h, wki_cu_ptr at) {
    return (size_t)((at >> 9) * 0x9e3779b97f4a7c15u >> 20) & (h->live_cap - 1);
}

static void live_insert(wki_cu_heap *h, block *b) {
    size_t i = live_home(h, b->at);
    while (h->live[i])
        i = (i + 1) & (h->live_cap - 1);
    h->live[i] = b;
}

static bool reserve_live(wki_cu_heap *h) {
    if (2 * (h->stats.live + 1) <= h->live_cap)
        return true;
    size_t old_cap = h->live_cap, cap = old_cap ? 2 * old_cap : 256;
    block **old = h->live, **fresh = wki_calloc(cap, sizeof(void *));
    if (!fresh)
        return false;
    h->live = fresh;
    h->live_cap = cap;
    for (size_t i = 0; i < old_cap; i++)
        if (old[i])
            live_insert(h, old[i]);
    wki_free(old);
    return true;
}

/* The slot of a live block, or live_cap. */
static size_t live_find(const wki_cu_heap *h, wki_cu_ptr at) {
    if (!h->live_cap)
        return 0;
    size_t i = live_home(h, at);
    for (; h->live[i]; i = (i + 1) & (h->live_cap - 1))
        if (h->live[i]->at == at)
            return i;
    return h->live_cap;
}

/* Removes a slot and moves later ones back over it, so that no search meets a hole before its goal. */
static void live_remove(wki_cu_heap *h, size_t i) {
    size_t mask = h->live_cap - 1;
    for (size_t j = (i + 1) & mask; h->live[j]; j = (j + 1) & mask) {
        size_t home = live_home(h, h->live[j]->at);
        if (((j - home) & mask) >= ((j - i) & mask)) {
            h->live[i] = h->live[j];
            i = j;
        }
    }
    h->live[i] = NULL;
}

/* ---- Blocks and segments --------------------------------------------------------------------------------- */

static bool can_merge(const block *a, const block *b) { return b && !b->live && b->pool == a->pool; }

/* Takes the right neighbour, which is in no bin, into b. */
static void absorb_right(wki_cu_heap *h, block *b) {
    block *r = b->right;
    b->size += r->size;
    b->right = r->right;
    if (b->right)
        b->right->left = b;
    drop_node(h, r);
}

/* Puts a block that is in no bin into one of pool; returns what it has become after merging. */
static block *put_free(wki_cu_heap *h, block *b, wki_cu_pool *pool) {
    b->live = false;
    b->pool = pool;
    if (can_merge(b, b->right)) {
        bin_remove(b->right);
        absorb_right(h, b);
    }
    if (can_merge(b, b->left)) {
        b = b->left;
        bin_remove(b);
        absorb_right(h, b);
    }
    bin_insert(b, pool);
    return b;
}

/* Takes a free block out of its bin and leaves what exceeds size in its pool. */
static block *carve(wki_cu_heap *h, block *b, size_t size) {
    bin_remove(b);
    if (b->size > size) {
        block *rest = take_node(h);
        rest->at = b->at + size;
        rest->size = b->size - size;
        rest->seg = b->seg;
        rest->left = b;
        rest->right = b->right;
        if (rest->right)
            rest->right->left = rest;
        b->right = rest;
        b->size = size;
        bin_insert(rest, b->pool);
    }
    return b;
}

/* A new segment as one free block of pool. */
static int grow(wki_cu_heap *h, wki_cu_pool *pool, size_t size, bool small, block **out, wki_cu_error *err) {
    if (h->limit && (size > h->limit || h->stats.reserved > h->limit - size))
        return wki_cu_fail(err, WKI_CU_DEVICE_MEMORY, "the memory limit is reached");
    segment *seg = wki_malloc(sizeof *seg);
    if (!seg)
        return wki_cu_fail(err, WKI_CU_HOST_MEMORY, "no host memory for the device allocator");
    wki_cu_ptr at;
    int code = h->source.grow(h->source.self, size, &at, err);
    if (code) {
        wki_free(seg);
        return code;
    }
    block *b = take_node(h);
    *seg = (segment){.next = h->segments, .first = b, .size = size, .small = small};
    h->segments = seg;
    b->at = at;
    b->size = size;
    b->seg = seg;
    bin_insert(b, pool);
    h->stats.driver_allocs++;
    h->stats.reserved += size;
    if (h->stats.reserved > h->stats.peak_reserved)
        h->stats.peak_reserved = h->stats.reserved;
    *out = b;
    return WKI_CU_OK;
}

static void release_segment(wki_cu_heap *h, segment **link) {
    segment *seg = *link;
    *link = seg->next;
    bin_remove(seg->first);
    drop_node(h, seg->first);
    h->source.release(h->source.self, seg->first->at);
    h->stats.reserved -= seg->size;
    h->stats.driver_frees++;
    wki_free(seg);
}

/* Waits for the streams, makes every cached block anybody's and releases the segments that are free. A stream
 * under capture cannot be waited for: its blocks stay as they are. */
static int trim(wki_cu_heap *h, wki_cu_error *err) {
    for (wki_cu_pool *p = h->pools; p; p = p->next) {
        if (p == h->idle || p->frozen)
            continue;
        int code = h->source.settle(h->source.self, p->stream, err);
        if (code)
            return code;
        for (segment *seg = h->segments; seg; seg = seg->next)
            for (block *b = seg->first; b; b = b->right)
                if (!b->live && b->pool == p) {
                    bin_remove(b);
                    bin_insert(b, h->idle);
                }
    }
    for (segment **link = &h->segments; *link;) {
        segment *seg = *link;
        bool whole = false;
        for (block *b = seg->first; b; b = b->right) {
            while (!b->live && b->pool == h->idle && can_merge(b, b->right)) {
                bin_remove(b);
                bin_remove(b->right);
                absorb_right(h, b);
                bin_insert(b, h->idle);
            }
            whole = !b->live && b->pool == h->idle && b->size == seg->size;
        }
        if (whole)
            release_segment(h, link);
        else
            link = &seg->next;
    }
    return WKI_CU_OK;
}

/* ---- Allocation ------------------------------------------------------------------------------------------ */

/* A block of another stream: one that is idle, or with `ordered` any, whose queued work pool's stream then
 * waits for. */
static int steal(wki_cu_heap *h, wki_cu_pool *pool, size_t size, bool small, bool ordered, block **out,
                 wki_cu_error *err) {
    for (wki_cu_pool *p = h->pools; p; p = p->next) {
        block *b = p == pool || p == h->idle || p->frozen ? NULL : best_fit(p, size, small);
        if (!b)
            continue;
        if (ordered) {
            int code = h->source.after(h->source.self, pool->stream, p->stream, err);
            if (code)
                return code;
        } else if (!h->source.idle(h->source.self, p->stream)) {
            continue;
        }
        *out = b;
        return WKI_CU_OK;
    }
    return WKI_CU_OK;
}

/* A free block of at least size, from the cache or the device. */
static int find_block(wki_cu_heap *h, wki_cu_pool *pool, size_t size, bool small, block **out,
                      wki_cu_error *err) {
    size_t preferred = small ? SMALL_SEGMENT : size <= SHARED_LIMIT ? SHARED_SEGMENT : size;
    size_t least = small ? SMALL_SEGMENT : size;
    *out = best_fit(pool, size, small);
    if (!*out)
        *out = best_fit(h->idle, size, small);
    if (*out)
        return WKI_CU_OK;
    int code = steal(h, pool, size, small, false, out, err);
    if (code || *out)
        return code;
    code = grow(h, pool, preferred, small, out, err);
    if (code == WKI_CU_DEVICE_MEMORY && least < preferred)
        code = grow(h, pool, least, small, out, err);
    if (code != WKI_CU_DEVICE_MEMORY)
        return code;
    code = steal(h, pool, size, small, true, out, err);
    if (code || *out)
        return code;
    code = trim(h, err);
    if (code)
        return code;
    *out = best_fit(h->idle, size, small); /* merging across pools may have made one */
    return *out ? WKI_CU_OK : grow(h, pool, least, small, out, err);
}

static size_t largest_free(const wki_cu_heap *h) {
    size_t most = 0;
    for (const segment *seg = h->segments; seg; seg = seg->next)
        for (const block *b = seg->first; b; b = b->right)
            if (!b->live && b->size > most)
                most = b->size;
    return most;
}

typedef struct holder {
    const char *tag;
    size_t bytes, blocks;
} holder;

/* Live bytes by tag, most first; returns how many of the cap entries are filled. Beyond 64 tags the rest go
 * uncounted. */
static size_t top_holders(const wki_cu_heap *h, holder *top, size_t cap) {
    holder all[64];
    size_t n = 0;
    for (size_t i = 0; i < h->live_cap; i++) {
        const block *b = h->live[i];
        if (!b)
            continue;
        size_t j = 0;
        while (j < n && strcmp(all[j].tag, b->tag) != 0)
            j++;
        if (j == sizeof all / sizeof *all)
            continue;
        if (j == n)
            all[n++] = (holder){.tag = b->tag};
        all[j].bytes += b->size;
        all[j].blocks++;
    }
    size_t kept = 0;
    for (; kept < cap && kept < n; kept++) {
        size_t most = kept;
        for (size_t j = kept + 1; j < n; j++)
            if (all[j].bytes > all[most].bytes)
                most = j;
        top[kept] = all[most];
        all[most] = all[kept];
    }
    return kept;
}

static const char *show_bytes(char text[24], size_t bytes) {
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB"};
    double v = (double)bytes / 1024;
    int u = 0;
    for (; v >= 1024 && u < 3; u++)
        v /= 1024;
    if (bytes < 1024)
        snprintf(text, 24, "%zu B", bytes);
    else
        snprintf(text, 24, "%.1f %s", v, units[u]);
    return text;
}

static int fail_full(const wki_cu_heap *h, size_t bytes, const char *tag, wki_cu_error *err) {
    char t[7][24], limit[48] = "";
    size_t device_free = 0, device_total = 0, most = largest_free(h);
    size_t cached = h->stats.reserved - h->stats.allocated;
    h->source.room(h->source.self, &device_free, &device_total);
    if (h->limit)
        snprintf(limit, sizeof limit, " of a limit of %s", show_bytes(t[6], h->limit));
    int code = wki_cu_fail(err, WKI_CU_DEVICE_MEMORY,
                           "out of device memory: %s asked for %s; the device has %s free of %s; the "
                           "allocator holds %s%s, %s of it "
                           "in %zu live blocks; its largest free block is %s (fragmentation %.0f%%)",
                           tag, show_bytes(t[0], bytes), show_bytes(t[1], device_free),
                           show_bytes(t[2], device_total), show_bytes(t[3], h->stats.reserved), limit,
                           show_bytes(t[4], h->stats.allocated), h->stats.live, show_bytes(t[5], most),
                           cached ? 100.0 * (1.0 - (double)most / (double)cached) : 0.0);
    holder top[5];
    size_t n = top_holders(h, top, 5);
    for (size_t i = 0; i < n; i++)
        wki_cu_fail_more(err, "%s%s %s (%zu)", i ? ", " : "; most is held by ", top[i].tag,
                         show_bytes(t[0], top[i].bytes), top[i].blocks);
    return code;
}

static int alloc_locked(wki_cu_heap *h, wki_cu_pool *pool, size_t bytes, const char *tag, wki_cu_ptr *out,
                        wki_cu_error *err) {
    if (pool->frozen)
        return wki_cu_fail(err, WKI_CU_INVALID, "%s allocates device memory while its stream is captured",
                           tag);
    bool small = bytes < SMALL_LIMIT;
    size_t granule = small ? SMALL_GRANULE : LARGE_GRANULE;
    if (bytes > SIZE_MAX - granule)
        return fail_full(h, bytes, tag, err);
    size_t size = (bytes + granule - 1) / granule * granule;
    /* One node for a new segment and one for what is split off. */
    if (!reserve_nodes(h, 2) || !reserve_live(h))
        return wki_cu_fail(err, WKI_CU_HOST_MEMORY, "no host memory for the device allocator");
    block *b = NULL;
    int code = find_block(h, pool, size, small, &b, err);
    if (code == WKI_CU_DEVICE_MEMORY && small) {
        /* Better a large block for a small request than none. */
        size = LARGE_GRANULE;
        code = find_block(h, pool, size, false, &b, err);
    }
    if (code)
        return code == WKI_CU_DEVICE_MEMORY ? fail_full(h, bytes, tag, err) : code;
    b = carve(h, b, size);
    b->pool = pool;
    b->live = true;
    b->tag = tag;
    b->requested = bytes;
    live_insert(h, b);
    wki_cu_memory_stats *st = &h->stats;
    st->live++;
    st->allocs++;
    st->requested += bytes;
    st->allocated += size;
    if (st->allocated > st->peak_allocated)
        st->peak_allocated = st->allocated;
    *out = b->at;
    return WKI_CU_OK;
}

int wki_cu_heap_alloc(wki_cu_heap *h, wki_cu_pool *pool, size_t bytes, const char *tag, wki_cu_ptr *out,
                      wki_cu_error *err) {
    *out = 0;
    if (bytes == 0)
        return WKI_CU_OK;
    pthread_mutex_lock(&h->lock);
    int code = alloc_locked(h, pool, bytes, tag ? tag : "untagged", out, err);
    pthread_mutex_unlock(&h->lock);
    return code;
}

static int free_locked(wki_cu_heap *h, wki_cu_pool *pool, wki_cu_ptr p, wki_cu_error *err) {
    size_t slot = live_find(h, p);
    if (slot == h->live_cap)
        return wki_cu_fail(err, WKI_CU_INVALID, "freed device address 0x%llx is not a live block", p);
    block *b = h->live[slot];
    if (b->pool != pool && b->pool != h->idle) {
        /* Allocated for one stream, used last on another: the next user must come after both. */
        if (pool->frozen || b->pool->frozen)
            return wki_cu_fail(err, WKI_CU_INVALID, "%s is freed on another stream inside a capture", b->tag);
        int code = h->source.after(h->source.self, pool->stream, b->pool->stream, err);
        if (code)
            return code;
    }
    live_remove(h, slot);
    h->stats.live--;
    h->stats.requested -= b->requested;
    h->stats.allocated -= b->size;
    put_free(h, b, pool);
    return WKI_CU_OK;
}

int wki_cu_heap_free(wki_cu_heap *h, wki_cu_pool *pool, wki_cu_ptr p, wki_cu_error *err) {
    if (!p)
        return WKI_CU_OK;
    pthread_mutex_lock(&h->lock);
    int code = free_locked(h, pool, p, err);
    pthread_mutex_unlock(&h->lock);
    return code;
}

int wki_cu_heap_trim(wki_cu_heap *h, wki_cu_error *err) {
    pthread_mutex_lock(&h->lock);
    int code = trim(h, err);
    pthread_mutex_unlock(&h->lock);
    return code;
}

void wki_cu_heap_stats(wki_cu_heap *h, wki_cu_memory_stats *out) {
    pthread_mutex_lock(&h->lock);
    *out = h->stats;
    out->largest_free = largest_free(h);
    pthread_mutex_unlock(&h->lock);
}

/* ---- Life ------------------------------------------------------------------------------------------------ */

int wki_cu_pool_open(wki_cu_heap *h, void *stream, wki_cu_pool **out, wki_cu_error *err) {
    wki_cu_pool *pool = *out = wki_calloc(1, sizeof *pool);
    if (!pool)
        return wki_cu_fail(err, WKI_CU_HOST_MEMORY, "no host memory for a stream's pool");
    pool->stream = stream;
    pthread_mutex_lock(&h->lock);
    pool->next = h->pools;
    h->pools = pool;
    pthread_mutex_unlock(&h->lock);
    return WKI_CU_OK;
}

void wki_cu_pool_close(wki_cu_heap *h, wki_cu_pool *pool) {
    pthread_mutex_lock(&h->lock);
    wki_cu_pool **link = &h->pools;
    while (*link != pool)
        link = &(*link)->next;
    *link = pool->next;
    for (segment *seg = h->segments; seg; seg = seg->next)
        for (block *b = seg->first; b; b = b->right) {
            if (b->pool != pool)
                continue;
            if (b->live) {
                b->pool = h->idle;
            } else {
                bin_remove(b);
                b = put_free(h, b, h->idle);
            }
        }
    pthread_mutex_unlock(&h->lock);
    wki_free(pool);
}

void wki_cu_pool_freeze(wki_cu_heap *h, wki_cu_pool *pool, bool frozen) {
    pthread_mutex_lock(&h->lock);
    pool->frozen = frozen;
    pthread_mutex_unlock(&h->lock);
}

int wki_cu_heap_create(const wki_cu_heap_source *source, size_t limit, wki_cu_heap **out, wki_cu_error *err) {
    wki_cu_heap *h = *out = wki_calloc(1, sizeof *h);
    if (!h)
        return wki_cu_fail(err, WKI_CU_HOST_MEMORY, "no host memory for the device allocator");
    h->source = *source;
    h->limit = limit;
    pthread_mutex_init(&h->lock, NULL);
    if (wki_cu_pool_open(h, NULL, &h->idle, err)) {
        wki_cu_heap_destroy(h);
        *out = NULL;
        return WKI_CU_HOST_MEMORY;
    }
    return WKI_CU_OK;
}

void wki_cu_heap_destroy(wki_cu_heap *h) {
    if (!h)
        return;
    for (segment *seg = h->segments, *next; seg; seg = next) {
        next = seg->next;
        h->source.release(h->source.self, seg->first->at);
        wki_free(seg);
    }
    for (node_slab *slab = h->slabs, *next; slab; slab = next) {
        next = slab->next;
        wki_free(slab);
    }
    for (wki_cu_pool *pool = h->pools, *next; pool; pool = next) {
        next = pool->next;
        wki_free(pool);
    }
    wki_free(h->live);
    pthread_mutex_destroy(&h->lock);
    wki_free(h);
}
