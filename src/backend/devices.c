/* The list of devices. */
#include "backend/backend.h"

extern const wki_device_api wki_device_cpu, wki_device_cuda, wki_device_null;

const wki_device_api *const wki_devices[WK_DEVICE_COUNT] = {
    [WK_CPU] = &wki_device_cpu,
    [WK_CUDA] = &wki_device_cuda,
    [WK_NULL] = &wki_device_null,
};
