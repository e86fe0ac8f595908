"""Options of the command line that are settings with a shorter name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def overrides_of(
    chosen: Mapping[str, tuple[str, str | int | None]],
) -> tuple[list[str], dict[str, str]]:
    """From dotted key -> (option, value or None where it was not given): what `config.load` takes as overrides and as options."""
    given = {key: found for key, found in chosen.items() if found[1] is not None}
    # A JSON string is a TOML string.
    overrides = [
        f"{key}={json.dumps(value, ensure_ascii=False)}" for key, (_, value) in given.items()
    ]
    return overrides, {key: option for key, (option, _) in given.items()}
