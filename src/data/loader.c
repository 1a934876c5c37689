/* The batch loader: gathers samples from host arrays into tensors that it reuses. May call: base, core, the public API. */
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "core/box.h"

#define CALLER __builtin_return_address(0)

typedef struct field {
    wk_field what;
    wk_dtype dtype;  /* of the batch tensor */
    int64_t numel;   /* per sample */
    wk_tensor *full; /* retained; NULL where no batch is full */
    wk_tensor *tail; /* retained; the smaller last batch, NULL where there is none */
    void *staging;   /* a full batch on the host, for other devices than the CPU */
} field;

typedef struct loader {
    wk_loader *handle;
    wk_ctx *c;
    wk_loader_options opt;
    int64_t count, batches, at; /* at: the batch that comes next */
    uint64_t epoch;
    int64_t *order;      /* count sample numbers; NULL: as they come */
    wk_tensor *sentinel; /* lives exactly as long as the scope of the current iteration */
    float unit[256];     /* what each u8 becomes */
    int nfields;
    field fields[];
} loader;

void wk_loader_options_init(wk_loader_options *o) {
    *o = (wk_loader_options){.struct_size = sizeof *o, .batch = 32, .scale = 1.0 / 255};
}

/* ---- making and freeing -------------------------------------------------------------------------------------------- */

static void destroy(void *body) {
    loader *l = body;
    for (int i = 0; i < l->nfields; i++) {
        wk_release(l->fields[i].full);
        wk_release(l->fields[i].tail);
        wki_free(l->fields[i].staging);
    }
    wki_free(l->order);
    wki_free(l);
}

static bool batch_tensor(loader *l, const field *f, int64_t n, wk_tensor **out) {
    int64_t size[WK_MAX_DIMS] = {n};
    memcpy(size + 1, f->what.size, (size_t)f->what.ndim * sizeof *size);
    wk_scope_begin(l->c);
    char what[64];
    snprintf(what, sizeof what, "wk_loader_new: a batch of field %d", (int)(f - l->fields));
    const void *caller = l->c->caller;
    wki_tensor *t = wki_leaf(l->c, f->dtype, f->what.ndim + 1, size, what);
    if (t)
        *out = wk_retain(wki_handle(t));
    l->c->caller = caller;
    wk_scope_end(l->c);
    return t;
}

static bool field_init(loader *l, int i, const wk_field *what) {
    wk_ctx *c = l->c;
    field *f = &l->fields[i];
    f->what = *what;
    bool known =
        what->dtype == WK_U8 || what->dtype == WK_F32 || what->dtype == WK_I64 || what->dtype == WK_I32;
    if (!known)
        return wki_fail(c, WK_DTYPE, "wk_loader_new: field %d is %s; a loader takes u8, f32, i64 and i32", i,
                        wk_dtype_name(what->dtype));
    if (what->ndim < 0 || what->ndim >= WK_MAX_DIMS)
        return wki_fail(c, WK_SHAPE,
                        "wk_loader_new: field %d has %d dimensions a sample (0 to %d are allowed)", i,
                        what->ndim, WK_MAX_DIMS - 1);
    if (!what->data && l->count)
        return wki_fail(c, WK_INVALID, "wk_loader_new: the data of field %d is NULL", i);
    f->dtype = what->dtype == WK_F32 || (what->dtype == WK_U8 && !what->index) ? WK_F32 : WK_I64;
    int64_t tail = l->opt.drop_last ? 0 : l->count % l->opt.batch;
    if (l->count >= l->opt.batch && !batch_tensor(l, f, l->opt.batch, &f->full))
        return false;
    if (tail && !batch_tensor(l, f, tail, &f->tail))
        return false;
    f->numel = 1; /* cannot overflow: the batch tensors have at least one sample */
    for (int d = 0; d < what->ndim && (f->full || f->tail); d++)
        f->numel *= what->size[d];
    if (c->dev != WK_CPU && l->batches) {
        int64_t n = f->full ? l->opt.batch : tail;
        f->staging = wki_malloc((size_t)(n * f->numel) * wki_dtype_size(f->dtype));
        if (!f->staging)
            return wki_fail(c, WK_NOMEM, "no host memory for a batch of field %d", i);
    }
    return true;
}

static bool counts_ok(wk_ctx *c, const wk_field *fields, int nfields, int64_t count, int64_t batch) {
    if (nfields < 1)
        return wki_fail(c, WK_INVALID, "wk_loader_new: nfields is %d; it must be at least 1", nfields);
    if (!fields)
        return wki_fail(c, WK_INVALID, "wk_loader_new: fields is NULL");
    if (count < 0)
        return wki_fail(c, WK_INVALID, "wk_loader_new: count is %lld; it must be at least 0",
                        (long long)count);
    return batch >= 1 ||
           wki_fail(c, WK_INVALID, "wk_loader_new: batch is %lld; it must be at least 1", (long long)batch);
}

