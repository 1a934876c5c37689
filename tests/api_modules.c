/* The contract of wick.h on sharing, modules and the loader, one test a rule. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"
#include "util_api.h"
#include "util_models.h"

/* ---- sharing ------------------------------------------------------------------------------------------------------- */

TEST(sharing, a_handle_in_another_context_on_the_same_memory) {
    wk_ctx *a = api_ctx(false), *b = api_ctx(false);
    float v[2] = {1, 2}, w[2] = {5, 6}, got[2];
    wk_tensor *x = wk_requires_grad(api_vector(a, 2, v), true), *y = wk_share(b, x);
    CHECK(wk_ctx_of(y) == b && wk_alive(b, y) && !wk_alive(a, y));
    CHECK(wk_needs_grad(y));
    CHECK(wk_read(y, got, sizeof got));
    CHECK_MEM(got, v, sizeof v);
    CHECK(wk_write(x, w, sizeof w));
    CHECK(wk_read(y, got, sizeof got));
    CHECK_MEM(got, w, sizeof w);
    wk_backward(wk_sum(wk_mul(y, y), NULL, 0, false));
    CHECK(wk_grad(y) != NULL);
    CHECK(wk_grad(x) == NULL); /* a gradient belongs to one context's handle */
    api_end(a);                /* the memory outlives the context that made it */
    CHECK(wk_read(y, got, sizeof got));
    CHECK_MEM(got, w, sizeof w);
    api_end(b);
}

TEST(sharing, a_module_in_another_context) {
    wk_ctx *a = api_ctx(false), *b = api_ctx(false);
    wk_module *m = model_transformer(a, 8), *n = wk_module_share(b, m);
    CHECK_EQ_I(wk_module_params(n, NULL, 0), wk_module_params(m, NULL, 0));
    int64_t ids[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    wk_tensor *x = wk_from_data(a, WK_I64, SIZE(1, 8), ids), *y = wk_forward(m, x);
    wk_tensor *x2 = wk_share(b, x), *y2 = wk_forward(n, x2);
    CHECK(wk_ctx_of(y2) == b);
    REQUIRE(!wk_failed(a) && !wk_failed(b));
    float *p = api_read(y), *q = api_read(y2);
    CHECK_MEM(p, q, 8 * TF_VOCAB * sizeof(float));
    wk_backward(wk_sum(y2, NULL, 0, false));
    CHECK(wk_grad(wk_module_get(n, "tok.weight")) != NULL);
    CHECK(wk_grad(wk_module_get(m, "tok.weight")) == NULL);
    wk_train_mode(n, false);
    CHECK(wk_is_training(m) && !wk_is_training(n));
    wk_forward(m, x2); /* outside a shared module, the original does not run on another context's tensors */
    CHECK_ERROR(b, WK_HANDLE);
    api_end(a);
    float *again = api_read(wk_forward(n, x2)); /* the copy outlives the original */
    CHECK_MEM(again, q, 8 * TF_VOCAB * sizeof(float));
    free(p);
    free(q);
    free(again);
    api_end(b);
}

/* ---- modules ------------------------------------------------------------------------------------------------------- */

TEST(modules, names_order_and_lookup) {
    wk_ctx *c = api_ctx(false);
    wk_module *m = model_mlp(c);
    const char *want[] = {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "fc3.weight", "fc3.bias"};
    wk_tensor *p[6];
    CHECK_EQ_I(wk_module_params(m, p, 6), 6);
    for (int i = 0; i < 6; i++) {
        CHECK_STR(wk_module_param_name(m, i), want[i]);
        CHECK(wk_module_get(m, want[i]) == p[i]);
        CHECK(wk_needs_grad(p[i]));
    }
    CHECK(wk_module_param_name(m, 6) == NULL && wk_module_param_name(m, -1) == NULL);
    CHECK(wk_module_get(m, "fc1") == NULL && wk_module_get(m, "") == NULL &&
          wk_module_get(m, "fc4.bias") == NULL);
    CHECK_EQ_I(wk_size(p[4], 0), CLASSES);
    CHECK_EQ_I(wk_size(p[4], 1), 64);
    wk_module_param(m, "scale", wk_ones(c, WK_F32, SIZE(1)));
    CHECK_STR(wk_module_param_name(m, 0), "scale"); /* own parameters come first */
    CHECK(wk_this_module(c) == NULL);
    wk_module *deep = model_transformer(c, 4);
    CHECK(wk_module_get(deep, "blocks.1.ln2.bias") != NULL);
    api_end(c);
}

TEST(modules, a_tied_parameter_counts_once) {
    wk_ctx *c = api_ctx(false), *d = api_ctx(false);
    wk_module *m = wk_module_new(c, "m", api_identity, NULL, NULL);
    wk_module *a = wk_module_child(m, "a", wk_nn_linear(c, 4, 4, false));
    wk_module *b = wk_module_child(m, "b", wk_module_new(c, "tied", api_identity, NULL, NULL));
    wk_module_param(b, "weight", wk_module_own(a, 0));
    wk_tensor *p[2];
    CHECK_EQ_I(wk_module_params(m, p, 2), 1);
    CHECK(wk_module_get(m, "a.weight") == wk_module_get(m, "b.weight"));
    wk_module *n = wk_module_share(d, m);
    CHECK_EQ_I(wk_module_params(n, p, 2), 1);
    CHECK(wk_module_get(n, "a.weight") == wk_module_get(n, "b.weight"));
    api_end(c);
    api_end(d);
}

/* A running mean: the buffer is written in place, eager and compiled, and is no parameter. */
static void running_mean(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)self, (void)nin, (void)nout;
    wk_tensor *mean = wk_module_own_buffer(wk_this_module(c), 0);
    wk_copy_(mean, wk_add(wk_mul_scalar(mean, 0.5), wk_mul_scalar(in[0], 0.5)));
    out[0] = wk_sub(in[0], mean);
}

