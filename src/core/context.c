/* Runtimes and contexts: making and freeing them, the undo journal, objects, RNG state, counters. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "core/core.h"

void wk_runtime_options_init(wk_runtime_options *o) { *o = (wk_runtime_options){.struct_size = sizeof *o}; }

/* A plan is built under the lock, and looks up user ops as it goes. */
static bool recursive_mutex(pthread_mutex_t *lock) {
    pthread_mutexattr_t a;
    if (pthread_mutexattr_init(&a))
        return false;
    bool ok = !pthread_mutexattr_settype(&a, PTHREAD_MUTEX_RECURSIVE) && !pthread_mutex_init(lock, &a);
    pthread_mutexattr_destroy(&a);
    return ok;
}

/* WICK_TRACE: any of these words. */
static uint8_t traces(void) {
    static const struct {
        const char *word;
        uint8_t bit;
    } known[] = {{"dispatch", WKI_TRACE_DISPATCH}, {"graph", WKI_TRACE_GRAPH}, {"plan", WKI_TRACE_PLAN}};
    const char *text = getenv("WICK_TRACE");
    uint8_t bits = 0;
    for (size_t i = 0; text && i < sizeof known / sizeof *known; i++)
        bits |= strstr(text, known[i].word) ? known[i].bit : 0;
    return bits;
}

wk_runtime *wk_runtime_new(const wk_runtime_options *given) {
    wk_runtime_options o;
    wk_runtime_options_init(&o);
    if (!wki_take_struct(&o, sizeof o, given))
        return NULL;
    wk_runtime *rt = wki_calloc(1, sizeof *rt);
    pthread_mutex_t *lock = rt ? wki_malloc(sizeof *lock) : NULL;
    if (!lock)
        goto fail;
    rt->lock = lock;
    if (!recursive_mutex(lock))
        goto fail;
    atomic_init(&rt->refs, 1);
    atomic_init(&rt->next_ordinal, 0);
    rt->isa = wki_cpu_isa();
    rt->trace = traces();
    rt->seed = o.seed;
    rt->pool = wki_pool_new(o.threads);
    if (!rt->pool) {
        pthread_mutex_destroy(lock);
        goto fail;
    }
    return rt;
fail:
    wki_free(lock);
    wki_free(rt);
    return NULL;
}

void wki_runtime_lock(wk_runtime *rt) { pthread_mutex_lock(rt->lock); }
void wki_runtime_unlock(wk_runtime *rt) { pthread_mutex_unlock(rt->lock); }

static void runtime_unref(wk_runtime *rt) {
    if (atomic_fetch_sub(&rt->refs, 1) != 1)
        return;
    wki_plan_cache_free(rt);
    for (int d = 0; d < WK_DEVICE_COUNT; d++)
        if (wki_devices[d]->rt_free)
            wki_devices[d]->rt_free(rt);
    for (int i = 0; i < rt->nuser_ops; i++)
        wki_user_op_free(rt->user_ops[i]);
    wki_free(rt->user_ops);
    wki_pool_free(rt->pool);
    pthread_mutex_destroy(rt->lock);
    wki_free(rt->lock);
    wki_free(rt);
}

void wk_runtime_free(wk_runtime *rt) {
    if (rt)
        runtime_unref(rt);
}

/* The default runtime lives from the first context that asks for it to the last. */
static pthread_mutex_t default_lock = PTHREAD_MUTEX_INITIALIZER;
static wk_runtime *default_rt;
static int default_users;

static wk_runtime *default_runtime(void) {
    pthread_mutex_lock(&default_lock);
    if (!default_rt)
        default_rt = wk_runtime_new(NULL);
    if (default_rt)
        default_users++;
    wk_runtime *rt = default_rt;
    pthread_mutex_unlock(&default_lock);
    return rt;
}

static void default_release(void) {
    pthread_mutex_lock(&default_lock);
    wk_runtime *rt = --default_users == 0 ? default_rt : NULL;
    if (rt)
        default_rt = NULL;
    pthread_mutex_unlock(&default_lock);
    wk_runtime_free(rt);
}

