/* What the CUDA backend builds on: the driver, devices, streams, memory, kernels compiled at run time, matrix
 * products and graphs, over libraries opened when first needed. Nothing of CUDA is linked or needed to build.
 *
 * Every function that can fail returns WKI_CU_OK (0) or a wki_cu_status and fills *err (which may be NULL); its
 * text names the CUDA call and result. A failing call leaves its output parameters NULL or 0. Functions may be
 * called from any thread: they make the device's primary context current on it and leave it so. Handles of one
 * stream, graph or ring are for one thread at a time; wki_cu, wki_nvrtc, devices, plans and the allocator are
 * shared safely. Handles are closed in the reverse order of opening; a device outlives all that was made on it. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum wki_cu_status {
    WKI_CU_OK = 0,
    WKI_CU_NO_LIBRARY,    /* a shared library, or a symbol in it, was not found */
    WKI_CU_NO_DEVICE,     /* the driver is there and shows no device, or not the one asked for */
    WKI_CU_HOST_MEMORY,   /* the host heap is exhausted */
    WKI_CU_DEVICE_MEMORY, /* the device is, or the limit set on it */
    WKI_CU_COMPILE,       /* NVRTC refused the source */
    WKI_CU_UNSUPPORTED,   /* well-formed but not offered: copy, fall back or take another way */
    WKI_CU_INVALID,       /* the caller broke a rule stated here */
    WKI_CU_FAILED,        /* any other failure a CUDA call reported */
} wki_cu_status;

typedef struct wki_cu_error {
    int code;        /* wki_cu_status */
    int result;      /* the library's own code (CUresult, nvrtcResult, cublasStatus_t), else 0 */
    char text[1008]; /* one line */
} wki_cu_error;

typedef struct wki_cu wki_cu;               /* the driver and its devices */
typedef struct wki_nvrtc wki_nvrtc;         /* the run-time compiler; needs no driver */
typedef struct wki_cu_device wki_cu_device; /* one device's primary context, allocator and caches */
typedef struct wki_cu_stream wki_cu_stream;
typedef struct CUevent_st wki_cu_event;
typedef struct CUmod_st wki_cu_module;
typedef struct CUfunc_st wki_cu_function;
typedef struct wki_cu_gemm_plan wki_cu_gemm_plan;
typedef struct wki_cu_graph wki_cu_graph;
typedef struct wki_cu_ring wki_cu_ring;
typedef unsigned long long wki_cu_ptr; /* a device address; 0 is none */

/* ---- Libraries and devices ------------------------------------------------------------------------------- */

/* All zero is the default: libraries are looked for in $WICK_CUDA_PATH, on the loader's path, in the CUDA
 * toolkit's directories and in Python's site-packages. */
typedef struct wki_cu_options {
    const char *path;     /* directories separated by ':' to look in first; NULL: $WICK_CUDA_PATH */
    const char *driver;   /* file name or path in place of libcuda.so.1 */
    const char *nvrtc;    /* likewise of libnvrtc.so.13 and .12 */
    const char *cublaslt; /* likewise of libcublasLt.so.13 and .12 */
} wki_cu_options;

typedef struct wki_cu_device_info {
    char name[128];
    int major, minor; /* compute capability */
    int sm_count;
    int sm_threads; /* resident threads a multiprocessor */
    int warp_size;
    size_t memory;     /* bytes */
    size_t l2;         /* bytes */
    size_t smem_optin; /* dynamic shared memory a block may ask for, bytes */
} wki_cu_device_info;

/* Opens the driver and counts devices; options (NULL: defaults) and its strings are copied. Without a driver
 * or a device the text begins "no CUDA device". */
int wki_cu_open(const wki_cu_options *options, wki_cu **out, wki_cu_error *err);
void wki_cu_close(wki_cu *cu);
int wki_cu_device_count(const wki_cu *cu);
int wki_cu_driver_version(const wki_cu *cu); /* 1000 * major + 10 * minor */
int wki_cu_info(const wki_cu *cu, int ordinal, wki_cu_device_info *out, wki_cu_error *err);

/* The compiler that fits the driver, opened once; owned by cu. */
int wki_cu_nvrtc(wki_cu *cu, wki_nvrtc **out, wki_cu_error *err);

