/* `wick bench`: runs a bench, prints its figures beside the peer's, and compares them with bounds.
 *
 * A file of bounds is one JSON object. A key is BENCH.CASE, or BENCH.CASE@DEVICE for a bound that holds with that --device
 * only; a value holds `max`, `min` (of the figure) and `min_ratio` (how many times better than the peer's figure of the same
 * run, from --peers), one or several.
 */
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <wick.h>

#include "bench/bench.h"
#include "cli.h"

enum { NBENCHES = 4, MAX_FIGURES = 64, EXIT_NOTHING = 3 /* nothing failed, and nothing was measured */ };
static const bench *const benches[NBENCHES] = {&bench_overhead, &bench_compile, &bench_train, &bench_demo};
static const char *const devices[] = {"cpu", "cuda"};
enum { NDEVICES = sizeof devices / sizeof *devices };

struct bench_run {
    const bench *b;
    const char *only; /* one case, or NULL */
    bool json;
    int threads;
    const char *isa;
    wk_device device;
    const char *data_dir; /* of the demo, or NULL */
    json_t *peers;        /* array of what a peer's bench printed in the same run, or NULL */
    struct {
        const char *name;
        double value, ratio; /* ratio: to the peer's figure of the same run; NAN where there is none */
    } figure[MAX_FIGURES];
    int nfigures, failures;
    int met, missed, skipped; /* bounds */
};

/* ---- figures ------------------------------------------------------------------------------------------------------- */

bool bench_wants(const bench_run *r, const char *name) { return !r->only || !strcmp(r->only, name); }

wk_device bench_device(const bench_run *r) { return r->device; }
const char *bench_data_dir(const bench_run *r) { return r->data_dir; }

/* The peer's figure of this run, where possible with as many threads. False: none. */
static bool peer_here(const bench_run *r, const char *name, const char *unit, char *peer, size_t n,
                      double *value) {
    size_t i;
    json_t *p;
    bool found = false;
    json_array_foreach(r->peers, i, p) {
        const char *b = json_string_value(json_object_get(p, "bench")),
                   *k = json_string_value(json_object_get(p, "case"));
        const char *u = json_string_value(json_object_get(p, "unit")),
                   *v = json_string_value(json_object_get(p, "version"));
        if (!b || !k || !u || strcmp(b, r->b->name) != 0 || strcmp(k, name) != 0 || strcmp(u, unit) != 0)
            continue;
        bool same_threads = json_integer_value(json_object_get(p, "threads")) == r->threads;
        if (found && !same_threads)
            continue;
        snprintf(peer, n, "%s, same run", v ? v : "peer");
        *value = json_number_value(json_object_get(p, "value"));
        found = true;
        if (same_threads)
            break;
    }
    return found;
}

/* The published figure of a peer. False: none. */
static bool peer_published(const bench_run *r, const char *name, char *peer, size_t n, double *value) {
    const bench_peer *p = r->device == WK_CPU ? bench_peer_of(r->b->name, name) : NULL;
    if (p) {
        snprintf(peer, n, "%s", p->peer);
        *value = p->value;
    }
    return p != NULL;
}

void bench_figure(bench_run *r, const char *name, double value, const char *unit) {
    if (!bench_wants(r, name))
        return;
    char peer[128] = "unproven";
    double peer_value = NAN;
    bool here = peer_here(r, name, unit, peer, sizeof peer, &peer_value);
    bool known = here || peer_published(r, name, peer, sizeof peer, &peer_value);
    double ratio = peer_value / value;
    if (r->nfigures < MAX_FIGURES) {
        r->figure[r->nfigures].name = name;
        r->figure[r->nfigures].value = value;
        r->figure[r->nfigures++].ratio = here ? ratio : NAN;
    }
    bool null = !strcmp(r->b->name, "compile") || !strncmp(name, "record_op", 9);
    const char *device = wk_device_name(null ? WK_NULL : r->device);
    if (r->json)
        cli_json(json_pack("{s:s, s:s, s:f, s:s, s:s, s:o, s:o, s:i, s:s, s:s}", "bench", r->b->name, "case",
                           name, "value", value, "unit", unit, "peer", peer, "peer_value",
                           cli_number(peer_value), "ratio", cli_number(ratio), "threads", r->threads, "isa",
                           r->isa, "device", device));
    else if (known)
        printf("%-20s %12.4g %-11s %6.1f x (%s: %.4g)\n", name, value, unit, ratio, peer, peer_value);
    else
        printf("%-20s %12.4g %-11s unproven\n", name, value, unit);
    fflush(stdout);
}

