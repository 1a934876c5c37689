/* Kernels of loop programs (compile/emit_cuda.h). Their text runs on the CPU under cuda_on_cpu.h, compiled by
 * the system's C compiler, and must give what the reference interpreter gives, to the bit; and NVRTC, where
 * there is one, must compile it. Programs are those of the op table and random ones; domains have sizes 0, 1,
 * primes and rows of several parts; operands are contiguous, permuted, padded, broadcast and updated in
 * place. */
#define _GNU_SOURCE /* MAP_NORESERVE */

#include "backend/backend.h"
#include "backend/cuda/cu.h"
#include "base/alloc.h"
#include "compile/emit_cuda.h"
#include "harness.h"
#include "ops/bind.h"
#include "util_guard.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_PROGRAM = 64, MAX_OPERANDS = 8, MAX_NUMBERS = 16 };

/* A program, its domain and operands, twice: for the reference and for the kernel. */
typedef struct kcase {
    char title[64];
    wki_loop prog;
    wki_inst inst[WKI_LOOP_MAX_INST];
    wki_loop_run run;
    int shares[MAX_OPERANDS];   /* operand whose memory this one shares, or -1 */
    size_t bytes[MAX_OPERANDS]; /* of its memory */
    void *want[MAX_OPERANDS], *got[MAX_OPERANDS];
    double val[MAX_NUMBERS];
    float arg[MAX_NUMBERS];
    uint64_t seq[MAX_NUMBERS];
    int32_t want_fault, got_fault, stop;
    wki_cu_kernel_text text;
} kcase;

/* ---- domains and operands ------------------------------------------------------------------------------ */

static int64_t draw_size(void) {
    static const int64_t some[] = {0,  1,  1,  2,  3,  4,  5,   6,   7,   8,   12,
                                   16, 18, 31, 32, 33, 64, 100, 127, 128, 129, 258};
    return some[wkt_below(sizeof some / sizeof *some)];
}

/* Logical sizes and a mask of reduced dimensions. Long rows now and then. */
static void draw_domain(wki_loop_run *r, bool rows) {
    int64_t size[5];
    bool parts = rows && wkt_below(3) == 0;
    int nd = parts ? 1 + (int)wkt_below(2) : (int)wkt_below(6);
    if (rows && nd == 0)
        nd = 1;
    int64_t n = 1;
    for (int d = 0; d < nd; d++) {
        size[d] = draw_size();
        while (n * size[d] > 6000)
            size[d] /= 2;
        n *= size[d] ? size[d] : 1;
    }
    uint32_t red = 0;
    while (rows && !red)
        red = (uint32_t)wkt_below((uint64_t)1 << nd);
    if (parts) { /* several in a row, at times just one more element */
        static const int64_t edge[] = {128, 129, 256, 1023, 1024, 1025, 1089, 2048, 2049};
        for (int d = 0; d < nd; d++)
            size[d] = red == 3            ? (int64_t)wkt_below(90)
                      : !(red >> d & 1)   ? (int64_t)wkt_below(5)
                      : wkt_below(3) == 0 ? edge[wkt_below(sizeof edge / sizeof *edge)]
                                          : (int64_t)wkt_below(4000);
    }
    wki_order_domain(r, nd, size, red);
}

static bool is_load(const kcase *c, int op) { return op < c->prog.nload; }

static bool row_operand(const kcase *c, int op) {
    for (int i = 0; i < c->prog.ninst; i++)
        if ((c->inst[i].code == WKI_L_LOAD || c->inst[i].code == WKI_L_STORE) && c->inst[i].a == op)
            return c->run.nred > 0 && c->inst[i].level == WKI_ROWV;
    return false;
}

/* Dense strides in the given order of memory; loads may be broadcast. Untidy ones may have padding or
   steps. */
static int64_t draw_strides(kcase *c, int op, const int *order, bool tidy) {
    wki_loop_run *r = &c->run;
    int64_t at = 1, last = 0, elements = 1;
    bool row = row_operand(c, op), pad = !tidy && wkt_below(4) == 0,
         broadcast = is_load(c, op) && wkt_below(3) == 0;
    bool strided = !tidy && is_load(c, op) && wkt_below(8) == 0;
    if (strided)
        at = 2;
    for (int i = r->ndim - 1; i >= 0; i--) {
        int d = order[i];
        int64_t *stride = &r->opnd[op].stride[d];
        if ((row && d >= r->ndim - r->nred) || (broadcast && wkt_below(2))) {
            *stride = 0;
            continue;
        }
        *stride = at;
        last += at * (r->size[d] - 1);
        elements *= r->size[d];
        at *= r->size[d];
        if (pad)
            at += (int64_t)wkt_below(4) * 2 + (int64_t)wkt_below(4) / 3;
    }
    return elements ? last + 1 : 1;
}

static void *new_memory(size_t bytes) {
    void *p = wkt_guarded(bytes);
    if (p)
        memset(p, 0xa5, bytes);
    return p;
}

static void fill(void *p, uint8_t dtype, size_t bytes, bool odd) {
    size_t n = bytes / wki_dtype_size((wk_dtype)dtype);
    for (size_t i = 0; i < n; i++) {
        uint64_t kind = odd ? wkt_below(40) : 2 + wkt_below(38);
        double x = kind == 0 ? NAN : kind == 1 ? INFINITY : kind == 2 ? -0.0 : wkt_uniform(-3, 3);
        int64_t k = kind < 2 ? (int64_t)wkt_u64() : wkt_range(-6, 6);
        switch ((wk_dtype)dtype) {
        case WK_F32:
            ((float *)p)[i] = (float)x;
            break;
        case WK_F64:
            ((double *)p)[i] = x;
            break;
        case WK_I32:
            ((int32_t *)p)[i] = (int32_t)k;
            break;
        case WK_I64:
            ((int64_t *)p)[i] = k;
            break;
        case WK_BOOL:
            ((uint8_t *)p)[i] = (uint8_t)(k & 1);
            break;
        default:
            ((uint8_t *)p)[i] = (uint8_t)k;
            break;
        }
    }
}

