/* Matrix products by cuBLASLt. A plan holds what a product of given shapes needs (descriptors, layouts and the
 * heuristic's first algorithm), is found again by an exact comparison of its key, and is never rebuilt. cuBLASLt
 * is column-major: our row-major C is its transpose, so C' = B' A' and our B is its first operand. Calls base,
 * cu_library and cuBLASLt. */
#include "backend/cuda/cu_library.h"
#include "backend/cuda/cu_private.h"
#include "base/alloc.h"
#include "base/hash.h"

#include <string.h>

/* What a plan depends on; compared byte by byte, so every member is 64 bits wide. */
typedef struct plan_key {
    int64_t type, epilogue;
    int64_t m, n, k, batch;
    int64_t a_turned, b_turned; /* 1: columns are contiguous instead of rows */
    int64_t lda, ldb, ldc;
    int64_t a_bs, b_bs, c_bs;
    int64_t alignment, workspace_limit;
} plan_key;

struct wki_cu_gemm_plan {
    plan_key key;
    uint64_t hash;
    wki_cu_gemm_plan *next;
    wki_cu_blas *blas;
    bool empty;
    wki_ltdesc desc;
    wki_ltlayout a, b, c;
    wki_ltalgo algo;
    size_t workspace;
    /* The bias pointer is part of the descriptor, so calls with another one take turns. */
    pthread_mutex_t lock;
    wki_cu_ptr bias;
};

#define BUCKETS 256

struct wki_cu_blas {
    wki_dl *lib;
    wki_lt_api api;
    wki_lthandle handle;
    pthread_mutex_t lock; /* for plans */
    wki_cu_gemm_plan *plans[BUCKETS];
};

static const struct {
    wki_ltdatatype type;
    int64_t size; /* bytes */
} element[] = {
    [WKI_CU_GEMM_F32] = {WKI_LT_R_32F, 4},
    [WKI_CU_GEMM_BF16] = {WKI_LT_R_16BF, 2},
};

static const uint32_t lt_epilogue[] = {
    [WKI_CU_EPILOGUE_NONE] = WKI_LT_EPILOGUE_DEFAULT,
    [WKI_CU_EPILOGUE_BIAS] = WKI_LT_EPILOGUE_BIAS,
    [WKI_CU_EPILOGUE_RELU] = WKI_LT_EPILOGUE_RELU,
    [WKI_CU_EPILOGUE_RELU_BIAS] = WKI_LT_EPILOGUE_RELU_BIAS,
};

static bool has_bias(int64_t epilogue) {
    return epilogue == WKI_CU_EPILOGUE_BIAS || epilogue == WKI_CU_EPILOGUE_RELU_BIAS;
}

static int lt_checked(const wki_lt_api *api, wki_cu_error *err, const char *call, wki_ltstatus status) {
    if (__builtin_expect(status == 0, 1))
        return WKI_CU_OK;
    int code = status == WKI_LT_NOT_SUPPORTED ? WKI_CU_UNSUPPORTED : WKI_CU_FAILED;
    return wki_cu_fail_call(err, code, call, status, api->cublasLtGetStatusName(status), NULL, NULL);
}

#define LT(blas, err, call, ...) lt_checked(&(blas)->api, (err), #call, (blas)->api.call(__VA_ARGS__))

/* ---- The library ----------------------------------------------------------------------------------------- */

static void destroy_plan(wki_cu_gemm_plan *p) {
    const wki_lt_api *api = &p->blas->api;
    if (p->desc)
        api->cublasLtMatmulDescDestroy(p->desc);
    wki_ltlayout layouts[] = {p->a, p->b, p->c};
    for (size_t i = 0; i < 3; i++)
        if (layouts[i])
            api->cublasLtMatrixLayoutDestroy(layouts[i]);
    pthread_mutex_destroy(&p->lock);
    wki_free(p);
}

void wki_cu_blas_destroy(wki_cu_blas *blas) {
    if (!blas)
        return;
    for (size_t i = 0; i < BUCKETS; i++)
        for (wki_cu_gemm_plan *p = blas->plans[i], *next; p; p = next) {
            next = p->next;
            destroy_plan(p);
        }
    if (blas->handle)
        blas->api.cublasLtDestroy(blas->handle);
    wki_dl_close(blas->lib);
    pthread_mutex_destroy(&blas->lock);
    wki_free(blas);
}

