// Quantized recurrent cells over time, on integers: one call for all layers and directions of a module.
//
// A cell comes as a program (see program.py): instructions over slots of float rows, each followed by its
// part's quantize-dequantize. A linear runs on the integers of its input and of the weight; the rest is
// elementwise. Loops are plain, so that the compiler turns them into what the machine has (dot product or
// multiply-add instructions); the products for AVX-512 VNNI are written out, on packed weights.
//
// Threads share the hidden units: each computes its own units of every gate, so that only the input of a
// linear, which all threads read, needs a barrier.

#include "cell_loop.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <vector>

#include "threads.h"

#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif

namespace {

// Output columns computed together; units are shared out in multiples of it.
constexpr int64_t kLanes = 16;
// Rows of a linear computed together.
constexpr int64_t kRows = 8;
// Rows of the input projected at a time, so that the projection stays in the cache.
constexpr int64_t kProjectedRows = 64;
// Columns summed up in 32 bits: with both zero points subtracted, 3 * 255 * 128 * 2^14 < 2^31.
constexpr int64_t kSummedColumns = 1 << 14;

// instruction_set.py defines these; a test holds the two together.
enum Op : int64_t { kLinear, kAdd, kMul, kComplement, kSigmoid, kTanh, kRelu, kCopy };

// The columns of an instruction table, as in instruction_set.py.
struct Instruction {
  int64_t op, target, a, a_offset, b, b_offset, segments, units, weight, once, quantized;
};

struct Slot {
  int64_t width, units, once;
};

// A negative scale: to be chosen from the values, with -scale as the smallest scale and quant_min to
// zero_point as the integers they are spread over. `nan`: the integer that torch makes of NaN.
struct Grid {
  double scale, zero_point, quant_min, quant_max, nan;

  bool is_dynamic() const { return scale < 0; }
  bool operator==(const Grid& other) const {
    return scale == other.scale && zero_point == other.zero_point && quant_min == other.quant_min &&
           quant_max == other.quant_max && nan == other.nan;
  }
};

constexpr Grid kUnused{1, 0, 0, 0, 0};

// The weight's scale and zero point are here if they are per tensor.
struct Constants {
  Grid output, input;
  double weight_scale, weight_zero_point;
};

// Columns of a linear's input that lie on one grid. A scale of 0: floats on no grid.
struct Segment {
  double width;
  Grid grid;

  bool operator==(const Segment& other) const { return width == other.width && grid == other.grid; }
};

struct Weight {
  const int8_t* values;
  const float* scales;         // null: per tensor, see Constants
  const int64_t* zero_points;  // as scales
  const float* bias;           // or null
  int64_t inputs;
};

struct Quantizer {
  float inverse, scale, zero_point, low, high, nan;

  explicit Quantizer(const Grid& grid)
      : inverse(static_cast<float>(1.0 / grid.scale)),
        scale(static_cast<float>(grid.scale)),
        zero_point(static_cast<float>(grid.zero_point)),
        low(static_cast<float>(grid.quant_min)),
        high(static_cast<float>(grid.quant_max)),
        nan(static_cast<float>(grid.nan)) {}

