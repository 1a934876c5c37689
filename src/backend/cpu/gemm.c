/* The driver of the packed GEMM, shared by all tiers: how a problem is cut into blocks and tiles, what is packed, and
 * which thread takes what. Calls base/pool and the tiers. The loops are Goto's (Goto and van de Geijn, "Anatomy of
 * High-Performance Matrix Multiplication", 2008): a block of B (kc, nc), under it blocks of A (mc, kc) that each thread
 * packs for itself. Threads that share the columns of B pack it together beforehand; a thread that has its columns
 * to itself packs them as it goes, while they are in its cache. Packing is left out where a tile can read the operand
 * as it lies at no loss, which makes small problems a plain loop over tiles. */
#include "backend/cpu/gemm.h"

#include "backend/cpu/gemm_tier.h"
#include "backend/cpu/k_util.h"

#define ALIGN 64
#define LINE 16 /* floats in a cache line */

/* Below this many floating-point operations for each thread, waking it costs more than it gives. */
#define MIN_FLOPS_PER_THREAD 2e6

/* Operands up to this many bytes are read where they lie: they fit in the second-level cache with room to spare. */
#define DIRECT_BYTES (128 * 1024)

typedef struct {
    const wki_gemm_tier *tier;
    int64_t kc, mc, nc;
    int dot; /* one column: the tier's dot rather than its tile */
    int pack_a, pack_b;
    int lazy_b;        /* a strip of B is packed by the thread that uses it, not up front by all threads */
    int one_strip;     /* lazy, and used up at once: each thread packs one strip over the last */
    int batch_threads; /* threads that take whole matrices; 1: all threads share each matrix, as the grid says */
    int grid_m, grid_n; /* threads along the rows and the columns of one matrix */
    size_t a_bytes;     /* packed A of one thread */
    size_t b_bytes;     /* packed B of one matrix */
} plan;

static int64_t round_up(int64_t a, int64_t b) { return wki_k_ceil(a, b) * b; }

/* Cuts `total` into the fewest pieces of at most `most`, as equal as multiples of `unit` allow. */
static int64_t even_piece(int64_t total, int64_t most, int64_t unit) {
    if (total <= most)
        return total;
    return wki_k_min(most, round_up(wki_k_ceil(total, wki_k_ceil(total, most)), unit));
}

static const wki_gemm_tier *tier_of(wki_isa isa) {
#if defined(__x86_64__)
    if (isa == WKI_ISA_AVX512)
        return &wki_gemm_avx512;
#endif
    (void)isa;
    return &wki_gemm_baseline;
}

static int no_output(const wki_gemm *g) { return g->m <= 0 || g->n <= 0 || g->batch <= 0; }

/* C^T = B^T A^T. Only for vectors: C^T must have unit column stride. */
static wki_gemm transposed(const wki_gemm *g) {
    wki_gemm t = *g;
    t.m = g->n, t.n = g->m;
    t.a = g->b, t.a_rs = g->b_cs, t.a_cs = g->b_rs, t.a_bs = g->b_bs;
    t.b = g->a, t.b_rs = g->a_cs, t.b_cs = g->a_rs, t.b_bs = g->a_bs;
    t.c_rs = 1;
    t.bias_n = g->bias_m, t.bias_m = g->bias_n;
    return t;
}

/* The same sums in the form that the loops below handle best. */
static wki_gemm normalised(const wki_gemm *g) {
    wki_gemm t = *g;
    int one_matrix = t.b_bs == 0 && t.a_bs == t.m * t.a_rs && t.c_bs == t.m * t.c_rs && !t.bias_m;
    if (t.batch > 1 && one_matrix) {
        t.m *= t.batch;
        t.batch = 1;
    }
    int row_by_columns = t.m == 1 && t.n > 1 && t.b_cs != 1;
    int rows_by_column = t.n == 1 && t.m > 1 && t.a_rs == 1 && t.c_rs == 1;
    if (row_by_columns || rows_by_column)
        t = transposed(&t);
    if (t.n == 1)
        t.b_cs = 1;
    return t;
}

