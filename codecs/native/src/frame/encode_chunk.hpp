// Chooses a chunk's mode and writes its payload (docs/WIRE.md, "Choosing the mode").
#pragma once

#include "frame/encode.hpp"
#include "frame/scratch.hpp"
#include "quantise/chunk_codes.hpp"
#include "wire/heads.hpp"

namespace fsl {

struct Encoded {
  Mode mode;
  bool nonfinite;
  std::size_t payload_bytes;
  Summed summed;
};

class ChunkEncoder {
 public:
  ChunkEncoder(const Kernels& kernels, const EncodeSettings& settings, const Source& source,
               std::uint32_t header_checksum, std::size_t start, std::size_t count,
               Scratch& scratch)
      : kernels_(kernels),
        settings_(settings),
        format_(*settings.format),
        source_(source),
        nothing_summed_{header_checksum, 0},
        start_(start),
        count_(count),
        scratch_(scratch) {}

  // Writes the payload to `out`, which has room for 4 * count + kWorkingBytes bytes.
  Encoded encode(std::uint8_t* out);

 private:
  const float* values(std::size_t offset, std::size_t count);
  float* residual(std::size_t offset) const {
    return source_.residual == nullptr ? nullptr : source_.residual + start_ + offset;
  }
  Ahead ahead() const;
  bool looks_sparse();
  bool quantise(ChunkCodes& codes, bool sparse);
  Encoded write_raw(std::uint8_t* out);
  Encoded write_constant(std::uint8_t* out);
  bool is_constant() const { return seen_.differing_bits == 0; }

  const Kernels& kernels_;
  const EncodeSettings& settings_;
  const Format& format_;
  const Source& source_;
  const Summed nothing_summed_;
  const std::size_t start_;
  const std::size_t count_;
  Scratch& scratch_;
  const float* combined_ = nullptr;  // the chunk's values, if they must outlive their residual
  std::uint32_t first_bits_ = 0;
  Seen seen_;
};

}  // namespace fsl
