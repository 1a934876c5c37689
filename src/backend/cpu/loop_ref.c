/* What loop programs mean: the scalar twin of loop.c, one element at a time, written to be read beside ops/loop.h.
 * Tests hold every tier of the fast executor to its results bit for bit. May call the scalar primitives alone. */
#include "backend/backend.h"
#include "ops/prim_scalar.h"

#include <math.h>

typedef union {
    float f;
    int32_t i;
} cell;

typedef struct {
    const wki_loop_run *r;
    int nkeep;
    int64_t idx[WKI_LOOP_MAX_DIMS]; /* where in the domain; a row's own values are computed at column 0 */
    cell row[WKI_LOOP_MAX_INST], elem[WKI_LOOP_MAX_INST];
} machine;

static bool is_row(const machine *m, int v) {
    return m->r->nred > 0 && m->r->prog->inst[v].level == WKI_ROWV;
}

static cell value(const machine *m, int v) { return is_row(m, v) ? m->row[v] : m->elem[v]; }

/* ---- operands ------------------------------------------------------------------------------------------------------ */

static int64_t place(const machine *m, const wki_operand *o) {
    int64_t off = 0;
    for (int d = 0; d < m->r->ndim; d++)
        off += m->idx[d] * o->stride[d];
    return off;
}

static cell load(const machine *m, const wki_operand *o) {
    int64_t at = place(m, o);
    cell v = {.i = 0};
    switch ((wk_dtype)o->dtype) {
    case WK_F32:
        v.f = ((const float *)o->data)[at];
        break;
    case WK_F64:
        v.f = (float)((const double *)o->data)[at];
        break;
    case WK_I32:
        v.i = ((const int32_t *)o->data)[at];
        break;
    case WK_U8:
        v.i = ((const uint8_t *)o->data)[at];
        break;
    case WK_BOOL:
        v.i = -(((const uint8_t *)o->data)[at] != 0);
        break;
    case WK_I64: { /* saturates, so what was out of an int32 range check's bounds stays so */
        int64_t x = ((const int64_t *)o->data)[at];
        v.i = x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : (int32_t)x;
        break;
    }
    default:
        break;
    }
    return v;
}

/* Floats truncate and saturate at int32 (primitive f2i) on their way to integers, and are true when not zero; integers
   wrap to u8; masks leave their low bit. */
static void store(const machine *m, const wki_operand *o, cell v, int type) {
    int64_t at = place(m, o);
    int32_t i = type == WKI_TF ? wks_f2i(v.f) : v.i;
    switch ((wk_dtype)o->dtype) {
    case WK_F32:
        ((float *)o->data)[at] = type == WKI_TF ? v.f : (float)v.i;
        break;
    case WK_F64:
        ((double *)o->data)[at] = type == WKI_TF ? (double)v.f : (double)v.i;
        break;
    case WK_I32:
        ((int32_t *)o->data)[at] = i;
        break;
    case WK_I64:
        ((int64_t *)o->data)[at] = i;
        break;
    case WK_U8:
        ((uint8_t *)o->data)[at] = (uint8_t)i;
        break;
    case WK_BOOL:
        ((uint8_t *)o->data)[at] = type == WKI_TF ? v.f != 0.0f : (uint8_t)(v.i & 1);
        break;
    default:
        break;
    }
}

/* ---- instructions -------------------------------------------------------------------------------------------------- */

/* Which primitives take and give what, made from the table. */
static cell prim(int p, cell a, cell b, cell c) {
    cell r = {.i = 0};
    switch ((wki_prim)p) {
#define P_F_F(E, n)                                                                                          \
    case WKI_P_##E:                                                                                          \
        r.f = wks_##n(a.f);                                                                                  \
        break;
#define P_F_FF(E, n)                                                                                         \
    case WKI_P_##E:                                                                                          \
        r.f = wks_##n(a.f, b.f);                                                                             \
        break;
#define P_F_FFF(E, n)                                                                                        \
    case WKI_P_##E:                                                                                          \
        r.f = wks_##n(a.f, b.f, c.f);                                                                        \
        break;
#define P_I_FF(E, n)                                                                                         \
    case WKI_P_##E:                                                                                          \
        r.i = wks_##n(a.f, b.f);                                                                             \
        break;
#define P_I_I(E, n)                                                                                          \
    case WKI_P_##E:                                                                                          \
        r.i = wks_##n(a.i);                                                                                  \
        break;
#define P_I_II(E, n)                                                                                         \
    case WKI_P_##E:                                                                                          \
        r.i = wks_##n(a.i, b.i);                                                                             \
        break;
#define P_F_IFF(E, n)                                                                                        \
    case WKI_P_##E:                                                                                          \
        r.f = wks_##n(a.i, b.f, c.f);                                                                        \
        break;
#define P_I_III(E, n)                                                                                        \
    case WKI_P_##E:                                                                                          \
        r.i = wks_##n(a.i, b.i, c.i);                                                                        \
        break;
#define P_F_I(E, n)                                                                                          \
    case WKI_P_##E:                                                                                          \
        r.f = wks_##n(a.i);                                                                                  \
        break;
#define P_I_F(E, n)                                                                                          \
    case WKI_P_##E:                                                                                          \
        r.i = wks_##n(a.f);                                                                                  \
        break;
#define P_RNG(E, n)                                                                                          \
    case WKI_P_##E:                                                                                          \
        break;
#include "ops/prims.def"
    case WKI_P_COUNT:
        break;
    }
    return r;
}

