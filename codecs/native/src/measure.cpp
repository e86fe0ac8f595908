#include "measure.hpp"

#include <algorithm>
#include <cstring>

#include "decode_chunk.hpp"
#include "encode_block.hpp"
#include "frame.hpp"
#include "plan.hpp"

#if defined(__SSE2__) || defined(_M_X64)
#include <emmintrin.h>
#define FSL_STREAM_STORES 1
#else
#define FSL_STREAM_STORES 0
#endif

namespace fsl {
namespace {

constexpr std::size_t kStageBlockValues = 128;
constexpr std::size_t kScaleBytes = 3;  // of an inner block, at most

const ChunkPlan& plan_stage(const Format& format, const std::uint8_t* codes, std::size_t count, bool everything, Scratch& scratch) {
  clear_counts(scratch.counts[0]);
  const bool takes_all = everything || count <= kBlockValues;
  const std::size_t run = takes_all ? kBlockValues : sampled_run(kStageBlockValues);
  const std::size_t stride = takes_all ? kBlockValues : kSampledEvery * run;
  std::size_t sampled = 0;
  for (std::size_t offset = 0; offset < count; offset += stride) {
    const std::size_t size = std::min(run, count - offset);
    count_symbols(codes + offset, size, scratch.counts[0]);
    sampled += size;
  }
  return plan_chunk({format, {}, count, sampled}, scratch);
}

std::uint8_t* write_smallest_scales(const Format& format, std::uint8_t* position) {
  if (format.is_uniform()) {
    store(position, static_cast<std::uint16_t>(kLowestStep + kStepOffset));
    position += 2;
  } else {
    *position++ = static_cast<std::uint8_t>(format.float8->lowest_scale);
  }
  *position++ = 0;  // width of the differences
  return position;
}

// SIZE_MAX when a plane is not constant as planned.
std::size_t write_stage(BlockEncoder& block, const Format& format, const Kernels& kernels, const ChunkPlan& plan,
                        const std::uint8_t* codes, std::size_t count, std::uint8_t* out) {
  const int planes = format.split[plan.split_index].planes;
  std::uint8_t* position = out;
  *position++ = static_cast<std::uint8_t>(plan.split_index);
  for (int p = 0; p < planes; ++p) {
    std::memcpy(position, plan.planes[p].head, plan.planes[p].head_bytes);
    position += plan.planes[p].head_bytes;
  }
  for (std::size_t offset = 0; offset < count; offset += kBlockValues) {
    const std::size_t size = std::min(kBlockValues, count - offset);
    block.take(codes + offset, size);
    position = write_smallest_scales(format, position);
    for (int p = 0; p < planes; ++p) {
      const std::size_t written = block.write_plane(plan, p, position, {});
      if (written == SIZE_MAX) return SIZE_MAX;
      position += written;
    }
    if (format.is_uniform()) {
      const auto escapes = kernels.count_byte(codes + offset, size, 0);
      std::memset(position, 0, 4 * escapes);
      position += 4 * escapes;
    }
  }
  return static_cast<std::size_t>(position - out);
}

}  // namespace

std::uint64_t limit_read(const std::uint8_t* memory, std::size_t bytes) {
  std::uint64_t sums[8] = {};
  for (std::size_t i = 0; i + 64 <= bytes; i += 64) {
    std::uint64_t words[8];
    std::memcpy(words, memory + i, 64);
    for (int lane = 0; lane < 8; ++lane) sums[lane] += words[lane];
  }
  std::uint64_t sum = 0;
  for (const std::uint64_t lane : sums) sum += lane;
  return sum;
}

void limit_add(float* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) values[i] += 1.0F;
}

bool limit_stream_store(std::uint8_t* memory, std::size_t bytes) {
#if FSL_STREAM_STORES
  const std::size_t skipped = static_cast<std::size_t>(-reinterpret_cast<std::uintptr_t>(memory)) & 63;
  const __m128i content = _mm_set1_epi8(1);
  for (std::size_t i = skipped; i + 64 <= bytes; i += 64) {
    auto* const line = reinterpret_cast<__m128i*>(memory + i);
    for (int part = 0; part < 4; ++part) _mm_stream_si128(line + part, content);
  }
  _mm_sfence();
  return true;
#else
  (void)memory;
  (void)bytes;
  return false;
#endif
}

void short_loop(std::uint64_t turns) {
  for (std::uint64_t turn = 0; turn < turns; ++turn) {
#if defined(__GNUC__)
    __asm__ volatile("" : "+r"(turn));  // or the compiler leaves nothing of the loop
#else
    *const_cast<volatile std::uint64_t*>(&turn) = turn;
#endif
  }
}

std::size_t stage_bound(std::size_t count) {
  // No symbol takes more than 12 bits and its byte in a list; uniform has 4 bytes for each escape.
  const std::size_t blocks = blocks_of(count, kBlockValues);
  return 8 * count + blocks * (kScaleBytes + kWorkingBytes) + 2 * kMaximumPackedBytes;
}

std::size_t stage_encode(const Kernels& kernels, const Format& format, const std::uint8_t* codes, std::size_t count, std::uint8_t* out) {
  Scratch& scratch = scratch_of_this_thread();
  const EncodeSettings settings = {&format, kStageBlockValues, kMaximumChunkValues, true, 0, 1};
  BlockEncoder block(kernels, settings, scratch);
  const std::size_t bytes = write_stage(block, format, kernels, plan_stage(format, codes, count, false, scratch), codes, count, out);
  if (bytes != SIZE_MAX) return bytes;
  return write_stage(block, format, kernels, plan_stage(format, codes, count, true, scratch), codes, count, out);
}

bool stage_decode(const Kernels& kernels, const Format& format, const std::uint8_t* payload, std::size_t payload_bytes,
                  std::uint8_t* codes, std::size_t count) {
  Header header;
  header.format = &format;
  header.block_values = kStageBlockValues;
  header.chunk_values = kMaximumChunkValues;
  header.values = count;
  Chunk chunk;
  chunk.count = count;
  chunk.mode = kCoded;
  chunk.payload = payload;
  chunk.payload_bytes = payload_bytes;
  const SharedBooks none;
  ChunkDecoder decoder(kernels, header, none, chunk, scratch_of_this_thread());
  if (!decoder.open().ok()) return false;
  Block block = decoder.scratch_block(0);
  for (std::size_t offset = 0; offset < count; offset += kBlockValues) {
    block.codes = codes + offset;
    if (!decoder.read(std::min(kBlockValues, count - offset), block, {}).ok()) return false;
  }
  return decoder.close().ok();
}

}  // namespace fsl
