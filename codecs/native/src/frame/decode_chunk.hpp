// Reads a chunk's payload inner block by inner block, in pieces that fit the first cache level.
#pragma once

#include "entropy/stream_reader.hpp"
#include "frame/decode.hpp"
#include "frame/scratch.hpp"

namespace fsl {

// A decoded piece: codes or rotated byte planes, their scales, and the place of their escaped
// values in the payload.
struct Piece {
  std::uint8_t* planes[kMaximumPlanes];  // the first holds the codes of 8-bit formats
  std::uint8_t* scales;
  std::int16_t* steps;
  const std::uint8_t* escaped;

  std::uint8_t* codes() const { return planes[0]; }
};

class ChunkDecoder {
 public:
  ChunkDecoder(const Kernels& kernels, const Header& header, const Chunk& chunk, Scratch& scratch)
      : kernels_(kernels),
        header_(header),
        format_(*header.format),
        chunk_(chunk),
        scratch_(scratch),
        position_(chunk.payload),
        end_(chunk.payload + chunk.payload_bytes) {}

  // To be called first: checks the checksum, or begins to compute it while codes are read.
  Status begin_checksum();

  // Checks the checksum, after everything was read or a fault was found.
  Status end_checksum();

  // Whether the mode holds inner blocks; the others hold values.
  bool has_blocks() const { return chunk_.mode == kRawCodes || chunk_.mode == kCoded; }

  // Memory to prefetch while 8-bit codes are read, because their values will be added to it.
  void fetch_meanwhile(const Ahead& ahead) { beside_.ahead = ahead; }

  // Reads the payload up to the inner blocks.
  Status open();

  // Opens the next inner block, of `count` values; its scales are written to `first`.
  Status open_block(std::size_t count, const Piece& first);

  // Prefetches a share of the next block, for the piece at `offset` of this one.
  void fetch_next_block(std::size_t offset) const;

  // Reads the block's next `count` values (kPieceValues, fewer in the last piece); sets
  // piece.escaped.
  Status read(std::size_t count, Piece& piece);

  // The same, and writes the values, in one pass if possible.
  Status read_and_put(std::size_t count, Piece& piece, const Output& output);

  // Checks the end of a block, after its last piece.
  Status close_block();

  // A piece in this thread's scratch, `offset` values into its block.
  Piece scratch_piece(std::size_t offset) const;

  // Writes the values of a piece or of a whole block. NaN and infinity are found here or by read();
  // close() checks them.
  void put(const Piece& piece, std::size_t count, const Output& output);

  // The same without output.
  void check(const Piece& piece, std::size_t count);

  // Writes `count` values from `offset` on, for modes without inner blocks.
  void put_values(std::size_t offset, std::size_t count, const Output& output);

  // Checks that everything was read and that the flag is right.
  Status close() const;

 private:
  // A plane's data in the open inner block.
  struct PlaneData {
    const std::uint8_t* raw;  // of the next piece
    std::size_t plane_bytes;
    const std::uint8_t* listed;  // the next symbols without a code
    const std::uint8_t* listed_end;
  };

  Status read_block(std::size_t count, const Piece& first);
  Status open_sparse();
  Status read_whole_plane(std::size_t count, std::uint8_t* symbols);
  void read_sparse(std::size_t count, const Piece& piece);
  Status read_scales_of(std::size_t runs, const Piece& first);
  Status read_scales_in_use(std::size_t count, const Piece& first);
  Status read_plane_head(int width, PlanePlan& plane, CodeTable& own);
  Status open_plane(int p, std::size_t count);
  Status read_symbols(int p, std::size_t count, std::uint8_t* symbols);
  Status read_codes(std::size_t count, CodesRead& read);
  bool has_usual_planes() const;
  bool puts_while_reading(std::size_t count) const;
  TwoPlanes take_below(std::size_t count);
  Status join_codes(std::size_t count, std::uint8_t* codes);
  Status open_listed(std::size_t count);
  Status read_groups(std::size_t count, std::uint8_t* codes);
  void check_codes(const Piece& piece, std::size_t count, std::uint8_t largest);
  void read_raw_codes(std::size_t count, const Piece& piece);
  std::size_t left() const { return static_cast<std::size_t>(end_ - position_); }

  const Kernels& kernels_;
  const Header& header_;
  const Format& format_;
  const Chunk& chunk_;
  Scratch& scratch_;
  const std::uint8_t* position_;
  const std::uint8_t* end_;
  StreamReader streams_[kMaximumPlanes];  // of the coded planes
  PlaneData planes_[kMaximumPlanes] = {};
  const std::uint8_t* listed_ = nullptr;  // the next code of the block that has no digit
  const std::uint8_t* listed_end_ = nullptr;
  bool is_sparse_ = false;
  std::uint64_t* mask_ = nullptr;                    // of a sparse chunk's codes
  std::size_t sparse_offset_ = 0;                    // values of it that were read
  const std::uint8_t* picked_[kMaximumPlanes] = {};  // each plane's next symbols
  std::size_t block_bytes_ = 0;                      // of the open block, without its streams
  Beside beside_;
  bool sums_beside_ = false;
  bool has_highest_scale_ = false;  // the open block
  bool saw_nonfinite_ = false;
};

}  // namespace fsl
