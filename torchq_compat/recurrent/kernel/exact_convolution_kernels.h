// The loops of exact_convolution.cpp for the instruction set TARGET_NAME.

namespace TARGET_NAME {
namespace {

// The values that are multiplied, how many columns an instruction sums, how many are copied at once (the rows of a
// strip and the weights of its lanes stay in the L1 cache), and the channels of a depthwise sum.
#if TARGET_VNNI
using Value = uint8_t;
constexpr int64_t kDepth = 4, kColumns = 576, kSummed = kWide;
#else
using Value = int16_t;
constexpr int64_t kDepth = 2, kColumns = 512, kSummed = kLanes;
#endif
constexpr int64_t kRow = kColumns + 16;

#if TARGET_VNNI
// The first `count` of 64 bytes, by halves: AMD's CPUs take long to store by a mask, or to load a part of what they
// have stored.
void store_some(__m512i bytes, int64_t count, uint8_t* to) {
  __m256i half = _mm512_castsi512_si256(bytes);
  if (count & 32) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
    half = _mm512_extracti64x4_epi64(bytes, 1), to += 32;
  }
  __m128i quarter = _mm256_castsi256_si128(half);
  if (count & 16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), quarter);
    quarter = _mm256_extracti128_si256(half, 1), to += 16;
  }
  if (count & 8) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), quarter);
    quarter = _mm_srli_si128(quarter, 8), to += 8;
  }
  for (; count & 7; --count, quarter = _mm_srli_si128(quarter, 1))
    *to++ = static_cast<uint8_t>(_mm_cvtsi128_si32(quarter));
}

// Bytes of up to `kParts` times kLanes outputs, of all pixels; see finish.
template <int kParts, typename Place>
void round_columns(const int32_t* sums, int64_t first, int64_t count, int64_t pixels, const Output& out,
                   const Place& place) {
  const __m512 input_scale = _mm512_set1_ps(out.input_scale), inverse = _mm512_set1_ps(out.inverse);
  const __m512 zero = _mm512_set1_ps(out.zero), high = _mm512_set1_ps(out.high);
  // Packing saturates, to the integers of the sign that `low` tells.
  const bool is_signed = out.low < 0;
  const __m512i low = _mm512_set1_epi8(static_cast<char>(out.low));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i offsets[4] = {}, parts[4] = {};
  __m512 scales[4] = {}, bias[4] = {};
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) {
    const int64_t at = first + part * kLanes, left = count - part * kLanes;
    const __mmask16 mask = left >= kLanes ? 0xffff : (1u << left) - 1;
    offsets[part] = _mm512_maskz_loadu_epi32(mask, out.offsets + at);
    scales[part] = _mm512_maskz_loadu_ps(mask, out.scales + at);
    bias[part] = _mm512_maskz_loadu_ps(mask, out.bias + at);
  }
  for (int64_t pixel = 0; pixel < pixels; ++pixel, sums += kChunk) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const __m512i sum = _mm512_sub_epi32(_mm512_loadu_si512(sums + part * kLanes), offsets[part]);
      __m512 value = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), input_scale), scales[part]);
      value = _mm512_add_ps(_mm512_mul_ps(_mm512_add_ps(value, bias[part]), inverse), zero);
      parts[part] = _mm512_cvtps_epi32(_mm512_min_ps(value, high));
    }
    __m512i bytes;
    if (is_signed) {
      bytes = _mm512_packs_epi16(_mm512_packs_epi32(parts[0], parts[1]), _mm512_packs_epi32(parts[2], parts[3]));
      bytes = _mm512_max_epi8(bytes, low);
    } else {
      bytes = _mm512_packus_epi16(_mm512_packus_epi32(parts[0], parts[1]), _mm512_packus_epi32(parts[2], parts[3]));
      bytes = _mm512_max_epu8(bytes, low);
    }
    bytes = _mm512_permutexvar_epi32(order, bytes);
    uint8_t* to = static_cast<uint8_t*>(out.values) + place(pixel);
    if (count >= 64) {
      _mm512_storeu_si512(to, bytes);
    } else {
      store_some(bytes, count, to);
    }
  }
}
#endif

