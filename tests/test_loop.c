/* The executor of loop programs: random programs over random domains against the reference interpreter, bit for bit, on
 * every instruction set of this machine and several thread counts; then what random programs do not reach. Buffers end at
 * a forbidden page and are compared whole, so a stray read or write shows. */
#include "backend/backend.h"
#include "harness.h"
#include "util_guard.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t dtype_bytes(int d) { return wk_dtype_bits((wk_dtype)d) / 8; }

/* ---- a run with its memory ----------------------------------------------------------------------------------------- */

enum { LEAD = 64, MAX_OPS = WKI_LOOP_MAX_OPERANDS };

typedef struct {
    wki_loop_run r;
    wki_loop prog;
    wki_inst inst[WKI_LOOP_MAX_INST];
    float arg[8];
    uint64_t seq[2];
    int32_t fault, want_fault;
    struct {
        int owner; /* operand whose memory this is */
        size_t bytes;
        uint8_t *live, *start, *want;
    } mem[MAX_OPS];
} trial;

static void set_memory(trial *t, int o, int64_t elements) {
    size_t n = LEAD + (size_t)elements * dtype_bytes(t->r.opnd[o].dtype);
    t->mem[o].owner = o;
    t->mem[o].bytes = n;
    t->mem[o].live = wkt_guarded(n);
    t->mem[o].start = malloc(n);
    t->mem[o].want = malloc(n);
    t->r.opnd[o].data = t->mem[o].live + LEAD;
}

static void share_memory(trial *t, int o, int with) {
    t->mem[o].owner = with;
    t->r.opnd[o] = t->r.opnd[with];
}

static void drop(trial *t) {
    for (int o = 0; o < t->prog.nload + t->prog.nstore; o++)
        if (t->mem[o].owner == o) {
            wkt_guarded_free(t->mem[o].live, t->mem[o].bytes);
            free(t->mem[o].start);
            free(t->mem[o].want);
        }
}

static double some_number(void) {
    static const double special[] = {0.0,    -0.0, INFINITY,   -INFINITY, NAN, 1e-42,
                                     -1e-39, 3e38, 16777217.0, 0.5,       1.0};
    switch (wkt_below(12)) {
    case 0:
        return special[wkt_below(sizeof special / sizeof *special)];
    case 1:
        return (double)wkt_range(-3, 3);
    case 2:
        return wkt_normal() * exp(wkt_uniform(-60, 60));
    default:
        return wkt_normal();
    }
}

/* A third of the trials is free of NaN and infinity, so that sums mean something. */
static void fill(void *p, int dtype, size_t n, bool tame) {
    for (size_t i = 0; i < n; i++) {
        double x = tame ? wkt_normal() : some_number();
        int64_t k = wkt_below(20) ? wkt_range(-40, 40) : (int64_t)wkt_u64();
        switch (dtype) {
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
        case WK_U8:
            ((uint8_t *)p)[i] = (uint8_t)k;
            break;
        case WK_BOOL:
            ((uint8_t *)p)[i] = (uint8_t)wkt_below(2);
            break;
        default:
            break;
        }
    }
}

static void fill_all(trial *t, bool tame) {
    for (int o = 0; o < t->prog.nload + t->prog.nstore; o++)
        if (t->mem[o].owner == o) {
            size_t bytes = t->mem[o].bytes - LEAD;
            memset(t->mem[o].start, 0xa5, LEAD);
            fill(t->mem[o].start + LEAD, t->r.opnd[o].dtype, bytes / dtype_bytes(t->r.opnd[o].dtype), tame);
        }
}

static void restore(trial *t) {
    t->fault = 0;
    for (int o = 0; o < t->prog.nload + t->prog.nstore; o++)
        if (t->mem[o].owner == o)
            memcpy(t->mem[o].live, t->mem[o].start, t->mem[o].bytes);
}

static void run_reference(trial *t) {
    restore(t);
    CHECK(wki_loop_reference(&t->r));
    t->want_fault = t->fault;
    for (int o = 0; o < t->prog.nload + t->prog.nstore; o++)
        if (t->mem[o].owner == o)
            memcpy(t->mem[o].want, t->mem[o].live, t->mem[o].bytes);
}

