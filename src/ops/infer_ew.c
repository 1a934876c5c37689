/* Inference of elementwise and creation ops. May call: core, ops/infer.h. */
#include <math.h>
#include <string.h>

#include "ops/infer.h"
#include "ops_gen.h"

bool wki_infer_unary(wk_ctx *c, const wki_call *k) {
    const wki_tensor *x = k->in[0];
    wki_tensor *o = k->out[0];
    if (!wki_need_f32(c, x, k->op->in_names[0]))
        return false;
    o->dtype = WK_F32;
    wki_same_shape(o, x);
    return true;
}

static bool __attribute__((noinline))
broadcast_failed(wk_ctx *c, const wki_tensor *a, const wki_tensor *b, int dim) {
    char sa[128], sb[128];
    return wki_fail(c, WK_SHAPE, "shapes %s and %s do not broadcast at dimension %d",
                    wki_shape_text(sa, sizeof sa, a->ndim, a->size),
                    wki_shape_text(sb, sizeof sb, b->ndim, b->size), dim);
}

/* o := broadcast of o's shape so far (held by `acc`, for messages) and t. Sizes stay below the two inputs' product, which
   may overflow: checked. */
static bool __attribute__((noinline)) broadcast_into(wk_ctx *c, wki_tensor *o, const wki_tensor *t) {
    wki_tensor old;
    old.ndim = o->ndim;
    memcpy(old.size, o->size, sizeof old.size);
    int n = o->ndim > t->ndim ? o->ndim : t->ndim;
    for (int i = 1; i <= n; i++) {
        int64_t a = i <= old.ndim ? old.size[old.ndim - i] : 1, b = i <= t->ndim ? t->size[t->ndim - i] : 1;
        if (a != b && a != 1 && b != 1)
            return broadcast_failed(c, &old, t, n - i);
        o->size[n - i] = a == 1 ? b : a;
    }
    o->ndim = (uint8_t)n;
    return wki_size_ok(c, n, o->size);
}

/* Two operands; equal shapes, the common case, are compared and copied in one pass. */
static inline bool broadcast_two(wk_ctx *c, const wki_call *k) {
    wki_tensor *o = k->out[0];
    const wki_tensor *a = k->in[0], *b = k->in[1];
    int n = a->ndim;
    int64_t differ = n ^ b->ndim;
    for (int i = 0; i < n; i++) {
        o->size[i] = a->size[i];
        differ |= a->size[i] ^ b->size[i];
    }
    o->ndim = (uint8_t)n;
    return __builtin_expect(!differ, 1) || broadcast_into(c, o, b);
}

bool wki_infer_broadcast(wk_ctx *c, const wki_call *k) {
    const wki_tensor *a = k->in[0], *b = k->in[1];
    if (!wki_need_f32(c, a, k->op->in_names[0]) || !wki_need_f32(c, b, k->op->in_names[1]))
        return false;
    k->out[0]->dtype = WK_F32;
    return broadcast_two(c, k);
}

/* After promotion both operands have one dtype; any will do. */
bool wki_infer_compare(wk_ctx *c, const wki_call *k) {
    if (k->in[0]->dtype == WK_F64)
        return wki_fail(c, WK_DTYPE,
                        "f64 is for storage and conversion only in this version (wk_cast converts)");
    k->out[0]->dtype = WK_BOOL;
    return broadcast_two(c, k);
}

bool wki_infer_logical(wk_ctx *c, const wki_call *k) {
    k->out[0]->dtype = WK_BOOL;
    wki_same_shape(k->out[0], k->in[0]);
    return wki_need_dtype(c, k->in[0], k->op->in_names[0], WK_BOOL);
}

bool wki_infer_where(wk_ctx *c, const wki_call *k) {
    if (!wki_need_dtype(c, k->in[0], "cond", WK_BOOL) || !wki_need_f32(c, k->in[1], "a") ||
        !wki_need_f32(c, k->in[2], "b"))
        return false;
    wki_tensor *o = k->out[0];
    o->dtype = WK_F32;
    wki_same_shape(o, k->in[0]);
    for (int i = 1; i < 3; i++)
        if (!wki_shapes_equal(o, k->in[i]) && !broadcast_into(c, o, k->in[i]))
            return false;
    return true;
}

bool wki_infer_masked(wk_ctx *c, const wki_call *k) {
    if (!wki_need_f32(c, k->in[0], "x") || !wki_need_dtype(c, k->in[1], "mask", WK_BOOL))
        return false;
    k->out[0]->dtype = WK_F32;
    return broadcast_two(c, k);
}

bool wki_infer_causal(wk_ctx *c, const wki_call *k) {
    if (k->in[0]->ndim < 2)
        return wki_fail(c, WK_SHAPE, "`x` has %d dimensions, at least 2 (queries, keys) are needed",
                        k->in[0]->ndim);
    return wki_infer_unary(c, k);
}

/* ---- conversion and copies ------------------------------------------------------------------------------------------ */

bool wki_infer_cast(wk_ctx *c, const wki_call *k) {
    if (k->ia[0] < 0 || k->ia[0] >= WK_DTYPE_COUNT)
        return wki_fail(c, WK_DTYPE, "dtype %lld does not exist", (long long)k->ia[0]);
    k->out[0]->dtype = (uint8_t)k->ia[0];
    wki_same_shape(k->out[0], k->in[0]);
    return true;
}

