"""Files in memory, on a disk that loses power: the disk of simulations and of crash tests.

`MemoryDisk` holds what outlives a process, `MemoryFiles` is the view of one process. A write is
durable after `sync` of its file, a name, a rename or a removal after `sync_directory` of its folder
(fsync(2)). `MemoryDisk.lose_power` takes away what was not. `Faults` makes a chosen call fail, or
end the process before, during or after it.
"""

from __future__ import annotations

import errno
import functools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

from attrs import define, field

from fsl_async.files.files import BytesLike, Files

T = TypeVar("T")
Power = Literal["names", "all"] | int
"""The loss of a power cut: unsynced content ("names" stay), unsynced names too ("all"), or, by a
seed, whatever a real disk may lose."""
WAITS_S = (0.0, 0.0002, 0.002)
"""Waits of other threads before a call, where `Faults.order` is given."""


@define(eq=False)
class _File:
    content: bytearray = field(factory=bytearray)
    undo: list[tuple[int, bytes, int]] = field(factory=list)
    """Unsynced changes: offset, the bytes that were there, the size before."""
    owner: tuple[MemoryFiles, int] | None = None
    """The descriptor of the process that holds its lock."""

    def change(self, offset: int, data: BytesLike, size: int) -> None:
        """Write `data` at `offset`, then cut the file to `size` bytes."""
        content = self.content
        begin = min(offset, size)
        end = offset + len(data) if size >= len(content) else len(content)
        self.undo.append((begin, bytes(content[begin:end]), len(content)))
        if offset > len(content):
            content.extend(bytes(offset - len(content)))
        content[offset : offset + len(data)] = data
        del content[size:]

    def synced(self) -> bytes:
        """Return the content as of the last sync."""
        content = bytearray(self.content)
        for offset, old, size in reversed(self.undo):
            content[offset : offset + len(old)] = old
            del content[size:]
        return bytes(content)


@define(eq=False)
class _Folder:
    names: dict[str, _File | _Folder] = field(factory=dict)
    durable: dict[str, _File | _Folder] = field(factory=dict)
    """The names as of the last sync."""


class MemoryDisk:
    """A disk with one file system, empty at first. It outlives the processes that use it."""

    def __init__(self) -> None:
        self.root = _Folder()

    def find(self, path: Path) -> _File | _Folder:
        """Return the file or folder at an absolute path. Raises FileNotFoundError."""
        found: _File | _Folder = self.root
        for part in path.parts[1:]:
            if not isinstance(found, _Folder) or part not in found.names:
                raise _error(errno.ENOENT, path)
            found = found.names[part]
        return found

    def folder(self, path: Path) -> _Folder:
        """Return the folder at a path. Raises FileNotFoundError, NotADirectoryError."""
        if isinstance(found := self.find(path), _Folder):
            return found
        raise _error(errno.ENOTDIR, path)

    def file(self, path: Path) -> _File:
        """Return the file at a path. Raises FileNotFoundError, IsADirectoryError."""
        if isinstance(found := self.find(path), _File):
            return found
        raise _error(errno.EISDIR, path)

    def lose_power(self, power: Power) -> None:
        """Take away what a power cut takes. No process may use the disk meanwhile."""
        chance = random.Random(power) if isinstance(power, int) else None  # noqa: S311
        names = {}
        for one in _folders(self.root):
            kept = one.durable if power == "all" else one.names
            names[one] = dict(chance.choice([one.durable, one.names]) if chance else kept)
        if chance:
            self._keep_renamed(names)
        for one, kept in names.items():
            one.names, one.durable = kept, dict(kept)
        for file in _files(self.root):
            _lose(file, chance)

    def _keep_renamed(self, names: dict[_Folder, dict[str, _File | _Folder]]) -> None:
        """Keep the old name of a renamed file whose new one is lost: a rename is atomic."""
        kept = {id(one) for inside in names.values() for one in inside.values()}
        there = {id(one) for folder in names for one in folder.names.values()}
        for folder, inside in names.items():
            for name, one in folder.durable.items():
                if id(one) in there - kept:
                    inside[name] = one

    def write_to(self, target: Path, path: Path) -> None:
        """Copy the folder `path` into the existing folder `target` of the real disk."""
        for name, one in self.folder(path).names.items():
            if isinstance(one, _File):
                (target / name).write_bytes(one.content)
                (target / name).chmod(0o600)
            else:
                (target / name).mkdir(0o700, exist_ok=True)
                self.write_to(target / name, path / name)

    def read_from(self, source: Path, path: Path) -> None:
        """Copy a folder of the real disk to `path`, whose parents are made; all of it durable."""
        folder = self.root
        for part in path.parts[1:]:
            made = folder.names.setdefault(part, _Folder())
            folder.durable = dict(folder.names)
            assert isinstance(made, _Folder)
            folder = made
        for entry in source.iterdir():
            if entry.is_dir():
                self.read_from(entry, path / entry.name)
            else:
                folder.names[entry.name] = _File(bytearray(entry.read_bytes()))
        folder.durable = dict(folder.names)


