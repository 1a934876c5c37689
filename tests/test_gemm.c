/* The packed GEMM (src/backend/cpu/gemm) against its slow twin: fresh random shapes, strides and epilogues, every
 * tier that this CPU has. Operands, result and workspace end at forbidden pages where that matters. */
#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/gemm.h"
#include "harness.h"
#include "util_guard.h"

/* ---- One problem with its memory ---------------------------------------------------------------------------- */

typedef struct {
    float *base;
    size_t n; /* floats */
} buffer;

typedef struct {
    wki_gemm g;
    buffer a, b, c, bias_n, bias_m;
} problem;

static buffer make_buffer(size_t n) {
    buffer b = {wkt_guarded((n + !n) * sizeof(float)), n};
    if (b.base)
        wkt_fill_uniform(b.base, n, -1, 1);
    return b;
}

static void free_buffer(buffer *b) {
    if (b->base)
        wkt_guarded_free(b->base, (b->n + !b->n) * sizeof(float));
}

/* How an operand lies in memory. */
enum { ROW_MAJOR, COLUMN_MAJOR, STRIDED, FLIPPED, BROADCAST_ROWS, BROADCAST_COLUMNS, LAYOUTS };

typedef struct {
    int64_t rs, cs, bs;
    const float *origin;
} layout;

/* Strides for a (rows, cols) operand, and memory that ends with its last element. */
static layout lay_out(buffer *buf, int kind, int64_t rows, int64_t cols, int64_t batch, bool shared) {
    int64_t pad = wkt_range(0, 3), gap = wkt_range(2, 3);
    layout l = {cols + pad, 1, 0, NULL};
    if (kind == COLUMN_MAJOR)
        l = (layout){1, rows + pad, 0, NULL};
    else if (kind == STRIDED)
        l = (layout){cols * gap + pad, gap, 0, NULL};
    else if (kind == BROADCAST_ROWS)
        l.rs = 0;
    else if (kind == BROADCAST_COLUMNS)
        l = (layout){1 + pad, 0, 0, NULL};
    int64_t last = (rows > 0 ? (rows - 1) * l.rs : 0) + (cols > 0 ? (cols - 1) * l.cs : 0);
    l.bs = shared ? 0 : last + 1 + pad;
    int64_t size = rows > 0 && cols > 0 && batch > 0 ? (batch - 1) * l.bs + last + 1 : 0;
    *buf = make_buffer((size_t)size);
    l.origin = buf->base;
    if (kind == FLIPPED && size > 0) {
        l.origin += last;
        l.rs = -l.rs;
        l.cs = -l.cs;
    }
    return l;
}

static bool make_problem(problem *p, int64_t m, int64_t n, int64_t k, int64_t batch, int a_kind, int b_kind) {
    wki_gemm *g = &p->g;
    *g = (wki_gemm){.m = m, .n = n, .k = k, .batch = batch, .alpha = 1};
    layout a = lay_out(&p->a, a_kind, m, k, batch, wkt_below(3) == 0);
    layout b = lay_out(&p->b, b_kind, k, n, batch, wkt_below(3) == 0);
    g->a = a.origin, g->a_rs = a.rs, g->a_cs = a.cs, g->a_bs = a.bs;
    g->b = b.origin, g->b_rs = b.rs, g->b_cs = b.cs, g->b_bs = b.bs;
    g->c_rs = n + (wkt_below(2) ? wkt_range(0, 5) : 0);
    g->c_bs = m * g->c_rs + (wkt_below(2) ? wkt_range(0, 5) : 0);
    bool empty = m <= 0 || n <= 0 || batch <= 0;
    p->c = make_buffer(empty ? 0 : (size_t)((batch - 1) * g->c_bs + (m - 1) * g->c_rs + n));
    p->bias_n = make_buffer((size_t)n);
    p->bias_m = make_buffer((size_t)m);
    g->c = p->c.base;
    return p->a.base && p->b.base && p->c.base && p->bias_n.base && p->bias_m.base;
}

static void random_epilogue(problem *p) {
    static const float alphas[] = {1, 1, -1, 0.37f, 3}, betas[] = {0, 0, 1, -0.6f};
    p->g.alpha = alphas[wkt_below(5)];
    p->g.beta = betas[wkt_below(4)];
    p->g.bias_n = wkt_below(2) ? p->bias_n.base : NULL;
    p->g.bias_m = wkt_below(3) ? NULL : p->bias_m.base;
    p->g.act = wkt_below(2) ? WKI_ACT_RELU : WKI_ACT_NONE;
}

