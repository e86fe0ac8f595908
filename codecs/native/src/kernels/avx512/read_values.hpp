// AVX-512: reads lanes and writes values in one pass. For avx512/kernels.cpp only, which sets the
// target.
#pragma once

#include "kernels/avx512/lanes.hpp"
#include "kernels/avx512/values.hpp"

namespace fsl {
namespace {

const std::uint8_t* read_float8(const Code& code, const std::uint8_t* in, const std::uint8_t* end,
                                std::size_t count, Lanes& state, const std::uint8_t*& listed,
                                const TwoPlanes& below, const Float8Values& values,
                                const Output& output, ValuesRead& found, Beside& beside) {
  const Float8Factors factors(values.scales,
                              (count + values.block_values - 1) / values.block_values, output);
  with_writer(factors.output, [&](auto writer) __attribute__((always_inline)) {
    with_dequantiser<false>(
        values.format, values.block_values, factors.of,
        [&](auto dequantiser) __attribute__((always_inline)) {
          const auto read = [&](auto joiner) __attribute__((always_inline)) {
            in = read_all_lanes(code, in, end, count, state, listed, beside,
                                [&](std::size_t i, __m512i symbols) __attribute__((always_inline)) {
                                  dequantiser.put(i, joiner.join(i, symbols), writer);
                                });
            found.largest_code = largest_of(joiner.largest);
          };
          below.rotated ? read(CodeJoiner<true>(below)) : read(CodeJoiner<false>(below));
        });
    writer.finish(count);
  });
  return in;
}

const std::uint8_t* read_uniform(const Code& code, const std::uint8_t* in, const std::uint8_t* end,
                                 std::size_t count, Lanes& state, const std::uint8_t*& listed,
                                 const TwoPlanes& below, const UniformValues& values,
                                 const Output& output, ValuesRead& found, Beside& beside) {
  alignas(64) float factors[kBlockValues / 16 + kLane];
  fill_uniform_factors(values.steps, (count + values.block_values - 1) / values.block_values,
                       factors);
  UniformDequantiser dequantiser(factors, values);
  CodeJoiner<false> joiner(below);  // uniform codes are never rotated
  with_writer(output, [&](auto writer) __attribute__((always_inline)) {
    in = read_all_lanes(code, in, end, count, state, listed, beside,
                        [&](std::size_t i, __m512i symbols) __attribute__((always_inline)) {
                          dequantiser.put(i, joiner.join(i, symbols), writer);
                        });
    writer.finish(count);
  });
  found.escapes = dequantiser.wanted;
  found.finite = _mm512_reduce_max_epu32(dequantiser.largest) < 0x7F800000;
  return in;
}

}  // namespace
}  // namespace fsl
