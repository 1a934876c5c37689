/* Lowering: groups of ops become steps. Loop programs of a group's ops are spliced into one; a value that a later op of the
 * group reads exactly as it was written stays in a register, and a buffer that nobody else reads disappears. */
#include <string.h>

#include "compile/plan.h"
#include "ops/bind.h"

typedef struct place { /* a buffer as an operand sees it */
    int32_t buf;
    uint8_t dtype;
    int64_t off, stride[WK_MAX_DIMS];
} place;

typedef struct known { /* a value of the program that equals an operand */
    place at;
    int16_t value;
    uint8_t level;
} known;

typedef struct splicer {
    wk_ctx *c;
    const wki_plan *p;
    const wki_graph *g;
    wki_step *s;
    wki_domain d;
    const uint8_t *escapes; /* per buffer: somebody outside the group needs it */
    wki_inst inst[WKI_LOOP_MAX_INST];
    int ninst;
    known table[WKI_LOOP_MAX_OPERANDS * 4];
    int nknown;
    place load[WKI_LOOP_MAX_OPERANDS], store[WKI_LOOP_MAX_OPERANDS];
    int nload, nstore;
    int32_t va[WKI_LOOP_MAX_INST], rng[WKI_LOOP_MAX_INST];
    int nva, nrng;
} splicer;

static int emit(splicer *x, wki_inst i) {
    if (x->ninst == WKI_LOOP_MAX_INST)
        return -1;
    x->inst[x->ninst] = i;
    return x->ninst++;
}

static bool same_place(const splicer *x, const place *a, const place *b) {
    return a->buf == b->buf && a->off == b->off && a->dtype == b->dtype &&
           !memcmp(a->stride, b->stride, (size_t)x->d.ndim * 8);
}

static void remember(splicer *x, const place *at, int value, int level) {
    if (x->nknown < (int)(sizeof x->table / sizeof *x->table))
        x->table[x->nknown++] = (known){*at, (int16_t)value, (uint8_t)level};
}

static int find(const splicer *x, const place *at, int level) {
    for (int i = x->nknown - 1; i >= 0; i--) {
        const known *k = &x->table[i];
        if (same_place(x, &k->at, at) && (level == WKI_ELEM || k->level == WKI_ROWV))
            return k->value;
    }
    return -1;
}

static int splice_load(splicer *x, wki_inst in, const place *at) {
    int v = find(x, at, in.level), o = 0;
    if (v >= 0)
        return v;
    while (o < x->nload && !same_place(x, &x->load[o], at))
        o++;
    if (o == WKI_LOOP_MAX_OPERANDS)
        return -1;
    if (o == x->nload)
        x->load[x->nload++] = *at;
    in.a = (int16_t)o;
    v = emit(x, in);
    if (v >= 0)
        remember(x, at, v, in.level);
    return v;
}

static bool splice_store(splicer *x, wki_inst in, const place *at) {
    remember(x, at, in.b, in.level);
    if (!x->escapes[at->buf])
        return true;
    if (x->nstore == WKI_LOOP_MAX_OPERANDS)
        return false;
    in.a = (int16_t)x->nstore; /* moved past the loads at the end */
    x->store[x->nstore++] = *at;
    return emit(x, in) >= 0;
}

/* A reduction over the columns of an op that has none, spliced in at row level: it is over one element. */
static int splice_single(splicer *x, wki_inst in) {
    if (in.sub != WKI_R_SUM) /* the identity changes nothing */
        return in.a;
    int zero = emit(
        x, (wki_inst){.code = WKI_L_CONST, .level = in.level, .type = in.type, .a = -1, .b = -1, .c = -1});
    if (zero < 0)
        return -1;
    return emit(x, (wki_inst){.code = WKI_L_PRIM,
                              .sub = in.type == WKI_TF ? WKI_P_ADD : WKI_P_IADD,
                              .level = in.level,
                              .type = in.type,
                              .a = (int16_t)zero,
                              .b = in.a,
                              .c = -1});
}

/* Gives the values that an instruction uses their new numbers. */
static void renumber(wki_inst *in, const int16_t *to) {
    int16_t v[3];
    int n = wki_loop_uses(in, v);
    if (n > 0)
        *(in->code == WKI_L_STORE ? &in->b : &in->a) = to[v[0]];
    if (n > 1)
        in->b = to[v[1]];
    if (n > 2)
        in->c = to[v[2]];
}

