/* CUDA C for loop programs: the text of a kernel and, apart from it, the parameters of one launch. May call
 * base and core; needs neither a driver nor a device.
 *
 * A text depends on the program, the operands' dtypes, how many dimensions are left once those that can be
 * walked as one are merged, which operands are contiguous or do not move along the innermost one, row or
 * column reduction, the bucket of the row length, whether long rows are few, and the index width. Sizes, strides and addresses reach a
 * kernel through its parameters. So one text serves many shapes; texts are named by their hash, and several
 * can share one program after wki_emit_cuda_prelude().
 *
 * Every kernel has two parameters: the block of bytes in wki_cu_loop_params, by value, and the device address
 * of the argument block, an array of 64-bit words. Each launch reads pointers, VALUE attributes (as doubles),
 * seed and RNG base from the argument block: nothing in the parameters changes from one run of a plan to the
 * next.
 *
 * Results equal wki_loop_reference to the bit, reductions too: every kernel follows the canonical tree, which
 * depends on `col` and the RED sizes alone. What loads a place and what stores to it may be the same memory,
 * element for element.
 */
#ifndef WKI_EMIT_CUDA_H
#define WKI_EMIT_CUDA_H

#include "ops/loop.h"

typedef struct wki_cu_kernel_text {
    char *src;     /* heap; without the prelude */
    uint64_t hash; /* of src but for its name */
    char name[32]; /* the extern "C" kernel */
} wki_cu_kernel_text;

/* Where the element at domain index 0 of an operand is: at base, or at argument-block word `slot` plus base
   bytes. */
typedef struct wki_cu_operand {
    uint64_t base;
    int32_t slot; /* < 0: base is the address */
} wki_cu_operand;

/* Words of the argument block a program reads. What it does not use is not looked at. */
typedef struct wki_cu_bind {
    const wki_cu_operand *opnd; /* nload + nstore */
    const int32_t *val_slot;    /* narg: words that hold doubles */
    const int32_t *rng_rel;     /* nrng: added to the RNG base */
    int32_t seed_slot, rng_base_slot;
    int32_t
        fault_slot; /* word that holds the address of an int32: receives op id + 1 of a fault; that in the next
                           word: not 0 from a fault on, and then in-place programs do nothing */
    uint64_t scratch, counts; /* addresses of what wki_cu_scratch_of asks for */
} wki_cu_bind;

enum { WKI_CU_PARAM_BYTES = 4080 };

typedef struct wki_cu_loop_params {
    unsigned grid[3], block[3]; /* grid[0] == 0: nothing to do, do not launch. No dynamic shared memory */
    unsigned bytes;             /* of data in use, a multiple of 8; copies may keep only these */
    _Alignas(8) unsigned char data[WKI_CU_PARAM_BYTES];
} wki_cu_loop_params;

/* Below, of a run only prog, ndim, nred, col, size, logical and the operands' dtypes and strides are read. A
 * function that returns false sets *why to a constant text. */

/* Head of every program that holds kernels. Heap; NULL when out of memory. */
char *wki_emit_cuda_prelude(void);

/* What *why is where memory ran out. */
extern const char wki_emit_cuda_nomem[];

bool wki_emit_cuda(const wki_loop_run *r, wki_cu_kernel_text *out, const char **why);
void wki_cu_kernel_text_free(wki_cu_kernel_text *t);

/* Parameters for the kernel that wki_emit_cuda prints for r. */
bool wki_cu_loop_params_fill(const wki_loop_run *r, const wki_cu_bind *b, wki_cu_loop_params *out,
                             const char **why);

/* Memory that a launch needs besides its operands. */
typedef struct wki_cu_scratch {
    size_t bytes; /* of anything */
    int counts;   /* 32-bit words: 0 before a launch, and again behind it */
} wki_cu_scratch;

wki_cu_scratch wki_cu_scratch_of(const wki_loop_run *r);

/* ---- one launch for many tensors ----------------------------------------------------------------------- */

/* Can r's tensor be in one launch with first's (which may be r itself)? No reduction, no INDEX, all operands
 * contiguous, programs and dtypes the same. */
bool wki_cu_multi_joins(const wki_loop_run *first, const wki_loop_run *r);

/* The kernel depends on program and dtypes alone. */
bool wki_emit_cuda_multi(const wki_loop_run *first, wki_cu_kernel_text *out, const char **why);

/* 64-bit words of the table of n tensors, which the caller puts into device memory (it does not change from
   run to run). */
size_t wki_cu_multi_words(const wki_loop *prog, int n);

/* Fills the table, and the parameters for a table at device address `at`. Slots other than those of operands
 * are taken from the first tensor's bind: they are shared. */
bool wki_cu_multi_fill(const wki_loop_run *const *r, const wki_cu_bind *b, int n, uint64_t at,
                       uint64_t *table, wki_cu_loop_params *out, const char **why);

#endif
