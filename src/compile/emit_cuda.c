/* Prints loop programs as CUDA C (emit_cuda.h). Values become locals: u<i> for what is the same everywhere,
 * r<i> for one row, v<i> for one element, and k<i>[] where an element's value is kept from one pass over the
 * row to a later one. Calls base and core. */
#include "compile/emit_cuda.h"

#include "base/hash.h"
#include "compile/emit_cuda_private.h"
#include "core/core.h"
#include "embed.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char wki_emit_cuda_nomem[] = "no host memory for a kernel's text";

/* ---- text ---------------------------------------------------------------------------------------------- */

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

void wki_cu_put(emitter *e, const char *format, ...) {
    va_list ap;
    va_start(ap, format);
    vput(e, format, ap);
    va_end(ap);
}

void wki_cu_line(emitter *e, const char *format, ...) {
    size_t n = strlen(format);
    if (format[0] == '}')
        e->indent--;
    INDENT();
    va_list ap;
    va_start(ap, format);
    vput(e, format, ap);
    va_end(ap);
    PUT("\n");
    if (n && format[n - 1] == '{')
        e->indent++;
}

name wki_cu_named(const char *format, ...) {
    name n;
    va_list ap;
    va_start(ap, format);
    vsnprintf(n.s, sizeof n.s, format, ap);
    va_end(ap);
    return n;
}

/* ---- parameters ---------------------------------------------------------------------------------------- */

name wki_cu_wide_param(const emitter *e, bool is_signed, int at) {
    const char *type = is_signed ? e->S : e->U;
    return e->s.wide ? wki_cu_named("(%s)p.q[%d]", type, at) : wki_cu_named("(%s)p.d[%d]", type, at);
}

static name size_param(const emitter *e, int d) { return wki_cu_wide_param(e, false, e->l.size + d); }

static name stride_param(const emitter *e, int op, int d) {
    return wki_cu_wide_param(e, true, e->l.stride + op * wki_cu_dims(&e->s) + d);
}

/* ---- indices and places -------------------------------------------------------------------------------- */

void wki_cu_split_index(emitter *e, const char *from, int first, int last) {
    if (last - first == 1) {
        LINE("const %s i%d = %s;", e->U, first, from);
        return;
    }
    name rest = wki_cu_named("%s", from);
    for (int d = last - 1; d > first; d--) {
        if (e->s.wide)
            LINE("const %s h%d = %s / %s;", e->U, d, rest.s, size_param(e, d).s);
        else
            LINE("const %s h%d = wkl_div(%s, p.d[%d], p.d[%d]);", e->U, d, rest.s, e->l.div + 2 * d,
                 e->l.div + 2 * d + 1);
        LINE("const %s i%d = %s - h%d * %s;", e->U, d, rest.s, d, size_param(e, d).s);
        rest = wki_cu_named("h%d", d);
    }
    if (last > first)
        LINE("const %s i%d = %s;", e->U, first, rest.s);
}

void wki_cu_put_offset(emitter *e, int op, int first, int last, wki_cu_move move, const char *linear) {
    if (move == WKI_CU_LINEAR) {
        PUT("(%s)%s", e->S, linear);
        return;
    }
    bool any = false;
    for (int d = first; d < last; d++) {
        bool inner = d == last - 1;
        if (inner && move == WKI_CU_STILL)
            continue;
        PUT(any ? " + " : "");
        PUT("(%s)i%d", e->S, d);
        if (!inner || move != WKI_CU_UNIT)
            PUT(" * %s", stride_param(e, op, d).s);
        any = true;
    }
    if (!any)
        PUT("0");
}

bool wki_cu_operand_used(const emitter *e, int op) {
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if ((in->code == WKI_L_LOAD || in->code == WKI_L_STORE) && in->a == op && e->live[i])
            return true;
    }
    return false;
}

