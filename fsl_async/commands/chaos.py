"""`fsl-node chaos RUN`: inject faults into a run on this machine and report what they cost."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from fsl_async.commands.node import node
from fsl_async.commands.options import (
    Finite,
    RunDir,
    Whole,
    WithJson,
    argument,
    option,
    takes,
)
from fsl_async.commands.output import Output
from fsl_async.errors import ExitCode, UsageError

_TIME = re.compile(r"(\d+(?:\.\d+)?)(s|min|h)?")
_UNITS = {None: 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}
_MAX_S = 366 * 86_400.0
_SETTLE_S = 2.5
"""Wait after the storm, until the journals are written."""


def seconds_of(text: str) -> float:
    """Read `90`, `90s`, `5min` or `1.5h`, at most a year. Raises UsageError."""
    match = _TIME.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0.0 < seconds <= _MAX_S:
        raise UsageError(f"--for {text[:40]}: give a time such as 90s, 5min or 1h")
    return seconds


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """Read the options of a node's command line, as far as they can be read."""
    return node.make_context(node.name, list(words), resilient_parsing=True).params


class ChaosOptions(WithJson):
    """The options of `fsl-node chaos`."""

    run: Path = argument(RunDir())
    faults_per_hour: float = option(
        "Of all clients together.", Finite(0, 36_000, min_open=True), required=True
    )
    kill: bool = option("SIGKILL; the process's launcher launches it again.")
    stop: bool = option("SIGSTOP, and SIGCONT after a while.")
    partition: bool = option("Cut a client's link, and restore it after a while.")
    slow: bool = option("Make a client's link slow (20 kB/s) for a while.")
    server: bool = option("kill and stop may hit the parameter server too.")
    away: tuple[float, float] = option(
        "Seconds that a stop, a cut or a slow link lasts.",
        Finite(0.1, 3600.0), "MIN MAX", default=(2.0, 20.0), nargs=2,
    )  # fmt: skip
    seed: int = option("", Whole(0), default=0)
    lasts: str = option("How long.", None, "TIME", name="--for", default="5min")


@click.command("chaos")
@takes(ChaosOptions)
def command(options: ChaosOptions) -> int:
    """Inject faults into the clients of a running run, and report what they cost.

    Finds the processes of RUN, a run directory, on this machine; no other process is hit. Without
    --kill, --stop, --partition or --slow it kills and stops. Links can be cut in a network
    laboratory (demo --net) or where clients were started behind a proxy (demo --links).
    RUN/chaos.jsonl logs every fault.
    """
    from fsl_async.process.stopper import Stopper, stop_on_signals
    from fsl_async.tools.chaos.storm import FILE, FaultLog, Storm, StormRunner
    from fsl_async.tools.chaos.targets import KINDS, Run

    output = Output(as_json=options.as_json)
    seconds, away = seconds_of(options.lasts), options.away
    if away[0] > away[1]:
        raise UsageError(f"--away {away[0]:g} {away[1]:g}: MIN is above MAX")
    kinds = tuple(kind for kind in KINDS if getattr(options, kind)) or KINDS[:2]
    found = Run.at(options.run, options_of)
    try:
        log = FaultLog(found.run_dir / FILE)
    except OSError as error:
        raise UsageError(f"{options.run}: cannot write {FILE}: {error.strerror}") from None
    storm = Storm(options.faults_per_hour, kinds, options.seed, away)
    storming = StormRunner(found, storm, log, output.say, with_server=options.server)
    stopper = Stopper()
    with stop_on_signals(stopper):
        try:
            storming.play(seconds, lambda: stopper.requested)
            was_interrupted = stopper.requested
        finally:
            log.close()
        time.sleep(_SETTLE_S)
    result = report_of(found.run_dir)
    output.answer(result, *text_lines(result))
    return ExitCode.INTERRUPTED if was_interrupted else ExitCode.DONE


def report_of(run_dir: Path) -> dict[str, Any]:
    """The report of a run's last storm."""
    from fsl_async.observe.journal import JournalReader
    from fsl_async.observe.ledger_audit import LEDGER, read_ledger
    from fsl_async.tools.chaos.report import report
    from fsl_async.tools.chaos.storm import FILE

    ledger, _ = read_ledger(run_dir / LEDGER)
    own = {}
    for path in run_dir.glob("clients/*/journal.jsonl"):
        own[path.parent.name] = [
            float(line["t"])
            for line in JournalReader(path, having=(b'"rebased"',)).read_all()
            if line.get("type") == "rebased"
        ]
    journal = JournalReader(run_dir / "journal.jsonl").read_all()
    faults = JournalReader(run_dir / FILE).read_all()
    return report(faults, journal, ledger, own)


def text_lines(found: Mapping[str, Any]) -> list[str]:
    """Return the report as lines of text."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found["faults_by_kind"].items()))
    rate, rate_before = _number(found["tokens_per_s"]), _number(found["tokens_per_s_before"])
    lines = [
        (
            f"{found['faults']} faults in {found['seconds']:.0f} s"
            f" ({found['faults_per_hour']:g} an hour) to {found['clients']} clients:"
            f" {kinds or 'none'}"
        ),
        f"{rate} tokens/s, {rate_before} before: {_share(found['throughput'])} of it",
        (
            f"{found['syncs']} syncs, with {_share(found['participation'])} of the clients alive"
            f" when they were called ({_share(found['participation_least'])} in the worst)"
        ),
    ]
    for name, times in (
        ("detected", found["detect"]),
        ("resumed", found["resume"]),
        ("recovered", found["back"]),
        ("recovered after a kill", found["back_after_kill"]),
    ):
        median, high = _number(times["median_s"]), _number(times["p95_s"])
        lines.append(f"{name}: median {median} s, p95 {high} s, of {times['count']}")
    if found["never_back"]:
        lines.append(f"{found['never_back']} had not recovered when the storm ended")
    share = _share(found["control_share"])
    lines.append(f"{found['control_bytes']:,} bytes other than weights, {share} of all")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