wk_ctx *wk_ctx_new(wk_runtime *rt) {
    bool is_default = !rt;
    if (is_default && !(rt = default_runtime()))
        return NULL;
    wk_ctx *c = wki_calloc(1, sizeof *c);
    if (!c)
        goto fail;
    c->rt = rt;
    c->default_rt = is_default;
    c->grad_mode = true;
    uint64_t state = rt->seed + atomic_fetch_add(&rt->next_ordinal, 1);
    c->seed = wki_splitmix(&state); /* spreads neighbouring seeds and ordinals */
    c->exec = &wki_exec_autograd;
    wki_tensor *p = wki_tensor_new(c);
    if (!p || !(c->rec = wki_recorder_new(c)))
        goto fail;
    wki_tensor_disown(p);
    c->nowned = 0;
    p->flags |= WKI_F_POISON;
    p->dtype = WK_F32;
    p->numel = 0;
    c->poison = p;
    c->stats.live_tensors = 0;
    if (!is_default)
        atomic_fetch_add(&rt->refs, 1);
    return c;
fail:
    if (c) {
        wki_scopes_free(c);
        wki_slots_free(c);
        wki_free(c);
    }
    if (is_default)
        default_release();
    return NULL;
}

void wk_ctx_free(wk_ctx *c) {
    if (!c)
        return;
    wk_runtime *rt = c->rt;
    bool is_default = c->default_rt;
    c->failed = WK_OK;
    wki_recorder_discard(c);
    while (c->objects) {
        wki_object *o = c->objects;
        wki_object_remove(c, o);
        o->destroy(o);
    }
    wki_scopes_free(c);
    wki_undo_commit(c);
    wki_recorder_free(c);
    wki_plan_ctx_free(c);
    wki_tensors_release_all(c);
    for (int d = 0; d < WK_DEVICE_COUNT; d++)
        if (wki_devices[d]->ctx_free)
            wki_devices[d]->ctx_free(c);
    wki_slots_free(c);
    wki_free(c->undo);
    wki_free(c->outside);
    wki_free(c->bw_all);
    wki_free(c->bw_heap);
    wki_free(c->bw_word);
    wki_free(c);
    if (is_default)
        default_release();
    else
        runtime_unref(rt);
}

void wki_object_add(wk_ctx *c, wki_object *o, void (*destroy)(void *)) {
    o->destroy = destroy;
    o->prev = NULL;
    o->next = c->objects;
    if (o->next)
        o->next->prev = o;
    c->objects = o;
}

void wki_object_remove(wk_ctx *c, wki_object *o) {
    if (o->prev)
        o->prev->next = o->next;
    else if (c->objects == o)
        c->objects = o->next;
    if (o->next)
        o->next->prev = o->prev;
    o->prev = o->next = NULL;
}

/* ---- undo journal -------------------------------------------------------------------------------------------------- */

static wki_undo *undo_slot(wk_ctx *c) {
    if (c->nundo == c->cap_undo) {
        uint32_t cap = c->cap_undo ? c->cap_undo * 2 : 64;
        wki_undo *p = wki_realloc(c->undo, cap * sizeof *p);
        if (!p) {
            wki_fail(c, WK_NOMEM, "no host memory for the undo journal");
            return NULL;
        }
        c->undo = p;
        c->cap_undo = cap;
    }
    return &c->undo[c->nundo++];
}

bool wki_undo_grad(wk_ctx *c, wki_tensor *leaf) {
    if (!c->journal)
        return true;
    wki_undo *u = undo_slot(c);
    if (!u)
        return false;
    wki_tensor *old = leaf->grad;
    *u = (wki_undo){.kind = WKI_UNDO_GRAD, .t = leaf, .old = old};
    wki_tensor_ref(leaf);
    if (old)
        wki_tensor_ref(old);
    return true;
}

bool wki_undo_i64(wk_ctx *c, int64_t *p) {
    if (!c->journal)
        return true;
    wki_undo *u = undo_slot(c);
    if (!u)
        return false;
    *u = (wki_undo){.kind = WKI_UNDO_I64, .p = p, .v = *p};
    return true;
}

bool wki_undo_rng(wk_ctx *c) {
    if (!c->journal)
        return true;
    wki_undo *u = undo_slot(c);
    if (!u)
        return false;
    *u = (wki_undo){.kind = WKI_UNDO_RNG, .seed = c->seed, .sequence = c->rng_seq};
    return true;
}

static void commit_to(wk_ctx *c, uint32_t n) {
    for (uint32_t i = n; i < c->nundo; i++) {
        wki_undo *u = &c->undo[i];
        if (u->kind == WKI_UNDO_GRAD) {
            if (u->old)
                wki_tensor_unref(u->old);
            wki_tensor_unref(u->t);
        }
    }
    c->nundo = n;
}

