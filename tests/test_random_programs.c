/* Compiled equals eager, bit for bit, on random programs: views, broadcasting, reductions, row ops, products, in-place
 * writes, random numbers, reads in the middle, tensors that die early, gradients of gradients, optimizers. Each program
 * runs three times with fresh inputs in a context of each kind. WICK_PROGRAM=SEED runs that program alone. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"
#include "random_program.h"

/* One context that runs the program, eager (f NULL) or compiled. */
typedef struct world {
    wk_ctx *c;
    rp_run run;
    rp_log log;
    wk_compiled *f;
} world;

static void open_world(world *w, const rp_program *p, bool compiled, bool strict) {
    rp_random r = {p->seed * 31};
    *w = (world){.c = wk_ctx_new(NULL)};
    if (!w->c)
        abort();
    wk_seed(w->c, p->seed);
    w->run = (rp_run){.p = p};
    wk_tensor *params[RP_MAX_STATE];
    int nparam = 0;
    for (int i = 0; i < p->nstate; i++) {
        const rp_value *v = &p->value[p->nin + i];
        void *data = rp_data(v, &r);
        w->run.state[i] = wk_from_data(w->c, (wk_dtype)v->dtype, v->ndim, v->size, data);
        free(data);
        if (v->grad)
            params[nparam++] = wk_requires_grad(w->run.state[i], true);
    }
    if (p->optimizer)
        w->run.optim = wk_adamw(w->c, params, nparam, NULL);
    if (compiled) {
        wk_compile_options o;
        wk_compile_options_init(&o);
        o.strict = strict;
        w->f = wk_compile(w->c, rp_execute, &w->run, &o);
    }
}

static void log_tensor(world *w, wk_tensor *t) {
    size_t n = (size_t)wk_numel(t) * (wk_dtype_bits(wk_dtype_of(t)) / 8);
    char *bytes = calloc(n + 1, 1);
    if (!bytes)
        abort();
    wk_read(t, bytes, n);
    rp_append(&w->log, bytes, n);
    free(bytes);
}

/* Outputs, gradients of the leaves and states go to the log. */
static void run_once(world *w, uint64_t inputs) {
    const rp_program *p = w->run.p;
    wk_tensor *in[RP_MAX_IN], *out[RP_MAX_OUT] = {0};
    rp_random r = {inputs};
    w->log.n = 0;
    w->run.log = &w->log;
    wk_scope_begin(w->c);
    for (int i = 0; i < p->nin; i++) {
        const rp_value *v = &p->value[i];
        void *data = rp_data(v, &r);
        in[i] = wk_from_data(w->c, (wk_dtype)v->dtype, v->ndim, v->size, data);
        free(data);
        if (v->grad)
            wk_requires_grad(in[i], true);
    }
    if (w->f)
        wk_call_n(w->f, in, p->nin, out, p->nout);
    else
        rp_execute(w->c, &w->run, in, p->nin, out, p->nout);
    for (int i = 0; i < p->nout && !wk_failed(w->c); i++)
        log_tensor(w, out[i]);
    for (int i = 0; i < p->nin + p->nstate && !wk_failed(w->c); i++) {
        wk_tensor *t = i < p->nin ? in[i] : w->run.state[i - p->nin];
        log_tensor(w, t);
        if (p->value[i].grad && wk_grad(t))
            log_tensor(w, wk_grad(t));
    }
    wk_scope_end(w->c);
}

static void close_world(world *w) {
    wk_ctx_free(w->c);
    free(w->log.bytes);
}

/* NaNs may differ in their bits. Logs hold other things than floats, which compare by their bits first. */
static bool same(const rp_log *a, const rp_log *b) {
    if (a->n != b->n)
        return false;
    if (!memcmp(a->bytes, b->bytes, a->n))
        return true;
    for (size_t i = 0; i + 4 <= a->n;) {
        float x, y;
        if (a->bytes[i] == b->bytes[i]) {
            i++; /* floats need not be aligned in the log */
            continue;
        }
        bool nans = false;
        for (size_t back = 0; back < 4 && back <= i && !nans; back++) {
            if (i - back + 4 > a->n)
                continue;
            memcpy(&x, a->bytes + i - back, 4);
            memcpy(&y, b->bytes + i - back, 4);
            nans = isnan(x) && isnan(y);
            if (nans)
                i += 4 - back;
        }
        if (!nans)
            return false;
    }
    return true;
}

/* Under WICK_PROGRAM every check has a process of its own, so that crashes are made smaller, too. */
static const char *isolated(void) {
    const char *one = getenv("WICK_PROGRAM");
    return one && *one ? one : NULL;
}

typedef struct outcome {
    bool same;
    int run; /* that differed */
    char what[300];
    double nans; /* share of the log's floats */
} outcome;

enum { RUNS = 3 };

