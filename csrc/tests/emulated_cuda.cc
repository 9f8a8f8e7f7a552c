// Fibres for the threads of a block; see emulated_cuda/cuda_runtime.h.
//
// Every thread of a block has a stack of its own, with a page that faults below it, and all of them run on the thread
// that launches. The scheduler resumes those that can go on; a thread that waits switches back. When none can go on
// any more, whoever still waits does so in vain.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "csrc/tests/emulated_cuda/cuda_runtime.h"

// Under another name, because a build with CUDA has its own.
#define cuda cuda_on_fibres
#include "csrc/device/cuda/check.cc"
#include "csrc/device/cuda/device_scope.h"
#undef cuda

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

dim3 threadIdx, blockIdx;

namespace cuda_emulation {

Counters counters;

namespace {

constexpr unsigned kWarp = 32;
constexpr size_t kStackBytes = size_t{256} << 10;
constexpr size_t kSharedBytes = size_t{48} << 10;  // what a kernel has without asking for more
constexpr int kGarbage = 0xa5;

void fail(const std::string& message) { throw std::logic_error("emulated CUDA: " + message); }

// Memory that ends at a page that faults, and begins behind one.
uint8_t* map_guarded(size_t num_bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), size = (num_bytes + page - 1) / page * page;
  void* memory = mmap(nullptr, size + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail("no memory for " + std::to_string(num_bytes) + " bytes");
  auto* begin = static_cast<uint8_t*>(memory) + page;
  if (mprotect(begin, size, PROT_READ | PROT_WRITE) != 0) fail("mprotect failed");
  return begin + size - num_bytes;
}

// ---- switching ------------------------------------------------------------------------------------------
#if defined(__x86_64__)

// Saves the registers that a call keeps on the stack that runs, whose pointer goes to *save, and takes those of
// another.
extern "C" void bagua_switch_stack(void** save, void* load);
asm(R"(
.text
.type bagua_switch_stack, @function
bagua_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size bagua_switch_stack, . - bagua_switch_stack
)");

struct Context {
  void* stack_pointer = nullptr;

  void prepare(uint8_t* stack, void (*entry)()) {
    auto** top = reinterpret_cast<void**>(stack + kStackBytes);
    *--top = nullptr;  // where entry would return to, which it does not; leaves the stack as a call does
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    stack_pointer = top;
  }
  static void swap(Context& from, Context& to) { bagua_switch_stack(&from.stack_pointer, to.stack_pointer); }
};

#else

struct Context {
  ucontext_t context;

