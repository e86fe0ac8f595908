// The kernels in plain C++, for any little-endian machine: the reference for tests of the vector
// paths. Each file that includes this gets its own copy in the unnamed namespace's `plain`,
// compiled for the target that the file has set.
#include <cstring>

#include "bits.hpp"
#include "kernels/paths.hpp"
#include "kernels/plain/ranks.hpp"
#include "kernels/sparse.hpp"

namespace fsl {
namespace {
namespace plain {

constexpr std::uint32_t kMagnitude = 0x7FFFFFFF;

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

std::uint8_t byte(std::uint32_t value) { return static_cast<std::uint8_t>(value); }

std::uint8_t rotate_right(std::uint8_t code) {
  return byte(static_cast<std::uint32_t>(code >> 1 | code << 7));
}

// bf16 of fp32 bits, to nearest even. NaN keeps its sign and upper payload and becomes quiet.
std::uint16_t bfloat16_of(std::uint32_t bits) {
  if ((bits & kMagnitude) > 0x7F800000) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

void fold(std::uint32_t bits, std::uint32_t first_bits, Seen& seen) {
  const std::uint32_t magnitude = bits & kMagnitude;
  seen.largest_magnitude = magnitude > seen.largest_magnitude ? magnitude : seen.largest_magnitude;
  seen.differing_bits |= bits ^ first_bits;
}

void combine(const float* values_fp32, const std::uint16_t* values_bf16, const float* reference,
             const float* residual, std::size_t count, float* x) {
  for (std::size_t i = 0; i < count; ++i) {
    float value = values_fp32 != nullptr
                      ? values_fp32[i]
                      : float_of(static_cast<std::uint32_t>(values_bf16[i]) << 16);
    if (reference != nullptr) value -= reference[i];
    if (residual != nullptr) value += residual[i];
    x[i] = value;
  }
}

void look(const float* x, std::size_t count, std::uint32_t first_bits, Seen& seen) {
  for (std::size_t i = 0; i < count; ++i) fold(bits_of(x[i]), first_bits, seen);
}

// The largest magnitude of a run, folded into `seen`.
std::uint32_t look_at_run(const float* x, std::size_t count, std::uint32_t first_bits, Seen& seen) {
  Seen run;
  look(x, count, first_bits, run);
  seen.differing_bits |= run.differing_bits;
  if (run.largest_magnitude > seen.largest_magnitude)
    seen.largest_magnitude = run.largest_magnitude;
  return run.largest_magnitude;
}

// --- 8-bit floats

// Adding the power of two whose last mantissa bit is worth one step of the 8-bit format makes the
// fp32 adder round to that step. The step is that of the magnitude's exponent, at least that of the
// smallest normal number, so one expression gives normal and subnormal codes, with carries into the
// next exponent.
std::uint8_t float8_code(float scaled, const Float8& format) {
  const std::uint32_t bits = bits_of(scaled);
  const std::uint32_t magnitude = bits & kMagnitude;
  const std::uint32_t smallest = static_cast<std::uint32_t>(128 - format.exponent_bias) << 23;
  const std::uint32_t exponent =
      (magnitude & 0x7F800000) > smallest ? magnitude & 0x7F800000 : smallest;
  const std::uint32_t adder =
      exponent + (static_cast<std::uint32_t>(23 - format.mantissa_bits) << 23);
  const std::uint32_t significand = bits_of(float_of(magnitude) + float_of(adder)) - adder;
  return byte(((exponent - smallest) >> (23 - format.mantissa_bits)) + significand +
              (bits >> 24 & 0x80));
}

std::uint8_t scale_of(std::uint32_t largest, const Float8& format) {
  if (largest == 0) return 0;
  // Adding 0x1FFFFF carries into the exponent if and only if the significand is above 1.75.
  const int scale = static_cast<int>((largest + 0x1FFFFF) >> 23) - format.largest_exponent;
  return byte(
      static_cast<std::uint32_t>(scale > format.lowest_scale ? scale : format.lowest_scale));
}

void quantise_float8(const float* x, std::size_t count, const Float8& format,
                     std::size_t block_values, std::uint32_t first_bits, std::uint8_t* codes,
                     std::uint8_t* scales, Seen& seen, std::size_t) {
  for (std::size_t start = 0; start < count; start += block_values) {
    const std::size_t length = count - start < block_values ? count - start : block_values;
    const std::uint8_t scale = scale_of(look_at_run(x + start, length, first_bits, seen), format);
    *scales++ = scale;
    // 1 / 2^(scale - 127); any finite factor is right for a run of zeros.
    const float inverse =
        float_of(static_cast<std::uint32_t>(scale == 0 ? 127 : 254 - scale) << 23);
    for (std::size_t i = start; i < start + length; ++i)
      codes[i] = float8_code(x[i] * inverse, format);
  }
}

// --- uniform

constexpr std::uint32_t kQuarterPowers[4] = {0x3F800000, 0x3F9837F0, 0x3FB504F3,
                                             0x3FD744FD};  // 2^(i / 4)

// 2^(quarters / 4), exponent range checked by the caller.
float quarter_power(int quarters) {
  return float_of(kQuarterPowers[quarters & 3] + (static_cast<std::uint32_t>(quarters >> 2) << 23));
}

int exponent_of(std::uint32_t largest) {
  return largest >> 23 > 1 ? static_cast<int>(largest >> 23) : 1;
}

// The factor that brings the run's largest value below 2.
float normalizer_of(std::uint32_t largest) {
  return float_of(static_cast<std::uint32_t>(254 - exponent_of(largest)) << 23);
}

// The step index of a run with this sum of normalized squares.
int step_from_sum(float sum_of_squares, std::uint32_t largest, int step_log2,
                  std::size_t block_values) {
  const std::uint32_t sum = bits_of(sum_of_squares);
  const std::uint32_t mantissa = sum & 0x7FFFFF;
  int quarters = 4 * (exponent_of(largest) - 127) + 2 * (static_cast<int>(sum >> 23 & 0xFF) - 127) +
                 (mantissa >= 0x1837F0) + (mantissa >= 0x5744FD) - step_log2;
  for (std::size_t n = block_values; n > 1; n /= 2) quarters -= 2;
  return quarters < -504 ? -504 : quarters > 480 ? 480 : quarters;
}

int step_of(const float* x, std::size_t count, std::uint32_t largest, int step_log2,
            std::size_t block_values) {
  const float normalizer = normalizer_of(largest);
  float lanes[16] = {};
  for (std::size_t i = 0; i < count; ++i) {
    const float y = x[i] * normalizer;
    const float square = y * y;
    lanes[i & 15] += square;
  }
  for (int half = 8; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return step_from_sum(lanes[0], largest, step_log2, block_values);
}

template <bool kSparse>
std::size_t quantise_uniform(const float* x, std::size_t count, int step_log2,
                             std::size_t block_values, std::uint32_t first_bits,
                             std::uint8_t* codes, std::int16_t* steps, Seen& seen) {
  std::size_t escapes = 0;
  for (std::size_t start = 0; start < count; start += block_values) {
    const std::size_t length = count - start < block_values ? count - start : block_values;
    const std::uint32_t largest = look_at_run(x + start, length, first_bits, seen);
    if (largest == 0) {
      *steps++ = kZeroRun;
      std::memset(codes + start, 128, length);
      continue;
    }
    int step = step_of(x + start, length, largest, step_log2, block_values);
    if (kSparse) {
      std::size_t nonzero = 0;
      for (std::size_t i = start; i < start + length; ++i)
        nonzero += (bits_of(x[i]) & kMagnitude) != 0;
      step = coarser_step(step, nonzero, block_values);
    }
    *steps++ = static_cast<std::int16_t>(step);
    const float inverse = quarter_power(-step);
    for (std::size_t i = start; i < start + length; ++i) {
      const float product = x[i] * inverse;
      // Below 127.5 the nearest-even integer is at most 127; 1.5 * 2^23 makes the adder round to
      // integers.
      const bool fits = float_of(bits_of(product) & kMagnitude) < 127.5F;
      const std::uint32_t nearest = bits_of(product + 12582912.0F) + 128;
      codes[i] = fits ? byte(nearest) : 0;
      escapes += !fits;
    }
  }
  return escapes;
}

// --- rotated byte planes

void cut_bfloat16(const float* x, std::size_t count, std::uint32_t first_bits,
                  std::uint8_t* const planes[2], Seen& seen) {
  look(x, count, first_bits, seen);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = bits_of(x[i]);
    const std::uint32_t code = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    planes[0][i] = byte(code >> 7);
    planes[1][i] = byte(code << 1 | code >> 15);
  }
}

void cut_float32(const float* x, std::size_t count, std::uint32_t first_bits,
                 std::uint8_t* const planes[4], Seen& seen) {
  look(x, count, first_bits, seen);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = bits_of(x[i]);
    const std::uint32_t rotated = bits << 1 | bits >> 31;
    planes[0][i] = byte(rotated >> 24);
    planes[1][i] = byte(rotated >> 16);
    planes[2][i] = byte(rotated >> 8);
    planes[3][i] = byte(rotated);
  }
}

// --- maps, bit planes

void map(const std::uint8_t* bytes, std::size_t count, const std::uint8_t* entries,
         std::uint8_t* mapped) {
  for (std::size_t i = 0; i < count; ++i) mapped[i] = entries[bytes[i]];
}

// One bit of each of `count` bytes, padded to whole bytes; bit_of gives 0 or 1.
template <typename BitOf>
std::uint8_t* pack_bits(std::size_t count, std::uint8_t* out, BitOf bit_of) {
  for (std::size_t i = 0; i < count; i += 8) {
    const std::size_t end = count - i < 8 ? count - i : 8;
    std::uint32_t packed = 0;
    for (std::size_t j = 0; j < end; ++j) packed |= static_cast<std::uint32_t>(bit_of(i + j)) << j;
    *out++ = byte(packed);
  }
  return out;
}

std::size_t write_bit_planes(const std::uint8_t* codes, std::size_t count, bool rotated, int width,
                             std::uint8_t* out) {
  std::uint8_t* position = out;
  for (int bit = width - 1; bit >= 0; --bit) {
    const int place = rotated ? (bit + 7) & 7 : bit;
    position = pack_bits(count, position, [=](std::size_t i) { return codes[i] >> place & 1; });
  }
  return static_cast<std::size_t>(position - out);
}

// --- lanes

// Whether a lane gives or takes a byte is unpredictable, so shifts decide it, not branches.
std::uint8_t* write_lanes(const Code& code, const std::uint8_t* from, int shift, int width,
                          std::size_t count, std::size_t lanes, Lanes& state, std::uint8_t* front,
                          std::uint64_t* uncoded, Ahead&) {
  const std::uint32_t mask = (1U << width) - 1;
  std::uint64_t word = 0;
  for (std::size_t i = count; i-- > 0;) {
    const std::size_t lane = i & (lanes - 1);
    const std::size_t symbol = static_cast<std::uint32_t>(from[i] >> shift) & mask;
    const std::uint32_t length = code.lengths[symbol];
    word = word << 1 | length >> 7;
    uncoded[i / 64] = word;
    const std::uint32_t used = state.used[lane];
    const std::uint32_t high = (state.high[lane] & ((1U << used) - 1)) |
                               static_cast<std::uint32_t>(code.words[symbol]) << used;
    const std::uint32_t held = state.low[lane] | high << 8;
    const std::uint32_t grown = used + (length & 15);
    const std::uint32_t goes = grown >> 3;  // 0 or 1 bytes
    front[-1] = byte(held);
    front -= goes;
    const std::uint32_t kept = held >> (8 * goes);
    state.low[lane] = byte(kept);
    state.high[lane] = byte(kept >> 8);
    state.used[lane] = byte(grown & 7);
  }
  return front;
}

// Reads a symbol from its lane, which takes the `next` byte if it runs short. Returns the bytes
// taken, 0 or 1.
std::uint32_t read_symbol(const Code& code, std::uint8_t next, std::size_t lane, Lanes& state,
                          std::uint8_t& symbol) {
  const std::uint32_t held = static_cast<std::uint32_t>(state.high[lane] << 8 | state.low[lane]);
  const std::uint32_t window = held >> state.used[lane] & 0xFF;
  symbol = code.symbol_of_window[window];
  const std::uint32_t left =
      state.used[lane] + 8U - code.length_of_window[window];  // 8 more than are left
  const std::uint32_t comes = (left >> 3) ^ 1;
  const std::uint32_t grown = held << (8 * comes) | (next & (0 - comes));
  state.low[lane] = byte(grown);
  state.high[lane] = byte(grown >> 8);
  state.used[lane] = byte(left & 7);
  return comes;
}

const std::uint8_t* read_lanes(const Code& code, const std::uint8_t* in, const std::uint8_t* end,
                               std::size_t count, std::size_t lanes, Lanes& state,
                               const std::uint8_t*& listed, std::uint8_t* symbols, Beside&) {
  const auto complete = [&](std::uint8_t& symbol) {
    const bool is_listed = code.escapes && symbol == code.mark;
    symbol = is_listed ? *listed : symbol;
    listed += is_listed;
  };
  std::size_t i = 0;
  for (; i < count && in != end; ++i) {
    in += read_symbol(code, *in, i & (lanes - 1), state, symbols[i]);
    complete(symbols[i]);
  }
  for (; i < count; ++i) {
    if (read_symbol(code, 0, i & (lanes - 1), state, symbols[i]) != 0) return nullptr;
    complete(symbols[i]);
  }
  return in;
}

void join(const std::uint8_t* symbols, const std::uint8_t* in, std::size_t plane_bytes,
          std::size_t count, bool rotated, int width, std::uint8_t* codes) {
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t code = symbols != nullptr ? symbols[i] : 0;
    for (int plane = 0; plane < width; ++plane) {
      code = code << 1 | (in[static_cast<std::size_t>(plane) * plane_bytes + i / 8] >> (i & 7) & 1);
    }
    codes[i] = rotated ? rotate_right(byte(code)) : byte(code);
  }
}

const std::uint8_t* read_codes(const Code& code, const std::uint8_t* in, const std::uint8_t* end,
                               std::size_t count, std::size_t lanes, Lanes& state,
                               const std::uint8_t*& listed, const TwoPlanes& below, CodesRead& read,
                               Beside& beside) {
  std::uint8_t* const codes = read.codes;
  const std::uint8_t* const next =
      read_lanes(code, in, end, count, lanes, state, listed, codes, beside);
  if (next == nullptr) return nullptr;
  join(codes, below.high, static_cast<std::size_t>(below.low - below.high), count, below.rotated, 2,
       codes);
  for (std::size_t i = 0; i < count; ++i)
    read.largest = (codes[i] & 0x7F) > read.largest ? codes[i] & 0x7F : read.largest;
  return next;
}

}  // namespace plain
}  // namespace
}  // namespace fsl

