/* `wick bench`: runs a bench, prints its figures beside the peer's, and compares them with bounds. */
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <wick.h>

#include "bench/bench.h"
#include "cli.h"

enum { NBENCHES = 3, MAX_FIGURES = 64 };
static const bench *const benches[NBENCHES] = {&bench_overhead, &bench_compile, &bench_train};

struct bench_run {
    const bench *b;
    const char *only; /* one case, or NULL */
    bool json;
    int threads;
    const char *isa;
    wk_device device;
    json_t *peers; /* array of what a peer's bench printed in the same session, or NULL */
    struct {
        const char *name;
        double value;
    } figure[MAX_FIGURES];
    int nfigures, failures;
};

/* ---- figures ------------------------------------------------------------------------------------------------------- */

bool bench_wants(const bench_run *r, const char *name) { return !r->only || !strcmp(r->only, name); }

wk_device bench_device(const bench_run *r) { return r->device; }

/* The peer's figure: from the file that was given, else the published one. False: none. */
static bool find_peer(const bench_run *r, const char *name, const char *unit, char *peer, size_t n,
                      double *value) {
    size_t i;
    json_t *p;
    json_array_foreach(r->peers, i, p) {
        const char *b = json_string_value(json_object_get(p, "bench")),
                   *k = json_string_value(json_object_get(p, "case"));
        const char *u = json_string_value(json_object_get(p, "unit")),
                   *v = json_string_value(json_object_get(p, "version"));
        if (!b || !k || !u || strcmp(b, r->b->name) != 0 || strcmp(k, name) != 0 || strcmp(u, unit) != 0)
            continue;
        snprintf(peer, n, "%s, same run", v ? v : "peer");
        *value = json_number_value(json_object_get(p, "value"));
        return true;
    }
    const bench_peer *p0 = r->device == WK_CPU ? bench_peer_of(r->b->name, name) : NULL;
    if (p0) {
        snprintf(peer, n, "%s", p0->peer);
        *value = p0->value;
    }
    return p0 != NULL;
}

void bench_figure(bench_run *r, const char *name, double value, const char *unit) {
    if (!bench_wants(r, name))
        return;
    if (r->nfigures < MAX_FIGURES) {
        r->figure[r->nfigures].name = name;
        r->figure[r->nfigures++].value = value;
    }
    char peer[128] = "unproven";
    double peer_value = NAN;
    bool known = find_peer(r, name, unit, peer, sizeof peer, &peer_value);
    double ratio = peer_value / value;
    bool null = !strcmp(r->b->name, "compile") || !strncmp(name, "record_op", 9);
    const char *device = wk_device_name(null ? WK_NULL : r->device);
    if (r->json)
        cli_json(json_pack("{s:s, s:s, s:f, s:s, s:s, s:o, s:o, s:i, s:s, s:s}", "bench", r->b->name, "case",
                           name, "value", value, "unit", unit, "peer", peer, "peer_value",
                           known ? json_real(peer_value) : json_null(), "ratio",
                           known ? json_real(ratio) : json_null(), "threads", r->threads, "isa", r->isa,
                           "device", device));
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

/* ---- bounds -------------------------------------------------------------------------------------------------------- */

static bool find_figure(const bench_run *r, const char *name, double *value) {
    for (int i = 0; i < r->nfigures; i++)
        if (!strcmp(r->figure[i].name, name)) {
            *value = r->figure[i].value;
            return true;
        }
    return false;
}

/* One bound, {"max": x} or {"min": x} or both; counts a failure where the figure misses it. */
static void check_bound(bench_run *r, const char *name, const json_t *bound) {
    double value;
    const json_t *max = json_object_get(bound, "max"), *min = json_object_get(bound, "min");
    if (!json_is_number(max) && !json_is_number(min)) {
        bench_fail(r, name, "the bound has neither max nor min");
    } else if (!find_figure(r, name, &value)) {
        bench_fail(r, name, "there is a bound and no figure");
    } else if ((max && !(value <= json_number_value(max))) || (min && !(value >= json_number_value(min)))) {
        bench_fail(r, name, "%.4g misses its bound (%s %.4g)", value, max ? "max" : "min",
                   json_number_value(max ? max : min));
    }
}

static void check_bounds(bench_run *r, json_t *bounds) {
    const char *key;
    json_t *bound;
    size_t n = strlen(r->b->name);
    json_object_foreach(bounds, key, bound) {
        if (!strncmp(key, r->b->name, n) && key[n] == '.' && bench_wants(r, key + n + 1))
            check_bound(r, key + n + 1, bound);
    }
}

/* ---- command ------------------------------------------------------------------------------------------------------- */

typedef struct options {
    const char *name, *check, *peers;
    bool json, list;
    int device;
} options;

static const struct argp_option option_table[] = {
    {"json", 'j', NULL, 0, "print JSON objects, one a line", 0},
    {"check", 'c', "FILE", 0, "fail where a figure misses its bound in FILE", 0},
    {"device", 'd', "cpu|cuda", 0, "where `train` computes (default cpu)", 0},
    {"peers", 'p', "FILE", 0, "peer figures of the same session: the JSON lines of bench/peers/*.py", 0},
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
        o->device = cli_choice(s, "device", arg, (const char *const[]){"cpu", "cuda"}, 2);
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
    for (int i = 0; i < NBENCHES; i++) {
        const bench *b = benches[i];
        if (strlen(b->name) != n || strncmp(b->name, text, n) != 0)
            continue;
        r->b = b;
        r->only = text[n] ? text + n + 1 : NULL;
        for (int k = 0; r->only && b->cases[k]; k++)
            if (!strcmp(b->cases[k], r->only))
                return true;
        return !r->only;
    }
    return false;
}

static json_t *load_bounds(const char *path) {
    json_error_t e;
    json_t *bounds = json_load_file(path, JSON_REJECT_DUPLICATES, &e);
    if (!bounds)
        cli_fail("%s:%d: %s", path, e.line, e.text);
    else if (!json_is_object(bounds)) {
        cli_fail("%s: not a JSON object", path);
        json_decref(bounds);
        bounds = NULL;
    }
    return bounds;
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

int cmd_bench(int argc, char **argv) {
    options o = {0};
    const struct argp argp = {
        option_table,
        parse,
        "NAME[.CASE]",
        "Runs a bench and prints each figure with the peer's beside it; a ratio above 1 says that Wick "
        "is better.",
        NULL,
        NULL,
        NULL};
    argp_parse(&argp, argc, argv, 0, NULL, &o);
    if (o.list)
        return list();
    bench_run r = {.json = o.json, .device = o.device ? WK_CUDA : WK_CPU};
    if (!find_bench(o.name, &r)) {
        cli_fail("no bench '%s'; `wick bench --list` prints them", o.name);
        return EXIT_USAGE;
    }
    json_t *bounds = o.check ? load_bounds(o.check) : NULL;
    if (o.check && !bounds)
        return EXIT_FAILED;
    if (o.peers && !(r.peers = load_peers(o.peers))) {
        json_decref(bounds);
        return EXIT_FAILED;
    }
    wk_ctx *c = wk_ctx_new(NULL);
    if (!c)
        return cli_fail("out of memory");
    wk_system_info s = {.struct_size = sizeof s};
    wk_system_info_get(c, &s);
    r.isa = s.isa;
    r.threads = s.threads;
    r.b->run(&r);
    if (bounds)
        check_bounds(&r, bounds);
    json_decref(bounds);
    json_decref(r.peers);
    wk_ctx_free(c);
    return r.failures ? EXIT_FAILED : 0;
}
