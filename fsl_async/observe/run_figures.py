"""What there is to say about a run: figures that `RunState` adds up from the journal, and what follows from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from attrs import asdict, field, mutable

from fsl_async.accounting.accounts import Account
from fsl_async.observe.client_state import ClientState, News, Traffic, client_dict, mean
from fsl_async.observe.round_watch import RoundWatch

MAX_NEWS = 100

_DERIVED = (
    "rounds", "relaunches", "participation", "participation_alive", "bytes_raw", "bytes_sent", "ratio", "pending",
    "loss_first", "loss_last",
)  # fmt: skip


def _newest(news: Iterable[News]) -> deque[News]:
    return deque(news, MAX_NEWS)


@mutable
class RunFigures:
    """Everything there is to say about a run, by `RunState`, which takes lines; here it is read."""

    run: str = ""
    role: str = ""
    address: str = ""
    encrypted: bool | None = None
    """None: its journal is of a release that did not say."""
    needs: tuple[str, ...] = ()
    """Kinds of data that every client of the run sends (`fsl_async.config.site_policy`)."""
    client: str = ""
    """Of a client's own journal: its name."""
    leaving: tuple[str, ...] = ()
    """Of a client's own journal: the kinds of data that leave its machine, for `leaving_to`."""
    leaving_to: str = ""
    pid: int = 0
    host: str = ""
    every_s: float = 0.0
    quorum: float = 0.0
    starts: int = 0
    started_at: float = 0.0
    last_t: float = 0.0
    phase: str = "unknown"  # starting | waiting | ready | collecting | merging | ended
    ending: str = ""
    ended_at: float | None = None
    exit_code: int = 0
    version: int = -1
    digest: str = ""
    values: int = 0
    tokens: int = 0
    round: int = -1
    round_called_at: float = 0.0
    next_sync_at: float | None = None
    called: int = 0
    answered: int = 0
    called_alive: int = 0
    deltas_merged: int = 0
    up: Traffic = field(factory=Traffic)
    down: Traffic = field(factory=Traffic)
    clients: dict[str, ClientState] = field(factory=dict)
    news: deque[News] = field(factory=deque, converter=_newest)
    account: Account = field(factory=Account)
    garbage: int = 0
    held: dict[str, str] = field(factory=dict)
    """Deltas that are kept out for now, and why."""
    alarms: int = 0
    """Damage found on the server's disk, and digests of clients that differ from the server's."""
    alarm: str = ""
    """The newest of them, or what the server found when it looked for the cause."""
    lines_odd: int = 0
    _pending: dict[str, int] = field(factory=dict)  # key -> tokens
    _merging: dict[str, int] = field(factory=dict)
    _tokens_of: dict[str, int] = field(factory=dict)
    _round_of: dict[str, int] = field(factory=dict)
    _uncounted: dict[str, int] = field(
        factory=dict
    )  # key -> bytes, of what a process before stored
    _again: set[str] = field(factory=set)  # keys that the last start found pending
    _loss_of: dict[str, float] = field(factory=dict)
    _watch: RoundWatch = field(factory=RoundWatch)
    _told: set[str] = field(factory=set)  # notes since something changed: not said again
    _bytes_told: tuple[int, int] = (0, 0)  # raw, sent
    _garbage_before: int = 0
    _fresh: list[News] = field(factory=list, init=False, eq=False)

    @property
    def rounds(self) -> int:
        """Rounds that made a version."""
        return max(0, self.version)

    @property
    def relaunches(self) -> int:
        """How often a client's name came back as a new process."""
        return sum(client.relaunches for client in self.clients.values())

    @property
    def participation(self) -> float | None:
        """Deltas in a merged round over the clients called for it."""
        return self.answered / self.called if self.called else None

    @property
    def participation_alive(self) -> float | None:
        """The same over those of the called that were still there when it merged."""
        return self.answered / self.called_alive if self.called_alive else None

    @property
    def bytes_raw(self) -> int:
        """Both directions, 4 bytes for each value."""
        return self.up.raw + self.down.raw

    @property
    def bytes_sent(self) -> int:
        """Both directions, as they were sent."""
        return self.up.sent + self.down.sent

    @property
    def ratio(self) -> float | None:
        """Raw over sent bytes."""
        return self.bytes_raw / self.bytes_sent if self.bytes_sent else None

    @property
    def pending(self) -> int:
        """Deltas that are acknowledged and not merged yet."""
        return len(self._pending)

    @property
    def loss_first(self) -> float | None:
        """Mean of the first loss that each client reported."""
        return mean(client.loss_first for client in self.clients.values())

    @property
    def loss_last(self) -> float | None:
        """Mean of the last loss that each client reported."""
        return mean(client.loss for client in self.clients.values())

    def as_dict(self, now: float) -> dict[str, Any]:
        """Plain values for --json."""
        skip = {"clients", "news", "up", "down", "account"}
        made = {
            name: value
            for name, value in asdict(self, recurse=False).items()
            if name not in skip and not name.startswith("_")
        }
        made |= {name: getattr(self, name) for name in _DERIVED}
        made |= {
            "bytes_up": asdict(self.up),
            "bytes_down": asdict(self.down),
            "traffic": self.account.as_dict(),
            "clients": [client_dict(client, now) for client in self.clients.values()],
            "news": [asdict(one) for one in list(self.news)[-20:]],
        }
        return made
