/* Streams, events, and copies queued on streams. Calls base, cu_heap and the driver. */
#include "backend/cuda/cu_private.h"
#include "base/alloc.h"

/* ---- Streams --------------------------------------------------------------------------------------------- */

int wki_cu_stream_create(wki_cu_device *dev, wki_cu_stream **out, wki_cu_error *err) {
    *out = NULL;
    wki_cu_stream *s = wki_calloc(1, sizeof *s);
    if (!s)
        return wki_cu_fail(err, WKI_CU_HOST_MEMORY, "no host memory for a stream");
    s->dev = dev;
    int code = wki_cu_enter(dev, err);
    if (!code)
        code = WKI_DRV(dev->cu, err, cuStreamCreate, &s->handle, WKI_STREAM_NON_BLOCKING);
    if (!code)
        code = WKI_DRV(dev->cu, err, cuEventCreate, &s->order, WKI_EVENT_DISABLE_TIMING);
    if (!code)
        code = wki_cu_pool_open(dev->heap, s, &s->pool, err);
    if (code) {
        wki_cu_stream_destroy(s);
        return code;
    }
    *out = s;
    return WKI_CU_OK;
}

void wki_cu_stream_destroy(wki_cu_stream *s) {
    if (!s)
        return;
    wki_cu_device *dev = s->dev;
    if (s->handle) {
        wki_cu_capture_abort(s);
        wki_cu_stream_sync(s, NULL);
    }
    wki_cu_free(s, s->workspace, NULL);
    if (s->pool)
        wki_cu_pool_close(dev->heap, s->pool);
    wki_cu_event_destroy(dev, s->order);
    if (s->handle && !wki_cu_enter(dev, NULL))
        dev->cu->api.cuStreamDestroy_v2(s->handle);
    wki_free(s);
}

wki_cu_device *wki_cu_stream_device(const wki_cu_stream *s) { return s->dev; }

void *wki_cu_stream_raw(const wki_cu_stream *s) { return s->handle; }

/* Waiting for a stream under capture would make the capture fail. */
static int refuse_capture(const wki_cu_stream *s, const char *what, wki_cu_error *err) {
    if (!s->capturing)
        return WKI_CU_OK;
    return wki_cu_fail(err, WKI_CU_INVALID, "%s while the stream is captured", what);
}

int wki_cu_stream_sync(wki_cu_stream *s, wki_cu_error *err) {
    int code = refuse_capture(s, "wait", err);
    if (!code)
        code = wki_cu_enter(s->dev, err);
    return code ? code : WKI_DRV(s->dev->cu, err, cuStreamSynchronize, s->handle);
}

int wki_cu_stream_done(wki_cu_stream *s, bool *done, wki_cu_error *err) {
    *done = false;
    int code = refuse_capture(s, "query", err);
    if (!code)
        code = wki_cu_enter(s->dev, err);
    if (code)
        return code;
    wki_curesult result = s->dev->cu->api.cuStreamQuery(s->handle);
    *done = result == WKI_SUCCESS;
    return result == WKI_NOT_READY ? WKI_CU_OK
                                   : wki_cu_checked(&s->dev->cu->api, err, "cuStreamQuery", result);
}

int wki_cu_stream_wait(wki_cu_stream *s, wki_cu_stream *on, wki_cu_error *err) {
    if (s == on)
        return WKI_CU_OK;
    int code = wki_cu_event_record(on->order, on, err);
    return code ? code : wki_cu_event_wait(on->order, s, err);
}

/* ---- Events ---------------------------------------------------------------------------------------------- */

int wki_cu_event_create(wki_cu_device *dev, bool timing, wki_cu_event **out, wki_cu_error *err) {
    *out = NULL;
    int code = wki_cu_enter(dev, err);
    return code ? code : WKI_DRV(dev->cu, err, cuEventCreate, out, timing ? 0 : WKI_EVENT_DISABLE_TIMING);
}

