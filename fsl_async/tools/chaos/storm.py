"""Injects the faults of a storm into a run.

When a fault is due, it finds the run's processes, logs the fault, injects it, and undoes it when
its time is over. However the storm ends (time, Ctrl-C, an error), stopped processes continue and
links are restored. At the start it undoes what an earlier storm left that was killed itself.

One seed is always the same storm. Times between faults are exponential, as of independent failures.
Kind and victim are uniform. The duration is uniform between two bounds; a kill has none, because
its launcher decides when the process is back.

The log of a storm, RUN/chaos.jsonl, has each fault, its process and its time. A line is written and
synced before the action. Times `t` are wall clock, as in the run's journals.

    {"t": 1763722149.3, "what": "storm", "faults_per_hour": 125.0, "kinds": [...], "seed": 1,
        "seconds": 300.0, "clients": [...]}
    {"t": ..., "what": "begin", "fault": 7, "kind": "stop", "name": "client-2", "pid": 4711,
        "lasts_s": 8.1}
    {"t": ..., "what": "end", "fault": 7, "kind": "stop", "name": "client-2"}
    {"t": ..., "what": "missed", "fault": 8, "kind": "kill"}    no process could be hit
    {"t": ..., "what": "over"}

A kill ends when it begins. A "missed" follows a "begin" that failed. A line that a crash or a full
disk has cut short is ended by the next write, and `JournalReader` skips it.
"""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import define, field, frozen, validators

from fsl_async.errors import UsageError
from fsl_async.files.files import FILE_MODE
from fsl_async.tools.chaos.targets import (
    FOLDER,
    KILL,
    OPEN,
    PARTITION,
    SERVER,
    SLOW,
    STOP,
    Held,
    Node,
    Run,
    file_link,
    link_of,
    nodes,
)

HOUR_S = 3600.0


@frozen
class Fault:
    """One fault: `at_s` seconds after the start, for `lasts_s`.

    share: in [0, 1), picks the victim among the possible ones.
    """

    at_s: float
    kind: str
    lasts_s: float
    share: float

    def victim(self, names: Sequence[str]) -> str | None:
        """The name of the process to hit; None when `names` is empty."""
        return names[int(self.share * len(names))] if names else None


@frozen
class Storm:
    """The parameters of a storm. away_s: shortest and longest duration of a fault."""

    faults_per_hour: float = field(validator=validators.gt(0.0))
    kinds: tuple[str, ...] = field(validator=validators.min_len(1))
    seed: int = 0
    away_s: tuple[float, float] = (2.0, 20.0)

    def faults(self, seconds: float) -> Iterator[Fault]:
        """The faults of the first `seconds`, in order; lazily, because a storm may be long."""
        rng = random.Random(f"chaos/{self.seed}")  # noqa: S311 - not for secrets
        at = rng.expovariate(self.faults_per_hour / HOUR_S)
        while at < seconds:
            kind = self.kinds[int(rng.random() * len(self.kinds))]
            lasts = rng.uniform(*self.away_s)
            yield Fault(at, kind, 0.0 if kind == KILL else lasts, rng.random())
            at += rng.expovariate(self.faults_per_hour / HOUR_S)


FILE = "chaos.jsonl"


