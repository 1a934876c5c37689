/* The contract of wick.h on handles, scopes, errors, gradients and calls, one test a rule. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"
#include "util_api.h"
#include "util_models.h"

/* ---- handles ------------------------------------------------------------------------------------------------------- */

TEST(handles, use_after_drop_is_an_error) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(4)), *keep = wk_ones(c, WK_F32, SIZE(4));
    wk_drop(x);
    CHECK(!wk_alive(c, x));
    CHECK(!wk_failed(c)); /* asking is no error */
    wk_tensor *y = wk_add(x, keep);
    CHECK(y != NULL);
    CHECK(wk_failed(c));
    CHECK_ERROR(c, WK_HANDLE);
    CHECK(wk_is_poison(y));
    api_end(c);
}

TEST(handles, a_new_tensor_in_the_same_slot_has_another_handle) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *old[64];
    for (int round = 0; round < 64; round++) {
        wk_tensor *x = wk_scalar(c, round);
        for (int i = 0; i < round; i++) {
            CHECK(old[i] != x);
            CHECK(!wk_alive(c, old[i]));
        }
        CHECK_NEAR(wk_item(x), round, 0);
        old[round] = x;
        wk_drop(x);
    }
    wk_item(old[0]);
    CHECK_ERROR(c, WK_HANDLE);
    api_end(c);
}

TEST(handles, generations_wrap_without_reviving_old_handles) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *first = wk_scalar(c, 1);
    wk_drop(first);
    bool revived = false;
    for (int i = 0; i < 200000; i++) {
        wk_tensor *x = wk_scalar(c, 2);
        revived |= x == first;
        wk_drop(x);
    }
    CHECK(!revived);
    CHECK(!wk_alive(c, first));
    api_end(c);
}

TEST(handles, live_count_returns_to_where_it_was) {
    wk_ctx *c = api_ctx(false);
    wk_stats before = api_stats(c);
    wk_scope_begin(c);
    wk_tensor *w = wk_requires_grad(wk_ones(c, WK_F32, SIZE(8)), true);
    wk_backward(wk_sum(wk_mul(w, w), NULL, 0, false));
    CHECK(wk_grad(w) != NULL);
    wk_scope_end(c);
    wk_stats after = api_stats(c);
    CHECK_EQ_I(after.live_tensors, before.live_tensors);
    CHECK_EQ_I(after.storage_bytes, before.storage_bytes);
    api_end(c);
}

TEST(handles, of_another_context_are_refused) {
    wk_ctx *a = api_ctx(false), *b = api_ctx(false);
    wk_tensor *x = wk_ones(a, WK_F32, SIZE(2)), *y = wk_ones(b, WK_F32, SIZE(2));
    CHECK(wk_alive(a, x) && !wk_alive(b, x));
    wk_add(x, y);
    CHECK(wk_failed(a) != wk_failed(b)); /* one of them, the one that computes */
    CHECK_ERROR(wk_failed(a) ? a : b, WK_HANDLE);
    api_end(a);
    api_end(b);
}

TEST(handles, of_freed_modules_optimizers_loaders_and_functions_are_errors) {
    wk_ctx *c = api_ctx(false);
    wk_module *m = wk_nn_linear(c, 4, 4, true);
    wk_tensor *p[2], *x = wk_ones(c, WK_F32, SIZE(2, 4)), *batch[1];
    CHECK_EQ_I(wk_module_params(m, p, 2), 2);
    wk_optim *o = wk_sgd(c, p, 2, NULL);
    float data[8] = {0};
    wk_field field = {.dtype = WK_F32, .ndim = 1, .size = {4}, .data = data};
    wk_loader *l = wk_loader_new(c, &field, 1, 2, NULL);
    wk_compiled *f = wk_compile(c, train_step, NULL, NULL);
    wk_module_free(m);
    wk_optim_free(o);
    wk_loader_free(l);
    wk_compiled_free(f);
    CHECK(wk_is_poison(wk_call(f, &x, 1)));
    CHECK_ERROR(c, WK_HANDLE);
    wk_compiled_free(f);
    CHECK_ERROR(c, WK_HANDLE);
    CHECK(wk_is_poison(wk_forward(m, x)));
    CHECK_ERROR(c, WK_HANDLE);
    wk_optim_step(o);
    CHECK_ERROR(c, WK_HANDLE);
    CHECK(!wk_loader_next(l, batch));
    CHECK_ERROR(c, WK_HANDLE);
    wk_module_free(m);
    CHECK_ERROR(c, WK_HANDLE);
    wk_module *again = wk_nn_linear(c, 4, 4, true); /* most likely in the slot of the freed one */
    CHECK(again != m);
    wk_train_mode(m, false);
    CHECK_ERROR(c, WK_HANDLE);
    CHECK(wk_is_training(again));
    api_end(c);
}

/* ---- scopes -------------------------------------------------------------------------------------------------------- */

TEST(scopes, end_kills_what_was_made_inside) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *outer = wk_ones(c, WK_F32, SIZE(3));
    wk_scope_begin(c);
    wk_tensor *inner = wk_add(outer, outer);
    wk_scope_begin(c);
    wk_tensor *innermost = wk_add(inner, outer);
    wk_scope_end(c);
    CHECK(!wk_alive(c, innermost) && wk_alive(c, inner));
    wk_scope_end(c);
    CHECK(!wk_alive(c, inner) && wk_alive(c, outer));
    api_end(c);
}

TEST(scopes, unmatched_end_is_an_error) {
    wk_ctx *c = api_ctx(false);
    wk_scope_end(c);
    CHECK_ERROR(c, WK_STATE);
    api_end(c);
}

TEST(scopes, keep_promotes_one_level) {
    wk_ctx *c = api_ctx(false);
    wk_scope_begin(c);
    wk_scope_begin(c);
    wk_tensor *x = wk_keep(wk_scalar(c, 5));
    wk_scope_end(c);
    CHECK(wk_alive(c, x));
    CHECK_NEAR(wk_item(x), 5, 0);
    wk_scope_end(c);
    CHECK(!wk_alive(c, x));
    api_end(c);
}

TEST(scopes, retain_outlives_scopes_until_release) {
    wk_ctx *c = api_ctx(false);
    wk_scope_begin(c);
    wk_tensor *x = wk_retain(wk_scalar(c, 6));
    CHECK(wk_retain(x) == x);
    wk_scope_end(c);
    CHECK_NEAR(wk_item(x), 6, 0);
    wk_release(x);
    CHECK(wk_alive(c, x));
    wk_release(x);
    CHECK(!wk_alive(c, x));
    wk_release(x);
    CHECK_ERROR(c, WK_HANDLE);
    api_end(c);
}

