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

/* The error begins so and names this file's line; takes it. */
static void check_line(wk_ctx *c, wk_status s, const char *begins, int line) {
    char here[64];
    const char *m = wk_message(c);
    snprintf(here, sizeof here, "[called at api_errors.c:%d]", line);
    if (strncmp(m, begins, strlen(begins)) != 0)
        FAIL("\"%s\" does not begin with \"%s\"", m, begins);
    if (strstr(m, "called at") && !strstr(m, here))
        FAIL("\"%s\" does not name line %d", m, line);
    CHECK_ERROR(c, s);
}
#define CHECK_LINE(call, status, begins)                                                                     \
    do {                                                                                                     \
        call;                                                                                                \
        check_line(c, status, begins, __LINE__);                                                             \
    } while (0)

TEST(errors, of_layers_name_the_line_that_called) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(64, 32)), *ids = wk_zeros(c, WK_I64, SIZE(3)), *dead = wk_neg(x);
    wk_drop(dead);
    wk_module *linear = wk_nn_linear(c, 16, 4, true), *relu = wk_nn_relu(c), *dropout = wk_nn_dropout(c, 0.5),
              *bare = wk_nn_linear(c, 16, 4, false);
    CHECK_LINE(wk_forward(linear, x), WK_SHAPE, "linear: `x` has shape (64, 32)");
    CHECK_LINE(wk_forward(bare, x), WK_SHAPE, "linear: ");
    CHECK_LINE(wk_forward(wk_nn_conv2d(c, 1, 2, 3, 1, 1, true), x), WK_SHAPE, "conv2d: ");
    CHECK_LINE(wk_forward(wk_nn_layer_norm(c, 16, 1e-5), x), WK_SHAPE, "layer_norm: ");
    CHECK_LINE(wk_forward(wk_nn_embedding(c, 16, 4), x), WK_DTYPE, "embedding: ");
    CHECK_LINE(wk_forward(dropout, ids), WK_DTYPE, "dropout");
    CHECK_LINE(wk_forward(relu, ids), WK_DTYPE, "relu: ");
    CHECK_LINE(wk_forward(relu, dead), WK_HANDLE, "");
    CHECK_LINE(wk_forward(relu, NULL), WK_INVALID, "relu takes one input");
    CHECK_LINE(wk_forward_n(relu, (wk_tensor *[]){x, x}, 2, &dead, 1), WK_INVALID, "relu takes one input");
    wk_module *all = wk_nn_sequential(c, (wk_module *[]){relu, linear}, 2),
              *outer = wk_nn_sequential(c, &all, 1);
    CHECK_LINE(wk_forward(all, x), WK_SHAPE, "linear: ");
    CHECK_LINE(wk_forward(outer, x), WK_SHAPE, "linear: ");
    api_end(c);
}

TEST(errors, name_the_function_and_the_line) {
    wk_ctx *c = api_ctx(false);
    float v[4] = {0};
    wk_tensor *w = wk_requires_grad(wk_ones(c, WK_F32, SIZE(2)), true), *x = wk_ones(c, WK_F32, SIZE(2)),
              *none = NULL;
    wk_adamw_options a;
    wk_sgd_options s;
    wk_loader_options l;
    wk_adamw_options_init(&a);
    wk_sgd_options_init(&s);
    wk_loader_options_init(&l);
    wk_field f = {.dtype = WK_F32, .ndim = 1, .size = {2}, .data = v};
    CHECK_LINE(wk_backward(wk_scalar(c, 1)), WK_GRAD, "wk_backward: root 0 does not require grad");
    CHECK_LINE(wk_backward_ex(&x, 1, NULL), WK_GRAD, "wk_backward_ex: root 0 does not require grad");
    CHECK_LINE(wk_backward(wk_neg(w)), WK_GRAD, "wk_backward: a root of shape (2)");
    a.lr = NAN;
    CHECK_LINE(wk_adamw(c, &w, 1, &a), WK_INVALID, "wk_adamw: lr is nan");
    a.lr = 1;
    a.beta2 = 1;
    CHECK_LINE(wk_adamw(c, &w, 1, &a), WK_INVALID, "wk_adamw: beta2 is 1");
    s.momentum = -1;
    CHECK_LINE(wk_sgd(c, &w, 1, &s), WK_INVALID, "wk_sgd: momentum is -1");
    CHECK_LINE(wk_sgd(c, &none, 1, NULL), WK_INVALID, "wk_sgd: parameter 0 is NULL");
    CHECK_LINE(wk_adamw(c, NULL, -1, NULL), WK_INVALID, "wk_adamw: -1 parameters");
    wk_optim *o = wk_sgd(c, &w, 1, NULL);
    CHECK_LINE(wk_optim_set_lr(o, -1), WK_INVALID, "wk_optim_set_lr: lr is -1");
    CHECK_LINE(wk_loader_new(c, &f, 0, 2, NULL), WK_INVALID, "wk_loader_new: nfields is 0");
    CHECK_LINE(wk_loader_new(c, NULL, 1, 2, NULL), WK_INVALID, "wk_loader_new: fields is NULL");
    CHECK_LINE(wk_loader_new(c, &f, 1, -2, NULL), WK_INVALID, "wk_loader_new: count is -2");
    l.batch = 0;
    CHECK_LINE(wk_loader_new(c, &f, 1, 2, &l), WK_INVALID, "wk_loader_new: batch is 0");
    f.size[0] = -3;
    CHECK_LINE(wk_loader_new(c, &f, 1, 2, NULL), WK_SHAPE, "wk_loader_new: a batch of field 0: size (2, -3)");
    f.data = NULL;
    CHECK_LINE(wk_loader_new(c, &f, 1, 2, NULL), WK_INVALID, "wk_loader_new: the data of field 0 is NULL");
    CHECK_LINE(wk_use_device(c, (wk_device)12), WK_DEVICE, "wk_use_device: there is no device 12");
    CHECK_LINE(wk_to(x, (wk_device)-1), WK_DEVICE, "wk_to: there is no device -1");
    api_end(c);
}

