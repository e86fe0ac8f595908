// The loops over values, one implementation per instruction set; all other code is written once.
//
// A kernel works on an inner block of at most kBlockValues values, or a piece of it, so that its
// buffers stay in the first two cache levels; write_lanes and the functions of bytes take any
// number. All implementations give the same bytes (docs/WIRE.md, "Codec frame"): integer
// arithmetic, or fp32 operations in the order stated here, rounded to nearest even, never fused
// (compiled with -ffp-contract=off), with subnormals at their value.
//
// Slack: every input of our own (except values) may be read, and every output except `values`,
// `accumulator` and `residual` may be written, up to kSlackBytes past its end. Bytes of a peer are
// never read past `end`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/lanes.hpp"

namespace fsl {

inline constexpr std::size_t kBlockValues = 16384;
inline constexpr std::size_t kSlackBytes = 64;
inline constexpr int kLastRank = 15;
inline constexpr std::size_t kLeastBeside = 256;
inline constexpr std::size_t kRankBytes =
    kBlockValues * kLastRank / 8;  // of a block's values, if all have the last rank

enum class Path : int { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };

// An 8-bit float format; see docs/WIRE.md for the meaning of scales.
struct Float8 {
  int mantissa_bits;          // 3 or 2
  int exponent_bias;          // 7 or 15
  int largest_exponent;       // 8 or 15
  int lowest_scale;           // 10 or 17
  std::uint8_t special_code;  // first magnitude code that is not a finite number: 0x7F or 0x7C
};

// Properties of fp32 values, folded over blocks by the caller.
struct Seen {
  std::uint32_t largest_magnitude = 0;  // of the bit patterns without their sign
  std::uint32_t differing_bits =
      0;  // some bits of bits XOR first_bits; 0 only if all values equal the first
};

// Memory that will be read next, or written when decoding. A kernel that computes for long
// prefetches some of it, so that memory is not idle. Prefetching never faults.
struct Ahead {
  const char* next = nullptr;
  const char* end = nullptr;
  bool near = false;  // into the first cache level, else into the second
};

// A CRC-32 of bytes that are read anyway. A kernel with idle cycles takes in any number of them, in
// order, and end_checksum() the rest.
struct Checksum {
  const std::uint8_t* next = nullptr;  // from here on
  const std::uint8_t* end = nullptr;
  alignas(64) std::uint8_t sums[2 * 64];  // the bytes taken in, folded into whole vectors in turns
};

// Work that is done while lanes are read.
struct Beside {
  Ahead ahead;
  Checksum checksum;
};

// Whether the first cache level has room for far prefetches: 48 KiB have (Zen 5), 32 have not (Zen
// 4). False if unknown.
bool has_roomy_first_level();

// What is done with decoded values.
enum class Sink : int {
  kStore,       // out fp32
  kStream,      // out fp32, with non-temporal stores where they help (the caller fences once at the
                // end)
  kAccumulate,  // out fp32 += weight * value, each operation rounded; of two NaN, either may remain
  kBfloat16,    // out u16: bf16, rounded to nearest even
  kResidual,    // out fp32 = source - value
};

struct Output {
  Sink sink;
  void* out;
  float weight;         // kAccumulate
  const float* source;  // kResidual
};

// Decoding of 8-bit float codes: a scale per run of block_values, from the first code on, none
// below the format's lowest.
struct Float8Values {
  const Float8& format;
  const std::uint8_t* scales;
  std::size_t block_values;
};

// The same for uniform codes: a step per run, and at most `left` escaped values, unaligned
// little-endian fp32.
struct UniformValues {
  const std::int16_t* steps;
  std::size_t block_values;
  const std::uint8_t* escapes;
  std::size_t left;
};

// Results of writing values. 8-bit floats: the largest code without sign. Uniform: the number of
// escaped values needed, whether they exist or not, and whether all existing ones are finite.
struct ValuesRead {
  std::uint8_t largest_code = 0;
  std::size_t escapes = 0;
  bool finite = true;
};

struct Kernels {
  // x[i] = value - reference[i] + residual[i], in this order; reference and residual may be null.
  // Exactly one of values_fp32 and values_bf16 is given.
  void (*combine)(const float* values_fp32, const std::uint16_t* values_bf16,
                  const float* reference, const float* residual, std::size_t count, float* x);

  // Folds the block into `seen`.
  void (*look)(const float* x, std::size_t count, std::uint32_t first_bits, Seen& seen);

  // Writes codes (count) and a scale byte per run of block_values (a power of two from 16 to 1024);
  // scale 0 for a run of zeros. Values that reach the format's escape magnitude give arbitrary
  // codes; `seen` shows them. Folds the block into `seen`. Memory `further` bytes after each value
  // may be prefetched; 0 if the values are not part of a long row.
  void (*quantise_float8)(const float* x, std::size_t count, const Float8& format,
                          std::size_t block_values, std::uint32_t first_bits, std::uint8_t* codes,
                          std::uint8_t* scales, Seen& seen, std::size_t further);

