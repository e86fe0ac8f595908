#include "frame/encode.hpp"

#include <atomic>
#include <cstring>
#include <thread>

#include "float_environment.hpp"
#include "frame/encode_chunk.hpp"
#include "pool.hpp"
#include "wire/heads.hpp"

namespace fsl {
namespace {

// The chunks of a frame, taken in order by several threads.
struct FrameEncoder {
  const Kernels& kernels;
  const EncodeSettings& settings;
  const Source& source;
  const Header& header;
  std::uint8_t* out;
  std::atomic<std::uint64_t> next{0};    // the next chunk to encode
  std::atomic<std::uint64_t> placed{0};  // chunks whose place in the frame is known
  std::atomic<std::size_t> position{kHeaderBytes};
  std::atomic<bool> out_of_memory{false};

  void work() noexcept {
    const FloatEnvironment environment;
    try {
      Scratch& scratch = scratch_of_this_thread();
      for (;;) {
        const std::uint64_t index = next.fetch_add(1);
        if (index >= header.chunks() || out_of_memory.load()) return;
        encode_chunk(index, scratch);
      }
    } catch (...) {
      // Only allocation fails. Other threads must not wait for this thread's chunk.
      out_of_memory.store(true);
    }
  }

  void encode_chunk(std::uint64_t index, Scratch& scratch) {
    ChunkEncoder encoder(kernels, settings, source, header.checksum, index * header.chunk_values,
                         header.values_of(index), scratch);
    if (placed.load(std::memory_order_acquire) == index) {
      std::uint8_t* const place = out + position.load();
      const Encoded encoded = encoder.encode(place + kChunkHeadBytes);
      publish(index, encoded.payload_bytes);
      write_chunk_head(kernels, encoded.summed, index, encoded.mode, encoded.nonfinite,
                       encoded.payload_bytes, place);
      return;
    }
    // Earlier chunks are not done: encode elsewhere, wait for them, then copy.
    std::uint8_t* const apart =
        scratch.chunk_payload.at_least(kChunkHeadBytes + 4 * header.chunk_values + kWorkingBytes);
    const Encoded encoded = encoder.encode(apart + kChunkHeadBytes);
    while (placed.load(std::memory_order_acquire) != index) {
      if (out_of_memory.load()) return;
      std::this_thread::yield();
    }
    std::uint8_t* const place = out + position.load();
    publish(index, encoded.payload_bytes);
    write_chunk_head(kernels, encoded.summed, index, encoded.mode, encoded.nonfinite,
                     encoded.payload_bytes, apart);
    std::memcpy(place, apart, kChunkHeadBytes + encoded.payload_bytes);
  }

  void publish(std::uint64_t index, std::size_t payload_bytes) {
    position.store(position.load() + kChunkHeadBytes + payload_bytes);
    placed.store(index + 1, std::memory_order_release);
  }
};

}  // namespace

std::size_t encode_frame(const Kernels& kernels, const EncodeSettings& settings,
                         const Source& source, std::uint8_t* out) {
  Header header;
  header.format = settings.format;
  header.block_values = settings.block_values;
  header.chunk_values = settings.chunk_values;
  header.values = source.count;
  write_header(kernels, header, out);

  FrameEncoder frame{kernels, settings, source, header, out};
  const std::uint64_t chunks = header.chunks();
  const int threads = chunks < static_cast<std::uint64_t>(settings.threads)
                          ? static_cast<int>(chunks)
                          : settings.threads;
  run_on_threads(
      threads, [](void* context, int) { static_cast<FrameEncoder*>(context)->work(); }, &frame);
  if (frame.out_of_memory.load()) throw std::bad_alloc();
  return frame.position.load();
}

}  // namespace fsl
