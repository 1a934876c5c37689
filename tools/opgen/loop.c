/* Compiles loop text to SSA instruction tables. Primitive names and signatures come from src/ops/prims.def, the same list
 * that the interpreters and emitters are made of. */
#include "opgen.h"

#include <math.h>
#include <string.h>

static const struct prim {
    const char *name, *enum_name, *sig;
} prims[] = {
#define P(E, n, arity, sig) {#n, "WKI_P_" #E, sig},
#include "ops/prims.def"
};

enum { MAX_INST = 160, MAX_NAMES = 64 };

typedef struct inst {
    const char *code, *sub;
    char type; /* 'F' or 'I' */
    bool row;
    int a, b, c;
    bool has_imm;
    double imm;
} inst;

typedef struct compiler {
    const op *o;
    int line, n, nstore;
    bool reduces; /* the program has a row level */
    inst in[MAX_INST];
    const char *name[MAX_NAMES];
    int value[MAX_NAMES], nnames;
    int nrng;
    bool stored[MAX_IN + MAX_OUT];
} compiler;

static int compile(compiler *s, const expr *e, char want);

static int add_inst(compiler *s, inst i) {
    for (int k = 0; k < s->n; k++) { /* an equal pure instruction is reused */
        const inst *j = &s->in[k];
        if (is(j->code, i.code) && is(j->sub, i.sub) && j->type == i.type && j->row == i.row && j->a == i.a &&
            j->b == i.b && j->c == i.c && j->imm == i.imm && !is(i.code, "STORE") && !is(i.code, "RNG") &&
            !is(i.code, "CHECK"))
            return k;
    }
    if (s->n == MAX_INST)
        fail_at(s->line, "loop of %s has more than %d instructions", s->o->name, MAX_INST);
    s->in[s->n] = i;
    return s->n++;
}

static inst make(const char *code, const char *sub, char type, bool row, int a, int b, int c) {
    return (inst){code, sub, type, row, a, b, c, false, 0};
}

static int constant(compiler *s, double v, char type) {
    if (type == 'I' && (v != floor(v) || fabs(v) > 2147483647))
        fail_at(s->line, "%g is no 32-bit integer", v);
    inst i = make("CONST", "0", type, s->reduces, -1, -1, -1);
    i.has_imm = true;
    i.imm = v;
    return add_inst(s, i);
}

static const struct prim *find_prim(const char *name) {
    for (size_t i = 0; i < sizeof prims / sizeof *prims; i++)
        if (is(prims[i].name, name))
            return &prims[i];
    return NULL;
}

static int emit_prim(compiler *s, const char *name, int n, const int *v) {
    const struct prim *p = find_prim(name);
    const char *types = p->sig + 2;
    bool row = s->reduces;
    for (int i = 0; i < n; i++) {
        if (s->in[v[i]].type != types[i])
            fail_at(s->line, "operand %d of '%s' is %s", i + 1, name,
                    types[i] == 'F' ? "an integer or mask, a float is needed (i2f)"
                                    : "a float, an integer or mask is needed");
        row &= s->in[v[i]].row;
    }
    return add_inst(s,
                    make("PRIM", p->enum_name, p->sig[0], row, v[0], n > 1 ? v[1] : -1, n > 2 ? v[2] : -1));
}

static int compile_name(compiler *s, const expr *e) {
    const op *o = s->o;
    for (int i = s->nnames - 1; i >= 0; i--)
        if (is(s->name[i], e->name))
            return s->value[i];
    int i = attr_find(o, e->name);
    if (i < 0)
        fail_at(s->line, "'%s' is neither a value, an input nor an attribute of %s", e->name, o->name);
    if (is_structural(o->attr[i].kind))
        fail_at(s->line, "attribute '%s' is structural: a loop reads VALUE attributes only", e->name);
    int arg = 0;
    for (int k = 0; k < i; k++)
        arg += !is_structural(o->attr[k].kind);
    return add_inst(s, make("ARG", "0", 'F', s->reduces, arg, -1, -1));
}

