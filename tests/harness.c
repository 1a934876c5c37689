/* The test runner: registration, checks, random inputs, one process per test, the report. What a test finds
 * goes into one record in shared memory, so that it outlives the test's process. May call the C library and
 * POSIX. */
#include "harness.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { SHOWN_FAILURES = 8, MAX_FILTERS = 16, DEFAULT_TIMEOUT_S = 600, EXIT_NOTHING_RAN = 3 };

/* What one test reported, in shared memory. The two `at` members hold the last place a check was made: after a
 * fork the addresses of string constants are the same in both processes. */
typedef struct {
    _Atomic int failures, skipped, finished;
    _Atomic(const char *) at_file;
    _Atomic int at_line;
    char text[8192]; /* failures in full lines, or the reason of the skip */
} record;

/* A test in a process of its own. */
typedef struct {
    const wkt_test *test;
    record *rec;
    pid_t child;   /* 0: it has not begun or has ended */
    double time;   /* of its start; once it has ended, seconds it took */
    char died[96]; /* how it ended early, or "" */
    FILE *output;  /* what it prints, where tests run side by side */
    char *printed; /* what it printed, once it has ended */
    size_t nprinted;
} job;

static struct {
    wkt_test *first, **last;
    const wkt_test *current;
    record *rec;
    pthread_mutex_t text_lock;
    const char *filters[MAX_FILTERS];
    int nfilters;
    bool json, list, verbose, quick, fork, require;
    unsigned timeout_s, jobs;
    uint64_t seed, rng[2];
    int passed, failed, skipped;
} run = {.last = &run.first, .text_lock = PTHREAD_MUTEX_INITIALIZER, .jobs = 1};

/* Present when a sanitizer's runtime is linked in. */
extern void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

void wkt_register(wkt_test *t) {
    *run.last = t;
    run.last = &t->next;
}

bool wkt_quick(void) { return run.quick; }

const char *wkt_dir(void) {
    const char *moved = getenv("WICK_TEST_DIR");
    return moved && *moved ? moved : WKT_DIR;
}

double wkt_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- random inputs ------------------------------------------------------------------------------------------------- */

static uint64_t scramble(uint64_t x) {
    x += 0x193ea7aad030a977u;
    x = (x ^ x >> 29) * 0x5e071979bfc3d7adu;
    x = (x ^ x >> 32) * 0x6f19c912256b3e23u;
    return x ^ x >> 30;
}

static void seed_test(const wkt_test *t) {
    uint64_t h = run.seed;
    for (const char *s = t->group; *s; s++)
        h = scramble(h ^ (unsigned char)*s);
    h = scramble(h ^ '.');
    for (const char *s = t->name; *s; s++)
        h = scramble(h ^ (unsigned char)*s);
    run.rng[0] = h;
    run.rng[1] = scramble(h) | 1; /* the state is never all zero */
}

uint64_t wkt_seed(void) { return run.seed; }

/* xorshift128+ (Vigna, "Further scramblings of Marsaglia's xorshift generators", 2014). */
uint64_t wkt_u64(void) {
    uint64_t a = run.rng[0], b = run.rng[1];
    run.rng[0] = b;
    a ^= a << 23;
    run.rng[1] = a ^ b ^ a >> 18 ^ b >> 5;
    return run.rng[1] + b;
}

uint64_t wkt_below(uint64_t n) { return (uint64_t)(((__uint128_t)wkt_u64() * n) >> 64); }

int64_t wkt_range(int64_t lo, int64_t hi) {
    uint64_t span = (uint64_t)hi - (uint64_t)lo + 1; /* 0 stands for all 2^64 values */
    return (int64_t)((uint64_t)lo + (span ? wkt_below(span) : wkt_u64()));
}

double wkt_uniform(double lo, double hi) { return lo + (hi - lo) * ((double)(wkt_u64() >> 11) * 0x1p-53); }

double wkt_normal(void) {
    double r = sqrt(-2.0 * log(1.0 - wkt_uniform(0, 1)));
    return r * cos(6.283185307179586 * wkt_uniform(0, 1));
}

void wkt_fill_uniform(float *p, size_t n, double lo, double hi) {
    for (size_t i = 0; i < n; i++)
        p[i] = (float)wkt_uniform(lo, hi);
}

