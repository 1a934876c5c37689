/* 2-d convolution and its two gradients by the column matrix (im2col) and the packed GEMM. Work is cut
 * into units that each own their results and their part of the column matrix, which stays in the
 * second-level cache; the cut depends on shapes alone, so results do not depend on threads. Calls
 * backend/cpu/gemm, base/pool, core. */
#include "backend/cpu/k_conv.h"

#include "backend/cpu/gemm.h"
#include "backend/cpu/k_copy.h"
#include "backend/kernels.h"

/* Windows taken at a time: enough for a GEMM to be efficient. */
#define MIN_WINDOWS 192
/* Elements of a unit's part of the column matrix, where MIN_WINDOWS allows. */
#define COLUMN_ELEMENTS 49152
/* Rows of the column matrix taken at a time, at least. */
#define MIN_TAPS 64
/* Threads get lots of at least so many floating-point operations. */
#define MIN_FLOPS_PER_LOT 1e6
/* conv2d_dx transposes w first when its rows are longer: a column of w is then one page for every element. */
#define LONG_ROW 512
/* conv2d_dw sums images in so many groups, as long as the groups' sums stay below a size. */
#define GROUPS 16
#define GROUP_ELEMENTS (4 << 20)

/* One of the ops, ready to be cut into units. */
typedef struct {
    wki_conv g;
    const float *x, *w, *y; /* w is plain; y is the result, or its gradient */
    int64_t xs[4], ys[2];   /* strides of n, c, h, w and of n, o */
    int64_t ystep;          /* of y from window to window */
    const float *bias;
    float *out;
    bool direct;             /* a 1 x 1 kernel: image planes are rows of the column matrix */
    int64_t xstep;           /* of x from window to window, when direct */
    int64_t nr, row_blocks;  /* window rows at a time */
    int64_t nc, chan_blocks; /* channels at a time */
    bool turned;             /* conv2d_dx: w is (c * taps, o) */
    int64_t groups;          /* conv2d_dw */
    size_t w_bytes, y_bytes, bias_bytes, sum_bytes; /* parts of the workspace before the workers' own */
    size_t col_bytes, gemm_bytes;                   /* of each worker */
    char *scratch;
    wki_isa isa;
    wki_pool *pool;
} conv;

/* ---- preparation --------------------------------------------------------------------------------------- */

/* The stride from element to element of (h, w) taken as one dimension; 0 with *ok false when there is
 * none. */
static int64_t flat_step(const wki_view *v, bool *ok) {
    *ok = v->size[2] == 1 || v->size[3] == 1 || v->stride[2] == v->size[3] * v->stride[3];
    return v->size[3] == 1 ? v->stride[2] : v->stride[3];
}

static size_t floats(size_t n) { return wki_k_align(wki_k_mul(n, sizeof(float))); }

/* Window rows are taken in blocks, for parts of the column matrix of so many channels. */
static void cut_rows(conv *k, int64_t channels) {
    int64_t windows = COLUMN_ELEMENTS / wki_k_max(1, channels * k->g.taps);
    k->nr = wki_k_min(k->g.oh, wki_k_ceil(wki_k_max(MIN_WINDOWS, windows), k->g.ow));
    k->row_blocks = wki_k_ceil(k->g.oh, k->nr);
}

/* x (n, c, h, w), w (o, c, kh, kw) and y (n, o, oh, ow) give sizes; s: the attributes from the strides on. */
static conv conv_of(const wki_launch *l, const wki_view *x, const wki_view *w, const wki_view *y,
                    const int64_t *s) {
    conv k = {.isa = l->c->rt->isa, .pool = l->c->rt->pool};
    bool flat;
    k.g = (wki_conv){.n = x->size[0], .c = x->size[1], .h = x->size[2], .w = x->size[3]};
    k.g.o = w->size[0], k.g.kh = w->size[2], k.g.kw = w->size[3], k.g.oh = y->size[2], k.g.ow = y->size[3];
    k.g.sh = s[0], k.g.sw = s[1], k.g.ph = s[2], k.g.pw = s[3];
    k.g.taps = k.g.kh * k.g.kw;
    k.g.rows = wki_k_rows_of(k.isa);
    for (int d = 0; d < 4; d++)
        k.xs[d] = x->stride[d];
    k.ys[0] = y->stride[0];
    k.ys[1] = y->stride[1];
    k.xstep = flat_step(x, &flat);
    k.direct = k.g.taps == 1 && s[0] == 1 && s[1] == 1 && s[2] == 0 && s[3] == 0 && flat;
    cut_rows(&k, k.g.c);
    k.nc = k.g.c;
    k.chan_blocks = 1;
    k.groups = 1;
    if (!w->plain)
        k.w_bytes = floats((size_t)w->numel);
    return k;
}

