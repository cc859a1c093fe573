// A quantized recurrent cell over time, on integers: one call for a whole direction of a layer.
//
// The cell comes as a program (see program.py): instructions over slots of float rows, each followed by its
// part's quantize-dequantize. A linear runs on the integers of its input and of the weight; the rest is
// elementwise. Loops are plain, so that the compiler turns them into what the machine has (VNNI, dot
// product or multiply-add instructions); one is written out for AVX-512.
//
// Threads share the hidden units: each computes its own units of every gate, so that only the input of a
// linear, which all threads read, needs a barrier.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
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

#ifdef __AVX512VNNI__
// The sum of the lanes of each.
inline __m128i sum_lanes(const __m512i (&sums)[4]) {
  __m256i halves[4];
  for (int c = 0; c < 4; ++c) {
    halves[c] = _mm256_add_epi32(_mm512_castsi512_si256(sums[c]), _mm512_extracti64x4_epi64(sums[c], 1));
  }
  const __m256i left = _mm256_hadd_epi32(halves[0], halves[1]),
                right = _mm256_hadd_epi32(halves[2], halves[3]);
  const __m256i both = _mm256_hadd_epi32(left, right);
  return _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
}

// Of R rows of x with four rows of w. Compilers sum up the lanes of each dot product on its own, which takes
// as long as a third of the multiplications.
template <int64_t R>
inline __attribute__((always_inline)) void four_dot_products(const uint8_t* x, int64_t stride,
                                                             const int8_t* w, int64_t w_stride, int64_t count,
                                                             int32_t* out) {
  __m512i sums[R][4];
  for (int64_t r = 0; r < R; ++r) {
    for (int c = 0; c < 4; ++c) sums[r][c] = _mm512_setzero_si512();
  }
  const auto accumulate = [&](int64_t k, auto load) {
    const __m512i columns[4] = {load(w + k), load(w + w_stride + k), load(w + 2 * w_stride + k),
                                load(w + 3 * w_stride + k)};
    for (int64_t r = 0; r < R; ++r) {
      const __m512i row = load(x + r * stride + k);
      for (int c = 0; c < 4; ++c) sums[r][c] = _mm512_dpbusd_epi32(sums[r][c], row, columns[c]);
    }
  };
  int64_t k = 0;
  for (; k + 64 <= count; k += 64) accumulate(k, [](const void* from) { return _mm512_loadu_si512(from); });
  if (k < count) {
    const __mmask64 mask = (1ULL << (count - k)) - 1;
    accumulate(k, [&](const void* from) { return _mm512_maskz_loadu_epi8(mask, from); });
  }
  for (int64_t r = 0; r < R; ++r) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + r * kLanes), sum_lanes(sums[r]));
  }
}

template <int64_t R>
void dot_products_by_four(const uint8_t* x, int64_t stride, const int8_t* w, int64_t w_stride, int64_t lanes,
                          int64_t count, int32_t* out) {
  int64_t lane = 0;
  for (; lane + 4 <= lanes; lane += 4) {
    const int8_t* columns = w + lane * w_stride;
    for (int64_t r = 0; r + 2 <= R; r += 2) {
      four_dot_products<2>(x + r * stride, stride, columns, w_stride, count, out + r * kLanes + lane);
    }
    if (R % 2) {
      four_dot_products<1>(x + (R - 1) * stride, stride, columns, w_stride, count,
                           out + (R - 1) * kLanes + lane);
    }
  }
  dot_products<R>(x, stride, w + lane * w_stride, w_stride, lanes - lane, count, out + lane);
}
#else
template <int64_t R>
constexpr auto dot_products_by_four = dot_products<R>;
#endif

using DotProducts = decltype(&dot_products<1>);

// By the number of rows.
constexpr DotProducts kDotProducts[kRows + 1] = {nullptr,
                                                 dot_products<1>,
                                                 dot_products_by_four<2>,
                                                 dot_products_by_four<3>,
                                                 dot_products_by_four<4>,
                                                 dot_products_by_four<5>,
                                                 dot_products_by_four<6>,
                                                 dot_products_by_four<7>,
                                                 dot_products_by_four<8>};

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

// A cache line of integers: a load that crosses two takes twice as long.
struct alignas(64) Line {
  uint8_t integers[64];
};

int64_t lines(int64_t width) { return (width + sizeof(Line) - 1) / sizeof(Line); }

