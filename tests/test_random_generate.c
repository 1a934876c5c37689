/* Generates random programs (random_program.h). Every instruction is legal by construction: shapes, dtypes and what
 * autograd has saved are followed while generating. Plain C, nothing of Wick but its dtypes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "random_program.h"

uint64_t rp_next(rp_random *r) {
    uint64_t z = r->s += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

int rp_below(rp_random *r, int n) { return (int)(rp_next(r) >> 33) % n; }

double rp_uniform(rp_random *r, double lo, double hi) {
    return lo + (hi - lo) * (double)(rp_next(r) >> 11) * 0x1p-53;
}

static int64_t numel(const rp_value *v) {
    int64_t n = 1;
    for (int i = 0; i < v->ndim; i++)
        n *= v->size[i];
    return n;
}

size_t rp_bytes(const rp_value *v) { return (size_t)numel(v) * (wk_dtype_bits((wk_dtype)v->dtype) / 8); }

void *rp_data(const rp_value *v, rp_random *r) {
    int64_t n = numel(v);
    char *p = malloc(rp_bytes(v) + 8);
    if (!p)
        abort();
    for (int64_t i = 0; i < n; i++)
        switch ((wk_dtype)v->dtype) {
        case WK_F32:
            ((float *)(void *)p)[i] = (float)rp_uniform(r, -1, 1);
            break;
        case WK_I64:
            ((int64_t *)(void *)p)[i] = rp_below(r, 3);
            break;
        case WK_I32:
            ((int32_t *)(void *)p)[i] = rp_below(r, 3);
            break;
        default:
            p[i] = (char)rp_below(r, 2);
            break;
        }
    return p;
}

/* ---- state of the generator ------------------------------------------------------------------------------------------ */

typedef struct maker {
    rp_program *p;
    rp_random r;
    int depth, nstorage;
    bool big;
    bool consumed; /* a backward freed records: no more of them */
} maker;

static int64_t most(const maker *m) { return m->big ? 300000 : 40000; }

typedef bool (*want)(const maker *m, const rp_value *v);

static int64_t random_size(maker *m) {
    static const int64_t sizes[] = {1, 1, 2, 2, 3, 3, 4, 5, 7, 8, 16, 33}, large[] = {1, 3, 64, 131, 520};
    if (rp_below(&m->r, 150) == 0)
        return 0;
    return m->big ? large[rp_below(&m->r, 5)] : sizes[rp_below(&m->r, 12)];
}

static void random_shape(maker *m, rp_value *v) {
    static const int ndims[] = {0, 1, 1, 2, 2, 2, 3, 3, 4};
    v->ndim = (uint8_t)ndims[rp_below(&m->r, 9)];
    do
        for (int i = 0; i < v->ndim; i++)
            v->size[i] = random_size(m);
    while (numel(v) > most(m));
}

/* A new value; storage -1: memory of its own. */
static rp_value *new_value(maker *m, wk_dtype d, int storage) {
    rp_value *v = &m->p->value[m->p->nvalues++];
    *v = (rp_value){.dtype = (uint8_t)d, .storage = (int16_t)storage, .depth = (int16_t)m->depth};
    if (storage < 0)
        v->storage = (int16_t)m->nstorage++;
    return v;
}

static bool room(const maker *m) { return m->p->nins < RP_MAX_INS - 8 && m->p->nvalues < RP_MAX_VALUES - 8; }

static int pick(maker *m, want ok) {
    for (int tries = 0; tries < 24; tries++) {
        int n = m->p->nvalues,
            k = rp_below(&m->r, 3) ? n - 1 - rp_below(&m->r, n < 10 ? n : 10) : rp_below(&m->r, n);
        if (!m->p->value[k].dead && ok(m, &m->p->value[k]))
            return k;
    }
    return -1;
}

