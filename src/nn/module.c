/* Modules: a tree of named parameters and children around a user's forward function. May call: base, core, the public API.
 */
#include "nn/module.h"

#include <stdio.h>
#include <string.h>

#define CALLER __builtin_return_address(0)

static wki_module *get(wk_module *m, const void *caller) { return wki_box_get(m, WKI_BOX_MODULE, caller); }

static bool out_of_memory(wk_ctx *c) { return wki_fail(c, WK_NOMEM, "no host memory for a module"); }

static char *copy_text(const char *s) {
    size_t n = strlen(s) + 1;
    char *p = wki_malloc(n);
    return p ? memcpy(p, s, n) : NULL;
}

/* ---- making and freeing -------------------------------------------------------------------------------------------- */

static void names_forget(wki_module *m) {
    for (int i = 0; i < m->nnames; i++)
        wki_free(m->names[i]);
    wki_free(m->names);
    m->names = NULL;
    m->nnames = 0;
}

static void changed(wki_module *m) {
    for (; m; m = m->parent)
        names_forget(m);
}

static void self_unref(wki_self *s) {
    if (!s || atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) != 1)
        return;
    if (s->free_self)
        s->free_self(s->self);
    wki_free(s);
}

static void leave_parent(wki_module *m) {
    wki_module *p = m->parent;
    if (!p)
        return;
    changed(p);
    int i = 0;
    while (p->child[i].m != m)
        i++;
    wki_free(p->child[i].name);
    memmove(&p->child[i], &p->child[i + 1], (size_t)(p->nchild - i - 1) * sizeof *p->child);
    p->nchild--;
    m->parent = NULL;
}

static void destroy(void *body) {
    wki_module *m = body;
    leave_parent(m);
    names_forget(m);
    while (m->nchild) /* a child leaves its parent as it goes */
        wki_box_free(m->child[m->nchild - 1].m->handle);
    for (int k = 0; k < WKI_KINDS; k++) {
        for (int i = 0; i < m->nitem[k]; i++) {
            wki_free(m->item[k][i].name);
            wk_release(m->item[k][i].t);
        }
        wki_free(m->item[k]);
    }
    self_unref(m->self);
    wki_free(m->child);
    wki_free(m->kind);
    wki_free(m);
}

/* Takes over one reference on self. NULL after wki_fail. */
static wki_module *make(wk_ctx *c, const char *kind, wk_fn forward, wki_self *self) {
    wki_module *m = wki_calloc(1, sizeof *m);
    if (!m) {
        self_unref(self);
        out_of_memory(c);
        return NULL;
    }
    m->c = c;
    m->forward = forward;
    m->self = self;
    m->training = true;
    m->kind = copy_text(kind ? kind : "module");
    if (!m->kind) {
        destroy(m);
        out_of_memory(c);
        return NULL;
    }
    wk_module *h = wki_box_new(c, WKI_BOX_MODULE, m, destroy);
    if (wki_box_peek(h, WKI_BOX_MODULE) != m)
        return NULL;
    m->handle = h;
    return m;
}

wk_module *wki_module_new(wk_ctx *c, const char *kind, wk_fn forward, void *self, void (*free_self)(void *)) {
    if (!forward)
        wki_fail(c, WK_INVALID, "a module needs a forward function");
    wki_self *s = forward ? wki_malloc(sizeof *s) : NULL;
    if (s) {
        *s = (wki_self){.self = self, .free_self = free_self};
        atomic_init(&s->refs, 1);
        wki_module *m = make(c, kind, forward, s);
        return m ? m->handle : wki_box_invalid(c);
    }
    if (free_self)
        free_self(self);
    out_of_memory(c);
    return wki_box_invalid(c);
}

wk_module *wk_module_new(wk_ctx *c, const char *kind, wk_fn forward, void *self, void (*free_self)(void *)) {
    wki_begin(c, CALLER);
    return wki_module_new(c, kind, forward, self, free_self);
}

static bool tree_runs(const wki_module *m) {
    if (m->running)
        return true;
    for (int i = 0; i < m->nchild; i++)
        if (tree_runs(m->child[i].m))
            return true;
    return false;
}

