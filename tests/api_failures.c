/* What a step that failed leaves: parameters, gradients, counters and the RNG as they were, in the ways a step can fail. On
 * the device that WICK_TEST_DEVICE names, where that matters. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"
#include "util_api.h"
#include "util_models.h"

typedef struct labelled { /* one weight in training */
    wk_tensor *w;
    wk_optim *o;
    bool fail;
} labelled;

static wk_tensor *indices(wk_ctx *c, int64_t a, int64_t b) {
    return wk_from_data(c, WK_I64, SIZE(2), (int64_t[]){a, b});
}

/* The call fails with WK_INDEX, at the latest when it is waited for. */
static void check_index_error(wk_ctx *c, wk_compiled *f, wk_tensor *const *in, int nin) {
    wk_call(f, in, nin);
    wk_sync(c);
    CHECK_ERROR(c, WK_INDEX);
}

/* ---- a check that fails when the plan runs -------------------------------------------------------------------------- */

typedef struct writes {
    wk_tensor *table, *state; /* (4, 3) */
    bool needed;              /* the table that is looked up was written before */
    bool part;                /* only two of its rows were, and then all of them */
} writes;

static void write_then_look_up(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out,
                               int nout) {
    (void)c, (void)nin, (void)nout;
    writes *w = self;
    wk_tensor *to = w->needed ? w->table : w->state;
    if (w->part)
        wk_copy_(wk_slice(to, 0, 1, 3, 1), wk_mul_scalar(wk_slice(in[0], 0, 0, 2, 1), 3));
    wk_copy_(to, wk_add_scalar(in[0], 1));
    if (w->part)
        wk_copy_(wk_slice(to, 0, 2, 4, 1), wk_slice(in[0], 0, 1, 3, 1));
    out[0] = wk_sum(wk_embedding(w->table, in[1]), NULL, 0, false);
}

TEST(failures, an_index_found_wrong_behind_a_write) {
    int64_t arena[4] = {0};
    for (int k = 0; k < 4; k++) {
        wk_ctx *c = api_ctx(true);
        writes w = {api_normal(c, SIZE(4, 3)), api_normal(c, SIZE(4, 3)), k & 1, k >> 1};
        wk_compiled *f = wk_compile(c, write_then_look_up, &w, NULL);
        wk_tensor *good[2] = {api_normal(c, SIZE(4, 3)), indices(c, 0, 3)}, *bad[2] = {good[0]};
        bad[1] = indices(c, 1, 4);
        for (int i = 0; i < 4; i++) {
            float *table = api_read(w.table), *state = api_read(w.state);
            check_index_error(c, f, bad, 2);
            float *t = api_read(w.table), *s = api_read(w.state);
            CHECK(api_same(t, table, 12));
            CHECK(api_same(s, state, 12));
            free(t);
            free(s);
            free(table);
            free(state);
            CHECK(isfinite(wk_item(wk_call(f, good, 2))));
        }
        float *x = api_read(good[0]), *to = api_read(w.needed ? w.table : w.state);
        CHECK_NEAR(to[0], x[0] + 1, 0);
        free(x);
        free(to);
        arena[k] = api_stats(c).arena_bytes;
        api_end(c);
    }
    CHECK(arena[2] < arena[3]); /* only what the lookup itself reads has to be kept */
}

typedef struct twice { /* two steps of training in one call, each on its own targets */
    train_job job;
    bool dropout;
} twice;

static void two_steps(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    twice *t = self;
    for (int i = 1; i <= 2; i++) {
        wk_tensor *x = t->dropout ? wk_dropout(in[0], 0.25) : in[0];
        out[0] = wk_cross_entropy(wk_forward(t->job.model, x), in[i]);
        wk_backward(out[0]);
        wk_optim_step(t->job.optim);
    }
}

/* A call that fails changes no parameter. On the CPU training with such calls in between also ends where it ends without
   them, to the bit: elsewhere the error is found when the host has counted the steps already. */
