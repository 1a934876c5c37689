/* From a recorded segment to its run: the two-level plan cache and the flush.
 *
 * A context keeps the plans it used with the device's state for them; the runtime keeps plans by exact key and groupings by
 * structure. All three are bounded: the least recently used goes first.
 */
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "compile/plan.h"

enum { CTX_PLANS = 256, RT_PLANS = 512, RT_STRUCTURES = 256, BUCKETS = 512 };

/* What a cache holds: found by hash, given up by age. */
typedef struct entry {
    struct entry *next;
    uint64_t hash, used; /* used: the cache's clock when it last was */
} entry;

typedef struct cache {
    entry *bucket[BUCKETS];
    int n;
    uint64_t clock;
} cache;

typedef struct structure {
    entry e; /* first, as in what follows */
    uint64_t *key;
    size_t nkey;
    wki_groups groups;
} structure;

typedef struct rt_plan {
    entry e;
    wki_plan *plan;
} rt_plan;

typedef struct wki_plan_cache { /* per runtime, under its lock */
    cache plans, structures;
} wki_plan_cache;

typedef struct wki_instance { /* per context */
    entry e;
    wki_plan *plan;
    void *state;
    struct wki_instance *then; /* what ran after it the last time: the first guess, which needs no hash */
} wki_instance;

typedef struct wki_plan_ctx {
    cache instances;
    wki_instance *last; /* what ran last */
} wki_plan_ctx;

/* ---- caches -------------------------------------------------------------------------------------------------------- */

static void cache_add(cache *t, entry *e, uint64_t hash) {
    entry **b = &t->bucket[hash % BUCKETS];
    *e = (entry){.next = *b, .hash = hash, .used = ++t->clock};
    *b = e;
    t->n++;
}

/* Takes out the entry that was not used for longest, while there are more than `keep`; else NULL. */
static entry *cache_take(cache *t, int keep) {
    entry **oldest = NULL;
    for (int b = 0; b < BUCKETS && t->n > keep; b++)
        for (entry **e = &t->bucket[b]; *e; e = &(*e)->next)
            if (!oldest || (*e)->used < (*oldest)->used)
                oldest = e;
    if (!oldest)
        return NULL;
    entry *e = *oldest;
    *oldest = e->next;
    t->n--;
    return e;
}

/* ---- plans --------------------------------------------------------------------------------------------------------- */

void wki_plan_unref(wki_plan *p) {
    if (!p || atomic_fetch_sub(&p->refs, 1) != 1)
        return;
    for (int i = 0; p->step && i < p->nstep; i++) {
        wki_free(p->step[i].inst);
        wki_free(p->step[i].run);
        wki_free(p->step[i].at);
        wki_free(p->step[i].va);
        wki_free(p->step[i].rng);
        wki_free(p->step[i].view);
        wki_free(p->step[i].view_buf);
    }
    wki_free(p->step);
    wki_free(p->buf);
    wki_free(p->save);
    wki_graph_free(p->g);
    wki_free(p);
}

/* Each of these keeps at most so many. */
static void keep_plans(wki_plan_cache *pc, int most) {
    for (entry *e; (e = cache_take(&pc->plans, most)); wki_free(e))
        wki_plan_unref(((rt_plan *)e)->plan);
}

static void keep_structures(wki_plan_cache *pc, int most) {
    for (entry *e; (e = cache_take(&pc->structures, most)); wki_free(e)) {
        wki_groups_free(&((structure *)e)->groups);
        wki_free(((structure *)e)->key);
    }
}

static void forget_next(wki_plan_ctx *pc, const wki_instance *gone) {
    for (int b = 0; b < BUCKETS; b++)
        for (entry *e = pc->instances.bucket[b]; e; e = e->next)
            if (((wki_instance *)e)->then == gone)
                ((wki_instance *)e)->then = NULL;
    if (pc->last == gone)
        pc->last = NULL;
}

static void keep_instances(wk_ctx *c, wki_plan_ctx *pc, int most) {
    for (entry *e; (e = cache_take(&pc->instances, most)); wki_free(e)) {
        wki_instance *i = (wki_instance *)e;
        forget_next(pc, i);
        wki_devices[i->plan->g->dev]->plan->release(c, i->state);
        wki_plan_unref(i->plan);
    }
}

void wki_plan_cache_free(wk_runtime *rt) {
    wki_plan_cache *pc = rt->plans;
    if (!pc)
        return;
    keep_plans(pc, 0);
    keep_structures(pc, 0);
    wki_free(pc);
    rt->plans = NULL;
}

void wki_plan_ctx_free(wk_ctx *c) {
    wki_plan_ctx *pc = c->plans;
    if (!pc)
        return;
    keep_instances(c, pc, 0);
    wki_free(pc);
    c->plans = NULL;
}

