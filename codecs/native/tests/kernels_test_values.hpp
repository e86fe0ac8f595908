// Memory, values and comparisons for kernels_test.cpp.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

namespace {

std::mt19937_64 chance(1);

std::size_t below(std::size_t end) { return end == 0 ? 0 : chance() % end; }

[[noreturn]] void fail(const std::string& text) {
  std::printf("FAILED: %s\n", text.c_str());
  std::exit(1);
}

// Memory of `bytes` whose end, including `slack`, borders on a page that faults.
class Edge {
 public:
  explicit Edge(std::size_t bytes, std::size_t slack = 0) : bytes_(bytes) {
    const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    mapped_ = (bytes + slack + 2 * page - 1) / page * page + page;
    base_ = static_cast<std::uint8_t*>(
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + mapped_ - page, page, PROT_NONE) != 0)
      fail("no memory");
    data_ = base_ + mapped_ - page - slack - bytes;
    std::memset(base_, 0xA5, mapped_ - page);
  }
  Edge(const Edge&) = delete;
  Edge& operator=(const Edge&) = delete;
  ~Edge() { munmap(base_, mapped_); }

  template <typename T = std::uint8_t>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }

  void check_front(const char* what) const {
    for (const std::uint8_t* p = std::max(base_, data_ - 256); p < data_; ++p) {
      if (*p != 0xA5) fail(std::string(what) + ": written in front of the buffer");
    }
  }

 private:
  std::size_t bytes_;
  std::size_t mapped_ = 0;
  std::uint8_t* base_ = nullptr;
  std::uint8_t* data_ = nullptr;
};

void same(const void* a, const void* b, std::size_t bytes, const std::string& what) {
  const auto* left = static_cast<const std::uint8_t*>(a);
  const auto* right = static_cast<const std::uint8_t*>(b);
  for (std::size_t i = 0; i < bytes; ++i) {
    if (left[i] != right[i]) {
      fail(what + ": byte " + std::to_string(i) + " of " + std::to_string(bytes) + " is " +
           std::to_string(right[i]) + ", not " + std::to_string(left[i]));
    }
  }
}

float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// A bf16 output of odd length is not aligned for floats.
float float_at(const std::uint8_t* bytes) {
  float value;
  std::memcpy(&value, bytes, 4);
  return value;
}

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// Values of many kinds; kinds from 4 on include values that escape.
void fill(float* x, std::size_t count, int kind) {
  std::normal_distribution<float> normal;
  float row = 1;
  for (std::size_t i = 0; i < count; ++i) {
    if (i % 64 == 0)
      row = std::ldexp(1.0F, static_cast<int>(below(kind == 1 ? 200 : 12)) - (kind == 1 ? 100 : 6));
    const std::uint32_t random = static_cast<std::uint32_t>(chance());
    switch (kind) {
      case 0:
      case 1:
        x[i] = normal(chance) * row;
        break;
      case 2:  // ties of the formats' grids, zeros of both signs, subnormals
        x[i] = std::ldexp(static_cast<float>(static_cast<int>(below(129)) - 64),
                          static_cast<int>(below(20)) - 10);
        if (below(5) == 0) x[i] = float_of(random & 0x807FFFFF);
        if (below(5) == 0) x[i] = float_of(random & 0x80000000);
        break;
      case 3:  // runs of zeros, constant runs, a few outliers
        x[i] = i / 256 % 3 == 0   ? float_of(random & 0x80000000)
               : i / 256 % 3 == 1 ? 0.75F
                                  : normal(chance) * row;
        if (below(300) == 0) x[i] *= 1000;
        break;
      case 4:  // the largest finite values and the smallest
        x[i] = float_of((random & 0x80FFFFFF) | (below(2) != 0 ? 0x7E000000 : 0x00000000));
        break;
      case 7:  // about 127.5 steps of 2^-3.5 (step_log2 14), where codes begin to escape
        x[i] = below(1024) == 0 ? 11.2F + static_cast<float>(below(2000)) / 10000 : 1.0F;
        if (below(2) == 0) x[i] = -x[i];
        break;
      case 5:  // any bits at all
        x[i] = float_of(random);
        break;
      default:
        x[i] = below(40) == 0 ? float_of(0x7F800000 | (random & 0x807FFFFF) * (random & 1))
                              : normal(chance);
    }
  }
}

}  // namespace
