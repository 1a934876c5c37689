/* Handles of modules, optimizers, loaders and compiled functions. One table a context, found among the context's
 * objects; its slots are never given back before the context ends, which is what makes a stale handle safe to look at.
 * May call: base, core.
 */
#include "core/box.h"

enum { SLOTS_PER_SLAB = 32 };

typedef struct slot {
    uint16_t gen;
    uint8_t kind;
    bool live;
    struct table *tab;
    void *body;
    void (*destroy)(void *body);
    struct slot *next_free;
} slot;

typedef struct slab {
    struct slab *next; /* older */
    int used;          /* slots handed out at least once */
    slot slots[SLOTS_PER_SLAB];
} slab;

typedef struct table {
    wki_object obj; /* first: a table is found by it */
    wk_ctx *ctx;
    slab *slabs;
    slot *free_slots;
    slot invalid; /* never live: what failed creations return */
    void *running;
} table;

static const char *const kind_names[] = {"a module", "an optimizer", "a loader", "a compiled function"};

static void *handle_of(const slot *s) { return (void *)((uintptr_t)s | (uintptr_t)s->gen << WKI_ADDR_BITS); }
static slot *slot_of(const void *h) { return (slot *)((uintptr_t)h & (((uintptr_t)1 << WKI_ADDR_BITS) - 1)); }

static bool valid(const slot *s, const void *h, wki_box_kind kind) {
    return s->live && s->kind == kind && s->gen == (uint16_t)((uintptr_t)h >> WKI_ADDR_BITS);
}

static void retire(slot *s) {
    void *body = s->body;
    void (*destroy)(void *) = s->destroy;
    s->live = false;
    s->gen++;
    s->body = NULL;
    destroy(body);
}

static void table_destroy(void *self) {
    table *t = self;
    for (slab *b = t->slabs; b; b = b->next) /* newest first: what holds others goes before them */
        for (int i = b->used; i-- > 0;)
            if (b->slots[i].live)
                retire(&b->slots[i]);
    for (slab *b = t->slabs, *next; b; b = next) {
        next = b->next;
        wki_free(b);
    }
    wki_free(t);
}

static table *table_of(wk_ctx *c) {
    for (wki_object *o = c->objects; o; o = o->next)
        if (o->destroy == table_destroy)
            return (table *)o;
    table *t = wki_calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->ctx = c;
    t->invalid.tab = t;
    wki_object_add(c, &t->obj, table_destroy);
    return t;
}

static slot *slot_take(table *t) {
    slot *s = t->free_slots;
    if (s) {
        t->free_slots = s->next_free;
        return s;
    }
    if (!t->slabs || t->slabs->used == SLOTS_PER_SLAB) {
        slab *b = wki_calloc(1, sizeof *b);
        if (!b)
            return NULL;
        b->next = t->slabs;
        t->slabs = b;
    }
    s = &t->slabs->slots[t->slabs->used++];
    s->gen = 1;
    s->tab = t;
    return s;
}

void *wki_box_new(wk_ctx *c, wki_box_kind kind, void *body, void (*destroy)(void *body)) {
    table *t = table_of(c);
    slot *s = t ? slot_take(t) : NULL;
    if (!s) {
        destroy(body);
        wki_fail(c, WK_NOMEM, "no memory for %s", kind_names[kind]);
        return t ? handle_of(&t->invalid) : NULL;
    }
    s->kind = (uint8_t)kind;
    s->live = true;
    s->body = body;
    s->destroy = destroy;
    return handle_of(s);
}

void *wki_box_invalid(wk_ctx *c) {
    table *t = table_of(c);
    return t ? handle_of(&t->invalid) : NULL;
}

void *wki_box_peek(const void *h, wki_box_kind kind) {
    slot *s = slot_of(h);
    return s && valid(s, h, kind) ? s->body : NULL;
}

void *wki_box_get(const void *h, wki_box_kind kind, const void *caller) {
    slot *s = slot_of(h);
    if (!s)
        return NULL;
    if (valid(s, h, kind))
        return s->body;
    wk_ctx *c = s->tab->ctx;
    if (!c->failed) { /* in a failed context the handle may well be what a failed creation returned */
        wki_begin(c, caller);
        wki_fail(c, WK_HANDLE, "use of %s that was freed or never made", kind_names[kind]);
    }
    return NULL;
}

wk_ctx *wki_box_ctx(const void *h) { return h ? slot_of(h)->tab->ctx : NULL; }

void wki_box_free(void *h) {
    slot *s = slot_of(h);
    table *t = s->tab;
    retire(s);
    if (s->gen) { /* a generation that wraps retires its slot */
        s->next_free = t->free_slots;
        t->free_slots = s;
    }
}

void **wki_box_running(wk_ctx *c) {
    table *t = table_of(c);
    return t ? &t->running : NULL;
}
