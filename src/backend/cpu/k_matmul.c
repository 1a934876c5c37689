/* Matrix products: bmm and linear on the packed GEMM. Operands keep their strides; batch dimensions that
 * no single stride can walk become matrices of their own. Calls backend/cpu/gemm, base/pool, core. */
#include "backend/cpu/gemm.h"
#include "backend/cpu/k_copy.h"
#include "backend/cpu/k_util.h"
#include "backend/kernels.h"

/* Matrices are shared out among threads in lots of at least so many floating-point operations. */
#define MIN_FLOPS_PER_LOT 2e6

/* A product for every index of nd batch dimensions, outermost first. With nd 0 there is one, with nd 1 the
 * GEMM takes the dimension as its own batch. */
typedef struct {
    wki_gemm g; /* of one matrix, but for nd 1 */
    int nd;
    int64_t size[WK_MAX_DIMS], as[WK_MAX_DIMS], bs[WK_MAX_DIMS], cs[WK_MAX_DIMS];
    int64_t count;
    bool each; /* a thread computes whole matrices; else all threads share each */
    wki_isa isa;
    wki_pool *pool;
    char *workspace;
    size_t bytes; /* of a worker, when `each`; set while running */
} products;

/* One matrix so far; what is for batch dimensions stays unset, since clearing it is felt in small products. */
static void begin(products *p, const wki_launch *l) {
    p->nd = 0;
    p->count = 1;
    p->isa = l->c->rt->isa;
    p->pool = l->c->rt->pool;
    p->g.batch = 1;
    p->g.a_bs = p->g.b_bs = p->g.c_bs = 0;
    p->g.alpha = 1;
    p->g.beta = 0;
    p->g.bias_n = p->g.bias_m = NULL;
    p->g.act = WKI_ACT_NONE;
}

static void add_batch_dim(products *p, int64_t size, int64_t as, int64_t bs, int64_t cs) {
    int last = p->nd - 1;
    p->count *= size;
    if (size == 1)
        return;
    if (last >= 0 && p->as[last] == as * size && p->bs[last] == bs * size && p->cs[last] == cs * size) {
        p->size[last] *= size;
    } else {
        last = p->nd++;
        p->size[last] = size;
    }
    p->as[last] = as;
    p->bs[last] = bs;
    p->cs[last] = cs;
}

static double flops(const products *p) { return 2.0 * (double)p->g.m * (double)p->g.n * (double)p->g.k; }

/* After the last batch dimension. */
static void settle(products *p) {
    if (p->nd == 1) {
        p->g.batch = p->size[0];
        p->g.a_bs = p->as[0];
        p->g.b_bs = p->bs[0];
        p->g.c_bs = p->cs[0];
    }
    p->each = p->nd > 1 && (p->count >= wki_pool_size(p->pool) || flops(p) < MIN_FLOPS_PER_LOT);
}

static size_t products_workspace(const products *p) {
    int threads = wki_pool_size(p->pool);
    size_t bytes = wki_gemm_workspace(&p->g, p->isa, p->each ? 1 : threads);
    return p->each ? wki_k_mul(bytes, (size_t)threads) : bytes;
}

static void run_one(const products *p, int64_t i, wki_pool *pool, void *workspace) {
    wki_gemm g = p->g;
    for (int d = p->nd - 1; d >= 0; d--) {
        int64_t at = i % p->size[d];
        i /= p->size[d];
        g.a += at * p->as[d];
        g.b += at * p->bs[d];
        g.c += at * p->cs[d];
    }
    wki_gemm_run(&g, p->isa, pool, workspace);
}

static void run_lot(void *arg, int64_t begin, int64_t end, int worker) {
    const products *p = arg;
    for (int64_t i = begin; i < end; i++)
        run_one(p, i, NULL, p->bytes ? p->workspace + (size_t)worker * p->bytes : NULL);
}

static void run_products(products *p, void *workspace) {
    p->workspace = workspace;
    if (p->nd < 2) {
        wki_gemm_run(&p->g, p->isa, p->pool, workspace);
    } else if (p->each) {
        p->bytes = wki_gemm_workspace(&p->g, p->isa, 1);
        double lot = MIN_FLOPS_PER_LOT / wki_k_max(1, (int64_t)flops(p));
        wki_pool_for(p->pool, p->count, run_lot, p, 1 + (int64_t)lot);
    } else {
        for (int64_t i = 0; i < p->count; i++)
            run_one(p, i, p->pool, workspace);
    }
}

/* ---- bmm ----------------------------------------------------------------------------------------------- */