/* memory_limit: bytes the allocator may take from the driver; 0: no limit but the device's. */
int wki_cu_device_open(wki_cu *cu, int ordinal, size_t memory_limit, wki_cu_device **out, wki_cu_error *err);
/* Frees every allocation, live ones too. */
void wki_cu_device_close(wki_cu_device *dev);
const wki_cu_device_info *wki_cu_device_info_of(const wki_cu_device *dev);

/* ---- Streams, events, copies ----------------------------------------------------------------------------- */

/* A stream that does not synchronise with the legacy default stream. Destroying waits for it. */
int wki_cu_stream_create(wki_cu_device *dev, wki_cu_stream **out, wki_cu_error *err);
void wki_cu_stream_destroy(wki_cu_stream *s);
wki_cu_device *wki_cu_stream_device(const wki_cu_stream *s);
void *wki_cu_stream_raw(const wki_cu_stream *s); /* CUstream, which is a cudaStream_t, for other libraries */
int wki_cu_stream_sync(wki_cu_stream *s, wki_cu_error *err);
int wki_cu_stream_done(wki_cu_stream *s, bool *done, wki_cu_error *err);

/* What is queued on `s` from now on runs after what `on` holds now. */
int wki_cu_stream_wait(wki_cu_stream *s, wki_cu_stream *on, wki_cu_error *err);

int wki_cu_event_create(wki_cu_device *dev, bool timing, wki_cu_event **out, wki_cu_error *err);
void wki_cu_event_destroy(wki_cu_device *dev, wki_cu_event *e);
int wki_cu_event_record(wki_cu_event *e, wki_cu_stream *s, wki_cu_error *err);
/* The stream waits, not the host. */
int wki_cu_event_wait(wki_cu_event *e, wki_cu_stream *s, wki_cu_error *err);
int wki_cu_event_sync(wki_cu_device *dev, wki_cu_event *e, wki_cu_error *err);
/* Milliseconds between two finished events with timing. */
int wki_cu_event_elapsed(wki_cu_device *dev, wki_cu_event *start, wki_cu_event *end, float *ms,
                         wki_cu_error *err);

/* Queued copies and fills, in bytes except where said. From or to pageable host memory the call returns once
 * the host memory may be reused or, for reads, after wki_cu_stream_sync. */
int wki_cu_copy_h2d(wki_cu_stream *s, wki_cu_ptr to, const void *from, size_t bytes, wki_cu_error *err);
int wki_cu_copy_d2h(wki_cu_stream *s, void *to, wki_cu_ptr from, size_t bytes, wki_cu_error *err);
int wki_cu_copy_d2d(wki_cu_stream *s, wki_cu_ptr to, wki_cu_ptr from, size_t bytes, wki_cu_error *err);
int wki_cu_fill8(wki_cu_stream *s, wki_cu_ptr to, uint8_t value, size_t bytes, wki_cu_error *err);
int wki_cu_fill32(wki_cu_stream *s, wki_cu_ptr to, uint32_t value, size_t words, wki_cu_error *err);
/* The same with the stream waited for. */
int wki_cu_write(wki_cu_stream *s, wki_cu_ptr to, const void *from, size_t bytes, wki_cu_error *err);
int wki_cu_read(wki_cu_stream *s, void *to, wki_cu_ptr from, size_t bytes, wki_cu_error *err);

/* Page-locked host memory, visible to every device. */
int wki_cu_host_alloc(wki_cu_device *dev, size_t bytes, void **out, wki_cu_error *err);
void wki_cu_host_free(wki_cu_device *dev, void *p);

/* ---- Device memory --------------------------------------------------------------------------------------- */

typedef struct wki_cu_memory_stats {
    size_t allocated, peak_allocated; /* bytes in live blocks, rounding included */
    size_t requested;                 /* bytes asked for in live blocks */
    size_t reserved, peak_reserved;   /* bytes taken from the driver */
    size_t largest_free;              /* bytes of the largest cached block */
    size_t live;                      /* blocks */
    uint64_t allocs, driver_allocs, driver_frees;
} wki_cu_memory_stats;

/* A block of device memory, 512-byte aligned (0 bytes: *out is 0), for use on s. Cached blocks last used on s
 * are reused at once, in stream order; those of another stream only when it is idle or, when memory is short,
 * behind an event. tag says for whom, e.g. the op; the string must live as long as the block. Refused while s
 * is being captured: a graph uses memory allocated before. Out of memory: the cache is given back to the driver
 * and the driver asked again; then the text tells the request, what is free and who holds the most. */