// What of a linear does not change over time, for every output column; padded to whole groups of kLanes.
struct Prepared {
  int64_t buffer = 0;      // of its input's integers
  bool quantizes = false;  // false: a linear before it did
  std::vector<Segment> segments;
  std::vector<std::vector<int32_t>> row_sums;  // of the weight, by segment
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

struct Program {
  const Instruction* instructions;
  const Constants* constants;
  int64_t instruction_count;
  const Slot* slots;
  int64_t slot_count;
  const int64_t* results;  // the slot of every new state
  int64_t state_count;
  const Weight* weights;
  const Segment* input_segments;
  int64_t input_segment_count;
};

// Slot 0 is x, slots 1 to state_count are the states.
class Loop {
 public:
  Loop(const Program& program, int64_t steps, int64_t batch, bool backward, const float* x,
       const float* const* states, float* output, float* const* last, int64_t threads)
      : program_(program),
        steps_(steps),
        batch_(batch),
        backward_(backward),
        x_(x),
        output_(output),
        last_(last),
        team_(threads),
        off_grid_(2 * program.instruction_count) {
    steps_at_once_ = std::min(steps, std::max<int64_t>(1, kProjectedRows / batch));
    slots_.resize(program.slot_count);
    for (int64_t s = 1; s < program.slot_count; ++s) {
      slots_[s].resize(program.slots[s].width * batch * (program.slots[s].once ? steps_at_once_ : 1));
    }
    for (int64_t s = 0; s < program.state_count; ++s) {
      std::copy_n(states[s], slots_[1 + s].size(), slots_[1 + s].data());
    }
    prepared_.resize(program.instruction_count);
    for (int64_t i = 0; i < program.instruction_count; ++i) {
      if (program.instructions[i].op != kLinear) continue;
      prepare_linear(i);
      find_buffer(i);
    }
  }

