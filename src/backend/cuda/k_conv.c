/* 2-d convolution and its two gradients: columns by own kernels, products by cuBLASLt, a batch of images at a time. How the
 * work is cut depends on shapes alone, so results do not depend on the device's size. */
#include "backend/cuda/cuda.h"
#include "backend/kernels.h"

/* Images are taken at a time so that the column matrix stays below this. */
#define COLUMN_BYTES ((int64_t)256 << 20)
/* conv2d_dw sums so long a stretch of windows at least in one product, and its partial sums stay below this. */
#define MIN_STRETCH 256
#define PARTIAL_BYTES ((int64_t)64 << 20)
#define PRODUCTS 256 /* tiles of 64 x 64 worth having at once */

enum { ALIGN = 256 };

static size_t room(int64_t floats) { return ((size_t)floats * sizeof(float) + ALIGN - 1) / ALIGN * ALIGN; }
static int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

typedef struct conv {
    int64_t n, c, h, w, o, kh, kw, oh, ow, sh, sw, ph, pw;
    int64_t per, windows; /* c * kh * kw; oh * ow */
    int64_t images;       /* at a time */
    bool direct;          /* 1 x 1, stride 1, no padding: an image is its own column matrix */
} conv;

/* x (n, c, h, w), w (o, c, kh, kw) and y (n, o, oh, ow) give sizes; s: the attributes from the strides on. */
static conv conv_of(const wki_view *x, const wki_view *w, const wki_view *y, const int64_t *s) {
    conv k = {.n = x->size[0],
              .c = x->size[1],
              .h = x->size[2],
              .w = x->size[3],
              .o = w->size[0],
              .kh = w->size[2]};
    k.kw = w->size[3], k.oh = y->size[2], k.ow = y->size[3];
    k.sh = s[0], k.sw = s[1], k.ph = s[2], k.pw = s[3];
    k.per = k.c * k.kh * k.kw;
    k.windows = k.oh * k.ow;
    k.direct = k.kh * k.kw == 1 && k.sh == 1 && k.sw == 1 && k.ph == 0 && k.pw == 0;
    k.images = max_of(1, min_of(k.n, COLUMN_BYTES / (4 * max_of(1, k.per * k.windows))));
    return k;
}

/* Do the last two dimensions have one stride of 1, and the channels one that a product can walk? */
static bool flat(const wki_view *v) {
    int64_t h = v->size[2], w = v->size[3];
    bool rows = h == 1 || v->stride[2] == w * v->stride[3] || (w == 1 && v->stride[2] == 1);
    bool unit = (w == 1 && (h == 1 || v->stride[2] == 1)) || v->stride[3] == 1;
    return rows && unit && (v->size[1] == 1 || v->stride[1] >= h * w);
}

static bool im2col(wk_ctx *c, const conv *k, const wki_view *x, int64_t n0, int64_t n, wki_cu_ptr col,
                   int64_t n_step, int64_t row_step, int64_t row_end) {
    wkk_im2col p = {
        .x = wki_at_of(x), .col = col, .n = n, .c = k->c, .h = k->h, .w = k->w, .kh = k->kh, .kw = k->kw};
    p.oh = k->oh, p.ow = k->ow, p.sh = k->sh, p.sw = k->sw, p.ph = k->ph, p.pw = k->pw;
    p.n_step = n_step, p.row_step = row_step, p.row_end = row_end;
    for (int d = 0; d < 4; d++)
        p.xs[d] = x->stride[d];
    p.x.base += (wkk_u64)(n0 * p.xs[0] * 4);
    return wki_cuda_launch(c, WKI_FN_wkk_conv_im2col, &p, n * k->c * k->windows, WKK_THREADS);
}

/* The view, or where it is not `fine` a contiguous copy at *at, which moves on. */
static bool settle(wk_ctx *c, const wki_view *v, bool fine, char **at, wki_cu_ptr *out) {
    *out = wki_addr_of(v);
    if (fine)
        return true;
    *out = (wki_cu_ptr)(uintptr_t)*at;
    *at += room(v->numel);
    return wki_cuda_copy_plain(c, wki_at_addr(*out), v);
}

/* Kernels count in 32 bits within a plane. */
static bool plane_fits(const wki_view *v) {
    int64_t last = 0;
    for (int d = 2; d < 4; d++)
        if (v->size[d] > INT32_MAX / 2 || v->stride[d] > INT32_MAX ||
            __builtin_add_overflow(last, (v->size[d] - 1) * v->stride[d], &last))
            return false;
    return last <= INT32_MAX;
}

static bool all_f32(const wki_launch *l) { return l->in[0].dtype == WK_F32 && l->in[1].dtype == WK_F32; }
static bool fits(const wki_launch *l) {
    return all_f32(l) && plane_fits(&l->in[0]) && plane_fits(&l->in[1]) && plane_fits(&l->out[0]);
}

