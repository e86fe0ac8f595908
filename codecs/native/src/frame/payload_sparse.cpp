// The sparse splits of a chunk (docs/WIRE.md, "Sparse chunks").
#include <algorithm>
#include <cstring>

#include "bits.hpp"
#include "bytes.hpp"
#include "frame/payload.hpp"

namespace fsl {

// Makes the masks, padded with zeros to whole words, and the planes' symbols.
const ChunkPlan& PayloadWriter::plan_sparse(bool everything) {
  const std::size_t words = blocks_of(codes_.count, 64);
  const std::size_t groups = blocks_of(codes_.count, 8);
  const std::size_t planes = format_.planes_of_codes();
  const std::size_t plane_bytes = codes_.count + kSlackBytes;
  const std::size_t mask_bytes = 8 * words + kSlackBytes;
  const std::size_t upper_bytes = 8 * blocks_of(groups, 64) + kSlackBytes;
  std::uint8_t* memory =
      scratch_.sparse.at_least(2 * mask_bytes + upper_bytes + planes * plane_bytes);
  mask_ = reinterpret_cast<std::uint64_t*>(memory);
  std::uint64_t* const upper = reinterpret_cast<std::uint64_t*>(memory += mask_bytes);
  picked_[1] = memory += upper_bytes;
  picked_[2] = memory += mask_bytes;
  for (std::size_t p = 1; p < planes; ++p) picked_[2 + p] = memory += plane_bytes;
  kernels_.mark(codes_.planes[0], codes_.count, format_.zero_code(), mask_);
  std::uint64_t* const also = reinterpret_cast<std::uint64_t*>(picked_[2]);
  for (std::size_t p = 1; p < planes; ++p) {
    kernels_.mark(codes_.planes[p], codes_.count, 0, also);
    for (std::size_t word = 0; word < words; ++word) mask_[word] |= also[word];
  }
  const std::uint8_t* const mask = reinterpret_cast<const std::uint8_t*>(mask_);
  kernels_.mark(mask, groups, 0, upper);
  picked_[0] = reinterpret_cast<std::uint8_t*>(upper);
  sizes_[0] = blocks_of(groups, 8);
  sizes_[1] = kernels_.pick(mask, upper, blocks_of(groups, 64), picked_[1]);
  for (std::size_t p = 0; p < planes; ++p)
    sizes_[2 + p] = kernels_.pick(codes_.planes[p], mask_, words, picked_[2 + p]);
  return fsl::plan_sparse(format_, picked_, sizes_, everything, scratch_.plan);
}

// Other splits take at least a bit a symbol; groups of four also 10 for a code that they list.
bool PayloadWriter::is_cheap(const ChunkPlan& sparse) const {
  std::uint64_t least = codes_.count * format_.code_bytes();
  if (format_.is_uniform()) {
    const std::size_t ones = kernels_.count_byte(picked_[2], sizes_[2], 127) +
                             kernels_.count_byte(picked_[2], sizes_[2], 129);
    least = codes_.count / 4 + 10 * (sizes_[2] - ones);
  }
  return sparse.cost_bits <= least;
}

// The scales of the runs that have codes.
std::size_t PayloadWriter::write_scales_in_use(std::size_t offset, std::size_t count,
                                               std::uint8_t* out) {
  const std::size_t first = offset / settings_.block_values;
  const std::size_t runs = blocks_of(count, settings_.block_values);
  const RunsInUse in_use(mask_ + offset / 64, count, settings_.block_values);
  std::size_t found = 0;
  for (std::size_t run = 0; run < runs; ++run) {
    if (format_.is_uniform()) {
      scratch_.steps[found] = codes_.steps[first + run];
    } else {
      scratch_.scales[found] = codes_.scales[first + run];
    }
    found += in_use(run);
  }
  if (found == 0) return 0;
  if (format_.is_uniform())
    return write_steps(kernels_, scratch_.steps, found, scratch_.for_scales, out);
  return write_scales(kernels_, scratch_.scales, found, scratch_.for_scales, out);
}

// Writes all planes; false if they would end beyond `limit`.
bool PayloadWriter::write_sparse(const ChunkPlan& plan, std::uint8_t*& position,
                                 const std::uint8_t* limit) {
  summed_ = {header_checksum_, 0};
  for (std::size_t p = 0; p < 2 + format_.planes_of_codes(); ++p) {
    const PlanePlan& plane = plan.planes[p];
    const std::size_t count = sizes_[p];
    if (count == 0) continue;
    std::memcpy(position, plane.head, plane.head_bytes);
    position += plane.head_bytes;
    if (position > limit) return false;
    if (plane.kind == kPlaneRaw) {
      if (count > static_cast<std::size_t>(limit - position)) return false;
      std::memcpy(position, picked_[p], count);
      position += count;
    }
    if (plane.table == nullptr) continue;
    sources_[0] = {picked_[p], 0};
    uncoded_[0] =
        reinterpret_cast<std::uint64_t*>(scratch_.uncoded[0].at_least(8 * uncoded_words(count)));
    std::memcpy(number_of_[0], plane.table->number_of, sizeof(number_of_[0]));
    const Stream stream = write_stream(kernels_, *plane.table, sources_[0], count, ahead_,
                                       scratch_.stream, uncoded_[0], kManyLanesFromSparse);
    if (stream.size + 4 > static_cast<std::size_t>(limit - position)) return false;
    store(position, static_cast<std::uint32_t>(stream.size));
    std::memcpy(position + 4, stream.bytes, stream.size);
    position += 4 + stream.size;
    for (std::size_t offset = 0; offset < count; offset += kBlockValues) {
      const std::size_t size = std::min(kBlockValues, count - offset);
      position += write_uncoded(*plane.table, 0, offset, size, position);
      if (position > limit) return false;
    }
  }
  return true;
}

}  // namespace fsl
