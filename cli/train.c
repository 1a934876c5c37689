/* `wick train`: trains one of the built-in models on Fashion-MNIST and prints its test accuracy. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <wick.h>

#include "cli.h"
#include "idx.h"
#include "nets.h"
#include "progress.h"

enum { SIDE = NET_SIDE, CLASSES = NET_CLASSES, EVAL_BATCH = 500, READ_EVERY = 20 };

/* ---- options ------------------------------------------------------------------------------------------------------- */

typedef struct options {
    net_model model;
    int device, epochs, threads;
    bool compile, json;
    int64_t batch, limit;
    uint64_t seed;
    double lr;
    const char *data_dir;
} options;

static const char *const datasets[] = {"fashion"}, *const devices[] = {"cpu", "cuda"},
                         *const switches[] = {"off", "on"};

static const struct argp_option option_table[] = {
    {"model", 'm', "cnn|mlp", 0, "the network (default cnn)", 0},
    {"data", 'd', "fashion", 0, "the data set (default fashion)", 0},
    {"data-dir", 'D', "DIR", 0, "where its IDX files are (default /usr/share/datasets/fashion-mnist)", 0},
    {"device", 'v', "cpu|cuda", 0, "where to train (default cpu)", 0},
    {"compile", 'c', "on|off", 0, "compile the training step (default on)", 0},
    {"epochs", 'e', "N", 0, "passes over the training images (default 4)", 0},
    {"batch", 'b', "N", 0, "images a step (default 64)", 0},
    {"lr", 'l', "F", 0, "peak learning rate of AdamW, which falls linearly to 0 (default 0.002)", 0},
    {"seed", 's', "N", 0, "initial weights and order of the images (default 0)", 0},
    {"limit", 'n', "N", 0, "use the first N training images only", 0},
    {"threads", 't', "N", 0, "CPU threads (default: one for each core)", 0},
    {"json", 'j', NULL, 0, "print JSON objects, one a line", 0},
    {0},
};

static error_t parse(int key, char *arg, struct argp_state *s) {
    options *o = s->input;
    switch (key) {
    case 'm':
        o->model = cli_choice(s, "model", arg, net_models, NET_MODELS);
        break;
    case 'd':
        cli_choice(s, "data", arg, datasets, 1);
        break;
    case 'D':
        o->data_dir = arg;
        break;
    case 'v':
        o->device = cli_choice(s, "device", arg, devices, 2);
        break;
    case 'c':
        o->compile = cli_choice(s, "compile", arg, switches, 2);
        break;
    case 'e':
        o->epochs = (int)cli_int(s, "epochs", arg, 0, 100000);
        break;
    case 'b':
        o->batch = cli_int(s, "batch", arg, 1, 60000);
        break;
    case 'l':
        o->lr = cli_real(s, "lr", arg, 0, 1e3);
        break;
    case 's':
        o->seed = (uint64_t)cli_int(s, "seed", arg, 0, INT64_MAX);
        break;
    case 'n':
        o->limit = cli_int(s, "limit", arg, 1, INT64_MAX);
        break;
    case 't':
        o->threads = (int)cli_int(s, "threads", arg, 1, 1024);
        break;
    case 'j':
        o->json = true;
        break;
    case ARGP_KEY_ARG:
        argp_error(s, "unexpected argument '%s'", arg);
        break;
    default:
        return ARGP_ERR_UNKNOWN;
    }
    return 0;
}

/* ---- data ---------------------------------------------------------------------------------------------------------- */

typedef struct set {
    uint8_t *images, *labels;
    int64_t count;
} set;

/* DIR/NAME.gz, or DIR/NAME where only that exists. */
static bool load_file(const char *dir, const char *name, int ndim, idx *out) {
    char path[4096], why[4400];
    int n = snprintf(path, sizeof path, "%s/%s.gz", dir, name);
    if (n < 0 || (size_t)n >= sizeof path) {
        cli_fail("--data-dir is too long");
        return false;
    }
    if (access(path, F_OK)) {
        path[n - 3] = 0;
        if (access(path, F_OK))
            strcpy(path + n - 3, ".gz");
    }
    if (idx_read(path, ndim, out, why, sizeof why))
        return true;
    cli_fail("%s%s", why,
             access(path, F_OK)
                 ? " (the Debian package dataset-fashion-mnist has it; --data-dir names another place)"
                 : "");
    return false;
}

