/* Passes on the recorded graph: dead code, and fusion of loop ops into groups.
 *
 * A group shares one domain: the logical shape and the reduced dimensions. Elementwise ops of the domain's shape, or of its
 * row shape, join the group of a producer when no path through another group leads back. Grouping compares sizes for
 * equality only, never their values, so it holds for every shape of the same structure.
 */
#include <stdlib.h>
#include <string.h>

#include "compile/plan.h"
#include "ops/bind.h"
#include "ops/infer.h"

bool wki_pass_dead(wk_ctx *c, wki_graph *g) {
    uint8_t *need = wki_calloc((size_t)g->nbuf + 1, 1);
    if (!need)
        return wki_fail(c, WK_NOMEM,
                        "no host memory for a plan"); /* a structure's groups go by what is dead */
    for (int b = 0; b < g->nbuf; b++)
        need[g->buf[b].root] |= g->buf[b].live || g->buf[b].external;
    for (int i = g->nnode - 1; i >= 0; i--) {
        wki_gnode *n = &g->node[i];
        bool live = n->nout == 0;
        for (int j = 0; j < n->nout; j++)
            live |= need[g->ref[n->ref0 + n->nin + j].buf];
        for (int j = 0; j < n->nin; j++) {
            int b = g->ref[n->ref0 + j].buf;
            if (b >= 0 && wki_node_writes(n, j))
                live = true; /* conservative: the buffer may be a state or read later */
        }
        n->dead = !live;
        for (int j = 0; live && j < n->nin; j++) {
            int b = g->ref[n->ref0 + j].buf;
            if (b >= 0)
                need[g->buf[b].root] = 1;
        }
    }
    wki_free(need);
    return true;
}

/* ---- domains ------------------------------------------------------------------------------------------------------- */

typedef wki_domain domain;

const wki_loop *wki_node_loop(const wki_graph *g, const wki_gnode *n) {
    if (!n->op->loop)
        return NULL;
    const wki_gref *f = &g->ref[n->ref0];
    return wki_op_loop(n->op, n->nin ? (wk_dtype)f[0].dtype : WK_DTYPE_COUNT,
                       n->nout ? (wk_dtype)f[n->nin].dtype : WK_DTYPE_COUNT);
}

domain wki_node_domain(const wki_graph *g, const wki_gnode *n) {
    domain d = {.ndim = -1};
    if (!wki_node_loop(g, n) || !n->nout) /* in-place ops stand alone */
        return d;
    const wki_gref *f = &g->ref[n->ref0 + (n->op->klass == WKI_ROW ? 0 : n->nin)];
    d.ndim = f->ndim;
    memcpy(d.size, f->size, sizeof d.size);
    d.red = wki_op_reduced(n->op, f->ndim, n->ia);
    return d;
}

bool wki_node_checks(const wki_graph *g, const wki_gnode *n) {
    const wki_loop *l = wki_node_loop(g, n);
    for (int i = 0; l && i < l->ninst; i++)
        if (l->inst[i].code == WKI_L_CHECK)
            return true;
    return !l && n->op->klass == WKI_INDEX;
}

bool wki_node_writes_outside(const wki_graph *g, const wki_gnode *n) {
    for (int i = 0; n->op->writes && i < n->nin; i++) {
        int b = g->ref[n->ref0 + i].buf;
        if (b >= 0 && wki_node_writes(n, i) && g->buf[g->buf[b].root].external)
            return true;
    }
    return false;
}

static bool same_shape(const domain *a, const domain *b) {
    return a->ndim == b->ndim && !memcmp(a->size, b->size, (size_t)a->ndim * 8);
}

/* Is b the row shape of a: reduced dimensions absent or 1? */
static bool row_shape(const domain *a, const domain *b) {
    if (!a->red || b->red)
        return false;
    if (b->ndim == a->ndim) {
        for (int i = 0; i < a->ndim; i++)
            if (b->size[i] != (a->red >> i & 1 ? 1 : a->size[i]))
                return false;
        return true;
    }
    if (b->ndim != a->ndim - __builtin_popcount(a->red))
        return false;
    for (int i = 0, j = 0; i < a->ndim; i++)
        if (!(a->red >> i & 1) && b->size[j++] != a->size[i])
            return false;
    return true;
}

