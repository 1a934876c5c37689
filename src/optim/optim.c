/* SGD and AdamW. State is made with the optimizer; a step is one in-place multi-tensor op over all parameters that have a
 * gradient, so the first step and all others record the same. May call: base, core, the public API.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/box.h"
#include "ops_gen.h"

#define CALLER __builtin_return_address(0)
enum { MAX_STATES = 2 };

/* Counters that a discarded recording sets back: in memory of the context, which an undo journal cannot outlive. */
typedef struct counters {
    int64_t steps;
    int64_t lag[]; /* steps that parameter i sat out: its own step number is steps - lag[i] */
} counters;

typedef struct optim {
    wk_optim *handle;
    wk_ctx *c;
    bool adamw, nesterov, keep_grads;
    double lr, beta1, beta2, eps, weight_decay, momentum;
    int n, nstates;
    wki_tensor **param, **state[MAX_STATES]; /* retained */
    wki_tensor **args;                       /* scratch: the inputs of one op */
    counters *count;
} optim;

void wk_adamw_options_init(wk_adamw_options *o) {
    *o = (wk_adamw_options){sizeof *o, 1e-3, 0.9, 0.999, 1e-8, 1e-2};
}

void wk_sgd_options_init(wk_sgd_options *o) { *o = (wk_sgd_options){.struct_size = sizeof *o, .lr = 1e-3}; }

/* ---- making and freeing -------------------------------------------------------------------------------------------- */

static void destroy(void *body) {
    optim *o = body;
    for (int i = 0; i < o->n; i++) {
        for (int s = 0; s < o->nstates; s++)
            if (o->state[s] && o->state[s][i])
                wki_tensor_user_down(o->state[s][i]);
        if (o->param && o->param[i])
            wki_tensor_user_down(o->param[i]);
    }
    for (int s = 0; s < o->nstates; s++)
        wki_free(o->state[s]);
    wki_free(o->param);
    wki_free(o->args);
    wki_free(o);
}

static bool allocate(optim *o) {
    size_t n = (size_t)o->n;
    o->param = wki_calloc(n, sizeof(void *));
    o->args = wki_calloc(n * (size_t)(2 + o->nstates), sizeof(void *));
    o->count = wki_pool_bytes(o->c, sizeof *o->count + n * sizeof *o->count->lag);
    bool ok = o->param && o->args && o->count;
    for (int s = 0; s < o->nstates; s++)
        if (!(o->state[s] = wki_calloc(n, sizeof(void *))))
            ok = false;
    if (!ok) {
        wki_fail(o->c, WK_NOMEM, "no host memory for an optimizer of %d parameters", o->n);
        return false;
    }
    memset(o->count, 0, sizeof *o->count + n * sizeof *o->count->lag);
    return true;
}

static const char *maker(const optim *o) { return o->adamw ? "wk_adamw" : "wk_sgd"; }

static bool take_param(optim *o, int i, wk_tensor *h, const void *caller) {
    wki_tensor *t = wki_enter(h, caller);
    const char *function = maker(o);
    if (!h)
        wki_fail(o->c, WK_INVALID, "%s: parameter %d is NULL", function, i);
    if (!t || o->c->failed)
        return false;
    if (t == o->c->poison) {
        char what[64];
        snprintf(what, sizeof what, "%s: parameter %d", function, i);
        return wki_fail_poison(o->c, what);
    }
    if (t->ctx != o->c)
        return wki_fail(o->c, WK_HANDLE, "%s: parameter %d belongs to another context", function, i);
    if (t->fn)
        return wki_fail(o->c, WK_GRAD, "%s: parameter %d is the result of an op, not a leaf", function, i);
    for (int j = 0; j < i; j++)
        if (o->param[j] == t)
            return wki_fail(o->c, WK_INVALID, "%s: parameters %d and %d are the same tensor", function, j, i);
    wki_tensor_user_up(t);
    t->st->pinned = 1;
    o->param[i] = t;
    return true;
}

/* The state of parameter i: zeros of its shape, where it is. NULL after wki_fail. */
static wki_tensor *make_state(optim *o, int i) {
    const wki_tensor *p = o->param[i];
    wk_device dev = wk_current_device(o->c);
    o->c->dev = p->st->dev;
    wk_scope_begin(o->c);
    wki_tensor *t = wki_filled(o->c, (wk_dtype)p->dtype, p->ndim, p->size, 0, maker(o));
    if (t) {
        wki_tensor_user_up(t);
        t->st->pinned = 1;
    }
    wk_scope_end(o->c);
    o->c->dev = (uint8_t)dev;
    return t;
}

