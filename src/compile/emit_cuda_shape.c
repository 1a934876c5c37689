/* The shape of a CUDA kernel and the parameters of its launches (emit_cuda.h). Calls the C library alone. */
#include "compile/emit_cuda_private.h"

#include "core/core.h"

#include <string.h>

/* ---- merging dimensions -------------------------------------------------------------------------------- */

typedef struct dim {
    int64_t size, stride[WKI_LOOP_MAX_OPERANDS];
    uint64_t weight;
    int8_t index; /* INDEX that reads it, or -1 */
} dim;

static int64_t mag(int64_t x) { return x < 0 ? -x : x; }

/* Dimensions of size 1 are left out. */
static int collect(const wki_loop_run *r, int first, int last, int nop, uint32_t indexed, dim *out) {
    int n = 0;
    for (int d = first; d < last; d++) {
        if (r->size[d] == 1)
            continue;
        dim *o = &out[n++];
        *o = (dim){.size = r->size[d], .weight = 1, .index = -1};
        for (int i = 0; i < nop; i++)
            o->stride[i] = r->opnd[i].stride[d];
        for (int e = 0; e < r->ndim; e++)
            if (r->logical[e] > r->logical[d])
                o->weight *= (uint64_t)r->size[e];
        int a = r->ndim - 1 - r->logical[d];
        if (indexed >> a & 1)
            o->index = (int8_t)a;
    }
    return n;
}

/* Kept dimensions in the order of one operand's strides, so that neighbouring threads work on neighbours. */
static void sort_by(dim *d, int n, int operand) {
    for (int i = 1; i < n; i++)
        for (int j = i; j > 0 && mag(d[j - 1].stride[operand]) < mag(d[j].stride[operand]); j--) {
            dim t = d[j];
            d[j] = d[j - 1];
            d[j - 1] = t;
        }
}

static bool mergeable(const dim *a, const dim *b, int nop, bool rng) {
    if (a->index >= 0 || b->index >= 0 || (rng && a->weight != b->weight * (uint64_t)b->size))
        return false;
    for (int i = 0; i < nop; i++)
        if (a->stride[i] != b->stride[i] * b->size)
            return false;
    return true;
}

static int merge(dim *d, int n, int nop, bool rng) {
    int m = 0;
    for (int i = 0; i < n; i++) {
        if (m && mergeable(&d[m - 1], &d[i], nop, rng)) {
            int64_t size = d[m - 1].size * d[i].size;
            d[m - 1] = d[i];
            d[m - 1].size = size;
        } else {
            d[m++] = d[i];
        }
    }
    return m;
}

/* ---- classifying --------------------------------------------------------------------------------------- */

enum {
    ENOUGH_BLOCKS = 264, /* two for each multiprocessor of a large device */
    SPLIT_PARTS = 8,     /* of a row at least */
};

/* Nothing is done once per row: ROW loads do not depend on the column. Then rows and columns are all the
   same. */
static bool rowless(const wki_loop_run *r) {
    const wki_loop *p = r->prog;
    int nk = r->ndim - r->nred;
    for (int i = 0; i < p->ninst; i++) {
        const wki_inst *in = &p->inst[i];
        if (in->code == WKI_L_REDUCE)
            return false;
        if (in->level != WKI_ROWV)
            continue;
        if (in->code == WKI_L_STORE || in->code == WKI_L_CHECK || in->code == WKI_L_INDEX ||
            in->code == WKI_L_RNG)
            return false;
        for (int d = nk; in->code == WKI_L_LOAD && d < r->ndim; d++)
            if (r->opnd[in->a].stride[d] != 0 && r->size[d] != 1)
                return false;
    }
    return true;
}

/* The operand whose layout kept dimensions follow: what is read by the element where rows are reduced, else
   what is written. */
static int leader(const wki_loop *p, bool reduces) {
    for (int i = 0; reduces && i < p->ninst; i++)
        if (p->inst[i].code == WKI_L_LOAD && p->inst[i].level == WKI_ELEM)
            return p->inst[i].a;
    return p->nstore ? p->nload : 0;
}

