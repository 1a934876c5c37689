/* Tier 0: runs loop programs at once, with nothing generated. This file plans an execution (layout of tiles, registers,
 * addressing; see loop_cpu.h) on the stack, picks the executor of the instruction set and spreads the units over threads.
 * Planning is part of every eager op, so it is kept to a few nanoseconds per instruction and operand. Calls base/pool and
 * the executors. */
#include "backend/backend.h"
#include "backend/cpu/loop_cpu.h"
#include "backend/cpu/straight.h"

enum {
    CACHE_BYTES = 40 << 10, /* registers of a tile are to stay in the first-level cache */
    SHORT_ROW = 512,        /* ROWS up to here */
    WHOLE_ROW = 4096,       /* WIDE and COLS without split up to here */
    MIN_RUN = 256,          /* FLAT: where operands have shorter runs, tiles cross them */
    PLAIN_WORK = 1 << 16,   /* element-instructions from which a plan pays */
    THREAD_WORK = 1 << 17,  /* element-instructions that are worth a thread */
    INNER_WORK = 1 << 16,   /* elements from which one unit is spread over threads */
    KEEP_WORK = 1 << 18,    /* element-instructions beside which planning is nothing */
};

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* ---- registers ----------------------------------------------------------------------------------------------------- */

enum { WIDENED = WKI_LOOP_MAX_INST };

/* Registers in three pools: ELEM (reused once the value is dead), ROW, and CONST, whose values are constants: 16 equal
   floats. */
typedef struct {
    int16_t last[2 * WKI_LOOP_MAX_INST]; /* instruction that last uses a value; -1 where none does */
    int16_t at[2 * WKI_LOOP_MAX_INST];   /* place in its pool */
    int16_t free[2 * WKI_LOOP_MAX_INST];
    int ninst, nfree, nelem, nrow, nconst, nreduce;
} registers;

/* The register in which instruction i wants its operand v: a ROW value is widened for an ELEM instruction. */
static int wanted(const wki_loop_plan *p, int i, int v) {
    bool elem_use = !wki_loop_is_row(p, i) || p->inst[i].code == WKI_L_REDUCE;
    return elem_use && wki_loop_is_row(p, v) ? WIDENED + v : v;
}

static void find_last_uses(const wki_loop_plan *p, registers *g) {
    for (int i = 0; i < p->ninst; i++) {
        int16_t v[3];
        g->last[i] = g->last[WIDENED + i] = -1;
        for (int k = wki_loop_uses(&p->inst[i], v) - 1; k >= 0; k--)
            g->last[wanted(p, i, v[k])] = (int16_t)i;
    }
}

static int take_elem(registers *g) { return g->nfree ? g->free[--g->nfree] : g->nelem++; }

/* Marks a register free when instruction i is the last to use it. */
static void release(registers *g, int slot, int i) {
    if (g->last[slot] != i)
        return;
    g->last[slot] = -2;
    g->free[g->nfree++] = g->at[slot];
}

static void release_operands(const wki_loop_plan *p, registers *g, int i) {
    int16_t v[3];
    for (int k = wki_loop_uses(&p->inst[i], v) - 1; k >= 0; k--) {
        int s = wanted(p, i, v[k]);
        if (s >= WIDENED || !(wki_loop_given(&p->inst[v[k]]) || wki_loop_is_row(p, v[k])))
            release(g, s, i);
    }
}

