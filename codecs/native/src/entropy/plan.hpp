// Plans how a chunk is stored: split, code tables, raw planes. In integers, from the symbol counts
// of a sample (docs/WIRE.md).
#pragma once

#include "entropy/code_table.hpp"
#include "wire/format.hpp"

namespace fsl {

// How one plane of a chunk is stored. cost_bits: estimate of the head and the data of all inner
// blocks.
struct PlanePlan {
  std::uint8_t kind;
  int width;
  std::uint64_t cost_bits;
  const CodeTable* table;  // null for kinds without a code
  std::size_t head_bytes;
  std::uint8_t head[1 + kMaximumPackedBytes];

  std::uint8_t constant() const { return head[1]; }
};

struct ChunkPlan {
  int split_index;
  std::uint64_t cost_bits;
  PlanePlan planes[kSparsePlanes];
  CodeTable own[kSparsePlanes];  // the chunk's own tables, to which `planes` points
};

// Symbol counts, as the sum of four tables.
struct Counts {
  alignas(64) std::uint32_t tables[4][256];
};

struct PlanScratch {
  Counts counts[kMaximumPlanes];
  alignas(64) std::uint32_t plane_counts[kMaximumPlanes][256];
  ChunkPlan plans[2];
  ChunkPlan sparse;
};

// Counts the symbols of the sample and returns their number. The sample is the whole chunk if
// `everything` is set or the chunk is one inner block; else every 17th run of 16 values, or every
// 29th of more than 65,536 values. Primes meet all columns of nearly every matrix. count: of the
// chunk's values; group: values of a symbol.
std::size_t count_sample(const std::uint8_t* symbols, std::size_t count, int group, bool everything,
                         Counts& counts);

struct PlanRequest {
  const Format& format;
  std::uint64_t values;  // of the chunk
  std::uint64_t
      sampled;  // counted in scratch.counts: 8-bit codes in [0], else one plane's symbols each
  std::size_t many_from = kManyLanesFrom;
};

// The cheapest plan without groups; valid in `scratch` until the next call. Afterwards
// scratch.counts[0].tables[0] has the counts of 8-bit codes.
const ChunkPlan& plan_chunk(const PlanRequest& request, PlanScratch& scratch);

// The cheaper of `best` and of a split into groups. request: of values, as for plan_chunk().
// sampled: symbols that are counted in scratch.counts[0].
const ChunkPlan& plan_groups(const PlanRequest& request, int split_index, std::uint64_t sampled,
                             const ChunkPlan& best, PlanScratch& scratch);

// The plan of a sparse split, from the symbols of its planes; valid in `scratch` until the next
// call.
const ChunkPlan& plan_sparse(const Format& format, const std::uint8_t* const* symbols,
                             const std::size_t* sizes, bool everything, PlanScratch& scratch);

}  // namespace fsl