static void free_problem(problem *p) {
    buffer *all[] = {&p->a, &p->b, &p->c, &p->bias_n, &p->bias_m};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free_buffer(all[i]);
}

/* Runs into `c` (same layout as g->c) with a workspace of exactly the size asked for, `offset` floats off its
 * alignment. False when memory is short. */
static bool run(const wki_gemm *g, float *c, wki_isa isa, wki_pool *pool, size_t offset) {
    wki_gemm to = *g;
    to.c = c;
    size_t bytes = wki_gemm_workspace(&to, isa, wki_pool_size(pool));
    CHECK_EQ_I(bytes % 64, 0);
    size_t room = bytes + offset * sizeof(float);
    char *ws = room ? wkt_guarded(room) : NULL;
    if (room && !ws)
        return CHECK(!"memory");
    if (ws)
        memset(ws, 0xff, room); /* NaN */
    wki_gemm_run(&to, isa, pool, bytes ? ws : NULL);
    if (ws)
        wkt_guarded_free(ws, room);
    return true;
}

/* ---- Error bound ---------------------------------------------------------------------------------------------- */

static void take_abs(buffer *to, const buffer *from) {
    *to = make_buffer(from->n);
    for (size_t i = 0; to->base && i < from->n; i++)
        to->base[i] = fabsf(from->base[i]);
}

/* size[i] = |alpha| sum |a b| + |beta c| + |bias_n| + |bias_m|: by Higham, "Accuracy and Stability of Numerical
 * Algorithms", section 3.1, a sum of k + 3 rounded terms in any order is off by at most (k + 3) u / (1 - (k + 3) u)
 * times that, u = eps / 2. */
static bool term_sizes(const problem *p, buffer *size) {
    problem q = {.g = p->g};
    take_abs(&q.a, &p->a);
    take_abs(&q.b, &p->b);
    take_abs(&q.c, &p->c);
    take_abs(&q.bias_n, &p->bias_n);
    take_abs(&q.bias_m, &p->bias_m);
    bool ok = q.a.base && q.b.base && q.c.base && q.bias_n.base && q.bias_m.base;
    if (ok) {
        q.g.a = q.a.base + (p->g.a - p->a.base);
        q.g.b = q.b.base + (p->g.b - p->b.base);
        q.g.c = q.c.base;
        q.g.bias_n = p->g.bias_n ? q.bias_n.base : NULL;
        q.g.bias_m = p->g.bias_m ? q.bias_m.base : NULL;
        q.g.alpha = fabsf(q.g.alpha);
        q.g.beta = fabsf(q.g.beta);
        q.g.act = WKI_ACT_NONE;
        wki_gemm_reference(&q.g);
    }
    *size = q.c;
    q.c.base = NULL;
    free_problem(&q);
    return CHECK(ok && size->base);
}

/* Elements inside the matrices within the bound, the gaps between them untouched. */
static void compare(const problem *p, const float *got, const float *want, const float *size,
                    const char *tier) {
    const wki_gemm *g = &p->g;
    double u = FLT_EPSILON / 2, terms = (double)g->k + 4, factor = terms * u / (1 - terms * u);
    size_t wrong = 0, first = 0;
    for (size_t i = 0; i < p->c.n; i++) {
        int64_t in_matrix = (int64_t)i % g->c_bs;
        bool inside = in_matrix / g->c_rs < g->m && in_matrix % g->c_rs < g->n;
        double bound = inside ? factor * size[i] + u * fabs((double)want[i]) + FLT_MIN : 0;
        bool same = got[i] == want[i] || (isnan(got[i]) && isnan(want[i])) ||
                    fabs((double)got[i] - (double)want[i]) <= bound;
        if (!same && wrong++ == 0)
            first = i;
    }
    if (wrong)
        FAIL("%s m=%lld n=%lld k=%lld batch=%lld A(%lld,%lld,%lld) B(%lld,%lld,%lld) alpha=%g beta=%g bias "
             "%d %d "
             "act=%d: %zu wrong, first at %zu: %.9g, expected %.9g",
             tier, (long long)g->m, (long long)g->n, (long long)g->k, (long long)g->batch, (long long)g->a_rs,
             (long long)g->a_cs, (long long)g->a_bs, (long long)g->b_rs, (long long)g->b_cs,
             (long long)g->b_bs, (double)g->alpha, (double)g->beta, !!g->bias_n, !!g->bias_m, (int)g->act,
             wrong, first, (double)got[first], (double)want[first]);
}

