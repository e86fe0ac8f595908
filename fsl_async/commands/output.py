"""What commands print. Results go to standard output; with --json every line there is one JSON object, the result last.

A node must not die because the terminal or the pipe it prints to is gone, so writing never raises: what cannot be written
is dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any, TextIO

import attrs


class Output:
    """Prints for one command."""

    def __init__(
        self, *, as_json: bool = False, out: TextIO | None = None, err: TextIO | None = None
    ) -> None:
        self.as_json = as_json
        self._out = sys.stdout if out is None else out
        self._err = sys.stderr if err is None else err

    def say(self, text: str) -> None:
        """Tell a person something; on standard error when standard output is for JSON."""
        _write(self._err if self.as_json else self._out, text)

    def warn(self, text: str) -> None:
        """Tell a person something they should not miss."""
        _write(self._err, f"warning: {text}")

    def record(self, event: str, /, **fields: Any) -> None:
        """Print one JSON object on the way, `{"event": ...}`; nothing without --json."""
        if self.as_json:
            _write(self._out, json.dumps({"event": event, **fields}, default=str))

    def result(self, summary: Any) -> None:
        """Print the result: an attrs object or a dict, as one JSON object or as one aligned line for each value."""
        values: dict[str, Any] = (
            attrs.asdict(summary) if attrs.has(type(summary)) else dict(summary)
        )
        if self.as_json:
            _write(self._out, json.dumps(values, default=str))
            return
        if values.get("version") == -1:  # it ended before there was a version
            values["version"] = None
        width = max((len(name) for name in values), default=0)
        for name, value in values.items():
            _write(self._out, f"{name.replace('_', ' '):{width}}  {_readable(value)}")


def _readable(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text + "\n")
        stream.flush()
    except (OSError, ValueError):
        silence(stream)


def silence(stream: TextIO) -> None:
    """Point a broken stream at nothing, or the interpreter complains about it once more when it ends."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
