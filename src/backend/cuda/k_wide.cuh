/* Conversions that keep all bits of i64 and f64, and comparisons of i64, as backend/cpu/k_wide.c does them. */

/* Towards zero; NaN is 0, and what is too large the nearest there is. */
static __device__ __forceinline__ wkk_i64 wkk_whole(double v) {
    const wkk_i64 most = 0x7fffffffffffffffLL;
    return v != v ? 0 : v >= 9223372036854775808.0 ? most : v < -9223372036854775808.0 ? -most - 1 : (wkk_i64)v;
}

static __device__ __forceinline__ int wkk_narrow(wkk_i64 v) {
    return v > 0x7fffffffLL ? 0x7fffffff : v < -0x7fffffffLL - 1 ? -0x7fffffff - 1 : (int)v;
}

WKK_BODY wkk_cast_wide_body(const wkk_cast &p, const wkk_u64 *args) {
    const char *x = wkk_ptr(p.x.at, args);
    char *y = wkk_ptr(p.y, args);
    WKK_EACH(k, p.n) {
        const char *from = x + wkk_offset((int)p.x.nd, p.x.size, p.x.stride, k) * p.from_bytes;
        char *to = y + k * p.to_bytes;
        double f = 0;
        wkk_i64 i = 0;
        if (p.from_float)
            f = p.from_bytes == 8 ? *(const double *)from : (double)*(const float *)from;
        else
            i = p.from_bytes == 8   ? *(const wkk_i64 *)from
                : p.from_bytes == 4 ? (wkk_i64) * (const int *)from
                                    : (wkk_i64) * (const unsigned char *)from;
        if (p.to_bool) {
            *(unsigned char *)to = p.from_float ? f != 0 : i != 0;
        } else if (p.to_float) {
            if (p.to_bytes == 8)
                *(double *)to = p.from_float ? f : (double)i;
            else
                *(float *)to = p.from_float ? (float)f : (float)i;
        } else {
            if (p.from_float)
                i = wkk_whole(f);
            if (p.to_bytes == 8)
                *(wkk_i64 *)to = i;
            else if (p.to_bytes == 4)
                *(int *)to = wkk_narrow(i);
            else
                *(unsigned char *)to = (unsigned char)wkk_narrow(i);
        }
    }
}

/* a and b walk y's shape. */
WKK_BODY wkk_compare_wide_body(const wkk_compare &p, const wkk_u64 *args) {
    const wkk_i64 *a = (const wkk_i64 *)wkk_ptr(p.a, args), *b = (const wkk_i64 *)wkk_ptr(p.b, args);
    unsigned char *y = (unsigned char *)wkk_ptr(p.y, args);
    WKK_EACH(k, p.n) {
        wkk_i64 u = a[wkk_offset((int)p.nd, p.size, p.as, k)], v = b[wkk_offset((int)p.nd, p.size, p.bs, k)];
        y[k] = (u < v && p.below) || (u == v && p.equal) || (u > v && p.above);
    }
}
