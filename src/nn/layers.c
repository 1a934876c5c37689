/* The built-in layers. An error in one names its user's line: constructors and forward functions use what keeps the context's
 * caller, the internal op wrappers and nn/module.h. May call: base, core, op wrappers, nn/module.h. */
#include <math.h>
#include <stdio.h>

#include "nn/module.h"
#include "ops_gen.h"

#define CALLER __builtin_return_address(0)

typedef struct layer { /* what a forward function needs beside its parameters */
    int64_t stride, padding;
    double value; /* eps, or the drop probability */
} layer;

/* ---- making -------------------------------------------------------------------------------------------------------- */

/* Are the n sizes of parameters possible? "wk_nn_linear: in_features -3, out_features 4; ..." where they are not. */
static bool sizes_ok(wk_ctx *c, const char *function, int n, const char *const *name, const int64_t *size) {
    char text[192];
    int at = 0;
    bool positive = true, small = true;
    int64_t bytes = (int64_t)sizeof(float);
    for (int i = 0; i < n; i++) {
        positive &= size[i] >= 1;
        small &= positive && !__builtin_mul_overflow(bytes, size[i], &bytes);
        at += snprintf(text + at, sizeof text - (size_t)at, "%s%s %lld", i ? ", " : "", name[i],
                       (long long)size[i]);
    }
    if (positive && small)
        return true;
    return wki_fail(c, WK_SHAPE, "%s: %s; %s", function, text,
                    positive ? "that many parameters are too large"
                    : n > 1  ? "each must be at least 1"
                             : "it must be at least 1");
}

static bool within(wk_ctx *c, const char *name, int64_t v, int64_t low) {
    return (v >= low && v <= INT32_MAX) ||
           wki_fail(c, WK_INVALID, "wk_nn_conv2d: %s %lld; it must be from %lld to %d", name, (long long)v,
                    (long long)low, INT32_MAX);
}

/* The invalid handle when !ok or after wki_fail. */
static wk_module *layer_new(wk_ctx *c, bool ok, const char *kind, wk_fn forward, layer what) {
    layer *l = ok ? wki_malloc(sizeof *l) : NULL;
    if (!l) {
        if (ok)
            wki_fail(c, WK_NOMEM, "no host memory for a layer");
        return wki_box_invalid(c);
    }
    *l = what;
    return wki_module_new(c, kind, forward, l, wki_free);
}

/* m, or the invalid handle where a part of it could not be made. */
static wk_module *finished(wk_ctx *c, wk_module *m) {
    if (!c->failed)
        return m;
    if (wki_box_peek(m, WKI_BOX_MODULE))
        wki_box_free(m);
    return wki_box_invalid(c);
}

/* A parameter uniform in [-bound, bound): Kaiming uniform with a = sqrt(5) has bound 1 / sqrt(fan_in). */
static void uniform_param(wk_ctx *c, wk_module *m, const char *name, int ndim, const int64_t *size,
                          double bound) {
    if (c->failed)
        return;
    bool grad = wk_grad_enable(c, false);
    wk_scope_begin(c);
    wki_tensor *t = wki_mul_scalar(c, wki_add_scalar(c, wki_rand(c, ndim, size), -0.5), 2 * bound);
    wki_module_add(m, WKI_PARAM, name, wki_handle(t), c->caller);
    wk_scope_end(c);
    wk_grad_enable(c, grad);
}

static void fixed_param(wk_ctx *c, wk_module *m, const char *name, int64_t size, int value) {
    if (c->failed)
        return;
    wk_scope_begin(c);
    wki_tensor *t = wki_filled(c, WK_F32, 1, &size, value, "wk_nn_layer_norm");
    if (t)
        wki_module_add(m, WKI_PARAM, name, wki_handle(t), c->caller);
    wk_scope_end(c);
}

/* ---- running ------------------------------------------------------------------------------------------------------- */

static const wki_module *this_module(wk_ctx *c) { return *wki_box_running(c); }

/* The input, entered as from the line that called wk_forward. NULL after wki_fail. */
static wki_tensor *input(wk_ctx *c, wk_tensor *const *in, int nin, int nout) {
    if (nin == 1 && nout == 1 && in[0])
        return wki_enter(in[0], c->caller);
    wki_fail(c, WK_INVALID, "%s takes one input and gives one output; %d and %d are asked for%s",
             this_module(c)->kind, nin, nout, nin == 1 && !in[0] ? ", and the input is NULL" : "");
    return NULL;
}

/* The i-th parameter; NULL past the end, and after wki_fail. */
static wki_tensor *own(wk_ctx *c, const wki_module *m, int i) {
    return i < m->nitem[WKI_PARAM] ? wki_enter(m->item[WKI_PARAM][i].t, c->caller) : NULL;
}

/* ---- the layers ---------------------------------------------------------------------------------------------------- */

static void linear_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)self;
    const wki_module *m = this_module(c);
    wki_tensor *x = input(c, in, nin, nout);
    if (x)
        out[0] = wki_handle(wki_linear(c, x, own(c, m, 0), own(c, m, 1)));
}

wk_module *wk_nn_linear(wk_ctx *c, int64_t in_features, int64_t out_features, bool bias) {
    wki_begin(c, CALLER);
    bool ok = sizes_ok(c, "wk_nn_linear", 2, (const char *const[]){"in_features", "out_features"},
                       (int64_t[]){in_features, out_features});
    wk_module *m = layer_new(c, ok, "linear", linear_forward, (layer){0});
    double bound = ok ? 1 / sqrt((double)in_features) : 0;
    uniform_param(c, m, "weight", 2, (int64_t[]){out_features, in_features}, bound);
    if (bias)
        uniform_param(c, m, "bias", 1, &out_features, bound);
    return finished(c, m);
}