void bench_fail(bench_run *r, const char *name, const char *format, ...) {
    char text[1200];
    va_list ap;
    va_start(ap, format);
    vsnprintf(text, sizeof text, format, ap);
    va_end(ap);
    cli_fail("bench %s.%s: %s", r->b->name, name, text);
    r->failures++;
}

bool bench_ok(bench_run *r, const char *name, wk_ctx *c) {
    if (!wk_failed(c))
        return true;
    bench_fail(r, name, "%s", wk_message(c));
    return false;
}

/* A case that cannot be measured here, and why; no failure. */
static void skip_case(const bench_run *r, const char *name, const char *why) {
    if (r->json)
        cli_json(json_pack("{s:s, s:s, s:s}", "bench", r->b->name, "case", name, "skipped", why));
    else
        printf("%-20s skipped: %s\n", name, why);
    fflush(stdout);
}

/* Is the device there on which the bench is to run? Where not, all its cases are skipped. */
static bool device_there(const bench_run *r, wk_ctx *c) {
    const char *why = "";
    if (wk_device_available(c, r->device, &why))
        return true;
    for (int k = 0; r->b->cases[k]; k++)
        if (bench_wants(r, r->b->cases[k]))
            skip_case(r, r->b->cases[k], why);
    return false;
}

/* ---- bounds -------------------------------------------------------------------------------------------------------- */

static const bench *bench_named(const char *name, size_t n) {
    for (int i = 0; i < NBENCHES; i++)
        if (strlen(benches[i]->name) == n && !strncmp(benches[i]->name, name, n))
            return benches[i];
    return NULL;
}

static bool knows_case(const bench *b, const char *name, size_t n) {
    for (int k = 0; b->cases[k]; k++)
        if (strlen(b->cases[k]) == n && !strncmp(b->cases[k], name, n))
            return true;
    return false;
}

/* BENCH.CASE or BENCH.CASE@DEVICE. */
typedef struct bound_key {
    const bench *b;
    const char *name, *device; /* device "": any */
    size_t name_length;
} bound_key;

static bool parse_key(const char *key, bound_key *k) {
    size_t n = strcspn(key, ".");
    k->b = bench_named(key, n);
    k->name = key + n + (key[n] == '.');
    k->name_length = strcspn(k->name, "@");
    k->device = k->name + k->name_length;
    k->device += *k->device == '@';
    return k->b && knows_case(k->b, k->name, k->name_length);
}

/* Says what is wrong with one entry of a file of bounds. */
static bool bound_ok(const char *path, const char *key, json_t *bound) {
    static const char *const kinds[] = {"max", "min", "min_ratio"};
    const char *kind;
    json_t *value;
    bound_key k;
    if (!parse_key(key, &k))
        return cli_fail("%s: there is no case '%s'; `wick bench --list` prints them", path, key), false;
    bool device = !k.name[k.name_length];
    for (int i = 0; i < NDEVICES && !device; i++)
        device = k.b->on_device && !strcmp(k.device, devices[i]);
    if (!device)
        return cli_fail("%s: '%s': the bench does not run on '%s'", path, key, k.device), false;
    if (!json_object_size(bound))
        return cli_fail("%s: '%s' has neither max nor min nor min_ratio", path, key), false;
    json_object_foreach(bound, kind, value) {
        bool known = false;
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
            known |= !strcmp(kind, kinds[i]);
        if (!known || !json_is_number(value))
            return cli_fail("%s: '%s': '%s' is not a number named max, min or min_ratio", path, key, kind),
                   false;
    }
    return true;
}

static void skip_bound(bench_run *r, const char *key, const char *kind, const char *why) {
    fprintf(stderr, "wick: bound of %s, %s: skipped: %s\n", key, kind, why);
    r->skipped++;
}

