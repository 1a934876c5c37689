/* Max pooling on the device: windows, the sum by chosen element in a fixed order, and the gather. */
#include "backend/cuda/cuda.h"
#include "backend/kernels.h"

static void strides_of(wkk_i64 out[4], const wki_view *v) {
    for (int d = 0; d < 4; d++)
        out[d] = v->stride[d];
}

bool wki_k_cuda_max_pool2d_ok(const wki_launch *l) { return l->in[0].dtype == WK_F32; }

bool wki_k_cuda_max_pool2d_run(const wki_launch *l) {
    const wki_view *x = &l->in[0], *y = &l->out[0];
    const int64_t *a = l->ia;
    if (x->numel == 0 && y->numel)
        return wki_fail(l->c, WK_SHAPE, "windows without elements");
    wkk_pool p = {.x = wki_at_of(x),
                  .y = wki_at_of(y),
                  .idx = wki_at_of(&l->out[1]),
                  .total = y->numel,
                  .c = x->size[1]};
    p.h = x->size[2], p.w = x->size[3], p.oh = y->size[2], p.ow = y->size[3];
    p.kh = a[0], p.kw = a[1], p.sh = a[2], p.sw = a[3], p.ph = a[4], p.pw = a[5];
    strides_of(p.xs, x);
    return wki_cuda_launch(l->c, WKI_FN_wkk_max_pool, &p, p.total, WKK_THREADS);
}

bool wki_k_cuda_max_pool2d_grad_ok(const wki_launch *l) { return l->in[0].dtype == WK_F32; }

static bool in_block(const wki_view *dx) { return dx->size[2] * dx->size[3] <= WKK_LARGE_PLANE; }

size_t wki_k_cuda_max_pool2d_grad_workspace(const wki_launch *l) {
    return in_block(&l->out[0]) ? 0 : (size_t)l->out[0].numel * 2 * sizeof(int32_t);
}

bool wki_k_cuda_max_pool2d_grad_run(const wki_launch *l) {
    const wki_view *dy = &l->in[0], *idx = &l->in[1], *dx = &l->out[0];
    wkk_pool_grad p = {.dy = wki_at_of(dy), .idx = wki_at_of(idx), .dx = wki_at_of(dx), .op = l->op->id};
    p.first = (wkk_u64)(uintptr_t)l->workspace;
    p.last = p.first + (wkk_u64)dx->numel * sizeof(int32_t);
    p.planes = dx->size[0] * dx->size[1], p.c = dx->size[1], p.plane = dx->size[2] * dx->size[3];
    p.oh = dy->size[2], p.ow = dy->size[3];
    strides_of(p.ds, dy);
    strides_of(p.is, idx);
    if (in_block(dx) && dx->numel)
        return wki_cuda_launch(
            l->c, p.plane <= WKK_SMALL_PLANE ? WKI_FN_wkk_pool_grad_small : WKI_FN_wkk_pool_grad_large, &p,
            p.planes, 1);
    return wki_cuda_launch(l->c, WKI_FN_wkk_pool_grad_clear, &p, dx->numel, WKK_THREADS) &&
           wki_cuda_launch(l->c, WKI_FN_wkk_pool_grad_mark, &p, dy->numel, WKK_THREADS) &&
           wki_cuda_launch(l->c, WKI_FN_wkk_pool_grad_sum, &p, dx->numel, WKK_THREADS);
}

bool wki_k_cuda_max_pool2d_gather_ok(const wki_launch *l) { return l->in[0].dtype == WK_F32; }

bool wki_k_cuda_max_pool2d_gather_run(const wki_launch *l) {
    const wki_view *x = &l->in[0], *idx = &l->in[1], *y = &l->out[0];
    wkk_pool_gather p = {
        .x = wki_at_of(x), .idx = wki_at_of(idx), .y = wki_at_of(y), .total = y->numel, .c = x->size[1]};
    p.plane = x->size[2] * x->size[3], p.w = x->size[3], p.oh = y->size[2], p.ow = y->size[3],
    p.op = l->op->id;
    strides_of(p.xs, x);
    strides_of(p.is, idx);
    return wki_cuda_launch(l->c, WKI_FN_wkk_max_pool_gather, &p, p.total, WKK_THREADS);
}
