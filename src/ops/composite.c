/* Composites: ops written in terms of others. Each opens a scope, so that its temporaries die on return, and hands its
 * result to the caller's. Errors name the composite where it checks something itself, else the op inside. May call: core,
 * ops/infer.h, op wrappers. */
#include <math.h>
#include <string.h>

#include "ops/infer.h"
#include "ops_gen.h"

static wki_tensor *leave(wk_ctx *c, wki_tensor *result) {
    wki_promote(c, result);
    wk_scope_end(c);
    return result;
}

/* Names the composite in what wki_fail writes next. */
static wk_ctx *in_op(wk_ctx *c, int op) {
    c->cur_op = &wki_ops[op];
    return c;
}

static bool usable(const wki_tensor *t) { return !(t->flags & WKI_F_POISON); }

/* A view whose attributes are checked and in order. */
static wki_tensor *view(wk_ctx *c, int op, wki_tensor *x, int nia, const int64_t *ia) {
    wki_tensor *out;
    wki_call k = {.op = &wki_ops[op], .nin = 1, .nout = 1, .nia = nia, .in = &x, .ia = ia, .out = &out};
    wki_apply(c, &k);
    return out;
}

/* ---- shapes --------------------------------------------------------------------------------------------------------- */

wki_tensor *wki_clone(wk_ctx *c, wki_tensor *x) {
    return wk_dtype_bits((wk_dtype)x->dtype) > 32 ? wki_copy_wide(c, x) : wki_copy(c, x);
}

wki_tensor *wki_contiguous(wk_ctx *c, wki_tensor *x) {
    return x->flags & (WKI_F_PLAIN | WKI_F_POISON) ? x : wki_clone(c, x);
}

/* Puts the size that -1 stands for in its place. */
static __attribute__((noinline)) bool fill_in(wk_ctx *c, const wki_tensor *x, int n, int64_t *size) {
    int at = -1;
    int64_t known = 1;
    char sx[128], so[128];
    for (int i = 0; i < n; i++) {
        if (size[i] != -1) {
            if (size[i] < 0 || __builtin_mul_overflow(known, size[i], &known))
                return true; /* wki_reshape_ok says what is wrong */
        } else if (at >= 0) {
            return wki_fail(c, WK_SHAPE, "more than one -1 in %s", wki_shape_text(so, sizeof so, n, size));
        } else {
            at = i;
        }
    }
    if (at < 0)
        return true;
    if (known == 0 || x->numel % known)
        return wki_fail(c, WK_SHAPE, "no size in place of -1 gives %s the %lld elements of %s",
                        wki_shape_text(so, sizeof so, n, size), (long long)x->numel,
                        wki_shape_text(sx, sizeof sx, x->ndim, x->size));
    size[at] = x->numel / known;
    return true;
}

wki_tensor *wki_reshape(wk_ctx *c, wki_tensor *x, int ndim, const int64_t *size) {
    int64_t list[1 + WK_MAX_DIMS], stride[WK_MAX_DIMS], negative = 0;
    if (!usable(x))
        return x;
    in_op(c, WKI_OP_reshape);
    list[0] = ndim && !size ? -1 : ndim;
    if (!wki_list_ok(c, list[0], "size"))
        return wki_poison(c);
    for (int i = 0; i < ndim; i++) {
        list[1 + i] = size[i];
        negative |= size[i];
    }
    if ((negative < 0 && !fill_in(c, x, ndim, list + 1)) || !wki_reshape_ok(c, x, list[0], list + 1))
        return wki_poison(c);
    if (x->flags & WKI_F_PLAIN || wki_view_strides(x, ndim, list + 1, stride))
        return view(c, WKI_OP_reshape_view, x, 1 + ndim, list);
    wk_scope_begin(c);
    return leave(c, wki_reshape_view(c, wki_clone(c, x), ndim, list + 1));
}