  float integer(float value) const {
    const float scaled = value * inverse;
    const float integer = std::min(std::max(std::rint(scaled) + zero_point, low), high);
    return scaled == scaled ? integer : nan;
  }
  float operator()(float value) const { return (integer(value) - zero_point) * scale; }
};

// e^x within 2 units in the last place: 2^n times the Taylor series of e^r, |r| <= ln(2) / 2. Of NaN: NaN.
inline float exponential(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  const float n = x == x ? std::rint(x * 1.44269504f) : 0.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float series = 1.0f / 5040;
  series = series * r + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return series * power;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
inline float tangent(float x) { return 1.0f - 2.0f / (1.0f + exponential(2.0f * x)); }

// Of R rows of x with each of `lanes` rows of w; out[r * kLanes + lane] is that of row r.
template <int64_t R>
void dot_products(const uint8_t* x, int64_t stride, const int8_t* w, int64_t w_stride, int64_t lanes,
                  int64_t count, int32_t* out) {
  for (int64_t lane = 0; lane < lanes; ++lane, w += w_stride) {
    int32_t sums[R] = {};
    for (int64_t k = 0; k < count; ++k) {
      for (int64_t r = 0; r < R; ++r) {
        sums[r] += static_cast<int32_t>(x[r * stride + k]) * static_cast<int32_t>(w[k]);
      }
    }
    for (int64_t r = 0; r < R; ++r) out[r * kLanes + lane] = sums[r];
  }
}

using DotProducts = decltype(&dot_products<1>);

// By the number of rows.
constexpr DotProducts kDotProducts[kRows + 1] = {nullptr,         dot_products<1>, dot_products<2>,
                                                 dot_products<3>, dot_products<4>, dot_products<5>,
                                                 dot_products<6>, dot_products<7>, dot_products<8>};

// A cache line of integers: a load that crosses two takes twice as long.
struct alignas(64) Line {
  uint8_t integers[64];
};

int64_t lines(int64_t width) { return (width + sizeof(Line) - 1) / sizeof(Line); }

#ifdef __AVX512VNNI__
constexpr bool kPacksWeights = true;

// Of R rows of x with a packed group of kLanes columns; four rows of the weight to a line. U: sums kept side
// by side, so that one does not wait for another.
template <int64_t R, int64_t U>
inline __attribute__((always_inline)) void packed_tile(const uint8_t* x, int64_t stride, const Line* w,
                                                       int64_t quads, int32_t* out) {
  __m512i sums[R][U];
  for (int64_t r = 0; r < R; ++r) {
    for (int64_t u = 0; u < U; ++u) sums[r][u] = _mm512_setzero_si512();
  }
  const auto accumulate = [&](int64_t quad, int64_t u) __attribute__((always_inline)) {
    const __m512i columns = _mm512_load_si512(w + quad);
    for (int64_t r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, x + r * stride + 4 * quad, 4);
      sums[r][u] = _mm512_dpbusd_epi32(sums[r][u], _mm512_set1_epi32(four), columns);
    }
  };
  int64_t quad = 0;
  for (; quad + U <= quads; quad += U) {
    for (int64_t u = 0; u < U; ++u) accumulate(quad + u, u);
  }
  for (; quad < quads; ++quad) accumulate(quad, 0);
  for (int64_t r = 0; r < R; ++r) {
    for (int64_t u = 1; u < U; ++u) sums[r][0] = _mm512_add_epi32(sums[r][0], sums[r][u]);
    _mm512_storeu_si512(out + r * kLanes, sums[r][0]);
  }
}

template <int64_t R>
void packed_products(const uint8_t* x, int64_t stride, const Line* w, int64_t quads, int32_t* out) {
  packed_tile<R, (R > 4 ? 1 : 8 / R)>(x, stride, w, quads, out);
}

constexpr decltype(&packed_products<1>) kPackedProducts[kRows + 1] = {nullptr,
                                                                      packed_products<1>,
                                                                      packed_products<2>,
                                                                      packed_products<3>,
                                                                      packed_products<4>,
                                                                      packed_products<5>,
                                                                      packed_products<6>,
                                                                      packed_products<7>,
                                                                      packed_products<8>};
#else
constexpr bool kPacksWeights = false;
#endif

float float_dot_product(const float* x, const int8_t* w, float zero_point, int64_t count) {
  float partial[kLanes] = {};
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      partial[lane] += x[k + lane] * (static_cast<float>(w[k + lane]) - zero_point);
    }
  }
  float sum = 0.0f;
  for (; k < count; ++k) sum += x[k] * (static_cast<float>(w[k]) - zero_point);
  for (float part : partial) sum += part;
  return sum;
}

// Into pieces whose products can be summed up in 32 bits.
std::vector<Segment> split(const Segment& whole) {
  std::vector<Segment> parts;
  int64_t left = static_cast<int64_t>(whole.width);
  do {
    const int64_t width = std::min(left, kSummedColumns);
    parts.push_back({static_cast<double>(width), whole.grid});
    left -= width;
  } while (left > 0);
  return parts;
}

// What of a linear does not change over time, for every output column; padded to whole groups of kLanes.
struct Prepared {
  int64_t buffer = 0;      // of its input's integers
  bool quantizes = false;  // false: a linear before it did
  std::vector<Segment> segments;
  std::vector<std::vector<int32_t>> row_sums;  // of the weight, by segment
  std::vector<std::vector<Line>> packed;       // the weight, by segment, if it is packed at all
  std::vector<float> weight_scales, biases;
  bool has_weight_zero_points = false;
};

struct Range {
  int64_t begin, end;
};

// The units of thread `index`, in whole groups of kLanes.
Range share(int64_t units, int64_t index, int64_t threads) {
  const int64_t groups = (units + kLanes - 1) / kLanes;
  return {std::min(units, groups * index / threads * kLanes),
          std::min(units, groups * (index + 1) / threads * kLanes)};
}

}  // namespace

// What calls write while they run; kept from one to the next.
struct Scratch {
  std::vector<std::vector<float>> slots;
  std::vector<std::vector<Line>> integers;  // of a linear's input, of even and of odd steps
};

// A program with its weights, and what is made of them once. Constant after its construction, but for the
// scratch memory.
struct TorchqCompatCell {
  std::vector<Instruction> instructions;
  std::vector<Constants> constants;
  std::vector<Slot> slots;
  std::vector<int64_t> results;  // the slot of every new state
  std::vector<Weight> weights;
  std::vector<Segment> input_segments;
  std::vector<Prepared> prepared;  // of every linear
  bool floats_are_read = false;    // by a linear, at every step
  int64_t buffers = 0;
  int64_t weight_size = 0;

