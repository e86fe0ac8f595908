// Differential test of the kernels: each path of this machine against the plain C++ one, with odd
// counts, unaligned buffers, every kind of fp32 value, random codes and damaged streams. Each
// buffer ends at a page that faults, or has guard bytes after its slack.
//
// tests/unit_codecs/test_codec_fuzz.py builds and runs it, fuzz/run.sh under the sanitizers. By
// hand, in this folder:
//
//   g++ -std=c++17 -O2 -ffp-contract=off -I../src kernels_test.cpp ../src/kernels/*.cpp \
//       ../src/kernels/*/*.cpp -o kernels_test && ./kernels_test [rounds]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/paths.hpp"
#include "kernels_test_lanes.hpp"
#include "kernels_test_ranks.hpp"
#include "kernels_test_read_values.hpp"
#include "kernels_test_sinks.hpp"
#include "kernels_test_values.hpp"

using namespace fsl;

namespace {

std::size_t some_count() {
  switch (below(6)) {
    case 0:
      return 1 + below(130);
    case 1:
      return kBlockValues;
    case 2:
      return 64 * (1 + below(256));
    default:
      return 1 + below(kBlockValues);
  }
}

// --- fp32 in

void test_encoding(const Kernels& plain, const Kernels& kernels) {
  const std::size_t count = some_count();
  const std::size_t block = std::size_t{16} << below(7);
  const int kind = static_cast<int>(below(8));
  Edge input(4 * count);
  float* x = input.as<float>();
  fill(x, count, kind);
  const std::uint32_t first = bits_of(x[below(4) == 0 ? below(count) : 0]);
  const std::size_t runs = (count + block - 1) / block;
  const std::string about = " kind " + std::to_string(kind) + " count " + std::to_string(count) +
                            " block " + std::to_string(block);
  Seen want_seen;
  Seen seen;
  const auto check_seen = [&](const std::string& what) {
    if (want_seen.largest_magnitude != seen.largest_magnitude ||
        (want_seen.differing_bits == 0) != (seen.differing_bits == 0)) {
      fail(what + about + ": seen");
    }
    want_seen = Seen();
    seen = Seen();
  };

  plain.look(x, count, first, want_seen);
  const std::uint32_t largest = want_seen.largest_magnitude;
  kernels.look(x, count, first, seen);
  check_seen("look");

  for (const Float8& format : kFormats) {
    Edge want_codes(count, kSlackBytes), codes(count, kSlackBytes), want_scales(runs, kSlackBytes),
        scales(runs, kSlackBytes);
    plain.quantise_float8(x, count, format, block, first, want_codes.as(), want_scales.as(),
                          want_seen, 0);
    kernels.quantise_float8(x, count, format, block, first, codes.as(), scales.as(), seen,
                            below(2) * below(1 << 20));
    check_seen("quantise_float8");
    if (largest >= (format.mantissa_bits == 3 ? 0x7F780000U : 0x7F700000U)) continue;
    same(want_scales.as(), scales.as(), runs, "scales" + about);
    same(want_codes.as(), codes.as(), count, "codes" + about);
    codes.check_front("codes");
  }

  for (const int step_log2 : {0, 14, 40}) {
    Edge want_codes(count, kSlackBytes), codes(count, kSlackBytes),
        want_steps(2 * runs, kSlackBytes), steps(2 * runs, kSlackBytes);
    const bool sparse = below(2) != 0;
    const auto quantise = [=](const Kernels& those) {
      return sparse ? those.quantise_sparse : those.quantise_uniform;
    };
    const std::size_t want_escapes =
        quantise(plain)(x, count, step_log2, block, first, want_codes.as(),
                        want_steps.as<std::int16_t>(), want_seen);
    const std::size_t escapes = quantise(kernels)(x, count, step_log2, block, first, codes.as(),
                                                  steps.as<std::int16_t>(), seen);
    check_seen("quantise_uniform");
    if (largest >= 0x7B800000) continue;
    same(want_steps.as(), steps.as(), 2 * runs, "steps" + about);
    same(want_codes.as(), codes.as(), count, "uniform codes" + about);
    if (escapes != want_escapes) fail("escapes" + about);
  }

  for (const int planes : {2, 4}) {
    std::vector<std::vector<std::uint8_t>> want(4, std::vector<std::uint8_t>(count + kSlackBytes)),
        got = want;
    std::uint8_t* const want_planes[4] = {want[0].data(), want[1].data(), want[2].data(),
                                          want[3].data()};
    std::uint8_t* const got_planes[4] = {got[0].data(), got[1].data(), got[2].data(),
                                         got[3].data()};
    (planes == 2 ? plain.cut_bfloat16 : plain.cut_float32)(x, count, first, want_planes, want_seen);
    (planes == 2 ? kernels.cut_bfloat16 : kernels.cut_float32)(x, count, first, got_planes, seen);
    check_seen("cut");
    for (int i = 0; i < planes; ++i)
      same(want_planes[i], got_planes[i], count, "cut plane " + std::to_string(i) + about);
  }

  Edge words(2 * count), reference(4 * count), residual(4 * count), want(4 * count), got(4 * count);
  for (std::size_t i = 0; i < count; ++i)
    words.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(chance());
  fill(reference.as<float>(), count, kind);
  fill(residual.as<float>(), count, kind);
  for (int which = 0; which < 8; ++which) {
    const float* values = (which & 1) != 0 ? x : nullptr;
    const std::uint16_t* halves = (which & 1) != 0 ? nullptr : words.as<std::uint16_t>();
    const float* minus = (which & 2) != 0 ? reference.as<float>() : nullptr;
    const float* plus = (which & 4) != 0 ? residual.as<float>() : nullptr;
    plain.combine(values, halves, minus, plus, count, want.as<float>());
    kernels.combine(values, halves, minus, plus, count, got.as<float>());
    for (std::size_t i = 0; i < count; ++i) {
      const float a = want.as<float>()[i];
      const float b = got.as<float>()[i];
      if (bits_of(a) != bits_of(b) && !(a != a && b != b)) fail("combine" + about);
    }
    got.check_front("combine");
  }
}

// --- maps, planes

void test_map(const Kernels& plain, const Kernels& kernels) {
  const std::size_t count = some_count();
  const std::string about = " count " + std::to_string(count);
  Edge bytes(count, kSlackBytes), want(count, kSlackBytes), got(count, kSlackBytes), entries(256);
  for (std::size_t i = 0; i < count; ++i) bytes.as()[i] = static_cast<std::uint8_t>(chance());
  const std::size_t values = below(2) != 0 ? 256 : 1 + below(20);
  for (std::size_t i = 0; i < 256; ++i) entries.as()[i] = static_cast<std::uint8_t>(below(values));
  plain.map(bytes.as(), count, entries.as(), want.as());
  kernels.map(bytes.as(), count, entries.as(), got.as());
  for (std::size_t i = 0; i < count; ++i) {
    if (want.as()[i] != entries.as()[bytes.as()[i]]) fail("map of plain kernels" + about);
  }
  same(want.as(), got.as(), count, "map" + about);
  const std::uint8_t wanted = static_cast<std::uint8_t>(below(values));
  std::vector<std::uint16_t> want_places(count + 1), places(count + 1);
  const std::size_t want_found = plain.find_byte(got.as(), count, wanted, want_places.data());
  const std::size_t found = kernels.find_byte(got.as(), count, wanted, places.data());
  const std::size_t counted =
      static_cast<std::size_t>(std::count(got.as(), got.as() + count, wanted));
  if (found != counted || want_found != counted || places != want_places)
    fail("found bytes" + about);
  // By a bitmap of whole words, from none to all bytes.
  Edge bitmap((count + 63) / 64 * 8), from((count + 63) / 64 * 64, kSlackBytes),
      picked(count, kSlackBytes);
  const std::size_t rarity = below(2) != 0 ? 1 + below(100) : below(3);
  std::vector<std::uint8_t> want_picked;
  std::memset(bitmap.as(), 0, (count + 63) / 64 * 8);
  for (std::size_t i = 0; i < count; ++i) {
    from.as()[i] = bytes.as()[i];
    if (rarity == 0 || below(rarity) != 0) continue;
    bitmap.as<std::uint64_t>()[i / 64] |= std::uint64_t{1} << i % 64;
    want_picked.push_back(bytes.as()[i]);
  }
  if (kernels.pick(from.as(), bitmap.as<std::uint64_t>(), (count + 63) / 64, picked.as()) !=
      want_picked.size())
    fail("bytes picked" + about);
  same(want_picked.data(), picked.as(), want_picked.size(), "picked bytes" + about);
  picked.check_front("picked bytes");
}

void test_planes(const Kernels& plain, const Kernels& kernels) {
  const std::size_t count = some_count();
  const bool rotated = below(2) != 0;
  const int width = static_cast<int>(below(9));
  const std::string about = " count " + std::to_string(count) + " width " + std::to_string(width) +
                            (rotated ? " rotated" : "");
  Edge codes(count, kSlackBytes), upper(count, kSlackBytes), want_joined(count, kSlackBytes),
      joined(count, kSlackBytes);
  for (std::size_t i = 0; i < count; ++i) {
    const auto code = static_cast<std::uint8_t>(chance());
    codes.as()[i] = code;
    upper.as()[i] =
        static_cast<std::uint8_t>((rotated ? (code << 1 & 0xFF) | code >> 7 : code) >> width);
  }
  const std::size_t bytes = static_cast<std::size_t>(width) * ((count + 7) / 8);
  Edge want(bytes, kSlackBytes), got(bytes, kSlackBytes);
  if (plain.write_bit_planes(codes.as(), count, rotated, width, want.as()) != bytes ||
      kernels.write_bit_planes(codes.as(), count, rotated, width, got.as()) != bytes) {
    fail("bytes of planes" + about);
  }
  same(want.as(), got.as(), bytes, "planes" + about);

  // Planes of a piece lie further apart than its bits need.
  const std::size_t there = (count + 7) / 8;
  const std::size_t apart = there + below(3) * below(100);
  Edge in(width == 0 ? 0 : static_cast<std::size_t>(width - 1) * apart + there);
  for (std::size_t plane = 0; plane < static_cast<std::size_t>(width); ++plane) {
    std::memcpy(in.as() + plane * apart, want.as() + plane * there, there);
  }
  kernels.join(width < 8 ? upper.as() : nullptr, in.as(), apart, count, rotated, width,
               joined.as());
  same(codes.as(), joined.as(), count, "join" + about);
  const std::uint8_t* const symbols = width < 8 && below(2) != 0 ? upper.as() : nullptr;
  for (std::size_t plane = 0; plane < static_cast<std::size_t>(width); ++plane) {
    for (std::size_t i = 0; i < there; ++i)
      in.as()[plane * apart + i] = static_cast<std::uint8_t>(chance());
  }
  plain.join(symbols, in.as(), apart, count, rotated, width, want_joined.as());
  kernels.join(symbols, in.as(), apart, count, rotated, width, joined.as());
  same(want_joined.as(), joined.as(), count, "join anything" + about);
}

// --- groups

void test_groups(const Kernels& plain, const Kernels& kernels) {
  const std::size_t count = some_count();
  const int size = below(2) != 0 ? 2 : 4;
  const std::size_t symbols =
      (count + static_cast<std::size_t>(size) - 1) / static_cast<std::size_t>(size);
  const std::uint64_t spread = 1 + below(below(2) != 0 ? 10 : 128);
  Edge codes(count, kSlackBytes), want(symbols, kSlackBytes), found(symbols, kSlackBytes);
  Edge want_codes(count, kSlackBytes), found_codes(count, kSlackBytes);
  const std::size_t words = (count + 63) / 64;
  std::vector<std::uint64_t> want_listed(words + 1), listed(words + 1);
  for (std::size_t i = 0; i < count; ++i)
    codes.as()[i] = static_cast<std::uint8_t>(128 - spread + below(2 * spread + 1));
  plain.group(codes.as(), count, size, want.as(), want_listed.data());
  kernels.group(codes.as(), count, size, found.as(), listed.data());
  const std::string about = " of " + std::to_string(size) + ", " + std::to_string(count);
  same(want.as(), found.as(), symbols, "group" + about);
  if (want_listed != listed) fail("group" + about + ": listed");
  // Any symbols, with any fill of the last group, and the codes that they list.
  if (below(2) != 0) {
    for (std::size_t i = 0; i < symbols; ++i)
      want.as()[i] = static_cast<std::uint8_t>(chance() & (size == 2 ? 63 : 255));
  }
  std::vector<std::uint8_t> others(count + 2 * kSlackBytes);
  for (std::uint8_t& code : others) code = static_cast<std::uint8_t>(chance());
  const std::uint8_t* next = others.data();
  const std::uint8_t* same_next = others.data();
  plain.ungroup(want.as(), count, size, next, want_codes.as());
  kernels.ungroup(want.as(), count, size, same_next, found_codes.as());
  same(want_codes.as(), found_codes.as(), symbols * static_cast<std::size_t>(size),
       "ungroup" + about);
  if (next != same_next) fail("ungroup" + about + ": listed");
}

// --- masks

void test_masks(const Kernels& plain, const Kernels& kernels) {
  const std::size_t count = some_count();
  const std::size_t words = (count + 63) / 64;
  const std::uint8_t zero = below(2) != 0 ? 128 : 0;
  const std::uint64_t share = below(3) == 0 ? 256 : 1 + below(40);
  Edge bytes(count, kSlackBytes), want(count, kSlackBytes), found(count, kSlackBytes);
  for (std::size_t i = 0; i < count; ++i)
    bytes.as()[i] = below(256) < share ? static_cast<std::uint8_t>(chance()) : zero;
  std::vector<std::uint64_t> want_mask(words + 1), mask(words + 1);
  const std::string about = " of " + std::to_string(count);
  const std::size_t ones = plain.mark(bytes.as(), count, zero, want_mask.data());
  if (kernels.mark(bytes.as(), count, zero, mask.data()) != ones || mask != want_mask)
    fail("mark" + about);
  if (kernels.count_ones(mask.data(), words) != ones) fail("count_ones" + about);
  Edge picked(ones, kSlackBytes);
  std::vector<std::uint8_t> those(count + 2 * kSlackBytes);
  plain.pick(bytes.as(), mask.data(), words, those.data());
  std::copy_n(those.data(), ones, picked.as());
  if (plain.spread(picked.as(), mask.data(), count, zero, want.as()) != ones ||
      kernels.spread(picked.as(), mask.data(), count, zero, found.as()) != ones)
    fail("spread" + about);
  same(bytes.as(), want.as(), count, "plain spread" + about);
  same(bytes.as(), found.as(), count, "spread" + about);
}

// --- fp32 out

void test_decoding(const Kernels& plain, const Kernels& kernels) {
  const std::size_t count = some_count();
  const std::size_t block = std::size_t{16} << below(7);
  const std::size_t runs = (count + block - 1) / block;
  Edge codes(count, kSlackBytes), scales(runs, kSlackBytes), steps(2 * runs, kSlackBytes);
  const std::string about = " block " + std::to_string(block);

  for (const Float8& format : kFormats) {
    const bool special = below(4) == 0;  // not numbers, which give arbitrary values
    const bool highest = below(4) == 0;
    for (std::size_t i = 0; i < count; ++i) {
      std::uint32_t code = static_cast<std::uint32_t>(chance()) & 0xFF;
      if (!special && (code & 0x7F) >= format.special_code) code &= 0x83;
      if (highest && below(2) != 0) code &= 0x87;
      codes.as()[i] = static_cast<std::uint8_t>(code);
    }
    fill_scales(format, highest, runs, scales.as());
    compare_sinks(plain, kernels, count, "dequantise_float8" + about,
                  [&](const Kernels& which, const Output& output) {
                    which.dequantise_float8(codes.as(), scales.as(), count, format, block, output);
                    return !special;
                  });
  }

  std::vector<float> listed;
  const bool nonfinite = below(4) == 0;
  bool finite = true;
  for (std::size_t i = 0; i < count; ++i) {
    codes.as()[i] = static_cast<std::uint8_t>(
        below(5) == 0 && below(10) != 0 ? 1 + below(255) : 128 - 20 + below(41));
    if (below(40) == 0) codes.as()[i] = 0;
    if (codes.as()[i] == 0)
      listed.push_back(below(100) == 0 && nonfinite ? float_of(0x7F800001)
                                                    : static_cast<float>(below(100000)));
    if (codes.as()[i] == 0 && listed.back() != listed.back()) finite = false;
  }
  for (std::size_t run = 0; run < runs; ++run)
    steps.as<std::int16_t>()[run] = static_cast<std::int16_t>(static_cast<int>(below(985)) - 504);
  Edge escapes(4 * listed.size() + 1);
  if (!listed.empty()) std::memcpy(escapes.as() + 1, listed.data(), 4 * listed.size());
  compare_sinks(plain, kernels, count, "dequantise_uniform" + about,
                [&](const Kernels& which, const Output& output) {
                  which.dequantise_uniform(codes.as(), steps.as<std::int16_t>(), escapes.as() + 1,
                                           count, block, output);
                  return finite;
                });

  std::vector<std::vector<std::uint8_t>> bytes(4, std::vector<std::uint8_t>(count + kSlackBytes));
  const bool small = below(2) != 0;
  for (auto& plane : bytes) {
    for (std::uint8_t& value : plane)
      value = static_cast<std::uint8_t>(small ? below(255) : chance());
  }
  const std::uint8_t* const planes[4] = {bytes[0].data(), bytes[1].data(), bytes[2].data(),
                                         bytes[3].data()};
  compare_sinks(plain, kernels, count, "join_bfloat16",
                [&](const Kernels& which, const Output& output) {
                  return which.join_bfloat16(planes, count, output);
                });
  std::uint32_t largest[2] = {0, 0};
  int calls = 0;
  compare_sinks(plain, kernels, count, "join_float32",
                [&](const Kernels& which, const Output& output) {
                  Seen seen;
                  which.join_float32(planes, count, output, seen);
                  largest[calls++ & 1] = seen.largest_magnitude;
                  return true;
                });
  if (largest[0] != largest[1]) fail("join_float32: seen");
  Edge raw(4 * count + 1);
  std::vector<float> values(count);
  fill(values.data(), count, static_cast<int>(below(8)));
  std::memcpy(raw.as() + 1, values.data(), 4 * count);
  compare_sinks(plain, kernels, count, "copy_float32",
                [&](const Kernels& which, const Output& output) {
                  Seen seen;
                  which.copy_float32(raw.as() + 1, count, output, seen);
                  largest[calls++ & 1] = seen.largest_magnitude;
                  return true;
                });
  if (largest[0] != largest[1]) fail("copy_float32: seen");
}

void test_bytes(const Kernels& kernels) {
  const std::size_t count = below(below(2) != 0 ? 3000 : 100);
  Edge data(count);
  const bool is_sparse = below(2) != 0;
  for (std::size_t i = 0; i < count; ++i)
    data.as()[i] = is_sparse ? std::uint8_t{0} : static_cast<std::uint8_t>(chance());
  if (is_sparse && count > 0) data.as()[below(count)] = static_cast<std::uint8_t>(chance());
  const std::uint32_t start = static_cast<std::uint32_t>(chance());
  if (kernels.crc32(start, data.as(), count) != crc_by_bits(start, data.as(), count))
    fail("crc of " + std::to_string(count));
  Edge copy(count + below(2) * below(64));
  if (kernels.copy_crc32(start, data.as(), count, copy.as()) !=
      crc_by_bits(start, data.as(), count))
    fail("crc of " + std::to_string(count) + " copied");
  if (!std::equal(data.as(), data.as() + count, copy.as()))
    fail("copy of " + std::to_string(count));
  copy.check_front("copy");
  const std::uint8_t byte = is_sparse || count == 0 ? std::uint8_t{0x7F} : data.as()[below(count)];
  std::uint8_t largest = 0;
  for (std::size_t i = 0; i < count; ++i)
    largest = std::max<std::uint8_t>(largest, data.as()[i] & byte);
  if (kernels.largest_byte(data.as(), count, byte) != largest)
    fail("largest byte of " + std::to_string(count));
  const auto found = static_cast<std::size_t>(std::count(data.as(), data.as() + count, byte));
  if (kernels.count_byte(data.as(), count, byte) != found)
    fail("bytes counted of " + std::to_string(count));
}

}  // namespace