static bool same_strides(const wki_loop_run *r, int a, int b) {
    for (int d = 0; d < r->ndim; d++)
        if (r->opnd[a].stride[d] != r->opnd[b].stride[d])
            return false;
    return r->opnd[a].dtype == r->opnd[b].dtype;
}

/* Strides and memory for every operand, each as far before its end as makes its start less aligned at
   times. */
static void draw_operands(kcase *c) {
    wki_loop_run *r = &c->run;
    int nop = c->prog.nload + c->prog.nstore, order[WKI_LOOP_MAX_DIMS] = {0}, mixed[WKI_LOOP_MAX_DIMS];
    for (int d = 0; d < r->ndim; d++)
        order[r->logical[d]] = d;
    memcpy(mixed, order, sizeof mixed);
    for (int d = r->ndim - 1; d > 0; d--) {
        int j = (int)wkt_below((uint64_t)d + 1), t = mixed[d];
        mixed[d] = mixed[j];
        mixed[j] = t;
    }
    bool all_mixed = wkt_below(4) == 0, plain = wkt_below(6) == 0, tidy = wkt_below(2),
         odd = wkt_below(4) == 0;
    for (int op = 0; op < nop; op++) {
        int64_t n = draw_strides(c, op, all_mixed || (!tidy && wkt_below(4) == 0) ? mixed : order, tidy);
        if (plain && !row_operand(c, op)) {
            n = 1;
            for (int i = r->ndim - 1; i >= 0; i--) {
                r->opnd[op].stride[order[i]] = n;
                n *= r->size[order[i]];
            }
        }
        size_t item = wki_dtype_size((wk_dtype)r->opnd[op].dtype);
        c->shares[op] = -1;
        for (int a = 0; a < c->prog.nload && !is_load(c, op); a++) {
            bool taken = row_operand(c, a) != row_operand(c, op);
            for (int b = c->prog.nload; b < op; b++)
                taken |= c->shares[b] == a;
            if (!taken && same_strides(r, a, op) && wkt_below(2))
                c->shares[op] = a;
        }
        c->bytes[op] = (size_t)(n > 0 ? n : 1) * item;
        if (wkt_below(8)) /* its start is then aligned too */
            c->bytes[op] = (c->bytes[op] + 15) / 16 * 16;
        if (c->shares[op] >= 0) {
            c->want[op] = c->want[c->shares[op]];
            c->got[op] = c->got[c->shares[op]];
            c->bytes[op] = c->bytes[c->shares[op]];
            continue;
        }
        c->want[op] = new_memory(c->bytes[op]);
        c->got[op] = new_memory(c->bytes[op]);
        if (is_load(c, op))
            fill(c->want[op], r->opnd[op].dtype, c->bytes[op], odd);
        memcpy(c->got[op], c->want[op], c->bytes[op]);
    }
}

static void draw_numbers(kcase *c) {
    c->run.prog = &c->prog;
    c->prog.inst = c->inst;
    for (int i = 0; i < MAX_NUMBERS; i++) {
        c->val[i] = wkt_uniform(-2, 2);
        c->arg[i] = (float)c->val[i];
        c->seq[i] = wkt_below(1000);
    }
    c->run.arg = c->arg;
    c->run.rng_seq = c->seq;
    c->run.seed = wkt_u64();
    c->run.fault = &c->want_fault;
}

/* Sometimes in place, which no program with a check is, and then sometimes after a fault. */
static void draw_stop(kcase *c) {
    bool checks = false;
    for (int i = 0; i < c->prog.ninst; i++)
        checks |= c->inst[i].code == WKI_L_CHECK;
    c->prog.in_place = !checks && wkt_below(4) == 0;
    c->stop = c->prog.in_place && wkt_below(2);
}

static void case_free(kcase *c) {
    for (int op = 0; op < c->prog.nload + c->prog.nstore; op++)
        if (c->shares[op] < 0) {
            wkt_guarded_free(c->want[op], c->bytes[op]);
            wkt_guarded_free(c->got[op], c->bytes[op]);
        }
    wki_cu_kernel_text_free(&c->text);
}

/* ---- random programs ----------------------------------------------------------------------------------- */

static const struct {
    const char *signature;
} prims[WKI_P_COUNT] = {
#define P(E, n, arity, signature) {signature},
#include "ops/prims.def"
};

static int add(kcase *c, wki_inst i) {
    if (!c->run.nred)
        i.level = WKI_ELEM;
    c->inst[c->prog.ninst] = i;
    return c->prog.ninst++;
}

/* A value of the type, of the row only or of any level; -1 when there is none. Masks for 'M'. */
static int pick(const kcase *c, const bool *mask, char type, bool row) {
    for (int tries = 0; tries < 60; tries++) {
        int n = c->prog.ninst, recent = n < 4 || tries & 1 ? n : 4;
        int v = n - 1 - (int)wkt_below((uint64_t)recent);
        const wki_inst *in = &c->inst[v];
        if (in->code == WKI_L_STORE || in->code == WKI_L_CHECK || (in->type == WKI_TF) != (type == 'F'))
            continue;
        if ((type == 'M' && !mask[v]) || (row && in->level != WKI_ROWV))
            continue;
        return v;
    }
    return -1;
}

static bool gives_mask(int prim) {
    return prim == WKI_P_LT || prim == WKI_P_LE || prim == WKI_P_EQ || prim == WKI_P_ILT || prim == WKI_P_IEQ;
}