/* Equal bytes, but any NaN for any NaN. Returns the first element that differs, or -1. */
static int64_t difference(const uint8_t *got, const uint8_t *want, int dtype, size_t bytes) {
    size_t w = dtype_bytes(dtype);
    for (size_t i = 0; i < bytes / w; i++) {
        if (!memcmp(got + i * w, want + i * w, w))
            continue;
        float f[2];
        double d[2];
        if (dtype == WK_F32) {
            memcpy(&f[0], got + i * w, w);
            memcpy(&f[1], want + i * w, w);
            if (f[0] != f[0] && f[1] != f[1])
                continue;
        } else if (dtype == WK_F64) {
            memcpy(&d[0], got + i * w, w);
            memcpy(&d[1], want + i * w, w);
            if (d[0] != d[0] && d[1] != d[1])
                continue;
        }
        return (int64_t)i;
    }
    return -1;
}

static void describe(const trial *t) {
    static const char *const codes[] = {"load", "store", "prim", "reduce", "const",
                                        "arg",  "index", "rng",  "check"};
    static const char *const prims[] = {
#define P(E, n, arity, signature) #n,
#include "ops/prims.def"
    };
    char text[8192];
    int n = 0;
    for (int d = 0; d < t->r.ndim; d++)
        n += snprintf(text + n, sizeof text - (size_t)n, "%s%lld", d == t->r.ndim - t->r.nred ? " | " : " ",
                      (long long)t->r.size[d]);
    n += snprintf(text + n, sizeof text - (size_t)n, "%s\n", t->r.col ? " col" : "");
    for (int i = 0; i < t->prog.ninst && n < 8000; i++) {
        const wki_inst *in = &t->inst[i];
        n += snprintf(text + n, sizeof text - (size_t)n, "  %d: %s %s %s %c %d %d %d\n", i, codes[in->code],
                      in->code == WKI_L_PRIM ? prims[in->sub]
                      : in->sub == 0         ? "0"
                      : in->sub == 1         ? "1"
                                             : "2",
                      in->level ? "row" : "elem", in->type ? 'I' : 'F', in->a, in->b, in->c);
    }
    for (int o = 0; o < t->prog.nload + t->prog.nstore && n < 8000; o++) {
        n += snprintf(text + n, sizeof text - (size_t)n, "  operand %d %s in %d:", o,
                      wk_dtype_name((wk_dtype)t->r.opnd[o].dtype), t->mem[o].owner);
        for (int d = 0; d < t->r.ndim; d++)
            n += snprintf(text + n, sizeof text - (size_t)n, " %lld", (long long)t->r.opnd[o].stride[d]);
        n += snprintf(text + n, sizeof text - (size_t)n, "\n");
    }
    FAIL("%s", text);
}

/* `kept` is for runs that repeat, NULL for one alone. */
static bool compare(trial *t, wki_isa isa, wki_pool *pool, wki_loop_kept *kept) {
    restore(t);
    if (!CHECK(kept ? wki_loop_cpu_again(&t->r, isa, pool, kept) : wki_loop_cpu(&t->r, isa, pool)))
        return false;
    bool ok = CHECK_EQ_I(t->fault, t->want_fault);
    for (int o = 0; o < t->prog.nload + t->prog.nstore; o++) {
        if (t->mem[o].owner != o)
            continue;
        int dtype = t->r.opnd[o].dtype;
        int64_t at = memcmp(t->mem[o].live, t->mem[o].want, LEAD) ? -2 : -1;
        if (at == -1)
            at = difference(t->mem[o].live + LEAD, t->mem[o].want + LEAD, dtype, t->mem[o].bytes - LEAD);
        if (at != -1) {
            size_t w = dtype_bytes(dtype), skip = at < 0 ? 0 : LEAD + (size_t)at * w;
            uint64_t got = 0, want = 0;
            memcpy(&got, t->mem[o].live + skip, w);
            memcpy(&want, t->mem[o].want + skip, w);
            FAIL("%s, %d threads: operand %d differs at element %lld: %llx, not %llx", wki_isa_name(isa),
                 wki_pool_size(pool), o, (long long)at, (unsigned long long)got, (unsigned long long)want);
            ok = false;
        }
    }
    if (!ok)
        describe(t);
    return ok;
}

/* Every instruction set here; threads as given by the pools (NULL: none). */
static bool compare_all(trial *t, wki_pool *const *pool, int npool) {
    run_reference(t);
    for (int isa = WKI_ISA_BASELINE; isa <= (int)wki_cpu_isa(); isa++)
        for (int k = 0; k < npool; k++)
            if (!compare(t, (wki_isa)isa, pool[k], NULL))
                return false;
    size_t bytes = wki_loop_kept_bytes(&t->r);
    wki_loop_kept *kept = bytes ? malloc(bytes) : NULL;
    bool ok = true;
    for (int isa = WKI_ISA_BASELINE; kept && ok && isa <= (int)wki_cpu_isa(); isa++) {
        wki_loop_keep(&t->r, kept);
        for (int k = 0; ok && k < 2 * npool; k++)
            ok = compare(t, (wki_isa)isa, pool[k % npool], kept);
    }
    free(kept);
    return ok;
}

