#include "entropy/plan.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "kernels/groups.hpp"

namespace fsl {
namespace {

constexpr std::size_t kSampledRun = 16;
constexpr std::size_t kSampledEvery = 17;
constexpr std::size_t kSampledEveryOfMany = 29;
constexpr std::size_t kMany = 65536;

// Into four tables, so that equal neighbors do not wait for each other.
inline void count_eight(const std::uint8_t* symbols, Counts& counts) {
  std::uint64_t eight;
  std::memcpy(&eight, symbols, 8);
  ++counts.tables[0][eight & 0xFF];
  ++counts.tables[1][eight >> 8 & 0xFF];
  ++counts.tables[2][eight >> 16 & 0xFF];
  ++counts.tables[3][eight >> 24 & 0xFF];
  ++counts.tables[0][eight >> 32 & 0xFF];
  ++counts.tables[1][eight >> 40 & 0xFF];
  ++counts.tables[2][eight >> 48 & 0xFF];
  ++counts.tables[3][eight >> 56];
}

struct Plane {
  const std::uint32_t* counts;
  int width;
};

std::uint64_t raw_bits_of(int width, std::uint64_t values) {
  return width == 8 ? 8 * values : 8 * static_cast<std::uint64_t>(width) * ((values + 7) / 8);
}

void set_head(PlanePlan& plan, std::uint8_t kind, const CodeTable* table, std::uint64_t cost_bits) {
  plan.kind = kind;
  plan.head[0] = kind;
  plan.head_bytes = 1;
  plan.table = table;
  plan.cost_bits = cost_bits;
}

// The plane's estimated bits with its own table.
std::uint64_t cost_of(const PlanRequest& request, const Plane& plane, const CodeTable& own) {
  const std::uint64_t data = request.values * own.bits_of(plane.counts) / request.sampled;
  return 8 * (1 + own.packed_bytes) + 32 + 16 * lanes_of(request.values, request.many_from) + data;
}

void plan_plane(const PlanRequest& request, const Plane& plane, CodeTable& own, PlanePlan& plan) {
  const int symbols = 1 << plane.width;
  plan.width = plane.width;
  int present = 0;
  std::uint32_t largest = 0;
  for (int symbol = 0; symbol < symbols; ++symbol) {
    present += plane.counts[symbol] != 0;
    largest = std::max(largest, plane.counts[symbol]);
  }
  if (present == 1) {
    set_head(plan, kPlaneConstant, nullptr, 16);
    const std::uint32_t* found = std::find_if(plane.counts, plane.counts + symbols,
                                              [](std::uint32_t count) { return count != 0; });
    plan.head[1] = static_cast<std::uint8_t>(found - plane.counts);
    plan.head_bytes = 2;
    return;
  }
  const std::uint64_t raw_bits = raw_bits_of(plane.width, request.values);
  set_head(plan, kPlaneRaw, nullptr, 8 + raw_bits);
  // Nearly uniform planes, mantissas above all, are not worth the search for a code.
  if (present > symbols / 2 && largest <= request.sampled >> (plane.width - 1)) return;

  make_own_table(plane.counts, static_cast<std::uint32_t>(request.sampled), plane.width,
                 request.sampled != request.values, own);
  const std::uint64_t bits = cost_of(request, plane, own);
  if (bits > raw_bits - (raw_bits >> 6)) return;
  set_head(plan, kPlaneOwn, &own, bits);
  plan.head_bytes = 1 + own.pack(plan.head + 1);
}

void add_up(Counts& counts) {
  for (int symbol = 0; symbol < 256; ++symbol) {
    counts.tables[0][symbol] +=
        counts.tables[1][symbol] + counts.tables[2][symbol] + counts.tables[3][symbol];
  }
}

// Counts of each plane's symbols, from the counts of 8-bit codes.
void split_counts(const std::uint32_t* codes, const Split& split, PlanScratch& scratch) {
  std::uint32_t rotated[256];
  if (split.rotated) {
    for (int code = 0; code < 128; ++code) {
      rotated[2 * code] = codes[code];
      rotated[2 * code + 1] = codes[code + 128];
    }
    codes = rotated;
  }
  if (split.planes == 1) {
    std::memcpy(scratch.plane_counts[0], codes, sizeof(rotated));
    return;
  }
  const int low_width = split.widths[1];
  const int low_symbols = 1 << low_width;
  std::uint32_t* high = scratch.plane_counts[0];
  std::uint32_t* low = scratch.plane_counts[1];
  std::memset(low, 0, static_cast<std::size_t>(low_symbols) * sizeof(*low));
  for (int symbol = 0; symbol < 256 >> low_width; ++symbol) {
    std::uint32_t sum = 0;
    for (int rest = 0; rest < low_symbols; ++rest) {
      const std::uint32_t count = codes[(symbol << low_width) + rest];
      sum += count;
      low[rest] += count;
    }
    high[symbol] = sum;
  }
}

void plan_split(const PlanRequest& request, int index, PlanScratch& scratch, ChunkPlan& plan) {
  const Split& split = request.format.split[index];
  plan.split_index = index;
  plan.cost_bits = 8;
  for (int p = 0; p < split.planes; ++p) {
    const Plane plane = {scratch.plane_counts[p], split.widths[p]};
    plan_plane(request, plane, plan.own[p], plan.planes[p]);
    plan.cost_bits += plan.planes[p].cost_bits;
  }
}

}  // namespace

std::size_t count_sample(const std::uint8_t* symbols, std::size_t count, int group, bool everything,
                         Counts& counts) {
  std::memset(&counts, 0, sizeof(counts));
  const std::size_t values = static_cast<std::size_t>(group);
  const std::size_t those = (count + values - 1) / values;
  const std::size_t run = kSampledRun / values;
  std::size_t step = run;
  if (!everything && count > kBlockValues)
    step *= count > kMany ? kSampledEveryOfMany : kSampledEvery;
  std::size_t sampled = 0;
  for (std::size_t at = 0; at < those; at += step) {
    const std::size_t end = std::min(at + run, those);
    sampled += end - at;
    std::size_t i = at;
    for (; i + 8 <= end; i += 8) count_eight(symbols + i, counts);
    for (; i < end; ++i) ++counts.tables[i & 3][symbols[i]];
  }
  return sampled;
}

const ChunkPlan& plan_chunk(const PlanRequest& request, PlanScratch& scratch) {
  const Format& format = request.format;
  ChunkPlan* best = &scratch.plans[0];
  ChunkPlan* candidate = &scratch.plans[1];
  if (!format.is_bytes()) {
    for (int p = 0; p < format.split[0].planes; ++p) {
      add_up(scratch.counts[p]);
      std::memcpy(scratch.plane_counts[p], scratch.counts[p].tables[0],
                  sizeof(scratch.plane_counts[p]));
    }
    plan_split(request, 0, scratch, *best);
    return *best;
  }

  add_up(scratch.counts[0]);
  const std::uint32_t* codes = scratch.counts[0].tables[0];
  // A later split is tried only where it may pay, and must then save a sixteenth, because larger
  // alphabets are slower. Sign in the alphabet: if signs and magnitudes are correlated. Whole
  // codes: then too, or if one code dominates. Of uniform codes: if one is an eighth of all, since
  // the two low bits of codes near zero are far from equally likely.
  std::uint64_t asymmetry = 0;
  std::uint32_t largest = 0;
  for (int code = 0; code < 128; ++code) {
    asymmetry += static_cast<std::uint32_t>(std::abs(static_cast<std::int32_t>(codes[code]) -
                                                     static_cast<std::int32_t>(codes[code + 128])));
    largest = std::max(largest, std::max(codes[code], codes[code + 128]));
  }
  const bool goes_together = asymmetry > request.sampled >> 2;
  const bool is_dominated = largest > request.sampled >> (format.is_uniform() ? 3 : 2);
  const bool promising[3] = {true, format.is_uniform() ? is_dominated : goes_together,
                             goes_together || is_dominated};
  for (int index = 0; index < 3; ++index) {
    if (!promising[index] || format.split[index].group > 1) continue;
    ChunkPlan& tried = index == 0 ? *best : *candidate;
    split_counts(codes, format.split[index], scratch);
    plan_split(request, index, scratch, tried);
    if (index > 0 && tried.cost_bits < best->cost_bits - (best->cost_bits >> 4))
      std::swap(best, candidate);
  }
  return *best;
}

// Groups have fewer symbols, so any gain is taken.
const ChunkPlan& plan_groups(const PlanRequest& request, int split_index, std::uint64_t sampled,
                             const ChunkPlan& best, PlanScratch& scratch) {
  const Split& split = request.format.split[split_index];
  add_up(scratch.counts[0]);
  const std::uint32_t* const counts = scratch.counts[0].tables[0];
  const unsigned last = last_digit_of(split.group);
  std::uint64_t listed = 0;  // digits of the sample
  for (unsigned symbol = 0; symbol < 1U << split.widths[0]; ++symbol) {
    for (unsigned rest = symbol, place = 0; place < static_cast<unsigned>(split.group); ++place) {
      listed += (rest & last) == last ? counts[symbol] : 0;
      rest /= last + 1;
    }
  }
  std::memcpy(scratch.plane_counts[0], counts, sizeof(scratch.plane_counts[0]));
  ChunkPlan& tried = scratch.plans[&best == &scratch.plans[0] ? 1 : 0];
  plan_split({request.format, split.symbols_of(request.values), sampled}, split_index, scratch,
             tried);
  tried.cost_bits +=
      16 * blocks_of(request.values, kBlockValues) + 8 * request.values * listed / request.sampled;
  return tried.cost_bits < best.cost_bits ? tried : best;
}

const ChunkPlan& plan_sparse(const Format& format, const std::uint8_t* const* symbols,
                             const std::size_t* sizes, bool everything, PlanScratch& scratch) {
  ChunkPlan& tried = scratch.sparse;
  tried.split_index = format.splits - 1;
  tried.cost_bits = 8;
  for (std::size_t p = 0; p < 2 + format.planes_of_codes(); ++p) {
    if (sizes[p] == 0) continue;
    const std::size_t sampled =
        count_sample(symbols[p], sizes[p], 1, everything, scratch.counts[0]);
    add_up(scratch.counts[0]);
    plan_plane({format, sizes[p], sampled, kManyLanesFromSparse}, {scratch.counts[0].tables[0], 8},
               tried.own[p], tried.planes[p]);
    tried.cost_bits += tried.planes[p].cost_bits;
  }
  return tried;
}

}  // namespace fsl
