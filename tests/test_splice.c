/* Splices and repeats against what they stand in for: the same steps in two contexts, one of which walks every backward and
 * records every update anew. Loss, gradients, parameters and their versions must agree, bit for bit, and splices and repeats
 * must have happened where they may, and only there. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "graph/graph.h"
#include "harness.h"
#include "ops_gen.h"

enum { STEPS = 8, WIDTH = 6, PARAMS = 3 };

typedef struct world {
    wk_ctx *c;
    wk_tensor *w[PARAMS], *x;
    wk_optim *optim;
    wk_compiled *f;
    int i, user_op, vjps; /* the step; an op of the user's; how often its gradient was asked for */
} world;

/* The forward and backward of step w->i; the loss. */
typedef wk_tensor *(*step_fn)(wk_ctx *c, world *w);
static _Thread_local step_fn the_step;
static _Thread_local world *the_world;

static void call(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)in, (void)nin, (void)nout;
    out[0] = the_step(c, self);
}

static void twice_cpu(const wk_array *in, wk_array *out, const double *attr) {
    (void)attr;
    int64_t n = 1;
    for (int d = 0; d < in[0].ndim; d++)
        n *= in[0].size[d];
    for (int64_t i = 0; i < n; i++)
        ((float *)out[0].data)[i] = 2 * ((const float *)in[0].data)[i];
}

static bool twice_infer(const wk_array *in, const double *attr, wk_array *out, int64_t (*size)[WK_MAX_DIMS],
                        char err[256]) {
    (void)attr, (void)err;
    out[0].ndim = in[0].ndim;
    memcpy(size[0], in[0].size, (size_t)in[0].ndim * sizeof(int64_t));
    return true;
}

/* Not the same in every step, which no splice could know. */
static void twice_vjp(wk_ctx *c, wk_tensor *const *in, wk_tensor *const *out, wk_tensor *const *gout,
                      const double *attr, wk_tensor **gin) {
    (void)c, (void)in, (void)out, (void)attr;
    the_world->vjps++;
    gin[0] = wk_mul_scalar(gout[0], 2 + the_world->i);
}

/* The runtime has the user's op once: `op` is its number, -1 where it is still to be made. */
static void open_world(world *w, bool splices, int op) {
    *w = (world){.c = wk_ctx_new(NULL), .user_op = op};
    REQUIRE(w->c);
    wk_seed(w->c, 17);
    w->c->rec->all_anew = !splices;
    for (int i = 0; i < PARAMS; i++)
        w->w[i] = wk_requires_grad(wk_randn(w->c, 2, (int64_t[]){WIDTH, WIDTH}), true);
    w->x = wk_randn(w->c, 2, (int64_t[]){4, WIDTH});
    wk_sgd_options o;
    wk_sgd_options_init(&o);
    o.lr = 0.01;
    o.momentum = 0.5;
    w->optim = wk_sgd(w->c, w->w, PARAMS, &o);
    wk_op_desc d;
    wk_op_desc_init(&d);
    d.name = "splice_twice";
    d.nin = d.nout = 1;
    d.infer = twice_infer;
    d.cpu = twice_cpu;
    d.vjp = twice_vjp;
    if (op < 0)
        w->user_op = wk_register_op(w->c, &d);
    w->f = wk_compile(w->c, call, w, NULL);
    REQUIRE(!wk_failed(w->c));
}

static void same_bits(wk_tensor *a, wk_tensor *b) {
    REQUIRE(!a == !b);
    if (!a)
        return;
    size_t n = (size_t)wk_numel(a) * sizeof(float);
    REQUIRE(n == (size_t)wk_numel(b) * sizeof(float));
    float x[256] = {0}, y[256] = {0};
    REQUIRE(n <= sizeof x);
    wk_read(a, x, n);
    wk_read(b, y, n);
    CHECK_MEM(x, y, n);
}

static void run_step(world *w, int i, wk_tensor **loss) {
    w->i = i;
    the_world = w;
    wk_call_n(w->f, NULL, 0, loss, 1);
}

