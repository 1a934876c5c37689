/* Plans on CUDA. What does not depend on addresses (kernels, where each operand is found, which operands a library call needs
 * moved) is worked out once; what does (parameters of launches) again whenever the arena, the argument block or a baked
 * address has moved. A plan whose addresses stay put becomes one CUDA graph after a few runs; until then its steps are
 * launched one by one, through the same argument block, so the numbers are the same.
 *
 * Buffers are at one of three places: in the arena; pinned, with the address baked in; or moving, with the address in the
 * argument block. Own kernels read it there. A library call or a user's kernel cannot, and a library chooses its algorithm by
 * strides and alignment, so what such a call touches has a stage. While the view begins at a multiple of 16 bytes in a buffer
 * that has been seen at one address only, the call gets the view itself; else a copy that does, made before the call for
 * inputs and written back after it for outputs. So what a library computes depends on the view's shape alone. */
#include "backend/cuda/cuda.h"
#include "ops_gen.h"

#include "compile/plan.h"

#include <string.h>

enum { DIRECT_RUNS = 2, MAX_VIEWS = 16, STAGE_ALIGN = 256 };

typedef struct stage { /* where a kernel finds a view that it cannot take from where it is */
    int32_t buf;
    int64_t off;   /* bytes into the buffer */
    wki_view view; /* of the copy */
    int64_t size[WK_MAX_DIMS], stride[WK_MAX_DIMS];
    bool raw; /* a copy of all bytes that the view spans; else, where those are many, of its elements alone */
    int64_t span; /* bytes */
    bool has_room;
    size_t at;  /* with room: of the copy, bytes from the arena's begin */
    bool fresh; /* while steps are gone through: the copy holds what the view holds */
} stage;

typedef struct operand {
    wki_view v;   /* as the kernel gets it, stages put in */
    int stage;    /* -1: none */
    bool copy_in; /* the stage must be filled before this step */
} operand;

typedef struct launch {
    enum { LOOP, MULTI, KERNEL, USER } kind;
    const wki_step *step;
    wki_cu_function *fn; /* but for KERNEL */
    /* LOOP, MULTI */
    unsigned grid[3], block[3];
    unsigned bytes; /* of params */
    void *params;
    wki_cu_scratch scratch;  /* LOOP */
    size_t scratch_at;       /* behind the arena */
    const wki_step **member; /* MULTI: n steps, the first one is `step` */
    int n;
    wki_cu_ptr table;
    /* KERNEL, USER */
    operand *opnd;
    bool shares;    /* KERNEL: goes into one launch with the next */
    size_t attr_at; /* USER: floats behind the arena */
} launch;

typedef struct cuda_plan {
    const wki_plan *p;
    int nlaunch, nstage, nmoving, npinned;
    launch *launch;
    stage *stage;
    int32_t *slot;   /* per buffer: word of the argument block, or -1 */
    int32_t *moving; /* buffers in order of their words */
    int32_t *pinned;
    void **baked;                  /* per pinned buffer: the address in use */
    void **seen;                   /* per moving buffer, where a raw stage needs it: the address so far */
    uint8_t *wild;                 /* per moving buffer: has been seen at two */
    size_t arena_bytes, arg_words; /* arena_bytes: of the plan's own arena and what stands behind it */
    uint32_t generation;           /* 0: never set up */
    int settled;                   /* runs since addresses last moved */
    wki_cu_graph *graph;
} cuda_plan;

static bool nomem(wk_ctx *c) { return wki_fail(c, WK_NOMEM, "no host memory to prepare a plan"); }

/* ---- release --------------------------------------------------------------------------------------------------------- */

static void drop_graph(wki_cuda_ctx *s, cuda_plan *cp) {
    if (!cp->graph)
        return;
    wki_cu_stream_sync(s->stream, NULL); /* it may be running */
    wki_cu_graph_destroy(cp->graph);
    cp->graph = NULL;
}

static void cuda_release(wk_ctx *c, void *state) {
    cuda_plan *cp = state;
    wki_cuda_ctx *s = c->dev_state[WK_CUDA];
    if (!cp)
        return;
    drop_graph(s, cp);
    for (int i = 0; i < cp->nlaunch; i++) {
        launch *l = &cp->launch[i];
        if (s)
            wki_cu_free(s->stream, l->table, NULL);
        wki_free(l->params);
        wki_free(l->member);
        wki_free(l->opnd);
    }
    wki_free(cp->launch);
    wki_free(cp->stage);
    wki_free(cp->slot);
    wki_free(cp->moving);
    wki_free(cp->pinned);
    wki_free(cp->baked);
    wki_free(cp->seen);
    wki_free(cp->wild);
    wki_free(cp);
}

/* ---- buffers --------------------------------------------------------------------------------------------------------- */

