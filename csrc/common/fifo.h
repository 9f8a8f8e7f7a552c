// A queue that keeps its storage: after it has been as long as it gets, pushing allocates nothing
// (std::deque allocates and frees blocks as its contents move through memory). Not synchronised.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace bagua {

template <typename T>
class Fifo {
 public:
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  T& front() { return items_[first_]; }
  T& operator[](size_t i) { return items_[(first_ + i) % items_.size()]; }

  void push(T item) {
    if (size_ == items_.size()) grow();
    items_[(first_ + size_) % items_.size()] = std::move(item);
    ++size_;
  }
  void pop() {
    items_[first_] = T{};
    first_ = (first_ + 1) % items_.size();
    --size_;
  }
  void clear() {
    while (!empty()) pop();
  }

 private:
  void grow() {
    std::vector<T> larger(items_.empty() ? 8 : 2 * items_.size());
    for (size_t i = 0; i < size_; ++i) larger[i] = std::move((*this)[i]);
    items_ = std::move(larger);
    first_ = 0;
  }

  std::vector<T> items_;
  size_t first_ = 0;
  size_t size_ = 0;
};

}  // namespace bagua
