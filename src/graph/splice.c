/* Splices: a backward that was recorded before is appended to the stream as it was, without being walked again.
 *
 * What a backward records follows from what it starts from: the segment's stream so far, the values of its VALUE
 * attributes, and how the autograd records that it goes through hang together, which the engine describes in words. When all
 * three are those of an earlier backward, word by word, so is all that it appends, and the gradients it leaves. Where that
 * is not certain (the engine cannot describe the records, new external buffers), nothing is kept and the backward is
 * walked. Calls core only. */
#include <stdlib.h>
#include <string.h>

#include "graph/graph.h"

/* Backwards kept per context; the one that was not used for longest gives way. Where most do not come again, few are kept. */
enum { KEPT = 8, PATIENCE = 16 };

/* Sizes of a segment. */
typedef struct extent {
    size_t key, meta;
    uint32_t nops, nbuf, nval, nref;
} extent;

/* A gradient that a leaf gets. */
typedef struct gradient {
    wk_tensor *leaf;
    uint32_t buf;
    uint8_t dtype, ndim, flags;
    size_t bytes; /* of the buffer */
    int64_t off, numel, size[WK_MAX_DIMS], stride[WK_MAX_DIMS];
} gradient;

struct wki_splice {
    extent from, to;
    int64_t ops;   /* applied, views among them */
    uint64_t used; /* when last */
    uint8_t dev;
    /* The segment from its start, as the recorder has it; of the buffers those made between `from` and `to`. */
    uint64_t *key;
    uint64_t *word; /* the records' description */
    int64_t *meta;
    double *val;
    wki_rbuf *buf;
    gradient *grad;
    size_t cap_key, cap_word, cap_meta, cap_val, cap_buf, cap_grad, nword, ngrad;
};

struct wki_splices {
    wki_splice s[KEPT];
    uint64_t clock;
    uint32_t misses; /* since one was found */
    /* The first that this segment has; and what the recorder's arrays still hold of the segment before, which is written over
       only as far as this one has come. */
    const wki_splice *first, *held;
    /* of the backward that runs */
    extent from;
    int64_t ops;
    uint64_t rng_seq;
    uint32_t epoch;
};

static extent extent_of(const wk_ctx *c) {
    const wki_recorder *r = c->rec;
    return (extent){r->nkey, r->nmeta, r->nops, r->nbuf, r->nval, r->nref};
}

void wki_splices_free(wk_ctx *c) {
    wki_recorder *r = c->rec;
    for (int i = 0; r->spl && i < KEPT; i++) {
        wki_splice *s = &r->spl->s[i];
        wki_free(s->key);
        wki_free(s->word);
        wki_free(s->meta);
        wki_free(s->val);
        wki_free(s->buf);
        wki_free(s->grad);
    }
    wki_free(r->spl);
}

/* ---- finding and appending ----------------------------------------------------------------------------------------- */

static bool same(const void *a, const void *b, size_t n, size_t each) {
    return !n || !memcmp(a, b, n * each);
}

static bool fits(const wk_ctx *c, const wki_splice *s, const uint64_t *word, size_t nword) {
    const wki_recorder *r = c->rec;
    extent now = extent_of(c);
    return s->used && s->dev == r->dev && !memcmp(&now, &s->from, sizeof now) && s->nword == nword &&
           same(word, s->word, nword, sizeof *s->word) && same(r->val, s->val, now.nval, sizeof *s->val) &&
           same(r->key, s->key, now.key, sizeof *s->key);
}

uint32_t wki_splice_epoch(const wk_ctx *c) {
    const wki_recorder *r = c->rec;
    return r->nops && !r->unsure && !r->all_anew ? r->epoch : 0;
}

wki_splice *wki_splice_find(wk_ctx *c, const uint64_t *word, size_t nword) {
    struct wki_splices *k = c->rec->spl;
    for (int i = 0; k && i < KEPT; i++) {
        wki_splice *s = &k->s[i];
        if (fits(c, s, word, nword)) {
            s->used = ++k->clock;
            k->misses = 0;
            return s;
        }
    }
    return NULL;
}

