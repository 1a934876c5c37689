/* Products of small matrices, of any strides: what a library call costs more than it computes. */

/* A tile of y per block, an element per thread. The next piece of k is loaded while this one is summed up. */
WKK_KERNEL wkk_product_small(wkk_product p, const wkk_u64 *args) {
    enum { EACH = WKK_TILE * WKK_DEPTH / WKK_THREADS };
    __shared__ float sa[2][WKK_DEPTH][WKK_TILE + 1], sb[2][WKK_DEPTH][WKK_TILE + 1];
    const float *a = (const float *)wkk_ptr(p.a, args), *b = (const float *)wkk_ptr(p.b, args);
    wkk_i64 across = (p.n + WKK_TILE - 1) / WKK_TILE, tiles = (p.m + WKK_TILE - 1) / WKK_TILE * across;
    wkk_i64 matrix = wkk_quot(blockIdx.x, tiles), tile = blockIdx.x - matrix * tiles, down = wkk_quot(tile, across);
    wkk_i64 i0 = down * WKK_TILE, j0 = (tile - down * across) * WKK_TILE;
    a += wkk_offset((int)p.nd, p.size, p.as, matrix);
    b += wkk_offset((int)p.nd, p.size, p.bs, matrix);
    int tid = threadIdx.x, ti = tid / WKK_TILE, tj = tid % WKK_TILE;
    bool a_deep = p.a_rs != 1, b_deep = p.b_rs == 1; /* neighbouring threads load along k */
    float ra[EACH], rb[EACH], sum = 0.0f;
    int a_at[EACH], a_k[EACH], b_at[EACH], b_k[EACH];
    for (int e = 0; e < EACH; e++) {
        int t = tid + e * WKK_THREADS;
        a_k[e] = a_deep ? t % WKK_DEPTH : t / WKK_TILE;
        a_at[e] = a_deep ? t / WKK_DEPTH : t % WKK_TILE;
        b_k[e] = b_deep ? t % WKK_DEPTH : t / WKK_TILE;
        b_at[e] = b_deep ? t / WKK_DEPTH : t % WKK_TILE;
    }
    int buf = 0;
    for (wkk_i64 k0 = -WKK_DEPTH; k0 < p.k; k0 += WKK_DEPTH) {
        wkk_i64 next = k0 + WKK_DEPTH;
        for (int e = 0; e < EACH; e++) {
            ra[e] = i0 + a_at[e] < p.m && next + a_k[e] < p.k ? a[(i0 + a_at[e]) * p.a_rs + (next + a_k[e]) * p.a_cs] : 0.0f;
            rb[e] = j0 + b_at[e] < p.n && next + b_k[e] < p.k ? b[(next + b_k[e]) * p.b_rs + (j0 + b_at[e]) * p.b_cs] : 0.0f;
        }
        if (k0 >= 0)
            for (int k = 0; k < WKK_DEPTH; k++)
                sum = __fmaf_rn(sa[buf][k][ti], sb[buf][k][tj], sum);
        buf ^= 1;
        for (int e = 0; e < EACH; e++) {
            sa[buf][a_k[e]][a_at[e]] = ra[e];
            sb[buf][b_k[e]][b_at[e]] = rb[e];
        }
        __syncthreads();
    }
    wkk_i64 i = i0 + ti, j = j0 + tj;
    if (i < p.m && j < p.n) {
        if (p.bias_stride >= 0)
            sum += ((const float *)wkk_ptr(p.bias, args))[j * p.bias_stride];
        ((float *)wkk_ptr(p.y, args))[(matrix * p.m + i) * p.n + j] = p.relu && sum < 0.0f ? 0.0f : sum;
    }
}