static wki_cu_move move_of(const wki_cu_shape *s, int op, int first, int last) {
    const int64_t *stride = s->stride[op];
    int64_t linear = 1;
    bool is_linear = true;
    for (int d = last - 1; d >= first; d--) {
        is_linear = is_linear && stride[d] == linear;
        linear *= s->size[d];
    }
    if (is_linear)
        return WKI_CU_LINEAR;
    return stride[last - 1] == 1 ? WKI_CU_UNIT : stride[last - 1] == 0 ? WKI_CU_STILL : WKI_CU_STRIDED;
}

/* 2^30 leaves room for a grid's stride beyond the last index. */
static bool needs_64_bits(const wki_cu_shape *s) {
    const double limit = 0x1p30;
    double n = 1;
    for (int d = 0; d < wki_cu_dims(s); d++)
        n *= (double)s->size[d];
    if (n > limit)
        return true;
    for (int i = 0; i < s->nop; i++) {
        double reach = 0;
        for (int d = 0; d < wki_cu_dims(s); d++)
            reach += (double)mag(s->stride[i][d]) * (double)s->size[d];
        if (reach > limit)
            return true;
    }
    return false;
}

enum { MAX_VECTOR_OPERANDS = 12 }; /* each takes four registers */

static bool by_fours(const wki_cu_shape *s) {
    int n = wki_cu_dims(s);
    bool any = false;
    if (n == 0 || s->nop > MAX_VECTOR_OPERANDS || (n > 1 && s->size[n - 1] % 4))
        return false;
    for (int i = 0; i < s->nop; i++) {
        if (s->move[i] == WKI_CU_STRIDED)
            return false;
        any |= s->move[i] != WKI_CU_STILL;
        for (int d = 0; d < n - 1 && s->move[i] == WKI_CU_UNIT; d++)
            if (s->stride[i][d] % 4)
                return false;
    }
    return any;
}

/* Is a row walked once: do no element's store or check and no reduction need another reduction? */
static bool one_pass(const wki_loop *p) {
    bool behind[WKI_LOOP_MAX_INST] = {0};
    int nreduce = 0;
    for (int i = 0; i < p->ninst; i++) {
        const wki_inst *in = &p->inst[i];
        int16_t use[3];
        for (int k = 0, n = wki_cu_uses(in, use); k < n; k++)
            behind[i] |= use[k] >= 0 && use[k] < i && behind[use[k]];
        bool reduces = in->code == WKI_L_REDUCE && in->level == WKI_ROWV;
        if (behind[i] && (reduces || (acts(in) && in->level != WKI_ROWV)))
            return false;
        behind[i] |= reduces;
        nreduce += reduces;
    }
    return nreduce > 0 && nreduce <= WKI_CU_PASS_REDUCES;
}

static void choose_kind(const wki_loop_run *r, bool rows, wki_cu_shape *s) {
    if (!rows) {
        s->kind = WKI_CU_EACH;
        s->vec = by_fours(s);
    } else if (r->col) {
        s->kind = WKI_CU_COL;
    } else if (s->ncol <= WKI_CU_ROW_PART) {
        s->kind = WKI_CU_WARP;
        s->chunks = (int)((s->ncol + 31) / 32);
        s->chunks = s->chunks < 1 ? 1 : s->chunks <= 4 ? s->chunks : (s->chunks + 3) / 4 * 4;
    } else {
        bool few = s->nrow < ENOUGH_BLOCKS / 2 && s->ncol > SPLIT_PARTS * WKI_CU_ROW_PART;
        s->kind = few && one_pass(r->prog) ? WKI_CU_SPLIT : WKI_CU_BLOCK;
    }
}