static void assign_registers(const wki_loop_plan *p, registers *g) {
    bool wide[WKI_LOOP_MAX_INST] = {0};
    g->nfree = g->nelem = g->nrow = g->nconst = g->nreduce = 0;
    g->ninst = p->ninst;
    for (int i = 0; i < p->ninst; i++) {
        const wki_inst *in = &p->inst[i];
        int16_t v[3];
        int n = wki_loop_uses(in, v);
        for (int k = 0; k < n; k++) {
            int s = wanted(p, i, v[k]);
            if (s >= WIDENED && !wide[v[k]]) {
                g->at[s] = (int16_t)take_elem(g);
                wide[v[k]] = true;
            }
        }
        /* A primitive may overwrite its operands; a reduction first clears its result. */
        if (in->code != WKI_L_REDUCE)
            release_operands(p, g, i);
        if (wki_loop_given(in))
            g->at[i] = (int16_t)g->nconst++;
        else if (wki_loop_acts(in))
            g->at[i] = 0;
        else if (wki_loop_is_row(p, i)) {
            g->at[i] = (int16_t)g->nrow++;
            g->at[WIDENED + i] = 0;
        } else {
            g->at[i] = (int16_t)take_elem(g);
            release(g, i, -1);
        }
        if (in->code == WKI_L_REDUCE) {
            g->nreduce++;
            release_operands(p, g, i);
        }
    }
}

/* The same without reuse, for tiles so small that looking for dead values costs more than it saves. */
static void assign_lean(const wki_loop_plan *p, registers *g) {
    bool rows = p->layout != WKI_FLAT;
    int ne = 0, nr = 0, nc = 0, nred = 0;
    for (int i = 0; i < p->ninst; i++) {
        const wki_inst *in = &p->inst[i];
        if (wki_loop_given(in))
            g->at[i] = (int16_t)nc++;
        else if (wki_loop_acts(in))
            g->at[i] = 0;
        else if (rows && in->level == WKI_ROWV) {
            g->at[i] = (int16_t)nr++;
            g->at[WIDENED + i] = (int16_t)ne++;
        } else
            g->at[i] = (int16_t)ne++;
        nred += in->code == WKI_L_REDUCE;
    }
    g->ninst = p->ninst;
    g->nelem = ne;
    g->nrow = nr;
    g->nconst = nc;
    g->nreduce = nred;
}

/* Bytes of one reduction in progress: 64 lanes and a total, or for each row of a block a float and a double. */
static int64_t acc_bytes(const wki_loop_plan *p, int64_t rows) {
    return p->layout == WKI_COLS ? (wki_loop_up16(rows) + WKI_LOOP_PAD) * 12 : 256 + 128;
}

/* Turns places into byte offsets. Pools lie one after the other: ELEM, ROW, constants, reductions in progress. */
static void place_registers(wki_loop_plan *p, const registers *g, int64_t elems, int64_t rows) {
    int32_t epitch = (int32_t)wki_loop_pitch(elems) * 4;
    int32_t rpitch = p->layout == WKI_WIDE ? 64 : (int32_t)(wki_loop_up16(rows) + WKI_LOOP_PAD) * 4;
    int32_t row0 = g->nelem * epitch, const0 = row0 + g->nrow * rpitch;
    bool widened = p->layout == WKI_ROWS || p->layout == WKI_COLS;
    for (int i = 0; i < g->ninst; i++) {
        if (wki_loop_given(&p->inst[i]))
            p->reg[i] = const0 + g->at[i] * 64;
        else if (wki_loop_is_row(p, i)) {
            p->reg[i] = row0 + g->at[i] * rpitch;
            if (widened)
                p->reg[WIDENED + i] = g->at[WIDENED + i] * epitch;
        } else
            p->reg[i] = g->at[i] * epitch;
    }
    p->acc = const0 + g->nconst * 64;
    p->acc_bytes = (int32_t)acc_bytes(p, rows);
}

/* Do the registers of so large a tile fit? Sets p->bytes. */
static bool fits(wki_loop_plan *p, const registers *g, int64_t elems, int64_t rows) {
    int64_t rpitch = p->layout == WKI_WIDE ? 64 : (wki_loop_up16(rows) + WKI_LOOP_PAD) * 4;
    int64_t bytes = g->nelem * wki_loop_pitch(elems) * 4 + g->nrow * rpitch + g->nconst * 64 +
                    (p->split ? g->nreduce * acc_bytes(p, rows) : 0);
    p->bytes = (int32_t)bytes;
    return bytes <= WKI_LOOP_SCRATCH;
}