/* Appends one op's program. */
static bool splice(splicer *x, const wki_gnode *n) {
    const wki_loop *l = wki_node_loop(x->g, n);
    wki_domain own = wki_node_domain(x->g, n);
    bool row = wki_domain_row(&x->d, &own);
    int16_t map[WKI_LOOP_MAX_INST];
    for (int i = 0; i < l->ninst; i++) {
        wki_inst in = l->inst[i];
        if (row)
            in.level = WKI_ROWV;
        else if (!x->d.red)
            in.level = WKI_ELEM;
        renumber(&in, map);
        int v = -1;
        if (in.code == WKI_L_LOAD || in.code == WKI_L_STORE) {
            int o = in.code == WKI_L_LOAD ? in.a : n->nin + (in.a - l->nload);
            const wki_gref *f = &x->g->ref[n->ref0 + o];
            place at = {.buf = f->buf, .dtype = f->dtype, .off = f->off};
            if (!wki_map_ref(&x->d, &own, n, f, at.stride))
                return wki_fail(x->c, WK_INTERNAL, "lowering: operand %d of %s does not fit its domain", o,
                                n->op->name);
            if (in.code == WKI_L_STORE) {
                if (!splice_store(x, in, &at))
                    goto full;
                continue;
            }
            v = splice_load(x, in, &at);
        } else {
            if (in.code == WKI_L_CHECK) {
                in.imm.i = n->op->id;
            } else if (in.code == WKI_L_ARG) {
                x->va[x->nva] = n->va0 + in.a;
                in.a = (int16_t)x->nva++;
            } else if (in.code == WKI_L_RNG) {
                x->rng[x->nrng] = n->rng;
                in.a = (int16_t)x->nrng++;
            }
            v = row && in.code == WKI_L_REDUCE ? splice_single(x, in) : emit(x, in);
        }
        if (v < 0)
            goto full;
        map[i] = (int16_t)v;
    }
    return true;
full:
    return wki_fail(x->c, WK_INTERNAL, "lowering: a fused program is too large");
}

/* Instructions whose value nobody uses go; values are renumbered. */
static void sweep(splicer *x) {
    uint8_t used[WKI_LOOP_MAX_INST] = {0};
    int16_t to[WKI_LOOP_MAX_INST] = {0};
    for (int i = x->ninst - 1; i >= 0; i--) {
        const wki_inst *in = &x->inst[i];
        int16_t v[3];
        used[i] |= in->code == WKI_L_STORE || in->code == WKI_L_CHECK;
        for (int k = used[i] ? wki_loop_uses(in, v) - 1 : -1; k >= 0; k--)
            used[v[k]] = 1;
    }
    int n = 0;
    for (int i = 0; i < x->ninst; i++) {
        if (!used[i])
            continue;
        wki_inst in = x->inst[i];
        renumber(&in, to);
        if (in.code == WKI_L_STORE)
            in.a = (int16_t)(in.a + x->nload);
        to[i] = (int16_t)n;
        x->inst[n++] = in;
    }
    x->ninst = n;
}

static bool new_run(wk_ctx *c, wki_step *s, int noperands) {
    s->run = wki_calloc(1, wki_loop_run_bytes(noperands));
    s->at = wki_calloc((size_t)noperands + 1, sizeof *s->at);
    return (s->run && s->at) || wki_fail(c, WK_NOMEM, "no host memory for a plan");
}

