// A chunk's payload, read inner block by inner block.
#pragma once

#include "decode.hpp"
#include "scratch.hpp"
#include "stream_reader.hpp"

namespace fsl {

// A decoded inner block: codes or rotated byte planes, scales, and where its escaped values stand in the payload.
struct Block {
  std::uint8_t* codes;
  std::uint8_t* planes[kMaximumPlanes];
  std::uint8_t* scales;
  std::int16_t* steps;
  const std::uint8_t* escaped;
};

class ChunkDecoder {
 public:
  ChunkDecoder(const Kernels& kernels, const Header& header, const SharedBooks& shared, const Chunk& chunk, Scratch& scratch)
      : kernels_(kernels),
        header_(header),
        format_(*header.format),
        shared_(shared),
        chunk_(chunk),
        scratch_(scratch),
        position_(chunk.payload),
        end_(chunk.payload + chunk.payload_bytes) {}

  // Whether the mode holds inner blocks; the others hold values.
  bool has_blocks() const { return chunk_.mode == kRawCodes || chunk_.mode == kCoded; }

  // Reads what stands before the inner blocks.
  Status open();

  // The next inner block (count values).
  Status read(std::size_t count, Block& block, const Chores& chores);

  // Puts its values; folds what is not finite into what close() checks.
  void put(const Block& block, std::size_t count, const Output& output);

  // Makes of a block what follows its first `count` values, a multiple of block_values.
  void advance(Block& block, std::size_t count) const;

  // The same check without values.
  void check(const Block& block, std::size_t count);

  // `count` values from `offset` on, of modes without inner blocks.
  void put_values(std::size_t offset, std::size_t count, const Output& output);

  // Whether everything was read, and the flag told the truth.
  Status close() const;

  // One of the two blocks in the scratch of this thread.
  Block scratch_block(std::size_t which) const;

 private:
  Status read_plane_head(int width, PlanePlan& plane, Book& own);
  Status read_scales(std::size_t count, Block& block);
  Status read_symbols(int p, std::size_t count, std::uint8_t* symbols, const Chores& chores);
  Status read_uncoded(const Book& book, std::size_t count, std::uint8_t* symbols);
  Status read_codes(std::size_t count, std::uint8_t* codes, const Chores& chores);
  Status read_raw_codes(std::size_t count, Block& block);
  Status read_escaped(std::size_t count, Block& block);
  std::size_t left() const { return static_cast<std::size_t>(end_ - position_); }

  const Kernels& kernels_;
  const Header& header_;
  const Format& format_;
  const SharedBooks& shared_;
  const Chunk& chunk_;
  Scratch& scratch_;
  const std::uint8_t* position_;
  const std::uint8_t* end_;
  StreamReader streams_[kMaximumPlanes];  // of the coded planes
  bool saw_nonfinite_ = false;
};

}  // namespace fsl
