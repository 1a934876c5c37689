/* Every row of the case table compiled against eager, bit for bit (but for which NaN): alone, with first and second gradients
 * in the same call, and with elementwise neighbours that fuse with it. Each compiled function runs twice, the second time on
 * fresh values, which must find its plan. Also: every row is planned for the null device. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cases.h"
#include "harness.h"

enum { MAX_IN = CASE_MAX_IN * 2 + CASE_MAX_OUT, MAX_OUT = CASE_MAX_IN * 2 + CASE_MAX_OUT * 2 };

/* Inputs of the program on a context, owned by its current scope. The same seed gives the same values everywhere. */
static void inputs(wk_ctx *c, const case_program *p, const dten *extra, wk_tensor **in) {
    const case_instance *t = p->t;
    int n = 0;
    for (; n < p->nx; n++) {
        in[n] = wki_handle(case_tensor(c, &t->x[n], t->layout[n], t->expanded[n]));
        if (p->order && case_differentiable(t->k, n))
            wk_requires_grad(in[n], true);
    }
    for (; n < case_program_nin(p); n++) {
        in[n] = wki_handle(case_tensor(c, &extra[n], CASE_PLAIN, 0));
        if (n < p->nx + p->nw)
            wk_requires_grad(in[n], true);
    }
}

static dten random_like(const dten *d) {
    dten t = case_like(d);
    t.dtype = WK_F32;
    for (int64_t i = 0; i < t.n; i++)
        t.v[i] = (double)(float)wkt_uniform(-1, 1);
    return t;
}

/* w for the float outputs, v for the differentiable inputs, at their places among the program's inputs. */
static void fill_extra(const case_program *p, dten *extra) {
    int n = p->nx;
    for (int j = 0; p->order > 0 && j < p->ny; j++)
        if (p->t->y[j].dtype == WK_F32)
            extra[n++] = random_like(&p->t->y[j]);
    for (int i = 0; p->order > 1 && i < p->nx; i++)
        if (case_differentiable(p->t->k, i))
            extra[n++] = random_like(&p->t->x[i]);
}

static bool same_bits(const dten *a, const dten *b, int64_t *at) {
    if (a->n != b->n)
        return false;
    for (*at = 0; *at < a->n; ++*at) {
        double x = a->v[*at], y = b->v[*at];
        if (!(isnan(x) && isnan(y)) && (x != y || signbit(x) != signbit(y)))
            return false;
    }
    return true;
}

static void compare(const case_program *p, const char *how, int j, wk_tensor *want, wk_tensor *got) {
    wki_tensor *a = wki_slot(want), *b = wki_slot(got);
    int64_t at = 0;
    dten x = case_read(a), y = case_read(b);
    if (x.n >= 0 && y.n >= 0 && !same_bits(&x, &y, &at))
        FAIL("%s, %s: output %d of %d (%d are results): element %lld is %.9g eager, %.9g compiled",
             p->t->k->name, how, j, case_program_nout(p), p->ny, (long long)at, x.n ? x.v[at] : 0,
             y.n ? y.v[at] : 0);
    case_free(&x);
    case_free(&y);
}

typedef struct way {
    bool before, after;
    int order;
    case_values values;
    const char *name;
} way;

/* One round: the same inputs eager and compiled. `f` is compiled for program p, whose instance is made anew. */
static void run_round(wk_ctx *c, const op_case *k, case_program *p, const way *w, const case_layout *layout,
                      wk_compiled *f) {
    wk_tensor *in[MAX_IN], *again[MAX_IN], *a[MAX_OUT] = {0}, *b[MAX_OUT] = {0};
    dten extra[MAX_IN] = {{0}};
    case_instance t;
    case_open(&t, k, w->values, layout);
    case_program_open(p, &t, w->order);
    p->before = w->before;
    p->after = w->after;
    fill_extra(p, extra);
    wk_scope_begin(c);
    inputs(c, p, extra, in);
    inputs(c, p, extra, again);
    wk_seed(c, CASE_SEED);
    case_program_run(c, p, in, case_program_nin(p), a, case_program_nout(p));
    wk_seed(c, CASE_SEED);
    wk_call_n(f, again, case_program_nin(p), b, case_program_nout(p));
    if (wk_failed(c)) {
        FAIL("%s, %s: %s", k->name, w->name, wk_message(c));
        wk_error_take(c, NULL);
    } else {
        for (int j = 0; j < case_program_nout(p); j++)
            compare(p, w->name, j, a[j], b[j]);
    }
    wk_scope_end(c);
    for (int i = 0; i < MAX_IN; i++)
        case_free(&extra[i]);
    case_close(&t);
}

