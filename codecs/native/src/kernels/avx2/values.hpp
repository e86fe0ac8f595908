// AVX2: symbols and bit planes to codes, codes to values. For avx2/kernels.cpp only, which sets the
// target and includes plain/kernels.hpp for it.
#pragma once

#include "kernels/avx2/base.hpp"
#include "kernels/avx2/input.hpp"
#include "kernels/avx2/planes.hpp"

namespace fsl {
namespace {

// Symbols, or none, above `kWidth` bit planes, rotated right by one bit or not.
template <int kWidth, bool kRotated>
void join_planes(const std::uint8_t* symbols, const std::uint8_t* in, std::size_t plane_bytes,
                 std::size_t count, std::uint8_t* codes) {
  // Bits go directly to their rotated places, except a symbol's lowest bit if no plane is below it.
  constexpr bool kWraps = kRotated && kWidth == 0;
  constexpr int kUp = kRotated && !kWraps ? kWidth - 1 : kWidth;
  const auto step = [=](std::size_t i, auto mask_at) __attribute__((always_inline)) {
    __m256i code = _mm256_setzero_si256();
    if (symbols != nullptr) {
      code = _mm256_slli_epi16(load(symbols + i),
                               kUp);  // no bits leave a byte: symbols are of 8 - kWidth bits
      if (kWraps) code = rotate_right(code);
    }
#pragma GCC unroll 8
    for (int plane = 0; plane < kWidth; ++plane) {
      const int bit = kWidth - 1 - plane;
      const __m256i ones =
          spread_bits(mask_at(in + static_cast<std::size_t>(plane) * plane_bytes + i / 8));
      code = _mm256_or_si256(
          code, _mm256_and_si256(ones, all_bytes(1 << (kRotated ? (bit + 7) & 7 : bit))));
    }
    store(codes + i, code);
  };
  const std::size_t whole = count & ~(kStep - 1);
  for (std::size_t i = 0; i < whole; i += kStep) {
    step(i,
         [](const std::uint8_t* from) __attribute__((always_inline)) { return load_mask(from); });
  }
  if (whole < count) {
    step(whole, [=](const std::uint8_t* from)
                    __attribute__((always_inline)) { return load_rest(from, count - whole); });
  }
}

void join(const std::uint8_t* symbols, const std::uint8_t* in, std::size_t plane_bytes,
          std::size_t count, bool rotated, int width, std::uint8_t* codes) {
  for_planes(width, [=](auto plane_count) {
    constexpr int kWidth = plane_count();
    rotated ? join_planes<kWidth, true>(symbols, in, plane_bytes, count, codes)
            : join_planes<kWidth, false>(symbols, in, plane_bytes, count, codes);
  });
}

// --- output values

// Writes vectors of 8 values to their places, in order.
template <Sink kSink, bool kAligned>
struct Writer {
  float* out;
  const float* source;
  __m256 weight;

  FSL_INLINE explicit Writer(const Output& output)
      : out(static_cast<float*>(output.out)),
        source(output.source),
        weight(_mm256_set1_ps(output.weight)) {}

  FSL_INLINE void put(std::size_t i, __m256 value) const {
    if (kSink == Sink::kStore) {
      _mm256_storeu_ps(out + i, value);
    } else if (kSink == Sink::kStream) {
      if (kAligned) {
        _mm256_stream_ps(out + i, value);
      } else {
        _mm_stream_ps(out + i, _mm256_castps256_ps128(value));
        _mm_stream_ps(out + i + 4, _mm256_extractf128_ps(value, 1));
      }
    } else if (kSink == Sink::kAccumulate) {
      _mm256_storeu_ps(out + i,
                       _mm256_add_ps(_mm256_loadu_ps(out + i), _mm256_mul_ps(value, weight)));
    } else if (kSink == Sink::kBfloat16) {
      // The values are finite.
      const __m256i bits = _mm256_castps_si256(value);
      const __m256i ties = _mm256_and_si256(_mm256_srli_epi32(bits, 16), all(1));
      const __m256i rounded =
          _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, all(0x7FFF)), ties), 16);
      const __m128i words =
          _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(reinterpret_cast<std::uint16_t*>(out) + i),
                       words);
    } else {
      _mm256_storeu_ps(out + i, _mm256_sub_ps(_mm256_loadu_ps(source + i), value));
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

// Calls work(writer) with the sink's writer. Non-temporal stores need aligned places.
template <typename Work>
FSL_INLINE void with_writer(const Output& output, Work work) {
  const std::uintptr_t place = reinterpret_cast<std::uintptr_t>(output.out);
  switch (output.sink) {
    case Sink::kStream:
      if (place % 32 == 0) return work(Writer<Sink::kStream, true>(output));
      if (place % 16 == 0) return work(Writer<Sink::kStream, false>(output));
      [[fallthrough]];
    case Sink::kStore:
      return work(Writer<Sink::kStore, true>(output));
    case Sink::kAccumulate:
      return work(Writer<Sink::kAccumulate, true>(output));
    case Sink::kBfloat16:
      return work(Writer<Sink::kBfloat16, true>(output));
    case Sink::kResidual:
      return work(Writer<Sink::kResidual, true>(output));
  }
}

// Both formats become fp16 by moving bits. e4m3 is then too small by 2^8, which the run's factor
// corrects.
template <int kMantissaBits, typename Put>
FSL_INLINE void dequantise_runs(const std::uint8_t* codes, const std::uint8_t* scales,
                                std::size_t count, std::size_t block_values, Put put) {
  for (std::size_t start = 0; start < count; start += block_values) {
    const int scale = *scales++ + (kMantissaBits == 3 ? 8 : 0);
    const __m256 factor = _mm256_castsi256_ps(all(scale << 23));
    const std::size_t end = count - start < block_values ? count : start + block_values;
    for (std::size_t i = start; i < end; i += 16) {
      const __m128i code = load_half(codes + i);
      __m128i low = _mm_unpacklo_epi8(_mm_setzero_si128(), code);
      __m128i high = _mm_unpackhi_epi8(_mm_setzero_si128(), code);
      if (kMantissaBits == 3) {
        low = _mm_and_si128(_mm_srai_epi16(low, 1), _mm_set1_epi16(static_cast<short>(0xBFFF)));
        high = _mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16(static_cast<short>(0xBFFF)));
      }
      put.put(i, _mm256_mul_ps(_mm256_cvtph_ps(low), factor));
      put.put(i + kLane, _mm256_mul_ps(_mm256_cvtph_ps(high), factor));
    }
  }
}

