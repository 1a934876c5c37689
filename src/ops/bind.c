/* Binding loop programs to operands (bind.h). */
#include "ops/bind.h"

#include "ops/infer.h"

int wki_store_role(const wki_op *op, int j) {
    for (int i = 0; i < 32; i++)
        if (op->writes >> i & 1 && j-- == 0)
            return i;
    return -1;
}

bool wki_map_operand(int ndim, const int64_t *size, const int64_t *stride, int nd, const int64_t *dom,
                     uint32_t red, bool row_class, int64_t *out) {
    if (row_class && ndim != nd) {
        int nred = __builtin_popcount(red);
        if (ndim != nd - nred)
            return false;
        for (int i = 0, j = 0; i < nd; i++)
            out[i] = red >> i & 1 ? 0 : stride[j++];
        return true;
    }
    if (ndim > nd)
        return false;
    for (int i = 0; i < nd; i++) {
        int j = i - (nd - ndim);
        if (j < 0 || (size[j] == 1 && dom[i] != 1))
            out[i] = 0;
        else if (size[j] == dom[i])
            out[i] = stride[j];
        else
            return false;
    }
    return true;
}

void wki_order_domain(wki_loop_run *r, int nd, const int64_t *dom, uint32_t red) {
    int n = 0;
    r->ndim = nd;
    r->nred = __builtin_popcount(red);
    r->col = false;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < nd; i++)
            if ((int)(red >> i & 1) == pass) {
                r->size[n] = dom[i];
                r->logical[n++] = (int8_t)i;
            }
    for (int i = nd - 1; i >= 0; i--)
        if (dom[i] != 1) {
            r->col = red && !(red >> i & 1);
            break;
        }
}

static bool bind_operand(wki_loop_run *r, int at, const wki_view *v, const int64_t *dom, uint32_t red,
                         bool row_class) {
    int64_t s[WKI_LOOP_MAX_DIMS];
    if (!wki_map_operand(v->ndim, v->size, v->stride, r->ndim, dom, red, row_class, s))
        return false;
    wki_operand *o = &r->opnd[at];
    o->data = v->data;
    o->dtype = v->dtype;
    for (int i = 0; i < r->ndim; i++)
        o->stride[i] = s[r->logical[i]];
    return true;
}

bool wki_bind(const wki_op *op, const wki_loop *loop, const wki_view *in, int nin, const wki_view *out,
              int nout, const int64_t *ia, int which, wki_loop_run *r) {
    int n = wki_role_size(op, nin);
    bool row_class = op->klass == WKI_ROW;
    const wki_view *dom = row_class || !nout ? &in[which] : &out[0];
    uint32_t red = wki_op_reduced(op, dom->ndim, ia);
    r->prog = loop;
    wki_order_domain(r, dom->ndim, dom->size, red);
    for (int i = 0; i < loop->nload; i++)
        if (!bind_operand(r, i, &in[i * n + which], dom->size, red, row_class))
            return false;
    for (int j = 0; j < loop->nstore; j++) {
        const wki_view *v = nout ? &out[j] : &in[wki_store_role(op, j) * n + which];
        if (!bind_operand(r, loop->nload + j, v, dom->size, red, row_class))
            return false;
    }
    return true;
}
