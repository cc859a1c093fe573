// The loops of exact_convolution.cpp for the instruction set TARGET_NAME.

namespace TARGET_NAME {
namespace {

// The values that are multiplied, how many columns an instruction sums, and how many are copied at once: the rows of a
// strip and the weights of its lanes stay in the L1 cache.
#if TARGET_VNNI
using Value = uint8_t;
constexpr int64_t kDepth = 4, kColumns = 576;
#else
using Value = int16_t;
constexpr int64_t kDepth = 2, kColumns = 512;
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

// Four vectors as a matrix of 128 bits, transposed: the sums of a depthwise convolution, by channels.
void transpose(__m512i* v) {
  const __m512i a = _mm512_shuffle_i32x4(v[0], v[1], 0x44), b = _mm512_shuffle_i32x4(v[2], v[3], 0x44);
  const __m512i c = _mm512_shuffle_i32x4(v[0], v[1], 0xee), d = _mm512_shuffle_i32x4(v[2], v[3], 0xee);
  v[0] = _mm512_shuffle_i32x4(a, b, 0x88), v[1] = _mm512_shuffle_i32x4(a, b, 0xdd);
  v[2] = _mm512_shuffle_i32x4(c, d, 0x88), v[3] = _mm512_shuffle_i32x4(c, d, 0xdd);
}

// Makes bytes of the sums of up to kWide outputs from `first` on; see finish.
struct Rounder {
  __m512i starts[4], low;
  __m512 scales[4], bias[4], input_scale, inverse, zero, high;
  bool is_signed;

  Rounder(const Output& out, int64_t first, int64_t count, bool is_transposed)
      : low(_mm512_set1_epi8(static_cast<char>(out.low))),
        input_scale(_mm512_set1_ps(out.input_scale)),
        inverse(_mm512_set1_ps(out.inverse)),
        zero(_mm512_set1_ps(out.zero)),
        high(_mm512_set1_ps(out.high)),
        is_signed(out.low < 0) {
    __m512i numbers[3][4];
    for (int part = 0; part < 4; ++part) {
      const int64_t at = first + part * kLanes, left = std::clamp<int64_t>(count - part * kLanes, 0, kLanes);
      const __mmask16 mask = (1u << left) - 1;
      numbers[0][part] = _mm512_maskz_loadu_epi32(mask, out.starts + at);
      numbers[1][part] = _mm512_maskz_loadu_epi32(mask, out.scales + at);
      numbers[2][part] = _mm512_maskz_loadu_epi32(mask, out.bias + at);
    }
    if (is_transposed) {
      for (auto& each : numbers) transpose(each);
    }
    for (int part = 0; part < 4; ++part) {
      starts[part] = numbers[0][part];
      scales[part] = _mm512_castsi512_ps(numbers[1][part]);
      bias[part] = _mm512_castsi512_ps(numbers[2][part]);
    }
  }

  // The bytes of `kParts` vectors of sums, four of each behind one another: by channels, if they are transposed.
  // Packing saturates, to the integers of the sign that `low` tells.
  template <int kParts>
  __m512i interleaved(const __m512i* sums) const {
    __m512i parts[4] = {};
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      __m512 value = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sums[part]), input_scale), scales[part]);
      value = _mm512_add_ps(_mm512_mul_ps(_mm512_add_ps(value, bias[part]), inverse), zero);
      parts[part] = _mm512_cvtps_epi32(_mm512_min_ps(value, high));
    }
    if (is_signed) {
      const __m512i bytes =
          _mm512_packs_epi16(_mm512_packs_epi32(parts[0], parts[1]), _mm512_packs_epi32(parts[2], parts[3]));
      return _mm512_max_epi8(bytes, low);
    }
    const __m512i bytes =
        _mm512_packus_epi16(_mm512_packus_epi32(parts[0], parts[1]), _mm512_packus_epi32(parts[2], parts[3]));
    return _mm512_max_epu8(bytes, low);
  }
};

#endif