/* ---- random trials ------------------------------------------------------------------------------------------------- */

static int emit(trial *t, wki_inst in) {
    t->inst[t->prog.ninst] = in;
    return t->prog.ninst++;
}

static bool is_mask(const trial *t, int v) {
    const wki_inst *in = &t->inst[v];
    if (in->code == WKI_L_LOAD)
        return t->r.opnd[in->a].dtype == WK_BOOL;
    if (in->code == WKI_L_CONST)
        return in->type == WKI_TI && (in->imm.i == 0 || in->imm.i == -1);
    return in->code == WKI_L_PRIM && (in->sub == WKI_P_LT || in->sub == WKI_P_LE || in->sub == WKI_P_EQ ||
                                      in->sub == WKI_P_ILT || in->sub == WKI_P_IEQ);
}

static bool fit(const trial *t, int v, int type, bool mask, int level) {
    const wki_inst *in = &t->inst[v];
    if (in->code == WKI_L_STORE || in->code == WKI_L_CHECK)
        return false;
    return in->type == type && (!mask || is_mask(t, v)) && (level == WKI_ELEM || in->level == WKI_ROWV);
}

/* A value of this type usable at this level; a constant when there is none. */
static int16_t pick(trial *t, int type, bool mask, int level) {
    for (int tries = 0; tries < 12 && t->prog.ninst; tries++) {
        int v = (int)wkt_below((uint64_t)t->prog.ninst);
        if (tries < 6 && t->prog.ninst > 4) /* rather a recent one: deep programs */
            v = t->prog.ninst - 1 - (int)wkt_below(4);
        if (fit(t, v, type, mask, level))
            return (int16_t)v;
    }
    wki_inst in = {.code = WKI_L_CONST, .level = (uint8_t)level, .type = (uint8_t)type};
    if (type == WKI_TF)
        in.imm.f = (float)some_number();
    else
        in.imm.i = mask ? -(int32_t)wkt_below(2) : (int32_t)wkt_range(-5, 5);
    return (int16_t)emit(t, in);
}

static void add_prim(trial *t, int level) {
    static const char *const signature[] = {
#define P(E, n, arity, signature) signature,
#include "ops/prims.def"
    };
    int p = (int)wkt_below(WKI_P_COUNT);
    const char *s = signature[p];
    if (!s[2])
        return;
    wki_inst in = {.code = WKI_L_PRIM,
                   .sub = (uint8_t)p,
                   .level = (uint8_t)level,
                   .type = s[0] == 'I',
                   .a = -1,
                   .b = -1,
                   .c = -1};
    int16_t *v[] = {&in.a, &in.b, &in.c};
    for (int k = 0; s[2 + k]; k++)
        *v[k] = pick(t, s[2 + k] == 'I', k == 0 && (p == WKI_P_SEL || p == WKI_P_ISEL), level);
    emit(t, in);
}

static void add_load(trial *t, int level) {
    static const uint8_t types[] = {WK_F32, WK_F32, WK_F32, WK_F64, WK_I64, WK_I32, WK_U8, WK_BOOL};
    if (t->prog.nload == 6)
        return;
    int o = t->prog.nload++;
    uint8_t d = t->r.opnd[o].dtype = types[wkt_below(sizeof types)];
    emit(t, (wki_inst){.code = WKI_L_LOAD,
                       .level = (uint8_t)level,
                       .type = !(d == WK_F32 || d == WK_F64),
                       .a = (int16_t)o});
}

