// The kernels for AVX2 with POPCNT, BMI1/2, F16C and PCLMULQDQ. Lists are cut and merged eight symbols at a time by byte shuffles from a table
// (which is fast on every such machine; BMI2's bit extraction is not). Loops that a compiler turns into vectors are the plain ones.
#include "kernels_paths.hpp"

#if FSL_X86_KERNELS

#include <cstring>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2,popcnt,f16c,pclmul"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,popcnt,f16c,pclmul")
#endif
#pragma GCC diagnostic ignored "-Wunused-function"
#include <immintrin.h>

// The plain kernels once more, for these instructions.
#include "kernels_plain.hpp"

#define FSL_INLINE inline __attribute__((always_inline))

namespace fsl {
namespace {

constexpr std::size_t kLane = 8;   // fp32 values of a vector
constexpr std::size_t kStep = 32;  // bytes of a vector

FSL_INLINE __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
FSL_INLINE void store(void* to, __m256i value) { _mm256_storeu_si256(static_cast<__m256i*>(to), value); }
FSL_INLINE __m128i load_half(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
FSL_INLINE __m256i all(int value) { return _mm256_set1_epi32(value); }
FSL_INLINE __m256i all_bytes(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
FSL_INLINE std::size_t ones(std::uint32_t mask) { return static_cast<std::size_t>(_mm_popcnt_u32(mask)); }
FSL_INLINE std::uint32_t signs(__m256i bytes) { return static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes)); }
// The lowest `count` bits, count < 32.
FSL_INLINE std::uint32_t lowest(std::size_t count) { return (std::uint32_t{1} << count) - 1; }
FSL_INLINE int log2_of(std::size_t power) { return __builtin_ctzll(power); }

// A cache line of what comes next.
FSL_INLINE void fetch(Prefetch& prefetch) {
  if (prefetch.next < prefetch.end) {
    _mm_prefetch(prefetch.next, _MM_HINT_T0);
    prefetch.next += 64;
  }
}

FSL_INLINE void store_mask(std::uint8_t* to, std::uint32_t mask) { std::memcpy(to, &mask, 4); }

FSL_INLINE std::uint32_t load_mask(const std::uint8_t* from) {
  std::uint32_t mask;
  std::memcpy(&mask, from, 4);
  return mask;
}

// The last bits of a bitmap, count < 32, none of the bytes behind it touched.
FSL_INLINE std::uint32_t load_rest(const std::uint8_t* from, std::size_t count) {
  std::uint32_t mask = 0;
  std::memcpy(&mask, from, (count + 7) / 8);
  return mask & lowest(count);
}

// 32 bits as bytes of ones or zeros.
FSL_INLINE __m256i spread_bits(std::uint32_t mask) {
  const __m256i bytes = _mm256_shuffle_epi8(
      all(static_cast<int>(mask)), _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
}

// For each byte of bits: the places of its ones, in order; and for each place, the number of zeros in front of it, or 8 plus the number
// of ones when it is a one.
struct Shuffles {
  std::uint64_t pick[256];
  std::uint64_t merge[256];
};

constexpr Shuffles make_shuffles() {
  Shuffles shuffles{};
  for (std::uint64_t mask = 0; mask < 256; ++mask) {
    std::uint64_t found[2] = {0, 0};
    for (std::uint64_t bit = 0; bit < 8; ++bit) {
      const std::uint64_t one = mask >> bit & 1;
      if (one != 0) shuffles.pick[mask] |= bit << (8 * found[1]);
      shuffles.merge[mask] |= (found[one] + 8 * one) << (8 * bit);
      ++found[one];
    }
  }
  return shuffles;
}

alignas(64) constexpr Shuffles kShuffles = make_shuffles();

// ------------------------------------------------------------------------------------------------------------------ input

FSL_INLINE __m256i magnitude_of(__m256i bits) { return _mm256_and_si256(bits, all(0x7FFFFFFF)); }

FSL_INLINE std::uint32_t largest_lane(__m256i lanes) {
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4E));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xB1));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(four));
}

