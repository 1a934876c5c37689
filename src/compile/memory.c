/* The memory plan: lifetimes of arena buffers over the steps, then offsets. Largest first, each at the lowest place where no
 * buffer alive at the same time is; ties by number, so that the result depends on the plan alone. Plans of very many buffers
 * go in order of time instead, so that what is over can be forgotten. */
#include <stdlib.h>
#include <string.h>

#include "compile/plan.h"

enum { ALIGN = 64, MANY = 8192 };

typedef struct life {
    int buf, first, last;
    int64_t size, at;
} life;

static void touch(life *l, int32_t buf, int step) {
    if (buf < 0)
        return;
    if (l[buf].first < 0)
        l[buf].first = step;
    l[buf].last = step;
}

static int by_size(const void *a, const void *b) {
    const life *x = *(life *const *)a, *y = *(life *const *)b;
    if (x->size != y->size)
        return x->size < y->size ? 1 : -1;
    return x->buf - y->buf;
}

static int by_time(const void *a, const void *b) {
    const life *x = *(life *const *)a, *y = *(life *const *)b;
    return x->first != y->first ? x->first - y->first : by_size(a, b);
}

static int64_t lower_bound(const wki_plan *p, const life *l) {
    int64_t best = 0, *delta = wki_calloc((size_t)p->nstep + 2, sizeof *delta);
    if (!delta)
        return 0;
    for (int b = 0; b < p->nbuf; b++)
        if (l[b].first >= 0 && p->buf[b].kind == WKI_B_ARENA) {
            delta[l[b].first] += l[b].size;
            delta[l[b].last + 1] -= l[b].size;
        }
    int64_t now = 0;
    for (int s = 0; s <= p->nstep; s++) {
        now += delta[s];
        if (now > best)
            best = now;
    }
    wki_free(delta);
    return best;
}

/* Gives each of todo[0..m) its place; returns the bytes it takes. `busy` is scratch: what is placed, by offset. */
static int64_t place(life **todo, int m, life **busy, bool in_time) {
    int64_t total = 0;
    int nbusy = 0;
    qsort(todo, (size_t)m, sizeof *todo, in_time ? by_time : by_size);
    for (int i = 0; i < m; i++) {
        life *v = todo[i];
        int64_t at = 0;
        int kept = 0;
        for (int j = 0; in_time && j < nbusy; j++)
            if (busy[j]->last >= v->first)
                busy[kept++] = busy[j];
        nbusy = in_time ? kept : nbusy;
        for (int j = 0; j < nbusy; j++) {
            const life *o = busy[j];
            if (o->first > v->last || v->first > o->last)
                continue;
            if (at + v->size <= o->at)
                break;
            if (o->at + o->size > at)
                at = o->at + o->size;
        }
        v->at = at;
        total = at + v->size > total ? at + v->size : total;
        int j = nbusy++;
        for (; j > 0 && busy[j - 1]->at > at; j--)
            busy[j] = busy[j - 1];
        busy[j] = v;
    }
    return total;
}

bool wki_pass_memory(wk_ctx *c, wki_plan *p) {
    size_t n = (size_t)p->nbuf + 1;
    life *l = wki_malloc(n * sizeof *l), **todo = wki_malloc(n * sizeof *todo),
         **busy = wki_malloc(n * sizeof *busy);
    bool ok = l && todo && busy;
    if (!ok) {
        wki_fail(c, WK_NOMEM, "no host memory for the memory plan");
        goto end;
    }
    for (int b = 0; b < p->nbuf; b++)
        l[b] = (life){.buf = b,
                      .first = -1,
                      .last = -1,
                      .size = (p->buf[b].bytes + ALIGN - 1) / ALIGN * ALIGN,
                      .at = -1};
    for (int i = 0; i < p->nstep; i++) {
        const wki_step *s = &p->step[i];
        if (s->kind == WKI_STEP_LOOP) {
            for (int o = 0; o < s->prog.nload + s->prog.nstore; o++)
                touch(l, s->at[o].buf, i);
        } else {
            for (int o = 0; o < s->node->nin + s->node->nout; o++)
                touch(l, s->view_buf[o], i);
            touch(l, s->workspace, i);
        }
    }
    for (int i = 0; i < p->nsave; i++) { /* from the first step to the last, whichever fails */
        touch(l, p->save[i].copy, 0);
        touch(l, p->save[i].copy, p->nstep - 1);
    }
    int m = 0;
    for (int b = 0; b < p->nbuf; b++)
        if (p->buf[b].kind == WKI_B_ARENA && l[b].first >= 0)
            todo[m++] = &l[b];
    p->lower_bound = lower_bound(p, l);
    p->arena_bytes = place(todo, m, busy, m > MANY);
    for (int i = 0; i < m; i++)
        p->buf[todo[i]->buf].arena = todo[i]->at;
    if (m <= MANY && p->arena_bytes > p->lower_bound) { /* the other order may waste less */
        int64_t other = place(todo, m, busy, true);
        for (int i = 0; i < m && other < p->arena_bytes; i++)
            p->buf[todo[i]->buf].arena = todo[i]->at;
        p->arena_bytes = other < p->arena_bytes ? other : p->arena_bytes;
    }
end:
    wki_free(l);
    wki_free(todo);
    wki_free(busy);
    return ok;
}
