/* Broken calls of every op: inputs of a wrong dtype, rank or size, indices out of range, impossible attributes. Each is either
 * legal, and its results can be read, or an error that names an op of the table; never a crash or an internal error, eager or
 * compiled, and the context goes on. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cases.h"
#include "harness.h"

typedef struct broken {
    const op_case *k;
    wki_tensor *x[CASE_MAX_IN];
    int outputs; /* filled by the call */
} broken;

static void call_it(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    broken *b = self;
    wki_tensor *y[CASE_MAX_OUT] = {0};
    (void)in, (void)nin;
    b->k->call(c, b->x, y);
    b->outputs = 0;
    for (int j = 0; j < nout; j++) {
        b->outputs += y[j] != NULL;
        out[j] = wki_handle(y[j] ? y[j] : y[0] ? y[0] : wki_poison(c));
    }
}

static bool begins_with_op(const char *message, int op) {
    size_t n = strlen(wki_ops[op].name);
    return !strncmp(message, wki_ops[op].name, n) && message[n] == ':';
}

/* Does the message begin with the name of the op? A composite may leave it to an op inside; -1: any. The rows of
   cross_entropy speak of their targets under its name. */
static bool names_op(const char *message, int op) {
    bool rows = op == WKI_OP_nll_rows || op == WKI_OP_nll_rows_grad;
    if (rows && begins_with_op(message, WKI_OP_cross_entropy))
        return true;
    if (op >= 0 && wki_ops[op].klass != WKI_COMPOSITE)
        return begins_with_op(message, op);
    for (int i = 0; i < wki_op_count; i++)
        if (begins_with_op(message, i))
            return true;
    return false;
}

/* Takes the error, which must be a good one; returns its status. */
static wk_status take(wk_ctx *c, const char *name, int op, const char *how) {
    wk_status s = c->failed; /* wk_error_take would look up the caller's line, which takes a process */
    if (s && (s == WK_INTERNAL || !names_op(c->err.message, op)))
        FAIL("%s, %s: %s: %s", name, how, wk_status_name(s), c->err.message);
    wk_error_take(c, NULL);
    if (wk_item(wk_add_scalar(wk_scalar(c, 1), 2)) != 3)
        FAIL("%s, %s: the context does not go on: %s", name, how, wk_message(c));
    return s;
}

/* Runs it and reads what it gives. */
static wk_status attempt(wk_ctx *c, broken *b, bool compiled, const char *how) {
    wk_tensor *out[CASE_MAX_OUT] = {0};
    int nout = wki_ops[b->k->op].nout ? wki_ops[b->k->op].nout : 1;
    if (compiled) {
        wk_compiled *f = wk_compile(c, call_it, b, NULL);
        wk_call_n(f, NULL, 0, out, nout);
        wk_compiled_free(f);
    } else {
        call_it(c, b, NULL, 0, out, nout);
    }
    for (int j = 0; j < nout && !wk_failed(c); j++) {
        dten d = case_read(wki_slot(out[j]));
        case_free(&d);
    }
    if (wk_failed(c))
        CHECK(wk_is_poison(out[0]) || !compiled);
    return take(c, b->k->name, b->k->op, how);
}

/* A dtype or a shape in place of the input's. */
static wki_tensor *zeros(wk_ctx *c, wk_dtype dtype, int ndim, const int64_t *size) {
    return wki_slot(wk_zeros(c, dtype, ndim, size));
}

typedef struct counts {
    int tried, refused;
} counts;

static void try_shape(wk_ctx *c, broken *b, int i, wk_dtype dtype, int ndim, const int64_t *size,
                      const char *how, counts *n) {
    wki_tensor *old = b->x[i];
    int64_t copy[WK_MAX_DIMS] = {0};
    memcpy(copy, size, (size_t)ndim * sizeof *size);
    for (int compiled = 0; compiled < 2; compiled++) {
        wk_scope_begin(c);
        b->x[i] = zeros(c, dtype, ndim, copy);
        n->tried++;
        n->refused += attempt(c, b, compiled, how) != WK_OK;
        wk_scope_end(c);
    }
    b->x[i] = old;
}

