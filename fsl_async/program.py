"""How the user called this program, for lines that are there to be pasted."""

import os
import shlex

VARIABLE = "FSL_NODE_CALLED_AS"
"""Set by `bin/fsl-node`, which a fresh clone has and no PATH leads to."""


def program() -> str:
    """`fsl-node`, or what stood in its place, quoted for a shell."""
    return shlex.quote(os.environ.get(VARIABLE) or "fsl-node")
