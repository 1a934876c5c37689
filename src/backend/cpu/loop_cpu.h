/* Between loop.c, which plans one execution of a loop program, and the executors compiled from loop_exec.inc, which run
 * it: the plan. Private to backend/cpu.
 *
 * An executor works tile by tile. Registers hold one tile's values: ELEM registers up to `tile` elements, ROW registers
 * one value per row of the tile. Four layouts of tiles over the domain:
 *
 *   FLAT   nred == 0: a range of the row-major order of all dimensions
 *   ROWS   short rows: some whole rows, packed
 *   WIDE   long rows: one row, whole or (split) part of it
 *   COLS   column reductions: some RED steps by a block of rows, rows innermost
 *
 * A split plan does not hold a whole row at once: each stage of reductions is a pass over the row that recomputes the
 * ELEM values it needs, and a last pass stores. */
#ifndef WKI_LOOP_CPU_H
#define WKI_LOOP_CPU_H

#include "base/pool.h"
#include "ops/loop.h"

enum {
    WKI_LOOP_CHUNK = 1024,      /* canonical tree: columns of a part of a row reduction */
    WKI_LOOP_RUN = 128,         /* canonical tree: columns of a part of a column reduction */
    WKI_LOOP_SCRATCH = 1 << 17, /* bytes of registers a worker has on its stack */
    WKI_LOOP_SMALL = 1 << 15,   /* the same where that is enough */
    WKI_LOOP_TILE = 1008,       /* elements of a usual tile: with WKI_LOOP_PAD, 4096 bytes */
    WKI_LOOP_LEAN = 6 << 10,    /* element-instructions up to which a plan saves no registers */
    /* Instructions of a plain program; a register of 64 elements each fits WKI_LOOP_SMALL. */
    WKI_LOOP_PLAIN = 32,
    WKI_LOOP_PAD = 16,         /* floats after an ELEM or ROW register that may be read and overwritten */
    WKI_LOOP_COLS_WHOLE = 256, /* COLS: up to so many rows make one block, and tiles of several RED steps */
};

/* What is addressed by strides: the operands, and what INDEX and RNG read, whose "data" is the offset itself. */
enum {
    WKI_VIEW_INDEX = WKI_LOOP_MAX_OPERANDS, /* + domain dimension; + ndim: no such dimension, always 0 */
    WKI_VIEW_RNG = WKI_VIEW_INDEX + WKI_LOOP_MAX_DIMS + 1,
    WKI_VIEWS,
};

/* A linear range of some dimensions as one view sees it, its dimensions merged where strides allow; nd >= 1. */
typedef struct wki_span {
    int nd;
    int64_t size[WKI_LOOP_MAX_DIMS], stride[WKI_LOOP_MAX_DIMS];
} wki_span;

typedef enum wki_layout { WKI_FLAT, WKI_ROWS, WKI_WIDE, WKI_COLS } wki_layout;

