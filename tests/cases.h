/* The case table: rows of tests/cases.def, each an op of the op table called on inputs of given shapes, with a reference in
 * double. Tests of internals: ops are called by their internal wrappers, so that helper ops are covered too. */
#pragma once
#include "core/core.h"
#include "ops_gen.h"

enum { CASE_MAX_IN = 8, CASE_MAX_OUT = 4, CASE_MAX_DIMS = 5 };
#define CASE_SEED 77u /* of the context when a case is called; its sequence number is 0 then */
#define CASE_EPS 1.1920928955078125e-7 /* of f32 */

/* A row-major tensor of doubles, which hold every dtype's values in use. */
typedef struct dten {
    wk_dtype dtype;
    int ndim;
    int64_t size[WK_MAX_DIMS], n;
    double *v;
    double *mag; /* outputs: what rounding errors of a few eps are relative to, beside the value itself */
} dten;

typedef enum case_fill {
    CASE_VALUES, /* lo..hi, by default the op's sample domain */
    CASE_SPACED, /* distinct, 0.1 apart and away from 0, for ops with kinks */
    CASE_INTS,   /* integers lo..hi */
} case_fill;

typedef struct case_in {
    uint8_t how, dtype, ndim;
    double lo, hi; /* both 0: the sample domain */
    int64_t size[CASE_MAX_DIMS];
} case_in;

enum {
    CASE_NO_GRAD = 1,    /* no gradient flows, though inputs are f32 */
    CASE_NO_SPECIAL = 2, /* not for NaN, infinities and the like */
    CASE_NO_LARGE = 4,
    /* Special values in the first input alone: what padding times infinity is stays open. */
    CASE_SPECIAL_FIRST = 8,
};

typedef struct op_case {
    const char *name; /* OP/ or OP/SUFFIX */
    uint16_t op;
    uint8_t flags, nin;
    const case_in *in;
    uint32_t writes; /* in place: the outputs are these inputs */
    int line;        /* in cases.def */
    void (*call)(wk_ctx *c, wki_tensor *const *x, wki_tensor **y);
    int (*ref)(const dten *x, dten *y); /* allocates y; returns how many */
} op_case;

extern const op_case op_cases[];
extern const int op_case_count;

/* ---- instances: a row with values and layouts ------------------------------------------------------------------------ */

typedef enum case_layout {
    CASE_PLAIN,
    CASE_TRANSPOSED, /* dimensions in memory in reverse order */
    CASE_OFFSET,     /* a slice of a larger tensor, every other element of the last dimension */
    CASE_EXPANDED,   /* one dimension of stride 0 */
    CASE_LAYOUTS
} case_layout;
typedef enum case_values {
    CASE_NORMAL,
    CASE_SPECIAL,
    CASE_LARGE,
    CASE_MILD
} case_values; /* MILD: for differences */

typedef struct case_instance {
    const op_case *k;
    dten x[CASE_MAX_IN], y[CASE_MAX_OUT];
    int nout;
    case_layout layout[CASE_MAX_IN];
    int expanded[CASE_MAX_IN]; /* which dimension */
} case_instance;

/* Values, then the reference's results. */
void case_open(case_instance *t, const op_case *k, case_values values, const case_layout *layout);
void case_close(case_instance *t);
/* A tensor on the context's device, laid out as asked; owned by the current scope. */
wki_tensor *case_tensor(wk_ctx *c, const dten *d, case_layout layout, int expanded);
void case_inputs(wk_ctx *c, const case_instance *t, wki_tensor **x);
/* The float inputs that a gradient flows to. */
bool case_differentiable(const op_case *k, int input);
int64_t case_numel(const op_case *k); /* of all inputs */

/* A new d like another, zeros. */
dten case_like(const dten *d);
void case_free(dten *d);

/* Reads a tensor into doubles; n is -1 after a failure, which was reported. */
dten case_read(wki_tensor *t);
/* Compares with the reference's output j; `slack` widens tolerances that are not 0. */
void case_compare(const case_instance *t, int j, wki_tensor *got, double slack, const char *how);

/* A row as a program: the call, then the gradients of sum(w y) with respect to the float inputs, then those of the sum of the
   products of these with v, with respect to inputs and w. in: x, then w per float output, then v per differentiable input;
   out: y, gradients, second gradients. */
typedef struct case_program {
    const case_instance *t;
    bool before, after; /* an elementwise op before every f32 input, after every f32 output */
    int order;          /* of derivatives: 0, 1, 2 */
    int nx, ny, nw, nv; /* filled by case_program_open */
} case_program;
void case_program_open(case_program *p, const case_instance *t, int order);
int case_program_nin(const case_program *p);
int case_program_nout(const case_program *p);
void case_program_run(wk_ctx *c, void *program, wk_tensor *const *in, int nin, wk_tensor **out, int nout);

/* A context on the device, or NULL after a skip. */
wk_ctx *case_context(wk_device d);
wk_device case_device(void); /* WICK_TEST_DEVICE, cpu by default */
