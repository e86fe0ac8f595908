#include "wire/heads.hpp"

#include <cstring>

#include "bytes.hpp"

namespace fsl {
namespace {

constexpr std::uint8_t kMagic[4] = {'F', 'S', 'L', 'C'};
constexpr std::uint8_t kNonfiniteFlag = 1;

}  // namespace

void write_header(const Kernels& kernels, Header& header, std::uint8_t* out) {
  std::memcpy(out, kMagic, sizeof(kMagic));
  out[4] = kVersion;
  out[5] = static_cast<std::uint8_t>(header.format->kind);
  store<std::uint16_t>(out + 6, 0);
  store(out + 8, static_cast<std::uint32_t>(header.block_values));
  store(out + 12, static_cast<std::uint32_t>(header.chunk_values));
  store(out + 16, header.values);
  header.checksum = kernels.crc32(0, out, kHeaderBytes - 4);
  store(out + kHeaderBytes - 4, header.checksum);
}

Status read_header(const Kernels& kernels, const std::uint8_t* frame, std::size_t frame_bytes,
                   const Limits& limits, Header& header) {
  if (frame_bytes > limits.frame_bytes)
    return {Fault::kTooManyBytes, frame_bytes, limits.frame_bytes};
  if (frame_bytes < kHeaderBytes) return {Fault::kNoHeader, frame_bytes};
  if (std::memcmp(frame, kMagic, sizeof(kMagic)) != 0) return {Fault::kMagic};
  if (frame[4] != kVersion) return {Fault::kOtherVersion, frame[4], kVersion};
  header.checksum = load32(frame + kHeaderBytes - 4);
  if (kernels.crc32(0, frame, kHeaderBytes - 4) != header.checksum) return {Fault::kHeaderChecksum};
  header.format = format_of(frame[5]);
  if (header.format == nullptr || load16(frame + 6) != 0) return {Fault::kFormat, frame[5]};
  header.block_values = load32(frame + 8);
  header.chunk_values = load32(frame + 12);
  header.values = load64(frame + 16);
  if (!is_block_size(header.block_values)) return {Fault::kBlockSize, header.block_values};
  if (!is_chunk_size(header.block_values, header.chunk_values))
    return {Fault::kChunkSize, header.chunk_values, header.block_values};
  if (header.values > limits.values) return {Fault::kTooManyValues, header.values, limits.values};
  // Multiplying could overflow.
  if (header.chunks() > (frame_bytes - kHeaderBytes) / kChunkHeadBytes)
    return {Fault::kTooShort, frame_bytes, header.chunks()};
  return {};
}

void write_chunk_head(const Kernels& kernels, const Summed& summed, std::uint64_t index, Mode mode,
                      bool nonfinite, std::size_t payload_bytes, std::uint8_t* out) {
  store(out, static_cast<std::uint32_t>(payload_bytes));
  store(out + 4, static_cast<std::uint32_t>(index));
  out[8] = mode;
  out[9] = nonfinite ? kNonfiniteFlag : 0;
  store<std::uint16_t>(out + 10, 0);
  const std::uint32_t of_payload = kernels.crc32(summed.value, out + kChunkHeadBytes + summed.bytes,
                                                 payload_bytes - summed.bytes);
  store(out + kChunkHeadBytes - 4, kernels.crc32(of_payload, out, kChunkHeadBytes - 4));
}

Status find_chunk(const Header& header, std::uint64_t index, const std::uint8_t*& position,
                  const std::uint8_t* end, Chunk& chunk) {
  if (static_cast<std::size_t>(end - position) < kChunkHeadBytes) return {Fault::kHeadCut, index};
  const std::size_t payload_bytes = load32(position);
  if (static_cast<std::size_t>(end - position) - kChunkHeadBytes < payload_bytes)
    return {Fault::kPayloadCut, index};
  chunk.index = index;
  chunk.count = header.values_of(index);
  chunk.head = position;
  chunk.payload = position + kChunkHeadBytes;
  chunk.payload_bytes = payload_bytes;
  position = chunk.payload + payload_bytes;
  return {};
}

Status check_checksum(const Kernels& kernels, const Header& header, const Chunk& chunk) {
  return check_checksum(kernels, kernels.crc32(header.checksum, chunk.payload, chunk.payload_bytes),
                        chunk);
}

Status check_checksum(const Kernels& kernels, std::uint32_t of_payload, const Chunk& chunk) {
  const std::uint32_t checksum = kernels.crc32(of_payload, chunk.head, kChunkHeadBytes - 4);
  return checksum == load32(chunk.head + kChunkHeadBytes - 4)
             ? Status{}
             : Status{Fault::kChecksum, chunk.index};
}

Status read_chunk_head(Chunk& chunk) {
  const std::uint8_t* const head = chunk.head;
  const bool is_valid = load32(head + 4) == chunk.index && head[8] <= kCoded &&
                        (head[9] & ~kNonfiniteFlag) == 0 && load16(head + 10) == 0;
  if (!is_valid) return {Fault::kHead, chunk.index};
  chunk.mode = static_cast<Mode>(head[8]);
  chunk.nonfinite = head[9] != 0;
  return {};
}

}  // namespace fsl
