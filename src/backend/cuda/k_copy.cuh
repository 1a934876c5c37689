/* Copies: strided to strided, contiguous, attributes, and the gradient of slicing. */

template <class T> static __device__ __forceinline__ void wkk_copy_any(const wkk_copy &p, const wkk_u64 *args) {
    T *dst = (T *)wkk_ptr(p.dst, args);
    const T *src = (const T *)wkk_ptr(p.src, args);
    WKK_EACH(i, p.n)
    dst[wkk_offset((int)p.nd, p.size, p.ds, i)] = src[wkk_offset((int)p.nd, p.size, p.ss, i)];
}

WKK_BODY wkk_copy1_body(const wkk_copy &p, const wkk_u64 *args) {
    wkk_copy_any<unsigned char>(p, args);
}
WKK_BODY wkk_copy4_body(const wkk_copy &p, const wkk_u64 *args) {
    wkk_copy_any<unsigned>(p, args);
}
WKK_BODY wkk_copy8_body(const wkk_copy &p, const wkk_u64 *args) {
    wkk_copy_any<wkk_u64>(p, args);
}
WKK_BODY wkk_copy16_body(const wkk_copy &p, const wkk_u64 *args) {
    wkk_copy_any<uint4>(p, args);
}

/* n contiguous bytes. */
WKK_BODY wkk_copy_flat_body(const wkk_copy &p, const wkk_u64 *args) {
    char *dst = wkk_ptr(p.dst, args);
    const char *src = wkk_ptr(p.src, args);
    wkk_u64 both = (wkk_u64)dst | (wkk_u64)src;
    wkk_i64 done = 0;
    if ((both & 15) == 0) {
        WKK_EACH(i, p.n >> 4)
        ((uint4 *)dst)[i] = ((const uint4 *)src)[i];
        done = p.n & ~(wkk_i64)15;
    } else if ((both & 3) == 0) {
        WKK_EACH(i, p.n >> 2)
        ((unsigned *)dst)[i] = ((const unsigned *)src)[i];
        done = p.n & ~(wkk_i64)3;
    }
    WKK_EACH(i, p.n - done)
    dst[done + i] = src[done + i];
}

/* The same, if a check failed: what steps before it had overwritten is as it was. */
WKK_BODY wkk_put_back_body(const wkk_copy &p, const wkk_u64 *args) {
    if (*(const int *)args[WKK_STOP_WORD])
        wkk_copy_flat_body(p, args);
}

WKK_BODY wkk_set_args_body(const wkk_words &p, const wkk_u64 *args) {
    if (threadIdx.x < p.n)
        ((wkk_u64 *)args)[threadIdx.x] = p.word[threadIdx.x];
}

WKK_BODY wkk_attr_floats_body(const wkk_attrs &p, const wkk_u64 *args) {
    float *dst = (float *)wkk_ptr(p.dst, args);
    WKK_EACH(i, p.n)
    dst[i] = (float)__longlong_as_double((wkk_i64)args[p.first + i]);
}

WKK_BODY wkk_pad_slice_body(const wkk_pad &p, const wkk_u64 *args) {
    float *dst = (float *)wkk_ptr(p.dst, args);
    const float *src = (const float *)wkk_ptr(p.src, args);
    WKK_EACH(i, p.n) {
        wkk_i64 at = 0, rest = i;
        bool in = true;
        for (int d = (int)p.nd - 1; d >= 0; d--) {
            wkk_i64 q = wkk_quot(rest, p.size[d]), k = rest - q * p.size[d];
            rest = q;
            if (d == p.dim) {
                k -= p.start;
                wkk_i64 step = k < 0 ? 0 : wkk_quot(k, p.step);
                in = k >= 0 && step * p.step == k && step < p.count;
                k = step;
            }
            at += k * p.ss[d];
        }
        dst[i] = in ? src[at] : 0.0f;
    }
}
