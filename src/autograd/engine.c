/* Backward: walks the autograd records once, newest first, iteratively (a chain of 100,000 ops must not recurse). VJPs run
 * through wki_apply, so one engine serves eager, recorded and double backward. Calls core and the op wrappers. */
#include <stdlib.h>
#include <string.h>

#include "core/core.h"
#include "ops_gen.h"

typedef struct wki_engine {
    wk_ctx *c;
    const struct wki_engine *outer; /* whose VJP, a user's, asked for this backward; or NULL */
    uint32_t epoch;                 /* that the records it reached carry */
    const char *function;           /* that was called, for messages */
    wki_node **heap;                /* ready records, newest (largest seq) on top */
    size_t nheap, cap_heap;
    /* Every reached record, the roots' first; these hold references, and the roots all others. */
    wki_node **all;
    size_t nall, cap_all, nroots;
    bool create_graph, retain;
    bool plain, kept; /* of all leaves, from one root, once; what it appends may be kept */
    /* How the records hang together, as far as the recorded stream does not say it: see describe. */
    uint64_t *word;
    size_t nword, cap_word;
    uint32_t rec_epoch;        /* the segment they must be of; 0: they are not described */
    uint8_t out_idx;           /* which output of its record the root is */
    wki_tensor *const *inputs; /* with respect to these only, or NULL: all leaves */
    int ninputs;
    wki_tensor **result; /* per input, internal reference */
} engine;

static __attribute__((noinline)) bool grow(wk_ctx *c, wki_node ***v, size_t *cap) {
    size_t n = *cap ? *cap * 2 : 256;
    wki_node **p = wki_realloc(*v, n * sizeof *p);
    if (!p)
        return wki_fail(c, WK_NOMEM, "no host memory for backward's work list");
    *v = p;
    *cap = n;
    return true;
}

