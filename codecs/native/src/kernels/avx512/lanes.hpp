// AVX-512: lanes (docs/WIRE.md, "Streams"), 64 in a vector. For avx512/kernels.cpp only, which sets
// the target.
#pragma once

#include "kernels/avx512/base.hpp"
#include "kernels/avx512/bytes.hpp"
#include "kernels/avx512/planes.hpp"
#include "kernels/fetch.hpp"

namespace fsl {
namespace {

static_assert(kMostLanes == 2 * kStep);

// vpmultishiftqb takes any 8 adjacent bits of a group of 64 for each of its bytes. So one vector of
// words serves bytes 0 to 3 of each 8, and another serves bytes 4 to 7.
constexpr std::uint64_t kUpperHalves = 0xF0F0F0F0F0F0F0F0;
constexpr std::uint64_t kHighBytes = 0xAAAAAAAAAAAAAAAA;
constexpr std::uint64_t kFewMask = (std::uint64_t{1} << kFewLanes) - 1;

struct LaneOrder {
  // Words with the low byte from the first source and the high byte from the second.
  alignas(64) std::uint8_t lower_words[kStep] = {};
  alignas(64) std::uint8_t upper_words[kStep] = {};
  // The start of a byte's word in its group of 64 bits.
  alignas(64) std::uint8_t first_bit[kStep] = {};

  constexpr LaneOrder() {
    for (std::size_t i = 0; i < kStep; ++i) {
      const std::size_t lane = i / 8 * 8 + i % 8 / 2;
      const std::size_t source = i % 2 * kStep;
      lower_words[i] = static_cast<std::uint8_t>(source + lane);
      upper_words[i] = static_cast<std::uint8_t>(source + lane + 4);
      first_bit[i] = static_cast<std::uint8_t>(i % 4 * 16);
    }
  }
};

alignas(64) constexpr LaneOrder kLaneOrder;

FSL_INLINE __m512i bits_at(__m512i places, __m512i lower, __m512i upper) {
  return _mm512_mask_multishift_epi64_epi8(_mm512_multishift_epi64_epi8(places, lower),
                                           kUpperHalves, places, upper);
}

// 64 lanes. `used` holds numbers from 0 to 7, and when reading also the lanes' first bits.
struct LaneVector {
  __m512i low, high, used;

  FSL_INLINE LaneVector(const Lanes& lanes, std::size_t first)
      : low(load(lanes.low + first)),
        high(load(lanes.high + first)),
        used(load(lanes.used + first)) {}

  FSL_INLINE void save(Lanes& lanes, std::size_t first) const {
    store(lanes.low + first, low);
    store(lanes.high + first, high);
    store(lanes.used + first, _mm512_and_si512(used, all_bytes(7)));
  }
};

// --- writing

// The entries of 64 symbols, or of 256 if kWide.
template <bool kWide>
struct SymbolTable;

template <>
struct SymbolTable<false> {
  __m512i entries;

  FSL_INLINE explicit SymbolTable(const std::uint8_t* from) : entries(load(from)) {}
  FSL_INLINE __m512i operator()(__m512i symbols) const {
    return _mm512_permutexvar_epi8(symbols, entries);
  }
};

template <>
struct SymbolTable<true> : Table256 {
  FSL_INLINE explicit SymbolTable(const std::uint8_t* from) : Table256(from) {}
};

template <bool kWide>
struct LaneWriter {
  const SymbolTable<kWide> words;
  const SymbolTable<kWide> lengths;
  const __m128i shift;
  const __m512i lower_words = load(kLaneOrder.lower_words);
  const __m512i upper_words = load(kLaneOrder.upper_words);
  // A word in the high byte, moved up by `used`: the part that stays starts at bit 8 - used of the
  // word, the part that leaves at 16 - used.
  const __m512i staying = _mm512_add_epi8(load(kLaneOrder.first_bit), all_bytes(8));
  const __m512i leaving = _mm512_add_epi8(load(kLaneOrder.first_bit), all_bytes(16));

  FSL_INLINE LaneWriter(const Code& code, int by)
      : words(code.words), lengths(code.lengths), shift(_mm_cvtsi32_si128(by)) {}

