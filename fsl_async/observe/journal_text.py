"""Text of the journal on its way to the file and back: nothing in either would do anything to a terminal. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

from fsl_transport.text import printable

_escape = json.JSONEncoder(ensure_ascii=True).encode
_MAY_ESCAPE = re.compile(rb"[\\\x7f-\xff]")
"""In a line of JSON, what may stand for a character that cannot be printed: most lines have none of these."""


def written(json_text: str) -> str:
    """The same JSON with escapes for characters that cannot be printed: lossless, and `tail -f` shows it as it is."""
    if json_text.isprintable():
        return json_text
    return "".join(one if one.isprintable() else _escape(one)[1:-1] for one in json_text)


def read(line: bytes) -> dict[str, Any] | None:
    """The object of one line, its text made printable, as anything that can write the file chooses it; None where there is no object."""
    try:
        found = json.loads(line)
        if _MAY_ESCAPE.search(line) is not None:
            found = _printable(found)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): _printable(inner) for key, inner in value.items()}
    return [_printable(inner) for inner in value] if isinstance(value, list) else value