TEST(failures, a_wrong_target_of_a_second_step) {
    uint64_t seed = wkt_u64(), data = wkt_u64();
    float *params[2];
    int64_t n = 0;
    bool exact = true;
    for (int failing = 0; failing < 2; failing++) {
        wk_ctx *c = api_ctx(true);
        exact = wk_current_device(c) == WK_CPU;
        wk_seed(c, seed);
        twice t = {.dropout = true};
        t.job.model = model_mlp(c);
        t.job.optim = model_adamw(c, t.job.model, NULL);
        wk_compiled *f = wk_compile(c, two_steps, &t, NULL);
        wk_tensor *in[3] = {wk_rand(c, SIZE(2, MLP_FEATURES)), indices(c, (int64_t)(data % CLASSES), 1),
                            indices(c, 0, 2)};
        wk_tensor *bad[3] = {in[0], in[1], indices(c, 1, CLASSES)};
        for (int i = 0; i < 4; i++) {
            float *before = api_params(t.job.model, &n);
            if (failing)
                check_index_error(c, f, bad, 3);
            float *after = api_params(t.job.model, &n);
            CHECK(api_same(before, after, n));
            free(before);
            free(after);
            if (exact)
                CHECK_EQ_I(wk_optim_steps(t.job.optim), 2 * i);
            wk_call(f, in, 3);
        }
        params[failing] = api_params(t.job.model, &n);
        api_end(c);
    }
    if (exact)
        CHECK(api_same(params[0], params[1], n));
    free(params[0]);
    free(params[1]);
}

/* ---- a user op that the device cannot run --------------------------------------------------------------------------- */

static bool same_shape(const wk_array *in, const double *attr, wk_array *out, int64_t (*size)[WK_MAX_DIMS],
                       char err[256]) {
    (void)attr, (void)err;
    out[0].dtype = WK_F32;
    out[0].ndim = in[0].ndim;
    memcpy(size[0], in[0].size, (size_t)in[0].ndim * sizeof **size);
    return true;
}

typedef struct cannot {
    wk_tensor *state;
    int op;
} cannot;

static void write_then_cannot(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out,
                              int nout) {
    (void)c, (void)nin, (void)nout;
    cannot *k = self;
    wk_copy_(k->state, in[0]);
    wk_user_op(c, k->op, in, NULL, out);
}

TEST(failures, a_user_op_without_a_function_for_the_cpu) {
    wk_ctx *c = api_ctx(false);
    wk_op_desc d;
    wk_op_desc_init(&d);
    d.name = "only_elsewhere";
    d.nin = d.nout = 1;
    d.infer = same_shape;
    d.cuda = "extern \"C\" __global__ void only_elsewhere() {}";
    cannot k = {wk_zeros(c, WK_F32, SIZE(2)), wk_register_op(c, &d)};
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(2));
    wk_call(wk_compile(c, write_then_cannot, &k, NULL), &x, 1);
    CHECK(strstr(wk_message(c), "only_elsewhere"));
    CHECK_ERROR(c, WK_DEVICE);
    CHECK_NEAR(wk_item(wk_sum(k.state, NULL, 0, false)), 0, 0);
    api_end(c);
}

/* ---- the RNG, and what is undone ------------------------------------------------------------------------------------ */

typedef struct seeding {
    bool seed, set, read, fail;
} seeding;

static void seed_inside(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)nin, (void)nout;
    seeding *s = self;
    out[0] = wk_add(in[0], wk_rand(c, SIZE(2)));
    if (s->seed)
        wk_seed(c, 77);
    if (s->set)
        wk_rng_set(c, 78, 5);
    out[0] = wk_add(out[0], wk_rand(c, SIZE(2)));
    if (s->read)
        wk_item(wk_sum(out[0], NULL, 0, false));
    if (s->fail)
        out[0] = wk_add(out[0], wk_zeros(c, WK_F32, SIZE(3)));
}

TEST(failures, a_seed_set_inside_a_call_that_fails) {
    for (int k = 0; k < 8; k++) {
        wk_ctx *c = api_ctx(true);
        seeding s = {.seed = k & 1, .set = k >> 1 & 1, .read = k >> 2, .fail = true};
        wk_compiled *f = wk_compile(c, seed_inside, &s, NULL);
        wk_tensor *x = wk_ones(c, WK_F32, SIZE(2));
        wk_rng_set(c, 42, 1000);
        CHECK(wk_is_poison(wk_call(f, &x, 1)));
        CHECK_ERROR(c, WK_SHAPE);
        uint64_t seed, sequence, set = s.set ? 78 : s.seed ? 77 : 42;
        wk_rng_get(c, &seed, &sequence);
        if (s.read) { /* what a read needed is committed, and so is the seed it was drawn under */
            CHECK_EQ_I(seed, set);
            CHECK_EQ_I(sequence, s.set ? 6 : s.seed ? 1 : 1002);
        } else { /* setting it ran what was recorded before: one number was drawn */
            CHECK_EQ_I(seed, 42);
            CHECK_EQ_I(sequence, s.set || s.seed ? 1001 : 1000);
        }
        s.fail = false;
        wk_call(f, &x, 1);
        wk_rng_get(c, &seed, &sequence);
        CHECK_EQ_I(seed, set);
        if (s.set || s.seed)
            CHECK_EQ_I(sequence, s.set ? 6 : 1);
        api_end(c);
    }
}