static void compare(bench_run *r, const char *name, double value, const char *what, const char *kind,
                    double bound) {
    bool met = kind[1] == 'a' ? value <= bound : value >= bound; /* max or min, min_ratio */
    r->met += met;
    r->missed += !met;
    if (!met)
        bench_fail(r, name, "%s %.4g misses its bound (%s %.4g)", what, value, kind, bound);
}

/* One entry that concerns this run. */
static void check_bound(bench_run *r, const char *key, const bound_key *k, json_t *bound, bool there) {
    const char *kind;
    json_t *limit;
    int at = 0;
    while (at < r->nfigures && (strlen(r->figure[at].name) != k->name_length ||
                                strncmp(r->figure[at].name, k->name, k->name_length) != 0))
        at++;
    json_object_foreach(bound, kind, limit) {
        bool of_ratio = !strcmp(kind, "min_ratio");
        if (k->device[0] && strcmp(k->device, wk_device_name(r->device)) != 0)
            skip_bound(r, key, kind, "this run is on another device (--device)");
        else if (!there)
            skip_bound(r, key, kind, "its case was skipped");
        else if (at == r->nfigures)
            bench_fail(r, k->name, "there is a bound and no figure");
        else if (of_ratio && isnan(r->figure[at].ratio))
            skip_bound(r, key, kind, "unproven: no figure of the peer from this run (--peers)");
        else
            compare(r, r->figure[at].name, of_ratio ? r->figure[at].ratio : r->figure[at].value,
                    of_ratio ? "the ratio" : "the figure", kind, json_number_value(limit));
    }
}

/* Those of the file that concern what ran; a closing line says how many there were. */
static void check_bounds(bench_run *r, json_t *bounds, bool there) {
    const char *key;
    json_t *bound;
    json_object_foreach(bounds, key, bound) {
        bound_key k;
        if (parse_key(key, &k) && k.b == r->b &&
            (!r->only || (strlen(r->only) == k.name_length && !strncmp(r->only, k.name, k.name_length))))
            check_bound(r, key, &k, bound, there);
    }
    fprintf(stderr, "wick: bounds: %d met, %d missed, %d skipped\n", r->met, r->missed, r->skipped);
}

/* ---- command ------------------------------------------------------------------------------------------------------- */

typedef struct options {
    const char *name, *check, *peers, *data_dir;
    bool json, list;
    int device;
} options;

static const struct argp_option option_table[] = {
    {"json", 'j', NULL, 0, "print JSON objects, one a line", 0},
    {"check", 'c', "FILE", 0,
     "fail where a figure misses its bound in FILE: {\"BENCH.CASE[@DEVICE]\": {\"max\": N, \"min\": N, "
     "\"min_ratio\": N}, ...}, the last against the peer's figure in --peers",
     0},
    {"data-dir", 'D', "DIR", 0, "where `demo` has its IDX files from, as in `wick train`", 0},
    {"device", 'd', "cpu|cuda", 0, "where `train` and `demo` compute (default cpu)", 0},
    {"peers", 'p', "FILE", 0, "peer figures of the same run: the JSON lines of bench/peers/*.py", 0},
    {"list", 'l', NULL, 0, "print the benches and their cases", 0},
    {0},
};

static error_t parse(int key, char *arg, struct argp_state *s) {
    options *o = s->input;
    switch (key) {
    case 'j':
        o->json = true;
        break;
    case 'c':
        o->check = arg;
        break;
    case 'd':
        o->device = cli_choice(s, "device", arg, devices, NDEVICES);
        break;
    case 'D':
        o->data_dir = arg;
        break;
    case 'p':
        o->peers = arg;
        break;
    case 'l':
        o->list = true;
        break;
    case ARGP_KEY_ARG:
        if (o->name)
            argp_error(s, "one bench at a time, not '%s' too", arg);
        o->name = arg;
        break;
    case ARGP_KEY_END:
        if (o->name && o->list)
            argp_error(s, "--list takes no bench, and '%s' is given", o->name);
        if (!o->name && !o->list)
            argp_error(s, "which bench? --list prints them");
        break;
    default:
        return ARGP_ERR_UNKNOWN;
    }
    return 0;
}

