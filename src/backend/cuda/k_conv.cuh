/* Convolution as products of matrices whose columns are never written down (k_tile.cuh): where a loader
 * needs an element of the column matrix, it goes and gets it from the image. */

/* What place k of the products' length means: a channel of the source and a tap of the kernel. */
struct wkk_tap {
    int off; /* elements from the source's place for tap (0, 0) of channel 0; where taps are strided, of the channel alone */
    short dh, dw; /* rows and columns of the source, before they are divided */
};

template <class T> struct wkk_conv_table {
    enum { PLACES = 512 }; /* described at a time; a multiple of KT */
    wkk_tap tap[PLACES];
    int weight[PLACES]; /* elements from a row's first weight */
};

/* The weights by the source's places: a column of the tile is an element of an image of y, and a thread's
 * own. */
template <class T> struct wkk_conv_loader {
    enum { PLACES = wkk_conv_table<T>::PLACES };
    const wkk_conv &p;
    wkk_conv_table<T> &table;
    const float *x, *wt[T::EA];
    int h0, w0; /* of tap (0, 0), before they are divided */

    __device__ __forceinline__ wkk_conv_loader(const wkk_conv &conv, const wkk_u64 *args,
                                               wkk_conv_table<T> &room, wkk_i64 m0, wkk_i64 q)
        : p(conv), table(room) {
        const float *weights = (const float *)wkk_ptr(p.wt, args);
        for (int e = 0; e < T::EA; e++) {
            int m = ((int)threadIdx.x + e * T::THREADS) / T::KT;
            wt[e] = m0 + m < p.m ? weights + (m0 + m) * p.wt_m : 0;
        }
        x = (const float *)wkk_ptr(p.x, args);
        h0 = w0 = -0x40000000; /* nowhere */
        if (q >= p.n * p.windows)
            return;
        wkk_i64 n = wkk_quot(q, p.windows);
        int at = (int)(q - n * p.windows), oh = at / (int)p.ow;
        h0 = oh * (int)p.up_h + (int)p.add_h;
        w0 = (at - oh * (int)p.ow) * (int)p.up_w + (int)p.add_w;
        x += n * p.xs[0];
        if (!p.down)
            x += h0 * p.xs[2] + w0 * p.xs[3];
    }
    /* Fills the table from place k on. */
    __device__ __forceinline__ void describe(wkk_i64 k) const {
        int taps = (int)(p.kh * p.kw), dir = (int)p.dir;
        for (int i = threadIdx.x; i < PLACES && k + i < p.k; i += T::THREADS) {
            int ch = (int)(k + i) / taps, t = (int)(k + i) - ch * taps, kh = t / (int)p.kw,
                kw = t - kh * (int)p.kw;
            table.weight[i] = (int)(ch * p.wt_ch + kh * p.wt_kh + kw * p.wt_kw);
            table.tap[i].off = (int)(ch * p.xs[1] + (p.down ? 0 : dir * (kh * p.xs[2] + kw * p.xs[3])));
            table.tap[i].dh = (short)(dir * kh);
            table.tap[i].dw = (short)(dir * kw);
        }
    }
    __device__ __forceinline__ float strided(wkk_tap t) const {
        int h = h0 + t.dh, v = w0 + t.dw;
        if (h < 0 || v < 0)
            return 0.0f;
        int hq = h / (int)p.div_h, wq = v / (int)p.div_w;
        bool in = hq * (int)p.div_h == h && wq * (int)p.div_w == v && hq < (int)p.h && wq < (int)p.w;
        return in ? x[t.off + hq * p.xs[2] + wq * p.xs[3]] : 0.0f;
    }
    __device__ __forceinline__ void load(wkk_i64 k, float (&a)[T::EA], float (&b)[T::EB]) {
        static_assert(T::THREADS == T::TN, "a column is a thread's own");
        if ((k & (PLACES - 1)) == 0) {
            __syncthreads(); /* nobody needs the last ones any more */
            describe(k);
            __syncthreads();
        }
        int at = (int)k & (PLACES - 1), n = p.k - k < T::KT ? (int)(p.k - k) : T::KT,
            mine = (int)threadIdx.x % T::KT;
        const wkk_tap *t = table.tap + at;
#pragma unroll
        for (int e = 0; e < T::EA; e++)
            a[e] = wt[e] && mine < n ? wt[e][table.weight[at + mine]] : 0.0f;
        if (p.down) {
#pragma unroll
            for (int e = 0; e < T::EB; e++)
                b[e] = e < n ? strided(t[e]) : 0.0f;
        } else {
#pragma unroll
            for (int e = 0; e < T::EB; e++) {
                wkk_tap d = t[e];
                bool in = e < n && (wkk_u32)(h0 + d.dh) < (wkk_u32)p.h && (wkk_u32)(w0 + d.dw) < (wkk_u32)p.w;
                b[e] = in ? x[d.off] : 0.0f;
            }
        }
    }
    __device__ __forceinline__ void store(typename T::stage &s, const float (&a)[T::EA],
                                          const float (&b)[T::EB]) const {
#pragma unroll
        for (int e = 0; e < T::EA; e++)
            s.a[threadIdx.x % T::KT][((int)threadIdx.x + e * T::THREADS) / T::KT] = a[e];
#pragma unroll
        for (int e = 0; e < T::EB; e++)
            s.b[e][threadIdx.x] = b[e];
    }
};

