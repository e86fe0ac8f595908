// A chunk is coded as its sample suggests, while everything about its values is still being found out; where that shows another mode to be
// the right one (docs/WIRE.md, "Choosing the mode"), the chunk is done again.
#include "encode.hpp"

#include <atomic>
#include <cstring>
#include <thread>

#include "encode_block.hpp"
#include "fetching.hpp"
#include "float_environment.hpp"
#include "frame.hpp"
#include "plan.hpp"
#include "pool.hpp"

namespace fsl {
namespace {

struct Encoded {
  Mode mode;
  bool nonfinite;
  std::size_t payload_bytes;
};

// How an attempt at a payload ended.
enum class Attempt {
  kDone,
  kTooLong,        // longer than raw fp32
  kBeyondFormat,   // some value reaches the format's escape magnitude
  kConstantPlane,  // a plane that the sample shows as constant is not
};

// Enough to be through with an inner block's 1024 lines when it has been quantised and its tree is half written.
constexpr std::size_t kLinesAtOnce = 24;

class ChunkEncoder {
 public:
  ChunkEncoder(const Kernels& kernels, const EncodeSettings& settings, const SharedBooks& shared, const Source& source, std::size_t start,
               std::size_t count, Scratch& scratch)
      : kernels_(kernels),
        settings_(settings),
        format_(*settings.format),
        shared_(shared),
        source_(source),
        start_(start),
        count_(count),
        scratch_(scratch),
        block_(kernels, settings, scratch) {}

  // Writes the payload to `out`: 4 * count bytes and kWorkingBytes must be there.
  Encoded encode(std::uint8_t* out);

 private:
  const float* values(std::size_t offset, std::size_t count);
  void quantise(std::size_t offset, std::size_t count, const Chores& chores = {});
  float* residual(std::size_t offset) const { return source_.residual == nullptr ? nullptr : source_.residual + start_ + offset; }
  Fetching upcoming(std::size_t offset) const;
  bool has_successor() const;
  void fetch_sample_of_successor(std::size_t index, std::size_t part, std::size_t parts) const;
  const ChunkPlan* plan(bool everything);
  Attempt write_coded(const ChunkPlan& plan, std::uint8_t* out, std::size_t& bytes, std::size_t& raw_bytes);
  Attempt too_long(const ChunkPlan& plan, std::size_t offset);
  Attempt write_raw_codes(std::uint8_t* out, std::size_t& bytes);
  Encoded write_raw(std::uint8_t* out);
  Encoded write_constant(std::uint8_t* out);
  bool is_constant() const { return seen_.differing_bits == 0; }

