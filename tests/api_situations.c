/* Situations a program gets into, each eager and compiled, on the device that WICK_TEST_DEVICE names. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"
#include "util_api.h"
#include "util_models.h"

/* Defines the tests eager.NAME and compiled.NAME. */
#define SITUATION(name)                                                                                      \
    static void situation_##name(bool compiled);                                                             \
    TEST(eager, name) { situation_##name(false); }                                                           \
    TEST(compiled, name) { situation_##name(true); }                                                         \
    static void situation_##name(bool compiled)

enum { BATCH = 32 };

static int rounds(int full, int quick) { return wkt_quick() ? quick : full; }

typedef struct world { /* a model in training */
    wk_ctx *c;
    train_job job;
    api_run step;
} world;

static void world_init(world *w, wk_module *(*model)(wk_ctx *), uint64_t seed, wk_fn step, bool compiled) {
    w->c = api_ctx(true);
    wk_seed(w->c, seed);
    w->job.model = model(w->c);
    w->job.optim = model_adamw(w->c, w->job.model, NULL);
    w->step = api_runner(w->c, step, &w->job, compiled);
}

static wk_module *short_transformer(wk_ctx *c) { return model_transformer(c, 32); }

/* Two worlds with the same parameters to the bit? */
static void check_same(const world *a, const world *b) {
    int64_t n, m;
    float *p = api_params(a->job.model, &n), *q = api_params(b->job.model, &m);
    CHECK_EQ_I(n, m);
    CHECK_MEM(p, q, (size_t)n * sizeof *p);
    free(p);
    free(q);
}

static void mlp_batch(wk_ctx *c, wk_tensor **in) {
    in[0] = api_normal(c, SIZE(BATCH, MLP_FEATURES));
    in[1] = api_classes(c, BATCH, CLASSES);
}

/* ---- the three models ---------------------------------------------------------------------------------------------- */

/* `steps` of training on one fixed random batch brings the loss down. */
static void learns(wk_module *(*model)(wk_ctx *), wk_tensor *(*input)(wk_ctx *), int64_t targets,
                   int64_t classes, int steps, bool compiled) {
    world w;
    world_init(&w, model, wkt_u64(), train_step, compiled);
    wk_tensor *in[2] = {input(w.c), api_classes(w.c, targets, classes)};
    double first = 0, last = 0;
    for (int i = 0; i < steps; i++) {
        wk_scope_begin(w.c);
        last = wk_item(api_call(&w.step, in, 2));
        if (!i)
            first = last;
        wk_scope_end(w.c);
    }
    CHECK(isfinite(first) && last < 0.9 * first);
    if (compiled)
        CHECK_EQ_I(api_stats(w.c).structures_made, 1);
    api_end(w.c);
}

static wk_tensor *mlp_input(wk_ctx *c) { return api_normal(c, SIZE(BATCH, MLP_FEATURES)); }
static wk_tensor *cnn_input(wk_ctx *c) { return api_normal(c, SIZE(8, 1, CNN_SIDE, CNN_SIDE)); }
static wk_tensor *tf_input(wk_ctx *c) {
    wk_tensor *flat = api_classes(c, 4 * 32, TF_VOCAB);
    return wk_reshape(flat, SIZE(4, 32));
}

SITUATION(mlp_learns) { learns(model_mlp, mlp_input, BATCH, CLASSES, rounds(60, 20), compiled); }
SITUATION(cnn_learns) { learns(model_cnn, cnn_input, 8, CLASSES, rounds(20, 8), compiled); }
SITUATION(transformer_learns) {
    learns(short_transformer, tf_input, 4 * 32, TF_VOCAB, rounds(40, 20), compiled);
}

static void same_compiled_as_eager(wk_module *(*model)(wk_ctx *), wk_tensor *(*input)(wk_ctx *),
                                   int64_t targets, int64_t classes) {
    uint64_t seed = wkt_u64();
    world w[2];
    world_init(&w[0], model, seed, train_step, false);
    world_init(&w[1], model, seed, train_step, true);
    wk_tensor *x = input(w[0].c), *y = api_classes(w[0].c, targets, classes);
    for (int i = 0; i < 5; i++) {
        wk_tensor *in[2] = {x, y}, *also[2] = {wk_share(w[1].c, x), wk_share(w[1].c, y)};
        double a = wk_item(api_call(&w[0].step, in, 2)), b = wk_item(api_call(&w[1].step, also, 2));
        CHECK(a == b);
    }
    check_same(&w[0], &w[1]);
    api_end(w[0].c);
    api_end(w[1].c);
}

TEST(strict, mlp_is_bit_equal_to_eager) { same_compiled_as_eager(model_mlp, mlp_input, BATCH, CLASSES); }
TEST(strict, cnn_is_bit_equal_to_eager) { same_compiled_as_eager(model_cnn, cnn_input, 8, CLASSES); }
TEST(strict, transformer_is_bit_equal_to_eager) {
    same_compiled_as_eager(short_transformer, tf_input, 4 * 32, TF_VOCAB);
}

/* ---- reads, accumulation, batches ---------------------------------------------------------------------------------- */

static void step_with_read(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    train_job *j = self;
    out[0] = wk_cross_entropy(wk_forward(j->model, in[0]), in[1]);
    CHECK(isfinite(wk_item(out[0])));
    wk_backward(out[0]);
    wk_optim_step(j->optim);
}

SITUATION(a_read_in_the_middle_of_a_step) {
    uint64_t seed = wkt_u64();
    world a, b;
    world_init(&a, model_mlp, seed, train_step, compiled);
    world_init(&b, model_mlp, seed, step_with_read, compiled);
    for (int i = 0; i < 10; i++) {
        wk_tensor *in[2], *also[2];
        mlp_batch(a.c, in);
        also[0] = wk_share(b.c, in[0]);
        also[1] = wk_share(b.c, in[1]);
        CHECK(wk_item(api_call(&a.step, in, 2)) == wk_item(api_call(&b.step, also, 2)));
    }
    check_same(&a, &b);
    if (compiled)
        CHECK(api_stats(b.c).structures_made <= 2); /* up to the read, and after it */
    api_end(a.c);
    api_end(b.c);
}

typedef struct accumulate {
    train_job job;
    bool step;
} accumulate;

static void accumulating_step(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out,
                              int nout) {
    (void)c, (void)nin, (void)nout;
    accumulate *a = self;
    out[0] = wk_cross_entropy(wk_forward(a->job.model, in[0]), in[1]);
    wk_backward(out[0]);
    if (a->step)
        wk_optim_step(a->job.optim);
}

SITUATION(ten_thousand_steps_with_changing_lr_and_accumulation) {
    world w;
    world_init(&w, model_mlp, wkt_u64(), train_step, false);
    accumulate a = {.job = w.job};
    api_run r = api_runner(w.c, accumulating_step, &a, compiled);
    wk_tensor *in[2];
    mlp_batch(w.c, in);
    wk_stats early = {0};
    int n = rounds(10000, 300);
    double loss = 0;
    for (int i = 0; i < n; i++) {
        wk_scope_begin(w.c);
        wk_optim_set_lr(w.job.optim, 1e-3 / (1 + i));
        a.step = false;
        api_call(&r, in, 2);
        a.step = true;
        wk_tensor *y = api_call(&r, in, 2);
        if (i % 1000 == 0 || i == n - 1)
            loss = wk_item(y);
        wk_scope_end(w.c);
        if (i == 50)
            early = api_stats(w.c);
    }
    wk_stats late = api_stats(w.c);
    CHECK(isfinite(loss));
    CHECK_EQ_I(wk_optim_steps(w.job.optim), n);
    CHECK_EQ_I(late.live_tensors, early.live_tensors);
    CHECK_EQ_I(late.storage_bytes, early.storage_bytes);
    CHECK_EQ_I(late.storage_peak, early.storage_peak);
    if (compiled) {
        CHECK(late.structures_made <= 2);
        CHECK(late.shapes_made <= 2);
    }
    api_end(w.c);
}

typedef struct set { /* a data set of the MLP's shape */
    float *x;
    int32_t *y;
    int64_t n;
} set;

static set set_new(int64_t n) {
    set s = {malloc((size_t)n * MLP_FEATURES * sizeof *s.x), malloc((size_t)n * sizeof *s.y), n};
    wkt_fill_normal(s.x, (size_t)n * MLP_FEATURES, 1);
    for (int64_t i = 0; i < n; i++)
        s.y[i] = (int32_t)wkt_below(CLASSES);
    return s;
}

static wk_loader *set_loader(wk_ctx *c, const set *s, int64_t batch) {
    wk_field f[2] = {{.dtype = WK_F32, .ndim = 1, .size = {MLP_FEATURES}, .data = s->x},
                     {.dtype = WK_I32, .data = s->y}};
    wk_loader_options o;
    wk_loader_options_init(&o);
    o.batch = batch;
    o.shuffle = true;
    return wk_loader_new(c, f, 2, s->n, &o);
}

static void set_free(set *s) {
    free(s->x);
    free(s->y);
}

SITUATION(the_last_batch_is_smaller) {
    uint64_t seed = wkt_u64();
    world w, e;
    world_init(&w, model_mlp, seed, train_step, compiled);
    world_init(&e, model_mlp, seed, train_step, false);
    set s = set_new(3 * BATCH + 5);
    wk_loader *l = set_loader(w.c, &s, BATCH), *k = set_loader(e.c, &s, BATCH);
    wk_tensor *in[2], *also[2];
    for (int epoch = 0; epoch < 4; epoch++)
        for (;;) {
            bool more = wk_loader_next(l, in), as_well = wk_loader_next(k, also);
            CHECK(more == as_well);
            if (!more || !as_well)
                break;
            CHECK(wk_item(api_call(&w.step, in, 2)) == wk_item(api_call(&e.step, also, 2)));
        }
    CHECK_EQ_I(wk_optim_steps(w.job.optim), 4 * 4);
    if (compiled)
        CHECK(api_stats(w.c).shapes_made <= 2);
    set_free(&s);
    api_end(w.c);
    api_end(e.c);
}

static wk_module *long_transformer(wk_ctx *c) { return model_transformer(c, 500); }

SITUATION(many_sequence_lengths) {
    world w;
    world_init(&w, long_transformer, wkt_u64(), train_step, compiled);
    int n = rounds(500, 40);
    int64_t *ids = malloc((size_t)n * sizeof *ids);
    wk_stats early = {0};
    double start = wkt_now();
    for (int pass = 0; pass < 2; pass++)
        for (int t = 1; t <= n; t += pass ? 50 : 1) { /* the second time every shape is known */
            wk_scope_begin(w.c);
            for (int i = 0; i < t; i++)
                ids[i] = (int64_t)wkt_below(TF_VOCAB);
            wk_tensor *in[2] = {wk_from_data(w.c, WK_I64, SIZE(1, t), ids),
                                wk_from_data(w.c, WK_I64, SIZE(t), ids)};
            CHECK(isfinite(wk_item(api_call(&w.step, in, 2))));
            wk_scope_end(w.c);
            if (!pass && t == 10)
                early = api_stats(w.c);
        }
    wk_stats late = api_stats(w.c);
    CHECK_EQ_I(late.live_tensors, early.live_tensors);
    CHECK_EQ_I(late.storage_bytes, early.storage_bytes);
    if (compiled) {
        CHECK(late.structures_made <= 32);
        CHECK(late.shapes_made <= n + n / 10);
    }
    CHECK(wkt_now() - start < 300);
    free(ids);
    api_end(w.c);
}

static void run_epoch(world *w, const set *s, bool sync) {
    wk_loader *l = set_loader(w->c, s, 8);
    wk_tensor *in[2];
    while (wk_loader_next(l, in)) {
        api_call(&w->step, in, 2);
        if (sync)
            wk_sync(w->c);
    }
    wk_loader_free(l);
}

SITUATION(calls_without_a_read_while_the_loader_reuses_its_buffers) {
    uint64_t seed = wkt_u64();
    set s = set_new(8 * rounds(1000, 60));
    world a, b;
    world_init(&a, model_mlp, seed, train_step, compiled);
    world_init(&b, model_mlp, seed, train_step, compiled);
    run_epoch(&a, &s, false);
    run_epoch(&b, &s, true);
    check_same(&a, &b);
    CHECK_EQ_I(wk_optim_steps(a.job.optim), s.n / 8);
    set_free(&s);
    api_end(a.c);
    api_end(b.c);
}

SITUATION(the_result_of_a_call_stays_after_the_next) {
    uint64_t seed = wkt_u64();
    world a, b;
    world_init(&a, model_mlp, seed, train_step, compiled);
    world_init(&b, model_mlp, seed, train_step, compiled);
    wk_tensor *loss[12], *in[2], *also[2];
    mlp_batch(a.c, in);
    also[0] = wk_share(b.c, in[0]);
    also[1] = wk_share(b.c, in[1]);
    double at_once[12];
    for (int i = 0; i < 12; i++) {
        loss[i] = api_call(&a.step, in, 2);
        at_once[i] = wk_item(api_call(&b.step, also, 2));
    }
    for (int i = 0; i < 12; i++)
        CHECK(wk_item(loss[i]) == at_once[i]);
    CHECK(at_once[0] != at_once[11]);
    api_end(a.c);
    api_end(b.c);
}

/* ---- parts of a step ----------------------------------------------------------------------------------------------- */

static void forward_only(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    out[0] = wk_forward(((train_job *)self)->model, in[0]);
}

SITUATION(forward_only) {
    world w;
    world_init(&w, model_cnn, wkt_u64(), forward_only, compiled);
    wk_train_mode(w.job.model, false);
    wk_grad_enable(w.c, false);
    wk_tensor *x = cnn_input(w.c);
    float *want = api_read(wk_forward(w.job.model, x));
    int64_t live = 0;
    for (int i = 0; i < 5; i++) {
        wk_scope_begin(w.c);
        wk_tensor *y = api_call(&w.step, &x, 1);
        CHECK(!wk_needs_grad(y));
        float *got = api_read(y);
        CHECK_MEM(got, want, 8 * CLASSES * sizeof *got);
        free(got);
        wk_scope_end(w.c);
        if (i == 0)
            live = api_stats(w.c).live_tensors;
    }
    CHECK_EQ_I(api_stats(w.c).live_tensors, live);
    if (compiled)
        CHECK_EQ_I(api_stats(w.c).structures_made, 1);
    free(want);
    api_end(w.c);
}

static void loss_only(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    out[0] = wk_cross_entropy(wk_forward(((train_job *)self)->model, in[0]), in[1]);
}

SITUATION(forward_inside_and_backward_outside) {
    uint64_t seed = wkt_u64();
    world a, b;
    world_init(&a, model_mlp, seed, loss_only, compiled);
    world_init(&b, model_mlp, seed, train_step, false);
    wk_tensor *in[2], *also[2];
    mlp_batch(a.c, in);
    also[0] = wk_share(b.c, in[0]);
    also[1] = wk_share(b.c, in[1]);
    for (int i = 0; i < 8; i++) {
        wk_scope_begin(a.c);
        wk_tensor *loss = api_call(&a.step, in, 2);
        wk_backward(loss);
        wk_optim_step(a.job.optim);
        CHECK(wk_item(loss) == wk_item(api_call(&b.step, also, 2)));
        wk_scope_end(a.c);
    }
    check_same(&a, &b);
    if (compiled)
        CHECK_EQ_I(api_stats(a.c).structures_made, 1); /* forward, backward and step are one plan */
    api_end(a.c);
    api_end(b.c);
}

typedef struct deep {
    wk_module *net, *layer[8];
    int made, depth;
} deep;

static void deep_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)nin, (void)nout;
    deep *d = self;
    for (; d->made < d->depth; d->made++)
        d->layer[d->made] = wk_nn_linear(c, MLP_FEATURES, MLP_FEATURES, true);
    wk_module *local = wk_nn_layer_norm(c, MLP_FEATURES, 1e-5); /* lives for this call */
    wk_tensor *x = wk_forward(local, in[0]);
    for (int i = 0; i < d->depth; i++)
        x = i % 2 ? wk_tanh(wk_forward(d->layer[i], x)) : wk_relu(wk_forward(d->layer[i], x));
    wk_module_free(local);
    out[0] = wk_sum(wk_mul(x, x), NULL, 0, false);
    wk_backward(out[0]);
}

