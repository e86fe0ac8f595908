// Working memory that is kept between calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

#include "kernels/kernels.hpp"

namespace fsl {

// Memory that grows and never shrinks, on a cache line. Growing loses its content.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { release(); }

  // At least `bytes` and slack. Throws std::bad_alloc.
  std::uint8_t* at_least(std::size_t bytes) {
    if (bytes + kSlackBytes > size_) {
      release();
      memory_ =
          static_cast<std::uint8_t*>(::operator new(bytes + kSlackBytes, std::align_val_t{64}));
      size_ = bytes + kSlackBytes;
    }
    return memory_;
  }

 private:
  void release() {
    if (memory_ != nullptr) ::operator delete(memory_, std::align_val_t{64});
    memory_ = nullptr;
    size_ = 0;
  }

  std::uint8_t* memory_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace fsl