static int need_number(compiler *s, const expr *e) {
    if (e->narg != 1 || e->arg[0]->kind != E_NUM)
        fail_at(s->line, "'%s' takes one number", e->name);
    return (int)e->arg[0]->num;
}

static int compile_call(compiler *s, const expr *e) {
    static const char *const reductions[][2] = {
        {"rsum", "WKI_R_SUM"}, {"rmax", "WKI_R_MAX"}, {"rmin", "WKI_R_MIN"}};
    for (int i = 0; i < 3; i++) {
        if (!is(e->name, reductions[i][0]))
            continue;
        if (e->narg != 1)
            fail_at(s->line, "'%s' takes one value", e->name);
        int a = compile(s, e->arg[0], 'F');
        if (s->in[a].row)
            fail_at(s->line, "'%s' of a value that is the same for the whole row", e->name);
        if (s->in[a].type != 'F')
            fail_at(s->line, "'%s' of an integer", e->name);
        return add_inst(s, make("REDUCE", reductions[i][1], 'F', true, a, -1, -1));
    }
    if (is(e->name, "index"))
        return add_inst(s, make("INDEX", "0", 'I', false, need_number(s, e), -1, -1));
    const struct prim *p = find_prim(e->name);
    if (!p)
        fail_at(s->line, "'%s' is no primitive (src/ops/prims.def has them)", e->name);
    int arity = (int)strlen(p->sig + 2);
    if (e->narg != arity)
        fail_at(s->line, "'%s' takes %d operands, not %d", e->name, arity, e->narg);
    if (arity == 0)
        return add_inst(s, make("RNG", p->enum_name, p->sig[0], false, s->nrng++, -1, -1));
    int v[3] = {-1, -1, -1};
    for (int i = 0; i < arity; i++)
        v[i] = compile(s, e->arg[i], p->sig[2 + i]);
    return emit_prim(s, e->name, arity, v);
}

/* Operators choose the float or the integer primitive by their operands; a bare number takes the other side's type. */
static int compile_binary(compiler *s, const expr *e) {
    static const struct {
        const char *text, *f, *i;
        bool swap, invert;
    } table[] = {
        {"+", "add", "iadd", 0, 0}, {"-", "sub", "isub", 0, 0}, {"*", "mul", "imul", 0, 0},
        {"/", "div", NULL, 0, 0},   {"<", "lt", "ilt", 0, 0},   {">", "lt", "ilt", 1, 0},
        {"<=", "le", "ilt", 0, 0},  {">=", "le", "ilt", 1, 0},  {"==", "eq", "ieq", 0, 0},
        {"!=", "eq", "ieq", 0, 1},
    };
    const expr *l = e->arg[0], *r = e->arg[1];
    int v[2];
    if (l->kind == E_NUM) {
        v[1] = compile(s, r, 'F');
        v[0] = compile(s, l, s->in[v[1]].type);
    } else {
        v[0] = compile(s, l, 'F');
        v[1] = compile(s, r, s->in[v[0]].type);
    }
    if (s->in[v[0]].type != s->in[v[1]].type)
        fail_at(s->line, "'%s' of a float and an integer: convert one with i2f or f2i", e->name);
    for (size_t k = 0; k < sizeof table / sizeof *table; k++) {
        if (!is(table[k].text, e->name))
            continue;
        bool integer = s->in[v[0]].type == 'I', invert = table[k].invert, swap = table[k].swap;
        const char *prim = integer ? table[k].i : table[k].f;
        if (!prim)
            fail_at(s->line, "'%s' of integers", e->name);
        if (integer && (is(e->name, "<=") || is(e->name, ">="))) { /* a <= b is !(b < a) */
            swap = !swap;
            invert = true;
        }
        int w[2] = {v[swap], v[!swap]};
        int x = emit_prim(s, prim, 2, w);
        return invert ? emit_prim(s, "not", 1, &x) : x;
    }
    fail_at(s->line, "operator '%s'", e->name);
}

