/* The recorder: appends an op to the key stream in some tens of nanoseconds. Calls core only. */
#include <string.h>

#include "graph/graph.h"

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
    wki_free(r);
    c->rec = NULL;
}

bool wki_rec_captured(const wk_ctx *c, const wki_storage *s) {
    return c->rec->nops && s->rec_epoch == c->rec->epoch;
}

bool wki_rec_writes(const wk_ctx *c, const wki_storage *s) {
    return wki_rec_captured(c, s) && c->rec->buf[s->rec_buf].written;
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
    r->epoch++;
    for (uint32_t i = 0; i < n; i++) {
        wki_storage *s = r->buf[i].st;
        if (!s)
            continue;
        if (r->buf[i].external) {
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
    wki_rec_reset(c, false);
    wki_undo_rollback(c);
}

void wki_rec_discard_failed(wk_ctx *c) {
    if (c->rec->nops)
        wki_recorder_discard(c);
    wki_undo_commit(c);
    c->journal = false;
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

static __attribute__((noinline)) bool grow_all(wk_ctx *c, wki_recorder *r, size_t key, size_t meta, size_t nbuf, size_t nval) {
    return (key <= r->cap_key || grow(c, (void **)&r->key, &r->cap_key, key, sizeof *r->key)) &&
           (meta <= r->cap_meta || grow(c, (void **)&r->meta, &r->cap_meta, meta, sizeof *r->meta)) &&
           (nbuf <= r->cap_buf || grow(c, (void **)&r->buf, &r->cap_buf, nbuf, sizeof *r->buf)) &&
           (nval <= r->cap_val || grow(c, (void **)&r->val, &r->cap_val, nval, sizeof *r->val));
}

/* Words that one reference and one output take at most; appending writes no further than that. */
enum { REF_WORDS = 3 + 2 * WK_MAX_DIMS, META_WORDS = 1 + WK_MAX_DIMS };

/* Room for one more op of this size, so that the appends below need no checks. */
static inline bool reserve(wk_ctx *c, wki_recorder *r, const wki_call *k) {
    size_t key = r->nkey + 2 + (size_t)k->nin * REF_WORDS + (size_t)k->nia, meta = r->nmeta + (size_t)k->nout * META_WORDS;
    size_t nbuf = r->nbuf + (size_t)k->nin + (size_t)k->nout, nval = r->nval + (size_t)k->nva;
    bool fits = (key <= r->cap_key) & (meta <= r->cap_meta) & (nbuf <= r->cap_buf) & (nval <= r->cap_val);
    return __builtin_expect(fits, 1) || grow_all(c, r, key, meta, nbuf, nval);
}

/* The buffer of a storage that exists outside the segment, seen from offset `off`; *fresh says it is new here. */
static uint32_t external_buffer(wki_recorder *r, wki_storage *s, const wki_tensor *t, bool *fresh) {
    uint32_t last = 0;
    bool known = s->rec_epoch == r->epoch;
    if (known)
        for (uint32_t b = s->rec_buf;; b = r->buf[b].next_same - 1) {
            if (r->buf[b].off == t->off)
                return b;
            last = b;
            if (!r->buf[b].next_same)
                break;
        }
    uint32_t b = r->nbuf++;
    r->buf[b] = (wki_rbuf){.st = s, .off = t->off, .root = known ? s->rec_buf : b, .external = 1, .dtype = t->dtype};
    s->refs++;
    if (known) {
        r->buf[last].next_same = b + 1;
    } else {
        s->rec_epoch = r->epoch;
        s->rec_buf = b;
    }
    *fresh = true;
    return b;
}

/* Sizes or strides. Copies all there is room for, which takes fewer instructions than what counts. */
static inline uint64_t *put_dims(uint64_t *w, const int64_t *v, int n) {
    memcpy(w, v, WK_MAX_DIMS * sizeof *v);
    return w + n;
}

/* Appends how an op sees t; returns the end of the stream. */
static inline uint64_t *put_ref(wki_recorder *r, uint64_t *at, const wki_tensor *t) {
    wki_storage *s = t->st;
    uint64_t head = (uint64_t)t->ndim << 8 | (uint64_t)t->dtype << 12, *w = at + 1;
    uint32_t b;
    int64_t off = 0;
    if (s->pending) {
        b = s->rec_buf;
        off = t->off;
    } else {
        bool fresh = false;
        b = external_buffer(r, s, t, &fresh);
        if (fresh) {
            uintptr_t addr = (uintptr_t)s->data + (size_t)t->off * wki_dtype_size((wk_dtype)t->dtype);
            head |= WKI_REF_NEW | (s->pinned ? WKI_REF_PINNED : 0) | (addr % 16 == 0 ? WKI_REF_ALIGNED : 0);
            if (r->buf[b].root != b) {
                head |= WKI_REF_ALIAS;
                *w++ = r->buf[b].root;
            }
        }
    }
    head |= (uint64_t)b << 32;
    bool whole = t->flags & WKI_F_WHOLE, plain = t->flags & WKI_F_PLAIN;
    if (whole && r->buf[b].whole) {
        *at = head | WKI_REF_WHOLE;
        return w;
    }
    if (whole && plain) {
        r->buf[b].whole = 1;
        head |= WKI_REF_DECL;
    }
    *at = head | (plain ? WKI_REF_PLAIN : WKI_REF_STRIDED);
    *w++ = (uint64_t)off;
    w = put_dims(w, t->size, t->ndim);
    return plain ? w : put_dims(w, t->stride, t->ndim);
}

/* All that can fail, before anything is appended. */
static inline bool prepare(wk_ctx *c, wki_recorder *r, wki_call *k, wk_device dev) {
    for (int i = 0; i < k->nin; i++)
        if (k->in[i] && __builtin_expect(k->in[i]->st->failed, 0))
            return wki_fail(c, WK_STATE, "input %d is the result of a call that failed", i);
    if (!reserve(c, r, k))
        return false;
    for (int i = 0; i < k->nout; i++) {
        wki_tensor *t = k->out[i];
        t->st = wki_storage_new(c, dev, (size_t)t->numel * wki_dtype_size((wk_dtype)t->dtype), false);
        if (!t->st)
            return false;
    }
    return true;
}

static inline wk_device call_device(const wk_ctx *c, const wki_call *k) {
    for (int i = 0; i < k->nin; i++)
        if (k->in[i])
            return (wk_device)k->in[i]->st->dev;
    return (wk_device)c->dev;
}

/* The next buffer is the storage of an output. */
static inline void add_output(wki_recorder *r, const wki_tensor *t) {
    wki_storage *s = t->st;
    uint32_t b = r->nbuf++;
    s->pending = 1;
    s->rec_epoch = r->epoch;
    s->rec_buf = b;
    r->buf[b] = (wki_rbuf){.st = s, .root = b, .whole = 1, .dtype = t->dtype};
    int64_t *m = r->meta + r->nmeta;
    r->nmeta += 1 + (size_t)t->ndim;
    *m = (int64_t)t->dtype << 8 | t->ndim;
    memcpy(m + 1, t->size, sizeof t->size);
}

bool wki_record(wk_ctx *c, wki_call *k) {
    wki_recorder *r = c->rec;
    wk_device dev = call_device(c, k);
    const wki_op *op = k->op;
    if (r->nops && dev != r->dev) {
        if (!wki_flush(c))
            return false;
        c->cur_op = op;
    }
    if (!r->nops) {
        r->dev = (uint8_t)dev;
        r->rng_start = (op->flags & WKI_OP_RNG) ? k->rng_seq : c->rng_seq;
    }
    if (!prepare(c, r, k, dev))
        return false;
    uint64_t *w = r->key + r->nkey;
    *w++ = op->id | (uint64_t)k->nin << 16 | (uint64_t)k->nout << 32 | (uint64_t)k->nia << 40 | (uint64_t)k->nva << 56;
    for (int i = 0; i < k->nin; i++) {
        if (!k->in[i]) {
            *w++ = WKI_REF_ABSENT;
            continue;
        }
        w = put_ref(r, w, k->in[i]);
        if (op->writes && wki_call_writes(k, i))
            r->buf[k->in[i]->st->rec_buf].written = 1;
    }
    for (int i = 0; i < k->nia; i++)
        *w++ = (uint64_t)k->ia[i];
    if (op->flags & WKI_OP_RNG)
        *w++ = k->rng_seq - r->rng_start;
    r->nkey = (size_t)(w - r->key);
    for (int i = 0; i < k->nva; i++)
        r->val[r->nval++] = k->va[i];
    for (int i = 0; i < k->nout; i++)
        add_output(r, k->out[i]);
    r->nref += (uint32_t)(k->nin + k->nout);
    r->nops++;
    return true;
}