  const Kernels& kernels_;
  const EncodeSettings& settings_;
  const Format& format_;
  const SharedBooks& shared_;
  const Source& source_;
  const std::size_t start_;
  const std::size_t count_;
  Scratch& scratch_;
  BlockEncoder block_;
  const float* combined_ = nullptr;  // the chunk's values, where they must outlive their residual
  std::uint32_t first_bits_ = 0;
  Seen seen_;  // of the attempt under way
};

// `count` values of the chunk from `offset` on; valid until the next call.
const float* ChunkEncoder::values(std::size_t offset, std::size_t count) {
  if (combined_ != nullptr) return combined_ + offset;
  const std::size_t at = start_ + offset;
  if (source_.fp32 != nullptr && source_.reference == nullptr) return source_.fp32 + at;
  kernels_.combine(source_.fp32 != nullptr ? source_.fp32 + at : nullptr, source_.bf16 != nullptr ? source_.bf16 + at : nullptr,
                   source_.reference != nullptr ? source_.reference + at : nullptr, nullptr, count, scratch_.x);
  return scratch_.x;
}

void ChunkEncoder::quantise(std::size_t offset, std::size_t count, const Chores& chores) {
  block_.quantise(values(offset, count), count, first_bits_, seen_, chores);
}

// Whoever encodes a vector chunk by chunk will encode what follows this chunk in memory next, in this call or in another. If that is not so,
// or nothing is there, some bandwidth is lost; fetching never faults.
bool ChunkEncoder::has_successor() const {
  return source_.fp32 != nullptr && combined_ == nullptr && count_ == settings_.chunk_values && count_ > kBlockValues;
}

// What is read after the block at `offset`.
Fetching ChunkEncoder::upcoming(std::size_t offset) const {
  if (source_.fp32 == nullptr || combined_ != nullptr) return {};
  const std::size_t from = offset + kBlockValues;
  if (from >= count_ && !has_successor()) return {};
  const std::size_t to = from < count_ && count_ - from < kBlockValues ? count_ : from + kBlockValues;
  const std::uintptr_t chunk = reinterpret_cast<std::uintptr_t>(source_.fp32 + start_);
  return {reinterpret_cast<const char*>(chunk + 4 * from), reinterpret_cast<const char*>(chunk + 4 * to), kLinesAtOnce};
}

// Part `part` of `parts` of what the next chunk's sample takes from inner block `index` of it, which the machine cannot foresee.
void ChunkEncoder::fetch_sample_of_successor(std::size_t index, std::size_t part, std::size_t parts) const {
#if defined(__GNUC__)
  if (!has_successor() || !settings_.entropy) return;
  const std::size_t end = (index + 1) * kBlockValues < count_ ? (index + 1) * kBlockValues : count_;
  const std::size_t size = sampled_run(settings_.block_values);
  const std::size_t stride = kSampledEvery * size;
  const std::uintptr_t successor = reinterpret_cast<std::uintptr_t>(source_.fp32 + start_) + 4 * count_;
  for (std::size_t run = (index * kBlockValues + stride - 1) / stride; run * stride < end; ++run) {
    if (run % parts != part) continue;
    const std::uintptr_t from = successor + 4 * run * stride;
    for (std::size_t byte = 0; byte < 4 * size; byte += 64) __builtin_prefetch(reinterpret_cast<const char*>(from + byte), 0, 2);
  }
#else
  (void)index;
  (void)part;
  (void)parts;
#endif
}

// The plan from a sample or from all values; null when it promises nothing.
const ChunkPlan* ChunkEncoder::plan(bool everything) {
  for (int p = 0; p < (format_.is_bytes() ? 1 : format_.split[0].planes); ++p) clear_counts(scratch_.counts[p]);
  const bool takes_all = everything || count_ <= kBlockValues;
  const std::size_t run = takes_all ? kBlockValues : sampled_run(settings_.block_values);
  const std::size_t stride = takes_all ? kBlockValues : kSampledEvery * run;
  std::size_t sampled = 0;
  for (std::size_t offset = 0; offset < count_; offset += stride) {
    const std::size_t size = count_ - offset < run ? count_ - offset : run;
    quantise(offset, size);
    block_.count();
    sampled += size;
  }
  const ChunkPlan& plan = plan_chunk({format_, shared_, count_, sampled}, scratch_);
  return plan.cost_bits < static_cast<std::uint64_t>(format_.code_bits) * count_ ? &plan : nullptr;
}

Attempt ChunkEncoder::write_coded(const ChunkPlan& plan, std::uint8_t* out, std::size_t& bytes, std::size_t& raw_bytes) {
  const std::size_t most = 4 * count_;
  const int planes = format_.split[plan.split_index].planes;
  std::uint8_t* position = out;
  *position++ = static_cast<std::uint8_t>(plan.split_index);
  for (int p = 0; p < planes; ++p) {
    std::memcpy(position, plan.planes[p].head, plan.planes[p].head_bytes);
    position += plan.planes[p].head_bytes;
  }
  seen_ = {};
  raw_bytes = 0;
  for (std::size_t offset = 0; offset < count_; offset += kBlockValues) {
    const std::size_t size = count_ - offset < kBlockValues ? count_ - offset : kBlockValues;
    Fetching fetching = upcoming(offset);
    const Chores chores = fetching.chores();
    quantise(offset, size, chores);
    if (seen_.largest_magnitude >= format_.escape_magnitude) return Attempt::kBeyondFormat;
    const std::size_t scale_bytes = block_.write_scales(position);
    position += scale_bytes;
    for (int p = 0; p < planes; ++p) {
      // A plane takes less than kWorkingBytes.
      if (static_cast<std::size_t>(position - out) > most) return too_long(plan, offset);
      fetch_sample_of_successor(offset / kBlockValues, static_cast<std::size_t>(p), static_cast<std::size_t>(planes));
      const std::size_t written = block_.write_plane(plan, p, position, chores);
      if (written == SIZE_MAX) return Attempt::kConstantPlane;
      position += written;
    }
    if (static_cast<std::size_t>(position - out) + block_.escaped_bytes() > most) return too_long(plan, offset);
    position += block_.write_escaped(position);
    raw_bytes += scale_bytes + size * format_.code_bytes() + block_.escaped_bytes();
    if (source_.residual != nullptr) block_.leave(residual(offset));
  }
  bytes = static_cast<std::size_t>(position - out);
  return Attempt::kDone;
}

// A payload that has become too long does not count if the blocks from `offset` on show that its plan was made from a misleading sample.
Attempt ChunkEncoder::too_long(const ChunkPlan& plan, std::size_t offset) {
  for (; offset < count_; offset += kBlockValues) {
    quantise(offset, count_ - offset < kBlockValues ? count_ - offset : kBlockValues);
    if (seen_.largest_magnitude >= format_.escape_magnitude) return Attempt::kBeyondFormat;
    if (!block_.has_constant_planes(plan)) return Attempt::kConstantPlane;
  }
  return Attempt::kTooLong;
}

Attempt ChunkEncoder::write_raw_codes(std::uint8_t* out, std::size_t& bytes) {
  const std::size_t most = 4 * count_;
  std::uint8_t* position = out;
  seen_ = {};
  for (std::size_t offset = 0; offset < count_; offset += kBlockValues) {
    const std::size_t size = count_ - offset < kBlockValues ? count_ - offset : kBlockValues;
    quantise(offset, size);
    if (seen_.largest_magnitude >= format_.escape_magnitude) return Attempt::kBeyondFormat;
    position += block_.write_scales(position);
    position += block_.write_raw_codes(position);
    if (static_cast<std::size_t>(position - out) + block_.escaped_bytes() > most) return Attempt::kTooLong;
    position += block_.write_escaped(position);
    if (source_.residual != nullptr) block_.leave(residual(offset));
  }
  bytes = static_cast<std::size_t>(position - out);
  return Attempt::kDone;
}

Encoded ChunkEncoder::write_raw(std::uint8_t* out) {
  seen_ = {};
  for (std::size_t offset = 0; offset < count_; offset += kBlockValues) {
    const std::size_t size = count_ - offset < kBlockValues ? count_ - offset : kBlockValues;
    const float* x = values(offset, size);
    kernels_.look(x, size, first_bits_, seen_);
    std::memcpy(out + 4 * offset, x, 4 * size);
  }
  if (is_constant()) return write_constant(out);
  if (source_.residual != nullptr) std::memset(residual(0), 0, 4 * count_);
  return {kRawFloat32, seen_.largest_magnitude >= kFirstNonfinite, 4 * count_};
}

Encoded ChunkEncoder::write_constant(std::uint8_t* out) {
  const bool nonfinite = (first_bits_ & kMagnitudeMask) >= kFirstNonfinite;
  float value;
  std::memcpy(&value, &first_bits_, 4);
  if ((first_bits_ & kMagnitudeMask) < format_.escape_magnitude && !format_.is_uniform() && !format_.is_float32()) {
    Seen ignored;
    const Output output = {Sink::kStore, scratch_.escaped, 0.0F, nullptr};
    scratch_.x[0] = value;
    block_.quantise(scratch_.x, 1, first_bits_, ignored, {});
    if (format_.float8 != nullptr) {
      std::uint8_t unused[kSlackBytes + 2];
      block_.write_scales(unused);  // settles the scale of a zero
      kernels_.dequantise_float8(scratch_.codes, scratch_.scales, 1, *format_.float8, settings_.block_values, output);
    } else {
      const std::uint8_t* const planes[2] = {scratch_.planes[0], scratch_.planes[1]};
      kernels_.join_bfloat16(planes, 1, output);
    }
    value = scratch_.escaped[0];
  }
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  store(out, bits);
  if (source_.residual != nullptr) {
    float original;
    std::memcpy(&original, &first_bits_, 4);
    const float left = nonfinite ? 0.0F : original - value;
    for (std::size_t i = 0; i < count_; ++i) residual(0)[i] = left;
  }
  return {kConstant, nonfinite, 4};
}

Encoded ChunkEncoder::encode(std::uint8_t* out) {
  if (source_.residual != nullptr) {
    float* const x = reinterpret_cast<float*>(scratch_.chunk_values.at_least(4 * settings_.chunk_values));
    kernels_.combine(source_.fp32 != nullptr ? source_.fp32 + start_ : nullptr, source_.bf16 != nullptr ? source_.bf16 + start_ : nullptr,
                     source_.reference != nullptr ? source_.reference + start_ : nullptr, residual(0), count_, x);
    combined_ = x;
  }
  std::memcpy(&first_bits_, values(0, 1), 4);

  std::size_t bytes = 0;
  std::size_t raw_bytes = 0;
  if (settings_.entropy) {
    const ChunkPlan* chosen = plan(false);
    Attempt attempt = Attempt::kTooLong;
    if (chosen != nullptr) {
      attempt = write_coded(*chosen, out, bytes, raw_bytes);
      if (attempt == Attempt::kConstantPlane) {
        chosen = plan(true);
        attempt = chosen == nullptr ? Attempt::kTooLong : write_coded(*chosen, out, bytes, raw_bytes);
      }
    }
    if (attempt == Attempt::kDone && is_constant()) return write_constant(out);
    if (attempt == Attempt::kDone && bytes <= raw_bytes && bytes <= 4 * count_) {
      return {kCoded, seen_.largest_magnitude >= kFirstNonfinite, bytes};
    }
    if (attempt == Attempt::kBeyondFormat) return write_raw(out);
  }
  if (format_.is_float32() || write_raw_codes(out, bytes) != Attempt::kDone) return write_raw(out);
  if (is_constant()) return write_constant(out);
  return {kRawCodes, false, bytes};
}

// The chunks of a frame, taken in turn by any number of threads.
struct FrameEncoder {
  const Kernels& kernels;
  const EncodeSettings& settings;
  const SharedBooks& shared;
  const Source& source;
  const Header& header;
  std::uint8_t* out;
  std::atomic<std::uint64_t> next{0};       // chunk to be taken
  std::atomic<std::uint64_t> placed{0};     // chunks whose size, and so the place of the next, is known
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
      // Only memory can fail. The others must not wait for this thread's chunk.
      out_of_memory.store(true);
    }
  }

