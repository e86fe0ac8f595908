// AVX-512: symbols and bit planes to codes, codes to values. For avx512/kernels.cpp only, which
// sets the target.
#pragma once

#include "kernels/avx512/base.hpp"
#include "kernels/avx512/input.hpp"
#include "kernels/avx512/planes.hpp"
#include "kernels/avx512/quantise.hpp"
#include "kernels/fetch.hpp"

namespace fsl {
namespace {

// The last bits of a plane, count < 64; touches no byte after them.
FSL_INLINE std::uint64_t rest_of_plane(const std::uint8_t* from, std::size_t count) {
  std::uint64_t mask = 0;
  std::memcpy(&mask, from, (count + 7) / 8);
  return mask & lowest(count);
}

// kWidth: -1 for any. Bits go directly to their rotated places.
template <int kWidth>
void join_planes(const std::uint8_t* symbols, const std::uint8_t* in, std::size_t plane_bytes,
                 std::size_t count, bool rotated, int any_width, std::uint8_t* codes) {
  const int width = kWidth >= 0 ? kWidth : any_width;
  const std::size_t whole = count & ~(kStep - 1);
  const bool wraps = rotated && width == 0;
  const __m128i up = _mm_cvtsi32_si128(rotated && !wraps ? width - 1 : width);
  const __m512i kept = all_bytes(rotated && !wraps ? 0xFF << (width - 1) : 0xFF << width);
  __m512i places[8];
  for (int plane = 0; plane < width; ++plane) {
    const int bit = width - 1 - plane;
    places[plane] = all_bytes(1 << (rotated ? (bit + 7) & 7 : bit));
  }
  const auto joined = [&](std::size_t i, auto mask_of) __attribute__((always_inline)) {
    __m512i code = _mm512_setzero_si512();
    if (symbols != nullptr) {
      code = _mm512_and_si512(_mm512_sll_epi16(load(symbols + i), up), kept);
      if (wraps) code = rotate_right(code);
    }
    for (int plane = 0; plane < width; ++plane) {
      code = _mm512_mask_add_epi8(
          code, mask_of(in + static_cast<std::size_t>(plane) * plane_bytes + i / 8), code,
          places[plane]);
    }
    store(codes + i, code);
  };
#pragma GCC unroll 2
  for (std::size_t i = 0; i < whole; i += kStep) {
    joined(i,
           [](const std::uint8_t* plane) __attribute__((always_inline)) { return mask_at(plane); });
  }
  if (whole < count) {
    joined(whole, [=](const std::uint8_t* plane) __attribute__((always_inline)) {
      return rest_of_plane(plane, count - whole);
    });
  }
}

void join(const std::uint8_t* symbols, const std::uint8_t* in, std::size_t plane_bytes,
          std::size_t count, bool rotated, int width, std::uint8_t* codes) {
  const auto join_them = width == 2 ? join_planes<2> : join_planes<-1>;
  join_them(symbols, in, plane_bytes, count, rotated, width, codes);
}

// --- output values

// Stores some lanes of a vector. Not by a masked store: among non-temporal ones it can take as long
// as a memory read (Zen 4).
FSL_INLINE void put_part(float* to, __m512 value, std::size_t from, std::size_t stop) {
  alignas(64) float lanes[kLane];
  _mm512_store_ps(lanes, value);
  std::memcpy(to, lanes + from, (stop - from) * sizeof(float));
}

// Writes vectors of 16 values to their places, in order from 0 on.
template <Sink kSink, bool kAligned>
struct Writer {
  float* out;
  const float* source;
  __m512 weight;
  bool weighs;
  // Non-temporal stores to unaligned places: each joins two vectors.
  std::size_t lead = 0;
  __m512i index = _mm512_setzero_si512();
  __m512 carry = _mm512_setzero_ps();

  FSL_INLINE explicit Writer(const Output& output)
      : out(static_cast<float*>(output.out)),
        source(output.source),
        weight(_mm512_set1_ps(output.weight)),
        weighs(output.weight != 1.0F) {
    if (kSink == Sink::kStream && !kAligned) {
      lead = (64 - (reinterpret_cast<std::uintptr_t>(out) & 63)) / 4;
      index =
          _mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                           all(static_cast<int>(lead)));
    }
  }

