/* Loop programs: the one definition of every elementwise, reduction and row op.
 *
 * A program computes over a domain of logical dimensions: `ndim - nred` KEEP dimensions (together: the rows) followed by
 * `nred` RED dimensions (together: the columns). Instructions are in SSA form: instruction i defines value i. A value is
 * ELEM (one per element of the domain) or ROW (one per row). REDUCE turns ELEM into ROW; a ROW value used by an ELEM
 * instruction is the same for all columns. With nred == 0 there is no ROW level: everything is ELEM.
 *
 * Eager runs an op's own program; the compiler splices programs into larger ones; the CUDA backend prints the same
 * instructions as CUDA C. What a program means is fixed by the reference interpreter (backend/cpu/loop_ref.c).
 */
#ifndef WKI_LOOP_H
#define WKI_LOOP_H

#include <wick.h>

typedef enum wki_loop_code {
    WKI_L_LOAD, /* operand a -> value; converts from the operand's dtype: f32/f64 -> F, i64/i32/u8 -> I, bool -> mask */
    WKI_L_STORE, /* value b -> operand a; converts to the operand's dtype. Level decides: ROW stores once per row */
    WKI_L_PRIM,   /* primitive `sub` of values a, b, c */
    WKI_L_REDUCE, /* `sub`: WKI_R_SUM, WKI_R_MAX, WKI_R_MIN, of value a over the columns */
    WKI_L_CONST,  /* imm */
    WKI_L_ARG,    /* VALUE argument number a, as float */
    WKI_L_INDEX, /* logical index along dimension a of the op's output shape, a counted from its end (0: last), as I */
    WKI_L_RNG, /* `sub`: WKI_P_UNIFORM or WKI_P_NORMAL at the row-major logical index of the element; a: which sequence
                     number (the program's RNG argument a) */
    WKI_L_CHECK, /* value a (mask, any level) must be true everywhere, else the plan reports WK_INDEX; imm.i: op id */
} wki_loop_code;
typedef enum wki_prim {
#define P(E, name, arity, signature) WKI_P_##E,
#include "ops/prims.def"
    WKI_P_COUNT
} wki_prim;
typedef enum wki_reduce { WKI_R_SUM, WKI_R_MAX, WKI_R_MIN } wki_reduce;
enum { WKI_ELEM = 0, WKI_ROWV = 1 };
enum { WKI_TF = 0, WKI_TI = 1 }; /* register type: float, or int32 (masks: all ones / zero) */

typedef struct wki_inst {
    uint8_t code, sub, level, type;
    int16_t a, b, c;
    union {
        float f;
        int32_t i;
    } imm;
} wki_inst;

typedef struct wki_loop {
    int16_t ninst, nload, nstore, narg; /* operands 0..nload-1 are read, nload..nload+nstore-1 written */
    int8_t nrng;
    /* The same program as straight-line code, compiled with the library: its number there; 0: none. */
    int16_t straight;
    const wki_inst *inst;
    bool in_place; /* of a plan: CUDA's kernel does nothing once a check has failed */
} wki_loop;

/* Kinds of dtype a program is for: 'F' f32, 'D' f64, 'I' u8 i32, 'L' i64, 'B' bool, '*' any; of input 0 and of output 0. Where
   an op has none for its dtypes, because 32 bits would not do, kernels.def has a kernel. */
typedef struct wki_loop_guard {
    char in, out;
} wki_loop_guard;

#define WKI_LOOP_MAX_INST 160
#define WKI_LOOP_MAX_OPERANDS 24
#define WKI_LOOP_MAX_DIMS WK_MAX_DIMS

typedef struct wki_operand {
    void *data;                        /* address of the element at domain index 0 */
    uint8_t dtype;                     /* wk_dtype */
    int64_t stride[WKI_LOOP_MAX_DIMS]; /* elements, per domain dimension; 0 where it does not depend on it */
} wki_operand;

/* One execution. `col`: the innermost logical dimension of the reduced tensor is kept (a column reduction); the canonical
   reduction tree depends on `col` and the RED sizes only, never on strides, threads or ISA. */
typedef struct wki_loop_run {
    const wki_loop *prog;
    int ndim, nred;
    bool col;
    int64_t size[WKI_LOOP_MAX_DIMS];
    const float *arg; /* narg */
    uint64_t seed;
    const uint64_t *rng_seq; /* nrng */
    /* logical[i]: place of domain dimension i in the row-major logical order (RNG, INDEX). */
    int8_t logical[WKI_LOOP_MAX_DIMS];
    int32_t *fault;                          /* CHECK: receives op id + 1 when a check failed */
    wki_operand opnd[WKI_LOOP_MAX_OPERANDS]; /* last: plans allocate only as many as the program has */
} wki_loop_run;

/* The values an instruction uses, not operands nor arguments; returns how many. */
static inline int wki_loop_uses(const wki_inst *in, int16_t *v) {
    static const int8_t arity[] = {
#define P(E, name, arity, signature) arity,
#include "ops/prims.def"
    };
    switch ((wki_loop_code)in->code) {
    case WKI_L_PRIM:
        v[0] = in->a;
        v[1] = in->b;
        v[2] = in->c;
        return arity[in->sub];
    case WKI_L_STORE:
        v[0] = in->b;
        return 1;
    case WKI_L_REDUCE:
    case WKI_L_CHECK:
        v[0] = in->a;
        return 1;
    default:
        return 0;
    }
}

/* Bytes of a run with n operands. */
static inline size_t wki_loop_run_bytes(int n) {
    return offsetof(wki_loop_run, opnd) + (size_t)n * sizeof(wki_operand);
}

#endif