void wk_module_free(wk_module *h) {
    wki_module *m = get(h, CALLER);
    if (!m)
        return;
    bool runs = tree_runs(m);
    for (const wki_module *up = m->parent; up && !runs; up = up->parent)
        runs = up->running;
    if (runs) {
        wki_begin(m->c, CALLER);
        wki_fail(m->c, WK_STATE, "%s is freed while its forward runs", m->kind);
    } else {
        wki_box_free(h);
    }
}

/* ---- the tree ------------------------------------------------------------------------------------------------------ */

/* Room for one more item in an array of n items that grows at powers of two. */
static bool grow(void *array, int n, size_t item) {
    if (n & (n - 1))
        return true;
    void **p = array;
    void *q = wki_realloc(*p, (size_t)(n ? 2 * n : 1) * item);
    if (q)
        *p = q;
    return q;
}

/* The module's own parameter or buffer of that name, or NULL. */
static wk_tensor *own_item(const wki_module *m, const char *name) {
    for (int k = 0; k < WKI_KINDS; k++)
        for (int i = 0; i < m->nitem[k]; i++)
            if (!strcmp(m->item[k][i].name, name))
                return m->item[k][i].t;
    return NULL;
}

static bool name_taken(const wki_module *m, const char *name) {
    for (int i = 0; i < m->nchild; i++)
        if (!strcmp(m->child[i].name, name))
            return true;
    return own_item(m, name) != NULL;
}

static bool name_ok(wki_module *m, const char *name) {
    if (!name || !*name)
        return wki_fail(m->c, WK_INVALID, "%s: a parameter, buffer or child needs a name", m->kind);
    if (name_taken(m, name))
        return wki_fail(m->c, WK_INVALID, "%s: the name \"%s\" is taken", m->kind, name);
    return true;
}

/* Appends a parameter or buffer that is already what it should be; takes a reference. */
static bool add_item(wki_module *m, wki_item_kind kind, const char *name, wk_tensor *t) {
    int n = m->nitem[kind];
    char *text = grow(&m->item[kind], n, sizeof(wki_item)) ? copy_text(name) : NULL;
    if (!text)
        return out_of_memory(m->c);
    m->item[kind][n] = (wki_item){text, wk_retain(t)};
    m->nitem[kind]++;
    wki_slot(t)->st->pinned = 1;
    changed(m);
    return true;
}

/* Can t be a parameter? */
static bool trainable(wki_module *m, const char *name, const wki_tensor *t) {
    if (t->fn)
        return wki_fail(m->c, WK_GRAD, "wk_module_param: \"%s\" of %s is a result of `%s`, not a leaf", name,
                        m->kind, t->fn->op->name);
    if (t->dtype != WK_F32)
        return wki_fail(m->c, WK_DTYPE, "wk_module_param: \"%s\" of %s is %s, which has no gradients", name,
                        m->kind, wk_dtype_name((wk_dtype)t->dtype));
    return true;
}

wk_tensor *wki_module_add(wk_module *h, wki_item_kind kind, const char *name, wk_tensor *t,
                          const void *caller) {
    wki_module *m = get(h, caller);
    wki_tensor *p = wki_enter(t, caller);
    if (!m || !p || m->c->failed)
        return m ? wki_handle(m->c->poison) : p ? wki_handle(p->ctx->poison) : t;
    wki_begin(m->c, caller);
    wki_tensor *poison = m->c->poison;
    if (p == poison) {
        char what[160];
        snprintf(what, sizeof what, "%s: \"%s\" of %s",
                 kind == WKI_PARAM ? "wk_module_param" : "wk_module_buffer", name ? name : "", m->kind);
        wki_fail_poison(m->c, what);
    }
    if (p == poison || !name_ok(m, name))
        return wki_handle(poison);
    if (p->ctx != m->c)
        wki_fail(m->c, WK_HANDLE, "%s: %s \"%s\" belongs to another context", m->kind,
                 kind == WKI_PARAM ? "parameter" : "buffer", name);
    else if (kind == WKI_BUFFER && p->flags & WKI_F_REQ)
        wki_fail(m->c, WK_INVALID, "%s: buffer \"%s\" requires a gradient", m->kind, name);
    else if (kind == WKI_PARAM && trainable(m, name, p))
        p->flags |= WKI_F_REQ;
    return !m->c->failed && add_item(m, kind, name, t) ? t : wki_handle(poison);
}

wk_tensor *wk_module_param(wk_module *m, const char *name, wk_tensor *t) {
    return wki_module_add(m, WKI_PARAM, name, t, CALLER);
}