/* Channels are taken in blocks too. */
static void cut_channels(conv *k) {
    int64_t channel = (int64_t)wki_k_mul((size_t)k->g.taps, (size_t)(k->nr * k->g.ow));
    k->nc = wki_k_max(COLUMN_ELEMENTS / channel, wki_k_ceil(MIN_TAPS, k->g.taps));
    k->nc = wki_k_max(1, wki_k_min(k->nc, k->g.c));
    k->chan_blocks = wki_k_ceil(k->g.c, k->nc);
    k->nc = wki_k_max(1, wki_k_ceil(k->g.c, k->chan_blocks));
}

/* y is an operand: it is copied where its windows are not evenly spaced. */
static void need_even_y(conv *k, const wki_view *y) {
    bool flat;
    k->ystep = flat_step(y, &flat);
    if (flat)
        return;
    k->y_bytes = floats((size_t)y->numel);
    k->ystep = 1;
    k->ys[1] = k->g.oh * k->g.ow;
    k->ys[0] = k->g.o * k->ys[1];
}

/* Scratch of each worker: for a part of the column matrix, and for the GEMMs of full and of last blocks
 * (the smaller problem may be the one that packs an operand). */
static void need_scratch(conv *k, wki_gemm (*make)(const conv *, int64_t nr, int64_t nc)) {
    int64_t nr[] = {k->nr, k->g.oh - (k->row_blocks - 1) * k->nr};
    int64_t nc[] = {k->nc, k->g.c - (k->chan_blocks - 1) * k->nc};
    for (int i = 0; i < 4; i++) {
        wki_gemm g = make(k, nr[i / 2], nc[i % 2]);
        size_t bytes = wki_k_align(wki_gemm_workspace(&g, k->isa, 1));
        k->gemm_bytes = bytes > k->gemm_bytes ? bytes : k->gemm_bytes;
    }
    if (!k->direct)
        k->col_bytes =
            floats(wki_k_mul((size_t)(k->nc * k->g.taps), (size_t)wki_col_stride(k->nr * k->g.ow)));
}

static size_t workspace_of(const conv *k) {
    size_t own = wki_k_mul(wki_k_add(k->col_bytes, k->gemm_bytes), (size_t)wki_pool_size(k->pool));
    size_t shared = wki_k_add(wki_k_add(k->w_bytes, k->y_bytes), wki_k_add(k->bias_bytes, k->sum_bytes));
    return wki_k_add(own, shared);
}

/* The copy of a view at *at, when there is to be one (bytes is not 0), else the view's own data. */
static const float *settle(const conv *k, const wki_view *v, size_t bytes, char **at) {
    if (!bytes)
        return v->data;
    float *copy = (float *)(void *)*at;
    wki_k_copy_plain(copy, v, k->pool);
    *at += bytes;
    return copy;
}

static void run_units(conv *k, int64_t units, double flops, void (*fn)(void *, int64_t, int64_t, int)) {
    double lot = MIN_FLOPS_PER_LOT * (double)units / (flops + 1);
    wki_pool_for(k->pool, units, fn, k, lot < 1 ? 1 : lot < (double)units ? (int64_t)lot : units);
}

static double conv_flops(const wki_conv *g) {
    return 2.0 * (double)g->n * (double)g->o * (double)(g->c * g->taps) * (double)(g->oh * g->ow);
}

static float *worker_col(const conv *k, int worker) {
    return (float *)(void *)(k->scratch + (size_t)worker * (k->col_bytes + k->gemm_bytes));
}

