// The operators of lowered graphs on plain 8-bit integers, through torch's stable ABI; lower/integers/operators.py
// says what each computes. Convolutions, and linears of many rows, are oneDNN's, by the operators of torch that
// take plain integers, where its sums are exact and exact_convolution.h's loops are not faster. integer_kernels.h has
// the loops of the others.

#include <algorithm>
#include <cstdlib>
#include <list>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "exact_convolution.h"
#include "integer_kernels.h"

constexpr const char* kOperators = "torchq_compat_native";
#include "operator_chains.h"
#include "stable_tensors.h"

// torch's C functions around oneDNN's operators; the header that has them is not for the stable ABI. A torch
// without oneDNN lacks them.
#if defined(__ELF__)
#define TORCHQ_WEAK __attribute__((weak))
#else
#define TORCHQ_WEAK
#endif
extern "C" {
TORCHQ_WEAK AOTITorchError aoti_torch_cpu__qconv_pointwise_tensor(
    AtenTensorHandle x, AtenTensorHandle scale, AtenTensorHandle zero_point, AtenTensorHandle weight,
    AtenTensorHandle weight_scales, AtenTensorHandle weight_zero_points, AtenTensorHandle* bias,
    const int64_t* stride, int64_t stride_count, const int64_t* padding, int64_t padding_count,
    const int64_t* dilation, int64_t dilation_count, int64_t groups, double output_scale,
    int64_t output_zero_point, const int32_t* output_dtype, const char* after, const double** numbers,
    int64_t number_count, const char** algorithm, AtenTensorHandle* result);
TORCHQ_WEAK AOTITorchError aoti_torch_cpu_add_Tensor(AtenTensorHandle x, AtenTensorHandle y, double alpha,
                                                   AtenTensorHandle* result);
TORCHQ_WEAK AOTITorchError aoti_torch_cpu__qlinear_pointwise_tensor(
    AtenTensorHandle x, AtenTensorHandle scale, AtenTensorHandle zero_point, AtenTensorHandle weight,
    AtenTensorHandle weight_scales, AtenTensorHandle weight_zero_points, AtenTensorHandle* bias,
    double output_scale, int64_t output_zero_point, const int32_t* output_dtype, const char* after,
    const double** numbers, int64_t number_count, const char* algorithm, AtenTensorHandle* result);
}

namespace {

using integers::Rounding;
using integers::Scaling;
using Sizes = std::vector<int64_t>;

// Work of one thread, in values.
constexpr int64_t kGrain = 1 << 16;
// The most packed weights kept; those of a dropped model are forgotten before.
constexpr size_t kKeptWeights = 4096, kKeptOfWeight = 4;
// Among the settings of packed weights: they are for the own loops.
constexpr double kIsExact = -1.0;
// Linears of so many products at most take less time in the own loops than in oneDNN's.
constexpr int64_t kMostOwnProducts = 5 << 24;
// Linears of up to so many rows are products of each row by itself, which need no packed weights.
constexpr int64_t kFewRows = 12;

bool is_signed(const Tensor& x) {
  check(x.scalar_type() == ScalarType::Byte || x.scalar_type() == ScalarType::Char,
        "integers of torch.uint8 or torch.int8 are needed");
  check(x.is_cpu(), "a tensor is not on the CPU");
  return x.scalar_type() == ScalarType::Char;
}

uint8_t flip_of(const Tensor& x) { return is_signed(x) ? integers::kFlip : 0; }

Scaling scaling(const Tensor& x, double scale, int64_t zero_point) {
  const uint8_t flip = flip_of(x);
  return {static_cast<float>(zero_point + flip), static_cast<float>(scale), flip};
}

Rounding rounding(double scale, int64_t zero_point, int64_t low, int64_t high) {
  return {static_cast<float>(1.0 / scale), static_cast<float>(zero_point), static_cast<float>(low),
          static_cast<float>(high)};
}

ScalarType integers_of(bool is_signed) { return is_signed ? ScalarType::Char : ScalarType::Byte; }
const uint8_t* bytes(const Tensor& x) { return static_cast<const uint8_t*>(x.const_data_ptr()); }
uint8_t* new_bytes(const Tensor& x) { return static_cast<uint8_t*>(x.mutable_data_ptr()); }
Sizes sizes_of(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

Tensor empty_strided(const Sizes& sizes, const Sizes& strides, ScalarType dtype) {
  const int32_t code = dtype == ScalarType::Float  ? aoti_torch_dtype_float32()
                       : dtype == ScalarType::Char ? aoti_torch_dtype_int8()
                                                   : aoti_torch_dtype_uint8();
  AtenTensorHandle made = nullptr;
  check_call_of_torch(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                               strides.data(), code, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

// The strides of sizes whose dimensions lie in memory in `order`, the last one innermost.
Sizes strides_in(const Sizes& sizes, const std::vector<size_t>& order) {
  Sizes strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0; stride *= std::max<int64_t>(1, sizes[order[i]])) {
    strides[order[i]] = stride;
  }
  return strides;
}

std::vector<size_t> in_order(size_t count) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

// The dimensions of x from the outermost to the innermost, if its values are dense in memory; else none.
std::optional<std::vector<size_t>> dense_order(const Tensor& x) {
  std::vector<size_t> order = in_order(x.dim());
  if (x.is_contiguous()) return order;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return x.stride(a) > x.stride(b); });
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    if (x.size(order[i]) == 1) continue;
    if (x.stride(order[i]) != stride) return std::nullopt;
    stride *= x.size(order[i]);
  }
  return order;
}

// x, or a copy of it without gaps.
Tensor dense(const Tensor& x) { return dense_order(x) ? x : torch::stable::contiguous(x); }

Tensor like(const Tensor& x, ScalarType dtype) {
  return empty_strided(sizes_of(x), strides_in(sizes_of(x), *dense_order(x)), dtype);
}

Tensor permuted(const Tensor& x, const Sizes& permutation) {
  return call("aten::permute", "", x, permutation);
}

// Runs `f(begin, end)` over `count` values, on more threads if there are many.
template <typename F>
void over(int64_t count, int64_t grain, const F& f) {
  if (count <= grain) {
    if (count > 0) f(0, count);
  } else {
    torch::stable::parallel_for(0, count, grain, f);
  }
}

Tensor quantize(const Tensor& given, double scale, int64_t zero_point, int64_t low, int64_t high,
                bool is_signed) {
  const Tensor floats =
      given.scalar_type() == ScalarType::Float ? given : torch::stable::to(given, ScalarType::Float);
  const Tensor x = dense(floats), out = like(x, integers_of(is_signed));
  const Rounding to = rounding(scale, zero_point, low, high);
  const float* from = static_cast<const float*>(x.const_data_ptr());
  uint8_t* into = new_bytes(out);
  over(x.numel(), kGrain, [&](int64_t begin, int64_t end) {
    integers::quantize(from + begin, end - begin, to, into + begin);
  });
  return out;
}

Tensor dequantize(const Tensor& given, double scale, int64_t zero_point) {
  const Scaling of = scaling(given, scale, zero_point);
  const Tensor x = dense(given), out = like(x, ScalarType::Float);
  float* into = static_cast<float*>(out.mutable_data_ptr());
  const uint8_t* from = bytes(x);
  over(x.numel(), kGrain, [&](int64_t begin, int64_t end) {
    integers::dequantize(from + begin, end - begin, of, into + begin);
  });
  return out;
}

