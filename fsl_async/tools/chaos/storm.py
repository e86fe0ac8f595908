"""Injects the faults of a storm into a run.

When a fault is due, it finds the run's processes, logs the fault, injects it, and undoes it when
its time is over. However the storm ends (time, Ctrl-C, an error), stopped processes continue and
links are restored. At the start it undoes what an earlier storm left that was killed itself.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator

from attrs import define, field, frozen

from fsl_async.errors import UsageError
from fsl_async.tools.chaos.links import FOLDER, OPEN, Link, file_link, link_of
from fsl_async.tools.chaos.schedule import KILL, PARTITION, SLOW, STOP, Fault, FaultLog, Storm
from fsl_async.tools.chaos.targets import SERVER, Held, Node, Run, nodes

_TICK_S = 0.05


@frozen
class _Active:
    """A fault that has not ended. undo: removes it."""

    number: int
    kind: str
    name: str
    until: float
    undo: contextlib.ExitStack


@contextlib.contextmanager
def injected(kind: str, held: Held, link: Link | None) -> Iterator[None]:
    """Inject a fault, and remove it when the block ends.

    Raises ProcessLookupError where the process is gone.
    """
    with contextlib.closing(held):
        if link is None:
            if not held.send(signal.SIGKILL if kind == KILL else signal.SIGSTOP):
                raise ProcessLookupError(held.node.pid)
            try:
                yield
            finally:
                if kind == STOP:
                    held.send(signal.SIGCONT)
            return
        try:
            link(kind)
            yield
        finally:
            link(OPEN)  # also of a link that is cut in one direction


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
        undo = contextlib.ExitStack()
        try:
            held = Held(self.run, node)
        except OSError:
            return False
        self.log.write(
            "begin",
            fault=number,
            kind=fault.kind,
            name=node.name,
            pid=node.pid,
            lasts_s=round(fault.lasts_s, 3),
        )
        try:
            undo.enter_context(injected(fault.kind, held, link))
        except ProcessLookupError:
            return False
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
