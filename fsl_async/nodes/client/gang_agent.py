"""torchrun for a gang that its node starts: it ends without a traceback where the node ends it."""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main as torchrun


def main() -> int:
    """Run torchrun by this program's arguments. Returns the exit code."""
    try:
        torchrun(sys.argv[1:])
    except SignalException as ended:
        return 128 + ended.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
