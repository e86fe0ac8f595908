// Fetching ahead, for the vector kernels; inlined into each with its target.
#pragma once

#include "kernels/kernels.hpp"

namespace fsl {
namespace {

// The next `kLines` cache lines.
template <int kLines, bool kWritten, int kLocality>
inline __attribute__((always_inline)) void fetch_lines(Ahead& ahead) {
  for (int line = 0; line < kLines; ++line) __builtin_prefetch(ahead.next + 64 * line, kWritten ? 1 : 0, kLocality);
  ahead.next += 64 * kLines;
}

// Of the 512 bytes that 128 fp32 values take, 320: the rest comes early enough while they are quantised. Less where it goes into the first level.
inline __attribute__((always_inline)) void fetch_some(Ahead& ahead) {
  if (ahead.next >= ahead.end) return;
  ahead.near ? fetch_lines<3, false, 3>(ahead) : fetch_lines<5, false, 2>(ahead);
}

// What 128 fp32 values take that will be added to; of what goes into the first level, three quarters, as the rest comes by fetch_further.
inline __attribute__((always_inline)) void fetch_to_add(Ahead& ahead) {
  if (ahead.next >= ahead.end) return;
  ahead.near ? fetch_lines<6, true, 3>(ahead) : fetch_lines<8, true, 2>(ahead);
}

// What a checksum will take in, two lines 4 KiB further on; lanes are read from there soon after.
inline __attribute__((always_inline)) void fetch_checked(const std::uint8_t* place) {
  const std::uintptr_t later = reinterpret_cast<std::uintptr_t>(place) + 4096;
  __builtin_prefetch(reinterpret_cast<const char*>(later));
  __builtin_prefetch(reinterpret_cast<const char*>(later + 64));
}

// What will be added to, 6 KiB further on: not all that was fetched long before is still in the second cache level.
inline __attribute__((always_inline)) void fetch_further(const float* place) {
  __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(place) + 6144), 1, 3);
}

}  // namespace
}  // namespace fsl