/* One contiguous dimension whose size is the tensor's. */
static void multi_shape(const wki_loop_run *r, wki_cu_shape *s) {
    s->kind = WKI_CU_MULTI;
    s->nk = 1;
    s->vec = s->nop <= MAX_VECTOR_OPERANDS;
    s->rng_unit = true;
    s->weight[0] = 1;
    s->nrow = 1;
    for (int d = 0; d < r->ndim; d++)
        s->nrow *= r->size[d];
    s->ncol = 1;
    s->size[0] = s->nrow;
    for (int i = 0; i < s->nop; i++) {
        s->stride[i][0] = 1;
        s->move[i] = WKI_CU_LINEAR;
    }
}

void wki_cu_shape_of(const wki_loop_run *r, bool multi, wki_cu_shape *s) {
    const wki_loop *p = r->prog;
    *s = (wki_cu_shape){.nop = p->nload + p->nstore};
    memset(s->index_dim, -1, sizeof s->index_dim);
    uint32_t indexed = 0;
    for (int i = 0; i < p->ninst; i++) {
        s->rng |= p->inst[i].code == WKI_L_RNG;
        if (p->inst[i].code == WKI_L_INDEX)
            indexed |= 1u << p->inst[i].a;
    }
    s->index = indexed != 0;
    if (multi) {
        multi_shape(r, s);
        return;
    }
    bool rows = r->nred > 0 && !rowless(r);
    int nk = rows ? r->ndim - r->nred : r->ndim;
    dim d[WKI_LOOP_MAX_DIMS];
    s->nk = collect(r, 0, nk, s->nop, indexed, d);
    if (s->nop)
        sort_by(d, s->nk, leader(p, rows));
    s->nk = merge(d, s->nk, s->nop, s->rng);
    s->nr = collect(r, nk, r->ndim, s->nop, indexed, d + s->nk);
    s->nr = merge(d + s->nk, s->nr, s->nop, s->rng);
    s->nrow = s->ncol = 1;
    for (int i = 0; i < wki_cu_dims(s); i++) {
        s->size[i] = d[i].size;
        s->weight[i] = d[i].weight;
        *(i < s->nk ? &s->nrow : &s->ncol) *= d[i].size;
        if (d[i].index >= 0)
            s->index_dim[d[i].index] = (int8_t)i;
        for (int o = 0; o < s->nop; o++)
            s->stride[o][i] = d[i].stride[o];
    }
    for (int o = 0; o < s->nop; o++)
        s->move[o] = rows ? move_of(s, o, s->nk, wki_cu_dims(s)) : move_of(s, o, 0, s->nk);
    s->wide = needs_64_bits(s);
    s->rng_unit = s->rng && !rows && s->nk && s->weight[s->nk - 1] == 1;
    choose_kind(r, rows, s);
}

/* ---- parameters ---------------------------------------------------------------------------------------- */

void wki_cu_layout_of(const wki_loop *p, const wki_cu_shape *s, wki_cu_layout *l) {
    int dims = wki_cu_dims(s), nq = 0, nd = 0;
    int *wide = s->wide ? &nq : &nd;
    *l = (wki_cu_layout){0};
#define TAKE(field, from, n) (l->field = *(from), *(from) += (n))
    if (s->kind == WKI_CU_MULTI) {
        TAKE(base, &nq, 1);
        TAKE(slot, &nd, 1);
        TAKE(each, &nd, 1);
    } else {
        TAKE(base, &nq, s->nop);
        TAKE(slot, &nd, s->nop);
        TAKE(nrow, wide, 1);
        TAKE(ncol, wide, 1);
        TAKE(size, wide, dims);
        TAKE(stride, wide, s->nop * dims);
        TAKE(weight, wide, s->rng ? dims : 0);
        TAKE(div, &nd, s->wide ? 0 : 2 * dims);
    }
    if (s->kind == WKI_CU_SPLIT) {
        TAKE(scratch, &nq, 2);
        TAKE(each, &nd, 2);
    }
    TAKE(arg, &nd, p->narg);
    TAKE(rng, &nd, p->nrng);
    TAKE(seed, &nd, 1);
    TAKE(rng_base, &nd, 1);
    TAKE(fault, &nd, 1);
#undef TAKE
    l->nq = nq ? nq : 1; /* arrays of a struct are not empty */
    l->nd = nd;
}

