// Prefetching for the vector kernels; inlined into each with its target.
#pragma once

#include "kernels/kernels.hpp"

namespace fsl {
namespace {

// Prefetches the next `kLines` cache lines.
template <int kLines, bool kWritten, int kLocality>
inline __attribute__((always_inline)) void fetch_lines(Ahead& ahead) {
  for (int line = 0; line < kLines; ++line)
    __builtin_prefetch(ahead.next + 64 * line, kWritten ? 1 : 0, kLocality);
  ahead.next += 64 * kLines;
}

// Prefetches 320 of the 512 bytes of 128 fp32 values: the rest is early enough while they are
// quantized. Less into the first level.
inline __attribute__((always_inline)) void fetch_some(Ahead& ahead) {
  if (ahead.next >= ahead.end) return;
  ahead.near ? fetch_lines<3, false, 3>(ahead) : fetch_lines<5, false, 2>(ahead);
}

// Prefetches 128 fp32 values that will be added to. Three quarters into the first level;
// fetch_further fetches the rest.
inline __attribute__((always_inline)) void fetch_to_add(Ahead& ahead) {
  if (ahead.next >= ahead.end) return;
  ahead.near ? fetch_lines<6, true, 3>(ahead) : fetch_lines<8, true, 2>(ahead);
}

// Prefetches two lines for a checksum, 4 KiB ahead; lanes are read from there soon after.
inline __attribute__((always_inline)) void fetch_checked(const std::uint8_t* place) {
  const std::uintptr_t later = reinterpret_cast<std::uintptr_t>(place) + 4096;
  __builtin_prefetch(reinterpret_cast<const char*>(later));
  __builtin_prefetch(reinterpret_cast<const char*>(later + 64));
}

// Prefetches the accumulator 6 KiB ahead: lines fetched long before may have left the second cache
// level.
inline __attribute__((always_inline)) void fetch_further(const float* place) {
  __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(place) + 6144),
                     1, 3);
}

}  // namespace
}  // namespace fsl
