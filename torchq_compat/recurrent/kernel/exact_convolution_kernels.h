// The loops of exact_convolution.cpp for the instruction set TARGET_NAME.

namespace TARGET_NAME {
namespace {

// Results of `count` outputs of one pixel, which begin at the output `first` of all.
void finish(const int32_t* sums, int64_t first, int64_t count, const Output& out, int64_t at) {
  constexpr float kRound = 12582912.0f, kMost = 2000000.0f;
  const int32_t zero_point = out.zero_point;
  const float input_scale = out.input_scale, inverse = out.inverse, zero = out.zero, low = out.low, high = out.high;
  const int32_t* of_weight = out.weight_sums + first;
  const float* scales = out.scales + first;
  float values[kChunk];
  float* floats = out.is_float ? static_cast<float*>(out.values) + at : values;
  for (int64_t o = 0; o < count; ++o)
    floats[o] = static_cast<float>(sums[o] - zero_point * of_weight[o]) * input_scale * scales[o];
  if (out.bias) {
    const float* bias = out.bias + first;
    for (int64_t o = 0; o < count; ++o) floats[o] += bias[o];
  }
  if (out.is_float) return;
  uint8_t* bytes = static_cast<uint8_t*>(out.values) + at;
  for (int64_t o = 0; o < count; ++o) {
    float value = values[o] * inverse + zero;
    value = value < kMost ? value : kMost;
    value = value > -kMost ? value : -kMost;
    value = (value + kRound) - kRound;
    value = value > low ? value : low;
    value = value < high ? value : high;
    bytes[o] = static_cast<uint8_t>(static_cast<int32_t>(value));
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
void copy_row(const Reader& read, const Pixel& pixel, int64_t group, int64_t begin, int64_t end, int16_t* to) {
  const Shape& shape = read.shape;
  // Windows without holes read neighbours, whose channels lie side by side.
  const bool is_whole = shape.groups == 1 && shape.dilation[2] == 1;
  const int64_t taps = shape.window[2], line = taps * shape.inputs;
  const auto fill = [&](int64_t count) { to = std::fill_n(to, count, read.x.zero_point); };
  for (int64_t column = begin; column < end;) {
    const int64_t plane = column / line, depth = pixel.first[0] + plane / shape.window[1] * shape.dilation[0],
                  height = pixel.first[1] + plane % shape.window[1] * shape.dilation[1];
    int64_t in_line = column % line;
    const int64_t until = std::min(line, in_line + end - column);
    column += until - in_line;
    if (!read.at(pixel.image, depth, height, 0)) {
      fill(until - in_line);
    } else if (is_whole) {
      const int64_t width = pixel.first[2];
      const int64_t first = std::clamp(std::max<int64_t>(0, -width) * shape.inputs, in_line, until);
      const int64_t last = std::clamp((shape.in[2] - width) * shape.inputs, first, until);
      fill(first - in_line);
      const uint8_t* from = read.at(pixel.image, depth, height, 0) + width * shape.inputs;
      widen(from + first, last - first, read.x.flip, to);
      to += last - first;
      fill(until - last);
    } else {
      while (in_line < until) {
        const int64_t tap = in_line / shape.inputs, input = in_line % shape.inputs;
        const int64_t count = std::min(shape.inputs - input, until - in_line);
        const uint8_t* from = read.at(pixel.image, depth, height, pixel.first[2] + tap * shape.dilation[2]);
        in_line += count;
        if (!from) {
          fill(count);
          continue;
        }
        widen(from + group * shape.inputs + input, count, read.x.flip, to);
        to += count;
      }
    }
  }
  if ((end - begin) % 2) *to = 0;
}

// Adds the products of `kCount` rows and `kLanes` outputs to `sums`, whose rows are kChunk apart.
template <int kCount>
void multiply(const int16_t* rows, const int8_t* weight, int64_t pairs, int32_t* sums) {
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
  __m256i low[kCount], high[kCount];
  for (int r = 0; r < kCount; ++r) {
    low[r] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums + r * kChunk));
    high[r] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums + r * kChunk + 8));
  }
  for (int64_t pair = 0; pair < pairs; ++pair, weight += 2 * kLanes) {
    const auto* from = reinterpret_cast<const __m128i*>(weight);
    const __m256i first = _mm256_cvtepi8_epi16(_mm_loadu_si128(from)),
                  second = _mm256_cvtepi8_epi16(_mm_loadu_si128(from + 1));
    for (int r = 0; r < kCount; ++r) {
      int32_t two;
      std::memcpy(&two, rows + r * kRow + 2 * pair, sizeof two);
      const __m256i both = _mm256_set1_epi32(two);
      low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(both, first));
      high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(both, second));
    }
  }
  for (int r = 0; r < kCount; ++r) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + r * kChunk), low[r]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + r * kChunk + 8), high[r]);
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
  const int64_t outputs = std::min(kChunk, shape.outputs - first), columns = shape.columns();
  const int64_t pairs = pairs_of(columns);
  const int8_t* lanes =
      weight.values.data() + (group * up(shape.outputs, kLanes) + first / kLanes) * pairs * kLanes * 2;
  std::fill_n(buffers.sums, count * kChunk, 0);
  for (int64_t column = 0; column < columns; column += kColumns) {
    const int64_t until = std::min(columns, column + kColumns), some = pairs_of(until - column);
    for (int64_t pixel = 0; pixel < count; ++pixel)
      copy_row(read, Pixel(shape, begin + pixel), group, column, until, buffers.rows + pixel * kRow);
    for (int64_t output = 0; output < outputs; output += kLanes) {
      const int8_t* of_lanes = lanes + (output * pairs + column / 2 * kLanes) * 2;
      int64_t pixel = 0;
      for (; pixel + kStrip <= count; pixel += kStrip)
        multiply<kStrip>(buffers.rows + pixel * kRow, of_lanes, some, buffers.sums + pixel * kChunk + output);
      for (; pixel + 2 <= count; pixel += 2)
        multiply<2>(buffers.rows + pixel * kRow, of_lanes, some, buffers.sums + pixel * kChunk + output);
      if (pixel < count)
        multiply<1>(buffers.rows + pixel * kRow, of_lanes, some, buffers.sums + pixel * kChunk + output);
    }
  }
  const int64_t from = group * shape.outputs + first, all = shape.groups * shape.outputs;
  for (int64_t pixel = 0; pixel < count; ++pixel)
    finish(buffers.sums + pixel * kChunk, from, outputs, out, (begin + pixel) * all + from);
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
  for (int64_t index = begin; index < end; ++index) {
    const Pixel pixel(shape, index);
    for (int64_t tap = 0; tap < taps; ++tap) {
      const int64_t width = tap % shape.window[2], plane = tap / shape.window[2];
      const uint8_t* at = read.at(pixel.image, pixel.first[0] + plane / shape.window[1] * shape.dilation[0],
                                  pixel.first[1] + plane % shape.window[1] * shape.dilation[1],
                                  pixel.first[2] + width * shape.dilation[2]);
      places[tap] = at ? at : outside.data();
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
    run_block(read, weight, out, task / of_block, group, chunk * kChunk, *buffers);
  }
}

}  // namespace
}  // namespace TARGET_NAME

#undef TARGET_NAME
#undef TARGET_AVX512
#undef TARGET_AVX2