static void add_any(trial *t) {
    int level = t->r.nred && wkt_below(3) == 0 ? WKI_ROWV : WKI_ELEM;
    wki_inst in = {.level = (uint8_t)level, .a = -1, .b = -1, .c = -1};
    switch (wkt_below(16)) {
    case 0:
    case 1:
        add_load(t, level);
        return;
    case 2:
        in.code = WKI_L_ARG;
        in.a = (int16_t)wkt_below(8);
        break;
    case 3:
        in.code = WKI_L_INDEX;
        in.type = WKI_TI;
        in.a = (int16_t)wkt_below((uint64_t)t->r.ndim + 1);
        break;
    case 4:
        in.code = WKI_L_RNG;
        in.sub = wkt_below(2) ? WKI_P_UNIFORM : WKI_P_NORMAL;
        in.a = (int16_t)wkt_below(2);
        break;
    case 5:
    case 6:
    case 7:
        if (!t->r.nred && wkt_below(8))
            return;
        in.type = (uint8_t)(wkt_below(4) == 0);
        in.code = WKI_L_REDUCE;
        in.level = WKI_ROWV;
        in.sub = (uint8_t)wkt_below(3);
        in.a = pick(t, in.type, false, WKI_ELEM);
        break;
    default:
        add_prim(t, level);
        return;
    }
    emit(t, in);
}

static void add_store(trial *t, bool plain) {
    static const uint8_t types[] = {WK_F32, WK_F32, WK_F32, WK_I32, WK_F64, WK_I64, WK_U8, WK_BOOL};
    int level = t->r.nred && wkt_below(3) == 0 ? WKI_ROWV : WKI_ELEM;
    int16_t v = pick(t, wkt_below(3) == 0, false, level);
    if (!plain && wkt_below(8) == 0) {
        int16_t m = pick(t, WKI_TI, true, level);
        emit(t, (wki_inst){.code = WKI_L_CHECK, .level = (uint8_t)level, .a = m, .imm.i = 5});
        return;
    }
    /* operands are numbered once all loads are known; until then a is the store's number and c its dtype */
    emit(t, (wki_inst){.code = WKI_L_STORE,
                       .level = (uint8_t)level,
                       .type = t->inst[v].type,
                       .a = t->prog.nstore++,
                       .b = v,
                       .c = types[wkt_below(sizeof types)]});
}

/* With `plain`: nothing but what contiguous operands run without a plan. */
static void random_program(trial *t, bool plain) {
    int n = 2 + (int)wkt_below(wkt_below(4) ? 12 : plain ? 20 : 60);
    t->prog.inst = t->inst;
    add_load(t, WKI_ELEM);
    for (int i = 0; i < n && t->prog.ninst < 120; i++) {
        if (!plain)
            add_any(t);
        else if (wkt_below(8) == 0)
            add_load(t, WKI_ELEM);
        else
            add_prim(t, WKI_ELEM);
        if (wkt_below(12) == 0 && t->prog.nstore < 6)
            add_store(t, plain);
    }
    do
        add_store(t, plain);
    while (!t->prog.nstore || (t->prog.nstore < 8 && wkt_below(2)));
    t->prog.narg = 8;
    t->prog.nrng = 2;
    for (int i = 0; i < t->prog.ninst; i++) {
        if (t->inst[i].code == WKI_L_STORE) {
            t->inst[i].a = (int16_t)(t->inst[i].a + t->prog.nload);
            t->r.opnd[t->inst[i].a].dtype = (uint8_t)t->inst[i].c;
            t->inst[i].c = -1;
        }
    }
}

static void shuffle(int8_t *p, int n) {
    for (int i = 0; i < n; i++)
        p[i] = (int8_t)i;
    for (int i = n - 1; i > 0; i--) {
        int j = (int)wkt_below((uint64_t)i + 1);
        int8_t s = p[i];
        p[i] = p[j];
        p[j] = s;
    }
}

static void random_domain(trial *t, int64_t limit) {
    static const int primes[] = {2, 3, 5, 7, 13, 17, 31, 37, 61, 97};
    wki_loop_run *r = &t->r;
    r->ndim = (int)wkt_below(wkt_below(8) ? 5 : WKI_LOOP_MAX_DIMS + 1);
    r->nred = (int)wkt_below((uint64_t)r->ndim + 1);
    r->col = r->nred && wkt_below(2);
    int style = (int)wkt_below(4), longest = r->ndim ? (int)wkt_below((uint64_t)r->ndim) : 0;
    int64_t total = 1;
    for (int d = 0; d < r->ndim; d++) {
        int64_t s = style == 0                   ? wkt_range(wkt_below(6) == 0 ? 0 : 1, 5)
                    : style == 1                 ? primes[wkt_below(10)]
                    : style == 2 && d == longest ? wkt_range(100, limit)
                    : style == 2                 ? wkt_range(1, 3)
                                                 : (int64_t)1 << wkt_below(8);
        r->size[d] = total * s > limit ? 1 + (int64_t)wkt_below(2) * (total < limit / 2) : s;
        total *= r->size[d];
    }
    if (wkt_below(4))
        for (int d = 0; d < r->ndim; d++)
            r->logical[d] = (int8_t)d;
    else
        shuffle(r->logical, r->ndim);
}

