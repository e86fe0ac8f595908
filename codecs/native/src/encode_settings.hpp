// The caller's settings for encoding.
#pragma once

#include <cstddef>

namespace fsl {

struct Format;

struct EncodeSettings {
  const Format* format;
  std::size_t block_values;
  std::size_t chunk_values;
  bool entropy;
  int step_log2;
  int threads;
};

}  // namespace fsl
