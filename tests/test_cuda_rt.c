/* Tests of the CUDA run time (backend/cuda/cu.h). Those of messages need nothing; those of the compiler need
 * NVRTC; the rest need a device and are skipped without one. */
#define _GNU_SOURCE /* dladdr */

#include "backend/cuda/cu.h"
#include "base/alloc.h"
#include "harness.h"

#include <dlfcn.h>
#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB ((size_t)1 << 20)

/* A call that must succeed; its message and the end of the function when it does not. */
#define CALL(function, ...)                                                                                  \
    do {                                                                                                     \
        wki_cu_error call_err = {0};                                                                         \
        int call_code = function(__VA_ARGS__, &call_err);                                                    \
        if (call_code != WKI_CU_OK) {                                                                        \
            FAIL("%s is %d: %s", #function, call_code, call_err.text);                                       \
            return;                                                                                          \
        }                                                                                                    \
    } while (0)

/* Sets a variable and returns a copy of what it was, for reset_env. */
static char *set_env(const char *name, const char *value) {
    const char *old = getenv(name);
    char *copy = old ? strdup(old) : NULL;
    setenv(name, value, 1);
    return copy;
}

static void reset_env(const char *name, char *old) {
    if (old)
        setenv(name, old, 1);
    else
        unsetenv(name);
    free(old);
}

/* ---- Messages -------------------------------------------------------------------------------------------- */

TEST(cuda_rt, says_what_is_missing) {
    wki_cu *cu = NULL;
    wki_nvrtc *rtc = NULL;
    wki_cu_error err = {0};
    int64_t live = wki_alloc_live();
    const wki_cu_options absent = {.path = "/nowhere/cuda", .driver = "libcuda-absent.so.1"};
    CHECK_EQ_I(wki_cu_open(&absent, &cu, &err), WKI_CU_NO_LIBRARY);
    CHECK(cu == NULL);
    CHECK_EQ_I(err.code, WKI_CU_NO_LIBRARY);
    CHECK_STR(err.text,
              "no CUDA device: libcuda-absent.so.1 not found in /nowhere/cuda, on the loader's path or "
              "in the usual places");
    CHECK_EQ_I(wki_cu_open(&absent, &cu, NULL), WKI_CU_NO_LIBRARY);

    const wki_cu_options no_compiler = {.nvrtc = "/nowhere/libnvrtc.so"};
    CHECK_EQ_I(wki_nvrtc_open(&no_compiler, 0, &rtc, &err), WKI_CU_NO_LIBRARY);
    CHECK(rtc == NULL && strstr(err.text, "/nowhere/libnvrtc.so not found"));

    const wki_cu_options wrong = {.driver = "libm.so.6"};
    CHECK_EQ_I(wki_cu_open(&wrong, &cu, &err), WKI_CU_NO_LIBRARY);
    CHECK(strstr(err.text, "no CUDA device: libm.so.6 lacks cuInit, cuDriverGetVersion, "));

    char *old = set_env("WICK_CUDA_PATH", "/nowhere/bogus");
    const wki_cu_options by_name = {.driver = "libcuda-absent.so.1"};
    CHECK_EQ_I(wki_cu_open(&by_name, &cu, &err), WKI_CU_NO_LIBRARY);
    CHECK(strstr(err.text, "libcuda-absent.so.1 not found in /nowhere/bogus, "));
    reset_env("WICK_CUDA_PATH", old);
    CHECK_EQ_I(wki_alloc_live(), live);
}

/* A library in the site-packages of a Python environment is found by where it is: libm under another name, so
 * that the message about its symbols tells which file was opened. */
TEST(cuda_rt, looks_in_python_environments) {
    char root[] = "/tmp/wick-cu-XXXXXX", text[256], at[256];
    Dl_info libm;
    REQUIRE(mkdtemp(root) && dladdr((void *)(uintptr_t)&cbrt, &libm));
    snprintf(text, sizeof text,
             "cd %s && mkdir -p bin lib/python3.99/site-packages/nvidia/wick/lib && touch bin/python3 && "
             "chmod +x bin/python3 && ln -s \"$LIBM\" "
             "lib/python3.99/site-packages/nvidia/wick/lib/libwick-cu.so.1",
             root);
    snprintf(at, sizeof at, "%s/lib/python3.99/site-packages/nvidia/wick/lib/libwick-cu.so.1 lacks nvrtc",
             root);
    setenv("LIBM", libm.dli_fname, 1);
    REQUIRE(system(text) == 0);
    const wki_cu_options options = {.nvrtc = "libwick-cu.so.1"};
    wki_nvrtc *rtc;
    wki_cu_error err;

    char *old = set_env("VIRTUAL_ENV", root);
    CHECK_EQ_I(wki_nvrtc_open(&options, 0, &rtc, &err), WKI_CU_NO_LIBRARY);
    CHECK(strncmp(err.text, at, strlen(at)) == 0);
    reset_env("VIRTUAL_ENV", old);

    snprintf(text, sizeof text, "/nowhere:%s/bin/", root);
    old = set_env("PATH", text);
    CHECK_EQ_I(wki_nvrtc_open(&options, 0, &rtc, &err), WKI_CU_NO_LIBRARY);
    CHECK(strncmp(err.text, at, strlen(at)) == 0);
    reset_env("PATH", old);

    snprintf(text, sizeof text, "rm -r %s", root);
    CHECK_EQ_I(system(text), 0);
}

/* ---- The compiler ---------------------------------------------------------------------------------------- */

static const char vector_add[] =
    "extern \"C\" __global__ void vector_add(const float *a, const float *b, float *c,\n"
    "                                     long long n) {\n"
    "    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;\n"
    "    if (i < n) c[i] = a[i] + b[i];\n"
    "}\n";

TEST(cuda_rt, compiles_without_a_device) {
    wki_nvrtc *rtc;
    wki_cu_error err = {0};
    int64_t live = wki_alloc_live();
    if (wki_nvrtc_open(NULL, 0, &rtc, &err) == WKI_CU_NO_LIBRARY)
        SKIP("%s", err.text);
    REQUIRE(rtc);
    int major, minor;
    wki_nvrtc_version(rtc, &major, &minor);
    CHECK(major >= 12);
    static const char *const archs[] = {"sm_80", "sm_90", "sm_90a"};
    for (size_t i = 0; i < sizeof archs / sizeof *archs; i++) {
        const wki_nvrtc_source source = {.text = vector_add, .name = "vector_add.cu", .arch = archs[i]};
        wki_nvrtc_binary binary;
        CALL(wki_nvrtc_compile, rtc, &source, &binary);
        CHECK(binary.size > 100 && memcmp(binary.data, "\177ELF", 4) == 0);
        CHECK(binary.log == NULL);
        wki_nvrtc_binary_free(&binary);
    }

    /* Nothing is contracted; fma by name stays. `helper` has no __device__. */
    static const char product[] =
        "float helper(float a, float b, float c) { return a * b + c; }\n"
        "extern \"C\" __global__ void k(float *p) { p[3] = helper(p[0], p[1], p[2]) SUFFIX; }\n";
    static const char *const options[] = {"-DSUFFIX=", "-DSUFFIX=+fmaf(p[4],p[5],p[6])"};
    for (int i = 0; i < 2; i++) {
        const wki_nvrtc_source source = {product, "product.cu", "compute_80", &options[i], 1};
        wki_nvrtc_binary ptx;
        CALL(wki_nvrtc_compile, rtc, &source, &ptx);
        CHECK(strstr(ptx.data, ".target sm_80") != NULL);
        CHECK_EQ_I(strstr(ptx.data, "fma.rn") != NULL, i);
        wki_nvrtc_binary_free(&ptx);
    }

    const wki_nvrtc_source bad = {
        .text = "int a;\n__global__ void k() { undeclared = 1; }\n", .name = "bad.cu", .arch = "sm_90"};
    wki_nvrtc_binary none;
    CHECK_EQ_I(wki_nvrtc_compile(rtc, &bad, &none, &err), WKI_CU_COMPILE);
    CHECK_EQ_I(err.code, WKI_CU_COMPILE);
    CHECK(strstr(err.text, "nvrtcCompileProgram: NVRTC_ERROR_COMPILATION, bad.cu(2): error: ") == err.text);
    CHECK(none.data == NULL && none.log && strstr(none.log, "undeclared"));
    wki_nvrtc_binary_free(&none);

    const wki_nvrtc_source option = {vector_add, "v.cu", "sm_90", (const char *const[]){"--no-such-option"},
                                     1};
    CHECK_EQ_I(wki_nvrtc_compile(rtc, &option, &none, &err), WKI_CU_COMPILE);
    CHECK(strstr(err.text, "NVRTC_ERROR_INVALID_OPTION"));
    wki_nvrtc_binary_free(&none);

    char arch[24];
    CALL(wki_nvrtc_arch, rtc, 9, 0, arch);
    CHECK_STR(arch, "sm_90");
    CALL(wki_nvrtc_arch, rtc, 99, 9, arch);
    CHECK(strncmp(arch, "compute_", 8) == 0);
    CHECK_EQ_I(wki_nvrtc_arch(rtc, 1, 0, arch, &err), WKI_CU_UNSUPPORTED);
    wki_nvrtc_close(rtc);
    CHECK_EQ_I(wki_alloc_live(), live);
}

/* ---- Devices --------------------------------------------------------------------------------------------- */

typedef struct gpu {
    wki_cu *cu;
    wki_cu_device *dev;
    wki_cu_stream *s;
    wki_cu_error err;
    int64_t live;
} gpu;

/* False when there is none, with the reason in err; what else goes wrong is a failure. */
static bool gpu_open(gpu *g, size_t memory_limit) {
    *g = (gpu){.live = wki_alloc_live()};
    int code = wki_cu_open(NULL, &g->cu, &g->err);
    if (!code)
        code = wki_cu_device_open(g->cu, 0, memory_limit, &g->dev, &g->err);
    if (!code)
        code = wki_cu_stream_create(g->dev, &g->s, &g->err);
    if (code && code != WKI_CU_NO_LIBRARY && code != WKI_CU_NO_DEVICE)
        FAIL("%s", g->err.text);
    return code == 0;
}

static void gpu_close(gpu *g) {
    wki_cu_memory_stats st;
    CHECK_EQ_I(wki_cu_stream_sync(g->s, &g->err), WKI_CU_OK);
    wki_cu_stream_destroy(g->s);
    wki_cu_memory_stats_get(g->dev, &st);
    CHECK_EQ_I(st.live, 0);
    wki_cu_device_close(g->dev);
    wki_cu_close(g->cu);
    CHECK_EQ_I(wki_alloc_live(), g->live);
}

#define NEED_GPU(g)                                                                                          \
    do {                                                                                                     \
        if (!gpu_open((g), 0))                                                                               \
            SKIP("%s", (g)->err.text);                                                                       \
    } while (0)

TEST(cuda_rt, device_and_its_errors) {
    gpu g;
    NEED_GPU(&g);
    const wki_cu_device_info *info = wki_cu_device_info_of(g.dev);
    CHECK(wki_cu_device_count(g.cu) >= 1 && wki_cu_driver_version(g.cu) >= 12000);
    CHECK(info->name[0] && info->major >= 5 && info->sm_count > 0 && info->warp_size == 32);
    CHECK(info->memory > 512 * MIB && info->l2 > 0 && info->smem_optin >= 48 << 10 &&
          info->sm_threads >= 1024);
    wki_cu_device *none;
    CHECK_EQ_I(wki_cu_device_open(g.cu, 99, 0, &none, &g.err), WKI_CU_NO_DEVICE);
    CHECK(none == NULL && strstr(g.err.text, "no CUDA device 99: there "));
    wki_cu_module *m;
    char junk[64] = "junk";
    CHECK_EQ_I(wki_cu_module_load(g.dev, junk, &m, &g.err), WKI_CU_FAILED);
    CHECK(m == NULL && g.err.result != 0 &&
          strstr(g.err.text, "cuModuleLoadData: CUDA_ERROR_") == g.err.text);
    gpu_close(&g);
}

TEST(cuda_rt, copies_and_fills) {
    gpu g;
    NEED_GPU(&g);
    size_t n = 1 + wkt_below(3 * MIB);
    wki_cu_ptr a, b, none;
    static unsigned char host[3 * MIB], back[3 * MIB];
    unsigned char *pinned;
    for (size_t i = 0; i < n; i++)
        host[i] = (unsigned char)(wkt_u64() >> 56);
    CALL(wki_cu_host_alloc, g.dev, n, (void **)&pinned);
    CALL(wki_cu_alloc, g.s, n, "a", &a);
    CALL(wki_cu_alloc, g.s, n, "b", &b);
    CALL(wki_cu_alloc, g.s, 0, "nothing", &none);
    CHECK_EQ_I(none, 0);
    CALL(wki_cu_copy_h2d, g.s, a, host, n);
    CALL(wki_cu_copy_d2d, g.s, b, a, n);
    CALL(wki_cu_copy_d2h, g.s, pinned, b, n);
    CALL(wki_cu_stream_sync, g.s);
    CHECK_MEM(pinned, host, n);
    bool done;
    CALL(wki_cu_stream_done, g.s, &done);
    CHECK(done);

    CALL(wki_cu_write, g.s, b, host, n);
    CALL(wki_cu_read, g.s, back, b, n);
    CHECK_MEM(back, host, n);
    CALL(wki_cu_fill8, g.s, a, 0xab, n);
    CALL(wki_cu_read, g.s, back, a, n);
    memset(host, 0xab, n);
    CHECK_MEM(back, host, n);
    CALL(wki_cu_fill32, g.s, a, 0x3f800000, n / 4);
    CALL(wki_cu_read, g.s, back, a, n);
    for (size_t i = 0; i + 4 <= n; i += 4)
        memcpy(host + i, &(float){1.0f}, 4);
    CHECK_MEM(back, host, n);

    wki_cu_event *start, *end;
    float ms = -1;
    CALL(wki_cu_event_create, g.dev, true, &start);
    CALL(wki_cu_event_create, g.dev, true, &end);
    CALL(wki_cu_event_record, start, g.s);
    CALL(wki_cu_copy_d2d, g.s, b, a, n);
    CALL(wki_cu_event_record, end, g.s);
    CALL(wki_cu_event_sync, g.dev, end);
    CALL(wki_cu_event_elapsed, g.dev, start, end, &ms);
    CHECK(ms > 0 && ms < 1000);
    wki_cu_event_destroy(g.dev, start);
    wki_cu_event_destroy(g.dev, end);
    CALL(wki_cu_free, g.s, a);
    CALL(wki_cu_free, g.s, b);
    CALL(wki_cu_free, g.s, 0);
    CHECK_EQ_I(wki_cu_free(g.s, a, &g.err), WKI_CU_INVALID);
    wki_cu_host_free(g.dev, pinned);
    gpu_close(&g);
}

/* Blocks keep what is written in them while others come and go. */
TEST(cuda_rt, allocator_blocks_do_not_overlap) {
    gpu g;
    NEED_GPU(&g);
    enum { HELD = 64 };
    struct {
        wki_cu_ptr p;
        size_t words;
        uint32_t mark;
    } held[HELD] = {0};
    static uint32_t back[6 * MIB];
    for (int step = 0; step < (wkt_quick() ? 200 : 1000); step++) {
        size_t i = wkt_below(HELD);
        if (held[i].p) {
            CALL(wki_cu_read, g.s, back, held[i].p, 4 * held[i].words);
            size_t wrong = 0;
            for (size_t j = 0; j < held[i].words; j++)
                wrong += back[j] != held[i].mark;
            CHECK_EQ_I(wrong, 0);
            CALL(wki_cu_free, g.s, held[i].p);
        }
        held[i].words = 1 + wkt_below(wkt_below(8) ? 20000 : 6 * MIB);
        held[i].mark = (uint32_t)wkt_u64();
        CALL(wki_cu_alloc, g.s, 4 * held[i].words, "random", &held[i].p);
        CALL(wki_cu_fill32, g.s, held[i].p, held[i].mark, held[i].words);
    }
    for (int i = 0; i < HELD; i++)
        CALL(wki_cu_free, g.s, held[i].p);
    CALL(wki_cu_memory_trim, g.dev);
    wki_cu_memory_stats st;
    wki_cu_memory_stats_get(g.dev, &st);
    CHECK_EQ_I(st.reserved, 0);
    CHECK(st.driver_allocs == st.driver_frees && st.driver_allocs < st.allocs / 4);
    gpu_close(&g);
}

TEST(cuda_rt, allocator_out_of_memory) {
    gpu g;
    if (!gpu_open(&g, 64 * MIB))
        SKIP("%s", g.err.text);
    wki_cu_ptr a, b;
    CALL(wki_cu_alloc, g.s, 40 * MIB, "weights", &a);
    CHECK_EQ_I(wki_cu_alloc(g.s, 30 * MIB, "activations", &b, &g.err), WKI_CU_DEVICE_MEMORY);
    CHECK(strstr(g.err.text, "out of device memory: activations asked for 30.0 MiB; the device has ") ==
          g.err.text);
    CHECK(strstr(g.err.text, " of a limit of 64.0 MiB, ") && strstr(g.err.text, "weights 40.0 MiB (1)"));
    CALL(wki_cu_free, g.s, a);
    CALL(wki_cu_alloc, g.s, 60 * MIB, "activations", &b); /* the cached 40 MiB are given back for it */
    CALL(wki_cu_free, g.s, b);
    gpu_close(&g);

    NEED_GPU(&g);
    size_t more = wki_cu_device_info_of(g.dev)->memory + MIB;
    CHECK_EQ_I(wki_cu_alloc(g.s, more, "everything", &a, &g.err), WKI_CU_DEVICE_MEMORY);
    CHECK(strstr(g.err.text, "out of device memory: everything asked for ") == g.err.text);
    CALL(wki_cu_alloc, g.s, MIB, "something", &a); /* the context is as it was */
    CALL(wki_cu_fill8, g.s, a, 1, MIB);
    CALL(wki_cu_free, g.s, a);
    gpu_close(&g);
}

/* ---- Kernels --------------------------------------------------------------------------------------------- */

#define MAX_ADD 100000

static void run_vector_add(gpu *g, wki_cu_function *f, long long n) {
    size_t bytes = (size_t)n * sizeof(float);
    static float a[MAX_ADD], b[MAX_ADD], c[MAX_ADD];
    wki_cu_ptr da, db, dc;
    wkt_fill_normal(a, (size_t)n, 1);
    wkt_fill_normal(b, (size_t)n, 1);
    CALL(wki_cu_alloc, g->s, bytes, "a", &da);
    CALL(wki_cu_alloc, g->s, bytes, "b", &db);
    CALL(wki_cu_alloc, g->s, bytes, "c", &dc);
    CALL(wki_cu_copy_h2d, g->s, da, a, bytes);
    CALL(wki_cu_copy_h2d, g->s, db, b, bytes);
    CALL(wki_cu_fill8, g->s, dc, 0xff, bytes);
    void *params[] = {&da, &db, &dc, &n};
    const wki_cu_kernel k = {f,    {(unsigned)((n + 255) / 256), 1, 1}, {256, 1, 1}, 0, params, "vector_add",
                             false};
    CALL(wki_cu_launch, g->s, &k);
    CALL(wki_cu_read, g->s, c, dc, bytes);
    for (long long i = 0; i < n; i++)
        a[i] += b[i];
    CHECK_MEM(c, a, bytes);
    CALL(wki_cu_free, g->s, da);
    CALL(wki_cu_free, g->s, db);
    CALL(wki_cu_free, g->s, dc);
}

TEST(cuda_rt, launches_kernels) {
    gpu g;
    NEED_GPU(&g);
    wki_cu_module *m, *again, *other;
    wki_cu_function *f, *none;
    const wki_nvrtc_source source = {.text = vector_add, .name = "vector_add.cu"};
    CALL(wki_cu_module_get, g.dev, &source, &m);
    CALL(wki_cu_module_get, g.dev, &source, &again);
    CHECK(m == again);
    const wki_nvrtc_source with_option = {vector_add, "v.cu", NULL, (const char *const[]){"-DX"}, 1};
    CALL(wki_cu_module_get, g.dev, &with_option, &other);
    CHECK(m != other);
    /* PTX goes through the driver's own compiler. */
    char ptx_arch[24];
    const wki_cu_device_info *info = wki_cu_device_info_of(g.dev);
    snprintf(ptx_arch, sizeof ptx_arch, "compute_%d%d", info->major, info->minor);
    const wki_nvrtc_source as_ptx = {.text = vector_add, .name = "vector_add.cu", .arch = ptx_arch};
    CALL(wki_cu_module_get, g.dev, &as_ptx, &other);
    CALL(wki_cu_module_function, g.dev, m, "vector_add", 0, &f);
    run_vector_add(&g, f, 1 + (long long)wkt_below(MAX_ADD));
    CALL(wki_cu_module_function, g.dev, other, "vector_add", 0, &f);
    run_vector_add(&g, f, 1 + (long long)wkt_below(MAX_ADD));

    CHECK_EQ_I(wki_cu_module_function(g.dev, m, "no_such", 0, &none, &g.err), WKI_CU_FAILED);
    CHECK(strstr(g.err.text, "no_such: cuModuleGetFunction: CUDA_ERROR_NOT_FOUND") == g.err.text);
    const wki_cu_kernel too_big = {f, {1, 1, 1}, {4096, 1, 1}, 0, NULL, "too_big", false};
    CHECK_EQ_I(wki_cu_launch(g.s, &too_big, &g.err), WKI_CU_FAILED);
    CHECK(strstr(g.err.text, "too_big: cuLaunchKernel: CUDA_ERROR_INVALID_VALUE") == g.err.text);
    CHECK(strstr(g.err.text, "block 4096 x 1 x 1"));
    gpu_close(&g);
}

TEST(cuda_rt, large_shared_memory) {
    gpu g;
    NEED_GPU(&g);
    static const char text[] =
        "extern \"C\" __global__ void turn(int *p) {\n"
        "    extern __shared__ int s[];\n"
        "    for (int i = threadIdx.x; i < 20000; i += blockDim.x) s[i] = p[i];\n"
        "    __syncthreads();\n"
        "    for (int i = threadIdx.x; i < 20000; i += blockDim.x) p[i] = s[19999 - i];\n"
        "}\n";
    if (wki_cu_device_info_of(g.dev)->smem_optin < 80000)
        SKIP("the device gives a block less than 80000 bytes of shared memory");
    const wki_nvrtc_source source = {.text = text, .name = "turn.cu"};
    wki_cu_module *m;
    wki_cu_function *f;
    wki_cu_ptr p;
    static int host[20000];
    CALL(wki_cu_module_get, g.dev, &source, &m);
    CALL(wki_cu_module_function, g.dev, m, "turn", 80000, &f);
    CALL(wki_cu_alloc, g.s, 80000, "p", &p);
    for (int i = 0; i < 20000; i++)
        host[i] = i;
    CALL(wki_cu_copy_h2d, g.s, p, host, 80000);
    const wki_cu_kernel k = {f, {1, 1, 1}, {512, 1, 1}, 80000, (void *[]){&p}, "turn", false};
    CALL(wki_cu_launch, g.s, &k);
    CALL(wki_cu_read, g.s, host, p, 80000);
    for (int i = 0; i < 20000; i++)
        REQUIRE(host[i] == 19999 - i);
    CALL(wki_cu_free, g.s, p);
    gpu_close(&g);
}

/* ---- Matrix products ------------------------------------------------------------------------------------- */

static float round_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    u = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000u;
    memcpy(&x, &u, 4);
    return x;
}

