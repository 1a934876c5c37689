/* Errors as values: the sticky error of a context, its text and where it came from; names of statuses and dtypes. Calls
 * core and, for a pending recording, the recorder. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/core.h"

extern char **environ;

static const struct {
    const char *name, *text;
} statuses[] = {
#define S(name, text) {"WK_" #name, text},
#include <wick/status.def>
#undef S
};
static const struct {
    const char *name;
    uint8_t bits;
} dtypes[] = {
#define D(name, text, bits, kind, rank) {text, bits},
#include <wick/dtype.def>
#undef D
};

const uint8_t wki_dtype_bytes[] = {
#define D(name, text, bits, kind, rank) (bits) / 8,
#include <wick/dtype.def>
#undef D
    0};
const char wki_dtype_kinds[] = {
#define D(name, text, bits, kind, rank) kind,
#include <wick/dtype.def>
#undef D
    0};

const uint8_t wki_dtype_ranks[] = {
#define D(name, text, bits, kind, rank) rank,
#include <wick/dtype.def>
#undef D
};

const char *wk_status_name(wk_status s) {
    return (unsigned)s < WK_STATUS_COUNT ? statuses[s].name : "unknown status";
}
const char *wk_status_text(wk_status s) {
    return (unsigned)s < WK_STATUS_COUNT ? statuses[s].text : "unknown status";
}
const char *wk_dtype_name(wk_dtype d) {
    return (unsigned)d < WK_DTYPE_COUNT ? dtypes[d].name : "unknown dtype";
}
size_t wk_dtype_bits(wk_dtype d) { return (unsigned)d < WK_DTYPE_COUNT ? dtypes[d].bits : 0; }

#define STR2(x) #x
#define STR(x) STR2(x)
const char *wk_version(void) {
    return STR(WK_VERSION_MAJOR) "." STR(WK_VERSION_MINOR) "." STR(WK_VERSION_PATCH);
}

const char *wki_shape_text(char *buf, size_t n, int ndim, const int64_t *size) {
    size_t at = 0;
    at += (size_t)snprintf(buf, n, "(");
    for (int i = 0; i < ndim && at < n; i++)
        at += (size_t)snprintf(buf + at, n - at, i ? ", %lld" : "%lld", (long long)size[i]);
    if (at < n)
        snprintf(buf + at, n - at, ")");
    return buf;
}

/* "file.c:12" by addr2line, when it is installed and the module carries debug information. */
static bool source_line(const char *module, uintptr_t offset, char *out, size_t n) {
    char addr[32];
    int fd[2];
    snprintf(addr, sizeof addr, "0x%lx", (unsigned long)offset);
    if (pipe(fd))
        return false;
    posix_spawn_file_actions_t fa;
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_adddup2(&fa, fd[1], 1);
    posix_spawn_file_actions_addopen(&fa, 2, "/dev/null", 1, 0);
    posix_spawn_file_actions_addclose(&fa, fd[0]);
    char *argv[] = {(char *)"addr2line", (char *)"-s", (char *)"-e", (char *)module, addr, NULL};
    pid_t pid;
    int rc = posix_spawnp(&pid, "addr2line", &fa, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&fa);
    close(fd[1]);
    size_t got = 0;
    if (!rc) {
        ssize_t r;
        while (got < n - 1 && (r = read(fd[0], out + got, n - 1 - got)) > 0)
            got += (size_t)r;
        while (waitpid(pid, NULL, 0) < 0)
            ;
    }
    close(fd[0]);
    out[got] = 0;
    out[strcspn(out, "\n")] = 0;
    char *disc = strstr(out, " (discriminator");
    if (disc)
        *disc = 0;
    return got && out[0] != '?' && !strstr(out, ":?") && !strstr(out, ":0");
}