static void only_loss(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)nin, (void)nout;
    labelled *l = self;
    out[0] = wk_sum(wk_mul(wk_mul(l->w, l->w), in[0]), NULL, 0, false);
    if (l->fail)
        out[0] = wk_matmul(out[0], wk_ones(c, WK_F32, SIZE(3)));
}

/* What was done outside, between two calls, is not undone when the second one fails. */
TEST(failures, leave_what_was_done_before_the_call) {
    for (int read = 0; read < 2; read++) {
        wk_ctx *c = api_ctx(true);
        labelled l = {.w = wk_requires_grad(api_normal(c, SIZE(3)), true)};
        l.o = wk_adamw(c, &l.w, 1, NULL);
        wk_compiled *f = wk_compile(c, only_loss, &l, NULL);
        wk_tensor *x = wk_ones(c, WK_F32, SIZE(3)), *loss = wk_call(f, &x, 1);
        if (read)
            CHECK(wk_item(loss) > 0);
        wk_backward(loss);
        wk_optim_step(l.o);
        wk_backward(wk_sum(wk_mul(l.w, l.w), NULL, 0, false));
        CHECK(wk_grad(l.w) != NULL);
        CHECK_EQ_I(wk_optim_steps(l.o), 1);
        l.fail = true;
        wk_call(f, &x, 1);
        CHECK_ERROR(c, WK_SHAPE);
        CHECK(wk_grad(l.w) != NULL);
        CHECK_EQ_I(wk_optim_steps(l.o), 1);
        api_end(c);
    }
}

/* Trains with the forward pass compiled and the rest outside; an unrelated error at each place where one may happen. */
static float *train_around_errors(uint64_t seed, int at) {
    wk_ctx *c = api_ctx(true);
    wk_seed(c, seed);
    labelled l = {.w = wk_requires_grad(wk_randn(c, SIZE(3)), true)};
    l.o = wk_adamw(c, &l.w, 1, NULL);
    wk_compiled *f = wk_compile(c, only_loss, &l, NULL);
    wk_tensor *x = wk_rand(c, SIZE(3));
    for (int i = 0; i < 4; i++) {
        wk_tensor *loss = NULL;
        for (int stage = 0; stage < 4; stage++) {
            if (stage == 0)
                loss = wk_call(f, &x, 1);
            if (stage == 1 || (stage == 2 && i % 2)) /* accumulates every second time */
                wk_backward(stage == 1 ? loss : wk_sum(wk_mul(l.w, x), NULL, 0, false));
            if (stage == 3)
                wk_optim_step(l.o);
            if (stage != at % 4)
                continue;
            wk_add(x, wk_zeros(c, WK_F32, SIZE(7)));
            if (at >=
                4) { /* a backward that fails on its way: the first gradient is delivered, the second cannot be */
                wk_error_take(c, NULL);
                wk_tensor *u = wk_mul(l.w, l.w), *stop = wk_sum(wk_mul(l.w, u), NULL, 0, false);
                wk_copy_(wk_detach(u), x);
                wk_backward(wk_add(stop, wk_sum(wk_mul_scalar(l.w, 2), NULL, 0, false)));
            }
            CHECK_ERROR(c, at >= 4 ? WK_VERSION : WK_SHAPE);
        }
    }
    CHECK_EQ_I(wk_optim_steps(l.o), 4);
    float *w = api_read(l.w);
    api_end(c);
    return w;
}

TEST(failures, an_unrelated_error_while_a_forward_is_pending) {
    uint64_t seed = wkt_u64();
    float *want = train_around_errors(seed, -1);
    for (int at = 0; at < 8; at++) {
        float *got = train_around_errors(seed, at);
        CHECK(api_same(want, got, 3));
        free(got);
    }
    free(want);
}

/* ---- poison that was kept, probes ---------------------------------------------------------------------------------- */

/* The error names `what`, quotes the first cause, and gives both lines: that of the cause and, `up` lines above the check,
   its own. */
static void check_quotes(wk_ctx *c, const char *what, int cause_line, int line) {
    char cause[64], own[64];
    const char *m = wk_message(c);
    snprintf(cause, sizeof cause, "api_failures.c:%d]", cause_line);
    snprintf(own, sizeof own, "api_failures.c:%d]", line);
    if (!strstr(m, what) || !strstr(m, "add: shapes (2) and (3)"))
        FAIL("\"%s\" does not name %s and the cause", m, what);
    if (strstr(m, "called at") && (!strstr(m, cause) || !strstr(m, own)))
        FAIL("\"%s\" does not name lines %d and %d", m, cause_line, line);
    CHECK_ERROR(c, WK_STATE);
}