/* ---- what may be written when -------------------------------------------------------------------------------------- */

/* Loads give addresses, not copies. The last moment at which a value loaded from this one is read, -1 where none is; a store
   at `at` that comes too early for that turns the load into a copy. */
static int last_read(wki_loop_plan *p, const registers *g, const void *data, int at) {
    int last = -1;
    for (int i = 0; i < p->ninst; i++) {
        int v = p->inst[i].a, l = i;
        if (p->inst[i].code != WKI_L_LOAD || p->r->opnd[v].data != data)
            continue;
        l = l > g->last[i] ? l : g->last[i];
        l = l > g->last[WIDENED + i] ? l : g->last[WIDENED + i];
        p->copied[v] = p->copied[v] || l > at;
        last = last > l ? last : l;
    }
    return last;
}

/* Is there a store that would overwrite what a later load is to read? */
static bool overtakes(const wki_loop_plan *p) {
    for (int i = 0; i < p->ninst; i++)
        for (int j = i + 1; p->inst[i].code == WKI_L_STORE && j < p->ninst; j++)
            if (p->inst[j].code == WKI_L_LOAD &&
                p->r->opnd[p->inst[j].a].data == p->r->opnd[p->inst[i].a].data)
                return true;
    return false;
}

static bool any_reduces(const wki_loop_plan *p, int v) {
    for (int i = v + 1; i < p->ninst; i++)
        if (p->inst[i].code == WKI_L_REDUCE && p->inst[i].a == v)
            return true;
    return false;
}

/* May store i be done by computing its value into the operand? */
static bool direct_ok(const wki_loop_plan *p, int i, int safe) {
    const wki_inst *st = &p->inst[i], *def = &p->inst[st->b];
    wk_dtype dt = (wk_dtype)p->r->opnd[st->a].dtype;
    return def->code == WKI_L_PRIM && dt == (def->type == WKI_TF ? WK_F32 : WK_I32) && st->b >= safe &&
           wki_loop_is_row(p, i) == wki_loop_is_row(p, st->b) && p->direct[st->b] < 0 &&
           !(p->reduces && any_reduces(p, st->b));
}

/* Lean plans let loads go first, and copy what a store may overwrite. */
static void order_lean(wki_loop_plan *p, bool aliased) {
    int n = 0;
    for (int pass = aliased ? 0 : 1; pass < 2; pass++)
        for (int i = 0; i < p->ninst; i++) {
            int c = p->inst[i].code;
            if (!wki_loop_given(&p->inst[i]) && (!aliased || (c == WKI_L_LOAD) == (pass == 0)))
                p->list[n++] = (int16_t)i;
            p->direct[i] = -1;
            if (c == WKI_L_STORE && direct_ok(p, i, -1))
                p->direct[p->inst[i].b] = p->inst[i].a;
        }
    p->nlist = n;
    if (aliased)
        for (int v = 0; v < p->r->prog->nload; v++)
            p->copied[v] = p->careful[v];
}

/* Orders the instructions as written, with the stores last if there is one that a load must precede, and finds the values
   that can be computed into an operand. `aliased`: some store may write what some load reads. */
static void order_stores(wki_loop_plan *p, registers *g, bool aliased) {
    bool defer = aliased && overtakes(p);
    p->nlist = 0;
    for (int i = 0; i < p->ninst; i++) {
        p->direct[i] = -1;
        if (!wki_loop_given(&p->inst[i]) && !(defer && p->inst[i].code == WKI_L_STORE))
            p->list[p->nlist++] = (int16_t)i;
    }
    for (int i = 0; defer && i < p->ninst; i++)
        if (p->inst[i].code == WKI_L_STORE) {
            p->list[p->nlist++] = (int16_t)i;
            g->last[wanted(p, i, p->inst[i].b)] = (int16_t)p->ninst;
        }
    for (int i = 0; i < p->ninst; i++)
        if (p->inst[i].code == WKI_L_STORE) {
            int safe = aliased ? last_read(p, g, p->r->opnd[p->inst[i].a].data, i) : -1;
            if (direct_ok(p, i, safe))
                p->direct[p->inst[i].b] = p->inst[i].a;
        }
}

