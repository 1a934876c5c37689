/* Public calls on one tensor: creation, reading, writing, questions, sharing. Calls core and the device table. */
#include <math.h>
#include <string.h>

#include "core/core.h"

static wk_tensor *poison_handle(wk_ctx *c) { return wki_handle(c->poison); }

wki_tensor *wki_leaf(wk_ctx *c, wk_dtype dt, int ndim, const int64_t *size, const char *what) {
    if (c->failed)
        return NULL;
    if ((unsigned)dt >= WK_DTYPE_COUNT) {
        wki_fail(c, WK_DTYPE, "%s: unknown dtype %d", what, (int)dt);
        return NULL;
    }
    if (ndim < 0 || ndim > WK_MAX_DIMS || (ndim && !size)) {
        wki_fail(c, WK_SHAPE, "%s: %d dimensions (0 to %d are allowed)", what, ndim, WK_MAX_DIMS);
        return NULL;
    }
    int64_t bytes = (int64_t)wki_dtype_size(dt), extent = bytes;
    for (int i = 0; i < ndim; i++) {
        char text[160];
        if (size[i] < 0 || __builtin_mul_overflow(bytes, size[i], &bytes) ||
            (size[i] && __builtin_mul_overflow(extent, size[i], &extent))) {
            wki_fail(c, WK_SHAPE, "%s: size %s is negative or too large", what,
                     wki_shape_text(text, sizeof text, ndim, size));
            return NULL;
        }
    }
    wki_storage *st = wki_storage_new(c, (wk_device)c->dev, (size_t)bytes, true);
    wki_tensor *t = st ? wki_tensor_new(c) : NULL;
    if (!t) {
        if (st)
            wki_storage_unref(st);
        return NULL;
    }
    t->st = st;
    t->dtype = (uint8_t)dt;
    t->ndim = (uint8_t)ndim;
    if (ndim)
        memcpy(t->size, size, (size_t)ndim * sizeof *size);
    wki_tensor_set_plain(t);
    t->flags |= WKI_F_WHOLE;
    return t;
}

#define BEGIN(c) wki_begin(c, __builtin_return_address(0))

wk_tensor *wk_empty(wk_ctx *c, wk_dtype dt, int ndim, const int64_t *size) {
    BEGIN(c);
    wki_tensor *t = wki_leaf(c, dt, ndim, size, "wk_empty");
    return t ? wki_handle(t) : poison_handle(c);
}

typedef union item { /* one element, by dtype */
    float f;
    double d;
    int64_t i;
    int32_t w;
    uint8_t b;
} item;

/* Fills memory of `numel` elements with the dtype's representation of 0 or 1. */
static bool fill(wk_ctx *c, wki_tensor *t, int value) {
    wki_storage *s = t->st;
    size_t each = wki_dtype_size((wk_dtype)t->dtype);
    if (!s->bytes)
        return true;
    char *host = s->dev == WK_CPU ? s->data : wki_malloc(s->bytes);
    if (!host)
        return wki_fail(c, WK_NOMEM, "no host memory for %zu bytes", s->bytes);
    item one = {.i = value};
    if (t->dtype == WK_F32)
        one.f = (float)value;
    else if (t->dtype == WK_F64)
        one.d = value;
    if (value == 0)
        memset(host, 0, s->bytes);
    else
        for (int64_t i = 0; i < t->numel; i++)
            memcpy(host + (size_t)i * each, &one, each);
    bool ok = true;
    if (s->dev != WK_CPU) {
        ok = wki_devices[s->dev]->upload(c, s->data, host, s->bytes);
        wki_free(host);
    }
    return ok;
}

wki_tensor *wki_filled(wk_ctx *c, wk_dtype dt, int ndim, const int64_t *size, int value, const char *what) {
    wki_tensor *t = wki_leaf(c, dt, ndim, size, what);
    return t && fill(c, t, value) ? t : NULL;
}

wk_tensor *wk_zeros(wk_ctx *c, wk_dtype dt, int ndim, const int64_t *size) {
    BEGIN(c);
    wki_tensor *t = wki_filled(c, dt, ndim, size, 0, "wk_zeros");
    return t ? wki_handle(t) : poison_handle(c);
}

wk_tensor *wk_ones(wk_ctx *c, wk_dtype dt, int ndim, const int64_t *size) {
    BEGIN(c);
    wki_tensor *t = wki_filled(c, dt, ndim, size, 1, "wk_ones");
    return t ? wki_handle(t) : poison_handle(c);
}

