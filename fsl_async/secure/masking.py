"""A site's deltas under masks: each is coded once, and its work is in one sum at most.

A delta whose masks never came is coded as nothing: all of it stays in the site's weights. Work that
has left under masks is not sent again, also where no version has it: the difference of two sums
with the same work in one of them would be that work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from fsl_async.secure.lattice import Vector, to_numbers, to_values

if TYPE_CHECKING:
    from fsl_async.secure.site import Masks


class Masking:
    """The masked deltas of one site, by sequence number. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._masks: dict[int, Masks | None] = {}
        """None: its coding has begun without masks."""

    def bind(self, sequence: int, take: Callable[[], Masks | None]) -> int | None:
        """Code a delta under the masks that `take` returns, if its coding has not begun.

        Returns the number of their set; 0: it has begun without masks; None: there are none yet.
        """
        with self._lock:
            if sequence not in self._masks and (masks := take()) is not None:
                self._masks[sequence] = masks
            if sequence not in self._masks:
                return None
            bound = self._masks[sequence]
            return 0 if bound is None else bound.number

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
        return frame, values - to_values(numbers, masks.roster.step)

    def has_masks(self, sequence: int) -> bool:
        """Whether a delta is under masks."""
        with self._lock:
            return self._masks.get(sequence) is not None

    def drop(self, sequence: int) -> None:
        """Forget a delta."""
        with self._lock:
            self._masks.pop(sequence, None)
