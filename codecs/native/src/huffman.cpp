#include "huffman.hpp"

#include <algorithm>
#include <cstring>

namespace fsl {
namespace {

constexpr int kMaximumItems = 2 * kMaximumLeaves;
constexpr int kSymbolBits = 9;
constexpr std::uint32_t kNever = UINT32_MAX;

// A symbol that occurs, as count << 9 | symbol: the order of the keys is that of the wire format.
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
  // Each key's place is the number of smaller ones: more comparisons than a sort needs, but none that a branch predictor must guess.
  for (int i = 0; i < size; ++i) {
    const std::uint32_t key = keys[i];
    int place = 0;
    for (int j = 0; j < size; ++j) place += keys[j] < key;
    sorted[place] = key;
  }
}

// Which items of a list are leaves, one bit each.
struct Marks {
  std::uint64_t words[(kMaximumItems + 63) / 64];

  int leaves_before(int item) const {
    int leaves = 0;
    int word = 0;
    for (; item >= 64; item -= 64) leaves += ones(words[word++]);
    return item == 0 ? leaves : leaves + ones(words[word] & ((std::uint64_t{1} << item) - 1));
  }

  static int ones(std::uint64_t value) {
#if defined(__GNUC__)
    return __builtin_popcountll(value);
#else
    int count = 0;
    for (; value != 0; value &= value - 1) ++count;
    return count;
#endif
  }
};

// The list of the next level: leaves and pairs of `items`, by weight, a leaf first among equals. Returns its size.
//
// Merged from both ends at once: each step waits for the comparison before it, and two such chains take no longer than one.
int merge(const std::uint32_t* leaves, int leaf_count, const std::uint32_t* items, int item_count, std::uint32_t* merged, Marks& marks) {
  // Both lists end with kNever, and begin after a 0 that is never taken: every weight is at least 1.
  std::uint32_t storage[kMaximumLeaves + 2];
  std::uint32_t* const packages = storage + 1;
  const int package_count = item_count / 2;
  packages[-1] = 0;
  for (int k = 0; k < package_count; ++k) packages[k] = items[2 * k] + items[2 * k + 1];
  packages[package_count] = kNever;
  const int total = leaf_count + package_count;
  const int half = total / 2;
  std::uint8_t is_leaf[kMaximumItems + 8];
  const std::uint32_t* leaf = leaves;
  const std::uint32_t* package = packages;
  const std::uint32_t* last_leaf = leaves + leaf_count - 1;
  const std::uint32_t* last_package = packages + package_count - 1;
  for (int front = 0, back = total - 1; front < half; ++front, --back) {
    const std::uint32_t of_leaf = *leaf;
    const std::uint32_t of_package = *package;
    const bool takes_leaf = of_leaf <= of_package;
    merged[front] = takes_leaf ? of_leaf : of_package;
    is_leaf[front] = takes_leaf;
    leaf += takes_leaf;
    package += !takes_leaf;

    const std::uint32_t of_last_leaf = *last_leaf;
    const std::uint32_t of_last_package = *last_package;
    const bool takes_last_leaf = of_last_leaf > of_last_package;
    merged[back] = takes_last_leaf ? of_last_leaf : of_last_package;
    is_leaf[back] = takes_last_leaf;
    last_leaf -= takes_last_leaf;
    last_package -= !takes_last_leaf;
  }
  if (total % 2 != 0) {
    const bool takes_leaf = *leaf <= *package;
    merged[half] = takes_leaf ? *leaf : *package;
    is_leaf[half] = takes_leaf;
  }
  for (int k = total; k % 8 != 0; ++k) is_leaf[k] = 0;
  for (std::uint64_t& word : marks.words) word = 0;
  for (int k = 0; k < total; k += 8) {
    std::uint64_t eight;
    std::memcpy(&eight, is_leaf + k, 8);
    // Gathers the lowest bit of each byte.
    marks.words[k / 64] |= (eight * 0x0102040810204080U >> 56) << (k % 64);
  }
  return total;
}

}  // namespace

void code_lengths(const std::uint32_t* counts, int size, std::uint8_t* lengths) {
  std::uint32_t keys[kMaximumLeaves + 1];
  std::uint32_t sorted[kMaximumLeaves + 1];
  const int present = collect(counts, size, keys);
  sort_keys(keys, present, sorted);
  std::uint32_t padded_leaves[kMaximumLeaves + 2];
  std::uint32_t* const leaves = padded_leaves + 1;
  leaves[-1] = 0;
  for (int i = 0; i < present; ++i) leaves[i] = sorted[i] >> kSymbolBits;
  leaves[present] = kNever;

  // The first list is the leaves alone; every level after it keeps only which of its items are leaves.
  Marks marks[kLengthLimit];
  std::uint32_t lists[2][kMaximumItems];
  std::copy(leaves, leaves + present, lists[0]);
  int list_size = present;
  int levels = 1;
  for (; levels < kLengthLimit; ++levels) {
    const std::uint32_t* before = lists[(levels - 1) & 1];
    std::uint32_t* merged = lists[levels & 1];
    const int merged_size = merge(leaves, present, before, list_size, merged, marks[levels]);
    const bool is_same = merged_size == list_size && std::memcmp(merged, before, sizeof(*merged) * static_cast<std::size_t>(list_size)) == 0;
    list_size = merged_size;
    if (is_same) break;
  }

  // With a list that repeats the one before, so do all later ones: their marks are those of level `levels`.
  const int last = std::min(levels, kLengthLimit - 1);
  int bought_of_rank[kLengthLimit];
  int bought = 2 * present - 2;
  for (int level = kLengthLimit - 1; level >= 0; --level) {
    const int taken = level == 0 ? std::min(bought, present) : marks[std::min(level, last)].leaves_before(bought);
    bought_of_rank[level] = taken;
    bought = 2 * (bought - taken);
  }
  std::memset(lengths, 0, static_cast<std::size_t>(size));
  for (int level = 0; level < kLengthLimit; ++level) {
    for (int i = 0; i < bought_of_rank[level]; ++i) ++lengths[sorted[i] & ((1U << kSymbolBits) - 1)];
  }
}

}  // namespace fsl
