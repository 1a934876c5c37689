/* The reader of golden vector files: bounds and overflow are checked before every read, so that a truncated
 * file is an error with its offset and never a wrong number. Test code: libc only, nothing of Wick. */
#include "golden.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "golden files are little-endian and read as they lie"
#endif

#ifndef WICK_TEST_DIR
#define WICK_TEST_DIR "tests"
#endif

enum { MAX_NAME = 256 };

typedef struct {
    const unsigned char *bytes;
    size_t size, at;
    char *why;
    size_t n;
} cursor;

static bool refuse(char *why, size_t n, const char *format, ...) __attribute__((format(printf, 3, 4)));

static bool refuse(char *why, size_t n, const char *format, ...) {
    if (why && n) {
        va_list args;
        va_start(args, format);
        vsnprintf(why, n, format, args);
        va_end(args);
    }
    return false;
}

static bool take(cursor *c, void *to, size_t size, const char *what) {
    if (size > c->size - c->at)
        return refuse(c->why, c->n, "cut off at byte %zu of %zu: %s takes %zu more", c->at, c->size, what,
                      size);
    if (size)
        memcpy(to, c->bytes + c->at, size);
    c->at += size;
    return true;
}

size_t wkg_itemsize(wkg_dtype dtype) {
    static const size_t size[] = {[WKG_F32] = 4, [WKG_I64] = 8, [WKG_U8] = 1, [WKG_F64] = 8};
    return size[dtype];
}

static bool parse_name(cursor *c, wkg_file *f, wkg_tensor *t) {
    uint32_t length = 0;
    if (!take(c, &length, sizeof length, "a name's length"))
        return false;
    if (length == 0 || length > MAX_NAME)
        return refuse(c->why, c->n, "a name of %u bytes before byte %zu", (unsigned)length, c->at);
    t->name = calloc(1, (size_t)length + 1);
    if (!t->name)
        return refuse(c->why, c->n, "out of memory");
    if (!take(c, t->name, length, "a name"))
        return false;
    if (strlen(t->name) != length)
        return refuse(c->why, c->n, "a zero byte in the name before byte %zu", c->at);
    for (const wkg_tensor *u = f->tensors; u < t; u++)
        if (!strcmp(u->name, t->name))
            return refuse(c->why, c->n, "two tensors named %s", t->name);
    return true;
}

static bool parse_tensor(cursor *c, wkg_file *f, wkg_tensor *t) {
    uint32_t dtype = 0, ndim = 0;
    if (!parse_name(c, f, t) || !take(c, &dtype, sizeof dtype, "a dtype") ||
        !take(c, &ndim, sizeof ndim, "a rank"))
        return false;
    if (dtype > WKG_F64)
        return refuse(c->why, c->n, "%s: dtype code %u is none of 0..3", t->name, (unsigned)dtype);
    if (ndim > WKG_MAX_NDIM)
        return refuse(c->why, c->n, "%s: %u dimensions, at most %d are read", t->name, (unsigned)ndim,
                      WKG_MAX_NDIM);
    t->dtype = (wkg_dtype)dtype;
    t->ndim = (int)ndim;
    if (!take(c, t->dims, ndim * sizeof t->dims[0], "the dimensions"))
        return false;
    t->numel = 1;
    for (int i = 0; i < t->ndim; i++)
        if (t->dims[i] < 0 || __builtin_mul_overflow(t->numel, t->dims[i], &t->numel))
            return refuse(c->why, c->n, "%s: dimension %d is %lld", t->name, i, (long long)t->dims[i]);
    size_t item = wkg_itemsize(t->dtype);
    if ((uint64_t)t->numel > (c->size - c->at) / item)
        return refuse(c->why, c->n, "cut off at byte %zu of %zu: %s has %lld elements of %zu bytes", c->at,
                      c->size, t->name, (long long)t->numel, item);
    size_t size = (size_t)t->numel * item;
    t->data = malloc(size ? size : 1);
    if (!t->data)
        return refuse(c->why, c->n, "out of memory");
    return take(c, t->data, size, t->name);
}