static int open_blas(wki_cu_device *dev, wki_cu_blas **out, wki_cu_error *err) {
    wki_cu_blas *blas = wki_calloc(1, sizeof *blas);
    if (!blas)
        return wki_cu_fail(err, WKI_CU_HOST_MEMORY, "no host memory to open cuBLASLt");
    pthread_mutex_init(&blas->lock, NULL);
    int code = wki_cu_library_open(WKI_CU_LIB_CUBLASLT, &dev->cu->options, dev->cu->driver_version / 1000,
                                   &blas->lib, &blas->api, err);
    if (!code)
        code = LT(blas, err, cublasLtCreate, &blas->handle);
    if (code) {
        wki_cu_blas_destroy(blas);
        return code;
    }
    *out = blas;
    return WKI_CU_OK;
}

static int get_blas(wki_cu_device *dev, wki_cu_blas **out, wki_cu_error *err) {
    int code = WKI_CU_OK;
    pthread_mutex_lock(&dev->lock);
    if (!dev->blas)
        code = open_blas(dev, &dev->blas, err);
    *out = dev->blas;
    pthread_mutex_unlock(&dev->lock);
    return code;
}

/* ---- Keys ------------------------------------------------------------------------------------------------ */

/* The leading dimension of a rows x cols operand and whether its columns are the contiguous direction. */
static bool operand_layout(int64_t rows, int64_t cols, int64_t rs, int64_t cs, int64_t *turned, int64_t *ld) {
    if (cs == 1 || cols == 1) {
        *turned = 0;
        *ld = rows == 1 ? cols : rs;
        if (*ld >= cols)
            return true;
    }
    if (rs == 1 || rows == 1) {
        *turned = 1;
        *ld = cols == 1 ? rows : cs;
        return *ld >= rows;
    }
    return false;
}

static int make_key(const wki_cu_gemm *g, plan_key *key, wki_cu_error *err) {
    *key = (plan_key){
        .type = g->type,
        .epilogue = g->epilogue,
        .m = g->m,
        .n = g->n,
        .k = g->k,
        .batch = g->batch,
        .ldc = g->m == 1 ? g->n : g->c_ld,
        .alignment = g->alignment ? (int64_t)g->alignment : 16,
        .workspace_limit = (int64_t)(g->workspace_limit ? g->workspace_limit : WKI_CU_GEMM_WORKSPACE),
    };
    if (g->m < 0 || g->n < 0 || g->k < 0 || g->batch < 0)
        return wki_cu_fail(err, WKI_CU_INVALID, "a matrix product of negative size");
    if (key->alignment & (key->alignment - 1) || key->alignment < element[g->type].size)
        return wki_cu_fail(err, WKI_CU_INVALID, "a matrix product of operands aligned to %lld bytes",
                           (long long)key->alignment);
    if (g->m == 0 || g->n == 0 || g->batch == 0)
        return WKI_CU_OK;
    if (g->k == 0)
        return wki_cu_fail(err, WKI_CU_UNSUPPORTED, "a matrix product over nothing (k = 0)");
    if (!operand_layout(g->m, g->k, g->a_rs, g->a_cs, &key->a_turned, &key->lda) ||
        !operand_layout(g->k, g->n, g->b_rs, g->b_cs, &key->b_turned, &key->ldb))
        return wki_cu_fail(err, WKI_CU_UNSUPPORTED,
                           "a matrix product with strides (%lld, %lld) and (%lld, %lld): copy first",
                           (long long)g->a_rs, (long long)g->a_cs, (long long)g->b_rs, (long long)g->b_cs);
    if (key->ldc < g->n)
        return wki_cu_fail(err, WKI_CU_INVALID, "a matrix product with rows of %lld in steps of %lld",
                           (long long)g->n, (long long)g->c_ld);
    if (g->batch > 1) {
        key->a_bs = g->a_bs;
        key->b_bs = g->b_bs;
        key->c_bs = g->c_bs;
    }
    return WKI_CU_OK;
}

/* ---- Plans ----------------------------------------------------------------------------------------------- */

/* A column-major view for cuBLASLt: rows are the contiguous direction. */
static int make_layout(const wki_cu_gemm_plan *p, int64_t rows, int64_t cols, int64_t ld,
                       int64_t batch_stride, wki_ltlayout *out, wki_cu_error *err) {
    wki_cu_blas *blas = p->blas;
    int32_t batch = (int32_t)p->key.batch;
    int code = LT(blas, err, cublasLtMatrixLayoutCreate, out, element[p->key.type].type, (uint64_t)rows,
                  (uint64_t)cols, ld);
    if (code || batch == 1)
        return code;
    code = LT(blas, err, cublasLtMatrixLayoutSetAttribute, *out, WKI_LT_LAYOUT_BATCH_COUNT, &batch,
              sizeof batch);
    if (!code)
        code = LT(blas, err, cublasLtMatrixLayoutSetAttribute, *out, WKI_LT_LAYOUT_BATCH_OFFSET,
                  &batch_stride, sizeof batch_stride);
    return code;
}