SITUATION(layers_created_inside_forward) {
    uint64_t seed = wkt_u64();
    static const int depths[] = {1, 3, 3, 2, 5, 5, 1, 3};
    enum { N = sizeof depths / sizeof *depths };
    double got[2][N], grad[2][N];
    for (int k = 0; k < 2; k++) { /* as asked, and eager for comparison */
        wk_ctx *c = api_ctx(true);
        wk_seed(c, seed);
        deep d = {0};
        api_run r = api_runner(c, deep_forward, &d, compiled && !k);
        float *v = malloc(BATCH * MLP_FEATURES * sizeof *v);
        for (int i = 0; i < BATCH * MLP_FEATURES; i++)
            v[i] = (float)sin(i);
        wk_tensor *x = wk_from_data(c, WK_F32, SIZE(BATCH, MLP_FEATURES), v);
        free(v);
        for (int i = 0; i < N; i++) {
            d.depth = depths[i];
            wk_scope_begin(c);
            got[k][i] = wk_item(api_call(&r, &x, 1));
            wk_tensor *w = wk_module_get(d.layer[0], "weight");
            REQUIRE(wk_grad(w) != NULL);
            grad[k][i] = wk_item(wk_sum(wk_grad(w), NULL, 0, false));
            wk_scope_end(c);
        }
        if (r.f)
            CHECK(api_stats(c).structures_made <= 2 * N);
        api_end(c);
    }
    for (int i = 0; i < N; i++) {
        CHECK(got[0][i] == got[1][i]);
        CHECK(grad[0][i] == grad[1][i]);
    }
}

