/* Wrong arguments: each is an error with a code and a message, never a crash, and the context goes on. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"
#include "util_api.h"
#include "util_models.h"

TEST(errors, creation) {
    wk_ctx *c = api_ctx(false);
    CHECK(wk_is_poison(wk_empty(c, WK_F32, SIZE(2, -1))));
    CHECK_ERROR(c, WK_SHAPE);
    wk_zeros(c, WK_F32, SIZE(INT64_MAX, 2));
    CHECK_ERROR(c, WK_SHAPE);
    wk_ones(c, WK_F32, SIZE(INT64_MAX / 2, 0)); /* the bytes are 0 but strides would overflow */
    CHECK_ERROR(c, WK_SHAPE);
    wk_empty(c, WK_F32, WK_MAX_DIMS + 1, (int64_t[WK_MAX_DIMS + 1]){1, 1, 1, 1, 1, 1, 1, 1, 1});
    CHECK_ERROR(c, WK_SHAPE);
    wk_empty(c, WK_F32, -1, NULL);
    CHECK_ERROR(c, WK_SHAPE);
    wk_empty(c, WK_F32, 2, NULL);
    CHECK_ERROR(c, WK_SHAPE);
    wk_empty(c, WK_DTYPE_COUNT, SIZE(2));
    CHECK_ERROR(c, WK_DTYPE);
    wk_from_data(c, WK_F32, SIZE(2), NULL);
    CHECK_ERROR(c, WK_INVALID);
    wk_empty(c, WK_F32, SIZE((int64_t)1 << 56));
    CHECK_ERROR(c, WK_NOMEM);
    CHECK_EQ_I(wk_numel(wk_empty(c, WK_F32, SIZE(3, 0))), 0);
    CHECK_EQ_I(wk_ndim(wk_scalar(c, 1)), 0);
    api_end(c);
}

TEST(errors, reading_and_writing) {
    wk_ctx *c = api_ctx(false);
    float v[6] = {0};
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(2, 3));
    CHECK(!wk_read(x, v, sizeof v - 1));
    CHECK_ERROR(c, WK_INVALID);
    CHECK(!wk_write(x, v, sizeof v + 4));
    CHECK_ERROR(c, WK_INVALID);
    CHECK(isnan(wk_item(x)));
    CHECK_ERROR(c, WK_SHAPE);
    CHECK_EQ_I(wk_item_i64(x), 0);
    CHECK_ERROR(c, WK_SHAPE);
    CHECK(!wk_write(wk_transpose(x, 0, 1), v, sizeof v));
    CHECK_ERROR(c, WK_INVALID);
    wk_size(x, 2);
    CHECK_ERROR(c, WK_SHAPE);
    CHECK_EQ_I(wk_size(x, -1), 3);
    wk_stride(x, -3);
    CHECK_ERROR(c, WK_SHAPE);
    wk_transpose(x, 0, 5);
    CHECK_ERROR(c, WK_SHAPE);
    wk_flatten(x, 4);
    CHECK_ERROR(c, WK_SHAPE);
    api_end(c);
}

TEST(errors, missing_arguments) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(2, 3));
    CHECK(wk_is_poison(wk_add(x, NULL)));
    CHECK_ERROR(c, WK_INVALID);
    CHECK(wk_is_poison(wk_linear(x, NULL, NULL)));
    CHECK_ERROR(c, WK_INVALID);
    CHECK(wk_is_poison(wk_forward(NULL, x)));
    CHECK_ERROR(c, WK_HANDLE);
    CHECK(wk_is_poison(wk_call(NULL, &x, 1)));
    CHECK_ERROR(c, WK_HANDLE);
    wk_compiled *none = wk_compile(c, NULL, NULL, NULL);
    CHECK(wk_is_poison(wk_call(none, &x, 1)));
    CHECK_ERROR(c, WK_INVALID);
    wk_module *hollow = wk_module_new(c, "hollow", NULL, NULL, NULL);
    CHECK(wk_is_poison(wk_forward(hollow, x)));
    CHECK_ERROR(c, WK_INVALID);
    wk_compiled_free(NULL);
    wk_module_free(NULL); /* nothing says which context is meant: nothing happens */
    wk_optim_step(NULL);
    wk_optim_free(NULL);
    wk_loader_free(NULL);
    CHECK(!wk_loader_next(NULL, NULL));
    CHECK_EQ_I(wk_module_params(NULL, NULL, 0), 0);
    CHECK(!wk_alive(c, NULL));
    wk_release(NULL);
    wk_ctx_free(NULL);
    wk_runtime_free(NULL);
    api_end(c);
}