bool wki_domain_row(const domain *d, const domain *own) { return !same_shape(d, own) && row_shape(d, own); }

domain wki_domain_join(const domain *a, const domain *b) {
    domain none = {.ndim = -1};
    if (a->ndim < 0 || b->ndim < 0)
        return none;
    if (same_shape(a, b)) {
        if (a->red && b->red && a->red != b->red)
            return none;
        return a->red ? *a : *b;
    }
    if (row_shape(a, b))
        return *a;
    if (row_shape(b, a))
        return *b;
    return none;
}

bool wki_map_ref(const domain *d, const domain *own, const wki_gnode *n, const wki_gref *f, int64_t *stride) {
    int64_t s[WKI_LOOP_MAX_DIMS];
    if (!wki_map_operand(f->ndim, f->size, f->stride, own->ndim, own->size, own->red, n->op->klass == WKI_ROW,
                         s))
        return false;
    bool dropped = own->ndim != d->ndim;
    for (int i = 0, j = 0; i < d->ndim; i++) {
        bool red = d->red >> i & 1;
        int64_t v = dropped ? (red ? 0 : s[j]) : s[i];
        j += !red;
        stride[i] = d->size[i] == 1 ? 0 : v;
    }
    if (!dropped && wki_domain_row(d, own))
        for (int i = 0; i < d->ndim; i++)
            if (d->red >> i & 1)
                stride[i] = 0;
    return true;
}

/* ---- groups as sets of nodes ----------------------------------------------------------------------------------------- */

/* Long programs are grouped window by window: a group never leaves its window, so the sets below stay small. */
enum { WINDOW = 2048, WORDS = WINDOW / 64 };

typedef uint64_t group_set[WORDS];

typedef struct fuser {
    const wki_graph *g;
    int lo, hi;        /* the window: graph nodes lo..hi-1; groups are named by their first member minus lo */
    int *writer;       /* buffer -> last node that wrote it, -1 */
    int *producer;     /* buffer -> the node it is an output of, -1 */
    int *dep, *dep0;   /* direct dependences of node i: dep[dep0[i] .. dep0[i + 1]) */
    int group[WINDOW]; /* node - lo -> group, -1: not reached yet, or dead */
    int next[WINDOW], last[WINDOW];  /* members of a group, in program order where it matters not */
    domain dom[WINDOW], own[WINDOW]; /* per group; per node */
    int cost_inst[WINDOW], cost_opnd[WINDOW];
    group_set anc[WINDOW]; /* per group: groups it depends on, transitively */
} fuser;

static bool has(const uint64_t *s, int i) { return s[i >> 6] >> (i & 63) & 1; }
static void put(uint64_t *s, int i) { s[i >> 6] |= 1ull << (i & 63); }
static void drop(uint64_t *s, int i) { s[i >> 6] &= ~(1ull << (i & 63)); }

/* Group of a graph node, -1 when it is outside the window or not reached yet. */
static int group_of(const fuser *f, int node) {
    return node < f->lo || node >= f->hi ? -1 : f->group[node - f->lo];
}

/* The dependences of the node at hand get one more. */
static bool depend(fuser *f, int *cap, int end, int on) {
    if (end == *cap) {
        int *p = wki_realloc(f->dep, 2 * (size_t)*cap * sizeof *p);
        if (!p)
            return false;
        f->dep = p;
        *cap *= 2;
    }
    f->dep[end] = on;
    return true;
}

