// A coded plane's symbols, written as a stream (docs/WIRE.md, "Streams"); StreamReader reads it.
#pragma once

#include "arena.hpp"
#include "entropy/code_table.hpp"

namespace fsl {

// Symbols that are bits of bytes: bytes[i] >> shift, in as many bits as the plane has; below six bits, with nothing above them.
struct PlaneSource {
  const std::uint8_t* bytes;
  int shift;
};

struct Stream {
  const std::uint8_t* bytes;
  std::size_t size;
};

// Words of `uncoded` that write_stream() needs for `count` symbols.
inline std::size_t uncoded_words(std::size_t count) { return count / 64 + 1; }

// The stream, in `memory` until it is used again. Bit i % 64 of uncoded[i / 64] is set where symbol i has no code; bits past `count` are 0.
Stream write_stream(const Kernels& kernels, const CodeTable& table, const PlaneSource& source, std::size_t count, Ahead& ahead, Arena& memory,
                    std::uint64_t* uncoded);

}  // namespace fsl