static bool is_moving(const wki_plan *p, int b) {
    const wki_plan_buf *pb = &p->buf[b];
    return pb->kind == WKI_B_OUTPUT || (pb->kind == WKI_B_EXTERNAL && !pb->pinned);
}

static bool sort_buffers(cuda_plan *cp) {
    const wki_plan *p = cp->p;
    size_t n = (size_t)p->nbuf + 1;
    cp->slot = wki_malloc(n * sizeof *cp->slot);
    cp->moving = wki_malloc(n * sizeof *cp->moving);
    cp->pinned = wki_malloc(n * sizeof *cp->pinned);
    cp->baked = wki_calloc(n, sizeof *cp->baked);
    cp->seen = wki_calloc(n, sizeof *cp->seen);
    cp->wild = wki_calloc(n, sizeof *cp->wild);
    if (!cp->slot || !cp->moving || !cp->pinned || !cp->baked || !cp->seen || !cp->wild)
        return false;
    cp->arg_words = WKI_ARG_VALUES + (size_t)p->g->nval;
    for (int b = 0; b < p->nbuf; b++) {
        cp->slot[b] = -1;
        if (is_moving(p, b)) {
            cp->slot[b] = (int32_t)cp->arg_words++;
            cp->moving[cp->nmoving++] = b;
        } else if (p->buf[b].kind == WKI_B_EXTERNAL) {
            cp->pinned[cp->npinned++] = b;
        }
    }
    return true;
}

/* ---- stages ---------------------------------------------------------------------------------------------------------- */

static int root_of(const wki_plan *p, int b) { return b < p->g->nbuf ? p->g->buf[b].root : b; }

/* A step wrote buffer b: stages of the same storage are stale. */
static void stale(cuda_plan *cp, int b) {
    for (int i = 0; i < cp->nstage; i++)
        if (root_of(cp->p, cp->stage[i].buf) == root_of(cp->p, b))
            cp->stage[i].fresh = false;
}

static bool same_view(const stage *g, int32_t buf, const wki_view *v) {
    return g->buf == buf && g->off == (int64_t)(uintptr_t)v->data && g->view.dtype == v->dtype &&
           g->view.ndim == v->ndim && !memcmp(g->size, v->size, (size_t)v->ndim * 8) &&
           !memcmp(g->stride, v->stride, (size_t)v->ndim * 8);
}

/* g->stride holds the view's own strides while stages are being found, the copy's afterwards. */
static int stage_of(cuda_plan *cp, int32_t buf, const wki_view *v) {
    for (int i = 0; i < cp->nstage; i++)
        if (same_view(&cp->stage[i], buf, v))
            return i;
    stage *g = &cp->stage[cp->nstage];
    int64_t last = 0, each = (int64_t)wki_dtype_size((wk_dtype)v->dtype);
    *g = (stage){.buf = buf, .off = (int64_t)(uintptr_t)v->data, .view = *v};
    for (int d = 0; d < v->ndim; d++) {
        g->size[d] = v->size[d];
        g->stride[d] = v->stride[d];
        last += (v->size[d] - 1) * v->stride[d];
    }
    g->raw = last < 4 * v->numel;
    g->span = g->raw ? (last + 1) * each : v->numel * each;
    return cp->nstage++;
}

static void give_room(cuda_plan *cp, stage *g) {
    if (g->has_room)
        return;
    g->has_room = true;
    g->at = cp->arena_bytes;
    cp->arena_bytes += ((size_t)g->span + STAGE_ALIGN - 1) / STAGE_ALIGN * STAGE_ALIGN;
}

static void finish_stages(cuda_plan *cp) {
    for (int i = 0; i < cp->nstage; i++) {
        stage *g = &cp->stage[i];
        int64_t step = 1;
        for (int d = g->view.ndim - 1; d >= 0 && !g->raw; d--) {
            g->stride[d] = step;
            step *= g->size[d];
        }
        g->view.size = g->size;
        g->view.stride = g->stride;
        g->view.plain |= !g->raw;
        g->view.slot = -1;
    }
}

/* The arena's buffers begin at multiples of 64 bytes. */
static bool aligned(const cuda_plan *cp, const stage *g, const wki_plan_args *a) {
    uintptr_t base = cp->p->buf[g->buf].kind == WKI_B_ARENA ? 0 : (uintptr_t)a->buf[g->buf];
    return ((base + (uintptr_t)g->off) & 15) == 0;
}

/* Does the kernel get the copy, or the view itself? Launched directly, it can have what is there now. */
static bool copied(const cuda_plan *cp, const stage *g, const wki_plan_args *a, bool direct) {
    return !g->raw || (!direct && cp->wild[g->buf]) || !aligned(cp, g, a);
}

static bool needs_fixed(const wki_step *s) {
    return s->kind == WKI_STEP_USER || (s->kernel->flags & WKI_K_FIXED);
}

