/* Plans on the CUDA device against the same plans on the CPU: launched one by one and as a graph, with inputs, addresses and
 * VALUEs that change from call to call. What is a loop program must be equal to the bit; sums that a library takes in its
 * own order are held to a bound. Skipped without a device. */
#define _GNU_SOURCE /* asprintf */

#include "base/alloc.h"
#include "harness.h"
#include "util_api.h"
#include "util_models.h"

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_IN = 5, MAX_OUT = 5 };

static bool no_device(char why[256]) {
    wk_ctx *c = wk_ctx_new(NULL);
    const char *text = "";
    bool none = !wk_device_available(c, WK_CUDA, &text);
    snprintf(why, 256, "%s", text);
    wk_ctx_free(c);
    return none;
}

#define NEED_DEVICE                                                                                          \
    do {                                                                                                     \
        char why[256];                                                                                       \
        if (no_device(why))                                                                                  \
            SKIP("%s", why);                                                                                 \
    } while (0)

static wk_ctx *ctx_on(wk_device d) {
    wk_ctx *c = wk_ctx_new(NULL);
    wk_use_device(c, d);
    return c;
}

/* ---- a graph, its inputs, and both devices ----------------------------------------------------------------------------- */

typedef struct graph {
    const char *name;
    int nin, nout;
    struct {
        wk_dtype dtype; /* F32 normal, I64 in [0, limit) */
        int ndim;
        int64_t size[4];
        int64_t limit;
    } in[MAX_IN];
    wk_fn fn;     /* self: double *, a VALUE that changes with the call */
    double terms; /* of the longest sum a library takes: its rounding errors are a random walk of so many
                     steps of eps times a partial sum of variance `terms`; 0: equal to the bit */
} graph;

static int64_t in_numel(const graph *g, int i) {
    int64_t n = 1;
    for (int d = 0; d < g->in[i].ndim; d++)
        n *= g->in[i].size[d];
    return n;
}

static void draw_inputs(const graph *g, void **data) {
    for (int i = 0; i < g->nin; i++) {
        int64_t n = in_numel(g, i);
        data[i] = malloc((size_t)n * 8 + 8);
        if (g->in[i].dtype == WK_F32)
            wkt_fill_normal(data[i], (size_t)n, 1);
        else
            for (int64_t k = 0; k < n; k++)
                ((int64_t *)data[i])[k] = (int64_t)wkt_below((uint64_t)g->in[i].limit);
    }
}

/* Results of one call, as doubles; NULL where it failed. */
typedef struct results {
    double *v[MAX_OUT];
    int64_t n[MAX_OUT];
} results;

static double *read_all(wk_tensor *t, int64_t *n) {
    *n = wk_numel(t);
    wk_tensor *f = wk_dtype_of(t) == WK_F64 ? t : wk_dtype_of(t) == WK_F32 ? t : wk_cast(t, WK_F32);
    size_t each = wk_dtype_bits(wk_dtype_of(f)) / 8;
    char *raw = malloc((size_t)*n * each + 8);
    double *v = calloc((size_t)*n + 1, sizeof *v);
    CHECK(wk_read(f, raw, (size_t)*n * each));
    for (int64_t i = 0; i < *n; i++)
        v[i] = each == 8 ? ((double *)(void *)raw)[i] : (double)((float *)(void *)raw)[i];
    free(raw);
    return v;
}

/* `shift`: inputs are not where they were in the last call. */
static void call(const graph *g, wk_ctx *c, wk_compiled *f, double *value, void *const *data, bool shift,
                 results *r) {
    wk_tensor *in[MAX_IN], *out[MAX_OUT];
    wk_scope_begin(c);
    for (int i = 0; i < g->nin; i++) {
        if (shift)
            wk_empty(c, g->in[i].dtype, g->in[i].ndim, g->in[i].size);
        in[i] = wk_from_data(c, g->in[i].dtype, g->in[i].ndim, g->in[i].size, data[i]);
        if (g->in[i].dtype == WK_F32)
            wk_requires_grad(in[i], true);
    }
    if (f)
        wk_call_n(f, in, g->nin, out, g->nout);
    else
        g->fn(c, value, in, g->nin, out, g->nout);
    for (int i = 0; i < g->nout; i++)
        r->v[i] = read_all(out[i], &r->n[i]);
    wk_scope_end(c);
    if (wk_failed(c)) {
        FAIL("%s: %s", g->name, wk_message(c));
        wk_error_take(c, NULL);
    }
}

static void compare(const graph *g, const results *want, const results *got, int round, const char *how) {
    for (int i = 0; i < g->nout; i++) {
        double scale = 1, worst = 0;
        int64_t at = 0;
        if (!CHECK_EQ_I(want->n[i], got->n[i]) || !want->v[i] || !got->v[i])
            return;
        for (int64_t k = 0; k < want->n[i]; k++)
            if (isfinite(want->v[i][k]) && fabs(want->v[i][k]) > scale)
                scale = fabs(want->v[i][k]);
        for (int64_t k = 0; k < want->n[i]; k++) {
            double a = want->v[i][k], b = got->v[i][k],
                   d = a == b || (isnan(a) && isnan(b)) ? 0 : fabs(a - b);
            if (!(d <= worst)) {
                worst = d;
                at = k;
            }
        }
        if (!(worst <= 4 * FLT_EPSILON * g->terms * scale)) {
            FAIL("%s, round %d, %s: output %d differs at %lld: %.9g and %.9g", g->name, round, how, i,
                 (long long)at, want->v[i][at], got->v[i][at]);
            return;
        }
    }
}

