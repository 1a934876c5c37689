/* The driver, its devices and their memory: opening libcuda, the primary context, and the allocator's view of
 * the device. Calls base, cu_library, cu_heap and the driver. */
#include "backend/cuda/cu_library.h"
#include "backend/cuda/cu_private.h"
#include "base/alloc.h"

#include <stdlib.h>
#include <string.h>

int wki_cu_fail_driver(const wki_cu_driver_api *api, wki_cu_error *err, const char *call,
                       wki_curesult result) {
    const char *name = NULL, *reason = NULL;
    api->cuGetErrorName(result, &name);
    api->cuGetErrorString(result, &reason);
    int code = result == WKI_OUT_OF_MEMORY      ? WKI_CU_DEVICE_MEMORY
               : result == WKI_NO_DEVICE_RESULT ? WKI_CU_NO_DEVICE
                                                : WKI_CU_FAILED;
    return wki_cu_fail_call(err, code, call, result, name, reason, NULL);
}

/* ---- The driver ------------------------------------------------------------------------------------------ */

/* A copy in *to, which stays NULL for NULL. False: no memory. */
static bool copy_string(const char *from, const char **to) {
    if (!from)
        return true;
    size_t n = strlen(from) + 1;
    char *copy = wki_malloc(n);
    if (copy)
        memcpy(copy, from, n);
    *to = copy;
    return copy != NULL;
}

static bool copy_options(const wki_cu_options *from, wki_cu_options *to) {
    return copy_string(from->path, &to->path) && copy_string(from->driver, &to->driver) &&
           copy_string(from->nvrtc, &to->nvrtc) && copy_string(from->cublaslt, &to->cublaslt);
}

static int start_driver(wki_cu *cu, wki_cu_error *err) {
    int code = wki_cu_library_open(WKI_CU_LIB_DRIVER, &cu->options, 0, &cu->lib, &cu->api, err);
    if (!code)
        code = WKI_DRV(cu, err, cuInit, 0);
    if (!code)
        code = WKI_DRV(cu, err, cuDriverGetVersion, &cu->driver_version);
    if (!code)
        code = WKI_DRV(cu, err, cuDeviceGetCount, &cu->n_devices);
    if (!code && cu->n_devices == 0)
        code = wki_cu_fail(err, WKI_CU_NO_DEVICE, "the driver lists none");
    if (code)
        wki_cu_fail_in(err, "no CUDA device");
    return code;
}

int wki_cu_open(const wki_cu_options *options, wki_cu **out, wki_cu_error *err) {
    *out = NULL;
    wki_cu *cu = wki_calloc(1, sizeof *cu);
    if (!cu)
        return wki_cu_fail(err, WKI_CU_HOST_MEMORY, "no host memory to open CUDA");
    pthread_mutex_init(&cu->lock, NULL);
    int code = WKI_CU_OK;
    if (options && !copy_options(options, &cu->options))
        code = wki_cu_fail(err, WKI_CU_HOST_MEMORY, "no host memory to open CUDA");
    if (!code)
        code = start_driver(cu, err);
    if (code) {
        wki_cu_close(cu);
        return code;
    }
    *out = cu;
    return WKI_CU_OK;
}

void wki_cu_close(wki_cu *cu) {
    if (!cu)
        return;
    wki_nvrtc_close(cu->nvrtc);
    wki_dl_close(cu->lib);
    wki_free((void *)cu->options.path);
    wki_free((void *)cu->options.driver);
    wki_free((void *)cu->options.nvrtc);
    wki_free((void *)cu->options.cublaslt);
    pthread_mutex_destroy(&cu->lock);
    wki_free(cu);
}

int wki_cu_device_count(const wki_cu *cu) { return cu->n_devices; }

int wki_cu_driver_version(const wki_cu *cu) { return cu->driver_version; }

int wki_cu_nvrtc(wki_cu *cu, wki_nvrtc **out, wki_cu_error *err) {
    *out = NULL;
    int code = WKI_CU_OK;
    pthread_mutex_lock(&cu->lock);
    if (!cu->nvrtc)
        code = wki_nvrtc_open(&cu->options, cu->driver_version / 1000, &cu->nvrtc, err);
    if (!code)
        *out = cu->nvrtc;
    pthread_mutex_unlock(&cu->lock);
    return code;
}

static int find_device(const wki_cu *cu, int ordinal, wki_cudevice *out, wki_cu_error *err) {
    if (ordinal < 0 || ordinal >= cu->n_devices)
        return wki_cu_fail(err, WKI_CU_NO_DEVICE, "no CUDA device %d: there %s %d", ordinal,
                           cu->n_devices == 1 ? "is" : "are", cu->n_devices);
    return WKI_DRV(cu, err, cuDeviceGet, out, ordinal);
}

