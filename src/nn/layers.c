/* The built-in layers. May call: base, core (for errors), the public API. */
#include <math.h>
#include <stdio.h>

#include "core/box.h"

typedef struct layer { /* what a forward function needs beside its parameters */
    int64_t stride, padding;
    double value; /* eps, or the drop probability */
} layer;

static wk_module *layer_new(wk_ctx *c, const char *kind, wk_fn forward, layer what) {
    layer *l = wki_malloc(sizeof *l);
    if (!l) {
        wki_fail(c, WK_NOMEM, "no host memory for a layer");
        return wki_box_invalid(c);
    }
    *l = what;
    return wk_module_new(c, kind, forward, l, wki_free);
}

/* 0 for sizes that the op which makes the tensor will refuse. */
static double inverse_root(int64_t fan_in) { return fan_in > 0 ? 1 / sqrt((double)fan_in) : 0; }

/* A parameter uniform in [-bound, bound): Kaiming uniform with a = sqrt(5) has bound 1 / sqrt(fan_in). */
static void uniform_param(wk_ctx *c, wk_module *m, const char *name, int ndim, const int64_t *size,
                          double bound) {
    bool grad = wk_grad_enable(c, false);
    wk_scope_begin(c);
    wk_module_param(m, name, wk_mul_scalar(wk_add_scalar(wk_rand(c, ndim, size), -0.5), 2 * bound));
    wk_scope_end(c);
    wk_grad_enable(c, grad);
}

static void fixed_param(wk_ctx *c, wk_module *m, const char *name, int64_t size, bool one) {
    wk_scope_begin(c);
    wk_module_param(m, name, one ? wk_ones(c, WK_F32, 1, &size) : wk_zeros(c, WK_F32, 1, &size));
    wk_scope_end(c);
}

static void linear_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)self, (void)nin, (void)nout;
    wk_module *m = wk_this_module(c);
    out[0] = wk_linear(in[0], wk_module_own(m, 0), wk_module_own(m, 1));
}

wk_module *wk_nn_linear(wk_ctx *c, int64_t in_features, int64_t out_features, bool bias) {
    wk_module *m = layer_new(c, "linear", linear_forward, (layer){0});
    double bound = inverse_root(in_features);
    uniform_param(c, m, "weight", 2, (int64_t[]){out_features, in_features}, bound);
    if (bias)
        uniform_param(c, m, "bias", 1, &out_features, bound);
    return m;
}

static void conv2d_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)nin, (void)nout;
    const layer *l = self;
    wk_module *m = wk_this_module(c);
    out[0] = wk_conv2d(in[0], wk_module_own(m, 0), wk_module_own(m, 1), l->stride, l->padding);
}

wk_module *wk_nn_conv2d(wk_ctx *c, int64_t in_channels, int64_t out_channels, int64_t kernel, int64_t stride,
                        int64_t padding, bool bias) {
    wk_module *m = layer_new(c, "conv2d", conv2d_forward, (layer){.stride = stride, .padding = padding});
    double bound = inverse_root(in_channels) * inverse_root(kernel) * inverse_root(kernel);
    uniform_param(c, m, "weight", 4, (int64_t[]){out_channels, in_channels, kernel, kernel}, bound);
    if (bias)
        uniform_param(c, m, "bias", 1, &out_channels, bound);
    return m;
}

static void layer_norm_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out,
                               int nout) {
    (void)nin, (void)nout;
    const layer *l = self;
    wk_module *m = wk_this_module(c);
    out[0] = wk_layer_norm(in[0], wk_module_own(m, 0), wk_module_own(m, 1), l->value);
}

wk_module *wk_nn_layer_norm(wk_ctx *c, int64_t features, double eps) {
    wk_module *m = layer_new(c, "layer_norm", layer_norm_forward, (layer){.value = eps});
    fixed_param(c, m, "weight", features, true);
    fixed_param(c, m, "bias", features, false);
    return m;
}

static void embedding_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out,
                              int nout) {
    (void)self, (void)nin, (void)nout;
    out[0] = wk_embedding(wk_module_own(wk_this_module(c), 0), in[0]);
}

wk_module *wk_nn_embedding(wk_ctx *c, int64_t count, int64_t features) {
    wk_module *m = layer_new(c, "embedding", embedding_forward, (layer){0});
    bool grad = wk_grad_enable(c, false);
    wk_scope_begin(c);
    wk_module_param(m, "weight", wk_randn(c, 2, (int64_t[]){count, features}));
    wk_scope_end(c);
    wk_grad_enable(c, grad);
    return m;
}

static void dropout_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)nin, (void)nout;
    const layer *l = self;
    out[0] = wk_is_training(wk_this_module(c)) ? wk_dropout(in[0], l->value) : in[0];
}

wk_module *wk_nn_dropout(wk_ctx *c, double p) {
    return layer_new(c, "dropout", dropout_forward, (layer){.value = p});
}

static void relu_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)self, (void)nin, (void)nout;
    out[0] = wk_relu(in[0]);
}

wk_module *wk_nn_relu(wk_ctx *c) { return layer_new(c, "relu", relu_forward, (layer){0}); }

/* Each layer's input dies as soon as its output is there; the first one is the caller's. */
static void sequential_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out,
                               int nout) {
    (void)self, (void)nin, (void)nout;
    wk_module *m = wk_this_module(c), *next;
    wk_tensor *x = in[0];
    for (int i = 0; (next = wk_module_child_at(m, i)); i++) {
        wk_tensor *y = wk_forward(next, x);
        if (x != in[0] && x != y)
            wk_drop(x);
        x = y;
    }
    out[0] = x;
}

wk_module *wk_nn_sequential(wk_ctx *c, wk_module *const *layers, int n) {
    wk_module *m = layer_new(c, "sequential", sequential_forward, (layer){0});
    for (int i = 0; i < n; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        wk_module_child(m, name, layers[i]);
    }
    return m;
}
