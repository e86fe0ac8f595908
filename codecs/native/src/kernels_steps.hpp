// Loops with chores in between. For the kernels of one instruction set, within its target: what is inlined here has to have the same.
#pragma once

#include "kernels.hpp"

namespace fsl {
namespace {

// Calls step(i) for i = 0, size, 2 * size ... below `whole`, with chores in between.
template <std::size_t kSize, typename Step>
inline __attribute__((always_inline)) void in_steps(std::size_t whole, const Chores& chores, Step step) {
  std::size_t i = 0;
  while (whole - i >= kValuesBetweenChores) {
#pragma GCC unroll 2
    for (const std::size_t stop = i + kValuesBetweenChores; i < stop; i += kSize) step(i);
    chores.do_some();
  }
  for (; i < whole; i += kSize) step(i);
}

}  // namespace
}  // namespace fsl