// Results of `count` outputs, from the output `first` of all on; the sums of pixels are kChunk apart, and their
// results begin at `place`.
template <typename Place>
void finish(const int32_t* __restrict sums, int64_t first, int64_t count, int64_t pixels, const Output& out,
            const Place& place) {
  const float input_scale = out.input_scale;
  const float *__restrict scales = out.scales + first, *__restrict bias = out.bias + first;
  if (out.is_float) {
    for (int64_t pixel = 0; pixel < pixels; ++pixel, sums += kChunk) {
      float* __restrict floats = static_cast<float*>(out.values) + place(pixel);
      for (int64_t o = 0; o < count; ++o)
        floats[o] = static_cast<float>(sums[o]) * input_scale * scales[o] + bias[o];
    }
    return;
  }
  // Adding it leaves the rounded value, ties to even, in the lowest bits of a float.
  constexpr float kRound = 12582912.0f;
  const float inverse = out.inverse, zero = out.zero, low = out.low, high = out.high;
  for (int64_t pixel = 0; pixel < pixels; ++pixel, sums += kChunk) {
    uint8_t* __restrict bytes = static_cast<uint8_t*>(out.values) + place(pixel);
    for (int64_t o = 0; o < count; ++o) {
      const float result = static_cast<float>(sums[o]) * input_scale * scales[o] + bias[o];
      float value = result * inverse + zero;
      value = value > low ? value : low;
      value = value < high ? value : high;
      bytes[o] = static_cast<uint8_t>(std::bit_cast<int32_t>(value + kRound));
    }
  }
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
      for (int64_t h = 0; h < shape.window[1]; ++h, into += line, from += next_line)
        widen(from, line, read.x.flip, into);
    }
    for (int64_t column = columns.count; column % kDepth; ++column) *into++ = 0;
  }
}

#if TARGET_VNNI
// The products of rows with up to kWide outputs; `bytes`: where the results go, null: only their sums are needed.
struct Product {
  const Value* rows;
  int64_t row;
  const int8_t* weight;
  int64_t of_group, steps, outputs;
  bool is_first;
  int32_t* sums;
  uint8_t* bytes;
  int64_t next;
  Rounder rounder;
};

// Of `kCount` rows from `pixel` on, and of `kGroups` times kLanes outputs.
template <int kCount, int kGroups>
__attribute__((noinline)) void multiply(const Product& of, int64_t pixel) {
  __m512i totals[kCount * kGroups], columns[kGroups];
  const Value* rows = of.rows + pixel * of.row;
  const int8_t* weight = of.weight;
  const int64_t row = of.row, of_group = of.of_group;
  int32_t* sums = of.sums + pixel * kChunk;
  // Unrolled early: else GCC keeps the sums in memory.
#pragma GCC unroll 32
  for (int i = 0; i < kCount * kGroups; ++i)
    totals[i] = of.is_first ? of.rounder.starts[i % kGroups]
                            : _mm512_loadu_si512(sums + i / kGroups * kChunk + i % kGroups * kLanes);
  for (int64_t step = 0; step < of.steps; ++step, weight += kDepth * kLanes, rows += kDepth) {
#pragma GCC unroll 32
    for (int g = 0; g < kGroups; ++g) columns[g] = _mm512_loadu_si512(weight + g * of_group);
#pragma GCC unroll 32
    for (int i = 0; i < kCount * kGroups; ++i) {
      int32_t four;
      std::memcpy(&four, rows + i / kGroups * row, sizeof four);
      totals[i] = _mm512_dpbusd_epi32(totals[i], _mm512_set1_epi32(four), columns[i % kGroups]);
    }
  }
  if (!of.bytes) {
#pragma GCC unroll 32
    for (int i = 0; i < kCount * kGroups; ++i)
      _mm512_storeu_si512(sums + i / kGroups * kChunk + i % kGroups * kLanes, totals[i]);
    return;
  }
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  uint8_t* to = of.bytes + pixel * of.next;
#pragma GCC unroll 32
  for (int r = 0; r < kCount; ++r, to += of.next) {
    const __m512i bytes =
        _mm512_permutexvar_epi32(order, of.rounder.template interleaved<kGroups>(totals + r * kGroups));
    if (of.outputs == kGroups * kLanes && kGroups == 4) {
      _mm512_storeu_si512(to, bytes);
    } else {
      store_some(bytes, of.outputs, to);
    }
  }
}

