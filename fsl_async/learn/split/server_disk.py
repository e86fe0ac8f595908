"""What a split server keeps on disk: checkpoints, and a ledger of what became of every upload.

    server/ledger.jsonl                 sealed lines {"key", "outcome", "reason"} and {"auxiliary", "version"}, flushed as they are decided
    server/checkpoints/c00000007/
        common.safetensors              x_s (or the last average of its replicas), its optimiser, its counters
        client-NAME.safetensors         per client: replica, or auxiliary model with its optimiser and buffer
        manifest.json                   sealed: the machine's book, lines of the ledger, length and SHA-256 of every file

Written into tmp-c00000007, synced, renamed: the rename is the commit point. The newest two are kept. What was trained after the
newest good one is lost with the weights that saw it; the ledger's later lines say which uploads that were.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from fsl_async.errors import RunDirError
from fsl_async.events_split import SplitBook, UploadKey
from fsl_async.learn.files import Files
from fsl_async.learn.sealed import seal, unseal
from fsl_async.learn.split.tensor_file import read_tensors, written_tensors

KEPT = 2
MANIFEST = "manifest.json"
LEDGER = "ledger.jsonl"
COMMON = "common.safetensors"
_FOLDER = re.compile(r"c(\d{8,})")
_CLIENT = re.compile(r"client-([A-Za-z0-9._-]{1,64})\.safetensors")
_MAX_MANIFEST_BYTES = 1 << 26


@attrs.frozen
class ServerState:
    """What was found."""

    book: SplitBook = attrs.field(factory=SplitBook)
    lost: tuple[UploadKey, ...] = ()
    auxiliary_seen: Mapping[str, int] = attrs.field(factory=dict)
    common: Mapping[str, Tensor] | None = None
    clients: Mapping[str, Mapping[str, Tensor]] = attrs.field(factory=dict)


class ServerDisk:
    """One folder, one process at a time. `append` and `write` may come from two threads."""

    def __init__(self, run_dir: Path, files: Files | None = None) -> None:
        self.run_dir = run_dir
        self.lines = 0
        """Of the ledger, in all."""
        self._files = files or Files()
        self._checkpoints = run_dir / "checkpoints"
        try:
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            self._ledger = (run_dir / LEDGER).open("ab+")
        except OSError as error:
            raise RunDirError(f"cannot write in {run_dir}: {error.strerror}") from None
        if not self._files.lock(self._ledger.fileno()):
            self._ledger.close()
            raise RunDirError(f"{run_dir} is in use by another split server")

    def recover(self) -> ServerState:
        """The newest checkpoint that is whole, and the uploads trained after it. Raises RunDirError when none of several is."""
        fates = self._read_ledger()
        for name in self._files.names(self._checkpoints):
            if name.startswith("tmp-"):
                self._files.remove_tree(self._checkpoints / name)
        numbers = self._numbers()
        for number in reversed(numbers):
            found = self._load(self._path(number), fates)
            if found is not None:
                return found
        if numbers:
            raise RunDirError(
                f"{self.run_dir}: no checkpoint of the split server is intact; restore it from a backup"
            )
        return ServerState(lost=_trained(fates), auxiliary_seen=_versions(fates))

    def append_auxiliary(self, client: str, version: int) -> None:
        """Enter that a number of a client's auxiliary models is given away."""
        self._ledger.write(seal({"auxiliary": client, "version": version}) + b"\n")
        self._ledger.flush()
        self.lines += 1

    def append(self, key: str, outcome: str, reason: str) -> None:
        """Enter what became of an upload."""
        self._ledger.write(seal({"key": key, "outcome": outcome, "reason": reason}) + b"\n")
        self._ledger.flush()
        self.lines += 1

    def write(
        self,
        book: SplitBook,
        common: Mapping[str, Tensor],
        clients: Mapping[str, Mapping[str, Tensor]],
        lines: int,
    ) -> None:
        """Make a checkpoint durable. Raises OSError as the system gives it."""
        files = self._files
        number = max(self._numbers(), default=0) + 1
        temporary = self._checkpoints / f"tmp-c{number:08d}"
        files.remove_tree(temporary)
        files.make_directory(temporary)
        os.fsync(self._ledger.fileno())
        stored: dict[str, dict[str, object]] = {}
        tensors = {COMMON: common} | {
            f"client-{name}.safetensors": state for name, state in clients.items()
        }
        for name, state in tensors.items():
            data = written_tensors(state)
            files.write_whole(temporary / name, data)
            stored[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest = {"format": 1, "book": book.to_plain(), "lines": lines, "files": stored}
        files.write_whole(temporary / MANIFEST, seal(manifest) + b"\n")
        files.sync_directory(temporary)
        files.rename(temporary, self._path(number))
        files.sync_directory(self._checkpoints)
        for old in self._numbers()[:-KEPT]:
            leaving = self._checkpoints / f"tmp-old-c{old:08d}"
            files.rename(self._path(old), leaving)
            files.remove_tree(leaving)

    def close(self) -> None:
        """Give the folder back."""
        self._ledger.close()

    def _path(self, number: int) -> Path:
        return self._checkpoints / f"c{number:08d}"

    def _numbers(self) -> list[int]:
        found = (_FOLDER.fullmatch(name) for name in self._files.names(self._checkpoints))
        return sorted(int(match[1]) for match in found if match)

    def _read_ledger(self) -> list[Mapping[str, Any]]:
        self._ledger.seek(0)
        fates: list[Mapping[str, Any]] = []
        end = 0
        for line in self._ledger:
            members = unseal(line.rstrip(b"\n"))
            if members is None:
                break  # torn by the crash; what follows is not there
            end += len(line)
            fates.append(members)
        self._ledger.truncate(end)
        self.lines = len(fates)
        return fates

    def _load(self, path: Path, fates: list[Mapping[str, Any]]) -> ServerState | None:
        try:
            members = unseal(self._files.read_whole(path / MANIFEST, _MAX_MANIFEST_BYTES).rstrip())
            if members is None:
                return None
            tensors: dict[str, Mapping[str, Tensor]] = {}
            for name, stored in members["files"].items():
                data = self._files.read_whole(path / name, int(stored["bytes"]))
                if hashlib.sha256(data).hexdigest() != stored["sha256"]:
                    return None
                tensors[name] = read_tensors(data)
            book = SplitBook.from_plain(members["book"])
            lines = int(members["lines"])
        except (OSError, KeyError, TypeError, ValueError):
            return None
        clients = {
            match[1]: state for name, state in tensors.items() if (match := _CLIENT.fullmatch(name))
        }
        lost, seen = _trained(fates[lines:]), _versions(fates)
        return ServerState(book, lost, seen, tensors[COMMON], clients)


def _trained(fates: list[Mapping[str, Any]]) -> tuple[UploadKey, ...]:
    last = {line["key"]: line["outcome"] for line in fates if "key" in line}
    return tuple(UploadKey.parse(key) for key, outcome in last.items() if outcome == "trained")


def _versions(fates: list[Mapping[str, Any]]) -> dict[str, int]:
    return {line["auxiliary"]: int(line["version"]) for line in fates if "auxiliary" in line}
