// The loops of exact_convolution.cpp for the instruction set TARGET_NAME.

namespace TARGET_NAME {
namespace {

// Results of `count` outputs of one pixel, which begin at the output `first` of all.
void finish(const int32_t* __restrict sums, int64_t first, int64_t count, const Output& out, int64_t at) {
  const float input_scale = out.input_scale;
  const int32_t* __restrict offsets = out.offsets + first;
  const float *__restrict scales = out.scales + first, *__restrict bias = out.bias + first;
  if (out.is_float) {
    float* __restrict floats = static_cast<float*>(out.values) + at;
    for (int64_t o = 0; o < count; ++o)
      floats[o] = static_cast<float>(sums[o] - offsets[o]) * input_scale * scales[o] + bias[o];
    return;
  }
  // Adding it leaves the rounded value, ties to even, in the lowest bits of a float.
  constexpr float kRound = 12582912.0f;
  const float inverse = out.inverse, zero = out.zero, low = out.low, high = out.high;
  uint8_t* __restrict bytes = static_cast<uint8_t*>(out.values) + at;
  for (int64_t o = 0; o < count; ++o) {
    const float result = static_cast<float>(sums[o] - offsets[o]) * input_scale * scales[o] + bias[o];
    float value = result * inverse + zero;
    value = value > low ? value : low;
    value = value < high ? value : high;
    bytes[o] = static_cast<uint8_t>(std::bit_cast<int32_t>(value + kRound));
  }
}

void widen(const uint8_t* from, int64_t count, uint8_t flip, int16_t* to) {
#if TARGET_AVX2
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
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<int16_t>(from[i] ^ flip);
}

// Copies the columns from `begin` to `end` of a pixel's row.
void copy_row(const Reader& read, const Pixel& pixel, int64_t group, const Columns& columns, int16_t* to) {
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
  if (columns.count % 2) *to = 0;
}

// Adds the products of `kCount` rows and `kLanes` outputs to `sums`, whose rows are kChunk apart.
template <int kCount>
__attribute__((noinline)) void multiply(const int16_t* rows, const int8_t* weight, int64_t pairs, int32_t* sums) {
#if TARGET_AVX512
  __m512i totals[kCount];
  for (int r = 0; r < kCount; ++r) totals[r] = _mm512_loadu_si512(sums + r * kChunk);
  for (int64_t pair = 0; pair < pairs; ++pair, weight += 2 * kLanes) {
    const __m512i columns =
        _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight)));
    for (int r = 0; r < kCount; ++r) {
      int32_t two;
      std::memcpy(&two, rows + r * kRow + 2 * pair, sizeof two);
      totals[r] = _mm512_add_epi32(totals[r], _mm512_madd_epi16(_mm512_set1_epi32(two), columns));
    }
  }
  for (int r = 0; r < kCount; ++r) _mm512_storeu_si512(sums + r * kChunk, totals[r]);
#elif TARGET_AVX2
  __m256i totals[2 * kCount];
  for (auto& total : totals) total = _mm256_setzero_si256();
  int64_t pair = 0;
  do {
    const auto* from = reinterpret_cast<const __m128i*>(weight);
    const __m256i first = _mm256_cvtepi8_epi16(_mm_loadu_si128(from)),
                  second = _mm256_cvtepi8_epi16(_mm_loadu_si128(from + 1));
    for (int r = 0; r < kCount; ++r) {
      int32_t two;
      std::memcpy(&two, rows + r * kRow + 2 * pair, sizeof two);
      const __m256i both = _mm256_set1_epi32(two);
      totals[2 * r] = _mm256_add_epi32(totals[2 * r], _mm256_madd_epi16(both, first));
      totals[2 * r + 1] = _mm256_add_epi32(totals[2 * r + 1], _mm256_madd_epi16(both, second));
    }
    weight += 2 * kLanes;
  } while (++pair < pairs);
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

struct Buffers {
  alignas(64) int16_t rows[kPixels * kRow];
  alignas(64) int32_t sums[kPixels * kChunk];
};

