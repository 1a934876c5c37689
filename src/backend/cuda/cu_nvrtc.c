/* The run-time compiler: CUDA C++ text to a cubin or PTX, with or without a driver. Calls base, cu_library and
 * NVRTC. */
#include "backend/cuda/cu_api.h"
#include "backend/cuda/cu_error.h"
#include "backend/cuda/cu_library.h"
#include "base/alloc.h"

#include <stdio.h>
#include <string.h>

#define MAX_OPTIONS 32

struct wki_nvrtc {
    wki_dl *lib;
    wki_nvrtc_api api;
    int major, minor;
};

/* No contraction: fma is written where it is meant. Functions without a qualifier are device functions, so text
 * shared with the CPU needs none. */
static const char *const fixed_options[] = {"--fmad=false", "-default-device", "--std=c++17"};
#define N_FIXED (sizeof fixed_options / sizeof *fixed_options)

static int fail_nvrtc(const wki_nvrtc *rtc, wki_cu_error *err, const char *call, wki_nvrtcresult result,
                      const char *what) {
    return wki_cu_fail_call(err, WKI_CU_FAILED, call, result, rtc->api.nvrtcGetErrorString(result), NULL,
                            what);
}

int wki_nvrtc_open(const wki_cu_options *options, int prefer_major, wki_nvrtc **out, wki_cu_error *err) {
    *out = NULL;
    wki_nvrtc *rtc = wki_calloc(1, sizeof *rtc);
    if (!rtc)
        return wki_cu_fail(err, WKI_CU_HOST_MEMORY, "no host memory to open NVRTC");
    int code = wki_cu_library_open(WKI_CU_LIB_NVRTC, options, prefer_major, &rtc->lib, &rtc->api, err);
    if (!code) {
        wki_nvrtcresult result = rtc->api.nvrtcVersion(&rtc->major, &rtc->minor);
        if (result)
            code = fail_nvrtc(rtc, err, "nvrtcVersion", result, NULL);
    }
    if (code) {
        wki_nvrtc_close(rtc);
        return code;
    }
    *out = rtc;
    return WKI_CU_OK;
}

void wki_nvrtc_close(wki_nvrtc *rtc) {
    if (!rtc)
        return;
    wki_dl_close(rtc->lib);
    wki_free(rtc);
}

void wki_nvrtc_version(const wki_nvrtc *rtc, int *major, int *minor) {
    *major = rtc->major;
    *minor = rtc->minor;
}

int wki_nvrtc_arch(const wki_nvrtc *rtc, int major, int minor, char arch[24], wki_cu_error *err) {
    int known[64], n = 0, wanted = 10 * major + minor, best = 0;
    arch[0] = 0;
    wki_nvrtcresult result = rtc->api.nvrtcGetNumSupportedArchs(&n);
    if (result)
        return fail_nvrtc(rtc, err, "nvrtcGetNumSupportedArchs", result, NULL);
    if (n > (int)(sizeof known / sizeof *known))
        return wki_cu_fail(err, WKI_CU_FAILED, "nvrtcGetNumSupportedArchs: %d is more than expected", n);
    result = rtc->api.nvrtcGetSupportedArchs(known);
    if (result)
        return fail_nvrtc(rtc, err, "nvrtcGetSupportedArchs", result, NULL);
    for (int i = 0; i < n; i++)
        if (known[i] <= wanted && known[i] > best)
            best = known[i];
    if (!best)
        return wki_cu_fail(err, WKI_CU_UNSUPPORTED, "NVRTC %d.%d does not know compute capability %d.%d",
                           rtc->major, rtc->minor, major, minor);
    snprintf(arch, 24, best == wanted ? "sm_%d" : "compute_%d", best);
    return WKI_CU_OK;
}

/* ---- Compiling ------------------------------------------------------------------------------------------- */

/* The first line of the log that reports an error, for a one-line message. */
static void first_error(const char *log, char *line, size_t size) {
    const char *at = strstr(log, "error");
    while (at && at > log && at[-1] != '\n')
        at--;
    if (!at)
        at = log;
    snprintf(line, size, "%.*s", (int)strcspn(at, "\n"), at);
}

