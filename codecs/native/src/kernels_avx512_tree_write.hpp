// AVX-512: tree bitmaps, written. For kernels_avx512.cpp only, which sets the target.
#pragma once

#include "kernels_avx512_base.hpp"
#include "kernels_avx512_planes.hpp"

namespace fsl {
namespace {

// Calls work with the number of planes (0 to 8) as a constant: loops over planes are unrolled then, which makes them about four times as fast.
template <typename Work>
FSL_INLINE void for_planes(int planes, Work work) {
  switch (planes) {
    case 0: return work(std::integral_constant<int, 0>());
    case 1: return work(std::integral_constant<int, 1>());
    case 2: return work(std::integral_constant<int, 2>());
    case 3: return work(std::integral_constant<int, 3>());
    case 4: return work(std::integral_constant<int, 4>());
    case 5: return work(std::integral_constant<int, 5>());
    case 6: return work(std::integral_constant<int, 6>());
    case 7: return work(std::integral_constant<int, 7>());
    default: return work(std::integral_constant<int, 8>());
  }
}

// A leaf's list would hold one symbol only, so there is none. Where one child is a leaf, it is the left one: ranks go by code length.
FSL_INLINE bool is_leaf(const Node& node) { return node.left == 0 && node.planes == 0; }

struct TreeWriter {
  const Node* nodes;
  std::uint8_t* out;
  const Chores& chores;

  template <int kPlanes>
  static void write_bits(const Node& node, const std::uint8_t* list, std::size_t count, std::uint8_t* out) {
    const std::size_t plane_bytes = (count + 7) / 8;
    const __m512i first = all_bytes(node.first);
    const std::size_t whole = count & ~(kStep - 1);
    for (std::size_t i = 0; i < whole; i += kStep) {
      const __m512i places = _mm512_sub_epi8(load(list + i), first);
      for (int plane = 0; plane < kPlanes; ++plane) {
        store_mask(out + static_cast<std::size_t>(plane) * plane_bytes + i / 8, _mm512_test_epi8_mask(places, all_bytes(1 << (kPlanes - 1 - plane))));
      }
    }
    if (whole == count) return;
    // Only the bytes of the rest: a word would reach into the plane behind it, which is written already.
    const __m512i places = _mm512_sub_epi8(load(list + whole), first);
    for (int plane = 0; plane < kPlanes; ++plane) {
      const std::uint64_t mask = _mm512_test_epi8_mask(places, all_bytes(1 << (kPlanes - 1 - plane)));
      std::uint8_t* const to = out + static_cast<std::size_t>(plane) * plane_bytes + whole / 8;
      const std::uint64_t bits = mask & lowest(count - whole);
      std::memcpy(to, &bits, (count - whole + 7) / 8);
    }
  }

  void write_flat(const Node& node, const std::uint8_t* list, std::size_t count) {
    for_planes(node.planes, [&](auto plane_count) { write_bits<plane_count()>(node, list, count, out); });
    out += node.planes * ((count + 7) / 8);
  }

  // Writes the bitmap; the right child's symbols to `right`, the left child's, unless it is a leaf, over the list. Returns the number of
  // the right ones.
  template <bool kLeftIsLeaf>
  std::size_t partition(std::uint8_t* list, std::size_t count, int pivot, std::uint8_t* right) {
    const __m512i pivots = all_bytes(pivot);
    std::uint8_t* bitmap = out;
    std::size_t rights = 0;
    const auto step = [&](__mmask64 goes_right, __m512i symbols) __attribute__((always_inline)) {
      const std::uint64_t bits = goes_right;
      store_mask(bitmap, bits);
      store(right + rights, _mm512_maskz_compress_epi8(goes_right, symbols));
      // Past the end, anything may follow.
      if (!kLeftIsLeaf) store(list - rights, _mm512_maskz_compress_epi8(inverse(goes_right), symbols));
      rights += ones(bits);
    };
    const std::size_t whole = count & ~(kStep - 1);
    in_steps<kStep>(whole, chores, [&](std::size_t) __attribute__((always_inline)) {
      const __m512i symbols = load(list);
      step(_mm512_cmpge_epu8_mask(symbols, pivots), symbols);
      list += kStep;
      bitmap += kStep / 8;
    });
    if (whole < count) {
      const __m512i symbols = load(list);
      step(_mm512_mask_cmpge_epu8_mask(lowest(count - whole), symbols, pivots), symbols);
    }
    return rights;
  }

  // `list` and `stack` lie in two buffers, each free from there on but for the list itself, so that whole vectors may be stored; the
  // right child finds room where `list` was.
  void write(const Node& node, std::uint8_t* list, std::size_t count, std::uint8_t* stack) {
    if (node.left == 0) return write_flat(node, list, count);
    const Node& left = nodes[node.left];
    const bool left_is_leaf = is_leaf(left);
    const std::size_t rights = left_is_leaf ? partition<true>(list, count, node.pivot, stack) : partition<false>(list, count, node.pivot, stack);
    out += (count + 7) / 8;
    if (!left_is_leaf && rights < count) write(left, list, count - rights, stack + rights);
    if (rights > 0) write(nodes[node.right], stack, rights, list);
  }
};

std::size_t write_tree(const Node* nodes, std::uint8_t* symbols, std::size_t count, std::uint8_t* scratch, std::uint8_t* out,
                       const Chores& chores) {
  TreeWriter writer{nodes, out, chores};
  if (count > 0) writer.write(nodes[0], symbols, count, scratch);
  return static_cast<std::size_t>(writer.out - out);
}

}  // namespace
}  // namespace fsl