typedef struct filler {
    uint64_t *q;
    int32_t *d;
    bool wide;
} filler;

static bool filler_init(filler *f, const wki_cu_layout *l, bool wide, wki_cu_loop_params *out,
                        const char **why) {
    size_t bytes = (size_t)l->nq * 8 + ((size_t)l->nd * 4 + 7) / 8 * 8;
    if (bytes > sizeof out->data) {
        *why = "a loop program has too many operands and arguments for a CUDA kernel";
        return false;
    }
    memset(out, 0, offsetof(wki_cu_loop_params, data) + bytes);
    out->bytes = (unsigned)bytes;
    *f = (filler){.q = (uint64_t *)out->data, .d = (int32_t *)(out->data + (size_t)l->nq * 8), .wide = wide};
    return true;
}

static void put(const filler *f, int at, int64_t v) {
    if (f->wide)
        f->q[at] = (uint64_t)v;
    else
        f->d[at] = (int32_t)v;
}

/* Multiplier and shift of wkl_div; d >= 2. */
static void put_division(const filler *f, int at, int64_t d) {
    if (d < 1)
        return;
    int shift = 0;
    while (((int64_t)1 << shift) < d)
        shift++;
    uint64_t mul = (((uint64_t)1 << 32) * (((uint64_t)1 << shift) - (uint64_t)d)) / (uint64_t)d + 1;
    f->d[at] = (int32_t)(uint32_t)mul;
    f->d[at + 1] = shift;
}

static void put_shared(const filler *f, const wki_cu_layout *l, const wki_loop *p, const wki_cu_bind *b,
                       bool rng, bool checks) {
    for (int i = 0; i < p->narg; i++)
        f->d[l->arg + i] = b->val_slot[i];
    for (int i = 0; i < p->nrng; i++)
        f->d[l->rng + i] = b->rng_rel[i];
    f->d[l->seed] = rng ? b->seed_slot : 0;
    f->d[l->rng_base] = rng ? b->rng_base_slot : 0;
    f->d[l->fault] = checks || p->in_place ? b->fault_slot : 0;
}

static bool has_code(const wki_loop *p, wki_loop_code code) {
    for (int i = 0; i < p->ninst; i++)
        if (p->inst[i].code == code)
            return true;
    return false;
}

/* ---- grids --------------------------------------------------------------------------------------------- */

static int64_t blocks(int64_t work, int64_t per_block) { return (work + per_block - 1) / per_block; }

/* At most `limit`, itself a power of two. */
static int pow2_at_least(int64_t n, int limit) {
    int p = 1;
    while (p < n && p < limit)
        p *= 2;
    return p;
}

/* x: neighbouring rows, 8 floats being the least that a memory access fetches; y: parts. Narrow blocks where
   wide ones would be few. */
static void col_block(const wki_cu_shape *s, bool stores, unsigned block[3]) {
    int64_t parts = blocks(s->ncol, stores ? WKI_CU_COL_PART / 8 : WKI_CU_COL_PART);
    int x = 32, threads = WKI_CU_MAX_THREADS / 2;
    while (x > 8 && blocks(s->nrow, x) < ENOUGH_BLOCKS && parts > threads / x)
        x /= 2;
    if (blocks(s->nrow, x) < ENOUGH_BLOCKS)
        threads = WKI_CU_MAX_THREADS;
    int y = pow2_at_least(parts, threads / x);
    while (x * y < WKI_CU_COL_ROWS)
        x *= 2;
    block[0] = (unsigned)x;
    block[1] = (unsigned)y;
}

/* SPLIT: parts for a block, a few for each of its warps. */
static int64_t parts_each(const wki_cu_shape *s) {
    int64_t warps = WKI_CU_SPLIT_THREADS / 32, parts = blocks(s->ncol, WKI_CU_ROW_PART);
    int64_t turns = blocks(blocks(parts * s->nrow, ENOUGH_BLOCKS), warps);
    return (turns > 0 ? turns : 1) * warps;
}