TEST(scopes, drop_and_set_release_sooner) {
    wk_ctx *c = api_ctx(false);
    int64_t empty = api_stats(c).live_tensors;
    wk_tensor *x = wk_scalar(c, 1), *first = x;
    for (int i = 0; i < 10; i++)
        wk_set(&x, wk_add_scalar(x, 1));
    CHECK_NEAR(wk_item(x), 11, 0);
    CHECK(!wk_alive(c, first));
    CHECK_EQ_I(api_stats(c).live_tensors, empty + 1);
    wk_set(&x, x); /* itself: stays */
    CHECK(wk_alive(c, x));
    wk_drop(x);
    wk_drop(x); /* dead handles and NULL are ignored */
    wk_drop(NULL);
    CHECK_EQ_I(api_stats(c).live_tensors, empty);
    api_end(c);
}

static void doubled(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)self, (void)nin, (void)nout;
    wk_tensor *x = in[0];
    wk_set(&x, wk_add(x, in[0])); /* the input is borrowed: this must not kill the caller's tensor */
    wk_set(&x, wk_add(x, in[0]));
    out[0] = x;
}

TEST(scopes, drop_of_a_borrowed_input_leaves_it_alone) {
    wk_ctx *c = api_ctx(false);
    wk_module *m = wk_module_new(c, "doubled", doubled, NULL, NULL);
    wk_tensor *x = wk_scalar(c, 2), *y = wk_forward(m, x);
    CHECK_NEAR(wk_item(y), 6, 0);
    CHECK(wk_alive(c, x));
    wk_compiled *f = wk_compile(c, doubled, NULL, NULL);
    CHECK_NEAR(wk_item(wk_call(f, &x, 1)), 6, 0);
    CHECK_NEAR(wk_item(x), 2, 0);
    api_end(c);
}

typedef struct spy {
    wk_tensor *made[3];
} spy;

static void spied(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin;
    spy *s = self;
    s->made[0] = wk_add_scalar(in[0], 1);
    s->made[1] = wk_mul(s->made[0], s->made[0]);
    s->made[2] = wk_neg(s->made[1]);
    out[0] = s->made[2];
    if (nout > 1)
        out[1] = in[0];
}

TEST(scopes, forward_hands_over_results_and_nothing_else) {
    wk_ctx *c = api_ctx(false);
    spy s;
    wk_module *m = wk_module_new(c, "spied", spied, &s, NULL);
    wk_tensor *x = wk_scalar(c, 3), *out[2];
    wk_scope_begin(c);
    wk_forward_n(m, &x, 1, out, 2);
    CHECK(!wk_alive(c, s.made[0]) && !wk_alive(c, s.made[1]));
    CHECK_NEAR(wk_item(out[0]), -16, 0);
    CHECK(out[1] == x); /* returning an input is legal, and leaves it with its owner */
    wk_scope_end(c);
    CHECK(!wk_alive(c, out[0]) && wk_alive(c, x));
    api_end(c);
}

TEST(scopes, call_hands_over_results_and_nothing_else) {
    wk_ctx *c = api_ctx(false);
    spy s;
    wk_compiled *f = wk_compile(c, spied, &s, NULL);
    wk_tensor *x = wk_scalar(c, 3), *out[2];
    wk_scope_begin(c);
    wk_call_n(f, &x, 1, out, 2);
    CHECK(!wk_alive(c, s.made[0]) && !wk_alive(c, s.made[1]));
    CHECK_NEAR(wk_item(out[0]), -16, 0);
    CHECK_NEAR(wk_item(out[1]), 3, 0);
    wk_scope_end(c);
    CHECK(!wk_alive(c, out[0]) && wk_alive(c, x));
    api_end(c);
}

static void unbalanced(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)nin, (void)nout;
    if (*(int *)self > 0)
        wk_scope_begin(c);
    out[0] = wk_add_scalar(in[0], 1);
    if (*(int *)self < 0)
        wk_scope_end(c);
}

TEST(scopes, a_function_cannot_end_its_callers_scope) {
    wk_ctx *c = api_ctx(false);
    int how = -1;
    wk_module *m = wk_module_new(c, "unbalanced", unbalanced, &how, NULL);
    wk_scope_begin(c);
    wk_tensor *x = wk_scalar(c, 1);
    wk_forward(m, x);
    CHECK_ERROR(c, WK_STATE);
    CHECK(wk_alive(c, x));
    wk_scope_end(c);
    api_end(c);
}

TEST(scopes, a_scope_left_open_by_a_function_is_ended) {
    wk_ctx *c = api_ctx(false);
    int how = 1;
    wk_module *m = wk_module_new(c, "unbalanced", unbalanced, &how, NULL);
    wk_tensor *x = wk_scalar(c, 1);
    int64_t before = api_stats(c).live_tensors;
    wk_tensor *y = wk_forward(m, x); /* its result died with the inner scope, which is an error */
    CHECK_ERROR(c, WK_HANDLE);
    CHECK(wk_is_poison(y));
    CHECK(wk_alive(c, x));
    CHECK_EQ_I(api_stats(c).live_tensors, before + 2); /* api_check_error's own */
    api_end(c);
}

TEST(scopes, context_free_frees_everything) {
    wk_runtime_options ro;
    wk_runtime_options_init(&ro);
    wk_runtime *rt = wk_runtime_new(&ro);
    REQUIRE(rt != NULL);
    wk_ctx *c = wk_ctx_new(rt);
    REQUIRE(c != NULL);
    wk_module *m = model_mlp(c);
    train_job job = {m, model_adamw(c, m, NULL)};
    wk_compiled *f = wk_compile(c, train_step, &job, NULL);
    wk_tensor *in[2] = {api_normal(c, SIZE(8, MLP_FEATURES)), api_classes(c, 8, CLASSES)};
    wk_scope_begin(c); /* never ended */
    wk_retain(wk_call(f, in, 2));
    CHECK(!wk_failed(c));
    wk_ctx_free(c); /* a leak is the sanitizer's to find */
    wk_runtime_free(rt);
}

static int freed;
static void count_free(void *self) { freed += *(int *)self; }

TEST(scopes, free_self_runs_once) {
    wk_ctx *c = api_ctx(false);
    int one = 1, ten = 10;
    wk_module *m = wk_module_new(c, "m", spied, &one, count_free);
    wk_module_child(m, "child", wk_module_new(c, "k", spied, &ten, count_free));
    freed = 0;
    wk_module_free(m);
    CHECK_EQ_I(freed, 11);
    wk_module_new(c, "m", spied, &one, count_free);
    api_end(c);
    CHECK_EQ_I(freed, 12);
}

/* A block of a deep network: three linear layers' worth of activations inside. */
static void wide_block(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)self, (void)nin, (void)nout;
    wk_tensor *x = wk_relu(in[0]);
    wk_set(&x, wk_mul_scalar(x, 0.5));
    wk_set(&x, wk_add(x, in[0]));
    out[0] = x;
}

TEST(scopes, peak_of_48_blocks_without_grad) {
    wk_ctx *c = api_ctx(false);
    enum { BLOCKS = 48 };
    const int64_t numel = 1 << 16;
    wk_module *layer[BLOCKS];
    for (int i = 0; i < BLOCKS; i++)
        layer[i] = wk_module_new(c, "block", wide_block, NULL, NULL);
    wk_module *net = wk_nn_sequential(c, layer, BLOCKS);
    wk_grad_enable(c, false);
    wk_tensor *x = wk_ones(c, WK_F32, 1, &numel), *y = wk_forward(net, x);
    CHECK(wk_alive(c, y));
    int64_t block = numel * (int64_t)sizeof(float);
    CHECK(api_stats(c).storage_peak <= block /* x */ + 3 * block);
    api_end(c);
}

