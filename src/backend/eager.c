/* The bottom of the executor stack: runs an op now on the CPU, or hands it to the recorder (while recording, and always for
 * devices whose only executor is the plan). */
#include <string.h>

#include "backend/backend.h"
#include "graph/graph.h"
#include "ops/bind.h"
#include "ops/infer.h"
#include "ops_gen.h"

static void view_of(wki_view *v, const wki_tensor *t) {
    if (!t) {
        *v = (wki_view){.slot = -1, .dtype = WK_DTYPE_COUNT};
        return;
    }
    v->data = t->st->data ? (char *)t->st->data + (size_t)t->off * wki_dtype_size((wk_dtype)t->dtype) : NULL;
    v->slot = -1;
    v->ndim = t->ndim;
    v->dtype = t->dtype;
    v->plain = t->flags & WKI_F_PLAIN;
    v->numel = t->numel;
    v->size = t->size;
    v->stride = t->stride;
}

/* The first of a loop's class numbers that its rows do not have: the operand of integers, one a row. */
static bool name_class(wk_ctx *c, const wki_loop_run *r) {
    const wki_operand *o = NULL;
    for (int i = 0; i < r->prog->nload && !o; i++)
        o = r->opnd[i].dtype == WK_I64 ? &r->opnd[i] : NULL;
    int outer = r->ndim - r->nred;
    int64_t rows = 1, classes = 1;
    for (int d = 0; d < r->ndim; d++)
        *(d < outer ? &rows : &classes) *= r->size[d];
    for (int64_t n = 0; o && n < rows; n++) {
        int64_t at = 0, left = n;
        for (int d = outer - 1; d >= 0; d--) {
            at += left % r->size[d] * o->stride[d];
            left /= r->size[d];
        }
        int64_t v = ((const int64_t *)o->data)[at];
        if (v < 0 || v >= classes)
            return wki_fail(c, WK_INDEX, "target %lld at position %lld is out of range for %lld classes",
                            (long long)v, (long long)n, (long long)classes);
    }
    return false;
}

bool wki_report_fault(wk_ctx *c, int32_t fault, const wki_loop_run *r) {
    uint32_t id = fault > 0 ? (uint32_t)fault - 1 : UINT32_MAX;
    const wki_op *op = id < UINT32_MAX ? wki_op_by_id(c->rt, id) : NULL;
    bool classes = id == WKI_OP_nll_rows || id == WKI_OP_nll_rows_grad;
    if (op)
        c->cur_op = classes ? &wki_ops[WKI_OP_cross_entropy] : op;
    if (classes && r)
        name_class(c, r);
    return wki_fail(c, WK_INDEX, "an index is out of range"); /* where no better message is there */
}

enum { MAX_ARGS = 16 };

/* All operands contiguous and of one shape: one dimension, no set-up. */
static bool flat(const wki_call *k, const wki_loop *loop, wki_loop_run *r) {
    if (k->op->klass != WKI_EW || k->nout != 1)
        return false;
    const wki_tensor *o = k->out[0];
    for (int i = 0; i < loop->ninst; i++)
        if (loop->inst[i].code == WKI_L_INDEX || loop->inst[i].code == WKI_L_RNG)
            return false;
    for (int i = 0; i < k->nin; i++) {
        const wki_tensor *t = k->in[i];
        if (!(t->flags & WKI_F_PLAIN) || !wki_shapes_equal(t, o))
            return false;
        wki_operand *d = &r->opnd[i];
        d->data = (char *)t->st->data + (size_t)t->off * wki_dtype_size((wk_dtype)t->dtype);
        d->dtype = t->dtype;
        d->stride[0] = 1;
    }
    wki_operand *d = &r->opnd[k->nin];
    d->data = o->st->data;
    d->dtype = o->dtype;
    d->stride[0] = 1;
    r->prog = loop;
    r->ndim = 1;
    r->nred = 0;
    r->col = false;
    r->size[0] = o->numel;
    r->logical[0] = 0;
    return true;
}

static bool run_bound(wk_ctx *c, const wki_loop_run *r) {
    if (!wki_loop_cpu(r, c->rt->isa, c->rt->pool))
        return wki_fail(c, WK_NOMEM, "no host memory for the loop's scratch space");
    return !*r->fault || wki_report_fault(c, *r->fault, r);
}

