// Loops over 8-bit integers in plain C++, which the compiler vectorises for each instruction set.
//
// A byte is an integer of uint8, or of int8 after `^ flip` with kFlip: then it is larger by 128, and so is its
// zero point.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && !defined(TORCHQ_COMPAT_PLAIN)
#include <immintrin.h>
#define TORCHQ_COMPAT_VECTORS 1
#endif
// Indirect functions choose the clone when the library is loaded; only ELF has them.
#if defined(__x86_64__) && defined(__linux__) && !defined(TORCHQ_COMPAT_PLAIN)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define CLONES
#endif

namespace integers {

constexpr uint8_t kFlip = 0x80;

// How floats become integers: value * inverse, rounded to even, plus zero_point, between low and high.
struct Rounding {
  float inverse, zero_point, low, high;
};

// How bytes become floats: (byte - zero_point) * scale.
struct Scaling {
  float zero_point, scale;
  uint8_t flip;
};

// Adding and subtracting it rounds a float to an integer, ties to even; larger values saturate anyway.
constexpr float kRound = 12582912.0f, kMost = 2000000.0f;

// The comparisons are those of single instructions.
inline float rounded(float value, const Rounding& to) {
  float scaled = value * to.inverse;
  scaled = scaled < kMost ? scaled : kMost;
  scaled = scaled > -kMost ? scaled : -kMost;
  float integer = (scaled + kRound) - kRound + to.zero_point;
  integer = integer > to.low ? integer : to.low;
  return integer < to.high ? integer : to.high;
}

inline uint8_t as_byte(float integer) { return static_cast<uint8_t>(static_cast<int32_t>(integer)); }

// torch converts NaN to 0.
inline uint8_t quantized(float value, const Rounding& to) {
  const float integer = rounded(value, to);
  return as_byte(value == value ? integer : 0.0f);
}

inline float dequantized(uint8_t byte, const Scaling& of) {
  return (static_cast<float>(static_cast<int32_t>(static_cast<uint8_t>(byte ^ of.flip))) - of.zero_point) *
         of.scale;
}

CLONES inline void quantize(const float* x, int64_t count, Rounding to, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = quantized(x[i], to);
}

CLONES inline void dequantize(const uint8_t* x, int64_t count, Scaling of, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = dequantized(x[i], of);
}

// For values that are not NaN.
inline uint8_t finite(float value, const Rounding& to) { return as_byte(rounded(value, to)); }

// The operations on two rows; a step of 0 reads one value again and again.
#define PAIR_LOOP(name, expression, to_byte)                                                           \
  CLONES inline void name(const uint8_t* x, const uint8_t* y, int64_t count, Scaling of_x, Scaling of_y, \
                          Rounding to, uint8_t* out) {                                                 \
    for (int64_t i = 0; i < count; ++i) {                                                              \
      const float a = dequantized(x[i], of_x), b = dequantized(y[i], of_y);                            \
      out[i] = to_byte(expression, to);                                                                \
    }                                                                                                  \
  }                                                                                                    \
  CLONES inline void name##_one(const uint8_t* x, float b, int64_t count, Scaling of_x, Rounding to,   \
                                uint8_t* out) {                                                        \
    for (int64_t i = 0; i < count; ++i) {                                                              \
      const float a = dequantized(x[i], of_x);                                                         \
      out[i] = to_byte(expression, to);                                                                \
    }                                                                                                  \
  }

PAIR_LOOP(add, a + b, finite)
PAIR_LOOP(sub, a - b, finite)
PAIR_LOOP(mul, a* b, finite)
PAIR_LOOP(div, a / b, quantized)
PAIR_LOOP(maximum, (a > b ? a : b), finite)
PAIR_LOOP(minimum, (a < b ? a : b), finite)
#undef PAIR_LOOP

CLONES inline void affine(const uint8_t* x, int64_t count, Scaling of, float factor, float offset, Rounding to,
                          uint8_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = quantized(dequantized(x[i], of) * factor + offset, to);
}

CLONES inline void affine_columns(const uint8_t* x, int64_t count, Scaling of, const float* factors,
                                  const float* offsets, Rounding to, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = quantized(dequantized(x[i], of) * factors[i] + offsets[i], to);
}

typedef uint8_t Block __attribute__((vector_size(64)));

