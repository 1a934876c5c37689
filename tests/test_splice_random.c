/* Random training steps in two contexts, one of which walks every backward. Programs come again with other values, views,
 * leaves, frozen leaves, ends and errors, and with failing allocations; all that can be seen agrees bit for bit. */
#include <string.h>

#include "base/alloc.h"
#include "graph/graph.h"
#include "harness.h"

enum { N = 4, LEAVES = 4, LENGTH = 12, PROGRAMS = 6, STEPS = 100, OPS = 20 };
enum { FAILS = 3, INSIDE = 2 }; /* a style of backward; a mode: all of it in a call */

typedef struct step { /* what both contexts do */
    uint64_t program;
    int length, mode, leaf0, at, frozen, style, end, value;
    bool renew;
} step;

typedef struct world {
    wk_ctx *c;
    wk_tensor *leaf[LEAVES], *x, *index;
    wk_optim *optim;
    wk_compiled *train, *inner;
    const step *s;
} world;

static uint64_t draw(uint64_t *s) { /* splitmix64 (Steele et al. 2014) */
    uint64_t z = *s += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}
static int below(uint64_t *s, int n) { return (int)(draw(s) % (uint64_t)n); }

static wk_tensor *total(wk_tensor *x) { return wk_sum(x, NULL, 0, false); }

static void inner(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    out[0] = wk_mul(wk_sigmoid(in[0]), in[0]);
    if (((world *)self)->s->at & 2)
        wk_backward(total(out[0]));
    if (((world *)self)->s->at == 5)
        out[0] = wk_matmul(out[0], total(out[0]));
}

static const int64_t square[] = {N, N}, line = N * N, row[] = {1, N}, last = 1, swap[] = {1, 0};

/* A window of both that moves, once round. */
static wk_tensor *windows(const step *s, wk_tensor *a, wk_tensor *b) {
    wk_tensor *t = wk_slice(wk_reshape(a, 1, &line), 0, s->at, s->at + N, 1);
    return wk_reshape(wk_mul(t, wk_slice(wk_reshape(b, 1, &line), 0, N, 2 * N, 1)), 2, row);
}

/* What is needed for the gradient is written afterwards, or not. */
static wk_tensor *written(world *w, wk_tensor *a, wk_tensor *b) {
    wk_tensor *u = wk_clone(wk_detach(b)), *t = wk_mul(a, u);
    if (w->s->at == 3)
        wk_copy_(u, w->x);
    return t;
}

/* One (N, N) tensor made of a and b. */
static wk_tensor *apply(world *w, int op, wk_tensor *a, wk_tensor *b) {
    const step *s = w->s;
    int d = s->at & 1, at = s->at >> 1;
    return op == 0    ? wk_add(a, b)
           : op == 1  ? wk_mul(a, wk_tanh(b))
           : op == 2  ? wk_tanh(wk_matmul(a, b))
           : op == 3  ? wk_softmax(a, s->length % 2)
           : op == 4  ? wk_permute(a, swap, 2)
           : op == 5  ? wk_expand(wk_slice(a, d, at, at + 1, 1), 2, square)
           : op == 6  ? wk_add(windows(s, a, b), a)
           : op == 7  ? wk_mul_scalar(a, 0.5 - s->value)
           : op == 8  ? wk_dropout(a, 0.25)
           : op == 9  ? wk_layer_norm(a, wk_reshape(wk_slice(b, 0, 0, 1, 1), 1, square), NULL, 1e-5)
           : op == 10 ? (d ? wk_detach(a) : a)
           : op == 11 ? wk_where(wk_lt(a, b), b, wk_exp(wk_neg(wk_abs(a))))
           : op == 12 ? wk_sub(a, wk_mean(b, &last, 1, true))
           : op == 13 ? wk_embedding(a, w->index)
           : op == 14 ? wk_mul(a, wk_max(b, NULL, 0, false))
           : op == 15 ? wk_call(w->inner, &a, 1)
           : op == 16 ? (wk_grad(w->leaf[1]) ? wk_add(a, wk_grad(w->leaf[1])) : a)
           : op == 17 ? wk_mul(a, wk_share(w->c, w->leaf[2]))
           : op == 18 ? written(w, a, b)
                      : wk_add(a, total(wk_slice(a, 0, 2, 2, 1)));
}

