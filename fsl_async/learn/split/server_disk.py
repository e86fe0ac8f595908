"""The split server's state on disk: checkpoints, and a ledger of the outcome of every upload.

    server/ledger.jsonl             fsl_async.store.ledger, with the facts
                                    upload      "key", "outcome", "reason"
                                    auxiliary   "client", "version": this number is given away
    server/checkpoints/c00000007/   fsl_async.store.folders
        common.safetensors          x_s (or the last average of its replicas), optimizer, counters
        client-NAME.safetensors     replica, or auxiliary model with its optimizer and buffer
        manifest.json               the machine's book, its place in the ledger, length and digest
                                    of every file

A checkpoint's files are written between two trainings; they are synced and the folder is published
while training goes on. The newest two are kept. Uploads trained after the newest intact one are
lost with the weights that saw them; the later lines of the ledger list them.

A line that cannot be written (disk full) waits in memory, and is written before the next one. A
checkpoint is staged only when every line up to its moment is written, and sealed when they are
synced, so it never rests on lines that are not there. A power cut may take the lines since the last
checkpoint; a process that is killed leaves them to the system.
"""

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from fsl_async.errors import RunDirError, disk_words
from fsl_async.files.files import Files
from fsl_async.learn.split.tensor_file import read_tensors, tensor_pieces
from fsl_async.roles.split.events import SplitProgress, UploadKey
from fsl_async.store.errors import Damage, StoreError
from fsl_async.store.folders import Content, NumberedFolders, content_of, write_pieces
from fsl_async.store.ledger import Ledger, Position
from fsl_async.store.recovery import make_durable_folder

KEPT = 2
FORMAT = 2
LEDGER = "ledger.jsonl"
COMMON = "common.safetensors"
_CLIENT = re.compile(r"client-([A-Za-z0-9._-]{1,64})\.safetensors")


@attrs.frozen
class ServerState:
    """The state found at a start. clients: read one by one, as they are asked for."""

    book: SplitProgress = attrs.field(factory=SplitProgress)
    lost: tuple[UploadKey, ...] = ()
    auxiliary_seen: Mapping[str, int] = attrs.field(factory=dict)
    common: Mapping[str, Tensor] | None = None
    clients: Iterable[tuple[str, Mapping[str, Tensor]]] = ()


@attrs.frozen
class Staged:
    """A checkpoint whose tensors are written, and nothing else."""

    number: int
    folder: Path
    files: Mapping[str, Content]
    book: SplitProgress
    position: Position