static void branching(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)self, (void)nin, (void)nout;
    wk_tensor *total = wk_sum(in[0], NULL, 0, false);
    out[0] = wk_item(total) > 0 ? wk_relu(in[0]) : wk_mul_scalar(in[0], -2);
    wk_backward(wk_sum(out[0], NULL, 0, false));
}

SITUATION(a_branch_on_data) {
    wk_ctx *c = api_ctx(true);
    api_run r = api_runner(c, branching, NULL, compiled);
    for (int i = 0; i < 10; i++) {
        wk_scope_begin(c);
        float v[2] = {i % 3 ? 3 : -3, i % 3 ? -1 : 1};
        wk_tensor *x = wk_requires_grad(api_vector(c, 2, v), true);
        float *y = api_read(api_call(&r, &x, 1));
        REQUIRE(wk_grad(x) != NULL);
        float *g = api_read(wk_grad(x));
        CHECK(y[0] == (i % 3 ? 3 : 6) && y[1] == (i % 3 ? 0 : -2));
        CHECK(g[0] == (i % 3 ? 1 : -2) && g[1] == (i % 3 ? 0 : -2));
        free(y);
        free(g);
        wk_scope_end(c);
    }
    if (compiled)
        CHECK(api_stats(c).structures_made <= 3); /* before the branch, and each way */
    api_end(c);
}

