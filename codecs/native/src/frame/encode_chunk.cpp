#include "frame/encode_chunk.hpp"

#include <algorithm>
#include <cstring>

#include "bytes.hpp"
#include "frame/payload.hpp"

namespace fsl {
namespace {

// Three quarters of a usual chunk: from the second quarter on, quantizing prefetches the next
// chunk.
constexpr std::size_t kFurtherBytes = 384 * 1024;

}  // namespace

// The chunk's `count` values from `offset` on; valid until the next call.
const float* ChunkEncoder::values(std::size_t offset, std::size_t count) {
  if (combined_ != nullptr) return combined_ + offset;
  const std::size_t at = start_ + offset;
  if (source_.fp32 != nullptr && source_.reference == nullptr) return source_.fp32 + at;
  kernels_.combine(source_.fp32 != nullptr ? source_.fp32 + at : nullptr,
                   source_.bf16 != nullptr ? source_.bf16 + at : nullptr,
                   source_.reference != nullptr ? source_.reference + at : nullptr, nullptr, count,
                   scratch_.x);
  return scratch_.x;
}

// The chunk after this one, which is prefetched: a caller that encodes a vector chunk by chunk
// needs it next. Otherwise some bandwidth is lost.
Ahead ChunkEncoder::ahead() const {
  if (source_.fp32 == nullptr || combined_ != nullptr || count_ != settings_.chunk_values)
    return {};
  const std::uintptr_t next = reinterpret_cast<std::uintptr_t>(source_.fp32 + start_) + 4 * count_;
  return {reinterpret_cast<const char*>(next), reinterpret_cast<const char*>(next + 4 * count_),
          has_roomy_first_level()};
}

// Whether these are at least 1,024 values, and in every 127th run of 16 most are zero.
bool ChunkEncoder::looks_sparse() {
  if (count_ < 1024) return false;
  constexpr std::size_t kRun = 16;
  constexpr std::size_t kStep = 127 * kRun;
  const std::size_t last = (count_ - 1) / kStep * kStep;  // the last run may be shorter
  const std::size_t sampled = last / kStep * kRun + std::min(kRun, count_ - last);
  std::size_t others = 0;
  for (std::size_t offset = 0; offset <= last && 2 * others < sampled; offset += kStep) {
    const std::size_t size = std::min(kRun, count_ - offset);
    float run[kRun] = {};
    if (size == kRun) {
      std::memcpy(run, values(offset, kRun), sizeof(run));
    } else {
      std::copy_n(values(offset, size), size, run);
    }
    for (const float x : run) others += x != 0.0F;
  }
  return 2 * others < sampled;
}

// False if some value reaches the format's escape magnitude.
bool ChunkEncoder::quantise(ChunkCodes& codes, bool sparse) {
  codes.count = 0;
  ChunkQuantiser quantiser(kernels_, settings_, codes);
  const std::size_t further =
      ahead().end != nullptr && source_.reference == nullptr ? kFurtherBytes : 0;
  for (std::size_t offset = 0; offset < count_; offset += kBlockValues) {
    const std::size_t size = std::min(kBlockValues, count_ - offset);
    const float* const x = values(offset, size);
    quantiser.quantise(x, size, first_bits_, seen_, scratch_.positions, further, sparse);
    if (seen_.largest_magnitude >= format_.escape_magnitude) return false;
    if (source_.residual != nullptr) quantiser.leave(x, residual(offset));
  }
  return true;
}

Encoded ChunkEncoder::write_raw(std::uint8_t* out) {
  seen_ = {};
  for (std::size_t offset = 0; offset < count_; offset += kBlockValues) {
    const std::size_t size = std::min(kBlockValues, count_ - offset);
    const float* x = values(offset, size);
    kernels_.look(x, size, first_bits_, seen_);
    std::memcpy(out + 4 * offset, x, 4 * size);
  }
  if (is_constant()) return write_constant(out);
  if (source_.residual != nullptr) std::memset(residual(0), 0, 4 * count_);
  return {kRawFloat32, seen_.largest_magnitude >= kFirstNonfinite, 4 * count_, nothing_summed_};
}

Encoded ChunkEncoder::write_constant(std::uint8_t* out) {
  const bool nonfinite = (first_bits_ & kMagnitudeMask) >= kFirstNonfinite;
  float value;
  std::memcpy(&value, &first_bits_, 4);
  if ((first_bits_ & kMagnitudeMask) < format_.escape_magnitude && !format_.is_uniform() &&
      !format_.is_float32()) {
    Seen ignored;
    ChunkCodes codes = make_room(settings_, scratch_.chunk_codes);
    ChunkQuantiser quantiser(kernels_, settings_, codes);
    scratch_.x[0] = value;
    quantiser.quantise(scratch_.x, 1, first_bits_, ignored, scratch_.positions, 0);
    value = quantiser.only_value();
  }
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  store(out, bits);
  if (source_.residual != nullptr) {
    float original;
    std::memcpy(&original, &first_bits_, 4);
    std::fill_n(residual(0), count_, nonfinite ? 0.0F : original - value);
  }
  return {kConstant, nonfinite, 4, nothing_summed_};
}

Encoded ChunkEncoder::encode(std::uint8_t* out) {
  if (source_.residual != nullptr) {
    float* const x =
        reinterpret_cast<float*>(scratch_.chunk_values.at_least(4 * settings_.chunk_values));
    kernels_.combine(source_.fp32 != nullptr ? source_.fp32 + start_ : nullptr,
                     source_.bf16 != nullptr ? source_.bf16 + start_ : nullptr,
                     source_.reference != nullptr ? source_.reference + start_ : nullptr,
                     residual(0), count_, x);
    combined_ = x;
  }
  std::memcpy(&first_bits_, values(0, 1), 4);
  if (format_.is_float32() && !settings_.entropy) return write_raw(out);

  ChunkCodes codes = make_room(settings_, scratch_.chunk_codes);
  bool is_sparse = settings_.entropy && looks_sparse();
  const bool has_sparse_steps = is_sparse && format_.is_uniform();
  if (!quantise(codes, is_sparse)) return write_raw(out);
  if (is_constant()) return write_constant(out);
  const bool nonfinite = seen_.largest_magnitude >= kFirstNonfinite;
  PayloadWriter writer(kernels_, settings_, codes, nothing_summed_.value, ahead(), scratch_);
  std::size_t bytes = 0;
  for (int everything = settings_.entropy ? 0 : 2; everything < 2; ++everything) {
    const bool counts_all = everything != 0;
    const ChunkPlan* best = is_sparse ? &writer.plan_sparse(counts_all) : nullptr;
    if (is_sparse && !writer.is_cheap(*best)) {
      if (has_sparse_steps) quantise(codes, false);
      const ChunkPlan& other = writer.plan(counts_all);
      is_sparse = best->cost_bits < other.cost_bits;
      if (is_sparse && has_sparse_steps) quantise(codes, true);
      if (!is_sparse) best = &other;
    }
    const ChunkPlan& plan = best != nullptr ? *best : writer.plan(counts_all);
    if (plan.cost_bits >= static_cast<std::uint64_t>(format_.code_bits) * count_) break;
    std::size_t raw_bytes = 0;
    const Attempt attempt = writer.write_coded(plan, out, bytes, raw_bytes);
    if (attempt == Attempt::kDone && bytes <= raw_bytes)
      return {kCoded, nonfinite, bytes, writer.summed()};
    if (attempt != Attempt::kConstantPlane) break;
  }
  if (is_sparse && has_sparse_steps) quantise(codes, false);
  if (format_.is_float32() || writer.write_raw_codes(out, bytes) != Attempt::kDone)
    return write_raw(out);
  return {kRawCodes, nonfinite, bytes, nothing_summed_};
}

}  // namespace fsl
