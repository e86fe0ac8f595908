"""Carries a storm out against a run: looks for the run's processes when a fault is due, writes down what it will do, does it, and takes it back in time.

Whatever ends it (the time, Ctrl-C, an error), who was stopped goes on and links are as they were; what an earlier storm left that was killed itself is taken back at the start.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable

from attrs import define, field

from fsl_async.errors import UsageError
from fsl_async.tools.chaos.fault_log import FaultLog
from fsl_async.tools.chaos.links import FOLDER, FileLink, LinkOf, link_of
from fsl_async.tools.chaos.schedule import KILL, PARTITION, SLOW, STOP, Fault, Storm
from fsl_async.tools.chaos.targets import SERVER, Held, Node, Run, nodes

_TICK_S = 0.05


@define
class _Going:
    """A fault that lasts."""

    number: int
    kind: str
    name: str
    until: float
    undo: Callable[[], None]


@define
class StormRunner:
    """One storm. `counts`: how often each kind was carried out."""

    run: Run
    storm: Storm
    log: FaultLog
    say: Callable[[str], None] = lambda _: None
    with_server: bool = False
    counts: dict[str, int] = field(factory=dict)
    _going: list[_Going] = field(factory=list)

    def play(self, seconds: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Storm for so long, or until `stopped()`. Raises UsageError when there is nobody to hit, OSError when the record cannot be written."""
        self._calm()
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
        coming = next(waiting, None)
        try:
            while time.monotonic() < begun + seconds and not stopped():
                now = time.monotonic()
                self._take_back([one for one in self._going if one.until <= now])
                while coming is not None and begun + coming[1].at_s <= now:
                    self._begin(*coming)
                    coming = next(waiting, None)
                time.sleep(_TICK_S)
        finally:
            self._take_back(list(self._going))
            self.log.write("over")

    def _victims(self) -> list[Node]:
        away = {one.name for one in self._going}
        return [
            node
            for node in nodes(self.run)
            if node.name not in away and (self.with_server or node.name != SERVER)
        ]

    def _calm(self) -> None:
        """Take back what a storm left that could not."""
        for node in nodes(self.run):
            with (
                contextlib.suppress(ProcessLookupError),
                contextlib.closing(Held(self.run, node)) as held,
            ):
                held.send(signal.SIGCONT)
        folder = self.run.run_dir / FOLDER
        for path in folder.iterdir() if folder.is_dir() else ():
            if not path.name.startswith("."):
                FileLink(path).restore()

    def _begin(self, number: int, fault: Fault) -> None:
        there = {node.name: node for node in self._victims()}
        name = fault.victim(sorted(there))
        if name is None or not self._strike(number, fault, there[name]):
            self.log.write("missed", fault=number, kind=fault.kind)

    def _strike(self, number: int, fault: Fault, node: Node) -> bool:
        link = link_of(self.run, node) if fault.kind in {PARTITION, SLOW} else None
        if fault.kind in {PARTITION, SLOW} and link is None:
            return False
        try:
            held = Held(self.run, node)
        except (ProcessLookupError, OSError):
            return False
        self.log.write(
            "begin",
            fault=number,
            kind=fault.kind,
            name=node.name,
            pid=node.pid,
            lasts_s=round(fault.lasts_s, 3),
        )
        undo = self._carry_out(fault.kind, held, link)
        if undo is None:
            held.close()
            return False
        self.counts[fault.kind] = self.counts.get(fault.kind, 0) + 1
        self.say(
            f"{fault.kind} {node.name} (process {node.pid})"
            + (f" for {fault.lasts_s:.1f} s" if fault.lasts_s else "")
        )
        until = time.monotonic() + fault.lasts_s
        self._going.append(_Going(number, fault.kind, node.name, until, undo))
        if fault.kind == KILL:
            self._take_back(self._going[-1:])
        return True

    def _carry_out(self, kind: str, held: Held, link: LinkOf | None) -> Callable[[], None] | None:
        """Do it; what takes it back, or None when nobody was there any more."""
        if kind in {KILL, STOP}:
            if not held.send(signal.SIGKILL if kind == KILL else signal.SIGSTOP):
                return None

            def let_go() -> None:
                if kind == STOP:
                    held.send(signal.SIGCONT)
                held.close()

            return let_go
        assert link is not None
        held.close()
        try:
            (link.cut if kind == PARTITION else link.slow)()
        except BaseException:
            with contextlib.suppress(Exception):  # it may be done in part
                link.restore()
            raise
        return link.restore

    def _take_back(self, ended: list[_Going]) -> None:
        """Take back all of them, also when one cannot be, or cannot be written down; then raise the first of those errors."""
        failed: list[BaseException] = []
        for one in ended:
            self._going.remove(one)
            try:
                one.undo()
                self.log.write("end", fault=one.number, kind=one.kind, name=one.name)
            except BaseException as error:  # noqa: BLE001 - raised below
                failed.append(error)
        if failed:
            raise failed[0]