static void stage_step(cuda_plan *cp, launch *l) {
    const wki_step *s = l->step;
    int nin = s->node->nin, nout = s->node->nout;
    for (int i = 0; i < nin + nout; i++) {
        int32_t b = s->view_buf[i];
        operand *o = &l->opnd[i];
        *o = (operand){.v = s->view[i], .stage = -1};
        if (b < 0 || !needs_fixed(s) || s->view[i].numel == 0)
            continue;
        o->stage = stage_of(cp, b, &s->view[i]);
        o->copy_in = i < nin && !cp->stage[o->stage].fresh;
        if (i < nin)
            cp->stage[o->stage].fresh = true;
    }
    for (int i = nin; i < nin + nout; i++) {
        stale(cp, s->view_buf[i]);
        if (l->opnd[i].stage >= 0)
            cp->stage[l->opnd[i].stage].fresh = true;
    }
}

static bool find_stages(wk_ctx *c, cuda_plan *cp) {
    const wki_plan *p = cp->p;
    size_t most = 1;
    for (int i = 0; i < cp->nlaunch; i++)
        if (cp->launch[i].kind == KERNEL || cp->launch[i].kind == USER)
            most += (size_t)cp->launch[i].step->node->nin + cp->launch[i].step->node->nout;
    cp->stage = wki_calloc(most, sizeof *cp->stage);
    if (!cp->stage)
        return nomem(c);
    cp->arena_bytes = ((size_t)p->arena_bytes + STAGE_ALIGN - 1) / STAGE_ALIGN * STAGE_ALIGN;
    for (int i = 0; i < cp->nlaunch; i++) {
        launch *l = &cp->launch[i];
        if (l->kind == LOOP || l->kind == MULTI) {
            for (int t = 0; t < l->n; t++) {
                const wki_step *s = l->member ? l->member[t] : l->step;
                for (int o = s->prog.nload; o < s->prog.nload + s->prog.nstore; o++)
                    stale(cp, s->at[o].buf);
            }
            if (l->kind == LOOP) {
                l->scratch = wki_cu_scratch_of(l->step->run);
                l->scratch_at = cp->arena_bytes;
                cp->arena_bytes += (l->scratch.bytes + STAGE_ALIGN - 1) / STAGE_ALIGN * STAGE_ALIGN;
                if (l->scratch.counts > WKI_COUNTS)
                    return wki_fail(c, WK_INTERNAL, "too many blocks wait for each other");
            }
            continue;
        }
        stage_step(cp, l);
        if (l->kind == USER) {
            l->attr_at = cp->arena_bytes;
            cp->arena_bytes += ((size_t)l->step->node->nva * 4 + STAGE_ALIGN) / STAGE_ALIGN * STAGE_ALIGN;
        }
    }
    finish_stages(cp);
    wki_cu_function *fn; /* loaded now: the first run may have nothing to copy and the next be captured */
    return wki_cuda_fn_get(c, WKI_FN_wkk_copy_flat, &fn);
}

/* ---- launches -------------------------------------------------------------------------------------------------------- */

/* Steps [i, end) of one multi-tensor op: each launch takes all that can share it. */
static bool add_multi(wk_ctx *c, cuda_plan *cp, int i, int end) {
    const wki_step *step = cp->p->step;
    uint8_t *taken = wki_calloc((size_t)(end - i), 1);
    bool ok = taken || nomem(c);
    for (int f = i; ok && f < end; f++) {
        if (taken[f - i])
            continue;
        launch *l = &cp->launch[cp->nlaunch++];
        *l = (launch){.kind = LOOP, .step = &step[f], .n = 1};
        if (!wki_cu_multi_joins(step[f].run, step[f].run))
            continue;
        l->member = wki_malloc((size_t)(end - f) * sizeof *l->member);
        if (!(ok = l->member || nomem(c)))
            break;
        l->n = 0;
        for (int k = f; k < end; k++)
            if (!taken[k - i] && wki_cu_multi_joins(step[f].run, step[k].run)) {
                taken[k - i] = 1;
                l->member[l->n++] = &step[k];
            }
        if (l->n > 1)
            l->kind = MULTI;
    }
    wki_free(taken);
    return ok;
}

static bool add_launches(wk_ctx *c, cuda_plan *cp) {
    const wki_plan *p = cp->p;
    cp->launch = wki_calloc((size_t)p->nstep + 1, sizeof *cp->launch);
    if (!cp->launch)
        return nomem(c);
    for (int i = 0; i < p->nstep;) {
        const wki_step *s = &p->step[i];
        if (s->kind == WKI_STEP_LOOP) {
            int end = i + 1;
            while (s->multi && end < p->nstep && p->step[end].multi == s->multi)
                end++;
            if (end > i + 1) {
                if (!add_multi(c, cp, i, end))
                    return false;
            } else {
                cp->launch[cp->nlaunch++] = (launch){.kind = LOOP, .step = s, .n = 1};
            }
            i = end;
            continue;
        }
        launch *l = &cp->launch[cp->nlaunch++];
        *l = (launch){.kind = s->kind == WKI_STEP_USER ? USER : KERNEL, .step = s};
        if (s->node->nin + s->node->nout > MAX_VIEWS)
            return wki_fail(c, WK_INTERNAL, "too many operands for a kernel");
        l->opnd = wki_calloc((size_t)(s->node->nin + s->node->nout) + 1, sizeof *l->opnd);
        if (!l->opnd)
            return nomem(c);
        if (l->kind == USER && !wki_cuda_user_fn(c, s->op, &l->fn))
            return false;
        i++;
    }
    return true;
}

