/* CUDA as a device: memory, copies between host and device, and what a context keeps for running plans. Everything of a
 * context goes through its one stream; only downloads and syncs wait for it. */
#include "backend/cuda/cuda.h"

#include "compile/plan.h"

#include <stdio.h>
#include <string.h>

enum { FIRST_ARGS_BYTES = 16 * 1024, RING_BLOCKS = 8 };

bool wki_cuda_fail(wk_ctx *c, const wki_cu_error *err) {
    wk_status s = WK_LIBRARY;
    switch ((wki_cu_status)err->code) {
    case WKI_CU_HOST_MEMORY:
    case WKI_CU_DEVICE_MEMORY:
        s = WK_NOMEM;
        break;
    case WKI_CU_NO_DEVICE:
        s = WK_DEVICE;
        break;
    case WKI_CU_INVALID:
        s = WK_INTERNAL;
        break;
    default:
        break;
    }
    return wki_fail(c, s, "%s", err->text);
}

/* ---- the runtime's part ---------------------------------------------------------------------------------------------- */

static wki_cuda *open_device(void) {
    wki_cu_error err = {0};
    wki_cuda *s = wki_calloc(1, sizeof *s);
    if (!s || pthread_mutex_init(&s->lock, NULL)) {
        wki_free(s);
        return NULL;
    }
    if (wki_cu_open(NULL, &s->cu, &err) || wki_cu_device_open(s->cu, 0, 0, &s->dev, &err))
        snprintf(s->why, sizeof s->why, "%s", err.text);
    return s;
}

static bool cuda_available(wk_runtime *rt, const char **why) {
    wki_runtime_lock(rt);
    if (!rt->dev_state[WK_CUDA])
        rt->dev_state[WK_CUDA] = open_device();
    wki_cuda *s = rt->dev_state[WK_CUDA];
    wki_runtime_unlock(rt);
    *why = s ? s->why : "no host memory to open the CUDA driver";
    return s && s->dev;
}

static void cuda_rt_free(wk_runtime *rt) {
    wki_cuda *s = rt->dev_state[WK_CUDA];
    if (!s)
        return;
    wki_cuda_texts_free(s);
    if (s->dev)
        wki_cu_device_close(s->dev);
    if (s->cu)
        wki_cu_close(s->cu);
    pthread_mutex_destroy(&s->lock);
    wki_free(s);
    rt->dev_state[WK_CUDA] = NULL;
}

/* ---- the context's part ---------------------------------------------------------------------------------------------- */

static void state_free(wki_cuda_ctx *s) {
    if (s->ring)
        wki_cu_ring_destroy(s->ring);
    if (s->upload)
        wki_cu_ring_destroy(s->upload);
    if (s->stream) {
        wki_cu_stream_sync(s->stream, NULL);
        wki_cu_free(s->stream, s->arena, NULL);
        wki_cu_free(s->stream, s->args, NULL);
        wki_cu_free(s->stream, s->counts, NULL);
        wki_cu_free(s->stream, s->stop, NULL);
        if (s->bounce)
            wki_cu_host_free(s->rt->dev, s->bounce);
        wki_cu_stream_destroy(s->stream);
    }
    wki_free(s);
}

static void cuda_ctx_free(wk_ctx *c) {
    if (c->dev_state[WK_CUDA])
        state_free(c->dev_state[WK_CUDA]);
    c->dev_state[WK_CUDA] = NULL;
}

static int make_state(wki_cuda_ctx *s, wki_cu_error *err) {
    void *host = NULL;
    int code = wki_cu_stream_create(s->rt->dev, &s->stream, err);
    if (!code)
        code = wki_cu_alloc(s->stream, sizeof(int32_t), "stop word", &s->stop, err);
    if (!code)
        code = wki_cu_fill32(s->stream, s->stop, 0, 1, err);
    if (!code)
        code = wki_cu_alloc(s->stream, WKI_COUNTS * sizeof(int32_t), "counts", &s->counts, err);
    if (!code)
        code = wki_cu_fill32(s->stream, s->counts, 0, WKI_COUNTS, err);
    if (!code)
        code = wki_cu_host_alloc(s->rt->dev, WKI_BOUNCE_BYTES + sizeof(int32_t), &host, err);
    s->bounce = host;
    if (!code)
        *wki_cuda_fault(s) = 0;
    return code;
}

