"""Reports what a storm cost, from its fault log and the run's ledger and journals. Pure.

throughput       tokens merged per second in the storm, relative to those before it (or to those of
                 another run without faults)
participation    of each sync: clients in its version over clients alive when it was called. Alive
                 follows from the fault log and the client's journal, never from the parameter
                 server: not stopped, not cut off, and after a kill training again
detect           seconds from the start of a fault until the parameter server ends the session; of
                 faults that it detected while they lasted
resume           seconds from the end of a fault (a kill ends at once) until the parameter server
                 receives the client's first message
back             seconds from the end of a fault until a session's client holds the newest version
control          bytes at the parameter server's sockets other than chunks of weights: heads,
                 heartbeats, messages, resent chunks
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import field, frozen, mutable

from fsl_async.observe.segments import SO_FAR

Line = Mapping[str, Any]
_RECEIVED = (
    "client_hello",
    "heartbeat_received",
    "version_held",
    "delta_offered",
    "model_attached",
)


@frozen
class Times:
    """Statistics of one kind of time: count, median and 95th percentile in seconds."""

    count: int
    median_s: float | None
    p95_s: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """Compute them; percentiles are by nearest rank."""
        found = sorted(seconds)
        if not found:
            return cls(0, None, None)
        middle, high = (found[math.ceil(share * len(found)) - 1] for share in (0.5, 0.95))
        return cls(len(found), round(middle, 2), round(high, 2))


@frozen
class ChaosReport:
    """The figures of a storm; None where there was nothing to measure."""

    seconds: float
    clients: int
    faults: int
    faults_by_kind: dict[str, int]
    faults_per_hour: float
    syncs: int
    tokens_per_s: float | None
    tokens_per_s_before: float | None
    throughput: float | None
    participation: float | None
    participation_least: float | None
    detect: Times
    resume: Times
    back: Times
    back_after_kill: Times
    never_back: int
    control_bytes: int
    control_share: float | None


@mutable
class _Fault:
    kind: str
    name: str
    begun: float
    ended: float
    detected: float | None = None
    resumed: float | None = None
    back: float | None = None


@mutable
class _Client:
    """Events of one client in the parameter server's journal, by time."""

    received: list[float] = field(factory=list)
    left: list[float] = field(factory=list)
    hellos: list[float] = field(factory=list)
    held: list[tuple[float, int]] = field(factory=list)

    def holds(self, at: float) -> int:
        """The version that the client reported last before `at`; -1 without one."""
        position = bisect_right(self.held, (at, math.inf))
        return self.held[position - 1][1] if position else -1

    def in_session(self, at: float) -> bool:
        """Whether the client had a session at that time."""
        since = (
            self.hellos[bisect_right(self.hellos, at) - 1]
            if self.hellos and self.hellos[0] <= at
            else None
        )
        return since is not None and not any(since < moment <= at for moment in self.left)


@frozen
class _Version:
    at: float
    number: int
    total: int
    clients: frozenset[str]


def report(
    fault_log: Iterable[Line],
    journal: Iterable[Line],
    ledger: Iterable[Line],
    own: Mapping[str, Sequence[float]],
    *,
    before: float | None = None,
) -> ChaosReport:
    """Report the last storm of a fault log.

    journal: lines of the parameter server's journal. ledger: its facts.
    own: for each client, the times of its rebases by its own journal.
    before: tokens per second without faults; default: those of this run before the storm.
    """
    begin, faults, over = _storm(fault_log)
    clients: dict[str, _Client] = {}
    calls: dict[int, float] = {}
    traffic: list[tuple[float, int, int]] = []
    for line in journal:
        _take(line, clients, calls, traffic)
    versions = [_version(fact) for fact in ledger if fact.get("fact") == "version"]
    for fault in faults:
        _follow(fault, clients.get(fault.name, _Client()), versions, over)
    start = float(begin["t"])
    before = before if before is not None else _rate(versions, 0.0, start)
    rate = _rate(versions, start, over)
    away = [(one.name, one.begun, _alive_again(one, own)) for one in faults if one.kind != "slow"]
    shares = _participation(begin["clients"], away, calls, versions, (start, over))
    kinds: dict[str, int] = {}
    for fault in faults:
        kinds[fault.kind] = kinds.get(fault.kind, 0) + 1
    control, all_bytes = _control(traffic, start, over)
    hit = [one for one in faults if one.kind != "slow"]
    resumed = [one.resumed - one.ended for one in hit if one.resumed is not None]
    backs = [(one.kind, one.back - one.ended) for one in hit if one.back is not None]
    return ChaosReport(
        seconds=round(over - start, 1),
        clients=len(begin["clients"]),
        faults=len(faults),
        faults_by_kind=kinds,
        faults_per_hour=round(3600.0 * len(faults) / (over - start), 1) if over > start else 0.0,
        syncs=len(shares),
        tokens_per_s=rate and round(rate, 1),
        tokens_per_s_before=before and round(before, 1),
        throughput=round(rate / before, 4) if rate and before else None,
        participation=round(sum(shares) / len(shares), 4) if shares else None,
        participation_least=round(min(shares), 4) if shares else None,
        detect=Times.of([one.detected - one.begun for one in faults if one.detected is not None]),
        resume=Times.of(resumed),
        back=Times.of([seconds for _, seconds in backs]),
        back_after_kill=Times.of([seconds for kind, seconds in backs if kind == "kill"]),
        never_back=sum(one.back is None for one in hit),
        control_bytes=control,
        control_share=round(control / all_bytes, 4) if all_bytes else None,
    )


