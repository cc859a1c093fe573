// The kernels of one instruction set. This file is included once for each set, with TARGET_NAME as its
// namespace, and compiled for TARGET_AVX512, TARGET_AVX2, TARGET_AVX_VNNI, TARGET_SSE2, TARGET_NEON_DOT or
// TARGET_NEON_I8MM; without any of them, in plain C++ with the compiler's generic vectors. With TARGET_REST a
// set has only products of its own; the rest is that of the set TARGET_REST, included before, with vectors of
// the same width.
//
// All sets do the same operations on floats in the same order, none of them fused, so that all compute the
// same bits.

namespace TARGET_NAME {

#define INLINE inline __attribute__((always_inline))

#if TARGET_AVX512
constexpr int64_t kWidth = 16;
#elif TARGET_AVX2
constexpr int64_t kWidth = 8;
#else
constexpr int64_t kWidth = 4;
#endif
constexpr int64_t kParts = kLanes / kWidth;

typedef float F __attribute__((vector_size(4 * kWidth)));
typedef int32_t I __attribute__((vector_size(4 * kWidth)));

INLINE F load(const float* from) {
  F value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}
INLINE I load(const int32_t* from) {
  I value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}
INLINE void store(float* to, F value) { __builtin_memcpy(to, &value, sizeof value); }
INLINE void store(int32_t* to, I value) { __builtin_memcpy(to, &value, sizeof value); }
INLINE F all(float value) { return value - F{}; }
INLINE I all(int32_t value) { return value - I{}; }

#ifndef TARGET_REST

INLINE I bits(F value) { return reinterpret_cast<I>(value); }

// They return the second operand if one of the operands is NaN, as the machines' own instructions do.
#if TARGET_AVX512
INLINE F least(F a, F b) { return _mm512_min_ps(a, b); }
INLINE F greatest(F a, F b) { return _mm512_max_ps(a, b); }
#elif TARGET_AVX2
INLINE F least(F a, F b) { return _mm256_min_ps(a, b); }
INLINE F greatest(F a, F b) { return _mm256_max_ps(a, b); }
#elif TARGET_SSE2
INLINE F least(F a, F b) { return _mm_min_ps(a, b); }
INLINE F greatest(F a, F b) { return _mm_max_ps(a, b); }
#else
INLINE F least(F a, F b) { return a < b ? a : b; }
INLINE F greatest(F a, F b) { return a > b ? a : b; }
#endif

// Added to a float of absolute value below 2^22, it leaves the nearest integer in the last bits; ties go to
// the even one.
constexpr float kRounder = 12582912.0f;
constexpr int32_t kRounderBits = 0x4b400000;

INLINE F rounded(F value) { return (value + all(kRounder)) - all(kRounder); }
// Rounds floats of any size.
INLINE F rounded_wide(F value) {
  const F size = reinterpret_cast<F>(bits(value) & all(int32_t{0x7fffffff})), limit = all(8388608.0f);
  const F up = (value + limit) - limit, down = (value - limit) + limit;
  const F near = value > all(0.0f) ? up : down;
  return size < limit ? near : value;
}

template <int64_t kRounding>
struct Rounder {
  F inverse, scale, zero_point, low, high, nan;

