// Integers in bytes, the lowest byte first, at any address.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsl {

inline std::uint16_t load16(const std::uint8_t* bytes) {
  return static_cast<std::uint16_t>(bytes[0] | bytes[1] << 8);
}

inline std::uint32_t load32(const std::uint8_t* bytes) {
  return static_cast<std::uint32_t>(load16(bytes)) | static_cast<std::uint32_t>(load16(bytes + 2))
                                                         << 16;
}

inline std::uint64_t load64(const std::uint8_t* bytes) {
  return static_cast<std::uint64_t>(load32(bytes)) | static_cast<std::uint64_t>(load32(bytes + 4))
                                                         << 32;
}

template <typename Word>
void store(std::uint8_t* bytes, Word word) {
  for (std::size_t i = 0; i < sizeof(Word); ++i)
    bytes[i] = static_cast<std::uint8_t>(word >> (8 * i));
}

}  // namespace fsl