void wkt_fill_normal(float *p, size_t n, double scale) {
    for (size_t i = 0; i < n; i++)
        p[i] = (float)(scale * wkt_normal());
}

/* ---- checks -------------------------------------------------------------------------------------------------------- */

static void at(const char *file, int line) {
    atomic_store_explicit(&run.rec->at_file, file, memory_order_relaxed);
    atomic_store_explicit(&run.rec->at_line, line, memory_order_relaxed);
}

static void append_text(const char *file, int line, const char *format, va_list args) {
    size_t n = strlen(run.rec->text), cap = sizeof run.rec->text;
    if (n + 256 > cap)
        return;
    int w = file ? snprintf(run.rec->text + n, cap - n - 1, "%s:%d: ", file, line) : 0;
    n += w > 0 ? (size_t)w : 0;
    w = vsnprintf(run.rec->text + n, cap - n - 1, format, args);
    n += w > 0 ? (size_t)w : 0;
    if (n > cap - 2)
        n = cap - 2;
    run.rec->text[n] = '\n';
    run.rec->text[n + 1] = 0;
}

static void fail_with(const char *file, int line, const char *format, va_list args) {
    pthread_mutex_lock(&run.text_lock);
    if (atomic_fetch_add(&run.rec->failures, 1) < SHOWN_FAILURES)
        append_text(file, line, format, args);
    pthread_mutex_unlock(&run.text_lock);
}

void wkt_fail(const char *file, int line, const char *format, ...) {
    va_list args;
    at(file, line);
    va_start(args, format);
    fail_with(file, line, format, args);
    va_end(args);
}

void wkt_skip(const char *file, int line, const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (run.require) {
        fail_with(file, line, format, args);
    } else {
        pthread_mutex_lock(&run.text_lock);
        run.rec->skipped = 1;
        if (!run.rec->failures)
            append_text(NULL, 0, format, args);
        pthread_mutex_unlock(&run.text_lock);
    }
    va_end(args);
}

bool wkt_check(bool ok, const char *file, int line, const char *text) {
    at(file, line);
    if (!ok)
        wkt_fail(file, line, "%s", text);
    return ok;
}

bool wkt_check_i(int64_t a, int64_t b, const char *file, int line, const char *text) {
    at(file, line);
    if (a != b)
        wkt_fail(file, line, "%s: %lld is not %lld", text, (long long)a, (long long)b);
    return a == b;
}

bool wkt_check_near(double a, double b, double tol, const char *file, int line, const char *text) {
    at(file, line);
    bool ok = a == b || fabs(a - b) <= tol;
    if (!ok)
        wkt_fail(file, line, "%s: %.17g and %.17g differ by %.3g, more than %.3g", text, a, b, fabs(a - b),
                 tol);
    return ok;
}

bool wkt_check_str(const char *a, const char *b, const char *file, int line, const char *text) {
    at(file, line);
    bool ok = a && b ? !strcmp(a, b) : a == b;
    if (!ok)
        wkt_fail(file, line, "%s: \"%s\" is not \"%s\"", text, a ? a : "(null)", b ? b : "(null)");
    return ok;
}

bool wkt_check_mem(const void *a, const void *b, size_t n, const char *file, int line, const char *text) {
    at(file, line);
    const unsigned char *p = a, *q = b;
    for (size_t i = 0; i < n; i++) {
        if (p[i] == q[i])
            continue;
        wkt_fail(file, line, "%s: byte %zu of %zu is %#x, not %#x", text, i, n, (unsigned)p[i],
                 (unsigned)q[i]);
        return false;
    }
    return true;
}

bool wkt_check_near_f32(const float *a, const float *b, size_t n, double atol, double rtol, const char *file,
                        int line, const char *text) {
    at(file, line);
    size_t bad = 0, worst = 0;
    double most = -1;
    for (size_t i = 0; i < n; i++) {
        double x = a[i], y = b[i], excess = fabs(x - y) - (atol + rtol * fabs(y));
        if (x == y || (isnan(x) && isnan(y)) || excess <= 0)
            continue;
        bad++;
        if (isnan(excess))
            excess = INFINITY;
        if (excess > most)
            most = excess, worst = i;
    }
    if (bad)
        wkt_fail(file, line, "%s: %zu of %zu differ, worst [%zu]: %.9g is not %.9g (atol %.3g, rtol %.3g)",
                 text, bad, n, worst, (double)a[worst], (double)b[worst], atol, rtol);
    return !bad;
}