static inline bool heap_push(engine *e, wki_node *n) {
    if (__builtin_expect(e->nheap == e->cap_heap, 0) && !grow(e->c, &e->heap, &e->cap_heap))
        return false;
    size_t i = e->nheap++;
    while (i && e->heap[(i - 1) / 2]->seq < n->seq) {
        e->heap[i] = e->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    e->heap[i] = n;
    return true;
}

static wki_node *heap_pop(engine *e) {
    wki_node *top = e->heap[0], *n = e->heap[--e->nheap];
    size_t i = 0;
    for (;;) {
        size_t k = 2 * i + 1;
        if (k >= e->nheap)
            break;
        if (k + 1 < e->nheap && e->heap[k + 1]->seq > e->heap[k]->seq)
            k++;
        if (e->heap[k]->seq <= n->seq)
            break;
        e->heap[i] = e->heap[k];
        i = k;
    }
    e->heap[i] = n;
    return top;
}

/* A record holds the state of one traversal. */
static __attribute__((noinline)) bool free_of(const engine *outer, const wki_node *n) {
    for (; outer; outer = outer->outer)
        if (n->epoch == outer->epoch)
            return wki_fail(outer->c, WK_GRAD,
                            "backward, in the gradient of a user's op, through the graph that it is part of "
                            "(wk_detach its inputs)");
    return true;
}

static inline bool reach(engine *e, wki_node *n) {
    if (n->epoch == e->epoch)
        return true;
    if (__builtin_expect(e->outer != NULL, 0) && !free_of(e->outer, n))
        return false;
    n->epoch = e->epoch;
    n->deps = 0;
    n->order = (uint32_t)e->nall;
    if (__builtin_expect(e->nall == e->cap_all, 0) && !grow(e->c, &e->all, &e->cap_all))
        return false;
    e->all[e->nall++] = n;
    return true;
}

static __attribute__((cold, noinline)) bool freed_graph(engine *e, const wki_node *n) {
    e->c->cur_op = n->op;
    e->c->caller = n->caller;
    return wki_fail(e->c, WK_GRAD,
                    "backward a second time through a graph that was freed (retain_graph keeps it)");
}

/* ---- describing ---------------------------------------------------------------------------------------------------- */

/* A record is described by the op's place in the stream (of a view, which no stream has, by op and attributes), by how long
   before the root it was made, which is the order of the walk, and by where its inputs' gradients go. That is all that a
   backward depends on besides the stream and its values, where all begins in the segment and no leaf has a gradient yet. */
enum { TO_NOWHERE, TO_LEAF, TO_RECORD };

static __attribute__((noinline)) bool grow_words(engine *e, size_t need) {
    size_t cap = 2 * need + 512;
    uint64_t *p = wki_realloc(e->word, cap * sizeof *p);
    if (!p)
        return false;
    e->word = p;
    e->cap_word = cap;
    return true;
}

/* Begins to describe n; returns where the words of its inputs go. NULL, and nothing is described, when it cannot be or there is
   no memory. */
static inline uint64_t *describe(engine *e, const wki_node *n) {
    bool of_stream = n->rec_epoch == e->rec_epoch;
    size_t need = e->nword + 2 + n->nin + n->nia;
    if (n->op->flags & WKI_OP_USER || !(of_stream || n->op->flags & WKI_OP_VIEW) ||
        (__builtin_expect(need > e->cap_word, 0) && !grow_words(e, need))) {
        e->rec_epoch = 0;
        return NULL;
    }
    uint64_t *w = e->word + e->nword;
    w[0] = of_stream ? n->place : ((uint64_t)n->op->id + 1) << 32;
    w[1] = (e->all[0]->seq - n->seq) << 8 | e->out_idx;
    e->nword += 2 + n->nin;
    if (!of_stream) {
        memcpy(w + 2 + n->nin, wki_node_ia(n), n->nia * sizeof(int64_t));
        e->nword += n->nia;
    }
    return w + 2;
}

static inline uint64_t where_to(engine *e, const wki_edge *to) {
    if (to->fn)
        return (uint64_t)to->fn->order << 16 | to->out_idx << 8 | TO_RECORD;
    if (!to->leaf)
        return TO_NOWHERE;
    if (to->leaf->grad || !to->leaf->user) /* of one that nobody holds the handle will be another leaf's */
        e->rec_epoch = 0;
    return (uint64_t)(uintptr_t)wki_handle(to->leaf) | TO_LEAF;
}

/* Reaches everything below the roots and counts, per record, the edges that will deliver a gradient. */
static bool discover(engine *e) {
    for (size_t i = 0; i < e->nall; i++) { /* e->all grows while we walk it */
        wki_node *n = e->all[i];
        if (n->flags & WKI_NODE_CONSUMED)
            return freed_graph(e, n);
        uint64_t *word = e->rec_epoch ? describe(e, n) : NULL;
        for (int j = 0; j < n->nin; j++) {
            const wki_edge *to = &n->in[j];
            if (to->fn) {
                if (!reach(e, to->fn))
                    return false;
                to->fn->deps++;
            }
            if (word)
                word[j] = where_to(e, to);
        }
    }
    return true;
}

static inline void consume(wki_node *n) {
    n->flags |= WKI_NODE_CONSUMED;
    wki_node_drop_saved(n);
}

/* In place of the walk, what an equal one left behind. Everything below the root is done with. */
static bool splice(engine *e, const wki_splice *s) {
    for (size_t i = 0; i < e->nall; i++)
        consume(e->all[i]);
    return wki_splice_apply(e->c, s);
}

/* acc += g, as an op; both are internal. Returns the new accumulator with an internal reference, or NULL. */
static wki_tensor *accumulate(wk_ctx *c, wki_tensor *acc, wki_tensor *g) {
    wki_tensor *s = g;
    if (acc) {
        s = wki_add(c, acc, g);
        if (s == c->poison)
            return NULL;
    }
    wki_tensor_ref(s);
    if (acc)
        wki_tensor_unref(acc);
    return s;
}

static bool leaf_gradient(engine *e, wki_tensor *leaf, wki_tensor *g) {
    wk_ctx *c = e->c;
    if (e->inputs)
        return true; /* only the named inputs are wanted; they are collected by `deliver` */
    if (!wki_undo_grad(c, leaf))
        return false;
    wki_tensor *s = g, *old = leaf->grad;
    if (old) {
        s = wki_add(c, old, g);
        if (s == c->poison)
            return false;
    } else if (g->self_saved || g->scope_pos == 0 || !(g->flags & WKI_F_PLAIN) || g->refs) {
        /* a gradient shared with another place gets its own handle, so that later accumulation stays separate */
        s = e->create_graph ? wki_alias(c, g) : wki_detached(c, g);
        if (s == c->poison)
            return false;
    }
    wki_tensor_user_up(s);
    leaf->grad = s;
    if (old)
        wki_tensor_user_down(old);
    return true;
}

/* Adds g to the results of the named inputs that the edge leads to. */
static __attribute__((noinline)) bool collect(engine *e, const wki_edge *to, wki_tensor *g) {
    for (int i = 0; i < e->ninputs; i++) {
        wki_tensor *t = e->inputs[i];
        if (to->leaf ? t == to->leaf : t->fn == to->fn && t->out_idx == to->out_idx) {
            wki_tensor *s = accumulate(e->c, e->result[i], g);
            if (!s)
                return false;
            e->result[i] = s;
        }
    }
    return true;
}

/* Hands g to the edge's target. */
static inline bool deliver(engine *e, const wki_edge *to, wki_tensor *g) {
    if (e->ninputs && !collect(e, to, g))
        return false;
    if (to->leaf)
        return leaf_gradient(e, to->leaf, g);
    wki_tensor **acc = &wki_node_gacc(to->fn)[to->out_idx];
    wki_tensor *s = accumulate(e->c, *acc, g);
    if (!s)
        return false;
    *acc = s;
    return true;
}

static inline void drop_gradients(wki_node *n) {
    wki_tensor **g = wki_node_gacc(n);
    for (int i = 0; i < n->nout; i++)
        if (g[i]) {
            wki_tensor_unref(g[i]);
            g[i] = NULL;
        }
}

enum { MAX_IN = 64 };

/* The gradients of a record's inputs into gin, NULL where there is none. */
static bool differentiate(engine *e, wki_node *n, wki_tensor **gin) {
    wk_ctx *c = e->c;
    bool need[MAX_IN];
    if (n->nin > MAX_IN)
        return wki_fail(c, WK_INTERNAL, "%s has too many inputs to differentiate", n->op->name);
    if (!n->op->vjp) {
        c->cur_op = n->op;
        return wki_fail(c, WK_GRAD, "%s has no gradient", n->op->name);
    }
    for (int i = 0; i < n->nin;
         i++) { /* both arrays are set as far as the op reaches: this runs for every record */
        gin[i] = NULL;
        need[i] = n->in[i].fn || n->in[i].leaf;
    }
    c->caller = n->caller;
    wki_vjp_args a = {.c = c, .node = n, .gout = wki_node_gacc(n), .gin = gin, .need = need};
    n->op->vjp(&a);
    return !c->failed;
}

/* Runs one record's VJP and passes the results on. */
static bool step(engine *e, wki_node *n) {
    wki_tensor *gin[MAX_IN];
    const int nin = n->nin;
    const wki_meta *meta = n->op->flags & WKI_OP_BROADCAST ? wki_node_meta(n) : NULL;
    bool any = false;
    for (int i = 0; i < n->nout; i++)
        any |= wki_node_gacc(n)[i] != NULL;
    if (any && !differentiate(e, n, gin))
        return false;
    for (int i = 0; i < nin; i++) {
        const wki_edge *to = &n->in[i];
        if (any && gin[i] && (to->fn || to->leaf)) {
            wki_tensor *g = meta ? wki_sum_to(e->c, gin[i], meta[i].ndim, meta[i].size) : gin[i];
            if (g == e->c->poison || !deliver(e, to, g))
                return false;
        }
        if (to->fn && --to->fn->deps == 0 && !heap_push(e, to->fn))
            return false;
    }
    drop_gradients(n);
    if (!e->retain)
        consume(n);
    return true;
}

static wki_tensor *root_gradient(engine *e, wki_tensor *root, wki_tensor *given) {
    wk_ctx *c = e->c;
    if (given) {
        if (given->ndim != root->ndim || memcmp(given->size, root->size, (size_t)root->ndim * 8) != 0) {
            char a[128], b[128];
            wki_fail(c, WK_SHAPE, "%s: gradient of shape %s given for a root of shape %s", e->function,
                     wki_shape_text(a, sizeof a, given->ndim, given->size),
                     wki_shape_text(b, sizeof b, root->ndim, root->size));
            return NULL;
        }
        if (given->dtype != root->dtype || given->st->dev != root->st->dev) {
            wki_fail(c, WK_DTYPE, "%s: gradient of %s on %s given for a root of %s on %s", e->function,
                     wk_dtype_name((wk_dtype)given->dtype), wk_device_name((wk_device)given->st->dev),
                     wk_dtype_name((wk_dtype)root->dtype), wk_device_name((wk_device)root->st->dev));
            return NULL;
        }
        return given;
    }
    if (root->numel != 1) {
        char a[128];
        wki_fail(c, WK_GRAD, "%s: a root of shape %s; it must have one element, or a gradient must be given",
                 e->function, wki_shape_text(a, sizeof a, root->ndim, root->size));
        return NULL;
    }
    wki_tensor *g = wki_full_like(c, root, 1.0);
    return g == c->poison ? NULL : g;
}

static bool run(engine *e, wki_tensor *const *roots, int nroots, wki_tensor *const *grads) {
    wk_ctx *c = e->c;
    for (int i = 0; i < nroots; i++) {
        if (!(roots[i]->flags & WKI_F_REQ))
            return wki_fail(c, WK_GRAD, "%s: root %d does not require grad: nothing to differentiate",
                            e->function, i);
        if (roots[i]->st->failed)
            return wki_fail(c, WK_STATE, "%s: root %d is the result of a call that failed", e->function, i);
        if (roots[i]->fn && !reach(e, roots[i]->fn))
            return false;
    }
    e->nroots = e->nall;
    for (size_t i = 0; i < e->nroots; i++)
        e->all[i]->refs++;
    if (e->plain && e->nroots) { /* no record: the root is a leaf */
        e->rec_epoch = wki_splice_epoch(c);
        e->out_idx = roots[0]->out_idx;
    }
    if (!discover(e))
        return false;
    wki_splice *s = e->rec_epoch ? wki_splice_find(c, e->word, e->nword) : NULL;
    if (s)
        return splice(e, s);
    e->kept = e->rec_epoch && wki_splice_begin(c);
    for (int i = 0; i < nroots; i++) {
        wki_tensor *g = root_gradient(e, roots[i], grads ? grads[i] : NULL);
        wki_edge to = {
            .fn = roots[i]->fn, .leaf = roots[i]->fn ? NULL : roots[i], .out_idx = roots[i]->out_idx};
        if (!g || !deliver(e, &to, g))
            return false;
    }
    for (size_t i = 0; i < e->nroots; i++)
        if (e->all[i]->deps == 0 && !heap_push(e, e->all[i]))
            return false;
    while (e->nheap) {
        wk_scope_begin(c);
        bool ok = step(e, heap_pop(e));
        wk_scope_end(c);
        if (!ok)
            return false;
    }
    return true;
}

static void cleanup(engine *e, bool ok) {
    wk_ctx *c = e->c;
    for (size_t i = 0; !ok && i < e->nall; i++)
        drop_gradients(e->all[i]);
    for (size_t i = 0; i < e->nroots; i++)
        wki_node_release(c, e->all[i]);
    wki_free(c->bw_all);
    wki_free(c->bw_heap);
    wki_free(c->bw_word);
    c->bw_word = e->word;
    c->cap_bw_word = e->cap_word;
    c->bw_all = e->all;
    c->cap_bw_all = e->cap_all;
    c->bw_heap = e->heap;
    c->cap_bw_heap = e->cap_heap;
}

static void backward(engine *e, wki_tensor *const *roots, int nroots, wki_tensor *const *grads,
                     wki_tensor **out) {
    wk_ctx *c = e->c;
    bool mode = c->grad_mode;
    e->plain = nroots == 1 && !grads && !e->inputs && !e->retain;
    e->all = c->bw_all; /* the context keeps the lists, so a steady state allocates nothing */
    e->cap_all = c->cap_bw_all;
    e->heap = c->bw_heap;
    e->cap_heap = c->cap_bw_heap;
    e->word = c->bw_word;
    e->cap_word = c->cap_bw_word;
    c->bw_all = c->bw_heap = NULL;
    c->bw_word = NULL;
    c->cap_bw_all = c->cap_bw_heap = c->cap_bw_word = 0;
    c->grad_mode = e->create_graph;
    if (!++c->epoch) /* a long run wraps it; 0 is of records that no backward has seen */
        c->epoch = 1;
    e->epoch = c->epoch;
    e->outer = c->bw_now;
    c->bw_now = e;
    wki_undo_mark before = wki_undo_begin(c);
    wk_scope_begin(c);
    bool ok = run(e, roots, nroots, grads) && !c->failed; /* for a scope there may have been no memory */
    wk_scope_end(c);
    if (ok && e->kept)
        wki_splice_end(c, e->word, e->nword, e->all, e->nall);
    wki_undo_end(c, before, ok);
    c->grad_mode = mode;
    for (int i = 0; out && i < e->ninputs; i++) {
        wki_tensor *r = e->result[i];
        bool leaf = r && e->create_graph && (r->flags & WKI_F_REQ) &&
                    !r->fn; /* the caller's own tensor: no second leaf */
        if (r && ok)        /* a fresh handle in the caller's scope */
            out[i] = leaf ? r : e->create_graph ? wki_alias(c, r) : wki_detached(c, r);
        else
            out[i] = ok ? NULL : c->poison;
        if (r)
            wki_tensor_unref(r);
    }
    cleanup(e, ok);
    c->bw_now = e->outer;
}

void wk_backward(wk_tensor *h) {
    wki_tensor *loss = wki_enter(h, __builtin_return_address(0));
    if (!loss || loss->ctx->failed)
        return;
    wk_ctx *c = loss->ctx;
    c->cur_op = NULL;
    if (loss->flags & WKI_F_POISON) {
        wki_fail_poison(c, "wk_backward: the loss");
        return;
    }
    engine e = {.c = c, .function = "wk_backward"};
    backward(&e, &loss, 1, NULL, NULL);
}

void wk_backward_options_init(wk_backward_options *o) {
    *o = (wk_backward_options){.struct_size = sizeof *o};
}

void wk_backward_ex(wk_tensor *const *roots, int nroots, const wk_backward_options *given) {
    const void *caller = __builtin_return_address(0);
    enum { MAX_ROOTS = 64 };
    wki_tensor *r[MAX_ROOTS], *g[MAX_ROOTS], *in[MAX_ROOTS], *out[MAX_ROOTS], *res[MAX_ROOTS] = {0};
    wk_ctx *c = NULL;
    wk_backward_options opt, *o = &opt;
    wk_backward_options_init(o);
    bool known = wki_take_struct(o, sizeof *o, given);
    int nin = o->inputs ? o->ninputs : 0;
    for (int i = 0; i < nroots && !c; i++)
        c = roots[i] ? wki_slot(roots[i])->ctx : NULL;
    for (int i = 0; i < nin && !c; i++)
        c = o->inputs[i] ? wki_slot(o->inputs[i])->ctx : NULL;
    bool ok =
        known && nroots > 0 && nroots <= MAX_ROOTS && nin >= 0 && nin <= MAX_ROOTS && (nin == 0 || o->out);
    for (int i = 0; i < nroots && ok; i++) {
        r[i] = wki_enter(roots[i], caller);
        ok = r[i] != NULL && r[i]->ctx == c;
    }
    for (int i = 0; i < nroots && ok && o->grads; i++) {
        g[i] = o->grads[i] ? wki_enter(o->grads[i], caller) : NULL;
        ok = !o->grads[i] || (g[i] && g[i]->ctx == c);
    }
    for (int i = 0; i < nin && ok; i++) {
        in[i] = wki_enter(o->inputs[i], caller);
        ok = in[i] && in[i]->ctx == c;
    }
    if (c && !ok && !c->failed) {
        wki_begin(c, caller);
        if (!known)
            wki_wrong_struct(c, "wk_backward_options");
        wki_fail(c, WK_INVALID, /* the first error stays */
                 "wk_backward_ex: 1 to %d roots and at most %d inputs with an `out`, all live handles of one "
                 "context",
                 MAX_ROOTS, MAX_ROOTS);
    }
    for (int i = 0; ok && i < nroots; i++)
        if (r[i]->flags & WKI_F_POISON || (o->grads && g[i] && g[i]->flags & WKI_F_POISON))
            wki_fail_poison(c, r[i]->flags & WKI_F_POISON ? "wk_backward_ex: a root"
                                                          : "wk_backward_ex: the gradient of a root");
    for (int i = 0; ok && i < nin; i++)
        if (in[i]->flags & WKI_F_POISON)
            wki_fail_poison(c, "wk_backward_ex: an input");
    if (!c || !ok || c->failed) {
        for (int i = 0; i < nin && o->out; i++)
            o->out[i] = c ? wki_handle(c->poison) : NULL;
        return;
    }
    wki_begin(c, caller);
    engine e = {.c = c,
                .function = "wk_backward_ex",
                .create_graph = o->create_graph,
                .retain = o->retain_graph || o->create_graph,
                .inputs = nin ? in : NULL,
                .ninputs = nin,
                .result = res};
    backward(&e, r, nroots, o->grads ? g : NULL, out);
    for (int i = 0; i < nin; i++)
        o->out[i] = out[i] ? wki_handle(out[i]) : NULL;
}

wk_tensor *wk_grad(wk_tensor *h) {
    wki_tensor *t = wki_enter(h, __builtin_return_address(0));
    return t && t->grad ? wki_handle(t->grad) : NULL;
}

void wki_drop_grad(wki_tensor *t) {
    wki_tensor *g = t->grad;
    if (!g)
        return;
    wk_ctx *c = t->ctx;
    if ((!g->st->pending || wki_undo_part(c)) && !wki_undo_grad(c, t)) /* as wki_undo_forget has it */
        return;
    t->grad = NULL;
    wki_tensor_user_down(g);
}

void wk_zero_grad(wk_tensor *h) {
    wki_tensor *t = wki_enter(h, __builtin_return_address(0));
    if (t)
        wki_drop_grad(t);
}