static void forward_it(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    out[0] = wk_forward(self, in[0]);
}

TEST(modules, buffers_are_state_without_gradient) {
    wk_ctx *c = api_ctx(true), *d = api_ctx(true);
    wk_module *outer = wk_module_new(c, "outer", api_identity, NULL, NULL);
    wk_module *m = wk_module_child(outer, "norm", wk_module_new(c, "norm", running_mean, NULL, NULL));
    wk_tensor *w = wk_module_param(m, "w", wk_ones(c, WK_F32, SIZE(1))), *p[2] = {0};
    wk_scope_begin(c);
    wk_tensor *mean = wk_module_buffer(m, "mean", wk_zeros(c, WK_F32, SIZE(1)));
    wk_scope_end(c);
    CHECK(wk_alive(c, mean) && !wk_needs_grad(mean));
    CHECK_EQ_I(wk_module_params(outer, p, 2), 1);
    CHECK(p[0] == w && !p[1]);
    CHECK_EQ_I(wk_module_buffers(outer, p, 2), 1);
    CHECK(p[0] == mean && wk_module_get(outer, "norm.mean") == mean);
    CHECK(wk_module_own_buffer(m, 0) == mean && !wk_module_own_buffer(m, 1) &&
          !wk_module_own_buffer(outer, 0));
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(1));
    wk_compiled *f = wk_compile(c, forward_it, m, NULL);
    CHECK_NEAR(wk_item(wk_forward(m, x)), 0.5, 0);
    CHECK_NEAR(wk_item(wk_call(f, &x, 1)), 0.25, 0);
    CHECK_NEAR(wk_item(wk_call(f, &x, 1)), 0.125, 0);
    CHECK_NEAR(wk_item(mean), 0.875, 0);
    wk_module *n = wk_module_share(d, outer); /* the same memory */
    wk_forward(wk_module_child_at(n, 0), wk_ones(d, WK_F32, SIZE(1)));
    wk_sync(d);
    CHECK_NEAR(wk_item(mean), 0.9375, 0);
    wk_module_buffer(m, "mean", wk_ones(c, WK_F32, SIZE(1)));
    CHECK_ERROR(c, WK_INVALID);
    wk_module_param(m, "mean", wk_ones(c, WK_F32, SIZE(1)));
    CHECK_ERROR(c, WK_INVALID);
    wk_module_buffer(m, "trained", w);
    CHECK_ERROR(c, WK_INVALID);
    wk_module_buffer(m, "elsewhere", wk_ones(d, WK_F32, SIZE(1)));
    CHECK_ERROR(c, WK_HANDLE);
    wk_module_free(outer);
    CHECK(!wk_alive(c, mean));
    api_end(c);
    api_end(d);
}

