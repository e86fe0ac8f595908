"""Checks that a restarted parameter server has the settings that its run fixes.

Settings marked `fixed` in `fsl_async.config.settings` define the shared weights, their training and
their evaluation: the model's sizes, the seed, the kind of outer optimizer, how data is divided and
what part of it is held out. Everything else may change between starts: triggers and time limits,
ports, formats, rates, limits, and also the number of clients and shards, so that a run can grow.

The fixed settings are stored in run_dir/settings.json, resolved, so that a preset and its sizes
written out are equal: one line of JSON with a checksum (fsl_async.files.checksummed_json). Where
the run has no version yet, or the file is missing, the present settings are written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from fsl_async.config.load import resolved
from fsl_async.config.recipes import plain
from fsl_async.config.rules import is_own, show
from fsl_async.config.settings import TABLES, Config
from fsl_async.errors import RunDirError, disk_words
from fsl_async.files.checksummed_json import from_checksummed, to_checksummed
from fsl_async.files.files import replace_bytes

FILE = "settings.json"
_PRESET = "model.preset"
_MAX_BYTES = 1 << 20
_RULES = frozenset({"outer.optimizer", "outer.aggregation", "tune.merge"})


def fixed_settings(config: Config) -> dict[str, Any]:
    """Return the fixed settings by dotted key, resolved; of an own rule without its folder."""
    filled = resolved(config)
    return {
        (key := f"{name}.{field.name}"): _without_folder(
            key, getattr(getattr(filled, name), field.name)
        )
        for name, table in TABLES.items()
        for field in attrs.fields(table)
        if field.metadata["fixed"]
    }


def _without_folder(key: str, value: Any) -> Any:
    return Path(value).name if key in _RULES and is_own(str(value)) else value


def keep_settings(run_dir: Path, config: Config, version: int) -> None:
    """Check `config` against the stored settings, or store it when the run has no version yet (-1).

    Raises RunDirError, which names the first setting that differs, and OSError when the file cannot
    be written.
    """
    path = run_dir / FILE
    now = fixed_settings(config)
    before = _read(path) if version >= 0 else None
    if before is None:
        replace_bytes(path, to_checksummed(now) + b"\n")
        return
    differing = [key for key, value in now.items() if key in before and before[key] != value]
    sizes = [key for key in differing if key.startswith("model.") and key != _PRESET]
    # A preset only names sizes: equal sizes are equal settings, and differing ones name the preset.
    if _PRESET in differing:
        same = {*sizes} if sizes else {_PRESET}
        differing = [key for key in differing if key not in same]
    if not differing:
        return
    key = differing[0]
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    raise RunDirError(
        f"{run_dir} holds a run with {key} = {show(before[key])}, and this start has"
        f" {show(now[key])}{more}: to go on with that run, drop what changes it or add --set"
        f" {key}={plain(before[key])}; for a new run give another --run-dir"
    )


def read_settings(run_dir: Path) -> dict[str, dict[str, Any]] | None:
    """The fixed settings of a run as tables; None where it has made no version. RunDirError."""
    found = _read(run_dir / FILE)
    if found is None:
        return None
    tables: dict[str, dict[str, Any]] = {}
    for key, value in found.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    return tables


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
