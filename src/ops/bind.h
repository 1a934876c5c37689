/* From an op and its operands to one execution of its loop program. The only place that knows how operands of EW and ROW
 * ops map onto the program's domain; eager and the compiler both use it. */
#ifndef WKI_BIND_H
#define WKI_BIND_H

#include "backend/backend.h"

/* Which input the j-th store of an in-place op's program goes to. */
int wki_store_role(const wki_op *op, int j);

/* Strides of an operand over the logical dimensions of a domain; false when its shape does not fit. `row_class`: the
   reduced dimensions of the mask `red` may be absent from the operand (no keepdim). */
bool wki_map_operand(int ndim, const int64_t *size, const int64_t *stride, int nd, const int64_t *dom,
                     uint32_t red, bool row_class, int64_t *out);

/* Dimensions of a run from a logical shape: kept ones first, then reduced ones. */
void wki_order_domain(wki_loop_run *r, int nd, const int64_t *dom, uint32_t red);

/* Sets up the run of tensor `which` (0 for ordinary ops): domain, order, operands, `col`. Does not touch arg, rng_seq, seed
   and fault. Views' `data` become the operands' addresses as they are. */
bool wki_bind(const wki_op *op, const wki_loop *loop, const wki_view *in, int nin, const wki_view *out,
              int nout, const int64_t *ia, int which, wki_loop_run *r);

#endif
