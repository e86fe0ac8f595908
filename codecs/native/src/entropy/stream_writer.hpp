// Writes a coded plane's symbols as a stream (docs/WIRE.md, "Streams").
#pragma once

#include "arena.hpp"
#include "entropy/code_table.hpp"

namespace fsl {

// Symbols as bits of bytes: bytes[i] >> shift, in the plane's width. For planes below six bits, the
// bits above must be zero.
struct PlaneSource {
  const std::uint8_t* bytes;
  int shift;
};

struct Stream {
  const std::uint8_t* bytes;
  std::size_t size;
};

// The number of words of `uncoded` that write_stream() needs for `count` symbols.
inline std::size_t uncoded_words(std::size_t count) { return count / 64 + 1; }

// Writes the stream to `memory`. Bit i % 64 of uncoded[i / 64] is set if symbol i has no code; bits
// past `count` are 0.
Stream write_stream(const Kernels& kernels, const CodeTable& table, const PlaneSource& source,
                    std::size_t count, Ahead& ahead, Arena& memory, std::uint64_t* uncoded,
                    std::size_t many_from = kManyLanesFrom);

}  // namespace fsl
