"""Global rounds between the parameter servers of `quality_run`, without a network.

Real: the store's cuts, results, decisions and versions of global weights (`GroupsStore`). Not real:
the sum, which NumPy adds in the order of the groups; gloo's ring adds in another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsl_async.store.store import Store
from fsl_codecs import CodecSpec


class Groups:
    """Averages groups. momentum: "keep" or "reset", of each group at an adoption."""

    def __init__(self, stores: Sequence[Store], codec: CodecSpec, momentum: str) -> None:
        self._stores, self._codec, self._momentum = stores, codec, momentum
        self.round = -1

    def begin(self) -> None:
        """Make the groups' version 0, the same at all, global weights 0."""
        digests = set()
        for number, store in enumerate(self._stores):
            store.groups.open(coordinates=number == 0)
            digests.add(store.groups.begin().digest)
        assert len(digests) == 1, "all groups begin with the same weights"
        self.round = 0

    def average(self) -> str:
        """Play a global round; returns the digest of the weights that all groups hold then."""
        groups = [store.groups for store in self._stores]
        attempt = self.round + 1
        cuts = [one.take_cut(self.round) for one in groups]
        tokens = [cut.end - cut.begin for cut in cuts]
        groups[0].keep_attempt(self.round, attempt)
        jobs = [one.begin_result(attempt) for one in groups]
        total = sum(tokens)
        gained = sum(_gained(job, one / total) for job, one in zip(jobs, tokens, strict=True))
        for job in jobs:
            head = Path(job["base"]).read_bytes()[: job["skip"]]
            Path(job["out"]).write_bytes(head + np.asarray(gained, "<f4").tobytes())
        digests = {one.finish_result(attempt, self._codec) for one in groups}
        assert len(digests) == 1, "all groups make the same weights of one sum"
        (digest,) = digests
        names = {f"group-{n}": (cut.begin, cut.end) for n, cut in enumerate(cuts)}
        self.round += 1
        groups[0].keep_decision(self.round, attempt, digest, names)
        decided = groups[0].state.decided
        assert decided is not None
        for store in self._stores:
            store.adopt_global(decided, counted=True, keeps_momentum=self._momentum == "keep")
            assert store.digest == digest
        return digest


def _gained(job: dict[str, Any], weight: float) -> NDArray[np.float32]:
    base, cut = (
        np.memmap(job[name], "<f4", "r", job["skip"], (job["values"],)) for name in ("base", "cut")
    )
    part: NDArray[np.float32] = (base - cut) * np.float32(weight)
    if job["residual"] is not None:
        part -= np.memmap(job["residual"], "<f4", "r", job["skip"], (job["values"],))
    return part
