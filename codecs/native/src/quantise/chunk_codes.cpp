#include "quantise/chunk_codes.hpp"

#include <algorithm>
#include <cstring>

namespace fsl {

ChunkCodes make_room(const EncodeSettings& settings, Arena& memory) {
  const Format& format = *settings.format;
  const std::size_t planes =
      format.is_bytes() ? 1 : static_cast<std::size_t>(format.split[0].planes);
  // Whole cache lines, each part with slack after it.
  const auto padded = [](std::size_t bytes) {
    return (bytes + kSlackBytes + 63) & ~std::size_t{63};
  };
  const std::size_t plane_bytes = padded(settings.chunk_values);
  const std::size_t runs = blocks_of(settings.chunk_values, settings.block_values);
  const std::size_t scale_bytes =
      format.is_bytes() ? padded(runs * (format.is_uniform() ? 2 : 1)) : 0;
  const std::size_t escaped_bytes = format.is_uniform() ? padded(4 * settings.chunk_values) : 0;

  std::uint8_t* position = memory.at_least(planes * plane_bytes + scale_bytes + escaped_bytes);
  ChunkCodes codes;
  for (std::size_t p = 0; p < planes; ++p, position += plane_bytes) codes.planes[p] = position;
  if (format.is_uniform()) {
    codes.steps = reinterpret_cast<std::int16_t*>(position);
    codes.escaped = reinterpret_cast<float*>(position + scale_bytes);
  } else {
    codes.scales = position;
  }
  return codes;
}

void ChunkQuantiser::quantise(const float* x, std::size_t count, std::uint32_t first_bits,
                              Seen& seen, std::uint16_t* positions, std::size_t further,
                              bool sparse) {
  const std::size_t offset = codes_.count;
  const std::size_t first_run = offset / settings_.block_values;
  const std::size_t runs = blocks_of(count, settings_.block_values);
  last_offset_ = offset;
  last_escaped_ = escaped_;
  codes_.count += count;
  switch (format_.kind) {
    case Kind::kFloat32: {
      std::uint8_t* const planes[4] = {codes_.planes[0] + offset, codes_.planes[1] + offset,
                                       codes_.planes[2] + offset, codes_.planes[3] + offset};
      kernels_.cut_float32(x, count, first_bits, planes, seen);
      break;
    }
    case Kind::kBfloat16: {
      std::uint8_t* const planes[2] = {codes_.planes[0] + offset, codes_.planes[1] + offset};
      kernels_.cut_bfloat16(x, count, first_bits, planes, seen);
      break;
    }
    case Kind::kE4m3:
    case Kind::kE5m2:
      kernels_.quantise_float8(x, count, *format_.float8, settings_.block_values, first_bits,
                               codes_.planes[0] + offset, codes_.scales + first_run, seen, further);
      settle_scales(first_run, runs);
      break;
    case Kind::kUniform: {
      std::uint8_t* const codes = codes_.planes[0] + offset;
      const auto quantise_these = sparse ? kernels_.quantise_sparse : kernels_.quantise_uniform;
      const std::size_t escapes =
          quantise_these(x, count, settings_.step_log2, settings_.block_values, first_bits, codes,
                         codes_.steps + first_run, seen);
      settle_scales(first_run, runs);
      if (escapes > 0) kernels_.find_byte(codes, count, 0, positions);
      for (std::size_t i = 0; i < escapes; ++i) codes_.escaped[escaped_ + i] = x[positions[i]];
      codes_.escapes[offset / kBlockValues] = escapes;
      escaped_ += escapes;
      break;
    }
  }
}

// Zeros fit any scale. Runs of zeros take the smallest scale of the others, which does not widen
// the stored range.
void ChunkQuantiser::settle_scales(std::size_t first, std::size_t runs) {
  if (format_.is_uniform()) {
    std::int16_t* const steps = codes_.steps + first;
    // kZeroRun, the lowest number, wraps around to the highest.
    std::uint16_t smallest = UINT16_MAX;
    for (std::size_t i = 0; i < runs; ++i) {
      const std::uint16_t turned = static_cast<std::uint16_t>(
          static_cast<std::uint16_t>(steps[i]) - static_cast<std::uint16_t>(kZeroRun + 1));
      smallest = std::min(smallest, turned);
    }
    const int settled = smallest == UINT16_MAX ? kLowestStep : smallest + kZeroRun + 1;
    for (std::size_t i = 0; i < runs; ++i)
      steps[i] = std::max(steps[i], static_cast<std::int16_t>(settled));
    return;
  }
  std::uint8_t* const scales = codes_.scales + first;
  // 0, a run of zeros, wraps around to 255, which is not a scale.
  std::uint8_t smallest = UINT8_MAX;
  for (std::size_t i = 0; i < runs; ++i)
    smallest = std::min(smallest, static_cast<std::uint8_t>(scales[i] - 1));
  const std::uint8_t settled = static_cast<std::uint8_t>(
      smallest == UINT8_MAX ? format_.float8->lowest_scale : smallest + 1);
  for (std::size_t i = 0; i < runs; ++i) scales[i] = std::max(scales[i], settled);
}

// Writes the values of the block that was quantized last.
void ChunkQuantiser::put(const Output& output) const {
  const std::size_t offset = last_offset_;
  const std::size_t count = codes_.count - offset;
  const std::size_t run = offset / settings_.block_values;
  switch (format_.kind) {
    case Kind::kFloat32:
      std::memset(output.out, 0, 4 * count);  // of a residual
      break;
    case Kind::kBfloat16: {
      const std::uint8_t* const planes[2] = {codes_.planes[0] + offset, codes_.planes[1] + offset};
      kernels_.join_bfloat16(planes, count, output);
      break;
    }
    case Kind::kE4m3:
    case Kind::kE5m2:
      kernels_.dequantise_float8(codes_.planes[0] + offset, codes_.scales + run, count,
                                 *format_.float8, settings_.block_values, output);
      break;
    case Kind::kUniform:
      kernels_.dequantise_uniform(
          codes_.planes[0] + offset, codes_.steps + run,
          reinterpret_cast<const std::uint8_t*>(codes_.escaped + last_escaped_), count,
          settings_.block_values, output);
      break;
  }
}

float ChunkQuantiser::only_value() const {
  float value = 0.0F;
  put({Sink::kStore, &value, 0.0F, nullptr});
  return value;
}

}  // namespace fsl
