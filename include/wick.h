/* Wick: define-by-run tensors, autograd and a compiler, in C.
 *
 * This header is the API and its manual. `<wick/ops.h>`, included below, holds one prototype per op and is generated from
 * the op table. What is not declared in these two files is not API.
 *
 * Conventions
 *  - Handles (`wk_tensor *`, ...) are opaque and never dereferenced by a caller. Every call checks them: a freed handle is
 *    an error in its context, not a wrong number. NULL means "optional argument absent" and nothing else.
 *  - Errors stick. A failing call returns the context's poison tensor (never NULL); compute on poison is poison; the first
 *    error stays in the context until wk_error_take. A program checks wk_failed once a step. Poison that was kept after that
 *    still makes poison in silence; to read it, write with it, differentiate it or make it a parameter is WK_STATE.
 *  - A context and all its handles are used by one thread at a time. Several contexts may run at once, also on one device.
 *  - Sizes are elements unless a name says bytes; shapes are written as (N, C, H, W); strides are elements.
 *  - Structs that callers fill begin with struct_size and come from their init function. The library takes those of an older
 *    header, with defaults for the fields that they lack, and those of a newer one while the fields that it does not know
 *    are 0; else, and where struct_size was never set, the call is WK_INVALID.
 */
#ifndef WICK_H
#define WICK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define WK_API __attribute__((visibility("default")))
#else
#define WK_API
#endif

#define WK_VERSION_MAJOR 0
#define WK_VERSION_MINOR 1
#define WK_VERSION_PATCH 0
#define WK_MAX_DIMS 8

/* Devices, plan and kernel caches, user ops, thread pool. Thread-safe. */
typedef struct wk_runtime wk_runtime;
/* What one thread uses at a time: handles, grad mode, RNG, scopes, error. */
typedef struct wk_ctx wk_ctx;
typedef struct wk_tensor wk_tensor; /* belongs to one context */
typedef struct wk_module wk_module; /* parameters, children and a forward function */
typedef struct wk_optim wk_optim;   /* an optimizer: parameters and its state for them */
typedef struct wk_compiled wk_compiled;
typedef struct wk_loader wk_loader; /* batches of a data set in host memory */

/* The one function type of modules and compiled functions. `self` and inputs are borrowed for the call; out[0..nout-1]
   must be set; returning an input is legal. */
typedef void (*wk_fn)(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout);

/* Codes and texts come from one list each. */
typedef enum wk_status {
#define S(name, text) WK_##name,
#include <wick/status.def>
#undef S
    WK_STATUS_COUNT
} wk_status;

typedef enum wk_dtype {
#define D(name, text, bits, kind, rank) WK_##name,
#include <wick/dtype.def>
#undef D
    WK_DTYPE_COUNT
} wk_dtype;
/* WK_NULL counts work and runs none; reads give zeros. */
typedef enum wk_device { WK_CPU = 0, WK_CUDA, WK_NULL, WK_DEVICE_COUNT } wk_device;

WK_API const char *wk_version(void);            /* "0.1.0" */
WK_API const char *wk_status_name(wk_status s); /* "WK_SHAPE"; static */
WK_API const char *wk_status_text(wk_status s); /* "shape mismatch"; static */
WK_API const char *wk_dtype_name(wk_dtype d);   /* "f32"; static */
WK_API size_t wk_dtype_bits(wk_dtype d);        /* 0 when out of range */
WK_API const char *wk_device_name(wk_device d); /* "cpu" */

/* ---- runtime and context ------------------------------------------------------------------------------------------ */

typedef struct wk_runtime_options {
    size_t struct_size;
    int threads;   /* CPU worker threads, 0: one per available core (WICK_THREADS overrides) */
    uint64_t seed; /* root of every context's RNG */
} wk_runtime_options;
WK_API void wk_runtime_options_init(wk_runtime_options *o);
/* NULL options: defaults. NULL only when the host is out of memory or the options cannot be taken (above: there is no context
   to hold the error). Thread-safe. */
