#include "frame/decode.hpp"

#include <algorithm>
#include <limits>
#include <mutex>
#include <new>

#include "float_environment.hpp"
#include "frame/decode_chunk.hpp"
#include "pool.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fsl {
namespace {

// Outputs of at least this size would not stay in cache: they are written past it.
constexpr std::uint64_t kStreamedValues = 131072;

// Chunk head, code tables, stream heads: each one's place depends on the one before, so without
// prefetching each would wait for memory in turn.
void fetch_first(const std::uint8_t* from, const std::uint8_t* end) {
  constexpr std::size_t kFirstBytes = 1024;
  for (std::size_t i = 0; i < std::min(kFirstBytes, static_cast<std::size_t>(end - from)); i += 64)
    __builtin_prefetch(from + i);
}

// The task for a frame's chunks.
enum class Task {
  kDecode,              // values to the target
  kCheck,               // only find faults
  kAccumulate,          // added, after a check
  kCheckAndAccumulate,  // of the only chunk: both, decoded once
};

struct FrameDecoder {
  const Kernels& kernels;
  const Header& header;
  Task task;
  Output output;
  std::size_t value_bytes;
  const std::uint8_t* end;

  std::mutex mutex;  // guards the members below
  const std::uint8_t* position;
  std::uint64_t next = 0;
  std::uint64_t failed = std::numeric_limits<std::uint64_t>::max();
  Status failure{};
  bool out_of_memory = false;

  // The next chunk in order, until one has failed.
  bool take(Chunk& chunk) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (next >= header.chunks() || next > failed || out_of_memory) return false;
    const Status found = find_chunk(header, next, position, end, chunk);
    if (!found.ok()) {
      fail_locked(next, found);
      return false;
    }
    ++next;
    fetch_first(position, end);
    return true;
  }

  // Of several failed chunks, the first counts.
  void fail_locked(std::uint64_t index, const Status& found) {
    if (index >= failed) return;
    failed = index;
    failure = found;
  }