TEST(failures, kept_poison_is_not_used_in_silence) {
    for (int k = 0; k < 3; k++) { /* taken with its text, without it, and left in a probe */
        wk_ctx *c = api_ctx(false), *d = api_ctx(false);
        wk_tensor *x = wk_ones(c, WK_F32, SIZE(2)), *three = wk_ones(c, WK_F32, SIZE(3)), *out = NULL;
        wk_tensor *w = wk_requires_grad(wk_ones(c, WK_F32, SIZE(2)), true);
        wk_tensor *loss = wk_sum(wk_mul(w, w), NULL, 0, false);
        wk_module *m = wk_nn_linear(c, 2, 2, true);
        wk_backward_options o;
        wk_backward_options_init(&o);
        o.inputs = &w;
        o.ninputs = 1;
        o.out = &out;
        wk_error e;
        wk_tensor *bad;
        for (int i = 0; i < 12; i++) {
            if (k == 2)
                wk_try_begin(c);
            int cause = __LINE__ + 1;
            bad = wk_add(x, three);
            CHECK_EQ_I(k == 2 ? wk_try_end(c, NULL) : wk_error_take(c, k ? NULL : &e), WK_SHAPE);
            bad = wk_neg(bad);
            CHECK(wk_is_poison(bad) && !wk_failed(c)); /* compute on poison is poison */
            const char *what = "";
            int line = 0;
            switch (i) {
            case 0:
                what = "wk_backward: the loss", line = __LINE__ + 1;
                wk_backward(bad);
                break;
            case 1:
                what = "wk_module_param: \"p\" of linear", line = __LINE__ + 1;
                wk_module_param(m, "p", bad);
                break;
            case 2:
                what = "wk_adamw: parameter 1", line = __LINE__ + 1;
                wk_adamw(c, (wk_tensor *[]){w, bad}, 2, NULL);
                break;
            case 3:
                what = "wk_sgd: parameter 0", line = __LINE__ + 1;
                wk_sgd(c, &bad, 1, NULL);
                break;
            case 4:
                what = "copy_: input 1", line = __LINE__ + 1;
                wk_copy_(x, bad);
                break;
            case 5:
                what = "copy_: input 0", line = __LINE__ + 1;
                wk_copy_(bad, x);
                break;
            case 6:
                what = "wk_backward_ex: a root", line = __LINE__ + 1;
                wk_backward_ex(&bad, 1, &o);
                CHECK(wk_is_poison(out));
                break;
            case 7:
                o.inputs = &bad;
                what = "wk_backward_ex: an input", line = __LINE__ + 1;
                wk_backward_ex(&loss, 1, &o);
                o.inputs = &w;
                break;
            case 8:
                o.grads = &bad;
                what = "wk_backward_ex: the gradient", line = __LINE__ + 1;
                wk_backward_ex(&loss, 1, &o);
                o.grads = NULL;
                break;
            case 9:
                what = "wk_item", line = __LINE__ + 1;
                CHECK(isnan(wk_item(bad)));
                break;
            case 10:
                what = "wk_write", line = __LINE__ + 1;
                CHECK(!wk_write(bad, &k, sizeof k));
                break;
            default:
                what = "wk_share: the tensor", line = __LINE__ + 1;
                CHECK(wk_is_poison(wk_share(d, bad)));
                CHECK(strstr(wk_message(d), "add: shapes (2) and (3)"));
                CHECK_ERROR(d, WK_STATE);
            }
            check_quotes(c, what, cause, line);
        }
        CHECK_EQ_I(wk_module_params(m, NULL, 0), 2);
        wk_backward(loss); /* is as it was */
        CHECK_NEAR(wk_item(wk_sum(wk_grad(w), NULL, 0, false)), 4, 0);
        api_end(c);
        api_end(d);
    }
}

