/* Filling wki_cu_error. Each returns the code it is given, so that a caller writes `return wki_cu_fail(...)`.
 * May call the C library alone. */
#pragma once
#include "backend/cuda/cu.h"

int wki_cu_fail(wki_cu_error *err, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Appends to the text of a failure. */
void wki_cu_fail_more(wki_cu_error *err, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* "call: NAME (reason)" for a library's own result code; what (may be NULL) follows. A suffix _v2 of the call,
 * which no manual shows, is left out. */
int wki_cu_fail_call(wki_cu_error *err, int code, const char *call, int result, const char *name,
                     const char *reason, const char *what);

/* Puts "context: " before the text of a failure. */
void wki_cu_fail_in(wki_cu_error *err, const char *context);
