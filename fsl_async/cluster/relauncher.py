"""Launches clients again that died: the parameter server's shell around `restarts`.

For a restarted parameter server the run's members are in `members.json` in the run directory: one
object with a checksum (`fsl_async.files.checksummed_json`). The file is replaced by a rename
whenever the members change. After a power cut the file may be old: then a client that died while
the parameter server was down is not launched, or one that has left is. Nothing else depends on it;
it may be removed between two starts.
"""

import asyncio
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from attrs import define, field

from fsl_async.cluster.launchers import (
    CommandLauncher,
    Launcher,
    LaunchError,
    LeftAloneError,
    LocalLauncher,
    SlurmLauncher,
)
from fsl_async.cluster.restarts import MOST_MEMBERS, End, Launching, Relaunches, Wait
from fsl_async.errors import RunDirError
from fsl_async.files.checksummed_json import from_checksummed, to_checksummed
from fsl_async.files.files import replace_bytes
from fsl_async.roles.goodbye import Goodbye
from fsl_async.roles.names import NAME

FILE = "members.json"
_MOST_BYTES = 1 << 20


class MembersFile:
    """Reads and writes the file at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> frozenset[str]:
        """Return the names; none where the file is missing or empty.

        Raises OSError, and RunDirError when the file was altered.
        """
        try:
            with self.path.open("rb") as file:
                data = file.read(_MOST_BYTES)
        except FileNotFoundError:
            return frozenset()
        found = from_checksummed(data.rstrip()) if data else {"members": []}
        if found is None:
            raise RunDirError(
                f"{self.path} does not match its checksum; remove it and start again:"
                " clients that died while no parameter server ran are then not launched again"
            )
        names = map(str, found["members"])
        return frozenset([name for name in names if NAME.fullmatch(name)][:MOST_MEMBERS])

    def write(self, names: AbstractSet[str]) -> None:
        """Replace the file. Raises OSError, and leaves the old file."""
        replace_bytes(self.path, to_checksummed({"members": sorted(names)}) + b"\n")


class MembersKeeper:
    """Keeps the file up to date in a thread, so that a hanging disk does not block the loop.

    A write that fails is repeated every `AGAIN_S`. trouble: called with the first error in a row.
    """

    AGAIN_S = 60.0

    def __init__(self, file: MembersFile, trouble: Callable[[OSError], None]) -> None:
        self._file = file
        self._trouble = trouble
        self._unwritten: frozenset[str] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._pause = asyncio.Event()

    def keep(self, names: frozenset[str]) -> None:
        """Set the members. For the loop's thread."""
        self._unwritten = names
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write(), name=FILE)

    async def close(self) -> None:
        """Write what is not written yet, once."""
        self._pause.set()
        if self._writing is not None:
            await self._writing

    async def _write(self) -> None:
        failed = False
        while (names := self._unwritten) is not None:
            self._unwritten = None
            try:
                await asyncio.to_thread(self._file.write, names)
                failed = False
            except OSError as error:
                if not failed:
                    self._trouble(error)
                failed = True
                if self._pause.is_set():
                    break
                if self._unwritten is None:
                    self._unwritten = names
                await self._wait()
        self._writing = None

    async def _wait(self) -> None:
        try:
            await asyncio.wait_for(self._pause.wait(), self.AGAIN_S)
        except TimeoutError:
            return


AT_ONCE = 8
"""Launches under way at the same time."""


