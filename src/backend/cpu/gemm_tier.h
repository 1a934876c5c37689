/* What a tier of the packed GEMM supplies to the blocking driver in gemm.c: a micro-kernel and a packing routine.
 * Private to gemm*.c. */
#pragma once

#include <stdint.h>

#include "backend/cpu/gemm.h"

/* A loop with a constant count, unrolled whole, so that arrays indexed by it become registers. */
#if defined(__clang__)
#define EACH(i, n) _Pragma("clang loop unroll(full)") for (int i = 0; i < (n); i++)
#else
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)
#endif

/* One tile of C and one block of k: C = act(alpha * A B + beta * C + bias_n + bias_m) for m rows and n columns. */
typedef struct {
    int64_t k;
    const float *a; /* any strides */
    int64_t a_rs, a_cs;
    const float *b; /* unit column stride */
    int64_t b_rs;
    float *c;
    int64_t c_rs;
    int m, n; /* 1..mr, 1..nr */
    float alpha, beta;
    const float *bias_n, *bias_m; /* NULL: none */
    wki_act act;
    const float *next; /* worth fetching into the cache: a row of B for each k. NULL: all is near, C too */
    int64_t next_rs;
} wki_gemm_tile;

typedef struct {
    int mr, nr;     /* largest tile */
    int tails;      /* 1: a tile with n < nr reads n columns of B; 0: it reads nr, so B must be packed */
    int64_t kc, mc; /* block of k, and rows of A that stay in the second-level cache beside it */
    int64_t nc;     /* columns of B packed at a time */
    int64_t dot_kc; /* block of k for dot */
    void (*tile)(const wki_gemm_tile *t);
    void (*dot)(const wki_gemm_tile *t); /* the same for n 1, a_cs 1 and b_rs 1, vectors running along k */

    /* dst[p * ld + l] = src[p * ps + l * ls] for p < k and l < lanes; without tails also 0 up to ld. */
    void (*pack)(float *dst, int64_t ld, const float *src, int64_t ps, int64_t ls, int64_t k, int64_t lanes);
} wki_gemm_tier;

/* The epilogue for the element at row i, column j of a tile, whose sum is v. */
static inline float wki_gemm_finish(const wki_gemm_tile *t, float v, int i, int j) {
    if (t->alpha != 1)
        v *= t->alpha;
    if (t->beta != 0)
        v += t->beta * t->c[i * t->c_rs + j];
    if (t->bias_n)
        v += t->bias_n[j];
    if (t->bias_m)
        v += t->bias_m[i];
    return t->act == WKI_ACT_RELU && v < 0 ? 0 : v;
}

extern const wki_gemm_tier wki_gemm_baseline;
#if defined(__x86_64__)
extern const wki_gemm_tier wki_gemm_avx512;
#endif
