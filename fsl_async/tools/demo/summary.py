"""A demo's result: the object of --json, the checks of the exit code, the text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from fsl_async.observe.ledger_audit import Audit
from fsl_async.process.program import program
from fsl_async.roles.phrasing import counted, figure, megabytes

if TYPE_CHECKING:
    from fsl_async.tools.demo.play import Played
    from fsl_async.tools.demo.settings import DemoSettings
    from fsl_async.tools.evaluation import Evaluated

NEVER = "was not killed: it never trained"


@frozen
class Summary:
    """The last object of `demo --json`; that of `sim` has these keys and more.

    Losses are in nats per byte.
    """

    rounds: int
    clients: int
    tokens: int
    loss_first: float | None
    loss_last: float | None
    eval_loss: float | None
    bytes_raw: int
    bytes_sent: int
    ratio: float | None
    relaunches: int
    deltas_merged: int
    deltas_lost: int
    deltas_doubled: int
    participation: float | None
    seconds: float
    run_dir: str


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def summarize(
    settings: DemoSettings, played: Played, audit: Audit | None, evaluated: Evaluated | None
) -> Summary:
    """Make the summary. Deltas are counted in the ledger; without one the counts are 0."""
    state = played.state
    return Summary(
        rounds=state.ps.rounds,
        clients=settings.clients,
        tokens=audit.tokens if audit is not None else 0,
        loss_first=_rounded(state.loss_first),
        loss_last=_rounded(state.loss_last),
        eval_loss=_rounded(evaluated.loss) if evaluated is not None else None,
        bytes_raw=state.ps.bytes_raw,
        bytes_sent=state.ps.bytes_sent,
        ratio=_rounded(state.ps.ratio),
        relaunches=state.relaunches,
        deltas_merged=audit.merged if audit is not None else 0,
        deltas_lost=len(audit.lost) if audit is not None else 0,
        deltas_doubled=len(audit.doubled) if audit is not None else 0,
        participation=_rounded(state.ps.participation),
        seconds=round(played.seconds, 1),
        run_dir=str(settings.run_dir),
    )


def problems(
    settings: DemoSettings, played: Played, audit: Audit | None, evaluated: Evaluated | None
) -> list[str]:
    """What went wrong, one line each; empty for a demo that passed."""
    state, victim = played.state, settings.victim
    found = list(played.faults)
    if played.joined_s is None and state.ps.version < 0 and not found:
        return [
            (
                f"in {settings.seconds:g} s no client had started (loading torch is slow here);"
                " give it more --seconds"
            )
        ]
    if not state.ps.rounds:
        found.append("no round was merged; give it more --seconds")
    if played.killed_s is None:
        found += [] if played.blames(victim) else [f"{victim} {NEVER}; give it more --seconds"]
    elif played.detected_s is None:
        found.append(f"{victim} was killed, and the parameter server did not detect it")
    elif played.caught_up_s is None:
        found.append(f"{victim} was killed and did not catch up in time; give it more --seconds")
    if audit is None:
        found.append("there is no ledger to audit")
    else:
        found += audit.complaints()
        if audit.tokens != state.ps.tokens:
            found.append(
                f"the ledger has {audit.tokens} merged tokens, the journal {state.ps.tokens}"
            )
    if evaluated is None:
        found.append("there is no checkpoint to evaluate")
    elif (evaluated.version, evaluated.digest) != (state.ps.version, state.ps.digest):
        found.append(
            f"the last checkpoint is version {evaluated.version} ({evaluated.digest}), "
            f"the last version of the journal {state.ps.version} ({state.ps.digest})"
        )
    return found


def text_lines(
    settings: DemoSettings, played: Played, summary: Summary, audit: Audit | None
) -> list[str]:
    """The summary for people."""
    state = played.state
    raw, sent = megabytes(summary.bytes_raw), megabytes(summary.bytes_sent)
    less = f", {summary.ratio:.1f} times less" if summary.ratio else ""
    up, down = _ratio(state.ps.up.ratio), _ratio(state.ps.down.ratio)
    first, last = _number(summary.loss_first), _number(summary.loss_last)
    lines = [
        (
            f"{counted(summary.rounds, 'round')}, {summary.tokens:,} tokens merged"
            f" from {counted(summary.clients, 'client')} in {summary.seconds:.0f} s"
        ),
        f"loss {first} at first, {last} at the end (running means, nats/byte)",
        f"loss {_number(summary.eval_loss)} of the last checkpoint, on held-out text",
        (
            f"{raw} of weights and deltas were sent as {sent}{less}"
            f" (up {up}, down {down}; new clients get full precision)"
        ),
    ]
    if audit is not None:
        lines.append(
            f"{counted(audit.acknowledged, 'delta')} acknowledged, {audit.merged} merged,"
            f" {audit.pending} waiting, {len(audit.lost)} lost,"
            f" {len(audit.doubled)} merged twice (counted in the ledger)"
        )
    if played.killed_s is not None and played.caught_up_s is not None:
        lines.append(
            f"{settings.victim}: killed at {played.killed_s:.1f} s,"
            f" detected after {_after(played, played.detected_s)},"
            f" back after {_after(played, played.relaunched_s)},"
            f" caught up after {_after(played, played.caught_up_s)}"
        )
    return [
        *lines,
        f"run directory: {summary.run_dir}",
        f"for details: {program()} status {summary.run_dir}",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else figure(value)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}x"


def _after(played: Played, moment: float | None) -> str:
    if moment is None or played.killed_s is None:
        return "-"
    return f"{moment - played.killed_s:.1f} s"
