"""From the arguments of `fsl_async.simulate` and `fsl-node sim --task` to a simulated run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsl_async.config.load import load
from fsl_async.errors import UsageError
from fsl_async.learn.user_code import Task, load_task
from fsl_async.tools.simulate.result import Point, Result
from fsl_async.tools.simulate.settings import Link, SimulateSettings, check_rates, read_link
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
    clients: int,
    config: str | Path | None,
    settings: Mapping[str, Any] | Sequence[str],
    links: str | Iterable[str] | None,
    faults: str,
    seed: int | None,
    hours: float | None,
    rates: Sequence[float] | None,
    step_seconds: float | None,
    workers: int,
    resident: int | None,
    run_dir: str | Path | None,
    log: Callable[[str], None],
    progress: Callable[[Point], None] = lambda _: None,
) -> Result:
    """Simulate a run; see `fsl_async.simulate`. settings: or texts like "sync.every_s=60"."""
    function = load_task(task) if isinstance(task, str) else task
    if not callable(function):
        raise UsageError("simulate: task is a function, or a text like train.py:train")
    if clients < 1:
        raise UsageError(f"simulate: clients={clients}: at least 1")
    if hours is not None and hours <= 0:
        raise UsageError(f"simulate: hours={hours:g}: above 0")
    if step_seconds is not None and step_seconds <= 0:
        raise UsageError(f"simulate: step_seconds={step_seconds:g}: above 0")
    if workers < 1 or (resident is not None and resident < 1):
        raise UsageError(f"simulate: workers={workers}, resident={resident}: at least 1")
    if isinstance(settings, Mapping):
        settings = [f"{key}={_toml(value)}" for key, value in settings.items()]
    overrides = [f"sync.clients={clients}", *settings]
    if seed is not None:
        overrides.append(f"run.seed={seed}")
    loaded = load(config, overrides)
    folder = Path(run_dir) if run_dir is not None else free_directory()
    given = [links] if isinstance(links, str) else list(links or ())
    around = SimulateSettings(
        clients=clients,
        faults=faults,
        hours=hours,
        step_seconds=step_seconds,
        workers=min(workers, clients),
        resident=resident,
        rates=check_rates((1.0,) if rates is None else tuple(rates)),
        links=tuple(read_link(one) for one in given) or (Link(),),
    )
    return simulate(function, loaded, around, folder, log=log, progress=progress)


def _toml(value: object) -> str:
    """Return a value as TOML; numbers, texts, truth values and lists are the same in JSON."""
    return json.dumps(value, ensure_ascii=False)