/* ---- several contexts ---------------------------------------------------------------------------------------------- */

SITUATION(two_contexts_share_weights) {
    world w;
    world_init(&w, model_mlp, wkt_u64(), train_step, compiled);
    wk_ctx *d = api_ctx(true);
    train_job other = {.model = wk_module_share(d, w.job.model)};
    api_run see = api_runner(d, forward_only, &other, compiled);
    wk_tensor *in[2];
    mlp_batch(w.c, in);
    wk_tensor *x = wk_share(d, in[0]);
    float *before = api_read(api_call(&see, &x, 1));
    for (int i = 0; i < 5; i++) {
        api_call(&w.step, in, 2);
        wk_sync(w.c);
        wk_grad_enable(w.c, false);
        float *a = api_read(wk_forward(w.job.model, in[0])), *b = api_read(api_call(&see, &x, 1));
        wk_grad_enable(w.c, true);
        CHECK_MEM(a, b, BATCH * CLASSES * sizeof *a);
        CHECK(!api_same(b, before, BATCH * CLASSES));
        free(a);
        free(b);
    }
    free(before);
    api_end(w.c);
    api_end(d);
}

typedef struct worker {
    uint64_t seed;
    const set *data;
    bool compiled;
    float *params;
    int64_t n;
} worker;