def _folders(folder: _Folder) -> Iterator[_Folder]:
    """Yield a folder and all folders in it, by its present names or its durable ones."""
    seen = {id(folder)}
    waiting = [folder]
    while waiting:
        one = waiting.pop()
        yield one
        for inside in (*one.names.values(), *one.durable.values()):
            if isinstance(inside, _Folder) and id(inside) not in seen:
                seen.add(id(inside))
                waiting.append(inside)


def _files(folder: _Folder) -> Iterator[_File]:
    for one in folder.names.values():
        if isinstance(one, _File):
            yield one
        else:
            yield from _files(one)


def _lose(file: _File, chance: random.Random | None) -> None:
    """Take unsynced content; by chance none of it, or its end: blocks reach a disk in any order."""
    if file.undo:
        now, synced = bytes(file.content), file.synced()
        kept = synced
        if chance is not None:
            pairs = enumerate(zip(now, synced, strict=False))
            same = next((at for at, (a, b) in pairs if a != b), min(len(now), len(synced)))
            cut = (same + len(now)) // 2
            kept = chance.choice([now, synced, now[:cut], now[:cut] + bytes(len(now) - cut)])
        file.content = bytearray(kept)
    file.undo = []
    file.owner = None


def _error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))


class Killed(SystemExit):
    """The process dies in a call to its disk."""


class Faults:
    """Makes calls to the disk fail, or end the process there.

    at: number of the call, from 1; 0: none. mode: "before" (the process dies, the call was not
    made), "after" (it was), "torn" (half of a write was), "error" (`failures` calls in a row fail
    with errno `number`, writes half done; with `die_after` the process dies that many calls later).
    reads: calls that only read count too, and can fail. order: a seed by which other threads than
    the one that made this object wait before each call, so that one overtakes another.

    Several threads may call. Calls count in the order in which they arrive. After the call that
    ends the process no call of any thread has an effect, except that with "torn" the writes that
    have begun and wait for their turn are half done: a kill can interrupt several threads.
    """

    def __init__(
        self,
        at: int = 0,
        mode: Literal["before", "after", "torn", "error"] = "after",
        *,
        failures: int = 1,
        die_after: int | None = None,
        number: int = errno.ENOSPC,
        reads: bool = False,
        order: int | None = None,
    ) -> None:
        self.at, self.mode, self.failures, self.die_after = at, mode, failures, die_after
        self.number, self.reads = number, reads
        self.calls: list[str] = []
        self.by_others: list[bool] = []
        """For each call, whether a thread other than the maker's made it."""
        self.cut_short = 0
        """Writes of other threads that a kill left half done."""
        self.fired = False
        self.dead = False
        self._order = None if order is None else random.Random(order)  # noqa: S311
        self._maker = threading.current_thread()
        self._turn = threading.Lock()

    def call(self, name: str, act: Callable[[], T], torn: Callable[[], object] | None) -> T:
        """Make a call, or let it fail. torn: does half of it."""
        is_other = threading.current_thread() is not self._maker
        has_begun = not self.dead
        if is_other and self._order is not None and has_begun:
            time.sleep(self._order.choice(WAITS_S))
        with self._turn:
            if self.die_after and self.fired and len(self.calls) >= self.at + self.die_after:
                self.dead = True
            if self.dead:
                if has_begun and torn is not None and self.mode == "torn":
                    self.cut_short += 1
                    torn()
                raise Killed("killed")
            self.calls.append(name)
            self.by_others.append(is_other)
            if not self.at or not self.at <= len(self.calls) < self.at + self.failures:
                return act()
            self.fired = True
            if torn is not None and self.mode in {"torn", "error"}:
                torn()
            if self.mode == "error":
                raise OSError(self.number, os.strerror(self.number))
            if self.mode == "after":
                act()
            self.dead = True
            raise Killed("killed")


def _call(act: Callable[..., Any], *, reads: bool = False) -> Callable[..., Any]:
    """Make a method of `MemoryFiles` a call to the disk, which its `faults` count and let fail.

    reads: it changes nothing; `faults` count it if they count such calls.
    """

    @functools.wraps(act)
    def called(files: MemoryFiles, *given: Any, **named: Any) -> Any:
        if reads and not files.faults.reads:
            return act(files, *given, **named)
        return files.faults.call(act.__name__, lambda: act(files, *given, **named), None)

    return called


