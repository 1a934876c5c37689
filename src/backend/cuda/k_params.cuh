/* The parameters of hand-written CUDA kernels, one definition for both sides: C includes this file, and
 * the text stands at the head of every program that holds such kernels. Every kernel takes its struct by
 * value and the address of the argument block. Sizes and strides count elements. */
#ifndef WKK_PARAMS
#define WKK_PARAMS

typedef long long wkk_i64;
typedef unsigned long long wkk_u64;

enum { WKK_DIMS = 8, WKK_THREADS = 256, WKK_CONV_THREADS = 64, WKK_FAULT_WORD = 2, WKK_STOP_WORD, WKK_SMALL_GRID = 264 };

/* An operand: at `base`, or with slot >= 0 at the address in that word of the argument block plus `base`
 * bytes. */
typedef struct wkk_at {
    wkk_u64 base;
    wkk_i64 slot;
} wkk_at;

/* A strided operand of at most WKK_DIMS dimensions. */
typedef struct wkk_view {
    wkk_at at;
    wkk_i64 nd, size[WKK_DIMS], stride[WKK_DIMS];
} wkk_view;

/* dst and src walk the same n elements. */
typedef struct wkk_copy {
    wkk_at dst, src;
    wkk_i64 n, nd, size[WKK_DIMS], ds[WKK_DIMS], ss[WKK_DIMS];
} wkk_copy;

/* The first n words of the argument block. */
enum { WKK_WORDS = 128 };

typedef struct wkk_words {
    wkk_i64 n;
    wkk_u64 word[WKK_WORDS];
} wkk_words;

/* Floats dst[i] from the n doubles at words `first` of the argument block. */
typedef struct wkk_attrs {
    wkk_at dst;
    wkk_i64 first, n;
} wkk_attrs;

/* Zeros of shape size with src (count long in dimension dim) at start, start + step, ... of dimension dim. */
typedef struct wkk_pad {
    wkk_at dst, src;
    wkk_i64 n, nd, size[WKK_DIMS], ss[WKK_DIMS];
    wkk_i64 dim, start, step, count;
} wkk_pad;

/* ---- matrix products ----------------------------------------------------------------------------------- */

/* y (batch, m, n) = a b + bias[n], then max(0, .) with relu: element (i, p) of a at i * a_rs + p * a_cs,
 * of b (p, j) at p * b_rs + j * b_cs; batches of nd dimensions. Without a bias its stride is -1. The tiles
 * of y, across by down of them for each matrix, take `splits` blocks each, of which each sums a stretch of
 * k. */
typedef struct wkk_product {
    wkk_at a, b, bias, y;
    wkk_i64 m, n, k, a_rs, a_cs, b_rs, b_cs, bias_stride, relu;
    wkk_i64 nd, batch, size[WKK_DIMS], as[WKK_DIMS], bs[WKK_DIMS];
    wkk_i64 across, down, splits, stretch, first_block;
    wkk_u64 part, count; /* with splits: room for their sums; a word of 0 per tile */
} wkk_product;

/* Products that do not depend on each other. */
enum { WKK_PRODUCTS = 4 };

typedef struct wkk_products {
    wkk_i64 n;
    wkk_product p[WKK_PRODUCTS];
} wkk_products;

/* y[i] = max(y[i], 0) */
typedef struct wkk_relu_params {
    wkk_u64 y;
    wkk_i64 n;
} wkk_relu_params;

/* ---- convolution --------------------------------------------------------------------------------------- */

/* y (n, m, windows), plain, and its rows `ow` long: element (i, oh, ow) of an image sums wt (m, ch, kh,
 * kw) by the element of x (n, ch, h, w) at row (oh * up_h + add_h + dir * kh) / div_h and the column
 * likewise, 0 where there is no such. k counts the channels' taps. `down`: a div is not 1. */
typedef struct wkk_conv {
    wkk_at x, wt, bias, y;
    wkk_i64 xs[4], wt_m, wt_ch, wt_kh, wt_kw, bias_stride, relu;
    wkk_i64 n, m, k, h, w, kh, kw, windows, ow;
    wkk_i64 up_h, up_w, add_h, add_w, dir, down, div_h, div_w;
} wkk_conv;

/* dw (o, c, kh, kw), plain: the sum over all windows of dy (n, o, oh, ow) by x (n, c, h, w). */
typedef struct wkk_conv_dw {
    wkk_at dy, x, dw;
    wkk_i64 ds[4], xs[4], n, o, c, h, w, kh, kw, oh, ow, sh, sw, ph, pw;
    wkk_i64 across, splits, stretch;
    wkk_u64 part, count;
} wkk_conv_dw;

/* ---- pooling ------------------------------------------------------------------------------------------- */

typedef struct wkk_pool {
    wkk_at x, y, idx;
    wkk_i64 xs[4], total, c, h, w, oh, ow, kh, kw, sh, sw, ph, pw;
} wkk_pool;

enum { WKK_SMALL_PLANE = 1024, WKK_LARGE_PLANE = 5120 }; /* elements whose windows a block keeps in shared memory */

/* dx (plain, planes of `plane` elements) and the windows of dy. first, last: the lowest and highest window
 * that chose each element of dx, INT_MAX and -1 where none did. */
typedef struct wkk_pool_grad {
    wkk_at dy, idx, dx;
    wkk_u64 first, last;
    wkk_i64 ds[4], is[4], planes, c, plane, oh, ow, op;
} wkk_pool_grad;

typedef struct wkk_pool_gather {
    wkk_at x, idx, y;
    wkk_i64 xs[4], is[4], total, c, plane, w, oh, ow, op;
} wkk_pool_gather;

/* ---- rows by index ------------------------------------------------------------------------------------- */

typedef struct wkk_embedding {
    wkk_at w, y;
    wkk_view idx; /* i64 */
    wkk_i64 n, rows, width, row_stride, col_stride, op;
} wkk_embedding;

/* Indices as i32; -1 where out of range, which is a fault. */
typedef struct wkk_index32 {
    wkk_view idx;
    wkk_u64 out;
    wkk_i64 n, rows, op;
} wkk_index32;

enum { WKK_SUM_ROWS = 8 }; /* rows of dw that a block sums */

typedef struct wkk_embedding_grad {
    wkk_view dy; /* without its last dimension */
    wkk_at dw;
    wkk_u64 idx; /* i32 */
    wkk_i64 n, rows, width, col_stride;
} wkk_embedding_grad;

/* ---- numbers of 64 bits ------------------------------------------------------------------------------------------------- */

typedef struct wkk_cast {
    wkk_view x;
    wkk_at y;
    wkk_i64 n, from_bytes, to_bytes, from_float, to_float, to_bool;
} wkk_cast;

/* y (bool, of shape size) says whether a is below, equal to or above b, where that is asked for. */
typedef struct wkk_compare {
    wkk_at a, b, y;
    wkk_i64 n, nd, size[WKK_DIMS], as[WKK_DIMS], bs[WKK_DIMS], below, equal, above;
} wkk_compare;

#endif
