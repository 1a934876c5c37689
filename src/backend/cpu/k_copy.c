/* Strided copies, and the two ops that are nothing else: copy_wide and pad_slice. Calls base/pool, core. */
#include "backend/cpu/k_copy.h"

#include <string.h>

#include "backend/cpu/k_util.h"
#include "backend/kernels.h"

/* Work is shared out in pieces of a row of the innermost dimension. */
#define PIECE 16384
/* Transposes go by squares of so many elements a side, which use whole cache lines on both sides. */
#define SQUARE 16

typedef struct {
    int bytes, nd;
    int64_t size[WK_MAX_DIMS], ds[WK_MAX_DIMS], ss[WK_MAX_DIMS];
    int64_t pieces;    /* of a row; of the dimension `across` in a transpose */
    int along, across; /* transpose: the dimensions of unit stride in src and in dst */
    char *dst;
    const char *src;
} copy_job;

/* Leaves out dimensions of size 1 and merges those that both sides walk in one step. */
static void merge(copy_job *j, int nd, const int64_t *size, const int64_t *ds, const int64_t *ss) {
    j->nd = 0;
    for (int d = 0; d < nd; d++) {
        int last = j->nd - 1;
        if (size[d] == 1)
            continue;
        if (last >= 0 && j->ds[last] == ds[d] * size[d] && j->ss[last] == ss[d] * size[d]) {
            j->size[last] *= size[d];
        } else {
            last = j->nd++;
            j->size[last] = size[d];
        }
        j->ds[last] = ds[d];
        j->ss[last] = ss[d];
    }
    if (j->nd == 0) {
        j->nd = 1;
        j->size[0] = j->ds[0] = j->ss[0] = 1;
    }
}

static void copy_run(char *dst, int64_t ds, const char *src, int64_t ss, int64_t n, int bytes) {
    if (ds == 1 && ss == 1) {
        memcpy(dst, src, (size_t)(n * bytes));
    } else if (bytes == 4) {
        for (int64_t i = 0; i < n; i++)
            memcpy(dst + 4 * i * ds, src + 4 * i * ss, 4);
    } else {
        for (int64_t i = 0; i < n; i++)
            memcpy(dst + 8 * i * ds, src + 8 * i * ss, 8);
    }
}

static void copy_units(void *arg, int64_t begin, int64_t end, int worker) {
    const copy_job *j = arg;
    int last = j->nd - 1;
    (void)worker;
    for (int64_t u = begin; u < end; u++) {
        int64_t row = u / j->pieces, from = u % j->pieces * PIECE, d_at = from * j->ds[last],
                s_at = from * j->ss[last];
        for (int d = last - 1; d >= 0; d--) {
            int64_t i = row % j->size[d];
            row /= j->size[d];
            d_at += i * j->ds[d];
            s_at += i * j->ss[d];
        }
        copy_run(j->dst + d_at * j->bytes, j->ds[last], j->src + s_at * j->bytes, j->ss[last],
                 wki_k_min(PIECE, j->size[last] - from), j->bytes);
    }
}

/* Elements [0, na) along and [0, nb) across. */
static void copy_square(const copy_job *j, char *dst, const char *src, int64_t na, int64_t nb) {
    int64_t ds = j->ds[j->along] * j->bytes, ss = j->ss[j->across] * j->bytes;
    for (int64_t a = 0; a < na; a++)
        copy_run(dst + a * ds, 1, src + a * j->bytes, ss / j->bytes, nb, j->bytes);
}

static void transpose_units(void *arg, int64_t begin, int64_t end, int worker) {
    const copy_job *j = arg;
    int64_t along = j->size[j->along], across = j->size[j->across];
    (void)worker;
    for (int64_t u = begin; u < end; u++) {
        int64_t row = u / j->pieces, b = u % j->pieces * SQUARE, d_at = b, s_at = b * j->ss[j->across];
        for (int d = j->nd - 1; d >= 0; d--) {
            if (d == j->along || d == j->across)
                continue;
            int64_t i = row % j->size[d];
            row /= j->size[d];
            d_at += i * j->ds[d];
            s_at += i * j->ss[d];
        }
        for (int64_t a = 0; a < along; a += SQUARE)
            copy_square(j, j->dst + (d_at + a * j->ds[j->along]) * j->bytes, j->src + (s_at + a) * j->bytes,
                        wki_k_min(SQUARE, along - a), wki_k_min(SQUARE, across - b));
    }
}

