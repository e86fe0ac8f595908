"""Prints a command's output. With --json every line of standard output is one JSON object.

The result is the last line. A node must survive a terminal or pipe that is gone or not read:
writing never raises and, for a node, never waits. Text that cannot be written is dropped.

Control and format characters are escaped here, in every line and in JSON, so no text acts on the
terminal. Text of peers is made printable on arrival; a journal may come from elsewhere.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any, TextIO

import attrs

from fsl_async.accounting.accounts import account_lines
from fsl_async.commands.line_stream import LineStream, silence
from fsl_async.errors import printable
from fsl_async.roles.phrasing import megabytes

_TITLES = {"ps": "parameter server", "server": "split server"}


class _Blocking:
    """Writes each line before it returns."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write a line; drop it when the reader is gone."""
        self.part(text + "\n")

    def part(self, text: str) -> None:
        """Write text without a line's end."""
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                # A path that is not UTF-8, or a terminal of another encoding: escape characters.
                coding = self._stream.encoding or "utf-8"
                self._stream.write(text.encode(coding, "backslashreplace").decode(coding))
            self._stream.flush()
        except (OSError, ValueError):
            silence(self._stream)


class Output:
    """Prints for one command."""

    def __init__(
        self,
        *,
        as_json: bool = False,
        waits: bool = True,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        """waits: block until each line is written; False for nodes, which drop lines instead."""
        self.as_json = as_json
        kind = _Blocking if waits else LineStream
        self._out = kind(sys.stdout if out is None else out)
        self._err = kind(sys.stderr if err is None else err)

    def say(self, *lines: str) -> None:
        """Print text for people, one line each; with --json on standard error."""
        text = "\n".join(map(printable, lines))
        (self._err if self.as_json else self._out).write(text)

    def answer(self, values: Any, *lines: str) -> None:
        """Print the result: `values` as one JSON object with --json, else `lines` as text."""
        if self.as_json:
            self.result(values)
        else:
            self.say(*lines)

    def part(self, text: str) -> None:
        """Print a part of a text, with its line breaks and tabs; nothing with --json.

        For commands that block.
        """
        if not self.as_json and isinstance(self._out, _Blocking):
            self._out.part("".join(one if one in "\n\t" else printable(one) for one in text))

    def note(self, text: str) -> None:
        """Print a line of a node; with --json a record of it."""
        if self.as_json:
            self.record("note", text=text)
        else:
            self.say(text)

    def warn(self, text: str) -> None:
        """Print a warning for people, on standard error."""
        self._err.write(f"warning: {printable(text)}")

    def record(self, event: str, /, **fields: Any) -> None:
        """Print one JSON object `{"event": ...}`; nothing without --json."""
        if self.as_json:
            self._out.write(encoded({"event": event, **fields}))

    def result(self, summary: Any) -> None:
        """Print the result, an attrs object or a dict: one JSON object, or aligned lines.

        For people a node's byte counters are a table, and a nested object is a paragraph.
        """
        values: dict[str, Any] = (
            attrs.asdict(summary) if attrs.has(type(summary)) else dict(summary)
        )
        if self.as_json:
            self._out.write(encoded(values))
            return
        for line in _lines(values):
            self._out.write(printable(line))


def encoded(values: Any) -> str:
    """Encode as one line of JSON.

    NaN and infinity (a loss that diverged) become null, because strict readers refuse them.
    """
    try:
        line = json.dumps(values, default=str, allow_nan=False)
    except ValueError:
        line = json.dumps(_finite(values), default=str, allow_nan=False)
    return line.replace("\x7f", "\\u007f")  # the only ASCII control character JSON does not escape


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _lines(values: Mapping[str, Any]) -> list[str]:
    plain = {name: value for name, value in values.items() if not isinstance(value, Mapping)}
    if plain.get("version") == -1:  # the run ended before its first version
        plain["version"] = None
    width = max((len(name) for name in plain), default=0)
    lines = [f"{name.replace('_', ' '):{width}}  {_shown(name, plain[name])}" for name in plain]
    for name, value in values.items():
        if not isinstance(value, Mapping):
            continue
        if value.keys() >= {"payload", "coded", "sockets", "error"}:
            lines += account_lines("node", value)
        else:
            lines += ["", f"{_TITLES.get(name, name.replace('_', ' '))}:", *_lines(value)]
    return lines


def _shown(name: str, value: Any) -> str:
    is_size = name == "memory_grown" or name.endswith("_bytes")
    return megabytes(value) if is_size and type(value) is int else _readable(value)


def _readable(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return value if isinstance(value, str) else json.dumps(value, default=str)