static void *train_alone(void *arg) {
    worker *k = arg;
    world w;
    world_init(&w, model_mlp, k->seed, train_step, k->compiled);
    for (int epoch = 0; epoch < 3; epoch++)
        run_epoch(&w, k->data, false);
    k->params = api_params(w.job.model, &k->n);
    api_end(w.c);
    return NULL;
}

SITUATION(two_contexts_run_at_once) {
    set s = set_new(8 * rounds(60, 10));
    worker k[4];
    for (int i = 0; i < 4; i++)
        k[i] = (worker){.seed = (uint64_t)i / 2, .data = &s, .compiled = compiled};
    for (int i = 0; i < 4; i += 2)
        train_alone(&k[i]);
    pthread_t t[2];
    for (int i = 0; i < 2; i++)
        REQUIRE(!pthread_create(&t[i], NULL, train_alone, &k[2 * i + 1]));
    for (int i = 0; i < 2; i++)
        pthread_join(t[i], NULL);
    for (int i = 0; i < 4; i += 2)
        CHECK_MEM(k[i].params, k[i + 1].params, (size_t)k[i].n * sizeof(float));
    CHECK(!api_same(k[0].params, k[2].params, k[0].n));
    for (int i = 0; i < 4; i++)
        free(k[i].params);
    set_free(&s);
}