static int64_t row_blocks(const wki_cu_shape *s) {
    return blocks(blocks(s->ncol, WKI_CU_ROW_PART), parts_each(s));
}

/* false: more blocks than a grid holds. */
static bool choose_grid(const wki_cu_shape *s, const wki_loop *p, wki_cu_loop_params *out) {
    int64_t n = 0;
    out->block[1] = out->block[2] = out->grid[1] = out->grid[2] = 1;
    switch (s->kind) {
    case WKI_CU_EACH:
        out->block[0] = WKI_CU_THREADS;
        n = blocks(s->vec ? (s->nrow + 3) / 4 : s->nrow, WKI_CU_THREADS);
        break;
    case WKI_CU_WARP:
        out->block[0] = WKI_CU_WARP_THREADS;
        n = blocks(s->nrow, WKI_CU_WARP_THREADS / 32);
        break;
    case WKI_CU_BLOCK: {
        int64_t parts = blocks(s->ncol, WKI_CU_ROW_PART), rounds = blocks(parts, WKI_CU_MAX_THREADS / 32);
        out->block[0] = 32 * (unsigned)blocks(parts, rounds);
        n = s->nrow;
        break;
    }
    case WKI_CU_SPLIT:
        out->block[0] = WKI_CU_SPLIT_THREADS;
        n = s->nrow * row_blocks(s);
        break;
    case WKI_CU_COL: {
        bool stores = false;
        for (int i = 0; i < p->ninst; i++)
            stores |= p->inst[i].code == WKI_L_STORE && p->inst[i].level == WKI_ELEM;
        col_block(s, stores, out->block);
        n = blocks(s->nrow, out->block[0]);
        break;
    }
    case WKI_CU_MULTI:
        return false;
    }
    out->grid[0] = (unsigned)n;
    return n <= INT32_MAX;
}

bool wki_cu_loop_params_fill(const wki_loop_run *r, const wki_cu_bind *b, wki_cu_loop_params *out,
                             const char **why) {
    const wki_loop *p = r->prog;
    wki_cu_shape s;
    wki_cu_layout l;
    filler f;
    wki_cu_shape_of(r, false, &s);
    wki_cu_layout_of(p, &s, &l);
    if (!filler_init(&f, &l, s.wide, out, why))
        return false;
    int dims = wki_cu_dims(&s);
    for (int i = 0; i < s.nop; i++) {
        f.q[l.base + i] = b->opnd[i].base;
        f.d[l.slot + i] = b->opnd[i].slot;
        for (int d = 0; d < dims; d++)
            put(&f, l.stride + i * dims + d, s.stride[i][d]);
    }
    put(&f, l.nrow, s.nrow);
    put(&f, l.ncol, s.ncol);
    for (int d = 0; d < dims; d++) {
        put(&f, l.size + d, s.size[d]);
        if (s.rng)
            put(&f, l.weight + d, (int64_t)s.weight[d]);
        if (!s.wide)
            put_division(&f, l.div + 2 * d, s.size[d]);
    }
    put_shared(&f, &l, p, b, s.rng, has_code(p, WKI_L_CHECK));
    if (s.kind == WKI_CU_SPLIT && s.nrow) {
        f.q[l.scratch] = b->scratch;
        f.q[l.scratch + 1] = b->counts;
        f.d[l.each] = (int32_t)parts_each(&s);
        f.d[l.each + 1] = (int32_t)row_blocks(&s);
    }
    if (!choose_grid(&s, p, out)) {
        *why = "a loop has too many rows for a CUDA grid";
        return false;
    }
    return true;
}

wki_cu_scratch wki_cu_scratch_of(const wki_loop_run *r) {
    wki_cu_shape s;
    int64_t reduces = 0;
    wki_cu_shape_of(r, false, &s);
    if (s.kind != WKI_CU_SPLIT)
        return (wki_cu_scratch){0};
    for (int i = 0; i < r->prog->ninst; i++)
        reduces += r->prog->inst[i].code == WKI_L_REDUCE;
    return (wki_cu_scratch){.bytes = (size_t)(reduces * s.nrow * blocks(s.ncol, WKI_CU_ROW_PART)) *
                                     sizeof(int32_t),
                            .counts = (int)s.nrow};
}

