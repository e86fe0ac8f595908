// AVX2: tree bitmaps, written. For kernels_avx2.cpp only, which sets the target and includes
// kernels_plain.hpp for it.
//
// A pass for each thing that is written: one loop that writes two lists at a time takes more than twice as long as two loops, because stores that
// go to and fro between cache lines do.
#pragma once

#include "kernels_avx2_base.hpp"
#include "kernels_avx2_planes.hpp"

namespace fsl {
namespace {

constexpr std::size_t kPlaneRoom = 64;  // behind a plane that waits: words are written, vectors read
constexpr int kMostGathered = 3;        // planes of a child that are gathered from its parent's list; more are not worth it

// The bitmap of `symbol >= pivot`; returns the number of ones.
std::size_t write_bitmap(const std::uint8_t* list, std::size_t count, std::uint8_t pivot, std::uint8_t* bitmap, const Chores& chores) {
  const __m256i pivots = all_bytes(pivot);
  const auto goes_right = [=](std::size_t i) __attribute__((always_inline)) {
    const __m256i low = load(list + i);
    const __m256i high = load(list + i + kStep);
    return signs64(_mm256_cmpeq_epi8(_mm256_max_epu8(low, pivots), low), _mm256_cmpeq_epi8(_mm256_max_epu8(high, pivots), high));
  };
  const std::size_t whole = count & ~(kWord - 1);
  std::size_t sum = 0;
  in_steps<kWord>(whole, chores, [&](std::size_t i) __attribute__((always_inline)) {
    const std::uint64_t mask = goes_right(i);
    store_word(bitmap + i / 8, mask);
    sum += ones64(mask);
  });
  if (whole < count) {
    const std::uint64_t mask = goes_right(whole) & lowest64(count - whole);
    store_word(bitmap + whole / 8, mask);
    sum += ones64(mask);
  }
  return sum;
}

// The symbols that have zeros (kSide 0) or ones (1) in the bitmap, to `to`, which may be `list`. Behind them, up to a word is overwritten,
// or, where zeros were picked from places past the end, up to a step.
template <int kSide>
void pick(const std::uint8_t* list, std::size_t count, const std::uint8_t* bitmap, std::uint8_t* to) {
  for (std::size_t i = 0; i < count; i += kWord) {
    std::uint64_t masks = load_word(bitmap + i / 8);
#pragma GCC unroll 8
    for (std::size_t group = 0; group < 8; ++group, masks >>= 8) {
      const std::size_t mask = masks & 0xFF;
      const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(list + i + 8 * group));
      const __m128i picked = _mm_shuffle_epi8(eight, load_half(&kShuffles.places[kSide][mask]));
      if (kSide == 1) {
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to), picked);
        to += ones64(mask);
      } else {
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to + 8 * group), picked);
        to -= ones64(mask);
      }
    }
    if (kSide == 0) to += kWord;
  }
}

// Bit planes of the symbols that have zeros or ones in the bitmap, each `apart` bytes behind the one before.
template <int kPlanes>
void gather(const std::uint8_t* list, std::size_t count, const std::uint8_t* bitmap, int side, std::uint8_t first, std::uint8_t* to,
            std::size_t apart) {
  const __m256i firsts = all_bytes(first);
  const std::uint64_t inverted = side == 1 ? 0 : ~std::uint64_t{0};
  std::uint64_t pending[kPlanes] = {};
  std::size_t filled = 0;  // pending bits, below 8
  const auto step = [&](std::size_t i, std::uint64_t mask) __attribute__((always_inline)) {
    const __m256i low = _mm256_sub_epi8(load(list + i), firsts);
    const __m256i high = _mm256_sub_epi8(load(list + i + kStep), firsts);
    const std::size_t total = filled + ones64(mask);
#pragma GCC unroll 4
    for (int plane = 0; plane < kPlanes; ++plane) {
      const int up = 8 - kPlanes + plane;
      const std::uint64_t bits = _pext_u64(signs64(_mm256_slli_epi16(low, up), _mm256_slli_epi16(high, up)), mask);
      const std::uint64_t word = pending[plane] | bits << filled;
      store_word(to + static_cast<std::size_t>(plane) * apart, word);
      pending[plane] = word >> (total & 56);
      if (__builtin_expect(total >= kWord, 0)) pending[plane] = filled == 0 ? 0 : bits >> (kWord - filled);
    }
    to += total / 8;
    filled = total & 7;
  };
  const std::size_t whole = count & ~(kWord - 1);
  for (std::size_t i = 0; i < whole; i += kWord) step(i, load_word(bitmap + i / 8) ^ inverted);
  if (whole < count) step(whole, (load_word(bitmap + whole / 8) ^ inverted) & lowest64(count - whole));
  for (int plane = 0; plane < kPlanes; ++plane) store_word(to + static_cast<std::size_t>(plane) * apart, pending[plane]);
}

// Gathers children of at most `kGathered` planes: 0 where pext is slow.
template <int kGathered>
struct TreeWriter {
  const Node* nodes;
  std::uint8_t* out;
  const Chores& chores;
  std::uint8_t* planes;  // where planes wait for their turn; those of nodes that wait have different symbols