static bool is_f32(const maker *m, const rp_value *v) { return (void)m, v->dtype == WK_F32; }
static bool is_mask(const maker *m, const rp_value *v) { return (void)m, v->dtype == WK_BOOL; }
static bool is_any(const maker *m, const rp_value *v) { return (void)m, (void)v, true; }
static bool has_dims(const maker *m, const rp_value *v) { return (void)m, v->dtype == WK_F32 && v->ndim > 0; }
static bool is_matrix(const maker *m, const rp_value *v) {
    return (void)m, v->dtype == WK_F32 && v->ndim >= 2;
}
static bool takes_grad(const maker *m, const rp_value *v) { return (void)m, v->dtype == WK_F32 && v->grad; }
static bool is_planes(const maker *m, const rp_value *v) {
    (void)m;
    return v->dtype == WK_F32 && v->ndim == 4 && numel(v) > 0 && numel(v) < 5000 && v->size[2] >= 2 &&
           v->size[3] >= 3;
}
static bool is_heads(const maker *m, const rp_value *v) {
    (void)m;
    return v->dtype == WK_F32 && v->ndim == 4 && numel(v) > 0 && numel(v) < 5000;
}
static bool is_mine(const maker *m, const rp_value *v) { return (void)m, !v->borrowed; }
/* May be written: no record has saved its memory, nor will a later one notice. */
static bool is_target(const maker *m, const rp_value *v) {
    return v->dtype != WK_I64 && !v->grad && !v->expanded && !m->p->used_by_grad[v->storage];
}

static rp_ins *emit(maker *m, rp_kind kind, int a, int b, int c) {
    rp_ins *i = &m->p->ins[m->p->nins++];
    *i = (rp_ins){.kind = (uint8_t)kind, .a = (int16_t)a, .b = (int16_t)b, .c = (int16_t)c, .dst = -1};
    return i;
}

/* The result of an instruction: requires grad where a float input does, and then the inputs may have been saved. */
static rp_value *result(maker *m, rp_ins *i, wk_dtype d, int storage) {
    const int16_t in[3] = {i->a, i->b, i->c};
    bool grad = false;
    rp_value *v = new_value(m, d, storage);
    i->dst = (int16_t)(m->p->nvalues - 1);
    for (int k = 0; k < 3; k++)
        grad |= in[k] >= 0 && m->p->value[in[k]].grad;
    v->grad = grad && d == WK_F32;
    for (int k = 0; k < 3 && grad; k++)
        if (in[k] >= 0)
            m->p->used_by_grad[m->p->value[in[k]].storage] = true;
    if (grad) /* records save results, too */
        m->p->used_by_grad[v->storage] = true;
    return v;
}

static void same_shape(rp_value *v, const rp_value *x) {
    v->ndim = x->ndim;
    memcpy(v->size, x->size, sizeof v->size);
}

static bool broadcast(const maker *m, const rp_value *a, const rp_value *b, rp_value *out) {
    int n = a->ndim > b->ndim ? a->ndim : b->ndim;
    int64_t size[RP_MAX_DIMS] = {0};
    for (int i = 1; i <= n; i++) {
        int64_t x = i <= a->ndim ? a->size[a->ndim - i] : 1, y = i <= b->ndim ? b->size[b->ndim - i] : 1;
        if (x != y && x != 1 && y != 1)
            return false;
        size[n - i] = x == 1 ? y : x;
    }
    out->ndim = (uint8_t)n;
    memcpy(out->size, size, sizeof size);
    return numel(out) <= most(m);
}

/* A fresh f32 or bool tensor of this shape: host data, random numbers or a constant. */
static int fresh(maker *m, wk_dtype d, int ndim, const int64_t *size) {
    static const rp_kind kinds[] = {RP_RAND, RP_FULL, RP_CONST, RP_CONST};
    rp_kind kind = kinds[rp_below(&m->r, 4)];
    if (kind == RP_RAND && d != WK_F32)
        kind = RP_CONST;
    rp_ins *i = emit(m, kind, -1, -1, -1);
    i->n = (uint8_t)ndim;
    memcpy(i->list, size, (size_t)ndim * sizeof *size);
    i->sub = (uint8_t)(kind == RP_RAND ? rp_below(&m->r, 2) : (int)d);
    i->v = (float)rp_uniform(&m->r, -1, 1);
    rp_value *v = result(m, i, d, -1);
    v->ndim = (uint8_t)ndim;
    memcpy(v->size, size, (size_t)ndim * sizeof *size);
    return i->dst;
}

