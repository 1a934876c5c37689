/* Modules: loading compiled kernels, the cache of those compiled in this process, and launching. Calls base,
 * cu_nvrtc and the driver. */
#include "backend/cuda/cu_private.h"
#include "base/alloc.h"
#include "base/hash.h"

#include <string.h>

/* Above this a kernel must be told how much dynamic shared memory it may be launched with. */
#define SMEM_WITHOUT_ASKING 48u * 1024

/* The key is the text, the architecture and the options, each with its NUL, end to end. */
typedef struct entry {
    struct entry *next;
    uint64_t hash;
    wki_cu_module *module;
    size_t key_size;
    char key[];
} entry;

struct wki_cu_module_cache {
    entry **buckets;
    size_t n_buckets, n; /* n_buckets is a power of two */
};

int wki_cu_module_load(wki_cu_device *dev, const void *image, wki_cu_module **out, wki_cu_error *err) {
    *out = NULL;
    int code = wki_cu_enter(dev, err);
    return code ? code : WKI_DRV(dev->cu, err, cuModuleLoadData, out, image);
}

void wki_cu_module_unload(wki_cu_device *dev, wki_cu_module *m) {
    if (m && !wki_cu_enter(dev, NULL))
        dev->cu->api.cuModuleUnload(m);
}

int wki_cu_module_function(wki_cu_device *dev, wki_cu_module *m, const char *name, unsigned max_smem,
                           wki_cu_function **out, wki_cu_error *err) {
    *out = NULL;
    wki_cu_function *f = NULL;
    int code = wki_cu_enter(dev, err);
    if (!code)
        code = WKI_DRV(dev->cu, err, cuModuleGetFunction, &f, m, name);
    if (!code && max_smem > SMEM_WITHOUT_ASKING)
        code = WKI_DRV(dev->cu, err, cuFuncSetAttribute, f, WKI_FUNC_SMEM, (int)max_smem);
    if (code)
        wki_cu_fail_in(err, name);
    else
        *out = f;
    return code;
}

/* ---- Cache ----------------------------------------------------------------------------------------------- */

static char *add_key(char *at, const char *text) {
    size_t n = strlen(text) + 1;
    memcpy(at, text, n);
    return at + n;
}

static entry *make_entry(const wki_nvrtc_source *source) {
    size_t size = strlen(source->text) + strlen(source->arch) + 2;
    for (int i = 0; i < source->n_options; i++)
        size += strlen(source->options[i]) + 1;
    entry *e = wki_calloc(1, sizeof *e + size);
    if (!e)
        return NULL;
    e->key_size = size;
    char *at = add_key(add_key(e->key, source->text), source->arch);
    for (int i = 0; i < source->n_options; i++)
        at = add_key(at, source->options[i]);
    e->hash = wki_hash(e->key, size, 0);
    return e;
}

static entry *find_entry(const wki_cu_module_cache *cache, const entry *like) {
    entry *e = cache->n_buckets ? cache->buckets[like->hash & (cache->n_buckets - 1)] : NULL;
    while (e && (e->hash != like->hash || e->key_size != like->key_size ||
                 memcmp(e->key, like->key, e->key_size) != 0))
        e = e->next;
    return e;
}

static bool reserve_bucket(wki_cu_module_cache *cache) {
    if (cache->n < cache->n_buckets)
        return true;
    size_t n = cache->n_buckets ? 2 * cache->n_buckets : 64;
    entry **fresh = wki_calloc(n, sizeof(void *));
    if (!fresh)
        return false;
    for (size_t i = 0; i < cache->n_buckets; i++)
        for (entry *e = cache->buckets[i], *next; e; e = next) {
            next = e->next;
            e->next = fresh[e->hash & (n - 1)];
            fresh[e->hash & (n - 1)] = e;
        }
    wki_free(cache->buckets);
    cache->buckets = fresh;
    cache->n_buckets = n;
    return true;
}

static int compile_module(wki_cu_device *dev, wki_nvrtc *rtc, const wki_nvrtc_source *source,
                          wki_cu_module **out, wki_cu_error *err) {
    wki_nvrtc_binary binary;
    int code = wki_nvrtc_compile(rtc, source, &binary, err);
    if (!code) {
        code = wki_cu_module_load(dev, binary.data, out, err);
        if (code)
            wki_cu_fail_in(err, source->name);
    }
    wki_nvrtc_binary_free(&binary);
    return code;
}

