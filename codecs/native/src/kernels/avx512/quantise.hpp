// AVX-512: fp32 to codes of 8 bits. For avx512/kernels.cpp only, which sets the target.
#pragma once

#include "kernels/avx512/base.hpp"
#include "kernels/avx512/input.hpp"
#include "kernels/sparse.hpp"

namespace fsl {
namespace {

// --- fp32 to 8-bit floats

constexpr std::size_t kPieceRuns = kPiece / 16;

// The lowest bytes of four vectors of 16 lanes, in order.
FSL_INLINE __m512i lowest_bytes(__m512i a, __m512i b, __m512i c, __m512i d, __m512i order) {
  __m512i bytes = _mm512_slli_epi32(a, 24);
  bytes = _mm512_shrdi_epi32(bytes, b, 8);
  bytes = _mm512_shrdi_epi32(bytes, c, 8);
  bytes = _mm512_shrdi_epi32(bytes, d, 8);
  return _mm512_permutexvar_epi8(order, bytes);
}

// Place i of the result comes from byte i / 16 of lane i % 16.
FSL_INLINE __m512i lowest_bytes_order() {
  const __m512i lane =
      _mm512_set_epi32(0x3C383430, 0x2C282420, 0x1C181410, 0x0C080400, 0x3C383430, 0x2C282420,
                       0x1C181410, 0x0C080400, 0x3C383430, 0x2C282420, 0x1C181410, 0x0C080400,
                       0x3C383430, 0x2C282420, 0x1C181410, 0x0C080400);
  const __m512i place =
      _mm512_set_epi64(0x0303030303030303, 0x0303030303030303, 0x0202020202020202,
                       0x0202020202020202, 0x0101010101010101, 0x0101010101010101, 0, 0);
  return _mm512_or_si512(lane, place);
}

// Turns a run's values into codes without dividing by the scale, as float8_code in
// plain/kernels.hpp: the number added to a value depends only on its exponent, of which the codes
// have 16 (e4m3) or 32. The adder's lowest byte already holds the exponent's part of the code, an
// even number.
template <int kMantissaBits>
struct Float8Run {
  static constexpr int kExponents = 16 << (3 - kMantissaBits);
  __m512 smallest;                  // normal value
  __m512i adders[kExponents / 16];  // by exponent modulo kExponents

  FSL_INLINE explicit Float8Run(std::uint32_t smallest_bits)
      : smallest(_mm512_castsi512_ps(all(static_cast<int>(smallest_bits)))) {
    // Exponent smallest + d is at the place (smallest + d) modulo kExponents.
    alignas(64) static constexpr struct Steps {
      std::uint32_t of[kExponents][kExponents] = {};
      constexpr Steps() {
        for (int lowest = 0; lowest < kExponents; ++lowest) {
          for (int place = 0; place < kExponents; ++place) {
            const std::uint32_t above =
                static_cast<std::uint32_t>((place - lowest) & (kExponents - 1));
            of[lowest][place] = above * (0x800000U + (1U << kMantissaBits));
          }
        }
      }
    } kSteps;
    const __m512i base = all(static_cast<int>(smallest_bits + ((23 - kMantissaBits) << 23)));
    const std::uint32_t* const steps = kSteps.of[smallest_bits >> 23 & (kExponents - 1)];
    for (int i = 0; i < kExponents / 16; ++i)
      adders[i] = _mm512_add_epi32(base, load(steps + 16 * i));
  }

