"""The kinds of runs that crash points are taken from, and functions that try one point."""

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
"""What the end of the parameter server's process leaves: everything (None, kill -9), or what a
power cut leaves at best, at worst, and by two seeds.
"""


class RoughWorld(World):
    """Slow links that lose messages; two are cut for a while, in the middle and at the end."""

    def run(self):
        """Run with links cut and healed."""
        at, network = self.scheduler.call_at, self.network
        for name, begin, end in (("bb", 17.0, 26.0), ("a", 30.0, 33.0), ("a", 49.0, 51.0)):
            at(begin, network.cut, name, "ps")
            at(end, network.heal, name, "ps")
        return super().run()


def make(kind, root, **options):
    """Make a world; kind: "clock", "rounds", "buffer", "latest" or "rough"."""
    if kind == "rough":
        bad = tp.Conditions(
            delay_s=0.2, jitter_s=0.1, drop=0.02, duplicate=0.02, reorder=0.05, bytes_per_s=900.0
        )
        return RoughWorld(root, conditions=bad, **options)
    if kind == "latest":
        return World(root, trigger="buffer", extras=False, latest=True, rounds=6, **options)
    return World(root, trigger=kind, extras=kind == "clock", **options)


@contextmanager
def folder():
    """A folder for a world, with chunks of SMALL_CHUNK values until it is left.

    In /dev/shm where there is one: thousands of small files on a shared disk would take minutes.
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
    """Run without a crash, which must find no violation; returns all points passed and the calls of
    its disk.
    """
    with folder() as root:
        world = make(kind, root).run()
        assert world.violations == [], world.violations
        return world.points.all(), list(world.disk.calls)


def attempt(kind, point, power=None, **options):
    """Crash at this point; returns the violations."""
    with folder() as root:
        world = make(kind, root, point=point, power=power, **options).run()
        fired = [] if world.points.fired else [f"{point} was not reached"]
        return fired + world.violations


def attempt_call(kind, at, mode, power=None, **options):
    """Make the parameter server's disk fail at its call number `at`; returns the violations."""
    made = []

    def disk(root):
        made.append(CrashDisk(root, at, mode, **options))
        return made[-1]

    with folder() as root:
        world = make(kind, root, power=power, disk=disk).run()
        fired = [] if made[0].fired else [f"call {at} was not reached"]
        return fired + world.violations


THREADS = 2
"""Threads that write a version: the default of `codec.threads`."""


def attempt_call_of_threads(kind, at, mode, power, order):
    """As `attempt_call` where several threads write, so that call number `at` differs from run to
    run.

    Returns the violations and the first disk.
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
    """Run without a crash; returns for each call of the disk whether a thread of the store made it,
    in one order of many.
    """
    with folder() as root:
        make_disk = lambda root: CrashDisk(root, order=0)  # noqa: E731
        world = make(kind, root, disk=make_disk, threads=THREADS).run()
        assert world.violations == [], world.violations
        return list(world.disk.by_others)


def calls_with_reads(kind):
    """Run without a crash; returns the calls of the disk, reads included."""
    made = []

    def disk(root):
        made.append(CrashDisk(root, reads=True))
        return made[-1]

    with folder() as root:
        make(kind, root, disk=disk).run()
    return made[0].calls