bool wki_cu_any_needs_index(const emitter *e, const uint8_t *need) {
    for (int i = 0; i < e->p->ninst; i++)
        if (need[i] && (inst(e, i)->code == WKI_L_INDEX || inst(e, i)->code == WKI_L_RNG))
            return true;
    return false;
}

bool wki_cu_any_rng(const emitter *e, const uint8_t *need, bool row) {
    for (int i = 0; i < e->p->ninst; i++)
        if (e->live[i] && inst(e, i)->code == WKI_L_RNG && of_row(e, inst(e, i)) == row && (!need || need[i]))
            return true;
    return false;
}

void wki_cu_put_logical(emitter *e, const char *var, int last, const char *linear) {
    PUT("%*sconst WK_U64 %s = ", 4 * e->indent, "", var);
    if (linear) {
        PUT("%s;\n", linear);
        return;
    }
    for (int d = 0; d < last; d++)
        PUT("%s(WK_U64)i%d * (WK_U64)%s", d ? " + " : "", d, wki_cu_wide_param(e, false, e->l.weight + d).s);
    PUT(last ? ";\n" : "0;\n");
}

/* ---- values -------------------------------------------------------------------------------------------- */

static const struct prim {
    const char *name, *signature;
} prims[WKI_P_COUNT] = {
#define P(E, n, arity, signature) {#n, signature},
#include "ops/prims.def"
};

const char *wki_cu_reduce_name(const wki_inst *in) {
    static const char *const f[] = {"sum_f", "max_f", "min_f"}, *const i[] = {"sum_i", "max_i", "min_i"};
    return (in->type == WKI_TF ? f : i)[in->sub];
}

const char *wki_cu_dtype_type(uint8_t dtype) {
    switch ((wk_dtype)dtype) {
    case WK_F32:
        return "float";
    case WK_F64:
        return "double";
    case WK_I32:
        return "int";
    case WK_I64:
        return "WK_I64";
    default:
        return "unsigned char";
    }
}

name wki_cu_value(const emitter *e, int v) {
    const wki_inst *in = inst(e, v);
    if (uniform(in))
        return wki_cu_named("u%d", v);
    if (of_row(e, in))
        return wki_cu_named("r%d", v);
    return e->kept[v] ? wki_cu_named("k%d[k]", v) : wki_cu_named("v%d", v);
}

/* Prints the text of a value that is not a reduction over columns. */
static void put_value(emitter *e, int i) {
    const wki_inst *in = inst(e, i);
    bool row = of_row(e, in);
    switch ((wki_loop_code)in->code) {
    case WKI_L_LOAD: {
        const char *t = wki_cu_dtype_suffix(e->r->opnd[in->a].dtype);
        if (e->four && e->s.move[in->a] != WKI_CU_STILL)
            PUT("x%d[k]", i);
        else if (e->four)
            PUT("x%d", i);
        else
            PUT("wkl_ld_%s(p%d + %c%d)", t, in->a, row ? 'R' : 'o', in->a);
        break;
    }
    case WKI_L_PRIM: {
        const char *sig = prims[in->sub].signature + 2;
        PUT("wkc_%s(", prims[in->sub].name);
        for (int k = 0; k < 3 && sig[k]; k++)
            PUT("%s%s", k ? ", " : "", wki_cu_value(e, k == 0 ? in->a : k == 1 ? in->b : in->c).s);
        PUT(")");
        break;
    }
    case WKI_L_REDUCE: /* over one element */
        PUT("wkl_%s(wkl_id_%s(), %s)", wki_cu_reduce_name(in), wki_cu_reduce_name(in),
            wki_cu_value(e, in->a).s);
        break;
    case WKI_L_INDEX: {
        int d = in->a >= 0 && in->a <= WKI_LOOP_MAX_DIMS ? e->s.index_dim[in->a] : -1;
        if (d < 0 || (row && d >= e->s.nk))
            PUT("0");
        else if (e->four && d == wki_cu_dims(&e->s) - 1)
            PUT("(int)i%d + k", d);
        else
            PUT("(int)i%d", d);
        break;
    }
    case WKI_L_RNG:
        if (e->four && e->s.rng_unit)
            PUT("x%d[k]", i);
        else if (e->four)
            PUT("wkl_%s(seed, seq%d, g + (WK_U64)k * (WK_U64)%s)", prims[in->sub].name, in->a,
                wki_cu_wide_param(e, false, e->l.weight + wki_cu_dims(&e->s) - 1).s);
        else
            PUT("wkl_%s(seed, seq%d, %s)", prims[in->sub].name, in->a, row ? "G" : "g");
        break;
    default:
        break;
    }
}

