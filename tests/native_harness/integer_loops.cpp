// Runs the loops of exact_convolution.h and integer_kernels.h on drawn numbers, and prints a hash of each result.

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "exact_convolution.h"
#include "integer_kernels.h"

namespace {

// Standard distributions differ between libraries.
std::mt19937 generator(1);
int64_t draw(int64_t low, int64_t high) { return low + static_cast<int64_t>(generator() % (high - low + 1)); }

template <typename T>
std::vector<T> drawn(int64_t count, int64_t low, int64_t high, float scale = 1) {
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(static_cast<float>(draw(low, high)) * scale);
  return values;
}

template <typename T>
void show(const char* name, const std::vector<T>& values) {
  uint64_t hash = 14695981039346656037ull;
  const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
  for (size_t i = 0; i < values.size() * sizeof(T); ++i) hash = (hash ^ bytes[i]) * 1099511628211ull;
  std::printf("%s %016llx\n", name, static_cast<unsigned long long>(hash));
}

exact::Shape drawn_shape() {
  exact::Shape shape;
  const bool is_depthwise = draw(0, 2) == 0;
  shape.images = draw(1, 2), shape.groups = is_depthwise ? draw(1, 150) : draw(0, 1) ? draw(2, 6) : 1;
  shape.inputs = is_depthwise ? 1 : draw(1, 40), shape.outputs = is_depthwise ? 1 : draw(1, 150);
  const bool slides = draw(0, 1);
  for (int64_t d = 0; d < 3; ++d) {
    shape.window[d] = slides ? (d ? 3 : 1) : draw(1, 3), shape.stride[d] = draw(1, 3);
    shape.padding[d] = draw(0, 2), shape.dilation[d] = slides && d == 2 ? 1 : draw(1, 2);
    const int64_t reach = (shape.window[d] - 1) * shape.dilation[d] + 1;
    shape.in[d] = reach + draw(0, 4);
    shape.out[d] = (shape.in[d] + 2 * shape.padding[d] - reach) / shape.stride[d] + 1;
  }
  return shape;
}

template <typename T>
void convolve(const exact::Shape& shape) {
  const int64_t outputs = shape.groups * shape.outputs, zero_point = draw(0, 255);
  const auto x = drawn<uint8_t>(shape.images * shape.in[0] * shape.in[1] * shape.in[2] * shape.groups * shape.inputs,
                                0, 255);
  const exact::Weight weight = exact::pack(shape, drawn<int8_t>(outputs * shape.columns(), -128, 127).data());
  const auto scales = drawn<float>(outputs, 1, 1000, 1e-5f), bias = drawn<float>(outputs, -500, 500, 1e-2f);
  std::vector<int32_t> starts = weight.sums;
  for (int32_t& start : starts) start *= -static_cast<int32_t>(zero_point);
  std::vector<T> result(shape.pixels() * outputs);
  const exact::Input input{x.data(), static_cast<uint8_t>(draw(0, 1) * 128), static_cast<uint8_t>(zero_point)};
  const exact::Output output{result.data(), sizeof(T) == 4, 0.02f, scales.data(), bias.data(), starts.data(), 1.4f,
                             100, 0, 255};
  exact::run_tasks(shape, input, weight, output, 0, exact::task_count(shape));
  show("convolution", result);
}

}  // namespace

int main() {
  for (int64_t i = 0; i < 30; ++i) {
    convolve<uint8_t>(drawn_shape());
    convolve<float>(drawn_shape());
  }
  constexpr int64_t kCount = 10003;
  auto floats = drawn<float>(kCount, -1000000, 1000000, 1e-3f);
  floats[5] = NAN, floats[6] = INFINITY, floats[7] = -INFINITY;
  const auto x = drawn<uint8_t>(kCount, 0, 255), y = drawn<uint8_t>(kCount, 0, 255),
             table = drawn<uint8_t>(256, 0, 255);
  std::vector<uint8_t> bytes(kCount);
  std::vector<float> result(kCount);
  const integers::Rounding to{1 / 0.05f, 100, 0, 255};
  const integers::Scaling of_x{131, .03f, 128}, of_y{7, .021f, 0};
  integers::quantize(floats.data(), kCount, {1 / 0.37f, 3, -128, 127}, bytes.data());
  show("quantize", bytes);
  integers::dequantize(x.data(), kCount, of_x, result.data());
  show("dequantize", result);
#define PAIRS(name)                                                               \
  integers::name(x.data(), y.data(), kCount, of_x, of_y, to, bytes.data());       \
  show(#name, bytes);                                                             \
  integers::name##_one(x.data(), .37f, kCount, of_x, to, bytes.data());           \
  show(#name, bytes);
  PAIRS(add) PAIRS(sub) PAIRS(mul) PAIRS(div) PAIRS(maximum) PAIRS(minimum)
#undef PAIRS
  integers::affine(x.data(), kCount, of_x, 1.7f, -.3f, to, bytes.data());
  show("affine", bytes);
  integers::affine_columns(x.data(), kCount, of_x, floats.data(), result.data(), to, bytes.data());
  show("affine_columns", bytes);
  integers::look_up(x.data(), kCount, table.data(), bytes.data());
  show("look_up", bytes);
  integers::clamp(bytes.data(), kCount, 128, 20, 220);
  show("clamp", bytes);
  const auto weight = drawn<int8_t>(33 * 517, -128, 127);
  std::vector<int32_t> products(7 * 33), sums(33);
  integers::products()(x.data(), 7, weight.data(), 33, 517, products.data(), sums.data());
  show("products", products);
  show("sums", sums);
}