wk_loader *wk_loader_new(wk_ctx *c, const wk_field *fields, int nfields, int64_t count,
                         const wk_loader_options *given) {
    wk_loader_options o;
    wk_loader_options_init(&o);
    wki_begin(c, CALLER);
    if (c->failed)
        return wki_box_invalid(c);
    if (!wki_take_struct(&o, sizeof o, given)) {
        wki_wrong_struct(c, "wk_loader_options");
        return wki_box_invalid(c);
    }
    if (!counts_ok(c, fields, nfields, count, o.batch))
        return wki_box_invalid(c);
    loader *l = wki_calloc(1, sizeof *l + (size_t)nfields * sizeof *l->fields);
    if (!l) {
        wki_fail(c, WK_NOMEM, "no host memory for a loader");
        return wki_box_invalid(c);
    }
    l->c = c;
    l->opt = o;
    l->count = count;
    l->nfields = nfields;
    l->batches = count / o.batch + (!o.drop_last && count % o.batch);
    for (int i = 0; i < 256; i++)
        l->unit[i] = (float)(i * o.scale);
    bool ok = true;
    for (int i = 0; ok && i < nfields; i++)
        ok = field_init(l, i, &fields[i]);
    if (ok && o.shuffle && !(l->order = wki_malloc((size_t)count * sizeof *l->order)))
        ok = wki_fail(c, WK_NOMEM, "no host memory to shuffle %lld samples", (long long)count);
    if (!ok) {
        destroy(l);
        return wki_box_invalid(c);
    }
    l->handle = wki_box_new(c, WKI_BOX_LOADER, l, destroy);
    return l->handle;
}

/* ---- iterating ----------------------------------------------------------------------------------------------------- */

/* Uniform in [0, n): multiply and shift, with the few draws that would be uneven thrown away (Lemire 2019). */
static uint64_t below(uint64_t *state, uint64_t n) {
    unsigned __int128 m;
    do
        m = (unsigned __int128)wki_splitmix(state) * n;
    while ((uint64_t)m < -n % n);
    return (uint64_t)(m >> 64);
}

/* Fisher-Yates over the identity: the order depends on the seed and the epoch, not on epochs before. */
static void shuffle(loader *l) {
    uint64_t state = l->opt.seed;
    state = wki_splitmix(&state) + l->epoch;
    for (int64_t i = 0; i < l->count; i++)
        l->order[i] = i;
    for (int64_t i = l->count - 1; i > 0; i--) {
        int64_t j = (int64_t)below(&state, (uint64_t)i + 1), t = l->order[i];
        l->order[i] = l->order[j];
        l->order[j] = t;
    }
}

static void copy_sample(const loader *l, const field *f, int64_t sample, void *dst) {
    const size_t n = (size_t)f->numel, at = (size_t)sample * n;
    if (f->what.dtype == WK_U8 && f->what.index) {
        const uint8_t *s = (const uint8_t *)f->what.data + at;
        int64_t *d = dst;
        for (size_t i = 0; i < n; i++)
            d[i] = s[i];
    } else if (f->what.dtype == WK_U8) {
        const uint8_t *s = (const uint8_t *)f->what.data + at;
        float *d = dst;
        for (size_t i = 0; i < n; i++)
            d[i] = l->unit[s[i]];
    } else if (f->what.dtype == WK_I32) {
        const int32_t *s = (const int32_t *)f->what.data + at;
        int64_t *d = dst;
        for (size_t i = 0; i < n; i++)
            d[i] = s[i];
    } else {
        size_t each = wki_dtype_size(f->dtype);
        memcpy(dst, (const char *)f->what.data + at * each, n * each);
    }
}

/* Writes samples [first, first + n) of the epoch's order into t. */
static bool fill(loader *l, field *f, wk_tensor *t, int64_t first, int64_t n) {
    size_t row = (size_t)f->numel * wki_dtype_size(f->dtype);
    if (!row)
        return true;
    char *dst = f->staging ? f->staging : wk_data(t, true);
    if (!dst)
        return false;
    for (int64_t i = 0; i < n; i++)
        copy_sample(l, f, l->order ? l->order[first + i] : first + i, dst + (size_t)i * row);
    return !f->staging || wk_write(t, dst, (size_t)n * row);
}

/* Ends the scope of the last iteration, and scopes inside it that were left open. */
static void close_scope(loader *l) {
    while (wki_handle_ok(l->sentinel) && l->c->nmarks > l->c->scope_floor)
        wk_scope_end(l->c);
    l->sentinel = NULL;
}

static void next_epoch(loader *l) {
    l->at = 0;
    l->epoch++;
}

bool wk_loader_next(wk_loader *h, wk_tensor **batch) {
    loader *l = wki_box_get(h, WKI_BOX_LOADER, CALLER);
    if (!l)
        return false;
    wk_ctx *c = l->c;
    close_scope(l);
    if (c->failed)
        return false;
    if (l->at >= l->batches) {
        next_epoch(l);
        return false;
    }
    wki_begin(c, CALLER);
    if (l->at == 0 && l->order)
        shuffle(l);
    int64_t first = l->at * l->opt.batch, left = l->count - first;
    int64_t n = left < l->opt.batch ? left : l->opt.batch;
    wk_scope_begin(c);
    for (int i = 0; i < l->nfields; i++) {
        field *f = &l->fields[i];
        wk_tensor *t = n == l->opt.batch ? f->full : f->tail;
        if (!fill(l, f, t, first, n))
            break;
        batch[i] =
            wk_detach(t); /* a handle of this iteration: using it later is an error, not another batch */
        if (!l->sentinel)
            l->sentinel = wk_detach(t);
    }
    if (c->failed) {
        wk_scope_end(c);
        l->sentinel = NULL;
        return false;
    }
    l->at++;
    return true;
}

void wk_loader_rewind(wk_loader *h) {
    loader *l = wki_box_get(h, WKI_BOX_LOADER, CALLER);
    if (!l)
        return;
    close_scope(l);
    if (l->at)
        next_epoch(l);
}

int64_t wk_loader_batches(wk_loader *h) {
    loader *l = wki_box_get(h, WKI_BOX_LOADER, CALLER);
    return l ? l->batches : 0;
}

void wk_loader_free(wk_loader *h) {
    loader *l = wki_box_get(h, WKI_BOX_LOADER, CALLER);
    if (!l)
        return;
    close_scope(l);
    wki_box_free(h);
}
