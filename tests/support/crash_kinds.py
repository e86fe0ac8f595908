"""The runs that crash points are taken from, by name, and how one point is tried."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path

from crash_disk import CrashDisk
from crash_world import World

import fsl_transport as tp
from fsl_async.store import manifest

SMALL_CHUNK = 48
POWERS = (None, "names", "all", 1, 2)
"""What the end of the server's process leaves: everything (kill -9), or what a power cut does, at
best, at worst, and by two seeds.
"""


class RoughWorld(World):
    """Thin links that lose messages, two of which are cut for a while, in the middle and at the
    end.
    """

    def run(self):
        """Cut and heal."""
        at, network = self.scheduler.call_at, self.network
        for name, begin, end in (("bb", 17.0, 26.0), ("a", 30.0, 33.0), ("a", 49.0, 51.0)):
            at(begin, network.cut, name, "ps")
            at(end, network.heal, name, "ps")
        return super().run()


def make(kind, root, **options):
    """A world: "clock", "rounds", or "rough"."""
    if kind == "rough":
        bad = tp.Conditions(
            delay_s=0.2, jitter_s=0.1, drop=0.02, duplicate=0.02, reorder=0.05, bytes_per_s=900.0
        )
        return RoughWorld(root, conditions=bad, **options)
    return World(root, trigger=kind, extras=kind == "clock", **options)


@contextmanager
def folder():
    """A place for a world of small chunks; other worlds, in the same process too, have theirs as
    before.

    In memory where there is one: thousands of small files on a shared disk would take minutes.
    """
    memory = Path("/dev/shm")
    before, manifest.CHUNK_VALUES = manifest.CHUNK_VALUES, SMALL_CHUNK
    try:
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as root:
            machine = Path(root) / "machine"
            machine.mkdir()
            yield machine
    finally:
        manifest.CHUNK_VALUES = before


def passed(kind):
    """All points that a run without a crash passes, and the calls of its disk. The run must be a
    good one.
    """
    with folder() as root:
        world = make(kind, root).run()
        assert world.violations == [], world.violations
        return world.points.all(), list(world.disk.calls)


def attempt(kind, point, power=None, **options):
    """Crash there; what was wrong afterwards."""
    with folder() as root:
        world = make(kind, root, point=point, power=power, **options).run()
        fired = [] if world.points.fired else [f"{point} was not reached"]
        return fired + world.violations


def attempt_call(kind, at, mode, power=None, **options):
    """Let the server's disk go wrong at its call number `at`; what was wrong afterwards."""
    made = []

    def disk(root):
        made.append(CrashDisk(root, at, mode, **options))
        return made[-1]

    with folder() as root:
        world = make(kind, root, power=power, disk=disk).run()
        fired = [] if made[0].fired else [f"call {at} was not reached"]
        return fired + world.violations


THREADS = 2
"""That write a version, as `codec.threads` has it where nobody sets it."""


def attempt_call_of_threads(kind, at, mode, power, order):
    """The same where several threads write: which call is number `at` is another thing each time.
    What was wrong; the first disk.
    """
    made = []

    def disk(root):
        made.append(CrashDisk(root, at, mode, order=order))
        return made[-1]

    with folder() as root:
        world = make(kind, root, power=power, disk=disk, threads=THREADS).run()
        fired = [] if made[0].fired else [f"call {at} was not reached"]
        return fired + world.violations, made[0]


def calls_of_threads(kind):
    """Of each call of the disk in a run without a crash, whether a thread of the store made it; in
    one order of many.
    """
    with folder() as root:
        make_disk = lambda root: CrashDisk(root, order=0)  # noqa: E731
        world = make(kind, root, disk=make_disk, threads=THREADS).run()
        assert world.violations == [], world.violations
        return list(world.disk.by_others)


def calls_with_reads(kind):
    """The calls of a disk whose reads count too."""
    made = []

    def disk(root):
        made.append(CrashDisk(root, reads=True))
        return made[-1]

    with folder() as root:
        make(kind, root, disk=disk).run()
    return made[0].calls