  // Lowest bytes: the codes without their signs.
  FSL_INLINE __m512i codes(__m512 values) const {
    constexpr int kLargestMagnitude = 0xB;
    const __m512i exponent = _mm512_srli_epi32(
        _mm512_castps_si512(_mm512_range_ps(values, smallest, kLargestMagnitude)), 23);
    const __m512i adder = kExponents == 16 ? _mm512_permutexvar_epi32(exponent, adders[0])
                                           : _mm512_permutex2var_epi32(adders[0], exponent,
                                                                       adders[kExponents / 16 - 1]);
    // (values & sign) | adder
    const __m512i signed_adder = _mm512_ternarylogic_epi32(
        _mm512_castps_si512(values), adder, all(static_cast<int>(0x80000000U)), 0xEC);
    return _mm512_castps_si512(_mm512_add_ps(values, _mm512_castsi512_ps(signed_adder)));
  }
};

// Byte `byte` of the lanes of four vectors, in order.
FSL_INLINE __m512i bytes_of(const __m512i* part, __m512i order) {
  return _mm512_mask_blend_epi32(0xFF00, _mm512_permutex2var_epi8(part[0], order, part[1]),
                                 _mm512_permutex2var_epi8(part[2], order, part[3]));
}

template <int kByte>
FSL_INLINE __m512i bytes_order() {
  alignas(64) static constexpr struct Order {
    std::uint8_t of[kStep] = {};
    constexpr Order() {
      for (std::size_t i = 0; i < kStep; ++i)
        of[i] = static_cast<std::uint8_t>(4 * (i % 32) + kByte);
    }
  } kOrder;
  return load(kOrder.of);
}

// kSmallRuns: of fewer than 64 values.
template <int kMantissaBits, bool kSmallRuns>
void quantise_pieces(const float* x, std::size_t count, const Float8& format,
                     std::size_t block_values, std::uint32_t first_bits, std::uint8_t* codes,
                     std::uint8_t* scales, Seen& seen, std::size_t further) {
  alignas(64) std::uint32_t largest[kPieceRuns + kLane];
  alignas(64) std::uint32_t smallest[kPieceRuns + kLane];
  const int block_shift = log2_of(block_values);
  const __m512i lowest_order = bytes_order<0>();
  const __m512i highest_order = bytes_order<3>();
  const __m512i signs = all_bytes(0x80);
  const __m512i offset = all(format.largest_exponent);
  const __m512i lowest_exponent = all(format.lowest_scale + format.largest_exponent);
  const __m512i smallest_offset = all(1 - format.exponent_bias - format.largest_exponent);
  for (std::size_t start = 0; start < count; start += kPiece) {
    const std::size_t length = count - start < kPiece ? count - start : kPiece;
    const std::size_t runs = length >> block_shift;
    largest_of_runs(x + start, length, block_values, first_bits, largest, seen);
    __m512i overall = _mm512_setzero_si512();
    for (std::size_t run = 0; run < runs; run += kLane) {
      const __m512i top = load(largest + run);
      overall = _mm512_max_epu32(overall, top);
      const __m512i exponent = _mm512_max_epu32(
          _mm512_srli_epi32(_mm512_add_epi32(top, all(0x1FFFFF)), 23), lowest_exponent);
      const __m512i scale =
          _mm512_maskz_sub_epi32(_mm512_test_epi32_mask(top, top), exponent, offset);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(scales + run), _mm512_cvtepi32_epi8(scale));
      store(smallest + run, _mm512_slli_epi32(_mm512_add_epi32(exponent, smallest_offset), 23));
    }
    const std::uint32_t magnitude = _mm512_reduce_max_epu32(overall);
    if (magnitude > seen.largest_magnitude) seen.largest_magnitude = magnitude;
    if (magnitude < 0x74000000) {
#pragma GCC unroll 2
      for (std::size_t i = 0; i < length; i += kStep) {
        const float* from = x + start + i;
        __m512i value[4];
        __m512i part[4];
        for (std::size_t j = 0; j < 4; ++j) value[j] = load(from + j * kLane);
        // Prefetches the piece after the next one into the first level.
        const std::uintptr_t ahead =
            reinterpret_cast<std::uintptr_t>(from) + 2 * kPiece * sizeof(float);
        for (std::size_t j = 0; j < 4; ++j)
          _mm_prefetch(reinterpret_cast<const char*>(ahead + j * kStep), _MM_HINT_T0);
        // Prefetches a quarter of what is needed much later, so that memory is read evenly.
        _mm_prefetch(
            reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(from) + further),
            _MM_HINT_T1);
        if (kSmallRuns) {
          for (std::size_t j = 0; j < 4; ++j) {
            part[j] = Float8Run<kMantissaBits>(smallest[(i + j * kLane) >> block_shift])
                          .codes(_mm512_castsi512_ps(value[j]));
          }
        } else {
          const Float8Run<kMantissaBits> run(smallest[i >> block_shift]);
          for (std::size_t j = 0; j < 4; ++j) part[j] = run.codes(_mm512_castsi512_ps(value[j]));
        }
        // A code has its value's sign.
        store(codes + start + i,
              _mm512_ternarylogic_epi32(bytes_of(value, highest_order),
                                        bytes_of(part, lowest_order), signs, 0xE4));
      }
    } else {
      // The adder's exponent would overflow.
      kScalarKernels.quantise_float8(x + start, length, format, block_values, first_bits,
                                     codes + start, scales, seen, 0);
    }
    scales += runs;
  }
}

