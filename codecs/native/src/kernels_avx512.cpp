// The kernels for AVX-512 with byte permutes and compressions (F, BW, VL, DQ, VBMI, VBMI2, VPOPCNTDQ, VPCLMULQDQ), 64 symbols or
// 16 values a step. Loops do whole steps; a block's last few values go through masks or through the scalar kernels.
#include "kernels_paths.hpp"

#if FSL_X86_KERNELS

#include <cstring>

#if defined(__clang__)
#pragma clang attribute push(                                                                                                  \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,avx512vpopcntdq,vpclmulqdq,pclmul,bmi,"   \
                          "bmi2,popcnt"))),                                                                                    \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,avx512vpopcntdq,vpclmulqdq,pclmul,bmi,bmi2,popcnt")
#pragma GCC diagnostic ignored "-Wuninitialized"        // gcc 12 warns of its own header's undefined vectors
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#define FSL_INLINE inline __attribute__((always_inline))

namespace fsl {
namespace {

constexpr std::size_t kLane = 16;   // fp32 values of a vector
constexpr std::size_t kStep = 64;   // bytes of a vector

FSL_INLINE __m512i load(const void* from) { return _mm512_loadu_si512(from); }
FSL_INLINE void store(void* to, __m512i value) { _mm512_storeu_si512(to, value); }
FSL_INLINE __m512i all(int value) { return _mm512_set1_epi32(value); }
FSL_INLINE __m512i all_bytes(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
FSL_INLINE std::size_t ones(std::uint64_t mask) { return static_cast<std::size_t>(_mm_popcnt_u64(mask)); }
// The lowest `count` bits, count < 64.
FSL_INLINE std::uint64_t lowest(std::size_t count) { return (std::uint64_t{1} << count) - 1; }

// A cache line of what comes next, to the second level: it is too much for the first.
FSL_INLINE void fetch(const char*& next, const char* end) {
  if (next < end) {
    _mm_prefetch(next, _MM_HINT_T1);
    next += 64;
  }
}

FSL_INLINE void fetch(Prefetch& prefetch) { fetch(prefetch.next, prefetch.end); }

FSL_INLINE int log2_of(std::size_t power) { return __builtin_ctzll(power); }

// ------------------------------------------------------------------------------------------------------------ input values

template <bool kBfloat16, bool kReference, bool kResidual>
void combine_as(const float* values_fp32, const std::uint16_t* values_bf16, const float* reference, const float* residual,
                std::size_t count, float* x) {
  for (std::size_t i = 0; i < count; i += kLane) {
    const __mmask16 valid = count - i < kLane ? static_cast<__mmask16>((1U << (count - i)) - 1) : static_cast<__mmask16>(0xFFFF);
    __m512 value;
    if (kBfloat16) {
      const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(valid, values_bf16 + i));
      value = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    } else {
      value = _mm512_maskz_loadu_ps(valid, values_fp32 + i);
    }
    if (kReference) value = _mm512_sub_ps(value, _mm512_maskz_loadu_ps(valid, reference + i));
    if (kResidual) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(valid, residual + i));
    _mm512_mask_storeu_ps(x + i, valid, value);
  }
}

void combine(const float* values_fp32, const std::uint16_t* values_bf16, const float* reference, const float* residual,
             std::size_t count, float* x) {
  using Function = void (*)(const float*, const std::uint16_t*, const float*, const float*, std::size_t, float*);
  static constexpr Function kFunctions[8] = {combine_as<false, false, false>, combine_as<false, false, true>,
                                             combine_as<false, true, false>,  combine_as<false, true, true>,
                                             combine_as<true, false, false>,  combine_as<true, false, true>,
                                             combine_as<true, true, false>,   combine_as<true, true, true>};
  const int which = (values_fp32 == nullptr ? 4 : 0) + (reference != nullptr ? 2 : 0) + (residual != nullptr ? 1 : 0);
  kFunctions[which](values_fp32, values_bf16, reference, residual, count, x);
}

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
    const __m512i first = _mm512_max_epu32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    const __m512i second = _mm512_max_epu32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    four[i] = _mm512_max_epu32(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
  }
  const __m512i low = _mm512_max_epu32(_mm512_shuffle_i64x2(four[0], four[1], 0x88), _mm512_shuffle_i64x2(four[0], four[1], 0xDD));
  const __m512i high = _mm512_max_epu32(_mm512_shuffle_i64x2(four[2], four[3], 0x88), _mm512_shuffle_i64x2(four[2], four[3], 0xDD));
  return _mm512_max_epu32(_mm512_shuffle_i64x2(low, high, 0x88), _mm512_shuffle_i64x2(low, high, 0xDD));
}

// Largest magnitudes of whole runs, into largest[], filled up with zeros to whole vectors; `seen` as in quantise_float8.
FSL_INLINE void largest_of_runs(const float* x, std::size_t count, std::size_t block_values, std::uint32_t first_bits,
                                std::uint32_t* largest, Seen& seen) {
  if (seen.differing_bits == 0) {
    // Looked at only until something differs, which is at once in most chunks.
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
        for (x += kStep; x < stop; x += kStep) {
          top = _mm512_max_epu32(top, _mm512_and_si512(load(x), mask));
          other = _mm512_max_epu32(other, _mm512_and_si512(load(x + kLane), mask));
          top = _mm512_max_epu32(top, _mm512_and_si512(load(x + 2 * kLane), mask));
          other = _mm512_max_epu32(other, _mm512_and_si512(load(x + 3 * kLane), mask));
        }
        top = _mm512_max_epu32(top, other);
      } else {
        if (block_values > kLane) top = _mm512_max_epu32(top, _mm512_and_si512(load(x + kLane), mask));
        x += block_values;
      }
      of_run[k] = top;
    }
    store(largest, largest_of_each(of_run));
    largest += kLane;
  }
}

// -------------------------------------------------------------------------------------------------- fp32 to 8-bit floats

constexpr std::size_t kPiece = 2048;      // values whose runs are looked at before they are quantised, in the first cache level
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
  const __m512i lane = _mm512_set_epi32(0x3C383430, 0x2C282420, 0x1C181410, 0x0C080400, 0x3C383430, 0x2C282420, 0x1C181410,
                                        0x0C080400, 0x3C383430, 0x2C282420, 0x1C181410, 0x0C080400, 0x3C383430, 0x2C282420,
                                        0x1C181410, 0x0C080400);
  const __m512i place = _mm512_set_epi64(0x0303030303030303, 0x0303030303030303, 0x0202020202020202, 0x0202020202020202,
                                         0x0101010101010101, 0x0101010101010101, 0, 0);
  return _mm512_or_si512(lane, place);
}

// How the values of a run become codes, without dividing by the scale; see float8_code in kernels_plain.hpp for the idea: what is added to a
// value depends on its exponent alone, of which the codes have 16 (e4m3) or 32. The adder has the exponent's share of the code, an even number, in
// its lowest byte already.
template <int kMantissaBits>
struct Float8Run {
  static constexpr int kExponents = 16 << (3 - kMantissaBits);
  __m512 smallest;  // normal value
  __m512i adders[kExponents / 16];  // of the exponents that are their place modulo kExponents

  FSL_INLINE explicit Float8Run(std::uint32_t smallest_bits) : smallest(_mm512_castsi512_ps(all(static_cast<int>(smallest_bits)))) {
    // Exponent d above the smallest, in the place (smallest + d) modulo kExponents.
    alignas(64) static constexpr struct Steps {
      std::uint32_t of[kExponents][kExponents] = {};
      constexpr Steps() {
        for (int lowest = 0; lowest < kExponents; ++lowest) {
          for (int place = 0; place < kExponents; ++place) {
            const std::uint32_t above = static_cast<std::uint32_t>((place - lowest) & (kExponents - 1));
            of[lowest][place] = above * (0x800000U + (1U << kMantissaBits));
          }
        }
      }
    } kSteps;
    const __m512i base = all(static_cast<int>(smallest_bits + ((23 - kMantissaBits) << 23)));
    const std::uint32_t* const steps = kSteps.of[smallest_bits >> 23 & (kExponents - 1)];
    for (int i = 0; i < kExponents / 16; ++i) adders[i] = _mm512_add_epi32(base, load(steps + 16 * i));
  }

