/* The CPU as a device: memory from size-classed free lists, and plans run step by step. */
#include <string.h>

#include "compile/plan.h"
#include "ops/bind.h"

/* Four classes per power of two, from 64 bytes: at most 25% of a block is unused. Freed blocks are kept up to a limit. */
enum { MIN_BLOCK = 64, CLASSES = 160 };
static const size_t KEEP_BYTES = (size_t)1 << 30;

typedef struct block {
    struct block *next;
} block;

typedef struct cpu_state {
    block *free[CLASSES];
    size_t kept;
    void *arena;
    size_t arena_bytes;
} cpu_state;

static int size_class(size_t bytes, size_t *rounded) {
    if (bytes <= MIN_BLOCK) {
        *rounded = MIN_BLOCK;
        return 0;
    }
    int top = 63 - __builtin_clzll(bytes - 1); /* 2^top <= bytes - 1 */
    size_t step = (size_t)1 << (top - 2);
    size_t r = (bytes + step - 1) & ~(step - 1);
    *rounded = r;
    return (top - 6) * 4 + (int)((r - ((size_t)1 << top)) / step);
}

static cpu_state *state(wk_ctx *c) {
    if (!c->dev_state[WK_CPU])
        c->dev_state[WK_CPU] = wki_calloc(1, sizeof(cpu_state));
    return c->dev_state[WK_CPU];
}

static void *cpu_alloc(wk_ctx *c, size_t bytes, const char *tag) {
    (void)tag;
    cpu_state *s = state(c);
    size_t rounded = 0;
    if (!bytes)
        return NULL;
    if (s && bytes < (size_t)1 << 44) {
        int k = size_class(bytes, &rounded);
        block *b = k < CLASSES ? s->free[k] : NULL;
        if (b) {
            s->free[k] = b->next;
            s->kept -= rounded;
            return b;
        }
        void *p = wki_aligned(64, rounded);
        if (p)
            return p;
        for (int i = 0; i < CLASSES; i++) /* give back what is kept and try once more */
            for (b = s->free[i]; b; b = s->free[i]) {
                s->free[i] = b->next;
                wki_free(b);
            }
        s->kept = 0;
        p = wki_aligned(64, rounded);
        if (p)
            return p;
    }
    wki_fail(c, WK_NOMEM, "no host memory for %zu bytes (this context holds %lld)", bytes,
             (long long)c->stats.storage_bytes);
    return NULL;
}

static void cpu_free(wk_ctx *c, void *p, size_t bytes) {
    cpu_state *s = state(c);
    size_t rounded = 0;
    if (!p)
        return;
    int k = s ? size_class(bytes, &rounded) : CLASSES;
    if (k >= CLASSES || s->kept + rounded > KEEP_BYTES) {
        wki_free(p);
        return;
    }
    block *b = p;
    b->next = s->free[k];
    s->free[k] = b;
    s->kept += rounded;
}

static void cpu_ctx_free(wk_ctx *c) {
    cpu_state *s = c->dev_state[WK_CPU];
    if (!s)
        return;
    for (int i = 0; i < CLASSES; i++)
        for (block *b = s->free[i], *n; b; b = n) {
            n = b->next;
            wki_free(b);
        }
    wki_free(s->arena);
    wki_free(s);
    c->dev_state[WK_CPU] = NULL;
}

static bool cpu_available(wk_runtime *rt, const char **why) {
    (void)rt;
    *why = "";
    return true;
}

static bool cpu_copy(wk_ctx *c, void *dst, const void *src, size_t bytes) {
    (void)c;
    memcpy(dst, src, bytes);
    return true;
}

static bool cpu_sync(wk_ctx *c) {
    (void)c;
    return true;
}

/* ---- plans --------------------------------------------------------------------------------------------------------- */

