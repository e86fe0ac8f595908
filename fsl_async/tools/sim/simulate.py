"""From the arguments of `fsl_async.simulate` and `fsl-node sim --task` to a simulated run."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from fsl_async.config.load import load
from fsl_async.config.recipes import with_implied
from fsl_async.config.settings import Config
from fsl_async.errors import RunDirError, UsageError
from fsl_async.learn.data.facts import described
from fsl_async.learn.user_code import Task, load_task
from fsl_async.nodes.ps.aggregation import check_aggregation
from fsl_async.nodes.ps.directory import check_directory
from fsl_async.nodes.ps.own_rules import with_base_rule
from fsl_async.observe.ledger_audit import LEDGER
from fsl_async.process.memory import share_one_heap
from fsl_async.tools.sim.result import Point, Result
from fsl_async.tools.sim.settings import TaskSettings, check_simulated
from fsl_async.tools.sim.task_simulation import TaskSimulation
from fsl_async.tools.sim.task_split_simulation import TaskSplitSimulation

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

    around: fields of `TaskSettings`.
    """
    function = load_task(task) if isinstance(task, str) else task
    if not callable(function):
        raise UsageError("simulate: task is a function, or a text like train.py:train")
    surroundings = TaskSettings(**around)
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


def simulate(
    task: Task,
    config: Config,
    settings: TaskSettings,
    run_dir: Path,
    *,
    log: Callable[[str], None] = lambda _: None,
    progress: Callable[[Point], None] = lambda _: None,
) -> Result:
    """Simulate a run to its end; see `fsl_async.simulate`.

    config: without what the kind of run implies. progress: takes each version.
    Raises UsageError, ConfigError, RunDirError, TaskError, and what ended a client.
    """
    check_simulated(config, settings)
    check_directory(run_dir)
    if (run_dir / LEDGER).exists():
        raise RunDirError(
            f"{run_dir} holds a run, and a simulation begins a new one: give another --run-dir"
        )
    config = with_base_rule(config)
    implied = described(with_implied(config))
    check_aggregation(implied)
    if settings.step_seconds is None:
        log(
            "steps cost the time that they take here, so another computer makes other versions:"
            " give step_seconds (--step-seconds) to make them repeatable"
        )
    share_one_heap()
    before = torch.get_num_threads()
    torch.set_num_threads(config.train.threads or 1)
    try:
        kind = TaskSplitSimulation if implied.split.has_server else TaskSimulation
        return kind(task, config, implied, settings, run_dir, log, progress).result()
    finally:
        torch.set_num_threads(before)
