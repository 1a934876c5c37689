/* The command's networks (nets.h). */
#include "nets.h"

const char *const net_models[NET_MODELS] = {"cnn", "mlp"};

static void cnn_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    net *n = self;
    wk_tensor *x = wk_max_pool2d(wk_relu(wk_forward(n->layer[0], in[0])), 2);
    x = wk_max_pool2d(wk_relu(wk_forward(n->layer[1], x)), 2);
    x = wk_relu(wk_forward(n->layer[2], wk_flatten(x, 1)));
    out[0] = wk_forward(n->layer[3], x);
}

static void mlp_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    net *n = self;
    wk_tensor *x = wk_relu(wk_forward(n->layer[0], wk_flatten(in[0], 1)));
    x = wk_relu(wk_forward(n->layer[1], x));
    out[0] = wk_forward(n->layer[2], x);
}

wk_module *net_new(wk_ctx *c, int which, net *n) {
    wk_module *m = wk_module_new(c, net_models[which], which ? mlp_forward : cnn_forward, n, NULL);
    if (which) {
        n->layer[0] = wk_module_child(m, "fc1", wk_nn_linear(c, NET_SIDE * NET_SIDE, 256, true));
        n->layer[1] = wk_module_child(m, "fc2", wk_nn_linear(c, 256, 128, true));
        n->layer[2] = wk_module_child(m, "fc3", wk_nn_linear(c, 128, NET_CLASSES, true));
        return m;
    }
    n->layer[0] = wk_module_child(m, "conv1", wk_nn_conv2d(c, 1, 16, 3, 1, 1, true));
    n->layer[1] = wk_module_child(m, "conv2", wk_nn_conv2d(c, 16, 32, 3, 1, 1, true));
    n->layer[2] = wk_module_child(m, "fc1", wk_nn_linear(c, 32 * 7 * 7, 128, true));
    n->layer[3] = wk_module_child(m, "fc2", wk_nn_linear(c, 128, NET_CLASSES, true));
    return m;
}

void net_train_step(wk_ctx *c, void *job, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    net_job *j = job;
    out[0] = wk_cross_entropy(wk_forward(j->model, in[0]), in[1]);
    wk_backward(out[0]);
    wk_optim_step(j->optim);
}
