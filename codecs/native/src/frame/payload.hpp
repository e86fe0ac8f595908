// Writes a chunk's codes as its payload, in mode coded or raw codes (docs/WIRE.md, "Choosing the
// mode").
#pragma once

#include "entropy/stream_writer.hpp"
#include "frame/scratch.hpp"
#include "quantise/chunk_codes.hpp"
#include "wire/heads.hpp"

namespace fsl {

// The result of an attempt to write a payload.
enum class Attempt {
  kDone,
  kTooLong,        // longer than the values themselves
  kConstantPlane,  // a plane that is constant in the sample is not constant
};

class PayloadWriter {
 public:
  PayloadWriter(const Kernels& kernels, const EncodeSettings& settings, const ChunkCodes& codes,
                std::uint32_t header_checksum, const Ahead& ahead, Scratch& scratch)
      : kernels_(kernels),
        settings_(settings),
        format_(*settings.format),
        codes_(codes),
        header_checksum_(header_checksum),
        ahead_(ahead),
        scratch_(scratch) {}

  // The plan from a sample, or from all codes.
  const ChunkPlan& plan(bool everything);

  // The plan of the sparse split, and whether others are not worth a comparison.
  const ChunkPlan& plan_sparse(bool everything);
  bool is_cheap(const ChunkPlan& sparse) const;

  // Both write to `out`, which has room for 4 * count + kWorkingBytes bytes. bytes: the number
  // written. raw_bytes: the size of the payload in mode raw codes.
  Attempt write_coded(const ChunkPlan& plan, std::uint8_t* out, std::size_t& bytes,
                      std::size_t& raw_bytes);
  Attempt write_raw_codes(std::uint8_t* out, std::size_t& bytes);

  // The checksum of the bytes that write_coded() has written, up to the last stream's end.
  const Summed& summed() const { return summed_; }

 private:
  // The symbols of groups, and a bitmap of the codes without a digit.
  struct Groups {
    std::uint8_t* symbols;
    std::uint64_t* listed;
  };

  const Groups& group(int split_index);
  bool is_constant(const ChunkPlan& plan, int p) const;
  PlaneSource source_of(const ChunkPlan& plan, int p);
  bool write_streams(const ChunkPlan& plan, const std::uint8_t* out, std::uint8_t*& position,
                     const std::uint8_t* limit);
  bool write_sparse(const ChunkPlan& plan, std::uint8_t*& position, const std::uint8_t* limit);
  std::size_t write_scales_in_use(std::size_t offset, std::size_t count, std::uint8_t* out);
  std::size_t write_scales_of(std::size_t offset, std::size_t count, std::uint8_t* out);
  std::size_t write_plane(const ChunkPlan& plan, int p, std::size_t offset, std::size_t count,
                          std::uint8_t* out);
  std::size_t write_listed(int split_index, std::size_t offset, std::size_t count,
                           std::uint8_t* out) const;
  std::size_t write_uncoded(const CodeTable& table, int p, std::size_t offset, std::size_t count,
                            std::uint8_t* out);
  std::size_t write_raw_block(std::size_t offset, std::size_t count, std::uint8_t* out) const;

  const Kernels& kernels_;
  const EncodeSettings& settings_;
  const Format& format_;
  const ChunkCodes& codes_;
  const std::uint32_t header_checksum_;
  Summed summed_ = {};
  Ahead ahead_;
  Scratch& scratch_;
  Groups groups_[2] = {};  // of two and of four codes
  // Of a sparse split: the lower mask, and each plane's symbols and their number.
  std::uint64_t* mask_ = nullptr;
  std::uint8_t* picked_[kSparsePlanes] = {};
  std::size_t sizes_[kSparsePlanes] = {};
  PlaneSource sources_[kMaximumPlanes] = {};
  std::uint64_t* uncoded_[kMaximumPlanes] =
      {};  // bitmaps of the coded planes' symbols without a code
  std::uint8_t number_of_[kMaximumPlanes]
                         [256];  // by the byte of a plane's source: its symbol's number
};

}  // namespace fsl
