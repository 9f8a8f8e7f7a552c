// The CPU kernels pinned to x86-64-v3, against the dispatched ones.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define BAGUA_MULTIVERSION __attribute__((target("arch=x86-64-v3")))
#define BAGUA_CLONE "v3"
#define BAGUA_CLONE_SUITE Clone_v3
#define cpu cpu_v3
#include "csrc/tests/test_kernels_clones.h"
#endif