TEST(failures, probes_nest) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(2));
    enum { DEEP = 100 };
    wk_neg(NULL); /* nothing says which context is meant */
    for (int i = 0; i < DEEP; i++) {
        if (i % 3)
            wk_reshape(x, SIZE(1000 + i));
        wk_try_begin(c);
        CHECK(!wk_failed(c));
        CHECK_NEAR(wk_item(wk_sum(x, NULL, 0, false)), 2, 0);
    }
    for (int i = DEEP - 1; i >= 0; i--) {
        wk_error e;
        wk_status want = (i + 1) % 3 && i < DEEP - 1 ? WK_SHAPE : WK_OK;
        CHECK_EQ_I(wk_try_end(c, &e), want);
        char size[16];
        snprintf(size, sizeof size, "%d", 1000 + i + 1);
        if (want)
            CHECK(strstr(e.message, size));
    }
    CHECK(!wk_failed(c));
    wk_try_end(c, NULL);
    CHECK_ERROR(c, WK_STATE);
    wk_reshape(x, SIZE(77));
    int line = __LINE__ - 1;
    wk_try_begin(c);
    wk_reshape(x, SIZE(78));
    wk_try_end(c, NULL);
    char here[64];
    snprintf(here, sizeof here, "api_failures.c:%d]", line);
    CHECK(strstr(wk_message(c), "77"));
    CHECK(!strstr(wk_message(c), "called at") || strstr(wk_message(c), here)); /* not that of the probe */
    CHECK_ERROR(c, WK_SHAPE);
    api_end(c);
}

/* ---- calls in calls, handles that go ------------------------------------------------------------------------------- */

static void step_then_fail(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    only_loss(c, &(labelled){.w = ((labelled *)self)->w}, in, nin, out, nout);
    wk_backward(out[0]);
    wk_optim_step(((labelled *)self)->o);
    if (((labelled *)self)->fail)
        out[0] = wk_matmul(out[0], wk_ones(c, WK_F32, SIZE(3)));
}

/* A step of another loss that fails must not make the gradient of this one wrong, nor impossible. */
TEST(failures, a_graph_from_before_a_call_that_failed) {
    wk_ctx *c = api_ctx(true);
    labelled l = {.w = wk_requires_grad(api_normal(c, SIZE(3)), true), .fail = true};
    l.o = wk_adamw(c, &l.w, 1, NULL);
    wk_compiled *f = wk_compile(c, step_then_fail, &l, NULL);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(3)), *loss = wk_sum(wk_mul(wk_mul(l.w, l.w), x), NULL, 0, false);
    wk_call(f, &x, 1);
    CHECK_ERROR(c, WK_SHAPE);
    wk_backward(loss);
    REQUIRE(wk_grad(l.w) != NULL);
    float *g = api_read(wk_grad(l.w)), *w = api_read(l.w);
    for (int i = 0; i < 3; i++)
        CHECK_NEAR(g[i], 2 * (double)w[i], 1e-5);
    free(g);
    free(w);
    wk_zero_grad(l.w);
    loss = wk_sum(wk_mul(wk_mul(l.w, l.w), x), NULL, 0, false);
    l.fail = false;
    wk_call(f, &x, 1);
    wk_backward(loss); /* this time it was changed */
    CHECK_ERROR(c, WK_VERSION);
    api_end(c);
}

typedef struct nested {
    labelled l;
    wk_compiled *inner;
    wk_tensor *state, *more; /* (4, 3), (2) */
    bool fail, probe, read, mine;
} nested;

/* Uses what the outer function used, and more, in ways of its own; fails behind all of it. */
static void inner_step(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)nin, (void)nout;
    nested *n = self;
    if (!n->fail) {
        out[0] = wk_neg(in[0]);
        return;
    }
    wk_copy_(wk_slice(n->state, 0, 2, 3, 1), in[0]);
    wk_copy_(n->more, wk_rand(c, SIZE(2)));
    wk_copy_(n->state, wk_rand(c, SIZE(4, 3)));
    wk_tensor *loss = wk_sum(wk_mul(wk_mul(n->l.w, n->l.w), wk_dropout(in[0], 0.5)), NULL, 0, false);
    wk_backward(loss);
    wk_optim_step(n->l.o);
    wk_reshape(in[0], SIZE(99));
    out[0] = loss;
}

static void outer_step(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)nin, (void)nout;
    nested *n = self;
    wk_tensor *x = wk_add(in[0], wk_rand(c, SIZE(3))), *total = wk_zeros(c, WK_F32, 0, NULL);
    if (n->mine)
        total = wk_sum(wk_slice(n->state, 0, 0, 2, 1), NULL, 0, false);
    if (n->read)
        wk_item(wk_sum(x, NULL, 0, false));
    if (n->probe)
        wk_try_begin(c);
    bool failed = wk_is_poison(wk_call(n->inner, &x, 1));
    CHECK(failed == n->fail);
    CHECK_EQ_I(n->probe ? wk_try_end(c, NULL) : wk_error_take(c, NULL), failed ? WK_SHAPE : WK_OK);
    wk_copy_(wk_slice(n->state, 0, 1, 2, 1), wk_mul(x, wk_rand(c, SIZE(3))));
    total = wk_add(total, wk_sum(n->state, NULL, 0, false));
    wk_tensor *loss = wk_sum(wk_mul(wk_mul(n->l.w, n->l.w), x), NULL, 0, false);
    wk_backward(loss);
    wk_optim_step(n->l.o);
    out[0] = wk_add(wk_add(loss, total), wk_sum(n->more, NULL, 0, false));
}

