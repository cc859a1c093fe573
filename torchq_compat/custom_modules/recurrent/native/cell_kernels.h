// What the cell loop asks of an instruction set: tile_kernels.h computes it, once for each of them.

#pragma once

#include <algorithm>
#include <cstdint>

// Output columns computed together; units are shared out in multiples of it.
constexpr int64_t kLanes = 16;
// Vectors of kLanes floats in a segment of a tile: all that a tile holds stays in the first cache.
constexpr int64_t kTileVectors = 16;
// Segments whose products are computed together: so many lines of weights to four of their rows.
constexpr int64_t kColumns = 4;

// instruction_set.py defines these; a test holds the two together.
enum Op : int64_t { kLinear, kAdd, kMul, kComplement, kSigmoid, kTanh, kRelu, kCopy };
constexpr int64_t kOps = 8;

// A negative scale: to be chosen from the values, with -scale as the smallest scale and quant_min to
// zero_point as the integers they are spread over. `nan`: the integer that torch makes of NaN.
struct QParams {
  double scale, zero_point, quant_min, quant_max, nan;

  bool is_dynamic() const { return scale < 0; }
  bool operator==(const QParams& other) const {
    return scale == other.scale && zero_point == other.zero_point && quant_min == other.quant_min &&
           quant_max == other.quant_max && nan == other.nan;
  }
};

// How results are rounded: not at all; to integers that a float's mantissa holds exactly beside a constant,
// where NaN becomes the lowest of them or another one; or to any.
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

// A cache line of integers: a load that crosses two takes twice as long.
struct alignas(64) Line {
  uint8_t integers[64];
};

struct alignas(64) Vector {
  float lanes[kLanes];
};

// Of all values seen, and of zero.
struct alignas(64) Extremes {
  float low = 0, high = 0;
  bool has_nan = false;

  void add(const Extremes& other) {
    low = std::min(low, other.low);
    high = std::max(high, other.high);
    has_nan = has_nan || other.has_nan;
  }
};

// A linear's output columns, kLanes of them: what makes floats of their integer products.
struct ColumnNumbers {
  const int32_t* row_sums;  // of the weight
  const float* scales;      // of the weight
  const float* biases;      // null: further products are to come
  float input_scale;
  int32_t input_zero_point;  // of the integers as the products read them
  bool adds;                 // to what is there already
};

// Arrays of `rows` times kLanes are 64-byte aligned.
struct Kernels {
  const char* name;
  // Products are of x minus this.
  int32_t input_shift;
  // products[c]: of `rows` rows of x with c columns of kLanes lanes; w has for each four of its inputs c
  // lines. out[(c * kTileVectors + row) * kLanes + lane].
  void (*products[kColumns + 1])(const uint8_t* x, int64_t stride, int64_t rows, const Line* w, int64_t quads,
                                 int32_t* out);
  // The same of integers that are no more than 128, and whether `count` of each row are; null where that is
  // no faster.
  void (*narrow_products[kColumns + 1])(const uint8_t* x, int64_t stride, int64_t rows, const Line* w,
                                        int64_t quads, int32_t* out);
  bool (*are_narrow)(const uint8_t* x, int64_t stride, int64_t rows, int64_t count);
  // The same of floats, of one column, of which the lines are `step` apart; x has whole quads.
  void (*float_products)(const float* x, int64_t stride, int64_t rows, const Line* w, int64_t step,
                         int64_t quads, const int32_t* zero_points, float* out);
  void (*finish[kRoundings])(const int32_t* products, int64_t rows, const ColumnNumbers& column, float* to,
                             const Quantizer& quantize);
  void (*finish_floats[kRoundings])(const float* products, int64_t rows, const ColumnNumbers& column,
                                    float* to, const Quantizer& quantize);
  // Of `count` floats, whole vectors of kLanes; of operations with one operand b is not read.
  void (*elementwise[kOps][kRoundings])(const float* a, const float* b, float* to, int64_t count,
                                        const Quantizer& quantize);
  // What a table of 128 or 256 floats has for each of `count` floats, whole vectors of kLanes that lie on
  // `of_a`; its lowest integer has the first place. Null where computing is as fast.
  void (*look_up[2])(const float* table, const float* a, float* to, int64_t count, const Quantizer& of_a);
  // Of any count, at any address.
  void (*requantize)(const Quantizer& quantize, const float* values, int64_t count, float* to);
  bool (*is_on)(const Quantizer& quantize, const float* values, int64_t count);
  // Integers of 8 bits plus `shift`: of rows that are `stride` floats apart, and to_stride integers.
  void (*to_integers)(const Quantizer& quantize, int32_t shift, const float* values, int64_t stride,
                      int64_t rows, int64_t count, uint8_t* to, int64_t to_stride);
  void (*see)(const float* values, int64_t count, Extremes& extremes);
};