static int own_line;

static void calls_a_layer(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    own_line = __LINE__ + 1;
    out[0] = wk_forward(self, wk_neg(in[0]));
}

/* A user's module among built-in ones names its own lines; what comes after it names that of the whole again. */
TEST(errors, of_layers_inside_a_users_module) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(2, 16));
    wk_module *linear = wk_nn_linear(c, 16, 4, true), *wide = wk_nn_linear(c, 5, 4, true);
    wk_module *m = wk_module_new(c, "m", calls_a_layer, linear, NULL),
              *all = wk_nn_sequential(c, (wk_module *[]){m, wide}, 2);
    CHECK_LINE(wk_forward(all, x), WK_SHAPE, "linear: `x` has shape (2, 4)");
    wk_forward(all, wk_ones(c, WK_F32, SIZE(2, 3)));
    check_line(c, WK_SHAPE, "linear: `x` has shape (2, 3)", own_line);
    api_end(c);
}

TEST(errors, of_layers_that_cannot_be) {
    wk_ctx *c = api_ctx(false);
    const int64_t big = (int64_t)1 << 40;
    wk_module *relu = wk_nn_relu(c);
    CHECK_LINE(wk_nn_linear(c, -3, 4, true), WK_SHAPE,
               "wk_nn_linear: in_features -3, out_features 4; each must be");
    CHECK_LINE(wk_nn_linear(c, 3, 0, true), WK_SHAPE, "wk_nn_linear: in_features 3, out_features 0");
    CHECK_LINE(wk_nn_linear(c, big, big, true), WK_SHAPE, "wk_nn_linear: in_features 1099511627776");
    CHECK_LINE(wk_nn_conv2d(c, 0, 2, 3, 1, 1, true), WK_SHAPE, "wk_nn_conv2d: in_channels 0");
    CHECK_LINE(wk_nn_conv2d(c, 1, 2, -3, 1, 1, true), WK_SHAPE, "wk_nn_conv2d: in_channels 1");
    CHECK_LINE(wk_nn_conv2d(c, 1, 2, 3, 0, 1, true), WK_INVALID, "wk_nn_conv2d: stride 0");
    CHECK_LINE(wk_nn_conv2d(c, 1, 2, 3, 1, -1, true), WK_INVALID, "wk_nn_conv2d: padding -1");
    CHECK_LINE(wk_nn_layer_norm(c, -1, 1e-5), WK_SHAPE, "wk_nn_layer_norm: features -1; it must be");
    CHECK_LINE(wk_nn_layer_norm(c, 4, NAN), WK_INVALID, "wk_nn_layer_norm: eps is nan");
    CHECK_LINE(wk_nn_embedding(c, 4, -1), WK_SHAPE, "wk_nn_embedding: count 4, features -1");
    CHECK_LINE(wk_nn_dropout(c, 2), WK_INVALID, "wk_nn_dropout: p is 2");
    CHECK_LINE(wk_nn_dropout(c, 1), WK_INVALID, "wk_nn_dropout: p is 1");
    CHECK_LINE(wk_nn_dropout(c, NAN), WK_INVALID, "wk_nn_dropout: p is nan");
    CHECK_LINE(wk_nn_sequential(c, NULL, 2), WK_INVALID, "wk_nn_sequential: 2 layers in NULL");
    CHECK_LINE(wk_nn_sequential(c, &relu, -1), WK_INVALID, "wk_nn_sequential: -1 layers");
    CHECK_LINE(wk_nn_sequential(c, (wk_module *[]){relu, NULL}, 2), WK_INVALID,
               "wk_nn_sequential: layer 1 is NULL");
    CHECK_LINE(wk_nn_sequential(c, (wk_module *[]){relu, relu}, 2), WK_STATE, "sequential: child \"1\"");
    CHECK_LINE(wk_module_param(relu, "ids", wk_zeros(c, WK_I64, SIZE(3))), WK_DTYPE,
               "wk_module_param: \"ids\"");
    CHECK(wk_is_poison(wk_forward(wk_nn_dropout(c, 2), wk_scalar(c, 1))));
    CHECK_ERROR(c, WK_INVALID);
    api_end(c);
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

TEST(errors, sizes_of_empty_tensors) {
    wk_ctx *c = api_ctx(false);
    const int64_t big = (int64_t)1 << 62;
    wk_tensor *empty = wk_zeros(c, WK_F32, SIZE(0, 3));
    wk_rand(c, SIZE(0, big, big)); /* no element, and strides that would overflow */
    CHECK_ERROR(c, WK_SHAPE);
    wk_full(c, WK_F32, SIZE(big, 0, big), 1);
    CHECK_ERROR(c, WK_SHAPE);
    wk_reshape(empty, SIZE(0, big, big));
    CHECK_ERROR(c, WK_SHAPE);
    wk_expand(empty, SIZE(big, big, 0, 3));
    CHECK_ERROR(c, WK_SHAPE);
    CHECK_EQ_I(wk_ndim(wk_transpose(wk_scalar(c, 1), -1, 0)), 0);
    wk_max_pool2d(wk_ones(c, WK_F32, SIZE(1, 1, 4, 4)), 0);
    CHECK(strstr(wk_message(c), "kernel size 0"));
    CHECK_ERROR(c, WK_INVALID);
    api_end(c);
}

TEST(errors, integers_that_full_cannot_make) {
    wk_ctx *c = api_ctx(false);
    wk_full(c, WK_U8, SIZE(2), 300);
    CHECK_ERROR(c, WK_INVALID);
    wk_full(c, WK_I64, SIZE(2), 1e10);
    CHECK_ERROR(c, WK_INVALID);
    wk_full(c, WK_I32, SIZE(2), 16777217); /* no f32 number */
    CHECK_ERROR(c, WK_INVALID);
    wk_full(c, WK_I32, SIZE(2), NAN);
    CHECK_ERROR(c, WK_INVALID);
    CHECK_EQ_I(wk_item_i64(wk_full(c, WK_I32, SIZE(1), -2.7)), -2);
    CHECK_EQ_I(wk_item_i64(wk_full(c, WK_U8, SIZE(1), 255)), 255);
    CHECK_EQ_I(wk_item_i64(wk_full(c, WK_I64, SIZE(1), -0x1p31)), -((int64_t)1 << 31));
    api_end(c);
}

TEST(errors, buffers_that_are_null) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(2));
    CHECK(!wk_read(x, NULL, 8));
    CHECK_ERROR(c, WK_INVALID);
    CHECK(!wk_write(x, NULL, 8));
    CHECK_ERROR(c, WK_INVALID);
    api_end(c);
}