wki_cuda_ctx *wki_cuda_of(wk_ctx *c) {
    if (c->dev_state[WK_CUDA])
        return c->dev_state[WK_CUDA];
    const char *why;
    if (!cuda_available(c->rt, &why)) {
        wki_fail(c, WK_DEVICE, "%s", why);
        return NULL;
    }
    wki_cu_error err = {0};
    wki_cuda_ctx *s = wki_calloc(1, sizeof *s);
    if (!s) {
        wki_fail(c, WK_NOMEM, "no host memory for the device's state");
        return NULL;
    }
    s->rt = c->rt->dev_state[WK_CUDA];
    if (make_state(s, &err)) {
        state_free(s);
        wki_cuda_fail(c, &err);
        return NULL;
    }
    c->dev_state[WK_CUDA] = s;
    return s;
}

static int grow_arena(wki_cuda_ctx *s, size_t bytes, wki_cu_error *err) {
    size_t ample = s->arena_bytes + (s->arena_bytes < (size_t)64 << 20 ? s->arena_bytes : (size_t)64 << 20);
    wki_cu_free(s->stream, s->arena, NULL); /* reused in stream order, behind the plans that are queued */
    s->arena = 0;
    s->arena_bytes = 0;
    s->generation++;
    if (ample > bytes && !wki_cu_alloc(s->stream, ample, "arena", &s->arena, NULL)) {
        s->arena_bytes = ample;
        return WKI_CU_OK;
    }
    int code = wki_cu_alloc(s->stream, bytes, "arena", &s->arena, err);
    if (!code)
        s->arena_bytes = bytes;
    return code;
}

static int grow_args(wki_cuda_ctx *s, size_t bytes, wki_cu_error *err) {
    size_t n = s->args_bytes ? s->args_bytes : FIRST_ARGS_BYTES;
    while (n < bytes)
        n *= 2;
    if (s->ring)
        wki_cu_ring_destroy(s->ring);
    wki_cu_free(s->stream, s->args, NULL);
    s->ring = NULL;
    s->args = 0;
    s->args_bytes = 0;
    s->generation++;
    int code = wki_cu_alloc(s->stream, n, "arguments", &s->args, err);
    if (!code)
        code = wki_cu_ring_create(s->stream, RING_BLOCKS, n, &s->ring, err);
    if (!code)
        s->args_bytes = n;
    return code;
}

bool wki_cuda_reserve(wk_ctx *c, size_t arena_bytes, size_t args_bytes) {
    wki_cuda_ctx *s = wki_cuda_of(c);
    wki_cu_error err = {0};
    if (!s)
        return false;
    int code = WKI_CU_OK;
    if (arena_bytes > s->arena_bytes)
        code = grow_arena(s, arena_bytes, &err);
    if (!code && args_bytes > s->args_bytes)
        code = grow_args(s, args_bytes, &err);
    return !code || wki_cuda_fail(c, &err);
}

/* ---- memory and copies ----------------------------------------------------------------------------------------------- */

static void *cuda_alloc(wk_ctx *c, size_t bytes, const char *tag) {
    wki_cu_error err = {0};
    wki_cu_ptr p = 0;
    wki_cuda_ctx *s = bytes ? wki_cuda_of(c) : NULL;
    if (s && wki_cu_alloc(s->stream, bytes, tag, &p, &err))
        wki_cuda_fail(c, &err);
    return (void *)(uintptr_t)p;
}

