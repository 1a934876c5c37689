/* What tools may ask about the op table (wk_op_count, wk_op_get). May call: core. */
#include "ops_gen.h"

int wk_op_count(void) { return wki_op_count; }

bool wk_op_get(int i, wk_op_info *out) {
    static const char *const classes[] = {
#define C(name) #name,
#include "core/class.def"
#undef C
    };
    if (i < 0 || i >= wki_op_count || !out)
        return false;
    const wki_op *op = &wki_ops[i];
    *out = (wk_op_info){
        .name = op->name,
        .klass = classes[op->klass],
        .doc = op->doc,
        .since = op->since,
        .nin = op->nin,
        .nout = op->nout,
        .differentiable = op->diff || op->klass == WKI_COMPOSITE,
        .in_place = op->flags & WKI_OP_INPLACE,
        .nondeterministic = op->flags & WKI_OP_NONDET,
    };
    return true;
}