// One row by itself waits for its sums, so it joins a strip of `kCount` where the registers hold them.
template <int kCount, int kGroups>
void multiply_strips(const Product& of, int64_t count) {
  constexpr int kOneMore = kGroups * (kCount + 1) <= 26 ? kCount + 1 : kCount;
  int64_t pixel = 0;
  for (; pixel + kCount <= count && pixel + kOneMore != count; pixel += kCount) multiply<kCount, kGroups>(of, pixel);
  if (kOneMore != kCount && pixel + kOneMore == count) return multiply<kOneMore, kGroups>(of, pixel);
  for (; kCount > 4 && pixel + 4 <= count; pixel += 4) multiply<4, kGroups>(of, pixel);
  for (; pixel < count; ++pixel) multiply<1, kGroups>(of, pixel);
}

// The same for any number of outputs, from `first` on.
void multiply_all(const Value* rows, int64_t row, int64_t count, const int8_t* weight, int64_t of_group,
                  int64_t outputs, int64_t steps, bool is_first, const Output& out, int64_t first, int32_t* sums,
                  uint8_t* bytes, int64_t next) {
  // The weights of four groups are in the L1 cache only if they are few; few rows do not read them again.
  const int64_t widest = steps <= 64 || count < 4 ? kWide : 2 * kLanes;
  for (int64_t output = 0, some = 0; output < outputs; output += some) {
    const int64_t left = outputs - output;
    some = std::min(left, left > 3 * kLanes ? widest : 2 * kLanes);
    const Product of{rows, row, weight + output / kLanes * of_group, of_group, steps, some, is_first, sums + output,
                     bytes ? bytes + output : nullptr, next, Rounder(out, first + output, some, false)};
    (some > 2 * kLanes ? multiply_strips<6, 4> : some > kLanes ? multiply_strips<12, 2> : multiply_strips<12, 1>)(of,
                                                                                                              count);
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
                  int64_t outputs, int64_t steps, bool is_first, const Output& out, int64_t first, int32_t* sums,
                  uint8_t*, int64_t) {
  for (int64_t pixel = 0; is_first && pixel < count; ++pixel) {
    int32_t* end = std::copy_n(out.starts + first, outputs, sums + pixel * kChunk);
    std::fill(end, sums + pixel * kChunk + up(outputs, kLanes) * kLanes, 0);
  }
  for (int64_t output = 0; output < outputs; output += kLanes, weight += of_group) {
    const auto strip = [&](auto multiply_rows, int64_t pixel) {
      multiply_rows(rows + pixel * row, weight, steps, sums + pixel * kChunk + output);
    };
    int64_t pixel = 0;
#if TARGET_AVX512
    for (; pixel + 12 <= count; pixel += 12) strip(multiply<12>, pixel);
#endif
    for (; pixel + 4 <= count; pixel += 4) strip(multiply<4>, pixel);
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
  const int64_t from = group * shape.outputs + first, all = shape.groups * shape.outputs;
  const bool is_in_place = is_read_in_place(read), rounds = kDepth == 4 && !out.is_float && !shape.chosen;
  for (int64_t column = 0; column < columns; column += kColumns) {
    const Columns some(shape, column, std::min(kColumns, columns - column));
    const Value* rows = buffers.rows;
    if (is_in_place) {
      rows = reinterpret_cast<const Value*>(read.x.values) + begin * columns + column;
    } else {
      copy_rows(read, begin, count, group, some, buffers.rows);
    }
    const bool is_last = column + kColumns >= columns;
    multiply_all(rows, is_in_place ? columns : kRow, count, lanes + column * kLanes, of_group, outputs,
                 steps_of(some.count), column == 0, out, from, buffers.sums,
                 rounds && is_last ? static_cast<uint8_t*>(out.values) + begin * all + from : nullptr, all);
  }
  if (rounds) return;
  finish(buffers.sums, from, outputs, count, out, [&](int64_t pixel) {
    return (shape.chosen ? (*shape.chosen)[begin + pixel] : begin + pixel) * all + from;
  });
}

#if TARGET_VNNI
// Up to kWide channels from `channel` on of a depthwise convolution: `sums` of those of a pixel become results.
struct DepthwiseBlock {
  const Reader& read;
  const Output& out;
  int64_t channels, channel, count;
  const int8_t* weight;
  const uint8_t* outside;
  Rounder rounder;
  __mmask64 mask;
  __m512i flips;

  DepthwiseBlock(const Reader& read_, const Weight& packed, const Output& out_, const uint8_t* outside_,
                 int64_t channel_)
      : read(read_),
        out(out_),
        channels(read_.shape.groups),
        channel(channel_),
        count(std::min(kWide, channels - channel)),
        weight(packed.values.data() + channel * kDepth),
        outside(outside_),
        rounder(out, channel, count, true),
        mask(count == kWide ? ~0ull : (1ull << count) - 1),
        flips(_mm512_set1_epi8(static_cast<char>(read_.x.flip))) {}

  __m512i load(const uint8_t* from) const {
    return _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, from + channel), flips);
  }
  __m512i weights(int64_t step, int part) const {
    return _mm512_loadu_si512(weight + (step * up(channels, kWide) * kWide + part * kLanes) * kDepth);
  }
  // Four values of each channel side by side.
  static void interleave(__m512i a, __m512i b, __m512i c, __m512i d, __m512i* parts) {
    const __m512i ab[2] = {_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b)};
    const __m512i cd[2] = {_mm512_unpacklo_epi8(c, d), _mm512_unpackhi_epi8(c, d)};
    parts[0] = _mm512_unpacklo_epi16(ab[0], cd[0]), parts[1] = _mm512_unpackhi_epi16(ab[0], cd[0]);
    parts[2] = _mm512_unpacklo_epi16(ab[1], cd[1]), parts[3] = _mm512_unpackhi_epi16(ab[1], cd[1]);
  }
  void write(int64_t pixel, __m512i* sums) const {
    const int64_t place = pixel * channels + channel;
    if (out.is_float) {
      alignas(64) int32_t numbers[kChunk];
      transpose(sums);
      for (int part = 0; part < 4; ++part) _mm512_store_si512(numbers + part * kLanes, sums[part]);
      return finish(numbers, channel, count, 1, out, [&](int64_t) { return place; });
    }
    const __m512i bytes = rounder.interleaved<4>(sums);
    uint8_t* to = static_cast<uint8_t*>(out.values) + place;
    if (count == kWide) {
      _mm512_storeu_si512(to, bytes);
    } else {
      store_some(bytes, count, to);
    }
  }

  // The pixel `index`, whose window has its values at `taps`.
  void sum(int64_t index, const uint8_t* const* taps, int64_t tap_count) const {
    __m512i sums[4], parts[4];
    std::copy_n(rounder.starts, 4, sums);
    for (int64_t tap = 0; tap < tap_count; tap += kDepth) {
      const auto at = [&](int64_t i) { return load(taps[std::min(tap + i, tap_count - 1)]); };
      interleave(at(0), at(1), at(2), at(3), parts);
      for (int part = 0; part < 4; ++part)
        sums[part] = _mm512_dpbusd_epi32(sums[part], parts[part], weights(tap / kDepth, part));
    }
    write(index, sums);
  }

  // `pixels` of a line from the pixel `at`, `index`, on, by windows that slide: the columns that the next one reads too
  // are kept.
  void slide(const Pixel& at, int64_t index, int64_t pixels) const {
    const Shape& shape = read.shape;
    const uint8_t* lines[kSlid];
    int64_t step[kSlid];
    for (int64_t h = 0; h < kSlid; ++h) {
      const uint8_t* line = read.line(at.image, at.first[0], at.first[1] + h * shape.dilation[1]);
      lines[h] = line ? line : outside, step[h] = line ? channels : 0;
    }
    __m512i held[4 * kSlid], columns[kSlid][4];
#pragma GCC unroll 12
    for (int i = 0; i < 4 * kSlid; ++i) held[i] = weights(i / 4, i % 4);
    const auto read_column = [&](int64_t width, __m512i* parts) {
      const bool is_inside = width >= 0 && width < shape.in[2];
      const auto row = [&](int64_t h) { return load(is_inside ? lines[h] + width * step[h] : outside); };
      interleave(row(0), row(1), row(2), _mm512_setzero_si512(), parts);
    };
    int64_t width = at.first[2];
    for (int64_t c = 0; c < kSlid; ++c) read_column(width + c, columns[c]);
    for (const int64_t end = index + pixels;;) {
      __m512i sums[4];
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        sums[part] = rounder.starts[part];
#pragma GCC unroll 3
        for (int c = 0; c < kSlid; ++c)
          sums[part] = _mm512_dpbusd_epi32(sums[part], columns[c][part], held[4 * c + part]);
      }
      write(index, sums);
      if (++index == end) return;
      width += shape.stride[2];
      if (shape.stride[2] == 1) {
        std::copy_n(columns[1], 4, columns[0]);
        std::copy_n(columns[2], 4, columns[1]);
      } else {
        if (shape.stride[2] == 2) {
          std::copy_n(columns[2], 4, columns[0]);
        } else {
          read_column(width, columns[0]);
        }
        read_column(width + 1, columns[1]);
      }
      read_column(width + 2, columns[2]);
    }
  }
};
#else
// Sums of up to kLanes channels from `channel` on, each of `taps` values.
void sum_lanes(const uint8_t* const* taps, int64_t count, const int8_t* weight, int64_t channels,
               int64_t channel, int64_t lanes, uint8_t flip, const int32_t* starts, int32_t* sums) {
#if TARGET_AVX2
  if (lanes == kLanes) {
    const __m128i flips = _mm_set1_epi8(static_cast<char>(flip));
    const auto* first_sums = reinterpret_cast<const __m256i*>(starts + channel);
    __m256i low = _mm256_loadu_si256(first_sums), high = _mm256_loadu_si256(first_sums + 1);
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
  std::copy_n(starts + channel, lanes, sums);
  for (int64_t tap = 0; tap < count; ++tap) {
    const uint8_t* from = taps[tap] + channel;
    const int8_t* of_tap = weight + (tap / kDepth * channels + channel) * kDepth + tap % kDepth;
    for (int64_t c = 0; c < lanes; ++c)
      sums[c] += static_cast<int32_t>(static_cast<uint8_t>(from[c] ^ flip)) * of_tap[kDepth * c];
  }
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
#if TARGET_VNNI
  if (slides(shape)) {
    for (int64_t channel = 0; channel < channels; channel += kWide) {
      const DepthwiseBlock block(read, weight, out, outside.data(), channel);
      Pixel at(shape, begin);
      for (int64_t index = begin, count = 0; index < end; index += count) {
        count = std::min(end - index, shape.out[2] - at.out[2]);
        block.slide(at, index, count);
        at.set(shape, 2, shape.out[2] - 1);
        at.next(shape);
      }
    }
    return;
  }
#endif
  std::vector<const uint8_t*> places((end - begin) * taps);
  find_places(read, begin, end, outside.data(), places.data());
#if TARGET_VNNI
  for (int64_t channel = 0; channel < channels; channel += kWide) {
    const DepthwiseBlock block(read, weight, out, outside.data(), channel);
    for (int64_t index = begin; index < end; ++index) block.sum(index, places.data() + (index - begin) * taps, taps);
  }
#else
  alignas(64) int32_t sums[kDepthwisePixels * kChunk];
  for (int64_t channel = 0; channel < channels; channel += kChunk) {
    const int64_t count = std::min(kChunk, channels - channel);
    for (int64_t lane = 0; lane < count; lane += kLanes) {
      for (int64_t pixel = 0; pixel < end - begin; ++pixel)
        sum_lanes(places.data() + pixel * taps, taps, weight.values.data(), channels, channel + lane,
                  std::min(kLanes, count - lane), read.x.flip, out.starts, sums + pixel * kChunk + lane);
    }
    finish(sums, channel, count, end - begin, out,
           [&](int64_t pixel) { return (begin + pixel) * channels + channel; });
  }
#endif
}

void run(const Shape& shape, const Input& x, const Weight& weight, const Output& out, int64_t begin, int64_t end) {
  const Reader read{shape, x};
  if (shape.is_depthwise()) {
    for (int64_t first = begin * kDepthwisePixels; begin < end; ++begin, first += kDepthwisePixels)
      run_depthwise(read, weight, out, first, std::min(first + kDepthwisePixels, shape.pixels()));
    return;
  }
  const int64_t of_block = shape.groups * chunks_of(shape);
  // Kept: allocating and freeing so much takes as long as a small convolution.
  thread_local const std::unique_ptr<Buffers> buffers(new Buffers);
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