static float *run_nested(uint64_t seed, nested n, bool fail) {
    wk_ctx *c = api_ctx(true);
    wk_seed(c, seed);
    n.l.w = wk_requires_grad(wk_randn(c, SIZE(3)), true);
    n.l.o = wk_adamw(c, &n.l.w, 1, NULL);
    n.state = wk_randn(c, SIZE(4, 3));
    n.more = wk_randn(c, SIZE(2));
    wk_compiled *outer = wk_compile(c, outer_step, &n, NULL);
    n.inner = wk_compile(c, inner_step, &n, NULL);
    wk_tensor *x = wk_rand(c, SIZE(3));
    float *got = calloc(22, sizeof *got);
    for (int i = 0; i < 4; i++) {
        n.fail = fail && i % 3 != 1;
        got[18 + i] = (float)wk_item(wk_call(outer, &x, 1));
    }
    CHECK_EQ_I(wk_optim_steps(n.l.o), 4);
    CHECK(wk_read(n.l.w, got, 12) && wk_read(n.state, got + 3, 48) && wk_read(n.more, got + 15, 8));
    uint64_t sequence;
    wk_rng_get(c, NULL, &sequence);
    got[17] = (float)sequence;
    api_end(c);
    return got;
}

/* A call inside a call that fails, with its error taken, is as if it had not been made. */
TEST(failures, a_call_inside_a_call) {
    for (int k = 0; k < 8; k++) {
        uint64_t seed = wkt_u64();
        nested n = {.probe = k & 1, .read = k >> 1 & 1, .mine = k >> 2};
        float *want = run_nested(seed, n, false), *got = run_nested(seed, n, true);
        CHECK(api_same(want, got, 22));
        free(want);
        free(got);
    }
}

typedef struct replaced { /* a gradient that a call made, in calls inside it */
    labelled l;
    wk_compiled *inner;
    enum { ZEROED, USED, ADDED_TO, WAYS } way;
    int depth;
    bool deep; /* in a call that succeeds, inside one that fails */
} replaced;

static void replace(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    replaced *r = self;
    out[0] = in[0];
    if (++r->depth == 1 && r->deep) {
        wk_call(r->inner, in, 1);
    } else {
        if (r->way == ZEROED)
            wk_zero_grad(r->l.w);
        if (r->way == USED)
            wk_optim_step(r->l.o);
        wk_backward(wk_sum(wk_exp(r->l.w), NULL, 0, false));
    }
    if (--r->depth == 0)
        wk_reshape(in[0], SIZE(99));
}

static void make_and_replace(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out,
                             int nout) {
    (void)nin, (void)nout;
    replaced *r = self;
    out[0] = wk_sum(wk_mul(wk_mul(r->l.w, r->l.w), in[0]), NULL, 0, false);
    wk_backward(out[0]);
    if (r->l.fail) {
        wk_try_begin(c);
        CHECK(wk_is_poison(wk_call(r->inner, in, 1)));
        CHECK_EQ_I(wk_try_end(c, NULL), WK_SHAPE);
    }
}

/* The weight, and its gradient of some calls. */
static float *run_replaced(replaced r, const float *w, const float *x) {
    wk_ctx *c = api_ctx(true);
    r.l.w = wk_requires_grad(api_vector(c, 3, w), true);
    r.l.o = wk_adamw(c, &r.l.w, 1, NULL);
    wk_compiled *outer = wk_compile(c, make_and_replace, &r, NULL);
    r.inner = wk_compile(c, replace, &r, NULL);
    wk_tensor *in = api_vector(c, 3, x);
    for (int i = 0; i < 3; i++)
        wk_item(wk_call(outer, &in, 1));
    float *got = calloc(6, sizeof *got);
    CHECK(wk_read(r.l.w, got, 12) && wk_grad(r.l.w) && wk_read(wk_grad(r.l.w), got + 3, 12));
    api_end(c);
    return got;
}

