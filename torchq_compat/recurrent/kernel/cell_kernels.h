// The functions that the cell loop needs of each instruction set; tile_kernels.h implements them.

#pragma once

#include <algorithm>
#include <cstdint>

// Output columns computed together; threads divide units in multiples of it.
constexpr int64_t kLanes = 16;
// Vectors of kLanes floats in a segment of a tile: a whole tile stays in the first-level cache.
constexpr int64_t kTileVectors = 16;
// The most segments whose products are computed together.
constexpr int64_t kColumns = 4;

// instruction_set.py defines these, too; a test checks that they agree.
enum Op : int64_t { kLinear, kAdd, kMul, kComplement, kSigmoid, kTanh, kRelu, kCopy };
constexpr int64_t kOps = 8;

// A negative scale means dynamic qparams, chosen from the values: -scale is the smallest scale, and values
// are spread over the integers from quant_min to zero_point. `nan` is the integer that torch makes of NaN.
struct QParams {
  double scale, zero_point, quant_min, quant_max, nan;

  bool is_dynamic() const { return scale < 0; }
  bool operator==(const QParams& other) const {
    return scale == other.scale && zero_point == other.zero_point && quant_min == other.quant_min &&
           quant_max == other.quant_max && nan == other.nan;
  }
};

// How results are rounded: not at all; to integers so small that adding a constant to the float rounds it,
// where NaN becomes the lowest integer or another one; or to integers of any size.
enum Rounding : int64_t { kFloats, kNarrow, kNarrowWithNan, kWide };
constexpr int64_t kRoundings = 4;

struct Quantizer {
  float inverse = 0, scale = 0, zero_point = 0, low = 0, high = 0, nan = 0;
  Rounding rounding = kFloats;

  Quantizer() = default;
  explicit Quantizer(const QParams& qparams)
      : inverse(static_cast<float>(1.0 / qparams.scale)),
        scale(static_cast<float>(qparams.scale)),
        zero_point(static_cast<float>(qparams.zero_point)),
        low(static_cast<float>(qparams.quant_min)),
        high(static_cast<float>(qparams.quant_max)),
        nan(static_cast<float>(qparams.nan)) {
    constexpr float kMost = 1 << 21;
    const bool is_narrow = low - zero_point >= -kMost && high - zero_point <= kMost;
    rounding = !is_narrow ? kWide : nan == low ? kNarrow : kNarrowWithNan;
  }
};

// A cache line of integers: a load that crosses two lines takes twice as long.
struct alignas(64) Line {
  uint8_t integers[64];
};

struct alignas(64) Vector {
  float lanes[kLanes];
};

// The extremes of all values seen, and of zero.
struct alignas(64) Extremes {
  float low = 0, high = 0;
  bool has_nan = false;

  void add(const Extremes& other) {
    low = std::min(low, other.low);
    high = std::max(high, other.high);
    has_nan = has_nan || other.has_nan;
  }
};

// The numbers that turn the integer products of kLanes output columns of a linear into floats.
struct ColumnNumbers {
  const int32_t* row_sums;  // of the weight
  const float* scales;      // of the weight
  const float* biases;      // null: more products will be added
  float input_scale;
  int32_t input_zero_point;  // of the integers as the products read them
  bool adds;                 // whether the result is added to the values already there
};

// Arrays of `rows` times kLanes are 64-byte aligned.
struct Kernels {
  const char* name;
  // Segments whose products are computed together; the weights have so many lines for each four inputs.
  int64_t beside;
  // The products are those of x minus this shift.
  int32_t input_shift;
  // products[c]: the products of `rows` rows of x and c columns of kLanes lanes; w has c lines for each four
  // inputs. A product is at out[(c * kTileVectors + row) * kLanes + lane].
  void (*products[kColumns + 1])(const uint8_t* x, int64_t stride, int64_t rows, const Line* w, int64_t quads,
                                 int32_t* out);
  // The same in two parts, null if that is no faster: of integers that were cut off at 128, and what
  // is above it, for one row and the quads that have any, whose indices find_excess writes; it returns their
  // number.
  void (*narrow_products[kColumns + 1])(const uint8_t* x, int64_t stride, int64_t rows, const Line* w,
                                        int64_t quads, int32_t* out);
  void (*add_excess[kColumns + 1])(const uint8_t* x, const Line* w, const int32_t* quads, int64_t count,
                                   int32_t* out);
  int64_t (*find_excess)(const uint8_t* x, int64_t count, int32_t* quads);
  // The same for floats and one column, whose lines are `step` apart; x has whole quads.
  void (*float_products)(const float* x, int64_t stride, int64_t rows, const Line* w, int64_t step,
                         int64_t quads, const int32_t* zero_points, float* out);
  void (*finish[kRoundings])(const int32_t* products, int64_t rows, const ColumnNumbers& column, float* to,
                             const Quantizer& quantize);
  void (*finish_floats[kRoundings])(const float* products, int64_t rows, const ColumnNumbers& column,
                                    float* to, const Quantizer& quantize);
  // Compute `count` floats, in whole vectors of kLanes; operations with one operand do not read b.
  void (*elementwise[kOps][kRoundings])(const float* a, const float* b, float* to, int64_t count,
                                        const Quantizer& quantize);
  // Look up `count` floats, in whole vectors of kLanes, that are rounded to `of_a`, in a table of 128 or 256
  // floats; the first is that of the lowest integer. Null if computing is as fast.
  void (*look_up[2])(const float* table, const float* a, float* to, int64_t count, const Quantizer& of_a);
  // For any count and any address.
  void (*requantize)(const Quantizer& quantize, const float* values, int64_t count, float* to);
  bool (*is_on)(const Quantizer& quantize, const float* values, int64_t count);
  // Writes 8-bit integers plus `shift`, from rows `stride` floats apart to rows `to_stride` integers apart.
  void (*to_integers)(const Quantizer& quantize, int32_t shift, const float* values, int64_t stride,
                      int64_t rows, int64_t count, uint8_t* to, int64_t to_stride);
  void (*see)(const float* values, int64_t count, Extremes& extremes);
};
