#include "status.hpp"

#include <cinttypes>
#include <cstdio>
#include <cstring>

namespace fsl {
namespace {

// By number on the wire.
constexpr const char* kFormatNames[] = {"fp32", "bf16", "e4m3", "e5m2", "uniform"};

// Messages with at most three numbers, in the order of the status.
const char* pattern_of(Fault fault) {
  switch (fault) {
    case Fault::kNone:
      return "no fault";
    case Fault::kTooManyBytes:
      return "frame of %" PRIu64 " bytes, %" PRIu64 " allowed";
    case Fault::kTooManyValues:
      return "frame of %" PRIu64 " values, %" PRIu64 " allowed";
    case Fault::kOutputTooSmall:
      return "frame of %" PRIu64 " values, the output holds %" PRIu64;
    case Fault::kNoHeader:
      return "frame of %" PRIu64 " bytes is shorter than its header";
    case Fault::kMagic:
      return "not a codec frame: wrong magic";
    case Fault::kOtherVersion:
      return "frame version %" PRIu64 ", this package reads %" PRIu64;
    case Fault::kHeaderChecksum:
      return "header checksum does not match";
    case Fault::kFormat:
      return "unknown format %" PRIu64 " or reserved bits set";
    case Fault::kBlockSize:
      return "block_values is %" PRIu64 ": it must be a power of two from 16 to 1024";
    case Fault::kChunkSize:
      return "chunk_values is %" PRIu64 ": it must be a multiple of block_values (%" PRIu64
             ") up to 1048576";
    case Fault::kTooShort:
      return "frame of %" PRIu64 " bytes cannot hold %" PRIu64 " chunks";
    case Fault::kHeadCut:
      return "frame ends inside the head of chunk %" PRIu64;
    case Fault::kPayloadCut:
      return "frame ends inside chunk %" PRIu64;
    case Fault::kChecksum:
      return "checksum of chunk %" PRIu64 " does not match";
    case Fault::kHead:
      return "head of chunk %" PRIu64 " is not valid";
    case Fault::kBytesAfter:
      return "%" PRIu64 " bytes after the last chunk";
    case Fault::kPayloadEnds:
      return "payload ends too early";
    case Fault::kBytesLeft:
      return "%" PRIu64 " bytes too many in a payload";
    case Fault::kFlaggedCodes:
      return "chunk %" PRIu64 " announces NaN or infinity but is quantized";
    case Fault::kRawCodesOfFloat32:
      return "chunk %" PRIu64 " has raw codes of a lossless format";
    case Fault::kFlagDisagrees:
      return "chunk %" PRIu64 " and its flag disagree about NaN and infinity";
    case Fault::kScaleForm:
      return "unknown form of scales %" PRIu64;
    case Fault::kScaleRange:
      return "a scale is not from %" PRIu64 " to %" PRIu64;
    case Fault::kSplit:
      return "unknown split %" PRIu64 " of format ";
    case Fault::kPlaneKind:
      return "unknown plane kind %" PRIu64;
    case Fault::kPlaneConstant:
      return "constant %" PRIu64 " does not fit a plane of %" PRIu64 " bits";
    case Fault::kTableRange:
      return "code table covers symbols %" PRIu64 " to %" PRIu64 " of a plane of %" PRIu64 " bits";
    case Fault::kTableNibbles:
      return "code table has stray or missing nibbles at its ends";
    case Fault::kTableLeaves:
      return "%" PRIu64 " codes of up to %" PRIu64 " bits";
    case Fault::kTableSpace:
      return "code lengths do not fill the code space exactly";
    case Fault::kTableEscape:
      return "an escape where every symbol has a code";
    case Fault::kTableLowBits:
      return "numbers up to %" PRIu64 " with %" PRIu64 " low bits";
    case Fault::kUncodedCount:
      return "%" PRIu64 " symbols without a code among %" PRIu64;
    case Fault::kUncodedLeft:
      return "a list of symbols without a code is too short or too long";
    case Fault::kUncodedNumber:
      return "a listed symbol is none of the %" PRIu64 " without a code";
    case Fault::kListedCount:
      return "%" PRIu64 " listed codes among %" PRIu64;
    case Fault::kListedCode:
      return "a listed code has a digit";
    case Fault::kListedLeft:
      return "the listed codes of a block are too few or too many";
    case Fault::kGroupFill:
      return "a last group is not filled up with zeros";
    case Fault::kMaskEnd:
      return "a mask goes on after its last bit";
    case Fault::kMaskByte:
      return "a byte of a mask is zero";
    case Fault::kMaskCode:
      return "a code that is not zero is zero";
    case Fault::kStreamEnds:
      return "a stream ends before its symbols do";
    case Fault::kStreamBytesLeft:
      return "a stream goes on after its symbols";
    case Fault::kLaneEmpty:
      return "a lane holds no bits";
    case Fault::kLaneBitsLeft:
      return "a lane holds bits after its last code word";
    case Fault::kLaneSymbol:
      return "a lane ends with no symbol of a plane of %" PRIu64 " bits";
  }
  return "unknown fault";
}

}  // namespace

void describe(const Status& status, char* text, std::size_t size) {
#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
#endif
  // Only the patterns above are used, with the numbers that they name.
  std::snprintf(text, size, pattern_of(status.fault), status.first, status.second, status.third);
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif
  if (status.fault == Fault::kSplit &&
      status.second < sizeof(kFormatNames) / sizeof(kFormatNames[0])) {
    const std::size_t length = std::strlen(text);
    std::snprintf(text + length, size - length, "%s", kFormatNames[status.second]);
  }
}

}  // namespace fsl
