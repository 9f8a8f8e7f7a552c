// The staged all_reduce's memory, for direct_all_reduce.cc, which offers it when buffers are not shared.
#pragma once

#include "csrc/collectives/shared_buffers.h"

namespace bagua::collectives {

// What every rank offers as staging: it depends on the group alone, so that a group's staging block hardly ever moves.
size_t staging_bytes(const GroupView& group);
void staged_all_reduce_in(Context& context, const SharedBuffers& shared, void* data, size_t numel, DType dtype,
                          ReduceOp op);

}  // namespace bagua::collectives