// Results of `count` outputs, from the output `first` of all on; the sums of pixels are kChunk apart, and their
// results begin at `place`.
template <typename Place>
void finish(const int32_t* __restrict sums, int64_t first, int64_t count, int64_t pixels, const Output& out,
            const Place& place) {
  const float input_scale = out.input_scale;
  const int32_t* __restrict offsets = out.offsets + first;
  const float *__restrict scales = out.scales + first, *__restrict bias = out.bias + first;
  if (out.is_float) {
    for (int64_t pixel = 0; pixel < pixels; ++pixel, sums += kChunk) {
      float* __restrict floats = static_cast<float*>(out.values) + place(pixel);
      for (int64_t o = 0; o < count; ++o)
        floats[o] = static_cast<float>(sums[o] - offsets[o]) * input_scale * scales[o] + bias[o];
    }
    return;
  }
#if TARGET_VNNI
  for (int64_t o = 0; o < count; o += 64) {
    const auto to = [&](int64_t pixel) { return place(pixel) + o; };
    const int64_t left = count - o;
    const auto round = left > 48   ? round_columns<4, decltype(to)>
                       : left > 32 ? round_columns<3, decltype(to)>
                       : left > 16 ? round_columns<2, decltype(to)>
                                   : round_columns<1, decltype(to)>;
    round(sums + o, first + o, left, pixels, out, to);
  }
#else
  // Adding it leaves the rounded value, ties to even, in the lowest bits of a float.
  constexpr float kRound = 12582912.0f;
  const float inverse = out.inverse, zero = out.zero, low = out.low, high = out.high;
  for (int64_t pixel = 0; pixel < pixels; ++pixel, sums += kChunk) {
    uint8_t* __restrict bytes = static_cast<uint8_t*>(out.values) + place(pixel);
    for (int64_t o = 0; o < count; ++o) {
      const float result = static_cast<float>(sums[o] - offsets[o]) * input_scale * scales[o] + bias[o];
      float value = result * inverse + zero;
      value = value > low ? value : low;
      value = value < high ? value : high;
      bytes[o] = static_cast<uint8_t>(std::bit_cast<int32_t>(value + kRound));
    }
  }
#endif
}

// Copies values; with VNNI up to 64 bytes behind them are written too, which are copied to later.
void widen(const uint8_t* from, int64_t count, uint8_t flip, Value* to) {
#if TARGET_VNNI
  const __m512i flips = _mm512_set1_epi8(static_cast<char>(flip));
  for (; count > 0; count -= 64, from += 64, to += 64) {
    const __mmask64 mask = count >= 64 ? ~0ull : (1ull << count) - 1;
    _mm512_storeu_si512(to, _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, from), flips));
  }
  return;
#elif TARGET_AVX2
  const __m256i flips = _mm256_set1_epi16(flip);
  const auto sixteen = [&](int64_t i) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    const __m256i values = _mm256_xor_si256(_mm256_cvtepu8_epi16(bytes), flips);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), values);
  };
  if (count >= 16) {
    for (int64_t i = 0; i + 16 <= count; i += 16) sixteen(i);
    if (count % 16) sixteen(count - 16);
    return;
  }
#endif
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<Value>(from[i] ^ flip);
}

// Copies the columns from `begin` to `end` of a pixel's row.
void copy_row(const Reader& read, const Pixel& pixel, int64_t group, const Columns& columns, Value* to) {
  const Shape& shape = read.shape;
  // Windows without holes read neighbours, whose channels lie side by side.
  const bool is_whole = shape.groups == 1 && shape.dilation[2] == 1;
  const auto fill = [&](int64_t count) { to = std::fill_n(to, count, read.x.zero_point); };
  Columns at = columns;
  for (int64_t left = columns.count; left > 0; at.next(shape)) {
    const int64_t until = std::min(at.in_line + left, shape.window[2] * shape.inputs);
    const uint8_t* line = read.line(pixel.image, pixel.first[0] + at.depth * shape.dilation[0],
                                    pixel.first[1] + at.height * shape.dilation[1]);
    left -= until - at.in_line;
    if (!line) {
      fill(until - at.in_line);
    } else if (is_whole) {
      const int64_t begin = pixel.first[2] * shape.inputs;
      const int64_t first = std::clamp(-begin, at.in_line, until);
      const int64_t last = std::clamp(shape.in[2] * shape.inputs - begin, first, until);
      fill(first - at.in_line);
      widen(line + begin + first, last - first, read.x.flip, to);
      to += last - first;
      fill(until - last);
    } else {
      int64_t tap = at.in_line / shape.inputs, input = at.in_line % shape.inputs;
      for (int64_t place = at.in_line; place < until; ++tap, input = 0) {
        const int64_t count = std::min(shape.inputs - input, until - place);
        const int64_t width = pixel.first[2] + tap * shape.dilation[2];
        place += count;
        if (width < 0 || width >= shape.in[2]) {
          fill(count);
          continue;
        }
        widen(line + width * read.channels + group * shape.inputs + input, count, read.x.flip, to);
        to += count;
      }
    }
  }
  for (int64_t at = columns.count; at % kDepth; ++at) *to++ = 0;
}