  int64_t state_count() const { return static_cast<int64_t>(results.size()); }
  int64_t instruction_count() const { return static_cast<int64_t>(instructions.size()); }
  int64_t state_width(int64_t state) const { return slots[1 + state].width; }

  int32_t weight_zero_point(int64_t index, int64_t n) const {
    const Weight& weight = weights[instructions[index].weight];
    return static_cast<int32_t>(weight.zero_points ? weight.zero_points[n]
                                                   : constants[index].weight_zero_point);
  }

  void prepare() {
    prepared.resize(instructions.size());
    for (int64_t i = 0; i < instruction_count(); ++i) {
      if (instructions[i].op != kLinear) continue;
      weight_size +=
          instructions[i].segments * instructions[i].units * weights[instructions[i].weight].inputs;
      prepare_linear(i);
      find_buffer(i);
      sum_weights(i);
      if (kPacksWeights) pack_weights(i);
    }
  }

  std::unique_ptr<Scratch> take_scratch() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (kept_.empty()) return std::make_unique<Scratch>();
    std::unique_ptr<Scratch> taken = std::move(kept_.back());
    kept_.pop_back();
    return taken;
  }

  void give_back(std::unique_ptr<Scratch> scratch) const {
    size_t bytes = 0;
    for (const auto& slot : scratch->slots) bytes += slot.capacity() * sizeof(float);
    for (const auto& buffer : scratch->integers) bytes += buffer.capacity() * sizeof(Line);
    if (bytes > kKeptBytes) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (kept_.size() < kKeptScratches) kept_.push_back(std::move(scratch));
  }

 private:
  // More memory than this a call gives back; of so many calls at once it is kept.
  static constexpr size_t kKeptBytes = 4 << 20, kKeptScratches = 4;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> kept_;

  void prepare_linear(int64_t index) {
    const Instruction& by = instructions[index];
    const Weight& weight = weights[by.weight];
    const Grid& grid = constants[index].input;
    const int64_t width = by.segments * by.units;
    Prepared& to = prepared[index];
    if (by.a != 0 || grid.is_dynamic()) {
      to.segments = split({static_cast<double>(weight.inputs), grid});
    } else {
      for (const Segment& segment : input_segments) {
        for (const Segment& part : split(segment)) to.segments.push_back(part);
      }
    }
    if (!by.once && to.segments[0].grid.scale == 0) floats_are_read = true;
    to.row_sums.assign(to.segments.size(), std::vector<int32_t>(width + kLanes));
    to.weight_scales.resize(width + kLanes);
    to.biases.resize(width + kLanes);
    for (int64_t n = 0; n < width; ++n) {
      to.weight_scales[n] =
          weight.scales ? weight.scales[n] : static_cast<float>(constants[index].weight_scale);
      to.biases[n] = weight.bias ? weight.bias[n] : 0.0f;
      to.has_weight_zero_points |= weight_zero_point(index, n) != 0;
    }
  }

  // Linears of the same input on the same grids share its integers: the first of them writes them, all
  // others only read, so that no barrier is needed between two linears.
  void find_buffer(int64_t index) {
    const Instruction& by = instructions[index];
    Prepared& of = prepared[index];
    for (int64_t i = 0; i < index; ++i) {
      const Instruction& before = instructions[i];
      if (before.op == kLinear && before.a == by.a && prepared[i].segments == of.segments) {
        of.buffer = prepared[i].buffer;
        return;
      }
    }
    of.quantizes = true;
    of.buffer = buffers;
    buffers += 2;
  }

  void sum_weights(int64_t index) {
    const Instruction& by = instructions[index];
    const Weight& weight = weights[by.weight];
    for (int64_t n = 0; n < by.segments * by.units; ++n) {
      const int8_t* values = weight.values + n * weight.inputs;
      for (size_t s = 0; s < prepared[index].segments.size(); ++s) {
        const int64_t count = static_cast<int64_t>(prepared[index].segments[s].width);
        prepared[index].row_sums[s][n] = std::accumulate(values, values + count, 0);
        values += count;
      }
    }
  }

  void pack_weights(int64_t index) {
    const Instruction& by = instructions[index];
    const Weight& weight = weights[by.weight];
    const int64_t groups = (by.units + kLanes - 1) / kLanes;
    int64_t first = 0;
    for (const Segment& segment : prepared[index].segments) {
      const int64_t count = static_cast<int64_t>(segment.width), quads = (count + 3) / 4;
      std::vector<Line> packed(by.segments * groups * quads);
      for (int64_t n = 0; n < by.segments * by.units; ++n) {
        const int64_t unit = n % by.units, group = n / by.units * groups + unit / kLanes;
        const int8_t* from = weight.values + n * weight.inputs + first;
        for (int64_t k = 0; k < count; ++k) {
          packed[group * quads + k / 4].integers[unit % kLanes * 4 + k % 4] = static_cast<uint8_t>(from[k]);
        }
      }
      prepared[index].packed.push_back(std::move(packed));
      first += count;
    }
  }
};