/* A tensor on the host in f32, whose values the device's type holds exactly, and on the device. */
typedef struct operand {
    size_t n;
    float *host;
    wki_cu_ptr dev;
} operand;

static void to_device(gpu *g, wki_cu_gemm_type type, operand *x) {
    if (type == WKI_CU_GEMM_F32) {
        CALL(wki_cu_write, g->s, x->dev, x->host, 4 * x->n);
        return;
    }
    uint16_t *half = malloc(2 * x->n);
    REQUIRE(half);
    for (size_t i = 0; i < x->n; i++) {
        uint32_t u;
        memcpy(&u, &x->host[i], 4);
        half[i] = (uint16_t)(u >> 16);
    }
    CALL(wki_cu_write, g->s, x->dev, half, 2 * x->n);
    free(half);
}

static void from_device(gpu *g, wki_cu_gemm_type type, const operand *x, float *out) {
    if (type == WKI_CU_GEMM_F32) {
        CALL(wki_cu_read, g->s, out, x->dev, 4 * x->n);
        return;
    }
    uint16_t *half = malloc(2 * x->n);
    REQUIRE(half);
    CALL(wki_cu_read, g->s, half, x->dev, 2 * x->n);
    for (size_t i = 0; i < x->n; i++) {
        uint32_t u = (uint32_t)half[i] << 16;
        memcpy(&out[i], &u, 4);
    }
    free(half);
}

