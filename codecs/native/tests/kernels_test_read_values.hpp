// For kernels_test.cpp: lanes to values in one pass, against read_codes of the plain kernels and
// then their values.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/kernels.hpp"
#include "kernels_test_lanes.hpp"
#include "kernels_test_sinks.hpp"
#include "kernels_test_values.hpp"

namespace {

// 8-bit codes as a stream of all lanes, the list of those without a code word, and two planes, with
// nothing after the planes.
struct CodesToRead {
  RandomCode random{6};
  std::size_t count;
  bool rotated;
  std::vector<std::uint8_t> symbols;
  std::vector<std::uint8_t> list;
  std::size_t listed;  // right ones; those after them, for damaged streams, are random
  std::size_t apart;
  Edge planes;
  std::vector<std::uint8_t> stream;
  fsl::Lanes start;  // for the reader
  fsl::Lanes after;
  std::string about;

  // wanted(code) chooses codes, if there are such. One of `rarity` is 0, unless rarity is 0.
  template <typename Wanted>
  CodesToRead(std::size_t values, bool is_rotated, std::size_t rarity, Wanted wanted)
      : count(values),
        rotated(is_rotated),
        apart(values / 8 + below(3) * below(100)),
        planes(apart + values / 8) {
    for (std::size_t i = 0; i < apart + count / 8; ++i)
      planes.as()[i] = static_cast<std::uint8_t>(chance());
    const bool any = below(3) == 0;
    while (rarity != 0 && random.lengths[0] == 0 && below(8) != 0) random = RandomCode(6);
    for (std::size_t i = 0; i < count; ++i) {
      const bool is_zero = rarity != 0 && random.lengths[0] != 0 && below(rarity) == 0;
      symbols.push_back(is_zero ? put(i, 0, 0) : draw(i, any, wanted));
    }
    for (const std::uint8_t symbol : symbols) {
      if (random.is_uncoded(symbol)) list.push_back(symbol);
    }
    listed = list.size();
    while (list.size() < count) list.push_back(static_cast<std::uint8_t>(below(64)));
    after = some_lanes();
    start = after;
    stream = write_by_words(random, symbols, fsl::kMostLanes, start);
    // Bits above those in use are arbitrary.
    for (std::size_t lane = 0; lane < fsl::kMostLanes; ++lane) {
      start.high[lane] = static_cast<std::uint8_t>(
          start.high[lane] | static_cast<std::uint32_t>(chance()) << start.used[lane]);
    }
    about = " of " + std::to_string(count) + (rotated ? " rotated" : "") + " codes, " +
            std::to_string(listed) + " listed";
  }

  fsl::TwoPlanes below_them() { return {planes.as(), planes.as() + apart, rotated}; }

  // The codes alone, before anything is put; as Kernels::read_codes.
  const std::uint8_t* read_alone(const fsl::Kernels& kernels, const std::uint8_t* in,
                                 const std::uint8_t* end, fsl::Lanes& state,
                                 const std::uint8_t*& list_left, fsl::CodesRead& read) {
    fsl::Beside nothing;
    return kernels.read_codes(random.code, in, end, count, fsl::kMostLanes, state, list_left,
                              below_them(), read, nothing);
  }

  template <typename Wanted>
  std::uint8_t draw(std::size_t i, bool any, Wanted wanted) {
    for (int attempt = 0;; ++attempt) {
      const std::uint8_t symbol = random.some_symbol(any);
      const std::size_t bits = below(4);
      const std::size_t code = rotated ? symbol * std::size_t{2} + bits / 2 + bits % 2 * 128
                                       : symbol * std::size_t{4} + bits;
      if (attempt == 50 || wanted(static_cast<std::uint8_t>(code))) return put(i, symbol, bits);
    }
  }

  std::uint8_t put(std::size_t i, std::uint8_t symbol, std::size_t bits) {
    set_bit(planes.as(), i, bits / 2 != 0);
    set_bit(planes.as() + apart, i, bits % 2 != 0);
    return symbol;
  }