namespace {

using Cell = TorchqCompatCell;

// One direction over time. Slot 0 is x, slots 1 to state_count are the states.
class Loop {
 public:
  // States are read and written in place; rows of the output are `output_stride` apart. Dynamic qparams of x
  // are chosen from `all_rows` rows at `all_x`, of which x may be a part.
  Loop(const Cell& cell, int64_t steps, int64_t batch, bool backward, const float* x, const float* all_x,
       int64_t all_rows, float* const* states, float* output, int64_t output_stride, int64_t threads)
      : cell_(cell),
        steps_(steps),
        batch_(batch),
        output_stride_(output_stride),
        backward_(backward),
        x_(x),
        output_(output),
        states_(states),
        team_(threads),
        scratch_(cell.take_scratch()),
        slots_(scratch_->slots),
        integers_(scratch_->integers),
        off_grid_(cell.buffers),
        floats_are_read_(cell.floats_are_read) {
    steps_at_once_ = std::min(steps, std::max<int64_t>(1, kProjectedRows / batch));
    slots_.resize(cell.slots.size());
    for (size_t s = 1; s < cell.slots.size(); ++s) {
      slots_[s].resize(cell.slots[s].width * batch * (cell.slots[s].once ? steps_at_once_ : 1));
    }
    for (int64_t s = 0; s < cell.state_count(); ++s) {
      std::copy_n(states[s], cell.state_width(s) * batch, slots_[1 + s].data());
    }
    integers_.resize(cell.buffers);
    x_segments_.resize(cell.instruction_count());
    for (int64_t i = 0; i < cell.instruction_count(); ++i) {
      const Instruction& by = cell.instructions[i];
      if (by.op != kLinear) continue;
      const Prepared& of = cell.prepared[i];
      // One more, as the last column is read with three behind it.
      const int64_t rows = batch * (by.once ? steps_at_once_ : 1),
                    size = lines(cell.slots[by.a].width) * rows + 1;
      for (int64_t parity = 0; of.quantizes && parity < 2; ++parity)
        integers_[of.buffer + parity].resize(size);
      if (by.a != 0 || !of.segments[0].grid.is_dynamic()) continue;
      const int64_t inputs = cell.weights[by.weight].inputs;
      x_segments_[i] =
          split({static_cast<double>(inputs), choose_grid(of.segments[0].grid, all_x, all_rows * inputs)});
    }
  }

  Loop(const Loop&) = delete;
  ~Loop() { cell_.give_back(std::move(scratch_)); }

  void run() {
    team_.run([this](const Worker& worker) {
      for (int64_t done = 0; done < steps_; done += steps_at_once_) {
        const int64_t count = std::min(steps_at_once_, steps_ - done);
        team_.barrier();
        execute(worker, true, count, done, 0);
        for (int64_t offset = 0; offset < count; ++offset) {
          execute(worker, false, 1, done + offset, offset);
          carry_states(worker, done + offset);
        }
      }
    });
  }

 private:
  // Rows of x that `count` steps from `step` on read, in the order of memory.
  int64_t first_row(int64_t step, int64_t count) const {
    return (backward_ ? steps_ - step - count : step) * batch_;
  }

  const float* rows_of(const Instruction& by, int64_t slot, int64_t offset, int64_t step, int64_t in_block,
                       int64_t block) const {
    if (slot == 0) return x_ + first_row(step, block) * cell_.slots[0].width + offset;
    const bool behind = cell_.slots[slot].once && !by.once;
    const int64_t at = behind ? (backward_ ? block_steps_ - 1 - in_block : in_block) : 0;
    return slots_[slot].data() + at * batch_ * cell_.slots[slot].width + offset;
  }

  void execute(const Worker& worker, bool once, int64_t count, int64_t step, int64_t in_block) {
    if (once) set_block(worker, count);
    for (int64_t i = 0; i < cell_.instruction_count(); ++i) {
      const Instruction& instruction = cell_.instructions[i];
      if (static_cast<bool>(instruction.once) != once) continue;
      if (instruction.op == kLinear) {
        linear(worker, i, count, step, in_block);
      } else {
        elementwise(worker, i, count, step, in_block);
      }
    }
  }

  void set_block(const Worker& worker, int64_t count) {
    if (worker.index == 0) block_steps_ = count;
    team_.barrier();
  }

