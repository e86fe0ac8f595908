// AVX-512: the values to encode, and the largest magnitudes of their runs. For avx512/kernels.cpp
// only, which sets the target.
#pragma once

#include "kernels/avx512/base.hpp"

namespace fsl {
namespace {

// --- input values

template <bool kBfloat16, bool kReference, bool kResidual>
void combine_as(const float* values_fp32, const std::uint16_t* values_bf16, const float* reference,
                const float* residual, std::size_t count, float* x) {
  const auto sum = [=](std::size_t i, __mmask16 valid) __attribute__((always_inline)) {
    __m512 value;
    if (kBfloat16) {
      const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(valid, values_bf16 + i));
      value = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    } else {
      value = _mm512_maskz_loadu_ps(valid, values_fp32 + i);
    }
    if (kReference) value = _mm512_sub_ps(value, _mm512_maskz_loadu_ps(valid, reference + i));
    if (kResidual) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(valid, residual + i));
    return value;
  };
  const std::size_t whole = count & ~(kLane - 1);
  for (std::size_t i = 0; i < whole; i += kLane) _mm512_storeu_ps(x + i, sum(i, 0xFFFF));
  if (whole < count) {
    const __mmask16 valid = static_cast<__mmask16>((1U << (count - whole)) - 1);
    _mm512_mask_storeu_ps(x + whole, valid, sum(whole, valid));
  }
}

void combine(const float* values_fp32, const std::uint16_t* values_bf16, const float* reference,
             const float* residual, std::size_t count, float* x) {
  using Function =
      void (*)(const float*, const std::uint16_t*, const float*, const float*, std::size_t, float*);
  static constexpr Function kFunctions[8] = {
      combine_as<false, false, false>, combine_as<false, false, true>,
      combine_as<false, true, false>,  combine_as<false, true, true>,
      combine_as<true, false, false>,  combine_as<true, false, true>,
      combine_as<true, true, false>,   combine_as<true, true, true>};
  const int which = (values_fp32 == nullptr ? 4 : 0) + (reference != nullptr ? 2 : 0) +
                    (residual != nullptr ? 1 : 0);
  kFunctions[which](values_fp32, values_bf16, reference, residual, count, x);
}

constexpr std::size_t kPiece =
    2048;  // values whose runs are inspected before they are quantized, in the first cache level

FSL_INLINE __m512i magnitude_of(__m512i bits) { return _mm512_and_si512(bits, all(0x7FFFFFFF)); }

// The parts of Seen, a lane each.
struct Sight {
  __m512i largest;
  __m512i differing;

  FSL_INLINE Sight() : largest(_mm512_setzero_si512()), differing(_mm512_setzero_si512()) {}

  FSL_INLINE void see(__m512i bits, __m512i first) {
    largest = _mm512_max_epu32(largest, magnitude_of(bits));
    differing = _mm512_or_si512(differing, _mm512_xor_si512(bits, first));
  }

  FSL_INLINE void fold_into(Seen& seen) const {
    const std::uint32_t magnitude = _mm512_reduce_max_epu32(largest);
    if (magnitude > seen.largest_magnitude) seen.largest_magnitude = magnitude;
    seen.differing_bits |= static_cast<std::uint32_t>(_mm512_reduce_or_epi32(differing));
  }
};

void look(const float* x, std::size_t count, std::uint32_t first_bits, Seen& seen) {
  const __m512i first = all(static_cast<int>(first_bits));
  Sight sight;
  const std::size_t whole = count & ~(kLane - 1);
  for (std::size_t i = 0; i < whole; i += kLane) sight.see(load(x + i), first);
  sight.fold_into(seen);
  kScalarKernels.look(x + whole, count - whole, first_bits, seen);
}

