"""What the journals of all roles have in common: a process, its clients, and news. Pure."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import field, mutable

from fsl_async.observe.clients import REASONS, ClientState, Line, News, mean
from fsl_async.roles.phrasing import counted
from fsl_async.roles.sync.training_trouble import trouble_in

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

    # --- the journal's lines about clients and their sessions ---

    def _connected_words(self) -> str:
        """How many clients have a session now, for lines about those that come and go."""
        self.repeats_may_be_news()
        here = sum(client.connected for client in self.clients.values())
        return f"{counted(here, 'client')} connected"

    def _on_client_hello(self, line: Line) -> None:
        client = self.client_of(line)
        how = client.arrive(int(line["incarnation"]), in_run=bool(line.get("run")))
        words = {
            "joined": "joins",
            "relaunched": f"is back as a new process (relaunch {client.relaunches})",
            "reconnected": "is connected again",
        }
        if how:
            self.tell(how, f"{client.name} {words[how]}, {self._connected_words()}", client.name)

    def _on_admit_split(self, line: Line) -> None:
        self._on_client_hello(line)
        client = self.client_of(line)
        client.returning, client.doing = False, "training"

    def _on_client_left(self, line: Line) -> None:
        if str(line["peer"]) not in self.clients:
            return  # it was refused
        client = self.client_of(line)
        if int(line["incarnation"]) != client.incarnation or not client.connected:
            return
        reason = str(line.get("reason", ""))
        if self.node.phase == "ended":
            client.connected, client.doing = False, "done"
            return
        client.lose(self.node.last_t, REASONS.get(reason, reason))
        if reason == "bye":
            client.training.end(str(line.get("why") or client.gone_why))
        level = "info" if reason == "bye" else "warning"
        text = f"{client.name} left: {client.gone_why}, {self._connected_words()}"
        self.tell("gone", text, client.name, level)

    def _on_refuse(self, line: Line) -> None:
        text = f"refused {line['peer']}: {line.get('text', '')}"
        self.tell("refused", text, str(line["peer"]), "warning")
        self.refused(str(line["peer"]))

    def _on_fetch_asked(self, line: Line) -> None:
        self.client_of(line).doing = "fetching"

    def _on_stream_lost(self, line: Line) -> None:
        client = self.client_of(line)
        if client.doing in {"sending", "publishing"}:
            client.doing = "training" if client.version >= 0 else "joining"

    def _on_heartbeat_received(self, line: Line) -> None:
        client = self.client_of(line)
        payload = line["payload"]
        client.step = int(payload.get("step", client.step))
        client.tokens = client.tokens_before + int(payload.get("tokens", 0))
        if self.node.keeps_deltas:
            client.training.has_trained(client.tokens - client.tokens_before)
        client.tokens_per_s = float(payload.get("tokens_per_s", 0.0))
        client.left_out = client.left_out_before + int(payload.get("left_out", 0))
        lag = payload.get("lag_p99_ms")
        client.lag_p99_ms = float(lag) if isinstance(lag, int | float) else client.lag_p99_ms
        client.tells_loss = client.tells_loss or payload.get("loss") is not None
        client.saw_loss(payload.get("loss"))
        # Without a loss (its site keeps that) the heartbeat alone can tell that it is over.
        self.look_for_trouble(client, payload, may_end="loss" not in payload)
        hung_s = payload.get("hung_s")
        hangs = isinstance(hung_s, int | float) and not isinstance(hung_s, bool)
        if hangs and not client.hangs:
            text = f"{client.name} hangs: its training has made no step for {hung_s:.0f} s"
            self.tell("hangs", text, client.name, "warning")
        elif client.hangs and not hangs:
            self.tell("hangs no more", f"{client.name} makes steps again", client.name)
        client.hangs = hangs

    def look_for_trouble(
        self, client: ClientState, metrics: Mapping[str, Any], *, may_end: bool
    ) -> None:
        """Tell when training begins to go wrong, and when that is over: a whole round went well."""
        trouble = trouble_in(metrics)
        if trouble and not client.trouble:
            text = f"{client.name} trains badly: {trouble}"
            self.tell("trains badly", text, client.name, "warning")
        elif client.trouble and may_end and not trouble:
            self.tell("trains well", f"{client.name} trains well again", client.name)
        if trouble or may_end:
            client.trouble = trouble

    # --- what follows from them ---

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
