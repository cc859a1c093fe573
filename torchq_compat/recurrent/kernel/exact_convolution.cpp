// See exact_convolution.h. A task computes a block of pixels for a chunk of outputs: it copies what the windows of
// the pixels read, side by side as 16 bits, and multiplies these rows with the packed weight.

#include "exact_convolution.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "targets.h"

namespace exact {
namespace {

// Outputs whose weights lie side by side; pixels of a task, and those multiplied at once; outputs of a task.
constexpr int64_t kLanes = 16, kPixels = 48, kStrip = 6, kChunk = 64;
// Columns of a row that are copied at once: the rows of a strip and the weights of its lanes stay in the L1 cache.
constexpr int64_t kColumns = 512, kRow = kColumns + 16;
// Depthwise: pixels of a task.
constexpr int64_t kDepthwisePixels = 64;

int64_t up(int64_t count, int64_t step) { return (count + step - 1) / step; }
int64_t pairs_of(int64_t columns) { return up(columns, 2); }
int64_t chunks_of(const Shape& shape) { return up(shape.outputs, kChunk); }
int64_t blocks_of(const Shape& shape) { return up(shape.pixels(), kPixels); }
// Pixels of a block: all blocks have as many, but the last one.
int64_t block_of(const Shape& shape) {
  return up(up(shape.pixels(), blocks_of(shape)), kStrip) * kStrip;
}

// The place of an output pixel, and of the input that its window begins at.
struct Pixel {
  int64_t image;
  std::array<int64_t, 3> first;

  Pixel(const Shape& shape, int64_t index) {
    for (int64_t d = 3; d-- > 0; index /= shape.out[d])
      first[d] = index % shape.out[d] * shape.stride[d] - shape.padding[d];
    image = index;
  }
};

struct Reader {
  const Shape& shape;
  const Input& x;
  int64_t channels = shape.inputs * shape.groups;

  // The values at (depth, height, width); null outside.
  const uint8_t* at(int64_t image, int64_t depth, int64_t height, int64_t width) const {
    if (depth < 0 || depth >= shape.in[0] || height < 0 || height >= shape.in[1] || width < 0 ||
        width >= shape.in[2])
      return nullptr;
    return x.values +
           (((image * shape.in[0] + depth) * shape.in[1] + height) * shape.in[2] + width) * channels;
  }
};

using Run = void (*)(const Shape&, const Input&, const Weight&, const Output&, int64_t, int64_t);

}  // namespace

#if TORCHQ_COMPAT_X86
TARGET_PUSH("avx2,avx512f,avx512bw,avx512dq,avx512vl")
#define TARGET_NAME avx512
#define TARGET_AVX512 1
#define TARGET_AVX2 1
#include "exact_convolution_kernels.h"
TARGET_POP

TARGET_PUSH("avx2")
#define TARGET_NAME avx2
#define TARGET_AVX2 1
#include "exact_convolution_kernels.h"
TARGET_POP
#endif

#define TARGET_NAME plain
#include "exact_convolution_kernels.h"

namespace {

Run best_run() {
#if TORCHQ_COMPAT_X86
  // As for cells: see cell_loop.h.
  const char* asked = std::getenv("TORCHQ_COMPAT_INSTRUCTION_SET");
  const bool may_avx512 = !asked || std::strncmp(asked, "avx512", 6) == 0;
  const bool may_avx2 = !asked || std::strncmp(asked, "avx", 3) == 0;
  __builtin_cpu_init();
  if (may_avx512 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return avx512::run;
  if (may_avx2 && __builtin_cpu_supports("avx2")) return avx2::run;
#endif
  return plain::run;
}

// Depthwise: (pairs of taps, channels, 2). Else, for each group and `kLanes` outputs: (pairs of columns, kLanes, 2);
// the columns of a row are (*window, inputs).
int64_t packed_size(const Shape& shape) {
  if (shape.is_depthwise()) return pairs_of(shape.taps()) * shape.groups * 2;
  return shape.groups * up(shape.outputs, kLanes) * pairs_of(shape.columns()) * kLanes * 2;
}

int64_t packed_place(const Shape& shape, int64_t group, int64_t output, int64_t tap, int64_t input) {
  if (shape.is_depthwise()) return (tap / 2 * shape.groups + group) * 2 + tap % 2;
  const int64_t column = tap * shape.inputs + input, lanes = group * up(shape.outputs, kLanes) + output / kLanes;
  return ((lanes * pairs_of(shape.columns()) + column / 2) * kLanes + output % kLanes) * 2 + column % 2;
}

}  // namespace

Weight pack(const Shape& shape, const int8_t* weight) {
  Weight packed{std::vector<int8_t>(packed_size(shape)), std::vector<int32_t>(shape.groups * shape.outputs)};
  for (int64_t row = 0; row < shape.groups * shape.outputs; ++row) {
    for (int64_t input = 0; input < shape.inputs; ++input) {
      for (int64_t tap = 0; tap < shape.taps(); ++tap) {
        const int8_t value = *weight++;
        packed.values[packed_place(shape, row / shape.outputs, row % shape.outputs, tap, input)] = value;
        packed.sums[row] += value;
      }
    }
  }
  return packed;
}

int64_t task_count(const Shape& shape) {
  if (shape.is_depthwise()) return up(shape.pixels(), kDepthwisePixels);
  return blocks_of(shape) * shape.groups * chunks_of(shape);
}

int64_t task_work(const Shape& shape) {
  if (shape.is_depthwise()) return std::min(shape.pixels(), kDepthwisePixels) * shape.groups * shape.taps();
  return std::min(shape.pixels(), block_of(shape)) * std::min(shape.outputs, kChunk) * shape.columns();
}

void run_tasks(const Shape& shape, const Input& x, const Weight& weight, const Output& out, int64_t begin,
               int64_t end) {
  static const Run run = best_run();
  run(shape, x, weight, out, begin, end);
}

}  // namespace exact
