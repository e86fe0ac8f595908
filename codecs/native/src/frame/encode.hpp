// Encodes frames.
#pragma once

#include <cstddef>
#include <cstdint>

#include "encode_settings.hpp"
#include "wire/format.hpp"

namespace fsl {

// The values to encode: value - reference + residual, in this order. Exactly one of fp32 and bf16
// is given; reference and residual may be null. The residual is replaced by the encoding error.
struct Source {
  const float* fp32;
  const std::uint16_t* bf16;
  const float* reference;
  float* residual;
  std::size_t count;
};

// Writes a frame to `out`, which holds bound(count, chunk_values) bytes; returns the frame's size.
// Throws std::bad_alloc.
std::size_t encode_frame(const Kernels& kernels, const EncodeSettings& settings,
                         const Source& source, std::uint8_t* out);

}  // namespace fsl