/* Can buffers a and b not be the same memory? */
static bool apart(const wki_plan *p, int a, int b) {
    const wki_plan_buf *x = &p->buf[a], *y = &p->buf[b];
    if (x->kind == WKI_B_ARENA && y->kind == WKI_B_ARENA)
        return x->arena + x->bytes <= y->arena || y->arena + y->bytes <= x->arena;
    return (x->kind == WKI_B_ARENA) != (y->kind == WKI_B_ARENA) || root_of(p, a) != root_of(p, b);
}

/* Place i of what a kernel step touches: inputs, outputs, the workspace; -1 where there is none. */
static int touched(const wki_step *s, int i) {
    return i < s->node->nin + s->node->nout ? s->view_buf[i] : s->workspace;
}

static bool independent(const wki_plan *p, const wki_step *s, const wki_step *t) {
    int ns = s->node->nin + s->node->nout, nt = t->node->nin + t->node->nout;
    for (int i = 0; i <= ns; i++)
        for (int j = 0; j <= nt; j++) {
            bool read_only = i < s->node->nin && j < t->node->nin;
            if (!read_only && touched(s, i) >= 0 && touched(t, j) >= 0 &&
                !apart(p, touched(s, i), touched(t, j)))
                return false;
        }
    return true;
}

static bool is_product(const launch *l) {
    return l->kind == KERNEL && (l->step->kernel->flags & WKI_K_PRODUCT);
}

/* Neighbouring products that do not depend on each other share a launch. */
static void share_launches(cuda_plan *cp) {
    for (int first = 0, i = 1; i < cp->nlaunch; i++) {
        bool joins = is_product(&cp->launch[first]) && is_product(&cp->launch[i]) && i - first < WKK_PRODUCTS;
        for (int k = first; joins && k < i; k++)
            joins = independent(cp->p, cp->launch[k].step, cp->launch[i].step);
        if (joins)
            cp->launch[i - 1].shares = true;
        else
            first = i;
    }
}

/* Texts of all loops, compiled together where they are new. */
static bool add_functions(wk_ctx *c, cuda_plan *cp) {
    wki_cu_kernel_text *t = wki_calloc((size_t)cp->nlaunch + 1, sizeof *t);
    wki_cu_function **fn = wki_calloc((size_t)cp->nlaunch + 1, sizeof *fn);
    const char *why = "";
    int n = 0;
    bool ok = (t && fn) || nomem(c);
    for (int i = 0; ok && i < cp->nlaunch; i++) {
        const launch *l = &cp->launch[i];
        if (l->kind != LOOP && l->kind != MULTI)
            continue;
        c->cur_op = l->step->op;
        ok = l->kind == LOOP ? wki_emit_cuda(l->step->run, &t[n], &why)
                             : wki_emit_cuda_multi(l->step->run, &t[n], &why);
        if (ok)
            n++;
        else
            wki_fail(c, why == wki_emit_cuda_nomem ? WK_NOMEM : WK_INTERNAL, "CUDA text: %s", why);
    }
    ok = ok && wki_cuda_texts_get(c, t, n, fn);
    n = 0;
    for (int i = 0; ok && i < cp->nlaunch; i++)
        if (cp->launch[i].kind == LOOP || cp->launch[i].kind == MULTI)
            cp->launch[i].fn = fn[n++];
    for (int i = 0; t && i <= cp->nlaunch; i++)
        wki_cu_kernel_text_free(&t[i]);
    wki_free(t);
    wki_free(fn);
    return ok;
}

static void *cuda_prepare(wk_ctx *c, const wki_plan *p) {
    if (!wki_cuda_of(c))
        return NULL;
    cuda_plan *cp = wki_calloc(1, sizeof *cp);
    if (!cp) {
        nomem(c);
        return NULL;
    }
    cp->p = p;
    bool ok = sort_buffers(cp) || nomem(c);
    if (!ok || !add_launches(c, cp) || !find_stages(c, cp) || !add_functions(c, cp)) {
        cuda_release(c, cp);
        return NULL;
    }
    share_launches(cp);
    return cp;
}

/* ---- addresses ------------------------------------------------------------------------------------------------------- */

