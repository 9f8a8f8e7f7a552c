// The groups that a process has closed, for peers that ask about them late.
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
  explicit ClosedGroups(size_t capacity) : capacity_(capacity) { hashes_.reserve(capacity); }

  // `abort`: the report of the group's failure, if it has failed. Where there is no memory for that, it is kept
  // without.
  void add(const std::string& key, std::optional<std::vector<uint8_t>> abort) {
    const uint64_t hash = hash_of(key);
    if (contains(key)) return;
    if (hashes_.size() == capacity_) {
      aborts_.erase(hashes_.front());
      hashes_.erase(hashes_.begin());
    }
    hashes_.push_back(hash);
    if (abort) aborts_.emplace(hash, *std::move(abort));
  }

  // Forgets one that is opened again.
  void erase(const std::string& key) {
    const uint64_t hash = hash_of(key);
    std::erase(hashes_, hash);
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
  static uint64_t hash_of(const std::string& key) { return std::hash<std::string>{}(key); }

  const size_t capacity_;
  std::vector<uint64_t> hashes_;  // the oldest first
  std::map<uint64_t, std::vector<uint8_t>> aborts_;
};

}  // namespace bagua
