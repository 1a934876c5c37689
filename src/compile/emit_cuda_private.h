/* What the files of the CUDA emitter share: emit_cuda_shape.c (domains and parameters), emit_cuda_program.c
 * (what a program computes when), emit_cuda.c (text in general; a thread per element) and emit_cuda_rows.c
 * (kernels of rows). */
#ifndef WKI_EMIT_CUDA_PRIVATE_H
#define WKI_EMIT_CUDA_PRIVATE_H

#include "compile/emit_cuda.h"

/* ---- what text and parameters agree on (emit_cuda_shape.c) --------------------------------------------- */

typedef enum wki_cu_kind {
    WKI_CU_EACH,  /* no rows: a thread per element, or per four */
    WKI_CU_MULTI, /* likewise, of many tensors */
    WKI_CU_WARP,  /* a warp per row of at most 1024 columns */
    WKI_CU_BLOCK, /* a block per row; a warp per part of 1024 columns */
    WKI_CU_SPLIT, /* the same, but blocks share a row: few long rows that are walked once */
    WKI_CU_COL,   /* a thread per row and part of 128 columns: neighbouring rows are neighbours in memory */
} wki_cu_kind;

enum {
    WKI_CU_ROW_PART = 1024, /* columns of a part, as in the reference */
    WKI_CU_COL_PART = 128,
    WKI_CU_THREADS = 256,      /* of a block of EACH and MULTI */
    WKI_CU_WARP_THREADS = 128, /* of WARP */
    WKI_CU_MAX_THREADS = 512,  /* of BLOCK and COL */
    WKI_CU_SPLIT_THREADS = 256,
    WKI_CU_PASS_REDUCES = 8, /* of one pass: bounds shared memory and accumulators */
    WKI_CU_COL_ROWS = 64,    /* at most, of a block of COL */
    WKI_CU_CHUNK = 1024,     /* elements of one tensor that a block of MULTI works on, */
    WKI_CU_BIG_CHUNK = 4096, /* or where there are many */
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
    bool wide;       /* indices need 64 bits */
    bool vec;        /* EACH: by fours */
    bool rng_unit;   /* EACH: the last dimension is the last in logical order too */
    bool rng, index; /* instructions present */
    int chunks;      /* WARP: of 32 columns each, that hold a row */
} wki_cu_shape;

/* Places in the kernel's parameter struct { unsigned long long q[nq]; int d[nd]; }; sizes, strides and
 * weights are in q when wide, else in d. */
typedef struct wki_cu_layout {
    int nq, nd;
    int base, slot; /* of operand 0; MULTI: base is the table's address, slot the number of tensors */
    int size, stride, weight, div;
    int nrow, ncol;
    int arg, rng, seed, rng_base, fault;
    int scratch; /* SPLIT: addresses of parts and of counts */
    int each;    /* SPLIT: parts of a block, blocks of a row; MULTI: elements of a block */
} wki_cu_layout;

void wki_cu_shape_of(const wki_loop_run *r, bool multi, wki_cu_shape *s);
void wki_cu_layout_of(const wki_loop *p, const wki_cu_shape *s, wki_cu_layout *l);
static inline int wki_cu_dims(const wki_cu_shape *s) { return s->nk + s->nr; }

/* ---- programs (emit_cuda_program.c) -------------------------------------------------------------------- */

/* A kernel in the making. A pass walks the columns of a row once. Pass p = 1 .. npass ends in the reductions
 * that need those of pass p - 1; pass npass + 1 stores. */
typedef struct wki_cu_emitter {
    const wki_loop_run *r;
    const wki_loop *p;
    wki_cu_shape s;
    wki_cu_layout l;
    char *text;
    size_t len, cap;
    bool nomem;
    const char *why;
    const char *U, *S; /* types of indices and of offsets */
    int indent;
    int npass;
    uint8_t live[WKI_LOOP_MAX_INST]; /* needed by a store or a check */
    uint8_t pass[WKI_LOOP_MAX_INST]; /* of a REDUCE: its own; of others: of the last REDUCE behind it */
    uint8_t done[WKI_LOOP_MAX_INST]; /* keeping: pass that computes an element's value */
    uint8_t kept[WKI_LOOP_MAX_INST]; /* keeping: a later pass uses it */
    bool keep;                       /* a row is held in registers */
    bool four;                       /* printing four elements at a time */
} emitter;

