// A chunk's payload, read inner block by inner block, and these in pieces that stay in the first cache level.
#pragma once

#include "entropy/stream_reader.hpp"
#include "frame/decode.hpp"
#include "frame/scratch.hpp"

namespace fsl {

// Decoded values: codes or rotated byte planes, their scales, and where their escaped values stand in the payload.
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

  // The checksum is right, or, if it is computed while codes are read, will be. Before anything else.
  Status begin_checksum();

  // Whether it is, once everything was read or something was found wrong.
  Status end_checksum();

  // Whether the mode holds inner blocks; the others hold values.
  bool has_blocks() const { return chunk_.mode == kRawCodes || chunk_.mode == kCoded; }

  // What is to be fetched while 8-bit codes are read, as their values will be added to it.
  void fetch_meanwhile(const Ahead& ahead) { beside_.ahead = ahead; }

  // Reads what stands before the inner blocks.
  Status open();

  // Opens the next inner block, of `count` values, whose scales go where `first` says.
  Status open_block(std::size_t count, const Piece& first);

  // Fetches some of the next block, for each piece of this one as much; `offset` is the piece's.
  void fetch_next_block(std::size_t offset) const;

  // The block's next `count` values, kPieceValues but for the last; sets piece.escaped.
  Status read(std::size_t count, Piece& piece);

  // The same, and puts the values, in one pass where that is possible.
  Status read_and_put(std::size_t count, Piece& piece, const Output& output);

  // After the last piece of a block.
  Status close_block();

  // The piece in the scratch of this thread that starts `offset` values into its block.
  Piece scratch_piece(std::size_t offset) const;

  // Puts the values of a piece, or of a whole block. What is not finite is found here, or by read() where codes tell; close() looks at it.
  void put(const Piece& piece, std::size_t count, const Output& output);

  // The same without values.
  void check(const Piece& piece, std::size_t count);

  // `count` values from `offset` on, of modes without inner blocks.
  void put_values(std::size_t offset, std::size_t count, const Output& output);

  // Whether everything was read, and the flag told the truth.
  Status close() const;

 private:
  // What an open inner block holds of a plane.
  struct PlaneData {
    const std::uint8_t* raw;  // of the next piece
    std::size_t plane_bytes;
    const std::uint8_t* listed;  // symbols without a code, from the next one on
    const std::uint8_t* listed_end;
  };

  Status read_block(std::size_t count, const Piece& first);
  Status read_plane_head(int width, PlanePlan& plane, CodeTable& own);
  Status open_plane(int p, std::size_t count);
  Status read_symbols(int p, std::size_t count, std::uint8_t* symbols);
  Status read_codes(std::size_t count, CodesRead& read);
  bool has_usual_planes() const;
  bool puts_while_reading(std::size_t count) const;
  TwoPlanes take_below(std::size_t count);
  Status join_codes(std::size_t count, std::uint8_t* codes);
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
  std::size_t block_bytes_ = 0;  // of the open block, beside its streams
  Beside beside_;
  bool sums_beside_ = false;
  bool has_highest_scale_ = false;  // the open block
  bool saw_nonfinite_ = false;
};

}  // namespace fsl