static void add_prim(kcase *c, bool *mask, int prim, bool row) {
    const char *sig = prims[prim].signature;
    int v[3] = {-1, -1, -1};
    bool selects = prim == WKI_P_SEL || prim == WKI_P_ISEL, all_row = true;
    if (!sig[2])
        return;
    for (int k = 0; k < 3 && sig[2 + k]; k++) {
        v[k] = pick(c, mask, selects && k == 0 ? 'M' : sig[2 + k], row);
        if (v[k] < 0)
            return;
        all_row &= c->inst[v[k]].level == WKI_ROWV;
    }
    int i = add(c, (wki_inst){.code = WKI_L_PRIM,
                              .sub = (uint8_t)prim,
                              .level = all_row && wkt_below(4) ? WKI_ROWV : WKI_ELEM,
                              .type = sig[0] == 'F' ? WKI_TF : WKI_TI,
                              .a = (int16_t)v[0],
                              .b = (int16_t)v[1],
                              .c = (int16_t)v[2]});
    mask[i] = gives_mask(prim);
}

static void draw_program(kcase *c, bool rows) {
    static const uint8_t dtypes[] = {WK_F32, WK_F32, WK_F32, WK_F64, WK_I32, WK_I64, WK_U8, WK_BOOL};
    bool mask[WKI_LOOP_MAX_INST] = {0};
    wki_loop *p = &c->prog;
    bool only_f32 = wkt_below(2);
    p->nload = (int16_t)(1 + wkt_below(4));
    p->nstore = (int16_t)(1 + wkt_below(3));
    for (int op = 0; op < p->nload + p->nstore; op++)
        c->run.opnd[op].dtype = only_f32 ? WK_F32 : dtypes[wkt_below(sizeof dtypes)];
    for (int op = 0; op < p->nload; op++) {
        uint8_t t = c->run.opnd[op].dtype;
        int i = add(c, (wki_inst){.code = WKI_L_LOAD,
                                  .level = op && wkt_below(3) == 0 ? WKI_ROWV : WKI_ELEM,
                                  .type = t == WK_F32 || t == WK_F64 ? WKI_TF : WKI_TI,
                                  .a = (int16_t)op});
        mask[i] = t == WK_BOOL;
    }
    add(c, (wki_inst){
               .code = WKI_L_CONST, .level = WKI_ROWV, .type = WKI_TF, .imm.f = (float)wkt_uniform(-2, 2)});
    add(c, (wki_inst){
               .code = WKI_L_CONST, .level = WKI_ROWV, .type = WKI_TI, .imm.i = (int32_t)wkt_range(-3, 3)});
    if (wkt_below(2))
        add(c, (wki_inst){.code = WKI_L_ARG, .level = WKI_ROWV, .type = WKI_TF, .a = p->narg++});
    if (wkt_below(2))
        add(c, (wki_inst){.code = WKI_L_INDEX,
                          .level = wkt_below(4) ? WKI_ELEM : WKI_ROWV,
                          .type = WKI_TI,
                          .a = (int16_t)wkt_below(3)});
    while (wkt_below(3) == 0 && p->nrng < 2)
        add(c, (wki_inst){.code = WKI_L_RNG,
                          .sub = wkt_below(2) ? WKI_P_NORMAL : WKI_P_UNIFORM,
                          .level = wkt_below(5) ? WKI_ELEM : WKI_ROWV,
                          .type = WKI_TF,
                          .a = p->nrng++});
    int n = 2 + (int)wkt_below(16), limit = MAX_PROGRAM - 8;
    for (int k = 0; k < n && p->ninst < limit; k++) {
        if (rows && wkt_below(3) == 0) {
            int v = pick(c, mask, wkt_below(4) ? 'F' : 'I', false);
            if (v >= 0)
                add(c, (wki_inst){.code = WKI_L_REDUCE,
                                  .sub = (uint8_t)wkt_below(3),
                                  .level = WKI_ROWV,
                                  .type = c->inst[v].type,
                                  .a = (int16_t)v});
        } else {
            static const uint8_t common[] = {WKI_P_ADD, WKI_P_SUB, WKI_P_MUL, WKI_P_MAX, WKI_P_LT, WKI_P_SEL};
            add_prim(c, mask, wkt_below(2) ? common[wkt_below(sizeof common)] : (int)wkt_below(WKI_P_COUNT),
                     rows && wkt_below(3) == 0);
        }
    }
    if (wkt_below(4) == 0) {
        int m = pick(c, mask, 'M', rows && wkt_below(2));
        if (m >= 0)
            add(c, (wki_inst){.code = WKI_L_CHECK,
                              .level = c->inst[m].level,
                              .type = WKI_TI,
                              .a = (int16_t)m,
                              .imm.i = (int32_t)wkt_below(100)});
    }
    for (int j = 0; j < p->nstore; j++) {
        bool row = rows && wkt_below(3) == 0;
        int v = pick(c, mask, wkt_below(4) ? 'F' : 'I', row), back = (int)wkt_below(4);
        if (v < 0 || (!row && c->inst[p->ninst - 1 - back].code <= WKI_L_REDUCE &&
                      c->inst[p->ninst - 1 - back].code != WKI_L_STORE))
            v = p->ninst - 1 - back; /* of the last ones, so that programs are long */
        if (c->inst[v].code == WKI_L_STORE || c->inst[v].code == WKI_L_CHECK)
            v = 0;
        bool elem = c->inst[v].level == WKI_ELEM;
        add(c, (wki_inst){.code = WKI_L_STORE,
                          .level = elem || !row ? WKI_ELEM : WKI_ROWV,
                          .type = c->inst[v].type,
                          .a = (int16_t)(p->nload + j),
                          .b = (int16_t)v});
    }
}

static void random_case(kcase *c) {
    bool rows = wkt_below(5) > 1;
    draw_domain(&c->run, rows);
    draw_program(c, c->run.nred > 0);
    draw_numbers(c);
    draw_operands(c);
    snprintf(c->title, sizeof c->title, "random program of %d instructions", c->prog.ninst);
}