// A table for each index along `axis`: the values inside of the axis in memory, or the axis itself, are a row.
void look_up_by_channel(const Tensor& x, const std::vector<size_t>& order, const uint8_t* tables,
                        int64_t axis, uint8_t* out) {
  int64_t inner = 1;
  for (size_t i = order.size(); order[--i] != static_cast<size_t>(axis);) inner *= x.size(order[i]);
  const int64_t channels = x.size(axis), rows = x.numel() / std::max<int64_t>(1, inner);
  const uint8_t* from = bytes(x);
  over(rows, std::max<int64_t>(1, kGrain / inner), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint8_t* table = tables + 256 * (row % channels);
      if (inner == 1) {
        out[row] = table[from[row]];
      } else {
        integers::look_up(from + row * inner, inner, table, out + row * inner);
      }
    }
  });
}

Tensor lookup(const Tensor& given, const Tensor& table, int64_t axis) {
  is_signed(given);
  const bool of_channels = table.dim() == 2;
  axis = axis < 0 ? axis + given.dim() : axis;
  check(table.is_contiguous() && table.size(table.dim() - 1) == 256 &&
            (!of_channels || (axis < given.dim() && table.size(0) == given.size(axis))),
        "a table has 256 entries, for each index along the axis");
  const ScalarType dtype = is_signed(table) ? ScalarType::Char : ScalarType::Byte;
  const Tensor x = dense(given), out = like(x, dtype);
  const uint8_t *from = bytes(x), *entries = bytes(table);
  uint8_t* into = new_bytes(out);
  if (of_channels && x.numel() > 0) {
    look_up_by_channel(x, *dense_order(x), entries, axis, into);
  } else {
    over(x.numel(), kGrain, [&](int64_t begin, int64_t end) {
      integers::look_up(from + begin, end - begin, entries, into + begin);
    });
  }
  return out;
}

using Pairs = void (*)(const uint8_t*, const uint8_t*, int64_t, Scaling, Scaling, Rounding, uint8_t*);
using PairsOfOne = void (*)(const uint8_t*, float, int64_t, Scaling, Rounding, uint8_t*);

struct Operation {
  const char* name;
  Pairs pairs;
  PairsOfOne of_one;
};

const Operation& operation_of(const std::string& name) {
  static const Operation kOperations[] = {{"add", integers::add, integers::add_one},
                                          {"sub", integers::sub, integers::sub_one},
                                          {"mul", integers::mul, integers::mul_one},
                                          {"div", integers::div, integers::div_one},
                                          {"maximum", integers::maximum, integers::maximum_one},
                                          {"minimum", integers::minimum, integers::minimum_one}};
  for (const Operation& each : kOperations) {
    if (name == each.name) return each;
  }
  refuse("there is no operation " + name);
}

Sizes broadcast(const Tensor& x, const Tensor& y) {
  Sizes sizes(std::max(x.dim(), y.dim()));
  for (size_t d = 0; d < sizes.size(); ++d) {
    const int64_t i = x.dim() - static_cast<int64_t>(sizes.size() - d), j = i + y.dim() - x.dim();
    const int64_t a = i < 0 ? 1 : x.size(i), b = j < 0 ? 1 : y.size(j);
    check(a == b || a == 1 || b == 1, "two sizes do not fit each other");
    sizes[d] = a == 1 ? b : a;
  }
  return sizes;
}

// The strides of x in a result of `sizes`, 0 where x is repeated.
Sizes strides_as(const Tensor& x, const Sizes& sizes) {
  Sizes strides(sizes.size());
  for (size_t d = 0; d < sizes.size(); ++d) {
    const int64_t i = x.dim() - static_cast<int64_t>(sizes.size() - d);
    strides[d] = i < 0 || x.size(i) == 1 ? 0 : x.stride(i);
  }
  return strides;
}

// One dimension of a loop over a result without gaps, and the strides of both operands.
struct Level {
  int64_t size, x, y;
};

// The dimensions of the loop, outermost first; those that lie behind one another in all operands are one.
std::vector<Level> levels_of(const Sizes& sizes, const std::vector<size_t>& order, const Sizes& x,
                             const Sizes& y) {
  std::vector<Level> levels;
  for (const size_t d : order) {
    if (sizes[d] == 1) continue;
    const Level level{sizes[d], x[d], y[d]};
    if (!levels.empty() && levels.back().x == level.x * level.size &&
        levels.back().y == level.y * level.size) {
      levels.back() = {levels.back().size * level.size, level.x, level.y};
    } else {
      levels.push_back(level);
    }
  }
  if (levels.empty()) levels.push_back({1, 1, 1});
  return levels;
}

// One row of the result: operands without gaps, one value for all, or gathered first.
void pair_row(const Operation& operation, const uint8_t* x, const uint8_t* y, const Level& level, Scaling of_x,
              Scaling of_y, Rounding to, uint8_t* out, std::vector<uint8_t>& gathered) {
  const int64_t count = level.size;
  gathered.resize(2 * count);
  if (level.x != 1) {
    for (int64_t i = 0; i < count; ++i) gathered[i] = x[i * level.x];
    x = gathered.data();
  }
  if (level.y == 0) {
    operation.of_one(x, integers::dequantized(*y, of_y), count, of_x, to, out);
    return;
  }
  if (level.y != 1) {
    for (int64_t i = 0; i < count; ++i) gathered[count + i] = y[i * level.y];
    y = gathered.data() + count;
  }
  operation.pairs(x, y, count, of_x, of_y, to, out);
}

Tensor arithmetic(const Tensor& given_x, double x_scale, int64_t x_zero_point, const Tensor& given_y,
                  double y_scale, int64_t y_zero_point, const std::string& name, double scale,
                  int64_t zero_point, int64_t low, int64_t high, bool is_signed) {
  const Scaling of_x = scaling(given_x, x_scale, x_zero_point), of_y = scaling(given_y, y_scale, y_zero_point);
  const Rounding to = rounding(scale, zero_point, low, high);
  const Operation& operation = operation_of(name);
  const Tensor x = dense(given_x), y = dense(given_y);
  const Sizes sizes = broadcast(x, y);
  const auto order = sizes == sizes_of(x)   ? *dense_order(x)
                     : sizes == sizes_of(y) ? *dense_order(y)
                                            : in_order(sizes.size());
  const Tensor out = empty_strided(sizes, strides_in(sizes, order), integers_of(is_signed));
  const uint8_t *from_x = bytes(x), *from_y = bytes(y);
  uint8_t* into = new_bytes(out);
  const std::vector<Level> levels = levels_of(sizes, order, strides_as(x, sizes), strides_as(y, sizes));
  if (out.numel() == 0) return out;
  if (levels.size() == 1 && levels[0].x == 1 && levels[0].y == 1) {
    over(out.numel(), kGrain, [&](int64_t begin, int64_t end) {
      operation.pairs(from_x + begin, from_y + begin, end - begin, of_x, of_y, to, into + begin);
    });
    return out;
  }
  const Level inner = levels.back();
  over(out.numel() / inner.size, std::max<int64_t>(1, kGrain / inner.size), [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> gathered;
    for (int64_t row = begin; row < end; ++row) {
      int64_t rest = row, at_x = 0, at_y = 0;
      for (size_t l = levels.size() - 1; l-- > 0; rest /= levels[l].size) {
        at_x += rest % levels[l].size * levels[l].x;
        at_y += rest % levels[l].size * levels[l].y;
      }
      pair_row(operation, from_x + at_x, from_y + at_y, inner, of_x, of_y, to, into + row * inner.size,
               gathered);
    }
  });
  return out;
}