TEST(failures, gradients_that_a_call_inside_a_call_replaced_come_back) {
    float w[3], x[3];
    for (int i = 0; i < 3; i++) {
        w[i] = (float)wkt_normal();
        x[i] = (float)wkt_normal();
    }
    for (int k = 0; k < 2 * WAYS; k++) {
        replaced r = {.way = k / 2, .deep = k & 1};
        float *want = run_replaced(r, w, x);
        r.l.fail = true;
        float *got = run_replaced(r, w, x);
        CHECK(api_same(want, got, 6));
        free(want);
        free(got);
    }
}

typedef struct keeper {
    wk_tensor *kept, *w;
} keeper;

static void keep_and_fail(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)nin, (void)nout;
    keeper *k = self;
    k->kept = wk_retain(wk_mul(k->w, in[0]));
    out[0] = wk_add(in[0], wk_ones(c, WK_F32, SIZE(7)));
}

TEST(failures, what_a_call_that_failed_made_is_not_used) {
    wk_ctx *c = api_ctx(true);
    keeper k = {.w = wk_requires_grad(wk_ones(c, WK_F32, SIZE(3)), true)};
    wk_compiled *f = wk_compile(c, keep_and_fail, &k, NULL);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(3));
    wk_call(f, &x, 1);
    CHECK_ERROR(c, WK_SHAPE);
    CHECK(wk_alive(c, k.kept));
    wk_backward_options o;
    wk_backward_options_init(&o);
    o.grads = &x;
    wk_backward_ex(&k.kept, 1, &o);
    CHECK_ERROR(c, WK_STATE);
    CHECK(wk_grad(k.w) == NULL);
    wk_neg(k.kept);
    CHECK_ERROR(c, WK_STATE);
    wk_reshape(k.kept, SIZE(1, 3));
    CHECK_ERROR(c, WK_STATE);
    CHECK(isnan(wk_item(k.kept)));
    CHECK_ERROR(c, WK_STATE);
    CHECK(!wk_write(k.kept, &o, 12));
    CHECK_ERROR(c, WK_STATE);
    wk_copy_(wk_detach(k.kept), x);
    CHECK_ERROR(c, WK_STATE);
    wk_ctx *d = api_ctx(true);
    wk_share(d, k.kept);
    CHECK_ERROR(d, WK_STATE);
    CHECK_ERROR(c, WK_STATE);
    wk_release(k.kept);
    CHECK(!wk_alive(c, k.kept));
    api_end(d);
    api_end(c);
}

typedef struct prober {
    int begins, ends;
    bool wrong;
} prober;

static void leave_probes(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)nin, (void)nout;
    prober *p = self;
    for (int i = 0; i < p->begins; i++)
        wk_try_begin(c);
    out[0] = wk_neg(in[0]);
    if (p->wrong)
        wk_reshape(in[0], SIZE(55));
    for (int i = 0; i < p->ends; i++)
        wk_try_end(c, NULL);
}

TEST(failures, probes_end_in_the_function_that_began_them) {
    wk_ctx *c = api_ctx(true);
    prober p;
    wk_compiled *f = wk_compile(c, leave_probes, &p, NULL);
    wk_module *m = wk_module_new(c, "m", leave_probes, &p, NULL);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(3));
    for (int k = 0; k < 2 * 3 * 3 * 2; k++) {
        p = (prober){k / 2 % 3, k / 6 % 3, k / 18};
        bool fails = p.begins != p.ends || (p.wrong && !p.begins);
        wk_try_begin(c);
        wk_reshape(x, SIZE(44)); /* the probe is the test's own, and so is its error */
        wk_error_take(c, NULL);
        wk_tensor *y = k % 2 ? wk_call(f, &x, 1) : wk_forward(m, x);
        CHECK(wk_is_poison(y) == fails);
        wk_error e;
        wk_status s = wk_try_end(c, &e);
        if (p.wrong && !p.begins)
            CHECK_EQ_I(s, WK_SHAPE);
        else
            CHECK_EQ_I(s, fails ? WK_STATE : WK_OK);
        CHECK(!wk_failed(c));
        wk_try_end(c, NULL);
        CHECK_ERROR(c, WK_STATE); /* there was but one */
    }
    api_end(c);
}

/* ---- contexts that share weights ------------------------------------------------------------------------------------ */

static wk_tensor *square_loss(wk_tensor *w, wk_tensor *x) {
    wk_tensor *y = wk_mul(wk_mul(w, w), x); /* the gradient needs w */
    return wk_sum(y, NULL, 0, false);
}

