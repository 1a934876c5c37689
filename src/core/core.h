/* The heart of Wick: tensors, storages, scopes, autograd records and the executor stack of a context.
 *
 * A public `wk_tensor *` is a handle: the address of a `wki_tensor` slot with its generation in the top 16 bits. Inside the
 * library code passes plain `wki_tensor *` ("T"); wki_handle/wki_enter convert. Slots are type-stable: they live in slabs
 * as long as the context.
 *
 * Two counts keep a slot alive: `user` (scope ownership, wk_retain, library objects that expose the handle) and `refs`
 * (autograd records and edges). When `user` falls to 0 the generation moves on, so the handle is dead, while the slot lives
 * until `refs` is 0 too.
 *
 * May call: base. Knows nothing of autograd, graph, compile or backends but the tables below.
 */
#ifndef WKI_CORE_H
#define WKI_CORE_H

#include <wick.h>

#include "base/alloc.h"
#include "base/cpu.h"
#include "base/pool.h"

#include <stdatomic.h>

typedef struct wki_tensor wki_tensor;
typedef struct wki_storage wki_storage;
typedef struct wki_node wki_node;
typedef struct wki_op wki_op;
typedef struct wki_call wki_call;
typedef struct wki_executor wki_executor;
typedef struct wki_recorder wki_recorder;
typedef struct wki_device_api wki_device_api;

/* ---- storage ------------------------------------------------------------------------------------------------------- */

/* Memory handed to another context by wk_share. The runtime's lock guards the list of its storages, one a context: what
   passes and counts know as one storage must be one. */
typedef struct wki_shared {
    wki_storage **storage;
    int n, cap;
    void *data;
    size_t bytes;
    wk_device dev;
} wki_shared;

/* Bytes of a cache line. What an op touches of its operands starts on one: recording is as fast as the first-level cache. */
enum { WKI_LINE = 64 };

struct wki_storage {
    /* Slots of this context that use it (+1 per recording that captured it). */
    _Alignas(WKI_LINE) int32_t refs;
    uint32_t version; /* bumped by every in-place write of this context; views share it */
    void *data;       /* NULL while pending or when bytes is 0 */
    size_t bytes;
    wki_shared *shared; /* NULL until wk_share */
    wk_ctx *ctx;
    /* Equals the recorder's epoch when this storage has a buffer in the current recording. */
    uint32_t rec_epoch;
    uint32_t rec_buf; /* that buffer */
    uint8_t dev;      /* wk_device */
    uint8_t pending;  /* produced by the current recording; data comes at the flush */
    uint8_t failed;   /* its recording was discarded: reading is an error */
    uint8_t pinned;   /* long-lived (parameter, optimizer state): plans may bake its address */
};

/* ---- tensor -------------------------------------------------------------------------------------------------------- */

enum {
    WKI_F_REQ = 1,   /* requires grad (leaf or result) */
    WKI_F_PLAIN = 2, /* contiguous row-major; also when there are no elements */
    WKI_F_POISON = 4,
    WKI_F_KEEP = 8, /* wk_keep: promote at scope end */
    /* PLAIN, offset 0, and shaped as its storage was when made: the recorder need not describe it. */
    WKI_F_WHOLE = 16,
    WKI_F_LIVE = 32, /* slot in use */
};

struct wki_tensor {
    uint16_t gen;
    uint8_t flags, dtype, ndim, out_idx; /* out_idx: which output of fn */
    uint16_t self_saved;                 /* of refs, how many are held by fn for its own saved outputs */
    int32_t user, refs;
    uint32_t scope_pos; /* index in the context's owned stack + 1; 0: owned by no scope */
    uint32_t retained;  /* of user, how many wk_retain took and wk_release may give back */
    wk_ctx *ctx;
    wki_storage *st;
    wki_node *fn;     /* autograd record that produced it; NULL for leaves */
    wki_tensor *grad; /* gradient of a leaf; this reference counts as `user` on the gradient */
    int64_t off, numel;
    int64_t size[WK_MAX_DIMS], stride[WK_MAX_DIMS];
};