/* A partner of x that broadcasts with it: an old value, or a new one of x's shape with some sizes 1 or left out. */
static int partner(maker *m, int x, want ok, wk_dtype d) {
    rp_value shape;
    for (int tries = 0; tries < 6; tries++) {
        int k = pick(m, ok);
        if (k >= 0 && broadcast(m, &m->p->value[x], &m->p->value[k], &shape))
            return k;
    }
    const rp_value *v = &m->p->value[x];
    int drop = v->ndim ? rp_below(&m->r, v->ndim + 1) : 0;
    int64_t size[RP_MAX_DIMS];
    if (rp_below(&m->r, 2))
        drop = 0;
    for (int i = drop; i < v->ndim; i++)
        size[i - drop] = rp_below(&m->r, 4) ? v->size[i] : 1;
    return fresh(m, d, v->ndim - drop, size);
}

/* ---- instructions ---------------------------------------------------------------------------------------------------- */

static void add_unary(maker *m) {
    int a = pick(m, is_f32);
    if (a < 0)
        return;
    rp_ins *i = emit(m, RP_UNARY, a, -1, -1);
    i->sub = (uint8_t)rp_below(&m->r, 14);
    i->v = (float)rp_uniform(&m->r, -1.5, 1.5);
    same_shape(result(m, i, WK_F32, -1), &m->p->value[a]);
}

static void add_binary(maker *m) {
    int a = pick(m, is_f32), b = a < 0 ? -1 : partner(m, a, is_f32, WK_F32);
    if (b < 0)
        return;
    if (rp_below(&m->r, 2)) {
        int t = a;
        a = b;
        b = t;
    }
    bool compare = rp_below(&m->r, 6) == 0;
    rp_ins *i = emit(m, compare ? RP_COMPARE : RP_BINARY, a, b, -1);
    i->sub = (uint8_t)rp_below(&m->r, 6);
    rp_value *v = result(m, i, compare ? WK_BOOL : WK_F32, -1);
    broadcast(m, &m->p->value[a], &m->p->value[b], v);
}

static void add_mask(maker *m) {
    int a = pick(m, is_f32), k = a < 0 ? -1 : partner(m, a, is_mask, WK_BOOL);
    rp_value shape, *v;
    if (k < 0)
        return;
    if (rp_below(&m->r, 3) == 0) {
        rp_ins *i = emit(m, RP_NOT, k, -1, -1);
        same_shape(result(m, i, WK_BOOL, -1), &m->p->value[k]);
    } else if (rp_below(&m->r, 2)) {
        rp_ins *i = emit(m, RP_FILL, a, k, -1);
        i->v = (float)rp_uniform(&m->r, -1, 1);
        v = result(m, i, WK_F32, -1);
        broadcast(m, &m->p->value[a], &m->p->value[k], v);
    } else {
        int b = partner(m, a, is_f32, WK_F32);
        broadcast(m, &m->p->value[a], &m->p->value[b], &shape);
        if (!broadcast(m, &shape, &m->p->value[k], &shape))
            return;
        rp_ins *i = emit(m, RP_WHERE, k, a, b);
        v = result(m, i, WK_F32, -1);
        v->ndim = shape.ndim;
        memcpy(v->size, shape.size, sizeof v->size);
    }
}

static void add_cast(maker *m) {
    static const wk_dtype to[] = {WK_F32, WK_F32, WK_F32, WK_I32, WK_BOOL, WK_U8};
    int a = pick(m, is_any);
    wk_dtype d = to[rp_below(&m->r, 6)];
    if (a < 0 || m->p->value[a].dtype == WK_I64)
        return;
    rp_ins *i = emit(m, RP_CAST, a, -1, -1);
    i->sub = (uint8_t)d;
    same_shape(result(m, i, d, -1), &m->p->value[a]);
}

static void add_copy_of(maker *m) {
    int a = pick(m, is_any);
    if (a < 0)
        return;
    bool detach = rp_below(&m->r, 3) == 0;
    rp_ins *i = emit(m, detach ? RP_DETACH : RP_CLONE, a, -1, -1);
    rp_value *v = result(m, i, (wk_dtype)m->p->value[a].dtype, detach ? m->p->value[a].storage : -1);
    same_shape(v, &m->p->value[a]);
    if (detach) {
        v->grad = false;
        v->expanded = m->p->value[a].expanded;
    }
}