static void free_results(results *r) {
    for (int i = 0; i < MAX_OUT; i++)
        free(r->v[i]);
}

static void check_rounds(const graph *g, int rounds) {
    wk_ctx *cpu = ctx_on(WK_CPU), *cuda = ctx_on(WK_CUDA), *eager = ctx_on(WK_CUDA);
    uint64_t seed = wkt_u64();
    double value = 1;
    wk_compiled *f = wk_compile(cpu, g->fn, &value, NULL), *h = wk_compile(cuda, g->fn, &value, NULL);
    for (int round = 0; round < rounds; round++) {
        void *data[MAX_IN] = {0};
        results a = {{0}, {0}}, b = {{0}, {0}}, e = {{0}, {0}};
        draw_inputs(g, data);
        value = wkt_uniform(0.5, 2);
        wk_seed(cpu, seed);
        wk_seed(cuda, seed);
        wk_seed(eager, seed);
        bool shift = round > 5 && round % 2;
        call(g, cpu, f, &value, data, false, &a);
        call(g, cuda, h, &value, data, shift, &b);
        compare(g, &a, &b, round, round < 2 ? "direct" : "graph");
        if (round < 4) {
            call(g, eager, NULL, &value, data, shift, &e);
            graph loose = *g;
            loose.terms += 16; /* rounded after every op */
            compare(&loose, &a, &e, round, "eager");
        }
        free_results(&a);
        free_results(&b);
        free_results(&e);
        for (int i = 0; i < MAX_IN; i++)
            free(data[i]);
        seed += 7;
    }
    api_end(cpu);
    api_end(cuda);
    api_end(eager);
}

static void check_graph(const graph *g) { check_rounds(g, wkt_quick() ? 12 : 100); }

#define FN(name)                                                                                             \
    static void name(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout)
#define USES(self_) (void)c, (void)nin, (void)nout, (void)self, (void)in
#define F32(...)                                                                                             \
    { WK_F32, (int)(sizeof((int64_t[]){__VA_ARGS__}) / 8), {__VA_ARGS__}, 0 }
#define I64(limit_, ...)                                                                                     \
    { WK_I64, (int)(sizeof((int64_t[]){__VA_ARGS__}) / 8), {__VA_ARGS__}, limit_ }
#define DIMS(...) (int64_t[]){__VA_ARGS__}, (int)(sizeof((int64_t[]){__VA_ARGS__}) / 8)

static double value_of(void *self) { return *(double *)self; }

/* Gradients of sum(y * y) with respect to the first `n` inputs, into out[at..]. */
static void grads(wk_tensor *y, wk_tensor *const *in, int n, wk_tensor **out, int at) {
    wk_backward(wk_sum(wk_mul(y, y), NULL, 0, false));
    for (int i = 0; i < n; i++)
        out[at + i] = wk_grad(in[i]);
}

/* ---- loops ------------------------------------------------------------------------------------------------------------- */

FN(chain) {
    USES(self);
    wk_tensor *t = wk_gelu(wk_add_scalar(wk_mul(in[0], in[1]), value_of(self)));
    out[0] = wk_sub(wk_tanh(t), wk_div(in[1], wk_add_scalar(wk_exp(in[0]), 1)));
    out[1] = wk_where(wk_lt(in[0], in[1]), wk_sigmoid(t), wk_sqrt(wk_abs(in[0])));
    out[2] = wk_cast(wk_ge(t, in[1]), WK_I32);
    out[3] = wk_cast(wk_cast(in[0], WK_I64), WK_F64);
}

FN(views) {
    USES(self);
    wk_tensor *t = wk_permute(in[0], DIMS(2, 0, 1)), *s = wk_slice(in[0], 1, 1, 7, 2);
    out[0] = wk_add(t, wk_expand(wk_reshape(in[1], 3, (int64_t[]){1, 6, 1}), 3, (int64_t[]){5, 6, 8}));
    out[1] = wk_clone(wk_transpose(s, 0, 2));
    out[2] = wk_mul_scalar(wk_flatten(s, 1), value_of(self));
    wk_backward(wk_sum(wk_mul(s, s), NULL, 0, false));
    out[3] = wk_grad(in[0]); /* by pad_slice */
    out[4] = wk_cast(wk_cast(wk_permute(in[0], DIMS(1, 2, 0)), WK_I64), WK_F32);
}

FN(reductions) {
    USES(self);
    out[0] = wk_sum(in[0], DIMS(1), false);
    out[1] = wk_mean(wk_mul(in[0], in[0]), DIMS(0), true);
    out[2] = wk_max(wk_transpose(in[0], 0, 1), DIMS(1), false);
    out[3] = wk_sum(wk_mul_scalar(in[0], value_of(self)), NULL, 0, false);
    out[4] = wk_sum(in[1], DIMS(0, 2), false);
}

FN(rows) {
    USES(self);
    wk_tensor *y = wk_layer_norm(wk_mul_scalar(in[0], value_of(self)), in[1], in[2], 1e-5);
    out[0] = wk_softmax(y, -1);
    out[1] = wk_log_softmax(wk_causal_fill(in[0]), 1);
    grads(y, in, 3, out, 2);
}

