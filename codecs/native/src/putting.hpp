// A chore: putting the values of an inner block, a piece at a time, while the next block is read. The core would wait for memory if it put
// 64 KiB at once; 2 to 4 KiB between other work go almost unnoticed (docs/LOG.md, "passes over an inner block on Zen 4").
#pragma once

#include <algorithm>
#include <cstddef>

#include "decode_chunk.hpp"

namespace fsl {

class Putting {
 public:
  Putting(ChunkDecoder& decoder, std::size_t block_values, std::size_t value_bytes)
      : decoder_(decoder), piece_(std::max(kPiece, block_values)), value_bytes_(value_bytes) {}

  // What is put from now on: all values of a block, or none before the first one. The one before has to be finished.
  void begin(const Block& block, std::size_t count, const Output& output) {
    block_ = block;
    left_ = count;
    output_ = output;
  }

  void finish() {
    while (left_ > 0) put_piece();
  }

  // Valid as long as this object stays where it is.
  Chores chores() {
    return {[](void* context) { static_cast<Putting*>(context)->put_piece(); }, this};
  }

 private:
  static constexpr std::size_t kPiece = 512;

  void put_piece() {
    const std::size_t count = std::min(piece_, left_);
    if (count == 0) return;
    decoder_.put(block_, count, output_);
    left_ -= count;
    if (left_ == 0) return;
    decoder_.advance(block_, count);
    output_.out = static_cast<char*>(output_.out) + count * value_bytes_;
  }

  ChunkDecoder& decoder_;
  const std::size_t piece_;
  const std::size_t value_bytes_;
  Block block_{};
  std::size_t left_ = 0;
  Output output_{};
};

}  // namespace fsl