template <class T>
static __device__ __forceinline__ void wkk_conv_block(const wkk_conv &p, const wkk_u64 *args) {
    __shared__ typename T::memory m;
    __shared__ wkk_conv_table<T> table;
    wkk_i64 m0 = (wkk_i64)blockIdx.y * T::TM, q0 = (wkk_i64)blockIdx.x * T::TN;
    wkk_conv_loader<T> l(p, args, table, m0, q0 + threadIdx.x);
    float v[T::HIGH][T::WIDE];
    wkk_tile_sum<T>(m, l, 0, p.k, v);
    const float *bias = p.bias_stride >= 0 ? (const float *)wkk_ptr(p.bias, args) : 0;
    float *y = (float *)wkk_ptr(p.y, args);
    bool wide =
        (p.windows & 3) == 0 && ((wkk_u64)y & 15) == 0; /* then four columns are of one image, and together */
#pragma unroll
    for (int h = 0; h < T::HIGH; h++) {
        wkk_i64 i = m0 + T::row(h), q = q0 + T::column(h), left = p.n * p.windows - q;
        if (i >= p.m || left <= 0)
            continue;
        wkk_i64 n = wkk_quot(q, p.windows), at = q - n * p.windows;
        float add = bias ? bias[i * p.bias_stride] : 0.0f;
        float *to = y + (n * p.m + i) * p.windows + at;
#pragma unroll
        for (int w = 0; w < T::WIDE; w++)
            v[h][w] = wkk_act(bias ? v[h][w] + add : v[h][w], p.relu);
        if (wide) {
            *(float4 *)to = make_float4(v[h][0], v[h][1], v[h][2], v[h][3]);
            continue;
        }
#pragma unroll
        for (int w = 0; w < T::WIDE; w++)
            if (w < left) {
                *to++ = v[h][w];
                if (++at == p.windows) { /* the same row of the next image */
                    at = 0;
                    to += (p.m - 1) * p.windows;
                }
            }
    }
}

WKK_BODY wkk_conv16_body(const wkk_conv &p, const wkk_u64 *args) {
    wkk_conv_block<wkk_tile<16, 64, 8, 4, 16, 2>>(p, args);
}
WKK_BODY wkk_conv32_body(const wkk_conv &p, const wkk_u64 *args) {
    wkk_conv_block<wkk_tile<32, 64, 8, 4, 16, 1>>(p, args);
}
WKK_BODY wkk_conv64_body(const wkk_conv &p, const wkk_u64 *args) {
    wkk_conv_block<wkk_tile<64, 64, 8, 8, 16, 1>>(p, args);
}

/* ---- the gradient of the weights: dY (o, all windows) by the columns (all windows, c * kh * kw) -------- */

