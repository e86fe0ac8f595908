"""Figures of clients by round, in dense columns of bounded length. Pure.

All columns of a node share one axis: bucket `i` holds the rounds `(first + i) * every` to
`(first + i + 1) * every - 1`. A client that sent nothing in a bucket has NaN there, so a gap stays
a gap. At `MAX_BUCKETS` buckets, `every` doubles and pairs of buckets become one: memory is bounded,
whatever the length of the run.
"""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, TypeAlias

from attrs import field, mutable

from fsl_async.observe.segments import Column

MAX_BUCKETS = 1024
"""Points on the axis at most."""
MAX_CLIENTS = 256
"""Clients with columns: names come from the network. Later ones have their present state only."""

Reduce: TypeAlias = Callable[[Sequence[float]], float]


def _last(values: Sequence[float]) -> float:
    return values[-1]


OF_CLIENT = ("loss", "tokens", "raw", "coded")
"""Columns of a client: mean loss; tokens; bytes in fp32 and as sent; the last three are sums."""
OF_RUN = ("t", "tokens", "loss", "cosine", "merged")
"""Columns of a node: when the round ended, tokens merged until then, mean loss of its deltas, mean
cosine between them, number of merged deltas."""
_COUNT = "losses"
"""Also of a client: the number of losses in the mean."""
_JOINED_OF_CLIENT: dict[str, Reduce] = {
    "loss": fmean, "tokens": sum, "raw": sum, "coded": sum, _COUNT: sum,
}  # fmt: skip
_JOINED_OF_RUN: dict[str, Reduce] = {
    "t": _last, "tokens": _last, "loss": fmean, "cosine": fmean, "merged": sum,
}  # fmt: skip
"""How the known values of two buckets become one."""
_NONE = float("nan")

Columns: TypeAlias = dict[str, Column]


@mutable
class RoundSeries:
    """The columns of a node. `clock` counts changes; `changed` has its value by bucket."""

    first: int = 0
    every: int = 1
    clock: int = 0
    changed: list[int] = field(factory=list)
    run: Columns = field(factory=lambda: _columns(OF_RUN, 0))
    clients: dict[str, Columns] = field(factory=dict)

    def __len__(self) -> int:
        return len(self.changed)

    def add(self, client: str, number: int, *, loss: float | None, **sums: float) -> None:
        """Add one delta (or upload) of a client in round `number`."""
        at = self._bucket(number)
        columns = self._of(client)
        if at is None or columns is None:
            return
        if loss is not None and math.isfinite(loss):
            count = 0.0 if math.isnan(columns[_COUNT][at]) else columns[_COUNT][at]
            before = columns["loss"][at] if count else 0.0
            columns["loss"][at] = before + (loss - before) / (count + 1)
            columns[_COUNT][at] = count + 1
        for name, value in sums.items():
            before = columns[name][at]
            columns[name][at] = value if math.isnan(before) else before + value

    def close(self, number: int, **values: float | None) -> None:
        """Set figures of the node for round `number`, which has made a version.

        Tokens are those of the run so far, so they are set, and the number of merged is added up.
        """
        at = self._bucket(number)
        if at is None:
            return
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                before = self.run[name][at]
                adds = name == "merged" and not math.isnan(before)
                self.run[name][at] = before + value if adds else value

    def truncate(self, number: int) -> None:
        """Forget rounds from `number` on: a rollback made them void."""
        at = number // self.every - self.first + (number % self.every > 0)
        if not 0 <= at < len(self):
            return
        for columns in (self.run, *self.clients.values()):
            for column in columns.values():
                del column[at:]
        del self.changed[at:]
        self.clock += 1
        if self.changed:
            self.changed[-1] = self.clock

    def rounds(self) -> list[int]:
        """The axis: the first round of each bucket."""
        return [(self.first + at) * self.every for at in range(len(self))]

    def since(self, clock: int) -> int:
        """The first bucket that has changed after `clock`; the length if none has."""
        return next((at for at, then in enumerate(self.changed) if then > clock), len(self))

    def _bucket(self, number: int) -> int | None:
        if number < 0:
            return None
        if not self.changed:
            self.first = number // self.every
        at = number // self.every - self.first
        if at < 0:
            return None
        while at >= MAX_BUCKETS:
            self._halve()
            at = number // self.every - self.first
        more = at + 1 - len(self)
        if more > 0:
            for columns in (self.run, *self.clients.values()):
                for column in columns.values():
                    column.extend([_NONE] * more)
            self.changed.extend([0] * more)
        self.clock += 1
        self.changed[at] = self.clock
        return at

    def _of(self, client: str) -> Columns | None:
        found = self.clients.get(client)
        if found is None and len(self.clients) < MAX_CLIENTS:
            found = self.clients[client] = _columns((*OF_CLIENT, _COUNT), len(self))
        return found

    def _halve(self) -> None:
        self.every *= 2
        odd, first = self.first % 2, self.first // 2
        for columns in (self.run, *self.clients.values()):
            joined = _JOINED_OF_RUN if columns is self.run else _JOINED_OF_CLIENT
            for name, column in columns.items():
                columns[name] = _paired(column, odd, joined[name])
        self.first, self.clock = first, self.clock + 1
        self.changed = [self.clock] * len(self.run["t"])


def _columns(names: tuple[str, ...], length: int) -> Columns:
    return {name: Column([_NONE] * length) for name in names}


def _paired(column: Column, odd: int, join: Reduce) -> Column:
    padded = [*([_NONE] * odd), *column]
    pairs = (padded[at : at + 2] for at in range(0, len(padded), 2))
    known = ([value for value in pair if not math.isnan(value)] for pair in pairs)
    return Column(join(values) if values else _NONE for values in known)


def plain(column: list[float], begin: int = 0) -> list[float | None]:
    """Values for JSON from bucket `begin` on, with 6 digits; None is a gap."""
    return [None if math.isnan(value) else float(f"{value:.6g}") for value in column[begin:]]


def as_dict(series: RoundSeries, since: int = 0) -> dict[str, Any]:
    """What has changed after the clock value `since`, for JSON: columns from bucket `begin` on.

    Those of clients are `of_client`'s, with this `begin`.
    """
    begin = series.since(since)
    times = [None if math.isnan(value) else round(value, 3) for value in series.run["t"][begin:]]
    return {
        "clock": series.clock,
        "begin": begin,
        "every": series.every,
        "rounds": series.rounds()[begin:],
        "t": times,
        **{name: plain(series.run[name], begin) for name in OF_RUN if name != "t"},
    }


def of_client(series: RoundSeries, name: str, begin: int) -> dict[str, list[float | None]]:
    """A client's columns from bucket `begin` on, for JSON."""
    return {key: plain(series.clients[name][key], begin) for key in OF_CLIENT}
