/* Compares Wick's declarations of CUDA (backend/cuda/cu_api.h) with the real headers, at compile time only:
 * build it where cuda.h, nvrtc.h and cublasLt.h are installed, with -fsyntax-only or -c, and never link it. The
 * lists are expanded over CUDA's own types; that ours have the same size and layout is asserted apart. */
#include <cublasLt.h>
#include <cuda.h>
#include <nvrtc.h>

#include <stddef.h>
#include <stdint.h>

#define WKI_CU_FOREIGN_TYPES
typedef CUresult wki_curesult;
typedef CUdevice wki_cudevice;
typedef CUcontext wki_cucontext;
typedef CUstream wki_custream;
typedef CUevent wki_cuevent;
typedef CUmodule wki_cumodule;
typedef CUfunction wki_cufunction;
typedef CUgraph wki_cugraph;
typedef CUgraphNode wki_cugraphnode;
typedef CUgraphExec wki_cugraphexec;
typedef CUDA_KERNEL_NODE_PARAMS_v2 wki_cukernelnode;
typedef CUlaunchConfig wki_culaunchconfig;
typedef CUdeviceptr wki_cudeviceptr;
typedef CUdevice_attribute wki_cudeviceattr;
typedef CUfunction_attribute wki_cufuncattr;
typedef CUstreamCaptureMode wki_cucapturemode;
typedef nvrtcResult wki_nvrtcresult;
typedef nvrtcProgram wki_nvrtcprogram;
typedef cublasStatus_t wki_ltstatus;
typedef cublasComputeType_t wki_ltcompute;
typedef cudaDataType wki_ltdatatype;
typedef cublasLtMatmulDescAttributes_t wki_ltdescattr;
typedef cublasLtMatrixLayoutAttribute_t wki_ltlayoutattr;
typedef cublasLtMatmulPreferenceAttributes_t wki_ltprefattr;
typedef cublasLtHandle_t wki_lthandle;
typedef cublasLtMatmulDesc_t wki_ltdesc;
typedef cublasLtMatrixLayout_t wki_ltlayout;
typedef cublasLtMatmulPreference_t wki_ltpref;
typedef cublasLtMatmulAlgo_t wki_ltalgo;
typedef cublasLtMatmulHeuristicResult_t wki_ltheuristic;

#include "backend/cuda/cu_api.h"

#define C(ours, theirs, value) _Static_assert((value) == (theirs), #theirs);
WKI_CU_CONSTANTS(C)
WKI_LT_CONSTANTS(C)
#undef C

#define F(type, name, params)                                                                                \
    _Static_assert(__builtin_types_compatible_p(__typeof__(&(name)), type(*) params), #name);
WKI_CU_DRIVER_FUNCTIONS(F)
WKI_NVRTC_FUNCTIONS(F)
WKI_LT_FUNCTIONS(F)
#undef F

/* Our stand-ins: int for each enum, a pointer for each handle, 64 bits for a device address, and these two. */
#define AS_INT(type) _Static_assert(sizeof(type) == sizeof(int), #type);
#define AS_POINTER(type) _Static_assert(sizeof(type) == sizeof(void *), #type);
AS_INT(CUresult)
AS_INT(CUdevice)
AS_INT(CUdevice_attribute)
AS_INT(CUfunction_attribute)
AS_INT(CUstreamCaptureMode)
AS_INT(nvrtcResult)
AS_INT(cublasStatus_t)
AS_INT(cublasComputeType_t)
AS_INT(cublasOperation_t)
AS_INT(cublasLtEpilogue_t)
AS_INT(cudaDataType)
AS_INT(cublasLtMatmulDescAttributes_t)
AS_INT(cublasLtMatrixLayoutAttribute_t)
AS_INT(cublasLtMatmulPreferenceAttributes_t)
AS_POINTER(cublasLtMatmulDesc_t)
AS_POINTER(cublasLtMatrixLayout_t)
AS_POINTER(cublasLtMatmulPreference_t)
_Static_assert(__builtin_types_compatible_p(CUdeviceptr, unsigned long long), "CUdeviceptr");
_Static_assert(__builtin_types_compatible_p(CUcontext, struct CUctx_st *), "CUcontext");
_Static_assert(__builtin_types_compatible_p(CUstream, struct CUstream_st *), "CUstream");
_Static_assert(__builtin_types_compatible_p(CUevent, struct CUevent_st *), "CUevent");
_Static_assert(__builtin_types_compatible_p(CUmodule, struct CUmod_st *), "CUmodule");
_Static_assert(__builtin_types_compatible_p(CUfunction, struct CUfunc_st *), "CUfunction");
_Static_assert(__builtin_types_compatible_p(CUgraph, struct CUgraph_st *), "CUgraph");
_Static_assert(__builtin_types_compatible_p(CUgraphExec, struct CUgraphExec_st *), "CUgraphExec");
_Static_assert(__builtin_types_compatible_p(nvrtcProgram, struct _nvrtcProgram *), "nvrtcProgram");
_Static_assert(__builtin_types_compatible_p(cublasLtHandle_t, struct cublasLtContext *), "cublasLtHandle_t");
_Static_assert(sizeof(cublasLtMatmulAlgo_t) == 8 * sizeof(uint64_t), "algorithm");

struct our_node {
    CUfunction function;
    unsigned int grid[3], block[3], smem;
    void **params, **extra;
    void *kernel;
    CUcontext context;
};

struct our_heuristic {
    uint64_t algo[8];
    size_t workspaceSize;
    int state;
    float wavesCount;
    int reserved[4];
};
#define SAME(member)                                                                                         \
    _Static_assert(offsetof(struct our_heuristic, member) ==                                                 \
                       offsetof(cublasLtMatmulHeuristicResult_t, member),                                    \
                   #member);
SAME(workspaceSize)
SAME(state)
SAME(wavesCount)
SAME(reserved)
/* Ours has arrays where theirs has three members. */
#define NODE(ours, theirs)                                                                                   \
    _Static_assert(offsetof(struct our_node, ours) == offsetof(CUDA_KERNEL_NODE_PARAMS_v2, theirs), #theirs);
NODE(function, func)
NODE(grid, gridDimX)
NODE(block, blockDimX)
NODE(smem, sharedMemBytes)
NODE(params, kernelParams)
NODE(extra, extra)
NODE(kernel, kern)
NODE(context, ctx)
_Static_assert(sizeof(CUlaunchAttribute) == 72 && offsetof(CUlaunchAttribute, value) == 8 &&
                   offsetof(CUlaunchAttributeValue, programmaticStreamSerializationAllowed) == 0,
               "launch attribute");
_Static_assert(offsetof(CUlaunchConfig, hStream) == 32 && offsetof(CUlaunchConfig, attrs) == 40 &&
                   offsetof(CUlaunchConfig, numAttrs) == 48 && sizeof(CUlaunchConfig) == 56,
               "launch configuration");
_Static_assert(sizeof(struct our_node) == sizeof(CUDA_KERNEL_NODE_PARAMS_v2), "kernel node");
_Static_assert(sizeof(struct our_heuristic) == sizeof(cublasLtMatmulHeuristicResult_t), "heuristic");