// x * weight + offset, with a number of each for each index along `axis`.
Tensor affine(const Tensor& given, double x_scale, int64_t x_zero_point, const Tensor& weight,
              const Tensor& offset, int64_t axis, double scale, int64_t zero_point, int64_t low, int64_t high,
              bool is_signed) {
  const Scaling of = scaling(given, x_scale, x_zero_point);
  const Rounding to = rounding(scale, zero_point, low, high);
  axis = axis < 0 ? axis + given.dim() : axis;
  check(axis >= 0 && axis < given.dim(), "there is no such axis");
  for (const Tensor* each : {&weight, &offset}) {
    check(each->scalar_type() == ScalarType::Float && each->is_contiguous() && each->numel() == given.size(axis),
          "a factor and an offset of torch.float32 are needed for each index along the axis");
  }
  const Tensor x = dense(given), out = like(x, integers_of(is_signed));
  if (x.numel() == 0) return out;
  const auto order = *dense_order(x);
  int64_t inner = 1;
  for (size_t i = order.size(); order[--i] != static_cast<size_t>(axis);) inner *= x.size(order[i]);
  const int64_t channels = x.size(axis), row = inner == 1 ? channels : inner;
  const auto *factors = static_cast<const float*>(weight.const_data_ptr()),
             *offsets = static_cast<const float*>(offset.const_data_ptr());
  const uint8_t* from = bytes(x);
  uint8_t* into = new_bytes(out);
  over(x.numel() / row, std::max<int64_t>(1, kGrain / row), [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      if (inner == 1) {
        integers::affine_columns(from + at * row, row, of, factors, offsets, to, into + at * row);
      } else {
        const int64_t channel = at % channels;
        integers::affine(from + at * row, row, of, factors[channel], offsets[channel], to, into + at * row);
      }
    }
  });
  return out;
}

// Dimensions as (planes, reduced, columns): the mean of each plane's column.
struct Means {
  int64_t planes, reduced, columns;
};

// How memory without gaps is read if the reduced dimensions lie behind one another; else none.
std::optional<Means> means_of(const Tensor& x, const std::vector<size_t>& order,
                              const std::vector<bool>& is_reduced) {
  Means means{1, 1, 1};
  int part = 0;  // Planes, then the reduced dimensions, then columns.
  for (const size_t d : order) {
    if (x.size(d) == 1) continue;
    if (is_reduced[d] && part == 0) part = 1;
    if (!is_reduced[d] && part == 1) part = 2;
    if (is_reduced[d] && part == 2) return std::nullopt;
    (part == 0 ? means.planes : part == 1 ? means.reduced : means.columns) *= x.size(d);
  }
  return means;
}

void mean_rows(const uint8_t* x, const Means& means, Scaling of, Rounding to, uint8_t* out) {
  const double zero = static_cast<double>(means.reduced) * of.zero_point,
               each = static_cast<double>(of.scale) / static_cast<double>(means.reduced);
  const int64_t values = means.reduced * means.columns;
  over(means.planes, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, values)), [&](int64_t begin, int64_t end) {
    std::vector<int32_t> sums(means.columns);
    for (int64_t plane = begin; plane < end; ++plane) {
      const uint8_t* from = x + plane * values;
      if (means.columns == 1) {
        sums[0] = static_cast<int32_t>(integers::sum(from, means.reduced, of.flip));
      } else {
        std::fill(sums.begin(), sums.end(), 0);
        for (int64_t r = 0; r < means.reduced; ++r)
          integers::sum_rows(from + r * means.columns, means.columns, of.flip, sums.data());
      }
      for (int64_t c = 0; c < means.columns; ++c) {
        out[plane * means.columns + c] =
            integers::quantized(static_cast<float>((sums[c] - zero) * each), to);
      }
    }
  });
}

Tensor mean(const Tensor& given, double x_scale, int64_t x_zero_point, const Sizes& dims, bool keepdim,
            double scale, int64_t zero_point, int64_t low, int64_t high, bool is_signed) {
  const Scaling of = scaling(given, x_scale, x_zero_point);
  std::vector<bool> is_reduced(given.dim(), dims.empty());
  for (const int64_t dim : dims) is_reduced.at(dim < 0 ? dim + given.dim() : dim) = true;
  Tensor x = dense(given);
  auto order = *dense_order(x);
  auto means = means_of(x, order, is_reduced);
  Sizes kept, result;
  // The kept dimensions have to lie in memory in their own order, or the result would be permuted.
  const auto is_sorted = [&] {
    size_t last = 0;
    for (const size_t d : order) {
      if (is_reduced[d] || x.size(d) == 1) continue;
      if (d < last) return false;
      last = d;
    }
    return true;
  };
  if (!means || !is_sorted()) {
    Sizes permutation;
    for (int64_t reduced = 0; reduced < 2; ++reduced) {
      for (int64_t d = 0; d < given.dim(); ++d) {
        if (is_reduced[d] == (reduced == 1)) permutation.push_back(d);
      }
    }
    x = torch::stable::contiguous(permuted(given, permutation));
    means = Means{1, 1, 1};
    for (int64_t d = 0; d < given.dim(); ++d)
      (is_reduced[permutation[d]] ? means->reduced : means->planes) *= x.size(d);
  }
  for (int64_t d = 0; d < given.dim(); ++d) {
    if (!is_reduced[d]) result.push_back(given.size(d));
    if (is_reduced[d] && keepdim) result.push_back(1);
  }
  const Tensor out = empty_strided(result, strides_in(result, in_order(result.size())), integers_of(is_signed));
  if (out.numel() > 0) mean_rows(bytes(x), *means, of, rounding(scale, zero_point, low, high), new_bytes(out));
  return out;
}

// A pool over up to three dimensions; missing ones have size 1.
struct Pool {
  std::array<int64_t, 3> in{1, 1, 1}, out{1, 1, 1}, window{1, 1, 1}, stride{1, 1, 1}, padding{0, 0, 0},
      dilation{1, 1, 1};

  // The places of the input in the window of `to` along d.
  std::pair<int64_t, int64_t> places(size_t d, int64_t to) const {
    int64_t first = to * stride[d] - padding[d];
    const int64_t end = std::min(first + (window[d] - 1) * dilation[d] + 1, in[d]);
    while (first < 0) first += dilation[d];
    return {first, end};
  }
};

int64_t pooled(const Pool& pool, size_t d, bool ceil_mode) {
  const int64_t room =
      pool.in[d] + 2 * pool.padding[d] - pool.dilation[d] * (pool.window[d] - 1) - 1;
  int64_t count = (room + (ceil_mode ? pool.stride[d] - 1 : 0)) / pool.stride[d] + 1;
  if (ceil_mode && (count - 1) * pool.stride[d] >= pool.in[d] + pool.padding[d]) --count;
  check(room >= 0 && count > 0, "a pool's window is larger than its input");
  return count;
}

// The maxima of `columns` values that lie side by side at each place.
void pool_rows(const Pool& pool, const uint8_t* x, int64_t columns, uint8_t flip, int64_t depth, int64_t height,
               uint8_t* out) {
  const auto [d0, d1] = pool.places(0, depth);
  const auto [h0, h1] = pool.places(1, height);
  std::vector<const uint8_t*> places(pool.window[0] * pool.window[1] * pool.window[2]);
  for (int64_t width = 0; width < pool.out[2]; ++width) {
    const auto [w0, w1] = pool.places(2, width);
    int64_t count = 0;
    for (int64_t d = d0; d < d1; d += pool.dilation[0])
      for (int64_t h = h0; h < h1; h += pool.dilation[1])
        for (int64_t w = w0; w < w1; w += pool.dilation[2])
          places[count++] = x + ((d * pool.in[1] + h) * pool.in[2] + w) * columns;
    integers::most(places.data(), count, columns, flip, out + width * columns);
  }
}

void run_pool(const Pool& pool, const uint8_t* x, int64_t images, int64_t columns, uint8_t flip, uint8_t* out) {
  const int64_t in = pool.in[0] * pool.in[1] * pool.in[2] * columns;
  const int64_t row = pool.out[2] * columns, rows = pool.out[0] * pool.out[1];
  const int64_t work = std::max<int64_t>(1, row * pool.window[0] * pool.window[1] * pool.window[2]);
  over(images * rows, std::max<int64_t>(1, 4 * kGrain / work), [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t image = at / rows, depth = at % rows / pool.out[1], height = at % pool.out[1];
      pool_rows(pool, x + image * in, columns, flip, depth, height, out + at * row);
    }
  });
}