/* Few long rows, walked once: several blocks share a row, and memory beside the operands. */
static void long_rows_case(kcase *c) {
    do {
        if (c->prog.inst)
            case_free(c);
        *c = (kcase){0};
        int64_t size[3] = {(int64_t)wkt_below(4), 8193 + (int64_t)wkt_below(12000), 0};
        int nd = 2;
        uint32_t red = 2;
        if (wkt_below(2)) { /* columns of two dimensions around the rows */
            size[2] = 90 + (int64_t)wkt_below(40);
            size[1] = size[0];
            size[0] = 92 + (int64_t)wkt_below(40);
            nd = 3;
            red = 5;
        }
        wki_order_domain(&c->run, nd, size, red);
        draw_program(c, true);
        draw_numbers(c);
        draw_operands(c);
    } while (c->run.col || wki_cu_scratch_of(&c->run).counts == 0);
    snprintf(c->title, sizeof c->title, "random program of %d instructions in long rows", c->prog.ninst);
}

/* Index and random numbers where four neighbours go together, in the logical order or another. */
static void fours_case(kcase *c) {
    static const int64_t sizes[] = {4, 8, 12, 20, 6, 10, 5};
    int64_t size[3];
    int nd = 1 + (int)wkt_below(3);
    for (int d = 0; d < nd; d++)
        size[d] = sizes[wkt_below(sizeof sizes / sizeof *sizes)];
    wki_order_domain(&c->run, nd, size, 0);
    c->prog.nload = 2;
    c->prog.nstore = 1;
    c->prog.nrng = 1;
    for (int op = 0; op < 3; op++)
        c->run.opnd[op].dtype = op && wkt_below(2) ? WK_F64 : WK_F32;
    const wki_inst inst[] = {
        {.code = WKI_L_LOAD, .type = WKI_TF, .a = 0},
        {.code = WKI_L_LOAD, .type = WKI_TF, .a = 1},
        {.code = WKI_L_INDEX, .type = WKI_TI, .a = (int16_t)wkt_below(3)},
        {.code = WKI_L_PRIM, .sub = WKI_P_I2F, .type = WKI_TF, .a = 2, .b = -1, .c = -1},
        {.code = WKI_L_RNG, .sub = wkt_below(2) ? WKI_P_UNIFORM : WKI_P_NORMAL, .type = WKI_TF},
        {.code = WKI_L_PRIM, .sub = WKI_P_FMA, .type = WKI_TF, .a = 0, .b = 4, .c = 1},
        {.code = WKI_L_PRIM, .sub = WKI_P_ADD, .type = WKI_TF, .a = 5, .b = wkt_below(2) ? 3 : 4, .c = -1},
        {.code = WKI_L_STORE, .type = WKI_TF, .a = 2, .b = 6},
    };
    for (size_t i = 0; i < sizeof inst / sizeof *inst; i++)
        add(c, inst[i]);
    draw_numbers(c);
    draw_operands(c);
    snprintf(c->title, sizeof c->title, "index and random numbers");
}

/* ---- programs of the op table -------------------------------------------------------------------------- */

static void op_case(kcase *c, const wki_op *op, int which) {
    const wki_loop *l = &op->loop[which];
    char in = op->guard ? op->guard[which].in : 'F', out = op->guard ? op->guard[which].out : in;
    draw_domain(&c->run, op->klass == WKI_ROW);
    c->prog = *l;
    memcpy(c->inst, l->inst, (size_t)l->ninst * sizeof *l->inst);
    for (int i = 0; i < l->ninst; i++) {
        const wki_inst *x = &l->inst[i];
        if (x->code == WKI_L_LOAD)
            c->run.opnd[x->a].dtype = x->type == WKI_TF ? (in == 'D' ? WK_F64 : WK_F32)
                                      : in == 'B'       ? WK_BOOL
                                      : wkt_below(2)    ? WK_I64
                                                        : WK_U8;
        else if (x->code == WKI_L_STORE)
            c->run.opnd[x->a].dtype = out == 'F'   ? WK_F32
                                      : out == 'D' ? WK_F64
                                      : out == 'B' ? WK_BOOL
                                                   : WK_I64;
        if (!c->run.nred)
            c->inst[i].level = WKI_ELEM;
    }
    draw_numbers(c);
    draw_operands(c);
    snprintf(c->title, sizeof c->title, "%s", op->name);
}

static int op_programs(void) {
    int n = 0;
    for (int i = 0; i < wki_op_count; i++)
        n += wki_ops[i].loop ? wki_ops[i].nloop : 0;
    return n;
}

static void op_case_at(kcase *c, int k) {
    for (int i = 0; i < wki_op_count; i++) {
        int n = wki_ops[i].loop ? wki_ops[i].nloop : 0;
        if (k < n) {
            op_case(c, &wki_ops[i], k);
            return;
        }
        k -= n;
    }
}

/* ---- compiling for the CPU ----------------------------------------------------------------------------- */

typedef struct text {
    char *s;
    size_t len, cap;
} text;

static void append(text *t, const char *s) {
    size_t n = strlen(s);
    if (t->len + n + 1 > t->cap) {
        t->cap = 2 * t->cap + n + 65536;
        t->s = realloc(t->s, t->cap);
        if (!t->s)
            abort();
    }
    memcpy(t->s + t->len, s, n + 1);
    t->len += n;
}

/* Prelude and kernels, each once. */
static void append_program(text *t, const kcase *c, int n, bool cpu) {
    char *prelude = wki_emit_cuda_prelude();
    CHECK(prelude != NULL);
    append(t, prelude ? prelude : "");
    wki_free(prelude);
    for (int i = 0; i < n; i++) {
        bool seen = !c[i].text.src;
        for (int j = 0; j < i; j++)
            seen |= c[j].text.src && c[j].text.hash == c[i].text.hash;
        if (seen)
            continue;
        append(t, c[i].text.src);
        if (cpu) {
            append(t, "CUDA_ON_CPU(");
            append(t, c[i].text.name);
            append(t, ")\n");
        }
    }
}