  // One symbol to each lane, or to the first kFewLanes. Returns which have no code.
  template <bool kFew = false>
  FSL_INLINE std::uint64_t step(const std::uint8_t* from, LaneVector& lanes,
                                std::uint8_t*& front) const {
    // A narrow table uses the lowest six bits only, so bits of a neighbor do no harm.
    const __m512i symbols = kWide ? load(from) : _mm512_srl_epi16(load(from), shift);
    __m512i word = words(symbols);
    __m512i length = lengths(symbols);
    if (kFew) {
      word = _mm512_maskz_mov_epi8(kFewMask, word);
      length = _mm512_maskz_mov_epi8(kFewMask, length);
    }
    // Code words as high bytes of words. (A permutation of one vector ignores the source bit.)
    const __m512i lower = _mm512_maskz_permutexvar_epi8(kHighBytes, lower_words, word);
    const __m512i upper = _mm512_maskz_permutexvar_epi8(kHighBytes, upper_words, word);
    const __m512i high =
        _mm512_or_si512(lanes.high, bits_at(_mm512_sub_epi8(staying, lanes.used), lower, upper));
    const __m512i above = bits_at(_mm512_sub_epi8(leaving, lanes.used), lower, upper);
    const __m512i grown = _mm512_add_epi8(lanes.used, length);
    const __mmask64 is_full = _mm512_test_epi8_mask(grown, all_bytes(8));
    lanes.used = _mm512_and_si512(grown, all_bytes(7));
    const std::size_t going = ones(is_full);
    front -= going;
    _mm512_mask_storeu_epi8(front, _bzhi_u64(~std::uint64_t{0}, static_cast<unsigned>(going)),
                            _mm512_maskz_compress_epi8(is_full, lanes.low));
    lanes.low = _mm512_mask_mov_epi8(lanes.low, is_full, high);
    lanes.high = _mm512_mask_mov_epi8(high, is_full, above);
    return _mm512_movepi8_mask(length);
  }
};

template <bool kWide>
std::uint8_t* write_all_lanes(const Code& code, const std::uint8_t* from, int shift,
                              std::size_t whole, Lanes& state, std::uint8_t* front,
                              std::uint64_t* uncoded, Ahead& ahead) {
  const LaneWriter<kWide> writer(code, shift);
  LaneVector first(state, 0);
  LaneVector second(state, kStep);
  for (std::size_t i = whole; i > 0; i -= kMostLanes) {
    uncoded[i / 64 - 1] = writer.step(from + i - kStep, second, front);
    uncoded[i / 64 - 2] = writer.step(from + i - kMostLanes, first, front);
    fetch_some(ahead);
  }
  first.save(state, 0);
  second.save(state, kStep);
  return front;
}

// The same for kFewLanes, a quarter of a vector; whole: a multiple of 64.
template <bool kWide>
std::uint8_t* write_few_lanes(const Code& code, const std::uint8_t* from, int shift,
                              std::size_t whole, Lanes& state, std::uint8_t* front,
                              std::uint64_t* uncoded, Ahead&) {
  const LaneWriter<kWide> writer(code, shift);
  LaneVector lanes(state, 0);
  for (std::size_t i = whole; i > 0; i -= kStep) {
    std::uint64_t word = 0;
    for (std::size_t part = kStep; part > 0; part -= kFewLanes)
      word = word << kFewLanes |
             writer.template step<true>(from + i - kStep + part - kFewLanes, lanes, front);
    uncoded[i / 64 - 1] = word;
  }
  lanes.save(state, 0);
  return front;
}

std::uint8_t* write_lanes(const Code& code, const std::uint8_t* from, int shift, int width,
                          std::size_t count, std::size_t lanes, Lanes& state, std::uint8_t* front,
                          std::uint64_t* uncoded, Ahead& ahead) {
  const std::size_t unit = lanes == kMostLanes ? kMostLanes : kStep;
  const std::size_t whole = count & ~(unit - 1);
  front = kScalarKernels.write_lanes(code, from + whole, shift, width, count - whole, lanes, state,
                                     front, uncoded + whole / 64, ahead);
  const auto write = lanes == kMostLanes
                         ? (width > 6 ? write_all_lanes<true> : write_all_lanes<false>)
                         : (width > 6 ? write_few_lanes<true> : write_few_lanes<false>);
  return write(code, from, shift, whole, state, front, uncoded, ahead);
}

// --- reading

struct LaneReader {
  const Table256 symbols;
  const __m512i lengths[2];
  const __m512i mark;
  const __mmask64 escapes;  // all or none
  const __m512i first_bit = load(kLaneOrder.first_bit);