void wki_cu_event_destroy(wki_cu_device *dev, wki_cu_event *e) {
    if (e && !wki_cu_enter(dev, NULL))
        dev->cu->api.cuEventDestroy_v2(e);
}

int wki_cu_event_record(wki_cu_event *e, wki_cu_stream *s, wki_cu_error *err) {
    int code = wki_cu_enter(s->dev, err);
    return code ? code : WKI_DRV(s->dev->cu, err, cuEventRecord, e, s->handle);
}

int wki_cu_event_wait(wki_cu_event *e, wki_cu_stream *s, wki_cu_error *err) {
    int code = wki_cu_enter(s->dev, err);
    return code ? code : WKI_DRV(s->dev->cu, err, cuStreamWaitEvent, s->handle, e, 0);
}

int wki_cu_event_sync(wki_cu_device *dev, wki_cu_event *e, wki_cu_error *err) {
    int code = wki_cu_enter(dev, err);
    return code ? code : WKI_DRV(dev->cu, err, cuEventSynchronize, e);
}

int wki_cu_event_elapsed(wki_cu_device *dev, wki_cu_event *start, wki_cu_event *end, float *ms,
                         wki_cu_error *err) {
    *ms = 0;
    int code = wki_cu_enter(dev, err);
    return code ? code : WKI_DRV(dev->cu, err, cuEventElapsedTime, ms, start, end);
}

/* ---- Copies ---------------------------------------------------------------------------------------------- */

int wki_cu_copy_h2d(wki_cu_stream *s, wki_cu_ptr to, const void *from, size_t bytes, wki_cu_error *err) {
    if (bytes == 0)
        return WKI_CU_OK;
    int code = wki_cu_enter(s->dev, err);
    return code ? code : WKI_DRV(s->dev->cu, err, cuMemcpyHtoDAsync_v2, to, from, bytes, s->handle);
}

int wki_cu_copy_d2h(wki_cu_stream *s, void *to, wki_cu_ptr from, size_t bytes, wki_cu_error *err) {
    if (bytes == 0)
        return WKI_CU_OK;
    int code = wki_cu_enter(s->dev, err);
    return code ? code : WKI_DRV(s->dev->cu, err, cuMemcpyDtoHAsync_v2, to, from, bytes, s->handle);
}

int wki_cu_copy_d2d(wki_cu_stream *s, wki_cu_ptr to, wki_cu_ptr from, size_t bytes, wki_cu_error *err) {
    if (bytes == 0)
        return WKI_CU_OK;
    int code = wki_cu_enter(s->dev, err);
    return code ? code : WKI_DRV(s->dev->cu, err, cuMemcpyDtoDAsync_v2, to, from, bytes, s->handle);
}

int wki_cu_fill8(wki_cu_stream *s, wki_cu_ptr to, uint8_t value, size_t bytes, wki_cu_error *err) {
    if (bytes == 0)
        return WKI_CU_OK;
    int code = wki_cu_enter(s->dev, err);
    return code ? code : WKI_DRV(s->dev->cu, err, cuMemsetD8Async, to, value, bytes, s->handle);
}

int wki_cu_fill32(wki_cu_stream *s, wki_cu_ptr to, uint32_t value, size_t words, wki_cu_error *err) {
    if (words == 0)
        return WKI_CU_OK;
    int code = wki_cu_enter(s->dev, err);
    return code ? code : WKI_DRV(s->dev->cu, err, cuMemsetD32Async, to, value, words, s->handle);
}

int wki_cu_write(wki_cu_stream *s, wki_cu_ptr to, const void *from, size_t bytes, wki_cu_error *err) {
    int code = wki_cu_copy_h2d(s, to, from, bytes, err);
    return code ? code : wki_cu_stream_sync(s, err);
}

int wki_cu_read(wki_cu_stream *s, void *to, wki_cu_ptr from, size_t bytes, wki_cu_error *err) {
    int code = wki_cu_copy_d2h(s, to, from, bytes, err);
    return code ? code : wki_cu_stream_sync(s, err);
}