static bool run_loop(wk_ctx *c, wki_call *k, const wki_loop *loop) {
    wki_loop_run r;
    float arg[MAX_ARGS];
    int32_t fault = 0;
    for (int i = 0; i < k->nva; i++)
        arg[i] = (float)k->va[i];
    r.arg = arg;
    r.seed = c->seed;
    r.rng_seq = &k->rng_seq;
    r.fault = &fault;
    if (flat(k, loop, &r))
        return run_bound(c, &r);
    int n = wki_role_size(k->op, k->nin);
    wki_view small[16], *in = k->nin <= 8 ? small : wki_malloc((size_t)k->nin * sizeof *in), out[8];
    bool ok = in != NULL;
    if (!ok)
        return wki_fail(c, WK_NOMEM, "no host memory for %d operands", k->nin);
    for (int i = 0; i < k->nin; i++)
        view_of(&in[i], k->in[i]);
    for (int i = 0; i < k->nout; i++)
        view_of(&out[i], k->out[i]);
    for (int t = 0; t < n && ok; t++) {
        ok = wki_bind(k->op, loop, in, k->nin, out, k->nout, k->ia, t, &r);
        if (!ok)
            wki_fail(c, WK_INTERNAL, "operands do not fit the loop program's domain");
        else
            ok = run_bound(c, &r);
    }
    if (in != small)
        wki_free(in);
    return ok;
}

static bool run_kernel(wk_ctx *c, wki_call *k) {
    wki_view in[8], out[8];
    if (k->nin > 8 || k->nout > 8)
        return wki_fail(c, WK_INTERNAL, "too many operands for a kernel");
    for (int i = 0; i < k->nin; i++)
        view_of(&in[i], k->in[i]);
    for (int i = 0; i < k->nout; i++)
        view_of(&out[i], k->out[i]);
    wki_launch l = {
        .c = c, .op = k->op, .nin = k->nin, .nout = k->nout, .in = in, .out = out, .ia = k->ia, .va = k->va};
    if (k->op->flags & WKI_OP_USER)
        return wki_user_launch(&l);
    const wki_kernel *kern = wki_kernel_find(&l, WK_CPU);
    if (!kern)
        return wki_fail(c, WK_DTYPE, "no CPU kernel for these shapes and dtypes");
    size_t bytes = kern->workspace ? kern->workspace(&l) : 0;
    if (bytes && !(l.workspace = wki_devices[WK_CPU]->alloc(c, bytes, k->op->name)))
        return false;
    bool ok = kern->run(&l);
    if (l.workspace)
        wki_devices[WK_CPU]->free(c, l.workspace, bytes);
    return ok;
}

static __attribute__((noinline)) bool eager(wk_ctx *c, wki_call *k) {
    for (int i = 0; i < k->nout; i++) {
        wki_tensor *t = k->out[i];
        t->st = wki_storage_new(c, WK_CPU, (size_t)t->numel * wki_dtype_size((wk_dtype)t->dtype), true);
        if (!t->st)
            return false;
    }
    const wki_loop *loop = k->op->loop
                               ? wki_op_loop(k->op, k->nin ? (wk_dtype)k->in[0]->dtype : WK_DTYPE_COUNT,
                                             k->nout ? (wk_dtype)k->out[0]->dtype : WK_DTYPE_COUNT)
                               : NULL;
    return loop ? run_loop(c, k, loop) : run_kernel(c, k);
}

/* A device whose only executor is the plan: a segment of one op. */
static __attribute__((noinline)) bool run_plan(wk_ctx *c, wki_call *k) {
    c->rec->eager = true;
    bool ok = wki_record(c, k) && wki_flush(c);
    c->rec->eager = false;
    return ok;
}

enum { MAX_PENDING = 65536 }; /* ops that may join a pending segment outside a call before it is run */

static __attribute__((noinline)) bool record_last(wk_ctx *c, wki_call *k) {
    return wki_record(c, k) && wki_flush(c);
}

static bool apply(wk_ctx *c, wki_call *k, const wki_executor *self) {
    (void)self;
    if (k->op->flags & WKI_OP_VIEW)
        return true;
    if (wki_recording(c))
        return c->rec->nops < MAX_PENDING || c->call_depth ? wki_record(c, k) : record_last(c, k);
    return k->dev == WK_CPU ? eager(c, k) : run_plan(c, k);
}

const wki_executor wki_exec_base = {apply, NULL};
