/* The recorder and the recorded graph.
 *
 * While a context records, every op appends a few words to a key stream; nothing else is built. The stream is at once the
 * plan's exact key (compared word by word on a hit) and the recorded program (decoded into a wki_graph on a miss). Views
 * are never recorded: an op that reads a view writes down how it looks at its buffer. So a graph is a list of ops over
 * buffers, in program order; in-place ops write buffers that exist.
 *
 * Stream of one op: a head word, per input a reference (below), the structural attribute words, and for RNG ops the
 * sequence number relative to the segment's start. Outputs take the next buffer numbers. A reference is one word
 *   bits 0-1 kind: 0 absent, 1 the buffer's whole shape, 2 contiguous, 3 strided; bit 2 declares the whole shape;
 *   bit 4 first use of an external buffer, bit 5 pinned, bit 6 16-byte aligned, bit 7 shares its storage with an earlier
 *   external buffer; bits 8-15 dtype, 16-23 ndim, 32-63 buffer
 * followed, as bit 7 says, by that earlier buffer, and for kinds 2 and 3 by offset, sizes (and strides).
 */
#ifndef WKI_GRAPH_H
#define WKI_GRAPH_H

#include "core/core.h"

typedef struct wki_rbuf {
    wki_storage *st;    /* NULL when it died while pending */
    int64_t off;        /* external: elements into the storage; an argument, not part of the key */
    uint32_t root;      /* first buffer of the same storage (itself, mostly) */
    uint32_t next_same; /* next external buffer of the storage with another offset + 1; 0: none */
    uint8_t flags, dtype;
} wki_rbuf;

/* Flags of a buffer. */
enum {
    WKI_RB_EXTERNAL = 1,
    WKI_RB_WRITTEN = 2,         /* of a storage's first buffer: an op of the segment writes it in place */
    WKI_RB_WHOLE = WKI_F_WHOLE, /* its whole shape is declared */
};

struct wki_recorder {
    uint32_t epoch; /* of the current segment; storages carry it when they have a buffer here */
    uint8_t dev;
    bool in_call;
    bool eager; /* one op that runs at once, on a device that only runs plans */
    uint32_t nops;
    uint64_t *key;
    size_t nkey, cap_key;
    int64_t *meta; /* per output: dtype << 8 | ndim, sizes; follows from the key, so not part of it */
    size_t nmeta, cap_meta;
    wki_rbuf *buf;
    uint32_t nbuf, nval;
    size_t cap_buf;
    double *val; /* VALUE attributes in order of use */
    size_t cap_val;
    int64_t room;       /* inputs, outputs, attributes and ops that all four arrays have room for; at least */
    uint32_t nref;      /* inputs + outputs */
    uint64_t rng_start; /* the context's sequence number when the segment began */
    void **ptr;         /* scratch of a flush: one address per buffer */
    uint32_t cap_ptr;
    /* Splices (splice.c) and repeats (repeat.c). */
    bool touched;            /* an op changed what was noted of a buffer that existed before it */
    struct wki_splices *spl; /* made by the first backward */
    bool unsure;             /* there are records of ops that are gone: the segment's backwards are walked */
    uint64_t spliced;        /* backwards that were */
    struct wki_repeats *rep; /* made by the first update of many tensors */
    uint64_t repeated;       /* updates that were */
    bool all_anew;           /* set by tests: neither happens */
};

static inline bool wki_recording(const wk_ctx *c) { return c->rec->in_call || c->rec->nops; }

/* The next buffer is the storage of t, a tensor from outside the segment, from t's offset on. Returns its number. */
static inline uint32_t wki_rec_capture(wki_recorder *r, const wki_tensor *t, uint32_t root) {
    wki_rbuf *b = &r->buf[r->nbuf]; /* field by field: gcc makes a compound literal on the stack first */
    t->st->refs++;
    b->st = t->st;
    b->off = t->off;
    b->root = root;
    b->next_same = 0;
    b->flags = WKI_RB_EXTERNAL | (t->flags & WKI_F_WHOLE);
    b->dtype = t->dtype;
    return r->nbuf++;
}

