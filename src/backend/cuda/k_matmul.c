/* Matrix products: bmm and linear. Small ones by an own kernel, which takes any strides and moving
 * addresses. Others by cuBLASLt: operands keep their strides where it can walk them and are copied where
 * it cannot; all matrices of a batch go into one call. */
#include "backend/cuda/cuda.h"
#include "backend/kernels.h"

enum { ALIGN = 256 };

static size_t room(int64_t floats) { return ((size_t)floats * sizeof(float) + ALIGN - 1) / ALIGN * ALIGN; }

/* Operands begin at multiples of 16 bytes: a plan sees to that for kernels that are WKI_K_FIXED. So the
 * algorithm, and with it every bit, follows from sizes and strides alone. */
bool wki_cuda_gemm(wk_ctx *c, wki_cu_gemm *g, const wki_cu_gemm_args *args) {
    wki_cuda_ctx *s = wki_cuda_of(c);
    wki_cu_gemm_plan *plan;
    wki_cu_error err = {0};
    if (!s)
        return false;
    int64_t steps = g->batch > 1 ? g->a_bs | g->b_bs | g->c_bs : 0;
    g->type = WKI_CU_GEMM_F32;
    g->alignment = steps & 1 ? 4 : steps & 2 ? 8 : 16; /* bytes */
    int code = wki_cu_gemm_prepare(s->rt->dev, g, &plan, &err);
    if (!code)
        code = wki_cu_gemm_run(plan, s->stream, args, &err);
    return !code || wki_cuda_fail(c, &err);
}

bool wki_cuda_gemm_walks(int64_t rows, int64_t cols, int64_t rs, int64_t cs) {
    if ((cs == 1 || cols == 1) && (rows == 1 || rs >= cols))
        return true;
    return (rs == 1 || rows == 1) && (cols == 1 || cs >= rows);
}

/* The first nd dimensions as one: its size and stride. False when no single stride walks them. */
static bool collapse(const wki_view *v, int nd, int64_t *size, int64_t *stride) {
    *size = 1;
    *stride = 0;
    for (int d = nd - 1; d >= 0; d--) {
        if (v->size[d] == 1)
            continue;
        if (*size == 1)
            *stride = v->stride[d];
        else if (v->stride[d] != *stride * *size)
            return false;
        *size *= v->size[d];
    }
    return true;
}

/* A matrix or a batch of them, in place or to be copied. */
typedef struct matrix {
    const wki_view *v;
    int64_t rows, cols, batch, rs, cs, bs;
    bool copy;
} matrix;

static void must_copy(matrix *m, int64_t rs, int64_t cs) {
    m->copy = true;
    m->rs = rs;
    m->cs = cs;
    m->bs = m->rows * m->cols;
}

/* Its address; a copy is put to *at, which moves on. 0 after wki_fail. */
static bool settle(wk_ctx *c, const matrix *m, char **at, wki_cu_ptr *out) {
    *out = wki_addr_of(m->v);
    if (!m->copy)
        return true;
    *out = (wki_cu_ptr)(uintptr_t)*at;
    *at += room(m->v->numel);
    return wki_cuda_copy_plain(c, wki_at_addr(*out), m->v);
}

/* ---- small products ------------------------------------------------------------------------------------ */

/* Up to here the own kernels are faster. */
static const int64_t SMALL_WORK = (int64_t)1 << 26;

/* How a product is cut follows from its sizes alone, and so do its bits. */
enum { TINY_OUTPUTS = 16384, TINY_K = 512, ENOUGH_BLOCKS = 264, LEAST_STEPS = 4 };

static int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

/* Of a tile and of the length in shared memory (k_product.cuh). */
static int tile_of(const wkk_product *p) {
    return p->batch * p->m * p->n <= TINY_OUTPUTS && p->k <= TINY_K ? 16 : 32;
}
static int depth_of(int tile) { return tile == 16 ? 64 : 32; }

static bool is_small(const wkk_product *p) {
    int64_t outputs, work;
    if (__builtin_mul_overflow(p->batch * p->m, p->n, &outputs))
        return false;
    return !__builtin_mul_overflow(outputs, p->k ? p->k : 1, &work) && work <= SMALL_WORK;
}

