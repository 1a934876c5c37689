/* The autograd executor: lets the op run, then writes down what its gradient will need. Calls core only. */
#include <string.h>

#include "core/core.h"

static bool expanded(const wki_tensor *t) {
    if (t->flags & WKI_F_PLAIN)
        return false;
    for (int d = 0; d < t->ndim; d++)
        if (t->stride[d] == 0 && t->size[d] > 1)
            return true;
    return false;
}

/* In-place ops: legal targets, and the version every saved copy is compared with. */
static bool note_writes(wk_ctx *c, const wki_call *k) {
    int n = wki_role_size(k->op, k->nin);
    for (int i = 0; c->grad_mode && i < k->nin; i++)
        if (k->in[i]->flags & WKI_F_REQ)
            return wki_fail(
                c, WK_GRAD,
                wki_role_written(k->op, i / n)
                    ? "in-place write to input %d, which requires grad (turn grad mode off to update it)"
                    : "input %d requires grad, which an in-place write would lose (wk_detach it, or turn "
                      "grad mode off)",
                i);
    for (int role = 0, i = 0; i < k->nin; role++, i += n) {
        if (!wki_role_written(k->op, role))
            continue;
        for (int j = i; j < i + n; j++)
            if (expanded(k->in[j]))
                return wki_fail(c, WK_INVALID,
                                "`%s` is an expanded view: its elements share memory and cannot be written",
                                k->op->in_names[role]);
    }
    for (int role = 0, i = 0; i < k->nin; role++, i += n) {
        if (!wki_role_written(k->op, role))
            continue;
        for (int j = i; j < i + n; j++)
            wki_storage_bump(k->in[j]->st);
    }
    return true;
}

static bool needs_meta(const wki_call *k) {
    const wki_op *op = k->op;
    if (op->flags & WKI_OP_KEEP_META)
        return true;
    if (!(op->flags & WKI_OP_BROADCAST))
        return false;
    for (int i = 0; i < k->nin; i++)
        if (k->in[i] && !wki_shapes_equal(k->in[i], k->out[0]))
            return true;
    return false;
}

static inline void keep_meta(wki_meta *m, const wki_tensor *t) {
    m->ndim = 0;
    if (!t)
        return;
    m->ndim = t->ndim;
    m->dtype = t->dtype;
    memcpy(m->size, t->size, sizeof m->size); /* all of it: cheaper than what counts */
}

static inline void save(wki_saved *s, wki_tensor *t) {
    s->t = t;
    s->version = t->st->version;
    t->refs++;
}

/* Where the gradient of an input goes; how the tape says it. */
static inline uint64_t edge_to(wki_edge *e, wki_tensor *t, uint32_t epoch) {
    wki_node *p = t->fn;
    if (!p) {
        e->leaf = t;
        t->refs++;
        return (uint64_t)(uintptr_t)wki_handle(t) | WKI_TO_LEAF;
    }
    e->fn = p;
    e->out_idx = t->out_idx;
    p->refs++;
    return p->tape_epoch == epoch ? (uint64_t)p->tape << 16 | (uint64_t)t->out_idx << 8 | WKI_TO_RECORD
                                  : WKI_TO_OUTSIDE;
}

static inline uint64_t note_input(wki_node *n, const wki_op *op, int i, wki_tensor *t, uint32_t epoch) {
    wki_edge *e = &n->edge[i];
    wki_saved *s = &n->in[i];
    uint64_t word = WKI_TO_NOWHERE;
    e->fn = NULL;
    e->leaf = NULL;
    s->t = NULL;
    if (!t)
        return word;
    if ((t->flags & WKI_F_REQ) && (op->diff >> i & 1))
        word = edge_to(e, t, epoch);
    if (op->save_in >> i & 1)
        save(s, t);
    return word;
}

static inline void note_output(wki_node *n, const wki_op *op, int i, wki_tensor *t) {
    n->out[i].t = NULL;
    if (op->save_out >> i & 1) {
        save(&n->out[i], t);
        t->self_saved++;
    }
    if (wki_dtype_kind((wk_dtype)t->dtype) != 'F')
        return;
    t->fn = n;
    t->out_idx = (uint8_t)i;
    t->flags |= WKI_F_REQ;
    n->refs++;
}

/* The tape gets the records of recorded ops, and of views. Room for k's there, or NULL. */
static inline uint64_t *tape_room(wk_ctx *c, const wki_call *k) {
    wki_tape *t = &c->tape;
    const wki_op *op = k->op;
    if (!t->on || (op->flags & WKI_OP_VIEW ? k->nva || op->save_in || op->save_out : !k->out[0]->st->pending))
        return NULL;
    size_t need = t->n + 1 + (size_t)k->nin + (size_t)k->nia;
    if (__builtin_expect(need > t->cap, 0) && !wki_tape_grow(c, need))
        return NULL;
    return t->word + t->n;
}

/* Completes what the tape says of a record, after a word for each input: its op, the op's place in the stream and, of a
   view, which the stream does not have, the attributes. */
static inline void put_on_tape(wk_ctx *c, wki_node *n, const wki_call *k, uint64_t *w) {
    wki_tape *t = &c->tape;
    bool view = k->op->flags & WKI_OP_VIEW;
    w[0] = (view ? 0 : (uint64_t)k->place << 32) | (uint64_t)k->op->id << 16 | n->nin;
    w += 1 + n->nin;
    for (int i = 0, m = view ? k->nia : 0; i < m; i++)
        *w++ = (uint64_t)k->ia[i];
    t->n = (size_t)(w - t->word);
    n->tape_epoch = t->epoch;
    n->tape = t->records++;
}

static bool record(wk_ctx *c, const wki_call *k) {
    const wki_op *op = k->op;
    int nin = k->nin, nout = k->nout;
    uint32_t epoch = c->tape.epoch;
    wki_node *n = wki_node_new(c, k, needs_meta(k) ? nin : 0);
    if (!n)
        return false;
    uint64_t *tape = tape_room(c, k);
    for (int i = 0; i < nin; i++) {
        uint64_t word = note_input(n, op, i, k->in[i], epoch);
        if (tape)
            tape[1 + i] = word;
    }
    if (n->meta)
        for (int i = 0; i < nin; i++)
            keep_meta(&n->meta[i], k->in[i]);
    for (int i = 0; i < nout; i++)
        note_output(n, op, i, k->out[i]);
    if (tape)
        put_on_tape(c, n, k, tape);
    wki_node_release(c, n); /* the outputs hold it now */
    return true;
}

static inline bool wants_record(const wk_ctx *c, const wki_call *k) {
    const wki_op *op = k->op;
    if (!c->grad_mode || !op->diff)
        return false;
    for (int i = 0; i < k->nin; i++)
        if ((op->diff >> i & 1) && k->in[i] && (k->in[i]->flags & WKI_F_REQ))
            return true;
    return false;
}

/* Two kinds of call need more than passing on. They stand apart, so that the others need no stack frame here. */
static __attribute__((noinline)) bool apply_noted(wk_ctx *c, wki_call *k, const wki_executor *next,
                                                  bool req) {
    if ((k->op->flags & WKI_OP_INPLACE) && !note_writes(c, k))
        return false;
    return next->apply(c, k, next) && (!req || record(c, k));
}

static bool apply(wk_ctx *c, wki_call *k, const wki_executor *self) {
    bool req = wants_record(c, k);
    if (req || (k->op->flags & WKI_OP_INPLACE))
        return apply_noted(c, k, self->next, req);
    return self->next->apply(c, k, self->next);
}

const wki_executor wki_exec_autograd = {apply, &wki_exec_base};