  void work() noexcept {
    const FloatEnvironment environment;
    try {
      Scratch& scratch = scratch_of_this_thread();
      Chunk chunk;
      while (take(chunk)) {
        const Status found = handle(chunk, scratch);
        if (found.ok()) continue;
        const std::lock_guard<std::mutex> lock(mutex);
        fail_locked(chunk.index, found);
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      out_of_memory = true;
    }
#if defined(__x86_64__)
    _mm_sfence();  // after non-temporal stores
#endif
  }

  Output output_at(const Chunk& chunk, std::size_t offset) const {
    Output moved = output;
    moved.out =
        static_cast<char*>(output.out) + (chunk.index * header.chunk_values + offset) * value_bytes;
    return moved;
  }

  // A wrong checksum is reported before any other fault.
  Status handle(Chunk& chunk, Scratch& scratch) const {
    Status status = read_chunk_head(chunk);
    ChunkDecoder decoder(kernels, header, chunk, scratch);
    const Status begun = decoder.begin_checksum();
    if (!begun.ok()) return begun;
    if (status.ok()) status = decode(chunk, decoder, scratch);
    const Status ended = decoder.end_checksum();
    return ended.ok() ? status : ended;
  }

  Status decode(const Chunk& chunk, ChunkDecoder& decoder, Scratch& scratch) const {
    const Status status = decoder.open();
    if (!status.ok()) return status;
    if (!decoder.has_blocks()) return handle_values(chunk, decoder, scratch);
    return task == Task::kCheckAndAccumulate ? check_and_accumulate(chunk, decoder, scratch)
                                             : handle_blocks(chunk, decoder);
  }

  // Bytes after the only chunk are found before anything is added.
  Status nothing_after(const Chunk& chunk) const {
    const std::uint8_t* const after = chunk.payload + chunk.payload_bytes;
    return after == end ? Status{}
                        : Status{Fault::kBytesAfter, static_cast<std::uint64_t>(end - after)};
  }

  Status handle_values(const Chunk& chunk, ChunkDecoder& decoder, Scratch& scratch) const {
    const bool checks = task == Task::kCheck || task == Task::kCheckAndAccumulate;
    for (int pass = checks ? 0 : 1; pass < (task == Task::kCheck ? 1 : 2); ++pass) {
      for (std::size_t offset = 0; offset < chunk.count; offset += kPieceValues) {
        const std::size_t size = std::min(kPieceValues, chunk.count - offset);
        const Output nowhere = {Sink::kStore, scratch.nowhere, 0.0F, nullptr};
        decoder.put_values(offset, size, pass == 0 ? nowhere : output_at(chunk, offset));
      }
      Status status = decoder.close();
      if (status.ok() && task == Task::kCheckAndAccumulate) status = nothing_after(chunk);
      if (!status.ok()) return status;
    }
    return {};
  }

  // Goes through all inner blocks; read(offset, piece, count) reads into piece_at(block's offset,
  // offset).
  template <typename PieceAt, typename Read>
  Status read_blocks(const Chunk& chunk, ChunkDecoder& decoder, PieceAt piece_at, Read read) const {
    for (std::size_t offset = 0; offset < chunk.count; offset += kBlockValues) {
      const std::size_t end_of_block = std::min(offset + kBlockValues, chunk.count);
      Status status = decoder.open_block(end_of_block - offset, piece_at(offset, offset));
      for (std::size_t at = offset; at < end_of_block && status.ok(); at += kPieceValues) {
        const std::size_t count = std::min(kPieceValues, end_of_block - at);
        Piece piece = piece_at(offset, at);
        decoder.fetch_next_block(at - offset);
        status = read(at, piece, count);
      }
      if (status.ok()) status = decoder.close_block();
      if (!status.ok()) return status;
    }
    return decoder.close();
  }

  Status handle_blocks(const Chunk& chunk, ChunkDecoder& decoder) const {
    const auto piece_at = [&](std::size_t block, std::size_t offset) {
      return decoder.scratch_piece(offset - block);
    };
    return read_blocks(chunk, decoder, piece_at,
                       [&](std::size_t offset, Piece& piece, std::size_t count) {
                         if (task != Task::kCheck)
                           return decoder.read_and_put(count, piece, output_at(chunk, offset));
                         const Status found = decoder.read(count, piece);
                         if (found.ok()) decoder.check(piece, count);
                         return found;
                       });
  }

  // Reads all codes into this thread's memory, then adds all values from there.
  Status check_and_accumulate(const Chunk& chunk, ChunkDecoder& decoder, Scratch& scratch) const {
    const std::size_t planes =
        header.format->is_bytes() ? 1 : static_cast<std::size_t>(header.format->split[0].planes);
    const std::size_t runs = blocks_of(chunk.count, header.block_values);
    const std::size_t plane_bytes = chunk.count + kSlackBytes;
    const std::size_t steps_at = (planes * plane_bytes + 1) & ~std::size_t{1};
    const std::size_t scales_at = steps_at + 2 * (runs + kSlackBytes);
    std::uint8_t* const memory = scratch.chunk_codes.at_least(scales_at + runs + kSlackBytes);
    const std::uint8_t* escaped[kMaximumBlocks] = {};

    const char* const accumulator = static_cast<const char*>(output_at(chunk, 0).out);
    decoder.fetch_meanwhile(
        {accumulator, accumulator + value_bytes * chunk.count, has_roomy_first_level()});
    const auto piece_at = [&](std::size_t, std::size_t offset) {
      Piece piece = {};
      for (std::size_t p = 0; p < planes; ++p) piece.planes[p] = memory + p * plane_bytes + offset;
      piece.steps =
          reinterpret_cast<std::int16_t*>(memory + steps_at) + offset / header.block_values;
      piece.scales = memory + scales_at + offset / header.block_values;
      return piece;
    };
    Status status = read_blocks(chunk, decoder, piece_at,
                                [&](std::size_t offset, Piece& piece, std::size_t count) {
                                  const Status found = decoder.read(count, piece);
                                  if (!found.ok()) return found;
                                  decoder.check(piece, count);
                                  if (offset % kBlockValues == 0)
                                    escaped[offset / kBlockValues] = piece.escaped;
                                  return found;
                                });
    if (status.ok()) status = decoder.end_checksum();
    if (status.ok()) status = nothing_after(chunk);
    if (!status.ok()) return status;
    for (std::size_t offset = 0; offset < chunk.count; offset += kBlockValues) {
      Piece piece = piece_at(offset, offset);
      piece.escaped = escaped[offset / kBlockValues];
      decoder.put(piece, std::min(kBlockValues, chunk.count - offset), output_at(chunk, offset));
    }
    return {};
  }
};

Status run(const Kernels& kernels, const DecodeRequest& request, const Header& header, Task task,
           const Output& output, std::size_t value_bytes) {
  const std::uint8_t* const end = request.frame + request.frame_bytes;
  FrameDecoder frame{kernels,     header, task, output,
                     value_bytes, end,    {},   request.frame + kHeaderBytes};
  const std::uint64_t chunks = header.chunks();
  const int threads = chunks < static_cast<std::uint64_t>(request.threads)
                          ? static_cast<int>(chunks)
                          : request.threads;
  run_on_threads(
      threads, [](void* context, int) { static_cast<FrameDecoder*>(context)->work(); }, &frame);
  if (frame.out_of_memory) throw std::bad_alloc();
  if (!frame.failure.ok()) return frame.failure;
  if (frame.position != end)
    return {Fault::kBytesAfter, static_cast<std::uint64_t>(end - frame.position)};
  return {};
}

}  // namespace

