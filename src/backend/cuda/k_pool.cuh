/* Largest elements of windows; sums and gathers by the element each window chose. */

WKK_KERNEL wkk_max_pool(wkk_pool p, const wkk_u64 *args) {
    const float *x = (const float *)wkk_ptr(p.x, args);
    float *y = (float *)wkk_ptr(p.y, args);
    int *idx = (int *)wkk_ptr(p.idx, args);
    WKK_EACH(i, p.total) {
        wkk_i64 plane = i / (p.oh * p.ow), n = plane / p.c, c = plane - n * p.c;
        int at = (int)(i - plane * (p.oh * p.ow)), oh = at / (int)p.ow, ow = at - oh * (int)p.ow;
        const float *src = x + n * p.xs[0] + c * p.xs[1];
        wkk_i64 h0 = oh * p.sh - p.ph, w0 = ow * p.sw - p.pw;
        float best = 0.0f;
        wkk_i64 where = -1;
        for (wkk_i64 h = h0 < 0 ? 0 : h0; h < h0 + p.kh && h < p.h; h++)
            for (wkk_i64 w = w0 < 0 ? 0 : w0; w < w0 + p.kw && w < p.w; w++) {
                float v = src[h * p.xs[2] + w * p.xs[3]];
                if (where < 0 || v > best || (v != v && best == best)) {
                    best = v;
                    where = h * p.w + w;
                }
            }
        y[i] = best;
        idx[i] = (int)where;
    }
}

WKK_KERNEL wkk_pool_grad_clear(wkk_pool_grad p, const wkk_u64 *args) {
    int *first = (int *)p.first, *last = (int *)p.last;
    WKK_EACH(i, p.planes * p.plane) {
        first[i] = 0x7fffffff;
        last[i] = -1;
    }
}

/* Minima and maxima of integers do not depend on the order in which they are taken. */
WKK_KERNEL wkk_pool_grad_mark(wkk_pool_grad p, const wkk_u64 *args) {
    const int *idx = (const int *)wkk_ptr(p.idx, args);
    int *first = (int *)p.first, *last = (int *)p.last, windows = (int)(p.oh * p.ow);
    WKK_EACH(i, p.planes * windows) {
        wkk_i64 plane = i / windows, n = plane / p.c, c = plane - n * p.c;
        int at = (int)(i - plane * windows), oh = at / (int)p.ow, ow = at - oh * (int)p.ow;
        wkk_u32 e = (wkk_u32)idx[n * p.is[0] + c * p.is[1] + oh * p.is[2] + ow * p.is[3]];
        if (e >= p.plane) {
            wkk_fault(args, p.op);
            continue;
        }
        atomicMin(first + plane * p.plane + e, at);
        atomicMax(last + plane * p.plane + e, at);
    }
}

/* Each element adds up its windows in order. */
WKK_KERNEL wkk_pool_grad_sum(wkk_pool_grad p, const wkk_u64 *args) {
    const float *dy = (const float *)wkk_ptr(p.dy, args);
    const int *idx = (const int *)wkk_ptr(p.idx, args), *first = (const int *)p.first, *last = (const int *)p.last;
    float *dx = (float *)wkk_ptr(p.dx, args);
    WKK_EACH(i, p.planes * p.plane) {
        int end = last[i];
        float sum = 0.0f;
        if (end >= 0) {
            wkk_i64 plane = i / p.plane, n = plane / p.c, c = plane - n * p.c;
            int e = (int)(i - plane * p.plane);
            for (int at = first[i]; at <= end; at++) {
                int oh = at / (int)p.ow, ow = at - oh * (int)p.ow;
                if (at == end || idx[n * p.is[0] + c * p.is[1] + oh * p.is[2] + ow * p.is[3]] == e)
                    sum += dy[n * p.ds[0] + c * p.ds[1] + oh * p.ds[2] + ow * p.ds[3]];
            }
        }
        dx[i] = sum;
    }
}

WKK_KERNEL wkk_max_pool_gather(wkk_pool_gather p, const wkk_u64 *args) {
    const float *x = (const float *)wkk_ptr(p.x, args);
    const int *idx = (const int *)wkk_ptr(p.idx, args);
    float *y = (float *)wkk_ptr(p.y, args);
    WKK_EACH(i, p.total) {
        wkk_i64 plane = i / (p.oh * p.ow), n = plane / p.c, c = plane - n * p.c;
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