wk_tensor *wk_from_data(wk_ctx *c, wk_dtype dt, int ndim, const int64_t *size, const void *data) {
    BEGIN(c);
    wki_tensor *t = wki_leaf(c, dt, ndim, size, "wk_from_data");
    if (!t)
        return poison_handle(c);
    if (t->st->bytes && !data) {
        wki_fail(c, WK_INVALID, "wk_from_data: data is NULL for %lld elements", (long long)t->numel);
        return poison_handle(c);
    }
    if (t->st->bytes && !wki_devices[t->st->dev]->upload(c, t->st->data, data, t->st->bytes))
        return poison_handle(c);
    return wki_handle(t);
}

wk_tensor *wk_scalar(wk_ctx *c, double value) {
    BEGIN(c);
    float f = (float)value;
    wki_tensor *t = wki_leaf(c, WK_F32, 0, NULL, "wk_scalar");
    if (!t || !wki_devices[t->st->dev]->upload(c, t->st->data, &f, sizeof f))
        return poison_handle(c);
    return wki_handle(t);
}

/* ---- questions ----------------------------------------------------------------------------------------------------- */

wk_ctx *wk_ctx_of(wk_tensor *h) { return wki_handle_ok(h) ? wki_slot(h)->ctx : NULL; }

/* Begins a call on the tensor t behind h. */
#define ASK(h, dead)                                                                                         \
    wki_tensor *t = wki_enter(h, __builtin_return_address(0));                                               \
    if (!t)                                                                                                  \
        return dead;                                                                                         \
    t->ctx->cur_op = NULL

static bool dim_ok(wki_tensor *t, int *dim, const char *what) {
    int d = *dim < 0 ? *dim + t->ndim : *dim;
    if (t->flags & WKI_F_POISON)
        return false;
    if (d < 0 || d >= t->ndim)
        return wki_fail(t->ctx, WK_SHAPE, "%s: dimension %d of a tensor with %d", what, *dim, t->ndim);
    *dim = d;
    return true;
}

int wk_ndim(wk_tensor *h) {
    ASK(h, 0);
    return t->ndim;
}
int64_t wk_size(wk_tensor *h, int dim) {
    ASK(h, 0);
    return dim_ok(t, &dim, "wk_size") ? t->size[dim] : 0;
}
int64_t wk_stride(wk_tensor *h, int dim) {
    ASK(h, 0);
    return dim_ok(t, &dim, "wk_stride") ? t->stride[dim] : 0;
}
int64_t wk_numel(wk_tensor *h) {
    ASK(h, 0);
    return t->numel;
}
wk_dtype wk_dtype_of(wk_tensor *h) {
    ASK(h, WK_F32);
    return (wk_dtype)t->dtype;
}
wk_device wk_device_of(wk_tensor *h) {
    ASK(h, WK_CPU);
    return t->st ? (wk_device)t->st->dev : WK_CPU;
}
bool wk_is_contiguous(wk_tensor *h) {
    ASK(h, false);
    return t->flags & WKI_F_PLAIN;
}
bool wk_is_poison(wk_tensor *h) {
    ASK(h, true);
    return t->flags & WKI_F_POISON;
}
bool wk_needs_grad(wk_tensor *h) {
    ASK(h, false);
    return t->flags & WKI_F_REQ;
}

wk_tensor *wk_requires_grad(wk_tensor *h, bool on) {
    ASK(h, h);
    wk_ctx *c = t->ctx;
    if (t->flags & WKI_F_POISON)
        return h;
    if (t->fn) {
        wki_fail(c, WK_GRAD, "wk_requires_grad: only leaves can be changed; this is a result of `%s`",
                 t->fn->op->name);
    } else if (on && t->dtype != WK_F32) {
        wki_fail(c, WK_DTYPE, "wk_requires_grad: dtype %s has no gradients",
                 wk_dtype_name((wk_dtype)t->dtype));
    } else if (on) {
        t->flags |= WKI_F_REQ;
    } else {
        t->flags &= (uint8_t)~WKI_F_REQ;
    }
    return h;
}

/* ---- other handles on the same memory ------------------------------------------------------------------------------- */

/* Gives the new slot n the shape, place and dtype of t. */
static void look_like(wki_tensor *n, const wki_tensor *t) {
    n->flags |= t->flags & (WKI_F_PLAIN | WKI_F_WHOLE);
    n->dtype = t->dtype;
    n->ndim = t->ndim;
    n->off = t->off;
    n->numel = t->numel;
    memcpy(n->size, t->size, sizeof t->size);
    memcpy(n->stride, t->stride, sizeof t->stride);
}

static wki_tensor *same_storage(wk_ctx *c, wki_tensor *t) {
    if (c->failed || (t->flags & WKI_F_POISON))
        return c->poison;
    wki_tensor *n = wki_tensor_new(c);
    if (!n)
        return c->poison;
    look_like(n, t);
    n->st = t->st;
    n->st->refs++;
    return n;
}

wki_tensor *wki_detached(wk_ctx *c, wki_tensor *t) { return same_storage(c, t); }

