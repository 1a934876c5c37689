/* What of a loop program is needed, and in which pass over a row each value is computed
 * (emit_cuda_private.h). Calls base and core. */
#include "compile/emit_cuda_private.h"
#include "core/core.h"

#include <string.h>

enum {
    KEEP_REGISTERS = 64, /* for values kept between passes, per thread */
    KEEP_COST = 3000,    /* instructions, roughly, of an unrolled pass */
};

static bool reduces(const emitter *e, const wki_inst *in) {
    return in->code == WKI_L_REDUCE && of_row(e, in);
}

int wki_cu_uses(const wki_inst *in, int16_t out[3]) {
    int n = 0;
    if (in->code == WKI_L_STORE)
        out[n++] = in->b;
    else if (in->code == WKI_L_REDUCE || in->code == WKI_L_CHECK)
        out[n++] = in->a;
    else if (in->code == WKI_L_PRIM) {
        int16_t all[3] = {in->a, in->b, in->c};
        for (int k = 0; k < 3; k++)
            if (all[k] >= 0)
                out[n++] = all[k];
    }
    return n;
}

static const char *const signatures[WKI_P_COUNT] = {
#define P(E, n, arity, signature) signature,
#include "ops/prims.def"
};

const char *wki_cu_dtype_suffix(uint8_t dtype) {
    switch ((wk_dtype)dtype) {
    case WK_F32:
        return "f32";
    case WK_F64:
        return "f64";
    case WK_I32:
        return "i32";
    case WK_I64:
        return "i64";
    case WK_U8:
        return "u8";
    case WK_BOOL:
        return "b8";
    default:
        return NULL;
    }
}

static bool loads_float(uint8_t dtype) { return dtype == WK_F32 || dtype == WK_F64; }

/* GPU instructions, roughly. */
static int cost(const wki_inst *in) {
    if (in->code == WKI_L_RNG)
        return in->sub == WKI_P_NORMAL ? 160 : 90;
    if (in->code != WKI_L_PRIM)
        return uniform(in) ? 0 : 3;
    switch ((wki_prim)in->sub) {
    case WKI_P_EXP:
    case WKI_P_LOG:
        return 30;
    case WKI_P_TANH:
    case WKI_P_ERF:
    case WKI_P_SIN:
    case WKI_P_COS:
        return 60;
    case WKI_P_DIV:
    case WKI_P_SQRT:
        return 12;
    default:
        return 3;
    }
}

static const char *check_inst(const emitter *e, int i) {
    const wki_inst *in = inst(e, i);
    int16_t use[3];
    for (int k = 0, n = wki_cu_uses(in, use); k < n; k++) {
        if (use[k] < 0 || use[k] >= i || acts(inst(e, use[k])))
            return "a loop program uses a value before it is made";
        if (of_row(e, in) && !reduces(e, in) && of_elem(e, inst(e, use[k])))
            return "a loop program uses an element's value for a row";
    }
    if (in->code == WKI_L_LOAD || in->code == WKI_L_STORE) {
        if (in->a < 0 || in->a >= e->s.nop)
            return "a loop program has too few operands";
        if (!wki_cu_dtype_suffix(e->r->opnd[in->a].dtype))
            return "a dtype that CUDA loops do not know";
        if (in->code == WKI_L_LOAD && (in->type == WKI_TF) != loads_float(e->r->opnd[in->a].dtype))
            return "a loop program does not fit its operands' dtypes";
    }
    if (in->code == WKI_L_PRIM)
        for (int k = 0; k < 3 && signatures[in->sub][2 + k]; k++) {
            int v = k == 0 ? in->a : k == 1 ? in->b : in->c;
            if (v < 0 || (inst(e, v)->type == WKI_TF) != (signatures[in->sub][2 + k] == 'F'))
                return "a loop program gives a primitive the wrong type";
        }
    return NULL;
}

