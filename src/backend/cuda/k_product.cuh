/* Products of small matrices, of any strides: what a library call costs more than it computes. */

/* What a thread loads of one operand for a piece of k: WKK_LOADS elements, dat rows (or columns) and dk deep apart. */
enum { WKK_LOADS = WKK_TILE * WKK_DEPTH / WKK_THREADS, WKK_ROW = WKK_TILE + 2 };

struct wkk_loads {
    const float *p;
    wkk_i64 step, deeper; /* from load to load; from piece to piece */
    wkk_i64 room;         /* rows from the first on that exist */
    int at, k, dat, dk;
};

/* Neighbouring threads load neighbours in memory. rs: the stride along y; cs: along k. */
static __device__ __forceinline__ wkk_loads wkk_plan_loads(const float *p, wkk_i64 rs, wkk_i64 cs, wkk_i64 first, wkk_i64 end) {
    int t = threadIdx.x;
    wkk_loads l;
    bool deep = rs != 1;
    l.at = deep ? t / WKK_DEPTH : t % WKK_TILE;
    l.k = deep ? t % WKK_DEPTH : t / WKK_TILE;
    l.dat = deep ? WKK_THREADS / WKK_DEPTH : 0;
    l.dk = deep ? 0 : WKK_THREADS / WKK_TILE;
    l.p = p + (first + l.at) * rs + l.k * cs;
    l.step = l.dat * rs + l.dk * cs;
    l.deeper = WKK_DEPTH * cs;
    l.room = end - first;
    return l;
}

static __device__ __forceinline__ void wkk_load(wkk_loads &l, wkk_i64 left, float x[WKK_LOADS]) {
#pragma unroll
    for (int e = 0; e < WKK_LOADS; e++)
        x[e] = l.at + e * l.dat < l.room && l.k + e * l.dk < left ? l.p[e * l.step] : 0.0f;
    l.p += l.deeper;
}

static __device__ __forceinline__ void wkk_keep(const wkk_loads &l, const float x[WKK_LOADS], float (*s)[WKK_ROW]) {
#pragma unroll
    for (int e = 0; e < WKK_LOADS; e++)
        s[l.k + e * l.dk][l.at + e * l.dat] = x[e];
}

/* A tile of y per block. Four groups of 64 threads share each piece of k; a thread has 2 x 2 elements. The next piece is
 * loaded while this one is summed up; at the end the groups' sums are added in order. */
WKK_KERNEL wkk_product_small(wkk_product p, const wkk_u64 *args) {
    enum { GROUPS = 4, SHARE = WKK_DEPTH / GROUPS };
    __shared__ __align__(16) float sa[WKK_DEPTH][WKK_ROW], sb[WKK_DEPTH][WKK_ROW];
    __shared__ float part[GROUPS][WKK_TILE][WKK_TILE];
    const float *a = (const float *)wkk_ptr(p.a, args), *b = (const float *)wkk_ptr(p.b, args);
    wkk_i64 across = (p.n + WKK_TILE - 1) / WKK_TILE, tiles = (p.m + WKK_TILE - 1) / WKK_TILE * across;
    wkk_i64 matrix = wkk_quot(blockIdx.x, tiles), tile = blockIdx.x - matrix * tiles, down = wkk_quot(tile, across);
    wkk_i64 i0 = down * WKK_TILE, j0 = (tile - down * across) * WKK_TILE;
    a += wkk_offset((int)p.nd, p.size, p.as, matrix);
    b += wkk_offset((int)p.nd, p.size, p.bs, matrix);
    wkk_loads la = wkk_plan_loads(a, p.a_rs, p.a_cs, i0, p.m), lb = wkk_plan_loads(b, p.b_cs, p.b_rs, j0, p.n);
    int group = threadIdx.x / 64, ti = threadIdx.x % 64 / 8 * 2, tj = threadIdx.x % 8 * 2;
    float xa[WKK_LOADS], xb[WKK_LOADS], s00 = 0.0f, s01 = 0.0f, s10 = 0.0f, s11 = 0.0f;
    wkk_load(la, p.k, xa);
    wkk_load(lb, p.k, xb);
    for (wkk_i64 k0 = 0; k0 < p.k; k0 += WKK_DEPTH) {
        wkk_keep(la, xa, sa);
        wkk_keep(lb, xb, sb);
        __syncthreads();
        if (k0 + WKK_DEPTH < p.k) {
            wkk_load(la, p.k - k0 - WKK_DEPTH, xa);
            wkk_load(lb, p.k - k0 - WKK_DEPTH, xb);
        }
        if (k0 + group * SHARE < p.k)
#pragma unroll 8
            for (int k = group * SHARE; k < (group + 1) * SHARE; k++) {
                float2 u = *(const float2 *)&sa[k][ti], v = *(const float2 *)&sb[k][tj];
                s00 = __fmaf_rn(u.x, v.x, s00);
                s01 = __fmaf_rn(u.x, v.y, s01);
                s10 = __fmaf_rn(u.y, v.x, s10);
                s11 = __fmaf_rn(u.y, v.y, s11);
            }
        __syncthreads();
    }
    part[group][ti][tj] = s00;
    part[group][ti][tj + 1] = s01;
    part[group][ti + 1][tj] = s10;
    part[group][ti + 1][tj + 1] = s11;
    __syncthreads();
    int oi = threadIdx.x / WKK_TILE, oj = threadIdx.x % WKK_TILE;
    wkk_i64 i = i0 + oi, j = j0 + oj;
    if (i < p.m && j < p.n) {
        float sum = part[0][oi][oj];
        for (int g = 1; g < GROUPS; g++)
            sum += part[g][oi][oj];
        if (p.bias_stride >= 0)
            sum += ((const float *)wkk_ptr(p.bias, args))[j * p.bias_stride];
        ((float *)wkk_ptr(p.y, args))[(matrix * p.m + i) * p.n + j] = p.relu && sum < 0.0f ? 0.0f : sum;
    }
}