/* Runs the steps in both worlds. `spliced`: how many backwards must have been. Returns how many updates were repeated. */
static uint64_t compare(step_fn step, uint64_t spliced) {
    world fast, slow;
    open_world(&fast, true, -1);
    open_world(&slow, false, fast.user_op);
    the_step = step;
    for (int i = 0; i < STEPS; i++) {
        wk_tensor *a, *b;
        wk_scope_begin(fast.c);
        wk_scope_begin(slow.c);
        run_step(&fast, i, &a);
        run_step(&slow, i, &b);
        wk_error e = {0}, g = {0};
        CHECK_EQ_I(wk_error_take(fast.c, &e), wk_error_take(slow.c, &g));
        CHECK_STR(e.message, g.message);
        if (!e.message[0])
            same_bits(a, b);
        for (int p = 0; p < PARAMS; p++) {
            same_bits(fast.w[p], slow.w[p]);
            same_bits(wk_grad(fast.w[p]), wk_grad(slow.w[p]));
            CHECK_EQ_I(wki_slot(fast.w[p])->st->version, wki_slot(slow.w[p])->st->version);
        }
        wk_scope_end(fast.c);
        wk_scope_end(slow.c);
    }
    CHECK_EQ_I(fast.vjps, slow.vjps);
    CHECK_EQ_I(slow.c->rec->spliced, 0);
    CHECK_EQ_I(fast.c->rec->spliced, spliced);
    CHECK_EQ_I(fast.c->stats.ops, slow.c->stats.ops);
    CHECK_EQ_I(slow.c->rec->repeated, 0);
    uint64_t repeated = fast.c->rec->repeated;
    wk_ctx_free(fast.c);
    wk_ctx_free(slow.c);
    return repeated;
}

static wk_tensor *total(wk_tensor *x) { return wk_sum(x, NULL, 0, false); }
static wk_tensor *square(wk_tensor *x) { return wk_mul(x, x); }

static wk_tensor *net(wk_ctx *c, world *w) {
    (void)c;
    wk_tensor *h = wk_tanh(wk_linear(w->x, w->w[0], NULL));
    h = wk_add(h, wk_gelu(wk_linear(h, w->w[1], NULL)));
    return total(square(wk_linear(h, w->w[2], NULL)));
}

static wk_tensor *finish(world *w, wk_tensor *loss) {
    wk_backward(loss);
    wk_optim_step(w->optim);
    return loss;
}

static wk_tensor *plain(wk_ctx *c, world *w) { return finish(w, net(c, w)); }
TEST(splice, every_step_after_the_first) { compare(plain, STEPS - 1); }

/* Gradients are left to the caller, who sees them. */
static wk_tensor *no_update(wk_ctx *c, world *w) {
    wk_tensor *loss = net(c, w);
    for (int i = 0; i < PARAMS; i++)
        wk_zero_grad(w->w[i]);
    wk_backward(loss);
    return loss;
}
TEST(splice, gradients_that_stay) { compare(no_update, STEPS - 1); }

static wk_tensor *accumulates(wk_ctx *c, world *w) {
    wk_tensor *loss = net(c, w);
    wk_backward(loss);
    if (w->i % 2)
        wk_optim_step(w->optim);
    return loss;
}
TEST(splice, not_onto_gradients_that_exist) { compare(accumulates, STEPS / 2 - 1); }

static wk_tensor *values(wk_ctx *c, world *w) {
    return finish(w, wk_mul_scalar(net(c, w), w->i / 2 == 1 ? 3.0 : 0.5));
}
TEST(splice, values_that_change) { compare(values, STEPS - 2); }

static wk_tensor *frozen(wk_ctx *c, world *w) {
    wk_requires_grad(w->w[1], w->i % 3 != 1);
    return finish(w, net(c, w));
}
TEST(splice, leaves_that_freeze) { compare(frozen, STEPS - 2); }

/* The stream is the same whichever of two equal leaves is used. */
static wk_tensor *swapped(wk_ctx *c, world *w) {
    (void)c;
    wk_tensor *h = wk_linear(w->x, w->w[w->i % 2], NULL);
    return finish(w, total(wk_mul(h, h)));
}
TEST(splice, leaves_that_swap) { compare(swapped, STEPS - 2); }

/* The same ops, of which another half has a gradient: only their places in the stream tell which. */
static wk_tensor *other_half(wk_ctx *c, world *w) {
    wk_tensor *loss[2];
    for (int i = 0; i < 2; i++) {
        bool old = wk_grad_enable(c, i == w->i % 2);
        loss[i] = total(wk_linear(i ? w->x : wk_exp(w->x), w->w[0], NULL));
        wk_grad_enable(c, old);
    }
    return finish(w, loss[w->i % 2]);
}
TEST(splice, ops_that_take_turns_without_gradient) { compare(other_half, STEPS - 2); }