/* ---- conv2d: W (o, per) by the columns of each image (per, windows) ----------------------------------------------------- */

static bool forward_direct(const conv *k, const wki_view *x) { return k->direct && flat(x); }

bool wki_k_cuda_conv2d_ok(const wki_launch *l) { return fits(l); }

size_t wki_k_cuda_conv2d_workspace(const wki_launch *l) {
    const wki_view *x = &l->in[0], *w = &l->in[1];
    conv k = conv_of(x, w, &l->out[0], l->ia);
    size_t bytes = w->plain ? 0 : room(w->numel);
    if (l->out[0].numel == 0)
        return 0;
    return forward_direct(&k, x) ? bytes : bytes + room(k.images * k.per * k.windows);
}

static bool add_bias(const wki_launch *l, const conv *k) {
    const wki_view *b = &l->in[2], *y = &l->out[0];
    if (wki_view_absent(b))
        return true;
    wkk_bias p = {.y = wki_addr_of(y),
                  .bias = wki_addr_of(b),
                  .total = y->numel,
                  .o = k->o,
                  .p = k->windows,
                  .stride = b->stride[0]};
    return wki_cuda_launch(l->c, WKI_FN_wkk_conv_bias, &p, y->numel, WKK_THREADS);
}

bool wki_k_cuda_conv2d_run(const wki_launch *l) {
    const wki_view *x = &l->in[0], *w = &l->in[1], *y = &l->out[0];
    conv k = conv_of(x, w, y, l->ia);
    char *at = l->workspace;
    wki_cu_gemm_args args = {.alpha = 1};
    if (y->numel == 0)
        return true;
    if (k.per == 0)
        return wki_cuda_zero(l->c, wki_addr_of(y), y->numel) && add_bias(l, &k);
    if (!settle(l->c, w, w->plain, &at, &args.a))
        return false;
    bool direct = forward_direct(&k, x);
    wki_cu_gemm g = {
        .m = k.o, .n = k.windows, .k = k.per, .a_rs = k.per, .a_cs = 1, .b_cs = 1, .c_ld = k.windows};
    g.b_rs = direct ? x->stride[1] : k.windows;
    g.b_bs = direct ? x->stride[0] : k.per * k.windows;
    g.c_bs = k.o * k.windows;
    int64_t step = direct ? k.n : k.images;
    for (int64_t n0 = 0; n0 < k.n; n0 += step) {
        g.batch = min_of(step, k.n - n0);
        args.b = direct ? wki_addr_of(x) : (wki_cu_ptr)(uintptr_t)at;
        args.c = wki_addr_of(y) + (wki_cu_ptr)(n0 * g.c_bs * 4);
        if (!direct && !im2col(l->c, &k, x, n0, g.batch, args.b, k.per * k.windows, k.windows, 0))
            return false;
        if (!wki_cuda_gemm(l->c, &g, &args))
            return false;
    }
    return add_bias(l, &k);
}

/* ---- conv2d_dx: W^T (per, o) by dY (o, windows) of each image, added back to the pixels ---------------------------------- */

bool wki_k_cuda_conv2d_dx_ok(const wki_launch *l) { return fits(l); }

size_t wki_k_cuda_conv2d_dx_workspace(const wki_launch *l) {
    const wki_view *dy = &l->in[0], *w = &l->in[1];
    conv k = conv_of(&l->out[0], w, dy, l->ia + 2);
    if (l->out[0].numel == 0)
        return 0;
    return (w->plain ? 0 : room(w->numel)) + (flat(dy) ? 0 : room(dy->numel)) +
           (k.direct ? 0 : room(k.images * k.per * k.windows));
}

static bool col2im(const wki_launch *l, const conv *k, int64_t n0, int64_t n, wki_cu_ptr col) {
    wkk_col2im p = {.dx = wki_at_of(&l->out[0]),
                    .col = col,
                    .n = n,
                    .c = k->c,
                    .h = k->h,
                    .w = k->w,
                    .kh = k->kh,
                    .kw = k->kw};
    p.oh = k->oh, p.ow = k->ow, p.sh = k->sh, p.sw = k->sw, p.ph = k->ph, p.pw = k->pw;
    p.dx.base += (wkk_u64)(n0 * k->c * k->h * k->w * 4);
    return wki_cuda_launch(l->c, WKI_FN_wkk_conv_col2im, &p, n * k->c * k->h * k->w, WKK_THREADS);
}

