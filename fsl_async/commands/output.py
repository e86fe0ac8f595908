"""What commands print. Results go to standard output; with --json every line there is one JSON object, the result last.

A node must not die because the terminal or the pipe it prints to is gone, so writing never raises: what cannot be written
is dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO

import attrs

from fsl_async.observe.accounts import account_lines

_TITLES = {"ps": "parameter server", "server": "split server"}


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
        """Print the result: an attrs object or a dict, as one JSON object or as one aligned line for each value.

        For people, what a node has sent and received is a table, and an object inside the object a paragraph of its own.
        """
        values: dict[str, Any] = (
            attrs.asdict(summary) if attrs.has(type(summary)) else dict(summary)
        )
        if self.as_json:
            _write(self._out, json.dumps(values, default=str))
            return
        for line in _lines(values):
            _write(self._out, line)


def _lines(values: Mapping[str, Any]) -> list[str]:
    plain = {name: value for name, value in values.items() if not isinstance(value, Mapping)}
    if plain.get("version") == -1:  # it ended before there was a version
        plain["version"] = None
    width = max((len(name) for name in plain), default=0)
    lines = [f"{name.replace('_', ' '):{width}}  {_readable(plain[name])}" for name in plain]
    for name, value in values.items():
        if not isinstance(value, Mapping):
            continue
        if value.keys() >= {"payload", "coded", "sockets", "error"}:
            lines += account_lines("node", value)
        else:
            lines += ["", f"{_TITLES.get(name, name.replace('_', ' '))}:", *_lines(value)]
    return lines


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