static bool finish_loop(splicer *x) {
    wki_step *s = x->s;
    sweep(x);
    s->inst = wki_malloc((size_t)(x->ninst + 1) * sizeof *s->inst);
    s->va = wki_malloc((size_t)(x->nva + 1) * sizeof *s->va);
    s->rng = wki_malloc((size_t)(x->nrng + 1) * sizeof *s->rng);
    if (!s->inst || !s->va || !s->rng)
        return wki_fail(x->c, WK_NOMEM, "no host memory for a plan");
    memcpy(s->inst, x->inst, (size_t)x->ninst * sizeof *s->inst);
    memcpy(s->va, x->va, (size_t)x->nva * sizeof *s->va);
    memcpy(s->rng, x->rng, (size_t)x->nrng * sizeof *s->rng);
    s->prog = (wki_loop){.ninst = (int16_t)x->ninst,
                         .nload = (int16_t)x->nload,
                         .nstore = (int16_t)x->nstore,
                         .narg = (int16_t)x->nva,
                         .nrng = (int8_t)x->nrng,
                         .inst = s->inst};
    if (x->nload + x->nstore > WKI_LOOP_MAX_OPERANDS)
        return wki_fail(x->c, WK_INTERNAL, "lowering: a fused program has too many operands");
    if (!new_run(x->c, s, x->nload + x->nstore))
        return false;
    wki_order_domain(s->run, x->d.ndim, x->d.size, x->d.red);
    s->run->prog = &s->prog;
    for (int i = 0; i < x->nload + x->nstore; i++) {
        const place *at = i < x->nload ? &x->load[i] : &x->store[i - x->nload];
        wki_operand *o = &s->run->opnd[i];
        o->dtype = at->dtype;
        s->at[i] = (wki_at){at->buf, at->off * (int64_t)wki_dtype_size((wk_dtype)at->dtype)};
        for (int k = 0; k < x->d.ndim; k++)
            o->stride[k] = at->stride[(int)s->run->logical[k]];
    }
    return true;
}

/* From a reducing op when there is one: without it a row shape has nothing to be the row shape of. */
static wki_domain group_domain(const wki_graph *g, const int *node, int n) {
    wki_domain d = wki_node_domain(g, &g->node[node[0]]);
    for (int i = 1; i < n && !d.red; i++) {
        wki_domain own = wki_node_domain(g, &g->node[node[i]]);
        if (own.red)
            d = own;
    }
    for (int i = 0; i < n; i++) {
        wki_domain own = wki_node_domain(g, &g->node[node[i]]);
        d = wki_domain_join(&d, &own);
    }
    return d;
}

static bool lower_loop(splicer *x, wki_step *s, const int *node, int n) {
    const wki_graph *g = x->g;
    x->s = s;
    x->ninst = x->nknown = x->nload = x->nstore = x->nva = x->nrng = 0;
    x->d = group_domain(g, node, n);
    s->kind = WKI_STEP_LOOP;
    s->op = g->node[node[n - 1]].op;
    for (int i = 0; i < n; i++)
        if (!splice(x, &g->node[node[i]]))
            return false;
    if (!finish_loop(x))
        return false;
    const wki_loop *own = wki_node_loop(g, &g->node[node[n - 1]]);
    if (n == 1 && own->ninst == s->prog.ninst && own->nload == s->prog.nload && own->nstore == s->prog.nstore)
        s->prog.straight = own->straight; /* nothing was spliced, shared or dropped */
    return true;
}

static wki_view ref_view(const wki_gref *f) {
    if (f->buf < 0)
        return (wki_view){.slot = -1, .dtype = WK_DTYPE_COUNT};
    return (wki_view){.data = (void *)(uintptr_t)(f->off * (int64_t)wki_dtype_size((wk_dtype)f->dtype)),
                      .slot = -1,
                      .ndim = f->ndim,
                      .dtype = f->dtype,
                      .plain = f->plain,
                      .numel = f->numel,
                      .size = f->size,
                      .stride = f->stride};
}