/* Per context and plan: runs whose addresses are filled in each time. */
typedef struct cpu_plan {
    wki_loop_run **run;   /* per step; loops only */
    wki_loop_kept **kept; /* per step: what is known of that, or NULL */
    char *run_memory, *kept_memory;
    float *arg; /* VALUE attributes as floats, per step at arg0 */
    uint64_t *rng;
    int *arg0, *rng0;
    int32_t fault;
} cpu_plan;

static void cpu_release(wk_ctx *c, void *p) {
    (void)c;
    cpu_plan *cp = p;
    wki_free(cp->run);
    wki_free(cp->kept);
    wki_free(cp->kept_memory);
    wki_free(cp->run_memory);
    wki_free(cp->arg);
    wki_free(cp->rng);
    wki_free(cp->arg0);
    wki_free(cp->rng0);
    wki_free(cp);
}

static bool grow_arena(wk_ctx *c, int64_t bytes) {
    cpu_state *s = state(c);
    if (!s)
        return wki_fail(c, WK_NOMEM, "no host memory for the device's state");
    if ((size_t)bytes <= s->arena_bytes)
        return true;
    void *p = wki_aligned(64, (size_t)bytes);
    if (!p)
        return wki_fail(c, WK_NOMEM, "no host memory for a plan's arena of %lld bytes", (long long)bytes);
    wki_free(s->arena);
    s->arena = p;
    s->arena_bytes = (size_t)bytes;
    return true;
}

static void *cpu_prepare(wk_ctx *c, const wki_plan *p) {
    cpu_plan *cp = wki_calloc(1, sizeof *cp);
    size_t n = (size_t)p->nstep + 1, nargs = 1, nrng = 1, bytes = 64, kept = 64;
    for (int i = 0; i < p->nstep; i++)
        if (p->step[i].kind == WKI_STEP_LOOP) {
            nargs += (size_t)p->step[i].prog.narg;
            nrng += (size_t)p->step[i].prog.nrng;
            bytes += wki_loop_run_bytes(p->step[i].prog.nload + p->step[i].prog.nstore);
            kept += wki_loop_kept_bytes(p->step[i].run);
        }
    if (!cp || !(cp->run = wki_calloc(n, sizeof *cp->run)) || !(cp->kept = wki_calloc(n, sizeof *cp->kept)) ||
        !(cp->arg = wki_calloc(nargs, sizeof *cp->arg)) || !(cp->rng = wki_calloc(nrng, sizeof *cp->rng)) ||
        !(cp->arg0 = wki_calloc(n, sizeof *cp->arg0)) || !(cp->rng0 = wki_calloc(n, sizeof *cp->rng0)) ||
        !(cp->run_memory = wki_malloc(bytes)) || !(cp->kept_memory = wki_malloc(kept)) ||
        !grow_arena(c, p->arena_bytes)) {
        if (cp)
            cpu_release(c, cp);
        wki_fail(c, WK_NOMEM, "no host memory to prepare a plan");
        return NULL;
    }
    int a = 0, r = 0;
    char *at = cp->run_memory, *kept_at = cp->kept_memory;
    for (int i = 0; i < p->nstep; i++) {
        const wki_step *s = &p->step[i];
        if (s->kind != WKI_STEP_LOOP)
            continue;
        size_t size = wki_loop_run_bytes(s->prog.nload + s->prog.nstore);
        wki_loop_run *run = cp->run[i] = (wki_loop_run *)at;
        memcpy(run, s->run, size);
        at += size;
        if ((size = wki_loop_kept_bytes(run))) {
            cp->kept[i] = (wki_loop_kept *)kept_at;
            wki_loop_keep(run, cp->kept[i]);
            kept_at += size;
        }
        run->prog = &s->prog;
        run->arg = cp->arg + a;
        run->rng_seq = cp->rng + r;
        run->fault = &cp->fault;
        cp->arg0[i] = a;
        cp->rng0[i] = r;
        a += s->prog.narg;
        r += s->prog.nrng;
    }
    return cp;
}

