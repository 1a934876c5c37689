/* What hand-written CUDA kernels share. Stands behind k_params.cuh. */
#pragma nv_diag_suppress 177 /* a program may have no use for some of these */
typedef unsigned wkk_u32;

/* What a kernel does after wkk_begin. */
#define WKK_BODY static __device__ __forceinline__ void

/* What every kernel begins with. Launched while the one before it still runs, it waits for that to end. Where
 * its own grid is small, the next one may come and wait already; a large grid needs the room itself. */
static __device__ __forceinline__ void wkk_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (gridDim.x * gridDim.y <= WKK_SMALL_GRID)
        asm volatile("griddepcontrol.launch_dependents;");
#endif
}
/* i over [0, n), shared out among all threads of the grid. */
#define WKK_EACH(i, n)                                                                                                    \
    for (wkk_i64 i = (wkk_i64)blockIdx.x * WKK_THREADS + threadIdx.x; i < (n); i += (wkk_i64)gridDim.x * WKK_THREADS)

/* relu as loop programs have it: NaN stays, -0 becomes 0. */
static __device__ __forceinline__ float wkk_act(float x, wkk_i64 relu) {
    return !relu || x > 0.0f || x != x ? x : 0.0f;
}

/* a / b for a >= 0, b > 0: division of 64 bits costs many times that of 32. */
static __device__ __forceinline__ wkk_i64 wkk_quot(wkk_i64 a, wkk_i64 b) {
    return (a | b) >> 32 == 0 ? (wkk_i64)((wkk_u32)a / (wkk_u32)b) : a / b;
}

static __device__ __forceinline__ char *wkk_ptr(wkk_at at, const wkk_u64 *args) {
    return (char *)(at.slot < 0 ? at.base : args[at.slot] + at.base);
}

/* The offset of element i, counted row-major. */
static __device__ __forceinline__ wkk_i64 wkk_offset(int nd, const wkk_i64 *size, const wkk_i64 *stride, wkk_i64 i) {
    wkk_i64 at = 0;
    for (int d = nd - 1; d > 0; d--) {
        wkk_i64 q = wkk_quot(i, size[d]);
        at += (i - q * size[d]) * stride[d];
        i = q;
    }
    return nd ? at + i * stride[0] : 0;
}

static __device__ __forceinline__ wkk_i64 wkk_view_offset(const wkk_view &v, wkk_i64 i) {
    return wkk_offset((int)v.nd, v.size, v.stride, i);
}

/* The op whose number this is gets reported, unless another fault came first. The fault word is in the host's memory; the stop word
   is the device's own note of it. */
static __device__ __forceinline__ void wkk_fault(const wkk_u64 *args, wkk_i64 op) {
    volatile int *stop = (volatile int *)args[WKK_STOP_WORD];
    if (*stop)
        return;
    *stop = 1;
    *(volatile int *)args[WKK_FAULT_WORD] = (int)op + 1;
}
