/* Wick's own declarations of the parts of CUDA's libraries it calls: types, constants and one list of
 * functions per library, from which the tables of pointers are made. Taken from the CUDA 12 and 13 reference
 * manuals; tests/cuda_decl_check.c compares every line with the real headers where they are installed. Names of
 * functions are those the library exports, which for replaced versions end in _v2. Includes nothing of CUDA. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* The check compiles the lists below over the real types instead. */
#ifndef WKI_CU_FOREIGN_TYPES
typedef int wki_curesult;
typedef int wki_cudevice;
typedef struct CUctx_st *wki_cucontext;
typedef struct CUstream_st *wki_custream;
typedef struct CUevent_st *wki_cuevent;
typedef struct CUmod_st *wki_cumodule;
typedef struct CUfunc_st *wki_cufunction;
typedef struct CUgraph_st *wki_cugraph;
typedef struct CUgraphNode_st *wki_cugraphnode;
typedef struct CUgraphExec_st *wki_cugraphexec;
typedef struct wki_culaunchattr {
    int id;
    char pad[4];
    int value; /* of a union of 64 bytes */
    char more[60];
} wki_culaunchattr;
typedef struct wki_culaunchconfig {
    unsigned int grid[3], block[3], smem;
    wki_custream stream;
    wki_culaunchattr *attrs;
    unsigned int n_attrs;
} wki_culaunchconfig;
typedef struct wki_cukernelnode {
    wki_cufunction function;
    unsigned int grid[3], block[3], smem;
    void **params, **extra;
    void *kernel;
    wki_cucontext context;
} wki_cukernelnode;
typedef unsigned long long wki_cudeviceptr;
typedef int wki_cudeviceattr;
typedef int wki_cufuncattr;
typedef int wki_cucapturemode;

typedef int wki_nvrtcresult;
typedef struct _nvrtcProgram *wki_nvrtcprogram;

typedef int wki_ltstatus;
typedef int wki_ltcompute;
typedef int wki_ltdatatype;
typedef int wki_ltdescattr;
typedef int wki_ltlayoutattr;
typedef int wki_ltprefattr;
typedef struct cublasLtContext *wki_lthandle;
typedef struct wki_ltdesc_opaque *wki_ltdesc;
typedef struct wki_ltlayout_opaque *wki_ltlayout;
typedef struct wki_ltpref_opaque *wki_ltpref;
typedef struct wki_ltalgo {
    uint64_t data[8];
} wki_ltalgo;
typedef struct wki_ltheuristic {
    wki_ltalgo algo;
    size_t workspaceSize;
    wki_ltstatus state;
    float wavesCount;
    int reserved[4];
} wki_ltheuristic;
#endif

/* Constants: C(ours, theirs, value). */
#define WKI_CU_CONSTANTS(C)                                                                                  \
    C(SUCCESS, CUDA_SUCCESS, 0)                                                                              \
    C(OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY, 2)                                                            \
    C(NO_DEVICE_RESULT, CUDA_ERROR_NO_DEVICE, 100)                                                           \
    C(NOT_READY, CUDA_ERROR_NOT_READY, 600)                                                                  \
    C(STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING, 1)                                                        \
    C(EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING, 2)                                                      \
    C(HOST_PORTABLE, CU_MEMHOSTALLOC_PORTABLE, 1)                                                            \
    C(CAPTURE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, 1)                                          \
    C(ATTR_WARP_SIZE, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 10)                                                     \
    C(ATTR_SM_COUNT, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 16)                                           \
    C(ATTR_L2, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 38)                                                        \
    C(ATTR_SM_THREADS, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 39)                               \
    C(ATTR_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 75)                                          \
    C(ATTR_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 76)                                          \
    C(ATTR_SMEM_OPTIN, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 97)                            \
    C(LAUNCH_OVERLAP, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 6)                              \
    C(FUNC_SMEM, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 8)
