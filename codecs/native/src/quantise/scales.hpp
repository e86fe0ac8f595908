// Writes and reads the scales of an inner block of 8-bit codes (docs/WIRE.md, "Scales on the
// wire").
#pragma once

#include "status.hpp"
#include "wire/format.hpp"

namespace fsl {

struct ScaleScratch {
  alignas(64) std::uint8_t differences[kMaximumRuns + kSlackBytes];
  alignas(64) std::uint8_t high_differences[kMaximumRuns + kSlackBytes];
  alignas(64) std::uint8_t ranks[kMaximumRuns + kSlackBytes];
};

// For 8-bit float formats and for uniform. Both return the bytes written.
std::size_t write_scales(const Kernels& kernels, const std::uint8_t* scales, std::size_t runs,
                         ScaleScratch& scratch, std::uint8_t* out);
std::size_t write_steps(const Kernels& kernels, const std::int16_t* steps, std::size_t runs,
                        ScaleScratch& scratch, std::uint8_t* out);

// The inverses, from `position`, which advances. Refuse scales that the format lacks.
Status read_scales(const Kernels& kernels, const Format& format, std::size_t runs,
                   const std::uint8_t*& position, const std::uint8_t* end, ScaleScratch& scratch,
                   std::uint8_t* scales, bool& has_highest);
Status read_steps(const Kernels& kernels, std::size_t runs, const std::uint8_t*& position,
                  const std::uint8_t* end, ScaleScratch& scratch, std::int16_t* steps);

}  // namespace fsl