TEST(errors, gradients_asked_for_in_vain) {
    wk_ctx *c = api_ctx(false), *d = api_ctx(false);
    wk_tensor *x = wk_requires_grad(wk_ones(c, WK_F32, SIZE(3)), true),
              *y = wk_sum(wk_mul(x, x), NULL, 0, false);
    wk_tensor *out = NULL, *none = NULL, *dead = wk_neg(x), *ids = wk_zeros(c, WK_I64, 0, NULL),
              *there = wk_ones(d, WK_F32, 0, NULL);
    wk_drop(dead);
    wk_backward_options o;
    wk_backward_options_init(&o);
    o.inputs = &x;
    o.ninputs = 1;
    o.out = &out;
    wk_tensor *const bad[] = {dead, none};
    for (int i = 0; i < 2; i++) {
        out = NULL;
        wk_backward_ex(&bad[i], 1, &o);
        CHECK(out && wk_is_poison(out));
        CHECK_ERROR(c, i ? WK_INVALID : WK_HANDLE);
    }
    out = NULL;
    wk_backward_ex(&y, 0, &o);
    CHECK(out && wk_is_poison(out));
    CHECK_ERROR(c, WK_INVALID);
    o.out = NULL;
    wk_backward_ex(&y, 1, &o);
    CHECK_ERROR(c, WK_INVALID);
    o.out = &out;
    o.ninputs = -1;
    wk_backward_ex(&y, 1, &o);
    CHECK_ERROR(c, WK_INVALID);
    o.ninputs = 1;
    o.grads = &ids;
    wk_backward_ex(&y, 1, &o);
    CHECK_ERROR(c, WK_DTYPE);
    o.grads = &there;
    wk_backward_ex(&y, 1, &o);
    CHECK_ERROR(c, WK_INVALID);
    wk_backward_ex(&y, 1, NULL); /* defaults */
    CHECK_NEAR(wk_item(wk_sum(wk_grad(x), NULL, 0, false)), 6, 0);
    api_end(c);
    api_end(d);
}

