/* Largest elements of windows; sums and gathers by the element each window chose. */

WKK_BODY wkk_max_pool_body(const wkk_pool &p, const wkk_u64 *args) {
    const float *x = (const float *)wkk_ptr(p.x, args);
    float *y = (float *)wkk_ptr(p.y, args);
    int *idx = (int *)wkk_ptr(p.idx, args);
    WKK_EACH(i, p.total) {
        wkk_i64 plane = wkk_quot(i, p.oh * p.ow), n = wkk_quot(plane, p.c), c = plane - n * p.c;
        int at = (int)(i - plane * (p.oh * p.ow)), oh = at / (int)p.ow, ow = at - oh * (int)p.ow;
        const float *src = x + n * p.xs[0] + c * p.xs[1];
        int h0 = oh * (int)p.sh - (int)p.ph, w0 = ow * (int)p.sw - (int)p.pw, where = -1;
        int h1 = (int)(h0 + p.kh < p.h ? h0 + p.kh : p.h), w1 = (int)(w0 + p.kw < p.w ? w0 + p.kw : p.w);
        float best = 0.0f;
        for (int h = h0 < 0 ? 0 : h0; h < h1; h++)
            for (int w = w0 < 0 ? 0 : w0; w < w1; w++) {
                float v = src[h * p.xs[2] + w * p.xs[3]];
                if (where < 0 || v > best || (v != v && best == best)) {
                    best = v;
                    where = h * (int)p.w + w;
                }
            }
        y[i] = best;
        idx[i] = where;
    }
}

/* Where a plane's windows begin in an operand with these strides. */
static __device__ __forceinline__ wkk_i64 wkk_plane(const wkk_i64 *stride, wkk_i64 plane, wkk_i64 c) {
    wkk_i64 n = wkk_quot(plane, c);
    return n * stride[0] + (plane - n * c) * stride[1];
}

static __device__ __forceinline__ wkk_i64 wkk_window(const wkk_i64 *stride, int at, int ow) {
    int h = at / ow;
    return h * stride[2] + (at - h * ow) * stride[3];
}

/* Minima and maxima of integers do not depend on the order in which they are taken. */
static __device__ __forceinline__ void wkk_mark(const wkk_pool_grad &p, const wkk_u64 *args, const int *idx, int at, int *first,
                                                int *last) {
    wkk_u32 e = (wkk_u32)idx[wkk_window(p.is, at, (int)p.ow)];
    if (e >= p.plane) {
        wkk_fault(args, p.op);
        return;
    }
    atomicMin(first + e, at);
    atomicMax(last + e, at);
}

/* Element e adds up its windows in order. */
static __device__ __forceinline__ float wkk_sum_windows(const wkk_pool_grad &p, const float *dy, const int *idx, int e, int first,
                                                        int last) {
    float sum = 0.0f;
    for (int at = first; at <= last; at++)
        if (at == first || at == last || idx[wkk_window(p.is, at, (int)p.ow)] == e)
            sum += dy[wkk_window(p.ds, at, (int)p.ow)];
    return sum;
}

/* A block per plane. */
template <int PLANE> static __device__ __forceinline__ void wkk_pool_grad_block(const wkk_pool_grad &p, const wkk_u64 *args) {
    __shared__ int first[PLANE], last[PLANE];
    int plane_size = (int)p.plane, windows = (int)(p.oh * p.ow);
    for (wkk_i64 plane = blockIdx.x; plane < p.planes; plane += gridDim.x) {
        const float *dy = (const float *)wkk_ptr(p.dy, args) + wkk_plane(p.ds, plane, p.c);
        const int *idx = (const int *)wkk_ptr(p.idx, args) + wkk_plane(p.is, plane, p.c);
        float *dx = (float *)wkk_ptr(p.dx, args) + plane * p.plane;
        for (int e = threadIdx.x; e < plane_size; e += WKK_THREADS) {
            first[e] = 0x7fffffff;
            last[e] = -1;
        }
        __syncthreads();
        for (int at = threadIdx.x; at < windows; at += WKK_THREADS)
            wkk_mark(p, args, idx, at, first, last);
        __syncthreads();
        for (int e = threadIdx.x; e < plane_size; e += WKK_THREADS)
            dx[e] = wkk_sum_windows(p, dy, idx, e, first[e], last[e]);
        __syncthreads();
    }
}

WKK_BODY wkk_pool_grad_small_body(const wkk_pool_grad &p, const wkk_u64 *args) {
    wkk_pool_grad_block<WKK_SMALL_PLANE>(p, args);
}
WKK_BODY wkk_pool_grad_large_body(const wkk_pool_grad &p, const wkk_u64 *args) {
    wkk_pool_grad_block<WKK_LARGE_PLANE>(p, args);
}

/* The same for planes of any size, in three kernels. */
WKK_BODY wkk_pool_grad_clear_body(const wkk_pool_grad &p, const wkk_u64 *args) {
    int *first = (int *)p.first, *last = (int *)p.last;
    WKK_EACH(i, p.planes * p.plane) {
        first[i] = 0x7fffffff;
        last[i] = -1;
    }
}

WKK_BODY wkk_pool_grad_mark_body(const wkk_pool_grad &p, const wkk_u64 *args) {
    const int *idx = (const int *)wkk_ptr(p.idx, args);
    wkk_i64 windows = p.oh * p.ow;
    WKK_EACH(i, p.planes * windows) {
        wkk_i64 plane = wkk_quot(i, windows), at = plane * p.plane;
        wkk_mark(p, args, idx + wkk_plane(p.is, plane, p.c), (int)(i - plane * windows), (int *)p.first + at, (int *)p.last + at);
    }
}

WKK_BODY wkk_pool_grad_sum_body(const wkk_pool_grad &p, const wkk_u64 *args) {
    const float *dy = (const float *)wkk_ptr(p.dy, args);
    const int *idx = (const int *)wkk_ptr(p.idx, args), *first = (const int *)p.first, *last = (const int *)p.last;
    float *dx = (float *)wkk_ptr(p.dx, args);
    WKK_EACH(i, p.planes * p.plane) {
        wkk_i64 plane = wkk_quot(i, p.plane);
        dx[i] = wkk_sum_windows(p, dy + wkk_plane(p.ds, plane, p.c), idx + wkk_plane(p.is, plane, p.c), (int)(i - plane * p.plane),
                                first[i], last[i]);
    }
}

WKK_BODY wkk_max_pool_gather_body(const wkk_pool_gather &p, const wkk_u64 *args) {
    const float *x = (const float *)wkk_ptr(p.x, args);
    const int *idx = (const int *)wkk_ptr(p.idx, args);
    float *y = (float *)wkk_ptr(p.y, args);
    WKK_EACH(i, p.total) {
        wkk_i64 plane = wkk_quot(i, p.oh * p.ow), n = wkk_quot(plane, p.c), c = plane - n * p.c;
        int at = (int)(i - plane * (p.oh * p.ow)), oh = at / (int)p.ow, ow = at - oh * (int)p.ow;
        wkk_u32 e = (wkk_u32)idx[n * p.is[0] + c * p.is[1] + oh * p.is[2] + ow * p.is[3]];
        float v = 0.0f;
        if (e < p.plane) {
            wkk_u32 h = e / (wkk_u32)p.w;
            v = x[n * p.xs[0] + c * p.xs[1] + h * p.xs[2] + (e - h * p.w) * p.xs[3]];
        } else {
            wkk_fault(args, p.op);
        }
        y[i] = v;
    }
}
