// The Python module fsl_codecs._native: checks buffers, releases the GIL and raises the package's
// exceptions. Only fsl_codecs/native.py imports it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <string>

#include "frame/decode.hpp"
#include "frame/encode.hpp"
#include "kernels/kernels.hpp"
#include "measure_bindings.hpp"
#include "pool.hpp"
#include "signs.hpp"

namespace nb = nanobind;

namespace {

using fsl::Fault;
using fsl::Kernels;
using fsl::Path;
using fsl::Status;

// Set once, when the module is initialized, and never freed: modules live as long as the process.
struct Python {
  PyObject* frame_error;
  PyObject* limit_error;
  PyObject* usage_error;
  PyObject* ndarray;
};
Python python;

[[noreturn]] void raise(PyObject* type, const std::string& text) {
  PyErr_SetString(type, text.c_str());
  throw nb::python_error();
}

void raise_unless_ok(const Status& status) {
  if (status.ok()) return;
  char text[200];
  fsl::describe(status, text, sizeof(text));
  raise(status.is_limit() ? python.limit_error : python.frame_error, text);
}

// A view of a Python buffer for as long as this object lives.
class View {
 public:
  View() = default;
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  ~View() {
    if (is_open_) PyBuffer_Release(&view_);
  }

  bool open(nb::handle object, int flags) {
    is_open_ = PyObject_GetBuffer(object.ptr(), &view_, flags) == 0;
    if (!is_open_) PyErr_Clear();
    return is_open_;
  }

  const Py_buffer& operator*() const { return view_; }
  const Py_buffer* operator->() const { return &view_; }

 private:
  Py_buffer view_{};
  bool is_open_ = false;
};

// A one-dimensional array of float32, or of uint16 where `or_bfloat16`.
class Array {
 public:
  Array(nb::handle object, bool writable, bool or_bfloat16) {
    const bool is_array = PyObject_IsInstance(object.ptr(), python.ndarray) == 1;
    if (!is_array || !view_.open(object, PyBUF_STRIDES | PyBUF_FORMAT) || view_->ndim != 1) {
      raise(python.usage_error, "values must be a one-dimensional NumPy array");
    }
    const std::string kind = view_->format == nullptr ? "B" : view_->format;
    is_bfloat16_ = or_bfloat16 && (kind == "H" || kind == "<H" || kind == "=H");
    if (!is_bfloat16_ && kind != "f" && kind != "<f" && kind != "=f") {
      const nb::object dtype = object.attr("dtype");
      const nb::object given = nb::steal(PyObject_Str(dtype.ptr()));
      raise(python.usage_error, std::string("values must be ") +
                                    (or_bfloat16 ? "float32, or uint16 for bf16 bits" : "float32") +
                                    ", not " + nb::cast<std::string>(given));
    }
    const bool is_contiguous = view_->shape[0] < 2 || view_->strides[0] == view_->itemsize;
    if (!is_contiguous || reinterpret_cast<std::uintptr_t>(view_->buf) %
                                  static_cast<std::uintptr_t>(view_->itemsize) !=
                              0) {
      raise(python.usage_error, "values must be contiguous and aligned");
    }
    if (writable && view_->readonly != 0)
      raise(python.usage_error, "the array to write to is read-only");
  }

  std::size_t size() const { return static_cast<std::size_t>(view_->shape[0]); }
  const void* memory() const { return view_->buf; }
  std::size_t bytes() const { return static_cast<std::size_t>(view_->len); }
  float* fp32() const { return is_bfloat16_ ? nullptr : static_cast<float*>(view_->buf); }
  std::uint16_t* bf16() const {
    return is_bfloat16_ ? static_cast<std::uint16_t*>(view_->buf) : nullptr;
  }

