// Fetching ahead, for the vector kernels; inlined into each with its target.
#pragma once

#include "kernels.hpp"

namespace fsl {
namespace {

// Of every 512 bytes that 128 fp32 values take, 320: the rest comes early enough while they are quantised.
inline __attribute__((always_inline)) void fetch_some(Ahead& ahead) {
  if (ahead.next >= ahead.end) return;
  for (int line = 0; line < 5; ++line) __builtin_prefetch(ahead.next + 64 * line, 0, 2);
  ahead.next += 5 * 64;
}

// Of the 512 bytes that 128 fp32 values take which will be added to, 384, into the first cache level; the rest comes by fetch_further.
inline __attribute__((always_inline)) void fetch_to_add(Ahead& ahead) {
  if (ahead.next >= ahead.end) return;
  for (int line = 0; line < 6; ++line) __builtin_prefetch(ahead.next + 64 * line, 1, 3);
  ahead.next += 6 * 64;
}

// What will be added to, 6 KiB further on: not all that was fetched long before is still in the second cache level.
inline __attribute__((always_inline)) void fetch_further(const float* place) {
  __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(place) + 6144), 1, 3);
}

}  // namespace
}  // namespace fsl
