/* What prim_math.inc needs to be CUDA C: this text and then that one stand at the head of generated programs, whose
 * kernels call wkc_exp(x) and so on. It includes nothing and is plain C but for the CUDA built-ins, so the same
 * text also compiles on the CPU where those are defined. Compile with --fmad=false. */
#define WK_SCALAR 1
#define WK_F float
#define WK_I int
#define WK_M int
#define WK_U32 unsigned
#define WK_U64 unsigned long long
#define WK_I64 long long
#define WK_FN static __device__ __forceinline__
#define WK_FN_RARE WK_FN
#define WK_NAME(n) wkc_##n
#define WK_FC(c) (c)
#define WK_IC(c) (c)
#define WK_AS_I(x) __float_as_int(x)
#define WK_AS_F(i) __int_as_float(i)
#define WK_TO_F(i) __int2float_rn(i)
#define WK_TO_I(x) __float2int_rz(x)
#define WK_LT(a, b) ((a) < (b))
#define WK_LE(a, b) ((a) <= (b))
#define WK_EQ(a, b) ((a) == (b))
#define WK_ILT(a, b) ((a) < (b))
#define WK_IEQ(a, b) ((a) == (b))
#define WK_SEL(m, a, b) ((m) ? (a) : (b))
#define WK_ISEL(m, a, b) ((m) ? (a) : (b))
#define WK_LOWER(a, b) ((a) < (b) ? (a) : (b))
#define WK_UPPER(a, b) ((a) > (b) ? (a) : (b))
#define WK_MASK(m) (-(int)(m))
#define WK_TEST(i) ((i) != 0)
#define WK_IADD(a, b) ((int)((unsigned)(a) + (unsigned)(b)))
#define WK_ISUB(a, b) ((int)((unsigned)(a) - (unsigned)(b)))
#define WK_IMUL(a, b) ((int)((unsigned)(a) * (unsigned)(b)))
#define WK_SHL(i, n) ((int)((unsigned)(i) << (n)))
#define WK_SHR(i, n) ((i) >> (n))
#define WK_USHR(i, n) ((int)((unsigned)(i) >> (n)))
#define WK_SQRT(x) __fsqrt_rn(x)
#define WK_FMA(a, b, c) __fmaf_rn(a, b, c)
#define WK_SCALE(x, t) wkc_scale(x, t)
#define WK_TRIG_FAR(m, a, quarter, r) ((m) ? wkc_trig_far(a, quarter) : (r))
