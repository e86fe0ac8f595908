"""CRC-32 checksums (zlib) of small text files that this program writes and reads back. Pure.

    # crc 1c291ca3       the last line of a file that is written at once (`with_checksum`)
    NAME KEY 1c291ca3    a line of a file that grows (`chained`): the checksum of all lines up to
                         this one, its own text included

They find damage by accident, not by intent: a process that can write the file can write its
checksum.
"""

from __future__ import annotations

import zlib

_MARK = b"# crc "


def with_checksum(text: bytes) -> bytes:
    """`text`, which ends with a newline or is empty, and a last line with its checksum."""
    return text + _MARK + f"{zlib.crc32(text):08x}\n".encode()


def without_checksum(data: bytes) -> bytes | None:
    """The text that `with_checksum` was given; None when it does not match its checksum, or has
    none. Empty data is an empty text.
    """
    if not data:
        return data
    text, mark, checksum = data.rpartition(_MARK)
    return text if mark and checksum == f"{zlib.crc32(text):08x}\n".encode() else None


def chained(body: bytes, before: int = 0) -> tuple[bytes, int]:
    """The line for `body` (no newline in it) behind lines whose checksum is `before`, with its
    newline; and the checksum up to it.
    """
    checksum = zlib.crc32(body, before)
    return body + f" {checksum:08x}\n".encode(), checksum


def unchained(line: bytes, before: int = 0) -> tuple[bytes, int] | None:
    """The body of a line without its newline, and the checksum up to it; None when it does not
    match.
    """
    body, _, told = line.rpartition(b" ")
    checksum = zlib.crc32(body, before)
    return (body, checksum) if told == f"{checksum:08x}".encode() else None
