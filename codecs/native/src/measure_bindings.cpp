// The functions of fsl_codecs._native for `fsl-node bench`.
#include "measure_bindings.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "frame/measure.hpp"

namespace nb = nanobind;

namespace {

using Values = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// ValueError for a path that this machine cannot run.
const fsl::Kernels& kernels_named(const std::string& path) {
  constexpr const char* kNames[] = {"scalar", "avx2", "avx512"};
  for (int i = 0; i < 3; ++i) {
    const fsl::Kernels* const kernels =
        path == kNames[i] ? fsl::kernels_of(static_cast<fsl::Path>(i)) : nullptr;
    if (kernels != nullptr) return *kernels;
  }
  throw std::invalid_argument("this machine cannot run the path " + path);
}

const fsl::Format& format_numbered(unsigned wire_id) {
  const fsl::Format* const format = fsl::format_of(wire_id);
  if (format == nullptr || !format->is_bytes()) throw std::invalid_argument("not an 8-bit format");
  return *format;
}

// The number of codes, without the slack.
std::size_t count_of(const Bytes& codes) {
  if (codes.size() <= fsl::kSlackBytes ||
      codes.size() - fsl::kSlackBytes > fsl::kMaximumChunkValues) {
    throw std::invalid_argument("not a chunk and 64 bytes");
  }
  return codes.size() - fsl::kSlackBytes;
}

}  // namespace

void bind_measure(nb::module_& module) {
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  module.def(
      "limit_read",
      [](const Values& values) {
        return fsl::limit_read(reinterpret_cast<const std::uint8_t*>(values.data()),
                               4 * values.size());
      },
      unlocked);
  module.def(
      "limit_add", [](const Values& values) { fsl::limit_add(values.data(), values.size()); },
      unlocked);
  module.def(
      "limit_stream_store",
      [](const Values& values) {
        return fsl::limit_stream_store(reinterpret_cast<std::uint8_t*>(values.data()),
                                       4 * values.size());
      },
      unlocked);
  module.def("short_loop", &fsl::short_loop, unlocked);
  module.def("stage_bound", &fsl::stage_bound);
  // In both, `codes` has 64 bytes of slack after the codes.
  module.def(
      "stage_encode",
      [](const std::string& path, unsigned format, const Bytes& codes, const Bytes& out) {
        const std::size_t count = count_of(codes);
        if (out.size() < fsl::stage_bound(count))
          throw std::invalid_argument("the output is too small");
        return fsl::stage_encode(kernels_named(path), format_numbered(format), codes.data(), count,
                                 out.data());
      },
      unlocked);
  module.def(
      "stage_decode",
      [](const std::string& path, unsigned format, const Bytes& payload, const Bytes& codes) {
        const std::size_t count = count_of(codes);
        if (!fsl::stage_decode(kernels_named(path), format_numbered(format), payload.data(),
                               payload.size(), codes.data(), count)) {
          throw std::invalid_argument("a damaged payload");
        }
      },
      unlocked);
}
