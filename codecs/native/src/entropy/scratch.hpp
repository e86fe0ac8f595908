// Working memory of one thread: made on its first call, kept until it ends, so that calls allocate nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "entropy/code_table.hpp"
#include "wire/format.hpp"

namespace fsl {

// Memory that only grows, and forgets its content when it does; starts on a cache line.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { release(); }

  // At least `bytes` and slack; std::bad_alloc when there are none.
  std::uint8_t* at_least(std::size_t bytes) {
    if (bytes + kSlackBytes > size_) {
      release();
      memory_ = static_cast<std::uint8_t*>(::operator new(bytes + kSlackBytes, std::align_val_t{64}));
      size_ = bytes + kSlackBytes;
    }
    return memory_;
  }

 private:
  void release() {
    if (memory_ != nullptr) ::operator delete(memory_, std::align_val_t{64});
    memory_ = nullptr;
    size_ = 0;
  }

  std::uint8_t* memory_ = nullptr;
  std::size_t size_ = 0;
};

// How one plane of a chunk is stored; cost_bits estimates head and data of all inner blocks.
struct PlanePlan {
  std::uint8_t kind;
  int width;
  std::uint64_t cost_bits;
  const CodeTable* table;  // null unless there is a code
  std::size_t head_bytes;
  std::uint8_t head[1 + kMaximumPackedBytes];

  std::uint8_t constant() const { return head[1]; }
};

struct ChunkPlan {
  int split_index;
  std::uint64_t cost_bits;
  PlanePlan planes[kMaximumPlanes];
  CodeTable own[kMaximumPlanes];  // a chunk's own tables, to which `planes` points
};

// Numbers of symbols, in four parts.
struct Counts {
  alignas(64) std::uint32_t tables[4][256];
};

struct Scratch {
  alignas(64) float x[kBlockValues + kSlackBytes];
  alignas(64) float nowhere[kPieceValues + kSlackBytes];  // values that are only looked at
  alignas(64) std::uint8_t symbols[2][kBlockValues + kSlackBytes];
  alignas(64) std::uint8_t numbers[kBlockValues + kSlackBytes];  // of symbols without a code, of a plane that is written
  // Symbols without a code, of each plane that is read: never more than one for each of the block's values, however many a stream asks for.
  alignas(64) std::uint8_t listed[kMaximumPlanes][kBlockValues + kSlackBytes];
  alignas(64) std::uint16_t positions[kBlockValues + kSlackBytes];  // of escapes
  alignas(64) std::uint8_t planes[kMaximumPlanes][kPieceValues + kSlackBytes];  // of a piece that was read: codes, or rotated byte planes
  alignas(64) std::uint8_t scales[kMaximumRuns + kSlackBytes];
  alignas(64) std::int16_t steps[kMaximumRuns + kSlackBytes];
  alignas(64) std::uint8_t differences[kMaximumRuns + kSlackBytes];
  alignas(64) std::uint8_t high_differences[kMaximumRuns + kSlackBytes];
  alignas(64) std::uint8_t ranks[kBlockValues + kSlackBytes];  // of scales, or of symbols without a code
  Counts counts[kMaximumPlanes];
  alignas(64) std::uint32_t plane_counts[kMaximumPlanes][256];
  ChunkPlan plans[2];
  Lanes lanes[kMaximumPlanes];

  Arena chunk_values;   // what is encoded, of a chunk with a residual
  Arena chunk_codes;    // what is encoded, quantised; or a decoded chunk that is to be checked before it is added
  Arena chunk_symbols;  // of a plane that had to be cut out of the codes
  Arena stream;         // one that is being written
  Arena uncoded[kMaximumPlanes];
  Arena chunk_payload;  // a chunk encoded before its place in the frame is known
};

// std::bad_alloc when there is no memory for it.
Scratch& scratch_of_this_thread();

}  // namespace fsl