/* Direct dependences: read after write, write after read, write after write, per buffer root. */
static bool dependences(wk_ctx *c, fuser *f) {
    const wki_graph *g = f->g;
    int cap = 4 * g->nref + 16, nd = 0, nr = 0;
    struct {
        int node, next;
    } *reader = wki_malloc(((size_t)g->nref + 1) * sizeof *reader); /* since the last write: lists, by root */
    int *last_write = wki_malloc(((size_t)g->nbuf + 1) * sizeof *last_write);
    int *head = wki_malloc(((size_t)g->nbuf + 1) * sizeof *head);
    f->dep = wki_malloc((size_t)cap * sizeof *f->dep);
    f->dep0 = wki_malloc(((size_t)g->nnode + 1) * sizeof *f->dep0);
    bool ok = reader && last_write && head && f->dep && f->dep0;
    for (int b = 0; ok && b < g->nbuf; b++)
        last_write[b] = head[b] = -1;
    for (int i = 0; ok && i < g->nnode; i++) {
        const wki_gnode *n = &g->node[i];
        f->dep0[i] = nd;
        for (int j = 0; ok && !n->dead && j < n->nin + n->nout; j++) {
            int b = g->ref[n->ref0 + j].buf;
            if (b < 0)
                continue;
            b = g->buf[b].root;
            if (last_write[b] >= 0 && last_write[b] != i)
                ok = depend(f, &cap, nd++, last_write[b]);
            if (j < n->nin && !wki_node_writes(n, j)) {
                reader[nr].node = i;
                reader[nr].next = head[b];
                head[b] = nr++;
                continue;
            }
            for (int r = head[b]; ok && r >= 0; r = reader[r].next)
                if (reader[r].node != i)
                    ok = depend(f, &cap, nd++, reader[r].node);
            head[b] = -1;
            last_write[b] = i;
        }
    }
    if (ok)
        f->dep0[g->nnode] = nd;
    wki_free(reader);
    wki_free(last_write);
    wki_free(head);
    return ok || wki_fail(c, WK_NOMEM, "no host memory for the fusion pass");
}

/* Does a member of `from` depend on `to` through a third group? */
static bool detour(const fuser *f, int from, int to) {
    for (int m = from; m >= 0; m = f->next[m])
        for (int d = f->dep0[f->lo + m]; d < f->dep0[f->lo + m + 1]; d++) {
            int k = group_of(f, f->dep[d]);
            if (k >= 0 && k != from && k != to && has(f->anc[k], to))
                return true;
        }
    return false;
}

static void merge(fuser *f, int into, int from, const domain *d) {
    uint64_t *ai = f->anc[into];
    int words = (f->hi - f->lo + 63) / 64;
    for (int w = 0; w < words; w++)
        ai[w] |= f->anc[from][w];
    drop(ai, into);
    drop(ai, from);
    f->dom[into] = *d;
    f->cost_inst[into] += f->cost_inst[from];
    f->cost_opnd[into] += f->cost_opnd[from];
    for (int m = from; m >= 0; m = f->next[m])
        f->group[m] = into;
    f->next[f->last[into]] = from;
    f->last[into] = f->last[from];
    for (int k = 0; k < f->hi - f->lo;
         k++) { /* whoever depended on either now depends on the union and on all it needs */
        uint64_t *ak = f->anc[k];
        if (f->group[k] != k || k == into || (!has(ak, into) && !has(ak, from)))
            continue;
        drop(ak, from);
        put(ak, into);
        for (int w = 0; w < words; w++)
            ak[w] |= ai[w];
    }
}

/* Is operand `at` of the node (inputs, then outputs) one value per row of d? */
static bool per_row(const wki_graph *g, const domain *d, const domain *own, const wki_gnode *n, int at) {
    if (!d->red || wki_domain_row(d, own))
        return d->red != 0;
    const wki_loop *l = wki_node_loop(g, n);
    int code = at < n->nin ? WKI_L_LOAD : WKI_L_STORE, operand = at < n->nin ? at : l->nload + at - n->nin;
    for (int i = 0; i < l->ninst; i++)
        if (l->inst[i].code == code && l->inst[i].a == operand)
            return own->red && l->inst[i].level == WKI_ROWV;
    return false;
}

/* A value passes inside a group only if the consumer looks at it exactly as the producer wrote it, and not once per row at
   what is there per element. */