static wki_cu_operand place(const wki_cuda_ctx *s, const cuda_plan *cp, const wki_plan_args *a, int b,
                            int64_t off) {
    const wki_plan *p = cp->p;
    if (b < 0)
        return (wki_cu_operand){0, -1};
    if (cp->slot[b] >= 0)
        return (wki_cu_operand){(uint64_t)off, cp->slot[b]};
    if (p->buf[b].kind == WKI_B_EXTERNAL)
        return (wki_cu_operand){(uint64_t)(uintptr_t)a->buf[b] + (uint64_t)off, -1};
    return (wki_cu_operand){s->arena + (uint64_t)p->buf[b].arena + (uint64_t)off, -1};
}

static void bind_step(const wki_cuda_ctx *s, const cuda_plan *cp, const wki_step *st, const wki_plan_args *a,
                      wki_cu_operand *opnd, int32_t *val, wki_cu_bind *b) {
    for (int o = 0; o < st->prog.nload + st->prog.nstore; o++)
        opnd[o] = place(s, cp, a, st->at[o].buf, st->at[o].off);
    for (int k = 0; k < st->prog.narg; k++)
        val[k] = WKI_ARG_VALUES + st->va[k];
    *b = (wki_cu_bind){.opnd = opnd,
                       .val_slot = val,
                       .rng_rel = st->rng,
                       .seed_slot = WKI_ARG_SEED,
                       .rng_base_slot = WKI_ARG_RNG_BASE,
                       .fault_slot = WKI_ARG_FAULT};
}

static bool keep_params(wk_ctx *c, launch *l, const wki_cu_loop_params *lp) {
    memcpy(l->grid, lp->grid, sizeof l->grid);
    memcpy(l->block, lp->block, sizeof l->block);
    if (!l->params || l->bytes < lp->bytes) {
        wki_free(l->params);
        l->params = wki_malloc(lp->bytes);
        if (!l->params)
            return nomem(c);
    }
    l->bytes = lp->bytes;
    memcpy(l->params, lp->data, lp->bytes);
    return true;
}

static bool set_loop(wk_ctx *c, cuda_plan *cp, launch *l, const wki_plan_args *a) {
    wki_cu_operand opnd[WKI_LOOP_MAX_OPERANDS];
    int32_t val[WKI_LOOP_MAX_INST];
    wki_cu_bind b;
    wki_cu_loop_params lp;
    const char *why = "";
    wki_cuda_ctx *s = c->dev_state[WK_CUDA];
    bind_step(s, cp, l->step, a, opnd, val, &b);
    b.scratch = s->arena + l->scratch_at;
    b.counts = s->counts;
    if (!wki_cu_loop_params_fill(l->step->run, &b, &lp, &why))
        return wki_fail(c, WK_INTERNAL, "CUDA launch: %s", why);
    return keep_params(c, l, &lp);
}

static bool set_multi(wk_ctx *c, cuda_plan *cp, launch *l, const wki_plan_args *a) {
    wki_cuda_ctx *s = c->dev_state[WK_CUDA];
    size_t nop = (size_t)(l->step->prog.nload + l->step->prog.nstore), n = (size_t)l->n;
    size_t words = wki_cu_multi_words(&l->step->prog, l->n);
    wki_cu_bind *b = wki_malloc(n * sizeof *b);
    wki_cu_operand *opnd = wki_malloc(n * nop * sizeof *opnd);
    const wki_loop_run **run = wki_malloc(n * sizeof *run);
    uint64_t *table = wki_calloc(words, sizeof *table);
    int32_t val[WKI_LOOP_MAX_INST];
    wki_cu_loop_params lp;
    wki_cu_error err = {0};
    const char *why = "";
    bool ok = (b && opnd && run && table) || nomem(c);
    if (ok && !l->table && wki_cu_alloc(s->stream, words * sizeof *table, "tensor table", &l->table, &err))
        ok = wki_cuda_fail(c, &err);
    for (size_t i = 0; ok && i < n; i++) {
        bind_step(s, cp, l->member[i], a, opnd + i * nop, val, &b[i]);
        run[i] = l->member[i]->run;
    }
    if (ok && !wki_cu_multi_fill(run, b, l->n, l->table, table, &lp, &why))
        ok = wki_fail(c, WK_INTERNAL, "CUDA launch: %s", why);
    ok = ok && wki_cuda_upload(c, l->table, table, words * sizeof *table) && keep_params(c, l, &lp);
    wki_free(b);
    wki_free(opnd);
    wki_free(run);
    wki_free(table);
    return ok;
}

static void set_views(wki_cuda_ctx *s, cuda_plan *cp, launch *l, const wki_plan_args *a) {
    const wki_step *st = l->step;
    for (int i = 0; i < st->node->nin + st->node->nout; i++) {
        operand *o = &l->opnd[i];
        if (o->stage < 0 && st->view_buf[i] >= 0) {
            wki_cu_operand at = place(s, cp, a, st->view_buf[i], (int64_t)(uintptr_t)st->view[i].data);
            o->v.data = (void *)(uintptr_t)at.base;
            o->v.slot = at.slot;
        }
    }
}

