// Which groups a process has closed, for peers that ask about them late.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace bagua {

// The last `capacity` of them, by the hashes of their keys, in memory that is there from the beginning: what stayed on
// the heap for each closed group, however small, would lie in the hole that a tensor has left, which then is too small
// for the next tensor of its size, and the process would grow by a tensor per group.
class ClosedGroups {
 public:
  explicit ClosedGroups(size_t capacity) : hashes_(capacity) {}

  // `abort`: the report of the group's failure, if it has failed.
  void add(const std::string& key, std::optional<std::vector<uint8_t>> abort) {
    const uint64_t hash = hash_of(key);
    if (contains(key)) return;
    aborts_.erase(hashes_[next_]);
    hashes_[next_] = hash;
    next_ = (next_ + 1) % hashes_.size();
    if (abort) aborts_.emplace(hash, *std::move(abort));
  }

  // Of one that is opened again.
  void erase(const std::string& key) {
    const uint64_t hash = hash_of(key);
    std::replace(hashes_.begin(), hashes_.end(), hash, kNone);
    aborts_.erase(hash);
  }

  bool contains(const std::string& key) const {
    return std::find(hashes_.begin(), hashes_.end(), hash_of(key)) != hashes_.end();
  }

  std::optional<std::vector<uint8_t>> abort_of(const std::string& key) const {
    const auto found = aborts_.find(hash_of(key));
    return found == aborts_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  static constexpr uint64_t kNone = 0;

  static uint64_t hash_of(const std::string& key) {
    return std::max<uint64_t>(std::hash<std::string>{}(key), kNone + 1);
  }

  std::vector<uint64_t> hashes_;  // a ring; kNone where there is none
  size_t next_ = 0;
  std::map<uint64_t, std::vector<uint8_t>> aborts_;
};

}  // namespace bagua