/* An in-place op: its own program, once per tensor. */
static bool lower_inplace(wk_ctx *c, wki_plan *p, const wki_gnode *n, int multi) {
    const wki_loop *l = wki_node_loop(p->g, n);
    int nt = wki_role_size(n->op, n->nin);
    wki_view *in = wki_malloc((size_t)(n->nin + 1) * sizeof *in);
    if (!in)
        return wki_fail(c, WK_NOMEM, "no host memory for a plan");
    for (int i = 0; i < n->nin; i++)
        in[i] = ref_view(&p->g->ref[n->ref0 + i]);
    bool ok = true;
    for (int t = 0; t < nt && ok; t++) {
        wki_step *s = &p->step[p->nstep++];
        s->kind = WKI_STEP_LOOP;
        s->op = n->op;
        s->multi = nt > 1 ? multi : 0;
        s->prog = *l;
        s->prog.in_place = true;
        s->va = wki_malloc((size_t)(l->narg + 1) * sizeof *s->va);
        if (!s->va) {
            ok = wki_fail(c, WK_NOMEM, "no host memory for a plan");
            break;
        }
        for (int i = 0; i < l->narg; i++)
            s->va[i] = n->va0 + i;
        ok = new_run(c, s, l->nload + l->nstore) &&
             (wki_bind(n->op, l, in, n->nin, NULL, 0, n->ia, t, s->run) ||
              wki_fail(c, WK_INTERNAL, "lowering: operands of %s do not fit", n->op->name));
        if (!ok)
            break;
        s->run->prog = &s->prog;
        for (int i = 0; i < l->nload + l->nstore; i++) {
            int role = i < l->nload ? i : wki_store_role(n->op, i - l->nload);
            s->at[i].buf = p->g->ref[n->ref0 + role * nt + t].buf;
            s->at[i].off = (int64_t)(uintptr_t)s->run->opnd[i].data;
            s->run->opnd[i].data = NULL;
        }
    }
    wki_free(in);
    return ok;
}

static bool lower_kernel(wk_ctx *c, wki_plan *p, const wki_gnode *n) {
    wki_step *s = &p->step[p->nstep++];
    int nv = n->nin + n->nout;
    s->kind = (n->op->flags & WKI_OP_USER) ? WKI_STEP_USER : WKI_STEP_KERNEL;
    s->op = n->op;
    s->node = n;
    s->workspace = -1;
    s->view = wki_malloc((size_t)(nv + 1) * sizeof *s->view);
    s->view_buf = wki_malloc((size_t)(nv + 1) * sizeof *s->view_buf);
    if (!s->view || !s->view_buf)
        return wki_fail(c, WK_NOMEM, "no host memory for a plan");
    for (int i = 0; i < nv; i++) {
        s->view[i] = ref_view(&p->g->ref[n->ref0 + i]);
        s->view_buf[i] = p->g->ref[n->ref0 + i].buf;
    }
    if (s->kind == WKI_STEP_USER && p->g->dev == WK_CPU &&
        !wki_user_runs(n->op)) { /* before anything has run */
        c->cur_op = n->op;
        return wki_fail(c, WK_DEVICE, "the op has no CPU kernel");
    }
    if (s->kind == WKI_STEP_USER || p->g->dev == WK_NULL)
        return true;
    wki_launch l = {.c = c,
                    .op = n->op,
                    .nin = n->nin,
                    .nout = n->nout,
                    .in = s->view,
                    .out = s->view + n->nin,
                    .ia = n->ia};
    s->kernel = wki_kernel_find(&l, p->g->dev);
    if (!s->kernel) {
        c->cur_op = n->op;
        return wki_fail(c, WK_DTYPE, "no %s kernel for these shapes and dtypes", wk_device_name(p->g->dev));
    }
    int64_t bytes = s->kernel->workspace ? (int64_t)s->kernel->workspace(&l) : 0;
    if (bytes) {
        s->workspace = p->nbuf;
        p->buf[p->nbuf++] = (wki_plan_buf){.kind = WKI_B_ARENA, .bytes = bytes};
    }
    return true;
}

/* Which buffers must exist in memory: live ones, and those read outside the group that makes them. */
static uint8_t *find_escapes(wk_ctx *c, const wki_graph *g, const wki_groups *gr) {
    uint8_t *esc = wki_calloc((size_t)g->nbuf + 1, 1);
    int *maker = wki_malloc(((size_t)g->nbuf + 1) * sizeof *maker);
    if (!esc || !maker) {
        wki_fail(c, WK_NOMEM, "no host memory for a plan");
        wki_free(esc);
        wki_free(maker);
        return NULL;
    }
    for (int b = 0; b < g->nbuf; b++) {
        maker[b] = -1;
        esc[b] = g->buf[b].live || g->buf[b].external || g->buf[g->buf[b].root].written;
    }
    for (int k = 0; k < gr->ngroup; k++)
        for (int i = gr->first[k]; i < gr->first[k + 1]; i++) {
            const wki_gnode *n = &g->node[gr->node[i]];
            for (int j = 0; j < n->nout; j++)
                maker[g->ref[n->ref0 + n->nin + j].buf] = k;
        }
    for (int k = 0; k < gr->ngroup; k++)
        for (int i = gr->first[k]; i < gr->first[k + 1]; i++) {
            const wki_gnode *n = &g->node[gr->node[i]];
            for (int j = 0; j < n->nin; j++) {
                int b = g->ref[n->ref0 + j].buf;
                if (b >= 0 && maker[b] != k)
                    esc[b] = 1;
            }
        }
    wki_free(maker);
    return esc;
}