/* ---- report -------------------------------------------------------------------------------------------------------- */

static void print_json_string(const char *s) {
    putchar('"');
    for (; *s; s++) {
        unsigned char ch = (unsigned char)*s;
        if (ch == '"' || ch == '\\')
            printf("\\%c", ch);
        else if (ch == '\n')
            fputs("\\n", stdout);
        else if (ch < 0x20)
            printf("\\u%04x", (unsigned)ch);
        else
            putchar(ch);
    }
    putchar('"');
}

/* Prints the text of the current test's record, each line indented. */
static void print_text(void) {
    for (const char *s = run.rec->text; *s;) {
        size_t n = strcspn(s, "\n");
        printf("  %.*s\n", (int)n, s);
        s += n + (s[n] == '\n');
    }
}

/* Counts and prints the outcome of the current test. `died` says how it ended early, or is NULL. */
static void report(const char *died, double seconds) {
    const wkt_test *t = run.current;
    const char *file = run.rec->at_file ? run.rec->at_file : t->file;
    int line = run.rec->at_file ? run.rec->at_line : t->line, failures = run.rec->failures;
    const char *outcome = died || failures ? "failed" : run.rec->skipped ? "skipped" : "passed";
    *(*outcome == 'f' ? &run.failed : *outcome == 's' ? &run.skipped : &run.passed) += 1;
    if (died)
        wkt_fail(file, line, "%s (the last check reached, or the test's first line)", died);
    if (failures > SHOWN_FAILURES) {
        size_t n = strlen(run.rec->text);
        snprintf(run.rec->text + n, sizeof run.rec->text - n, "%d more failures\n",
                 failures - SHOWN_FAILURES);
    }
    if (run.json) {
        printf("{\"test\": \"%s.%s\", \"file\": ", t->group, t->name);
        print_json_string(t->file);
        printf(", \"line\": %d, \"outcome\": \"%s\", \"ms\": %.3f, \"text\": ", t->line, outcome,
               1e3 * seconds);
        print_json_string(run.rec->text);
        puts("}");
    } else if (*outcome != 'p' || run.verbose) {
        printf("%s %s.%s (%.0f ms)\n", outcome, t->group, t->name, 1e3 * seconds);
        print_text();
        if (*outcome == 'f')
            printf("  again: WICK_TEST_SEED=%llu ... --filter %s.%s\n", (unsigned long long)run.seed,
                   t->group, t->name);
    }
    fflush(stdout);
}

static int close_report(void) {
    if (run.json) {
        printf("{\"passed\": %d, \"failed\": %d, \"skipped\": %d, \"seed\": %llu}\n", run.passed, run.failed,
               run.skipped, (unsigned long long)run.seed);
    } else {
        printf("%d passed, %d failed", run.passed, run.failed);
        if (run.skipped)
            printf(", %d skipped", run.skipped);
        putchar('\n');
    }
    fflush(stdout);
    return run.failed ? 1 : run.passed ? 0 : EXIT_NOTHING_RAN;
}

/* ---- running ------------------------------------------------------------------------------------------------------- */

/* The end of a run whose test took this process with it. The report is written from a place where little is
 * safe, which is as good as it gets; once, for a sanitizer may go on to abort. */
static void report_death(const char *died) {
    static volatile sig_atomic_t entered;
    if (entered++ || !run.current || run.rec->finished)
        return;
    report(died, 0);
    close_report();
}

static void on_signal(int sig) {
    char died[64];
    snprintf(died, sizeof died, "killed by signal %d", sig);
    report_death(died);
    _exit(1);
}

static void on_sanitizer_death(void) { report_death("ended by a sanitizer"); }

static void catch_crashes(void) {
    static const int fatal[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGALRM};
    static char stack[64 * 1024];
    bool sanitized = __sanitizer_set_death_callback != NULL;
    stack_t alt = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction act = {.sa_handler = on_signal, .sa_flags = SA_ONSTACK};
    if (sanitized)
        __sanitizer_set_death_callback(on_sanitizer_death);
    else
        sigaltstack(&alt, NULL);
    for (size_t i = 0; i < sizeof fatal / sizeof *fatal; i++)
        if (!sanitized || fatal[i] == SIGALRM ||
            fatal[i] == SIGABRT) /* the rest are the sanitizer's to print */
            sigaction(fatal[i], &act, NULL);
}

