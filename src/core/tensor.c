/* Slots, storages and scopes: who owns a tensor and when it dies. Calls base and the device table. */
#include <stdlib.h>
#include <string.h>

#include "core/core.h"

enum { SLAB_SLOTS = 256, POOL_CHUNK = 64 * 1024 };

typedef struct wki_slab {
    struct wki_slab *next;
    wki_tensor *slots;
} wki_slab;

struct wki_chunk {
    _Alignas(WKI_LINE) struct wki_chunk *next;
};

void *wki_pool_bytes(wk_ctx *c, size_t bytes) {
    struct wki_chunk *k = wki_aligned(WKI_LINE, sizeof *k + bytes);
    if (!k)
        return NULL;
    k->next = c->chunks;
    c->chunks = k;
    return k + 1;
}

static bool grow_slots(wk_ctx *c) {
    wki_slab *s = wki_pool_bytes(c, sizeof *s);
    wki_tensor *t = s ? wki_aligned(WKI_LINE, SLAB_SLOTS * sizeof *t) : NULL;
    if (!t)
        return wki_fail(c, WK_NOMEM, "no host memory for tensor handles");
    memset(t, 0, SLAB_SLOTS * sizeof *t);
    s->slots = t;
    s->next = c->slabs;
    c->slabs = s;
    for (int i = SLAB_SLOTS - 1; i >= 0; i--) {
        t[i].ctx = c;
        t[i].gen = 1;
        t[i].st = (wki_storage *)c->free_slots; /* free slots are linked through st */
        c->free_slots = &t[i];
    }
    return true;
}

void wki_slots_free(wk_ctx *c) {
    for (wki_slab *s = c->slabs; s; s = s->next)
        wki_free(s->slots);
    c->slabs = NULL;
    for (struct wki_chunk *k = c->chunks, *n; k; k = n) {
        n = k->next;
        wki_free(k);
    }
    c->chunks = NULL;
}

static bool grow_owned(wk_ctx *c) {
    uint32_t cap = c->cap_owned ? c->cap_owned * 2 : 256;
    wki_tensor **p = wki_realloc(c->owned, cap * sizeof *p);
    if (!p)
        return wki_fail(c, WK_NOMEM, "no host memory for scopes");
    c->owned = p;
    c->cap_owned = cap;
    return true;
}

/* A slot of no scope. */
static inline wki_tensor *take_slot(wk_ctx *c) {
    wki_tensor *t = c->free_slots;
    c->free_slots = (wki_tensor *)t->st;
    t->scope_pos = 0;
    t->flags = WKI_F_LIVE;
    t->ndim = 0;
    t->out_idx = 0;
    t->self_saved = 0;
    t->user = 1;
    t->retained = 0;
    t->refs = 0;
    t->st = NULL;
    t->fn = NULL;
    t->grad = NULL;
    t->off = 0;
    c->stats.live_tensors++;
    return t;
}

wki_tensor *wki_tensor_loose(wk_ctx *c) { return c->free_slots || grow_slots(c) ? take_slot(c) : NULL; }

/* Room for one more slot in the current scope. */
static __attribute__((noinline)) bool make_room(wk_ctx *c) {
    return (c->free_slots || grow_slots(c)) && (c->nowned < c->cap_owned || grow_owned(c));
}

wki_tensor *wki_tensor_new(wk_ctx *c) {
    if (__builtin_expect(!c->free_slots || c->nowned == c->cap_owned, 0) && !make_room(c))
        return NULL;
    wki_tensor *t = take_slot(c);
    c->owned[c->nowned++] = t;
    t->scope_pos = c->nowned;
    return t;
}

/* Gives the slot back once nothing holds it. A generation that would wrap retires its slot for good. */
static void slot_free(wki_tensor *t) {
    wk_ctx *c = t->ctx;
    wki_storage *st = t->st;
    wki_node *fn = t->fn;
    wki_tensor *grad = t->grad;
    t->flags = 0;
    t->fn = NULL;
    t->grad = NULL;
    c->stats.live_tensors--;
    if (t->gen != 0) {
        t->st = (wki_storage *)c->free_slots;
        c->free_slots = t;
    }
    if (st)
        wki_storage_unref(st);
    if (grad)
        wki_tensor_user_down(grad);
    if (fn)
        wki_node_release(c, fn);
}

