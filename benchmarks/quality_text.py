"""Texts of `quality.py`: one that all clients share in parts, and one of unequal kinds.

"code" is the source of Python's standard library. "mixed" has three kinds of text (Python, C++ of
torch's headers, English of Python's manual pages), and each client has its own mixture, drawn from
a Dirichlet distribution (Hsu et al., arXiv:1909.06335); the held-out text has a third of each.
"""

from __future__ import annotations

import sysconfig
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

ALPHA = 0.3
"""Of the Dirichlet distribution; at 0.3 most clients have one kind of text for the most part."""

CLIENT_BYTES = 1 << 20
HELD_OUT_BYTES = 1 << 16

STDLIB = Path(sysconfig.get_path("stdlib"))


@cache
def kinds() -> tuple[bytes, ...]:
    """The three kinds of text."""
    import torch

    def joined(folder: Path, pattern: str) -> bytes:
        return b"".join(path.read_bytes() for path in sorted(folder.glob(pattern)))

    headers = joined(Path(torch.__file__).parent / "include" / "ATen" / "native", "**/*.h")
    manual = (STDLIB / "pydoc_data" / "topics.py").read_bytes().decode().replace("\\n", "\n")
    return joined(STDLIB, "*.py"), headers, manual.encode()


@cache
def mixed(seed: int, clients: int) -> tuple[str, ...]:
    """Files with the clients' texts; the end of each, HELD_OUT_BYTES, is the same in all."""
    rng = np.random.default_rng(1000 + seed)
    texts = kinds()
    part = HELD_OUT_BYTES // len(texts)
    held_out = b"".join(text[-part:] for text in texts).ljust(HELD_OUT_BYTES, b"\n")
    folder = Path(tempfile.mkdtemp(prefix="quality-text-"))
    files = []
    for client in range(clients):
        shares = rng.dirichlet([ALPHA] * len(texts))
        pieces = []
        for text, share in zip(texts, shares, strict=True):
            size = min(int(share * CLIENT_BYTES), len(text) - part)
            start = int(rng.integers(0, max(1, len(text) - part - size)))
            pieces.append(text[start : start + size])
        path = folder / f"client-{client}.txt"
        path.write_bytes(b"".join(pieces) + held_out)
        files.append(str(path))
    return tuple(files)
