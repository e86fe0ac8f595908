"""What a split server keeps on disk: checkpoints, and a ledger of what became of every upload.

    server/ledger.jsonl             lines with a checksum: {"key", "outcome", "reason"} and
                                    {"auxiliary", "version"}, written as they are decided
    server/checkpoints/c00000007/
        common.safetensors          x_s (or the last average of its replicas), optimizer, counters
        client-NAME.safetensors     replica, or auxiliary model with its optimizer and buffer
        manifest.json               with a checksum: the machine's book, lines of the ledger,
                                    length and SHA-256 of every file

Written into tmp-c00000007 in between two trainings, then, while training goes on, synced, hashed
and renamed: the rename is the commit point. The newest two are kept. What was trained after the
newest good one is lost with the weights that saw it; the ledger's later lines say which uploads
that were.

A line that cannot be written (disk full) waits in memory, and is written before the next one. A
checkpoint is sealed only when every line up to its moment is written and synced, so a version never
rests on lines that are not there. A power cut may take the lines since the last checkpoint; a
process that is killed leaves them to the system.
"""

import hashlib
import json
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fsl_async.errors import RunDirError, disk_words
from fsl_async.files.checksummed_json import from_checksummed, to_checksummed
from fsl_async.files.files import Files
from fsl_async.roles.split.events import SplitProgress, UploadKey
from fsl_async.store.recovery import make_durable_folder

KEPT = 2
MANIFEST = "manifest.json"
LEDGER = "ledger.jsonl"
COMMON = "common.safetensors"
_FOLDER = re.compile(r"c(\d{8,})")
_CLIENT = re.compile(r"client-([A-Za-z0-9._-]{1,64})\.safetensors")
_MAX_MANIFEST_BYTES = 1 << 26
_PIECE_BYTES = 1 << 20


@attrs.frozen
class ServerState:
    """What was found."""

    book: SplitProgress = attrs.field(factory=SplitProgress)
    lost: tuple[UploadKey, ...] = ()
    auxiliary_seen: Mapping[str, int] = attrs.field(factory=dict)
    common: Mapping[str, Tensor] | None = None
    clients: Mapping[str, Mapping[str, Tensor]] = attrs.field(factory=dict)


@attrs.frozen
class Staged:
    """A checkpoint whose tensors are written, and nothing else."""

    number: int
    path: Path
    book: SplitProgress
    lines: int
    names: tuple[str, ...]