static void cuda_free(wk_ctx *c, void *p, size_t bytes) {
    wki_cuda_ctx *s = c->dev_state[WK_CUDA];
    (void)bytes;
    if (p && (s || (s = wki_cuda_of(c))))
        wki_cu_free(s->stream, (wki_cu_ptr)(uintptr_t)p, NULL);
}

static int upload(wki_cuda_ctx *s, wki_cu_ptr to, const char *src, size_t bytes, wki_cu_error *err) {
    int code = WKI_CU_OK;
    if (!s->upload)
        code = wki_cu_ring_create(s->stream, WKI_UPLOAD_BLOCKS, WKI_UPLOAD_BYTES, &s->upload, err);
    for (size_t at = 0; !code && at < bytes; at += WKI_UPLOAD_BYTES) {
        size_t n = bytes - at < WKI_UPLOAD_BYTES ? bytes - at : WKI_UPLOAD_BYTES;
        void *host;
        code = wki_cu_ring_acquire(s->upload, &host, err);
        if (code)
            break;
        memcpy(host, src + at, n);
        code = wki_cu_ring_submit(s->upload, to + at, n, err);
    }
    return code;
}

/* An error of work that was queued earlier says what that was. */
static bool fail_late(wk_ctx *c, wki_cuda_ctx *s, const wki_cu_error *err) {
    wki_cu_error more = *err;
    size_t n = strlen(more.text);
    if (s->first_op)
        snprintf(more.text + n, sizeof more.text - n, " (queued last: the plan of %s .. %s)", s->first_op,
                 s->last_op);
    return wki_cuda_fail(c, &more);
}

bool wki_cuda_upload(wk_ctx *c, wki_cu_ptr to, const void *src, size_t bytes) {
    wki_cu_error err = {0};
    wki_cuda_ctx *s = wki_cuda_of(c);
    if (!s)
        return false;
    return !upload(s, to, src, bytes, &err) || fail_late(c, s, &err);
}

static bool cuda_upload(wk_ctx *c, void *dst, const void *src, size_t bytes) {
    return wki_cuda_upload(c, (wki_cu_ptr)(uintptr_t)dst, src, bytes);
}

/* Waits for the stream and reports what a kernel left in the fault word. */
static bool settle(wk_ctx *c, wki_cuda_ctx *s, int code, wki_cu_error *err) {
    if (!code)
        code = wki_cu_stream_sync(s->stream, err);
    if (code)
        return fail_late(c, s, err);
    int32_t fault = *wki_cuda_fault(s);
    if (!fault)
        return true;
    *wki_cuda_fault(s) = 0;
    if (wki_cu_fill32(s->stream, s->stop, 0, 1, err))
        return fail_late(c, s, err);
    return wki_report_fault(c, fault, NULL);
}

static bool cuda_download(wk_ctx *c, void *dst, const void *src, size_t bytes) {
    wki_cu_error err = {0};
    wki_cuda_ctx *s = wki_cuda_of(c);
    if (!s)
        return false;
    bool small = bytes <= WKI_BOUNCE_BYTES;
    int code = wki_cu_copy_d2h(s->stream, small ? s->bounce : dst, (wki_cu_ptr)(uintptr_t)src, bytes, &err);
    if (!settle(c, s, code, &err))
        return false;
    if (small && bytes)
        memcpy(dst, s->bounce, bytes);
    return true;
}

static bool cuda_sync(wk_ctx *c) {
    wki_cu_error err = {0};
    wki_cuda_ctx *s = c->dev_state[WK_CUDA];
    return !s || settle(c, s, WKI_CU_OK, &err);
}

const wki_device_api wki_device_cuda = {
    .name = "cuda",
    .available = cuda_available,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .upload = cuda_upload,
    .download = cuda_download,
    .sync = cuda_sync,
    .ctx_free = cuda_ctx_free,
    .rt_free = cuda_rt_free,
    .plan = &wki_cuda_plans,
};
