/* opgen turns the op table (src/ops/ops.def) into C. table.c reads rows, expr.c parses the little expression language that
 * loops and gradients share, loop.c compiles loop text to instruction tables, vjp.c compiles gradient text to C, emit.c
 * writes the three files. A build tool: it runs once per build, reports the first bad line of a row as FILE:LINE and exits. */
#ifndef OPGEN_H
#define OPGEN_H

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum {
    MAX_OPS = 256,
    MAX_IN = 8,
    MAX_OUT = 4,
    MAX_ATTR = 12,
    MAX_LINES = 24,
    MAX_LOOPS = 16,
    MAX_PUBLIC = 3,
};

typedef struct text {
    const char *s;
    int line;
} text;

/* Types of attributes: X(NAME, what an argument of that type is in gradient text). */
#define ATTR_KINDS(X)                                                                                        \
    X(INT, NUMBER)                                                                                           \
    X(BOOL, NUMBER)                                                                                          \
    X(DTYPE, DTYPE)                                                                                          \
    X(LIST, LIST)                                                                                            \
    X(SHAPE, LIST)                                                                                           \
    X(DIM, NUMBER)                                                                                           \
    X(DIMS, LIST)                                                                                            \
    X(PERM, LIST)                                                                                            \
    X(VALUE, NUMBER)
typedef enum attr_kind {
#define KIND(name, value) A_##name,
    ATTR_KINDS(KIND)
#undef KIND
} attr_kind;

typedef struct attr {
    const char *name;
    attr_kind kind;
    const char *hidden; /* C expression that fills it; not a parameter */
    int line;
} attr;

typedef struct input {
    const char *name;
    bool optional, row, variadic, writes;
    char type; /* 'F' 'I' 'B' when the row says so, else 0: as the loop's guard says */
} input;

/* A second public prototype: its own parameters, attributes given as C expressions. */
typedef struct public_form {
    const char *name;
    attr param[MAX_ATTR];
    int nparam;
    const char *value[MAX_ATTR];
    int nvalue, line;
} public_form;

typedef struct loop_variant {
    char in_kind, out_kind; /* 'F' 'D' 'I' 'L' 'B', '*' any */
    text stmt[MAX_LINES];
    int nstmt;
} loop_variant;

typedef struct op {
    const char *name, *klass, *infer, *canon, *red, *vjp_fn;
    text doc[MAX_LINES];
    input in[MAX_IN];
    text vjp[MAX_IN]; /* per input: gradient expression */
    const char *out[MAX_OUT];
    attr attr[MAX_ATTR];
    const char *flag[16];
    public_form pub[MAX_PUBLIC];
    loop_variant loop[MAX_LOOPS];
    double lo, hi, ulp;
    int line, since, ndoc, nin, nout, nattr, nflag, npub, nloop;
    unsigned save_in, save_out, diff;
    bool internal, composite, variadic, keep_meta, has_sample;
} op;

extern op ops[MAX_OPS];
extern int nops;
extern const char *table_path;

static inline bool is(const char *a, const char *b) { return strcmp(a, b) == 0; }
_Noreturn void fail_at(int line, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void *take(size_t n); /* memory for the life of the program */
char *format(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

void table_read(const char *path);
const op *op_find(const char *name);
int in_find(const op *o, const char *name);
int out_find(const op *o, const char *name);
int attr_find(const op *o, const char *name);
bool has_flag(const op *o, const char *flag);
bool is_structural(attr_kind k);
bool is_list(attr_kind k); /* in words: a count, then so many items */

/* ---- expressions ---- */
typedef enum ekind { E_NUM, E_NAME, E_CALL, E_BIN, E_NEG, E_LIST } ekind;
typedef struct expr {
    ekind kind;
    double num;
    const char *name; /* NAME, CALL; BIN: the operator */
    struct expr *arg[8];
    int narg;
} expr;
expr *expr_parse(const char *s, int line);
const char *expr_split(text t, const char **rhs); /* "name = ..." -> name */

void loop_emit(FILE *f, const op *o); /* instruction tables and wki_loop records */
void vjp_check(op *o);                /* derives save masks and diff */
void vjp_emit(FILE *f, const op *o);  /* the gradient function of rows with gradient text */

void emit_public_header(FILE *f);
void emit_header(FILE *f);
void emit_source(FILE *f);
void emit_straight_programs(FILE *f); /* elementwise programs as straight-line vector C */

#endif