void dequantise_float8(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t count,
                       const Float8& format, std::size_t block_values, const Output& output) {
  const std::size_t whole = count & ~std::size_t{15};
  const std::size_t runs = (count + block_values - 1) / block_values;
  std::uint8_t smallest = 0xFF;
  std::uint8_t highest = 0;
  for (std::size_t run = 0; run < runs; ++run) {
    smallest = scales[run] < smallest ? scales[run] : smallest;
    highest = scales[run] > highest ? scales[run] : highest;
  }
  // Beyond these, a run's factor would not be a normal number.
  if (smallest < format.lowest_scale || highest > 254 - format.largest_exponent) {
    return plain::dequantise_float8(codes, scales, count, format, block_values, output);
  }
  with_writer(output, [&](auto writer) __attribute__((always_inline)) {
    format.mantissa_bits == 3 ? dequantise_runs<3>(codes, scales, whole, block_values, writer)
                              : dequantise_runs<2>(codes, scales, whole, block_values, writer);
  });
  if (whole == count) return;
  plain::dequantise_float8(codes + whole, scales + whole / block_values, count - whole, format,
                           block_values, further(output, whole));
}

void dequantise_uniform(const std::uint8_t* codes, const std::int16_t* steps,
                        const std::uint8_t* escapes, std::size_t count, std::size_t block_values,
                        const Output& output) {
  const int block_shift = log2_of(block_values);
  const std::size_t whole = count & ~std::size_t{15};
  std::size_t i = 0;
  // Up to the next vector with an escape, then that one by itself, and so on.
  while (i < whole) {
    with_writer(output, [&](auto writer) __attribute__((always_inline)) {
      for (; i < whole; i += 16) {
        const __m128i code = load_half(codes + i);
        if (_mm_movemask_epi8(_mm_cmpeq_epi8(code, _mm_setzero_si128())) != 0) break;
        const __m256 step = _mm256_set1_ps(plain::quarter_power(steps[i >> block_shift]));
        const __m128i centered = _mm_xor_si128(code, _mm_set1_epi8(static_cast<char>(0x80)));
        writer.put(i, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(centered)), step));
        writer.put(i + kLane,
                   _mm256_mul_ps(
                       _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(centered, 8))), step));
      }
    });
    if (i < whole) {
      plain::dequantise_uniform(codes + i, steps + (i >> block_shift), escapes, 16, block_values,
                                further(output, i));
      escapes += 4 * plain::count_byte(codes + i, 16, 0);
      i += 16;
    }
  }
  if (whole == count) return;
  plain::dequantise_uniform(codes + whole, steps + whole / block_values, escapes, count - whole,
                            block_values, further(output, whole));
}

// --- rotated byte planes

// Words rotated right by one bit.
FSL_INLINE __m256i turned_right(__m256i words) {
  return _mm256_or_si256(_mm256_srli_epi16(words, 1), _mm256_slli_epi16(words, 15));
}

// To bf16. Values that are not finite, which callers refuse, may differ from plain C++, where NaN
// becomes quiet.
bool join_bfloat16_words(const std::uint8_t* const planes[2], std::size_t count,
                         std::uint16_t* out) {
  __m256i largest = _mm256_setzero_si256();
  const std::size_t whole = count & ~(kStep - 1);
  for (std::size_t i = 0; i < whole; i += kStep) {
    const __m256i upper = load(planes[0] + i);
    const __m256i lower = load(planes[1] + i);
    largest = _mm256_max_epu8(largest, upper);
    const __m256i first = turned_right(_mm256_unpacklo_epi8(lower, upper));   // 0 to 7, 16 to 23
    const __m256i second = turned_right(_mm256_unpackhi_epi8(lower, upper));  // 8 to 15, 24 to 31
    store(out + i, _mm256_permute2x128_si256(first, second, 0x20));
    store(out + i + kStep / 2, _mm256_permute2x128_si256(first, second, 0x31));
  }
  const std::uint8_t* const rest[2] = {planes[0] + whole, planes[1] + whole};
  const bool finite = signs(_mm256_cmpeq_epi8(largest, all_bytes(0xFF))) == 0;
  return plain::join_bfloat16(rest, count - whole, {Sink::kBfloat16, out + whole, 0.0F, nullptr}) &&
         finite;
}

