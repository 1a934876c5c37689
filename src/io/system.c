/* What runs here: CPU tier, threads, and the libraries that are opened at run time. May call: base, core, the CUDA room. */
#include <stdio.h>
#include <string.h>

#include "backend/cuda/cu_api.h"
#include "backend/cuda/cu_library.h"
#include "core/core.h"

void wk_system_info_get(wk_ctx *c, wk_system_info *s) {
    size_t n = s->struct_size;
    if (n < sizeof s->struct_size || n > sizeof *s)
        n = sizeof *s;
    const char *note = wki_cpu_isa_note();
    wk_system_info all = {.struct_size = n,
                          .isa = wki_isa_name(c->rt->isa),
                          .isa_note = note ? note : "",
                          .threads = wki_pool_size(c->rt->pool)};
    memcpy(s, &all, n);
}

bool wk_library_get(int i, wk_library_info *out) {
    static const char *const names[] = {
        [WKI_CU_LIB_DRIVER] = "cuda", [WKI_CU_LIB_NVRTC] = "nvrtc", [WKI_CU_LIB_CUBLASLT] = "cublasLt"};
    union {
        wki_cu_driver_api driver;
        wki_nvrtc_api nvrtc;
        wki_lt_api lt;
    } table;
    if (i < 0 || i >= (int)(sizeof names / sizeof *names))
        return false;
    wki_dl *dl = NULL;
    wki_cu_error err;
    out->name = names[i];
    out->found = wki_cu_library_open((wki_cu_library)i, NULL, 0, &dl, &table, &err) == WKI_CU_OK;
    snprintf(out->text, sizeof out->text, "%s", out->found ? wki_dl_path(dl) : err.text);
    if (out->found)
        wki_dl_close(dl);
    return true;
}
