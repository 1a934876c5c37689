/* Compiles gradient text to C. One statement per op call, so that the order of records does not depend on how a C compiler
 * orders arguments. Which tensors a row saves follows from the names that its gradients use. */
#include "opgen.h"

#include <math.h>
#include <string.h>

typedef enum vkind { V_TENSOR, V_NUMBER, V_LIST, V_DTYPE, V_NONE } vkind;
typedef struct value {
    vkind kind;
    const char *c;     /* C text; LIST: the items */
    const char *count; /* LIST */
} value;

typedef struct gen {
    FILE *f; /* NULL while only the saved sets are derived */
    op *o;
    int line, ntemp;
    unsigned in, out; /* saved tensors named so far in this gradient */
} gen;

static value compile(gen *s, const expr *e);

static const char *word_offset(const op *o, int attr_) {
    const char *at = "0";
    for (int i = 0; i < attr_; i++) {
        attr_kind k = o->attr[i].kind;
        if (k == A_VALUE)
            continue;
        if (is_list(k))
            at = format("%s + 1 + (int)wki_node_ia(n)[%s]", at, at);
        else
            at = format("%s + 1", at);
    }
    return at;
}

static value attribute(const op *o, int i) {
    int nvalue = 0;
    for (int k = 0; k < i; k++)
        nvalue += o->attr[k].kind == A_VALUE;
    const char *at = word_offset(o, i);
    switch (o->attr[i].kind) {
    case A_VALUE:
        return (value){V_NUMBER, format("wki_node_va(n)[%d]", nvalue), NULL};
    case A_DTYPE:
        return (value){V_DTYPE, format("(wk_dtype)wki_node_ia(n)[%s]", at), NULL};
    case A_LIST:
    case A_SHAPE:
    case A_DIMS:
    case A_PERM:
        return (value){V_LIST, format("wki_node_ia(n) + %s + 1", at), format("(int)wki_node_ia(n)[%s]", at)};
    default:
        return (value){V_NUMBER, format("wki_node_ia(n)[%s]", at), NULL};
    }
}

static value name(gen *s, const char *id) {
    int i;
    if (is(id, "g"))
        return (value){V_TENSOR, "g", NULL};
    if (is(id, "none"))
        return (value){V_NONE, "NULL", NULL};
    if ((i = in_find(s->o, id)) >= 0) {
        s->in |= 1u << i;
        return (value){V_TENSOR, format("in_%s", id), NULL};
    }
    if ((i = out_find(s->o, id)) >= 0) {
        s->out |= 1u << i;
        return (value){V_TENSOR, format("out_%s", id), NULL};
    }
    if ((i = attr_find(s->o, id)) >= 0)
        return attribute(s->o, i);
    fail_at(s->line, "'%s' is neither g, an input, an output nor an attribute of %s", id, s->o->name);
}

static value temp(gen *s, const char *call) {
    const char *t = format("t%d", s->ntemp++);
    if (s->f)
        fprintf(s->f, "        wki_tensor *%s = %s;\n", t, call);
    return (value){V_TENSOR, t, NULL};
}

/* shape(x), dtype(x), size(x, k): facts about an input, which the record keeps in place of the tensor. */
static bool fact(gen *s, const expr *e, value *v) {
    bool shape = is(e->name, "shape"), dtype = is(e->name, "dtype"), size = is(e->name, "size");
    if (!shape && !dtype && !size)
        return false;
    int i = e->narg && e->arg[0]->kind == E_NAME ? in_find(s->o, e->arg[0]->name) : -1;
    if (i < 0 || e->narg != (size ? 2 : 1))
        fail_at(s->line, "'%s' takes an input of %s%s", e->name, s->o->name, size ? " and a dimension" : "");
    s->o->keep_meta = true;
    if (shape)
        *v = (value){V_LIST, format("wki_node_meta(n)[%d].size", i), format("wki_node_meta(n)[%d].ndim", i)};
    else if (dtype)
        *v = (value){V_DTYPE, format("(wk_dtype)wki_node_meta(n)[%d].dtype", i), NULL};
    else
        *v = (value){V_NUMBER,
                     format("wki_meta_size(&wki_node_meta(n)[%d], (int)(%s))", i, compile(s, e->arg[1]).c),
                     NULL};
    return true;
}