// Copies some columns of the rows of `count` pixels from `begin` on.
void copy_rows(const Reader& read, int64_t begin, int64_t count, int64_t group, const Columns& columns, Value* to) {
  const Shape& shape = read.shape;
  const int64_t line = shape.window[2] * shape.inputs, next_line = shape.dilation[1] * shape.in[2] * shape.inputs;
  // Windows that are nowhere outside, and whole rows: lines behind one another.
  const bool is_whole = shape.groups == 1 && shape.dilation[2] == 1 && columns.count == shape.columns();
  Pixel at(shape, begin);
  for (int64_t pixel = 0; pixel < count; ++pixel, at.next(shape), to += kRow) {
    if (shape.chosen) at = Pixel(shape, (*shape.chosen)[begin + pixel]);
    if (!is_whole || !read.is_inside(at)) {
      copy_row(read, at, group, columns, to);
      continue;
    }
    Value* into = to;
    for (int64_t d = 0; d < shape.window[0]; ++d) {
      const uint8_t* from = read.line(at.image, at.first[0] + d * shape.dilation[0], at.first[1]);
      from += at.first[2] * shape.inputs;
      for (int64_t h = 0; h < shape.window[1]; ++h, into += line, from += next_line) widen(from, line, read.x.flip, into);
    }
    for (int64_t column = columns.count; column % kDepth; ++column) *into++ = 0;
  }
}

