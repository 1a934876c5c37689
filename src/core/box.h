/* Handles of modules, optimizers, loaders and compiled functions: like a tensor's, the address of a slot with its
 * generation in the top bits, so that the use of a freed one is an error in its context. Slots live as long as the
 * context; bodies come and go.
 * May call: base, core.
 */
#ifndef WKI_BOX_H
#define WKI_BOX_H

#include "core/core.h"

typedef enum wki_box_kind { WKI_BOX_MODULE, WKI_BOX_OPTIM, WKI_BOX_LOADER, WKI_BOX_COMPILED } wki_box_kind;

/* A handle on `body`; `destroy(body)` runs when the handle is freed or the context ends. After a failure (sticky) it
   returns the handle that is never valid, and has called destroy. */
void *wki_box_new(wk_ctx *c, wki_box_kind kind, void *body, void (*destroy)(void *body));
/* The handle that a failed creation returns; NULL only when memory ran out even for that. */
void *wki_box_invalid(wk_ctx *c);
/* The body, or NULL with WK_HANDLE in the handle's context (NULL handle: no error, there is no context to hold it). */
void *wki_box_get(const void *handle, wki_box_kind kind, const void *caller);
/* As wki_box_get, but a handle that is not valid is no error. */
void *wki_box_peek(const void *handle, wki_box_kind kind);
/* The context the handle was made in; NULL for NULL. */
wk_ctx *wki_box_ctx(const void *handle);
/* Ends a valid handle; its body is destroyed once no user of the slot can reach it. */
void wki_box_free(void *handle);
/* Where the context keeps its innermost running module (NULL: none); NULL when memory ran out. */
void **wki_box_running(wk_ctx *c);

#endif
