// AVX2: fp32 to codes of 8 bits. For avx2/kernels.cpp only, which sets the target and includes
// plain/kernels.hpp for it.
#pragma once

#include "kernels/avx2/base.hpp"
#include "kernels/avx2/input.hpp"

namespace fsl {
namespace {

// The largest magnitude of a run of whole vectors, folded into `seen`. Differing bits are searched
// until some are found.
FSL_INLINE std::uint32_t largest_of_run(const float* x, std::size_t count, std::uint32_t first_bits,
                                        Seen& seen) {
  __m256i largest = _mm256_setzero_si256();
  for (std::size_t i = 0; i < count; i += 2 * kLane) {
    largest = _mm256_max_epu32(
        largest, _mm256_max_epu32(magnitude_of(load(x + i)), magnitude_of(load(x + i + kLane))));
  }
  for (std::size_t i = 0; i < count && seen.differing_bits == 0; i += kLane) {
    const __m256i same = _mm256_cmpeq_epi32(load(x + i), all(static_cast<int>(first_bits)));
    seen.differing_bits = ~signs(same);
  }
  const std::uint32_t magnitude = largest_lane(largest);
  if (magnitude > seen.largest_magnitude) seen.largest_magnitude = magnitude;
  return magnitude;
}

// As float8_code, without dividing by the scale: `smallest`, the exponent of the run's smallest
// normal code, sets the step. The adder's last mantissa bits hold the number of steps that the
// exponent stands for: a multiple of an exponent's steps, which leaves ties even. The code without
// sign is in the lowest 8 bits, after subtracting `bias`, the steps of `smallest`; the bits above
// are arbitrary.
template <int kMantissaBits>
FSL_INLINE __m256i float8_magnitudes(__m256i bits, __m256i smallest, __m256i bias) {
  constexpr int kShift = 23 - kMantissaBits;
  const __m256i exponent = _mm256_max_epu32(_mm256_and_si256(bits, all(0x7F800000)), smallest);
  const __m256i adder =
      _mm256_add_epi32(_mm256_add_epi32(exponent, bias), _mm256_srli_epi32(exponent, kShift));
  return _mm256_castps_si256(
      _mm256_add_ps(_mm256_castsi256_ps(magnitude_of(bits)), _mm256_castsi256_ps(adder)));
}

// The codes of a run of whole vectors.
template <int kMantissaBits>
FSL_INLINE void code_run(const float* from, std::size_t count, int scale, const Float8& format,
                         std::uint8_t* codes) {
  constexpr int kShift = 23 - kMantissaBits;
  const int smallest_exponent = (scale + 1 - format.exponent_bias) << 23;
  const __m256i smallest = all(smallest_exponent);
  const __m256i bias = all((kShift << 23) - (smallest_exponent >> kShift));
  const __m256i lowest_byte = all(0xFF);
  const __m256i sign = all_bytes(0x80);
  const auto magnitudes = [=](__m256i bits) __attribute__((always_inline)) {
    return _mm256_and_si256(float8_magnitudes<kMantissaBits>(bits, smallest, bias), lowest_byte);
  };
  if (count < kStep) {  // 16
    const __m256i a = load(from);
    const __m256i b = load(from + kLane);
    const __m256i words = _mm256_packs_epi32(magnitudes(a), magnitudes(b));
    const __m256i signed_words = _mm256_packs_epi32(a, b);
    const __m256i bytes = _mm256_packus_epi16(words, words);
    const __m256i signed_bytes =
        _mm256_and_si256(_mm256_packs_epi16(signed_words, signed_words), sign);
    const __m256i ordered = in_order(_mm256_or_si256(bytes, signed_bytes));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm256_castsi256_si128(ordered));
    return;
  }
  for (std::size_t i = 0; i < count; i += kStep) {
    const __m256i a = load(from + i);
    const __m256i b = load(from + i + kLane);
    const __m256i c = load(from + i + 2 * kLane);
    const __m256i d = load(from + i + 3 * kLane);
    const __m256i low = _mm256_packs_epi32(magnitudes(a), magnitudes(b));
    const __m256i high = _mm256_packs_epi32(magnitudes(c), magnitudes(d));
    // Saturation keeps signs, also that of -0.0.
    const __m256i signed_bytes =
        _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    store(codes + i, in_order(_mm256_or_si256(_mm256_packus_epi16(low, high),
                                              _mm256_and_si256(signed_bytes, sign))));
  }
}

template <int kMantissaBits>
FSL_INLINE void quantise_runs(const float* x, std::size_t count, const Float8& format,
                              std::size_t block_values, std::uint32_t first_bits,
                              std::uint8_t* codes, std::uint8_t* scales, Seen& seen) {
  if (count == 0) return;
  // The next run is inspected before this one is coded: its scale takes a long chain of
  // instructions.
  std::uint32_t next = largest_of_run(x, block_values, first_bits, seen);
  for (std::size_t start = 0; start < count; start += block_values, ++scales) {
    const float* const from = x + start;
    const std::uint32_t largest = next;
    if (start + block_values < count)
      next = largest_of_run(from + block_values, block_values, first_bits, seen);
    if (largest >= 0x74000000) {
      // The adder's exponent would overflow.
      plain::quantise_float8(from, block_values, format, block_values, first_bits, codes + start,
                             scales, seen, 0);
      continue;
    }
    *scales = plain::scale_of(largest, format);
    code_run<kMantissaBits>(from, block_values, *scales == 0 ? format.lowest_scale : *scales,
                            format, codes + start);
  }
}

void quantise_float8(const float* x, std::size_t count, const Float8& format,
                     std::size_t block_values, std::uint32_t first_bits, std::uint8_t* codes,
                     std::uint8_t* scales, Seen& seen, std::size_t) {
  const std::size_t whole = count - count % block_values;
  if (format.mantissa_bits == 3) {
    quantise_runs<3>(x, whole, format, block_values, first_bits, codes, scales, seen);
  } else {
    quantise_runs<2>(x, whole, format, block_values, first_bits, codes, scales, seen);
  }
  if (whole < count) {
    plain::quantise_float8(x + whole, count - whole, format, block_values, first_bits,
                           codes + whole, scales + whole / block_values, seen, 0);
  }
}

// A run's properties, found before it is coded.
struct UniformRun {
  std::uint32_t largest;
  int step;
};

template <bool kSparse>
FSL_INLINE UniformRun look_at_uniform_run(const float* from, int step_log2,
                                          std::size_t block_values, std::uint32_t first_bits,
                                          Seen& seen) {
  const std::uint32_t largest = largest_of_run(from, block_values, first_bits, seen);
  if (largest == 0) return {0, kZeroRun};
  const __m256 normalizer = _mm256_set1_ps(plain::normalizer_of(largest));
  __m256 low = _mm256_setzero_ps();
  __m256 high = _mm256_setzero_ps();
  for (std::size_t i = 0; i < block_values; i += 2 * kLane) {
    const __m256 a = _mm256_mul_ps(_mm256_loadu_ps(from + i), normalizer);
    const __m256 b = _mm256_mul_ps(_mm256_loadu_ps(from + i + kLane), normalizer);
    low = _mm256_add_ps(low, _mm256_mul_ps(a, a));
    high = _mm256_add_ps(high, _mm256_mul_ps(b, b));
  }
  const __m256 eight = _mm256_add_ps(low, high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  const float sum = _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  const int step = plain::step_from_sum(sum, largest, step_log2, block_values);
  if (!kSparse) return {largest, step};
  std::size_t nonzero = 0;
  for (std::size_t i = 0; i < block_values; i += kLane)
    nonzero += ones(static_cast<std::uint32_t>(_mm256_movemask_ps(
        _mm256_cmp_ps(_mm256_loadu_ps(from + i), _mm256_setzero_ps(), _CMP_NEQ_UQ))));
  return {largest, coarser_step(step, nonzero, block_values)};
}

// The codes of a run of at least 32 values without escapes.
FSL_INLINE void code_uniform_run(const float* from, std::size_t count, __m256 inverse,
                                 std::uint8_t* codes) {
  const auto nearest = [=](const float* place) __attribute__((always_inline)) {
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(place), inverse));
  };
  for (std::size_t i = 0; i < count; i += kStep) {
    const __m256i low = _mm256_packs_epi32(nearest(from + i), nearest(from + i + kLane));
    const __m256i high =
        _mm256_packs_epi32(nearest(from + i + 2 * kLane), nearest(from + i + 3 * kLane));
    store(codes + i, in_order(_mm256_xor_si256(_mm256_packs_epi16(low, high), all_bytes(0x80))));
  }
}

