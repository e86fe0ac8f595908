// Faults of a frame or a request, with up to three numbers for the message.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsl {

enum class Fault : int {
  kNone = 0,
  // The frame is larger than the caller allows.
  kTooManyBytes,
  kTooManyValues,
  kOutputTooSmall,
  // The frame's bytes do not follow the format.
  kNoHeader,
  kMagic,
  kOtherVersion,
  kHeaderChecksum,
  kFormat,
  kBlockSize,
  kChunkSize,
  kTooShort,
  kHeadCut,
  kPayloadCut,
  kChecksum,
  kHead,
  kBytesAfter,
  kPayloadEnds,
  kBytesLeft,
  kFlaggedCodes,
  kRawCodesOfFloat32,
  kFlagDisagrees,
  kScaleForm,
  kScaleRange,
  kSplit,
  kPlaneKind,
  kPlaneConstant,
  kTableRange,
  kTableNibbles,
  kTableLeaves,
  kTableSpace,
  kTableEscape,
  kTableLowBits,
  kUncodedCount,
  kUncodedNumber,
  kUncodedLeft,
  kListedCount,
  kListedCode,
  kListedLeft,
  kGroupFill,
  kMaskEnd,
  kMaskByte,
  kMaskCode,
  kStreamEnds,
  kStreamBytesLeft,
  kLaneEmpty,
  kLaneBitsLeft,
  kLaneSymbol,
};

struct Status {
  Fault fault = Fault::kNone;
  std::uint64_t first = 0;
  std::uint64_t second = 0;
  std::uint64_t third = 0;

  bool ok() const { return fault == Fault::kNone; }
  bool is_limit() const { return fault >= Fault::kTooManyBytes && fault <= Fault::kOutputTooSmall; }
};

// Writes the message, at most size - 1 characters.
void describe(const Status& status, char* text, std::size_t size);

}  // namespace fsl