/* ---- user ops ------------------------------------------------------------------------------------------------------ */

static bool cube_infer(const wk_array *in, const double *attr, wk_array *out, int64_t (*size)[WK_MAX_DIMS],
                       char err[256]) {
    (void)attr;
    if (in[0].ndim != 1) {
        strcpy(err, "cube takes a vector");
        return false;
    }
    out[0].dtype = WK_F32;
    out[0].ndim = 1;
    size[0][0] = in[0].size[0];
    return true;
}

static void cube_cpu(const wk_array *in, wk_array *out, const double *attr) {
    const float *x = in[0].data;
    float *y = out[0].data;
    for (int64_t i = 0; i < out[0].numel; i++)
        y[i] = (float)attr[0] * x[i] * x[i] * x[i];
}

static void cube_vjp(wk_ctx *c, wk_tensor *const *in, wk_tensor *const *out, wk_tensor *const *gout,
                     const double *attr, wk_tensor **gin) {
    (void)c, (void)out;
    gin[0] = wk_mul(gout[0], wk_mul_scalar(wk_mul(in[0], in[0]), 3 * attr[0]));
}

static const char cube_cuda[] =
    "extern \"C\" __global__ void cube(const float *x, float *y, const float *attr, long long n) {"
    "    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;"
    "    if (i < n) y[i] = attr[0] * x[i] * x[i] * x[i];"
    "}";