static void cut(wkk_product *p) {
    int tile = tile_of(p);
    int64_t steps = ceil_div(p->k, depth_of(tile)), splits = 1;
    p->across = ceil_div(p->n, tile);
    p->down = ceil_div(p->m, tile);
    int64_t tiles = p->across * p->down * p->batch;
    if (tiles && tiles < ENOUGH_BLOCKS / 2)
        splits = steps / LEAST_STEPS < ENOUGH_BLOCKS / tiles ? steps / LEAST_STEPS : ENOUGH_BLOCKS / tiles;
    p->stretch = ceil_div(steps, splits > 1 ? splits : 1) * depth_of(tile);
    p->splits = p->k ? ceil_div(p->k, p->stretch) : 1;
}

static size_t part_bytes(wkk_product *p) {
    int64_t tile = tile_of(p);
    cut(p);
    return p->splits > 1 ? (size_t)(p->across * p->down * p->batch * p->splits * tile * tile) * sizeof(float)
                         : 0;
}

static void add_batch_dim(wkk_product *p, int64_t size, int64_t as, int64_t bs) {
    p->batch *= size;
    if (size == 1)
        return;
    p->size[p->nd] = size;
    p->as[p->nd] = as;
    p->bs[p->nd++] = bs;
}

bool wki_cuda_products_flush(wk_ctx *c) {
    wki_cuda_ctx *s = c->dev_state[WK_CUDA];
    wkk_products all;
    bool ok = true;
    if (!s->held.n)
        return true;
    for (int tile = 16; tile <= 32; tile += 16) {
        int64_t blocks = 0;
        all.n = 0;
        for (int i = 0; i < s->held.n; i++) {
            wkk_product *p = &s->held.p[i];
            if (tile_of(p) != tile)
                continue;
            p->first_block = blocks;
            p->count = s->counts + (wkk_u64)(i * (WKI_COUNTS / WKK_PRODUCTS)) * sizeof(int32_t);
            blocks += p->across * p->down * p->batch * p->splits;
            all.p[all.n++] = *p;
        }
        ok = ok && wki_cuda_launch_grid(c, tile == 16 ? WKI_FN_wkk_products16 : WKI_FN_wkk_products32, &all,
                                        blocks, 1);
    }
    s->held.n = 0;
    return ok;
}

static bool run_small(const wki_launch *l, wkk_product *p, bool relu) {
    wki_cuda_ctx *s = wki_cuda_of(l->c);
    const wki_view *bias = l->nin > 2 ? &l->in[2] : NULL;
    if (!s || l->out[0].numel == 0)
        return s != NULL;
    cut(p);
    p->a = wki_at_of(&l->in[0]);
    p->b = wki_at_of(&l->in[1]);
    p->y = wki_at_of(&l->out[0]);
    p->part = (wkk_u64)(uintptr_t)l->workspace;
    p->relu = relu;
    p->bias_stride = -1;
    if (bias && !wki_view_absent(bias)) {
        p->bias = wki_at_of(bias);
        p->bias_stride = bias->stride[0];
    }
    s->held.p[s->held.n++] = *p;
    return s->held.n < WKK_PRODUCTS || wki_cuda_products_flush(l->c);
}

static wkk_product small_bmm(const wki_launch *l) {
    const wki_view *a = &l->in[0], *b = &l->in[1];
    int nd = a->ndim;
    wkk_product p = {.m = a->size[nd - 2], .k = a->size[nd - 1], .n = b->size[nd - 1], .batch = 1};
    p.a_rs = a->stride[nd - 2], p.a_cs = a->stride[nd - 1];
    p.b_rs = b->stride[nd - 2], p.b_cs = b->stride[nd - 1];
    for (int d = 0; d < nd - 2; d++)
        add_batch_dim(&p, a->size[d], a->stride[d], b->stride[d]);
    return p;
}

/* Rows of x that one stride walks are one matrix; outer dimensions make several. */
static wkk_product small_linear(const wki_launch *l) {
    const wki_view *x = &l->in[0], *w = &l->in[1];
    int last = x->ndim - 1, d = last - 1;
    wkk_product p = {.m = 1, .k = w->size[1], .n = w->size[0], .batch = 1};
    p.a_cs = x->stride[last];
    p.b_rs = w->stride[1], p.b_cs = w->stride[0];
    for (; d >= 0 && (p.m == 1 || x->size[d] == 1 || x->stride[d] == p.a_rs * p.m); d--) {
        if (x->size[d] == 1)
            continue;
        if (p.m == 1)
            p.a_rs = x->stride[d];
        p.m *= x->size[d];
    }
    for (int i = 0; i <= d; i++)
        add_batch_dim(&p, x->size[i], x->stride[i], 0);
    return p;
}

