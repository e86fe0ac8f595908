// AVX2: lanes (docs/WIRE.md, "Streams"), 32 in a vector. For avx2/kernels.cpp only, which sets the
// target and includes plain/kernels.hpp for it.
//
// Gathers are slow on many of these machines, so tables are shuffled. AVX2 has no shifts by a
// number of bits per byte, so words are multiplied by powers of two.
#pragma once

#include "kernels/avx2/base.hpp"
#include "kernels/avx2/planes.hpp"
#include "kernels/avx2/values.hpp"
#include "kernels/fetch.hpp"

namespace fsl {
namespace {

static_assert(kMostLanes % kStep == 0);

FSL_INLINE __m256i two_halves(__m128i half) { return _mm256_broadcastsi128_si256(half); }
FSL_INLINE __m256i lower_bytes(__m256i words) {
  return _mm256_and_si256(words, _mm256_set1_epi16(0xFF));
}
FSL_INLINE __m256i upper_bytes(__m256i words) { return _mm256_srli_epi16(words, 8); }

// --- writing

// For each byte of bits: the places of its ones, in order, at the end of eight bytes.
struct LastPlaces {
  std::uint64_t of[256] = {};

  constexpr LastPlaces() {
    for (std::uint64_t mask = 0; mask < 256; ++mask) {
      for (std::uint64_t bit = 0; bit < 8; ++bit) {
        if ((mask >> bit & 1) != 0) of[mask] = of[mask] >> 8 | bit << 56;
      }
    }
  }
};

alignas(64) constexpr LastPlaces kLastPlaces;

FSL_INLINE __m128i load_eight(const void* from) {
  return _mm_loadl_epi64(static_cast<const __m128i*>(from));
}

// Writes those of 32 bytes that have a one in `mask` before `front`, and arbitrary bytes before
// them.
FSL_INLINE std::uint8_t* put_before(std::uint8_t* front, const std::uint8_t* bytes,
                                    std::uint32_t mask) {
#pragma GCC unroll 4
  for (std::size_t group = kStep / 8; group-- > 0;) {
    const std::uint32_t ones_of_group = mask >> (8 * group) & 0xFF;
    const __m128i picked =
        _mm_shuffle_epi8(load_eight(bytes + 8 * group), load_eight(&kLastPlaces.of[ones_of_group]));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(front - 8), picked);
    front -= ones(ones_of_group);
  }
  return front;
}

template <int kEntries>
struct LaneWriter {
  const Table<kEntries> words;
  const Table<kEntries> lengths;
  const __m128i shift;
  const __m256i bits;
  const __m256i powers =
      two_halves(_mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0));

  FSL_INLINE LaneWriter(const Code& code, int by, int width)
      : words(code.words),
        lengths(code.lengths),
        shift(_mm_cvtsi32_si128(by)),
        bits(all_bytes((1 << width) - 1)) {}

  // Lanes first to first + 31.
  FSL_INLINE void step(const std::uint8_t* from, Lanes& lanes, std::size_t first,
                       std::uint8_t*& front, void* uncoded) const {
    const __m256i symbols = _mm256_and_si256(_mm256_srl_epi16(load(from), shift), bits);
    const __m256i word = words(symbols);
    const __m256i length = lengths(symbols);
    const std::uint32_t has_no_code = signs(length);
    std::memcpy(uncoded, &has_no_code, 4);
    const __m256i used = load(lanes.used + first);
    const __m256i power = _mm256_shuffle_epi8(powers, used);
    const __m256i even = _mm256_mullo_epi16(lower_bytes(word), lower_bytes(power));
    const __m256i odd = _mm256_mullo_epi16(upper_bytes(word), upper_bytes(power));
    const __m256i staying = _mm256_or_si256(lower_bytes(even), _mm256_slli_epi16(odd, 8));
    const __m256i leaving = _mm256_blendv_epi8(upper_bytes(even), odd, _mm256_set1_epi16(-0x100));
    const __m256i low = load(lanes.low + first);
    const __m256i high = _mm256_or_si256(load(lanes.high + first), staying);
    const __m256i grown = _mm256_add_epi8(used, length);
    const __m256i is_full = _mm256_slli_epi16(grown, 4);  // as the sign
    front = put_before(front, lanes.low + first, signs(is_full));
    store(lanes.low + first, _mm256_blendv_epi8(low, high, is_full));
    store(lanes.high + first, _mm256_blendv_epi8(high, leaving, is_full));
    store(lanes.used + first, _mm256_and_si256(grown, all_bytes(7)));
  }
};

template <int kEntries>
std::uint8_t* write_all_lanes(const Code& code, const std::uint8_t* from, int shift, int width,
                              std::size_t whole, Lanes& state, std::uint8_t* front,
                              std::uint64_t* uncoded, Ahead& ahead) {
  const LaneWriter<kEntries> writer(code, shift, width);
  for (std::size_t i = whole; i > 0; i -= kMostLanes) {
#pragma GCC unroll 4
    for (std::size_t first = kMostLanes; first > 0;) {
      first -= kStep;
      const std::size_t at = i - kMostLanes + first;
      writer.step(from + at, state, first, front,
                  reinterpret_cast<std::uint8_t*>(uncoded) + at / 8);
    }
    fetch_some(ahead);
  }
  return front;
}