/* ---- addressing ---------------------------------------------------------------------------------------------------- */

static void use_view(wki_loop_plan *p, uint64_t *seen, int v) {
    const wki_loop_run *r = p->r;
    if (*seen >> v & 1)
        return;
    *seen |= (uint64_t)1 << v;
    p->view[p->nview++] = (int16_t)v;
    if (v < WKI_VIEW_INDEX) {
        p->stride[v] = r->opnd[v].stride;
        return;
    }
    int64_t *stride = v == WKI_VIEW_RNG ? p->logical : p->unit[v - WKI_VIEW_INDEX], step = 1;
    p->stride[v] = stride;
    if (v != WKI_VIEW_RNG) {
        for (int d = 0; d < r->ndim; d++)
            stride[d] = d == v - WKI_VIEW_INDEX;
        return;
    }
    for (int at = r->ndim - 1; at >= 0; at--)
        for (int d = 0; d < r->ndim; d++)
            if (r->logical[d] == at) {
                stride[d] = step;
                step *= r->size[d];
            }
}

static bool overlap(const wki_loop_plan *p, int v, int w) {
    const wki_operand *a = &p->r->opnd[v], *b = &p->r->opnd[w];
    const char *x = a->data, *y = b->data;
    return x < y + p->end[w] * wki_dtype_bytes[b->dtype] && y < x + p->end[v] * wki_dtype_bytes[a->dtype];
}

/* Marks loads that read where a store may write, and returns whether there are any. */
static bool find_aliases(wki_loop_plan *p) {
    int nload = p->r->prog->nload, nopnd = nload + p->r->prog->nstore;
    bool aliased = false;
    for (int k = 0; k < p->nview; k++)
        for (int l = 0, w = p->view[k]; w >= nload && w < nopnd && l < p->nview; l++) {
            int v = p->view[l];
            if (v < nload && overlap(p, v, w))
                aliased = p->careful[v] = true;
        }
    return aliased;
}

/* Finds the views in use, and whether anything reduces. Returns whether a store may write where a load reads. */
static bool find_views(wki_loop_plan *p) {
    const wki_loop_run *r = p->r;
    uint64_t seen = 0;
    p->nview = 0;
    for (int i = 0; i < p->ninst; i++) {
        int c = p->inst[i].code;
        p->reduces |= c == WKI_L_REDUCE;
        if (c == WKI_L_LOAD || c == WKI_L_STORE || c == WKI_L_INDEX || c == WKI_L_RNG)
            use_view(p, &seen, wki_loop_view(r, &p->inst[i]));
    }
    for (int k = 0; k < p->nview; k++) {
        int v = p->view[k];
        int64_t end = 1;
        for (int d = 0; d < r->ndim; d++)
            end += (r->size[d] - 1) * p->stride[v][d];
        p->end[v] = end;
        p->careful[v] = p->copied[v] = false;
    }
    return find_aliases(p);
}

static void span_add(wki_span *s, const int64_t *size, const int64_t *stride, int first, int last) {
    int n = s->nd;
    for (int d = first; d < last; d++) {
        if (size[d] == 1)
            continue;
        if (n && s->stride[n - 1] == size[d] * stride[d]) {
            s->size[n - 1] *= size[d];
            s->stride[n - 1] = stride[d];
        } else {
            s->size[n] = size[d];
            s->stride[n++] = stride[d];
        }
    }
    s->nd = n;
}

