// The thresholds by their names; see thresholds.h.
#include "csrc/collectives/thresholds.h"

#include <utility>

#include "csrc/common/error.h"

namespace bagua::collectives {
namespace {

constexpr std::pair<const char*, size_t Thresholds::*> kMembers[] = {
    {"recursive_doubling_bytes", &Thresholds::recursive_doubling_bytes},
    {"pairwise_bytes", &Thresholds::pairwise_bytes},
    {"broadcast_tree_bytes", &Thresholds::broadcast_tree_bytes},
    {"reduce_tree_bytes", &Thresholds::reduce_tree_bytes},
    {"direct_bytes", &Thresholds::direct_bytes},
    {"on_host_bytes", &Thresholds::on_host_bytes},
};

}  // namespace

std::map<std::string, size_t> Thresholds::by_name() const {
  std::map<std::string, size_t> values;
  for (const auto& [name, member] : kMembers) values[name] = this->*member;
  return values;
}

void Thresholds::set(std::string_view name, size_t bytes) {
  std::string known;
  for (const auto& [candidate, member] : kMembers) {
    if (name == candidate) {
      this->*member = bytes;
      return;
    }
    known += (known.empty() ? "" : ", ") + std::string(candidate);
  }
  throw Error(ErrorKind::kInvalidArgument, "'" + std::string(name) + "' is no threshold; the thresholds are " + known);
}

}  // namespace bagua::collectives