static bool forwards(const fuser *f, const domain *d, int from, int to, int input) {
    const wki_graph *g = f->g;
    const wki_gnode *p = &g->node[f->lo + from], *n = &g->node[f->lo + to];
    const wki_gref *r = &g->ref[n->ref0 + input];
    int64_t a[WK_MAX_DIMS], b[WK_MAX_DIMS];
    for (int j = 0; j < p->nout; j++) {
        const wki_gref *w = &g->ref[p->ref0 + p->nin + j];
        if (w->buf != r->buf)
            continue;
        return r->off == 0 && r->dtype == w->dtype && w->dtype != WK_U8 &&
               wki_map_ref(d, &f->own[from], p, w, a) && wki_map_ref(d, &f->own[to], n, r, b) &&
               !memcmp(a, b, (size_t)d->ndim * 8) &&
               (per_row(g, d, &f->own[from], p, p->nin + j) || !per_row(g, d, &f->own[to], n, input));
    }
    return false;
}

/* Logical positions mean something only in the op's own shape. */
static bool positional(const wki_loop *l) {
    for (int i = 0; i < l->ninst; i++)
        if (l->inst[i].code == WKI_L_INDEX || l->inst[i].code == WKI_L_RNG)
            return true;
    return false;
}

/* May group `from` run in one loop over d with group `other`, as far as its own inputs go? */
static bool fits(const fuser *f, const domain *d, int from, int other) {
    for (int m = from; m >= 0; m = f->next[m]) {
        const wki_gnode *n = &f->g->node[f->lo + m];
        if (wki_domain_row(d, &f->own[m]) && positional(wki_node_loop(f->g, n)))
            return false;
        for (int j = 0; j < n->nin; j++) {
            int buf = f->g->ref[n->ref0 + j].buf, p = buf < 0 ? -1 : f->producer[buf];
            int k = p < 0 ? -1 : group_of(f, p);
            if (k >= 0 && p - f->lo != m && (k == from || k == other) && !forwards(f, d, p - f->lo, m, j))
                return false;
        }
    }
    return true;
}

enum { MAX_GROUP_INST = 120, MAX_GROUP_OPERANDS = 20 };

/* Joins node i's group with those of its producers, nearest first, wherever domains and limits allow. */
static void try_join(fuser *f, int i) {
    const wki_gnode *n = &f->g->node[f->lo + i];
    for (int j = n->nin - 1; j >= 0; j--) {
        int b = f->g->ref[n->ref0 + j].buf;
        int a = b < 0 || f->writer[b] < 0 ? -1 : group_of(f, f->writer[b]), me = f->group[i];
        if (a < 0 || a == me || f->cost_inst[a] + f->cost_inst[me] > MAX_GROUP_INST ||
            f->cost_opnd[a] + f->cost_opnd[me] > MAX_GROUP_OPERANDS)
            continue;
        domain d = wki_domain_join(&f->dom[a], &f->dom[me]);
        if (d.ndim < 0 || !fits(f, &d, a, me) || !fits(f, &d, me, a) || detour(f, a, me) || detour(f, me, a))
            continue;
        merge(f, a < me ? a : me, a < me ? me : a, &d);
    }
}

