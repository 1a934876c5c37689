/* Repeats: an in-place update of many tensors, recorded before over the same ones, is appended as it was. An optimizer's step
 * has up to four inputs a parameter, each of which the recorder would look at five times; here it is once.
 *
 * The words of such an op follow from its inputs alone: which tensor each of them is (for a result of the segment: its buffer
 * and shape), which buffer its storage has here or that it has none yet, and what is declared of that. All of it is compared
 * with what was noted when the words were made. Calls core only. */
#include <string.h>

#include "graph/graph.h"

/* Updates kept per context: of several optimizers, and of one whose parameters take turns. */
enum { KEPT = 4 };

typedef struct input {
    const wk_tensor *handle; /* NULL: a result of the segment */
    int64_t off;             /* of a result */
    uint32_t buf;            /* its storage's */
    uint8_t flags;           /* of the tensor: PLAIN, and WHOLE or not */
    bool fresh;              /* the storage has its first buffer from this op */
    bool declares;           /* the buffer has its shape from this op */
    uint8_t pinned;
    bool written;
} input;

typedef struct update {
    const wki_op *op;
    uint64_t *key; /* the op's words */
    input *in;
    size_t nin, nkey, cap_key, cap_in;
    uint32_t nbuf; /* buffers before it: at least one */
    uint8_t dev;
    uint64_t used; /* when last; 0: never */
} update;

struct wki_repeats {
    update u[KEPT];
    uint64_t clock;
};

void wki_repeats_free(wki_recorder *r) {
    for (int i = 0; r->rep && i < KEPT; i++) {
        wki_free(r->rep->u[i].key);
        wki_free(r->rep->u[i].in);
    }
    wki_free(r->rep);
    r->rep = NULL;
}

/* ---- comparing and appending --------------------------------------------------------------------------------------- */

/* Is t, from outside the segment, what it was, and known to the segment as it was? */
static inline bool same_outside(const wki_recorder *r, const input *p, const wki_tensor *t) {
    const wki_storage *s = t->st;
    if (wki_handle(t) != p->handle || s->pinned != p->pinned)
        return false;
    if (p->fresh)
        return s->rec_epoch != r->epoch;
    if (s->rec_epoch != r->epoch || s->rec_buf != p->buf)
        return false;
    const wki_rbuf *b = &r->buf[p->buf];
    return !(b->flags & WKI_RB_WHOLE) == p->declares && b->off == t->off;
}

/* Is t a result in the buffer that it was, of the shape of the first role's tensor? */
static inline bool same_result(const input *p, const wki_tensor *t, const wki_tensor *first) {
    const wki_storage *s = t->st;
    return s->pending && s->rec_buf == p->buf && t->off == p->off && t->ctx == first->ctx &&
           t->dtype == first->dtype && wki_shapes_equal(t, first);
}

static bool same_inputs(const wki_recorder *r, const update *u, wki_tensor *const *in) {
    size_t n = u->nin / u->op->roles;
    for (size_t i = 0, j = 0; i < u->nin; i++, j = j + 1 == n ? 0 : j + 1) {
        const input *p = &u->in[i];
        const wki_tensor *t = in[i];
        if (!t || (t->flags & (WKI_F_PLAIN | WKI_F_WHOLE | WKI_F_POISON)) != p->flags)
            return false;
        if (!(p->handle ? same_outside(r, p, t) : same_result(p, t, in[j])))
            return false;
    }
    return true;
}

static void append(wki_recorder *r, const update *u, const wki_call *k) {
    memcpy(r->key + r->nkey, u->key, u->nkey * sizeof *u->key);
    r->nkey += u->nkey;
    for (int i = 0; i < k->nva; i++)
        r->val[r->nval++] = k->va[i];
    for (size_t i = 0; i < u->nin; i++) {
        const input *p = &u->in[i];
        const wki_tensor *t = k->in[i];
        if (p->fresh) {
            t->st->rec_epoch = r->epoch;
            t->st->rec_buf = wki_rec_capture(r, t, p->buf);
        }
        if (p->declares)
            r->buf[p->buf].flags |= WKI_RB_WHOLE;
        if (p->written) {
            r->buf[r->buf[p->buf].root].flags |= WKI_RB_WRITTEN;
            wki_storage_bump(t->st);
        }
    }
    r->touched = true;
    r->room = 0; /* none of this was counted */
    r->nref += (uint32_t)u->nin;
    r->nops++;
    r->repeated++;
}

