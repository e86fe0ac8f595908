"""The native codec: `Implementation` on the extension `_native`.

It gives the same bytes, values and refusals as the NumPy package, which is the reference. Calls
release the GIL. A call's threads come from one pool of the process; a second call at the same time
runs on its own thread alone.
"""

# ruff: noqa: D102 - `Implementation` has the documentation

import importlib
from typing import Any, Final

from .formats import FORMATS, FORMATS_BY_WIRE_ID, Float32Array, Values
from .frame import Buffer, CodecSpec, FrameInfo, Limits
from .implementation import DEFAULT_SPEC, Implementation

_WIRE_IDS: Final = {name: number_format.wire_id for name, number_format in FORMATS.items()}


def load() -> tuple[Any, str]:
    """The extension and "", or None and the reason why it does not load."""
    try:
        return importlib.import_module("fsl_codecs._native"), ""
    except ModuleNotFoundError as error:
        if error.name != "fsl_codecs._native":
            return None, f"the native codec does not load: {error}"
        return None, (
            "the native codec is not built: install a C++17 compiler (on Debian: apt install g++), "
            "then install fsl-async again"
        )
    except ImportError as error:
        return None, f"the native codec does not load: {error}"


class NativeCodec(Implementation):
    """The codec with the kernels of one path: "avx512", "avx2" or "scalar"."""

    def __init__(self, module: Any, path: str) -> None:
        """module: from `load`. CodecUsageError if this machine cannot run the path."""
        self.name = path
        self._codec = module.Codec(path)

    def encode_into(
        self,
        values: Values,
        out: Buffer,
        spec: CodecSpec = DEFAULT_SPEC,
        *,
        reference: Float32Array | None = None,
        residual: Float32Array | None = None,
        threads: int = 1,
    ) -> int:
        size: int = self._codec.encode_into(
            values,
            out,
            _WIRE_IDS[spec.format],
            spec.block_values,
            spec.chunk_values,
            spec.entropy,
            spec.step_log2,
            reference,
            residual,
            threads,
        )
        return size

    def decode_into(
        self,
        frame: Buffer,
        out: Values,
        limits: Limits | None = None,
        *,
        threads: int = 1,
    ) -> int:
        values: int = self._codec.decode_into(frame, out, _pair(limits), threads)
        return values

    def decode_accumulate(
        self,
        frame: Buffer,
        accumulator: Float32Array,
        weight: float,
        limits: Limits | None = None,
        *,
        threads: int = 1,
    ) -> int:
        values: int = self._codec.decode_accumulate(
            frame,
            accumulator,
            weight,
            _pair(limits),
            threads,
        )
        return values

    def info(self, frame: Buffer, limits: Limits | None = None) -> FrameInfo:
        wire_id, block_values, chunk_values, values, chunks, frame_bytes, nonfinite, modes = (
            self._codec.inspect(frame, _pair(limits))
        )
        raw_fp32, constant, raw_codes, coded = modes
        return FrameInfo(
            format=FORMATS_BY_WIRE_ID[wire_id].name,
            values=values,
            block_values=block_values,
            chunk_values=chunk_values,
            chunks=chunks,
            frame_bytes=frame_bytes,
            nonfinite=nonfinite,
            raw_fp32_chunks=raw_fp32,
            constant_chunks=constant,
            raw_code_chunks=raw_codes,
            coded_chunks=coded,
        )


def _pair(limits: Limits | None) -> tuple[int, int] | None:
    return None if limits is None else (limits.max_values, limits.max_frame_bytes)