WK_API wk_runtime *wk_runtime_new(const wk_runtime_options *o);
/* Frees the runtime once its last context is gone. */
WK_API void wk_runtime_free(wk_runtime *rt);

/* rt NULL: a default runtime, made on demand and shared by all such contexts. NULL only when out of memory. Thread-safe. */
WK_API wk_ctx *wk_ctx_new(wk_runtime *rt);
/* Frees the context and every handle in it (tensors, modules, optimizers, loaders, compiled functions). */
WK_API void wk_ctx_free(wk_ctx *c);

/* Where creation calls put new tensors; default WK_CPU. Fails with WK_DEVICE and the reason when there is none. */
WK_API void wk_use_device(wk_ctx *c, wk_device d);
WK_API wk_device wk_current_device(wk_ctx *c);
/* Sets no error; why_not (may be NULL) gets the reason, which lives as long as the runtime, or "". */
WK_API bool wk_device_available(wk_ctx *c, wk_device d, const char **why_not);

/* Random numbers follow from the seed and a sequence number, which every op that draws some moves on by one: the same on all
   devices, threads and instruction sets, eager or compiled. wk_seed resets the sequence number to 0; wk_rng_get and
   wk_rng_set save and restore both (either pointer may be NULL). Inside a compiled function wk_seed and wk_rng_set run what
   was recorded so far; a call that fails later undoes the change. */
WK_API void wk_seed(wk_ctx *c, uint64_t seed);
WK_API void wk_rng_get(wk_ctx *c, uint64_t *seed, uint64_t *sequence);
WK_API void wk_rng_set(wk_ctx *c, uint64_t seed, uint64_t sequence);

/* ---- errors -------------------------------------------------------------------------------------------------------- */

typedef struct wk_error {
    wk_status status;
    char message[1024]; /* op, values, caller */
} wk_error;

WK_API bool wk_failed(wk_ctx *c);
/* "" when nothing failed. Owned by the context, valid until the next call. */
WK_API const char *wk_message(wk_ctx *c);
/* Moves the error out (out may be NULL) and makes the context usable again. Returns its status. What a wk_call recorded
   when it failed was discarded: parameters, gradients and the RNG sequence are as before that call, but for what a read in
   it had run already. What was pending from a call before stays, and runs when it is needed. */
WK_API wk_status wk_error_take(wk_ctx *c, wk_error *out);
/* Isolates a probe: errors between begin and end do not stick. end returns the first one. Nests without a limit; a function
   of a call or module ends the probes it begins, else it fails with WK_STATE. */
WK_API void wk_try_begin(wk_ctx *c);
WK_API wk_status wk_try_end(wk_ctx *c, wk_error *out);

/* ---- scopes and ownership ------------------------------------------------------------------------------------------ */

/* A tensor belongs to the innermost scope and dies with it. wk_forward, composites, VJPs and wk_call open their own and
   hand results to the caller's. The context has a root scope. An unmatched end is WK_STATE. */
WK_API void wk_scope_begin(wk_ctx *c);
WK_API void wk_scope_end(wk_ctx *c);
/* Dies now. NULL and dead handles are ignored, and inside wk_forward and wk_call so are tensors of the caller's scopes, so
   that `wk_set(&x, f(x))` may start from an input. */
WK_API void wk_drop(wk_tensor *t);
WK_API void wk_set(wk_tensor **slot, wk_tensor *t); /* drops *slot, stores t */
WK_API wk_tensor *wk_keep(wk_tensor *t);   /* on scope end, moves to the next outer scope; returns t */
WK_API wk_tensor *wk_retain(wk_tensor *t); /* one more reference, released by wk_release; returns t */
WK_API void wk_release(wk_tensor *t);      /* NULL is ignored; without a matching wk_retain it is WK_STATE */
/* Is this a valid handle of this context? Sets no error. */
WK_API bool wk_alive(wk_ctx *c, const wk_tensor *t);
/* A handle in ctx `to` on the same storage (no copy, requires_grad kept, no graph), after what t's context has queued. The
   other context must be idle during the call. From then on nothing orders the two contexts: writes in one take effect in the
   other when they happen, as in Hogwild (wk_sync in the one that writes, before the other reads, orders them). So that
   training without locks works, a context notices only its own in-place writes between forward and backward (WK_VERSION):
   when another context steps in between, gradients are computed with what is there. */
