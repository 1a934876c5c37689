/* Device functions: those of the hand-written kernels, those of generated texts, and those of user ops. Each text is
 * compiled at most once in a runtime. Calls base, cu.h and the emitter's prelude. */
#include "backend/cuda/cuda.h"

#include "base/hash.h"
#include "embed.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

/* Kernels that are compiled together where there are many to compile; programs are compiled side by side. */
enum { KERNELS_A_PROGRAM = 8, BUCKETS = 256 };

typedef struct text {
    uint64_t hash;
    char *src;
    wki_cu_function *fn;
    struct text *next;
} text;

typedef struct module {
    wki_cu_module *m;
    struct module *next;
} module;

struct wki_cuda_texts {
    text *bucket[BUCKETS];
    module *modules;
    char *prelude;
    char arch[24];
};

/* ---- hand-written kernels ---------------------------------------------------------------------------------------------- */

static const struct {
    uint8_t family, blocks;
    uint16_t threads;
    const char *name, *params;
} functions[] = {
#define F(family, name, params, threads, blocks) {WKI_FAMILY_##family, blocks, threads, #name, #params},
    WKK_KERNELS(F)
#undef F
};

static const char *const families[] = {
    [WKI_FAMILY_COPY] = wki_embed_k_copy_cuh,   [WKI_FAMILY_PRODUCT] = wki_embed_k_product_cuh,
    [WKI_FAMILY_CONV] = wki_embed_k_conv_cuh,   [WKI_FAMILY_POOL] = wki_embed_k_pool_cuh,
    [WKI_FAMILY_INDEX] = wki_embed_k_index_cuh, [WKI_FAMILY_WIDE] = wki_embed_k_wide_cuh,
};

enum { FAMILIES = sizeof families / sizeof *families, ENTRY_BYTES = 256 };

/* The kernel itself, around its body. */
static char *put_entry(char *at, int fn) {
    char blocks[8] = "";
    if (functions[fn].blocks)
        snprintf(blocks, sizeof blocks, ", %d", functions[fn].blocks);
    return at +
           snprintf(at, ENTRY_BYTES,
                    "extern \"C\" __global__ void __launch_bounds__(%d%s) %s(%s p, const wkk_u64 *args) {\n"
                    "    wkk_begin();\n"
                    "    %s_body(p, args);\n"
                    "}\n",
                    functions[fn].threads, blocks, functions[fn].name, functions[fn].params,
                    functions[fn].name);
}

char *wki_cuda_fn_text(wki_cuda_fn fn) {
    const char *part[3 + FAMILIES] = {wki_embed_k_params_cuh, wki_embed_k_common_cuh, wki_embed_k_tile_cuh};
    const int first = fn == WKI_FN_COUNT ? 0 : (int)fn, end = fn == WKI_FN_COUNT ? (int)fn : (int)fn + 1;
    int np = 3;
    for (int f = 0; f < FAMILIES; f++)
        if (fn == WKI_FN_COUNT || f == functions[fn].family)
            part[np++] = families[f];
    size_t n = (size_t)(end - first) * ENTRY_BYTES + 1;
    for (int i = 0; i < np; i++)
        n += strlen(part[i]);
    char *src = wki_malloc(n), *at = src;
    if (!src)
        return NULL;
    for (int i = 0; i < np; i++)
        at = stpcpy(at, part[i]);
    for (int i = first; i < end; i++)
        at = put_entry(at, i);
    return src;
}

static int load_fn(wki_cuda *rt, wki_cuda_fn fn, wki_cu_error *err) {
    char *src = wki_cuda_fn_text(fn);
    if (!src) {
        *err = (wki_cu_error){.code = WKI_CU_HOST_MEMORY, .text = "no host memory for a kernel's text"};
        return err->code;
    }
    wki_cu_module *m;
    wki_cu_function *f;
    wki_nvrtc_source source = {.text = src, .name = functions[fn].name};
    int code = wki_cu_module_get(rt->dev, &source, &m, err);
    if (!code)
        code = wki_cu_module_function(rt->dev, m, functions[fn].name, 0, &f, err);
    if (!code)
        atomic_store_explicit(&rt->fn[fn], f, memory_order_release);
    wki_free(src);
    return code;
}

