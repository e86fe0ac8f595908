// AVX-512: tree bitmaps, read. For kernels_avx512.cpp only, which sets the target.
#pragma once

#include "kernels_avx512_base.hpp"
#include "kernels_avx512_planes.hpp"
#include "kernels_avx512_tree_write.hpp"

namespace fsl {
namespace {

// ---------------------------------------------------------------------------------------------------------- tree: reading

FSL_INLINE std::uint64_t load_mask(const std::uint8_t* from) {
  std::uint64_t mask;
  std::memcpy(&mask, from, 8);
  return mask;
}

// The last bits of a bitmap, count < 64, none of the bytes behind it touched.
FSL_INLINE std::uint64_t load_rest(const std::uint8_t* from, std::size_t count) {
  std::uint64_t mask = 0;
  std::memcpy(&mask, from, (count + 7) / 8);
  return mask & lowest(count);
}

struct Child {
  const std::uint8_t* list;
  const std::uint8_t* planes;
  std::size_t plane_bytes;
  std::uint8_t first;
};

struct Merge {
  const std::uint8_t* bitmap;
  std::size_t count;
  std::uint8_t* list;
  Child child[2];
};

// `count` bits from bit `at` on, and what follows them.
FSL_INLINE std::uint64_t bits_from(const std::uint8_t* plane, std::size_t at, std::size_t count) {
  const std::size_t skipped = at & 7;
  std::uint64_t bits = load_mask(plane + at / 8) >> skipped;
  if (__builtin_expect(skipped + count > 64, 0)) bits |= static_cast<std::uint64_t>(plane[at / 8 + 8]) << (64 - skipped);
  return bits;
}

// Writes the symbols of a node from those of its children.
template <int kLeft, int kRight>
struct MergeAs {
  // What the child's symbols are where the mask has ones, without its planes; zero elsewhere.
  template <int kKind>
  static FSL_INLINE __m512i base(const std::uint8_t* list, __m512i first, std::uint64_t mask) {
    return kKind == kList ? _mm512_maskz_expand_epi8(mask, load_first(list)) : _mm512_maskz_mov_epi8(mask, first);
  }

  template <int kKind>
  static FSL_INLINE __m512i with_planes(__m512i symbols, const Child& child, std::size_t at, std::uint64_t mask, std::size_t count) {
    if (kKind == kOnePlane || kKind == kTwoPlanes) {
      const std::uint64_t bits = bits_from(child.planes, at, count);
      symbols = _mm512_mask_add_epi8(symbols, through_memory(_pdep_u64(bits, mask)), symbols, all_bytes(kKind));
    }
    if (kKind == kTwoPlanes) {
      const std::uint64_t bits = bits_from(child.planes + child.plane_bytes, at, count);
      symbols = _mm512_mask_add_epi8(symbols, through_memory(_pdep_u64(bits, mask)), symbols, all_bytes(1));
    }
    return symbols;
  }

  // Not inlined: sixteen such loops in one function leave none of them enough registers.
  static __attribute__((noinline)) void run(const Merge& work, Prefetch& prefetch) {
    const Child left = work.child[0];
    const Child right = work.child[1];
    const __m512i left_first = all_bytes(left.first);
    const __m512i right_first = all_bytes(right.first);
    const std::uint8_t* const bitmap = work.bitmap;
    const std::size_t whole = work.count & ~(kStep - 1);
    std::size_t left_at = 0;
    std::size_t right_at = 0;
    const auto step = [&](std::size_t i, std::uint64_t goes_right, __mmask64 right_mask, std::size_t here) __attribute__((always_inline)) {
      // The last step's left mask has too many bits: what they bring is never looked at.
      const std::size_t ones_here = ones(goes_right);
      __m512i symbols;
      if (kLeft != kList && kRight != kList) {
        symbols = _mm512_mask_blend_epi8(right_mask, left_first, right_first);
      } else {
        symbols = _mm512_or_si512(base<kLeft>(kLeft == kList ? left.list + left_at : nullptr, left_first, inverse(right_mask)),
                                  base<kRight>(kRight == kList ? right.list + right_at : nullptr, right_first, right_mask));
      }
      symbols = with_planes<kLeft>(symbols, left, left_at, ~goes_right, here - ones_here);
      symbols = with_planes<kRight>(symbols, right, right_at, goes_right, ones_here);
      left_at += kStep - ones_here;
      right_at += ones_here;
      store(work.list + i, symbols);
    };
    const char* next = prefetch.next;
    const char* const end = prefetch.end;
    for (std::size_t i = 0; i < whole; i += kStep) {
      step(i, load_mask(bitmap + i / 8), mask_at(bitmap + i / 8), kStep);
      fetch(next, end);
      fetch(next, end);
    }
    prefetch.next = next;
    if (whole < work.count) {
      const std::uint64_t rest = load_rest(bitmap + whole / 8, work.count - whole);
      step(whole, rest, rest, work.count - whole);
    }
  }
};

struct TreeReader {
  const Node* nodes;
  const std::uint8_t* in;
  const std::uint8_t* end;
  Prefetch prefetch;
  std::uint8_t copies[2][kBlockValues / 4 + kSlackBytes];