#if TARGET_VNNI
// Adds the products of `kCount` rows and of `kGroups` times kLanes outputs to `sums`, whose rows are kChunk apart.
template <int kCount, int kGroups>
__attribute__((noinline)) void multiply(const Value* rows, int64_t row, const int8_t* weight, int64_t of_group,
                                        int64_t steps, bool is_first, int32_t* sums) {
  __m512i totals[kCount * kGroups] = {}, columns[kGroups];
  // Unrolled early: else GCC keeps the sums in memory.
  if (!is_first) {
#pragma GCC unroll 32
    for (int i = 0; i < kCount * kGroups; ++i)
      totals[i] = _mm512_loadu_si512(sums + i / kGroups * kChunk + i % kGroups * kLanes);
  }
  for (int64_t step = 0; step < steps; ++step, weight += kDepth * kLanes, rows += kDepth) {
#pragma GCC unroll 32
    for (int g = 0; g < kGroups; ++g) columns[g] = _mm512_loadu_si512(weight + g * of_group);
#pragma GCC unroll 32
    for (int i = 0; i < kCount * kGroups; ++i) {
      int32_t four;
      std::memcpy(&four, rows + i / kGroups * row, sizeof four);
      totals[i] = _mm512_dpbusd_epi32(totals[i], _mm512_set1_epi32(four), columns[i % kGroups]);
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < kCount * kGroups; ++i)
    _mm512_storeu_si512(sums + i / kGroups * kChunk + i % kGroups * kLanes, totals[i]);
}

template <int kGroups, size_t... kCounts>
void multiply_some(int64_t count, std::index_sequence<kCounts...>, const Value* rows, int64_t row,
                   const int8_t* weight, int64_t of_group, int64_t steps, bool is_first, int32_t* sums) {
  using Multiply = void (*)(const Value*, int64_t, const int8_t*, int64_t, int64_t, bool, int32_t*);
  static constexpr Multiply kForms[] = {multiply<kCounts + 1, kGroups>...};
  kForms[count - 1](rows, row, weight, of_group, steps, is_first, sums);
}

// The same for any number of rows and outputs.
void multiply_all(const Value* rows, int64_t row, int64_t count, const int8_t* weight, int64_t of_group,
                  int64_t outputs, int64_t steps, bool is_first, int32_t* sums) {
  const int64_t strips = up(count, 12);
  for (int64_t output = 0; output < outputs; output += 2 * kLanes) {
    const int8_t* of_lanes = weight + output / kLanes * of_group;
    for (int64_t strip = 0; strip < strips; ++strip) {
      const int64_t first = strip * count / strips, some = (strip + 1) * count / strips - first;
      const Value* from = rows + first * row;
      int32_t* to = sums + first * kChunk + output;
      const std::make_index_sequence<12> counts;
      if (output + kLanes < outputs) {
        multiply_some<2>(some, counts, from, row, of_lanes, of_group, steps, is_first, to);
      } else {
        multiply_some<1>(some, counts, from, row, of_lanes, of_group, steps, is_first, to);
      }
    }
  }
}
#else
// Adds the products of `kCount` rows and `kLanes` outputs to `sums`, whose rows are kChunk apart.
template <int kCount>
__attribute__((noinline)) void multiply(const int16_t* rows, const int8_t* weight, int64_t pairs, int32_t* sums) {
#if TARGET_AVX512
  __m512i totals[kCount];
#pragma GCC unroll 12
  for (int r = 0; r < kCount; ++r) totals[r] = _mm512_loadu_si512(sums + r * kChunk);
  for (int64_t pair = 0; pair < pairs; ++pair, weight += 2 * kLanes) {
    const __m512i columns =
        _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight)));
#pragma GCC unroll 12
  for (int r = 0; r < kCount; ++r) {
      int32_t two;
      std::memcpy(&two, rows + r * kRow + 2 * pair, sizeof two);
      totals[r] = _mm512_add_epi32(totals[r], _mm512_madd_epi16(_mm512_set1_epi32(two), columns));
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kCount; ++r) _mm512_storeu_si512(sums + r * kChunk, totals[r]);
#elif TARGET_AVX2
  __m256i totals[2 * kCount];
#pragma GCC unroll 8
  for (int i = 0; i < 2 * kCount; ++i) totals[i] = _mm256_setzero_si256();
  int64_t pair = 0;
  do {
    const auto* from = reinterpret_cast<const __m128i*>(weight);
    const __m256i first = _mm256_cvtepi8_epi16(_mm_loadu_si128(from)),
                  second = _mm256_cvtepi8_epi16(_mm_loadu_si128(from + 1));
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      int32_t two;
      std::memcpy(&two, rows + r * kRow + 2 * pair, sizeof two);
      const __m256i both = _mm256_set1_epi32(two);
      totals[2 * r] = _mm256_add_epi32(totals[2 * r], _mm256_madd_epi16(both, first));
      totals[2 * r + 1] = _mm256_add_epi32(totals[2 * r + 1], _mm256_madd_epi16(both, second));
    }
    weight += 2 * kLanes;
  } while (++pair < pairs);
#pragma GCC unroll 8
  for (int r = 0; r < 2 * kCount; ++r) {
    auto* to = reinterpret_cast<__m256i*>(sums + r / 2 * kChunk + r % 2 * 8);
    _mm256_storeu_si256(to, _mm256_add_epi32(_mm256_loadu_si256(to), totals[r]));
  }
#else
  for (int r = 0; r < kCount; ++r) {
    int32_t totals[kLanes];
    std::copy_n(sums + r * kChunk, kLanes, totals);
    const int16_t* row = rows + r * kRow;
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int8_t* of_pair = weight + pair * 2 * kLanes;
      const int32_t first = row[2 * pair], second = row[2 * pair + 1];
      for (int64_t o = 0; o < kLanes; ++o) totals[o] += first * of_pair[2 * o] + second * of_pair[2 * o + 1];
    }
    std::copy_n(totals, kLanes, sums + r * kChunk);
  }