static void add_reduction(maker *m) {
    int a = pick(m, is_f32), kind = RP_SUM + rp_below(&m->r, 3);
    if (a < 0)
        return;
    const rp_value *x = &m->p->value[a];
    uint32_t mask = x->ndim ? (uint32_t)rp_below(&m->r, 1 << x->ndim) : 0, all = (1u << x->ndim) - 1;
    for (int d = 0; d < x->ndim; d++)
        if (kind == RP_MAX && x->size[d] == 0)
            return;
    rp_ins *i = emit(m, (rp_kind)kind, a, -1, -1);
    i->sub = (uint8_t)rp_below(&m->r, 2);
    for (int d = x->ndim - 1; d >= 0; d--) /* in descending order, some of them counted from the end */
        if (mask >> d & 1)
            i->list[i->n++] = rp_below(&m->r, 2) ? d : d - x->ndim;
    if (!mask)
        mask = all;
    rp_value *v = result(m, i, WK_F32, -1);
    x = &m->p->value[a];
    for (int d = 0; d < x->ndim; d++) {
        if (!(mask >> d & 1))
            v->size[v->ndim++] = x->size[d];
        else if (i->sub)
            v->size[v->ndim++] = 1;
    }
}

static void add_row(maker *m) {
    int a = pick(m, has_dims);
    if (a < 0)
        return;
    const rp_value *x = &m->p->value[a];
    int what = rp_below(&m->r, 5);
    rp_ins *i;
    if (what < 2) {
        bool affine = rp_below(&m->r, 2);
        int w = affine ? fresh(m, WK_F32, 1, &x->size[x->ndim - 1]) : -1;
        int b = affine ? fresh(m, WK_F32, 1, &x->size[x->ndim - 1]) : -1;
        i = emit(m, RP_LAYER_NORM, a, w, b);
    } else if (what == 2 && x->ndim >= 2) {
        i = emit(m, RP_CAUSAL, a, -1, -1);
        rp_value *f = result(m, i, WK_F32, -1);
        same_shape(f, &m->p->value[a]);
        a = i->dst;
        i = emit(m, RP_SOFTMAX, a, -1, -1);
        i->sub = (uint8_t)(m->p->value[a].ndim - 1);
    } else {
        i = emit(m, what == 3 ? RP_LOG_SOFTMAX : RP_SOFTMAX, a, -1, -1);
        i->sub = (uint8_t)rp_below(&m->r, x->ndim);
    }
    same_shape(result(m, i, WK_F32, -1), &m->p->value[a]);
}

static void view(maker *m, rp_ins *i, const rp_value *shape, bool expanded) {
    const rp_value *x = &m->p->value[i->a];
    rp_value *v = result(m, i, (wk_dtype)x->dtype, x->storage);
    same_shape(v, shape);
    v->expanded = expanded || m->p->value[i->a].expanded;
}

static void add_permute(maker *m, int a) {
    const rp_value *x = &m->p->value[a];
    rp_ins *i = emit(m, RP_PERMUTE, a, -1, -1);
    rp_value s = *x;
    i->n = x->ndim;
    for (int d = 0; d < x->ndim; d++) {
        int j = rp_below(&m->r, d + 1);
        i->list[d] = i->list[j];
        i->list[j] = d;
    }
    for (int d = 0; d < x->ndim; d++)
        s.size[d] = x->size[i->list[d]];
    view(m, i, &s, false);
}

static void add_slice(maker *m, int a) {
    const rp_value *x = &m->p->value[a];
    if (!x->ndim)
        return;
    rp_ins *i = emit(m, RP_SLICE, a, -1, -1);
    rp_value s = *x;
    int d = rp_below(&m->r, x->ndim), n = (int)x->size[d];
    int start = n > 1 ? rp_below(&m->r, n) : 0, stop = start + rp_below(&m->r, n - start + 1);
    int step = 1 + rp_below(&m->r, 2);
    if (stop == start && n && rp_below(&m->r, 8))
        stop = start + 1; /* empty ones now and then */
    i->n = 4;
    i->list[0] = d;
    i->list[1] = start;
    i->list[2] = stop;
    i->list[3] = step;
    s.size[d] = (stop - start + step - 1) / step;
    view(m, i, &s, false);
}