/* `what` is a template; its parameters and state are made here. */
static wk_optim *make(wk_ctx *c, optim what, wk_tensor *const *params, int n, const void *caller) {
    wki_begin(c, caller);
    if (c->failed)
        return wki_box_invalid(c);
    optim *o = n >= 0 && (params || !n) ? wki_malloc(sizeof *o) : NULL;
    if (!o) {
        if (n < 0 || (n && !params))
            wki_fail(c, WK_INVALID, "%s: %d parameters%s", maker(&what), n, params ? "" : " in NULL");
        else
            wki_fail(c, WK_NOMEM, "no host memory for an optimizer");
        return wki_box_invalid(c);
    }
    *o = what;
    o->c = c;
    o->n = n;
    bool ok = allocate(o);
    for (int i = 0; ok && i < n; i++) {
        ok = take_param(o, i, params[i], caller);
        for (int s = 0; ok && s < what.nstates; s++) {
            wki_tensor **state = o->state[s];
            ok = state && (state[i] = make_state(o, i));
        }
    }
    if (!ok) {
        destroy(o);
        return wki_box_invalid(c);
    }
    o->handle = wki_box_new(c, WKI_BOX_OPTIM, o, destroy);
    return o->handle;
}

static bool at_least_0(wk_ctx *c, const char *function, const char *name, double v) {
    return v >= 0 ? true : wki_fail(c, WK_INVALID, "%s: %s is %g; it must be at least 0", function, name, v);
}

static bool fraction(wk_ctx *c, const char *name, double v) {
    return (v >= 0 && v < 1) ||
           wki_fail(c, WK_INVALID, "wk_adamw: %s is %g; it must be at least 0 and less than 1", name, v);
}

wk_optim *wk_adamw(wk_ctx *c, wk_tensor *const *params, int n, const wk_adamw_options *given) {
    wk_adamw_options o;
    wk_adamw_options_init(&o);
    wki_begin(c, CALLER);
    if (!wki_take_struct(&o, sizeof o, given)) {
        wki_wrong_struct(c, "wk_adamw_options");
        return wki_box_invalid(c);
    }
    if (!at_least_0(c, "wk_adamw", "lr", o.lr) || !fraction(c, "beta1", o.beta1) ||
        !fraction(c, "beta2", o.beta2) || !at_least_0(c, "wk_adamw", "eps", o.eps) ||
        !at_least_0(c, "wk_adamw", "weight_decay", o.weight_decay))
        return wki_box_invalid(c);
    optim what = {.adamw = true,
                  .lr = o.lr,
                  .beta1 = o.beta1,
                  .beta2 = o.beta2,
                  .eps = o.eps,
                  .weight_decay = o.weight_decay,
                  .nstates = 2};
    return make(c, what, params, n, CALLER);
}

wk_optim *wk_sgd(wk_ctx *c, wk_tensor *const *params, int n, const wk_sgd_options *given) {
    wk_sgd_options o;
    wk_sgd_options_init(&o);
    wki_begin(c, CALLER);
    if (!wki_take_struct(&o, sizeof o, given)) {
        wki_wrong_struct(c, "wk_sgd_options");
        return wki_box_invalid(c);
    }
    if (!at_least_0(c, "wk_sgd", "lr", o.lr) || !at_least_0(c, "wk_sgd", "momentum", o.momentum) ||
        !at_least_0(c, "wk_sgd", "weight_decay", o.weight_decay))
        return wki_box_invalid(c);
    if (o.nesterov && o.momentum <= 0) {
        wki_fail(c, WK_INVALID, "wk_sgd: nesterov needs a momentum above 0");
        return wki_box_invalid(c);
    }
    optim what = {.lr = o.lr,
                  .momentum = o.momentum,
                  .weight_decay = o.weight_decay,
                  .nesterov = o.nesterov,
                  .nstates = o.momentum > 0};
    return make(c, what, params, n, CALLER);
}

static optim *get(wk_optim *h, const void *caller) { return wki_box_get(h, WKI_BOX_OPTIM, caller); }

void wk_optim_free(wk_optim *h) {
    if (get(h, CALLER))
        wki_box_free(h);
}

/* ---- stepping ------------------------------------------------------------------------------------------------------ */

/* One in-place op over the m parameters gathered in o->args: all parameters, then all gradients, then each state. All are
   at step number t. */
