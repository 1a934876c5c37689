/* The test models. Each is a struct of its modules and a forward function, but for the CNN, which is the command's. */
#include "util_models.h"

#include "cli/nets.h"

#include <stdio.h>
#include <stdlib.h>

wk_module *model_cnn(wk_ctx *c) { return net_new(c, NET_CNN); }

/* ---- MLP ----------------------------------------------------------------------------------------------------------- */

typedef struct mlp {
    wk_module *fc1, *fc2, *fc3;
} mlp;

static void mlp_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    mlp *n = self;
    wk_tensor *x = wk_relu(wk_forward(n->fc1, in[0]));
    out[0] = wk_forward(n->fc3, wk_relu(wk_forward(n->fc2, x)));
}

wk_module *model_mlp(wk_ctx *c) {
    mlp *n = malloc(sizeof *n);
    wk_module *m = wk_module_new(c, "mlp", mlp_forward, n, free);
    n->fc1 = wk_module_child(m, "fc1", wk_nn_linear(c, MLP_FEATURES, 64, true));
    n->fc2 = wk_module_child(m, "fc2", wk_nn_linear(c, 64, 64, true));
    n->fc3 = wk_module_child(m, "fc3", wk_nn_linear(c, 64, CLASSES, true));
    return m;
}

/* ---- transformer --------------------------------------------------------------------------------------------------- */

typedef struct block {
    wk_module *ln1, *qkv, *proj, *ln2, *fc1, *fc2;
} block;

typedef struct transformer {
    wk_module *tok, *pos, *layer[TF_LAYERS], *ln_f;
} transformer;

/* Columns [i * d, (i + 1) * d) of the last dimension, as (N, heads, T, d / heads). */
static wk_tensor *heads_of(wk_tensor *qkv, int i) {
    int64_t n = wk_size(qkv, 0), t = wk_size(qkv, 1), d = TF_WIDTH;
    wk_tensor *part = wk_slice(qkv, 2, i * d, (i + 1) * d, 1);
    return wk_transpose(wk_reshape(part, 4, (int64_t[]){n, t, TF_HEADS, d / TF_HEADS}), 1, 2);
}

static void block_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    block *b = self;
    wk_tensor *x = in[0], *qkv = wk_forward(b->qkv, wk_forward(b->ln1, x));
    wk_tensor *y =
        wk_attention(heads_of(qkv, 0), heads_of(qkv, 1), heads_of(qkv, 2), true, 0.25 /* 1 / sqrt(16) */);
    y = wk_reshape(wk_transpose(y, 1, 2), 3, (int64_t[]){wk_size(x, 0), wk_size(x, 1), TF_WIDTH});
    x = wk_add(x, wk_forward(b->proj, y));
    y = wk_gelu_tanh(wk_forward(b->fc1, wk_forward(b->ln2, x)));
    out[0] = wk_add(x, wk_forward(b->fc2, y));
}

static wk_module *block_new(wk_ctx *c) {
    block *b = malloc(sizeof *b);
    wk_module *m = wk_module_new(c, "block", block_forward, b, free);
    b->ln1 = wk_module_child(m, "ln1", wk_nn_layer_norm(c, TF_WIDTH, 1e-5));
    b->qkv = wk_module_child(m, "qkv", wk_nn_linear(c, TF_WIDTH, 3 * TF_WIDTH, true));
    b->proj = wk_module_child(m, "proj", wk_nn_linear(c, TF_WIDTH, TF_WIDTH, true));
    b->ln2 = wk_module_child(m, "ln2", wk_nn_layer_norm(c, TF_WIDTH, 1e-5));
    b->fc1 = wk_module_child(m, "fc1", wk_nn_linear(c, TF_WIDTH, 4 * TF_WIDTH, true));
    b->fc2 = wk_module_child(m, "fc2", wk_nn_linear(c, 4 * TF_WIDTH, TF_WIDTH, true));
    return m;
}

static void transformer_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out,
                                int nout) {
    (void)nin, (void)nout;
    transformer *n = self;
    wk_module *m = wk_this_module(c);
    int64_t rows = wk_size(in[0], 0), length = wk_size(in[0], 1);
    wk_tensor *table = wk_module_get(m, "tok.weight"), *place = wk_module_get(m, "pos.weight");
    wk_tensor *x = wk_add(wk_forward(n->tok, in[0]), wk_slice(place, 0, 0, length, 1));
    for (int i = 0; i < TF_LAYERS; i++)
        x = wk_forward(n->layer[i], x);
    x = wk_linear(wk_forward(n->ln_f, x), table, NULL);
    out[0] = wk_reshape(x, 2, (int64_t[]){rows * length, TF_VOCAB});
}

wk_module *model_transformer(wk_ctx *c, int64_t max_length) {
    transformer *n = malloc(sizeof *n);
    wk_module *m = wk_module_new(c, "transformer", transformer_forward, n, free);
    n->tok = wk_module_child(m, "tok", wk_nn_embedding(c, TF_VOCAB, TF_WIDTH));
    n->pos = wk_module_child(m, "pos", wk_nn_embedding(c, max_length, TF_WIDTH));
    for (int i = 0; i < TF_LAYERS; i++) {
        char name[16];
        snprintf(name, sizeof name, "blocks.%d", i);
        n->layer[i] = wk_module_child(m, name, block_new(c));
    }
    n->ln_f = wk_module_child(m, "ln_f", wk_nn_layer_norm(c, TF_WIDTH, 1e-5));
    return m;
}

/* ---- training ------------------------------------------------------------------------------------------------------ */

void train_step(wk_ctx *c, void *job, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    train_job *j = job;
    out[0] = wk_cross_entropy(wk_forward(j->model, in[0]), in[1]);
    wk_backward(out[0]);
    if (j->optim)
        wk_optim_step(j->optim);
}

wk_optim *model_adamw(wk_ctx *c, wk_module *m, const wk_adamw_options *o) {
    int n = wk_module_params(m, NULL, 0);
    wk_tensor **p = malloc((size_t)(n ? n : 1) * sizeof(void *));
    wk_module_params(m, p, n);
    wk_optim *opt = wk_adamw(c, p, n, o);
    free(p);
    return opt;
}