// The codes of any run; returns the number of escapes.
FSL_INLINE std::size_t code_uniform_run_with_escapes(const float* from, std::size_t count,
                                                     __m256 inverse, std::uint8_t* codes) {
  std::size_t escapes = 0;
  for (std::size_t i = 0; i < count; i += 2 * kLane) {
    const __m256 a = _mm256_mul_ps(_mm256_loadu_ps(from + i), inverse);
    const __m256 b = _mm256_mul_ps(_mm256_loadu_ps(from + i + kLane), inverse);
    const __m256 limit = _mm256_set1_ps(127.5F);
    const __m256i fits_a = _mm256_castps_si256(_mm256_cmp_ps(
        _mm256_castsi256_ps(magnitude_of(_mm256_castps_si256(a))), limit, _CMP_LT_OQ));
    const __m256i fits_b = _mm256_castps_si256(_mm256_cmp_ps(
        _mm256_castsi256_ps(magnitude_of(_mm256_castps_si256(b))), limit, _CMP_LT_OQ));
    const __m256i code_a =
        _mm256_and_si256(_mm256_add_epi32(_mm256_cvtps_epi32(a), all(128)), fits_a);
    const __m256i code_b =
        _mm256_and_si256(_mm256_add_epi32(_mm256_cvtps_epi32(b), all(128)), fits_b);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(code_a, code_b), 0xD8);
    const __m128i bytes =
        _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), bytes);
    const __m256i fits = _mm256_packs_epi32(fits_a, fits_b);
    if (_mm256_movemask_epi8(fits) != -1) escapes += (32 - ones(signs(fits))) / 2;
  }
  return escapes;
}

