/* The golden vector files are whole, and their reader refuses copies cut off at a section boundary or beside
 * one, with bytes appended, or with an impossible header. */
#include "golden.h"
#include "harness.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const files[] = {"cnn", "mlp", "transformer", "ops"};
enum { NFILES = sizeof files / sizeof files[0], MAX_BOUNDS = 2048 };

static bool shape_is(const wkg_file *f, const char *name, wkg_dtype dtype, int ndim, const int64_t *dims) {
    const wkg_tensor *t = wkg_find(f, name);
    return t && t->dtype == dtype && t->ndim == ndim && !memcmp(t->dims, dims, (size_t)ndim * sizeof dims[0]);
}

#define SHAPE(f, name, dtype, ...)                                                                           \
    CHECK(shape_is(f, name, dtype, (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)),                \
                   (int64_t[]){__VA_ARGS__}))

/* The file as bytes, rebuilt from its tensors by the format's description, and where its sections end. A zero
 * byte that is not the file's follows the last. */
typedef struct {
    unsigned char *bytes;
    size_t size, bounds[MAX_BOUNDS];
    int nbounds;
} image;

static void append(image *m, const void *from, size_t size) {
    if (size)
        memcpy(m->bytes + m->size, from, size);
    m->size += size;
    if (m->nbounds < MAX_BOUNDS)
        m->bounds[m->nbounds++] = m->size;
}

static bool build(const wkg_file *f, image *m) {
    size_t total = 8;
    for (int i = 0; i < f->count; i++) {
        const wkg_tensor *t = &f->tensors[i];
        total += 12 + strlen(t->name) + 8 * (size_t)t->ndim + (size_t)t->numel * wkg_itemsize(t->dtype);
    }
    *m = (image){.bytes = calloc(1, total + 1)};
    if (!m->bytes)
        return false;
    append(m, "WKG1", 4);
    append(m, &(uint32_t){(uint32_t)f->count}, 4);
    for (int i = 0; i < f->count; i++) {
        const wkg_tensor *t = &f->tensors[i];
        uint32_t length = (uint32_t)strlen(t->name);
        append(m, &length, 4);
        append(m, t->name, length);
        append(m, &(uint32_t){t->dtype}, 4);
        append(m, &(uint32_t){(uint32_t)t->ndim}, 4);
        append(m, t->dims, 8 * (size_t)t->ndim);
        append(m, t->data, (size_t)t->numel * wkg_itemsize(t->dtype));
    }
    if (m->size == total && m->nbounds < MAX_BOUNDS)
        return true;
    free(m->bytes);
    return false;
}

static bool refused(const void *bytes, size_t size) {
    char why[200] = "";
    void *copy = malloc(size ? size : 1); /* of that size exactly, so that a sanitizer sees a read past it */
    if (!copy)
        return false;
    memcpy(copy, bytes, size);
    wkg_file *f = wkg_parse(copy, size, why, sizeof why);
    bool ok = !f && *why;
    wkg_close(f);
    free(copy);
    return ok;
}

TEST(golden, models_are_whole) {
    for (int i = 0; i < 3; i++) {
        wkg_file *f = wkg_open(files[i]);
        REQUIRE(f);
        SHAPE(f, "losses", WKG_F64, 20);
        SHAPE(f, "losses64", WKG_F64, 20);
        const double *a = wkg_find(f, "losses")->data, *b = wkg_find(f, "losses64")->data;
        for (int k = 0; k < 20; k++) {
            CHECK(a[k] == (double)(float)a[k]);
            CHECK_NEAR(a[k], b[k], 1e-6 * b[k]);
        }
        for (int k = 0; k < f->count; k++)
            if (!strncmp(f->tensors[k].name, "param/", 6))
                for (int64_t j = 0; j < f->tensors[k].numel; j++)
                    REQUIRE(isfinite(((const float *)f->tensors[k].data)[j]));
        CHECK(!wkg_find(f, "no such tensor"));
        wkg_close(f);
    }
    wkg_file *f = wkg_open("cnn");
    REQUIRE(f);
    SHAPE(f, "x", WKG_U8, 20, 32, 1, 28, 28);
    SHAPE(f, "y", WKG_I64, 20, 32);
    SHAPE(f, "param/conv2.weight", WKG_F32, 32, 16, 3, 3);
    SHAPE(f, "param/fc1.weight", WKG_F32, 128, 1568);
    wkg_close(f);
    f = wkg_open("mlp");
    REQUIRE(f);
    SHAPE(f, "x", WKG_F32, 20, 32, 64);
    SHAPE(f, "param/fc3.weight", WKG_F32, 10, 64);
    wkg_close(f);
    f = wkg_open("transformer");
    REQUIRE(f);
    SHAPE(f, "x", WKG_I64, 20, 8, 32);
    SHAPE(f, "y", WKG_I64, 20, 8, 32);
    SHAPE(f, "param/blocks.1.qkv.weight", WKG_F32, 192, 64);
    wkg_close(f);
}

