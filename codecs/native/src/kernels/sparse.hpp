// Steps of sparse chunks (docs/WIRE.md, "Sparse chunks").
#pragma once

#include "bits.hpp"

namespace fsl {

inline constexpr int kHighestQuarters = 480;

// By how many quarters of an octave the step grows of a run of which `nonzero` of `run_values`
// values are not zero: the largest d with nonzero^2 * 2^d <= run_values^2.
inline int coarser_by(std::size_t nonzero, std::size_t run_values) {
  if (nonzero == 0) return 0;
  return 2 * highest_bit(static_cast<unsigned>(run_values)) -
         bits_needed(static_cast<unsigned>(nonzero * nonzero - 1));
}

}  // namespace fsl