TEST(errors, shapes_of_ops) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(2, 3)), *w = wk_ones(c, WK_F32, SIZE(4, 5)),
              *v = wk_ones(c, WK_F32, SIZE(3));
    wk_matmul(x, w);
    CHECK_ERROR(c, WK_SHAPE);
    wk_linear(x, w, NULL);
    CHECK_ERROR(c, WK_SHAPE);
    wk_linear(x, wk_ones(c, WK_F32, SIZE(4, 3)), v);
    CHECK_ERROR(c, WK_SHAPE);
    wk_reshape(x, SIZE(4, 2));
    CHECK_ERROR(c, WK_SHAPE);
    wk_sum(x, (int64_t[]){2}, 1, false);
    CHECK_ERROR(c, WK_SHAPE);
    wk_cross_entropy(x, wk_zeros(c, WK_I64, SIZE(3)));
    CHECK_ERROR(c, WK_SHAPE);
    wk_layer_norm(x, w, v, 1e-5);
    CHECK_ERROR(c, WK_SHAPE);
    wk_conv2d(x, w, NULL, 1, 0);
    CHECK_ERROR(c, WK_SHAPE);
    wk_max_pool2d(x, 2);
    CHECK_ERROR(c, WK_SHAPE);
    api_end(c);
}

TEST(errors, dtypes_and_indices) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(2, 3));
    wk_cross_entropy(x, wk_zeros(c, WK_F32, SIZE(2)));
    CHECK_ERROR(c, WK_DTYPE);
    wk_embedding(x, wk_ones(c, WK_F32, SIZE(2)));
    CHECK_ERROR(c, WK_DTYPE);
    int64_t index[2] = {1, 2}; /* the table has rows 0 and 1 */
    wk_tensor *y = wk_embedding(x, wk_from_data(c, WK_I64, SIZE(2), index));
    wk_read(y, (float[6]){0}, 6 * sizeof(float));
    CHECK_ERROR(c, WK_INDEX);
    int64_t target[2] = {0, -1};
    wk_item(wk_cross_entropy(x, wk_from_data(c, WK_I64, SIZE(2), target)));
    CHECK_ERROR(c, WK_INDEX);
    api_end(c);
}

TEST(errors, devices) {
    wk_ctx *c = api_ctx(false);
    const char *why = NULL;
    CHECK(wk_device_available(c, WK_CPU, &why));
    CHECK(!wk_device_available(c, WK_DEVICE_COUNT, &why));
    CHECK(why && *why);
    wk_use_device(c, WK_DEVICE_COUNT);
    CHECK_ERROR(c, WK_DEVICE);
    CHECK_EQ_I(wk_current_device(c), WK_CPU);
    if (!wk_device_available(c, WK_CUDA, &why)) {
        CHECK(*why);
        wk_use_device(c, WK_CUDA);
        CHECK(strstr(wk_message(c), "cuda"));
        CHECK_ERROR(c, WK_DEVICE);
    }
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(2));
    wk_use_device(c, WK_NULL);
    wk_tensor *y = wk_ones(c, WK_F32, SIZE(2));
    CHECK_EQ_I(wk_device_of(y), WK_NULL);
    wk_add(x, y);
    CHECK_EQ_I(wk_error_take(c, NULL), WK_DEVICE);
    wk_use_device(c, WK_CPU);
    api_end(c);
}