enum { WKI_REF_ABSENT, WKI_REF_WHOLE, WKI_REF_PLAIN, WKI_REF_STRIDED };
enum { WKI_REF_DTYPE = 8, WKI_REF_NDIM = 16 }; /* bit positions */
enum { WKI_REF_DECL = 4, WKI_REF_NEW = 16, WKI_REF_PINNED = 32, WKI_REF_ALIGNED = 64, WKI_REF_ALIAS = 128 };

/* ---- decoded form --------------------------------------------------------------------------------------------------- */

typedef struct wki_gref {
    int32_t buf; /* -1: absent */
    uint8_t ndim, dtype;
    bool plain;
    int64_t off, numel;
    int64_t size[WK_MAX_DIMS], stride[WK_MAX_DIMS];
} wki_gref;

typedef struct wki_gnode {
    const wki_op *op;
    uint16_t nin, nout;
    uint16_t nia, nva;
    bool dead;
    int32_t ref0; /* inputs, then outputs, in graph->ref */
    int32_t va0;  /* first VALUE attribute in the segment's list */
    int32_t rng;  /* relative sequence number, -1: none */
    const int64_t *ia;
} wki_gnode;

typedef struct wki_gbuf {
    uint8_t external, live, pinned, dtype, written;
    int32_t root; /* hazards are between buffers of one root */
    int64_t bytes;
} wki_gbuf;

typedef struct wki_graph {
    wk_device dev;
    int nnode, nbuf, nref, nval;
    wki_gnode *node;
    wki_gref *ref;
    wki_gbuf *buf;
    uint64_t *key; /* a copy of the stream; ia points into it */
    size_t nkey;
} wki_graph;

/* Decodes the recorder's segment (live bits appended). NULL after wki_fail. */
wki_graph *wki_graph_decode(wk_ctx *c, const wki_recorder *r);
void wki_graph_free(wki_graph *g);
/* Does input i of the node write its buffer in place? */
bool wki_node_writes(const wki_gnode *n, int i);
/* Checks that buffers are defined before use and references lie inside them; false after wki_fail(WK_INTERNAL). */
bool wki_graph_verify(wk_ctx *c, const wki_graph *g);
/* Storages get back the versions they had before the recorder's ops from number `first` on wrote them, which
   those never will. */
void wki_graph_unwrite(wk_ctx *c, const wki_recorder *r, uint32_t first);
/* One line per op, for WICK_TRACE=graph. */
void wki_graph_print(const wki_graph *g);

const wki_op *wki_op_by_id(wk_runtime *rt, uint32_t id);

/* Room for what a segment will be after appending; false after wki_fail. */
bool wki_rec_room(wk_ctx *c, size_t key, size_t meta, size_t nbuf, size_t nval);
/* Room for `need` items in an array that keeps what was recorded; false, and nothing is kept, when there is no memory. */
bool wki_rec_grow(void **p, size_t *cap, size_t need, size_t each);
/* The next op is the segment's first again. Do the arrays hold what they did? Not where a part was recorded over. */
void wki_splices_rewind(wki_recorder *r, bool holds);
void wki_splices_free(wk_ctx *c);
/* Notes an update of many tensors that was just recorded, from those places in the arrays on. */
void wki_rec_keep(wk_ctx *c, const wki_call *k, size_t nkey, uint32_t nbuf);
void wki_repeats_free(wki_recorder *r);

/* Ends the segment: buffers forget it. `ok` false: pending storages are marked failed. */
void wki_rec_reset(wk_ctx *c, bool ok);

/* Where a call inside a call begins. When it fails, what it recorded, changed on the host and drew goes. */
typedef struct wki_rec_mark {
    uint32_t epoch, nops, nbuf, nval, nref, nundo;
    size_t nkey, nmeta;
    uint64_t rng_seq;
} wki_rec_mark;
wki_rec_mark wki_rec_mark_of(const wk_ctx *c);
void wki_rec_back_to(wk_ctx *c, const wki_rec_mark *m);

#endif