void wki_plan_print(const wki_plan *p) {
    fprintf(stderr, "plan %016llx: %d steps, arena %lld bytes (bound %lld)\n", (unsigned long long)p->hash,
            p->nstep, (long long)p->arena_bytes, (long long)p->lower_bound);
    for (int i = 0; i < p->nstep; i++) {
        const wki_step *s = &p->step[i];
        if (s->kind == WKI_STEP_LOOP)
            fprintf(stderr, "%4d loop %-18s %3d instructions, %2d loads, %2d stores, %d dims, %d reduced%s\n",
                    i, s->op->name, s->prog.ninst, s->prog.nload, s->prog.nstore, s->run->ndim, s->run->nred,
                    s->run->col ? ", by column" : "");
        else
            fprintf(stderr, "%4d kernel %s (%s)\n", i, s->op->name, s->kernel ? s->kernel->name : "-");
    }
}

/* ---- structure key --------------------------------------------------------------------------------------------------- */

/* Sizes, strides and offsets become numbers in order of first appearance; 0, 1 and negative ones stay themselves, and a
   number remembers whether it was divisible by 4 (16 bytes of f32). */
typedef struct pattern {
    int64_t *value;
    uint32_t *slot; /* open addressing into value, +1 */
    uint32_t n, mask;
} pattern;

static uint64_t classify(pattern *p, int64_t v) {
    if (v <= 1)
        return (uint64_t)v & 0xff;
    uint64_t h = (uint64_t)v * 0x9e3779b97f4a7c15u;
    for (uint32_t i = (uint32_t)(h >> 32) & p->mask;; i = (i + 1) & p->mask) {
        if (!p->slot[i]) {
            p->value[p->n++] = v;
            p->slot[i] = p->n;
        }
        if (p->value[p->slot[i] - 1] == v)
            return 0x100 | (uint64_t)p->slot[i] << 12 | (uint64_t)(v % 4 == 0) << 9;
    }
}

/* Everything passes look at, with numbers replaced by their pattern. NULL when out of memory. */
static uint64_t *structure_key(const wki_graph *g, size_t *n) {
    size_t words = 2 + (size_t)g->nbuf;
    for (int i = 0; i < g->nnode; i++)
        words += 2 + (size_t)g->node[i].nia;
    words += (size_t)g->nref * (3 + 2 * WK_MAX_DIMS);
    size_t cap = 64;
    while (cap < (size_t)g->nref * 4 + 64)
        cap *= 2;
    cap *= 4;
    uint64_t *key = wki_malloc(words * sizeof *key);
    pattern p = {.value = wki_malloc(cap * sizeof *p.value),
                 .slot = wki_calloc(cap, sizeof *p.slot),
                 .mask = (uint32_t)cap - 1};
    if (!key || !p.value || !p.slot) {
        wki_free(key);
        key = NULL;
        goto end;
    }
    size_t k = 0;
    key[k++] = (uint64_t)g->dev | (uint64_t)g->nnode << 8;
    for (int i = 0; i < g->nnode; i++) {
        const wki_gnode *nd = &g->node[i];
        key[k++] = nd->op->id | (uint64_t)nd->nin << 16 | (uint64_t)nd->nout << 32 | (uint64_t)nd->nia << 40;
        key[k++] = (uint64_t)(uint32_t)nd->rng;
        for (int j = 0; j < nd->nin + nd->nout; j++) {
            const wki_gref *f = &g->ref[nd->ref0 + j];
            key[k++] = (uint64_t)(uint32_t)f->buf | (uint64_t)f->ndim << 32 | (uint64_t)f->dtype << 40 |
                       (uint64_t)f->plain << 48;
            if (f->buf < 0)
                continue;
            key[k++] = classify(&p, f->off);
            key[k++] = classify(&p, f->numel);
            for (int d = 0; d < f->ndim; d++) {
                key[k++] = classify(&p, f->size[d]);
                key[k++] = classify(&p, f->stride[d]);
            }
        }
        for (int j = 0; j < nd->nia; j++)
            key[k++] = nd->ia[j] < 16 ? (uint64_t)nd->ia[j]
                                      : classify(&p, nd->ia[j]); /* dimensions stay themselves */
    }
    for (int b = 0; b < g->nbuf; b++) {
        const wki_gbuf *gb = &g->buf[b];
        key[k++] = gb->external | (uint64_t)gb->live << 1 | (uint64_t)gb->pinned << 2 |
                   (uint64_t)(uint32_t)gb->root << 32;
    }
    *n = k;
end:
    wki_free(p.value);
    wki_free(p.slot);
    return key;
}

/* ---- building -------------------------------------------------------------------------------------------------------- */

