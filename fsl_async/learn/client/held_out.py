"""Evaluates versions on held-out data while training goes on."""

import math
import time
from collections.abc import Callable, Mapping

from fsl_async.config.site_policy import METRICS
from fsl_async.learn.client.fed import Fed


class HeldOut:
    """Measures new versions, one at a time. Nothing where the site keeps metrics to itself.

    measure: returns metrics of the model as it is, with names that begin with eval_. share: of the
    training thread's time that it may take; 0: never.
    """

    def __init__(self, fed: Fed, measure: Callable[[], Mapping[str, float]], share: float) -> None:
        self._fed = fed
        self._measure = measure
        self._pause = 1.0 / share - 1.0 if share and fed.policy.lets(METRICS) else math.inf
        self._seen = -1
        self._next_at = 0.0

    def due(self) -> dict[str, float]:
        """Metrics of a new version, and its number; empty if none is due, or this client leaves."""
        fed = self._fed
        if self._pause == math.inf or fed.version == self._seen or fed.is_leaving():
            return {}
        begun = time.monotonic()
        if begun < self._next_at:
            return {}
        with fed.at_version() as version:
            found = dict(self._measure()) if version >= 0 else {}
        self._seen = fed.version
        ended = time.monotonic()
        self._next_at = ended + self._pause * (ended - begun)
        return {**found, "eval_version": float(version)} if found else {}
