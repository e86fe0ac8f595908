#include "frame/payload.hpp"

#include <algorithm>
#include <cstring>

#include "bits.hpp"
#include "bytes.hpp"
#include "kernels/groups.hpp"
#include "quantise/scales.hpp"

namespace fsl {
namespace {

std::uint8_t rotate_left(unsigned code) { return static_cast<std::uint8_t>(code << 1 | code >> 7); }

}  // namespace

const ChunkPlan& PayloadWriter::plan(bool everything) {
  std::size_t sampled = 0;
  for (int p = 0; p < (format_.is_bytes() ? 1 : format_.split[0].planes); ++p) {
    sampled = count_sample(codes_.planes[p], codes_.count, 1, everything, scratch_.plan.counts[p]);
  }
  const PlanRequest request = {format_, codes_.count, sampled};
  const ChunkPlan* best = &plan_chunk(request, scratch_.plan);
  if (!format_.is_uniform()) return *best;
  // Groups are tried where enough codes are zero: a fourth, for groups of four half of them.
  const std::uint32_t zeros = scratch_.plan.counts[0].tables[0][kZeroCode];
  for (int index = 2; index < 4; ++index) {
    const int size = format_.split[index].group;
    if (zeros <= sampled >> (3 - size / 2)) break;
    const std::size_t symbols =
        count_sample(group(index).symbols, codes_.count, size, everything, scratch_.plan.counts[0]);
    best = &plan_groups(request, index, symbols, *best, scratch_.plan);
  }
  return *best;
}

// Both groups' symbols and bitmaps take as many bytes as the codes, and slack.
const PayloadWriter::Groups& PayloadWriter::group(int split_index) {
  const std::size_t count = blocks_of(codes_.count, 64) * 64;
  const int size = format_.split[split_index].group;
  Groups& groups = groups_[size / 4];
  std::uint8_t* const memory = scratch_.chunk_symbols.at_least(count + 4 * kSlackBytes);
  groups.symbols = size == 2 ? memory : memory + count / 2 + kSlackBytes;
  std::uint8_t* const bitmaps = memory + count / 2 + count / 4 + 2 * kSlackBytes;
  groups.listed = reinterpret_cast<std::uint64_t*>(bitmaps) + (size == 2 ? 0 : count / 64);
  kernels_.group(codes_.planes[0], codes_.count, size, groups.symbols, groups.listed);
  return groups;
}

bool PayloadWriter::is_constant(const ChunkPlan& plan, int p) const {
  const std::uint8_t constant = plan.planes[p].constant();
  const Split& split = format_.split[plan.split_index];
  if (split.sparse) return kernels_.count_byte(picked_[p], sizes_[p], constant) == sizes_[p];
  if (!format_.is_bytes())
    return kernels_.count_byte(codes_.planes[p], codes_.count, constant) == codes_.count;
  const std::size_t symbols = split.symbols_of(codes_.count);
  if (split.group > 1)
    return kernels_.count_byte(groups_[split.group / 4].symbols, symbols, constant) == symbols;
  const int shift = p == 1 ? 0 : 8 - split.widths[0];
  const unsigned mask = (1U << split.widths[p]) - 1;
  std::uint8_t differs[256];
  for (unsigned code = 0; code < 256; ++code) {
    const unsigned turned = split.rotated ? rotate_left(code) : code;
    differs[code] = (turned >> shift & mask) != constant;
  }
  for (std::size_t offset = 0; offset < codes_.count; offset += kBlockValues) {
    const std::size_t size = std::min(kBlockValues, codes_.count - offset);
    kernels_.map(codes_.planes[0] + offset, size, differs, scratch_.symbols[0]);
    if (kernels_.count_byte(scratch_.symbols[0], size, 1) != 0) return false;
  }
  return true;
}

// A plane's symbols are bits of existing bytes, except lower planes of 8-bit codes, which are
// extracted first.
PlaneSource PayloadWriter::source_of(const ChunkPlan& plan, int p) {
  if (!format_.is_bytes()) return {codes_.planes[p], 0};
  const Split& split = format_.split[plan.split_index];
  if (split.group > 1) return {groups_[split.group / 4].symbols, 0};
  if (p == 0)
    return {codes_.planes[0],
            split.widths[0] == 8 ? 0 : 8 - split.widths[0] - (split.rotated ? 1 : 0)};
  std::uint8_t entries[256];
  const unsigned mask = (1U << split.widths[1]) - 1;
  for (unsigned code = 0; code < 256; ++code)
    entries[code] = static_cast<std::uint8_t>((split.rotated ? rotate_left(code) : code) & mask);
  std::uint8_t* const symbols = scratch_.chunk_symbols.at_least(codes_.count);
  for (std::size_t offset = 0; offset < codes_.count; offset += kBlockValues) {
    kernels_.map(codes_.planes[0] + offset, std::min(kBlockValues, codes_.count - offset), entries,
                 symbols + offset);
  }
  return {symbols, 0};
}

// Writes the streams of the coded planes; false if one would end beyond `limit`. The payload begins
// at `out`.
bool PayloadWriter::write_streams(const ChunkPlan& plan, const std::uint8_t* out,
                                  std::uint8_t*& position, const std::uint8_t* limit) {
  summed_ = {header_checksum_, 0};
  const std::size_t count = format_.split[plan.split_index].symbols_of(codes_.count);
  for (int p = 0; p < format_.split[plan.split_index].planes; ++p) {
    const CodeTable* const table = plan.planes[p].table;
    if (table == nullptr) continue;
    sources_[p] = source_of(plan, p);
    uncoded_[p] =
        reinterpret_cast<std::uint64_t*>(scratch_.uncoded[p].at_least(8 * uncoded_words(count)));
    const unsigned mask = (1U << table->width) - 1;
    for (unsigned byte = 0; byte < 256; ++byte)
      number_of_[p][byte] = table->number_of[byte >> sources_[p].shift & mask];
    const Stream stream =
        write_stream(kernels_, *table, sources_[p], count, ahead_, scratch_.stream, uncoded_[p]);
    if (stream.size + 4 > static_cast<std::size_t>(limit - position)) return false;
    store(position, static_cast<std::uint32_t>(stream.size));
    position += 4;
    const std::uint32_t before =
        kernels_.crc32(summed_.value, out + summed_.bytes,
                       static_cast<std::size_t>(position - out) - summed_.bytes);
    summed_.value = kernels_.copy_crc32(before, stream.bytes, stream.size, position);
    position += stream.size;
    summed_.bytes = static_cast<std::size_t>(position - out);
  }
  return true;
}

std::size_t PayloadWriter::write_scales_of(std::size_t offset, std::size_t count,
                                           std::uint8_t* out) {
  if (!format_.is_bytes()) return 0;
  const std::size_t first = offset / settings_.block_values;
  const std::size_t runs = blocks_of(count, settings_.block_values);
  if (format_.is_uniform())
    return write_steps(kernels_, codes_.steps + first, runs, scratch_.for_scales, out);
  return write_scales(kernels_, codes_.scales + first, runs, scratch_.for_scales, out);
}

// Writes the codes of an inner block that have no digit.
std::size_t PayloadWriter::write_listed(int split_index, std::size_t offset, std::size_t count,
                                        std::uint8_t* out) const {
  const int size = format_.split[split_index].group;
  if (size == 1) return 0;
  const std::size_t listed =
      kernels_.pick(codes_.planes[0] + offset, groups_[size / 4].listed + offset / 64,
                    blocks_of(count, 64), out + 2);
  store(out, static_cast<std::uint16_t>(listed));
  return 2 + listed;
}

// Writes the list of symbols without a code. offset, count: of the plane's symbols.
std::size_t PayloadWriter::write_uncoded(const CodeTable& table, int p, std::size_t offset,
                                         std::size_t count, std::uint8_t* out) {
  if (table.escape == 0) return 0;
  std::uint8_t* const numbers = scratch_.numbers;
  const std::size_t found = kernels_.pick(sources_[p].bytes + offset, uncoded_[p] + offset / 64,
                                          blocks_of(count, 64), numbers);
  kernels_.map(numbers, found, number_of_[p], numbers);
  store(out, static_cast<std::uint16_t>(found));
  std::uint8_t* const position =
      out + 2 + kernels_.write_bit_planes(numbers, found, false, table.low_bits, out + 2);
  for (std::size_t i = 0; i < found; ++i)
    scratch_.ranks[i] = static_cast<std::uint8_t>(numbers[i] >> table.low_bits);
  return static_cast<std::size_t>(position - out) +
         kernels_.write_ranks(scratch_.ranks, found, table.last_rank(), position);
}

std::size_t PayloadWriter::write_plane(const ChunkPlan& plan, int p, std::size_t offset,
                                       std::size_t count, std::uint8_t* out) {
  const PlanePlan& plane = plan.planes[p];
  if (plane.kind == kPlaneConstant) return 0;
  const Split& split = format_.split[plan.split_index];
  offset /= static_cast<std::size_t>(split.group);
  count = split.symbols_of(count);
  if (plane.table != nullptr) return write_uncoded(*plane.table, p, offset, count, out);
  const std::uint8_t* const codes = format_.is_bytes() ? codes_.planes[0] : codes_.planes[p];
  const std::uint8_t* const from =
      (split.group > 1 ? groups_[split.group / 4].symbols : codes) + offset;
  const bool rotated = format_.is_bytes() && split.rotated;
  if (plane.width == 8) {
    std::memcpy(out, from, count);  // a plane of whole codes is never rotated
    return count;
  }
  // A whole code's first bit planes are the upper plane's; the surplus is overwritten.
  const bool is_alone = p == 1 || split.group > 1;
  kernels_.write_bit_planes(from, count, rotated, is_alone ? plane.width : 8, out);
  return static_cast<std::size_t>(plane.width) * blocks_of(count, 8);
}

Attempt PayloadWriter::write_coded(const ChunkPlan& plan, std::uint8_t* out, std::size_t& bytes,
                                   std::size_t& raw_bytes) {
  const std::size_t most = 4 * codes_.count;
  const bool is_sparse = format_.split[plan.split_index].sparse;
  const int planes = format_.split[plan.split_index].planes;
  for (int p = 0; p < planes + (is_sparse ? 2 : 0); ++p) {
    if (is_sparse && sizes_[p] == 0) continue;
    if (plan.planes[p].kind == kPlaneConstant && !is_constant(plan, p))
      return Attempt::kConstantPlane;
  }
  std::uint8_t* position = out;
  *position++ = static_cast<std::uint8_t>(plan.split_index);
  for (int p = 0; p < planes && !is_sparse; ++p) {
    std::memcpy(position, plan.planes[p].head, plan.planes[p].head_bytes);
    position += plan.planes[p].head_bytes;
  }
  if (static_cast<std::size_t>(position - out) > most ||
      !(is_sparse ? write_sparse(plan, position, out + most)
                  : write_streams(plan, out, position, out + most)))
    return Attempt::kTooLong;
  raw_bytes = 0;
  const float* escaped = codes_.escaped;
  for (std::size_t offset = 0; offset < codes_.count; offset += kBlockValues) {
    if (static_cast<std::size_t>(position - out) > most) return Attempt::kTooLong;
    const std::size_t size = std::min(kBlockValues, codes_.count - offset);
    const std::size_t scale_bytes = write_scales_of(offset, size, position);
    if (is_sparse) {
      position += format_.is_bytes() ? write_scales_in_use(offset, size, position) : 0;
    } else {
      position += scale_bytes;
      for (int p = 0; p < planes; ++p) position += write_plane(plan, p, offset, size, position);
      position += write_listed(plan.split_index, offset, size, position);
    }
    const std::size_t escapes = codes_.escapes[offset / kBlockValues];
    if (escapes > 0) std::memcpy(position, escaped, 4 * escapes);
    position += 4 * escapes;
    escaped += escapes;
    raw_bytes += scale_bytes + size * format_.code_bytes() + 4 * escapes;
  }
  bytes = static_cast<std::size_t>(position - out);
  return bytes > most ? Attempt::kTooLong : Attempt::kDone;
}

std::size_t PayloadWriter::write_raw_block(std::size_t offset, std::size_t count,
                                           std::uint8_t* out) const {
  if (format_.is_bytes()) {
    std::memcpy(out, codes_.planes[0] + offset, count);
    return count;
  }
  // bf16: the planes are the code rotated left by one, exponent first.
  for (std::size_t i = 0; i < count; ++i) {
    const unsigned rotated =
        static_cast<unsigned>(codes_.planes[0][offset + i] << 8 | codes_.planes[1][offset + i]);
    store(out + 2 * i, static_cast<std::uint16_t>(rotated >> 1 | rotated << 15));
  }
  return 2 * count;
}

Attempt PayloadWriter::write_raw_codes(std::uint8_t* out, std::size_t& bytes) {
  const std::size_t most = 4 * codes_.count;
  std::uint8_t* position = out;
  const float* escaped = codes_.escaped;
  for (std::size_t offset = 0; offset < codes_.count; offset += kBlockValues) {
    const std::size_t size = std::min(kBlockValues, codes_.count - offset);
    position += write_scales_of(offset, size, position);
    position += write_raw_block(offset, size, position);
    const std::size_t escapes = codes_.escapes[offset / kBlockValues];
    if (static_cast<std::size_t>(position - out) + 4 * escapes > most) return Attempt::kTooLong;
    if (escapes > 0) std::memcpy(position, escaped, 4 * escapes);
    position += 4 * escapes;
    escaped += escapes;
  }
  bytes = static_cast<std::size_t>(position - out);
  return Attempt::kDone;
}

}  // namespace fsl