#define WKI_ADDR_BITS 48
static inline wk_tensor *wki_handle(const wki_tensor *t) {
    return (wk_tensor *)((uintptr_t)t | (uintptr_t)t->gen << WKI_ADDR_BITS);
}
static inline wki_tensor *wki_slot(const wk_tensor *h) {
    return (wki_tensor *)((uintptr_t)h & (((uintptr_t)1 << WKI_ADDR_BITS) - 1));
}
static inline uint16_t wki_handle_gen(const wk_tensor *h) {
    return (uint16_t)((uintptr_t)h >> WKI_ADDR_BITS);
}
static inline bool wki_handle_ok(const wk_tensor *h) {
    return h && wki_slot(h)->gen == wki_handle_gen(h) && wki_slot(h)->user > 0;
}

/* ---- op table row (generated into gen/ops_gen.c from src/ops/ops.def; user ops make one at run time) ---------------- */

typedef enum wki_class {
#define C(name) WKI_##name,
#include "core/class.def"
#undef C
} wki_class;

enum {
    WKI_OP_VIEW = 1,    /* the one output shares input 0's storage; no kernel */
    WKI_OP_INPLACE = 2, /* writes the roles in `writes` and has no outputs */
    WKI_OP_NONDET = 4,
    WKI_OP_RNG = 8, /* consumes one RNG sequence number */
    /* Elementwise broadcasting; VJP results are summed back to the input's shape by the engine. */
    WKI_OP_BROADCAST = 16,
    WKI_OP_PROMOTE = 32, /* inputs are cast to their common dtype */
    WKI_OP_USER = 64,
    /* VJP needs the inputs' shapes: the record keeps them even when the input is not saved. */
    WKI_OP_KEEP_META = 128,
};

/* Which dimensions of input 0 a ROW op reduces: the last; dimension ia[0]; the list at ia[0]. */
typedef enum wki_red { WKI_RED_NONE, WKI_RED_LAST, WKI_RED_DIM, WKI_RED_DIMS } wki_red;

typedef struct wki_vjp_args {
    wk_ctx *c;
    const wki_node *node;
    wki_tensor *const *gout; /* per output; NULL where no gradient arrived */
    wki_tensor **gin;        /* per input; results are owned by the current scope */
    const bool *need;        /* per input */
} wki_vjp_args;

struct wki_op {
    const char *name, *doc;
    uint16_t id;
    uint8_t klass; /* wki_class */
    uint8_t since;
    uint32_t flags;
    int8_t nin, nout;  /* nin -1: variadic */
    uint8_t roles;     /* variadic: its inputs are so many roles of equally many tensors, role after role */
    uint32_t optional; /* bit i: input i may be absent */
    uint32_t writes;   /* bit i: input i (variadic: role i) is written in place */
    uint32_t save_in, save_out; /* bit i: saved for the VJP */
    uint32_t diff;              /* bit i: a gradient flows to input i */
    const char *const *in_names;
    /* Fills dtype, ndim, size of every output; for VIEW ops also st (not yet retained), off, stride and, if it knows that
       the view is contiguous, numel and PLAIN. Returns false after wki_fail. */
    bool (*infer)(wk_ctx *c, const wki_call *k);
    void (*vjp)(const wki_vjp_args *a);
    uint8_t red; /* wki_red */
    uint8_t nloop;
    /* Loop programs: EW, ROW, RNG, CREATE (ops/loop.h); NULL otherwise. wki_op_loop picks the one for the dtypes at hand. */
    const struct wki_loop *loop;
    const struct wki_loop_guard *guard; /* nloop of them; NULL: loop[0] serves all dtypes */
    void *user;                         /* wk_op_desc of a user op */
};
extern const wki_op wki_ops[]; /* indexed by id (gen/ops_gen.h has WKI_OP_<name> enum) */
extern const int wki_op_count;

/* ---- one op application -------------------------------------------------------------------------------------------- */

