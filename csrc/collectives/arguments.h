// Checks of what callers hand to a collective: memory that is there, and outputs that share nothing with inputs but
// where the collective is in place. Checked before an operation is submitted, so that a mistake stays its caller's own.
//
// In place means the natural block: the output of reduce_scatter and of scatter's root may be this rank's block of the
// input, the input of all_gather and of gather's root this rank's block of the output. Nothing else may overlap.
#pragma once

#include <cstddef>
#include <string_view>

namespace bagua::collectives {

struct Argument {
  std::string_view name;  // "output"
  const void* data;
  size_t numel;
  size_t item;  // bytes of an element

  size_t bytes() const { return numel * item; }
};

// All throw InvalidArgument. Empty arguments may be null.
void require_memory(std::string_view collective, const Argument& argument);
// `block` is one rank's share of `whole`; memory is required of both.
void require_own_block_or_apart(std::string_view collective, const Argument& whole, const Argument& block, int rank);
void require_apart(std::string_view collective, const Argument& input, const Argument& output);

}  // namespace bagua::collectives
