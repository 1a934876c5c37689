/* The test models: a convolutional network, an MLP and a two-layer transformer, and the training step around them. On the
 * public API alone. Parameters have the names and shapes that a PyTorch user would give them.
 */
#pragma once
#include <wick.h>

enum {
    CNN_SIDE = 28,
    MLP_FEATURES = 64,
    CLASSES = 10,
    TF_VOCAB = 64,
    TF_MAX_LENGTH = 512,
    TF_WIDTH = 64,
    TF_HEADS = 4,
    TF_LAYERS = 2,
};

wk_module *model_cnn(wk_ctx *c);                             /* (N, 1, 28, 28) -> (N, 10); cli/nets.h */
wk_module *model_mlp(wk_ctx *c);                             /* (N, 64) -> (N, 10) */
wk_module *model_transformer(wk_ctx *c, int64_t max_length); /* i64 (N, T) -> (N * T, 64); tied head */

/* One training step: forward, cross-entropy, backward, optimizer. */
typedef struct train_job {
    wk_module *model;
    wk_optim *optim; /* NULL: gradients stay */
} train_job;
void train_step(wk_ctx *c, void *job, wk_tensor *const *in, int nin, wk_tensor **out,
                int nout); /* x, target -> loss */

/* An optimizer over all of a model's parameters; o NULL: the defaults. */
wk_optim *model_adamw(wk_ctx *c, wk_module *m, const wk_adamw_options *o);
