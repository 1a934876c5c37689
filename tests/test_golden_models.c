/* Wick against PyTorch: every case of the golden file `ops`, forward and backward, and the first 20 losses of the three
 * models from the golden initial parameters; eager and compiled, on the CPU and (group cuda_golden) on a GPU. Everything
 * goes through the public API. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "golden.h"
#include "harness.h"
#include "util_api.h"
#include "util_models.h"

#define EPS 1.1920929e-7 /* of f32 */

/* A context on the device, or NULL: no such device here. */
static wk_ctx *context(wk_device d) {
    const char *why = "";
    wk_ctx *c = wk_ctx_new(NULL);
    if (!c)
        abort();
    if (!wk_device_available(c, d, &why)) {
        wkt_skip(__FILE__, __LINE__, "no %s device: %s", wk_device_name(d), why);
        wk_ctx_free(c);
        return NULL;
    }
    wk_use_device(c, d);
    return c;
}

/* ---- models --------------------------------------------------------------------------------------------------------- */

/* Step k of a golden array of shape (steps, ...): f32 or i64 as they are, u8 as pixels / 255. */
static wk_tensor *batch(wk_ctx *c, const wkg_tensor *t, int k) {
    int64_t n = t->numel / t->dims[0];
    const char *at = (const char *)t->data + (size_t)(k * n) * wkg_itemsize(t->dtype);
    if (t->dtype != WKG_U8)
        return wk_from_data(c, t->dtype == WKG_I64 ? WK_I64 : WK_F32, t->ndim - 1, t->dims + 1, at);
    float *v = malloc((size_t)n * sizeof *v);
    for (int64_t i = 0; i < n; i++)
        v[i] = (float)(unsigned char)at[i] / 255.0f;
    wk_tensor *x = wk_from_data(c, WK_F32, t->ndim - 1, t->dims + 1, v);
    free(v);
    return x;
}

/* Every parameter from param/NAME; every golden parameter has a place. */
static void load_params(wk_module *m, const wkg_file *f) {
    int n = wk_module_params(m, NULL, 0), golden = 0;
    for (int i = 0; i < f->count; i++)
        golden += !strncmp(f->tensors[i].name, "param/", 6);
    CHECK_EQ_I(n, golden);
    for (int i = 0; i < n; i++) {
        char name[128];
        snprintf(name, sizeof name, "param/%s", wk_module_param_name(m, i));
        const wkg_tensor *t = wkg_find(f, name);
        wk_tensor *p = wk_module_get(m, wk_module_param_name(m, i));
        if (!t || t->ndim != wk_ndim(p) || t->numel != wk_numel(p)) {
            FAIL("no golden %s of the parameter's shape", name);
            continue;
        }
        for (int d = 0; d < t->ndim; d++)
            CHECK_EQ_I(t->dims[d], wk_size(p, d));
        wk_write(p, t->data, (size_t)t->numel * sizeof(float));
    }
}

static wk_module *golden_transformer(wk_ctx *c) { return model_transformer(c, 32); }

/* 20 steps of AdamW with weight decay 0.01; every loss within `rel` of PyTorch's. */
static void check_losses(const char *name, wk_module *(*model)(wk_ctx *), wk_device d, bool compiled,
                         double rel) {
    wk_ctx *c = context(d);
    if (!c)
        return;
    wkg_file *f = wkg_open(name);
    REQUIRE(f != NULL);
    const wkg_tensor *x = wkg_find(f, "x"), *y = wkg_find(f, "y"), *want = wkg_find(f, "losses");
    train_job job = {.model = model(c)};
    load_params(job.model, f);
    job.optim = model_adamw(c, job.model, NULL);
    api_run run = api_runner(c, train_step, &job, compiled);
    double worst = 0;
    int steps = wkt_quick() ? 5 : 20;
    for (int k = 0; k < steps && !wk_failed(c); k++) {
        wk_scope_begin(c);
        wk_tensor *targets = batch(c, y, k);
        wk_tensor *in[2] = {batch(c, x, k), wk_reshape(targets, 1, (const int64_t[]){-1})};
        double loss = wk_item(api_call(&run, in, 2)), golden = ((const double *)want->data)[k];
        double off = fabs(loss - golden) / golden;
        worst = isnan(off) ? INFINITY : fmax(worst, off);
        wk_scope_end(c);
    }
    if (!(worst <= rel))
        FAIL("%s: a loss is off by %.3g of its value, more than %.3g", name, worst, rel);
    wkg_close(f);
    api_end(c);
}