int wki_cu_alloc(wki_cu_stream *s, size_t bytes, const char *tag, wki_cu_ptr *out, wki_cu_error *err);
/* Returns a block whose last use was queued on s. 0 is allowed. */
int wki_cu_free(wki_cu_stream *s, wki_cu_ptr p, wki_cu_error *err);
void wki_cu_memory_stats_get(wki_cu_device *dev, wki_cu_memory_stats *out);
/* Gives cached memory back to the driver, after waiting for the streams. */
int wki_cu_memory_trim(wki_cu_device *dev, wki_cu_error *err);

/* ---- Kernels --------------------------------------------------------------------------------------------- */

/* The compiler alone. prefer_major: CUDA major version to try first (0: 13). */
int wki_nvrtc_open(const wki_cu_options *options, int prefer_major, wki_nvrtc **out, wki_cu_error *err);
void wki_nvrtc_close(wki_nvrtc *rtc);
void wki_nvrtc_version(const wki_nvrtc *rtc, int *major, int *minor);
/* "sm_90" when this compiler knows the capability, else the newest "compute_NN" below it, whose PTX the driver
 * compiles. */
int wki_nvrtc_arch(const wki_nvrtc *rtc, int major, int minor, char arch[24], wki_cu_error *err);

/* CUDA C++17 text. Always compiled with --fmad=false and -default-device; options are added. */
typedef struct wki_nvrtc_source {
    const char *text;
    const char *name;           /* as it appears in messages */
    const char *arch;           /* "sm_NN[a]" gives a cubin, "compute_NN" PTX */
    const char *const *options; /* may be NULL */
    int n_options;
} wki_nvrtc_source;

typedef struct wki_nvrtc_binary {
    char *data;  /* cubin, or PTX with its NUL */
    size_t size; /* bytes */
    char *log;   /* warnings, or the errors when compiling failed; NULL when there are none */
} wki_nvrtc_binary;

/* The caller frees the binary in either case. err's text holds the first error line of the log. */
int wki_nvrtc_compile(wki_nvrtc *rtc, const wki_nvrtc_source *source, wki_nvrtc_binary *out,
                      wki_cu_error *err);
void wki_nvrtc_binary_free(wki_nvrtc_binary *binary);

int wki_cu_module_load(wki_cu_device *dev, const void *image, wki_cu_module **out, wki_cu_error *err);
void wki_cu_module_unload(wki_cu_device *dev, wki_cu_module *m);
/* The module of a source for this device, compiled and loaded at most once: kept by text, arch and options until
 * the device closes. source->arch may be NULL for the device's own. */
int wki_cu_module_get(wki_cu_device *dev, const wki_nvrtc_source *source, wki_cu_module **out,
                      wki_cu_error *err);
/* An extern "C" kernel. max_smem: the most dynamic shared memory it will be launched with, bytes. Valid as long
 * as its module. */
int wki_cu_module_function(wki_cu_device *dev, wki_cu_module *m, const char *name, unsigned max_smem,
                           wki_cu_function **out, wki_cu_error *err);

typedef struct wki_cu_kernel {
    wki_cu_function *function;
    unsigned grid[3], block[3];
    unsigned smem;    /* dynamic shared memory, bytes */
    void **params;    /* pointers to the arguments, read during the call */
    const char *name; /* for messages; may be NULL */
    bool overlap;     /* it waits for the kernel before it by itself (griddepcontrol.wait) */
} wki_cu_kernel;

int wki_cu_launch(wki_cu_stream *s, const wki_cu_kernel *k, wki_cu_error *err);
/* In order; stops at the first that fails. */
int wki_cu_launch_many(wki_cu_stream *s, const wki_cu_kernel *k, size_t n, wki_cu_error *err);

/* ---- Matrix products ------------------------------------------------------------------------------------- */

typedef enum wki_cu_gemm_type { WKI_CU_GEMM_F32, WKI_CU_GEMM_BF16 } wki_cu_gemm_type;
typedef enum wki_cu_epilogue {
    WKI_CU_EPILOGUE_NONE,
    WKI_CU_EPILOGUE_BIAS,      /* + bias[n], one per column of C */
    WKI_CU_EPILOGUE_RELU,      /* max(x, 0) */
    WKI_CU_EPILOGUE_RELU_BIAS, /* max(x + bias[n], 0) */
} wki_cu_epilogue;