/* A thread has one window of every KT, some channels of dY and some places of a window. */
template <class T> struct wkk_conv_dw_loader {
    enum { STEP = T::THREADS / T::KT };
    const wkk_conv_dw &p;
    const float *dy, *x;
    wkk_i64 end, dy_row; /* of its first channel */
    wkk_i64 off[T::EB];
    int kh[T::EB], kw[T::EB];
    int rows;

    __device__ __forceinline__ wkk_conv_dw_loader(const wkk_conv_dw &conv, const wkk_u64 *args, wkk_i64 i0,
                                                  wkk_i64 j0, wkk_i64 q1)
        : p(conv), end(q1) {
        int mine = (int)threadIdx.x / T::KT;
        dy = (const float *)wkk_ptr(p.dy, args) + (i0 + mine) * p.ds[1];
        x = (const float *)wkk_ptr(p.x, args);
        rows = (int)(p.o - i0 - mine < T::TM ? p.o - i0 - mine : T::TM);
        for (int e = 0; e < T::EB; e++) {
            int j = (int)j0 + mine + e * STEP, taps = (int)(p.kh * p.kw), c = j / taps, t = j - c * taps;
            kh[e] = t / (int)p.kw;
            kw[e] = t - kh[e] * (int)p.kw;
            off[e] = c * p.xs[1] + kh[e] * p.xs[2] + kw[e] * p.xs[3];
            if (c >= p.c)
                kh[e] = -0x40000000;
        }
    }
    __device__ __forceinline__ void load(wkk_i64 k, float (&a)[T::EA], float (&b)[T::EB]) const {
        wkk_i64 q = k + threadIdx.x % T::KT, windows = p.oh * p.ow, n = wkk_quot(q, windows);
        int at = (int)(q - n * windows), oh = at / (int)p.ow, ow = at - oh * (int)p.ow;
        int h0 = oh * (int)p.sh - (int)p.ph, w0 = ow * (int)p.sw - (int)p.pw;
        const float *from = dy + n * p.ds[0] + oh * p.ds[2] + ow * p.ds[3];
        const float *src = x + n * p.xs[0] + h0 * p.xs[2] + w0 * p.xs[3];
#pragma unroll
        for (int e = 0; e < T::EA; e++)
            a[e] = q < end && e * STEP < rows ? from[e * STEP * p.ds[1]] : 0.0f;
#pragma unroll
        for (int e = 0; e < T::EB; e++) {
            bool in = q < end && (wkk_u32)(h0 + kh[e]) < (wkk_u32)p.h && (wkk_u32)(w0 + kw[e]) < (wkk_u32)p.w;
            b[e] = in ? src[off[e]] : 0.0f;
        }
    }
    __device__ __forceinline__ void store(typename T::stage &s, const float (&a)[T::EA],
                                          const float (&b)[T::EB]) const {
#pragma unroll
        for (int e = 0; e < T::EA; e++)
            s.a[threadIdx.x % T::KT][(int)threadIdx.x / T::KT + e * STEP] = a[e];
#pragma unroll
        for (int e = 0; e < T::EB; e++)
            s.b[threadIdx.x % T::KT][(int)threadIdx.x / T::KT + e * STEP] = b[e];
    }
};

template <class T>
static __device__ __forceinline__ void wkk_conv_dw_block(const wkk_conv_dw &p, const wkk_u64 *args) {
    __shared__ typename T::memory m;
    wkk_u32 splits = (wkk_u32)p.splits, tile = blockIdx.x / splits, split = blockIdx.x - tile * splits,
            across = (wkk_u32)p.across;
    wkk_i64 i0 = (wkk_i64)(tile / across) * T::TM, j0 = (wkk_i64)(tile % across) * T::TN,
            per = p.c * p.kh * p.kw;
    wkk_i64 all = p.n * p.oh * p.ow, q0 = split * p.stretch, q1 = q0 + p.stretch < all ? q0 + p.stretch : all;
    wkk_conv_dw_loader<T> l(p, args, i0, j0, q1);
    float v[T::HIGH][T::WIDE];
    wkk_tile_sum<T>(m, l, q0, q1, v);
    if (!wkk_tile_join<T>(v, (float *)p.part, (wkk_u32 *)p.count, tile, (int)split, (int)splits))
        return;
    float *dw = (float *)wkk_ptr(p.dw, args);
#pragma unroll
    for (int h = 0; h < T::HIGH; h++)
#pragma unroll
        for (int w = 0; w < T::WIDE; w++) {
            wkk_i64 i = i0 + T::row(h), j = j0 + T::column(h) + w;
            if (i < p.o && j < per)
                dw[i * per + j] = v[h][w];
        }
}

WKK_BODY wkk_conv_dw16_body(const wkk_conv_dw &p, const wkk_u64 *args) {
    wkk_conv_dw_block<wkk_tile<16, 16, 2, 2, 64, 4>>(p, args);
}
WKK_BODY wkk_conv_dw32_body(const wkk_conv_dw &p, const wkk_u64 *args) {
    wkk_conv_dw_block<wkk_tile<32, 32, 4, 4, 32, 4>>(p, args);
}
