// The kernels of all instruction sets of this architecture, in one binary.

#pragma once

#include <cstring>

#include "cell_kernels.h"
#include "targets.h"

namespace {

#if TORCHQ_COMPAT_X86

TARGET_PUSH("avx2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#define TARGET_NAME avx512_vnni
#define TARGET_SHOWN "avx512_vnni"
#define TARGET_AVX512 1
#include "tile_kernels.h"
TARGET_POP

TARGET_PUSH("avx2")
#define TARGET_NAME avx2
#define TARGET_SHOWN "avx2"
#define TARGET_AVX2 1
#include "tile_kernels.h"
TARGET_POP

TARGET_PUSH("avx2,avxvnni")
#define TARGET_NAME avx_vnni
#define TARGET_SHOWN "avx_vnni"
#define TARGET_AVX2 1
#define TARGET_AVX_VNNI 1
#define TARGET_REST avx2
#include "tile_kernels.h"
TARGET_POP

#define TARGET_NAME sse2
#define TARGET_SHOWN "sse2"
#define TARGET_SSE2 1
#include "tile_kernels.h"

#else

#define TARGET_NAME plain
#define TARGET_SHOWN "plain"
#include "tile_kernels.h"

#if TORCHQ_COMPAT_ARM
TARGET_PUSH("arch=armv8.2-a+dotprod+i8mm")
#define TARGET_NAME neon_i8mm
#define TARGET_SHOWN "neon_i8mm"
#define TARGET_NEON_I8MM 1
#define TARGET_REST plain
#include "tile_kernels.h"
TARGET_POP

TARGET_PUSH("arch=armv8.2-a+dotprod")
#define TARGET_NAME neon_dotprod
#define TARGET_SHOWN "neon_dotprod"
#define TARGET_NEON_DOT 1
#define TARGET_REST plain
#include "tile_kernels.h"
TARGET_POP
#endif

#endif

// The kernels of one instruction set, and whether this CPU has it.
struct InstructionSet {
  const Kernels* kernels;
  bool is_here;
};

// The instruction sets, the best first; the last one runs on any CPU.
inline const InstructionSet* instruction_sets(int64_t* count) {
#if TORCHQ_COMPAT_X86
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2");
  static const InstructionSet kSets[] = {
      {&avx512_vnni::kKernels, __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
                                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")},
      {&avx_vnni::kKernels, has_avx2 && __builtin_cpu_supports("avxvnni")},
      {&avx2::kKernels, has_avx2},
      {&sse2::kKernels, true}};
#elif TORCHQ_COMPAT_ARM
  static const InstructionSet kSets[] = {
      {&neon_i8mm::kKernels, (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0},
      {&neon_dotprod::kKernels, (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0}, {&plain::kKernels, true}};
#else
  static const InstructionSet kSets[] = {{&plain::kKernels, true}};
#endif
  *count = sizeof kSets / sizeof kSets[0];
  return kSets;
}

}  // namespace
