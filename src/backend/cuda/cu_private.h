/* What the files of the CUDA run time share: the structs behind cu.h's handles and the calling of the driver. */
#pragma once
#include "backend/cuda/cu.h"
#include "backend/cuda/cu_api.h"
#include "backend/cuda/cu_error.h"
#include "backend/cuda/cu_heap.h"
#include "base/dl.h"

#include <pthread.h>

struct wki_cu {
    wki_dl *lib;
    wki_cu_driver_api api;
    int driver_version, n_devices;
    wki_cu_options options; /* strings owned */
    pthread_mutex_t lock;   /* for nvrtc */
    wki_nvrtc *nvrtc;
};

typedef struct wki_cu_module_cache wki_cu_module_cache;
typedef struct wki_cu_blas wki_cu_blas;

struct wki_cu_device {
    wki_cu *cu;
    wki_cudevice handle;
    wki_cucontext context;
    wki_cu_device_info info;
    wki_cu_heap *heap;
    pthread_mutex_t lock; /* for the two below, which are made on demand by the files that own them */
    wki_cu_module_cache *modules;
    wki_cu_blas *blas;
};

struct wki_cu_stream {
    wki_cu_device *dev;
    wki_custream handle;
    wki_cuevent order; /* for wki_cu_stream_wait */
    wki_cu_pool *pool;
    wki_cu_ptr workspace; /* of WKI_CU_GEMM_WORKSPACE bytes, on demand */
    bool capturing;
};

int wki_cu_fail_driver(const wki_cu_driver_api *api, wki_cu_error *err, const char *call,
                       wki_curesult result);

/* Calls the driver: WKI_DRV(cu, err, cuInit, 0) is 0 or a filled failure. */
#define WKI_DRV(cu, err, call, ...) wki_cu_checked(&(cu)->api, (err), #call, (cu)->api.call(__VA_ARGS__))

static inline int wki_cu_checked(const wki_cu_driver_api *api, wki_cu_error *err, const char *call,
                                 wki_curesult result) {
    if (__builtin_expect(result == WKI_SUCCESS, 1))
        return WKI_CU_OK;
    return wki_cu_fail_driver(api, err, call, result);
}

/* Makes the device's context current on this thread. */
static inline int wki_cu_enter(wki_cu_device *dev, wki_cu_error *err) {
    wki_cucontext now = NULL;
    if (__builtin_expect(dev->cu->api.cuCtxGetCurrent(&now) == WKI_SUCCESS && now == dev->context, 1))
        return WKI_CU_OK;
    return WKI_DRV(dev->cu, err, cuCtxSetCurrent, dev->context);
}

/* Owned by cu_module.c and cu_blas.c; called with the device's context current. NULL is allowed. */
void wki_cu_module_cache_destroy(wki_cu_device *dev, wki_cu_module_cache *cache);
void wki_cu_blas_destroy(wki_cu_blas *blas);