static bool run_loop_step(wk_ctx *c, cpu_plan *cp, const wki_step *s, int i, const wki_plan_args *a) {
    wki_loop_run *r = cp->run[i];
    for (int o = 0; o < s->prog.nload + s->prog.nstore; o++)
        r->opnd[o].data = a->buf[s->at[o].buf] ? (char *)a->buf[s->at[o].buf] + s->at[o].off : NULL;
    for (int k = 0; k < s->prog.narg; k++)
        cp->arg[cp->arg0[i] + k] = (float)a->val[s->va[k]];
    for (int k = 0; k < s->prog.nrng; k++)
        cp->rng[cp->rng0[i] + k] = a->rng_base + (uint64_t)s->rng[k];
    r->seed = a->seed;
    return wki_loop_cpu_again(r, c->rt->isa, c->rt->pool, cp->kept[i]) ||
           wki_fail(c, WK_NOMEM, "no host memory for the loop's scratch space");
}

static bool run_kernel_step(wk_ctx *c, const wki_step *s, const wki_plan_args *a) {
    enum { MAX = 16 };
    wki_view v[MAX];
    const wki_gnode *n = s->node;
    for (int i = 0; i < n->nin + n->nout; i++) {
        v[i] = s->view[i];
        v[i].data = s->view_buf[i] >= 0 && a->buf[s->view_buf[i]]
                        ? (char *)a->buf[s->view_buf[i]] + (uintptr_t)s->view[i].data
                        : NULL;
    }
    wki_launch l = {.c = c,
                    .op = s->op,
                    .nin = n->nin,
                    .nout = n->nout,
                    .in = v,
                    .out = v + n->nin,
                    .ia = n->ia,
                    .va = a->val + n->va0,
                    .workspace = s->workspace >= 0 ? a->buf[s->workspace] : NULL};
    c->cur_op = s->op;
    return s->kind == WKI_STEP_USER ? wki_user_launch(&l) : s->kernel->run(&l);
}

/* Keeps what steps before a check overwrite, or puts it back. */
static void copy_saved(const wki_plan *p, const wki_plan_args *a, bool back) {
    for (int i = 0; i < p->nsave; i++) {
        void *there = a->buf[p->save[i].buf], *copy = a->buf[p->save[i].copy];
        size_t bytes = (size_t)p->buf[p->save[i].copy].bytes;
        if (back)
            memcpy(there, copy, bytes);
        else
            memcpy(copy, there, bytes);
    }
}

static bool cpu_run(wk_ctx *c, const wki_plan *p, void *st, const wki_plan_args *a) {
    cpu_plan *cp = st;
    cpu_state *s = state(c);
    if (!grow_arena(c, p->arena_bytes))
        return false;
    for (int b = 0; b < p->nbuf; b++)
        if (p->buf[b].kind == WKI_B_ARENA)
            a->buf[b] = (char *)s->arena + p->buf[b].arena;
    cp->fault = 0;
    copy_saved(p, a, false);
    for (int i = 0; i < p->nstep; i++) {
        bool ok = p->step[i].kind == WKI_STEP_LOOP ? run_loop_step(c, cp, &p->step[i], i, a)
                                                   : run_kernel_step(c, &p->step[i], a);
        if (ok && cp->fault) /* what comes next would write parameters */
            ok = wki_report_fault(c, cp->fault, cp->run[i]);
        if (!ok) {
            copy_saved(p, a, true);
            return false;
        }
    }
    c->stats.kernel_launches += p->nstep;
    return true;
}

static const wki_plan_api plans = {cpu_prepare, cpu_run, cpu_release};

const wki_device_api wki_device_cpu = {
    .name = "cpu",
    .available = cpu_available,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .upload = cpu_copy,
    .download = cpu_copy,
    .sync = cpu_sync,
    .ctx_free = cpu_ctx_free,
    .plan = &plans,
};