// The largest magnitude of a run of whole vectors, folded into `seen`; differing bits are looked for until there are some.
FSL_INLINE std::uint32_t largest_of_run(const float* x, std::size_t count, std::uint32_t first_bits, Seen& seen) {
  __m256i largest = _mm256_setzero_si256();
  for (std::size_t i = 0; i < count; i += 2 * kLane) {
    largest = _mm256_max_epu32(largest, _mm256_max_epu32(magnitude_of(load(x + i)), magnitude_of(load(x + i + kLane))));
  }
  for (std::size_t i = 0; i < count && seen.differing_bits == 0; i += kLane) {
    const __m256i same = _mm256_cmpeq_epi32(load(x + i), all(static_cast<int>(first_bits)));
    seen.differing_bits = ~signs(same);
  }
  const std::uint32_t magnitude = largest_lane(largest);
  if (magnitude > seen.largest_magnitude) seen.largest_magnitude = magnitude;
  return magnitude;
}

// The lowest bytes of four vectors whose other bytes are zero, in order.
FSL_INLINE __m256i lowest_bytes(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// See float8_code for the idea. Here the magnitude is not divided by the scale: `smallest`, the exponent of the run's smallest normal
// code, sets the step.
template <int kMantissaBits>
FSL_INLINE __m256i float8_codes(__m256i bits, __m256i smallest) {
  constexpr int kShift = 23 - kMantissaBits;
  const __m256i exponent = _mm256_max_epu32(_mm256_and_si256(bits, all(0x7F800000)), smallest);
  const __m256i adder = _mm256_add_epi32(exponent, all(kShift << 23));
  const __m256 sum = _mm256_add_ps(_mm256_castsi256_ps(magnitude_of(bits)), _mm256_castsi256_ps(adder));
  const __m256i places = _mm256_srli_epi32(_mm256_sub_epi32(exponent, smallest), kShift);
  const __m256i code = _mm256_add_epi32(_mm256_sub_epi32(_mm256_castps_si256(sum), adder), places);
  return _mm256_or_si256(code, _mm256_and_si256(_mm256_srli_epi32(bits, 24), all(0x80)));
}

template <int kMantissaBits>
FSL_INLINE void quantise_runs(const float* x, std::size_t count, const Float8& format, std::size_t block_values,
                              std::uint32_t first_bits, std::uint8_t* codes, std::uint8_t* scales, Seen& seen, Prefetch& prefetch) {
  for (std::size_t start = 0; start < count; start += block_values, ++scales) {
    const float* from = x + start;
    const std::uint32_t largest = largest_of_run(from, block_values, first_bits, seen);
    if (largest >= 0x74000000) {
      // The adder's exponent would overflow.
      plain::quantise_float8(from, block_values, format, block_values, first_bits, codes + start, scales, seen, prefetch);
      continue;
    }
    *scales = plain::scale_of(largest, format);
    const int scale = *scales == 0 ? format.lowest_scale : *scales;
    const __m256i smallest = all((scale + 1 - format.exponent_bias) << 23);
    for (std::size_t i = 0; i < block_values; i += kStep) {
      const __m256i a = float8_codes<kMantissaBits>(load(from + i), smallest);
      const __m256i b = float8_codes<kMantissaBits>(load(from + i + kLane), smallest);
      if (block_values < kStep) {  // 16
        const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
        const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + start), bytes);
        break;
      }
      const __m256i c = float8_codes<kMantissaBits>(load(from + i + 2 * kLane), smallest);
      const __m256i d = float8_codes<kMantissaBits>(load(from + i + 3 * kLane), smallest);
      store(codes + start + i, lowest_bytes(a, b, c, d));
      fetch(prefetch);
    }
  }
}

void quantise_float8(const float* x, std::size_t count, const Float8& format, std::size_t block_values, std::uint32_t first_bits,
                     std::uint8_t* codes, std::uint8_t* scales, Seen& seen, Prefetch& prefetch) {
  const std::size_t whole = count - count % block_values;
  if (format.mantissa_bits == 3) {
    quantise_runs<3>(x, whole, format, block_values, first_bits, codes, scales, seen, prefetch);
  } else {
    quantise_runs<2>(x, whole, format, block_values, first_bits, codes, scales, seen, prefetch);
  }
  if (whole < count) {
    plain::quantise_float8(x + whole, count - whole, format, block_values, first_bits, codes + whole, scales + whole / block_values,
                           seen, prefetch);
  }
}