void wki_tensor_settle(wki_tensor *t) {
    if (t->refs == 0) {
        slot_free(t);
    } else if (t->refs == t->self_saved && t->fn) {
        /* Only its own producer still holds it: nobody can start a backward here, so the cycle is cut. */
        wki_node *fn = t->fn;
        t->fn = NULL;
        wki_node_release(t->ctx, fn);
    }
}

void wki_tensor_disown(wki_tensor *t) {
    if (t->scope_pos) {
        t->ctx->owned[t->scope_pos - 1] = NULL;
        t->scope_pos = 0;
    }
}

static inline void user_down(wki_tensor *t) {
    if (t->flags & WKI_F_POISON)
        return;
    if (--t->user == 0) {
        t->gen++;
        t->flags &= (uint8_t)~WKI_F_KEEP;
        wki_tensor_settle(t);
    }
}

void wki_tensor_user_down(wki_tensor *t) { user_down(t); }

/* ---- storages ------------------------------------------------------------------------------------------------------ */

static __attribute__((noinline)) bool grow_storages(wk_ctx *c) {
    int n = POOL_CHUNK / (int)sizeof(wki_storage);
    wki_storage *s = wki_pool_bytes(c, (size_t)n * sizeof *s);
    if (!s)
        return wki_fail(c, WK_NOMEM, "no host memory for a storage record");
    for (int i = n - 1; i >= 0; i--) {
        s[i].data = c->free_storages;
        c->free_storages = &s[i];
    }
    return true;
}

wki_storage *wki_storage_new(wk_ctx *c, wk_device dev, size_t bytes, bool with_data) {
    if (__builtin_expect(!c->free_storages, 0) && !grow_storages(c))
        return NULL;
    wki_storage *s = c->free_storages;
    c->free_storages = (wki_storage *)s->data;
    *s = (wki_storage){.refs = 1, .bytes = bytes, .ctx = c, .dev = (uint8_t)dev};
    if (with_data && !wki_storage_realize(s)) {
        s->data = c->free_storages;
        c->free_storages = s;
        return NULL;
    }
    return s;
}

bool wki_storage_realize(wki_storage *s) {
    wk_ctx *c = s->ctx;
    if (s->bytes) {
        s->data = wki_devices[s->dev]->alloc(c, s->bytes, c->cur_op ? c->cur_op->name : "tensor");
        if (!s->data)
            return false;
        c->stats.storage_bytes += (int64_t)s->bytes;
        if (c->stats.storage_bytes > c->stats.storage_peak)
            c->stats.storage_peak = c->stats.storage_bytes;
    }
    s->pending = 0;
    return true;
}

/* The storage leaves its shared memory, which goes with the last of them; by then no other context may have anything queued
   that uses it. */
static void leave_shared(wki_storage *s) {
    wki_shared *h = s->shared;
    if (h->data && s->ctx->dev_state[h->dev])
        wki_device_wait(s->ctx, h->dev);
    wki_runtime_lock(s->ctx->rt);
    int i = 0;
    while (h->storage[i] != s)
        i++;
    h->storage[i] = h->storage[--h->n];
    bool last = !h->n;
    wki_runtime_unlock(s->ctx->rt);
    if (!last)
        return;
    if (h->data)
        wki_devices[h->dev]->free(s->ctx, h->data, h->bytes);
    wki_free(h->storage);
    wki_free(h);
}

void wki_storage_free(wki_storage *s) {
    wk_ctx *c = s->ctx;
    if (s->pending)
        wki_rec_forget(c, s);
    if (s->data)
        c->stats.storage_bytes -= (int64_t)s->bytes;
    if (s->shared)
        leave_shared(s);
    else if (s->data)
        wki_devices[s->dev]->free(c, s->data, s->bytes);
    s->data = c->free_storages;
    c->free_storages = s;
}