/* With the device's lock held. */
static int get_locked(wki_cu_device *dev, wki_nvrtc *rtc, const wki_nvrtc_source *source, wki_cu_module **out,
                      wki_cu_error *err) {
    if (!dev->modules)
        dev->modules = wki_calloc(1, sizeof *dev->modules);
    entry *fresh = dev->modules ? make_entry(source) : NULL;
    if (!fresh)
        return wki_cu_fail(err, WKI_CU_HOST_MEMORY, "no host memory for a kernel's cache entry");
    wki_cu_module_cache *cache = dev->modules;
    entry *found = find_entry(cache, fresh);
    if (found) {
        wki_free(fresh);
        *out = found->module;
        return WKI_CU_OK;
    }
    int code = WKI_CU_HOST_MEMORY;
    if (!reserve_bucket(cache))
        wki_cu_fail(err, code, "no host memory for a kernel's cache entry");
    else
        code = compile_module(dev, rtc, source, &fresh->module, err);
    if (code) {
        wki_free(fresh);
        return code;
    }
    entry **bucket = &cache->buckets[fresh->hash & (cache->n_buckets - 1)];
    fresh->next = *bucket;
    *bucket = fresh;
    cache->n++;
    *out = fresh->module;
    return WKI_CU_OK;
}

int wki_cu_module_get(wki_cu_device *dev, const wki_nvrtc_source *source, wki_cu_module **out,
                      wki_cu_error *err) {
    *out = NULL;
    wki_nvrtc *rtc;
    wki_nvrtc_source own = *source;
    char arch[24];
    int code = wki_cu_nvrtc(dev->cu, &rtc, err);
    if (!code && !own.arch) {
        own.arch = arch;
        code = wki_nvrtc_arch(rtc, dev->info.major, dev->info.minor, arch, err);
    }
    if (code)
        return code;
    pthread_mutex_lock(&dev->lock);
    code = get_locked(dev, rtc, &own, out, err);
    pthread_mutex_unlock(&dev->lock);
    return code;
}

void wki_cu_module_cache_destroy(wki_cu_device *dev, wki_cu_module_cache *cache) {
    if (!cache)
        return;
    for (size_t i = 0; i < cache->n_buckets; i++)
        for (entry *e = cache->buckets[i], *next; e; e = next) {
            next = e->next;
            wki_cu_module_unload(dev, e->module);
            wki_free(e);
        }
    wki_free(cache->buckets);
    wki_free(cache);
}

/* ---- Launching ------------------------------------------------------------------------------------------- */

/* Devices from Hopper on; graphs know such edges since CUDA 12.3. */
static bool can_overlap(const wki_cu_device *dev) {
    return dev->info.major >= 9 && dev->cu->driver_version >= 12030;
}

static int launch_overlapping(wki_cu_stream *s, const wki_cu_kernel *k, wki_cu_error *err) {
    wki_culaunchattr attr = {.id = WKI_LAUNCH_OVERLAP, .value = 1};
    wki_culaunchconfig config = {.grid = {k->grid[0], k->grid[1], k->grid[2]},
                                 .block = {k->block[0], k->block[1], k->block[2]},
                                 .smem = k->smem,
                                 .stream = s->handle,
                                 .attrs = &attr,
                                 .n_attrs = 1};
    return WKI_DRV(s->dev->cu, err, cuLaunchKernelEx, &config, k->function, k->params, NULL);
}

static int launch(wki_cu_stream *s, const wki_cu_kernel *k, wki_cu_error *err) {
    int code = k->overlap && can_overlap(s->dev)
                   ? launch_overlapping(s, k, err)
                   : WKI_DRV(s->dev->cu, err, cuLaunchKernel, k->function, k->grid[0], k->grid[1], k->grid[2],
                             k->block[0], k->block[1], k->block[2], k->smem, s->handle, k->params, NULL);
    if (code) {
        wki_cu_fail_more(err, ", grid %u x %u x %u, block %u x %u x %u, %u bytes of shared memory",
                         k->grid[0], k->grid[1], k->grid[2], k->block[0], k->block[1], k->block[2], k->smem);
        wki_cu_fail_in(err, k->name ? k->name : "kernel");
    }
    return code;
}

int wki_cu_launch(wki_cu_stream *s, const wki_cu_kernel *k, wki_cu_error *err) {
    int code = wki_cu_enter(s->dev, err);
    return code ? code : launch(s, k, err);
}

int wki_cu_launch_many(wki_cu_stream *s, const wki_cu_kernel *k, size_t n, wki_cu_error *err) {
    int code = wki_cu_enter(s->dev, err);
    for (size_t i = 0; !code && i < n; i++)
        code = launch(s, &k[i], err);
    return code;
}