std::size_t quantise_uniform(const float* x, std::size_t count, int fineness, std::size_t block_values, std::uint32_t first_bits,
                             std::uint8_t* codes, std::int16_t* steps, Seen& seen, Prefetch& prefetch) {
  const std::size_t whole = count - count % block_values;
  std::size_t escapes = 0;
  for (std::size_t start = 0; start < whole; start += block_values, ++steps) {
    const float* from = x + start;
    const std::uint32_t largest = largest_of_run(from, block_values, first_bits, seen);
    if (largest == 0) {
      *steps = kZeroRun;
      std::memset(codes + start, 128, block_values);
      continue;
    }
    const __m256 normaliser = _mm256_set1_ps(plain::normaliser_of(largest));
    __m256 low = _mm256_setzero_ps();
    __m256 high = _mm256_setzero_ps();
    for (std::size_t i = 0; i < block_values; i += 2 * kLane) {
      const __m256 a = _mm256_mul_ps(_mm256_loadu_ps(from + i), normaliser);
      const __m256 b = _mm256_mul_ps(_mm256_loadu_ps(from + i + kLane), normaliser);
      low = _mm256_add_ps(low, _mm256_mul_ps(a, a));
      high = _mm256_add_ps(high, _mm256_mul_ps(b, b));
    }
    const __m256 eight = _mm256_add_ps(low, high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    const float sum = _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    const int step = plain::step_from_sum(sum, largest, fineness, block_values);
    *steps = static_cast<std::int16_t>(step);
    const __m256 inverse = _mm256_set1_ps(plain::quarter_power(-step));
    for (std::size_t i = 0; i < block_values; i += 2 * kLane) {
      const __m256 a = _mm256_mul_ps(_mm256_loadu_ps(from + i), inverse);
      const __m256 b = _mm256_mul_ps(_mm256_loadu_ps(from + i + kLane), inverse);
      const __m256 limit = _mm256_set1_ps(127.5F);
      const __m256i fits_a = _mm256_castps_si256(_mm256_cmp_ps(_mm256_castsi256_ps(magnitude_of(_mm256_castps_si256(a))), limit, _CMP_LT_OQ));
      const __m256i fits_b = _mm256_castps_si256(_mm256_cmp_ps(_mm256_castsi256_ps(magnitude_of(_mm256_castps_si256(b))), limit, _CMP_LT_OQ));
      const __m256i code_a = _mm256_and_si256(_mm256_add_epi32(_mm256_cvtps_epi32(a), all(128)), fits_a);
      const __m256i code_b = _mm256_and_si256(_mm256_add_epi32(_mm256_cvtps_epi32(b), all(128)), fits_b);
      const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(code_a, code_b), 0xD8);
      const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + start + i), bytes);
      const __m256i fits = _mm256_packs_epi32(fits_a, fits_b);
      if (_mm256_movemask_epi8(fits) != -1) escapes += (32 - ones(signs(fits))) / 2;
    }
  }
  if (whole < count) {
    escapes += plain::quantise_uniform(x + whole, count - whole, fineness, block_values, first_bits, codes + whole, steps, seen, prefetch);
  }
  return escapes;
}

// ------------------------------------------------------------------------------------------------------- ranks, bit planes

// Looks up the lowest six bits of each byte in 64 entries.
struct Table64 {
  __m256i part[4];

  FSL_INLINE explicit Table64(const std::uint8_t* entries) {
    for (int i = 0; i < 4; ++i) part[i] = _mm256_broadcastsi128_si256(load_half(entries + 16 * i));
  }

  FSL_INLINE __m256i operator()(__m256i index) const {
    const __m256i place = _mm256_and_si256(index, all_bytes(15));
    const __m256i bit4 = _mm256_slli_epi16(index, 3);
    const __m256i low = _mm256_blendv_epi8(_mm256_shuffle_epi8(part[0], place), _mm256_shuffle_epi8(part[1], place), bit4);
    const __m256i high = _mm256_blendv_epi8(_mm256_shuffle_epi8(part[2], place), _mm256_shuffle_epi8(part[3], place), bit4);
    return _mm256_blendv_epi8(low, high, _mm256_slli_epi16(index, 2));
  }
};

void rank(const std::uint8_t* codes, std::size_t count, bool rotated, int shift, const std::uint8_t* ranks, std::uint8_t* symbols) {
  // The sign of rotated codes falls off at the right, so these bits of a code, found six bits wide, decide.
  const int lowest_bit = rotated ? shift - 1 : shift;
  if (lowest_bit < (rotated ? 1 : 2)) return plain::rank(codes, count, rotated, shift, ranks, symbols);
  std::uint8_t entries[64];
  for (int index = 0; index < 64; ++index) {
    const int code = index << lowest_bit & 0xFF;
    entries[index] = ranks[(rotated ? code << 1 & 0xFF : code) >> shift];
  }
  const Table64 table(entries);
  const __m128i places = _mm_cvtsi32_si128(lowest_bit);
  const std::size_t whole = count & ~(kStep - 1);
  for (std::size_t i = 0; i < whole; i += kStep) store(symbols + i, table(_mm256_srl_epi16(load(codes + i), places)));
  plain::rank(codes + whole, count - whole, rotated, shift, ranks, symbols + whole);
}

