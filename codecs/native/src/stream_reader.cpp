#include "stream_reader.hpp"

#include <algorithm>
#include <cstring>

#include "frame.hpp"

namespace fsl {
namespace {

std::uint8_t highest_bit(unsigned byte) {
  std::uint8_t bit = 0;
  while (byte >>= 1) ++bit;
  return bit;
}

}  // namespace

Status StreamReader::open(const Book& book, std::size_t values, const std::uint8_t*& position, const std::uint8_t* end, Lanes& lanes) {
  book_ = &book;
  state_ = &lanes;
  lanes_ = lanes_of(values);
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
    lanes.used[lane] = highest_bit(lanes.high[lane]);
  }
  return {};
}

Status StreamReader::read(const Kernels& kernels, std::size_t count, std::uint8_t* symbols, std::uint64_t* uncoded) {
  const std::size_t coded = std::min(count, coded_ - std::min(coded_, done_));
  if (coded > 0) {
    position_ = kernels.read_lanes(book_->code, position_, end_, coded, lanes_, *state_, symbols, uncoded);
    if (position_ == nullptr) return {Fault::kStreamEnds};
  }
  done_ += count;
  if (done_ < coded_) return {};
  if (coded > 0 || coded_ == 0) {
    const Status status = check_end();
    if (!status.ok()) return status;
  }
  if (coded % 64 != 0) uncoded[coded / 64] &= (std::uint64_t{1} << (coded % 64)) - 1;
  for (std::size_t i = coded; i < count; ++i) {
    symbols[i] = state_->low[(done_ - count + i) % lanes_];
    if (i % 64 == 0) uncoded[i / 64] = 0;
    uncoded[i / 64] |= static_cast<std::uint64_t>(symbols[i] == book_->code.mark) << (i % 64);
  }
  return {};
}

Status StreamReader::read_codes(const Kernels& kernels, std::size_t count, const TwoPlanes& below, std::uint8_t* codes, std::uint64_t* uncoded,
                                Ahead& ahead) {
  position_ = kernels.read_codes(book_->code, position_, end_, count, lanes_, *state_, below, codes, uncoded, ahead);
  if (position_ == nullptr) return {Fault::kStreamEnds};
  done_ += count;
  return {};
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
  return low >> book_->width == 0 ? Status{} : Status{Fault::kLaneSymbol, static_cast<std::uint64_t>(book_->width)};
}

}  // namespace fsl
