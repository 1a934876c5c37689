/* The bench `demo`: `wick train --model cnn --data fashion --seed 1` as a user starts it, the whole process from its start to
 * its end: loading, four epochs, the test after each. It runs once and takes as long as the demo does. C library only.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"

extern char **environ;

/* Reads to the end; the number on the last line that says `test accuracy: `. */
static bool read_accuracy(int fd, double *accuracy) {
    char line[256];
    bool found = false;
    FILE *f = fdopen(fd, "r");
    if (!f) {
        close(fd);
        return false;
    }
    while (fgets(line, sizeof line, f))
        found |= sscanf(line, "test accuracy: %lf", accuracy) == 1;
    fclose(f);
    return found;
}

/* Starts the command with its standard output in a pipe, whose reading end is returned; -1 on failure. */
static int start(char *const *argv, pid_t *pid) {
    posix_spawn_file_actions_t fa;
    int fd[2];
    if (pipe2(fd, O_CLOEXEC))
        return -1;
    bool ok = !posix_spawn_file_actions_init(&fa);
    if (ok) {
        ok = !posix_spawn_file_actions_adddup2(&fa, fd[1], STDOUT_FILENO) &&
             !posix_spawn(pid, "/proc/self/exe", &fa, NULL, argv, environ);
        posix_spawn_file_actions_destroy(&fa);
    }
    close(fd[1]);
    if (ok)
        return fd[0];
    close(fd[0]);
    return -1;
}

static void run(bench_run *r) {
    const char *argv[] = {"wick", "train",    "--model", "cnn",        "--data",          "fashion", "--seed",
                          "1",    "--device", NULL,      "--data-dir", bench_data_dir(r), NULL};
    enum { DEVICE_AT = 9, DATA_DIR_AT = 10 };
    argv[DEVICE_AT] = wk_device_name(bench_device(r));
    if (!bench_data_dir(r))
        argv[DATA_DIR_AT] = NULL;
    pid_t pid;
    int status = -1;
    double accuracy = 0, begin = bench_now();
    int fd = start((char *const *)argv, &pid);
    if (fd < 0) {
        bench_fail(r, "wall", "the command could not be started");
        return;
    }
    bool said = read_accuracy(fd, &accuracy);
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR) {
            status = -1;
            break;
        }
    double took = bench_now() - begin;
    if (status || !said) {
        bench_fail(r, "wall", "the demo failed");
        return;
    }
    bench_figure(r, "wall", took, "s");
    bench_figure(r, "accuracy", accuracy, "fraction");
}

static const char *const cases[] = {"wall", "accuracy", NULL};
const bench bench_demo = {"demo", "the whole of `wick train --model cnn --data fashion --seed 1`", run, cases,
                          true};