 private:
  View view_;
  bool is_bfloat16_ = false;
};

// float32 values that accompany `count` others, or nothing if None was given.
class Companion {
 public:
  Companion(nb::handle object, bool writable, const char* name, std::size_t count) {
    if (object.is_none()) return;
    array_.emplace(object, writable, false);
    if (array_->size() == count) return;
    raise(python.usage_error, std::string(name) + " of " + std::to_string(array_->size()) +
                                  " values for " + std::to_string(count) + " values");
  }

  const Array* array() const { return array_ ? &*array_ : nullptr; }
  float* fp32() const { return array_ ? array_->fp32() : nullptr; }

 private:
  std::optional<Array> array_;
};

// Raises if output shares memory with input, which would change during the call.
void check_apart(const char* read_name, const void* read, std::size_t read_bytes,
                 const char* written_name, const void* written, std::size_t written_bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(read);
  const auto second = reinterpret_cast<std::uintptr_t>(written);
  if (read_bytes == 0 || written_bytes == 0 || first >= second + written_bytes ||
      second >= first + read_bytes)
    return;
  raise(python.usage_error, std::string(read_name) + " and " + written_name + " overlap");
}

int checked(int threads) {
  if (threads < 1 || threads > fsl::kMaximumThreads) {
    raise(python.usage_error, "threads is " + std::to_string(threads) + ": it must be from 1 to " +
                                  std::to_string(fsl::kMaximumThreads));
  }
  return threads;
}

constexpr const char* kNames[] = {"scalar", "avx2", "avx512"};

// The codec with the kernels of one path.
class Codec {
 public:
  explicit Codec(const std::string& path) {
    for (int i = 0; i < 3; ++i) {
      if (path == kNames[i]) kernels_ = fsl::kernels_of(static_cast<Path>(i));
    }
    if (kernels_ == nullptr) raise(python.usage_error, "this machine cannot run the path " + path);
  }

  std::size_t encode_into(nb::handle values, nb::handle out, unsigned format,
                          std::size_t block_values, std::size_t chunk_values, bool entropy,
                          int step_log2, nb::handle reference, nb::handle residual,
                          int threads) const {
    const Array given(values, false, true);
    const Companion subtracted(reference, false, "reference", given.size());
    const Companion carried(residual, true, "residual", given.size());
    const fsl::EncodeSettings settings = {
        fsl::format_of(format), block_values, chunk_values, entropy, step_log2, checked(threads)};
    if (settings.format == nullptr || !fsl::is_block_size(block_values) ||
        !fsl::is_chunk_size(block_values, chunk_values) || step_log2 < fsl::kMinimumStepLog2 ||
        step_log2 > fsl::kMaximumStepLog2) {
      raise(python.usage_error, "impossible settings");
    }
    View target;
    if (!target.open(out, PyBUF_ND))
      raise(python.usage_error, "the output must be a contiguous bytes-like object");
    const std::uint64_t needed = fsl::bound(given.size(), chunk_values);
    if (target->readonly != 0 || static_cast<std::uint64_t>(target->len) < needed) {
      raise(python.usage_error, "output of " + std::to_string(target->len) +
                                    " bytes: a writable one of " + std::to_string(needed) +
                                    " is needed");
    }
    const auto check_output = [&](const char* name, const Array* read) {
      if (read != nullptr)
        check_apart(name, read->memory(), read->bytes(), "output", target->buf,
                    static_cast<std::size_t>(needed));
    };
    const auto check_residual = [&](const char* name, const Array* read) {
      const Array* const written = carried.array();
      if (read != nullptr && written != nullptr)
        check_apart(name, read->memory(), read->bytes(), "residual", written->memory(),
                    written->bytes());
    };
    check_output("values", &given);
    check_output("reference", subtracted.array());
    check_output("residual", carried.array());
    check_residual("values", &given);
    check_residual("reference", subtracted.array());
    const fsl::Source source = {given.fp32(), given.bf16(), subtracted.fp32(), carried.fp32(),
                                given.size()};
    const nb::gil_scoped_release unlocked;
    return fsl::encode_frame(*kernels_, settings, source, static_cast<std::uint8_t*>(target->buf));
  }

