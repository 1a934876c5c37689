/* The autograd executor: lets the op run, then writes down what its gradient will need. Calls core only. */
#include <string.h>

#include "core/core.h"

/* In-place ops: legal targets, and the version every saved copy is compared with. */
static bool note_writes(wk_ctx *c, const wki_call *k) {
    for (int i = 0; i < k->nin; i++) {
        if (!k->in[i] || !wki_call_writes(k, i))
            continue;
        wki_tensor *t = k->in[i];
        if (c->grad_mode && (t->flags & WKI_F_REQ))
            return wki_fail(c, WK_GRAD, "in-place write to input %d, which requires grad (turn grad mode off to update it)",
                            i);
        for (int d = 0; d < t->ndim && t->numel; d++)
            if (t->stride[d] == 0 && t->size[d] > 1)
                return wki_fail(c, WK_INVALID, "in-place write to an expanded tensor: several elements share memory");
    }
    for (int i = 0; i < k->nin; i++)
        if (k->in[i] && wki_call_writes(k, i))
            wki_storage_bump(k->in[i]->st);
    return true;
}

static bool needs_meta(const wki_call *k) {
    const wki_op *op = k->op;
    if (op->flags & WKI_OP_KEEP_META)
        return true;
    if (!(op->flags & WKI_OP_BROADCAST))
        return false;
    const wki_tensor *o = k->out[0];
    for (int i = 0; i < k->nin; i++) {
        const wki_tensor *t = k->in[i];
        if (t && (t->ndim != o->ndim || memcmp(t->size, o->size, (size_t)o->ndim * 8)))
            return true;
    }
    return false;
}

static void keep_meta(wki_meta *m, const wki_tensor *t) {
    m->ndim = t->ndim;
    m->dtype = t->dtype;
    memcpy(m->size, t->size, (size_t)t->ndim * 8);
}

static bool record(wk_ctx *c, const wki_call *k) {
    const wki_op *op = k->op;
    int nmeta = needs_meta(k) ? k->nin : 0;
    wki_node *n = wki_node_new(c, k, nmeta);
    if (!n)
        return false;
    for (int i = 0; i < k->nin; i++) {
        wki_tensor *t = k->in[i];
        if (!t)
            continue;
        if ((t->flags & WKI_F_REQ) && (op->diff >> i & 1)) {
            if (t->fn) {
                n->edge[i] = (wki_edge){.fn = t->fn, .out_idx = t->out_idx};
                t->fn->refs++;
            } else {
                n->edge[i] = (wki_edge){.leaf = t};
                t->refs++;
            }
        }
        if (op->save_in >> i & 1) {
            n->in[i] = (wki_saved){.t = t, .version = wki_storage_version(t->st)};
            t->refs++;
        }
        if (nmeta)
            keep_meta(&n->meta[i], t);
    }
    for (int i = 0; i < k->nout; i++) {
        wki_tensor *t = k->out[i];
        if (op->save_out >> i & 1) {
            n->out[i] = (wki_saved){.t = t, .version = wki_storage_version(t->st)};
            t->refs++;
            t->self_saved++;
        }
        if (n->out_meta)
            keep_meta(&n->out_meta[i], t);
        if (wki_dtype_kind((wk_dtype)t->dtype) != 'F')
            continue;
        t->fn = n;
        t->out_idx = (uint8_t)i;
        t->flags |= WKI_F_REQ;
        n->refs++;
    }
    wki_node_release(c, n); /* the outputs hold it now */
    return true;
}

static bool apply(wk_ctx *c, wki_call *k, const wki_executor *self) {
    const wki_op *op = k->op;
    bool req = false;
    if ((op->flags & WKI_OP_INPLACE) && !note_writes(c, k))
        return false;
    if (c->grad_mode && op->diff)
        for (int i = 0; i < k->nin; i++)
            if (k->in[i] && (k->in[i]->flags & WKI_F_REQ) && (op->diff >> i & 1))
                req = true;
    if (!self->next->apply(c, k, self->next))
        return false;
    return req ? record(c, k) : true;
}

const wki_executor wki_exec_autograd = {apply, &wki_exec_base};
