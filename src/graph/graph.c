/* The decoded form of a recorded segment: build, verify, print. Calls core only. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "graph/graph.h"

const wki_op *wki_op_by_id(wk_runtime *rt, uint32_t id) {
    if (id < (uint32_t)wki_op_count)
        return &wki_ops[id];
    wki_runtime_lock(rt);
    uint32_t u = id - (uint32_t)wki_op_count;
    const wki_op *op = u < (uint32_t)rt->nuser_ops ? rt->user_ops[u] : NULL;
    wki_runtime_unlock(rt);
    return op;
}

void wki_graph_free(wki_graph *g) {
    if (!g)
        return;
    wki_free(g->node);
    wki_free(g->ref);
    wki_free(g->buf);
    wki_free(g->key);
    wki_free(g);
}

bool wki_node_writes(const wki_gnode *n, int i) {
    return n->op->writes && wki_role_written(n->op, i / wki_role_size(n->op, n->nin));
}

static void contiguous(wki_gref *f) {
    int64_t n = 1;
    for (int i = f->ndim - 1; i >= 0; i--) {
        f->stride[i] = n;
        n *= f->size[i];
    }
    f->numel = n;
    f->plain = true;
}

/* Reads one reference; `whole` remembers every buffer's whole shape. */
static const uint64_t *decode_ref(const uint64_t *p, wki_gref *f, wki_graph *g, wki_gref *whole) {
    uint64_t w = *p++;
    if ((w & 3) == WKI_REF_ABSENT) {
        *f = (wki_gref){.buf = -1, .dtype = WK_DTYPE_COUNT};
        return p;
    }
    uint32_t b = (uint32_t)(w >> 32);
    wki_gbuf *gb = &g->buf[b];
    if (w & WKI_REF_NEW) {
        gb->external = 1;
        gb->dtype = (uint8_t)(w >> WKI_REF_DTYPE);
        gb->pinned = (w & WKI_REF_PINNED) != 0;
        gb->root = (w & WKI_REF_ALIAS) ? (int32_t)*p++ : (int32_t)b;
    }
    if ((w & 3) == WKI_REF_WHOLE) {
        *f = whole[b];
        return p;
    }
    f->buf = (int32_t)b;
    f->ndim = (uint8_t)(w >> WKI_REF_NDIM);
    f->dtype = (uint8_t)(w >> WKI_REF_DTYPE);
    f->off = (int64_t)*p++;
    for (int i = 0; i < f->ndim; i++)
        f->size[i] = (int64_t)*p++;
    contiguous(f);
    if ((w & 3) == WKI_REF_STRIDED) {
        f->plain = false;
        for (int i = 0; i < f->ndim; i++)
            f->stride[i] = (int64_t)*p++;
    }
    if (w & WKI_REF_DECL)
        whole[b] = *f;
    if (gb->external) {
        int64_t last = f->off;
        for (int i = 0; i < f->ndim; i++)
            last += (f->size[i] - 1) * f->stride[i];
        int64_t bytes = f->numel ? (last + 1) * (int64_t)wki_dtype_size((wk_dtype)f->dtype) : 0;
        if (bytes > gb->bytes)
            gb->bytes = bytes;
    }
    return p;
}

/* Where decoding is. */
typedef struct cursor {
    const uint64_t *key;
    const int64_t *meta;
    uint32_t nbuf; /* numbered so far */
    int32_t nval;
    wki_gref *whole; /* per buffer */
} cursor;

static void decode_output(cursor *at, wki_graph *g, const wki_recorder *r) {
    wki_gref *f = &g->ref[g->nref++];
    f->buf = (int32_t)at->nbuf++;
    f->dtype = (uint8_t)(*at->meta >> 8);
    f->ndim = (uint8_t)(*at->meta++ & 255);
    for (int d = 0; d < f->ndim; d++)
        f->size[d] = *at->meta++;
    contiguous(f);
    at->whole[f->buf] = *f;
    g->buf[f->buf] = (wki_gbuf){.dtype = f->dtype,
                                .root = f->buf,
                                .live = r->buf[f->buf].st != NULL,
                                .bytes = f->numel * (int64_t)wki_dtype_size((wk_dtype)f->dtype)};
}

static void decode_node(cursor *at, wki_graph *g, const wki_recorder *r, wk_runtime *rt) {
    wki_gnode *n = &g->node[g->nnode++];
    uint64_t h = *at->key++;
    *n = (wki_gnode){.op = wki_op_by_id(rt, (uint32_t)(h & 0xffff)),
                     .nin = (uint16_t)(h >> 16),
                     .nout = (uint8_t)(h >> 32),
                     .nia = (uint16_t)(h >> 40),
                     .nva = (uint8_t)(h >> 56),
                     .ref0 = g->nref,
                     .va0 = at->nval,
                     .rng = -1};
    at->nval += n->nva;
    for (int i = 0; i < n->nin; i++) {
        wki_gref *f = &g->ref[g->nref++];
        at->key = decode_ref(at->key, f, g, at->whole);
        if (f->buf >= (int32_t)at->nbuf)
            at->nbuf = (uint32_t)f->buf + 1;
    }
    n->ia = (const int64_t *)at->key;
    at->key += n->nia;
    if (n->op->flags & WKI_OP_RNG)
        n->rng = (int32_t)*at->key++;
    for (int i = 0; i < n->nout; i++)
        decode_output(at, g, r);
    for (int i = 0; i < n->nin; i++) {
        int b = g->ref[n->ref0 + i].buf;
        if (b >= 0 && wki_node_writes(n, i))
            g->buf[g->buf[b].root].written = 1;
    }
}

