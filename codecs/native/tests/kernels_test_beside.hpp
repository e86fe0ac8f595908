// For kernels_test.cpp: a checksum that is computed while lanes are read.
#pragma once

#include <algorithm>
#include <string>

#include "kernels/kernels.hpp"
#include "kernels_test_values.hpp"

namespace {

// By definition: as zlib's, one bit after another.
std::uint32_t crc_by_bits(std::uint32_t value, const std::uint8_t* data, std::size_t count) {
  value = ~value;
  for (std::size_t i = 0; i < count; ++i) {
    value ^= data[i];
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ ((value & 1) != 0 ? 0xEDB88320U : 0U);
  }
  return ~value;
}

// Random bytes at any address, often with nothing after them, for a checksum beside other work.
// None for a path that does not compute one.
class SummedBeside {
 public:
  explicit SummedBeside(const fsl::Kernels& kernels)
      : kernels_(kernels),
        count_(fsl::kLeastBeside + below(2) * below(300) + below(2) * below(20000)),
        behind_(below(2) * below(64)),
        data_(count_ + behind_) {
    for (std::size_t i = 0; i < count_; ++i) data_.as()[i] = static_cast<std::uint8_t>(chance());
    if (kernels_.begin_checksum == nullptr) return;
    kernels_.begin_checksum(value_, data_.as(), count_, beside.checksum);
    begun_ = beside.checksum.next;
  }

  // rounds: the number of whole rounds of all lanes that were certainly read.
  void check(std::size_t rounds, const std::string& about) {
    if (kernels_.begin_checksum == nullptr) return;
    const fsl::Checksum& checksum = beside.checksum;
    if (checksum.next < begun_ || checksum.next > checksum.end ||
        checksum.end != data_.as() + count_)
      fail("what was summed up beside" + about);
    if (rounds > 0 && checksum.next == begun_ && checksum.end - begun_ >= 128)
      fail("nothing was summed up beside" + about);
    if (kernels_.end_checksum(beside.checksum) != crc_by_bits(value_, data_.as(), count_))
      fail("sum of " + std::to_string(count_) + " beside" + about);
  }

  fsl::Beside beside;

 private:
  const fsl::Kernels& kernels_;
  std::size_t count_;
  std::size_t behind_;
  Edge data_;
  std::uint32_t value_ = static_cast<std::uint32_t>(chance());
  const std::uint8_t* begun_ = nullptr;
};

}  // namespace
