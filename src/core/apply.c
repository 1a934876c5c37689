/* Applying an op: handle checks, promotion, inference, the way down the executor stack. The hot path of the library. */
#include <stdio.h>
#include <string.h>

#include "core/core.h"
#include "ops_gen.h"

wki_tensor *wki_enter_failed(const wk_tensor *h, const void *caller) {
    if (!h)
        return NULL;
    wki_tensor *t = wki_slot(h);
    wki_begin(t->ctx, caller);
    wki_fail(t->ctx, WK_HANDLE, "use of a tensor handle that was freed (generation %u, now %u)",
             wki_handle_gen(h), t->gen);
    return NULL;
}

static bool bad_call(wk_ctx *c, wki_call *k) {
    for (int i = 0; i < k->nout; i++)
        k->out[i] = c->poison;
    return false;
}

/* Casts the inputs to their common dtype and applies the op to those. */
static __attribute__((noinline)) bool promote(wk_ctx *c, wki_call *k) {
    wki_tensor *cast[8], *const *given = k->in;
    int best = -1;
    for (int i = 0; i < k->nin; i++)
        if (k->in[i] && (best < 0 || wki_dtype_ranks[k->in[i]->dtype] > wki_dtype_ranks[best]))
            best = k->in[i]->dtype;
    const wki_op *op = k->op;
    for (int i = 0; i < k->nin; i++) {
        cast[i] = k->in[i];
        if (k->in[i] && k->in[i]->dtype != best) {
            cast[i] = wki_cast(c, k->in[i], best);
            if (cast[i] == c->poison)
                return bad_call(c, k);
        }
    }
    c->cur_op = op;
    k->in = cast;
    bool ok = wki_apply(c, k);
    k->in = given;
    return ok;
}

/* Number of elements and PLAIN, where inference did not know them. */
static inline void view_numel(wki_tensor *t) {
    int64_t n = 1, differ = 0;
    for (int i = t->ndim - 1; i >= 0; i--) {
        differ |= t->size[i] != 1 ? t->stride[i] ^ n : 0;
        n *= t->size[i];
    }
    t->numel = n;
    if (!differ || n == 0)
        t->flags |= WKI_F_PLAIN;
}

/* A view's flags: contiguous, and whole only if it shows its storage exactly as its base does. */
static inline void view_flags(wki_tensor *t, const wki_tensor *base) {
    if (!(t->flags & WKI_F_PLAIN))
        view_numel(t);
    if ((base->flags & WKI_F_WHOLE) && (t->flags & WKI_F_PLAIN) && t->off == base->off &&
        wki_shapes_equal(t, base))
        t->flags |= WKI_F_WHOLE;
}

static __attribute__((cold, noinline)) bool poison_written(wk_ctx *c, const wki_op *op, int i) {
    char what[96];
    snprintf(what, sizeof what, "%s: input %d", op->name, i);
    return wki_fail_poison(c, what);
}

/* Says what inputs_ok found wrong; false. Poison makes poison, and no new error but where a write would be left out. */
static __attribute__((cold, noinline)) bool wrong_input(wk_ctx *c, const wki_call *k) {
    const wki_op *op = k->op;
    const wki_tensor *first = NULL;
    for (int i = 0; i < k->nin; i++) {
        const wki_tensor *t = k->in[i];
        if (!t) {
            if (op->nin >= 0 && !(op->optional >> i & 1))
                return wki_fail(c, WK_INVALID, "argument `%s` is missing",
                                op->in_names ? op->in_names[i] : "input");
            continue;
        }
        if (t->flags & WKI_F_POISON)
            return op->writes ? poison_written(c, op, i) : false;
        if (t->ctx != c)
            return wki_fail(c, WK_HANDLE,
                            "input %d belongs to another context (wk_share makes a handle here)", i);
        if (t->st->failed)
            return wki_fail(c, WK_STATE, "input %d is the result of a call that failed", i);
        first = first ? first : t;
        if (t->st->dev != first->st->dev)
            return wki_fail(c, WK_DEVICE, "inputs are on %s and %s",
                            wk_device_name((wk_device)first->st->dev), wk_device_name((wk_device)t->st->dev));
    }
    return wki_fail(c, WK_INTERNAL, "inputs that fit were refused");
}

/* What is the same for every op: inputs present, sound, of this context and on one device. *mixed: of several dtypes. */
static inline bool inputs_ok(wk_ctx *c, wki_call *k, bool *mixed) {
    enum { NONE = 256 };
    wki_tensor *const *in = k->in;
    unsigned dev = NONE, dtype = 0, differ = 0;
    for (int i = 0, n = k->nin; i < n; i++) {
        const wki_tensor *t = in[i];
        if (!t) {
            if (k->op->nin >= 0 && !(k->op->optional >> i & 1)) /* a variadic row looks itself */
                return wrong_input(c, k);
            continue;
        }
        if (__builtin_expect(t->flags & WKI_F_POISON || t->ctx != c, 0))
            return wrong_input(c, k);
        const wki_storage *s = t->st;
        if (dev == NONE) {
            dev = s->dev;
            dtype = t->dtype;
        }
        if (__builtin_expect(s->failed || s->dev != dev, 0))
            return wrong_input(c, k);
        differ |= t->dtype ^ dtype;
    }
    k->dev = dev == NONE ? c->dev : (uint8_t)dev;
    *mixed = differ;
    return true;
}

/* Gives back the outputs made so far. */
static __attribute__((cold, noinline)) bool undo(wk_ctx *c, wki_call *k, int made) {
    for (int i = 0; i < made; i++) {
        wki_tensor_disown(k->out[i]);
        wki_tensor_user_down(k->out[i]);
    }
    return bad_call(c, k);
}

static __attribute__((cold, noinline)) bool infer_failed(wk_ctx *c, wki_call *k) {
    for (int i = 0; i < k->nout; i++)
        k->out[i]->st = NULL; /* a view's base, which is not retained yet */
    return undo(c, k, k->nout);
}

/* Past inference. A sequence number that was drawn is drawn again, unless a discarded recording took back more. */
static __attribute__((cold, noinline)) bool apply_failed(wk_ctx *c, wki_call *k) {
    if ((k->op->flags & WKI_OP_RNG) && c->rng_seq == k->rng_seq + 1)
        c->rng_seq = k->rng_seq;
    return undo(c, k, k->nout);
}

bool wki_apply(wk_ctx *c, wki_call *k) {
    const wki_op *op = k->op;
    bool mixed = false;
    c->cur_op = op;
    c->stats.ops++;
    if (__builtin_expect(c->failed, 0))
        return bad_call(c, k);
    if (op->nin < 0 && wki_rec_repeat(c, k))
        return true;
    if (!inputs_ok(c, k, &mixed))
        return bad_call(c, k);
    if (mixed && (op->flags & WKI_OP_PROMOTE))
        return promote(c, k);
    wki_tensor **out = k->out;
    int nout = k->nout;
    for (int i = 0; i < nout; i++)
        if (!(out[i] = wki_tensor_new(c)))
            return undo(c, k, i);
    if (!op->infer(c, k))
        return infer_failed(c, k);
    if (op->flags & WKI_OP_VIEW) {
        out[0]->st->refs++;
        view_flags(out[0], k->in[0]);
    } else {
        for (int i = 0; i < nout; i++) {
            wki_tensor_set_plain(out[i]);
            out[i]->flags |= WKI_F_WHOLE;
        }
        if (op->flags & WKI_OP_RNG)
            k->rng_seq = c->rng_seq++;
    }
    return c->exec->apply(c, k, c->exec) || apply_failed(c, k);
}