// Lane k of the result is the largest lane of vectors[k].
FSL_INLINE __m512i largest_of_each(const __m512i* vectors) {
  __m512i four[4];
  for (int i = 0; i < 4; ++i) {
    const __m512i* v = vectors + 4 * i;
    const __m512i first =
        _mm512_max_epu32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    const __m512i second =
        _mm512_max_epu32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    four[i] = _mm512_max_epu32(_mm512_unpacklo_epi64(first, second),
                               _mm512_unpackhi_epi64(first, second));
  }
  const __m512i low = _mm512_max_epu32(_mm512_shuffle_i64x2(four[0], four[1], 0x88),
                                       _mm512_shuffle_i64x2(four[0], four[1], 0xDD));
  const __m512i high = _mm512_max_epu32(_mm512_shuffle_i64x2(four[2], four[3], 0x88),
                                        _mm512_shuffle_i64x2(four[2], four[3], 0xDD));
  return _mm512_max_epu32(_mm512_shuffle_i64x2(low, high, 0x88),
                          _mm512_shuffle_i64x2(low, high, 0xDD));
}

// Prefetches the same step of the next piece into the second cache level; it moves to the first
// while this piece is quantized.
FSL_INLINE void fetch_step(const float* x) {
  const std::uintptr_t ahead = reinterpret_cast<std::uintptr_t>(x) + kPiece * sizeof(float);
  for (std::size_t line = 0; line < kStep * sizeof(float); line += 64)
    _mm_prefetch(reinterpret_cast<const char*>(ahead + line), _MM_HINT_T1);
}

// Writes the largest magnitudes of whole runs to largest[], padded with zeros to whole vectors;
// `seen` as in quantise_float8.
FSL_INLINE void largest_of_runs(const float* x, std::size_t count, std::size_t block_values,
                                std::uint32_t first_bits, std::uint32_t* largest, Seen& seen) {
  if (seen.differing_bits == 0) {
    // Checked only until some value differs, usually at once.
    const __m512i first = all(static_cast<int>(first_bits));
    __m512i differing = _mm512_setzero_si512();
    for (std::size_t i = 0; i < count && seen.differing_bits == 0; i += kLane) {
      differing = _mm512_xor_si512(load(x + i), first);
      seen.differing_bits |= static_cast<std::uint32_t>(_mm512_reduce_or_epi32(differing));
    }
  }
  const __m512i mask = all(0x7FFFFFFF);
  const std::size_t runs = count / block_values;
  for (std::size_t run = 0; run < runs; run += kLane) {
    __m512i of_run[kLane];
    const std::size_t here = runs - run < kLane ? runs - run : kLane;
    for (std::size_t k = here; k < kLane; ++k) of_run[k] = _mm512_setzero_si512();
    for (std::size_t k = 0; k < here; ++k) {
      __m512i top = _mm512_and_si512(load(x), mask);
      if (block_values >= kStep) {
        const float* const stop = x + block_values;
        __m512i other = _mm512_and_si512(load(x + kLane), mask);
        top = _mm512_max_epu32(top, _mm512_and_si512(load(x + 2 * kLane), mask));
        other = _mm512_max_epu32(other, _mm512_and_si512(load(x + 3 * kLane), mask));
        fetch_step(x);
        for (x += kStep; x < stop; x += kStep) {
          fetch_step(x);
          top = _mm512_max_epu32(top, _mm512_and_si512(load(x), mask));
          other = _mm512_max_epu32(other, _mm512_and_si512(load(x + kLane), mask));
          top = _mm512_max_epu32(top, _mm512_and_si512(load(x + 2 * kLane), mask));
          other = _mm512_max_epu32(other, _mm512_and_si512(load(x + 3 * kLane), mask));
        }
        top = _mm512_max_epu32(top, other);
      } else {
        if (block_values > kLane)
          top = _mm512_max_epu32(top, _mm512_and_si512(load(x + kLane), mask));
        x += block_values;
      }
      of_run[k] = top;
    }
    store(largest, largest_of_each(of_run));
    largest += kLane;
  }
}

}  // namespace
}  // namespace fsl