/* A view leaves nothing in the stream but what its result looks like. */
static wk_tensor *view(wk_ctx *c, world *w) {
    (void)c;
    int64_t at = w->i % 2 ? 1 : 3;
    wk_tensor *part = wk_slice(wk_reshape(w->w[0], 1, (int64_t[]){-1}), 0, at, at + 4, 1);
    return finish(w,
                  total(wk_mul(wk_exp(part), wk_slice(wk_reshape(w->w[1], 1, (int64_t[]){-1}), 0, 0, 4, 1))));
}
TEST(splice, views_that_move) { compare(view, STEPS - 2); }

/* One of two outputs of a record, in turn, which is all that tells one backward from the other. */
static wk_tensor *one_output(wk_ctx *c, world *w) {
    wki_tensor *lse, *logits = wki_slot(wk_linear(wk_slice(w->x, 0, 0, 1, 1), w->w[0], NULL));
    wki_tensor *loss = wki_nll_rows(c, logits, wki_slot(wk_zeros(c, WK_I64, 1, (int64_t[]){1})), &lse);
    return wki_handle(w->i % 2 ? loss : lse);
}
static wk_tensor *output(wk_ctx *c, world *w) { return finish(w, one_output(c, w)); }
TEST(splice, outputs_that_take_turns) { compare(output, STEPS - 2); }
static wk_tensor *seen(wk_ctx *c, world *w) {
    return finish(w, wk_reshape(one_output(c, w), 2, (int64_t[]){1, 1}));
}
TEST(splice, views_of_outputs_that_take_turns) { compare(seen, STEPS - 2); }

/* Two views that look the same: the stream says nothing of which one an op read. */
static wk_tensor *twins(wk_ctx *c, world *w) {
    (void)c;
    wk_tensor *h = wk_tanh(wk_linear(w->x, w->w[0], NULL));
    wk_tensor *a = wk_slice(h, 0, 1, 3, 1), *b = wk_slice(h, 0, 1, 3, 1);
    return finish(w, total(wk_mul(wk_exp(a), wk_mul(b, wk_gelu(w->i % 2 ? a : b)))));
}
TEST(splice, views_that_look_alike) { compare(twins, STEPS - 2); }

/* Views made in another order are gone through in another order. */
static wk_tensor *order(wk_ctx *c, world *w) {
    (void)c;
    int first = w->i % 2;
    wk_tensor *v[2];
    v[first] = wk_slice(w->w[first], 0, 0, 3, 1);
    v[!first] = wk_slice(w->w[!first], 0, 0, 3, 1);
    return finish(w, total(wk_mul(wk_exp(v[0]), wk_exp(v[1]))));
}
TEST(splice, views_that_are_made_in_turn) { compare(order, STEPS - 2); }

static wk_tensor *detached(wk_ctx *c, world *w) {
    (void)c;
    wk_tensor *h = wk_tanh(wk_linear(w->x, w->w[0], NULL));
    if (w->i % 2)
        h = wk_detach(h);
    return finish(w, total(square(wk_linear(h, w->w[1], NULL))));
}
TEST(splice, graphs_that_are_cut) { compare(detached, STEPS - 2); }

static wk_tensor *dropout(wk_ctx *c, world *w) {
    (void)c;
    wk_tensor *h = wk_dropout(wk_linear(w->x, w->w[0], NULL), 0.5);
    return finish(w, total(square(wk_linear(h, w->w[1], NULL))));
}
TEST(splice, random_numbers) { compare(dropout, STEPS - 1); }

static wk_tensor *lengths(wk_ctx *c, world *w) {
    wk_tensor *x = wk_ones(c, WK_F32, 2, (int64_t[]){1 + w->i % 4, WIDTH});
    return finish(w, total(square(wk_linear(wk_tanh(wk_linear(x, w->w[0], NULL)), w->w[1], NULL))));
}
TEST(splice, shapes_that_come_again) { compare(lengths, STEPS - 4); }

static wk_tensor *read_before(wk_ctx *c, world *w) {
    wk_tensor *loss = net(c, w);
    wk_item(loss);
    return finish(w, loss);
}
TEST(splice, not_after_a_read) { compare(read_before, 0); }

static wk_tensor *read_between(wk_ctx *c, world *w) {
    (void)c;
    wk_tensor *h = wk_tanh(wk_linear(w->x, w->w[0], NULL));
    wk_item(total(h));
    return finish(w, total(square(wk_linear(h, w->w[1], NULL))));
}
TEST(splice, not_through_an_earlier_segment) { compare(read_between, 0); }