/* ---- many tensors -------------------------------------------------------------------------------------- */

static bool contiguous(const wki_loop_run *r, const wki_operand *o) {
    int64_t linear = 1;
    bool empty = false, ok = true;
    for (int place = r->ndim - 1; place >= 0; place--)
        for (int d = 0; d < r->ndim; d++)
            if (r->logical[d] == place) {
                ok = ok && (r->size[d] == 1 || o->stride[d] == linear);
                empty |= r->size[d] == 0;
                linear *= r->size[d];
            }
    return ok || empty;
}

bool wki_cu_multi_joins(const wki_loop_run *first, const wki_loop_run *r) {
    const wki_loop *p = r->prog, *q = first->prog;
    if (r->nred || p->ninst != q->ninst || p->nload != q->nload || p->nstore != q->nstore)
        return false;
    for (int i = 0; i < p->ninst; i++) {
        const wki_inst *a = &p->inst[i], *b = &q->inst[i];
        if (a->code == WKI_L_INDEX || a->code == WKI_L_REDUCE || a->code != b->code || a->sub != b->sub ||
            a->type != b->type || a->a != b->a || a->b != b->b || a->c != b->c || a->imm.i != b->imm.i)
            return false;
    }
    for (int i = 0; i < p->nload + p->nstore; i++)
        if (r->opnd[i].dtype != first->opnd[i].dtype || !contiguous(r, &r->opnd[i]))
            return false;
    return true;
}

enum { BIG_LAUNCH = 1 << 22 }; /* elements: enough blocks also with large chunks */

static int64_t elements(const wki_loop_run *r) {
    int64_t n = 1;
    for (int d = 0; d < r->ndim; d++)
        n *= r->size[d];
    return n;
}

static size_t entry_words(const wki_loop *p) { return 1 + 2 * (size_t)(p->nload + p->nstore); }

size_t wki_cu_multi_words(const wki_loop *prog, int n) {
    return (size_t)n + 1 + (size_t)n * entry_words(prog);
}

/* Table: first chunk of each tensor and the number of chunks; then for each tensor its size and, per operand,
   base and slot. */
bool wki_cu_multi_fill(const wki_loop_run *const *r, const wki_cu_bind *b, int n, uint64_t at,
                       uint64_t *table, wki_cu_loop_params *out, const char **why) {
    const wki_loop *p = r[0]->prog;
    wki_cu_shape s;
    wki_cu_layout l;
    filler f;
    wki_cu_shape_of(r[0], true, &s);
    wki_cu_layout_of(p, &s, &l);
    if (!filler_init(&f, &l, false, out, why))
        return false;
    f.q[l.base] = at;
    f.d[l.slot] = n;
    put_shared(&f, &l, p, &b[0], s.rng, has_code(p, WKI_L_CHECK));
    double all = 0;
    for (int t = 0; t < n; t++)
        all += (double)elements(r[t]);
    int each = all > BIG_LAUNCH ? WKI_CU_BIG_CHUNK : WKI_CU_CHUNK;
    f.d[l.each] = each;
    uint64_t chunk = 0, *e = table + n + 1;
    for (int t = 0; t < n; t++) {
        int64_t numel = elements(r[t]);
        table[t] = chunk;
        chunk += (uint64_t)blocks(numel, each);
        *e++ = (uint64_t)numel;
        for (int i = 0; i < s.nop; i++) {
            *e++ = b[t].opnd[i].base;
            *e++ = (uint64_t)(int64_t)b[t].opnd[i].slot;
        }
    }
    table[n] = chunk;
    if (chunk > INT32_MAX) {
        *why = "the tensors of one op have too many elements for a CUDA grid";
        return false;
    }
    out->grid[0] = (unsigned)chunk;
    out->block[0] = WKI_CU_THREADS;
    out->grid[1] = out->grid[2] = out->block[1] = out->block[2] = 1;
    return true;
}
