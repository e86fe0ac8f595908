// The inner blocks of a chunk on their way to the payload.
#pragma once

#include "encode.hpp"
#include "scratch.hpp"

namespace fsl {

// An inner block, or a run of a sample, quantised into the scratch: codes, or for bf16 and fp32 rotated byte planes, and scales.
class BlockEncoder {
 public:
  BlockEncoder(const Kernels& kernels, const EncodeSettings& settings, Scratch& scratch)
      : kernels_(kernels), settings_(settings), format_(*settings.format), scratch_(scratch) {}

  // Quantises x (count). Values that the format cannot hold give arbitrary codes; `seen` tells.
  void quantise(const float* x, std::size_t count, std::uint32_t first_bits, Seen& seen, const Chores& chores);

  // Takes codes (count) of an 8-bit format instead; only write_plane() goes together with it.
  void take(const std::uint8_t* codes, std::size_t count);

  // Adds the block's symbols to scratch.counts.
  void count() const;

  // Each writes at `out` and returns the bytes written. There must be kWorkingBytes.
  std::size_t write_scales(std::uint8_t* out);
  std::size_t write_raw_codes(std::uint8_t* out);
  // Plane `p` of the plan; SIZE_MAX when it is planned constant and is not.
  std::size_t write_plane(const ChunkPlan& plan, int p, std::uint8_t* out, const Chores& chores);

  // Whether the planes that are planned constant are so in this block.
  bool has_constant_planes(const ChunkPlan& plan) const;

  // The values whose code is the escape, fp32.
  std::size_t escaped_bytes() const { return 4 * escapes_; }
  std::size_t write_escaped(std::uint8_t* out) const;

  // residual[i] = x[i] - what a decoder gives; after write_scales().
  void leave(float* residual) const;

 private:
  void settle_scales();
  bool is_constant(const Split& split, int p, const PlanePlan& plane) const;

  const Kernels& kernels_;
  const EncodeSettings& settings_;
  const Format& format_;
  Scratch& scratch_;
  const float* x_ = nullptr;
  std::size_t count_ = 0;
  std::size_t escapes_ = 0;
};

}  // namespace fsl
