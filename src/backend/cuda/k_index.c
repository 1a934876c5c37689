/* Embedding on the device: rows of a table by index, and the sum of rows by index, in a fixed order. */
#include "backend/cuda/cuda.h"
#include "backend/kernels.h"

static bool f32_by_i64(const wki_launch *l) { return l->in[0].dtype == WK_F32 && l->in[1].dtype == WK_I64; }

bool wki_k_cuda_embedding_ok(const wki_launch *l) { return f32_by_i64(l); }

bool wki_k_cuda_embedding_run(const wki_launch *l) {
    const wki_view *w = &l->in[0], *idx = &l->in[1];
    wkk_embedding p = {.w = wki_at_of(w),
                       .y = wki_at_of(&l->out[0]),
                       .n = idx->numel,
                       .rows = w->size[0],
                       .width = w->size[1]};
    p.row_stride = w->stride[0], p.col_stride = w->stride[1], p.op = l->op->id;
    wki_cuda_view(&p.idx, idx, idx->ndim);
    return wki_cuda_launch(l->c, WKI_FN_wkk_embedding_rows, &p, p.n, WKK_THREADS / 32);
}

bool wki_k_cuda_embedding_grad_ok(const wki_launch *l) {
    return f32_by_i64(l) && l->out[0].size[0] <= INT32_MAX;
}

size_t wki_k_cuda_embedding_grad_workspace(const wki_launch *l) {
    return (size_t)l->in[1].numel * sizeof(int32_t);
}

bool wki_k_cuda_embedding_grad_run(const wki_launch *l) {
    const wki_view *dy = &l->in[0], *idx = &l->in[1], *dw = &l->out[0];
    wkk_index32 p = {
        .out = (wkk_u64)(uintptr_t)l->workspace, .n = idx->numel, .rows = dw->size[0], .op = l->op->id};
    wki_cuda_view(&p.idx, idx, idx->ndim);
    if (!wki_cuda_launch(l->c, WKI_FN_wkk_embedding_index, &p, p.n, WKK_THREADS))
        return false;
    wkk_embedding_grad q = {
        .dw = wki_at_of(dw), .idx = p.out, .n = p.n, .rows = p.rows, .width = dw->size[1]};
    q.col_stride = dy->stride[dy->ndim - 1];
    wki_cuda_view(&q.dy, dy, dy->ndim - 1);
    return wki_cuda_launch_grid(l->c, WKI_FN_wkk_embedding_sum, &q,
                                (q.rows + WKK_SUM_ROWS - 1) / WKK_SUM_ROWS,
                                (q.width + WKK_THREADS - 1) / WKK_THREADS);
}
