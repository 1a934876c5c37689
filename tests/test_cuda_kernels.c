/* Kernels on the CUDA device: those written by hand compile and wait for what runs before them, and products give the same
 * bits however their operands lie and are reached. What needs a device is skipped without one. */
#include "backend/cuda/cuda.h"
#include "harness.h"
#include "util_api.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- texts ------------------------------------------------------------------------------------------- */

/* Does a kernel touch memory that others write before it has waited for them? `body`: its PTX. */
static bool waits_first(const char *body) {
    static const char *const accesses[] = {"ld.global",   "st.global", "ld.volatile",
                                           "st.volatile", "atom.",     "red."};
    const char *end = strstr(body, "\n}"), *wait = strstr(body, "griddepcontrol.wait");
    if (!end || !wait || wait > end)
        return false;
    for (int i = 0; i < (int)(sizeof accesses / sizeof *accesses); i++) {
        const char *at = strstr(body, accesses[i]);
        if (at && at < wait)
            return false;
    }
    return true;
}

/* Compiles the kernels that belong to fn; `first`: and looks at what they do first. */
static void check_kernels(wki_nvrtc *rtc, wki_cuda_fn fn, const char *arch, bool first) {
    char *text = wki_cuda_fn_text(fn);
    wki_cu_error err = {0};
    wki_nvrtc_source source = {.text = text, .name = "kernels.cu", .arch = arch};
    wki_nvrtc_binary out = {0};
    if (CHECK(text != NULL) && (wki_nvrtc_compile(rtc, &source, &out, &err) || out.log))
        FAIL("kernel %d for %s: %s", (int)fn, arch, out.log ? out.log : err.text);
    const char *entry = first && out.data ? strstr(out.data, ".entry ") : NULL;
    if (first && !(entry && waits_first(entry)))
        FAIL("kernel %d does not wait first", (int)fn);
    wki_nvrtc_binary_free(&out);
    wki_free(text);
}

/* As a device would have them, all at once; and one by one as PTX. Without a device too. */
TEST(cuda_kernels, compile_and_wait_first) {
    wki_nvrtc *rtc;
    wki_cu_error err = {0};
    if (wki_nvrtc_open(NULL, 0, &rtc, &err))
        SKIP("%s", err.text);
    for (int i = 0; i < WKI_FN_COUNT; i++)
        check_kernels(rtc, (wki_cuda_fn)i, "compute_90", true);
    check_kernels(rtc, WKI_FN_COUNT, "compute_80", false);
    check_kernels(rtc, WKI_FN_COUNT, "sm_90", false);
    wki_nvrtc_close(rtc);
}

/* ---- products ---------------------------------------------------------------------------------------- */

/* One product in many guises: a (m, k) by b (k, n), and linear of a, w (n, k) and a bias, all of them views of
 * longer vectors. */
typedef struct guises {
    int64_t m, n, k, at; /* at: elements that stand before each operand */
} guises;

static wk_tensor *matrix_at(wk_tensor *v, int64_t at, int64_t rows, int64_t cols) {
    return wk_reshape(wk_slice(v, 0, at, at + rows * cols, 1), 2, (int64_t[]){rows, cols});
}

/* `wide` has rows of 5 k elements, of which a is k. */
static wk_tensor *columns_at(wk_tensor *wide, int64_t at, int64_t cols) {
    return wk_slice(wide, 1, at, at + cols, 1);
}

static void product_guises(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    const guises *g = self;
    wk_tensor *a = matrix_at(in[0], g->at, g->m, g->k), *b = matrix_at(in[1], g->at, g->k, g->n);
    wk_tensor *w = matrix_at(in[2], g->at, g->n, g->k), *bias = wk_slice(in[3], 0, g->at, g->at + g->n, 1);
    wk_tensor *here = wk_neg(wk_neg(in[0])), *wide = wk_neg(wk_neg(in[4])); /* made in the same call */
    out[0] = wk_matmul(a, b);
    out[1] = wk_matmul(matrix_at(here, g->at, g->m, g->k), b);
    out[2] = wk_matmul(columns_at(in[4], g->at, g->k), b);
    out[3] = wk_matmul(columns_at(wide, g->at, g->k), b);
    out[4] = wk_linear(a, w, bias);
    out[5] = wk_relu(wk_linear(a, w, bias));
    out[6] = wk_relu(wk_linear(a, w, NULL));
}