/* Memory order of the dimensions mostly as the domain's; some dimensions padded or, for loads, repeated. */
static void random_operand(trial *t, int o, bool load, bool row) {
    wki_loop_run *r = &t->r;
    int8_t order[WKI_LOOP_MAX_DIMS];
    int64_t step = 1, last = 0;
    shuffle(order, r->ndim);
    bool plain = wkt_below(2), pad = wkt_below(4) == 0;
    for (int k = r->ndim - 1; k >= 0; k--) {
        int d = plain ? k : order[k];
        bool absent = (row && d >= r->ndim - r->nred) || (load && wkt_below(5) == 0);
        r->opnd[o].stride[d] = absent ? 0 : step;
        if (absent)
            continue;
        last += r->size[d] ? (r->size[d] - 1) * step : 0;
        step *= r->size[d] ? r->size[d] : 1;
        if (pad)
            step += (int64_t)wkt_below(3);
    }
    set_memory(t, o, last + 1);
}

static bool repeats(const trial *t, int o, bool row) {
    for (int d = 0; d < t->r.ndim - (row ? t->r.nred : 0); d++)
        if (t->r.size[d] > 1 && !t->r.opnd[o].stride[d])
            return true;
    return false;
}

static void random_operands(trial *t) {
    bool taken[MAX_OPS] = {0};
    for (int i = 0; i < t->prog.ninst; i++)
        if (t->inst[i].code == WKI_L_LOAD)
            random_operand(t, t->inst[i].a, true, t->r.nred && t->inst[i].level == WKI_ROWV);
    for (int i = 0; i < t->prog.ninst; i++) {
        const wki_inst *in = &t->inst[i];
        if (in->code != WKI_L_STORE)
            continue;
        int with = -1;
        for (int j = 0; j < t->prog.ninst && wkt_below(2); j++)
            if (t->inst[j].code == WKI_L_LOAD && t->inst[j].level == in->level && !taken[t->inst[j].a] &&
                !repeats(t, t->inst[j].a, t->r.nred && in->level == WKI_ROWV))
                with = t->inst[j].a;
        if (with >= 0) {
            taken[with] = true;
            share_memory(t, in->a, with);
        } else
            random_operand(t, in->a, false, t->r.nred && in->level == WKI_ROWV);
    }
}

static void begin(trial *t) {
    memset(t, 0, sizeof *t);
    t->prog.inst = t->inst;
    t->r.prog = &t->prog;
    t->r.arg = t->arg;
    t->r.rng_seq = t->seq;
    t->r.fault = &t->fault;
    t->r.seed = wkt_u64();
    t->seq[0] = wkt_u64();
    t->seq[1] = wkt_u64();
    for (int i = 0; i < 8; i++)
        t->arg[i] = (float)some_number();
}

static bool random_trial(trial *t, int64_t limit, wki_pool *const *pool, int npool) {
    begin(t);
    random_domain(t, limit);
    random_program(t, false);
    random_operands(t);
    fill_all(t, wkt_below(3) == 0);
    bool ok = compare_all(t, pool, npool);
    drop(t);
    return ok;
}

static void random_trials(int n, int64_t limit, bool threads) {
    trial *t = malloc(sizeof *t);
    wki_pool *pool[3] = {NULL, NULL, NULL};
    REQUIRE(t != NULL);
    if (threads) {
        pool[0] = wki_pool_new(2);
        pool[1] = wki_pool_new(3);
    }
    for (int i = 0; i < n; i++)
        if (!random_trial(t, limit, pool, threads ? 3 : 1))
            break;
    wki_pool_free(pool[0]);
    wki_pool_free(pool[1]);
    free(t);
}

TEST(loop, random_small) { random_trials(wkt_quick() ? 300 : 3000, 300, false); }
TEST(loop, random_medium) { random_trials(wkt_quick() ? 40 : 400, 6000, false); }
TEST(loop, random_threads) { random_trials(wkt_quick() ? 4 : 40, 40000, true); }

/* ---- plain programs ------------------------------------------------------------------------------------------------ */

static void contiguous_operand(trial *t, int o) {
    int64_t step = 1;
    for (int d = t->r.ndim - 1; d >= 0; d--) {
        t->r.opnd[o].stride[d] = step;
        step *= t->r.size[d];
    }
    set_memory(t, o, step);
}