  void prepare(uint8_t* stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
  static void swap(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
};

#endif

enum class State { kReady, kWaitsForBlock, kWaitsForWarp, kEnded };

struct Fibre {
  uint8_t* stack = nullptr;
  Context context;
  State state = State::kReady;
  std::source_location site;
  unsigned mask = 0;
  uint64_t value = 0;
  void* fake_stack = nullptr;  // the address sanitizer's
};

class Scheduler {
 public:
  void run_block(unsigned num_threads, const std::function<void()>& thread);
  const uint64_t* meet(State state, unsigned mask, uint64_t value, const std::source_location& site);
  void report(std::string what);
  bool any_of_block() const { return any_of_block_; }
  void* shared_memory(size_t num_bytes);

 private:
  static void entry();
  void prepare(Fibre& fibre);
  void resume(unsigned index);
  void switch_to_scheduler();
  bool release_warp(unsigned warp);
  bool release_block();
  [[noreturn]] void report_deadlock() const;
  std::string describe(unsigned index) const;

  std::vector<Fibre> fibres_;
  std::vector<uint64_t> met_;  // what the lanes came to the last meeting of their warp with, by thread
  Context scheduler_;
  const std::function<void()>* thread_ = nullptr;
  unsigned num_threads_ = 0, current_ = 0;
  uint8_t* shared_end_ = nullptr;
  std::string error_;          // of the fibre that ran last; thrown where it does not unwind one of them
  bool any_of_block_ = false;  // of the last meeting of the block, whether one came with a value that is not 0
  std::minstd_rand random_;
  void* scheduler_fake_stack_ = nullptr;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_bytes_ = 0;
};

Scheduler& scheduler() {
  static Scheduler instance;
  return instance;
}

// The function that a fibre starts in; `current_` says which one.
void Scheduler::entry() {
  Scheduler& self = scheduler();
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &self.scheduler_stack_, &self.scheduler_stack_bytes_);
#endif
  for (;;) {  // a fibre serves one thread after the other, and keeps the fake stack that the sanitizer has made for it
    (*self.thread_)();
    self.fibres_[self.current_].state = State::kEnded;
    self.switch_to_scheduler();
  }
}

// Resets a fibre for its next thread. One that an error has left in the middle begins anew.
void Scheduler::prepare(Fibre& fibre) {
  const bool can_go_on = fibre.stack != nullptr && fibre.state == State::kEnded;
  fibre.state = State::kReady;
  if (can_go_on) return;
  if (fibre.stack == nullptr) fibre.stack = map_guarded(kStackBytes);
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(fibre.stack, kStackBytes);  // frames that have not returned
#endif
  fibre.context.prepare(fibre.stack, &Scheduler::entry);
  fibre.fake_stack = nullptr;
}

void Scheduler::resume(unsigned index) {
  current_ = index;
  threadIdx.x = index;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler_fake_stack_, fibres_[index].stack, kStackBytes);
#endif
  Context::swap(scheduler_, fibres_[index].context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_fake_stack_, nullptr, nullptr);
#endif
}

void Scheduler::switch_to_scheduler() {
  Fibre& fibre = fibres_[current_];
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fibre.fake_stack, scheduler_stack_, scheduler_stack_bytes_);
#endif
  Context::swap(fibre.context, scheduler_);
#if defined(__SANITIZE_ADDRESS__)
  // Not `fibre`: for its next thread it may have moved.
  __sanitizer_finish_switch_fiber(fibres_[current_].fake_stack, &scheduler_stack_, &scheduler_stack_bytes_);
#endif
}

const uint64_t* Scheduler::meet(State state, unsigned mask, uint64_t value, const std::source_location& site) {
  const unsigned self = current_;
  Fibre& fibre = fibres_[self];
  if (state == State::kWaitsForWarp && (mask >> self % kWarp & 1u) == 0) {
    error_ = describe(self) + " is not among the lanes that it names";
  }
  fibre.state = state;
  fibre.mask = mask;
  fibre.value = value;
  fibre.site = site;
  switch_to_scheduler();
  return met_.data() + self / kWarp * kWarp;
}

// Ends the thread that runs.
// Nothing that owns memory is left behind on the stack, which does not go on.
void Scheduler::report(std::string what) {
  what.insert(0, describe(current_) + " ");
  error_ = std::move(what);
  what = std::string();
  switch_to_scheduler();
}

bool same_site(const std::source_location& a, const std::source_location& b) {
  return a.line() == b.line() && a.column() == b.column() && std::strcmp(a.file_name(), b.file_name()) == 0;
}

// The values are copied when all are there: none comes to the next meeting before all have left this one.
bool Scheduler::release_warp(unsigned warp) {
  const unsigned begin = warp * kWarp, end = std::min(begin + kWarp, num_threads_);
  bool has_released = false;
  for (unsigned first = begin; first < end; ++first) {
    const Fibre& leader = fibres_[first];
    if (leader.state != State::kWaitsForWarp) continue;
    const unsigned mask = leader.mask;
    bool all_are_there = true;
    for (unsigned i = begin; i < begin + kWarp; ++i) {
      if ((mask >> (i - begin) & 1u) == 0) continue;
      all_are_there = all_are_there && i < end && fibres_[i].state == State::kWaitsForWarp && fibres_[i].mask == mask &&
                      same_site(fibres_[i].site, leader.site);
    }
    if (!all_are_there) continue;
    for (unsigned i = begin; i < end; ++i) {
      if ((mask >> (i - begin) & 1u) == 0) continue;
      met_[i] = fibres_[i].value;
      fibres_[i].state = State::kReady;
    }
    has_released = true;
  }
  return has_released;
}

bool Scheduler::release_block() {
  for (unsigned i = 0; i < num_threads_; ++i) {
    if (fibres_[i].state != State::kWaitsForBlock || !same_site(fibres_[i].site, fibres_[0].site)) return false;
  }
  any_of_block_ = false;
  for (unsigned i = 0; i < num_threads_; ++i) {
    any_of_block_ = any_of_block_ || fibres_[i].value != 0;
    fibres_[i].state = State::kReady;
  }
  return true;
}

std::string Scheduler::describe(unsigned index) const {
  const Fibre& fibre = fibres_[index];
  const std::string who = "thread " + std::to_string(index) + " of block " + std::to_string(blockIdx.x);
  if (fibre.state == State::kEnded) return who + " has ended";
  if (fibre.state == State::kReady) return who;
  const char* whom = fibre.state == State::kWaitsForBlock ? "the block" : "its warp";
  return who + " waits for " + whom + " at " + fibre.site.file_name() + ":" + std::to_string(fibre.site.line());
}

void Scheduler::report_deadlock() const {
  std::string message = "divergence: " + describe(0);
  for (unsigned i = 1; i < num_threads_; ++i) {
    const Fibre &before = fibres_[i - 1], &fibre = fibres_[i];
    if (fibre.state != before.state || (fibre.state != State::kEnded && !same_site(fibre.site, before.site))) {
      message += ", " + describe(i);
    }
  }
  throw std::logic_error("emulated CUDA: " + message);
}

void Scheduler::run_block(unsigned num_threads, const std::function<void()>& thread) {
  num_threads_ = num_threads;
  thread_ = &thread;
  fibres_.resize(std::max<size_t>(fibres_.size(), num_threads));
  met_.assign((num_threads + kWarp - 1) / kWarp * kWarp, 0);
  std::vector<unsigned> order(num_threads);
  for (unsigned i = 0; i < num_threads; ++i) {
    order[i] = i;
    prepare(fibres_[i]);
  }
  std::shuffle(order.begin(), order.end(), random_);
  if (shared_end_ == nullptr) shared_end_ = map_guarded(kSharedBytes) + kSharedBytes;
  std::memset(shared_end_ - kSharedBytes, kGarbage, kSharedBytes);
  const unsigned num_warps = (num_threads + kWarp - 1) / kWarp;
  for (;;) {
    bool all_have_ended = true;
    for (const unsigned index : order) {
      if (fibres_[index].state == State::kReady) resume(index);
      if (!error_.empty()) fail(std::exchange(error_, {}));
      all_have_ended = all_have_ended && fibres_[index].state == State::kEnded;
    }
    if (all_have_ended) return;
    bool has_released = false;
    for (unsigned warp = 0; warp < num_warps; ++warp) has_released = release_warp(warp) || has_released;
    if (!has_released && !release_block()) report_deadlock();
  }
}

void* Scheduler::shared_memory(size_t num_bytes) {
  const size_t size = (num_bytes + 15) / 16 * 16;
  return shared_end_ - size;
}

}  // namespace

