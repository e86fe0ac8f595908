#include "entropy/stream_reader.hpp"

#include <algorithm>
#include <cstring>

#include "bits.hpp"
#include "bytes.hpp"

namespace fsl {

Status StreamReader::open(const CodeTable& table, std::size_t values, const std::uint8_t*& position,
                          const std::uint8_t* end, Lanes& lanes, std::size_t many_from) {
  table_ = &table;
  state_ = &lanes;
  lanes_ = lanes_of(values, many_from);
  coded_ = values - std::min(lanes_, values);
  done_ = 0;
  if (end - position < 4) return {Fault::kPayloadEnds};
  const std::size_t bytes = load32(position);
  position += 4;
  if (static_cast<std::size_t>(end - position) < bytes) return {Fault::kPayloadEnds};
  if (bytes < 2 * lanes_) return {Fault::kStreamEnds};
  position_ = position;
  end_ = position + bytes;
  position = end_;
  std::memcpy(lanes.low, position_, lanes_);
  std::memcpy(lanes.high, position_ + lanes_, lanes_);
  position_ += 2 * lanes_;
  for (std::size_t lane = 0; lane < lanes_; ++lane) {
    if (lanes.high[lane] == 0) return {Fault::kLaneEmpty};
    lanes.used[lane] = static_cast<std::uint8_t>(highest_bit(lanes.high[lane]));
  }
  return {};
}

// The number of the next `count` symbols that have code words.
std::size_t StreamReader::words_of(std::size_t count) const {
  return std::min(count, coded_ - std::min(coded_, done_));
}

// After `words` of `count` symbols; the lanes' last states are the others.
Status StreamReader::finish(std::size_t words, std::size_t count, const std::uint8_t*& listed,
                            std::uint8_t* symbols) {
  done_ += words;
  if (done_ < coded_) return {};
  if (words > 0 || coded_ == 0) {
    const Status status = check_end();
    if (!status.ok()) return status;
  }
  const std::size_t states = count - words;
  for (std::size_t i = 0; i < states; ++i) symbols[i] = state_->low[(done_ + i) & (lanes_ - 1)];
  done_ += states;
  const Code& code = table_->code;
  for (std::uint8_t* next = symbols; code.escapes; *next++ = *listed++) {
    next = static_cast<std::uint8_t*>(
        std::memchr(next, code.mark, static_cast<std::size_t>(symbols + states - next)));
    if (next == nullptr) break;
  }
  return {};
}

Status StreamReader::read(const Kernels& kernels, std::size_t count, const std::uint8_t*& listed,
                          std::uint8_t* symbols, Beside& beside) {
  const std::size_t words = words_of(count);
  if (words > 0)
    position_ = kernels.read_lanes(table_->code, position_, end_, words, lanes_, *state_, listed,
                                   symbols, beside);
  return position_ == nullptr ? Status{Fault::kStreamEnds}
                              : finish(words, count, listed, symbols + words);
}

Status StreamReader::read_codes(const Kernels& kernels, std::size_t count,
                                const std::uint8_t*& listed, const TwoPlanes& below,
                                CodesRead& read, Beside& beside) {
  std::uint8_t* const codes = read.codes;
  const std::size_t words = words_of(count);
  if (words > 0)
    position_ = kernels.read_codes(table_->code, position_, end_, words, lanes_, *state_, listed,
                                   below, read, beside);
  if (position_ == nullptr) return {Fault::kStreamEnds};
  // Symbols without words are joined from a whole byte of the planes on.
  const std::size_t whole = words & ~std::size_t{7};
  std::uint8_t last[7 + kMostLanes + kSlackBytes];
  std::uint8_t* symbol = last;
  for (std::size_t i = whole; i < words; ++i)
    *symbol++ = below.rotated ? codes[i] >> 1 & 0x3F : codes[i] >> 2;
  const Status status = finish(words, count, listed, symbol);
  if (status.ok() && words < count) {
    kernels.join(last, below.high + whole / 8, static_cast<std::size_t>(below.low - below.high),
                 count - whole, below.rotated, 2, codes + whole);
    read.largest = std::max(read.largest, kernels.largest_byte(codes + whole, count - whole, 0x7F));
  }
  return status;
}

bool StreamReader::reads_values(std::size_t count) const {
  return lanes_ == kMostLanes && count % kMostLanes == 0 && done_ + count < coded_;
}

Status StreamReader::read_float8(const Kernels& kernels, std::size_t count,
                                 const std::uint8_t*& listed, const TwoPlanes& below,
                                 const Float8Values& values, const Output& output,
                                 ValuesRead& found, Beside& beside) {
  position_ = kernels.read_float8(table_->code, position_, end_, count, *state_, listed, below,
                                  values, output, found, beside);
  done_ += count;
  return position_ != nullptr ? Status{} : Status{Fault::kStreamEnds};
}

Status StreamReader::read_uniform(const Kernels& kernels, std::size_t count,
                                  const std::uint8_t*& listed, const TwoPlanes& below,
                                  const UniformValues& values, const Output& output,
                                  ValuesRead& found, Beside& beside) {
  position_ = kernels.read_uniform(table_->code, position_, end_, count, *state_, listed, below,
                                   values, output, found, beside);
  done_ += count;
  return position_ != nullptr ? Status{} : Status{Fault::kStreamEnds};
}

Status StreamReader::check_end() const {
  if (position_ != end_) return {Fault::kStreamBytesLeft};
  unsigned used = 0;
  unsigned low = 0;
  for (std::size_t lane = 0; lane < lanes_; ++lane) {
    used |= state_->used[lane];
    low |= state_->low[lane];
  }
  if (used != 0) return {Fault::kLaneBitsLeft};
  return low >> table_->width == 0
             ? Status{}
             : Status{Fault::kLaneSymbol, static_cast<std::uint64_t>(table_->width)};
}

}  // namespace fsl
