// Steps of sparse chunks (docs/WIRE.md, "Uniform codes").
#pragma once

#include "bits.hpp"

namespace fsl {

// By how much k grows of a run of which `nonzero` of `run_values` values are not zero: the largest
// d with nonzero^2 * 2^d <= run_values^2, as for one if there are none.
inline int coarser_by(std::size_t nonzero, std::size_t run_values) {
  nonzero += nonzero == 0;
  const unsigned number = static_cast<unsigned>(nonzero * nonzero) - 1;
  return 2 * highest_bit(static_cast<unsigned>(run_values)) - highest_bit(number << 1 | 1);
}

inline int coarser_step(int step, std::size_t nonzero, std::size_t run_values) {
  const int coarser = step + coarser_by(nonzero, run_values);
  return coarser < 480 ? coarser : 480;
}

}  // namespace fsl
