"""Option types, and options that set a setting under a shorter name."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping


class Finite(click.FloatRange):
    """A finite number in a range; without bounds any finite number.

    click's own ranges accept nan, and inf where there is no upper bound.
    """

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """See click.ParamType."""
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number", param, ctx)
        return found


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