wki_tensor *wki_alias(wk_ctx *c, wki_tensor *t) {
    wki_tensor *n = same_storage(c, t);
    if (n != c->poison && t->fn) {
        n->fn = t->fn;
        n->fn->refs++;
        n->out_idx = t->out_idx;
        n->flags |= WKI_F_REQ;
    }
    return n;
}

wk_tensor *wk_detach(wk_tensor *h) {
    ASK(h, h);
    return wki_handle(wki_detached(t->ctx, t));
}

wk_tensor *wk_share(wk_ctx *to, wk_tensor *h) {
    wki_begin(to, __builtin_return_address(0));
    wki_tensor *t = wki_enter(h, __builtin_return_address(0));
    if (t && (t->flags & WKI_F_POISON) && !t->ctx->failed) {
        wki_fail_poison(t->ctx, "wk_share: the tensor");
        wki_fail(to, WK_STATE, "%s", t->ctx->err.message);
    }
    if (!t || (t->flags & WKI_F_POISON) || to->failed) {
        if (!t)
            wki_fail(to, WK_HANDLE, "wk_share: the handle is not valid");
        return poison_handle(to);
    }
    if (t->ctx == to)
        return wki_handle(wki_alias(to, t));
    if (t->ctx->rt != to->rt) {
        wki_fail(to, WK_INVALID, "wk_share: the contexts belong to different runtimes");
        return poison_handle(to);
    }
    /* What is queued there is done before anything that this context will queue. */
    if (!wki_touch_read(t, "wk_share: the tensor") || !wki_device_wait(t->ctx, (wk_device)t->st->dev)) {
        wki_fail(to, WK_STATE, "wk_share: the other context failed: %s", t->ctx->err.message);
        return poison_handle(to);
    }
    wki_storage *st = wki_storage_share(to, t->st);
    wki_tensor *n = st ? wki_tensor_new(to) : NULL;
    if (!n) {
        if (st)
            wki_storage_unref(st);
        return poison_handle(to);
    }
    n->st = st;
    look_like(n, t);
    if (!t->fn)
        n->flags |= t->flags & WKI_F_REQ;
    return wki_handle(n);
}

/* ---- host access --------------------------------------------------------------------------------------------------- */

bool wki_touch_read(wki_tensor *t, const char *what) {
    wk_ctx *c = t->ctx;
    if (t->flags & WKI_F_POISON)
        return wki_fail_poison(c, what);
    if ((t->st->pending || wki_rec_writes(c, t->st)) && (c->failed || !wki_flush(c)))
        return false;
    if (t->st->failed || t->st->pending) {
        c->cur_op = NULL;
        return wki_fail(c, WK_STATE, "%s is the result of a call that failed", what);
    }
    return true;
}

bool wki_touch_write(wki_tensor *t, const char *what) {
    if (!wki_touch_read(t, what))
        return false;
    return wki_rec_captured(t->ctx, t->st) ? wki_flush(t->ctx) : true;
}

/* Row-major copy of the elements of a strided CPU view. */
static void gather(const wki_tensor *t, const char *src, char *dst) {
    size_t each = wki_dtype_size((wk_dtype)t->dtype);
    int64_t idx[WK_MAX_DIMS] = {0};
    for (int64_t n = 0; n < t->numel; n++) {
        int64_t off = t->off;
        for (int d = 0; d < t->ndim; d++)
            off += idx[d] * t->stride[d];
        memcpy(dst + (size_t)n * each, src + (size_t)off * each, each);
        for (int d = t->ndim - 1; d >= 0 && ++idx[d] == t->size[d]; d--)
            idx[d] = 0;
    }
}

bool wk_read(wk_tensor *h, void *dst, size_t bytes) {
    ASK(h, false);
    wk_ctx *c = t->ctx;
    if (!wki_touch_read(t, "wk_read: the tensor"))
        return false;
    size_t each = wki_dtype_size((wk_dtype)t->dtype), want = (size_t)t->numel * each;
    if (bytes != want)
        return wki_fail(c, WK_INVALID, "wk_read: %zu bytes given for a tensor of %zu", bytes, want);
    if (!want)
        return true;
    if (!dst)
        return wki_fail(c, WK_INVALID, "wk_read: dst is NULL");
    const wki_storage *s = t->st;
    if (t->flags & WKI_F_PLAIN)
        return wki_devices[s->dev]->download(c, dst, (char *)s->data + (size_t)t->off * each, bytes);
    char *host = s->data;
    if (s->dev != WK_CPU) {
        host = wki_malloc(s->bytes);
        if (!host)
            return wki_fail(c, WK_NOMEM, "wk_read: no host memory for %zu bytes", s->bytes);
        if (!wki_devices[s->dev]->download(c, host, s->data, s->bytes)) {
            wki_free(host);
            return false;
        }
    }
    gather(t, host, dst);
    if (s->dev != WK_CPU)
        wki_free(host);
    return true;
}

