// Working memory of one thread: made on its first call, kept until it ends, so that calls allocate nothing.
#pragma once

#include "arena.hpp"
#include "entropy/plan.hpp"
#include "quantise/scales.hpp"

namespace fsl {

struct Scratch {
  alignas(64) float x[kBlockValues + kSlackBytes];
  alignas(64) float nowhere[kPieceValues + kSlackBytes];  // values that are only looked at
  alignas(64) std::uint8_t symbols[2][kBlockValues + kSlackBytes];
  alignas(64) std::uint8_t numbers[kBlockValues + kSlackBytes];  // of symbols without a code, of a plane that is written
  // Symbols without a code, of each plane that is read: never more than one for each of the block's values, however many a stream asks for.
  alignas(64) std::uint8_t listed[kMaximumPlanes][kBlockValues + kSlackBytes];
  alignas(64) std::uint16_t positions[kBlockValues + kSlackBytes];  // of escapes
  alignas(64) std::uint8_t planes[kMaximumPlanes][kPieceValues + kSlackBytes];  // of a piece that was read: codes, or rotated byte planes
  alignas(64) std::uint8_t scales[kMaximumRuns + kSlackBytes];
  alignas(64) std::int16_t steps[kMaximumRuns + kSlackBytes];
  ScaleScratch for_scales;
  alignas(64) std::uint8_t ranks[kBlockValues + kSlackBytes];  // of symbols without a code
  PlanScratch plan;
  Lanes lanes[kMaximumPlanes];

  Arena chunk_values;   // what is encoded, of a chunk with a residual
  Arena chunk_codes;    // what is encoded, quantised; or a decoded chunk that is to be checked before it is added
  Arena chunk_symbols;  // of a plane that had to be cut out of the codes
  Arena stream;         // one that is being written
  Arena uncoded[kMaximumPlanes];
  Arena chunk_payload;  // a chunk encoded before its place in the frame is known
};

// std::bad_alloc when there is no memory for it.
Scratch& scratch_of_this_thread();

}  // namespace fsl
