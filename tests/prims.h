/* What the tests of the scalar primitives share: for each target a table of functions that run one primitive
 * over arrays, made from prims.def, and the comparison of two such tables on random and special bits. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum {
#define P(E, n, arity, signature) WKT_P_##E,
#include "ops/prims.def"
    WKT_PRIMS
};

typedef struct wkt_prim_table {
    const char *name;
    /* in[k]: n lanes of operand k, 64-byte aligned; n is a multiple of 16. */
    void (*run[WKT_PRIMS])(void *out, const void *const *in, size_t n);
    /* Elements base .. base + n - 1 of the stream; base is a multiple of 4. */
    void (*rng[WKT_PRIMS])(float *out, uint64_t seed, uint64_t seq, uint64_t base, size_t n);
} wkt_prim_table;

/* Scalar C as the baseline compiles it: what every other target is compared with. */
extern const wkt_prim_table wkt_prim_scalar;

/* Checks every primitive of `got` against wkt_prim_scalar, bit for bit but for the kind of a NaN. */
void wkt_prims_compare(const wkt_prim_table *got);