FN(entropy) {
    USES(self);
    out[0] = wk_cross_entropy(wk_mul_scalar(in[0], value_of(self)), in[1]);
    wk_backward(out[0]);
    out[1] = wk_grad(in[0]);
}

FN(random_numbers) {
    USES(self);
    out[0] = wk_rand(c, 2, (int64_t[]){7, 33});
    out[1] = wk_add(wk_randn(c, 1, (int64_t[]){101}), wk_rand(c, 1, (int64_t[]){101}));
    out[2] = wk_dropout(in[0], 0.3);
    out[3] = wk_mul(wk_dropout(wk_transpose(in[0], 0, 1), 0.5), wk_randn(c, 2, (int64_t[]){40, 9}));
}

FN(nothing) {
    USES(self);
    out[0] = wk_add(in[0], in[0]);
    out[1] = wk_sum(in[0], DIMS(1), false);
    out[2] = wk_linear(in[0], in[1], NULL);
    out[3] = wk_matmul(in[2], in[0]);
}

TEST(cuda_plan, loops) {
    NEED_DEVICE;
    check_graph(&(graph){"chain", 2, 4, {F32(37, 45), F32(37, 45)}, chain, 0});
    check_graph(&(graph){"views", 2, 5, {F32(6, 8, 5), F32(6)}, views, 0});
    check_graph(&(graph){"reductions", 2, 5, {F32(70, 2500), F32(3, 130, 9)}, reductions, 0});
    check_graph(&(graph){"long reductions", 2, 5, {F32(4, 9000), F32(30, 3, 400)}, reductions, 0});
    check_graph(&(graph){"rows", 3, 5, {F32(20, 33), F32(33), F32(33)}, rows, 0});
    check_graph(&(graph){"entropy", 2, 2, {F32(31, 1300), I64(1300, 31)}, entropy, 0});
    check_graph(&(graph){"random", 1, 4, {F32(9, 40)}, random_numbers, 0});
    check_graph(&(graph){"nothing", 3, 4, {F32(0, 5), F32(4, 5), F32(3, 0)}, nothing, 0});
}

/* ---- library calls and kernels ----------------------------------------------------------------------------------------- */

FN(linears) {
    USES(self);
    wk_tensor *x = wk_mul_scalar(in[0], value_of(self));
    wk_tensor *h = wk_gelu(wk_linear(x, in[1], in[2])); /* smooth: no mask to flip by rounding */
    wk_tensor *y = wk_linear(h, wk_transpose(in[1], 0, 1), NULL);
    out[0] = y;
    grads(y, in, 3, out, 1);
}

FN(relu_of_linear) {
    USES(self);
    out[0] = wk_relu(wk_linear(wk_mul_scalar(in[0], value_of(self)), in[1], in[2]));
    out[1] = wk_relu(wk_linear(in[0], in[1], NULL));
}

/* Operands that no product can walk: every second row and column, a bias of every second element. */
FN(strided_linear) {
    USES(self);
    wk_tensor *x = wk_slice(wk_slice(in[0], 1, 0, 10, 2), 2, 1, wk_size(in[0], 2), 2);
    wk_tensor *y = wk_linear(x, wk_slice(in[1], 1, 0, wk_size(in[1], 1), 2),
                             wk_slice(in[2], 0, 0, wk_size(in[2], 0), 2));
    out[0] = y;
    grads(y, in, 3, out, 1);
}

FN(products) {
    USES(self);
    wk_tensor *a = wk_permute(in[0], DIMS(0, 2, 1, 3)); /* (2, 5, 3, 8): batch strides of two kinds */
    out[0] = wk_matmul(a, wk_transpose(a, 2, 3));
    out[1] = wk_matmul(a, in[1]);
    out[2] = wk_matmul(in[1], wk_slice(in[1], 1, 0, 4, 1));
    grads(wk_add(wk_sum(out[0], NULL, 0, false), wk_sum(wk_tanh(out[1]), NULL, 0, false)), in, 2, out, 3);
}

FN(heads) {
    USES(self);
    wk_tensor *q = wk_transpose(wk_reshape(in[0], 4, (int64_t[]){2, 17, 4, 8}), 1, 2);
    out[0] = wk_attention(q, wk_mul_scalar(q, 0.5), q, true, 0);
    grads(out[0], in, 1, out, 1);
}

FN(conv) {
    USES(self);
    wk_tensor *y = wk_conv2d(wk_mul_scalar(in[0], value_of(self)), in[1], in[2], 1, 1);
    out[0] = y;
    grads(y, in, 3, out, 1);
}

FN(conv_strided) {
    USES(self);
    wk_tensor *x = wk_permute(in[0], DIMS(0, 3, 1, 2)); /* NHWC in memory */
    wk_tensor *y = wk_conv2d(x, wk_transpose(in[1], 2, 3), NULL, 2, 2);
    out[0] = y;
    grads(y, in, 2, out, 1);
}

FN(conv_point) {
    USES(self);
    wk_tensor *y = wk_conv2d(in[0], in[1], in[2], 1, 0);
    out[0] = wk_conv2d(wk_slice(in[0], 3, 0, 6, 1), in[1], NULL, 1, 0);
    grads(y, in, 3, out, 1);
}