typedef struct wki_loop_plan {
    const wki_loop_run *r;
    const wki_inst *inst;
    wki_pool *pool; /* for the passes of a split row; NULL where units run in parallel */
    int64_t grain;  /* elements that are worth a thread */
    wki_layout layout;
    bool split, reduces;
    bool aliased; /* a store may write where a load reads */
    bool block;   /* COLS: a tile is one RED step of a block of rows, addressed over `row` */
    /* Reductions read whole vectors at row ends: loads want WKI_LOOP_PAD readable floats behind a tile. */
    bool tight;
    int ninst, nstage;
    int64_t nrow, ncol, nelem; /* rows; columns; elements of the range over which `elem` runs */
    int64_t units;             /* of independent work: tiles (FLAT, ROWS), rows (WIDE), row blocks (COLS) */
    int64_t tile;              /* elements (FLAT, WIDE), rows (ROWS), RED steps (COLS) */
    int64_t run, pieces;       /* FLAT: tiles do not cross multiples of `run`; pieces of `tile` each */
    int64_t inner, blocks, bsize; /* COLS: size of the `row` range; blocks in it, of bsize rows */

    int nlist;
    int16_t list[WKI_LOOP_MAX_INST]; /* execution order when not split */
    /* Byte offset of value i's register; from MAX_INST on: ROW values widened to ELEM. */
    int32_t reg[2 * WKI_LOOP_MAX_INST];
    int32_t acc, acc_bytes; /* reductions in progress: where, and bytes of each: accumulators, totals */
    int32_t bytes;          /* of all that */
    int16_t direct[WKI_LOOP_MAX_INST]; /* operand that value i may be computed into, or -1 */
    uint8_t stage[WKI_LOOP_MAX_INST];  /* pass after which a value can be had */

    int nview;
    int16_t view[WKI_VIEWS]; /* those in use */
    /* Read no float beyond the range, not even unused: another worker may write there. */
    bool careful[WKI_VIEWS];
    bool copied[WKI_VIEWS]; /* loads copy: a store comes before the last use */
    int64_t end[WKI_VIEWS]; /* elements from `data` to the end of the operand */
    const int64_t *stride[WKI_VIEWS];
    wki_span outer[WKI_VIEWS]; /* over units (WIDE: rows; COLS: what is outside `row`) */
    wki_span elem[WKI_VIEWS];  /* FLAT, ROWS: all; WIDE: RED; COLS: RED and `row`, or RED where `block` */
    wki_span row[WKI_VIEWS];   /* ROWS: KEEP; WIDE: nothing; COLS: innermost KEEP dimensions */
    int64_t logical[WKI_LOOP_MAX_DIMS];                     /* strides of WKI_VIEW_RNG */
    int64_t unit[WKI_LOOP_MAX_DIMS + 1][WKI_LOOP_MAX_DIMS]; /* of WKI_VIEW_INDEX */
} wki_loop_plan;

static inline int64_t wki_loop_up16(int64_t n) { return (n + 15) & ~(int64_t)15; }

/* STORE and CHECK: instructions that do something and have no value. */
static inline bool wki_loop_acts(const wki_inst *in) {
    return in->code == WKI_L_STORE || in->code == WKI_L_CHECK;
}

/* CONST and ARG: values there from the start. */
static inline bool wki_loop_given(const wki_inst *in) {
    return in->code == WKI_L_CONST || in->code == WKI_L_ARG;
}

/* Is value or instruction i one per row? */
static inline bool wki_loop_is_row(const wki_loop_plan *p, int i) {
    return p->layout != WKI_FLAT && p->inst[i].level == WKI_ROWV;
}

static inline int wki_loop_view(const wki_loop_run *r, const wki_inst *in) {
    if (in->code != WKI_L_INDEX)
        return in->code == WKI_L_RNG ? WKI_VIEW_RNG : in->a;
    int d = 0;
    while (d < r->ndim && r->logical[d] != r->ndim - 1 - in->a)
        d++;
    return WKI_VIEW_INDEX + d;
}

/* Floats from one ELEM register to the next. A load whose address agrees in its low 12 bits with that of a recent store
   waits for it; registers a power of two apart, or multiples of 4096 bytes, never meet so within a pass over a tile. */
static inline int64_t wki_loop_pitch(int64_t n) {
    int64_t w = wki_loop_up16(n) + WKI_LOOP_PAD;
    return w > 1024 ? (w + 1023) & ~(int64_t)1023 : (int64_t)1 << (64 - __builtin_clzll((uint64_t)w - 1));
}

/* One of each per tier. `units` runs units first .. last - 1. `plain` needs no plan: a program of up to WKI_LOOP_PLAIN
   instructions (LOAD, STORE, PRIM, CONST, ARG alone, the last one a STORE) over n elements of contiguous operands. Bit a of
   `copied`: a store may overwrite what load operand a reads; no load may then follow a store. */
typedef void wki_loop_units(const wki_loop_plan *p, int64_t first, int64_t last);
typedef void wki_loop_plain(const wki_loop_run *r, int64_t n, uint32_t copied);
wki_loop_units wki_loop_units_baseline, wki_loop_units_avx2, wki_loop_units_avx512;
wki_loop_plain wki_loop_plain_baseline, wki_loop_plain_avx2, wki_loop_plain_avx512;

#endif
