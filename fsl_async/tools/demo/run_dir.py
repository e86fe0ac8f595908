"""The run directory of a demo."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fsl_async.errors import UsageError
from fsl_async.files.private_files import make_folder


def make_run_dir(run_dir: Path | None, say: Callable[[str], None]) -> Path:
    """Create `run_dir`, or a new folder below runs/; where that cannot be written, a temporary one.

    say: takes a line about a temporary one. Raises UsageError when `run_dir` cannot be created.
    """
    if run_dir is not None:
        if (run_dir / "ledger.jsonl").exists():
            raise UsageError(f"--run-dir {run_dir} holds a run already; give a new directory")
        try:
            make_folder(run_dir)
        except OSError as error:
            raise UsageError(f"--run-dir {run_dir}: {error.strerror}") from None
        return run_dir.resolve()
    name = time.strftime("demo-%Y%m%d-%H%M%S")
    for number in range(100):
        chosen = Path("runs") / (f"{name}-{number}" if number else name)
        try:
            make_folder(chosen, exist_ok=False)
        except FileExistsError:
            continue
        except OSError:
            break
        return chosen
    made = Path(tempfile.mkdtemp(prefix="fsl-demo-"))
    say(f"cannot write here, so the run is kept in {made}")
    return made