  INLINE explicit Rounder(const Quantizer& by)
      : inverse(all(by.inverse)), scale(all(by.scale)), zero_point(all(by.zero_point)) {
    const float from = kRounding == kWide ? 0.0f : by.zero_point;
    low = all(by.low - from);
    high = all(by.high - from);
    nan = all((by.nan - by.zero_point) * by.scale);
  }
  INLINE F operator()(F value) const {
    if constexpr (kRounding == kFloats) return value;
    const F scaled = value * inverse;
    F result;
    if constexpr (kRounding == kWide) {
      result = (least(greatest(rounded_wide(scaled) + zero_point, low), high) - zero_point) * scale;
    } else {
      result = rounded(least(greatest(scaled, low), high)) * scale;
    }
    if constexpr (kRounding != kNarrow) result = scaled == scaled ? result : nan;
    return result;
  }
};

// e^x within 3 units in the last place: 2^n times a polynomial in r, |r| <= ln(2) / 2, whose error is at most
// 1.1e-7. NaN for NaN.
INLINE F exponential(F x) {
  x = least(all(88.0f), greatest(all(-87.0f), x));
  const F shifted = x * all(1.44269504f) + all(kRounder);
  const F n = shifted - all(kRounder);
  const F r = (x - n * all(0.693359375f)) + n * all(2.12194440e-4f);
  F series = r * all(0.0083125f) + all(0.04189033f);
  series = series * r + all(0.16667115f);
  series = series * r + all(0.4999923f);
  series = series * r + all(1.0f);
  series = series * r + all(1.0f);
  return series * reinterpret_cast<F>((bits(shifted) << 23) + all(int32_t{127 << 23}));
}

template <int64_t kOp>
INLINE F computed(F a, F b) {
  if constexpr (kOp == kAdd) return a + b;
  if constexpr (kOp == kMul) return a * b;
  if constexpr (kOp == kComplement) return all(1.0f) - a;
  if constexpr (kOp == kSigmoid) return all(1.0f) / (all(1.0f) + exponential(-a));
  if constexpr (kOp == kTanh) return all(1.0f) - all(2.0f) / (all(1.0f) + exponential(all(2.0f) * a));
  if constexpr (kOp == kRelu) return greatest(all(0.0f), a);
  return a;
}

template <int64_t kOp, int64_t kRounding>
void elementwise(const float* a, const float* b, float* to, int64_t count, const Quantizer& quantize) {
  const Rounder<kRounding> round(quantize);
  for (int64_t j = 0; j < count; j += kWidth) {
    store(to + j, round(computed<kOp>(load(a + j), load((kOp == kAdd || kOp == kMul ? b : a) + j))));
  }
}

#if TARGET_AVX512
// kRows: the number of registers that hold the table.
template <int64_t kRows>
void look_up(const float* table, const float* a, float* to, int64_t count, const Quantizer& of_a) {
  F rows[kRows];
  for (int64_t r = 0; r < kRows; ++r) rows[r] = load(table + r * kWidth);
  const F inverse = all(of_a.inverse);
  const I first = all(kRounderBits + static_cast<int32_t>(of_a.low - of_a.zero_point));
  for (int64_t j = 0; j < count; j += kWidth) {
    const __m512i place = reinterpret_cast<__m512i>(bits(load(a + j) * inverse + all(kRounder)) - first);
    __m512 found[kRows / 2];
    for (int64_t r = 0; r < kRows / 2; ++r) {
      found[r] = _mm512_permutex2var_ps(rows[2 * r], place, rows[2 * r + 1]);
    }
    int32_t bit = 32;
    for (int64_t left = kRows / 4; left > 0; left /= 2, bit *= 2) {
      const __mmask16 is_behind = _mm512_test_epi32_mask(place, _mm512_set1_epi32(bit));
      for (int64_t r = 0; r < left; ++r) {
        found[r] = _mm512_mask_blend_ps(is_behind, found[2 * r], found[2 * r + 1]);
      }
    }
    store(to + j, found[0]);
  }
}
#elif TARGET_AVX2
// Sixteen loads take less time than an exponential and a division. The mask is for lanes that hold no unit.
template <int64_t kRows>
void look_up(const float* table, const float* a, float* to, int64_t count, const Quantizer& of_a) {
  const F inverse = all(of_a.inverse);
  const I first = all(kRounderBits + static_cast<int32_t>(of_a.low - of_a.zero_point)),
          mask = all(static_cast<int32_t>(kRows * kLanes - 1));
  for (int64_t j = 0; j < count; j += kLanes) {
    int32_t places[kLanes];
    for (int64_t k = 0; k < kLanes; k += kWidth) {
      store(places + k, (bits(load(a + j + k) * inverse + all(kRounder)) - first) & mask);
    }
    for (int64_t k = 0; k < kLanes; ++k) to[j + k] = table[places[k]];
  }
}
#endif

#endif  // TARGET_REST

// How four integers of x and a line of weights are loaded, and how their products are added up in each lane.
// kMostRows: the number of rows computed together, by the number of columns; entries up to kBeside are read.
#if TARGET_AVX2
struct Bytes {
  static constexpr int32_t kInputShift = 0;
  static constexpr int64_t kMostRows[kColumns + 1] = {0, 4, 2, 1, 1};
  using Four = __m256i;
  using Weights = __m256i;
  static INLINE Four four(int32_t integers) { return _mm256_set1_epi32(integers); }
  static INLINE Weights weights(const uint8_t* line) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(line));
  }
};
#endif