void quantise_float8(const float* x, std::size_t count, const Float8& format,
                     std::size_t block_values, std::uint32_t first_bits, std::uint8_t* codes,
                     std::uint8_t* scales, Seen& seen, std::size_t further) {
  const std::size_t unit = block_values < kStep ? kStep : block_values;
  const std::size_t whole = count - count % unit;
  const auto quantise =
      block_values < kStep
          ? (format.mantissa_bits == 3 ? quantise_pieces<3, true> : quantise_pieces<2, true>)
          : (format.mantissa_bits == 3 ? quantise_pieces<3, false> : quantise_pieces<2, false>);
  quantise(x, whole, format, block_values, first_bits, codes, scales, seen, further);
  if (whole < count) {
    kScalarKernels.quantise_float8(x + whole, count - whole, format, block_values, first_bits,
                                   codes + whole, scales + whole / block_values, seen, 0);
  }
}

// --- fp32 to uniform

// 2^(quarters / 4) as fp32 bits.
FSL_INLINE __m512i quarter_powers(__m512i quarters) {
  const __m512i powers =
      _mm512_broadcast_i32x4(_mm_set_epi32(0x3FD744FD, 0x3FB504F3, 0x3F9837F0, 0x3F800000));
  return _mm512_add_epi32(_mm512_permutexvar_epi32(_mm512_and_si512(quarters, all(3)), powers),
                          _mm512_slli_epi32(_mm512_srai_epi32(quarters, 2), 23));
}