FN(pools) {
    USES(self);
    wk_tensor *y = wk_max_pool2d(in[0], 2), *z = wk_max_pool2d_ex(wk_transpose(in[0], 2, 3), 3, 1, 1);
    out[0] = wk_mul_scalar(y, value_of(self));
    out[1] = z;
    wk_backward(wk_add(wk_sum(wk_mul(y, y), NULL, 0, false), wk_sum(wk_mul(z, z), NULL, 0, false)));
    out[2] = wk_grad(in[0]);
}

FN(embeddings) {
    USES(self);
    wk_tensor *y = wk_embedding(in[0], wk_transpose(in[1], 0, 1)),
              *z = wk_embedding(wk_slice(in[0], 1, 3, 300, 3), in[1]);
    out[0] = wk_mul_scalar(y, value_of(self));
    out[1] = z;
    wk_backward(wk_add(wk_sum(wk_mul(y, y), NULL, 0, false), wk_sum(wk_mul(z, z), NULL, 0, false)));
    out[2] = wk_grad(in[0]);
}

TEST(cuda_plan, matrix_products) {
    NEED_DEVICE;
    check_graph(&(graph){"linear", 3, 4, {F32(3, 19, 24), F32(36, 24), F32(36)}, linears, 60});
    check_graph(&(graph){"strided linear", 3, 4, {F32(4, 10, 15), F32(6, 14), F32(12)}, strided_linear, 40});
    check_graph(&(graph){"products", 2, 5, {F32(2, 3, 5, 8), F32(8, 8)}, products, 60});
    check_graph(&(graph){"large linear", 3, 4, {F32(2, 130, 260), F32(270, 260), F32(270)}, linears, 1000});
    check_graph(&(graph){"long linear", 3, 4, {F32(2, 5, 600), F32(20, 600), F32(20)}, linears, 1000});
    check_graph(&(graph){
        "long strided linear", 3, 4, {F32(4, 10, 1215), F32(6, 1214), F32(12)}, strided_linear, 1000});
    check_graph(&(graph){"long products", 2, 5, {F32(2, 3, 5, 600), F32(600, 600)}, products, 2000});
    check_graph(&(graph){"relu", 3, 2, {F32(7, 24), F32(36, 24), F32(36)}, relu_of_linear, 60});
    check_graph(&(graph){"long relu", 3, 2, {F32(40, 600), F32(90, 600), F32(90)}, relu_of_linear, 1000});
    check_graph(&(graph){"relu of a bias", 3, 2, {F32(4, 0), F32(9, 0), F32(9)}, relu_of_linear, 1});
    check_graph(&(graph){"heads", 1, 2, {F32(2, 17, 32)}, heads, 60});
}

/* Products that the library computes. */
TEST(cuda_plan, large_products) {
    NEED_DEVICE;
    const int n = wkt_quick() ? 7 : 15;
    check_rounds(&(graph){"linear", 3, 4, {F32(2, 210, 400), F32(430, 400), F32(430)}, linears, 1000}, n);
    check_rounds(
        &(graph){"strided", 3, 4, {F32(4, 10, 9001), F32(800, 9000), F32(1600)}, strided_linear, 20000}, n);
    check_rounds(&(graph){"products", 2, 5, {F32(2, 48, 6, 512), F32(512, 512)}, products, 3000}, n);
    check_rounds(&(graph){"relu", 3, 2, {F32(300, 600), F32(400, 600), F32(400)}, relu_of_linear, 1000}, n);
}

TEST(cuda_plan, convolution) {
    NEED_DEVICE;
    check_graph(&(graph){"conv", 3, 4, {F32(5, 3, 11, 9), F32(6, 3, 3, 3), F32(6)}, conv, 500});
    check_graph(&(graph){"strided conv", 2, 3, {F32(3, 10, 13, 4), F32(5, 4, 3, 5)}, conv_strided, 200});
    check_graph(&(graph){"1 x 1 conv", 3, 4, {F32(2, 8, 7, 6), F32(12, 8, 1, 1), F32(12)}, conv_point, 100});
    check_graph(&(graph){"no images", 3, 4, {F32(0, 3, 8, 8), F32(4, 3, 3, 3), F32(4)}, conv, 1});
    check_graph(&(graph){"no channels", 3, 4, {F32(2, 0, 8, 8), F32(4, 0, 3, 3), F32(4)}, conv, 100});
}

TEST(cuda_plan, pooling_and_embedding) {
    NEED_DEVICE;
    check_graph(&(graph){"pools", 1, 3, {F32(3, 4, 12, 10)}, pools, 0});
    check_graph(&(graph){"larger pools", 1, 3, {F32(2, 2, 40, 70)}, pools, 0});
    check_graph(&(graph){"largest pools", 1, 3, {F32(2, 1, 90, 80)}, pools, 0});
    check_graph(&(graph){"embedding", 2, 3, {F32(21, 300), I64(21, 7, 60)}, embeddings, 0});
    check_graph(&(graph){"one row", 2, 3, {F32(1, 300), I64(1, 30, 30)}, embeddings, 0});
}

/* ---- training ---------------------------------------------------------------------------------------------------------- */

typedef struct trained {
    wk_ctx *c;
    train_job job;
    wk_compiled *step;
} trained;