// The given bit of 32 bytes.
FSL_INLINE std::uint32_t bits_at(__m256i bytes, __m128i up) { return signs(_mm256_sll_epi16(bytes, up)); }

std::size_t write_bit_planes(const std::uint8_t* codes, std::size_t count, bool rotated, int width, std::uint8_t* out) {
  const std::size_t plane_bytes = (count + 7) / 8;
  const std::size_t whole = count & ~(kStep - 1);
  for (int bit = width - 1; bit >= 0; --bit, out += plane_bytes) {
    const __m128i up = _mm_cvtsi32_si128(7 - (rotated ? (bit + 7) & 7 : bit));
    for (std::size_t i = 0; i < whole; i += kStep) store_mask(out + i / 8, bits_at(load(codes + i), up));
    if (whole < count) store_mask(out + whole / 8, bits_at(load(codes + whole), up) & lowest(count - whole));
  }
  return static_cast<std::size_t>(width) * plane_bytes;
}

// ---------------------------------------------------------------------------------------------------------- tree: writing

struct TreeWriter {
  const Node* nodes;
  std::uint8_t* out;
  Prefetch prefetch;

  void write_flat(const Node& node, const std::uint8_t* list, std::size_t count) {
    const std::size_t bitmap_bytes = (count + 7) / 8;
    const __m256i first = all_bytes(node.first);
    for (int bit = node.planes - 1; bit >= 0; --bit, out += bitmap_bytes) {
      const __m128i up = _mm_cvtsi32_si128(7 - bit);
      for (std::size_t i = 0; i < count; i += kStep) {
        std::uint32_t mask = bits_at(_mm256_sub_epi8(load(list + i), first), up);
        if (count - i < kStep) mask &= lowest(count - i);
        store_mask(out + i / 8, mask);
      }
    }
  }

  // The symbols of eight that the bits name.
  static FSL_INLINE void pick(__m128i eight, std::uint32_t mask, std::uint8_t* to) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to),
                     _mm_shuffle_epi8(eight, _mm_loadl_epi64(reinterpret_cast<const __m128i*>(&kShuffles.pick[mask]))));
  }

  // Writes the bitmap and the lists of those children that need one: the left in place, the right to `stack`.
  template <bool kLeft, bool kRight>
  FSL_INLINE std::size_t partition(std::uint8_t* list, std::size_t count, std::uint8_t pivot, std::uint8_t* stack) {
    const __m256i pivots = all_bytes(pivot);
    std::uint8_t* left = list;
    std::uint8_t* right = stack;
    std::size_t right_count = 0;
    for (std::size_t i = 0; i < count; i += kStep) {
      const __m256i symbols = load(list + i);
      const std::uint32_t valid = count - i < kStep ? lowest(count - i) : 0xFFFFFFFF;
      const std::uint32_t goes_right = signs(_mm256_cmpeq_epi8(_mm256_max_epu8(symbols, pivots), symbols)) & valid;
      const std::uint32_t goes_left = ~goes_right & valid;
      store_mask(out + i / 8, goes_right);
      right_count += ones(goes_right);
      for (int group = 0; (kLeft || kRight) && group < 4; ++group) {
        const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(list + i + 8 * group));
        const std::uint32_t to_right = goes_right >> (8 * group) & 0xFF;
        const std::uint32_t to_left = goes_left >> (8 * group) & 0xFF;
        if (kRight) {
          pick(eight, to_right, right);
          right += ones(to_right);
        }
        if (kLeft) {
          pick(eight, to_left, left);
          left += ones(to_left);
        }
      }
      fetch(prefetch);
    }
    out += (count + 7) / 8;
    return right_count;
  }

  // `list` and `stack` lie in two buffers, each free from there on but for the list itself, so that whole vectors may be stored; the
  // right child finds room where `list` was.
  void write(const Node& node, std::uint8_t* list, std::size_t count, std::uint8_t* stack) {
    if (node.left == 0) return write_flat(node, list, count);
    const Node& left = nodes[node.left];
    const Node& right = nodes[node.right];
    const bool has_left = left.left != 0 || left.planes != 0;
    const bool has_right = right.left != 0 || right.planes != 0;
    const std::uint8_t pivot = static_cast<std::uint8_t>(node.pivot);
    std::size_t right_count = 0;
    if (has_left && has_right) {
      right_count = partition<true, true>(list, count, pivot, stack);
    } else if (has_left) {
      right_count = partition<true, false>(list, count, pivot, stack);
    } else if (has_right) {
      right_count = partition<false, true>(list, count, pivot, stack);
    } else {
      right_count = partition<false, false>(list, count, pivot, stack);
    }
    if (has_left && right_count < count) write(left, list, count - right_count, stack + right_count);
    if (has_right && right_count > 0) write(right, stack, right_count, list);
  }
};