/* C[m,n] = epilogue(alpha * A[m,k] B[k,n] + beta * C) for each of `batch`, accumulated in f32. Strides count
 * elements: A's element (i,p) is at i*a_rs + p*a_cs. Of each of A and B one stride must be 1 (that of a
 * dimension of length 1 does not matter) and the other at least the length of a row or column; else, or when k
 * is 0, the plan is WKI_CU_UNSUPPORTED and the caller copies. Batch strides of A and B may be 0. C is row-major
 * with rows c_ld >= n apart. A, B, C and bias have one type. A bf16 product with a bias may be rounded once before
 * the bias is added and once after: which, depends on the algorithm that cuBLASLt's heuristic picks. */
typedef struct wki_cu_gemm {
    wki_cu_gemm_type type;
    wki_cu_epilogue epilogue;
    int64_t m, n, k, batch;
    int64_t a_rs, a_cs, a_bs;
    int64_t b_rs, b_cs, b_bs;
    int64_t c_ld, c_bs;
    size_t alignment;       /* bytes by which A, B, C and bias are aligned; a power of two; 0: 16 */
    size_t workspace_limit; /* bytes; 0: WKI_CU_GEMM_WORKSPACE */
} wki_cu_gemm;

#define WKI_CU_GEMM_WORKSPACE ((size_t)32 << 20)

typedef struct wki_cu_gemm_args {
    wki_cu_ptr a, b, c, bias;
    float alpha, beta;
    wki_cu_ptr workspace; /* 0: the stream's own, allocated on first need, so not inside a capture */
    size_t workspace_bytes;
} wki_cu_gemm_args;

/* Descriptors and the heuristic's first algorithm for these shapes, made once and kept until the device closes.
 * Prepare before capturing. m, n or batch of 0 gives a plan that does nothing. */
int wki_cu_gemm_prepare(wki_cu_device *dev, const wki_cu_gemm *g, wki_cu_gemm_plan **out, wki_cu_error *err);
size_t wki_cu_gemm_workspace(const wki_cu_gemm_plan *plan); /* bytes it needs */
/* The pointers must be aligned as prepared for. May be captured. */
int wki_cu_gemm_run(wki_cu_gemm_plan *plan, wki_cu_stream *s, const wki_cu_gemm_args *args,
                    wki_cu_error *err);

/* ---- Graphs ---------------------------------------------------------------------------------------------- */

/* Between begin and end, what is queued on s is recorded and not run; the calling thread may not wait, copy to
 * pageable memory or allocate. After a failed call inside, end fails too and the stream is usable again. */
int wki_cu_capture_begin(wki_cu_stream *s, wki_cu_error *err);
int wki_cu_capture_end(wki_cu_stream *s, wki_cu_graph **out, wki_cu_error *err);
void wki_cu_capture_abort(wki_cu_stream *s);
bool wki_cu_capturing(const wki_cu_stream *s);

size_t wki_cu_graph_nodes(const wki_cu_graph *g);
int wki_cu_graph_instantiate(wki_cu_graph *g, wki_cu_error *err); /* before the next two */
int wki_cu_graph_upload(wki_cu_graph *g, wki_cu_stream *s, wki_cu_error *err);
int wki_cu_graph_launch(wki_cu_graph *g, wki_cu_stream *s, wki_cu_error *err);
/* New arguments, for the launches that follow, of the kernel that the graph begins with; its grid stays. */
int wki_cu_graph_first(wki_cu_graph *g, const wki_cu_kernel *k, wki_cu_error *err);
void wki_cu_graph_destroy(wki_cu_graph *g); /* not while it runs */

/* ---- Argument ring --------------------------------------------------------------------------------------- */

/* n >= 4 page-locked host blocks of `bytes`, used in turn, that feed device memory on stream s. */
int wki_cu_ring_create(wki_cu_stream *s, size_t n, size_t bytes, wki_cu_ring **out, wki_cu_error *err);
void wki_cu_ring_destroy(wki_cu_ring *r); /* waits for copies still queued */
/* The next block, once its last copy has run; the same one again until it is submitted. */
int wki_cu_ring_acquire(wki_cu_ring *r, void **host, wki_cu_error *err);
/* Queues the copy of its first `bytes` to `to`. Not inside a capture. */
int wki_cu_ring_submit(wki_cu_ring *r, wki_cu_ptr to, size_t bytes, wki_cu_error *err);
