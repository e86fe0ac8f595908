"""Makes a peer's text safe to show in a terminal, a log and a journal. Pure.

A peer controls every character of its names, reasons and texts. Shown raw, they could retitle or
clear a terminal (escape sequences), overwrite a line (carriage returns), forge one (line breaks) or
reorder it (bidirectional controls). Such text is therefore escaped once, where it enters.

Escaped is what ``str.isprintable`` excludes: control characters, format characters (bidirectional
controls, zero-width characters, byte order marks), line and paragraph separators, spaces other than
U+0020, surrogates, private use and unassigned characters.
"""

from __future__ import annotations

from typing import Final

_ELLIPSIS: Final = "…"


def printable(text: str) -> str:
    r"""Escape unprintable characters as ``\uXXXX`` or ``\UXXXXXXXX``. The result is one line.

    Printable text is returned unchanged.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escape(one) for one in text)


def peer_text(value: str, limit: int) -> str:
    """Return ``printable(value)``, cut to ``limit`` characters (at least 1) with an ellipsis."""
    if len(value) <= limit and value.isprintable():
        return value
    # An escape is longer than the character it stands for, so limit + 1 characters are enough.
    made = printable(value[: limit + 1])
    return made if len(made) <= limit else made[: limit - 1] + _ELLIPSIS


def _escape(one: str) -> str:
    code = ord(one)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