enum { GUISES = 7 };

static void run_guises(wk_ctx *c, wk_compiled *f, guises *g, float *const data[4], float *got[GUISES]) {
    const int64_t numel[] = {g->m * g->k, g->k * g->n, g->n * g->k, g->n};
    wk_tensor *in[5], *out[GUISES];
    wk_scope_begin(c);
    for (int i = 0; i < 4; i++) {
        float *v = calloc((size_t)(numel[i] + g->at), sizeof *v);
        memcpy(v + g->at, data[i], (size_t)numel[i] * sizeof *v);
        in[i] = wk_from_data(c, WK_F32, 1, (int64_t[]){numel[i] + g->at}, v);
        free(v);
    }
    float *v = calloc((size_t)(5 * numel[0]), sizeof *v);
    for (int64_t i = 0; i < g->m; i++)
        memcpy(v + i * 5 * g->k + g->at, data[0] + i * g->k, (size_t)g->k * sizeof *v);
    in[4] = wk_from_data(c, WK_F32, 2, (int64_t[]){g->m, 5 * g->k}, v);
    free(v);
    if (f)
        wk_call_n(f, in, 5, out, GUISES);
    else
        product_guises(c, g, in, 5, out, GUISES);
    for (int i = 0; i < GUISES; i++)
        got[i] = api_read(out[i]);
    wk_scope_end(c);
}

/* The same bits wherever operands begin, eager and compiled (launched directly and as a graph), fused or not. */
static void check_guises(int64_t m, int64_t n, int64_t k) {
    wk_ctx *c = wk_ctx_new(NULL);
    wk_use_device(c, WK_CUDA);
    guises g = {m, n, k, 0};
    const int64_t numel[] = {m * k, k * n, n * k, n};
    float *data[4], *first[GUISES] = {NULL};
    for (int i = 0; i < 4; i++) {
        data[i] = malloc((size_t)numel[i] * sizeof *data[i]);
        wkt_fill_normal(data[i], (size_t)numel[i], 1);
    }
    data[0][3] = NAN;
    data[0][2 * k] = INFINITY;
    for (int64_t j = 0; j < k; j++) /* a sum that underflows to -0 */
        data[0][5 * k + j] = 0;
    data[0][5 * k] = 1e-30f;
    data[1][0] = data[2][0] = -1e-30f;
    data[3][0] = -0.0f;
    wk_compile_options o;
    wk_compile_options_init(&o);
    o.strict = true;
    wk_compiled *f = wk_compile(c, product_guises, &g, &o);
    static const int64_t at[] = {0, 1, 1, 3, 1, 1, 1, 0, 4};
    for (int round = 0; round < 11; round++) {
        float *got[GUISES];
        g.at = round < 9 ? at[round] : (int64_t)wkt_below(9);
        bool compiled = round > 0 && round != 3;
        run_guises(c, compiled ? f : NULL, &g, data, got);
        for (int i = 0; i < GUISES; i++) {
            const float *want = round == 0 ? got[i < 4 ? 0 : i] : first[i < 4 ? 0 : i];
            if (!api_same(got[i], want, m * n))
                FAIL("%lld x %lld x %lld, %s, %lld elements on: guise %d has other bits", (long long)m,
                     (long long)n, (long long)k, compiled ? "compiled" : "eager", (long long)g.at, i);
        }
        for (int64_t e = 0; e < m * n; e++) {
            float y = got[4][e];
            if (!CHECK(isnan(y) ? isnan(got[5][e]) : got[5][e] == (y > 0 ? y : 0) && !signbit(got[5][e])))
                break;
        }
        for (int i = 0; i < GUISES; i++) {
            if (round == 0)
                first[i] = got[i];
            else
                free(got[i]);
        }
    }
    for (int i = 0; i < GUISES; i++)
        free(first[i]);
    for (int i = 0; i < 4; i++)
        free(data[i]);
    api_end(c);
}

TEST(cuda_kernels, products_are_strict) {
    wk_ctx *c = wk_ctx_new(NULL);
    const char *why = "";
    bool there = wk_device_available(c, WK_CUDA, &why);
    wk_ctx_free(c);
    if (!there)
        SKIP("no CUDA device");
    check_guises(257, 1031, 513);
    if (!wkt_quick())
        check_guises(1024, 1024, 1024);
}
