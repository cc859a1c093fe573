// What a header needs that is compiled again for each instruction set.

#pragma once

// With TORCHQ_COMPAT_PLAIN only plain C++ is compiled, which takes less time.
#if defined(TORCHQ_COMPAT_PLAIN)
#elif defined(__x86_64__)
#define TORCHQ_COMPAT_X86 1
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#define TORCHQ_COMPAT_ARM 1
#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#ifndef HWCAP2_I8MM  // in Linux's headers since 5.10
#define HWCAP2_I8MM (1 << 13)
#endif
#endif

// Functions between TARGET_PUSH and TARGET_POP are built for these instructions. Clang would ignore GCC's
// pragmas with only a warning.
#define TARGET_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define TARGET_PUSH(features) \
  TARGET_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define TARGET_POP TARGET_PRAGMA(clang attribute pop)
#else
#define TARGET_PUSH(features) TARGET_PRAGMA(GCC push_options) TARGET_PRAGMA(GCC target(features))
#define TARGET_POP TARGET_PRAGMA(GCC pop_options)
#endif
