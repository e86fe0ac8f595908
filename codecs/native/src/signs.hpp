// Random signs: bit q % 64 of word q / 64 of a raw Philox4x64-10 stream, 1 for +1.
//
// J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011. Words and keys are those of
// numpy.random.Philox with counter 0; any word is computed without those before it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsl {

struct SignKey {
  std::uint64_t seed, stream;
};

// Words `first` to `first + count` of a stream.
void sign_words(SignKey key, std::uint64_t first, std::uint64_t* out, std::size_t count);

// values[i] += steps[j] * (sign `offset + i` of stream j), for each j in order: one fp32 addition
// each, never a multiplication.
void add_signs(float* values, std::size_t count, std::uint64_t offset, const SignKey* keys,
               const float* steps, std::size_t streams);

}  // namespace fsl
