"""torchrun for a gang that its node starts: without its own tracebacks and warnings.

The ranks' errors are printed by themselves, and the exit code of a rank that died by torchrun; the
node says in one line why the gang ended.
"""

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main() -> int:
    """Run torchrun by this program's arguments. Returns the exit code."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    try:
        torchrun(sys.argv[1:])
    except SignalException as ended:
        return 128 + ended.sigval
    except ChildFailedError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
