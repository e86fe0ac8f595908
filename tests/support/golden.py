"""Golden lines: a mistake, and below it the line that people must read."""

from pathlib import Path

VECTORS = Path(__file__).parents[1] / "vectors"


def golden(name):
    """Return the pairs of lines of a file in tests/vectors; its first line is a comment."""
    lines = (VECTORS / name).read_text(encoding="utf-8").splitlines()[1:]
    return [(given, line.strip()) for given, line in zip(lines[::2], lines[1::2], strict=True)]
