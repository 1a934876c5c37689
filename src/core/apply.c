/* Applying an op: handle checks, promotion, inference, the way down the executor stack. The hot path of the library. */
#include <string.h>

#include "core/core.h"
#include "ops_gen.h"

wki_tensor *wki_poison(wk_ctx *c) { return c->poison; }

wki_tensor *wki_enter(const wk_tensor *h, const void *caller) {
    if (__builtin_expect(wki_handle_ok(h), 1)) {
        wki_tensor *t = wki_slot(h);
        t->ctx->caller = caller;
        return t;
    }
    if (!h)
        return NULL;
    wki_tensor *t = wki_slot(h);
    t->ctx->caller = caller;
    t->ctx->cur_op = NULL;
    wki_fail(t->ctx, WK_HANDLE, "use of a tensor handle that was freed (generation %u, now %u)", wki_handle_gen(h), t->gen);
    return NULL;
}

static bool bad_call(wk_ctx *c, wki_call *k) {
    for (int i = 0; i < k->nout; i++)
        k->out[i] = c->poison;
    return false;
}

static int dtype_rank(wk_dtype d) { return (int)d; } /* dtype.def is in promotion order */

/* Casts the inputs to their common dtype and applies the op to those. */
static bool promote(wk_ctx *c, wki_call *k) {
    wki_tensor *cast[8], *const *given = k->in;
    int best = -1;
    for (int i = 0; i < k->nin; i++)
        if (k->in[i] && dtype_rank((wk_dtype)k->in[i]->dtype) > best)
            best = dtype_rank((wk_dtype)k->in[i]->dtype);
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

/* A view's flags: contiguous, and whole only if it shows its storage exactly as its base does. */
static void view_flags(wki_tensor *t, const wki_tensor *base) {
    int64_t n = 1;
    bool plain = true;
    for (int i = t->ndim - 1; i >= 0; i--) {
        if (t->size[i] != 1 && t->stride[i] != n)
            plain = false;
        n *= t->size[i];
    }
    t->numel = n;
    if (plain || n == 0)
        t->flags |= WKI_F_PLAIN;
    if ((base->flags & WKI_F_WHOLE) && (t->flags & WKI_F_PLAIN) && t->off == base->off && t->ndim == base->ndim &&
        !memcmp(t->size, base->size, (size_t)t->ndim * 8))
        t->flags |= WKI_F_WHOLE;
}

bool wki_apply(wk_ctx *c, wki_call *k) {
    const wki_op *op = k->op;
    c->cur_op = op;
    c->stats.ops++;
    if (__builtin_expect(c->failed, 0))
        return bad_call(c, k);
    const wki_tensor *first = NULL;
    bool mixed = false;
    for (int i = 0; i < k->nin; i++) {
        const wki_tensor *t = k->in[i];
        if (!t) {
            if (op->nin >= 0 && !(op->optional >> i & 1)) {
                wki_fail(c, WK_INVALID, "argument `%s` is missing", op->in_names ? op->in_names[i] : "input");
                return bad_call(c, k);
            }
            continue;
        }
        if (t->flags & WKI_F_POISON)
            return bad_call(c, k);
        if (t->ctx != c) {
            wki_fail(c, WK_HANDLE, "input %d belongs to another context (wk_share makes a handle here)", i);
            return bad_call(c, k);
        }
        if (!first)
            first = t;
        else if (t->dtype != first->dtype)
            mixed = true;
        if (t->st->dev != first->st->dev) {
            wki_fail(c, WK_DEVICE, "inputs are on %s and %s", wk_device_name((wk_device)first->st->dev),
                     wk_device_name((wk_device)t->st->dev));
            return bad_call(c, k);
        }
    }
    if (mixed && (op->flags & WKI_OP_PROMOTE))
        return promote(c, k);
    int made = 0;
    for (; made < k->nout; made++)
        if (!(k->out[made] = wki_tensor_new(c)))
            goto fail;
    if (!op->infer(c, k))
        goto fail;
    if (op->flags & WKI_OP_VIEW) {
        for (int i = 0; i < k->nout; i++) {
            k->out[i]->st->refs++;
            view_flags(k->out[i], k->in[0]);
        }
    } else {
        for (int i = 0; i < k->nout; i++) {
            wki_tensor_set_plain(k->out[i]);
            k->out[i]->flags |= WKI_F_WHOLE;
        }
        if (op->flags & WKI_OP_RNG)
            k->rng_seq = c->rng_seq++;
    }
    if (c->exec->apply(c, k, c->exec))
        return true;
fail:
    for (int i = 0; i < made; i++) {
        wki_tensor *t = k->out[i];
        if ((op->flags & WKI_OP_VIEW) && t->st && !(t->flags & (WKI_F_PLAIN | WKI_F_WHOLE)) && c->failed)
            t->st = NULL; /* inference failed: the base's storage was not retained yet */
        wki_tensor_disown(t);
        wki_tensor_user_down(t);
    }
    return bad_call(c, k);
}
