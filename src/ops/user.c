/* User ops: rows of the op table made at run time. Inputs and outputs reach the user's functions contiguous, on the host. */
#include <stdio.h>
#include <string.h>

#include "backend/backend.h"
#include "graph/graph.h"
#include "ops_gen.h"

enum { MAX_USER = 8 };

typedef struct user_op {
    wki_op op; /* first: a wki_op pointer is the user op's */
    wk_op_desc d;
    char name[64];
} user_op;

static const user_op *user_of(const wki_op *op) { return (const user_op *)op; }

void wki_user_op_free(wki_op *op) { wki_free(op); }

void wk_op_desc_init(wk_op_desc *d) { *d = (wk_op_desc){.struct_size = sizeof *d}; }

static wk_array array_of(const wki_tensor *t) {
    return (wk_array){.dtype = (wk_dtype)t->dtype, .ndim = t->ndim, .size = t->size, .numel = t->numel};
}

static bool infer(wk_ctx *c, const wki_call *k) {
    const user_op *u = user_of(k->op);
    wk_array in[MAX_USER], out[MAX_USER];
    int64_t size[MAX_USER][WK_MAX_DIMS] = {{0}};
    char err[256] = "";
    for (int i = 0; i < k->nin; i++)
        in[i] = array_of(k->in[i]);
    for (int i = 0; i < k->nout; i++)
        out[i] = (wk_array){.dtype = WK_F32, .size = size[i]};
    if (!u->d.infer(in, k->va, out, size, err)) {
        err[sizeof err - 1] = 0;
        return wki_fail(c, WK_SHAPE, "%s", err[0] ? err : "the op's shape function refused its inputs");
    }
    for (int i = 0; i < k->nout; i++) {
        wki_tensor *t = k->out[i];
        bool ok = (unsigned)out[i].dtype < WK_DTYPE_COUNT && out[i].ndim >= 0 && out[i].ndim <= WK_MAX_DIMS;
        int64_t bytes = ok ? (int64_t)wki_dtype_size(out[i].dtype) : 0;
        for (int d = 0; ok && d < out[i].ndim; d++)
            ok = size[i][d] >= 0 && !__builtin_mul_overflow(bytes, size[i][d] ? size[i][d] : 1, &bytes);
        if (!ok)
            return wki_fail(c, WK_SHAPE,
                            "the op's shape function gave output %d an impossible shape or dtype", i);
        t->dtype = (uint8_t)out[i].dtype;
        t->ndim = (uint8_t)out[i].ndim;
        memcpy(t->size, size[i], sizeof size[i]);
    }
    return true;
}

static void vjp(const wki_vjp_args *a) {
    wk_ctx *c = a->c;
    const wki_node *n = a->node;
    const user_op *u = user_of(n->op);
    wk_tensor *in[MAX_USER], *out[MAX_USER], *g[MAX_USER], *r[MAX_USER] = {0};
    for (int i = 0; i < n->nin + n->nout; i++) { /* fresh handles: the user's may be gone */
        bool is_in = i < n->nin;
        wki_tensor *t = is_in ? wki_saved_in(c, n, i) : wki_saved_out(c, n, i - n->nin);
        wki_tensor *h = wki_alias(c, t);
        *(is_in ? &in[i] : &out[i - n->nin]) = wki_handle(h);
    }
    for (int i = 0; i < n->nout; i++)
        g[i] = a->gout[i] ? wki_handle(wki_alias(c, a->gout[i])) : NULL;
    if (c->failed)
        return;
    wki_floor floor = wki_floor_begin(c);
    u->d.vjp(c, in, out, g, wki_node_va(n), r);
    wki_floor_end(c, floor, n->caller);
    for (int i = 0; i < n->nin; i++) {
        if (!r[i])
            continue;
        wki_tensor *t = wki_owns(c, wki_slot(r[i]), n->caller) ? wki_enter(r[i], n->caller) : NULL;
        if (!t)
            return;
        const wki_tensor *want = wki_slot(in[i]);
        if (t->flags & WKI_F_POISON) {
            char what[96];
            snprintf(what, sizeof what, "%s: the gradient of input %d", n->op->name, i);
            wki_fail_poison(c, what);
            return;
        }
        if (t->ndim != want->ndim || memcmp(t->size, want->size, (size_t)t->ndim * 8) != 0) {
            char got[128], wanted[128];
            c->cur_op = n->op;
            wki_fail(c, WK_SHAPE, "the gradient of input %d has shape %s, the input %s", i,
                     wki_shape_text(got, sizeof got, t->ndim, t->size),
                     wki_shape_text(wanted, sizeof wanted, want->ndim, want->size));
            return;
        }
        if (t->dtype != WK_F32 || t->st->dev != want->st->dev) {
            c->cur_op = n->op;
            wki_fail(c, WK_DTYPE, "the gradient of input %d is %s on %s, f32 on %s is needed", i,
                     wk_dtype_name((wk_dtype)t->dtype), wk_device_name((wk_device)t->st->dev),
                     wk_device_name((wk_device)want->st->dev));
            return;
        }
        a->gin[i] = t;
    }
}

static bool desc_ok(const wk_op_desc *d) {
    return d->name && d->name[0] && strlen(d->name) < sizeof((user_op *)0)->name && d->infer && d->nin >= 1 &&
           d->nin <= MAX_USER && d->nout >= 1 && d->nout <= MAX_USER && d->nattr >= 0 && d->nattr <= 255;
}

