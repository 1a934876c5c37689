/* The recorder: appends an op to the key stream in some tens of nanoseconds. Calls core only. */
#include <stddef.h>
#include <string.h>

#include "graph/graph.h"

_Static_assert(offsetof(wki_tensor, dtype) == offsetof(wki_tensor, flags) + 1 &&
                   offsetof(wki_tensor, ndim) == offsetof(wki_tensor, flags) + 2 && WKI_REF_DTYPE == 8 &&
                   WKI_REF_NDIM == 16 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "put_ref reads a slot's dtype and ndim in one word");

wki_recorder *wki_recorder_new(wk_ctx *c) {
    (void)c;
    wki_recorder *r = wki_calloc(1, sizeof *r);
    if (r)
        r->epoch = 1;
    return r;
}

void wki_recorder_free(wk_ctx *c) {
    wki_recorder *r = c->rec;
    if (!r)
        return;
    wki_free(r->key);
    wki_free(r->meta);
    wki_free(r->buf);
    wki_free(r->val);
    wki_free(r->ptr);
    wki_splices_free(c);
    wki_repeats_free(r);
    wki_free(r);
    c->rec = NULL;
}

bool wki_rec_captured(const wk_ctx *c, const wki_storage *s) {
    return c->rec->nops && s->rec_epoch == c->rec->epoch;
}

bool wki_rec_writes(const wk_ctx *c, const wki_storage *s) {
    return wki_rec_captured(c, s) && c->rec->buf[s->rec_buf].flags & WKI_RB_WRITTEN;
}

void wki_rec_forget(wk_ctx *c, wki_storage *s) {
    wki_recorder *r = c->rec;
    if (r && s->rec_epoch == r->epoch)
        r->buf[s->rec_buf].st = NULL;
}

void wki_rec_reset(wk_ctx *c, bool ok) {
    wki_recorder *r = c->rec;
    uint32_t n = r->nbuf;
    r->nops = 0;
    r->nkey = r->nmeta = 0;
    r->nbuf = r->nval = r->nref = 0;
    wki_splices_rewind(r, true);
    if (!++r->epoch) /* a long run wraps it; 0 is of no segment */
        r->epoch = 1;
    r->unsure = false;
    for (uint32_t i = 0; i < n; i++) {
        wki_storage *s = r->buf[i].st;
        if (!s)
            continue;
        if (r->buf[i].flags & WKI_RB_EXTERNAL) {
            wki_storage_unref(s);
        } else if (!ok) {
            s->pending = 0;
            s->failed = 1;
        }
    }
}

/* Drops what is pending and puts back what its recording changed on the host. */
void wki_recorder_discard(wk_ctx *c) {
    wki_recorder *r = c->rec;
    if (r->nops)
        c->rng_seq = r->rng_start;
    wki_graph_unwrite(c, r, 0);
    wki_rec_reset(c, false);
    wki_undo_rollback(c);
}

wki_rec_mark wki_rec_mark_of(const wk_ctx *c) {
    const wki_recorder *r = c->rec;
    return (wki_rec_mark){.epoch = r->epoch,
                          .nops = r->nops,
                          .nbuf = r->nbuf,
                          .nval = r->nval,
                          .nref = r->nref,
                          .nundo = c->nundo,
                          .nkey = r->nkey,
                          .nmeta = r->nmeta,
                          .rng_seq = c->rng_seq};
}

static void forget_buffer(wki_rbuf *b) {
    wki_storage *s = b->st;
    if (!s)
        return;
    if (s->rec_buf == (uint32_t)(b - s->ctx->rec->buf))
        s->rec_epoch = 0; /* of no segment */
    if (b->flags & WKI_RB_EXTERNAL) {
        wki_storage_unref(s);
    } else {
        s->pending = 0;
        s->failed = 1;
    }
}