static bool fits(const wki_launch *l, wkk_product p) {
    return l->in[0].dtype == WK_F32 && l->in[1].dtype == WK_F32 && is_small(&p);
}

bool wki_k_cuda_bmm_small_ok(const wki_launch *l) { return fits(l, small_bmm(l)); }
bool wki_k_cuda_linear_small_ok(const wki_launch *l) { return fits(l, small_linear(l)); }
bool wki_k_cuda_linear_relu_small_ok(const wki_launch *l) { return fits(l, small_linear(l)); }

size_t wki_k_cuda_bmm_small_workspace(const wki_launch *l) {
    wkk_product p = small_bmm(l);
    return part_bytes(&p);
}

size_t wki_k_cuda_linear_small_workspace(const wki_launch *l) {
    wkk_product p = small_linear(l);
    return part_bytes(&p);
}

size_t wki_k_cuda_linear_relu_small_workspace(const wki_launch *l) {
    return wki_k_cuda_linear_small_workspace(l);
}

bool wki_k_cuda_bmm_small_run(const wki_launch *l) {
    wkk_product p = small_bmm(l);
    return run_small(l, &p, false);
}

bool wki_k_cuda_linear_small_run(const wki_launch *l) {
    wkk_product p = small_linear(l);
    return run_small(l, &p, false);
}

bool wki_k_cuda_linear_relu_small_run(const wki_launch *l) {
    wkk_product p = small_linear(l);
    return run_small(l, &p, true);
}

/* ---- bmm ----------------------------------------------------------------------------------------------- */

static matrix batch_matrix(const wki_view *v) {
    int nd = v->ndim;
    matrix m = {.v = v,
                .rows = v->size[nd - 2],
                .cols = v->size[nd - 1],
                .rs = v->stride[nd - 2],
                .cs = v->stride[nd - 1]};
    bool one = collapse(v, nd - 2, &m.batch, &m.bs);
    if (!one) {
        m.batch = 1;
        for (int d = 0; d < nd - 2; d++)
            m.batch *= v->size[d];
    }
    if (!one || !wki_cuda_gemm_walks(m.rows, m.cols, m.rs, m.cs))
        must_copy(&m, m.cols, 1);
    return m;
}

bool wki_k_cuda_bmm_ok(const wki_launch *l) { return l->in[0].dtype == WK_F32 && l->in[1].dtype == WK_F32; }

size_t wki_k_cuda_bmm_workspace(const wki_launch *l) {
    size_t bytes = 0;
    for (int i = 0; i < 2; i++)
        if (l->out[0].numel && batch_matrix(&l->in[i]).copy)
            bytes += room(l->in[i].numel);
    return bytes;
}

bool wki_k_cuda_bmm_run(const wki_launch *l) {
    const wki_view *y = &l->out[0];
    if (y->numel == 0)
        return true;
    matrix a = batch_matrix(&l->in[0]), b = batch_matrix(&l->in[1]);
    if (a.cols == 0)
        return wki_cuda_zero(l->c, wki_addr_of(y), y->numel);
    char *at = l->workspace;
    wki_cu_gemm_args args = {.c = wki_addr_of(y), .alpha = 1};
    wki_cu_gemm g = {.m = a.rows, .n = b.cols, .k = a.cols, .batch = a.batch};
    g.a_rs = a.rs, g.a_cs = a.cs, g.a_bs = a.bs;
    g.b_rs = b.rs, g.b_cs = b.cs, g.b_bs = b.bs;
    g.c_ld = b.cols, g.c_bs = a.rows * b.cols;
    return settle(l->c, &a, &at, &args.a) && settle(l->c, &b, &at, &args.b) && wki_cuda_gemm(l->c, &g, &args);
}

/* ---- linear -------------------------------------------------------------------------------------------- */