wki_tensor *wki_transpose(wk_ctx *c, wki_tensor *x, int dim0, int dim1) {
    int64_t list[2 + WK_MAX_DIMS]; /* a 0-dim tensor has dimension 0 here */
    if (!usable(x))
        return x;
    int wrap = x->ndim ? x->ndim : 1;
    dim0 += dim0 < 0 ? wrap : 0;
    dim1 += dim1 < 0 ? wrap : 0;
    in_op(c, WKI_OP_transpose);
    if (!wki_dim_ok(c, x, dim0) || !wki_dim_ok(c, x, dim1))
        return wki_poison(c);
    list[0] = x->ndim;
    for (int i = 0; i < x->ndim; i++)
        list[1 + i] = i;
    list[1 + dim0] = dim1;
    list[1 + dim1] = dim0;
    return view(c, WKI_OP_permute, x, 1 + x->ndim, list);
}

wki_tensor *wki_flatten(wk_ctx *c, wki_tensor *x, int start_dim) {
    int64_t size[WK_MAX_DIMS + 1], n = 1;
    if (!usable(x))
        return x;
    if (start_dim < 0)
        start_dim += x->ndim ? x->ndim : 1;
    if (!wki_dim_ok(in_op(c, WKI_OP_flatten), x, start_dim))
        return wki_poison(c);
    for (int i = 0; i < x->ndim; i++) {
        if (i < start_dim)
            size[i] = x->size[i];
        else
            n *= x->size[i];
    }
    size[start_dim] = n;
    return wki_reshape(c, x, start_dim + 1, size);
}

wk_tensor *wk_contiguous(wk_tensor *t) {
    wki_tensor *x = wki_enter(t, __builtin_return_address(0));
    return x ? wki_handle(wki_contiguous(x->ctx, x)) : t ? wki_handle(wki_poison(wki_slot(t)->ctx)) : NULL;
}

wk_tensor *wk_flatten(wk_tensor *t, int start_dim) {
    wki_tensor *x = wki_enter(t, __builtin_return_address(0));
    return x   ? wki_handle(wki_flatten(x->ctx, x, start_dim))
           : t ? wki_handle(wki_poison(wki_slot(t)->ctx))
               : NULL;
}

wk_tensor *wk_transpose(wk_tensor *t, int dim0, int dim1) {
    wki_tensor *x = wki_enter(t, __builtin_return_address(0));
    return x   ? wki_handle(wki_transpose(x->ctx, x, dim0, dim1))
           : t ? wki_handle(wki_poison(wki_slot(t)->ctx))
               : NULL;
}

/* Are all of start, start + step, ..., n numbers, of the dtype? The last is the largest or the smallest. */
static bool range_ok(wk_ctx *c, wk_dtype dtype, double start, double step, double n) {
    if (dtype == WK_F32)
        return true;
    if (dtype != WK_U8 && dtype != WK_I32 && dtype != WK_I64)
        return wki_fail(c, WK_DTYPE, "dtype %s, one of f32, i64, i32 and u8 is needed", wk_dtype_name(dtype));
    double last = n > 0 ? start + (n - 1) * step : start;
    double low = dtype == WK_U8 ? 0 : -0x1p31, high = dtype == WK_U8 ? 255 : 0x1p31 - 1;
    if (start != trunc(start) || step != trunc(step))
        return wki_fail(c, WK_INVALID, "start %g and step %g must be whole for %s", start, step,
                        wk_dtype_name(dtype));
    return wki_integer_ok(c, dtype, start) && wki_integer_ok(c, WK_I64, step) &&
           ((last >= low && last <= high) ||
            wki_fail(c, WK_INVALID, "%.17g cannot be represented as %s here", last, wk_dtype_name(dtype)));
}

