# ruff: noqa: T201 - its lines are what it is for
"""Try every crash point, and every call of the parameter server's disk with every kind of failure.

This takes minutes, so CI tries a part.

    python tests/unit_crash/all_crash_points.py [--part 3/8]
        [--only effects|calls|threads|split] [--kind NAME]
    python tests/unit_crash/all_crash_points.py --seconds 90 --first 2701

Prints a line for each violation and the counts at the end, or the point to go on with. Exit code 1
when there was a violation, 3 when there are more points.
"""

import argparse
import errno
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import crash_split
from crash_run import KINDS, POWERS, passed, play

from fsl_async.files.memory_files import Faults

MODES = (
    ("after", {}),
    ("torn", {}),
    ("error", {"failures": 1}),
    ("error", {"failures": 6, "number": errno.EIO}),
    ("error", {"failures": 2, "number": errno.EIO, "reads": True}),
    ("error", {"failures": 1, "die_after": 3}),
)
MOST = 24
"""Points tried of each effect and stage in each split learning run, which passes some hundreds of
times.
"""


def effects(kind):
    """Yield (label, attempt) for every point of a kind of run."""
    for point in passed(kind).points.all():
        for power in POWERS if point.role == "ps" else (None,):
            yield (
                f"{kind} {point} power={power}",
                lambda point=point, power=power: play(kind, point=point, power=power).found,
            )


def _call(kind, at, mode, power, threads=1, **options):
    """Return (label, attempt) for a call of the disk."""
    faults = Faults(at, mode, **options)
    return (
        f"{kind} call {at} {mode} {options} power={power} threads={threads}",
        lambda: play(kind, faults=[faults], power=power, threads=threads).found,
    )


def calls(kind):
    """Yield (label, attempt) for every call of the parameter server's disk."""
    for mode, options in MODES:
        made = passed(kind, faults=[Faults(reads=options.get("reads", False))]).faults[0].calls
        dies = mode != "error" or "die_after" in options
        for at, name in enumerate(made, start=1):
            for power in (None, "all", 1) if dies else (None,):
                if mode != "torn" or name in {"write", "append"}:
                    yield _call(kind, at, mode, power, **options)


def threads(kind):
    """Yield (label, attempt) for every call of the disk where several threads write.

    Which call has a number differs from run to run.
    """
    made = passed(kind, faults=[Faults(order=0)], threads=2).faults[0].calls
    for mode, powers in (("after", POWERS[:4]), ("torn", (None, 2))):
        for power in powers:
            for at in range(1, len(made) + 1):
                yield _call(kind, at, mode, power, threads=2, order=at)


def split(name):
    """Yield (label, attempt) for every point of a simulated run of a split method."""
    for point in crash_split.spread(crash_split.passed(name), MOST):
        yield f"{name} {point}", lambda point=point: crash_split.attempt(name, point)


def main():
    """Try the points that the arguments select."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="1/1", help="of so many, to share the work out")
    parser.add_argument("--only", default="effects,calls,threads,split")
    parser.add_argument("--kind", default="")
    parser.add_argument("--first", type=int, default=1, help="number of the point to begin with")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    makers = {
        "effects": (effects, KINDS),
        "calls": (calls, ("clock", "rounds")),
        "threads": (threads, ("rounds",)),
        "split": (split, crash_split.KINDS),
    }
    begun, number, tried, wrong = time.monotonic(), 0, 0, 0
    for what in given.only.split(","):
        make, kinds = makers[what]
        for kind in kinds:
            if given.kind not in ("", kind):
                continue
            for label, attempt in make(kind):
                number += 1
                if number < given.first or number % parts != part % parts:
                    continue
                if time.monotonic() - begun > given.seconds:
                    print(f"{tried} tried, {wrong} with violations; go on with --first {number}")
                    return 1 if wrong else 3
                tried += 1
                found = attempt()
                wrong += bool(found)
                if found:
                    print(f"{label}: {'; '.join(found)}", flush=True)
    print(
        f"{tried} crash points tried in {time.monotonic() - begun:.0f} s, {wrong} with violations"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