  // Lowest bytes: the codes without their signs.
  FSL_INLINE __m512i codes(__m512 values) const {
    constexpr int kLargestMagnitude = 0xB;
    const __m512i exponent = _mm512_srli_epi32(_mm512_castps_si512(_mm512_range_ps(values, smallest, kLargestMagnitude)), 23);
    const __m512i adder = kExponents == 16 ? _mm512_permutexvar_epi32(exponent, adders[0])
                                           : _mm512_permutex2var_epi32(adders[0], exponent, adders[kExponents / 16 - 1]);
    // (values & sign) | adder
    const __m512i signed_adder = _mm512_ternarylogic_epi32(_mm512_castps_si512(values), adder, all(static_cast<int>(0x80000000U)), 0xEC);
    return _mm512_castps_si512(_mm512_add_ps(values, _mm512_castsi512_ps(signed_adder)));
  }
};

// Byte `byte` of the lanes of four vectors, in order.
FSL_INLINE __m512i bytes_of(const __m512i* part, __m512i order) {
  return _mm512_mask_blend_epi32(0xFF00, _mm512_permutex2var_epi8(part[0], order, part[1]), _mm512_permutex2var_epi8(part[2], order, part[3]));
}

FSL_INLINE __m512i bytes_order(int byte) {
  alignas(64) std::uint8_t order[kStep];
  for (std::size_t i = 0; i < kStep; ++i) order[i] = static_cast<std::uint8_t>(4 * (i % 32) + static_cast<std::size_t>(byte));
  return load(order);
}

// kSmallRuns: of fewer than 64 values.
template <int kMantissaBits, bool kSmallRuns>
void quantise_pieces(const float* x, std::size_t count, const Float8& format, std::size_t block_values, std::uint32_t first_bits,
                     std::uint8_t* codes, std::uint8_t* scales, Seen& seen, Prefetch& prefetch) {
  alignas(64) std::uint32_t largest[kPieceRuns + kLane];
  alignas(64) std::uint32_t smallest[kPieceRuns + kLane];
  const int block_shift = log2_of(block_values);
  const __m512i lowest_order = bytes_order(0);
  const __m512i highest_order = bytes_order(3);
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
      const __m512i exponent = _mm512_max_epu32(_mm512_srli_epi32(_mm512_add_epi32(top, all(0x1FFFFF)), 23), lowest_exponent);
      const __m512i scale = _mm512_maskz_sub_epi32(_mm512_test_epi32_mask(top, top), exponent, offset);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(scales + run), _mm512_cvtepi32_epi8(scale));
      store(smallest + run, _mm512_slli_epi32(_mm512_add_epi32(exponent, smallest_offset), 23));
    }
    const std::uint32_t magnitude = _mm512_reduce_max_epu32(overall);
    if (magnitude > seen.largest_magnitude) seen.largest_magnitude = magnitude;
    if (magnitude < 0x74000000) {
      for (std::size_t i = 0; i < length; i += kStep) {
        const float* from = x + start + i;
        __m512i value[4];
        __m512i part[4];
        for (std::size_t j = 0; j < 4; ++j) value[j] = load(from + j * kLane);
        if (kSmallRuns) {
          for (std::size_t j = 0; j < 4; ++j) {
            part[j] = Float8Run<kMantissaBits>(smallest[(i + j * kLane) >> block_shift]).codes(_mm512_castsi512_ps(value[j]));
          }
        } else {
          const Float8Run<kMantissaBits> run(smallest[i >> block_shift]);
          for (std::size_t j = 0; j < 4; ++j) part[j] = run.codes(_mm512_castsi512_ps(value[j]));
        }
        // A code's sign is its value's.
        store(codes + start + i, _mm512_ternarylogic_epi32(bytes_of(value, highest_order), bytes_of(part, lowest_order), signs, 0xE4));
        fetch(prefetch);
        fetch(prefetch);
      }
    } else {
      // The adder's exponent would overflow.
      kScalarKernels.quantise_float8(x + start, length, format, block_values, first_bits, codes + start, scales, seen, prefetch);
    }
    scales += runs;
  }
}

void quantise_float8(const float* x, std::size_t count, const Float8& format, std::size_t block_values, std::uint32_t first_bits,
                     std::uint8_t* codes, std::uint8_t* scales, Seen& seen, Prefetch& prefetch) {
  const std::size_t unit = block_values < kStep ? kStep : block_values;
  const std::size_t whole = count - count % unit;
  const auto quantise = block_values < kStep ? (format.mantissa_bits == 3 ? quantise_pieces<3, true> : quantise_pieces<2, true>)
                                             : (format.mantissa_bits == 3 ? quantise_pieces<3, false> : quantise_pieces<2, false>);
  quantise(x, whole, format, block_values, first_bits, codes, scales, seen, prefetch);
  if (whole < count) {
    kScalarKernels.quantise_float8(x + whole, count - whole, format, block_values, first_bits, codes + whole,
                                   scales + whole / block_values, seen, prefetch);
  }
}

// --------------------------------------------------------------------------------------------------------- fp32 to uniform

// 2^(quarters / 4) as fp32 bits.
FSL_INLINE __m512i quarter_powers(__m512i quarters) {
  const __m512i powers = _mm512_broadcast_i32x4(_mm_set_epi32(0x3FD744FD, 0x3FB504F3, 0x3F9837F0, 0x3F800000));
  return _mm512_add_epi32(_mm512_permutexvar_epi32(_mm512_and_si512(quarters, all(3)), powers),
                          _mm512_slli_epi32(_mm512_srai_epi32(quarters, 2), 23));
}

FSL_INLINE float folded_sum(__m512 lanes) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

std::size_t quantise_uniform(const float* x, std::size_t count, int fineness, std::size_t block_values, std::uint32_t first_bits,
                             std::uint8_t* codes, std::int16_t* steps, Seen& seen, Prefetch& prefetch) {
  alignas(64) std::uint32_t largest[kPieceRuns + kLane];
  alignas(64) float normaliser[kPieceRuns + kLane];
  alignas(64) float sums[kPieceRuns + kLane];
  alignas(64) float inverse[kPieceRuns + kLane];
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
      store(normaliser + run, _mm512_slli_epi32(_mm512_sub_epi32(all(254), exponent), 23));
    }
    for (std::size_t run = 0; run < runs; ++run) {
      __m512 lanes = _mm512_setzero_ps();
      const __m512 factor = _mm512_set1_ps(normaliser[run]);
      for (std::size_t i = run << block_shift; i < (run + 1) << block_shift; i += kLane) {
        const __m512 y = _mm512_mul_ps(_mm512_loadu_ps(from + i), factor);
        lanes = _mm512_add_ps(lanes, _mm512_mul_ps(y, y));
      }
      sums[run] = folded_sum(lanes);
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
      __m512i quarters = _mm512_add_epi32(_mm512_slli_epi32(exponent, 2), _mm512_slli_epi32(power, 1));
      quarters = _mm512_sub_epi32(quarters, all(6 * 127 + 2 * block_shift + fineness));
      quarters = _mm512_mask_add_epi32(quarters, _mm512_cmpge_epu32_mask(mantissa, all(0x1837F0)), quarters, all(1));
      quarters = _mm512_mask_add_epi32(quarters, _mm512_cmpge_epu32_mask(mantissa, all(0x5744FD)), quarters, all(1));
      quarters = _mm512_max_epi32(_mm512_min_epi32(quarters, all(480)), all(-504));
      const __m512i powers = quarter_powers(_mm512_sub_epi32(_mm512_setzero_si512(), quarters));
      const __mmask16 nonzero = _mm512_test_epi32_mask(top, top);
      store(inverse + run, powers);
      const __m512 product = _mm512_mul_ps(_mm512_castsi512_ps(top), _mm512_castsi512_ps(powers));
      escaping |= _mm512_mask_cmp_ps_mask(nonzero, product, _mm512_set1_ps(127.5F), _CMP_NLT_UQ) != 0;
      const __m512i wire = _mm512_mask_blend_epi32(nonzero, all(kZeroRun), quarters);
      const __m256i words = _mm512_cvtepi32_epi16(wire);
      if (runs - run >= kLane) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(steps + run), words);
      } else {
        _mm256_mask_storeu_epi16(steps + run, static_cast<__mmask16>((1U << (runs - run)) - 1), words);
      }
    }
    const std::uint32_t magnitude = _mm512_reduce_max_epu32(overall);
    if (magnitude > seen.largest_magnitude) seen.largest_magnitude = magnitude;
    const __m512i centre = all_bytes(0x80);
    for (std::size_t i = 0; i < length; i += kStep) {
      __m512i part[4];
      std::uint64_t fits = 0;
      for (std::size_t j = 0; j < 4; ++j) {
        const std::size_t place = i + j * kLane;
        const __m512 product = _mm512_mul_ps(_mm512_loadu_ps(from + place), _mm512_set1_ps(inverse[place >> block_shift]));
        part[j] = _mm512_cvtps_epi32(product);
        if (escaping) {
          const __m512 absolute = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(product), magnitude_mask));
          fits |= static_cast<std::uint64_t>(_mm512_cmp_ps_mask(absolute, _mm512_set1_ps(127.5F), _CMP_LT_OQ)) << (j * kLane);
        }
      }
      __m512i code = _mm512_xor_si512(lowest_bytes(part[0], part[1], part[2], part[3], order), centre);
      if (escaping) {
        code = _mm512_maskz_mov_epi8(fits, code);
        escapes += ones(~fits);
      }
      store(codes + start + i, code);
      fetch(prefetch);
      fetch(prefetch);
    }
    steps += runs;
  }
  if (whole < count) {
    escapes += kScalarKernels.quantise_uniform(x + whole, count - whole, fineness, block_values, first_bits, codes + whole, steps,
                                               seen, prefetch);
  }
  return escapes;
}

