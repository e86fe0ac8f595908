// Lanes, for kernels_test.cpp: writing and reading against the plain kernels, and writing against
// docs/WIRE.md, word by word.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/kernels.hpp"
#include "kernels_test_beside.hpp"
#include "kernels_test_values.hpp"

namespace {

// A random complete code for some symbols of an alphabet, and an escape for the others or none.
struct RandomCode {
  fsl::Code code;
  int width;
  std::vector<std::uint8_t> coded;
  std::vector<std::uint8_t> uncoded;  // only with an escape, in order
  std::vector<int> words;             // by symbol; the escape's for symbols without one
  std::vector<int> lengths;

  // With a random number of leaves, often near those where kernels change: few, 64, all.
  explicit RandomCode(int bits) : width(bits), words(256, -1), lengths(256, 0) {
    const std::size_t alphabet = std::size_t{1} << width;
    const std::size_t some[] = {2, 64 + below(2), alphabet, 2 + below(alphabet - 1)};
    make(std::min(alphabet, some[below(4)]), below(2) != 0);
  }

  RandomCode(int bits, std::size_t leaves) : width(bits), words(256, -1), lengths(256, 0) {
    make(leaves, false);
  }

  void make(std::size_t leaves, bool escapes) {
    const std::size_t alphabet = std::size_t{1} << width;
    std::vector<std::uint8_t> symbols(alphabet);
    std::iota(symbols.begin(), symbols.end(), std::uint8_t{0});
    std::shuffle(symbols.begin(), symbols.end(), chance);
    const auto middle =
        symbols.begin() + static_cast<std::ptrdiff_t>(escapes ? leaves - 1 : leaves);
    coded.assign(symbols.begin(), middle);
    if (escapes) uncoded.assign(middle, symbols.end());
    std::sort(uncoded.begin(), uncoded.end());
    fill_tables(leaves);
  }

  // Canonical words: docs/WIRE.md, "Streams".
  void fill_tables(std::size_t leaves) {
    constexpr int kEscape = 256;
    const std::vector<int> leaf_lengths = random_lengths(leaves);
    std::vector<std::pair<int, int>> leaf_order;  // length, symbol
    for (std::size_t i = 0; i < coded.size(); ++i)
      leaf_order.emplace_back(leaf_lengths[i], coded[i]);
    if (!uncoded.empty()) leaf_order.emplace_back(leaf_lengths.back(), kEscape);
    std::sort(leaf_order.begin(), leaf_order.end());
    std::memset(&code, 0, sizeof code);
    int word = -1;
    int before = leaf_order[0].first;
    for (const auto& [length, symbol] : leaf_order) {
      word = (word + 1) << (length - before);
      before = length;
      const std::vector<std::uint8_t> those =
          symbol == kEscape ? uncoded
                            : std::vector<std::uint8_t>{static_cast<std::uint8_t>(symbol)};
      for (const std::uint8_t one : those) {
        words[one] = word;
        lengths[one] = length;
        code.words[one] = static_cast<std::uint8_t>(word);
        code.lengths[one] =
            static_cast<std::uint8_t>(length | (symbol == kEscape ? fsl::kUncoded : 0));
      }
      const int windows = 256 >> length;
      std::memset(code.symbol_of_window + word * windows, those[0],
                  static_cast<std::size_t>(windows));
      std::memset(code.length_of_window + word * windows, length,
                  static_cast<std::size_t>(windows));
    }
    if (word + 1 != 1 << before) fail("the test's code is not complete");
    code.escapes = !uncoded.empty();
    code.mark = uncoded.empty() ? coded[below(coded.size())] : uncoded[0];
    code.arrange();
  }

  static std::vector<int> random_lengths(std::size_t leaves) {
    std::vector<int> found = {0};
    // Splitting the latest leaf makes deep trees, splitting any leaf flat ones.
    const bool deep = below(2) != 0;
    while (found.size() < leaves) {
      std::size_t at = deep && below(8) != 0 ? found.size() - 1 : below(found.size());
      while (found[at] == fsl::kLengthLimit) at = (at + 1) % found.size();
      found.push_back(++found[at]);
    }
    std::shuffle(found.begin(), found.end(), chance);
    return found;
  }

