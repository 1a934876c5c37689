/* Embedding: rows of a table by index, and the sum of rows by index. Calls base/pool, core. */
#include <stdatomic.h>
#include <string.h>

#include "backend/cpu/k_copy.h"
#include "backend/cpu/k_rows.h"
#include "backend/cpu/k_util.h"
#include "backend/kernels.h"

/* Work is shared out among threads in lots of about so many elements. */
#define LOT 32768

typedef struct {
    const wki_launch *l;
    const wki_view *idx;
    const wki_k_rows *rows;
    _Atomic int64_t bad; /* first position whose index is out of range */
} row_job;

static int64_t index_at(const wki_view *idx, int64_t i) {
    return ((const int64_t *)idx->data)[idx->plain ? i : wki_k_offset(idx, idx->ndim, i)];
}

static bool out_of_range(const wki_launch *l, const wki_view *idx, int64_t at, int64_t rows) {
    return wki_fail(l->c, WK_INDEX, "index %lld at position %lld is out of range for %lld rows",
                    (long long)index_at(idx, at), (long long)at, (long long)rows);
}

static void note_bad(row_job *j, int64_t at) {
    int64_t old = atomic_load(&j->bad);
    while (at < old && !atomic_compare_exchange_weak(&j->bad, &old, at))
        ;
}

/* ---- rows of a table ----------------------------------------------------------------------------------- */

static void take_rows(void *arg, int64_t begin, int64_t end, int worker) {
    row_job *j = arg;
    const wki_view *w = &j->l->in[0];
    int64_t width = w->size[1], step = w->stride[1];
    float *dst = (float *)j->l->out[0].data + begin * width;
    (void)worker;
    for (int64_t i = begin; i < end; i++, dst += width) {
        int64_t r = index_at(j->idx, i);
        if (r < 0 || r >= w->size[0]) {
            note_bad(j, i);
            return;
        }
        const float *src = (const float *)w->data + r * w->stride[0];
        if (step == 1)
            memcpy(dst, src, (size_t)width * sizeof *dst);
        else
            for (int64_t d = 0; d < width; d++)
                dst[d] = src[d * step];
    }
}

bool wki_k_embedding_rows_ok(const wki_launch *l) {
    return wki_k_needs(l, l->in[0].dtype == WK_F32 && l->in[1].dtype == WK_I64, "f32 rows and i64 indices");
}

bool wki_k_embedding_rows_run(const wki_launch *l) {
    const wki_view *w = &l->in[0], *idx = &l->in[1];
    row_job j = {.l = l, .idx = idx, .bad = INT64_MAX};
    if (w->size[1] == 0) { /* nothing to copy, but indices are checked all the same */
        for (int64_t i = 0; i < idx->numel; i++)
            if (index_at(idx, i) < 0 || index_at(idx, i) >= w->size[0])
                return out_of_range(l, idx, i, w->size[0]);
        return true;
    }
    wki_pool_for(l->c->rt->pool, idx->numel, take_rows, &j, wki_k_ceil(LOT, w->size[1]));
    return j.bad == INT64_MAX || out_of_range(l, idx, j.bad, w->size[0]);
}

/* ---- sum of rows --------------------------------------------------------------------------------------- */

/* Offset of row i of dy. */
static int64_t row_offset(const wki_view *dy, int64_t i) {
    int last = dy->ndim - 1;
    return dy->plain ? i * dy->size[last] : wki_k_offset(dy, last, i);
}

/* Columns [begin, end) of all rows: each element gets its terms in the order of positions whatever the
 * threads. */
static void sum_columns(void *arg, int64_t begin, int64_t end, int worker) {
    const row_job *j = arg;
    const wki_view *dy = &j->l->in[0], *dw = &j->l->out[0];
    int64_t width = dw->size[1], n = end - begin, step = dy->stride[dy->ndim - 1];
    float *dst = (float *)dw->data + begin;
    (void)worker;
    for (int64_t i = 0; i < j->idx->numel; i++) {
        float *to = dst + index_at(j->idx, i) * width;
        const float *from = (const float *)dy->data + row_offset(dy, i) + begin * step;
        if (step == 1)
            j->rows->add(to, 0, from, 0, 1, n);
        else
            for (int64_t d = 0; d < n; d++)
                to[d] += from[d * step];
    }
}

bool wki_k_embedding_grad_columns_ok(const wki_launch *l) {
    return wki_k_needs(l, l->in[0].dtype == WK_F32 && l->in[1].dtype == WK_I64, "f32 rows and i64 indices");
}

bool wki_k_embedding_grad_columns_run(const wki_launch *l) {
    const wki_view *idx = &l->in[1], *dw = &l->out[0];
    row_job j = {.l = l, .idx = idx, .rows = wki_k_rows_of(l->c->rt->isa)};
    for (int64_t i = 0; i < idx->numel; i++) {
        int64_t r = index_at(idx, i);
        if (r < 0 || r >= dw->size[0])
            return out_of_range(l, idx, i, dw->size[0]);
    }
    if (dw->numel == 0)
        return true;
    wki_k_zero(dw->data, dw->numel, l->c->rt->pool);
    /* Whole cache lines, so that threads do not share any. */
    int64_t columns = wki_k_ceil(wki_k_ceil(LOT, wki_k_max(1, idx->numel)), 16) * 16;
    wki_pool_for(l->c->rt->pool, dw->size[1], sum_columns, &j, columns);
    return true;
}