static void break_input(wk_ctx *c, broken *b, int i, counts *n) {
    const case_in *in = &b->k->in[i];
    int64_t size[WK_MAX_DIMS] = {0};
    for (int d = 0; d < WK_DTYPE_COUNT; d++)
        if (d != in->dtype)
            try_shape(c, b, i, (wk_dtype)d, in->ndim, in->size, "another dtype", n);
    for (int d = 0; d < in->ndim; d++) {
        static const int64_t change[] = {-1, 1, 7};
        memcpy(size, in->size, sizeof in->size);
        for (int k = 0; k < 3; k++) {
            size[d] = in->size[d] + change[k] < 0 ? 0 : in->size[d] + change[k];
            try_shape(c, b, i, (wk_dtype)in->dtype, in->ndim, size, "another size", n);
        }
        size[d] = 0;
        try_shape(c, b, i, (wk_dtype)in->dtype, in->ndim, size, "size 0", n);
        memcpy(size, in->size, sizeof in->size); /* without this dimension */
        memmove(size + d, size + d + 1, (size_t)(in->ndim - d - 1) * sizeof *size);
        try_shape(c, b, i, (wk_dtype)in->dtype, in->ndim - 1, size, "a dimension less", n);
    }
    size[0] = 2;
    memcpy(size + 1, in->size, sizeof in->size);
    try_shape(c, b, i, (wk_dtype)in->dtype, in->ndim + 1, size, "a dimension more", n);
    try_shape(c, b, i, (wk_dtype)in->dtype, 0, size, "no dimension", n);
    for (int d = 0; d < WK_MAX_DIMS; d++)
        size[d] = 1 + d % 2;
    try_shape(c, b, i, (wk_dtype)in->dtype, WK_MAX_DIMS, size, "as many dimensions as can be", n);
}

TEST(bad_inputs, of_every_op) {
    wk_ctx *c = wk_ctx_new(NULL);
    REQUIRE(c != NULL);
    counts all = {0};
    for (int r = 0; r < op_case_count; r++) {
        broken b = {.k = &op_cases[r]};
        case_instance t;
        counts n = {0};
        if (case_numel(b.k) > (wkt_quick() ? 40 : 300))
            continue;
        case_open(&t, b.k, CASE_NORMAL, NULL);
        wk_scope_begin(c);
        case_inputs(c, &t, b.x);
        for (int i = 0; i < b.k->nin; i++)
            break_input(c, &b, i, &n);
        wk_scope_end(c);
        case_close(&t);
        all.tried += n.tried;
        all.refused += n.refused;
    }
    CHECK(all.refused > all.tried / 4 && all.refused < all.tried);
    wk_ctx_free(c);
}

/* Inputs on different devices, from another context, and freed ones. */
TEST(bad_inputs, of_other_places) {
    wk_ctx *c = wk_ctx_new(NULL), *other = wk_ctx_new(NULL);
    REQUIRE(c && other);
    for (int r = 0; r < op_case_count; r++) {
        broken b = {.k = &op_cases[r]};
        case_instance t;
        if (!b.k->nin || case_numel(b.k) > 40)
            continue;
        case_open(&t, b.k, CASE_NORMAL, NULL);
        wk_scope_begin(c);
        wk_scope_begin(other);
        case_inputs(c, &t, b.x);
        for (int i = 0; i < b.k->nin; i++) {
            wki_tensor *old = b.x[i];
            b.x[i] = case_tensor(other, &t.x[i], CASE_PLAIN, 0);
            wk_status s = attempt(c, &b, false, "of another context");
            CHECK(s == WK_HANDLE || wki_ops[b.k->op].klass == WKI_COMPOSITE);
            wk_error_take(other, NULL);
            wk_use_device(c, WK_NULL);
            b.x[i] = case_tensor(c, &t.x[i], CASE_PLAIN, 0);
            wk_use_device(c, WK_CPU);
            s = attempt(c, &b, false, "on another device");
            CHECK(b.k->nin == 1 || s == WK_DEVICE || wki_ops[b.k->op].klass == WKI_COMPOSITE);
            b.x[i] = old;
        }
        wk_scope_end(other);
        wk_scope_end(c);
        case_close(&t);
    }
    wk_ctx_free(c);
    wk_ctx_free(other);
}