/* Contiguous operands of one shape, some written in place: small ones take a path of their own. */
TEST(loop, random_plain) {
    trial *t = malloc(sizeof *t);
    wki_pool *none[1] = {NULL};
    REQUIRE(t != NULL);
    for (int k = 0, n = wkt_quick() ? 100 : 1000; k < n; k++) {
        begin(t);
        t->r.ndim = 1 + (int)wkt_below(3);
        for (int d = 0; d < t->r.ndim; d++) {
            t->r.size[d] = d ? wkt_range(1, 4) : wkt_range(1, wkt_below(2) ? 40 : 3000);
            t->r.logical[d] = (int8_t)d;
        }
        random_program(t, true);
        for (int o = 0; o < t->prog.nload + t->prog.nstore; o++)
            if (o >= t->prog.nload && o - t->prog.nload < t->prog.nload && wkt_below(3) == 0)
                share_memory(t, o, o - t->prog.nload);
            else
                contiguous_operand(t, o);
        fill_all(t, wkt_below(3) == 0);
        bool ok = compare_all(t, none, 1);
        drop(t);
        if (!ok)
            break;
    }
    free(t);
}

/* ---- given programs ------------------------------------------------------------------------------------------------ */

enum { X = WKI_ELEM, R = WKI_ROWV, F = WKI_TF };
#define LOAD(o, level)                                                                                       \
    {                                                                                                        \
        WKI_L_LOAD, 0, level, F, o, -1, -1, { .i = 0 }                                                       \
    }
#define STORE(o, v, level)                                                                                   \
    {                                                                                                        \
        WKI_L_STORE, 0, level, F, o, v, -1, { .i = 0 }                                                       \
    }
#define PRIM(p, level, a, b)                                                                                 \
    {                                                                                                        \
        WKI_L_PRIM, WKI_P_##p, level, F, a, b, -1, { .i = 0 }                                                \
    }
#define REDUCE(p, a)                                                                                         \
    {                                                                                                        \
        WKI_L_REDUCE, WKI_R_##p, R, F, a, -1, -1, { .i = 0 }                                                 \
    }
#define ARG(a)                                                                                               \
    {                                                                                                        \
        WKI_L_ARG, 0, R, F, a, -1, -1, { .i = 0 }                                                            \
    }

static void set_program(trial *t, const wki_inst *inst, int n, int nload, int nstore) {
    begin(t);
    memcpy(t->inst, inst, (size_t)n * sizeof *inst);
    t->prog.ninst = (int16_t)n;
    t->prog.nload = (int16_t)nload;
    t->prog.nstore = (int16_t)nstore;
    t->prog.narg = 8;
    for (int o = 0; o < nload + nstore; o++)
        t->r.opnd[o].dtype = WK_F32;
}

/* A (rows, columns) domain; with `col` the columns are the outer dimension in memory. */
static void set_matrix(trial *t, int64_t rows, int64_t columns, bool col) {
    t->r.ndim = 2;
    t->r.nred = 1;
    t->r.col = col;
    t->r.size[0] = rows;
    t->r.size[1] = columns;
    t->r.logical[0] = col;
    t->r.logical[1] = !col;
}

static void matrix_operand(trial *t, int o, bool row_level, int64_t pad) {
    int64_t inner = t->r.col ? t->r.size[0] + pad : t->r.size[1] + pad,
            outer = t->r.col ? t->r.size[1] : t->r.size[0];
    t->r.opnd[o].stride[0] = row_level || t->r.col ? 1 : inner;
    t->r.opnd[o].stride[1] = row_level ? 0 : t->r.col ? inner : 1;
    set_memory(t, o, row_level ? t->r.size[0] : inner * outer);
}

/* y = (x - mean) / max |x - mean|, and the two per row: two stages of reductions, then stores of both levels. */
static const wki_inst normalize[] = {LOAD(0, X),         REDUCE(SUM, 0),     ARG(0),
                                     PRIM(MUL, R, 1, 2), PRIM(SUB, X, 0, 3), PRIM(ABS, X, 4, -1),
                                     REDUCE(MAX, 5),     REDUCE(MIN, 0),     PRIM(DIV, X, 4, 6),
                                     STORE(1, 8, X),     STORE(2, 3, R),     STORE(3, 7, R)};

