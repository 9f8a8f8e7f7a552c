// How far each kernel is from memcpy on one core: `case | min | p50 | max | ratio`.
//
// Rates are GB/s of f32 (numel * 4 bytes / time), so codecs of any compression compare; `ratio` is the
// median against the median of memcpy of as many f32, measured in the same rounds (the cases take turns,
// so that a noisy minute hits all of them). Time is the thread's CPU time, which leaves out what other
// processes took. Buffers are warm. Usage: bench_kernels [rounds] [case prefix]
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "csrc/codecs/codec.h"
#include "csrc/kernels/cast.h"
#include "csrc/kernels/reduce.h"

namespace {

using bagua::DType;
using bagua::ReduceOp;
using bagua::Stream;
namespace kernels = bagua::kernels;

struct Case {
  std::string name;
  std::function<void()> run;
  std::vector<double> gigabytes_per_second = {};
};

struct Buffers {
  explicit Buffers(size_t numel) : a(numel), b(numel), c(numel), half(numel), bytes(numel * 4) {
    for (size_t i = 0; i < numel; ++i) {
      a[i] = static_cast<float>(static_cast<int>(i * 2654435761u >> 8 & 0xffff) - 32768) / 32768.0f;
    }
    b = a;
    c = a;
    kernels::cast(DType::kF32, a.data(), DType::kF16, half.data(), numel, Stream{});
  }
  std::vector<float> a, b, c;
  std::vector<uint16_t> half;
  std::vector<uint8_t> bytes;
};

double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void add_codec_cases(Buffers& buffers, size_t numel, std::vector<Case>& cases) {
  std::vector<std::string> specs = bagua::registered_codecs();
  specs.insert(specs.end(), {"qsgd:bits=4", "qsgd:bits=2", "topk:k=8", "topk:k=256", "topk:chunk=4096",
                             "topk:chunk=4096,k=64,bits=2", "topk:chunk=4096,dct=1"});
  for (const std::string& name : specs) {
    const bagua::Codec& codec = bagua::get_codec(name);
    cases.push_back({name + " encode", [&, numel] {
                       codec.encode(buffers.a.data(), DType::kF32, numel, buffers.bytes.data(), {}, Stream{});
                     }});
    cases.push_back({name + " decode", [&, numel] {
                       codec.decode(buffers.bytes.data(), DType::kF32, numel, buffers.b.data(), Stream{});
                     }});
    cases.push_back({name + " decode_add", [&, numel] {
                       codec.decode_add(buffers.bytes.data(), DType::kF32, numel, buffers.b.data(), Stream{});
                     }});
  }
  const bagua::Codec& minmax = bagua::get_codec("minmax_uint8");
  cases.push_back({"minmax_uint8 encode of f16", [&, numel] {
                     minmax.encode(buffers.half.data(), DType::kF16, numel, buffers.bytes.data(), {}, Stream{});
                   }});
}

void add_reduce_cases(Buffers& buffers, size_t numel, std::vector<Case>& cases) {
  float* a = buffers.a.data();
  float* b = buffers.b.data();
  float* c = buffers.c.data();
  const auto many = [=](ReduceOp op, std::vector<const void*> sources, std::vector<void*> destinations) {
    return [=] {
      kernels::reduce_many(op, DType::kF32, sources.data(), static_cast<int>(sources.size()), destinations.data(),
                           static_cast<int>(destinations.size()), numel, Stream{});
    };
  };
  cases.push_back(
      {"reduce_into sum f32", [=] { kernels::reduce_into(ReduceOp::kSum, DType::kF32, b, a, numel, Stream{}); }});
  cases.push_back(
      {"reduce_into max f32", [=] { kernels::reduce_into(ReduceOp::kMax, DType::kF32, b, a, numel, Stream{}); }});
  cases.push_back({"reduce_into sum f16", [=, &buffers] {
                     kernels::reduce_into(ReduceOp::kSum, DType::kF16, buffers.bytes.data(), buffers.half.data(), numel,
                                          Stream{});
                   }});
  cases.push_back({"scale f32 by 1/3", [=] { kernels::scale(DType::kF32, b, 1.0 / 3.0, numel, Stream{}); }});
  cases.push_back({"reduce_many avg 2 -> 2 in place", many(ReduceOp::kAvg, {a, b}, {a, b})});
  cases.push_back({"reduce_many avg 2 -> 1 other", many(ReduceOp::kAvg, {a, b}, {c})});
  cases.push_back({"reduce_many avg 3 -> 3 in place", many(ReduceOp::kAvg, {a, b, c}, {a, b, c})});
  cases.push_back({"reduce_many max 2 -> 2 in place", many(ReduceOp::kMax, {a, b}, {a, b})});
}

void run(size_t numel, int num_rounds, const std::string& prefix) {
  Buffers buffers(numel);
  std::vector<Case> cases;
  cases.push_back({"memcpy", [&] { std::memcpy(buffers.c.data(), buffers.a.data(), numel * 4); }});
  add_codec_cases(buffers, numel, cases);
  add_reduce_cases(buffers, numel, cases);
  std::erase_if(cases, [&](const Case& one) { return one.name != "memcpy" && !one.name.starts_with(prefix); });
  const size_t repeats = std::max<size_t>(1, (size_t{1} << 22) / numel);  // long enough for the clock
  for (int round = 0; round <= num_rounds; ++round) {
    for (Case& one : cases) {
      const double begin = cpu_seconds();
      for (size_t i = 0; i < repeats; ++i) one.run();
      const double seconds = cpu_seconds() - begin;
      const double gigabytes = static_cast<double>(numel * 4 * repeats) / 1e9;
      if (round > 0) one.gigabytes_per_second.push_back(gigabytes / seconds);  // the first only warms up
    }
  }
  std::printf("\n%zu KB of f32\n%-34s | %6s | %6s | %6s | ratio to memcpy\n", numel * 4 / 1024, "case (GB/s of f32)",
              "min", "p50", "max");
  double memcpy_median = 0;
  for (Case& one : cases) {
    std::vector<double>& rates = one.gigabytes_per_second;
    std::sort(rates.begin(), rates.end());
    const double median = rates[rates.size() / 2];
    if (one.name == "memcpy") memcpy_median = median;
    std::printf("%-34s | %6.2f | %6.2f | %6.2f | %.2f\n", one.name.c_str(), rates.front(), median, rates.back(),
                median / memcpy_median);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int num_rounds = argc > 1 ? std::max(1, std::atoi(argv[1])) : 15;
  const std::string prefix = argc > 2 ? argv[2] : "";
  run(size_t{64} << 18, num_rounds, prefix);
  run(size_t{1} << 18, num_rounds, prefix);
}