bool wki_cuda_fn_get(wk_ctx *c, wki_cuda_fn fn, wki_cu_function **out) {
    wki_cuda_ctx *s = wki_cuda_of(c);
    wki_cu_error err = {0};
    if (!s)
        return false;
    *out = atomic_load_explicit(&s->rt->fn[fn], memory_order_acquire);
    if (*out)
        return true;
    pthread_mutex_lock(&s->rt->lock);
    int code = s->rt->fn[fn] ? WKI_CU_OK : load_fn(s->rt, fn, &err);
    *out = s->rt->fn[fn];
    pthread_mutex_unlock(&s->rt->lock);
    return !code || wki_cuda_fail(c, &err);
}

bool wki_cuda_kernel_of(wk_ctx *c, wki_cuda_fn fn, void **params, int64_t x, int64_t y, wki_cu_kernel *out) {
    wki_cu_function *f;
    if (!wki_cuda_fn_get(c, fn, &f))
        return false;
    *out = (wki_cu_kernel){.function = f,
                           .grid = {(unsigned)x, (unsigned)y, 1},
                           .block = {functions[fn].threads, 1, 1},
                           .params = params,
                           .name = functions[fn].name,
                           .overlap = true};
    return true;
}

bool wki_cuda_launch_grid(wk_ctx *c, wki_cuda_fn fn, const void *params, int64_t x, int64_t y) {
    wki_cuda_ctx *s = wki_cuda_of(c);
    wki_cu_error err = {0};
    wki_cu_kernel k;
    if (x <= 0 || y <= 0)
        return true;
    if (!s || !wki_cuda_kernel_of(c, fn, (void *[]){(void *)(uintptr_t)params, &s->args}, x, y, &k))
        return false;
    return !wki_cu_launch(s->stream, &k, &err) || wki_cuda_fail(c, &err);
}

bool wki_cuda_launch(wk_ctx *c, wki_cuda_fn fn, const void *params, int64_t work, int64_t each) {
    wki_cuda_ctx *s = wki_cuda_of(c);
    if (!s)
        return false;
    int64_t blocks = work / each + (work % each != 0),
            most = (int64_t)wki_cu_device_info_of(s->rt->dev)->sm_count * 32;
    return wki_cuda_launch_grid(c, fn, params, blocks < most ? blocks : most, 1);
}

/* ---- generated texts --------------------------------------------------------------------------------------------------- */

typedef struct batch { /* programs being compiled */
    wki_cuda *rt;
    const wki_cu_kernel_text **kernel; /* nk to compile */
    int nk, per;
    wki_nvrtc *rtc;
    wki_nvrtc_binary *binary; /* per program */
    wki_cu_error *err;
} batch;

static text *find_text(wki_cuda_texts *x, const wki_cu_kernel_text *t) {
    text *e = x->bucket[t->hash % BUCKETS];
    while (e && (e->hash != t->hash || strcmp(e->src, t->src) != 0))
        e = e->next;
    return e;
}

static void compile_programs(void *arg, int64_t begin, int64_t end, int worker) {
    batch *b = arg;
    wki_cuda_texts *x = b->rt->texts;
    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        int first = (int)i * b->per, last = first + b->per < b->nk ? first + b->per : b->nk;
        size_t n = strlen(x->prelude) + 1;
        for (int k = first; k < last; k++)
            n += strlen(b->kernel[k]->src) + 1;
        char *src = wki_malloc(n), *at = src;
        if (!src) {
            b->err[i] =
                (wki_cu_error){.code = WKI_CU_HOST_MEMORY, .text = "no host memory for a kernel's text"};
            continue;
        }
        at = stpcpy(at, x->prelude);
        for (int k = first; k < last; k++)
            at = stpcpy(stpcpy(at, b->kernel[k]->src), "\n");
        wki_nvrtc_source source = {.text = src, .name = "plan.cu", .arch = x->arch};
        wki_nvrtc_compile(b->rtc, &source, &b->binary[i], &b->err[i]);
        wki_free(src);
    }
}