std::size_t write_tree(const Node* nodes, std::uint8_t* symbols, std::size_t count, std::uint8_t* scratch, std::uint8_t* out,
                       Prefetch& prefetch) {
  TreeWriter writer{nodes, out, prefetch};
  if (count > 0) writer.write(nodes[0], symbols, count, scratch);
  prefetch = writer.prefetch;
  return static_cast<std::size_t>(writer.out - out);
}

// ---------------------------------------------------------------------------------------------------------- tree: reading

struct TreeReader {
  const Node* nodes;
  const std::uint8_t* in;
  const std::uint8_t* end;
  Prefetch prefetch;

  // Bits set among the first `count`.
  static FSL_INLINE std::size_t count_ones(const std::uint8_t* bitmap, std::size_t count) {
    std::size_t sum = 0;
    std::size_t i = 0;
    for (; i + 64 <= count; i += 64) {
      std::uint64_t mask;
      std::memcpy(&mask, bitmap + i / 8, 8);
      sum += static_cast<std::size_t>(_mm_popcnt_u64(mask));
    }
    for (; i + kStep <= count; i += kStep) sum += ones(load_mask(bitmap + i / 8));
    return i < count ? sum + ones(load_rest(bitmap + i / 8, count - i)) : sum;
  }

  bool read_flat(const Node& node, std::size_t count, std::uint8_t* list) {
    const std::size_t bitmap_bytes = (count + 7) / 8;
    if (static_cast<std::size_t>(end - in) < node.planes * bitmap_bytes) return false;
    const int planes = node.planes;
    for (std::size_t i = 0; i < count; i += kStep) {
      __m256i symbols = all_bytes(node.first);
      for (int plane = 0; plane < planes; ++plane) {
        const std::uint8_t* const from = in + static_cast<std::size_t>(plane) * bitmap_bytes + i / 8;
        const std::uint32_t mask = count - i < kStep ? load_rest(from, count - i) : load_mask(from);
        symbols = _mm256_add_epi8(symbols, _mm256_and_si256(spread_bits(mask), all_bytes(1 << (planes - 1 - plane))));
      }
      store(list + i, symbols);
    }
    in += static_cast<std::size_t>(planes) * bitmap_bytes;
    return true;
  }

  // Merges the children's lists under the bitmap; a child without a list is a leaf of that rank.
  template <bool kLeft, bool kRight>
  FSL_INLINE void merge(const std::uint8_t* bitmap, std::size_t count, const std::uint8_t* left, const std::uint8_t* right,
                        std::uint8_t left_rank, std::uint8_t right_rank, std::uint8_t* list) {
    const __m128i left_ranks = _mm_set1_epi8(static_cast<char>(left_rank));
    const __m128i right_ranks = _mm_set1_epi8(static_cast<char>(right_rank));
    for (std::size_t i = 0; i < count; i += kStep) {
      const std::uint32_t goes_right = count - i < kStep ? load_rest(bitmap + i / 8, count - i) : load_mask(bitmap + i / 8);
      if (!kLeft && !kRight) {
        store(list + i, _mm256_blendv_epi8(all_bytes(left_rank), all_bytes(right_rank), spread_bits(goes_right)));
      }
      for (int group = 0; (kLeft || kRight) && group < 4; ++group) {
        const std::uint32_t mask = goes_right >> (8 * group) & 0xFF;
        const __m128i from_left = kLeft ? _mm_loadl_epi64(reinterpret_cast<const __m128i*>(left)) : left_ranks;
        const __m128i from_right = kRight ? _mm_loadl_epi64(reinterpret_cast<const __m128i*>(right)) : right_ranks;
        const __m128i shuffle = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(&kShuffles.merge[mask]));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(list + i + 8 * group),
                         _mm_shuffle_epi8(_mm_unpacklo_epi64(from_left, from_right), shuffle));
        const std::size_t ones_here = ones(mask);
        if (kRight) right += ones_here;
        if (kLeft) left += 8 - ones_here;
      }
      fetch(prefetch);
    }
  }

  // Writes the node's symbols to `list`; children write theirs to the same places of `other`. False when bytes are missing.
  bool read(const Node& node, std::size_t count, std::uint8_t* list, std::uint8_t* other) {
    if (node.left == 0) return read_flat(node, count, list);
    const std::size_t bitmap_bytes = (count + 7) / 8;
    if (static_cast<std::size_t>(end - in) < bitmap_bytes) return false;
    const std::uint8_t* const bitmap = in;
    in += bitmap_bytes;
    const Node& left = nodes[node.left];
    const Node& right = nodes[node.right];
    const bool has_left = left.left != 0 || left.planes != 0;
    const bool has_right = right.left != 0 || right.planes != 0;
    if (!has_left && !has_right) {
      merge<false, false>(bitmap, count, nullptr, nullptr, left.first, right.first, list);
      return true;
    }
    const std::size_t right_count = count_ones(bitmap, count);
    const std::size_t left_count = count - right_count;
    if (has_left && left_count > 0 && !read(left, left_count, other, list)) return false;
    std::uint8_t* const from_right = has_left ? other + left_count : other;
    std::uint8_t* const right_other = has_left ? list + left_count : list;
    if (has_right && right_count > 0 && !read(right, right_count, from_right, right_other)) return false;
    if (has_left && has_right) {
      merge<true, true>(bitmap, count, other, from_right, 0, 0, list);
    } else if (has_left) {
      merge<true, false>(bitmap, count, other, nullptr, 0, right.first, list);
    } else {
      merge<false, true>(bitmap, count, nullptr, from_right, left.first, 0, list);
    }
    return true;
  }
};

