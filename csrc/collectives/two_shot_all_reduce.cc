// Two-shot all_reduce: f16 and bf16 at full precision, large messages between hosts.
//
// All-to-all of stripes, one reduction in f32 in rank order, all-gather of the results: as many bytes as the
// ring, 2(n-1)/n * B sent per rank, in 2 steps instead of 2(n-1), with one rounding instead of n-1. It needs
// a connection to every rank. Bit-equal because each stripe is reduced once and copied. Workspace: two
// chunks per rank. Source: the two-shot all-reduce of arXiv 2107.01499 without its codec.
#include "csrc/collectives/stripes.h"

namespace bagua::collectives {

void two_shot_all_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op) {
  StripesOptions options;
  options.input = data;
  options.numel = numel;
  options.dtype = dtype;
  options.op = op;
  options.results = data;
  StripeReduction(context, options).run();
}

}  // namespace bagua::collectives
