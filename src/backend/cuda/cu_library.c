/* Where CUDA's libraries may be (cu_library.h): the directories the user names, the loader's path, the toolkit,
 * and Python's site-packages, where most people's CUDA libraries are today. Python is looked for, never run.
 * Calls base/dl, cu_error and the C library. */
#include "backend/cuda/cu_library.h"

#include "backend/cuda/cu_api.h"
#include "backend/cuda/cu_error.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define F(type, symbol, params) {.name = #symbol, .offset = offsetof(TABLE, symbol)},
#define TABLE wki_cu_driver_api
static const wki_dl_symbol driver_symbols[] = {WKI_CU_DRIVER_FUNCTIONS(F)};
#undef TABLE
#define TABLE wki_nvrtc_api
static const wki_dl_symbol nvrtc_symbols[] = {WKI_NVRTC_FUNCTIONS(F)};
#undef TABLE
#define TABLE wki_lt_api
static const wki_dl_symbol lt_symbols[] = {WKI_LT_FUNCTIONS(F)};
#undef TABLE
#undef F

static const struct {
    const char *names[2]; /* newest first */
    const wki_dl_symbol *symbols;
    size_t n_symbols;
} libraries[] = {
    [WKI_CU_LIB_DRIVER] = {{"libcuda.so.1"}, driver_symbols, sizeof driver_symbols / sizeof *driver_symbols},
    [WKI_CU_LIB_NVRTC] = {{"libnvrtc.so.13", "libnvrtc.so.12"},
                          nvrtc_symbols,
                          sizeof nvrtc_symbols / sizeof *nvrtc_symbols},
    [WKI_CU_LIB_CUBLASLT] = {{"libcublasLt.so.13", "libcublasLt.so.12"},
                             lt_symbols,
                             sizeof lt_symbols / sizeof *lt_symbols},
};

/* Glob patterns of directories, with the memory of those that had to be put together. */
typedef struct places {
    const char *patterns[40];
    size_t n;
    char text[8 * PATH_MAX];
    size_t used;
} places;

static void add(places *p, const char *pattern) {
    if (p->n + 1 < sizeof p->patterns / sizeof *p->patterns)
        p->patterns[p->n++] = pattern;
}

/* "prefix[:prefix_len]suffix"; left out when it does not fit. */
static void add_joined(places *p, const char *prefix, size_t prefix_len, const char *suffix) {
    char *at = p->text + p->used;
    size_t room = sizeof p->text - p->used;
    int n = snprintf(at, room, "%.*s%s", (int)prefix_len, prefix, suffix);
    if (prefix_len == 0 || n < 0 || (size_t)n >= room)
        return;
    p->used += (size_t)n + 1;
    add(p, at);
}

static void add_from_env(places *p, const char *variable, const char *suffix) {
    const char *value = getenv(variable);
    if (value)
        add_joined(p, value, strlen(value), suffix);
}

#define PACKAGES "/lib/python3*/site-packages/nvidia/*/lib"

/* The length of the directory above the one that the first n characters name; 0 when there is none. */
static size_t parent_length(const char *path, size_t n) {
    while (n && path[n - 1] == '/')
        n--;
    while (n && path[n - 1] != '/')
        n--;
    while (n && path[n - 1] == '/')
        n--;
    return n;
}

/* The site-packages of the python3 that PATH finds: DIR/bin/python3 has DIR/lib/python3.N. */
static void add_python_on_path(places *p) {
    const char *path = getenv("PATH");
    while (path && *path) {
        size_t n = strcspn(path, ":");
        char file[PATH_MAX];
        if (n && (size_t)snprintf(file, sizeof file, "%.*s/python3", (int)n, path) < sizeof file &&
            access(file, X_OK) == 0) {
            add_joined(p, path, parent_length(path, n), PACKAGES);
            return;
        }
        path += n + (path[n] == ':');
    }
}

static void list_driver_places(places *p) {
    add(p, "/usr/local/nvidia/lib64");
    add(p, "/usr/lib/wsl/lib");
}

static void list_toolkit_places(places *p) {
    add_from_env(p, "CUDA_HOME", "/lib64");
    add_from_env(p, "CUDA_PATH", "/lib64");
    add(p, "/usr/local/cuda/lib64");
    add(p, "/usr/local/cuda-1[23]*/lib64");
    add(p, "/opt/cuda/lib64");
    add_from_env(p, "VIRTUAL_ENV", PACKAGES);
    add_from_env(p, "CONDA_PREFIX", "/lib");
    add_from_env(p, "CONDA_PREFIX", PACKAGES);
    add_python_on_path(p);
    add_from_env(p, "HOME", "/.local" PACKAGES);
    add(p, "/usr/local" PACKAGES);
    add(p, "/usr/local/lib/python3*/dist-packages/nvidia/*/lib");
    add(p, "/usr" PACKAGES);
    add(p, "/usr/lib/python3*/dist-packages/nvidia/*/lib");
}

int wki_cu_library_open(wki_cu_library which, const wki_cu_options *options, int prefer_major, wki_dl **out,
                        void *table, wki_cu_error *err) {
    static const wki_cu_options none;
    const wki_cu_options *o = options ? options : &none;
    const char *const given[] = {o->driver, o->nvrtc, o->cublaslt};
    const char *names[3] = {libraries[which].names[0], libraries[which].names[1], NULL};
    if (prefer_major == 12 && names[1]) {
        names[0] = libraries[which].names[1];
        names[1] = libraries[which].names[0];
    }
    if (given[which]) {
        names[0] = given[which];
        names[1] = NULL;
    }
    places p = {.n = 0};
    if (which == WKI_CU_LIB_DRIVER)
        list_driver_places(&p);
    else
        list_toolkit_places(&p);
    const wki_dl_search search = {
        .names = names,
        .first = o->path ? o->path : getenv("WICK_CUDA_PATH"),
        .after = p.patterns,
    };
    char why[768];
    wki_dl *dl;
    *out = NULL;
    if (wki_dl_open(&dl, &search, why, sizeof why))
        return wki_cu_fail(err, WKI_CU_NO_LIBRARY, "%s", why);
    if (wki_dl_fill(dl, libraries[which].symbols, libraries[which].n_symbols, table, why, sizeof why)) {
        wki_dl_close(dl);
        return wki_cu_fail(err, WKI_CU_NO_LIBRARY, "%s", why);
    }
    *out = dl;
    return WKI_CU_OK;
}
