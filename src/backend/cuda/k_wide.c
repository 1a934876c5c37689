/* Conversions that keep all bits of i64 and f64, and comparisons of i64, on the device. */
#include "backend/cpu/k_util.h"
#include "backend/cuda/cuda.h"
#include "backend/kernels.h"
#include "ops_gen.h"

bool wki_k_cuda_cast_wide_ok(const wki_launch *l) {
    (void)l;
    return true;
}

bool wki_k_cuda_cast_wide_run(const wki_launch *l) {
    const wki_view *x = &l->in[0], *y = &l->out[0];
    wk_dtype from = (wk_dtype)x->dtype, to = (wk_dtype)y->dtype;
    wkk_cast p = {.y = wki_at_of(y),
                  .n = y->numel,
                  .from_bytes = (wkk_i64)wki_dtype_size(from),
                  .to_bytes = (wkk_i64)wki_dtype_size(to),
                  .from_float = wki_dtype_kind(from) == 'F',
                  .to_float = wki_dtype_kind(to) == 'F',
                  .to_bool = wki_dtype_kind(to) == 'B'};
    wki_cuda_view(&p.x, x, x->ndim);
    return wki_cuda_launch(l->c, WKI_FN_wkk_cast_wide, &p, p.n, WKK_THREADS);
}

bool wki_k_cuda_compare_wide_ok(const wki_launch *l) {
    return wki_k_needs(l, l->in[0].dtype == WK_I64 && l->in[1].dtype == WK_I64, "i64");
}

bool wki_k_cuda_compare_wide_run(const wki_launch *l) {
    const wki_view *y = &l->out[0];
    int op = l->op->id;
    wkk_compare p = {.a = wki_at_of(&l->in[0]),
                     .b = wki_at_of(&l->in[1]),
                     .y = wki_at_of(y),
                     .n = y->numel,
                     .nd = y->ndim,
                     .below = op == WKI_OP_lt || op == WKI_OP_le || op == WKI_OP_ne,
                     .equal = op == WKI_OP_le || op == WKI_OP_ge || op == WKI_OP_eq,
                     .above = op == WKI_OP_gt || op == WKI_OP_ge || op == WKI_OP_ne};
    int64_t sa[WK_MAX_DIMS], sb[WK_MAX_DIMS];
    wki_k_broadcast(&l->in[0], y, sa);
    wki_k_broadcast(&l->in[1], y, sb);
    for (int d = 0; d < y->ndim; d++) {
        p.size[d] = y->size[d];
        p.as[d] = sa[d];
        p.bs[d] = sb[d];
    }
    return wki_cuda_launch(l->c, WKI_FN_wkk_compare_wide, &p, p.n, WKK_THREADS);
}