/* Every tier against the reference. */
static void check_problem(problem *p) {
    buffer size = {0}, want = make_buffer(p->c.n), got = make_buffer(p->c.n);
    size_t bytes = p->c.n * sizeof(float);
    if (CHECK(want.base && got.base) && term_sizes(p, &size)) {
        memcpy(want.base, p->c.base, bytes);
        wki_gemm ref = p->g;
        ref.c = want.base;
        wki_gemm_reference(&ref);
        for (wki_isa isa = WKI_ISA_BASELINE; isa <= wki_cpu_isa(); isa++) {
            memcpy(got.base, p->c.base, bytes);
            if (run(&p->g, got.base, isa, NULL, 0))
                compare(p, got.base, want.base, size.base, wki_isa_name(isa));
        }
    }
    free_buffer(&size);
    free_buffer(&want);
    free_buffer(&got);
}

static void check_shape(int64_t m, int64_t n, int64_t k, int64_t batch, int a_kind, int b_kind) {
    problem p;
    if (CHECK(make_problem(&p, m, n, k, batch, a_kind, b_kind))) {
        random_epilogue(&p);
        check_problem(&p);
    }
    free_problem(&p);
}

/* ---- Tests ---------------------------------------------------------------------------------------------------- */

TEST(gemm, reference_by_hand) {
    float a[] = {1, 2, 3, 4, 5, 6}, b[] = {1, -1, 0, 2, 3, 1}, c[] = {10, 20, 30, 40};
    float bias_n[] = {0.5f, -100}, bias_m[] = {1, 2};
    wki_gemm g = {.m = 2, .n = 2, .k = 3, .batch = 1, .alpha = 2, .beta = 0.5f, .act = WKI_ACT_RELU};
    g.a = a, g.a_rs = 3, g.a_cs = 1;
    g.b = b, g.b_rs = 2, g.b_cs = 1;
    g.c = c, g.c_rs = 2;
    g.bias_n = bias_n, g.bias_m = bias_m;
    wki_gemm_reference(&g);
    /* A B = (10 6; 22 12) */
    CHECK_NEAR(c[0], 26.5, 0); /* 20 + 5 + 0.5 + 1 */
    CHECK_NEAR(c[1], 0, 0);    /* 12 + 10 - 100 + 1 */
    CHECK_NEAR(c[2], 61.5, 0);
    CHECK_NEAR(c[3], 0, 0);
}

static int64_t random_extent(void) {
    static const int64_t edges[] = {0,  1,  2,  6,  7,  8,  13, 14, 15, 16, 17,
                                    28, 29, 31, 32, 33, 48, 63, 64, 65, 97, 127};
    return wkt_below(3) ? edges[wkt_below(sizeof edges / sizeof edges[0])] : wkt_range(1, 140);
}

TEST(gemm, random_problems) {
    int rounds = wkt_quick() ? 150 : 1500;
    for (int i = 0; i < rounds; i++) {
        int64_t k = wkt_below(10) ? random_extent() : wkt_range(250, 900);
        int64_t batch = wkt_below(4) ? 1 : wkt_range(0, 5);
        check_shape(random_extent(), random_extent(), k, batch, (int)wkt_below(LAYOUTS),
                    (int)wkt_below(LAYOUTS));
    }
}

/* Every height and width of tile, with k around the unrolling of the packing routines. */
TEST(gemm, every_tile) {
    for (int64_t m = 1; m <= 15; m++)
        for (int64_t n = 1; n <= 34; n += wkt_quick() ? 3 : 1)
            check_shape(m, n, wkt_range(1, 40), 1, (int)wkt_below(LAYOUTS), (int)wkt_below(LAYOUTS));
}

TEST(gemm, layouts_of_an_mlp) {
    static const int64_t shapes[][3] = {{32, 64, 64}, {64, 64, 32}, {64, 64, 64},
                                        {32, 10, 64}, {32, 64, 10}, {10, 64, 32}};
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (int a_kind = ROW_MAJOR; a_kind <= COLUMN_MAJOR; a_kind++)
            for (int b_kind = ROW_MAJOR; b_kind <= COLUMN_MAJOR; b_kind++)
                check_shape(shapes[s][0], shapes[s][1], shapes[s][2], 1, a_kind, b_kind);
}

