/* Progress of a training run. C library only. */
#include "progress.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

static const double redraw_s = 0.1;

double progress_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

progress progress_start(int epochs, int64_t steps, int64_t batch, int64_t total, bool quiet) {
    progress p = {
        .quiet = quiet, .epochs = epochs, .steps = steps, .batch = batch, .total = total, .width = 80};
    struct winsize w;
    p.terminal = isatty(STDOUT_FILENO);
    if (p.terminal && !ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) && w.ws_col >= 20)
        p.width = w.ws_col;
    p.started = progress_now();
    return p;
}

void progress_epoch(progress *p, int epoch) {
    p->epoch = epoch;
    p->quarters = 0;
    p->drawn = 0;
    p->epoch_started = progress_now();
}

/* "1:05" or "1:02:03". */
static void duration(char *s, size_t n, double seconds) {
    long t = seconds < 0 || seconds > 1e6 ? 0 : lround(seconds);
    if (t >= 3600)
        snprintf(s, n, "%ld:%02ld:%02ld", t / 3600, t / 60 % 60, t % 60);
    else
        snprintf(s, n, "%ld:%02ld", t / 60, t % 60);
}

/* Rate, time left and loss, as both forms print them. */
static void figures(const progress *p, int64_t step, double loss, char *s, size_t n) {
    double now = progress_now(), spent = now - p->epoch_started;
    int64_t seen = step < p->steps ? step * p->batch : p->total;
    double rate = spent > 0 ? (double)seen / spent : 0;
    double left =
        rate > 0 ? ((double)(p->total - seen) + (double)p->total * (p->epochs - p->epoch)) / rate : 0;
    char eta[32], text[32] = "";
    duration(eta, sizeof eta, left);
    if (isfinite(loss))
        snprintf(text, sizeof text, "loss %.4f  ", loss);
    snprintf(s, n, "%s%.0f images/s  ETA %s", text, rate, eta);
}

static void draw(const progress *p, int64_t step, double loss) {
    char head[48], tail[96], bar[256];
    snprintf(head, sizeof head, "epoch %d/%d ", p->epoch, p->epochs);
    figures(p, step, loss, tail, sizeof tail);
    int room = p->width - 1 - (int)strlen(head) - (int)strlen(tail) - 8; /* brackets, percentage */
    room = room > 40 ? 40 : room;
    int full = room > 0 ? (int)((double)room * (double)step / (double)p->steps) : 0;
    for (int i = 0; i < room; i++)
        bar[i] = i < full ? '=' : i == full ? '>' : ' ';
    bar[room > 0 ? room : 0] = 0;
    printf("\r\033[K%s[%s] %3d%% %.*s", head, bar, (int)(100 * step / p->steps), p->width > 60 ? 96 : 0,
           tail);
    fflush(stdout);
}

void progress_step(progress *p, int64_t step, double loss) {
    if (p->quiet)
        return;
    if (p->terminal) {
        double now = progress_now();
        if (now - p->drawn < redraw_s)
            return;
        p->drawn = now;
        draw(p, step, loss);
    } else if (4 * step >= (p->quarters + 1) * p->steps && step < p->steps) {
        char text[96];
        p->quarters = (int)(4 * step / p->steps);
        figures(p, step, loss, text, sizeof text);
        printf("epoch %d/%d: %d%%  %s\n", p->epoch, p->epochs, 25 * p->quarters, text);
        fflush(stdout);
    }
}

void progress_clear(progress *p) {
    if (p->terminal && !p->quiet) {
        fputs("\r\033[K", stdout);
        fflush(stdout);
    }
}