#if TARGET_AVX512
struct Whole {
  static constexpr int32_t kInputShift = 0;
  static constexpr int64_t kMostRows[kColumns + 1] = {0, 8, 8, 8, 6};
  using Four = __m512i;
  using Weights = __m512i;
  static INLINE Four four(int32_t integers) { return _mm512_set1_epi32(integers); }
  static INLINE Weights weights(const uint8_t* line) { return _mm512_load_si512(line); }
  static INLINE I add(I sums, Four x, Weights w) {
    return reinterpret_cast<I>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), x, w));
  }
};
#elif TARGET_AVX_VNNI
struct Whole : Bytes {
  static INLINE I add(I sums, Four x, Weights w) {
    return reinterpret_cast<I>(_mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(sums), x, w));
  }
};
#elif TARGET_AVX2 || TARGET_SSE2
typedef int16_t S __attribute__((vector_size(4 * kWidth)));
INLINE I pairs(S a, S b) {
#if TARGET_AVX2
  return reinterpret_cast<I>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return reinterpret_cast<I>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#endif
}
// As 16-bit integers, the first and third of four separate from the second and fourth: vpmaddubsw, which
// multiplies 8-bit integers, would saturate.
struct Whole {
  static constexpr int32_t kInputShift = 0;
  static constexpr int64_t kMostRows[kColumns + 1] = {0, 3, 2, 1, 1};
  struct Four {
    S even, odd;
  };
  using Weights = Four;
  static INLINE Four four(int32_t integers) {
    const I whole = all(integers), mask = all(int32_t{0x00ff00ff});
    return {reinterpret_cast<S>(whole & mask), reinterpret_cast<S>((whole >> 8) & mask)};
  }
  static INLINE Weights weights(const uint8_t* line) {
    S both;
    __builtin_memcpy(&both, line, sizeof both);
    return {reinterpret_cast<S>(reinterpret_cast<S>(both << 8) >> 8), both >> 8};
  }
  static INLINE I add(I sums, Four x, Weights w) {
    return sums + (pairs(x.even, w.even) + pairs(x.odd, w.odd));
  }
};
#if TARGET_AVX2
// For integers up to 128 the sum of two products fits in 16 bits: from 2 * 128 * -128 to 2 * 128 * 127. What
// is above 128 is cut off before, and added by add_excess.
struct Narrow : Bytes {
  static INLINE I add(I sums, Four x, Weights w) {
    const __m256i of_two = _mm256_maddubs_epi16(x, w);
    return sums + reinterpret_cast<I>(_mm256_madd_epi16(of_two, _mm256_set1_epi16(1)));
  }
};
#define TARGET_NARROW 1
#endif
#elif TARGET_NEON_I8MM
// One row; pairs of rows are multiplied by pair_tile.
struct Whole {
  static constexpr int32_t kInputShift = 0;
  static constexpr int64_t kMostRows[kColumns + 1] = {0, 4, 1, 1, 1};
  using Four = uint8x16_t;
  using Weights = int8x16_t;
  static INLINE Four four(int32_t integers) { return vreinterpretq_u8_s32(vdupq_n_s32(integers)); }
  static INLINE Weights weights(const uint8_t* line) { return vld1q_s8(reinterpret_cast<const int8_t*>(line)); }
  static INLINE I add(I sums, Four x, Weights w) {
    return reinterpret_cast<I>(vusdotq_s32(reinterpret_cast<int32x4_t>(sums), x, w));
  }
};

