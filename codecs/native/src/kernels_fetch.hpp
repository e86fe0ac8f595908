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

// All that 128 fp32 values take, for adding to them.
inline __attribute__((always_inline)) void fetch_to_add(Ahead& ahead) {
  if (ahead.next >= ahead.end) return;
  for (int line = 0; line < 8; ++line) __builtin_prefetch(ahead.next + 64 * line, 1, 2);
  ahead.next += 8 * 64;
}

// What will be added to, 16 KiB further on: not all that was fetched long before is still in the second cache level.
inline __attribute__((always_inline)) void fetch_further(const float* place) {
  __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(place) + 16384), 1, 2);
}

}  // namespace
}  // namespace fsl