/* Whether different dimensions, neither of them short, are walked with unit stride in src and in dst. */
static bool is_transpose(copy_job *j) {
    j->along = j->across = -1;
    for (int d = 0; d < j->nd; d++) {
        if (j->ss[d] == 1)
            j->along = d;
        if (j->ds[d] == 1)
            j->across = d;
    }
    return j->along >= 0 && j->across >= 0 && j->along != j->across && j->size[j->along] >= SQUARE / 2 &&
           j->size[j->across] >= SQUARE / 2;
}

void wki_k_copy(int bytes, int nd, const int64_t *size, void *dst, const int64_t *dst_stride, const void *src,
                const int64_t *src_stride, wki_pool *pool) {
    copy_job j = {.bytes = bytes, .dst = dst, .src = src};
    int64_t rows = 1;
    for (int d = 0; d < nd; d++)
        if (size[d] == 0)
            return;
    merge(&j, nd, size, dst_stride, src_stride);
    for (int d = 0; d < j.nd; d++)
        rows *= j.size[d];
    if (is_transpose(&j)) {
        int64_t along = j.size[j.along], across = j.size[j.across];
        j.pieces = wki_k_ceil(across, SQUARE);
        wki_pool_for(pool, rows / (along * across) * j.pieces, transpose_units, &j,
                     wki_k_ceil(PIECE, SQUARE * along));
        return;
    }
    rows /= j.size[j.nd - 1];
    int64_t inner = j.size[j.nd - 1];
    j.pieces = wki_k_ceil(inner, PIECE);
    wki_pool_for(pool, rows * j.pieces, copy_units, &j, wki_k_ceil(PIECE, wki_k_min(inner, PIECE)));
}

void wki_k_copy_plain(void *dst, const wki_view *v, wki_pool *pool) {
    int64_t stride[WK_MAX_DIMS], step = 1;
    for (int d = v->ndim - 1; d >= 0; d--) {
        stride[d] = step;
        step *= v->size[d];
    }
    wki_k_copy((int)wki_dtype_size((wk_dtype)v->dtype), v->ndim, v->size, dst, stride, v->data, v->stride,
               pool);
}

static void zero_units(void *arg, int64_t begin, int64_t end, int worker) {
    (void)worker;
    memset((float *)arg + begin, 0, (size_t)(end - begin) * sizeof(float));
}

void wki_k_zero(float *p, int64_t n, wki_pool *pool) { wki_pool_for(pool, n, zero_units, p, 4 * PIECE); }

/* ---- ops ----------------------------------------------------------------------------------------------- */

bool wki_k_copy_wide_ok(const wki_launch *l) {
    size_t bytes = wki_dtype_size((wk_dtype)l->in[0].dtype);
    return wki_k_needs(l, bytes == 4 || bytes == 8, "elements of 4 or 8 bytes");
}

bool wki_k_copy_wide_run(const wki_launch *l) {
    wki_k_copy_plain(l->out[0].data, &l->in[0], l->c->rt->pool);
    return true;
}

bool wki_k_pad_slice_ok(const wki_launch *l) { return wki_k_needs(l, l->in[0].dtype == WK_F32, "f32"); }

/* ia: size (a list), dim, start, step. */
bool wki_k_pad_slice_run(const wki_launch *l) {
    const wki_view *dy = &l->in[0], *dx = &l->out[0];
    wki_pool *pool = l->c->rt->pool;
    int nd = dx->ndim;
    int64_t dim = l->ia[1 + nd], start = l->ia[2 + nd], step = l->ia[3 + nd], stride[WK_MAX_DIMS];
    if (dx->numel == 0)
        return true;
    for (int d = 0; d < nd; d++)
        stride[d] = d == dim ? dx->stride[d] * step : dx->stride[d];
    wki_k_zero(dx->data, dx->numel, pool);
    if (dy->numel)
        wki_k_copy(4, nd, dy->size, (float *)dx->data + start * dx->stride[dim], stride, dy->data, dy->stride,
                   pool);
    return true;
}
