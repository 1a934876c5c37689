/* IDX files: a magic number (0, 0, type, dimensions), big-endian sizes, the elements. May call: zlib. */
#include "idx.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

enum { TYPE_U8 = 8, MAX_DIMS = 3, MAX_BYTES = 1 << 30 };

static bool refuse(char *why, size_t n, const char *path, const char *reason) {
    snprintf(why, n, "%s: %s", path, reason);
    return false;
}

/* Why the last read of f came short. zlib puts the path before its texts. */
static const char *reason_of(gzFile f, const char *path) {
    int code;
    const char *text = gzerror(f, &code);
    if (code == Z_ERRNO)
        return strerror(errno);
    if (code == Z_OK || code == Z_BUF_ERROR)
        return "the file ends too early";
    size_t n = strlen(path);
    return !strncmp(text, path, n) && !strncmp(text + n, ": ", 2) ? text + n + 2 : text;
}

static bool read_bytes(gzFile f, void *dst, size_t bytes) {
    char *at = dst;
    while (bytes) {
        unsigned part = bytes < 1 << 24 ? (unsigned)bytes : 1 << 24;
        int got = gzread(f, at, part);
        if (got <= 0)
            return false;
        at += got;
        bytes -= (size_t)got;
    }
    return true;
}

static bool read_file(gzFile f, const char *path, int ndim, idx *out, char *why, size_t n) {
    uint8_t head[4 + 4 * MAX_DIMS];
    if (!read_bytes(f, head, 4))
        return refuse(why, n, path, reason_of(f, path));
    if (head[0] || head[1] || head[2] != TYPE_U8 || head[3] != ndim)
        return refuse(why, n, path, "not an IDX file of bytes with the expected number of dimensions");
    if (!read_bytes(f, head + 4, 4 * (size_t)ndim))
        return refuse(why, n, path, reason_of(f, path));
    int64_t bytes = 1;
    out->ndim = ndim;
    for (int i = 0; i < ndim; i++) {
        const uint8_t *p = head + 4 + 4 * i;
        out->size[i] = (int64_t)p[0] << 24 | p[1] << 16 | p[2] << 8 | p[3];
        if (__builtin_mul_overflow(bytes, out->size[i], &bytes) || bytes > MAX_BYTES)
            return refuse(why, n, path, "the sizes in its header cannot be right");
    }
    out->data = malloc(bytes ? (size_t)bytes : 1);
    if (!out->data)
        return refuse(why, n, path, "out of memory");
    uint8_t extra;
    if (!read_bytes(f, out->data, (size_t)bytes))
        return refuse(why, n, path, reason_of(f, path));
    int more = gzread(f, &extra, 1); /* also where a wrong checksum is noticed */
    return more == 0 ||
           refuse(why, n, path, more < 0 ? reason_of(f, path) : "the file is longer than its header says");
}

bool idx_read(const char *path, int ndim, idx *out, char *why, size_t n) {
    *out = (idx){0};
    errno = 0;
    gzFile f = gzopen(path, "rb");
    if (!f)
        return refuse(why, n, path, errno ? strerror(errno) : "out of memory");
    bool ok = ndim >= 1 && ndim <= MAX_DIMS && read_file(f, path, ndim, out, why, n);
    if (gzclose_r(f) != Z_OK && ok)
        ok = refuse(why, n, path, "the file ends too early");
    if (!ok) {
        free(out->data);
        *out = (idx){0};
    }
    return ok;
}
