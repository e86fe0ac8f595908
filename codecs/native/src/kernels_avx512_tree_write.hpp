// AVX-512: tree bitmaps, written. For kernels_avx512.cpp only, which sets the target.
#pragma once

#include "kernels_avx512_base.hpp"
#include "kernels_avx512_planes.hpp"

namespace fsl {
namespace {

// --------------------------------------------------------------------------------------------------------------- tree

// How a node's child is handled together with the node. Lists are written and read by passes of their own; bit planes that short need
// none: bits of the symbols of one child are gathered from, or scattered to, the places that the node's bitmap gives (pext, pdep).
enum ChildKind : int { kLeaf = 0, kOnePlane = 1, kTwoPlanes = 2, kList = 3 };

FSL_INLINE ChildKind kind_of(const Node& node) {
  return node.left == 0 && node.planes <= 2 ? static_cast<ChildKind>(node.planes) : kList;
}

// Calls Function<left, right>::run(arguments...) for the kinds of both children.
template <template <int, int> class Function, typename... Arguments>
FSL_INLINE auto for_kinds(ChildKind left, ChildKind right, Arguments&&... arguments) {
  switch (4 * left + right) {
    case 0: return Function<0, 0>::run(arguments...);
    case 1: return Function<0, 1>::run(arguments...);
    case 2: return Function<0, 2>::run(arguments...);
    case 3: return Function<0, 3>::run(arguments...);
    case 4: return Function<1, 0>::run(arguments...);
    case 5: return Function<1, 1>::run(arguments...);
    case 6: return Function<1, 2>::run(arguments...);
    case 7: return Function<1, 3>::run(arguments...);
    case 8: return Function<2, 0>::run(arguments...);
    case 9: return Function<2, 1>::run(arguments...);
    case 10: return Function<2, 2>::run(arguments...);
    case 11: return Function<2, 3>::run(arguments...);
    case 12: return Function<3, 0>::run(arguments...);
    case 13: return Function<3, 1>::run(arguments...);
    case 14: return Function<3, 2>::run(arguments...);
    default: return Function<3, 3>::run(arguments...);
  }
}

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

// ---------------------------------------------------------------------------------------------------------- tree: writing

// Bits of one or two planes of a child, the second `apart` bytes behind the first, appended some at a time, at most 64.
template <int kPlanes>
struct BitWriter {
  std::uint8_t* to;
  std::size_t apart;
  std::uint64_t pending_first = 0;
  std::uint64_t pending_second = 0;
  std::size_t filled = 0;  // pending bits, below 8

  FSL_INLINE explicit BitWriter(std::uint8_t* planes, std::size_t distance) : to(planes), apart(distance) {}

  FSL_INLINE void append(std::uint64_t first, std::uint64_t second, std::size_t count) {
    const std::size_t total = filled + count;
    std::uint64_t word = pending_first | first << filled;
    store_mask(to, word);
    pending_first = word >> (total & 56);
    if (kPlanes == 2) {
      word = pending_second | second << filled;
      store_mask(to + apart, word);
      pending_second = word >> (total & 56);
    }
    if (__builtin_expect(total >= 64, 0)) {
      pending_first = filled == 0 ? 0 : first >> (64 - filled);
      if (kPlanes == 2) pending_second = filled == 0 ? 0 : second >> (64 - filled);
    }
    to += total / 8;
    filled = total & 7;
  }

  FSL_INLINE void finish() {
    if (kPlanes >= 1) store_mask(to, pending_first);
    if (kPlanes == 2) store_mask(to + apart, pending_second);
  }
};

constexpr std::size_t kPlaneRoom = 2 * kStep;  // behind a plane: words are written, vectors read

struct Partition {
  std::uint8_t* list;  // of the node's symbols; the left child's take their place
  std::size_t count;
  std::uint8_t* stack;  // for the right child's list
  std::uint8_t* bitmap;
  std::uint8_t* left_planes;
  std::uint8_t* right_planes;
  std::size_t apart;  // from the first plane to the second
  std::uint8_t pivot;
  std::uint8_t left_first;
  std::uint8_t right_first;
};

// Writes the bitmap, the planes, and the lists; returns the number of the right child's symbols.
template <int kLeft, int kRight>
struct PartitionAs {
  template <int kKind>
  static FSL_INLINE void append(BitWriter<kKind>& writer, __m512i symbols, __m512i first, std::uint64_t mask, std::size_t count) {
    if (kKind == 0) return;
    const __m512i places = _mm512_sub_epi8(symbols, first);
    const std::uint64_t top = _pext_u64(_mm512_test_epi8_mask(places, all_bytes(kKind)), mask);
    writer.append(top, kKind == 2 ? _pext_u64(_mm512_test_epi8_mask(places, all_bytes(1)), mask) : 0, count);
  }

