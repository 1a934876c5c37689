/* Reads the golden vector files of tests/golden (format: tests/golden/README.md). A file is read and checked
 * whole when it is opened; tensors are then plain aligned arrays. Test code: libc only, nothing of Wick. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { WKG_MAX_NDIM = 8 };

typedef enum { WKG_F32 = 0, WKG_I64 = 1, WKG_U8 = 2, WKG_F64 = 3 } wkg_dtype;

typedef struct {
    char *name;
    wkg_dtype dtype;
    int ndim; /* 0: a single number */
    int64_t dims[WKG_MAX_NDIM];
    int64_t numel;
    void *data; /* C order, aligned as malloc aligns */
} wkg_tensor;

typedef struct {
    int count;
    wkg_tensor *tensors; /* in file order */
} wkg_file;

/* Opens NAME.bin in $WICK_GOLDEN, else in the tests/golden of the source tree. A name with a slash is a
 * path. NULL where the file is missing or damaged, the reason on stderr. */
wkg_file *wkg_open(const char *name);

/* The same on a path, with the reason in why[0..n) instead. */
wkg_file *wkg_read(const char *path, char *why, size_t n);

/* The same on bytes in memory; they are copied. */
wkg_file *wkg_parse(const void *bytes, size_t size, char *why, size_t n);

/* NULL where no tensor has that name. Owned by the file. */
const wkg_tensor *wkg_find(const wkg_file *file, const char *name);

/* A 0-d f64 or i64 tensor's number; NaN where there is none of that name. */
double wkg_number(const wkg_file *file, const char *name);

size_t wkg_itemsize(wkg_dtype dtype);
void wkg_close(wkg_file *file); /* NULL is fine */