/* Loads program i and files its kernels. */
static int load_program(batch *b, int i, wki_cu_error *err) {
    wki_cuda_texts *x = b->rt->texts;
    module *m = wki_calloc(1, sizeof *m);
    int code = WKI_CU_HOST_MEMORY;
    if (!m)
        goto nomem;
    code = wki_cu_module_load(b->rt->dev, b->binary[i].data, &m->m, err);
    if (code) {
        wki_free(m);
        return code;
    }
    m->next = x->modules;
    x->modules = m;
    for (int k = i * b->per; k < b->nk && k < (i + 1) * b->per; k++) {
        const wki_cu_kernel_text *t = b->kernel[k];
        text *e = wki_calloc(1, sizeof *e);
        code = WKI_CU_HOST_MEMORY;
        if (!e || !(e->src = wki_malloc(strlen(t->src) + 1))) {
            wki_free(e);
            goto nomem;
        }
        strcpy(e->src, t->src);
        e->hash = t->hash;
        code = wki_cu_module_function(b->rt->dev, m->m, t->name, 0, &e->fn, err);
        if (code) {
            wki_free(e->src);
            wki_free(e);
            return code;
        }
        e->next = x->bucket[t->hash % BUCKETS];
        x->bucket[t->hash % BUCKETS] = e;
    }
    return WKI_CU_OK;
nomem:
    *err = (wki_cu_error){.code = code, .text = "no host memory for a kernel"};
    return code;
}

static int compile_all(wk_ctx *c, batch *b, wki_cu_error *err) {
    int programs = b->nk / KERNELS_A_PROGRAM + 1, threads = wki_pool_size(c->rt->pool);
    programs = programs < threads ? programs : threads;
    b->per = (b->nk + programs - 1) / programs;
    programs = (b->nk + b->per - 1) / b->per;
    b->binary = wki_calloc((size_t)programs, sizeof *b->binary);
    b->err = wki_calloc((size_t)programs, sizeof *b->err);
    int code = b->binary && b->err ? WKI_CU_OK : WKI_CU_HOST_MEMORY;
    if (code)
        *err = (wki_cu_error){.code = code, .text = "no host memory to compile kernels"};
    else
        wki_pool_for(c->rt->pool, programs, compile_programs, b, 1);
    for (int i = 0; i < programs && b->binary && b->err; i++) {
        if (!code && b->err[i].code) {
            *err = b->err[i];
            code = err->code;
        }
        if (!code)
            code = load_program(b, i, err);
        wki_nvrtc_binary_free(&b->binary[i]);
    }
    wki_free(b->binary);
    wki_free(b->err);
    return code;
}

static int open_texts(wki_cuda *rt, wki_nvrtc **rtc, wki_cu_error *err) {
    const wki_cu_device_info *info = wki_cu_device_info_of(rt->dev);
    int code = wki_cu_nvrtc(rt->cu, rtc, err);
    if (code || rt->texts)
        return code;
    wki_cuda_texts *x = wki_calloc(1, sizeof *x);
    char *prelude = x ? wki_emit_cuda_prelude() : NULL;
    if (!prelude) {
        *err = (wki_cu_error){.code = WKI_CU_HOST_MEMORY, .text = "no host memory for the texts of kernels"};
        wki_free(x);
        return err->code;
    }
    code = wki_nvrtc_arch(*rtc, info->major, info->minor, x->arch, err);
    if (code) {
        wki_free(prelude);
        wki_free(x);
        return code;
    }
    x->prelude = prelude;
    rt->texts = x;
    return WKI_CU_OK;
}

