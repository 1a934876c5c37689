/* Runs a random program (random_program.h) through the public API: a wk_fn for both ways of running it. */
#include <stdlib.h>
#include <string.h>

#include "random_program.h"

void rp_append(rp_log *log, const void *bytes, size_t n) {
    if (log->n + n > log->cap) {
        log->cap = 2 * (log->n + n);
        log->bytes = realloc(log->bytes, log->cap);
        if (!log->bytes)
            abort();
    }
    if (n)
        memcpy(log->bytes + log->n, bytes, n);
    log->n += n;
}

static wk_tensor *unary(const rp_ins *i, wk_tensor *x) {
    switch (i->sub) {
    case 0:
        return wk_neg(x);
    case 1:
        return wk_abs(x);
    case 2:
        return wk_tanh(x);
    case 3:
        return wk_sigmoid(x);
    case 4:
        return wk_relu(x);
    case 5:
        return wk_gelu(x);
    case 6:
        return wk_gelu_tanh(x);
    case 7:
        return wk_exp(wk_neg(wk_abs(x)));
    case 8:
        return wk_log(wk_add_scalar(wk_abs(x), 0.5));
    case 9:
        return wk_sqrt(wk_add_scalar(wk_abs(x), 0.25));
    case 10:
        return wk_reciprocal(wk_add_scalar(wk_abs(x), 1));
    case 11:
        return wk_sign(x);
    case 12:
        return wk_add_scalar(x, (double)i->v);
    default:
        return wk_mul_scalar(x, (double)i->v);
    }
}

static wk_tensor *binary(const rp_ins *i, wk_tensor *a, wk_tensor *b) {
    switch (i->sub) {
    case 0:
        return wk_add(a, b);
    case 1:
        return wk_sub(a, b);
    case 2:
        return wk_mul(a, b);
    case 3:
        return wk_div(a, wk_add_scalar(wk_abs(b), 0.5));
    case 4:
        return wk_maximum(a, b);
    default:
        return wk_minimum(a, b);
    }
}

static wk_tensor *compare(const rp_ins *i, wk_tensor *a, wk_tensor *b) {
    switch (i->sub) {
    case 0:
        return wk_lt(a, b);
    case 1:
        return wk_le(a, b);
    case 2:
        return wk_gt(a, b);
    case 3:
        return wk_ge(a, b);
    case 4:
        return wk_eq(a, b);
    default:
        return wk_ne(a, b);
    }
}

static wk_tensor *reduce(const rp_ins *i, wk_tensor *x) {
    int64_t dims[RP_MAX_DIMS];
    memcpy(dims, i->list, sizeof dims);
    switch (i->kind) {
    case RP_SUM:
        return wk_sum(x, dims, i->n, i->sub);
    case RP_MAX:
        return wk_max(x, dims, i->n, i->sub);
    default:
        return wk_mean(x, dims, i->n, i->sub);
    }
}

static wk_tensor *create(wk_ctx *c, const rp_program *p, const rp_ins *i) {
    if (i->kind == RP_RAND)
        return i->sub ? wk_randn(c, i->n, i->list) : wk_rand(c, i->n, i->list);
    if (i->kind == RP_FULL)
        return wk_full(c, (wk_dtype)i->sub, i->n, i->list, (double)i->v);
    rp_random r = {p->seed ^ (uint64_t)i->dst};
    void *data = rp_data(&p->value[i->dst], &r);
    wk_tensor *t = wk_from_data(c, (wk_dtype)i->sub, i->n, i->list, data);
    free(data);
    return t;
}

static void log_value(const rp_run *run, wk_tensor *t, const rp_value *v) {
    char *bytes = calloc(rp_bytes(v) + 1, 1);
    if (!bytes)
        abort();
    wk_read(t, bytes, rp_bytes(v));
    rp_append(run->log, bytes, rp_bytes(v));
    free(bytes);
}

static wk_tensor *total(wk_tensor *x) { return wk_sum(x, NULL, 0, false); }

/* Gradients of sum(a); where there is no dependence, or none is recorded, zeros. */
static void gradients(wk_ctx *c, const rp_ins *i, wk_tensor **v) {
    wk_tensor *in[RP_MAX_DIMS], *out[RP_MAX_DIMS] = {0}, *root = total(v[i->a]);
    for (int k = 0; k < i->n; k++)
        in[k] = v[i->list[k]];
    if (wk_needs_grad(root)) {
        wk_backward_options o;
        wk_backward_options_init(&o);
        o.inputs = in;
        o.ninputs = i->n;
        o.out = out;
        o.create_graph = i->sub;
        o.retain_graph = true;
        wk_backward_ex(&root, 1, &o);
    }
    for (int k = 0; k < i->n && !wk_failed(c); k++)
        v[i->dst + k] = out[k] ? out[k] : wk_full_like(in[k], 0);
}

