/* `wick info` and `wick ops`: what this build has and what it found here. */
#include <jansson.h>
#include <stdio.h>
#include <wick.h>

#include "cli.h"

static const struct argp_option json_option[] = {
    {"json", 'j', NULL, 0, "print JSON", 0},
    {0},
};

static error_t parse_json(int key, char *arg, struct argp_state *s) {
    switch (key) {
    case 'j':
        *(bool *)s->input = true;
        return 0;
    case ARGP_KEY_ARG:
        argp_error(s, "unexpected argument '%s'", arg);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* ---- info ---------------------------------------------------------------------------------------------------------- */

static json_t *devices_json(wk_ctx *c) {
    json_t *list = json_array();
    for (int d = 0; d < WK_DEVICE_COUNT; d++) {
        const char *why = "";
        bool ok = wk_device_available(c, (wk_device)d, &why);
        json_array_append_new(list, json_pack("{s:s, s:b, s:s}", "name", wk_device_name((wk_device)d),
                                              "available", ok, "why_not", ok ? "" : why));
    }
    return list;
}

static json_t *libraries_json(void) {
    json_t *list = json_array();
    wk_library_info l;
    for (int i = 0; wk_library_get(i, &l); i++)
        json_array_append_new(list, json_pack("{s:s, s:b, s:s}", "name", l.name, "found", l.found,
                                              l.found ? "path" : "why_not", l.text));
    return list;
}

static void info_text(wk_ctx *c, const wk_system_info *s) {
    printf("wick %s\n", wk_version());
    printf("cpu tier    %s%s%s%s\n", s->isa, *s->isa_note ? " (" : "", s->isa_note, *s->isa_note ? ")" : "");
    printf("threads     %d\n", s->threads);
    for (int d = 0; d < WK_DEVICE_COUNT; d++) {
        const char *why = "";
        bool ok = wk_device_available(c, (wk_device)d, &why);
        printf("%-11s %-8s %s\n", d ? "" : "devices", wk_device_name((wk_device)d), ok ? "available" : why);
    }
    wk_library_info l;
    for (int i = 0; wk_library_get(i, &l); i++)
        printf("%-11s %-8s %s\n", i ? "" : "libraries", l.name, l.text);
}

int cmd_info(int argc, char **argv) {
    bool json = false;
    const struct argp argp = {
        json_option, parse_json, NULL, "Prints version, CPU tier, threads, devices and libraries.",
        NULL,        NULL,       NULL};
    argp_parse(&argp, argc, argv, 0, NULL, &json);
    wk_ctx *c = wk_ctx_new(NULL);
    if (!c)
        return cli_fail("out of memory");
    wk_system_info s = {.struct_size = sizeof s};
    wk_system_info_get(c, &s);
    if (json)
        cli_json(json_pack("{s:s, s:s, s:s, s:i, s:o, s:o}", "version", wk_version(), "isa", s.isa,
                           "isa_note", s.isa_note, "threads", s.threads, "devices", devices_json(c),
                           "libraries", libraries_json()));
    else
        info_text(c, &s);
    wk_ctx_free(c);
    return 0;
}

/* ---- ops ----------------------------------------------------------------------------------------------------------- */

int cmd_ops(int argc, char **argv) {
    bool json = false;
    const struct argp argp = {json_option, parse_json, NULL, "Lists the ops of the op table.",
                              NULL,        NULL,       NULL};
    argp_parse(&argp, argc, argv, 0, NULL, &json);
    wk_op_info op;
    for (int i = 0; wk_op_get(i, &op); i++) {
        if (json) {
            if (!cli_json(json_pack("{s:s, s:s, s:s, s:i, s:i, s:i, s:b, s:b, s:b}", "name", op.name, "class",
                                    op.klass, "doc", op.doc, "since", op.since, "inputs", op.nin, "outputs",
                                    op.nout, "differentiable", op.differentiable, "in_place", op.in_place,
                                    "nondeterministic", op.nondeterministic)))
                return EXIT_FAILED;
        } else {
            printf("%-20s %-10s %s%.*s\n", op.name, op.klass, op.differentiable ? "" : "(no gradient) ", 90,
                   op.doc);
        }
    }
    return 0;
}