static void add_reshape(maker *m, int a) {
    const rp_value *x = &m->p->value[a];
    rp_value s = *x;
    if (x->ndim >= 2 && rp_below(&m->r, 2)) { /* merge two dimensions */
        int d = rp_below(&m->r, x->ndim - 1);
        s.size[d] *= s.size[d + 1];
        memmove(&s.size[d + 1], &s.size[d + 2], (size_t)(x->ndim - d - 2) * sizeof *s.size);
        s.ndim--;
    } else if (x->ndim < RP_MAX_DIMS) { /* split one, or add one of size 1 */
        int d = x->ndim ? rp_below(&m->r, x->ndim) : 0;
        int64_t f = x->ndim && x->size[d] % 2 == 0 && x->size[d] ? 2 : 1;
        memmove(&s.size[d + 1], &s.size[d], (size_t)(x->ndim - d) * sizeof *s.size);
        s.size[d] = f;
        if (x->ndim)
            s.size[d + 1] /= f;
        s.ndim++;
    }
    rp_ins *i = emit(m, RP_RESHAPE, a, -1, -1);
    i->n = s.ndim;
    memcpy(i->list, s.size, sizeof s.size);
    view(m, i, &s, false);
}

static void add_expand(maker *m, int a) {
    const rp_value *x = &m->p->value[a];
    rp_value s = *x;
    bool any = false;
    if (x->ndim < RP_MAX_DIMS - 1 && rp_below(&m->r, 3) == 0) {
        memmove(&s.size[1], &s.size[0], (size_t)x->ndim * sizeof *s.size);
        s.size[0] = 1;
        s.ndim++;
    }
    for (int d = 0; d < s.ndim; d++)
        if (s.size[d] == 1 && rp_below(&m->r, 3)) {
            s.size[d] = 1 + rp_below(&m->r, 4);
            any |= s.size[d] > 1;
        }
    if (!any || numel(&s) > 20000)
        return;
    rp_ins *i = emit(m, RP_EXPAND, a, -1, -1);
    i->n = s.ndim;
    memcpy(i->list, s.size, sizeof s.size);
    view(m, i, &s, true);
}

static void add_view(maker *m) {
    int a = pick(m, is_any);
    if (a < 0)
        return;
    switch (rp_below(&m->r, 4)) {
    case 0:
        add_permute(m, a);
        break;
    case 1:
        add_slice(m, a);
        break;
    case 2:
        add_reshape(m, a);
        break;
    default:
        add_expand(m, a);
        break;
    }
}

static void add_product(maker *m) {
    int a = pick(m, is_matrix), b = -1;
    if (a < 0 || numel(&m->p->value[a]) > most(m) / 10)
        return;
    rp_value x = m->p->value[a];
    int64_t k = x.size[x.ndim - 1], n = 1 + rp_below(&m->r, 9);
    int what = rp_below(&m->r, 4);
    if (what == 0) { /* linear */
        b = fresh(m, WK_F32, 2, (const int64_t[]){n, k});
        int bias = rp_below(&m->r, 2) ? fresh(m, WK_F32, 1, &n) : -1;
        rp_value *v = result(m, emit(m, RP_LINEAR, a, b, bias), WK_F32, -1);
        same_shape(v, &x);
        v->size[v->ndim - 1] = n;
        return;
    }
    if (what == 1) { /* with itself, transposed */
        rp_ins *i = emit(m, RP_PERMUTE, a, -1, -1);
        rp_value s = x;
        i->n = x.ndim;
        for (int d = 0; d < x.ndim; d++)
            i->list[d] = d < x.ndim - 2 ? d : 2 * x.ndim - 3 - d;
        s.size[x.ndim - 1] = x.size[x.ndim - 2];
        s.size[x.ndim - 2] = k;
        view(m, i, &s, false);
        b = i->dst;
        n = s.size[x.ndim - 1];
    } else if (what == 2 || x.ndim == 2) {
        b = fresh(m, WK_F32, 2, (const int64_t[]){k, n});
    } else { /* a batch that broadcasts */
        int64_t size[RP_MAX_DIMS];
        memcpy(size, x.size, sizeof size);
        size[0] = rp_below(&m->r, 2) ? 1 : size[0];
        size[x.ndim - 2] = k;
        size[x.ndim - 1] = n;
        b = fresh(m, WK_F32, x.ndim, size);
    }
    rp_value *v = result(m, emit(m, RP_MATMUL, a, b, -1), WK_F32, -1);
    same_shape(v, &x);
    v->size[v->ndim - 1] = n;
}