#endif
}

void multiply_all(const Value* rows, int64_t row, int64_t count, const int8_t* weight, int64_t of_group,
                  int64_t outputs, int64_t steps, bool is_first, int32_t* sums) {
  if (is_first) std::fill_n(sums, count * kChunk, 0);
  for (int64_t output = 0; output < outputs; output += kLanes, weight += of_group) {
    const auto strip = [&](auto multiply_rows, int64_t pixel) {
      multiply_rows(rows + pixel * row, weight, steps, sums + pixel * kChunk + output);
    };
    int64_t pixel = 0;
#if TARGET_AVX512
    for (; pixel + 12 <= count; pixel += 12) strip(multiply<12>, pixel);
#endif
    for (; pixel + kStep <= count; pixel += kStep) strip(multiply<kStep>, pixel);
    for (; pixel < count; ++pixel) strip(multiply<1>, pixel);
  }
}
#endif

struct Buffers {
  alignas(64) Value rows[kPixels * kRow + 64];
  alignas(64) int32_t sums[kPixels * kChunk];
};

int64_t steps_of(int64_t columns) { return up(columns, kDepth); }

// Whether the rows of the product lie in the input as they are.
bool is_read_in_place(const Reader& read) {
  const Shape& shape = read.shape;
  const auto are_all = [](const std::array<int64_t, 3>& values, int64_t value) {
    return std::all_of(values.begin(), values.end(), [&](int64_t each) { return each == value; });
  };
  return sizeof(Value) == 1 && shape.groups == 1 && shape.inputs % kDepth == 0 && !read.x.flip && !shape.chosen &&
         are_all(shape.window, 1) && are_all(shape.stride, 1) && are_all(shape.padding, 0);
}

// The block of pixels `block` of a group, for the outputs from `first` on.
void run_block(const Reader& read, const Weight& weight, const Output& out, int64_t block, int64_t group,
               int64_t first, Buffers& buffers) {
  const Shape& shape = read.shape;
  const int64_t begin = block * block_of(shape), count = std::min(block_of(shape), shape.pixels() - begin);
  if (count <= 0) return;
  const int64_t outputs = std::min(chunk_of(shape), shape.outputs - first), columns = shape.columns();
  const int64_t of_group = steps_of(columns) * kDepth * kLanes;
  const int8_t* lanes = weight.values.data() + (group * up(shape.outputs, kLanes) + first / kLanes) * of_group;
  const bool is_in_place = is_read_in_place(read);
  for (int64_t column = 0; column < columns; column += kColumns) {
    const Columns some(shape, column, std::min(kColumns, columns - column));
    const Value* rows = buffers.rows;
    if (is_in_place) {
      rows = reinterpret_cast<const Value*>(read.x.values) + begin * columns + column;
    } else {
      copy_rows(read, begin, count, group, some, buffers.rows);
    }
    multiply_all(rows, is_in_place ? columns : kRow, count, lanes + column * kLanes, of_group, outputs,
                 steps_of(some.count), column == 0, buffers.sums);
  }
  const int64_t from = group * shape.outputs + first, all = shape.groups * shape.outputs;
  finish(buffers.sums, from, outputs, count, out, [&](int64_t pixel) {
    return (shape.chosen ? (*shape.chosen)[begin + pixel] : begin + pixel) * all + from;
  });
}

#if TARGET_VNNI
// Sums of up to kWide channels from `channel` on, of pixels whose values are at `taps`; kTaps: how many there are of a
// pixel, or 0 for any number.
template <int kTaps>
void sum_wide(const uint8_t* const* taps, int64_t count, int64_t pixels, const int8_t* weight, int64_t channels,
              int64_t channel, int64_t lanes, uint8_t flip, int32_t* sums) {
  if (kTaps) count = kTaps;
  const __mmask64 mask = lanes >= kWide ? ~0ull : (1ull << lanes) - 1;
  const __m512i flips = _mm512_set1_epi8(static_cast<char>(flip));
  const int64_t step = up(channels, kWide) * kWide * kDepth;
  weight += channel * kDepth;
  const auto weights = [&](int64_t tap, int part) {
    return _mm512_loadu_si512(weight + tap / kDepth * step + part * kLanes * kDepth);
  };
  constexpr int kHeld = (kTaps + 3) / 4 * 4;
  __m512i held[kHeld + 1];
#pragma GCC unroll 12
  for (int i = 0; i < kHeld; ++i) held[i] = weights(i / 4 * kDepth, i % 4);
  for (int64_t pixel = 0; pixel < pixels; ++pixel, taps += count, sums += kChunk) {
    const auto load = [&](int64_t tap) {
      return _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, taps[tap] + channel), flips);
    };
    __m512i totals[4] = {};
