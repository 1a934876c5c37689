/* Autograd records: one allocation each, from size-classed free lists of the context. Calls core only. */
#include <string.h>

#include "core/core.h"

enum { CLASS_STEP = 128, CLASSES = 16, BIG = 0xffff };

wki_node *wki_node_new(wk_ctx *c, const wki_call *k, int nmeta) {
    bool out_meta = k->nout > 1;
    size_t bytes = sizeof(wki_node) + (size_t)k->nin * sizeof(wki_edge) +
                   ((size_t)k->nin + (size_t)k->nout) * sizeof(wki_saved) + (size_t)k->nout * sizeof(wki_tensor *) +
                   (size_t)k->nia * 8 + (size_t)k->nva * 8 + (size_t)(nmeta + (out_meta ? k->nout : 0)) * sizeof(wki_meta);
    size_t cls = (bytes + CLASS_STEP - 1) / CLASS_STEP - 1;
    wki_node *n;
    if (cls < CLASSES && c->free_nodes[cls]) {
        n = c->free_nodes[cls];
        c->free_nodes[cls] = n->next;
    } else if (cls < CLASSES) {
        enum { BATCH = 32 };
        size_t each = (cls + 1) * CLASS_STEP;
        char *p = wki_pool_bytes(c, each * BATCH);
        if (!p) {
            wki_fail(c, WK_NOMEM, "no host memory for an autograd record");
            return NULL;
        }
        for (int i = 1; i < BATCH; i++) {
            wki_node *f = (wki_node *)(p + (size_t)i * each);
            f->next = c->free_nodes[cls];
            c->free_nodes[cls] = f;
        }
        n = (wki_node *)p;
    } else {
        n = wki_malloc(bytes);
        if (!n) {
            wki_fail(c, WK_NOMEM, "no host memory for an autograd record");
            return NULL;
        }
        cls = BIG;
    }
    memset(n, 0, bytes);
    n->op = k->op;
    n->refs = 1;
    n->nin = (uint16_t)k->nin;
    n->nout = (uint16_t)k->nout;
    n->nia = (uint16_t)k->nia;
    n->nva = (uint16_t)k->nva;
    n->size_class = (uint16_t)cls;
    n->seq = c->node_seq++;
    n->rng_seq = k->rng_seq;
    n->caller = c->caller;
    char *at = (char *)(n + 1);
    n->edge = (wki_edge *)at;
    at += (size_t)k->nin * sizeof(wki_edge);
    n->in = (wki_saved *)at;
    at += (size_t)k->nin * sizeof(wki_saved);
    n->out = (wki_saved *)at;
    at += (size_t)k->nout * sizeof(wki_saved);
    n->gacc = (wki_tensor **)at;
    at += (size_t)k->nout * sizeof(wki_tensor *);
    n->ia = (int64_t *)at;
    if (k->nia)
        memcpy(at, k->ia, (size_t)k->nia * 8);
    at += (size_t)k->nia * 8;
    n->va = (double *)at;
    if (k->nva)
        memcpy(at, k->va, (size_t)k->nva * 8);
    at += (size_t)k->nva * 8;
    if (nmeta)
        n->meta = (wki_meta *)at;
    at += (size_t)nmeta * sizeof(wki_meta);
    if (out_meta)
        n->out_meta = (wki_meta *)at;
    return n;
}

/* Frees what backward needs; the record itself stays for those that still point to it. */
void wki_node_drop_saved(wki_node *n) {
    for (int i = 0; i < n->nin; i++) {
        wki_tensor *t = n->in[i].t;
        n->in[i].t = NULL;
        if (t)
            wki_tensor_unref(t);
    }
    for (int i = 0; i < n->nout; i++) {
        wki_tensor *t = n->out[i].t;
        n->out[i].t = NULL;
        if (t) {
            t->self_saved--;
            wki_tensor_unref(t);
        }
    }
}

/* Iterative: a chain of 100,000 records must not recurse. Records whose count fell to 0 wait on c->dying. */
void wki_node_release(wk_ctx *c, wki_node *n) {
    if (--n->refs)
        return;
    n->next = c->dying;
    c->dying = n;
    if (c->reaping)
        return;
    c->reaping = true;
    while ((n = c->dying)) {
        c->dying = n->next;
        wki_node_drop_saved(n);
        for (int i = 0; i < n->nin; i++) {
            wki_edge e = n->edge[i];
            n->edge[i] = (wki_edge){0};
            if (e.fn)
                wki_node_release(c, e.fn);
            if (e.leaf)
                wki_tensor_unref(e.leaf);
        }
        for (int i = 0; i < n->nout; i++)
            if (n->gacc[i]) {
                wki_tensor_unref(n->gacc[i]);
                n->gacc[i] = NULL;
            }
        if (n->size_class == BIG) {
            wki_free(n);
        } else {
            n->next = c->free_nodes[n->size_class];
            c->free_nodes[n->size_class] = n;
        }
    }
    c->reaping = false;
}

static wki_tensor *unpack(wk_ctx *c, const wki_node *n, const wki_saved *s, const char *what, int i) {
    if (!s->t) {
        c->cur_op = n->op;
        wki_fail(c, WK_GRAD, "%s %d was freed: backward went through this graph already (retain_graph keeps it)", what, i);
        return wki_poison(c);
    }
    if (s->t->st && wki_storage_version(s->t->st) != s->version) {
        c->cur_op = n->op;
        c->caller = n->caller;
        wki_fail(c, WK_VERSION, "%s %d, needed for the gradient, was modified in place (version %u, saved at %u)", what, i,
                 wki_storage_version(s->t->st), s->version);
        return wki_poison(c);
    }
    return s->t;
}

wki_tensor *wki_saved_in(wk_ctx *c, const wki_node *n, int i) { return unpack(c, n, &n->in[i], "input", i); }

wki_tensor *wki_saved_out(wk_ctx *c, const wki_node *n, int i) {
    wki_tensor *t = unpack(c, n, &n->out[i], "output", i);
    if (c->grad_mode && !t->fn && !(t->flags & WKI_F_POISON)) {
        /* The user's handle is gone and with it the back pointer: differentiating again needs it. */
        t->fn = (wki_node *)(uintptr_t)n;
        t->fn->refs++;
    }
    return t;
}