static void caller_text(const void *caller, char *out, size_t n) {
    Dl_info di;
    out[0] = 0;
    if (!caller || !dladdr(caller, &di) || !di.dli_fname)
        return;
    uintptr_t off = (uintptr_t)caller - (uintptr_t)di.dli_fbase - 1; /* inside the call instruction */
    char line[256];
    const char *base = strrchr(di.dli_fname, '/');
    base = base ? base + 1 : di.dli_fname;
    /* A position-dependent executable's debug information uses absolute addresses. */
    if (source_line(di.dli_fname, off, line, sizeof line) ||
        source_line(di.dli_fname, (uintptr_t)caller - 1, line, sizeof line))
        snprintf(out, n, " [called at %s]", line);
    else
        snprintf(out, n, " [called from %s+0x%lx]", base, (unsigned long)off);
}

static void fail(wk_ctx *c, wk_status s, const void *past) {
    c->failed = c->err.status = s;
    c->err.past = past;
    c->err.caller = c->caller;
}

void wki_set_error(wk_ctx *c, wk_status s, const char *fmt, ...) {
    if (c->failed)
        return;
    char text[640];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    snprintf(c->err.message, sizeof c->err.message, "%s%s%s", c->cur_op ? c->cur_op->name : "",
             c->cur_op ? ": " : "", text);
    fail(c, s, NULL);
}

bool wki_fail_poison(wk_ctx *c, const char *what) {
    if (c->failed)
        return false;
    bool known = c->past.status != WK_OK;
    c->cur_op = NULL;
    wki_fail(c, WK_STATE, "%s is the result of a call that failed%s%s", what, known ? ", last with " : "",
             known ? c->past.message : "");
    fail(c, WK_STATE, c->past.caller);
    return false;
}

/* Finding a caller's line costs a process: done once, when somebody reads the message. */
static void locate(wki_error *e) {
    const void *caller[2] = {e->past, e->caller};
    for (int i = 0; i < 2; i++) {
        size_t at = strlen(e->message);
        caller_text(caller[i], e->message + at, sizeof e->message - at);
    }
    e->past = e->caller = NULL;
}

bool wk_failed(wk_ctx *c) { return c->failed != WK_OK; }

const char *wk_message(wk_ctx *c) {
    if (!c->failed)
        return "";
    locate(&c->err);
    return c->err.message;
}

static void copy_out(wk_ctx *c, wk_error *out) {
    *out = (wk_error){.status = c->failed};
    if (!c->failed)
        return;
    locate(&c->err);
    memcpy(out->message, c->err.message, sizeof out->message);
}

/* Copies the error out, if there is one and somebody wants it, and keeps it as the past one. */
static wk_status leave_behind(wk_ctx *c, wk_error *out) {
    wk_status s = c->failed;
    if (out)
        copy_out(c, out);
    if (s)
        c->past = c->err;
    c->failed = WK_OK;
    return s;
}

wk_status wk_error_take(wk_ctx *c, wk_error *out) { return leave_behind(c, out); }

static bool grow_outside(wk_ctx *c) {
    int cap = c->cap_try ? 2 * c->cap_try : 4;
    wki_error *p = wki_realloc(c->outside, (size_t)cap * sizeof *p);
    if (!p)
        return wki_fail(c, WK_NOMEM, "no host memory for a probe");
    c->outside = p;
    c->cap_try = cap;
    return true;
}

/* Where there is no memory a probe does not isolate: the error that says so is outside it. */
void wk_try_begin(wk_ctx *c) {
    wki_begin(c, __builtin_return_address(0));
    if (c->lost_tries || (c->try_depth == c->cap_try && !grow_outside(c))) {
        c->lost_tries++;
        return;
    }
    c->outside[c->try_depth] = c->err;
    c->outside[c->try_depth++].status = c->failed;
    c->failed = WK_OK;
}

wk_status wk_try_end(wk_ctx *c, wk_error *out) {
    if (c->lost_tries) {
        c->lost_tries--;
        if (out)
            copy_out(c, out);
        return c->failed;
    }
    if (c->try_depth <= c->try_floor) {
        wki_begin(c, __builtin_return_address(0));
        wki_fail(c, WK_STATE, "wk_try_end without a matching wk_try_begin");
        return WK_STATE;
    }
    wk_status s = leave_behind(c, out);
    c->err = c->outside[--c->try_depth];
    c->failed = c->err.status;
    return s;
}