/* ---- indices --------------------------------------------------------------------------------------------------------- */

TEST(bad_inputs, indices_out_of_range) {
    static const uint16_t ops[] = {WKI_OP_nll_rows,       WKI_OP_cross_entropy,   WKI_OP_embedding,
                                   WKI_OP_embedding_grad, WKI_OP_max_pool2d_grad, WKI_OP_max_pool2d_gather};
    wk_ctx *c = wk_ctx_new(NULL);
    REQUIRE(c != NULL);
    for (int r = 0; r < op_case_count; r++) {
        broken b = {.k = &op_cases[r]};
        bool checks = false;
        for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
            checks |= b.k->op == ops[i];
        case_instance t;
        case_open(&t, b.k, CASE_NORMAL, NULL);
        if (checks && t.x[1].n) {
            const double bad[] = {-1, b.k->in[1].hi + 1, b.k->in[1].dtype == WK_I64 ? 0x1p40 : 0x1p30};
            for (int k = 0; k < 6; k++) {
                int64_t at = (int64_t)wkt_below((uint64_t)t.x[1].n);
                double old = t.x[1].v[at];
                t.x[1].v[at] = bad[k / 2];
                wk_scope_begin(c);
                case_inputs(c, &t, b.x);
                wk_status s = attempt(c, &b, k % 2, "an index out of range");
                if (s != WK_INDEX)
                    FAIL("%s: index %g gives %s", b.k->name, bad[k / 2], wk_status_name(s));
                wk_scope_end(c);
                t.x[1].v[at] = old;
            }
        }
        case_close(&t);
    }
    wk_ctx_free(c);
}

/* ---- attributes ------------------------------------------------------------------------------------------------------ */

/* f32 tensors: a number n, v (3), m (2, 3), t (2, 3, 4), p (1, 2, 5, 5), w (2, 2, 3, 3); integers: i (3) i64, k (1, 2, 2, 2) i32. */
typedef struct operands {
    wki_tensor *n, *v, *m, *t, *p, *w, *i, *k;
} operands;

typedef struct bad_call {
    const char *name;
    wk_status status;
    void (*call)(wk_ctx *c, const operands *o);
} bad_call;

#define L(...)                                                                                               \
    (const int64_t[]) { __VA_ARGS__ }
