/* Prints loop programs as CUDA C (emit_cuda.h). Values become locals: u<i> for what is the same everywhere, r<i> for one
 * row, v<i> for one element, and k<i>[] where an element's value is kept from one pass over the row to a later one.
 *
 * A pass walks the columns of a row once. Pass p ends in the reductions that need those of pass p - 1; the last one stores.
 * A row of at most 1024 columns is held in registers, so every value is computed in the first pass that needs it; longer
 * rows are walked again, and values computed again, from memory that is by then in the cache. Calls base and core. */
#include "compile/emit_cuda.h"

#include "base/hash.h"
#include "compile/emit_cuda_shape.h"
#include "core/core.h"
#include "embed.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_PASS_REDUCES = 8,  /* of one pass: bounds shared memory and accumulators */
    KEEP_REGISTERS = 64,   /* for values kept between passes, per thread */
    KEEP_COST = 3000,      /* instructions, roughly, of an unrolled pass */
    UNROLL_COST = 600,     /* likewise of a partly unrolled one */
};

typedef struct emitter {
    const wki_loop_run *r;
    const wki_loop *p;
    wki_cu_shape s;
    wki_cu_layout l;
    char *text;
    size_t len, cap;
    bool nomem;
    const char *why;
    const char *U, *S; /* types of indices and of offsets */
    int indent;
    int npass;                       /* reducing passes */
    uint8_t live[WKI_LOOP_MAX_INST]; /* needed by a store or a check */
    uint8_t pass[WKI_LOOP_MAX_INST]; /* of a value: the last reducing pass it depends on; of a REDUCE: its own */
    uint8_t done[WKI_LOOP_MAX_INST]; /* keeping: pass that computes an element's value */
    uint8_t kept[WKI_LOOP_MAX_INST]; /* keeping: a later pass uses it */
    bool keep;
    bool four; /* printing four elements at a time */
} emitter;

/* ---- text ---------------------------------------------------------------------------------------------------------- */

static void vput(emitter *e, const char *format, va_list ap) {
    va_list again;
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, format, ap);
    if (!e->nomem && e->len + (size_t)n + 1 > e->cap) {
        size_t cap = 2 * e->cap + (size_t)n + 4096;
        char *t = wki_realloc(e->text, cap);
        if (t) {
            e->text = t;
            e->cap = cap;
        } else {
            e->nomem = true;
        }
    }
    if (!e->nomem) {
        vsnprintf(e->text + e->len, (size_t)n + 1, format, again);
        e->len += (size_t)n;
    }
    va_end(again);
}

__attribute__((format(printf, 2, 3))) static void put(emitter *e, const char *format, ...) {
    va_list ap;
    va_start(ap, format);
    vput(e, format, ap);
    va_end(ap);
}

/* One line, indented. A line that ends in '{' indents what follows, one that begins with '}' ends that. */
__attribute__((format(printf, 2, 3))) static void line(emitter *e, const char *format, ...) {
    size_t n = strlen(format);
    if (format[0] == '}')
        e->indent--;
    put(e, "%*s", 4 * e->indent, "");
    va_list ap;
    va_start(ap, format);
    vput(e, format, ap);
    va_end(ap);
    put(e, "\n");
    if (n && format[n - 1] == '{')
        e->indent++;
}

typedef struct name {
    char s[48];
} name;

__attribute__((format(printf, 1, 2))) static name named(const char *format, ...) {
    name n;
    va_list ap;
    va_start(ap, format);
    vsnprintf(n.s, sizeof n.s, format, ap);
    va_end(ap);
    return n;
}

/* ---- programs ------------------------------------------------------------------------------------------------------ */

static const wki_inst *inst(const emitter *e, int i) {
    return &e->p->inst[i];
}

static bool rows(const emitter *e) {
    return e->s.kind == WKI_CU_WARP || e->s.kind == WKI_CU_BLOCK || e->s.kind == WKI_CU_COL;
}

static bool uniform(const wki_inst *in) {
    return in->code == WKI_L_CONST || in->code == WKI_L_ARG;
}

static bool acts(const wki_inst *in) {
    return in->code == WKI_L_STORE || in->code == WKI_L_CHECK;
}

/* A value, or action, of the row rather than the element. */
static bool of_row(const emitter *e, const wki_inst *in) {
    return rows(e) && !uniform(in) && in->level == WKI_ROWV;
}

static bool of_elem(const emitter *e, const wki_inst *in) {
    return !uniform(in) && !of_row(e, in);
}

static bool reduces(const emitter *e, const wki_inst *in) {
    return in->code == WKI_L_REDUCE && of_row(e, in);
}

/* Values an instruction uses. */
static int uses(const wki_inst *in, int16_t out[3]) {
    int n = 0;
    if (in->code == WKI_L_STORE)
        out[n++] = in->b;
    else if (in->code == WKI_L_REDUCE || in->code == WKI_L_CHECK)
        out[n++] = in->a;
    else if (in->code == WKI_L_PRIM) {
        int16_t all[3] = {in->a, in->b, in->c};
        for (int k = 0; k < 3; k++)
            if (all[k] >= 0)
                out[n++] = all[k];
    }
    return n;
}

static const struct prim {
    const char *name, *signature;
} prims[WKI_P_COUNT] = {
#define P(E, n, arity, signature) {#n, signature},
#include "ops/prims.def"
};

static const char *type_name(const wki_inst *in) {
    return in->type == WKI_TF ? "float" : "int";
}

static const char *reduce_name(const wki_inst *in) {
    static const char *const f[] = {"sum_f", "max_f", "min_f"}, *const i[] = {"sum_i", "max_i", "min_i"};
    return (in->type == WKI_TF ? f : i)[in->sub];
}