static void check_row(wk_ctx *c, const op_case *k, const way *w, const case_layout *layout, bool strict) {
    case_program p;
    wk_compile_options o;
    wk_compile_options_init(&o);
    o.strict = strict;
    wk_compiled *f = wk_compile(c, case_program_run, &p, &o);
    wk_stats s = {.struct_size = sizeof s};
    run_round(c, k, &p, w, layout, f);
    wk_stats_get(c, &s);
    int64_t made = s.shapes_made;
    run_round(c, k, &p, w, layout, f);
    wk_stats_get(c, &s);
    bool same = true; /* which dimension is expanded differs from round to round */
    for (int i = 0; i < k->nin; i++)
        same &= layout[i] != CASE_EXPANDED;
    if (same && s.shapes_made != made)
        FAIL("%s, %s: a call with the same shapes made another plan", k->name, w->name);
    wk_compiled_free(f);
}

static void check_all(const way *w) {
    wk_ctx *c = case_context(WK_CPU);
    for (int i = 0; i < op_case_count; i++) {
        const op_case *k = &op_cases[i];
        case_layout layout[CASE_MAX_IN];
        bool plain = wkt_below(2) == 0;
        if ((wkt_quick() && case_numel(k) > 3000) ||
            (w->values == CASE_SPECIAL && k->flags & CASE_NO_SPECIAL))
            continue;
        for (int j = 0; j < CASE_MAX_IN; j++)
            layout[j] = plain ? CASE_PLAIN : (case_layout)wkt_below(CASE_LAYOUTS);
        check_row(c, k, w, layout, i % 2);
    }
    wk_ctx_free(c);
}

TEST(cases_compiled, alone) { check_all(&(way){false, false, 0, CASE_NORMAL, "alone"}); }
TEST(cases_compiled, special_values) { check_all(&(way){false, false, 0, CASE_SPECIAL, "special values"}); }
TEST(cases_compiled, with_gradients) { check_all(&(way){false, false, 1, CASE_NORMAL, "with gradients"}); }
TEST(cases_compiled, with_second_gradients) {
    check_all(&(way){false, false, 2, CASE_NORMAL, "with second gradients"});
}
TEST(cases_compiled, after_another_op) { check_all(&(way){true, false, 1, CASE_NORMAL, "after another op"}); }
TEST(cases_compiled, before_another_op) {
    check_all(&(way){false, true, 1, CASE_NORMAL, "before another op"});
}
TEST(cases_compiled, between_two_ops) { check_all(&(way){true, true, 0, CASE_SPECIAL, "between two ops"}); }

/* Shapes, plans and counts need no device: every row, with gradients, on the one that runs nothing. */
TEST(cases_compiled, planned_without_a_device) {
    wk_ctx *c = wk_ctx_new(NULL);
    REQUIRE(c != NULL);
    wk_use_device(c, WK_NULL);
    for (int i = 0; i < op_case_count; i++) {
        wk_tensor *in[MAX_IN], *out[MAX_OUT] = {0};
        dten extra[MAX_IN] = {{0}};
        case_instance t;
        case_program p;
        case_open(&t, &op_cases[i], CASE_NORMAL, NULL);
        case_program_open(&p, &t, 2);
        fill_extra(&p, extra);
        wk_scope_begin(c);
        inputs(c, &p, extra, in);
        wk_compiled *f = wk_compile(c, case_program_run, &p, NULL);
        wk_call_n(f, in, case_program_nin(&p), out, case_program_nout(&p));
        wk_sync(c);
        for (int j = 0; j < t.nout && !wk_failed(c); j++) {
            CHECK_EQ_I(wk_numel(out[j]), t.y[j].n);
            CHECK(wk_device_of(out[j]) == WK_NULL);
        }
        if (wk_failed(c))
            FAIL("%s: %s", op_cases[i].name, wk_message(c));
        wk_error_take(c, NULL);
        wk_compiled_free(f);
        wk_scope_end(c);
        for (int j = 0; j < MAX_IN; j++)
            case_free(&extra[j]);
        case_close(&t);
    }
    wk_ctx_free(c);
}