/* What the earlier segment's values were, this one's do not say. */
static wk_tensor *scaled_before(wk_ctx *c, world *w) {
    (void)c;
    wk_tensor *y = wk_mul_scalar(w->w[0], 1 + w->i);
    wk_item(total(y));
    return finish(w, total(y));
}
TEST(splice, not_with_an_earlier_segments_values) { compare(scaled_before, 0); }

static wk_tensor *two_losses(wk_ctx *c, world *w) {
    wk_tensor *a = net(c, w);
    wk_backward(a);
    wk_optim_step(w->optim);
    wk_tensor *b = net(c, w);
    wk_backward(b);
    wk_optim_step(w->optim);
    return wk_add(a, b);
}
TEST(splice, two_steps_in_a_call) { compare(two_losses, 2 * (STEPS - 1)); }

static wk_tensor *user(wk_ctx *c, world *w) {
    wk_tensor *h = wk_linear(w->x, w->w[0], NULL), *y;
    wk_user_op(c, w->user_op, &h, NULL, &y);
    return finish(w, total(square(y)));
}
TEST(splice, not_through_a_users_op) { compare(user, 0); }

/* Backward twice through one graph: allowed where the first kept it, an error where it did not. */
static wk_tensor *again(wk_ctx *c, world *w) {
    wk_tensor *h = wk_tanh(wk_linear(w->x, w->w[0], NULL)), *a = total(h), *b = total(square(h));
    wk_backward_options o;
    wk_backward_options_init(&o);
    o.retain_graph = w->i != 4;
    wk_backward_ex(&a, 1, &o);
    for (int i = 0; i < PARAMS; i++)
        wk_zero_grad(w->w[i]);
    wk_backward(b);
    wk_optim_step(w->optim);
    (void)c;
    return b;
}
TEST(splice, graphs_that_were_freed) {
    compare(again, STEPS - 2); /* all but the first and the one that fails */
}

/* One leaf at several places, and a leaf that is the root's view. */
static wk_tensor *tied(wk_ctx *c, world *w) {
    (void)c;
    wk_tensor *h = wk_linear(wk_linear(w->x, w->w[0], NULL), w->w[0], NULL);
    return finish(w, wk_add(total(wk_mul(h, h)), total(wk_reshape(w->w[1], 1, (int64_t[]){-1}))));
}
TEST(splice, tied_weights) { compare(tied, STEPS - 1); }

/* One root is a leaf, which the step used before: no record to start from. What else hangs on it is not below the other. */
static wk_tensor *leaf_root(wk_ctx *c, world *w) {
    wk_tensor *one = wk_requires_grad(wk_scalar(c, 2.0), true), *more = wk_exp(one), *loss = net(c, w);
    wk_backward(one);
    CHECK(wk_grad(one) != NULL);
    return finish(w, wk_add(loss, wk_detach(more)));
}
TEST(splice, root_that_is_a_leaf) { compare(leaf_root, STEPS - 1); }

/* A backward that finds part of its graph freed leaves the rest of it for another. */
static wk_tensor *rest(wk_ctx *c, world *w) {
    wk_tensor *p = square(wk_linear(w->x, w->w[0], NULL)), *q = square(wk_linear(w->x, w->w[1], NULL));
    wk_tensor *a = total(q), *b = total(wk_mul(p, q)), *d = total(p);
    wk_backward_options o;
    wk_backward_options_init(&o);
    o.retain_graph = w->i % 2 == 0;
    wk_backward_ex(&a, 1, &o);
    for (int i = 0; i < PARAMS; i++)
        wk_zero_grad(w->w[i]);
    wk_try_begin(c);
    wk_backward(b);
    CHECK_EQ_I(wk_try_end(c, NULL), w->i % 2 ? WK_GRAD : WK_OK);
    if (w->i % 2)
        wk_backward(d);
    wk_optim_step(w->optim);
    return b;
}
TEST(splice, graphs_that_were_freed_in_part) {
    compare(rest, 3 * (STEPS / 2 - 1)); /* b where a was kept; else a and d */
}

/* A leaf of this shape in this slot, or any. */
static wk_tensor *leaf_at(wk_ctx *c, const wki_tensor *slot, int64_t rows, int64_t columns) {
    enum { TRIES = 1024 };
    wk_tensor *other[TRIES], *t;
    int n = 0;
    while (wki_slot(t = wk_from_data(c, WK_F32, 2, (int64_t[]){rows, columns}, (float[12]){0})) != slot &&
           slot && n < TRIES)
        other[n++] = t;
    while (n)
        wk_drop(other[--n]);
    return wk_requires_grad(t, true);
}