static void operand_make(gpu *g, wki_cu_gemm_type type, size_t n, operand *x) {
    *x = (operand){.n = n, .host = malloc(4 * n)};
    REQUIRE(x->host);
    wkt_fill_normal(x->host, n, 1);
    for (size_t i = 0; i < n && type == WKI_CU_GEMM_BF16; i++)
        x->host[i] = round_bf16(x->host[i]);
    CALL(wki_cu_alloc, g->s, 4 * n, "operand", &x->dev);
    to_device(g, type, x);
}

static void operand_drop(gpu *g, operand *x) {
    free(x->host);
    CALL(wki_cu_free, g->s, x->dev);
}

static void check_product(const wki_cu_gemm *q, const wki_cu_gemm_args *args, const operand *a,
                          const operand *b, const operand *c, const operand *bias, const float *got) {
    double unit = q->type == WKI_CU_GEMM_F32 ? FLT_EPSILON / 2 : 1.0 / 256;
    size_t outside = 0;
    for (int64_t z = 0; z < q->batch; z++)
        for (int64_t i = 0; i < q->m; i++) {
            for (int64_t j = 0; j < q->n; j++) {
                double sum = 0, size = 0;
                for (int64_t p = 0; p < q->k; p++) {
                    double t = (double)a->host[z * q->a_bs + i * q->a_rs + p * q->a_cs] *
                               b->host[z * q->b_bs + p * q->b_rs + j * q->b_cs];
                    sum += t;
                    size += fabs(t);
                }
                double old = args->beta == 0 ? 0 : (double)c->host[z * q->c_bs + i * q->c_ld + j];
                double more = q->epilogue & 1 ? (double)bias->host[j] : 0;
                double want = args->alpha * sum + args->beta * old + more;
                size = fabs(args->alpha) * size + fabs(args->beta * old) + fabs(more);
                /* Any order of k + 3 roundings in f32, then one to the output's type. Some of cuBLASLt's bf16
                 * algorithms add the bias in a second pass, to a product already rounded. */
                double tol = (double)(q->k + 3) * (FLT_EPSILON / 2) * size + unit * fabs(want);
                if (q->type == WKI_CU_GEMM_BF16 && q->epilogue & 1)
                    tol += unit * fabs(want - more);
                if (q->epilogue >= WKI_CU_EPILOGUE_RELU)
                    want = fmax(want, 0);
                double x = got[z * q->c_bs + i * q->c_ld + j];
                outside += !(fabs(x - want) <= tol);
            }
            /* The gap between rows is not written. */
            for (int64_t j = q->n; j < q->c_ld; j++)
                outside += got[z * q->c_bs + i * q->c_ld + j] != c->host[z * q->c_bs + i * q->c_ld + j];
        }
    if (outside)
        FAIL("%zu of %lld elements are wrong: type %d epilogue %d, %lld x %lld x %lld batch %lld, a (%lld, "
             "%lld, "
             "%lld) b (%lld, %lld, %lld) c (%lld, %lld)",
             outside, (long long)(q->m * q->n * q->batch), (int)q->type, (int)q->epilogue, (long long)q->m,
             (long long)q->n, (long long)q->k, (long long)q->batch, (long long)q->a_rs, (long long)q->a_cs,
             (long long)q->a_bs, (long long)q->b_rs, (long long)q->b_cs, (long long)q->b_bs,
             (long long)q->c_ld, (long long)q->c_bs);
}