Tensor max_pool(const Tensor& given, const Sizes& window, const Sizes& stride, const Sizes& padding,
                const Sizes& dilation, bool ceil_mode) {
  const uint8_t flip = flip_of(given);
  const auto count = static_cast<int64_t>(window.size());
  check(count >= 1 && count <= 3 && given.dim() >= count + 1 && given.dim() <= count + 2,
        "a pool has 1 to 3 dimensions, behind channels");
  Pool pool;
  Sizes result = sizes_of(given);
  for (int64_t i = 0; i < count; ++i) {
    const size_t d = 3 - count + i;
    pool.in[d] = given.size(given.dim() - count + i);
    pool.window[d] = window[i], pool.stride[d] = stride[i];
    pool.padding[d] = padding[i], pool.dilation[d] = dilation[i];
    pool.out[d] = pooled(pool, d, ceil_mode);
    result[given.dim() - count + i] = pool.out[d];
  }
  const Tensor x = dense(given);
  std::vector<size_t> channels_last = in_order(given.dim());
  const bool is_batched = given.dim() == count + 2;
  std::rotate(channels_last.begin() + is_batched, channels_last.begin() + is_batched + 1, channels_last.end());
  const bool is_last = !x.is_contiguous() && strides_in(sizes_of(x), channels_last) ==
                                                 Sizes(x.strides().begin(), x.strides().end());
  const Tensor plain = is_last || x.is_contiguous() ? x : torch::stable::contiguous(x);
  const auto order = is_last ? channels_last : in_order(given.dim());
  const Tensor out = empty_strided(result, strides_in(result, order), given.scalar_type());
  const int64_t channels = given.size(is_batched), batch = is_batched ? given.size(0) : 1;
  if (out.numel() > 0) {
    run_pool(pool, bytes(plain), is_last ? batch : batch * channels, is_last ? channels : 1, flip, new_bytes(out));
  }
  return out;
}

// A weight packed by oneDNN, and what its operators take beside it; or packed for the own loops.
struct Packed {
  std::vector<Key> keys;
  std::vector<double> settings;  // what it was packed for
  Tensor weight, packed, scale, zero_point, weight_zero_points;
  std::optional<Tensor> bias;
  exact::Weight exact{};  // in place of `packed`

  bool fits(const Tensor& given, const Tensor& scales, const std::optional<Tensor>& offsets) const {
    return keys.size() == 2 + offsets.has_value() && keys[0].fits(given, true) && keys[1].fits(scales, true) &&
           (!offsets || keys[2].fits(*offsets, true));
  }
};

// Packed weights by the address of the weight. They hold the weight, so that no other tensor gets its address.
class PackedWeights {
 public:
  using Entries = std::list<std::shared_ptr<const Packed>>;

  template <typename F>
  std::shared_ptr<const Packed> find(const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                                     const std::vector<double>& settings, const F& pack) {
    const void* address = weight.const_data_ptr();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto of_weight = entries_.find(address);
      if (of_weight != entries_.end()) {
        for (const auto& each : of_weight->second) {
          if (each->settings == settings && each->fits(weight, scales, bias)) return each;
        }
      }
    }
    auto made = std::make_shared<const Packed>(pack());
    const std::lock_guard<std::mutex> lock(mutex_);
    if (entries_.find(address) == entries_.end()) {
      if (order_.size() >= kKeptWeights) {
        entries_.erase(order_.front());
        order_.pop_front();
      }
      order_.push_back(address);
    }
    Entries& of_weight = entries_[address];
    // Those made before the weight was written are of no use, and not more than a few for other input sizes.
    of_weight.remove_if([&](const auto& each) { return !each->fits(weight, scales, bias); });
    of_weight.push_front(made);
    if (of_weight.size() > kKeptOfWeight) of_weight.pop_back();
    return made;
  }

  void forget(const void* address) {
    Entries dropped;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(address);
    if (found == entries_.end()) return;
    dropped.swap(found->second);
    entries_.erase(found);
    order_.remove(address);
  }

  int64_t size() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(order_.size());
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, Entries> entries_;
  std::list<const void*> order_;
};

// Never destroyed: at the end of the process torch, whose tensors it holds, may be gone already.
PackedWeights& packed_weights() {
  static PackedWeights* const weights = new PackedWeights;
  return *weights;
}

template <typename T>
Tensor one(T value, ScalarType dtype) {
  std::array<int64_t, 1> size{1}, stride{1};
  AtenTensorHandle made = nullptr;
  const int32_t code = dtype == ScalarType::Float ? aoti_torch_dtype_float32() : aoti_torch_dtype_int32();
  check_call_of_torch(aoti_torch_empty_strided(1, size.data(), stride.data(), code,
                                               aoti_torch_device_type_cpu(), 0, &made));
  Tensor tensor(made);
  *static_cast<T*>(tensor.mutable_data_ptr()) = value;
  return tensor;
}

Tensor zeros(int64_t count) {
  std::array<int64_t, 1> size{count}, stride{1};
  AtenTensorHandle made = nullptr;
  check_call_of_torch(aoti_torch_empty_strided(1, size.data(), stride.data(), aoti_torch_dtype_int64(),
                                               aoti_torch_device_type_cpu(), 0, &made));
  Tensor tensor(made);
  std::memset(tensor.mutable_data_ptr(), 0, count * sizeof(int64_t));
  return tensor;
}

// The result of a kernel of oneDNN: its qparams, or floats.
struct Ends {
  double scale;
  int64_t zero_point, low, high;
  ScalarType dtype;
  bool takes_relu = true;  // oneDNN's kernel

  Ends(double scale_, int64_t zero_point_, int64_t low_, int64_t high_, const std::string& kind)
      : scale(scale_), zero_point(zero_point_), low(low_), high(high_), dtype(ScalarType::Float) {
    check(kind == "float32" || kind == "uint8" || kind == "int8", "there is no result of " + kind);
    if (kind != "float32") dtype = kind == "int8" ? ScalarType::Char : ScalarType::Byte;
  }

  bool is_float() const { return dtype == ScalarType::Float; }
  int64_t least() const { return dtype == ScalarType::Char ? -128 : 0; }
  bool has_relu() const { return takes_relu && !is_float() && low == zero_point && low > least(); }
  int32_t code() const {
    return is_float()                      ? aoti_torch_dtype_float32()
           : dtype == ScalarType::Char ? aoti_torch_dtype_int8()
                                       : aoti_torch_dtype_uint8();
  }
  bool saturates() const {
    return is_float() || ((low == least() || has_relu()) && high == least() + 255);
  }
};

Tensor within(const Tensor& result, const Ends& ends) {
  if (ends.saturates()) return result;
  const uint8_t flip = ends.dtype == ScalarType::Char ? integers::kFlip : 0;
  uint8_t* values = new_bytes(result);
  const auto low = static_cast<uint8_t>(ends.low + flip), high = static_cast<uint8_t>(ends.high + flip);
  over(result.numel(), kGrain, [&](int64_t begin, int64_t end) {
    integers::clamp(values + begin, end - begin, flip, low, high);
  });
  return result;
}

void check_weight(const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias) {
  check(weight.is_cpu() && weight.scalar_type() == ScalarType::Char && weight.dim() >= 2, "a weight is of torch.int8");
  check(scales.scalar_type() == ScalarType::Float && scales.is_contiguous() && scales.numel() == weight.size(0),
        "a weight has a scale of torch.float32 for each output");
  check(!bias || (bias->scalar_type() == ScalarType::Float && bias->is_contiguous() &&
                  bias->numel() == weight.size(0)),
        "a bias has a number of torch.float32 for each output");
}