TEST(modules, hold_their_parameters) {
    wk_ctx *c = api_ctx(false);
    wk_module *m = wk_module_new(c, "m", api_identity, NULL, NULL);
    wk_scope_begin(c);
    wk_tensor *w = wk_module_param(m, "w", wk_ones(c, WK_F32, SIZE(3)));
    wk_scope_end(c);
    CHECK(wk_alive(c, w));
    wk_drop(w); /* not its scope's any more */
    CHECK(wk_alive(c, w));
    wk_module_free(m);
    CHECK(!wk_alive(c, w));
    api_end(c);
}

TEST(modules, a_child_freed_alone_leaves_its_parent) {
    wk_ctx *c = api_ctx(false);
    wk_module *m = model_mlp(c);
    wk_module_free(wk_module_child_at(m, 1));
    CHECK_EQ_I(wk_module_params(m, NULL, 0), 4);
    CHECK_STR(wk_module_param_name(m, 2), "fc3.weight");
    wk_module_free(m);
    api_end(c);
}

TEST(modules, dropout_is_the_identity_outside_training) {
    wk_ctx *c = api_ctx(false);
    wk_module *inner = wk_nn_dropout(c, 0.5), *m = wk_nn_sequential(c, &inner, 1);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(1000));
    double kept = wk_item(wk_sum(wk_forward(m, x), NULL, 0, false)) / 2;
    CHECK(kept > 350 && kept < 650); /* 1000 draws of a half: 9 sigma */
    wk_train_mode(m, false);
    CHECK(!wk_is_training(inner));
    CHECK_NEAR(wk_item(wk_sum(wk_forward(m, x), NULL, 0, false)), 1000, 0);
    CHECK(wk_alive(c, x));
    api_end(c);
}

TEST(modules, initial_values_have_pytorchs_bounds) {
    wk_ctx *c = api_ctx(false);
    wk_module *conv = wk_nn_conv2d(c, 3, 50, 5, 1, 0, true), *table = wk_nn_embedding(c, 100, 100);
    const double bound = 1 / sqrt(3 * 5 * 5);
    float *w = api_read(wk_module_get(conv, "weight")), *b = api_read(wk_module_get(conv, "bias"));
    double low = 0, high = 0, sum = 0, square = 0;
    for (int i = 0; i < 3750; i++) {
        low = fmin(low, (double)w[i]);
        high = fmax(high, (double)w[i]);
    }
    CHECK(low >= -bound && low < -0.99 * bound && high <= bound && high > 0.99 * bound);
    for (int i = 0; i < 50; i++)
        CHECK(fabs((double)b[i]) <= bound);
    float *e = api_read(wk_module_get(table, "weight"));
    for (int i = 0; i < 10000; i++) {
        sum += (double)e[i];
        square += (double)e[i] * (double)e[i];
    }
    CHECK_NEAR(sum / 10000, 0, 0.06);   /* 6 sigma of the mean of 10,000 */
    CHECK_NEAR(square / 10000, 1, 0.1); /* 7 sigma of the variance */
    free(w);
    free(b);
    free(e);
    api_end(c);
}

/* ---- loader -------------------------------------------------------------------------------------------------------- */

TEST(loader, visits_every_sample_once_an_epoch) {
    wk_ctx *c = api_ctx(false);
    enum { N = 103, BATCH = 10 };
    int32_t label[N];
    uint8_t pixel[N][2];
    for (int i = 0; i < N; i++) {
        label[i] = i;
        pixel[i][0] = (uint8_t)i;
        pixel[i][1] = 255;
    }
    wk_field fields[2] = {{.dtype = WK_U8, .ndim = 1, .size = {2}, .data = pixel},
                          {.dtype = WK_I32, .data = label}};
    wk_loader_options o;
    wk_loader_options_init(&o);
    o.batch = BATCH;
    o.shuffle = true;
    o.seed = wkt_u64();
    wk_loader *l = wk_loader_new(c, fields, 2, N, &o);
    CHECK_EQ_I(wk_loader_batches(l), 11);
    int64_t order[2][N] = {{0}};
    for (int epoch = 0; epoch < 2; epoch++) {
        wk_tensor *b[2];
        int seen[N] = {0}, at = 0;
        for (int k = 0; wk_loader_next(l, b); k++) {
            int64_t n = wk_size(b[1], 0), y[BATCH];
            float x[BATCH][2];
            CHECK_EQ_I(n, k < 10 ? BATCH : 3);
            REQUIRE(n <= BATCH && wk_read(b[1], y, (size_t)n * sizeof *y) &&
                    wk_read(b[0], x, (size_t)n * sizeof *x));
            for (int i = 0; i < n; i++) {
                REQUIRE(y[i] >= 0 && y[i] < N);
                seen[y[i]]++;
                order[epoch][at++] = y[i];
                CHECK(x[i][0] == (float)(int)y[i] / 255 && x[i][1] == 1);
            }
        }
        for (int i = 0; i < N; i++)
            CHECK_EQ_I(seen[i], 1);
    }
    CHECK(memcmp(order[0], order[1], sizeof order[0]) != 0);
    api_end(c);
}

