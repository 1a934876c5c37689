/* Finding and opening shared libraries (dl.h). A candidate is a file name joined to a directory; the loader is
 * asked only for files that exist, so that its message about a broken one is not lost among those about absent
 * ones. Calls alloc.h, the C library and the dynamic loader. */
#include "base/dl.h"

#include "base/alloc.h"

#include <dlfcn.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct wki_dl {
    void *handle;
    char path[];
};

/* The state of one search: what has been opened and the first reason why an existing file was refused. */
typedef struct attempt {
    void *handle;
    char path[PATH_MAX];
    char reason[512];
} attempt;

static bool try_file(attempt *a, const char *path) {
    a->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (a->handle) {
        snprintf(a->path, sizeof a->path, "%s", path);
        return true;
    }
    const char *why = dlerror();
    /* "NAME: cannot open shared object file" with NAME itself first means absent; with another name first it
     * is a dependency that is absent, which the user wants to hear about. */
    size_t n = strlen(path);
    bool absent = why && strncmp(why, path, n) == 0 && strstr(why + n, "No such file") != NULL;
    if (why && !absent && !a->reason[0])
        snprintf(a->reason, sizeof a->reason, "%s", why);
    return false;
}

static bool try_in(attempt *a, const char *dir, size_t dir_len, const char *name) {
    char path[PATH_MAX];
    if (dir_len == 0 ||
        (size_t)snprintf(path, sizeof path, "%.*s/%s", (int)dir_len, dir, name) >= sizeof path)
        return false;
    return access(path, F_OK) == 0 && try_file(a, path);
}

static bool try_list(attempt *a, const char *dirs, const char *name) {
    for (const char *d = dirs; d && *d;) {
        size_t n = strcspn(d, ":");
        if (try_in(a, d, n, name))
            return true;
        d += n + (d[n] == ':');
    }
    return false;
}

static bool try_globs(attempt *a, const char *const *patterns, const char *name) {
    bool found = false;
    for (; patterns && *patterns && !found; patterns++) {
        glob_t g;
        if (glob(*patterns, 0, NULL, &g) != 0)
            continue;
        for (size_t i = 0; i < g.gl_pathc && !found; i++)
            found = try_in(a, g.gl_pathv[i], strlen(g.gl_pathv[i]), name);
        globfree(&g);
    }
    return found;
}

static bool try_name(attempt *a, const wki_dl_search *s, const char *name) {
    if (strchr(name, '/'))
        return try_file(a, name);
    return try_list(a, s->first, name) || try_file(a, name) || try_globs(a, s->after, name);
}

static void append(char *text, size_t size, const char *format, const char *what) {
    size_t n = strlen(text);
    if (n + 1 < size)
        snprintf(text + n, size - n, format, what);
}

static void describe_failure(const attempt *a, const wki_dl_search *s, char *err, size_t size) {
    if (!size)
        return;
    err[0] = 0;
    for (size_t i = 0; s->names[i]; i++) {
        append(err, size, i ? ", %s" : "%s", s->names[i]);
    }
    append(err, size, "%s", " not found");
    if (s->first && *s->first)
        append(err, size, " in %s,", s->first);
    append(err, size, "%s", " on the loader's path");
    if (s->after && *s->after)
        append(err, size, "%s", " or in the usual places");
    if (a->reason[0])
        append(err, size, "; one would not load: %s", a->reason);
}

int wki_dl_open(wki_dl **out, const wki_dl_search *search, char *err, size_t err_size) {
    attempt a = {0};
    *out = NULL;
    for (size_t i = 0; search->names[i]; i++)
        if (try_name(&a, search, search->names[i]))
            break;
    if (!a.handle) {
        describe_failure(&a, search, err, err_size);
        return -1;
    }
    size_t n = strlen(a.path) + 1;
    wki_dl *dl = wki_malloc(sizeof *dl + n);
    if (!dl) {
        dlclose(a.handle);
        snprintf(err, err_size, "no memory to open %s", a.path);
        return -1;
    }
    dl->handle = a.handle;
    memcpy(dl->path, a.path, n);
    *out = dl;
    return 0;
}

void wki_dl_close(wki_dl *dl) {
    if (!dl)
        return;
    dlclose(dl->handle);
    wki_free(dl);
}

const char *wki_dl_path(const wki_dl *dl) { return dl->path; }

int wki_dl_fill(const wki_dl *dl, const wki_dl_symbol *symbols, size_t n, void *table, char *err,
                size_t err_size) {
    size_t missing = 0;
    for (size_t i = 0; i < n; i++) {
        void *address = dlsym(dl->handle, symbols[i].name);
        memcpy((char *)table + symbols[i].offset, &address, sizeof address);
        if (address || symbols[i].optional)
            continue;
        if (missing++ == 0)
            snprintf(err, err_size, "%s lacks ", dl->path);
        append(err, err_size, missing == 1 ? "%s" : ", %s", symbols[i].name);
    }
    return missing ? -1 : 0;
}
