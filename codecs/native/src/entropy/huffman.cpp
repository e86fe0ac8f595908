#include "entropy/huffman.hpp"

#include <algorithm>
#include <cstring>

namespace fsl {
namespace {

constexpr int kSymbolBits = 9;
constexpr std::uint32_t kSymbolMask = (1U << kSymbolBits) - 1;
constexpr std::uint32_t kNever = UINT32_MAX;

// Symbols that occur, as count << 9 | symbol: ascending keys are in the wire format's order.
int collect(const std::uint32_t* counts, int size, std::uint32_t* keys) {
  int present = 0;
  for (int symbol = 0; symbol < size; ++symbol) {
    keys[present] = counts[symbol] << kSymbolBits | static_cast<std::uint32_t>(symbol);
    present += counts[symbol] != 0;
  }
  return present;
}

void sort_keys(const std::uint32_t* keys, int size, std::uint32_t* sorted) {
  if (size > 96) {
    std::copy(keys, keys + size, sorted);
    std::sort(sorted, sorted + size);
    return;
  }
  // Each key's place is the number of smaller ones: more comparisons than a sort needs, but no
  // branches to predict.
  for (int i = 0; i < size; ++i) {
    const std::uint32_t key = keys[i];
    int place = 0;
    for (int j = 0; j < size; ++j) place += keys[j] < key;
    sorted[place] = key;
  }
}

// The number of leaves at each depth of the Huffman tree; deeper ones count at the limit. Two
// queues (van Leeuwen 1976), of leaves and of packages; a leaf goes before a package of its weight.
void count_depths(const std::uint32_t* sorted, int leaves, int* leaves_of_depth) {
  std::uint32_t weights[kMaximumLeaves + 1];
  std::uint32_t packages[kMaximumLeaves + 1];
  std::uint16_t parent_of_leaf[kMaximumLeaves];
  std::uint16_t parent_of_package[kMaximumLeaves];
  for (int i = 0; i < leaves; ++i) weights[i] = sorted[i] >> kSymbolBits;
  weights[leaves] = kNever;
  int leaf = 0;
  int package = 0;
  for (int made = 0; made < leaves - 1; ++made) {
    packages[made] = kNever;  // a package cannot contain itself
    std::uint32_t sum = 0;
    for (int part = 0; part < 2; ++part) {
      if (weights[leaf] <= packages[package]) {
        sum += weights[leaf];
        parent_of_leaf[leaf++] = static_cast<std::uint16_t>(made);
      } else {
        sum += packages[package];
        parent_of_package[package++] = static_cast<std::uint16_t>(made);
      }
    }
    packages[made] = sum;
  }
  std::uint16_t depths[kMaximumLeaves];
  depths[leaves - 2] = 0;
  for (int i = leaves - 3; i >= 0; --i)
    depths[i] = static_cast<std::uint16_t>(depths[parent_of_package[i]] + 1);
  for (int depth = 0; depth <= kLengthLimit; ++depth) leaves_of_depth[depth] = 0;
  for (int i = 0; i < leaves; ++i)
    ++leaves_of_depth[std::min(depths[parent_of_leaf[i]] + 1, kLengthLimit)];
}

// Leaves brought up to the limit overfill the code space. As in zlib, a leaf above goes one down
// and takes one of them as its sibling, until they fit.
void make_room(int* leaves_of_depth) {
  int excess = -(1 << kLengthLimit);
  for (int depth = 1; depth <= kLengthLimit; ++depth)
    excess += leaves_of_depth[depth] << (kLengthLimit - depth);
  for (; excess > 0; --excess) {
    int depth = kLengthLimit - 1;
    while (leaves_of_depth[depth] == 0) --depth;
    --leaves_of_depth[depth];
    leaves_of_depth[depth + 1] += 2;
    --leaves_of_depth[kLengthLimit];
  }
}

}  // namespace

void code_lengths(const std::uint32_t* counts, int size, std::uint8_t* lengths) {
  std::uint32_t keys[kMaximumLeaves + 1];
  std::uint32_t sorted[kMaximumLeaves + 1];
  const int present = collect(counts, size, keys);
  sort_keys(keys, present, sorted);
  int leaves_of_depth[kLengthLimit + 1];
  count_depths(sorted, present, leaves_of_depth);
  make_room(leaves_of_depth);
  std::memset(lengths, 0, static_cast<std::size_t>(size));
  const std::uint32_t* next = sorted;
  for (int length = kLengthLimit; length > 0; --length) {
    for (int i = 0; i < leaves_of_depth[length]; ++i)
      lengths[*next++ & kSymbolMask] = static_cast<std::uint8_t>(length);
  }
}

}  // namespace fsl
