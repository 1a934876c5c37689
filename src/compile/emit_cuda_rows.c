/* Prints kernels of programs that reduce rows, or do something once per row (emit_cuda_private.h). A row of
 * at most 1024 columns is held in registers by a warp, so every value is computed in the first pass that
 * needs it; longer rows are walked again, and values computed again, from memory that is by then in the
 * cache. Calls base and core. */
#include "compile/emit_cuda_private.h"

enum { UNROLL_COST = 600 }; /* instructions, roughly, of an unrolled loop */

/* ---- a row --------------------------------------------------------------------------------------------- */

/* Offsets of the row and what is known of it before any pass. */
static void put_row_start(emitter *e) {
    wki_cu_split_index(e, "row", 0, e->s.nk);
    for (int op = 0; op < e->s.nop; op++)
        if (wki_cu_operand_used(e, op)) {
            PUT("%*sconst %s R%d = ", 4 * e->indent, "", e->S, op);
            wki_cu_put_offset(e, op, 0, e->s.nk, WKI_CU_STRIDED, NULL);
            PUT(";\n");
        }
    if (wki_cu_any_rng(e, NULL, true))
        wki_cu_put_logical(e, "G", e->s.nk, NULL);
    for (int i = 0; i < e->p->ninst; i++)
        if (e->live[i] && of_row(e, inst(e, i)) && inst(e, i)->code == WKI_L_LOAD)
            wki_cu_define_value(e, i);
}

/* Values of the row that follow from the reductions of pass p, or with p = 0 from none. */
static void put_row_values(emitter *e, int p) {
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (e->live[i] && e->pass[i] == p && of_row(e, in) && !acts(in) && in->code != WKI_L_LOAD &&
            in->code != WKI_L_REDUCE)
            wki_cu_define_value(e, i);
    }
}

static void put_row_actions(emitter *e, const char *who) {
    bool any = false;
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (!acts(in) || !of_row(e, in))
            continue;
        if (!any) { /* everybody has read what may be written now */
            LINE(e->s.kind == WKI_CU_WARP ? "__syncwarp();" : "__syncthreads();");
            LINE("if (%s) {", who);
        }
        any = true;
        if (in->code == WKI_L_STORE)
            wki_cu_put_store(e, in, wki_cu_named("p%d[R%d]", in->a, in->a).s);
        else
            wki_cu_put_check(e, in, "");
    }
    if (any)
        LINE("}");
}

/* The values in column c of the row that pass p computes, offsets of what it accesses, and checks under
   `guard`. Reductions take column e. */
static void put_values(emitter *e, int p, const uint8_t *need, const char *guard) {
    int dims = wki_cu_dims(&e->s);
    bool split = wki_cu_any_needs_index(e, need), any_store = p == e->npass + 1;
    uint8_t used[WKI_LOOP_MAX_OPERANDS] = {0};
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if ((in->code == WKI_L_LOAD && need[i]) || (any_store && in->code == WKI_L_STORE && of_elem(e, in)))
            used[in->a] = 1;
    }
    for (int op = 0; op < e->s.nop; op++)
        split |= used[op] && e->s.move[op] != WKI_CU_LINEAR;
    if (split && e->s.nr)
        wki_cu_split_index(e, "c", e->s.nk, dims);
    for (int op = 0; op < e->s.nop; op++)
        if (used[op]) {
            PUT("%*sconst %s o%d = R%d + ", 4 * e->indent, "", e->S, op, op);
            wki_cu_put_offset(e, op, e->s.nk, dims, e->s.move[op], "c");
            PUT(";\n");
        }
    if (wki_cu_any_rng(e, need, false))
        wki_cu_put_logical(e, "g", dims, NULL);
    for (int i = 0; i < e->p->ninst; i++)
        if (need[i])
            wki_cu_define_value(e, i);
    for (int i = 0; i < e->p->ninst; i++)
        if (wki_cu_target(e, i, p) && inst(e, i)->code == WKI_L_CHECK)
            wki_cu_put_check(e, inst(e, i), guard[0] ? wki_cu_named("%s && ", guard).s : "");
}

/* The same, and stores. */
static void put_element(emitter *e, int p, const uint8_t *need, const char *guard) {
    put_values(e, p, need, guard);
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (!wki_cu_target(e, i, p) || in->code != WKI_L_STORE)
            continue;
        if (guard[0])
            LINE("if (%s)", guard);
        wki_cu_put_store(e, in, wki_cu_named("%sp%d[o%d]", guard[0] ? "    " : "", in->a, in->a).s);
    }
}