WK_API wk_tensor *wk_share(wk_ctx *to, wk_tensor *t);

/* ---- tensors ------------------------------------------------------------------------------------------------------- */

/* New tensors on the current device, contiguous, in the current scope. A negative or overflowing size and more than
   WK_MAX_DIMS dimensions are WK_SHAPE. ndim 0 is a scalar; size may be NULL then. wk_empty leaves the elements undefined. */
WK_API wk_tensor *wk_empty(wk_ctx *c, wk_dtype dt, int ndim, const int64_t *size);
WK_API wk_tensor *wk_zeros(wk_ctx *c, wk_dtype dt, int ndim, const int64_t *size);
WK_API wk_tensor *wk_ones(wk_ctx *c, wk_dtype dt, int ndim, const int64_t *size);
/* Copies numel elements of dtype dt from host memory; `data` may be reused at once. */
WK_API wk_tensor *wk_from_data(wk_ctx *c, wk_dtype dt, int ndim, const int64_t *size, const void *data);
WK_API wk_tensor *wk_scalar(wk_ctx *c, double value); /* f32, 0-dim */
/* A copy on another device, t itself when it is there already. Waits; no gradient flows through. */
WK_API wk_tensor *wk_to(wk_tensor *t, wk_device d);
WK_API wk_tensor *wk_contiguous(wk_tensor *t); /* t itself when contiguous, else a copy */
WK_API wk_tensor *wk_detach(wk_tensor *t);     /* same storage, no graph */
/* Dimensions start_dim.. (may count from the end) merged into one: a view, or a copy where strides do not allow one. */
WK_API wk_tensor *wk_flatten(wk_tensor *t, int start_dim);
/* A view; dimensions may count from the end. */
WK_API wk_tensor *wk_transpose(wk_tensor *t, int dim0, int dim1);

/* Questions. For a dead handle the answer is 0, false, WK_F32 or WK_CPU (wk_is_poison: true), and its context fails with
   WK_HANDLE. */
WK_API wk_ctx *wk_ctx_of(wk_tensor *t); /* NULL for a dead handle; sets no error */
WK_API int wk_ndim(wk_tensor *t);
/* dim may count from the end (-1); out of range it is WK_SHAPE and 0. */
WK_API int64_t wk_size(wk_tensor *t, int dim);
WK_API int64_t wk_stride(wk_tensor *t, int dim);
WK_API int64_t wk_numel(wk_tensor *t);
WK_API wk_dtype wk_dtype_of(wk_tensor *t);
WK_API wk_device wk_device_of(wk_tensor *t);
WK_API bool wk_is_contiguous(wk_tensor *t);
WK_API bool wk_is_poison(wk_tensor *t);

/* Reading flushes pending work and waits. In a failed context what was computed can still be read; all else gives NaN, 0 or
   false. */
WK_API double wk_item(wk_tensor *t);      /* numel must be 1 */
WK_API int64_t wk_item_i64(wk_tensor *t); /* numel must be 1; floats are truncated */
/* Copies all elements, row-major, to dst. bytes must equal numel * itemsize, else WK_INVALID. */
WK_API bool wk_read(wk_tensor *t, void *dst, size_t bytes);
/* Overwrites all elements of a contiguous tensor in place from host memory, which may be reused at once (a version bump;
   pending work that captured the tensor runs first). */
WK_API bool wk_write(wk_tensor *t, const void *src, size_t bytes);
/* CPU only, else WK_DEVICE and NULL: address of the first element after flushing; wk_stride says where the others are.
   Writable bumps the version. Valid while the storage lives; NULL for a tensor without elements. */
WK_API void *wk_data(wk_tensor *t, bool writable);

/* ---- autograd ------------------------------------------------------------------------------------------------------ */