/* Row-major place of the element in the logical order of the dimensions. */
static uint64_t logical_index(const machine *m) {
    const wki_loop_run *r = m->r;
    uint64_t at = 0;
    for (int place_ = 0; place_ < r->ndim; place_++)
        for (int d = 0; d < r->ndim; d++)
            if (r->logical[d] == place_)
                at = at * (uint64_t)r->size[d] + (uint64_t)m->idx[d];
    return at;
}

static int32_t index_from_end(const machine *m, int a) {
    for (int d = 0; d < m->r->ndim; d++)
        if (m->r->logical[d] == m->r->ndim - 1 - a)
            return (int32_t)m->idx[d];
    return 0;
}

static cell operand(const machine *m, int v) { return v >= 0 ? value(m, v) : (cell){.i = 0}; }

/* One of SUM, MAX, MIN in the register's type. Of NaN and number MAX and MIN give NaN; integer sums wrap. */
static cell combine(const wki_inst *in, cell a, cell b) {
    cell r;
    if (in->type == WKI_TF)
        r.f = in->sub == WKI_R_SUM ? a.f + b.f : in->sub == WKI_R_MAX ? wks_max(a.f, b.f) : wks_min(a.f, b.f);
    else if (in->sub == WKI_R_SUM)
        r.i = wks_iadd(a.i, b.i);
    else
        r.i = (in->sub == WKI_R_MAX) == (a.i > b.i) ? a.i : b.i;
    return r;
}

static cell identity(const wki_inst *in) {
    if (in->sub == WKI_R_SUM)
        return (cell){.i = 0};
    if (in->type == WKI_TF)
        return (cell){.f = in->sub == WKI_R_MAX ? -INFINITY : INFINITY};
    return (cell){.i = in->sub == WKI_R_MAX ? INT32_MIN : INT32_MAX};
}

/* A value other than a reduction over columns, at the current place. */
static cell compute(const machine *m, int i) {
    const wki_loop_run *r = m->r;
    const wki_inst *in = &r->prog->inst[i];
    switch ((wki_loop_code)in->code) {
    case WKI_L_LOAD:
        return load(m, &r->opnd[in->a]);
    case WKI_L_PRIM:
        return prim(in->sub, operand(m, in->a), operand(m, in->b), operand(m, in->c));
    case WKI_L_CONST:
        return (cell){.i = in->imm.i};
    case WKI_L_ARG:
        return (cell){.f = r->arg[in->a]};
    case WKI_L_INDEX:
        return (cell){.i = index_from_end(m, in->a)};
    case WKI_L_RNG:
        return (cell){.f = in->sub == WKI_P_NORMAL
                               ? wks_normal(r->seed, r->rng_seq[in->a], logical_index(m))
                               : wks_uniform(r->seed, r->rng_seq[in->a], logical_index(m))};
    case WKI_L_REDUCE:
        return combine(in, identity(in), value(m, in->a)); /* nred == 0: over one element */
    default:
        return (cell){.i = 0};
    }
}

static void act(const machine *m, int i) {
    const wki_inst *in = &m->r->prog->inst[i];
    if (in->code == WKI_L_STORE)
        store(m, &m->r->opnd[in->a], value(m, in->b), m->r->prog->inst[in->b].type);
    else if (!value(m, in->a).i && m->r->fault)
        __atomic_store_n(m->r->fault, in->imm.i + 1, __ATOMIC_RELAXED);
}

static bool acts(const wki_inst *in) { return in->code == WKI_L_STORE || in->code == WKI_L_CHECK; }

static void compute_elems(machine *m, int until) {
    for (int i = 0; i < until; i++)
        if (!is_row(m, i) && !acts(&m->r->prog->inst[i]))
            m->elem[i] = compute(m, i);
}