Status decode_frame(const Kernels& kernels, const DecodeRequest& request, const Target& target,
                    std::uint64_t& values) {
  fetch_first(request.frame, request.frame + request.frame_bytes);
  Header header;
  const Status status =
      read_header(kernels, request.frame, request.frame_bytes, request.limits, header);
  if (!status.ok()) return status;
  values = header.values;
  if (header.values > target.count) return {Fault::kOutputTooSmall, header.values, target.count};
  if (target.bf16 != nullptr) {
    return run(kernels, request, header, Task::kDecode,
               {Sink::kBfloat16, target.bf16, 0.0F, nullptr}, sizeof(std::uint16_t));
  }
  const Sink sink = header.values >= kStreamedValues ? Sink::kStream : Sink::kStore;
  return run(kernels, request, header, Task::kDecode, {sink, target.fp32, 0.0F, nullptr},
             sizeof(float));
}

Status accumulate_frame(const Kernels& kernels, const DecodeRequest& request, float* accumulator,
                        std::size_t accumulator_values, float weight, std::uint64_t& values) {
  fetch_first(request.frame, request.frame + request.frame_bytes);
  Header header;
  Status status = read_header(kernels, request.frame, request.frame_bytes, request.limits, header);
  if (!status.ok()) return status;
  values = header.values;
  if (header.values > accumulator_values)
    return {Fault::kOutputTooSmall, header.values, accumulator_values};
  const Output output = {Sink::kAccumulate, accumulator, weight, nullptr};
  if (header.chunks() > 1) {
    status = run(kernels, request, header, Task::kCheck, output, sizeof(float));
    if (!status.ok()) return status;
    return run(kernels, request, header, Task::kAccumulate, output, sizeof(float));
  }
  return run(kernels, request, header, Task::kCheckAndAccumulate, output, sizeof(float));
}

Status inspect_frame(const Kernels& kernels, const DecodeRequest& request, Summary& summary) {
  Status status =
      read_header(kernels, request.frame, request.frame_bytes, request.limits, summary.header);
  if (!status.ok()) return status;
  summary.nonfinite = false;
  for (std::uint64_t& count : summary.modes) count = 0;
  const std::uint8_t* position = request.frame + kHeaderBytes;
  const std::uint8_t* const end = request.frame + request.frame_bytes;
  const std::uint64_t chunks = summary.header.chunks();
  for (std::uint64_t index = 0; index < chunks; ++index) {
    Chunk chunk;
    status = find_chunk(summary.header, index, position, end, chunk);
    if (status.ok()) status = check_checksum(kernels, summary.header, chunk);
    if (status.ok()) status = read_chunk_head(chunk);
    if (!status.ok()) return status;
    summary.nonfinite |= chunk.nonfinite;
    ++summary.modes[chunk.mode];
  }
  if (position != end) return {Fault::kBytesAfter, static_cast<std::uint64_t>(end - position)};
  return {};
}

}  // namespace fsl
