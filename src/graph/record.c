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

/* Room for one more op of this size, so that the appends below need no checks. */
static bool reserve(wk_ctx *c, wki_recorder *r, const wki_call *k) {
    size_t key = r->nkey + 4 + (size_t)k->nin * (3 + 2 * WK_MAX_DIMS) + (size_t)k->nia;
    size_t meta = r->nmeta + (size_t)k->nout * (1 + WK_MAX_DIMS);
    size_t nbuf = r->nbuf + (size_t)k->nin + (size_t)k->nout, nval = r->nval + (size_t)k->nva, cap;
    if (key > r->cap_key && !grow(c, (void **)&r->key, &r->cap_key, key, sizeof *r->key))
        return false;
    if (meta > r->cap_meta && !grow(c, (void **)&r->meta, &r->cap_meta, meta, sizeof *r->meta))
        return false;
    if (nbuf > r->cap_buf) {
        cap = r->cap_buf;
        if (!grow(c, (void **)&r->buf, &cap, nbuf, sizeof *r->buf))
            return false;
        r->cap_buf = (uint32_t)cap;
    }
    if (nval > r->cap_val) {
        cap = r->cap_val;
        if (!grow(c, (void **)&r->val, &cap, nval, sizeof *r->val))
            return false;
        r->cap_val = (uint32_t)cap;
    }
    return true;
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

static void append_ref(wki_recorder *r, const wki_tensor *t) {
    wki_storage *s = t->st;
    uint64_t w = (uint64_t)t->ndim << 8 | (uint64_t)t->dtype << 12;
    uint64_t *key = r->key;
    size_t n = r->nkey + 1;
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
            w |= WKI_REF_NEW | (s->pinned ? WKI_REF_PINNED : 0) | (addr % 16 == 0 ? WKI_REF_ALIGNED : 0);
            if (r->buf[b].root != b) {
                w |= WKI_REF_ALIAS;
                key[n++] = r->buf[b].root;
            }
        }
    }
    w |= (uint64_t)b << 32;
    if ((t->flags & WKI_F_WHOLE) && r->buf[b].whole) {
        key[r->nkey] = w | WKI_REF_WHOLE;
        r->nkey = n;
        return;
    }
    bool plain = t->flags & WKI_F_PLAIN;
    if ((t->flags & WKI_F_WHOLE) && plain) {
        r->buf[b].whole = 1;
        w |= WKI_REF_DECL;
    }
    key[r->nkey] = w | (plain ? WKI_REF_PLAIN : WKI_REF_STRIDED);
    key[n++] = (uint64_t)off;
    for (int i = 0; i < t->ndim; i++)
        key[n++] = (uint64_t)t->size[i];
    if (!plain)
        for (int i = 0; i < t->ndim; i++)
            key[n++] = (uint64_t)t->stride[i];
    r->nkey = n;
}

/* All that can fail, before anything is appended. */
static bool prepare(wk_ctx *c, wki_recorder *r, wki_call *k, wk_device dev) {
    for (int i = 0; i < k->nin; i++) {
        const wki_storage *s = k->in[i] ? k->in[i]->st : NULL;
        if (s && __builtin_expect(!s->data && s->bytes && !s->pending, 0))
            return wki_fail(c, WK_STATE, "input %d is the result of a call that failed", i);
    }
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

static wk_device call_device(const wk_ctx *c, const wki_call *k) {
    for (int i = 0; i < k->nin; i++)
        if (k->in[i])
            return (wk_device)k->in[i]->st->dev;
    return (wk_device)c->dev;
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
    r->key[r->nkey++] = op->id | (uint64_t)k->nin << 16 | (uint64_t)k->nout << 32 | (uint64_t)k->nia << 40 |
                        (uint64_t)k->nva << 56;
    for (int i = 0; i < k->nin; i++) {
        if (!k->in[i]) {
            r->key[r->nkey++] = WKI_REF_ABSENT;
            continue;
        }
        append_ref(r, k->in[i]);
        if (op->writes && wki_call_writes(k, i))
            r->buf[k->in[i]->st->rec_buf].written = 1;
    }
    for (int i = 0; i < k->nia; i++)
        r->key[r->nkey++] = (uint64_t)k->ia[i];
    if (op->flags & WKI_OP_RNG)
        r->key[r->nkey++] = k->rng_seq - r->rng_start;
    for (int i = 0; i < k->nva; i++)
        r->val[r->nval++] = k->va[i];
    for (int i = 0; i < k->nout; i++) {
        wki_tensor *t = k->out[i];
        wki_storage *s = t->st;
        s->pending = 1;
        s->rec_epoch = r->epoch;
        s->rec_buf = r->nbuf;
        r->buf[r->nbuf] = (wki_rbuf){.st = s, .root = r->nbuf, .whole = 1, .dtype = t->dtype};
        r->nbuf++;
        r->meta[r->nmeta++] = (int64_t)t->dtype << 8 | t->ndim;
        for (int d = 0; d < t->ndim; d++)
            r->meta[r->nmeta++] = t->size[d];
    }
    r->nref += (uint32_t)(k->nin + k->nout);
    r->nops++;
    return true;
}
