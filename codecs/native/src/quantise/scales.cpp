#include "quantise/scales.hpp"

#include <algorithm>
#include <cstring>

#include "bits.hpp"
#include "bytes.hpp"

namespace fsl {
namespace {

// Forms: the width of bit planes, or one of these plus the last rank.
constexpr int kUpward = 0x40;
constexpr int kDownward = 0x80;
constexpr int kWidestRange = 7;  // scales that differ by more are bit planes
constexpr int kWidestFloat8 = 8;
constexpr int kWidestStep = 10;

// Scales as ranks around the most frequent one.
struct Ranked {
  int common;  // its difference from the smallest
  bool is_upward;
  int last;
  std::size_t bytes;
};

int rank_of(int difference, bool is_upward) {
  const int turned = is_upward ? difference : -difference;
  return turned > 0 ? 2 * turned - 1 : -2 * turned;
}

// rank_of() of each difference's distance from `common`, all below 128. In bytes only, so that the
// compiler vectorizes it.
void to_ranks(const std::uint8_t* differences, std::size_t runs, int common, bool is_upward,
              std::uint8_t* ranks) {
  const std::uint8_t first = static_cast<std::uint8_t>(common);
  const std::uint8_t turn = is_upward ? 0xFF : 0;
  for (std::size_t i = 0; i < runs; ++i) {
    // Negative where the rank is odd.
    const std::uint8_t distance = static_cast<std::uint8_t>(
        (static_cast<std::uint8_t>(differences[i] - first) ^ turn) - turn);
    const std::uint8_t is_odd = static_cast<std::int8_t>(distance) < 0 ? 0xFF : 0;
    ranks[i] = static_cast<std::uint8_t>(static_cast<std::uint8_t>(2 * distance) ^ is_odd);
  }
}

// Plans the ranks of differences from the smallest scale, 0 to `range`.
Ranked ranked(const Kernels& kernels, const std::uint8_t* differences, std::size_t runs,
              int range) {
  std::size_t counts[kWidestRange + 1];
  Ranked plan = {};
  for (int difference = 0; difference <= range; ++difference) {
    counts[difference] =
        kernels.count_byte(differences, runs, static_cast<std::uint8_t>(difference));
    if (counts[difference] > counts[plan.common]) plan.common = difference;
  }
  std::size_t below = 0;
  for (int difference = 0; difference < plan.common; ++difference) below += counts[difference];
  plan.is_upward = runs - below - counts[plan.common] >= below;
  std::size_t bits = 0;
  std::size_t of_last = 0;
  for (int difference = 0; difference <= range; ++difference) {
    const int rank = rank_of(difference - plan.common, plan.is_upward);
    bits += counts[difference] * static_cast<std::size_t>(rank + 1);
    if (counts[difference] == 0 || rank < plan.last) continue;
    plan.last = rank;
    of_last = counts[difference];
  }
  plan.bytes = blocks_of(bits - of_last, 8);  // the last rank needs no bit of its own
  return plan;
}

// Writes scales that differ by at most `range`. scratch.differences holds the low bytes of their
// differences from the smallest. store_base(difference) writes the scale before the form and
// returns the place after it.
template <typename StoreBase>
std::size_t write_differences(const Kernels& kernels, int range, std::size_t runs,
                              ScaleScratch& scratch, std::uint8_t* out, StoreBase store_base) {
  const int width = bits_needed(static_cast<unsigned>(range));
  if (range > 0 && range <= kWidestRange) {
    const Ranked plan = ranked(kernels, scratch.differences, runs, range);
    if (plan.bytes < static_cast<std::size_t>(width) * blocks_of(runs, 8)) {
      to_ranks(scratch.differences, runs, plan.common, plan.is_upward, scratch.ranks);
      std::uint8_t* const position = store_base(plan.common);
      *position = static_cast<std::uint8_t>((plan.is_upward ? kUpward : kDownward) + plan.last);
      return static_cast<std::size_t>(position + 1 - out) +
             kernels.write_ranks(scratch.ranks, runs, plan.last, position + 1);
    }
  }
  std::uint8_t* position = store_base(0);
  *position++ = static_cast<std::uint8_t>(width);
  if (width > 8)
    position +=
        kernels.write_bit_planes(scratch.high_differences, runs, false, width - 8, position);
  position +=
      kernels.write_bit_planes(scratch.differences, runs, false, std::min(width, 8), position);
  return static_cast<std::size_t>(position - out);
}

// The differences of `runs` scales from a base: bit planes, whose low bytes go to
// scratch.differences and the others to scratch.high_differences, or ranks, whose differences have
// a sign.
struct Form {
  int width;
  int last;
  bool is_upward;
};

Status read_form(const Kernels& kernels, int widest, std::size_t runs,
                 const std::uint8_t*& position, const std::uint8_t* end, ScaleScratch& scratch,
                 Form& form) {
  const int code = *position++;
  form = {code, 0, (code & kUpward) != 0};
  if (code > widest) {
    const int last = code - (form.is_upward ? kUpward : kDownward);
    if (last < 1 || last > kLastRank) return {Fault::kScaleForm, static_cast<std::uint64_t>(code)};
    form.last = last;
    position = kernels.read_ranks(position, end, runs, last, scratch.ranks);
    return position != nullptr ? Status{} : Status{Fault::kPayloadEnds};
  }
  const std::size_t plane_bytes = blocks_of(runs, 8);
  const std::size_t bytes = static_cast<std::size_t>(code) * plane_bytes;
  if (static_cast<std::size_t>(end - position) < bytes) return {Fault::kPayloadEnds};
  const int high_width = std::max(0, code - 8);
  if (high_width > 0)
    kernels.join(nullptr, position, plane_bytes, runs, false, high_width, scratch.high_differences);
  kernels.join(nullptr, position + static_cast<std::size_t>(high_width) * plane_bytes, plane_bytes,
               runs, false, code - high_width, scratch.differences);
  position += bytes;
  return {};
}

// The difference of a rank: 0, 1, -1, 2, -2, ...
int difference_of(int rank, bool is_upward) {
  const int distance = (rank + 1) / 2;
  return (rank % 2 != 0) == is_upward ? distance : -distance;
}

// base + difference_of(), modulo 256. In bytes only, so that the compiler vectorizes it.
void add_differences(const std::uint8_t* ranks, std::size_t runs, int base, bool is_upward,
                     std::uint8_t* scales) {
  const std::uint8_t odd_is_below = is_upward ? 0 : 1;
  const std::uint8_t first = static_cast<std::uint8_t>(base);
  for (std::size_t i = 0; i < runs; ++i) {
    const std::uint8_t rank = ranks[i];
    const std::uint8_t distance = static_cast<std::uint8_t>((rank >> 1) + (rank & 1));
    const std::uint8_t is_above = static_cast<std::uint8_t>((rank & 1) ^ odd_is_below);
    const std::uint8_t sign =
        static_cast<std::uint8_t>(is_above - 1);  // all bits set if the difference is negative
    scales[i] = static_cast<std::uint8_t>(
        first + static_cast<std::uint8_t>(static_cast<std::uint8_t>(distance ^ sign) - sign));
  }
}

struct Range {
  int smallest;
  int largest;
};

template <typename DifferenceAt>
Range range_of(std::size_t runs, DifferenceAt difference_at) {
  Range range = {INT32_MAX, INT32_MIN};
  for (std::size_t i = 0; i < runs; ++i) {
    range.smallest = std::min(range.smallest, difference_at(i));
    range.largest = std::max(range.largest, difference_at(i));
  }
  return range;
}

}  // namespace

std::size_t write_scales(const Kernels& kernels, const std::uint8_t* scales, std::size_t runs,
                         ScaleScratch& scratch, std::uint8_t* out) {
  std::uint8_t low = UINT8_MAX;
  std::uint8_t high = 0;
  for (std::size_t i = 0; i < runs; ++i) {
    low = std::min(low, scales[i]);
    high = std::max(high, scales[i]);
  }
  for (std::size_t i = 0; i < runs; ++i)
    scratch.differences[i] = static_cast<std::uint8_t>(scales[i] - low);
  return write_differences(kernels, high - low, runs, scratch, out, [&](int difference) {
    *out = static_cast<std::uint8_t>(low + difference);
    return out + 1;
  });
}

std::size_t write_steps(const Kernels& kernels, const std::int16_t* steps, std::size_t runs,
                        ScaleScratch& scratch, std::uint8_t* out) {
  const auto [low, high] = std::minmax_element(steps, steps + runs);
  const int lowest = *low;
  for (std::size_t i = 0; i < runs; ++i) {
    const unsigned difference = static_cast<unsigned>(steps[i] - lowest);
    scratch.differences[i] = static_cast<std::uint8_t>(difference);
    scratch.high_differences[i] = static_cast<std::uint8_t>(difference >> 8);
  }
  return write_differences(kernels, *high - lowest, runs, scratch, out, [&](int difference) {
    store(out, static_cast<std::uint16_t>(lowest + difference + kStepOffset));
    return out + 2;
  });
}

Status read_scales(const Kernels& kernels, const Format& format, std::size_t runs,
                   const std::uint8_t*& position, const std::uint8_t* end, ScaleScratch& scratch,
                   std::uint8_t* scales, bool& has_highest) {
  if (end - position < 2) return {Fault::kPayloadEnds};
  const int base = *position++;
  Form form;
  const Status status = read_form(kernels, kWidestFloat8, runs, position, end, scratch, form);
  if (!status.ok()) return status;
  const bool has_ranks = form.last != 0;
  const auto difference_at = [&](std::size_t i) {
    return has_ranks ? difference_of(scratch.ranks[i], form.is_upward) : scratch.differences[i];
  };
  Range range = {-(kLastRank + 1) / 2, (kLastRank + 1) / 2};
  if (has_ranks) {
    add_differences(scratch.ranks, runs, base, form.is_upward, scales);
  } else {
    for (std::size_t i = 0; i < runs; ++i)
      scales[i] = static_cast<std::uint8_t>(base + scratch.differences[i]);
    range = {0, kernels.largest_byte(scratch.differences, runs, 0xFF)};
  }
  const int lowest = format.float8->lowest_scale;
  const int highest = format.highest_scale;
  has_highest = false;
  if (base + range.smallest >= lowest && base + range.largest < highest) return {};
  range = range_of(runs, difference_at);  // the range above may be too wide
  has_highest = base + range.largest == highest;
  if (base + range.smallest >= lowest && base + range.largest <= highest) return {};
  return {Fault::kScaleRange, static_cast<std::uint64_t>(lowest),
          static_cast<std::uint64_t>(highest)};
}

Status read_steps(const Kernels& kernels, std::size_t runs, const std::uint8_t*& position,
                  const std::uint8_t* end, ScaleScratch& scratch, std::int16_t* steps) {
  if (end - position < 3) return {Fault::kPayloadEnds};
  const int base = static_cast<int>(load16(position)) - kStepOffset;
  position += 2;
  Form form;
  const Status status = read_form(kernels, kWidestStep, runs, position, end, scratch, form);
  if (!status.ok()) return status;
  const auto difference_at = [&](std::size_t i) {
    if (form.last != 0) return difference_of(scratch.ranks[i], form.is_upward);
    return scratch.differences[i] + (form.width > 8 ? scratch.high_differences[i] << 8 : 0);
  };
  const Range range = range_of(runs, difference_at);
  if (base + range.smallest < kLowestStep || base + range.largest > kHighestStep) {
    return {Fault::kScaleRange, kLowestStep + kStepOffset, kHighestStep + kStepOffset};
  }
  for (std::size_t i = 0; i < runs; ++i)
    steps[i] = static_cast<std::int16_t>(base + difference_at(i));
  return {};
}

}  // namespace fsl