  template <class F>
  void for_each(const Worker& worker, const Instruction& by, const Grid& grid, int64_t rows, const float* a,
                int64_t a_stride, const float* b, int64_t b_stride, F function) {
    const Range units = share(by.units, worker.index, worker.count);
    const int64_t width = by.segments * by.units;
    float* target = slots_[by.target].data();
    const Quantizer quantize(by.quantized ? grid : kUnused);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t segment = 0; segment < by.segments; ++segment) {
        const int64_t start = segment * by.units + units.begin, count = units.end - units.begin;
        const float* left = a + row * a_stride + start;
        const float* right = b + row * b_stride + start;
        float* to = target + row * width + start;
        if (by.quantized) {
          for (int64_t j = 0; j < count; ++j) to[j] = quantize(function(left[j], right[j]));
        } else {
          for (int64_t j = 0; j < count; ++j) to[j] = function(left[j], right[j]);
        }
      }
    }
  }

  void elementwise(const Worker& worker, int64_t index, int64_t count, int64_t step, int64_t in_block) {
    const Instruction& by = cell_.instructions[index];
    const float* a = rows_of(by, by.a, by.a_offset, step, in_block, count);
    const float* b = by.b < 0 ? a : rows_of(by, by.b, by.b_offset, step, in_block, count);
    const int64_t a_stride = cell_.slots[by.a].width;
    const int64_t b_stride = by.b < 0 ? a_stride : cell_.slots[by.b].width;
    const auto each = [&](auto function) {
      for_each(worker, by, constants(index).output, count * batch_, a, a_stride, b, b_stride, function);
    };
    switch (by.op) {
      case kAdd:
        each([](float x, float y) { return x + y; });
        break;
      case kMul:
        each([](float x, float y) { return x * y; });
        break;
      case kComplement:
        each([](float x, float) { return 1.0f - x; });
        break;
      case kSigmoid:
        each([](float x, float) { return sigmoid(x); });
        break;
      case kTanh:
        each([](float x, float) { return tangent(x); });
        break;
      case kRelu:
        each([](float x, float) { return std::max(x, 0.0f); });
        break;
      case kCopy:
      default:
        each([](float x, float) { return x; });
        break;
    }
  }

  // As torch.ops.quantized_decomposed.choose_qparams. NaN or infinity anywhere: NaN everywhere behind it.
  static Grid choose_grid(const Grid& dynamic, const float* values, int64_t count) {
    float lows[kLanes] = {}, highs[kLanes] = {};
    int32_t nans[kLanes] = {};
    const auto see = [&](int64_t lane, float value) {
      lows[lane] = std::min(lows[lane], value);
      highs[lane] = std::max(highs[lane], value);
      nans[lane] |= value != value;
    };
    int64_t k = 0;
    for (; k + kLanes <= count; k += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) see(lane, values[k + lane]);
    }
    for (; k < count; ++k) see(0, values[k]);
    const float low = *std::min_element(lows, lows + kLanes), high = *std::max_element(highs, highs + kLanes);
    const float first = static_cast<float>(dynamic.quant_min), last = static_cast<float>(dynamic.zero_point);
    const float scale = std::max((high - low) / (last - first), static_cast<float>(-dynamic.scale));
    if (!std::isfinite(scale) || *std::max_element(nans, nans + kLanes)) {
      return {std::nan(""), dynamic.quant_min, dynamic.quant_min, dynamic.quant_max, dynamic.nan};
    }
    const float zero_point = std::min(std::max(first - std::rint(low / scale), first), last);
    return {scale, zero_point, dynamic.quant_min, dynamic.quant_max, dynamic.nan};
  }

  // Integers are kept unsigned.
  static int32_t shift(const Grid& grid) { return grid.quant_min < 0 ? 128 : 0; }
  static int32_t unsigned_zero_point(const Grid& grid) {
    return static_cast<int32_t>(grid.zero_point) + shift(grid);
  }

  void quantize_input(const Worker& worker, int64_t index, const std::vector<Segment>& segments, int64_t rows,
                      const float* x, uint8_t* to, bool check) {
    const Instruction& by = cell_.instructions[index];
    const int64_t stride = cell_.slots[by.a].width, to_stride = lines(stride) * sizeof(Line);
    int64_t first = 0;
    for (const Segment& part : segments) {
      const int64_t width = static_cast<int64_t>(part.width);
      const Quantizer quantize(part.grid);
      const float shifted = static_cast<float>(shift(part.grid));
      // Rows of x are shared out; a state is read by the thread that wrote it.
      const int64_t units = by.once ? width : cell_.slots[by.a].units;
      const Range columns = by.once ? Range{0, width} : share(units, worker.index, worker.count);
      for (int64_t row = by.once ? worker.index : 0; row < rows; row += by.once ? worker.count : 1) {
        for (int64_t from = first; from < first + width; from += units) {
          const float* source = x + row * stride + from;
          uint8_t* target = to + row * to_stride + from;
          for (int64_t k = columns.begin; k < columns.end; ++k) {
            target[k] = static_cast<uint8_t>(static_cast<int32_t>(quantize.integer(source[k]) + shifted));
          }
          if (check && !std::all_of(source + columns.begin, source + columns.end,
                                    [&](float value) { return quantize(value) == value; })) {
            off_grid_[cell_.prepared[index].buffer] = true;
          }
        }
      }
      first += width;
    }
  }

  void linear(const Worker& worker, int64_t index, int64_t count, int64_t step, int64_t in_block) {
    const Instruction& by = cell_.instructions[index];
    const int64_t rows = count * batch_, stride = cell_.slots[by.a].width;
    const float* x = rows_of(by, by.a, by.a_offset, step, in_block, count);
    const bool is_state = by.a >= 1 && by.a <= cell_.state_count();
    const bool has_chosen = !x_segments_[index].empty();
    const std::vector<Segment>* segments = has_chosen ? &x_segments_[index] : &cell_.prepared[index].segments;
    std::vector<Segment> chosen;
    if ((*segments)[0].grid.is_dynamic()) {
      team_.barrier();
      chosen = split({static_cast<double>(stride), choose_grid((*segments)[0].grid, x, rows * stride)});
      segments = &chosen;
    }
    const bool on_grids = (*segments)[0].grid.scale != 0;
    uint8_t* integers = reinterpret_cast<uint8_t*>(integers_[cell_.prepared[index].buffer + step % 2].data());
    const int64_t integer_stride = lines(stride) * sizeof(Line);
    // Only the first state may come from elsewhere.
    const bool check = is_state && step == 0 && chosen.empty();
    if (by.once && by.a != 0) team_.barrier();
    if (on_grids && cell_.prepared[index].quantizes) {
      quantize_input(worker, index, *segments, rows, x, integers, check);
    }
    team_.barrier();
    const bool in_floats = !on_grids || (check && off_grid_[cell_.prepared[index].buffer]);
    const Range units = share(by.units, worker.index, worker.count);
    const int64_t groups = (by.units + kLanes - 1) / kLanes;
    for (int64_t part = 0; part < by.segments; ++part) {
      for (int64_t n = part * by.units + units.begin; n < part * by.units + units.end; n += kLanes) {
        const int64_t lanes = std::min(kLanes, part * by.units + units.end - n);
        for (int64_t row = 0; row < rows; row += kRows) {
          const int64_t tile = std::min(kRows, rows - row);
          float sums[kRows * kLanes];
          if (in_floats) {
            float_tile(index, x + row * stride, stride, n, lanes, tile, sums);
          } else {
            const int64_t group = part * groups + (n - part * by.units) / kLanes;
            integer_tile(index, *segments, integers + row * integer_stride, integer_stride, n, group, lanes,
                         tile, sums);
          }
          finish_tile(index, row, n, lanes, tile, sums);
        }
      }
    }
  }

  const Constants& constants(int64_t index) const { return cell_.constants[index]; }

  void float_tile(int64_t index, const float* x, int64_t stride, int64_t n, int64_t lanes, int64_t rows,
                  float* sums) const {
    const Weight& weight = cell_.weights[cell_.instructions[index].weight];
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int8_t* values = weight.values + (n + lane) * weight.inputs;
      const float zero_point = static_cast<float>(cell_.weight_zero_point(index, n + lane));
      for (int64_t row = 0; row < rows; ++row) {
        sums[row * kLanes + lane] = cell_.prepared[index].weight_scales[n + lane] *
                                    float_dot_product(x + row * stride, values, zero_point, weight.inputs);
      }
    }
  }

  void integer_tile(int64_t index, const std::vector<Segment>& segments, const uint8_t* x, int64_t stride,
                    int64_t n, [[maybe_unused]] int64_t group, int64_t lanes, int64_t rows,
                    float* sums) const {
    const Prepared& prepared = cell_.prepared[index];
    [[maybe_unused]] const Weight& weight = cell_.weights[cell_.instructions[index].weight];
    std::fill_n(sums, rows * kLanes, 0.0f);
    for (size_t s = 0, first = 0; s < segments.size(); ++s) {
      const Segment& part = segments[s];
      const int64_t count = static_cast<int64_t>(part.width);
      int32_t products[kRows * kLanes] = {};
#ifdef __AVX512VNNI__
      const int64_t quads = (count + 3) / 4;
      kPackedProducts[rows](x + first, stride, prepared.packed[s].data() + group * quads, quads, products);
#else
      kDotProducts[rows](x + first, stride, weight.values + n * weight.inputs + first, weight.inputs, lanes,
                         count, products);
#endif
      if (prepared.has_weight_zero_points) {
        subtract_weight_zero_points(index, n, lanes, rows, x + first, stride, part, products);
      }
      int32_t corrections[kLanes];
      float scales[kLanes];
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        corrections[lane] = unsigned_zero_point(part.grid) * prepared.row_sums[s][n + lane];
        scales[lane] = static_cast<float>(part.grid.scale) * prepared.weight_scales[n + lane];
      }
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          const int64_t at = row * kLanes + lane;
          sums[at] += static_cast<float>(products[at] - corrections[lane]) * scales[lane];
        }
      }
      first += count;
    }
  }

  void subtract_weight_zero_points(int64_t index, int64_t n, int64_t lanes, int64_t rows, const uint8_t* x,
                                   int64_t stride, const Segment& part, int32_t* products) const {
    const int32_t zero_point = unsigned_zero_point(part.grid);
    for (int64_t row = 0; row < rows; ++row) {
      int32_t sum = 0;
      for (int64_t k = 0; k < static_cast<int64_t>(part.width); ++k) sum += x[row * stride + k] - zero_point;
      for (int64_t lane = 0; lane < lanes; ++lane) {
        products[row * kLanes + lane] -= cell_.weight_zero_point(index, n + lane) * sum;
      }
    }
  }

  void finish_tile(int64_t index, int64_t row, int64_t n, int64_t lanes, int64_t rows, float* sums) {
    const Instruction& by = cell_.instructions[index];
    const int64_t width = by.segments * by.units;
    const Quantizer quantize(by.quantized ? constants(index).output : kUnused);
    const float* bias = cell_.prepared[index].biases.data() + n;
    for (int64_t r = 0; r < rows; ++r) {
      float* source = sums + r * kLanes;
      for (int64_t lane = 0; lane < kLanes; ++lane) source[lane] += bias[lane];
      if (by.quantized) {
        for (int64_t lane = 0; lane < kLanes; ++lane) source[lane] = quantize(source[lane]);
      }
      float* target = slots_[by.target].data() + (row + r) * width + n;
      if (lanes == kLanes) {
        std::copy_n(source, kLanes, target);
      } else {
        std::copy_n(source, lanes, target);
      }
    }
  }

  void carry_states(const Worker& worker, int64_t step) {
    // Another thread may still read the old state in a linear in floats.
    if (step == 0 || floats_are_read_) team_.barrier();
    for (int64_t s = 0; s < cell_.state_count(); ++s) {
      const int64_t slot = cell_.results[s], width = cell_.slots[slot].width;
      const int64_t per_segment = cell_.slots[1 + s].units;
      const Range units = share(per_segment, worker.index, worker.count);
      for (int64_t row = 0; row < batch_; ++row) {
        for (int64_t from = 0; from < width; from += per_segment) {
          const int64_t at = row * width + from + units.begin, count = units.end - units.begin;
          const float* source = slots_[slot].data() + at;
          std::copy_n(source, count, slots_[1 + s].data() + at);
          if (s == 0)
            std::copy_n(source, count,
                        output_ + (first_row(step, 1) + row) * output_stride_ + at - row * width);
          if (step == steps_ - 1) std::copy_n(source, count, states_[s] + at);
        }
      }
    }
  }

  const Cell& cell_;
  const int64_t steps_, batch_, output_stride_;
  const bool backward_;
  const float* x_;
  float* output_;
  float* const* states_;
  Team team_;
  std::unique_ptr<Scratch> scratch_;
  std::vector<std::vector<float>>& slots_;
  std::vector<std::vector<Line>>& integers_;
  std::vector<std::atomic<bool>> off_grid_;       // whether a state came from elsewhere, by buffer
  std::vector<std::vector<Segment>> x_segments_;  // with qparams chosen from x, by instruction
  const bool floats_are_read_;
  int64_t steps_at_once_ = 1, block_steps_ = 1;
};

