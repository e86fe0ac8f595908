"""Deltas of other clients at an evaluator: coded as they came, until they are scored. NumPy only.

The worker thread puts their chunks, the loop thread takes all of them with the order to score, and
the training thread scores. So a question that is asked again changes nothing that is being scored.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from fsl_async.learn.client.exchange import Exchange
from fsl_async.learn.client.ports import Harm, LossAt, ScoreOrder, Vector
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.roles.sync.events import Scored
from fsl_async.roles.sync.messages import MOST_SCORED
from fsl_async.store.errors import LearnerError
from fsl_codecs import CodecError, decode_accumulate

MOST_LOSS = 1e9
"""Stands for a loss that is not finite."""
Frames = Mapping[DeltaKey, list[bytes]]


class EvaluatorExchange(Exchange):
    """The exchange of an evaluator, with the coded deltas of one round."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._frames: dict[DeltaKey, list[bytes]] = {}

    def put_delta(self, key: DeltaKey, first: int, *frames: bytes) -> None:
        """Take the chunks of a delta from `first` on. LearnerError: they are not expected."""
        if not first:  # its stream may begin again
            self._frames.pop(key, None)
            if len(self._frames) >= MOST_SCORED:  # of questions that were not scored
                del self._frames[next(iter(self._frames))]
            self._frames[key] = []
        held = self._frames.get(key, [])
        if first != len(held) or first + len(frames) > self._known_manifest().chunks:
            raise LearnerError(f"chunk {first} of delta {key.text} is not expected")
        held.extend(frames)

    def score(self, version: int, shares: dict[DeltaKey, float]) -> None:
        """Have the deltas scored on a version that are whole, and all dropped. Answers Scored.

        shares: of each in the mean of the round.
        """
        frames, self._frames = self._frames, {}
        chunks = self._known_manifest().chunks
        whole = {key: share for key, share in shares.items() if len(frames.get(key, ())) == chunks}
        self._training.ask(ScoreOrder(partial(self._answer, version, frames, whole)))

    def _answer(
        self,
        wanted: int,
        frames: Frames,
        shares: Mapping[DeltaKey, float],
        loss_at: LossAt,
        harm: Harm | None,
    ) -> None:
        """Score deltas, in the training thread, and report it.

        None is scored if the model or the base is on another version by now.
        """
        held, found = list[Vector](), {}
        version = self.read_base(lambda base: held.append(base.copy()))
        if version == self.version == wanted:
            found = self._scores(frames, held[0], shares, loss_at, harm)
        self._on_event(Scored(wanted, found))

    def _scores(
        self,
        frames: Frames,
        base: Vector,
        shares: Mapping[DeltaKey, float],
        loss_at: LossAt,
        harm: Harm | None,
    ) -> dict[DeltaKey, tuple[float, float, float]]:
        """Return loss, alone and left_out of each delta, as in `Score`; none of a damaged one.

        harm: None: only each delta alone is tried. Else, with two or more, the mean without each
        one is, and the worst is left out before the others are tried again, while one hurts: beside
        a large delta an honest one that opposes it looks as if it hurt, or as if the large one did
        not.
        """

        def loss(parts: Mapping[DeltaKey, float]) -> float:
            found = float(loss_at(self._sum(frames, base, parts)))
            return min(MOST_LOSS, max(-MOST_LOSS, found)) if math.isfinite(found) else MOST_LOSS

        whole, alone = loss({}), dict[DeltaKey, float]()
        for key in shares:
            with contextlib.suppress(CodecError):
                alone[key] = loss({key: 1.0}) - whole
        shares = {key: shares[key] for key in alone}
        better, left = dict.fromkeys(shares, 0.0), dict(shares)
        together = loss(_scaled(left)) if harm and len(left) > 1 else whole
        while harm and len(left) > 1:
            rest = {key: loss(_scaled(_without(left, key))) for key in left}
            better.update({key: together - found for key, found in rest.items()})
            if len(shares) - len(left) >= len(shares) // 2:
                break
            worst = max(left, key=lambda key: better[key])
            if better[worst] <= harm.left_out * abs(whole):
                if together - whole <= harm.alone * abs(whole):
                    break
                # No single one is to blame for a mean that hurts.
                worst = max(left, key=lambda key: alone[key])
                better[worst] = max(0.0, better[worst])
            together = rest[worst]
            del left[worst]
        return {key: (whole, alone[key], better[key]) for key in shares}

    def _sum(self, frames: Frames, base: Vector, parts: Mapping[DeltaKey, float]) -> Vector:
        """The version with a weighted sum of deltas: a delta is what its client's weights lost.

        Buffers are not changes, so they are averaged.
        """
        made, manifest = base.copy(), self._known_manifest()
        for index in range(manifest.chunks if parts else 0):
            chunk, sign = made[slice(*manifest.chunk_range(index))], np.float32(-1.0)
            if manifest.is_buffer(index):
                sign = np.float32(1.0)
                chunk[:] = 0.0
            for key, share in parts.items():
                decode_accumulate(frames[key][index], chunk, float(sign * share))
        return made


def _without(shares: Mapping[DeltaKey, float], key: DeltaKey) -> dict[DeltaKey, float]:
    return {other: share for other, share in shares.items() if other != key}


def _scaled(shares: Mapping[DeltaKey, float]) -> dict[DeltaKey, float]:
    """The shares, so that they add up to 1; equal ones where all are 0."""
    total = math.fsum(shares.values())
    return {key: share / total if total else 1.0 / len(shares) for key, share in shares.items()}