static value call(gen *s, const expr *e) {
    value v;
    if (fact(s, e, &v))
        return v;
    const op *o = op_find(e->name);
    if (!o)
        fail_at(s->line, "'%s' is no op", e->name);
    int want = o->nin;
    for (int i = 0; i < o->nattr; i++)
        want += !o->attr[i].hidden;
    if (e->narg != want)
        fail_at(s->line, "'%s' takes %d arguments, not %d", o->name, want, e->narg);
    const char *text_ = format("wki_%s(c", o->name);
    int at = 0;
    for (int i = 0; i < o->nin; i++, at++) {
        v = compile(s, e->arg[at]);
        if (v.kind != V_TENSOR && !(v.kind == V_NONE && o->in[i].optional))
            fail_at(s->line, "argument '%s' of '%s' must be a tensor", o->in[i].name, o->name);
        text_ = format("%s, %s", text_, v.c);
    }
    for (int i = 0; i < o->nattr; i++) {
        static const vkind kinds[] = {
#define KIND(name, value) V_##value,
            ATTR_KINDS(KIND)
#undef KIND
        };
        if (o->attr[i].hidden)
            continue;
        v = compile(s, e->arg[at++]);
        if (v.kind != kinds[o->attr[i].kind])
            fail_at(s->line, "argument '%s' of '%s' has the wrong kind", o->attr[i].name, o->name);
        if (o->attr[i].kind == A_SHAPE)
            text_ = format("%s, %s, %s", text_, v.count, v.c);
        else if (v.kind == V_LIST)
            text_ = format("%s, %s, %s", text_, v.c, v.count);
        else
            text_ = format(o->attr[i].kind == A_DIM ? "%s, (int)(%s)" : "%s, %s", text_, v.c);
    }
    for (int i = 1; i < o->nout; i++)
        text_ = format("%s, NULL", text_);
    return temp(s, format("%s)", text_));
}

static value apply1(gen *s, const char *op_, value a) { return temp(s, format("wki_%s(c, %s)", op_, a.c)); }

static value apply2(gen *s, const char *op_, value a, const char *b) {
    return temp(s, format("wki_%s(c, %s, %s)", op_, a.c, b));
}

static value binary(gen *s, const expr *e) {
    static const char *const ops_[][2] = {{"+", "add"}, {"-", "sub"}, {"*", "mul"}, {"/", "div"},
                                          {"<", "lt"},  {"<=", "le"}, {">", "gt"},  {">=", "ge"},
                                          {"==", "eq"}, {"!=", "ne"}};
    value a = compile(s, e->arg[0]), b = compile(s, e->arg[1]);
    if (a.kind == V_NUMBER && b.kind == V_NUMBER)
        return (value){
            V_NUMBER, format(*e->name == '/' ? "((double)%s %s %s)" : "(%s %s %s)", a.c, e->name, b.c), NULL};
    if (a.kind == V_TENSOR && b.kind == V_TENSOR)
        for (int i = 0; i < 10; i++)
            if (is(ops_[i][0], e->name))
                return apply2(s, ops_[i][1], a, b.c);
    if (a.kind == V_TENSOR && b.kind == V_NUMBER) {
        switch (*e->name) {
        case '+':
            return apply2(s, "add_scalar", a, b.c);
        case '-':
            return apply2(s, "add_scalar", a, format("-(%s)", b.c));
        case '*':
            return apply2(s, "mul_scalar", a, b.c);
        case '/':
            return apply2(s, "mul_scalar", a, format("1.0 / (%s)", b.c));
        }
    }
    if (a.kind == V_NUMBER && b.kind == V_TENSOR) {
        switch (*e->name) {
        case '+':
            return apply2(s, "add_scalar", b, a.c);
        case '-':
            return apply2(s, "add_scalar", apply1(s, "neg", b), a.c);
        case '*':
            return apply2(s, "mul_scalar", b, a.c);
        }
    }
    fail_at(s->line, "'%s' cannot be applied here", e->name);
}

