// A thread's working memory: allocated in its first call and kept until it ends, so that later
// calls allocate nothing.
#pragma once

#include "arena.hpp"
#include "entropy/plan.hpp"
#include "quantise/scales.hpp"

namespace fsl {

struct Scratch {
  alignas(64) float x[kBlockValues + kSlackBytes];
  alignas(64) float nowhere[kPieceValues + kSlackBytes];  // values that are only checked
  alignas(64) std::uint8_t symbols[2][kBlockValues + kSlackBytes];
  alignas(64) std::uint8_t
      numbers[kBlockValues + kSlackBytes];  // of symbols without a code, while a plane is written
  // Symbols without a code, of each plane that is read: at most one per value of the block, even if
  // a damaged stream asks for more.
  alignas(64) std::uint8_t listed[kMaximumPlanes][kBlockValues + kSlackBytes];
  alignas(64) std::uint16_t positions[kBlockValues + kSlackBytes];  // of escapes
  alignas(64)
      std::uint8_t planes[kMaximumPlanes]
                         [kPieceValues + kSlackBytes];  // of a piece: codes, or rotated byte planes
  alignas(64) std::uint8_t scales[kMaximumRuns + kSlackBytes];
  alignas(64) std::int16_t steps[kMaximumRuns + kSlackBytes];
  ScaleScratch for_scales;
  alignas(64) std::uint8_t ranks[kBlockValues + kSlackBytes];  // of symbols without a code
  PlanScratch plan;
  Lanes lanes[kMaximumPlanes];

  Arena chunk_values;  // the values to encode, of a chunk with a residual
  Arena chunk_codes;   // the codes of a chunk to encode, or of a decoded one that is checked before
                       // it is added
  Arena chunk_symbols;  // of a plane that is extracted from the codes
  Arena sparse;         // masks of a sparse chunk, and the symbols of its planes
  Arena sparse_masks;   // of a sparse chunk that is decoded
  Arena sparse_codes;   // those of its codes that are not zero
  Arena stream;         // the stream that is being written
  Arena uncoded[kMaximumPlanes];
  Arena chunk_payload;  // a chunk that is encoded before its place in the frame is known
};

// Throws std::bad_alloc.
Scratch& scratch_of_this_thread();

}  // namespace fsl
