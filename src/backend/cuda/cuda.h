/* The CUDA device behind the tables of backend.h and plan.h: what a runtime and a context keep for it, and how the files of
 * this directory that run plans reach each other. May call base, core, the op table, the emitter of loop kernels and cu.h. */
#ifndef WKI_CUDA_H
#define WKI_CUDA_H

#include "backend/backend.h"
#include "backend/cuda/cu.h"
#include "backend/cuda/k_params.cuh"
#include "compile/emit_cuda.h"

#include <pthread.h>

/* Hand-written kernels: F(family, name, parameters, threads of a block, blocks that fit a multiprocessor at
 * least, or 0). A family is a text that holds the kernel's body, NAME_body; each kernel is a program of its
 * own, compiled when it is needed. */
#define WKK_KERNELS(F)                                                                                       \
    F(COPY, wkk_copy1, wkk_copy, WKK_THREADS, 0)                                                             \
    F(COPY, wkk_copy4, wkk_copy, WKK_THREADS, 0)                                                             \
    F(COPY, wkk_copy8, wkk_copy, WKK_THREADS, 0)                                                             \
    F(COPY, wkk_copy16, wkk_copy, WKK_THREADS, 0)                                                            \
    F(COPY, wkk_copy_flat, wkk_copy, WKK_THREADS, 0)                                                         \
    F(COPY, wkk_put_back, wkk_copy, WKK_THREADS, 0)                                                          \
    F(COPY, wkk_set_args, wkk_words, WKK_THREADS, 0)                                                         \
    F(COPY, wkk_attr_floats, wkk_attrs, WKK_THREADS, 0)                                                      \
    F(COPY, wkk_pad_slice, wkk_pad, WKK_THREADS, 0)                                                          \
    F(PRODUCT, wkk_products16, wkk_products, WKK_THREADS, 2)                                                 \
    F(PRODUCT, wkk_products32, wkk_products, WKK_THREADS, 2)                                                 \
    F(PRODUCT, wkk_relu, wkk_relu_params, WKK_THREADS, 0)                                                    \
    F(CONV, wkk_conv16, wkk_conv, WKK_CONV_THREADS, 0)                                                       \
    F(CONV, wkk_conv32, wkk_conv, WKK_CONV_THREADS, 6)                                                       \
    F(CONV, wkk_conv64, wkk_conv, WKK_CONV_THREADS, 0)                                                       \
    F(CONV, wkk_conv_dw16, wkk_conv_dw, WKK_THREADS, 2)                                                      \
    F(CONV, wkk_conv_dw32, wkk_conv_dw, WKK_THREADS, 2)                                                      \
    F(POOL, wkk_max_pool, wkk_pool, WKK_THREADS, 0)                                                          \
    F(POOL, wkk_pool_grad_small, wkk_pool_grad, WKK_THREADS, 0)                                              \
    F(POOL, wkk_pool_grad_large, wkk_pool_grad, WKK_THREADS, 0)                                              \
    F(POOL, wkk_pool_grad_clear, wkk_pool_grad, WKK_THREADS, 0)                                              \
    F(POOL, wkk_pool_grad_mark, wkk_pool_grad, WKK_THREADS, 0)                                               \
    F(POOL, wkk_pool_grad_sum, wkk_pool_grad, WKK_THREADS, 0)                                                \
    F(POOL, wkk_max_pool_gather, wkk_pool_gather, WKK_THREADS, 0)                                            \
    F(INDEX, wkk_embedding_rows, wkk_embedding, WKK_THREADS, 0)                                              \
    F(INDEX, wkk_embedding_index, wkk_index32, WKK_THREADS, 0)                                               \
    F(INDEX, wkk_embedding_sum, wkk_embedding_grad, WKK_THREADS, 0)                                          \
    F(WIDE, wkk_cast_wide, wkk_cast, WKK_THREADS, 0)                                                         \
    F(WIDE, wkk_compare_wide, wkk_compare, WKK_THREADS, 0)

typedef enum wki_cuda_fn {
#define F(family, name, params, threads, blocks) WKI_FN_##name,
    WKK_KERNELS(F)
#undef F
        WKI_FN_COUNT
} wki_cuda_fn;
typedef enum wki_cuda_family {
    WKI_FAMILY_COPY,
    WKI_FAMILY_PRODUCT,
    WKI_FAMILY_CONV,
    WKI_FAMILY_POOL,
    WKI_FAMILY_INDEX,
    WKI_FAMILY_WIDE,
} wki_cuda_family;

/* ---- the runtime's part: rt->dev_state[WK_CUDA] ---------------------------------------------------------------------- */

typedef struct wki_cuda_texts wki_cuda_texts; /* kernels of generated texts (texts.c) */

typedef struct wki_cuda {
    wki_cu *cu;
    wki_cu_device *dev; /* NULL: there is none, and `why` says so */
    char why[1008];
    pthread_mutex_t lock; /* guards what follows */
    wki_cuda_texts *texts;
    _Atomic(wki_cu_function *) fn[WKI_FN_COUNT];
} wki_cuda;

/* ---- the context's part: c->dev_state[WK_CUDA] ------------------------------------------------------------------------ */

/* First words of the argument block; VALUE attributes as doubles follow, then addresses. */
enum {
    WKI_ARG_SEED,
    WKI_ARG_RNG_BASE,
    WKI_ARG_FAULT = WKK_FAULT_WORD,
    WKI_ARG_STOP = WKK_STOP_WORD,
    WKI_ARG_VALUES
};