/* Strides of a rows x cols matrix, contiguous along rows or columns, with some padding. */
static void choose_strides(bool turned, int64_t rows, int64_t cols, int64_t *rs, int64_t *cs, int64_t *size) {
    int64_t ld = (turned ? rows : cols) + wkt_range(0, 5);
    *rs = turned ? 1 : ld;
    *cs = turned ? ld : 1;
    *size = ld * (turned ? cols : rows);
}

static void run_product(gpu *g, wki_cu_gemm *q, bool a_turned, bool b_turned) {
    int64_t a_size, b_size;
    choose_strides(a_turned, q->m, q->k, &q->a_rs, &q->a_cs, &a_size);
    choose_strides(b_turned, q->k, q->n, &q->b_rs, &q->b_cs, &b_size);
    bool share_a = wkt_below(3) == 0;
    q->a_bs = share_a ? 0 : a_size;
    q->b_bs = b_size;
    q->c_ld = q->n + wkt_range(0, 5);
    q->c_bs = q->c_ld * q->m;
    q->alignment = q->type == WKI_CU_GEMM_F32 ? 4 : 2;
    operand a, b, c, bias;
    operand_make(g, q->type, (size_t)(share_a ? a_size : a_size * q->batch), &a);
    operand_make(g, q->type, (size_t)(b_size * q->batch), &b);
    operand_make(g, q->type, (size_t)(q->c_bs * q->batch), &c);
    operand_make(g, q->type, (size_t)q->n, &bias);
    wki_cu_gemm_args args = {.a = a.dev, .b = b.dev, .c = c.dev, .bias = bias.dev, .alpha = 1.5f};
    args.beta = wkt_below(2) ? 0.5f : 0;
    if (args.beta == 0) { /* then C is not read: a NaN there does no harm */
        for (int64_t i = 0; i < q->batch * q->m; i++)
            for (int64_t j = 0; j < q->n; j++)
                c.host[i * q->c_ld + j] = NAN;
        to_device(g, q->type, &c);
    }
    wki_cu_gemm_plan *plan, *again;
    float *got = malloc(4 * c.n);
    REQUIRE(got);
    CALL(wki_cu_gemm_prepare, g->dev, q, &plan);
    CALL(wki_cu_gemm_prepare, g->dev, q, &again);
    CHECK(plan == again);
    CALL(wki_cu_gemm_run, plan, g->s, &args);
    from_device(g, q->type, &c, got);
    check_product(q, &args, &a, &b, &c, &bias, got);
    free(got);
    operand_drop(g, &a);
    operand_drop(g, &b);
    operand_drop(g, &c);
    operand_drop(g, &bias);
}

