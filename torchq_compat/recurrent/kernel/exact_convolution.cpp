// See exact_convolution.h. A task computes a block of pixels for a chunk of outputs: it copies what the windows of
// the pixels read, side by side as 16 bits, with VNNI as bytes, and multiplies these rows with the packed weight.

#include "exact_convolution.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "targets.h"

namespace exact {
namespace {

// Outputs whose weights lie side by side; the most pixels of a task, and what these are a multiple of; the most
// outputs of a task.
constexpr int64_t kLanes = 16, kPixels = 60, kStep = 12, kChunk = 128;
// Depthwise: pixels of a task, channels whose sums VNNI computes at once, and the size of windows that it slides.
constexpr int64_t kDepthwisePixels = 64, kWide = 64, kSlid = 3;

int64_t up(int64_t count, int64_t step) { return (count + step - 1) / step; }
int64_t chunks_of(const Shape& shape) { return up(shape.outputs, kChunk); }
// Outputs of a chunk: all chunks have as many, but the last one.
int64_t chunk_of(const Shape& shape) { return up(up(shape.outputs, chunks_of(shape)), kLanes) * kLanes; }
int64_t blocks_of(const Shape& shape) { return up(shape.pixels(), kPixels); }
// Pixels of a block: all blocks have as many, but the last one.
int64_t block_of(const Shape& shape) {
  return up(up(shape.pixels(), blocks_of(shape)), kStep) * kStep;
}

// Whether VNNI sums the columns of a depthwise window one by one.
bool slides(const Shape& shape) {
  return shape.window == std::array<int64_t, 3>{1, kSlid, kSlid} && shape.dilation[2] == 1;
}

// The place of an output pixel, and of the input that its window begins at.
struct Pixel {
  int64_t image;
  std::array<int64_t, 3> out, first;

  Pixel(const Shape& shape, int64_t index) {
    for (int64_t d = 3; d-- > 0; index /= shape.out[d]) set(shape, d, index % shape.out[d]);
    image = index;
  }
  void set(const Shape& shape, int64_t d, int64_t to) {
    out[d] = to;
    first[d] = to * shape.stride[d] - shape.padding[d];
  }
  void next(const Shape& shape) {
    for (int64_t d = 3; d-- > 0;) {
      if (out[d] + 1 < shape.out[d]) return set(shape, d, out[d] + 1);
      set(shape, d, 0);
    }
    ++image;
  }
};

// Some of the columns of a row: where the first one lies in its line of the window.
struct Columns {
  int64_t count, depth, height, in_line;

  Columns(const Shape& shape, int64_t begin, int64_t count_) : count(count_) {
    const int64_t line = shape.window[2] * shape.inputs;
    in_line = begin % line;
    depth = begin / line / shape.window[1];
    height = begin / line % shape.window[1];
  }
  // The next line.
  void next(const Shape& shape) {
    in_line = 0;
    if (++height < shape.window[1]) return;
    height = 0;
    ++depth;
  }
};

struct Reader {
  const Shape& shape;
  const Input& x;
  int64_t channels = shape.inputs * shape.groups;