struct wki_call {
    const wki_op *op;
    int nin, nout, nia, nva;
    wki_tensor *const *in; /* NULL where an optional input is absent */
    /* Structural attributes as words, in declaration order; a list is its count followed by its items. */
    const int64_t *ia;
    const double *va; /* VALUE attributes, in declaration order; never part of a plan's key */
    wki_tensor **out; /* filled by wki_apply; owned by the current scope */
    uint8_t dev; /* wk_device, set by wki_apply: where the inputs are; the context's when there is none */
    uint32_t rec_epoch, place; /* set by wki_record: the segment, and which op of it this is */
    uint64_t rng_seq;          /* set by wki_apply for RNG ops */
};

/* Tensors of one role, for an op with so many inputs; those of ordinary ops are roles of one. */
static inline int wki_role_size(const wki_op *op, int nin) { return op->nin < 0 ? nin / op->roles : 1; }
static inline bool wki_role_written(const wki_op *op, int role) {
    return role < 32 && (op->writes >> role & 1);
}

/* Applies an op: checks, promotes dtypes, infers, goes down the executor stack. On failure returns false, the context's
   error is set and every out[i] is the poison tensor. Outputs belong to the current scope. */
bool wki_apply(wk_ctx *c, wki_call *k);

struct wki_executor {
    bool (*apply)(wk_ctx *c, wki_call *k,
                  const wki_executor *self); /* outputs are inferred but have no storage yet */
    const wki_executor *next;
};

/* ---- autograd record ----------------------------------------------------------------------------------------------- */

typedef struct wki_saved {
    wki_tensor *t; /* internal reference; NULL when not saved or already freed */
    uint32_t version;
} wki_saved;

typedef struct wki_edge { /* of an input: where its gradient goes, and what is kept of it */
    wki_node *fn;         /* its producer, or NULL */
    wki_tensor *leaf;     /* leaf that accumulates, or NULL */
    wki_tensor *saved;    /* as wki_saved has it */
    uint32_t version;
    uint32_t out_idx; /* which output of fn */
} wki_edge;

typedef struct wki_meta { /* shape of an input (KEEP_META or BROADCAST), in place of the tensor */
    uint8_t ndim, dtype;
    int64_t size[WK_MAX_DIMS];
} wki_meta;

struct wki_node {
    const wki_op *op;
    int32_t refs;
    uint32_t epoch; /* traversal */
    uint32_t deps;  /* traversal: edges from reachable consumers still to come */
    uint32_t order; /* traversal: when it was reached */
    uint16_t nin, nia;
    uint8_t nout, nva;
    uint8_t size_class, flags;
    uint32_t rec_epoch; /* of the segment that its op is recorded in; 0: of none, or a view */
    uint32_t place;     /* of the op there */
    uint64_t seq;       /* creation order in the context */
    const void *caller;
    wki_node *next; /* free list / work list */
    wki_edge in[];  /* nin; what follows them: */
};

enum {
    WKI_NODE_CONSUMED = 1, /* backward went through it and freed what it saved */
    WKI_NODE_META = 2
};
static inline wki_saved *wki_node_out(const wki_node *n) { return (wki_saved *)(n->in + n->nin); }
/* Per output the gradient that arrived during a backward; owned internal references. */
static inline wki_tensor **wki_node_gacc(const wki_node *n) {
    return (wki_tensor **)(wki_node_out(n) + n->nout);
}
static inline int64_t *wki_node_ia(const wki_node *n) { return (int64_t *)(wki_node_gacc(n) + n->nout); }
static inline double *wki_node_va(const wki_node *n) { return (double *)(wki_node_ia(n) + n->nia); }
/* Per input; NULL where the op's gradient needs none. */
static inline wki_meta *wki_node_meta(const wki_node *n) {
    return n->flags & WKI_NODE_META ? (wki_meta *)(wki_node_va(n) + n->nva) : NULL;
}

/* For VJPs. Results are plain tensors usable as inputs; a version mismatch or a freed record sets the error and gives the
   poison tensor. */