int main(int arguments, char** argument) {
  const int rounds = arguments > 1 ? std::atoi(argument[1]) : 300;
  const Kernels& plain = kScalarKernels;
  const auto run = [&](const Kernels& kernels, const char* name) {
    test_all_last_ranks(plain, kernels);
    for (int round = 0; round < rounds; ++round) {
      chance.seed(static_cast<std::uint64_t>(round));
      test_encoding(plain, kernels);
      test_lanes(plain, kernels);
      test_last_bytes(plain, kernels, kMostLanes);
      test_last_bytes(plain, kernels, kFewLanes);
      test_map(plain, kernels);
      test_planes(plain, kernels);
      test_groups(plain, kernels);
      test_masks(plain, kernels);
      test_ranks(plain, kernels);
      test_decoding(plain, kernels);
      test_reading_values(plain, kernels);
      test_bytes(kernels);
    }
    std::printf("%s: %d rounds\n", name, rounds);
  };
  run(plain, "scalar");
#if FSL_X86_KERNELS
  // All tables for AVX2 that this machine can run, whichever of them it uses.
  if (const Kernels* const used = kernels_of(Path::kAvx2)) {
    run(kAvx2Kernels, "avx2");
    if (used == &kAvx2KernelsWithWideCrc) run(*used, "avx2 with a wide CRC");
  }
  if (kernels_of(Path::kAvx512) != nullptr) run(kAvx512Kernels, "avx512");
#endif
  return 0;
}
