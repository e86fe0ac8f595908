"""Checks the values that a script hands over, in the script's own line. Imports no torch.

A value of another type would be refused by its receiver, in a message that the script did not see.
Whole numbers may be of any kind that has one: int, np.int64, a tensor of one element, 64.0.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, SupportsFloat, TypeAlias

from fsl_async.errors import TaskError
from fsl_async.roles.messages import MAX_ENTRY_NAME

Whole: TypeAlias = Any
"""A whole number: int, or an np.integer, a tensor or a float that is one."""
Metrics: TypeAlias = Mapping[str, SupportsFloat]

MOST_METRICS = 60
"""A message has room for 64, and a heartbeat carries totals besides."""
MOST = 10**12
"""Most tokens or samples of one step; `roles.sync.deltas` has the same limit for a delta."""


NOT_GIVEN: Any = ...
"""The default of an argument for which None is no value either."""


def whole(what: str, value: Whole) -> int:
    """Return a count of tokens or samples, 0 or more. Raises TaskError for anything else."""
    if type(value) is int and 0 <= value <= MOST:  # nearly always
        return value
    found = _plain(value)
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    if not (is_number and math.isfinite(found) and found == int(found) and 0 <= found <= MOST):
        raise TaskError(
            f"{what} is {_shown(value, found)}: give a whole number, from 0 to {MOST:.0e}"
        )
    return int(found)


def number(what: str, value: Any) -> float:
    """Return any number, also one that is not finite. Raises TaskError for anything else."""
    if type(value) is float:
        return value
    found = _plain(value)
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(found, str | bytes):  # of which float reads some
            return float(found)
    raise TaskError(f"{what} is {_shown(value, found)}, not a number")


def numbers(where: str, values: Any, most: int = MOST_METRICS) -> dict[str, float]:
    """Return a map of numbers by name, such as metrics. Raises TaskError for anything else."""
    if not isinstance(values, Mapping):
        raise TaskError(f"{where} is a {type(values).__name__}: give numbers by name, as a dict")
    if len(values) > most or not all(map(_is_name, values)):
        raise TaskError(
            f"{where}: give at most {most}, each under a name that is text of at most"
            f" {MAX_ENTRY_NAME} characters"
        )
    return {str(name): number(f"{where}[{name!r}]", value) for name, value in values.items()}


def facts(
    what: str, given: Any, names: Collection[str], *, only_whole: bool = False
) -> Callable[[], dict[str, float]]:
    """Return a function that calls `given` and checks what it returns: numbers under `names`.

    It and this function raise TaskError.
    """
    if not callable(given):
        raise TaskError(f"{what}: give a function, which is called for each delta")

    def checked() -> dict[str, float]:
        found = numbers(f"{what}: what the function returned", given())
        for name, value in found.items():
            if name not in names:
                raise TaskError(f"{what}: {name!r} is none of {', '.join(names)}")
            if not (value.is_integer() if only_whole else math.isfinite(value)):
                kind = "whole" if only_whole else "finite"
                raise TaskError(f"{what}: {name} is {value}, not a {kind} number")
        return found

    return checked


def _is_name(name: object) -> bool:
    # Text with half of a surrogate pair cannot be sent.
    return (
        isinstance(name, str)
        and 0 < len(name) <= MAX_ENTRY_NAME
        and name.encode(errors="replace").decode() == name
    )


def _plain(value: Any) -> Any:
    """The Python number of a NumPy scalar, or of an array or a tensor of one element."""
    if not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (TypeError, ValueError, RuntimeError):  # more elements, or on the meta device
        return value


def _shown(value: Any, found: Any) -> str:
    if isinstance(found, int | float | str | bytes | None):
        return repr(found)[:80]
    shape = getattr(value, "shape", None)
    kind = type(value).__name__
    return f"a {kind}" if shape is None else f"a {kind} of shape {tuple(shape)}"
