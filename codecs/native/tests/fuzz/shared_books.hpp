// Books that the fuzz targets hold as shared ones, and the frames that name them: both come from the same values, so that the encoder takes
// a book of these, which has the smaller head, in place of the chunk's own.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "entropy/code_table.hpp"
#include "frame/encode.hpp"
#include "kernels/kernels.hpp"
#include "wire/heads.hpp"

namespace fuzz {

inline constexpr unsigned kFormats = 5;
inline constexpr std::size_t kFewValues = 700;
// A chunk of the runtime: the decoder writes fp32 past the cache from here on, and a stream has 128 lanes.
inline constexpr std::size_t kManyValues = 131072;

// kHeavy and kSparse give codes that no static book fits, kHeavy in planes of six bits above raw ones, kSparse in planes of eight, and with so few
// bits that large frames of fp32 are small, too.
enum class Kind { kBell, kHeavy, kSparse };

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
    if (kind == Kind::kSparse) value = chance < 20 ? std::nearbyint(value * 4096.0F) * 0x1p-12F : 0.0F;
  }
  return values;
}

inline std::vector<std::uint8_t> frame_of(unsigned format, const std::vector<float>& values, std::size_t chunk_values, const fsl::SharedBooks& shared) {
  std::vector<std::uint8_t> frame(fsl::bound(values.size(), chunk_values));
  const fsl::EncodeSettings settings = {fsl::format_of(format), 128, chunk_values, true, 14, 1};
  const fsl::Source source = {values.data(), nullptr, nullptr, nullptr, values.size()};
  frame.resize(fsl::encode_frame(*fsl::kernels_of(fsl::Path::kScalar), settings, shared, source, frame.data()));
  return frame;
}

// Of the first plane of a frame's first chunk: what stands in its head, or 255 where the chunk is not coded, and its width.
struct FirstPlane {
  unsigned head = 255;
  int width = 0;
};

inline FirstPlane first_plane(unsigned format, const std::vector<std::uint8_t>& frame) {
  constexpr std::size_t kMode = fsl::kHeaderBytes + 8, kSplit = fsl::kHeaderBytes + fsl::kChunkHeadBytes;
  if (frame.size() < kSplit + 2 || frame[kMode] != fsl::kCoded) return {};
  return {frame[kSplit + 1], fsl::format_of(format)->split[frame[kSplit]].widths[0]};
}

// Those of the chunks that have one of their own. Digests are only compared here, so any numbers do.
inline fsl::SharedBooks shared_books() {
  static const std::vector<fsl::Book> books = [] {
    std::vector<fsl::Book> made;
    for (unsigned format = 0; format < kFormats; ++format) {
      for (const Kind kind : {Kind::kHeavy, Kind::kSparse}) {
        for (const std::size_t count : {kFewValues, kManyValues}) {
          const std::vector<std::uint8_t> frame = frame_of(format, values_of(kind, count), kManyValues, {});
          const FirstPlane plane = first_plane(format, frame);
          if (plane.head != fsl::kPlaneOwn) continue;
          const std::uint8_t* position = frame.data() + fsl::kHeaderBytes + fsl::kChunkHeadBytes + 2;
          fsl::Book book;
          if (!fsl::unpack_book(position, frame.data() + frame.size(), plane.width, book).ok()) continue;
          book.digest = 0x0101010101010101u * (1 + made.size());
          made.push_back(book);
        }
      }
    }
    made.shrink_to_fit();  // so that the sanitizers see a look behind the last
    return made;
  }();
  return {books.data(), books.size()};
}

}  // namespace fuzz