std::uint8_t* write_lanes(const Code& code, const std::uint8_t* from, int shift, int width,
                          std::size_t count, std::size_t lanes, Lanes& state, std::uint8_t* front,
                          std::uint64_t* uncoded, Ahead& ahead) {
  const std::size_t whole = lanes == kMostLanes ? count & ~(kMostLanes - 1) : 0;
  front = plain::write_lanes(code, from + whole, shift, width, count - whole, lanes, state, front,
                             uncoded + whole / 64, ahead);
  const auto write = width > 6 ? write_all_lanes<256> : write_all_lanes<64>;
  return write(code, from, shift, width, whole, state, front, uncoded, ahead);
}

// --- reading

// For each byte, minus the number of ones up to it in its half of the vector; bytes are 0 or -1.
FSL_INLINE __m256i minus_ones_so_far(__m256i bits) {
  __m256i sums = _mm256_add_epi8(bits, _mm256_slli_epi64(bits, 8));
  sums = _mm256_add_epi8(sums, _mm256_slli_epi64(sums, 16));
  sums = _mm256_add_epi8(sums, _mm256_slli_epi64(sums, 32));
  const __m256i last_of_first_eight = two_halves(_mm_set_epi64x(0x0707070707070707, -1));
  return _mm256_add_epi8(sums, _mm256_shuffle_epi8(sums, last_of_first_eight));
}

// Twice the same 16 bytes, one copy per half, because shuffles do not cross halves.
FSL_INLINE __m256i load_halves(const std::uint8_t* low, const std::uint8_t* high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load_half(low)), load_half(high), 1);
}

// 16-bit numbers from two vectors' bytes.
struct Words {
  __m256i first, second;

  FSL_INLINE Words(__m256i a, __m256i b) : first(a), second(b) {}
  FSL_INLINE static Words of(__m256i low, __m256i high) {
    return {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
  }
  FSL_INLINE Words times(const Words& other) const {
    return {_mm256_mullo_epi16(first, other.first), _mm256_mullo_epi16(second, other.second)};
  }
  FSL_INLINE Words upper_half_times(const Words& other) const {
    return {_mm256_mulhi_epu16(first, other.first), _mm256_mulhi_epu16(second, other.second)};
  }
  FSL_INLINE __m256i bytes() const { return _mm256_packus_epi16(first, second); }
};

template <int kEntries>
struct LaneReader {
  const Table<kEntries> symbols;
  __m256i last_windows[kLengthLimit];
  const __m256i shortest;
  const __m256i first_ranks;
  const __m256i mark;

  FSL_INLINE explicit LaneReader(const Code& code)
      : symbols(code.symbol_of_rank),
        shortest(all_bytes(code.shortest)),
        first_ranks(two_halves(load_half(code.first_rank))),
        mark(all_bytes(code.mark)) {
    for (int length = 1; length < kLengthLimit; ++length)
      last_windows[length] = all_bytes(code.last_window[length] - 128);
  }

  FSL_INLINE __m256i length_of(__m256i window) const {
    const __m256i compared = _mm256_xor_si256(window, all_bytes(-128));  // as signed numbers
    __m256i length = shortest;
#pragma GCC unroll 8
    for (int shorter = 1; shorter < kLengthLimit; ++shorter) {
      length = _mm256_sub_epi8(length, _mm256_cmpgt_epi8(compared, last_windows[shorter]));
    }
    return length;
  }

  // 2^number, numbers from 0 to 8.
  FSL_INLINE static Words power_of_two(__m256i number) {
    const __m256i lower =
        two_halves(_mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m256i upper = two_halves(_mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0));
    return Words::of(_mm256_shuffle_epi8(lower, number), _mm256_shuffle_epi8(upper, number));
  }

