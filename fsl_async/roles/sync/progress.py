"""How far a run is towards its planned end, and how fast it goes on. Pure.

Learning rates (`learn.client.schedule`) and outer momentum (`store.rules.outer`) follow it.
"""

from __future__ import annotations

import math
from collections import deque

from attrs import field, frozen, mutable

DECAYS_FROM = 0.7
"""Progress at which learning rates and outer momentum begin to fall, unless set otherwise."""

AHEAD_VERSIONS = 2
"""Versions ahead of the last one up to which progress is extrapolated."""

PACE_VERSIONS = 8
"""Versions over which the pace is measured."""


def _share(_: object, __: object, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"a share of a run is from 0 to 1, not {value}")


def _pace(_: object, __: object, value: float) -> None:
    if not (math.isfinite(value) and value >= 0.0):
        raise ValueError(f"a pace is a finite number of at least 0, not {value}")


def fade_of(progress: float | None, decays_from: float) -> float:
    """1 until `decays_from` and where no end is planned, then linearly to 0 at the end."""
    if progress is None or progress <= decays_from:
        return 1.0
    return (1.0 - progress) / (1.0 - decays_from)


@frozen
class RunPosition:
    """Where a run is, as a version's announcement carries it.

    tokens: merged so far. planned_tokens: of the whole run, extrapolated where the limit is not of
    tokens; 0 if unknown. is_planned: whether there is an end, without which `progress` and
    `pace_per_s` are 0. progress: 0 to 1. pace_per_s: progress gained in a second. reach: progress
    at which the version after the next is expected, the limit of extrapolation. decays_from: the
    progress at which learning rates begin to fall.

    Raises ValueError for numbers out of range.
    """

    tokens: int = 0
    planned_tokens: int = 0
    is_planned: bool = False
    progress: float = field(default=0.0, validator=_share)
    pace_per_s: float = field(default=0.0, validator=_pace)
    reach: float = field(default=1.0, validator=_share)
    decays_from: float = field(default=DECAYS_FROM, validator=_share)

    @property
    def known_progress(self) -> float | None:
        """The progress; None where no end is planned."""
        return self.progress if self.is_planned else None

    @property
    def fade(self) -> float:
        """See `fade_of`."""
        return fade_of(self.known_progress, self.decays_from)


@frozen
class RunLimits:
    """The limits that end a run; 0: no limit. seconds: of serving, over all processes."""

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def exist(self) -> bool:
        """Whether there is any."""
        return bool(self.rounds or self.tokens or self.seconds)

    @property
    def words(self) -> str:
        """Return the end that they set, in words; empty without any."""
        ends = [f"version {self.rounds}"] if self.rounds else []
        ends += [f"{self.tokens:,} tokens"] if self.tokens else []
        ends += [f"{self.seconds:,.0f} s of serving"] if self.seconds else []
        return " or ".join(ends)

    def is_last(self, number: int) -> bool:
        """Whether the version that round `number` makes is the last one of the run."""
        return bool(self.rounds) and number + 1 >= self.rounds

    def reached(self, version: int, tokens: int) -> str | None:
        """The limit that a run with that version and those merged tokens has reached, or None."""
        if self.rounds and version >= self.rounds:
            return f"the run's limit of {self.rounds} rounds is reached"
        if self.tokens and tokens >= self.tokens:
            return f"the run's limit of {self.tokens} tokens is reached"
        return None


@frozen
class Decay:
    """A decay of learning rates that was asked for while the run went on.

    decays_from: progress at which it began, by `limits`, the run's limits from then on. planned:
    the limits of the configuration; a run that is started with other ones has dropped the decay.
    """

    decays_from: float
    limits: RunLimits
    planned: RunLimits


