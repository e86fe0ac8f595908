"""Makes text of a peer fit for a terminal, a log and a journal. Pure.

A peer chooses every character of its names, reasons and texts. Printed as they are, they could retitle or clear a
terminal (escape sequences), overwrite a line (carriage returns), forge one (line breaks) or reorder it (bidirectional
controls). So such text is made printable where it enters the program, and shown as it is from then on.

What is escaped is what ``str.isprintable`` excludes: control characters, format characters (bidirectional controls,
zero-width characters, byte order marks), line and paragraph separators, spaces other than U+0020, surrogates,
private use and unassigned characters.
"""

from __future__ import annotations

from typing import Final

_ELLIPSIS: Final = "…"


def printable(text: str) -> str:
    r"""Escape what cannot be printed, as ``\uXXXX`` or ``\UXXXXXXXX``; one line, and printable text is returned as it is."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escape(one) for one in text)


def peer_text(value: str, limit: int) -> str:
    """``printable``, and no longer than ``limit`` characters (at least 1): what is cut off leaves an ellipsis."""
    if len(value) <= limit and value.isprintable():
        return value
    # Escapes are longer than what they stand for, so no more than this is ever needed.
    made = printable(value[: limit + 1])
    return made if len(made) <= limit else made[: limit - 1] + _ELLIPSIS


def _escape(one: str) -> str:
    code = ord(one)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