AtenTensorHandle* handle_of(const std::optional<Tensor>& bias, AtenTensorHandle& place) {
  if (!bias) return nullptr;
  place = bias->get();
  return &place;
}

// Keys of what a packed weight was made of: the weight, its scales and its bias.
std::vector<Key> keys_of(const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias) {
  std::vector<Key> keys{Key::of(weight), Key::of(scales)};
  if (bias) keys.push_back(Key::of(*bias));
  return keys;
}

// The bias of a linear or a convolution whose input has its zero point taken out:
// sum((x - z) * w) = sum(x * w) - z * sum(w).
Tensor bias_without_zero_point(const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                               double x_scale, int64_t x_zero_point) {
  const int64_t outputs = weight.size(0), columns = weight.numel() / std::max<int64_t>(1, outputs);
  const std::array<int64_t, 1> size{outputs};
  Tensor made = empty({size.data(), 1}, ScalarType::Float);
  auto* values = static_cast<float*>(made.mutable_data_ptr());
  const auto* integers = static_cast<const int8_t*>(weight.const_data_ptr());
  const auto* each = static_cast<const float*>(scales.const_data_ptr());
  for (int64_t o = 0; o < outputs; ++o) {
    const int64_t sum = std::accumulate(integers + o * columns, integers + (o + 1) * columns, int64_t{0});
    const double given = bias ? static_cast<const float*>(bias->const_data_ptr())[o] : 0.0;
    values[o] = static_cast<float>(given - x_scale * each[o] * static_cast<double>(x_zero_point * sum));
  }
  return made;
}

// What a convolution computes beside its input and weight.
struct Window {
  const Sizes &stride, &padding, &dilation;
  int64_t groups;

  bool pads() const {
    return std::any_of(padding.begin(), padding.end(), [](int64_t each) { return each != 0; });
  }
};

Packed pack_convolution(const Tensor& x, const Tensor& weight, const Tensor& scales,
                        const std::optional<Tensor>& bias, double x_scale, int64_t x_zero_point,
                        const Window& window, bool takes_out, const std::vector<double>& settings) {
  const Tensor held = call("aten::detach", "", weight);
  const Tensor plain = torch::stable::contiguous(held);
  const std::optional<Sizes> shape(sizes_of(x));
  const int64_t zero_point = takes_out ? 0 : x_zero_point;
  return {keys_of(weight, scales, bias),
          settings,
          held,
          call("onednn::qconv_prepack", "", plain, scales, x_scale, zero_point, window.stride, window.padding,
               window.dilation, window.groups, shape),
          one(static_cast<float>(x_scale), ScalarType::Float),
          one(static_cast<int32_t>(zero_point), ScalarType::Int),
          zeros(weight.size(0)),
          takes_out ? std::optional(bias_without_zero_point(plain, scales, bias, x_scale, x_zero_point)) : bias};
}

// The integers of int8 as uint8, which are larger by 128: oneDNN's convolutions take no others.
Tensor unsigned_of(const Tensor& given) {
  if (!is_signed(given)) return given;
  const Tensor x = dense(given), out = like(x, ScalarType::Byte);
  const uint8_t* from = bytes(x);
  uint8_t* into = new_bytes(out);
  over(x.numel(), kGrain, [&](int64_t begin, int64_t end) {
    std::copy(from + begin, from + end, into + begin);
    integers::flipped(into + begin, end - begin);
  });
  return out;
}

bool is_channels_last(const Tensor& x) {
  std::vector<size_t> channels_last = in_order(x.dim());
  std::rotate(channels_last.begin() + 1, channels_last.begin() + 2, channels_last.end());
  return strides_in(sizes_of(x), channels_last) == Sizes(x.strides().begin(), x.strides().end());
}

// x, channels innermost, with `value` around it.
Tensor padded(const Tensor& x, const Sizes& padding, uint8_t value) {
  const Tensor from = dense(x);
  Sizes sizes = sizes_of(x);
  std::array<int64_t, 3> in{1, 1, 1}, around{0, 0, 0};
  for (size_t d = 0; d < padding.size(); ++d) {
    in[3 - padding.size() + d] = sizes[2 + d];
    around[3 - padding.size() + d] = padding[d];
    sizes[2 + d] += 2 * padding[d];
  }
  const auto order = *dense_order(from);
  const bool is_last = order.back() == 1;
  const Tensor out = empty_strided(sizes, strides_in(sizes, order), ScalarType::Byte);
  const int64_t channels = is_last ? x.size(1) : 1, images = is_last ? x.size(0) : x.size(0) * x.size(1);
  const int64_t row = in[2] * channels, wide = (in[2] + 2 * around[2]) * channels;
  const int64_t high = in[1] + 2 * around[1], deep = in[0] + 2 * around[0];
  const uint8_t* read = bytes(from);
  uint8_t* written = new_bytes(out);
  over(images * deep * high, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, wide)), [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t image = at / (deep * high), d = at / high % deep - around[0], h = at % high - around[1];
      uint8_t* to = written + at * wide;
      if (d < 0 || d >= in[0] || h < 0 || h >= in[1]) {
        std::fill_n(to, wide, value);
        continue;
      }
      std::fill_n(to, around[2] * channels, value);
      std::copy_n(read + ((image * in[0] + d) * in[1] + h) * row, row, to + around[2] * channels);
      std::fill_n(to + around[2] * channels + row, around[2] * channels, value);
    }
  });
  return out;
}

Sizes sizes_of_convolution(const Tensor& x, const Tensor& weight, const Sizes& stride, const Sizes& padding,
                           const Sizes& dilation) {
  Sizes sizes{x.size(0), weight.size(0)};
  for (int64_t d = 0; d < weight.dim() - 2; ++d) {
    const int64_t reach = dilation[d] * (weight.size(d + 2) - 1) + 1;
    const int64_t room = x.size(d + 2) + 2 * padding[d] - reach;
    sizes.push_back(room < 0 ? 0 : room / stride[d] + 1);
  }
  return sizes;
}

Tensor empty_convolution(const Sizes& sizes, ScalarType dtype) {
  std::vector<size_t> channels_last = in_order(sizes.size());
  std::rotate(channels_last.begin() + 1, channels_last.begin() + 2, channels_last.end());
  return empty_strided(sizes, strides_in(sizes, channels_last), dtype);
}

// x of few channels with these innermost in memory; torch takes longer for it.
Tensor interleaved(const Tensor& x) {
  const Tensor out = empty_convolution(sizes_of(x), x.scalar_type());
  const int64_t images = x.size(0), channels = x.size(1), pixels = x.numel() / std::max<int64_t>(1, images * channels);
  for (int64_t at = 0; at < x.numel(); at += channels * pixels)
    integers::interleave(bytes(x) + at, channels, pixels, new_bytes(out) + at);
  return out;
}

bool has_few_channels(const Tensor& x) { return x.is_contiguous() && x.size(1) < 8; }

// Rows of channels side by side, as oneDNN reads them: a batch of one behind a transpose has strides that no
// layout has, and is mistaken for another.
Tensor readable(const Tensor& x) {
  if (is_channels_last(x)) return x;
  return has_few_channels(x) ? interleaved(x) : torch::stable::contiguous(x);
}

// The values of x with channels innermost in memory.
Tensor channels_innermost(const Tensor& x) {
  if (is_channels_last(x)) return x;
  if (has_few_channels(x)) return interleaved(x);
  Sizes permutation(x.dim());
  std::iota(permutation.begin(), permutation.end(), 0);
  std::rotate(permutation.begin() + 1, permutation.begin() + 2, permutation.end());
  return torch::stable::contiguous(permuted(x, permutation));
}

