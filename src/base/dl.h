/* Shared libraries opened at run time: found among candidate names and directories, with a table of function
 * pointers filled by symbol name, and errors that say what was looked for and where. Calls the C library and
 * the dynamic loader. Thread-safe; a library stays mapped until the process ends, since some of them leave
 * threads and exit handlers behind. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

typedef struct wki_dl wki_dl;

/* Where a library may be. Every name is tried everywhere before the next name is. */
typedef struct wki_dl_search {
    const char *const *names; /* file names, best first, NULL at the end; one with a '/' is a path */
    const char *first;        /* directories separated by ':' that go before the loader's; may be NULL */
    const char *const *after; /* glob patterns of directories after it, NULL at the end; may be NULL */
} wki_dl_search;

/* One pointer of a table: the exported symbol and the place of the pointer in the table. */
typedef struct wki_dl_symbol {
    const char *name;
    size_t offset;
    bool optional; /* left NULL when absent */
} wki_dl_symbol;

/* Opens the first candidate that loads. 0, or -1 with one line of text in err: the names, the places and, for
 * a file that exists and does not load, the loader's reason. */
int wki_dl_open(wki_dl **out, const wki_dl_search *search, char *err, size_t err_size);
void wki_dl_close(wki_dl *dl); /* NULL is allowed */

/* The path or name under which it was opened; lives as long as dl. */
const char *wki_dl_path(const wki_dl *dl);

/* Fills the table. 0, or -1 with the missing required symbols named in err. */
int wki_dl_fill(const wki_dl *dl, const wki_dl_symbol *symbols, size_t n, void *table, char *err,
                size_t err_size);