TEST(cuda_rt, products_match_a_double_reference) {
    gpu g;
    NEED_GPU(&g);
    for (int type = WKI_CU_GEMM_F32; type <= WKI_CU_GEMM_BF16; type++)
        for (int epilogue = 0; epilogue < 4; epilogue++)
            for (int turned = 0; turned < 4; turned++)
                for (int batch = 1; batch <= 3; batch += 2) {
                    wki_cu_gemm q = {.type = (wki_cu_gemm_type)type, .epilogue = (wki_cu_epilogue)epilogue};
                    q.m = wkt_range(1, 70);
                    q.n = wkt_range(1, 70);
                    q.k = wkt_range(1, 200);
                    q.batch = batch;
                    run_product(&g, &q, turned & 1, turned & 2);
                }
    /* Vectors, where a stride means nothing. */
    for (int one = 1; one < 8; one++) {
        wki_cu_gemm q = {.m = one & 1 ? 1 : 33, .n = one & 2 ? 1 : 20, .k = one & 4 ? 1 : 47, .batch = 1};
        run_product(&g, &q, wkt_below(2), wkt_below(2));
    }
    gpu_close(&g);
}

TEST(cuda_rt, products_that_are_refused) {
    gpu g;
    NEED_GPU(&g);
    wki_cu_gemm_plan *plan;
    const wki_cu_gemm good = {
        .m = 8, .n = 8, .k = 8, .batch = 1, .a_rs = 8, .a_cs = 1, .b_rs = 8, .b_cs = 1, .c_ld = 8};
    wki_cu_gemm q = good;
    q.a_cs = 2;
    q.a_rs = 16;
    CHECK_EQ_I(wki_cu_gemm_prepare(g.dev, &q, &plan, &g.err), WKI_CU_UNSUPPORTED);
    CHECK(strstr(g.err.text, "strides (16, 2) and (8, 1): copy first"));
    q = good;
    q.b_rs = 4; /* rows overlap */
    CHECK_EQ_I(wki_cu_gemm_prepare(g.dev, &q, &plan, &g.err), WKI_CU_UNSUPPORTED);
    q = good;
    q.k = 0;
    CHECK_EQ_I(wki_cu_gemm_prepare(g.dev, &q, &plan, &g.err), WKI_CU_UNSUPPORTED);
    q = good;
    q.c_ld = 7;
    CHECK_EQ_I(wki_cu_gemm_prepare(g.dev, &q, &plan, &g.err), WKI_CU_INVALID);
    q = good;
    q.m = 0;
    CALL(wki_cu_gemm_prepare, g.dev, &q, &plan);
    CALL(wki_cu_gemm_run, plan, g.s, &(wki_cu_gemm_args){0});
    CALL(wki_cu_gemm_prepare, g.dev, &good, &plan);
    CHECK_EQ_I(wki_cu_gemm_run(plan, g.s, &(wki_cu_gemm_args){.a = 512, .b = 512}, &g.err), WKI_CU_INVALID);
    CHECK_EQ_I(wki_cu_gemm_run(plan, g.s, &(wki_cu_gemm_args){.a = 516, .b = 512, .c = 512}, &g.err),
               WKI_CU_INVALID);
    CHECK(strstr(g.err.text, "aligned to 16 bytes"));
    gpu_close(&g);
}

