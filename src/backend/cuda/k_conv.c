/* 2-d convolution and its two gradients by own kernels (k_conv.cuh), of any strides and moving addresses.
 * How the work is cut depends on shapes alone, so results do not depend on the device. */
#include "backend/cuda/cuda.h"
#include "backend/kernels.h"

static int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

/* The kernels count in 32 bits inside an image, and taps in 16. */
static bool in_range(const wki_view *v) {
    int64_t reach = 0;
    for (int d = 1; d < 4; d++)
        reach += v->size[d] * (v->stride[d] < 0 ? -v->stride[d] : v->stride[d]);
    return reach < INT32_MAX && v->dtype == WK_F32;
}

static bool weights_in_range(const wki_view *w) {
    int64_t h = w->size[2], v = w->size[3];
    return in_range(w) && h <= INT16_MAX && v <= INT16_MAX && w->size[1] <= INT32_MAX / max_of(1, h * v);
}

static void strides_of(wkk_i64 out[4], const wki_view *v) {
    for (int d = 0; d < 4; d++)
        out[d] = v->stride[d];
}

/* ---- conv2d, and conv2d_dx as a convolution of dY ------------------------------------------------------ */

static bool run_conv(wk_ctx *c, wkk_conv *p) {
    int64_t most = (int64_t)1 << 16; /* rows of a grid */
    int tile = p->m <= 16 ? 16 : p->m <= 32 ? 32 : 64;
    wki_cuda_fn fn = tile == 16 ? WKI_FN_wkk_conv16 : tile == 32 ? WKI_FN_wkk_conv32 : WKI_FN_wkk_conv64;
    int64_t columns = ceil_div(p->n * p->windows, WKK_CONV_THREADS), rows = ceil_div(p->m, tile);
    if (columns > INT32_MAX || rows >= most)
        return wki_fail(c, WK_SHAPE, "too many elements for a CUDA grid");
    return wki_cuda_launch_grid(c, fn, p, columns, rows);
}

bool wki_k_cuda_conv2d_ok(const wki_launch *l) {
    return in_range(&l->in[0]) && weights_in_range(&l->in[1]) && in_range(&l->out[0]);
}

/* Attributes: the strides, the padding. */
bool wki_k_cuda_conv2d_run(const wki_launch *l) {
    const wki_view *x = &l->in[0], *w = &l->in[1], *b = &l->in[2], *y = &l->out[0];
    if (y->numel == 0)
        return true;
    wkk_conv p = {.x = wki_at_of(x), .wt = wki_at_of(w), .y = wki_at_of(y), .bias_stride = -1};
    strides_of(p.xs, x);
    p.wt_m = w->stride[0], p.wt_ch = w->stride[1], p.wt_kh = w->stride[2], p.wt_kw = w->stride[3];
    p.n = x->size[0], p.m = w->size[0], p.kh = w->size[2], p.kw = w->size[3], p.k = x->size[1] * p.kh * p.kw;
    p.h = x->size[2], p.w = x->size[3], p.ow = y->size[3], p.windows = y->size[2] * p.ow;
    p.up_h = l->ia[0], p.up_w = l->ia[1], p.add_h = -l->ia[2], p.add_w = -l->ia[3];
    p.dir = p.div_h = p.div_w = 1;
    if (!wki_view_absent(b)) {
        p.bias = wki_at_of(b);
        p.bias_stride = b->stride[0];
    }
    return run_conv(l->c, &p);
}

bool wki_k_cuda_conv2d_dx_ok(const wki_launch *l) {
    return in_range(&l->in[0]) && weights_in_range(&l->in[1]) && in_range(&l->out[0]);
}

/* A pixel of x meets tap (kh, kw) in the window at (h + pad - kh) / stride, where that is whole.
 * Attributes: H and W, the strides, the padding. */