// out[c] = the largest of places[p][c].
CLONES inline void most(const uint8_t* const* places, int64_t count, int64_t columns, uint8_t flip, uint8_t* out) {
  constexpr int64_t kBlock = sizeof(Block);
  int64_t c = 0;
  for (; c + kBlock <= columns; c += kBlock) {
    Block most = {}, value;
    for (int64_t p = 0; p < count; ++p) {
      std::memcpy(&value, places[p] + c, kBlock);
      value ^= flip;
      most = most > value ? most : value;
    }
    most ^= flip;
    std::memcpy(out + c, &most, kBlock);
  }
  for (; c < columns; ++c) {
    uint8_t value = 0;
    for (int64_t p = 0; p < count; ++p) value = std::max(value, static_cast<uint8_t>(places[p][c] ^ flip));
    out[c] = static_cast<uint8_t>(value ^ flip);
  }
}

// out[p][c] = x[c][p], for few channels.
CLONES inline void interleave(const uint8_t* x, int64_t channels, int64_t pixels, uint8_t* out) {
  if (channels == 3) {
    const uint8_t *a = x, *b = x + pixels, *c = b + pixels;
    for (int64_t p = 0; p < pixels; ++p) out[3 * p] = a[p], out[3 * p + 1] = b[p], out[3 * p + 2] = c[p];
    return;
  }
  for (int64_t p = 0; p < pixels; ++p)
    for (int64_t c = 0; c < channels; ++c) out[p * channels + c] = x[c * pixels + p];
}

CLONES inline void flipped(uint8_t* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] ^= kFlip;
}

CLONES inline void clamp(uint8_t* values, int64_t count, uint8_t flip, uint8_t low, uint8_t high) {
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t value = static_cast<uint8_t>(values[i] ^ flip);
    values[i] = static_cast<uint8_t>(std::min(std::max(value, low), high) ^ flip);
  }
}

CLONES inline uint8_t largest(const uint8_t* x, int64_t count, uint8_t flip) {
  uint8_t most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, static_cast<uint8_t>(x[i] ^ flip));
  return most;
}

CLONES inline void sum_rows(const uint8_t* x, int64_t count, uint8_t flip, int32_t* sums) {
  for (int64_t i = 0; i < count; ++i) sums[i] += static_cast<uint8_t>(x[i] ^ flip);
}

CLONES inline int64_t sum(const uint8_t* x, int64_t count, uint8_t flip) {
  int32_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += static_cast<uint8_t>(x[i] ^ flip);
  return total;
}

inline void look_up_one_by_one(const uint8_t* x, int64_t count, const uint8_t* table, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = table[x[i]];
}

#ifdef TORCHQ_COMPAT_VECTORS
__attribute__((target("avx512f,avx512bw,avx512vbmi"))) inline void look_up_by_permutes(const uint8_t* x,
                                                                                      int64_t count,
                                                                                      const uint8_t* table,
                                                                                      uint8_t* out) {
  const __m512i t0 = _mm512_loadu_si512(table), t1 = _mm512_loadu_si512(table + 64);
  const __m512i t2 = _mm512_loadu_si512(table + 128), t3 = _mm512_loadu_si512(table + 192);
  int64_t i = 0;
  for (; i + 64 <= count; i += 64) {
    const __m512i index = _mm512_loadu_si512(x + i);
    const __m512i low = _mm512_permutex2var_epi8(t0, index, t1);
    const __m512i high = _mm512_permutex2var_epi8(t2, index, t3);
    _mm512_storeu_si512(out + i, _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high));
  }
  look_up_one_by_one(x + i, count - i, table, out + i);
}
#endif

inline void look_up(const uint8_t* x, int64_t count, const uint8_t* table, uint8_t* out) {
#ifdef TORCHQ_COMPAT_VECTORS
  static const bool has_permutes = __builtin_cpu_supports("avx512vbmi");
  if (has_permutes && count >= 64) return look_up_by_permutes(x, count, table, out);
#endif
  look_up_one_by_one(x, count, table, out);
}