// Computes the products of R rows and one column: an instruction multiplies eight integers of two rows with
// those of two lanes. An odd last row is computed twice.
template <int64_t R>
INLINE void pair_tile(const uint8_t* x, int64_t stride, const Line* w, int64_t quads, int32_t* out) {
  constexpr int64_t kPairs = (R + 1) / 2;
  int32x4_t sums[kPairs][kParts][2];
  for (auto& of_pair : sums)
    for (auto& of_part : of_pair) of_part[0] = of_part[1] = vdupq_n_s32(0);
  const auto accumulate = [&](int64_t quad, bool is_alone) __attribute__((always_inline)) {
    uint8x16_t of_x[kPairs];
    for (int64_t pair = 0; pair < kPairs; ++pair) {
      uint64_t first = 0, second = 0;
      const uint8_t* row = x + 2 * pair * stride + 4 * quad;
      __builtin_memcpy(&first, row, is_alone ? 4 : 8);
      __builtin_memcpy(&second, 2 * pair + 1 < R ? row + stride : row, is_alone ? 4 : 8);
      of_x[pair] = vreinterpretq_u8_u64(vcombine_u64(vcreate_u64(first), vcreate_u64(second)));
    }
    for (int64_t p = 0; p < kParts; ++p) {
      const auto four = [&](int64_t at) __attribute__((always_inline)) {
        return vreinterpretq_s32_s8(Whole::weights(w[at].integers + 4 * kWidth * p));
      };
      const int32x4_t low = four(quad), high = is_alone ? vdupq_n_s32(0) : four(quad + 1);
      const int8x16_t of_lanes[2] = {vreinterpretq_s8_s32(vzip1q_s32(low, high)),
                                     vreinterpretq_s8_s32(vzip2q_s32(low, high))};
      for (int64_t pair = 0; pair < kPairs; ++pair)
        for (int64_t half = 0; half < 2; ++half)
          sums[pair][p][half] = vusmmlaq_s32(sums[pair][p][half], of_x[pair], of_lanes[half]);
    }
  };
  int64_t quad = 0;
  for (; quad + 2 <= quads; quad += 2) accumulate(quad, false);
  if (quad < quads) accumulate(quad, true);
  for (int64_t r = 0; r < R; ++r) {
    for (int64_t p = 0; p < kParts; ++p) {
      const int32x4_t* of_two = sums[r / 2][p];
      const int32x4_t of_row = r % 2 ? vcombine_s32(vget_high_s32(of_two[0]), vget_high_s32(of_two[1]))
                                     : vcombine_s32(vget_low_s32(of_two[0]), vget_low_s32(of_two[1]));
      vst1q_s32(out + r * kLanes + p * kWidth, of_row);
    }
  }
}
#elif TARGET_NEON_DOT
// The operands of the instruction are either both signed or both unsigned.
struct Whole {
  static constexpr int32_t kInputShift = 128;
  static constexpr int64_t kMostRows[kColumns + 1] = {0, 4, 2, 1, 1};
  using Four = int8x16_t;
  using Weights = int8x16_t;
  static INLINE Four four(int32_t integers) {
    return vreinterpretq_s8_s32(vdupq_n_s32(static_cast<int32_t>(integers ^ 0x80808080)));
  }
  static INLINE Weights weights(const uint8_t* line) { return vld1q_s8(reinterpret_cast<const int8_t*>(line)); }
  static INLINE I add(I sums, Four x, Weights w) {
    return reinterpret_cast<I>(vdotq_s32(reinterpret_cast<int32x4_t>(sums), x, w));
  }
};
#else
struct Whole {
  static constexpr int32_t kInputShift = 0;
  static constexpr int64_t kMostRows[kColumns + 1] = {0, 2, 1, 1, 1};
  using Four = int32_t;
  using Weights = I;
  static INLINE Four four(int32_t integers) { return integers; }
  static INLINE Weights weights(const uint8_t* line) { return load(reinterpret_cast<const int32_t*>(line)); }
  static INLINE I add(I sums, Four x, Weights w) {
    const uint32_t integers = static_cast<uint32_t>(x);
    sums += ((w << 24) >> 24) * all(static_cast<int32_t>(integers & 255));
    sums += ((w << 16) >> 24) * all(static_cast<int32_t>(integers >> 8 & 255));
    sums += ((w << 8) >> 24) * all(static_cast<int32_t>(integers >> 16 & 255));
    return sums + (w >> 24) * all(static_cast<int32_t>(integers >> 24));
  }
};
#endif
#if TARGET_NARROW
int64_t find_excess(const uint8_t* x, int64_t count, int32_t* quads) {
  int64_t number = 0;
  for (int64_t k = 0; k < count; k += 32) {
    alignas(32) uint8_t bytes[32] = {};
    __builtin_memcpy(bytes, x + k, static_cast<size_t>(count - k < 32 ? count - k : 32));
    const __m256i above =
        _mm256_subs_epu8(_mm256_load_si256(reinterpret_cast<const __m256i*>(bytes)), _mm256_set1_epi8(-128));
    const __m256i is_zero = _mm256_cmpeq_epi32(above, _mm256_setzero_si256());
    uint32_t some = ~static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(is_zero))) & 255;
    for (; some; some &= some - 1) quads[number++] = static_cast<int32_t>(k / 4) + __builtin_ctz(some);
  }
  return number;
}