/* Parameters of all launches, for where things are now. */
static bool set_up(wk_ctx *c, cuda_plan *cp, const wki_plan_args *a) {
    wki_cuda_ctx *s = c->dev_state[WK_CUDA];
    drop_graph(s, cp);
    cp->settled = 0;
    cp->generation = 0;
    for (int i = 0; i < cp->nstage; i++)
        cp->seen[cp->stage[i].buf] = a->buf[cp->stage[i].buf];
    for (int i = 0; i < cp->nlaunch; i++) {
        launch *l = &cp->launch[i];
        c->cur_op = l->step->op;
        if (l->kind == LOOP ? !set_loop(c, cp, l, a) : l->kind == MULTI ? !set_multi(c, cp, l, a) : false)
            return false;
        if (l->kind == KERNEL || l->kind == USER)
            set_views(s, cp, l, a);
    }
    for (int i = 0; i < cp->npinned; i++)
        cp->baked[i] = a->buf[cp->pinned[i]];
    cp->generation = s->generation;
    return true;
}

/* Has something moved that parameters or a graph hold? Notes which buffers do not stay at one address. */
static bool moved(const wki_cuda_ctx *s, cuda_plan *cp, const wki_plan_args *a) {
    bool any = cp->generation != s->generation;
    for (int i = 0; i < cp->npinned; i++)
        any |= cp->baked[i] != a->buf[cp->pinned[i]];
    if (!cp->generation)
        return true;
    for (int i = 0; i < cp->nstage; i++) {
        const stage *g = &cp->stage[i];
        if (g->raw && cp->slot[g->buf] >= 0 && cp->seen[g->buf] != a->buf[g->buf])
            any |= !cp->wild[g->buf];
    }
    for (int i = 0; any && i < cp->nstage; i++) {
        int32_t b = cp->stage[i].buf;
        cp->wild[b] |= cp->slot[b] >= 0 && cp->seen[b] != a->buf[b];
    }
    return any;
}

/* ---- running --------------------------------------------------------------------------------------------------------- */

static bool launch_fn(wk_ctx *c, const launch *l, void **params) {
    wki_cuda_ctx *s = c->dev_state[WK_CUDA];
    wki_cu_error err = {0};
    wki_cu_kernel k = {.function = l->fn,
                       .grid = {l->grid[0], l->grid[1], l->grid[2]},
                       .block = {l->block[0], l->block[1], l->block[2]},
                       .params = params,
                       .name = l->step->op->name,
                       .overlap = l->kind != USER};
    return !l->grid[0] || !wki_cu_launch(s->stream, &k, &err) || wki_cuda_fail(c, &err);
}

static bool launch_user(wk_ctx *c, const cuda_plan *cp, launch *l, const wki_view *v) {
    wki_cuda_ctx *s = c->dev_state[WK_CUDA];
    const wki_gnode *n = l->step->node;
    wki_cu_ptr addr[MAX_VIEWS + 1];
    void *params[MAX_VIEWS + 2];
    long long numel = v[n->nin].numel;
    int np = n->nin + n->nout;
    for (int i = 0; i < np; i++) {
        addr[i] = wki_addr_of(&v[i]);
        params[i] = &addr[i];
    }
    addr[np] = s->arena + l->attr_at;
    params[np] = &addr[np];
    params[np + 1] = &numel;
    wkk_attrs at = {.dst = wki_at_addr(addr[np]), .first = WKI_ARG_VALUES + n->va0, .n = n->nva};
    l->grid[0] = (unsigned)((numel + WKK_THREADS - 1) / WKK_THREADS);
    l->grid[1] = l->grid[2] = l->block[1] = l->block[2] = 1;
    l->block[0] = WKK_THREADS;
    (void)cp;
    return wki_cuda_launch(c, WKI_FN_wkk_attr_floats, &at, at.n, WKK_THREADS) && launch_fn(c, l, params);
}

/* The view of a stage where it is. */
static wkk_at view_at(const wki_cuda_ctx *s, const cuda_plan *cp, const stage *g, const wki_plan_args *a) {
    wki_cu_operand at = place(s, cp, a, g->buf, g->off);
    return (wkk_at){at.base, at.slot};
}

static bool fill_stage(wk_ctx *c, const cuda_plan *cp, const stage *g, const wki_view *v,
                       const wki_plan_args *a) {
    wki_cuda_ctx *s = c->dev_state[WK_CUDA];
    wkk_at from = view_at(s, cp, g, a), copy = wki_at_addr(s->arena + g->at);
    const int64_t one = 1;
    if (g->raw)
        return wki_cuda_copy(c, 1, 1, &g->span, copy, &one, from, &one);
    wki_view sparse = *v;
    sparse.data = (void *)(uintptr_t)from.base;
    sparse.slot = from.slot;
    return wki_cuda_copy_plain(c, copy, &sparse);
}

