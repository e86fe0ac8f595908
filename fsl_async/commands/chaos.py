"""`fsl-node chaos RUN`: faults on purpose against a running run of this machine, and what they cost."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsl_async.commands.numbers import Finite
from fsl_async.commands.output import Output
from fsl_async.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from fsl_async.tools.chaos.report import ChaosReport

_TIME = re.compile(r"(\d+(?:\.\d+)?)(s|min|h)?")
_UNITS = {None: 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}
_MOST_S = 366 * 86_400.0
_SETTLE_S = 2.5
"""After the storm: for the journals to be written."""


def seconds_of(text: str) -> float:
    """Read `90`, `90s`, `5min`, `1.5h`, a year at most; raises UsageError."""
    match = _TIME.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0.0 < seconds <= _MOST_S:
        raise UsageError(f"--for {text[:40]}: give a time such as 90s, 5min or 1h")
    return seconds


@click.command("chaos")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--faults-per-hour", required=True, type=Finite(0, 36_000, min_open=True),
    help="Of all clients together.",
)  # fmt: skip
@click.option(
    "--kill", is_flag=True, help="SIGKILL; whoever launched the process launches it again."
)
@click.option("--stop", is_flag=True, help="SIGSTOP, and SIGCONT after a while.")
@click.option("--partition", is_flag=True, help="Cut a client's link, and heal it after a while.")
@click.option("--slow", is_flag=True, help="Make a client's link slow (20 kB/s) for a while.")
@click.option("--server", is_flag=True, help="kill and stop may hit the parameter server too.")
@click.option(
    "--away", nargs=2, default=(2.0, 20.0), show_default=True, type=Finite(0.1, 3600.0),
    metavar="MIN MAX", help="Seconds that a stop, a cut or a slow link lasts.",
)  # fmt: skip
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--for", "lasts", default="5min", show_default=True, metavar="TIME", help="How long.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    *,
    run: Path,
    faults_per_hour: float,
    kill: bool,
    stop: bool,
    partition: bool,
    slow: bool,
    server: bool,
    away: tuple[float, float],
    seed: int,
    lasts: str,
    as_json: bool,
) -> int:
    """Hit the clients of a running run with faults, and report what they cost.

    Finds the processes of RUN, a run directory, on this machine; no other process is touched. Without --kill, --stop, --partition or --slow it kills and stops. Links
    can be cut in a network laboratory (demo --net) or where clients were started behind a proxy (demo --links). What was done is in RUN/chaos.jsonl.
    """
    from fsl_async.process.stopper import Stopper, stop_on_signals
    from fsl_async.tools.chaos.fault_log import FILE, FaultLog
    from fsl_async.tools.chaos.schedule import KINDS, Storm
    from fsl_async.tools.chaos.storm import StormRunner
    from fsl_async.tools.chaos.targets import Run

    output = Output(as_json=as_json)
    seconds = seconds_of(lasts)
    if away[0] > away[1]:
        raise UsageError(f"--away {away[0]:g} {away[1]:g}: the first is the shortest")
    asked = dict(zip(KINDS, (kill, stop, partition, slow), strict=True))
    kinds = tuple(kind for kind, wanted in asked.items() if wanted) or KINDS[:2]
    found = Run.at(run)
    try:
        log = FaultLog(found.run_dir / FILE)
    except OSError as error:
        raise UsageError(f"{run}: cannot write {FILE}: {error.strerror}") from None
    storming = StormRunner(
        found, Storm(faults_per_hour, kinds, seed, away), log, output.say, with_server=server
    )
    stopper = Stopper()
    with stop_on_signals(stopper):
        try:
            storming.play(seconds, lambda: stopper.requested)
            was_interrupted = stopper.requested
        finally:
            log.close()
        time.sleep(_SETTLE_S)
    result = summed_up(found.run_dir)
    if as_json:
        output.result(result)
    else:
        for line in words(result):
            output.say(line)
    return ExitCode.INTERRUPTED if was_interrupted else ExitCode.DONE


def summed_up(run_dir: Path, before: float | None = None) -> ChaosReport:
    """The report of a run's last storm. before: tokens a second without faults, where they are known."""
    from fsl_async.files.checksummed_json import from_checksummed
    from fsl_async.observe.journal import JournalReader
    from fsl_async.tools.chaos.fault_log import FILE, read
    from fsl_async.tools.chaos.report import report

    lines = (run_dir / "ledger.jsonl").read_bytes().splitlines()
    ledger = [fact for fact in map(from_checksummed, lines) if fact is not None]
    own = {}
    for path in run_dir.glob("clients/*/journal.jsonl"):
        own[path.parent.name] = [
            float(line["t"])
            for line in JournalReader(path, having=(b'"rebased"',)).read_all()
            if line.get("type") == "rebased"
        ]
    journal = JournalReader(run_dir / "journal.jsonl").read_all()
    return report(read(run_dir / FILE), journal, ledger, own, before=before)


def words(found: ChaosReport) -> list[str]:
    """The report for people."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found.faults_by_kind.items()))
    made = [
        f"{found.faults} faults in {found.seconds:.0f} s ({found.faults_per_hour:g} an hour) to {found.clients} clients: {kinds or 'none'}",
        f"{_number(found.tokens_per_s)} tokens/s, {_number(found.tokens_per_s_before)} before: {_share(found.throughput)} of it",
        f"{found.syncs} syncs, with {_share(found.participation)} of the clients alive when they were called ({_share(found.participation_least)} in the worst)",
    ]
    for name, times in (
        ("noticed", found.detect),
        ("heard of again", found.resume),
        ("wholly back", found.back),
        ("wholly back after a kill", found.back_after_kill),
    ):
        made.append(
            f"{name}: median {_number(times.median_s)} s, p95 {_number(times.p95_s)} s, of {times.count}"
        )
    if found.never_back:
        made.append(f"{found.never_back} were not back when the storm was over")
    made.append(
        f"{found.control_bytes:,} bytes beside weights ({_share(found.control_share)} of all)"
    )
    return made


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