wki_tensor *wki_arange(wk_ctx *c, wk_dtype dtype, double start, double stop, double step) {
    in_op(c, WKI_OP_arange);
    double n = ceil((stop - start) / step);
    if (c->failed)
        return wki_poison(c);
    if (!isfinite(start) || !isfinite(stop) || !isfinite(step) || step == 0) {
        wki_fail(c, WK_INVALID, "from %g to %g by %g", start, stop, step);
        return wki_poison(c);
    }
    if (n > 0x1p31 - 1) { /* positions are 32-bit numbers */
        wki_fail(c, WK_SHAPE, "%.17g elements, at most 2^31 - 1 are possible", n);
        return wki_poison(c);
    }
    if (!range_ok(c, dtype, start, step, n))
        return wki_poison(c);
    return wki_iota(c, dtype, 1, (int64_t[]){n > 0 ? (int64_t)n : 0}, start, step);
}

/* ---- reductions ----------------------------------------------------------------------------------------------------- */

wki_tensor *wki_mean(wk_ctx *c, wki_tensor *x, const int64_t *dims, int ndims, bool keepdim) {
    int64_t list[1 + WK_MAX_DIMS];
    uint32_t red;
    double n = 1;
    if (!usable(x))
        return x;
    wki_put_dims(list, x, ndims, dims);
    if (!wki_reduce_ok(in_op(c, WKI_OP_mean), x, "x", list, &red))
        return wki_poison(c);
    for (int i = 0; i < x->ndim; i++)
        n *= red >> i & 1 ? (double)x->size[i] : 1;
    wk_scope_begin(c);
    return leave(c, wki_mul_scalar(c, wki_sum(c, x, dims, ndims, keepdim), 1 / n));
}

/* x with `dim` last, and the other dimensions in order. */
static wki_tensor *dim_last(wk_ctx *c, wki_tensor *x, int dim) {
    int64_t list[1 + WK_MAX_DIMS];
    list[0] = x->ndim;
    for (int i = 0, n = 1; i < x->ndim; i++)
        if (i != dim)
            list[n++] = i;
    list[x->ndim] = dim;
    return dim + 1 == x->ndim ? x : view(c, WKI_OP_permute, x, 1 + x->ndim, list);
}

wki_tensor *wki_argmax(wk_ctx *c, wki_tensor *x, int dim, bool keepdim) {
    enum { MOST = 1 << 24 }; /* positions pass through f32 */
    int64_t size[WK_MAX_DIMS];
    if (!usable(x))
        return x;
    in_op(c, WKI_OP_argmax);
    dim += dim < 0 ? (x->ndim ? x->ndim : 1) : 0;
    if (!wki_need_f32(c, x, "x") || !wki_dim_ok(c, x, dim))
        return wki_poison(c);
    int64_t n = x->ndim ? x->size[dim] : 1;
    if (n < 1 || n > MOST) {
        wki_fail(c, WK_SHAPE, "dimension %d has %lld elements, 1 to %d are needed", dim, (long long)n, MOST);
        return wki_poison(c);
    }
    wk_scope_begin(c);
    wki_tensor *y = wki_argmax_rows(c, x->ndim ? dim_last(c, x, dim) : wki_reshape(c, x, 1, (int64_t[]){1}));
    if (keepdim && x->ndim && usable(y)) {
        memcpy(size, x->size, sizeof size);
        size[dim] = 1;
        y = wki_reshape(c, y, x->ndim, size);
    }
    return leave(c, y);
}

wki_tensor *wki_sum_dim(wk_ctx *c, wki_tensor *x, int dim) {
    return wki_sum(c, x, (const int64_t[]){dim}, 1, true);
}

wki_tensor *wki_sum_to(wk_ctx *c, wki_tensor *x, int ndim, const int64_t *size) {
    int64_t dims[WK_MAX_DIMS];
    int n = 0, lead = x->ndim - ndim;
    if (!usable(x) || lead < 0)
        return x;
    for (int i = 0; i < x->ndim; i++)
        if (i < lead || (size[i - lead] == 1 && x->size[i] != 1))
            dims[n++] = i;
    if (n == 0)
        return x;
    wk_scope_begin(c);
    wki_tensor *s = wki_sum(c, x, dims, n, true);
    return leave(c, lead ? wki_reshape(c, s, ndim, size) : s);
}

