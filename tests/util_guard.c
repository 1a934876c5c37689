/* Guarded buffers for tests, by mmap and mprotect. May call POSIX alone. */
#include "util_guard.h"

#include <sys/mman.h>
#include <unistd.h>

static size_t usable(size_t n) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (n + page - 1) / page * page;
}

void *wkt_guarded(size_t n) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), body = usable(n);
    char *map = mmap(NULL, body + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED)
        return NULL;
    if (mprotect(map + body, page, PROT_NONE)) {
        munmap(map, body + page);
        return NULL;
    }
    return map + body - n;
}

void wkt_guarded_free(void *p, size_t n) {
    size_t body = usable(n);
    if (p)
        munmap((char *)p + n - body, body + (size_t)sysconf(_SC_PAGESIZE));
}
