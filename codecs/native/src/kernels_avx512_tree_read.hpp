// AVX-512: tree bitmaps, read. For kernels_avx512.cpp only, which sets the target.
#pragma once

#include "kernels_avx512_base.hpp"
#include "kernels_avx512_planes.hpp"
#include "kernels_avx512_tree_write.hpp"

namespace fsl {
namespace {

FSL_INLINE std::uint64_t load_mask(const std::uint8_t* from) {
  std::uint64_t mask;
  std::memcpy(&mask, from, 8);
  return mask;
}

// The last bits of a bitmap, count < 64, nothing touched from `end` on.
FSL_INLINE std::uint64_t load_rest(const std::uint8_t* from, std::size_t count, const std::uint8_t* end) {
  if (__builtin_expect(end - from >= 8, 1)) return load_mask(from) & lowest(count);
  std::uint64_t mask = 0;
  std::memcpy(&mask, from, (count + 7) / 8);
  return mask & lowest(count);
}

struct TreeReader {
  const Node* nodes;
  const std::uint8_t* in;
  const std::uint8_t* end;
  const Chores& chores;

  // Bits set among the first `count`.
  std::size_t count_ones(const std::uint8_t* bitmap, std::size_t count) const {
    __m512i sums = _mm512_setzero_si512();
    std::size_t i = 0;
    for (; i + 512 <= count; i += 512) sums = _mm512_add_epi64(sums, _mm512_popcnt_epi64(load(bitmap + i / 8)));
    std::size_t sum = i == 0 ? 0 : static_cast<std::size_t>(_mm512_reduce_add_epi64(sums));
    for (; i + kStep <= count; i += kStep) sum += ones(load_mask(bitmap + i / 8));
    return i == count ? sum : sum + ones(load_rest(bitmap + i / 8, count - i, end));
  }

  template <int kPlanes>
  void read_planes(std::size_t plane_bytes, std::size_t count, __m512i first, std::uint8_t* list) const {
    const std::uint8_t* const planes = in;
    const std::size_t whole = count & ~(kStep - 1);
    const auto with_planes = [&](auto load_bits) __attribute__((always_inline)) {
      __m512i symbols = first;
      for (int plane = 0; plane < kPlanes; ++plane) {
        symbols = _mm512_mask_add_epi8(symbols, load_bits(planes + static_cast<std::size_t>(plane) * plane_bytes), symbols,
                                       all_bytes(1 << (kPlanes - 1 - plane)));
      }
      return symbols;
    };
    for (std::size_t i = 0; i < whole; i += kStep) {
      store(list + i, with_planes([=](const std::uint8_t* plane) { return mask_at(plane + i / 8); }));
    }
    if (whole < count) {
      store(list + whole, with_planes([=](const std::uint8_t* plane) { return load_rest(plane + whole / 8, count - whole, end); }));
    }
  }

  bool read_flat(const Node& node, std::size_t count, std::uint8_t* list) {
    const std::size_t plane_bytes = (count + 7) / 8;
    if (static_cast<std::size_t>(end - in) < node.planes * plane_bytes) return false;
    const __m512i first = all_bytes(node.first);
    for_planes(node.planes, [&](auto plane_count) { read_planes<plane_count()>(plane_bytes, count, first, list); });
    in += node.planes * plane_bytes;
    return true;
  }

  // Writes the symbols of a node from those of its children; a leaf has no list.
  template <bool kLeftIsLeaf>
  void merge(const std::uint8_t* bitmap, std::size_t count, const std::uint8_t* left, __m512i leaf, const std::uint8_t* right,
             std::uint8_t* list) {
    // What this loop costs is the number of its instructions: everything that moves is one of these places, or `rights` from one.
    std::size_t rights = 0;
    const auto step = [&](const std::uint8_t* left_here, std::uint8_t* list_here, std::uint64_t bits,
                          __mmask64 goes_right) __attribute__((always_inline)) {
      const __m512i from_right = load_first(right + rights);
      if (kLeftIsLeaf) {
        store(list_here, _mm512_mask_expand_epi8(leaf, goes_right, from_right));
      } else {
        // The last step's left mask has too many bits: what they bring is never looked at.
        const __m512i from_left = _mm512_maskz_expand_epi8(inverse(goes_right), load_first(left_here - rights));
        store(list_here, _mm512_or_si512(from_left, _mm512_maskz_expand_epi8(goes_right, from_right)));
      }
      rights += ones(bits);
    };
    const std::size_t whole = count & ~(kStep - 1);
    in_steps<kStep>(whole, chores, [&](std::size_t) __attribute__((always_inline)) {
      step(left, list, load_mask(bitmap), mask_at(bitmap));
      if (!kLeftIsLeaf) left += kStep;
      list += kStep;
      bitmap += kStep / 8;
    });
    if (whole < count) {
      const std::uint64_t rest = load_rest(bitmap, count - whole, end);
      step(left, list, rest, rest);
    }
  }

  // Writes the node's symbols to `list`; children write theirs to the same places of `other`. False when bytes are missing.
  bool read(const Node& node, std::size_t count, std::uint8_t* list, std::uint8_t* other) {
    if (node.left == 0) return read_flat(node, count, list);
    const std::size_t bitmap_bytes = (count + 7) / 8;
    if (static_cast<std::size_t>(end - in) < bitmap_bytes) return false;
    const std::uint8_t* const bitmap = in;
    in += bitmap_bytes;
    const std::size_t rights = count_ones(bitmap, count);
    const Node& left = nodes[node.left];
    const bool left_is_leaf = is_leaf(left);
    const std::size_t lefts = left_is_leaf ? 0 : count - rights;
    if (lefts > 0 && !read(left, lefts, other, list)) return false;
    if (rights > 0 && !read(nodes[node.right], rights, other + lefts, list + lefts)) return false;
    if (left_is_leaf) {
      merge<true>(bitmap, count, nullptr, all_bytes(left.first), other, list);
    } else {
      merge<false>(bitmap, count, other, _mm512_setzero_si512(), other + lefts, list);
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
