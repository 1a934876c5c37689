/* Messages of the CUDA backend (cu_error.h). */
#include "backend/cuda/cu_error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int wki_cu_fail(wki_cu_error *err, int code, const char *format, ...) {
    if (err) {
        va_list args;
        va_start(args, format);
        vsnprintf(err->text, sizeof err->text, format, args);
        va_end(args);
        err->code = code;
        err->result = 0;
    }
    return code;
}

void wki_cu_fail_more(wki_cu_error *err, const char *format, ...) {
    if (!err)
        return;
    size_t n = strlen(err->text);
    va_list args;
    va_start(args, format);
    vsnprintf(err->text + n, sizeof err->text - n, format, args);
    va_end(args);
}

int wki_cu_fail_call(wki_cu_error *err, int code, const char *call, int result, const char *name,
                     const char *reason, const char *what) {
    size_t n = strlen(call);
    if (n > 3 && !strcmp(call + n - 3, "_v2"))
        n -= 3;
    wki_cu_fail(err, code, "%.*s: ", (int)n, call);
    if (name)
        wki_cu_fail_more(err, "%s", name);
    else
        wki_cu_fail_more(err, "result %d", result);
    if (reason)
        wki_cu_fail_more(err, " (%s)", reason);
    if (what)
        wki_cu_fail_more(err, ", %s", what);
    if (err)
        err->result = result;
    return code;
}

void wki_cu_fail_in(wki_cu_error *err, const char *context) {
    if (!err)
        return;
    size_t n = strlen(context) + 2, room = sizeof err->text - 1;
    if (n > room)
        return;
    size_t keep = strlen(err->text);
    if (keep > room - n)
        keep = room - n;
    memmove(err->text + n, err->text, keep);
    memcpy(err->text, context, n - 2);
    memcpy(err->text + n - 2, ": ", 2);
    err->text[n + keep] = 0;
}