/* For leaves of f32: a result of an op is WK_GRAD, another dtype WK_DTYPE. Returns t. */
WK_API wk_tensor *wk_requires_grad(wk_tensor *t, bool on);
WK_API bool wk_needs_grad(wk_tensor *t);
WK_API bool wk_grad_enable(wk_ctx *c, bool on); /* grad mode; returns the previous one */
/* loss: one element. Accumulates into the leaves' gradients and frees the graph; a second time is WK_GRAD. */
WK_API void wk_backward(wk_tensor *loss);
typedef struct wk_backward_options {
    size_t struct_size;
    /* One per root, of its shape, dtype and device; NULL: ones (roots must have one element). */
    wk_tensor *const *grads;
    /* Differentiate with respect to these alone; NULL: accumulate into leaves. */
    wk_tensor *const *inputs;
    int ninputs;
    wk_tensor **out;   /* gradients of the inputs, in the caller's scope; NULL where no root depends on one */
    bool create_graph; /* gradients are themselves differentiable; implies retain_graph */
    bool retain_graph; /* the graph may be gone through again */
} wk_backward_options;
WK_API void wk_backward_options_init(wk_backward_options *o);
/* 1 to 64 roots and at most 64 inputs, all of one context. o NULL: defaults. After an error `out` is poison. */
WK_API void wk_backward_ex(wk_tensor *const *roots, int nroots, const wk_backward_options *o);
WK_API wk_tensor *wk_grad(wk_tensor *t); /* of a leaf; borrowed until it changes; NULL if there is none */
WK_API void wk_zero_grad(wk_tensor *t);  /* drops the gradient */

/* ---- compiled functions -------------------------------------------------------------------------------------------- */

typedef struct wk_compile_options {
    size_t struct_size;
    /* Round where eager rounds: results are bit-identical to eager. With f32 they are so without it too; it will differ for
       16-bit types. */
    bool strict;
} wk_compile_options;
WK_API void wk_compile_options_init(wk_compile_options *o);
/* The function is run on every call while its ops are recorded; what it does otherwise happens once per call. self is handed
   to fn as it is and must outlive the handle. o NULL: defaults. */
WK_API wk_compiled *wk_compile(wk_ctx *c, wk_fn fn, void *self, const wk_compile_options *o);
/* Inputs are borrowed and of the function's context; results belong to the current scope, and are poison after an error.
   wk_call is for functions of one output. A call inside a call joins its recording; if it fails and the outer function takes
   the error, it is as if it had not been made.
   A call that fails, when the function runs or when its plan does, leaves parameters and what else it writes in place as they
   were. On the CPU a wrong index makes wk_call itself fail, unless a result still needs a gradient: such a call stays pending
   and fails when it runs, at the latest when something is read. On CUDA it is found when something is read or waited for
   (wk_item, wk_read, wk_sync); from the failed check to then no call writes in place. */
WK_API wk_tensor *wk_call(wk_compiled *f, wk_tensor *const *in, int nin);
WK_API void wk_call_n(wk_compiled *f, wk_tensor *const *in, int nin, wk_tensor **out, int nout);
WK_API void wk_compiled_free(wk_compiled *f);
WK_API void wk_flush(wk_ctx *c); /* runs what is pending */
WK_API void wk_sync(wk_ctx *c);  /* flushes and waits for the device */

/* Counters of one context since its creation. Shapes and structures are those of compiled functions and what joined them, not
   the one-op plans of eager ops on other devices than the CPU. */