// ------------------------------------------------------------------------------------------------------ rotated byte planes

void cut_bfloat16(const float* x, std::size_t count, std::uint32_t first_bits, std::uint8_t* const planes[2], Seen& seen) {
  const __m512i first = all(static_cast<int>(first_bits));
  // Upper words of two vectors; then upper or lower bytes of two vectors.
  alignas(64) std::uint16_t upper_words[32];
  alignas(64) std::uint8_t lower_bytes[64];
  alignas(64) std::uint8_t upper_bytes[64];
  for (std::size_t i = 0; i < 32; ++i) upper_words[i] = static_cast<std::uint16_t>(2 * i + 1);
  for (std::size_t i = 0; i < 64; ++i) {
    lower_bytes[i] = static_cast<std::uint8_t>(2 * i);
    upper_bytes[i] = static_cast<std::uint8_t>(2 * i + 1);
  }
  const __m512i words = load(upper_words);
  const __m512i lower = load(lower_bytes);
  const __m512i upper = load(upper_bytes);
  Sight sight;
  const std::size_t whole = count & ~(kStep - 1);
  for (std::size_t i = 0; i < whole; i += kStep) {
    __m512i part[4];
    for (std::size_t j = 0; j < 4; ++j) {
      const __m512i bits = load(x + i + j * kLane);
      sight.see(bits, first);
      const __m512i ties = _mm512_and_si512(_mm512_srli_epi32(bits, 16), all(1));
      part[j] = _mm512_add_epi32(_mm512_add_epi32(bits, all(0x7FFF)), ties);
    }
    __m512i low = _mm512_permutex2var_epi16(part[0], words, part[1]);
    __m512i high = _mm512_permutex2var_epi16(part[2], words, part[3]);
    low = _mm512_shldi_epi16(low, low, 1);
    high = _mm512_shldi_epi16(high, high, 1);
    store(planes[0] + i, _mm512_permutex2var_epi8(low, upper, high));
    store(planes[1] + i, _mm512_permutex2var_epi8(low, lower, high));
  }
  sight.fold_into(seen);
  std::uint8_t* const rest[2] = {planes[0] + whole, planes[1] + whole};
  kScalarKernels.cut_bfloat16(x + whole, count - whole, first_bits, rest, seen);
}

void cut_float32(const float* x, std::size_t count, std::uint32_t first_bits, std::uint8_t* const planes[4], Seen& seen) {
  const __m512i first = all(static_cast<int>(first_bits));
  // Byte 3 of all lanes, then byte 2, ...
  alignas(64) std::uint8_t by_place[64];
  for (std::size_t i = 0; i < 64; ++i) by_place[i] = static_cast<std::uint8_t>(4 * (i % 16) + 3 - i / 16);
  const __m512i order = load(by_place);
  Sight sight;
  const std::size_t whole = count & ~(kStep - 1);
  for (std::size_t i = 0; i < whole; i += kStep) {
    __m512i part[4];
    for (std::size_t j = 0; j < 4; ++j) {
      const __m512i bits = load(x + i + j * kLane);
      sight.see(bits, first);
      part[j] = _mm512_permutexvar_epi8(order, _mm512_rol_epi32(bits, 1));
    }
    const __m512i upper01 = _mm512_shuffle_i64x2(part[0], part[1], 0x44);
    const __m512i upper23 = _mm512_shuffle_i64x2(part[2], part[3], 0x44);
    const __m512i lower01 = _mm512_shuffle_i64x2(part[0], part[1], 0xEE);
    const __m512i lower23 = _mm512_shuffle_i64x2(part[2], part[3], 0xEE);
    store(planes[0] + i, _mm512_shuffle_i64x2(upper01, upper23, 0x88));
    store(planes[1] + i, _mm512_shuffle_i64x2(upper01, upper23, 0xDD));
    store(planes[2] + i, _mm512_shuffle_i64x2(lower01, lower23, 0x88));
    store(planes[3] + i, _mm512_shuffle_i64x2(lower01, lower23, 0xDD));
  }
  sight.fold_into(seen);
  std::uint8_t* const rest[4] = {planes[0] + whole, planes[1] + whole, planes[2] + whole, planes[3] + whole};
  kScalarKernels.cut_float32(x + whole, count - whole, first_bits, rest, seen);
}

// ------------------------------------------------------------------------------------------------------- ranks, bit planes

// Looks up each byte of `index` in 256 entries.
struct Table256 {
  __m512i part[4];

  FSL_INLINE explicit Table256(const std::uint8_t* entries)
      : part{load(entries), load(entries + 64), load(entries + 128), load(entries + 192)} {}