void wki_rec_back_to(wk_ctx *c, const wki_rec_mark *m) {
    wki_recorder *r = c->rec;
    if (r->epoch != m->epoch) { /* there was a flush: what is recorded now is all the call's own */
        wki_recorder_discard(c);
        return;
    }
    wki_graph_unwrite(c, r, m->nops);
    for (uint32_t b = m->nbuf; b < r->nbuf; b++)
        forget_buffer(&r->buf[b]);
    for (uint32_t b = 0; b < m->nbuf; b++) {
        if (r->buf[b].flags & WKI_RB_EXTERNAL) /* a declaration may be gone; the next use declares again */
            r->buf[b].flags &= (uint8_t)~WKI_RB_WHOLE;
        if (r->buf[b].next_same > m->nbuf)
            r->buf[b].next_same = 0;
    }
    r->nops = m->nops;
    r->nbuf = m->nbuf;
    r->nval = m->nval;
    r->nref = m->nref;
    r->nkey = m->nkey;
    r->nmeta = m->nmeta;
    wki_splices_rewind(r, false);
    r->unsure = true;
    c->rng_seq = m->rng_seq;
    wki_undo_back_to(c, m->nundo);
}

static bool grow(wk_ctx *c, void **p, size_t *cap, size_t need, size_t each) {
    size_t n = *cap ? *cap : 1024;
    while (n < need)
        n *= 2;
    void *q = wki_realloc(*p, n * each);
    if (!q)
        return wki_fail(c, WK_NOMEM, "no host memory for the recording");
    *p = q;
    *cap = n;
    return true;
}

bool wki_rec_room(wk_ctx *c, size_t key, size_t meta, size_t nbuf, size_t nval) {
    wki_recorder *r = c->rec;
    r->room = 0; /* whoever asks here appends without counting */
    return (key <= r->cap_key || grow(c, (void **)&r->key, &r->cap_key, key, sizeof *r->key)) &&
           (meta <= r->cap_meta || grow(c, (void **)&r->meta, &r->cap_meta, meta, sizeof *r->meta)) &&
           (nbuf <= r->cap_buf || grow(c, (void **)&r->buf, &r->cap_buf, nbuf, sizeof *r->buf)) &&
           (nval <= r->cap_val || grow(c, (void **)&r->val, &r->cap_val, nval, sizeof *r->val));
}

/* Words that one reference and one output take at most; appending writes no further than that. */
enum { REF_WORDS = 3 + 2 * WK_MAX_DIMS, META_WORDS = 1 + WK_MAX_DIMS };

static inline int64_t least(int64_t a, size_t b) { return a < (int64_t)b ? a : (int64_t)b; }

/* Counts the room there is, after making enough of it for n. */
static __attribute__((noinline)) bool make_room(wk_ctx *c, wki_recorder *r, int64_t n) {
    size_t m = (size_t)n;
    if (!wki_rec_room(c, r->nkey + m * REF_WORDS, r->nmeta + m * META_WORDS, r->nbuf + m, r->nval + m))
        return false;
    int64_t room = (int64_t)((r->cap_key - r->nkey) / REF_WORDS);
    room = least(room, (r->cap_meta - r->nmeta) / META_WORDS);
    room = least(room, r->cap_buf - r->nbuf);
    r->room = least(room, r->cap_val - r->nval) - n;
    return true;
}

/* Room for one more op of this size, so that the appends below need no checks. */
static inline bool reserve(wk_ctx *c, wki_recorder *r, const wki_call *k) {
    int64_t n = 1 + k->nin + k->nout + k->nia + k->nva;
    r->room -= n;
    return __builtin_expect(r->room >= 0, 1) || make_room(c, r, n);
}

/* Sizes or strides. Copies all there is room for, which takes fewer instructions than what counts. */
static inline uint64_t *put_dims(uint64_t *w, const int64_t *v, int n) {
    memcpy(w, v, WK_MAX_DIMS * sizeof *v);
    return w + n;
}

