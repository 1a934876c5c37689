/* The module tree behind `wk_module *` handles. May call: base, core. */
#ifndef WKI_MODULE_H
#define WKI_MODULE_H

#include "core/box.h"

/* What forward receives; shared by the copies that wk_module_share makes in other contexts. */
typedef struct wki_self {
    _Atomic int32_t refs;
    void *self;
    void (*free_self)(void *);
} wki_self;

typedef enum wki_item_kind { WKI_PARAM, WKI_BUFFER, WKI_KINDS } wki_item_kind;

typedef struct wki_item { /* a parameter or buffer */
    char *name;
    wk_tensor *t; /* retained */
} wki_item;

typedef struct wki_child {
    char *name;
    struct wki_module *m; /* owned */
} wki_child;

typedef struct wki_module {
    wk_module *handle;
    wk_ctx *c;
    char *kind;
    wk_fn forward;
    wki_self *self;
    wki_item *item[WKI_KINDS];
    wki_child *child;
    int nitem[WKI_KINDS], nchild;
    struct wki_module *parent;
    wk_module *origin; /* the module that this one is a wk_module_share of, directly or not; else NULL */
    bool training;
    int running;  /* forward calls of it in progress */
    char **names; /* dotted parameter names of the whole tree, made when asked for; NULL when out of date */
    int nnames;
} wki_module;

/* The public calls behind which the built-in layers stand: `caller` is their user's line, and wki_module_new keeps the one
   that the context has. */
wk_module *wki_module_new(wk_ctx *c, const char *kind, wk_fn forward, void *self, void (*free_self)(void *));
wk_tensor *wki_module_add(wk_module *m, wki_item_kind kind, const char *name, wk_tensor *t,
                          const void *caller);
void wki_module_adopt(wk_module *m, const char *name, wk_module *child, const void *caller);
void wki_forward_n(wk_module *m, wk_tensor *const *in, int nin, wk_tensor **out, int nout,
                   const void *caller);

#endif