  FSL_INLINE __m512i operator()(__m512i index) const {
    const __m512i low = _mm512_permutex2var_epi8(part[0], index, part[1]);
    const __m512i high = _mm512_permutex2var_epi8(part[2], index, part[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high);
  }
};

FSL_INLINE __m512i rotate_left(__m512i codes) {
  return _mm512_ternarylogic_epi32(_mm512_add_epi8(codes, codes), _mm512_srli_epi16(codes, 7), all_bytes(1), 0xF8);
}

FSL_INLINE __m512i rotate_right(__m512i codes) {
  return _mm512_ternarylogic_epi32(_mm512_slli_epi16(codes, 7), _mm512_srli_epi16(codes, 1), all_bytes(0x80), 0xE4);
}

void rank(const std::uint8_t* codes, std::size_t count, bool rotated, int shift, const std::uint8_t* ranks, std::uint8_t* symbols) {
  const std::size_t whole = count & ~(kStep - 1);
  // The sign of rotated codes falls off at the right, so these bits of a code, found six bits wide, decide.
  const int lowest_bit = rotated ? shift - 1 : shift;
  if (lowest_bit >= 2 || (rotated && lowest_bit >= 1)) {
    alignas(64) std::uint8_t entries[64];
    for (int index = 0; index < 64; ++index) {
      const int code = index << lowest_bit & 0xFF;
      entries[index] = ranks[(rotated ? code << 1 & 0xFF : code) >> shift];
    }
    const __m512i table = load(entries);
    const __m128i places = _mm_cvtsi32_si128(lowest_bit);
    for (std::size_t i = 0; i < whole; i += kStep) {
      store(symbols + i, _mm512_permutexvar_epi8(_mm512_srl_epi16(load(codes + i), places), table));
    }
  } else {
    const Table256 table(ranks);
    const __m128i places = _mm_cvtsi32_si128(shift);
    const __m512i kept = all_bytes(0xFF >> shift);
    for (std::size_t i = 0; i < whole; i += kStep) {
      __m512i code = load(codes + i);
      if (rotated) code = rotate_left(code);
      store(symbols + i, table(_mm512_and_si512(_mm512_srl_epi16(code, places), kept)));
    }
  }
  kScalarKernels.rank(codes + whole, count - whole, rotated, shift, ranks, symbols + whole);
}

FSL_INLINE void store_mask(std::uint8_t* to, std::uint64_t mask) { std::memcpy(to, &mask, 8); }

std::size_t write_bit_planes(const std::uint8_t* codes, std::size_t count, bool rotated, int width, std::uint8_t* out) {
  const std::size_t plane_bytes = (count + 7) / 8;
  const std::size_t whole = count & ~(kStep - 1);
  // A plane's last eight bytes may reach into the next plane, which is written later.
  for (int bit = width - 1; bit >= 0; --bit, out += plane_bytes) {
    const __m512i place = all_bytes(1 << (rotated ? (bit + 7) & 7 : bit));
    for (std::size_t i = 0; i < whole; i += kStep) store_mask(out + i / 8, _mm512_test_epi8_mask(load(codes + i), place));
    if (whole < count) {
      const __m512i rest = _mm512_maskz_loadu_epi8(lowest(count - whole), codes + whole);
      store_mask(out + whole / 8, _mm512_test_epi8_mask(rest, place));
    }
  }
  return static_cast<std::size_t>(width) * plane_bytes;
}

// Moves between mask and general registers are slow on some machines (two cycles each way on Zen 4), and compilers like to make them.
// These go through memory, which both can reach, or stay where they are.
FSL_INLINE __mmask64 mask_at(const std::uint8_t* from) {
  __mmask64 mask;
  __asm__("kmovq %1, %0" : "=Yk"(mask) : "m"(*reinterpret_cast<const std::uint8_t(*)[8]>(from)));
  return mask;
}

FSL_INLINE __mmask64 through_memory(std::uint64_t bits) {
  __mmask64 mask;
  __asm__("kmovq %1, %0" : "=Yk"(mask) : "m"(bits));
  return mask;
}

FSL_INLINE __mmask64 inverse(__mmask64 mask) {
  __mmask64 inverted;
  __asm__("knotq %1, %0" : "=Yk"(inverted) : "Yk"(mask));
  return inverted;
}

// --------------------------------------------------------------------------------------------------------------- tree

// How a node's child is handled together with the node. Lists are written and read by passes of their own; bit planes that short need
// none: bits of the symbols of one child are gathered from, or scattered to, the places that the node's bitmap gives (pext, pdep).
enum ChildKind : int { kLeaf = 0, kOnePlane = 1, kTwoPlanes = 2, kList = 3 };

FSL_INLINE ChildKind kind_of(const Node& node) {
  return node.left == 0 && node.planes <= 2 ? static_cast<ChildKind>(node.planes) : kList;
}

// Calls Function<left, right>::run(arguments...) for the kinds of both children.
template <template <int, int> class Function, typename... Arguments>
FSL_INLINE auto for_kinds(ChildKind left, ChildKind right, Arguments&&... arguments) {
  switch (4 * left + right) {
    case 0: return Function<0, 0>::run(arguments...);
    case 1: return Function<0, 1>::run(arguments...);
    case 2: return Function<0, 2>::run(arguments...);
    case 3: return Function<0, 3>::run(arguments...);
    case 4: return Function<1, 0>::run(arguments...);
    case 5: return Function<1, 1>::run(arguments...);
    case 6: return Function<1, 2>::run(arguments...);
    case 7: return Function<1, 3>::run(arguments...);
    case 8: return Function<2, 0>::run(arguments...);
    case 9: return Function<2, 1>::run(arguments...);
    case 10: return Function<2, 2>::run(arguments...);
    case 11: return Function<2, 3>::run(arguments...);
    case 12: return Function<3, 0>::run(arguments...);
    case 13: return Function<3, 1>::run(arguments...);
    case 14: return Function<3, 2>::run(arguments...);
    default: return Function<3, 3>::run(arguments...);
  }
}

// ---------------------------------------------------------------------------------------------------------- tree: writing

// Bits of one or two planes of a child, the second `apart` bytes behind the first, appended some at a time, at most 64.
template <int kPlanes>
struct BitWriter {
  std::uint8_t* to;
  std::size_t apart;
  std::uint64_t pending_first = 0;
  std::uint64_t pending_second = 0;
  std::size_t filled = 0;  // pending bits, below 8

  FSL_INLINE explicit BitWriter(std::uint8_t* planes, std::size_t distance) : to(planes), apart(distance) {}

  FSL_INLINE void append(std::uint64_t first, std::uint64_t second, std::size_t count) {
    const std::size_t total = filled + count;
    std::uint64_t word = pending_first | first << filled;
    store_mask(to, word);
    pending_first = word >> (total & 56);
    if (kPlanes == 2) {
      word = pending_second | second << filled;
      store_mask(to + apart, word);
      pending_second = word >> (total & 56);
    }
    if (__builtin_expect(total >= 64, 0)) {
      pending_first = filled == 0 ? 0 : first >> (64 - filled);
      if (kPlanes == 2) pending_second = filled == 0 ? 0 : second >> (64 - filled);
    }
    to += total / 8;
    filled = total & 7;
  }

  FSL_INLINE void finish() {
    if (kPlanes >= 1) store_mask(to, pending_first);
    if (kPlanes == 2) store_mask(to + apart, pending_second);
  }
};

constexpr std::size_t kPlaneRoom = 2 * kStep;  // behind a plane: words are written, vectors read

struct Partition {
  std::uint8_t* list;  // of the node's symbols; the left child's take their place
  std::size_t count;
  std::uint8_t* stack;  // for the right child's list
  std::uint8_t* bitmap;
  std::uint8_t* left_planes;
  std::uint8_t* right_planes;
  std::size_t apart;  // from the first plane to the second
  std::uint8_t pivot;
  std::uint8_t left_first;
  std::uint8_t right_first;
};

// Writes the bitmap, the planes, and the lists; returns the number of the right child's symbols.
template <int kLeft, int kRight>
struct PartitionAs {
  template <int kKind>
  static FSL_INLINE void append(BitWriter<kKind>& writer, __m512i symbols, __m512i first, std::uint64_t mask, std::size_t count) {
    if (kKind == 0) return;
    const __m512i places = _mm512_sub_epi8(symbols, first);
    const std::uint64_t top = _pext_u64(_mm512_test_epi8_mask(places, all_bytes(kKind)), mask);
    writer.append(top, kKind == 2 ? _pext_u64(_mm512_test_epi8_mask(places, all_bytes(1)), mask) : 0, count);
  }

  static std::size_t run(const Partition& work, Prefetch& prefetch) {
    constexpr int kLeftPlanes = kLeft == kList ? 0 : kLeft;
    constexpr int kRightPlanes = kRight == kList ? 0 : kRight;
    BitWriter<kLeftPlanes> left_writer(work.left_planes, work.apart);
    BitWriter<kRightPlanes> right_writer(work.right_planes, work.apart);
    const __m512i pivots = all_bytes(work.pivot);
    const __m512i left_first = all_bytes(work.left_first);
    const __m512i right_first = all_bytes(work.right_first);
    const std::size_t whole = work.count & ~(kStep - 1);
    const std::uint8_t* const list = work.list;
    std::uint8_t* const bitmap = work.bitmap;
    std::uint8_t* left = work.list;
    std::uint8_t* right = work.stack;
    std::size_t right_count = 0;
    const auto step = [&](std::size_t i, std::uint64_t valid, std::size_t here) __attribute__((always_inline)) {
      const __m512i symbols = load(list + i);
      __mmask64 right_mask = _mm512_cmpge_epu8_mask(symbols, pivots);
      if (here < kStep) right_mask &= valid;
      const std::uint64_t goes_right = right_mask;
      store_mask(bitmap + i / 8, goes_right);
      const std::size_t ones_here = ones(goes_right);
      if (kRight == kList) {
        store(right, _mm512_maskz_compress_epi8(right_mask, symbols));
        right += ones_here;
      }
      if (kLeft == kList) {
        const __mmask64 left_mask = here < kStep ? ~goes_right & valid : inverse(right_mask);
        store(left, _mm512_maskz_compress_epi8(left_mask, symbols));
        left += here - ones_here;
      }
      append(left_writer, symbols, left_first, ~goes_right & valid, here - ones_here);
      append(right_writer, symbols, right_first, goes_right, ones_here);
      right_count += ones_here;
    };
    const char* next = prefetch.next;
    const char* const end = prefetch.end;
    for (std::size_t i = 0; i < whole; i += kStep) {
      step(i, ~std::uint64_t{0}, kStep);
      fetch(next, end);
    }
    prefetch.next = next;
    if (whole < work.count) step(whole, lowest(work.count - whole), work.count - whole);
    left_writer.finish();
    right_writer.finish();
    return right_count;
  }
};

struct TreeWriter {
  const Node* nodes;
  std::uint8_t* out;
  Prefetch prefetch;
  std::uint8_t* planes;  // where planes wait for their turn; those of nodes that wait have different symbols