/* What is written before a step that may fail is saved. Passes order steps so that this is rare. */
static bool find_saves(wk_ctx *c, wki_plan *p, const wki_groups *gr) {
    const wki_graph *g = p->g;
    int last = gr->first[gr->ngroup] - 1;
    while (last >= 0 && !wki_node_checks(g, &g->node[gr->node[last]]))
        last--;
    for (int i = 0; i < last; i++) {
        const wki_gnode *n = &g->node[gr->node[i]];
        for (int j = 0; n->op->writes && j < n->nin; j++) {
            int b = g->ref[n->ref0 + j].buf, k = 0;
            if (b < 0 || !wki_node_writes(n, j) || !g->buf[b].external || !g->buf[b].bytes)
                continue;
            while (k < p->nsave && p->save[k].buf != b)
                k++;
            if (k < p->nsave)
                continue;
            if (!p->save && !(p->save = wki_malloc((size_t)g->nbuf * sizeof *p->save)))
                return wki_fail(c, WK_NOMEM, "no host memory for a plan");
            p->save[p->nsave++] = (wki_save){.buf = b, .copy = p->nbuf};
            p->buf[p->nbuf++] = (wki_plan_buf){.kind = WKI_B_ARENA, .bytes = g->buf[b].bytes};
        }
    }
    return true;
}

bool wki_lower(wk_ctx *c, wki_plan *p, const wki_groups *gr) {
    const wki_graph *g = p->g;
    int max_steps = gr->ngroup + 1;
    for (int i = 0; i < g->nnode; i++)
        if (g->node[i].op->nin < 0)
            max_steps += g->node[i].nin;
    uint8_t *esc = find_escapes(c, g, gr);
    p->step = wki_calloc((size_t)max_steps, sizeof *p->step);
    p->buf = wki_calloc(2 * (size_t)g->nbuf + (size_t)gr->ngroup + 1, sizeof *p->buf);
    splicer *x = wki_malloc(sizeof *x);
    bool ok = esc && p->step && p->buf && x;
    if (esc && !ok)
        wki_fail(c, WK_NOMEM, "no host memory for a plan");
    if (x)
        *x = (splicer){.c = c, .p = p, .g = g, .escapes = esc};
    p->nbuf = g->nbuf;
    for (int b = 0; ok && b < g->nbuf; b++) {
        const wki_gbuf *gb = &g->buf[b];
        p->buf[b] = (wki_plan_buf){.kind = gb->external ? WKI_B_EXTERNAL
                                           : gb->live   ? WKI_B_OUTPUT
                                                        : WKI_B_GONE,
                                   .pinned = gb->pinned,
                                   .written = g->buf[gb->root].written,
                                   .bytes = gb->bytes};
    }
    for (int k = 0; ok && k < gr->ngroup; k++) {
        const int *node = gr->node + gr->first[k];
        int n = gr->first[k + 1] - gr->first[k];
        const wki_gnode *first = &g->node[node[0]];
        bool loop = wki_node_loop(g, first) != NULL;
        if (loop && first->nout)
            ok = lower_loop(x, &p->step[p->nstep++], node, n);
        else if (loop)
            ok = lower_inplace(c, p, first, k + 1);
        else
            ok = lower_kernel(c, p, first);
        for (int i = 0; ok && i < n; i++)
            for (int j = 0; j < g->node[node[i]].nout; j++) {
                int b = g->ref[g->node[node[i]].ref0 + g->node[node[i]].nin + j].buf;
                if (p->buf[b].kind == WKI_B_GONE && (esc[b] || !loop))
                    p->buf[b].kind = WKI_B_ARENA;
            }
    }
    wki_free(esc);
    wki_free(x);
    return ok && find_saves(c, p, gr);
}
