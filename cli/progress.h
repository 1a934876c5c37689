/* Progress of a training run: a bar with rate and time left on a terminal, a line now and then elsewhere. C library only. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

typedef struct progress {
    bool terminal, quiet; /* quiet: nothing is printed */
    int width;
    double started, epoch_started, drawn;
    int epochs, epoch;           /* epoch counts from 1 */
    int64_t steps, batch, total; /* per epoch; samples a step; samples an epoch */
    int quarters;                /* plain lines printed in this epoch */
} progress;

double progress_now(void); /* monotonic, seconds */
progress progress_start(int epochs, int64_t steps, int64_t batch, int64_t total, bool quiet);
void progress_epoch(progress *p, int epoch);
/* `step` steps of the epoch are done; loss: the latest known, or NAN. */
void progress_step(progress *p, int64_t step, double loss);
/* Takes the bar off the screen. */
void progress_clear(progress *p);
