// Where and when a kernel runs or a transfer becomes visible. On CPU a stream is null and means "now, on
// the calling thread"; on CUDA it is the cudaStream_t that orders the work.
#pragma once

namespace bagua {

struct Stream {
  void* handle = nullptr;
  bool is_cpu() const { return handle == nullptr; }
};

}  // namespace bagua
