"""Reports what a storm cost, from its fault log and the run's ledger and journals. Pure.

throughput       tokens merged per second in the storm, relative to those before it
participation    of each sync: clients in its version over clients alive when it was called. Alive
                 follows from the fault log and the client's journal, never from the parameter
                 server: not stopped, not cut off, and after a kill training again
detect, resume, back
                 seconds, see below
control          bytes at the parameter server's sockets other than chunks of weights: heads,
                 heartbeats, messages, resent chunks

A `Recovery` follows what a run makes of a fault:

detect   from the start of a fault until the parameter server ends the session, or begins one with
         a new process; of faults that it detects while they last (a kill lasts until then)
resume   from the end of a fault (a kill ends at once) until the parameter server receives the
         client's first message
back     from the end of a fault until a session's client holds the newest version
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen, mutable

from fsl_async.observe.clients import Line
from fsl_async.observe.run_state import RunState

KILL = "kill"
_SESSION = ("client_hello", "client_left")
_RECEIVED = (
    "client_hello",
    "holding",
    "heartbeat_received",
    "delta_meta",
    "model_attached",
)


@mutable
class Recovery:
    """A fault of one client and its consequences. Times in seconds since 1970; None: not yet."""

    kind: str
    name: str
    begun: float
    ended: float = math.inf
    detected: float | None = None
    resumed: float | None = None
    back: float | None = None
    back_version: int = -1
    """The version that it held then."""

    def see(self, line: Line, state: RunState) -> None:
        """Take a line of the parameter server's journal. state: after that line."""
        if line.get("peer") != self.name or line.get("kind") not in {"event", "fact"}:
            return
        at, event = float(line["t"]), line.get("type")
        was_killed = self.kind == KILL
        is_in_time = was_killed or at <= self.ended
        if self.detected is None and event in _SESSION and self.begun < at and is_in_time:
            self.detected = at
        ended = self.begun if was_killed else self.ended
        received = ("client_hello",) if was_killed else _RECEIVED
        if self.resumed is None and event in received and at > ended:
            self.resumed = at
        if self.resumed is None or self.back is not None:
            return
        client = state.clients.get(self.name)
        if client is None or not client.connected or client.version < state.ps.version:
            return
        if event == "client" or at == self.resumed:
            self.back, self.back_version = at, client.version


@frozen
class _Version:
    at: float
    number: int
    total: int
    clients: frozenset[str]


def times_of(seconds: Sequence[float]) -> dict[str, float | None]:
    """Statistics of one kind of time: count, median and 95th percentile, by nearest rank."""
    found = sorted(seconds)
    middle, high = (
        round(found[math.ceil(share * len(found)) - 1], 2) if found else None
        for share in (0.5, 0.95)
    )
    return {"count": len(found), "median_s": middle, "p95_s": high}


def report(
    fault_log: Iterable[Line],
    journal: Iterable[Line],
    ledger: Iterable[Line],
    own: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Report the last storm of a fault log; None where there was nothing to measure.

    journal: lines of the parameter server's journal. ledger: its facts.
    own: for each client, the times of its rebases by its own journal.
    """
    begin, faults, over = _storm(fault_log)
    calls: dict[int, float] = {}
    traffic: list[tuple[float, int, int]] = []
    _follow(faults, journal, over, lambda line: _take(line, calls, traffic))
    versions = [_version(fact) for fact in ledger if fact.get("fact") == "version"]
    start = float(begin["t"])
    before, rate = _rate(versions, 0.0, start), _rate(versions, start, over)
    away = [(one.name, one.begun, _alive_again(one, own)) for one in faults if one.kind != "slow"]
    shares = _participation(begin["clients"], away, calls, versions, (start, over))
    kinds: dict[str, int] = {}
    for fault in faults:
        kinds[fault.kind] = kinds.get(fault.kind, 0) + 1
    control, all_bytes = _control(traffic, start, over)
    hit = [one for one in faults if one.kind != "slow"]
    detected = [one.detected - one.begun for one in faults if one.detected is not None]
    resumed = [one.resumed - one.ended for one in hit if one.resumed is not None]
    backs = [(one.kind, one.back - one.ended) for one in hit if one.back is not None]
    return {
        "seconds": round(over - start, 1),
        "clients": len(begin["clients"]),
        "faults": len(faults),
        "faults_by_kind": kinds,
        "faults_per_hour": round(3600.0 * len(faults) / (over - start), 1) if over > start else 0.0,
        "syncs": len(shares),
        "tokens_per_s": rate and round(rate, 1),
        "tokens_per_s_before": before and round(before, 1),
        "throughput": round(rate / before, 4) if rate and before else None,
        "participation": round(sum(shares) / len(shares), 4) if shares else None,
        "participation_least": round(min(shares), 4) if shares else None,
        "detect": times_of(detected),
        "resume": times_of(resumed),
        "back": times_of([seconds for _, seconds in backs]),
        "back_after_kill": times_of([seconds for kind, seconds in backs if kind == KILL]),
        "never_back": sum(one.back is None for one in hit),
        "control_bytes": control,
        "control_share": round(control / all_bytes, 4) if all_bytes else None,
    }


def _storm(fault_log: Iterable[Line]) -> tuple[Line, list[Recovery], float]:
    """The last storm's first line, its injected faults, and its end."""
    begin: Line = {"t": 0.0, "clients": []}
    found: dict[int, Recovery] = {}
    over = 0.0
    for line in fault_log:
        moment = over = float(line["t"])
        what = line["what"]
        if what == "storm":
            begin, found = line, {}
        elif what == "begin":
            found[line["fault"]] = Recovery(line["kind"], line["name"], moment)
        elif what == "missed":
            found.pop(line["fault"], None)
        elif what == "end" and line["fault"] in found:
            one = found[line["fault"]]
            one.ended = one.begun if one.kind == KILL else moment
    for one in found.values():
        one.ended = min(one.ended, over)
    return begin, list(found.values()), over


def _follow(
    faults: Sequence[Recovery], journal: Iterable[Line], over: float, take: Callable[[Line], None]
) -> None:
    """Set what became of the faults until the storm was over. take: gets each line too."""
    state, waiting, active = RunState(), deque(faults), list[Recovery]()
    for line in journal:
        take(line)
        state.apply(line)
        while waiting and waiting[0].begun < float(line["t"]):
            active.append(waiting.popleft())
        for fault in active:
            fault.see(line, state)
        active = [fault for fault in active if fault.back is None]
    for fault in faults:
        if fault.back is not None and fault.back > over:
            fault.back = None


def _take(line: Line, calls: dict[int, float], traffic: list[tuple[float, int, int]]) -> None:
    """Keep when rounds were called, and (time, bytes at the sockets, bytes of chunks)."""
    kind, moment, message = line.get("type"), float(line["t"]), line.get("message")
    if kind == "send" and isinstance(message, Mapping) and message.get("type") == "call/1":
        calls.setdefault(int(message["round"]), moment)
    elif kind == "traffic":
        coded = sum(dict(line["coded"]).values())
        traffic.append((moment, sum(dict(line["sockets"]).values()), coded))


def _version(fact: Line) -> _Version:
    names = frozenset(str(entry["key"]).partition("/")[0] for entry in fact["merged"])
    return _Version(float(fact["at"]), int(fact["version"]), int(fact["tokens_total"]), names)


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


def _alive_again(fault: Recovery, own: Mapping[str, Sequence[float]]) -> float:
    if fault.kind != KILL:
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