  template <int kPlanes>
  static void write_bits(const Node& node, const std::uint8_t* list, std::size_t count, std::uint8_t* out) {
    const std::size_t plane_bytes = (count + 7) / 8;
    const __m256i first = all_bytes(node.first);
    const std::size_t whole = count & ~(kWord - 1);
    const auto step = [=](std::size_t i, std::uint64_t valid) __attribute__((always_inline)) {
      const __m256i low = _mm256_sub_epi8(load(list + i), first);
      const __m256i high = _mm256_sub_epi8(load(list + i + kStep), first);
      for (int plane = 0; plane < kPlanes; ++plane) {
        const int up = 8 - kPlanes + plane;
        store_word(out + static_cast<std::size_t>(plane) * plane_bytes + i / 8,
                   signs64(_mm256_slli_epi16(low, up), _mm256_slli_epi16(high, up)) & valid);
      }
    };
    // The last first: its words reach into the planes behind, which are written after it.
    if (whole < count) step(whole, lowest64(count - whole));
    for (std::size_t i = 0; i < whole; i += kWord) step(i, ~std::uint64_t{0});
  }

  void write_flat(const Node& node, const std::uint8_t* list, std::size_t count) {
    for_planes(node.planes, [&](auto plane_count) { write_bits<plane_count()>(node, list, count, out); });
    out += node.planes * ((count + 7) / 8);
  }

  static bool is_gathered(const Node& node) { return node.left == 0 && node.planes <= kGathered; }

  // The planes of a child, to `planes`.
  void gather_child(const Node& child, const std::uint8_t* list, std::size_t count, const std::uint8_t* bitmap, int side,
                    std::size_t apart) {
    if (kGathered == 0) return;
    if (child.planes == 1) gather<1>(list, count, bitmap, side, child.first, planes, apart);
    if (child.planes == 2) gather<2>(list, count, bitmap, side, child.first, planes, apart);
    if (child.planes == 3) gather<3>(list, count, bitmap, side, child.first, planes, apart);
  }

  void write_planes(int count_of_planes, std::size_t apart, std::size_t count) {
    const std::size_t bytes = (count + 7) / 8;
    const std::uint8_t* from = planes;
    for (int plane = 0; plane < count_of_planes; ++plane, from += apart, out += bytes) {
      for (std::size_t i = 0; i < bytes; i += kStep) store(out + i, load(from + i));
    }
  }

  // `list` and `stack` lie in two buffers, each free from there on but for the list itself, so that whole vectors may be stored; the
  // right child finds room where `list` was.
  void write(const Node& node, std::uint8_t* list, std::size_t count, std::uint8_t* stack) {
    if (node.left == 0) return write_flat(node, list, count);
    const Node& left = nodes[node.left];
    const Node& right = nodes[node.right];
    const std::uint8_t* const bitmap = out;
    const std::size_t right_count = write_bitmap(list, count, static_cast<std::uint8_t>(node.pivot), out, chores);
    const std::size_t left_count = count - right_count;
    out += (count + 7) / 8;

    // The right child first: the left child's list takes the place of both.
    std::uint8_t* const waiting = planes;
    const std::size_t right_apart = right_count / 8 + kPlaneRoom;
    if (right_count > 0 && is_gathered(right)) {
      gather_child(right, list, count, bitmap, 1, right_apart);
    } else if (right_count > 0) {
      pick<1>(list, count, bitmap, stack);
    }
    if (left_count > 0 && is_gathered(left)) {
      planes += is_gathered(right) ? right.planes * right_apart : 0;
      const std::size_t left_apart = left_count / 8 + kPlaneRoom;
      gather_child(left, list, count, bitmap, 0, left_apart);
      write_planes(left.planes, left_apart, left_count);
    } else if (left_count > 0) {
      planes += is_gathered(right) ? right.planes * right_apart : 0;
      pick<0>(list, count, bitmap, list);
      write(left, list, left_count, is_gathered(right) ? stack : stack + right_count);
    }
    planes = waiting;
    if (right_count > 0 && is_gathered(right)) {
      write_planes(right.planes, right_apart, right_count);
    } else if (right_count > 0) {
      write(right, stack, right_count, list);
    }
  }
};

template <int kGathered>
std::size_t write_tree(const Node* nodes, std::uint8_t* symbols, std::size_t count, std::uint8_t* scratch, std::uint8_t* out,
                       const Chores& chores) {
  // Planes that wait take a bit for each symbol of their node, three times at most; all of them have different symbols. At most twelve nodes,
  // all on one path, have some, of at most two children.
  std::uint8_t planes[kMostGathered * (kBlockValues / 8 + 14 * kPlaneRoom)];
  TreeWriter<kGathered> writer{nodes, out, chores, planes};
  if (count > 0) writer.write(nodes[0], symbols, count, scratch);
  return static_cast<std::size_t>(writer.out - out);
}

}  // namespace
}  // namespace fsl