static void effect(wk_ctx *c, const rp_run *run, const rp_ins *i, wk_tensor **v) {
    switch ((rp_kind)i->kind) {
    case RP_COPY:
        wk_copy_(v[i->a], v[i->b]);
        break;
    case RP_READ:
        log_value(run, v[i->a], &run->p->value[i->a]);
        break;
    case RP_DROP:
        wk_drop(v[i->a]);
        break;
    case RP_SCOPE:
        wk_scope_begin(c);
        break;
    case RP_END:
        for (int k = 0; k < i->n; k++)
            if (v[i->list[k]])
                wk_keep(v[i->list[k]]);
        wk_scope_end(c);
        break;
    case RP_GRAD:
        gradients(c, i, v);
        break;
    case RP_BACKWARD: {
        wk_tensor *loss = total(v[i->a]);
        if (wk_needs_grad(loss))
            wk_backward(loss);
        break;
    }
    case RP_STEP:
        wk_optim_step(run->optim);
        break;
    default:
        abort();
    }
}

static wk_tensor *compute(wk_ctx *c, const rp_run *run, const rp_ins *i, wk_tensor **v) {
    wk_tensor *a = i->a < 0 ? NULL : v[i->a], *b = i->b < 0 ? NULL : v[i->b],
              *third = i->c < 0 ? NULL : v[i->c];
    switch ((rp_kind)i->kind) {
    case RP_UNARY:
        return unary(i, a);
    case RP_BINARY:
        return binary(i, a, b);
    case RP_COMPARE:
        return compare(i, a, b);
    case RP_WHERE:
        return wk_where(a, b, third);
    case RP_FILL:
        return wk_masked_fill(a, b, (double)i->v);
    case RP_NOT:
        return wk_logical_not(a);
    case RP_CAST:
        return wk_cast(a, (wk_dtype)i->sub);
    case RP_CLONE:
        return wk_clone(a);
    case RP_DETACH:
        return wk_detach(a);
    case RP_SUM:
    case RP_MAX:
    case RP_MEAN:
        return reduce(i, a);
    case RP_SOFTMAX:
        return wk_softmax(a, i->sub);
    case RP_LOG_SOFTMAX:
        return wk_log_softmax(a, i->sub);
    case RP_LAYER_NORM:
        return wk_layer_norm(a, b, third, 1e-3);
    case RP_CAUSAL:
        return wk_causal_fill(a);
    case RP_PERMUTE:
        return wk_permute(a, i->list, i->n);
    case RP_SLICE:
        return wk_slice(a, (int)i->list[0], i->list[1], i->list[2], i->list[3]);
    case RP_RESHAPE:
        return wk_reshape(a, i->n, i->list);
    case RP_EXPAND:
        return wk_expand(a, i->n, i->list);
    case RP_MATMUL:
        return wk_matmul(a, b);
    case RP_LINEAR:
        return wk_linear(a, b, third);
    case RP_CONV:
        return wk_conv2d(a, b, third, i->list[0], i->list[1]);
    case RP_POOL:
        return wk_max_pool2d_ex(a, i->list[2], i->list[0], i->list[1]);
    case RP_EMBEDDING:
        return wk_embedding(a, b);
    case RP_ATTENTION:
        return wk_attention(a, b, third, i->sub, 0);
    case RP_CROSS_ENTROPY:
        return wk_cross_entropy(a, b);
    case RP_RAND:
    case RP_FULL:
    case RP_CONST:
        return create(c, run->p, i);
    case RP_DROPOUT:
        return wk_dropout(a, (double)i->v);
    case RP_BRANCH: {
        double sum = wk_item(total(a));
        rp_append(run->log, &sum, sizeof sum);
        return sum > 0 ? wk_neg(b) : wk_tanh(b);
    }
    default:
        return NULL;
    }
}

void rp_execute(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    const rp_run *run = self;
    const rp_program *p = run->p;
    wk_tensor *v[RP_MAX_VALUES] = {0};
    memcpy(v, in, (size_t)nin * sizeof *v);
    memcpy(v + nin, run->state, (size_t)p->nstate * sizeof *v);
    for (int k = 0; k < p->nins && !wk_failed(c); k++) {
        const rp_ins *i = &p->ins[k];
        if (i->skip)
            continue;
        if (i->dst < 0 || i->kind == RP_GRAD)
            effect(c, run, i, v);
        else
            v[i->dst] = compute(c, run, i, v);
    }
    for (int k = 0; k < nout; k++)
        out[k] = v[p->out[k]] ? v[p->out[k]] : in[0];
}