  static std::size_t run(const Partition& work, Prefetch& prefetch) {
    constexpr int kLeftPlanes = kLeft == kList ? 0 : kLeft;
    constexpr int kRightPlanes = kRight == kList ? 0 : kRight;
    BitWriter<kLeftPlanes> left_writer(work.left_planes, work.apart);
    BitWriter<kRightPlanes> right_writer(work.right_planes, work.apart);
    const __m512i pivots = all_bytes(work.pivot);
    const __m512i left_first = all_bytes(work.left_first);
    const __m512i right_first = all_bytes(work.right_first);
    const std::size_t whole = work.count & ~(kStep - 1);
    const std::uint8_t* const list = work.list;
    std::uint8_t* const bitmap = work.bitmap;
    std::uint8_t* left = work.list;
    std::uint8_t* right = work.stack;
    std::size_t right_count = 0;
    const auto step = [&](std::size_t i, std::uint64_t valid, std::size_t here) __attribute__((always_inline)) {
      const __m512i symbols = load(list + i);
      __mmask64 right_mask = _mm512_cmpge_epu8_mask(symbols, pivots);
      if (here < kStep) right_mask &= valid;
      const std::uint64_t goes_right = right_mask;
      store_mask(bitmap + i / 8, goes_right);
      const std::size_t ones_here = ones(goes_right);
      if (kRight == kList) {
        store(right, _mm512_maskz_compress_epi8(right_mask, symbols));
        right += ones_here;
      }
      if (kLeft == kList) {
        const __mmask64 left_mask = here < kStep ? ~goes_right & valid : inverse(right_mask);
        store(left, _mm512_maskz_compress_epi8(left_mask, symbols));
        left += here - ones_here;
      }
      append(left_writer, symbols, left_first, ~goes_right & valid, here - ones_here);
      append(right_writer, symbols, right_first, goes_right, ones_here);
      right_count += ones_here;
    };
    const char* next = prefetch.next;
    const char* const end = prefetch.end;
    for (std::size_t i = 0; i < whole; i += kStep) {
      step(i, ~std::uint64_t{0}, kStep);
      fetch(next, end);
    }
    prefetch.next = next;
    if (whole < work.count) step(whole, lowest(work.count - whole), work.count - whole);
    left_writer.finish();
    right_writer.finish();
    return right_count;
  }
};

struct TreeWriter {
  const Node* nodes;
  std::uint8_t* out;
  Prefetch prefetch;
  std::uint8_t* planes;  // where planes wait for their turn; those of nodes that wait have different symbols

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

  void write_planes(const std::uint8_t* from, std::size_t apart, ChildKind kind, std::size_t count) {
    const std::size_t bytes = (count + 7) / 8;
    for (int plane = 0; plane < kind; ++plane, from += apart, out += bytes) {
      for (std::size_t i = 0; i < bytes; i += kStep) store(out + i, load(from + i));
    }
  }

  // `list` and `stack` lie in two buffers, each free from there on but for the list itself, so that whole vectors may be stored; the
  // right child finds room where `list` was.
  void write(const Node& node, std::uint8_t* list, std::size_t count, std::uint8_t* stack) {
    if (node.left == 0) return write_flat(node, list, count);
    const Node& left = nodes[node.left];
    const Node& right = nodes[node.right];
    const ChildKind left_kind = kind_of(left);
    const ChildKind right_kind = kind_of(right);
    std::uint8_t* const before = planes;
    const std::size_t apart = count / 8 + kPlaneRoom;
    const std::size_t left_room = left_kind == kList ? 0 : static_cast<std::size_t>(left_kind) * apart;
    const Partition work{list, count, stack, out, planes, planes + left_room, apart, static_cast<std::uint8_t>(node.pivot), left.first, right.first};
    const std::size_t right_count = for_kinds<PartitionAs>(left_kind, right_kind, work, prefetch);
    out += (count + 7) / 8;
    if (left_kind != kList) {
      write_planes(work.left_planes, apart, left_kind, count - right_count);
    } else if (right_count < count) {
      if (right_kind == kTwoPlanes) planes += apart;
      if (right_kind == kOnePlane || right_kind == kTwoPlanes) planes += right_count / 8 + kPlaneRoom;
      write(left, list, count - right_count, right_kind == kList ? stack + right_count : stack);
    }
    planes = before;
    if (right_kind != kList) {
      write_planes(work.right_planes, apart, right_kind, right_count);
    } else if (right_count > 0) {
      write(right, stack, right_count, list);
    }
  }
};

std::size_t write_tree(const Node* nodes, std::uint8_t* symbols, std::size_t count, std::uint8_t* scratch, std::uint8_t* out,
                       Prefetch& prefetch) {
  // Planes that wait take a bit for each symbol of their node, at most twice, and at most twelve nodes, all on one path, wait.
  std::uint8_t planes[26 * (kBlockValues / 8 + kPlaneRoom)];
  TreeWriter writer{nodes, out, prefetch, planes};
  if (count > 0) writer.write(nodes[0], symbols, count, scratch);
  prefetch = writer.prefetch;
  return static_cast<std::size_t>(writer.out - out);
}

}  // namespace
}  // namespace fsl