  FSL_INLINE explicit LaneReader(const Code& code)
      : symbols(code.symbol_of_window),
        lengths{load(code.length_of_seven_bits), load(code.length_of_seven_bits + 64)},
        mark(all_bytes(code.mark)),
        escapes(code.escapes ? ~std::uint64_t{0} : 0) {}

  // A symbol of each of 64 lanes, or of the first kFewLanes.
  template <bool kFew = false>
  FSL_INLINE __m512i step(LaneVector& lanes, const std::uint8_t*& in,
                          const std::uint8_t*& listed) const {
    // In the order of unpacking, which takes less time than a permutation.
    const __m512i low = _mm512_shuffle_epi32(lanes.low, _MM_PERM_DBCA);
    const __m512i high = _mm512_shuffle_epi32(lanes.high, _MM_PERM_DBCA);
    const __m512i lower = _mm512_unpacklo_epi8(low, high);
    const __m512i upper = _mm512_unpackhi_epi8(low, high);
    const __m512i read = symbols(bits_at(lanes.used, lower, upper));
    const __mmask64 is_listed =
        _mm512_mask_cmpeq_epi8_mask(kFew ? escapes & kFewMask : escapes, read, mark);
    // One bit further up: the window without its lowest bit; the bit that enters above is ignored.
    const __m512i seven_bits = bits_at(_mm512_add_epi8(lanes.used, all_bytes(1)), lower, upper);
    const __m512i left =
        _mm512_sub_epi8(lanes.used, _mm512_permutex2var_epi8(lengths[0], seven_bits, lengths[1]));
    const __mmask64 is_short =
        _mm512_mask_test_epi8_mask(kFew ? kFewMask : ~std::uint64_t{0}, left, all_bytes(8));
    lanes.used =
        _mm512_ternarylogic_epi32(left, all_bytes(7), first_bit, 0xEA);  // left & 7 | first_bit
    const __m512i next = load_first(in);
    in += ones(is_short);
    lanes.high = _mm512_mask_mov_epi8(lanes.high, is_short, lanes.low);
    lanes.low = _mm512_mask_expand_epi8(lanes.low, is_short, next);
    const __m512i symbol = _mm512_mask_expand_epi8(read, is_listed, load_first(listed));
    listed += ones(is_listed);
    return symbol;
  }
};

// Reads whole rounds of all lanes; put(i, symbols) takes 64. Null if the bytes do not suffice.
template <typename Put>
FSL_INLINE const std::uint8_t* read_all_lanes(const Code& code, const std::uint8_t* in,
                                              const std::uint8_t* end, std::size_t count,
                                              Lanes& state, const std::uint8_t*& listed,
                                              Beside& beside, Put put) {
  const LaneReader reader(code);
  LaneVector first(state, 0);
  LaneVector second(state, kStep);
  first.used = _mm512_or_si512(first.used, reader.first_bit);
  second.used = _mm512_or_si512(second.used, reader.first_bit);
  const std::uint8_t* from_list = listed;
  std::size_t i = 0;
  // A round loads one byte per lane and uses at most all of them.
  const auto read = [&](const std::uint8_t* next, const std::uint8_t* last)
                        __attribute__((always_inline)) {
                          for (; i < count && next <= last; i += kMostLanes) {
                            put(i, reader.step(first, next, from_list));
                            put(i + kStep, reader.step(second, next, from_list));
                            fetch_to_add(beside.ahead);
                            take_in(beside.checksum);
                          }
                          return next;
                        };
  if (static_cast<std::size_t>(end - in) >= kMostLanes) in = read(in, end - kMostLanes);
  if (i < count) {
    // The last bytes, with readable room after them.
    std::uint8_t last_bytes[2 * kMostLanes] = {};
    const std::size_t left = static_cast<std::size_t>(end - in);
    std::memcpy(last_bytes, in, left);
    const std::uint8_t* const next = read(last_bytes, last_bytes + left);
    in = next <= last_bytes + left ? in + (next - last_bytes) : nullptr;
  }
  first.save(state, 0);
  second.save(state, kStep);
  listed = from_list;
  return in;
}

// Reads from kFewLanes while a whole vector of bytes is there; returns the number of symbols.
std::size_t read_few_lanes(const Code& code, const std::uint8_t*& in, const std::uint8_t* end,
                           std::size_t count, Lanes& state, const std::uint8_t*& listed,
                           std::uint8_t* symbols) {
  const LaneReader reader(code);
  LaneVector lanes(state, 0);
  lanes.used = _mm512_or_si512(lanes.used, reader.first_bit);
  const std::uint8_t* next = in;
  const std::uint8_t* from_list = listed;
  std::size_t i = 0;
  for (; i + kFewLanes <= count && static_cast<std::size_t>(end - next) >= kStep; i += kFewLanes)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(symbols + i),
                     _mm512_castsi512_si128(reader.step<true>(lanes, next, from_list)));
  lanes.save(state, 0);
  in = next;
  listed = from_list;
  return i;
}

const std::uint8_t* read_lanes(const Code& code, const std::uint8_t* in, const std::uint8_t* end,
                               std::size_t count, std::size_t lanes, Lanes& state,
                               const std::uint8_t*& listed, std::uint8_t* symbols, Beside& beside) {
  std::size_t whole = lanes == kMostLanes ? count & ~(kMostLanes - 1) : 0;
  if (lanes == kFewLanes) {
    whole = read_few_lanes(code, in, end, count, state, listed, symbols);
  } else if (whole > 0) {
    in = read_all_lanes(code, in, end, whole, state, listed, beside,
                        [=](std::size_t i, __m512i read)
                            __attribute__((always_inline)) { store(symbols + i, read); });
    if (in == nullptr) return nullptr;
  }
  return kScalarKernels.read_lanes(code, in, end, count - whole, lanes, state, listed,
                                   symbols + whole, beside);
}

// Codes of symbols above two planes, 64 at a time, and the largest without sign.
template <bool kRotated>
struct CodeJoiner {
  const TwoPlanes& below;
  __m512i high = all_bytes(kRotated ? 1 : 2);
  __m512i low = all_bytes(kRotated ? 0x80 : 1);
  __m512i largest = _mm512_setzero_si512();