template <int64_t C>
void add_excess(const uint8_t* x, const Line* w, const int32_t* quads, int64_t count, int32_t* out) {
  I sums[C][kParts];
  for (int64_t c = 0; c < C; ++c)
    for (int64_t p = 0; p < kParts; ++p) sums[c][p] = load(out + c * kTileVectors * kLanes + p * kWidth);
  for (int64_t i = 0; i < count; ++i) {
    int32_t integers;
    __builtin_memcpy(&integers, x + 4 * quads[i], 4);
    const __m256i of_x = _mm256_subs_epu8(_mm256_set1_epi32(integers), _mm256_set1_epi8(-128));
    for (int64_t c = 0; c < C; ++c) {
      const uint8_t* line = w[quads[i] * C + c].integers;
      for (int64_t p = 0; p < kParts; ++p) {
        sums[c][p] = Narrow::add(sums[c][p], of_x, Narrow::weights(line + 4 * kWidth * p));
      }
    }
  }
  for (int64_t c = 0; c < C; ++c)
    for (int64_t p = 0; p < kParts; ++p) store(out + c * kTileVectors * kLanes + p * kWidth, sums[c][p]);
}
#endif

// Computes the products of R rows and the C columns that are side by side in the weight. U: the number of
// independent sums, so that an addition does not wait for the one before.
template <class M, int64_t R, int64_t C, int64_t U>
INLINE void product_tile(const uint8_t* x, int64_t stride, const Line* w, int64_t quads, int32_t* out) {
  I sums[U][R][C][kParts];
  for (int64_t u = 0; u < U; ++u)
    for (int64_t r = 0; r < R; ++r)
      for (int64_t c = 0; c < C; ++c)
        for (int64_t p = 0; p < kParts; ++p) sums[u][r][c][p] = I{};
  const auto accumulate = [&](int64_t quad, int64_t u) __attribute__((always_inline)) {
    typename M::Four of_x[R];
    for (int64_t r = 0; r < R; ++r) {
      int32_t integers;
      __builtin_memcpy(&integers, x + r * stride + 4 * quad, 4);
      of_x[r] = M::four(integers);
    }
    for (int64_t c = 0; c < C; ++c) {
      for (int64_t p = 0; p < kParts; ++p) {
        const typename M::Weights of_w = M::weights(w[quad * C + c].integers + 4 * kWidth * p);
        for (int64_t r = 0; r < R; ++r) sums[u][r][c][p] = M::add(sums[u][r][c][p], of_x[r], of_w);
      }
    }
  };
  int64_t quad = 0;
  for (; quad + U <= quads; quad += U) {
    for (int64_t u = 0; u < U; ++u) accumulate(quad + u, u);
  }
  for (; quad < quads; ++quad) accumulate(quad, 0);
  for (int64_t r = 0; r < R; ++r) {
    for (int64_t c = 0; c < C; ++c) {
      for (int64_t p = 0; p < kParts; ++p) {
        I sum = sums[0][r][c][p];
        for (int64_t u = 1; u < U; ++u) sum += sums[u][r][c][p];
        store(out + (c * kTileVectors + r) * kLanes + p * kWidth, sum);
      }
    }
  }
}