TEST(gemm, vectors) {
    for (int i = 0; i < 40; i++) {
        int64_t n = wkt_range(1, 300), k = wkt_range(1, 600);
        check_shape(1, n, k, wkt_range(1, 3), (int)wkt_below(LAYOUTS), (int)wkt_below(LAYOUTS));
        check_shape(n, 1, k, wkt_range(1, 3), (int)wkt_below(LAYOUTS), (int)wkt_below(LAYOUTS));
    }
}

TEST(gemm, long_sums) {
    check_shape(3, 5, 100003, 1, ROW_MAJOR, COLUMN_MAJOR);
    check_shape(17, 33, 20011, 1, COLUMN_MAJOR, ROW_MAJOR);
}

/* Sizes past one block in each dimension, so that operands are packed and blocks of k add up. */
TEST(gemm, several_blocks) {
    static const int64_t shapes[][3] = {{300, 200, 700}, {701, 137, 300}, {40, 3200, 70}, {150, 2100, 300}};
    int count = wkt_quick() ? 1 : 4;
    for (int s = 0; s < count; s++)
        for (int i = 0; i < (wkt_quick() ? 1 : 3); i++)
            check_shape(shapes[s][0], shapes[s][1], shapes[s][2], 1, (int)wkt_below(LAYOUTS),
                        (int)wkt_below(LAYOUTS));
}

TEST(gemm, empty_outputs_are_left_alone) {
    float c = 5;
    wki_gemm g = {.m = 1, .n = 1, .k = 3, .batch = 1, .c = &c, .c_rs = 1, .alpha = 1};
    int64_t *extents[] = {&g.m, &g.n, &g.batch};
    for (int i = 0; i < 3; i++) {
        *extents[i] = 0;
        CHECK_EQ_I(wki_gemm_workspace(&g, wki_cpu_isa(), 4), 0);
        wki_gemm_run(&g, wki_cpu_isa(), NULL, NULL);
        *extents[i] = 1;
    }
    CHECK_NEAR(c, 5, 0);
}

TEST(gemm, no_terms) {
    float c[] = {4, -8}, bias[] = {1, 1};
    wki_gemm g = {.m = 1, .n = 2, .k = 0, .batch = 1, .c = c, .c_rs = 2, .alpha = INFINITY, .beta = 0.5f};
    g.bias_n = bias;
    g.act = WKI_ACT_RELU;
    wki_gemm_run(&g, wki_cpu_isa(), NULL, NULL);
    CHECK_NEAR(c[0], 3, 0);
    CHECK_NEAR(c[1], 0, 0);
}

/* Sizes near the end of int64_t must give a small number, not a wrapped one; nothing is touched. */
TEST(gemm, workspace_is_bounded) {
    int64_t big = (int64_t)1 << 40;
    wki_gemm g = {
        .m = big, .n = big, .k = big, .batch = big, .a_rs = 1, .a_cs = 1, .b_rs = 1, .b_cs = 2, .alpha = 1};
    for (wki_isa isa = WKI_ISA_BASELINE; isa <= wki_cpu_isa(); isa++)
        for (int threads = 1; threads <= 256; threads *= 2)
            CHECK(wki_gemm_workspace(&g, isa, threads) <= (size_t)threads * (32 << 20));
}

static void sprinkle(buffer *b, const float *values, int kinds) {
    for (int i = 0; i < 3 && b->n; i++)
        b->base[wkt_below(b->n)] = values[wkt_below((uint64_t)kinds)];
}

TEST(gemm, nan_and_infinity_propagate) {
    static const float odd[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < (wkt_quick() ? 30 : 200); i++) {
        problem p;
        if (CHECK(make_problem(&p, wkt_range(1, 70), wkt_range(1, 70), wkt_range(1, 70), 1,
                               (int)wkt_below(LAYOUTS), (int)wkt_below(LAYOUTS)))) {
            random_epilogue(&p);
            sprinkle(&p.a, odd, 3);
            sprinkle(&p.b, odd, 3);
            if (wkt_below(2))
                sprinkle(&p.bias_n, odd, 3);
            check_problem(&p);
        }
        free_problem(&p);
    }
}