/* Where a kernel finds a stage's view: in the copy, or where it is now. */
static void *stage_address(const wki_cuda_ctx *s, const cuda_plan *cp, const stage *g, const wki_plan_args *a,
                           bool direct) {
    if (copied(cp, g, a, direct))
        return (void *)(uintptr_t)(s->arena + g->at);
    if (cp->p->buf[g->buf].kind == WKI_B_ARENA)
        return (void *)(uintptr_t)view_at(s, cp, g, a).base;
    return (char *)a->buf[g->buf] + g->off;
}

static bool run_kernel_step(wk_ctx *c, cuda_plan *cp, launch *l, const wki_plan_args *a, bool direct) {
    wki_cuda_ctx *s = c->dev_state[WK_CUDA];
    const wki_step *st = l->step;
    const wki_gnode *n = st->node;
    wki_view v[MAX_VIEWS];
    for (int i = 0; i < n->nin + n->nout; i++) {
        const operand *o = &l->opnd[i];
        const stage *g = o->stage >= 0 ? &cp->stage[o->stage] : NULL;
        v[i] = g ? g->view : o->v;
        if (g)
            v[i].data = stage_address(s, cp, g, a, direct);
        if (g && o->copy_in && copied(cp, g, a, direct) && !fill_stage(c, cp, g, &st->view[i], a))
            return false;
    }
    wki_launch w = {.c = c,
                    .op = st->op,
                    .nin = n->nin,
                    .nout = n->nout,
                    .in = v,
                    .out = v + n->nin,
                    .ia = n->ia,
                    .va_slot = WKI_ARG_VALUES + n->va0};
    if (st->workspace >= 0)
        w.workspace = (void *)(uintptr_t)(s->arena + (wki_cu_ptr)cp->p->buf[st->workspace].arena);
    if (!(l->kind == USER ? launch_user(c, cp, l, v) : st->kernel->run(&w)))
        return false;
    for (int i = n->nin; i < n->nin + n->nout; i++) {
        const stage *g = l->opnd[i].stage >= 0 ? &cp->stage[l->opnd[i].stage] : NULL;
        if (g && copied(cp, g, a, direct) && !wki_cuda_copy_plain(c, view_at(s, cp, g, a), &v[i]))
            return false;
    }
    return true;
}

/* Keeps what steps before a check overwrite, or puts it back if that check fails. */
static bool copy_saved(wk_ctx *c, const cuda_plan *cp, const wki_plan_args *a, bool back) {
    const wki_cuda_ctx *s = c->dev_state[WK_CUDA];
    const wki_plan *p = cp->p;
    bool ok = true;
    for (int i = 0; ok && i < p->nsave; i++) {
        wki_cu_operand at = place(s, cp, a, p->save[i].buf, 0), copy = place(s, cp, a, p->save[i].copy, 0);
        wkk_at there = {at.base, at.slot}, kept = {copy.base, copy.slot};
        int64_t bytes = p->buf[p->save[i].copy].bytes, one = 1;
        wkk_copy k = {.dst = there, .src = kept, .n = bytes};
        ok = back ? wki_cuda_launch(c, WKI_FN_wkk_put_back, &k, (bytes + 15) / 16, WKK_THREADS)
                  : wki_cuda_copy(c, 1, 1, &bytes, kept, &one, there, &one);
    }
    return ok;
}

static bool enqueue(wk_ctx *c, cuda_plan *cp, const wki_plan_args *a, bool direct) {
    wki_cuda_ctx *s = c->dev_state[WK_CUDA];
    bool ok = copy_saved(c, cp, a, false);
    for (int i = 0; ok && i < cp->nlaunch; i++) {
        launch *l = &cp->launch[i];
        c->cur_op = l->step->op;
        if (l->kind == LOOP || l->kind == MULTI)
            ok = launch_fn(c, l, (void *[]){l->params, &s->args});
        else
            ok = run_kernel_step(c, cp, l, a, direct) && (l->shares || wki_cuda_products_flush(c));
    }
    s->held.n = 0;
    return ok && copy_saved(c, cp, a, true);
}

/* The argument block of a run. Few words travel as arguments of a kernel that stores them, the first of a
 * graph; many are copied from the ring. */
typedef struct arguments {
    wkk_words words;
    void *params[2];
    wki_cu_kernel kernel;
} arguments;

static bool by_value(const cuda_plan *cp) { return cp->arg_words <= WKK_WORDS; }