  void write_flat(const Node& node, const std::uint8_t* list, std::size_t count) {
    const std::size_t bitmap_bytes = (count + 7) / 8;
    const __m512i first = all_bytes(node.first);
    const std::size_t whole = count & ~(kStep - 1);
    for (int bit = node.planes - 1; bit >= 0; --bit, out += bitmap_bytes) {
      const __m512i place = all_bytes(1 << bit);
      for (std::size_t i = 0; i < whole; i += kStep) {
        store_mask(out + i / 8, _mm512_test_epi8_mask(_mm512_sub_epi8(load(list + i), first), place));
      }
      if (whole < count) {
        const std::uint64_t mask = _mm512_test_epi8_mask(_mm512_sub_epi8(load(list + whole), first), place);
        store_mask(out + whole / 8, mask & lowest(count - whole));
      }
    }
  }

  void write_planes(const std::uint8_t* from, std::size_t apart, ChildKind kind, std::size_t count) {
    const std::size_t bytes = (count + 7) / 8;
    for (int plane = 0; plane < kind; ++plane, from += apart, out += bytes) {
      for (std::size_t i = 0; i < bytes; i += kStep) store(out + i, load(from + i));
    }
  }

  // `list` and `stack` lie in two buffers, each free from there on but for the list itself, so that whole vectors may be stored; the
  // right child finds room where `list` was.
  void write(const Node& node, std::uint8_t* list, std::size_t count, std::uint8_t* stack) {
    if (node.left == 0) return write_flat(node, list, count);
    const Node& left = nodes[node.left];
    const Node& right = nodes[node.right];
    const ChildKind left_kind = kind_of(left);
    const ChildKind right_kind = kind_of(right);
    std::uint8_t* const before = planes;
    const std::size_t apart = count / 8 + kPlaneRoom;
    const std::size_t left_room = left_kind == kList ? 0 : static_cast<std::size_t>(left_kind) * apart;
    const Partition work{list, count, stack, out, planes, planes + left_room, apart, static_cast<std::uint8_t>(node.pivot), left.first, right.first};
    const std::size_t right_count = for_kinds<PartitionAs>(left_kind, right_kind, work, prefetch);
    out += (count + 7) / 8;
    if (left_kind != kList) {
      write_planes(work.left_planes, apart, left_kind, count - right_count);
    } else if (right_count < count) {
      if (right_kind == kTwoPlanes) planes += apart;
      if (right_kind == kOnePlane || right_kind == kTwoPlanes) planes += right_count / 8 + kPlaneRoom;
      write(left, list, count - right_count, right_kind == kList ? stack + right_count : stack);
    }
    planes = before;
    if (right_kind != kList) {
      write_planes(work.right_planes, apart, right_kind, right_count);
    } else if (right_count > 0) {
      write(right, stack, right_count, list);
    }
  }
};

std::size_t write_tree(const Node* nodes, std::uint8_t* symbols, std::size_t count, std::uint8_t* scratch, std::uint8_t* out,
                       Prefetch& prefetch) {
  // Planes that wait take a bit for each symbol of their node, at most twice, and at most twelve nodes, all on one path, wait.
  std::uint8_t planes[26 * (kBlockValues / 8 + kPlaneRoom)];
  TreeWriter writer{nodes, out, prefetch, planes};
  if (count > 0) writer.write(nodes[0], symbols, count, scratch);
  prefetch = writer.prefetch;
  return static_cast<std::size_t>(writer.out - out);
}

// ---------------------------------------------------------------------------------------------------------- tree: reading

FSL_INLINE std::uint64_t load_mask(const std::uint8_t* from) {
  std::uint64_t mask;
  std::memcpy(&mask, from, 8);
  return mask;
}

// The last bits of a bitmap, count < 64, none of the bytes behind it touched.
FSL_INLINE std::uint64_t load_rest(const std::uint8_t* from, std::size_t count) {
  std::uint64_t mask = 0;
  std::memcpy(&mask, from, (count + 7) / 8);
  return mask & lowest(count);
}

struct Child {
  const std::uint8_t* list;
  const std::uint8_t* planes;
  std::size_t plane_bytes;
  std::uint8_t first;
};

struct Merge {
  const std::uint8_t* bitmap;
  std::size_t count;
  std::uint8_t* list;
  Child child[2];
};

// `count` bits from bit `at` on, and what follows them.
FSL_INLINE std::uint64_t bits_from(const std::uint8_t* plane, std::size_t at, std::size_t count) {
  const std::size_t skipped = at & 7;
  std::uint64_t bits = load_mask(plane + at / 8) >> skipped;
  if (__builtin_expect(skipped + count > 64, 0)) bits |= static_cast<std::uint64_t>(plane[at / 8 + 8]) << (64 - skipped);
  return bits;
}

// Writes the symbols of a node from those of its children.
template <int kLeft, int kRight>
struct MergeAs {
  // What the child's symbols are where the mask has ones, without its planes; zero elsewhere.
  template <int kKind>
  static FSL_INLINE __m512i base(const std::uint8_t* list, __m512i first, std::uint64_t mask) {
    return kKind == kList ? _mm512_maskz_expand_epi8(mask, load(list)) : _mm512_maskz_mov_epi8(mask, first);
  }

  template <int kKind>
  static FSL_INLINE __m512i with_planes(__m512i symbols, const Child& child, std::size_t at, std::uint64_t mask, std::size_t count) {
    if (kKind == kOnePlane || kKind == kTwoPlanes) {
      const std::uint64_t bits = bits_from(child.planes, at, count);
      symbols = _mm512_mask_add_epi8(symbols, through_memory(_pdep_u64(bits, mask)), symbols, all_bytes(kKind));
    }
    if (kKind == kTwoPlanes) {
      const std::uint64_t bits = bits_from(child.planes + child.plane_bytes, at, count);
      symbols = _mm512_mask_add_epi8(symbols, through_memory(_pdep_u64(bits, mask)), symbols, all_bytes(1));
    }
    return symbols;
  }

  // Not inlined: sixteen such loops in one function leave none of them enough registers.
  static __attribute__((noinline)) void run(const Merge& work, Prefetch& prefetch) {
    const Child left = work.child[0];
    const Child right = work.child[1];
    const __m512i left_first = all_bytes(left.first);
    const __m512i right_first = all_bytes(right.first);
    const std::uint8_t* const bitmap = work.bitmap;
    const std::size_t whole = work.count & ~(kStep - 1);
    std::size_t left_at = 0;
    std::size_t right_at = 0;
    const auto step = [&](std::size_t i, std::uint64_t goes_right, __mmask64 right_mask, std::size_t here) __attribute__((always_inline)) {
      // The last step's left mask has too many bits: what they bring is never looked at.
      const std::size_t ones_here = ones(goes_right);
      __m512i symbols;
      if (kLeft != kList && kRight != kList) {
        symbols = _mm512_mask_blend_epi8(right_mask, left_first, right_first);
      } else {
        symbols = _mm512_or_si512(base<kLeft>(kLeft == kList ? left.list + left_at : nullptr, left_first, inverse(right_mask)),
                                  base<kRight>(kRight == kList ? right.list + right_at : nullptr, right_first, right_mask));
      }
      symbols = with_planes<kLeft>(symbols, left, left_at, ~goes_right, here - ones_here);
      symbols = with_planes<kRight>(symbols, right, right_at, goes_right, ones_here);
      left_at += kStep - ones_here;
      right_at += ones_here;
      store(work.list + i, symbols);
    };
    const char* next = prefetch.next;
    const char* const end = prefetch.end;
    for (std::size_t i = 0; i < whole; i += kStep) {
      step(i, load_mask(bitmap + i / 8), mask_at(bitmap + i / 8), kStep);
      fetch(next, end);
      fetch(next, end);
    }
    prefetch.next = next;
    if (whole < work.count) {
      const std::uint64_t rest = load_rest(bitmap + whole / 8, work.count - whole);
      step(whole, rest, rest, work.count - whole);
    }
  }
};

struct TreeReader {
  const Node* nodes;
  const std::uint8_t* in;
  const std::uint8_t* end;
  Prefetch prefetch;
  std::uint8_t copies[2][kBlockValues / 4 + kSlackBytes];

