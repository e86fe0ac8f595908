// Decodes frames. Every length is checked before it is used: the bytes are untrusted.
#pragma once

#include <cstddef>
#include <cstdint>

#include "status.hpp"
#include "wire/heads.hpp"

namespace fsl {

struct DecodeRequest {
  const std::uint8_t* frame;
  std::size_t frame_bytes;
  Limits limits;
  int threads;
};

// The output: exactly one of fp32 and bf16.
struct Target {
  float* fp32;
  std::uint16_t* bf16;
  std::size_t count;
};

// A frame's header and the modes of its chunks.
struct Summary {
  Header header;
  bool nonfinite;
  std::uint64_t modes[4];
};

// Writes the frame's values and sets their number. Throws std::bad_alloc as encode_frame() does.
Status decode_frame(const Kernels& kernels, const DecodeRequest& request, const Target& target,
                    std::uint64_t& values);

// accumulator[i] += weight * value. The whole frame is checked before the first addition.
Status accumulate_frame(const Kernels& kernels, const DecodeRequest& request, float* accumulator,
                        std::size_t accumulator_values, float weight, std::uint64_t& values);

// Checks headers and checksums, not payloads.
Status inspect_frame(const Kernels& kernels, const DecodeRequest& request, Summary& summary);

}  // namespace fsl
