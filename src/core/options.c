/* Structs that callers fill: how those of an older or a newer header are taken. A struct only ever grows at its end, and never
 * into what was padding, so its size says what its fields are. May call: core.
 */
#include <string.h>

#include "core/core.h"

enum { LARGEST = 4096 }; /* bytes; beyond that struct_size was never set */

bool wki_take_struct(void *to, size_t size, const void *from) {
    size_t given;
    if (!from)
        return true;
    memcpy(&given, from, sizeof given);
    if (given < sizeof given || given > LARGEST)
        return false;
    for (size_t i = size; i < given;
         i++) /* of a newer header: fields unknown here must be at their default */
        if (((const unsigned char *)from)[i])
            return false;
    memcpy(to, from, given < size ? given : size);
    memcpy(to, &size, sizeof size);
    return true;
}

bool wki_wrong_struct(wk_ctx *c, const char *type) {
    return wki_fail(
        c, WK_INVALID,
        "%s: struct_size was not set by its init function, or a field is used that this version of the "
        "library does not know",
        type);
}
