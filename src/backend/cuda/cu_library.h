/* Finding CUDA's shared libraries. Calls base/dl and cu_error. */
#pragma once
#include "backend/cuda/cu.h"
#include "base/dl.h"

typedef enum wki_cu_library {
    WKI_CU_LIB_DRIVER,
    WKI_CU_LIB_NVRTC,
    WKI_CU_LIB_CUBLASLT,
} wki_cu_library;

/* Opens the library and fills table with its functions. prefer_major: CUDA major version to try first; 0: the
 * newest known. */
int wki_cu_library_open(wki_cu_library which, const wki_cu_options *options, int prefer_major, wki_dl **out,
                        void *table, wki_cu_error *err);