/* A leaf that is dropped before its backward, then another with the slot and the handle that come after it. */
static wk_tensor *dropped(wk_ctx *c, world *w) {
    wk_tensor *leaf = w->i ? leaf_at(c, wki_slot(w->x), 4, 3) : leaf_at(c, NULL, 2, 3);
    wk_tensor *loss = total(wk_exp(wk_slice(leaf, 0, 0, 1, 1)));
    if (!w->i) {
        wk_drop(leaf);
        w->x = wki_handle(wki_slot(leaf));
    }
    wk_backward(loss);
    if (w->i) {
        CHECK(leaf == w->x);
        CHECK_EQ_I(wk_numel(wk_grad(leaf)), 12);
    }
    return loss;
}
TEST(splice, not_with_the_gradient_of_a_leaf_that_was_dropped) {
    world w;
    open_world(&w, true, 0);
    the_step = dropped;
    for (int i = 0; i < 2; i++) {
        wk_tensor *loss;
        wk_scope_begin(w.c);
        run_step(&w, i, &loss);
        wk_scope_end(w.c);
    }
    CHECK(!wk_failed(w.c));
    CHECK_EQ_I(w.c->rec->spliced, 0);
    wk_ctx_free(w.c);
}

/* Outside a call, where the scope of the backward is the one too many: no gradient comes with the error. */
TEST(splice, no_memory_for_its_scope) {
    int failed = 0;
    for (int depth = 50; depth < 70; depth++) {
        world w;
        open_world(&w, true, 0);
        the_step = net;
        for (int i = 0; i < 2; i++) {
            wk_tensor *loss;
            run_step(&w, i, &loss);
            for (int d = 0; i && d < depth; d++)
                wk_scope_begin(w.c);
            wki_alloc_fail_after(i);
            wk_backward(loss);
            wki_alloc_fail_after(0);
            failed += wk_failed(w.c);
            CHECK(!wk_grad(w.w[0]) == wk_failed(w.c));
            wk_error_take(w.c, NULL);
            wk_flush(w.c);
            for (int p = 0; p < PARAMS; p++)
                wk_zero_grad(w.w[p]);
        }
        CHECK_EQ_I(w.c->rec->spliced, 1);
        wk_ctx_free(w.c);
    }
    CHECK(failed > 0);
}

/* ---- repeats ------------------------------------------------------------------------------------------------------- */

TEST(repeat, every_step_after_the_first) { CHECK_EQ_I(compare(plain, STEPS - 1), STEPS - 1); }
TEST(repeat, without_a_splice) { CHECK_EQ_I(compare(user, 0), STEPS - 1); }
TEST(repeat, two_steps_in_a_call) { CHECK_EQ_I(compare(two_losses, 2 * (STEPS - 1)), 2 * (STEPS - 1)); }
/* Twelve updates, of four kinds: one that sat out a step is updated apart from then on. */
TEST(repeat, parameters_that_take_turns) { CHECK_EQ_I(compare(frozen, STEPS - 2), 8); }

static wk_tensor *schedule(wk_ctx *c, world *w) {
    wk_optim_set_lr(w->optim, 0.01 / (1 + w->i));
    return plain(c, w);
}
TEST(repeat, values_that_change) { CHECK_EQ_I(compare(schedule, STEPS - 1), STEPS - 1); }

/* A parameter whose storage another buffer stands for, in the middle of it. */
static wk_tensor *part_first(wk_ctx *c, world *w) {
    wk_tensor *part = wk_exp(wk_slice(w->w[0], 0, 1, 3, 1));
    return finish(w, wk_add(total(part), net(c, w)));
}
TEST(repeat, not_of_storages_with_other_buffers) { CHECK_EQ_I(compare(part_first, STEPS - 1), 0); }

/* The update is the first op that says how large the parameter is. */
static wk_tensor *start_only(wk_ctx *c, world *w) {
    (void)c;
    return finish(w, total(wk_exp(wk_slice(w->w[0], 0, 0, 3, 1))));
}
TEST(repeat, parameters_seen_in_part) { CHECK_EQ_I(compare(start_only, STEPS - 1), STEPS - 1); }

/* As many buffers and the same update, but for who says it. */
static wk_tensor *start_or_all(wk_ctx *c, world *w) {
    (void)c;
    wk_tensor *part = wk_slice(w->w[0], 0, 0, 3, 1);
    return finish(w,
                  total(wk_mul(wk_exp(part), w->i % 2 ? total(wk_detach(w->w[0])) : total(wk_detach(part)))));
}
TEST(repeat, parameters_seen_in_part_in_turn) { CHECK_EQ_I(compare(start_or_all, STEPS - 2), STEPS - 2); }

