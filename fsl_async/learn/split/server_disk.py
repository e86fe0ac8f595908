"""The split server's state on disk: checkpoints, and a ledger of the outcome of every upload.

    server/ledger.jsonl             fsl_async.store.disk.ledger, with the facts
                                    upload       key, outcome, reason
                                    auxiliary    client, version: a number that is given away
    server/checkpoints/c00000007/   fsl_async.store.disk.folders; the newest two are kept
        common.safetensors          x_s (or the last average of its replicas), optimizer, counters
        client-NAME.safetensors     replica, or auxiliary model with its optimizer and buffer
        manifest.json               the machine's progress, position in the ledger, files' digests

A checkpoint's files are written between two trainings; they are synced and hashed while training
goes on. Uploads trained after the newest intact one are lost with the weights that saw them.

A line that cannot be written (disk full) waits in memory, and is written before the next one. A
checkpoint is made only when every line up to its moment is written and synced, so it never rests on
lines that are not there. A power cut may take the lines since the last checkpoint; a process that
is killed leaves them to the system.
"""

from __future__ import annotations

import io
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from fsl_async.errors import RunDirError, disk_words
from fsl_async.files.files import Files
from fsl_async.files.safetensors_header import header_of, read_header
from fsl_async.roles.split.events import SplitProgress, SplitRecovered
from fsl_async.roles.split.messages import UploadKey
from fsl_async.store.disk.folders import NumberedFolders, make_durable_folder
from fsl_async.store.disk.ledger import Ledger, Position
from fsl_async.store.errors import Damage, StoreError

Tensors: TypeAlias = Mapping[str, Tensor]

_TYPES = {
    "F32": torch.float32,
    "F64": torch.float64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {kind: name for name, kind in _TYPES.items()}


def write_tensors(files: Files, path: Path, tensors: Tensors) -> None:
    """Write a file, not synced. Contiguous tensors on the CPU are not copied.

    Raises OSError, and KeyError for a dtype that has no name here.
    """
    header = header_of((name, _NAMES[x.dtype], x.shape, x.nbytes) for name, x in tensors.items())
    with files.created(path) as descriptor:
        files.write(descriptor, header, 0)
        offset = len(header)
        for one in tensors.values():
            # A memoryview of no bytes cannot be cast.
            if one.nbytes:
                flat: Any = one.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
                files.write(descriptor, memoryview(flat), offset)
                offset += one.nbytes


def read_tensors(files: Files, path: Path) -> dict[str, Tensor]:
    """Read a file. Raises OSError; KeyError, TypeError or ValueError for anything else."""
    data = files.read_whole(path, files.size_at(path))
    entries, start = read_header(io.BytesIO(data).read)
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)[start:]
    found = {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        # A copy, because a view of another dtype must begin at a multiple of its size.
        found[name] = raw[begin:end].clone().view(_TYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


KEPT = 2
FORMAT = 3
LEDGER = "ledger.jsonl"
_COMMON, _CLIENT, _END = "common.safetensors", "client-", ".safetensors"


@attrs.frozen
class ServerState:
    """The state found at a start. clients: read one by one, as they are asked for."""

    recovered: SplitRecovered
    common: Tensors | None = None
    clients: Iterable[tuple[str, Tensors]] = ()


class ServerDisk:
    """One folder, one process at a time. Raises RunDirError where it cannot be used.

    `append`, `stage` and what that returns may come from three threads; one checkpoint at a time.
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
            self.checkpoints.remove_leftovers()
        except OSError as error:
            self._ledger.close()
            raise RunDirError(f"cannot write in {run_dir}: {disk_words(error)}") from None
        except StoreError as error:
            raise RunDirError(str(error)) from None

    def recover(self) -> ServerState:
        """Return the newest intact checkpoint, and the uploads trained after it. Call it once.

        Raises RunDirError when none of several is intact.
        """
        numbers = self.checkpoints.numbers()
        for number in reversed(numbers):
            with suppress(Damage, OSError, KeyError, TypeError, ValueError):
                found = self._load(number)
                if number == numbers[-1]:
                    self.checkpoints.prune(KEPT)
                return found
        if numbers:
            raise RunDirError(
                f"{self.run_dir}: no checkpoint of the split server is intact;"
                " restore it from a backup"
            )
        return self._state(SplitProgress(), 0)

    def _load(self, number: int) -> ServerState:
        members, path = self.checkpoints.read_intact(number), self.checkpoints.path(number)
        position = Position(**members["ledger"])
        if position.bytes and self._facts and not self._ledger.holds(position):
            raise RunDirError(
                f"{self.run_dir / LEDGER} lacks lines that checkpoint {number} counts; restore it"
                " from a backup, or move it away to go on without them"
            )
        clients = (
            (name.removeprefix(_CLIENT).removesuffix(_END), read_tensors(self._files, path / name))
            for name in members["files"]
            if name.startswith(_CLIENT)
        )
        progress, common = SplitProgress.from_plain(members["book"]), path / _COMMON
        return self._state(progress, position.lines, read_tensors(self._files, common), clients)

    def _state(self, progress: SplitProgress, lines: int, *tensors: Any) -> ServerState:
        since = (fact for fact in self._facts[lines:] if fact["fact"] == "upload")
        fates = {fact["key"]: fact["outcome"] for fact in since}
        lost = tuple(UploadKey.parse(key) for key, fate in fates.items() if fate == "trained")
        given = (fact for fact in self._facts if fact["fact"] == "auxiliary")
        seen = {str(fact["client"]): int(fact["version"]) for fact in given}
        self._facts = []
        return ServerState(SplitRecovered(progress, lost, seen), *tensors)

    def append(self, fact: str, **members: Any) -> None:
        """Enter a fact. Raises nothing: a line that cannot be written waits."""
        with self._writing:
            self._waiting.append((fact, members))
            # If that lasts, the next checkpoint fails with the error.
            with suppress(OSError, StoreError):
                self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:
            self._ledger.append(*self._waiting[0])
            self._waiting.popleft()

    def stage(
        self, progress: SplitProgress, common: Tensors, clients: Iterable[tuple[str, Tensors]]
    ) -> Callable[[], None]:
        """Write a checkpoint's tensors as they are now, one client's after another.

        It counts only after the function that is returned. Both raise OSError, StoreError.
        """
        with self._writing:
            self._write_waiting()
            position = self._ledger.position()
        number = max(self.checkpoints.numbers(), default=0) + 1
        folder = self.checkpoints.begin(self.checkpoints.path(number).name)
        names = [_COMMON]
        write_tensors(self._files, folder / _COMMON, common)
        for client, tensors in clients:
            names.append(f"{_CLIENT}{client}{_END}")
            write_tensors(self._files, folder / names[-1], tensors)

        def seal() -> None:
            self._ledger.sync()
            members = {"book": progress.to_plain(), "ledger": attrs.asdict(position)}
            self.checkpoints.seal(folder, names, members)
            self.checkpoints.publish(number, folder)
            self.checkpoints.prune(KEPT)

        return seal

    def close(self) -> None:
        """Release the folder; a closed one is ignored."""
        with suppress(OSError, StoreError):
            self._write_waiting()
        self._ledger.close()