// The floats of a linear's products, which are those of bytes: without the zero point's part, scaled, and with a
// bias.
CLONES inline void finish(const int32_t* products, const int32_t* sums, const float* scales, const float* bias,
                          int64_t count, Scaling of, float* out) {
  const auto zero = static_cast<int32_t>(of.zero_point);
  for (int64_t o = 0; o < count; ++o) {
    const auto product = static_cast<float>(products[o] - zero * sums[o]);
    out[o] = product * (of.scale * scales[o]) + (bias ? bias[o] : 0.0f);
  }
}

// products[r * outputs + o] = the product of row r of x and row o of w, of `columns` each; sums[o] = the sum of
// row o of w.
using Products = void (*)(const uint8_t* x, int64_t rows, const int8_t* w, int64_t outputs, int64_t columns,
                          int32_t* products, int32_t* sums);

CLONES inline void plain_products(const uint8_t* x, int64_t rows, const int8_t* w, int64_t outputs,
                                  int64_t columns, int32_t* products, int32_t* sums) {
  for (int64_t o = 0; o < outputs; ++o) {
    const int8_t* row = w + o * columns;
    int32_t total = 0;
    for (int64_t k = 0; k < columns; ++k) total += row[k];
    sums[o] = total;
    for (int64_t r = 0; r < rows; ++r) {
      int32_t product = 0;
      for (int64_t k = 0; k < columns; ++k)
        product += static_cast<int16_t>(x[r * columns + k]) * static_cast<int16_t>(row[k]);
      products[r * outputs + o] = product;
    }
  }
}

#ifdef TORCHQ_COMPAT_VECTORS
#define VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))

// The sums of four vectors.
VNNI inline __m128i sums_of(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// The products of `kX` rows of x and four rows of w; without x, the sums of these.
template <int kX>
VNNI inline void vnni_block(const uint8_t* x, const int8_t* w, int64_t columns, int64_t outputs, int32_t* out) {
  constexpr int kSums = kX ? kX : 1, kW = 4;
  __m512i sums[kSums][kW];
  for (auto& of_row : sums)
    for (__m512i& sum : of_row) sum = _mm512_setzero_si512();
  const __m512i ones = _mm512_set1_epi8(1);
  for (int64_t k = 0; k < columns; k += 64) {
    const int64_t left = columns - k;
    const __mmask64 mask = left >= 64 ? ~0ull : (1ull << left) - 1;
    __m512i rows[kW];
    for (int o = 0; o < kW; ++o) {
      rows[o] = _mm512_maskz_loadu_epi8(mask, w + o * columns + k);
      // The rows of the block after the next, which are read first for their sums.
      if (kX == 0) __builtin_prefetch(w + (2 * kW + o) * columns + k);
    }
    for (int r = 0; r < kSums; ++r) {
      const __m512i values = kX ? _mm512_maskz_loadu_epi8(mask, x + r * columns + k) : ones;
      for (int o = 0; o < kW; ++o) sums[r][o] = _mm512_dpbusd_epi32(sums[r][o], values, rows[o]);
    }
  }
  for (int r = 0; r < kSums; ++r) {
    const __m128i found = sums_of(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + r * outputs), found);
  }
}

VNNI inline void vnni_products(const uint8_t* x, int64_t rows, const int8_t* w, int64_t outputs, int64_t columns,
                               int32_t* products, int32_t* sums) {
  int64_t o = 0;
  for (; o + 4 <= outputs; o += 4) {
    const int8_t* part = w + o * columns;
    vnni_block<0>(x, part, columns, outputs, sums + o);
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) vnni_block<4>(x + r * columns, part, columns, outputs, products + r * outputs + o);
    for (; r < rows; ++r) vnni_block<1>(x + r * columns, part, columns, outputs, products + r * outputs + o);
  }
  for (; o < outputs; ++o) {
    std::memset(sums + o, 0, sizeof(int32_t));
    for (int64_t k = 0; k < columns; ++k) sums[o] += w[o * columns + k];
    for (int64_t r = 0; r < rows; ++r) {
      int32_t product = 0;
      for (int64_t k = 0; k < columns; ++k) product += x[r * columns + k] * w[o * columns + k];
      products[r * outputs + o] = product;
    }
  }
}
#undef VNNI
#endif

inline Products products() {
#ifdef TORCHQ_COMPAT_VECTORS
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw")) return vnni_products;
#endif
  return plain_products;
}

}  // namespace integers
