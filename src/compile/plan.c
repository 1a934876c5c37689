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

typedef struct structure {
    uint64_t hash;
    uint64_t *key;
    size_t nkey;
    wki_groups groups;
    uint64_t used;
    struct structure *next;
} structure;

typedef struct rt_entry {
    wki_plan *plan;
    uint64_t used;
    struct rt_entry *next;
} rt_entry;

typedef struct wki_plan_cache {
    rt_entry *plan[BUCKETS];
    structure *structure[BUCKETS];
    int nplan, nstructure;
    uint64_t clock;
} wki_plan_cache;

typedef struct wki_instance { /* per context */
    wki_plan *plan;
    void *state;
    uint64_t used;
    struct wki_instance *then; /* what ran after it the last time: the first guess, which needs no hash */
    struct wki_instance *next;
} wki_instance;

typedef struct wki_plan_ctx {
    wki_instance *inst[BUCKETS];
    wki_instance *last; /* what ran last */
    int n;
    uint64_t clock;
} wki_plan_ctx;

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

static void structure_free(structure *s) {
    wki_groups_free(&s->groups);
    wki_free(s->key);
    wki_free(s);
}

void wki_plan_cache_free(wk_runtime *rt) {
    wki_plan_cache *pc = rt->plans;
    if (!pc)
        return;
    for (int b = 0; b < BUCKETS; b++) {
        for (rt_entry *e = pc->plan[b], *n; e; e = n) {
            n = e->next;
            wki_plan_unref(e->plan);
            wki_free(e);
        }
        for (structure *s = pc->structure[b], *n; s; s = n) {
            n = s->next;
            structure_free(s);
        }
    }
    wki_free(pc);
    rt->plans = NULL;
}

void wki_plan_ctx_free(wk_ctx *c) {
    wki_plan_ctx *pc = c->plans;
    if (!pc)
        return;
    for (int b = 0; b < BUCKETS; b++)
        for (wki_instance *i = pc->inst[b], *n; i; i = n) {
            n = i->next;
            wki_devices[i->plan->g->dev]->plan->release(c, i->state);
            wki_plan_unref(i->plan);
            wki_free(i);
        }
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
    for (structure *s = pc->structure[hash % BUCKETS]; s; s = s->next)
        if (s->hash == hash && s->nkey == nkey && !memcmp(s->key, key, nkey * sizeof *key)) {
            s->used = ++pc->clock;
            return s;
        }
    return NULL;
}

static void evict_structure(wki_plan_cache *pc) {
    structure **victim = NULL;
    for (int b = 0; b < BUCKETS; b++)
        for (structure **s = &pc->structure[b]; *s; s = &(*s)->next)
            if (!victim || (*s)->used < (*victim)->used)
                victim = s;
    structure *s = *victim;
    *victim = s->next;
    structure_free(s);
    pc->nstructure--;
}