  // Bits set among the first `count`.
  static FSL_INLINE std::size_t count_ones(const std::uint8_t* bitmap, std::size_t count) {
    __m512i sums = _mm512_setzero_si512();
    std::size_t i = 0;
    for (; i + 512 <= count; i += 512) sums = _mm512_add_epi64(sums, _mm512_popcnt_epi64(load(bitmap + i / 8)));
    if (i < count) {
      const std::size_t rest = (count - i + 7) / 8;
      __m512i last = _mm512_maskz_loadu_epi8(~std::uint64_t{0} >> (kStep - rest), bitmap + i / 8);
      const std::size_t spare = rest * 8 - (count - i);
      const __m512i cut = _mm512_maskz_set1_epi8(std::uint64_t{1} << (rest - 1), static_cast<char>(0xFF00 >> spare & 0xFF));
      last = spare == 0 ? last : _mm512_andnot_si512(cut, last);
      sums = _mm512_add_epi64(sums, _mm512_popcnt_epi64(last));
    }
    return static_cast<std::size_t>(_mm512_reduce_add_epi64(sums));
  }

  bool read_flat(const Node& node, std::size_t count, std::uint8_t* list) {
    const std::size_t bitmap_bytes = (count + 7) / 8;
    if (static_cast<std::size_t>(end - in) < node.planes * bitmap_bytes) return false;
    const std::size_t whole = count & ~(kStep - 1);
    const __m512i first = all_bytes(node.first);
    const int planes = node.planes;
    for (std::size_t i = 0; i < whole; i += kStep) {
      __m512i symbols = first;
      for (int plane = 0; plane < planes; ++plane) {
        const std::uint64_t mask = load_mask(in + static_cast<std::size_t>(plane) * bitmap_bytes + i / 8);
        symbols = _mm512_mask_add_epi8(symbols, mask, symbols, all_bytes(1 << (planes - 1 - plane)));
      }
      store(list + i, symbols);
    }
    if (whole < count) {
      __m512i symbols = first;
      for (int plane = 0; plane < planes; ++plane) {
        const std::uint64_t mask = load_rest(in + static_cast<std::size_t>(plane) * bitmap_bytes + whole / 8, count - whole);
        symbols = _mm512_mask_add_epi8(symbols, mask, symbols, all_bytes(1 << (planes - 1 - plane)));
      }
      store(list + whole, symbols);
    }
    in += static_cast<std::size_t>(planes) * bitmap_bytes;
    return true;
  }

  // Bytes of planes may be read in words only while the end is not near; else they are read from a copy with room behind.
  const std::uint8_t* roomy(const std::uint8_t* from, std::size_t bytes, std::uint8_t* copy) const {
    if (static_cast<std::size_t>(end - from) >= bytes + 16) return from;
    std::memcpy(copy, from, bytes);
    return copy;
  }

  // Writes the node's symbols to `list`; children write theirs to the same places of `other`. False when bytes are missing.
  bool read(const Node& node, std::size_t count, std::uint8_t* list, std::uint8_t* other) {
    if (node.left == 0) return read_flat(node, count, list);
    const std::size_t bitmap_bytes = (count + 7) / 8;
    if (static_cast<std::size_t>(end - in) < bitmap_bytes) return false;
    const Node* const children[2] = {&nodes[node.left], &nodes[node.right]};
    const ChildKind kinds[2] = {kind_of(*children[0]), kind_of(*children[1])};
    Merge work{in, count, list, {}};
    in += bitmap_bytes;
    std::size_t counts[2] = {0, 0};
    if (kinds[0] != kLeaf || kinds[1] != kLeaf) {
      counts[1] = count_ones(work.bitmap, count);
      counts[0] = count - counts[1];
    }
    std::uint8_t* place = other;
    std::uint8_t* place_of_children = list;
    for (int side = 0; side < 2; ++side) {
      Child& child = work.child[side];
      child.first = children[side]->first;
      if (kinds[side] == kList) {
        child.list = place;
        if (counts[side] > 0 && !read(*children[side], counts[side], place, place_of_children)) return false;
        place += counts[side];
        place_of_children += counts[side];
      } else {
        child.plane_bytes = (counts[side] + 7) / 8;
        const std::size_t bytes = static_cast<std::size_t>(kinds[side]) * child.plane_bytes;
        if (static_cast<std::size_t>(end - in) < bytes) return false;
        child.planes = in;
        in += bytes;
      }
    }
    for (int side = 0; side < 2; ++side) {
      if (kinds[side] == kList) continue;
      Child& child = work.child[side];
      child.planes = roomy(child.planes, static_cast<std::size_t>(kinds[side]) * child.plane_bytes, copies[side]);
    }
    for_kinds<MergeAs>(kinds[0], kinds[1], work, prefetch);
    return true;
  }
};

std::size_t read_tree(const Node* nodes, const std::uint8_t* in, const std::uint8_t* end, std::size_t count, std::uint8_t* scratch,
                      std::uint8_t* symbols, Prefetch& prefetch) {
  TreeReader reader;
  reader.nodes = nodes;
  reader.in = in;
  reader.end = end;
  reader.prefetch = prefetch;
  if (count > 0 && !reader.read(nodes[0], count, symbols, scratch)) return SIZE_MAX;
  prefetch = reader.prefetch;
  return static_cast<std::size_t>(reader.in - in);
}

// kSmall: ranks are below 64. The table's entries and the planes' bits go straight to where a rotation takes them.
template <bool kSmall, int kWidth>
FSL_INLINE void join_as(const std::uint8_t* symbols, const std::uint8_t* entries, const std::uint8_t* in, std::size_t count,
                        bool rotated, int any_width, std::uint8_t* codes) {
  const int width = kWidth >= 0 ? kWidth : any_width;
  const std::size_t plane_bytes = (count + 7) / 8;
  const Table256 table(entries);
  const std::size_t whole = count & ~(kStep - 1);
  __m512i places[8];
  for (int plane = 0; plane < width; ++plane) {
    const int bit = width - 1 - plane;
    places[plane] = all_bytes(1 << (rotated ? (bit + 7) & 7 : bit));
  }
  for (std::size_t i = 0; i <= whole; i += kStep) {
    if (i == count) break;
    __m512i code = _mm512_setzero_si512();
    if (symbols != nullptr) {
      code = load(symbols + i);
      code = kSmall ? _mm512_permutexvar_epi8(code, table.part[0]) : table(code);
    }
    for (int plane = 0; plane < width; ++plane) {
      const std::uint8_t* const from = in + static_cast<std::size_t>(plane) * plane_bytes + i / 8;
      const std::uint64_t mask = i < whole ? load_mask(from) : load_rest(from, count - whole);
      code = _mm512_mask_add_epi8(code, mask, code, places[plane]);
    }
    store(codes + i, code);
  }
}

void join(const std::uint8_t* symbols, const std::uint8_t* symbol_of_rank, const std::uint8_t* in, std::size_t count, bool rotated,
          int width, std::uint8_t* codes) {
  alignas(64) std::uint8_t entries[256] = {};
  const __m512i kept = all_bytes(0xFF << width);
  for (std::size_t i = 0; i < 256 && symbols != nullptr; i += kStep) {
    const __m512i upper = _mm512_and_si512(_mm512_sll_epi16(load(symbol_of_rank + i), _mm_cvtsi32_si128(width)), kept);
    store(entries + i, rotated ? rotate_right(upper) : upper);
  }
  if (width == 3) {
    join_as<true, 3>(symbols, entries, in, count, rotated, width, codes);
  } else if (width == 2) {
    join_as<true, 2>(symbols, entries, in, count, rotated, width, codes);
  } else if (width > 3) {
    join_as<true, -1>(symbols, entries, in, count, rotated, width, codes);
  } else {
    join_as<false, -1>(symbols, entries, in, count, rotated, width, codes);
  }
}

// ------------------------------------------------------------------------------------------------------------ output values

// Puts vectors of values to their places, in order from 0 on, 16 at a time.
template <Sink kSink, bool kAligned>
struct Writer {
  float* out;
  const float* source;
  __m512 weight;
  // Non-temporal stores to places that are no multiple of 64 bytes: each is made of two vectors.
  std::size_t lead = 0;
  __m512i index = _mm512_setzero_si512();
  __m512 carry = _mm512_setzero_ps();