/* The losses hold f32 rounding of 1.4e-7 and forgotten weight decay of 1.6e-5 apart (golden/README.md). Sums in another
   order move them by less than 1e-6 on the CPU; a GPU's products may round their inputs' products in other ways. */
TEST(golden_models, cnn_eager) { check_losses("cnn", model_cnn, WK_CPU, false, 1e-5); }
TEST(golden_models, cnn_compiled) { check_losses("cnn", model_cnn, WK_CPU, true, 1e-5); }
TEST(golden_models, mlp_eager) { check_losses("mlp", model_mlp, WK_CPU, false, 1e-5); }
TEST(golden_models, mlp_compiled) { check_losses("mlp", model_mlp, WK_CPU, true, 1e-5); }
TEST(golden_models, transformer_eager) {
    check_losses("transformer", golden_transformer, WK_CPU, false, 1e-5);
}
TEST(golden_models, transformer_compiled) {
    check_losses("transformer", golden_transformer, WK_CPU, true, 1e-5);
}
TEST(cuda_golden, cnn_eager) { check_losses("cnn", model_cnn, WK_CUDA, false, 1e-4); }
TEST(cuda_golden, cnn_compiled) { check_losses("cnn", model_cnn, WK_CUDA, true, 1e-4); }
TEST(cuda_golden, mlp_eager) { check_losses("mlp", model_mlp, WK_CUDA, false, 1e-4); }
TEST(cuda_golden, mlp_compiled) { check_losses("mlp", model_mlp, WK_CUDA, true, 1e-4); }
TEST(cuda_golden, transformer_eager) {
    check_losses("transformer", golden_transformer, WK_CUDA, false, 1e-4);
}
TEST(cuda_golden, transformer_compiled) {
    check_losses("transformer", golden_transformer, WK_CUDA, true, 1e-4);
}

/* ---- single ops ----------------------------------------------------------------------------------------------------- */

typedef struct op_case {
    const char *name;  /* of the case: CASE/x, ... */
    const char *in[3]; /* float inputs, each with a gradient d<name> */
    int terms;         /* of the longest sum in forward or backward, for the tolerance */
    wk_tensor *(*call)(const struct op_case *k, const wkg_file *f, wk_tensor *const *x);
} op_case;

static const wkg_tensor *part(const wkg_file *f, const char *name, const char *what) {
    char full[128];
    snprintf(full, sizeof full, "%s/%s", name, what);
    return wkg_find(f, full);
}

static double number(const wkg_file *f, const char *name, const char *what) {
    char full[128];
    snprintf(full, sizeof full, "%s/%s", name, what);
    return wkg_number(f, full);
}

static wk_tensor *tensor(wk_ctx *c, const wkg_file *f, const char *name, const char *what) {
    const wkg_tensor *t = part(f, name, what);
    if (!t) {
        FAIL("no golden %s/%s", name, what);
        return wk_scalar(c, 0);
    }
    return wk_from_data(c, t->dtype == WKG_I64 ? WK_I64 : WK_F32, t->ndim, t->dims, t->data);
}

#define CALL(id, ...)                                                                                        \
    static wk_tensor *call_##id(const op_case *k, const wkg_file *f, wk_tensor *const *x) {                  \
        (void)k, (void)f;                                                                                    \
        return __VA_ARGS__;                                                                                  \
    }
CALL(layer_norm, wk_layer_norm(x[0], x[1], x[2], number(f, k->name, "eps")))
CALL(softmax, wk_softmax(x[0], (int)number(f, k->name, "dim")))
CALL(cross_entropy, wk_cross_entropy(x[0], tensor(wk_ctx_of(x[0]), f, k->name, "target")))
CALL(gelu, wk_gelu(x[0]))
CALL(gelu_tanh, wk_gelu_tanh(x[0]))
CALL(conv2d,
     wk_conv2d(x[0], x[1], x[2], (int64_t)number(f, k->name, "stride"), (int64_t)number(f, k->name, "pad")))
CALL(max_pool2d_k2s2, wk_max_pool2d(x[0], 2))
CALL(max_pool2d_k3s2, wk_max_pool2d_ex(x[0], 3, 2, 0))
CALL(embedding, wk_embedding(x[0], tensor(wk_ctx_of(x[0]), f, k->name, "ids")))
CALL(sdpa, wk_attention(x[0], x[1], x[2], true, 0))
CALL(amax_dim1, wk_max(x[0], (const int64_t[]){1}, 1, false))
CALL(amax_all, wk_max(x[0], NULL, 0, false))
CALL(amax_dim02, wk_max(x[0], (const int64_t[]){0, 2}, 2, false))

