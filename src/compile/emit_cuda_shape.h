/* What the text of a CUDA kernel and the parameters of its launch must agree on: the kernel's kind, the merged domain, and
 * where each parameter lies. Shared by emit_cuda.c and emit_cuda_shape.c alone. */
#ifndef WKI_EMIT_CUDA_SHAPE_H
#define WKI_EMIT_CUDA_SHAPE_H

#include "compile/emit_cuda.h"

typedef enum wki_cu_kind {
    WKI_CU_EACH,  /* no rows: a thread per element, or per four */
    WKI_CU_MULTI, /* likewise, of many tensors */
    WKI_CU_WARP,  /* a warp per row of at most 1024 columns */
    WKI_CU_BLOCK, /* a block per row; a warp per part of 1024 columns */
    WKI_CU_COL,   /* a thread per row and part of 128 columns: neighbouring rows are neighbours in memory */
} wki_cu_kind;

enum {
    WKI_CU_ROW_PART = 1024, /* columns of a part, as in the reference */
    WKI_CU_COL_PART = 128,
    WKI_CU_THREADS = 256,      /* of a block of EACH and MULTI */
    WKI_CU_WARP_THREADS = 128, /* of WARP */
    WKI_CU_MAX_THREADS = 512,  /* of BLOCK and COL */
    WKI_CU_CHUNK = 4096,       /* elements of one tensor that a block of MULTI works on */
};

/* How an operand moves along the columns, or in EACH along the whole domain. */
typedef enum wki_cu_move {
    WKI_CU_STRIDED, /* by a stride for each dimension */
    WKI_CU_UNIT,    /* the same with stride 1 along the last */
    WKI_CU_STILL,   /* the same with stride 0 along the last */
    WKI_CU_LINEAR,  /* its place is the linear index itself */
} wki_cu_move;

typedef struct wki_cu_shape {
    wki_cu_kind kind;
    int nk, nr, nop; /* kept and reduced dimensions after merging; operands */
    int64_t size[WKI_LOOP_MAX_DIMS];
    int64_t stride[WKI_LOOP_MAX_OPERANDS][WKI_LOOP_MAX_DIMS];
    uint64_t weight[WKI_LOOP_MAX_DIMS];      /* in the row-major logical index */
    int8_t index_dim[WKI_LOOP_MAX_DIMS + 1]; /* INDEX a: the dimension, or -1 where the index is always 0 */
    wki_cu_move move[WKI_LOOP_MAX_OPERANDS];
    int64_t nrow, ncol;
    bool wide;      /* indices need 64 bits */
    bool vec;       /* EACH: by fours */
    bool rng_unit;  /* EACH: the last dimension is the last in logical order too */
    bool rng, index; /* instructions present */
    int chunks;     /* WARP: power of two, 32 columns each, that hold a row */
} wki_cu_shape;

/* Places in the kernel's parameter struct { unsigned long long q[nq]; int d[nd]; }; sizes, strides and weights are in q
 * when wide, else in d. */
typedef struct wki_cu_layout {
    int nq, nd;
    int base, slot; /* of operand 0; MULTI: base is the table's address, slot the number of tensors */
    int size, stride, weight, div;
    int nrow, ncol;
    int arg, rng, seed, rng_base, fault;
} wki_cu_layout;

void wki_cu_shape_of(const wki_loop_run *r, bool multi, wki_cu_shape *s);
void wki_cu_layout_of(const wki_loop *p, const wki_cu_shape *s, wki_cu_layout *l);
static inline int wki_cu_dims(const wki_cu_shape *s) {
    return s->nk + s->nr;
}

#endif