// The block of pixels `block` of a group, for the outputs from `first` on.
void run_block(const Reader& read, const Weight& weight, const Output& out, int64_t block, int64_t group,
               int64_t first, Buffers& buffers) {
  const Shape& shape = read.shape;
  const int64_t begin = block * block_of(shape), count = std::min(block_of(shape), shape.pixels() - begin);
  if (count <= 0) return;
  const int64_t outputs = std::min(chunk_of(shape), shape.outputs - first), columns = shape.columns();
  const int64_t pairs = pairs_of(columns);
  const int8_t* lanes =
      weight.values.data() + (group * up(shape.outputs, kLanes) + first / kLanes) * pairs * kLanes * 2;
  std::fill_n(buffers.sums, count * kChunk, 0);
  for (int64_t column = 0; column < columns; column += kColumns) {
    const Columns some(shape, column, std::min(kColumns, columns - column));
    Pixel at(shape, begin);
    for (int64_t pixel = 0; pixel < count; ++pixel, at.next(shape)) {
      if (shape.chosen) at = Pixel(shape, (*shape.chosen)[begin + pixel]);
      copy_row(read, at, group, some, buffers.rows + pixel * kRow);
    }
    for (int64_t output = 0; output < outputs; output += kLanes) {
      const int8_t* of_lanes = lanes + (output * pairs + column / 2 * kLanes) * 2;
      const auto strip = [&](auto multiply_rows, int64_t pixel) {
        const int64_t at = pixel * kChunk + output;
        multiply_rows(buffers.rows + pixel * kRow, of_lanes, pairs_of(some.count), buffers.sums + at);
      };
      int64_t pixel = 0;
#if TARGET_AVX512
      for (; pixel + 12 <= count; pixel += 12) strip(multiply<12>, pixel);
#endif
      for (; pixel + kStep <= count; pixel += kStep) strip(multiply<kStep>, pixel);
      for (; pixel < count; ++pixel) strip(multiply<1>, pixel);
    }
  }
  const int64_t from = group * shape.outputs + first, all = shape.groups * shape.outputs;
  for (int64_t pixel = 0; pixel < count; ++pixel) {
    const int64_t index = shape.chosen ? (*shape.chosen)[begin + pixel] : begin + pixel;
    finish(buffers.sums + pixel * kChunk, from, outputs, out, index * all + from);
  }
}

// Sums of up to kLanes channels from `channel` on, each of `taps` values.
void depthwise_sums(const uint8_t* const* taps, int64_t count, const int8_t* weight, int64_t channels,
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
    const int8_t* of_tap = weight + (tap / 2 * channels + channel) * 2 + tap % 2;
    for (int64_t c = 0; c < lanes; ++c)
      sums[c] += static_cast<int32_t>(static_cast<uint8_t>(from[c] ^ flip)) * of_tap[2 * c];
  }
}

void run_depthwise(const Reader& read, const Weight& weight, const Output& out, int64_t begin, int64_t end) {
  const Shape& shape = read.shape;
  const int64_t channels = shape.groups, taps = shape.taps();
  const std::vector<uint8_t> outside(channels, read.x.zero_point ^ read.x.flip);
  std::vector<const uint8_t*> places(taps);
  int32_t sums[kChunk];
  Pixel pixel(shape, begin);
  for (int64_t index = begin; index < end; ++index, pixel.next(shape)) {
    const uint8_t** place = places.data();
    for (int64_t d = 0; d < shape.window[0]; ++d) {
      for (int64_t h = 0; h < shape.window[1]; ++h) {
        const uint8_t* line = read.line(pixel.image, pixel.first[0] + d * shape.dilation[0],
                                        pixel.first[1] + h * shape.dilation[1]);
        int64_t width = pixel.first[2];
        for (int64_t w = 0; w < shape.window[2]; ++w, width += shape.dilation[2])
          *place++ = line && width >= 0 && width < shape.in[2] ? line + width * channels : outside.data();
      }
    }
    for (int64_t channel = 0; channel < channels; channel += kChunk) {
      const int64_t count = std::min(kChunk, channels - channel);
      for (int64_t lane = 0; lane < count; lane += kLanes) {
        const int64_t lanes = std::min(kLanes, count - lane);
        depthwise_sums(places.data(), taps, weight.values.data(), channels, channel + lane, lanes, read.x.flip,
                       sums + lane);
      }
      finish(sums, channel, count, out, index * channels + channel);
    }
  }
}

void run(const Shape& shape, const Input& x, const Weight& weight, const Output& out, int64_t begin, int64_t end) {
  const Reader read{shape, x};
  if (shape.is_depthwise()) {
    run_depthwise(read, weight, out, begin * kDepthwisePixels, std::min(end * kDepthwisePixels, shape.pixels()));
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
#undef TARGET_AVX2