/* ---- errors -------------------------------------------------------------------------------------------------------- */

TEST(sticky, a_failing_call_gives_poison_and_never_null) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *a = wk_ones(c, WK_F32, SIZE(2, 3)), *b = wk_ones(c, WK_F32, SIZE(4, 5));
    wk_tensor *y = wk_add(a, b);
    REQUIRE(y != NULL);
    CHECK(wk_is_poison(y));
    CHECK(wk_failed(c));
    CHECK(wk_is_poison(wk_relu(y)));   /* compute on poison is poison */
    CHECK(wk_is_poison(wk_add(a, a))); /* and so is all else in a failed context */
    CHECK(wk_is_poison(wk_ones(c, WK_F32, SIZE(2))));
    CHECK(isnan(wk_item(y)));
    CHECK_ERROR(c, WK_SHAPE);
    CHECK(wk_is_poison(wk_relu(y))); /* still, and without a new error */
    CHECK(!wk_failed(c));
    api_end(c);
}

TEST(sticky, the_first_error_stays) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *a = wk_ones(c, WK_F32, SIZE(2, 3)), *b = wk_ones(c, WK_F32, SIZE(4, 5));
    CHECK_STR(wk_message(c), "");
    wk_add(a, b);
    char first[1024];
    strncpy(first, wk_message(c), sizeof first - 1);
    first[sizeof first - 1] = 0;
    wk_scope_end(c);
    wk_matmul(b, a);
    wk_empty(c, WK_F32, SIZE(-1));
    CHECK_STR(wk_message(c), first);
    CHECK(strstr(first, "add"));
    CHECK(strstr(first, "(2, 3)") && strstr(first, "(4, 5)"));
    CHECK_ERROR(c, WK_SHAPE);
    api_end(c);
}

TEST(sticky, the_message_names_the_caller) {
    wk_ctx *c = api_ctx(false);
    wk_add(wk_ones(c, WK_F32, SIZE(2)), wk_ones(c, WK_F32, SIZE(3)));
    const char *m = wk_message(c);
    CHECK(strstr(m, "api_lifetimes.c:") || strstr(m, "wick-api-tests+0x"));
    CHECK_ERROR(c, WK_SHAPE);
    api_end(c);
}

TEST(sticky, take_moves_the_error_out) {
    wk_ctx *c = api_ctx(false);
    wk_error e = {WK_SHAPE, "x"};
    CHECK_EQ_I(wk_error_take(c, &e), WK_OK);
    CHECK_EQ_I(e.status, WK_OK);
    wk_empty(c, WK_F32, SIZE(-1));
    CHECK_EQ_I(wk_error_take(c, NULL), WK_SHAPE);
    CHECK_EQ_I(wk_error_take(c, NULL), WK_OK);
    CHECK_STR(wk_message(c), "");
    api_end(c);
}

TEST(sticky, free_and_read_work_in_a_failed_context) {
    wk_ctx *c = api_ctx(false);
    float v[3] = {1, 2, 3};
    wk_tensor *x = api_vector(c, 3, v), *y = wk_retain(wk_add_scalar(x, 1));
    wk_module *m = wk_nn_linear(c, 2, 2, true);
    wk_scope_begin(c);
    wk_tensor *z = wk_neg(x);
    wk_empty(c, WK_F32, SIZE(-1));
    CHECK(wk_failed(c));
    CHECK_EQ_I(wk_size(x, 0), 3);
    CHECK(wk_alive(c, z));
    wk_scope_end(c);
    CHECK(!wk_alive(c, z));
    wk_release(y);
    wk_module_free(m);
    float got[3] = {0};
    CHECK(wk_read(x, got, sizeof got));
    CHECK_MEM(got, v, sizeof v);
    wk_drop(x);
    CHECK(!wk_alive(c, x));
    CHECK_ERROR(c, WK_SHAPE);
    api_end(c);
}

TEST(sticky, try_isolates_a_probe) {
    wk_ctx *c = api_ctx(false);
    wk_error e;
    wk_try_begin(c);
    wk_empty(c, WK_F32, SIZE(-1));
    CHECK(wk_failed(c));
    CHECK_EQ_I(wk_try_end(c, &e), WK_SHAPE);
    CHECK_EQ_I(e.status, WK_SHAPE);
    CHECK(e.message[0]);
    CHECK(!wk_failed(c));
    wk_try_begin(c);
    CHECK_NEAR(wk_item(wk_scalar(c, 4)), 4, 0);
    CHECK_EQ_I(wk_try_end(c, &e), WK_OK);
    api_end(c);
}

TEST(sticky, try_nests_and_keeps_an_earlier_error) {
    wk_ctx *c = api_ctx(false);
    wk_try_begin(c);
    wk_empty(c, WK_F32, SIZE(-1));
    wk_try_begin(c);
    CHECK(!wk_failed(c));
    wk_add(wk_ones(c, WK_BOOL, SIZE(2)), wk_ones(c, WK_BOOL, SIZE(3)));
    CHECK(wk_try_end(c, NULL) != WK_OK);
    CHECK(wk_failed(c));
    CHECK_EQ_I(wk_try_end(c, NULL), WK_SHAPE);
    CHECK(!wk_failed(c));
    CHECK_EQ_I(wk_try_end(c, NULL), WK_STATE);
    CHECK_ERROR(c, WK_STATE);
    api_end(c);
}

/* ---- gradients ----------------------------------------------------------------------------------------------------- */

TEST(gradients, first_backward_writes_and_later_ones_accumulate) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *w = wk_requires_grad(wk_scalar(c, 3), true);
    CHECK(wk_grad(w) == NULL);
    wk_backward(wk_mul(w, w));
    CHECK_NEAR(wk_item(wk_grad(w)), 6, 0);
    wk_backward(wk_mul_scalar(w, 10));
    CHECK_NEAR(wk_item(wk_grad(w)), 16, 0);
    wk_zero_grad(w);
    CHECK(wk_grad(w) == NULL);
    wk_backward(wk_mul(w, w));
    CHECK_NEAR(wk_item(wk_grad(w)), 6, 0);
    api_end(c);
}

TEST(gradients, the_optimizer_releases_them_unless_told_to_keep) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *w = wk_requires_grad(wk_scalar(c, 1), true);
    wk_optim *o = wk_sgd(c, &w, 1, &(wk_sgd_options){.struct_size = sizeof(wk_sgd_options), .lr = 0.5});
    wk_backward(wk_mul(w, w));
    wk_optim_step(o);
    CHECK_NEAR(wk_item(w), 0, 0);
    CHECK(wk_grad(w) == NULL);
    wk_optim_keep_grads(o, true);
    wk_backward(wk_mul_scalar(w, 4));
    wk_optim_step(o);
    CHECK_NEAR(wk_item(w), -2, 0);
    REQUIRE(wk_grad(w) != NULL);
    CHECK_NEAR(wk_item(wk_grad(w)), 4, 0);
    wk_optim_zero_grad(o);
    CHECK(wk_grad(w) == NULL);
    CHECK_EQ_I(wk_optim_steps(o), 2);
    api_end(c);
}