typedef struct cube_job {
    int op;
    double factor;
} cube_job;

static void cube_step(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    cube_job *j = self;
    wk_tensor *y;
    wk_user_op(c, j->op, in, &j->factor, &y);
    out[0] = wk_sum(wk_mul_scalar(y, 0.5), NULL, 0, false);
    wk_backward(out[0]);
}

SITUATION(a_user_op_with_its_own_gradient) {
    wk_ctx *c = api_ctx(true);
    wk_op_desc d;
    wk_op_desc_init(&d);
    d.name = "cube";
    d.nin = d.nout = d.nattr = 1;
    d.infer = cube_infer;
    d.cpu = cube_cpu;
    d.vjp = cube_vjp;
    d.cuda = cube_cuda;
    cube_job j = {.op = wk_register_op(c, &d)};
    REQUIRE(j.op >= 0);
    api_run r = api_runner(c, cube_step, &j, compiled);
    for (int i = 1; i <= 4; i++) {
        j.factor = i;
        float v[3] = {1, -2, 0.5f};
        wk_tensor *x = wk_requires_grad(api_vector(c, 3, v), true);
        CHECK_NEAR(wk_item(api_call(&r, &x, 1)), i * (1 - 8 + 0.125) * 0.5, 1e-6 * i);
        float *g = api_read(wk_grad(x));
        for (int k = 0; k < 3; k++)
            CHECK_NEAR(g[k], 1.5 * i * (double)v[k] * (double)v[k], 1e-6 * i);
        free(g);
    }
    if (compiled)
        CHECK_EQ_I(api_stats(c).structures_made, 1); /* its attribute is a VALUE */
    wk_tensor *bad = wk_ones(c, WK_F32, SIZE(2, 2)), *y;
    wk_user_op(c, j.op, &bad, &j.factor, &y);
    CHECK(wk_is_poison(y));
    CHECK(strstr(wk_message(c), "cube takes a vector"));
    CHECK_ERROR(c, WK_SHAPE);
    CHECK_EQ_I(wk_register_op(c, &d), -1); /* the name is taken */
    CHECK_ERROR(c, WK_INVALID);
    api_end(c);
}

/* ---- weights, errors, size ----------------------------------------------------------------------------------------- */

typedef struct tied {
    wk_tensor *a, *b; /* the same tensor, or two with equal values */
} tied;

static void tied_step(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    tied *t = self;
    wk_tensor *h = wk_tanh(wk_linear(in[0], t->a, NULL));
    out[0] = wk_sum(wk_linear(h, t->b, NULL), NULL, 0, false);
    wk_backward(out[0]);
}

SITUATION(tied_weights) {
    wk_ctx *c = api_ctx(true);
    wk_tensor *w = wk_requires_grad(api_normal(c, SIZE(6, 6)), true), *x = api_normal(c, SIZE(4, 6));
    tied one = {w, w}, two = {wk_requires_grad(wk_contiguous(wk_mul_scalar(wk_detach(w), 1)), true), NULL};
    two.b = wk_requires_grad(wk_mul_scalar(wk_detach(w), 1), true);
    api_run r1 = api_runner(c, tied_step, &one, compiled), r2 = api_runner(c, tied_step, &two, compiled);
    for (int i = 0; i < 3; i++) {
        CHECK(wk_item(api_call(&r1, &x, 1)) == wk_item(api_call(&r2, &x, 1)));
        REQUIRE(wk_grad(w) && wk_grad(two.a) && wk_grad(two.b));
        float *g = api_read(wk_grad(w)), *sum = api_read(wk_add(wk_grad(two.a), wk_grad(two.b)));
        CHECK_NEAR_F32(g, sum, 36, 1e-5, 1e-5);
        free(g);
        free(sum);
    }
    api_end(c);
}

