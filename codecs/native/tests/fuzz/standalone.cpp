// Drives a fuzz target without libFuzzer (gcc has none): mutates the given files at random,
// reproducibly for a seed.
//
//     target SECONDS SEED FILE...
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Bytes = std::vector<std::uint8_t>;

class Mutator {
 public:
  Mutator(std::uint64_t seed, const std::vector<Bytes>& corpus)
      : generator_(seed), corpus_(corpus) {}

  Bytes next() {
    Bytes bytes = corpus_[below(corpus_.size())];
    for (std::size_t left = 1 + below(4); left > 0 && !bytes.empty(); --left) change(bytes);
    return bytes;
  }

 private:
  std::size_t below(std::size_t end) { return static_cast<std::size_t>(generator_() % end); }

  void change(Bytes& bytes) {
    // Heads and code tables are at the front, where a byte matters more.
    const std::size_t at = below(below(3) > 0 && bytes.size() > 160 ? 160 : bytes.size());
    const auto place = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    switch (below(6)) {
      case 0:
        bytes[at] ^= static_cast<std::uint8_t>(1u << below(8));
        break;
      case 1:
        bytes[at] = static_cast<std::uint8_t>(generator_());
        break;
      case 2: {
        static constexpr std::uint8_t kEdges[] = {0, 1, 2, 3, 4, 12, 13, 127, 128, 254, 255};
        bytes[at] = kEdges[below(sizeof kEdges)];
        break;
      }
      case 3:
        bytes.erase(place, place + static_cast<std::ptrdiff_t>(
                                       1 + below(bytes.size() - at < 9 ? bytes.size() - at : 9)));
        break;
      case 4:
        bytes.insert(place, 1 + below(9), static_cast<std::uint8_t>(generator_()));
        break;
      default: {
        const Bytes& other = corpus_[below(corpus_.size())];
        for (std::size_t i = at; i < bytes.size() && i < other.size() && i < at + 64; ++i)
          bytes[i] = other[i];
      }
    }
  }

  std::mt19937_64 generator_;
  const std::vector<Bytes>& corpus_;
};

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) {
    std::fprintf(stderr, "use: %s SECONDS SEED FILE...\n", arguments[0]);
    return 2;
  }
  std::vector<Bytes> corpus;
  for (int i = 3; i < count; ++i) {
    std::ifstream file(arguments[i], std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    LLVMFuzzerTestOneInput(corpus.back().data(), corpus.back().size());
  }
  Mutator mutator(std::strtoull(arguments[2], nullptr, 10), corpus);
  const auto end = std::chrono::steady_clock::now() +
                   std::chrono::duration<double>(std::strtod(arguments[1], nullptr));
  std::uint64_t runs = 0;
  while (std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 100; ++i, ++runs) {
      const Bytes bytes = mutator.next();
      LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    }
  }
  std::printf("%llu inputs\n", static_cast<unsigned long long>(runs));
}