wk_tensor *wk_module_buffer(wk_module *m, const char *name, wk_tensor *t) {
    return wki_module_add(m, WKI_BUFFER, name, t, CALLER);
}

static bool add_child(wki_module *m, const char *name, wki_module *child) {
    char *text = grow(&m->child, m->nchild, sizeof *m->child) ? copy_text(name) : NULL;
    if (!text)
        return out_of_memory(m->c);
    m->child[m->nchild++] = (wki_child){text, child};
    child->parent = m;
    changed(m);
    return true;
}

void wki_module_adopt(wk_module *h, const char *name, wk_module *child, const void *caller) {
    wki_module *m = get(h, caller), *k = get(child, caller);
    if (!m || !k || m->c->failed)
        return;
    wki_begin(m->c, caller);
    if (!name_ok(m, name))
        return;
    wki_module *root = m;
    while (root->parent)
        root = root->parent;
    if (k->c != m->c)
        wki_fail(m->c, WK_HANDLE, "%s: child \"%s\" belongs to another context", m->kind, name);
    else if (k->parent)
        wki_fail(m->c, WK_STATE, "%s: child \"%s\" already belongs to a %s", m->kind, name, k->parent->kind);
    else if (k == root)
        wki_fail(m->c, WK_INVALID, "%s: child \"%s\" would contain itself", m->kind, name);
    else
        add_child(m, name, k);
}

wk_module *wk_module_child(wk_module *m, const char *name, wk_module *child) {
    wki_module_adopt(m, name, child, CALLER);
    return child;
}

/* ---- forward ------------------------------------------------------------------------------------------------------- */

static wki_module *find_origin(wki_module *m, const wk_module *origin) {
    if (m->origin == origin)
        return m;
    for (int i = 0; i < m->nchild; i++) {
        wki_module *k = find_origin(m->child[i].m, origin);
        if (k)
            return k;
    }
    return NULL;
}

/* A forward function reaches children through its struct, which a shared module has in common with the original: inside it,
   the original's handles stand for the copies, also when the original is gone. */
static wki_module *copy_of(wki_module *running, const wk_module *original) {
    wki_module *k = find_origin(running, original);
    for (running = running->parent; running && !k; running = running->parent)
        k = find_origin(running, original);
    return k;
}

/* The module that the handle means in context c. NULL after wki_fail. */
static wki_module *resolve(wk_ctx *c, wk_module *h, wki_module *running, const void *caller) {
    wki_module *m = h && running && running->origin ? copy_of(running, h) : NULL;
    if (m)
        return m;
    m = get(h, caller);
    if (!m)
        wki_fail(c, WK_HANDLE,
                 h ? "forward of a module that was freed or never made" : "forward of a NULL module");
    else if (m->c != c)
        wki_fail(c, WK_HANDLE, "module %s belongs to another context (wk_module_share makes one here)",
                 m->kind);
    return c->failed ? NULL : m;
}

static void all_poison(wk_ctx *c, wk_tensor **out, int nout) {
    for (int i = 0; i < nout; i++)
        out[i] = c ? wki_handle(c->poison) : NULL;
}

static void run_forward(wk_ctx *c, wki_module *m, void **running, wk_tensor *const *in, int nin,
                        wk_tensor **out, int nout, const void *caller) {
    void *outer = *running;
    wk_scope_begin(c);
    wki_floor floor = wki_floor_begin(c);
    for (int i = 0; i < nout; i++)
        out[i] = NULL;
    *running = m;
    m->running++;
    m->forward(c, m->self->self, in, nin, out, nout);
    m->running--;
    *running = outer;
    wki_floor_end(c, floor, caller);
    for (int i = 0; i < nout; i++) {
        wki_tensor *t = NULL;
        if (!out[i]) {
            wki_begin(c, caller);
            wki_fail(c, WK_INVALID, "forward of %s did not set output %d", m->kind, i);
        } else if (wki_owns(c, wki_slot(out[i]), caller)) {
            t = wki_enter(out[i], caller);
        }
        if (!t || c->failed)
            out[i] = wki_handle(c->poison);
        else
            wki_promote(c, t);
    }
    wk_scope_end(c);
}