#include "kernels/plain/groups.hpp"
#include "kernels/plain/sparse.hpp"

namespace fsl {
namespace {
namespace plain {

// --- decoding

// Writes value(i), i from 0 to count, to places `start + i` of the sink.
template <typename Value>
void put(const Output& output, std::size_t start, std::size_t count, Value value) {
  float* out = static_cast<float*>(output.out) + start;
  switch (output.sink) {
    case Sink::kStore:
    case Sink::kStream:
      for (std::size_t i = 0; i < count; ++i) out[i] = value(i);
      break;
    case Sink::kAccumulate:
      for (std::size_t i = 0; i < count; ++i) {
        const float product = output.weight * value(i);
        out[i] += product;
      }
      break;
    case Sink::kBfloat16: {
      std::uint16_t* words = static_cast<std::uint16_t*>(output.out) + start;
      for (std::size_t i = 0; i < count; ++i) words[i] = bfloat16_of(bits_of(value(i)));
      break;
    }
    case Sink::kResidual:
      for (std::size_t i = 0; i < count; ++i) out[i] = output.source[start + i] - value(i);
      break;
  }
}

void dequantise_float8(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t count,
                       const Float8& format, std::size_t block_values, const Output& output) {
  // The code's bits as exponent and mantissa of an fp32 number, which is too small by this power of
  // two; multiplying by it also normalizes subnormal codes.
  const float bias = float_of(static_cast<std::uint32_t>(254 - format.exponent_bias) << 23);
  const int shift = 23 - format.mantissa_bits;
  for (std::size_t start = 0; start < count; start += block_values) {
    const std::size_t length = count - start < block_values ? count - start : block_values;
    const float scale = float_of(static_cast<std::uint32_t>(*scales++) << 23);
    const std::uint8_t* run = codes + start;
    put(output, start, length, [=](std::size_t i) {
      const std::uint32_t code = run[i];
      return float_of((code & 0x80) << 24 | (code & 0x7F) << shift) * bias * scale;
    });
  }
}

void dequantise_uniform(const std::uint8_t* codes, const std::int16_t* steps,
                        const std::uint8_t* escapes, std::size_t count, std::size_t block_values,
                        const Output& output) {
  for (std::size_t start = 0; start < count; start += block_values) {
    const std::size_t length = count - start < block_values ? count - start : block_values;
    const float step = quarter_power(*steps++);
    put(output, start, length, [&](std::size_t i) {
      if (codes[start + i] != 0) return static_cast<float>(codes[start + i] - 128) * step;
      float value;
      std::memcpy(&value, escapes, 4);
      escapes += 4;
      return value;
    });
  }
}

bool join_bfloat16(const std::uint8_t* const planes[2], std::size_t count, const Output& output) {
  std::uint8_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) largest = planes[0][i] > largest ? planes[0][i] : largest;
  put(output, 0, count, [=](std::size_t i) {
    const std::uint32_t rotated = static_cast<std::uint32_t>(planes[0][i]) << 8 | planes[1][i];
    return float_of(rotated >> 1 << 16 | rotated << 31);
  });
  return largest < 0xFF;
}

void join_float32(const std::uint8_t* const planes[4], std::size_t count, const Output& output,
                  Seen& seen) {
  put(output, 0, count, [&](std::size_t i) {
    const std::uint32_t rotated = static_cast<std::uint32_t>(planes[0][i]) << 24 |
                                  static_cast<std::uint32_t>(planes[1][i]) << 16 |
                                  static_cast<std::uint32_t>(planes[2][i]) << 8 | planes[3][i];
    const std::uint32_t bits = rotated >> 1 | rotated << 31;
    fold(bits, 0, seen);
    return float_of(bits);
  });
}

void copy_float32(const std::uint8_t* bytes, std::size_t count, const Output& output, Seen& seen) {
  put(output, 0, count, [&](std::size_t i) {
    std::uint32_t bits;
    std::memcpy(&bits, bytes + 4 * i, 4);
    fold(bits, 0, seen);
    return float_of(bits);
  });
}

// --- bytes

std::uint8_t largest_byte(const std::uint8_t* bytes, std::size_t count, std::uint8_t mask) {
  std::uint8_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint8_t masked = bytes[i] & mask;
    largest = masked > largest ? masked : largest;
  }
  return largest;
}

std::size_t count_byte(const std::uint8_t* bytes, std::size_t count, std::uint8_t wanted) {
  std::size_t found = 0;
  for (std::size_t i = 0; i < count; ++i) found += bytes[i] == wanted;
  return found;
}

std::size_t pick(const std::uint8_t* bytes, const std::uint64_t* bitmap, std::size_t words,
                 std::uint8_t* picked) {
  return list_bits(bitmap, words,
                   [=](std::size_t index, std::size_t place) { picked[index] = bytes[place]; });
}

std::size_t find_byte(const std::uint8_t* bytes, std::size_t count, std::uint8_t wanted,
                      std::uint16_t* positions) {
  std::size_t found = 0;
  const std::uint8_t* next = bytes;
  while (const void* const here =
             std::memchr(next, wanted, count - static_cast<std::size_t>(next - bytes))) {
    next = static_cast<const std::uint8_t*>(here);
    positions[found++] = static_cast<std::uint16_t>(next++ - bytes);
  }
  return found;
}

// --- CRC

// Eight bytes a step, with one table per place (Kounavis and Berry 2005).
struct CrcTables {
  std::uint32_t of[8][256];
};

constexpr CrcTables make_crc_tables() {
  CrcTables tables{};
  for (std::uint32_t value = 0; value < 256; ++value) {
    std::uint32_t crc = value;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xEDB88320U : 0U);
    tables.of[0][value] = crc;
  }
  for (int place = 1; place < 8; ++place) {
    for (int value = 0; value < 256; ++value) {
      const std::uint32_t crc = tables.of[place - 1][value];
      tables.of[place][value] = crc >> 8 ^ tables.of[0][crc & 0xFF];
    }
  }
  return tables;
}

