/* Rows of a table by index, and the sum of rows by index. */

/* A warp per row. */
WKK_BODY wkk_embedding_rows_body(const wkk_embedding &p, const wkk_u64 *args) {
    const float *w = (const float *)wkk_ptr(p.w, args);
    const wkk_i64 *idx = (const wkk_i64 *)wkk_ptr(p.idx.at, args);
    float *y = (float *)wkk_ptr(p.y, args);
    wkk_i64 warps = (wkk_i64)gridDim.x * (WKK_THREADS / 32);
    for (wkk_i64 i = (wkk_i64)blockIdx.x * (WKK_THREADS / 32) + (threadIdx.x >> 5); i < p.n; i += warps) {
        wkk_i64 r = idx[wkk_view_offset(p.idx, i)];
        bool in = r >= 0 && r < p.rows;
        if (!in && (threadIdx.x & 31) == 0)
            wkk_fault(args, p.op);
        for (wkk_i64 d = threadIdx.x & 31; d < p.width; d += 32)
            y[i * p.width + d] = in ? w[r * p.row_stride + d * p.col_stride] : 0.0f;
    }
}

WKK_BODY wkk_embedding_index_body(const wkk_index32 &p, const wkk_u64 *args) {
    const wkk_i64 *idx = (const wkk_i64 *)wkk_ptr(p.idx.at, args);
    int *out = (int *)p.out;
    WKK_EACH(i, p.n) {
        wkk_i64 r = idx[wkk_view_offset(p.idx, i)];
        bool in = r >= 0 && r < p.rows;
        if (!in)
            wkk_fault(args, p.op);
        out[i] = in ? (int)r : -1;
    }
}

/* A block sums WKK_SUM_ROWS rows of dw, a thread per column, each row's terms in the order of positions. It looks at the
 * indices 256 at a time and lists, in order, those that fall into its rows. */
WKK_BODY wkk_embedding_sum_body(const wkk_embedding_grad &p, const wkk_u64 *args) {
    enum { WARPS = WKK_THREADS / 32 };
    __shared__ int list_row[WKK_THREADS], warp_count[WARPS];
    __shared__ wkk_i64 list_at[WKK_THREADS];
    __shared__ float sum[WKK_SUM_ROWS][WKK_THREADS];
    const float *dy = (const float *)wkk_ptr(p.dy.at, args);
    const int *idx = (const int *)p.idx;
    float *dw = (float *)wkk_ptr(p.dw, args);
    wkk_i64 row0 = (wkk_i64)blockIdx.x * WKK_SUM_ROWS, column = (wkk_i64)blockIdx.y * WKK_THREADS + threadIdx.x;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int r = 0; r < WKK_SUM_ROWS; r++)
        sum[r][threadIdx.x] = 0.0f;
    for (wkk_i64 start = 0; start < p.n; start += WKK_THREADS) {
        wkk_i64 i = start + threadIdx.x;
        wkk_i64 r = i < p.n ? idx[i] - row0 : -1;
        bool mine = r >= 0 && r < WKK_SUM_ROWS;
        wkk_u32 votes = __ballot_sync(0xffffffffu, mine);
        if (lane == 0)
            warp_count[warp] = __popc(votes);
        __syncthreads();
        int before = 0, total = 0;
        for (int k = 0; k < WARPS; k++) {
            before += k < warp ? warp_count[k] : 0;
            total += warp_count[k];
        }
        if (mine) {
            int at = before + __popc(votes & ((1u << lane) - 1));
            list_row[at] = (int)r;
            list_at[at] = wkk_view_offset(p.dy, i);
        }
        __syncthreads();
        if (column < p.width)
            for (int k = 0; k < total; k++)
                sum[list_row[k]][threadIdx.x] += dy[list_at[k] + column * p.col_stride];
        __syncthreads();
    }
    if (column < p.width)
        for (int r = 0; r < WKK_SUM_ROWS && row0 + r < p.rows; r++)
            dw[(row0 + r) * p.width + column] = sum[r][threadIdx.x];
}
