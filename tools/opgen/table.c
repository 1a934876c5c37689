/* Reads the op table. A row starts with `op NAME` and ends at the next; every other line is a key and its text, `#` begins
 * a comment line. docs/adding-an-op.md describes the keys. */
#include "opgen.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

op ops[MAX_OPS];
int nops;
const char *table_path = "";

static const char *word(const char **p) {
    while (**p == ' ' || **p == '\t')
        (*p)++;
    const char *b = *p;
    while (**p && **p != ' ' && **p != '\t')
        (*p)++;
    return *p == b ? NULL : format("%.*s", (int)(*p - b), b);
}

static const char *identifier(const char *s, int line) {
    if (!s || !(isalpha((unsigned char)*s) || *s == '_'))
        fail_at(line, "a name is missing or bad: '%s'", s ? s : "");
    for (const char *p = s; *p; p++)
        if (!isalnum((unsigned char)*p) && *p != '_')
            fail_at(line, "'%c' in the name '%s'", *p, s);
    return s;
}

const op *op_find(const char *name) {
    for (int i = 0; i < nops; i++)
        if (is(ops[i].name, name))
            return &ops[i];
    return NULL;
}

int in_find(const op *o, const char *name) {
    for (int i = 0; i < o->nin; i++)
        if (is(o->in[i].name, name))
            return i;
    return -1;
}

int out_find(const op *o, const char *name) {
    for (int i = 0; i < o->nout; i++)
        if (is(o->out[i], name))
            return i;
    return -1;
}

int attr_find(const op *o, const char *name) {
    for (int i = 0; i < o->nattr; i++)
        if (is(o->attr[i].name, name))
            return i;
    return -1;
}

bool has_flag(const op *o, const char *flag) {
    for (int i = 0; i < o->nflag; i++)
        if (is(o->flag[i], flag))
            return true;
    return false;
}

bool is_structural(attr_kind k) { return k != A_VALUE; }

bool is_list(attr_kind k) { return k == A_LIST || k == A_SHAPE || k == A_DIMS || k == A_PERM; }