void run_grid(unsigned num_blocks, unsigned num_threads, const std::function<void()>& thread) {
  for (unsigned block = 0; block < num_blocks; ++block) {
    blockIdx.x = block;
    scheduler().run_block(num_threads, thread);
  }
}

const uint64_t* meet(Waits waits, unsigned mask, uint64_t value, const std::source_location& site) {
  return scheduler().meet(waits == Waits::kForBlock ? State::kWaitsForBlock : State::kWaitsForWarp, mask, value, site);
}

int lane() { return static_cast<int>(threadIdx.x % kWarp); }

cudaError_t begin_operation(size_t& count, cudaStream_t stream) {
  const cudaError_t error = std::exchange(counters.next_error, cudaSuccess);
  if (error != cudaSuccess) return error;
  ++count;
  counters.launched_on = counters.devices.back();
  counters.launched_in = stream;
  return cudaSuccess;
}

}  // namespace cuda_emulation

void* emulated_shared_memory(size_t num_bytes) { return cuda_emulation::scheduler().shared_memory(num_bytes); }

void emulated_expect_aligned(const void* address, size_t num_bytes) {
  const size_t rest = reinterpret_cast<uintptr_t>(address) % num_bytes;
  if (rest == 0) return;
  cuda_emulation::scheduler().report("moves " + std::to_string(num_bytes) + " bytes at an address that is " +
                                     std::to_string(rest) + " bytes past a multiple of that");
}

int __syncthreads_or(int predicate, EmulatedSite site) {
  cuda_emulation::meet(cuda_emulation::Waits::kForBlock, 0, predicate != 0 ? 1 : 0, site);
  return cuda_emulation::scheduler().any_of_block();
}

namespace bagua::device::cuda_on_fibres {

DeviceScope::DeviceScope(int index) : is_pushed_(true) { cuda_emulation::counters.devices.push_back(index); }

DeviceScope::~DeviceScope() {
  if (is_pushed_) cuda_emulation::counters.devices.pop_back();
}

}  // namespace bagua::device::cuda_on_fibres