static void bmm_products(const wki_launch *l, products *p) {
    const wki_view *a = &l->in[0], *b = &l->in[1], *y = &l->out[0];
    int nd = a->ndim;
    begin(p, l);
    p->g.m = a->size[nd - 2], p->g.k = a->size[nd - 1], p->g.n = b->size[nd - 1];
    p->g.a = a->data, p->g.a_rs = a->stride[nd - 2], p->g.a_cs = a->stride[nd - 1];
    p->g.b = b->data, p->g.b_rs = b->stride[nd - 2], p->g.b_cs = b->stride[nd - 1];
    p->g.c = y->data, p->g.c_rs = p->g.n;
    for (int d = 0; d < nd - 2; d++)
        add_batch_dim(p, a->size[d], a->stride[d], b->stride[d], y->stride[d]);
    settle(p);
}

bool wki_k_bmm_gemm_ok(const wki_launch *l) {
    return wki_k_needs(l, l->in[0].dtype == WK_F32 && l->in[1].dtype == WK_F32, "f32");
}

size_t wki_k_bmm_gemm_workspace(const wki_launch *l) {
    if (l->out[0].numel == 0)
        return 0;
    products p;
    bmm_products(l, &p);
    return products_workspace(&p);
}

bool wki_k_bmm_gemm_run(const wki_launch *l) {
    if (l->out[0].numel == 0)
        return true;
    products p;
    bmm_products(l, &p);
    run_products(&p, l->workspace);
    return true;
}

/* ---- linear -------------------------------------------------------------------------------------------- */

/* The rows of x are one matrix where one stride walks them, else several. */
static void linear_products(const wki_launch *l, products *p) {
    const wki_view *x = &l->in[0], *w = &l->in[1], *y = &l->out[0];
    int last = x->ndim - 1;
    int64_t row = 0;
    begin(p, l);
    p->g.m = 1, p->g.n = w->size[0], p->g.k = w->size[1];
    p->g.a = x->data, p->g.a_cs = x->stride[last];
    p->g.b = w->data, p->g.b_rs = w->stride[1], p->g.b_cs = w->stride[0];
    p->g.c = y->data, p->g.c_rs = p->g.n;
    int d = last - 1;
    for (; d >= 0 && (p->g.m == 1 || x->size[d] == 1 || x->stride[d] == row * p->g.m); d--) {
        if (x->size[d] == 1)
            continue;
        if (p->g.m == 1)
            row = x->stride[d];
        p->g.m *= x->size[d];
    }
    p->g.a_rs = row;
    for (int i = 0; i <= d; i++)
        add_batch_dim(p, x->size[i], x->stride[i], 0, y->stride[i]);
    settle(p);
}

static bool copied_bias(const wki_view *b) { return !wki_k_absent(b) && !b->plain; }

bool wki_k_linear_gemm_ok(const wki_launch *l) {
    return wki_k_needs(l, l->in[0].dtype == WK_F32 && l->in[1].dtype == WK_F32, "f32");
}

static size_t bias_bytes(const wki_view *b) {
    return copied_bias(b) ? wki_k_align(wki_k_mul((size_t)b->numel, sizeof(float))) : 0;
}

size_t wki_k_linear_gemm_workspace(const wki_launch *l) {
    if (l->out[0].numel == 0)
        return 0;
    products p;
    linear_products(l, &p);
    return wki_k_add(bias_bytes(&l->in[2]), products_workspace(&p));
}

static bool run_linear(const wki_launch *l, wki_act act) {
    const wki_view *b = &l->in[2];
    if (l->out[0].numel == 0)
        return true;
    products p;
    linear_products(l, &p);
    p.g.act = act;
    char *workspace = l->workspace;
    if (copied_bias(b)) {
        wki_k_copy_plain(workspace, b, NULL);
        p.g.bias_n = (float *)(void *)workspace;
        workspace += bias_bytes(b);
    } else if (!wki_k_absent(b)) {
        p.g.bias_n = b->data;
    }
    run_products(&p, workspace);
    return true;
}

bool wki_k_linear_gemm_run(const wki_launch *l) { return run_linear(l, WKI_ACT_NONE); }

bool wki_k_linear_relu_gemm_ok(const wki_launch *l) { return wki_k_linear_gemm_ok(l); }
size_t wki_k_linear_relu_gemm_workspace(const wki_launch *l) { return wki_k_linear_gemm_workspace(l); }
bool wki_k_linear_relu_gemm_run(const wki_launch *l) { return run_linear(l, WKI_ACT_RELU); }