  void encode_chunk(std::uint64_t index, Scratch& scratch) {
    ChunkEncoder encoder(kernels, settings, shared, source, index * header.chunk_values, header.values_of(index), scratch);
    if (placed.load(std::memory_order_acquire) == index) {
      std::uint8_t* const place = out + position.load();
      const Encoded encoded = encoder.encode(place + kChunkHeadBytes);
      publish(index, encoded.payload_bytes);
      write_chunk_head(kernels, header.checksum, index, encoded.mode, encoded.nonfinite, encoded.payload_bytes, place);
      return;
    }
    // The chunks before are not done: encode elsewhere, then wait for them and move.
    std::uint8_t* const apart = scratch.chunk_payload.at_least(kChunkHeadBytes + 4 * header.chunk_values + kWorkingBytes);
    const Encoded encoded = encoder.encode(apart + kChunkHeadBytes);
    while (placed.load(std::memory_order_acquire) != index) {
      if (out_of_memory.load()) return;
      std::this_thread::yield();
    }
    std::uint8_t* const place = out + position.load();
    publish(index, encoded.payload_bytes);
    write_chunk_head(kernels, header.checksum, index, encoded.mode, encoded.nonfinite, encoded.payload_bytes, apart);
    std::memcpy(place, apart, kChunkHeadBytes + encoded.payload_bytes);
  }

  void publish(std::uint64_t index, std::size_t payload_bytes) {
    position.store(position.load() + kChunkHeadBytes + payload_bytes);
    placed.store(index + 1, std::memory_order_release);
  }
};

}  // namespace

std::size_t encode_frame(const Kernels& kernels, const EncodeSettings& settings, const SharedBooks& shared, const Source& source,
                         std::uint8_t* out) {
  Header header;
  header.format = settings.format;
  header.block_values = settings.block_values;
  header.chunk_values = settings.chunk_values;
  header.values = source.count;
  write_header(kernels, header, out);

  FrameEncoder frame{kernels, settings, shared, source, header, out};
  const std::uint64_t chunks = header.chunks();
  const int threads = chunks < static_cast<std::uint64_t>(settings.threads) ? static_cast<int>(chunks) : settings.threads;
  run_on_threads(threads, [](void* context, int) { static_cast<FrameEncoder*>(context)->work(); }, &frame);
  if (frame.out_of_memory.load()) throw std::bad_alloc();
  return frame.position.load();
}

}  // namespace fsl