#define WKI_LT_CONSTANTS(C)                                                                                  \
    C(LT_NOT_SUPPORTED, CUBLAS_STATUS_NOT_SUPPORTED, 15)                                                     \
    C(LT_COMPUTE_32F, CUBLAS_COMPUTE_32F, 68)                                                                \
    C(LT_R_32F, CUDA_R_32F, 0)                                                                               \
    C(LT_R_16BF, CUDA_R_16BF, 14)                                                                            \
    C(LT_LAYOUT_BATCH_COUNT, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, 5)                                          \
    C(LT_LAYOUT_BATCH_OFFSET, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, 6)                                \
    C(LT_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSA, 3)                                                        \
    C(LT_DESC_TRANSB, CUBLASLT_MATMUL_DESC_TRANSB, 4)                                                        \
    C(LT_DESC_EPILOGUE, CUBLASLT_MATMUL_DESC_EPILOGUE, 7)                                                    \
    C(LT_DESC_BIAS_POINTER, CUBLASLT_MATMUL_DESC_BIAS_POINTER, 8)                                            \
    C(LT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_DEFAULT, 1)                                                     \
    C(LT_EPILOGUE_RELU, CUBLASLT_EPILOGUE_RELU, 2)                                                           \
    C(LT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_BIAS, 4)                                                           \
    C(LT_EPILOGUE_RELU_BIAS, CUBLASLT_EPILOGUE_RELU_BIAS, 6)                                                 \
    C(LT_PREF_WORKSPACE, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, 1)                                        \
    C(LT_PREF_ALIGN_A, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, 5)                                        \
    C(LT_PREF_ALIGN_B, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, 6)                                        \
    C(LT_PREF_ALIGN_C, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, 7)                                        \
    C(LT_PREF_ALIGN_D, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, 8)                                        \
    C(LT_OP_N, CUBLAS_OP_N, 0)                                                                               \
    C(LT_OP_T, CUBLAS_OP_T, 1)

enum {
#define C(ours, theirs, value) WKI_##ours = (value),
    WKI_CU_CONSTANTS(C) WKI_LT_CONSTANTS(C)
#undef C
};