std::size_t read_tree(const Node* nodes, const std::uint8_t* in, const std::uint8_t* end, std::size_t count, std::uint8_t* scratch,
                      std::uint8_t* symbols, Prefetch& prefetch) {
  TreeReader reader{nodes, in, end, prefetch};
  if (count > 0 && !reader.read(nodes[0], count, symbols, scratch)) return SIZE_MAX;
  prefetch = reader.prefetch;
  return static_cast<std::size_t>(reader.in - in);
}

void join(const std::uint8_t* symbols, const std::uint8_t* symbol_of_rank, const std::uint8_t* in, std::size_t count, bool rotated,
          int width, std::uint8_t* codes) {
  if (symbols != nullptr && width < 2) return plain::join(symbols, symbol_of_rank, in, count, rotated, width, codes);
  // The table's entries and the planes' bits go straight to where a rotation takes them. Alphabets have at most 64 symbols here.
  std::uint8_t entries[64] = {};
  for (int i = 0; i < 64 && symbols != nullptr; ++i) {
    const std::uint8_t code = static_cast<std::uint8_t>(symbol_of_rank[i] << width);
    entries[i] = rotated ? plain::rotate_right(code) : code;
  }
  const Table64 table(entries);
  const std::size_t plane_bytes = (count + 7) / 8;
  for (std::size_t i = 0; i < count; i += kStep) {
    __m256i code = symbols != nullptr ? table(load(symbols + i)) : _mm256_setzero_si256();
    for (int plane = 0; plane < width; ++plane) {
      const std::uint8_t* const from = in + static_cast<std::size_t>(plane) * plane_bytes + i / 8;
      const std::uint32_t mask = count - i < kStep ? load_rest(from, count - i) : load_mask(from);
      const int bit = width - 1 - plane;
      code = _mm256_or_si256(code, _mm256_and_si256(spread_bits(mask), all_bytes(1 << (rotated ? (bit + 7) & 7 : bit))));
    }
    store(codes + i, code);
  }
}

// ------------------------------------------------------------------------------------------------------------ output values

// Puts vectors of values to their places, in order, 8 at a time.
template <Sink kSink, bool kAligned>
struct Writer {
  float* out;
  const float* source;
  __m256 weight;

  FSL_INLINE explicit Writer(const Output& output)
      : out(static_cast<float*>(output.out)), source(output.source), weight(_mm256_set1_ps(output.weight)) {}