  // Uniform: writes codes and a step index per run (docs/WIRE.md, "Uniform codes"), kZeroRun for a
  // run of zeros. Returns the number of values whose code is the escape (0).
  std::size_t (*quantise_uniform)(const float* x, std::size_t count, int step_log2,
                                  std::size_t block_values, std::uint32_t first_bits,
                                  std::uint8_t* codes, std::int16_t* steps, Seen& seen);
  // The same with the steps of a sparse chunk.
  std::size_t (*quantise_sparse)(const float* x, std::size_t count, int step_log2,
                                 std::size_t block_values, std::uint32_t first_bits,
                                 std::uint8_t* codes, std::int16_t* steps, Seen& seen);

  // Writes bf16 rounded to nearest even, or fp32, as rotated byte planes: planes[0] exponents ...
  // last plane with the sign lowest.
  void (*cut_bfloat16)(const float* x, std::size_t count, std::uint32_t first_bits,
                       std::uint8_t* const planes[2], Seen& seen);
  void (*cut_float32)(const float* x, std::size_t count, std::uint32_t first_bits,
                      std::uint8_t* const planes[4], Seen& seen);

  // mapped[i] = entries[bytes[i]], with 256 entries.
  void (*map)(const std::uint8_t* bytes, std::size_t count, const std::uint8_t* entries,
              std::uint8_t* mapped);

  // Writes bit planes of the lowest `width` bits of the (rotated) codes, highest first, each padded
  // to whole bytes; returns the bytes written.
  std::size_t (*write_bit_planes)(const std::uint8_t* codes, std::size_t count, bool rotated,
                                  int width, std::uint8_t* out);

  // Writes ranks from 0 to `last`, at most kLastRank: for each rank but the last, a bit per number
  // of at least this rank, in order, 1 if it is higher. Bits from the lowest of a byte on, the last
  // byte padded; returns the bytes written.
  std::size_t (*write_ranks)(const std::uint8_t* ranks, std::size_t count, int last,
                             std::uint8_t* out);

  // The inverse, from at most end - in bytes; returns the first byte not read, or null if they do
  // not suffice.
  const std::uint8_t* (*read_ranks)(const std::uint8_t* in, const std::uint8_t* end,
                                    std::size_t count, int last, std::uint8_t* ranks);

  // Writes the words of symbols[i] = from[i] >> shift & (2^width - 1), the last one first, to the
  // lanes i mod `lanes`, and the lanes' bytes before `front`; returns the new front. At most
  // `count` bytes; up to kSlackBytes before them may be overwritten. Bit i % 64 of uncoded[i / 64]
  // is set if the symbol has no code; bits of a last word past `count` are arbitrary. shift is 0 if
  // width is 8; below six bits, from[i] >> shift is the symbol, without bits above.
  std::uint8_t* (*write_lanes)(const Code& code, const std::uint8_t* from, int shift, int width,
                               std::size_t count, std::size_t lanes, Lanes& state,
                               std::uint8_t* front, std::uint64_t* uncoded, Ahead& ahead);

  // The inverse, from the first symbol on: `count` symbols from at most end - in bytes; returns the
  // first byte not read, or null if they do not suffice (the lanes are then undefined). Symbols
  // without a code come from `listed`, which advances; up to count + kSlackBytes bytes are read
  // there, even without such symbols.
  const std::uint8_t* (*read_lanes)(const Code& code, const std::uint8_t* in,
                                    const std::uint8_t* end, std::size_t count, std::size_t lanes,
                                    Lanes& state, const std::uint8_t*& listed,
                                    std::uint8_t* symbols, Beside& beside);

  // read_lanes and join in one pass, for symbols of six bits above two planes.
  const std::uint8_t* (*read_codes)(const Code& code, const std::uint8_t* in,
                                    const std::uint8_t* end, std::size_t count, std::size_t lanes,
                                    Lanes& state, const std::uint8_t*& listed,
                                    const TwoPlanes& below, CodesRead& read, Beside& beside);

  // read_codes and dequantise_float8 in one pass, for a multiple of kMostLanes values in runs of at
  // least 64, on that many lanes; sets found.largest_code. Null if a path gains nothing: values are
  // written while lanes wait for each other.
  const std::uint8_t* (*read_float8)(const Code& code, const std::uint8_t* in,
                                     const std::uint8_t* end, std::size_t count, Lanes& state,
                                     const std::uint8_t*& listed, const TwoPlanes& below,
                                     const Float8Values& values, const Output& output,
                                     ValuesRead& found, Beside& beside);
  // The same with dequantise_uniform, runs of any length; sets found.escapes and found.finite. Null
  // if read_float8 is.
  const std::uint8_t* (*read_uniform)(const Code& code, const std::uint8_t* in,
                                      const std::uint8_t* end, std::size_t count, Lanes& state,
                                      const std::uint8_t*& listed, const TwoPlanes& below,
                                      const UniformValues& values, const Output& output,
                                      ValuesRead& found, Beside& beside);

