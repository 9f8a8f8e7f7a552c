// Checks of addresses; see arguments.h.
#include "csrc/collectives/arguments.h"

#include <cstdint>
#include <string>

#include "csrc/common/error.h"

namespace bagua::collectives {
namespace {

uintptr_t begin_of(const Argument& argument) { return reinterpret_cast<uintptr_t>(argument.data); }

bool overlap(const Argument& a, const Argument& b) {
  if (a.numel == 0 || b.numel == 0) return false;
  return begin_of(a) < begin_of(b) + b.bytes() && begin_of(b) < begin_of(a) + a.bytes();
}

std::string counted(size_t count, const char* what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

// "output (4 elements) begins 1 element after the beginning of input (8 elements)"
std::string position(const Argument& argument, const Argument& other) {
  const bool is_after = begin_of(argument) >= begin_of(other);
  const size_t bytes = is_after ? begin_of(argument) - begin_of(other) : begin_of(other) - begin_of(argument);
  const bool is_whole = bytes % argument.item == 0;
  const std::string distance = is_whole ? counted(bytes / argument.item, "element") : counted(bytes, "byte");
  return std::string(argument.name) + " (" + counted(argument.numel, "element") + ") begins " + distance +
         (is_after ? " after" : " before") + " the beginning of " + std::string(other.name) + " (" +
         counted(other.numel, "element") + ")";
}

[[noreturn]] void refuse(std::string_view collective, const std::string& reason) {
  throw Error(ErrorKind::kInvalidArgument, std::string(collective) + ": " + reason, -1, std::string(collective));
}

}  // namespace

void require_memory(std::string_view collective, const Argument& argument) {
  if (argument.data != nullptr || argument.numel == 0) return;
  refuse(collective, std::string(argument.name) + " has " + counted(argument.numel, "element") +
                         " but no memory: its address is 0");
}

void require_own_block_or_apart(std::string_view collective, const Argument& whole, const Argument& block, int rank) {
  require_memory(collective, whole);
  require_memory(collective, block);
  const size_t offset = static_cast<size_t>(rank) * block.numel;
  if (!overlap(whole, block) || begin_of(block) == begin_of(whole) + offset * block.item) return;
  refuse(collective, position(block, whole) + " and overlaps it; in place, " + std::string(block.name) +
                         " is the block of this rank, from element " + std::to_string(offset) + " of " +
                         std::string(whole.name) + " on; otherwise pass a copy (.clone(), numpy.copy)");
}

void require_apart(std::string_view collective, const Argument& input, const Argument& output) {
  require_memory(collective, input);
  require_memory(collective, output);
  if (!overlap(input, output)) return;
  refuse(collective, position(output, input) + " and overlaps it; there is no " + std::string(collective) +
                         " in place: pass a copy of the input (.clone(), numpy.copy)");
}

}  // namespace bagua::collectives
