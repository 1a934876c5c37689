/* The `wick` command: what its parts share. May call: the public API, argp, jansson, zlib. */
#pragma once
#include <argp.h>
#include <stdbool.h>
#include <stdint.h>

enum { EXIT_FAILED = 1, EXIT_USAGE = 2 };

/* Each command gets argv with argv[0] "wick COMMAND" and returns the exit status. Wrong usage ends in EXIT_USAGE. */
int cmd_train(int argc, char **argv);
int cmd_info(int argc, char **argv);
int cmd_ops(int argc, char **argv);
int cmd_bench(int argc, char **argv);

/* The argument as a number in [low, high], or the end of the program with a line that says what was expected. */
int64_t cli_int(struct argp_state *s, const char *option, const char *text, int64_t low, int64_t high);
double cli_real(struct argp_state *s, const char *option, const char *text, double low, double high);
/* The index of text among the n choices, or the end of the program. */
int cli_choice(struct argp_state *s, const char *option, const char *text, const char *const *choices, int n);

/* One line on stderr, "wick: ..."; returns EXIT_FAILED. */
int cli_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Prints a JSON object (of jansson) on one line of stdout and releases it; NULL is out of memory. */
struct json_t;
bool cli_json(struct json_t *object);
/* A number for one; null where it is NaN or infinite, which JSON cannot say. */
struct json_t *cli_number(double v);