static void *worker_gemm(const conv *k, int worker) { return (char *)worker_col(k, worker) + k->col_bytes; }

/* A part of the column matrix of image n: made in the worker's scratch, or the image itself. */
static const float *columns_of(const conv *k, int64_t n, int64_t c0, int64_t nc, int64_t r0, int64_t nr,
                               int worker) {
    const float *x = k->x + n * k->xs[0];
    if (k->direct)
        return x + c0 * k->xs[1] + r0 * k->g.ow * k->xstep;
    float *col = worker_col(k, worker);
    wki_im2col(&k->g, col, wki_col_stride(nr * k->g.ow), x, k->xs, c0, nc, r0, nr);
    return col;
}

/* The image's address. One without elements, all padding, has none: any that is not NULL serves for what is never read. */
static const float *image(const wki_view *x) {
    static const float nothing;
    return x->data ? (const float *)x->data : &nothing;
}

/* ---- conv2d: W (o, c * taps) by columns (c * taps, windows) -------------------------------------------- */

static wki_gemm forward_gemm(const conv *k, int64_t nr, int64_t nc) {
    const wki_conv *g = &k->g;
    wki_gemm m = {.m = g->o, .n = nr * g->ow, .k = nc * g->taps, .batch = 1, .alpha = 1};
    m.a = k->w, m.a_rs = m.k, m.a_cs = 1;
    m.b_rs = k->direct ? k->xs[1] : wki_col_stride(m.n), m.b_cs = k->direct ? k->xstep : 1;
    m.c_rs = g->oh * g->ow;
    m.bias_m = k->bias;
    return m;
}

static void forward_units(void *arg, int64_t begin, int64_t end, int worker) {
    const conv *k = arg;
    const wki_conv *g = &k->g;
    for (int64_t u = begin; u < end; u++) {
        int64_t n = u / k->row_blocks, r0 = u % k->row_blocks * k->nr, nr = wki_k_min(k->nr, g->oh - r0);
        wki_gemm m = forward_gemm(k, nr, g->c);
        m.b = columns_of(k, n, 0, g->c, r0, nr, worker);
        m.c = k->out + (n * g->o * g->oh + r0) * g->ow;
        wki_gemm_run(&m, k->isa, NULL, worker_gemm(k, worker));
    }
}

static conv forward_conv(const wki_launch *l) {
    conv k = conv_of(l, &l->in[0], &l->in[1], &l->out[0], l->ia);
    if (!wki_k_absent(&l->in[2]) && !l->in[2].plain)
        k.bias_bytes = floats((size_t)k.g.o);
    need_scratch(&k, forward_gemm);
    return k;
}

static bool all_f32(const wki_launch *l) { return l->in[0].dtype == WK_F32 && l->in[1].dtype == WK_F32; }

bool wki_k_conv2d_im2col_ok(const wki_launch *l) { return wki_k_needs(l, all_f32(l), "f32"); }

size_t wki_k_conv2d_im2col_workspace(const wki_launch *l) {
    if (l->out[0].numel == 0)
        return 0;
    conv k = forward_conv(l);
    return workspace_of(&k);
}

bool wki_k_conv2d_im2col_run(const wki_launch *l) {
    if (l->out[0].numel == 0)
        return true;
    conv k = forward_conv(l);
    char *at = l->workspace;
    k.w = settle(&k, &l->in[1], k.w_bytes, &at);
    if (!wki_k_absent(&l->in[2]))
        k.bias = settle(&k, &l->in[2], k.bias_bytes, &at);
    k.out = l->out[0].data;
    k.scratch = at;
    k.x = image(&l->in[0]);
    run_units(&k, k.g.n * k.row_blocks, conv_flops(&k.g), forward_units);
    return true;
}

/* ---- conv2d_dx: W^T (c * taps, o) by dY (o, windows), added back to the image -------------------------- */

