/* Plans: what a recorded segment becomes. A plan is immutable and belongs to the runtime; what a device keeps for running it
 * (addresses, graphs) belongs to a context and is made by the device's plan api.
 *
 * Two keys: the exact key stream of the segment finds a plan (one shape); the structure key, in which sizes are replaced by
 * the pattern of their equalities, finds the grouping of ops into loops, so that a new shape costs lowering and a memory
 * plan, but no search and no new kernel text.
 */
#ifndef WKI_PLAN_H
#define WKI_PLAN_H

#include "backend/backend.h"
#include "graph/graph.h"

/* ---- grouping (compile/fuse.c) -------------------------------------------------------------------------------------- */

typedef struct wki_groups { /* nodes of the graph in the order they run, in groups */
    int ngroup;
    int *first; /* ngroup + 1: group g is node[first[g] .. first[g+1]) */
    int *node;  /* graph node numbers, program order within a group */
} wki_groups;

typedef struct wki_domain {
    int ndim;     /* -1: not a loop */
    uint32_t red; /* mask of reduced logical dimensions */
    int64_t size[WK_MAX_DIMS];
} wki_domain;

wki_domain wki_node_domain(const wki_graph *g, const wki_gnode *n);
const wki_loop *wki_node_loop(const wki_graph *g, const wki_gnode *n);
/* Can the node find at run time that an index is out of range? */
bool wki_node_checks(const wki_graph *g, const wki_gnode *n);
/* Does the node write, in place, storage from outside the segment? */
bool wki_node_writes_outside(const wki_graph *g, const wki_gnode *n);
/* The domain that holds both, or ndim -1. */
wki_domain wki_domain_join(const wki_domain *a, const wki_domain *b);
/* Has a node with domain `own` the row shape of `d`, rather than its full shape? */
bool wki_domain_row(const wki_domain *d, const wki_domain *own);
/* Strides of one operand of a node over the logical dimensions of the group's domain d; 0 along dimensions of size 1. */
bool wki_map_ref(const wki_domain *d, const wki_domain *own, const wki_gnode *n, const wki_gref *f,
                 int64_t *stride);

/* Marks nodes whose results nobody needs; false after wki_fail, like the passes below. */
bool wki_pass_dead(wk_ctx *c, wki_graph *g);
/* Makes one op of a linear and the relu that alone reads it (compile/epilogue.c). */
bool wki_pass_epilogue(wk_ctx *c, wki_graph *g);
/* Groups loop ops that share a domain. */
bool wki_pass_fuse(wk_ctx *c, const wki_graph *g, wki_groups *out);
void wki_groups_free(wki_groups *gr);

/* ---- steps --------------------------------------------------------------------------------------------------------- */

typedef enum wki_step_kind { WKI_STEP_LOOP, WKI_STEP_KERNEL, WKI_STEP_USER } wki_step_kind;

typedef struct wki_at { /* where an operand is: a buffer of the plan and a byte offset into it */
    int32_t buf;        /* -1: absent */
    int64_t off;
} wki_at;

typedef struct wki_step {
    wki_step_kind kind;
    const wki_op *op; /* KERNEL, USER: the op; LOOP: its last op, for names in messages */
    int multi;        /* LOOP: steps of one multi-tensor op share a number > 0 and may run as one kernel */
    /* LOOP */
    wki_loop prog;
    wki_inst *inst;
    /* As many operands as the program has; their data, arg, rng_seq, seed, fault are filled per run. */
    wki_loop_run *run;
    wki_at *at;   /* per operand */
    int32_t *va;  /* prog.narg places in the segment's VALUE list */
    int32_t *rng; /* prog.nrng relative sequence numbers */
    /* KERNEL, USER */
    const wki_gnode *node;
    const wki_kernel *kernel;
    wki_view *view; /* inputs, then outputs; data is the byte offset, to be added to buffer view_buf[i] */
    int32_t *view_buf;
    int32_t workspace; /* buffer number of its workspace, or -1 */
} wki_step;

typedef struct wki_plan_buf {
    enum { WKI_B_GONE, WKI_B_EXTERNAL, WKI_B_OUTPUT, WKI_B_ARENA } kind;
    uint8_t pinned, written;
    int64_t bytes;
    int64_t arena; /* byte offset, for ARENA */
} wki_plan_buf;

/* A storage from outside is written before the last step that may fail, because that step needs what was written: its bytes
   are kept, and put back when a step fails. */
typedef struct wki_save {
    int32_t buf, copy; /* copy: in the arena */
} wki_save;

typedef struct wki_plan {
    uint64_t hash;
    _Atomic int32_t refs;
    wki_graph *g;
    int nstep;
    wki_step *step;
    int nbuf; /* the graph's buffers, then workspaces and copies of what is saved */
    wki_plan_buf *buf;
    int nsave;
    wki_save *save;
    int64_t arena_bytes, lower_bound;
} wki_plan;

/* Turns groups into steps (compile/lower.c). */
bool wki_lower(wk_ctx *c, wki_plan *p, const wki_groups *gr);
/* Assigns arena offsets (compile/memory.c). */
bool wki_pass_memory(wk_ctx *c, wki_plan *p);
/* Gives back one reference (compile/plan.c); NULL is ignored. */
void wki_plan_unref(wki_plan *p);
/* One line per step, for WICK_TRACE=plan. */
void wki_plan_print(const wki_plan *p);

/* ---- running ------------------------------------------------------------------------------------------------------- */

typedef struct wki_plan_args {
    void **buf;        /* per plan buffer: address of EXTERNAL and OUTPUT ones; the device fills the rest */
    const double *val; /* VALUE attributes */
    uint64_t seed, rng_base;
} wki_plan_args;

typedef struct wki_plan_api {
    /* What the context needs to run p: kernels, addresses, graphs. NULL after wki_fail. */
    void *(*prepare)(wk_ctx *c, const wki_plan *p);
    bool (*run)(wk_ctx *c, const wki_plan *p, void *state, const wki_plan_args *a);
    void (*release)(wk_ctx *c, void *state);
} wki_plan_api;

#endif
