/* Tests of the CPU kernels behind the rows of kernels.def: every row of an op against the op's last one, the
 * reference, on random shapes and strides, for every tier of the CPU and one to three threads. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "harness.h"
#include "ops_gen.h"
#include "util_guard.h"

#define EPS 1.1920929e-7 /* of f32 */

typedef struct {
    wki_view v;
    int64_t size[WK_MAX_DIMS], stride[WK_MAX_DIMS];
    size_t bytes;
} operand;

static void describe(operand *t, wk_dtype dtype, int nd, const int64_t *size) {
    *t = (operand){.v = {.slot = -1, .ndim = (uint8_t)nd, .dtype = (uint8_t)dtype, .numel = 1}};
    for (int d = nd - 1; d >= 0; d--) {
        t->size[d] = size[d];
        t->stride[d] = t->v.numel;
        t->v.numel *= size[d];
    }
    t->v.plain = true;
}

/* The view points into its operand, so this comes after the operand's last move. */
static void bind(operand *t) { t->v.size = t->size, t->v.stride = t->stride; }

static void give_memory(operand *t) {
    int64_t last = 0, step = 1;
    for (int d = 0; d < t->v.ndim; d++)
        last += (t->size[d] - 1) * t->stride[d];
    for (int d = t->v.ndim - 1; d >= 0; d--) {
        t->v.plain &= t->size[d] == 1 || t->stride[d] == step;
        step *= t->size[d];
    }
    t->bytes = t->v.numel ? (size_t)(last + 1) * (wk_dtype_bits((wk_dtype)t->v.dtype) / 8) : 0;
    t->v.data = t->bytes ? wkt_guarded(t->bytes) : NULL;
    if (t->bytes && !t->v.data)
        exit(1);
}

