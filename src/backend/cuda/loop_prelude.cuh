/* What kernels of loop programs (compile/emit_cuda.c) are made of: memory access by dtype, the argument
 * block, reductions. Stands behind prims_prelude.cuh and prim_math.inc; as they do, it also compiles as C on
 * the CPU where the CUDA built-ins are defined. */
#ifdef __cplusplus
#define WKL_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
/* An address from memory could be of any space, and accesses generic ones, were it not said to be global. */
#define WKL_POINTER(T, address) ((T *)__cvta_global_to_generic(address))
#else
#define WKL_KERNEL(threads) void
#define WKL_POINTER(T, address) ((T *)(address))
#endif

/* What every kernel begins with (k_common.cuh: wkk_begin). */
WK_FN void wkl_begin(void) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (gridDim.x <= 264)
        asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* ---- arguments ----------------------------------------------------------------------------------------- */

WK_FN WK_U64 wkl_at(const WK_U64 *args, WK_U64 base, int slot) { return slot < 0 ? base : args[slot] + base; }
WK_FN float wkl_arg(const WK_U64 *args, int slot) { return (float)__longlong_as_double((WK_I64)args[slot]); }
/* The first kernel to find a fault reports it; of several at once any. The fault word may be in the host's memory, so it is
   not read; the argument behind its address is that of the stop word, which is. */
WK_FN void wkl_fault(const WK_U64 *args, int slot, int code) {
    volatile int *stop = WKL_POINTER(volatile int, args[slot + 1]);
    if (*stop)
        return;
    *stop = 1;
    *WKL_POINTER(volatile int, args[slot]) = code;
}
WK_FN int wkl_stopped(const WK_U64 *args, int slot) { return *WKL_POINTER(const int, args[slot + 1]) != 0; }
WK_FN int wkl_aligned(const void *p, unsigned bytes) { return ((WK_U64)p & (bytes - 1)) == 0; }

/* n / d for n < 2^31, where shift = ceil(log2 d) and mul = 2^32 (2^shift - d) / d + 1 (Granlund and
   Montgomery 1994). */
WK_FN unsigned wkl_div(unsigned n, int mul, int shift) { return (__umulhi(n, (unsigned)mul) + n) >> shift; }

/* ---- memory: b8 is a bool ------------------------------------------------------------------------------ */

WK_FN float wkl_ld_f32(const float *p) { return *p; }
WK_FN float wkl_ld_f64(const double *p) { return (float)*p; }
WK_FN int wkl_ld_i32(const int *p) { return *p; }
WK_FN int wkl_ld_u8(const unsigned char *p) { return *p; }
WK_FN int wkl_ld_b8(const unsigned char *p) { return -(int)(*p != 0); }
WK_FN int wkl_saturate(WK_I64 x) {
    return x > 2147483647 ? 2147483647 : x < -2147483647 - 1 ? -2147483647 - 1 : (int)x;
}
WK_FN int wkl_ld_i64(const WK_I64 *p) { return wkl_saturate(*p); }

/* Converting what is stored: _f from a float register, _i from an int or mask. */
WK_FN float wkl_to_f32_f(float v) { return v; }
WK_FN float wkl_to_f32_i(int v) { return (float)v; }
WK_FN double wkl_to_f64_f(float v) { return (double)v; }
WK_FN double wkl_to_f64_i(int v) { return (double)v; }
WK_FN int wkl_to_i32_f(float v) { return wkc_f2i(v); }
WK_FN int wkl_to_i32_i(int v) { return v; }
WK_FN WK_I64 wkl_to_i64_f(float v) { return (WK_I64)wkc_f2i(v); }
WK_FN WK_I64 wkl_to_i64_i(int v) { return (WK_I64)v; }
WK_FN unsigned char wkl_to_u8_f(float v) { return (unsigned char)wkc_f2i(v); }
WK_FN unsigned char wkl_to_u8_i(int v) { return (unsigned char)v; }
WK_FN unsigned char wkl_to_b8_f(float v) { return (unsigned char)(v != 0.0f); }
WK_FN unsigned char wkl_to_b8_i(int v) { return (unsigned char)(v & 1); }

/* Four neighbours at once: one access of 4 or 16 bytes, two of 16. */
#define WKL_VECTOR(dtype, T, V)                                                                              \
    WK_FN void wkl_ld4_##dtype(const T *p, WKL_REG_##dtype *x) {                                             \
        V v = *(const V *)p;                                                                                 \
        T t[4] = {v.x, v.y, v.z, v.w};                                                                       \
        for (int k = 0; k < 4; k++)                                                                          \
            x[k] = wkl_ld_##dtype(t + k);                                                                    \
    }                                                                                                        \
    WK_FN void wkl_st4_##dtype(T *p, const T *t) {                                                           \
        V v;                                                                                                 \
        v.x = t[0];                                                                                          \
        v.y = t[1];                                                                                          \
        v.z = t[2];                                                                                          \
        v.w = t[3];                                                                                          \
        *(V *)p = v;                                                                                         \
    }
#define WKL_VECTOR2(dtype, T, V)                                                                             \
    WK_FN void wkl_ld4_##dtype(const T *p, WKL_REG_##dtype *x) {                                             \
        V v = ((const V *)p)[0], w = ((const V *)p)[1];                                                      \
        T t[4] = {v.x, v.y, w.x, w.y};                                                                       \
        for (int k = 0; k < 4; k++)                                                                          \
            x[k] = wkl_ld_##dtype(t + k);                                                                    \
    }                                                                                                        \
    WK_FN void wkl_st4_##dtype(T *p, const T *t) {                                                           \
        V v, w;                                                                                              \
        v.x = t[0];                                                                                          \
        v.y = t[1];                                                                                          \
        w.x = t[2];                                                                                          \
        w.y = t[3];                                                                                          \
        ((V *)p)[0] = v;                                                                                     \
        ((V *)p)[1] = w;                                                                                     \
    }
