"""Finds the command by which the user called this program, for lines to paste."""

import os
import shlex
import sys
from pathlib import Path

from fsl_async.errors import UsageError

NAME = "fsl-node"
VARIABLE = "FSL_NODE_CALLED_AS"
"""Set by `bin/fsl-node` of a clone, which is not on PATH."""
STAMP = ".fsl-installed"
"""File in an environment that `bin/fsl-node` of a clone made: what it has installed there."""


def program() -> str:
    """Return `fsl-node`, or the path by which it was called, quoted for a shell."""
    return shlex.quote(os.environ.get(VARIABLE) or _script() or NAME)


def to_install(extras: str) -> str:
    """Return the line that installs extras here, such as "hf" or "hf,gguf".

    The environment of a clone is installed by `bin/fsl-node`, with pinned versions.
    """
    if not (Path(sys.prefix) / STAMP).is_file():
        return f"pip install 'fsl-async[{extras}]'"
    called = os.environ.get(VARIABLE) or "bin/fsl-node"
    return f"FSL_EXTRAS={extras} {shlex.quote(called)} --version"


def _script() -> str:
    """Return the script's path if PATH does not lead to it (an environment is not activated)."""
    import shutil

    given = sys.argv[0] if sys.argv else ""
    if Path(given).name != NAME or shutil.which(NAME) == given:
        return ""
    return given


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