static outcome check(const rp_program *p, bool strict) {
    world w[2];
    outcome o = {.same = true};
    open_world(&w[0], p, false, false);
    open_world(&w[1], p, true, strict);
    for (o.run = 0; o.run < RUNS && o.same; o.run++) {
        for (int i = 0; i < 2 && o.same; i++) {
            run_once(&w[i], p->seed + 1000 + (uint64_t)o.run);
            if (wk_failed(w[i].c)) {
                o.same = false;
                snprintf(o.what, sizeof o.what, "%s fails: %s", i ? "compiled" : "eager", wk_message(w[i].c));
            }
        }
        if (o.same && !same(&w[0].log, &w[1].log)) {
            size_t at = 0;
            while (at < w[0].log.n && at < w[1].log.n && w[0].log.bytes[at] == w[1].log.bytes[at])
                at++;
            o.same = false;
            float x[2] = {NAN, NAN};
            for (int i = 0; i < 2; i++)
                if (at / 4 * 4 + 4 <= w[i].log.n)
                    memcpy(&x[i], w[i].log.bytes + at / 4 * 4, 4);
            snprintf(o.what, sizeof o.what,
                     "eager and compiled differ in run %d at byte %zu of %zu (%zu): %.9g, %.9g", o.run, at,
                     w[0].log.n, w[1].log.n, (double)x[0], (double)x[1]);
        }
        if (o.same && p->optimizer) {
            uint64_t s[2], q[2];
            for (int i = 0; i < 2; i++)
                wk_rng_get(w[i].c, &s[i], &q[i]);
            o.same = s[0] == s[1] && q[0] == q[1];
            if (!o.same)
                snprintf(o.what, sizeof o.what, "RNG sequences differ: %llu and %llu",
                         (unsigned long long)q[0], (unsigned long long)q[1]);
        }
    }
    for (size_t i = 0; i + 4 <= w[0].log.n; i += 4) {
        float x;
        memcpy(&x, w[0].log.bytes + i, 4);
        o.nans += isnan(x);
    }
    size_t words = w[0].log.n / 4 + 1;
    o.nans /= (double)words;
    close_world(&w[0]);
    close_world(&w[1]);
    return o;
}

static outcome check_apart(const rp_program *p, bool strict) {
    outcome o = {.what = "no process"};
    int fd[2], status;
    if (pipe(fd))
        return o;
    pid_t child = fork();
    if (child == 0) {
        o = check(p, strict);
        _exit(write(fd[1], &o, sizeof o) != sizeof o);
    }
    close(fd[1]);
    if (child > 0 && read(fd[0], &o, sizeof o) != sizeof o)
        o = (outcome){.what = "it crashes"};
    if (child > 0)
        waitpid(child, &status, 0);
    close(fd[0]);
    return o;
}

static outcome test(const rp_program *p, bool strict) {
    return isolated() ? check_apart(p, strict) : check(p, strict);
}

static bool needed(const rp_program *p, const rp_ins *i) {
    int n = i->kind == RP_GRAD ? i->n : i->dst >= 0;
    for (int v = i->dst; v < i->dst + n; v++) {
        for (int k = 0; k < p->nout; k++)
            if (p->out[k] == v)
                return true;
        for (int k = 0; k < p->nins; k++)
            if (!p->ins[k].skip && &p->ins[k] != i && rp_uses(&p->ins[k], v))
                return true;
    }
    return false;
}

/* Leaves out one instruction after the other, from the end, as long as the failure stays. */
static void shrink(rp_program *p, bool strict) {
    for (bool again = true; again;) {
        again = false;
        for (int i = 0; i < p->nout && p->nout > 1; i++) {
            rp_program q = *p;
            q.out[i] = q.out[--q.nout];
            if (!test(&q, strict).same) {
                *p = q;
                again = true;
            }
        }
        for (int k = p->nins - 1; k >= 0; k--) {
            rp_ins *i = &p->ins[k];
            if (i->skip || i->kind == RP_SCOPE || i->kind == RP_END || needed(p, i))
                continue;
            i->skip = true;
            if (test(p, strict).same)
                i->skip = false;
            else
                again = true;
        }
    }
}

static double one_program(uint64_t seed, int length, bool big, bool strict) {
    static rp_program p; /* large */
    rp_generate(&p, seed, length, big);
    outcome o = test(&p, strict);
    if (!o.same) {
        shrink(&p, strict);
        outcome small = test(&p, strict);
        char *text = rp_text(&p);
        FAIL("program %llu (length %d): %s\nshortened: %s\n%s", (unsigned long long)seed, length, o.what,
             small.what, text);
        free(text);
    }
    return o.nans;
}

static void programs(int n, int length, bool big) {
    double nans = 0;
    const char *one = isolated();
    if (one) {
        one_program(strtoull(one, NULL, 0), length, big, true);
        return;
    }
    for (int i = 0; i < n; i++)
        nans += one_program(wkt_u64() >> 16, length, big, i % 2);
    if (!(nans / n < 0.3)) /* they would compare too little */
        FAIL("%.2f of the results are NaN", nans / n);
}

TEST(random_programs, short_ones) { programs(wkt_quick() ? 30 : 400, 14, false); }
TEST(random_programs, long_ones) { programs(wkt_quick() ? 10 : 300, 60, false); }
TEST(random_programs, of_large_tensors) { programs(wkt_quick() ? 3 : 60, 24, true); }