  bool is_uncoded(std::uint8_t symbol) const {
    return std::binary_search(uncoded.begin(), uncoded.end(), symbol);
  }

  // With a probability by the length of its word, or any that has a word.
  std::uint8_t some_symbol(bool any) const {
    const std::size_t picked = below(coded.size() + uncoded.size());
    if (any) return picked < coded.size() ? coded[picked] : uncoded[picked - coded.size()];
    const std::uint8_t symbol = code.symbol_of_window[below(256)];
    return is_uncoded(symbol) ? uncoded[below(uncoded.size())] : symbol;
  }
};

std::size_t held_by(const fsl::Lanes& state, std::size_t lane) {
  return state.low[lane] + 256U * (state.high[lane] & ((1U << state.used[lane]) - 1));
}

void same_lanes(const fsl::Lanes& want, const fsl::Lanes& got, std::size_t lanes,
                const std::string& what) {
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    if (want.used[lane] != got.used[lane] || held_by(want, lane) != held_by(got, lane))
      fail(what + ": lane " + std::to_string(lane));
  }
}

// Lanes that hold random numbers of `used` bits. The lanes after them must stay unchanged.
fsl::Lanes some_lanes() {
  fsl::Lanes state;
  for (std::size_t lane = 0; lane < fsl::kMostLanes; ++lane) {
    state.used[lane] = static_cast<std::uint8_t>(below(8));
    state.low[lane] = static_cast<std::uint8_t>(chance());
    state.high[lane] = static_cast<std::uint8_t>(below(std::size_t{1} << state.used[lane]));
  }
  return state;
}

// The bytes that the lanes give, as in docs/WIRE.md.
std::vector<std::uint8_t> write_by_words(const RandomCode& random,
                                         const std::vector<std::uint8_t>& symbols,
                                         std::size_t lanes, fsl::Lanes& state) {
  std::vector<std::uint8_t> backwards;
  for (std::size_t i = symbols.size(); i-- > 0;) {
    const std::size_t lane = i % lanes;
    std::size_t v = held_by(state, lane);
    int p = state.used[lane];
    v += static_cast<std::size_t>(random.words[symbols[i]]) << (8 + p);
    p += random.lengths[symbols[i]];
    if (p >= 8) {
      backwards.push_back(static_cast<std::uint8_t>(v % 256));
      v /= 256;
      p -= 8;
    }
    state.low[lane] = static_cast<std::uint8_t>(v % 256);
    state.high[lane] = static_cast<std::uint8_t>(v / 256);
    state.used[lane] = static_cast<std::uint8_t>(p);
  }
  return {backwards.rbegin(), backwards.rend()};
}

// A plane's symbols, and the blocks in which kernels get them: whole rounds of all lanes, except
// the last.
struct Plane {
  RandomCode random;
  int shift;
  std::size_t lanes;
  std::vector<std::uint8_t> symbols;
  std::vector<std::size_t> starts;  // of blocks, and the end
  std::string about;

  Plane()
      : random(std::vector<int>{2, 6, 6, 6, 8, 8}[below(6)]),
        shift(static_cast<int>(random.width == 8 ? 0 : below(3))) {
    lanes = below(4) == 0 ? fsl::kFewLanes : fsl::kMostLanes;
    const bool any = below(3) == 0;
    const std::uint8_t only = random.some_symbol(true);
    const bool constant = below(8) == 0;
    starts.push_back(0);
    for (std::size_t block = below(4) + 1; block-- > 0;) {
      const std::size_t whole = fsl::kMostLanes * (1 + below(below(2) != 0 ? 40 : 4));
      starts.push_back(starts.back() + (block > 0 ? whole : below(4) == 0 ? whole : below(2000)));
    }
    for (std::size_t i = 0; i < starts.back(); ++i)
      symbols.push_back(constant ? only : random.some_symbol(any));
    about = " of width " + std::to_string(random.width) + ", shift " + std::to_string(shift) +
            ", " + std::to_string(lanes) + " lanes, " + std::to_string(random.coded.size()) +
            " coded, " + std::to_string(random.uncoded.size()) + " not, " +
            std::to_string(symbols.size()) + " in " + std::to_string(starts.size() - 1) + " blocks";
  }

