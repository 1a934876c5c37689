/* The baseline tier of the packed GEMM in GCC vector types: SSE2 on x86-64, NEON on aarch64. Tiles of up to 6 rows by
 * 8 columns: 12 sums, 2 vectors of B, an element of A and a product fill SSE's 16 registers. Products and sums are
 * rounded apart (no fused multiply-add). Calls nothing. */
#include "backend/cpu/gemm_tier.h"

#define MR 6
#define LANES 4
#define NV 2
#define NR (NV * LANES)

typedef float vec __attribute__((vector_size(16)));
typedef float vec_u __attribute__((vector_size(16), aligned(4), may_alias)); /* in memory, at any address */

#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *p) { return *(const vec_u *)p; }

INLINE void store(float *p, vec v) { *(vec_u *)p = v; }

INLINE vec finish(const wki_gemm_tile *t, vec v, int i, int j) {
    if (t->alpha != 1)
        v *= t->alpha;
    if (t->beta != 0)
        v += t->beta * load(t->c + i * t->c_rs + j);
    if (t->bias_n)
        v += load(t->bias_n + j);
    if (t->bias_m)
        v += t->bias_m[i];
    return t->act == WKI_ACT_RELU ? (vec)(~(v < 0) & (__typeof__(v < 0))v) : v;
}

/* m is a constant at every call, so `acc` lives in registers. B is read NR wide: see `tails`. */
INLINE void tile(const wki_gemm_tile *t, const int m) {
    int64_t k = t->k, a_rs = t->a_rs, a_cs = t->a_cs, b_rs = t->b_rs;
    const float *a = t->a, *b = t->b;
    vec acc[MR][NV];
    EACH(i, m) {
        EACH(v, NV) { acc[i][v] = (vec){0}; }
    }
    for (int64_t p = 0; p < k; p++) {
        vec bv[NV];
        EACH(v, NV) { bv[v] = load(b + v * LANES); }
        EACH(i, m) {
            float s = a[i * a_rs];
            EACH(v, NV) { acc[i][v] += s * bv[v]; }
        }
        a += a_cs;
        b += b_rs;
    }
    if (t->n == NR) {
        EACH(i, m) {
            EACH(v, NV) { store(t->c + i * t->c_rs + v * LANES, finish(t, acc[i][v], i, v * LANES)); }
        }
        return;
    }
    float edge[MR][NR];
    EACH(i, m) {
        EACH(v, NV) { store(&edge[i][v * LANES], acc[i][v]); }
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < t->n; j++)
            t->c[i * t->c_rs + j] = wki_gemm_finish(t, edge[i][j], i, j);
}

static void run_tile(const wki_gemm_tile *t) {
    switch (t->m) {
    case 1:
        tile(t, 1);
        break;
    case 2:
        tile(t, 2);
        break;
    case 3:
        tile(t, 3);
        break;
    case 4:
        tile(t, 4);
        break;
    case 5:
        tile(t, 5);
        break;
    default:
        tile(t, MR);
    }
}

/* Sixteen partial sums, added pairwise at the end. */
static void run_dot(const wki_gemm_tile *t) {
    for (int i = 0; i < t->m; i++) {
        const float *a = t->a + i * t->a_rs, *b = t->b;
        vec acc[4] = {{0}, {0}, {0}, {0}};
        int64_t p = 0;
        for (; p + 16 <= t->k; p += 16) {
            EACH(v, 4) { acc[v] += load(a + p + v * LANES) * load(b + p + v * LANES); }
        }
        for (; p < t->k; p++)
            acc[p / LANES % 4][p % LANES] += a[p] * b[p];
        vec sum = (acc[0] + acc[1]) + (acc[2] + acc[3]);
        t->c[i * t->c_rs] = wki_gemm_finish(t, (sum[0] + sum[1]) + (sum[2] + sum[3]), i, 0);
    }
}

/* Four lanes by four steps of k, transposed. */
INLINE void pack_block(float *dst, int64_t ld, const float *src, int64_t ls) {
    vec r0 = load(src), r1 = load(src + ls), r2 = load(src + 2 * ls), r3 = load(src + 3 * ls);
    vec lo01 = __builtin_shufflevector(r0, r1, 0, 4, 1, 5),
        hi01 = __builtin_shufflevector(r0, r1, 2, 6, 3, 7);
    vec lo23 = __builtin_shufflevector(r2, r3, 0, 4, 1, 5),
        hi23 = __builtin_shufflevector(r2, r3, 2, 6, 3, 7);
    store(dst, __builtin_shufflevector(lo01, lo23, 0, 1, 4, 5));
    store(dst + ld, __builtin_shufflevector(lo01, lo23, 2, 3, 6, 7));
    store(dst + 2 * ld, __builtin_shufflevector(hi01, hi23, 0, 1, 4, 5));
    store(dst + 3 * ld, __builtin_shufflevector(hi01, hi23, 2, 3, 6, 7));
}

static void pack(float *dst, int64_t ld, const float *src, int64_t ps, int64_t ls, int64_t k, int64_t lanes) {
    int64_t fast_lanes = 0, fast_k = 0;
    if (ps == 1) {
        fast_lanes = lanes & ~(int64_t)3;
        fast_k = k & ~(int64_t)3;
        for (int64_t l = 0; l < fast_lanes; l += 4)
            for (int64_t p = 0; p < fast_k; p += 4)
                pack_block(dst + p * ld + l, ld, src + p + l * ls, ls);
    } else if (ls == 1) {
        fast_lanes = lanes & ~(int64_t)3;
        fast_k = k;
        for (int64_t p = 0; p < k; p++)
            for (int64_t l = 0; l < fast_lanes; l += 4)
                store(dst + p * ld + l, load(src + p * ps + l));
    }
    for (int64_t p = 0; p < k; p++) {
        for (int64_t l = p < fast_k ? fast_lanes : 0; l < lanes; l++)
            dst[p * ld + l] = src[p * ps + l * ls];
        for (int64_t l = lanes; l < ld; l++)
            dst[p * ld + l] = 0;
    }
}

const wki_gemm_tier wki_gemm_baseline = {.mr = MR,
                                         .nr = NR,
                                         .tails = 0,
                                         .kc = 256,
                                         .mc = 24 * MR,
                                         .nc = 256 * NR,
                                         .dot_kc = 4096,
                                         .tile = run_tile,
                                         .dot = run_dot,
                                         .pack = pack};