wki_tensor *wki_layer_norm(wk_ctx *c, wki_tensor *x, wki_tensor *weight, wki_tensor *bias, double eps) {
    const wki_tensor *affine[2] = {weight, bias};
    char s[128];
    in_op(c, WKI_OP_layer_norm);
    if (usable(x) && x->ndim == 0) {
        wki_fail(c, WK_SHAPE, "`x` has no dimension to normalise over");
        return wki_poison(c);
    }
    for (int i = 0; i < 2; i++) {
        const wki_tensor *t = affine[i];
        if (t && usable(t) && usable(x) && (t->ndim != 1 || t->size[0] != wki_size_at(x, -1))) {
            wki_fail(c, WK_SHAPE, "`%s` has shape %s, (%lld) is needed", i ? "bias" : "weight",
                     wki_shape_text(s, sizeof s, t->ndim, t->size), (long long)wki_size_at(x, -1));
            return wki_poison(c);
        }
    }
    wk_scope_begin(c);
    wki_tensor *y = wki_norm(c, x, eps, NULL);
    if (weight)
        y = wki_mul(c, y, weight);
    if (bias)
        y = wki_add(c, y, bias);
    return leave(c, y);
}

wki_tensor *wki_cross_entropy(wk_ctx *c, wki_tensor *logits, wki_tensor *target) {
    if (usable(logits) && usable(target) && !wki_need_logits(in_op(c, WKI_OP_cross_entropy), logits, target))
        return wki_poison(c);
    wk_scope_begin(c);
    wki_tensor *loss = wki_nll_rows(c, logits, target, NULL);
    return leave(c, wki_mean(c, loss, NULL, 0, false));
}

wki_tensor *wki_dropout(wk_ctx *c, wki_tensor *x, double p) {
    if (!(p >= 0 && p < 1)) {
        wki_fail(in_op(c, WKI_OP_dropout), WK_INVALID, "p is %g, at least 0 and less than 1 is needed", p);
        return wki_poison(c);
    }
    if (p == 0 || !usable(x))
        return x;
    wk_scope_begin(c);
    uint8_t dev = c->dev;
    c->dev = x->st->dev; /* the mask lives where x does */
    wki_tensor *mask = wki_dropout_mask(c, x->ndim, x->size, p);
    c->dev = dev;
    return leave(c, wki_dropout_apply(c, x, mask, 1 / (1 - p)));
}

/* ---- products ------------------------------------------------------------------------------------------------------- */

static wki_tensor *matmul_shapes(wk_ctx *c, const wki_tensor *a, const wki_tensor *b, const char *what) {
    char sa[128], sb[128];
    wki_fail(in_op(c, WKI_OP_matmul), WK_SHAPE, "shapes %s and %s: %s",
             wki_shape_text(sa, sizeof sa, a->ndim, a->size), wki_shape_text(sb, sizeof sb, b->ndim, b->size),
             what);
    return wki_poison(c);
}

/* (batch..., rows, cols) of t, where batch has n dimensions. */
static wki_tensor *with_batch(wk_ctx *c, wki_tensor *t, int n, const int64_t *batch) {
    int64_t size[WK_MAX_DIMS];
    if (t->ndim == n + 2 && !memcmp(t->size, batch, (size_t)n * sizeof *batch))
        return t;
    memcpy(size, batch, (size_t)n * sizeof *size);
    size[n] = t->size[t->ndim - 2];
    size[n + 1] = t->size[t->ndim - 1];
    return wki_expand(c, t, n + 2, size);
}