#define WKL_REG_f32 float
#define WKL_REG_f64 float
#define WKL_REG_i32 int
#define WKL_REG_i64 int
#define WKL_REG_u8 int
#define WKL_REG_b8 int
WKL_VECTOR(f32, float, float4)
WKL_VECTOR(i32, int, int4)
WKL_VECTOR(u8, unsigned char, uchar4)
WKL_VECTOR(b8, unsigned char, uchar4)
WKL_VECTOR2(f64, double, double2)
WKL_VECTOR2(i64, WK_I64, longlong2)

/* ---- random numbers ------------------------------------------------------------------------------------ */

/* wkc_uniform without an array that is indexed at run time, which would lie in memory. */
WK_FN float wkl_uniform(WK_U64 seed, WK_U64 seq, WK_U64 index) {
    WK_U32 w[4];
    wkc_philox(seed, seq, index >> 2, w);
    const WK_U32 low = index & 1 ? w[1] : w[0], high = index & 1 ? w[3] : w[2];
    return wkc_uniform_bits((int)(index & 2 ? high : low));
}
WK_FN float wkl_normal(WK_U64 seed, WK_U64 seq, WK_U64 index) { return wkc_normal(seed, seq, index); }

/* Four neighbours of one Philox block; index is a multiple of 4. */
WK_FN void wkl_uniform4(WK_U64 seed, WK_U64 seq, WK_U64 index, float *x) {
    WK_U32 w[4];
    wkc_philox(seed, seq, index >> 2, w);
    for (int k = 0; k < 4; k++)
        x[k] = wkc_uniform_bits((int)w[k]);
}
WK_FN void wkl_normal4(WK_U64 seed, WK_U64 seq, WK_U64 index, float *x) {
    WK_U32 w[4];
    wkc_philox(seed, seq, index >> 2, w);
    x[0] = wkc_normal_bits((int)w[0], (int)w[1], 1);
    x[1] = wkc_normal_bits((int)w[0], (int)w[1], 0);
    x[2] = wkc_normal_bits((int)w[2], (int)w[3], 1);
    x[3] = wkc_normal_bits((int)w[2], (int)w[3], 0);
}

/* --- reductions --- */

/* Each has a name (sum_f, max_i, ...), a combination, its identity, and a type in which the totals of parts are
 * added up in order. wkl_warp_<name> is the tree over the 64 accumulators of a part: a0 holds accumulator
 * `lane`, a1 accumulator `lane + 32`; the result is in every lane. */
WK_FN int wkl_bits_f(float x) { return __float_as_int(x); }
WK_FN int wkl_bits_i(int x) { return x; }
WK_FN float wkl_from_f(int x) { return __int_as_float(x); }
WK_FN int wkl_from_i(int x) { return x; }

#define WKL_REDUCE(name, t, T, TOTAL, combination, identity)                                                 \
    typedef TOTAL wkl_total_##name;                                                                          \
    WK_FN T wkl_id_##name(void) { return identity; }                                                         \
    WK_FN T wkl_##name(T a, T b) { return combination; }                                                     \
    WK_FN T wkl_down_##name(T a, int by) {                                                                   \
        return wkl_##name(a, wkl_from_##t(__shfl_down_sync(0xffffffffu, wkl_bits_##t(a), by)));              \
    }                                                                                                        \
    WK_FN T wkl_warp_##name(T a0, T a1) {                                                                    \
        a0 = wkl_##name(wkl_down_##name(a0, 16), wkl_down_##name(a1, 16));                                   \
        for (int by = 8; by; by >>= 1)                                                                       \
            a0 = wkl_down_##name(a0, by);                                                                    \
        return wkl_from_##t(__shfl_sync(0xffffffffu, wkl_bits_##t(a0), 0));                                  \
    }

WKL_REDUCE(sum_f, f, float, double, a + b, 0.0f)
WKL_REDUCE(max_f, f, float, float, wkc_max(a, b), __int_as_float((int)0xff800000u))
WKL_REDUCE(min_f, f, float, float, wkc_min(a, b), __int_as_float(0x7f800000))
WKL_REDUCE(sum_i, i, int, int, wkc_iadd(a, b), 0)
WKL_REDUCE(max_i, i, int, int, a > b ? a : b, -2147483647 - 1)
WKL_REDUCE(min_i, i, int, int, a > b ? b : a, 2147483647)

/* Part q's value joins a total. */
WK_FN double wkl_add_sum_f(double t, int bits) { return t + (double)__int_as_float(bits); }
WK_FN float wkl_add_max_f(float t, int bits) { return wkl_max_f(t, __int_as_float(bits)); }
WK_FN float wkl_add_min_f(float t, int bits) { return wkl_min_f(t, __int_as_float(bits)); }
WK_FN int wkl_add_sum_i(int t, int bits) { return wkl_sum_i(t, bits); }
WK_FN int wkl_add_max_i(int t, int bits) { return wkl_max_i(t, bits); }
WK_FN int wkl_add_min_i(int t, int bits) { return wkl_min_i(t, bits); }