/* Threads along rows and columns: the split whose largest share of tiles is smallest, along rows when equal, since
 * threads that share rows pack them each for itself. */
static void choose_grid(plan *pl, const wki_gemm *g, int threads) {
    int64_t rows = wki_k_ceil(g->m, pl->tier->mr), cols = wki_k_ceil(wki_k_min(g->n, pl->nc), pl->tier->nr);
    int64_t best = 0;
    pl->grid_m = pl->grid_n = 1;
    for (int tn = 1; tn <= threads; tn++) {
        int tm = (int)wki_k_min(threads / tn, rows);
        int64_t share = wki_k_ceil(rows, tm) * wki_k_ceil(cols, wki_k_min(tn, cols));
        if (tn == 1 || share < best) {
            best = share;
            pl->grid_m = tm;
            pl->grid_n = (int)wki_k_min(tn, cols);
        }
    }
}

static void choose_threads(plan *pl, const wki_gemm *g, int nthreads) {
    double flops = 2.0 * (double)g->m * (double)g->n * (double)g->k;
    double useful = flops * (double)g->batch / MIN_FLOPS_PER_THREAD;
    int threads = useful >= nthreads ? nthreads : (int)useful;
    pl->batch_threads = pl->grid_m = pl->grid_n = 1;
    if (threads <= 1)
        return;
    if (g->batch >= threads || (g->batch > 1 && flops < 2 * MIN_FLOPS_PER_THREAD))
        pl->batch_threads = (int)wki_k_min(threads, g->batch);
    else
        choose_grid(pl, g, threads);
}

static plan make_plan(const wki_gemm *g, wki_isa isa, int nthreads) {
    const wki_gemm_tier *tier = tier_of(isa);
    plan pl = {.tier = tier};
    pl.dot = g->n == 1 && g->a_cs == 1 && g->b_rs == 1;
    pl.kc = even_piece(g->k, pl.dot ? tier->dot_kc : tier->kc, 8);
    pl.nc = even_piece(g->n, tier->nc, tier->nr);
    choose_threads(&pl, g, nthreads);
    int64_t rows = wki_k_ceil(wki_k_ceil(g->m, tier->mr), pl.grid_m) * tier->mr;
    pl.mc = even_piece(wki_k_min(rows, g->m), tier->mc, tier->mr);

    double a_size = 4.0 * (double)g->m * (double)g->k, b_size = 4.0 * (double)g->k * (double)g->n;
    pl.pack_a = !pl.dot && g->n > 4 * tier->nr && a_size > DIRECT_BYTES;
    int tails_fit = tier->tails || g->n % tier->nr == 0;
    pl.pack_b = !pl.dot && (g->b_cs != 1 || !tails_fit || (g->m > 5 * tier->mr && b_size > DIRECT_BYTES));
    pl.lazy_b = pl.pack_b && pl.grid_m == 1;
    pl.one_strip = pl.lazy_b && g->m <= pl.mc;
    int64_t b_columns = pl.one_strip ? (int64_t)pl.grid_n * tier->nr : round_up(pl.nc, tier->nr);
    if (pl.pack_a)
        pl.a_bytes = (size_t)round_up(4 * pl.mc * pl.kc, ALIGN);
    if (pl.pack_b)
        pl.b_bytes = (size_t)round_up(4 * pl.kc * b_columns, ALIGN);
    return pl;
}

/* One block of one matrix under the loops over n and k, handed to the threads to compute, and before that, unless
 * each packs its own strips, to pack B. */
typedef struct {
    const wki_gemm *g;
    const plan *pl;
    const float *a, *b; /* at row 0, column jc, step pc of this batch */
    float *c;
    int64_t jc, nc, pc, kc;
    float *packed_b;
    char *packed_a; /* one buffer for each cell of the grid */
} block;