void wki_cu_define_value(emitter *e, int i) {
    PUT("%*s", 4 * e->indent, "");
    if (!e->kept[i] || of_row(e, inst(e, i)))
        PUT("const %s ", type_name(inst(e, i)));
    PUT("%s = ", wki_cu_value(e, i).s);
    put_value(e, i);
    PUT(";\n");
}

void wki_cu_put_store(emitter *e, const wki_inst *in, const char *where) {
    const char *t = wki_cu_dtype_suffix(e->r->opnd[in->a].dtype);
    LINE("%s = wkl_to_%s_%c(%s);", where, t, inst(e, in->b)->type == WKI_TF ? 'f' : 'i',
         wki_cu_value(e, in->b).s);
}

void wki_cu_put_check(emitter *e, const wki_inst *in, const char *guard) {
    LINE("if (%s!%s)", guard, wki_cu_value(e, in->a).s);
    LINE("    wkl_fault(args, p.d[%d], %d);", e->l.fault, in->imm.i + 1);
}

/* ---- what all kernels begin with ----------------------------------------------------------------------- */

void wki_cu_put_pointers(emitter *e) {
    for (int i = 0; i < e->s.nop; i++) {
        if (!wki_cu_operand_used(e, i))
            continue;
        const char *type = wki_cu_dtype_type(e->r->opnd[i].dtype), *c = i < e->p->nload ? "const " : "";
        if (e->s.kind == WKI_CU_MULTI)
            LINE("%s%s *p%d = WKL_POINTER(%s%s, wkl_at(args, entry[%d], (int)entry[%d])) + chunk;", c, type,
                 i, c, type, 1 + 2 * i, 2 + 2 * i);
        else
            LINE("%s%s *p%d = WKL_POINTER(%s%s, wkl_at(args, p.q[%d], p.d[%d]));", c, type, i, c, type,
                 e->l.base + i, e->l.slot + i);
    }
}

void wki_cu_put_uniforms(emitter *e) {
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (!e->live[i])
            continue;
        if (in->code == WKI_L_CONST && in->type == WKI_TF)
            LINE("const float u%d = __int_as_float((int)0x%08xu);", i, (unsigned)in->imm.i);
        else if (in->code == WKI_L_CONST)
            LINE("const int u%d = (int)0x%08xu;", i, (unsigned)in->imm.i);
        else if (in->code == WKI_L_ARG)
            LINE("const float u%d = wkl_arg(args, p.d[%d]);", i, e->l.arg + in->a);
    }
    if (!wki_cu_any_rng(e, NULL, false) && !wki_cu_any_rng(e, NULL, true))
        return;
    LINE("const WK_U64 seed = args[p.d[%d]];", e->l.seed);
    uint64_t seen = 0;
    for (int i = 0; i < e->p->ninst; i++)
        if (e->live[i] && inst(e, i)->code == WKI_L_RNG && !(seen >> (inst(e, i)->a & 63) & 1)) {
            seen |= (uint64_t)1 << (inst(e, i)->a & 63);
            LINE("const WK_U64 seq%d = args[p.d[%d]] + (WK_U64)(WK_I64)p.d[%d];", inst(e, i)->a,
                 e->l.rng_base, e->l.rng + inst(e, i)->a);
        }
}