static void add_planes(maker *m) {
    int a = pick(m, is_planes);
    if (a < 0)
        return;
    rp_value x = m->p->value[a];
    int64_t k = 1 + rp_below(&m->r, 2), stride = 1 + rp_below(&m->r, 2), pad = rp_below(&m->r, 2);
    rp_ins *i;
    rp_value *v;
    if (rp_below(&m->r, 2)) {
        int64_t out = 1 + rp_below(&m->r, 4);
        int w = fresh(m, WK_F32, 4, (const int64_t[]){out, x.size[1], k, k + 1});
        int b = rp_below(&m->r, 2) ? fresh(m, WK_F32, 1, &out) : -1;
        i = emit(m, RP_CONV, a, w, b);
        v = result(m, i, WK_F32, -1);
        same_shape(v, &x);
        v->size[1] = out;
        v->size[3] = (x.size[3] + 2 * pad - k - 1) / stride + 1;
    } else {
        k = 2;
        i = emit(m, RP_POOL, a, -1, -1);
        v = result(m, i, WK_F32, -1);
        same_shape(v, &x);
        v->size[3] = (x.size[3] + 2 * pad - k) / stride + 1;
        i->list[2] = k;
    }
    v->size[2] = (x.size[2] + 2 * pad - k) / stride + 1;
    i->n = 3;
    i->list[0] = stride;
    i->list[1] = pad;
}

static void add_lookup(maker *m) {
    int a = pick(m, is_f32);
    if (a < 0)
        return;
    rp_value x = m->p->value[a];
    if (rp_below(&m->r, 2) && x.ndim == 2 && x.size[0] && x.size[1] >= 3) { /* classes are below 3 */
        int t = fresh(m, WK_I64, 1, &x.size[0]);
        rp_value *v = result(m, emit(m, RP_CROSS_ENTROPY, a, t, -1), WK_F32, -1);
        v->ndim = 0;
    } else if (x.ndim == 2 && x.size[0] >= 3) {
        int64_t size[2] = {1 + rp_below(&m->r, 4), 1 + rp_below(&m->r, 4)};
        int n = 1 + rp_below(&m->r, 2), t = fresh(m, WK_I64, n, size);
        rp_value *v = result(m, emit(m, RP_EMBEDDING, a, t, -1), WK_F32, -1);
        v->ndim = (uint8_t)(n + 1);
        memcpy(v->size, size, sizeof size);
        v->size[n] = x.size[1];
    } else if (is_heads(m, &x)) {
        int k = fresh(m, WK_F32, 4, x.size), w = fresh(m, WK_F32, 4, x.size);
        rp_ins *i = emit(m, RP_ATTENTION, a, k, w);
        i->sub = (uint8_t)rp_below(&m->r, 2);
        same_shape(result(m, i, WK_F32, -1), &x);
    }
}

static void add_random(maker *m) {
    if (rp_below(&m->r, 2)) {
        rp_value s;
        random_shape(m, &s);
        fresh(m, WK_F32, s.ndim, s.size);
        return;
    }
    int a = pick(m, is_f32);
    if (a < 0)
        return;
    rp_ins *i = emit(m, RP_DROPOUT, a, -1, -1);
    i->v = (float)rp_uniform(&m->r, 0.1, 0.9);
    same_shape(result(m, i, WK_F32, -1), &m->p->value[a]);
}

/* dst <- src; src has dst's dtype, other memory, and a shape that broadcasts to dst's. */
static void add_copy(maker *m) {
    int dst = pick(m, is_target);
    rp_value s;
    if (dst < 0)
        return;
    const rp_value *d = &m->p->value[dst];
    for (int tries = 0; tries < 12; tries++) {
        int src = pick(m, is_any);
        if (src < 0)
            continue;
        const rp_value *v = &m->p->value[src];
        if (v->dtype != d->dtype || v->storage == d->storage || v->grad || !broadcast(m, d, v, &s) ||
            s.ndim != d->ndim || memcmp(s.size, d->size, (size_t)d->ndim * sizeof *d->size) != 0)
            continue;
        emit(m, RP_COPY, dst, src, -1);
        return;
    }
    if (d->dtype == WK_F32 || d->dtype == WK_BOOL)
        emit(m, RP_COPY, dst, fresh(m, (wk_dtype)d->dtype, d->ndim, d->size), -1);
}