  FSL_INLINE explicit CodeJoiner(const TwoPlanes& planes) : below(planes) {}

  FSL_INLINE __m512i join(std::size_t i, __m512i read) {
    __m512i symbols = _mm512_add_epi8(read, read);
    if (!kRotated) symbols = _mm512_add_epi8(symbols, symbols);
    symbols = _mm512_mask_add_epi8(symbols, mask_at(below.high + i / 8), symbols, high);
    symbols = _mm512_mask_add_epi8(symbols, mask_at(below.low + i / 8), symbols, low);
    largest = _mm512_max_epu8(largest, _mm512_and_si512(symbols, all_bytes(0x7F)));
    return symbols;
  }
};

template <bool kRotated>
FSL_INLINE const std::uint8_t* read_all_codes(const Code& code, const std::uint8_t* in,
                                              const std::uint8_t* end, std::size_t count,
                                              Lanes& state, const std::uint8_t*& listed,
                                              const TwoPlanes& below, CodesRead& read,
                                              Beside& beside) {
  std::uint8_t* const codes = read.codes;
  CodeJoiner<kRotated> joiner(below);
  in = read_all_lanes(code, in, end, count, state, listed, beside,
                      [&](std::size_t i, __m512i symbols) __attribute__((always_inline)) {
                        store(codes + i, joiner.join(i, symbols));
                      });
  const std::uint8_t found = largest_of(joiner.largest);
  read.largest = found > read.largest ? found : read.largest;
  return in;
}

const std::uint8_t* read_codes(const Code& code, const std::uint8_t* in, const std::uint8_t* end,
                               std::size_t count, std::size_t lanes, Lanes& state,
                               const std::uint8_t*& listed, const TwoPlanes& below, CodesRead& read,
                               Beside& beside) {
  const std::size_t whole = lanes == kMostLanes ? count & ~(kMostLanes - 1) : 0;
  if (whole > 0) {
    in = below.rotated
             ? read_all_codes<true>(code, in, end, whole, state, listed, below, read, beside)
             : read_all_codes<false>(code, in, end, whole, state, listed, below, read, beside);
    if (in == nullptr) return nullptr;
  }
  const TwoPlanes rest = {below.high + whole / 8, below.low + whole / 8, below.rotated};
  CodesRead others = {read.codes + whole, read.largest};
  in = kScalarKernels.read_codes(code, in, end, count - whole, lanes, state, listed, rest, others,
                                 beside);
  read.largest = others.largest;
  return in;
}

}  // namespace
}  // namespace fsl
