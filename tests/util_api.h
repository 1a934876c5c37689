/* What the tests on the public API share: contexts that end with a check, small tensors, reading back, and running a wk_fn
 * eager or compiled. Public header and harness only.
 */
#pragma once
#include <wick.h>

/* A context, on the device named by WICK_TEST_DEVICE (default cpu) when `dev` is true, else on the CPU. */
wk_ctx *api_ctx(bool dev);
/* Checks that nothing failed, and frees. */
void api_end(wk_ctx *c);

#define SIZE(...)                                                                                            \
    (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[]) { __VA_ARGS__ }

wk_tensor *api_vector(wk_ctx *c, int n, const float *v);         /* f32 (n) */
wk_tensor *api_normal(wk_ctx *c, int ndim, const int64_t *size); /* f32, from the harness's random numbers */
wk_tensor *api_classes(wk_ctx *c, int64_t n, int64_t classes);   /* i64 (n), each in [0, classes) */
/* All elements of an f32 tensor, to be freed; fails the test and gives zeros where it cannot be read. */
float *api_read(wk_tensor *t);

/* The context failed with this status: takes the error, and checks that a plain computation works afterwards. */
#define CHECK_ERROR(c, status) api_check_error((c), (status), __FILE__, __LINE__)
void api_check_error(wk_ctx *c, wk_status s, const char *file, int line);

/* All parameters of a module, one after the other, to be freed; *n elements. */
float *api_params(wk_module *m, int64_t *n);

/* Do n floats have the same bits? */
bool api_same(const float *a, const float *b, int64_t n);

wk_stats api_stats(wk_ctx *c);

/* A wk_fn: every output is the first input. */
void api_identity(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout);

/* Runs the same function eager or compiled. */
typedef struct api_run {
    wk_ctx *c;
    wk_fn fn;
    void *self;
    wk_compiled *f; /* NULL: eager */
} api_run;
api_run api_runner(wk_ctx *c, wk_fn fn, void *self,
                   bool compiled); /* compiled: strict, as eager to the bit */
wk_tensor *api_call(const api_run *r, wk_tensor *const *in, int nin);