/* A pending storage behind a buffer that the splice appended. */
static bool storage_of(wk_ctx *c, uint32_t b, uint8_t dev, size_t bytes, wki_storage **out) {
    wki_recorder *r = c->rec;
    wki_storage *s = r->buf[b].st;
    if (s) {
        s->refs++;
    } else {
        if (!(s = wki_storage_new(c, (wk_device)dev, bytes, false)))
            return false;
        s->pending = 1;
        s->rec_epoch = r->epoch;
        s->rec_buf = b;
        r->buf[b].st = s;
    }
    *out = s;
    return true;
}

static bool give(wk_ctx *c, const gradient *g, uint8_t dev) {
    wki_tensor *leaf = wki_slot(g->leaf), *t;
    if (!wki_undo_grad(c, leaf) || !(t = wki_tensor_loose(c)))
        return false;
    t->dtype = g->dtype;
    t->ndim = g->ndim;
    t->flags |= g->flags;
    t->off = g->off;
    t->numel = g->numel;
    memcpy(t->size, g->size, sizeof t->size);
    memcpy(t->stride, g->stride, sizeof t->stride);
    if (!storage_of(c, g->buf, dev, g->bytes, &t->st)) {
        wki_tensor_user_down(t);
        return false;
    }
    leaf->grad = t; /* which holds it from here on */
    return true;
}

void wki_splices_rewind(wki_recorder *r, bool holds) {
    struct wki_splices *k = r->spl;
    if (!k)
        return;
    k->held = holds ? k->first : NULL;
    k->first = NULL;
}

/* Puts what s appended into the recorder's arrays. Of what they hold of it already, only the beginning may be gone (appending
   an op writes up to a few words too far), and what was noted of the buffers that live on. */
static void append(wki_recorder *r, const wki_splice *s) {
    enum { TOO_FAR = 64 };
    struct wki_splices *k = r->spl;
    const extent *a = &s->from, *b = &s->to;
    size_t key = b->key - a->key, meta = b->meta - a->meta, nbuf = b->nbuf - a->nbuf;
    if (k->held == s) {
        key = key < TOO_FAR ? key : TOO_FAR;
        meta = meta < TOO_FAR ? meta : TOO_FAR;
        for (size_t i = 0; i < s->ngrad; i++)
            r->buf[s->grad[i].buf] = s->buf[s->grad[i].buf - a->nbuf];
    } else {
        memcpy(r->buf + a->nbuf, s->buf, nbuf * sizeof *r->buf);
    }
    memcpy(r->key + a->key, s->key + a->key, key * sizeof *r->key);
    memcpy(r->meta + a->meta, s->meta, meta * sizeof *r->meta);
    memcpy(r->val + a->nval, s->val + a->nval, (b->nval - a->nval) * sizeof *r->val);
    if (!k->first)
        k->first = s;
}

bool wki_splice_apply(wk_ctx *c, const wki_splice *s) {
    wki_recorder *r = c->rec;
    const extent *b = &s->to;
    if (!wki_rec_room(c, b->key, b->meta, b->nbuf, b->nval))
        return false;
    append(r, s);
    r->nkey = b->key;
    r->nmeta = b->meta;
    r->nops = b->nops;
    r->nbuf = b->nbuf;
    r->nval = b->nval;
    r->nref = b->nref;
    c->stats.ops += s->ops;
    r->spliced++;
    bool ok = true;
    for (size_t i = 0; ok && i < s->ngrad; i++)
        ok = give(c, &s->grad[i], s->dev);
    return ok;
}

/* ---- keeping ------------------------------------------------------------------------------------------------------- */

bool wki_splice_begin(wk_ctx *c) {
    wki_recorder *r = c->rec;
    if (!r->spl && !(r->spl = wki_calloc(1, sizeof *r->spl)))
        return false;
    struct wki_splices *k = r->spl;
    if (++k->misses > PATIENCE && k->misses % PATIENCE)
        return false;
    k->from = extent_of(c);
    k->ops = c->stats.ops;
    k->rng_seq = c->rng_seq;
    k->epoch = r->epoch;
    r->touched = false;
    return true;
}

bool wki_rec_grow(void **p, size_t *cap, size_t need, size_t each) {
    if (need <= *cap)
        return true;
    void *q = wki_realloc(*p, need * each);
    if (!q)
        return false;
    *p = q;
    *cap = need;
    return true;
}