TEST(loop, long_rows_over_threads) {
    static const struct {
        int64_t rows, columns;
        bool col, in_place;
    } domain[] = {{1, 200001, false, false}, {2, 70000, false, true},  {3, 131072, false, false},
                  {37, 5000, true, true},    {1, 100000, true, false}, {700, 300, true, false},
                  {1500, 257, true, true},   {256, 1000, true, false}};
    trial *t = malloc(sizeof *t);
    wki_pool *pool[3] = {NULL, wki_pool_new(2), wki_pool_new(3)};
    REQUIRE(t != NULL);
    for (size_t k = 0; k < sizeof domain / sizeof *domain && k < (wkt_quick() ? 4 : 8); k++) {
        set_program(t, normalize, sizeof normalize / sizeof *normalize, 1, 3);
        set_matrix(t, domain[k].rows, domain[k].columns, domain[k].col);
        matrix_operand(t, 0, false, 3);
        if (domain[k].in_place)
            share_memory(t, 1, 0);
        else
            matrix_operand(t, 1, false, 0);
        matrix_operand(t, 2, true, 0);
        matrix_operand(t, 3, true, 0);
        fill_all(t, true);
        t->arg[0] = 1.0f / (float)domain[k].columns;
        bool ok = compare_all(t, pool, 3);
        drop(t);
        if (!ok)
            break;
    }
    for (int k = 0; k < 3; k++)
        wki_pool_free(pool[k]);
    free(t);
}

/* What is kept of a run holds for other addresses, and gives way where operands overlap. */
TEST(loop, kept_plans_follow_addresses) {
    trial *t = malloc(sizeof *t);
    REQUIRE(t != NULL);
    for (int k = 0; k < 20; k++) {
        set_program(t, normalize, sizeof normalize / sizeof *normalize, 1, 3);
        set_matrix(t, wkt_range(2, 40), wkt_range(2, 80), k % 2);
        for (int o = 0; o < 4; o++)
            matrix_operand(t, o, o > 1, 0);
        fill_all(t, true);
        t->arg[0] = 1.0f / (float)t->r.size[1];
        wki_loop_kept *kept = malloc(wki_loop_kept_bytes(&t->r));
        REQUIRE(kept != NULL);
        wki_loop_keep(&t->r, kept);
        void *input = t->r.opnd[0].data;
        for (int turn = 0; turn < 6; turn++) { /* the input where it was, or where the first result goes */
            bool in_place = turn % 4 == 1 || turn == 2;
            t->r.opnd[0].data = in_place ? t->r.opnd[1].data : input;
            run_reference(t);
            if (!compare(t, wki_cpu_isa(), NULL, kept))
                break;
        }
        free(kept);
        drop(t);
    }
    free(t);
}

static const wki_inst sum_of[] = {LOAD(0, X), REDUCE(SUM, 0), STORE(1, 1, R)};

/* Each of n additions in a row errs by half an ulp of what is summed so far, at most of the sum of magnitudes. Longest path:
   16 additions into a lane, 2 and 4 of folding; or 128 in order; the total is rounded once. */
TEST(loop, sums_are_accurate) {
    trial *t = malloc(sizeof *t);
    REQUIRE(t != NULL);
    for (int k = 0; k < 60; k++) {
        bool col = k % 2;
        int64_t n = k < 6 ? 1 + k : wkt_range(1, k < 40 ? 3000 : 300000), rows = k % 3 ? 1 : 3;
        set_program(t, sum_of, 3, 1, 1);
        set_matrix(t, rows, n, col);
        matrix_operand(t, 0, false, 0);
        matrix_operand(t, 1, true, 0);
        fill_all(t, true);
        restore(t);
        CHECK(wki_loop_cpu(&t->r, wki_cpu_isa(), NULL));
        for (int64_t r = 0; r < rows; r++) {
            const float *x = (const float *)t->r.opnd[0].data + r * t->r.opnd[0].stride[0];
            double exact = 0, size = 0;
            for (int64_t i = 0; i < n; i++) {
                exact += x[i * t->r.opnd[0].stride[1]];
                size += fabs((double)x[i * t->r.opnd[0].stride[1]]);
            }
            CHECK_NEAR(((float *)t->r.opnd[1].data)[r], exact, ((col ? 128 : 22) + 1) * 0x1p-24 * size);
        }
        drop(t);
    }
    free(t);
}