bool wki_infer_copy(wk_ctx *c, const wki_call *k) {
    wk_dtype dtype = (wk_dtype)k->in[0]->dtype;
    k->out[0]->dtype = (uint8_t)dtype;
    wki_same_shape(k->out[0], k->in[0]);
    return k->op->id == WKI_OP_copy_wide || wk_dtype_bits(dtype) <= 32 ||
           wki_fail(c, WK_DTYPE, "`x` is %s, a dtype of at most 32 bits is needed", wk_dtype_name(dtype));
}

bool wki_infer_copy_into(wk_ctx *c, const wki_call *k) {
    const wki_tensor *dst = k->in[0], *src = k->in[1];
    char sd[128], ss[128];
    if (wk_dtype_bits((wk_dtype)dst->dtype) > 32)
        return wki_fail(c, WK_DTYPE, "`dst` is %s, at most 32 bits are supported",
                        wk_dtype_name((wk_dtype)dst->dtype));
    if (!wki_need_dtype(c, src, "src", (wk_dtype)dst->dtype))
        return false;
    bool fits = src->ndim <= dst->ndim;
    for (int i = 1; fits && i <= src->ndim; i++)
        fits = src->size[src->ndim - i] == 1 || src->size[src->ndim - i] == dst->size[dst->ndim - i];
    return fits || wki_fail(c, WK_SHAPE, "`src` of shape %s does not broadcast to `dst` of shape %s",
                            wki_shape_text(ss, sizeof ss, src->ndim, src->size),
                            wki_shape_text(sd, sizeof sd, dst->ndim, dst->size));
}

/* The usual tensors of multi-tensor ops: f32, contiguous, shaped like the first role's. */
static inline bool multi_plain(const wki_call *k, int n) {
    bool odd = false;
    for (int i = 0; i < n && !odd; i++) {
        const wki_tensor *first = k->in[i];
        for (int j = i; j < k->nin && !odd; j += n) {
            const wki_tensor *t = k->in[j];
            odd = !t || t->dtype != WK_F32 || !(t->flags & WKI_F_PLAIN) || !wki_shapes_equal(t, first);
        }
    }
    return !odd;
}

/* In-place multi-tensor ops: as many tensors of every role, equal shapes across roles. */
bool wki_infer_multi(wk_ctx *c, const wki_call *k) {
    const wki_op *op = k->op;
    int n = wki_role_size(op, k->nin);
    if (n == 0 || k->nin % op->roles)
        return wki_fail(c, WK_INVALID, "%d inputs are no multiple of %d", k->nin, op->roles);
    if (k->nin > UINT16_MAX) /* what a recorded op's head word has room for */
        return wki_fail(c, WK_INVALID, "%d tensors, at most %d fit into one update", k->nin, UINT16_MAX);
    if (multi_plain(k, n))
        return true;
    for (int role = 0; role < op->roles; role++) {
        const char *name = op->in_names[role];
        for (int i = 0; i < n; i++) {
            const wki_tensor *t = k->in[role * n + i];
            if (!t)
                return wki_fail(c, WK_INVALID, "tensor %d of `%s` is missing", i, name);
            if (!wki_need_f32(c, t, name) || !wki_need_same_shape(c, k->in[i], op->in_names[0], t, name))
                return false;
        }
    }
    return true;
}

/* ---- creation ------------------------------------------------------------------------------------------------------- */

static bool create(wk_ctx *c, wki_tensor *o, int64_t dtype, const int64_t *list) {
    if (dtype < 0 || dtype >= WK_DTYPE_COUNT)
        return wki_fail(c, WK_DTYPE, "dtype %lld does not exist", (long long)dtype);
    if (!wki_list_ok(c, list[0], "size") || !wki_size_ok(c, (int)list[0], list + 1))
        return false;
    o->dtype = (uint8_t)dtype;
    o->ndim = (uint8_t)list[0];
    memcpy(o->size, list + 1, (size_t)o->ndim * sizeof *o->size);
    return true;
}

bool wki_infer_create_f32(wk_ctx *c, const wki_call *k) { return create(c, k->out[0], WK_F32, k->ia); }
bool wki_infer_create_bool(wk_ctx *c, const wki_call *k) { return create(c, k->out[0], WK_BOOL, k->ia); }
/* Integers are made from an f32 number and 32 bits: a value that would not survive that is an error. */
bool wki_integer_ok(wk_ctx *c, wk_dtype dtype, double v) {
    double low = dtype == WK_U8 ? 0 : -0x1p31, high = dtype == WK_U8 ? 256 : 0x1p31, whole = trunc(v);
    return (whole >= low && whole < high && (double)(float)whole == whole) ||
           wki_fail(c, WK_INVALID,
                    "%.17g cannot be represented as %s here (wk_from_data can make larger numbers)", v,
                    wk_dtype_name(dtype));
}

bool wki_infer_full(wk_ctx *c, const wki_call *k) {
    if (!create(c, k->out[0], k->ia[0], k->ia + 1))
        return false;
    wk_dtype dtype = (wk_dtype)k->out[0]->dtype;
    int kind = wki_dtype_kind(dtype);
    return (kind != 'I' && kind != 'U') || wki_integer_ok(c, dtype, k->va[0]);
}

/* wki_arange has looked at the numbers. */
bool wki_infer_iota(wk_ctx *c, const wki_call *k) { return create(c, k->out[0], k->ia[0], k->ia + 1); }

bool wki_infer_full_like(wk_ctx *c, const wki_call *k) {
    (void)c;
    k->out[0]->dtype = WK_F32;
    wki_same_shape(k->out[0], k->in[0]);
    return true;
}
