"""A site's deltas under masks: each is coded once, and can be taken back.

A delta whose masks never came is coded as nothing: all of it stays in the site's weights. So does a
delta of which the parameter server made no version: `taken_back` returns what was sent of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsl_async.secure.lattice import Vector, to_numbers, to_values
from fsl_async.secure.site import Masks


class Masking:
    """The masked deltas of one site, by sequence number. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._masks: dict[int, Masks | None] = {}
        self._sent: dict[int, dict[int, NDArray[Any]]] = {}

    def bind(self, sequence: int, take: Callable[[], Masks | None]) -> bool:
        """Code a delta under the masks that `take` returns. Returns whether it is under masks.

        `take` is not called where its coding has begun.
        """
        with self._lock:
            if sequence not in self._masks and (masks := take()) is not None:
                self._masks[sequence] = masks
            return self._masks.get(sequence) is not None

    def has_begun(self, sequence: int) -> bool:
        """Whether it is decided under which masks a delta is coded, if under any."""
        with self._lock:
            return sequence in self._masks

    def number(self, sequence: int) -> int:
        """Return the number of the set whose masks a delta is under; 0: it is under none."""
        with self._lock:
            masks = self._masks.get(sequence)
        return 0 if masks is None else masks.number

    def encode(self, sequence: int, index: int, values: Vector) -> tuple[bytes, Vector]:
        """Code chunk `index` of a delta. Returns its frame, empty where it is under no masks, and
        what that lacks of the values.
        """
        with self._lock:
            masks = self._masks.setdefault(sequence, None)
        if masks is None:
            return b"", values
        numbers = to_numbers(values, masks.roster)
        frame = masks.frame(numbers, index)
        small = numbers.astype(np.int8 if masks.roster.bits <= 8 else np.int32)
        with self._lock:
            self._sent.setdefault(sequence, {})[index] = small
        return frame, values - to_values(numbers, masks.roster.step)

    def drop(self, sequence: int) -> dict[int, Vector]:
        """Forget a delta. Returns what was sent of it: the values of each chunk."""
        with self._lock:
            masks, sent = self._masks.pop(sequence, None), self._sent.pop(sequence, {})
        if masks is None:
            return {}
        return {index: to_values(numbers, masks.roster.step) for index, numbers in sent.items()}
