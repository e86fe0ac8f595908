"""A journal's lines as points of the series that trackers show. Pure.

    role            a point for each              its step
    ps              version_committed             the version
    ps              a version that was made just before the process was killed
    ps              delta_offered, where the client measured a version      that version
    server          round that is over            the round
    client          rebased                       the version

Steps are what a restarted reader goes on from. After a rollback versions are made again: a tracker
that has the step already keeps what it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from attrs import field, frozen, mutable

from fsl_async.observe.clients import Line
from fsl_async.observe.evaluations import Evaluation
from fsl_async.observe.run_state import CLIENT, SPLIT_SERVER, RunState
from fsl_async.tools.trackers.catalog import Reading, series_of

HELD_OUT = "held_out"
_OF_A_MERGE = ("loss/mean", "staleness/mean", "staleness/max")
_MOST_OF_A_NAME = 80
_NOT_IN_A_SERIES = re.compile(r"[^A-Za-z0-9._-]+")


@frozen
class Point:
    """Values by series at one step. t: seconds since 1970."""

    step: int
    t: float
    values: dict[str, float]


def evaluated(one: Evaluation, t: float) -> Point:
    """The point of a version's held-out loss. t: when it was measured, seconds since 1970."""
    data = _NOT_IN_A_SERIES.sub("_", one.data)[-_MOST_OF_A_NAME:].strip("_")
    where = f"{HELD_OUT}/{data}" if data else HELD_OUT
    mean = "" if one.of == "weights" else f"_{one.of}"
    found = {
        "loss": one.loss,
        "perplexity": one.perplexity if one.accuracy is None else None,
        "bits_per_byte": one.bits_per_byte,
        "accuracy": one.accuracy,
    }
    values = {f"{where}/{name}{mean}": v for name, v in found.items() if v is not None}
    return Point(one.version, t, values)


def newest_of_each(evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """The newest evaluation of each data, and of weights and means apart."""
    found: dict[tuple[str, str], Evaluation] = {}
    for one in evaluations:
        key = one.data, one.of
        if key not in found or found[key].version <= one.version:
            found[key] = one
    return [found[key] for key in sorted(found)]


@mutable
class Points:
    """Makes points of lines. `apply` takes them in order, as `RunState` does, and fails on none."""

    state: RunState = field(factory=RunState)
    _round: int = -1

    def apply(self, line: Line) -> list[Point]:
        """Take one line; returns the points that are complete with it."""
        state, kind = self.state, line.get("type")
        version, measured = state.ps.version, (len(state.ps.evaluations), _last(state))
        state.apply(line)
        if kind == "version_committed":
            is_merged = state.ps.version > 0 and line.get("made_of") != "global"
            has_cosine = isinstance(line.get("cosine"), int | float)
            return [self._version(is_merged=is_merged, has_cosine=has_cosine)]
        if kind in {"recovered", "version_found"} and -1 < version < state.ps.version:
            return [self._version(is_merged=False, has_cosine=False)]
        if kind == "delta_offered" and (len(state.ps.evaluations), _last(state)) != measured:
            newest = state.ps.evaluations[-1]
            return [evaluated(newest, state.node.last_t)] if newest.version >= 0 else []
        if kind == "rebased":
            return [Point(state.site.version, state.node.last_t, series_of(Reading(state)))]
        if kind in {"upload_trained", "finish"} and state.node.role == SPLIT_SERVER:
            return self._rounds(ended=kind == "finish")
        self._round = state.split_server.round if kind == "so_far" else self._round
        return []

    def _version(self, *, is_merged: bool, has_cosine: bool) -> Point:
        """The state at a new version, without what the state has of an earlier one."""
        values = series_of(Reading(self.state))
        for name in (*(() if has_cosine else ("cosine",)), *(() if is_merged else _OF_A_MERGE)):
            values.pop(name, None)
        return Point(self.state.ps.version, self.state.node.last_t, values)

    def _rounds(self, *, ended: bool) -> list[Point]:
        """The round that is over, as the next one has begun or the run ends."""
        before, newest = self._round, self.state.split_server.round
        self._round = newest
        over = newest if ended else before
        if over < 0 or (newest == before and not ended):
            return []
        return [Point(over, self.state.node.last_t, series_of(Reading(self.state)))]

    @property
    def step(self) -> int:
        """The newest step of which a point may exist."""
        node = self.state.node
        if node.role == CLIENT:
            return self.state.site.version
        return self.state.split_server.round if node.role == SPLIT_SERVER else self.state.ps.version


def _last(state: RunState) -> int:
    return id(state.ps.evaluations[-1]) if state.ps.evaluations else 0
