// The CPU kernels pinned to x86-64-v4, against the dispatched ones.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define BAGUA_MULTIVERSION __attribute__((target("arch=x86-64-v4")))
#define BAGUA_CLONE "v4"
#define BAGUA_CLONE_SUITE Clone_v4
#define cpu cpu_v4
#include "csrc/tests/test_kernels_clones.h"
#endif