static const char *dtype_suffix(uint8_t dtype) {
    switch ((wk_dtype)dtype) {
    case WK_F32: return "f32";
    case WK_F64: return "f64";
    case WK_I32: return "i32";
    case WK_I64: return "i64";
    case WK_U8: return "u8";
    case WK_BOOL: return "b8";
    default: return NULL;
    }
}

static const char *dtype_type(uint8_t dtype) {
    switch ((wk_dtype)dtype) {
    case WK_F32: return "float";
    case WK_F64: return "double";
    case WK_I32: return "int";
    case WK_I64: return "WK_I64";
    default: return "unsigned char";
    }
}

static bool loads_float(uint8_t dtype) {
    return dtype == WK_F32 || dtype == WK_F64;
}

/* GPU instructions, roughly. */
static int cost(const wki_inst *in) {
    if (in->code == WKI_L_RNG)
        return in->sub == WKI_P_NORMAL ? 160 : 90;
    if (in->code != WKI_L_PRIM)
        return uniform(in) ? 0 : 3;
    switch ((wki_prim)in->sub) {
    case WKI_P_EXP:
    case WKI_P_LOG: return 30;
    case WKI_P_TANH:
    case WKI_P_ERF:
    case WKI_P_SIN:
    case WKI_P_COS: return 60;
    case WKI_P_DIV:
    case WKI_P_SQRT: return 12;
    default: return 3;
    }
}

static const char *check_inst(const emitter *e, int i) {
    const wki_inst *in = inst(e, i);
    int16_t use[3];
    for (int k = 0, n = uses(in, use); k < n; k++) {
        if (use[k] < 0 || use[k] >= i || acts(inst(e, use[k])))
            return "a loop program uses a value before it is made";
        if (of_row(e, in) && !reduces(e, in) && of_elem(e, inst(e, use[k])))
            return "a loop program uses an element's value for a row";
    }
    if (in->code == WKI_L_LOAD || in->code == WKI_L_STORE) {
        if (in->a < 0 || in->a >= e->s.nop)
            return "a loop program has too few operands";
        if (!dtype_suffix(e->r->opnd[in->a].dtype))
            return "a dtype that CUDA loops do not know";
        if (in->code == WKI_L_LOAD && (in->type == WKI_TF) != loads_float(e->r->opnd[in->a].dtype))
            return "a loop program does not fit its operands' dtypes";
    }
    if (in->code == WKI_L_PRIM)
        for (int k = 0; k < 3 && prims[in->sub].signature[2 + k]; k++) {
            int v = k == 0 ? in->a : k == 1 ? in->b : in->c;
            if (v < 0 || (inst(e, v)->type == WKI_TF) != (prims[in->sub].signature[2 + k] == 'F'))
                return "a loop program gives a primitive the wrong type";
        }
    return NULL;
}

/* Liveness and passes. */
static bool analyse(emitter *e) {
    int count[WKI_LOOP_MAX_INST + 2] = {0};
    if (e->p->ninst > WKI_LOOP_MAX_INST || e->s.nop > WKI_LOOP_MAX_OPERANDS) {
        e->why = "a loop program is too large";
        return false;
    }
    for (int i = e->p->ninst - 1; i >= 0; i--) {
        const wki_inst *in = inst(e, i);
        int16_t use[3];
        e->live[i] |= acts(in);
        for (int k = 0, n = uses(in, use); e->live[i] && k < n; k++)
            if (use[k] >= 0 && use[k] < i)
                e->live[use[k]] = 1;
    }
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (!e->live[i])
            continue;
        if ((e->why = check_inst(e, i)))
            return false;
        int16_t use[3];
        for (int k = 0, n = uses(in, use); k < n; k++)
            if (e->pass[use[k]] > e->pass[i])
                e->pass[i] = e->pass[use[k]];
        if (reduces(e, in)) {
            int p = e->pass[i] + 1;
            while (count[p] == MAX_PASS_REDUCES)
                p++;
            count[p]++;
            e->pass[i] = (uint8_t)p;
            if (p > e->npass)
                e->npass = p;
        }
    }
    return true;
}

/* Is instruction i what pass p (npass + 1: the last) is for? */
static bool target(const emitter *e, int i, int p) {
    const wki_inst *in = inst(e, i);
    if (!e->live[i])
        return false;
    if (reduces(e, in))
        return e->pass[i] == p;
    if (!acts(in) || !of_elem(e, in))
        return false;
    return in->code == WKI_L_STORE ? p == e->npass + 1 : e->pass[i] + 1 == p;
}

/* Marks the elements' values that pass p computes; false when it has nothing to do. */
static bool needed(const emitter *e, int p, uint8_t need[WKI_LOOP_MAX_INST]) {
    bool any = false;
    memset(need, 0, WKI_LOOP_MAX_INST);
    for (int i = e->p->ninst - 1; i >= 0; i--) {
        bool is_target = target(e, i, p);
        int16_t use[3];
        any |= is_target;
        if (e->keep && need[i] && e->done[i] < p)
            need[i] = 0;
        if (!is_target && !need[i])
            continue;
        for (int k = 0, n = uses(inst(e, i), use); k < n; k++)
            if (of_elem(e, inst(e, use[k])))
                need[use[k]] = 1;
    }
    return any;
}

static int pass_cost(const emitter *e, const uint8_t *need) {
    int sum = 4;
    for (int i = 0; i < e->p->ninst; i++)
        if (need[i])
            sum += cost(inst(e, i));
    return sum;
}