static void start(trained *t, wk_device d, wk_module *(*model)(wk_ctx *), uint64_t seed) {
    t->c = ctx_on(WK_CPU);
    wk_seed(t->c, seed);
    wk_module *m = model(t->c);
    if (d != WK_CPU) { /* the same parameters, on the device */
        wk_ctx *from = t->c;
        t->c = ctx_on(d);
        wk_module *n = model(t->c);
        wk_tensor *p[64], *q[64];
        int count = wk_module_params(m, p, 64);
        CHECK_EQ_I(wk_module_params(n, q, 64), count);
        for (int i = 0; i < count; i++) {
            float *v = api_read(p[i]);
            CHECK(wk_write(q[i], v, (size_t)wk_numel(p[i]) * sizeof *v));
            free(v);
        }
        wk_ctx_free(from);
        m = n;
    }
    t->job = (train_job){m, model_adamw(t->c, m, NULL)};
    t->step = wk_compile(t->c, train_step, &t->job, NULL);
}

static wk_module *small_transformer(wk_ctx *c) { return model_transformer(c, 32); }

/* Losses of `steps` steps agree with the CPU's. Rounding differences grow with the steps, through Adam's division by small
   second moments most. */
static void losses_agree(wk_module *(*model)(wk_ctx *), int ndim, const int64_t *size, int64_t vocab,
                         int64_t targets, int64_t classes, int steps) {
    trained t[2];
    uint64_t seed = wkt_u64();
    start(&t[0], WK_CPU, model, seed);
    start(&t[1], WK_CUDA, model, seed);
    int64_t n = 1;
    for (int d = 0; d < ndim; d++)
        n *= size[d];
    for (int s = 0; s < steps; s++) {
        float *x = malloc((size_t)n * sizeof *x);
        int64_t *ids = malloc((size_t)n * sizeof *ids), *y = malloc((size_t)targets * sizeof *y);
        wkt_fill_normal(x, (size_t)n, 1);
        for (int64_t i = 0; i < n; i++)
            ids[i] = (int64_t)wkt_below((uint64_t)vocab);
        for (int64_t i = 0; i < targets; i++)
            y[i] = (int64_t)wkt_below((uint64_t)classes);
        double loss[2];
        for (int k = 0; k < 2; k++) {
            wk_ctx *c = t[k].c;
            wk_scope_begin(c);
            wk_tensor *in[2] = {vocab > 1 ? wk_from_data(c, WK_I64, ndim, size, ids)
                                          : wk_from_data(c, WK_F32, ndim, size, x),
                                wk_from_data(c, WK_I64, 1, &targets, y)};
            loss[k] = wk_item(wk_call(t[k].step, in, 2));
            wk_scope_end(c);
        }
        CHECK_NEAR(loss[1], loss[0], 1e-5 * (s + 1) * fabs(loss[0]));
        free(x);
        free(ids);
        free(y);
    }
    for (int k = 0; k < 2; k++)
        api_end(t[k].c);
}

TEST(cuda_plan, models_learn_as_on_the_cpu) {
    NEED_DEVICE;
    int steps = wkt_quick() ? 5 : 20;
    losses_agree(model_mlp, SIZE(32, MLP_FEATURES), 1, 32, CLASSES, steps);
    losses_agree(model_cnn, SIZE(8, 1, CNN_SIDE, CNN_SIDE), 1, 8, CLASSES, steps);
    losses_agree(small_transformer, SIZE(3, 20), TF_VOCAB, 60, TF_VOCAB, steps);
}

/* Steady state: one graph a call, no host allocation, no plan. */
TEST(cuda_plan, steady_state) {
    NEED_DEVICE;
    trained t;
    start(&t, WK_CUDA, model_mlp, 1);
    wk_tensor *in[2] = {api_normal(t.c, SIZE(32, MLP_FEATURES)), api_classes(t.c, 32, CLASSES)};
    wk_stats before = {0};
    for (int i = 0; i < 30; i++) {
        if (i == 10)
            before = api_stats(t.c);
        wk_scope_begin(t.c);
        wk_call(t.step, in, 2);
        wk_scope_end(t.c);
    }
    wk_stats after = api_stats(t.c);
    CHECK_EQ_I(after.graph_launches - before.graph_launches, 20);
    CHECK_EQ_I(after.flushes - before.flushes, 20);
    CHECK_EQ_I(after.plan_hits - before.plan_hits, 20);
    CHECK_EQ_I(after.host_allocs - before.host_allocs, 0);
    CHECK(after.kernel_launches - before.kernel_launches >= 20 * 8);
    api_end(t.c);
}

/* In-place updates of many tensors in few launches: sgd with momentum on 12 parameters of different sizes. */
typedef struct many {
    wk_tensor *p[12];
    wk_optim *o;
} many;

FN(many_step) {
    USES(self);
    many *m = self;
    wk_tensor *sum = wk_scalar(c, 0);
    for (int i = 0; i < 12; i++)
        sum = wk_add(sum, wk_sum(wk_mul(wk_mul(m->p[i], m->p[i]), in[0]), NULL, 0, false));
    wk_backward(sum);
    wk_optim_step(m->o);
    out[0] = sum;
}

