// Frames to start fuzzing from.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "frame/encode.hpp"
#include "kernels/kernels.hpp"
#include "wire/heads.hpp"

namespace fuzz {

inline constexpr unsigned kFormats = 5;
inline constexpr std::size_t kFewValues = 700;
// A chunk of the runtime: from this size on the decoder writes fp32 past the cache.
inline constexpr std::size_t kManyValues = 131072;

// kHeavy gives coded planes of six bits above raw ones, kRounded of eight bits. kSparse gives
// sparse splits, and so few bits that large frames of fp32 are small, too.
enum class Kind { kBell, kHeavy, kRounded, kSparse };

// Bits from a linear congruential generator (Knuth's MMIX constants).
inline std::vector<float> values_of(Kind kind, std::size_t count) {
  std::uint64_t state = 1;
  const auto next = [&state] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::uint32_t>(state >> 32);
  };
  std::vector<float> values(count);
  for (float& value : values) {
    std::int32_t sum = 0;
    for (int part = 0; part < 4; ++part) sum += static_cast<std::int32_t>(next() >> 8) - (1 << 23);
    value = static_cast<float>(sum) * 0x1p-30F;
    const std::uint32_t chance = next() % 100;
    if (kind == Kind::kHeavy && chance >= 98) value *= 1000.0F;
    if (kind == Kind::kRounded || kind == Kind::kSparse)
      value = std::nearbyint(value * 4096.0F) * 0x1p-12F;
    if (kind == Kind::kSparse && chance >= 20) value = 0.0F;
  }
  return values;
}

inline std::vector<std::uint8_t> frame_of(unsigned format, const std::vector<float>& values,
                                          std::size_t chunk_values) {
  std::vector<std::uint8_t> frame(fsl::bound(values.size(), chunk_values));
  const fsl::EncodeSettings settings = {fsl::format_of(format), 128, chunk_values, true, 14, 1};
  const fsl::Source source = {values.data(), nullptr, nullptr, nullptr, values.size()};
  frame.resize(
      fsl::encode_frame(*fsl::kernels_of(fsl::Path::kScalar), settings, source, frame.data()));
  return frame;
}

}  // namespace fuzz
