"""What the journals of all roles have in common: a process, its clients, and news. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from attrs import field, mutable

from fsl_async.observe.clients import ClientState, Line, News, mean

MAX_NEWS = 100


@mutable
class NodeState:
    """The process that writes the journal, and those before it in the same directory."""

    role: str = ""
    run: str = ""
    name: str = ""
    """Of a client."""
    address: str = ""
    encrypted: bool | None = None
    """None: its journal is of a release that did not record it."""
    pid: int = 0
    host: str = ""
    starts: int = 0
    started_at: float = 0.0
    last_t: float = 0.0
    phase: str = "unknown"  # starting | waiting | ready | collecting | merging | serving | ended
    ending: str = ""
    ended_at: float | None = None
    exit_code: int = 0
    garbage: int = 0
    """Messages from the network that were not of this program."""
    _garbage_before: int = 0

    def start(self, line: Line) -> None:
        """A new process."""
        self.role = str(line.get("role", ""))
        self.run = str(line.get("run", self.run))
        self.name = str(line.get("name", ""))
        self.address = str(line.get("address", ""))
        self.encrypted = told if isinstance(told := line.get("encrypted"), bool) else None
        self.pid, self.host = int(line.get("pid", 0)), str(line.get("host", ""))
        self.starts += 1
        self.started_at = self.started_at or self.last_t
        self._garbage_before = self.garbage
        self.phase, self.ending, self.ended_at, self.exit_code = "starting", "", None, 0

    @property
    def keeps_deltas(self) -> bool:
        """Whether training arrives here as deltas: at a split server it does not."""
        return self.role != "server"

    def count_garbage(self, line: Line) -> None:
        """The line counts since the process started; what earlier ones counted is kept aside."""
        self.garbage = self._garbage_before + int(line.get("garbage", 0))


def _newest(news: Iterable[News]) -> deque[News]:
    return deque(news, MAX_NEWS)


@mutable
class Run:
    """A process that writes a journal, and the clients it has seen. `RunState` adds the roles."""

    node: NodeState = field(factory=NodeState)
    clients: dict[str, ClientState] = field(factory=dict)
    """By name; of a client's own journal none."""
    news: deque[News] = field(factory=deque, converter=_newest)
    _told: set[str] = field(factory=set)  # notes since something changed: not told again
    _fresh: list[News] = field(factory=list, init=False, eq=False)

    def tell(self, kind: str, text: str, client: str = "", level: str = "info") -> None:
        """Add news about the line that is being applied."""
        self._fresh.append(News(self.node.last_t, kind, text, client, level))

    def tell_once(self, text: str, level: str) -> None:
        """A note: once, until a client comes or leaves or there is a version."""
        if text in self._told:
            return
        if len(self._told) < MAX_NEWS:
            self._told.add(text)
        self.tell("note", text, level=level)

    def client_of(self, line: Line) -> ClientState:
        """The client a line is about, which was seen just now."""
        name = str(line["peer"])
        client = self.clients.get(name)
        if client is None:
            client = self.clients[name] = ClientState(name)
        client.last_seen = self.node.last_t
        return client

    def refused(self, name: str) -> None:
        """Forget a client that is refused; one that took part before is gone."""
        client = self.clients.get(name)
        if client is None or client.version >= 0:
            return
        if client.tokens or client.uploads:  # of earlier processes
            client.lose(self.node.last_t, "refused")
        else:
            del self.clients[name]

    def repeats_may_be_news(self) -> None:
        """Something has changed: a note that was told before is told again."""
        self._told.clear()

    def take_news(self) -> list[News]:
        """The news since the last call; `news` keeps the newest MAX_NEWS of all."""
        taken, self._fresh = self._fresh, []
        self.news.extend(taken)
        return taken

    @property
    def relaunches(self) -> int:
        """How often a client's name came back as a new process."""
        return sum(client.relaunches for client in self.clients.values())

    @property
    def loss_first(self) -> float | None:
        """Mean of the first loss that each client reported."""
        return mean(client.loss_first for client in self.clients.values())

    @property
    def loss_last(self) -> float | None:
        """Mean of the last loss that each client reported."""
        return mean(client.loss for client in self.clients.values())