wki_graph *wki_graph_decode(wk_ctx *c, const wki_recorder *r) {
    wki_graph *g = wki_calloc(1, sizeof *g);
    wki_gref *whole = wki_calloc(r->nbuf + 1, sizeof *whole);
    bool ok = g && whole;
    if (ok) {
        g->dev = (wk_device)r->dev;
        g->node = wki_calloc(r->nops + 1, sizeof *g->node);
        g->ref = wki_calloc(r->nref + 1, sizeof *g->ref);
        g->buf = wki_calloc(r->nbuf + 1, sizeof *g->buf);
        g->key = wki_malloc(r->nkey * sizeof *g->key);
        g->nkey = r->nkey;
        g->nval = (int)r->nval;
        ok = g->node && g->ref && g->buf && g->key;
    }
    if (ok) {
        memcpy(g->key, r->key, r->nkey * sizeof *g->key);
        cursor at = {.key = g->key, .meta = r->meta, .whole = whole};
        for (uint32_t i = 0; i < r->nops; i++)
            decode_node(&at, g, r, c->rt);
        g->nbuf = (int)at.nbuf;
    } else {
        wki_graph_free(g);
        g = NULL;
        wki_fail(c, WK_NOMEM, "no host memory to decode a recording of %u ops", r->nops);
    }
    wki_free(whole);
    return g;
}

void wki_graph_unwrite(wk_ctx *c, const wki_recorder *r, uint32_t first) {
    bool writes = false;
    for (uint32_t b = 0; b < r->nbuf; b++)
        writes |= r->buf[b].flags & WKI_RB_WRITTEN;
    wki_graph *g = writes ? wki_graph_decode(c, r) : NULL;
    for (int i = (int)first; g && i < g->nnode; i++) {
        const wki_gnode *n = &g->node[i];
        for (int j = 0; n->op->writes && j < n->nin; j++) {
            const wki_rbuf *b = wki_node_writes(n, j) ? &r->buf[g->buf[g->ref[n->ref0 + j].buf].root] : NULL;
            if (b && b->st)
                b->st->version--;
        }
    }
    wki_graph_free(g);
}

bool wki_graph_verify(wk_ctx *c, const wki_graph *g) {
    int made = -1; /* outputs are numbered in program order */
    for (int i = 0; i < g->nnode; i++) {
        const wki_gnode *n = &g->node[i];
        for (int j = 0; j < n->nin + n->nout; j++) {
            const wki_gref *f = &g->ref[n->ref0 + j];
            if (f->buf < 0)
                continue;
            if (f->buf >= g->nbuf)
                return wki_fail(c, WK_INTERNAL, "graph: op %d (%s) refers to buffer %d of %d", i, n->op->name,
                                f->buf, g->nbuf);
            if (j >= n->nin)
                made = f->buf;
            else if (!g->buf[f->buf].external && f->buf > made)
                return wki_fail(c, WK_INTERNAL, "graph: op %d (%s) reads buffer %d before it is made", i,
                                n->op->name, f->buf);
            int64_t lo = f->off, hi = f->off;
            for (int d = 0; d < f->ndim; d++)
                *(f->stride[d] < 0 ? &lo : &hi) += (f->size[d] - 1) * f->stride[d];
            if (f->numel &&
                (lo < 0 || (hi + 1) * (int64_t)wki_dtype_size((wk_dtype)f->dtype) > g->buf[f->buf].bytes))
                return wki_fail(c, WK_INTERNAL, "graph: op %d (%s) reaches outside buffer %d", i, n->op->name,
                                f->buf);
        }
    }
    return true;
}

void wki_graph_print(const wki_graph *g) {
    for (int i = 0; i < g->nnode; i++) {
        const wki_gnode *n = &g->node[i];
        if (n->dead)
            continue;
        fprintf(stderr, "%4d ", i);
        for (int j = 0; j < n->nout; j++) {
            const wki_gref *f = &g->ref[n->ref0 + n->nin + j];
            char text[128];
            fprintf(stderr, "%%%d%s:%s%s ", f->buf, g->buf[f->buf].live ? "!" : "",
                    wk_dtype_name((wk_dtype)f->dtype), wki_shape_text(text, sizeof text, f->ndim, f->size));
        }
        fprintf(stderr, "= %s(", n->op->name);
        for (int j = 0; j < n->nin; j++) {
            const wki_gref *f = &g->ref[n->ref0 + j];
            if (f->buf < 0)
                fprintf(stderr, "%s-", j ? ", " : "");
            else
                fprintf(stderr, "%s%s%d%s", j ? ", " : "", g->buf[f->buf].external ? "@" : "%", f->buf,
                        f->plain ? "" : "~");
        }
        fprintf(stderr, ")\n");
    }
}