/* Decides whether a row's values are kept between passes. */
static void plan_keeping(emitter *e) {
    uint8_t need[WKI_LOOP_MAX_INST];
    int registers = 0, most = 0;
    if (e->s.kind != WKI_CU_WARP)
        return;
    memset(e->done, 255, sizeof e->done);
    e->keep = true;
    for (int p = 1; p <= e->npass + 1; p++) {
        needed(e, p, need);
        for (int i = 0; i < e->p->ninst; i++) {
            if (need[i])
                e->done[i] = (uint8_t)p;
        }
        int c = pass_cost(e, need);
        most = c > most ? c : most;
    }
    for (int p = 1; p <= e->npass + 1; p++)
        for (int i = 0; i < e->p->ninst; i++) {
            int16_t use[3];
            if (!target(e, i, p) && e->done[i] != p)
                continue;
            for (int k = 0, n = uses(inst(e, i), use); k < n; k++)
                if (of_elem(e, inst(e, use[k])) && e->done[use[k]] < p)
                    e->kept[use[k]] = 1;
        }
    for (int i = 0; i < e->p->ninst; i++)
        registers += e->kept[i] * e->s.chunks;
    if (registers > KEEP_REGISTERS || most * e->s.chunks > KEEP_COST) {
        e->keep = false;
        memset(e->kept, 0, sizeof e->kept);
    }
}

/* ---- parameters ---------------------------------------------------------------------------------------------------- */

static name wide_param(const emitter *e, bool is_signed, int at) {
    const char *type = is_signed ? e->S : e->U;
    return e->s.wide ? named("(%s)p.q[%d]", type, at) : named("(%s)p.d[%d]", type, at);
}

static name size_param(const emitter *e, int d) {
    return wide_param(e, false, e->l.size + d);
}

static name stride_param(const emitter *e, int op, int d) {
    return wide_param(e, true, e->l.stride + op * wki_cu_dims(&e->s) + d);
}

/* ---- indices and places -------------------------------------------------------------------------------------------- */

/* Splits the linear index `from` into indices i<first> .. i<last - 1>. */
static void split_index(emitter *e, const char *from, int first, int last) {
    if (last - first == 1) {
        line(e, "const %s i%d = %s;", e->U, first, from);
        return;
    }
    name rest = named("%s", from);
    for (int d = last - 1; d > first; d--) {
        if (e->s.wide)
            line(e, "const %s h%d = %s / %s;", e->U, d, rest.s, size_param(e, d).s);
        else
            line(e, "const %s h%d = wkl_div(%s, p.d[%d], p.d[%d]);", e->U, d, rest.s, e->l.div + 2 * d,
                 e->l.div + 2 * d + 1);
        line(e, "const %s i%d = %s - h%d * %s;", e->U, d, rest.s, d, size_param(e, d).s);
        rest = named("h%d", d);
    }
    if (last > first)
        line(e, "const %s i%d = %s;", e->U, first, rest.s);
}

/* Prints the offset of an operand from its dimensions first .. last - 1. */
static void put_offset(emitter *e, int op, int first, int last, wki_cu_move move, const char *linear) {
    if (move == WKI_CU_LINEAR) {
        put(e, "(%s)%s", e->S, linear);
        return;
    }
    bool any = false;
    for (int d = first; d < last; d++) {
        bool inner = d == last - 1;
        if (inner && move == WKI_CU_STILL)
            continue;
        put(e, any ? " + " : "");
        put(e, "(%s)i%d", e->S, d);
        if (!inner || move != WKI_CU_UNIT)
            put(e, " * %s", stride_param(e, op, d).s);
        any = true;
    }
    if (!any)
        put(e, "0");
}

static bool operand_used(const emitter *e, int op) {
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if ((in->code == WKI_L_LOAD || in->code == WKI_L_STORE) && in->a == op && e->live[i])
            return true;
    }
    return false;
}

static bool any_needs_index(const emitter *e, const uint8_t *need) {
    for (int i = 0; i < e->p->ninst; i++)
        if (need[i] && (inst(e, i)->code == WKI_L_INDEX || inst(e, i)->code == WKI_L_RNG))
            return true;
    return false;
}

static bool any_rng(const emitter *e, const uint8_t *need, bool row) {
    for (int i = 0; i < e->p->ninst; i++)
        if (e->live[i] && inst(e, i)->code == WKI_L_RNG && of_row(e, inst(e, i)) == row && (!need || need[i]))
            return true;
    return false;
}

/* Prints the row-major logical index from the dimensions that are known here. */
static void put_logical(emitter *e, const char *var, int last, const char *linear) {
    put(e, "%*sconst WK_U64 %s = ", 4 * e->indent, "", var);
    if (linear) {
        put(e, "%s;\n", linear);
        return;
    }
    for (int d = 0; d < last; d++)
        put(e, "%s(WK_U64)i%d * (WK_U64)%s", d ? " + " : "", d, wide_param(e, false, e->l.weight + d).s);
    put(e, last ? ";\n" : "0;\n");
}

/* ---- values -------------------------------------------------------------------------------------------------------- */

static name value(const emitter *e, int v) {
    const wki_inst *in = inst(e, v);
    if (uniform(in))
        return named("u%d", v);
    if (of_row(e, in))
        return named("r%d", v);
    return e->kept[v] ? named("k%d[k]", v) : named("v%d", v);
}

