/* Tests of src/base/dl: candidates, tables and the messages about what was not found. */
#include "base/alloc.h"
#include "base/dl.h"
#include "harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct table {
    double (*cosine)(double);
    void *absent;
    double (*sine)(double);
} table;

TEST(dl, fills_a_table_by_name) {
    const char *const names[] = {"libwick-absent.so.9", "libm.so.6", NULL};
    const wki_dl_search search = {.names = names};
    char err[256] = "";
    int64_t live = wki_alloc_live();
    wki_dl *dl;
    REQUIRE(wki_dl_open(&dl, &search, err, sizeof err) == 0);
    CHECK_STR(wki_dl_path(dl), "libm.so.6");
    const wki_dl_symbol symbols[] = {
        {"cos", offsetof(table, cosine), false},
        {"wick_absent", offsetof(table, absent), true},
        {"sin", offsetof(table, sine), false},
    };
    table t;
    memset(&t, 0xff, sizeof t);
    CHECK(wki_dl_fill(dl, symbols, 3, &t, err, sizeof err) == 0);
    CHECK(t.absent == NULL);
    CHECK_NEAR(t.cosine(0.0), 1.0, 0);
    CHECK_NEAR(t.sine(0.0), 0.0, 0);
    wki_dl_close(dl);
    CHECK_EQ_I(wki_alloc_live(), live);
}

TEST(dl, names_every_missing_symbol) {
    const char *const names[] = {"libm.so.6", NULL};
    const wki_dl_search search = {.names = names};
    char err[256] = "";
    wki_dl *dl;
    REQUIRE(wki_dl_open(&dl, &search, err, sizeof err) == 0);
    const wki_dl_symbol symbols[] = {
        {"wick_one", offsetof(table, cosine), false},
        {"sin", offsetof(table, sine), false},
        {"wick_two", offsetof(table, absent), false},
    };
    table t;
    CHECK(wki_dl_fill(dl, symbols, 3, &t, err, sizeof err) == -1);
    CHECK_STR(err, "libm.so.6 lacks wick_one, wick_two");
    wki_dl_close(dl);
}

TEST(dl, says_what_was_not_found) {
    const char *const names[] = {"libwick-absent.so.9", "libwick-absent.so.8", NULL};
    const char *const globs[] = {"/nowhere/wick*", NULL};
    const wki_dl_search search = {.names = names, .first = "/nowhere/a:/nowhere/b", .after = globs};
    char err[256] = "", tiny[8];
    wki_dl *dl = (wki_dl *)&search;
    CHECK(wki_dl_open(&dl, &search, err, sizeof err) == -1);
    CHECK(dl == NULL);
    CHECK_STR(err,
              "libwick-absent.so.9, libwick-absent.so.8 not found in /nowhere/a:/nowhere/b, on the loader's "
              "path or in the usual places");
    CHECK(wki_dl_open(&dl, &search, tiny, sizeof tiny) == -1);
    CHECK_STR(tiny, "libwick");
    const char *const path[] = {"/nowhere/libwick.so", NULL};
    const wki_dl_search by_path = {.names = path};
    CHECK(wki_dl_open(&dl, &by_path, err, sizeof err) == -1);
    CHECK_STR(err, "/nowhere/libwick.so not found on the loader's path");
}

/* A file that is there and is no library: the loader's reason is passed on, and the search goes on. */
TEST(dl, reports_a_broken_file) {
    char dir[] = "/tmp/wick-dl-XXXXXX", file[64], pattern[64], err[512] = "";
    REQUIRE(mkdtemp(dir));
    snprintf(file, sizeof file, "%s/libwick-broken.so.1", dir);
    snprintf(pattern, sizeof pattern, "%s*", dir);
    FILE *f = fopen(file, "w");
    REQUIRE(f);
    fputs("not a library", f);
    fclose(f);
    const char *const names[] = {"libwick-broken.so.1", NULL}, *const both[] = {"libwick-broken.so.1",
                                                                                "libm.so.6", NULL};
    const char *const globs[] = {pattern, NULL};
    const wki_dl_search in_first = {.names = names, .first = dir}, in_glob = {.names = names, .after = globs};
    const wki_dl_search then_good = {.names = both, .first = dir};
    wki_dl *dl;
    CHECK(wki_dl_open(&dl, &in_first, err, sizeof err) == -1);
    CHECK(strstr(err, "one would not load") && strstr(err, file));
    CHECK(wki_dl_open(&dl, &in_glob, err, sizeof err) == -1);
    CHECK(strstr(err, "one would not load") && strstr(err, file));
    CHECK(wki_dl_open(&dl, &then_good, err, sizeof err) == 0);
    wki_dl_close(dl);
    unlink(file);
    rmdir(dir);
}