static void add_read(maker *m) {
    if (rp_below(&m->r, 2)) {
        int a = pick(m, is_any);
        if (a >= 0)
            emit(m, RP_READ, a, -1, -1);
        return;
    }
    int a = pick(m, is_f32), b = pick(m, is_f32);
    if (a < 0 || b < 0)
        return;
    rp_ins *i = emit(m, RP_BRANCH, a, b, -1);
    same_shape(result(m, i, WK_F32, -1), &m->p->value[b]);
}

static void add_drop(maker *m) {
    int a = pick(m, is_mine);
    if (a < 0 || m->p->value[a].depth != m->depth)
        return;
    emit(m, RP_DROP, a, -1, -1);
    m->p->value[a].dead = true;
}

static void begin_scope(maker *m) {
    if (m->depth == 3)
        return;
    emit(m, RP_SCOPE, -1, -1, -1);
    m->depth++;
}

static void end_scope(maker *m) {
    rp_ins *i = emit(m, RP_END, -1, -1, -1);
    for (int k = m->p->nvalues - 1; k >= 0; k--) {
        rp_value *v = &m->p->value[k];
        if (v->dead || v->depth != m->depth)
            continue;
        if (i->n < 3 && rp_below(&m->r, 3) == 0) {
            i->list[i->n++] = k;
            v->depth--;
        } else {
            v->dead = true;
        }
    }
    m->depth--;
}

static void add_grad(maker *m) {
    int a = pick(m, takes_grad);
    if (a < 0 || m->consumed)
        return;
    rp_ins *i = emit(m, RP_GRAD, a, -1, -1);
    i->sub = rp_below(&m->r, 3) == 0;
    int n = 1 + rp_below(&m->r, 3), first = m->p->nvalues, storage = m->nstorage;
    while (i->n < n) {
        int k = pick(m, takes_grad);
        if (k < 0)
            break;
        i->list[i->n++] = k;
    }
    m->nstorage++;
    for (int k = 0; k < i->n; k++) { /* gradients may share memory with each other */
        rp_value *v = new_value(m, WK_F32, storage);
        same_shape(v, &m->p->value[i->list[k]]);
        v->grad = i->sub;
        v->expanded = true; /* they may be expanded */
    }
    m->p->used_by_grad[storage] = i->sub;
    i->dst = (int16_t)first;
}

static void add_backward(maker *m) {
    int a = pick(m, takes_grad);
    if (a < 0 || m->consumed)
        return;
    emit(m, RP_BACKWARD, a, -1, -1);
    m->consumed = true;
    if (m->p->optimizer)
        emit(m, RP_STEP, -1, -1, -1);
}

static void add_any(maker *m) {
    static const struct {
        int weight;
        void (*add)(maker *);
    } ways[] = {
        {20, add_unary},     {24, add_binary}, {6, add_mask},  {4, add_cast},    {5, add_copy_of},
        {13, add_reduction}, {12, add_row},    {14, add_view}, {7, add_product}, {6, add_planes},
        {6, add_lookup},     {4, add_random},  {5, add_copy},  {3, add_read},    {3, add_drop},
        {2, begin_scope},    {4, add_grad},
    };
    int total = 0, at;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        total += ways[i].weight;
    at = rp_below(&m->r, total);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        if ((at -= ways[i].weight) < 0) {
            ways[i].add(m);
            break;
        }
    if (m->depth > 1 && rp_below(&m->r, 8) == 0)
        end_scope(m);
}