void wki_forward_n(wk_module *h, wk_tensor *const *in, int nin, wk_tensor **out, int nout,
                   const void *caller) {
    wk_ctx *c = NULL;
    for (int i = 0; i < nin && !c; i++) /* the first input that is present says where it runs */
        if (in[i])
            c = wki_slot(in[i])->ctx;
    if (!c)
        c = wki_box_ctx(h);
    if (!c || c->failed) {
        all_poison(c, out, nout);
        return;
    }
    wki_begin(c, caller);
    void **running = wki_box_running(c);
    wki_module *m = running ? resolve(c, h, *running, caller) : NULL;
    if (m)
        run_forward(c, m, running, in, nin, out, nout, caller);
    else
        all_poison(c, out, nout);
    if (!running)
        out_of_memory(c);
}

wk_tensor *wk_forward(wk_module *m, wk_tensor *x) {
    wk_tensor *y;
    wki_forward_n(m, &x, 1, &y, 1, CALLER);
    return y;
}

void wk_forward_n(wk_module *m, wk_tensor *const *in, int nin, wk_tensor **out, int nout) {
    wki_forward_n(m, in, nin, out, nout, CALLER);
}

wk_module *wk_this_module(wk_ctx *c) {
    void **running = wki_box_running(c);
    return running && *running ? ((wki_module *)*running)->handle : NULL;
}

/* ---- looking ------------------------------------------------------------------------------------------------------- */

/* Parameters, buffers or both of a tree, each once, with or without their dotted names. */
typedef struct walk {
    wk_tensor **t;
    char **name; /* NULL: not wanted */
    int n;
} walk;

static bool seen(const walk *w, const wk_tensor *t) {
    for (int i = 0; i < w->n; i++)
        if (w->t[i] == t)
            return true;
    return false;
}

static char *join(const char *prefix, const char *name) {
    size_t n = strlen(prefix) + strlen(name) + 2;
    char *s = wki_malloc(n);
    if (s)
        snprintf(s, n, "%s%s%s", prefix, *prefix ? "." : "", name);
    return s;
}

static bool collect_own(walk *w, const wki_module *m, wki_item_kind kind, const char *prefix) {
    for (int i = 0; i < m->nitem[kind]; i++) {
        const wki_item *p = &m->item[kind][i];
        if (seen(w, p->t))
            continue;
        if (!grow(&w->t, w->n, sizeof(void *)) || (w->name && !(w->name[w->n] = join(prefix, p->name))))
            return false;
        w->t[w->n++] = p->t;
    }
    return true;
}

/* Adds the tree's parameters, or buffers. */
static bool collect(walk *w, const wki_module *m, wki_item_kind kind, const char *prefix) {
    bool ok = collect_own(w, m, kind, prefix);
    for (int i = 0; ok && i < m->nchild; i++) {
        char *path = w->name ? join(prefix, m->child[i].name) : NULL;
        ok = (path || !w->name) && collect(w, m->child[i].m, kind, path ? path : "");
        wki_free(path);
    }
    return ok;
}

static int count_params(const wki_module *m) {
    int n = m->nitem[WKI_PARAM];
    for (int i = 0; i < m->nchild; i++)
        n += count_params(m->child[i].m);
    return n;
}

static int list(wk_module *h, wki_item_kind kind, wk_tensor **out, int max, const void *caller) {
    wki_module *m = get(h, caller);
    if (!m)
        return 0;
    walk w = {0};
    if (!collect(&w, m, kind, "")) {
        wki_begin(m->c, caller);
        out_of_memory(m->c);
    } else if (out && max > 0 && w.n) {
        memcpy(out, w.t, (size_t)(w.n < max ? w.n : max) * sizeof(void *));
    }
    wki_free(w.t);
    return w.n;
}

int wk_module_params(wk_module *m, wk_tensor **out, int max) { return list(m, WKI_PARAM, out, max, CALLER); }
int wk_module_buffers(wk_module *m, wk_tensor **out, int max) {
    return list(m, WKI_BUFFER, out, max, CALLER);
}

const char *wk_module_param_name(wk_module *h, int i) {
    wki_module *m = get(h, CALLER);
    if (!m || i < 0)
        return NULL;
    if (!m->names) {
        walk w = {.name = wki_calloc((size_t)count_params(m), sizeof(void *))};
        bool ok = w.name && collect(&w, m, WKI_PARAM, "");
        wki_free(w.t);
        m->names = w.name;
        m->nnames = w.n;
        if (!ok) {
            names_forget(m);
            wki_begin(m->c, CALLER);
            out_of_memory(m->c);
        }
    }
    return i < m->nnames ? m->names[i] : NULL;
}