#pragma GCC unroll 3
    for (int64_t tap = 0; tap < count; tap += kDepth) {
      const __m512i a = load(tap), b = tap + 1 < count ? load(tap + 1) : a, c = tap + 2 < count ? load(tap + 2) : a,
                    d = tap + 3 < count ? load(tap + 3) : a;
      const __m512i ab[2] = {_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b)};
      const __m512i cd[2] = {_mm512_unpacklo_epi8(c, d), _mm512_unpackhi_epi8(c, d)};
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        const __m512i four = part % 2 ? _mm512_unpackhi_epi16(ab[part / 2], cd[part / 2])
                                      : _mm512_unpacklo_epi16(ab[part / 2], cd[part / 2]);
        totals[part] = _mm512_dpbusd_epi32(totals[part], four, kTaps ? held[tap + part] : weights(tap, part));
      }
    }
    // The channels of a part are four of each 128 bits.
    const auto pairs = [&](int part, auto which) {
      return _mm512_shuffle_i32x4(totals[part], totals[part + 1], decltype(which)::value);
    };
    const std::integral_constant<int, 0x44> first;
    const std::integral_constant<int, 0xee> last;
    const __m512i low[2] = {pairs(0, first), pairs(2, first)}, high[2] = {pairs(0, last), pairs(2, last)};
    _mm512_storeu_si512(sums, _mm512_shuffle_i32x4(low[0], low[1], 0x88));
    _mm512_storeu_si512(sums + kLanes, _mm512_shuffle_i32x4(low[0], low[1], 0xdd));
    _mm512_storeu_si512(sums + 2 * kLanes, _mm512_shuffle_i32x4(high[0], high[1], 0x88));
    _mm512_storeu_si512(sums + 3 * kLanes, _mm512_shuffle_i32x4(high[0], high[1], 0xdd));
  }
}

void depthwise_sums(const uint8_t* const* taps, int64_t count, int64_t pixels, const int8_t* weight, int64_t channels,
                    int64_t channel, int64_t lanes, uint8_t flip, int32_t* sums) {
  (count == 9 ? sum_wide<9> : sum_wide<0>)(taps, count, pixels, weight, channels, channel, lanes, flip, sums);
}
#else
// Sums of up to kLanes channels from `channel` on, each of `taps` values.
void sum_lanes(const uint8_t* const* taps, int64_t count, const int8_t* weight, int64_t channels,
               int64_t channel, int64_t lanes, uint8_t flip, int32_t* sums) {
#if TARGET_AVX2
  if (lanes == kLanes) {
    const __m128i flips = _mm_set1_epi8(static_cast<char>(flip));
    __m256i low = _mm256_setzero_si256(), high = _mm256_setzero_si256();
    const auto load = [&](int64_t tap) {
      return _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(taps[tap] + channel)), flips);
    };
    for (int64_t tap = 0; tap < count; tap += 2) {
      const __m128i a = load(tap), b = tap + 1 < count ? load(tap + 1) : _mm_setzero_si128();
      const auto* from = reinterpret_cast<const __m128i*>(weight + (tap / 2 * channels + channel) * 2);
      const __m256i first = _mm256_cvtepi8_epi16(_mm_loadu_si128(from)),
                    second = _mm256_cvtepi8_epi16(_mm_loadu_si128(from + 1));
      low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b)), first));
      high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b)), second));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + 8), high);
    return;
  }
