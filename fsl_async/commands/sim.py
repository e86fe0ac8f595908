"""`fsl-node sim`: simulate days of a run in seconds, with production code and virtual time."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from fsl_async.commands import sim_task
from fsl_async.commands.options import Finite, Whole
from fsl_async.commands.output import Output
from fsl_async.errors import UsageError
from fsl_async.roles.split.methods import METHODS

_SOMETIMES = {
    *("loss_first", "loss_last", "eval_loss", "bytes_raw", "bytes_sent", "ratio", "run_dir"),
    *("trace_sha256", "split", "tune", "groups"),
}
"""Members of the result that people see only with a value: losses are not simulated."""

if TYPE_CHECKING:
    from fsl_async.nodes.runtime import Journal
    from fsl_async.observe.journal import JournalWriter
    from fsl_async.tools.sim.groups_simulation import GroupsSimulation
    from fsl_async.tools.sim.simulation import Simulation, SimulationSettings

    Simulated = Simulation | GroupsSimulation


def _simulation_of(
    settings: SimulationSettings,
    method: str | None,
    mode: Any,
    *,
    lockstep: bool,
    journal: Journal | None,
) -> Simulated:
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
        from fsl_async.roles.split.methods import SplitRules
        from fsl_async.tools.sim.split_simulation import SplitSimulation

        rules = SplitRules(method=method, lockstep=lockstep)
        return SplitSimulation(settings, rules, keep_journal=journal)
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
@click.option("--clients", default=100, show_default=True, type=Whole(1, 100_000))
@click.option(
    "--hours", type=Finite(0, min_open=True),
    help="Of virtual time: 24; with --task to the end of the run.",
)  # fmt: skip
@click.option("--seed", type=Whole(0), help="0; with --task that of the run (run.seed).")
@click.option(
    "--faults", type=click.Choice(["none", "mild", "storm"]), help="storm; with --task none."
)
@click.option(
    "--every", "every_s", default=600.0, show_default=True, type=Finite(10.0),
    metavar="SECONDS",
    help="Seconds from one sync to the next; with --tune, how long a round waits for its clients.",
)  # fmt: skip
@click.option(
    "--split", "method", type=click.Choice(list(METHODS)), metavar="METHOD",
    help=f"Simulate split learning: {', '.join(METHODS)}.",
)  # fmt: skip
@click.option(
    "--lockstep", is_flag=True, help="With --split: one client, and one upload, at a time."
)
@click.option(
    "--tune", "mode", type=click.Choice(["lora", "zeroth"]), metavar="MODE",
    help="Simulate tuning by rounds: lora (a rule that merges products) or zeroth.",
)  # fmt: skip
@click.option(
    "--pace", default="called", show_default=True, metavar="PACE",
    type=click.Choice(["called", "time", "steps", "speed", "own"]),
    help="When clients send: called, or by themselves: time, steps, speed (DyLU), own (anarchic).",
)  # fmt: skip
@click.option(
    "--latest", is_flag=True,
    help="With --pace: each version also uses the newest delta of every other client (AFA-CS).",
)  # fmt: skip
@click.option(
    "--groups", default=1, show_default=True, type=Whole(1, 1000),
    help="Groups of --clients each, whose parameter servers average after six syncs.",
)  # fmt: skip
@sim_task.options
@click.option("--journal", metavar="FILE", help="Also write every event and effect to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    *,
    method: str | None,
    lockstep: bool,
    mode: str | None,
    journal: str | None,
    as_json: bool,
    own: dict[str, Any],
    **given: Any,
) -> int:
    """Simulate a run: production code, virtual time, and a model of 8 values.

    With --task each client trains your own function, and the end is a run directory and a table.

    Without it the invariants listed in docs/ARCHITECTURE.md are checked after every event. Exit
    code 0 when all held, 1 when one was violated.
    """
    output = Output(as_json=as_json)
    if own["task"]:
        around = {name: given[name] for name in ("clients", "hours", "seed")}
        return sim_task.run(own, output, faults=given["faults"] or "none", **around)
    from fsl_async.tools.sim.simulation import SimulationSettings
    from fsl_async.tools.sim.world import report

    chosen = {name: value for name, value in given.items() if value is not None}
    settings = SimulationSettings(**chosen)
    writer = _journal_writer(journal)
    simulation = _simulation_of(settings, method, mode, lockstep=lockstep, journal=writer)
    begun = time.monotonic()
    shows = sys.stderr.isatty() and not as_json

    def progress(hour: float) -> None:
        if shows:
            done = f"\rsimulated {hour:5.1f} of {settings.hours:g} h, "
            seen = f"{simulation.counts.events:,} events, {time.monotonic() - begun:5.1f} s "
            sys.stderr.write(done + seen)
            sys.stderr.flush()

    simulation.run(progress)
    if shows:
        sys.stderr.write("\r" + " " * 72 + "\r")
    if writer is not None:
        writer.close()
    result = report(simulation, time.monotonic() - begun, journal or "")
    for violation in simulation.violations[:10]:
        output.warn(f"invariant violated {violation}")
    shown = {
        name: value for name, value in result.items() if as_json or value or name not in _SOMETIMES
    }
    output.result(shown)
    return 1 if simulation.violations else 0