bool has_onednn() {
  return aoti_torch_cpu__qlinear_pointwise_tensor != nullptr && aoti_torch_cpu__qconv_pointwise_tensor != nullptr;
}

// Whether oneDNN sums products of 8 bits in 32 bits on this CPU, not in 16.
bool has_exact_products() {
  if (!has_onednn()) return false;
#if defined(__x86_64__)
  static const bool has_vnni = [] {
    // oneDNN may be held to older instructions; every name that has VNNI is one of these.
    const char* held = std::getenv("ONEDNN_MAX_CPU_ISA");
    const std::string_view name = held == nullptr ? "DEFAULT" : held;
    const bool is_free = name == "DEFAULT" || name.ends_with("VNNI") || name.ends_with("_VNNI_2") ||
                         name.find("BF16") != name.npos || name.find("FP16") != name.npos ||
                         name.find("AMX") != name.npos || name.find("AVX10") != name.npos;
    return is_free && (__builtin_cpu_supports("avx512vnni") || __builtin_cpu_supports("avxvnni"));
  }();
  return has_vnni;
#else
  return true;
#endif
}

exact::Shape shape_of(const Tensor& x, const Tensor& weight, const Window& window, const Sizes& out) {
  exact::Shape shape;
  shape.images = x.size(0), shape.groups = window.groups;
  shape.inputs = weight.size(1), shape.outputs = weight.size(0) / window.groups;
  const int64_t rank = weight.dim() - 2;
  for (int64_t i = 0; i < rank; ++i) {
    const size_t d = 3 - rank + i;
    shape.in[d] = x.size(2 + i), shape.out[d] = out[2 + i], shape.window[d] = weight.size(2 + i);
    shape.stride[d] = window.stride[i], shape.padding[d] = window.padding[i], shape.dilation[d] = window.dilation[i];
  }
  return shape;
}

// Two products of integers up to this one fit into 16 bits.
constexpr int64_t kFits = 127;

// The output pixels for which oneDNN's sums may saturate, since their window reads larger integers; none if they are
// so many that all are to be computed. Those are outliers in what an observer with `reduce_range` saw.
std::optional<std::vector<int64_t>> may_saturate(const exact::Shape& shape, const exact::Input& x) {
  const int64_t channels = shape.groups * shape.inputs, line = shape.in[2];
  const int64_t lines = shape.images * shape.in[0] * shape.in[1];
  std::vector<bool> marks(shape.all_pixels());
  int64_t left = lines * line / 8;
  const auto is_large = [&](int64_t pixel, int64_t count) {
    return integers::largest(x.values + pixel * channels, count * channels, x.flip) > kFits;
  };
  for (int64_t first = 0; first < lines * line; first += line) {
    if (!is_large(first, line)) continue;
    for (int64_t pixel = first; pixel < first + line; ++pixel) {
      if (!is_large(pixel, 1)) continue;
      if (--left < 0) return std::nullopt;
      exact::mark_readers(shape, pixel, marks);
    }
  }
  std::vector<int64_t> chosen;
  for (int64_t pixel = 0; pixel < shape.all_pixels(); ++pixel) {
    if (marks[pixel]) chosen.push_back(pixel);
  }
  if (3 * static_cast<int64_t>(chosen.size()) > shape.all_pixels()) return std::nullopt;
  return chosen;
}

// Writes `shape`'s pixels of a convolution into `out`, with the bits of oneDNN's: its order of operations, and its way
// to take out zero points.
void convolve_exactly(const exact::Shape& shape, const exact::Input& x, double x_scale, int64_t x_zero_point,
                      const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias, bool takes_out,
                      const Ends& ends, const Tensor& out) {
  const std::vector<double> settings{x_scale, static_cast<double>(takes_out ? x_zero_point : 0),
                                     static_cast<double>(shape.groups), kIsExact};
  const auto packed = packed_weights().find(weight, scales, bias, settings, [&] {
    const Tensor held = call("aten::detach", "", weight);
    const Tensor plain = torch::stable::contiguous(held);
    return Packed{.keys = keys_of(weight, scales, bias),
                  .settings = settings,
                  .weight = held,
                  .bias = takes_out ? bias_without_zero_point(plain, scales, bias, x_scale, x_zero_point) : bias,
                  .exact = exact::pack(shape, static_cast<const int8_t*>(plain.const_data_ptr()))};
  });
  const std::vector<float> without_bias(packed->bias ? 0 : scales.numel());
  std::vector<int32_t> starts = packed->exact.sums;
  for (int32_t& start : starts) start *= takes_out ? 0 : -static_cast<int32_t>(x_zero_point);
  const exact::Output output{out.mutable_data_ptr(),
                             ends.is_float(),
                             static_cast<float>(x_scale),
                             static_cast<const float*>(scales.const_data_ptr()),
                             packed->bias ? static_cast<const float*>(packed->bias->const_data_ptr())
                                          : without_bias.data(),
                             starts.data(),
                             1.0f / static_cast<float>(ends.scale),
                             static_cast<float>(ends.zero_point),
                             static_cast<float>(ends.low),
                             static_cast<float>(ends.high)};
  over(exact::task_count(shape), std::max<int64_t>(1, 32 * kGrain / std::max<int64_t>(1, exact::task_work(shape))),
       [&](int64_t begin, int64_t end) { exact::run_tasks(shape, x, packed->exact, output, begin, end); });
}

Tensor onednn_convolution(const Tensor& given, double x_scale, int64_t x_zero_point, const Tensor& weight,
                          const Tensor& scales, const std::optional<Tensor>& bias, const Window& window,
                          bool takes_out, const Ends& ends) {
  const auto& [stride, padding, dilation, groups] = window;
  Tensor x = readable(unsigned_of(given));
  const Sizes none(padding.size(), 0), &around = takes_out ? none : padding;
  if (takes_out && window.pads()) x = padded(x, padding, static_cast<uint8_t>(x_zero_point));
  std::vector<double> settings{x_scale, static_cast<double>(x_zero_point), static_cast<double>(groups)};
  const Sizes sizes = sizes_of(x);
  for (const Sizes* each : {&stride, &padding, &dilation, &sizes})
    settings.insert(settings.end(), each->begin(), each->end());
  const Window inside{stride, around, dilation, groups};
  const auto packed = packed_weights().find(weight, scales, bias, settings, [&] {
    return pack_convolution(x, weight, scales, bias, x_scale, x_zero_point, inside, takes_out, settings);
  });
  const int32_t code = ends.code();
  AtenTensorHandle place = nullptr, made = nullptr;
  const char* algorithm = "";
  check_call_of_torch(aoti_torch_cpu__qconv_pointwise_tensor(
      x.get(), packed->scale.get(), packed->zero_point.get(), packed->packed.get(), scales.get(),
      packed->weight_zero_points.get(), handle_of(packed->bias, place), stride.data(),
      static_cast<int64_t>(stride.size()), around.data(), static_cast<int64_t>(around.size()), dilation.data(),
      static_cast<int64_t>(dilation.size()), groups, ends.is_float() ? 1.0 : ends.scale,
      ends.is_float() ? 0 : ends.zero_point, &code, ends.has_relu() ? "relu" : "none", nullptr, 0, &algorithm,
      &made));
  return within(Tensor(made), ends);
}

// Whether all windows lie in the padding, before and behind the input along a dimension.
bool reads_nothing(const Tensor& x, const Tensor& weight, const Window& window, const Sizes& sizes) {
  for (size_t dim = 0; dim < window.stride.size(); ++dim) {
    const auto at = static_cast<int64_t>(dim) + 2;
    bool reads = false;
    for (int64_t o = 0; o < sizes[at] && !reads; ++o) {
      for (int64_t tap = 0; tap < weight.size(at) && !reads; ++tap) {
        const int64_t place = o * window.stride[dim] - window.padding[dim] + tap * window.dilation[dim];
        reads = place >= 0 && place < x.size(at);
      }
    }
    if (!reads) return true;
  }
  return false;
}

