"""One JSON object on one line, with a checksum as its last member. Pure.

    {"fact":"lease","name":"site-a","index":0,"crc":"1c291ca3"}

The line stays JSON that any tool reads (JSONL); `crc` is the CRC-32 (zlib) of the line before
`,"crc"`. It finds damage by accident, not by intent: a process that can write the run directory can
write the checksum too.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_SEAL = b',"crc":"'
_BLOCK_BYTES = 512
_TAIL_LENGTH = len(',"crc":"00000000"}')


def to_checksummed(members: Mapping[str, Any]) -> bytes:
    """One line without its newline, UTF-8. `members` must not be empty; raises ValueError for NaN
    or infinity.
    """
    text = json.dumps(members, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    body = text[:-1].encode()
    return body + f',"crc":"{zlib.crc32(body):08x}"}}'.encode()


def from_checksummed(line: bytes) -> dict[str, Any] | None:
    """The members without the checksum, or None when the line does not match it."""
    body, tail = line[:-_TAIL_LENGTH], line[-_TAIL_LENGTH:]
    if tail != f',"crc":"{zlib.crc32(body):08x}"}}'.encode():
        return None
    try:
        members = json.loads(body + b"}")
    except ValueError:
        return None
    return members if isinstance(members, dict) else None


def may_be_torn(line: bytes, offset: int = 0) -> bool:
    """Whether a line that does not match could be what an interrupted write left: a beginning, or
    blocks of zeros. offset: of the line in its file.

    Zeros of a torn write reach to the end of the file, or they are blocks of 512 bytes, the least
    that a disk writes. A whole line, or more than one, that does not match was altered after it was
    written. (A quote inside a JSON string is escaped, so the seal's own text cannot come before the
    seal.)
    """
    runs = [run.span() for run in re.finditer(rb"\0+", line)]
    if runs:
        edges = {0, len(line)}
        return all(
            end == len(line)
            or all(at in edges or (offset + at) % _BLOCK_BYTES == 0 for at in (begin, end))
            for begin, end in runs
        )
    at = line.find(_SEAL)
    return not line.endswith(b"\n") and (at < 0 or len(line) <= at + _TAIL_LENGTH)
