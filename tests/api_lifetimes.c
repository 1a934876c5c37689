/* The contract of wick.h on handles, scopes, errors and gradients, one test a rule. */
#include <math.h>
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
