/* A decoder of GPT-2's shape and its training step, for benches. On the public API alone. */
#pragma once
#include <wick.h>

typedef struct gpt2_config {
    int layers;
    int64_t width, heads, vocab, context;
} gpt2_config;

enum { GPT2_MAX_LAYERS = 64 };
typedef struct gpt2 {
    gpt2_config cfg;
    wk_module *model, *tok, *pos, *block[GPT2_MAX_LAYERS], *ln_f;
    wk_optim *optim;
    double scale; /* of the loss; 0: none */
} gpt2;

/* Small: 12 layers, width 768, 12 heads, 50,304 tokens, context 1,024. */
gpt2_config gpt2_small(void);
/* Makes the modules and an AdamW over them. g stays in place as long as the context. */
void gpt2_init(gpt2 *g, wk_ctx *c, gpt2_config cfg);
/* wk_fn: token ids (N, T), targets (N * T) -> mean cross-entropy; self is a gpt2. */
void gpt2_step(wk_ctx *c, void *g, wk_tensor *const *in, int nin, wk_tensor **out, int nout);