/* NULL, with *why, when there is no C compiler or no place for what it makes. */
static void *build_for_cpu(const char *source, const char **why) {
    char dir[] = "/tmp/wick-emit-XXXXXX", c_file[64], so_file[64], command[512];
    void *lib = NULL;
    if (system("cc --version >/dev/null 2>&1")) {
        *why = "there is no cc";
        return NULL;
    }
    if (!mkdtemp(dir)) {
        *why = "no directory for temporary files";
        return NULL;
    }
    snprintf(c_file, sizeof c_file, "%s/kernels.c", dir);
    snprintf(so_file, sizeof so_file, "%s/kernels.so", dir);
    FILE *f = fopen(c_file, "w");
    if (f) {
        fprintf(f, "#include \"%s/cuda_on_cpu.h\"\n%s", wkt_dir(), source);
        fclose(f);
        snprintf(command, sizeof command,
                 "cc -std=gnu17 -O0 -w -fPIC -shared -ffp-contract=off "
                 "-fsanitize=alignment,bounds,integer-divide-by-zero "
                 "-fsanitize-undefined-trap-on-error -o %s %s",
                 so_file, c_file);
        if (system(command) == 0)
            lib = dlopen(so_file, RTLD_NOW | RTLD_LOCAL);
        else
            FAIL("cc does not compile the kernels");
    }
    *why = lib ? NULL : "what cc makes cannot be loaded";
    if (!getenv("WICK_TEST_KEEP")) {
        unlink(c_file);
        unlink(so_file);
        rmdir(dir);
    }
    return lib;
}

/* ---- running ------------------------------------------------------------------------------------------- */

typedef const char *(*runner)(const void *params, const unsigned long long *args, const unsigned *grid,
                              const unsigned *block, uint64_t seed);

enum { SLOT_POINTERS = 0, SLOT_VALUES = 32, SLOT_SEED = 60, SLOT_BASE, SLOT_FAULT, SLOT_STOP, SLOTS };

/* Operands alternately by slot and by address. */
static void bind_case(kcase *c, wki_cu_operand *opnd, int32_t *val, int32_t *rel, wki_cu_bind *b,
                      unsigned long long *args, int first_slot) {
    for (int op = 0; op < c->prog.nload + c->prog.nstore; op++) {
        uint64_t at = (uint64_t)(uintptr_t)c->got[op];
        bool slot = wkt_below(2);
        args[first_slot + op] = at - 40;
        opnd[op] = slot ? (wki_cu_operand){40, first_slot + op} : (wki_cu_operand){at, -1};
    }
    for (int i = 0; i < MAX_NUMBERS; i++) {
        val[i] = SLOT_VALUES + i;
        rel[i] = (int32_t)(c->seq[i] - c->seq[0]);
        memcpy(&args[val[i]], &c->val[i], 8);
    }
    args[SLOT_SEED] = c->run.seed;
    args[SLOT_BASE] = c->seq[0];
    args[SLOT_FAULT] = (unsigned long long)(uintptr_t)&c->got_fault;
    args[SLOT_STOP] = (unsigned long long)(uintptr_t)&c->stop;
    *b = (wki_cu_bind){.opnd = opnd,
                       .val_slot = val,
                       .rng_rel = rel,
                       .seed_slot = SLOT_SEED,
                       .rng_base_slot = SLOT_BASE,
                       .fault_slot = SLOT_FAULT};
}

static bool equal(const void *a, const void *b, uint8_t dtype, size_t bytes, size_t *at) {
    size_t item = wki_dtype_size((wk_dtype)dtype);
    for (size_t i = 0; i < bytes / item; i++) {
        const char *x = (const char *)a + i * item, *y = (const char *)b + i * item;
        if (!memcmp(x, y, item))
            continue;
        bool nan = dtype == WK_F32   ? isnan(*(const float *)x) && isnan(*(const float *)y)
                   : dtype == WK_F64 ? isnan(*(const double *)x) && isnan(*(const double *)y)
                                     : false;
        if (!nan) {
            *at = i;
            return false;
        }
    }
    return true;
}

static void describe(const kcase *c, text *t) {
    char s[256];
    const wki_loop_run *r = &c->run;
    snprintf(s, sizeof s, "nred %d, %s, sizes", r->nred, r->col ? "col" : "row");
    append(t, s);
    for (int d = 0; d < r->ndim; d++) {
        snprintf(s, sizeof s, " %lld", (long long)r->size[d]);
        append(t, s);
    }
    for (int op = 0; op < c->prog.nload + c->prog.nstore; op++) {
        snprintf(s, sizeof s, "; operand %d %s%s:", op, wk_dtype_name((wk_dtype)r->opnd[op].dtype),
                 c->shares[op] >= 0 ? " in place" : "");
        append(t, s);
        for (int d = 0; d < r->ndim; d++) {
            snprintf(s, sizeof s, " %lld", (long long)r->opnd[op].stride[d]);
            append(t, s);
        }
    }
    append(t, "\n");
    append(t, c->text.src);
}

static bool compare(const kcase *c) {
    bool ok = CHECK_EQ_I(c->got_fault, c->want_fault);
    for (int op = c->prog.nload; op < c->prog.nload + c->prog.nstore; op++) {
        size_t at = 0;
        if (equal(c->got[op], c->want[op], c->run.opnd[op].dtype, c->bytes[op], &at))
            continue;
        ok = false;
        size_t item = wki_dtype_size((wk_dtype)c->run.opnd[op].dtype);
        uint64_t got = 0, want = 0;
        memcpy(&got, (char *)c->got[op] + at * item, item);
        memcpy(&want, (char *)c->want[op] + at * item, item);
        FAIL("%s: operand %d differs at %zu: %llx, not %llx", c->title, op, at, (unsigned long long)got,
             (unsigned long long)want);
    }
    if (!ok && getenv("WICK_TEST_KEEP")) {
        text t = {0};
        describe(c, &t);
        fprintf(stderr, "%s\n", t.s);
        free(t.s);
    }
    return ok;
}