class FaultLog:
    """Appends lines to a log."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self._descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE
        )
        size = os.fstat(self._descriptor).st_size
        self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def write(self, what: str, **facts: Any) -> None:
        """Write a line and sync it. On OSError the caller must not do what the line logs."""
        line = json.dumps({"t": round(time.time(), 4), "what": what, **facts}) + "\n"
        data = b"\n" * self._torn + line.encode()
        self._torn = True
        while data:  # a disk that becomes full may write a part without an error
            data = data[os.write(self._descriptor, data) :]
        self._torn = False
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


_TICK_S = 0.05


@frozen
class _Active:
    """A fault that has not ended. undo: removes it."""

    number: int
    kind: str
    name: str
    until: float
    undo: contextlib.ExitStack


@define
class StormRunner:
    """One storm."""

    run: Run
    storm: Storm
    log: FaultLog
    say: Callable[[str], None] = lambda _: None
    with_server: bool = False
    _active: list[_Active] = field(factory=list)

    def play(self, seconds: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Inject faults for `seconds`, or until `stopped()`.

        Raises UsageError when no process can be hit, OSError when the log cannot be written.
        """
        self._undo_earlier()
        there = self._victims()
        if not there:
            raise UsageError(f"no client of {self.run.run_dir} runs on this machine")
        self.log.write(
            "storm",
            faults_per_hour=self.storm.faults_per_hour,
            kinds=list(self.storm.kinds),
            seed=self.storm.seed,
            seconds=seconds,
            clients=[node.name for node in there if node.name != SERVER],
        )
        begun = time.monotonic()
        waiting = enumerate(self.storm.faults(seconds))
        upcoming = next(waiting, None)
        try:
            while time.monotonic() < begun + seconds and not stopped():
                now = time.monotonic()
                self._undo([one for one in self._active if one.until <= now])
                while upcoming is not None and begun + upcoming[1].at_s <= now:
                    self._begin(*upcoming)
                    upcoming = next(waiting, None)
                time.sleep(_TICK_S)
        finally:
            self._undo(list(self._active))
            self.log.write("over")

    def _victims(self) -> list[Node]:
        away = {one.name for one in self._active}
        return [
            node
            for node in nodes(self.run)
            if node.name not in away and (self.with_server or node.name != SERVER)
        ]

    def _undo_earlier(self) -> None:
        """Undo what a killed storm left: continue stopped processes, restore links."""
        for node in nodes(self.run):
            with (
                contextlib.suppress(ProcessLookupError),
                contextlib.closing(Held(self.run, node)) as held,
            ):
                held.send(signal.SIGCONT)
        folder = self.run.run_dir / FOLDER
        for path in folder.iterdir() if folder.is_dir() else ():
            if not path.name.startswith("."):
                file_link(path)(OPEN)

    def _begin(self, number: int, fault: Fault) -> None:
        there = {node.name: node for node in self._victims()}
        name = fault.victim(sorted(there))
        if name is None or not self._inject(number, fault, there[name]):
            self.log.write("missed", fault=number, kind=fault.kind)

    def _inject(self, number: int, fault: Fault, node: Node) -> bool:
        link = link_of(self.run, node) if fault.kind in {PARTITION, SLOW} else None
        if fault.kind in {PARTITION, SLOW} and link is None:
            return False
        try:
            held = Held(self.run, node)
        except OSError:
            return False
        with contextlib.ExitStack() as injected:
            injected.callback(held.close)
            self.log.write(
                "begin",
                fault=number,
                kind=fault.kind,
                name=node.name,
                pid=node.pid,
                lasts_s=round(fault.lasts_s, 3),
            )
            if link is not None:
                injected.callback(link, OPEN)  # also of a link that is cut in one direction
                link(fault.kind)
            elif not held.send(signal.SIGKILL if fault.kind == KILL else signal.SIGSTOP):
                return False
            elif fault.kind == STOP:
                injected.callback(held.send, signal.SIGCONT)
            undo = injected.pop_all()
        self.say(
            f"{fault.kind} {node.name} (process {node.pid})"
            + (f" for {fault.lasts_s:.1f} s" if fault.lasts_s else "")
        )
        until = time.monotonic() + fault.lasts_s
        self._active.append(_Active(number, fault.kind, node.name, until, undo))
        if fault.kind == KILL:
            self._undo(self._active[-1:])
        return True

    def _undo(self, ended: list[_Active]) -> None:
        """Undo and log all of them, also when one fails; then raise the first error."""
        failed: list[BaseException] = []
        for one in ended:
            self._active.remove(one)
            try:
                one.undo.close()
                self.log.write("end", fault=one.number, kind=one.kind, name=one.name)
            except BaseException as error:  # noqa: BLE001 - raised below
                failed.append(error)
        if failed:
            raise failed[0]