/* Prints the text of a value that is not a reduction over columns. */
static void put_value(emitter *e, int i) {
    const wki_inst *in = inst(e, i);
    bool row = of_row(e, in);
    switch ((wki_loop_code)in->code) {
    case WKI_L_LOAD: {
        const char *t = dtype_suffix(e->r->opnd[in->a].dtype);
        if (e->four && e->s.move[in->a] != WKI_CU_STILL)
            put(e, "x%d[k]", i);
        else if (e->four)
            put(e, "x%d", i);
        else
            put(e, "wkl_ld_%s(p%d + %c%d)", t, in->a, row ? 'R' : 'o', in->a);
        break;
    }
    case WKI_L_PRIM: {
        const char *sig = prims[in->sub].signature + 2;
        put(e, "wkc_%s(", prims[in->sub].name);
        for (int k = 0; k < 3 && sig[k]; k++)
            put(e, "%s%s", k ? ", " : "", value(e, k == 0 ? in->a : k == 1 ? in->b : in->c).s);
        put(e, ")");
        break;
    }
    case WKI_L_REDUCE: /* over one element */
        put(e, "wkl_%s(wkl_id_%s(), %s)", reduce_name(in), reduce_name(in), value(e, in->a).s);
        break;
    case WKI_L_INDEX: {
        int d = in->a >= 0 && in->a <= WKI_LOOP_MAX_DIMS ? e->s.index_dim[in->a] : -1;
        if (d < 0 || (row && d >= e->s.nk))
            put(e, "0");
        else if (e->four && d == wki_cu_dims(&e->s) - 1)
            put(e, "(int)i%d + k", d);
        else
            put(e, "(int)i%d", d);
        break;
    }
    case WKI_L_RNG:
        if (e->four && e->s.rng_unit)
            put(e, "x%d[k]", i);
        else if (e->four)
            put(e, "wkc_%s(seed, seq%d, g + (WK_U64)k * (WK_U64)%s)", prims[in->sub].name, in->a,
                wide_param(e, false, e->l.weight + wki_cu_dims(&e->s) - 1).s);
        else
            put(e, "wkc_%s(seed, seq%d, %s)", prims[in->sub].name, in->a, row ? "G" : "g");
        break;
    default: break;
    }
}

static void define_value(emitter *e, int i) {
    put(e, "%*s", 4 * e->indent, "");
    if (!e->kept[i] || of_row(e, inst(e, i)))
        put(e, "const %s ", type_name(inst(e, i)));
    put(e, "%s = ", value(e, i).s);
    put_value(e, i);
    put(e, ";\n");
}

static void put_store(emitter *e, const wki_inst *in, const char *where) {
    const char *t = dtype_suffix(e->r->opnd[in->a].dtype);
    line(e, "%s = wkl_to_%s_%c(%s);", where, t, inst(e, in->b)->type == WKI_TF ? 'f' : 'i', value(e, in->b).s);
}

static void put_check(emitter *e, const wki_inst *in, const char *guard) {
    line(e, "if (%s!%s)", guard, value(e, in->a).s);
    line(e, "    wkl_fault(args, p.d[%d], %d);", e->l.fault, in->imm.i + 1);
}

/* ---- what all kernels begin with ----------------------------------------------------------------------------------- */

static void put_pointers(emitter *e) {
    for (int i = 0; i < e->s.nop; i++) {
        if (!operand_used(e, i))
            continue;
        const char *type = dtype_type(e->r->opnd[i].dtype), *c = i < e->p->nload ? "const " : "";
        if (e->s.kind == WKI_CU_MULTI)
            line(e, "%s%s *p%d = (%s%s *)wkl_at(args, entry[%d], (int)entry[%d]) + chunk;", c, type, i, c, type, 1 + 2 * i,
                 2 + 2 * i);
        else
            line(e, "%s%s *p%d = (%s%s *)wkl_at(args, p.q[%d], p.d[%d]);", c, type, i, c, type, e->l.base + i,
                 e->l.slot + i);
    }
}

static void put_uniforms(emitter *e) {
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (!e->live[i])
            continue;
        if (in->code == WKI_L_CONST && in->type == WKI_TF)
            line(e, "const float u%d = __int_as_float((int)0x%08xu);", i, (unsigned)in->imm.i);
        else if (in->code == WKI_L_CONST)
            line(e, "const int u%d = (int)0x%08xu;", i, (unsigned)in->imm.i);
        else if (in->code == WKI_L_ARG)
            line(e, "const float u%d = wkl_arg(args, p.d[%d]);", i, e->l.arg + in->a);
    }
    if (!any_rng(e, NULL, false) && !any_rng(e, NULL, true))
        return;
    line(e, "const WK_U64 seed = args[p.d[%d]];", e->l.seed);
    uint64_t seen = 0;
    for (int i = 0; i < e->p->ninst; i++)
        if (e->live[i] && inst(e, i)->code == WKI_L_RNG && !(seen >> (inst(e, i)->a & 63) & 1)) {
            seen |= (uint64_t)1 << (inst(e, i)->a & 63);
            line(e, "const WK_U64 seq%d = args[p.d[%d]] + (WK_U64)(WK_I64)p.d[%d];", inst(e, i)->a, e->l.rng_base,
                 e->l.rng + inst(e, i)->a);
        }
}

/* ---- a thread per element ------------------------------------------------------------------------------------------ */

