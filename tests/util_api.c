/* Helpers of the tests on the public API. */
#include "util_api.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

wk_ctx *api_ctx(bool dev) {
    const char *want = getenv("WICK_TEST_DEVICE");
    wk_ctx *c = wk_ctx_new(NULL);
    if (!c) {
        FAIL("no context");
        abort();
    }
    if (dev && want && *want && strcmp(want, "cpu") != 0)
        wk_use_device(c, !strcmp(want, "cuda") ? WK_CUDA : WK_DEVICE_COUNT);
    return c;
}

void api_end(wk_ctx *c) {
    if (wk_failed(c))
        FAIL("the context failed: %s", wk_message(c));
    wk_ctx_free(c);
}

wk_tensor *api_vector(wk_ctx *c, int n, const float *v) {
    return wk_from_data(c, WK_F32, 1, (int64_t[]){n}, v);
}

wk_tensor *api_normal(wk_ctx *c, int ndim, const int64_t *size) {
    int64_t n = 1;
    for (int i = 0; i < ndim; i++)
        n *= size[i];
    float *v = malloc((size_t)(n ? n : 1) * sizeof *v);
    wkt_fill_normal(v, (size_t)n, 1);
    wk_tensor *t = wk_from_data(c, WK_F32, ndim, size, v);
    free(v);
    return t;
}

wk_tensor *api_classes(wk_ctx *c, int64_t n, int64_t classes) {
    int64_t *v = malloc((size_t)(n ? n : 1) * sizeof *v);
    for (int64_t i = 0; i < n; i++)
        v[i] = (int64_t)wkt_below((uint64_t)classes);
    wk_tensor *t = wk_from_data(c, WK_I64, 1, &n, v);
    free(v);
    return t;
}

float *api_read(wk_tensor *t) {
    int64_t n = wk_numel(t);
    float *v = calloc((size_t)(n ? n : 1), sizeof *v);
    CHECK(wk_read(t, v, (size_t)n * sizeof *v));
    return v;
}

void api_check_error(wk_ctx *c, wk_status want, const char *file, int line) {
    wk_error e;
    wkt_check(wk_failed(c), file, line, "the context has failed");
    wk_status got = wk_error_take(c, &e);
    if (got != want)
        wkt_fail(file, line, "status %s (%s), expected %s", wk_status_name(got), got ? e.message : "",
                 wk_status_name(want));
    wkt_check(got == WK_OK || e.message[0], file, line, "the error has a message");
    wkt_check(!wk_failed(c), file, line, "the context is usable after wk_error_take");
    wkt_check_near(wk_item(wk_add_scalar(wk_scalar(c, 1), 2)), 3, 0, file, line, "1 + 2 after wk_error_take");
}

float *api_params(wk_module *m, int64_t *count) {
    wk_tensor *p[64];
    int n = wk_module_params(m, p, 64);
    CHECK(n <= 64);
    *count = 0;
    for (int i = 0; i < n; i++)
        *count += wk_numel(p[i]);
    float *v = calloc((size_t)*count + 1, sizeof *v), *at = v;
    for (int i = 0; i < n; at += wk_numel(p[i]), i++)
        CHECK(wk_read(p[i], at, (size_t)wk_numel(p[i]) * sizeof *v));
    return v;
}

bool api_same(const float *a, const float *b, int64_t n) {
    const void *p = a, *q = b;
    return !memcmp(p, q, (size_t)n * sizeof *a);
}

wk_stats api_stats(wk_ctx *c) {
    wk_stats s = {.struct_size = sizeof s};
    wk_stats_get(c, &s);
    return s;
}

api_run api_runner(wk_ctx *c, wk_fn fn, void *self, bool compiled) {
    wk_compile_options o;
    wk_compile_options_init(&o);
    o.strict = true;
    return (api_run){c, fn, self, compiled ? wk_compile(c, fn, self, &o) : NULL};
}

wk_tensor *api_call(const api_run *r, wk_tensor *const *in, int nin) {
    if (r->f)
        return wk_call(r->f, in, nin);
    wk_tensor *out = NULL;
    wk_scope_begin(r->c);
    r->fn(r->c, r->self, in, nin, &out, 1);
    if (!wk_failed(r->c))
        wk_keep(out);
    wk_scope_end(r->c);
    return out;
}

void api_identity(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)self, (void)nin;
    for (int i = 0; i < nout; i++)
        out[i] = in[0];
}