// The columns that lie side by side: as many as there are registers for.
constexpr int64_t kBeside = kParts == 1 ? kColumns : Whole::kMostRows[2] > 1 ? 2 : 1;

template <class M, int64_t R, int64_t C>
INLINE void products_from(const uint8_t* x, int64_t stride, int64_t rows, const Line* w, int64_t quads,
                          int32_t* out) {
  constexpr int64_t kSums = R * C * kParts;
  constexpr int64_t U = kSums >= 8 ? 1 : kSums >= 4 ? 2 : kSums >= 2 ? 4 : 8;
  for (; rows >= R; rows -= R) {
#if TARGET_NEON_I8MM
    if constexpr (R > 1) {
      pair_tile<R>(x, stride, w, quads, out);
    } else
#endif
    {
      product_tile<M, R, C, U>(x, stride, w, quads, out);
    }
    x += R * stride;
    out += R * kLanes;
  }
  if constexpr (R > 1) {
    if (rows > 0) products_from<M, R - 1, C>(x, stride, rows, w, quads, out);
  }
}

template <class M, int64_t C>
void products(const uint8_t* x, int64_t stride, int64_t rows, const Line* w, int64_t quads, int32_t* out) {
  products_from<M, M::kMostRows[C], C>(x, stride, rows, w, quads, out);
}

using Products = decltype(Kernels::products);

// The products of up to kBeside columns.
template <class M>
constexpr void set_products(Products& to) {
  to[1] = products<M, 1>;
  if constexpr (kBeside > 1) to[2] = products<M, 2>;
  if constexpr (kBeside > 2) {
    to[3] = products<M, 3>;
    to[4] = products<M, 4>;
  }
}

#ifdef TARGET_REST

constexpr Kernels kKernels = [] {
  Kernels kernels = TARGET_REST::kKernels;
  kernels.name = TARGET_SHOWN;
  kernels.input_shift = Whole::kInputShift;
  kernels.beside = kBeside;
  set_products<Whole>(kernels.products);
  kernels.find_excess = nullptr;
  return kernels;
}();

#else

template <int64_t R>
INLINE void float_rows(const float* x, int64_t stride, const Line* w, int64_t step, int64_t quads,
                       const int32_t* zero_points, float* out) {
  for (int64_t p = 0; p < kParts; ++p) {
    F sums[R][4];
    for (int64_t r = 0; r < R; ++r)
      for (int64_t j = 0; j < 4; ++j) sums[r][j] = F{};
    const F zero_point = __builtin_convertvector(load(zero_points + p * kWidth), F);
    for (int64_t quad = 0; quad < quads; ++quad) {
      int32_t integers[kWidth];
      __builtin_memcpy(integers, w[quad * step].integers + 4 * kWidth * p, sizeof integers);
      const I four = load(integers);
      for (int32_t j = 0; j < 4; ++j) {
        const F of_w = __builtin_convertvector((four << (24 - 8 * j)) >> 24, F) - zero_point;
        for (int64_t r = 0; r < R; ++r) sums[r][j] += of_w * all(x[r * stride + 4 * quad + j]);
      }
    }
    for (int64_t r = 0; r < R; ++r) {
      store(out + r * kLanes + p * kWidth, (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]));
    }
  }
}