static wk_tensor *find_state(const wki_module *m, const char *name) {
    wk_tensor *t = own_item(m, name);
    for (int i = 0; !t && i < m->nchild; i++) {
        size_t n = strlen(m->child[i].name);
        if (!strncmp(m->child[i].name, name, n) && name[n] == '.')
            t = find_state(m->child[i].m, name + n + 1);
    }
    return t;
}

wk_tensor *wk_module_get(wk_module *h, const char *name) {
    wki_module *m = get(h, CALLER);
    return m && name ? find_state(m, name) : NULL;
}

static wk_tensor *own_at(wk_module *h, wki_item_kind kind, int i, const void *caller) {
    wki_module *m = get(h, caller);
    return m && i >= 0 && i < m->nitem[kind] ? m->item[kind][i].t : NULL;
}

wk_tensor *wk_module_own(wk_module *m, int i) { return own_at(m, WKI_PARAM, i, CALLER); }
wk_tensor *wk_module_own_buffer(wk_module *m, int i) { return own_at(m, WKI_BUFFER, i, CALLER); }

wk_module *wk_module_child_at(wk_module *h, int i) {
    wki_module *m = get(h, CALLER);
    return m && i >= 0 && i < m->nchild ? m->child[i].m->handle : NULL;
}

static void set_training(wki_module *m, bool training) {
    m->training = training;
    for (int i = 0; i < m->nchild; i++)
        set_training(m->child[i].m, training);
}

void wk_train_mode(wk_module *h, bool training) {
    wki_module *m = get(h, CALLER);
    if (m)
        set_training(m, training);
}

bool wk_is_training(wk_module *h) {
    wki_module *m = get(h, CALLER);
    return m && m->training;
}

/* ---- in another context -------------------------------------------------------------------------------------------- */

/* The tensor that `t` became in the copy, so that tied ones stay tied. */
static wk_tensor *shared_item(wk_ctx *to, wk_tensor *t, const walk *old, wk_tensor **made) {
    for (int i = 0; i < old->n; i++)
        if (old->t[i] == t) {
            if (!made[i])
                made[i] = wk_share(to, t);
            return made[i];
        }
    return wki_handle(to->poison);
}

static wki_module *copy_tree(wk_ctx *to, const wki_module *m, const walk *old, wk_tensor **made) {
    atomic_fetch_add_explicit(&m->self->refs, 1, memory_order_relaxed);
    wki_module *n = make(to, m->kind, m->forward, m->self);
    if (!n)
        return NULL;
    n->origin = m->origin ? m->origin : m->handle;
    n->training = m->training;
    for (int k = 0; k < WKI_KINDS; k++)
        for (int i = 0; i < m->nitem[k] && !to->failed; i++) {
            wk_tensor *t = shared_item(to, m->item[k][i].t, old, made);
            if (!to->failed)
                add_item(n, (wki_item_kind)k, m->item[k][i].name, t);
        }
    for (int i = 0; i < m->nchild && !to->failed; i++) {
        wki_module *k = copy_tree(to, m->child[i].m, old, made);
        if (k && !add_child(n, m->child[i].name, k))
            wki_box_free(k->handle);
    }
    if (!to->failed)
        return n;
    wki_box_free(n->handle);
    return NULL;
}

wk_module *wk_module_share(wk_ctx *to, wk_module *h) {
    wki_begin(to, CALLER);
    if (to->failed)
        return wki_box_invalid(to);
    wki_module *m = wki_box_peek(h, WKI_BOX_MODULE), *n = NULL;
    walk old = {0};
    wk_tensor **made = NULL;
    if (!m)
        wki_fail(to, WK_HANDLE, "wk_module_share of a module that was freed or never made");
    else if (!collect(&old, m, WKI_PARAM, "") || !collect(&old, m, WKI_BUFFER, "") ||
             !(made = wki_calloc((size_t)old.n, sizeof(void *))))
        out_of_memory(to);
    else
        n = copy_tree(to, m, &old, made);
    wki_free(old.t);
    wki_free(made);
    return n ? n->handle : wki_box_invalid(to);
}