  // The values of a line of the input; null outside.
  const uint8_t* line(int64_t image, int64_t depth, int64_t height) const {
    if (depth < 0 || depth >= shape.in[0] || height < 0 || height >= shape.in[1]) return nullptr;
    return x.values + ((image * shape.in[0] + depth) * shape.in[1] + height) * shape.in[2] * channels;
  }
  // Whether the window of a pixel reads no padding.
  bool is_inside(const Pixel& pixel) const {
    for (size_t d = 0; d < 3; ++d) {
      if (pixel.first[d] < 0 || pixel.first[d] + shape.reach(d) > shape.in[d]) return false;
    }
    return true;
  }
};

using Run = void (*)(const Shape&, const Input&, const Weight&, const Output&, int64_t, int64_t);

}  // namespace

#if TORCHQ_COMPAT_X86
TARGET_PUSH("avx2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#define TARGET_NAME avx512_vnni
#define TARGET_VNNI 1
#include "exact_convolution_kernels.h"
TARGET_POP

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

// How an instruction set computes, and how many columns its weights have side by side.
struct Form {
  Run run;
  int64_t depth;
};

Form choose_form() {
#if TORCHQ_COMPAT_X86
  // As for cells: see cell_loop.h.
  const char* asked = std::getenv("TORCHQ_COMPAT_INSTRUCTION_SET");
  const auto may = [&](const char* name) { return !asked || std::strncmp(asked, name, std::strlen(name)) == 0; };
  __builtin_cpu_init();
  const bool has_avx512 = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl");
  if (may("avx512_vnni") && has_avx512 && __builtin_cpu_supports("avx512vnni"))
    return {avx512_vnni::run, avx512_vnni::kDepth};
  if (may("avx512") && has_avx512) return {avx512::run, avx512::kDepth};
  if (may("avx") && __builtin_cpu_supports("avx2")) return {avx2::run, avx2::kDepth};
#endif
  return {plain::run, plain::kDepth};
}

const Form& form() {
  static const Form kForm = choose_form();
  return kForm;
}

// Small groups as one of as many lanes as there are: the weight has zeros between outputs and inputs of two groups.
Shape merged(const Shape& shape) {
  Shape whole = shape;
  for (int64_t count = 2; !shape.is_depthwise() && count * shape.outputs <= kLanes; ++count) {
    if (shape.groups % count) continue;
    whole.groups = shape.groups / count;
    whole.inputs = count * shape.inputs;
    whole.outputs = count * shape.outputs;
  }
  return whole;
}

// Depthwise: (steps of taps, channels, depth), with VNNI in blocks of kWide channels in the order of their sums. Else,
// for each group and `kLanes` outputs: (steps of columns, kLanes, depth); the columns of a row are (*window, inputs).
int64_t wide(const Shape& shape) { return form().depth == 4 ? up(shape.groups, kWide) * kWide : shape.groups; }

int64_t packed_size(const Shape& shape) {
  const int64_t depth = form().depth;
  if (shape.is_depthwise()) return up(shape.taps(), depth) * wide(shape) * depth;
  return shape.groups * up(shape.outputs, kLanes) * up(shape.columns(), depth) * kLanes * depth;
}

int64_t packed_place(const Shape& shape, int64_t group, int64_t output, int64_t tap, int64_t input) {
  const int64_t depth = form().depth;
  if (shape.is_depthwise()) {
    const int64_t in_block = group % kWide, lane = in_block % kLanes;
    const int64_t place = depth == 4 ? group - in_block + lane / 4 * kLanes + in_block / kLanes * 4 + lane % 4 : group;
    if (depth == 4 && slides(shape)) return (tap % kSlid * wide(shape) + place) * depth + tap / kSlid;
    return (tap / depth * wide(shape) + place) * depth + tap % depth;
  }
  const int64_t column = tap * shape.inputs + input, lanes = group * up(shape.outputs, kLanes) + output / kLanes;
  return ((lanes * up(shape.columns(), depth) + column / depth) * kLanes + output % kLanes) * depth + column % depth;
}

}  // namespace

Weight pack(const Shape& given, const int8_t* weight) {
  const Shape shape = merged(given);
  Weight packed{std::vector<int8_t>(packed_size(shape)), std::vector<int32_t>(shape.groups * shape.outputs)};
  for (int64_t row = 0; row < shape.groups * shape.outputs; ++row) {
    const int64_t group = row / shape.outputs, first = row / given.outputs * given.inputs - group * shape.inputs;
    for (int64_t input = first; input < first + given.inputs; ++input) {
      for (int64_t tap = 0; tap < shape.taps(); ++tap) {
        const int8_t value = *weight++;
        packed.values[packed_place(shape, group, row % shape.outputs, tap, input)] = value;
        packed.sums[row] += value;
      }
    }
  }
  return packed;
}

void mark_readers(const Shape& shape, int64_t index, std::vector<bool>& marks) {
  std::array<int64_t, 3> place;
  for (int64_t d = 3; d-- > 0; index /= shape.in[d]) place[d] = index % shape.in[d];
  // The pixel along d whose window has `tap` there; -1 if there is none.
  const auto reader = [&](size_t d, int64_t tap) {
    const int64_t first = place[d] + shape.padding[d] - tap * shape.dilation[d], pixel = first / shape.stride[d];
    return first >= 0 && first % shape.stride[d] == 0 && pixel < shape.out[d] ? pixel : -1;
  };
  for (int64_t d = 0; d < shape.window[0]; ++d) {
    for (int64_t h = 0; h < shape.window[1]; ++h) {
      for (int64_t w = 0; w < shape.window[2]; ++w) {
        const int64_t depth = reader(0, d), height = reader(1, h), width = reader(2, w);
        if (depth < 0 || height < 0 || width < 0) continue;
        marks[((index * shape.out[0] + depth) * shape.out[1] + height) * shape.out[2] + width] = true;
      }
    }
  }
}

bool is_fastest() { return form().depth == 4; }

int64_t task_count(const Shape& given) {
  const Shape shape = merged(given);
  if (shape.is_depthwise()) return up(shape.pixels(), kDepthwisePixels);
  return blocks_of(shape) * shape.groups * chunks_of(shape);
}

int64_t task_work(const Shape& given) {
  const Shape shape = merged(given);
  if (shape.is_depthwise()) return std::min(shape.pixels(), kDepthwisePixels) * shape.groups * shape.taps();
  return std::min(shape.pixels(), block_of(shape)) * std::min(shape.outputs, chunk_of(shape)) * shape.columns();
}

void run_tasks(const Shape& shape, const Input& x, const Weight& weight, const Output& out, int64_t begin,
               int64_t end) {
  form().run(merged(shape), x, weight, out, begin, end);
}

}  // namespace exact