static bool check_set(const char *dir, const char *prefix, const idx *images, const idx *labels) {
    if (images->size[1] != SIDE || images->size[2] != SIDE)
        return cli_fail("%s/%s-images-idx3-ubyte: images of %lld x %lld, not 28 x 28", dir, prefix,
                        (long long)images->size[1], (long long)images->size[2]),
               false;
    if (images->size[0] != labels->size[0] || !images->size[0])
        return cli_fail("%s: %lld %s images and %lld labels", dir, (long long)images->size[0], prefix,
                        (long long)labels->size[0]),
               false;
    for (int64_t i = 0; i < labels->size[0]; i++)
        if (labels->data[i] >= CLASSES)
            return cli_fail("%s/%s-labels-idx1-ubyte: label %d of image %lld is not below 10", dir, prefix,
                            labels->data[i], (long long)i),
                   false;
    return true;
}

static bool load_set(const char *dir, const char *prefix, set *out) {
    char name[64];
    idx images = {0}, labels = {0};
    snprintf(name, sizeof name, "%s-images-idx3-ubyte", prefix);
    bool ok = load_file(dir, name, 3, &images);
    snprintf(name, sizeof name, "%s-labels-idx1-ubyte", prefix);
    ok = ok && load_file(dir, name, 1, &labels) && check_set(dir, prefix, &images, &labels);
    if (!ok) {
        free(images.data);
        free(labels.data);
        return false;
    }
    *out = (set){images.data, labels.data, images.size[0]};
    return true;
}

static wk_loader *loader_of(wk_ctx *c, const set *s, int64_t count, int64_t batch, bool shuffle,
                            uint64_t seed) {
    wk_field fields[2] = {{.dtype = WK_U8, .ndim = 3, .size = {1, SIDE, SIDE}, .data = s->images},
                          {.dtype = WK_U8, .index = true, .data = s->labels}};
    wk_loader_options o;
    wk_loader_options_init(&o);
    o.batch = batch;
    o.shuffle = shuffle;
    o.seed = seed;
    return wk_loader_new(c, fields, 2, count, &o);
}

/* ---- training ------------------------------------------------------------------------------------------------------ */

typedef struct job {
    const options *o;
    wk_ctx *c;
    net_job net;
    wk_loader *train, *test;
    int64_t ntrain, ntest;
    wk_compiled *step, *count;      /* NULL: eager */
    wk_tensor *waiting[READ_EVERY]; /* losses not read yet: reading waits for the device */
    int nwaiting;
    double loss_sum;
    int64_t loss_count;
} job;

/* How many of a batch the model gets right. */
static void count_right(wk_ctx *c, void *self, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    (void)c, (void)nin, (void)nout;
    wk_tensor *best = wk_argmax(wk_forward(((net_job *)self)->model, in[0]), 1, false);
    out[0] = wk_sum(wk_cast(wk_eq(best, in[1]), WK_F32), NULL, 0, false);
}

static wk_tensor *run(job *j, wk_compiled *f, wk_fn fn, wk_tensor *const *in, int nin) {
    if (f)
        return wk_call(f, in, nin);
    wk_tensor *out = NULL;
    fn(j->c, &j->net, in, nin, &out, 1);
    return out;
}

/* Reads the losses that wait; returns their mean. */
static double read_losses(job *j) {
    double sum = 0;
    int n = j->nwaiting;
    for (int i = 0; i < n; i++) {
        sum += wk_item(j->waiting[i]);
        wk_release(j->waiting[i]);
    }
    j->loss_sum += sum;
    j->loss_count += n;
    j->nwaiting = 0;
    return sum / n;
}

/* One pass over the training images. Stops early when the context fails. */
static void train_epoch(job *j, progress *p, int epoch) {
    wk_tensor *batch[2];
    int64_t steps = wk_loader_batches(j->train), total = steps * j->o->epochs;
    double loss = NAN;
    progress_epoch(p, epoch + 1);
    j->loss_sum = 0;
    j->loss_count = 0;
    for (int64_t i = 0; wk_loader_next(j->train, batch); i++) {
        wk_optim_set_lr(j->net.optim, j->o->lr * (1 - (double)(epoch * steps + i) / (double)total));
        j->waiting[j->nwaiting++] = wk_retain(run(j, j->step, net_train_step, batch, 2));
        if (j->nwaiting == READ_EVERY || i + 1 == steps)
            loss = read_losses(j);
        progress_step(p, i + 1, loss);
    }
    progress_clear(p);
}