TEST(errors, modules) {
    wk_ctx *c = api_ctx(false), *d = api_ctx(false);
    wk_module *m = wk_nn_linear(c, 2, 2, true), *k = wk_nn_relu(c), *other = wk_nn_relu(d);
    wk_module_param(m, "weight", wk_ones(c, WK_F32, SIZE(2)));
    CHECK_ERROR(c, WK_INVALID);
    wk_module_param(m, "", wk_ones(c, WK_F32, SIZE(2)));
    CHECK_ERROR(c, WK_INVALID);
    wk_module_param(m, NULL, wk_ones(c, WK_F32, SIZE(2)));
    CHECK_ERROR(c, WK_INVALID);
    wk_module_param(m, "index", wk_ones(c, WK_I64, SIZE(2)));
    CHECK_ERROR(c, WK_DTYPE);
    wk_module_param(m, "x", wk_ones(d, WK_F32, SIZE(2)));
    CHECK_ERROR(c, WK_HANDLE);
    wk_module_child(m, "bias", k);
    CHECK_ERROR(c, WK_INVALID);
    wk_module_child(m, "other", other);
    CHECK_ERROR(c, WK_HANDLE);
    wk_module_child(m, "m", m);
    CHECK_ERROR(c, WK_INVALID);
    wk_module_child(m, "k", k);
    wk_module_child(k, "m", m);
    CHECK_ERROR(c, WK_INVALID);
    wk_module_child(wk_nn_relu(c), "k", k);
    CHECK_ERROR(c, WK_STATE);
    CHECK_EQ_I(wk_module_params(m, NULL, 0), 2);
    wk_module *bad = wk_nn_linear(c, -2, 2, true);
    CHECK(wk_is_poison(wk_forward(bad, wk_ones(c, WK_F32, SIZE(1)))));
    CHECK_ERROR(c, WK_SHAPE);
    wk_forward(m, wk_ones(c, WK_F32, SIZE(3)));
    CHECK_ERROR(c, WK_SHAPE);
    CHECK(!wk_failed(d));
    api_end(c);
    api_end(d);
}

static void frees_itself(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)self, (void)nin, (void)nout;
    wk_module_free(wk_this_module(c));
    out[0] = wk_neg(in[0]);
}

TEST(errors, a_module_freed_while_it_runs) {
    wk_ctx *c = api_ctx(false);
    wk_module *k = wk_module_new(c, "k", frees_itself, NULL, NULL), *m = wk_nn_sequential(c, &k, 1);
    wk_forward(m, wk_scalar(c, 1));
    CHECK_ERROR(c, WK_STATE);
    wk_train_mode(k, false);
    CHECK(!wk_is_training(k));
    api_end(c);
}

TEST(errors, optimizers) {
    wk_ctx *c = api_ctx(false), *d = api_ctx(false);
    wk_tensor *w = wk_requires_grad(wk_ones(c, WK_F32, SIZE(2)), true), *twice[2] = {w, w}, *none = NULL;
    wk_adamw_options a;
    wk_sgd_options s;
    wk_adamw_options_init(&a);
    wk_sgd_options_init(&s);
    wk_adamw(c, twice, 2, NULL);
    CHECK_ERROR(c, WK_INVALID);
    wk_adamw(c, &none, 1, NULL);
    CHECK_ERROR(c, WK_INVALID);
    wk_adamw(c, NULL, 1, NULL);
    CHECK_ERROR(c, WK_INVALID);
    wk_adamw(c, NULL, -1, NULL);
    CHECK_ERROR(c, WK_INVALID);
    wk_adamw(d, &w, 1, NULL);
    CHECK_ERROR(d, WK_HANDLE);
    wk_tensor *result = wk_mul(w, w);
    wk_sgd(c, &result, 1, NULL);
    CHECK_ERROR(c, WK_GRAD);
    a.lr = -1;
    wk_adamw(c, &w, 1, &a);
    CHECK_ERROR(c, WK_INVALID);
    a.lr = NAN;
    wk_adamw(c, &w, 1, &a);
    CHECK_ERROR(c, WK_INVALID);
    wk_adamw_options_init(&a);
    a.beta2 = 1;
    wk_adamw(c, &w, 1, &a);
    CHECK_ERROR(c, WK_INVALID);
    s.nesterov = true;
    wk_sgd(c, &w, 1, &s);
    CHECK_ERROR(c, WK_INVALID);
    wk_optim *o = wk_sgd(c, &w, 1, NULL);
    wk_optim_set_lr(o, -1);
    CHECK_ERROR(c, WK_INVALID);
    CHECK_NEAR(wk_optim_lr(o), 1e-3, 0);
    wk_optim_step(o); /* no gradient anywhere: nothing to do */
    wk_optim *empty = wk_adamw(c, NULL, 0, NULL);
    wk_optim_step(empty);
    CHECK_EQ_I(wk_optim_steps(empty), 1);
    api_end(c);
    api_end(d);
}

