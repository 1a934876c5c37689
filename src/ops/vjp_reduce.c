/* Gradients of reductions that need more than a line of the table. May call: core, op wrappers. */
#include "ops/infer.h"
#include "ops_gen.h"

/* A gradient of a reduction's shape, spread over the input's shape: the reduced dimensions come back with size 1 first. */
static wki_tensor *spread(wk_ctx *c, const wki_node *n, wki_tensor *g) {
    const wki_meta *m = &n->meta[0];
    int64_t size[WK_MAX_DIMS];
    uint32_t red = wki_op_reduced(n->op, m->ndim, n->ia);
    for (int i = 0; i < m->ndim; i++)
        size[i] = red >> i & 1 ? 1 : m->size[i];
    if (g->ndim != m->ndim)
        g = wki_reshape(c, g, m->ndim, size);
    return wki_expand(c, g, m->ndim, m->size);
}

void wki_vjp_sum(const wki_vjp_args *a) {
    if (a->need[0])
        a->gin[0] = spread(a->c, a->node, a->gout[0]);
}
