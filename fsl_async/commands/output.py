"""What commands print. Results go to standard output; with --json every line there is one JSON object, the result last.

A node must not die because the terminal or the pipe it prints to is gone, nor stop because nobody reads it: writing never raises
and, for a node, never waits. What cannot be written is dropped.

Nothing that a terminal would act on is printed: control and format characters are escaped here, in every line and in JSON, wherever the
text came from. A peer's text was made printable when it came; a journal that is read may be old or not ours.
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

_TITLES = {"ps": "parameter server", "server": "split server"}


class _Waiting:
    """Lines that are written one after the other, however long that takes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write a line; drop it where the reader is gone."""
        try:
            try:
                self._stream.write(text + "\n")
            except UnicodeEncodeError:  # a path that is no text, a terminal that has no bars: that character alone is shown otherwise
                coding = self._stream.encoding or "utf-8"
                self._stream.write(text.encode(coding, "backslashreplace").decode(coding) + "\n")
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
        """waits: for whoever reads, so that they get every line; False for a node, which has something else to do."""
        self.as_json = as_json
        kind = _Waiting if waits else LineStream
        self._out = kind(sys.stdout if out is None else out)
        self._err = kind(sys.stderr if err is None else err)

    def say(self, *lines: str) -> None:
        """Tell a person something, each text as one line; on standard error when standard output is for JSON."""
        text = "\n".join(map(printable, lines))
        (self._err if self.as_json else self._out).write(text)

    def warn(self, text: str) -> None:
        """Tell a person something they should not miss."""
        self._err.write(f"warning: {printable(text)}")

    def record(self, event: str, /, **fields: Any) -> None:
        """Print one JSON object on the way, `{"event": ...}`; nothing without --json."""
        if self.as_json:
            self._out.write(encoded({"event": event, **fields}))

    def result(self, summary: Any) -> None:
        """Print the result: an attrs object or a dict, as one JSON object or as one aligned line for each value.

        For people, what a node has sent and received is a table, and an object inside the object a paragraph of its own.
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
    """One line of JSON. What JSON has no word for, NaN and infinity (a loss that diverged), is null: programs that read strictly stop at anything else."""
    try:
        line = json.dumps(values, default=str, allow_nan=False)
    except ValueError:
        line = json.dumps(_finite(values), default=str, allow_nan=False)
    return line.replace("\x7f", "\\u007f")  # the one character of ASCII that JSON leaves as it is


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


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
