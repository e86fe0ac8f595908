"""The journals of a world: the production writer on files that survive a crash as real ones do, and
checks of them.

The writer's thread runs in virtual time, as late as it may: lines wait until `FLUSH_EVERY_S` is
nearly over, and lines that wait when a process is killed are lost. The parameter server's writes go
through its crash disk: they count among its calls, fail, are torn, and are lost in a power cut,
because a journal is never synced.
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
    """The journal of one incarnation. `killed` is called when the disk kills the process during a
    write.
    """

    def __init__(self, path, clock, wall, *, disk=None, killed=lambda: None):
        self._turns, self._disk, self._killed = clock, disk, killed
        self._planned = False
        super().__init__(path, clock=wall)
        if disk is not None:
            disk.adopt(path)

    def _flush_often(self):
        """Do nothing: the flushes are planned in virtual time."""

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
        """Lose the lines that wait, as kill -9 does."""
        self._closing.set()
        self._flusher.join()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@define
class ProcessRecord:
    """A process, and the acknowledgements that its journal must hold."""

    journal: CrashJournal
    # key -> when its acknowledgement was sent or received
    acknowledged: dict[str, float] = field(factory=dict)
    killed_at: float | None = None
    cut: bool = False  # the machine lost its power then


@define
class ProcessRecords:
    """Every incarnation of every process of a world."""

    records: dict[str, list[ProcessRecord]] = field(factory=dict)

    def begin(self, name: str, journal: CrashJournal) -> CrashJournal:
        """Record that a process has opened its journal."""
        self.records.setdefault(name, []).append(ProcessRecord(journal))
        return journal

    def acknowledges(self, name: str, key: str, now: float) -> None:
        """Record that its machine sends, or has received, a delta's acknowledgement."""
        self.records[name][-1].acknowledged.setdefault(key, now)

    def dies(self, name: str, now: float, *, cut: bool) -> None:
        """Record that it is killed; no effect before its journal is open."""
        for record in self.records.get(name, [])[-1:]:
            if record.killed_at is None:
                record.journal.die()
                record.killed_at, record.cut = now, cut

    def end(self) -> None:
        """Close the journals of the processes that still run, as they do at their ends."""
        for records in self.records.values():
            records[-1].journal.close()


def gather(world) -> None:
    """Copy the clients' journals to where an operator puts them and an audit reads them."""
    if world.others.is_dir():
        shutil.copytree(world.others, world.run_dir / "clients")


def check_journals(world) -> list[str]:
    """Return one sentence for each line of a journal that is false or missing."""
    found = []
    for name, records in world.processes.records.items():
        path = journal_of(world, name)
        said = set(acknowledged_keys(path)) if path.exists() else set()
        found += [
            f"{name}'s journal says that {key} is safe, which no process said"
            for key in said - {key for record in records for key in record.acknowledged}
        ]
        # A power cut takes the unsynced lines of all incarnations.
        until = max((n for n, record in enumerate(records) if record.cut), default=-1)
        for record in records[until + 1 :]:
            late = FLUSH_EVERY_S if record.killed_at is not None else 0.0
            if record.journal.lines_lost:
                continue  # the disk was full, and the journal has the number of lost lines
            found += [
                f"{name}'s journal does not say that {key} is safe"
                for key, when in record.acknowledged.items()
                if key not in said and (record.killed_at is None or when < record.killed_at - late)
            ]
        found += _check_lines(name, path, records)
    return found


def journal_of(world, name):
    """Return the path of a process's journal."""
    return (world.run_dir if name == world.server else world.others / name) / JOURNAL


def _check_lines(name: str, path: Any, records: list[ProcessRecord]) -> list[str]:
    """Check that lines are complete, except what a death tore, and that numbers rise over
    incarnations.
    """
    if not path.exists():
        return []
    reader = JournalReader(path)
    lines = list(reader.read())
    found = []
    deaths = sum(record.killed_at is not None for record in records)
    if reader.damaged > deaths:
        found.append(f"{name}'s journal has {reader.damaged} damaged lines after {deaths} deaths")
    numbers = [line["n"] for line in lines]
    if any(after <= before for before, after in pairwise(numbers)):
        found.append(f"the numbers of {name}'s journal do not rise")
    known = {line["n"] for line in lines if line["kind"] != "effect"}
    is_complete = not any(record.cut or record.journal.lines_lost for record in records)
    if is_complete:
        found += [
            f"{name}'s journal has effect {line['n']}, and not the event it came from"
            for line in lines
            if line["kind"] == "effect" and line["cause"] not in known
        ]
    return found