static void span_end(wki_span *s) {
    if (!s->nd) {
        s->nd = 1;
        s->size[0] = 1;
        s->stride[0] = 0;
    }
}

static void span_over(wki_span *s, const int64_t *size, const int64_t *stride, int first, int last) {
    s->nd = 0;
    span_add(s, size, stride, first, last);
    span_end(s);
}

/* KEEP dimensions from `first` on are a block's rows (COLS). */
static void address(wki_loop_plan *p, int first) {
    const wki_loop_run *r = p->r;
    int keep = r->ndim - r->nred, nd = r->ndim;
    for (int k = 0; k < p->nview; k++) {
        int v = p->view[k];
        const int64_t *st = p->stride[v];
        switch (p->layout) {
        case WKI_ROWS:
            span_over(&p->row[v], r->size, st, 0, keep); /* fall through */
        case WKI_FLAT:
            span_over(&p->elem[v], r->size, st, 0, nd);
            break;
        case WKI_WIDE:
            span_over(&p->outer[v], r->size, st, 0, keep);
            span_over(&p->elem[v], r->size, st, keep, nd);
            span_over(&p->row[v], r->size, st, 0, 0);
            break;
        case WKI_COLS:
            span_over(&p->outer[v], r->size, st, 0, first);
            span_over(&p->row[v], r->size, st, first, keep);
            p->elem[v].nd = 0;
            span_add(&p->elem[v], r->size, st, keep, nd);
            if (!p->block)
                span_add(&p->elem[v], r->size, st, first, keep);
            span_end(&p->elem[v]);
            break;
        }
    }
}

/* ---- layouts ------------------------------------------------------------------------------------------------------- */

static void lay_flat(wki_loop_plan *p, const registers *g) {
    p->run = p->tile = p->nelem;
    p->units = p->pieces = 1;
    if (p->nelem <= WKI_LOOP_TILE && g->nelem * p->nelem * 4 <= CACHE_BYTES && fits(p, g, p->nelem, 0)) {
        address(p, 0);
        place_registers(p, g, p->nelem, 0);
        return;
    }
    int64_t t = WKI_LOOP_TILE;
    while ((t > 128 && g->nelem * t * 4 > CACHE_BYTES) || !fits(p, g, t, 0))
        t = (t + WKI_LOOP_PAD) / 2 - WKI_LOOP_PAD;
    address(p, 0);
    for (int k = 0; k < p->nview; k++) {
        const wki_span *s = &p->elem[p->view[k]];
        if (s->nd > 1 && s->size[s->nd - 1] >= MIN_RUN && s->size[s->nd - 1] < p->run)
            p->run = s->size[s->nd - 1];
        if (s->nd > 1 && s->size[s->nd - 1] < MIN_RUN) {
            p->run = p->nelem;
            break;
        }
    }
    p->tile = wki_loop_up16(ceil_div(p->run, ceil_div(p->run, t)));
    p->pieces = ceil_div(p->run, p->tile);
    p->units = p->nelem / p->run * p->pieces;
    place_registers(p, g, p->tile, 0);
}

/* Whole rows whose elements fill whole vectors, if such a tile is not too large. */
static bool lay_rows(wki_loop_plan *p, const registers *g) {
    p->layout = WKI_ROWS;
    p->tight = p->ncol % 16 != 0;
    p->tile = p->nrow;
    p->units = 1;
    if (p->nelem <= WKI_LOOP_TILE && g->nelem * p->nelem * 4 <= CACHE_BYTES &&
        fits(p, g, p->nelem, p->nrow)) {
        address(p, 0);
        place_registers(p, g, p->nelem, p->nrow);
        return true;
    }
    int64_t limit = WKI_LOOP_TILE, even = 16 >> (p->tight ? __builtin_ctzll((uint64_t)p->ncol) : 4);
    while (limit > 256 && g->nelem * limit * 4 > CACHE_BYTES)
        limit /= 2;
    int64_t rows = limit / p->ncol;
    if (rows >= even)
        rows -= even > 1 ? rows % even : 0;
    else if (even * p->ncol <= 2 * limit)
        rows = even;
    rows = rows > p->nrow ? p->nrow : rows < 1 ? 1 : rows;
    while (!fits(p, g, rows * p->ncol, rows)) {
        if (rows == 1)
            return false;
        rows /= 2;
    }
    p->tile = rows;
    p->units = ceil_div(p->nrow, rows);
    address(p, 0);
    place_registers(p, g, rows * p->ncol, rows);
    return true;
}

