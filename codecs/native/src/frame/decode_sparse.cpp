// Reads the planes of a sparse chunk (docs/WIRE.md, "Sparse chunks").
#include <algorithm>
#include <cstring>

#include "bits.hpp"
#include "frame/decode_chunk.hpp"

namespace fsl {

// Reads a plane from its head to its last list.
Status ChunkDecoder::read_whole_plane(std::size_t count, std::uint8_t* symbols) {
  if (count == 0) return {};
  ChunkPlan& plan = scratch_.plan.plans[0];
  Status status = read_plane_head(8, plan.planes[0], plan.own[0]);
  if (status.ok() && plan.planes[0].table != nullptr)
    status = streams_[0].open(*plan.planes[0].table, count, position_, end_, scratch_.lanes[0],
                              kManyLanesFromSparse);
  for (std::size_t offset = 0; offset < count && status.ok(); offset += kBlockValues) {
    const std::size_t size = std::min(kBlockValues, count - offset);
    status = open_plane(0, size);
    if (status.ok()) status = read_symbols(0, size, symbols + offset);
    if (status.ok() && planes_[0].listed != planes_[0].listed_end) status = {Fault::kUncodedLeft};
  }
  return status;
}

// Memory is for numbers of symbols that the masks, once read, announce; never more than the chunk's
// values.
Status ChunkDecoder::open_sparse() {
  const std::size_t groups = blocks_of(chunk_.count, 8);
  const std::size_t mask_words = blocks_of(chunk_.count, 64);
  const std::size_t upper_words = blocks_of(groups, 64);
  const std::size_t mask_bytes = 8 * mask_words + kSlackBytes;
  std::uint8_t* const masks =
      scratch_.sparse_masks.at_least(2 * mask_bytes + 8 * upper_words + kSlackBytes);
  std::uint8_t* const upper = masks + 2 * mask_bytes;
  std::uint64_t* const upper_bits = reinterpret_cast<std::uint64_t*>(upper);
  mask_ = reinterpret_cast<std::uint64_t*>(masks);
  const std::size_t upper_bytes = blocks_of(groups, 8);
  Status status = read_whole_plane(upper_bytes, upper);
  if (!status.ok()) return status;
  std::fill(upper + upper_bytes, upper + 8 * upper_words, std::uint8_t{0});
  if (groups % 64 != 0 && upper_bits[upper_words - 1] >> groups % 64 != 0) return {Fault::kMaskEnd};
  const std::size_t bytes = kernels_.count_ones(upper_bits, upper_words);
  std::uint8_t* const shown = masks + mask_bytes;
  status = read_whole_plane(bytes, shown);
  if (!status.ok()) return status;
  if (kernels_.count_byte(shown, bytes, 0) != 0) return {Fault::kMaskByte};
  mask_[mask_words - 1] = 0;
  kernels_.spread(shown, upper_bits, groups, 0, masks);
  if (chunk_.count % 64 != 0 && mask_[mask_words - 1] >> chunk_.count % 64 != 0)
    return {Fault::kMaskEnd};
  const std::size_t codes = kernels_.count_ones(mask_, mask_words);
  const std::size_t planes = format_.planes_of_codes();
  const std::size_t words = blocks_of(codes, 64);
  const std::size_t plane_bytes = 64 * words + kSlackBytes;
  std::uint8_t* const memory = scratch_.sparse_codes.at_least(planes * plane_bytes + 16 * words);
  std::uint64_t* const found = reinterpret_cast<std::uint64_t*>(memory + planes * plane_bytes);
  std::fill_n(found, words, 0);
  for (std::size_t p = 0; p < planes; ++p) {
    std::uint8_t* const symbols = memory + p * plane_bytes;
    picked_[p] = symbols;
    status = read_whole_plane(codes, symbols);
    if (!status.ok()) return status;
    kernels_.mark(symbols, codes, format_.zero_code(), found + words);
    for (std::size_t word = 0; word < words; ++word) found[word] |= found[words + word];
  }
  return kernels_.count_ones(found, words) == codes ? Status{} : Status{Fault::kMaskCode};
}

void ChunkDecoder::read_sparse(std::size_t count, const Piece& piece) {
  const std::uint64_t* const mask = mask_ + sparse_offset_ / 64;
  for (std::size_t p = 0; p < format_.planes_of_codes(); ++p)
    picked_[p] += kernels_.spread(picked_[p], mask, count, format_.zero_code(), piece.planes[p]);
  sparse_offset_ += count;
}

// Reads the scales of the runs that have codes; the others get any that the format has.
Status ChunkDecoder::read_scales_in_use(std::size_t count, const Piece& first) {
  const std::size_t runs = blocks_of(count, header_.block_values);
  const RunsInUse in_use(mask_ + sparse_offset_ / 64, count, header_.block_values);
  std::size_t left = 0;
  for (std::size_t run = 0; run < runs; ++run) left += in_use(run);
  has_highest_scale_ = false;
  const Status status = left == 0 ? Status{} : read_scales_of(left, first);
  if (!status.ok()) return status;
  // Unpredictable, so without branches.
  for (std::size_t run = runs; run-- > 0;) {
    const bool has_codes = in_use(run);
    left -= has_codes;
    if (format_.is_uniform()) {
      first.steps[run] = static_cast<std::int16_t>(first.steps[left] * has_codes);
    } else {
      first.scales[run] =
          static_cast<std::uint8_t>(has_codes * first.scales[left] + !has_codes * 127);
    }
  }
  return {};
}

}  // namespace fsl
