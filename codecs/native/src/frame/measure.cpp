#include "frame/measure.hpp"

#include <algorithm>
#include <cstring>

#include "frame/decode_chunk.hpp"
#include "frame/payload.hpp"
#include "wire/heads.hpp"

#if defined(__SSE2__) || defined(_M_X64)
#include <emmintrin.h>
#define FSL_STREAM_STORES 1
#else
#define FSL_STREAM_STORES 0
#endif

namespace fsl {
namespace {

constexpr std::size_t kStageBlockValues = 128;

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
  const std::size_t skipped =
      static_cast<std::size_t>(-reinterpret_cast<std::uintptr_t>(memory)) & 63;
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
    __asm__ volatile("" : "+r"(turn));  // keeps the compiler from removing the loop
#else
    *const_cast<volatile std::uint64_t*>(&turn) = turn;
#endif
  }
}

std::size_t stage_bound(std::size_t count) { return 4 * count + kWorkingBytes; }

std::size_t stage_encode(const Kernels& kernels, const Format& format, const std::uint8_t* codes,
                         std::size_t count, std::uint8_t* out) {
  Scratch& scratch = scratch_of_this_thread();
  const EncodeSettings settings = {
      &format, kStageBlockValues, blocks_of(count, kBlockValues) * kBlockValues, true, 0, 1};
  ChunkCodes chunk = make_room(settings, scratch.chunk_codes);
  chunk.count = count;
  chunk.planes[0] = const_cast<std::uint8_t*>(codes);  // it is only read
  const std::size_t runs = blocks_of(count, kStageBlockValues);
  if (format.is_uniform()) {
    std::fill_n(chunk.steps, runs, static_cast<std::int16_t>(kLowestStep));
    std::size_t escapes = 0;
    for (std::size_t offset = 0; offset < count; offset += kBlockValues) {
      chunk.escapes[offset / kBlockValues] =
          kernels.count_byte(codes + offset, std::min(kBlockValues, count - offset), 0);
      escapes += chunk.escapes[offset / kBlockValues];
    }
    std::fill_n(chunk.escaped, escapes, 0.0F);
  } else {
    std::fill_n(chunk.scales, runs, static_cast<std::uint8_t>(format.float8->lowest_scale));
  }
  PayloadWriter writer(kernels, settings, chunk, 0, {}, scratch);
  std::size_t bytes = 0;
  std::size_t raw_bytes = 0;
  Attempt attempt = writer.write_coded(writer.plan(false), out, bytes, raw_bytes);
  if (attempt == Attempt::kConstantPlane)
    attempt = writer.write_coded(writer.plan(true), out, bytes, raw_bytes);
  return attempt == Attempt::kDone ? bytes : 0;
}

bool stage_decode(const Kernels& kernels, const Format& format, const std::uint8_t* payload,
                  std::size_t payload_bytes, std::uint8_t* codes, std::size_t count) {
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
  ChunkDecoder decoder(kernels, header, chunk, scratch_of_this_thread());
  if (!decoder.open().ok()) return false;
  for (std::size_t offset = 0; offset < count; offset += kBlockValues) {
    const std::size_t size = std::min(kBlockValues, count - offset);
    if (!decoder.open_block(size, decoder.scratch_piece(0)).ok()) return false;
    for (std::size_t done = 0; done < size; done += kPieceValues) {
      Piece piece = decoder.scratch_piece(done);
      piece.planes[0] = codes + offset + done;
      if (!decoder.read(std::min(kPieceValues, size - done), piece).ok()) return false;
    }
    if (!decoder.close_block().ok()) return false;
  }
  return decoder.close().ok();
}

}  // namespace fsl