TEST(sharing, a_step_elsewhere_between_forward_and_backward) {
    wk_ctx *c = api_ctx(true), *d = api_ctx(true);
    wk_tensor *w = wk_requires_grad(api_normal(c, SIZE(5)), true), *x = api_normal(c, SIZE(5));
    wk_tensor *v = wk_share(d, w), *y = wk_share(d, x);
    CHECK(wk_needs_grad(v));
    wk_optim *o = wk_adamw(c, &w, 1, NULL), *p = wk_sgd(d, &v, 1, NULL);
    for (int i = 0; i < 3; i++) {
        wk_tensor *a = square_loss(w, x), *b = square_loss(v, y);
        wk_backward(b);
        wk_optim_step(p);
        wk_sync(d);
        float *now = api_read(w), *there = api_read(v), *scale = api_read(x);
        CHECK(api_same(now, there, 5));
        wk_backward(a);
        float *g = wk_grad(w) ? api_read(wk_grad(w)) : calloc(5, sizeof *g);
        for (int k = 0; k < 5; k++)
            CHECK_NEAR(g[k], 2 * (double)now[k] * (double)scale[k], 1e-5);
        wk_optim_step(o);
        wk_sync(c);
        free(now);
        free(there);
        free(scale);
        free(g);
    }
    wk_tensor *a = square_loss(w, x);
    wk_copy_(wk_detach(w), x);
    wk_backward(a);
    CHECK_ERROR(c, WK_VERSION);
    api_end(c);
    api_end(d);
}

typedef struct aliases {
    wk_tensor *p, *r; /* one memory */
} aliases;

static void write_one_read_the_other(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out,
                                     int nout) {
    (void)c, (void)nin, (void)nout;
    aliases *a = self;
    wk_tensor *before = wk_neg(a->r);
    wk_copy_(a->p, in[0]);
    out[0] = wk_add(wk_mul_scalar(a->r, 10), before);
}

TEST(sharing, a_tensor_that_comes_back) {
    wk_ctx *c = api_ctx(true), *d = api_ctx(true), *e = api_ctx(true);
    wk_tensor *p = wk_ones(c, WK_F32, SIZE(2));
    wk_tensor *q = wk_share(e, wk_share(d, p));
    aliases a = {p, wk_share(c, q)};
    CHECK(a.r != p);
    wk_compiled *f = wk_compile(c, write_one_read_the_other, &a, NULL);
    for (int i = 2; i < 5; i++) {
        float v[2] = {(float)i, (float)i};
        wk_tensor *x = api_vector(c, 2, v);
        CHECK_NEAR(wk_item(wk_slice(wk_call(f, &x, 1), 0, 0, 1, 1)), 10 * i - (i == 2 ? 1 : i - 1), 0);
    }
    wk_requires_grad(p, true);
    wk_tensor *loss = wk_sum(wk_mul(p, p), NULL, 0, false);
    wk_copy_(a.r, wk_ones(c, WK_F32, SIZE(2))); /* the same memory */
    wk_backward(loss);
    CHECK_ERROR(c, WK_VERSION);
    wk_ctx_free(d);
    api_end(e);
    CHECK_NEAR(wk_item(wk_sum(a.r, NULL, 0, false)), 2, 0);
    api_end(c);
}

TEST(sharing, whoever_is_last_frees) {
    wk_ctx *c = api_ctx(true), *d[6];
    wk_tensor *p = wk_ones(c, WK_F32, SIZE(1000)), *q[6];
    for (int i = 0; i < 6; i++) {
        d[i] = api_ctx(true);
        q[i] = wk_share(d[i], i ? q[i - 1] : p);
        CHECK_EQ_I(api_stats(d[i]).storage_bytes, 4000);
    }
    api_end(c);
    for (int i = 0; i < 6; i++) {
        int k = (i * 5 + 2) % 6;
        CHECK_NEAR(wk_item(wk_sum(q[k], NULL, 0, false)), 1000, 0);
        api_end(d[k]);
    }
}

TEST(sharing, waits_for_what_is_queued) {
    wk_ctx *c = api_ctx(false), *d = api_ctx(false);
    wk_use_device(c, WK_NULL);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(2)), *y = wk_neg(x);
    CHECK_EQ_I(api_stats(c).device_waits, 0);
    wk_tensor *z = wk_share(d, y);
    CHECK_EQ_I(api_stats(c).device_waits, 1); /* the context that wrote, not the one that will read */
    CHECK_EQ_I(api_stats(d).device_waits, 0);
    CHECK_EQ_I(wk_device_of(z), WK_NULL);
    wk_drop(wk_neg(z));
    wk_drop(z); /* y's context may free the memory from now on */
    CHECK_EQ_I(api_stats(d).device_waits, 1);
    wk_sync(c);
    CHECK_EQ_I(api_stats(c).device_waits, 2);
    api_end(c);
    api_end(d);
}
