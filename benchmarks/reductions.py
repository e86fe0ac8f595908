"""Measures the reduction between parameter servers: processes of one machine over loopback.

    python benchmarks/reductions.py [--values 50000000] [--members 3] [--repeat 3]

Prints one JSON row per line:

    reduce       all members; seconds from the job to the last result on disk, synced. equal:
                 whether all results have the same bytes
    floor        the same bytes added by NumPy in one process and written, with the same sync
    killed       a process gets SIGKILL in the middle: seconds until the other members have an error
    without      ... and until the others have a result without it
    first        seconds from the start of a process to its first result (importing torch)
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from fsl_async.nodes.ps.reduction_process import ReductionJob, ReductionProcess

SKIP = 64
PIECE_VALUES = 1 << 24


class Members:
    """Reductions that exchange addresses in this process."""

    def __init__(self, folder: Path, values: int, count: int) -> None:
        self.folder, self.values = folder, values
        self.results: dict[int, asyncio.Future[str]] = {}
        self.ranks: list[int] = []
        self.processes = [self._process(me) for me in range(count)]

    def _process(self, me: int) -> ReductionProcess:
        def done(_: int) -> None:
            self.results[me].set_result("")

        def failed(_: int, reason: str) -> None:
            self.results[me].set_result(reason)

        def address(_: int, key: str, blob: bytes) -> None:
            self.pass_on(me, key, blob)

        return ReductionProcess(address, done, failed)

    def pass_on(self, me: int, key: str, blob: bytes) -> None:
        """Give an address to the others of the attempt."""
        for other in self.ranks:
            if other != me:
                self.processes[other].address(key, blob)

    def out(self, me: int, attempt: int) -> Path:
        """The result of a member."""
        return self.folder / f"result-{me}.{attempt}"

    def begin(self, attempt: int, members: list[int], piece_values: int = PIECE_VALUES) -> None:
        """Start an attempt."""
        loop = asyncio.get_running_loop()
        self.ranks = members
        self.results = {me: loop.create_future() for me in members}
        for rank, me in enumerate(members):
            self.processes[me].reduce(
                ReductionJob(
                    attempt=attempt,
                    rank=rank,
                    weights=(1 / len(members),) * len(members),
                    piece_values=piece_values,
                    base=self.folder / "base",
                    cut=self.folder / f"cut-{me}",
                    out=self.out(me, attempt),
                    skip=SKIP,
                    values=self.values,
                    host="127.0.0.1",
                    timeout_s=20.0,
                )
            )

    async def done(self) -> list[str]:
        """Wait for all members; returns their reasons, empty for a result."""
        return await asyncio.gather(*self.results.values())


def write(path: Path, values: int, seed: int) -> None:
    """Write a file of values."""
    random = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(bytes(SKIP))
        for begin in range(0, values, PIECE_VALUES):
            count = min(PIECE_VALUES, values - begin)
            file.write(random.standard_normal(count, np.float32).tobytes())


def digest(path: Path) -> str:
    """A digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def floor(folder: Path, values: int, count: int) -> float:
    """Seconds to add all cuts in one process and to write the result."""
    begun = time.monotonic()
    with (folder / "floor").open("wb", buffering=0) as out:
        for begin in range(0, values, PIECE_VALUES):
            end = min(values, begin + PIECE_VALUES)
            part = [
                np.memmap(folder / name, np.float32, "r", SKIP, (values,))[begin:end]
                for name in ("base", *(f"cut-{me}" for me in range(count)))
            ]
            total = sum((part[0] - one) / np.float32(count) for one in part[1:])
            out.write((part[0] - total).tobytes())
        os.fsync(out.fileno())
    return time.monotonic() - begun


async def until_longer(path: Path, least: float) -> None:
    """Wait until a file has so many bytes, with a look each millisecond."""

    def is_short() -> bool:
        return not path.exists() or path.stat().st_size < least

    while is_short():  # noqa: ASYNC110 - a file has no event
        await asyncio.sleep(0.001)


async def measure(values: int, count: int, repeat: int) -> None:
    """Print all rows."""

    def row(**found: Any) -> None:
        print(json.dumps({"values": values, "members": count, **found}), flush=True)

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder / "base", values, 0)
        for me in range(count):
            write(folder / f"cut-{me}", values, 1 + me)
        members = Members(folder, values, count)
        everyone = list(range(count))
        begun = time.monotonic()
        attempt = 1
        members.begin(attempt, everyone)
        assert await members.done() == [""] * count
        row(row="first", seconds=round(time.monotonic() - begun, 3))
        digests = {digest(members.out(me, attempt)) for me in everyone}
        for _ in range(repeat):
            attempt += 1
            begun = time.monotonic()
            members.begin(attempt, everyone)
            assert await members.done() == [""] * count
            seconds = time.monotonic() - begun
            digests |= {digest(members.out(me, attempt)) for me in everyone}
            per_gb = seconds / (4e-9 * values)
            row(
                row="reduce",
                seconds=round(seconds, 3),
                seconds_per_gb=round(per_gb, 2),
                equal=len(digests) == 1,
            )
            for me in everyone:
                members.out(me, attempt).unlink()
        row(row="floor", seconds=round(floor(folder, values, count), 3))
        for share in (0.2, 0.5, 0.8):
            attempt += 1
            victim = count - 1
            members.begin(attempt, everyone)
            partial = members.out(victim, attempt)
            await until_longer(partial, share * 4 * values)
            pid = members.processes[victim].pid
            assert pid is not None
            begun = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            reasons = await members.done()
            survivors = [me for me in everyone if me != victim]
            row(
                row="killed",
                at=share,
                seconds=round(time.monotonic() - begun, 3),
                errors=sum(bool(reasons[me]) for me in survivors),
                reason=reasons[0],
            )
            attempt += 1
            members.begin(attempt, survivors)
            assert await members.done() == [""] * len(survivors)
            row(row="without", at=share, seconds=round(time.monotonic() - begun, 3))
            assert len({digest(members.out(me, attempt)) for me in survivors}) == 1
        for process in members.processes:
            await process.aclose()


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=50_000_000)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3)
    chosen = parser.parse_args()
    asyncio.run(measure(chosen.values, chosen.members, chosen.repeat))


if __name__ == "__main__":
    main()