typedef struct wki_cuda_ctx {
    wki_cuda *rt;
    wki_cu_stream *stream;
    wki_cu_ptr arena, args; /* args: the argument block */
    wki_cu_ptr
        counts; /* WKI_COUNTS words of 0, for blocks that wait for others: 0 again behind each kernel */
    wki_cu_ptr
        stop; /* an int: not 0 from a fault on until the host has seen it; then nothing is written in place */
    size_t arena_bytes, args_bytes;
    uint32_t generation; /* moves on when one of these addresses does: plans that hold it are set up again */
    wki_cu_ring *ring;   /* feeds args */
    wki_cu_ring *upload; /* blocks of WKI_UPLOAD_BYTES, made on demand */
    char *bounce; /* page-locked: WKI_BOUNCE_BYTES for small downloads, then the fault word, an int32 */
    const char *first_op, *last_op; /* of the plan queued last: for errors that show up later */
    wkk_products held;              /* not launched yet: wki_cuda_products_flush */
} wki_cuda_ctx;

enum {
    WKI_UPLOAD_BLOCKS = 16,
    WKI_UPLOAD_BYTES = 256 * 1024,
    WKI_BOUNCE_BYTES = 64 * 1024,
    WKI_COUNTS = 4096
};

/* Kernels write it where it is, in the host's memory, at the same address. */
static inline volatile int32_t *wki_cuda_fault(const wki_cuda_ctx *s) {
    return (volatile int32_t *)(void *)(s->bounce + WKI_BOUNCE_BYTES);
}

/* The context's state, made on demand; NULL after wki_fail. */
wki_cuda_ctx *wki_cuda_of(wk_ctx *c);
/* wki_fail for what a call of cu.h reported; returns false. */
bool wki_cuda_fail(wk_ctx *c, const wki_cu_error *err);
/* Room for a plan's arena and argument block. */
bool wki_cuda_reserve(wk_ctx *c, size_t arena_bytes, size_t args_bytes);
/* Host to device, in stream order; src may be reused on return. */
bool wki_cuda_upload(wk_ctx *c, wki_cu_ptr to, const void *src, size_t bytes);

/* ---- kernels ----------------------------------------------------------------------------------------------------------- */

/* The program of one kernel, or with WKI_FN_COUNT of all; heap, NULL when out of memory. */
char *wki_cuda_fn_text(wki_cuda_fn fn);
/* Compiled and loaded on first use, which must not be inside a capture. */
bool wki_cuda_fn_get(wk_ctx *c, wki_cuda_fn fn, wki_cu_function **out);
/* Queues a hand-written kernel: blocks for `work` items, `each` of them a block, or as many as given. Nothing
   when there are none. */
bool wki_cuda_launch(wk_ctx *c, wki_cuda_fn fn, const void *params, int64_t work, int64_t each);
/* How it would be queued, for the same call. */
bool wki_cuda_kernel_of(wk_ctx *c, wki_cuda_fn fn, void **params, int64_t x, int64_t y, wki_cu_kernel *out);
bool wki_cuda_launch_grid(wk_ctx *c, wki_cuda_fn fn, const void *params, int64_t x, int64_t y);
/* Queues the products that wait for others to share a launch with. */
bool wki_cuda_products_flush(wk_ctx *c);
/* Of n elements of `bytes` each: dst and src are addresses, strides count elements. */
bool wki_cuda_copy(wk_ctx *c, int bytes, int nd, const int64_t *size, wkk_at dst, const int64_t *ds,
                   wkk_at src, const int64_t *ss);
/* A contiguous copy of v. */
bool wki_cuda_copy_plain(wk_ctx *c, wkk_at dst, const wki_view *v);
bool wki_cuda_zero(wk_ctx *c, wki_cu_ptr p, int64_t floats);
/* An f32 product at fixed addresses; type and alignment are filled in. */
bool wki_cuda_gemm(wk_ctx *c, wki_cu_gemm *g, const wki_cu_gemm_args *args);
/* Can a product walk an operand with these strides, or must it be copied? */
bool wki_cuda_gemm_walks(int64_t rows, int64_t cols, int64_t rs, int64_t cs);

static inline wkk_at wki_at_of(const wki_view *v) { return (wkk_at){(wkk_u64)(uintptr_t)v->data, v->slot}; }
static inline wkk_at wki_at_addr(wki_cu_ptr p) { return (wkk_at){p, -1}; }
static inline wki_cu_ptr wki_addr_of(const wki_view *v) { return (wki_cu_ptr)(uintptr_t)v->data; }
void wki_cuda_view(wkk_view *out, const wki_view *v, int nd);
static inline bool wki_view_absent(const wki_view *v) { return v->dtype == WK_DTYPE_COUNT; }

/* The functions of generated texts, compiled where they are not known yet. Fills fn[0..n-1]. */
bool wki_cuda_texts_get(wk_ctx *c, const wki_cu_kernel_text *t, int n, wki_cu_function **fn);
/* A user op's kernel: the one __global__ function of its text. */
bool wki_cuda_user_fn(wk_ctx *c, const wki_op *op, wki_cu_function **fn);
void wki_cuda_texts_free(wki_cuda *rt);

/* ---- plans (plan_cuda.c) ----------------------------------------------------------------------------------------------- */

extern const struct wki_plan_api wki_cuda_plans;

#endif
