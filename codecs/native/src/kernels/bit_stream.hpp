// A bit stream, from the lowest bit of a byte on. In an unnamed namespace, because each path
// compiles its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace fsl {
namespace {

// Eight bytes past the last one may be written.
class BitWriter {
 public:
  explicit BitWriter(std::uint8_t* out) : start_(out), out_(out) {}

  // The lowest `count` bits, at most 64; those above are zero.
  void put(std::uint64_t bits, std::size_t count) {
    word_ |= bits << filled_;
    filled_ += count;
    if (filled_ < 64) return;
    std::memcpy(out_, &word_, 8);
    out_ += 8;
    filled_ -= 64;
    word_ = filled_ == 0 ? 0 : bits >> (count - filled_);
  }

  // Bytes written.
  std::size_t finish() {
    std::memcpy(out_, &word_, 8);
    return static_cast<std::size_t>(out_ - start_) + (filled_ + 7) / 8;
  }

 private:
  const std::uint8_t* start_;
  std::uint8_t* out_;
  std::uint64_t word_ = 0;
  std::size_t filled_ = 0;
};

// Eight bytes past those of the last bit taken may be read.
class BitReader {
 public:
  explicit BitReader(const std::uint8_t* in) : in_(in) {}

  // The next `count` bits, at most 64.
  std::uint64_t take(std::size_t count) {
    const std::size_t shift = position_ % 8;
    std::uint64_t low;
    std::uint64_t high;
    std::memcpy(&low, in_ + position_ / 8, 8);
    std::memcpy(&high, in_ + position_ / 8 + 8, 8);
    position_ += count;
    const std::uint64_t bits = low >> shift | high << 1 << (63 - shift);
    return count < 64 ? bits & ((std::uint64_t{1} << count) - 1) : bits;
  }

  // The number of bytes of which bits were taken.
  std::size_t bytes() const { return (position_ + 7) / 8; }

 private:
  const std::uint8_t* in_;
  std::size_t position_ = 0;  // in bits
};

inline constexpr std::size_t kBitSlackBytes = 16;

// `in` if it holds `most` bytes and slack; else a copy in `room`, padded with zeros.
inline const std::uint8_t* with_slack(const std::uint8_t* in, const std::uint8_t* end,
                                      std::size_t most, std::uint8_t* room) {
  const std::size_t there = static_cast<std::size_t>(end - in);
  if (there >= most + kBitSlackBytes) return in;
  const std::size_t kept = there < most ? there : most;
  std::memcpy(room, in, kept);
  std::memset(room + kept, 0, most + kBitSlackBytes - kept);
  return room;
}

}  // namespace
}  // namespace fsl