/* Not with grad mode on: then an update of what requires grad is an error. */
static bool may_repeat(const wk_ctx *c) { return c->rec->in_call && !c->rec->all_anew && !c->grad_mode; }

/* Where there is none, recording anew makes some, or fails as it does. */
static bool has_room(const wki_recorder *r, const update *u, const wki_call *k) {
    return r->nkey + u->nkey <= r->cap_key && r->nbuf + u->nin <= r->cap_buf &&
           r->nval + (size_t)k->nva <= r->cap_val;
}

bool wki_rec_repeat(wk_ctx *c, const wki_call *k) {
    wki_recorder *r = c->rec;
    if (!may_repeat(c) || !r->rep)
        return false;
    for (int i = 0; i < KEPT; i++) {
        update *u = &r->rep->u[i];
        if (!u->used || u->op != k->op || u->nin != (size_t)k->nin || u->nbuf != r->nbuf ||
            u->dev != r->dev || !same_inputs(r, u, k->in))
            continue;
        if (!has_room(r, u, k))
            return false;
        u->used = ++r->rep->clock;
        append(r, u, k);
        return true;
    }
    return false;
}

/* ---- keeping ------------------------------------------------------------------------------------------------------- */

/* Notes an input by its reference at *w, and moves on to the next. False: it is none of the usual ones, which are contiguous,
   and whole if they are from outside. */
static bool note(input *p, const uint64_t **w, const wki_tensor *t) {
    uint64_t word = *(*w)++;
    const wki_storage *s = t->st;
    uint8_t flags = t->flags & (WKI_F_PLAIN | WKI_F_WHOLE);
    *p = (input){.handle = s->pending ? NULL : wki_handle(t),
                 .off = t->off,
                 .buf = (uint32_t)(word >> 32),
                 .flags = flags,
                 .pinned = s->pinned,
                 .fresh = (word & WKI_REF_NEW) != 0,
                 .declares = (word & (WKI_REF_NEW | WKI_REF_DECL)) == WKI_REF_DECL};
    if (!(flags & WKI_F_PLAIN) || s->rec_buf != p->buf)
        return false;
    if ((word & 3) != WKI_REF_WHOLE)
        *w += 1 + t->ndim;
    return s->pending || flags & WKI_F_WHOLE;
}

void wki_rec_keep(wk_ctx *c, const wki_call *k, size_t nkey, uint32_t nbuf) {
    wki_recorder *r = c->rec;
    if (!may_repeat(c) || !nbuf || k->nia) /* the first op of a segment says more: the device */
        return;
    if (!r->rep && !(r->rep = wki_calloc(1, sizeof *r->rep)))
        return;
    update *u = &r->rep->u[0];
    for (int i = 1; i < KEPT; i++)
        u = r->rep->u[i].used < u->used ? &r->rep->u[i] : u;
    size_t nin = (size_t)k->nin;
    u->used = 0;
    if (!wki_rec_grow((void **)&u->in, &u->cap_in, nin, sizeof *u->in) ||
        !wki_rec_grow((void **)&u->key, &u->cap_key, r->nkey - nkey, sizeof *u->key))
        return;
    const uint64_t *w = r->key + nkey + 1;
    size_t n = nin / k->op->roles, i = 0;
    for (int role = 0; i < nin; role++) {
        for (size_t end = i + n; i < end; i++) {
            if (!note(&u->in[i], &w, k->in[i]) ||
                (!role && !u->in[i].handle)) /* others are compared with the first role's */
                return;
            u->in[i].written = wki_role_written(k->op, role);
        }
    }
    u->op = k->op;
    u->nin = nin;
    u->nkey = r->nkey - nkey;
    memcpy(u->key, r->key + nkey, u->nkey * sizeof *u->key);
    u->nbuf = nbuf;
    u->dev = r->dev;
    u->used = ++r->rep->clock;
}