/* ---- a thread per element ------------------------------------------------------------------------------ */

/* The element with index i of the domain, or with `four` it and the next three. */
static void put_each(emitter *e, const uint8_t *need) {
    int dims = wki_cu_dims(&e->s);
    bool multi = e->s.kind == WKI_CU_MULTI, all_linear = true;
    for (int op = 0; op < e->s.nop; op++)
        all_linear &= e->s.move[op] == WKI_CU_LINEAR || (dims == 1 && e->s.move[op] == WKI_CU_STILL);
    if (!multi && (!all_linear || wki_cu_any_needs_index(e, need)))
        wki_cu_split_index(e, "i", 0, dims);
    for (int op = 0; op < e->s.nop; op++)
        if (wki_cu_operand_used(e, op)) {
            PUT("%*sconst %s o%d = ", 4 * e->indent, "", e->S, op);
            wki_cu_put_offset(e, op, 0, dims, e->s.move[op], "i");
            PUT(";\n");
        }
    if (wki_cu_any_rng(e, need, false))
        wki_cu_put_logical(e, "g", dims, multi ? "chunk + i" : NULL);
    if (!e->four) {
        for (int i = 0; i < e->p->ninst; i++)
            if (need[i])
                wki_cu_define_value(e, i);
        for (int i = 0; i < e->p->ninst; i++) {
            const wki_inst *in = inst(e, i);
            if (in->code == WKI_L_STORE)
                wki_cu_put_store(e, in, wki_cu_named("p%d[o%d]", in->a, in->a).s);
            else if (in->code == WKI_L_CHECK)
                wki_cu_put_check(e, in, "");
        }
        return;
    }
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (!need[i] && in->code != WKI_L_STORE)
            continue;
        if (in->code == WKI_L_LOAD) {
            const char *t = wki_cu_dtype_suffix(e->r->opnd[in->a].dtype);
            if (e->s.move[in->a] == WKI_CU_STILL) {
                LINE("const %s x%d = wkl_ld_%s(p%d + o%d);", type_name(in), i, t, in->a, in->a);
            } else {
                LINE("%s x%d[4];", type_name(in), i);
                LINE("wkl_ld4_%s(p%d + o%d, x%d);", t, in->a, in->a, i);
            }
        } else if (in->code == WKI_L_RNG && e->s.rng_unit) {
            LINE("float x%d[4];", i);
            LINE("wkl_%s4(seed, seq%d, g, x%d);", prims[in->sub].name, in->a, i);
        } else if (in->code == WKI_L_STORE) {
            LINE("%s y%d[4];", wki_cu_dtype_type(e->r->opnd[in->a].dtype), i);
        }
    }
    LINE("#pragma unroll");
    LINE("for (int k = 0; k < 4; k++) {");
    for (int i = 0; i < e->p->ninst; i++)
        if (need[i])
            wki_cu_define_value(e, i);
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (in->code == WKI_L_STORE)
            wki_cu_put_store(e, in, wki_cu_named("y%d[k]", i).s);
        else if (in->code == WKI_L_CHECK)
            wki_cu_put_check(e, in, "");
    }
    LINE("}");
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (in->code == WKI_L_STORE && e->s.move[in->a] == WKI_CU_STILL) /* the last one stays */
            LINE("p%d[o%d] = y%d[3];", in->a, in->a, i);
        else if (in->code == WKI_L_STORE)
            LINE("wkl_st4_%s(p%d + o%d, y%d);", wki_cu_dtype_suffix(e->r->opnd[in->a].dtype), in->a, in->a,
                 i);
    }
}

static void put_aligned(emitter *e) {
    PUT("%*sif (1", 4 * e->indent, "");
    for (int op = 0; op < e->s.nop; op++)
        if (e->s.move[op] != WKI_CU_STILL && wki_cu_operand_used(e, op))
            PUT(" && wkl_aligned(p%d, %d)", op, wki_dtype_size((wk_dtype)e->r->opnd[op].dtype) == 1 ? 4 : 16);
    PUT(") {\n");
    e->indent++;
}