static wki_gemm dx_gemm(const conv *k, int64_t nr, int64_t nc) {
    const wki_conv *g = &k->g;
    wki_gemm m = {.m = nc * g->taps, .n = nr * g->ow, .k = g->o, .batch = 1, .alpha = 1};
    m.a_rs = k->turned ? g->o : 1, m.a_cs = k->turned ? 1 : g->c * g->taps;
    m.b_rs = k->ys[1], m.b_cs = k->ystep;
    m.c_rs = k->direct ? g->h * g->w : wki_col_stride(m.n);
    return m;
}

static void dx_units(void *arg, int64_t begin, int64_t end, int worker) {
    const conv *k = arg;
    const wki_conv *g = &k->g;
    for (int64_t u = begin; u < end; u++) {
        int64_t n = u / k->chan_blocks, c0 = u % k->chan_blocks * k->nc, nc = wki_k_min(k->nc, g->c - c0);
        float *image = k->out + (n * g->c + c0) * g->h * g->w;
        for (int64_t r0 = 0; r0 < g->oh; r0 += k->nr) {
            int64_t nr = wki_k_min(k->nr, g->oh - r0);
            wki_gemm m = dx_gemm(k, nr, nc);
            m.a = k->w + c0 * g->taps * m.a_rs;
            m.b = k->y + n * k->ys[0] + r0 * g->ow * k->ystep;
            m.c = k->direct ? image + r0 * g->ow : worker_col(k, worker);
            wki_gemm_run(&m, k->isa, NULL, worker_gemm(k, worker));
            if (!k->direct)
                wki_col2im(g, image, m.c, m.c_rs, nc, r0, nr, r0 > 0);
        }
    }
}

static conv dx_conv(const wki_launch *l) {
    conv k = conv_of(l, &l->out[0], &l->in[1], &l->in[0], l->ia + 2);
    cut_rows(&k, wki_k_min(k.g.c, wki_k_ceil(MIN_TAPS, k.g.taps))); /* few: neighbours add to the same rows */
    cut_channels(&k);
    need_even_y(&k, &l->in[0]);
    if (k.g.c * k.g.taps > LONG_ROW) {
        k.turned = true;
        k.w_bytes = floats((size_t)l->in[1].numel);
    }
    need_scratch(&k, dx_gemm);
    return k;
}

bool wki_k_conv2d_dx_col2im_ok(const wki_launch *l) { return wki_k_needs(l, all_f32(l), "f32"); }

size_t wki_k_conv2d_dx_col2im_workspace(const wki_launch *l) {
    if (l->out[0].numel == 0)
        return 0;
    conv k = dx_conv(l);
    return workspace_of(&k);
}

/* w (o, c, kh, kw) as (c, kh, kw, o). */
static void turn(const conv *k, const wki_view *w, float *dst) {
    int64_t o = w->size[0], stride[4] = {1, w->size[2] * w->size[3] * o, w->size[3] * o, o};
    wki_k_copy(4, 4, w->size, dst, stride, w->data, w->stride, k->pool);
}

bool wki_k_conv2d_dx_col2im_run(const wki_launch *l) {
    if (l->out[0].numel == 0)
        return true;
    conv k = dx_conv(l);
    char *at = l->workspace;
    if (k.turned) {
        turn(&k, &l->in[1], (float *)(void *)at);
        k.w = (float *)(void *)at;
        at += k.w_bytes;
    } else {
        k.w = settle(&k, &l->in[1], k.w_bytes, &at);
    }
    k.y = settle(&k, &l->in[0], k.y_bytes, &at);
    k.out = l->out[0].data;
    k.scratch = at;
    run_units(&k, k.g.n * k.chan_blocks, conv_flops(&k.g), dx_units);
    return true;
}

/* ---- conv2d_dw: columns (c * taps, windows) by dY^T (windows, o), summed over images ------------------- */

static wki_gemm dw_gemm(const conv *k, int64_t nr, int64_t nc) {
    const wki_conv *g = &k->g;
    wki_gemm m = {.m = nc * g->taps, .n = g->o, .k = nr * g->ow, .batch = 1, .alpha = 1};
    m.a_rs = k->direct ? k->xs[1] : wki_col_stride(m.k), m.a_cs = k->direct ? k->xstep : 1;
    m.b_rs = k->ystep, m.b_cs = k->ys[1];
    m.c_rs = g->o;
    return m;
}