/* Copies n items to where a splice keeps them. */
static bool keep(void **p, size_t *cap, const void *from, size_t n, size_t each) {
    if (!wki_rec_grow(p, cap, n, each))
        return false;
    if (n)
        memcpy(*p, from, n * each);
    return true;
}

#define KEEP(s, what, from, n) keep((void **)&(s)->what, &(s)->cap_##what, from, n, sizeof *(s)->what)

/* Notes a leaf's gradient, which must lie in a buffer made since `first`. One that is noted already is no second. */
static bool keep_gradient(wki_splice *s, const wki_recorder *r, uint32_t first, wki_tensor *leaf) {
    const wki_tensor *g = leaf->grad;
    if (!g)
        return true;
    const wki_storage *st = g->st;
    if (!st->pending || st->rec_epoch != r->epoch || st->rec_buf < first || g->fn)
        return false;
    if (s->ngrad == s->cap_grad &&
        !wki_rec_grow((void **)&s->grad, &s->cap_grad, 2 * s->ngrad + 16, sizeof *s->grad))
        return false;
    gradient *k = &s->grad[s->ngrad++];
    *k = (gradient){.leaf = wki_handle(leaf),
                    .buf = st->rec_buf,
                    .dtype = g->dtype,
                    .ndim = g->ndim,
                    .flags = g->flags & (WKI_F_PLAIN | WKI_F_WHOLE),
                    .off = g->off,
                    .numel = g->numel,
                    .bytes = st->bytes};
    memcpy(k->size, g->size, sizeof k->size);
    memcpy(k->stride, g->stride, sizeof k->stride);
    return true;
}

static int by_leaf(const void *a, const void *b) {
    uintptr_t x = (uintptr_t)((const gradient *)a)->leaf, y = (uintptr_t)((const gradient *)b)->leaf;
    return (x > y) - (x < y);
}

static bool keep_gradients(wki_splice *s, const wki_recorder *r, uint32_t first, wki_node *const *all,
                           size_t n) {
    s->ngrad = 0;
    for (size_t i = 0; i < n; i++)
        for (int j = 0; j < all[i]->nin; j++)
            if (all[i]->in[j].leaf && !keep_gradient(s, r, first, all[i]->in[j].leaf))
                return false;
    if (s->ngrad)
        qsort(s->grad, s->ngrad, sizeof *s->grad, by_leaf);
    size_t m = 0;
    for (size_t i = 0; i < s->ngrad; i++) /* a leaf that several records lead to */
        if (!m || s->grad[m - 1].leaf != s->grad[i].leaf)
            s->grad[m++] = s->grad[i];
    s->ngrad = m;
    return true;
}

void wki_splice_end(wk_ctx *c, const uint64_t *word, size_t nword, wki_node *const *all, size_t n) {
    wki_recorder *r = c->rec;
    struct wki_splices *k = r->spl;
    if (r->epoch != k->epoch || r->touched || c->rng_seq != k->rng_seq)
        return;
    for (uint32_t b = k->from.nbuf; b < r->nbuf; b++)
        if (r->buf[b].flags & WKI_RB_EXTERNAL)
            return;
    wki_splice *s = &k->s[0];
    for (int i = 1; i < KEPT; i++)
        if (k->s[i].used < s->used)
            s = &k->s[i];
    s->used = 0;
    k->held = k->held == s ? NULL : k->held;
    k->first = k->first == s ? NULL : k->first;
    s->from = k->from;
    s->to = extent_of(c);
    s->nword = nword;
    s->dev = r->dev;
    s->ops = c->stats.ops - k->ops;
    if (!KEEP(s, key, r->key, r->nkey) || !KEEP(s, word, word, nword) || !KEEP(s, val, r->val, r->nval) ||
        !KEEP(s, meta, r->meta + s->from.meta, r->nmeta - s->from.meta) ||
        !KEEP(s, buf, r->buf + s->from.nbuf, r->nbuf - s->from.nbuf) ||
        !keep_gradients(s, r, s->from.nbuf, all, n))
        return;
    for (uint32_t i = 0; i < r->nbuf - s->from.nbuf; i++)
        s->buf[i].st = NULL;
    s->used = ++k->clock;
}