typedef struct wk_stats {
    size_t struct_size;
    int64_t ops;             /* applied */
    int64_t flushes;         /* recorded segments run */
    int64_t plan_hits;       /* exact shape found */
    int64_t shapes_made;     /* shape instances built from a known structure or a new one */
    int64_t structures_made; /* full compilations */
    int64_t kernel_launches; /* of plans: loops, library calls, hand-written kernels */
    int64_t graph_launches;  /* CUDA or null: whole-segment launches */
    int64_t bytes_moved;     /* read + written by launched kernels (null device only) */
    int64_t host_allocs;     /* calls into the host allocator by the process so far */
    int64_t live_tensors;
    int64_t storage_bytes; /* bytes of live storages of this context */
    int64_t storage_peak;
    int64_t arena_bytes;       /* arena of the last plan run */
    int64_t arena_lower_bound; /* its liveness lower bound: the largest sum of sizes live at one step */
    int64_t kernels_last;      /* steps of the last plan run */
    int64_t device_waits; /* for all that was queued on a device, but for reads: wk_sync, wk_share, ... */
} wk_stats;
WK_API void wk_stats_get(wk_ctx *c, wk_stats *s); /* set s->struct_size first */

/* ---- modules ------------------------------------------------------------------------------------------------------- */

/* A module is created by its context, holds a reference on its parameters and buffers, and is freed with wk_module_free or
   with the context. free_self (may be NULL) is called on self, also when wk_module_new fails. */
WK_API wk_module *wk_module_new(wk_ctx *c, const char *kind, wk_fn forward, void *self,
                                void (*free_self)(void *));
WK_API void wk_module_free(wk_module *m); /* children too; WK_STATE while its forward runs */
/* Sets requires_grad. Returns t. A name that is taken is WK_INVALID. */
WK_API wk_tensor *wk_module_param(wk_module *m, const char *name, wk_tensor *t);
/* State that is not trained, such as running statistics: no gradient, not among the parameters; forward writes it in place
   (wk_copy_) where it must. Returns t. */
WK_API wk_tensor *wk_module_buffer(wk_module *m, const char *name, wk_tensor *t);
/* m owns child from now on; returns child. A name may contain dots ("blocks.0"). */
WK_API wk_module *wk_module_child(wk_module *m, const char *name, wk_module *child);
/* Inputs are borrowed; results belong to the current scope, and are poison after an error. wk_forward is for modules of one
   input and one output. */
WK_API wk_tensor *wk_forward(wk_module *m, wk_tensor *x);
WK_API void wk_forward_n(wk_module *m, wk_tensor *const *in, int nin, wk_tensor **out, int nout);
/* The module whose forward function is running, the innermost one; NULL outside. This is how a forward function reaches its
   own parameters and training flag, so that it also serves the modules that wk_module_share makes. */
WK_API wk_module *wk_this_module(wk_ctx *c);
/* Writes up to max parameters to out: own ones first, then the children's in order, a tied one once. Returns how many there
   are. The handles are borrowed from the module. */
WK_API int wk_module_params(wk_module *m, wk_tensor **out, int max);
WK_API int wk_module_buffers(wk_module *m, wk_tensor **out, int max); /* likewise, of buffers */
/* Parameter or buffer by dotted name ("c1.weight"); NULL when absent. */
WK_API wk_tensor *wk_module_get(wk_module *m, const char *name);
/* Name of the i-th parameter in wk_module_params order; NULL past the end. Owned by the module, until it changes. */
WK_API const char *wk_module_param_name(wk_module *m, int i);
/* The same module in another context, which must be idle during the call: parameters and buffers shared with wk_share (tied
   ones stay tied), self and forward taken over as they are; free_self runs when the last of them is freed. Handles of
   children kept in self keep working: inside the shared module wk_forward takes the original's handle for the copy's.
   Tensors kept in self do not: reach parameters by wk_module_own(wk_this_module(c), i). */
WK_API wk_module *wk_module_share(wk_ctx *to, wk_module *m);
/* i-th own parameter, buffer or child, in order of registration; NULL past the end. */
WK_API wk_tensor *wk_module_own(wk_module *m, int i);
WK_API wk_tensor *wk_module_own_buffer(wk_module *m, int i);
WK_API wk_module *wk_module_child_at(wk_module *m, int i);
WK_API void wk_train_mode(wk_module *m, bool training); /* recursive; dropout is the identity when false */
WK_API bool wk_is_training(wk_module *m);

/* Built-in layers. Initialisation is PyTorch's default (Kaiming uniform with a = sqrt(5)); draws from the context's RNG.
   Parameters are named "weight" and "bias", on the current device. */