bool wki_cu_analyse(emitter *e) {
    int count[WKI_LOOP_MAX_INST + 2] = {0};
    if (e->p->ninst > WKI_LOOP_MAX_INST || e->s.nop > WKI_LOOP_MAX_OPERANDS) {
        e->why = "a loop program is too large";
        return false;
    }
    for (int i = e->p->ninst - 1; i >= 0; i--) {
        const wki_inst *in = inst(e, i);
        int16_t use[3];
        e->live[i] |= acts(in);
        for (int k = 0, n = wki_cu_uses(in, use); e->live[i] && k < n; k++)
            if (use[k] >= 0 && use[k] < i)
                e->live[use[k]] = 1;
    }
    for (int i = 0; i < e->p->ninst; i++) {
        const wki_inst *in = inst(e, i);
        if (!e->live[i])
            continue;
        if ((e->why = check_inst(e, i)))
            return false;
        int16_t use[3];
        for (int k = 0, n = wki_cu_uses(in, use); k < n; k++)
            if (e->pass[use[k]] > e->pass[i])
                e->pass[i] = e->pass[use[k]];
        if (reduces(e, in)) {
            int p = e->pass[i] + 1;
            while (count[p] == WKI_CU_PASS_REDUCES)
                p++;
            count[p]++;
            e->pass[i] = (uint8_t)p;
            if (p > e->npass)
                e->npass = p;
        }
    }
    return true;
}

bool wki_cu_target(const emitter *e, int i, int p) {
    const wki_inst *in = inst(e, i);
    if (!e->live[i])
        return false;
    if (reduces(e, in))
        return e->pass[i] == p;
    if (!acts(in) || !of_elem(e, in))
        return false;
    return in->code == WKI_L_STORE ? p == e->npass + 1 : e->pass[i] + 1 == p;
}

bool wki_cu_needed(const emitter *e, int p, uint8_t need[WKI_LOOP_MAX_INST]) {
    bool any = false;
    memset(need, 0, WKI_LOOP_MAX_INST);
    for (int i = e->p->ninst - 1; i >= 0; i--) {
        bool is_target = wki_cu_target(e, i, p);
        int16_t use[3];
        any |= is_target;
        if (e->keep && need[i] && e->done[i] < p)
            need[i] = 0;
        if (!is_target && !need[i])
            continue;
        for (int k = 0, n = wki_cu_uses(inst(e, i), use); k < n; k++)
            if (of_elem(e, inst(e, use[k])))
                need[use[k]] = 1;
    }
    return any;
}

int wki_cu_pass_cost(const emitter *e, const uint8_t *need) {
    int sum = 4;
    for (int i = 0; i < e->p->ninst; i++)
        if (need[i])
            sum += cost(inst(e, i));
    return sum;
}

void wki_cu_plan_keeping(emitter *e) {
    uint8_t need[WKI_LOOP_MAX_INST];
    int registers = 0, most = 0;
    if (e->s.kind != WKI_CU_WARP)
        return;
    memset(e->done, 255, sizeof e->done);
    e->keep = true;
    for (int p = 1; p <= e->npass + 1; p++) {
        wki_cu_needed(e, p, need);
        for (int i = 0; i < e->p->ninst; i++) {
            if (need[i])
                e->done[i] = (uint8_t)p;
        }
        int c = wki_cu_pass_cost(e, need);
        most = c > most ? c : most;
    }
    for (int p = 1; p <= e->npass + 1; p++)
        for (int i = 0; i < e->p->ninst; i++) {
            int16_t use[3];
            if (!wki_cu_target(e, i, p) && e->done[i] != p)
                continue;
            for (int k = 0, n = wki_cu_uses(inst(e, i), use); k < n; k++)
                if (of_elem(e, inst(e, use[k])) && e->done[use[k]] < p)
                    e->kept[use[k]] = 1;
        }
    for (int i = 0; i < e->p->ninst; i++)
        registers += e->kept[i] * e->s.chunks;
    if (registers > KEEP_REGISTERS || most * e->s.chunks > KEEP_COST) {
        e->keep = false;
        memset(e->kept, 0, sizeof e->kept);
    }
}