static structure *find_structure(wki_plan_cache *pc, uint64_t hash, const uint64_t *key, size_t nkey) {
    for (entry *e = pc->structures.bucket[hash % BUCKETS]; e; e = e->next) {
        structure *s = (structure *)e;
        if (e->hash == hash && s->nkey == nkey && !memcmp(s->key, key, nkey * sizeof *key)) {
            e->used = ++pc->structures.clock;
            return s;
        }
    }
    return NULL;
}

/* The grouping for a structure: found, or searched and kept. Caller holds the runtime's lock. */
static structure *grouping(wk_ctx *c, wki_plan_cache *pc, wki_graph *g) {
    size_t nkey = 0;
    uint64_t *key = structure_key(g, &nkey);
    if (!key) {
        wki_fail(c, WK_NOMEM, "no host memory for a plan");
        return NULL;
    }
    uint64_t hash = wki_hash(key, nkey * sizeof *key, 1);
    structure *s = find_structure(pc, hash, key, nkey);
    if (s) {
        wki_free(key);
        return s;
    }
    s = wki_calloc(1, sizeof *s);
    if (!s)
        wki_fail(c, WK_NOMEM, "no host memory for a plan");
    if (!s || !wki_pass_fuse(c, g, &s->groups)) {
        wki_free(s);
        wki_free(key);
        return NULL;
    }
    c->stats.structures_made += !c->rec->eager;
    s->key = key;
    s->nkey = nkey;
    keep_structures(pc, RT_STRUCTURES - 1);
    cache_add(&pc->structures, &s->e, hash);
    return s;
}

static wki_plan *build(wk_ctx *c, wki_plan_cache *pc, uint64_t hash) {
    wki_plan *p = wki_calloc(1, sizeof *p);
    if (!p) {
        wki_fail(c, WK_NOMEM, "no host memory for a plan");
        return NULL;
    }
    atomic_init(&p->refs, 1);
    p->hash = hash;
    p->g = wki_graph_decode(c, c->rec);
    if (!p->g || !wki_graph_verify(c, p->g))
        goto fail;
    if (!wki_pass_dead(c, p->g) || !wki_pass_epilogue(c, p->g))
        goto fail;
    if (c->rt->trace & WKI_TRACE_GRAPH)
        wki_graph_print(p->g);
    structure *s = grouping(c, pc, p->g);
    if (!s || !wki_lower(c, p, &s->groups) || !wki_pass_memory(c, p))
        goto fail;
    if (c->rt->trace & WKI_TRACE_PLAN)
        wki_plan_print(p);
    c->stats.shapes_made += !c->rec->eager;
    return p;
fail:
    wki_plan_unref(p);
    return NULL;
}

static bool same_key(const wki_plan *p, const wki_recorder *r) {
    return p->g->nkey == r->nkey && p->g->dev == (wk_device)r->dev &&
           !memcmp(p->g->key, r->key, r->nkey * sizeof *r->key);
}

/* The runtime's plan for the recorder's key, built when there is none. The caller gets a reference and holds the lock. */
static wki_plan *find_or_build(wk_ctx *c, wki_plan_cache *pc, uint64_t hash) {
    for (entry *e = pc->plans.bucket[hash % BUCKETS]; e; e = e->next) {
        wki_plan *p = ((rt_plan *)e)->plan;
        if (e->hash == hash && same_key(p, c->rec)) {
            e->used = ++pc->plans.clock;
            atomic_fetch_add(&p->refs, 1);
            return p;
        }
    }
    rt_plan *made = wki_malloc(sizeof *made);
    if (!made) {
        wki_fail(c, WK_NOMEM, "no host memory for a plan");
        return NULL;
    }
    made->plan = build(c, pc, hash);
    if (!made->plan) {
        wki_free(made);
        return NULL;
    }
    keep_plans(pc, RT_PLANS - 1);
    cache_add(&pc->plans, &made->e, hash);
    atomic_fetch_add(&made->plan->refs, 1);
    return made->plan;
}

static wki_plan *plan_for(wk_ctx *c, uint64_t hash) {
    wk_runtime *rt = c->rt;
    wki_runtime_lock(rt);
    if (!rt->plans && !(rt->plans = wki_calloc(1, sizeof *rt->plans)))
        wki_fail(c, WK_NOMEM, "no host memory for the plan cache");
    wki_plan *p = rt->plans ? find_or_build(c, rt->plans, hash) : NULL;
    wki_runtime_unlock(rt);
    return p;
}

static wki_instance *find_instance(const wki_plan_ctx *pc, const wki_recorder *r, uint64_t hash) {
    for (entry *e = pc->instances.bucket[hash % BUCKETS]; e; e = e->next)
        if (e->hash == hash && same_key(((wki_instance *)e)->plan, r))
            return (wki_instance *)e;
    return NULL;
}