  static void set_bit(std::uint8_t* bits, std::size_t i, bool is_set) {
    const auto mask = static_cast<std::uint8_t>(1U << i % 8);
    bits[i / 8] = static_cast<std::uint8_t>(is_set ? bits[i / 8] | mask : bits[i / 8] & ~mask);
  }
};

// The outcome of a reading.
struct ValuesOutcome {
  const std::uint8_t* next = nullptr;
  fsl::Lanes state;
  std::size_t listed = 0;
  fsl::ValuesRead found;
};

// Calls read(kernels, in, end, listed, output, outcome) on both sides for every sink, from `bytes`
// with nothing after them; returns the last outcome.
template <typename ReadValues>
ValuesOutcome compare_outcomes(const fsl::Kernels& plain, const fsl::Kernels& kernels,
                               const CodesToRead& codes, const fsl::Lanes& start,
                               const std::vector<std::uint8_t>& bytes, const std::string& what,
                               ReadValues read) {
  Edge in(bytes.size()), list(codes.count, fsl::kSlackBytes);
  if (!bytes.empty()) std::memcpy(in.as(), bytes.data(), bytes.size());
  std::memcpy(list.as(), codes.list.data(), codes.count);
  ValuesOutcome want;
  ValuesOutcome got;
  const auto run = [&](const fsl::Kernels& which, const fsl::Output& output) {
    ValuesOutcome& outcome = &which == &plain ? want : got;
    outcome = ValuesOutcome();
    outcome.state = start;
    const std::uint8_t* listed = list.as();
    const bool is_right = read(which, in.as(), in.as() + bytes.size(), listed, output, outcome);
    outcome.listed = static_cast<std::size_t>(listed - list.as());
    if (&which == &plain) return outcome.next != nullptr && is_right;
    if (want.next != got.next) fail("place after values" + what);
    if (got.next == nullptr) return false;
    same_lanes(want.state, got.state, fsl::kMostLanes, "lanes after values" + what);
    if (want.listed != got.listed) fail("listed symbols used for values" + what);
    if (want.found.largest_code != got.found.largest_code) fail("largest code of values" + what);
    if (want.found.escapes != got.found.escapes) fail("escaped values wanted" + what);
    return is_right;
  };
  compare_sinks(plain, kernels, codes.count, "values" + what, run);
  return got;
}

// The stream as it is, with more bytes after it, cut off, and damaged.
template <typename ReadValues>
void compare_streams(const fsl::Kernels& plain, const fsl::Kernels& kernels,
                     const CodesToRead& codes, const std::string& about, ReadValues read) {
  for (const bool has_more : {false, true}) {
    std::vector<std::uint8_t> bytes = codes.stream;
    if (has_more) bytes.resize(bytes.size() + 1 + below(300), 0xA5);
    const std::string what = about + (has_more ? ", more behind" : ", whole");
    const ValuesOutcome got =
        compare_outcomes(plain, kernels, codes, codes.start, bytes, what, read);
    if (got.next == nullptr) fail("bytes missing" + what);
    same_lanes(codes.after, got.state, fsl::kMostLanes, "lanes at the end" + what);
    if (got.listed != codes.listed) fail("listed symbols" + what);
  }
  std::vector<std::uint8_t> shorter = codes.stream;
  const std::size_t cuts[] = {std::size_t{1}, below(300), below(shorter.size() + 1)};
  shorter.resize(shorter.size() - std::min(shorter.size(), cuts[below(3)]));
  const ValuesOutcome cut =
      compare_outcomes(plain, kernels, codes, codes.start, shorter, about + ", cut off", read);
  if ((cut.next == nullptr) != (shorter.size() < codes.stream.size())) fail("cut off" + about);
  std::vector<std::uint8_t> random = codes.stream;
  const std::size_t changed = below(2) != 0 ? 1 : 50;
  for (std::uint8_t& byte : random)
    byte = below(changed) == 0 ? static_cast<std::uint8_t>(chance()) : byte;
  compare_outcomes(plain, kernels, codes, some_lanes(), random, about + ", damaged", read);
}

// 8-bit floats. Codes that are not numbers are rare, or as frequent as others; their values are
// arbitrary.
void test_reading_float8(const fsl::Kernels& plain, const fsl::Kernels& kernels,
                         std::size_t count) {
  const std::size_t block = std::size_t{64} << below(5);
  const std::size_t runs = (count + block - 1) / block;
  Edge scales(runs, fsl::kSlackBytes);
  for (const fsl::Float8& format : kFormats) {
    const std::size_t special = below(3) == 0 ? 1 + below(2 * count) : 0;
    CodesToRead codes(count, below(2) != 0, 0, [&](std::uint8_t code) {
      return (code & 0x7F) < format.special_code || (special != 0 && below(special) == 0);
    });
    fill_scales(format, below(4) == 0, runs, scales.as());
    const auto read = [&](const fsl::Kernels& which, const std::uint8_t* in,
                          const std::uint8_t* end, const std::uint8_t*& listed,
                          const fsl::Output& output, ValuesOutcome& outcome) {
      if (&which != &plain) {
        const fsl::Float8Values values{format, scales.as(), block};
        outcome.found.largest_code = static_cast<std::uint8_t>(below(2) * 127);  // is set
        SummedBeside summed(which);
        outcome.next =
            which.read_float8(codes.random.code, in, end, count, outcome.state, listed,
                              codes.below_them(), values, output, outcome.found, summed.beside);
        summed.check(outcome.next != nullptr ? count / fsl::kMostLanes : 0, codes.about);
      } else {
        Edge bytes(count, fsl::kSlackBytes);
        fsl::CodesRead codes_read{bytes.as(), 0};
        outcome.next = codes.read_alone(plain, in, end, outcome.state, listed, codes_read);
        outcome.found.largest_code = codes_read.largest;
        if (outcome.next != nullptr)
          plain.dequantise_float8(bytes.as(), scales.as(), count, format, block, output);
      }
      return outcome.found.largest_code < format.special_code;
    };
    compare_streams(plain, kernels, codes,
                    ", mantissa " + std::to_string(format.mantissa_bits) + " block " +
                        std::to_string(block) + codes.about,
                    read);
  }
}

// Uniform codes, with all escaped values, more, or too few. Nothing is readable after them, and
// some are not finite.
void test_reading_uniform(const fsl::Kernels& plain, const fsl::Kernels& kernels,
                          std::size_t count) {
  const std::size_t block = std::size_t{16} << below(7);
  const std::size_t runs = (count + block - 1) / block;
  Edge steps(2 * runs, fsl::kSlackBytes);
  for (std::size_t run = 0; run < runs; ++run)
    steps.as<std::int16_t>()[run] = static_cast<std::int16_t>(static_cast<int>(below(985)) - 504);
  const std::size_t rarities[] = {1, 2 + below(10), 20 + below(200), count};
  const std::size_t rarity = rarities[below(4)];
  CodesToRead codes(count, false, rarity, [](std::uint8_t code) { return code != 0; });
  std::size_t wanted = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const int bits = (codes.planes.as()[i / 8] >> (i % 8) & 1) +
                     (codes.planes.as()[codes.apart + i / 8] >> (i % 8) & 1);
    wanted += codes.symbols[i] == 0 && bits == 0;
  }
  const std::size_t fewer[] = {std::size_t{1}, 1 + below(16), 1 + below(wanted), wanted};
  const std::size_t missing = below(3) == 0 ? std::min(wanted, fewer[below(4)]) : 0;
  const std::size_t left = missing != 0 ? wanted - missing : wanted + below(3) * below(40);
  Edge escapes(4 * left + below(4));
  std::uint8_t* const from = escapes.as();  // at any address
  for (std::size_t i = 0; i < left; ++i) {
    const auto value = static_cast<float>(below(100000)) - 50000;
    std::memcpy(from + 4 * i, &value, 4);
  }
  // One of them, often the last one needed, or the one after it, which must not be reported.
  if (left > 0 && below(2) != 0) {
    const std::size_t places[] = {below(left), wanted == 0 ? 0 : wanted - 1, wanted};
    const std::uint32_t kinds[] = {0x7F800000, 0xFF800000, 0x7FC00000,
                                   0xFFFFFFFF, 0x7F800001, 0x7F7FFFFF};
    std::memcpy(from + 4 * std::min(left - 1, places[below(3)]), &kinds[below(6)], 4);
  }
  const auto read = [&](const fsl::Kernels& which, const std::uint8_t* in, const std::uint8_t* end,
                        const std::uint8_t*& listed, const fsl::Output& output,
                        ValuesOutcome& outcome) {
    if (&which != &plain) {
      const fsl::UniformValues values{steps.as<std::int16_t>(), block, from, left};
      outcome.found.escapes = below(100);  // both are set
      outcome.found.finite = below(2) != 0;
      SummedBeside summed(which);
      outcome.next =
          which.read_uniform(codes.random.code, in, end, count, outcome.state, listed,
                             codes.below_them(), values, output, outcome.found, summed.beside);
      summed.check(outcome.next != nullptr ? count / fsl::kMostLanes : 0, codes.about);
    } else {
      Edge bytes(count, fsl::kSlackBytes);
      fsl::CodesRead codes_read{bytes.as(), 0};
      outcome.next = codes.read_alone(plain, in, end, outcome.state, listed, codes_read);
      if (outcome.next == nullptr) return false;
      outcome.found.escapes =
          static_cast<std::size_t>(std::count(bytes.as(), bytes.as() + count, std::uint8_t{0}));
      for (std::size_t i = 0; i < std::min(left, outcome.found.escapes); ++i)
        outcome.found.finite &= std::isfinite(float_at(from + 4 * i));
      if (outcome.found.escapes <= left)
        plain.dequantise_uniform(bytes.as(), steps.as<std::int16_t>(), from, count, block, output);
    }
    return outcome.found.escapes <= left && outcome.found.finite;
  };
  compare_streams(plain, kernels, codes,
                  ", block " + std::to_string(block) + ", " + std::to_string(left) + " of " +
                      std::to_string(wanted) + " escaped values" + codes.about,
                  read);
}

void test_reading_values(const fsl::Kernels& plain, const fsl::Kernels& kernels) {
  if ((kernels.read_float8 == nullptr) != (kernels.read_uniform == nullptr))
    fail("values are read of some formats only");
  if (kernels.read_float8 == nullptr) return;
  const std::size_t count = below(2) != 0 ? 4096 : fsl::kMostLanes * (1 + below(32));
  test_reading_float8(plain, kernels, count);
  test_reading_uniform(plain, kernels, count);
}

}  // namespace
