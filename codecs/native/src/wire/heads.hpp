// Frame headers, chunk heads and checksums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "status.hpp"
#include "wire/format.hpp"

namespace fsl {

struct Limits {
  std::uint64_t values;
  std::uint64_t frame_bytes;
};

struct Header {
  const Format* format = nullptr;
  std::size_t block_values = 0;
  std::size_t chunk_values = 0;
  std::uint64_t values = 0;
  std::uint32_t checksum = 0;

  std::uint64_t chunks() const { return values / chunk_values + (values % chunk_values != 0); }
  std::size_t values_of(std::uint64_t index) const {
    const std::uint64_t left = values - index * chunk_values;
    return left < chunk_values ? static_cast<std::size_t>(left) : chunk_values;
  }
};

struct Chunk {
  std::uint64_t index = 0;
  std::size_t count = 0;
  Mode mode = kRawFloat32;
  bool nonfinite = false;
  const std::uint8_t* payload = nullptr;
  std::size_t payload_bytes = 0;
  const std::uint8_t* head = nullptr;
};

// Writes kHeaderBytes and sets the checksum of `header`.
void write_header(const Kernels& kernels, Header& header, std::uint8_t* out);

// Reads the header and checks it against the limits, the format and the frame's size.
Status read_header(const Kernels& kernels, const std::uint8_t* frame, std::size_t frame_bytes,
                   const Limits& limits, Header& header);

// The checksum of a payload's first bytes.
struct Summed {
  std::uint32_t value;  // continues the header's
  std::size_t bytes;
};

// Writes kChunkHeadBytes before a payload at out + kChunkHeadBytes.
void write_chunk_head(const Kernels& kernels, const Summed& summed, std::uint64_t index, Mode mode,
                      bool nonfinite, std::size_t payload_bytes, std::uint8_t* out);

// Finds chunk `index` at `position`, which moves past it. Checks only the lengths.
Status find_chunk(const Header& header, std::uint64_t index, const std::uint8_t*& position,
                  const std::uint8_t* end, Chunk& chunk);

// Checks the checksum; the second takes the payload's, which continues the header's.
Status check_checksum(const Kernels& kernels, const Header& header, const Chunk& chunk);
Status check_checksum(const Kernels& kernels, std::uint32_t of_payload, const Chunk& chunk);

// Sets and checks the head's other fields.
Status read_chunk_head(Chunk& chunk);

}  // namespace fsl
