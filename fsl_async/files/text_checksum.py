"""CRC-32 checksums (zlib) of the lines of a text file that grows. Pure.

    NAME KEY 1c291ca3    the checksum of all lines up to this one, its own text included

They detect accidental damage only: a process that can write the file can write its checksum.
"""

from __future__ import annotations

import zlib


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