bool wki_k_cuda_conv2d_dx_run(const wki_launch *l) {
    const wki_view *dy = &l->in[0], *w = &l->in[1], *dx = &l->out[0];
    conv k = conv_of(dx, w, dy, l->ia + 2);
    char *at = l->workspace;
    wki_cu_gemm_args args = {.alpha = 1};
    if (dx->numel == 0)
        return true;
    if (k.o == 0)
        return wki_cuda_zero(l->c, wki_addr_of(dx), dx->numel);
    wki_cu_ptr y;
    bool fine = flat(dy);
    if (!settle(l->c, w, w->plain, &at, &args.a) || !settle(l->c, dy, fine, &at, &y))
        return false;
    int64_t ybs = fine ? dy->stride[0] : k.o * k.windows, step = k.direct ? k.n : k.images;
    wki_cu_gemm g = {
        .m = k.per, .n = k.windows, .k = k.o, .a_rs = 1, .a_cs = k.per, .b_cs = 1, .c_ld = k.windows};
    g.b_rs = fine ? dy->stride[1] : k.windows;
    g.b_bs = ybs;
    g.c_bs = k.per * k.windows;
    for (int64_t n0 = 0; n0 < k.n; n0 += step) {
        g.batch = min_of(step, k.n - n0);
        args.b = y + (wki_cu_ptr)(n0 * ybs * 4);
        args.c = k.direct ? wki_addr_of(dx) : (wki_cu_ptr)(uintptr_t)at;
        if (!wki_cuda_gemm(l->c, &g, &args) || (!k.direct && !col2im(l, &k, n0, g.batch, args.c)))
            return false;
    }
    return true;
}

/* ---- conv2d_dw: dY (o, all windows) by the columns (per, all windows), cut into stretches that are summed in order -------- */

typedef struct stretches {
    int64_t count, length, row; /* row = count * length: windows of the images at hand, and zeros */
} stretches;

static stretches cut(const conv *k) {
    int64_t all = k->images * k->windows, tiles = ceil_div(k->o, 64) * ceil_div(k->per, 64);
    int64_t count = min_of(ceil_div(PRODUCTS, tiles), max_of(1, all / MIN_STRETCH));
    count = max_of(1, min_of(count, PARTIAL_BYTES / (4 * k->o * k->per)));
    int64_t length = ceil_div(ceil_div(all, count), 4) * 4; /* 16 bytes */
    return (stretches){count, length, count * length};
}

bool wki_k_cuda_conv2d_dw_ok(const wki_launch *l) { return fits(l); }

size_t wki_k_cuda_conv2d_dw_workspace(const wki_launch *l) {
    const wki_view *dy = &l->in[0], *x = &l->in[1], *dw = &l->out[0];
    conv k = conv_of(x, dw, dy, l->ia + 2);
    if (dw->numel == 0 || dy->numel == 0)
        return 0;
    stretches s = cut(&k);
    return room(s.row * k.per) + room(s.row * k.o) + (s.count > 1 ? room(s.count * dw->numel) : 0);
}

bool wki_k_cuda_conv2d_dw_run(const wki_launch *l) {
    const wki_view *dy = &l->in[0], *x = &l->in[1], *dw = &l->out[0];
    conv k = conv_of(x, dw, dy, l->ia + 2);
    if (dw->numel == 0)
        return true;
    if (dy->numel == 0)
        return wki_cuda_zero(l->c, wki_addr_of(dw), dw->numel);
    stretches s = cut(&k);
    wki_cu_ptr col = (wki_cu_ptr)(uintptr_t)l->workspace, rows = col + room(s.row * k.per),
               part = rows + room(s.row * k.o);
    conv y = {.c = k.o,
              .h = k.oh,
              .w = k.ow,
              .kh = 1,
              .kw = 1,
              .oh = k.oh,
              .ow = k.ow,
              .sh = 1,
              .sw = 1,
              .per = k.o};
    y.windows = k.windows;
    wki_cu_gemm g = {
        .m = k.o, .n = k.per, .k = s.length, .batch = s.count, .a_rs = s.row, .a_cs = 1, .b_rs = 1};
    g.a_bs = g.b_bs = s.length;
    g.b_cs = s.row;
    g.c_ld = k.per;
    g.c_bs = dw->numel;
    wki_cu_gemm_args args = {.a = rows, .b = col, .c = s.count > 1 ? part : wki_addr_of(dw), .alpha = 1};
    for (int64_t n0 = 0; n0 < k.n; n0 += k.images) {
        int64_t n = min_of(k.images, k.n - n0);
        if (!im2col(l->c, &k, x, n0, n, col, k.windows, s.row, s.row) ||
            !im2col(l->c, &y, dy, n0, n, rows, k.windows, s.row, s.row) || !wki_cuda_gemm(l->c, &g, &args))
            return false;
        args.beta = 1;
    }
    if (s.count == 1)
        return true;
    wkk_sum p = {.out = wki_addr_of(dw), .part = part, .n = dw->numel, .groups = s.count};
    return wki_cuda_launch_grid(l->c, WKI_FN_wkk_conv_sum, &p, ceil_div(p.n, 32), 1);
}