@mutable
class RunProgress:
    """Progress in [0, 1] by the limit that will be reached first: tokens, rounds or seconds.

    round_s: seconds from one version to the next, where they are made by the clock; else 0.

    The seconds before version 0 are no part of it: nothing is trained while the parameter server
    waits for its first clients.
    """

    limits: RunLimits = RunLimits()
    decays_from: float = DECAYS_FROM
    round_s: float = 0.0
    tokens: int = 0
    """Merged so far."""
    version: int = 0
    global_versions: int = 0
    """Versions of the weights of all groups so far; they are no rounds."""
    was_asked: bool = False
    """Whether the decay was asked for while the run went on."""
    _planned: RunLimits = field(init=False)
    _began_s: float | None = None
    """Seconds served before version 0; None while there is none."""
    _served_s: float = 0.0
    _started_at: float = 0.0
    _marks: deque[tuple[float, float]] = field(factory=lambda: deque(maxlen=PACE_VERSIONS + 1))
    """(time, progress) of the last versions."""

    def __attrs_post_init__(self) -> None:
        self._planned = self.limits

    def recovered(
        self,
        version: int,
        tokens: int,
        served_s: float,
        now: float,
        decay: Decay | None = None,
        *,
        began_s: float = 0.0,
        global_versions: int = 0,
    ) -> None:
        """Continue from the state on disk.

        served_s: for which earlier processes served the run. began_s: of them, before version 0.
        """
        self.global_versions = global_versions
        self.version, self.tokens = max(0, version), tokens
        self._served_s, self._started_at = served_s, now
        self._began_s = began_s if version >= 0 else None
        if decay is not None and decay.planned == self.limits:
            self.limits, self.decays_from = decay.limits, decay.decays_from
            self.was_asked = True
        self._mark(now)

    def committed(self, version: int, tokens: int, now: float, *, is_global: bool = False) -> None:
        """Count a version made of `tokens`; is_global: of the weights of all groups."""
        self.global_versions += is_global and version > 0
        if self._began_s is None:
            self._began_s = self.served_s(now)
            self._marks.clear()
        self.version = version
        self.tokens += tokens
        self._mark(now)

    def is_last(self, number: int) -> bool:
        """Whether the version that round `number` makes is the last one of the run."""
        return self.limits.is_last(number - self.global_versions)

    def limit_reached(self, version: int, tokens: int) -> str | None:
        """The limit that the run has reached with a version and its merged tokens, or None."""
        return self.limits.reached(version - self.global_versions, tokens)

    def with_version(self, version: int, tokens: int, now: float) -> RunPosition:
        """Where the run is once `version` is made of `tokens` more."""
        return self._at(self._counted(version, self.tokens + tokens, now), now)

    def position(self, now: float) -> RunPosition:
        """Where the run is: the progress of the last version, and what the pace adds to it."""
        counted = self._counted(self.version, self.tokens, now)
        if counted is not None and self._marks:
            at, before = self._marks[-1]
            expected = before + self._pace_per_s() * (now - at)
            # A round that waits for its clients makes no progress beyond the next versions.
            counted = max(counted, min(expected, self._reach()))
        return self._at(counted, now)

    def served_s(self, now: float) -> float:
        """Seconds for which the run was served, over all processes."""
        return self._served_s + now - self._started_at

    def decay(self, more: RunLimits, now: float) -> Decay:
        """A decay that begins now, and ends the run after `more` rounds, tokens or seconds.

        Without any `more` the end stays. Where rates fall already they go on falling from where
        they are, to the new end. `adopt` makes it so.
        """
        position = self.position(now)
        if not more.exist:
            return Decay(position.progress, self.limits, self._planned)
        limits = RunLimits(
            more.rounds and self.version - self.global_versions + more.rounds,
            more.tokens and self.tokens + more.tokens,
            more.seconds and self.served_s(now) + more.seconds,
        )
        progress = self._counted(self.version, self.tokens, now, limits)
        assert progress is not None, "there is a limit"
        fade = position.fade
        if fade < 1.0:  # so that fade_of(progress, decays_from) is what it was
            begun = 1.0 - (1.0 - progress) / fade if fade else 0.0
            return Decay(max(0.0, begun), limits, self._planned)
        return Decay(progress, limits, self._planned)

    def adopt(self, decay: Decay, now: float) -> None:
        """Let rates fall as `decay` says."""
        if decay.limits != self.limits:
            self.limits = decay.limits
            self._marks.clear()
            self._mark(now)
        self.decays_from = decay.decays_from
        self.was_asked = True

    def _at(self, progress: float | None, now: float) -> RunPosition:
        if progress is None:
            return RunPosition(self.tokens, decays_from=self.decays_from)
        planned = self.limits.tokens or (round(self.tokens / progress) if progress else 0)
        reach = max(progress, self._reach())
        return RunPosition(
            self.tokens, planned, True, progress, self._pace_per_s(), reach, self.decays_from
        )

    def _counted(
        self, version: int, tokens: int, now: float, limits: RunLimits | None = None
    ) -> float | None:
        """The largest part of any limit that is used up; None without limits."""
        limits, parts = limits or self.limits, []
        if limits.rounds:
            parts.append((version - self.global_versions) / limits.rounds)
        if limits.tokens:
            parts.append(tokens / limits.tokens)
        if limits.seconds:
            parts.append(self._part_of_seconds(limits.seconds, now))
        return min(1.0, max(parts)) if parts else None

    def _part_of_seconds(self, limit_s: float, now: float) -> float:
        if self._began_s is None:
            return 0.0
        whole_s = limit_s - self._began_s
        return (self.served_s(now) - self._began_s) / whole_s if whole_s > 0.0 else 1.0

    def _mark(self, now: float) -> None:
        progress = self._counted(self.version, self.tokens, now)
        if progress is not None:
            self._marks.append((now, progress))

    def _reach(self) -> float:
        """Progress at which the version after the next is expected."""
        if not self._marks:
            return 1.0
        (_, first), (_, last) = self._marks[0], self._marks[-1]
        versions = len(self._marks) - 1
        gain = (last - first) / versions if versions else self._pace_per_s() * self.round_s
        return min(1.0, last + AHEAD_VERSIONS * gain) if gain else 1.0

    def _pace_per_s(self) -> float:
        """Progress in a second over the last versions, or as planned before there are two."""
        if self._began_s is None:
            return 0.0
        if len(self._marks) > 1:
            (first_at, first), (last_at, last) = self._marks[0], self._marks[-1]
            if last_at > first_at:
                return (last - first) / (last_at - first_at)
        limits = self.limits
        paces = []
        if limits.seconds:
            whole_s = limits.seconds - self._began_s
            paces.append(1.0 / whole_s if whole_s > 0.0 else 0.0)
        if limits.rounds and self.round_s:
            paces.append(1.0 / (limits.rounds * self.round_s))
        return max(paces, default=0.0)