  std::uint64_t decode_into(nb::handle frame, nb::handle out, nb::handle limits,
                            int threads) const {
    const Array target(out, true, true);
    View bytes;
    const fsl::DecodeRequest request =
        request_of(frame, bytes, limits, target.size(), checked(threads));
    check_apart("frame", request.frame, request.frame_bytes, "output", target.memory(),
                target.bytes());
    const fsl::Target where = {target.fp32(), target.bf16(), target.size()};
    std::uint64_t values = 0;
    Status status;
    {
      const nb::gil_scoped_release unlocked;
      status = fsl::decode_frame(*kernels_, request, where, values);
    }
    raise_unless_ok(status);
    return values;
  }

  std::uint64_t decode_accumulate(nb::handle frame, nb::handle accumulator, double weight,
                                  nb::handle limits, int threads) const {
    const float factor = static_cast<float>(weight);
    if (!std::isfinite(factor))
      raise(python.usage_error,
            "weight " + std::to_string(weight) + " is not a finite fp32 number");
    const Array target(accumulator, true, false);
    View bytes;
    const fsl::DecodeRequest request =
        request_of(frame, bytes, limits, target.size(), checked(threads));
    check_apart("frame", request.frame, request.frame_bytes, "accumulator", target.memory(),
                target.bytes());
    std::uint64_t values = 0;
    Status status;
    {
      const nb::gil_scoped_release unlocked;
      status =
          fsl::accumulate_frame(*kernels_, request, target.fp32(), target.size(), factor, values);
    }
    raise_unless_ok(status);
    return values;
  }

  // (format, block_values, chunk_values, values, chunks, frame bytes, nonfinite, chunks of each
  // mode).
  nb::tuple inspect(nb::handle frame, nb::handle limits) const {
    View bytes;
    const fsl::DecodeRequest request = request_of(frame, bytes, limits, UINT64_MAX, 1);
    fsl::Summary summary;
    Status status;
    {
      const nb::gil_scoped_release unlocked;
      status = fsl::inspect_frame(*kernels_, request, summary);
    }
    raise_unless_ok(status);
    const fsl::Header& header = summary.header;
    return nb::make_tuple(
        static_cast<int>(header.format->kind), header.block_values, header.chunk_values,
        header.values, header.chunks(), request.frame_bytes, summary.nonfinite,
        nb::make_tuple(summary.modes[0], summary.modes[1], summary.modes[2], summary.modes[3]));
  }

 private:
  // limits: (values, frame bytes); None stands for the sizes of output and frame.
  static fsl::DecodeRequest request_of(nb::handle frame, View& bytes, nb::handle limits,
                                       std::uint64_t output_values, int threads) {
    if (!bytes.open(frame, PyBUF_ND))
      raise(python.usage_error, "a frame must be a contiguous bytes-like object");
    const std::size_t size = static_cast<std::size_t>(bytes->len);
    fsl::Limits allowed = {output_values, size};
    if (!limits.is_none()) {
      const nb::tuple pair = nb::cast<nb::tuple>(limits);
      allowed = {saturated(pair[0]), saturated(pair[1])};
    }
    return {static_cast<const std::uint8_t*>(bytes->buf), size, allowed, threads};
  }

  // A limit may be any integer.
  static std::uint64_t saturated(nb::handle number) {
    const unsigned long long value = PyLong_AsUnsignedLongLong(number.ptr());
    if (PyErr_Occurred() == nullptr) return value;
    if (PyErr_ExceptionMatches(PyExc_OverflowError) == 0) throw nb::python_error();
    PyErr_Clear();
    const nb::int_ zero(0);
    return PyObject_RichCompareBool(number.ptr(), zero.ptr(), Py_LT) == 1 ? 0 : UINT64_MAX;
  }

