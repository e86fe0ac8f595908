"""The sum of masked deltas, at the parameter server: no other value of them is ever computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fsl_async.roles.sync.roster import Answers
from fsl_async.secure.lattice import Vector, of_ring, to_values, unpack, word_type
from fsl_async.secure.masks import Streams, add_masks, pair_streams, public_of, self_key
from fsl_async.secure.shamir import join


class Opening:
    """What removes the masks from a sum. ValueError: the answers do not, with the reason.

    run: its name.
    """

    def __init__(self, answers: Answers, run: str) -> None:
        self._roster = roster = answers.roster
        self._survivors = answers.survivors
        context = roster.context(run)
        self._streams: Streams = []
        for name, is_seed in roster.needed(answers.survivors).items():
            secret = self._secret(name, answers.shares.get(name, {}))
            if is_seed:
                self._streams.append((self_key(secret, context), -1))
                continue
            if public_of(secret) != roster.keys[name][1]:
                raise ValueError(f"the shares of {name}'s key give another one")
            # What it would have added cancels what these have added.
            left = [one for one in roster.neighbours(name) if one in answers.survivors]
            self._streams += pair_streams(secret, roster, context, name, left)

    def _secret(self, name: str, shares: Mapping[str, bytes]) -> bytes:
        holders, least = self._roster.holders(name), self._roster.threshold
        found = {x: shares[one] for x, one in enumerate(holders, 1) if one in shares}
        if len(found) < least:
            raise ValueError(f"{len(found)} shares of {name} are here")
        try:
            return join(dict(list(found.items())[:least]))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def mean(self, frames: Mapping[str, Any], index: int, values: int) -> Vector:
        """Return the mean of chunk `index` over the survivors: float32.

        frames: by site. ValueError, CodecError: one is of another set or another length.
        """
        width = self._roster.width
        total = np.zeros(values, word_type(width))
        for name in self._survivors:
            words, found = unpack(frames[name], values)
            if found != width:
                raise ValueError(f"{name} has sent words of {found} bits, not of {width}")
            total += words
        add_masks(total, self._streams, index)
        return to_values(of_ring(total, width), self._roster.step / len(self._survivors))