static int set_bias(wki_cu_gemm_plan *p, wki_cu_ptr bias, wki_cu_error *err) {
    int code = LT(p->blas, err, cublasLtMatmulDescSetAttribute, p->desc, WKI_LT_DESC_BIAS_POINTER, &bias,
                  sizeof bias);
    if (!code)
        p->bias = bias;
    return code;
}

static int describe(wki_cu_gemm_plan *p, wki_cu_error *err) {
    wki_cu_blas *blas = p->blas;
    const plan_key *k = &p->key;
    const int32_t first = k->b_turned ? WKI_LT_OP_T : WKI_LT_OP_N;
    const int32_t second = k->a_turned ? WKI_LT_OP_T : WKI_LT_OP_N;
    const uint32_t epilogue = lt_epilogue[k->epilogue];
    int code = LT(blas, err, cublasLtMatmulDescCreate, &p->desc, WKI_LT_COMPUTE_32F, WKI_LT_R_32F);
    if (!code)
        code =
            LT(blas, err, cublasLtMatmulDescSetAttribute, p->desc, WKI_LT_DESC_TRANSA, &first, sizeof first);
    if (!code)
        code = LT(blas, err, cublasLtMatmulDescSetAttribute, p->desc, WKI_LT_DESC_TRANSB, &second,
                  sizeof second);
    if (!code)
        code = LT(blas, err, cublasLtMatmulDescSetAttribute, p->desc, WKI_LT_DESC_EPILOGUE, &epilogue,
                  sizeof epilogue);
    /* The heuristic wants some bias pointer; its alignment is what counts. */
    if (!code && has_bias(k->epilogue))
        code = set_bias(p, (wki_cu_ptr)k->alignment, err);
    if (!code)
        code = k->b_turned ? make_layout(p, k->k, k->n, k->ldb, k->b_bs, &p->b, err)
                           : make_layout(p, k->n, k->k, k->ldb, k->b_bs, &p->b, err);
    if (!code)
        code = k->a_turned ? make_layout(p, k->m, k->k, k->lda, k->a_bs, &p->a, err)
                           : make_layout(p, k->k, k->m, k->lda, k->a_bs, &p->a, err);
    if (!code)
        code = make_layout(p, k->n, k->m, k->ldc, k->c_bs, &p->c, err);
    return code;
}

static int choose(wki_cu_gemm_plan *p, wki_cu_error *err) {
    wki_cu_blas *blas = p->blas;
    static const int alignments[] = {WKI_LT_PREF_ALIGN_A, WKI_LT_PREF_ALIGN_B, WKI_LT_PREF_ALIGN_C,
                                     WKI_LT_PREF_ALIGN_D};
    const uint64_t workspace = (uint64_t)p->key.workspace_limit;
    const uint32_t alignment = (uint32_t)(p->key.alignment < 256 ? p->key.alignment : 256);
    wki_ltpref pref = NULL;
    wki_ltheuristic best;
    int found = 0;
    int code = LT(blas, err, cublasLtMatmulPreferenceCreate, &pref);
    if (!code)
        code = LT(blas, err, cublasLtMatmulPreferenceSetAttribute, pref, WKI_LT_PREF_WORKSPACE, &workspace,
                  sizeof workspace);
    for (size_t i = 0; !code && i < sizeof alignments / sizeof *alignments; i++)
        code = LT(blas, err, cublasLtMatmulPreferenceSetAttribute, pref, alignments[i], &alignment,
                  sizeof alignment);
    if (!code)
        code = LT(blas, err, cublasLtMatmulAlgoGetHeuristic, blas->handle, p->desc, p->b, p->a, p->c, p->c,
                  pref, 1, &best, &found);
    if (!code && (found < 1 || best.state != 0))
        code = wki_cu_fail(err, WKI_CU_UNSUPPORTED, "cuBLASLt has no algorithm");
    if (!code) {
        p->algo = best.algo;
        p->workspace = best.workspaceSize;
    }
    if (pref)
        blas->api.cublasLtMatmulPreferenceDestroy(pref);
    return code;
}

static wki_cu_gemm_plan *find_plan(const wki_cu_blas *blas, const plan_key *key, uint64_t hash) {
    wki_cu_gemm_plan *p = blas->plans[hash % BUCKETS];
    while (p && (p->hash != hash || memcmp(&p->key, key, sizeof *key) != 0))
        p = p->next;
    return p;
}