  FSL_INLINE explicit Writer(const Output& output)
      : out(static_cast<float*>(output.out)), source(output.source), weight(_mm512_set1_ps(output.weight)) {
    if (kSink == Sink::kStream && !kAligned) {
      lead = (64 - (reinterpret_cast<std::uintptr_t>(out) & 63)) / 4;
      index = _mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), all(static_cast<int>(lead)));
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
          _mm512_mask_storeu_ps(out, static_cast<__mmask16>((1U << lead) - 1), value);
        } else {
          _mm512_stream_ps(out + i + lead - kLane, _mm512_permutex2var_ps(carry, index, value));
        }
        carry = value;
      }
    } else if (kSink == Sink::kAccumulate) {
      _mm512_storeu_ps(out + i, _mm512_add_ps(_mm512_loadu_ps(out + i), _mm512_mul_ps(value, weight)));
    } else if (kSink == Sink::kBfloat16) {
      const __m512i bits = _mm512_castps_si512(value);
      const __m512i ties = _mm512_and_si512(_mm512_srli_epi32(bits, 16), all(1));
      __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, all(0x7FFF)), ties), 16);
      const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
      rounded = _mm512_mask_or_epi32(rounded, nan, _mm512_srli_epi32(bits, 16), all(0x40));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<std::uint16_t*>(out) + i), _mm512_cvtepi32_epi16(rounded));
    } else {
      _mm512_storeu_ps(out + i, _mm512_sub_ps(_mm512_loadu_ps(source + i), value));
    }
  }

  // After the last whole vector; `count` values were put.
  FSL_INLINE void finish(std::size_t count) const {
    if (kSink == Sink::kStream && !kAligned && count > 0) {
      _mm512_mask_storeu_ps(out + count - kLane, static_cast<__mmask16>(0xFFFFU << lead), carry);
    }
  }
};

// The same output, `count` values further.
Output further(const Output& output, std::size_t count) {
  Output rest = output;
  rest.out = output.sink == Sink::kBfloat16 ? static_cast<void*>(static_cast<std::uint16_t*>(output.out) + count)
                                            : static_cast<void*>(static_cast<float*>(output.out) + count);
  if (output.source != nullptr) rest.source = output.source + count;
  return rest;
}

// Calls work(writer) with the writer of the sink.
template <typename Work>
FSL_INLINE void with_writer(const Output& output, Work work) {
  switch (output.sink) {
    case Sink::kStore:
      return work(Writer<Sink::kStore, true>(output));
    case Sink::kStream:
      if ((reinterpret_cast<std::uintptr_t>(output.out) & 63) == 0) return work(Writer<Sink::kStream, true>(output));
      return work(Writer<Sink::kStream, false>(output));
    case Sink::kAccumulate:
      return work(Writer<Sink::kAccumulate, true>(output));
    case Sink::kBfloat16:
      return work(Writer<Sink::kBfloat16, true>(output));
    case Sink::kResidual:
      return work(Writer<Sink::kResidual, true>(output));
  }
}

// Bytes 0 to 31 into the low halves of the 128-bit lanes, so that unpacking keeps their order.
FSL_INLINE __m512i spread(__m512i bytes) {
  return _mm512_permutexvar_epi64(_mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), bytes);
}

// Both formats become fp16 numbers by moving bits, e4m3 too small by 2^8; the factor of the run makes up for that.
template <int kMantissaBits, typename Put>
FSL_INLINE __m512i dequantise_runs(const std::uint8_t* codes, std::size_t count, const float* factors, int block_shift, Put& put) {
  const __m512i zero = _mm512_setzero_si512();
  const __m512i magnitudes = all_bytes(0x7F);
  __m512i largest = zero;
  for (std::size_t i = 0; i < count; i += kStep) {
    const __m512i code = load(codes + i);
    largest = _mm512_max_epu8(largest, _mm512_and_si512(code, magnitudes));
    const __m512i spread_code = spread(code);
    __m512i half[2] = {_mm512_unpacklo_epi8(zero, spread_code), _mm512_unpackhi_epi8(zero, spread_code)};
    for (std::size_t j = 0; j < 2; ++j) {
      if (kMantissaBits == 3) half[j] = _mm512_and_si512(_mm512_srai_epi16(half[j], 1), _mm512_set1_epi16(static_cast<short>(0xBFFF)));
      const std::size_t place = i + 32 * j;
      put.put(place, _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(half[j])), _mm512_set1_ps(factors[place >> block_shift])));
      put.put(place + kLane, _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half[j], 1)),
                                           _mm512_set1_ps(factors[(place + kLane) >> block_shift])));
    }
  }
  put.finish(count);
  return largest;
}

bool dequantise_float8(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t count, const Float8& format,
                       std::size_t block_values, const Output& output, Prefetch& prefetch) {
  alignas(64) float factors[kBlockValues / 16 + kLane];
  const int block_shift = log2_of(block_values);
  const std::size_t whole = count & ~(kStep - 1);
  const std::size_t runs = (whole + block_values - 1) >> block_shift;
  const __m512i offset = all(format.mantissa_bits == 3 ? 8 : 0);
  const __m512i lowest_scale = all(format.lowest_scale);
  const __m512i highest_scale = all(254 - format.largest_exponent);
  bool usual = true;
  for (std::size_t run = 0; run < runs; run += kLane) {
    const __m512i scale = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + run)));
    const __mmask16 valid = runs - run < kLane ? static_cast<__mmask16>((1U << (runs - run)) - 1) : static_cast<__mmask16>(0xFFFF);
    store(factors + run, _mm512_slli_epi32(_mm512_add_epi32(scale, offset), 23));
    usual &= (_mm512_mask_cmplt_epu32_mask(valid, scale, lowest_scale) | _mm512_mask_cmpgt_epu32_mask(valid, scale, highest_scale)) == 0;
  }
  // With the highest scale of all a finite code may still be infinite.
  if (!usual) return kScalarKernels.dequantise_float8(codes, scales, count, format, block_values, output, prefetch);
  __m512i largest = _mm512_setzero_si512();
  with_writer(output, [&](auto writer) __attribute__((always_inline)) {
    largest = format.mantissa_bits == 3 ? dequantise_runs<3>(codes, whole, factors, block_shift, writer)
                                        : dequantise_runs<2>(codes, whole, factors, block_shift, writer);
  });
  bool finite = _mm512_cmpge_epu8_mask(largest, all_bytes(format.special_code)) == 0;
  if (whole < count) {
    // What is left begins a run or lies within one.
    finite &= kScalarKernels.dequantise_float8(codes + whole, scales + whole / block_values, count - whole, format, block_values,
                                               further(output, whole), prefetch);
  }
  return finite;
}

bool dequantise_uniform(const std::uint8_t* codes, const std::int16_t* steps, const std::uint8_t* escapes, std::size_t count,
                        std::size_t block_values, const Output& output, Prefetch& prefetch) {
  alignas(64) float factors[kBlockValues / 16 + kLane];
  const int block_shift = log2_of(block_values);
  const std::size_t whole = count & ~(kStep - 1);
  const std::size_t runs = (whole + block_values - 1) >> block_shift;
  for (std::size_t run = 0; run < runs; run += kLane) {
    const __m512i step = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(steps + run)));
    store(factors + run, quarter_powers(step));
  }
  __m512i largest = _mm512_setzero_si512();
  with_writer(output, [&](auto writer) __attribute__((always_inline)) {
    for (std::size_t i = 0; i < whole; i += kStep) {
      const __m512i code = load(codes + i);
      const std::uint64_t escaped = _mm512_testn_epi8_mask(code, code);
      const __m512i centred = _mm512_xor_si512(code, all_bytes(0x80));
      for (std::size_t j = 0; j < 4; ++j) {
        const std::size_t place = i + j * kLane;
        __m128i part = _mm512_castsi512_si128(centred);
        if (j == 1) part = _mm512_extracti64x2_epi64(centred, 1);
        if (j == 2) part = _mm512_extracti64x2_epi64(centred, 2);
        if (j == 3) part = _mm512_extracti64x2_epi64(centred, 3);
        __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(part)), _mm512_set1_ps(factors[place >> block_shift]));
        if (escaped != 0) {
          const __mmask16 here = static_cast<__mmask16>(escaped >> (j * kLane));
          const std::size_t number = ones(here);
          const __m512i listed = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(lowest(number)), escapes);
          largest = _mm512_max_epu32(largest, magnitude_of(listed));
          value = _mm512_mask_expand_ps(value, here, _mm512_castsi512_ps(listed));
          escapes += 4 * number;
        }
        writer.put(place, value);
      }
    }
    writer.finish(whole);
  });
  bool finite = _mm512_reduce_max_epu32(largest) < 0x7F800000;
  if (whole < count) {
    finite &= kScalarKernels.dequantise_uniform(codes + whole, steps + whole / block_values, escapes, count - whole, block_values,
                                                further(output, whole), prefetch);
  }
  return finite;
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
      const __m512i rotated = _mm512_or_si512(_mm512_slli_epi32(exponent, 8), widened(planes[1] + i));
      largest = _mm512_max_epu32(largest, exponent);
      // Bit 0 is the sign; the others stand one place too high.
      const __m512i bits = _mm512_or_si512(_mm512_slli_epi32(_mm512_srli_epi32(rotated, 1), 16), _mm512_slli_epi32(rotated, 31));
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