static int compile(compiler *s, const expr *e, char want) {
    switch (e->kind) {
    case E_NUM:
        return constant(s, e->num, want);
    case E_NAME:
        return compile_name(s, e);
    case E_CALL:
        return compile_call(s, e);
    case E_BIN:
        return compile_binary(s, e);
    case E_NEG: {
        int a = compile(s, e->arg[0], 'F');
        if (s->in[a].type == 'F')
            return emit_prim(s, "neg", 1, &a);
        int v[2] = {constant(s, 0, 'I'), a};
        return emit_prim(s, "isub", 2, v);
    }
    case E_LIST:
        break;
    }
    fail_at(s->line, "bad expression");
}

static void bind(compiler *s, const char *name, int value) {
    if (s->nnames == MAX_NAMES)
        fail_at(s->line, "more than %d names in the loop", MAX_NAMES);
    s->name[s->nnames] = name;
    s->value[s->nnames++] = value;
}

/* Operand that a store to `name` writes, or -1: outputs, or for an in-place op the written inputs in order. */
static int store_target(const op *o, const char *name) {
    int j = out_find(o, name);
    if (j >= 0)
        return o->nin + j;
    int i = in_find(o, name);
    if (i < 0 || !o->in[i].writes)
        return -1;
    for (int k = j = 0; k < i; k++)
        j += o->in[k].writes;
    return o->nin + j;
}

static void compile_statement(compiler *s, text t) {
    s->line = t.line;
    if (strncmp(t.s, "check ", 6) == 0) {
        int m = compile(s, expr_parse(t.s + 6, t.line), 'I');
        if (s->in[m].type != 'I')
            fail_at(t.line, "check of a float");
        add_inst(s, make("CHECK", "0", 'I', s->in[m].row, m, -1, -1));
        return;
    }
    const char *rhs, *name = expr_split(t, &rhs);
    int v = compile(s, expr_parse(rhs, t.line), 'F');
    int target = store_target(s->o, name);
    if (target < 0 && (in_find(s->o, name) >= 0 || attr_find(s->o, name) >= 0))
        fail_at(t.line, "'%s' is not written by %s", name, s->o->name);
    if (target >= 0) {
        if (s->stored[target])
            fail_at(t.line, "'%s' is stored twice", name);
        s->stored[target] = true;
        add_inst(s, make("STORE", "0", s->in[v].type, s->in[v].row, target, v, -1));
        s->nstore++;
    }
    bind(s, name, v);
}

static char input_type(const loop_variant *v) { return strchr("ILB", v->in_kind) ? 'I' : 'F'; }

/* Every input is operand and name; sweep drops the loads that the text does not use. */
static void compile_variant(compiler *s, const op *o, const loop_variant *v) {
    *s = (compiler){.o = o, .line = o->line, .reduces = is(o->klass, "ROW")};
    for (int i = 0; i < o->nin; i++) {
        const input *in = &o->in[i];
        if (in->optional)
            fail_at(o->line, "op %s: a loop cannot have the optional input '%s'", o->name, in->name);
        char type = in->type ? in->type : input_type(v);
        bind(s, in->name, add_inst(s, make("LOAD", "0", type, in->row && s->reduces, i, -1, -1)));
    }
    for (int i = 0; i < v->nstmt; i++)
        compile_statement(s, v->stmt[i]);
    int want = o->nout;
    for (int i = 0; i < o->nin; i++)
        want += o->in[i].writes;
    if (s->nstore != want)
        fail_at(v->stmt[0].line, "the loop of %s stores %d of %d outputs", o->name, s->nstore, want);
}

/* Is `a` a value, rather than the number of an operand or argument? `b` and `c` are values where they are there. */
static bool uses_a(const inst *k) {
    return is(k->code, "PRIM") || is(k->code, "REDUCE") || is(k->code, "CHECK");
}