TEST(gradients, a_second_backward_is_an_error) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *w = wk_requires_grad(wk_scalar(c, 2), true), *loss = wk_mul(wk_mul(w, w), w);
    wk_backward(loss);
    wk_backward(loss);
    CHECK_ERROR(c, WK_GRAD);
    CHECK_NEAR(wk_item(wk_grad(w)), 12, 0);
    wk_backward_options o;
    wk_backward_options_init(&o);
    o.retain_graph = true;
    loss = wk_mul(w, w);
    wk_zero_grad(w);
    wk_backward_ex(&loss, 1, &o);
    wk_backward_ex(&loss, 1, &o);
    CHECK_NEAR(wk_item(wk_grad(w)), 8, 0);
    api_end(c);
}

TEST(gradients, in_place_after_save_is_an_error) {
    wk_ctx *c = api_ctx(false);
    float one[2] = {1, 1};
    wk_tensor *w = wk_requires_grad(wk_ones(c, WK_F32, SIZE(2)), true), *x = wk_ones(c, WK_F32, SIZE(2));
    wk_tensor *loss = wk_sum(wk_mul(w, x), NULL, 0, false);
    CHECK(wk_write(x, one, sizeof one)); /* even with equal values */
    wk_backward(loss);
    CHECK_ERROR(c, WK_VERSION);
    CHECK(wk_grad(w) == NULL);
    wk_tensor *view = wk_detach(x);
    loss = wk_sum(wk_mul(w, x), NULL, 0, false);
    CHECK(wk_write(view, one, sizeof one)); /* views share the version */
    wk_backward(loss);
    CHECK_ERROR(c, WK_VERSION);
    loss = wk_sum(wk_mul(w, x), NULL, 0, false);
    CHECK(wk_data(x, true) != NULL);
    wk_backward(loss);
    CHECK_ERROR(c, WK_VERSION);
    loss = wk_sum(wk_add(w, x), NULL, 0, false); /* add saves neither */
    CHECK(wk_write(x, one, sizeof one));
    wk_backward(loss);
    CHECK(wk_grad(w) != NULL);
    api_end(c);
}

TEST(gradients, an_optimizer_step_between_forward_and_backward_is_an_error) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *w = wk_requires_grad(wk_scalar(c, 2), true);
    wk_optim *o = wk_sgd(c, &w, 1, NULL);
    wk_tensor *early = wk_mul(w, w);
    wk_backward(wk_mul(w, w));
    wk_optim_step(o);
    wk_backward(early);
    CHECK_ERROR(c, WK_VERSION);
    api_end(c);
}

TEST(gradients, with_respect_to_inputs_and_twice) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *x = wk_requires_grad(wk_scalar(c, 3), true), *other = wk_requires_grad(wk_scalar(c, 1), true);
    wk_tensor *in[2] = {x, other}, *out[2], *y = wk_mul(wk_mul(x, x), x);
    wk_backward_options o;
    wk_backward_options_init(&o);
    o.inputs = in;
    o.ninputs = 2;
    o.out = out;
    o.create_graph = true;
    wk_backward_ex(&y, 1, &o);
    REQUIRE(out[0] != NULL);
    CHECK(out[1] == NULL); /* y does not depend on it */
    CHECK_NEAR(wk_item(out[0]), 27, 0);
    CHECK(wk_grad(x) == NULL); /* results go to out alone */
    wk_backward(out[0]);
    CHECK_NEAR(wk_item(wk_grad(x)), 18, 0);
    api_end(c);
}

TEST(gradients, leaves_and_modes) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *w = wk_requires_grad(wk_scalar(c, 3), true);
    CHECK(wk_needs_grad(w));
    bool was = wk_grad_enable(c, false);
    CHECK(was);
    CHECK(!wk_needs_grad(wk_mul(w, w)));
    wk_grad_enable(c, was);
    wk_tensor *y = wk_mul(w, w);
    CHECK(wk_needs_grad(y) && !wk_needs_grad(wk_detach(y)));
    wk_requires_grad(y, false);
    CHECK_ERROR(c, WK_GRAD);
    wk_requires_grad(wk_ones(c, WK_I64, SIZE(2)), true);
    CHECK_ERROR(c, WK_DTYPE);
    wk_backward(wk_scalar(c, 1));
    CHECK_ERROR(c, WK_GRAD);
    wk_backward(wk_mul(w, wk_ones(c, WK_F32, SIZE(3))));
    CHECK_ERROR(c, WK_GRAD);
    api_end(c);
}

TEST(gradients, parameters_without_one_are_left_alone) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *p[2] = {wk_requires_grad(wk_scalar(c, 1), true), wk_requires_grad(wk_scalar(c, 1), true)};
    wk_optim *o = wk_adamw(c, p, 2, NULL);
    wk_tensor *q = wk_requires_grad(wk_scalar(c, 1), true);
    wk_optim *alone = wk_adamw(c, &q, 1, NULL);
    for (int i = 0; i < 3; i++) {
        wk_backward(wk_mul(p[0], p[0]));
        wk_optim_step(o);
    }
    CHECK_NEAR(wk_item(p[1]), 1, 0);
    /* Its first gradient comes late: its own step number, and so its bias correction, starts there. */
    wk_backward(wk_add(wk_mul(p[0], p[0]), wk_mul(p[1], p[1])));
    wk_optim_step(o);
    wk_backward(wk_mul(q, q));
    wk_optim_step(alone);
    CHECK_NEAR(wk_item(p[1]), wk_item(q), 0);
    CHECK_EQ_I(wk_optim_steps(o), 4);
    api_end(c);
}

/* ---- compiled calls ------------------------------------------------------------------------------------------------ */

typedef struct failing {
    wk_module *m;
    wk_optim *o;
    int fail_at; /* 0: never; 1: before any effect; 2: after backward; 3: after the optimizer; 4: as 3, with a read between */
    uint64_t sequence_at_read;
} failing;

static void failing_step(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)nin, (void)nout;
    failing *f = self;
    wk_tensor *bad = wk_ones(c, WK_F32, SIZE(7, 7)), *x = wk_dropout(in[0], 0.25);
    if (f->fail_at == 1)
        wk_add(x, bad);
    out[0] = wk_cross_entropy(wk_forward(f->m, x), in[1]);
    wk_backward(out[0]);
    if (f->fail_at == 2)
        wk_add(x, bad);
    wk_optim_step(f->o);
    if (f->fail_at == 4) {
        wk_item(wk_sum(wk_module_get(f->m, "fc1.weight"), NULL, 0,
                       false)); /* needs the step: it is run, and stays */
        wk_rng_get(c, NULL, &f->sequence_at_read);
        wk_dropout(in[0], 0.25);
    }
    if (f->fail_at >= 3)
        wk_add(x, bad);
}