TEST(cuda_plan, many_parameters) {
    NEED_DEVICE;
    float *got[2][12], first[12][4096];
    for (int i = 0; i < 12; i++)
        wkt_fill_normal(first[i], 4096, 1);
    float scale[10];
    wkt_fill_uniform(scale, 10, 0.1, 1);
    for (int k = 0; k < 2; k++) {
        wk_ctx *c = ctx_on(k ? WK_CUDA : WK_CPU);
        many m;
        for (int i = 0; i < 12; i++) {
            int64_t size[] = {1 + 31 * i, 1 + i % 5};
            m.p[i] = wk_retain(wk_requires_grad(wk_from_data(c, WK_F32, 2, size, first[i]), true));
        }
        wk_sgd_options o;
        wk_sgd_options_init(&o);
        o.lr = 0.01;
        o.momentum = 0.9;
        m.o = wk_sgd(c, m.p, 12, &o);
        wk_compiled *f = wk_compile(c, many_step, &m, NULL);
        for (int s = 0; s < 10; s++) {
            wk_scope_begin(c);
            wk_tensor *x = wk_scalar(c, (double)scale[s]);
            wk_optim_set_lr(m.o, 0.01 / (s + 1));
            wk_call(f, &x, 1);
            wk_scope_end(c);
        }
        for (int i = 0; i < 12; i++)
            got[k][i] = api_read(m.p[i]);
        api_end(c);
    }
    for (int i = 0; i < 12; i++) {
        CHECK_MEM(got[1][i], got[0][i], (size_t)((1 + 31 * i) * (1 + i % 5)) * sizeof(float));
        free(got[0][i]);
        free(got[1][i]);
    }
}

/* ---- addresses that move ------------------------------------------------------------------------------------------------ */

FN(layer) {
    USES(self);
    out[0] = wk_tanh(wk_linear(in[0], *(wk_tensor **)self, NULL));
}

static void check_layer(wk_ctx *c, wk_compiled *f, const float *w, int64_t n) {
    float x[8];
    wkt_fill_normal(x, 8, 1);
    wk_scope_begin(c);
    wk_tensor *in = wk_from_data(c, WK_F32, 2, (int64_t[]){1, 8}, x), *y = wk_call(f, &in, 1);
    float *got = api_read(y);
    for (int64_t i = 0; i < n; i++) {
        double sum = 0;
        for (int k = 0; k < 8; k++)
            sum += (double)x[k] * (double)w[i * 8 + k];
        CHECK_NEAR(got[i], tanh(sum), 1e-5);
    }
    free(got);
    wk_scope_end(c);
}

/* Parameters of the same shape take turns, and a plan with a larger arena comes in between: graphs that hold the old
   addresses are made again. */
TEST(cuda_plan, addresses_move) {
    NEED_DEVICE;
    wk_ctx *c = ctx_on(WK_CUDA);
    wk_module *m[2] = {wk_nn_linear(c, 8, 5, false), wk_nn_linear(c, 8, 5, false)};
    wk_tensor *w = NULL;
    float *v[2];
    for (int i = 0; i < 2; i++)
        v[i] = api_read(wk_module_get(m[i], "weight"));
    wk_compiled *f = wk_compile(c, layer, &w, NULL);
    double value = 1;
    wk_compiled *large = wk_compile(c, conv, &value, NULL);
    for (int i = 0; i < 30; i++) {
        int which = i < 12 ? i / 6 : i & 1;
        w = wk_module_get(m[which], "weight");
        check_layer(c, f, v[which], 5);
        if (i % 9 == 8) {
            int64_t side = 16 + 8 * (i / 9);
            wk_scope_begin(c);
            wk_tensor *in[3] = {wk_requires_grad(api_normal(c, SIZE(2, 3, side, side)), true),
                                wk_requires_grad(api_normal(c, SIZE(4, 3, 3, 3)), true),
                                wk_requires_grad(api_normal(c, SIZE(4)), true)},
                      *out[4];
            wk_call_n(large, in, 3, out, 4);
            wk_scope_end(c);
        }
    }
    free(v[0]);
    free(v[1]);
    api_end(c);
}

FN(write_in_place) {
    USES(self);
    wk_tensor *state = *(wk_tensor **)self;
    wk_copy_(wk_slice(state, 0, 1, 7, 2), in[0]); /* rows 1, 3, 5 */
    out[0] = wk_matmul(state, wk_transpose(in[0], 0, 1));
    wk_copy_(state, wk_mul_scalar(state, 0.5));
    out[1] = wk_matmul(state, wk_transpose(in[0], 0, 1));
}

/* A moving tensor that is written in place between two library calls is not read stale. */
TEST(cuda_plan, in_place_between_library_calls) {
    NEED_DEVICE;
    wk_ctx *c[2] = {ctx_on(WK_CPU), ctx_on(WK_CUDA)};
    wk_tensor *state[2];
    wk_compiled *f[2];
    float v[8 * 4];
    wkt_fill_normal(v, 32, 1);
    for (int k = 0; k < 2; k++) {
        state[k] = wk_from_data(c[k], WK_F32, 2, (int64_t[]){8, 4}, v);
        f[k] = wk_compile(c[k], write_in_place, &state[k], NULL);
    }
    for (int i = 0; i < 10; i++) {
        float x[12], *got[2][2];
        wkt_fill_normal(x, 12, 1);
        for (int k = 0; k < 2; k++) {
            wk_scope_begin(c[k]);
            wk_tensor *in = wk_from_data(c[k], WK_F32, 2, (int64_t[]){3, 4}, x), *out[2];
            wk_call_n(f[k], &in, 1, out, 2);
            for (int j = 0; j < 2; j++)
                got[k][j] = api_read(out[j]);
            wk_scope_end(c[k]);
        }
        for (int j = 0; j < 2; j++) {
            CHECK_NEAR_F32(got[1][j], got[0][j], 24, 1e-5, 1e-5);
            free(got[0][j]);
            free(got[1][j]);
        }
    }
    for (int k = 0; k < 2; k++)
        api_end(c[k]);
}