static int list(void) {
    for (int i = 0; i < NBENCHES; i++) {
        printf("%s: %s\n", benches[i]->name, benches[i]->doc);
        for (int k = 0; benches[i]->cases[k]; k++)
            printf("  %s.%s\n", benches[i]->name, benches[i]->cases[k]);
    }
    return 0;
}

/* NAME or NAME.CASE. */
static bool find_bench(const char *text, bench_run *r) {
    size_t n = strcspn(text, ".");
    r->b = bench_named(text, n);
    r->only = text[n] ? text + n + 1 : NULL;
    return r->b && (!r->only || knows_case(r->b, r->only, strlen(r->only)));
}

/* NULL after a message. */
static json_t *load_bounds(const char *path) {
    json_error_t e;
    const char *key;
    json_t *bound, *bounds = json_load_file(path, JSON_REJECT_DUPLICATES, &e);
    bool ok = json_is_object(bounds);
    if (!bounds && e.line < 0) /* it was not opened, and the text names it */
        cli_fail("%s", e.text);
    else if (!bounds)
        cli_fail("%s:%d: %s", path, e.line, e.text);
    else if (!ok)
        cli_fail("%s: not a JSON object", path);
    json_object_foreach(bounds, key, bound) ok = ok && bound_ok(path, key, bound);
    if (ok)
        return bounds;
    json_decref(bounds);
    return NULL;
}

/* One JSON object a line. NULL after a message. */
static json_t *load_peers(const char *path) {
    json_t *all = json_array(), *one;
    json_error_t e = {0};
    FILE *f = fopen(path, "r");
    while (f && all && (one = json_loadf(f, JSON_DISABLE_EOF_CHECK, &e)))
        json_array_append_new(all, one);
    bool ok = f && all && (feof(f) || json_error_code(&e) == json_error_premature_end_of_input) &&
              json_array_size(all);
    if (f)
        fclose(f);
    if (ok)
        return all;
    cli_fail("%s: %s", path, !f ? "cannot be opened" : e.text[0] ? e.text : "no figures in it");
    json_decref(all);
    return NULL;
}

/* Runs it and compares; returns the exit status. */
static int measure(bench_run *r, json_t *bounds) {
    wk_ctx *c = wk_ctx_new(NULL);
    if (!c)
        return cli_fail("out of memory");
    wk_system_info s = {.struct_size = sizeof s};
    wk_system_info_get(c, &s);
    r->isa = s.isa;
    r->threads = s.threads;
    bool there = device_there(r, c);
    if (there)
        r->b->run(r);
    if (bounds)
        check_bounds(r, bounds, there);
    wk_ctx_free(c);
    return r->failures ? EXIT_FAILED : there ? 0 : EXIT_NOTHING;
}

int cmd_bench(int argc, char **argv) {
    options o = {.device = -1};
    const struct argp argp = {
        option_table,
        parse,
        "NAME[.CASE]",
        "Runs a bench and prints each figure with the peer's beside it; a ratio above 1 says that Wick "
        "is better.\vExit status: 0; 1 where a case failed or a bound was missed; 2 for wrong usage; 3 where "
        "nothing failed and nothing was measured, because the device is not there. Bounds that cannot be "
        "checked, without the device or the peer, are named and counted as skipped.",
        NULL,
        NULL,
        NULL};
    argp_parse(&argp, argc, argv, 0, NULL, &o);
    if (o.list)
        return list();
    bench_run r = {.json = o.json, .device = o.device > 0 ? WK_CUDA : WK_CPU, .data_dir = o.data_dir};
    if (!find_bench(o.name, &r)) {
        cli_fail("no bench '%s'; `wick bench --list` prints them", o.name);
        return EXIT_USAGE;
    }
    if (o.device >= 0 && !r.b->on_device) {
        cli_fail("the bench `%s` has one place to run and takes no --device", r.b->name);
        return EXIT_USAGE;
    }
    json_t *bounds = o.check ? load_bounds(o.check) : NULL;
    if (o.check && !bounds)
        return EXIT_FAILED;
    if (o.peers && !(r.peers = load_peers(o.peers))) {
        json_decref(bounds);
        return EXIT_FAILED;
    }
    int status = measure(&r, bounds);
    json_decref(bounds);
    json_decref(r.peers);
    return status;
}