  std::size_t blocks() const { return starts.size() - 1; }
  std::size_t count(std::size_t block) const { return starts[block + 1] - starts[block]; }
};

// Writes the plane's blocks to the end of `out`, the last one first; returns the front. Checks
// which symbols have no code.
std::uint8_t* write_blocks(const fsl::Kernels& kernels, const Plane& plane, fsl::Lanes& state,
                           std::uint8_t* end) {
  std::uint8_t* front = end;
  for (std::size_t block = plane.blocks(); block-- > 0;) {
    const std::size_t count = plane.count(block);
    Edge from(count, fsl::kSlackBytes), uncoded((count + 63) / 64 * 8, fsl::kSlackBytes);
    const std::uint8_t* const symbols = plane.symbols.data() + plane.starts[block];
    // The bits above a symbol are arbitrary, unless it has fewer than six bits.
    const std::size_t mask = plane.random.width < 6
                                 ? 0xFF << plane.shift
                                 : ((std::size_t{1} << plane.random.width) - 1) << plane.shift;
    for (std::size_t i = 0; i < count; ++i) {
      from.as()[i] = static_cast<std::uint8_t>(
          (static_cast<std::size_t>(symbols[i]) << plane.shift) | (chance() & ~mask));
    }
    // Fetches from places that fault when they are read.
    const char* const behind = from.as<const char>() + count + fsl::kSlackBytes;
    fsl::Ahead ahead{behind, behind + below(4096)};
    const bool fetches = kernels.path != fsl::Path::kScalar && plane.lanes == fsl::kMostLanes &&
                         count >= plane.lanes && ahead.end > behind;
    front =
        kernels.write_lanes(plane.random.code, from.as(), plane.shift, plane.random.width, count,
                            plane.lanes, state, front, uncoded.as<std::uint64_t>(), ahead);
    if ((ahead.next > behind) != fetches) fail("fetched" + plane.about);
    for (std::size_t i = 0; i < count; ++i) {
      const bool is_uncoded = (uncoded.as<std::uint64_t>()[i / 64] >> (i % 64) & 1) != 0;
      if (is_uncoded != plane.random.is_uncoded(symbols[i]))
        fail("whether symbol " + std::to_string(i) + " has no code" + plane.about);
    }
  }
  return front;
}

// The output of a block: symbols, or codes if two bit planes are below them.
struct Read {
  Edge bytes;
  std::size_t used = 0;  // of the list

  explicit Read(std::size_t count) : bytes(count, fsl::kSlackBytes) {}

  const std::uint8_t* from(const fsl::Kernels& kernels, const fsl::Code& code,
                           const std::uint8_t* in, const std::uint8_t* end, std::size_t count,
                           std::size_t lanes, fsl::Lanes& state,
                           const std::vector<std::uint8_t>& list,
                           const fsl::TwoPlanes* below_them) {
    Edge all_listed(count, fsl::kSlackBytes);
    for (std::size_t i = 0; i < count; ++i)
      all_listed.as()[i] = i < list.size() ? list[i] : std::uint8_t{0};
    const std::uint8_t* listed = all_listed.as();
    const std::uint8_t* next = nullptr;
    SummedBeside summed(kernels);
    // Fetches from places that fault when they are read.
    const char* const behind = bytes.as<const char>() + count + fsl::kSlackBytes;
    summed.beside.ahead = {behind, behind + 4096};
    if (below_them == nullptr) {
      next =
          kernels.read_lanes(code, in, end, count, lanes, state, listed, bytes.as(), summed.beside);
    } else {
      const auto before = static_cast<std::uint8_t>(below(2) * 127);
      fsl::CodesRead read{bytes.as(), before};
      next = kernels.read_codes(code, in, end, count, lanes, state, listed, *below_them, read,
                                summed.beside);
      std::uint8_t largest = before;
      for (std::size_t i = 0; i < count; ++i)
        largest = std::max<std::uint8_t>(largest, bytes.as()[i] & 0x7F);
      if (next != nullptr && read.largest != largest)
        fail("largest code of " + std::to_string(count));
    }
    summed.check(next != nullptr && lanes == fsl::kMostLanes ? count / lanes : 0,
                 " " + std::to_string(count) + " symbols");
    used = static_cast<std::size_t>(listed - all_listed.as());
    return next;
  }
};

