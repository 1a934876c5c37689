/* Max pooling: windows that lie within the padded plane, indices flat in the plane (H * W). Calls
 * base/pool, core. */
#include <math.h>
#include <stdatomic.h>

#include "backend/cpu/k_copy.h"
#include "backend/cpu/k_rows.h"
#include "backend/cpu/k_util.h"
#include "backend/kernels.h"

/* Planes are shared out among threads in lots of about so many elements touched. */
#define LOT 32768

static int64_t planes_per_lot(int64_t touched) { return wki_k_ceil(LOT, wki_k_max(touched, 1)); }

typedef struct {
    const wki_launch *l;
    const wki_k_rows *rows;
    atomic_int bad; /* an index lies outside its plane */
} pool_job;

static bool run_planes(const wki_launch *l, void (*fn)(void *, int64_t, int64_t, int), int64_t touched) {
    pool_job j = {.l = l, .rows = wki_k_rows_of(l->c->rt->isa)};
    const wki_view *y = &l->out[0];
    if (y->numel == 0)
        return true;
    if (l->in[0].numel == 0 && l->nout == 2)
        return wki_fail(l->c, WK_SHAPE, "windows without elements");
    wki_pool_for(l->c->rt->pool, y->size[0] * y->size[1], fn, &j, planes_per_lot(touched));
    return !atomic_load(&j.bad) || wki_fail(l->c, WK_INDEX, "an index lies outside its plane");
}

static int64_t plane_size(const wki_view *v) { return v->size[2] * v->size[3]; }

/* ---- forward ------------------------------------------------------------------------------------------- */

/* The window at (h0, w0), of which the part inside the plane counts. */
static inline float largest(const wki_view *x, const float *src, int64_t h0, int64_t w0, int64_t kh,
                            int64_t kw, int32_t *idx) {
    int64_t h1 = wki_k_min(h0 + kh, x->size[2]), w1 = wki_k_min(w0 + kw, x->size[3]);
    h0 = wki_k_max(h0, 0);
    w0 = wki_k_max(w0, 0);
    float best = src[h0 * x->stride[2] + w0 * x->stride[3]];
    int64_t where = h0 * x->size[3] + w0;
    for (int64_t h = h0; h < h1; h++) {
        const float *row = src + h * x->stride[2];
        for (int64_t w = w0; w < w1; w++) {
            float v = row[w * x->stride[3]];
            bool take = v > best || (isnan(v) && !isnan(best));
            best = take ? v : best;
            where = take ? h * x->size[3] + w : where;
        }
    }
    *idx = (int32_t)where;
    return best;
}

static void pool_any(void *arg, int64_t begin, int64_t end, int worker) {
    const wki_launch *l = ((pool_job *)arg)->l;
    const wki_view *x = &l->in[0], *y = &l->out[0];
    int64_t kh = l->ia[0], kw = l->ia[1], sh = l->ia[2], sw = l->ia[3], ph = l->ia[4], pw = l->ia[5];
    float *val = (float *)y->data + begin * plane_size(y);
    int32_t *idx = (int32_t *)l->out[1].data + begin * plane_size(y);
    (void)worker;
    for (int64_t p = begin; p < end; p++) {
        const float *src = (const float *)x->data + wki_k_offset(x, 2, p);
        for (int64_t oh = 0; oh < y->size[2]; oh++)
            for (int64_t ow = 0; ow < y->size[3]; ow++)
                *val++ = largest(x, src, oh * sh - ph, ow * sw - pw, kh, kw, idx++);
    }
}

bool wki_k_max_pool2d_any_ok(const wki_launch *l) { return wki_k_needs(l, l->in[0].dtype == WK_F32, "f32"); }

bool wki_k_max_pool2d_any_run(const wki_launch *l) {
    int64_t touched = plane_size(&l->out[0]) * wki_k_min(l->ia[0] * l->ia[1], plane_size(&l->in[0]));
    return run_planes(l, pool_any, touched);
}