static bool reduced_in(const emitter *e, int i, int p) {
    return inst(e, i)->code == WKI_L_REDUCE && wki_cu_target(e, i, p);
}

static void put_accumulate(emitter *e, int p, const char *which, const char *guard) {
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (!reduced_in(e, i, p))
            continue;
        name acc = wki_cu_named("a%d%s", i, which);
        name next = wki_cu_named("wkl_%s(%s, ", wki_cu_reduce_name(in), acc.s);
        if (guard[0])
            LINE("%s = %s ? %s%s) : %s;", acc.s, guard, next.s, wki_cu_value(e, in->a).s, acc.s);
        else
            LINE("%s = %s%s);", acc.s, next.s, wki_cu_value(e, in->a).s);
    }
}

/* For every reduction of pass p, in order of number: a line with its number (twice) and name. */
enum { DECLARE_PAIR, DECLARE_ONE, DECLARE_TOTAL };
static void put_declarations(emitter *e, int p, int what) {
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (!reduced_in(e, i, p))
            continue;
        const char *t = type_name(in), *n = wki_cu_reduce_name(in);
        if (what == DECLARE_PAIR)
            LINE("%s a%d[2] = {wkl_id_%s(), wkl_id_%s()};", t, i, n, n);
        else if (what == DECLARE_ONE)
            LINE("%s a%d = wkl_id_%s();", t, i, n);
        else
            LINE("wkl_total_%s t%d = wkl_id_%s();", n, i, n);
    }
}

static int unroll(const emitter *e, const uint8_t *need, int most) {
    int c = wki_cu_pass_cost(e, need);
    while (most > 1 && most * c > UNROLL_COST)
        most /= 2;
    return most;
}

/* ---- a warp per row ------------------------------------------------------------------------------------ */

/* One pass with the row spread over registers: element 32 k + lane. */
static void put_kept_pass(emitter *e, int p, const uint8_t *need) {
    bool pair = p <= e->npass;
    if (pair)
        put_declarations(e, p, DECLARE_PAIR);
    for (int i = 0; i < e->p->ninst; i++)
        if (need[i] && e->kept[i])
            LINE("%s k%d[%d];", type_name(inst(e, i)), i, e->s.chunks);
    LINE("if (n) {");
    LINE("#pragma unroll");
    LINE("for (int k = 0; k < %d; k++) {", e->s.chunks);
    LINE("const int ok = 32 * k + lane < n;");
    LINE("const %s c = ok ? 32 * k + lane : 0;", e->U);
    put_element(e, p, need, "ok");
    if (pair)
        put_accumulate(e, p, "[k & 1]", "ok");
    LINE("}");
    LINE("}");
}

/* One pass that walks the columns c0 .. of a part, in the order of the tree. `end`: columns of the row. */
static void put_part(emitter *e, int p, const uint8_t *need, const char *c0) {
    LINE("#pragma unroll %d", unroll(e, need, 8));
    LINE("for (%s b = %s; b < end; b += 64) {", e->U, c0);
    LINE("#pragma unroll");
    LINE("for (int h = 0; h < 2; h++) {");
    LINE("const int ok = b + 32 * h + lane < end;");
    LINE("const %s c = ok ? b + 32 * h + lane : 0;", e->U);
    put_element(e, p, need, "ok");
    put_accumulate(e, p, "[h]", "ok");
    LINE("}");
    LINE("}");
}

/* Columns `first`, first + step, ... below `end`. Several are computed before any is stored: what is stored may
   be what is loaded next, for all the compiler knows, and each load would wait for the store before it. */