static void pack_strip(const block *bl, int64_t j, float *dst) {
    const wki_gemm *g = bl->g;
    const wki_gemm_tier *tier = bl->pl->tier;
    int64_t width = wki_k_min(tier->nr, bl->nc - j);
    tier->pack(dst, tier->nr, bl->b + j * g->b_cs, g->b_rs, g->b_cs, bl->kc, width);
}

static void pack_strips(void *arg, int64_t begin, int64_t end, int worker) {
    const block *bl = arg;
    int64_t nr = bl->pl->tier->nr;
    (void)worker;
    for (int64_t j = begin * nr; j < wki_k_min(end * nr, bl->nc); j += nr)
        pack_strip(bl, j, bl->packed_b + j * bl->kc);
}

/* Columns [j0, j1) of the block, and where a thread has its packed operands. */
typedef struct {
    int64_t j0, j1;
    float *packed_a, *packed_b; /* NULL: not packed */
} cell;

/* What tile `index` of a strip fetches for the next strip, a line for each step of k: the first tiles its part of B,
 * then its part of C. Rows that lie pages apart are not foreseen by the core. */
static void look_ahead(wki_gemm_tile *t, const block *bl, const float *c, int64_t j, int packed,
                       int64_t index) {
    const wki_gemm *g = bl->g;
    int64_t lines = wki_k_ceil(bl->pl->tier->nr, LINE);
    if (index >= 2 * lines)
        return;
    if (index >= lines) {
        t->next = c + (index - lines) * LINE;
        t->next_rs = g->c_rs;
    } else if (packed) {
        t->next = t->b + (lines + index) * LINE * bl->kc;
        t->next_rs = LINE;
    } else if (g->b_cs == 1) {
        t->next = bl->b + j + index * LINE;
        t->next_rs = g->b_rs;
    }
}

/* Rows [i0, i0 + m) of a cell, m at most mc. Operands are packed just before their first use, A strip by strip under
 * the first columns and B under the first rows. The first `high` tiles are one row higher than the others: a tile of
 * few rows cannot hide the latency of its sums, so all get about the same. */
static void compute_rows(const block *bl, const cell *ce, int64_t i0, int64_t m, int pack_b) {
    const wki_gemm *g = bl->g;
    const wki_gemm_tier *tier = bl->pl->tier;
    int64_t tiles = wki_k_ceil(m, tier->mr), height = m / tiles, high = m % tiles;
    int first = bl->pc == 0, last = bl->pc + bl->kc == g->k;
    wki_gemm_tile t = {.k = bl->kc, .c_rs = g->c_rs, .alpha = g->alpha, .beta = first ? g->beta : 1};
    t.act = last ? g->act : WKI_ACT_NONE;
    t.a_rs = ce->packed_a ? 1 : g->a_rs;
    t.b_rs = ce->packed_b ? tier->nr : g->b_rs;
    void (*run)(const wki_gemm_tile *) = bl->pl->dot ? tier->dot : tier->tile;
    const float *a = bl->a + i0 * g->a_rs;
    for (int64_t j = ce->j0; j < ce->j1; j += tier->nr) {
        float *strip =
            ce->packed_b && !bl->pl->one_strip ? ce->packed_b + (j - ce->j0) * bl->kc : ce->packed_b;
        if (pack_b)
            pack_strip(bl, j, strip);
        t.n = (int)wki_k_min(tier->nr, ce->j1 - j);
        t.b = strip ? strip : bl->b + j * g->b_cs;
        t.bias_n = last && g->bias_n ? g->bias_n + bl->jc + j : NULL;
        int more = ce->j1 - j > tier->nr;
        int64_t index = 0;
        for (int64_t i = 0; i < m; i += t.m) {
            t.m = (int)height + (i < high * (height + 1));
            t.a_cs = ce->packed_a ? t.m : g->a_cs;
            t.a = ce->packed_a ? ce->packed_a + i * bl->kc : a + i * g->a_rs;
            if (ce->packed_a && j == ce->j0)
                tier->pack(ce->packed_a + i * bl->kc, t.m, a + i * g->a_rs, g->a_cs, g->a_rs, bl->kc, t.m);
            t.c = bl->c + (i0 + i) * g->c_rs + j;
            t.bias_m = last && g->bias_m ? g->bias_m + i0 + i : NULL;
            t.next = t.b;
            t.next_rs = 0;
            if (more)
                look_ahead(&t, bl, bl->c + i0 * g->c_rs + j + tier->nr, j + tier->nr, strip && !pack_b,
                           index++);
            run(&t);
        }
    }
}