static inline const wki_inst *inst(const emitter *e, int i) { return &e->p->inst[i]; }

static inline bool rows(const emitter *e) {
    return e->s.kind == WKI_CU_WARP || e->s.kind == WKI_CU_BLOCK || e->s.kind == WKI_CU_SPLIT ||
           e->s.kind == WKI_CU_COL;
}

static inline bool uniform(const wki_inst *in) { return in->code == WKI_L_CONST || in->code == WKI_L_ARG; }

static inline bool acts(const wki_inst *in) { return in->code == WKI_L_STORE || in->code == WKI_L_CHECK; }

/* A value, or action, of the row rather than the element. */
static inline bool of_row(const emitter *e, const wki_inst *in) {
    return rows(e) && !uniform(in) && in->level == WKI_ROWV;
}

static inline bool of_elem(const emitter *e, const wki_inst *in) { return !uniform(in) && !of_row(e, in); }

static inline const char *type_name(const wki_inst *in) { return in->type == WKI_TF ? "float" : "int"; }

static inline char type_letter(const wki_inst *in) { return in->type == WKI_TF ? 'f' : 'i'; }

/* Liveness and passes; false with e->why set where the program breaks a rule. */
bool wki_cu_analyse(emitter *e);
/* Decides whether a row's values are kept between passes. */
void wki_cu_plan_keeping(emitter *e);
/* Values an instruction uses. */
int wki_cu_uses(const wki_inst *in, int16_t out[3]);
/* Is instruction i what pass p is for: a reduction, a store or check of elements? */
bool wki_cu_target(const emitter *e, int i, int p);
/* Marks the elements' values that pass p computes; false when it has nothing to do. */
bool wki_cu_needed(const emitter *e, int p, uint8_t need[WKI_LOOP_MAX_INST]);
/* GPU instructions of an element, roughly. */
int wki_cu_pass_cost(const emitter *e, const uint8_t *need);
const char *wki_cu_dtype_suffix(uint8_t dtype); /* NULL: not in loops */

/* ---- text (emit_cuda.c) -------------------------------------------------------------------------------- */

typedef struct name {
    char s[48];
} name;

name wki_cu_named(const char *format, ...) __attribute__((format(printf, 1, 2)));
void wki_cu_put(emitter *e, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* One line, indented. A line that ends in '{' indents what follows, one that begins with '}' ends that. */
void wki_cu_line(emitter *e, const char *format, ...) __attribute__((format(printf, 2, 3)));
#define PUT(...) wki_cu_put(e, __VA_ARGS__)
#define LINE(...) wki_cu_line(e, __VA_ARGS__)
#define INDENT() wki_cu_put(e, "%*s", 4 * e->indent, "")

name wki_cu_value(const emitter *e, int v);
name wki_cu_wide_param(const emitter *e, bool is_signed, int at);
const char *wki_cu_reduce_name(const wki_inst *in);
const char *wki_cu_dtype_type(uint8_t dtype); /* in memory */
bool wki_cu_operand_used(const emitter *e, int op);
bool wki_cu_any_needs_index(const emitter *e, const uint8_t *need);
/* RNG among the values in need (NULL: all live ones). */
bool wki_cu_any_rng(const emitter *e, const uint8_t *need, bool row);

/* Splits the linear index `from` into indices i<first> .. i<last - 1>. */
void wki_cu_split_index(emitter *e, const char *from, int first, int last);
/* Prints the offset of an operand from its dimensions first .. last - 1; `linear`: the index of all of
   them. */
void wki_cu_put_offset(emitter *e, int op, int first, int last, wki_cu_move move, const char *linear);
/* Defines `var`, the row-major logical index: `linear`, or that of dimensions 0 .. last - 1. */
void wki_cu_put_logical(emitter *e, const char *var, int last, const char *linear);
/* Defines a value that is not a reduction over columns. */
void wki_cu_define_value(emitter *e, int i);
void wki_cu_put_store(emitter *e, const wki_inst *in, const char *where);
void wki_cu_put_check(emitter *e, const wki_inst *in, const char *guard);
/* What all kernels begin with. */
void wki_cu_put_pointers(emitter *e);
void wki_cu_put_uniforms(emitter *e);

/* ---- kernels of rows (emit_cuda_rows.c) ---------------------------------------------------------------- */

void wki_cu_put_row_kernel(emitter *e);

#endif
