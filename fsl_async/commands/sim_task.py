"""`fsl-node sim --task`: the options of a simulation that trains, and what it prints."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fsl_async.commands.options import Finite, RunDir, Setting, Whole
from fsl_async.errors import UsageError

if TYPE_CHECKING:
    from fsl_async.commands.output import Output
    from fsl_async.tools.simulate.result import Point

_F = TypeVar("_F", bound=Callable[..., Any])
_COUNTED = ("every_s", "method", "lockstep", "mode", "pace", "latest", "groups", "journal")
"""Options of the simulation that counts instead of training."""
_OWN = (
    *("task", "config", "settings", "run_dir", "rates", "step_seconds", "workers", "resident"),
    *("links", "png"),
)
"""Options of the simulation that trains."""
_PATH = click.Path(path_type=Path)


def options(command: _F) -> _F:
    """Add the options; the command gets them as `own`."""

    @click.option(
        "--task", metavar="FILE.py:FUNCTION",
        help="Train this function of yours at every client, instead of counting.",
    )  # fmt: skip
    @click.option("--config", type=_PATH, metavar="FILE", help="With --task: the run's TOML file.")
    @click.option(
        "--set", "settings", multiple=True, type=Setting(), metavar="A.B=C",
        help="With --task: override one setting of the run; repeatable.",
    )  # fmt: skip
    @click.option(
        "--run-dir", type=RunDir(), metavar="DIR",
        help="With --task: a new run directory; runs/sim-1 or the next number if left out.",
    )  # fmt: skip
    @click.option(
        "--rates", metavar="A,B,...",
        help="With --task: speeds of the first clients, then of the next ones again; 1,1,0.3.",
    )  # fmt: skip
    @click.option(
        "--step-seconds", type=Finite(0, min_open=True), metavar="S",
        help="With --task: virtual seconds of a step at rate 1; else the time that it takes here.",
    )  # fmt: skip
    @click.option(
        "--workers", default=1, show_default=True, type=Whole(1, 1024),
        help="With --task: processes that compute the clients' steps; the result is the same.",
    )  # fmt: skip
    @click.option(
        "--resident", type=Whole(1), metavar="N",
        help="With --task: keep the models of N clients in memory and the others in files; else as"
        " many as fit.",
    )  # fmt: skip
    @click.option(
        "--link", "links", multiple=True, metavar="UP:DOWN,DELAY,LOSS",
        help="With --task: 10mbit:50mbit,30ms,0.1% or 10mbit,30ms; repeatable, as --rates.",
    )  # fmt: skip
    @click.option("--png", type=_PATH, metavar="FILE", help="With --task: also draw the losses.")
    @functools.wraps(command)
    def with_task(**given: Any) -> Any:
        own = {name: given.pop(name) for name in _OWN}
        _check(own["task"], click.get_current_context())
        return command(own=own, **given)

    return with_task  # type: ignore[return-value]


def _check(task: str | None, context: click.Context) -> None:
    """Raise UsageError for options of the other simulation."""
    wrong = _COUNTED if task else _OWN
    source = click.core.ParameterSource.DEFAULT
    for option in context.command.params:
        name = option.name or ""
        if name in wrong and context.get_parameter_source(name) is not source:
            shown = option.opts[0]
            if task:
                instead = "--set sync.every_s=S" if name == "every_s" else "--set, --config"
                raise UsageError(
                    f"{shown} is of the simulation that counts: with --task leave it out (settings"
                    f" of the run: {instead})"
                )
            raise UsageError(f"{shown} needs --task FILE.py:FUNCTION")


def run(own: dict[str, Any], output: Output, **around: Any) -> int:
    """Simulate, and print the result. own: the options, by name. Raises FslError."""
    from fsl_async.commands.client import check_task
    from fsl_async.tools.compare.plot import check_plot
    from fsl_async.tools.simulate.start import start

    task, png = own.pop("task"), own.pop("png")
    if png is not None:
        check_plot(png)
    begun = time.monotonic()
    shows = sys.stderr.isatty() and not output.as_json

    def progress(point: Point) -> None:
        if shows:
            done = f"\rversion {point.version}, {point.hours:.2f} virtual hours, loss"
            sys.stderr.write(f"{done} {point.loss:.4g}, {time.monotonic() - begun:.0f} s ")
            sys.stderr.flush()

    with contextlib.redirect_stdout(sys.stderr):  # what the training function prints
        result = start(
            check_task(task) if ".py:" in task else task,
            **own,
            **around,
            log=output.say,
            progress=progress,
        )
    if shows:
        sys.stderr.write("\r" + " " * 72 + "\r")
    if png is not None:
        result.figure().savefig(png, dpi=130)
    if output.as_json:
        output.result(result.as_dict())
    else:
        took = f"{result.seconds:.1f} s, {result.memory / 1e9:.2f} GB at most"
        faults_seen = "".join(f", {count} x {name}" for name, count in result.faults.items())
        output.say(*result.table(), "", f"{result.run_dir}: {result.reason} ({took}{faults_seen})")
    return 0