static void put_store_pass(emitter *e, int p, const uint8_t *need, const char *first, const char *step,
                           const char *end) {
    int batch = unroll(e, need, 8);
    LINE("for (%s b = %s; b < %s; b += %d * %s) {", e->U, first, end, batch, step);
    for (int i = 0; i < e->p->ninst; i++)
        if (wki_cu_target(e, i, p) && inst(e, i)->code == WKI_L_STORE) {
            LINE("%s y%d[%d];", wki_cu_dtype_type(e->r->opnd[inst(e, i)->a].dtype), i, batch);
            LINE("%s q%d[%d];", e->S, i, batch);
        }
    LINE("#pragma unroll");
    LINE("for (int j = 0; j < %d; j++) {", batch);
    LINE("const %s c = j * %s < %s - b ? b + j * %s : b;", e->U, step, end, step);
    put_values(e, p, need, "");
    for (int i = 0; i < e->p->ninst; i++)
        if (wki_cu_target(e, i, p) && inst(e, i)->code == WKI_L_STORE) {
            wki_cu_put_store(e, inst(e, i), wki_cu_named("y%d[j]", i).s);
            LINE("q%d[j] = o%d;", i, inst(e, i)->a);
        }
    LINE("}");
    LINE("#pragma unroll");
    LINE("for (int j = 0; j < %d; j++)", batch);
    LINE("    if (j * %s < %s - b) {", step, end);
    for (int i = 0; i < e->p->ninst; i++)
        if (wki_cu_target(e, i, p) && inst(e, i)->code == WKI_L_STORE)
            LINE("    p%d[q%d[j]] = y%d[j];", inst(e, i)->a, i, i);
    LINE("}");
    LINE("}");
}

static void put_warp_pass(emitter *e, int p, const uint8_t *need) {
    if (e->keep) {
        put_kept_pass(e, p, need);
    } else if (p <= e->npass) {
        put_declarations(e, p, DECLARE_PAIR);
        LINE("{");
        LINE("const %s end = n;", e->U);
        put_part(e, p, need, "0");
        LINE("}");
    } else {
        put_store_pass(e, p, need, "lane", "32", "n");
    }
    for (int i = 0; i < e->p->ninst; i++)
        if (reduced_in(e, i, p))
            LINE("const %s r%d = wkl_warp_%s(a%d[0], a%d[1]);", type_name(inst(e, i)), i,
                 wki_cu_reduce_name(inst(e, i)), i, i);
}

/* ---- reductions of a block ----------------------------------------------------------------------------- */

/* A thread per row, `who`, adds parts 0 .. count - 1 in order to its totals and leaves the row's results in
   `result`. `place`: of part q in `shared`. */
static void put_add_parts(emitter *e, int p, const char *who, const char *count, const char *place,
                          const char *row) {
    int m = 0;
    LINE("__syncthreads();");
    LINE("if (%s) {", who);
    LINE("for (%s q = 0; q < %s; q++) {", e->U, count);
    for (int i = 0; i < e->p->ninst; i++)
        if (reduced_in(e, i, p))
            LINE("t%d = wkl_add_%s(t%d, shared[%d][%s]);", i, wki_cu_reduce_name(inst(e, i)), i, m++, place);
    LINE("}");
    m = 0;
    for (int i = 0; i < e->p->ninst; i++)
        if (reduced_in(e, i, p))
            LINE("result[%d][%s] = wkl_bits_%c((%s)t%d);", m++, row, type_letter(inst(e, i)),
                 type_name(inst(e, i)), i);
    LINE("}");
    LINE("__syncthreads();");
}

/* All threads have the results. They are written again only behind the next barrier. */
static void put_results(emitter *e, int p, const char *row) {
    int m = 0;
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (reduced_in(e, i, p))
            LINE("const %s r%d = wkl_from_%c(result[%d][%s]);", type_name(in), i, type_letter(in), m++, row);
    }
}

static void put_part_results(emitter *e, int p, const char *place) {
    int m = 0;
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (reduced_in(e, i, p))
            LINE("shared[%d][%s] = wkl_bits_%c(a%d%s);", m++, place, type_letter(in), i,
                 e->s.kind == WKI_CU_BLOCK ? "[0]" : "");
    }
}

static void put_shared(emitter *e) {
    int most = 0;
    for (int p = 1; p <= e->npass; p++) {
        int n = 0;
        for (int i = 0; i < e->p->ninst; i++)
            n += reduced_in(e, i, p);
        most = n > most ? n : most;
    }
    if (!most)
        return;
    if (e->s.kind == WKI_CU_BLOCK || e->s.kind == WKI_CU_SPLIT)
        LINE("__shared__ int shared[%d][%d], result[%d][1];", most, WKI_CU_ROW_PART, most);
    else
        LINE("__shared__ int shared[%d][%d], result[%d][%d];", most, WKI_CU_MAX_THREADS, most,
             WKI_CU_COL_ROWS);
}

/* ---- a block per row ----------------------------------------------------------------------------------- */