@define(eq=False, slots=False)
class Relauncher:
    """Takes the beginnings and ends of sessions, and calls launchers. For the loop's thread.

    address: of the parameter server, for `{address}` in commands.
    tell(what, client, text): reports each decision (waiting, launched, left alone, failed, gave up)
        to the journal and to people.
    wanted: whether the run still needs clients.
    log_path: file for the output of local children.
    keeper: stores the run's members when they change.
    """

    _loop: asyncio.AbstractEventLoop
    _launching: Launching
    _address: str
    _tell: Callable[[str, str, str], None]
    _wanted: Callable[[], bool]
    _log_path: Path | None = None
    _launchers: Mapping[str, Launcher] = field(factory=dict)
    _keeper: MembersKeeper | None = None

    def __attrs_post_init__(self) -> None:
        self._machine = Relaunches(self._launching.restarts_of)
        self._launchers = self._launchers or {
            "local": LocalLauncher(self._log_path, self.exited),
            "slurm": SlurmLauncher(),
            "command": CommandLauncher(),
        }
        self._timer: asyncio.TimerHandle | None = None
        self._launches: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._kept: frozenset[str] = frozenset()

    def recovered(self, members: frozenset[str], away_s: float) -> None:
        """Take the run's members at a restart of the parameter server.

        away_s: a member that has not joined within this time counts as dead.
        """
        self._kept = members
        decided = self._machine.recovered(members, away_s, self._loop.time())
        waiting = {name: one for name, one in decided.items() if isinstance(one, Wait)}
        # One line for all: most of them are about to join again.
        if waiting and self._wanted():
            names = ", ".join([*waiting][:8]) + (", ..." if len(waiting) > 8 else "")
            wait_s = next(iter(waiting.values())).seconds
            text = (
                f"clients of the run that do not join again within {wait_s:g} s are launched again:"
                f" {names}"
            )
            self._tell("waiting", "", text)
        self._arm()

    def seen(self, client: str) -> None:
        """Take the beginning of a client's session."""
        self._machine.seen(client, self._loop.time())
        self._arm()

    def left(self, client: str, reason: str, text: str = "") -> None:
        """Take the end of a client's session. reason: the transport's. text: of its goodbye."""
        goodbye = Goodbye.read(text)
        self._report(client, self._machine.left(client, reason, self._loop.time(), goodbye))

    def exited(self, client: str, code: int, error: str = "") -> None:
        """Take the end of a local client process, which comes before the end of its session.

        error: its last error line.
        """
        if self._wanted():
            self._report(client, self._machine.exited(client, code, self._loop.time(), error))

    def _arm(self) -> None:
        if self._machine.members != self._kept:
            self._kept = frozenset(self._machine.members)
            if self._keeper is not None:
                self._keeper.keep(self._kept)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        when = self._machine.next_due()
        if when is not None and not self._closed:
            self._timer = self._loop.call_at(when, self._fire)

    def _fire(self) -> None:
        self._timer = None
        for client in self._machine.take_due(self._loop.time()):
            if self._wanted():
                task = self._loop.create_task(self._launch(client), name=f"launch {client}")
                self._launches.add(task)
                task.add_done_callback(self._launches.discard)
        self._arm()

    async def _launch(self, client: str) -> None:
        rule = self._launching.rule_of(client)
        assert rule is not None
        try:
            words = rule.words(client, self._address)
            async with self._slots:
                started = await self._launchers[rule.kind].launch(client, words)
        except LaunchError as error:
            self._tell("failed", client, f"{client} could not be launched again ({error})")
            self._report(client, self._machine.failed(client, self._loop.time()))
        except LeftAloneError as found:
            self._tell("left alone", client, f"{client} is not launched: {found}")
        else:
            self._tell("launched", client, f"launched {client} again by {rule.kind}: {started}")

    def _report(self, client: str, decided: Wait | End | None) -> None:
        self._arm()
        if self._closed:
            return
        if isinstance(decided, Wait) and self._wanted():
            self._tell("waiting", client, self._waiting_words(client, decided))
        elif isinstance(decided, End):
            self._tell("gave up", client, f"{client} is not launched any more: {decided.why}")

    def _waiting_words(self, client: str, decided: Wait) -> str:
        why = f" ({decided.why})" if decided.why else ""
        rule = self._launching.rule_of(client)
        if rule is not None and rule.kind == "slurm":
            # Slurm may requeue its job: that it is launched is not known yet.
            return (
                f"{client}: unless it comes back by itself, Slurm is asked for its job in"
                f" {decided.seconds:g} s; one is submitted if it has none{why}"
            )
        return (
            f"{client} is launched again in {decided.seconds:g} s, unless it comes back by"
            f" itself{why}"
        )

    async def close(self) -> None:
        """Stop launching and close the launchers, when the run or the parameter server ends.

        Clients that leave from now on, such as local children that are ended, are not launched.
        """
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._launches:
            task.cancel()
        await asyncio.gather(*self._launches, return_exceptions=True)
        for launcher in self._launchers.values():
            await launcher.close()
        if self._keeper is not None:
            await self._keeper.close()