// One direction of one layer; `rows`: of x.
void run_direction(const Cell& cell, bool backward, int64_t steps, int64_t batch, const int64_t* batch_sizes,
                   int64_t rows, const float* x, float* const* states, float* output, int64_t output_stride,
                   int64_t threads, int64_t work_per_thread) {
  const auto run = [&](int64_t first, int64_t count, int64_t size) {
    const int64_t wanted = cell.weight_size * size / std::max<int64_t>(1, work_per_thread);
    Loop(cell, count, size, backward, x + first * cell.slots[0].width, x, rows, states,
         output + first * output_stride, output_stride, usable_threads(std::min(threads, wanted)))
        .run();
  };
  if (!batch_sizes) return run(0, steps, batch);
  // All steps of the same size at once; states of sequences that have ended, or not begun, stay as they are.
  int64_t first_row = backward ? rows : 0;
  for (int64_t step = backward ? steps - 1 : 0; step >= 0 && step < steps;) {
    const int64_t size = batch_sizes[step], direction = backward ? -1 : 1;
    int64_t count = 0;
    for (; step >= 0 && step < steps && batch_sizes[step] == size; step += direction) ++count;
    if (backward) first_row -= count * size;
    run(first_row, count, size);
    if (!backward) first_row += count * size;
  }
}