/* x as (rows, K), w as (K, N), b as a row. */
static void linear_matrices(const wki_launch *l, matrix *x, matrix *w, matrix *b) {
    const wki_view *vx = &l->in[0], *vw = &l->in[1], *vb = &l->in[2];
    int last = vx->ndim - 1;
    *x = (matrix){.v = vx, .cols = vx->size[last], .cs = vx->stride[last], .batch = 1};
    bool one = collapse(vx, last, &x->rows, &x->rs);
    if (!one) {
        x->rows = 1;
        for (int d = 0; d < last; d++)
            x->rows *= vx->size[d];
    }
    if (!one || !wki_cuda_gemm_walks(x->rows, x->cols, x->rs, x->cs))
        must_copy(x, x->cols, 1);
    *w = (matrix){.v = vw,
                  .rows = vw->size[1],
                  .cols = vw->size[0],
                  .rs = vw->stride[1],
                  .cs = vw->stride[0],
                  .batch = 1};
    if (!wki_cuda_gemm_walks(w->rows, w->cols, w->rs, w->cs))
        must_copy(w, 1, w->rows);
    *b = (matrix){.v = vb};
    b->copy = !wki_view_absent(vb) && vb->size[0] > 1 && vb->stride[0] != 1;
}

bool wki_k_cuda_linear_ok(const wki_launch *l) {
    return l->in[0].dtype == WK_F32 && l->in[1].dtype == WK_F32;
}

size_t wki_k_cuda_linear_workspace(const wki_launch *l) {
    matrix m[3];
    size_t bytes = 0;
    if (l->out[0].numel == 0)
        return 0;
    linear_matrices(l, &m[0], &m[1], &m[2]);
    for (int i = 0; i < 3; i++)
        if (m[i].copy)
            bytes += room(m[i].v->numel);
    return bytes;
}

/* K is 0: every row is the bias. */
static bool bias_rows(const wki_launch *l, int64_t rows) {
    const wki_view *b = &l->in[2], *y = &l->out[0];
    if (wki_view_absent(b))
        return wki_cuda_zero(l->c, wki_addr_of(y), y->numel);
    int64_t size[] = {rows, b->size[0]}, ds[] = {b->size[0], 1}, ss[] = {0, b->stride[0]};
    return wki_cuda_copy(l->c, 4, 2, size, wki_at_of(y), ds, wki_at_of(b), ss);
}

static bool relu_in_place(const wki_launch *l) {
    wkk_relu_params p = {.y = wki_addr_of(&l->out[0]), .n = l->out[0].numel};
    return wki_cuda_launch(l->c, WKI_FN_wkk_relu, &p, p.n, WKK_THREADS);
}

static bool run_linear(const wki_launch *l) {
    const wki_view *y = &l->out[0];
    if (y->numel == 0)
        return true;
    matrix x, w, b;
    linear_matrices(l, &x, &w, &b);
    if (x.cols == 0)
        return bias_rows(l, x.rows);
    bool bias = !wki_view_absent(&l->in[2]);
    char *at = l->workspace;
    wki_cu_gemm_args args = {.c = wki_addr_of(y), .alpha = 1};
    wki_cu_gemm g = {.epilogue = bias ? WKI_CU_EPILOGUE_BIAS : WKI_CU_EPILOGUE_NONE,
                     .m = x.rows,
                     .n = w.cols,
                     .k = x.cols,
                     .batch = 1};
    g.a_rs = x.rs, g.a_cs = x.cs;
    g.b_rs = w.rs, g.b_cs = w.cs;
    g.c_ld = w.cols;
    return settle(l->c, &x, &at, &args.a) && settle(l->c, &w, &at, &args.b) &&
           (!bias || settle(l->c, &b, &at, &args.bias)) && wki_cuda_gemm(l->c, &g, &args);
}

bool wki_k_cuda_linear_run(const wki_launch *l) { return run_linear(l); }

bool wki_k_cuda_linear_relu_ok(const wki_launch *l) { return wki_k_cuda_linear_ok(l); }
size_t wki_k_cuda_linear_relu_workspace(const wki_launch *l) { return wki_k_cuda_linear_workspace(l); }

/* The library's own relu may come with another algorithm, and with NaN as 0: neither gives the bits of linear
 * and then relu. */
bool wki_k_cuda_linear_relu_run(const wki_launch *l) { return run_linear(l) && relu_in_place(l); }
