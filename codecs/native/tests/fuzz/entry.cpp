// A fuzz target for each way to decode a frame; FSL_FUZZ_ENTRY chooses: decode, decode_bfloat16,
// accumulate or inspect.
//
// The input is a frame. Every kernel path of this machine decodes it into memory of exactly its
// size, so that the sanitizers detect any access outside; all paths must report the same fault or
// give the same bits. Wrong checksums would stop nearly every mutation, so they are corrected
// first, as an attacker would do, except for some inputs. Frames of several chunks are also read
// with two threads. The input's size decides where in a cache line the output begins.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "bytes.hpp"
#include "frame/decode.hpp"
#include "kernels/kernels.hpp"

namespace {

constexpr std::uint64_t kMostValues = 1u << 18;

[[noreturn]] void fail(const char* text) {
  std::fprintf(stderr, "%s\n", text);
  std::abort();
}

// Corrects a frame's checksums, as far as its lengths lead.
void seal(std::vector<std::uint8_t>& frame) {
  const fsl::Kernels& kernels = *fsl::kernels_of(fsl::Path::kScalar);
  if (frame.size() < fsl::kHeaderBytes) return;
  std::uint8_t* const bytes = frame.data();
  const std::uint32_t header = kernels.crc32(0, bytes, fsl::kHeaderBytes - 4);
  fsl::store(bytes + fsl::kHeaderBytes - 4, header);
  std::size_t position = fsl::kHeaderBytes;
  while (frame.size() - position >= fsl::kChunkHeadBytes) {
    std::uint8_t* const head = bytes + position;
    const std::size_t left = frame.size() - position - fsl::kChunkHeadBytes;
    const std::size_t payload = fsl::load32(head);
    const std::size_t there = payload < left ? payload : left;
    const std::uint32_t of_payload = kernels.crc32(header, head + fsl::kChunkHeadBytes, there);
    fsl::store(head + fsl::kChunkHeadBytes - 4,
               kernels.crc32(of_payload, head, fsl::kChunkHeadBytes - 4));
    position += fsl::kChunkHeadBytes + there;
    if (there < payload) break;
  }
}

// One path's result.
struct Outcome {
  fsl::Fault fault = fsl::Fault::kNone;
  std::vector<std::uint8_t> bytes;
};

// How a frame is read.
struct Reading {
  const fsl::Kernels& kernels;
  int threads;
  const std::uint8_t* frame;
  std::size_t size;

  fsl::DecodeRequest request() const {
    return {frame, size, {kMostValues, std::uint64_t{1} << 30}, threads};
  }
};

// Memory of `count` values at the end of its block, `size` % 17 values after a cache line: stores
// past the cache depend on that.
template <typename Value>
class Room {
 public:
  Room(std::size_t count, std::size_t size)
      : lead_(size % 17), bytes_((lead_ + count) * sizeof(Value)) {
    memory_ = static_cast<Value*>(::operator new(bytes_, kLine));
    std::memset(memory_, 0x5A, bytes_);
  }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  ~Room() {
    const auto* const first = reinterpret_cast<const std::uint8_t*>(memory_);
    for (std::size_t i = 0; i < lead_ * sizeof(Value); ++i) {
      if (first[i] != 0x5A) fail("wrote in front of the output");
    }
    ::operator delete(memory_, kLine);
  }

  Value* get() const { return memory_ + lead_; }