static void run_body(const wkt_test *t) {
    alarm(run.timeout_s);
    t->run();
    alarm(0);
    run.rec->finished = 1;
}

/* Takes in what the test printed, so that few files are open at a time. */
static void keep_output(job *j) {
    if (!j->output)
        return;
    fseek(j->output, 0, SEEK_END);
    long n = ftell(j->output);
    rewind(j->output);
    j->printed = n > 0 ? malloc((size_t)n) : NULL;
    j->nprinted = j->printed ? fread(j->printed, 1, (size_t)n, j->output) : 0;
    fclose(j->output);
    j->output = NULL;
}

/* Starts the test in a child. */
static void start_child(job *j) {
    run.rec = j->rec;
    run.current = j->test;
    seed_test(j->test);
    fflush(stdout);
    j->output = run.jobs > 1 ? tmpfile() : NULL;
    j->time = wkt_now();
    j->child = fork();
    if (j->child == 0) {
        if (j->output && (dup2(fileno(j->output), 1) < 0 || dup2(fileno(j->output), 2) < 0))
            exit(1);
        run_body(j->test);
        exit(0);
    }
    if (j->child < 0) {
        snprintf(j->died, sizeof j->died, "no process for the test: %s", strerror(errno));
        keep_output(j);
        j->child = 0;
        j->time = 0;
    }
}

static void child_ended(job *j, int status) {
    j->child = 0;
    j->time = wkt_now() - j->time;
    keep_output(j);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
        snprintf(j->died, sizeof j->died, "ran past %u s", run.timeout_s);
    else if (WIFSIGNALED(status))
        snprintf(j->died, sizeof j->died, "killed by signal %d (%s)", WTERMSIG(status),
                 strsignal(WTERMSIG(status)));
    else if (!j->rec->finished || WEXITSTATUS(status))
        snprintf(j->died, sizeof j->died, "exited with status %d", WEXITSTATUS(status));
}

/* Waits for one of jobs [first, end) to end; returns how many do not run any more. */
static int wait_for_one(job *jobs, int first, int end) {
    int status = 0, gone = 0, why;
    pid_t got;
    while ((got = waitpid(-1, &status, 0)) < 0 && errno == EINTR)
        continue;
    why = errno;
    for (int i = first; i < end; i++) {
        job *j = &jobs[i];
        if (!j->child || (got >= 0 && j->child != got))
            continue;
        child_ended(j, status);
        if (got < 0)
            snprintf(j->died, sizeof j->died, "no process to wait for: %s", strerror(why));
        gone++;
    }
    return gone;
}

static void report_job(job *j) {
    if (j->nprinted)
        fwrite(j->printed, 1, j->nprinted, stdout);
    free(j->printed);
    run.rec = j->rec;
    run.current = j->test;
    report(j->died[0] ? j->died : NULL, j->time);
    run.current = NULL;
}

/* A process for each test, run.jobs of them at a time, reported in the tests' order. */
static void run_forked(job *jobs, int n) {
    for (int first = 0, started = 0, running = 0; first < n;) {
        while (started < n && running < (int)run.jobs) {
            start_child(&jobs[started]);
            running += jobs[started++].child != 0;
        }
        if (jobs[first].child)
            running -= wait_for_one(jobs, first, started);
        while (first < started && !jobs[first].child)
            report_job(&jobs[first++]);
    }
}

static void run_here(job *jobs, int n) {
    for (int i = 0; i < n; i++) {
        run.rec = jobs[i].rec;
        run.current = jobs[i].test;
        seed_test(run.current);
        fflush(stdout);
        double start = wkt_now();
        run_body(run.current);
        report(NULL, wkt_now() - start);
        run.current = NULL;
    }
}

static bool selected(const wkt_test *t) {
    char full[256];
    snprintf(full, sizeof full, "%s.%s", t->group, t->name);
    for (int i = 0; i < run.nfilters; i++)
        if (strstr(full, run.filters[i]))
            return true;
    return run.nfilters == 0;
}