bool wk_write(wk_tensor *h, const void *src, size_t bytes) {
    ASK(h, false);
    wk_ctx *c = t->ctx;
    if (c->failed || !wki_touch_write(t, "wk_write: the tensor"))
        return false;
    size_t each = wki_dtype_size((wk_dtype)t->dtype), want = (size_t)t->numel * each;
    if (bytes != want)
        return wki_fail(c, WK_INVALID, "wk_write: %zu bytes given for a tensor of %zu", bytes, want);
    if (want && !src)
        return wki_fail(c, WK_INVALID, "wk_write: src is NULL");
    if (!(t->flags & WKI_F_PLAIN))
        return wki_fail(c, WK_INVALID, "wk_write: the tensor is not contiguous");
    wki_storage_bump(t->st);
    return !want ||
           wki_devices[t->st->dev]->upload(c, (char *)t->st->data + (size_t)t->off * each, src, bytes);
}

void *wk_data(wk_tensor *h, bool writable) {
    ASK(h, NULL);
    wk_ctx *c = t->ctx;
    if (writable ? c->failed || !wki_touch_write(t, "wk_data: the tensor")
                 : !wki_touch_read(t, "wk_data: the tensor"))
        return NULL;
    if (t->st->dev != WK_CPU) {
        wki_fail(c, WK_DEVICE, "wk_data: the tensor is on %s (wk_read copies it)",
                 wk_device_name((wk_device)t->st->dev));
        return NULL;
    }
    if (writable)
        wki_storage_bump(t->st);
    return t->st->data ? (char *)t->st->data + (size_t)t->off * wki_dtype_size((wk_dtype)t->dtype) : NULL;
}

/* One element as raw bytes. */
static bool read_one(wki_tensor *t, void *raw) {
    wk_ctx *c = t->ctx;
    if (!wki_touch_read(t, "wk_item: the tensor"))
        return false;
    if (t->numel != 1) {
        char text[128];
        return wki_fail(c, WK_SHAPE, "wk_item: a tensor of shape %s has not one element",
                        wki_shape_text(text, sizeof text, t->ndim, t->size));
    }
    size_t each = wki_dtype_size((wk_dtype)t->dtype);
    return wki_devices[t->st->dev]->download(c, raw, (char *)t->st->data + (size_t)t->off * each, each);
}

double wk_item(wk_tensor *h) {
    ASK(h, NAN);
    item v = {0};
    if (!read_one(t, &v))
        return NAN;
    switch ((wk_dtype)t->dtype) {
    case WK_F32:
        return (double)v.f;
    case WK_F64:
        return v.d;
    case WK_I64:
        return (double)v.i;
    case WK_I32:
        return v.w;
    default:
        return v.b;
    }
}

int64_t wk_item_i64(wk_tensor *h) {
    ASK(h, 0);
    item v = {0};
    if (!read_one(t, &v))
        return 0;
    double d = t->dtype == WK_F32 ? (double)v.f : v.d;
    switch ((wk_dtype)t->dtype) {
    case WK_F32:
    case WK_F64:
        return d >= -0x1p63 && d < 0x1p63 ? (int64_t)d : 0;
    case WK_I64:
        return v.i;
    case WK_I32:
        return v.w;
    default:
        return v.b;
    }
}

wk_tensor *wk_to(wk_tensor *h, wk_device d) {
    ASK(h, h);
    wk_ctx *c = t->ctx;
    if (c->failed || (t->flags & WKI_F_POISON))
        return poison_handle(c);
    if (t->st->dev == d)
        return h;
    if (!wki_need_device(c, d, "wk_to"))
        return poison_handle(c);
    size_t bytes = (size_t)t->numel * wki_dtype_size((wk_dtype)t->dtype);
    void *host = wki_malloc(bytes ? bytes : 1);
    if (!host) {
        wki_fail(c, WK_NOMEM, "wk_to: no host memory for %zu bytes", bytes);
        return poison_handle(c);
    }
    wk_tensor *r = poison_handle(c);
    if (wk_read(h, host, bytes)) {
        uint8_t old = c->dev;
        c->dev = (uint8_t)d;
        r = wk_from_data(c, (wk_dtype)t->dtype, t->ndim, t->size, host);
        c->dev = old;
    }
    wki_free(host);
    return r;
}

void wk_flush(wk_ctx *c) {
    c->caller = __builtin_return_address(0);
    wki_flush(c);
}

void wk_sync(wk_ctx *c) {
    c->caller = __builtin_return_address(0);
    if (!wki_flush(c))
        return;
    for (int d = 0; d < WK_DEVICE_COUNT; d++)
        if (c->dev_state[d] && !wki_device_wait(c, (wk_device)d))
            return;
}