/* ---- Graphs and the ring --------------------------------------------------------------------------------- */

/* What a captured kernel reads afresh at every launch. */
typedef struct arguments {
    wki_cu_ptr in, out;
    float scale;
    int n;
} arguments;

static const char scale_text[] = "struct arguments { const float *in; float *out; float scale; int n; };\n"
                                 "extern \"C\" __global__ void scale(const arguments *a) {\n"
                                 "    for (int i = threadIdx.x; i < a->n; i += blockDim.x)\n"
                                 "        a->out[i] = a->in[i] * a->scale;\n"
                                 "}\n";

TEST(cuda_rt, graph_with_a_ring_of_arguments) {
    gpu g;
    NEED_GPU(&g);
    enum { N = 3000, LAUNCHES = 64 };
    const wki_nvrtc_source source = {.text = scale_text, .name = "scale.cu"};
    wki_cu_module *m;
    wki_cu_function *f;
    wki_cu_ptr in, out, block;
    wki_cu_ring *ring;
    wki_cu_graph *graph;
    static float host[N], back[LAUNCHES][N];
    CALL(wki_cu_module_get, g.dev, &source, &m);
    CALL(wki_cu_module_function, g.dev, m, "scale", 0, &f);
    CALL(wki_cu_alloc, g.s, sizeof host, "in", &in);
    CALL(wki_cu_alloc, g.s, sizeof back, "out", &out);
    CALL(wki_cu_alloc, g.s, sizeof(arguments), "arguments", &block);
    wkt_fill_normal(host, N, 1);
    CALL(wki_cu_write, g.s, in, host, sizeof host);
    CALL(wki_cu_ring_create, g.s, 4, sizeof(arguments), &ring);

    /* Two kernels in a row: the second does the same again, so the graph has two nodes. */
    const wki_cu_kernel one = {f, {1, 1, 1}, {256, 1, 1}, 0, (void *[]){&block}, "scale", false},
                        two[2] = {one, one};
    CALL(wki_cu_capture_begin, g.s);
    CHECK(wki_cu_capturing(g.s));
    CALL(wki_cu_launch_many, g.s, two, 2);
    wki_cu_ptr refused;
    CHECK_EQ_I(wki_cu_alloc(g.s, 64, "inside", &refused, &g.err), WKI_CU_INVALID);
    CHECK_EQ_I(wki_cu_stream_sync(g.s, &g.err), WKI_CU_INVALID);
    CHECK_EQ_I(wki_cu_ring_submit(ring, block, 8, &g.err), WKI_CU_INVALID);
    CALL(wki_cu_capture_end, g.s, &graph);
    CHECK(!wki_cu_capturing(g.s));
    CHECK_EQ_I(wki_cu_graph_nodes(graph), 2);
    CHECK_EQ_I(wki_cu_graph_launch(graph, g.s, &g.err), WKI_CU_INVALID);
    CALL(wki_cu_graph_instantiate, graph);
    CALL(wki_cu_graph_upload, graph, g.s);

    float scales[LAUNCHES];
    int64_t heap = wki_alloc_count();
    for (int i = 0; i < LAUNCHES; i++) {
        arguments *args;
        void *again, *slot;
        scales[i] = (float)wkt_normal();
        CALL(wki_cu_ring_acquire, ring, &slot);
        CALL(wki_cu_ring_acquire, ring, &again);
        CHECK(slot == again);
        args = slot;
        *args = (arguments){in, out + (wki_cu_ptr)i * sizeof host, scales[i], N};
        CALL(wki_cu_ring_submit, ring, block, sizeof *args);
        CALL(wki_cu_graph_launch, graph, g.s);
    }
    CHECK_EQ_I(wki_alloc_count(), heap); /* the steady state allocates nothing */
    CALL(wki_cu_read, g.s, back, out, sizeof back);
    for (int i = 0; i < LAUNCHES; i++)
        for (int j = 0; j < N; j++)
            REQUIRE(back[i][j] == host[j] * scales[i]);

    CHECK_EQ_I(wki_cu_ring_submit(ring, block, 8, &g.err), WKI_CU_INVALID); /* nothing is acquired */
    wki_cu_graph_destroy(graph);
    wki_cu_ring_destroy(ring);
    CHECK_EQ_I(wki_cu_ring_create(g.s, 3, 64, &ring, &g.err), WKI_CU_INVALID);
    CALL(wki_cu_free, g.s, in);
    CALL(wki_cu_free, g.s, out);
    CALL(wki_cu_free, g.s, block);
    gpu_close(&g);
}