TEST(calls, a_failed_call_leaves_parameters_gradients_and_rng_as_before) {
    wk_ctx *c = api_ctx(false);
    wk_module *m = model_mlp(c);
    failing f = {.m = m, .o = model_adamw(c, m, NULL)};
    wk_compiled *step = wk_compile(c, failing_step, &f, NULL);
    wk_tensor *in[2] = {api_normal(c, SIZE(8, MLP_FEATURES)), api_classes(c, 8, CLASSES)};
    wk_item(wk_call(step, in, 2));
    for (f.fail_at = 1; f.fail_at <= 3; f.fail_at++) {
        wk_tensor *bias = wk_module_get(m, "fc3.bias");
        wk_backward(wk_sum(wk_mul(bias, bias), NULL, 0, false)); /* a gradient that exists before the call */
        float *grad = api_read(wk_grad(bias));
        int64_t n, steps = wk_optim_steps(f.o);
        float *before = api_params(m, &n);
        uint64_t sequence, now;
        wk_rng_get(c, NULL, &sequence);
        CHECK(wk_is_poison(wk_call(step, in, 2)));
        CHECK_ERROR(c, WK_SHAPE);
        float *after = api_params(m, &n);
        CHECK_MEM(after, before, (size_t)n * sizeof(float));
        wk_rng_get(c, NULL, &now);
        CHECK_EQ_I(now, sequence);
        CHECK_EQ_I(wk_optim_steps(f.o), steps);
        CHECK(wk_grad(wk_module_get(m, "fc1.weight")) == NULL);
        REQUIRE(wk_grad(bias) != NULL);
        float *grad_after = api_read(wk_grad(bias));
        CHECK_MEM(grad_after, grad, CLASSES * sizeof(float));
        wk_zero_grad(bias);
        free(grad);
        free(grad_after);
        free(before);
        free(after);
    }
    f.fail_at = 0;
    CHECK(isfinite(wk_item(wk_call(step, in, 2))));
    api_end(c);
}

TEST(calls, what_a_read_in_the_middle_flushed_is_committed) {
    wk_ctx *c = api_ctx(false), *d = api_ctx(false);
    wk_seed(c, 5);
    wk_seed(d, 5);
    wk_module *m = model_mlp(c), *reference = model_mlp(d);
    failing f = {.m = m, .o = model_adamw(c, m, NULL), .fail_at = 4};
    failing g = {.m = reference, .o = model_adamw(d, reference, NULL)};
    wk_compile_options strict;
    wk_compile_options_init(&strict);
    strict.strict = true;
    wk_compiled *step = wk_compile(c, failing_step, &f, &strict),
                *good = wk_compile(d, failing_step, &g, &strict);
    wk_tensor *x = api_normal(c, SIZE(8, MLP_FEATURES)), *y = api_classes(c, 8, CLASSES);
    wk_tensor *in[2] = {x, y}, *also[2] = {wk_share(d, x), wk_share(d, y)};
    CHECK(wk_is_poison(wk_call(step, in, 2)));
    CHECK_ERROR(c, WK_SHAPE);
    wk_call(good, also, 2);
    int64_t n;
    float *a = api_params(m, &n), *b = api_params(reference, &n);
    CHECK_MEM(a, b, (size_t)n * sizeof(float));
    uint64_t now;
    wk_rng_get(c, NULL, &now);
    CHECK_EQ_I(now, f.sequence_at_read);
    CHECK_EQ_I(wk_optim_steps(f.o), 1);
    free(a);
    free(b);
    api_end(c);
    api_end(d);
}

static void scaled_sum(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    out[0] = wk_mul_scalar(wk_sum(in[0], NULL, 0, false), *(double *)self);
}

TEST(calls, self_is_read_on_every_call) {
    wk_ctx *c = api_ctx(false);
    double factor = 1;
    wk_compiled *f = wk_compile(c, scaled_sum, &factor, NULL);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(4));
    for (; factor < 6; factor++)
        CHECK_NEAR(wk_item(wk_call(f, &x, 1)), 4 * factor, 0);
    CHECK_EQ_I(api_stats(c).structures_made, 1); /* a VALUE attribute is no part of the key */
    api_end(c);
}

TEST(calls, returned_tensors_stay_intact) {
    wk_ctx *c = api_ctx(false);
    double factor = 1;
    wk_compiled *f = wk_compile(c, scaled_sum, &factor, NULL);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(4)), *y[16];
    for (int i = 0; i < 16; i++) {
        factor = i;
        y[i] = wk_call(f, &x, 1);
    }
    for (int i = 0; i < 16; i++)
        CHECK_NEAR(wk_item(y[i]), 4 * i, 0);
    api_end(c);
}

static void identity(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)self, (void)nin;
    for (int i = 0; i < nout; i++)
        out[i] = in[0];
}

TEST(calls, returning_an_input) {
    wk_ctx *c = api_ctx(false);
    wk_compiled *f = wk_compile(c, identity, NULL, NULL);
    wk_tensor *x = wk_scalar(c, 7), *out[2];
    CHECK_NEAR(wk_item(wk_call(f, &x, 1)), 7, 0);
    wk_call_n(f, &x, 1, out, 2);
    CHECK_NEAR(wk_item(out[0]), 7, 0);
    CHECK_NEAR(wk_item(out[1]), 7, 0);
    CHECK(wk_alive(c, x));
    api_end(c);
}

static void nothing(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)self, (void)in, (void)nin, (void)out, (void)nout;
}

TEST(calls, an_output_that_was_not_set_is_an_error) {
    wk_ctx *c = api_ctx(false);
    wk_compiled *f = wk_compile(c, nothing, NULL, NULL);
    wk_module *m = wk_module_new(c, "nothing", nothing, NULL, NULL);
    wk_tensor *x = wk_scalar(c, 7);
    CHECK(wk_is_poison(wk_call(f, &x, 1)));
    CHECK_ERROR(c, WK_INVALID);
    CHECK(wk_is_poison(wk_forward(m, x)));
    CHECK_ERROR(c, WK_INVALID);
    api_end(c);
}

typedef struct nest {
    wk_compiled *inner;
} nest;

static void nested(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    wk_tensor *x = wk_add_scalar(in[0], 1), *y = wk_call(((nest *)self)->inner, &x, 1);
    out[0] = wk_add(y, x);
}

TEST(calls, nest) {
    wk_ctx *c = api_ctx(false);
    double factor = 3;
    nest n = {wk_compile(c, scaled_sum, &factor, NULL)};
    wk_compiled *f = wk_compile(c, nested, &n, NULL);
    wk_tensor *x = wk_scalar(c, 1);
    for (int i = 0; i < 3; i++)
        CHECK_NEAR(wk_item(wk_call(f, &x, 1)), 3 * 2 + 2, 0);
    api_end(c);
}

static void host_write(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)nin, (void)nout;
    float v = 1;
    wk_tensor *borrowed = wk_from_data(c, WK_F32, 0, NULL, &v);
    v = 100; /* the host memory was copied at the call */
    wk_tensor *y = wk_add(in[0], borrowed);
    *(double *)self = wk_item(y); /* a read in the middle sees what was computed so far */
    out[0] = wk_add(y, borrowed);
}