class ServerDisk:
    """One folder, one process at a time. Raises RunDirError where it cannot be used.

    `append`, `stage` and `seal` may come from three threads; one checkpoint at a time.
    """

    def __init__(
        self,
        run_dir: Path,
        files: Files | None = None,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run_dir = run_dir
        self._files = files = files or Files()
        self.checkpoints = NumberedFolders(files, run_dir / "checkpoints", "c", FORMAT)
        self._ledger = Ledger(files, run_dir / LEDGER, wall_clock, clock, syncs=False)
        self._facts: list[Mapping[str, Any]] = []
        self._writing = threading.Lock()
        self._waiting: deque[tuple[str, Mapping[str, Any]]] = deque()
        try:
            make_durable_folder(files, run_dir)
            files.make_directory(self.checkpoints.directory)
            self._ledger.open(self._facts.append)
        except OSError as error:
            raise RunDirError(f"cannot write in {run_dir}: {disk_words(error)}") from None
        except StoreError as error:
            raise RunDirError(str(error)) from None

    def recover(self) -> ServerState:
        """Return the newest intact checkpoint, and the uploads trained after it.

        Raises RunDirError when none of several is intact.
        """
        try:
            self.checkpoints.remove_leftovers()
            numbers = self.checkpoints.numbers()
        except OSError as error:
            raise RunDirError(f"cannot repair {self.run_dir}: {disk_words(error)}") from None
        for number in reversed(numbers):
            with suppress(Damage, OSError, KeyError, TypeError, ValueError):
                found = self._load(number)
                if number == numbers[-1]:
                    self._prune()
                return found
        if numbers:
            raise RunDirError(
                f"{self.run_dir}: no checkpoint of the split server is intact;"
                " restore it from a backup"
            )
        return self._state(SplitProgress(), 0)

    def _load(self, number: int) -> ServerState:
        members, path = self.checkpoints.read_manifest(number), self.checkpoints.path(number)
        for name, stored in members["files"].items():
            if content_of(self._files, path / name) != Content(**stored):
                raise Damage(name, "does not match its digest")
        position = Position(**members["ledger"])
        if position.bytes and self._facts and not self._ledger.holds(position):
            raise RunDirError(
                f"{self.run_dir / LEDGER} lacks lines that checkpoint {number} counts; restore it"
                " from a backup, or move it away to go on without them"
            )
        matches = filter(None, map(_CLIENT.fullmatch, members["files"]))
        return self._state(
            SplitProgress.from_plain(members["book"]),
            position.lines,
            self._read(path / COMMON),
            ((match[1], self._read(path / match[0])) for match in matches),
        )

    def _state(self, book: SplitProgress, lines: int, *tensors: Any) -> ServerState:
        since = (fact for fact in self._facts[lines:] if fact["fact"] == "upload")
        fates = {fact["key"]: fact["outcome"] for fact in since}
        lost = tuple(UploadKey.parse(key) for key, fate in fates.items() if fate == "trained")
        given = (fact for fact in self._facts if fact["fact"] == "auxiliary")
        seen = {str(fact["client"]): int(fact["version"]) for fact in given}
        return ServerState(book, lost, seen, *tensors)

    def _read(self, path: Path) -> Mapping[str, Tensor]:
        return read_tensors(self._files.read_whole(path, self._files.size_at(path)))

    def append_auxiliary(self, client: str, version: int) -> None:
        """Enter that a number of a client's auxiliary models is given away."""
        self._enter("auxiliary", {"client": client, "version": version})

    def append(self, key: str, outcome: str, reason: str) -> None:
        """Enter the outcome of an upload."""
        self._enter("upload", {"key": key, "outcome": outcome, "reason": reason})

    def _enter(self, fact: str, members: Mapping[str, Any]) -> None:
        with self._writing:
            self._waiting.append((fact, members))
            with suppress(OSError, StoreError):  # it waits; a checkpoint fails if that lasts
                self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:
            self._ledger.append(*self._waiting[0])
            self._waiting.popleft()

    def stage(
        self,
        book: SplitProgress,
        common: Mapping[str, Tensor],
        clients: Iterable[tuple[str, Mapping[str, Tensor]]],
    ) -> Staged:
        """Write a checkpoint's tensors as they are now, one client's after another.

        It counts only after `seal`. Raises OSError, StoreError.
        """
        with self._writing:
            self._write_waiting()
            position = self._ledger.position()
        number = max(self.checkpoints.numbers(), default=0) + 1
        folder = self.checkpoints.begin(self.checkpoints.path(number).name)
        stored = {COMMON: write_pieces(self._files, folder / COMMON, tensor_pieces(common))}
        for client, tensors in clients:
            name = f"client-{client}.safetensors"
            stored[name] = write_pieces(self._files, folder / name, tensor_pieces(tensors))
        return Staged(number, folder, stored, book, position)

    def seal(self, staged: Staged) -> None:
        """Make a checkpoint durable, and the newest. Raises OSError, StoreError."""
        self._ledger.sync()
        for name in staged.files:
            self._files.sync_whole(staged.folder / name)
        files = {name: attrs.asdict(content) for name, content in staged.files.items()}
        members = {"book": staged.book.to_plain(), "ledger": attrs.asdict(staged.position)}
        self.checkpoints.write_manifest(staged.folder, {**members, "files": files})
        self.checkpoints.publish(staged.number, staged.folder)
        self._prune()

    def _prune(self) -> None:
        """Remove all but the newest checkpoints. One that cannot be removed now does no harm."""
        with suppress(OSError):
            for old in self.checkpoints.retire(self.checkpoints.numbers()[-KEPT:][0]):
                self._files.remove_tree(old)

    def close(self) -> None:
        """Release the folder; a closed one is ignored."""
        with suppress(OSError, StoreError):
            self._write_waiting()
        self._ledger.close()