  FSL_INLINE void put(std::size_t i, __m512 value) {
    if (kSink == Sink::kStore) {
      _mm512_storeu_ps(out + i, value);
    } else if (kSink == Sink::kStream) {
      if (kAligned) {
        _mm512_stream_ps(out + i, value);
      } else {
        if (i == 0) {
          put_part(out, value, 0, lead);
        } else {
          _mm512_stream_ps(out + i + lead - kLane, _mm512_permutex2var_ps(carry, index, value));
        }
        carry = value;
      }
    } else if (kSink == Sink::kAccumulate) {
      fetch_further(out + i);
      if (weighs) value = _mm512_mul_ps(value, weight);
      _mm512_storeu_ps(out + i, _mm512_add_ps(_mm512_loadu_ps(out + i), value));
    } else if (kSink == Sink::kBfloat16) {
      const __m512i bits = _mm512_castps_si512(value);
      const __m512i ties = _mm512_and_si512(_mm512_srli_epi32(bits, 16), all(1));
      __m512i rounded =
          _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, all(0x7FFF)), ties), 16);
      const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
      rounded = _mm512_mask_or_epi32(rounded, nan, _mm512_srli_epi32(bits, 16), all(0x40));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<std::uint16_t*>(out) + i),
                          _mm512_cvtepi32_epi16(rounded));
    } else {
      _mm512_storeu_ps(out + i, _mm512_sub_ps(_mm512_loadu_ps(source + i), value));
    }
  }

  // Writes the rest, after `count` values.
  FSL_INLINE void finish(std::size_t count) const {
    if (kSink == Sink::kStream && !kAligned && count > 0) {
      put_part(out + count - kLane + lead, carry, lead, kLane);
    }
  }
};

// The same output, `count` values further.
Output further(const Output& output, std::size_t count) {
  Output rest = output;
  rest.out = output.sink == Sink::kBfloat16
                 ? static_cast<void*>(static_cast<std::uint16_t*>(output.out) + count)
                 : static_cast<void*>(static_cast<float*>(output.out) + count);
  if (output.source != nullptr) rest.source = output.source + count;
  return rest;
}

// Calls work(writer) with the sink's writer.
template <typename Work>
FSL_INLINE void with_writer(const Output& output, Work work) {
  switch (output.sink) {
    case Sink::kStore:
      return work(Writer<Sink::kStore, true>(output));
    case Sink::kStream:
      if ((reinterpret_cast<std::uintptr_t>(output.out) & 63) == 0)
        return work(Writer<Sink::kStream, true>(output));
      return work(Writer<Sink::kStream, false>(output));
    case Sink::kAccumulate:
      return work(Writer<Sink::kAccumulate, true>(output));
    case Sink::kBfloat16:
      return work(Writer<Sink::kBfloat16, true>(output));
    case Sink::kResidual:
      return work(Writer<Sink::kResidual, true>(output));
  }
}

// The values of a format's 128 codes without sign, all of them bf16 numbers: their upper and lower
// bytes.
template <int kMantissaBits>
struct Float8Table {
  alignas(64) std::uint8_t upper[128] = {};
  alignas(64) std::uint8_t lower[128] = {};

  constexpr Float8Table() {
    constexpr int kBias = kMantissaBits == 3 ? 7 : 15;
    constexpr int kImplicit = 1 << kMantissaBits;
    for (int code = 0; code < 128; ++code) {
      // mantissa * 2^(exponent - bias - mantissa bits), the mantissa with its implicit bit
      int exponent = code >> kMantissaBits;
      int mantissa = code & (kImplicit - 1);
      if (exponent == 0) {
        exponent = 1;
        for (; mantissa != 0 && mantissa < kImplicit; mantissa <<= 1) --exponent;
      } else {
        mantissa |= kImplicit;
      }
      const int bits = mantissa == 0 ? 0
                                     : (exponent - kBias + 127) << 7 | (mantissa - kImplicit)
                                                                           << (7 - kMantissaBits);
      upper[code] = static_cast<std::uint8_t>(bits >> 8);
      lower[code] = static_cast<std::uint8_t>(bits);
    }
  }
};