static void put_block_pass(emitter *e, int p, const uint8_t *need) {
    const int part = WKI_CU_ROW_PART;
    if (p > e->npass) {
        put_store_pass(e, p, need, "threadIdx.x", "blockDim.x", "n");
        return;
    }
    put_declarations(e, p, DECLARE_TOTAL);
    /* `shared` holds as many parts as a part has columns. */
    LINE("for (%s from = 0; from == 0 || from < nparts; from += %d) {", e->U, part);
    LINE("const %s until = nparts - from < %d ? nparts : from + %d;", e->U, part, part);
    LINE("for (%s part = from + warp; part < until; part += blockDim.x / 32) {", e->U);
    put_declarations(e, p, DECLARE_PAIR);
    LINE("const %s first = part * %d, end = n - first < %d ? n : first + %d;", e->U, part, part, part);
    put_part(e, p, need, "first");
    for (int i = 0; i < e->p->ninst; i++)
        if (reduced_in(e, i, p))
            LINE("a%d[0] = wkl_warp_%s(a%d[0], a%d[1]);", i, wki_cu_reduce_name(inst(e, i)), i, i);
    LINE("if (lane == 0) {");
    put_part_results(e, p, "part - from");
    LINE("}");
    LINE("}");
    put_add_parts(e, p, "threadIdx.x == 0", "until - from", "q", "0");
    LINE("}");
    put_results(e, p, "0");
}

/* ---- blocks that share a row ---------------------------------------------------------------------------- */

/* A block leaves the results of its parts in memory and stores what is stored for their elements. The last
   block of a row to come adds up all its parts, in order. */
static void put_split_row(emitter *e) {
    const int part = WKI_CU_ROW_PART;
    uint8_t need[WKI_LOOP_MAX_INST];
    int m = 0;
    LINE("volatile int *sums = WKL_POINTER(volatile int, p.q[%d]) + row * nparts;", e->l.scratch);
    LINE("for (%s part = begin + warp; part < until; part += %d) {", e->U, WKI_CU_SPLIT_THREADS / 32);
    wki_cu_needed(e, 1, need);
    put_declarations(e, 1, DECLARE_PAIR);
    LINE("const %s first = part * %d, end = n - first < %d ? n : first + %d;", e->U, part, part, part);
    put_part(e, 1, need, "first");
    for (int i = 0; i < e->p->ninst; i++)
        if (reduced_in(e, i, 1))
            LINE("a%d[0] = wkl_warp_%s(a%d[0], a%d[1]);", i, wki_cu_reduce_name(inst(e, i)), i, i);
    LINE("if (lane == 0) {");
    for (int i = 0; i < e->p->ninst; i++)
        if (reduced_in(e, i, 1))
            LINE("sums[%d * nrow * nparts + part] = wkl_bits_%c(a%d[0]);", m++, type_letter(inst(e, i)), i);
    LINE("}");
    LINE("}");
    if (wki_cu_needed(e, 2, need)) {
        LINE("__syncthreads();"); /* other warps read what is written now */
        LINE("{");
        LINE("const %s end = n / %d < until ? n : until * %d;", e->U, part, part);
        put_store_pass(e, 2, need, wki_cu_named("begin * %d + threadIdx.x", part).s, "blockDim.x", "end");
        LINE("}");
    }
    LINE("__threadfence();");
    LINE("__syncthreads();");
    LINE("if (threadIdx.x == 0)");
    LINE("    last = atomicInc(WKL_POINTER(unsigned, p.q[%d]) + row, p.d[%d] - 1) == p.d[%d] - 1;",
         e->l.scratch + 1, e->l.each + 1, e->l.each + 1);
    LINE("__syncthreads();");
    LINE("if (!last)");
    LINE("    return;");
    LINE("__threadfence();");
    put_declarations(e, 1, DECLARE_TOTAL);
    LINE("for (%s from = 0; from < nparts; from += %d) {", e->U, part);
    LINE("const %s left = nparts - from < %d ? nparts - from : %d;", e->U, part, part);
    LINE("for (%s q = threadIdx.x; q < left; q += blockDim.x) {", e->U);
    for (int k = 0; k < m; k++)
        LINE("shared[%d][q] = sums[%d * nrow * nparts + from + q];", k, k);
    LINE("}");
    put_add_parts(e, 1, "threadIdx.x == 0", "left", "q", "0");
    LINE("}");
    put_results(e, 1, "0");
    put_row_values(e, 1);
}

/* ---- a thread per row and part ------------------------------------------------------------------------- */

