"""Refuses a run directory that is something else: another node's, or a folder of data."""

from __future__ import annotations

import json
from pathlib import Path

from fsl_async.cluster.relauncher import FILE as MEMBERS
from fsl_async.errors import RunDirError
from fsl_async.observe.journal import JOURNAL
from fsl_async.observe.ledger_audit import LEDGER
from fsl_async.observe.run_state import PS

_DATA = {
    *(".txt", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst", ".py"),
    *(".safetensors", ".gguf", ".bin", ".pt"),
}
"""Kinds of files that belong to data, models and code, and to no run."""
_OTHER = "give another --run-dir"
_MOST_BYTES = 1 << 16


def check_directory(run_dir: Path) -> None:
    """Raise RunDirError for a directory in which no parameter server should write.

    One with a ledger is a run. Otherwise the journal of another role, or a file of a kind that no
    run has, such as the text to train on, says that it is none.
    """
    if not run_dir.is_dir() or (run_dir / LEDGER).exists():
        return
    role = _role_of(run_dir / JOURNAL)
    if role not in {"", PS}:
        raise RunDirError(f"{run_dir} is the run directory of a {role}: {_OTHER}")
    if role or (run_dir / JOURNAL).exists():
        return
    for one in sorted(run_dir.iterdir()):
        if one.suffix in _DATA and one.name != MEMBERS and one.is_file():
            raise RunDirError(
                f"{run_dir} holds {one.name} and no run: {_OTHER}, a new or an empty one"
            )


def _role_of(journal: Path) -> str:
    """The role in a journal's first line; empty where it tells none."""
    try:
        with journal.open("rb") as file:
            line = json.loads(file.readline(_MOST_BYTES))
    except (OSError, ValueError):
        return ""
    role = line.get("role", "") if isinstance(line, dict) else ""
    return role if isinstance(role, str) else ""
