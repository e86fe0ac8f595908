// The static code tables, from Gaussian and Laplace distributions; part of the wire format
// (docs/WIRE.md).
#include <cstdlib>

#include "entropy/code_table.hpp"

namespace fsl {
namespace {

constexpr int kWidth = 6;

struct Packed {
  Kind kind;
  const char* hexadecimal;
};

// In the order of their numbers, grouped by format.
constexpr Packed kPacked[] = {
    {Kind::kE4m3, "1c3e27888888887877676656554554444443546508"},
    {Kind::kE4m3, "183e278888888877776666555555554444445454668608"},
    {Kind::kE5m2, "2a3d2888887767554434333384"},
    {Kind::kE5m2, "283d288888676655444433335486"},
    {Kind::kUniform, "172828886845333333547688"},
    {Kind::kUniform, "162a288877564533324465768808"},
    {Kind::kUniform, "1b2528683422338508"},
    {Kind::kUniform, "1c24286824318508"},
};
constexpr int kCount = sizeof(kPacked) / sizeof(kPacked[0]);

std::uint8_t nibble_of(char digit) {
  return static_cast<std::uint8_t>(digit <= '9' ? digit - '0' : digit - 'a' + 10);
}

struct Table {
  CodeTable tables[kCount];

  Table() {
    for (int number = 0; number < kCount; ++number) {
      std::uint8_t bytes[kMaximumPackedBytes];
      std::size_t size = 0;
      for (const char* digits = kPacked[number].hexadecimal; *digits != '\0'; digits += 2) {
        bytes[size++] = static_cast<std::uint8_t>(nibble_of(digits[0]) << 4 | nibble_of(digits[1]));
      }
      const std::uint8_t* position = bytes;
      if (!unpack_table(position, bytes + size, kWidth, tables[number]).ok())
        std::abort();  // the table above is wrong
    }
  }
};

}  // namespace

StaticTables static_tables_of(Kind kind) {
  static const Table table;
  StaticTables found = {nullptr, 0, 0};
  for (int number = 0; number < kCount; ++number) {
    if (kPacked[number].kind != kind) continue;
    if (found.count == 0) found = {&table.tables[number], number, 0};
    ++found.count;
  }
  return found;
}

}  // namespace fsl