Grid grid_of(const double* qparams) { return {qparams[0], qparams[1], qparams[2], qparams[3], qparams[4]}; }

}  // namespace

extern "C" TorchqCompatCell* torchq_compat_prepare_cell(const int64_t* instructions, const double* constants,
                                                        int64_t instruction_count, const int64_t* slots,
                                                        int64_t slot_count, const int64_t* results,
                                                        int64_t state_count, const void* const* weights,
                                                        const int64_t* weight_inputs, int64_t weight_count,
                                                        const double* input_segments,
                                                        int64_t input_segment_count) try {
  auto cell = std::make_unique<Cell>();
  const auto* rows = reinterpret_cast<const Instruction*>(instructions);
  cell->instructions.assign(rows, rows + instruction_count);
  const auto* numbers = reinterpret_cast<const Constants*>(constants);
  cell->constants.assign(numbers, numbers + instruction_count);
  const auto* shapes = reinterpret_cast<const Slot*>(slots);
  cell->slots.assign(shapes, shapes + slot_count);
  cell->results.assign(results, results + state_count);
  const auto* segments = reinterpret_cast<const Segment*>(input_segments);
  cell->input_segments.assign(segments, segments + input_segment_count);
  for (int64_t w = 0; w < weight_count; ++w) {
    const void* const* of = weights + 4 * w;
    cell->weights.push_back({static_cast<const int8_t*>(of[0]), static_cast<const float*>(of[1]),
                             static_cast<const int64_t*>(of[2]), static_cast<const float*>(of[3]),
                             weight_inputs[w]});
  }
  cell->prepare();
  return cell.release();
} catch (const std::bad_alloc&) {
  return nullptr;
}

