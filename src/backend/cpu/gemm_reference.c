/* The slow twin of the packed GEMM: the definition in gemm.h, written down. Calls nothing. */
#include "backend/cpu/gemm.h"

static float element(const wki_gemm *g, int64_t t, int64_t i, int64_t j) {
    double v = 0;
    for (int64_t p = 0; p < g->k; p++)
        v += (double)g->a[t * g->a_bs + i * g->a_rs + p * g->a_cs] *
             g->b[t * g->b_bs + p * g->b_rs + j * g->b_cs];
    if (g->k > 0)
        v *= g->alpha;
    if (g->beta != 0)
        v += (double)g->beta * g->c[t * g->c_bs + i * g->c_rs + j];
    if (g->bias_n)
        v += g->bias_n[j];
    if (g->bias_m)
        v += g->bias_m[i];
    return (float)(g->act == WKI_ACT_RELU && v < 0 ? 0 : v);
}

void wki_gemm_reference(const wki_gemm *g) {
    for (int64_t t = 0; t < g->batch; t++)
        for (int64_t i = 0; i < g->m; i++)
            for (int64_t j = 0; j < g->n; j++)
                g->c[t * g->c_bs + i * g->c_rs + j] = element(g, t, i, j);
}