static void conv2d_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    const layer *l = self;
    const wki_module *m = this_module(c);
    wki_tensor *x = input(c, in, nin, nout);
    if (x)
        out[0] = wki_handle(
            wki_conv2d(c, x, own(c, m, 0), own(c, m, 1), l->stride, l->stride, l->padding, l->padding));
}

wk_module *wk_nn_conv2d(wk_ctx *c, int64_t in_channels, int64_t out_channels, int64_t kernel, int64_t stride,
                        int64_t padding, bool bias) {
    wki_begin(c, CALLER);
    bool ok = sizes_ok(c, "wk_nn_conv2d", 4,
                       (const char *const[]){"in_channels", "out_channels", "kernel height", "kernel width"},
                       (int64_t[]){in_channels, out_channels, kernel, kernel}) &&
              within(c, "stride", stride, 1) && within(c, "padding", padding, 0);
    wk_module *m = layer_new(c, ok, "conv2d", conv2d_forward, (layer){.stride = stride, .padding = padding});
    double bound = ok ? 1 / sqrt((double)in_channels) / (double)kernel : 0;
    uniform_param(c, m, "weight", 4, (int64_t[]){out_channels, in_channels, kernel, kernel}, bound);
    if (bias)
        uniform_param(c, m, "bias", 1, &out_channels, bound);
    return finished(c, m);
}

static void layer_norm_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out,
                               int nout) {
    const layer *l = self;
    const wki_module *m = this_module(c);
    wki_tensor *x = input(c, in, nin, nout);
    if (x)
        out[0] = wki_handle(wki_layer_norm(c, x, own(c, m, 0), own(c, m, 1), l->value));
}

wk_module *wk_nn_layer_norm(wk_ctx *c, int64_t features, double eps) {
    wki_begin(c, CALLER);
    bool ok =
        sizes_ok(c, "wk_nn_layer_norm", 1, (const char *const[]){"features"}, &features) &&
        (eps >= 0 || wki_fail(c, WK_INVALID, "wk_nn_layer_norm: eps is %g; it must be at least 0", eps));
    wk_module *m = layer_new(c, ok, "layer_norm", layer_norm_forward, (layer){.value = eps});
    fixed_param(c, m, "weight", features, 1);
    fixed_param(c, m, "bias", features, 0);
    return finished(c, m);
}

static void embedding_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out,
                              int nout) {
    (void)self;
    const wki_module *m = this_module(c);
    wki_tensor *x = input(c, in, nin, nout);
    if (x)
        out[0] = wki_handle(wki_embedding(c, own(c, m, 0), x));
}

wk_module *wk_nn_embedding(wk_ctx *c, int64_t count, int64_t features) {
    wki_begin(c, CALLER);
    const int64_t size[2] = {count, features};
    bool ok = sizes_ok(c, "wk_nn_embedding", 2, (const char *const[]){"count", "features"}, size);
    wk_module *m = layer_new(c, ok, "embedding", embedding_forward, (layer){0});
    if (c->failed)
        return finished(c, m);
    bool grad = wk_grad_enable(c, false);
    wk_scope_begin(c);
    wki_module_add(m, WKI_PARAM, "weight", wki_handle(wki_randn(c, 2, size)), c->caller);
    wk_scope_end(c);
    wk_grad_enable(c, grad);
    return finished(c, m);
}

static void dropout_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    const layer *l = self;
    wki_tensor *x = input(c, in, nin, nout);
    if (x)
        out[0] = this_module(c)->training ? wki_handle(wki_dropout(c, x, l->value)) : in[0];
}

wk_module *wk_nn_dropout(wk_ctx *c, double p) {
    wki_begin(c, CALLER);
    bool ok = (p >= 0 && p < 1) ||
              wki_fail(c, WK_INVALID, "wk_nn_dropout: p is %g; it must be at least 0 and less than 1", p);
    return layer_new(c, ok, "dropout", dropout_forward, (layer){.value = p});
}

static void relu_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)self;
    wki_tensor *x = input(c, in, nin, nout);
    if (x)
        out[0] = wki_handle(wki_relu(c, x));
}

wk_module *wk_nn_relu(wk_ctx *c) {
    wki_begin(c, CALLER);
    return layer_new(c, true, "relu", relu_forward, (layer){0});
}

/* Each layer's input dies as soon as its output is there; the first one is the caller's. The line of a layer's error is that
   which called the whole, but inside a user's own module. */
static void sequential_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out,
                               int nout) {
    (void)self;
    const void *caller = c->caller;
    const wki_module *m = this_module(c);
    if (!input(c, in, nin, nout))
        return;
    wk_tensor *x = in[0];
    for (int i = 0; i < m->nchild; i++) {
        wk_tensor *y;
        wki_forward_n(m->child[i].m->handle, &x, 1, &y, 1, caller);
        if (x != in[0] && x != y)
            wk_drop(x);
        x = y;
    }
    out[0] = x;
}

wk_module *wk_nn_sequential(wk_ctx *c, wk_module *const *layers, int n) {
    const void *caller = CALLER;
    wki_begin(c, caller);
    bool ok = (n >= 0 && (layers || !n)) ||
              wki_fail(c, WK_INVALID, "wk_nn_sequential: %d layers in %s", n, layers ? "an array" : "NULL");
    for (int i = 0; ok && i < n; i++)
        ok = layers[i] || wki_fail(c, WK_INVALID, "wk_nn_sequential: layer %d is NULL", i);
    wk_module *m = layer_new(c, ok, "sequential", sequential_forward, (layer){0});
    for (int i = 0; ok && i < n && !c->failed; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        wki_module_adopt(m, name, layers[i], caller);
    }
    return m;
}
