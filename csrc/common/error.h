// The exception tree of the core. One kind per class of bagua/errors.py; the binding layer translates
// them one to one, and tests/structure compares the two lists.
//
// A message carries the value, what was expected and what to do. `rank` is the rank that is at fault
// (-1 when none is), `operation` the collective or verb that was running.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace bagua {

enum class ErrorKind {
  kInvalidArgument,   // the caller's mistake; nothing was sent
  kTransport,         // a connection or a shared segment failed, or descriptors or threads have ended
  kDeadlineExceeded,  // a peer did not do its part in time
  kAborted,           // the group was destroyed or poisoned locally
  kRemote,            // another rank reported the first cause
  kInternal,          // a bug in bagua
  kDevice,            // a device is out of memory or reports a failure
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, int rank = -1, std::string operation = "")
      : std::runtime_error(message), kind_(kind), rank_(rank), operation_(std::move(operation)) {}

  ErrorKind kind() const { return kind_; }
  int rank() const { return rank_; }
  const std::string& operation() const { return operation_; }
  // All that are known to be at fault, in order.
  std::vector<int> ranks() const {
    if (!ranks_.empty() || rank_ < 0) return ranks_;
    return {rank_};
  }
  Error of_ranks(std::vector<int> ranks) const {
    Error error(*this);
    error.ranks_ = std::move(ranks);
    return error;
  }

 private:
  ErrorKind kind_;
  int rank_;
  std::string operation_;
  std::vector<int> ranks_;  // empty: rank_, if that is one
};

// Returns the same error, naming `rank` where it names none.
inline Error of_rank(const Error& error, int rank) {
  return error.rank() >= 0 ? error : Error(error.kind(), error.what(), rank, error.operation());
}

}  // namespace bagua
