// For `fsl-node bench`, which draws the codec's speed beside what the machine can do: plain loops over memory, and the entropy stage
// without quantisation around it. No part of the codec uses these.
#pragma once

#include <cstddef>
#include <cstdint>

#include "wire/format.hpp"

namespace fsl {

// Loads all of it; the sum keeps the compiler from leaving it out.
std::uint64_t limit_read(const std::uint8_t* memory, std::size_t bytes);

// values[i] += 1.
void limit_add(float* values, std::size_t count);

// Non-temporal stores, 64 bytes at a time; false where this architecture has none.
bool limit_stream_store(std::uint8_t* memory, std::size_t bytes);

// So many turns of a loop that takes a cycle each, for finding out how fast the core is.
void short_loop(std::uint64_t turns);

// Plans and writes codes (count, of an 8-bit format) as a chunk's payload whose scales are all the smallest and whose escaped
// values are all 0. `codes` has kSlackBytes behind its end, `out` holds stage_bound(count). Returns the bytes written.
// The streams' checksum is in it, as they are summed up while they are copied.
std::size_t stage_encode(const Kernels& kernels, const Format& format, const std::uint8_t* codes, std::size_t count, std::uint8_t* out);
std::size_t stage_bound(std::size_t count);

// The inverse; `codes` has kSlackBytes behind its end. False when the payload is damaged.
bool stage_decode(const Kernels& kernels, const Format& format, const std::uint8_t* payload, std::size_t payload_bytes,
                  std::uint8_t* codes, std::size_t count);

}  // namespace fsl