static wki_instance *make_instance(wk_ctx *c, wki_plan_ctx *pc, uint64_t hash) {
    wki_recorder *r = c->rec;
    wki_instance *i = wki_calloc(1, sizeof *i);
    if (!i) {
        wki_fail(c, WK_NOMEM, "no host memory for a plan");
        return NULL;
    }
    i->plan = plan_for(c, hash);
    i->state = i->plan ? wki_devices[r->dev]->plan->prepare(c, i->plan) : NULL;
    if (!i->state) {
        wki_plan_unref(i->plan);
        wki_free(i);
        return NULL;
    }
    keep_instances(c, pc, CTX_PLANS - 1);
    cache_add(&pc->instances, &i->e, hash);
    return i;
}

static wki_instance *instance_for(wk_ctx *c) {
    wki_recorder *r = c->rec;
    if (!c->plans && !(c->plans = wki_calloc(1, sizeof *c->plans))) {
        wki_fail(c, WK_NOMEM, "no host memory for the plan cache");
        return NULL;
    }
    wki_plan_ctx *pc = c->plans;
    wki_instance *i = pc->last ? pc->last->then : NULL;
    bool hit = i && same_key(i->plan, r);
    if (!hit) {
        uint64_t hash = wki_hash(r->key, r->nkey * sizeof *r->key, r->dev);
        i = find_instance(pc, r, hash);
        hit = i != NULL;
        if (!hit && !(i = make_instance(c, pc, hash)))
            return NULL;
        if (pc->last)
            pc->last->then = i;
    }
    c->stats.plan_hits += hit;
    i->e.used = ++pc->instances.clock;
    pc->last = i;
    return i;
}

/* ---- the flush ------------------------------------------------------------------------------------------------------- */

/* Which results are still wanted is part of the key: a bit per buffer. */
static bool append_live_bits(wk_ctx *c, wki_recorder *r) {
    size_t words = (r->nbuf + 63) / 64;
    if (!wki_rec_room(c, r->nkey + words, 0, 0, 0))
        return false;
    for (size_t w = 0; w < words; w++) {
        uint64_t bits = 0;
        uint32_t b = (uint32_t)w * 64, end = b + 64 < r->nbuf ? b + 64 : r->nbuf;
        for (uint32_t i = b; i < end; i++)
            bits |= (uint64_t)(!(r->buf[i].flags & WKI_RB_EXTERNAL) && r->buf[i].st) << (i - b);
        r->key[r->nkey++] = bits;
    }
    return true;
}

/* Addresses of what lives outside the arena; live results get their memory now. */
static bool bind_buffers(wk_ctx *c, wki_recorder *r, const wki_plan *p) {
    if (r->cap_ptr < (uint32_t)p->nbuf) {
        void **q = wki_realloc(r->ptr, ((size_t)p->nbuf + 64) * sizeof *q);
        if (!q)
            return wki_fail(c, WK_NOMEM, "no host memory for a flush");
        r->ptr = q;
        r->cap_ptr = (uint32_t)p->nbuf + 64;
    }
    for (uint32_t b = 0; b < r->nbuf; b++) {
        wki_rbuf *rb = &r->buf[b];
        r->ptr[b] = NULL;
        if (!rb->st)
            continue;
        if (!(rb->flags & WKI_RB_EXTERNAL) && !wki_storage_realize(rb->st))
            return false;
        r->ptr[b] = rb->st->data
                        ? (char *)rb->st->data + (size_t)rb->off * wki_dtype_size((wk_dtype)rb->dtype)
                        : NULL;
    }
    return true;
}

bool wki_flush(wk_ctx *c) {
    wki_recorder *r = c->rec;
    if (!r->nops)
        return !c->failed;
    if (c->failed)
        return false;
    bool ok = append_live_bits(c, r);
    wki_instance *i = ok ? instance_for(c) : NULL;
    ok = i && bind_buffers(c, r, i->plan);
    if (ok) {
        wki_plan_args a = {.buf = r->ptr, .val = r->val, .seed = c->seed, .rng_base = r->rng_start};
        ok = wki_devices[r->dev]->plan->run(c, i->plan, i->state, &a);
        c->stats.flushes++;
        c->stats.arena_bytes = i->plan->arena_bytes;
        c->stats.arena_lower_bound = i->plan->lower_bound;
        c->stats.kernels_last = i->plan->nstep;
    }
    if (ok) {
        wki_rec_reset(c, true);
        if (!r->eager)
            wki_undo_commit(c);
    } else {
        wki_recorder_discard(c);
    }
    if (!c->call_depth && !r->eager)
        c->journal = false; /* outside a call nothing more can be undone */
    return ok;
}