TEST(gemm, beta_zero_does_not_read_c) {
    for (int i = 0; i < 100; i++) {
        problem p;
        if (CHECK(make_problem(&p, wkt_range(1, 40), wkt_range(1, 40), wkt_range(0, 300), 1, ROW_MAJOR,
                               ROW_MAJOR))) {
            random_epilogue(&p);
            p.g.beta = 0;
            for (int64_t r = 0; r < p.g.m; r++)
                for (int64_t j = 0; j < p.g.n; j++)
                    p.g.c[r * p.g.c_rs + j] = NAN;
            check_problem(&p);
            for (wki_isa isa = WKI_ISA_BASELINE; isa <= wki_cpu_isa(); isa++) {
                run(&p.g, p.g.c, isa, NULL, 0);
                CHECK(!isnan(p.g.c[0]));
                p.g.c[0] = NAN;
            }
        }
        free_problem(&p);
    }
}

/* ---- Threads -------------------------------------------------------------------------------------------------- */

/* The same bits for any number of threads and any place of the workspace. */
static void check_same_bits(problem *p, wki_pool *const *pools, int npools) {
    buffer want = make_buffer(p->c.n), got = make_buffer(p->c.n);
    size_t bytes = p->c.n * sizeof(float);
    REQUIRE(want.base && got.base);
    for (wki_isa isa = WKI_ISA_BASELINE; isa <= wki_cpu_isa(); isa++) {
        memcpy(want.base, p->c.base, bytes);
        run(&p->g, want.base, isa, NULL, 0);
        for (int i = 0; i < npools; i++) {
            memcpy(got.base, p->c.base, bytes);
            run(&p->g, got.base, isa, pools[i], (size_t)wkt_below(17));
            CHECK_MEM(got.base, want.base, bytes);
        }
    }
    free_buffer(&want);
    free_buffer(&got);
}

TEST(gemm, threads_do_not_change_bits) {
    static const int64_t shapes[][4] = {{300, 200, 150, 1}, {33, 1500, 130, 1}, {1500, 33, 130, 1},
                                        {1, 3000, 900, 1},  {3000, 1, 900, 1},  {64, 64, 64, 20},
                                        {130, 130, 130, 3}, {7, 5, 130000, 1},  {290, 3300, 20, 1}};
    wki_pool *pools[] = {wki_pool_new(1), wki_pool_new(2), wki_pool_new(3), wki_pool_new(7)};
    int count = wkt_quick() ? 5 : (int)(sizeof shapes / sizeof shapes[0]);
    for (int s = 0; s < count; s++) {
        const int64_t *d = shapes[s];
        for (int transposed = 0; transposed < 2; transposed++) {
            problem p;
            int b_kind = transposed ? COLUMN_MAJOR : (int)wkt_below(LAYOUTS);
            if (CHECK(make_problem(&p, d[0], d[1], d[2], d[3], (int)wkt_below(LAYOUTS), b_kind))) {
                random_epilogue(&p);
                check_same_bits(&p, pools, 4);
            }
            free_problem(&p);
        }
    }
    for (int i = 0; i < 4; i++)
        wki_pool_free(pools[i]);
}

typedef struct {
    const problem *p;
    wki_pool *pool;
    const float *want;
    int wrong;
} caller;

static void *call_often(void *arg) {
    caller *c = arg;
    size_t bytes = c->p->c.n * sizeof(float);
    float *got = malloc(bytes);
    for (int i = 0; got && i < 20; i++) {
        memcpy(got, c->p->c.base, bytes);
        run(&c->p->g, got, wki_cpu_isa(), c->pool, 0);
        c->wrong += memcmp(got, c->want, bytes) != 0;
    }
    free(got);
    return NULL;
}

TEST(gemm, several_callers_on_one_pool) {
    problem p;
    wki_pool *pool = wki_pool_new(3);
    buffer want = {0};
    if (CHECK(make_problem(&p, 200, 150, 100, 1, ROW_MAJOR, COLUMN_MAJOR))) {
        want = make_buffer(p.c.n);
        memcpy(want.base, p.c.base, p.c.n * sizeof(float));
        run(&p.g, want.base, wki_cpu_isa(), NULL, 0);
        caller callers[3];
        pthread_t threads[3];
        int started = 0;
        for (; started < 3; started++) {
            callers[started] = (caller){&p, pool, want.base, 0};
            if (!CHECK(pthread_create(&threads[started], NULL, call_often, &callers[started]) == 0))
                break;
        }
        for (int i = 0; i < started; i++) {
            pthread_join(threads[i], NULL);
            CHECK_EQ_I(callers[i].wrong, 0);
        }
    }
    free_buffer(&want);
    free_problem(&p);
    wki_pool_free(pool);
}