void float_products(const float* x, int64_t stride, int64_t rows, const Line* w, int64_t step, int64_t quads,
                    const int32_t* zero_points, float* out) {
  for (; rows >= 2; rows -= 2, x += 2 * stride, out += 2 * kLanes) {
    float_rows<2>(x, stride, w, step, quads, zero_points, out);
  }
  if (rows) float_rows<1>(x, stride, w, step, quads, zero_points, out);
}

template <int64_t kRounding>
INLINE F finished(F value, const ColumnNumbers& column, int64_t lane, const float* to,
                  const Rounder<kRounding>& round) {
  if (column.adds) value = load(to) + value;
  return column.biases ? round(value + load(column.biases + lane)) : value;
}

template <int64_t kRounding>
void finish(const int32_t* products, int64_t rows, const ColumnNumbers& column, float* to,
            const Quantizer& quantize) {
  const Rounder<kRounding> round(quantize);
  for (int64_t lane = 0; lane < kLanes; lane += kWidth) {
    const I correction = all(column.input_zero_point) * load(column.row_sums + lane);
    const F scale = all(column.input_scale) * load(column.scales + lane);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = row * kLanes + lane;
      const F value = __builtin_convertvector(load(products + at) - correction, F) * scale;
      store(to + at, finished<kRounding>(value, column, lane, to + at, round));
    }
  }
}

template <int64_t kRounding>
void finish_floats(const float* products, int64_t rows, const ColumnNumbers& column, float* to,
                   const Quantizer& quantize) {
  const Rounder<kRounding> round(quantize);
  for (int64_t lane = 0; lane < kLanes; lane += kWidth) {
    const F scale = load(column.scales + lane);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = row * kLanes + lane;
      const F value = scale * load(products + at);
      store(to + at, finished<kRounding>(value, column, lane, to + at, round));
    }
  }
}

// Calls function(at) for each whole vector of the `count` floats at `values`, and for a copy of the rest.
template <class Function>
INLINE void each_vector(const float* values, int64_t count, Function function) {
  int64_t k = 0;
  for (; k + kWidth <= count; k += kWidth) function(values + k, k, kWidth);
  if (k == count) return;
  float rest[kWidth] = {};
  __builtin_memcpy(rest, values + k, 4 * static_cast<size_t>(count - k));
  function(rest, k, count - k);
}

template <int64_t kRounding>
INLINE void requantize_all(const Quantizer& quantize, const float* values, int64_t count, float* to) {
  const Rounder<kRounding> round(quantize);
  each_vector(
      values, count, [&](const float* from, int64_t at, int64_t lanes) __attribute__((always_inline)) {
        const F value = round(load(from));
        __builtin_memcpy(to + at, &value, 4 * static_cast<size_t>(lanes));
      });
}

void requantize(const Quantizer& quantize, const float* values, int64_t count, float* to) {
  if (quantize.rounding == kWide) {
    requantize_all<kWide>(quantize, values, count, to);
  } else {
    requantize_all<kNarrowWithNan>(quantize, values, count, to);
  }
}

bool is_on(const Quantizer& quantize, const float* values, int64_t count) {
  const Rounder<kNarrowWithNan> round(quantize);
  I differs = {};
  each_vector(
      values, count, [&](const float* from, int64_t, int64_t lanes) __attribute__((always_inline)) {
        const F value = load(from), is = round(value);
        if (lanes == kWidth) {
          differs |= is != value;
        } else {
          for (int64_t lane = 0; lane < lanes; ++lane) differs[0] |= is[lane] != value[lane];
        }
      });
  int32_t any = 0;
  for (int64_t lane = 0; lane < kWidth; ++lane) any |= differs[lane];
  return any == 0;
}

INLINE void store_bytes(uint8_t* to, I integers) {
#if TARGET_AVX512
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(integers)));
#elif TARGET_AVX2
  const __m256i all_of = reinterpret_cast<__m256i>(integers & all(int32_t{255}));
  const __m128i pairs = _mm_packus_epi32(_mm256_castsi256_si128(all_of), _mm256_extracti128_si256(all_of, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(pairs, pairs));
#else
  for (int64_t lane = 0; lane < kWidth; ++lane) to[lane] = static_cast<uint8_t>(integers[lane]);
#endif
}

