/* The command's networks (nets.h). */
#include "nets.h"

const char *const net_models[NET_MODELS] = {[NET_CNN] = "cnn", [NET_MLP] = "mlp"};

/* The i-th layer of the network whose forward runs. */
static wk_tensor *layer(wk_ctx *c, int i, wk_tensor *x) {
    return wk_forward(wk_module_child_at(wk_this_module(c), i), x);
}

static void cnn_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)self, (void)nin, (void)nout;
    wk_tensor *x = wk_max_pool2d(wk_relu(layer(c, 0, in[0])), 2);
    x = wk_max_pool2d(wk_relu(layer(c, 1, x)), 2);
    x = wk_relu(layer(c, 2, wk_flatten(x, 1)));
    out[0] = layer(c, 3, x);
}

static void mlp_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)self, (void)nin, (void)nout;
    wk_tensor *x = wk_relu(layer(c, 0, wk_flatten(in[0], 1)));
    x = wk_relu(layer(c, 1, x));
    out[0] = layer(c, 2, x);
}

wk_module *net_new(wk_ctx *c, net_model which) {
    wk_module *m =
        wk_module_new(c, net_models[which], which == NET_CNN ? cnn_forward : mlp_forward, NULL, NULL);
    if (which == NET_MLP) {
        wk_module_child(m, "fc1", wk_nn_linear(c, NET_SIDE * NET_SIDE, 256, true));
        wk_module_child(m, "fc2", wk_nn_linear(c, 256, 128, true));
        wk_module_child(m, "fc3", wk_nn_linear(c, 128, NET_CLASSES, true));
        return m;
    }
    wk_module_child(m, "conv1", wk_nn_conv2d(c, 1, 16, 3, 1, 1, true));
    wk_module_child(m, "conv2", wk_nn_conv2d(c, 16, 32, 3, 1, 1, true));
    wk_module_child(m, "fc1", wk_nn_linear(c, 32 * 7 * 7, 128, true));
    wk_module_child(m, "fc2", wk_nn_linear(c, 128, NET_CLASSES, true));
    return m;
}

wk_module *net_tiny(wk_ctx *c) {
    wk_module *layers[] = {wk_nn_linear(c, 64, 64, true), wk_nn_relu(c), wk_nn_linear(c, 64, 64, true),
                           wk_nn_relu(c), wk_nn_linear(c, 64, NET_CLASSES, true)};
    return wk_nn_sequential(c, layers, 5);
}

wk_optim *net_adamw(wk_ctx *c, wk_module *m) {
    wk_tensor *params[NET_PARAMS];
    return wk_adamw(c, params, wk_module_params(m, params, NET_PARAMS), NULL);
}

void net_train_step(wk_ctx *c, void *job, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    net_job *j = job;
    out[0] = wk_cross_entropy(wk_forward(j->model, in[0]), in[1]);
    wk_backward(out[0]);
    wk_optim_step(j->optim);
}