static bool apply(optim *o, int m, int64_t t) {
    int n = m * (2 + o->nstates);
    if (!o->adamw && !o->nstates)
        return wki_sgd_(o->c, o->args, n, o->lr, o->weight_decay);
    if (!o->adamw)
        return (o->nesterov ? wki_sgd_nesterov_ : wki_sgd_momentum_)(o->c, o->args, n, o->lr, o->momentum,
                                                                     o->weight_decay);
    double bias1 = 1 - pow(o->beta1, (double)t), bias2 = 1 - pow(o->beta2, (double)t);
    return wki_adamw_(o->c, o->args, n, 1 - o->lr * o->weight_decay, 1 - o->beta1, o->beta2, 1 - o->beta2,
                      o->lr / bias1, 1 / sqrt(bias2), o->eps);
}

/* Gathers the parameters from `from` on that have a gradient and sat out `lag` steps, and applies the op to them. */
static bool step_group(optim *o, int from, int64_t lag) {
    int m = 0;
    for (int i = from; i < o->n; i++)
        m += o->param[i]->grad && o->count->lag[i] == lag;
    for (int i = from, at = 0; i < o->n; i++) {
        if (!o->param[i]->grad || o->count->lag[i] != lag)
            continue;
        o->args[at] = o->param[i];
        o->args[m + at] = o->param[i]->grad;
        for (int s = 0; s < o->nstates; s++)
            o->args[(2 + s) * m + at] = o->state[s][i];
        at++;
    }
    return apply(o, m, o->count->steps - lag);
}

/* True when an earlier parameter with a gradient is at the same step number, so that its group has this one. */
static bool grouped(const optim *o, int i) {
    for (int j = 0; j < i; j++)
        if (o->param[j]->grad && o->count->lag[j] == o->count->lag[i])
            return true;
    return false;
}

/* Counts the step. Sets *uniform when all parameters with a gradient are at one step number, and returns the first such
   parameter; o->n when there is none, -1 after wki_fail. */
static int count_step(optim *o, bool *uniform) {
    int first = o->n;
    *uniform = true;
    if (!wki_undo_i64(o->c, &o->count->steps))
        return -1;
    o->count->steps++;
    for (int i = 0; i < o->n; i++) {
        int64_t *lag = &o->count->lag[i];
        if (o->param[i]->grad) {
            first = first < o->n ? first : i;
            *uniform &= *lag == o->count->lag[first];
        } else if (wki_undo_i64(o->c, lag)) {
            ++*lag;
        } else {
            return -1;
        }
    }
    return first;
}

void wk_optim_step(wk_optim *h) {
    optim *o = get(h, CALLER);
    if (!o || o->c->failed)
        return;
    wk_ctx *c = o->c;
    wki_begin(c, CALLER);
    bool uniform, grad_mode = wk_grad_enable(c, false);
    wki_undo_mark before = wki_undo_begin(c);
    int first = count_step(o, &uniform);
    bool ok = first >= 0;
    for (int i = ok ? first : o->n; ok && i < o->n; i++) {
        if (o->param[i]->grad && !grouped(o, i))
            ok = step_group(o, i, o->count->lag[i]);
        if (uniform)
            break;
    }
    wk_grad_enable(c, grad_mode);
    for (int i = 0; ok && !o->keep_grads && i < o->n; i++)
        wki_drop_grad(o->param[i]);
    wki_undo_end(c, before, ok);
    if (ok && !c->call_depth)
        wki_flush(c);
}

void wk_optim_set_lr(wk_optim *h, double lr) {
    optim *o = get(h, CALLER);
    if (!o)
        return;
    wki_begin(o->c, CALLER);
    if (at_least_0(o->c, "wk_optim_set_lr", "lr", lr))
        o->lr = lr;
}

double wk_optim_lr(wk_optim *h) {
    optim *o = get(h, CALLER);
    return o ? o->lr : 0;
}

void wk_optim_keep_grads(wk_optim *h, bool keep) {
    optim *o = get(h, CALLER);
    if (o)
        o->keep_grads = keep;
}

void wk_optim_zero_grad(wk_optim *h) {
    optim *o = get(h, CALLER);
    for (int i = 0; o && i < o->n; i++)
        wk_zero_grad(wki_handle(o->param[i]));
}

int64_t wk_optim_steps(wk_optim *h) {
    optim *o = get(h, CALLER);
    return o ? o->count->steps : 0;
}
