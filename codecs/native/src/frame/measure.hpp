// For `fsl-node bench`, which compares the codec's speed with the machine's limits: plain loops
// over memory, and the entropy stage without quantization. The codec does not use these.
#pragma once

#include <cstddef>
#include <cstdint>

#include "wire/format.hpp"

namespace fsl {

// Loads all bytes; the sum keeps the compiler from removing the loop.
std::uint64_t limit_read(const std::uint8_t* memory, std::size_t bytes);

// values[i] += 1.
void limit_add(float* values, std::size_t count);

// Non-temporal stores, 64 bytes at a time; false if this architecture has none.
bool limit_stream_store(std::uint8_t* memory, std::size_t bytes);

// Runs a loop of one cycle per turn, to measure the core's clock.
void short_loop(std::uint64_t turns);

// Plans and writes codes (count, of an 8-bit format) as a chunk's payload, with the smallest scales
// and escaped values of 0. `codes` has kSlackBytes after its end, `out` holds stage_bound(count).
// Returns the bytes written. Includes the streams' checksum, which is computed while they are
// copied.
std::size_t stage_encode(const Kernels& kernels, const Format& format, const std::uint8_t* codes,
                         std::size_t count, std::uint8_t* out);
std::size_t stage_bound(std::size_t count);

// The inverse; `codes` has kSlackBytes after its end. False if the payload is damaged.
bool stage_decode(const Kernels& kernels, const Format& format, const std::uint8_t* payload,
                  std::size_t payload_bytes, std::uint8_t* codes, std::size_t count);

}  // namespace fsl
