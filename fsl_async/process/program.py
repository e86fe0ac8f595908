"""Finds the command by which the user called this program, for lines to paste."""

import os
import shlex
import shutil
import sys
from pathlib import Path

NAME = "fsl-node"
VARIABLE = "FSL_NODE_CALLED_AS"
"""Set by `bin/fsl-node` of a clone, which is not on PATH."""


def program() -> str:
    """Return `fsl-node`, or the path by which it was called, quoted for a shell."""
    return shlex.quote(os.environ.get(VARIABLE) or _script() or NAME)


def _script() -> str:
    """Return the script's path if PATH does not lead to it (an environment is not activated)."""
    given = sys.argv[0] if sys.argv else ""
    if Path(given).name != NAME or shutil.which(NAME) == given:
        return ""
    return given