typedef struct broken {
    train_job job;
    bool fail, read;
} broken;

static void broken_step(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)nin, (void)nout;
    broken *b = self;
    wk_tensor *x = wk_dropout(in[0], 0.1);
    out[0] = wk_cross_entropy(wk_forward(b->job.model, x), in[1]);
    if (b->read)
        wk_item(out[0]);
    if (b->fail)
        out[0] = wk_add(out[0], wk_matmul(in[0], wk_ones(c, WK_F32, SIZE(3, 3))));
    wk_backward(out[0]);
    wk_optim_step(b->job.optim);
}

SITUATION(a_shape_error_inside_a_step) {
    world w;
    world_init(&w, model_mlp, wkt_u64(), train_step, false);
    broken b = {.job = w.job};
    api_run r = api_runner(w.c, broken_step, &b, compiled);
    wk_tensor *in[2];
    mlp_batch(w.c, in);
    api_call(&r, in, 2);
    for (int i = 0; i < 4; i++) {
        int64_t n, steps = wk_optim_steps(w.job.optim);
        float *before = api_params(w.job.model, &n);
        uint64_t sequence, now;
        wk_rng_get(w.c, NULL, &sequence);
        b.fail = true;
        b.read = i % 2;
        CHECK(wk_is_poison(api_call(&r, in, 2)));
        CHECK_ERROR(w.c, WK_SHAPE);
        float *after = api_params(w.job.model, &n);
        CHECK_MEM(after, before, (size_t)n * sizeof *after); /* the optimizer was not reached */
        CHECK_EQ_I(wk_optim_steps(w.job.optim), steps);
        wk_rng_get(w.c, NULL, &now);
        if (compiled)
            CHECK_EQ_I(now, sequence + (b.read ? 1 : 0)); /* a read commits what it needed */
        free(before);
        free(after);
        b.fail = false;
        CHECK(isfinite(wk_item(api_call(&r, in, 2))));
        CHECK_EQ_I(wk_optim_steps(w.job.optim), steps + 1);
    }
    api_end(w.c);
}

static void stale(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    wk_tensor **slot = self;
    out[0] = wk_add(in[0], *slot);
    *slot = wk_neg(in[0]); /* dies with the call: the next one must not compute with it */
}

SITUATION(use_of_a_freed_handle) {
    wk_ctx *c = api_ctx(true);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(3)), *slot = x;
    api_run r = api_runner(c, stale, &slot, compiled);
    float *y = api_read(api_call(&r, &x, 1));
    CHECK(y[0] == 2 && y[2] == 2);
    free(y);
    CHECK(wk_is_poison(api_call(&r, &x, 1)));
    CHECK_ERROR(c, WK_HANDLE);
    slot = x;
    wk_drop(api_call(&r, &x, 1));
    api_end(c);
}

static void chain(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    wk_tensor *x = wk_neg(in[0]);
    for (int i = 0; i < *(int *)self; i++)
        wk_set(&x, i % 2 ? wk_add_scalar(x, -0.5) : wk_add_scalar(x, 0.5));
    out[0] = wk_sum(x, NULL, 0, false);
    wk_backward(out[0]);
}

SITUATION(backward_through_a_hundred_thousand_ops) {
    wk_ctx *c = api_ctx(true);
    int n = rounds(100000, 5000);
    wk_tensor *x = wk_requires_grad(wk_ones(c, WK_F32, SIZE(2)), true);
    api_run r = api_runner(c, chain, &n, compiled);
    CHECK_NEAR(wk_item(api_call(&r, &x, 1)), -2, 0);
    float *g = api_read(wk_grad(x));
    CHECK(g[0] == -1 && g[1] == -1);
    free(g);
    api_end(c);
}