void to_integers(const Quantizer& quantize, int32_t shift, const float* values, int64_t stride, int64_t rows,
                 int64_t count, uint8_t* to, int64_t to_stride) {
  const int32_t zero_point = static_cast<int32_t>(quantize.zero_point) + shift;
  const F inverse = all(quantize.inverse), low = all(quantize.low - quantize.zero_point),
          high = all(quantize.high - quantize.zero_point);
  const I offset = all(zero_point - kRounderBits), nan = all(static_cast<int32_t>(quantize.nan) + shift);
  for (int64_t row = 0; row < rows; ++row, values += stride, to += to_stride) {
    each_vector(
        values, count, [&](const float* from, int64_t at, int64_t lanes) __attribute__((always_inline)) {
          const F scaled = load(from) * inverse;
          const I rounded = bits(least(greatest(scaled, low), high) + all(kRounder)) + offset;
          const I integers = scaled == scaled ? rounded : nan;
          if (lanes == kWidth) return store_bytes(to + at, integers);
          uint8_t rest[kWidth];
          store_bytes(rest, integers);
          __builtin_memcpy(to + at, rest, static_cast<size_t>(lanes));
        });
  }
}

void see(const float* values, int64_t count, Extremes& extremes) {
  F low = all(extremes.low), high = all(extremes.high);
  I nan = {};
  each_vector(
      values, count, [&](const float* from, int64_t, int64_t) __attribute__((always_inline)) {
        const F value = load(from);
        low = least(value, low);
        high = greatest(value, high);
        nan |= value != value;
      });
  for (int64_t lane = 0; lane < kWidth; ++lane) {
    extremes.add({low[lane], high[lane], nan[lane] != 0});
  }
}

#define ROUNDINGS(name, ...)                                                               \
  {name<__VA_ARGS__ kFloats>, name<__VA_ARGS__ kNarrow>, name<__VA_ARGS__ kNarrowWithNan>, \
   name<__VA_ARGS__ kWide>}
#define COMMA ,
constexpr Kernels kFunctions = {
    TARGET_SHOWN,
    kBeside,
    Whole::kInputShift,
    {},
    {},
    {},
    nullptr,
    float_products,
    ROUNDINGS(finish),
    ROUNDINGS(finish_floats),
    {{},
     ROUNDINGS(elementwise, kAdd COMMA),
     ROUNDINGS(elementwise, kMul COMMA),
     ROUNDINGS(elementwise, kComplement COMMA),
     ROUNDINGS(elementwise, kSigmoid COMMA),
     ROUNDINGS(elementwise, kTanh COMMA),
     ROUNDINGS(elementwise, kRelu COMMA),
     ROUNDINGS(elementwise, kCopy COMMA)},
#if TARGET_AVX512 || TARGET_AVX2
    {look_up<8>, look_up<16>},
#else
    {nullptr, nullptr},
#endif
    requantize,
    is_on,
    to_integers,
    see,
};
#undef COMMA
#undef ROUNDINGS

constexpr Kernels kKernels = [] {
  Kernels kernels = kFunctions;
  set_products<Whole>(kernels.products);
#if TARGET_NARROW
  set_products<Narrow>(kernels.narrow_products);
  kernels.add_excess[1] = add_excess<1>;
  kernels.add_excess[2] = add_excess<2>;
  kernels.find_excess = find_excess;
#endif
  return kernels;
}();

#endif  // TARGET_REST

#undef INLINE

}  // namespace TARGET_NAME

#undef TARGET_NAME
#undef TARGET_SHOWN
#undef TARGET_AVX512
#undef TARGET_AVX2
#undef TARGET_NEON_I8MM
#undef TARGET_AVX_VNNI
#undef TARGET_SSE2
#undef TARGET_NEON_DOT
#undef TARGET_NARROW
#undef TARGET_REST