bool join_bfloat16(const std::uint8_t* const planes[2], std::size_t count, const Output& output) {
  if (output.sink == Sink::kBfloat16)
    return join_bfloat16_words(planes, count, static_cast<std::uint16_t*>(output.out));
  __m128i largest = _mm_setzero_si128();
  const std::size_t whole = count & ~(kStep / 2 - 1);
  with_writer(output, [&](auto writer) __attribute__((always_inline)) {
    for (std::size_t i = 0; i < whole; i += kStep / 2) {
      const __m128i upper = load_half(planes[0] + i);
      const __m128i lower = load_half(planes[1] + i);
      largest = _mm_max_epu8(largest, upper);
      const auto put = [&](std::size_t place, __m128i rotated) __attribute__((always_inline)) {
        const __m128i word = _mm_or_si128(_mm_srli_epi16(rotated, 1), _mm_slli_epi16(rotated, 15));
        writer.put(place, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(word), 16)));
      };
      put(i, _mm_unpacklo_epi8(lower, upper));
      put(i + kLane, _mm_unpackhi_epi8(lower, upper));
    }
  });
  const std::uint8_t* const rest[2] = {planes[0] + whole, planes[1] + whole};
  const bool finite = _mm_movemask_epi8(_mm_cmpeq_epi8(largest, _mm_set1_epi8(-1))) == 0;
  return plain::join_bfloat16(rest, count - whole, further(output, whole)) && finite;
}

void join_float32(const std::uint8_t* const planes[4], std::size_t count, const Output& output,
                  Seen& seen) {
  // The writer to bf16 needs finite values.
  if (output.sink == Sink::kBfloat16) return plain::join_float32(planes, count, output, seen);
  const std::size_t whole = count & ~(kStep / 2 - 1);
  Sight sight;
  with_writer(output, [&](auto writer) __attribute__((always_inline)) {
    Sight here;
    for (std::size_t i = 0; i < whole; i += kStep / 2) {
      const __m128i third = load_half(planes[2] + i);
      const __m128i fourth = load_half(planes[3] + i);
      const __m128i first = load_half(planes[0] + i);
      const __m128i second = load_half(planes[1] + i);
      const auto put = [&](std::size_t place, __m128i lower,
                           __m128i upper) __attribute__((always_inline)) {
        const __m256i rotated = _mm256_or_si256(
            _mm256_cvtepu16_epi32(lower), _mm256_slli_epi32(_mm256_cvtepu16_epi32(upper), 16));
        const __m256i bits =
            _mm256_or_si256(_mm256_srli_epi32(rotated, 1), _mm256_slli_epi32(rotated, 31));
        here.see(bits, _mm256_setzero_si256());
        writer.put(place, _mm256_castsi256_ps(bits));
      };
      put(i, _mm_unpacklo_epi8(fourth, third), _mm_unpacklo_epi8(second, first));
      put(i + kLane, _mm_unpackhi_epi8(fourth, third), _mm_unpackhi_epi8(second, first));
    }
    sight = here;
  });
  sight.fold_into(seen);
  const std::uint8_t* const rest[4] = {planes[0] + whole, planes[1] + whole, planes[2] + whole,
                                       planes[3] + whole};
  plain::join_float32(rest, count - whole, further(output, whole), seen);
}

void copy_float32(const std::uint8_t* bytes, std::size_t count, const Output& output, Seen& seen) {
  if (output.sink == Sink::kBfloat16) return plain::copy_float32(bytes, count, output, seen);
  const std::size_t whole = count & ~(kLane - 1);
  Sight sight;
  with_writer(output, [&](auto writer) __attribute__((always_inline)) {
    Sight here;
    for (std::size_t i = 0; i < whole; i += kLane) {
      const __m256i bits = load(bytes + 4 * i);
      here.see(bits, _mm256_setzero_si256());
      writer.put(i, _mm256_castsi256_ps(bits));
    }
    sight = here;
  });
  sight.fold_into(seen);
  plain::copy_float32(bytes + 4 * whole, count - whole, further(output, whole), seen);
}

// --- bytes

std::size_t count_byte(const std::uint8_t* bytes, std::size_t count, std::uint8_t wanted) {
  const __m256i all_wanted = all_bytes(wanted);
  const std::size_t whole = count & ~(kStep - 1);
  std::size_t found = 0;
  for (std::size_t i = 0; i < whole; i += kStep)
    found += ones(signs(_mm256_cmpeq_epi8(load(bytes + i), all_wanted)));
  return found + plain::count_byte(bytes + whole, count - whole, wanted);
}

}  // namespace
}  // namespace fsl