static inline uint64_t *put_shape(uint64_t *w, const wki_tensor *t, int64_t off) {
    *w++ = (uint64_t)off;
    w = put_dims(w, t->size, t->ndim);
    return t->flags & WKI_F_PLAIN ? w : put_dims(w, t->stride, t->ndim);
}

static inline uint64_t kind_of(const wki_tensor *t) {
    return t->flags & WKI_F_PLAIN ? WKI_REF_PLAIN : WKI_REF_STRIDED;
}

/* The next buffer is t's storage from its offset on. Returns the bits that say so. */
static inline uint64_t add_external(wki_recorder *r, const wki_tensor *t, uint32_t root) {
    const wki_storage *s = t->st;
    uintptr_t addr = (uintptr_t)s->data + (size_t)t->off * wki_dtype_size((wk_dtype)t->dtype);
    return (uint64_t)wki_rec_capture(r, t, root) << 32 | WKI_REF_NEW | (uint64_t)s->pinned * WKI_REF_PINNED |
           (addr % 16 ? 0 : WKI_REF_ALIGNED) | (t->flags & WKI_F_WHOLE ? WKI_REF_DECL : 0);
}

/* A tensor whose storage has an external buffer already: the one that starts where t does, or another. */
static __attribute__((noinline)) uint64_t *put_external_again(wki_recorder *r, uint64_t *at,
                                                              const wki_tensor *t, uint64_t head) {
    uint32_t b = t->st->rec_buf;
    while (r->buf[b].off != t->off && r->buf[b].next_same)
        b = r->buf[b].next_same - 1;
    wki_rbuf *rb = &r->buf[b];
    if (rb->off != t->off) {
        rb->next_same = r->nbuf + 1;
        r->touched = true;
        at[0] = head | add_external(r, t, t->st->rec_buf) | WKI_REF_ALIAS | kind_of(t);
        at[1] = t->st->rec_buf;
        return put_shape(at + 2, t, 0);
    }
    head |= (uint64_t)b << 32;
    if (t->flags & rb->flags & WKI_F_WHOLE) {
        *at = head | WKI_REF_WHOLE;
        return at + 1;
    }
    if (t->flags & WKI_F_WHOLE) {
        rb->flags |= WKI_RB_WHOLE;
        r->touched = true;
        head |= WKI_REF_DECL;
    }
    *at = head | kind_of(t);
    return put_shape(at + 1, t, 0);
}

/* A tensor from outside the segment: one buffer per storage and offset. */
static inline uint64_t *put_external(wki_recorder *r, uint64_t *at, const wki_tensor *t, uint64_t head) {
    wki_storage *s = t->st;
    if (s->rec_epoch == r->epoch)
        return put_external_again(r, at, t, head);
    s->rec_epoch = r->epoch;
    s->rec_buf = r->nbuf;
    *at = head | add_external(r, t, r->nbuf) | kind_of(t);
    return put_shape(at + 1, t, 0);
}

/* Appends how an op sees t; returns the end of the stream. */
static inline uint64_t *put_ref(wki_recorder *r, uint64_t *at, const wki_tensor *t) {
    /* (uint64_t)t->dtype << WKI_REF_DTYPE | (uint64_t)t->ndim << WKI_REF_NDIM, which is how a slot has them */
    uint32_t flags_dtype_ndim;
    memcpy(&flags_dtype_ndim, &t->flags, sizeof flags_dtype_ndim);
    uint64_t head = flags_dtype_ndim & 0xffff00;
    if (!t->st->pending)
        return put_external(r, at, t, head);
    head |= (uint64_t)t->st->rec_buf << 32;
    if (t->flags & WKI_F_WHOLE) {
        *at = head | WKI_REF_WHOLE;
        return at + 1;
    }
    *at = head | kind_of(t);
    return put_shape(at + 1, t, t->off);
}

