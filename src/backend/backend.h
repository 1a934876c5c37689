/* What a backend gives: kernels for ops that are not loop programs, and an executor for plans.
 *
 * Kernels are ordered rows in backend/kernels.def, best first, reference last: K(op, DEVICE, name, flags). Each row `name`
 * stands for functions `wki_k_<name>_ok` (predicate: shapes, dtypes, strides; data pointers are not valid yet) and
 * `wki_k_<name>_run`, and with WKI_K_WORKSPACE also `wki_k_<name>_workspace` (bytes).
 *
 * Backends see base, core, the op table and plans (compile/plan.h); eager, at the foot of the executors, the recorder too.
 */
#ifndef WKI_BACKEND_H
#define WKI_BACKEND_H

#include "core/core.h"
#include "ops/loop.h"

typedef struct wki_view { /* one operand */
    void *data; /* address of its first element; CUDA with slot >= 0: byte offset to add to argument `slot` */
    int32_t slot; /* -1: `data` is the address */
    uint8_t ndim, dtype;
    bool plain; /* contiguous row-major */
    int64_t numel;
    const int64_t *size, *stride; /* elements */
} wki_view;

typedef struct wki_launch {
    wk_ctx *c;
    const wki_op *op;
    int nin, nout;
    const wki_view *in;  /* absent optional input: dtype WK_DTYPE_COUNT, data NULL */
    const wki_view *out; /* plain, freshly allocated, unless the op says otherwise */
    const int64_t *ia;   /* structural attribute words */
    const double *va; /* VALUE attributes (CPU); CUDA kernels read them from the argument block at va_slot */
    int32_t va_slot;
    void *workspace;    /* 64-byte aligned, as many bytes as asked for */
    const char **unfit; /* where a predicate leaves what it misses (wki_k_needs); NULL: nobody asks */
} wki_launch;

enum {
    WKI_K_WORKSPACE = 1,
    WKI_K_FIXED = 2,   /* CUDA: needs fixed addresses, multiples of 16 (library call): the plan sees to it */
    WKI_K_PRODUCT = 4, /* CUDA: can share a launch with the next one */
};

typedef struct wki_kernel {
    uint16_t op;
    uint8_t dev, flags;
    const char *name;
    bool (*ok)(const wki_launch *l);
    size_t (*workspace)(const wki_launch *l);
    /* CPU: computes; CUDA: enqueues on the context's stream. False after wki_fail. */
    bool (*run)(const wki_launch *l);
} wki_kernel;

/* For predicates: does it hold? Where not, and somebody traces, `what` is what the kernel needs. */
static inline bool wki_k_needs(const wki_launch *l, bool holds, const char *what) {
    if (!holds && l->unfit)
        *l->unfit = what;
    return holds;
}

/* First row of an op, whose rows are adjacent; NULL when it has none. */
const wki_kernel *wki_kernels_of(uint16_t op);
/* First row of (op, device) whose predicate holds; NULL when none. WICK_TRACE=dispatch names it, and those that did not fit with
   what they need and the operands that it met. */
const wki_kernel *wki_kernel_find(const wki_launch *l, wk_device dev);

/* A user op's C function on host memory (ops/user.c). */
bool wki_user_launch(const wki_launch *l);
bool wki_user_runs(const wki_op *op); /* has it one? */

/* Turns what a CHECK instruction left in `fault` into the context's error; returns false. With the run whose operands the
   host can read, the error names the value. */
bool wki_report_fault(wk_ctx *c, int32_t fault, const wki_loop_run *r);

/* CPU: runs a loop program now. backend/cpu/loop.c. Returns false when out of memory (caller reports). */
bool wki_loop_cpu(const wki_loop_run *r, wki_isa isa, wki_pool *pool);
/* The same for a run that is repeated with only its operands' addresses, arguments and sequence numbers changed: what can be
   known of r beforehand is in k, of wki_loop_kept_bytes(r) bytes and filled by wki_loop_keep(r, k); NULL where those are 0. */
typedef struct wki_loop_kept wki_loop_kept;
size_t wki_loop_kept_bytes(const wki_loop_run *r);
void wki_loop_keep(const wki_loop_run *r, wki_loop_kept *k);
bool wki_loop_cpu_again(const wki_loop_run *r, wki_isa isa, wki_pool *pool, wki_loop_kept *k);
/* The slow twin that defines loop programs: scalar, one element at a time, any strides. */
bool wki_loop_reference(const wki_loop_run *r);

#endif