/* Any order of dimensions in memory, gaps between them, and now and then a stride of 0. */
static void scatter_strides(operand *t) {
    int order[WK_MAX_DIMS];
    int64_t step = wkt_below(3) == 0 ? 2 : 1;
    for (int i = 0; i < t->v.ndim; i++) {
        int j = (int)wkt_below((uint64_t)i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    for (int i = 0; i < t->v.ndim; i++) {
        int64_t n = t->size[order[i]];
        t->stride[order[i]] = step;
        if (wkt_below(8) == 0) {
            t->stride[order[i]] = 0;
            continue;
        }
        step = step * (n ? n : 1) + (wkt_below(3) == 0 ? wkt_range(1, 3) : 0);
    }
}

/* f32 of uniform numbers, with a NaN now and then when `nans`. */
static operand random_f32(int nd, const int64_t *size, bool nans) {
    operand t;
    describe(&t, WK_F32, nd, size);
    if (wkt_below(2))
        scatter_strides(&t);
    give_memory(&t);
    float *p = t.v.data;
    wkt_fill_uniform(p, t.bytes / sizeof *p, -1, 1);
    if (nans && t.bytes && wkt_below(4) == 0)
        p[wkt_below(t.bytes / sizeof *p)] = NAN;
    return t;
}

static operand random_index(wk_dtype dtype, int nd, const int64_t *size, int64_t limit) {
    operand t;
    describe(&t, dtype, nd, size);
    if (wkt_below(2))
        scatter_strides(&t);
    give_memory(&t);
    for (size_t i = 0; i < t.bytes / (dtype == WK_I64 ? 8 : 4); i++) {
        if (dtype == WK_I64)
            ((int64_t *)t.v.data)[i] = (int64_t)wkt_below((uint64_t)limit);
        else
            ((int32_t *)t.v.data)[i] = (int32_t)wkt_below((uint64_t)limit);
    }
    return t;
}

static operand absent(void) { return (operand){.v = {.slot = -1, .dtype = WK_DTYPE_COUNT}}; }

static operand result(wk_dtype dtype, int nd, const int64_t *size) {
    operand t;
    describe(&t, dtype, nd, size);
    give_memory(&t);
    return t;
}

static void release(operand *t) {
    if (t->v.data)
        wkt_guarded_free(t->v.data, t->bytes);
}

/* ---- running rows -------------------------------------------------------------------------------------- */

typedef struct {
    uint16_t op;
    const char *name;
    int nin, nout;
    operand in[3], out[2];
    int64_t ia[16];
    int64_t terms; /* of each sum, which bounds its rounding error; 0: exact */
} test_case;

typedef struct {
    wk_ctx c;
    wk_runtime rt;
    wki_op op;
    wki_view in[3], out[2];
    wki_launch l;
} stage;

/* The largest pool that tests use, made once; smaller ones too. */
static wki_pool *pool_of(int threads) {
    static wki_pool *pools[4];
    if (threads > 1 && !pools[threads])
        pools[threads] = wki_pool_new(threads);
    return pools[threads];
}

static void set_stage(stage *s, test_case *t, wki_isa isa, int threads) {
    memset(s, 0, sizeof *s);
    s->rt.isa = isa;
    s->rt.pool = pool_of(threads);
    s->c.rt = &s->rt;
    s->op.name = t->name;
    s->op.id = t->op;
    for (int i = 0; i < t->nin; i++) {
        bind(&t->in[i]);
        s->in[i] = t->in[i].v;
    }
    for (int i = 0; i < t->nout; i++) {
        bind(&t->out[i]);
        s->out[i] = t->out[i].v;
        if (t->out[i].bytes)
            memset(t->out[i].v.data, 0xff, t->out[i].bytes);
    }
    s->l = (wki_launch){
        .c = &s->c, .op = &s->op, .nin = t->nin, .nout = t->nout, .in = s->in, .out = s->out, .ia = t->ia};
}

/* Runs a row with exactly the scratch space it asks for, full of NaN. */
static bool run_row(stage *s, const wki_kernel *k) {
    size_t bytes = k->workspace ? k->workspace(&s->l) : 0;
    if (bytes) {
        CHECK_EQ_I(bytes % 64, 0);
        s->l.workspace = wkt_guarded(bytes);
        if (!s->l.workspace)
            exit(1);
        memset(s->l.workspace, 0xff, bytes);
    }
    int64_t before = wki_alloc_count();
    bool ok = k->run(&s->l);
    CHECK_EQ_I(wki_alloc_count(), before);
    if (bytes)
        wkt_guarded_free(s->l.workspace, bytes);
    return ok;
}

static const wki_kernel *reference_of(uint16_t op) {
    const wki_kernel *k = wki_kernels_of(op), *last = NULL;
    for (; k && k->op == op; k++)
        if (k->dev == WK_CPU)
            last = k;
    return last;
}

static void *copy_of(const operand *t) {
    void *p = malloc(t->bytes + 1);
    if (!p)
        exit(1);
    if (t->bytes)
        memcpy(p, t->v.data, t->bytes);
    return p;
}

/* The sums of absolute terms: what rounding errors are relative to. */
static float *magnitudes(test_case *t) {
    void *saved[3] = {NULL};
    stage s;
    for (int i = 0; i < 3; i++) {
        saved[i] = copy_of(&t->in[i]);
        float *p = t->in[i].v.data;
        for (size_t j = 0; t->in[i].v.dtype == WK_F32 && j < t->in[i].bytes / sizeof *p; j++)
            p[j] = fabsf(p[j]);
    }
    set_stage(&s, t, WKI_ISA_BASELINE, 1);
    CHECK(run_row(&s, reference_of(t->op)));
    float *m = copy_of(&t->out[0]);
    for (int i = 0; i < 3; i++) {
        if (t->in[i].bytes && saved[i])
            memcpy(t->in[i].v.data, saved[i], t->in[i].bytes);
        free(saved[i]);
    }
    return m;
}

static void check_near(const test_case *t, const wki_kernel *k, const float *want, const float *size,
                       wki_isa isa) {
    const float *got = t->out[0].v.data;
    for (int64_t i = 0; i < t->out[0].v.numel; i++) {
        double tol = (double)(t->terms + 4) * EPS * (double)size[i];
        if (!(isnan(want[i]) ? isnan(got[i]) : fabs((double)got[i] - (double)want[i]) <= tol)) {
            FAIL("%s on %s: element %lld is %.9g, not %.9g (tolerance %.3g)", k->name, wki_isa_name(isa),
                 (long long)i, (double)got[i], (double)want[i], tol);
            return;
        }
    }
}

static void check_same(const test_case *t, const wki_kernel *k, void *const *want, wki_isa isa, int threads) {
    for (int i = 0; i < 2; i++)
        if (t->out[i].bytes && want[i] && memcmp(t->out[i].v.data, want[i], t->out[i].bytes) != 0) {
            FAIL("%s on %s: output %d with %d threads differs", k->name, wki_isa_name(isa), i, threads);
            return;
        }
}

static void check_row(test_case *t, const wki_kernel *k, void *const *want, const float *size) {
    stage s;
    int best = (int)wki_cpu_isa();
    for (int isa = WKI_ISA_BASELINE; isa <= best; isa++) {
        void *first[2] = {NULL, NULL};
        for (int threads = 1; threads <= 3; threads++) {
            set_stage(&s, t, (wki_isa)isa, threads);
            if (!k->ok(&s.l))
                continue;
            if (!CHECK(run_row(&s, k)))
                FAIL("%s: %s", k->name, s.c.err.message);
            if (threads == 1) {
                for (int i = 0; i < 2; i++)
                    first[i] = copy_of(&t->out[i]);
                if (size)
                    check_near(t, k, want[0], size, (wki_isa)isa);
                else
                    check_same(t, k, want, (wki_isa)isa, threads);
            } else {
                check_same(t, k, first, (wki_isa)isa, threads);
            }
        }
        free(first[0]);
        free(first[1]);
    }
}

/* All rows of the case's op; frees the operands. */
static void check_case(test_case *t) {
    const wki_kernel *ref = reference_of(t->op);
    stage s;
    REQUIRE(ref != NULL);
    set_stage(&s, t, WKI_ISA_BASELINE, 1);
    CHECK(ref->ok(&s.l));
    if (!CHECK(run_row(&s, ref)))
        FAIL("%s: %s", ref->name, s.c.err.message);
    void *want[2] = {copy_of(&t->out[0]), t->nout > 1 ? copy_of(&t->out[1]) : NULL};
    float *size = t->terms ? magnitudes(t) : NULL;
    for (const wki_kernel *k = wki_kernels_of(t->op); k != ref; k++)
        if (k->dev == WK_CPU)
            check_row(t, k, want, size);
    free(want[0]);
    free(want[1]);
    free(size);
    for (int i = 0; i < t->nin; i++)
        release(&t->in[i]);
    for (int i = 0; i < t->nout; i++)
        release(&t->out[i]);
}

#define CASE(op_)                                                                                            \
    { .op = WKI_OP_##op_, .name = #op_ }

static int rounds(void) { return wkt_quick() ? 15 : 80; }

/* lo .. hi, now and then 0 and often 1. */
static int64_t some(int64_t lo, int64_t hi) {
    uint64_t r = wkt_below(24);
    return r == 0 ? 0 : r < 4 ? 1 : wkt_range(lo, hi);
}

TEST(kernels, rows_of_an_op_are_adjacent_and_end_with_the_reference) {
    const wki_kernel *k = wki_kernels_of(WKI_OP_copy_wide);
    for (; k->name; k++) {
        const wki_kernel *ref = reference_of(k->op);
        CHECK(ref && strstr(ref->name, "_reference"));
        CHECK(wki_kernels_of(k->op) <= k && (k->dev != WK_CPU || k <= ref));
        CHECK(k->ok && k->run);
        CHECK(!(k->flags & WKI_K_WORKSPACE) == !k->workspace);
    }
    CHECK(wki_kernels_of(WKI_OP_add) == NULL);
    CHECK(wki_kernels_of(UINT16_MAX) == NULL);
}

/* ---- copies -------------------------------------------------------------------------------------------- */

static void check_copy(operand x) {
    test_case t = CASE(copy_wide);
    t.nin = t.nout = 1;
    t.in[0] = x;
    t.out[0] = result(WK_I64, x.v.ndim, x.size);
    check_case(&t);
}

TEST(kernels, copy_wide) {
    for (int i = 0; i < rounds(); i++) {
        int64_t size[5];
        int nd = (int)wkt_range(0, 5);
        for (int d = 0; d < nd; d++)
            size[d] = some(1, 6);
        check_copy(random_index(WK_I64, nd, size, INT64_MAX));
    }
    int64_t flat = 100000, rows[2] = {7, 20000};
    check_copy(random_index(WK_I64, 1, &flat, INT64_MAX));
    check_copy(random_index(WK_I64, 2, rows, INT64_MAX));
}

TEST(kernels, copy_wide_transposes) {
    for (int i = 0; i < rounds(); i++) { /* (a, b, c) with its dimensions in another order in memory */
        int64_t size[3] = {some(1, 4), wkt_range(1, 150), wkt_range(1, 150)};
        int first = (int)wkt_below(3), second = (first + (int)wkt_range(1, 2)) % 3;
        operand x;
        describe(&x, WK_I64, 3, size);
        x.stride[first] = 1;
        x.stride[second] = size[first];
        x.stride[3 - first - second] = size[first] * size[second];
        give_memory(&x);
        for (size_t j = 0; j < x.bytes / 8; j++)
            ((int64_t *)x.v.data)[j] = (int64_t)wkt_u64();
        check_copy(x);
    }
}

TEST(kernels, pad_slice) {
    for (int i = 0; i < rounds(); i++) {
        test_case t = CASE(pad_slice);
        int64_t size[5], from[5];
        int nd = (int)wkt_range(1, 5), dim = (int)wkt_below((uint64_t)nd);
        for (int d = 0; d < nd; d++)
            size[d] = from[d] = some(1, i % 10 == 0 ? 20 : 6);
        int64_t step = wkt_range(1, 3), start = (int64_t)wkt_below((uint64_t)size[dim] + 1);
        int64_t most = (size[dim] - start + step - 1) / step;
        from[dim] = (int64_t)wkt_below((uint64_t)most + 1);
        t.nin = t.nout = 1;
        t.ia[0] = nd;
        memcpy(t.ia + 1, size, sizeof *size * (size_t)nd);
        t.ia[1 + nd] = dim, t.ia[2 + nd] = start, t.ia[3 + nd] = step;
        t.in[0] = random_f32(nd, from, true);
        t.out[0] = result(WK_F32, nd, size);
        check_case(&t);
    }
}

/* ---- matrix products ----------------------------------------------------------------------------------- */

TEST(kernels, bmm) {
    for (int i = 0; i < rounds(); i++) {
        test_case t = CASE(bmm);
        int nd = (int)wkt_range(2, 5), most = i % 8 == 0 ? 70 : 20;
        int64_t a[5], b[5], y[5], m = some(1, most), n = some(1, most), k = some(1, i % 8 == 0 ? 300 : 40);
        for (int d = 0; d < nd - 2; d++)
            a[d] = b[d] = y[d] = some(1, 4);
        a[nd - 2] = y[nd - 2] = m;
        a[nd - 1] = b[nd - 2] = k;
        b[nd - 1] = y[nd - 1] = n;
        t.nin = 2, t.nout = 1, t.terms = k;
        t.in[0] = random_f32(nd, a, true);
        t.in[1] = random_f32(nd, b, true);
        t.out[0] = result(WK_F32, nd, y);
        check_case(&t);
    }
}

TEST(kernels, linear) {
    for (int i = 0; i < rounds(); i++) {
        test_case t = CASE(linear);
        int nd = (int)wkt_range(1, 4);
        int64_t x[4], y[4], n = some(1, 50), k = some(1, i % 8 == 0 ? 600 : 50), w[2] = {n, k};
        for (int d = 0; d < nd - 1; d++)
            x[d] = y[d] = some(1, i % 8 == 0 ? 40 : 9);
        x[nd - 1] = k;
        y[nd - 1] = n;
        t.nin = 3, t.nout = 1, t.terms = k + 1;
        t.in[0] = random_f32(nd, x, true);
        t.in[1] = random_f32(2, w, true);
        t.in[2] = wkt_below(2) ? random_f32(1, &n, true) : absent();
        t.out[0] = result(WK_F32, nd, y);
        check_case(&t);
    }
}

/* ---- convolution --------------------------------------------------------------------------------------- */

typedef struct {
    int64_t x[4], w[4], y[4], s[4]; /* s: strides, paddings */
} conv_shape;

/* A window may be larger than the image, wholly in the padding, or shorter than the step to the next. */
static conv_shape random_conv(bool large) {
    for (;;) {
        conv_shape g;
        g.x[0] = some(1, large ? 9 : 4), g.x[1] = some(1, large ? 24 : 5);
        g.x[2] = some(1, large ? 24 : 9), g.x[3] = some(1, large ? 40 : 9);
        g.w[0] = some(1, large ? 20 : 7), g.w[1] = g.x[1];
        g.w[2] = wkt_range(1, 4), g.w[3] = wkt_below(3) ? g.w[2] : wkt_range(1, 5);
        bool simple = wkt_below(3) == 0;
        for (int i = 0; i < 2; i++) {
            g.s[i] = simple ? 1 : wkt_range(1, 4);
            g.s[2 + i] = simple ? g.w[2 + i] / 2 : wkt_range(0, 3);
            g.y[2 + i] = (g.x[2 + i] + 2 * g.s[2 + i] - g.w[2 + i]) / g.s[i] + 1;
        }
        g.y[0] = g.x[0], g.y[1] = g.w[0];
        int64_t work = g.y[0] * g.y[1] * g.y[2] * g.y[3] * g.w[1] * g.w[2] * g.w[3];
        if (g.x[2] + 2 * g.s[2] >= g.w[2] && g.x[3] + 2 * g.s[3] >= g.w[3] &&
            work < (large ? 4000000 : 200000))
            return g;
    }
}

static int64_t product(const int64_t *s, int n) {
    int64_t p = 1;
    for (int i = 0; i < n; i++)
        p *= s[i];
    return p;
}

static void check_conv(const conv_shape *g) {
    test_case t = CASE(conv2d);
    t.nin = 3, t.nout = 1, t.terms = product(g->w + 1, 3) + 1;
    t.in[0] = random_f32(4, g->x, true);
    t.in[1] = random_f32(4, g->w, true);
    t.in[2] = wkt_below(2) ? random_f32(1, g->w, true) : absent();
    t.out[0] = result(WK_F32, 4, g->y);
    memcpy(t.ia, g->s, sizeof g->s);
    check_case(&t);
}

static void check_conv_dx(const conv_shape *g) {
    test_case t = CASE(conv2d_dx);
    t.nin = 2, t.nout = 1, t.terms = g->w[0] * g->w[2] * g->w[3] + 1;
    t.in[0] = random_f32(4, g->y, true);
    t.in[1] = random_f32(4, g->w, true);
    t.out[0] = result(WK_F32, 4, g->x);
    memcpy(t.ia, g->x + 2, 2 * sizeof *t.ia);
    memcpy(t.ia + 2, g->s, sizeof g->s);
    check_case(&t);
}

static void check_conv_dw(const conv_shape *g) {
    test_case t = CASE(conv2d_dw);
    t.nin = 2, t.nout = 1, t.terms = g->y[0] * g->y[2] * g->y[3] + 1;
    t.in[0] = random_f32(4, g->y, true);
    t.in[1] = random_f32(4, g->x, true);
    t.out[0] = result(WK_F32, 4, g->w);
    memcpy(t.ia, g->w + 2, 2 * sizeof *t.ia);
    memcpy(t.ia + 2, g->s, sizeof g->s);
    check_case(&t);
}

static void each_conv(void (*check)(const conv_shape *)) {
    for (int i = 0; i < rounds(); i++) {
        conv_shape g = random_conv(i % 8 == 0);
        check(&g);
    }
    /* Several blocks of window rows and of channels, a kernel wider than the image's vectors' masks, and a
       1 x 1 kernel that needs no columns. */
    static const conv_shape fixed[] = {
        {{3, 24, 30, 30}, {5, 24, 3, 3}, {3, 5, 30, 30}, {1, 1, 1, 1}},
        {{2, 70, 9, 9}, {4, 70, 3, 3}, {2, 4, 5, 5}, {2, 2, 1, 1}},
        {{17, 1, 28, 28}, {16, 1, 3, 3}, {17, 16, 28, 28}, {1, 1, 1, 1}},
        {{17, 16, 14, 14}, {32, 16, 3, 3}, {17, 32, 14, 14}, {1, 1, 1, 1}},
        {{2, 3, 20, 37}, {4, 3, 2, 19}, {2, 4, 21, 37}, {1, 1, 1, 9}},
        {{2, 5, 33, 70}, {6, 5, 3, 3}, {2, 6, 17, 35}, {2, 2, 1, 1}},
        {{4, 60, 21, 20}, {33, 60, 1, 1}, {4, 33, 21, 20}, {1, 1, 0, 0}},
    };
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        check(&fixed[i]);
}

TEST(kernels, conv2d) { each_conv(check_conv); }
TEST(kernels, conv2d_dx) { each_conv(check_conv_dx); }
TEST(kernels, conv2d_dw) { each_conv(check_conv_dw); }

/* ---- pooling ------------------------------------------------------------------------------------------- */

static void pool_shape(int64_t *x, int64_t *y, int64_t *ia, bool simple) {
    x[0] = some(1, 5), x[1] = some(1, 6);
    for (int i = 0; i < 2; i++) {
        ia[i] = simple ? 2 : wkt_range(1, 4);
        ia[2 + i] = simple ? 2 : wkt_range(1, 4);
        ia[4 + i] = simple ? 0 : wkt_range(0, ia[i] / 2);
        x[2 + i] = wkt_range(ia[i], simple ? 80 : 20);
        y[2 + i] = (x[2 + i] + 2 * ia[4 + i] - ia[i]) / ia[2 + i] + 1;
    }
    y[0] = x[0], y[1] = x[1];
}

TEST(kernels, max_pool2d) {
    for (int i = 0; i < rounds(); i++) {
        test_case t = CASE(max_pool2d);
        int64_t x[4], y[4];
        pool_shape(x, y, t.ia, i % 2);
        t.nin = 1, t.nout = 2;
        t.in[0] = random_f32(4, x, true);
        float *p = t.in[0].v.data;
        for (size_t j = 0; j < t.in[0].bytes / sizeof *p; j++) { /* many equals, some NaN and infinities */
            p[j] = roundf(p[j] * 2);
            if (wkt_below(16) == 0)
                p[j] = wkt_below(2) ? NAN : -INFINITY;
        }
        t.out[0] = result(WK_F32, 4, y);
        t.out[1] = result(WK_I32, 4, y);
        check_case(&t);
    }
}

TEST(kernels, max_pool2d_keeps_the_first_maximum_and_nan) {
    float x[16] = {1,         1,         0, NAN,   1,         1,         NAN,   9,
                   -INFINITY, -INFINITY, 0, -0.0f, -INFINITY, -INFINITY, -0.0f, 0};
    int64_t size[4] = {1, 1, 4, 4}, half[4] = {1, 1, 2, 2};
    for (const wki_kernel *k = wki_kernels_of(WKI_OP_max_pool2d); k->op == WKI_OP_max_pool2d; k++) {
        test_case t = CASE(max_pool2d);
        stage s;
        if (k->dev != WK_CPU)
            continue;
        t.nin = 1, t.nout = 2;
        for (int i = 0; i < 4; i++)
            t.ia[i] = 2;
        t.in[0] = result(WK_F32, 4, size);
        memcpy(t.in[0].v.data, x, sizeof x);
        t.out[0] = result(WK_F32, 4, half);
        t.out[1] = result(WK_I32, 4, half);
        set_stage(&s, &t, wki_cpu_isa(), 1);
        CHECK(run_row(&s, k));
        const float *y = t.out[0].v.data;
        const int32_t *idx = t.out[1].v.data;
        CHECK(y[0] == 1 && isnan(y[1]) && y[2] == -INFINITY && y[3] == 0);
        CHECK(idx[0] == 0 && idx[1] == 3 && idx[2] == 8 && idx[3] == 10);
        release(&t.in[0]);
        release(&t.out[0]);
        release(&t.out[1]);
    }
}

TEST(kernels, max_pool2d_grad_and_gather) {
    for (int i = 0; i < rounds(); i++) {
        test_case grad = CASE(max_pool2d_grad), gather = CASE(max_pool2d_gather);
        int64_t x[4], y[4], ia[6];
        pool_shape(x, y, ia, i % 2);
        grad.nin = gather.nin = 2, grad.nout = gather.nout = 1;
        grad.ia[0] = x[2], grad.ia[1] = x[3];
        grad.in[0] = random_f32(4, y, true);
        grad.in[1] = random_index(WK_I32, 4, y, x[2] * x[3]);
        grad.out[0] = result(WK_F32, 4, x);
        check_case(&grad);
        gather.in[0] = random_f32(4, x, true);
        gather.in[1] = random_index(WK_I32, 4, y, x[2] * x[3]);
        gather.out[0] = result(WK_F32, 4, y);
        check_case(&gather);
    }
}

/* ---- indexing ------------------------------------------------------------------------------------------ */

static void random_indices(int *nd, int64_t *size, bool large) {
    *nd = (int)wkt_range(0, 3);
    for (int d = 0; d < *nd; d++)
        size[d] = some(1, large ? 20 : 5);
}

TEST(kernels, embedding_and_its_gradient) {
    for (int i = 0; i < rounds(); i++) {
        test_case take = CASE(embedding), grad = CASE(embedding_grad);
        int64_t size[4], table[2] = {wkt_range(1, 30), some(1, i % 8 == 0 ? 150 : 20)};
        int nd;
        random_indices(&nd, size, i % 8 == 0);
        take.nin = grad.nin = 2, take.nout = grad.nout = 1;
        take.in[0] = random_f32(2, table, true);
        take.in[1] = random_index(WK_I64, nd, size, table[0]);
        grad.in[1] = random_index(WK_I64, nd, size, table[0]);
        size[nd] = table[1];
        take.out[0] = result(WK_F32, nd + 1, size);
        grad.in[0] = random_f32(nd + 1, size, true);
        grad.ia[0] = table[0];
        grad.out[0] = result(WK_F32, 2, table);
        check_case(&take);
        check_case(&grad);
    }
}

static operand zero_index(wk_dtype dtype, int nd, const int64_t *size) {
    operand t = result(dtype, nd, size);
    if (t.v.data)
        memset(t.v.data, 0, t.bytes);
    return t;
}

/* Every row of an op must fail on the case, with this message, for any number of threads. */
static void check_fails(test_case *t, const char *message) {
    stage s;
    for (const wki_kernel *k = wki_kernels_of(t->op); k->op == t->op; k++) {
        for (int threads = 1; threads <= 3 && k->dev == WK_CPU; threads++) {
            set_stage(&s, t, wki_cpu_isa(), threads);
            if (!k->ok(&s.l))
                continue;
            CHECK(!run_row(&s, k));
            CHECK_EQ_I(s.c.failed, WK_INDEX);
            if (message)
                CHECK_STR(s.c.err.message, message);
        }
    }
    for (int i = 0; i < t->nin; i++)
        release(&t->in[i]);
    release(&t->out[0]);
}

TEST(kernels, indices_out_of_range_are_errors) {
    int64_t n = 3000, table[2] = {10, 24}, rows[2] = {n, 24};
    test_case take = CASE(embedding), grad = CASE(embedding_grad);
    take.nin = grad.nin = 2, take.nout = grad.nout = 1;
    take.in[0] = random_f32(2, table, false);
    take.in[1] = zero_index(WK_I64, 1, &n);
    take.out[0] = result(WK_F32, 2, rows);
    grad.ia[0] = table[0];
    grad.in[0] = random_f32(2, rows, false);
    grad.in[1] = zero_index(WK_I64, 1, &n);
    grad.out[0] = result(WK_F32, 2, table);
    test_case *both[2] = {&take, &grad};
    for (int i = 0; i < 2; i++) {
        int64_t *idx = both[i]->in[1].v.data;
        REQUIRE(idx != NULL);
        idx[700] = 10;
        idx[2900] = -1;
        check_fails(both[i], "index 10 at position 700 is out of range for 10 rows");
    }
    int64_t x[4] = {2, 3, 8, 8}, y[4] = {2, 3, 4, 4};
    test_case scatter = CASE(max_pool2d_grad), gather = CASE(max_pool2d_gather);
    scatter.nin = gather.nin = 2, scatter.nout = gather.nout = 1;
    scatter.ia[0] = scatter.ia[1] = 8;
    scatter.in[0] = random_f32(4, y, false);
    scatter.in[1] = zero_index(WK_I32, 4, y);
    scatter.out[0] = result(WK_F32, 4, x);
    gather.in[0] = random_f32(4, x, false);
    gather.in[1] = zero_index(WK_I32, 4, y);
    gather.out[0] = result(WK_F32, 4, y);
    int32_t *to = scatter.in[1].v.data, *from = gather.in[1].v.data;
    REQUIRE(to && from);
    to[77] = 64;
    from[13] = -1;
    check_fails(&scatter, NULL);
    check_fails(&gather, NULL);
}