// Reads the plane's blocks on both sides, from `bytes` with nothing after them.
void compare_reading(const fsl::Kernels& plain, const fsl::Kernels& kernels, const Plane& plane,
                     const fsl::Lanes& before, const std::vector<std::uint8_t>& bytes,
                     bool is_whole, const fsl::Lanes& after, const std::string& what) {
  Edge in(bytes.size());
  if (!bytes.empty()) std::memcpy(in.as(), bytes.data(), bytes.size());
  const std::uint8_t* const end = in.as() + bytes.size();
  const bool makes_codes = plane.random.width == 6 && below(2) != 0;
  const bool rotated = below(2) != 0;
  fsl::Lanes want_state = before;
  fsl::Lanes state = before;
  const std::uint8_t* want = in.as();
  const std::uint8_t* got = in.as();
  for (std::size_t block = 0; block < plane.blocks(); ++block) {
    const std::size_t count = plane.count(block);
    const std::string about =
        what + plane.about + ", block " + std::to_string(block) + (makes_codes ? ", as codes" : "");
    // The low plane follows the high one, and nothing follows it.
    const std::size_t plane_bytes = (count + 7) / 8;
    const std::size_t apart = plane_bytes + below(3) * below(100);
    Edge bits_below(apart + plane_bytes);
    const std::uint8_t* const high = bits_below.as();
    const std::uint8_t* const low = high + apart;
    for (std::size_t i = 0; i < apart + plane_bytes; ++i)
      bits_below.as()[i] = static_cast<std::uint8_t>(chance());
    const fsl::TwoPlanes planes{high, low, rotated};
    const fsl::TwoPlanes* const below_them = makes_codes ? &planes : nullptr;
    // As many as a damaged stream may ask for.
    std::vector<std::uint8_t> list;
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint8_t symbol = plane.symbols[plane.starts[block] + i];
      if (plane.random.is_uncoded(symbol)) list.push_back(symbol);
    }
    const std::size_t listed = list.size();
    while (list.size() < count)
      list.push_back(static_cast<std::uint8_t>(below(std::size_t{1} << plane.random.width)));
    Read want_read(count), read(count);
    want = want_read.from(plain, plane.random.code, want, end, count, plane.lanes, want_state, list,
                          below_them);
    got = read.from(kernels, plane.random.code, got, end, count, plane.lanes, state, list,
                    below_them);
    read.bytes.check_front("symbols");
    if (want != got) fail("place after reading" + about);
    if (want == nullptr) break;
    same(want_read.bytes.as(), read.bytes.as(), count, "symbols" + about);
    same_lanes(want_state, state, plane.lanes, "lanes after reading" + about);
    if (want_read.used != read.used || (is_whole && read.used != listed))
      fail("listed symbols used" + about);
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint8_t code = read.bytes.as()[i];
      const int symbol = !makes_codes ? code : rotated ? code >> 1 & 63 : code >> 2;
      if (is_whole && symbol != plane.symbols[plane.starts[block] + i]) fail("round trip" + about);
      const int bits = (high[i / 8] >> (i % 8) & 1) * 2 + (low[i / 8] >> (i % 8) & 1);
      if (makes_codes && bits != (rotated ? (code & 1) * 2 + (code >> 7) : code & 3))
        fail("bits below" + about);
    }
  }
  if (is_whole && got == nullptr) fail("bytes missing" + what + plane.about);
  if (is_whole) same_lanes(after, state, plane.lanes, "lanes at the end" + what + plane.about);
}