  // codes[i] = unrotate(symbols[i] << width | the bits of `width` planes), the first plane at `in`,
  // each plane_bytes after the one before; symbols may be null (no upper plane). The caller has
  // checked that each plane has ceil(count / 8) bytes; there is no slack after the last.
  void (*join)(const std::uint8_t* symbols, const std::uint8_t* in, std::size_t plane_bytes,
               std::size_t count, bool rotated, int width, std::uint8_t* codes);

  // Groups of `size` (2 or 4) uniform codes as symbols, and back (docs/WIRE.md, "Groups"). The last
  // group is filled up with zeros; up to size - 1 codes more are written. Bit i % 64 of listed[i /
  // 64] is set if code i has no digit. Such codes come from `listed`, which advances; up to count +
  // kSlackBytes bytes are read there.
  void (*group)(const std::uint8_t* codes, std::size_t count, int size, std::uint8_t* symbols,
                std::uint64_t* listed);
  void (*ungroup)(const std::uint8_t* symbols, std::size_t count, int size,
                  const std::uint8_t*& listed, std::uint8_t* codes);

  // Sets bit i % 64 of bitmap[i / 64] if bytes[i] is not `zero`; bits past `count` are 0. And the
  // inverse of mark() and pick(): the picked bytes go where bits are set, `zero` elsewhere. Both
  // take any number, and return that of bits set.
  std::size_t (*mark)(const std::uint8_t* bytes, std::size_t count, std::uint8_t zero,
                      std::uint64_t* bitmap);
  std::size_t (*spread)(const std::uint8_t* picked, const std::uint64_t* bitmap, std::size_t count,
                        std::uint8_t zero, std::uint8_t* bytes);

  // The number of bits set in `words` words.
  std::size_t (*count_ones)(const std::uint64_t* bitmap, std::size_t words);

  // Writes the codes' values, which may be infinite with the highest scale; codes that are not
  // numbers give arbitrary values.
  void (*dequantise_float8)(const std::uint8_t* codes, const std::uint8_t* scales,
                            std::size_t count, const Float8& format, std::size_t block_values,
                            const Output& output);
  // The same for uniform. Escaped values (code 0) come from `escapes` (unaligned little-endian
  // fp32), in order; the caller has checked their number.
  void (*dequantise_uniform)(const std::uint8_t* codes, const std::int16_t* steps,
                             const std::uint8_t* escapes, std::size_t count,
                             std::size_t block_values, const Output& output);
  // Writes the values of rotated byte planes. bf16: false if one is NaN or infinite. fp32: folds
  // them into `seen`.
  bool (*join_bfloat16)(const std::uint8_t* const planes[2], std::size_t count,
                        const Output& output);
  void (*join_float32)(const std::uint8_t* const planes[4], std::size_t count, const Output& output,
                       Seen& seen);
  // Writes plain fp32 values (unaligned bytes).
  void (*copy_float32)(const std::uint8_t* bytes, std::size_t count, const Output& output,
                       Seen& seen);

  // The largest of bytes & mask, 0 if there are none; and the number of bytes equal to `byte`. No
  // slack after the bytes.
  std::uint8_t (*largest_byte)(const std::uint8_t* bytes, std::size_t count, std::uint8_t mask);
  std::size_t (*count_byte)(const std::uint8_t* bytes, std::size_t count, std::uint8_t byte);
  // Picks the bytes whose bits are set in a bitmap of `words` words, in order; returns their
  // number. Fast for few.
  std::size_t (*pick)(const std::uint8_t* bytes, const std::uint64_t* bitmap, std::size_t words,
                      std::uint8_t* picked);
  // The places of bytes equal to `byte`, in order (count at most kBlockValues); returns their
  // number. Fast for few.
  std::size_t (*find_byte)(const std::uint8_t* bytes, std::size_t count, std::uint8_t byte,
                           std::uint16_t* positions);

  // CRC-32 (0xEDB88320) continued from `value`, as zlib's crc32().
  std::uint32_t (*crc32)(std::uint32_t value, const std::uint8_t* data, std::size_t count);

  // The same, of bytes that it copies in the same time.
  std::uint32_t (*copy_crc32)(std::uint32_t value, const std::uint8_t* from, std::size_t count,
                              std::uint8_t* to);

  // The same for at least kLeastBeside bytes, computed while lanes are read; end_checksum gives
  // crc32's result. Both null if a path gains nothing: while lanes wait for each other, a checksum
  // costs little.
  void (*begin_checksum)(std::uint32_t value, const std::uint8_t* data, std::size_t count,
                         Checksum& checksum);
  std::uint32_t (*end_checksum)(Checksum& checksum);

  Path path;
};

inline constexpr std::int16_t kZeroRun = INT16_MIN;

// The kernels of a path; null if this machine or this build lacks it.
const Kernels* kernels_of(Path path);

}  // namespace fsl