static void evict_plan(wki_plan_cache *pc) {
    rt_entry **victim = NULL;
    for (int b = 0; b < BUCKETS; b++)
        for (rt_entry **e = &pc->plan[b]; *e; e = &(*e)->next)
            if (!victim || (*e)->used < (*victim)->used)
                victim = e;
    rt_entry *e = *victim;
    *victim = e->next;
    wki_plan_unref(e->plan);
    wki_free(e);
    pc->nplan--;
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
    *s = (structure){.hash = hash, .key = key, .nkey = nkey, .groups = s->groups, .used = ++pc->clock};
    while (pc->nstructure >= RT_STRUCTURES)
        evict_structure(pc);
    s->next = pc->structure[hash % BUCKETS];
    pc->structure[hash % BUCKETS] = s;
    pc->nstructure++;
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
    structure *s = NULL;
    if (!p->g || !wki_graph_verify(c, p->g))
        goto fail;
    if (!wki_pass_dead(c, p->g) || !wki_pass_epilogue(c, p->g))
        goto fail;
    if (c->rt->trace & WKI_TRACE_GRAPH)
        wki_graph_print(p->g);
    s = grouping(c, pc, p->g);
    if (!s)
        goto fail;
    p->structure = s->hash;
    if (!wki_lower(c, p, &s->groups) || !wki_pass_memory(c, p))
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

/* The runtime's plan for the recorder's key, built when there is none. The caller gets a reference. */
static wki_plan *plan_for(wk_ctx *c, uint64_t hash) {
    wk_runtime *rt = c->rt;
    wki_runtime_lock(rt);
    if (!rt->plans)
        rt->plans = wki_calloc(1, sizeof *rt->plans);
    wki_plan_cache *pc = rt->plans;
    wki_plan *p = NULL;
    if (!pc) {
        wki_fail(c, WK_NOMEM, "no host memory for the plan cache");
        goto end;
    }
    for (rt_entry *e = pc->plan[hash % BUCKETS]; e; e = e->next)
        if (e->plan->hash == hash && same_key(e->plan, c->rec)) {
            e->used = ++pc->clock;
            p = e->plan;
            atomic_fetch_add(&p->refs, 1);
            goto end;
        }
    rt_entry *e = wki_malloc(sizeof *e);
    p = e ? build(c, pc, hash) : NULL;
    if (!p) {
        if (!e)
            wki_fail(c, WK_NOMEM, "no host memory for a plan");
        wki_free(e);
        goto end;
    }
    while (pc->nplan >= RT_PLANS)
        evict_plan(pc);
    *e = (rt_entry){.plan = p, .used = ++pc->clock, .next = pc->plan[hash % BUCKETS]};
    pc->plan[hash % BUCKETS] = e;
    pc->nplan++;
    atomic_fetch_add(&p->refs, 1);
end:
    wki_runtime_unlock(rt);
    return p;
}

static void evict_instance(wk_ctx *c, wki_plan_ctx *pc) {
    wki_instance **victim = NULL;
    for (int b = 0; b < BUCKETS; b++)
        for (wki_instance **i = &pc->inst[b]; *i; i = &(*i)->next)
            if (!victim || (*i)->used < (*victim)->used)
                victim = i;
    wki_instance *i = *victim;
    *victim = i->next;
    for (int b = 0; b < BUCKETS; b++)
        for (wki_instance *j = pc->inst[b]; j; j = j->next)
            j->then = j->then == i ? NULL : j->then;
    pc->last = pc->last == i ? NULL : pc->last;
    wki_devices[i->plan->g->dev]->plan->release(c, i->state);
    wki_plan_unref(i->plan);
    wki_free(i);
    pc->n--;
}

static wki_instance *find_instance(const wki_plan_ctx *pc, const wki_recorder *r, uint64_t hash) {
    for (wki_instance *i = pc->inst[hash % BUCKETS]; i; i = i->next)
        if (i->plan->hash == hash && same_key(i->plan, r))
            return i;
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
    while (pc->n >= CTX_PLANS)
        evict_instance(c, pc);
    i->next = pc->inst[hash % BUCKETS];
    pc->inst[hash % BUCKETS] = i;
    pc->n++;
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
    i->used = ++pc->clock;
    pc->last = i;
    return i;
}

/* ---- the flush ------------------------------------------------------------------------------------------------------- */

/* Which results are still wanted is part of the key: a bit per buffer. */
static bool append_live_bits(wk_ctx *c, wki_recorder *r) {
    size_t words = (r->nbuf + 63) / 64;
    if (r->nkey + words > r->cap_key) {
        size_t cap = (r->nkey + words) * 2;
        uint64_t *p = wki_realloc(r->key, cap * sizeof *p);
        if (!p)
            return wki_fail(c, WK_NOMEM, "no host memory for the recording");
        r->key = p;
        r->cap_key = cap;
    }
    for (size_t w = 0; w < words; w++) {
        uint64_t bits = 0;
        uint32_t b = (uint32_t)w * 64, end = b + 64 < r->nbuf ? b + 64 : r->nbuf;
        for (uint32_t i = b; i < end; i++)
            bits |= (uint64_t)(!r->buf[i].external && r->buf[i].st) << (i - b);
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
        if (!rb->external && !wki_storage_realize(rb->st))
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
