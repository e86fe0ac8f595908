// Writes frames to start fuzzing from, in addition to the golden vectors: as large as the runtime's
// chunks, of one chunk and of several.
//
//     seeds FOLDER
#include <cstdio>
#include <fstream>
#include <string>

#include "frame/decode.hpp"
#include "drawn_frames.hpp"

namespace {

constexpr std::size_t kLargest = 262144;  // run.sh's limit for libFuzzer

// False if the frame cannot be decoded or saved.
bool write(const std::string& folder, const std::string& name,
           const std::vector<std::uint8_t>& frame) {
  std::vector<float> values(2 * fuzz::kManyValues);
  std::uint64_t count = 0;
  const fsl::DecodeRequest request = {frame.data(), frame.size(), {values.size(), frame.size()}, 1};
  const fsl::Target target = {values.data(), nullptr, values.size()};
  const fsl::Kernels& kernels = *fsl::kernels_of(fsl::Path::kScalar);
  if (!fsl::decode_frame(kernels, request, target, count).ok()) {
    std::fprintf(stderr, "%s: a frame of ours was refused\n", name.c_str());
    return false;
  }
  std::ofstream file(folder + "/" + name + ".bin", std::ios::binary);
  file.write(reinterpret_cast<const char*>(frame.data()),
             static_cast<std::streamsize>(frame.size()));
  return file.good();
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "use: %s FOLDER\n", arguments[0]);
    return 2;
  }
  const std::string folder = arguments[1];
  for (unsigned format = 0; format < fuzz::kFormats; ++format) {
    const std::string name = "format" + std::to_string(format);
    bool done = true;
    for (const std::size_t values : {fuzz::kFewValues, fuzz::kManyValues}) {
      for (const fuzz::Kind kind :
           {fuzz::Kind::kHeavy, fuzz::Kind::kRounded, fuzz::Kind::kSparse}) {
        const auto frame = fuzz::frame_of(format, fuzz::values_of(kind, values), fuzz::kManyValues);
        // Heavy fp32 frames: every mutation would be slow.
        if (frame.size() > kLargest) continue;
        const std::string which = std::to_string(static_cast<int>(kind)) + "_";
        done = done && write(folder, name + "_kind" + which + std::to_string(values), frame);
      }
    }
    // fp32 of bell-shaped values takes 0.4 MB.
    const fuzz::Kind kind = format == 0 ? fuzz::Kind::kSparse : fuzz::Kind::kBell;
    const std::vector<float> many = fuzz::values_of(kind, fuzz::kManyValues);
    const std::vector<float> more = fuzz::values_of(kind, fuzz::kManyValues + 4500);
    done =
        done && write(folder, name + "_one_chunk", fuzz::frame_of(format, many, fuzz::kManyValues));
    done = done &&
           write(folder, name + "_two_chunks", fuzz::frame_of(format, many, fuzz::kManyValues / 2));
    done = done &&
           write(folder, name + "_chunk_and_rest", fuzz::frame_of(format, more, fuzz::kManyValues));
    // Many small chunks: threads meet often.
    const std::vector<float> few = fuzz::values_of(fuzz::Kind::kHeavy, 6 * fuzz::kFewValues);
    done = done && write(folder, name + "_chunks", fuzz::frame_of(format, few, 640));
    if (!done) return 1;
  }
  return 0;
}
