// A chore: fetching what is read next into the second cache level, as it is too much for the first.
#pragma once

#include <cstddef>

#include "kernels.hpp"

namespace fsl {

class Fetching {
 public:
  Fetching() = default;
  // Cache lines from `next` on, so many at a time.
  Fetching(const char* next, const char* end, std::size_t lines) : next_(next), end_(end), lines_(lines) {}

  // Valid as long as this object stays where it is.
  Chores chores() { return next_ == end_ ? Chores{} : Chores{[](void* context) { static_cast<Fetching*>(context)->fetch(); }, this}; }

 private:
  void fetch() {
    const std::size_t left = static_cast<std::size_t>(end_ - next_);
    const char* const stop = next_ + (left < 64 * lines_ ? left : 64 * lines_);
#if defined(__GNUC__)
    for (const char* line = next_; line < stop; line += 64) __builtin_prefetch(line, 0, 2);
#endif
    next_ = stop;
  }

  const char* next_ = nullptr;
  const char* end_ = nullptr;
  std::size_t lines_ = 0;
};

}  // namespace fsl
