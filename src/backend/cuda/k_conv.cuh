/* Convolution by matrix products: the column matrix of an image, back from it, and what stands around the products. */

/* A thread per window of a channel: it takes the window apart into its rows of the column matrix. */
WKK_KERNEL wkk_conv_im2col(wkk_im2col p, const wkk_u64 *args) {
    const float *x = (const float *)wkk_ptr(p.x, args);
    float *col = (float *)p.col;
    wkk_i64 windows = p.oh * p.ow, tail = p.row_end - p.n * windows;
    int height = (int)p.h, width = (int)p.w, down = (int)p.xs[2], along = (int)p.xs[3], ow = (int)p.ow;
    WKK_EACH(i, p.n * p.c * windows) {
        wkk_i64 plane = wkk_quot(i, windows), n = wkk_quot(plane, p.c), c = plane - n * p.c;
        int at = (int)(i - plane * windows), h0 = at / ow;
        int w0 = (at - h0 * ow) * (int)p.sw - (int)p.pw;
        h0 = h0 * (int)p.sh - (int)p.ph;
        const float *src = x + n * p.xs[0] + c * p.xs[1];
        float *dst = col + c * p.kh * p.kw * p.row_step + n * p.n_step + at;
        for (int h = h0; h < h0 + (int)p.kh; h++)
            for (int w = w0; w < w0 + (int)p.kw; w++) {
                bool in = h >= 0 && h < height && w >= 0 && w < width;
                *dst = in ? src[h * down + w * along] : 0.0f;
                dst += p.row_step;
            }
    }
    if (tail > 0)
        WKK_EACH(i, p.c * p.kh * p.kw * tail) {
            wkk_i64 row = wkk_quot(i, tail);
            col[row * p.row_step + p.n * windows + i - row * tail] = 0.0f;
        }
}

WKK_KERNEL wkk_conv_col2im(wkk_col2im p, const wkk_u64 *args) {
    float *dx = (float *)wkk_ptr(p.dx, args);
    const float *col = (const float *)p.col;
    wkk_i64 windows = p.oh * p.ow;
    int width = (int)p.w, sh = (int)p.sh, sw = (int)p.sw;
    WKK_EACH(i, p.n * p.c * p.h * p.w) {
        wkk_i64 plane = wkk_quot(i, p.h * p.w); /* image and channel */
        int at = (int)(i - plane * p.h * p.w), h = at / width, w = at - h * width;
        const float *src = col + plane * p.kh * p.kw * windows;
        float sum = 0.0f;
        for (int kh = 0; kh < (int)p.kh; kh++) {
            int top = h + (int)p.ph - kh, oh = sh == 1 ? top : top / sh;
            if (top < 0 || oh * sh != top || oh >= (int)p.oh)
                continue;
            for (int kw = 0; kw < (int)p.kw; kw++) {
                int left = w + (int)p.pw - kw, ow = sw == 1 ? left : left / sw;
                if (left >= 0 && ow * sw == left && ow < (int)p.ow)
                    sum += src[(kh * p.kw + kw) * windows + oh * p.ow + ow];
            }
        }
        dx[i] = sum;
    }
}

/* By fours where a plane has a multiple of four windows. */
WKK_KERNEL wkk_conv_bias(wkk_bias p, const wkk_u64 *args) {
    float *y = (float *)p.y;
    const float *bias = (const float *)p.bias;
    if (p.p % 4 == 0 && (p.y & 15) == 0) {
        wkk_i64 p4 = p.p / 4;
        WKK_EACH(i, p.total / 4) {
            wkk_i64 plane = wkk_quot(i, p4), o = plane - wkk_quot(plane, p.o) * p.o;
            float b = bias[o * p.stride];
            float4 v = ((const float4 *)y)[i];
            v.x += b;
            v.y += b;
            v.z += b;
            v.w += b;
            ((float4 *)y)[i] = v;
        }
        return;
    }
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
