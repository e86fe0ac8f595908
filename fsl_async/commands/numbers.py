"""Numbers on the command line. click's own ranges let nan through, and inf where there is no upper bound."""

from __future__ import annotations

import math
from typing import Any

import click


class Finite(click.FloatRange):
    """A number from a range, neither infinite nor nan; without bounds any."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """See click.ParamType."""
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number", param, ctx)
        return found
