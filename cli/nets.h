/* The networks that `wick train` trains and `wick bench train` times. On the public API alone. */
#pragma once
#include <wick.h>

enum { NET_SIDE = 28, NET_CLASSES = 10, NET_MODELS = 2 };
extern const char *const net_models[NET_MODELS]; /* "cnn", "mlp" */

typedef struct net { /* a model's self: lives as long as the model */
    wk_module *layer[4];
} net;

/* (N, 1, 28, 28) -> (N, 10): two convolutions and two linear layers, or three linear layers. */
wk_module *net_new(wk_ctx *c, int which, net *n);

/* What one training step works on; net_train_step is its wk_fn: image, label -> loss. */
typedef struct net_job {
    wk_module *model;
    wk_optim *optim;
} net_job;
void net_train_step(wk_ctx *c, void *job, wk_tensor *const *in, int nin, wk_tensor **out, int nout);
