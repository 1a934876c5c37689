/* IDX files (the format of MNIST and its kin), gzipped or not. May call: zlib. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct idx {
    int ndim;
    int64_t size[3];
    uint8_t *data; /* row-major, to be freed */
} idx;

/* Reads a whole file of unsigned bytes with ndim (1 to 3) dimensions. False, with the reason in why, where the file is
   missing, damaged, cut short or too long. */
bool idx_read(const char *path, int ndim, idx *out, char *why, size_t n);
