/* First and second derivatives of every differentiable row of the case table against central differences of its reference,
 * taken in double: their own error, of 1e-9 and 1e-7, is below that of f32. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cases.h"
#include "harness.h"

/* Everything about one row: f maps x to y; L(x) = sum(w f(x)); D(x) = the sum of v times L's gradient. */
typedef struct subject {
    const op_case *k;
    case_instance *t;
    dten w[CASE_MAX_OUT], v[CASE_MAX_IN]; /* w is 0 where the result is not finite */
} subject;

static dten random_like(const dten *d) {
    dten t = case_like(d);
    t.dtype = WK_F32;
    for (int64_t i = 0; i < t.n; i++)
        t.v[i] = (double)(float)wkt_uniform(-1, 1);
    return t;
}

static double loss(const subject *s) {
    dten y[CASE_MAX_OUT];
    double sum = 0;
    int n = s->k->ref(s->t->x, y);
    for (int j = 0; j < n; j++) {
        for (int64_t i = 0; s->w[j].v && i < y[j].n; i++)
            sum += s->w[j].v[i] != 0 ? s->w[j].v[i] * y[j].v[i] : 0;
        case_free(&y[j]);
    }
    return sum;
}

static void move(const subject *s, double h) { /* x += h v */
    for (int i = 0; i < s->k->nin; i++)
        for (int64_t e = 0; s->v[i].v && e < s->t->x[i].n; e++)
            s->t->x[i].v[e] += h * s->v[i].v[e];
}

static double slope(const subject *s, double h) {
    double up, down;
    move(s, h);
    up = loss(s);
    move(s, -2 * h);
    down = loss(s);
    move(s, h);
    return (up - down) / (2 * h);
}

static dten first(const subject *s, int input) {
    const double h = 1e-5;
    dten *x = &s->t->x[input], g = case_like(x);
    for (int64_t e = 0; e < x->n; e++) {
        double old = x->v[e];
        x->v[e] = old + h;
        g.v[e] = loss(s);
        x->v[e] = old - h;
        g.v[e] = (g.v[e] - loss(s)) / (2 * h);
        x->v[e] = old;
    }
    return g;
}

static dten second(const subject *s, int input) {
    const double h = 2e-4;
    dten *x = &s->t->x[input], g = case_like(x);
    for (int64_t e = 0; e < x->n; e++) {
        double old = x->v[e];
        x->v[e] = old + h;
        g.v[e] = slope(s, h);
        x->v[e] = old - h;
        g.v[e] = (g.v[e] - slope(s, h)) / (2 * h);
        x->v[e] = old;
    }
    return g;
}

/* D's gradient with respect to w: f's derivative along v. */
static dten along(const subject *s, int output) {
    const double h = 1e-5;
    dten up[CASE_MAX_OUT], down[CASE_MAX_OUT];
    move(s, h);
    int n = s->k->ref(s->t->x, up);
    move(s, -2 * h);
    s->k->ref(s->t->x, down);
    move(s, h);
    dten g = case_like(&up[output]);
    for (int64_t e = 0; e < g.n; e++) {
        g.v[e] = (up[output].v[e] - down[output].v[e]) / (2 * h);
        if (s->w[output].v[e] == 0)
            g.v[e] = 0; /* there the result is not finite */
    }
    for (int j = 0; j < n; j++) {
        case_free(&up[j]);
        case_free(&down[j]);
    }
    return g;
}

/* Within `eps` units of f32's precision of the largest element, or of 1. */
static void compare(const subject *s, const char *what, int number, wk_tensor *tensor, dten want,
                    double eps) {
    wki_tensor *t = wki_slot(tensor);
    double scale = 1, worst = 0;
    int64_t at = 0;
    if (t->flags & WKI_F_POISON || t->numel != want.n) {
        FAIL("%s: %s %d: %s", s->k->name, what, number,
             t->flags & WKI_F_POISON ? wk_message(t->ctx) : "wrong shape");
        wk_error_take(t->ctx, NULL);
        case_free(&want);
        return;
    }
    dten got = case_read(t);
    for (int64_t i = 0; i < got.n; i++) {
        double off = fabs(got.v[i] - want.v[i]);
        scale = fmax(scale, fabs(want.v[i]));
        if (!(off <= worst)) {
            worst = isnan(off) ? INFINITY : off;
            at = i;
        }
    }
    if (!(worst <= eps * CASE_EPS * scale))
        FAIL("%s: %s %d: element %lld is %.9g, not %.9g", s->k->name, what, number, (long long)at, got.v[at],
             want.v[at]);
    case_free(&got);
    case_free(&want);
}