wki_tensor *wki_saved_in(wk_ctx *c, const wki_node *n, int i);
wki_tensor *wki_saved_out(wk_ctx *c, const wki_node *n, int i);
void wki_node_free(wk_ctx *c, wki_node *n); /* its last reference is gone */
static inline void wki_node_release(wk_ctx *c, wki_node *n) {
    if (--n->refs == 0)
        wki_node_free(c, n);
}

/* ---- errors -------------------------------------------------------------------------------------------------------- */

/* Records the first error (printf-like text, op name and caller from the current call are added). Is false, which the
   compiler and the static analyser see. */
#define wki_fail(...)                                                                                        \
    ({                                                                                                       \
        wki_set_error(__VA_ARGS__);                                                                          \
        false;                                                                                               \
    })
void wki_set_error(wk_ctx *c, wk_status s, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* The same, WK_STATE, for what must not go on in silence with poison from an error that was taken; quotes that error. `what`
   says which argument of which function it is. */
bool wki_fail_poison(wk_ctx *c, const char *what);
/* Copies a caller's struct over `to`, which holds the defaults; its fields that `from` (of an older header) lacks stay so. NULL:
   all. False when struct_size is impossible, or a newer struct's unknown fields are not all zero. */
bool wki_take_struct(void *to, size_t size, const void *from);
bool wki_wrong_struct(wk_ctx *c, const char *type); /* the error for that; false */
/* "(2, 3)" into buf; returns buf. */
const char *wki_shape_text(char *buf, size_t n, int ndim, const int64_t *size);

/* ---- context ------------------------------------------------------------------------------------------------------- */

typedef struct wki_error { /* its text lacks the lines that callers are at, until somebody reads it */
    wk_status status;
    char message[sizeof((wk_error *)0)->message];
    const void *past, *caller; /* of the error that its text quotes, and its own */
} wki_error;

typedef struct wki_undo { /* what a discarded recording restores */
    enum { WKI_UNDO_GRAD, WKI_UNDO_I64, WKI_UNDO_RNG } kind;
    union {
        struct {                 /* GRAD: internal references */
            wki_tensor *t, *old; /* the leaf, its former gradient or NULL */
        };
        struct { /* I64 */
            int64_t *p, v;
        };
        struct { /* RNG */
            uint64_t seed, sequence;
        };
    };
} wki_undo;

struct wk_ctx {
    wk_runtime *rt;
    const wki_executor *exec; /* top of the stack */
    wk_status failed;
    bool grad_mode;
    uint8_t dev;        /* default device of creation calls */
    int call_depth;     /* wk_call nesting */
    const void *caller; /* innermost public entry's return address */
    const wki_op *cur_op;
    uint64_t seed, rng_seq;
    uint64_t node_seq;
    /* slots */
    wki_tensor *free_slots;
    struct wki_slab *slabs;
    wki_tensor *poison;
    /* scopes */
    wki_tensor **owned;
    uint32_t nowned, cap_owned;
    uint32_t *marks;
    uint32_t nmarks, cap_marks, scope_floor, lost_scopes;
    /* pools */
    wki_storage *free_storages;
    wki_node *free_nodes[32]; /* by size class: core/node.c */
    struct wki_chunk *chunks; /* all pool memory, freed with the context */
    wki_recorder *rec;
    /* Plans this context used, with the device's state for them (compile/plan.c). */
    struct wki_plan_ctx *plans;
    /* traversal */
    uint32_t epoch;
    wki_node *dying; /* records whose count fell to 0 while another was being freed */
    bool reaping, default_rt;
    wki_node **bw_all, **bw_heap; /* backward's work lists between uses */
    uint64_t *bw_word;
    const struct wki_engine *bw_now; /* the backward that runs */
    size_t cap_bw_all, cap_bw_heap, cap_bw_word;
    /* undo journal, active while a recording is */
    wki_undo *undo;
    uint32_t nundo, cap_undo;
    bool journal;
    /* objects freed with the context */
    struct wki_object *objects;
    /* errors */
    wki_error err;
    wki_error past; /* the last one that was taken, or that a probe kept to itself: what made kept poison */
    wki_error *outside; /* the error outside each open probe */
    int try_depth, cap_try, try_floor, lost_tries;
    wk_stats stats;
    /* Per (context, device): stream, arena, argument ring; made by the device's api. */
    void *dev_state[WK_DEVICE_COUNT];
};

/* ---- slots, storages, scopes (core/tensor.c) ------------------------------------------------------------------------ */

wki_tensor *wki_tensor_new(wk_ctx *c);    /* user 1, owned by the current scope; NULL after wki_fail */
wki_tensor *wki_tensor_loose(wk_ctx *c);  /* the same, but the caller holds it instead of a scope */
void wki_tensor_user_down(wki_tensor *t); /* user-- (and what follows) */
void wki_tensor_settle(wki_tensor *t);    /* a count fell while `user` is 0: frees what nobody holds */
static inline void wki_tensor_user_up(wki_tensor *t) { t->user++; }
static inline void wki_tensor_ref(wki_tensor *t) { t->refs++; }
static inline void wki_tensor_unref(wki_tensor *t) {
    t->refs--;
    if (t->user <= 0)
        wki_tensor_settle(t);
}
void wki_tensor_disown(wki_tensor *t); /* takes it out of its scope without changing `user` */
static inline void wki_tensor_set_plain(wki_tensor *t) { /* strides, numel, PLAIN from size; offset 0 */
    int64_t n = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        t->stride[i] = n;
        n *= t->size[i];
    }
    t->numel = n;
    t->flags |= WKI_F_PLAIN;
}
static inline bool wki_shapes_equal(const wki_tensor *a, const wki_tensor *b) {
    if (a->ndim != b->ndim)
        return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->size[i] != b->size[i])
            return false;
    return true;
}
wki_storage *wki_storage_new(wk_ctx *c, wk_device dev, size_t bytes,
                             bool with_data); /* refs 1; NULL after wki_fail */
