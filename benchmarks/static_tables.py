"""The static tables of the codec: how they were made. Prints id, format, what from, and the table as it stands on the wire.

    python benchmarks/static_tables.py

They are part of the wire format (docs/WIRE.md), so running this changes nothing; it tells where they come from, and makes the next ones.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np

from fsl_codecs.code_tables import table_from_counts
from fsl_codecs.formats import format_named
from fsl_codecs.planes import cut
from fsl_codecs.quantised import quantise

if TYPE_CHECKING:
    from fsl_codecs.code_tables import CodeTable
    from fsl_codecs.formats import Float32Array

VALUES = 1 << 22
BLOCK_VALUES = 128
WIDTH = 6
SEED = 3
MADE_FROM = (
    ("e4m3", "Gauss", 14),
    ("e4m3", "Laplace", 14),
    ("e5m2", "Gauss", 14),
    ("e5m2", "Laplace", 14),
    ("uniform", "Gauss", 14),
    ("uniform", "Laplace", 14),
    ("uniform", "Gauss", 11),
    ("uniform", "Laplace", 8),
)
"""Format, distribution, step_log2 (of uniform), in the order of their numbers."""


def drawn(distribution: str) -> Float32Array:
    """Values (VALUES,) of that distribution."""
    generator = np.random.default_rng(SEED)
    if distribution == "Gauss":
        return generator.standard_normal(VALUES).astype(np.float32)
    return generator.laplace(size=VALUES).astype(np.float32)


def table_for(name: str, distribution: str, step_log2: int) -> CodeTable:
    """The own table of the uppermost plane, as for a sample: what does not occur may do so elsewhere."""
    number_format = format_named(name)
    counts = np.zeros(1 << WIDTH, dtype=np.int64)
    for block in quantise(drawn(distribution), number_format, BLOCK_VALUES, step_log2):
        plane = cut(block.words, number_format.splits[0], number_format.code_bits)[0]
        counts += np.bincount(plane, minlength=1 << WIDTH)
    return table_from_counts(counts, WIDTH, sampled=True)


def main() -> None:
    """Print the table."""
    for number, (name, distribution, step_log2) in enumerate(MADE_FROM):
        made_from = distribution + (f", step_log2 {step_log2}" if name == "uniform" else "")
        table = table_for(name, distribution, step_log2).packed.hex()
        sys.stdout.write(f"| {number} | {name} | {made_from} | `{table}` |\n")


if __name__ == "__main__":
    main()
