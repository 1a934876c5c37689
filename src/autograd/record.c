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

static inline void note_input(wki_edge *e, const wki_op *op, int i, wki_tensor *t) {
    e->fn = NULL;
    e->leaf = NULL;
    e->saved = NULL;
    if (!t)
        return;
    if ((t->flags & WKI_F_REQ) && (op->diff >> i & 1)) {
        e->out_idx = t->out_idx;
        if ((e->fn = t->fn)) {
            e->fn->refs++;
        } else {
            e->leaf = t;
            t->refs++;
        }
    }
    if (op->save_in >> i & 1) {
        e->saved = t;
        e->version = t->st->version;
        t->refs++;
    }
}

static inline void note_output(wki_node *n, const wki_op *op, int i, wki_tensor *t) {
    wki_saved *s = &wki_node_out(n)[i];
    s->t = NULL;
    if (op->save_out >> i & 1) {
        s->t = t;
        s->version = t->st->version;
        t->refs++;
        t->self_saved++;
    }
    if (wki_dtype_kind((wk_dtype)t->dtype) != 'F')
        return;
    t->fn = n;
    t->out_idx = (uint8_t)i;
    t->flags |= WKI_F_REQ;
    n->refs++;
}

static bool record(wk_ctx *c, const wki_call *k) {
    const wki_op *op = k->op;
    int nin = k->nin, nout = k->nout;
    wki_node *n = wki_node_new(c, k, needs_meta(k) ? nin : 0);
    if (!n)
        return false;
    for (int i = 0; i < nin; i++)
        note_input(&n->in[i], op, i, k->in[i]);
    wki_meta *meta = wki_node_meta(n);
    for (int i = 0; meta && i < nin; i++)
        keep_meta(&meta[i], k->in[i]);
    for (int i = 0; i < nout; i++)
        note_output(n, op, i, k->out[i]);
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