/* What a kernel that has been told to stop does: nothing. */
static bool run_reference(kcase *c) {
    if (c->stop)
        return true;
    for (int op = 0; op < c->prog.nload + c->prog.nstore; op++)
        c->run.opnd[op].data = c->want[op];
    return CHECK(wki_loop_reference(&c->run));
}

static bool launch_kernel(kcase *c, void *lib, const wki_cu_loop_params *params,
                          const unsigned long long *args) {
    char symbol[64];
    snprintf(symbol, sizeof symbol, "%s_run", c->text.name);
    runner run = (runner)dlsym(lib, symbol);
    if (!run) {
        FAIL("%s: no function %s", c->title, symbol);
        return false;
    }
    const char *wrong = run(params->data, args, params->grid, params->block, wkt_u64());
    if (wrong)
        FAIL("%s: %s", c->title, wrong);
    return !wrong;
}

static bool run_kernel(kcase *c, void *lib) {
    unsigned long long args[SLOTS] = {0};
    wki_cu_operand opnd[MAX_OPERANDS];
    int32_t val[MAX_NUMBERS], rel[MAX_NUMBERS];
    wki_cu_bind b;
    wki_cu_loop_params params;
    const char *why = NULL;
    bind_case(c, opnd, val, rel, &b, args, SLOT_POINTERS);
    wki_cu_scratch need = wki_cu_scratch_of(&c->run);
    void *scratch = new_memory(need.bytes);
    int32_t *counts = calloc((size_t)need.counts + 1, sizeof *counts);
    b.scratch = (uint64_t)(uintptr_t)scratch;
    b.counts = (uint64_t)(uintptr_t)counts;
    bool ok = scratch && counts;
    if (!ok)
        FAIL("%s: out of memory", c->title);
    if (ok && !wki_cu_loop_params_fill(&c->run, &b, &params, &why)) {
        FAIL("%s: %s", c->title, why);
        ok = false;
    }
    ok = ok && (!params.grid[0] || launch_kernel(c, lib, &params, args));
    for (int i = 0; ok && counts && i < need.counts; i++)
        CHECK_EQ_I(counts[i], 0);
    free(counts);
    wkt_guarded_free(scratch, need.bytes);
    return ok;
}

/* Runs n cases that are ready but for their texts, and frees them. */
static void check_cases(kcase *c, int n) {
    text t = {0};
    const char *why = NULL;
    for (int i = 0; i < n; i++) {
        draw_stop(&c[i]);
        if (!wki_emit_cuda(&c[i].run, &c[i].text, &why))
            FAIL("%s: %s", c[i].title, why);
        else if (!strstr(c[i].text.src, "const WK_U64 *args) {\n    wkl_begin();\n"))
            FAIL("%s does not wait for the kernel before it first", c[i].title);
    }
    append_program(&t, c, n, true);
    void *lib = build_for_cpu(t.s, &why);
    free(t.s);
    for (int i = 0; lib && i < n; i++)
        if (c[i].text.src && run_reference(&c[i]) && run_kernel(&c[i], lib))
            compare(&c[i]);
    for (int i = 0; i < n; i++)
        case_free(&c[i]);
    if (!lib)
        SKIP("%s", why);
    dlclose(lib);
}

static kcase *new_cases(int n) {
    kcase *c = calloc((size_t)n, sizeof *c);
    if (!c)
        abort();
    return c;
}

TEST(emit_cuda, random_programs_equal_the_reference) {
    enum { N = 100 };
    for (int turn = 0; turn < (wkt_quick() ? 1 : 3); turn++) {
        kcase *c = new_cases(N);
        for (int i = 0; i < N; i++)
            random_case(&c[i]);
        check_cases(c, N);
        free(c);
    }
}

TEST(emit_cuda, long_rows_equal_the_reference) {
    enum { N = 24 };
    kcase *c = new_cases(N);
    for (int i = 0; i < N; i++)
        long_rows_case(&c[i]);
    check_cases(c, N);
    free(c);
}

TEST(emit_cuda, fours_equal_the_reference) {
    enum { N = 150 };
    kcase *c = new_cases(N);
    for (int i = 0; i < N; i++)
        fours_case(&c[i]);
    check_cases(c, N);
    free(c);
}

TEST(emit_cuda, ops_equal_the_reference) {
    int n = op_programs();
    for (int turn = 0; turn < (wkt_quick() ? 1 : 2); turn++) {
        kcase *c = new_cases(n);
        for (int i = 0; i < n; i++)
            op_case_at(&c[i], i);
        check_cases(c, n);
        free(c);
    }
}