int wki_cu_info(const wki_cu *cu, int ordinal, wki_cu_device_info *out, wki_cu_error *err) {
    wki_cudevice device = 0;
    int l2 = 0, smem = 0;
    memset(out, 0, sizeof *out);
    const struct {
        int attribute, *value;
    } numbers[] = {
        {WKI_ATTR_MAJOR, &out->major},         {WKI_ATTR_MINOR, &out->minor},
        {WKI_ATTR_SM_COUNT, &out->sm_count},   {WKI_ATTR_SM_THREADS, &out->sm_threads},
        {WKI_ATTR_WARP_SIZE, &out->warp_size}, {WKI_ATTR_L2, &l2},
        {WKI_ATTR_SMEM_OPTIN, &smem},
    };
    int code = find_device(cu, ordinal, &device, err);
    if (!code)
        code = WKI_DRV(cu, err, cuDeviceGetName, out->name, (int)sizeof out->name, device);
    if (!code)
        code = WKI_DRV(cu, err, cuDeviceTotalMem_v2, &out->memory, device);
    for (size_t i = 0; !code && i < sizeof numbers / sizeof *numbers; i++)
        code = WKI_DRV(cu, err, cuDeviceGetAttribute, numbers[i].value, numbers[i].attribute, device);
    out->l2 = (size_t)l2;
    out->smem_optin = (size_t)smem;
    return code;
}

/* ---- The allocator's view -------------------------------------------------------------------------------- */

static int device_grow(void *self, size_t bytes, wki_cu_ptr *out, wki_cu_error *err) {
    wki_cu_device *dev = self;
    int code = wki_cu_enter(dev, err);
    return code ? code : WKI_DRV(dev->cu, err, cuMemAlloc_v2, out, bytes);
}

static void device_release(void *self, wki_cu_ptr p) {
    wki_cu_device *dev = self;
    if (!wki_cu_enter(dev, NULL))
        dev->cu->api.cuMemFree_v2(p);
}

static bool stream_idle(void *self, void *stream) {
    (void)self;
    bool done = false;
    return !wki_cu_stream_done(stream, &done, NULL) && done;
}

static int stream_after(void *self, void *stream, void *other, wki_cu_error *err) {
    (void)self;
    return wki_cu_stream_wait(stream, other, err);
}

static int stream_settle(void *self, void *stream, wki_cu_error *err) {
    (void)self;
    return wki_cu_stream_sync(stream, err);
}

static void device_room(void *self, size_t *free, size_t *total) {
    wki_cu_device *dev = self;
    if (!wki_cu_enter(dev, NULL))
        dev->cu->api.cuMemGetInfo_v2(free, total);
}

/* ---- Devices --------------------------------------------------------------------------------------------- */

int wki_cu_device_open(wki_cu *cu, int ordinal, size_t memory_limit, wki_cu_device **out, wki_cu_error *err) {
    *out = NULL;
    wki_cu_device *dev = wki_calloc(1, sizeof *dev);
    if (!dev)
        return wki_cu_fail(err, WKI_CU_HOST_MEMORY, "no host memory for a device");
    dev->cu = cu;
    pthread_mutex_init(&dev->lock, NULL);
    const wki_cu_heap_source source = {
        .self = dev,
        .grow = device_grow,
        .release = device_release,
        .idle = stream_idle,
        .after = stream_after,
        .settle = stream_settle,
        .room = device_room,
    };
    int code = wki_cu_info(cu, ordinal, &dev->info, err);
    if (!code)
        code = find_device(cu, ordinal, &dev->handle, err);
    if (!code)
        code = wki_cu_heap_create(&source, memory_limit, &dev->heap, err);
    if (!code)
        code = WKI_DRV(cu, err, cuDevicePrimaryCtxRetain, &dev->context, dev->handle);
    if (code) {
        wki_cu_device_close(dev);
        return code;
    }
    *out = dev;
    return WKI_CU_OK;
}

void wki_cu_device_close(wki_cu_device *dev) {
    if (!dev)
        return;
    if (dev->context && !wki_cu_enter(dev, NULL)) {
        wki_cu_module_cache_destroy(dev, dev->modules);
        wki_cu_blas_destroy(dev->blas);
    }
    wki_cu_heap_destroy(dev->heap);
    if (dev->context) {
        dev->cu->api.cuCtxSetCurrent(NULL);
        dev->cu->api.cuDevicePrimaryCtxRelease_v2(dev->handle);
    }
    pthread_mutex_destroy(&dev->lock);
    wki_free(dev);
}

const wki_cu_device_info *wki_cu_device_info_of(const wki_cu_device *dev) { return &dev->info; }

/* ---- Memory ---------------------------------------------------------------------------------------------- */

int wki_cu_alloc(wki_cu_stream *s, size_t bytes, const char *tag, wki_cu_ptr *out, wki_cu_error *err) {
    return wki_cu_heap_alloc(s->dev->heap, s->pool, bytes, tag, out, err);
}

int wki_cu_free(wki_cu_stream *s, wki_cu_ptr p, wki_cu_error *err) {
    return wki_cu_heap_free(s->dev->heap, s->pool, p, err);
}

void wki_cu_memory_stats_get(wki_cu_device *dev, wki_cu_memory_stats *out) {
    wki_cu_heap_stats(dev->heap, out);
}

int wki_cu_memory_trim(wki_cu_device *dev, wki_cu_error *err) { return wki_cu_heap_trim(dev->heap, err); }

int wki_cu_host_alloc(wki_cu_device *dev, size_t bytes, void **out, wki_cu_error *err) {
    *out = NULL;
    int code = wki_cu_enter(dev, err);
    return code ? code : WKI_DRV(dev->cu, err, cuMemHostAlloc, out, bytes, WKI_HOST_PORTABLE);
}

void wki_cu_host_free(wki_cu_device *dev, void *p) {
    if (p && !wki_cu_enter(dev, NULL))
        dev->cu->api.cuMemFreeHost(p);
}