/* The element with index i of the domain, or with `four` it and the next three. */
static void put_each(emitter *e, const uint8_t *need) {
    int dims = wki_cu_dims(&e->s);
    bool multi = e->s.kind == WKI_CU_MULTI, all_linear = true;
    for (int op = 0; op < e->s.nop; op++)
        all_linear &= e->s.move[op] == WKI_CU_LINEAR || (dims == 1 && e->s.move[op] == WKI_CU_STILL);
    if (!multi && (!all_linear || any_needs_index(e, need)))
        split_index(e, "i", 0, dims);
    for (int op = 0; op < e->s.nop; op++)
        if (operand_used(e, op)) {
            put(e, "%*sconst %s o%d = ", 4 * e->indent, "", e->S, op);
            put_offset(e, op, 0, dims, e->s.move[op], "i");
            put(e, ";\n");
        }
    if (any_rng(e, need, false))
        put_logical(e, "g", dims, multi ? "chunk + i" : NULL);
    if (!e->four) {
        for (int i = 0; i < e->p->ninst; i++)
            if (need[i])
                define_value(e, i);
        for (int i = 0; i < e->p->ninst; i++) {
            const wki_inst *in = inst(e, i);
            if (in->code == WKI_L_STORE)
                put_store(e, in, named("p%d[o%d]", in->a, in->a).s);
            else if (in->code == WKI_L_CHECK)
                put_check(e, in, "");
        }
        return;
    }
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (!need[i] && in->code != WKI_L_STORE)
            continue;
        if (in->code == WKI_L_LOAD) {
            const char *t = dtype_suffix(e->r->opnd[in->a].dtype);
            if (e->s.move[in->a] == WKI_CU_STILL) {
                line(e, "const %s x%d = wkl_ld_%s(p%d + o%d);", type_name(in), i, t, in->a, in->a);
            } else {
                line(e, "%s x%d[4];", type_name(in), i);
                line(e, "wkl_ld4_%s(p%d + o%d, x%d);", t, in->a, in->a, i);
            }
        } else if (in->code == WKI_L_RNG && e->s.rng_unit) {
            line(e, "float x%d[4];", i);
            line(e, "wkl_%s4(seed, seq%d, g, x%d);", prims[in->sub].name, in->a, i);
        } else if (in->code == WKI_L_STORE) {
            line(e, "%s y%d[4];", dtype_type(e->r->opnd[in->a].dtype), i);
        }
    }
    line(e, "#pragma unroll");
    line(e, "for (int k = 0; k < 4; k++) {");
    for (int i = 0; i < e->p->ninst; i++)
        if (need[i])
            define_value(e, i);
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (in->code == WKI_L_STORE)
            put_store(e, in, named("y%d[k]", i).s);
        else if (in->code == WKI_L_CHECK)
            put_check(e, in, "");
    }
    line(e, "}");
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (in->code == WKI_L_STORE && e->s.move[in->a] == WKI_CU_STILL) /* written over: the last one stays */
            line(e, "p%d[o%d] = y%d[3];", in->a, in->a, i);
        else if (in->code == WKI_L_STORE)
            line(e, "wkl_st4_%s(p%d + o%d, y%d);", dtype_suffix(e->r->opnd[in->a].dtype), in->a, in->a, i);
    }
}

static void put_aligned(emitter *e) {
    put(e, "%*sif (1", 4 * e->indent, "");
    for (int op = 0; op < e->s.nop; op++)
        if (e->s.move[op] != WKI_CU_STILL && operand_used(e, op))
            put(e, " && wkl_aligned(p%d, %d)", op, wki_dtype_size((wk_dtype)e->r->opnd[op].dtype) == 1 ? 4 : 16);
    put(e, ") {\n");
    e->indent++;
}

static void put_each_kernel(emitter *e) {
    uint8_t need[WKI_LOOP_MAX_INST];
    const char *U = e->U;
    bool multi = e->s.kind == WKI_CU_MULTI;
    needed(e, 1, need);
    if (multi) {
        line(e, "const WK_U64 *table = (const WK_U64 *)p.q[%d];", e->l.base);
        line(e, "int low = 0, high = p.d[%d];", e->l.slot);
        line(e, "while (high - low > 1) {");
        line(e, "const int middle = (low + high) / 2;");
        line(e, "if (table[middle] <= blockIdx.x)");
        line(e, "    low = middle;");
        line(e, "else");
        line(e, "    high = middle;");
        line(e, "}");
        line(e, "const WK_U64 *entry = table + p.d[%d] + 1 + low * %d;", e->l.slot, 1 + 2 * e->s.nop);
        line(e, "const WK_U64 chunk = (blockIdx.x - table[low]) * %d, left = entry[0] - chunk;", WKI_CU_CHUNK);
        line(e, "const unsigned n = left < %d ? (unsigned)left : %d;", WKI_CU_CHUNK, WKI_CU_CHUNK);
        line(e, "const unsigned step = blockDim.x, me = threadIdx.x;");
    } else {
        line(e, "const %s n = %s;", U, wide_param(e, false, e->l.nrow).s);
        line(e, "const %s step = (%s)gridDim.x * blockDim.x, me = (%s)blockIdx.x * blockDim.x + threadIdx.x;", U, U, U);
    }
    put_pointers(e);
    put_uniforms(e);
    line(e, "%s%s start = 0;", e->s.vec ? "" : "const ", U);
    if (e->s.vec) {
        put_aligned(e);
        line(e, "start = n / 4 * 4;");
        line(e, "for (%s i = 4 * me; i < start; i += 4 * step) {", U);
        e->four = true;
        put_each(e, need);
        e->four = false;
        line(e, "}");
        line(e, "}");
    }
    line(e, "for (%s i = start + me; i < n; i += step) {", U);
    put_each(e, need);
    line(e, "}");
}

/* ---- rows ---------------------------------------------------------------------------------------------------------- */

/* Offsets of the row and what is known of it before any pass. */
static void put_row_start(emitter *e) {
    split_index(e, "row", 0, e->s.nk);
    for (int op = 0; op < e->s.nop; op++)
        if (operand_used(e, op)) {
            put(e, "%*sconst %s R%d = ", 4 * e->indent, "", e->S, op);
            put_offset(e, op, 0, e->s.nk, WKI_CU_STRIDED, NULL);
            put(e, ";\n");
        }
    if (any_rng(e, NULL, true))
        put_logical(e, "G", e->s.nk, NULL);
    for (int i = 0; i < e->p->ninst; i++)
        if (e->live[i] && of_row(e, inst(e, i)) && inst(e, i)->code == WKI_L_LOAD)
            define_value(e, i);
}

/* Values of the row that follow from the reductions of pass p, or with p = 0 from none. */
static void put_row_values(emitter *e, int p) {
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (e->live[i] && e->pass[i] == p && of_row(e, in) && !acts(in) && in->code != WKI_L_LOAD && in->code != WKI_L_REDUCE)
            define_value(e, i);
    }
}

