#include "wire/format.hpp"

namespace fsl {
namespace {

constexpr Float8 kFloat8E4m3 = {3, 7, 8, 10, 0x7F};
constexpr Float8 kFloat8E5m2 = {2, 15, 15, 17, 0x7C};

constexpr Split kRotatedSixTwo = {true, 2, {6, 2, 0, 0}, 1, false};
constexpr Split kSixTwo = {false, 2, {6, 2, 0, 0}, 1, false};
constexpr Split kWhole = {false, 1, {8, 0, 0, 0}, 1, false};
constexpr Split kTwoBytes = {true, 2, {8, 8, 0, 0}, 1, false};
constexpr Split kFourBytes = {true, 4, {8, 8, 8, 8}, 1, false};
constexpr Split kPairs = {false, 1, {6, 0, 0, 0}, 2, false};
constexpr Split kFours = {false, 1, {8, 0, 0, 0}, 4, false};
constexpr Split kSparse = {false, 1, {8, 0, 0, 0}, 1, true};
constexpr Split kSparseTwo = {true, 2, {8, 8, 0, 0}, 1, true};
constexpr Split kSparseFour = {true, 4, {8, 8, 8, 8}, 1, true};

constexpr Format kFormats[] = {
    {Kind::kFloat32, 32, 2, {kFourBytes, kSparseFour}, 0x80000000, nullptr, 0},
    {Kind::kBfloat16, 16, 2, {kTwoBytes, kSparseTwo}, 0x7F7F8000, nullptr, 0},
    {Kind::kE4m3,
     8,
     4,
     {kRotatedSixTwo, kSixTwo, kWhole, kSparse},
     0x7F780000,
     &kFloat8E4m3,
     255 - 8},
    {Kind::kE5m2,
     8,
     4,
     {kRotatedSixTwo, kSixTwo, kWhole, kSparse},
     0x7F700000,
     &kFloat8E5m2,
     255 - 15},
    {Kind::kUniform, 8, 5, {kSixTwo, kWhole, kPairs, kFours, kSparse}, 0x7B800000, nullptr, 0},
};

}  // namespace

const Format* format_of(unsigned wire_id) {
  return wire_id < sizeof(kFormats) / sizeof(kFormats[0]) ? &kFormats[wire_id] : nullptr;
}

bool is_block_size(std::uint64_t block_values) {
  return block_values >= kMinimumBlockValues && block_values <= kMaximumBlockValues &&
         (block_values & (block_values - 1)) == 0;
}

bool is_chunk_size(std::uint64_t block_values, std::uint64_t chunk_values) {
  return chunk_values >= block_values && chunk_values <= kMaximumChunkValues &&
         chunk_values % block_values == 0;
}

std::uint64_t bound(std::uint64_t values, std::uint64_t chunk_values) {
  const std::uint64_t chunks = values / chunk_values + (values % chunk_values != 0);
  return kHeaderBytes + chunks * kChunkHeadBytes + 4 * values + kWorkingBytes;
}

}  // namespace fsl