  // Bits set among the first `count`.
  static FSL_INLINE std::size_t count_ones(const std::uint8_t* bitmap, std::size_t count) {
    __m512i sums = _mm512_setzero_si512();
    std::size_t i = 0;
    for (; i + 512 <= count; i += 512) sums = _mm512_add_epi64(sums, _mm512_popcnt_epi64(load(bitmap + i / 8)));
    if (i < count) {
      const std::size_t rest = (count - i + 7) / 8;
      __m512i last = _mm512_maskz_loadu_epi8(~std::uint64_t{0} >> (kStep - rest), bitmap + i / 8);
      const std::size_t spare = rest * 8 - (count - i);
      const __m512i cut = _mm512_maskz_set1_epi8(std::uint64_t{1} << (rest - 1), static_cast<char>(0xFF00 >> spare & 0xFF));
      last = spare == 0 ? last : _mm512_andnot_si512(cut, last);
      sums = _mm512_add_epi64(sums, _mm512_popcnt_epi64(last));
    }
    return static_cast<std::size_t>(_mm512_reduce_add_epi64(sums));
  }

  // Adds the planes' bits to `symbols`; `load_bits` reads the 64 (or fewer) of a plane.
  template <int kPlanes, typename LoadBits>
  static FSL_INLINE __m512i planes_added(__m512i symbols, LoadBits load_bits) {
    for (int plane = 0; plane < kPlanes; ++plane) {
      symbols = _mm512_mask_add_epi8(symbols, load_bits(plane), symbols, all_bytes(1 << (kPlanes - 1 - plane)));
    }
    return symbols;
  }

  template <int kPlanes>
  static void read_planes(const std::uint8_t* planes, std::size_t plane_bytes, std::size_t count, __m512i first, std::uint8_t* list) {
    const std::size_t whole = count & ~(kStep - 1);
    for (std::size_t i = 0; i < whole; i += kStep) {
      store(list + i, planes_added<kPlanes>(first, [=](int plane) {
              return mask_at(planes + static_cast<std::size_t>(plane) * plane_bytes + i / 8);
            }));
    }
    if (whole < count) {
      store(list + whole, planes_added<kPlanes>(first, [=](int plane) {
              return load_rest(planes + static_cast<std::size_t>(plane) * plane_bytes + whole / 8, count - whole);
            }));
    }
  }

  bool read_flat(const Node& node, std::size_t count, std::uint8_t* list) {
    const std::size_t plane_bytes = (count + 7) / 8;
    const std::uint8_t* const planes = in;
    if (static_cast<std::size_t>(end - in) < node.planes * plane_bytes) return false;
    in += node.planes * plane_bytes;
    const __m512i first = all_bytes(node.first);
    for_planes(node.planes, [&](auto plane_count) { read_planes<plane_count()>(planes, plane_bytes, count, first, list); });
    return true;
  }

  // Bytes of planes may be read in words only while the end is not near; else they are read from a copy with room behind.
  const std::uint8_t* roomy(const std::uint8_t* from, std::size_t bytes, std::uint8_t* copy) const {
    if (static_cast<std::size_t>(end - from) >= bytes + 16) return from;
    std::memcpy(copy, from, bytes);
    return copy;
  }

  // Writes the node's symbols to `list`; children write theirs to the same places of `other`. False when bytes are missing.
  bool read(const Node& node, std::size_t count, std::uint8_t* list, std::uint8_t* other) {
    if (node.left == 0) return read_flat(node, count, list);
    const std::size_t bitmap_bytes = (count + 7) / 8;
    if (static_cast<std::size_t>(end - in) < bitmap_bytes) return false;
    const Node* const children[2] = {&nodes[node.left], &nodes[node.right]};
    const ChildKind kinds[2] = {kind_of(*children[0]), kind_of(*children[1])};
    Merge work{in, count, list, {}};
    in += bitmap_bytes;
    std::size_t counts[2] = {0, 0};
    if (kinds[0] != kLeaf || kinds[1] != kLeaf) {
      counts[1] = count_ones(work.bitmap, count);
      counts[0] = count - counts[1];
    }
    std::uint8_t* place = other;
    std::uint8_t* place_of_children = list;
    for (int side = 0; side < 2; ++side) {
      Child& child = work.child[side];
      child.first = children[side]->first;
      if (kinds[side] == kList) {
        child.list = place;
        if (counts[side] > 0 && !read(*children[side], counts[side], place, place_of_children)) return false;
        place += counts[side];
        place_of_children += counts[side];
      } else {
        child.plane_bytes = (counts[side] + 7) / 8;
        const std::size_t bytes = static_cast<std::size_t>(kinds[side]) * child.plane_bytes;
        if (static_cast<std::size_t>(end - in) < bytes) return false;
        child.planes = in;
        in += bytes;
      }
    }
    for (int side = 0; side < 2; ++side) {
      if (kinds[side] == kList) continue;
      Child& child = work.child[side];
      child.planes = roomy(child.planes, static_cast<std::size_t>(kinds[side]) * child.plane_bytes, copies[side]);
    }
    for_kinds<MergeAs>(kinds[0], kinds[1], work, prefetch);
    return true;
  }
};

std::size_t read_tree(const Node* nodes, const std::uint8_t* in, const std::uint8_t* end, std::size_t count, std::uint8_t* scratch,
                      std::uint8_t* symbols, Prefetch& prefetch) {
  TreeReader reader;
  reader.nodes = nodes;
  reader.in = in;
  reader.end = end;
  reader.prefetch = prefetch;
  if (count > 0 && !reader.read(nodes[0], count, symbols, scratch)) return SIZE_MAX;
  prefetch = reader.prefetch;
  return static_cast<std::size_t>(reader.in - in);
}

}  // namespace
}  // namespace fsl