void test_lanes(const fsl::Kernels& plain, const fsl::Kernels& kernels) {
  const Plane plane;
  const fsl::Lanes start = some_lanes();
  fsl::Lanes want_state = start;
  const std::vector<std::uint8_t> stream =
      write_by_words(plane.random, plane.symbols, plane.lanes, want_state);
  fsl::Lanes state = start;
  Edge out(stream.size() + fsl::kSlackBytes);
  std::uint8_t* const end = out.as() + stream.size() + fsl::kSlackBytes;
  if (write_blocks(kernels, plane, state, end) != end - stream.size())
    fail("bytes of lanes" + plane.about);
  same(stream.data(), end - stream.size(), stream.size(), "bytes of lanes" + plane.about);
  out.check_front("bytes of lanes");
  same_lanes(want_state, state, plane.lanes, "lanes after writing" + plane.about);

  // Bits above those in use are arbitrary: kernels leave some there.
  for (std::size_t lane = 0; lane < fsl::kMostLanes; ++lane) {
    state.high[lane] = static_cast<std::uint8_t>(
        state.high[lane] | static_cast<std::uint32_t>(chance()) << state.used[lane]);
  }
  compare_reading(plain, kernels, plane, state, stream, true, start, ", whole");
  std::vector<std::uint8_t> longer = stream;
  longer.resize(stream.size() + below(300), 0xA5);
  compare_reading(plain, kernels, plane, state, longer, true, start, ", more behind");
  std::vector<std::uint8_t> shorter = stream;
  shorter.resize(stream.size() -
                 std::min(stream.size(), below(2) != 0 ? below(300) : below(stream.size() + 1)));
  compare_reading(plain, kernels, plane, state, shorter, false, start, ", cut off");
  std::vector<std::uint8_t> random = longer;
  const std::size_t changed = below(2) != 0 ? 1 : 50;
  for (std::uint8_t& byte : random)
    byte = below(changed) == 0 ? static_cast<std::uint8_t>(chance()) : byte;
  compare_reading(plain, kernels, plane, some_lanes(), random, false, start, ", damaged");
}

// If every symbol takes a byte, a kernel that reads too far faults.
void test_last_bytes(const fsl::Kernels& plain, const fsl::Kernels& kernels, std::size_t lanes) {
  const RandomCode flat(8, 256);
  for (const std::size_t bytes : {std::size_t{0}, lanes - 2, lanes - 1, lanes, lanes + 1,
                                  2 * lanes - 1, 2 * lanes, 3 * lanes - 1}) {
    const std::string about =
        " of " + std::to_string(bytes) + " for " + std::to_string(lanes) + " lanes";
    const std::size_t count = bytes + (below(2) != 0 ? 0 : below(2 * lanes));
    Edge in(bytes);
    for (std::size_t i = 0; i < bytes; ++i) in.as()[i] = static_cast<std::uint8_t>(chance());
    Read want_read(count), read(count);
    fsl::Lanes want_state = some_lanes();
    fsl::Lanes state = want_state;
    const std::uint8_t* const end = in.as() + bytes;
    const std::uint8_t* const want =
        want_read.from(plain, flat.code, in.as(), end, count, lanes, want_state, {}, nullptr);
    const std::uint8_t* const got =
        read.from(kernels, flat.code, in.as(), end, count, lanes, state, {}, nullptr);
    if (want != got || (want == nullptr) != (count > bytes)) fail("last bytes" + about);
    if (got == nullptr) continue;
    same(want_read.bytes.as(), read.bytes.as(), count, "symbols of last bytes" + about);
    same_lanes(want_state, state, lanes, "lanes after last bytes" + about);
  }
}

}  // namespace