template <bool kSparse>
std::size_t quantise_uniform(const float* x, std::size_t count, int step_log2,
                             std::size_t block_values, std::uint32_t first_bits,
                             std::uint8_t* codes, std::int16_t* steps, Seen& seen) {
  const std::size_t whole = count - count % block_values;
  std::size_t escapes = 0;
  // The next run is inspected before this one is coded: its step takes a long chain of
  // instructions.
  UniformRun next = {0, kZeroRun};
  if (whole > 0) next = look_at_uniform_run<kSparse>(x, step_log2, block_values, first_bits, seen);
  for (std::size_t start = 0; start < whole; start += block_values, ++steps) {
    const float* const from = x + start;
    const UniformRun run = next;
    if (start + block_values < whole)
      next = look_at_uniform_run<kSparse>(from + block_values, step_log2, block_values, first_bits,
                                          seen);
    *steps = static_cast<std::int16_t>(run.step);
    if (run.largest == 0) {
      std::memset(codes + start, 128, block_values);
      continue;
    }
    const float inverse = plain::quarter_power(-run.step);
    // The largest magnitude has the largest product; NaN does not compare.
    const bool all_fit = plain::float_of(run.largest) * inverse < 127.5F;
    if (all_fit && block_values >= kStep) {
      code_uniform_run(from, block_values, _mm256_set1_ps(inverse), codes + start);
    } else {
      escapes +=
          code_uniform_run_with_escapes(from, block_values, _mm256_set1_ps(inverse), codes + start);
    }
  }
  if (whole < count) {
    escapes += plain::quantise_uniform<kSparse>(x + whole, count - whole, step_log2, block_values,
                                                first_bits, codes + whole, steps, seen);
  }
  return escapes;
}

}  // namespace
}  // namespace fsl
