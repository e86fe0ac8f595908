// AVX2: ranks, bit planes, tree bitmaps. For kernels_avx2.cpp only, which sets the target and includes
// kernels_plain.hpp for it.
#pragma once

#include "kernels_avx2_base.hpp"

namespace fsl {
namespace {

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

}  // namespace
}  // namespace fsl