void join_float32(const std::uint8_t* const planes[4], std::size_t count, const Output& output, Seen& seen) {
  const std::size_t whole = count & ~(kLane - 1);
  Sight sight;
  with_writer(output, [&](auto writer) __attribute__((always_inline)) {
    for (std::size_t i = 0; i < whole; i += kLane) {
      const __m512i upper = _mm512_or_si512(_mm512_slli_epi32(widened(planes[0] + i), 8), widened(planes[1] + i));
      const __m512i lower = _mm512_or_si512(_mm512_slli_epi32(widened(planes[2] + i), 8), widened(planes[3] + i));
      const __m512i bits = _mm512_ror_epi32(_mm512_or_si512(_mm512_slli_epi32(upper, 16), lower), 1);
      sight.see(bits, _mm512_setzero_si512());
      writer.put(i, _mm512_castsi512_ps(bits));
    }
    writer.finish(whole);
  });
  sight.fold_into(seen);
  if (whole < count) {
    const std::uint8_t* const rest[4] = {planes[0] + whole, planes[1] + whole, planes[2] + whole, planes[3] + whole};
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
  if (whole < count) kScalarKernels.copy_float32(bytes + 4 * whole, count - whole, further(output, whole), seen);
}

// ------------------------------------------------------------------------------------------------------------------ bytes

// A mask of the bytes of a step that are there.
FSL_INLINE __mmask64 there(std::size_t left) { return left < kStep ? lowest(left) : ~std::uint64_t{0}; }

std::uint8_t largest_byte(const std::uint8_t* bytes, std::size_t count, std::uint8_t mask) {
  __m512i largest = _mm512_setzero_si512();
  const __m512i masks = all_bytes(mask);
  for (std::size_t i = 0; i < count; i += kStep) {
    const __m512i some = _mm512_maskz_loadu_epi8(there(count - i), bytes + i);
    largest = _mm512_max_epu8(largest, _mm512_and_si512(some, masks));
  }
  alignas(64) std::uint8_t lanes[kStep];
  store(lanes, largest);
  return kScalarKernels.largest_byte(lanes, kStep, mask);
}

std::size_t count_byte(const std::uint8_t* bytes, std::size_t count, std::uint8_t byte) {
  std::size_t found = 0;
  const __m512i wanted = all_bytes(byte);
  for (std::size_t i = 0; i < count; i += kStep) {
    const __mmask64 valid = there(count - i);
    found += ones(_mm512_mask_cmpeq_epi8_mask(valid, _mm512_maskz_loadu_epi8(valid, bytes + i), wanted));
  }
  return found;
}

std::size_t find_byte(const std::uint8_t* bytes, std::size_t count, std::uint8_t byte, std::uint16_t* positions) {
  std::size_t found = 0;
  const __m512i wanted = all_bytes(byte);
  const auto note = [&](std::size_t i, std::uint64_t mask) __attribute__((always_inline)) {
    for (; mask != 0; mask &= mask - 1) positions[found++] = static_cast<std::uint16_t>(i + static_cast<std::size_t>(_tzcnt_u64(mask)));
  };
  std::size_t i = 0;
  for (; i + 2 * kStep <= count; i += 2 * kStep) {
    const __mmask64 first = _mm512_cmpeq_epi8_mask(load(bytes + i), wanted);
    const __mmask64 second = _mm512_cmpeq_epi8_mask(load(bytes + i + kStep), wanted);
    if (__builtin_expect(_kortestz_mask64_u8(first, second), 1)) continue;
    note(i, first);
    note(i + kStep, second);
  }
  for (; i < count; i += kStep) {
    const __mmask64 valid = there(count - i);
    note(i, _mm512_mask_cmpeq_epi8_mask(valid, _mm512_maskz_loadu_epi8(valid, bytes + i), wanted));
  }
  return found;
}

// ------------------------------------------------------------------------------------------------------------------- CRC

// Folding by carry-less multiplication (Gopal et al. 2009): what stands `bits` further on in the message counts as its product with
// x^(bits +- 32) modulo the polynomial. What is left, 16 bytes of the same remainder, goes through the tables.
constexpr std::uint64_t folding_constant(int power) {
  std::uint32_t remainder = 0x80000000;  // x^0, lowest power in the highest bit
  for (int i = 0; i < power; ++i) remainder = remainder >> 1 ^ ((remainder & 1) != 0 ? 0xEDB88320U : 0U);
  return static_cast<std::uint64_t>(remainder) << 1;
}

template <int kBits>
FSL_INLINE __m512i fold(__m512i value, __m512i data) {
  constexpr long long kLow = static_cast<long long>(folding_constant(kBits + 32));
  constexpr long long kHigh = static_cast<long long>(folding_constant(kBits - 32));
  const __m512i constants = _mm512_set_epi64(kHigh, kLow, kHigh, kLow, kHigh, kLow, kHigh, kLow);
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(value, constants, 0x00), _mm512_clmulepi64_epi128(value, constants, 0x11),
                                   data, 0x96);
}

FSL_INLINE __m128i fold_once(__m128i value, __m128i data) {
  constexpr long long kLow = static_cast<long long>(folding_constant(128 + 32));
  constexpr long long kHigh = static_cast<long long>(folding_constant(128 - 32));
  const __m128i constants = _mm_set_epi64x(kHigh, kLow);
  const __m128i product = _mm_xor_si128(_mm_clmulepi64_si128(value, constants, 0x00), _mm_clmulepi64_si128(value, constants, 0x11));
  return _mm_xor_si128(product, data);
}

std::uint32_t crc32(std::uint32_t value, const std::uint8_t* data, std::size_t count) {
  if (count < 512) return kScalarKernels.crc32(value, data, count);
  __m512i sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = load(data + 64 * i);
  sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~value))));
  data += 256;
  count -= 256;
  for (; count >= 256; data += 256, count -= 256) {
    for (int i = 0; i < 4; ++i) sums[i] = fold<2048>(sums[i], load(data + 64 * i));
  }
  __m512i sum = fold<512>(fold<512>(fold<512>(sums[0], sums[1]), sums[2]), sums[3]);
  for (; count >= 64; data += 64, count -= 64) sum = fold<512>(sum, load(data));
  __m128i last = fold_once(_mm512_castsi512_si128(sum), _mm512_extracti64x2_epi64(sum, 1));
  last = fold_once(fold_once(last, _mm512_extracti64x2_epi64(sum, 2)), _mm512_extracti64x2_epi64(sum, 3));
  std::uint8_t bytes[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), last);
  // The tables start from the complement of their first argument: here from 0.
  return kScalarKernels.crc32(kScalarKernels.crc32(0xFFFFFFFF, bytes, 16), data, count);
}

}  // namespace

const Kernels kAvx512Kernels = {
    combine,          look, quantise_float8, quantise_uniform,  cut_bfloat16,       cut_float32,   rank,
    write_bit_planes, write_tree,            read_tree,         join,               dequantise_float8, dequantise_uniform,
    join_bfloat16,    join_float32,          copy_float32,      largest_byte,       count_byte,     find_byte,     crc32,
    Path::kAvx512,
};

}  // namespace fsl

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // FSL_X86_KERNELS
