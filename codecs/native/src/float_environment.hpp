// The arithmetic that defines the format, independent of the calling thread's settings:
// torch.set_flush_denormal(True), for instance, flushes subnormal numbers to zero.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <cfenv>
#endif

namespace fsl {

// Rounding to nearest even, subnormals at their value, no traps, for as long as this object lives.
class FloatEnvironment {
 public:
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

#if defined(__x86_64__)
  FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~FloatEnvironment() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  FloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatEnvironment() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
#endif
};

}  // namespace fsl
