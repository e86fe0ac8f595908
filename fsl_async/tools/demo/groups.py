"""`demo groups`: three parameter servers with clients of their own, which average now and then.

Times are seconds after the first global round.

    seconds / 6      SIGKILL to the last parameter server in the middle of the next reduction
    seconds / 2      SIGKILL to the first one, which coordinates, in the middle of the next one
    seconds          SIGINT to all of them, once another round was decided after the last kill

The supervisor launches what was killed again. Then the ledgers are audited.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from attrs import field, frozen, mutable

from fsl_async.cluster.deaths import Deaths
from fsl_async.cluster.restarts import RestartRules
from fsl_async.cluster.supervisor import Child, ChildExited, ChildStarted, Supervisor
from fsl_async.errors import ExitCode, FslError
from fsl_async.observe.journal import JournalReader
from fsl_async.observe.ledger_audit import audit_run
from fsl_async.observe.ring_audit import audit_ring
from fsl_async.roles.phrasing import counted
from fsl_async.tools.demo.settings import LOOPBACK, TRAINING, node_child

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fsl_async.process.stopper import Stopper

START_S = 120.0
PATIENCE_S = 60.0
LEAVE_S = 30.0
_TICK_S = 0.05
_RULES = RestartRules(first_wait_s=1.0, longest_wait_s=4.0, budget=6)


@frozen(kw_only=True)
class GroupsDemo:
    """The user's settings. every_s: of a group's syncs; global_s: of global rounds."""

    data: str
    groups: int
    clients: int
    seconds: float
    every_s: float
    global_s: float
    preset: str
    number_format: str
    seed: int
    run_dir: Path
    ports: tuple[int, ...]
    detours: dict[tuple[str, str], str] = field(factory=dict)
    """(A parameter server, another one) -> the address at which it dials that one, for a test."""

    @property
    def servers(self) -> list[str]:
        """The names of the parameter servers; the first one coordinates."""
        return [f"group-{number}" for number in range(1, self.groups + 1)]

    def folder(self, server: str) -> Path:
        """The run directory of a parameter server."""
        return self.run_dir / server

    def clients_of(self, server: str) -> list[str]:
        """The clients of a group, by name."""
        return [f"{server}-client-{number}" for number in range(1, self.clients + 1)]

    def address(self, server: str) -> str:
        """Where a parameter server listens."""
        return f"tcp://{LOOPBACK}:{self.ports[self.servers.index(server)]}"

    def overrides(self, server: str) -> list[str]:
        """The configuration of a group, as --set takes it; but for detours that of all."""
        dials = {
            name: self.detours.get((server, name), self.address(name)) for name in self.servers
        }
        roster = ", ".join(f"{name}={address}" for name, address in dials.items())
        chosen: dict[str, str | float | int] = {
            "run.seed": self.seed,
            "sync.every_s": self.every_s,
            "sync.clients": self.clients,
            "sync.grace_min_s": 0.3,
            "sync.first_grace_s": 2.0,
            "codec.up": self.number_format,
            "codec.down": self.number_format,
            "session.heartbeat_every_s": 0.5,
            "session.expire_after_s": 3.0,
            "data.shards": self.clients,
            "data.source": "site" if self.data else "built-in",
            "data.path": self.data,
            "model.preset": self.preset,
            "ring.roster": roster,
            "ring.every_s": self.global_s,
            "ring.grace_s": 5.0,
            "ring.hold_s": 30.0,
            # So slow that a reduction can be met in its middle.
            "ring.bytes_per_s": 1e6,
            **TRAINING,
        }
        return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in chosen.items()]

    def server(self, name: str) -> Child:
        """One parameter server."""
        sets = [part for override in self.overrides(name) for part in ("--set", override)]
        arguments = ["--role", "ps", self.address(name), "--name", name, "--json"]
        return node_child(name, [*arguments, "--run-dir", str(self.folder(name)), *sets])

    def client(self, server: str, name: str) -> Child:
        """One client."""
        run_dir = str(self.folder(server) / "clients" / name)
        arguments = ["--role", "client", self.address(server), "--name", name, "--json"]
        arguments += ["--run-dir", run_dir, "--allow", "deltas,metrics"]
        return node_child(name, [*arguments, *(["--data", self.data] if self.data else [])])


def free_ports(count: int) -> tuple[int, ...]:
    """Ports of the loopback that are free now."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return tuple(one.getsockname()[1] for one in sockets)