static void lay_wide(wki_loop_plan *p, const registers *g) {
    p->layout = WKI_WIDE;
    p->units = p->nrow;
    p->tile = p->ncol;
    p->split = !g->nreduce || p->ncol == 0 || p->ncol > WHOLE_ROW;
    if (!p->split && !fits(p, g, p->tile, 1))
        p->split = true;
    if (p->split) {
        p->tile = WKI_LOOP_CHUNK;
        while (p->tile > 64 && (!fits(p, g, p->tile, 1) || g->nelem * p->tile * 4 > CACHE_BYTES))
            p->tile /= 2;
        fits(p, g, p->tile, 1);
    }
    address(p, 0);
    place_registers(p, g, p->tile, 1);
}

static bool mergeable(const wki_loop_plan *p, int d) {
    for (int k = 0; k < p->nview; k++) {
        const int64_t *st = p->stride[p->view[k]];
        if (st[d - 1] != p->r->size[d] * st[d] && p->r->size[d - 1] != 1)
            return false;
    }
    return true;
}

static void lay_cols(wki_loop_plan *p, const registers *g) {
    int keep = p->r->ndim - p->r->nred, first = keep;
    p->layout = WKI_COLS;
    p->inner = 1;
    while (first > 0 && (first == keep || p->inner < 16 || mergeable(p, first)))
        p->inner *= p->r->size[--first];
    p->split = true;
    p->block = p->inner > WKI_LOOP_COLS_WHOLE || !fits(p, g, p->inner, p->inner);
    p->tile = 1;
    p->bsize = p->inner;
    if (p->block) {
        p->bsize = WKI_LOOP_TILE;
        while ((p->bsize > 64 && g->nelem * p->bsize * 4 > CACHE_BYTES) || !fits(p, g, p->bsize, p->bsize))
            p->bsize = (p->bsize + WKI_LOOP_PAD) / 2 - WKI_LOOP_PAD;
    } else if (g->nreduce && p->ncol && p->ncol * p->inner <= WHOLE_ROW &&
               fits(p, g, p->ncol * p->inner, p->inner)) {
        p->split = false;
        p->tile = p->ncol;
    } else {
        p->tile = WKI_LOOP_RUN;
        while (p->tile > 1 &&
               (p->tile * p->inner > WKI_LOOP_CHUNK || !fits(p, g, p->tile * p->inner, p->inner)))
            p->tile /= 2;
    }
    int64_t elems = p->tile * p->bsize;
    fits(p, g, elems, p->bsize);
    p->tight = !p->block && p->inner % 16 != 0;
    p->blocks = ceil_div(p->inner, p->bsize);
    p->units = p->nrow / p->inner * p->blocks;
    address(p, first);
    place_registers(p, g, elems, p->bsize);
}

/* Stages: an ELEM value of stage s can be computed in pass s, after s passes of reductions. */
static void find_stages(wki_loop_plan *p) {
    p->nstage = 0;
    for (int i = 0; i < p->ninst; i++) {
        int16_t v[3];
        int s = 0;
        for (int k = wki_loop_uses(&p->inst[i], v) - 1; k >= 0; k--)
            s = s > p->stage[v[k]] ? s : p->stage[v[k]];
        s += p->inst[i].code == WKI_L_REDUCE;
        p->stage[i] = (uint8_t)s;
        p->nstage = s > p->nstage ? s : p->nstage;
    }
}