/* Room for one more storage; s alone at first. The caller holds the lock. */
static bool grow_shared(wk_ctx *to, wki_storage *s) {
    wki_shared *h = s->shared ? s->shared : wki_calloc(1, sizeof *h);
    if (h && h->n == h->cap) {
        int cap = h->cap ? 2 * h->cap : 4;
        wki_storage **p = wki_realloc(h->storage, (size_t)cap * sizeof(void *));
        if (p) {
            h->storage = p;
            h->cap = cap;
        }
    }
    if (!h || h->n == h->cap) {
        if (!s->shared)
            wki_free(h);
        return wki_fail(to, WK_NOMEM, "no host memory to share a storage");
    }
    if (!s->shared) {
        h->storage[h->n++] = s;
        h->data = s->data;
        h->bytes = s->bytes;
        h->dev = (wk_device)s->dev;
        s->shared = h;
    }
    return true;
}

/* Makes a storage of context `to` on the memory of s. The caller holds the lock. */
static wki_storage *join_shared(wk_ctx *to, wki_storage *s) {
    wki_storage *n = grow_shared(to, s) ? wki_storage_new(to, (wk_device)s->dev, s->bytes, false) : NULL;
    if (!n)
        return NULL;
    n->shared = s->shared;
    n->data = s->data;
    n->pinned = s->pinned;
    s->shared->storage[s->shared->n++] = n;
    if (n->data)
        to->stats.storage_bytes += (int64_t)n->bytes;
    return n;
}

wki_storage *wki_storage_share(wk_ctx *to, wki_storage *s) {
    wki_runtime_lock(to->rt);
    wki_storage *n = NULL;
    for (int i = 0; s->shared && i < s->shared->n; i++)
        if (s->shared->storage[i]->ctx == to)
            n = s->shared->storage[i];
    if (n)
        n->refs++;
    else
        n = join_shared(to, s);
    wki_runtime_unlock(to->rt);
    return n;
}

/* ---- scopes -------------------------------------------------------------------------------------------------------- */

static __attribute__((noinline)) bool grow_marks(wk_ctx *c) {
    uint32_t cap = c->cap_marks ? c->cap_marks * 2 : 64;
    uint32_t *p = wki_realloc(c->marks, cap * sizeof *p);
    if (!p) {
        c->lost_scopes++;
        return wki_fail(c, WK_NOMEM, "no host memory for scopes");
    }
    c->marks = p;
    c->cap_marks = cap;
    return true;
}

void wk_scope_begin(wk_ctx *c) {
    if (__builtin_expect(c->nmarks == c->cap_marks, 0) && !grow_marks(c))
        return;
    c->marks[c->nmarks++] = c->nowned;
}

static void scope_unwind(wk_ctx *c, uint32_t mark) {
    uint32_t n = c->nowned, w = mark;
    for (uint32_t i = mark; i < n; i++) {
        wki_tensor *t = c->owned[i];
        if (!t)
            continue;
        if (t->flags & WKI_F_KEEP) {
            t->flags &= (uint8_t)~WKI_F_KEEP;
            c->owned[w++] = t;
            t->scope_pos = w;
        } else {
            t->scope_pos = 0;
            user_down(t);
        }
    }
    c->nowned = w;
}

void wk_scope_end(wk_ctx *c) {
    if (c->lost_scopes) {
        c->lost_scopes--;
        return;
    }
    if (c->nmarks <= c->scope_floor) {
        wki_begin(c, __builtin_return_address(0));
        wki_fail(c, WK_STATE, "wk_scope_end without a matching wk_scope_begin");
        return;
    }
    uint32_t mark = c->marks[--c->nmarks];
    if (c->nowned > mark)
        scope_unwind(c, mark);
}

wki_floor wki_floor_begin(wk_ctx *c) {
    wki_floor old = {c->scope_floor, c->try_floor};
    c->scope_floor = c->nmarks;
    c->try_floor = c->try_depth;
    return old;
}