static void put_row_actions(emitter *e, const char *who) {
    bool any = false;
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (!acts(in) || !of_row(e, in))
            continue;
        if (!any) { /* everybody has read what may be written now */
            line(e, e->s.kind == WKI_CU_WARP ? "__syncwarp();" : "__syncthreads();");
            line(e, "if (%s) {", who);
        }
        any = true;
        if (in->code == WKI_L_STORE)
            put_store(e, in, named("p%d[R%d]", in->a, in->a).s);
        else
            put_check(e, in, "");
    }
    if (any)
        line(e, "}");
}

/* The element in column c of the row: values of pass p, checks and stores under `guard`. Reductions take column e. */
static void put_element(emitter *e, int p, const uint8_t *need, const char *guard) {
    int dims = wki_cu_dims(&e->s);
    bool split = any_needs_index(e, need), any_store = p == e->npass + 1;
    uint8_t used[WKI_LOOP_MAX_OPERANDS] = {0};
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if ((in->code == WKI_L_LOAD && need[i]) || (any_store && in->code == WKI_L_STORE && of_elem(e, in)))
            used[in->a] = 1;
    }
    for (int op = 0; op < e->s.nop; op++)
        split |= used[op] && e->s.move[op] != WKI_CU_LINEAR;
    if (split && e->s.nr)
        split_index(e, "c", e->s.nk, dims);
    for (int op = 0; op < e->s.nop; op++)
        if (used[op]) {
            put(e, "%*sconst %s o%d = R%d + ", 4 * e->indent, "", e->S, op, op);
            put_offset(e, op, e->s.nk, dims, e->s.move[op], "c");
            put(e, ";\n");
        }
    if (any_rng(e, need, false))
        put_logical(e, "g", dims, NULL);
    for (int i = 0; i < e->p->ninst; i++)
        if (need[i])
            define_value(e, i);
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (!target(e, i, p) || !acts(in))
            continue;
        if (in->code == WKI_L_CHECK) {
            put_check(e, in, guard[0] ? named("%s && ", guard).s : "");
        } else {
            if (guard[0])
                line(e, "if (%s)", guard);
            put_store(e, in, named("%sp%d[o%d]", guard[0] ? "    " : "", in->a, in->a).s);
        }
    }
}

static void put_accumulate(emitter *e, int p, const char *which, const char *guard) {
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (!target(e, i, p) || acts(in))
            continue;
        name acc = named("a%d%s", i, which);
        name next = named("wkl_%s(%s, ", reduce_name(in), acc.s);
        if (guard[0])
            line(e, "%s = %s ? %s%s) : %s;", acc.s, guard, next.s, value(e, in->a).s, acc.s);
        else
            line(e, "%s = %s%s);", acc.s, next.s, value(e, in->a).s);
    }
}

/* For every reduction of pass p, in order of number: a line with its number (twice) and name. */
enum { DECLARE_PAIR, DECLARE_ONE, DECLARE_TOTAL };
static void put_declarations(emitter *e, int p, int what) {
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (!target(e, i, p) || acts(in))
            continue;
        const char *t = type_name(in), *n = reduce_name(in);
        if (what == DECLARE_PAIR)
            line(e, "%s a%d[2] = {wkl_id_%s(), wkl_id_%s()};", t, i, n, n);
        else if (what == DECLARE_ONE)
            line(e, "%s a%d = wkl_id_%s();", t, i, n);
        else
            line(e, "wkl_total_%s t%d = wkl_id_%s();", n, i, n);
    }
}

static int unroll(const emitter *e, const uint8_t *need, int most) {
    int c = pass_cost(e, need);
    while (most > 1 && most * c > UNROLL_COST)
        most /= 2;
    return most;
}

/* ---- a warp per row ------------------------------------------------------------------------------------------------ */

/* One pass with the row spread over registers: element 32 k + lane. */
static void put_kept_pass(emitter *e, int p, const uint8_t *need) {
    bool pair = p <= e->npass;
    if (pair)
        put_declarations(e, p, DECLARE_PAIR);
    for (int i = 0; i < e->p->ninst; i++)
        if (need[i] && e->kept[i])
            line(e, "%s k%d[%d];", type_name(inst(e, i)), i, e->s.chunks);
    line(e, "if (n) {");
    line(e, "#pragma unroll");
    line(e, "for (int k = 0; k < %d; k++) {", e->s.chunks);
    line(e, "const int ok = 32 * k + lane < n;");
    line(e, "const %s c = ok ? 32 * k + lane : 0;", e->U);
    put_element(e, p, need, "ok");
    if (pair)
        put_accumulate(e, p, "[k & 1]", "ok");
    line(e, "}");
    line(e, "}");
}

/* One pass that walks the columns c0 .. of a part, in the order of the tree. `end`: columns of the row. */
static void put_part(emitter *e, int p, const uint8_t *need, const char *c0) {
    line(e, "#pragma unroll %d", unroll(e, need, 8));
    line(e, "for (%s b = %s; b < end; b += 64) {", e->U, c0);
    line(e, "#pragma unroll");
    line(e, "for (int h = 0; h < 2; h++) {");
    line(e, "const int ok = b + 32 * h + lane < end;");
    line(e, "const %s c = ok ? b + 32 * h + lane : 0;", e->U);
    put_element(e, p, need, "ok");
    put_accumulate(e, p, "[h]", "ok");
    line(e, "}");
    line(e, "}");
}

static void put_store_pass(emitter *e, int p, const uint8_t *need, const char *first, const char *step) {
    line(e, "#pragma unroll %d", unroll(e, need, 4));
    line(e, "for (%s c = %s; c < n; c += %s) {", e->U, first, step);
    put_element(e, p, need, "");
    line(e, "}");
}

