/* Expressions of loops and gradients: comparisons, + - * /, unary minus, calls, names and numbers, with C's precedence. */
#include "opgen.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct parser {
    const char *p, *all;
    int line;
} parser;

static expr *comparison(parser *s);

static void skip(parser *s) {
    while (isspace((unsigned char)*s->p))
        s->p++;
}

static bool accept(parser *s, const char *tok) {
    skip(s);
    size_t n = strlen(tok);
    if (strncmp(s->p, tok, n) != 0)
        return false;
    s->p += n;
    return true;
}

static expr *node(ekind k, const char *name) {
    expr *e = take(sizeof *e);
    e->kind = k;
    e->name = name;
    return e;
}

static expr *binary(const char *operator, expr * a, expr *b) {
    expr *e = node(E_BIN, operator);
    e->arg[0] = a;
    e->arg[1] = b;
    e->narg = 2;
    return e;
}

static void call_arguments(parser *s, expr *e, const char *close) {
    if (accept(s, close))
        return;
    do {
        if (e->narg == 8)
            fail_at(s->line, "more than 8 arguments in '%s'", s->all);
        e->arg[e->narg++] = comparison(s);
    } while (accept(s, ","));
    if (!accept(s, close))
        fail_at(s->line, "'%s' expected at '%s'", close, s->p);
}

static expr *primary(parser *s) {
    skip(s);
    if (accept(s, "(")) {
        expr *e = comparison(s);
        if (!accept(s, ")"))
            fail_at(s->line, "')' expected at '%s'", s->p);
        return e;
    }
    if (accept(s, "[")) {
        expr *e = node(E_LIST, NULL);
        call_arguments(s, e, "]");
        return e;
    }
    if (isdigit((unsigned char)*s->p) || *s->p == '.') {
        char *end;
        expr *e = node(E_NUM, NULL);
        e->num = strtod(s->p, &end);
        s->p = end;
        return e;
    }
    if (isalpha((unsigned char)*s->p) || *s->p == '_') {
        const char *b = s->p;
        while (isalnum((unsigned char)*s->p) || *s->p == '_')
            s->p++;
        const char *name = format("%.*s", (int)(s->p - b), b);
        if (!accept(s, "(")) {
            expr *e = node(E_NAME, name);
            if (is(name, "inf")) {
                e->kind = E_NUM;
                e->num = INFINITY;
            }
            return e;
        }
        expr *e = node(E_CALL, name);
        call_arguments(s, e, ")");
        return e;
    }
    fail_at(s->line, *s->p ? "unexpected '%s'" : "expression ends too early%s", s->p);
}

static expr *unary(parser *s) {
    if (!accept(s, "-"))
        return primary(s);
    expr *a = unary(s);
    if (a->kind == E_NUM) {
        a->num = -a->num;
        return a;
    }
    expr *e = node(E_NEG, NULL);
    e->arg[0] = a;
    e->narg = 1;
    return e;
}

static expr *product(parser *s) {
    expr *e = unary(s);
    for (;;) {
        if (accept(s, "*"))
            e = binary("*", e, unary(s));
        else if (accept(s, "/"))
            e = binary("/", e, unary(s));
        else
            return e;
    }
}

static expr *sum(parser *s) {
    expr *e = product(s);
    for (;;) {
        if (accept(s, "+"))
            e = binary("+", e, product(s));
        else if (accept(s, "-"))
            e = binary("-", e, product(s));
        else
            return e;
    }
}

static expr *comparison(parser *s) {
    static const char *const operators[] = {"<=", ">=", "==", "!=", "<", ">"};
    expr *e = sum(s);
    for (int i = 0; i < 6; i++)
        if (accept(s, operators[i]))
            return binary(operators[i], e, sum(s));
    return e;
}

expr *expr_parse(const char *text_, int line) {
    parser s = {text_, text_, line};
    expr *e = comparison(&s);
    skip(&s);
    if (*s.p)
        fail_at(line, "unexpected '%s'", s.p);
    return e;
}

const char *expr_split(text t, const char **rhs) {
    const char *p = t.s;
    while (isalnum((unsigned char)*p) || *p == '_')
        p++;
    const char *end = p;
    while (*p == ' ')
        p++;
    if (end == t.s || *p != '=' || p[1] == '=')
        fail_at(t.line, "'NAME = EXPRESSION' expected, not '%s'", t.s);
    *rhs = p + 1;
    return format("%.*s", (int)(end - t.s), t.s);
}
