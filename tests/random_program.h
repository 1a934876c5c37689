/* Random programs over the public API: a list of instructions with shapes known beforehand, so that one list can be run
 * eagerly and compiled, printed, and shortened. Public header alone. */
#pragma once
#include <wick.h>

enum {
    RP_MAX_INS = 96,
    RP_MAX_VALUES = 128,
    RP_MAX_DIMS = 5,
    RP_MAX_IN = 6,
    RP_MAX_STATE = 4,
    RP_MAX_OUT = 4
};

typedef enum rp_kind {
    RP_UNARY,   /* sub: which; arg v for add_scalar and mul_scalar */
    RP_BINARY,  /* sub: which */
    RP_COMPARE, /* sub: which */
    RP_WHERE,   /* a: mask */
    RP_FILL,    /* b: mask */
    RP_NOT,
    RP_CAST, /* sub: dtype */
    RP_CLONE,
    RP_DETACH,
    RP_SUM, /* list: dims; sub: keepdim */
    RP_MAX,
    RP_MEAN,
    RP_SOFTMAX, /* sub: dim */
    RP_LOG_SOFTMAX,
    RP_LAYER_NORM, /* b, c: weight and bias or -1 */
    RP_CAUSAL,
    RP_PERMUTE, /* list: dims */
    RP_SLICE,   /* list: dim, start, stop, step */
    RP_RESHAPE, /* list: sizes */
    RP_EXPAND,  /* list: sizes */
    RP_MATMUL,
    RP_LINEAR,    /* c: bias or -1 */
    RP_CONV,      /* c: bias or -1; list: stride, padding */
    RP_POOL,      /* list: k, stride, padding */
    RP_EMBEDDING, /* b: indices */
    RP_ATTENTION, /* sub: causal */
    RP_CROSS_ENTROPY,
    RP_RAND, /* list: sizes; sub: normal */
    RP_DROPOUT,
    RP_FULL,   /* list: sizes; sub: dtype */
    RP_CONST,  /* list: sizes: host data, copied when recorded */
    RP_COPY,   /* a <- b in place */
    RP_READ,   /* a goes to the log */
    RP_BRANCH, /* reads sum(a); sub picks by its sign */
    RP_DROP,   /* a dies */
    RP_SCOPE,
    RP_END,      /* list: values that go to the outer scope */
    RP_GRAD,     /* of the sum of a, with respect to list; dst, dst + 1, ...; sub: create_graph */
    RP_BACKWARD, /* of the sum of a, into the leaves */
    RP_STEP,     /* the optimizer */
    RP_KINDS
} rp_kind;

typedef struct rp_ins {
    uint8_t kind, sub, n; /* n: of list */
    bool skip;            /* left out, while a failure is made smaller */
    int16_t a, b, c, dst; /* value numbers, -1: none */
    float v;
    int64_t list[RP_MAX_DIMS];
} rp_ins;

typedef struct rp_value {
    uint8_t ndim, dtype;
    bool grad;     /* may require grad */
    bool expanded; /* elements may share memory */
    bool dead, borrowed;
    int16_t storage, depth;
    int64_t size[RP_MAX_DIMS];
} rp_value;

typedef struct rp_program {
    uint64_t seed;
    int nin, nstate, nout, nins, nvalues; /* values: inputs, states, results */
    bool optimizer;                       /* over the states that require grad */
    int16_t out[RP_MAX_OUT];
    rp_value value[RP_MAX_VALUES];
    bool used_by_grad[RP_MAX_VALUES]; /* by storage: a record may have saved it */
    rp_ins ins[RP_MAX_INS];
} rp_program;

typedef struct rp_random { /* splitmix64 */
    uint64_t s;
} rp_random;
uint64_t rp_next(rp_random *r);
int rp_below(rp_random *r, int n); /* 0 .. n-1 */
double rp_uniform(rp_random *r, double lo, double hi);

/* `big`: fewer and larger sizes, so that loops have many blocks and threads share them. */
void rp_generate(rp_program *p, uint64_t seed, int length, bool big);
/* Data for a value of the program: floats in -1..1, indices and classes below 3, any booleans. To be freed. */
void *rp_data(const rp_value *v, rp_random *r);
size_t rp_bytes(const rp_value *v);
bool rp_uses(const rp_ins *i, int value); /* reads or writes it */
/* A line per instruction, to be freed. */
char *rp_text(const rp_program *p);

/* What one run leaves behind besides its outputs. */
typedef struct rp_log {
    char *bytes;
    size_t n, cap;
} rp_log;

/* Context for the function below. */
typedef struct rp_run {
    const rp_program *p;
    wk_tensor *state[RP_MAX_STATE];
    wk_optim *optim;
    rp_log *log;
} rp_run;
void rp_execute(wk_ctx *c, void *run, wk_tensor *const *in, int nin, wk_tensor **out, int nout);
void rp_append(rp_log *log, const void *bytes, size_t n);