static void pool_2x2(void *arg, int64_t begin, int64_t end, int worker) {
    const pool_job *j = arg;
    const wki_launch *l = j->l;
    const wki_view *x = &l->in[0], *y = &l->out[0];
    int64_t width = x->size[3], ow = y->size[3];
    float *val = (float *)y->data + begin * plane_size(y);
    int32_t *idx = (int32_t *)l->out[1].data + begin * plane_size(y);
    (void)worker;
    for (int64_t p = begin; p < end; p++) {
        const float *src = (const float *)x->data + wki_k_offset(x, 2, p);
        for (int64_t oh = 0; oh < y->size[2]; oh++, val += ow, idx += ow) {
            const float *row = src + 2 * oh * x->stride[2];
            j->rows->pool2x2(val, idx, row, row + x->stride[2], ow, (int32_t)(2 * oh * width),
                             (int32_t)width);
        }
    }
}

bool wki_k_max_pool2d_2x2_ok(const wki_launch *l) {
    const int64_t *ia = l->ia;
    bool shape = ia[0] == 2 && ia[1] == 2 && ia[2] == 2 && ia[3] == 2 && ia[4] == 0 && ia[5] == 0;
    return wki_k_needs(l, shape, "2 x 2 windows, stride 2 and no padding") &&
           wki_k_needs(l, l->in[0].dtype == WK_F32, "f32") &&
           wki_k_needs(l, l->in[0].stride[3] == 1, "rows without gaps");
}

bool wki_k_max_pool2d_2x2_run(const wki_launch *l) { return run_planes(l, pool_2x2, plane_size(&l->in[0])); }

/* ---- gradient and gather ------------------------------------------------------------------------------- */

static void scatter(void *arg, int64_t begin, int64_t end, int worker) {
    pool_job *j = arg;
    const wki_view *dy = &j->l->in[0], *idx = &j->l->in[1], *dx = &j->l->out[0];
    int64_t plane = plane_size(dx), gs = dy->stride[3], is = idx->stride[3];
    bool bad = false;
    (void)worker;
    for (int64_t p = begin; p < end; p++) {
        float *dst = (float *)dx->data + p * plane;
        wki_k_zero(dst, plane, NULL);
        if (dy->numel == 0)
            continue;
        const float *g = (const float *)dy->data + wki_k_offset(dy, 2, p);
        const int32_t *at = (const int32_t *)idx->data + wki_k_offset(idx, 2, p);
        for (int64_t h = 0; h < dy->size[2]; h++, g += dy->stride[2], at += idx->stride[2]) {
            for (int64_t w = 0; w < dy->size[3]; w++) {
                uint32_t i = (uint32_t)at[w * is];
                if (i < plane)
                    dst[i] += g[w * gs];
                else
                    bad = true;
            }
        }
    }
    if (bad)
        atomic_store(&j->bad, 1);
}

bool wki_k_max_pool2d_grad_planes_ok(const wki_launch *l) {
    return wki_k_needs(l, l->in[0].dtype == WK_F32, "f32");
}

bool wki_k_max_pool2d_grad_planes_run(const wki_launch *l) {
    return run_planes(l, scatter, plane_size(&l->out[0]) + plane_size(&l->in[0]));
}

static void gather(void *arg, int64_t begin, int64_t end, int worker) {
    pool_job *j = arg;
    const wki_view *x = &j->l->in[0], *idx = &j->l->in[1], *y = &j->l->out[0];
    int64_t plane = plane_size(x), width = x->size[3];
    bool bad = false, flat = x->stride[3] == 1 && x->stride[2] == width;
    float *dst = (float *)y->data + begin * plane_size(y);
    (void)worker;
    for (int64_t p = begin; p < end; p++) {
        const float *src = (const float *)x->data + wki_k_offset(x, 2, p);
        const int32_t *at = (const int32_t *)idx->data + wki_k_offset(idx, 2, p);
        for (int64_t h = 0; h < y->size[2]; h++, at += idx->stride[2]) {
            for (int64_t w = 0; w < y->size[3]; w++) {
                int64_t i = (uint32_t)at[w * idx->stride[3]];
                bool in = i < plane;
                bad |= !in;
                *dst++ = !in ? 0 : src[flat ? i : i / width * x->stride[2] + i % width * x->stride[3]];
            }
        }
    }
    if (bad)
        atomic_store(&j->bad, 1);
}

bool wki_k_max_pool2d_gather_planes_ok(const wki_launch *l) {
    return wki_k_needs(l, l->in[0].dtype == WK_F32, "f32");
}

bool wki_k_max_pool2d_gather_planes_run(const wki_launch *l) {
    return run_planes(l, gather, plane_size(&l->out[0]));
}