constexpr CrcTables kCrc = make_crc_tables();

std::uint32_t crc32(std::uint32_t value, const std::uint8_t* data, std::size_t count) {
  std::uint32_t crc = ~value;
  for (; count >= 8; data += 8, count -= 8) {
    std::uint32_t low;
    std::uint32_t high;
    std::memcpy(&low, data, 4);
    std::memcpy(&high, data + 4, 4);
    low ^= crc;
    crc = kCrc.of[7][low & 0xFF] ^ kCrc.of[6][low >> 8 & 0xFF] ^ kCrc.of[5][low >> 16 & 0xFF] ^
          kCrc.of[4][low >> 24] ^ kCrc.of[3][high & 0xFF] ^ kCrc.of[2][high >> 8 & 0xFF] ^
          kCrc.of[1][high >> 16 & 0xFF] ^ kCrc.of[0][high >> 24];
  }
  for (; count > 0; ++data, --count) crc = crc >> 8 ^ kCrc.of[0][(crc ^ *data) & 0xFF];
  return ~crc;
}

// The checksum of the bytes that were copied.
template <auto kCrc32>
std::uint32_t copied(std::uint32_t value, const std::uint8_t* from, std::size_t count,
                     std::uint8_t* to) {
  std::memcpy(to, from, count);
  return kCrc32(value, to, count);
}

}  // namespace plain
}  // namespace
}  // namespace fsl
