"""Option types, and options that set a setting under a shorter name."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping


_NO_BOUND = 10**9
"""A limit from here on is none to a reader: help leaves it out, and only an error names it."""


def range_words(
    low: float | None, high: float | None, *, low_open: bool = False, full: bool = True
) -> str:
    """`1 to 64`, `at least 0`, `above 0 and at most 3,600`; empty without bounds.

    full: name every bound; otherwise leave out what is far above any use.
    """
    if high is not None and high >= _NO_BOUND and not full:
        high = None
    if low is None:
        return "" if high is None else f"at most {_number(high)}"
    if low_open:
        above = f"above {_number(low)}"
        return above if high is None else f"{above} and at most {_number(high)}"
    return f"at least {_number(low)}" if high is None else f"{_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,g}"


class Whole(click.IntRange):
    """A whole number in a range, which help and errors give in words."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """See click.ParamType."""
        found: int = click.INT.convert(value, param, ctx)
        _check_range(self, found, param, ctx)
        return found

    def _describe_range(self) -> str:
        # click shows it in help.
        return range_words(self.min, self.max, full=False)


class Finite(click.FloatRange):
    """A finite number in a range; without bounds any finite number.

    click's own ranges accept nan, and inf where there is no upper bound.
    """

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """See click.ParamType."""
        found: float = click.FLOAT.convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number", param, ctx)
        _check_range(self, found, param, ctx)
        return found

    def _describe_range(self) -> str:
        return range_words(self.min, self.max, low_open=self.min_open, full=False)


def _check_range(
    kind: click.IntRange | click.FloatRange,
    found: float,
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> None:
    low, high = kind.min, kind.max
    is_low = low is not None and (found < low or (kind.min_open and found == low))
    if is_low or (high is not None and found > high):
        words = range_words(low, high, low_open=kind.min_open)
        kind.fail(f"{found} is outside the range: {words}", param, ctx)


def overrides_of(
    chosen: Mapping[str, tuple[str, str | int | None]],
) -> tuple[list[str], dict[str, str]]:
    """Convert options to the overrides and option names that `config.load` takes.

    chosen: setting key -> (option, value); the value is None where the option was not given.
    """
    given = {key: found for key, found in chosen.items() if found[1] is not None}
    # A JSON string is a TOML string.
    overrides = [
        f"{key}={json.dumps(value, ensure_ascii=False)}" for key, (_, value) in given.items()
    ]
    return overrides, {key: option for key, (option, _) in given.items()}