static void put_col_pass(emitter *e, int p, const uint8_t *need) {
    const int part = WKI_CU_COL_PART;
    if (p > e->npass) {
        LINE("if (live) {");
        put_store_pass(e, p, need, "threadIdx.y", "blockDim.y", "n");
        LINE("}");
        return;
    }
    put_declarations(e, p, DECLARE_TOTAL);
    LINE("for (%s from = 0; from == 0 || from < nparts; from += blockDim.y) {", e->U);
    LINE("const %s first = (from + threadIdx.y) * %d;", e->U, part);
    LINE("const %s end = first >= n || n - first < %d ? n : first + %d;", e->U, part, part);
    put_declarations(e, p, DECLARE_ONE);
    LINE("#pragma unroll %d", unroll(e, need, 16));
    LINE("for (%s c = first; c < end; c++) {", e->U);
    put_element(e, p, need, "");
    put_accumulate(e, p, "", "");
    LINE("}");
    put_part_results(e, p, "threadIdx.y * blockDim.x + threadIdx.x");
    LINE("const %s left = nparts - from < blockDim.y ? nparts - from : blockDim.y;", e->U);
    put_add_parts(e, p, "threadIdx.y == 0", "left", "q * blockDim.x + threadIdx.x", "threadIdx.x");
    LINE("}");
    put_results(e, p, "threadIdx.x");
}

/* ---- kernels of rows ----------------------------------------------------------------------------------- */

void wki_cu_put_row_kernel(emitter *e) {
    const char *U = e->U;
    wki_cu_kind kind = e->s.kind;
    LINE("const %s n = %s, nrow = %s;", U, wki_cu_wide_param(e, false, e->l.ncol).s,
         wki_cu_wide_param(e, false, e->l.nrow).s);
    if (kind == WKI_CU_WARP) {
        LINE("const unsigned lane = threadIdx.x %% 32;");
        LINE("const %s row = ((%s)blockIdx.x * blockDim.x + threadIdx.x) / 32;", U, U);
        LINE("if (row >= nrow)");
        LINE("    return;");
    } else if (kind == WKI_CU_SPLIT) {
        LINE("__shared__ int last;");
        LINE("const unsigned lane = threadIdx.x %% 32, warp = threadIdx.x / 32;");
        LINE("const %s nparts = (n + %d) / %d, row = blockIdx.x / p.d[%d];", U, WKI_CU_ROW_PART - 1,
             WKI_CU_ROW_PART, e->l.each + 1);
        LINE("const %s begin = (blockIdx.x - row * p.d[%d]) * p.d[%d];", U, e->l.each + 1, e->l.each);
        LINE("const %s until = nparts - begin < p.d[%d] ? nparts : begin + p.d[%d];", U, e->l.each,
             e->l.each);
    } else if (kind == WKI_CU_BLOCK) {
        LINE("const unsigned lane = threadIdx.x %% 32, warp = threadIdx.x / 32;");
        LINE("const %s nparts = (n + %d) / %d, row = blockIdx.x;", U, WKI_CU_ROW_PART - 1, WKI_CU_ROW_PART);
    } else {
        LINE("const %s nparts = (n + %d) / %d;", U, WKI_CU_COL_PART - 1, WKI_CU_COL_PART);
        LINE("const %s place = (%s)blockIdx.x * blockDim.x + threadIdx.x;", U, U);
        LINE("const int live = place < nrow;");
        LINE("const %s row = live ? place : 0;", U);
    }
    if (kind != WKI_CU_WARP)
        put_shared(e);
    wki_cu_put_pointers(e);
    wki_cu_put_uniforms(e);
    put_row_start(e);
    put_row_values(e, 0);
    if (kind == WKI_CU_SPLIT)
        put_split_row(e);
    for (int p = 1; kind != WKI_CU_SPLIT && p <= e->npass + 1; p++) {
        uint8_t need[WKI_LOOP_MAX_INST];
        if (wki_cu_needed(e, p, need)) {
            LINE("/* pass %d */", p);
            (kind == WKI_CU_WARP    ? put_warp_pass
             : kind == WKI_CU_BLOCK ? put_block_pass
                                    : put_col_pass)(e, p, need);
        }
        put_row_values(e, p);
    }
    put_row_actions(e, kind == WKI_CU_WARP  ? "lane == 0"
                       : kind == WKI_CU_COL ? "live && threadIdx.y == 0"
                                            : "threadIdx.x == 0");
}
