"""The journals of a run with a crash: the production writer on real files, and checks of them.

The writer's thread runs in virtual time, as late as it may: lines wait until `FLUSH_EVERY_S` is
nearly over, and lines that wait when a process is killed are lost. The parameter server's writes
count among the calls to its disk: they fail, are torn, and a power cut takes those of the process,
because a journal is never synced.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

from fsl_async.files.memory_files import Faults, Killed
from fsl_async.observe.journal import FLUSH_EVERY_S, JournalReader, JournalWriter
from fsl_async.observe.ledger_audit import acknowledged_keys


class CrashJournal(JournalWriter):
    """The journal of one incarnation. killed: called when the process dies during a write.

    faults: of the disk that it shares with a store.
    """

    def __init__(self, path, clock, wall, *, faults=None, killed=lambda: None):
        self._turns, self.faults, self._killed = clock, faults or Faults(), killed
        self._planned = False
        # key -> when its acknowledgement was sent or received
        self.acknowledged: dict[str, float] = {}
        self.killed_at: float | None = None
        self.cut = False  # the machine lost its power then
        super().__init__(path, clock=wall)
        self._begin = path.stat().st_size

    def acknowledges(self, key, now):
        """Note that the process sends, or has received, a delta's acknowledgement."""
        self.acknowledged.setdefault(key.text, now)

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
        except Killed:
            self._killed()
            raise

    def _put(self, data):
        half = data[: len(data) // 2]
        torn = (lambda: None) if self.faults.mode == "error" else lambda: os.write(self._file, half)
        return self.faults.call("append", lambda: os.write(self._file, data), torn)

    def die(self, now, *, cut):
        """Lose the lines that wait, as kill -9 does; after a power cut all lines of the process."""
        if self.killed_at is None and self._file >= 0:
            self.killed_at, self.cut = now, cut
            self._closing.set()
            self._flusher.join()
            if cut:
                os.truncate(self._file, self._begin)
            os.close(self._file)
            self._file = -1


def check_journals(path: Path, journals: list[CrashJournal]) -> list[str]:
    """Close the journals of a process's incarnations; return a sentence for each line that is false
    or missing in their file.
    """
    journals[-1].faults.dead = False
    journals[-1].close()
    return _check_acknowledgements(path, journals) + _check_lines(path, journals)


def _check_acknowledgements(path: Path, journals: list[CrashJournal]) -> list[str]:
    said = set(acknowledged_keys(path))
    found = [
        f"{path} says that {key} is safe, which no process said"
        for key in said - {key for journal in journals for key in journal.acknowledged}
    ]
    for journal in journals:
        if journal.cut or journal.lines_lost:
            continue  # the disk was full, and the journal has the number of lost lines
        late = FLUSH_EVERY_S if journal.killed_at is not None else 0.0
        found += [
            f"{path} does not say that {key} is safe"
            for key, when in journal.acknowledged.items()
            if key not in said and (journal.killed_at is None or when < journal.killed_at - late)
        ]
    return found


def _check_lines(path: Path, journals: list[CrashJournal]) -> list[str]:
    """Check that lines are complete, except what a death tore, and that numbers rise over
    incarnations.
    """
    reader = JournalReader(path)
    lines = list(reader.read())
    found = []
    deaths = sum(journal.killed_at is not None for journal in journals)
    if reader.damaged > deaths:
        found.append(f"{path} has {reader.damaged} damaged lines after {deaths} deaths")
    if any(after["n"] <= before["n"] for before, after in pairwise(lines)):
        found.append(f"the numbers of {path} do not rise")
    known = {line["n"] for line in lines if line["kind"] != "effect"}
    if not any(journal.cut or journal.lines_lost for journal in journals):
        found += [
            f"{path} has effect {line['n']}, and not the event it came from"
            for line in lines
            if line["kind"] == "effect" and line["cause"] not in known
        ]
    return found
