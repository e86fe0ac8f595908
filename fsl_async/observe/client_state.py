"""What is known of one client, of bytes, and of news: the values that `fsl_async.observe.state` is made of. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from attrs import asdict, field, frozen, mutable

MAX_LOSSES = 120

_VALUE_BYTES = 4

REASONS = {
    "expired": "nothing was heard from it",
    "bye": "it said goodbye",
    "superseded": "a new process took its name",
    "reset": "the connection was reset",
    "protocol": "it broke the protocol",
    "revoked": "its key is not let in any more",
}
"""Why a session ended, for people."""


@frozen
class News:
    """One line for people. `kind` is a word for programs; `client` is empty when it is about the run."""

    t: float
    kind: str
    text: str
    client: str = ""
    level: str = "info"  # info | warning


@mutable
class Traffic:
    """Bytes of whole transfers, as they would be in fp32 and as they were sent."""

    raw: int = 0
    sent: int = 0

    @property
    def ratio(self) -> float | None:
        """Raw over sent; None before anything was sent."""
        return self.raw / self.sent if self.sent else None

    def add(self, values: int, sent: int) -> None:
        """Count one transfer of `values` values."""
        self.raw += _VALUE_BYTES * values
        self.sent += sent


def _newest(losses: Iterable[float]) -> deque[float]:
    return deque(losses, MAX_LOSSES)


@mutable
class ClientState:
    """A client as the parameter server knows it. Tokens are of all its lives, `step` is of the present one."""

    name: str
    incarnation: int = -1
    incarnations: int = 0
    doing: str = "joining"  # joining | publishing | fetching | training | sending | gone | done
    connected: bool = False
    hangs: bool = False  # by its last heartbeat
    returning: bool = False  # back after a loss, and not on the current version yet
    gone_at: float = 0.0
    gone_why: str = ""
    last_seen: float = 0.0
    version: int = -1
    step: int = 0
    step_offered: int = 0  # steps of this life that deltas carried, where no heartbeat told of them
    tokens_offered: int = 0
    sequence_offered: int = 0  # of this life's last delta
    tokens: int = 0
    tokens_before: int = 0  # in earlier lives
    left_out: int = 0  # steps of split learning that came to nothing, of all its lives
    left_out_before: int = 0
    tokens_per_s: float = 0.0
    tells_loss: bool = False  # on its heartbeats, in this life
    trouble: str = ""  # what goes wrong in its training, by what it reports
    loss_first: float | None = None
    losses: deque[float] = field(factory=deque, converter=_newest)
    lag_p99_ms: float | None = None
    deltas_merged: int = 0
    deltas_refused: int = 0
    deltas_quarantined: int = 0
    up: Traffic = field(factory=Traffic)

    def saw_loss(self, loss: Any) -> None:
        """Keep a loss that it reported; one that is not finite is text in the journal."""
        if not isinstance(loss, int | float) or isinstance(loss, bool):
            return
        # Only in its first life: what a relaunched client begins with, others have trained.
        if self.loss_first is None and self.incarnations <= 1:
            self.loss_first = float(loss)
        self.losses.append(float(loss))

    @property
    def loss(self) -> float | None:
        """The last loss that it reported."""
        return self.losses[-1] if self.losses else None

    @property
    def relaunches(self) -> int:
        """How often its name came back as a new process."""
        return max(0, self.incarnations - 1)

    def words(self, now: float) -> str:
        """What it does, for people."""
        if self.doing == "gone":
            return f"gone since {max(0.0, now - self.gone_at):.0f} s ({self.gone_why})"
        if self.returning and self.doing in {"joining", "fetching"}:
            return "catching up"
        return self.doing


def client_dict(client: ClientState, now: float) -> dict[str, Any]:
    """Plain values for --json."""
    made = asdict(client, recurse=False)
    made |= {"losses": list(client.losses)[-20:], "up": asdict(client.up)}
    made |= {"state": client.words(now), "loss": client.loss, "relaunches": client.relaunches}
    return made


def counted(count: int, thing: str) -> str:
    """`1 client`, `2 clients`."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def megabytes(count: int) -> str:
    """Bytes for people, in powers of ten; small runs move kilobytes, which are not 0.0 MB."""
    if count >= 1_000_000_000:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.1f} MB" if count >= 1_000_000 else f"{count / 1e3:.1f} kB"


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of what is known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
