/* Strided copies on the device, for whoever needs one, and the two ops that are nothing else: copy_wide and pad_slice. */
#include "backend/cuda/cuda.h"
#include "backend/kernels.h"

#include <string.h>

void wki_cuda_view(wkk_view *out, const wki_view *v, int nd) {
    out->at = wki_at_of(v);
    out->nd = nd;
    for (int d = 0; d < nd; d++) {
        out->size[d] = v->size[d];
        out->stride[d] = v->stride[d];
    }
}

/* Dimensions of size 1 go, and those that both sides walk in one step become one. */
static void merge(wkk_copy *p, int nd, const int64_t *size, const int64_t *ds, const int64_t *ss) {
    for (int d = 0; d < nd; d++) {
        int64_t last = p->nd - 1;
        if (size[d] == 1)
            continue;
        if (last >= 0 && p->ds[last] == ds[d] * size[d] && p->ss[last] == ss[d] * size[d]) {
            p->size[last] *= size[d];
        } else {
            last = p->nd++;
            p->size[last] = size[d];
        }
        p->ds[last] = ds[d];
        p->ss[last] = ss[d];
    }
}

/* Elements of 16 bytes in place of smaller ones, where rows on both sides are made of such. */
static bool widen(wkk_copy *p, int bytes) {
    int64_t last = p->nd - 1, per = 16 / bytes;
    if (p->dst.slot >= 0 || p->src.slot >= 0 || ((p->dst.base | p->src.base) & 15))
        return false;
    if (p->ds[last] != 1 || p->ss[last] != 1 || p->size[last] % per)
        return false;
    for (int64_t d = 0; d < last; d++)
        if (p->ds[d] % per || p->ss[d] % per)
            return false;
    for (int64_t d = 0; d < last; d++) {
        p->ds[d] /= per;
        p->ss[d] /= per;
    }
    p->size[last] /= per;
    p->n /= per;
    return true;
}

bool wki_cuda_copy(wk_ctx *c, int bytes, int nd, const int64_t *size, wkk_at dst, const int64_t *ds,
                   wkk_at src, const int64_t *ss) {
    wkk_copy p = {.dst = dst, .src = src, .n = 1};
    for (int d = 0; d < nd; d++)
        p.n *= size[d];
    if (p.n == 0)
        return true;
    merge(&p, nd, size, ds, ss);
    if (p.nd == 0 || (p.nd == 1 && p.ds[0] == 1 && p.ss[0] == 1)) {
        p.n *= bytes;
        return wki_cuda_launch(c, WKI_FN_wkk_copy_flat, &p, (p.n + 15) / 16, WKK_THREADS);
    }
    wki_cuda_fn fn = bytes == 1 ? WKI_FN_wkk_copy1 : bytes == 4 ? WKI_FN_wkk_copy4 : WKI_FN_wkk_copy8;
    if (widen(&p, bytes))
        fn = WKI_FN_wkk_copy16;
    return wki_cuda_launch(c, fn, &p, p.n, WKK_THREADS);
}

bool wki_cuda_copy_plain(wk_ctx *c, wkk_at dst, const wki_view *v) {
    int64_t stride[WK_MAX_DIMS], step = 1;
    for (int d = v->ndim - 1; d >= 0; d--) {
        stride[d] = step;
        step *= v->size[d];
    }
    return wki_cuda_copy(c, (int)wki_dtype_size((wk_dtype)v->dtype), v->ndim, v->size, dst, stride,
                         wki_at_of(v), v->stride);
}

bool wki_cuda_zero(wk_ctx *c, wki_cu_ptr p, int64_t floats) {
    wki_cuda_ctx *s = wki_cuda_of(c);
    wki_cu_error err = {0};
    return s && (!wki_cu_fill32(s->stream, p, 0, (size_t)floats, &err) || wki_cuda_fail(c, &err));
}

/* ---- ops --------------------------------------------------------------------------------------------------------------- */

bool wki_k_cuda_copy_wide_ok(const wki_launch *l) {
    size_t bytes = wki_dtype_size((wk_dtype)l->in[0].dtype);
    return bytes == 1 || bytes == 4 || bytes == 8;
}

bool wki_k_cuda_copy_wide_run(const wki_launch *l) {
    return wki_cuda_copy_plain(l->c, wki_at_of(&l->out[0]), &l->in[0]);
}

bool wki_k_cuda_pad_slice_ok(const wki_launch *l) { return l->in[0].dtype == WK_F32; }

/* ia: size (a list), dim, start, step. */
bool wki_k_cuda_pad_slice_run(const wki_launch *l) {
    const wki_view *dy = &l->in[0], *dx = &l->out[0];
    int nd = dx->ndim;
    const int64_t *a = l->ia + 1 + nd;
    wkk_pad p = {.dst = wki_at_of(dx),
                 .src = wki_at_of(dy),
                 .n = dx->numel,
                 .nd = nd,
                 .dim = a[0],
                 .start = a[1],
                 .step = a[2]};
    p.count = dy->size[p.dim];
    for (int d = 0; d < nd; d++) {
        p.size[d] = dx->size[d];
        p.ss[d] = dy->stride[d];
    }
    return wki_cuda_launch(l->c, WKI_FN_wkk_pad_slice, &p, p.n, WKK_THREADS);
}
