"""`demo groups`: three parameter servers with clients of their own, which average now and then.

Times are seconds after the first global round.

    seconds / 6      SIGKILL to the last parameter server in the middle of the next reduction
    seconds / 2      SIGKILL to the first one, which coordinates, in the middle of the next one
    seconds          SIGINT to all of them, once another round was decided after the last kill

The supervisor launches what was killed again. Then the ledgers are audited.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from attrs import field, mutable

from fsl_async.observe.clients import Line
from fsl_async.observe.ledger_audit import audit_groups, audit_run
from fsl_async.roles.phrasing import counted
from fsl_async.tools.demo import scenario
from fsl_async.tools.demo.places import LOOPBACK
from fsl_async.tools.demo.scenario import Choices, Conclusion, Fault, Node, Played, Scenario

EVERY = 4
"""Versions from one global round to the next."""
START_S = 120.0
PATIENCE_S = 60.0
_MIDDLE_S = 0.8
"""A reduction that began so long ago is in its middle."""


@mutable
class GlobalRounds:
    """Global rounds, by the lines of the servers' journals. Times in seconds since 1970."""

    reducing: dict[str, float] = field(factory=dict)
    """Server -> since when it has been in a reduction, by this process's clock."""
    decided: list[float] = field(factory=list)
    sent: dict[str, list[int]] = field(factory=dict)
    """Kind of a version as it was sent to a client -> bytes of each."""

    def see(self, name: str, line: Line) -> None:
        """Take a line of a server's journal."""
        match line.get("type"):
            case "start_reduction":
                self.reducing[name] = time.time()
            case "reduction_done" | "reduction_failed" | "kill_reduction" | "node_started":
                self.reducing.pop(name, None)
            case "version_sent" if not line.get("is_lost"):
                self.sent.setdefault(line["kind_"], []).append(line["bytes_coded"])
            case "done" if line["of"]["type"] == "keep_decision" and not line["problem"]:
                self.decided.append(time.time())
            case _:
                pass

    def since_first(self) -> float:
        """Seconds since the first decision; negative without one."""
        return time.time() - self.decided[0] if self.decided else -1.0

    def in_reduction(self, name: str, after_s: float) -> Callable[[Played], bool]:
        """A condition: `after_s` after the first round, `name` is in the middle of a reduction."""
        return lambda _: (
            self.since_first() >= after_s
            and time.time() - self.reducing.get(name, time.time()) >= _MIDDLE_S
        )

    def is_over(self, played: Played, seconds: float) -> bool:
        """Whether all faults were injected, and a round was decided after the last one."""
        if not self.decided:
            return played.elapsed() > START_S
        last = max((one.begun for one in played.faults), default=0.0)
        is_complete = len(played.faults) == len(played.scenario.faults)
        is_done = is_complete and self.decided[-1] > last and not self.reducing
        return self.since_first() >= seconds + (0.0 if is_done else PATIENCE_S)


def groups(chosen: Choices, count: int = 3, rounds: GlobalRounds | None = None) -> Scenario:
    """The demo. count: of groups. rounds: where global rounds are counted; by default its own."""
    servers, rounds = addresses(count), rounds or GlobalRounds()
    seconds, every_s = chosen.seconds or 90.0, chosen.every_s or 3.0
    per_group = chosen.clients or 2
    settings: scenario.Settings = {
        **chosen.common(per_group),
        "sync.every_s": every_s,
        "data.shards": per_group,
        **chosen.of_text(),
        "model.preset": chosen.preset or "0.5m",
        "groups.roster": ", ".join(f"{name}={address}" for name, address in servers.items()),
        "groups.every": EVERY,
        "groups.hold_s": 30.0,
        # So slow that a reduction can be met in its middle.
        "groups.bytes_per_s": 1e6,
    }
    nodes = []
    for name, address in servers.items():
        folder, words = chosen.run_dir / name, ("--name", name, *scenario.set_words(settings))
        nodes.append(Node(name=name, role="ps", at=address, run_dir=folder, options=words))
        nodes += [
            scenario.client(each, folder, "deltas,metrics", data=chosen.text, at=name)
            for each in scenario.names_of(per_group, f"{name}-")
        ]
    first, *_, last = servers
    return Scenario(
        chosen=chosen,
        settings=settings,
        nodes=nodes,
        faults=[
            Fault(last, rounds.in_reduction(last, seconds / 6)),
            Fault(first, rounds.in_reduction(first, seconds / 2)),
        ],
        is_over=lambda played: rounds.is_over(played, seconds),
        is_begun=lambda _: bool(rounds.decided),
        drain_s=30.0,
        introduction=[
            (
                f"{count} parameter servers with {per_group} clients each; a sync every"
                f" {every_s:g} s, a global round every {EVERY} versions; two of the servers get"
                f" SIGKILL in the middle of a reduction; files and logs: {chosen.run_dir}"
            ),
        ],
        conclude=lambda played, _: conclude(played, rounds),
        sees=rounds.see,
        shows=lambda name, news: name == first and news.kind == "note" and "global" in news.text,
    )


