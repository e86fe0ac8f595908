// How a chunk is stored: split, books, raw planes; in integers, from the symbol counts of a sample (docs/WIRE.md).
#pragma once

#include "book.hpp"
#include "scratch.hpp"

namespace fsl {

// Of a chunk of more than one inner block every fifteenth run counts: an odd number, so that the rows of a matrix are not all met at the
// same place, nor the same places of a cache used. A run is whole blocks, so that its codes are those that the chunk will have. Short runs show
// more of a chunk than as many values in long ones: 1024 values in every seventeenth run cost 0.1 % of size more.
inline constexpr std::size_t kSampledEvery = 15;
inline constexpr std::size_t sampled_run(std::size_t block_values) { return block_values < 256 ? 256 : block_values; }

// Adds up symbols; the sum over all calls since the last clear_counts() must stay below 2^22.
void clear_counts(Counts& counts);
void count_symbols(const std::uint8_t* symbols, std::size_t count, Counts& counts);

struct PlanRequest {
  const Format& format;
  const SharedBooks& shared;
  std::uint64_t values;   // of the chunk
  std::uint64_t sampled;  // of them counted in scratch.counts: codes of 8 bits in [0], else a plane's symbols each
};

// The cheapest plan; lives in `scratch` until the next call.
const ChunkPlan& plan_chunk(const PlanRequest& request, Scratch& scratch);

}  // namespace fsl