Tensor convolution(const Tensor& given, double x_scale, int64_t x_zero_point, const Tensor& weight,
                   const Tensor& scales, const std::optional<Tensor>& bias, const Sizes& stride,
                   const Sizes& padding, const Sizes& dilation, int64_t groups, double scale,
                   int64_t zero_point, int64_t low, int64_t high, const std::string& kind) {
  x_zero_point += flip_of(given);
  check_weight(weight, scales, bias);
  Ends ends(scale, zero_point, low, high, kind);
  ends.takes_relu = weight.dim() < 5;  // torch 2.13
  check(given.dim() == weight.dim() && groups > 0 && given.size(1) == weight.size(1) * groups,
        "a convolution's input has other channels than its weight");
  const Sizes sizes = sizes_of_convolution(given, weight, stride, padding, dilation);
  if (given.numel() == 0) return empty_convolution(sizes, ends.dtype);
  if (weight.dim() == 5 && ends.dtype == ScalarType::Char) {
    // torch has no kernel that gives int8 (2.13).
    const Tensor floats = convolution(given, x_scale, x_zero_point - flip_of(given), weight, scales, bias, stride,
                                      padding, dilation, groups, 1.0, 0, 0, 0, "float32");
    return quantize(floats, scale, zero_point, low, high, true);
  }
  const Window window{stride, padding, dilation, groups};
  // oneDNN packs weights for inputs without a zero point, and again in each call with one (torch 2.13).
  const bool takes_out = x_zero_point != 0 && (!window.pads() || 16 * weight.numel() > given.numel());
  const auto by_onednn = [&] {
    return onednn_convolution(given, x_scale, x_zero_point, weight, scales, bias, window, takes_out, ends);
  };
  // Of one input channel oneDNN's kernel for AVX-512 reads what is not there, if the result has one column (2.13).
  const bool is_depthwise = weight.size(1) == 1 && weight.size(0) == groups;
  // Of windows that read nothing it calls one that it never made.
  const bool is_misread = (weight.size(1) == 1 && !is_depthwise && sizes.back() == 1) ||
                          reads_nothing(given, weight, window, sizes);
  const bool is_pointwise = weight.numel() == weight.size(0) * weight.size(1);
  const bool is_image = groups == 1 && weight.size(1) <= 4 && weight.numel() >= 128 * weight.size(0);
  const bool is_own = (exact::is_fastest() && (is_depthwise || is_pointwise || is_image)) || is_misread;
  if (has_exact_products() && !is_own) return by_onednn();
  const Tensor empty = empty_convolution(sizes, ends.dtype), x = channels_innermost(given);
  check(empty.numel() > 0 || weight.size(0) == 0, "a convolution's window is larger than its input");
  exact::Shape shape = shape_of(given, weight, window, sizes);
  const exact::Input input{bytes(x), flip_of(given), static_cast<uint8_t>(x_zero_point)};
  // The own loop over depthwise ones is as fast as oneDNN's, or faster.
  const bool is_whole = is_depthwise || is_own || x_zero_point > kFits || !has_onednn();
  const auto chosen = is_whole ? std::nullopt : may_saturate(shape, input);
  const Tensor out = chosen ? by_onednn() : empty;
  if (chosen) shape.chosen = &*chosen;
  if (shape.pixels() > 0) {
    convolve_exactly(shape, input, x_scale, x_zero_point, weight, scales, bias, takes_out, ends, out);
  }
  return out;
}

void few_rows(const Tensor& x, const Tensor& weight, Scaling of, const float* scales, const float* bias,
              const Ends& ends, const Tensor& out) {
  const int64_t columns = weight.size(1), outputs = weight.size(0), rows = x.numel() / std::max<int64_t>(1, columns);
  const Rounding to = rounding(ends.is_float() ? 1.0 : ends.scale, ends.zero_point, ends.low, ends.high);
  const int64_t width = ends.is_float() ? 4 : 1;
  static const integers::Products kProducts = integers::products();
  const auto* values = static_cast<const int8_t*>(weight.const_data_ptr());
  auto* into = static_cast<uint8_t*>(out.mutable_data_ptr());
  std::vector<uint8_t> row(of.flip ? rows * columns : 0);
  const uint8_t* from = bytes(x);
  if (of.flip) {
    std::copy_n(from, rows * columns, row.data());
    integers::flipped(row.data(), rows * columns);
    from = row.data();
  }
  over(outputs, std::max<int64_t>(16, 4 * kGrain / std::max<int64_t>(1, rows * columns)),
       [&](int64_t begin, int64_t end) {
         const int64_t count = end - begin;
         std::vector<int32_t> products((rows + 1) * count);
         int32_t* sums = products.data() + rows * count;
         kProducts(from, rows, values + begin * columns, count, columns, products.data(), sums);
         std::vector<float> floats(ends.is_float() ? 0 : count);
         for (int64_t r = 0; r < rows; ++r) {
           uint8_t* row = into + (r * outputs + begin) * width;
           float* values = ends.is_float() ? reinterpret_cast<float*>(row) : floats.data();
           integers::finish(products.data() + r * count, sums, scales + begin, bias ? bias + begin : nullptr, count,
                            of, values);
           if (!ends.is_float()) integers::quantize(values, count, to, row);
         }
       });
}

Packed pack_linear(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                   double x_scale, int64_t x_zero_point, const std::vector<double>& settings) {
  const Tensor held = call("aten::detach", "", weight);
  const std::optional<Sizes> shape(Sizes{x.size(0), x.size(1)});
  return {keys_of(weight, scales, bias),
          settings,
          held,
          call("onednn::qlinear_prepack", "", torch::stable::contiguous(held), shape),
          one(static_cast<float>(x_scale), ScalarType::Float),
          one(static_cast<int32_t>(x_zero_point), ScalarType::Int),
          zeros(weight.size(0)),
          bias};
}

Tensor many_rows(const Tensor& x, double x_scale, int64_t x_zero_point, const Tensor& weight,
                 const Tensor& scales, const std::optional<Tensor>& bias, const Ends& ends) {
  const std::vector<double> settings{x_scale, static_cast<double>(x_zero_point)};
  const auto packed = packed_weights().find(weight, scales, bias, settings, [&] {
    return pack_linear(x, weight, scales, bias, x_scale, x_zero_point, settings);
  });
  const int32_t code = ends.code();
  AtenTensorHandle place = nullptr, made = nullptr;
  check_call_of_torch(aoti_torch_cpu__qlinear_pointwise_tensor(
      x.get(), packed->scale.get(), packed->zero_point.get(), packed->packed.get(), scales.get(),
      packed->weight_zero_points.get(), handle_of(bias, place), ends.is_float() ? 1.0 : ends.scale,
      ends.zero_point, &code, ends.has_relu() ? "relu" : "none", nullptr, 0, "", &made));
  return within(Tensor(made), ends);
}