/* Functions: F(return type, exported name, parameters). */
#define WKI_CU_DRIVER_FUNCTIONS(F)                                                                           \
    F(wki_curesult, cuInit, (unsigned int flags))                                                            \
    F(wki_curesult, cuDriverGetVersion, (int *version))                                                      \
    F(wki_curesult, cuGetErrorName, (wki_curesult error, const char **name))                                 \
    F(wki_curesult, cuGetErrorString, (wki_curesult error, const char **text))                               \
    F(wki_curesult, cuDeviceGetCount, (int *count))                                                          \
    F(wki_curesult, cuDeviceGet, (wki_cudevice * device, int ordinal))                                       \
    F(wki_curesult, cuDeviceGetName, (char *name, int size, wki_cudevice device))                            \
    F(wki_curesult, cuDeviceTotalMem_v2, (size_t * bytes, wki_cudevice device))                              \
    F(wki_curesult, cuDeviceGetAttribute, (int *value, wki_cudeviceattr attribute, wki_cudevice device))     \
    F(wki_curesult, cuDevicePrimaryCtxRetain, (wki_cucontext * context, wki_cudevice device))                \
    F(wki_curesult, cuDevicePrimaryCtxRelease_v2, (wki_cudevice device))                                     \
    F(wki_curesult, cuCtxGetCurrent, (wki_cucontext * context))                                              \
    F(wki_curesult, cuCtxSetCurrent, (wki_cucontext context))                                                \
    F(wki_curesult, cuStreamCreate, (wki_custream * stream, unsigned int flags))                             \
    F(wki_curesult, cuStreamDestroy_v2, (wki_custream stream))                                               \
    F(wki_curesult, cuStreamSynchronize, (wki_custream stream))                                              \
    F(wki_curesult, cuStreamQuery, (wki_custream stream))                                                    \
    F(wki_curesult, cuStreamWaitEvent, (wki_custream stream, wki_cuevent event, unsigned int flags))         \
    F(wki_curesult, cuEventCreate, (wki_cuevent * event, unsigned int flags))                                \
    F(wki_curesult, cuEventDestroy_v2, (wki_cuevent event))                                                  \
    F(wki_curesult, cuEventRecord, (wki_cuevent event, wki_custream stream))                                 \
    F(wki_curesult, cuEventQuery, (wki_cuevent event))                                                       \
    F(wki_curesult, cuEventSynchronize, (wki_cuevent event))                                                 \
    F(wki_curesult, cuEventElapsedTime, (float *ms, wki_cuevent start, wki_cuevent end))                     \
    F(wki_curesult, cuMemAlloc_v2, (wki_cudeviceptr * address, size_t bytes))                                \
    F(wki_curesult, cuMemFree_v2, (wki_cudeviceptr address))                                                 \
    F(wki_curesult, cuMemGetInfo_v2, (size_t * free, size_t * total))                                        \
    F(wki_curesult, cuMemHostAlloc, (void **host, size_t bytes, unsigned int flags))                         \
    F(wki_curesult, cuMemFreeHost, (void *host))                                                             \
    F(wki_curesult, cuMemcpyHtoDAsync_v2,                                                                    \
      (wki_cudeviceptr to, const void *from, size_t bytes, wki_custream stream))                             \
    F(wki_curesult, cuMemcpyDtoHAsync_v2,                                                                    \
      (void *to, wki_cudeviceptr from, size_t bytes, wki_custream stream))                                   \
    F(wki_curesult, cuMemcpyDtoDAsync_v2,                                                                    \
      (wki_cudeviceptr to, wki_cudeviceptr from, size_t bytes, wki_custream stream))                         \
    F(wki_curesult, cuMemsetD8Async,                                                                         \
      (wki_cudeviceptr to, unsigned char value, size_t count, wki_custream stream))                          \
    F(wki_curesult, cuMemsetD32Async,                                                                        \
      (wki_cudeviceptr to, unsigned int value, size_t count, wki_custream stream))                           \
    F(wki_curesult, cuModuleLoadData, (wki_cumodule * module, const void *image))                            \
    F(wki_curesult, cuModuleUnload, (wki_cumodule module))                                                   \
    F(wki_curesult, cuModuleGetFunction, (wki_cufunction * function, wki_cumodule module, const char *name)) \
    F(wki_curesult, cuFuncSetAttribute, (wki_cufunction function, wki_cufuncattr attribute, int value))      \
    F(wki_curesult, cuLaunchKernel,                                                                          \
      (wki_cufunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,          \
       unsigned int by, unsigned int bz, unsigned int smem, wki_custream stream, void **params,              \
       void **extra))                                                                                        \
    F(wki_curesult, cuLaunchKernelEx,                                                                        \
      (const wki_culaunchconfig *config, wki_cufunction function, void **params, void **extra))              \
    F(wki_curesult, cuStreamBeginCapture_v2, (wki_custream stream, wki_cucapturemode mode))                  \
    F(wki_curesult, cuStreamEndCapture, (wki_custream stream, wki_cugraph * graph))                          \
    F(wki_curesult, cuGraphGetNodes, (wki_cugraph graph, wki_cugraphnode * nodes, size_t * count))           \
    F(wki_curesult, cuGraphGetRootNodes, (wki_cugraph graph, wki_cugraphnode * nodes, size_t * count))       \
    F(wki_curesult, cuGraphExecKernelNodeSetParams_v2,                                                       \
      (wki_cugraphexec exec, wki_cugraphnode node, const wki_cukernelnode *params))                          \
    F(wki_curesult, cuGraphInstantiateWithFlags,                                                             \
      (wki_cugraphexec * exec, wki_cugraph graph, unsigned long long flags))                                 \
    F(wki_curesult, cuGraphUpload, (wki_cugraphexec exec, wki_custream stream))                              \
    F(wki_curesult, cuGraphLaunch, (wki_cugraphexec exec, wki_custream stream))                              \
    F(wki_curesult, cuGraphExecDestroy, (wki_cugraphexec exec))                                              \
    F(wki_curesult, cuGraphDestroy, (wki_cugraph graph))

