"""From the arguments of `fsl_async.simulate` and `fsl-node sim --task` to a simulated run."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from fsl_async.config.load import load
from fsl_async.errors import UsageError
from fsl_async.learn.user_code import Task, load_task
from fsl_async.tools.simulate.result import Point, Result
from fsl_async.tools.simulate.settings import SimulateSettings
from fsl_async.tools.simulate.simulation import simulate

RUNS = Path("runs")


def free_directory(runs: Path = RUNS) -> Path:
    """Return the first folder runs/sim-1, runs/sim-2, ... that does not exist."""
    return next(
        path for number in itertools.count(1) if not (path := runs / f"sim-{number}").exists()
    )


def start(
    task: str | Task,
    *,
    config: str | Path | None,
    settings: Mapping[str, Any] | Sequence[str],
    seed: int | None,
    run_dir: str | Path | None,
    log: Callable[[str], None],
    progress: Callable[[Point], None] = lambda _: None,
    **around: Any,
) -> Result:
    """Simulate a run; see `fsl_async.simulate`. settings: or texts like "sync.every_s=60".

    around: fields of `SimulateSettings`.
    """
    function = load_task(task) if isinstance(task, str) else task
    if not callable(function):
        raise UsageError("simulate: task is a function, or a text like train.py:train")
    surroundings = SimulateSettings(**around)
    workers = min(surroundings.workers, surroundings.clients)
    surroundings = evolve(surroundings, workers=workers)
    if isinstance(settings, Mapping):
        settings = [f"{key}={_toml(value)}" for key, value in settings.items()]
    overrides = [f"sync.clients={surroundings.clients}", *settings]
    if seed is not None:
        overrides.append(f"run.seed={seed}")
    loaded = load(config, overrides)
    folder = Path(run_dir) if run_dir is not None else free_directory()
    return simulate(function, loaded, surroundings, folder, log=log, progress=progress)


def _toml(value: object) -> str:
    """Return a value as TOML; numbers, texts, truth values and lists are the same in JSON."""
    return json.dumps(value, ensure_ascii=False)