wkg_file *wkg_parse(const void *bytes, size_t size, char *why, size_t n) {
    cursor c = {.bytes = bytes, .size = size, .why = why, .n = n};
    char magic[4];
    uint32_t count = 0;
    if (!take(&c, magic, sizeof magic, "the magic"))
        return NULL;
    if (memcmp(magic, "WKG1", sizeof magic) != 0) {
        refuse(why, n, "does not begin with WKG1");
        return NULL;
    }
    if (!take(&c, &count, sizeof count, "the count"))
        return NULL;
    /* A tensor takes at least a name's length, one byte of name, dtype and rank. */
    if (count > (size - c.at) / 13) {
        refuse(why, n, "too short for the %u tensors it announces", (unsigned)count);
        return NULL;
    }
    wkg_file *f = calloc(1, sizeof *f);
    if (f)
        f->tensors = calloc(count ? count : 1, sizeof *f->tensors);
    if (!f || !f->tensors) {
        refuse(why, n, "out of memory");
        goto failed;
    }
    while (f->count < (int)count) {
        wkg_tensor *t = &f->tensors[f->count++]; /* counted first: closing frees what a failure leaves */
        if (!parse_tensor(&c, f, t))
            goto failed;
    }
    if (c.at != size) {
        refuse(why, n, "%zu bytes after the last tensor", size - c.at);
        goto failed;
    }
    return f;
failed:
    wkg_close(f);
    return NULL;
}

wkg_file *wkg_read(const char *path, char *why, size_t n) {
    wkg_file *f = NULL;
    unsigned char *bytes = NULL;
    FILE *in = fopen(path, "rb");
    if (!in) {
        refuse(why, n, "%s", strerror(errno));
        return NULL;
    }
    long size = fseek(in, 0, SEEK_END) ? -1 : ftell(in);
    if (size < 0 || fseek(in, 0, SEEK_SET)) {
        refuse(why, n, "%s", strerror(errno));
        goto out;
    }
    bytes = malloc(size ? (size_t)size : 1);
    if (!bytes)
        refuse(why, n, "out of memory");
    else if (fread(bytes, 1, (size_t)size, in) != (size_t)size)
        refuse(why, n, "cannot be read");
    else
        f = wkg_parse(bytes, (size_t)size, why, n);
out:
    free(bytes);
    fclose(in);
    return f;
}

wkg_file *wkg_open(const char *name) {
    char path[4096], why[256];
    if (strchr(name, '/')) {
        snprintf(path, sizeof path, "%s", name);
    } else {
        const char *dir = getenv("WICK_GOLDEN");
        snprintf(path, sizeof path, "%s/%s.bin", dir ? dir : WICK_TEST_DIR "/golden", name);
    }
    wkg_file *f = wkg_read(path, why, sizeof why);
    if (!f)
        fprintf(stderr, "%s: %s\n", path, why);
    return f;
}

const wkg_tensor *wkg_find(const wkg_file *file, const char *name) {
    for (int i = 0; file && i < file->count; i++)
        if (!strcmp(file->tensors[i].name, name))
            return &file->tensors[i];
    return NULL;
}

double wkg_number(const wkg_file *file, const char *name) {
    const wkg_tensor *t = wkg_find(file, name);
    if (t && t->ndim == 0 && t->dtype == WKG_F64)
        return *(const double *)t->data;
    if (t && t->ndim == 0 && t->dtype == WKG_I64)
        return (double)*(const int64_t *)t->data;
    return NAN;
}

void wkg_close(wkg_file *file) {
    if (!file)
        return;
    for (int i = 0; i < file->count; i++) {
        free(file->tensors[i].name);
        free(file->tensors[i].data);
    }
    free(file->tensors);
    free(file);
}
