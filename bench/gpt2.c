/* A decoder of GPT-2's shape (Radford et al. 2019): pre-norm blocks, tanh GELU, tied head. On the public API alone. */
#include "gpt2.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct block {
    int64_t width, heads;
    wk_module *ln1, *qkv, *proj, *ln2, *fc1, *fc2;
} block;

static wk_tensor *heads_of(const block *b, wk_tensor *qkv, int i) {
    wk_tensor *part = wk_slice(qkv, 2, i * b->width, (i + 1) * b->width, 1);
    int64_t size[4] = {wk_size(qkv, 0), wk_size(qkv, 1), b->heads, b->width / b->heads};
    return wk_transpose(wk_reshape(part, 4, size), 1, 2);
}

static void block_forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    block *b = self;
    wk_tensor *x = in[0], *qkv = wk_forward(b->qkv, wk_forward(b->ln1, x));
    wk_tensor *q = heads_of(b, qkv, 0), *k = heads_of(b, qkv, 1), *v = heads_of(b, qkv, 2);
    int64_t depth = b->width / b->heads;
    wk_tensor *y = wk_attention(q, k, v, true, 1 / sqrt((double)depth));
    y = wk_reshape(wk_transpose(y, 1, 2), 3, (int64_t[]){wk_size(x, 0), wk_size(x, 1), b->width});
    x = wk_add(x, wk_forward(b->proj, y));
    y = wk_gelu_tanh(wk_forward(b->fc1, wk_forward(b->ln2, x)));
    out[0] = wk_add(x, wk_forward(b->fc2, y));
}

static wk_module *block_new(wk_ctx *c, const gpt2_config *cfg) {
    block *b = malloc(sizeof *b);
    wk_module *m = wk_module_new(c, "block", block_forward, b, free);
    if (!b)
        return m;
    b->width = cfg->width;
    b->heads = cfg->heads;
    b->ln1 = wk_module_child(m, "ln1", wk_nn_layer_norm(c, b->width, 1e-5));
    b->qkv = wk_module_child(m, "qkv", wk_nn_linear(c, b->width, 3 * b->width, true));
    b->proj = wk_module_child(m, "proj", wk_nn_linear(c, b->width, b->width, true));
    b->ln2 = wk_module_child(m, "ln2", wk_nn_layer_norm(c, b->width, 1e-5));
    b->fc1 = wk_module_child(m, "fc1", wk_nn_linear(c, b->width, 4 * b->width, true));
    b->fc2 = wk_module_child(m, "fc2", wk_nn_linear(c, 4 * b->width, b->width, true));
    return m;
}

static void forward(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    gpt2 *g = self;
    int64_t rows = wk_size(in[0], 0), length = wk_size(in[0], 1);
    wk_tensor *x = wk_forward(g->tok, in[0]);
    x = wk_add(x, wk_slice(wk_module_own(g->pos, 0), 0, 0, length, 1));
    for (int i = 0; i < g->cfg.layers; i++)
        x = wk_forward(g->block[i], x);
    x = wk_linear(wk_forward(g->ln_f, x), wk_module_own(g->tok, 0), NULL);
    out[0] = wk_reshape(x, 2, (int64_t[]){rows * length, g->cfg.vocab});
}

gpt2_config gpt2_small(void) { return (gpt2_config){12, 768, 12, 50304, 1024}; }

void gpt2_init(gpt2 *g, wk_ctx *c, gpt2_config cfg) {
    g->cfg = cfg;
    g->scale = 0;
    g->model = wk_module_new(c, "gpt2", forward, g, NULL);
    g->tok = wk_module_child(g->model, "tok", wk_nn_embedding(c, cfg.vocab, cfg.width));
    g->pos = wk_module_child(g->model, "pos", wk_nn_embedding(c, cfg.context, cfg.width));
    for (int i = 0; i < cfg.layers; i++) {
        char name[24];
        snprintf(name, sizeof name, "blocks.%d", i);
        g->block[i] = wk_module_child(g->model, name, block_new(c, &cfg));
    }
    g->ln_f = wk_module_child(g->model, "ln_f", wk_nn_layer_norm(c, cfg.width, 1e-5));
    wk_tensor *params[16 * GPT2_MAX_LAYERS];
    g->optim = wk_adamw(c, params, wk_module_params(g->model, params, 16 * GPT2_MAX_LAYERS), NULL);
}

void gpt2_step(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    gpt2 *g = self;
    out[0] = wk_cross_entropy(wk_forward(g->model, in[0]), in[1]);
    wk_backward(g->scale != 0 ? wk_mul_scalar(out[0], g->scale) : out[0]);
    wk_optim_step(g->optim);
}
