// Reads a coded plane's symbols piece by piece (docs/WIRE.md, "Streams").
#pragma once

#include "entropy/code_table.hpp"
#include "status.hpp"

namespace fsl {

class StreamReader {
 public:
  // Reads the head of the stream of `values` symbols at `position`, which moves past the stream.
  // `lanes` holds the state from then on.
  Status open(const CodeTable& table, std::size_t values, const std::uint8_t*& position,
              const std::uint8_t* end, Lanes& lanes, std::size_t many_from = kManyLanesFrom);

  // Reads the next `count` symbols, with slack after them; those without a code come from `listed`,
  // as kernels take them. All calls but the last read multiples of kMostLanes.
  Status read(const Kernels& kernels, std::size_t count, const std::uint8_t*& listed,
              std::uint8_t* symbols, Beside& beside);

  // The same, joined with two planes below.
  Status read_codes(const Kernels& kernels, std::size_t count, const std::uint8_t*& listed,
                    const TwoPlanes& below, CodesRead& read, Beside& beside);

  // Whether the next `count` symbols are whole rounds of kMostLanes, all with code words, and more
  // follow. Then their values can be written while they are read.
  bool reads_values(std::size_t count) const;
  Status read_float8(const Kernels& kernels, std::size_t count, const std::uint8_t*& listed,
                     const TwoPlanes& below, const Float8Values& values, const Output& output,
                     ValuesRead& found, Beside& beside);
  Status read_uniform(const Kernels& kernels, std::size_t count, const std::uint8_t*& listed,
                      const TwoPlanes& below, const UniformValues& values, const Output& output,
                      ValuesRead& found, Beside& beside);

 private:
  Status check_end() const;
  std::size_t words_of(std::size_t count) const;
  Status finish(std::size_t words, std::size_t count, const std::uint8_t*& listed,
                std::uint8_t* symbols);

  const CodeTable* table_ = nullptr;
  Lanes* state_ = nullptr;
  std::size_t lanes_ = 0;
  std::size_t coded_ = 0;  // symbols with code words; the lanes' last states follow
  std::size_t done_ = 0;
  const std::uint8_t* position_ = nullptr;
  const std::uint8_t* end_ = nullptr;
};

}  // namespace fsl