/* First image of group i. */
static int64_t group_start(const conv *k, int64_t i) {
    int64_t each = k->g.n / k->groups, extra = k->g.n % k->groups;
    return i * each + wki_k_min(i, extra);
}

static float *group_sum(const conv *k, int64_t i) { return k->out + i * k->g.c * k->g.taps * k->g.o; }

static void dw_units(void *arg, int64_t begin, int64_t end, int worker) {
    const conv *k = arg;
    const wki_conv *g = &k->g;
    for (int64_t u = begin; u < end; u++) {
        int64_t group = u / k->chan_blocks, c0 = u % k->chan_blocks * k->nc, nc = wki_k_min(k->nc, g->c - c0);
        float beta = 0;
        for (int64_t n = group_start(k, group); n < group_start(k, group + 1); n++) {
            for (int64_t r0 = 0; r0 < g->oh; r0 += k->nr, beta = 1) {
                int64_t nr = wki_k_min(k->nr, g->oh - r0);
                wki_gemm m = dw_gemm(k, nr, nc);
                m.a = columns_of(k, n, c0, nc, r0, nr, worker);
                m.b = k->y + n * k->ys[0] + r0 * g->ow * k->ystep;
                m.c = group_sum(k, group) + c0 * g->taps * g->o;
                m.beta = beta;
                wki_gemm_run(&m, k->isa, NULL, worker_gemm(k, worker));
            }
        }
    }
}

static conv dw_conv(const wki_launch *l) {
    conv k = conv_of(l, &l->in[1], &l->out[0], &l->in[0], l->ia + 2);
    cut_channels(&k);
    need_even_y(&k, &l->in[0]);
    int64_t sum = wki_k_max(1, l->out[0].numel);
    k.groups = wki_k_max(1, wki_k_min(wki_k_min(GROUPS, k.g.n), GROUP_ELEMENTS / sum));
    k.sum_bytes = floats(wki_k_mul((size_t)sum, (size_t)k.groups));
    need_scratch(&k, dw_gemm);
    return k;
}

typedef struct {
    const conv *k;
    float *dw;
} dw_sum;

/* Rows of the sums, (c * taps, o) each, to columns of dw. */
static void add_groups(void *arg, int64_t begin, int64_t end, int worker) {
    const dw_sum *s = arg;
    const conv *k = s->k;
    int64_t o = k->g.o, taps = k->g.c * k->g.taps;
    (void)worker;
    for (int64_t r = begin; r < end; r++) {
        float *first = group_sum(k, 0) + r * o;
        for (int64_t i = 1; i < k->groups; i++)
            k->g.rows->add(first, 0, group_sum(k, i) + r * o, 0, 1, o);
        for (int64_t i = 0; i < o; i++)
            s->dw[i * taps + r] = first[i];
    }
}

bool wki_k_conv2d_dw_im2col_ok(const wki_launch *l) { return wki_k_needs(l, all_f32(l), "f32"); }

size_t wki_k_conv2d_dw_im2col_workspace(const wki_launch *l) {
    if (l->out[0].numel == 0)
        return 0;
    conv k = dw_conv(l);
    return workspace_of(&k);
}

bool wki_k_conv2d_dw_im2col_run(const wki_launch *l) {
    if (l->out[0].numel == 0)
        return true;
    if (l->in[0].size[0] == 0) {
        wki_k_zero(l->out[0].data, l->out[0].numel, NULL);
        return true;
    }
    conv k = dw_conv(l);
    char *at = l->workspace;
    k.y = settle(&k, &l->in[0], k.y_bytes, &at);
    k.out = (float *)(void *)at;
    k.scratch = at + k.sum_bytes;
    k.x = image(&l->in[1]);
    run_units(&k, k.groups * k.chan_blocks, conv_flops(&k.g), dw_units);
    dw_sum s = {&k, l->out[0].data};
    wki_pool_for(k.pool, k.g.c * k.g.taps, add_groups, &s, wki_k_ceil(32768, k.groups * k.g.o));
    return true;
}
