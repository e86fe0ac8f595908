# ruff: noqa: D102 - the methods mirror those of Files
"""A disk that fails, kills the process and loses data on demand.

It is the real disk behind `fsl_async.store.files.Files`, with its calls counted.
"""

import errno
import os
import random
import shutil
import threading
import time
from itertools import count

from fsl_async.store.files import Files

MOMENTS_S = (0.0, 0.0002, 0.002)
"""Waits of a thread before a call, where `order` is given: none, about one call, about a series of
calls.
"""


class CrashDisk(Files):
    """A disk that counts its calls, makes one fail, and models what a power cut would leave.

    `mode`: "after" (the call was made) and "torn" (half of a write) kill the process (SystemExit);
    "error" makes `failures` calls in a row fail with errno `number`, a write half done, and with
    `die_after` kills the process that many calls later. `reads`: calls that only read are counted
    too, and can fail.

    Several threads may call it. Calls are counted in the order in which they arrive, which differs
    from run to run. After the call that kills, no call of any thread has an effect, except that
    with mode "torn" writes which had begun and wait for their turn are half done: a kill can
    interrupt several threads. `order`: a seed by which threads other than the one that made this
    disk wait before each call, so that one overtakes another.

    Durable is the least that fsync(2) promises: content as of the last sync of the file, names as
    of the last sync of the folder.
    """

    def __init__(
        self,
        root,
        at=0,
        mode="after",
        failures=1,
        die_after=None,
        *,
        number=errno.ENOSPC,
        reads=False,
        order=None,
    ):
        self.root, self.at, self.mode, self.failures = root, at, mode, failures
        self.die_after = die_after
        self.number = number
        self.reads = reads
        self.calls = []
        self.by_others = []  # for each call, whether a thread other than the maker's made it
        self.cut_short = 0  # writes of other threads than the one that was killed first
        self._order = None if order is None else random.Random(order)
        self._maker = threading.current_thread()
        self._turn = threading.Lock()
        self.fired = False
        self.dead = False
        self.opened = {}
        self.ids = count()
        self.folders = {}  # id -> {name: id}, as the process sees it
        self.durable_folders = {}
        self.durable_files = {}
        self.root_id = self._scan(root)

    def _scan(self, path):
        found = next(self.ids)
        if path.is_dir():
            self.folders[found] = {entry.name: self._scan(entry) for entry in path.iterdir()}
            self.durable_folders[found] = dict(self.folders[found])
        else:
            self.durable_files[found] = path.read_bytes()
        return found

    def _id(self, path):
        found = self.root_id
        for part in path.relative_to(self.root).parts:
            found = self.folders[found][part]
        return found

    def _call(self, name, act, torn=None):
        other = threading.current_thread() is not self._maker
        has_begun = not self.dead
        if other and self._order and has_begun:
            time.sleep(self._order.choice(MOMENTS_S))
        with self._turn:
            return self._in_turn(name, act, torn, other, has_begun)

    def _in_turn(self, name, act, torn, other, has_begun):
        if self.die_after and self.fired and len(self.calls) >= self.at + self.die_after:
            self.dead = True
        if self.dead:
            if has_begun and torn and self.mode == "torn":
                self.cut_short += 1
                torn()
            raise SystemExit("killed")
        self.calls.append(name)
        self.by_others.append(other)
        number = len(self.calls)
        if not self.at or not self.at <= number < self.at + self.failures:
            return act()
        self.fired = True
        if self.mode == "error":
            if torn:
                torn()
            raise OSError(self.number, os.strerror(self.number))
        if self.mode == "torn" and torn:
            torn()
        if self.mode == "after":
            act()
        self.dead = True
        raise SystemExit("killed")

    def make_directory(self, path):
        def act():
            Files.make_directory(self, path)
            if path != self.root:
                inside = self.folders[self._id(path.parent)]
                if path.name not in inside:
                    inside[path.name] = next(self.ids)
                    self.folders[inside[path.name]] = {}

        self._call("make_directory", act)

    def create(self, path):
        def act():
            descriptor = Files.create(self, path)
            inside = self.folders[self._id(path.parent)]
            self.opened[descriptor] = inside.setdefault(path.name, next(self.ids))
            return descriptor

        return self._call("create", act)

    def write(self, descriptor, data, offset):
        half = memoryview(data).cast("B")[: memoryview(data).nbytes // 2]
        self._call(
            "write",
            lambda: Files.write(self, descriptor, data, offset),
            lambda: Files.write(self, descriptor, half, offset),
        )

    def adopt(self, path):
        """Track a file that was opened elsewhere.

        Its present content is durable; what `append` adds is never synced, nor is its name.
        """
        self.folders[self._id(path.parent)].setdefault(path.name, next(self.ids))

    def append(self, descriptor, data):
        """Write at the end of a file opened for appending; returns the bytes written. A full disk
        writes none.
        """
        taken = []
        half = data[: len(data) // 2]
        self._call(
            "append",
            lambda: taken.append(os.write(descriptor, data)),
            lambda: None if self.mode == "error" else os.write(descriptor, half),
        )
        return taken[0]

    def truncate(self, descriptor, size):
        self._call("truncate", lambda: Files.truncate(self, descriptor, size))

    def sync(self, descriptor):
        def act():
            content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            self.durable_files[self.opened[descriptor]] = content

        self._call("sync", act)

    def sync_directory(self, path):
        def act():
            if path == self.root or self.root in path.parents:
                found = self._id(path)
                self.durable_folders[found] = dict(self.folders[found])

        self._call("sync_directory", act)

    def rename(self, source, target):
        def act():
            Files.rename(self, source, target)
            moved = self.folders[self._id(source.parent)].pop(source.name)
            self.folders[self._id(target.parent)][target.name] = moved

        self._call("rename", act)

    def remove(self, path):
        def act():
            Files.remove(self, path)
            del self.folders[self._id(path.parent)][path.name]

        self._call("remove", act)

    def remove_directory(self, path):
        def act():
            Files.remove_directory(self, path)
            del self.folders[self._id(path.parent)][path.name]

        self._call("remove_directory", act)

    def open_existing(self, path, *, writable=False):
        def act():
            descriptor = Files.open_existing(self, path, writable=writable)
            self.opened[descriptor] = self._id(path)
            return descriptor

        return self._read_call("open_existing", act)

    def read_into(self, descriptor, buffer, offset):
        return self._read_call(
            "read_into", lambda: Files.read_into(self, descriptor, buffer, offset)
        )

    def names(self, path):
        return self._read_call("names", lambda: Files.names(self, path))

    def _read_call(self, name, act):
        return self._call(name, act) if self.reads else act()

    def close(self, descriptor):
        if self.opened.pop(descriptor, None) is not None:
            super().close(descriptor)

    def bury(self, power=None):
        """Close what the dead process had open and apply a power cut.

        power: None keeps everything; "names" keeps names and loses content that was not synced;
        "all" loses names too. A number is a seed that decides for each file and folder whether it
        is as last written, as last synced, or (files) cut short or with zeros at its end.
        """
        for descriptor in list(self.opened):
            self.close(descriptor)
        if power is None:
            return
        folders = self.durable_folders if power == "all" else self.folders
        files = self.durable_files
        if isinstance(power, int):
            rng = random.Random(power)
            kept = {found: dict(self.durable_folders.get(found, {})) for found in self.folders}
            folders = {
                found: dict(rng.choice([kept[found], names]))
                for found, names in self.folders.items()
            }
            # A rename between folders is atomic: its file is in one of them.
            there = {one for names in folders.values() for one in names.values()}
            still = {one for names in self.folders.values() for one in names.values()}
            for found, names in kept.items():
                for name, one in names.items():
                    if one in still - there:
                        folders[found][name] = one
            files = {**files, **self._as_it_may_be(self.root, self.root_id, rng)}
        shutil.rmtree(self.root)
        self._rebuild(self.root, self.root_id, folders, files)

    def _as_it_may_be(self, path, found, rng):
        """Return what a power cut may leave of unsynced files: blocks reach a disk in any order."""
        if found in self.folders:
            inside = sorted(self.folders[found].items())
            return {
                key: value
                for name, one in inside
                for key, value in self._as_it_may_be(path / name, one, rng).items()
            }
        now, synced = path.read_bytes(), self.durable_files.get(found, b"")
        if now == synced:
            return {}
        same = next(
            (at for at, (a, b) in enumerate(zip(now, synced, strict=False)) if a != b),
            min(len(now), len(synced)),
        )
        cut = (same + len(now)) // 2
        return {found: rng.choice([now, synced, now[:cut], now[:cut] + bytes(len(now) - cut)])}

    def _rebuild(self, path, found, folders, files):
        if found in self.folders:
            path.mkdir()
            for name, inside in folders.get(found, {}).items():
                self._rebuild(path / name, inside, folders, files)
        else:
            path.write_bytes(files.get(found, b""))