TEST(calls, reads_and_host_memory) {
    wk_ctx *c = api_ctx(false);
    double seen = 0;
    wk_compiled *f = wk_compile(c, host_write, &seen, NULL);
    wk_tensor *x = wk_scalar(c, 1);
    for (int i = 0; i < 3; i++) {
        CHECK_NEAR(wk_item(wk_call(f, &x, 1)), 3, 0);
        CHECK_NEAR(seen, 2, 0);
    }
    api_end(c);
}

TEST(calls, a_write_after_the_call_does_not_reach_it) {
    wk_ctx *c = api_ctx(false);
    double factor = 1;
    wk_compiled *f = wk_compile(c, scaled_sum, &factor, NULL);
    float v[4] = {1, 2, 3, 4};
    wk_tensor *x = wk_requires_grad(api_vector(c, 4, v), true); /* so that the call stays pending */
    wk_tensor *y = wk_call(f, &x, 1);
    memset(v, 0, sizeof v);
    CHECK(wk_write(x, v, sizeof v));
    CHECK_NEAR(wk_item(y), 10, 0);
    CHECK_NEAR(wk_item(wk_call(f, &x, 1)), 0, 0);
    api_end(c);
}

static void noise(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)self, (void)nin, (void)nout;
    wk_tensor *dead = wk_randn(c, SIZE(5)); /* draws though nobody reads it */
    (void)dead;
    out[0] = wk_add(wk_dropout(in[0], 0.5), wk_randn(c, SIZE(64)));
}

TEST(rng, advances_identically_eager_and_compiled) {
    wk_ctx *c = api_ctx(false);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(64));
    uint64_t seed, start, sequence[2];
    float *got[2][3];
    for (int compiled = 0; compiled < 2; compiled++) {
        wk_seed(c, 42);
        wk_rng_get(c, &seed, &start);
        CHECK_EQ_I(seed, 42);
        CHECK_EQ_I(start, 0);
        api_run r = api_runner(c, noise, NULL, compiled);
        for (int i = 0; i < 3; i++)
            got[compiled][i] = api_read(api_call(&r, &x, 1));
        wk_rng_get(c, NULL, &sequence[compiled]);
    }
    CHECK_EQ_I(sequence[0], sequence[1]);
    CHECK_EQ_I(sequence[0], 9);
    for (int i = 0; i < 3; i++)
        CHECK_MEM(got[0][i], got[1][i], 64 * sizeof(float));
    CHECK(!api_same(got[0][0], got[0][1], 64));
    wk_rng_set(c, 42, 3); /* as after the first call */
    api_run r = api_runner(c, noise, NULL, true);
    float *again = api_read(api_call(&r, &x, 1));
    CHECK_MEM(again, got[0][1], 64 * sizeof(float));
    free(again);
    for (int i = 0; i < 6; i++)
        free(got[i / 3][i % 3]);
    api_end(c);
}

TEST(rng, contexts_of_one_runtime_differ_and_a_seed_repeats) {
    wk_runtime_options o;
    wk_runtime_options_init(&o);
    o.seed = 9;
    o.threads = 1;
    float v[2][2][8];
    for (int round = 0; round < 2; round++) {
        wk_runtime *rt = wk_runtime_new(&o);
        REQUIRE(rt != NULL);
        for (int i = 0; i < 2; i++) {
            wk_ctx *c = wk_ctx_new(rt);
            REQUIRE(c != NULL);
            CHECK(wk_read(wk_randn(c, SIZE(8)), v[round][i], sizeof v[round][i]));
            api_end(c);
        }
        wk_runtime_free(rt);
    }
    CHECK_MEM(v[0], v[1], sizeof v[0]);
    CHECK(!api_same(v[0][0], v[0][1], 8));
}

/* ---- sharing ------------------------------------------------------------------------------------------------------- */

TEST(sharing, a_handle_in_another_context_on_the_same_memory) {
    wk_ctx *a = api_ctx(false), *b = api_ctx(false);
    float v[2] = {1, 2}, w[2] = {5, 6}, got[2];
    wk_tensor *x = wk_requires_grad(api_vector(a, 2, v), true), *y = wk_share(b, x);
    CHECK(wk_ctx_of(y) == b && wk_alive(b, y) && !wk_alive(a, y));
    CHECK(wk_needs_grad(y));
    CHECK(wk_read(y, got, sizeof got));
    CHECK_MEM(got, v, sizeof v);
    CHECK(wk_write(x, w, sizeof w));
    CHECK(wk_read(y, got, sizeof got));
    CHECK_MEM(got, w, sizeof w);
    wk_backward(wk_sum(wk_mul(y, y), NULL, 0, false));
    CHECK(wk_grad(y) != NULL);
    CHECK(wk_grad(x) == NULL); /* a gradient belongs to one context's handle */
    api_end(a);                /* the memory outlives the context that made it */
    CHECK(wk_read(y, got, sizeof got));
    CHECK_MEM(got, w, sizeof w);
    api_end(b);
}