#define BADS(BAD)                                                                                            \
    BAD(SHAPE, sum_dim_high, wki_sum(c, o->t, L(3), 1, false))                                               \
    BAD(SHAPE, sum_dim_low, wki_sum(c, o->t, L(-4), 1, false))                                               \
    BAD(SHAPE, sum_dim_twice, wki_sum(c, o->t, L(1, -2), 2, false))                                          \
    BAD(SHAPE, sum_dims_many, wki_sum(c, o->t, L(0, 1, 2, 0, 1, 2, 0, 1, 2), 9, false))                      \
    BAD(INVALID, sum_dims_null, wki_sum(c, o->t, NULL, 2, false))                                            \
    BAD(INVALID, sum_dims_negative, wki_sum(c, o->t, L(0), -1, false))                                       \
    BAD(SHAPE, max_dim, wki_max(c, o->t, L(5), 1, true))                                                     \
    BAD(SHAPE, argmax_dim, wki_argmax(c, o->t, 3, true))                                                     \
    BAD(SHAPE, argmax_none, wki_argmax(c, wki_slice(c, o->t, 1, 0, 0, 1), 1, true))                          \
    BAD(DTYPE, argmax_i64, wki_argmax(c, o->i, 0, true))                                                     \
    BAD(INVALID, arange_step, wki_arange(c, WK_F32, 0, 1, 0))                                                \
    BAD(INVALID, arange_nan, wki_arange(c, WK_F32, 0, NAN, 1))                                               \
    BAD(SHAPE, arange_many, wki_arange(c, WK_F32, 0, 1e300, 1))                                              \
    BAD(DTYPE, arange_dtype, wki_arange(c, WK_F64, 0, 1, 1))                                                 \
    BAD(DTYPE, arange_no_dtype, wki_arange(c, (wk_dtype)77, 0, 1, 1))                                        \
    BAD(INVALID, arange_half, wki_arange(c, WK_I64, 0.5, 3, 1))                                              \
    BAD(INVALID, arange_u8, wki_arange(c, WK_U8, 0, 300, 1))                                                 \
    BAD(INVALID, arange_last, wki_arange(c, WK_I64, 0, 0x1p33, 0x1p31))                                      \
    BAD(SHAPE, mean_dim, wki_mean(c, o->t, L(3), 1, true))                                                   \
    BAD(SHAPE, mean_dim_twice, wki_mean(c, o->t, L(0, 0), 2, true))                                          \
    BAD(SHAPE, softmax_dim, wki_softmax(c, o->t, 3))                                                         \
    BAD(SHAPE, log_softmax_dim, wki_log_softmax(c, o->t, -4))                                                \
    BAD(SHAPE, softmax_number, wki_softmax(c, o->n, 1))                                                      \
    BAD(SHAPE, permute_count, wki_permute(c, o->t, L(0, 1), 2))                                              \
    BAD(SHAPE, permute_twice, wki_permute(c, o->t, L(0, 1, 1), 3))                                           \
    BAD(SHAPE, permute_range, wki_permute(c, o->t, L(0, 1, 3), 3))                                           \
    BAD(INVALID, permute_null, wki_permute(c, o->t, NULL, 3))                                                \
    BAD(SHAPE, expand_fewer, wki_expand(c, o->t, 2, L(3, 4)))                                                \
    BAD(SHAPE, expand_other, wki_expand(c, o->t, 3, L(2, 5, 4)))                                             \
    BAD(SHAPE, expand_negative, wki_expand(c, o->t, 4, L(-1, 2, 3, 4)))                                      \
    BAD(SHAPE, expand_huge, wki_expand(c, o->n, 3, L(1 << 30, 1 << 30, 1 << 30)))                            \
    BAD(SHAPE, expand_many, wki_expand(c, o->n, 9, L(1, 1, 1, 1, 1, 1, 1, 1, 1)))                            \
    BAD(SHAPE, reshape_two, wki_reshape(c, o->t, 2, L(-1, -1)))                                              \
    BAD(SHAPE, reshape_count, wki_reshape(c, o->t, 2, L(5, 5)))                                              \
    BAD(SHAPE, reshape_rest, wki_reshape(c, o->t, 2, L(5, -1)))                                              \
    BAD(SHAPE, reshape_negative, wki_reshape(c, o->t, 2, L(-2, -12)))                                        \
    BAD(SHAPE, reshape_zero, wki_reshape(c, o->t, 2, L(0, -1)))                                              \
    BAD(SHAPE, reshape_wraps, wki_reshape(c, o->t, 3, L(INT64_MAX, 2, 24)))                                  \
    BAD(SHAPE, reshape_many, wki_reshape(c, o->n, 9, L(1, 1, 1, 1, 1, 1, 1, 1, 1)))                          \
    BAD(INVALID, reshape_null, wki_reshape(c, o->t, 2, NULL))                                                \
    BAD(SHAPE, reshape_view_count, wki_reshape_view(c, o->t, 1, L(25)))                                      \
    BAD(SHAPE, slice_dim, wki_slice(c, o->t, 3, 0, 1, 1))                                                    \
    BAD(INVALID, slice_step, wki_slice(c, o->t, 0, 0, 1, 0))                                                 \
    BAD(INVALID, slice_back, wki_slice(c, o->t, 0, 1, 0, -1))                                                \
    BAD(SHAPE, slice_number, wki_slice(c, o->n, 0, 0, 1, 1))                                                 \
    BAD(SHAPE, pad_slice_range, wki_pad_slice(c, o->m, 2, L(2, 3), 1, 1, 1))                                 \
    BAD(SHAPE, pad_slice_start, wki_pad_slice(c, o->m, 2, L(2, 9), 1, -1, 1))                                \
    BAD(SHAPE, pad_slice_step, wki_pad_slice(c, o->m, 2, L(2, 9), 1, 0, 0))                                  \
    BAD(SHAPE, pad_slice_dim, wki_pad_slice(c, o->m, 2, L(2, 9), 2, 0, 1))                                   \
    BAD(SHAPE, pad_slice_wraps, wki_pad_slice(c, o->m, 2, L(2, 9), 1, 0, INT64_MAX / 2 + 1))                 \
    BAD(SHAPE, transpose_dim, wki_transpose(c, o->t, 0, 3))                                                  \
    BAD(SHAPE, flatten_dim, wki_flatten(c, o->t, 3))                                                         \
    BAD(SHAPE, causal_vector, wki_causal_fill(c, o->v))                                                      \
    BAD(DTYPE, cast_dtype, wki_cast(c, o->t, WK_DTYPE_COUNT))                                                \
    BAD(DTYPE, cast_negative, wki_cast(c, o->t, (wk_dtype)-1))                                               \
    BAD(DTYPE, full_dtype, wki_full(c, (wk_dtype)77, 1, L(3), 0))                                            \
    BAD(SHAPE, full_negative, wki_full(c, WK_F32, 1, L(-3), 0))                                              \
    BAD(SHAPE, full_huge, wki_full(c, WK_F32, 2, L(INT64_MAX, INT64_MAX), 0))                                \
    BAD(INVALID, full_null, wki_full(c, WK_F32, 2, NULL, 0))                                                 \
    BAD(SHAPE, full_many, wki_full(c, WK_F32, 9, L(1, 1, 1, 1, 1, 1, 1, 1, 1), 0))                           \
    BAD(NOMEM, full_memory, wki_full(c, WK_F32, 1, L((int64_t)1 << 56), 0))                                  \
    BAD(SHAPE, rand_negative, wki_rand(c, 1, L(-1)))                                                         \
    BAD(SHAPE, randn_many, wki_randn(c, 9, L(1, 1, 1, 1, 1, 1, 1, 1, 1)))                                    \
    BAD(SHAPE, mask_negative, wki_dropout_mask(c, 1, L(-1), 0.5))                                            \
    BAD(INVALID, dropout_one, wki_dropout(c, o->t, 1))                                                       \
    BAD(INVALID, dropout_negative, wki_dropout(c, o->t, -0.1))                                               \
    BAD(INVALID, dropout_nan, wki_dropout(c, o->t, NAN))                                                     \
    BAD(INVALID, conv_stride, wki_conv2d(c, o->p, o->w, NULL, 0, 1, 0, 0))                                   \
    BAD(INVALID, conv_stride_huge, wki_conv2d(c, o->p, o->w, NULL, INT64_MAX, 1, 0, 0))                      \
    BAD(INVALID, conv_pad, wki_conv2d(c, o->p, o->w, NULL, 1, 1, 0, -1))                                     \
    BAD(INVALID, conv_pad_huge, wki_conv2d(c, o->p, o->w, NULL, 1, 1, INT64_MAX, 0))                         \
    BAD(SHAPE, conv_dx_size, wki_conv2d_dx(c, o->p, o->w, 9, 7, 1, 1, 0, 0))                                 \
    BAD(SHAPE, conv_dx_negative, wki_conv2d_dx(c, o->p, o->w, -7, 7, 1, 1, 0, 0))                            \
    BAD(INVALID, conv_dw_size, wki_conv2d_dw(c, o->p, o->p, 0, 1, 1, 1, 0, 0))                               \
    BAD(SHAPE, conv_dw_large, wki_conv2d_dw(c, o->p, o->p, 6, 1, 1, 1, 0, 0))                                \
    BAD(INVALID, pool_size, wki_max_pool2d(c, o->p, 0, 2, 1, 1, 0, 0, NULL))                                 \
    BAD(SHAPE, pool_large, wki_max_pool2d(c, o->p, 6, 2, 1, 1, 0, 0, NULL))                                  \
    BAD(INVALID, pool_stride, wki_max_pool2d(c, o->p, 2, 2, -1, 1, 0, 0, NULL))                              \
    BAD(INVALID, pool_pad, wki_max_pool2d(c, o->p, 2, 2, 1, 1, 2, 0, NULL))                                  \
    BAD(SHAPE, pool_grad_negative, wki_max_pool2d_grad(c, o->w, wki_cast(c, o->w, WK_I32), -1, 2))           \
    BAD(SHAPE, embedding_grad_negative, wki_embedding_grad(c, wki_transpose(c, o->m, 0, 1), o->i, -1))       \
    BAD(INDEX, embedding_grad_none, wki_embedding_grad(c, wki_transpose(c, o->m, 0, 1), o->i, 0))            \
    BAD(SHAPE, attention_rank, wki_attention(c, o->t, o->p, o->p, false, 0))                                 \
    BAD(SHAPE, attention_sizes, wki_attention(c, o->p, o->w, o->p, true, 1))                                 \
    BAD(SHAPE, matmul_number, wki_matmul(c, o->n, o->m))                                                     \
    BAD(SHAPE, matmul_sizes, wki_matmul(c, o->m, o->m))                                                      \
    BAD(INVALID, linear_absent, wki_linear(c, o->m, NULL, NULL))                                             \
    BAD(INVALID, add_absent, wki_add(c, o->m, NULL))                                                         \
    BAD(INVALID, sgd_count, wki_sgd_(c, (wki_tensor *[]){o->m, o->m, o->m}, 3, 1, 0))                        \
    BAD(INVALID, sgd_none, wki_sgd_(c, NULL, 0, 1, 0))                                                       \
    BAD(SHAPE, adamw_shapes,                                                                                 \
        wki_adamw_(c, (wki_tensor *[]){o->m, o->m, o->m, o->v}, 4, 1, 1, 1, 1, 1, 1, 1))                     \
    BAD(INVALID, copy_expanded, wki_copy_(c, wki_expand(c, o->v, 2, L(2, 3)), o->m))