static void help(const char *program) {
    printf("usage: %s [options]\n"
           "  --list           print the tests' names and end\n"
           "  --filter SUBSTR  run the tests whose name contains SUBSTR; may be given several times\n"
           "  --quick          small sizes\n"
           "  --json           one JSON object a line: each test, then the totals\n"
           "  --verbose        print passing tests too\n"
           "  --jobs N         so many tests at a time (with --fork); what one prints comes in one piece\n"
           "  --fork           a process for each test (the default without a sanitizer)\n"
           "  --no-fork        all tests in this process\n"
           "environment: WICK_TEST_SEED (random inputs), WICK_TEST_TIMEOUT (seconds a test may take),\n"
           "             WICK_REQUIRE_CUDA (skips become failures), WICK_TEST_DIR (where their data is)\n"
           "exit status: 0 all passed, 1 a failure, 2 wrong usage, %d no test ran\n",
           program, EXIT_NOTHING_RAN);
}

/* 1 .. 1000. */
static bool whole_number(const char *s, unsigned *out) {
    char *end;
    unsigned long v = strtoul(s, &end, 10);
    if (*s < '1' || *s > '9' || *end || v > 1000)
        return false;
    *out = (unsigned)v;
    return true;
}

/* Returns -1 to go on, or the exit status. */
static int parse(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        if (!strcmp(a, "--list"))
            run.list = true;
        else if (!strcmp(a, "--filter") && i + 1 < argc && run.nfilters < MAX_FILTERS)
            run.filters[run.nfilters++] = argv[++i];
        else if (!strcmp(a, "--quick"))
            run.quick = true;
        else if (!strcmp(a, "--json"))
            run.json = true;
        else if (!strcmp(a, "--verbose"))
            run.verbose = true;
        else if (!strcmp(a, "--fork") || !strcmp(a, "--no-fork"))
            run.fork = !strcmp(a, "--fork");
        else if (!strcmp(a, "--jobs") && i + 1 < argc && whole_number(argv[i + 1], &run.jobs))
            i++;
        else if (!strcmp(a, "--help"))
            return help(argv[0]), 0;
        else {
            fprintf(stderr, "%s: cannot use '%s'; --help lists the options\n", argv[0], a);
            return 2;
        }
    }
    return -1;
}

/* The variable as a number, or `otherwise` where it is unset or not one. */
static uint64_t env_number(const char *name, uint64_t otherwise) {
    const char *s = getenv(name);
    char *end;
    if (!s || !*s)
        return otherwise;
    uint64_t v = strtoull(s, &end, 0);
    return *end ? otherwise : v;
}

int main(int argc, char **argv) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    run.seed = env_number("WICK_TEST_SEED", scramble((uint64_t)now.tv_sec * 1000000000u +
                                                     (uint64_t)now.tv_nsec + (uint64_t)getpid()));
    run.timeout_s = (unsigned)env_number("WICK_TEST_TIMEOUT", DEFAULT_TIMEOUT_S);
    const char *require = getenv("WICK_REQUIRE_CUDA");
    run.require = require && *require;
    run.fork = __sanitizer_set_death_callback == NULL;
    int status = parse(argc, argv);
    if (status >= 0)
        return status;
    int n = 0;
    for (const wkt_test *t = run.first; t; t = t->next)
        n += selected(t);
    record *records = mmap(NULL, ((size_t)n + 1) * sizeof *records, PROT_READ | PROT_WRITE,
                           MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    job *jobs = calloc((size_t)n + 1, sizeof *jobs);
    if (records == MAP_FAILED || !jobs) {
        fprintf(stderr, "%s: no memory for the record: %s\n", argv[0], strerror(errno));
        free(jobs);
        return 1;
    }
    n = 0;
    for (const wkt_test *t = run.first; t; t = t->next)
        if (selected(t)) {
            jobs[n] = (job){.test = t, .rec = &records[n]};
            n++;
        }
    if (run.list) {
        for (int i = 0; i < n; i++)
            printf("%s.%s\n", jobs[i].test->group, jobs[i].test->name);
    } else if (run.fork) {
        run_forked(jobs, n);
    } else {
        catch_crashes();
        run_here(jobs, n);
    }
    free(jobs);
    return run.list ? 0 : close_report();
}
