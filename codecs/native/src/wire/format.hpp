// Constants of docs/WIRE.md ("Codec frame"): formats, splits, sizes of heads, limits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.hpp"

namespace fsl {

inline constexpr int kVersion = 6;
inline constexpr std::size_t kHeaderBytes = 28;
inline constexpr std::size_t kChunkHeadBytes = 16;
inline constexpr std::size_t kMaximumChunkValues = std::size_t{1} << 20;
inline constexpr std::size_t kMinimumBlockValues = 16;
inline constexpr std::size_t kMaximumBlockValues = 1024;
inline constexpr std::size_t kMaximumRuns = kBlockValues / kMinimumBlockValues;
inline constexpr std::size_t kMaximumBlocks = kMaximumChunkValues / kBlockValues;
inline constexpr std::size_t kPieceValues = 4096;  // decoded at a time: whole blocks, and all lanes
inline constexpr int kMaximumStepLog2 = 40;
inline constexpr int kMinimumStepLog2 = -8;
inline constexpr int kMaximumPlanes = 4;
inline constexpr int kSparsePlanes = 2 + kMaximumPlanes;  // two of masks first

// Output that an encoder may write beyond the longest frame, before it finds that coding does not
// pay: an inner block of four planes all of whose symbols are listed with the highest numbers, and
// heads.
inline constexpr std::size_t kWorkingBytes = 196608;

enum Mode : std::uint8_t { kRawFloat32 = 0, kConstant = 1, kRawCodes = 2, kCoded = 3 };
enum PlaneKind : std::uint8_t { kPlaneRaw = 0, kPlaneConstant = 1, kPlaneOwn = 2 };

enum class Kind : std::uint8_t { kFloat32 = 0, kBfloat16 = 1, kE4m3 = 2, kE5m2 = 3, kUniform = 4 };

inline constexpr std::uint32_t kMagnitudeMask = 0x7FFFFFFF;
inline constexpr std::uint32_t kFirstNonfinite = 0x7F800000;

inline constexpr int kLowestStep = -504;
inline constexpr int kHighestStep = 480;
inline constexpr int kStepOffset = 512;

// How a code word is cut into planes, from its highest bit down. rotated: the sign first moves
// below the other bits. group: consecutive codes that are one symbol of the only plane. sparse:
// these are the planes of codes that are not zero; a format's last split.
struct Split {
  bool rotated;
  int planes;
  int widths[kMaximumPlanes];
  int group;
  bool sparse;

  std::size_t symbols_of(std::size_t values) const {
    return (values + static_cast<std::size_t>(group) - 1) / static_cast<std::size_t>(group);
  }
};

struct Format {
  Kind kind;
  int code_bits;
  int splits;
  Split split[5];
  std::uint32_t escape_magnitude;  // a chunk with a magnitude from here on is raw fp32
  const Float8* float8;            // null unless an 8-bit float
  int highest_scale;

  std::size_t code_bytes() const { return static_cast<std::size_t>(code_bits) / 8; }
  std::size_t planes_of_codes() const { return static_cast<std::size_t>(code_bits) / 8; }
  std::uint8_t zero_code() const { return is_uniform() ? 128 : 0; }  // the code of +0.0
  bool is_uniform() const { return kind == Kind::kUniform; }
  bool is_float32() const { return kind == Kind::kFloat32; }
  bool is_bytes() const { return code_bits == 8; }  // codes are bytes and have scales
};

// Null if unknown.
const Format* format_of(unsigned wire_id);

// Whether blocks and chunks of these sizes are allowed.
bool is_block_size(std::uint64_t block_values);
bool is_chunk_size(std::uint64_t block_values, std::uint64_t chunk_values);

// Bytes of output that encoding `values` values needs.
std::uint64_t bound(std::uint64_t values, std::uint64_t chunk_values);

inline std::size_t blocks_of(std::size_t count, std::size_t size) {
  return (count + size - 1) / size;
}

}  // namespace fsl
