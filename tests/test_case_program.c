/* Rows of the case table with their first and second gradients, as functions that run eagerly or compiled. */
#include <string.h>

#include "cases.h"
#include "harness.h"

enum { MAX_ALL = CASE_MAX_IN + CASE_MAX_OUT };

void case_program_open(case_program *p, const case_instance *t, int order) {
    *p = (case_program){.t = t, .order = t->k->writes ? 0 : order, .nx = t->k->nin, .ny = t->nout};
    for (int i = 0; i < t->k->nin; i++)
        p->nv += case_differentiable(t->k, i);
    if (!p->nv)
        p->order = 0;
    for (int j = 0; j < t->nout; j++)
        p->nw += t->y[j].dtype == WK_F32;
    if (p->order < 1)
        p->nw = p->nv = 0;
}

int case_program_nin(const case_program *p) { return p->nx + p->nw + (p->order > 1 ? p->nv : 0); }
int case_program_nout(const case_program *p) { return p->ny + p->nv + (p->order > 1 ? p->nv + p->nw : 0); }

/* Gradients of sum(weight * root) with respect to n inputs; zeros where there is none. */
static void gradients(wk_tensor *const *root, wk_tensor *const *weight, int nroot, wk_tensor *const *in,
                      int n, bool again, wk_tensor **out) {
    wk_tensor *roots[MAX_ALL], *weights[MAX_ALL];
    int m = 0;
    for (int j = 0; j < nroot; j++)
        if (wk_needs_grad(root[j])) {
            roots[m] = root[j];
            weights[m++] = weight[j];
        }
    memset(out, 0, (size_t)n * sizeof(wk_tensor *));
    if (m) {
        wk_backward_options o;
        wk_backward_options_init(&o);
        o.grads = weights;
        o.inputs = in;
        o.ninputs = n;
        o.out = out;
        o.create_graph = again;
        wk_backward_ex(roots, m, &o);
    }
    for (int i = 0; i < n; i++)
        if (!out[i])
            out[i] = wk_full_like(in[i], 0);
}

static void results(wk_ctx *c, const case_program *p, wk_tensor *const *in, wk_tensor **out) {
    const op_case *k = p->t->k;
    wki_tensor *x[CASE_MAX_IN], *y[CASE_MAX_OUT] = {0};
    for (int i = 0; i < p->nx; i++) {
        x[i] = wki_slot(in[i]);
        if (p->before && x[i]->dtype == WK_F32 && !(k->writes >> i & 1))
            x[i] = wki_mul_scalar(c, x[i], 0.75);
    }
    k->call(c, x, y);
    for (int i = 0, j = 0; k->writes && y[0] != wki_poison(c) && i < p->nx; i++)
        if (k->writes >> i & 1)
            y[j++] = x[i];
    for (int j = 0; j < p->ny; j++) {
        wki_tensor *t = y[j] ? y[j] : wki_poison(c);
        if (p->after && t->dtype == WK_F32 && !k->writes)
            t = wki_tanh(c, t);
        out[j] = wki_handle(t);
    }
}

void case_program_run(wk_ctx *c, void *program, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    const case_program *p = program;
    wk_tensor *wrt[MAX_ALL], *root[MAX_ALL], *const *w = in + p->nx, *const *v = w + p->nw;
    (void)nin;
    results(c, p, in, out);
    if (p->order < 1)
        return;
    int n = 0, m = 0;
    for (int i = 0; i < p->nx; i++)
        if (case_differentiable(p->t->k, i))
            wrt[n++] = in[i];
    for (int j = 0; j < p->ny; j++)
        if (p->t->y[j].dtype == WK_F32)
            root[m++] = out[j];
    memcpy(wrt + n, w, (size_t)m * sizeof *w);
    if (wk_failed(c)) {
        for (int i = p->ny; i < nout; i++)
            out[i] = wki_handle(wki_poison(c));
        return;
    }
    gradients(root, w, m, wrt, n, p->order > 1, out + p->ny);
    if (p->order > 1)
        gradients(out + p->ny, v, n, wrt, n + m, false, out + p->ny + n);
}