void rp_generate(rp_program *p, uint64_t seed, int length, bool big) {
    maker m = {.p = p, .r = {seed}, .big = big};
    *p = (rp_program){.seed = seed};
    p->nin = 1 + rp_below(&m.r, 4);
    p->nstate = rp_below(&m.r, 4);
    for (int i = 0; i < p->nin + p->nstate; i++) {
        wk_dtype d = i && i < p->nin && rp_below(&m.r, 6) == 0 ? WK_BOOL : WK_F32;
        rp_value *v = new_value(&m, d, -1);
        random_shape(&m, v);
        v->borrowed = true;
        v->grad = d == WK_F32 && rp_below(&m.r, 2);
        p->optimizer |= i >= p->nin && v->grad;
    }
    p->optimizer &= rp_below(&m.r, 2);
    m.depth = 1;
    while (p->nins < length && room(&m))
        add_any(&m);
    while (m.depth > 1)
        end_scope(&m);
    if (rp_below(&m.r, 2))
        add_backward(&m);
    p->nout = 1 + rp_below(&m.r, RP_MAX_OUT);
    for (int i = 0; i < p->nout; i++) {
        int k = pick(&m, is_any);
        p->out[i] = (int16_t)(k < 0 ? 0 : k);
        for (int j = 0; j < i; j++)
            if (p->out[j] == p->out[i])
                p->nout = i; /* each output once */
    }
}

/* ---- text ------------------------------------------------------------------------------------------------------------ */

bool rp_uses(const rp_ins *i, int value) {
    if (i->a == value || i->b == value || i->c == value)
        return true;
    if (i->kind == RP_END || i->kind == RP_GRAD)
        for (int k = 0; k < i->n; k++)
            if (i->list[k] == value)
                return true;
    return false;
}

static const char *const kind_names[RP_KINDS] = {
    "unary",      "binary", "compare",    "where",     "masked_fill", "not",           "cast",
    "clone",      "detach", "sum",        "max",       "mean",        "softmax",       "log_softmax",
    "layer_norm", "causal", "permute",    "slice",     "reshape",     "expand",        "matmul",
    "linear",     "conv2d", "max_pool2d", "embedding", "attention",   "cross_entropy", "rand",
    "dropout",    "full",   "const",      "copy_",     "read",        "branch",        "drop",
    "scope",      "end",    "grad",       "backward",  "step",
};

char *rp_text(const rp_program *p) {
    size_t cap = 16384, n = 0;
    char *s = malloc(cap);
    if (!s)
        abort();
    n += (size_t)snprintf(s + n, cap - n, "%d inputs, %d states%s, outputs", p->nin, p->nstate,
                          p->optimizer ? ", optimizer" : "");
    for (int i = 0; i < p->nout; i++)
        n += (size_t)snprintf(s + n, cap - n, " %%%d", p->out[i]);
    n += (size_t)snprintf(s + n, cap - n, "\n");
    for (int i = 0; i < p->nin + p->nstate; i++) {
        const rp_value *v = &p->value[i];
        n += (size_t)snprintf(s + n, cap - n, "%%%d %s%s (", i, wk_dtype_name((wk_dtype)v->dtype),
                              v->grad ? " grad" : "");
        for (int d = 0; d < v->ndim; d++)
            n += (size_t)snprintf(s + n, cap - n, "%d ", (int)v->size[d]);
        n += (size_t)snprintf(s + n, cap - n, ")\n");
    }
    for (int k = 0; k < p->nins && n + 400 < cap; k++) {
        const rp_ins *i = &p->ins[k];
        const int16_t in[3] = {i->a, i->b, i->c};
        if (i->skip)
            continue;
        if (i->dst >= 0)
            n += (size_t)snprintf(s + n, cap - n, "%%%d = ", i->dst);
        n += (size_t)snprintf(s + n, cap - n, "%s.%d", kind_names[i->kind], i->sub);
        for (int j = 0; j < 3; j++)
            if (in[j] >= 0)
                n += (size_t)snprintf(s + n, cap - n, " %%%d", in[j]);
        for (int j = 0; j < i->n; j++)
            n += (size_t)snprintf(s + n, cap - n, "%s%lld", j ? ", " : " [", (long long)i->list[j]);
        n += (size_t)snprintf(s + n, cap - n, i->n ? "] %g" : " %g", (double)i->v);
        if (i->dst >= 0)
            for (int d = 0; d < p->value[i->dst].ndim; d++)
                n += (size_t)snprintf(s + n, cap - n, d ? " %d" : " : %d", (int)p->value[i->dst].size[d]);
        n += (size_t)snprintf(s + n, cap - n, "\n");
    }
    return s;
}
