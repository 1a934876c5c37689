/* The null device: memory is host memory that nobody computes on, plans only count. For tests of the compiler and for
 * measuring the host's share of a step. */
#include <string.h>

#include "compile/plan.h"

static bool available(wk_runtime *rt, const char **why) {
    (void)rt;
    *why = "";
    return true;
}

/* Addresses are never followed, so large tensors cost nothing: a counter in place of memory. */
static void *null_alloc(wk_ctx *c, size_t bytes, const char *tag) {
    (void)tag;
    if (!bytes)
        return NULL;
    uintptr_t next = (uintptr_t)c->dev_state[WK_NULL];
    if (!next)
        next = 1u << 20;
    c->dev_state[WK_NULL] = (void *)(next + 64);
    return (void *)next;
}

static void null_free(wk_ctx *c, void *p, size_t bytes) {
    (void)c;
    (void)p;
    (void)bytes;
}

static bool null_upload(wk_ctx *c, void *dst, const void *src, size_t bytes) {
    (void)c;
    (void)dst;
    (void)src;
    (void)bytes;
    return true;
}

static bool null_download(wk_ctx *c, void *dst, const void *src, size_t bytes) {
    (void)c;
    (void)src;
    memset(dst, 0, bytes);
    return true;
}

static bool null_sync(wk_ctx *c) {
    (void)c;
    return true;
}

static void null_ctx_free(wk_ctx *c) { c->dev_state[WK_NULL] = NULL; }

typedef struct null_plan {
    int64_t launches, bytes;
} null_plan;

/* Bytes a loop moves: every element of its domain that an operand depends on, once. */
static int64_t operand_bytes(const wki_step *s, int o) {
    int64_t n = 1;
    for (int d = 0; d < s->run->ndim; d++)
        if (s->run->opnd[o].stride[d])
            n *= s->run->size[d];
    return n * (int64_t)wki_dtype_size((wk_dtype)s->run->opnd[o].dtype);
}

static void *prepare(wk_ctx *c, const wki_plan *p) {
    null_plan *np = wki_calloc(1, sizeof *np);
    if (!np) {
        wki_fail(c, WK_NOMEM, "no host memory to prepare a plan");
        return NULL;
    }
    for (int i = 0; i < p->nstep; i++) {
        const wki_step *s = &p->step[i];
        bool again = i && s->multi && s->multi == p->step[i - 1].multi;
        np->launches += !again;
        if (s->kind == WKI_STEP_LOOP) {
            for (int o = 0; o < s->prog.nload + s->prog.nstore; o++)
                np->bytes += operand_bytes(s, o);
        } else {
            for (int o = 0; o < s->node->nin + s->node->nout; o++)
                np->bytes += s->view[o].numel * (int64_t)wki_dtype_size((wk_dtype)s->view[o].dtype);
        }
    }
    np->launches += 2 * p->nsave; /* kept, and put back or not */
    for (int i = 0; i < p->nsave; i++)
        np->bytes += 2 * p->buf[p->save[i].copy].bytes;
    return np;
}

static bool run(wk_ctx *c, const wki_plan *p, void *state, const wki_plan_args *a) {
    (void)p;
    (void)a;
    const null_plan *np = state;
    c->stats.kernel_launches += np->launches;
    c->stats.bytes_moved += np->bytes;
    c->stats.graph_launches++;
    return true;
}

static void release(wk_ctx *c, void *state) {
    (void)c;
    wki_free(state);
}

static const wki_plan_api plans = {prepare, run, release};

const wki_device_api wki_device_null = {
    .name = "null",
    .available = available,
    .alloc = null_alloc,
    .free = null_free,
    .upload = null_upload,
    .download = null_download,
    .sync = null_sync,
    .ctx_free = null_ctx_free,
    .plan = &plans,
};