// 64 pairs of bytes as the upper halves of words: the indices for a permutation of two vectors, of
// lower and of upper bytes; zeros are masked out.
struct PairsOrder {
  alignas(64) std::uint8_t of[4][kStep] = {};

  constexpr PairsOrder() {
    for (std::size_t i = 0; i < kStep; ++i) {
      of[i / kLane][4 * (i % kLane) + 2] = static_cast<std::uint8_t>(i);
      of[i / kLane][4 * (i % kLane) + 3] = static_cast<std::uint8_t>(kStep + i);
    }
  }
};

// Turns codes into values, 64 at a time. kSmallRuns: of fewer than 64 values.
template <int kMantissaBits, bool kSmallRuns>
struct Float8Dequantiser {
  static constexpr Float8Table<kMantissaBits> kTable{};
  static constexpr PairsOrder kOrder{};

  const float* factors;  // of the runs
  int block_shift;
  __m512i uppers[2] = {load(kTable.upper), load(kTable.upper + 64)};
  __m512i lowers[2] = {load(kTable.lower), load(kTable.lower + 64)};
  __m512i order[4] = {load(kOrder.of[0]), load(kOrder.of[1]), load(kOrder.of[2]),
                      load(kOrder.of[3])};

  FSL_INLINE Float8Dequantiser(const float* those_factors, int shift)
      : factors(those_factors), block_shift(shift) {}

  template <typename Put>
  FSL_INLINE void put(std::size_t i, __m512i code, Put& writer) const {
    constexpr __mmask64 kUpperHalves = 0xCCCCCCCCCCCCCCCC;
    // The permutations ignore the sign.
    const __m512i lower = _mm512_permutex2var_epi8(lowers[0], code, lowers[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(uppers[0], code, uppers[1]);
    const __m512i upper = _mm512_ternarylogic_epi32(magnitude, code, all_bytes(0x7F), 0xF4);
    const __m512 factor = _mm512_set1_ps(factors[i >> block_shift]);
    for (std::size_t j = 0; j < 4; ++j) {
      const std::size_t place = i + j * kLane;
      const __m512i value = _mm512_maskz_permutex2var_epi8(kUpperHalves, lower, order[j], upper);
      writer.put(place, _mm512_mul_ps(
                            _mm512_castsi512_ps(value),
                            kSmallRuns ? _mm512_set1_ps(factors[place >> block_shift]) : factor));
    }
  }
};

// Calls work(dequantiser) with the format's.
template <bool kSmallRuns, typename Work>
FSL_INLINE void with_dequantiser(const Float8& format, std::size_t block_values,
                                 const float* factors, Work work) {
  const int shift = log2_of(block_values);
  format.mantissa_bits == 3 ? work(Float8Dequantiser<3, kSmallRuns>(factors, shift))
                            : work(Float8Dequantiser<2, kSmallRuns>(factors, shift));
}

// Whether weight * scale * code has the same value in any order: scales are powers of two, so
// products with them are exact and either order rounds once, unless a product is near the limits of
// fp32.
bool may_weigh_factors(float weight, int lowest_scale, int highest_scale) {
  const float magnitude = weight < 0.0F ? -weight : weight;
  return magnitude >= 0x1p-30F && magnitude <= 0x1p30F && lowest_scale >= 127 - 60 &&
         highest_scale <= 127 + 60;
}

// The factors of the runs, and the sink: if the order of products does not matter, the weight is in
// the factors.
struct Float8Factors {
  alignas(64) float of[kBlockValues / 16 + kLane];
  int lowest_scale;
  Output output;

  Float8Factors(const std::uint8_t* scales, std::size_t runs, const Output& to) : output(to) {
    __m512i smallest = all(255);
    __m512i largest = _mm512_setzero_si512();
    for (std::size_t run = 0; run < runs; run += kLane) {
      const __m512i scale =
          _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + run)));
      const __mmask16 valid = runs - run < kLane ? static_cast<__mmask16>((1U << (runs - run)) - 1)
                                                 : static_cast<__mmask16>(0xFFFF);
      store(of + run, _mm512_slli_epi32(scale, 23));
      smallest = _mm512_mask_min_epu32(smallest, valid, smallest, scale);
      largest = _mm512_mask_max_epu32(largest, valid, largest, scale);
    }
    lowest_scale = static_cast<int>(_mm512_reduce_min_epu32(smallest));
    if (to.sink != Sink::kAccumulate ||
        !may_weigh_factors(to.weight, lowest_scale,
                           static_cast<int>(_mm512_reduce_max_epu32(largest))))
      return;
    const __m512 weight = _mm512_set1_ps(to.weight);
    for (std::size_t run = 0; run < runs; run += kLane)
      _mm512_store_ps(of + run, _mm512_mul_ps(_mm512_load_ps(of + run), weight));
    output.weight = 1.0F;
  }
};

