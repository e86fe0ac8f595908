// How a chunk is stored: split, tables, raw planes; in integers, from the symbol counts of a sample (docs/WIRE.md).
#pragma once

#include "entropy/code_table.hpp"
#include "entropy/scratch.hpp"

namespace fsl {

// Sets `counts` to how often each symbol occurs in the sample: of a chunk of more than one inner block, unless `everything` is wanted,
// every seventeenth run of 16, of one of more than 65,536 values every twenty-ninth. Runs that short show the most, and primes meet all
// columns of nearly every matrix. Returns the sample's size.
std::size_t count_sample(const std::uint8_t* symbols, std::size_t count, bool everything, Counts& counts);

struct PlanRequest {
  const Format& format;
  std::uint64_t values;   // of the chunk
  std::uint64_t sampled;  // of them counted in scratch.counts: codes of 8 bits in [0], else a plane's symbols each
};

// The cheapest plan; lives in `scratch` until the next call.
const ChunkPlan& plan_chunk(const PlanRequest& request, Scratch& scratch);

}  // namespace fsl
