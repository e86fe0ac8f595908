"""Only vectors and small values pass between the sides of a client: training may be in another
process.
"""

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "support" / "distant_training.py"


def test_training_in_another_process_without_torch():
    """FSDP ranks are other processes: the exchange side needs only three vectors."""
    done = subprocess.run(
        [sys.executable, PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("ok\n", "")
