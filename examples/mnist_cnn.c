/* Trains a small convolutional network on Fashion-MNIST (Debian package dataset-fashion-mnist) and prints its accuracy.
 *
 * The build makes it: build/examples/mnist_cnn [epochs]. README.md says how a program elsewhere is compiled.
 */
#include <stdio.h>
#include <stdlib.h>
#include <wick.h>

#pragma GCC diagnostic ignored "-Wunused-parameter" /* forward functions use what they need */

#define DATA "/usr/share/datasets/fashion-mnist/"

/* The bytes of a gzipped IDX file after its header. */
static uint8_t *load(const char *name, size_t header, size_t bytes) {
    char command[256];
    snprintf(command, sizeof command, "gzip -dc " DATA "%s", name);
    uint8_t *data = malloc(header + bytes);
    FILE *f = popen(command, "r");
    if (!data || !f || fread(data, 1, header + bytes, f) != header + bytes) {
        fprintf(stderr, "cannot read " DATA "%s\n", name);
        exit(1);
    }
    pclose(f);
    return data + header;
}

/* A module is a struct and a forward function. */
typedef struct net {
    wk_module *c1, *c2, *fc1, *fc2;
} net;

static void net_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    net *n = self;
    wk_tensor *x = wk_max_pool2d(wk_relu(wk_forward(n->c1, in[0])), 2);
    x = wk_max_pool2d(wk_relu(wk_forward(n->c2, x)), 2);
    x = wk_relu(wk_forward(n->fc1, wk_flatten(x, 1)));
    out[0] = wk_forward(n->fc2, x);
}

static wk_module *net_new(wk_ctx *c, net *n) {
    wk_module *m = wk_module_new(c, "net", net_forward, n, NULL);
    n->c1 = wk_module_child(m, "c1", wk_nn_conv2d(c, 1, 16, 3, 1, 1, true));
    n->c2 = wk_module_child(m, "c2", wk_nn_conv2d(c, 16, 32, 3, 1, 1, true));
    n->fc1 = wk_module_child(m, "fc1", wk_nn_linear(c, 32 * 7 * 7, 128, true));
    n->fc2 = wk_module_child(m, "fc2", wk_nn_linear(c, 128, 10, true));
    return m;
}

typedef struct job {
    wk_module *model;
    wk_optim *optim;
} job;

/* The same function runs eager, when called, or compiled, through wk_call. */
static void train_step(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    job *j = self;
    out[0] = wk_cross_entropy(wk_forward(j->model, in[0]), in[1]);
    wk_backward(out[0]);
    wk_optim_step(j->optim);
}

static double count_right(wk_tensor *logits, wk_tensor *labels) {
    wk_tensor *right = wk_eq(wk_argmax(logits, 1, false), labels);
    return wk_item(wk_sum(wk_cast(right, WK_F32), NULL, 0, false));
}

int main(int argc, char **argv) {
    int epochs = argc > 1 ? atoi(argv[1]) : 3, steps = 0;
    double right = 0;
    wk_field train[2] = {{.dtype = WK_U8, .ndim = 3, .size = {1, 28, 28}}, {.dtype = WK_U8, .index = true}};
    wk_field test[2] = {train[0], train[1]};
    train[0].data = load("train-images-idx3-ubyte.gz", 16, 60000 * 28 * 28);
    train[1].data = load("train-labels-idx1-ubyte.gz", 8, 60000);
    test[0].data = load("t10k-images-idx3-ubyte.gz", 16, 10000 * 28 * 28);
    test[1].data = load("t10k-labels-idx1-ubyte.gz", 8, 10000);

    wk_ctx *c = wk_ctx_new(NULL);
    wk_loader_options o;
    wk_loader_options_init(&o);
    o.batch = 64;
    o.shuffle = true;
    wk_loader *loader = wk_loader_new(c, train, 2, 60000, &o);
    o.batch = 500;
    o.shuffle = false;
    wk_loader *eval = wk_loader_new(c, test, 2, 10000, &o);

    net n;
    job j = {.model = net_new(c, &n)};
    wk_tensor *params[8], *batch[2];
    j.optim = wk_adamw(c, params, wk_module_params(j.model, params, 8), NULL);
    wk_compiled *step = wk_compile(c, train_step, &j, NULL);
    for (int epoch = 0; epoch < epochs; epoch++)
        while (wk_loader_next(loader, batch)) {
            wk_tensor *loss = wk_call(step, batch, 2);
            if (++steps % 100 == 0)
                printf("step %d: loss %.4f\n", steps, wk_item(loss));
        }
    wk_grad_enable(c, false);
    while (wk_loader_next(eval, batch))
        right += count_right(wk_forward(j.model, batch[0]), batch[1]);
    if (wk_failed(c)) {
        fprintf(stderr, "%s\n", wk_message(c));
        return 1;
    }
    printf("test accuracy: %.4f\n", right / 10000.0);
    wk_ctx_free(c);
    return 0;
}