/* The end of part `i` of `parts` when `total` is shared out in units; part i begins where part i - 1 ends. */
static int64_t share_end(int64_t total, int64_t unit, int64_t i, int64_t parts) {
    int64_t units = wki_k_ceil(total, unit), each = units / parts, extra = units % parts;
    return wki_k_min(total, ((i + 1) * each + wki_k_min(i + 1, extra)) * unit);
}

static void compute_cells(void *arg, int64_t begin, int64_t end, int worker) {
    const block *bl = arg;
    const plan *pl = bl->pl;
    (void)worker;
    for (int64_t index = begin; index < end; index++) {
        int64_t ci = index % pl->grid_m, cj = index / pl->grid_m;
        int64_t i0 = ci ? share_end(bl->g->m, pl->tier->mr, ci - 1, pl->grid_m) : 0;
        int64_t i1 = share_end(bl->g->m, pl->tier->mr, ci, pl->grid_m);
        cell ce = {.j0 = cj ? share_end(bl->nc, pl->tier->nr, cj - 1, pl->grid_n) : 0};
        ce.j1 = share_end(bl->nc, pl->tier->nr, cj, pl->grid_n);
        if (pl->pack_a)
            ce.packed_a = (float *)(void *)(bl->packed_a + (size_t)index * pl->a_bytes);
        if (pl->pack_b)
            ce.packed_b = bl->packed_b + (pl->one_strip ? cj * pl->tier->nr : ce.j0) * bl->kc;
        for (int64_t i = i0; i < i1; i += pl->mc)
            compute_rows(bl, &ce, i, wki_k_min(pl->mc, i1 - i), pl->lazy_b && i == i0);
    }
}

static void run_matrix(const wki_gemm *g, const plan *pl, wki_pool *pool, char *workspace, int64_t index) {
    const float *a = g->a + index * g->a_bs, *b = g->b + index * g->b_bs;
    int64_t cells = (int64_t)pl->grid_m * pl->grid_n;
    block bl = {.g = g, .pl = pl};
    bl.packed_b = pl->pack_b ? (float *)(void *)workspace : NULL;
    bl.packed_a = pl->pack_a ? workspace + pl->b_bytes : NULL;
    for (bl.jc = 0; bl.jc < g->n; bl.jc += bl.nc) {
        bl.nc = wki_k_min(pl->nc, g->n - bl.jc);
        bl.c = g->c + index * g->c_bs + bl.jc;
        for (bl.pc = 0; bl.pc < g->k; bl.pc += bl.kc) {
            bl.kc = wki_k_min(pl->kc, g->k - bl.pc);
            bl.a = a + bl.pc * g->a_cs;
            bl.b = b + bl.pc * g->b_rs + bl.jc * g->b_cs;
            if (pl->pack_b && !pl->lazy_b)
                wki_pool_for(cells > 1 ? pool : NULL, wki_k_ceil(bl.nc, pl->tier->nr), pack_strips, &bl, 1);
            wki_pool_for(cells > 1 ? pool : NULL, cells, compute_cells, &bl, 1);
        }
    }
}