/* The parameter's storage has the buffer that it had, but from another row on. */
static wk_tensor *middle_in_turn(wk_ctx *c, world *w) {
    (void)c;
    int64_t at = w->i % 2;
    return finish(w, total(wk_exp(wk_slice(w->w[0], 0, at, at + 3, 1))));
}
TEST(repeat, parameters_seen_from_the_middle_in_turn) {
    CHECK_EQ_I(compare(middle_in_turn, STEPS - 2), STEPS / 2 - 1);
}

/* The parameters have each other's buffer. */
static wk_tensor *first_in_turn(wk_ctx *c, world *w) {
    wk_exp(wk_detach(w->w[w->i % 2]));
    wk_exp(wk_detach(w->w[1 - w->i % 2]));
    return plain(c, w);
}
TEST(repeat, parameters_seen_first_in_turn) { CHECK_EQ_I(compare(first_in_turn, STEPS - 2), STEPS - 2); }

/* One op more before the update, and before the gradients or behind them. */
static wk_tensor *one_more_in_turn(wk_ctx *c, world *w) {
    wk_tensor *loss = net(c, w);
    if (w->i % 3 == 2)
        wk_exp(w->x);
    wk_backward(loss);
    if (w->i % 3 == 1)
        wk_exp(w->x);
    wk_optim_step(w->optim);
    return loss;
}
TEST(repeat, other_buffers_in_turn) { CHECK_EQ_I(compare(one_more_in_turn, STEPS - 2), STEPS - 3); }

/* Equal shapes, but the two leaves have each other's buffer. */
TEST(repeat, leaves_that_swap) { CHECK_EQ_I(compare(swapped, STEPS - 2), STEPS - 2); }

/* What holds the state is not what held it, of equal shape. */
static wk_tensor *new_state(wk_ctx *c, world *w) {
    if (w->i % 4 == 0) {
        wk_sgd_options o;
        wk_sgd_options_init(&o);
        o.momentum = 0.5;
        wk_optim_free(w->optim);
        w->optim = wk_sgd(c, w->w, PARAMS, &o);
    }
    return plain(c, w);
}
TEST(repeat, not_with_another_state) { CHECK_EQ_I(compare(new_state, STEPS - 1), STEPS - 2); }

/* The call fails behind the update, which is taken back. */
static wk_tensor *fails_behind(wk_ctx *c, world *w) {
    wk_tensor *loss = plain(c, w);
    return w->i % 3 == 1 ? wk_matmul(w->x, w->x) : loss;
}
TEST(repeat, calls_that_fail) { compare(fails_behind, STEPS - 1); }

/* The recording is full where the update comes, and there is no memory for more: no step is taken, and the error says so. */
static wk_tensor *no_room(wk_ctx *c, world *w) {
    wki_recorder *r = c->rec;
    wk_tensor *loss = net(c, w);
    wk_backward(loss);
    int64_t steps = wk_optim_steps(w->optim);
    wk_try_begin(c);
    if (w->i == 4) {
        r->cap_key = r->nkey;
        r->room = 0;
        wki_alloc_fail_once(1);
    }
    wk_optim_step(w->optim);
    wki_alloc_fail_once(0);
    bool failed = wk_try_end(c, NULL) != WK_OK;
    CHECK_EQ_I(failed, w->i == 4);
    CHECK_EQ_I(wk_optim_steps(w->optim), steps + !failed);
    CHECK_EQ_I(!wk_grad(w->w[0]), !failed);
    return loss;
}
/* Nor is the next step repeated, which has the gradients of two. */
TEST(repeat, no_memory_for_the_recording) { CHECK_EQ_I(compare(no_room, STEPS - 2), STEPS - 3); }

/* Twice the same gradients, and nothing before the update in its segment. */
static wk_tensor *alone(wk_ctx *c, world *w) {
    wk_tensor *loss = net(c, w);
    wk_backward(loss);
    wk_optim_keep_grads(w->optim, true);
    for (int n = 0; n < 2; n++) {
        wk_item(total(wk_detach(w->w[0])));
        wk_optim_step(w->optim);
    }
    wk_optim_zero_grad(w->optim);
    return wk_detach(loss);
}
TEST(repeat, not_at_the_start_of_a_segment) { CHECK_EQ_I(compare(alone, STEPS - 1), 0); }