static void put_each_kernel(emitter *e) {
    uint8_t need[WKI_LOOP_MAX_INST];
    const char *U = e->U;
    bool multi = e->s.kind == WKI_CU_MULTI;
    wki_cu_needed(e, 1, need);
    if (multi) {
        LINE("const WK_U64 *table = WKL_POINTER(const WK_U64, p.q[%d]);", e->l.base);
        LINE("int low = 0, high = p.d[%d];", e->l.slot);
        LINE("while (high - low > 1) {");
        LINE("const int middle = (low + high) / 2;");
        LINE("if (table[middle] <= blockIdx.x)");
        LINE("    low = middle;");
        LINE("else");
        LINE("    high = middle;");
        LINE("}");
        LINE("const WK_U64 *entry = table + p.d[%d] + 1 + low * %d;", e->l.slot, 1 + 2 * e->s.nop);
        LINE(
            "const WK_U64 most = p.d[%d], chunk = (blockIdx.x - table[low]) * most, left = entry[0] - chunk;",
            e->l.each);
        LINE("const unsigned n = left < most ? (unsigned)left : (unsigned)most;");
        LINE("const unsigned step = blockDim.x, me = threadIdx.x;");
    } else {
        LINE("const %s n = %s;", U, wki_cu_wide_param(e, false, e->l.nrow).s);
        LINE("const %s step = (%s)gridDim.x * blockDim.x, me = (%s)blockIdx.x * blockDim.x + threadIdx.x;", U,
             U, U);
    }
    wki_cu_put_pointers(e);
    wki_cu_put_uniforms(e);
    LINE("%s%s start = 0;", e->s.vec ? "" : "const ", U);
    if (e->s.vec) {
        put_aligned(e);
        LINE("start = n / 4 * 4;");
        LINE("for (%s i = 4 * me; i < start; i += 4 * step) {", U);
        e->four = true;
        put_each(e, need);
        e->four = false;
        LINE("}");
        LINE("}");
    }
    LINE("for (%s i = start + me; i < n; i += step) {", U);
    put_each(e, need);
    LINE("}");
}

/* ---- entry points -------------------------------------------------------------------------------------- */

static int threads_of(wki_cu_kind kind) {
    return kind == WKI_CU_EACH || kind == WKI_CU_MULTI ? WKI_CU_THREADS
           : kind == WKI_CU_WARP                       ? WKI_CU_WARP_THREADS
           : kind == WKI_CU_SPLIT                      ? WKI_CU_SPLIT_THREADS
                                                       : WKI_CU_MAX_THREADS;
}

/* Heads the body with the parameter struct and the kernel's name, which is the hash of both. */
static bool finish(emitter *e, wki_cu_kernel_text *out) {
    char head[160];
    int n = snprintf(head, sizeof head, "{ unsigned long long q[%d]; int d[%d]; } %d", e->l.nq, e->l.nd,
                     threads_of(e->s.kind));
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
                     "WKL_KERNEL(%d) %s(const %s_p p, const WK_U64 *args) {\n    wkl_begin();\n",
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
        if (wki_cu_analyse(e)) {
            wki_cu_plan_keeping(e);
            if (e->p->in_place) {
                LINE("if (wkl_stopped(args, p.d[%d]))", e->l.fault);
                LINE("    return;");
            }
            if (rows(e))
                wki_cu_put_row_kernel(e);
            else
                put_each_kernel(e);
            ok = finish(e, out);
        }
        *why = e->why;
        wki_free(e->text);
    }
    if (!ok && (!e || !e->why))
        *why = wki_emit_cuda_nomem;
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
    const char *const part[] = {wki_embed_prims_prelude_cuh, wki_embed_prim_math_inc,
                                wki_embed_loop_prelude_cuh};
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
