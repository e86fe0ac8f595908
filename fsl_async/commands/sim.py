"""`fsl-node sim`: simulate days of a run in seconds, with production code and virtual time."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsl_async.commands.options import (
    Finite,
    Options,
    RunDir,
    Setting,
    Whole,
    WithJson,
    option,
    takes,
)
from fsl_async.commands.output import Output
from fsl_async.errors import UsageError
from fsl_async.roles.split.methods import METHODS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_PACES = ["called", "time", "steps", "speed", "own"]


class _Common(Options):
    clients: int = option("", Whole(1, 100_000), default=100)
    hours: float | None = option(
        "Of virtual time: 24; with --task to the end of the run.", Finite(0, min_open=True)
    )
    seed: int | None = option("0; with --task that of the run (run.seed).", Whole(0))
    faults: str | None = option("storm; with --task none.", click.Choice(["none", "mild", "storm"]))


class _Counting(Options):
    """The options of the simulation that counts instead of training."""

    every_s: float = option(
        "Seconds from one sync to the next; with --tune, how long a round waits for its clients.",
        Finite(10.0), "SECONDS", name="--every", default=600.0,
    )  # fmt: skip
    method: str | None = option(
        f"Simulate split learning: {', '.join(METHODS)}.",
        click.Choice(list(METHODS)), "METHOD", name="--split",
    )  # fmt: skip
    lockstep: bool = option("With --split: one client, and one upload, at a time.")
    mode: str | None = option(
        "Simulate tuning by rounds: lora (a rule that merges products) or zeroth.",
        click.Choice(["lora", "zeroth"]), "MODE", name="--tune",
    )  # fmt: skip
    pace: str = option(
        "When clients send: called, or by themselves: time, steps, speed (DyLU), own (anarchic).",
        click.Choice(_PACES), "PACE", default="called",
    )  # fmt: skip
    latest: bool = option(
        "With --pace: each version also uses the newest delta of every other client (AFA-CS)."
    )
    groups: int = option(
        "Groups of --clients each, whose parameter servers average after six syncs.",
        Whole(1, 1000), default=1,
    )  # fmt: skip


class _Training(Options):
    """The options of the simulation that trains; all but --task and --png as `start` takes them."""

    task: str | None = option(
        "Train this function of yours at every client, instead of counting.",
        metavar="FILE.py:FUNCTION",
    )
    config: Path | None = option("With --task: the run's TOML file.", metavar="FILE")
    settings: tuple[str, ...] = option(
        "With --task: override one setting of the run; repeatable.",
        Setting(), "A.B=C", name="--set",
    )  # fmt: skip
    run_dir: Path | None = option(
        "With --task: a new run directory; runs/sim-1 or the next number if left out.",
        RunDir(), "DIR",
    )  # fmt: skip
    rates: str | None = option(
        "With --task: speeds of the first clients, then of the next ones again; 1,1,0.3.",
        metavar="A,B,...",
    )
    step_seconds: float | None = option(
        "With --task: virtual seconds of a step at rate 1; else the time that it takes here.",
        Finite(0, min_open=True), "S",
    )  # fmt: skip
    workers: int = option(
        "With --task: processes that compute the clients' steps; the result is the same.",
        Whole(1, 1024), default=1,
    )  # fmt: skip
    resident: int | None = option(
        "With --task: keep the models of N clients in memory and the others in files; else as"
        " many as fit.",
        Whole(1), "N",
    )  # fmt: skip
    links: tuple[str, ...] = option(
        "With --task: 10mbit:50mbit,30ms,0.1% or 10mbit,30ms; repeatable, as --rates.",
        metavar="UP:DOWN,DELAY,LOSS", name="--link",
    )  # fmt: skip
    png: Path | None = option("With --task: also draw the losses.", metavar="FILE")


class _Last(WithJson):
    journal: str | None = option("Also write every event and effect to this file.", metavar="FILE")


class SimOptions(_Common, _Counting, _Training, _Last):
    """The options of `fsl-node sim`."""

    def of(self, kind: type[Options]) -> dict[str, Any]:
        """Return the values of the options of one kind."""
        return {name: getattr(self, name) for name in kind.declared()}


def _check(task: str | None, context: click.Context) -> None:
    """Raise UsageError for options of the other simulation."""
    wrong = {*_Counting.declared(), "journal"} if task else _Training.declared()
    source = click.core.ParameterSource.DEFAULT
    for one in context.command.params:
        name = one.name or ""
        if name in wrong and context.get_parameter_source(name) is not source:
            shown = one.opts[0]
            if task:
                instead = "--set sync.every_s=S" if name == "every_s" else "--set, --config"
                raise UsageError(
                    f"{shown} is of the simulation that counts: with --task leave it out (settings"
                    f" of the run: {instead})"
                )
            raise UsageError(f"{shown} needs --task FILE.py:FUNCTION")


@contextlib.contextmanager
def _progress(output: Output) -> Iterator[Callable[[str], None]]:
    """Give a function that shows a line in a terminal over the one before; erase it at the end."""
    begun, shows = time.monotonic(), sys.stderr.isatty() and not output.as_json

    def show(text: str) -> None:
        if shows:
            sys.stderr.write(f"\r{text}, {time.monotonic() - begun:5.1f} s ")
            sys.stderr.flush()

    yield show
    if shows:
        sys.stderr.write("\r" + " " * 72 + "\r")


def _train(options: SimOptions, output: Output) -> int:
    """Simulate with the user's function, and print the result. Raises FslError."""
    from fsl_async.commands.client import check_task
    from fsl_async.tools.compare.table import check_plot
    from fsl_async.tools.sim.simulate import start

    given = options.of(_Common) | options.of(_Training)
    task, png, faults = given.pop("task"), given.pop("png"), given.pop("faults") or "none"
    if png is not None:
        check_plot(png)
    # What the training function prints goes to standard error.
    with _progress(output) as show, contextlib.redirect_stdout(sys.stderr):
        result = start(
            check_task(task) if ".py:" in task else task,
            **given,
            faults=faults,
            log=output.say,
            progress=lambda one: show(
                f"version {one.version}, {one.hours:.2f} virtual hours, loss {one.loss:.4g}"
            ),
        )
    if png is not None:
        result.figure().savefig(png, dpi=130)
    if output.as_json:
        output.result(result.as_dict())
    else:
        took = f"{result.seconds:.1f} s, {result.memory / 1e9:.2f} GB at most"
        faults_seen = "".join(f", {count} x {name}" for name, count in result.faults.items())
        output.say(*result.table(), "", f"{result.run_dir}: {result.reason} ({took}{faults_seen})")
    return 0