void wki_undo_back_to(wk_ctx *c, uint32_t n) {
    while (c->nundo > n) {
        wki_undo *u = &c->undo[--c->nundo];
        if (u->kind == WKI_UNDO_I64) {
            *u->p = u->v;
            continue;
        }
        if (u->kind == WKI_UNDO_RNG) {
            c->seed = u->seed;
            c->rng_seq = u->sequence;
            continue;
        }
        wki_tensor *now = u->t->grad;
        if (u->old) {
            wki_tensor_user_up(u->old);
            wki_tensor_unref(u->old);
        }
        u->t->grad = u->old;
        if (now)
            wki_tensor_user_down(now);
        wki_tensor_unref(u->t);
    }
}

void wki_undo_commit(wk_ctx *c) { commit_to(c, 0); }
void wki_undo_rollback(wk_ctx *c) { wki_undo_back_to(c, 0); }

void wki_undo_forget(wk_ctx *c, uint32_t n) {
    for (uint32_t i = n; i < c->nundo; i++) {
        wki_undo *u = &c->undo[i];
        if (u->kind != WKI_UNDO_GRAD || !u->old || !u->old->st->pending)
            continue;
        wki_tensor_unref(u->old);
        u->old = NULL;
    }
}

wki_undo_mark wki_undo_begin(wk_ctx *c) {
    wki_undo_mark m = {c->nundo, c->journal};
    c->journal = true;
    return m;
}

void wki_undo_end(wk_ctx *c, wki_undo_mark m, bool ok) {
    if (!c->journal)
        return; /* a flush settled it all */
    if (!ok)
        wki_undo_back_to(c, m.n);
    else if (!m.journal)
        commit_to(c, m.n < c->nundo ? m.n : c->nundo);
    else if (!wki_undo_part(c))
        wki_undo_forget(c, m.n);
    c->journal = m.journal;
}

/* ---- RNG, devices, counters ---------------------------------------------------------------------------------------- */

static void rng_set(wk_ctx *c, uint64_t seed, uint64_t sequence, const void *caller) {
    wki_begin(c, caller);
    wki_flush(c); /* what is pending was recorded under the old seed */
    if (!wki_undo_rng(c))
        return;
    c->seed = seed;
    c->rng_seq = sequence;
}

void wk_seed(wk_ctx *c, uint64_t seed) { rng_set(c, seed, 0, __builtin_return_address(0)); }

void wk_rng_get(wk_ctx *c, uint64_t *seed, uint64_t *sequence) {
    if (seed)
        *seed = c->seed;
    if (sequence)
        *sequence = c->rng_seq;
}

void wk_rng_set(wk_ctx *c, uint64_t seed, uint64_t sequence) {
    rng_set(c, seed, sequence, __builtin_return_address(0));
}

const char *wk_device_name(wk_device d) {
    return (unsigned)d < WK_DEVICE_COUNT ? wki_devices[d]->name : "unknown device";
}

bool wk_device_available(wk_ctx *c, wk_device d, const char **why_not) {
    const char *why = "no such device";
    bool ok = (unsigned)d < WK_DEVICE_COUNT && wki_devices[d]->available(c->rt, &why);
    if (why_not)
        *why_not = ok ? "" : why;
    return ok;
}

bool wki_need_device(wk_ctx *c, wk_device d, const char *function) {
    const char *why;
    if ((unsigned)d >= WK_DEVICE_COUNT)
        return wki_fail(c, WK_DEVICE, "%s: there is no device %d", function, (int)d);
    return wk_device_available(c, d, &why) ||
           wki_fail(c, WK_DEVICE, "%s: device %s: %s", function, wk_device_name(d), why);
}

void wk_use_device(wk_ctx *c, wk_device d) {
    wki_begin(c, __builtin_return_address(0));
    if (wki_need_device(c, d, "wk_use_device"))
        c->dev = (uint8_t)d;
}

wk_device wk_current_device(wk_ctx *c) { return (wk_device)c->dev; }

bool wk_grad_enable(wk_ctx *c, bool on) {
    bool old = c->grad_mode;
    c->grad_mode = on;
    return old;
}

void wk_stats_get(wk_ctx *c, wk_stats *s) {
    size_t n = s->struct_size;
    if (n < sizeof s->struct_size || n > sizeof *s)
        n = sizeof *s;
    wk_stats all = c->stats;
    all.struct_size = n;
    all.host_allocs = wki_alloc_count();
    memcpy(s, &all, n);
}