TEST(errors, a_release_without_a_retain) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *x = wk_requires_grad(wk_ones(c, WK_F32, SIZE(3)), true);
    wk_backward(wk_sum(wk_mul(x, x), NULL, 0, false));
    wk_release(wk_grad(x)); /* the leaf's, not the caller's */
    CHECK_ERROR(c, WK_STATE);
    CHECK_NEAR(wk_item(wk_sum(wk_grad(x), NULL, 0, false)), 6, 0);
    wk_retain(x);
    wk_release(x);
    wk_release(x);
    CHECK_ERROR(c, WK_STATE);
    CHECK(wk_alive(c, x));
    api_end(c);
}

TEST(errors, an_in_place_write_that_would_lose_a_gradient) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *x = wk_requires_grad(wk_ones(c, WK_F32, SIZE(3)), true), *z = wk_zeros(c, WK_F32, SIZE(3));
    wk_copy_(z, wk_neg(x));
    CHECK_ERROR(c, WK_GRAD);
    CHECK_NEAR(wk_item(wk_sum(z, NULL, 0, false)), 0, 0);
    wk_copy_(z, wk_detach(wk_neg(x)));
    CHECK_NEAR(wk_item(wk_sum(z, NULL, 0, false)), -3, 0);
    api_end(c);
}

static void gives_what_it_has(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out,
                              int nout) {
    (void)c, (void)in, (void)nin, (void)nout;
    out[0] = self;
}

TEST(errors, a_result_of_another_context) {
    wk_ctx *c = api_ctx(false), *d = api_ctx(false);
    wk_tensor *x = wk_scalar(c, 1), *there = wk_scalar(d, 1);
    wk_compiled *f = wk_compile(c, gives_what_it_has, there, NULL);
    wk_module *m = wk_module_new(c, "m", gives_what_it_has, there, NULL);
    CHECK(wk_is_poison(wk_call(f, &x, 1)));
    CHECK_ERROR(c, WK_HANDLE);
    CHECK(wk_is_poison(wk_forward(m, x)));
    CHECK_ERROR(c, WK_HANDLE);
    wk_drop(there);
    CHECK(wk_is_poison(wk_call(f, &x, 1)));
    CHECK_ERROR(c, WK_HANDLE);
    CHECK(wk_is_poison(wk_forward(m, x)));
    CHECK_ERROR(c, WK_HANDLE);
    CHECK(!wk_failed(d));
    api_end(c);
    api_end(d);
}

typedef struct labelled {
    wk_tensor *w;
    wk_optim *o;
} labelled;

static void labelled_step(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    labelled *l = self;
    out[0] = wk_cross_entropy(wk_matmul(in[0], l->w), in[1]);
    wk_backward(out[0]);
    wk_optim_step(l->o);
}

TEST(errors, a_wrong_target_leaves_the_parameters) {
    wk_ctx *c = api_ctx(false);
    int64_t target[4] = {0, 2, 7, -1};
    labelled l = {.w = wk_requires_grad(api_normal(c, SIZE(5, 3)), true)};
    l.o = wk_adamw(c, &l.w, 1, NULL);
    wk_compiled *step = wk_compile(c, labelled_step, &l, NULL);
    wk_tensor *in[2] = {api_normal(c, SIZE(4, 5)), wk_from_data(c, WK_I64, SIZE(4), target)};
    float *before = api_read(l.w);
    for (int compiled = 0; compiled < 2; compiled++) {
        if (compiled)
            wk_call(step, in, 2);
        else
            wk_cross_entropy(wk_matmul(in[0], l.w), in[1]);
        CHECK(strstr(wk_message(c), "cross_entropy: target 7 at position 2 is out of range for 3 classes"));
        CHECK_ERROR(c, WK_INDEX);
    }
    float *after = api_read(l.w);
    CHECK(api_same(before, after, 15));
    CHECK(wk_grad(l.w) == NULL);
    CHECK_EQ_I(wk_optim_steps(l.o), 0);
    free(before);
    free(after);
    api_end(c);
}