 private:
  static constexpr std::align_val_t kLine{64};
  std::size_t lead_;
  std::size_t bytes_;
  Value* memory_;
};

#define FSL_NAME(entry) run_##entry
#define FSL_RUN(entry) FSL_NAME(entry)

// The number of values that the frame announces, or 0 if it has no valid header.
std::size_t announced(const Reading& reading) {
  fsl::Header header;
  const fsl::Limits limits = reading.request().limits;
  return fsl::read_header(reading.kernels, reading.frame, reading.size, limits, header).ok()
             ? static_cast<std::size_t>(header.values)
             : 0;
}

template <typename Value>
Outcome decoded(const Reading& reading) {
  const std::size_t count = announced(reading);
  const Room<Value> out(count, reading.size);
  fsl::Target target{nullptr, nullptr, count};
  if constexpr (sizeof(Value) == 4) {
    target.fp32 = out.get();
  } else {
    target.bf16 = out.get();
  }
  std::uint64_t values = 0;
  const fsl::Status status = fsl::decode_frame(reading.kernels, reading.request(), target, values);
  Outcome outcome{status.fault, {}};
  if (status.ok()) {
    if (values != count) fail("decoded another number of values than announced");
    const auto* const first = reinterpret_cast<const std::uint8_t*>(out.get());
    outcome.bytes.assign(first, first + count * sizeof(Value));
  }
  return outcome;
}

[[maybe_unused]] Outcome run_decode(const Reading& reading) { return decoded<float>(reading); }

[[maybe_unused]] Outcome run_decode_bfloat16(const Reading& reading) {
  return decoded<std::uint16_t>(reading);
}

[[maybe_unused]] Outcome run_accumulate(const Reading& reading) {
  const std::size_t count = announced(reading);
  const Room<float> room(count, reading.size);
  float* const sum = room.get();
  for (std::size_t i = 0; i < count; ++i) sum[i] = static_cast<float>(i % 7);
  std::uint64_t values = 0;
  const fsl::Status status =
      fsl::accumulate_frame(reading.kernels, reading.request(), sum, count, 0.3f, values);
  if (!status.ok()) {
    for (std::size_t i = 0; i < count; ++i) {
      if (sum[i] != static_cast<float>(i % 7)) fail("a refused frame was added");
    }
  }
  const auto* const first = reinterpret_cast<const std::uint8_t*>(sum);
  return {status.fault, std::vector<std::uint8_t>(first, first + count * sizeof(float))};
}

[[maybe_unused]] Outcome run_inspect(const Reading& reading) {
  fsl::Summary summary{};
  const fsl::Status status = fsl::inspect_frame(reading.kernels, reading.request(), summary);
  Outcome outcome{status.fault, {}};
  if (status.ok()) {
    for (const std::uint64_t count : summary.modes)
      outcome.bytes.push_back(static_cast<std::uint8_t>(count));
    outcome.bytes.push_back(summary.nonfinite);
  }
  return outcome;
}

std::uint64_t chunks_of(const fsl::Kernels& kernels, const std::uint8_t* frame, std::size_t size) {
  fsl::Header header;
  const bool is_read =
      fsl::read_header(kernels, frame, size, {kMostValues, std::uint64_t{1} << 30}, header).ok();
  return is_read ? header.chunks() : 0;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::uint8_t> sealed(data, data + size);
  if (size % 16 != 5) seal(sealed);
  // Memory of exactly this size: a vector may have more.
  const std::unique_ptr<std::uint8_t[]> frame(new std::uint8_t[size]);
  if (size > 0) std::memcpy(frame.get(), sealed.data(), size);
  const fsl::Kernels& scalar = *fsl::kernels_of(fsl::Path::kScalar);
  const Outcome expected = FSL_RUN(FSL_FUZZ_ENTRY)({scalar, 1, frame.get(), size});
  const int most_threads = chunks_of(scalar, frame.get(), size) > 1 ? 2 : 1;
  for (const fsl::Path path : {fsl::Path::kScalar, fsl::Path::kAvx2, fsl::Path::kAvx512}) {
    const fsl::Kernels* const kernels = fsl::kernels_of(path);
    if (kernels == nullptr) continue;
    for (int threads = path == fsl::Path::kScalar ? 2 : 1; threads <= most_threads; ++threads) {
      const Outcome found = FSL_RUN(FSL_FUZZ_ENTRY)({*kernels, threads, frame.get(), size});
      if (found.fault != expected.fault)
        fail("two paths, or numbers of threads, disagree about what is wrong with a frame");
      if (found.bytes != expected.bytes)
        fail("two paths, or numbers of threads, give different values");
    }
  }
  return 0;
}