/* Drops instructions that nothing uses (an input that a program only writes) and renumbers. */
static void sweep(compiler *s) {
    bool live[MAX_INST] = {0};
    for (int i = s->n - 1; i >= 0; i--) {
        const inst *k = &s->in[i];
        if (is(k->code, "STORE") || is(k->code, "CHECK"))
            live[i] = true;
        if (!live[i])
            continue;
        if (uses_a(k))
            live[k->a] = true;
        if (k->b >= 0)
            live[k->b] = true;
        if (k->c >= 0)
            live[k->c] = true;
    }
    int to[MAX_INST], n = 0;
    for (int i = 0; i < s->n; i++) {
        if (!live[i])
            continue;
        inst k = s->in[i];
        to[i] = n;
        if (uses_a(&k))
            k.a = to[k.a];
        if (k.b >= 0)
            k.b = to[k.b];
        if (k.c >= 0)
            k.c = to[k.c];
        s->in[n++] = k;
    }
    s->n = n;
}

static void emit_inst(FILE *f, const compiler *s, const inst *i) {
    fprintf(f, "    {WKI_L_%s, %s, %s, %s, %d, %d, %d, {", i->code, i->sub, i->row ? "WKI_ROWV" : "WKI_ELEM",
            i->type == 'F' ? "WKI_TF" : "WKI_TI", i->a, i->b, i->c);
    if (is(i->code, "CHECK"))
        fprintf(f, ".i = WKI_OP_%s}},\n", s->o->name);
    else if (i->has_imm && i->type == 'I')
        fprintf(f, ".i = %d}},\n", (int)i->imm);
    else if (i->has_imm && isinf(i->imm))
        fprintf(f, ".f = %s__builtin_inff()}},\n", i->imm < 0 ? "-" : "");
    else if (i->has_imm)
        fprintf(f, ".f = (float)%.17g}},\n", i->imm);
    else
        fprintf(f, ".i = 0}},\n");
}

/* Can the program run as straight-line vector code over contiguous f32 operands? */
static bool straight(const compiler *s) {
    for (int i = 0; i < s->n; i++) {
        const inst *k = &s->in[i];
        if (is(k->code, "REDUCE") || is(k->code, "RNG") || is(k->code, "INDEX") || is(k->code, "CHECK"))
            return false;
        if ((is(k->code, "LOAD") && k->type != 'F') || (is(k->code, "STORE") && s->in[k->b].type != 'F'))
            return false;
    }
    return s->n > 0;
}

static const char *prim_name(const char *enum_name) {
    for (size_t i = 0; i < sizeof prims / sizeof *prims; i++)
        if (is(prims[i].enum_name, enum_name))
            return prims[i].name;
    return "";
}

/* The program for the vector from element i on: `p` has an address per operand, loads first; an operand that is the same for
   all elements does not move. */
static void emit_straight(FILE *f, const compiler *s) {
    const op *o = s->o;
    int narg = 0;
    for (int i = 0; i < o->nattr; i++)
        narg += !is_structural(o->attr[i].kind);
    fprintf(f, "INLINE void body_%s(float *const *p, const int64_t *moves, int64_t i, const float *arg) {\n",
            o->name);
    fprintf(f, "    (void)arg, (void)moves;\n");
    for (int i = 0; i < s->n; i++) {
        const inst *k = &s->in[i];
        if (is(k->code, "STORE")) {
            fprintf(f, "    put(p[%d] + i, v%d);\n", k->a, k->b);
            continue;
        }
        fprintf(f, "    %s v%d = ", k->type == 'F' ? "wki_nf" : "wki_ni", i);
        if (is(k->code, "LOAD"))
            fprintf(f, "get(p[%d] + (i & moves[%d]));\n", k->a, k->a);
        else if (is(k->code, "ARG"))
            fprintf(f, "splat(arg[%d]);\n", k->a);
        else if (is(k->code, "CONST") && k->type == 'F')
            fprintf(f, isinf(k->imm) ? "splat(%s__builtin_inff());\n" : "splat(%s(float)%.17g);\n",
                    isinf(k->imm) && k->imm < 0 ? "-" : "", k->imm);
        else if (is(k->code, "CONST"))
            fprintf(f, "(wki_ni){0} + (%d);\n", (int)k->imm);
        else
            fprintf(f,
                    k->c >= 0   ? "wkn_%s(v%d, v%d, v%d);\n"
                    : k->b >= 0 ? "wkn_%s(v%d, v%d);\n"
                                : "wkn_%s(v%d);\n",
                    prim_name(k->sub), k->a, k->b, k->c);
    }
    fprintf(f, "}\nSTRAIGHT(%s, %d, %d, %d)\n\n", o->name, o->nin, s->nstore, narg);
}