def _storm(fault_log: Iterable[Line]) -> tuple[Line, list[_Fault], float]:
    """The last storm's first line, its injected faults, and its end."""
    begin: Line = {"t": 0.0, "clients": []}
    found: dict[int, _Fault] = {}
    over = 0.0
    for line in fault_log:
        moment = over = float(line["t"])
        what = line["what"]
        if what == "storm":
            begin, found = line, {}
        elif what == "begin":
            found[line["fault"]] = _Fault(line["kind"], line["name"], moment, math.inf)
        elif what == "missed":
            found.pop(line["fault"], None)
        elif what == "end" and line["fault"] in found:
            one = found[line["fault"]]
            one.ended = one.begun if one.kind == "kill" else moment
    for one in found.values():
        one.ended = min(one.ended, over)
    return begin, list(found.values()), over


def _take(
    line: Line,
    clients: dict[str, _Client],
    calls: dict[int, float],
    traffic: list[tuple[float, int, int]],
) -> None:
    kind, moment = line.get("type"), float(line["t"])
    if kind == SO_FAR and not clients:  # the oldest line of the journal
        clients.update(_connected(line, moment))
    message = line.get("message")
    if kind == "send" and isinstance(message, Mapping) and message.get("type") == "call/1":
        calls.setdefault(int(message["round"]), moment)
    elif kind == "traffic":
        coded = sum(dict(line["coded"]).values())
        traffic.append((moment, sum(dict(line["sockets"]).values()), coded))
    peer = line.get("peer")
    if not peer or line.get("kind") != "event":
        return
    client = clients.setdefault(str(peer), _Client())
    if kind == "client_left":
        client.left.append(moment)
    elif kind in _RECEIVED:
        client.received.append(moment)
    if kind == "client_hello":
        client.hellos.append(moment)
        client.held.append((moment, int(line["version"])))
    elif kind == "version_held":
        client.held.append((moment, int(line["version"])))


def _connected(line: Line, moment: float) -> dict[str, _Client]:
    """Clients whose sessions began in a segment of the journal that has been deleted."""
    there = [one for one in line["state"].get("clients", {}).values() if one.get("connected")]
    return {
        str(one["name"]): _Client(hellos=[moment], held=[(moment, int(one["version"]))])
        for one in there
    }


def _version(fact: Line) -> _Version:
    names = frozenset(str(entry["key"]).partition("/")[0] for entry in fact["merged"])
    return _Version(float(fact["at"]), int(fact["version"]), int(fact["tokens_total"]), names)


def _follow(fault: _Fault, client: _Client, versions: Sequence[_Version], over: float) -> None:
    """Set when the fault was detected, and when its client resumed and was back."""
    killed = fault.kind == "kill"
    seen = [at for at in client.left if at > fault.begun] + [
        at for at in client.hellos if at > fault.begun
    ]
    detected = min(seen, default=None)
    if detected is not None and (killed or detected <= fault.ended):
        fault.detected = detected
    received = client.hellos if killed else client.received
    fault.resumed = min((at for at in received if at > fault.ended), default=None)
    if fault.resumed is None:
        return
    moments = [fault.resumed, *(at for at, _ in client.held if at > fault.resumed)]
    for at in moments:
        if at <= over and client.in_session(at) and client.holds(at) >= _newest(versions, at):
            fault.back = at
            return


def _newest(versions: Sequence[_Version], at: float) -> int:
    return max((one.number for one in versions if one.at <= at), default=-1)


def _rate(versions: Sequence[_Version], start: float, stop: float) -> float | None:
    """Tokens per second between the first and the last version in [start, stop]."""
    there = [one for one in versions if start <= one.at <= stop and one.number > 0]
    if len(there) < 2:
        return None
    seconds = there[-1].at - there[0].at
    return (there[-1].total - there[0].total) / seconds if seconds > 0 else None


def _participation(
    names: Sequence[str],
    away: Sequence[tuple[str, float, float]],
    calls: Mapping[int, float],
    versions: Sequence[_Version],
    when: tuple[float, float],
) -> list[float]:
    """Participation of each sync that was called and made a version in the storm.

    away: (client, from, until). when: (start, end) of the storm.
    """
    shares = []
    for called in sorted(calls.values()):
        made = next((one for one in versions if one.at >= called), None)
        if not when[0] <= called <= when[1] or made is None or made.at > when[1]:
            continue
        gone = {name for name, begun, until in away if begun <= called < until}
        alive = [name for name in names if name not in gone]
        if alive:
            shares.append(sum(name in made.clients for name in alive) / len(alive))
    return shares


def _alive_again(fault: _Fault, own: Mapping[str, Sequence[float]]) -> float:
    if fault.kind != "kill":
        return fault.ended
    trains = min((at for at in own.get(fault.name, ()) if at > fault.begun), default=None)
    if trains is not None:
        return trains
    return fault.back if fault.back is not None else math.inf


def _control(
    traffic: Sequence[tuple[float, int, int]], start: float, stop: float
) -> tuple[int, int]:
    """(bytes other than chunks, all bytes) at the sockets during the storm."""
    first = max((one for one in traffic if one[0] <= start), default=(0.0, 0, 0))
    last = max((one for one in traffic if one[0] <= stop), default=first)
    everything = last[1] - first[1]
    return max(0, everything - (last[2] - first[2])), everything