TEST(errors, loaders) {
    wk_ctx *c = api_ctx(false);
    float v[4] = {0};
    wk_field f = {.dtype = WK_F32, .ndim = 1, .size = {2}, .data = v};
    wk_loader_options o;
    wk_loader_options_init(&o);
    wk_loader_new(c, NULL, 1, 2, NULL);
    CHECK_ERROR(c, WK_INVALID);
    wk_loader_new(c, &f, 0, 2, NULL);
    CHECK_ERROR(c, WK_INVALID);
    wk_loader_new(c, &f, 1, -2, NULL);
    CHECK_ERROR(c, WK_INVALID);
    o.batch = 0;
    wk_loader_new(c, &f, 1, 2, &o);
    CHECK_ERROR(c, WK_INVALID);
    f.dtype = WK_F64;
    wk_loader_new(c, &f, 1, 2, NULL);
    CHECK_ERROR(c, WK_DTYPE);
    f.dtype = WK_F32;
    f.ndim = WK_MAX_DIMS;
    wk_loader_new(c, &f, 1, 2, NULL);
    CHECK_ERROR(c, WK_SHAPE);
    f.ndim = 1;
    f.size[0] = -3;
    wk_loader_new(c, &f, 1, 2, NULL);
    CHECK_ERROR(c, WK_SHAPE);
    f.size[0] = 2;
    f.data = NULL;
    wk_loader_new(c, &f, 1, 2, NULL);
    CHECK_ERROR(c, WK_INVALID);
    api_end(c);
}

TEST(errors, user_ops) {
    wk_ctx *c = api_ctx(false);
    wk_op_desc d;
    wk_op_desc_init(&d);
    CHECK_EQ_I(wk_register_op(c, &d), -1); /* no name, no functions */
    CHECK_ERROR(c, WK_INVALID);
    wk_tensor *x = wk_scalar(c, 1), *y = NULL;
    wk_user_op(c, 12345, &x, NULL, &y);
    CHECK(wk_failed(c));
    wk_error_take(c, NULL);
    api_end(c);
}

TEST(errors, names_and_texts) {
    CHECK_STR(wk_status_name(WK_SHAPE), "WK_SHAPE");
    for (int s = 0; s < WK_STATUS_COUNT; s++) {
        CHECK(!strncmp(wk_status_name((wk_status)s), "WK_", 3));
        CHECK(wk_status_text((wk_status)s)[0]);
    }
    CHECK(wk_status_name((wk_status)-1) && wk_status_text((wk_status)9999));
    CHECK_STR(wk_dtype_name(WK_F32), "f32");
    CHECK_EQ_I(wk_dtype_bits(WK_F32), 32);
    CHECK_EQ_I(wk_dtype_bits((wk_dtype)-1), 0);
    CHECK_STR(wk_device_name(WK_CPU), "cpu");
    CHECK(wk_device_name((wk_device)77) != NULL);
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", WK_VERSION_MAJOR, WK_VERSION_MINOR, WK_VERSION_PATCH);
    CHECK_STR(wk_version(), version);
}
