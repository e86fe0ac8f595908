// How a chunk is stored: split, tables, raw planes; in integers, from the symbol counts of a sample (docs/WIRE.md).
#pragma once

#include "entropy/code_table.hpp"
#include "wire/format.hpp"

namespace fsl {

// How one plane of a chunk is stored; cost_bits estimates head and data of all inner blocks.
struct PlanePlan {
  std::uint8_t kind;
  int width;
  std::uint64_t cost_bits;
  const CodeTable* table;  // null unless there is a code
  std::size_t head_bytes;
  std::uint8_t head[1 + kMaximumPackedBytes];

  std::uint8_t constant() const { return head[1]; }
};

struct ChunkPlan {
  int split_index;
  std::uint64_t cost_bits;
  PlanePlan planes[kMaximumPlanes];
  CodeTable own[kMaximumPlanes];  // a chunk's own tables, to which `planes` points
};

// Numbers of symbols, in four parts.
struct Counts {
  alignas(64) std::uint32_t tables[4][256];
};

struct PlanScratch {
  Counts counts[kMaximumPlanes];
  alignas(64) std::uint32_t plane_counts[kMaximumPlanes][256];
  ChunkPlan plans[2];
};

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
const ChunkPlan& plan_chunk(const PlanRequest& request, PlanScratch& scratch);

}  // namespace fsl
