/* The networks that `wick train` trains and the benches time. On the public API alone. */
#pragma once
#include <wick.h>

enum { NET_SIDE = 28, NET_CLASSES = 10, NET_PARAMS = 8 /* at most, of one network */ };
typedef enum net_model { NET_CNN, NET_MLP, NET_MODELS } net_model;
extern const char *const net_models[NET_MODELS]; /* "cnn", "mlp" */

/* (N, 1, 28, 28) -> (N, 10): two convolutions and two linear layers, or three linear layers. */
wk_module *net_new(wk_ctx *c, net_model which);
/* (N, 64) -> (N, 10): three linear layers, the hidden ones of 64. */
wk_module *net_tiny(wk_ctx *c);
/* AdamW with its defaults over all parameters of one of these. */
wk_optim *net_adamw(wk_ctx *c, wk_module *m);

/* What one training step works on; net_train_step is its wk_fn: input, label -> loss. */
typedef struct net_job {
    wk_module *model;
    wk_optim *optim;
} net_job;
void net_train_step(wk_ctx *c, void *job, wk_tensor *const *in, int nin, wk_tensor **out, int nout);