static void check(wk_ctx *c, const subject *s, wk_tensor **in, wk_tensor **out, const case_program *p) {
    int at = p->ny;
    case_program_run(c, (void *)p, in, case_program_nin(p), out, case_program_nout(p));
    for (int i = 0; i < p->nx; i++)
        if (s->v[i].v)
            compare(s, "gradient of input", i, out[at++], first(s, i), 64);
    for (int i = 0; i < p->nx; i++)
        if (s->v[i].v)
            compare(s, "second gradient of input", i, out[at++], second(s, i), 256);
    for (int j = 0; j < p->ny; j++)
        if (s->w[j].v)
            compare(s, "second gradient of the weight of output", j, out[at++], along(s, j), 64);
}

static void check_row(wk_ctx *c, const op_case *k, const case_layout *layout) {
    case_instance t;
    case_program p;
    wk_tensor *in[CASE_MAX_IN * 2 + CASE_MAX_OUT], *out[CASE_MAX_IN * 2 + CASE_MAX_OUT * 2] = {0};
    case_open(&t, k, CASE_MILD, layout);
    case_program_open(&p, &t, 2);
    subject s = {.k = k, .t = &t};
    wk_scope_begin(c);
    int n = 0;
    for (; n < k->nin; n++) {
        in[n] = wki_handle(case_tensor(c, &t.x[n], t.layout[n], t.expanded[n]));
        if (case_differentiable(k, n))
            wk_requires_grad(in[n], true);
    }
    for (int j = 0; j < t.nout; j++)
        if (t.y[j].dtype == WK_F32) {
            s.w[j] = random_like(&t.y[j]);
            for (int64_t e = 0; e < t.y[j].n; e++)
                s.w[j].v[e] *= isfinite(t.y[j].v[e]);
            in[n++] = wk_requires_grad(wki_handle(case_tensor(c, &s.w[j], CASE_PLAIN, 0)), true);
        }
    for (int i = 0; i < k->nin; i++)
        if (case_differentiable(k, i)) {
            s.v[i] = random_like(&t.x[i]);
            in[n++] = wki_handle(case_tensor(c, &s.v[i], CASE_PLAIN, 0));
        }
    wk_seed(c, CASE_SEED);
    if (p.order == 2)
        check(c, &s, in, out, &p);
    wk_scope_end(c);
    for (int i = 0; i < CASE_MAX_IN; i++)
        case_free(&s.v[i]);
    for (int j = 0; j < CASE_MAX_OUT; j++)
        case_free(&s.w[j]);
    case_close(&t);
}

/* Every row, or on a GPU every fourth from `first` on: almost each needs kernels compiled. */
static void check_all(wk_device d, int first, int step) {
    wk_ctx *c = case_context(d);
    for (int i = first; c && i < op_case_count; i += step) {
        const op_case *k = &op_cases[i];
        if (case_numel(k) > 200 || (wkt_quick() && case_numel(k) > 60))
            continue;
        case_layout layout[CASE_MAX_IN];
        for (int j = 0; j < CASE_MAX_IN; j++)
            layout[j] = (case_layout)wkt_below(CASE_EXPANDED);
        check_row(c, k, NULL);
        check_row(c, k, layout);
    }
    if (c)
        wk_ctx_free(c);
}

TEST(cases, gradients) { check_all(case_device(), 0, 1); }
TEST(cuda_cases, gradients_0) { check_all(WK_CUDA, 0, 4); }
TEST(cuda_cases, gradients_1) { check_all(WK_CUDA, 1, 4); }
TEST(cuda_cases, gradients_2) { check_all(WK_CUDA, 2, 4); }
TEST(cuda_cases, gradients_3) { check_all(WK_CUDA, 3, 4); }