static const op_case op_cases[] = {
    {"layer_norm", {"x", "weight", "bias"}, 64, call_layer_norm},
    {"softmax", {"x"}, 32, call_softmax},
    {"softmax_dim1", {"x"}, 32, call_softmax},
    {"cross_entropy", {"x"}, 32, call_cross_entropy},
    {"gelu_erf", {"x"}, 1, call_gelu},
    {"gelu_tanh", {"x"}, 1, call_gelu_tanh},
    {"conv2d", {"x", "weight", "bias"}, 64, call_conv2d},
    {"conv2d_5x2", {"x", "weight", "bias"}, 64, call_conv2d},
    {"conv2d_s1", {"x", "weight", "bias"}, 64, call_conv2d},
    {"max_pool2d_k2s2", {"x"}, 1, call_max_pool2d_k2s2},
    {"max_pool2d_k3s2", {"x"}, 9, call_max_pool2d_k3s2},
    {"embedding", {"weight"}, 8, call_embedding},
    {"sdpa_causal", {"q", "k", "v"}, 64, call_sdpa},
    {"amax_dim1", {"x"}, 1, call_amax_dim1},
    {"amax_all", {"x"}, 1, call_amax_all},
    {"amax_3d_dim02", {"x"}, 1, call_amax_dim02},
};

/* Within `tol` of the largest element of the golden tensor (at least 1). */
static void compare(const wkg_file *f, const char *name, const char *what, wk_tensor *got, double tol) {
    const wkg_tensor *t = part(f, name, what);
    if (!t || !got || wk_numel(got) != t->numel) {
        FAIL("%s/%s: %s", name, what,
             !t    ? "not in the file"
             : got ? "another number of elements"
                   : "no result");
        return;
    }
    float *v = api_read(got);
    const float *want = t->data;
    double worst = 0, scale = 1;
    for (int64_t i = 0; i < t->numel; i++) {
        bool same = v[i] == want[i] || (isnan(v[i]) && isnan(want[i]));
        double off = same ? 0 : fabs((double)v[i] - (double)want[i]);
        worst = isnan(off) ? INFINITY : fmax(worst, off);
        scale = isfinite(want[i]) ? fmax(scale, fabs((double)want[i])) : scale;
    }
    if (!(worst <= tol * scale))
        FAIL("%s/%s is off by %.3g, more than %.3g of %.3g", name, what, worst, tol, scale);
    free(v);
}

typedef struct op_job {
    const op_case *k;
    const wkg_file *f;
} op_job;

/* inputs, then dy (absent for a number) -> y and the inputs' gradients. */
static void op_and_gradients(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out,
                             int nout) {
    (void)c;
    const op_job *job = self;
    int n = nout - 1;
    out[0] = job->k->call(job->k, job->f, in);
    wk_backward_options o;
    wk_backward_options_init(&o);
    o.grads = nin > n ? &in[n] : NULL;
    o.inputs = in;
    o.ninputs = n;
    o.out = out + 1;
    wk_backward_ex(out, 1, &o);
}

static void check_op(wk_ctx *c, const wkg_file *f, const op_case *k, bool compiled) {
    wk_tensor *in[4], *out[4] = {0};
    op_job job = {k, f};
    int n = 0;
    wk_scope_begin(c);
    for (; n < 3 && k->in[n]; n++)
        in[n] = wk_requires_grad(tensor(c, f, k->name, k->in[n]), true);
    int nin = n;
    if (part(f, k->name, "dy"))
        in[nin++] = tensor(c, f, k->name, "dy");
    if (compiled)
        wk_call_n(wk_compile(c, op_and_gradients, &job, NULL), in, nin, out, n + 1);
    else
        op_and_gradients(c, &job, in, nin, out, n + 1);
    /* PyTorch's f32 is 5.6e-7 off its f64; Wick's sums add rounding of a few eps for each doubling of their length. */
    double tol = 5.6e-7 + EPS * (4 + 2 * log2(k->terms + 1));
    if (wk_failed(c))
        FAIL("%s: %s", k->name, wk_message(c));
    wk_error_take(c, NULL);
    compare(f, k->name, "y", out[0], tol);
    for (int i = 0; i < n; i++) {
        char grad[32];
        snprintf(grad, sizeof grad, "d%s", k->in[i]);
        compare(f, k->name, grad, out[1 + i], tol);
    }
    wk_scope_end(c);
}

