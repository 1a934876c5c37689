/* Strided copies, for kernels. Calls base/pool. */
#ifndef WKI_K_COPY_H
#define WKI_K_COPY_H

#include "backend/backend.h"

/* Copies nd-dimensional elements of 4 or 8 bytes; strides count elements. dst and src do not overlap. */
void wki_k_copy(int bytes, int nd, const int64_t *size, void *dst, const int64_t *dst_stride, const void *src,
                const int64_t *src_stride, wki_pool *pool);
/* The view's elements in row-major order. */
void wki_k_copy_plain(void *dst, const wki_view *v, wki_pool *pool);
/* Sets n floats to 0. */
void wki_k_zero(float *p, int64_t n, wki_pool *pool);

#endif
