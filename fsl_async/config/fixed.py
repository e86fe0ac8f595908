"""Settings that a run keeps for its life, and the check that a restarted parameter server has the
same.

Fixed are those marked so in `fsl_async.config.settings`: the meaning of the shared weights, of
their training and of their evaluation (the model's sizes, the seed, the kind of outer optimizer,
how data is divided and how much of it is held out). Everything else may change from one start to
the next: the schedule of syncs, ports, formats, rates, limits, and also the number of clients and
shards, because a run that outgrew its plan must be able to admit more.

They are kept in run_dir/settings.json, resolved, so that a preset and the same sizes written out
are equal: one line of JSON with a checksum (fsl_async.files.checksummed_json). A run without a
version has nothing to lose, so then the newest start counts; also where the file is missing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs

from fsl_async.config.load import resolved
from fsl_async.config.rules import show
from fsl_async.config.settings import TABLES, Config
from fsl_async.errors import RunDirError, disk_words
from fsl_async.files.checksummed_json import from_checksummed, to_checksummed
from fsl_async.files.private_files import write_bytes

FILE = "settings.json"
_PRESET = "model.preset"
_MAX_BYTES = 1 << 20


def fixed_settings(config: Config) -> dict[str, Any]:
    """The fixed settings by dotted key, resolved."""
    filled = resolved(config)
    return {
        f"{name}.{field.name}": getattr(getattr(filled, name), field.name)
        for name, table in TABLES.items()
        for field in attrs.fields(table)
        if field.metadata["fixed"]
    }


def keep_settings(run_dir: Path, config: Config, version: int) -> None:
    """Check `config` against the run's at its `version`, or write it down when the run has none yet
    (version -1).

    Raises RunDirError, which names the first setting that differs, and OSError when the file cannot
    be written.
    """
    path = run_dir / FILE
    now = fixed_settings(config)
    before = _read(path) if version >= 0 else None
    if before is None:
        _write(path, now)
        return
    differing = [key for key, value in now.items() if key in before and before[key] != value]
    sizes = [key for key in differing if key.startswith("model.") and key != _PRESET]
    if (
        _PRESET in differing
    ):  # says what its sizes say; and the same sizes by another name are the same
        same = {*sizes} if sizes else {_PRESET}
        differing = [key for key in differing if key not in same]
    if not differing:
        return
    key = differing[0]
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    raise RunDirError(
        f"{run_dir} holds a run with {key} = {show(before[key])}, and this start has "
        f"{show(now[key])}{more}: to go on with"
        f" that run, drop what changes it or add --set {key}={_plain(before[key])}; for a new run "
        "give another --run-dir"
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else show(value)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            line = file.read(_MAX_BYTES).rstrip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDirError(f"{path} cannot be read: {disk_words(error)}") from None
    found = from_checksummed(line)
    if found is None:
        raise RunDirError(
            f"{path} does not match its checksum; restore it from a backup, or remove it"
            " and start with the settings that the run began with"
        )
    return found


def _write(path: Path, settings: dict[str, Any]) -> None:
    """Write the whole file or none of it, durably."""
    part = path.with_name(f".{path.name}.part")
    write_bytes(part, to_checksummed(settings) + b"\n", sync=True)
    part.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