void wki_storage_free(wki_storage *s);        /* its last reference is gone */
static inline void wki_storage_unref(wki_storage *s) {
    if (--s->refs == 0)
        wki_storage_free(s);
}
bool wki_storage_realize(wki_storage *s);                 /* gives a pending storage its memory */
extern const uint8_t wki_dtype_bytes[WK_DTYPE_COUNT + 1]; /* the last, of "none", is 0 */
extern const char wki_dtype_kinds[WK_DTYPE_COUNT + 1];    /* 'F', 'I', 'U' or 'B'; 0 */
extern const uint8_t wki_dtype_ranks[WK_DTYPE_COUNT];     /* promotion goes to the highest */
static inline size_t wki_dtype_size(wk_dtype d) { return wki_dtype_bytes[d]; }
static inline int wki_dtype_kind(wk_dtype d) { return wki_dtype_kinds[d]; }
static inline wki_tensor *wki_poison(wk_ctx *c) { return c->poison; }
/* A fresh leaf with memory, of any content or all `value` (0 or 1); `what` begins the message. NULL after wki_fail. */
wki_tensor *wki_leaf(wk_ctx *c, wk_dtype dt, int ndim, const int64_t *size, const char *what);
wki_tensor *wki_filled(wk_ctx *c, wk_dtype dt, int ndim, const int64_t *size, int value, const char *what);
wki_tensor *wki_alias(wk_ctx *c, wki_tensor *t);    /* another handle on the same value, same graph */
wki_tensor *wki_detached(wk_ctx *c, wki_tensor *t); /* same storage, no graph */
void wki_drop_grad(wki_tensor *t);
/* On a cache line; lives as long as the context; NULL when out of memory. */
void *wki_pool_bytes(wk_ctx *c, size_t bytes);
static inline void wki_storage_bump(wki_storage *s) { s->version++; } /* an in-place write */
wki_storage *wki_storage_share(wk_ctx *to, wki_storage *s); /* with a reference; NULL after wki_fail */
void wki_slots_free(wk_ctx *c);
void wki_tensors_release_all(wk_ctx *c);
void wki_scopes_free(wk_ctx *c);
/* A user function starts: it cannot end the caller's scopes and probes, and what it leaves open ends with it. */
typedef struct wki_floor {
    uint32_t scope;
    int probe;
} wki_floor;
wki_floor wki_floor_begin(wk_ctx *c);
void wki_floor_end(wk_ctx *c, wki_floor old, const void *caller);
void wki_promote(wk_ctx *c, wki_tensor *t); /* to the enclosing scope when the current one ends */

