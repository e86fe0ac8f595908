#include "decode_chunk.hpp"

#include <algorithm>
#include <cstring>

namespace fsl {
namespace {

std::uint8_t rotate_right(unsigned code) { return static_cast<std::uint8_t>((code & 0xFF) >> 1 | (code & 1) << 7); }

}  // namespace

Block ChunkDecoder::scratch_block(std::size_t which) const {
  ReadBlock& read = scratch_.read[which];
  return {read.codes, {read.planes[0], read.planes[1], read.planes[2], read.planes[3]}, read.scales, read.steps, nullptr};
}

void ChunkDecoder::advance(Block& block, std::size_t count) const {
  if (!format_.is_bytes()) {
    for (std::uint8_t*& plane : block.planes) plane += count;
    return;
  }
  if (format_.is_uniform()) block.escaped += 4 * kernels_.count_byte(block.codes, count, 0);
  block.codes += count;
  block.scales += count / header_.block_values;
  block.steps += count / header_.block_values;
}

Status ChunkDecoder::open() {
  if (chunk_.mode == kConstant || chunk_.mode == kRawFloat32) {
    const std::size_t wanted = chunk_.mode == kConstant ? 4 : 4 * chunk_.count;
    if (left() < wanted) return {Fault::kPayloadEnds};
    position_ += wanted;
    return {};
  }
  if (chunk_.nonfinite && !format_.is_float32()) return {Fault::kFlaggedCodes, chunk_.index};
  if (chunk_.mode == kRawCodes) return format_.is_float32() ? Status{Fault::kRawCodesOfFloat32, chunk_.index} : Status{};
  if (left() < 1) return {Fault::kPayloadEnds};
  ChunkPlan& plan = scratch_.plans[0];
  plan.split_index = *position_++;
  if (plan.split_index >= format_.splits) {
    return {Fault::kSplit, static_cast<std::uint64_t>(plan.split_index), static_cast<std::uint64_t>(format_.kind)};
  }
  const Split& split = format_.split[plan.split_index];
  for (int p = 0; p < split.planes; ++p) {
    const Status status = read_plane_head(split.widths[p], plan.planes[p], plan.own[p]);
    if (!status.ok()) return status;
  }
  for (int p = 0; p < split.planes; ++p) {
    const Book* const book = plan.planes[p].book;
    if (book == nullptr) continue;
    const Status status = streams_[p].open(*book, chunk_.count, position_, end_, scratch_.lanes[p]);
    if (!status.ok()) return status;
  }
  return {};
}

Status ChunkDecoder::read_plane_head(int width, PlanePlan& plane, Book& own) {
  if (left() < 1) return {Fault::kPayloadEnds};
  plane.kind = *position_++;
  plane.width = width;
  plane.book = nullptr;
  const std::uint64_t wanted_width = static_cast<std::uint64_t>(width);
  switch (plane.kind) {
    case kPlaneRaw: return {};
    case kPlaneConstant:
      if (left() < 1) return {Fault::kPayloadEnds};
      plane.head[1] = *position_++;
      return plane.constant() >> width == 0 ? Status{} : Status{Fault::kPlaneConstant, plane.constant(), wanted_width};
    case kPlaneOwn:
      plane.book = &own;
      return unpack_book(position_, end_, width, own);
    case kPlaneStatic: {
      if (left() < 1) return {Fault::kPayloadEnds};
      const int number = *position_++;
      const StaticBooks fixed = static_books_of(format_.kind);
      if (number >= fixed.first && number < fixed.first + fixed.count) plane.book = &fixed.books[number - fixed.first];
      if (plane.book == nullptr || plane.book->width != width) return {Fault::kBookUnknown, static_cast<std::uint64_t>(number), wanted_width};
      return {};
    }
    case kPlaneShared: {
      if (left() < 8) return {Fault::kPayloadEnds};
      const std::uint64_t digest = load64(position_);
      position_ += 8;
      for (std::size_t i = 0; i < shared_.count; ++i) {
        if (shared_.books[i].digest == digest) plane.book = &shared_.books[i];
      }
      if (plane.book == nullptr || plane.book->width != width) return {Fault::kBookUnknown, digest, wanted_width};
      return {};
    }
    default: return {Fault::kPlaneKind, plane.kind};
  }
}

Status ChunkDecoder::read(std::size_t count, Block& block, const Chores& chores) {
  if (format_.is_bytes()) {
    const Status status = read_scales(count, block);
    if (!status.ok()) return status;
  }
  if (chunk_.mode == kRawCodes) {
    const Status status = read_raw_codes(count, block);
    if (!status.ok()) return status;
  } else if (format_.is_bytes()) {
    const Status status = read_codes(count, block.codes, chores);
    if (!status.ok()) return status;
  } else {
    for (int p = 0; p < format_.split[0].planes; ++p) {
      const Status status = read_symbols(p, count, block.planes[p], chores);
      if (!status.ok()) return status;
    }
  }
  return format_.is_uniform() ? read_escaped(count, block) : Status{};
}

Status ChunkDecoder::read_scales(std::size_t count, Block& block) {
  const std::size_t runs = blocks_of(count, header_.block_values);
  const std::size_t plane_bytes = blocks_of(runs, 8);
  const bool is_uniform = format_.is_uniform();
  const std::size_t base_bytes = is_uniform ? 2 : 1;
  if (left() < base_bytes + 1) return {Fault::kPayloadEnds};
  const unsigned base = is_uniform ? load16(position_) : *position_;
  const int width = position_[base_bytes];
  position_ += base_bytes + 1;
  if (width > (is_uniform ? 10 : 8)) return {Fault::kScaleWidth, static_cast<std::uint64_t>(width)};
  const std::size_t bytes = static_cast<std::size_t>(width) * plane_bytes;
  if (left() < bytes) return {Fault::kPayloadEnds};
  const unsigned lowest = is_uniform ? kLowestStep + kStepOffset : static_cast<unsigned>(format_.float8->lowest_scale);
  const unsigned highest = is_uniform ? kHighestStep + kStepOffset : static_cast<unsigned>(format_.highest_scale);

  const int high_width = width > 8 ? width - 8 : 0;
  unsigned largest = 0;
  kernels_.join(nullptr, position_ + static_cast<std::size_t>(high_width) * plane_bytes, runs, false, width - high_width,
                scratch_.differences);
  if (is_uniform) {
    if (high_width > 0) {
      kernels_.join(nullptr, position_, runs, false, high_width, scratch_.high_differences);
    } else {
      std::memset(scratch_.high_differences, 0, runs);
    }
    for (std::size_t i = 0; i < runs; ++i) {
      const unsigned difference = static_cast<unsigned>(scratch_.high_differences[i] << 8 | scratch_.differences[i]);
      largest = std::max(largest, difference);
      // Out of range only where the check below refuses.
      block.steps[i] = static_cast<std::int16_t>(static_cast<int>(base + difference) - kStepOffset);
    }
  } else {
    for (std::size_t i = 0; i < runs; ++i) {
      largest = std::max(largest, static_cast<unsigned>(scratch_.differences[i]));
      block.scales[i] = static_cast<std::uint8_t>(base + scratch_.differences[i]);
    }
  }
  position_ += bytes;
  if (base < lowest || base + largest > highest) return {Fault::kScaleRange, lowest, highest};
  return {};
}

// Puts the symbols without a code in place of the lowest of them, which stands for all.
Status ChunkDecoder::read_uncoded(const Book& book, std::size_t count, std::uint8_t* symbols) {
  const std::size_t found = kernels_.find_byte(symbols, count, book.lowest_uncoded, scratch_.positions);
  const std::size_t bytes = static_cast<std::size_t>(book.number_bits) * blocks_of(found, 8);
  if (left() < bytes) return {Fault::kPayloadEnds};
  std::uint8_t* const numbers = scratch_.listed;
  kernels_.join(nullptr, position_, found, false, book.number_bits, numbers);
  position_ += bytes;
  if (found > 0 && kernels_.largest_byte(numbers, found, 0xFF) >= book.uncoded) {
    return {Fault::kUncodedNumber, static_cast<std::uint64_t>(book.uncoded)};
  }
  for (std::size_t i = 0; i < found; ++i) symbols[scratch_.positions[i]] = book.symbol_of[numbers[i]];
  return {};
}

// A plane's symbols, whatever its kind.
Status ChunkDecoder::read_symbols(int p, std::size_t count, std::uint8_t* symbols, const Chores& chores) {
  const PlanePlan& plane = scratch_.plans[0].planes[p];
  if (plane.kind == kPlaneConstant) {
    std::memset(symbols, plane.constant(), count);
    return {};
  }
  if (plane.kind == kPlaneRaw) {
    const std::size_t bytes = plane.width == 8 ? count : static_cast<std::size_t>(plane.width) * blocks_of(count, 8);
    if (left() < bytes) return {Fault::kPayloadEnds};
    if (plane.width == 8) {
      std::memcpy(symbols, position_, count);
    } else {
      kernels_.join(nullptr, position_, count, false, plane.width, symbols);
    }
    position_ += bytes;
    return {};
  }
  const Status status = streams_[p].read(kernels_, count, symbols, chores);
  if (!status.ok() || plane.book->escape == 0) return status;
  return read_uncoded(*plane.book, count, symbols);
}

// 8-bit codes from their one or two planes.
Status ChunkDecoder::read_codes(std::size_t count, std::uint8_t* codes, const Chores& chores) {
  const ChunkPlan& plan = scratch_.plans[0];
  const Split& split = format_.split[plan.split_index];
  if (split.planes == 1) {
    const Status status = read_symbols(0, count, codes, chores);
    for (std::size_t i = 0; i < count && split.rotated; ++i) codes[i] = rotate_right(codes[i]);
    return status;
  }
  std::uint8_t* const high = scratch_.symbols[0];
  Status status = read_symbols(0, count, high, chores);
  if (!status.ok()) return status;
  const int low_width = split.widths[1];
  if (plan.planes[1].kind == kPlaneRaw) {
    // The usual case, in one pass.
    const std::size_t low_bytes = static_cast<std::size_t>(low_width) * blocks_of(count, 8);
    if (left() < low_bytes) return {Fault::kPayloadEnds};
    kernels_.join(high, position_, count, split.rotated, low_width, codes);
    position_ += low_bytes;
    return {};
  }
  std::uint8_t* const low = scratch_.symbols[1];
  status = read_symbols(1, count, low, chores);
  if (!status.ok()) return status;
  for (std::size_t i = 0; i < count; ++i) {
    const unsigned code = static_cast<unsigned>(high[i] << low_width | low[i]);
    codes[i] = split.rotated ? rotate_right(code) : static_cast<std::uint8_t>(code);
  }
  return {};
}

Status ChunkDecoder::read_raw_codes(std::size_t count, Block& block) {
  const std::size_t bytes = count * format_.code_bytes();
  if (left() < bytes) return {Fault::kPayloadEnds};
  if (format_.is_bytes()) {
    std::memcpy(block.codes, position_, count);
  } else {
    for (std::size_t i = 0; i < count; ++i) {
      const unsigned code = load16(position_ + 2 * i);
      block.planes[0][i] = static_cast<std::uint8_t>(code >> 7);
      block.planes[1][i] = static_cast<std::uint8_t>(code << 1 | code >> 15);
    }
  }
  position_ += bytes;
  return {};
}

Status ChunkDecoder::read_escaped(std::size_t count, Block& block) {
  const std::size_t escapes = kernels_.count_byte(block.codes, count, 0);
  if (left() / 4 < escapes) return {Fault::kPayloadEnds};
  block.escaped = position_;
  position_ += 4 * escapes;
  return {};
}

void ChunkDecoder::put(const Block& block, std::size_t count, const Output& output) {
  switch (format_.kind) {
    case Kind::kFloat32: {
      Seen seen;
      const std::uint8_t* const planes[4] = {block.planes[0], block.planes[1], block.planes[2], block.planes[3]};
      kernels_.join_float32(planes, count, output, seen);
      saw_nonfinite_ |= seen.largest_magnitude >= kFirstNonfinite;
      break;
    }
    case Kind::kBfloat16: {
      const std::uint8_t* const planes[2] = {block.planes[0], block.planes[1]};
      saw_nonfinite_ |= !kernels_.join_bfloat16(planes, count, output);
      break;
    }
    case Kind::kE4m3:
    case Kind::kE5m2:
      saw_nonfinite_ |= !kernels_.dequantise_float8(block.codes, block.scales, count, *format_.float8, header_.block_values, output);
      break;
    case Kind::kUniform:
      saw_nonfinite_ |= !kernels_.dequantise_uniform(block.codes, block.steps, block.escaped, count, header_.block_values, output);
      break;
  }
}

void ChunkDecoder::check(const Block& block, std::size_t count) {
  if (!format_.is_bytes()) {
    // All exponent bits set: infinity or NaN.
    saw_nonfinite_ |= kernels_.largest_byte(block.planes[0], count, 0xFF) == 0xFF;
    return;
  }
  if (format_.is_uniform()) {
    // Steps were checked, and 127 of the largest are finite.
    const std::size_t escapes = static_cast<std::size_t>(position_ - block.escaped) / 4;
    for (std::size_t i = 0; i < escapes; ++i) saw_nonfinite_ |= (load32(block.escaped + 4 * i) & kMagnitudeMask) >= kFirstNonfinite;
    return;
  }
  const Float8& float8 = *format_.float8;
  saw_nonfinite_ |= kernels_.largest_byte(block.codes, count, 0x7F) >= float8.special_code;
  // With the highest scale, codes overflow whose exponent brings them to 2^128.
  const std::size_t runs = blocks_of(count, header_.block_values);
  const int overflowing = (255 - format_.highest_scale + float8.exponent_bias) << float8.mantissa_bits;
  for (std::size_t run = 0; run < runs; ++run) {
    if (block.scales[run] < format_.highest_scale) continue;
    const std::size_t start = run * header_.block_values;
    const std::size_t length = std::min(header_.block_values, count - start);
    saw_nonfinite_ |= kernels_.largest_byte(block.codes + start, length, 0x7F) >= overflowing;
  }
}

void ChunkDecoder::put_values(std::size_t offset, std::size_t count, const Output& output) {
  Seen seen;
  if (chunk_.mode == kRawFloat32) {
    kernels_.copy_float32(chunk_.payload + 4 * offset, count, output, seen);
  } else {
    std::uint8_t* const bytes = reinterpret_cast<std::uint8_t*>(scratch_.x);
    for (std::size_t i = 0; i < count; ++i) std::memcpy(bytes + 4 * i, chunk_.payload, 4);
    kernels_.copy_float32(bytes, count, output, seen);
  }
  saw_nonfinite_ |= seen.largest_magnitude >= kFirstNonfinite;
}

Status ChunkDecoder::close() const {
  if (left() > 0) return {Fault::kBytesLeft, left()};
  if (saw_nonfinite_ != chunk_.nonfinite) return {Fault::kFlagDisagrees, chunk_.index};
  return {};
}

}  // namespace fsl