bool wki_k_cuda_conv2d_dx_run(const wki_launch *l) {
    const wki_view *dy = &l->in[0], *w = &l->in[1], *dx = &l->out[0];
    if (dx->numel == 0)
        return true;
    wkk_conv p = {.x = wki_at_of(dy), .wt = wki_at_of(w), .y = wki_at_of(dx), .bias_stride = -1};
    strides_of(p.xs, dy);
    p.wt_m = w->stride[1], p.wt_ch = w->stride[0], p.wt_kh = w->stride[2], p.wt_kw = w->stride[3];
    p.n = dx->size[0], p.m = dx->size[1], p.kh = w->size[2], p.kw = w->size[3],
    p.k = w->size[0] * p.kh * p.kw;
    p.h = dy->size[2], p.w = dy->size[3], p.ow = dx->size[3], p.windows = dx->size[2] * p.ow;
    p.up_h = p.up_w = 1, p.dir = -1;
    p.div_h = l->ia[2], p.div_w = l->ia[3], p.add_h = l->ia[4], p.add_w = l->ia[5];
    p.down = p.div_h != 1 || p.div_w != 1;
    return run_conv(l->c, &p);
}

/* ---- conv2d_dw ----------------------------------------------------------------------------------------- */

enum { ENOUGH_BLOCKS = 264, LEAST_STEPS = 2, MOST_SPLITS = 128 };

static int dw_tile(const wkk_conv_dw *p) { return p->o <= 16 && p->c * p->kh * p->kw <= 16 ? 16 : 32; }

static wkk_conv_dw dw_of(const wki_launch *l) {
    const wki_view *dy = &l->in[0], *x = &l->in[1], *dw = &l->out[0];
    wkk_conv_dw p = {.dy = wki_at_of(dy), .x = wki_at_of(x), .dw = wki_at_of(dw)};
    strides_of(p.ds, dy);
    strides_of(p.xs, x);
    p.n = x->size[0], p.o = dy->size[1], p.c = x->size[1], p.h = x->size[2], p.w = x->size[3];
    p.kh = dw->size[2], p.kw = dw->size[3], p.oh = dy->size[2], p.ow = dy->size[3];
    p.sh = l->ia[2], p.sw = l->ia[3], p.ph = l->ia[4], p.pw = l->ia[5];
    int tile = dw_tile(&p), depth = tile == 16 ? 64 : 32; /* k_conv.cuh */
    int64_t all = p.n * p.oh * p.ow, steps = ceil_div(all, depth), splits = 1;
    p.across = ceil_div(p.c * p.kh * p.kw, tile);
    int64_t tiles = p.across * ceil_div(p.o, tile);
    if (tiles && tiles < ENOUGH_BLOCKS / 2)
        splits = min_of(min_of(ceil_div(ENOUGH_BLOCKS, tiles), MOST_SPLITS), max_of(1, steps / LEAST_STEPS));
    p.stretch = ceil_div(steps, splits) * depth;
    p.splits = all ? ceil_div(all, p.stretch) : 1;
    return p;
}

bool wki_k_cuda_conv2d_dw_ok(const wki_launch *l) {
    return in_range(&l->in[0]) && in_range(&l->in[1]) && weights_in_range(&l->out[0]);
}

size_t wki_k_cuda_conv2d_dw_workspace(const wki_launch *l) {
    wkk_conv_dw p = dw_of(l);
    int64_t tile = dw_tile(&p);
    return p.splits > 1 ? (size_t)(p.across * ceil_div(p.o, tile) * p.splits * tile * tile) * sizeof(float)
                        : 0;
}

bool wki_k_cuda_conv2d_dw_run(const wki_launch *l) {
    wki_cuda_ctx *s = wki_cuda_of(l->c);
    if (!s || l->out[0].numel == 0)
        return s != NULL;
    wkk_conv_dw p = dw_of(l);
    int64_t tile = dw_tile(&p), blocks = p.across * ceil_div(p.o, tile) * p.splits;
    p.part = (wkk_u64)(uintptr_t)l->workspace;
    p.count = s->counts;
    if (blocks > INT32_MAX)
        return wki_fail(l->c, WK_SHAPE, "too many weights for a CUDA grid");
    return wki_cuda_launch_grid(l->c, tile == 16 ? WKI_FN_wkk_conv_dw16 : WKI_FN_wkk_conv_dw32, &p, blocks,
                                1);
}
