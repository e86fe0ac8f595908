"""Finds the modules that only a clone of the repository has: benchmarks and network laboratory."""

from __future__ import annotations

import sys
from pathlib import Path

from fsl_async.errors import UsageError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def has_benchmarks() -> bool:
    """Let this process import the modules of benchmarks/, after all others.

    Returns False where this package was installed without the repository.
    """
    if not (BENCHMARKS / "netlab").is_dir():
        return False
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return True


def need_benchmarks(what: str) -> None:
    """Do the same. Raises UsageError, which begins with `what`, without the repository."""
    if not has_benchmarks():
        raise UsageError(
            f"{what} needs benchmarks/ of a clone of the repository, which an installed wheel does"
            " not have; use bin/fsl-node in a clone"
        )