FSL_INLINE float folded_sum(__m512 lanes) {
  const __m256 eight =
      _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

template <bool kSparse>
std::size_t quantise_uniform(const float* x, std::size_t count, int step_log2,
                             std::size_t block_values, std::uint32_t first_bits,
                             std::uint8_t* codes, std::int16_t* steps, Seen& seen) {
  alignas(64) std::uint32_t largest[kPieceRuns + kLane];
  alignas(64) float normalizer[kPieceRuns + kLane];
  alignas(64) float sums[kPieceRuns + kLane];
  alignas(64) float inverse[kPieceRuns + kLane];
  alignas(64) std::int32_t coarser[kPieceRuns + kLane];
  const int block_shift = log2_of(block_values);
  const __m512i order = lowest_bytes_order();
  const __m512i magnitude_mask = all(0x7FFFFFFF);
  const std::size_t unit = block_values < kStep ? kStep : block_values;
  const std::size_t whole = count - count % unit;
  std::size_t escapes = 0;
  for (std::size_t start = 0; start < whole; start += kPiece) {
    const std::size_t length = whole - start < kPiece ? whole - start : kPiece;
    const std::size_t runs = length >> block_shift;
    const float* from = x + start;
    largest_of_runs(from, length, block_values, first_bits, largest, seen);
    for (std::size_t run = 0; run < runs; run += kLane) {
      const __m512i exponent = _mm512_max_epu32(_mm512_srli_epi32(load(largest + run), 23), all(1));
      store(normalizer + run, _mm512_slli_epi32(_mm512_sub_epi32(all(254), exponent), 23));
    }
    for (std::size_t run = 0; run < runs; ++run) {
      __m512 lanes = _mm512_setzero_ps();
      std::size_t nonzero = 0;
      const __m512 factor = _mm512_set1_ps(normalizer[run]);
      for (std::size_t i = run << block_shift; i < (run + 1) << block_shift; i += kLane) {
        const __m512 value = _mm512_loadu_ps(from + i);
        const __m512 y = _mm512_mul_ps(value, factor);
        lanes = _mm512_add_ps(lanes, _mm512_mul_ps(y, y));
        if (kSparse) nonzero += ones(_mm512_cmp_ps_mask(value, _mm512_setzero_ps(), _CMP_NEQ_UQ));
      }
      sums[run] = folded_sum(lanes);
      if (kSparse) coarser[run] = coarser_by(nonzero, block_values);
    }
    __m512i overall = _mm512_setzero_si512();
    bool escaping = false;
    for (std::size_t run = 0; run < runs; run += kLane) {
      const __m512i top = load(largest + run);
      overall = _mm512_max_epu32(overall, top);
      const __m512i exponent = _mm512_max_epu32(_mm512_srli_epi32(top, 23), all(1));
      const __m512i sum = load(sums + run);
      const __m512i mantissa = _mm512_and_si512(sum, all(0x7FFFFF));
      const __m512i power = _mm512_and_si512(_mm512_srli_epi32(sum, 23), all(0xFF));
      __m512i quarters =
          _mm512_add_epi32(_mm512_slli_epi32(exponent, 2), _mm512_slli_epi32(power, 1));
      quarters = _mm512_sub_epi32(quarters, all(6 * 127 + 2 * block_shift + step_log2));
      quarters = _mm512_mask_add_epi32(quarters, _mm512_cmpge_epu32_mask(mantissa, all(0x1837F0)),
                                       quarters, all(1));
      quarters = _mm512_mask_add_epi32(quarters, _mm512_cmpge_epu32_mask(mantissa, all(0x5744FD)),
                                       quarters, all(1));
      quarters = _mm512_max_epi32(_mm512_min_epi32(quarters, all(480)), all(-504));
      if (kSparse)
        quarters = _mm512_min_epi32(_mm512_add_epi32(quarters, load(coarser + run)), all(480));
      const __m512i powers = quarter_powers(_mm512_sub_epi32(_mm512_setzero_si512(), quarters));
      const __mmask16 nonzero = _mm512_test_epi32_mask(top, top);
      store(inverse + run, powers);
      const __m512 product = _mm512_mul_ps(_mm512_castsi512_ps(top), _mm512_castsi512_ps(powers));
      escaping |=
          _mm512_mask_cmp_ps_mask(nonzero, product, _mm512_set1_ps(127.5F), _CMP_NLT_UQ) != 0;
      const __m512i wire = _mm512_mask_blend_epi32(nonzero, all(kZeroRun), quarters);
      const __m256i words = _mm512_cvtepi32_epi16(wire);
      if (runs - run >= kLane) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(steps + run), words);
      } else {
        _mm256_mask_storeu_epi16(steps + run, static_cast<__mmask16>((1U << (runs - run)) - 1),
                                 words);
      }
    }
    const std::uint32_t magnitude = _mm512_reduce_max_epu32(overall);
    if (magnitude > seen.largest_magnitude) seen.largest_magnitude = magnitude;
    const __m512i center = all_bytes(0x80);
#pragma GCC unroll 2
    for (std::size_t i = 0; i < length; i += kStep) {
      __m512i part[4];
      std::uint64_t fits = 0;
      for (std::size_t j = 0; j < 4; ++j) {
        const std::size_t place = i + j * kLane;
        const __m512 product = _mm512_mul_ps(_mm512_loadu_ps(from + place),
                                             _mm512_set1_ps(inverse[place >> block_shift]));
        part[j] = _mm512_cvtps_epi32(product);
        if (escaping) {
          const __m512 absolute =
              _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(product), magnitude_mask));
          fits |= static_cast<std::uint64_t>(
                      _mm512_cmp_ps_mask(absolute, _mm512_set1_ps(127.5F), _CMP_LT_OQ))
                  << (j * kLane);
        }
      }
      __m512i code =
          _mm512_xor_si512(lowest_bytes(part[0], part[1], part[2], part[3], order), center);
      if (escaping) {
        code = _mm512_maskz_mov_epi8(fits, code);
        escapes += ones(~fits);
      }
      store(codes + start + i, code);
    }
    steps += runs;
  }
  if (whole < count) {
    const auto quantise =
        kSparse ? kScalarKernels.quantise_sparse : kScalarKernels.quantise_uniform;
    escapes += quantise(x + whole, count - whole, step_log2, block_values, first_bits,
                        codes + whole, steps, seen);
  }
  return escapes;
}

}  // namespace
}  // namespace fsl
