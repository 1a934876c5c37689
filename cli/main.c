/* Entry of the `wick` command: picks the command, and sees to it that output that could not be written is an error. */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <wick.h>

#include "cli.h"

static const struct {
    const char *name, *doc;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"train", "train a model and print its accuracy", cmd_train},
    {"info", "version, CPU tier, devices and libraries", cmd_info},
    {"ops", "the list of ops", cmd_ops},
    {"bench", "measure, and compare with bounds", cmd_bench},
};
enum { NCOMMANDS = sizeof commands / sizeof *commands };

/* ---- for the commands ---------------------------------------------------------------------------------------------- */

int cli_fail(const char *format, ...) {
    va_list ap;
    fputs("wick: ", stderr);
    va_start(ap, format);
    vfprintf(stderr, format, ap);
    va_end(ap);
    fputc('\n', stderr);
    return EXIT_FAILED;
}

int64_t cli_int(struct argp_state *s, const char *option, const char *text, int64_t low, int64_t high) {
    char *end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    if (errno || end == text || *end || v < low || v > high)
        argp_error(s, "--%s takes a whole number from %lld to %lld, not '%s'", option, (long long)low,
                   (long long)high, text);
    return v;
}

double cli_real(struct argp_state *s, const char *option, const char *text, double low, double high) {
    char *end;
    double v = strtod(text, &end);
    if (end == text || *end || !(v >= low && v <= high))
        argp_error(s, "--%s takes a number from %g to %g, not '%s'", option, low, high, text);
    return v;
}

int cli_choice(struct argp_state *s, const char *option, const char *text, const char *const *choices,
               int n) {
    char list[256] = "";
    for (int i = 0; i < n; i++) {
        if (!strcmp(text, choices[i]))
            return i;
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i ? ", " : "", choices[i]);
    }
    argp_error(s, "--%s takes one of %s, not '%s'", option, list, text);
    return 0;
}

json_t *cli_number(double v) { return isfinite(v) ? json_real(v) : json_null(); }

bool cli_json(json_t *object) {
    if (!object) {
        cli_fail("out of memory");
        return false;
    }
    json_dumpf(object, stdout, JSON_COMPACT | JSON_REAL_PRECISION(9));
    putchar('\n');
    json_decref(object);
    return !ferror(stdout);
}

/* ---- entry --------------------------------------------------------------------------------------------------------- */

static void help(FILE *f) {
    fputs("usage: wick COMMAND [options]\n\ncommands:\n", f);
    for (int i = 0; i < NCOMMANDS; i++)
        fprintf(f, "  %-8s %s\n", commands[i].name, commands[i].doc);
    fputs("\n`wick COMMAND --help` lists a command's options; `wick --version` prints the version.\n", f);
}

/* A closed standard descriptor would be given to the next file that is opened; one that refuses reads and writes takes its
   place. */
static void hold_descriptors(void) {
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", fd ? O_RDONLY : O_WRONLY) != fd)
            _exit(EXIT_FAILED);
}

static int dispatch(int argc, char **argv) {
    if (argc < 2) {
        help(stderr);
        return EXIT_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-?") || !strcmp(argv[1], "-h") ||
        !strcmp(argv[1], "help")) {
        help(stdout);
        return 0;
    }
    if (!strcmp(argv[1], "--version") || !strcmp(argv[1], "-V")) {
        printf("wick %s\n", wk_version());
        return 0;
    }
    for (int i = 0; i < NCOMMANDS; i++)
        if (!strcmp(argv[1], commands[i].name)) {
            static char name[32];
            snprintf(name, sizeof name, "wick %s", commands[i].name);
            argv[1] = name;
            return commands[i].run(argc - 1, argv + 1);
        }
    fprintf(stderr, "wick: unknown %s '%s'; `wick --help` lists the commands\n",
            argv[1][0] == '-' ? "option" : "command", argv[1]);
    return EXIT_USAGE;
}

int main(int argc, char **argv) {
    hold_descriptors();
    signal(SIGPIPE, SIG_IGN);
    argp_err_exit_status = EXIT_USAGE;
    int status = dispatch(argc, argv);
    bool written = !ferror(stdout);
    if (fclose(stdout) || !written) {
        fprintf(stderr, "wick: cannot write the output\n");
        return status ? status : EXIT_FAILED;
    }
    return status;
}
