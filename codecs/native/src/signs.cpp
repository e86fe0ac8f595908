#include "signs.hpp"

#include <algorithm>
#include <cstring>

#include "float_environment.hpp"

#if defined(_MSC_VER) && !defined(__clang__)
#include <intrin.h>
#endif

namespace fsl {

namespace {

constexpr std::size_t kBlockWords = 4;
// Values that stay in the first-level cache while all streams are added to them.
constexpr std::size_t kAtOnce = 4096;

void multiply(std::uint64_t a, std::uint64_t b, std::uint64_t& high, std::uint64_t& low) {
#if defined(__SIZEOF_INT128__)
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  high = static_cast<std::uint64_t>(product >> 64);
  low = static_cast<std::uint64_t>(product);
#elif defined(_M_X64)
  low = _umul128(a, b, &high);
#else
  high = __umulh(a, b);
  low = a * b;
#endif
}

// The four words of a block; NumPy counts up before it computes.
void block_words(SignKey key, std::uint64_t block, std::uint64_t* out) {
  std::uint64_t c0 = block + 1, c1 = c0 == 0 ? 1 : 0, c2 = 0, c3 = 0;
  for (int round = 0; round < 10; ++round) {
    std::uint64_t high0, low0, high1, low1;
    multiply(0xD2E7470EE14C6C93u, c0, high0, low0);
    multiply(0xCA5A826395121157u, c2, high1, low1);
    c0 = high1 ^ c1 ^ key.seed;
    c2 = high0 ^ c3 ^ key.stream;
    c1 = low1;
    c3 = low0;
    key.seed += 0x9E3779B97F4A7C15u;
    key.stream += 0xBB67AE8584CAA73Bu;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

// Four terms, +step or -step, for each value of four bits.
struct Terms {
  float of[16][4];
  explicit Terms(float step) {
    for (unsigned bits = 0; bits < 16; ++bits) {
      for (unsigned i = 0; i < 4; ++i) of[bits][i] = (bits >> i & 1u) != 0 ? step : -step;
    }
  }
};

// Copies, so that the compiler sees that nothing overlaps and takes one vector instruction.
void add_four(float* values, const float* terms) {
  float sum[4], added[4];
  std::memcpy(sum, values, sizeof(sum));
  std::memcpy(added, terms, sizeof(added));
  for (int i = 0; i < 4; ++i) sum[i] += added[i];
  std::memcpy(values, sum, sizeof(sum));
}

void add_stream(float* values, std::size_t count, std::uint64_t offset, SignKey key, float step) {
  std::uint64_t words[kAtOnce / 64 + 2];
  const std::uint64_t first = offset / 64;
  sign_words(key, first, words, static_cast<std::size_t>((offset + count - 1) / 64 - first) + 1);
  const Terms terms(step);
  std::size_t at = 0;
  for (std::uint64_t position = offset % 64; at < count;) {
    const std::uint64_t bits = words[position / 64] >> (position % 64);
    const std::size_t here = std::min(count - at, static_cast<std::size_t>(64 - position % 64));
    std::size_t i = 0;
    for (; i + 4 <= here; i += 4)
      add_four(values + at + i, terms.of[bits >> i & 15u]);
    for (; i < here; ++i) values[at + i] += (bits >> i & 1u) != 0 ? step : -step;
    at += here;
    position += here;
  }
}

}  // namespace

void sign_words(SignKey key, std::uint64_t first, std::uint64_t* out, std::size_t count) {
  std::uint64_t words[kBlockWords];
  for (std::size_t done = 0; done < count;) {
    const std::uint64_t word = first + done;
    const std::size_t skip = static_cast<std::size_t>(word % kBlockWords);
    const std::size_t here = std::min(count - done, kBlockWords - skip);
    block_words(key, word / kBlockWords, words);
    std::memcpy(out + done, words + skip, here * sizeof(std::uint64_t));
    done += here;
  }
}

void add_signs(float* values, std::size_t count, std::uint64_t offset, const SignKey* keys,
               const float* steps, std::size_t streams) {
  const FloatEnvironment exact;
  for (std::size_t at = 0; at < count; at += kAtOnce) {
    const std::size_t here = std::min(kAtOnce, count - at);
    for (std::size_t j = 0; j < streams; ++j)
      add_stream(values + at, here, offset + at, keys[j], steps[j]);
  }
}

}  // namespace fsl