static bool name_taken(const wk_runtime *rt, const char *name) {
    for (int i = 0; i < wki_op_count; i++)
        if (!strcmp(wki_ops[i].name, name))
            return true;
    for (int i = 0; i < rt->nuser_ops; i++)
        if (!strcmp(rt->user_ops[i]->name, name))
            return true;
    return false;
}

/* Gives the op its id and appends it to the runtime's; false after wki_fail. The caller holds the lock. */
static bool append(wk_ctx *c, user_op *u) {
    wk_runtime *rt = c->rt;
    if (name_taken(rt, u->name))
        return wki_fail(c, WK_INVALID, "wk_register_op: an op named `%s` exists", u->name);
    wki_op **p = rt->nuser_ops < 0xffff - wki_op_count
                     ? wki_realloc(rt->user_ops, ((size_t)rt->nuser_ops + 1) * sizeof *p)
                     : NULL;
    if (!p)
        return wki_fail(c, WK_NOMEM, "no host memory for a user op");
    rt->user_ops = p;
    u->op.id = (uint16_t)(wki_op_count + rt->nuser_ops);
    p[rt->nuser_ops++] = &u->op;
    return true;
}

int wk_register_op(wk_ctx *c, const wk_op_desc *given) {
    wk_op_desc d;
    wk_op_desc_init(&d);
    wki_begin(c, __builtin_return_address(0));
    if (c->failed)
        return -1;
    if (!wki_take_struct(&d, sizeof d, given)) {
        wki_wrong_struct(c, "wk_op_desc");
        return -1;
    }
    if (!desc_ok(&d)) {
        wki_fail(c, WK_INVALID,
                 "wk_register_op: a name of 1 to 63 characters, an infer function, 1 to 8 inputs and outputs "
                 "are needed");
        return -1;
    }
    user_op *u = wki_calloc(1, sizeof *u);
    if (!u) {
        wki_fail(c, WK_NOMEM, "no host memory for a user op");
        return -1;
    }
    memcpy(u->name, d.name, strlen(d.name) + 1);
    u->d = d;
    u->d.name = u->name;
    uint32_t all_in = (1u << d.nin) - 1, all_out = (1u << d.nout) - 1;
    u->op = (wki_op){.name = u->name,
                     .doc = "user op",
                     .klass = WKI_OPAQUE,
                     .flags = WKI_OP_USER,
                     .nin = (int8_t)d.nin,
                     .nout = (int8_t)d.nout,
                     .save_in = d.vjp ? all_in : 0,
                     .save_out = d.vjp ? all_out : 0,
                     .diff = all_in, /* without a vjp, backward says that there is no gradient */
                     .infer = infer,
                     .vjp = d.vjp ? vjp : NULL,
                     .user = &u->d};
    wki_runtime_lock(c->rt);
    bool ok = append(c, u);
    wki_runtime_unlock(c->rt);
    if (ok)
        return (int)u->op.id - wki_op_count;
    wki_free(u);
    return -1;
}

void wk_user_op(wk_ctx *c, int id, wk_tensor *const *in, const double *attr, wk_tensor **out) {
    const void *caller = __builtin_return_address(0);
    wki_begin(c, caller);
    const wki_op *op = id >= 0 ? wki_op_by_id(c->rt, (uint32_t)(wki_op_count + id)) : NULL;
    if (!op) {
        wki_fail(c, WK_INVALID, "wk_user_op: no op with id %d", id);
        out[0] = wki_handle(wki_poison(c)); /* how many there are is not known, but there is one */
        return;
    }
    const user_op *u = user_of(op);
    wki_tensor *t[MAX_USER], *o[MAX_USER];
    for (int i = 0; i < op->nin; i++) {
        t[i] = in[i] ? wki_enter(in[i], caller) : NULL;
        if (t[i] && !(t[i]->flags & (WKI_F_PLAIN | WKI_F_POISON)))
            t[i] = wki_contiguous(c, t[i]);
    }
    c->cur_op = op;
    wki_call k = {
        .op = op, .nin = op->nin, .nout = op->nout, .nva = u->d.nattr, .in = t, .va = attr, .out = o};
    if (c->failed)
        for (int i = 0; i < op->nout; i++)
            o[i] = wki_poison(c);
    else
        wki_apply(c, &k);
    for (int i = 0; i < op->nout; i++)
        out[i] = wki_handle(o[i]);
}

bool wki_user_runs(const wki_op *op) { return user_of(op)->d.cpu != NULL; }

bool wki_user_launch(const wki_launch *l) {
    const user_op *u = user_of(l->op);
    wk_array in[MAX_USER], out[MAX_USER];
    for (int i = 0; i < l->nin + l->nout; i++) {
        const wki_view *v = i < l->nin ? &l->in[i] : &l->out[i - l->nin];
        *(i < l->nin ? &in[i] : &out[i - l->nin]) = (wk_array){.data = v->data,
                                                               .dtype = (wk_dtype)v->dtype,
                                                               .ndim = v->ndim,
                                                               .size = v->size,
                                                               .numel = v->numel};
    }
    if (!u->d.cpu)
        return wki_fail(l->c, WK_DEVICE, "the op has no CPU kernel");
    u->d.cpu(in, out, l->va);
    return true;
}