/* ---- the reduction tree -------------------------------------------------------------------------------------------- */

static void go_to(machine *m, int first, int last, int64_t linear) {
    for (int d = last - 1; d >= first; d--) {
        m->idx[d] = linear % m->r->size[d];
        linear /= m->r->size[d];
    }
}

static void go_to_first_column(machine *m) {
    for (int d = m->nkeep; d < m->r->ndim; d++)
        m->idx[d] = 0;
}

static cell reduced_at(machine *m, int i, int64_t column) {
    go_to(m, m->nkeep, m->r->ndim, column);
    compute_elems(m, i);
    return value(m, m->r->prog->inst[i].a);
}

/* Parts are totalled in order. Totals of float sums are kept in double and rounded once. */
typedef struct {
    double sum;
    cell other;
} total;

static void add_part(const wki_inst *in, total *t, cell part) {
    if (in->sub == WKI_R_SUM && in->type == WKI_TF)
        t->sum += (double)part.f;
    else
        t->other = combine(in, t->other, part);
}

/* Column reduction: parts are runs of 128 columns, each reduced in order. */
static void reduce_col(machine *m, int i, int64_t ncol, total *t) {
    const wki_inst *in = &m->r->prog->inst[i];
    for (int64_t c0 = 0; c0 < ncol; c0 += 128) {
        cell acc = identity(in);
        for (int64_t c = c0; c < c0 + 128 && c < ncol; c++)
            acc = combine(in, acc, reduced_at(m, i, c));
        add_part(in, t, acc);
    }
}

/* Row reduction: parts are runs of 1024 columns. Within a part column e goes to lane e % 16 of accumulator e / 16 % 4. */
static void reduce_row(machine *m, int i, int64_t ncol, total *t) {
    const wki_inst *in = &m->r->prog->inst[i];
    for (int64_t c0 = 0; c0 < ncol; c0 += 1024) {
        cell acc[4][16];
        for (int e = 0; e < 64; e++)
            acc[e / 16][e % 16] = identity(in);
        for (int64_t e = 0; e < 1024 && c0 + e < ncol; e++)
            acc[e / 16 % 4][e % 16] = combine(in, acc[e / 16 % 4][e % 16], reduced_at(m, i, c0 + e));
        for (int k = 0; k < 16; k++)
            acc[0][k] = combine(in, combine(in, acc[0][k], acc[1][k]), combine(in, acc[2][k], acc[3][k]));
        for (int half = 8; half; half /= 2)
            for (int k = 0; k < half; k++)
                acc[0][k] = combine(in, acc[0][k], acc[0][k + half]);
        add_part(in, t, acc[0][0]);
    }
}

static cell reduce(machine *m, int i, int64_t ncol) {
    const wki_inst *in = &m->r->prog->inst[i];
    total t = {0.0, identity(in)};
    if (m->r->col)
        reduce_col(m, i, ncol, &t);
    else
        reduce_row(m, i, ncol, &t);
    go_to_first_column(m);
    return in->sub == WKI_R_SUM && in->type == WKI_TF ? (cell){.f = (float)t.sum} : t.other;
}

/* ---- a row --------------------------------------------------------------------------------------------------------- */

static void run_row(machine *m, int64_t ncol) {
    const wki_loop *p = m->r->prog;
    go_to_first_column(m);
    for (int i = 0; i < p->ninst; i++)
        if (is_row(m, i) && !acts(&p->inst[i]))
            m->row[i] = p->inst[i].code == WKI_L_REDUCE ? reduce(m, i, ncol) : compute(m, i);
    for (int64_t c = 0; c < ncol; c++) {
        go_to(m, m->nkeep, m->r->ndim, c);
        compute_elems(m, p->ninst);
        for (int i = 0; i < p->ninst; i++)
            if (acts(&p->inst[i]) && !is_row(m, i))
                act(m, i);
    }
    go_to_first_column(m);
    for (int i = 0; i < p->ninst; i++)
        if (acts(&p->inst[i]) && is_row(m, i))
            act(m, i);
}

bool wki_loop_reference(const wki_loop_run *r) {
    machine m = {.r = r, .nkeep = r->ndim - r->nred};
    int64_t nrow = 1, ncol = 1;
    for (int d = 0; d < r->ndim; d++)
        *(d < m.nkeep ? &nrow : &ncol) *= r->size[d];
    for (int64_t row = 0; row < nrow; row++) {
        go_to(&m, 0, m.nkeep, row);
        run_row(&m, ncol);
    }
    return true;
}