_SOMETIMES = {
    *("loss_first", "loss_last", "eval_loss", "bytes_raw", "bytes_sent", "ratio", "run_dir"),
    *("trace_sha256", "split", "tune", "groups"),
}
"""Members of the result that people see only with a value: losses are not simulated."""

if TYPE_CHECKING:
    from fsl_async.nodes.runtime import Journal
    from fsl_async.observe.journal import JournalWriter
    from fsl_async.tools.sim.settings import SimulationSettings
    from fsl_async.tools.sim.simulation import Run


def _simulation_of(
    settings: SimulationSettings,
    method: str | None,
    mode: Any,
    *,
    lockstep: bool,
    journal: Journal | None,
) -> Run:
    """A simulation: of split learning, of tuning, or of pretraining, in groups or not."""
    pace, groups = settings.pace, settings.groups > 1
    if pace != "called" and (method or mode):
        raise UsageError("--pace is for pretraining: --split and --tune train by rounds")
    if method and mode:
        raise UsageError("--split and --tune are both set: a run tunes a model or splits one")
    if groups and (method or mode):
        raise UsageError("--groups is for pretraining: leave out --split and --tune")
    if groups and pace != "called":
        raise UsageError(f"--groups merge by the clock: leave out --pace {pace}")
    if settings.latest and pace == "called":
        raise UsageError("--latest is for clients that send by themselves: add --pace own")
    if method:
        from fsl_async.config.settings_training import SplitConfig
        from fsl_async.tools.sim.split_simulation import SplitSimulation

        split = SplitConfig(method=method, mode="lockstep" if lockstep else "free")
        return SplitSimulation(settings, split, keep_journal=journal)
    if mode:
        from fsl_async.tools.sim.tune_simulation import TuneSimulation

        return TuneSimulation(settings, mode, keep_journal=journal)
    from fsl_async.tools.sim.groups_simulation import GroupsSimulation
    from fsl_async.tools.sim.simulation import Simulation

    return (GroupsSimulation if groups else Simulation)(settings, keep_journal=journal)


def _journal_writer(file: str | None) -> JournalWriter | None:
    """The writer of the journal, if it is kept. Raises UsageError."""
    from pathlib import Path

    from fsl_async.observe.journal import JournalWriter

    if file is None:
        return None
    try:
        return JournalWriter(Path(file), sum_up=None)
    except OSError as error:
        raise UsageError(f"--journal {file}: {error.strerror}") from None


@click.command("sim")
@takes(SimOptions)
def command(options: SimOptions) -> int:
    """Simulate a run: production code, virtual time, and a model of 8 values.

    With --task each client trains your own function, and the end is a run directory and a table.

    Without it the invariants listed in docs/ARCHITECTURE.md are checked after every event. Exit
    code 0 when all held, 1 when one was violated.
    """
    _check(options.task, click.get_current_context())
    output = Output(as_json=options.as_json)
    if options.task:
        return _train(options, output)
    from fsl_async.tools.sim.settings import SimulationSettings

    given = options.of(_Common) | options.of(_Counting)
    method, lockstep, mode = given.pop("method"), given.pop("lockstep"), given.pop("mode")
    settings = SimulationSettings(**{name: one for name, one in given.items() if one is not None})
    writer = _journal_writer(options.journal)
    simulation = _simulation_of(settings, method, mode, lockstep=lockstep, journal=writer)
    begun, counts = time.monotonic(), simulation.counts
    with _progress(output) as show:
        simulation.run(
            lambda hour: show(
                f"simulated {hour:5.1f} of {settings.hours:g} h, {counts.events:,} events"
            )
        )
    if writer is not None:
        writer.close()
    result = simulation.report(time.monotonic() - begun, options.journal or "")
    for violation in simulation.violations[:10]:
        output.warn(f"invariant violated {violation}")
    shown = {
        name: value
        for name, value in result.items()
        if options.as_json or value or name not in _SOMETIMES
    }
    output.result(shown)
    return 1 if simulation.violations else 0
