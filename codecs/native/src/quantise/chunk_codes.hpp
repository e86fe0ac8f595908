// Quantizes a chunk: codes, scales and escaped values.
#pragma once

#include "arena.hpp"
#include "encode_settings.hpp"
#include "wire/format.hpp"

namespace fsl {

struct ChunkCodes {
  std::size_t count = 0;
  std::uint8_t* planes[kMaximumPlanes] =
      {};  // bf16 and fp32: rotated byte planes; else the first holds the codes
  std::uint8_t* scales = nullptr;  // of 8-bit floats, those of all inner blocks
  std::int16_t* steps = nullptr;   // of uniform
  float* escaped = nullptr;        // of uniform: the values whose code is the escape, in order
  std::size_t escapes[kMaximumBlocks] = {};  // escaped values of each inner block
};

// Room in `memory` for a chunk of the settings' size.
ChunkCodes make_room(const EncodeSettings& settings, Arena& memory);

// Fills ChunkCodes inner block by inner block.
class ChunkQuantiser {
 public:
  ChunkQuantiser(const Kernels& kernels, const EncodeSettings& settings, ChunkCodes& codes)
      : kernels_(kernels), settings_(settings), format_(*settings.format), codes_(codes) {}

  // Quantizes the next inner block x (count), of uniform with the steps of a sparse chunk if that
  // is set; only the last may be shorter than kBlockValues.
  // Values that the format cannot represent give arbitrary codes; `seen` shows them. positions:
  // kBlockValues of scratch.
  void quantise(const float* x, std::size_t count, std::uint32_t first_bits, Seen& seen,
                std::uint16_t* positions, std::size_t further, bool sparse = false);

  // residual[i] = x[i] - decoded value, for the block that was quantized last.
  void leave(const float* x, float* residual) const { put({Sink::kResidual, residual, 0.0F, x}); }

  // The decoded value of the only value, in an 8-bit float format or bf16.
  float only_value() const;

 private:
  void settle_scales(std::size_t first, std::size_t runs);
  void put(const Output& output) const;

  const Kernels& kernels_;
  const EncodeSettings& settings_;
  const Format& format_;
  ChunkCodes& codes_;
  std::size_t last_offset_ = 0;
  std::size_t last_escaped_ = 0;
  std::size_t escaped_ = 0;
};

}  // namespace fsl