static wk_tensor *forward(world *w, wk_tensor **other) {
    uint64_t r = w->s->program;
    wk_tensor *t[LEAVES + 1 + LENGTH];
    int n = 0;
    for (int i = 0; i < LEAVES; i++)
        t[n++] = w->leaf[(i + w->s->leaf0) % LEAVES];
    t[n++] = w->x;
    for (int i = 0; i < w->s->length; i++, n++) {
        int a = n - 1 - below(&r, below(&r, 3) ? 3 : n), b = below(&r, n);
        bool old = wk_grad_enable(w->c, below(&r, 12));
        t[n] = apply(w, below(&r, OPS), t[a], t[b]);
        wk_grad_enable(w->c, old);
    }
    *other = total(wk_mul(t[LEAVES + 1], t[n - 1]));
    return wk_add(total(wk_mul(t[n - 1], t[0])), total(wk_mul(t[n - 2], w->x)));
}

static void backward(world *w, wk_tensor *loss, wk_tensor *other) {
    wk_backward_options o;
    wk_backward_options_init(&o);
    if (w->s->style < 2) { /* one through what another kept, or freed */
        o.retain_graph = w->s->style;
        wk_backward_ex(&other, 1, &o);
        for (int i = 0; i < LEAVES && w->s->at & 1; i++)
            wk_zero_grad(w->leaf[i]);
    } else if (w->s->style == FAILS) { /* in part of the graph, and that error is taken */
        wk_backward(other);
        wk_try_begin(w->c);
        wk_backward(loss);
        wk_try_end(w->c, NULL);
        return;
    }
    wk_backward(loss);
}

static void finish(world *w, wk_tensor *loss, wk_tensor *other) {
    backward(w, loss, other);
    wk_tensor *g = wk_grad(w->leaf[0]);
    if (w->s->end & 4 && g)
        wk_copy_(g, wk_mul_scalar(g, 0.5));
    wk_optim_keep_grads(w->optim, w->s->end & 1);
    if (w->s->end & 2)
        wk_optim_step(w->optim);
    if (w->s->end == 9)
        wk_matmul(w->x, total(w->x));
}

static void train(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)in, (void)nin;
    wk_tensor *other;
    out[0] = forward(self, &other);
    if (nout == 1)
        finish(self, out[0], other);
    else
        out[1] = other;
}

static wk_tensor *take_step(world *w) {
    wk_tensor *out[2] = {0};
    if (w->s->mode == 1)
        train(w->c, w, NULL, 0, out, 1);
    else
        wk_call_n(w->train, NULL, 0, out, w->s->mode ? 1 : 2);
    if (!w->s->mode) /* the backward joins the forward after the call */
        finish(w, out[0], out[1]);
    return out[0];
}

static void open_world(world *w, bool splices, uint64_t seed) {
    *w = (world){.c = wk_ctx_new(NULL)};
    REQUIRE(w->c);
    wk_seed(w->c, seed);
    w->c->rec->all_anew = !splices;
    if (seed % 2) /* these will begin again */
        w->c->rec->epoch = w->c->epoch = UINT32_MAX - STEPS / 4;
    for (int i = 0; i < LEAVES; i++)
        w->leaf[i] = wk_retain(wk_requires_grad(wk_randn(w->c, 2, (int64_t[]){N, N}), true));
    w->x = wk_randn(w->c, 2, (int64_t[]){N, N});
    w->index = wk_from_data(w->c, WK_I64, 1, (int64_t[]){N}, (int64_t[]){2, 0, 2, 3});
    wk_sgd_options o = {.struct_size = sizeof o, .lr = 1e-3, .momentum = 0.5};
    w->optim = wk_sgd(w->c, w->leaf, LEAVES - 1, &o);
    w->train = wk_compile(w->c, train, w, NULL);
    w->inner = wk_compile(w->c, inner, w, NULL);
}

