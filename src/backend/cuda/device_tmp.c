#include "backend/backend.h"
static bool available(wk_runtime *rt, const char **why) { (void)rt; *why = "not built"; return false; }
const wki_device_api wki_device_cuda = {.name = "cuda", .available = available};
