/* When a loop run is one op over contiguous f32: its compiled code, on as many threads as pay. */
#include "backend/cpu/straight.h"

typedef void (*tier_fn)(int which, float *const *data, const uint8_t *fixed, const float *arg, int64_t begin,
                        int64_t end);

static tier_fn tier_of(wki_isa isa) {
#if defined(__x86_64__)
    if (isa >= WKI_ISA_AVX512)
        return wki_straight_avx512;
    if (isa >= WKI_ISA_AVX2)
        return wki_straight_avx2;
#endif
    (void)isa;
    return wki_straight_baseline;
}

typedef struct job {
    tier_fn fn;
    int which;
    const uint8_t *fixed;
    float *data[WKI_LOOP_MAX_OPERANDS];
    const float *arg;
} job;

static void part(void *p, int64_t begin, int64_t end, int worker) {
    (void)worker;
    const job *j = p;
    j->fn(j->which, j->data, j->fixed, j->arg, begin, end);
}

/* One element for the whole domain, every element once in row-major order, or neither. */
static bool simple(const wki_loop_run *r, const wki_operand *o, bool store, uint8_t *fixed) {
    int64_t n = 1;
    bool all_zero = true, dense = true;
    for (int d = r->ndim - 1; d >= 0; d--) {
        if (r->size[d] == 1)
            continue;
        all_zero &= o->stride[d] == 0;
        dense &= o->stride[d] == n;
        n *= r->size[d];
    }
    *fixed = !dense;
    return o->dtype == WK_F32 && (dense || (all_zero && !store));
}

bool wki_straight_fits(const wki_loop_run *r, wki_straight *s) {
    const wki_loop *l = r->prog;
    if (!l->straight)
        return false;
    s->n = 1;
    for (int d = 0; d < r->ndim; d++) {
        s->n *= r->size[d];
        if (r->logical[d] != d)
            return false;
    }
    for (int o = 0; o < l->nload + l->nstore; o++)
        if (!simple(r, &r->opnd[o], o >= l->nload, &s->fixed[o]))
            return false;
    return true;
}

void wki_straight_run(const wki_loop_run *r, const wki_straight *s, wki_isa isa, wki_pool *pool) {
    enum { GRAIN = 16384 }; /* elements below which a second thread costs more than it saves */
    job j;
    j.fn = tier_of(isa);
    j.which = r->prog->straight;
    j.fixed = s->fixed;
    j.arg = r->arg;
    for (int o = 0; o < r->prog->nload + r->prog->nstore; o++)
        j.data[o] = r->opnd[o].data;
    if (s->n <= GRAIN)
        part(&j, 0, s->n, 0);
    else
        wki_pool_for(pool, s->n, part, &j, GRAIN);
}