static void same(wk_tensor *a, wk_tensor *b) {
    float x[N * N] = {0}, y[N * N] = {1};
    REQUIRE(!a == !b);
    size_t n = a ? (size_t)wk_numel(a) * sizeof *x : 0;
    REQUIRE(!a || (n <= sizeof x && wk_read(a, x, n) && wk_read(b, y, n)));
    CHECK_MEM(x, y, n);
}

static void same_worlds(world *f, world *l) {
    for (int i = 0; i < LEAVES; i++) {
        same(f->leaf[i], l->leaf[i]);
        same(wk_grad(f->leaf[i]), wk_grad(l->leaf[i]));
    }
    CHECK_EQ_I(f->c->rng_seq, l->c->rng_seq);
}

static void prepare(world *w, const step *s) {
    w->s = s;
    wk_tensor **newest = &w->leaf[LEAVES - 1], *old = *newest;
    for (int i = 0; i < LEAVES; i++)
        wk_requires_grad(w->leaf[i], !(s->frozen >> i & 1));
    if (s->renew) {
        *newest = wk_retain(wk_requires_grad(wk_clone(wk_detach(old)), true));
        wk_release(old);
    }
}

static void compare(world *f, world *l, const step *s, int fail) {
    wk_scope_begin(f->c);
    wk_scope_begin(l->c);
    prepare(f, s);
    prepare(l, s);
    wki_alloc_fail_once(s->mode >= INSIDE && s->style != FAILS ? fail : 0);
    wk_tensor *a = take_step(f);
    wki_alloc_fail_after(0);
    bool twice = f->c->failed == WK_NOMEM;
    if (twice) {
        wk_error_take(f->c, NULL);
        same_worlds(f, l);
        a = take_step(f);
    }
    wk_tensor *b = take_step(l);
    bool failed = wk_failed(l->c);
    CHECK_STR(f->c->failed ? f->c->err.message : "", failed ? l->c->err.message : "");
    CHECK_EQ_I(wk_error_take(f->c, NULL), wk_error_take(l->c, NULL));
    if (!failed)
        same(a, b);
    same_worlds(f, l);
    if (!twice && s->style != FAILS)
        CHECK_EQ_I(f->c->stats.ops, l->c->stats.ops);
    f->c->stats.ops = l->c->stats.ops;
    wk_flush(f->c);
    wk_flush(l->c);
    wk_scope_end(f->c);
    wk_scope_end(l->c);
    CHECK_EQ_I(f->c->stats.live_tensors, l->c->stats.live_tensors);
    CHECK(!wk_failed(f->c) && !wk_failed(l->c));
}

/* One thing about a step changes, or nothing does. */
static void vary(step *s, uint64_t *r) {
    int *what[] = {&s->mode, &s->leaf0, &s->at, &s->frozen, &s->style, &s->end, &s->value};
    const int limit[] = {4, 2, 2 * N, 1 << LEAVES, 8, 10, 2}, i = below(r, 12);
    if (i < 7)
        *what[i] = below(r, limit[i]);
    s->renew = !below(r, 10);
}

TEST(splice, random_steps) {
    uint64_t spliced = 0;
    for (int run = 0, runs = wkt_quick() ? 20 : 200; run < runs; run++) {
        uint64_t r = wkt_seed() + (uint64_t)run, program[PROGRAMS];
        world f, l;
        open_world(&f, true, r);
        open_world(&l, false, r);
        for (int i = 0; i < PROGRAMS; i++)
            program[i] = draw(&r);
        step s;
        for (int i = 0; i < STEPS; i++) {
            uint64_t p = program[below(&r, PROGRAMS)];
            if (!i || !below(&r, 3))
                s = (step){p, 2 + (int)(p % (LENGTH - 1)), INSIDE, 0, 1, 0, 7, 2, 0, false};
            vary(&s, &r);
            compare(&f, &l, &s, below(&r, 4) ? 0 : 1 + below(&r, 40));
        }
        spliced += f.c->rec->spliced;
        wk_ctx_free(f.c);
        wk_ctx_free(l.c);
    }
    CHECK(spliced > 0);
}
