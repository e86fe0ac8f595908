"""The journals of a world: the production writer on files that survive a crash as they would, and
what must hold of them.

A writer's thread has its turns in virtual time here, as late as it may have them: lines wait until
`FLUSH_EVERY_S` is nearly over, and those that wait when a process is killed are gone. The server's
writes go through its crash disk: they are counted among its calls, fail, are torn, and are lost in
a power cut, because nobody syncs a journal.
"""

from __future__ import annotations

import os
import shutil
from itertools import pairwise
from typing import Any

from attrs import define, field

from fsl_async.observe.journal import FLUSH_EVERY_S, JournalReader, JournalWriter
from fsl_async.observe.ledger_audit import JOURNAL, acknowledged_keys


class CrashJournal(JournalWriter):
    """One life's journal. `killed` is called when the disk kills the process that writes a line."""

    def __init__(self, path, clock, wall, *, disk=None, killed=lambda: None):
        self._turns, self._disk, self._killed = clock, disk, killed
        self._planned = False
        super().__init__(path, clock=wall)
        if disk is not None:
            disk.adopt(path)

    def _flush_often(self):
        """The thread has nothing to do."""

    def _add(self, *line):
        number = super()._add(*line)
        if not self._planned:
            self._planned = True
            self._turns.call_at(self._turns.time() + FLUSH_EVERY_S * 0.9, self._turn_comes)
        return number

    def _turn_comes(self):
        self._planned = False
        try:
            self.flush()
        except SystemExit:
            self._killed()
            raise

    def _put(self, data):
        if self._disk is None:
            return super()._put(data)
        return self._disk.append(self._file, data)

    def die(self):
        """As kill -9 does it: what waits is gone."""
        self._closing.set()
        self._flusher.join()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@define
class Life:
    """A process, and what its journal has to say of deltas."""

    journal: CrashJournal
    told: dict[str, float] = field(
        factory=dict
    )  # key -> when it was told, or heard, that it is safe
    killed_at: float | None = None
    cut: bool = False  # the machine lost its power then


@define
class Witnesses:
    """Every life of every process of a world."""

    lives: dict[str, list[Life]] = field(factory=dict)

    def begin(self, name: str, journal: CrashJournal) -> CrashJournal:
        """A process has opened its journal."""
        self.lives.setdefault(name, []).append(Life(journal))
        return journal

    def tells(self, name: str, key: str, now: float) -> None:
        """Its machine has decided to tell a client that a delta is safe, or has heard so."""
        self.lives[name][-1].told.setdefault(key, now)

    def dies(self, name: str, now: float, *, cut: bool) -> None:
        """It is killed; before its journal was open that leaves nothing to say."""
        for life in self.lives.get(name, [])[-1:]:
            if life.killed_at is None:
                life.journal.die()
                life.killed_at, life.cut = now, cut

    def end(self) -> None:
        """All that are left close their journals, as they do at their ends."""
        for lives in self.lives.values():
            lives[-1].journal.close()


def gather(world) -> None:
    """Put the clients' journals where an operator would, and an audit looks for them."""
    if world.others.is_dir():
        shutil.copytree(world.others, world.run_dir / "clients")


def check_journals(world) -> list[str]:
    """Sentences about journals that say what was not, or do not say what they must."""
    found = []
    for name, lives in world.witnesses.lives.items():
        path = journal_of(world, name)
        said = set(acknowledged_keys(path)) if path.exists() else set()
        found += [
            f"{name}'s journal says that {key} is safe, which nobody said"
            for key in said - {key for life in lives for key in life.told}
        ]
        # A power cut takes of all lives' lines what nobody has synced.
        until = max((n for n, life in enumerate(lives) if life.cut), default=-1)
        for life in lives[until + 1 :]:
            late = FLUSH_EVERY_S if life.killed_at is not None else 0.0
            if life.journal.lines_lost:
                continue  # the disk was full, and the journal says how many lines it lacks
            found += [
                f"{name}'s journal does not say that {key} is safe"
                for key, when in life.told.items()
                if key not in said and (life.killed_at is None or when < life.killed_at - late)
            ]
        found += _check_lines(name, path, lives)
    return found


def journal_of(world, name):
    """Where a process writes."""
    return (world.run_dir if name == world.server else world.others / name) / JOURNAL


def _check_lines(name: str, path: Any, lives: list[Life]) -> list[str]:
    """Each line once and whole, but for what a death tore; numbers go on from life to life."""
    if not path.exists():
        return []
    reader = JournalReader(path)
    lines = list(reader.read())
    found = []
    deaths = sum(life.killed_at is not None for life in lives)
    if reader.damaged > deaths:
        found.append(f"{name}'s journal has {reader.damaged} damaged lines after {deaths} deaths")
    numbers = [line["n"] for line in lines]
    if any(after <= before for before, after in pairwise(numbers)):
        found.append(f"the numbers of {name}'s journal do not rise")
    known = {line["n"] for line in lines if line["kind"] != "effect"}
    whole = not any(life.cut or life.journal.lines_lost for life in lives)
    if whole:
        found += [
            f"{name}'s journal has effect {line['n']}, and not the event it came from"
            for line in lines
            if line["kind"] == "effect" and line["cause"] not in known
        ]
    return found