TEST(sharing, a_module_in_another_context) {
    wk_ctx *a = api_ctx(false), *b = api_ctx(false);
    wk_module *m = model_transformer(a, 8), *n = wk_module_share(b, m);
    CHECK_EQ_I(wk_module_params(n, NULL, 0), wk_module_params(m, NULL, 0));
    int64_t ids[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    wk_tensor *x = wk_from_data(a, WK_I64, SIZE(1, 8), ids), *y = wk_forward(m, x);
    wk_tensor *x2 = wk_share(b, x), *y2 = wk_forward(n, x2);
    CHECK(wk_ctx_of(y2) == b);
    REQUIRE(!wk_failed(a) && !wk_failed(b));
    float *p = api_read(y), *q = api_read(y2);
    CHECK_MEM(p, q, 8 * TF_VOCAB * sizeof(float));
    wk_backward(wk_sum(y2, NULL, 0, false));
    CHECK(wk_grad(wk_module_get(n, "tok.weight")) != NULL);
    CHECK(wk_grad(wk_module_get(m, "tok.weight")) == NULL);
    wk_train_mode(n, false);
    CHECK(wk_is_training(m) && !wk_is_training(n));
    wk_forward(m, x2); /* outside a shared module, the original does not run on another context's tensors */
    CHECK_ERROR(b, WK_HANDLE);
    api_end(a);
    float *again = api_read(wk_forward(n, x2)); /* the copy outlives the original */
    CHECK_MEM(again, q, 8 * TF_VOCAB * sizeof(float));
    free(p);
    free(q);
    free(again);
    api_end(b);
}

/* ---- modules ------------------------------------------------------------------------------------------------------- */

TEST(modules, names_order_and_lookup) {
    wk_ctx *c = api_ctx(false);
    wk_module *m = model_mlp(c);
    const char *want[] = {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "fc3.weight", "fc3.bias"};
    wk_tensor *p[6];
    CHECK_EQ_I(wk_module_params(m, p, 6), 6);
    for (int i = 0; i < 6; i++) {
        CHECK_STR(wk_module_param_name(m, i), want[i]);
        CHECK(wk_module_get(m, want[i]) == p[i]);
        CHECK(wk_needs_grad(p[i]));
    }
    CHECK(wk_module_param_name(m, 6) == NULL && wk_module_param_name(m, -1) == NULL);
    CHECK(wk_module_get(m, "fc1") == NULL && wk_module_get(m, "") == NULL &&
          wk_module_get(m, "fc4.bias") == NULL);
    CHECK_EQ_I(wk_size(p[4], 0), CLASSES);
    CHECK_EQ_I(wk_size(p[4], 1), 64);
    wk_module_param(m, "scale", wk_ones(c, WK_F32, SIZE(1)));
    CHECK_STR(wk_module_param_name(m, 0), "scale"); /* own parameters come first */
    CHECK(wk_this_module(c) == NULL);
    wk_module *deep = model_transformer(c, 4);
    CHECK(wk_module_get(deep, "blocks.1.ln2.bias") != NULL);
    api_end(c);
}

TEST(modules, a_tied_parameter_counts_once) {
    wk_ctx *c = api_ctx(false), *d = api_ctx(false);
    wk_module *m = wk_module_new(c, "m", identity, NULL, NULL);
    wk_module *a = wk_module_child(m, "a", wk_nn_linear(c, 4, 4, false));
    wk_module *b = wk_module_child(m, "b", wk_module_new(c, "tied", identity, NULL, NULL));
    wk_module_param(b, "weight", wk_module_own(a, 0));
    wk_tensor *p[2];
    CHECK_EQ_I(wk_module_params(m, p, 2), 1);
    CHECK(wk_module_get(m, "a.weight") == wk_module_get(m, "b.weight"));
    wk_module *n = wk_module_share(d, m);
    CHECK_EQ_I(wk_module_params(n, p, 2), 1);
    CHECK(wk_module_get(n, "a.weight") == wk_module_get(n, "b.weight"));
    api_end(c);
    api_end(d);
}

/* A running mean: the buffer is written in place, eager and compiled, and is no parameter. */
static void running_mean(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)self, (void)nin, (void)nout;
    wk_tensor *mean = wk_module_own_buffer(wk_this_module(c), 0);
    wk_copy_(mean, wk_add(wk_mul_scalar(mean, 0.5), wk_mul_scalar(in[0], 0.5)));
    out[0] = wk_sub(in[0], mean);
}

static void forward_it(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    out[0] = wk_forward(self, in[0]);
}

TEST(modules, buffers_are_state_without_gradient) {
    wk_ctx *c = api_ctx(true), *d = api_ctx(true);
    wk_module *outer = wk_module_new(c, "outer", identity, NULL, NULL);
    wk_module *m = wk_module_child(outer, "norm", wk_module_new(c, "norm", running_mean, NULL, NULL));
    wk_tensor *w = wk_module_param(m, "w", wk_ones(c, WK_F32, SIZE(1))), *p[2] = {0};
    wk_scope_begin(c);
    wk_tensor *mean = wk_module_buffer(m, "mean", wk_zeros(c, WK_F32, SIZE(1)));
    wk_scope_end(c);
    CHECK(wk_alive(c, mean) && !wk_needs_grad(mean));
    CHECK_EQ_I(wk_module_params(outer, p, 2), 1);
    CHECK(p[0] == w && !p[1]);
    CHECK_EQ_I(wk_module_buffers(outer, p, 2), 1);
    CHECK(p[0] == mean && wk_module_get(outer, "norm.mean") == mean);
    CHECK(wk_module_own_buffer(m, 0) == mean && !wk_module_own_buffer(m, 1) &&
          !wk_module_own_buffer(outer, 0));
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(1));
    wk_compiled *f = wk_compile(c, forward_it, m, NULL);
    CHECK_NEAR(wk_item(wk_forward(m, x)), 0.5, 0);
    CHECK_NEAR(wk_item(wk_call(f, &x, 1)), 0.25, 0);
    CHECK_NEAR(wk_item(wk_call(f, &x, 1)), 0.125, 0);
    CHECK_NEAR(wk_item(mean), 0.875, 0);
    wk_module *n = wk_module_share(d, outer); /* the same memory */
    wk_forward(wk_module_child_at(n, 0), wk_ones(d, WK_F32, SIZE(1)));
    wk_sync(d);
    CHECK_NEAR(wk_item(mean), 0.9375, 0);
    wk_module_buffer(m, "mean", wk_ones(c, WK_F32, SIZE(1)));
    CHECK_ERROR(c, WK_INVALID);
    wk_module_param(m, "mean", wk_ones(c, WK_F32, SIZE(1)));
    CHECK_ERROR(c, WK_INVALID);
    wk_module_buffer(m, "trained", w);
    CHECK_ERROR(c, WK_INVALID);
    wk_module_buffer(m, "elsewhere", wk_ones(d, WK_F32, SIZE(1)));
    CHECK_ERROR(c, WK_HANDLE);
    wk_module_free(outer);
    CHECK(!wk_alive(c, mean));
    api_end(c);
    api_end(d);
}

TEST(modules, hold_their_parameters) {
    wk_ctx *c = api_ctx(false);
    wk_module *m = wk_module_new(c, "m", identity, NULL, NULL);
    wk_scope_begin(c);
    wk_tensor *w = wk_module_param(m, "w", wk_ones(c, WK_F32, SIZE(3)));
    wk_scope_end(c);
    CHECK(wk_alive(c, w));
    wk_drop(w); /* not its scope's any more */
    CHECK(wk_alive(c, w));
    wk_module_free(m);
    CHECK(!wk_alive(c, w));
    api_end(c);
}

TEST(modules, a_child_freed_alone_leaves_its_parent) {
    wk_ctx *c = api_ctx(false);
    wk_module *m = model_mlp(c);
    wk_module_free(wk_module_child_at(m, 1));
    CHECK_EQ_I(wk_module_params(m, NULL, 0), 4);
    CHECK_STR(wk_module_param_name(m, 2), "fc3.weight");
    wk_module_free(m);
    api_end(c);
}

TEST(modules, dropout_is_the_identity_outside_training) {
    wk_ctx *c = api_ctx(false);
    wk_module *inner = wk_nn_dropout(c, 0.5), *m = wk_nn_sequential(c, &inner, 1);
    wk_tensor *x = wk_ones(c, WK_F32, SIZE(1000));
    double kept = wk_item(wk_sum(wk_forward(m, x), NULL, 0, false)) / 2;
    CHECK(kept > 350 && kept < 650); /* 1000 draws of a half: 9 sigma */
    wk_train_mode(m, false);
    CHECK(!wk_is_training(inner));
    CHECK_NEAR(wk_item(wk_sum(wk_forward(m, x), NULL, 0, false)), 1000, 0);
    CHECK(wk_alive(c, x));
    api_end(c);
}

