// The kernels of the plain path, for every machine of the architecture.
#include "kernels/plain/kernels.hpp"

namespace fsl {

const Kernels kScalarKernels = {
    plain::combine,
    plain::look,
    plain::quantise_float8,
    plain::quantise_uniform<false>,
    plain::quantise_uniform<true>,
    plain::cut_bfloat16,
    plain::cut_float32,
    plain::map,
    plain::write_bit_planes,
    plain::write_ranks,
    plain::read_ranks,
    plain::write_lanes,
    plain::read_lanes,
    plain::read_codes,
    nullptr,
    nullptr,
    plain::join,
    plain::group,
    plain::ungroup,
    plain::mark,
    plain::spread,
    plain::count_ones,
    plain::dequantise_float8,
    plain::dequantise_uniform,
    plain::join_bfloat16,
    plain::join_float32,
    plain::copy_float32,
    plain::largest_byte,
    plain::count_byte,
    plain::pick,
    plain::find_byte,
    plain::crc32,
    plain::copied<plain::crc32>,
    nullptr,
    nullptr,
    Path::kScalar,
};

}  // namespace fsl