def addresses(count: int) -> dict[str, str]:
    """Parameter servers by name, the first coordinates: ports of the loopback, free now."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return {
            f"group-{number}": f"tcp://{LOOPBACK}:{one.getsockname()[1]}"
            for number, one in enumerate(sockets, 1)
        }


def conclude(played: Played, rounds: GlobalRounds) -> Conclusion:
    """Audit the ledgers."""
    servers, run_dir = played.scenario.servers, played.scenario.chosen.run_dir
    folders = {node.name: node.run_dir for node in servers}
    groups = audit_groups(folders)
    killed = {one.name: one.begun for one in played.faults}
    missed = {fault.whom for fault in played.scenario.faults} - killed.keys()
    last = max(killed.values(), default=0.0)
    problems = [*played.problems, *groups.problems]
    if not rounds.decided:
        problems.append(f"no global round was decided in {START_S:g} s")
    else:
        problems += [f"{name} took part in no reduction, so it was not killed" for name in missed]
        was_in_time = rounds.decided[-1] > last
        text = "no global round was decided after the last kill"
        problems += scenario.failed((was_in_time, text))
    audits = []
    for name, folder in folders.items():
        try:
            audits.append(audit_run(folder))
        except (OSError, ValueError) as error:
            problems.append(f"{name}: {error}")
            continue
        problems += [f"{name}: {text}" for text in audits[-1].complaints()]
    behind = {name: at for name, at in groups.adopted.items() if at != groups.rounds}
    if behind:
        problems.append(f"groups hold other global weights than {groups.rounds}: {behind}")
    after = [
        round(min((at for at in rounds.decided if at > begun), default=begun) - begun, 1)
        for begun in killed.values()
    ]
    coded = rounds.sent.get("global", [])
    full = [size for kind in ("full", "global_full") for size in rounds.sent.get(kind, [])]
    summary: dict[str, Any] = {
        "groups": len(servers),
        "clients": len(played.scenario.clients),
        "rounds": groups.rounds,
        "attempts": groups.attempts,
        "members": groups.members,
        "digest": groups.digest,
        "digests_equal": not groups.problems and not behind,
        "tokens": groups.tokens,
        **scenario.delta_counts(*audits),
        "kills": len(killed),
        "decided_after_kill_s": after,
        # Global weights that came to a client as a coded update, and versions in full.
        "global_updates": len(coded),
        "global_update_bytes": round(sum(coded) / max(1, len(coded))),
        "full_versions": len(full),
        "full_bytes": round(sum(full) / max(1, len(full))),
        "seconds": played.seconds,
        "run_dir": str(run_dir),
    }
    return Conclusion(summary, lines(summary), problems)


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return the summary as text lines."""
    equal = "the same" if found["digests_equal"] else "not the same"
    after = ", ".join(f"{one:g} s" for one in found["decided_after_kill_s"]) or "-"
    lost = f"{found['deltas_lost']} lost, {found['deltas_doubled']} merged twice"
    return [
        (
            f"{counted(found['rounds'], 'global round')} in"
            f" {counted(found['attempts'], 'attempt')}, of"
            f" {', '.join(map(str, found['members']))} groups; {found['tokens']:,} tokens"
        ),
        (
            f"global weights {found['rounds']} ({found['digest']}) are {equal} at all"
            f" {found['groups']} groups"
        ),
        f"{counted(found['deltas_merged'], 'delta')} merged, {lost} (counted in the ledgers)",
        (
            f"{counted(found['global_updates'], 'coded update')} of global weights, of"
            f" {found['global_update_bytes']:,} bytes"
        ),
        (
            f"{counted(found['full_versions'], 'full version')} sent to clients, of"
            f" {found['full_bytes']:,} bytes"
        ),
        (
            f"{counted(found['kills'], 'parameter server')} killed in a reduction; the next"
            f" decision came after {after}"
        ),
        f"run directories: {found['run_dir']}",
    ]