extern "C" void torchq_compat_free_cell(const TorchqCompatCell* cell) { delete cell; }

extern "C" int64_t torchq_compat_run_layers(const TorchqCompatCell* const* cells, const int64_t* backward,
                                            int64_t layers, int64_t directions, int64_t steps, int64_t batch,
                                            const int64_t* batch_sizes, const float* x, float* const* states,
                                            float* output, int64_t threads, int64_t work_per_thread) try {
  const int64_t rows =
      batch_sizes ? std::accumulate(batch_sizes, batch_sizes + steps, int64_t{0}) : steps * batch;
  if (rows == 0) return 0;
  std::vector<float> between[2];
  for (int64_t layer = 0; layer < layers; ++layer) {
    int64_t stride = 0;
    for (int64_t d = 0; d < directions; ++d) stride += cells[layer * directions + d]->state_width(0);
    float* to = output;
    if (layer + 1 < layers) {
      between[layer % 2].resize(rows * stride);
      to = between[layer % 2].data();
    }
    float* column = to;
    for (int64_t d = 0; d < directions; ++d) {
      const Cell& cell = *cells[layer * directions + d];
      run_direction(cell, backward[layer * directions + d] != 0, steps, batch, batch_sizes, rows, x, states,
                    column, stride, threads, work_per_thread);
      column += cell.state_width(0);
      states += cell.state_count();
    }
    x = to;
  }
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

extern "C" void torchq_compat_requantize(const double* qparams, float* values, int64_t count) {
  const Quantizer quantize(grid_of(qparams));
  for (int64_t i = 0; i < count; ++i) values[i] = quantize(values[i]);
}

extern "C" void torchq_compat_to_integers(const double* qparams, const float* values, int64_t count,
                                          void* integers) {
  const Quantizer quantize(grid_of(qparams));
  uint8_t* to = static_cast<uint8_t*>(integers);
  for (int64_t i = 0; i < count; ++i)
    to[i] = static_cast<uint8_t>(static_cast<int32_t>(quantize.integer(values[i])));
}

extern "C" void torchq_compat_to_floats(const double* qparams, const void* integers, int64_t count,
                                        float* values) {
  const Quantizer quantize(grid_of(qparams));
  const bool is_signed = qparams[2] < 0;
  for (int64_t i = 0; i < count; ++i) {
    const float integer = is_signed ? static_cast<float>(static_cast<const int8_t*>(integers)[i])
                                    : static_cast<float>(static_cast<const uint8_t*>(integers)[i]);
    values[i] = (integer - quantize.zero_point) * quantize.scale;
  }
}