  const Kernels* kernels_ = nullptr;
};

// The 64-bit words of a Python buffer.
std::uint64_t* words_of(const View& view) { return static_cast<std::uint64_t*>(view->buf); }

void open_words(View& view, nb::handle object, bool writable) {
  const bool is_open = view.open(object, writable ? PyBUF_ND | PyBUF_WRITABLE : PyBUF_ND);
  if (!is_open || view->itemsize != sizeof(std::uint64_t) ||
      reinterpret_cast<std::uintptr_t>(view->buf) % sizeof(std::uint64_t) != 0)
    raise(python.usage_error, "words must be a contiguous array of uint64");
}

void sign_words(std::uint64_t seed, std::uint64_t stream, std::uint64_t first, nb::handle out) {
  View words;
  open_words(words, out, true);
  const std::size_t count = static_cast<std::size_t>(words->len) / sizeof(std::uint64_t);
  const nb::gil_scoped_release unlocked;
  fsl::sign_words({seed, stream}, first, words_of(words), count);
}

// keys: two words for each step.
void add_signs(nb::handle values, std::uint64_t offset, nb::handle keys, nb::handle steps) {
  const Array target(values, true, false);
  const Array given(steps, false, false);
  View words;
  open_words(words, keys, false);
  if (static_cast<std::size_t>(words->len) != given.size() * sizeof(fsl::SignKey))
    raise(python.usage_error, "each step needs a key of two words");
  check_apart("steps", given.memory(), given.bytes(), "values", target.memory(), target.bytes());
  if (target.size() == 0) return;
  const nb::gil_scoped_release unlocked;
  fsl::add_signs(target.fp32(), target.size(), offset,
                 reinterpret_cast<const fsl::SignKey*>(words_of(words)), given.fp32(),
                 given.size());
}

// The paths that this machine can run, best first.
nb::tuple paths() {
  nb::list found;
  for (int i = 2; i >= 0; --i) {
    if (fsl::kernels_of(static_cast<Path>(i)) != nullptr) found.append(kNames[i]);
  }
  return nb::tuple(found);
}

}  // namespace

NB_MODULE(_native, module) {
  // nanobind would report objects that live as long as the process as leaks.
  nb::set_leak_warnings(false);
  const nb::module_ errors = nb::module_::import_("fsl_codecs.errors");
  const nb::module_ numpy = nb::module_::import_("numpy");
  python.frame_error = nb::object(errors.attr("FrameError")).release().ptr();
  python.limit_error = nb::object(errors.attr("LimitError")).release().ptr();
  python.usage_error = nb::object(errors.attr("CodecUsageError")).release().ptr();
  python.ndarray = nb::object(numpy.attr("ndarray")).release().ptr();

  nb::class_<Codec>(module, "Codec")
      .def(nb::init<const std::string&>())
      .def("encode_into", &Codec::encode_into, nb::arg("values").none(), nb::arg("out").none(),
           nb::arg("format"), nb::arg("block_values"), nb::arg("chunk_values"), nb::arg("entropy"),
           nb::arg("step_log2"), nb::arg("reference").none(), nb::arg("residual").none(),
           nb::arg("threads"))
      .def("decode_into", &Codec::decode_into, nb::arg("frame").none(), nb::arg("out").none(),
           nb::arg("limits").none(), nb::arg("threads"))
      .def("decode_accumulate", &Codec::decode_accumulate, nb::arg("frame").none(),
           nb::arg("accumulator").none(), nb::arg("weight"), nb::arg("limits").none(),
           nb::arg("threads"))
      .def("inspect", &Codec::inspect, nb::arg("frame").none(), nb::arg("limits").none());
  module.def("paths", &paths);
  module.def("sign_words", &sign_words, nb::arg("seed"), nb::arg("stream"), nb::arg("first"),
             nb::arg("out"));
  module.def("add_signs", &add_signs, nb::arg("values"), nb::arg("offset"), nb::arg("keys"),
             nb::arg("steps"));
  bind_measure(module);
}
