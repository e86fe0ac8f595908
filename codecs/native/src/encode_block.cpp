#include "encode_block.hpp"

#include <algorithm>
#include <cstring>

#include "frame.hpp"
#include "plan.hpp"

namespace fsl {
namespace {

int bits_needed(unsigned value) {
  int bits = 0;
  for (; value != 0; value >>= 1) ++bits;
  return bits;
}

std::uint8_t rotate_left(std::uint8_t code) { return static_cast<std::uint8_t>(code << 1 | code >> 7); }

}  // namespace

void BlockEncoder::quantise(const float* x, std::size_t count, std::uint32_t first_bits, Seen& seen, const Chores& chores) {
  x_ = x;
  count_ = count;
  escapes_ = 0;
  switch (format_.kind) {
    case Kind::kFloat32: {
      std::uint8_t* const planes[4] = {scratch_.planes[0], scratch_.planes[1], scratch_.planes[2], scratch_.planes[3]};
      kernels_.cut_float32(x, count, first_bits, planes, seen);
      break;
    }
    case Kind::kBfloat16: {
      std::uint8_t* const planes[2] = {scratch_.planes[0], scratch_.planes[1]};
      kernels_.cut_bfloat16(x, count, first_bits, planes, seen);
      break;
    }
    case Kind::kE4m3:
    case Kind::kE5m2:
      kernels_.quantise_float8(x, count, *format_.float8, settings_.block_values, first_bits, scratch_.codes, scratch_.scales, seen,
                               chores);
      break;
    case Kind::kUniform:
      escapes_ = kernels_.quantise_uniform(x, count, settings_.fineness, settings_.block_values, first_bits, scratch_.codes,
                                           scratch_.steps, seen, chores);
      break;
  }
}

void BlockEncoder::take(const std::uint8_t* codes, std::size_t count) {
  x_ = nullptr;
  count_ = count;
  escapes_ = 0;
  std::memcpy(scratch_.codes, codes, count);
}

void BlockEncoder::count() const {
  if (format_.is_bytes()) {
    count_symbols(scratch_.codes, count_, scratch_.counts[0]);
    return;
  }
  for (int p = 0; p < format_.split[0].planes; ++p) count_symbols(scratch_.planes[p], count_, scratch_.counts[p]);
}

// Runs of zeros, to which any scale would do, take the smallest of the others, so that they do not widen the range that is stored.
void BlockEncoder::settle_scales() {
  const std::size_t runs = blocks_of(count_, settings_.block_values);
  if (format_.is_uniform()) {
    std::int16_t* const steps = scratch_.steps;
    // kZeroRun, the lowest number, wraps around to the highest.
    std::uint16_t smallest = UINT16_MAX;
    for (std::size_t i = 0; i < runs; ++i) {
      const std::uint16_t turned = static_cast<std::uint16_t>(static_cast<std::uint16_t>(steps[i]) - static_cast<std::uint16_t>(kZeroRun + 1));
      smallest = std::min(smallest, turned);
    }
    const int settled = smallest == UINT16_MAX ? kLowestStep : smallest + kZeroRun + 1;
    for (std::size_t i = 0; i < runs; ++i) steps[i] = std::max(steps[i], static_cast<std::int16_t>(settled));
    return;
  }
  std::uint8_t* const scales = scratch_.scales;
  // 0, a run of zeros, wraps around to 255, which no scale is.
  std::uint8_t smallest = UINT8_MAX;
  for (std::size_t i = 0; i < runs; ++i) smallest = std::min(smallest, static_cast<std::uint8_t>(scales[i] - 1));
  const std::uint8_t settled = static_cast<std::uint8_t>(smallest == UINT8_MAX ? format_.float8->lowest_scale : smallest + 1);
  for (std::size_t i = 0; i < runs; ++i) scales[i] = std::max(scales[i], settled);
}

std::size_t BlockEncoder::write_scales(std::uint8_t* out) {
  if (!format_.is_bytes()) return 0;
  settle_scales();
  const std::size_t runs = blocks_of(count_, settings_.block_values);
  std::uint8_t* position = out;
  if (format_.is_uniform()) {
    const auto [low, high] = std::minmax_element(scratch_.steps, scratch_.steps + runs);
    const int lowest = *low;
    const unsigned widest = static_cast<unsigned>(*high - lowest);
    const int width = bits_needed(widest);
    store(position, static_cast<std::uint16_t>(lowest + kStepOffset));
    position[2] = static_cast<std::uint8_t>(width);
    position += 3;
    for (std::size_t i = 0; i < runs; ++i) {
      const unsigned difference = static_cast<unsigned>(scratch_.steps[i] - lowest);
      scratch_.differences[i] = static_cast<std::uint8_t>(difference);
      scratch_.high_differences[i] = static_cast<std::uint8_t>(difference >> 8);
    }
    if (width > 8) position += kernels_.write_bit_planes(scratch_.high_differences, runs, false, width - 8, position);
    position += kernels_.write_bit_planes(scratch_.differences, runs, false, std::min(width, 8), position);
    return static_cast<std::size_t>(position - out);
  }
  std::uint8_t low = UINT8_MAX;
  std::uint8_t high = 0;
  for (std::size_t i = 0; i < runs; ++i) {
    low = std::min(low, scratch_.scales[i]);
    high = std::max(high, scratch_.scales[i]);
  }
  const int width = bits_needed(static_cast<unsigned>(high - low));
  position[0] = low;
  position[1] = static_cast<std::uint8_t>(width);
  position += 2;
  for (std::size_t i = 0; i < runs; ++i) scratch_.differences[i] = static_cast<std::uint8_t>(scratch_.scales[i] - low);
  position += kernels_.write_bit_planes(scratch_.differences, runs, false, width, position);
  return static_cast<std::size_t>(position - out);
}

std::size_t BlockEncoder::write_raw_codes(std::uint8_t* out) {
  if (format_.is_bytes()) {
    std::memcpy(out, scratch_.codes, count_);
    return count_;
  }
  // bf16: the planes are the code rotated left by one, its exponent above.
  for (std::size_t i = 0; i < count_; ++i) {
    const unsigned rotated = static_cast<unsigned>(scratch_.planes[0][i] << 8 | scratch_.planes[1][i]);
    store(out + 2 * i, static_cast<std::uint16_t>(rotated >> 1 | rotated << 15));
  }
  return 2 * count_;
}

bool BlockEncoder::is_constant(const Split& split, int p, const PlanePlan& plane) const {
  if (!format_.is_bytes()) return kernels_.count_byte(scratch_.planes[p], count_, plane.constant()) == count_;
  const bool is_low = p == 1;
  const int shift = is_low ? 0 : 8 - plane.width;
  const unsigned mask = (1U << plane.width) - 1;
  std::uint8_t differs[256];
  for (unsigned code = 0; code < 256; ++code) differs[code] = (code & mask) != plane.constant();
  kernels_.rank(scratch_.codes, count_, split.rotated, shift, differs, scratch_.symbols[0]);
  return kernels_.count_byte(scratch_.symbols[0], count_, 1) == 0;
}

bool BlockEncoder::has_constant_planes(const ChunkPlan& plan) const {
  const Split& split = format_.split[plan.split_index];
  for (int p = 0; p < split.planes; ++p) {
    if (plan.planes[p].kind == kPlaneConstant && !is_constant(split, p, plan.planes[p])) return false;
  }
  return true;
}

std::size_t BlockEncoder::write_plane(const ChunkPlan& plan, int p, std::uint8_t* out, const Chores& chores) {
  const Split& split = format_.split[plan.split_index];
  const PlanePlan& plane = plan.planes[p];
  // 8-bit formats have at most two planes, cut from the codes; the others have planes of their own.
  const bool is_cut = format_.is_bytes();
  const std::uint8_t* const from = is_cut ? scratch_.codes : scratch_.planes[p];
  const bool rotated = is_cut && split.rotated;
  const bool is_low = is_cut && p == 1;

  if (plane.kind == kPlaneRaw) {
    if (plane.width == 8) {
      if (!rotated) {
        std::memcpy(out, from, count_);
      } else {
        for (std::size_t i = 0; i < count_; ++i) out[i] = rotate_left(from[i]);
      }
      return count_;
    }
    // The upper plane's bit planes come first among those of whole codes; what is written after them is overwritten.
    kernels_.write_bit_planes(from, count_, rotated, is_low ? plane.width : 8, out);
    return static_cast<std::size_t>(plane.width) * blocks_of(count_, 8);
  }

  if (plane.kind == kPlaneConstant) return is_constant(split, p, plane) ? 0 : SIZE_MAX;

  // The lower plane's ranks are found from whole (rotated) codes.
  const unsigned mask = (1U << plane.width) - 1;
  const std::uint8_t* ranks = plane.book->ranks;
  std::uint8_t of_whole_codes[256];
  if (is_low) {
    for (unsigned code = 0; code < 256; ++code) of_whole_codes[code] = ranks[code & mask];
    ranks = of_whole_codes;
  }
  const int shift = is_low ? 0 : 8 - plane.width;
  const int escape_rank = plane.book->escape_rank;
  std::uint8_t* const symbols = scratch_.symbols[0];
  kernels_.rank(from, count_, rotated, shift, ranks, symbols);

  // The list of escaped symbols follows the bitmaps, which destroy the ranks.
  std::size_t listed = 0;
  if (escape_rank != kNoEscape) {
    const std::size_t escapes = kernels_.find_byte(symbols, count_, static_cast<std::uint8_t>(escape_rank), scratch_.positions);
    for (; listed < escapes; ++listed) {
      const std::uint8_t code = from[scratch_.positions[listed]];
      const unsigned turned = rotated ? rotate_left(code) : code;
      scratch_.listed[listed] = static_cast<std::uint8_t>(turned >> shift & mask);
    }
  }
  const std::size_t tree_bytes = kernels_.write_tree(plane.book->nodes, symbols, count_, scratch_.tree, out, chores);
  std::memcpy(out + tree_bytes, scratch_.listed, listed);
  return tree_bytes + listed;
}

std::size_t BlockEncoder::write_escaped(std::uint8_t* out) const {
  if (escapes_ == 0) return 0;
  kernels_.find_byte(scratch_.codes, count_, 0, scratch_.positions);
  for (std::size_t i = 0; i < escapes_; ++i) std::memcpy(out + 4 * i, x_ + scratch_.positions[i], 4);
  return 4 * escapes_;
}

void BlockEncoder::leave(float* residual) const {
  const Output output = {Sink::kResidual, residual, 0.0F, x_};
  switch (format_.kind) {
    case Kind::kFloat32:
      std::memset(residual, 0, 4 * count_);
      break;
    case Kind::kBfloat16: {
      const std::uint8_t* const planes[2] = {scratch_.planes[0], scratch_.planes[1]};
      kernels_.join_bfloat16(planes, count_, output);
      break;
    }
    case Kind::kE4m3:
    case Kind::kE5m2:
      kernels_.dequantise_float8(scratch_.codes, scratch_.scales, count_, *format_.float8, settings_.block_values, output);
      break;
    case Kind::kUniform: {
      std::uint8_t* const escaped = reinterpret_cast<std::uint8_t*>(scratch_.escaped);
      write_escaped(escaped);
      kernels_.dequantise_uniform(scratch_.codes, scratch_.steps, escaped, count_, settings_.block_values, output);
      break;
    }
  }
}

}  // namespace fsl