/* ---- what higher rooms register (executors) and own ------------------------------------------------------------------ */

extern const wki_executor wki_exec_autograd; /* autograd/ */
/* Eager on the CPU, recorder while recording or elsewhere (backend/eager.c). */
extern const wki_executor wki_exec_base;
void wki_runtime_lock(wk_runtime *rt);
void wki_runtime_unlock(wk_runtime *rt);
void wki_plan_cache_free(wk_runtime *rt); /* compile/ */
void wki_plan_ctx_free(wk_ctx *c);
void wki_user_op_free(wki_op *op); /* ops/user.c */
/* op, counts, attributes and caller are set, gradients cleared; the caller fills what is of inputs and outputs. */
wki_node *wki_node_new(wk_ctx *c, const wki_call *k, int nmeta);
void wki_node_drop_saved(wki_node *n);
wki_recorder *wki_recorder_new(wk_ctx *c); /* graph/record.c */
void wki_recorder_free(wk_ctx *c);
void wki_recorder_discard(wk_ctx *c);
bool wki_record(wk_ctx *c, wki_call *k); /* appends one op; outputs become pending */

/* ---- recorder (graph/record.c) -------------------------------------------------------------------------------------- */

bool wki_flush(wk_ctx *c);                                    /* runs what is pending; false after wki_fail */
void wki_rec_forget(wk_ctx *c, wki_storage *s);               /* a pending storage died */
bool wki_rec_captured(const wk_ctx *c, const wki_storage *s); /* does the current recording use it */
bool wki_rec_writes(const wk_ctx *c, const wki_storage *s);   /* does it write it in place */
/* Before the host reads: data is there; false after wki_fail, in which `what` names the tensor. */
bool wki_touch_read(wki_tensor *t, const char *what);
/* Before the host writes: nothing pending captured it. */
bool wki_touch_write(wki_tensor *t, const char *what);

/* Appends an update of many tensors if one like it was recorded before over the same ones (graph/repeat.c); false: apply it. */
bool wki_rec_repeat(wk_ctx *c, const wki_call *k);

/* ---- splices (graph/splice.c) --------------------------------------------------------------------------------------- */

/* The segment whose records a backward may be spliced from; 0: none. */
uint32_t wki_splice_epoch(const wk_ctx *c);
/* A backward that was recorded before and started from here: the same stream, values and records, which `word` describes. */
typedef struct wki_splice wki_splice;
wki_splice *wki_splice_find(wk_ctx *c, const uint64_t *word, size_t nword);
/* Appends what that backward appended and gives the leaves their gradients; false after wki_fail. */
bool wki_splice_apply(wk_ctx *c, const wki_splice *s);
/* A backward starts: may what it appends be kept? Its end, with the records that it went through. */
bool wki_splice_begin(wk_ctx *c);
void wki_splice_end(wk_ctx *c, const uint64_t *word, size_t nword, wki_node *const *all, size_t n);

/* Public entry: errors from here on are of this call, and of no op. */
static inline void wki_begin(wk_ctx *c, const void *caller) {
    c->caller = caller;
    c->cur_op = NULL;
}
/* Public entry: checks handles, notes the caller. Returns NULL (and t's context, when it has one, failed) if not usable. */
wki_tensor *wki_enter_failed(const wk_tensor *h, const void *caller);
static inline wki_tensor *wki_enter(const wk_tensor *h, const void *caller) {
    if (__builtin_expect(!wki_handle_ok(h), 0))
        return wki_enter_failed(h, caller);
    wki_tensor *t = wki_slot(h);
    t->ctx->caller = caller;
    return t;
}

