// For kernels_test.cpp: values that kernels write, compared with those of the plain kernels, for
// every sink.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#define FSL_FENCE() _mm_sfence()
#else
#define FSL_FENCE() ((void)0)
#endif

#include <cstring>
#include <string>

#include "kernels/kernels.hpp"
#include "kernels_test_values.hpp"

namespace {

constexpr fsl::Float8 kFormats[2] = {{3, 7, 8, 10, 0x7F}, {2, 15, 15, 17, 0x7C}};

// All scales, or neighbors.
void fill_scales(const fsl::Float8& format, bool highest, std::size_t runs, std::uint8_t* scales) {
  const std::size_t all = static_cast<std::size_t>(255 - format.largest_exponent -
                                                   format.lowest_scale + (highest ? 1 : 0));
  const std::size_t ranges[] = {all, 1 + below(all / 2), 1 + below(6)};
  const std::size_t some = ranges[below(3)];
  // Also near those at which AVX-512 multiplies values instead of scales by the weight.
  const std::size_t edge = below(2) != 0 ? 127 - 64 : 127 + 58;
  const std::size_t first =
      some <= 6 && below(2) != 0
          ? edge + below(5)
          : static_cast<std::size_t>(format.lowest_scale) + below(all - some + 1);
  for (std::size_t run = 0; run < runs; ++run)
    scales[run] = static_cast<std::uint8_t>(first + below(some));
}

// Calls decode(kernels, output) for every sink on both sides and compares what it returns and
// writes.
template <typename Decode>
void compare_sinks(const fsl::Kernels& plain, const fsl::Kernels& kernels, std::size_t count,
                   const std::string& what, Decode decode) {
  Edge source(4 * count);
  fill(source.as<float>(), count, 0);
  for (int sink = 0; sink <= static_cast<int>(fsl::Sink::kResidual); ++sink) {
    const std::size_t offset =
        below(3) == 0 ? 16 * below(2) : below(17);  // before the edge: unaligned stores
    const std::size_t bytes =
        static_cast<fsl::Sink>(sink) == fsl::Sink::kBfloat16 ? 2 * count : 4 * count;
    Edge want(bytes + 4 * offset), got(bytes + 4 * offset);
    // Of any size, or not far from 1: products may be subnormal or too large.
    const std::size_t exponents[] = {below(255), 127 - 35 + below(70), 127 - 32 + below(5),
                                     127 + 28 + below(5)};
    const std::size_t exponent = exponents[below(4)];
    const float weight = below(3) == 0 ? 0.3F
                                       : float_of(static_cast<std::uint32_t>(
                                             below(2) << 31 | exponent << 23 | below(1 << 23)));
    fsl::Output output{static_cast<fsl::Sink>(sink), nullptr, weight, source.as<float>()};
    const bool from_zero = below(2) != 0;
    for (std::size_t i = 0; i < bytes / 4; ++i) {
      const float before = from_zero ? 0.0F : static_cast<float>(below(1000)) / 7;
      std::memcpy(want.as() + 4 * i, &before, 4);
      std::memcpy(got.as() + 4 * i, &before, 4);
    }
    output.out = want.as();
    const bool want_result = decode(plain, output);
    output.out = got.as();
    const bool result = decode(kernels, output);
    FSL_FENCE();
    const std::string about =
        what + " sink " + std::to_string(sink) + " count " + std::to_string(count);
    if (want_result != result) fail(about + ": result");
    if (result || static_cast<fsl::Sink>(sink) != fsl::Sink::kAccumulate) {
      for (std::size_t i = 0; i < bytes / 4; ++i) {
        const float a = float_at(want.as() + 4 * i);
        const float b = float_at(got.as() + 4 * i);
        const bool both_nan =
            static_cast<fsl::Sink>(sink) != fsl::Sink::kBfloat16 && a != a && b != b;
        if (result && bits_of(a) != bits_of(b) && !both_nan)
          fail(about + ": value " + std::to_string(i));
      }
      if (result) same(want.as(), got.as(), bytes % 4 != 0 ? bytes : 0, about);
    }
    same(want.as() + bytes, got.as() + bytes, 4 * offset, about + ": behind");
    got.check_front(about.c_str());
  }
}

}  // namespace
