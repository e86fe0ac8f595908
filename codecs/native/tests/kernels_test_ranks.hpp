// Ranks, for kernels_test.cpp: writing and reading against the plain kernels, and against
// docs/WIRE.md, bit by bit.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/kernels.hpp"
#include "kernels_test_values.hpp"

namespace {

std::vector<std::uint8_t> bytes_of_bits(const std::vector<bool>& bits) {
  std::vector<std::uint8_t> bytes((bits.size() + 7) / 8, 0);
  for (std::size_t i = 0; i < bits.size(); ++i)
    bytes[i / 8] = static_cast<std::uint8_t>(bytes[i / 8] | bits[i] << i % 8);
  return bytes;
}

// For each rank but the last, a bit for every number that has at least this rank.
std::vector<bool> bits_of_ranks(const std::vector<std::uint8_t>& ranks, int last) {
  std::vector<bool> bits;
  for (int rank = 0; rank < last; ++rank) {
    for (const std::uint8_t number : ranks) {
      if (number >= rank) bits.push_back(number > rank);
    }
  }
  return bits;
}

// The inverse: the number of bytes it takes, or more than exist.
std::size_t read_by_bits(const std::vector<std::uint8_t>& bytes, int last,
                         std::vector<std::uint8_t>& ranks) {
  std::size_t bit = 0;
  std::fill(ranks.begin(), ranks.end(), std::uint8_t{0});
  for (int rank = 0; rank < last; ++rank) {
    for (std::uint8_t& number : ranks) {
      if (number < rank) continue;
      if (bit == 8 * bytes.size()) return bytes.size() + 1;
      number = static_cast<std::uint8_t>(number + (bytes[bit / 8] >> bit % 8 & 1));
      ++bit;
    }
  }
  return (bit + 7) / 8;
}

// Most of them small, all alike, or any.
std::vector<std::uint8_t> some_ranks(std::size_t count, int last) {
  const auto end = static_cast<std::size_t>(last) + 1;
  const std::size_t kind = below(5);
  const std::size_t common = below(end);
  std::vector<std::uint8_t> ranks(count);
  for (std::uint8_t& rank : ranks) {
    std::size_t drawn = kind == 0 ? below(end) : kind == 1 ? 0 : kind == 2 ? end - 1 : common;
    if (kind >= 3 && below(kind == 3 ? 2 : 300) == 0) drawn = below(below(end) + 1);
    rank = static_cast<std::uint8_t>(drawn);
  }
  return ranks;
}

// Reads from memory with nothing after `bytes`: the ranks and the place, or null if the bytes do
// not suffice.
void check_reading(const fsl::Kernels& kernels, const std::vector<std::uint8_t>& bytes,
                   std::size_t count, int last, const std::string& about) {
  std::vector<std::uint8_t> want(count);
  const std::size_t used = read_by_bits(bytes, last, want);
  Edge in(bytes.size()), got(count, fsl::kSlackBytes);
  if (!bytes.empty()) std::memcpy(in.as(), bytes.data(), bytes.size());
  const std::uint8_t* const rest =
      kernels.read_ranks(in.as(), in.as() + bytes.size(), count, last, got.as());
  got.check_front("ranks");
  if ((rest == nullptr) != (used > bytes.size()))
    fail("whether bytes suffice" + about + ", of " + std::to_string(bytes.size()));
  if (rest == nullptr) return;
  if (rest != in.as() + used) fail("place after ranks" + about);
  same(want.data(), got.as(), count, "ranks" + about);
}

void check_ranks(const fsl::Kernels& plain, const fsl::Kernels& kernels, std::size_t count,
                 int last) {
  const std::string about = " up to " + std::to_string(last) + ", count " + std::to_string(count);
  const std::vector<std::uint8_t> ranks = some_ranks(count, last);
  const std::vector<bool> bits = bits_of_ranks(ranks, last);
  const std::vector<std::uint8_t> bytes = bytes_of_bits(bits);
  Edge from(count, fsl::kSlackBytes);
  if (count > 0) std::memcpy(from.as(), ranks.data(), count);
  for (const fsl::Kernels* const each : {&plain, &kernels}) {
    Edge out(bytes.size(), fsl::kSlackBytes);
    if (each->write_ranks(from.as(), count, last, out.as()) != bytes.size())
      fail("bytes of ranks" + about);
    same(bytes.data(), out.as(), bytes.size(), "written ranks" + about);
    out.check_front("written ranks");
    same(ranks.data(), from.as(), count, "ranks after writing" + about);
  }

  std::vector<std::uint8_t> changed = bytes;
  if (bits.size() % 8 != 0)
    changed.back() = static_cast<std::uint8_t>(changed.back() | chance() << bits.size() % 8);
  std::vector<std::uint8_t> read(count);
  if (read_by_bits(changed, last, read) != bytes.size() || read != ranks)
    fail("round trip by bits" + about);
  check_reading(kernels, changed, count, last, about + ", whole");
  changed.resize(bytes.size() + 1 + below(80), 0xA5);
  check_reading(kernels, changed, count, last, about + ", more behind");
  // Each end where a word may be cut, and some others.
  std::vector<std::size_t> ends;
  for (std::size_t end = 0; end < std::min<std::size_t>(bytes.size(), 20); ++end)
    ends.insert(ends.end(), {end, bytes.size() - 1 - end});
  for (int i = 0; i < 4 && !bytes.empty(); ++i) ends.push_back(below(bytes.size()));
  for (const std::size_t end : ends) {
    const std::vector<std::uint8_t> shorter(bytes.begin(),
                                            bytes.begin() + static_cast<std::ptrdiff_t>(end));
    if (read_by_bits(shorter, last, read) <= end) fail("cut off by bits" + about);
    check_reading(kernels, shorter, count, last, about + ", cut off");
  }
  const std::size_t zeros = below(4) * below(4);
  for (std::uint8_t& byte : changed)
    byte = static_cast<std::uint8_t>(below(1 + zeros) == 0 ? chance() : 0);
  check_reading(kernels, changed, count, last, about + ", anything");
  changed.resize(below(changed.size() + 1));
  check_reading(kernels, changed, count, last, about + ", anything cut off");
}

void test_ranks(const fsl::Kernels& plain, const fsl::Kernels& kernels) {
  const std::size_t counts[] = {below(130), below(1025), below(fsl::kBlockValues + 1),
                                64 * below(257)};
  check_ranks(plain, kernels, counts[below(4)], static_cast<int>(below(fsl::kLastRank + 1)));
}

void test_all_last_ranks(const fsl::Kernels& plain, const fsl::Kernels& kernels) {
  for (const std::size_t count : {0, 1, 63, 64, 65, 128, 1024, 16384}) {
    for (int last = 0; last <= fsl::kLastRank; ++last) check_ranks(plain, kernels, count, last);
  }
}

}  // namespace
