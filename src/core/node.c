/* Autograd records: one allocation each, from size-classed free lists of the context. Calls core only. */
#include <string.h>

#include "core/core.h"

enum { CLASS_STEP = WKI_LINE, CLASSES = 32, BIG = CLASSES };

static wki_node *out_of_memory(wk_ctx *c) {
    wki_fail(c, WK_NOMEM, "no host memory for an autograd record");
    return NULL;
}

/* The class's free list is empty: memory for a batch of records, of which the first is returned. */
static __attribute__((noinline)) wki_node *batch(wk_ctx *c, size_t cls) {
    enum { BATCH = 32 };
    size_t each = (cls + 1) * CLASS_STEP;
    char *p = wki_pool_bytes(c, each * BATCH);
    if (!p)
        return out_of_memory(c);
    for (int i = 1; i < BATCH; i++) {
        wki_node *f = (wki_node *)(p + (size_t)i * each);
        f->next = c->free_nodes[cls];
        c->free_nodes[cls] = f;
    }
    return (wki_node *)p;
}

wki_node *wki_node_new(wk_ctx *c, const wki_call *k, int nmeta) {
    size_t nin = (size_t)k->nin, nout = (size_t)k->nout, nia = (size_t)k->nia, nva = (size_t)k->nva;
    size_t bytes = sizeof(wki_node) + nin * sizeof(wki_edge) +
                   nout * (sizeof(wki_saved) + sizeof(wki_tensor *)) + (nia + nva) * 8 +
                   (size_t)nmeta * sizeof(wki_meta);
    size_t cls = (bytes - 1) / CLASS_STEP;
    wki_node *n;
    if (cls >= CLASSES) {
        if (!(n = wki_malloc(bytes)))
            return out_of_memory(c);
        cls = BIG;
    } else if ((n = c->free_nodes[cls])) {
        c->free_nodes[cls] = n->next;
    } else if (!(n = batch(c, cls))) {
        return NULL;
    }
    n->op = k->op;
    n->refs = 1;
    n->deps = n->epoch = 0;
    n->nin = (uint16_t)nin;
    n->nia = (uint16_t)nia;
    n->nout = (uint8_t)nout;
    n->nva = (uint8_t)nva;
    n->size_class = (uint8_t)cls;
    n->flags = nmeta ? WKI_NODE_META : 0;
    n->rec_epoch = k->rec_epoch;
    n->place = k->place;
    n->seq = c->node_seq++;
    n->caller = c->caller;
    wki_tensor **gacc = wki_node_gacc(n);
    if (nout == 1) /* mostly, and faster than the loop */
        gacc[0] = NULL;
    else
        memset(gacc, 0, nout * sizeof *gacc);
    if (nia)
        memcpy(wki_node_ia(n), k->ia, nia * sizeof *k->ia);
    if (nva)
        memcpy(wki_node_va(n), k->va, nva * sizeof *k->va);
    return n;
}

static inline void unsave_out(wki_saved *s) {
    wki_tensor *t = s->t;
    if (!t)
        return;
    s->t = NULL;
    t->self_saved--;
    wki_tensor_unref(t);
}

/* Frees what backward needs; the record itself stays for those that still point to it. */
void wki_node_drop_saved(wki_node *n) {
    for (int i = 0; i < n->nin; i++) {
        wki_tensor *t = n->in[i].saved;
        if (t) {
            n->in[i].saved = NULL;
            wki_tensor_unref(t);
        }
    }
    wki_saved *out = wki_node_out(n);
    for (int i = 0; i < n->nout; i++)
        unsave_out(&out[i]);
}

/* Frees the records that wait on c->dying, and those that only they held. Iterative: a chain of 100,000 records must not
   recurse. None has a gradient waiting: backward drops those before it lets go of its roots. */
static void reap(wk_ctx *c) {
    wki_node *n;
    c->reaping = true;
    while ((n = c->dying)) {
        c->dying = n->next;
        if (!(n->flags & WKI_NODE_CONSUMED))
            wki_node_drop_saved(n);
        for (int i = 0; i < n->nin; i++) {
            const wki_edge *e = &n->in[i];
            if (e->fn)
                wki_node_release(c, e->fn);
            else if (e->leaf)
                wki_tensor_unref(e->leaf);
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

void wki_node_free(wk_ctx *c, wki_node *n) {
    n->next = c->dying;
    c->dying = n;
    if (!c->reaping)
        reap(c);
}

static wki_tensor *unpack(wk_ctx *c, const wki_node *n, wki_tensor *t, uint32_t version, const char *what,
                          int i) {
    if (!t) {
        c->cur_op = n->op;
        wki_fail(c, WK_GRAD,
                 "%s %d was freed: backward went through this graph already (retain_graph keeps it)", what,
                 i);
        return wki_poison(c);
    }
    if (t->st && t->st->version != version) {
        c->cur_op = n->op;
        c->caller = n->caller;
        wki_fail(c, WK_VERSION,
                 "%s %d, needed for the gradient, was modified in place (version %u, saved at %u)", what, i,
                 t->st->version, version);
        return wki_poison(c);
    }
    return t;
}

wki_tensor *wki_saved_in(wk_ctx *c, const wki_node *n, int i) {
    return unpack(c, n, n->in[i].saved, n->in[i].version, "input", i);
}

wki_tensor *wki_saved_out(wk_ctx *c, const wki_node *n, int i) {
    const wki_saved *s = &wki_node_out(n)[i];
    wki_tensor *t = unpack(c, n, s->t, s->version, "output", i);
    if (c->grad_mode && !t->fn && !(t->flags & WKI_F_POISON)) {
        /* The user's handle is gone and with it the back pointer: differentiating again needs it. */
        t->fn = (wki_node *)(uintptr_t)n;
        t->fn->refs++;
    }
    return t;
}
