"""What this machine's memory can do at best: the limits that a codec is measured beside.

All are counted in bytes of the array as the codec counts fp32: a copy of 1 GB in a second moves
2 GB, an addition in place too.

    memcpy          the C library's, from one array to another
    read            load everything, keep a sum
    stream_store    non-temporal stores, which do not read what they overwrite; native code only
    add             array += 1 in place
"""

from __future__ import annotations

import importlib
import itertools
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
from codec_timing import CoreProbe

from fsl_codecs import new_vector

if TYPE_CHECKING:
    from collections.abc import Mapping

    from codec_timing import Action, Rounds

NAMES = ("memcpy", "read", "stream_store", "add")


def native_module() -> Any:
    """The codec's native module; None without it."""
    try:
        return importlib.import_module("fsl_codecs._native")
    except ImportError:
        return None


def core_probe() -> CoreProbe | None:
    """A probe of this core's speed; None without the native module, whose loop it needs."""
    native = native_module()
    return CoreProbe(native.short_loop) if hasattr(native, "short_loop") else None


class MemoryLimits:
    """Holds two arrays of `values` fp32 values and the loops over them."""

    def __init__(self, values: int) -> None:
        self._source, self._target = new_vector(values), new_vector(values)
        self._source.fill(1)
        self._target.fill(1)
        self._native = native_module()
        self._is_native = hasattr(self._native, "limit_read")

    @property
    def measured_with(self) -> str:
        """What ran the loops: "native" or "numpy"."""
        return "native" if self._is_native else "numpy"

    def actions(self) -> Mapping[str, Action]:
        """One pass over the arrays each, by name."""
        source, target, native = self._source, self._target, self._native
        memcpy = {"memcpy": lambda: np.copyto(target, source)}
        if not self._is_native:
            words = source.view(np.int32)
            return memcpy | {
                "read": words.max,
                "add": lambda: np.add(target, np.float32(1), out=target),
            }
        stream_store = {"stream_store": lambda: native.limit_stream_store(target)}
        return {
            **memcpy,
            "read": lambda: native.limit_read(source),
            **(stream_store if native.limit_stream_store(target) else {}),
            "add": lambda: native.limit_add(target),
        }

    def copy_by(self, threads: int) -> Action:
        """One copy of the arrays, by so many threads with a part each: what their memory allows."""
        edges = [self._source.size * part // threads for part in range(threads + 1)]
        own, *others = [
            (self._target[begin:end], self._source[begin:end])
            for begin, end in itertools.pairwise(edges)
        ]

        def copy() -> None:
            helpers = [Thread(target=np.copyto, args=part) for part in others]
            for helper in helpers:
                helper.start()
            np.copyto(*own)
            for helper in helpers:
                helper.join()

        return copy

    def fields(self, rounds: Rounds) -> dict[str, Any]:
        """Of a row: each limit in GB/s."""
        moved = self._source.nbytes
        speeds = {f"{name}_gb_s": rounds.gb_s(name, moved) for name in NAMES}
        return speeds | {"limits_measured_with": self.measured_with}