TEST(golden, ops_are_whole) {
    wkg_file *f = wkg_open("ops");
    REQUIRE(f);
    SHAPE(f, "conv2d/y", WKG_F32, 2, 4, 5, 4);
    SHAPE(f, "max_pool2d_k3s2/indices", WKG_I64, 2, 3, 3, 4);
    SHAPE(f, "adamw/p_after", WKG_F32, 3, 37);
    CHECK(wkg_number(f, "layer_norm/eps") == 1e-5);
    CHECK(wkg_number(f, "conv2d/stride") == 2);
    CHECK(isnan(wkg_number(f, "conv2d/y")) && isnan(wkg_number(f, "none")));
    wkg_close(f);
}

TEST(golden, cut_at_every_section) {
    for (int i = 0; i < NFILES; i++) {
        wkg_file *f = wkg_open(files[i]);
        REQUIRE(f);
        image m;
        bool built = build(f, &m);
        wkg_close(f);
        REQUIRE(built);
        f = wkg_parse(m.bytes, m.size, NULL, 0);
        CHECK(f);
        wkg_close(f);
        CHECK(refused(m.bytes, 0));
        for (int k = 0; k < m.nbounds; k++)
            for (size_t size = m.bounds[k] - 1; size <= m.bounds[k] + 1 && size < m.size; size++)
                if (!refused(m.bytes, size))
                    FAIL("%s cut at byte %zu of %zu is accepted", files[i], size, m.size);
        free(m.bytes);
    }
}

TEST(golden, damaged_headers) {
    wkg_file *f = wkg_open("ops");
    REQUIRE(f);
    image m;
    bool built = build(f, &m);
    wkg_close(f);
    REQUIRE(built);
    CHECK(refused(m.bytes, m.size + 1));

    CHECK(refused("WKG2\0\0\0\0", 8));
    CHECK(!refused("WKG1\0\0\0\0", 8));
    CHECK(refused("WKG1\xff\xff\xff\xff", 8));
    /* Dimensions whose product wraps to zero, a negative one, one name twice, a name with a zero byte. */
    CHECK(refused("WKG1\1\0\0\0\1\0\0\0a\2\0\0\0\2\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\1\0\0\0", 37));
    CHECK(refused("WKG1\1\0\0\0\1\0\0\0a\2\0\0\0\1\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff", 29));
    CHECK(!refused("WKG1\1\0\0\0\1\0\0\0a\2\0\0\0\0\0\0\0Z", 22));
    CHECK(refused("WKG1\2\0\0\0\1\0\0\0a\2\0\0\0\0\0\0\0Z\1\0\0\0a\2\0\0\0\0\0\0\0Z", 36));
    CHECK(refused("WKG1\1\0\0\0\1\0\0\0\0\2\0\0\0\0\0\0\0Z", 22));

    /* A changed byte may name another valid file, but never one that reads past its end. */
    for (int k = 0; k + 1 < m.nbounds; k++) {
        size_t at = m.bounds[k] + wkt_below(4);
        if (at >= m.size)
            continue;
        unsigned char was = m.bytes[at];
        m.bytes[at] = (unsigned char)wkt_u64();
        (void)refused(m.bytes, m.size);
        m.bytes[at] = was;
    }
    free(m.bytes);
}

TEST(golden, files_on_disk) {
    char why[200] = "";
    CHECK(!wkg_read("/nonexistent/golden.bin", why, sizeof why) && *why);
    CHECK(!wkg_read("/nonexistent/golden.bin", NULL, 0));

    char path[] = "/tmp/wick-golden-XXXXXX";
    int fd = mkstemp(path);
    REQUIRE(fd >= 0);
    bool wrote = write(fd, "WKG1\1\0\0\0\1\0\0\0a\2\0\0\0\0\0\0\0Z", 22) == 22;
    wkg_file *f = wkg_open(path);
    bool read_back = f && f->count == 1 && *(const char *)wkg_find(f, "a")->data == 'Z';
    wkg_close(f);
    bool cut = ftruncate(fd, 21) == 0;
    bool refused_cut = !wkg_read(path, why, sizeof why) && strstr(why, "cut off");
    close(fd);
    unlink(path);
    CHECK(wrote && read_back && cut && refused_cut);
}