static int ascending(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

static bool ready(const fuser *f, const uint8_t *done, int k) {
    for (int w = 0; w < (f->hi - f->lo + 63) / 64; w++)
        for (uint64_t m = f->anc[k][w]; m; m &= m - 1) {
            int p = w * 64 + __builtin_ctzll(m);
            if (f->group[p] == p && !done[p])
                return false;
        }
    return true;
}

static bool group_checks(const fuser *f, int k) {
    for (int m = k; m >= 0; m = f->next[m])
        if (wki_node_checks(f->g, &f->g->node[f->lo + m]))
            return true;
    return false;
}

/* The group to come next: the earliest that is ready. While checks are to come, one that writes storage from outside waits
   for all others, so that a check which fails finds that storage as it was. n when there is none. */
static int pick(const fuser *f, const uint8_t *done, int scan, bool checks) {
    int n = f->hi - f->lo, writer = n;
    for (int k = scan; k < n; k++) {
        if (done[k] || f->group[k] != k || !ready(f, done, k))
            continue;
        if (!checks || !wki_node_writes_outside(f->g, &f->g->node[f->lo + k]))
            return k;
        writer = writer == n ? k : writer;
    }
    return writer;
}

/* Appends the window's groups, each after what it needs. */
static bool order(wk_ctx *c, const fuser *f, wki_groups *out) {
    uint8_t done[WINDOW] = {0};
    int n = f->hi - f->lo, at = out->first[out->ngroup], checks = 0;
    for (int k = 0; k < n; k++)
        checks += f->group[k] == k && group_checks(f, k);
    for (int scan = 0; scan < n;) {
        if (done[scan] || f->group[scan] != scan) {
            scan++;
            continue;
        }
        int k = pick(f, done, scan, checks > 0);
        if (k == n)
            return wki_fail(c, WK_INTERNAL, "fusion left a cycle");
        checks -= checks && group_checks(f, k);
        int begin = at;
        for (int m = k; m >= 0; m = f->next[m])
            out->node[at++] = f->lo + m;
        qsort(out->node + begin, (size_t)(at - begin), sizeof *out->node, ascending);
        out->first[++out->ngroup] = at;
        done[k] = 1;
    }
    return true;
}

/* Groups the nodes of one window. */
static bool fuse_window(wk_ctx *c, fuser *f, wki_groups *out) {
    const wki_graph *g = f->g;
    int n = f->hi - f->lo;
    for (int i = 0; i < n; i++)
        f->group[i] = -1;
    for (int i = 0; i < n; i++) {
        const wki_gnode *nd = &g->node[f->lo + i];
        if (nd->dead)
            continue;
        const wki_loop *l = wki_node_loop(g, nd);
        f->group[i] = f->last[i] = i;
        f->next[i] = -1;
        f->dom[i] = f->own[i] = wki_node_domain(g, nd);
        f->cost_inst[i] = l ? l->ninst : 0;
        f->cost_opnd[i] = l ? l->nload + l->nstore : 0;
        memset(f->anc[i], 0, sizeof f->anc[i]);
        for (int d = f->dep0[f->lo + i]; d < f->dep0[f->lo + i + 1]; d++) {
            int k = group_of(f, f->dep[d]);
            if (k < 0)
                continue;
            for (int w = 0; w < (n + 63) / 64; w++)
                f->anc[i][w] |= f->anc[k][w];
            put(f->anc[i], k);
        }
        for (int j = 0; j < nd->nin; j++) /* a buffer that an in-place op wrote has no producer to join */
            if (g->ref[nd->ref0 + j].buf >= 0 && wki_node_writes(nd, j))
                f->writer[g->ref[nd->ref0 + j].buf] = -1;
        if (f->dom[i].ndim >= 0)
            try_join(f, i);
        for (int j = 0; j < nd->nout; j++) {
            int b = g->ref[nd->ref0 + nd->nin + j].buf;
            f->writer[b] = f->producer[b] = f->lo + i;
        }
    }
    return order(c, f, out);
}

void wki_groups_free(wki_groups *gr) {
    wki_free(gr->first);
    wki_free(gr->node);
    gr->first = gr->node = NULL;
}

bool wki_pass_fuse(wk_ctx *c, const wki_graph *g, wki_groups *out) {
    size_t n = (size_t)g->nnode, nb = (size_t)g->nbuf + 1;
    bool ok = false;
    *out = (wki_groups){.first = wki_calloc(n + 2, sizeof *out->first),
                        .node = wki_malloc((n + 1) * sizeof *out->node)};
    fuser *f = wki_malloc(sizeof *f);
    if (f)
        *f = (fuser){.g = g,
                     .writer = wki_malloc(nb * sizeof *f->writer),
                     .producer = wki_malloc(nb * sizeof *f->producer)};
    if (!f || !f->writer || !f->producer || !out->first || !out->node) {
        wki_fail(c, WK_NOMEM, "no host memory for the fusion pass");
        goto end;
    }
    for (int b = 0; b < g->nbuf; b++)
        f->writer[b] = f->producer[b] = -1;
    ok = dependences(c, f);
    for (f->lo = 0; ok && f->lo < g->nnode; f->lo = f->hi) {
        f->hi = g->nnode - f->lo > WINDOW ? f->lo + WINDOW : g->nnode;
        ok = fuse_window(c, f, out);
    }
end:
    if (f) {
        wki_free(f->writer);
        wki_free(f->producer);
        wki_free(f->dep);
        wki_free(f->dep0);
        wki_free(f);
    }
    if (!ok)
        wki_groups_free(out);
    return ok;
}