/* All that can fail, before anything is appended. */
static inline bool prepare(wk_ctx *c, wki_recorder *r, const wki_call *k) {
    if (!reserve(c, r, k))
        return false;
    for (int i = 0, n = k->nout; i < n; i++) {
        wki_tensor *t = k->out[i];
        t->st = wki_storage_new(c, (wk_device)k->dev, (size_t)t->numel * wki_dtype_size((wk_dtype)t->dtype),
                                false);
        if (!t->st)
            return false;
    }
    return true;
}

/* The next buffer is the storage of an output. */
static inline void add_output(wki_recorder *r, const wki_tensor *t) {
    wki_storage *s = t->st;
    uint32_t b = r->nbuf++;
    s->pending = 1;
    s->rec_epoch = r->epoch;
    s->rec_buf = b;
    r->buf[b] = (wki_rbuf){.st = s, .root = b, .flags = WKI_RB_WHOLE, .dtype = t->dtype};
    int64_t *m = r->meta + r->nmeta;
    r->nmeta += 1 + (size_t)t->ndim;
    *m = (int64_t)t->dtype << 8 | t->ndim;
    memcpy(m + 1, t->size, sizeof t->size);
}

static inline uint64_t head_word(const wki_call *k) {
    return k->op->id | (uint64_t)k->nin << 16 | (uint64_t)k->nout << 32 | (uint64_t)k->nia << 40 |
           (uint64_t)k->nva << 56;
}

static inline uint64_t *put_inputs(wki_recorder *r, uint64_t *w, const wki_call *k) {
    for (int i = 0, n = k->nin; i < n; i++) {
        const wki_tensor *t = k->in[i];
        if (!t)
            *w++ = WKI_REF_ABSENT;
        else
            w = put_ref(r, w, t);
    }
    return w;
}

/* Notes that the buffer of this reference, or the one it shares its storage with, is written in place. */
static inline void note_write(wki_recorder *r, uint64_t reference) {
    r->buf[r->buf[reference >> 32].root].flags |= WKI_RB_WRITTEN;
}

/* Appends how the op sees its inputs, and notes which of them it writes. */
static uint64_t *put_written(wki_recorder *r, uint64_t *w, const wki_call *k) {
    r->touched = true;
    for (int role = 0, i = 0, n = wki_role_size(k->op, k->nin); i < k->nin; role++) {
        bool written = wki_role_written(k->op, role);
        for (int end = i + n; i < end; i++) {
            uint64_t *at = w;
            w = put_ref(r, w, k->in[i]);
            if (written)
                note_write(r, *at);
        }
    }
    return w;
}

bool wki_record(wk_ctx *c, wki_call *k) {
    wki_recorder *r = c->rec;
    const wki_op *op = k->op;
    if (r->nops && k->dev != r->dev) {
        if (!wki_flush(c))
            return false;
        c->cur_op = op;
    }
    if (!r->nops) {
        r->dev = k->dev;
        r->rng_start = (op->flags & WKI_OP_RNG) ? k->rng_seq : c->rng_seq;
    }
    if (!prepare(c, r, k))
        return false;
    size_t nkey = r->nkey;
    uint32_t nbuf = r->nbuf;
    uint64_t *w = r->key + nkey;
    *w++ = head_word(k);
    if (op->writes)
        w = put_written(r, w, k);
    else
        w = put_inputs(r, w, k);
    for (int i = 0, n = k->nia; i < n; i++)
        *w++ = (uint64_t)k->ia[i];
    if (op->flags & WKI_OP_RNG)
        *w++ = k->rng_seq - r->rng_start;
    r->nkey = (size_t)(w - r->key);
    for (int i = 0, n = k->nva; i < n; i++)
        r->val[r->nval++] = k->va[i];
    for (int i = 0, n = k->nout; i < n; i++)
        add_output(r, k->out[i]);
    r->nref += (uint32_t)(k->nin + k->nout);
    k->rec_epoch = r->epoch;
    k->place = r->nops++;
    if (op->nin < 0)
        wki_rec_keep(c, k, nkey, nbuf);
    return true;
}