/* A row's sum is the same alone and among others, contiguous and strided. */
TEST(loop, tree_ignores_layout) {
    trial *t = malloc(sizeof *t);
    REQUIRE(t != NULL);
    for (int k = 0; k < 40; k++) {
        int64_t n = wkt_range(1, k % 2 ? 40 : 6000), rows = wkt_range(2, 40);
        static float x[6000];
        float want = 0;
        wkt_fill_normal(x, (size_t)n, 1.0);
        for (int form = 0; form < 3; form++) {
            set_program(t, sum_of, 3, 1, 1);
            set_matrix(t, form ? rows : 1, n, false);
            matrix_operand(t, 0, false, form == 2 ? 5 : 0);
            matrix_operand(t, 1, true, 0);
            fill_all(t, true);
            if (form == 2) { /* transposed */
                t->r.opnd[0].stride[0] = 1;
                t->r.opnd[0].stride[1] = rows;
            }
            restore(t);
            int64_t row = form ? wkt_range(0, rows - 1) : 0;
            for (int64_t i = 0; i < n; i++)
                ((float *)t->r.opnd[0].data)[row * t->r.opnd[0].stride[0] + i * t->r.opnd[0].stride[1]] =
                    x[i];
            CHECK(wki_loop_cpu(&t->r, wki_cpu_isa(), NULL));
            float got = ((float *)t->r.opnd[1].data)[row];
            want = form ? want : got;
            CHECK_MEM(&got, &want, 4);
            drop(t);
        }
    }
    free(t);
}

TEST(loop, empty_reductions) {
    static const wki_inst inst[] = {LOAD(0, X),     REDUCE(SUM, 0), REDUCE(MAX, 0), REDUCE(MIN, 0),
                                    STORE(1, 1, R), STORE(2, 2, R), STORE(3, 3, R)};
    trial *t = malloc(sizeof *t);
    wki_pool *none[1] = {NULL};
    REQUIRE(t != NULL);
    for (int col = 0; col < 2; col++) {
        set_program(t, inst, 7, 1, 3);
        set_matrix(t, 5, 0, col);
        matrix_operand(t, 0, false, 0);
        for (int o = 1; o < 4; o++)
            matrix_operand(t, o, true, 0);
        fill_all(t, true);
        CHECK(compare_all(t, none, 1));
        for (int r = 0; r < 5; r++) {
            CHECK(((float *)t->r.opnd[1].data)[r] == 0.0f);
            CHECK(((float *)t->r.opnd[2].data)[r] == -INFINITY);
            CHECK(((float *)t->r.opnd[3].data)[r] == INFINITY);
        }
        drop(t);
    }
    free(t);
}

/* One false element anywhere is reported, padding never is. */
TEST(loop, check_reports) {
    static const wki_inst inst[] = {{WKI_L_LOAD, 0, X, WKI_TI, 0, -1, -1, {.i = 0}},
                                    {WKI_L_CHECK, 0, X, WKI_TI, 0, -1, -1, {.i = 41}},
                                    {WKI_L_STORE, 0, X, WKI_TI, 1, 0, -1, {.i = 0}}};
    trial *t = malloc(sizeof *t);
    REQUIRE(t != NULL);
    for (int k = 0; k < 200; k++) {
        int64_t n = wkt_range(1, k % 2 ? 50 : 5000), bad = wkt_range(-n, n - 1);
        set_program(t, inst, 3, 1, 1);
        t->r.ndim = 1;
        t->r.size[0] = n;
        t->r.opnd[0].dtype = t->r.opnd[1].dtype = WK_BOOL;
        contiguous_operand(t, 0);
        contiguous_operand(t, 1);
        memset(t->mem[0].live, 1, t->mem[0].bytes);
        if (bad >= 0)
            t->mem[0].live[LEAD + bad] = 0;
        for (int isa = WKI_ISA_BASELINE; isa <= (int)wki_cpu_isa(); isa++) {
            t->fault = 0;
            CHECK(wki_loop_cpu(&t->r, (wki_isa)isa, NULL));
            CHECK_EQ_I(t->fault, bad >= 0 ? 42 : 0);
        }
        drop(t);
    }
    free(t);
}

TEST(loop, takes_no_heap) {
    trial *t = malloc(sizeof *t);
    REQUIRE(t != NULL);
    set_program(t, normalize, sizeof normalize / sizeof *normalize, 1, 3);
    set_matrix(t, 3, 9000, false);
    for (int o = 0; o < 4; o++)
        matrix_operand(t, o, o > 1, 0);
    fill_all(t, true);
    restore(t);
    int64_t before = wki_alloc_count();
    CHECK(wki_loop_cpu(&t->r, wki_cpu_isa(), NULL));
    CHECK_EQ_I(wki_alloc_count(), before);
    drop(t);
    free(t);
}