static void put_warp_pass(emitter *e, int p, const uint8_t *need) {
    if (e->keep) {
        put_kept_pass(e, p, need);
    } else if (p <= e->npass) {
        put_declarations(e, p, DECLARE_PAIR);
        line(e, "{");
        line(e, "const %s end = n;", e->U);
        put_part(e, p, need, "0");
        line(e, "}");
    } else {
        put_store_pass(e, p, need, "lane", "32");
    }
    for (int i = 0; i < e->p->ninst; i++)
        if (target(e, i, p) && !acts(inst(e, i)))
            line(e, "const %s r%d = wkl_warp_%s(a%d[0], a%d[1]);", type_name(inst(e, i)), i, reduce_name(inst(e, i)), i, i);
}

/* ---- reductions of a block ----------------------------------------------------------------------------------------- */

/* A thread per row, `who`, adds parts 0 .. count - 1 in order to its totals; `place`: of part q in `shared`. */
static void put_add_parts(emitter *e, int p, const char *who, const char *count, const char *place) {
    int m = 0;
    line(e, "__syncthreads();");
    line(e, "if (%s) {", who);
    line(e, "for (%s q = 0; q < %s; q++) {", e->U, count);
    for (int i = 0; i < e->p->ninst; i++)
        if (target(e, i, p) && !acts(inst(e, i)))
            line(e, "t%d = wkl_add_%s(t%d, shared[%d][%s]);", i, reduce_name(inst(e, i)), i, m++, place);
    line(e, "}");
    line(e, "}");
    line(e, "__syncthreads();");
}

/* That thread tells the others. */
static void put_results(emitter *e, int p, const char *who, const char *place) {
    int m = 0;
    line(e, "if (%s) {", who);
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (target(e, i, p) && !acts(in))
            line(e, "shared[%d][%s] = wkl_bits_%c((%s)t%d);", m++, place, in->type == WKI_TF ? 'f' : 'i', type_name(in), i);
    }
    line(e, "}");
    line(e, "__syncthreads();");
    m = 0;
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (target(e, i, p) && !acts(in))
            line(e, "const %s r%d = wkl_from_%c(shared[%d][%s]);", type_name(in), i, in->type == WKI_TF ? 'f' : 'i', m++,
                 place);
    }
    line(e, "__syncthreads();");
}

static void put_part_results(emitter *e, int p, const char *place) {
    int m = 0;
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (target(e, i, p) && !acts(in))
            line(e, "shared[%d][%s] = wkl_bits_%c(a%d%s);", m++, place, in->type == WKI_TF ? 'f' : 'i', i,
                 e->s.kind == WKI_CU_BLOCK ? "[0]" : "");
    }
}

static void put_shared(emitter *e) {
    int most = 0;
    for (int p = 1; p <= e->npass; p++) {
        int n = 0;
        for (int i = 0; i < e->p->ninst; i++)
            n += target(e, i, p) && !acts(inst(e, i));
        most = n > most ? n : most;
    }
    if (most)
        line(e, "__shared__ int shared[%d][%d];", most, e->s.kind == WKI_CU_BLOCK ? WKI_CU_ROW_PART : WKI_CU_MAX_THREADS);
}

/* ---- a block per row ----------------------------------------------------------------------------------------------- */

static void put_block_pass(emitter *e, int p, const uint8_t *need) {
    const int part = WKI_CU_ROW_PART;
    if (p > e->npass) {
        put_store_pass(e, p, need, "threadIdx.x", "blockDim.x");
        return;
    }
    put_declarations(e, p, DECLARE_TOTAL);
    /* `shared` holds as many parts as a part has columns. */
    line(e, "for (%s from = 0; from < nparts; from += %d) {", e->U, part);
    line(e, "const %s until = nparts - from < %d ? nparts : from + %d;", e->U, part, part);
    line(e, "for (%s part = from + warp; part < until; part += blockDim.x / 32) {", e->U);
    put_declarations(e, p, DECLARE_PAIR);
    line(e, "const %s first = part * %d, end = n - first < %d ? n : first + %d;", e->U, part, part, part);
    put_part(e, p, need, "first");
    for (int i = 0; i < e->p->ninst; i++)
        if (target(e, i, p) && !acts(inst(e, i)))
            line(e, "a%d[0] = wkl_warp_%s(a%d[0], a%d[1]);", i, reduce_name(inst(e, i)), i, i);
    line(e, "if (lane == 0) {");
    put_part_results(e, p, "part - from");
    line(e, "}");
    line(e, "}");
    put_add_parts(e, p, "threadIdx.x == 0", "until - from", "q");
    line(e, "}");
    put_results(e, p, "threadIdx.x == 0", "0");
}

/* ---- a thread per row and part ------------------------------------------------------------------------------------- */

static void put_col_pass(emitter *e, int p, const uint8_t *need) {
    const int part = WKI_CU_COL_PART;
    if (p > e->npass) {
        line(e, "if (live) {");
        put_store_pass(e, p, need, "threadIdx.y", "blockDim.y");
        line(e, "}");
        return;
    }
    put_declarations(e, p, DECLARE_TOTAL);
    line(e, "for (%s from = 0; from < nparts; from += blockDim.y) {", e->U);
    line(e, "const %s first = (from + threadIdx.y) * %d;", e->U, part);
    line(e, "const %s end = first >= n || n - first < %d ? n : first + %d;", e->U, part, part);
    put_declarations(e, p, DECLARE_ONE);
    line(e, "#pragma unroll %d", unroll(e, need, 16));
    line(e, "for (%s c = first; c < end; c++) {", e->U);
    put_element(e, p, need, "");
    put_accumulate(e, p, "", "");
    line(e, "}");
    put_part_results(e, p, "threadIdx.y * blockDim.x + threadIdx.x");
    line(e, "const %s left = nparts - from < blockDim.y ? nparts - from : blockDim.y;", e->U);
    put_add_parts(e, p, "threadIdx.y == 0", "left", "q * blockDim.x + threadIdx.x");
    line(e, "}");
    put_results(e, p, "threadIdx.y == 0", "threadIdx.x");
}

