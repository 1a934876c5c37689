/* Convolution by matrix products: the column matrix of an image, back from it, and what stands around the products. */

/* A block of 8 warps; a warp takes WKK_WINDOWS columns of a row of the column matrix of one image. */
WKK_KERNEL wkk_conv_im2col(wkk_im2col p, const wkk_u64 *args) {
    const float *x = (const float *)wkk_ptr(p.x, args);
    float *col = (float *)p.col;
    wkk_i64 taps = p.kh * p.kw, per = p.c * taps, units = p.n * per * p.chunks, warps = (wkk_i64)gridDim.x * (WKK_THREADS / 32);
    wkk_u32 lane = threadIdx.x & 31, windows = (wkk_u32)(p.oh * p.ow), ow = (wkk_u32)p.ow;
    int sh = (int)p.sh, sw = (int)p.sw;
    for (wkk_i64 u = (wkk_i64)blockIdx.x * (WKK_THREADS / 32) + (threadIdx.x >> 5); u < units; u += warps) {
        wkk_i64 r = wkk_quot(u, p.chunks), n = wkk_quot(r, per), row = r - n * per, c = wkk_quot(row, taps);
        int tap = (int)(row - c * taps), kh = tap / (int)p.kw, h0 = kh - (int)p.ph, w0 = tap - kh * (int)p.kw - (int)p.pw;
        const float *src = x + n * p.xs[0] + c * p.xs[1];
        float *dst = col + row * p.row_step + n * p.n_step;
        wkk_u32 first = (wkk_u32)(u - r * p.chunks) * WKK_WINDOWS + lane;
#pragma unroll
        for (wkk_u32 i = first; i < first + WKK_WINDOWS; i += 32) {
            wkk_u32 oh = i / ow;
            int h = (int)oh * sh + h0, w = (int)(i - oh * ow) * sw + w0;
            bool in = i < windows && h >= 0 && h < (int)p.h && w >= 0 && w < (int)p.w;
            float v = in ? src[h * p.xs[2] + w * p.xs[3]] : 0.0f;
            if (i < windows)
                dst[i] = v;
        }
        if (n == p.n - 1 && u - r * p.chunks == 0)
            for (wkk_i64 i = p.n * windows + lane; i < p.row_end; i += 32)
                col[row * p.row_step + i] = 0.0f;
    }
}

WKK_KERNEL wkk_conv_col2im(wkk_col2im p, const wkk_u64 *args) {
    float *dx = (float *)wkk_ptr(p.dx, args);
    const float *col = (const float *)p.col;
    wkk_i64 windows = p.oh * p.ow;
    WKK_EACH(i, p.n * p.c * p.h * p.w) {
        wkk_i64 plane = wkk_quot(i, p.h * p.w); /* image and channel */
        int at = (int)(i - plane * p.h * p.w), h = at / (int)p.w, w = at - h * (int)p.w;
        const float *src = col + plane * p.kh * p.kw * windows;
        float sum = 0.0f;
        for (int kh = 0; kh < (int)p.kh; kh++) {
            int oh = h + (int)p.ph - kh;
            if (oh < 0 || oh % (int)p.sh || oh / (int)p.sh >= (int)p.oh)
                continue;
            oh /= (int)p.sh;
            for (int kw = 0; kw < (int)p.kw; kw++) {
                int ow = w + (int)p.pw - kw;
                if (ow < 0 || ow % (int)p.sw || ow / (int)p.sw >= (int)p.ow)
                    continue;
                sum += src[(kh * p.kw + kw) * windows + oh * p.ow + ow / (int)p.sw];
            }
        }
        dx[i] = sum;
    }
}

WKK_KERNEL wkk_conv_bias(wkk_bias p, const wkk_u64 *args) {
    float *y = (float *)p.y;
    const float *bias = (const float *)p.bias;
    WKK_EACH(i, p.total) {
        wkk_i64 plane = wkk_quot(i, p.p), o = plane - wkk_quot(plane, p.o) * p.o;
        y[i] += bias[o * p.stride];
    }
}

WKK_KERNEL wkk_conv_sum(wkk_sum p, const wkk_u64 *args) {
    __shared__ float sums[WKK_SUM_LANES][32];
    const float *part = (const float *)p.part;
    wkk_i64 i = (wkk_i64)blockIdx.x * 32 + (threadIdx.x & 31);
    int lane = threadIdx.x >> 5;
    float sum = 0.0f;
    if (i < p.n)
        for (wkk_i64 g = lane; g < p.groups; g += WKK_SUM_LANES)
            sum += part[g * p.n + i];
    sums[lane][threadIdx.x & 31] = sum;
    __syncthreads();
    if (lane == 0 && i < p.n) {
        for (int k = 1; k < WKK_SUM_LANES; k++)
            sum += sums[k][threadIdx.x];
        ((float *)p.out)[i] = sum;
    }
}
