// AVX2: tree bitmaps, read. For kernels_avx2.cpp only, which sets the target and includes
// kernels_plain.hpp for it.
#pragma once

#include "kernels_avx2_base.hpp"
#include "kernels_avx2_planes.hpp"

namespace fsl {
namespace {

// The last bits of a bitmap, count < 64, nothing read from `end` on.
FSL_INLINE std::uint64_t load_last(const std::uint8_t* from, std::size_t count, const std::uint8_t* end) {
  std::uint64_t bits = 0;
  if (__builtin_expect(static_cast<std::size_t>(end - from) >= 8, 1)) {
    bits = load_word(from);
  } else {
    std::memcpy(&bits, from, (count + 7) / 8);
  }
  return bits & lowest64(count);
}

// For each byte, the ones among the bytes of its half of the vector up to itself, as negative numbers, from bytes that are 0 or -1.
FSL_INLINE __m256i minus_ones_so_far(__m256i bits) {
  __m256i sums = _mm256_add_epi8(bits, _mm256_slli_epi64(bits, 8));
  sums = _mm256_add_epi8(sums, _mm256_slli_epi64(sums, 16));
  sums = _mm256_add_epi8(sums, _mm256_slli_epi64(sums, 32));
  const __m256i last_of_first_eight = _mm256_broadcastsi128_si256(_mm_set_epi64x(0x0707070707070707, -1));
  return _mm256_add_epi8(sums, _mm256_shuffle_epi8(sums, last_of_first_eight));
}

// Two times 16 bytes, each for one half of a vector, as shuffles do not cross halves.
FSL_INLINE __m256i load_halves(const std::uint8_t* low, const std::uint8_t* high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load_half(low)), load_half(high), 1);
}

struct Merge {
  const std::uint8_t* bitmap;
  std::size_t count;
  const std::uint8_t* left;   // the children's lists; a child without one is a leaf of that rank
  const std::uint8_t* right;
  std::uint8_t left_rank;
  std::uint8_t right_rank;
  std::uint8_t* list;
  const std::uint8_t* end;  // of what may be read behind the bitmap
};

// Merges the children's lists under the bitmap.
template <bool kLeft, bool kRight>
void merge(const Merge& work, const Chores& chores) {
  const std::uint8_t* left = work.left;
  const std::uint8_t* right = work.right;
  const __m256i left_ranks = all_bytes(work.left_rank);
  const __m256i right_ranks = all_bytes(work.right_rank);
  const __m256i places =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  // 32 symbols, from the places in the children's lists where the first 16 of them begin and where the others do.
  std::uint8_t* const list = work.list;
  const auto half = [=](__m256i bits, const std::uint8_t* left_low, const std::uint8_t* left_high, const std::uint8_t* right_low,
                        const std::uint8_t* right_high) __attribute__((always_inline)) {
    __m256i from_left = left_ranks;
    __m256i from_right = right_ranks;
    if (kLeft || kRight) {
      const __m256i sums = minus_ones_so_far(bits);
      if (kLeft) from_left = _mm256_shuffle_epi8(load_halves(left_low, left_high), _mm256_add_epi8(places, sums));
      if (kRight) from_right = _mm256_shuffle_epi8(load_halves(right_low, right_high), _mm256_xor_si256(sums, all_bytes(-1)));
    }
    return _mm256_blendv_epi8(from_left, from_right, bits);
  };
  const auto step = [&](std::size_t i, std::uint64_t goes_right, __m256i low_bits, __m256i high_bits) __attribute__((always_inline)) {
    const std::size_t ones_16 = ones64(goes_right & 0xFFFF);
    const std::size_t ones_32 = ones64(goes_right & 0xFFFFFFFF);
    const std::size_t ones_48 = ones64(goes_right << 16);
    const std::size_t ones_all = ones64(goes_right);
    store(list + i, half(low_bits, left, left + 16 - ones_16, right, right + ones_16));
    store(list + i + kStep, half(high_bits, left + 32 - ones_32, left + 48 - ones_48, right + ones_32, right + ones_48));
    if (kLeft) left += kWord - ones_all;
    if (kRight) right += ones_all;
  };
  const std::size_t whole = work.count & ~(kWord - 1);
  in_steps<kWord>(whole, chores, [&](std::size_t i) __attribute__((always_inline)) {
    const std::uint8_t* const bitmap = work.bitmap + i / 8;
    step(i, load_word(bitmap), spread_bits(load_mask(bitmap)), spread_bits(load_mask(bitmap + 4)));
  });
  if (whole < work.count) {
    const std::uint64_t bits = load_last(work.bitmap + whole / 8, work.count - whole, work.end);
    step(whole, bits, spread_bits(static_cast<std::uint32_t>(bits)), spread_bits(static_cast<std::uint32_t>(bits >> 32)));
  }
}

