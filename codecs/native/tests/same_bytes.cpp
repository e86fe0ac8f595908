// Prints checksums of the frame, the decoded values and sums for every format, path and kind of
// input. Any two machines must print the same lines (aarch64.sh compares two).
#include <cstdio>
#include <cstring>
#include <vector>

#include "frame/decode.hpp"
#include "frame/encode.hpp"
#include "kernels/kernels.hpp"

namespace {

constexpr std::size_t kValues = 300'001;
constexpr std::size_t kChunk = 131'072;

// Bits from a linear congruential generator (Knuth's MMIX constants): distributions of libraries
// may differ between machines.
struct Generator {
  std::uint64_t state = 1;
  std::uint32_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::uint32_t>(state >> 32);
  }
};

// kind 0: about bell-shaped; 1: any exponent, all bits; 2: sums with escapes and zeros.
std::vector<float> values_of(int kind) {
  Generator generator;
  std::vector<float> values(kValues);
  for (std::size_t i = 0; i < kValues; ++i) {
    if (kind == 1) {
      std::uint32_t bits = generator.next();
      if ((bits & 0x7F800000) == 0x7F800000 && i % 1000 != 0) bits &= 0xBFFFFFFF;
      std::memcpy(&values[i], &bits, 4);
      continue;
    }
    std::int32_t sum = 0;
    for (int part = 0; part < 4; ++part)
      sum += static_cast<std::int32_t>(generator.next() >> 8) - (1 << 23);
    values[i] = static_cast<float>(sum) * 0x1p-30F;
    if (kind == 2 && generator.next() % 64 == 0) values[i] *= 1000.0F;
    if (kind == 2 && i / 1000 % 7 == 0) values[i] = 0.0F;
  }
  return values;
}

}  // namespace

int main() {
  const fsl::Limits limits = {kValues, std::uint64_t{1} << 40};
  for (int path = 0; path < 3; ++path) {
    const fsl::Kernels* const kernels = fsl::kernels_of(static_cast<fsl::Path>(path));
    if (kernels == nullptr) continue;
    const fsl::Kernels& plain = *fsl::kernels_of(fsl::Path::kScalar);
    for (unsigned format = 0; format < 5; ++format) {
      for (int kind = 0; kind < 3; ++kind) {
        const std::vector<float> values = values_of(kind);
        std::vector<std::uint8_t> frame(fsl::bound(kValues, kChunk));
        const fsl::EncodeSettings settings = {fsl::format_of(format), 128, kChunk, true, 14, 1};
        const fsl::Source source = {values.data(), nullptr, nullptr, nullptr, kValues};
        const std::size_t size = fsl::encode_frame(*kernels, settings, source, frame.data());
        std::vector<float> decoded(kValues), sums(values.size(), 1.0F);
        std::uint64_t count = 0;
        const fsl::DecodeRequest request = {frame.data(), size, limits, 1};
        if (!fsl::decode_frame(*kernels, request, {decoded.data(), nullptr, kValues}, count).ok() ||
            !fsl::accumulate_frame(*kernels, request, sums.data(), kValues, 0.3F, count).ok()) {
          std::puts("a frame of ours was refused");
          return 1;
        }
        const auto sum_of = [&](const void* bytes, std::size_t length) {
          return plain.crc32(0, static_cast<const std::uint8_t*>(bytes), length);
        };
        std::printf("format %u kind %d: %zu bytes %08x %08x %08x\n", format, kind, size,
                    sum_of(frame.data(), size), sum_of(decoded.data(), 4 * kValues),
                    sum_of(sums.data(), 4 * kValues));
      }
    }
  }
  return 0;
}