/* Which of an op's programs is compiled ahead, -1: none. One is enough: the others convert types. */
static int straight_variant(const op *o, compiler *s) {
    for (int v = 0; v < o->nloop && !is(o->klass, "ROW"); v++) {
        compile_variant(s, o, &o->loop[v]);
        sweep(s);
        if (straight(s))
            return v;
    }
    return -1;
}

void emit_straight_programs(FILE *f) {
    static compiler s;
    fprintf(f, "/* Generated by tools/opgen from the op table. Not to be edited. */\n\n");
    for (int i = 0; i < nops; i++)
        if (straight_variant(&ops[i], &s) >= 0)
            emit_straight(f, &s);
    fprintf(f, "static const straight_fn straight[] = {\n    NULL,\n");
    for (int i = 0; i < nops; i++)
        if (straight_variant(&ops[i], &s) >= 0)
            fprintf(f, "    straight_%s,\n", ops[i].name);
    fprintf(f, "};\n");
}

/* Place of an op's variant in that table, 0: none. */
static int straight_index(const op *o, int variant) {
    static compiler s;
    int n = 0;
    for (int i = 0; i < nops; i++) {
        int v = straight_variant(&ops[i], &s);
        n += v >= 0;
        if (&ops[i] == o)
            return v == variant ? n : 0;
    }
    return 0;
}

void loop_emit(FILE *f, const op *o) {
    static compiler s;
    int n[MAX_LOOPS], nrng[MAX_LOOPS];
    int narg = 0, nstore = o->nout;
    for (int i = 0; i < o->nattr; i++)
        narg += !is_structural(o->attr[i].kind);
    for (int i = 0; i < o->nin; i++)
        nstore += o->in[i].writes;
    for (int v = 0; v < o->nloop; v++) {
        compile_variant(&s, o, &o->loop[v]);
        sweep(&s);
        n[v] = s.n;
        nrng[v] = s.nrng;
        fprintf(f, "static const wki_inst inst_%s_%d[] = {\n", o->name, v);
        for (int i = 0; i < s.n; i++)
            emit_inst(f, &s, &s.in[i]);
        fprintf(f, "};\n");
    }
    fprintf(f, "static const wki_loop loop_%s[] = {\n", o->name);
    for (int v = 0; v < o->nloop; v++)
        fprintf(f, "    {%d, %d, %d, %d, %d, %d, inst_%s_%d, false},\n", n[v], o->nin, nstore, narg, nrng[v],
                straight_index(o, v), o->name, v);
    fprintf(f, "};\n");
    if (o->nloop > 1 || o->loop[0].in_kind != '*' || o->loop[0].out_kind != '*') {
        fprintf(f, "static const wki_loop_guard guard_%s[] = {\n", o->name);
        for (int v = 0; v < o->nloop; v++)
            fprintf(f, "    {'%c', '%c'},\n", o->loop[v].in_kind, o->loop[v].out_kind);
        fprintf(f, "};\n");
    }
}