/* Both operands have at least two dimensions and fit. A matrix on the right makes one product of all rows on the left. */
static wki_tensor *matmul_nd(wk_ctx *c, wki_tensor *a, wki_tensor *b) {
    int64_t batch[WK_MAX_DIMS], rows = 1;
    int n = (a->ndim > b->ndim ? a->ndim : b->ndim) - 2;
    if (b->ndim == 2 && a->ndim > 2 && a->flags & WKI_F_PLAIN) {
        int64_t size[WK_MAX_DIMS];
        memcpy(size, a->size, sizeof size);
        for (int i = 0; i + 1 < a->ndim; i++)
            rows *= a->size[i];
        size[a->ndim - 1] = b->size[1];
        wki_tensor *flat = wki_reshape(c, a, 2, (const int64_t[]){rows, a->size[a->ndim - 1]});
        return wki_reshape(c, wki_bmm(c, flat, b), a->ndim, size);
    }
    for (int i = 1; i <= n; i++) {
        int64_t sa = i + 2 <= a->ndim ? a->size[a->ndim - 2 - i] : 1,
                sb = i + 2 <= b->ndim ? b->size[b->ndim - 2 - i] : 1;
        if (sa != sb && sa != 1 && sb != 1)
            return matmul_shapes(c, a, b, "the batch dimensions do not broadcast");
        batch[n - i] = sa == 1 ? sb : sa;
    }
    return wki_bmm(c, with_batch(c, a, n, batch), with_batch(c, b, n, batch));
}

/* shape without dimension `drop`; counted from the end. */
static wki_tensor *without(wk_ctx *c, wki_tensor *t, int drop) {
    int64_t size[WK_MAX_DIMS];
    int n = 0;
    for (int i = 0; i < t->ndim; i++)
        if (i != t->ndim + drop)
            size[n++] = t->size[i];
    return wki_reshape(c, t, n, size);
}

wki_tensor *wki_matmul(wk_ctx *c, wki_tensor *a, wki_tensor *b) {
    if (!usable(a) || !usable(b))
        return wki_poison(c);
    in_op(c, WKI_OP_matmul);
    if (!wki_need_f32(c, a, "a") || !wki_need_f32(c, b, "b"))
        return wki_poison(c);
    if (a->ndim == 0 || b->ndim == 0)
        return matmul_shapes(c, a, b, "each needs at least one dimension");
    bool row = a->ndim == 1, col = b->ndim == 1;
    if (a->size[a->ndim - 1] != b->size[col ? 0 : b->ndim - 2])
        return matmul_shapes(c, a, b, "the inner sizes differ");
    if (a->ndim == 2 && b->ndim == 2)
        return wki_bmm(c, a, b);
    wk_scope_begin(c);
    if (row)
        a = wki_reshape(c, a, 2, (const int64_t[]){1, a->size[0]});
    if (col)
        b = wki_reshape(c, b, 2, (const int64_t[]){b->size[0], 1});
    wki_tensor *y = usable(a) && usable(b) ? matmul_nd(c, a, b) : wki_poison(c);
    if (col && usable(y))
        y = without(c, y, -1);
    if (row && usable(y))
        y = without(c, y, col ? -1 : -2);
    return leave(c, y);
}

wki_tensor *wki_attention(wk_ctx *c, wki_tensor *q, wki_tensor *k, wki_tensor *v, bool causal, double scale) {
    const wki_tensor *const in[3] = {q, k, v};
    char s[128];
    for (int i = 0; i < 3; i++) {
        if (!usable(in[i]))
            return wki_poison(c);
        if (in[i]->ndim != 4) {
            wki_fail(in_op(c, WKI_OP_attention), WK_SHAPE, "`%c` has shape %s, (B, H, T, D) is needed",
                     "qkv"[i], wki_shape_text(s, sizeof s, in[i]->ndim, in[i]->size));
            return wki_poison(c);
        }
    }
    if (!(scale > 0))
        scale = 1 / sqrt((double)q->size[3]);
    wk_scope_begin(c);
    wki_tensor *w = wki_mul_scalar(c, wki_matmul(c, q, wki_transpose(c, k, -2, -1)), scale);
    if (causal)
        w = wki_causal_fill(c, w);
    return leave(c, wki_matmul(c, wki_softmax(c, w, -1), v));
}