#endif
  std::fill_n(sums, lanes, 0);
  for (int64_t tap = 0; tap < count; ++tap) {
    const uint8_t* from = taps[tap] + channel;
    const int8_t* of_tap = weight + (tap / kDepth * channels + channel) * kDepth + tap % kDepth;
    for (int64_t c = 0; c < lanes; ++c)
      sums[c] += static_cast<int32_t>(static_cast<uint8_t>(from[c] ^ flip)) * of_tap[kDepth * c];
  }
}

void depthwise_sums(const uint8_t* const* taps, int64_t count, int64_t pixels, const int8_t* weight, int64_t channels,
                    int64_t channel, int64_t lanes, uint8_t flip, int32_t* sums) {
  for (int64_t pixel = 0; pixel < pixels; ++pixel, taps += count, sums += kChunk)
    sum_lanes(taps, count, weight, channels, channel, lanes, flip, sums);
}
#endif

// The input's values that the windows of pixels read, `taps` for each.
void find_places(const Reader& read, int64_t begin, int64_t end, const uint8_t* outside, const uint8_t** places) {
  const Shape& shape = read.shape;
  const int64_t taps = shape.taps();
  std::vector<int64_t> moves(taps);
  Pixel pixel(shape, begin);
  bool was_inside = false;
  for (int64_t index = begin; index < end; ++index, pixel.next(shape), places += taps) {
    const bool is_inside = pixel.first[2] >= 0 && pixel.first[2] + shape.reach(2) <= shape.in[2];
    if (is_inside && was_inside && pixel.out[2] > 0) {
      for (int64_t tap = 0; tap < taps; ++tap) places[tap] = places[tap - taps] + moves[tap];
      continue;
    }
    was_inside = is_inside;
    int64_t tap = 0;
    for (int64_t d = 0; d < shape.window[0]; ++d) {
      for (int64_t h = 0; h < shape.window[1]; ++h) {
        const uint8_t* line = read.line(pixel.image, pixel.first[0] + d * shape.dilation[0],
                                        pixel.first[1] + h * shape.dilation[1]);
        int64_t width = pixel.first[2];
        for (int64_t w = 0; w < shape.window[2]; ++w, ++tap, width += shape.dilation[2]) {
          places[tap] = line && width >= 0 && width < shape.in[2] ? line + width * read.channels : outside;
          moves[tap] = line ? shape.stride[2] * read.channels : 0;
        }
      }
    }
  }
}

void run_depthwise(const Reader& read, const Weight& weight, const Output& out, int64_t begin, int64_t end) {
  const Shape& shape = read.shape;
  const int64_t channels = shape.groups, taps = shape.taps();
  const std::vector<uint8_t> outside(channels, read.x.zero_point ^ read.x.flip);
  std::vector<const uint8_t*> places((end - begin) * taps);
  find_places(read, begin, end, outside.data(), places.data());
  alignas(64) int32_t sums[kDepthwisePixels * kChunk];
  for (int64_t channel = 0; channel < channels; channel += kChunk) {
    const int64_t count = std::min(kChunk, channels - channel);
    for (int64_t lane = 0; lane < count; lane += kSummed) {
      depthwise_sums(places.data(), taps, end - begin, weight.values.data(), channels, channel + lane,
                     std::min(kSummed, count - lane), read.x.flip, sums + lane);
    }
    finish(sums, channel, count, end - begin, out,
           [&](int64_t pixel) { return (begin + pixel) * channels + channel; });
  }
}

void run(const Shape& shape, const Input& x, const Weight& weight, const Output& out, int64_t begin, int64_t end) {
  const Reader read{shape, x};
  if (shape.is_depthwise()) {
    for (int64_t first = begin * kDepthwisePixels; begin < end; ++begin, first += kDepthwisePixels)
      run_depthwise(read, weight, out, first, std::min(first + kDepthwisePixels, shape.pixels()));
    return;
  }
  const int64_t of_block = shape.groups * chunks_of(shape);
  const std::unique_ptr<Buffers> buffers(new Buffers);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t group = task % of_block / chunks_of(shape), chunk = task % chunks_of(shape);
    run_block(read, weight, out, task / of_block, group, chunk * chunk_of(shape), *buffers);
  }
}

}  // namespace
}  // namespace TARGET_NAME

#undef TARGET_NAME
#undef TARGET_AVX512
#undef TARGET_VNNI
#undef TARGET_AVX2