class ServerDisk:
    """One folder, one process at a time.

    `append`, `stage` and `seal` may come from three threads; one checkpoint at a time.
    """

    def __init__(self, run_dir: Path, files: Files | None = None) -> None:
        self.run_dir = run_dir
        self.lines = 0
        """Of the ledger, in all."""
        self._files = files or Files()
        self._checkpoints = run_dir / "checkpoints"
        self._writing = threading.Lock()
        self._waiting = bytearray()  # lines that are not written yet
        self._end = 0  # of what is written
        try:
            self._ledger: int | None = self._open()
        except OSError as error:
            raise RunDirError(f"cannot write in {run_dir}: {disk_words(error)}") from None
        if not self._files.lock(self._ledger):
            self.close()
            raise RunDirError(f"{run_dir} is in use by another split server")

    def _open(self) -> int:
        files, path = self._files, self.run_dir / LEDGER
        make_durable_folder(files, self.run_dir)
        files.make_directory(self._checkpoints)
        try:
            descriptor = files.open_existing(path, writable=True)
        except FileNotFoundError:
            descriptor = files.create(path)
        files.sync_directory(self.run_dir)
        return descriptor

    def recover(self) -> ServerState:
        """The newest checkpoint that is whole, and the uploads trained after it.

        Raises RunDirError when none of several is.
        """
        try:
            fates = self._read_ledger()
            for name in self._files.names(self._checkpoints):
                if name.startswith("tmp-"):
                    self._files.remove_tree(self._checkpoints / name)
            numbers = self.numbers()
        except OSError as error:
            raise RunDirError(f"cannot repair {self.run_dir}: {disk_words(error)}") from None
        for number in reversed(numbers):
            found = self._load(self._path(number), fates)
            if found is not None:
                if number == numbers[-1]:
                    self._prune()
                return found
        if numbers:
            raise RunDirError(
                f"{self.run_dir}: no checkpoint of the split server is intact;"
                " restore it from a backup"
            )
        return ServerState(lost=_trained(fates), auxiliary_seen=_versions(fates))

    def append_auxiliary(self, client: str, version: int) -> None:
        """Enter that a number of a client's auxiliary models is given away."""
        self._enter({"auxiliary": client, "version": version})

    def append(self, key: str, outcome: str, reason: str) -> None:
        """Enter what became of an upload."""
        self._enter({"key": key, "outcome": outcome, "reason": reason})

    def _enter(self, members: Mapping[str, Any]) -> None:
        with self._writing:
            self._waiting += to_checksummed(members) + b"\n"
            self.lines += 1
            with suppress(OSError):  # it waits; a checkpoint says so if that lasts
                self._write_waiting()

    def _write_waiting(self) -> None:
        """Write what waits behind what is written.

        A write that failed half-way is overwritten by the next. Raises OSError.
        """
        if self._waiting and self._ledger is not None:
            self._files.write(self._ledger, bytes(self._waiting), self._end)
            self._end += len(self._waiting)
            self._waiting.clear()

    def _sync_ledger(self) -> None:
        with self._writing:
            self._write_waiting()
        assert self._ledger is not None
        self._files.sync(self._ledger)

    def stage(
        self,
        book: SplitProgress,
        common: Mapping[str, Tensor],
        clients: Iterable[tuple[str, Mapping[str, Tensor]]],
    ) -> Staged:
        """Write a checkpoint's tensors as they are now, one client's after another.

        It is nothing before `seal`. Raises OSError.
        """
        files = self._files
        number = max(self.numbers(), default=0) + 1
        temporary = self._checkpoints / f"tmp-c{number:08d}"
        files.remove_tree(temporary)
        files.make_directory(temporary)
        names = [COMMON]
        self._put(temporary / COMMON, common)
        for name, state in clients:
            names.append(f"client-{name}.safetensors")
            self._put(temporary / names[-1], state)
        return Staged(number, temporary, book, self.lines, tuple(names))

    def _put(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        files, offset = self._files, 0
        descriptor = files.create(path)

        def write(piece: memoryview) -> None:
            nonlocal offset
            files.write(descriptor, piece, offset)
            offset += len(piece)

        try:
            write_tensors(tensors, write)
        finally:
            files.close(descriptor)

    def seal(self, staged: Staged) -> None:
        """Make a checkpoint durable, and the newest. Raises OSError as the system gives it."""
        files, temporary = self._files, staged.path
        self._sync_ledger()
        stored: dict[str, dict[str, object]] = {}
        for name in staged.names:
            descriptor = files.open_existing(temporary / name, writable=True)
            try:
                files.sync(descriptor)
                size, digest = self._digest(descriptor)
            finally:
                files.close(descriptor)
            stored[name] = {"bytes": size, "sha256": digest}
        members = {"format": 1, "book": staged.book.to_plain(), "lines": staged.lines}
        files.write_whole(temporary / MANIFEST, to_checksummed(members | {"files": stored}) + b"\n")
        files.sync_directory(temporary)
        files.rename(temporary, self._path(staged.number))
        files.sync_directory(self._checkpoints)
        self._prune()

    def _prune(self) -> None:
        """Remove all but the newest checkpoints.

        A folder that cannot be removed now is removed later, and does no harm.
        """
        with suppress(OSError):
            for old in self.numbers()[:-KEPT]:
                leaving = self._checkpoints / f"tmp-old-c{old:08d}"
                self._files.remove_tree(leaving)
                self._files.rename(self._path(old), leaving)
                self._files.sync_directory(self._checkpoints)  # before its files go
                self._files.remove_tree(leaving)

    def _digest(self, descriptor: int) -> tuple[int, str]:
        """Length and SHA-256 of a file, read piece by piece."""
        room, size, found = bytearray(_PIECE_BYTES), 0, hashlib.sha256()
        while count := self._files.read_into(descriptor, memoryview(room), size):
            found.update(memoryview(room)[:count])
            size += count
        return size, found.hexdigest()

    def close(self) -> None:
        """Give the folder back; harmless when that is done."""
        if self._ledger is not None:
            with suppress(OSError):
                self._write_waiting()
            self._files.close(self._ledger)
            self._ledger = None

    def _path(self, number: int) -> Path:
        return self._checkpoints / f"c{number:08d}"

    def numbers(self) -> list[int]:
        """Return the numbers of the checkpoints, sorted."""
        found = (_FOLDER.fullmatch(name) for name in self._files.names(self._checkpoints))
        return sorted(int(match[1]) for match in found if match)

    def _read_ledger(self) -> list[Mapping[str, Any]]:
        files, descriptor = self._files, self._ledger
        assert descriptor is not None
        fates: list[Mapping[str, Any]] = []
        end = 0
        for line in files.read(descriptor, files.size(descriptor), 0).splitlines(keepends=True):
            members = from_checksummed(line[:-1]) if line.endswith(b"\n") else None
            if members is None:
                break  # torn by the crash; what follows is not there
            end += len(line)
            fates.append(members)
        if files.size(descriptor) > end:
            files.truncate(descriptor, end)
        self._end = end
        self.lines = len(fates)
        return fates

    def _load(self, path: Path, fates: list[Mapping[str, Any]]) -> ServerState | None:
        try:
            members = from_checksummed(
                self._files.read_whole(path / MANIFEST, _MAX_MANIFEST_BYTES).rstrip()
            )
            if members is None:
                return None
            names = dict(members["files"])
            for name, stored in names.items():
                descriptor = self._files.open_existing(path / name)
                try:
                    found = self._digest(descriptor)
                finally:
                    self._files.close(descriptor)
                if found != (int(stored["bytes"]), stored["sha256"]):
                    return None
            book = SplitProgress.from_plain(members["book"])
            lines = int(members["lines"])
        except (OSError, KeyError, TypeError, ValueError):
            return None
        kept = {match[1]: path / name for name in names if (match := _CLIENT.fullmatch(name))}
        lost, seen = _trained(fates[lines:]), _versions(fates)
        return ServerState(book, lost, seen, self._read(path / COMMON), _OnDisk(kept, self._read))

    def _read(self, path: Path) -> Mapping[str, Tensor]:
        return read_tensors(self._files.read_whole(path, self._files.size_at(path)))


class _OnDisk(Mapping[str, Mapping[str, Tensor]]):
    """What is kept for clients, read when it is asked for.

    All at once would be twice what a split server holds.
    """

    def __init__(
        self, paths: Mapping[str, Path], read: Callable[[Path], Mapping[str, Tensor]]
    ) -> None:
        self._paths, self._read = paths, read

    def __getitem__(self, name: str) -> Mapping[str, Tensor]:
        return self._read(self._paths[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def _trained(fates: list[Mapping[str, Any]]) -> tuple[UploadKey, ...]:
    last = {line["key"]: line["outcome"] for line in fates if "key" in line}
    return tuple(UploadKey.parse(key) for key, outcome in last.items() if outcome == "trained")


def _versions(fates: list[Mapping[str, Any]]) -> dict[str, int]:
    return {line["auxiliary"]: int(line["version"]) for line in fates if "auxiliary" in line}


# --- named tensors in the layout of safetensors, which that library opens ---

_NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {name: kind for kind, name in _NAMES.items()}


def write_tensors(tensors: Mapping[str, Tensor], write: Callable[[memoryview], None]) -> None:
    """Give the file to `write`, piece by piece in order; contiguous tensors are not copied.

    Tensors are on the CPU. Raises KeyError for a dtype that has no name here.
    """
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    write(memoryview(struct.pack("<Q", len(head)) + head))
    for tensor in tensors.values():
        if tensor.numel():
            flat = tensor.detach().contiguous().reshape(-1)
            found: Any = flat.view(torch.uint8).numpy()
            write(memoryview(found))


def read_tensors(data: bytes) -> dict[str, Tensor]:
    """Read it back. Raises KeyError, TypeError or ValueError for anything else."""
    if len(data) < 8:
        raise ValueError("shorter than a header")
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    found: dict[str, Tensor] = {}
    for name, entry in header.items():
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        kind = _TYPES[entry["dtype"]]
        if not stop > start:
            found[name] = torch.empty(entry["shape"], dtype=kind)
            continue
        raw = torch.frombuffer(bytearray(data[start:stop]), dtype=torch.uint8)
        found[name] = raw.view(kind).reshape(entry["shape"])
    return found