typedef struct {
    const wki_gemm *g;
    const plan *pl;
    char *workspace; /* may be NULL when bytes is 0 */
    size_t bytes;    /* for each worker */
} batch_job;

static void run_batch(void *arg, int64_t begin, int64_t end, int worker) {
    const batch_job *job = arg;
    char *mine = job->bytes ? job->workspace + (size_t)worker * job->bytes : NULL;
    for (int64_t i = begin; i < end; i++)
        run_matrix(job->g, job->pl, NULL, mine, i);
}

/* One block on one thread, read where it lies but for a B that tiles cannot read: make_plan would find as much, in more time
 * than a small product takes. */
static int small(const wki_gemm *g, const wki_gemm_tier *tier) {
    const int64_t most = DIRECT_BYTES / 4;
    return g->batch == 1 && g->m > 1 && g->n > 1 && g->m <= tier->mc && g->k <= tier->kc &&
           g->n <= 4 * tier->nr && g->k * g->n <= most && g->m * g->k <= most &&
           (double)(g->m * g->n * g->k) < MIN_FLOPS_PER_THREAD;
}

static void run_small(const wki_gemm *g, const wki_gemm_tier *tier, float *strip) {
    int m = (int)g->m, tiles = (m + tier->mr - 1) / tier->mr, height = m / tiles, high = m % tiles;
    int pack_b = g->b_cs != 1 || (!tier->tails && g->n % tier->nr);
    wki_gemm_tile t; /* set field by field: clearing it first is felt */
    t.k = g->k, t.a_rs = g->a_rs, t.a_cs = g->a_cs, t.c_rs = g->c_rs;
    t.alpha = g->alpha, t.beta = g->beta, t.act = g->act;
    t.b_rs = pack_b ? tier->nr : g->b_rs;
    t.next = NULL, t.next_rs = 0;
    for (int64_t j = 0; j < g->n; j += tier->nr) {
        t.n = (int)wki_k_min(tier->nr, g->n - j);
        t.b = pack_b ? strip : g->b + j;
        t.bias_n = g->bias_n ? g->bias_n + j : NULL;
        if (pack_b)
            tier->pack(strip, tier->nr, g->b + j * g->b_cs, g->b_rs, g->b_cs, g->k, t.n);
        for (int i = 0; i < m; i += t.m) {
            t.m = height + (i < high * (height + 1));
            t.a = g->a + i * g->a_rs;
            t.c = g->c + i * g->c_rs + j;
            t.bias_m = g->bias_m ? g->bias_m + i : NULL;
            tier->tile(&t);
        }
    }
}

size_t wki_gemm_workspace(const wki_gemm *g, wki_isa isa, int nthreads) {
    if (no_output(g) || g->k <= 0)
        return 0;
    wki_gemm n = normalised(g);
    plan pl = make_plan(&n, isa, nthreads);
    size_t cells = (size_t)pl.grid_m * (size_t)pl.grid_n;
    return (size_t)pl.batch_threads * (pl.b_bytes + cells * pl.a_bytes);
}

void wki_gemm_run(const wki_gemm *g, wki_isa isa, wki_pool *pool, void *workspace) {
    if (no_output(g))
        return;
    if (g->k <= 0) {
        wki_gemm_reference(g);
        return;
    }
    if (small(g, tier_of(isa))) {
        run_small(g, tier_of(isa), workspace);
        return;
    }
    wki_gemm n = normalised(g);
    plan pl = make_plan(&n, isa, wki_pool_size(pool));
    if (pl.batch_threads > 1) {
        batch_job job = {&n, &pl, workspace, pl.b_bytes + pl.a_bytes};
        wki_pool_for(pool, n.batch, run_batch, &job, wki_k_ceil(n.batch, pl.batch_threads));
        return;
    }
    for (int64_t i = 0; i < n.batch; i++)
        run_matrix(&n, &pl, pool, workspace, i);
}