/* With the lock held. */
static int get_locked(wk_ctx *c, wki_cuda *rt, const wki_cu_kernel_text *t, int n, wki_cu_function **fn,
                      wki_cu_error *err) {
    wki_nvrtc *rtc;
    int code = open_texts(rt, &rtc, err);
    if (code)
        return code;
    batch b = {.rt = rt, .rtc = rtc, .kernel = wki_malloc(((size_t)n + 1) * sizeof *b.kernel)};
    if (!b.kernel) {
        *err = (wki_cu_error){.code = WKI_CU_HOST_MEMORY, .text = "no host memory to compile kernels"};
        return err->code;
    }
    for (int i = 0; i < n; i++) {
        bool known = find_text(rt->texts, &t[i]) != NULL;
        for (int k = 0; !known && k < b.nk; k++)
            known = b.kernel[k]->hash == t[i].hash && !strcmp(b.kernel[k]->src, t[i].src);
        if (!known)
            b.kernel[b.nk++] = &t[i];
    }
    if (b.nk)
        code = compile_all(c, &b, err);
    for (int i = 0; !code && i < n; i++)
        fn[i] = find_text(rt->texts, &t[i])->fn;
    wki_free(b.kernel);
    return code;
}

bool wki_cuda_texts_get(wk_ctx *c, const wki_cu_kernel_text *t, int n, wki_cu_function **fn) {
    wki_cuda_ctx *s = wki_cuda_of(c);
    wki_cu_error err = {0};
    if (!s)
        return false;
    if (n == 0)
        return true;
    pthread_mutex_lock(&s->rt->lock);
    int code = get_locked(c, s->rt, t, n, fn, &err);
    pthread_mutex_unlock(&s->rt->lock);
    return !code || wki_cuda_fail(c, &err);
}

void wki_cuda_texts_free(wki_cuda *rt) {
    wki_cuda_texts *x = rt->texts;
    if (!x)
        return;
    for (int i = 0; i < BUCKETS; i++)
        for (text *e = x->bucket[i], *n; e; e = n) {
            n = e->next;
            wki_free(e->src);
            wki_free(e);
        }
    for (module *m = x->modules, *n; m; m = n) {
        n = m->next;
        wki_cu_module_unload(rt->dev, m->m);
        wki_free(m);
    }
    wki_free(x->prelude);
    wki_free(x);
    rt->texts = NULL;
}

/* ---- user ops ---------------------------------------------------------------------------------------------------------- */

/* The name of the first __global__ function: the identifier before the first '(' after its return type, attributes with
 * parentheses left out. */
static bool global_name(const char *src, char name[128]) {
    const char *p = strstr(src, "__global__");
    p = p ? strstr(p, "void") : NULL;
    p = p ? p + strlen("void") : NULL;
    while (p) {
        while (*p && !isalpha((unsigned char)*p) && *p != '_')
            p++;
        size_t n = 0;
        while (isalnum((unsigned char)p[n]) || p[n] == '_')
            n++;
        const char *q = p + n;
        while (isspace((unsigned char)*q))
            q++;
        if (!n || n > 127 || *q != '(')
            return false;
        if (n != strlen("__launch_bounds__") || strncmp(p, "__launch_bounds__", n) != 0) {
            memcpy(name, p, n);
            name[n] = 0;
            return true;
        }
        p = strchr(q, ')');
    }
    return false;
}

bool wki_cuda_user_fn(wk_ctx *c, const wki_op *op, wki_cu_function **fn) {
    const wk_op_desc *d = op->user;
    wki_cuda_ctx *s = wki_cuda_of(c);
    wki_cu_error err = {0};
    wki_cu_module *m;
    char name[128];
    c->cur_op = op;
    if (!s)
        return false;
    if (!d->cuda)
        return wki_fail(c, WK_DEVICE, "the op has no CUDA kernel");
    if (!global_name(d->cuda, name))
        return wki_fail(c, WK_INVALID, "the op's CUDA text has no `__global__ void NAME(...)`");
    wki_nvrtc_source source = {.text = d->cuda, .name = op->name};
    int code = wki_cu_module_get(s->rt->dev, &source, &m, &err);
    if (!code)
        code = wki_cu_module_function(s->rt->dev, m, name, 0, fn, &err);
    return !code ||
           (err.code == WKI_CU_COMPILE ? wki_fail(c, WK_INVALID, "%s", err.text) : wki_cuda_fail(c, &err));
}