/* (..., in) -> (..., out); weight (out, in). */
WK_API wk_module *wk_nn_linear(wk_ctx *c, int64_t in_features, int64_t out_features, bool bias);
/* (N, C, H, W) -> (N, O, H', W') with H' = (H + 2 padding - kernel) / stride + 1; weight (O, C, kernel, kernel). */
WK_API wk_module *wk_nn_conv2d(wk_ctx *c, int64_t in_channels, int64_t out_channels, int64_t kernel,
                               int64_t stride, int64_t padding, bool bias);
/* (..., features), each row to mean 0 and variance 1, then weight * x + bias. */
WK_API wk_module *wk_nn_layer_norm(wk_ctx *c, int64_t features, double eps);
/* i64 (...) -> (..., features); weight (count, features), N(0, 1). An index out of range is WK_INDEX. */
WK_API wk_module *wk_nn_embedding(wk_ctx *c, int64_t count, int64_t features);
/* Zero with probability p, else scaled by 1 / (1 - p), in training; the identity otherwise. */
WK_API wk_module *wk_nn_dropout(wk_ctx *c, double p);
/* The layers one after the other, as children "0", "1", ...; owns them. */
WK_API wk_module *wk_nn_sequential(wk_ctx *c, wk_module *const *layers, int n);
WK_API wk_module *wk_nn_relu(wk_ctx *c);

/* ---- optimizers ---------------------------------------------------------------------------------------------------- */

typedef struct wk_adamw_options {
    size_t struct_size;
    double lr, beta1, beta2, eps; /* 1e-3, 0.9, 0.999, 1e-8 */
    double weight_decay;          /* 1e-2, decoupled (Loshchilov and Hutter 2019) */
} wk_adamw_options;
typedef struct wk_sgd_options {
    size_t struct_size;
    double lr, momentum, weight_decay; /* 1e-3, 0, 0 */
    bool nesterov;
} wk_sgd_options;
WK_API void wk_adamw_options_init(wk_adamw_options *o);
WK_API void wk_sgd_options_init(wk_sgd_options *o);
/* Retains the parameters, which are leaves of this context, each given once; state is created now, where they are. o NULL:
   defaults. A number outside its range is WK_INVALID. */
WK_API wk_optim *wk_adamw(wk_ctx *c, wk_tensor *const *params, int n, const wk_adamw_options *o);
WK_API wk_optim *wk_sgd(wk_ctx *c, wk_tensor *const *params, int n, const wk_sgd_options *o);
WK_API void wk_optim_set_lr(wk_optim *o, double lr); /* does not make a new plan; below 0 it is WK_INVALID */
WK_API double wk_optim_lr(wk_optim *o);
WK_API void wk_optim_keep_grads(wk_optim *o, bool keep); /* default false: step releases the gradients */
WK_API void wk_optim_step(wk_optim *o);                  /* parameters without a gradient are left alone */
WK_API void wk_optim_zero_grad(wk_optim *o);             /* releases the gradients of all its parameters */
WK_API int64_t wk_optim_steps(wk_optim *o);              /* taken so far */
WK_API void wk_optim_free(wk_optim *o);

/* ---- data ---------------------------------------------------------------------------------------------------------- */

typedef struct wk_loader_options {
    size_t struct_size;
    int64_t batch; /* 32 */
    bool shuffle;  /* a new permutation each epoch, from `seed` and the epoch */
    bool drop_last;
    uint64_t seed;
    double scale; /* u8 fields are given as f32 multiplied by this; 1/255 by default */
} wk_loader_options;
WK_API void wk_loader_options_init(wk_loader_options *o);
typedef struct wk_field { /* one array of the data set, host memory that outlives the loader */
    wk_dtype dtype;       /* WK_U8 (given as f32 * scale), WK_F32, WK_I64, WK_I32 (given as i64) */
    bool index;           /* a WK_U8 field of class numbers or ids: given as i64 */
    int ndim;             /* per sample */
    int64_t size[WK_MAX_DIMS];
    const void *data; /* count samples, row-major */
} wk_field;
WK_API wk_loader *wk_loader_new(wk_ctx *c, const wk_field *fields, int nfields, int64_t count,
                                const wk_loader_options *o);
