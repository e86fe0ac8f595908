"""How the user called this program, for lines that are there to be pasted."""

import os
import shlex
import shutil
import sys
from pathlib import Path

NAME = "fsl-node"
VARIABLE = "FSL_NODE_CALLED_AS"
"""Set by `bin/fsl-node`, which a fresh clone has and no PATH leads to."""


def program() -> str:
    """`fsl-node`, or what stood in its place, quoted for a shell."""
    return shlex.quote(os.environ.get(VARIABLE) or _script() or NAME)


def _script() -> str:
    """The script's path, where the bare name would not find it: an environment that is not
    activated.
    """
    given = sys.argv[0] if sys.argv else ""
    if Path(given).name != NAME or shutil.which(NAME) == given:
        return ""
    return given