/* False when there is nothing to do. */
static bool make_plan(wki_loop_plan *p, const wki_loop_run *r) {
    registers g;
    int keep = r->ndim - r->nred;
    p->r = r;
    p->inst = r->prog->inst;
    p->ninst = r->prog->ninst;
    p->pool = NULL;
    p->split = p->block = p->tight = p->reduces = false;
    p->nrow = p->ncol = 1;
    for (int d = 0; d < keep; d++)
        p->nrow *= r->size[d];
    for (int d = keep; d < r->ndim; d++)
        p->ncol *= r->size[d];
    p->nelem = p->nrow * p->ncol;
    if (!p->nrow)
        return false;
    p->layout = r->nred ? WKI_ROWS : WKI_FLAT;
    bool aliased = p->aliased = find_views(p);
    if (p->nelem * p->ninst <= WKI_LOOP_LEAN) {
        order_lean(p, aliased);
        assign_lean(p, &g);
    } else {
        find_last_uses(p, &g);
        order_stores(p, &g, aliased);
        assign_registers(p, &g);
    }
    if (p->layout == WKI_FLAT)
        lay_flat(p, &g);
    else if (r->col)
        lay_cols(p, &g);
    else if (!p->ncol || p->ncol > SHORT_ROW || !lay_rows(p, &g))
        lay_wide(p, &g);
    if (p->split)
        find_stages(p);
    return true;
}

/* ---- running ------------------------------------------------------------------------------------------------------- */

typedef struct {
    wki_loop_units *units;
    wki_loop_plain *plain;
} executor;

static const executor *executor_of(wki_isa isa) {
    static const executor tiers[] = {
        [WKI_ISA_BASELINE] = {wki_loop_units_baseline, wki_loop_plain_baseline},
#if defined(__x86_64__)
        [WKI_ISA_AVX2] = {wki_loop_units_avx2, wki_loop_plain_avx2},
        [WKI_ISA_AVX512] = {wki_loop_units_avx512, wki_loop_plain_avx512},
#endif
    };
    return &tiers[(size_t)isa < sizeof tiers / sizeof *tiers ? isa : WKI_ISA_BASELINE];
}

static bool contiguous(const wki_loop_run *r, const wki_operand *o) {
    int64_t step = 1;
    for (int d = r->ndim - 1; d >= 0; d--) {
        if (r->size[d] != 1 && o->stride[d] != step)
            return false;
        step *= r->size[d];
    }
    return true;
}

/* May r run without a plan, whatever its operands' addresses unless they overlap? */
static bool plain_fits(const wki_loop_run *r) {
    const wki_loop *p = r->prog;
    int64_t n = 1;
    if (r->nred || p->ninst > WKI_LOOP_PLAIN || p->inst[p->ninst - 1].code != WKI_L_STORE)
        return false;
    for (int d = 0; d < r->ndim; d++)
        n *= r->size[d];
    if (!n || n * p->ninst > PLAIN_WORK)
        return false;
    for (int o = 0; o < p->nload + p->nstore; o++)
        if (!contiguous(r, &r->opnd[o]))
            return false;
    uint32_t codes = 0;
    for (int i = 0; i < p->ninst; i++)
        codes |= 1u << p->inst[i].code;
    return !(codes & ~(1u << WKI_L_LOAD | 1u << WKI_L_STORE | 1u << WKI_L_PRIM | 1u << WKI_L_CONST |
                       1u << WKI_L_ARG));
}