  FSL_INLINE void put(std::size_t i, __m256 value) const {
    if (kSink == Sink::kStore) {
      _mm256_storeu_ps(out + i, value);
    } else if (kSink == Sink::kStream) {
      if (kAligned) {
        _mm256_stream_ps(out + i, value);
      } else {
        _mm_stream_ps(out + i, _mm256_castps256_ps128(value));
        _mm_stream_ps(out + i + 4, _mm256_extractf128_ps(value, 1));
      }
    } else if (kSink == Sink::kAccumulate) {
      _mm256_storeu_ps(out + i, _mm256_add_ps(_mm256_loadu_ps(out + i), _mm256_mul_ps(value, weight)));
    } else if (kSink == Sink::kBfloat16) {
      // The values are finite.
      const __m256i bits = _mm256_castps_si256(value);
      const __m256i ties = _mm256_and_si256(_mm256_srli_epi32(bits, 16), all(1));
      const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, all(0x7FFF)), ties), 16);
      const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(reinterpret_cast<std::uint16_t*>(out) + i), words);
    } else {
      _mm256_storeu_ps(out + i, _mm256_sub_ps(_mm256_loadu_ps(source + i), value));
    }
  }
};

// The same output, `count` values further.
Output further(const Output& output, std::size_t count) {
  Output rest = output;
  rest.out = output.sink == Sink::kBfloat16 ? static_cast<void*>(static_cast<std::uint16_t*>(output.out) + count)
                                            : static_cast<void*>(static_cast<float*>(output.out) + count);
  if (output.source != nullptr) rest.source = output.source + count;
  return rest;
}

// Calls work(writer) with the writer of the sink. Non-temporal stores need places that are multiples of their size.
template <typename Work>
FSL_INLINE void with_writer(const Output& output, Work work) {
  const std::uintptr_t place = reinterpret_cast<std::uintptr_t>(output.out);
  switch (output.sink) {
    case Sink::kStream:
      if (place % 32 == 0) return work(Writer<Sink::kStream, true>(output));
      if (place % 16 == 0) return work(Writer<Sink::kStream, false>(output));
      [[fallthrough]];
    case Sink::kStore:
      return work(Writer<Sink::kStore, true>(output));
    case Sink::kAccumulate:
      return work(Writer<Sink::kAccumulate, true>(output));
    case Sink::kBfloat16:
      return work(Writer<Sink::kBfloat16, true>(output));
    case Sink::kResidual:
      return work(Writer<Sink::kResidual, true>(output));
  }
}

// Both formats become fp16 numbers by moving bits, e4m3 too small by 2^8; the factor of the run makes up for that.
template <int kMantissaBits, typename Put>
FSL_INLINE __m128i dequantise_runs(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t count, int block_shift, Put put) {
  __m128i largest = _mm_setzero_si128();
  for (std::size_t i = 0; i < count; i += 16) {
    const int scale = scales[i >> block_shift] + (kMantissaBits == 3 ? 8 : 0);
    const __m256 factor = _mm256_castsi256_ps(all(scale << 23));
    const __m128i code = load_half(codes + i);
    largest = _mm_max_epu8(largest, _mm_and_si128(code, _mm_set1_epi8(0x7F)));
    __m128i low = _mm_unpacklo_epi8(_mm_setzero_si128(), code);
    __m128i high = _mm_unpackhi_epi8(_mm_setzero_si128(), code);
    if (kMantissaBits == 3) {
      low = _mm_and_si128(_mm_srai_epi16(low, 1), _mm_set1_epi16(static_cast<short>(0xBFFF)));
      high = _mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16(static_cast<short>(0xBFFF)));
    }
    put.put(i, _mm256_mul_ps(_mm256_cvtph_ps(low), factor));
    put.put(i + kLane, _mm256_mul_ps(_mm256_cvtph_ps(high), factor));
  }
  return largest;
}

bool dequantise_float8(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t count, const Float8& format,
                       std::size_t block_values, const Output& output, Prefetch& prefetch) {
  const std::size_t whole = count & ~std::size_t{15};
  const std::size_t runs = (count + block_values - 1) / block_values;
  std::uint8_t smallest = 0xFF;
  std::uint8_t highest = 0;
  for (std::size_t run = 0; run < runs; ++run) {
    smallest = scales[run] < smallest ? scales[run] : smallest;
    highest = scales[run] > highest ? scales[run] : highest;
  }
  // With the highest scale of all a finite code may still be infinite.
  if (smallest < format.lowest_scale || highest > 254 - format.largest_exponent) {
    return plain::dequantise_float8(codes, scales, count, format, block_values, output, prefetch);
  }
  const int block_shift = log2_of(block_values);
  __m128i largest = _mm_setzero_si128();
  with_writer(output, [&](auto writer) __attribute__((always_inline)) {
    largest = format.mantissa_bits == 3 ? dequantise_runs<3>(codes, scales, whole, block_shift, writer)
                                        : dequantise_runs<2>(codes, scales, whole, block_shift, writer);
  });
  const __m128i special = _mm_set1_epi8(static_cast<char>(format.special_code));
  bool finite = _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_max_epu8(largest, special), largest)) == 0;
  if (whole < count) {
    finite &= plain::dequantise_float8(codes + whole, scales + whole / block_values, count - whole, format, block_values,
                                       further(output, whole), prefetch);
  }
  return finite;
}