/* Fills batch[0..nfields-1] and returns true; false at the epoch's end (the next call starts the next epoch) and once the
   context has failed. Closes the scope of the last iteration and opens the next; its tensors live until then. Batches are
   written into buffers that the loader reuses, on the device that was the context's when the loader was made. */
WK_API bool wk_loader_next(wk_loader *l, wk_tensor **batch);
/* For a loop that was left before its end: closes the iteration's scope; the next call starts the next epoch. */
WK_API void wk_loader_rewind(wk_loader *l);
WK_API int64_t wk_loader_batches(wk_loader *l); /* per epoch */
WK_API void wk_loader_free(wk_loader *l);

/* ---- user ops ------------------------------------------------------------------------------------------------------ */

typedef struct wk_array { /* one operand of a user kernel: host memory, contiguous, row-major */
    void *data;
    wk_dtype dtype;
    int ndim;
    const int64_t *size;
    int64_t numel;
} wk_array;
typedef struct wk_op_desc {
    size_t struct_size;
    const char *name; /* 1 to 63 characters, unique in the runtime; copied */
    int nin, nout;    /* at most 8 each */
    int nattr;        /* VALUE attributes (doubles), at most 255 */
    /* Shapes: write each output's ndim and sizes; false with a message in err makes the call fail. */
    bool (*infer)(const wk_array *in, const double *attr, wk_array *out, int64_t (*out_size)[WK_MAX_DIMS],
                  char err[256]);
    void (*cpu)(const wk_array *in, wk_array *out, const double *attr); /* thread-safe; any thread */
    /* Gradient through public ops: gin[i] = NULL for none. It may run a backward, of what it makes from wk_detach of these.
       NULL: not differentiable. */
    void (*vjp)(wk_ctx *c, wk_tensor *const *in, wk_tensor *const *out, wk_tensor *const *gout,
                const double *attr, wk_tensor **gin);
    /* CUDA C of an elementwise kernel `extern "C" __global__ void NAME(const float *in0, ..., float *out0, ..., const
       float *attr, long long n)` over outputs of n elements; NULL: the op fails on CUDA. Not copied: lives as long as the
       runtime. */
    const char *cuda;
} wk_op_desc;
WK_API void wk_op_desc_init(wk_op_desc *d);
/* For all contexts of the runtime. id >= 0, or -1 with the context's error set. */
WK_API int wk_register_op(wk_ctx *c, const wk_op_desc *d);
/* in, attr and out have as many entries as the op says; attr may be NULL when it has none. */
WK_API void wk_user_op(wk_ctx *c, int id, wk_tensor *const *in, const double *attr, wk_tensor **out);

/* ---- for tools ----------------------------------------------------------------------------------------------------- */

typedef struct wk_system_info {
    size_t struct_size;
    const char *isa;      /* the CPU tier in use: "baseline", "avx2" or "avx512"; static */
    const char *isa_note; /* why WICK_CPU_ISA was ignored; "" */
    int threads;
} wk_system_info;
WK_API void wk_system_info_get(wk_ctx *c, wk_system_info *s); /* set s->struct_size first */

typedef struct wk_library_info { /* a library that is opened when first needed */
    const char *name;
    bool found;
    char text[1024]; /* its path, or why it cannot be used */
} wk_library_info;
/* The i-th such library; looks for it, which may take a while. False past the end. */
WK_API bool wk_library_get(int i, wk_library_info *out);

typedef struct wk_op_info {
    const char *name, *klass, *doc;
    int since, nin, nout; /* nin -1: variadic */
    bool differentiable, in_place, nondeterministic;
} wk_op_info;
WK_API int wk_op_count(void);
WK_API bool wk_op_get(int i, wk_op_info *out);

#include <wick/ops.h>

#ifdef __cplusplus
}
#endif
#endif
