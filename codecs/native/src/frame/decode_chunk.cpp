#include "frame/decode_chunk.hpp"

#include <algorithm>
#include <cstring>

#include "bytes.hpp"
#include "kernels/groups.hpp"
#include "quantise/scales.hpp"

namespace fsl {
namespace {

std::uint8_t rotate_right(unsigned code) {
  return static_cast<std::uint8_t>((code & 0xFF) >> 1 | (code & 1) << 7);
}

}  // namespace

Piece ChunkDecoder::scratch_piece(std::size_t offset) const {
  const std::size_t run = offset / header_.block_values;
  return {{scratch_.planes[0], scratch_.planes[1], scratch_.planes[2], scratch_.planes[3]},
          scratch_.scales + run,
          scratch_.steps + run,
          nullptr};
}

// A separate pass over a payload would wait for memory. Reading lanes leaves time to prefetch the
// payload and compute its checksum.
Status ChunkDecoder::begin_checksum() {
  sums_beside_ = kernels_.begin_checksum != nullptr && format_.is_bytes() &&
                 chunk_.mode == kCoded && chunk_.payload_bytes >= kLeastBeside;
  if (!sums_beside_) return check_checksum(kernels_, header_, chunk_);
  kernels_.begin_checksum(header_.checksum, chunk_.payload, chunk_.payload_bytes, beside_.checksum);
  return {};
}

Status ChunkDecoder::end_checksum() {
  if (!sums_beside_) return {};
  sums_beside_ = false;
  return check_checksum(kernels_, kernels_.end_checksum(beside_.checksum), chunk_);
}

Status ChunkDecoder::open() {
  if (chunk_.mode == kConstant || chunk_.mode == kRawFloat32) {
    const std::size_t wanted = chunk_.mode == kConstant ? 4 : 4 * chunk_.count;
    if (left() < wanted) return {Fault::kPayloadEnds};
    position_ += wanted;
    return {};
  }
  if (chunk_.nonfinite && !format_.is_float32()) return {Fault::kFlaggedCodes, chunk_.index};
  if (chunk_.mode == kRawCodes)
    return format_.is_float32() ? Status{Fault::kRawCodesOfFloat32, chunk_.index} : Status{};
  if (left() < 1) return {Fault::kPayloadEnds};
  ChunkPlan& plan = scratch_.plan.plans[0];
  plan.split_index = *position_++;
  if (plan.split_index >= format_.splits) {
    return {Fault::kSplit, static_cast<std::uint64_t>(plan.split_index),
            static_cast<std::uint64_t>(format_.kind)};
  }
  const Split& split = format_.split[plan.split_index];
  is_sparse_ = split.sparse;
  if (is_sparse_) return open_sparse();
  for (int p = 0; p < split.planes; ++p) {
    const Status status = read_plane_head(split.widths[p], plan.planes[p], plan.own[p]);
    if (!status.ok()) return status;
  }
  for (int p = 0; p < split.planes; ++p) {
    const CodeTable* const table = plan.planes[p].table;
    if (table == nullptr) continue;
    const Status status = streams_[p].open(*table, split.symbols_of(chunk_.count), position_, end_,
                                           scratch_.lanes[p]);
    if (!status.ok()) return status;
  }
  return {};
}

Status ChunkDecoder::read_plane_head(int width, PlanePlan& plane, CodeTable& own) {
  if (left() < 1) return {Fault::kPayloadEnds};
  plane.kind = *position_++;
  plane.width = width;
  plane.table = nullptr;
  const std::uint64_t wanted_width = static_cast<std::uint64_t>(width);
  switch (plane.kind) {
    case kPlaneRaw:
      return {};
    case kPlaneConstant:
      if (left() < 1) return {Fault::kPayloadEnds};
      plane.head[1] = *position_++;
      return plane.constant() >> width == 0
                 ? Status{}
                 : Status{Fault::kPlaneConstant, plane.constant(), wanted_width};
    case kPlaneOwn:
      plane.table = &own;
      return unpack_table(position_, end_, width, own);
    default:
      return {Fault::kPlaneKind, plane.kind};
  }
}

Status ChunkDecoder::open_block(std::size_t count, const Piece& first) {
  const std::uint8_t* const start = position_;
  const Status status = read_block(count, first);
  block_bytes_ = static_cast<std::size_t>(position_ - start);
  return status;
}

void ChunkDecoder::fetch_next_block(std::size_t offset) const {
  if (!sums_beside_) return;
  constexpr std::size_t kMost = 2048;  // more is read in long rows, which hardware prefetches
  const std::size_t part = std::min(block_bytes_ / (kBlockValues / kPieceValues) + 64, kMost);
  const std::uint8_t* const from = position_ + std::min(offset / kPieceValues * part, left());
  for (std::size_t i = 0; i < std::min(part, static_cast<std::size_t>(end_ - from)); i += 64)
    __builtin_prefetch(from + i);
}

Status ChunkDecoder::read_block(std::size_t count, const Piece& first) {
  if (format_.is_bytes()) {
    const Status status = is_sparse_
                              ? read_scales_in_use(count, first)
                              : read_scales_of(blocks_of(count, header_.block_values), first);
    if (!status.ok()) return status;
  }
  if (is_sparse_) return {};
  if (chunk_.mode == kRawCodes) {
    const std::size_t bytes = count * format_.code_bytes();
    if (left() < bytes) return {Fault::kPayloadEnds};
    planes_[0].raw = position_;
    position_ += bytes;
    return {};
  }
  const ChunkPlan& plan = scratch_.plan.plans[0];
  const Split& split = format_.split[plan.split_index];
  for (int p = 0; p < split.planes; ++p) {
    const Status status = open_plane(p, split.symbols_of(count));
    if (!status.ok()) return status;
  }
  return split.group > 1 ? open_listed(count) : Status{};
}

Status ChunkDecoder::read_scales_of(std::size_t runs, const Piece& first) {
  if (format_.is_uniform())
    return read_steps(kernels_, runs, position_, end_, scratch_.for_scales, first.steps);
  return read_scales(kernels_, format_, runs, position_, end_, scratch_.for_scales, first.scales,
                     has_highest_scale_);
}

// Reads the block's codes without a digit. They have no slack in the payload, so they are copied.
Status ChunkDecoder::open_listed(std::size_t count) {
  const int size = format_.split[scratch_.plan.plans[0].split_index].group;
  if (left() < 2) return {Fault::kPayloadEnds};
  const std::size_t listed = load16(position_);
  position_ += 2;
  if (listed > count) return {Fault::kListedCount, listed, count};
  if (left() < listed) return {Fault::kPayloadEnds};
  std::uint8_t* const codes = scratch_.listed[1];  // of no plane: groups have one
  std::memcpy(codes, position_, listed);
  position_ += listed;
  listed_ = codes;
  listed_end_ = codes + listed;
  const bool any =
      std::any_of(codes, codes + listed, [=](std::uint8_t code) { return has_digit(code, size); });
  return any ? Status{Fault::kListedCode} : Status{};
}

Status ChunkDecoder::read_groups(std::size_t count, std::uint8_t* codes) {
  const Split& split = format_.split[scratch_.plan.plans[0].split_index];
  const std::size_t symbols = split.symbols_of(count);
  const Status status = read_symbols(0, symbols, scratch_.symbols[0]);
  if (!status.ok()) return status;
  kernels_.ungroup(scratch_.symbols[0], count, split.group, listed_, codes);
  const unsigned filled = fill_of(count, split.group);
  if ((scratch_.symbols[0][symbols - 1] & filled) != (filled & zeros_of(split.group)))
    return {Fault::kGroupFill};
  return listed_ > listed_end_ ? Status{Fault::kListedLeft} : Status{};
}

// Finds a plane's raw data, or reads its listed symbols.
Status ChunkDecoder::open_plane(int p, std::size_t count) {
  const PlanePlan& plan = scratch_.plan.plans[0].planes[p];
  PlaneData& data = planes_[p];
  std::uint8_t* const listed = scratch_.listed[p];
  data.listed = listed;
  data.listed_end = listed;
  if (plan.kind == kPlaneRaw) {
    data.plane_bytes = plan.width == 8 ? count : blocks_of(count, 8);
    const std::size_t bytes =
        plan.width == 8 ? count : static_cast<std::size_t>(plan.width) * data.plane_bytes;
    if (left() < bytes) return {Fault::kPayloadEnds};
    data.raw = position_;
    position_ += bytes;
    return {};
  }
  if (plan.kind == kPlaneConstant || plan.table->escape == 0) return {};
  const CodeTable& table = *plan.table;
  if (left() < 2) return {Fault::kPayloadEnds};
  const std::size_t uncoded = load16(position_);
  position_ += 2;
  if (uncoded > count) return {Fault::kUncodedCount, uncoded, count};
  const std::size_t plane_bytes = blocks_of(uncoded, 8);
  const std::size_t bytes = static_cast<std::size_t>(table.low_bits) * plane_bytes;
  if (left() < bytes) return {Fault::kPayloadEnds};
  const std::uint8_t* const behind =
      kernels_.read_ranks(position_ + bytes, end_, uncoded, table.last_rank(), scratch_.ranks);
  if (behind == nullptr) return {Fault::kPayloadEnds};
  kernels_.join(scratch_.ranks, position_, plane_bytes, uncoded, false, table.low_bits, listed);
  position_ = behind;
  if (uncoded > 0 && kernels_.largest_byte(listed, uncoded, 0xFF) >= table.uncoded) {
    return {Fault::kUncodedNumber, static_cast<std::uint64_t>(table.uncoded)};
  }
  kernels_.map(listed, uncoded, table.symbol_of, listed);
  data.listed_end = listed + uncoded;
  return {};
}

Status ChunkDecoder::close_block() {
  if (chunk_.mode == kRawCodes) return {};
  for (const PlaneData& data : planes_) {
    if (data.listed != data.listed_end) return {Fault::kUncodedLeft};
  }
  return listed_ == listed_end_ ? Status{} : Status{Fault::kListedLeft};
}

Status ChunkDecoder::read(std::size_t count, Piece& piece) {
  if (is_sparse_) read_sparse(count, piece);
  if (!format_.is_bytes()) {
    if (is_sparse_) return {};
    if (chunk_.mode == kRawCodes) {
      read_raw_codes(count, piece);
      return {};
    }
    for (int p = 0; p < format_.split[0].planes; ++p) {
      const Status status = read_symbols(p, count, piece.planes[p]);
      if (!status.ok()) return status;
    }
    return {};
  }
  CodesRead codes = {piece.codes(), 0};
  if (chunk_.mode == kRawCodes || is_sparse_) {
    if (!is_sparse_) read_raw_codes(count, piece);
    codes.largest = kernels_.largest_byte(piece.codes(), count, 0x7F);
  } else {
    const Status status = read_codes(count, codes);
    if (!status.ok()) return status;
  }
  if (!format_.is_uniform()) {
    check_codes(piece, count, codes.largest);
    return {};
  }
  // The escaped values of all the block's pieces follow its planes. Steps were checked: 127 of the
  // largest is finite.
  const std::size_t escapes = kernels_.count_byte(piece.codes(), count, 0);
  if (left() / 4 < escapes) return {Fault::kPayloadEnds};
  piece.escaped = position_;
  for (std::size_t i = 0; i < escapes; ++i)
    saw_nonfinite_ |= (load32(position_ + 4 * i) & kMagnitudeMask) >= kFirstNonfinite;
  position_ += 4 * escapes;
  return {};
}

// For 8-bit float formats; `largest` is the piece's largest code without sign.
void ChunkDecoder::check_codes(const Piece& piece, std::size_t count, std::uint8_t largest) {
  const Float8& float8 = *format_.float8;
  saw_nonfinite_ |= largest >= float8.special_code;
  if (!has_highest_scale_) return;
  // With the highest scale, codes from this one on reach 2^128.
  const std::size_t runs = blocks_of(count, header_.block_values);
  const int overflowing = (255 - format_.highest_scale + float8.exponent_bias)
                          << float8.mantissa_bits;
  for (std::size_t run = 0; run < runs; ++run) {
    if (piece.scales[run] < format_.highest_scale) continue;
    const std::size_t start = run * header_.block_values;
    const std::size_t length = std::min(header_.block_values, count - start);
    saw_nonfinite_ |= kernels_.largest_byte(piece.codes() + start, length, 0x7F) >= overflowing;
  }
}

// Reads a plane's symbols, of any kind.
Status ChunkDecoder::read_symbols(int p, std::size_t count, std::uint8_t* symbols) {
  const PlanePlan& plane = scratch_.plan.plans[0].planes[p];
  PlaneData& data = planes_[p];
  if (plane.kind == kPlaneConstant) {
    std::memset(symbols, plane.constant(), count);
    return {};
  }
  if (plane.kind == kPlaneRaw) {
    if (plane.width == 8) {
      std::memcpy(symbols, data.raw, count);
      data.raw += count;
    } else {
      kernels_.join(nullptr, data.raw, data.plane_bytes, count, false, plane.width, symbols);
      data.raw += count / 8;
    }
    return {};
  }
  const Status status = streams_[p].read(kernels_, count, data.listed, symbols, beside_);
  return status.ok() && data.listed > data.listed_end ? Status{Fault::kUncodedLeft} : status;
}

// Reads 8-bit codes from their one or two planes.
Status ChunkDecoder::read_codes(std::size_t count, CodesRead& read) {
  if (format_.split[scratch_.plan.plans[0].split_index].group > 1)
    return read_groups(count, read.codes);
  if (has_usual_planes()) {
    PlaneData& upper = planes_[0];
    const TwoPlanes below = take_below(count);
    const Status status =
        streams_[0].read_codes(kernels_, count, upper.listed, below, read, beside_);
    return status.ok() && upper.listed > upper.listed_end ? Status{Fault::kUncodedLeft} : status;
  }
  const Status status = join_codes(count, read.codes);
  if (status.ok()) read.largest = kernels_.largest_byte(read.codes, count, 0x7F);
  return status;
}

// Coded symbols above two bit planes, which are read in one pass.
bool ChunkDecoder::has_usual_planes() const {
  const ChunkPlan& plan = scratch_.plan.plans[0];
  return format_.split[plan.split_index].planes == 2 && plan.planes[0].table != nullptr &&
         plan.planes[1].kind == kPlaneRaw;
}

// The lower plane's bits of the next `count` symbols.
TwoPlanes ChunkDecoder::take_below(std::size_t count) {
  PlaneData& lower = planes_[1];
  const TwoPlanes below = {lower.raw, lower.raw + lower.plane_bytes,
                           format_.split[scratch_.plan.plans[0].split_index].rotated};
  lower.raw += count / 8;
  return below;
}

bool ChunkDecoder::puts_while_reading(std::size_t count) const {
  if (is_sparse_ || kernels_.read_float8 == nullptr || chunk_.mode != kCoded ||
      !format_.is_bytes() || !has_usual_planes() || !streams_[0].reads_values(count))
    return false;
  return format_.is_uniform() || (header_.block_values >= 64 && !has_highest_scale_);
}

Status ChunkDecoder::read_and_put(std::size_t count, Piece& piece, const Output& output) {
  if (!puts_while_reading(count)) {
    const Status status = read(count, piece);
    if (status.ok()) put(piece, count, output);
    return status;
  }
  PlaneData& upper = planes_[0];
  const TwoPlanes below = take_below(count);
  ValuesRead found;
  Status status;
  if (format_.is_uniform()) {
    const UniformValues values = {piece.steps, header_.block_values, position_, left() / 4};
    status = streams_[0].read_uniform(kernels_, count, upper.listed, below, values, output, found,
                                      beside_);
  } else {
    const Float8Values values = {*format_.float8, piece.scales, header_.block_values};
    status = streams_[0].read_float8(kernels_, count, upper.listed, below, values, output, found,
                                     beside_);
    saw_nonfinite_ |= found.largest_code >= format_.float8->special_code;
  }
  if (!status.ok()) return status;
  if (upper.listed > upper.listed_end) return {Fault::kUncodedLeft};
  if (left() / 4 < found.escapes) return {Fault::kPayloadEnds};
  position_ += 4 * found.escapes;
  saw_nonfinite_ |= !found.finite;
  return {};
}

// Reads 8-bit codes plane by plane.
Status ChunkDecoder::join_codes(std::size_t count, std::uint8_t* codes) {
  const ChunkPlan& plan = scratch_.plan.plans[0];
  const Split& split = format_.split[plan.split_index];
  if (split.planes == 1)
    return read_symbols(0, count, codes);  // a split of one plane is never rotated
  const int low_width = split.widths[1];
  std::uint8_t* const high = scratch_.symbols[0];
  Status status = read_symbols(0, count, high);
  if (!status.ok()) return status;
  if (plan.planes[1].kind == kPlaneRaw) {
    PlaneData& data = planes_[1];
    kernels_.join(high, data.raw, data.plane_bytes, count, split.rotated, low_width, codes);
    data.raw += count / 8;
    return {};
  }
  std::uint8_t* const low = scratch_.symbols[1];
  status = read_symbols(1, count, low);
  if (!status.ok()) return status;
  for (std::size_t i = 0; i < count; ++i) {
    const unsigned code = static_cast<unsigned>(high[i] << low_width | low[i]);
    codes[i] = split.rotated ? rotate_right(code) : static_cast<std::uint8_t>(code);
  }
  return {};
}

void ChunkDecoder::read_raw_codes(std::size_t count, const Piece& piece) {
  const std::uint8_t*& raw = planes_[0].raw;
  if (format_.is_bytes()) {
    std::memcpy(piece.codes(), raw, count);
  } else {
    for (std::size_t i = 0; i < count; ++i) {
      const unsigned code = load16(raw + 2 * i);
      piece.planes[0][i] = static_cast<std::uint8_t>(code >> 7);
      piece.planes[1][i] = static_cast<std::uint8_t>(code << 1 | code >> 15);
    }
  }
  raw += count * format_.code_bytes();
}

void ChunkDecoder::put(const Piece& piece, std::size_t count, const Output& output) {
  switch (format_.kind) {
    case Kind::kFloat32: {
      Seen seen;
      const std::uint8_t* const planes[4] = {piece.planes[0], piece.planes[1], piece.planes[2],
                                             piece.planes[3]};
      kernels_.join_float32(planes, count, output, seen);
      saw_nonfinite_ |= seen.largest_magnitude >= kFirstNonfinite;
      break;
    }
    case Kind::kBfloat16: {
      const std::uint8_t* const planes[2] = {piece.planes[0], piece.planes[1]};
      saw_nonfinite_ |= !kernels_.join_bfloat16(planes, count, output);
      break;
    }
    case Kind::kE4m3:
    case Kind::kE5m2:
      kernels_.dequantise_float8(piece.codes(), piece.scales, count, *format_.float8,
                                 header_.block_values, output);
      break;
    case Kind::kUniform:
      kernels_.dequantise_uniform(piece.codes(), piece.steps, piece.escaped, count,
                                  header_.block_values, output);
      break;
  }
}

void ChunkDecoder::check(const Piece& piece, std::size_t count) {
  if (format_.is_bytes()) return;
  // All exponent bits set: infinity or NaN.
  saw_nonfinite_ |= kernels_.largest_byte(piece.planes[0], count, 0xFF) == 0xFF;
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