/* ---- kernels of rows ----------------------------------------------------------------------------------------------- */

static void put_row_kernel(emitter *e) {
    const char *U = e->U;
    wki_cu_kind kind = e->s.kind;
    line(e, "const %s n = %s, nrow = %s;", U, wide_param(e, false, e->l.ncol).s, wide_param(e, false, e->l.nrow).s);
    if (kind == WKI_CU_WARP) {
        line(e, "const unsigned lane = threadIdx.x %% 32;");
        line(e, "const %s row = ((%s)blockIdx.x * blockDim.x + threadIdx.x) / 32;", U, U);
        line(e, "if (row >= nrow)");
        line(e, "    return;");
    } else if (kind == WKI_CU_BLOCK) {
        line(e, "const unsigned lane = threadIdx.x %% 32, warp = threadIdx.x / 32;");
        line(e, "const %s nparts = (n + %d) / %d, row = blockIdx.x;", U, WKI_CU_ROW_PART - 1, WKI_CU_ROW_PART);
    } else {
        line(e, "const %s nparts = (n + %d) / %d;", U, WKI_CU_COL_PART - 1, WKI_CU_COL_PART);
        line(e, "const %s place = (%s)blockIdx.x * blockDim.x + threadIdx.x;", U, U);
        line(e, "const int live = place < nrow;");
        line(e, "const %s row = live ? place : 0;", U);
    }
    if (kind != WKI_CU_WARP)
        put_shared(e);
    put_pointers(e);
    put_uniforms(e);
    put_row_start(e);
    put_row_values(e, 0);
    for (int p = 1; p <= e->npass + 1; p++) {
        uint8_t need[WKI_LOOP_MAX_INST];
        if (needed(e, p, need)) {
            line(e, "/* pass %d */", p);
            (kind == WKI_CU_WARP ? put_warp_pass : kind == WKI_CU_BLOCK ? put_block_pass : put_col_pass)(e, p, need);
        }
        put_row_values(e, p);
    }
    put_row_actions(e, kind == WKI_CU_WARP ? "lane == 0" : kind == WKI_CU_BLOCK ? "threadIdx.x == 0" : "live && threadIdx.y == 0");
}

/* ---- entry points -------------------------------------------------------------------------------------------------- */

static int threads_of(wki_cu_kind kind) {
    return kind == WKI_CU_EACH || kind == WKI_CU_MULTI ? WKI_CU_THREADS
           : kind == WKI_CU_WARP                       ? WKI_CU_WARP_THREADS
                                                       : WKI_CU_MAX_THREADS;
}

/* Heads the body with the parameter struct and the kernel's name, which is the hash of both. */
static bool finish(emitter *e, wki_cu_kernel_text *out) {
    char head[160];
    int n = snprintf(head, sizeof head, "{ unsigned long long q[%d]; int d[%d]; } %d", e->l.nq, e->l.nd, threads_of(e->s.kind));
    if (e->nomem)
        return false;
    out->hash = wki_hash(e->text, e->len, wki_hash(head, (size_t)n, 0));
    snprintf(out->name, sizeof out->name, "wkl_%016llx", (unsigned long long)out->hash);
    size_t cap = e->len + 512;
    out->src = wki_malloc(cap);
    if (!out->src)
        return false;
    int k = snprintf(out->src, cap,
                     "typedef struct {\n    WK_U64 q[%d];\n    int d[%d];\n} %s_p;\n"
                     "WKL_KERNEL(%d) %s(const %s_p p, const WK_U64 *args) {\n",
                     e->l.nq, e->l.nd, out->name, threads_of(e->s.kind), out->name, out->name);
    memcpy(out->src + k, e->text, e->len);
    memcpy(out->src + k + e->len, "}\n", 3);
    return true;
}

static bool emit(const wki_loop_run *r, bool multi, wki_cu_kernel_text *out, const char **why) {
    *out = (wki_cu_kernel_text){0};
    emitter *e = wki_calloc(1, sizeof *e);
    bool ok = false;
    if (e) {
        e->r = r;
        e->p = r->prog;
        e->indent = 1;
        wki_cu_shape_of(r, multi, &e->s);
        wki_cu_layout_of(e->p, &e->s, &e->l);
        e->U = e->s.wide ? "WK_U64" : "unsigned";
        e->S = e->s.wide ? "WK_I64" : "int";
        if (analyse(e)) {
            plan_keeping(e);
            if (rows(e))
                put_row_kernel(e);
            else
                put_each_kernel(e);
            ok = finish(e, out);
        }
        *why = e->why;
        wki_free(e->text);
    }
    if (!ok && (!e || !e->why))
        *why = "no host memory for a kernel's text";
    wki_free(e);
    return ok;
}

bool wki_emit_cuda(const wki_loop_run *r, wki_cu_kernel_text *out, const char **why) {
    return emit(r, false, out, why);
}

bool wki_emit_cuda_multi(const wki_loop_run *first, wki_cu_kernel_text *out, const char **why) {
    return emit(first, true, out, why);
}

void wki_cu_kernel_text_free(wki_cu_kernel_text *t) {
    wki_free(t->src);
    *t = (wki_cu_kernel_text){0};
}

char *wki_emit_cuda_prelude(void) {
    const char *const part[] = {wki_embed_prims_prelude_cuh, wki_embed_prim_math_inc, wki_embed_loop_prelude_cuh};
    size_t len = 0, n[3];
    for (int i = 0; i < 3; i++)
        len += n[i] = strlen(part[i]);
    char *text = wki_malloc(len + 1);
    if (!text)
        return NULL;
    len = 0;
    for (int i = 0; i < 3; i++) {
        memcpy(text + len, part[i], n[i]);
        len += n[i];
    }
    text[len] = 0;
    return text;
}