/* Offsets beyond 32 bits: bytes far apart in memory that is reserved and not used. */
TEST(emit_cuda, wide_strides) {
    const int64_t far = (int64_t)1 << 30, near[] = {40, 1500};
    uint8_t *memory = mmap(NULL, (size_t)far * 3, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        SKIP("no address space for strides of 1 GiB");
    enum { N = 16 };
    kcase *c = new_cases(N);
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < 2000; i++)
            memory[k * far + i] = (uint8_t)wkt_u64();
    for (int i = 0; i < N; i++) {
        int64_t size[2] = {3, near[i / 4 % 2]};
        uint32_t red = (uint32_t)i % 4;
        wki_order_domain(&c[i].run, 2, size, red);
        c[i].prog = (wki_loop){.nload = 1, .nstore = 1, .nrng = 1};
        add(&c[i], (wki_inst){.code = WKI_L_LOAD, .type = WKI_TI});
        int v =
            add(&c[i],
                (wki_inst){.code = WKI_L_PRIM, .sub = WKI_P_I2F, .type = WKI_TF, .a = 0, .b = -1, .c = -1});
        if (i >= N / 2) {
            int rng = add(&c[i], (wki_inst){.code = WKI_L_RNG, .sub = WKI_P_UNIFORM, .type = WKI_TF});
            v = add(&c[i], (wki_inst){.code = WKI_L_PRIM,
                                      .sub = WKI_P_ADD,
                                      .type = WKI_TF,
                                      .a = (int16_t)v,
                                      .b = (int16_t)rng,
                                      .c = -1});
        }
        if (red)
            v = add(&c[i], (wki_inst){.code = WKI_L_REDUCE,
                                      .sub = WKI_R_SUM,
                                      .level = WKI_ROWV,
                                      .type = WKI_TF,
                                      .a = (int16_t)v});
        add(&c[i], (wki_inst){.code = WKI_L_STORE,
                              .level = red ? WKI_ROWV : WKI_ELEM,
                              .type = WKI_TF,
                              .a = 1,
                              .b = (int16_t)v});
        c[i].run.opnd[0].dtype = WK_U8;
        c[i].run.opnd[1].dtype = WK_F32;
        draw_numbers(&c[i]);
        draw_operands(&c[i]);
        wkt_guarded_free(c[i].want[0], c[i].bytes[0]);
        wkt_guarded_free(c[i].got[0], c[i].bytes[0]);
        c[i].want[0] = c[i].got[0] = memory;
        c[i].shares[0] = 0; /* not the case's own */
        for (int d = 0; d < 2; d++)
            c[i].run.opnd[0].stride[d] = c[i].run.logical[d] ? 1 : far;
        snprintf(c[i].title, sizeof c[i].title, "wide strides, mask %u", red);
    }
    check_cases(c, N);
    free(c);
    munmap(memory, (size_t)far * 3);
}

/* ---- many tensors -------------------------------------------------------------------------------------- */

enum { MAX_TENSORS = 24 };

/* One launch for all tensors against the reference tensor by tensor. */
static void check_multi(kcase *c, int n) {
    text t = {0};
    const char *why = NULL;
    wki_cu_loop_params params;
    wki_cu_operand opnd[MAX_TENSORS][MAX_OPERANDS];
    wki_cu_bind bind[MAX_TENSORS];
    int32_t val[MAX_NUMBERS], rel[MAX_NUMBERS];
    unsigned long long args[SLOTS + MAX_TENSORS * MAX_OPERANDS] = {0};
    const wki_loop_run *run[MAX_TENSORS];
    for (int i = 0; i < n; i++) {
        run[i] = &c[i].run;
        CHECK(wki_cu_multi_joins(run[0], run[i]));
        bind_case(&c[i], opnd[i], val, rel, &bind[i], args, SLOTS + i * MAX_OPERANDS);
        if (i)
            bind[i].val_slot = bind[i].rng_rel = NULL;
    }
    for (int i = 0; i < MAX_NUMBERS; i++)
        memcpy(&args[SLOT_VALUES + i], &c[0].val[i], 8);
    args[SLOT_FAULT] = (unsigned long long)(uintptr_t)&c[0].got_fault;
    args[SLOT_STOP] = (unsigned long long)(uintptr_t)&c[0].stop;
    uint64_t *table = wkt_guarded(wki_cu_multi_words(&c[0].prog, n) * 8);
    if (!table || !wki_emit_cuda_multi(run[0], &c[0].text, &why) ||
        !wki_cu_multi_fill(run, bind, n, (uint64_t)(uintptr_t)table, table, &params, &why)) {
        FAIL("%s: %s", c[0].title, why);
        return;
    }
    append_program(&t, c, 1, true);
    void *lib = build_for_cpu(t.s, &why);
    free(t.s);
    if (lib) {
        char symbol[64];
        snprintf(symbol, sizeof symbol, "%s_run", c[0].text.name);
        runner launch = (runner)dlsym(lib, symbol);
        CHECK(launch != NULL);
        if (launch && params.grid[0])
            CHECK(launch(params.data, args, params.grid, params.block, wkt_u64()) == NULL);
        for (int i = 0; i < n; i++)
            if (run_reference(&c[i]))
                compare(&c[i]);
        dlclose(lib);
    }
    wkt_guarded_free(table, wki_cu_multi_words(&c[0].prog, n) * 8);
    if (!lib)
        SKIP("%s", why);
}

/* Sizes from nothing to several chunks; values in place, as optimizers have them. */
static void multi_cases(kcase *c, int n, const wki_op *op) {
    draw_stop(&c[0]);
    int in_place = c[0].prog.in_place;
    for (int i = 0; i < n; i++) {
        int64_t size[2] = {(int64_t)wkt_below(3) ? draw_size() : (int64_t)wkt_below(130),
                           (int64_t)wkt_below(100)};
        wki_order_domain(&c[i].run, 2, size, 0);
        c[i].prog = op->loop[0];
        memcpy(c[i].inst, op->loop[0].inst, (size_t)op->loop[0].ninst * sizeof(wki_inst));
        draw_numbers(&c[i]);
        c[i].run.arg = c[0].arg;
        c[i].run.seed = c[0].run.seed;
        c[i].prog.in_place = in_place;
        c[i].stop = c[0].stop;
        for (int o = 0; o < c[i].prog.nload + c[i].prog.nstore; o++) {
            c[i].run.opnd[o].dtype = WK_F32;
            c[i].run.opnd[o].stride[0] = size[1];
            c[i].run.opnd[o].stride[1] = 1;
            size_t items = (size_t)(size[0] * size[1]) + wkt_below(3);
            c[i].bytes[o] = wkt_below(4) ? (items * 4 + 15) / 16 * 16 : items * 4;
            c[i].shares[o] = o < c[i].prog.nload ? -1 : wki_store_role(op, o - c[i].prog.nload);
            if (c[i].shares[o] >= 0) {
                c[i].want[o] = c[i].want[c[i].shares[o]];
                c[i].got[o] = c[i].got[c[i].shares[o]];
                c[i].bytes[o] = c[i].bytes[c[i].shares[o]];
                continue;
            }
            c[i].want[o] = new_memory(c[i].bytes[o]);
            c[i].got[o] = new_memory(c[i].bytes[o]);
            fill(c[i].want[o], WK_F32, c[i].bytes[o], false);
            memcpy(c[i].got[o], c[i].want[o], c[i].bytes[o]);
        }
        snprintf(c[i].title, sizeof c[i].title, "%s, tensor %d", op->name, i);
    }
}

