"""CRC-32 checksums (zlib) of small text files. Pure.

    # crc 1c291ca3       the last line of a file that is replaced at once (`with_checksum`)
    NAME KEY 1c291ca3    a line of a file that grows (`chained`): the checksum of all lines up to
                         this one, its own text included

They detect accidental damage only: a process that can write the file can write its checksum.
"""

from __future__ import annotations

import zlib

_MARK = b"# crc "


def with_checksum(text: bytes) -> bytes:
    """Append a line with the checksum. `text` must end with a newline or be empty."""
    return text + _MARK + f"{zlib.crc32(text):08x}\n".encode()


def without_checksum(data: bytes) -> bytes | None:
    """Return the text without the line of `with_checksum`; None when that does not match.

    Empty data is an empty text.
    """
    if not data:
        return data
    text, mark, checksum = data.rpartition(_MARK)
    return text if mark and checksum == f"{zlib.crc32(text):08x}\n".encode() else None


def chained(body: bytes, before: int = 0) -> tuple[bytes, int]:
    """Return the line for `body`, with its newline, and the checksum up to it.

    body: without newline. before: the checksum of the lines before it.
    """
    checksum = zlib.crc32(body, before)
    return body + f" {checksum:08x}\n".encode(), checksum


def unchained(line: bytes, before: int = 0) -> tuple[bytes, int] | None:
    """Return the body of a line and the checksum up to it; None when it does not match.

    line: without its newline. before: the checksum of the lines before it.
    """
    body, _, written = line.rpartition(b" ")
    checksum = zlib.crc32(body, before)
    return (body, checksum) if written == f"{checksum:08x}".encode() else None