TEST(modules, initial_values_have_pytorchs_bounds) {
    wk_ctx *c = api_ctx(false);
    wk_module *conv = wk_nn_conv2d(c, 3, 50, 5, 1, 0, true), *table = wk_nn_embedding(c, 100, 100);
    const double bound = 1 / sqrt(3 * 5 * 5);
    float *w = api_read(wk_module_get(conv, "weight")), *b = api_read(wk_module_get(conv, "bias"));
    double low = 0, high = 0, sum = 0, square = 0;
    for (int i = 0; i < 3750; i++) {
        low = fmin(low, (double)w[i]);
        high = fmax(high, (double)w[i]);
    }
    CHECK(low >= -bound && low < -0.99 * bound && high <= bound && high > 0.99 * bound);
    for (int i = 0; i < 50; i++)
        CHECK(fabs((double)b[i]) <= bound);
    float *e = api_read(wk_module_get(table, "weight"));
    for (int i = 0; i < 10000; i++) {
        sum += (double)e[i];
        square += (double)e[i] * (double)e[i];
    }
    CHECK_NEAR(sum / 10000, 0, 0.06);   /* 6 sigma of the mean of 10,000 */
    CHECK_NEAR(square / 10000, 1, 0.1); /* 7 sigma of the variance */
    free(w);
    free(b);
    free(e);
    api_end(c);
}

/* ---- loader -------------------------------------------------------------------------------------------------------- */

TEST(loader, visits_every_sample_once_an_epoch) {
    wk_ctx *c = api_ctx(false);
    enum { N = 103, BATCH = 10 };
    int32_t label[N];
    uint8_t pixel[N][2];
    for (int i = 0; i < N; i++) {
        label[i] = i;
        pixel[i][0] = (uint8_t)i;
        pixel[i][1] = 255;
    }
    wk_field fields[2] = {{.dtype = WK_U8, .ndim = 1, .size = {2}, .data = pixel},
                          {.dtype = WK_I32, .data = label}};
    wk_loader_options o;
    wk_loader_options_init(&o);
    o.batch = BATCH;
    o.shuffle = true;
    o.seed = wkt_u64();
    wk_loader *l = wk_loader_new(c, fields, 2, N, &o);
    CHECK_EQ_I(wk_loader_batches(l), 11);
    int64_t order[2][N] = {{0}};
    for (int epoch = 0; epoch < 2; epoch++) {
        wk_tensor *b[2];
        int seen[N] = {0}, at = 0;
        for (int k = 0; wk_loader_next(l, b); k++) {
            int64_t n = wk_size(b[1], 0), y[BATCH];
            float x[BATCH][2];
            CHECK_EQ_I(n, k < 10 ? BATCH : 3);
            REQUIRE(n <= BATCH && wk_read(b[1], y, (size_t)n * sizeof *y) &&
                    wk_read(b[0], x, (size_t)n * sizeof *x));
            for (int i = 0; i < n; i++) {
                REQUIRE(y[i] >= 0 && y[i] < N);
                seen[y[i]]++;
                order[epoch][at++] = y[i];
                CHECK(x[i][0] == (float)(int)y[i] / 255 && x[i][1] == 1);
            }
        }
        for (int i = 0; i < N; i++)
            CHECK_EQ_I(seen[i], 1);
    }
    CHECK(memcmp(order[0], order[1], sizeof order[0]) != 0);
    api_end(c);
}

TEST(loader, drop_last_and_short_sets) {
    wk_ctx *c = api_ctx(false);
    float v[10] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    wk_field f = {.dtype = WK_F32, .data = v};
    wk_loader_options o;
    wk_loader_options_init(&o);
    o.batch = 4;
    o.drop_last = true;
    wk_tensor *b;
    wk_loader *l = wk_loader_new(c, &f, 1, 10, &o);
    int n = 0;
    while (wk_loader_next(l, &b))
        CHECK_NEAR(wk_item(wk_sum(b, NULL, 0, false)), n++ ? 22 : 6, 0);
    CHECK_EQ_I(n, 2);
    o.drop_last = false;
    l = wk_loader_new(c, &f, 1, 3, &o);
    CHECK(wk_loader_next(l, &b));
    CHECK_EQ_I(wk_size(b, 0), 3);
    CHECK(!wk_loader_next(l, &b));
    l = wk_loader_new(c, &f, 1, 0, &o);
    CHECK(!wk_loader_next(l, &b) && !wk_loader_next(l, &b));
    api_end(c);
}

TEST(loader, an_iterations_tensors_die_with_it) {
    wk_ctx *c = api_ctx(false);
    float v[8] = {0};
    wk_field f = {.dtype = WK_F32, .data = v};
    wk_loader_options o;
    wk_loader_options_init(&o);
    o.batch = 2;
    wk_loader *l = wk_loader_new(c, &f, 1, 8, &o);
    int64_t before = api_stats(c).live_tensors;
    wk_tensor *b, *y = NULL, *last = NULL;
    for (int i = 0; wk_loader_next(l, &b); i++) {
        CHECK(!i || (!wk_alive(c, y) && !wk_alive(c, last)));
        y = wk_add(b, b);
        last = b;
        if (i == 1)
            wk_scope_begin(c); /* left open: ended with the iteration */
        if (i == 2)
            wk_drop(b);
    }
    CHECK_EQ_I(api_stats(c).live_tensors, before);
    CHECK(wk_loader_next(l, &b)); /* the next epoch, left early */
    y = wk_add(b, b);
    wk_loader_rewind(l);
    CHECK(!wk_alive(c, y));
    CHECK_EQ_I(api_stats(c).live_tensors, before);
    int n = 0;
    while (wk_loader_next(l, &b))
        n++;
    CHECK_EQ_I(n, 4);
    CHECK(wk_loader_next(l, &b));
    wk_empty(c, WK_F32, SIZE(-1));
    CHECK(!wk_loader_next(l, &b)); /* a failed context ends the loop */
    CHECK_ERROR(c, WK_SHAPE);
    api_end(c);
}

TEST(loader, order_depends_on_the_seed_and_the_epoch) {
    enum { N = 50 };
    int32_t v[N];
    for (int i = 0; i < N; i++)
        v[i] = i;
    int64_t order[3][2][N];
    for (int k = 0; k < 3; k++) {
        wk_ctx *c = api_ctx(false);
        wk_field f = {.dtype = WK_I32, .data = v};
        wk_loader_options o;
        wk_loader_options_init(&o);
        o.batch = N;
        o.shuffle = true;
        o.seed = k == 2 ? 8 : 7;
        wk_loader *l = wk_loader_new(c, &f, 1, N, &o);
        wk_tensor *b;
        for (int epoch = 0; epoch < 2; epoch++) {
            CHECK(wk_loader_next(l, &b));
            CHECK(wk_read(b, order[k][epoch], sizeof order[k][epoch]));
            CHECK(!wk_loader_next(l, &b));
        }
        api_end(c);
    }
    CHECK_MEM(order[0], order[1], sizeof order[0]);
    CHECK(memcmp(order[0][0], order[2][0], sizeof order[0][0]) != 0);
    CHECK(memcmp(order[0][1], order[2][0], sizeof order[0][0]) !=
          0); /* epochs of near seeds do not coincide */
}