static attr_kind attr_kind_of(const char *s, int line) {
#define KIND(name, value)                                                                                    \
    if (s && is(s, #name))                                                                                   \
        return A_##name;
    ATTR_KINDS(KIND)
#undef KIND
#define KIND(name, value) " " #name
    fail_at(line, "attribute type '%s': one of" ATTR_KINDS(KIND) " expected", s ? s : "");
#undef KIND
}

static void read_inputs(op *o, const char *p, int line) {
    for (const char *w; (w = word(&p));) {
        if (o->nin == MAX_IN)
            fail_at(line, "more than %d inputs", MAX_IN);
        input *in = &o->in[o->nin++];
        char *s = format("%s", w);
        size_t n = strlen(s);
        if (n > 4 && is(s + n - 4, "@row"))
            in->row = true, s[n -= 4] = 0;
        if (n > 2 && s[n - 2] == ':') {
            in->type = s[n - 1] == 'F' ? 'F' : 'I';
            if (!strchr("FIB", s[n - 1]))
                fail_at(line, "input type '%c': F, I or B expected", s[n - 1]);
            s[n -= 2] = 0;
        }
        if (n > 3 && is(s + n - 3, "..."))
            in->variadic = o->variadic = true, s[n -= 3] = 0;
        if (n > 1 && s[n - 1] == '?')
            in->optional = true, s[--n] = 0;
        in->name = identifier(s, line);
        for (int i = 0; i + 1 < o->nin; i++)
            if (is(o->in[i].name, s))
                fail_at(line, "input '%s' twice", s);
    }
}

static void read_attr(op *o, const char *p, int line, bool hidden) {
    if (o->nattr == MAX_ATTR)
        fail_at(line, "more than %d attributes", MAX_ATTR);
    attr *a = &o->attr[o->nattr++];
    a->line = line;
    a->name = identifier(word(&p), line);
    a->kind = attr_kind_of(word(&p), line);
    if (in_find(o, a->name) >= 0 || out_find(o, a->name) >= 0)
        fail_at(line, "'%s' is already an input or output", a->name);
    while (*p == ' ')
        p++;
    if (hidden != (*p != 0))
        fail_at(line, hidden ? "a hidden attribute needs a C expression%s" : "unexpected '%s'", p);
    if (hidden && a->kind != A_INT && a->kind != A_VALUE)
        fail_at(line, "a hidden attribute is INT or VALUE");
    a->hidden = hidden ? p : NULL;
}

static const char *trim(const char *b, const char *e) {
    while (b < e && *b == ' ')
        b++;
    while (e > b && e[-1] == ' ')
        e--;
    return format("%.*s", (int)(e - b), b);
}

/* public NAME(param TYPE, ...) = C expression, ... */
static void read_public(op *o, const char *p, int line) {
    if (o->npub == MAX_PUBLIC)
        fail_at(line, "more than %d public forms", MAX_PUBLIC);
    public_form *f = &o->pub[o->npub++];
    const char *open = strchr(p, '('), *close = open ? strchr(open, ')') : NULL;
    const char *eq = close ? strchr(close, '=') : NULL;
    if (!eq)
        fail_at(line, "'NAME(PARAMETER TYPE, ...) = EXPRESSION, ...' expected");
    f->line = line;
    f->name = identifier(trim(p, open), line);
    for (const char *b = open + 1; b < close;) {
        const char *e = b;
        while (*e != ',' && e != close)
            e++;
        const char *item = trim(b, e);
        if (f->nparam == MAX_ATTR)
            fail_at(line, "more than %d parameters", MAX_ATTR);
        f->param[f->nparam].name = identifier(word(&item), line);
        f->param[f->nparam++].kind = attr_kind_of(word(&item), line);
        b = e + 1;
    }
    int depth = 0;
    for (const char *b = eq + 1, *e = b;; e++) {
        depth += *e == '(';
        depth -= *e == ')';
        if (*e && (*e != ',' || depth))
            continue;
        if (f->nvalue == MAX_ATTR)
            fail_at(line, "more than %d values", MAX_ATTR);
        f->value[f->nvalue++] = trim(b, e);
        if (!*e)
            break;
        b = e + 1;
    }
}

static void read_loop(op *o, const char *guard, const char *p, int line) {
    char in_kind = '*', out_kind = '*';
    if (*guard) {
        if (guard[0] != '[' || !strchr("FDILB*", guard[1]) || guard[2] != ':' || !guard[3] ||
            !strchr("FDILB*", guard[3]) || !is(guard + 4, "]"))
            fail_at(line, "loop guard '%s': [IN:OUT] with F, D, I, L, B or * expected", guard);
        in_kind = guard[1];
        out_kind = guard[3];
    }
    loop_variant *v = NULL;
    for (int i = 0; i < o->nloop; i++)
        if (o->loop[i].in_kind == in_kind && o->loop[i].out_kind == out_kind)
            v = &o->loop[i];
    if (!v) {
        if (o->nloop == MAX_LOOPS)
            fail_at(line, "more than %d loops", MAX_LOOPS);
        v = &o->loop[o->nloop++];
        v->in_kind = in_kind;
        v->out_kind = out_kind;
    }
    if (v->nstmt == MAX_LINES)
        fail_at(line, "more than %d statements", MAX_LINES);
    v->stmt[v->nstmt++] = (text){p, line};
}

static unsigned mask_of(const op *o, const char *p, int line, bool outputs) {
    unsigned m = 0;
    for (const char *w; (w = word(&p));) {
        int i = outputs ? out_find(o, w) : in_find(o, w);
        if (i < 0)
            fail_at(line, "'%s' is no %s of %s", w, outputs ? "output" : "input", o->name);
        m |= 1u << i;
    }
    return m;
}

static void read_doc(op *o, const char *p, int line) {
    if (o->ndoc == MAX_LINES)
        fail_at(line, "more than %d doc lines", MAX_LINES);
    o->doc[o->ndoc++] = (text){p, line};
}

static void read_writes(op *o, const char *p, int line) {
    unsigned m = mask_of(o, p, line, false);
    for (int i = 0; i < o->nin; i++)
        o->in[i].writes = m >> i & 1;
    o->nout = 0;
}

static void read_outputs(op *o, const char *p, int line) {
    o->nout = 0;
    for (const char *w; (w = word(&p));) {
        if (o->nout == MAX_OUT)
            fail_at(line, "more than %d outputs", MAX_OUT);
        o->out[o->nout++] = identifier(w, line);
    }
}

static void read_flags(op *o, const char *p, int line) {
    static const char *const known[] = {"VIEW", "NONDET", "BROADCAST", "PROMOTE", "KEEP_META"};
    for (const char *w; (w = word(&p));) {
        bool ok = false;
        for (size_t i = 0; i < sizeof known / sizeof *known; i++)
            ok |= is(w, known[i]);
        if (!ok || o->nflag == 16)
            fail_at(line, "flag '%s' is not known", w);
        o->flag[o->nflag++] = w;
    }
}

static void read_reduce(op *o, const char *p, int line) {
    o->red = word(&p);
    if (!o->red || (!is(o->red, "LAST") && !is(o->red, "DIM") && !is(o->red, "DIMS")))
        fail_at(line, "reduce: LAST, DIM or DIMS expected");
}

/* INPUT = EXPRESSION, or the name of a function. */
static void read_vjp(op *o, const char *p, int line) {
    if (!strchr(p, '=')) {
        o->vjp_fn = identifier(word(&p), line);
        return;
    }
    const char *rhs, *name = expr_split((text){p, line}, &rhs);
    int i = in_find(o, name);
    if (i < 0)
        fail_at(line, "'%s' is no input of %s", name, o->name);
    if (o->vjp[i].s)
        fail_at(line, "gradient of '%s' twice", name);
    o->vjp[i] = (text){rhs, line};
}

static void read_save(op *o, const char *p, int line) {
    for (const char *w; (w = word(&p));) {
        int i = in_find(o, w), j = out_find(o, w);
        if (i < 0 && j < 0)
            fail_at(line, "'%s' is no input or output of %s", w, o->name);
        if (i >= 0)
            o->save_in |= 1u << i;
        else
            o->save_out |= 1u << j;
    }
}

static void read_sample(op *o, const char *p, int line) {
    o->has_sample = true;
    if (sscanf(p, "%lf %lf", &o->lo, &o->hi) != 2 || !(o->lo < o->hi))
        fail_at(line, "sample: two ascending numbers expected");
}

static void read_key(op *o, const char *key, const char *p, int line) {
    while (*p == ' ')
        p++;
    if (is(key, "doc")) {
        read_doc(o, p, line);
    } else if (is(key, "class")) {
        o->klass = word(&p);
        o->composite = o->klass && is(o->klass, "COMPOSITE");
    } else if (is(key, "since")) {
        o->since = atoi(p);
    } else if (is(key, "in")) {
        read_inputs(o, p, line);
    } else if (is(key, "writes")) {
        read_writes(o, p, line);
    } else if (is(key, "out")) {
        read_outputs(o, p, line);
    } else if (is(key, "attr") || is(key, "hidden")) {
        read_attr(o, p, line, is(key, "hidden"));
    } else if (is(key, "flags")) {
        read_flags(o, p, line);
    } else if (is(key, "infer")) {
        o->infer = identifier(word(&p), line);
    } else if (is(key, "canon")) {
        o->canon = identifier(word(&p), line);
    } else if (is(key, "reduce")) {
        read_reduce(o, p, line);
    } else if (is(key, "internal")) {
        o->internal = true;
    } else if (is(key, "public")) {
        read_public(o, p, line);
    } else if (strncmp(key, "loop", 4) == 0 && (key[4] == 0 || key[4] == '[')) {
        read_loop(o, key + 4, p, line);
    } else if (is(key, "vjp")) {
        read_vjp(o, p, line);
    } else if (is(key, "diff")) {
        o->diff = mask_of(o, p, line, false);
    } else if (is(key, "save")) {
        read_save(o, p, line);
    } else if (is(key, "sample")) {
        read_sample(o, p, line);
    } else if (is(key, "tol")) {
        o->ulp = strtod(p, NULL);
    } else {
        fail_at(line, "unknown key '%s'", key);
    }
}

static void check_row(op *o) {
    static const char *const classes[] = {
#define C(name) #name,
#include "core/class.def"
#undef C
    };
    bool known = false;
    for (size_t i = 0; i < sizeof classes / sizeof *classes; i++)
        known |= o->klass && is(o->klass, classes[i]);
    if (!known)
        fail_at(o->line, "op %s: class '%s' is not known", o->name, o->klass ? o->klass : "");
    if (!o->ndoc)
        fail_at(o->line, "op %s has no doc", o->name);
    bool writes = false;
    for (int i = 0; i < o->nin; i++)
        writes |= o->in[i].writes;
    if (o->variadic && (!o->internal || !writes))
        fail_at(o->line, "op %s: a variadic op is internal and in place", o->name);
    if (o->composite && (o->nloop || o->infer || o->vjp_fn))
        fail_at(o->line, "op %s: a composite has neither loop nor infer nor vjp", o->name);
    bool loop_class =
        is(o->klass, "EW") || is(o->klass, "ROW") || is(o->klass, "RNG") || is(o->klass, "CREATE");
    if (loop_class && !o->nloop)
        fail_at(o->line, "op %s: class %s needs a loop", o->name, o->klass);
    if (is(o->klass, "ROW") && !o->red)
        fail_at(o->line, "op %s: class ROW needs 'reduce'", o->name);
    if (!o->composite && !o->infer) {
        if (!is(o->klass, "EW"))
            fail_at(o->line, "op %s: 'infer' is missing", o->name);
        if (o->nin < 1 || o->nin > 2)
            fail_at(o->line, "op %s: only ops of one or two f32 inputs can do without 'infer'", o->name);
        o->infer = o->nin == 1 ? "wki_infer_unary" : "wki_infer_broadcast";
    }
    for (int i = 0; i < o->npub; i++)
        if (o->pub[i].nvalue != o->nattr)
            fail_at(o->pub[i].line, "%s gives %d values for %d attributes", o->pub[i].name, o->pub[i].nvalue,
                    o->nattr);
    if (!o->has_sample)
        o->lo = -2, o->hi = 2;
}

void table_read(const char *path) {
    table_path = path;
    FILE *f = fopen(path, "r");
    if (!f)
        fail_at(0, "cannot be read");
    char buf[1024];
    op *o = NULL;
    for (int line = 1; fgets(buf, sizeof buf, f); line++) {
        size_t n = strlen(buf);
        if (n == sizeof buf - 1)
            fail_at(line, "line too long");
        while (n && isspace((unsigned char)buf[n - 1]))
            buf[--n] = 0;
        const char *p = format("%s", buf);
        const char *key = word(&p);
        if (!key || *key == '#')
            continue;
        if (is(key, "op")) {
            if (nops == MAX_OPS)
                fail_at(line, "more than %d ops", MAX_OPS);
            const char *name = identifier(word(&p), line);
            if (op_find(name))
                fail_at(line, "op %s twice", name);
            o = &ops[nops++];
            *o = (op){.name = name, .line = line, .since = 1, .nout = 1, .out = {"y"}, .ulp = 2};
        } else if (!o) {
            fail_at(line, "'%s' before the first op", key);
        } else {
            read_key(o, key, p, line);
        }
    }
    fclose(f);
    for (int i = 0; i < nops; i++)
        check_row(&ops[i]);
}