static int read_log(wki_nvrtc *rtc, wki_nvrtcprogram program, wki_nvrtc_binary *out, wki_cu_error *err) {
    size_t size = 0;
    wki_nvrtcresult result = rtc->api.nvrtcGetProgramLogSize(program, &size);
    if (result)
        return fail_nvrtc(rtc, err, "nvrtcGetProgramLogSize", result, NULL);
    if (size <= 1) /* the NUL alone */
        return WKI_CU_OK;
    out->log = wki_malloc(size);
    if (!out->log)
        return wki_cu_fail(err, WKI_CU_HOST_MEMORY, "no host memory for a compiler log");
    result = rtc->api.nvrtcGetProgramLog(program, out->log);
    return result ? fail_nvrtc(rtc, err, "nvrtcGetProgramLog", result, NULL) : WKI_CU_OK;
}

static int read_binary(wki_nvrtc *rtc, wki_nvrtcprogram program, bool ptx, wki_nvrtc_binary *out,
                       wki_cu_error *err) {
    const wki_nvrtc_api *api = &rtc->api;
    wki_nvrtcresult result =
        ptx ? api->nvrtcGetPTXSize(program, &out->size) : api->nvrtcGetCUBINSize(program, &out->size);
    if (result)
        return fail_nvrtc(rtc, err, ptx ? "nvrtcGetPTXSize" : "nvrtcGetCUBINSize", result, NULL);
    out->data = wki_malloc(out->size);
    if (!out->data)
        return wki_cu_fail(err, WKI_CU_HOST_MEMORY, "no host memory for a compiled kernel");
    result = ptx ? api->nvrtcGetPTX(program, out->data) : api->nvrtcGetCUBIN(program, out->data);
    return result ? fail_nvrtc(rtc, err, ptx ? "nvrtcGetPTX" : "nvrtcGetCUBIN", result, NULL) : WKI_CU_OK;
}

int wki_nvrtc_compile(wki_nvrtc *rtc, const wki_nvrtc_source *source, wki_nvrtc_binary *out,
                      wki_cu_error *err) {
    *out = (wki_nvrtc_binary){0};
    const char *options[MAX_OPTIONS];
    char arch[64];
    if (source->n_options < 0 || source->n_options > (int)(MAX_OPTIONS - N_FIXED - 1))
        return wki_cu_fail(err, WKI_CU_INVALID, "%s: %d compiler options", source->name, source->n_options);
    if ((size_t)snprintf(arch, sizeof arch, "--gpu-architecture=%s", source->arch) >= sizeof arch)
        return wki_cu_fail(err, WKI_CU_INVALID, "%s: architecture '%.40s...'", source->name, source->arch);
    int n = 0;
    options[n++] = arch;
    for (size_t i = 0; i < N_FIXED; i++)
        options[n++] = fixed_options[i];
    for (int i = 0; i < source->n_options; i++)
        options[n++] = source->options[i];

    wki_nvrtcprogram program = NULL;
    wki_nvrtcresult result = rtc->api.nvrtcCreateProgram(&program, source->text, source->name, 0, NULL, NULL);
    if (result)
        return fail_nvrtc(rtc, err, "nvrtcCreateProgram", result, source->name);
    result = rtc->api.nvrtcCompileProgram(program, n, options);
    int code = read_log(rtc, program, out, err);
    if (result) {
        char line[512] = "";
        if (out->log)
            first_error(out->log, line, sizeof line);
        fail_nvrtc(rtc, err, "nvrtcCompileProgram", result, line[0] ? line : source->name);
        code = WKI_CU_COMPILE;
        if (err)
            err->code = code;
    } else if (!code) {
        code = read_binary(rtc, program, strncmp(source->arch, "compute_", 8) == 0, out, err);
    }
    rtc->api.nvrtcDestroyProgram(&program);
    return code;
}

void wki_nvrtc_binary_free(wki_nvrtc_binary *binary) {
    wki_free(binary->data);
    wki_free(binary->log);
    *binary = (wki_nvrtc_binary){0};
}
