/* Matrix products of any strides by own kernels (k_tile.cuh): small ones, which a library call costs more
 * than it computes. */

/* What a thread loads of one operand for a stage: N elements, dat rows (or columns) and dk deep apart. */
template <int N> struct wkk_loads {
    const float *p;
    wkk_i64 step, cs; /* from load to load; along k */
    wkk_i64 room;     /* rows from the thread's first on that exist */
    int at, k, dat, dk;

    /* Neighbouring threads load neighbours in memory. rs: the stride along y, from row `first` to `end`. */
    __device__ __forceinline__ wkk_loads(const float *base, wkk_i64 rs, wkk_i64 along, wkk_i64 first,
                                         wkk_i64 end, int tile, int depth, int threads)
        : cs(along) {
        int t = threadIdx.x;
        bool deep = rs != 1;
        at = deep ? t / depth : t % tile;
        k = deep ? t % depth : t / tile;
        dat = deep ? threads / depth : 0;
        dk = deep ? 0 : threads / tile;
        p = base + (first + at) * rs + k * cs;
        step = dat * rs + dk * cs;
        room = end - first - at;
    }
    __device__ __forceinline__ void load(wkk_i64 k0, wkk_i64 end, float (&x)[N]) const {
        const float *from = p + k0 * cs;
        wkk_i64 left = end - k0 - k;
#pragma unroll
        for (int e = 0; e < N; e++)
            x[e] = e * dat < room && e * dk < left ? from[e * step] : 0.0f;
    }
    template <int LD> __device__ __forceinline__ void store(float (*s)[LD], const float (&x)[N]) const {
#pragma unroll
        for (int e = 0; e < N; e++)
            s[k + e * dk][at + e * dat] = x[e];
    }
};

template <class T> struct wkk_product_loader {
    wkk_loads<T::EA> la;
    wkk_loads<T::EB> lb;
    wkk_i64 end;

    __device__ __forceinline__ wkk_product_loader(const wkk_product &p, const float *a, const float *b,
                                                  wkk_i64 i0, wkk_i64 j0, wkk_i64 k1)
        : la(a, p.a_rs, p.a_cs, i0, p.m, T::TM, T::KT, T::THREADS),
          lb(b, p.b_cs, p.b_rs, j0, p.n, T::TN, T::KT, T::THREADS), end(k1) {}
    __device__ __forceinline__ void load(wkk_i64 k, float (&a)[T::EA], float (&b)[T::EB]) const {
        la.load(k, end, a);
        lb.load(k, end, b);
    }
    __device__ __forceinline__ void store(typename T::stage &s, const float (&a)[T::EA],
                                          const float (&b)[T::EB]) const {
        la.store(s.a, a);
        lb.store(s.b, b);
    }
};

template <class T>
static __device__ __forceinline__ void wkk_products_block(const wkk_products &all, const wkk_u64 *args) {
    __shared__ typename T::memory m;
    int which = 0;
    while (which + 1 < all.n && blockIdx.x >= all.p[which + 1].first_block)
        which++;
    const wkk_product &p = all.p[which];
    wkk_u32 block = blockIdx.x - (wkk_u32)p.first_block, splits = (wkk_u32)p.splits;
    wkk_u32 tile = block / splits, split = block - tile * splits;
    wkk_u32 across = (wkk_u32)p.across, down = (wkk_u32)p.down;
    wkk_u32 matrix = tile / (across * down), in = tile - matrix * (across * down);
    wkk_i64 i0 = (wkk_i64)(in / across) * T::TM, j0 = (wkk_i64)(in % across) * T::TN;
    const float *a = (const float *)wkk_ptr(p.a, args) + wkk_offset((int)p.nd, p.size, p.as, matrix);
    const float *b = (const float *)wkk_ptr(p.b, args) + wkk_offset((int)p.nd, p.size, p.bs, matrix);
    wkk_i64 k0 = split * p.stretch, k1 = k0 + p.stretch < p.k ? k0 + p.stretch : p.k;
    wkk_product_loader<T> l(p, a, b, i0, j0, k1);
    float v[T::HIGH][T::WIDE];
    wkk_tile_sum<T>(m, l, k0, k1, v);
    if (!wkk_tile_join<T>(v, (float *)p.part, (wkk_u32 *)p.count, tile, (int)split, (int)splits))
        return;
    float *y = (float *)wkk_ptr(p.y, args);
    const float *bias = p.bias_stride >= 0 ? (const float *)wkk_ptr(p.bias, args) : 0;
#pragma unroll
    for (int h = 0; h < T::HIGH; h++)
#pragma unroll
        for (int w = 0; w < T::WIDE; w++) {
            wkk_i64 i = i0 + T::row(h), j = j0 + T::column(h) + w;
            if (i >= p.m || j >= p.n)
                continue;
            float x = bias ? v[h][w] + bias[j * p.bias_stride] : v[h][w];
            y[(matrix * p.m + i) * p.n + j] = wkk_act(x, p.relu);
        }
}

WKK_BODY wkk_products16_body(const wkk_products &p, const wkk_u64 *args) {
    wkk_products_block<wkk_tile<16, 16, 2, 2, 64, 4>>(p, args);
}
WKK_BODY wkk_products32_body(const wkk_products &p, const wkk_u64 *args) {
    wkk_products_block<wkk_tile<32, 32, 4, 4, 32, 4>>(p, args);
}

WKK_BODY wkk_relu_body(const wkk_relu_params &p, const wkk_u64 *args) {
    float *y = (float *)p.y;
    WKK_EACH(i, p.n)
    y[i] = wkk_act(y[i], 1);
}