  void run() {
    team_.run([this](const Worker& worker) {
      sum_weights(worker);
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
    if (slot == 0) return x_ + first_row(step, block) * program_.slots[0].width + offset;
    const bool behind = program_.slots[slot].once && !by.once;
    const int64_t at = behind ? (backward_ ? block_steps_ - 1 - in_block : in_block) : 0;
    return slots_[slot].data() + at * batch_ * program_.slots[slot].width + offset;
  }

  void execute(const Worker& worker, bool once, int64_t count, int64_t step, int64_t in_block) {
    if (once) set_block(worker, count);
    for (int64_t i = 0; i < program_.instruction_count; ++i) {
      const Instruction& instruction = program_.instructions[i];
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
    const Instruction& by = program_.instructions[index];
    const float* a = rows_of(by, by.a, by.a_offset, step, in_block, count);
    const float* b = by.b < 0 ? a : rows_of(by, by.b, by.b_offset, step, in_block, count);
    const int64_t a_stride = program_.slots[by.a].width;
    const int64_t b_stride = by.b < 0 ? a_stride : program_.slots[by.b].width;
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

  void prepare_linear(int64_t index) {
    const Instruction& by = program_.instructions[index];
    const Weight& weight = program_.weights[by.weight];
    const Grid& grid = constants(index).input;
    const int64_t width = by.segments * by.units;
    Prepared& to = prepared_[index];
    if (by.a == 0 && grid.is_dynamic()) {
      to.segments = split({static_cast<double>(weight.inputs),
                           choose_grid(grid, x_, steps_ * batch_ * weight.inputs)});
    } else if (by.a != 0) {
      to.segments = split({static_cast<double>(weight.inputs), grid});
    } else {
      for (int64_t s = 0; s < program_.input_segment_count; ++s) {
        for (const Segment& part : split(program_.input_segments[s])) to.segments.push_back(part);
      }
    }
    if (!by.once && to.segments[0].grid.scale == 0) floats_are_read_ = true;
    to.row_sums.assign(to.segments.size(), std::vector<int32_t>(width + kLanes));
    to.weight_scales.resize(width + kLanes);
    to.biases.resize(width + kLanes);
    for (int64_t n = 0; n < width; ++n) {
      to.weight_scales[n] =
          weight.scales ? weight.scales[n] : static_cast<float>(constants(index).weight_scale);
      to.biases[n] = weight.bias ? weight.bias[n] : 0.0f;
      to.has_weight_zero_points |= weight_zero_point(index, n) != 0;
    }
  }

  // Linears of the same input on the same grids share its integers: the first of them writes them, all
  // others only read, so that no barrier is needed between two linears.
  void find_buffer(int64_t index) {
    const Instruction& by = program_.instructions[index];
    Prepared& of = prepared_[index];
    for (int64_t i = 0; i < index; ++i) {
      const Instruction& before = program_.instructions[i];
      if (before.op == kLinear && before.a == by.a && prepared_[i].segments == of.segments) {
        of.buffer = prepared_[i].buffer;
        return;
      }
    }
    of.quantizes = true;
    of.buffer = static_cast<int64_t>(integers_.size());
    const int64_t rows = batch_ * (by.once ? steps_at_once_ : 1);
    for (int64_t parity = 0; parity < 2; ++parity) {
      integers_.emplace_back(lines(program_.slots[by.a].width) * rows);
    }
  }

  // Into pieces whose products can be summed up in 32 bits.
  static std::vector<Segment> split(const Segment& whole) {
    std::vector<Segment> parts;
    int64_t left = static_cast<int64_t>(whole.width);
    do {
      const int64_t width = std::min(left, kSummedColumns);
      parts.push_back({static_cast<double>(width), whole.grid});
      left -= width;
    } while (left > 0);
    return parts;
  }

  void sum_weights(const Worker& worker) {
    for (int64_t i = 0; i < program_.instruction_count; ++i) {
      const Instruction& by = program_.instructions[i];
      if (by.op != kLinear) continue;
      const Weight& weight = program_.weights[by.weight];
      for (int64_t n = worker.index; n < by.segments * by.units; n += worker.count) {
        const int8_t* values = weight.values + n * weight.inputs;
        for (size_t s = 0; s < prepared_[i].segments.size(); ++s) {
          const int64_t count = static_cast<int64_t>(prepared_[i].segments[s].width);
          prepared_[i].row_sums[s][n] = std::accumulate(values, values + count, 0);
          values += count;
        }
      }
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
    const Instruction& by = program_.instructions[index];
    const int64_t stride = program_.slots[by.a].width, to_stride = lines(stride) * sizeof(Line);
    int64_t first = 0;
    for (const Segment& part : segments) {
      const int64_t width = static_cast<int64_t>(part.width);
      const Quantizer quantize(part.grid);
      const float shifted = static_cast<float>(shift(part.grid));
      // Rows of x are shared out; a state is read by the thread that wrote it.
      const int64_t units = by.once ? width : program_.slots[by.a].units;
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
            off_grid_[prepared_[index].buffer] = true;
          }
        }
      }
      first += width;
    }
  }

  void linear(const Worker& worker, int64_t index, int64_t count, int64_t step, int64_t in_block) {
    const Instruction& by = program_.instructions[index];
    const int64_t rows = count * batch_, stride = program_.slots[by.a].width;
    const float* x = rows_of(by, by.a, by.a_offset, step, in_block, count);
    const bool is_state = by.a >= 1 && by.a <= program_.state_count;
    const std::vector<Segment>* segments = &prepared_[index].segments;
    std::vector<Segment> chosen;
    if ((*segments)[0].grid.is_dynamic()) {
      team_.barrier();
      chosen = split({static_cast<double>(stride), choose_grid((*segments)[0].grid, x, rows * stride)});
      segments = &chosen;
    }
    const bool on_grids = (*segments)[0].grid.scale != 0;
    uint8_t* integers = reinterpret_cast<uint8_t*>(integers_[prepared_[index].buffer + step % 2].data());
    const int64_t integer_stride = lines(stride) * sizeof(Line);
    // Only the first state may come from elsewhere.
    const bool check = is_state && step == 0 && chosen.empty();
    if (by.once && by.a != 0) team_.barrier();
    if (on_grids && prepared_[index].quantizes) {
      quantize_input(worker, index, *segments, rows, x, integers, check);
    }
    team_.barrier();
    const bool in_floats = !on_grids || (check && off_grid_[prepared_[index].buffer]);
    const Range units = share(by.units, worker.index, worker.count);
    for (int64_t part = 0; part < by.segments; ++part) {
      for (int64_t n = part * by.units + units.begin; n < part * by.units + units.end; n += kLanes) {
        const int64_t lanes = std::min(kLanes, part * by.units + units.end - n);
        for (int64_t row = 0; row < rows; row += kRows) {
          const int64_t tile = std::min(kRows, rows - row);
          float sums[kRows * kLanes];
          if (in_floats) {
            float_tile(index, x + row * stride, stride, n, lanes, tile, sums);
          } else {
            integer_tile(index, *segments, integers + row * integer_stride, integer_stride, n, lanes, tile,
                         sums);
          }
          finish_tile(index, row, n, lanes, tile, sums);
        }
      }
    }
  }

  const Constants& constants(int64_t index) const { return program_.constants[index]; }

  int32_t weight_zero_point(int64_t index, int64_t n) const {
    const Weight& weight = program_.weights[program_.instructions[index].weight];
    return static_cast<int32_t>(weight.zero_points ? weight.zero_points[n]
                                                   : constants(index).weight_zero_point);
  }

  void float_tile(int64_t index, const float* x, int64_t stride, int64_t n, int64_t lanes, int64_t rows,
                  float* sums) const {
    const Weight& weight = program_.weights[program_.instructions[index].weight];
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int8_t* values = weight.values + (n + lane) * weight.inputs;
      const float zero_point = static_cast<float>(weight_zero_point(index, n + lane));
      for (int64_t row = 0; row < rows; ++row) {
        sums[row * kLanes + lane] = prepared_[index].weight_scales[n + lane] *
                                    float_dot_product(x + row * stride, values, zero_point, weight.inputs);
      }
    }
  }

  void integer_tile(int64_t index, const std::vector<Segment>& segments, const uint8_t* x, int64_t stride,
                    int64_t n, int64_t lanes, int64_t rows, float* sums) const {
    const Prepared& prepared = prepared_[index];
    const Weight& weight = program_.weights[program_.instructions[index].weight];
    std::fill_n(sums, rows * kLanes, 0.0f);
    for (size_t s = 0, first = 0; s < segments.size(); ++s) {
      const Segment& part = segments[s];
      const int64_t count = static_cast<int64_t>(part.width);
      int32_t products[kRows * kLanes] = {};
      kDotProducts[rows](x + first, stride, weight.values + n * weight.inputs + first, weight.inputs, lanes,
                         count, products);
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
        products[row * kLanes + lane] -= weight_zero_point(index, n + lane) * sum;
      }
    }
  }

