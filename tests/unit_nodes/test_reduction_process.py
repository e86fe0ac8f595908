"""Processes that add up what groups gained: the same bits everywhere, and no leftovers."""

# ruff: noqa: D102 - methods are named after what they do

import asyncio
import os
import signal
from pathlib import Path

import numpy as np

from fsl_async.nodes.ps.reduction_process import ReductionJob, ReductionProcess

SKIP, VALUES, PIECE = 16, 1000, 300


class Groups:
    """Reductions that exchange their addresses here."""

    def __init__(self, folder, count):
        self.folder = folder
        self.outcomes = {}
        self.helpers = [
            ReductionProcess(
                lambda attempt, name, blob, me=me: self.pass_on(me, name, blob),
                lambda attempt, me=me: self.outcomes[me].set_result(""),
                lambda attempt, reason, me=me: self.outcomes[me].set_result(reason),
            )
            for me in range(count)
        ]

    def pass_on(self, me, name, blob):
        for other in self.outcomes:
            if other != me:
                self.helpers[other].address(name, blob)

    def begin(self, attempt, members, *, weights=(0.5, 0.25, 0.25), **more):
        loop = asyncio.get_running_loop()
        self.outcomes = {me: loop.create_future() for me in members}
        for rank, me in enumerate(members):
            self.helpers[me].reduce(
                ReductionJob(
                    attempt=attempt, rank=rank, weights=weights[: len(members)],
                    piece_values=PIECE, base=self.folder / "base", cut=self.folder / f"cut-{me}",
                    residual=self.folder / "lost" if not rank else None,
                    out=self.out(me, attempt), skip=SKIP, values=VALUES, host="127.0.0.1",
                    timeout_s=20.0, **more,
                )
            )  # fmt: skip

    def out(self, me, attempt):
        return self.folder / f"out-{me}.{attempt}"

    async def end(self):
        return list(await asyncio.wait_for(asyncio.gather(*self.outcomes.values()), 90.0))


async def attempts(folder):
    """Three members; then one is killed in its middle; then the two others go on; then NaN."""
    groups = Groups(folder, 3)
    groups.begin(1, [0, 1, 2])
    assert await groups.end() == ["", "", ""]
    groups.begin(2, [0, 1, 2], bytes_per_s=PIECE * 4 / 0.5)
    while not groups.out(2, 2).exists():  # noqa: ASYNC110 - a file has no event
        await asyncio.sleep(0.01)
    os.kill(groups.helpers[2].pid, signal.SIGKILL)
    reasons = await groups.end()
    assert "by peer" in reasons[0] + reasons[1]
    assert "\n" not in reasons[0]
    assert reasons[2] == "its process ended (-9)"
    groups.begin(3, [0, 1])
    assert await groups.end() == ["", ""]
    diverged = np.full(VALUES, np.inf, "<f4")
    (folder / "cut-1").write_bytes(bytes(SKIP) + diverged.tobytes())
    groups.begin(4, [0, 1])
    assert "not finite" in "".join(await groups.end())
    groups.begin(5, [0, 1, 2], bytes_per_s=1.0)
    await asyncio.sleep(0.3)
    pids = [helper.pid for helper in groups.helpers]
    sessions = [os.getsid(pid) for pid in pids]
    for helper in groups.helpers:
        await helper.aclose()
    return pids, sessions


def test_sums_are_equal_and_a_killed_member_costs_one_attempt(tmp_path):
    """With real gloo: members that get a result have the same bits, others an error at once."""
    random = np.random.default_rng(0)
    base, lost, *cuts = random.standard_normal((5, VALUES)).astype("<f4")
    head = b"h" * SKIP
    (tmp_path / "base").write_bytes(head + base.tobytes())
    (tmp_path / "lost").write_bytes(bytes(SKIP) + lost.tobytes())
    for me, cut in enumerate(cuts):
        (tmp_path / f"cut-{me}").write_bytes(bytes(SKIP) + cut.tobytes())
    pids, sessions = asyncio.run(attempts(tmp_path))
    assert pids == sessions, "Ctrl-C in a terminal is for the parameter server alone"
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    results = {(tmp_path / f"out-{me}.1").read_bytes() for me in range(3)}
    (result,) = results
    assert result[:SKIP] == head
    gained = 0.5 * (base - cuts[0]) + 0.25 * (base - cuts[1]) + 0.25 * (base - cuts[2])
    assert np.allclose(np.frombuffer(result[SKIP:], "<f4"), gained - lost, atol=1e-6)
    assert len({(tmp_path / f"out-{me}.3").read_bytes() for me in range(2)}) == 1