  // 2^(8 - number), numbers from 0 to 7.
  FSL_INLINE static Words power_up_to_eight(__m256i number) {
    const __m256i lower =
        two_halves(_mm_setr_epi8(0, -128, 64, 32, 16, 8, 4, 2, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m256i upper = two_halves(_mm_setr_epi8(1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
    return Words::of(_mm256_shuffle_epi8(lower, number), _mm256_shuffle_epi8(upper, number));
  }

  // Lanes first to first + 31.
  FSL_INLINE void step(Lanes& lanes, std::size_t first, const std::uint8_t*& in, std::uint8_t* out,
                       void* marked) const {
    const __m256i low = load(lanes.low + first);
    const __m256i high = load(lanes.high + first);
    const __m256i used = load(lanes.used + first);
    // The lanes' bits at the top of 16, so that the window is the upper byte.
    const Words held = Words::of(low, high).times(power_up_to_eight(used));
    const __m256i length =
        length_of(Words(upper_bytes(held.first), upper_bytes(held.second)).bytes());
    const __m256i word = held.upper_half_times(power_of_two(length)).bytes();
    const __m256i read = symbols(_mm256_add_epi8(word, _mm256_shuffle_epi8(first_ranks, length)));
    store(out, read);
    const std::uint32_t is_marked = signs(_mm256_cmpeq_epi8(read, mark));
    std::memcpy(marked, &is_marked, 4);
    const __m256i left = _mm256_sub_epi8(used, length);
    const std::uint32_t is_short = signs(left);
    const __m256i place = _mm256_xor_si256(
        minus_ones_so_far(_mm256_cmpgt_epi8(_mm256_setzero_si256(), left)), all_bytes(-1));
    const __m256i next = _mm256_shuffle_epi8(load_halves(in, in + ones(is_short & 0xFFFF)), place);
    in += ones(is_short);
    store(lanes.low + first, _mm256_blendv_epi8(low, next, left));
    store(lanes.high + first, _mm256_blendv_epi8(high, low, left));
    store(lanes.used + first, _mm256_and_si256(left, all_bytes(7)));
  }
};

constexpr std::size_t kMarkedWords = 64;  // symbols whose listed ones are placed together

// Places the listed symbols at the marked ones of 64 * words symbols. Fast for few: nonzero words
// are unpredictable, so they are found before any branch depends on them.
FSL_INLINE void place_listed(const std::uint64_t* marked, std::size_t words,
                             const std::uint8_t*& listed, std::uint8_t* symbols) {
  std::uint64_t where = 0;
  for (std::size_t word = 0; word < words; ++word)
    where |= static_cast<std::uint64_t>(marked[word] != 0) << word;
  const std::uint8_t* next = listed;
  for (; where != 0; where = _blsr_u64(where)) {
    const std::size_t word = _tzcnt_u64(where);
    std::uint64_t bits = marked[word];
    do {
      symbols[64 * word + _tzcnt_u64(bits)] = *next++;
      bits = _blsr_u64(bits);
    } while (bits != 0);
  }
  listed = next;
}

// Reads whole rounds of all lanes while the bytes certainly suffice; returns the number of symbols.
template <int kEntries>
std::size_t read_all_lanes(const Code& code, const std::uint8_t*& in, const std::uint8_t* end,
                           std::size_t count, Lanes& state, const std::uint8_t*& listed,
                           std::uint8_t* symbols, Beside& beside) {
  const LaneReader<kEntries> reader(code);
  const std::uint8_t* next = in;
  std::uint64_t marked[kMarkedWords];
  std::size_t i = 0;
  std::size_t word = 0;  // of those marked, for symbols from i - 64 * word on
  while (count - i >= kMostLanes && static_cast<std::size_t>(end - next) >= kMostLanes) {
#pragma GCC unroll 4
    for (std::size_t first = 0; first < kMostLanes; first += kStep) {
      reader.step(state, first, next, symbols + i + first,
                  reinterpret_cast<std::uint8_t*>(marked + word) + first / 8);
    }
    i += kMostLanes;
    word += kMostLanes / 64;
    fetch_to_add(beside.ahead);
    if (word < kMarkedWords) continue;
    if (code.escapes) place_listed(marked, word, listed, symbols + i - 64 * word);
    word = 0;
  }
  if (code.escapes) place_listed(marked, word, listed, symbols + i - 64 * word);
  in = next;
  return i;
}

const std::uint8_t* read_and_fetch(const Code& code, const std::uint8_t* in,
                                   const std::uint8_t* end, std::size_t count, std::size_t lanes,
                                   Lanes& state, const std::uint8_t*& listed, std::uint8_t* symbols,
                                   Beside& beside) {
  std::size_t done = 0;
  if (lanes == kMostLanes) {
    const auto read = code.leaves > 64 ? read_all_lanes<256> : read_all_lanes<64>;
    done = read(code, in, end, count, state, listed, symbols, beside);
  }
  return plain::read_lanes(code, in, end, count - done, lanes, state, listed, symbols + done,
                           beside);
}

const std::uint8_t* read_lanes(const Code& code, const std::uint8_t* in, const std::uint8_t* end,
                               std::size_t count, std::size_t lanes, Lanes& state,
                               const std::uint8_t*& listed, std::uint8_t* symbols, Beside& beside) {
  return read_and_fetch(code, in, end, count, lanes, state, listed, symbols, beside);
}

const std::uint8_t* read_codes(const Code& code, const std::uint8_t* in, const std::uint8_t* end,
                               std::size_t count, std::size_t lanes, Lanes& state,
                               const std::uint8_t*& listed, const TwoPlanes& below, CodesRead& read,
                               Beside& beside) {
  std::uint8_t* const codes = read.codes;
  const std::uint8_t* const next =
      read_and_fetch(code, in, end, count, lanes, state, listed, codes, beside);
  if (next == nullptr) return nullptr;
  join(codes, below.high, static_cast<std::size_t>(below.low - below.high), count, below.rotated, 2,
       codes);
  const std::uint8_t largest = plain::largest_byte(codes, count, 0x7F);
  read.largest = largest > read.largest ? largest : read.largest;
  return next;
}

}  // namespace
}  // namespace fsl