static void fill_words(const wki_cuda_ctx *s, const cuda_plan *cp, const wki_plan_args *a, wkk_u64 *w) {
    w[WKI_ARG_SEED] = a->seed;
    w[WKI_ARG_RNG_BASE] = a->rng_base;
    w[WKI_ARG_FAULT] = (wkk_u64)(uintptr_t)wki_cuda_fault(s);
    w[WKI_ARG_STOP] = s->stop;
    if (cp->p->g->nval)
        memcpy(w + WKI_ARG_VALUES, a->val, (size_t)cp->p->g->nval * sizeof *w);
    w += WKI_ARG_VALUES + cp->p->g->nval;
    for (int i = 0; i < cp->nmoving; i++)
        w[i] = (wkk_u64)(uintptr_t)a->buf[cp->moving[i]];
}

static bool make_args(wk_ctx *c, const cuda_plan *cp, const wki_plan_args *a, arguments *out) {
    wki_cuda_ctx *s = c->dev_state[WK_CUDA];
    out->words.n = (wkk_i64)cp->arg_words;
    fill_words(s, cp, a, out->words.word);
    out->params[0] = &out->words;
    out->params[1] = &s->args;
    return wki_cuda_kernel_of(c, WKI_FN_wkk_set_args, out->params, 1, 1, &out->kernel);
}

static bool capture(wk_ctx *c, cuda_plan *cp, const wki_plan_args *a, const arguments *first) {
    wki_cuda_ctx *s = c->dev_state[WK_CUDA];
    wki_cu_error err = {0};
    if (wki_cu_capture_begin(s->stream, &err))
        return wki_cuda_fail(c, &err);
    bool ok = !by_value(cp) || wki_cu_launch(s->stream, &first->kernel, &err) == WKI_CU_OK ||
              wki_cuda_fail(c, &err);
    if (!ok || !enqueue(c, cp, a, false)) {
        wki_cu_capture_abort(s->stream);
        return false;
    }
    c->cur_op = NULL;
    int code = wki_cu_capture_end(s->stream, &cp->graph, &err);
    if (!code)
        code = wki_cu_graph_instantiate(cp->graph, &err);
    if (!code)
        code = wki_cu_graph_upload(cp->graph, s->stream, &err);
    if (!code)
        return true;
    wki_cu_graph_destroy(cp->graph);
    cp->graph = NULL;
    return wki_cuda_fail(c, &err);
}

/* In stream order before what reads them. */
static bool send_args(wk_ctx *c, const cuda_plan *cp, const wki_plan_args *a, const arguments *args) {
    wki_cuda_ctx *s = c->dev_state[WK_CUDA];
    wki_cu_error err = {0};
    void *host;
    if (by_value(cp) && cp->graph)
        return !wki_cu_graph_first(cp->graph, &args->kernel, &err) || wki_cuda_fail(c, &err);
    if (by_value(cp))
        return !wki_cu_launch(s->stream, &args->kernel, &err) || wki_cuda_fail(c, &err);
    if (wki_cu_ring_acquire(s->ring, &host, &err))
        return wki_cuda_fail(c, &err);
    fill_words(s, cp, a, host);
    return !wki_cu_ring_submit(s->ring, s->args, cp->arg_words * sizeof(uint64_t), &err) ||
           wki_cuda_fail(c, &err);
}

static bool cuda_run(wk_ctx *c, const wki_plan *p, void *state, const wki_plan_args *a) {
    cuda_plan *cp = state;
    wki_cuda_ctx *s = c->dev_state[WK_CUDA];
    wki_cu_error err = {0};
    c->cur_op = NULL;
    bool record = !cp->graph && cp->settled >= DIRECT_RUNS && cp->nlaunch > 1;
    for (int i = 0; i < cp->nstage; i++)
        if (copied(cp, &cp->stage[i], a, !record && !cp->graph))
            give_room(cp, &cp->stage[i]);
    if (!wki_cuda_reserve(c, cp->arena_bytes, cp->arg_words * sizeof(uint64_t)))
        return false;
    if (moved(s, cp, a)) {
        record = false; /* first once more as it is, so that nothing is left to be made inside a capture */
        if (!set_up(c, cp, a))
            return false;
    }
    if (!cp->nlaunch)
        return true;
    c->cur_op = NULL;
    arguments args;
    if (by_value(cp) && !make_args(c, cp, a, &args))
        return false;
    if (record && !capture(c, cp, a, &args))
        return false;
    if (!send_args(c, cp, a, &args))
        return false;
    s->first_op = p->step[0].op->name;
    s->last_op = p->step[p->nstep - 1].op->name;
    if (cp->graph) {
        if (wki_cu_graph_launch(cp->graph, s->stream, &err))
            return wki_cuda_fail(c, &err);
        c->stats.graph_launches++;
    } else if (!enqueue(c, cp, a, true)) {
        return false;
    }
    cp->settled++;
    c->stats.kernel_launches += cp->nlaunch;
    return true;
}

const struct wki_plan_api wki_cuda_plans = {cuda_prepare, cuda_run, cuda_release};
