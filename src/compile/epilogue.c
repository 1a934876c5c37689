/* Epilogues of contractions: a relu that alone reads a linear's result becomes part of it, for the contraction has every
 * element in a register once. The same sum and the same comparison, so the same bits. */
#include <string.h>

#include "compile/plan.h"
#include "ops_gen.h"

enum { NONE = -1, MANY = -2 };

/* Per buffer the node that reads it, NONE, or MANY. NULL when out of memory. */
static int *single_readers(const wki_graph *g) {
    int *reader = wki_malloc(((size_t)g->nbuf + 1) * sizeof *reader);
    for (int b = 0; reader && b < g->nbuf; b++)
        reader[b] = NONE;
    for (int i = 0; reader && i < g->nnode; i++)
        for (int j = 0; j < g->node[i].nin && !g->node[i].dead; j++) {
            int b = g->ref[g->node[i].ref0 + j].buf;
            if (b >= 0)
                reader[b] = reader[b] == NONE ? i : MANY;
        }
    return reader;
}

bool wki_pass_epilogue(wk_ctx *c, wki_graph *g) {
    int *reader = single_readers(g);
    if (!reader)
        return wki_fail(c, WK_NOMEM, "no host memory for a plan");
    for (int i = 0; i < g->nnode; i++) {
        wki_gnode *n = &g->node[i];
        if (n->dead || n->op->id != WKI_OP_linear)
            continue;
        wki_gref *y = &g->ref[n->ref0 + n->nin];
        int r = reader[y->buf];
        if (r < 0 || g->node[r].op->id != WKI_OP_relu || g->buf[y->buf].live || g->buf[y->buf].written)
            continue;
        const wki_gref *in = &g->ref[g->node[r].ref0], *out = in + 1;
        if (in->off || !in->plain || in->numel != y->numel || g->ref[n->ref0 + 1].size[1] == 0)
            continue;
        n->op = &wki_ops[WKI_OP_linear_relu];
        y->buf = out->buf; /* the relu's shape may be another view of as many elements: its readers know */
        g->node[r].dead = true;
    }
    wki_free(reader);
    return true;
}