/* With blas's lock held. A plan that fails is kept off the table. */
static int add_plan(wki_cu_blas *blas, const plan_key *key, uint64_t hash, wki_cu_gemm_plan **out,
                    wki_cu_error *err) {
    wki_cu_gemm_plan *p = wki_calloc(1, sizeof *p);
    if (!p)
        return wki_cu_fail(err, WKI_CU_HOST_MEMORY, "no host memory for a plan");
    p->key = *key;
    p->hash = hash;
    p->blas = blas;
    p->empty = key->m == 0 || key->n == 0 || key->batch == 0;
    pthread_mutex_init(&p->lock, NULL);
    int code = p->empty ? WKI_CU_OK : describe(p, err);
    if (!code && !p->empty)
        code = choose(p, err);
    if (code) {
        destroy_plan(p);
        return code;
    }
    p->next = blas->plans[hash % BUCKETS];
    blas->plans[hash % BUCKETS] = p;
    *out = p;
    return WKI_CU_OK;
}

int wki_cu_gemm_prepare(wki_cu_device *dev, const wki_cu_gemm *g, wki_cu_gemm_plan **out, wki_cu_error *err) {
    *out = NULL;
    plan_key key;
    wki_cu_blas *blas;
    int code = make_key(g, &key, err);
    if (!code)
        code = wki_cu_enter(dev, err);
    if (!code)
        code = get_blas(dev, &blas, err);
    if (code)
        return code;
    uint64_t hash = wki_hash(&key, sizeof key, 0);
    pthread_mutex_lock(&blas->lock);
    *out = find_plan(blas, &key, hash);
    if (!*out)
        code = add_plan(blas, &key, hash, out, err);
    pthread_mutex_unlock(&blas->lock);
    if (code)
        wki_cu_fail_more(err, ", for a product of %lld x %lld x %lld, batch %lld", (long long)g->m,
                         (long long)g->n, (long long)g->k, (long long)g->batch);
    return code;
}

size_t wki_cu_gemm_workspace(const wki_cu_gemm_plan *plan) { return plan->workspace; }

/* ---- Running --------------------------------------------------------------------------------------------- */

static int find_workspace(const wki_cu_gemm_plan *p, wki_cu_stream *s, const wki_cu_gemm_args *args,
                          wki_cu_ptr *out, wki_cu_error *err) {
    *out = args->workspace;
    size_t have = args->workspace ? args->workspace_bytes : WKI_CU_GEMM_WORKSPACE;
    if (p->workspace > have)
        return wki_cu_fail(err, WKI_CU_INVALID, "a matrix product needs a workspace of %zu bytes and has %zu",
                           p->workspace, have);
    if (args->workspace || p->workspace == 0)
        return WKI_CU_OK;
    if (!s->workspace) {
        int code = wki_cu_alloc(s, WKI_CU_GEMM_WORKSPACE, "matmul workspace", &s->workspace, err);
        if (code)
            return code;
    }
    *out = s->workspace;
    return WKI_CU_OK;
}

static int run_locked(wki_cu_gemm_plan *p, wki_cu_stream *s, const wki_cu_gemm_args *args,
                      wki_cu_ptr workspace, wki_cu_error *err) {
    if (has_bias(p->key.epilogue) && args->bias != p->bias) {
        int code = set_bias(p, args->bias, err);
        if (code)
            return code;
    }
    return LT(p->blas, err, cublasLtMatmul, p->blas->handle, p->desc, &args->alpha,
              (const void *)(uintptr_t)args->b, p->b, (const void *)(uintptr_t)args->a, p->a, &args->beta,
              (const void *)(uintptr_t)args->c, p->c, (void *)(uintptr_t)args->c, p->c, &p->algo,
              (void *)(uintptr_t)workspace, p->workspace, s->handle);
}

int wki_cu_gemm_run(wki_cu_gemm_plan *p, wki_cu_stream *s, const wki_cu_gemm_args *args, wki_cu_error *err) {
    if (p->empty)
        return WKI_CU_OK;
    bool biased = has_bias(p->key.epilogue);
    wki_cu_ptr all = args->a | args->b | args->c | (biased ? args->bias : 0);
    if (!args->a || !args->b || !args->c || (biased && !args->bias))
        return wki_cu_fail(err, WKI_CU_INVALID, "a matrix product lacks an operand");
    if (all & (wki_cu_ptr)(p->key.alignment - 1))
        return wki_cu_fail(err, WKI_CU_INVALID, "a matrix product's operand is not aligned to %lld bytes",
                           (long long)p->key.alignment);
    wki_cu_ptr workspace;
    int code = find_workspace(p, s, args, &workspace, err);
    if (!code)
        code = wki_cu_enter(s->dev, err);
    if (code)
        return code;
    if (!biased)
        return run_locked(p, s, args, workspace, err);
    pthread_mutex_lock(&p->lock);
    code = run_locked(p, s, args, workspace, err);
    pthread_mutex_unlock(&p->lock);
    return code;
}