static double accuracy(job *j) {
    wk_tensor *batch[2];
    double right = 0;
    bool grad = wk_grad_enable(j->c, false);
    wk_train_mode(j->net.model, false);
    while (wk_loader_next(j->test, batch))
        right += wk_item(run(j, j->count, count_right, batch, 2));
    wk_train_mode(j->net.model, true);
    wk_grad_enable(j->c, grad);
    return right / (double)j->ntest;
}

static void report_epoch(const job *j, const progress *p, int epoch, double test) {
    double seconds = progress_now() - p->epoch_started;
    double loss = j->loss_sum / (double)j->loss_count, rate = (double)j->ntrain / seconds;
    if (j->o->json)
        cli_json(json_pack("{s:i, s:o, s:f, s:f, s:f}", "epoch", epoch + 1, "loss", cli_number(loss),
                           "test_accuracy", test, "seconds", seconds, "images_per_second", rate));
    else
        printf("epoch %d/%d: loss %.4f, test accuracy %.4f, %.1f s, %.0f images/s\n", epoch + 1, j->o->epochs,
               loss, test, seconds, rate);
    fflush(stdout);
}

static void report_end(const job *j, const progress *p, double test) {
    double seconds = progress_now() - p->started;
    if (j->o->json)
        cli_json(json_pack("{s:s, s:s, s:b, s:I, s:f, s:f}", "model", net_models[j->o->model], "device",
                           devices[j->o->device], "compiled", j->o->compile, "steps",
                           (json_int_t)wk_optim_steps(j->net.optim), "seconds", seconds, "test_accuracy",
                           test));
    else
        printf("test accuracy: %.4f\n", test);
}

static void job_init(job *j, const set *train, const set *test) {
    const options *o = j->o;
    wk_seed(j->c, o->seed);
    j->ntrain = o->limit && o->limit < train->count ? o->limit : train->count;
    j->ntest = test->count;
    j->net.model = net_new(j->c, o->model);
    j->net.optim = net_adamw(j->c, j->net.model);
    j->train = loader_of(j->c, train, j->ntrain, o->batch, true, o->seed);
    j->test = loader_of(j->c, test, j->ntest, EVAL_BATCH, false, 0);
    if (o->compile && !wk_failed(j->c)) {
        j->step = wk_compile(j->c, net_train_step, &j->net, NULL);
        j->count = wk_compile(j->c, count_right, &j->net, NULL);
    }
}

static int train(const options *o, wk_ctx *c, const set *train, const set *test) {
    job j = {.o = o, .c = c};
    const wk_device device = o->device ? WK_CUDA : WK_CPU;
    const char *why;
    if (!wk_device_available(c, device, &why))
        return cli_fail("--device %s: %s", devices[o->device], why);
    wk_use_device(c, device);
    job_init(&j, train, test);
    double result = 0;
    progress p = progress_start(o->epochs, wk_loader_batches(j.train), o->batch, j.ntrain, o->json);
    for (int epoch = 0; epoch < o->epochs && !wk_failed(c); epoch++) {
        train_epoch(&j, &p, epoch);
        result = accuracy(&j);
        if (!wk_failed(c))
            report_epoch(&j, &p, epoch, result);
        if (ferror(stdout))
            return EXIT_FAILED;
    }
    if (!o->epochs)
        result = accuracy(&j);
    if (wk_failed(c))
        return cli_fail("%s", wk_message(c));
    report_end(&j, &p, result);
    return 0;
}

int cmd_train(int argc, char **argv) {
    options o = {.epochs = 4,
                 .compile = true,
                 .batch = 64,
                 .lr = 2e-3,
                 .data_dir = "/usr/share/datasets/fashion-mnist"};
    const struct argp argp = {
        option_table,
        parse,
        NULL,
        "Trains a model on Fashion-MNIST (Debian package dataset-fashion-mnist) and prints its test "
        "accuracy on the last line.",
        NULL,
        NULL,
        NULL};
    argp_parse(&argp, argc, argv, 0, NULL, &o);
    set training = {0}, testing = {0};
    int status = EXIT_FAILED;
    wk_runtime_options ro;
    wk_runtime_options_init(&ro);
    ro.threads = o.threads;
    if (load_set(o.data_dir, "train", &training) && load_set(o.data_dir, "t10k", &testing)) {
        wk_runtime *rt = wk_runtime_new(&ro);
        wk_ctx *c = rt ? wk_ctx_new(rt) : NULL;
        status = c ? train(&o, c, &training, &testing) : cli_fail("out of memory");
        wk_ctx_free(c);
        wk_runtime_free(rt);
    }
    free(training.images);
    free(training.labels);
    free(testing.images);
    free(testing.labels);
    return status;
}
