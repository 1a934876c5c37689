/* What the peer takes for the same work. These figures were measured on one machine (PyTorch 2.11.0, CPU, one H200 host of
 * November 2026; median after warm-up) and stand beside ours as orders of magnitude: to compare exactly, run the peer on the
 * same machine.
 */
#include <stddef.h>
#include <string.h>

#include "bench.h"

static const bench_peer peers[] = {
    {"overhead", "add_4x4", "PyTorch 2.11.0 eager, CPU", "ns", 2160},
    {"overhead", "add_4x4_grad", "PyTorch 2.11.0 eager, CPU", "ns", 3050},
    {"overhead", "mlp_step", "PyTorch 2.11.0 eager, CPU, fused AdamW", "us", 578},
    {"overhead", "mlp_step_compiled", "PyTorch 2.11.0 eager, CPU, fused AdamW", "us", 578},
};

const bench_peer *bench_peer_of(const char *group, const char *name) {
    for (size_t i = 0; i < sizeof peers / sizeof *peers; i++)
        if (!strcmp(peers[i].bench, group) && !strcmp(peers[i].name, name))
            return &peers[i];
    return NULL;
}