struct TreeReader {
  const Node* nodes;
  const std::uint8_t* in;
  const std::uint8_t* end;
  const Chores& chores;

  // Bits set among the first `count`.
  std::size_t count_ones(const std::uint8_t* bitmap, std::size_t count) const {
    std::size_t sum = 0;
    std::size_t i = 0;
    for (; i + kWord <= count; i += kWord) sum += ones64(load_word(bitmap + i / 8));
    return i < count ? sum + ones64(load_last(bitmap + i / 8, count - i, end)) : sum;
  }

  template <int kPlanes>
  void read_planes(const std::uint8_t* planes, std::size_t plane_bytes, std::size_t count, __m256i first, std::uint8_t* list) const {
    const auto symbols = [=](auto mask_of) __attribute__((always_inline)) {
      __m256i sum = _mm256_setzero_si256();
      for (int plane = 0; plane < kPlanes; ++plane) {
        sum = _mm256_sub_epi8(_mm256_add_epi8(sum, sum), spread_bits(mask_of(planes + static_cast<std::size_t>(plane) * plane_bytes)));
      }
      return _mm256_add_epi8(sum, first);
    };
    const std::size_t whole = count & ~(kStep - 1);
    for (std::size_t i = 0; i < whole; i += kStep) {
      store(list + i, symbols([=](const std::uint8_t* plane) __attribute__((always_inline)) { return load_mask(plane + i / 8); }));
    }
    if (whole < count) {
      const std::uint8_t* const limit = end;
      store(list + whole, symbols([=](const std::uint8_t* plane) __attribute__((always_inline)) {
              return static_cast<std::uint32_t>(load_last(plane + whole / 8, count - whole, limit));
            }));
    }
  }

  bool read_flat(const Node& node, std::size_t count, std::uint8_t* list) {
    const std::size_t plane_bytes = (count + 7) / 8;
    const std::uint8_t* const planes = in;
    if (static_cast<std::size_t>(end - in) < node.planes * plane_bytes) return false;
    in += node.planes * plane_bytes;
    const __m256i first = all_bytes(node.first);
    for_planes(node.planes, [&](auto plane_count) { read_planes<plane_count()>(planes, plane_bytes, count, first, list); });
    return true;
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
    Merge work{bitmap, count, nullptr, nullptr, left.first, right.first, list, end};
    if (!has_left && !has_right) {
      merge<false, false>(work, chores);
      return true;
    }
    const std::size_t right_count = count_ones(bitmap, count);
    const std::size_t left_count = count - right_count;
    work.left = other;
    if (has_left && left_count > 0 && !read(left, left_count, other, list)) return false;
    std::uint8_t* const from_right = has_left ? other + left_count : other;
    std::uint8_t* const right_other = has_left ? list + left_count : list;
    work.right = from_right;
    if (has_right && right_count > 0 && !read(right, right_count, from_right, right_other)) return false;
    if (has_left && has_right) {
      merge<true, true>(work, chores);
    } else if (has_left) {
      merge<true, false>(work, chores);
    } else {
      merge<false, true>(work, chores);
    }
    return true;
  }
};

std::size_t read_tree(const Node* nodes, const std::uint8_t* in, const std::uint8_t* end, std::size_t count, std::uint8_t* scratch,
                      std::uint8_t* symbols, const Chores& chores) {
  TreeReader reader{nodes, in, end, chores};
  if (count > 0 && !reader.read(nodes[0], count, symbols, scratch)) return SIZE_MAX;
  return static_cast<std::size_t>(reader.in - in);
}

}  // namespace
}  // namespace fsl