/* A user op whose functions do what `attr` and `self` say. */
static bool odd_infer(const wk_array *in, const double *attr, wk_array *out, int64_t (*size)[WK_MAX_DIMS],
                      char err[256]) {
    (void)err;
    out[0].ndim = in[0].ndim;
    for (int i = 0; i < in[0].ndim; i++)
        size[0][i] = in[0].size[i];
    if (attr[0] == 1)
        out[0].dtype = (wk_dtype)99;
    if (attr[0] == 2)
        out[0].dtype = (wk_dtype)-1;
    if (attr[0] == 3)
        out[0].ndim = WK_MAX_DIMS + 1;
    if (attr[0] == 4)
        size[0][0] = -1;
    return true;
}

static void odd_cpu(const wk_array *in, wk_array *out, const double *attr) {
    (void)attr;
    memcpy(out[0].data, in[0].data, (size_t)in[0].numel * sizeof(float));
}

/* g times the gradient of a's squares, by a backward. */
static wk_tensor *by_backward(wk_ctx *c, wk_tensor *a, wk_tensor *g) {
    bool old = wk_grad_enable(c, true);
    wk_tensor *loss = wk_sum(wk_mul(a, a), NULL, 0, false), *r;
    wk_backward_options o;
    wk_backward_options_init(&o);
    o.inputs = &a;
    o.ninputs = 1;
    o.out = &r;
    o.retain_graph = true;
    wk_backward_ex(&loss, 1, &o);
    wk_grad_enable(c, old);
    return wk_mul(g, r);
}

static void odd_vjp(wk_ctx *c, wk_tensor *const *in, wk_tensor *const *out, wk_tensor *const *gout,
                    const double *attr, wk_tensor **gin) {
    (void)in, (void)out;
    gin[0] = wk_neg(gout[0]);
    if (attr[0] == 5)
        gin[0] = wk_cast(gout[0], WK_I64);
    if (attr[0] == 6)
        wk_scope_end(c);
    if (attr[0] == 7)
        gin[0] = by_backward(c, in[0], gout[0]);
    if (attr[0] == 8)
        gin[0] = by_backward(c, wk_requires_grad(wk_detach(in[0]), true), gout[0]);
    if (attr[0] == 9) {
        wk_try_begin(c);
        gin[0] = wk_reshape(in[0], SIZE(99));
        wk_try_end(c, NULL);
    }
}

TEST(errors, user_ops_that_break_rules) {
    wk_ctx *c = api_ctx(false);
    wk_op_desc d;
    wk_op_desc_init(&d);
    d.name = "odd";
    d.nin = d.nout = d.nattr = 1;
    d.infer = odd_infer;
    d.cpu = odd_cpu;
    d.vjp = odd_vjp;
    int id = wk_register_op(c, &d);
    wk_tensor *x = wk_requires_grad(wk_ones(c, WK_F32, SIZE(3)), true), *y = NULL;
    wk_user_op(c, -1, &x, NULL, &y);
    CHECK(y && wk_is_poison(y));
    CHECK_ERROR(c, WK_INVALID);
    for (double what = 1; what <= 4; what++) {
        wk_user_op(c, id, &x, &what, &y);
        CHECK(wk_is_poison(y));
        CHECK_ERROR(c, WK_SHAPE);
    }
    for (double what = 5; what <= 6; what++) {
        wk_scope_begin(c);
        wk_user_op(c, id, &x, &what, &y);
        wk_backward(wk_sum(y, NULL, 0, false));
        CHECK_ERROR(c, what == 5 ? WK_DTYPE : WK_STATE);
        wk_scope_end(c); /* is still the test's own */
        CHECK(!wk_failed(c));
        CHECK(wk_alive(c, x));
    }
    wk_tensor *s = wk_requires_grad(wk_scalar(c, 1), true), *a;
    for (double what = 7; what <= 9;
         what++) { /* a backward through the graph of the one that runs; apart from it; poison */
        a = wk_exp(s);
        wk_user_op(c, id, &a, &what, &y);
        wk_backward(y);
        if (what != 8) {
            CHECK_ERROR(c, what == 7 ? WK_GRAD : WK_STATE);
            CHECK(!wk_grad(s));
            continue;
        }
        REQUIRE(wk_grad(s) != NULL);
        CHECK_NEAR(wk_item(wk_grad(s)), 2 * exp(2), 1e-5);
        wk_zero_grad(s);
    }
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