void wki_floor_end(wk_ctx *c, wki_floor old, const void *caller) {
    bool probes = c->try_depth > c->try_floor;
    while (c->nmarks > c->scope_floor)
        wk_scope_end(c);
    while (c->try_depth > c->try_floor)
        wk_try_end(c, NULL);
    c->scope_floor = old.scope;
    c->try_floor = old.probe;
    if (!probes)
        return;
    c->caller = caller;
    c->cur_op = NULL;
    wki_fail(c, WK_STATE, "the function that was called left a wk_try_begin without its wk_try_end");
}

void wki_scopes_free(wk_ctx *c) {
    c->nmarks = 0;
    c->scope_floor = 0;
    scope_unwind(c, 0);
    scope_unwind(c, 0); /* what was marked to be kept in the first pass */
    wki_free(c->owned);
    wki_free(c->marks);
    c->owned = NULL;
    c->marks = NULL;
    c->nowned = c->cap_owned = 0;
}

void wk_drop(wk_tensor *h) {
    if (!wki_handle_ok(h))
        return;
    wki_tensor *t = wki_slot(h);
    wk_ctx *c = t->ctx;
    if (t->flags & WKI_F_POISON || !t->scope_pos)
        return;
    if (c->scope_floor && t->scope_pos <= c->marks[c->scope_floor - 1])
        return; /* borrowed by the function that runs: its caller's to drop */
    wki_tensor_disown(t);
    if (t->ctx->nowned && !t->ctx->owned[t->ctx->nowned - 1] &&
        (!t->ctx->nmarks || t->ctx->nowned > t->ctx->marks[t->ctx->nmarks - 1]))
        t->ctx->nowned--; /* keeps a loop of create-and-drop from growing the stack */
    wki_tensor_user_down(t);
}

void wk_set(wk_tensor **slot, wk_tensor *t) {
    if (*slot != t)
        wk_drop(*slot);
    *slot = t;
}

wk_tensor *wk_keep(wk_tensor *h) {
    wki_tensor *t = wki_enter(h, __builtin_return_address(0));
    if (t && t->scope_pos)
        t->flags |= WKI_F_KEEP;
    return h;
}

wk_tensor *wk_retain(wk_tensor *h) {
    wki_tensor *t = wki_enter(h, __builtin_return_address(0));
    if (t && !(t->flags & WKI_F_POISON)) {
        t->user++;
        t->retained++;
    }
    return h;
}

void wk_release(wk_tensor *h) {
    if (!h)
        return;
    wki_tensor *t = wki_enter(h, __builtin_return_address(0));
    if (!t || t->flags & WKI_F_POISON)
        return;
    if (!t->retained) {
        t->ctx->cur_op = NULL;
        wki_fail(t->ctx, WK_STATE, "wk_release without a matching wk_retain%s",
                 t->scope_pos ? " (wk_drop ends a tensor of a scope)" : "");
        return;
    }
    t->retained--;
    wki_tensor_user_down(t);
}

bool wk_alive(wk_ctx *c, const wk_tensor *h) { return wki_handle_ok(h) && wki_slot(h)->ctx == c; }

/* Moves a tensor of a scope that is about to end into the enclosing one: the results of calls. */
void wki_promote(wk_ctx *c, wki_tensor *t) {
    if (t->scope_pos && c->nmarks && t->scope_pos > c->marks[c->nmarks - 1])
        t->flags |= WKI_F_KEEP;
}

/* At the end of a context: what the user still retains goes too. */
void wki_tensors_release_all(wk_ctx *c) {
    for (wki_slab *s = c->slabs; s; s = s->next)
        for (int i = 0; i < SLAB_SLOTS; i++) {
            wki_tensor *t = &s->slots[i];
            if ((t->flags & WKI_F_LIVE) && t->st) {
                wki_storage *st = t->st;
                t->st = NULL;
                t->flags &= (uint8_t)~WKI_F_LIVE;
                wki_storage_unref(st);
            }
        }
}