bool dequantise_uniform(const std::uint8_t* codes, const std::int16_t* steps, const std::uint8_t* escapes, std::size_t count,
                        std::size_t block_values, const Output& output, Prefetch& prefetch) {
  const int block_shift = log2_of(block_values);
  const std::size_t whole = count & ~std::size_t{15};
  bool finite = true;
  std::size_t i = 0;
  // Up to the next vector with an escape; that one by itself; and on from there.
  while (i < whole) {
    with_writer(output, [&](auto writer) __attribute__((always_inline)) {
      for (; i < whole; i += 16) {
        const __m128i code = load_half(codes + i);
        if (_mm_movemask_epi8(_mm_cmpeq_epi8(code, _mm_setzero_si128())) != 0) break;
        const __m256 step = _mm256_set1_ps(plain::quarter_power(steps[i >> block_shift]));
        const __m128i centred = _mm_xor_si128(code, _mm_set1_epi8(static_cast<char>(0x80)));
        writer.put(i, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(centred)), step));
        writer.put(i + kLane, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(centred, 8))), step));
      }
    });
    if (i < whole) {
      finite &= plain::dequantise_uniform(codes + i, steps + (i >> block_shift), escapes, 16, block_values, further(output, i), prefetch);
      escapes += 4 * plain::count_byte(codes + i, 16, 0);
      i += 16;
    }
  }
  if (whole < count) {
    finite &= plain::dequantise_uniform(codes + whole, steps + whole / block_values, escapes, count - whole, block_values,
                                        further(output, whole), prefetch);
  }
  return finite;
}

// ------------------------------------------------------------------------------------------------------------------- CRC

// See kernels_avx512.cpp.
constexpr std::uint64_t folding_constant(int power) {
  std::uint32_t remainder = 0x80000000;  // x^0, lowest power in the highest bit
  for (int i = 0; i < power; ++i) remainder = remainder >> 1 ^ ((remainder & 1) != 0 ? 0xEDB88320U : 0U);
  return static_cast<std::uint64_t>(remainder) << 1;
}

template <int kBits>
FSL_INLINE __m128i fold(__m128i value, __m128i data) {
  constexpr long long kLow = static_cast<long long>(folding_constant(kBits + 32));
  constexpr long long kHigh = static_cast<long long>(folding_constant(kBits - 32));
  const __m128i constants = _mm_set_epi64x(kHigh, kLow);
  const __m128i product = _mm_xor_si128(_mm_clmulepi64_si128(value, constants, 0x00), _mm_clmulepi64_si128(value, constants, 0x11));
  return _mm_xor_si128(product, data);
}

std::uint32_t crc32(std::uint32_t value, const std::uint8_t* data, std::size_t count) {
  if (count < 128) return plain::crc32(value, data, count);
  __m128i sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = load_half(data + 16 * i);
  sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(static_cast<int>(~value)));
  data += 64;
  count -= 64;
  for (; count >= 64; data += 64, count -= 64) {
    for (int i = 0; i < 4; ++i) sums[i] = fold<512>(sums[i], load_half(data + 16 * i));
  }
  __m128i sum = fold<128>(fold<128>(fold<128>(sums[0], sums[1]), sums[2]), sums[3]);
  for (; count >= 16; data += 16, count -= 16) sum = fold<128>(sum, load_half(data));
  std::uint8_t bytes[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), sum);
  // The tables start from the complement of their first argument: here from 0.
  return plain::crc32(plain::crc32(0xFFFFFFFF, bytes, 16), data, count);
}

}  // namespace

const Kernels kAvx2Kernels = {
    plain::combine, plain::look,  quantise_float8, quantise_uniform,     plain::cut_bfloat16,  plain::cut_float32, rank,
    write_bit_planes, write_tree, read_tree,       join,                 dequantise_float8,    dequantise_uniform,
    plain::join_bfloat16, plain::join_float32, plain::copy_float32, plain::largest_byte, plain::count_byte, plain::find_byte, crc32, Path::kAvx2,
};

}  // namespace fsl

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // FSL_X86_KERNELS