void dequantise_float8(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t count,
                       const Float8& format, std::size_t block_values, const Output& output) {
  const std::size_t whole = count & ~(kStep - 1);
  const Float8Factors factors(scales, (whole + block_values - 1) / block_values, output);
  // Below, a factor would not be a normal number.
  if (factors.lowest_scale < format.lowest_scale)
    return kScalarKernels.dequantise_float8(codes, scales, count, format, block_values, output);
  with_writer(factors.output, [&](auto writer) __attribute__((always_inline)) {
    const auto put_all = [&](auto dequantiser) __attribute__((always_inline)) {
      for (std::size_t i = 0; i < whole; i += kStep) dequantiser.put(i, load(codes + i), writer);
    };
    block_values < kStep ? with_dequantiser<true>(format, block_values, factors.of, put_all)
                         : with_dequantiser<false>(format, block_values, factors.of, put_all);
    writer.finish(whole);
  });
  if (whole == count) return;
  // The rest begins a run or lies within one.
  kScalarKernels.dequantise_float8(codes + whole, scales + whole / block_values, count - whole,
                                   format, block_values, further(output, whole));
}

// Turns uniform codes into values, 64 at a time; escaped ones come from a list.
struct UniformDequantiser {
  const float* factors;  // of the runs
  int block_shift;
  const std::uint8_t* escapes;
  std::size_t left;        // escaped values that exist
  std::size_t wanted = 0;  // so far
  __m512i largest = _mm512_setzero_si512();

  FSL_INLINE UniformDequantiser(const float* those_factors, const UniformValues& values)
      : factors(those_factors),
        block_shift(log2_of(values.block_values)),
        escapes(values.escapes),
        left(values.left) {}

  template <typename Put>
  FSL_INLINE void put(std::size_t i, __m512i code, Put& writer) {
    const std::uint64_t escaped = _mm512_testn_epi8_mask(code, code);
    const __m512i centered = _mm512_xor_si512(code, all_bytes(0x80));
    for (std::size_t j = 0; j < 4; ++j) {
      const std::size_t place = i + j * kLane;
      __m128i part = _mm512_castsi512_si128(centered);
      if (j == 1) part = _mm512_extracti64x2_epi64(centered, 1);
      if (j == 2) part = _mm512_extracti64x2_epi64(centered, 2);
      if (j == 3) part = _mm512_extracti64x2_epi64(centered, 3);
      __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(part)),
                                   _mm512_set1_ps(factors[place >> block_shift]));
      if (escaped != 0) value = with_escapes(value, static_cast<__mmask16>(escaped >> (j * kLane)));
      writer.put(place, value);
    }
  }

  __m512 with_escapes(__m512 value, __mmask16 here) {
    const std::size_t number = ones(here);
    const std::size_t at = wanted;
    wanted += number;
    if (wanted > left) return value;
    const __m512i listed =
        _mm512_maskz_loadu_epi32(static_cast<__mmask16>(lowest(number)), escapes + 4 * at);
    largest = _mm512_max_epu32(largest, magnitude_of(listed));
    return _mm512_mask_expand_ps(value, here, _mm512_castsi512_ps(listed));
  }
};

void fill_uniform_factors(const std::int16_t* steps, std::size_t runs, float* factors) {
  for (std::size_t run = 0; run < runs; run += kLane) {
    const __m512i step =
        _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(steps + run)));
    store(factors + run, quarter_powers(step));
  }
}