/* ---- copies, faults, user ops, threads ---------------------------------------------------------------------------------- */

TEST(cuda_plan, uploads_stay_in_order) {
    NEED_DEVICE;
    wk_ctx *c = ctx_on(WK_CUDA);
    enum { N = 300000 }; /* several blocks of the upload ring */
    float *v = malloc(N * sizeof *v);
    wk_tensor *x = wk_zeros(c, WK_F32, SIZE(N)), *y[20];
    for (int i = 0; i < 20; i++) {
        for (int k = 0; k < N; k++)
            v[k] = (float)(i + k % 7);
        CHECK(wk_write(x, v, N * sizeof *v));
        memset(v, 0xff, N * sizeof *v); /* the memory is ours again */
        y[i] = wk_mul_scalar(x, 2);
    }
    for (int i = 0; i < 20; i++) {
        CHECK(wk_read(y[i], v, N * sizeof *v));
        bool ok = true;
        for (int k = 0; k < N; k++)
            ok &= v[k] == (float)(2 * (i + k % 7));
        CHECK(ok);
    }
    free(v);
    wk_tensor *back = wk_to(wk_to(y[3], WK_CPU), WK_CUDA);
    CHECK_NEAR(wk_item(wk_sum(wk_sub(back, y[3]), NULL, 0, false)), 0, 0);
    api_end(c);
}

FN(look_up) {
    USES(self);
    out[0] = wk_sum(wk_embedding(in[0], in[1]), NULL, 0, false);
    wk_backward(out[0]);
}

TEST(cuda_plan, bad_indices_are_reported) {
    NEED_DEVICE;
    wk_ctx *c = ctx_on(WK_CUDA);
    wk_compiled *f = wk_compile(c, look_up, NULL, NULL);
    for (int i = 0; i < 10; i++) {
        int64_t idx[3] = {0, i == 2 || i == 5 ? (i == 2 ? 9 : -1) : 4, 2};
        wk_scope_begin(c);
        wk_tensor *in[2] = {wk_requires_grad(wk_ones(c, WK_F32, SIZE(5, 3)), true),
                            wk_from_data(c, WK_I64, 1, (int64_t[]){3}, idx)};
        double sum = wk_item(wk_call(f, in, 2));
        if (i == 2 || i == 5) {
            CHECK(strstr(wk_message(c), "embedding") != NULL);
            CHECK_ERROR(c, WK_INDEX);
        } else {
            CHECK_NEAR(sum, 9, 0);
        }
        wk_scope_end(c);
    }
    wk_tensor *logits = api_normal(c, SIZE(4, 6));
    wk_tensor *loss =
        wk_cross_entropy(logits, wk_from_data(c, WK_I64, 1, (int64_t[]){4}, (int64_t[]){0, 6, 1, 2}));
    wk_item(loss);
    CHECK_ERROR(c, WK_INDEX);
    api_end(c);
}

static bool pair_infer(const wk_array *in, const double *attr, wk_array *out, int64_t (*size)[WK_MAX_DIMS],
                       char err[256]) {
    (void)attr, (void)err;
    for (int i = 0; i < 2; i++) {
        out[i].dtype = WK_F32;
        out[i].ndim = 1;
        size[i][0] = in[0].size[0];
    }
    return true;
}

static const char pair_cuda[] =
    "extern \"C\" __global__ void __launch_bounds__(256) pair(const float *a, const float *b, float *sum, "
    "float *product,\n"
    "                                                         const float *attr, long long n) {\n"
    "    long long i = blockIdx.x * 256LL + threadIdx.x;\n"
    "    if (i < n) { sum[i] = a[i] + attr[0] * b[i]; product[i] = a[i] * b[i] + attr[1]; }\n"
    "}\n";

typedef struct pair_job {
    int op;
    double attr[2];
} pair_job;

FN(pair_step) {
    USES(self);
    pair_job *j = self;
    wk_tensor *t[2] = {in[0], wk_mul_scalar(in[1], 2)};
    wk_user_op(c, j->op, t, j->attr, out);
    out[1] = wk_mul_scalar(out[1], 0.5);
}

