"""Reads and writes checksummed JSON: one object on one line, with its CRC as last member. Pure.

    {"fact":"lease","name":"site-a","index":0,"crc":"1c291ca3"}

Any tool can read the lines as JSONL. `crc` is the CRC-32 (zlib) of the line before `,"crc"`. It
detects accidental damage only: a process that can write the run directory can write checksums too.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_MARK = b',"crc":"'
_BLOCK_BYTES = 512
_TAIL_LENGTH = len(',"crc":"00000000"}')


def to_checksummed(members: Mapping[str, Any]) -> bytes:
    """Return one UTF-8 line without its newline. `members` must not be empty.

    Raises ValueError for NaN or infinity.
    """
    text = json.dumps(members, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    body = text[:-1].encode()
    return body + f',"crc":"{zlib.crc32(body):08x}"}}'.encode()


def from_checksummed(line: bytes) -> dict[str, Any] | None:
    """Return the members without the checksum, or None when the line does not match it."""
    body, tail = line[:-_TAIL_LENGTH], line[-_TAIL_LENGTH:]
    if tail != f',"crc":"{zlib.crc32(body):08x}"}}'.encode():
        return None
    try:
        members = json.loads(body + b"}")
    except ValueError:
        return None
    return members if isinstance(members, dict) else None


def may_be_torn(line: bytes, offset: int = 0) -> bool:
    """Whether a line that does not match may be the rest of an interrupted write.

    That is a beginning of a line, or zeros up to the end of the file or in blocks of 512 bytes, the
    least that a disk writes. A complete line, or more than one, that does not match was altered
    after it was written. (A quote inside a JSON string is escaped, so `_MARK` occurs once.)
    offset: of the line in its file.
    """
    runs = [run.span() for run in re.finditer(rb"\0+", line)]
    if runs:
        edges = {0, len(line)}
        return all(
            end == len(line)
            or all(at in edges or (offset + at) % _BLOCK_BYTES == 0 for at in (begin, end))
            for begin, end in runs
        )
    at = line.find(_MARK)
    return not line.endswith(b"\n") and (at < 0 or len(line) <= at + _TAIL_LENGTH)