/* Is a function's result a tensor of the context it ran in? If not, fails. */
static inline bool wki_owns(wk_ctx *c, const wki_tensor *t, const void *caller) {
    if (t->ctx == c)
        return true;
    wki_begin(c, caller);
    return wki_fail(c, WK_HANDLE,
                    "the function's result belongs to another context (wk_share makes a handle here)");
}

/* objects that die with the context */
typedef struct wki_object {
    struct wki_object *prev, *next;
    void (*destroy)(void *self);
} wki_object;
void wki_object_add(wk_ctx *c, wki_object *o, void (*destroy)(void *));
void wki_object_remove(wk_ctx *c, wki_object *o);

/* journal: called before a leaf's gradient, a counter or the RNG's state changes */
bool wki_undo_grad(wk_ctx *c, wki_tensor *leaf);
bool wki_undo_i64(wk_ctx *c, int64_t *p);
bool wki_undo_rng(wk_ctx *c);
void wki_undo_commit(wk_ctx *c);
void wki_undo_rollback(wk_ctx *c);
/* Around what changes several of these and may fail half-way: if it does, all are put back, in a call or not. */
typedef struct wki_undo_mark {
    uint32_t n;
    bool journal;
} wki_undo_mark;
wki_undo_mark wki_undo_begin(wk_ctx *c);
void wki_undo_end(wk_ctx *c, wki_undo_mark m, bool ok);
void wki_undo_back_to(wk_ctx *c, uint32_t n); /* puts back what was noted after the first n */
/* May a part of the recording be taken back without the rest? A call inside a call may. */
static inline bool wki_undo_part(const wk_ctx *c) { return c->call_depth > 1; }
/* Where only all of it may be: a gradient that the recording itself made is gone when the recording is, and an earlier entry has
   what was before. To hold it would make it a result of the plan. So those that were noted after the first n are let go. */
void wki_undo_forget(wk_ctx *c, uint32_t n);

/* ---- devices (compile/plan.h has what plans need) ------------------------------------------------------------------- */

struct wki_device_api {
    const char *name;
    bool (*available)(wk_runtime *rt, const char **why);
    void *(*alloc)(wk_ctx *c, size_t bytes,
                   const char *tag); /* 64-byte aligned; NULL after wki_fail or when bytes is 0 */
    void (*free)(wk_ctx *c, void *p, size_t bytes);
    bool (*upload)(wk_ctx *c, void *dst, const void *src, size_t bytes);   /* src reusable on return */
    bool (*download)(wk_ctx *c, void *dst, const void *src, size_t bytes); /* waits */
    bool (*sync)(wk_ctx *c);
    void (*ctx_free)(wk_ctx *c); /* drops dev_state */
    void (*rt_free)(wk_runtime *rt);
    const struct wki_plan_api *plan; /* compile/plan.h */
};
extern const wki_device_api *const wki_devices[WK_DEVICE_COUNT];
/* Is the device there? False after wki_fail, which names the function. */
bool wki_need_device(wk_ctx *c, wk_device d, const char *function);
static inline bool wki_device_wait(wk_ctx *c, wk_device d) { /* false after wki_fail */
    c->stats.device_waits++;
    return wki_devices[d]->sync(c);
}

enum { WKI_TRACE_DISPATCH = 1, WKI_TRACE_GRAPH = 2, WKI_TRACE_PLAN = 4 };

struct wk_runtime {
    _Atomic int64_t refs; /* contexts + the owner */
    _Atomic uint64_t next_ordinal;
    uint64_t seed;
    wki_isa isa;
    uint8_t trace; /* what WICK_TRACE held when the runtime was made */
    wki_pool *pool;
    void *lock;                       /* pthread_mutex_t: guards what follows */
    struct wki_plan_cache *plans;     /* compile/ */
    void *dev_state[WK_DEVICE_COUNT]; /* per runtime and device */
    wki_op **user_ops;
    int nuser_ops;
};

#endif
