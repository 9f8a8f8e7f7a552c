// BAGUA_MULTIVERSION in front of a function definition: the compiler emits one body per instruction set
// and the loader picks the best at start (GNU ifunc), which is the runtime SIMD dispatch of the CPU
// kernels. What such a function calls must be BAGUA_INLINE: a call that is not inlined runs the baseline
// body. Loops there are written for the vectoriser: no branch, no early exit.
//
// Kernels must give the same bits on every instruction set, so their files are compiled with
// -ffp-contract=off (an FMA would round once where the baseline rounds twice); test_kernels_clones.cc
// compares the bodies. Off where ifunc is missing (aarch64, whose baseline is NEON already) or clashes (sanitizers).
#pragma once

#if defined(BAGUA_MULTIVERSION)
// A test has pinned one instruction set.
#elif defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__) && !defined(BAGUA_NO_MULTIVERSION)
#define BAGUA_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
// A second body, written by hand where the vectoriser has no word for an instruction. Its caller asks BAGUA_HAS_V3:
// clang cannot dispatch two bodies of one name by a level.
#define BAGUA_TARGET_V3 __attribute__((target("avx2,f16c")))
#define BAGUA_HAS_V3 __builtin_cpu_supports("x86-64-v3")
#else
#define BAGUA_MULTIVERSION
#endif

// The arithmetic of an element (arithmetic/), which both backends share, is compiled for the GPU, too.
#if defined(__CUDACC__)
#define BAGUA_INLINE __host__ __device__ inline __attribute__((always_inline))
#else
#define BAGUA_INLINE inline __attribute__((always_inline))
#endif

// In front of a loop whose pointers are equal or disjoint: each iteration touches index i only, so
// vectorising is right without a run-time overlap test.
#if defined(__clang__)
#define BAGUA_ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define BAGUA_ELEMENTWISE _Pragma("GCC ivdep")
#endif