/* A product and a kernel that uses it, replayed over changing inputs. */
TEST(cuda_rt, graph_whose_first_kernel_gets_new_arguments) {
    gpu g;
    NEED_GPU(&g);
    enum { LAUNCHES = 64 };
    static const wki_nvrtc_source source = {
        .text =
            "extern \"C\" __global__ void keep(float *a, float v) { *a = v; }\n"
            "extern \"C\" __global__ void append(const float *a, float *out, int *n) { out[(*n)++] = *a; }\n",
        .name = "append.cu"};
    wki_cu_module *m;
    wki_cu_function *keep, *append;
    wki_cu_ptr a, out, n;
    wki_cu_graph *graph;
    float v = 0, want[LAUNCHES], got[LAUNCHES];
    CALL(wki_cu_module_get, g.dev, &source, &m);
    CALL(wki_cu_module_function, g.dev, m, "keep", 0, &keep);
    CALL(wki_cu_module_function, g.dev, m, "append", 0, &append);
    CALL(wki_cu_alloc, g.s, sizeof v, "a", &a);
    CALL(wki_cu_alloc, g.s, sizeof got, "out", &out);
    CALL(wki_cu_alloc, g.s, sizeof(int), "n", &n);
    CALL(wki_cu_fill32, g.s, n, 0, 1);
    const wki_cu_kernel first = {keep, {1, 1, 1}, {1, 1, 1}, 0, (void *[]){&a, &v}, "keep", false},
                        then = {append, {1, 1, 1}, {1, 1, 1}, 0, (void *[]){&a, &out, &n}, "append", false};
    CALL(wki_cu_capture_begin, g.s);
    CALL(wki_cu_launch, g.s, &first);
    CALL(wki_cu_launch, g.s, &then);
    CALL(wki_cu_capture_end, g.s, &graph);
    CHECK_EQ_I(wki_cu_graph_first(graph, &first, &g.err), WKI_CU_INVALID);
    CALL(wki_cu_graph_instantiate, graph);
    for (int i = 0; i < LAUNCHES; i++) { /* none waits for the one before it */
        v = want[i] = (float)wkt_normal();
        CALL(wki_cu_graph_first, graph, &first);
        CALL(wki_cu_graph_launch, graph, g.s);
    }
    CALL(wki_cu_read, g.s, got, out, sizeof got);
    CHECK_MEM(got, want, sizeof want);
    wki_cu_graph_destroy(graph);
    CALL(wki_cu_free, g.s, a);
    CALL(wki_cu_free, g.s, out);
    CALL(wki_cu_free, g.s, n);
    gpu_close(&g);
}