static bool run_plain(const wki_loop_run *r, wki_loop_plain *run) {
    const wki_loop *p = r->prog;
    if (!plain_fits(r))
        return false;
    int64_t n = 1;
    for (int d = 0; d < r->ndim; d++)
        n *= r->size[d];
    uint32_t copied = 0;
    for (int i = 0; i < p->nload; i++)
        for (int j = 0; j < p->nstore; j++) { /* no element has more than 8 bytes */
            uintptr_t a = (uintptr_t)r->opnd[i].data, b = (uintptr_t)r->opnd[p->nload + j].data;
            if (a - b < (uintptr_t)n * 8 || b - a < (uintptr_t)n * 8)
                copied |= 1u << i;
        }
    bool stored = false;
    for (int i = 0; copied && i < p->ninst; i++) {
        if (stored && p->inst[i].code == WKI_L_LOAD)
            return false;
        stored |= p->inst[i].code == WKI_L_STORE;
    }
    run(r, n, copied);
    return true;
}

typedef struct {
    const wki_loop_plan *plan;
    wki_loop_units *run;
} job;

static void run_part(void *arg, int64_t begin, int64_t end, int worker) {
    const job *j = arg;
    (void)worker;
    j->run(j->plan, begin, end);
}

static void run_plan(wki_loop_plan *p, wki_loop_units *run, wki_pool *pool) {
    int64_t work = p->nelem * p->ninst;
    p->pool = NULL;
    if (!pool || work < 2 * THREAD_WORK) {
        run(p, 0, p->units);
        return;
    }
    if (p->split && p->units < 2 * wki_pool_size(pool) && p->nelem / p->units >= INNER_WORK) {
        p->pool = pool;
        p->grain = ceil_div(THREAD_WORK, p->ninst);
        run(p, 0, p->units);
        return;
    }
    job j = {p, run};
    wki_pool_for(pool, p->units, run_part, &j, ceil_div(THREAD_WORK * p->units, work));
}

static __attribute__((noinline)) void run_planned(const wki_loop_run *r, wki_loop_units *run,
                                                  wki_pool *pool) {
    wki_loop_plan p;
    if (make_plan(&p, r))
        run_plan(&p, run, pool);
}

bool wki_loop_cpu(const wki_loop_run *r, wki_isa isa, wki_pool *pool) {
    const executor *e = executor_of(isa);
    wki_straight s;
    if (wki_straight_fits(r, &s))
        wki_straight_run(r, &s, isa, pool);
    else if (!run_plain(r, e->plain))
        run_planned(r, e->units, pool);
    return true;
}

/* ---- running again ------------------------------------------------------------------------------------------------- */

struct wki_loop_kept {
    bool straight;
    wki_straight s;     /* only this where `straight` */
    wki_loop_plan plan; /* of nothing where plan.r is NULL */
};

size_t wki_loop_kept_bytes(const wki_loop_run *r) {
    wki_straight s;
    if (wki_straight_fits(r, &s))
        return wki_loop_up16(offsetof(wki_loop_kept, plan));
    int64_t work = r->prog->ninst;
    for (int d = 0; d < r->ndim; d++)
        work *= r->size[d];
    return work > KEEP_WORK || plain_fits(r) ? 0 : sizeof(wki_loop_kept);
}

void wki_loop_keep(const wki_loop_run *r, wki_loop_kept *k) {
    k->straight = wki_straight_fits(r, &k->s);
    if (!k->straight)
        k->plan.r = NULL;
}

/* A plan depends on addresses only where operands overlap. */
bool wki_loop_cpu_again(const wki_loop_run *r, wki_isa isa, wki_pool *pool, wki_loop_kept *k) {
    if (!k)
        return wki_loop_cpu(r, isa, pool);
    if (k->straight) {
        wki_straight_run(r, &k->s, isa, pool);
        return true;
    }
    wki_loop_plan *p = &k->plan;
    bool ready = (p->r && !find_aliases(p)) || make_plan(p, r);
    if (ready)
        run_plan(p, executor_of(isa)->units, pool);
    if (!ready || p->aliased)
        p->r = NULL;
    return true;
}