void dequantise_uniform(const std::uint8_t* codes, const std::int16_t* steps,
                        const std::uint8_t* escapes, std::size_t count, std::size_t block_values,
                        const Output& output) {
  alignas(64) float factors[kBlockValues / 16 + kLane];
  const std::size_t whole = count & ~(kStep - 1);
  fill_uniform_factors(steps, (whole + block_values - 1) / block_values, factors);
  UniformDequantiser dequantiser(factors, {steps, block_values, escapes, count});
  with_writer(output, [&](auto writer) __attribute__((always_inline)) {
    for (std::size_t i = 0; i < whole; i += kStep) dequantiser.put(i, load(codes + i), writer);
    writer.finish(whole);
  });
  if (whole == count) return;
  kScalarKernels.dequantise_uniform(codes + whole, steps + whole / block_values,
                                    escapes + 4 * dequantiser.wanted, count - whole, block_values,
                                    further(output, whole));
}

FSL_INLINE __m512i widened(const std::uint8_t* bytes) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}

bool join_bfloat16(const std::uint8_t* const planes[2], std::size_t count, const Output& output) {
  const std::size_t whole = count & ~(kLane - 1);
  __m512i largest = _mm512_setzero_si512();
  with_writer(output, [&](auto writer) __attribute__((always_inline)) {
    for (std::size_t i = 0; i < whole; i += kLane) {
      const __m512i exponent = widened(planes[0] + i);
      const __m512i rotated =
          _mm512_or_si512(_mm512_slli_epi32(exponent, 8), widened(planes[1] + i));
      largest = _mm512_max_epu32(largest, exponent);
      // Bit 0 is the sign; the others stand one place too high.
      const __m512i bits = _mm512_or_si512(_mm512_slli_epi32(_mm512_srli_epi32(rotated, 1), 16),
                                           _mm512_slli_epi32(rotated, 31));
      writer.put(i, _mm512_castsi512_ps(bits));
    }
    writer.finish(whole);
  });
  bool finite = _mm512_reduce_max_epu32(largest) < 0xFF;
  if (whole < count) {
    const std::uint8_t* const rest[2] = {planes[0] + whole, planes[1] + whole};
    finite &= kScalarKernels.join_bfloat16(rest, count - whole, further(output, whole));
  }
  return finite;
}

void join_float32(const std::uint8_t* const planes[4], std::size_t count, const Output& output,
                  Seen& seen) {
  const std::size_t whole = count & ~(kLane - 1);
  Sight sight;
  with_writer(output, [&](auto writer) __attribute__((always_inline)) {
    for (std::size_t i = 0; i < whole; i += kLane) {
      const __m512i upper =
          _mm512_or_si512(_mm512_slli_epi32(widened(planes[0] + i), 8), widened(planes[1] + i));
      const __m512i lower =
          _mm512_or_si512(_mm512_slli_epi32(widened(planes[2] + i), 8), widened(planes[3] + i));
      const __m512i bits =
          _mm512_ror_epi32(_mm512_or_si512(_mm512_slli_epi32(upper, 16), lower), 1);
      sight.see(bits, _mm512_setzero_si512());
      writer.put(i, _mm512_castsi512_ps(bits));
    }
    writer.finish(whole);
  });
  sight.fold_into(seen);
  if (whole < count) {
    const std::uint8_t* const rest[4] = {planes[0] + whole, planes[1] + whole, planes[2] + whole,
                                         planes[3] + whole};
    kScalarKernels.join_float32(rest, count - whole, further(output, whole), seen);
  }
}

void copy_float32(const std::uint8_t* bytes, std::size_t count, const Output& output, Seen& seen) {
  const std::size_t whole = count & ~(kLane - 1);
  Sight sight;
  with_writer(output, [&](auto writer) __attribute__((always_inline)) {
    for (std::size_t i = 0; i < whole; i += kLane) {
      const __m512i bits = load(bytes + 4 * i);
      sight.see(bits, _mm512_setzero_si512());
      writer.put(i, _mm512_castsi512_ps(bits));
    }
    writer.finish(whole);
  });
  sight.fold_into(seen);
  if (whole < count)
    kScalarKernels.copy_float32(bytes + 4 * whole, count - whole, further(output, whole), seen);
}

}  // namespace
}  // namespace fsl