TEST(cuda_plan, user_ops) {
    NEED_DEVICE;
    wk_ctx *c = ctx_on(WK_CUDA);
    wk_op_desc d;
    wk_op_desc_init(&d);
    d.name = "pair";
    d.nin = d.nout = d.nattr = 2;
    d.infer = pair_infer;
    d.cuda = pair_cuda;
    pair_job j = {.op = wk_register_op(c, &d)};
    REQUIRE(j.op >= 0);
    wk_compiled *f = wk_compile(c, pair_step, &j, NULL);
    for (int i = 0; i < 6; i++) {
        enum { N = 1000 };
        float a[N], b[N];
        wkt_fill_normal(a, N, 1);
        wkt_fill_normal(b, N, 1);
        j.attr[0] = i + 1;
        j.attr[1] = -i;
        wk_scope_begin(c);
        wk_tensor *in[2] = {api_vector(c, N, a), api_vector(c, N, b)}, *out[2];
        wk_call_n(f, in, 2, out, 2);
        float *s = api_read(out[0]), *p = api_read(out[1]);
        for (int k = 0; k < N; k++) {
            float e = a[k] + (float)(i + 1) * (2 * b[k]);
            if (s[k] != e || p[k] != (a[k] * (2 * b[k]) - (float)i) * 0.5f) {
                FAIL("element %d of call %d: %.9g is not %.9g", k, i, (double)s[k], (double)e);
                break;
            }
        }
        free(s);
        free(p);
        wk_scope_end(c);
    }
    wk_op_desc none = d;
    none.name = "no_cuda";
    none.cuda = NULL;
    j.op = wk_register_op(c, &none);
    wk_tensor *in[2] = {wk_ones(c, WK_F32, SIZE(3)), wk_ones(c, WK_F32, SIZE(3))}, *out[2];
    wk_user_op(c, j.op, in, j.attr, out);
    CHECK(strstr(wk_message(c), "no CUDA kernel") != NULL);
    CHECK_ERROR(c, WK_DEVICE);
    api_end(c);
}

static void *train_alone(void *arg) {
    double *loss = arg;
    trained t;
    start(&t, WK_CUDA, model_mlp, 42);
    float *x = calloc(16 * MLP_FEATURES, sizeof *x);
    int64_t y[16];
    for (int i = 0; i < 16 * MLP_FEATURES; i++)
        x[i] = (float)(i % 13) / 13;
    for (int i = 0; i < 16; i++)
        y[i] = i % CLASSES;
    wk_tensor *in[2] = {wk_from_data(t.c, WK_F32, SIZE(16, MLP_FEATURES), x),
                        wk_from_data(t.c, WK_I64, SIZE(16), y)};
    for (int i = 0; i < 10; i++) {
        wk_scope_begin(t.c);
        *loss = wk_item(wk_call(t.step, in, 2));
        wk_scope_end(t.c);
    }
    free(x);
    api_end(t.c);
    return NULL;
}

/* Contexts on threads of their own give what one alone gives, to the bit. */
TEST(cuda_plan, contexts_run_side_by_side) {
    NEED_DEVICE;
    enum { N = 4 };
    pthread_t thread[N];
    double loss[N], alone;
    train_alone(&alone);
    for (int i = 0; i < N; i++)
        REQUIRE(!pthread_create(&thread[i], NULL, train_alone, &loss[i]));
    for (int i = 0; i < N; i++) {
        pthread_join(thread[i], NULL);
        CHECK(loss[i] == alone);
    }
}

TEST(cuda_plan, everything_is_freed) {
    NEED_DEVICE;
    double loss;
    int64_t live = wki_alloc_live();
    train_alone(&loss);
    CHECK_EQ_I(wki_alloc_live(), live);
}

/* Four calls of a small step with products, in-place updates and a gradient; the sum of the losses, NAN on
 * failure. */
static double few_steps(int64_t fail_at) {
    wk_ctx *c = wk_ctx_new(NULL);
    double sum = 0;
    wk_seed(c, 3);
    wk_use_device(c, WK_CUDA);
    wki_alloc_fail_once(fail_at);
    wk_module *m = wk_nn_linear(c, 600, 20, true);
    train_job job = {m, model_adamw(c, m, NULL)};
    wk_compiled *f = wk_compile(c, train_step, &job, NULL);
    for (int i = 0; i < 4 && f && job.optim; i++) {
        float x[2 * 600];
        for (int k = 0; k < 2 * 600; k++)
            x[k] = (float)((k + i) % 11) / 11;
        wk_scope_begin(c);
        wk_tensor *in[2] = {wk_from_data(c, WK_F32, SIZE(2, 600), x),
                            wk_from_data(c, WK_I64, SIZE(2), (int64_t[]){3, 7})};
        sum += wk_item(wk_call(f, in, 2));
        wk_scope_end(c);
    }
    wki_alloc_fail_once(0);
    if (wk_failed(c) || !f || !job.optim) {
        wk_error e = {.status = WK_NOMEM};
        if (wk_failed(c))
            wk_error_take(c, &e);
        if (e.status != WK_NOMEM)
            FAIL("allocation %lld fails: %s", (long long)fail_at, e.message);
        sum = NAN;
    }
    wk_ctx_free(c);
    return sum;
}

/* Whichever allocation of the host fails, the context reports it, nothing leaks, and the next one works. */
TEST(cuda_plan, any_allocation_may_fail) {
    NEED_DEVICE;
    wk_ctx *keep = wk_ctx_new(NULL); /* the runtime stays, with its kernels and plans */
    double want = few_steps(0);
    int64_t before = wki_alloc_count();
    CHECK(few_steps(0) == want);
    int64_t n = wki_alloc_count() - before, live = wki_alloc_live(), step = wkt_quick() ? 7 : 1;
    for (int64_t i = 1 + (int64_t)wkt_below((uint64_t)step); i <= n; i += step) {
        double got = few_steps(i);
        CHECK(isnan(got) || got == want); /* an optimisation may do without */
        CHECK_EQ_I(wki_alloc_live(), live);
    }
    CHECK(few_steps(0) == want);
    wk_ctx_free(keep);
}