  void finish_tile(int64_t index, int64_t row, int64_t n, int64_t lanes, int64_t rows, float* sums) {
    const Instruction& by = program_.instructions[index];
    const int64_t width = by.segments * by.units;
    const Quantizer quantize(by.quantized ? constants(index).output : kUnused);
    const float* bias = prepared_[index].biases.data() + n;
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
    for (int64_t s = 0; s < program_.state_count; ++s) {
      const int64_t slot = program_.results[s], width = program_.slots[slot].width;
      const int64_t per_segment = program_.slots[1 + s].units;
      const Range units = share(per_segment, worker.index, worker.count);
      for (int64_t row = 0; row < batch_; ++row) {
        for (int64_t from = 0; from < width; from += per_segment) {
          const int64_t at = row * width + from + units.begin, count = units.end - units.begin;
          const float* source = slots_[slot].data() + at;
          std::copy_n(source, count, slots_[1 + s].data() + at);
          if (s == 0) std::copy_n(source, count, output_ + first_row(step, 1) * width + at);
          if (step == steps_ - 1) std::copy_n(source, count, last_[s] + at);
        }
      }
    }
  }

  const Program& program_;
  const int64_t steps_, batch_;
  const bool backward_;
  const float* x_;
  float* output_;
  float* const* last_;
  Team team_;
  bool floats_are_read_ = false;  // by a linear, at every step
  int64_t steps_at_once_ = 1, block_steps_ = 1;
  std::vector<std::vector<float>> slots_;
  std::vector<std::vector<Line>> integers_;  // of a linear's input, of even and of odd steps
  std::vector<Prepared> prepared_;           // of every linear
  std::vector<std::atomic<bool>> off_grid_;  // whether a state came from elsewhere, by buffer
};

}  // namespace

// Returns 0, or 1 where there was no memory.
extern "C" int64_t torchq_compat_run_cell(const int64_t* instructions, const double* constants,
                                       int64_t instruction_count, const int64_t* slots, int64_t slot_count,
                                       const int64_t* results, int64_t state_count,
                                       const void* const* weights, const int64_t* weight_inputs,
                                       int64_t weight_count, const double* input_segments,
                                       int64_t input_segment_count, int64_t steps, int64_t batch,
                                       int64_t backward, const float* x, const float* const* states,
                                       float* output, float* const* last, int64_t threads) try {
  std::vector<Weight> read(weight_count);
  for (int64_t w = 0; w < weight_count; ++w) {
    const void* const* of = weights + 4 * w;
    read[w] = {static_cast<const int8_t*>(of[0]), static_cast<const float*>(of[1]),
               static_cast<const int64_t*>(of[2]), static_cast<const float*>(of[3]), weight_inputs[w]};
  }
  const Slot* shapes = reinterpret_cast<const Slot*>(slots);
  if (steps == 0 || batch == 0) {
    for (int64_t s = 0; s < state_count; ++s) std::copy_n(states[s], batch * shapes[1 + s].width, last[s]);
    return 0;
  }
  const Program program{reinterpret_cast<const Instruction*>(instructions),
                        reinterpret_cast<const Constants*>(constants),
                        instruction_count,
                        shapes,
                        slot_count,
                        results,
                        state_count,
                        read.data(),
                        reinterpret_cast<const Segment*>(input_segments),
                        input_segment_count};
  Loop(program, steps, batch, backward != 0, x, states, output, last, threads).run();
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}
