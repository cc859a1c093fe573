// Convolutions of 8-bit integers that sum in 32 bits, in plain C++ and without torch: where oneDNN has only
// instructions that sum products in 16 bits, which saturate, and with VNNI for windows of one value or one
// channel, and large ones of images, where they are faster.

#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace exact {

// Sizes of a convolution over three dimensions; missing ones have size 1. Channels are innermost in memory.
struct Shape {
  int64_t images = 1, groups = 1, inputs = 1, outputs = 1;  // inputs and outputs of a group
  std::array<int64_t, 3> in{1, 1, 1}, out{1, 1, 1}, window{1, 1, 1}, stride{1, 1, 1}, padding{0, 0, 0},
      dilation{1, 1, 1};

  const std::vector<int64_t>* chosen = nullptr;  // the output pixels to compute, by number; null: all

  int64_t taps() const { return window[0] * window[1] * window[2]; }
  int64_t reach(int64_t d) const { return dilation[d] * (window[d] - 1) + 1; }
  int64_t columns() const { return taps() * inputs; }
  int64_t all_pixels() const { return images * out[0] * out[1] * out[2]; }
  int64_t pixels() const { return chosen ? static_cast<int64_t>(chosen->size()) : all_pixels(); }
  bool is_depthwise() const { return inputs == 1 && outputs == 1; }
};

// The bytes of the input, as uint8 after `^ flip`; padding has the value `zero_point`.
struct Input {
  const uint8_t* values;
  uint8_t flip, zero_point;
};

// From sums, which begin with `starts`, to results: sum * input_scale * scale + bias; without `is_float`, times
// `inverse`, plus `zero`, between low and high, rounded to even.
struct Output {
  void* values;
  bool is_float;
  float input_scale;
  const float *scales, *bias;
  const int32_t* starts;
  float inverse, zero, low, high;
};

// A weight (outputs of all groups, inputs, *window), contiguous, as the loops read it. The sums of its outputs
// are in `sums`.
struct Weight {
  std::vector<int8_t> values;
  std::vector<int32_t> sums;
};

Weight pack(const Shape& shape, const int8_t* weight);

// Whether this CPU's instructions make the loops over such windows faster than oneDNN's.
bool is_fastest();

// Adds the output pixels whose window reads the input pixel `index` to `marks`.
void mark_readers(const Shape& shape, int64_t index, std::vector<bool>& marks);

// A convolution is as many tasks, which may run at the same time; `work`: multiply-adds of one.
int64_t task_count(const Shape& shape);
int64_t task_work(const Shape& shape);
void run_tasks(const Shape& shape, const Input& x, const Weight& weight, const Output& out, int64_t begin,
               int64_t end);

}  // namespace exact