/* ---- optimizers ----------------------------------------------------------------------------------------------------- */

typedef struct optim_job {
    wk_tensor *p;
    wk_optim *o;
} optim_job;

/* The loss sum(p * g) has gradient g. */
static void optim_step(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    optim_job *j = self;
    out[0] = wk_sum(wk_mul(j->p, in[0]), NULL, 0, false);
    wk_backward(out[0]);
    wk_optim_step(j->o);
}

static void check_optim(wk_ctx *c, const wkg_file *f, const char *name, bool compiled) {
    const wkg_tensor *grads = part(f, name, "grads"), *after = part(f, name, "p_after");
    REQUIRE(grads && after && grads->ndim == 2);
    wk_scope_begin(c);
    optim_job job = {.p = wk_requires_grad(tensor(c, f, name, "p"), true)};
    if (!strcmp(name, "adamw")) {
        wk_adamw_options o;
        wk_adamw_options_init(&o);
        o.lr = number(f, name, "lr");
        o.beta1 = number(f, name, "beta1");
        o.beta2 = number(f, name, "beta2");
        o.eps = number(f, name, "eps");
        o.weight_decay = number(f, name, "weight_decay");
        job.o = wk_adamw(c, &job.p, 1, &o);
    } else {
        wk_sgd_options o;
        wk_sgd_options_init(&o);
        o.lr = number(f, name, "lr");
        o.momentum = number(f, name, "momentum");
        o.weight_decay = number(f, name, "weight_decay");
        o.nesterov = !strcmp(name, "sgd_nesterov");
        job.o = wk_sgd(c, &job.p, 1, &o);
    }
    api_run run = api_runner(c, optim_step, &job, compiled);
    int64_t n = grads->dims[1];
    for (int64_t k = 0; k < grads->dims[0] && !wk_failed(c); k++) {
        wk_tensor *g = wk_from_data(c, WK_F32, 1, &n, (const float *)grads->data + k * n);
        api_call(&run, &g, 1);
        float *v = api_read(job.p);
        /* values of size 1, and one rounding of each of some ten operations, twice: here and in PyTorch */
        CHECK_NEAR_F32(v, (const float *)after->data + k * n, (size_t)n, 4 * EPS, 8 * EPS);
        free(v);
    }
    wk_optim_free(job.o);
    wk_scope_end(c);
}

static void check_ops(wk_device d, bool compiled) {
    wk_ctx *c = context(d);
    if (!c)
        return;
    wkg_file *f = wkg_open("ops");
    REQUIRE(f != NULL);
    for (size_t i = 0; i < sizeof op_cases / sizeof *op_cases; i++)
        check_op(c, f, &op_cases[i], compiled);
    check_optim(c, f, "adamw", compiled);
    check_optim(c, f, "sgd_momentum", compiled);
    check_optim(c, f, "sgd_nesterov", compiled);
    wkg_close(f);
    api_end(c);
}

TEST(golden_ops, eager) { check_ops(WK_CPU, false); }
TEST(golden_ops, compiled) { check_ops(WK_CPU, true); }
TEST(cuda_golden, ops_eager) { check_ops(WK_CUDA, false); }
TEST(cuda_golden, ops_compiled) { check_ops(WK_CUDA, true); }

/* Every case in the file is met by a test. */
TEST(golden_ops, all_cases_are_used) {
    wkg_file *f = wkg_open("ops");
    REQUIRE(f != NULL);
    for (int i = 0; i < f->count; i++) {
        const char *name = f->tensors[i].name, *slash = strchr(name, '/');
        bool used = false;
        REQUIRE(slash != NULL);
        size_t n = (size_t)(slash - name);
        for (size_t k = 0; k < sizeof op_cases / sizeof *op_cases; k++)
            used |= strlen(op_cases[k].name) == n && !strncmp(op_cases[k].name, name, n);
        used |= !strncmp(name, "adamw/", 6) || !strncmp(name, "sgd_momentum/", 13) ||
                !strncmp(name, "sgd_nesterov/", 13);
        if (!used)
            FAIL("golden case %.*s has no test", (int)n, name);
    }
    wkg_close(f);
}
