/* Convolution by matrix products: the column matrix of an image, back from it, and what stands around the products. */

/* A block of 8 warps; a warp takes a row of the column matrix of one image, its lanes the columns. */
WKK_KERNEL wkk_conv_im2col(wkk_im2col p, const wkk_u64 *args) {
    const float *x = (const float *)wkk_ptr(p.x, args);
    float *col = (float *)p.col;
    wkk_i64 taps = p.kh * p.kw, per = p.c * taps, rows = p.n * per, warps = (wkk_i64)gridDim.x * (WKK_THREADS / 32);
    wkk_u32 lane = threadIdx.x & 31, windows = (wkk_u32)(p.oh * p.ow), ow = (wkk_u32)p.ow;
    for (wkk_i64 r = (wkk_i64)blockIdx.x * (WKK_THREADS / 32) + (threadIdx.x >> 5); r < rows; r += warps) {
        wkk_i64 n = r / per, row = r - n * per, c = row / taps;
        int tap = (int)(row - c * taps), kh = tap / (int)p.kw, kw = tap - kh * (int)p.kw;
        const float *src = x + n * p.xs[0] + c * p.xs[1];
        float *dst = col + row * p.row_step + n * p.n_step;
        for (wkk_u32 i = lane; i < windows; i += 32) {
            wkk_u32 oh = i / ow;
            wkk_i64 h = oh * p.sh + kh - p.ph, w = (i - oh * ow) * p.sw + kw - p.pw;
            bool in = h >= 0 && h < p.h && w >= 0 && w < p.w;
            dst[i] = in ? src[h * p.xs[2] + w * p.xs[3]] : 0.0f;
        }
        if (n == p.n - 1)
            for (wkk_i64 i = p.n * windows + lane; i < p.row_end; i += 32)
                col[row * p.row_step + i] = 0.0f;
    }
}

WKK_KERNEL wkk_conv_col2im(wkk_col2im p, const wkk_u64 *args) {
    float *dx = (float *)wkk_ptr(p.dx, args);
    const float *col = (const float *)p.col;
    wkk_i64 windows = p.oh * p.ow;
    WKK_EACH(i, p.n * p.c * p.h * p.w) {
        wkk_i64 plane = i / (p.h * p.w); /* image and channel */
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
    WKK_EACH(i, p.total)
    y[i] += bias[i / p.p % p.o * p.stride];
}

WKK_KERNEL wkk_conv_sum(wkk_sum p, const wkk_u64 *args) {
    float *out = (float *)p.out;
    const float *part = (const float *)p.part;
    WKK_EACH(i, p.n) {
        float sum = part[i];
        for (wkk_i64 g = 1; g < p.groups; g++)
            sum += part[g * p.n + i];
        out[i] = sum;
    }
}