#define WKI_NVRTC_FUNCTIONS(F)                                                                               \
    F(const char *, nvrtcGetErrorString, (wki_nvrtcresult result))                                           \
    F(wki_nvrtcresult, nvrtcVersion, (int *major, int *minor))                                               \
    F(wki_nvrtcresult, nvrtcGetNumSupportedArchs, (int *count))                                              \
    F(wki_nvrtcresult, nvrtcGetSupportedArchs, (int *archs))                                                 \
    F(wki_nvrtcresult, nvrtcCreateProgram,                                                                   \
      (wki_nvrtcprogram * program, const char *source, const char *name, int n_headers,                      \
       const char *const *headers, const char *const *include_names))                                        \
    F(wki_nvrtcresult, nvrtcDestroyProgram, (wki_nvrtcprogram * program))                                    \
    F(wki_nvrtcresult, nvrtcCompileProgram,                                                                  \
      (wki_nvrtcprogram program, int n_options, const char *const *options))                                 \
    F(wki_nvrtcresult, nvrtcGetPTXSize, (wki_nvrtcprogram program, size_t * size))                           \
    F(wki_nvrtcresult, nvrtcGetPTX, (wki_nvrtcprogram program, char *ptx))                                   \
    F(wki_nvrtcresult, nvrtcGetCUBINSize, (wki_nvrtcprogram program, size_t * size))                         \
    F(wki_nvrtcresult, nvrtcGetCUBIN, (wki_nvrtcprogram program, char *cubin))                               \
    F(wki_nvrtcresult, nvrtcGetProgramLogSize, (wki_nvrtcprogram program, size_t * size))                    \
    F(wki_nvrtcresult, nvrtcGetProgramLog, (wki_nvrtcprogram program, char *log))

#define WKI_LT_FUNCTIONS(F)                                                                                  \
    F(const char *, cublasLtGetStatusName, (wki_ltstatus status))                                            \
    F(const char *, cublasLtGetStatusString, (wki_ltstatus status))                                          \
    F(size_t, cublasLtGetVersion, (void))                                                                    \
    F(wki_ltstatus, cublasLtCreate, (wki_lthandle * handle))                                                 \
    F(wki_ltstatus, cublasLtDestroy, (wki_lthandle handle))                                                  \
    F(wki_ltstatus, cublasLtMatmulDescCreate,                                                                \
      (wki_ltdesc * desc, wki_ltcompute compute, wki_ltdatatype scale))                                      \
    F(wki_ltstatus, cublasLtMatmulDescDestroy, (wki_ltdesc desc))                                            \
    F(wki_ltstatus, cublasLtMatmulDescSetAttribute,                                                          \
      (wki_ltdesc desc, wki_ltdescattr attribute, const void *value, size_t size))                           \
    F(wki_ltstatus, cublasLtMatrixLayoutCreate,                                                              \
      (wki_ltlayout * layout, wki_ltdatatype type, uint64_t rows, uint64_t cols, int64_t ld))                \
    F(wki_ltstatus, cublasLtMatrixLayoutDestroy, (wki_ltlayout layout))                                      \
    F(wki_ltstatus, cublasLtMatrixLayoutSetAttribute,                                                        \
      (wki_ltlayout layout, wki_ltlayoutattr attribute, const void *value, size_t size))                     \
    F(wki_ltstatus, cublasLtMatmulPreferenceCreate, (wki_ltpref * preference))                               \
    F(wki_ltstatus, cublasLtMatmulPreferenceDestroy, (wki_ltpref preference))                                \
    F(wki_ltstatus, cublasLtMatmulPreferenceSetAttribute,                                                    \
      (wki_ltpref preference, wki_ltprefattr attribute, const void *value, size_t size))                     \
    F(wki_ltstatus, cublasLtMatmulAlgoGetHeuristic,                                                          \
      (wki_lthandle handle, wki_ltdesc desc, wki_ltlayout a, wki_ltlayout b, wki_ltlayout c, wki_ltlayout d, \
       wki_ltpref preference, int requested, wki_ltheuristic *results, int *returned))                       \
    F(wki_ltstatus, cublasLtMatmul,                                                                          \
      (wki_lthandle handle, wki_ltdesc desc, const void *alpha, const void *a, wki_ltlayout a_layout,        \
       const void *b, wki_ltlayout b_layout, const void *beta, const void *c, wki_ltlayout c_layout,         \
       void *d, wki_ltlayout d_layout, const wki_ltalgo *algo, void *workspace, size_t workspace_size,       \
       wki_custream stream))

#define F(type, name, params) type(*name) params;
typedef struct wki_cu_driver_api {
    WKI_CU_DRIVER_FUNCTIONS(F)
} wki_cu_driver_api;
typedef struct wki_nvrtc_api {
    WKI_NVRTC_FUNCTIONS(F)
} wki_nvrtc_api;
typedef struct wki_lt_api {
    WKI_LT_FUNCTIONS(F)
} wki_lt_api;
#undef F
