/* Packed single-precision matrix multiplication with a fused epilogue: the public face of gemm*.c. Built on
 * base/cpu and base/pool; allocates nothing. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/cpu.h"
#include "base/pool.h"

typedef enum { WKI_ACT_NONE, WKI_ACT_RELU } wki_act;

/* For each batch: C = act(alpha * A B + beta * C + bias_n + bias_m), with A (m, k), B (k, n), C (m, n).
 *
 * Strides count elements. Those of A and B may be anything, 0 and negative included; C has unit column stride, and
 * must not overlap A, B or, from one batch to the next, itself. Batch stride 0 in A or B shares the matrix.
 * alpha is an ordinary factor (0 still reads A and B); beta 0 never reads C; k 0 leaves out the product.
 * RELU keeps NaN. Each sum runs over k in order, in blocks whose size depends on k alone, except that the sums of a
 * single row or column may be of interleaved parts: the order is a function of the problem and the tier. */
typedef struct {
    int64_t m, n, k, batch;
    const float *a;
    int64_t a_rs, a_cs, a_bs; /* row, column, batch stride */
    const float *b;
    int64_t b_rs, b_cs, b_bs;
    float *c;
    int64_t c_rs, c_bs;
    float alpha, beta;
    const float *bias_n; /* (n) or NULL: one per column */
    const float *bias_m; /* (m) or NULL: one per row */
    wki_act act;
} wki_gemm;

/* Bytes that wki_gemm_run needs for this problem and a pool of nthreads: a multiple of 64, 0 when it needs none. */
size_t wki_gemm_workspace(const wki_gemm *g, wki_isa isa, int nthreads);

/* Computes. `isa` is the tier to use, `pool` may be NULL. `workspace` has wki_gemm_workspace(g, isa,
 * wki_pool_size(pool)) bytes, best aligned to 64. For one tier the result has the same bits for any number of threads
 * and any workspace. */
void wki_gemm_run(const wki_gemm *g, wki_isa isa, wki_pool *pool, void *workspace);

/* The same by three plain loops with sums in double, rounded once: what tests compare with. */
void wki_gemm_reference(const wki_gemm *g);