TEST(loader, drop_last_and_short_sets) {
    wk_ctx *c = api_ctx(false);
    float v[10] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    wk_field f = {.dtype = WK_F32, .data = v};
    wk_loader_options o;
    wk_loader_options_init(&o);
    o.batch = 4;
    o.drop_last = true;
    wk_tensor *b;
    wk_loader *l = wk_loader_new(c, &f, 1, 10, &o);
    int n = 0;
    while (wk_loader_next(l, &b))
        CHECK_NEAR(wk_item(wk_sum(b, NULL, 0, false)), n++ ? 22 : 6, 0);
    CHECK_EQ_I(n, 2);
    o.drop_last = false;
    l = wk_loader_new(c, &f, 1, 3, &o);
    CHECK(wk_loader_next(l, &b));
    CHECK_EQ_I(wk_size(b, 0), 3);
    CHECK(!wk_loader_next(l, &b));
    l = wk_loader_new(c, &f, 1, 0, &o);
    CHECK(!wk_loader_next(l, &b) && !wk_loader_next(l, &b));
    api_end(c);
}

TEST(loader, an_iterations_tensors_die_with_it) {
    wk_ctx *c = api_ctx(false);
    float v[8] = {0};
    wk_field f = {.dtype = WK_F32, .data = v};
    wk_loader_options o;
    wk_loader_options_init(&o);
    o.batch = 2;
    wk_loader *l = wk_loader_new(c, &f, 1, 8, &o);
    int64_t before = api_stats(c).live_tensors;
    wk_tensor *b, *y = NULL, *last = NULL;
    for (int i = 0; wk_loader_next(l, &b); i++) {
        CHECK(!i || (!wk_alive(c, y) && !wk_alive(c, last)));
        y = wk_add(b, b);
        last = b;
        if (i == 1)
            wk_scope_begin(c); /* left open: ended with the iteration */
        if (i == 2)
            wk_drop(b);
    }
    CHECK_EQ_I(api_stats(c).live_tensors, before);
    CHECK(wk_loader_next(l, &b)); /* the next epoch, left early */
    y = wk_add(b, b);
    wk_loader_rewind(l);
    CHECK(!wk_alive(c, y));
    CHECK_EQ_I(api_stats(c).live_tensors, before);
    int n = 0;
    while (wk_loader_next(l, &b))
        n++;
    CHECK_EQ_I(n, 4);
    CHECK(wk_loader_next(l, &b));
    wk_empty(c, WK_F32, SIZE(-1));
    CHECK(!wk_loader_next(l, &b)); /* a failed context ends the loop */
    CHECK_ERROR(c, WK_SHAPE);
    api_end(c);
}

TEST(loader, order_depends_on_the_seed_and_the_epoch) {
    enum { N = 50 };
    int32_t v[N];
    for (int i = 0; i < N; i++)
        v[i] = i;
    int64_t order[3][2][N];
    for (int k = 0; k < 3; k++) {
        wk_ctx *c = api_ctx(false);
        wk_field f = {.dtype = WK_I32, .data = v};
        wk_loader_options o;
        wk_loader_options_init(&o);
        o.batch = N;
        o.shuffle = true;
        o.seed = k == 2 ? 8 : 7;
        wk_loader *l = wk_loader_new(c, &f, 1, N, &o);
        wk_tensor *b;
        for (int epoch = 0; epoch < 2; epoch++) {
            CHECK(wk_loader_next(l, &b));
            CHECK(wk_read(b, order[k][epoch], sizeof order[k][epoch]));
            CHECK(!wk_loader_next(l, &b));
        }
        api_end(c);
    }
    CHECK_MEM(order[0], order[1], sizeof order[0]);
    CHECK(memcmp(order[0][0], order[2][0], sizeof order[0][0]) != 0);
    CHECK(memcmp(order[0][1], order[2][0], sizeof order[0][0]) !=
          0); /* epochs of near seeds do not coincide */
}
