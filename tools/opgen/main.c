/* Entry of opgen: opgen TABLE OUTDIR. Writes OUTDIR/wick/ops.h, OUTDIR/ops_gen.h, OUTDIR/ops_gen.c, OUTDIR/ops_straight.inc; a file whose text
 * would not change is left alone, so that nothing is rebuilt for it. */
#include "opgen.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

void fail_at(int line, const char *fmt, ...) {
    va_list ap;
    fprintf(stderr, "%s:%d: ", table_path, line);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    exit(1);
}

/* Chunks stay on a list, so that a leak checker finds them all still in use. */
typedef struct chunk {
    struct chunk *older;
    _Alignas(16) char bytes[];
} chunk;

void *take(size_t n) {
    static chunk *newest;
    static size_t used, size;
    n = (n + 15) & ~(size_t)15;
    if (!newest || n > size - used) {
        size = n > 1 << 20 ? n : 1 << 20;
        used = 0;
        chunk *c = calloc(1, sizeof *c + size);
        if (!c)
            fail_at(0, "out of memory");
        c->older = newest;
        newest = c;
    }
    used += n;
    return newest->bytes + used - n;
}

char *format(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    char *s = take((size_t)n + 1);
    va_start(ap, fmt);
    vsnprintf(s, (size_t)n + 1, fmt, ap);
    va_end(ap);
    return s;
}

static bool same_as_file(const char *path, const char *s, size_t n) {
    FILE *f = fopen(path, "rb");
    if (!f)
        return false;
    char *old = malloc(n + 1);
    bool same = old && fread(old, 1, n + 1, f) == n && memcmp(old, s, n) == 0;
    free(old);
    fclose(f);
    return same;
}

static void write_file(const char *path, void (*emit)(FILE *)) {
    char *s = NULL;
    size_t n = 0;
    FILE *mem = open_memstream(&s, &n);
    if (!mem)
        fail_at(0, "out of memory");
    emit(mem);
    if (fclose(mem) != 0)
        fail_at(0, "out of memory");
    if (!same_as_file(path, s, n)) {
        FILE *f = fopen(path, "wb");
        if (!f || fwrite(s, 1, n, f) != n || fclose(f) != 0) {
            fprintf(stderr, "opgen: cannot write %s\n", path);
            exit(1);
        }
    }
    free(s);
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: opgen TABLE OUTDIR\n");
        return 2;
    }
    table_read(argv[1]);
    for (int i = 0; i < nops; i++)
        vjp_check(&ops[i]);
    mkdir(argv[2], 0777);
    mkdir(format("%s/wick", argv[2]), 0777);
    write_file(format("%s/wick/ops.h", argv[2]), emit_public_header);
    write_file(format("%s/ops_gen.h", argv[2]), emit_header);
    write_file(format("%s/ops_gen.c", argv[2]), emit_source);
    write_file(format("%s/ops_straight.inc", argv[2]), emit_straight_programs);
    return 0;
}
