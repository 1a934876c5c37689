/* Compiled functions: wk_compile and wk_call. The function runs on every call while its ops are recorded; what it needs runs
 * as a plan at the end, at a read, or together with what follows. */
#include <string.h>

#include "core/box.h"
#include "graph/graph.h"

typedef struct compiled {
    wk_ctx *c;
    wk_fn fn;
    void *self;
} compiled;

void wk_compile_options_init(wk_compile_options *o) { *o = (wk_compile_options){.struct_size = sizeof *o}; }

/* `strict` asks for what every plan does while f32 is the only type that ops round to. */
wk_compiled *wk_compile(wk_ctx *c, wk_fn fn, void *self, const wk_compile_options *given) {
    wk_compile_options o;
    wk_compile_options_init(&o);
    compiled *f = wki_calloc(1, sizeof *f);
    wki_begin(c, __builtin_return_address(0));
    if (!f || !fn) {
        wki_fail(c, f ? WK_INVALID : WK_NOMEM,
                 f ? "wk_compile: fn is NULL" : "no host memory for a compiled function");
        wki_free(f);
        return wki_box_invalid(c);
    }
    if (!wki_take_struct(&o, sizeof o, given)) {
        wki_wrong_struct(c, "wk_compile_options");
        wki_free(f);
        return wki_box_invalid(c);
    }
    *f = (compiled){.c = c, .fn = fn, .self = self};
    return wki_box_new(c, WKI_BOX_COMPILED, f, wki_free);
}

void wk_compiled_free(wk_compiled *h) {
    if (wki_box_get(h, WKI_BOX_COMPILED, __builtin_return_address(0)))
        wki_box_free(h);
}

static void poison_all(wk_ctx *c, wk_tensor **out, int nout) {
    for (int i = 0; i < nout; i++)
        out[i] = wki_handle(wki_poison(c));
}

/* Is a gradient still to come through one of the results? Then they wait for what is recorded next. */
static bool needs_more(wk_ctx *c, wk_tensor *const *out, int nout) {
    for (int i = 0; i < nout; i++)
        if (wk_alive(c, out[i])) {
            const wki_tensor *t = wki_slot(out[i]);
            if (t->fn && !(t->fn->flags & WKI_NODE_CONSUMED))
                return true;
        }
    return false;
}

static void call_n(wk_compiled *h, wk_tensor *const *in, int nin, wk_tensor **out, int nout,
                   const void *caller) {
    wk_ctx *c = wki_box_ctx(h);
    const compiled *f = wki_box_get(h, WKI_BOX_COMPILED, caller);
    for (int i = 0; i < nin && !c; i++)
        if (in[i])
            c = wki_slot(in[i])->ctx;
    if (!f) {
        if (c && !c->failed) {
            wki_begin(c, caller);
            wki_fail(c, WK_HANDLE, "call of a NULL function");
        }
        for (int i = 0; i < nout; i++)
            out[i] = c ? wki_handle(wki_poison(c)) : NULL;
        return;
    }
    c = f->c;
    bool outer = c->call_depth == 0;
    for (int i = 0; i < nout; i++)
        out[i] = NULL;
    for (int i = 0; i < nin; i++)
        if (in[i] && !wki_enter(in[i], caller))
            break;
    wki_begin(c, caller);
    if (c->failed || (outer && !wki_flush(c))) {
        poison_all(c, out, nout);
        return;
    }
    if (outer) {
        c->journal = true;
        c->rec->in_call = true;
    }
    wki_rec_mark begin = wki_rec_mark_of(c);
    c->call_depth++;
    wk_scope_begin(c);
    wki_floor floor = wki_floor_begin(c);
    f->fn(c, f->self, in, nin, out, nout);
    wki_floor_end(c, floor, caller);
    for (int i = 0; i < nout; i++) {
        if (!out[i]) {
            wki_begin(c, caller);
            wki_fail(c, WK_INVALID, "the compiled function did not set output %d of %d", i, nout);
        } else if (wki_owns(c, wki_slot(out[i]), caller) && wki_enter(out[i], caller)) {
            wki_promote(c, wki_slot(out[i]));
        }
    }
    wk_scope_end(c);
    c->call_depth--;
    if (!outer) {
        if (c->failed)
            wki_rec_back_to(c, &begin);
        else if (!wki_undo_part(c))
            wki_undo_forget(c, c->rec->epoch == begin.epoch ? begin.nundo : 0); /* a flush ends what it had */
        goto end;
    }
    c->rec->in_call = false;
    if (c->failed) {
        wki_recorder_discard(c);
        c->journal = false;
    } else if (!c->rec->nops || !needs_more(c, out, nout)) {
        wki_flush(c);
        wki_undo_commit(c);
        c->journal = false;
    }
end:
    if (c->failed)
        poison_all(c, out, nout);
}

void wk_call_n(wk_compiled *f, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    call_n(f, in, nin, out, nout, __builtin_return_address(0));
}

wk_tensor *wk_call(wk_compiled *f, wk_tensor *const *in, int nin) {
    wk_tensor *out = NULL;
    call_n(f, in, nin, &out, 1, __builtin_return_address(0));
    return out;
}