Tensor linear(const Tensor& given, double x_scale, int64_t x_zero_point, const Tensor& weight,
              const Tensor& scales, const std::optional<Tensor>& bias, double scale, int64_t zero_point,
              int64_t low, int64_t high, const std::string& kind) {
  const Scaling of = scaling(given, x_scale, x_zero_point);
  check_weight(weight, scales, bias);
  const Ends ends(scale, zero_point, low, high, kind);
  check(given.dim() >= 1 && given.size(given.dim() - 1) == weight.size(1),
        "a linear's input has other columns than its weight");
  Sizes sizes = sizes_of(given);
  sizes.back() = weight.size(0);
  const Tensor x = torch::stable::contiguous(given);
  const int64_t columns = weight.size(1), rows = x.numel() / std::max<int64_t>(1, columns);
  const bool is_many = rows > kFewRows && weight.size(0) > 0 && has_exact_products();
  const bool is_own = exact::is_fastest() && rows * weight.numel() <= kMostOwnProducts;
  if (is_many && !is_own) {
    const Tensor flat = x.dim() == 2 ? x : torch::stable::view(x, Sizes{rows, columns});
    const Tensor result = many_rows(flat, x_scale, x_zero_point, weight, scales, bias, ends);
    return x.dim() == 2 ? result : torch::stable::view(result, sizes);
  }
  const Tensor out = empty_strided(sizes, strides_in(sizes, in_order(sizes.size())), ends.dtype);
  if (is_many) {
    // Rows are the pixels of a convolution of windows of one value.
    exact::Shape shape;
    shape.inputs = columns, shape.outputs = weight.size(0), shape.in[2] = shape.out[2] = rows;
    const int64_t shifted = x_zero_point + of.flip;
    const exact::Input input{bytes(x), of.flip, static_cast<uint8_t>(shifted)};
    convolve_exactly(shape, input, x_scale, shifted, weight, scales, bias, false, ends, out);
    return out;
  }
  const auto* offsets = bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr;
  if (out.numel() > 0) {
    few_rows(x, torch::stable::contiguous(weight), of, static_cast<const float*>(scales.const_data_ptr()), offsets,
             ends, out);
  }
  return out;
}

void forget_weights(const Sizes& addresses) {
  for (const int64_t address : addresses) packed_weights().forget(reinterpret_cast<const void*>(address));
}

int64_t kept_weights() { return packed_weights().size(); }

// Of floats, x + alpha * y without gradients: torch's dispatcher cannot be asked for it, for want of a type for alpha.
Tensor plus(const Tensor& x, const Tensor& y, double alpha) {
  AtenTensorHandle made = nullptr;
  check(aoti_torch_cpu_add_Tensor != nullptr, "this torch has no sums");
  check_call_of_torch(aoti_torch_cpu_add_Tensor(x.get(), y.get(), alpha, &made));
  return Tensor(made);
}

template <auto kOperator>
chains::Step own_step(chains::Text& text) {
  return chains::step_of(kOperator, text);
}

const chains::OwnSteps& own_steps() {
  static const chains::OwnSteps kSteps{
      {"quantize", own_step<&quantize>}, {"dequantize", own_step<&dequantize>}, {"lookup", own_step<&lookup>},
      {"arithmetic", own_step<&arithmetic>}, {"affine", own_step<&affine>}, {"mean", own_step<&mean>},
      {"max_pool", own_step<&max_pool>}, {"convolution", own_step<&convolution>}, {"linear", own_step<&linear>},
      {"plus", own_step<&plus>}};
  return kSteps;
}

// Not destroyed at the end of the process, when other threads may still run one.
chains::Chains& all_chains() {
  static auto* const kChains = new chains::Chains();
  return *kChains;
}

int64_t bind_chain(const std::string& text) { return all_chains().add(text, own_steps()); }
void forget_chain(int64_t chain) { all_chains().forget(chain); }
std::vector<Tensor> run_chain(const std::vector<Tensor>& tensors, const Sizes& sizes, int64_t chain) {
  return all_chains().at(chain)->run(tensors, sizes);
}
std::vector<Tensor> run_loop(const std::vector<Tensor>& tensors, const Sizes& sizes, int64_t chain,
                             const std::vector<Tensor>& wholes, int64_t steps, const Sizes& roles,
                             const Sizes& outputs, const Sizes& dims, const Sizes& stacked) {
  return chains::run_loop(*all_chains().at(chain), tensors, sizes, wholes, steps, {roles, outputs, dims, stacked});
}

#define TORCHQ_QPARAMS "float scale, int zero_point, int low, int high"
#define TORCHQ_X "Tensor x, float x_scale, int x_zero_point"
#define TORCHQ_WEIGHTS "Tensor weight, Tensor weight_scales, Tensor? bias"
#define TORCHQ_WINDOWS "int[] stride, int[] padding, int[] dilation"
constexpr const char* kSchemas[] = {
    "quantize(Tensor x, " TORCHQ_QPARAMS ", bool signed) -> Tensor",
    "dequantize(Tensor x, float scale, int zero_point) -> Tensor",
    "lookup(Tensor x, Tensor table, int axis) -> Tensor",
    "arithmetic(" TORCHQ_X ", Tensor y, float y_scale, int y_zero_point, str operation, " TORCHQ_QPARAMS
    ", bool signed) -> Tensor",
    "affine(" TORCHQ_X ", Tensor weight, Tensor offset, int axis, " TORCHQ_QPARAMS ", bool signed) -> Tensor",
    "mean(" TORCHQ_X ", int[] dims, bool keepdim, " TORCHQ_QPARAMS ", bool signed) -> Tensor",
    "max_pool(Tensor x, int[] kernel_size, " TORCHQ_WINDOWS ", bool ceil_mode) -> Tensor",
    "convolution(" TORCHQ_X ", " TORCHQ_WEIGHTS ", " TORCHQ_WINDOWS ", int groups, " TORCHQ_QPARAMS
    ", str result) -> Tensor",
    "linear(" TORCHQ_X ", " TORCHQ_WEIGHTS ", " TORCHQ_QPARAMS ", str result) -> Tensor"};

// See recurrent_operator.cpp: Python has defined the operators already, a program without Python has not.
TorchLibraryHandle define_the_operators() {
  TorchLibraryHandle library = nullptr;
  check_call_of_torch(aoti_torch_library_init_fragment("torchq_compat_native", __FILE__, __LINE__, &library));
  for (const char* schema : kSchemas) {
    [[maybe_unused]] const AOTITorchError is_there = aoti_torch_library_def(library, schema);
  }
  return library;
}

[[maybe_unused]] const TorchLibraryHandle kDefinitions = define_the_operators();

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torchq_compat_native, library) {
  // The packed forms of the weights at these addresses are of no use any more.
  library.def("forget_weights(int[] addresses) -> ()");
  library.def("kept_weights() -> int");
  // Operators that run one after the other, bound once.
  library.def("bind_chain(str text) -> int");
  library.def("forget_chain(int chain) -> ()");
  library.def("run_chain(Tensor[] tensors, int[] sizes, int chain) -> Tensor[]");
  library.def(
      "run_loop(Tensor[] tensors, int[] sizes, int chain, Tensor[] wholes, int steps, int[] roles, int[] outputs, "
      "int[] dims, int[] stacked) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(torchq_compat_native, CPU, library) {
  library.impl("quantize", TORCH_BOX(&quantize));
  library.impl("dequantize", TORCH_BOX(&dequantize));
  library.impl("lookup", TORCH_BOX(&lookup));
  library.impl("arithmetic", TORCH_BOX(&arithmetic));
  library.impl("affine", TORCH_BOX(&affine));
  library.impl("mean", TORCH_BOX(&mean));
  library.impl("max_pool", TORCH_BOX(&max_pool));
  library.impl("convolution", TORCH_BOX(&convolution));
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("run_chain", TORCH_BOX(&run_chain));
  library.impl("run_loop", TORCH_BOX(&run_loop));
}

STABLE_TORCH_LIBRARY_IMPL(torchq_compat_native, CompositeExplicitAutograd, library) {
  library.impl("forget_weights", TORCH_BOX(&forget_weights));
  library.impl("kept_weights", TORCH_BOX(&kept_weights));
  library.impl("bind_chain", TORCH_BOX(&bind_chain));
  library.impl("forget_chain", TORCH_BOX(&forget_chain));
}