static value compile(gen *s, const expr *e) {
    switch (e->kind) {
    case E_NUM:
        if (e->num == floor(e->num) && fabs(e->num) < 1e9)
            return (value){V_NUMBER, format("%.0f", e->num), NULL};
        return (value){V_NUMBER, format("%.17g", e->num), NULL};
    case E_NAME:
        return name(s, e->name);
    case E_CALL:
        return call(s, e);
    case E_BIN:
        return binary(s, e);
    case E_NEG: {
        value a = compile(s, e->arg[0]);
        if (a.kind == V_NUMBER)
            return (value){V_NUMBER, format("(-%s)", a.c), NULL};
        if (a.kind == V_TENSOR)
            return apply1(s, "neg", a);
        break;
    }
    case E_LIST: {
        const char *items = "";
        for (int i = 0; i < e->narg; i++)
            items = format("%s%s%s", items, i ? ", " : "", compile(s, e->arg[i]).c);
        return (value){V_LIST, format("(const int64_t[]){%s}", items), format("%d", e->narg)};
    }
    }
    fail_at(s->line, "a tensor or number is needed here");
}

void vjp_check(op *o) {
    for (int i = 0; i < o->nin; i++) {
        if (!o->vjp[i].s)
            continue;
        if (o->vjp_fn || o->composite)
            fail_at(o->vjp[i].line, "%s has gradient text and %s", o->name,
                    o->composite ? "is composite" : "a function");
        gen s = {.o = o, .line = o->vjp[i].line};
        if (compile(&s, expr_parse(o->vjp[i].s, o->vjp[i].line)).kind != V_TENSOR)
            fail_at(s.line, "the gradient of '%s' is not a tensor", o->in[i].name);
        o->save_in |= s.in;
        o->save_out |= s.out;
        o->diff |= 1u << i;
    }
    if (o->vjp_fn && !o->diff)
        fail_at(o->line, "op %s: 'vjp %s' needs 'diff' with the inputs that get a gradient", o->name,
                o->vjp_fn);
}

void vjp_emit(FILE *f, const op *o) {
    if (!o->diff || o->vjp_fn)
        return;
    fprintf(f, "static void vjp_%s(const wki_vjp_args *args) {\n    wk_ctx *c = args->c;\n", o->name);
    fprintf(f, "    const wki_node *n = args->node;\n    wki_tensor *g = args->gout[0];\n    (void)c;\n    "
               "(void)n;\n    if (!g)\n");
    fprintf(f, "        return;\n");
    for (int i = 0; i < o->nin; i++) {
        if (!o->vjp[i].s)
            continue;
        op copy = *o;
        gen s = {.o = &copy, .line = o->vjp[i].line};
        const expr *e = expr_parse(o->vjp[i].s, s.line);
        compile(&s, e);
        fprintf(f, "    if (args->need[%d]) {\n", i);
        for (int k = 0; k < o->nin; k++)
            if (s.in >> k & 1)
                fprintf(f, "        wki_tensor *in_%s = wki_saved_in(c, n, %d);\n", o->in[k].name, k);
        for (int k = 0; k < o->nout; k++)
            if (s.out >> k & 1)
                fprintf(f, "        wki_tensor *out_%s = wki_saved_out(c, n, %d);\n", o->out[k], k);
        s.f = f;
        s.ntemp = 0;
        fprintf(f, "        args->gin[%d] = %s;\n    }\n", i, compile(&s, e).c);
    }
    fprintf(f, "}\n");
}