#define FUNCTION(status, name, ...)                                                                          \
    static void bad_##name(wk_ctx *c, const operands *o) { (void)o, (void)(__VA_ARGS__); }
BADS(FUNCTION)
#define ENTRY(status, name, ...) {#name, WK_##status, bad_##name},
static const bad_call bad_calls[] = {BADS(ENTRY)};

typedef struct bad_job {
    const bad_call *b;
    operands o;
} bad_job;

static void call_bad(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    const bad_job *j = self;
    (void)in, (void)nin, (void)nout;
    j->b->call(c, &j->o);
    out[0] = wki_handle(j->o.n);
}

TEST(bad_inputs, attributes) {
    wk_ctx *c = wk_ctx_new(NULL);
    REQUIRE(c != NULL);
    bad_job j = {.o = {.n = zeros(c, WK_F32, 0, NULL),
                       .v = zeros(c, WK_F32, 1, L(3)),
                       .m = zeros(c, WK_F32, 2, L(2, 3)),
                       .t = zeros(c, WK_F32, 3, L(2, 3, 4)),
                       .p = zeros(c, WK_F32, 4, L(1, 2, 5, 5)),
                       .w = zeros(c, WK_F32, 4, L(2, 2, 3, 3)),
                       .i = zeros(c, WK_I64, 1, L(3)),
                       .k = zeros(c, WK_I32, 4, L(1, 2, 2, 2))}};
    for (size_t i = 0; i < sizeof bad_calls / sizeof *bad_calls; i++)
        for (int compiled = 0; compiled < 2; compiled++) {
            wk_tensor *out = NULL;
            j.b = &bad_calls[i];
            wk_scope_begin(c);
            if (compiled)
                wk_call_n(wk_compile(c, call_bad, &j, NULL), NULL, 0, &out, 1);
            else
                call_bad(c, &j, NULL, 0, &out, 1);
            wk_status s = take(c, j.b->name, -1, "attributes");
            if (s != j.b->status &&
                !(compiled && j.b->status == WK_NOMEM && s == WK_OK)) /* dead: never allocated */
                FAIL("%s: %s, not %s", j.b->name, wk_status_name(s), wk_status_name(j.b->status));
            wk_scope_end(c);
        }
    wk_ctx_free(c);
}