@mutable
class Seen:
    """Events of the demo, in seconds after its start."""

    first_s: float | None = None
    kills: list[tuple[str, float]] = field(factory=list)
    decided: list[float] = field(factory=list)
    faults: list[str] = field(factory=list)
    sent: dict[str, list[int]] = field(factory=dict)
    """Kind of a version as it was sent to a client -> bytes of each."""
    seconds: float = 0.0


@frozen
class GroupsSummary:
    """The result of `demo groups --json`."""

    groups: int
    clients: int
    rounds: int
    attempts: int
    members: tuple[int, ...]
    digest: str
    digests_equal: bool
    tokens: int
    deltas_merged: int
    deltas_lost: int
    deltas_doubled: int
    kills: int
    decided_after_kill_s: tuple[float, ...]
    global_updates: int
    """Global weights that came to a client as a coded update, and the bytes of one."""
    global_update_bytes: int
    full_versions: int
    """Versions that came to a client in full, and the bytes of one."""
    full_bytes: int
    seconds: float
    run_dir: str


class Play:
    """One demo; call `play`. No child process remains."""

    def __init__(self, settings: GroupsDemo, say: Callable[[str], None], stop: Stopper) -> None:
        self.settings, self.seen = settings, Seen()
        self._say, self._stop = say, stop
        self._begun = time.monotonic()
        self._readers = {
            name: JournalReader(settings.folder(name) / "journal.jsonl")
            for name in settings.servers
        }
        self._reducing: set[str] = set()
        self._ending = False
        self._deaths = Deaths()

    async def play(self) -> Seen:
        """Play it to its end. Raises FslError where children died before a global round."""
        log = self.settings.run_dir / "children.log"
        supervisor = Supervisor(log_path=log, on_change=self._changed, rules=_RULES)
        async with supervisor:
            await self._run(supervisor)
            self._ending = True
        self.seen.faults += self._deaths.lines()
        if self._deaths and not self.seen.decided and not self._stop.requested:
            raise FslError("; ".join(self.seen.faults), ExitCode.BUG)
        self.seen.seconds = self._elapsed()
        return self.seen

    async def _run(self, supervisor: Supervisor) -> None:
        settings, seen = self.settings, self.seen
        for name in settings.servers:
            supervisor.start(settings.server(name))
        for name in settings.servers:
            for client in settings.clients_of(name):
                supervisor.start(settings.client(name, client))
        if not await self._until(lambda: bool(seen.decided), START_S):
            if not self._deaths:
                seen.faults.append(f"no global round was decided in {START_S:g} s")
            return
        first = seen.decided[0]
        plan = [(settings.seconds / 6, settings.servers[-1])]
        plan.append((settings.seconds / 2, settings.servers[0]))
        for after_s, victim in plan:
            await self._until_s(first + after_s)
            await self._kill(supervisor, victim)
        await self._until_s(first + settings.seconds)
        last = seen.kills[-1][1] if seen.kills else first
        is_done = lambda: bool(seen.decided) and seen.decided[-1] > last  # noqa: E731
        if not await self._until(is_done, PATIENCE_S):
            seen.faults.append("no global round was decided after the last kill")
        await self._until(lambda: not self._reducing, 10.0)
        await self._end(supervisor)

    async def _kill(self, supervisor: Supervisor, victim: str) -> None:
        """Kill a parameter server in the middle of its next reduction."""
        if not await self._until(lambda: victim in self._reducing, PATIENCE_S):
            self.seen.faults.append(f"{victim} took part in no reduction, so it was not killed")
            return
        await asyncio.sleep(0.8)
        if supervisor.kill(victim):
            self._reducing.discard(victim)
            self.seen.kills.append((victim, self._elapsed()))
            self._say(f"{self._elapsed():5.1f} s  SIGKILL to {victim} in a reduction")

    async def _end(self, supervisor: Supervisor) -> None:
        self._ending = True
        servers = self.settings.servers
        stops = [supervisor.stop_child(name, LEAVE_S, signal.SIGINT) for name in servers]
        await asyncio.gather(*stops)
        clients = [one for name in servers for one in self.settings.clients_of(name)]
        await self._until(lambda: not any(map(supervisor.pid, clients)), 10.0)

    async def _until_s(self, at_s: float) -> None:
        """Read the journals until so long after the start."""
        await self._until(lambda: self._elapsed() >= at_s, self.settings.seconds)

    async def _until(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        """Read the journals until `is_done()`; False after `limit_s`, or when the user ends it."""
        deadline = time.monotonic() + limit_s
        while not is_done():
            if time.monotonic() >= deadline or self._stop.requested or self._is_hopeless():
                return False
            await asyncio.sleep(_TICK_S)
            for name, reader in self._readers.items():
                with contextlib.suppress(FileNotFoundError):
                    for line in reader.read():
                        self._journal(name, line)
        return True

    def _journal(self, name: str, line: dict[str, Any]) -> None:
        match line.get("type"):
            case "start_ring":
                self._reducing.add(name)
            case "ring_done" | "ring_failed" | "kill_ring" | "node_started":
                self._reducing.discard(name)
            case "version_sent":
                self.seen.sent.setdefault(line["kind_"], []).append(line["bytes_coded"])
            case "decision_kept":
                self.seen.decided.append(self._elapsed())
            case "note" if name == self.settings.servers[0] and "global" in str(line.get("text")):
                self._say(f"{self._elapsed():5.1f} s  {line['text']}")
            case _:
                pass

    def _is_hopeless(self) -> bool:
        """Whether a server, or all clients of one, only die, each of one error."""
        groups = [[name] for name in self.settings.servers]
        groups += [self.settings.clients_of(name) for name in self.settings.servers]
        return any(map(self._deaths.are_hopeless, groups))

    def _elapsed(self) -> float:
        return time.monotonic() - self._begun

    def _changed(self, change: ChildStarted | ChildExited) -> None:
        if isinstance(change, ChildStarted):
            if change.launch > 1:
                self._say(f"{self._elapsed():5.1f} s  {change.name} is launched again")
        elif not self._ending and change.code != -signal.SIGKILL:
            self._deaths.add(change)
            text = f"{change.name} ended ({change.why}): {change.error}"
            self._say(f"{self._elapsed():5.1f} s  {text}")


def summarize(settings: GroupsDemo, seen: Seen) -> GroupsSummary:
    """Audit the ledgers; adds what does not fit to the faults."""
    folders = {name: settings.folder(name) for name in settings.servers}
    ring = audit_ring(folders)
    seen.faults += ring.problems
    audits = []
    for name, folder in folders.items():
        try:
            audits.append(audit_run(folder))
        except (OSError, ValueError) as error:
            seen.faults.append(f"{name}: {error}")
            continue
        seen.faults += [f"{name}: {text}" for text in audits[-1].complaints()]
    behind = {name: at for name, at in ring.adopted.items() if at != ring.rounds}
    if behind:
        seen.faults.append(f"groups hold other global weights than {ring.rounds}: {behind}")
    after = [
        round(min((at for at in seen.decided if at > killed), default=0.0) - killed, 1)
        for _, killed in seen.kills
    ]
    coded = seen.sent.get("global", [])
    full = [size for kind in ("full", "global_full") for size in seen.sent.get(kind, [])]
    return GroupsSummary(
        groups=settings.groups,
        clients=settings.clients * settings.groups,
        rounds=ring.rounds,
        attempts=ring.attempts,
        members=ring.members,
        digest=ring.digest,
        digests_equal=not ring.problems and not behind,
        tokens=ring.tokens,
        deltas_merged=sum(one.merged for one in audits),
        deltas_lost=sum(len(one.lost) for one in audits),
        deltas_doubled=sum(len(one.doubled) for one in audits),
        kills=len(seen.kills),
        decided_after_kill_s=tuple(after),
        global_updates=len(coded),
        global_update_bytes=round(sum(coded) / max(1, len(coded))),
        full_versions=len(full),
        full_bytes=round(sum(full) / max(1, len(full))),
        seconds=round(seen.seconds, 1),
        run_dir=str(settings.run_dir),
    )


def words(found: GroupsSummary) -> list[str]:
    """The summary for people."""
    equal = "the same" if found.digests_equal else "not the same"
    rounds, attempts = counted(found.rounds, "global round"), counted(found.attempts, "attempt")
    after = ", ".join(f"{one:g} s" for one in found.decided_after_kill_s) or "-"
    merged = counted(found.deltas_merged, "delta")
    coded = counted(found.global_updates, "coded update")
    full = counted(found.full_versions, "full version")
    killed = counted(found.kills, "parameter server")
    of = ", ".join(map(str, found.members))
    lost = f"{found.deltas_lost} lost, {found.deltas_doubled} merged twice"
    return [
        f"{rounds} in {attempts}, of {of} groups; {found.tokens:,} tokens",
        f"global weights {found.rounds} ({found.digest}) are {equal} at all {found.groups} groups",
        f"{merged} merged, {lost} (counted in the ledgers)",
        f"{coded} of global weights, of {found.global_update_bytes:,} bytes",
        f"{full} sent to clients, of {found.full_bytes:,} bytes",
        f"{killed} killed in a reduction; the next decision came after {after}",
        f"run directories: {found.run_dir}",
    ]