TEST(cuda_rt, graph_with_a_product) {
    gpu g;
    NEED_GPU(&g);
    enum { N = 96 };
    wki_cu_gemm q = {.type = WKI_CU_GEMM_F32,
                     .epilogue = WKI_CU_EPILOGUE_BIAS,
                     .m = N,
                     .n = N,
                     .k = N,
                     .batch = 1,
                     .a_rs = N,
                     .a_cs = 1,
                     .b_rs = 1,
                     .b_cs = N,
                     .c_ld = N,
                     .c_bs = N * N};
    operand a, b, c, bias;
    operand_make(&g, q.type, N * N, &a);
    operand_make(&g, q.type, N * N, &b);
    operand_make(&g, q.type, N * N, &c);
    operand_make(&g, q.type, N, &bias);
    wki_cu_gemm_plan *plan;
    wki_cu_graph *graph;
    wki_cu_ptr workspace = 0;
    CALL(wki_cu_gemm_prepare, g.dev, &q, &plan);
    size_t need = wki_cu_gemm_workspace(plan);
    CALL(wki_cu_alloc, g.s, need, "workspace", &workspace);
    const wki_cu_gemm_args args = {a.dev, b.dev, c.dev, bias.dev, 1, 0, workspace, need};
    CALL(wki_cu_capture_begin, g.s);
    CALL(wki_cu_gemm_run, plan, g.s, &args);
    CALL(wki_cu_capture_end, g.s, &graph);
    CALL(wki_cu_graph_instantiate, graph);
    static float got[N * N];
    for (int i = 0; i < 3; i++) {
        wkt_fill_normal(a.host, a.n, 1);
        wkt_fill_normal(bias.host, bias.n, 1);
        to_device(&g, q.type, &a);
        to_device(&g, q.type, &bias);
        CALL(wki_cu_graph_launch, graph, g.s);
        from_device(&g, q.type, &c, got);
        check_product(&q, &args, &a, &b, &c, &bias, got);
    }
    wki_cu_graph_destroy(graph);
    CALL(wki_cu_free, g.s, workspace);
    operand_drop(&g, &a);
    operand_drop(&g, &b);
    operand_drop(&g, &c);
    operand_drop(&g, &bias);
    gpu_close(&g);
}

TEST(cuda_rt, capture_can_be_given_up) {
    gpu g;
    NEED_GPU(&g);
    wki_cu_graph *graph;
    wki_cu_ptr p;
    CHECK_EQ_I(wki_cu_capture_end(g.s, &graph, &g.err), WKI_CU_INVALID);
    CALL(wki_cu_capture_begin, g.s);
    CHECK_EQ_I(wki_cu_capture_begin(g.s, &g.err), WKI_CU_INVALID);
    wki_cu_capture_abort(g.s);
    CALL(wki_cu_alloc, g.s, 100, "after", &p);
    CALL(wki_cu_fill8, g.s, p, 0, 100);
    CALL(wki_cu_stream_sync, g.s);
    CALL(wki_cu_free, g.s, p);
    gpu_close(&g);
}

/* ---- Streams and threads --------------------------------------------------------------------------------- */

static const char slow_text[] =
    "extern \"C\" __global__ void slow(unsigned *p, unsigned n, unsigned mark) {\n"
    "    for (int i = 0; i < 200; i++) __nanosleep(20000);\n"
    "    for (unsigned i = threadIdx.x; i < n; i += blockDim.x) p[i] = mark;\n"
    "}\n";

/* Memory freed on a stream that still writes it reaches another only behind an event. */
TEST(cuda_rt, memory_moves_between_streams_in_order) {
    gpu g;
    if (!gpu_open(&g, 32 * MIB))
        SKIP("%s", g.err.text);
    const wki_nvrtc_source source = {.text = slow_text, .name = "slow.cu"};
    wki_cu_module *m;
    wki_cu_function *f;
    wki_cu_stream *other;
    wki_cu_ptr p, q;
    unsigned n = 20 * MIB / 4, mark = 7;
    static uint32_t back[5 * MIB];
    CALL(wki_cu_module_get, g.dev, &source, &m);
    CALL(wki_cu_module_function, g.dev, m, "slow", 0, &f);
    CALL(wki_cu_stream_create, g.dev, &other);
    CALL(wki_cu_alloc, g.s, 20 * MIB, "p", &p);
    const wki_cu_kernel k = {f, {1, 1, 1}, {256, 1, 1}, 0, (void *[]){&p, &n, &mark}, "slow", false};
    CALL(wki_cu_launch, g.s, &k);
    CALL(wki_cu_free, g.s, p);
    CALL(wki_cu_alloc, other, 20 * MIB, "q", &q);
    CHECK_EQ_I(p, q); /* the limit leaves no other */
    CALL(wki_cu_fill32, other, q, 9, n);
    CALL(wki_cu_read, other, back, q, 20 * MIB);
    CALL(wki_cu_stream_sync, g.s);
    CALL(wki_cu_read, other, back, q, 20 * MIB);
    size_t wrong = 0;
    for (unsigned i = 0; i < n; i++)
        wrong += back[i] != 9;
    CHECK_EQ_I(wrong, 0);
    CALL(wki_cu_free, other, q);
    wki_cu_stream_destroy(other);
    gpu_close(&g);
}

typedef struct worker {
    wki_cu_device *dev;
    uint32_t mark;
    pthread_t thread;
} worker;

static void work_on_a_stream(worker *w) {
    wki_cu_stream *s;
    CALL(wki_cu_stream_create, w->dev, &s);
    const wki_nvrtc_source source = {.text = vector_add, .name = "vector_add.cu"};
    wki_cu_module *m;
    CALL(wki_cu_module_get, w->dev, &source, &m);
    for (unsigned i = 0; i < 300; i++) {
        uint32_t back[1000];
        wki_cu_ptr p, q;
        CALL(wki_cu_alloc, s, sizeof back, "thread", &p);
        CALL(wki_cu_alloc, s, (1 + i % 5) * MIB, "thread", &q);
        CALL(wki_cu_fill32, s, p, w->mark + i, 1000);
        CALL(wki_cu_fill32, s, q, 0, MIB / 4);
        CALL(wki_cu_free, s, q);
        CALL(wki_cu_read, s, back, p, sizeof back);
        CHECK(back[0] == w->mark + i && back[999] == w->mark + i);
        CALL(wki_cu_free, s, p);
    }
    wki_cu_stream_destroy(s);
}

static void *thread_main(void *arg) {
    work_on_a_stream(arg);
    return NULL;
}

TEST(cuda_rt, threads_share_a_device) {
    gpu g;
    NEED_GPU(&g);
    worker w[4];
    for (uint32_t i = 0; i < 4; i++) {
        w[i] = (worker){.dev = g.dev, .mark = i << 24};
        REQUIRE(pthread_create(&w[i].thread, NULL, thread_main, &w[i]) == 0);
    }
    for (int i = 0; i < 4; i++)
        pthread_join(w[i].thread, NULL);
    gpu_close(&g);
}