_reading_call = functools.partial(_call, reads=True)


class MemoryFiles(Files):
    """The disk as one process sees it. Methods as in `Files`; `faults` may make them fail."""

    def __init__(self, disk: MemoryDisk, faults: Faults | None = None) -> None:
        self.disk, self.faults = disk, faults or Faults()
        self._opened: dict[int, _File] = {}
        self._next = 1 << 30
        """The newest descriptor; the system has none so high."""

    def die(self) -> None:
        """End the process: its files are closed, and no later call has an effect."""
        self.faults.dead = True
        for descriptor in list(self._opened):
            self.close(descriptor)

    def _made(self, file: _File) -> int:
        self._next += 1
        self._opened[self._next] = file
        return self._next

    @_call
    def make_directory(self, path: Path) -> None:
        self.disk.folder(path.parent).names.setdefault(path.name, _Folder())
        self.disk.folder(path)

    @_call
    def create(self, path: Path) -> int:
        self.disk.folder(path.parent).names.setdefault(path.name, _File())
        file = self.disk.file(path)
        if file.content:
            file.change(0, b"", 0)
        return self._made(file)

    def write(self, descriptor: int, data: BytesLike, offset: int) -> None:
        file, whole = self._opened[descriptor], memoryview(data).cast("B")

        def put(part: memoryview) -> None:
            file.change(offset, part, max(len(file.content), offset + len(part)))

        half = whole[: len(whole) // 2]
        self.faults.call("write", lambda: put(whole), lambda: put(half))

    @_call
    def truncate(self, descriptor: int, size: int) -> None:
        file = self._opened[descriptor]
        grown = bytes(max(0, size - len(file.content)))
        file.change(len(file.content), grown, size)

    @_call
    def sync(self, descriptor: int) -> None:
        self._opened[descriptor].undo.clear()

    @_call
    def sync_directory(self, path: Path) -> None:
        folder = self.disk.folder(path)
        folder.durable = dict(folder.names)

    @_call
    def rename(self, source: Path, target: Path) -> None:
        moved, inside = self.disk.find(source), self.disk.folder(target.parent)
        before = inside.names.get(target.name, moved)
        number = 0
        if source in target.parents:
            number = errno.EINVAL
        elif isinstance(before, _Folder) != isinstance(moved, _Folder):
            number = errno.EISDIR if isinstance(before, _Folder) else errno.ENOTDIR
        elif before is not moved and isinstance(before, _Folder) and before.names:
            number = errno.ENOTEMPTY
        if number:
            raise _error(number, target)
        del self.disk.folder(source.parent).names[source.name]
        inside.names[target.name] = moved

    @_call
    def remove(self, path: Path) -> None:
        self.disk.file(path)
        del self.disk.folder(path.parent).names[path.name]

    @_call
    def remove_directory(self, path: Path) -> None:
        if self.disk.folder(path).names:
            raise _error(errno.ENOTEMPTY, path)
        del self.disk.folder(path.parent).names[path.name]

    @_reading_call
    def open_existing(self, path: Path, *, writable: bool = False) -> int:
        return self._made(self.disk.file(path))

    def close(self, descriptor: int) -> None:
        file = self._opened.pop(descriptor, None)
        if file is not None and file.owner == (self, descriptor):
            file.owner = None

    def lock(self, descriptor: int) -> bool:
        file = self._opened[descriptor]
        file.owner = file.owner or (self, descriptor)
        return file.owner == (self, descriptor)

    def size(self, descriptor: int) -> int:
        return len(self._opened[descriptor].content)

    def is_at(self, descriptor: int, path: Path) -> bool:
        return self.exists(path) and self.disk.find(path) is self._opened[descriptor]

    @_reading_call
    def read_into(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        found = self._opened[descriptor].content[offset : offset + len(buffer)]
        buffer[: len(found)] = found
        return len(found)

    @_reading_call
    def read(self, descriptor: int, count: int, offset: int) -> bytes:
        return bytes(self._opened[descriptor].content[offset : offset + count])

    @_reading_call
    def names(self, path: Path) -> list[str]:
        return sorted(self.disk.folder(path).names) if self.exists(path) else []

    def exists(self, path: Path) -> bool:
        try:
            return bool(self.disk.find(path))
        except FileNotFoundError:
            return False

    def is_directory(self, path: Path) -> bool:
        return self.exists(path) and isinstance(self.disk.find(path), _Folder)
