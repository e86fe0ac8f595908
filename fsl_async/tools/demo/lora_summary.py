"""The result of `demo lora`: the object of --json, the checks of the exit code, the table."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from attrs import frozen

from fsl_async.process.program import program
from fsl_async.roles.phrasing import counted, figure
from fsl_async.tools.demo.summary import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fsl_async.observe.ledger_audit import Audit
    from fsl_async.tools.demo.lora import LoraDemo
    from fsl_async.tools.demo.play import Played


@frozen
class Work:
    """What a site did in the run, by the ledger: accepted deltas, their steps, tokens and bytes."""

    deltas: int = 0
    steps: int = 0
    tokens: int = 0
    bytes: int = 0


def work_of(facts: Iterable[Mapping[str, Any]]) -> dict[str, Work]:
    """By client, from the ledger's facts."""
    sums: dict[str, Counter[str]] = {}
    for fact in facts:
        if fact.get("fact") == "accepted":
            client = str(fact["key"]).split("/", 1)[0]
            own = sums.setdefault(client, Counter())
            own.update({name: int(fact[name]) for name in ("steps", "tokens", "bytes")}, deltas=1)
    return {client: Work(**sums[client]) for client in sorted(sums)}


@frozen
class Summary:
    """The last object of `demo lora --json`. Losses: nats a token of the held-out records.

    bytes_up: of a site's delta as sent, mean; bytes_up_fp32: the same in full precision.
    base_bytes: of the base's files, which no site sends.
    """

    rule: str
    rank: int
    rounds: int
    clients: int
    steps: int
    tokens: int
    loss_base: float | None
    loss_alone: float | None
    loss_alone_by_site: dict[str, float]
    loss_federated: float | None
    loss_pooled: float | None
    bytes_up: int
    bytes_up_fp32: int
    base_bytes: int
    base_unchanged: bool
    relaunches: int
    deltas_merged: int
    deltas_lost: int
    deltas_doubled: int
    seconds: float
    run_dir: str


def summarize(
    demo: LoraDemo,
    played: Played,
    audit: Audit | None,
    work: Mapping[str, Work],
    measured: Mapping[str, Mapping[str, Any]],
    *,
    rank: int,
    base_bytes: int,
    base_unchanged: bool,
    seconds: float,
) -> Summary:
    """Make it. measured: by `compare`, which may have failed."""
    losses = {name: round(float(each["loss"]), 4) for name, each in measured.items()}
    alone = {name: losses[name] for name in demo.names if name in losses}
    deltas = sum(each.deltas for each in work.values())
    return Summary(
        rule=demo.rule,
        rank=rank,
        rounds=played.state.ps.rounds,
        clients=demo.clients,
        steps=sum(each.steps for each in work.values()),
        tokens=sum(each.tokens for each in work.values()),
        loss_base=losses.get("base"),
        loss_alone=round(sum(alone.values()) / len(alone), 4) if alone else None,
        loss_alone_by_site=alone,
        loss_federated=losses.get("federated"),
        loss_pooled=losses.get("pooled"),
        bytes_up=round(sum(each.bytes for each in work.values()) / max(1, deltas)),
        bytes_up_fp32=4 * int(measured.get("federated", {}).get("values", 0)),
        base_bytes=base_bytes,
        base_unchanged=base_unchanged,
        relaunches=played.state.relaunches,
        deltas_merged=audit.merged if audit is not None else 0,
        deltas_lost=len(audit.lost) if audit is not None else 0,
        deltas_doubled=len(audit.doubled) if audit is not None else 0,
        seconds=round(seconds, 1),
        run_dir=str(demo.run_dir),
    )


def problems(
    demo: LoraDemo, played: Played, audit: Audit | None, summary: Summary | None
) -> list[str]:
    """What went wrong, one line each; empty for a demo that passed."""
    found = list(played.faults)
    state, victim = played.state, demo.victim
    if state.ps.version < demo.rounds:
        found.append(f"{state.ps.version} of {demo.rounds} rounds were merged")
    if played.killed_s is None:
        found += [] if played.blames(victim) else [f"{victim} {NEVER}"]
    elif played.detected_s is None:
        found.append(f"{victim} was killed, and the parameter server did not detect it")
    elif played.caught_up_s is None:
        found.append(f"{victim} was killed and did not catch up in time")
    if audit is None:
        found.append("there is no ledger to audit")
    else:
        found += audit.complaints()
    if summary is None:
        return found
    if not summary.base_unchanged:
        found.append("the base's files have changed")
    base, federated = summary.loss_base, summary.loss_federated
    if base is None or federated is None or summary.loss_pooled is None:
        found.append("not all models were measured")
    elif not federated < base:
        found.append(f"the run's loss {figure(federated)} is not below the base's {figure(base)}")
    return found


def table(summary: Summary) -> list[str]:
    """Losses side by side."""
    rows: list[tuple[str, float | None]] = [("base, not tuned", summary.loss_base)]
    rows += [(f"{name} alone", loss) for name, loss in summary.loss_alone_by_site.items()]
    rows += [
        ("mean of the sites alone", summary.loss_alone),
        (f"federated ({summary.rule}, rank {summary.rank})", summary.loss_federated),
        ("all records in one place", summary.loss_pooled),
    ]
    base = summary.loss_base
    lines = [f"{'':32}{'held-out loss':>14}{'below base':>12}   (nats/token)"]
    for name, loss in rows:
        below = "" if base is None or loss is None or name.startswith("base") else base - loss
        shown = "-" if loss is None else figure(loss)
        lines.append(f"  {name:30}{shown:>14}{below if below == '' else f'{below:.3f}':>12}")
    return lines


def text_lines(demo: LoraDemo, played: Played, summary: Summary, audit: Audit | None) -> list[str]:
    """The summary for people."""
    up, full = summary.bytes_up, summary.bytes_up_fp32
    lines = [
        (
            f"{counted(summary.rounds, 'round')}, {summary.steps} steps and"
            f" {summary.tokens:,} tokens trained by {counted(summary.clients, 'client')}"
            f" in {summary.seconds:.0f} s"
        ),
        *table(summary),
        (
            f"a site sent {up:,} bytes a round ({full:,} in fp32, {full / max(1, up):.1f} times"
            f" more); the base has {summary.base_bytes:,}, and no site sent it"
        ),
        f"SHA-256 of the base's files: {'unchanged' if summary.base_unchanged else 'CHANGED'}",
    ]
    if audit is not None:
        lines.append(
            f"{counted(audit.acknowledged, 'delta')} acknowledged, {audit.merged} merged,"
            f" {audit.pending} waiting, {len(audit.lost)} lost,"
            f" {len(audit.doubled)} merged twice (counted in the ledger)"
        )
    if played.killed_s is not None and played.caught_up_s is not None:
        lines.append(
            f"{demo.victim}: killed at {played.killed_s:.1f} s,"
            f" detected after {_after(played, played.detected_s)},"
            f" back after {_after(played, played.relaunched_s)},"
            f" caught up after {_after(played, played.caught_up_s)}"
        )
    return [
        *lines,
        f"run directory: {summary.run_dir}",
        f"for details: {program()} status {summary.run_dir}",
    ]


def _after(played: Played, moment: float | None) -> str:
    if moment is None or played.killed_s is None:
        return "-"
    return f"{moment - played.killed_s:.1f} s"