TEST(emit_cuda, many_tensors_in_one_launch) {
    for (int i = 0; i < wki_op_count; i++) {
        const wki_op *op = &wki_ops[i];
        if (op->nin >= 0 || !op->loop || !op->writes)
            continue;
        int n = 1 + (int)wkt_below(MAX_TENSORS);
        kcase *c = new_cases(n);
        multi_cases(c, n, op);
        check_multi(c, n);
        for (int k = 0; k < n; k++)
            case_free(&c[k]);
        free(c);
    }
}

/* ---- the compiler for CUDA ----------------------------------------------------------------------------- */

static void compile(wki_nvrtc *rtc, const char *source, const char *arch) {
    wki_cu_error err = {0};
    wki_nvrtc_binary binary;
    const wki_nvrtc_source s = {.text = source, .name = "kernels", .arch = arch};
    if (wki_nvrtc_compile(rtc, &s, &binary, &err))
        FAIL("%s: %s", arch, err.text);
    else
        CHECK(binary.size > 0);
    wki_nvrtc_binary_free(&binary);
}

TEST(emit_cuda, nvrtc_compiles_every_kernel) {
    wki_nvrtc *rtc = NULL;
    wki_cu_error err = {0};
    if (wki_nvrtc_open(NULL, 0, &rtc, &err))
        SKIP("%s", err.text);
    int ops = wkt_quick() ? 0 : op_programs(), n = ops + 30;
    kcase *c = new_cases(n);
    text t = {0};
    const char *why = NULL;
    for (int i = 0; i < n; i++) {
        if (i < ops)
            op_case_at(&c[i], i);
        else
            random_case(&c[i]);
        draw_stop(&c[i]);
        if (!wki_emit_cuda(&c[i].run, &c[i].text, &why))
            FAIL("%s: %s", c[i].title, why);
    }
    append_program(&t, c, n, false);
    compile(rtc, t.s, "sm_80");
    compile(rtc, t.s, "sm_90");
    free(t.s);
    for (int i = 0; i < n; i++)
        case_free(&c[i]);
    free(c);
    wki_nvrtc_close(rtc);
}

/* ---- texts --------------------------------------------------------------------------------------------- */

/* The text of an op on contiguous operands of the given sizes. */
static uint64_t text_of(const char *op, int64_t n, int64_t d) {
    kcase *c = new_cases(1);
    uint64_t hash = 0;
    for (int i = 0; i < wki_op_count; i++)
        if (!strcmp(wki_ops[i].name, op)) {
            const wki_loop *l = wki_ops[i].loop;
            wki_order_domain(&c->run, 2, (int64_t[]){n, d}, wki_ops[i].klass == WKI_ROW ? 2 : 0);
            c->run.prog = l;
            for (int o = 0; o < l->nload + l->nstore; o++) {
                c->run.opnd[o].dtype = WK_F32;
                c->run.opnd[o].stride[0] = d;
                c->run.opnd[o].stride[1] = 1;
            }
            const char *why = NULL;
            CHECK(wki_emit_cuda(&c->run, &c->text, &why));
            hash = c->text.hash;
            wki_cu_kernel_text_free(&c->text);
        }
    free(c);
    return hash;
}

TEST(emit_cuda, texts_do_not_depend_on_sizes) {
    CHECK(text_of("add", 3, 5) == text_of("add", 1000, 777));
    CHECK(text_of("add", 3, 5) != text_of("mul", 3, 5));
    CHECK(text_of("softmax", 7, 130) == text_of("softmax", 900, 200));
    CHECK(text_of("softmax", 7, 130) != text_of("softmax", 7, 500));
    CHECK(text_of("softmax", 7, 2000) == text_of("softmax", 3, 50000));
}

TEST(emit_cuda, survives_a_full_heap) {
    kcase *c = new_cases(1);
    const char *why = NULL;
    op_case_at(c, 0);
    int64_t live = wki_alloc_live();
    for (int64_t n = 1;; n++) {
        wki_alloc_fail_once(n);
        bool ok = wki_emit_cuda(&c->run, &c->text, &why);
        wki_alloc_fail_once(0);
        if (ok)
            break;
        CHECK_STR(why, "no host memory for a kernel's text");
        CHECK(c->text.src == NULL);
        CHECK_EQ_I(wki_alloc_live(), live);
    }
    case_free(c);
    free(c);
}

TEST(emit_cuda, refuses_what_it_does_not_know) {
    kcase *c = new_cases(1);
    const char *why = NULL;
    op_case_at(c, 0);
    uint8_t dtype = c->run.opnd[0].dtype;
    c->run.opnd[0].dtype = WK_DTYPE_COUNT;
    CHECK(!wki_emit_cuda(&c->run, &c->text, &why));
    CHECK_STR(why, "a dtype that CUDA loops do not know");
    c->run.opnd[0].dtype = WK_I32; /* read as a float */
    CHECK(!wki_emit_cuda(&c->run, &c->text, &why));
    CHECK_STR(why, "a loop program does not fit its operands' dtypes");
    c->run.opnd[0].dtype = dtype;
    c->inst[c->prog.ninst - 1].b = c->prog.ninst;
    CHECK(!wki_emit_cuda(&c->run, &c->text, &why));
    CHECK_STR(why, "a loop program uses a value before it is made");
    case_free(c);
    free(c);
}
