/* Structs of other versions of the header: what struct_size says is kept to, wherever a caller's struct is taken. */
#include <stdio.h>
#include <string.h>

#include "harness.h"
#include "util_api.h"

/* A caller's struct of another version of the header: shorter, or longer by 16 bytes. */
typedef union versions {
    size_t struct_size;
    wk_runtime_options runtime;
    wk_backward_options backward;
    wk_compile_options compile;
    wk_adamw_options adamw;
    wk_sgd_options sgd;
    wk_loader_options loader;
    wk_op_desc op;
    char bytes[256];
} versions;

typedef struct version_case {
    const char *name;
    size_t size;
    void (*init)(versions *v);           /* sound, and usable as it is */
    bool (*use)(wk_ctx *c, versions *v); /* false: refused without an error in the context */
} version_case;

static bool shape_of_input(const wk_array *in, const double *attr, wk_array *out,
                           int64_t (*out_size)[WK_MAX_DIMS], char err[256]) {
    (void)attr, (void)err;
    out[0].ndim = in[0].ndim;
    memcpy(out_size[0], in[0].size, (size_t)in[0].ndim * sizeof *in[0].size);
    return true;
}

static void init_runtime(versions *v) { wk_runtime_options_init(&v->runtime); }
static void init_backward(versions *v) { wk_backward_options_init(&v->backward); }
static void init_compile(versions *v) { wk_compile_options_init(&v->compile); }
static void init_adamw(versions *v) { wk_adamw_options_init(&v->adamw); }
static void init_sgd(versions *v) { wk_sgd_options_init(&v->sgd); }
static void init_loader(versions *v) { wk_loader_options_init(&v->loader); }
static void init_op(versions *v) {
    static char name[32];
    wk_op_desc_init(&v->op);
    snprintf(name, sizeof name, "version_%llx", (unsigned long long)wkt_u64() >> 16);
    v->op.name = name;
    v->op.nin = v->op.nout = 1;
    v->op.infer = shape_of_input;
}
static bool use_runtime(wk_ctx *c, versions *v) {
    (void)c;
    wk_runtime *rt = wk_runtime_new(&v->runtime);
    wk_runtime_free(rt);
    return rt != NULL;
}
static bool use_backward(wk_ctx *c, versions *v) {
    wk_tensor *w = wk_requires_grad(wk_ones(c, WK_F32, 0, NULL), true), *loss = wk_mul_scalar(w, 3);
    wk_backward_ex(&loss, 1, &v->backward);
    return wk_failed(c) || wk_item(wk_grad(w)) == 3;
}
static void same(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)self, (void)nin, (void)nout;
    out[0] = in[0];
}
static bool use_compile(wk_ctx *c, versions *v) {
    wk_compiled_free(wk_compile(c, same, NULL, &v->compile));
    return true;
}
static bool use_adamw(wk_ctx *c, versions *v) {
    wk_tensor *w = wk_requires_grad(wk_ones(c, WK_F32, 0, NULL), true);
    wk_optim *o = wk_adamw(c, &w, 1, &v->adamw);
    bool ok = wk_failed(c) || wk_optim_lr(o) == 1e-3;
    wk_optim_free(o);
    return ok;
}
static bool use_sgd(wk_ctx *c, versions *v) {
    wk_tensor *w = wk_requires_grad(wk_ones(c, WK_F32, 0, NULL), true);
    wk_optim *o = wk_sgd(c, &w, 1, &v->sgd);
    bool ok = wk_failed(c) || wk_optim_lr(o) == 1e-3;
    wk_optim_free(o);
    return ok;
}
static bool use_loader(wk_ctx *c, versions *v) {
    static const float data[40];
    wk_field f = {.dtype = WK_F32, .data = data};
    wk_loader *l = wk_loader_new(c, &f, 1, 40, &v->loader);
    bool ok = wk_failed(c) || wk_loader_batches(l) == 2;
    wk_loader_free(l);
    return ok;
}
static bool use_op(wk_ctx *c, versions *v) { return (wk_register_op(c, &v->op) >= 0) == !wk_failed(c); }

#define VERSIONS(kind, type)                                                                                 \
    { #type, sizeof(type), init_##kind, use_##kind }
static const version_case version_cases[] = {VERSIONS(runtime, wk_runtime_options),
                                             VERSIONS(backward, wk_backward_options),
                                             VERSIONS(compile, wk_compile_options),
                                             VERSIONS(adamw, wk_adamw_options),
                                             VERSIONS(sgd, wk_sgd_options),
                                             VERSIONS(loader, wk_loader_options),
                                             VERSIONS(op, wk_op_desc)};

static void check_version(wk_ctx *c, const version_case *k, versions *v, bool taken, const char *how) {
    bool ok = k->use(c, v), said = wk_failed(c), silent = k->use == use_runtime;
    wk_error e = {0};
    wk_error_take(c, &e);
    if ((ok && !said) != taken)
        FAIL("%s, %s: %s: %s", k->name, how, taken ? "refused" : "taken", e.message);
    if (said && (e.status != WK_INVALID || !strstr(e.message, k->name)))
        FAIL("%s, %s: %s", k->name, how, e.message);
    if (silent)
        CHECK(!said);
}

static void oldest_op(wk_ctx *c, const wk_op_desc *d) {
    CHECK_EQ_I(wk_register_op(c, d), -1);
    CHECK_ERROR(c, WK_INVALID);
}

TEST(versions, structs_of_other_versions) {
    wk_ctx *c = api_ctx(false);
    for (size_t i = 0; i < sizeof version_cases / sizeof *version_cases; i++) {
        const version_case *k = &version_cases[i];
        versions v;
        REQUIRE(k->size + 16 <= sizeof v.bytes);
        memset(&v, 0, sizeof v);
        k->init(&v);
        check_version(c, k, &v, true, "this version");
        memset(&v, 0, sizeof v);
        k->init(&v);
        v.struct_size = k->size + 16;
        check_version(c, k, &v, true, "a newer one, nothing set");
        v.bytes[k->size + wkt_below(16)] = 1;
        check_version(c, k, &v, false, "a newer one, something set");
        memset(&v, 0, sizeof v);
        k->init(&v);
        v.struct_size = 0;
        check_version(c, k, &v, false, "no size");
        v.struct_size = SIZE_MAX - wkt_below(1000);
        check_version(c, k, &v, false, "an impossible size");
        /* Only struct_size: every field is at its default, whatever lies behind it. An op needs its name, and says so. */
        memset(&v, 0xa5, sizeof v);
        v.struct_size = sizeof v.struct_size;
        if (k->use != use_op)
            check_version(c, k, &v, true, "the oldest");
        else
            oldest_op(c, &v.op);
    }
    oldest_op(c, NULL);
    api_end(c);
}
