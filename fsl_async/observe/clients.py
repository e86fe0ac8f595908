"""A client of a run as a journal shows it: what it does, trains, sends and loses. Pure.

Training is lost when processes end:

    trained    tokens that the process reported, on heartbeats and with deltas
    settled    of these, tokens of deltas that are on the parameter server's disk, or were declined
               for good
    lost       the rest, once the process has ended: it takes with it what it had not sent

A process that was killed trained a little more than its last heartbeat reported, so what it lost
is at least this. One whose session is lost may come back as the same process and send what it has:
until another process begins, its loss is open.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import asdict, field, frozen, mutable

from fsl_async.roles.phrasing import counted
from fsl_async.roles.sync.training_trouble import trouble_in

Line = Mapping[str, Any]
"""A line of the journal."""

MAX_LOSSES = 120
REFUSED_ROUNDS, SCORED_ROUNDS = 5, 10
"""A client is named that an evaluator refuses in so many of so many rounds."""

_VALUE_BYTES = 4


@frozen
class News:
    """One line for people. kind: a word for programs. client: empty when it is about the run."""

    t: float
    kind: str
    text: str
    client: str = ""
    level: str = "info"  # info | warning


@mutable
class Volume:
    """Bytes of whole transfers, as they would be in fp32 and as they were sent."""

    raw: int = 0
    sent: int = 0

    @property
    def ratio(self) -> float | None:
        """Raw over sent; None before anything was sent."""
        return self.raw / self.sent if self.sent else None

    @property
    def bits(self) -> float | None:
        """Bits a value as sent; None before anything was."""
        return 8 * _VALUE_BYTES * self.sent / self.raw if self.raw else None

    def add(self, values: int, sent: int) -> None:
        """Count one transfer of `values` values."""
        self.raw += _VALUE_BYTES * values
        self.sent += sent


REASONS = {
    "expired": "no message came from it",
    "bye": "it ended its session",
    "superseded": "a new process took its name",
    "reset": "the connection was reset",
    "protocol": "it broke the protocol",
    "revoked": "its key is no longer on the allow-list",
}
"""Reason code -> the words that explain why a session ended."""
UNSEEN = "another process came"
"""Why a process ended whose end was not seen."""
OTHER = "other reasons"
_WITHOUT_GOODBYE = {*REASONS.values(), UNSEEN, OTHER} - {REASONS["bye"]}
MOST_REASONS = 16
"""Reasons of goodbyes are text of peers: further ones are counted together."""


@mutable
class Ended:
    """Processes that ended for one reason."""

    times: int = 0
    tokens_lost: int = 0


@mutable
class Training:
    """Tokens of a client's present process, and what became of those before it."""

    trained: int = 0
    settled: int = 0
    over: str = ""
    """Why the present process has ended; empty while it may come back."""
    offered: str = ""
    """Key of its newest delta, until that is settled, and the tokens of it."""
    offered_tokens: int = 0
    ends: dict[str, Ended] = field(factory=dict)

    @property
    def unsent(self) -> int:
        """Tokens that are lost if the process ends now."""
        return max(0, self.trained - self.settled)

    def has_trained(self, tokens: int) -> None:
        """Take the tokens of this process so far."""
        self.trained = max(self.trained, tokens)

    def offer(self, key: str, tokens: int) -> None:
        """A delta is offered, for the first time."""
        self.offered, self.offered_tokens = key, tokens

    def settle(self, key: str) -> None:
        """A delta is durable, or refused for good: it may be shortly after its process ended."""
        if key != self.offered:
            return
        before = self.unsent
        self.settled += self.offered_tokens
        self.offered = ""
        if self.over:
            self.ends[self.over].tokens_lost -= before - self.unsent

    def end(self, why: str) -> None:
        """The process has ended."""
        if self.over:
            return
        self.over = why if why in self.ends or len(self.ends) < MOST_REASONS else OTHER
        ended = self.ends.setdefault(self.over, Ended())
        ended.times += 1
        ended.tokens_lost += self.unsent

    def begin(self, why: str) -> None:
        """Another process begins. why: of the end of the one before, unless that is known."""
        self.end(why)
        self.trained = self.settled = 0
        self.over = self.offered = ""

    def ends_by(self, gone_why: str) -> dict[str, Ended]:
        """All ends; with that of a process whose session is lost, where `gone_why` is not empty."""
        if self.over or not gone_why:
            return self.ends
        open_end = self.ends.get(gone_why, Ended())
        added = Ended(open_end.times + 1, open_end.tokens_lost + self.unsent)
        return {**self.ends, gone_why: added}


def _newest(losses: Iterable[float]) -> deque[float]:
    return deque(losses, MAX_LOSSES)


@mutable
class ClientState:
    """A client as a server sees it. Tokens are of all its processes, `step` of the present one."""

    name: str
    incarnation: int = -1
    incarnations: int = 0
    doing: str = "joining"  # joining | publishing | fetching | training | sending | gone | done
    connected: bool = False
    hangs: bool = False  # by its last heartbeat
    returning: bool = False  # back after a loss, and not on the current version yet
    gone_at: float = 0.0
    gone_why: str = ""
    violation: str = ""  # of the protocol, by which its last session ended
    last_seen: float = 0.0
    version: int = -1
    step: int = 0
    step_offered: int = 0  # steps of this process that deltas carried
    tokens_offered: int = 0
    sequence_offered: int = 0  # of this process's last delta
    tokens: int = 0
    tokens_before: int = 0  # of earlier processes
    left_out: int = 0  # steps of split learning that came to nothing, of all its processes
    left_out_before: int = 0
    tokens_per_s: float = 0.0
    tells_loss: bool = False  # on its heartbeats, in this process
    trouble: str = ""  # in its training, by what it reports
    unmoved: int = 0  # its newest deltas in a row that change no weight
    loss_first: float | None = None
    losses: deque[float] = field(factory=deque, converter=_newest)
    lag_p99_ms: float | None = None
    epsilon: float | None = None  # that it has spent, by its newest delta
    unsent: float | None = None  # norm of what coding has kept back, in norms of its delta
    unsent_grew: int = 0  # deltas in a row with which that grew
    deltas_merged: int = 0
    deltas_refused: int = 0
    deltas_quarantined: int = 0
    deltas_clipped: int = 0  # merged as if they were shorter
    scored: int = 0  # rounds in which an evaluator scored its deltas
    refused: int = 0  # those in which it refused one
    newest_scores: deque[bool] = field(factory=lambda: deque(maxlen=SCORED_ROUNDS))
    """Whether the evaluator refused a delta, for each of the newest of these rounds."""
    uploads: int = 0  # that the split server trained
    facts: dict[str, float] = field(factory=dict)  # of its last delta: rank, order
    label_shares: dict[str, float] = field(factory=dict)
    measured: dict[str, float] = field(factory=dict)  # of its last delta: accuracy, reward
    product_norm: float | None = None  # of its change in the newest version, with product rules
    up: Volume = field(factory=Volume)
    training: Training = field(factory=Training)

    @property
    def is_often_refused(self) -> bool:
        """Whether an evaluator refuses half of its newest deltas."""
        return sum(self.newest_scores) >= REFUSED_ROUNDS

    def saw_score(self, *, is_refused: bool) -> str:
        """Count a round with an evaluator; returns a line when it refuses half of them."""
        self.scored += 1
        self.refused += is_refused
        was_named = self.is_often_refused
        self.newest_scores.append(is_refused)
        if was_named or not self.is_often_refused:
            return ""
        return (
            f"{self.name}: the evaluator refused its deltas in {REFUSED_ROUNDS} of the last"
            f" {len(self.newest_scores)} rounds: its data or its program is unlike the others'"
        )

    def saw_loss(self, loss: Any) -> None:
        """Keep a loss that it reported; one that is not finite is text in the journal."""
        if not isinstance(loss, int | float) or isinstance(loss, bool):
            return
        # In its first process only: a relaunched client starts from what others have trained.
        if self.loss_first is None and self.incarnations <= 1:
            self.loss_first = float(loss)
        self.losses.append(float(loss))

    def offered(self, key: str, sequence: int, *, steps: int, tokens: int) -> None:
        """A delta of so many steps and tokens is offered, for the first time."""
        self.training.offer(key, tokens)
        self.sequence_offered = sequence
        self.step_offered += steps
        self.tokens_offered += tokens
        self.step = max(self.step, self.step_offered)
        self.tokens = max(self.tokens, self.tokens_before + self.tokens_offered)
        self.training.has_trained(self.tokens - self.tokens_before)

    @property
    def loss(self) -> float | None:
        """The last loss that it reported."""
        return self.losses[-1] if self.losses else None

    @property
    def relaunches(self) -> int:
        """How often its name came back as a new process."""
        return max(0, self.incarnations - 1)

    @property
    def gone_words(self) -> str:
        """Why its last session ended, with the kind of violation if it broke the protocol."""
        return f"{self.gone_why}: {self.violation}" if self.violation else self.gone_why

    def words(self, now: float) -> str:
        """What it does, for people."""
        if self.doing == "gone":
            return f"gone for {max(0.0, now - self.gone_at):.0f} s ({self.gone_words})"
        if self.returning and self.doing in {"joining", "fetching"}:
            return "catching up"
        return self.doing

    def lose(self, t: float, why: str) -> None:
        """Its session is over."""
        self.connected, self.doing = False, "gone"
        self.gone_at, self.gone_why = t, why
        self.tokens_per_s = 0.0

    @property
    def ends(self) -> dict[str, Ended]:
        """How its processes ended, and what they lost; also the present one's if it is gone."""
        return self.training.ends_by(self.gone_why if self.doing == "gone" else "")

    def _begin(self, incarnation: int) -> None:
        """A new process of this name."""
        if self.incarnations:
            self.training.begin(self.gone_why or UNSEEN)
        self.incarnation = incarnation
        self.incarnations += 1
        self.tokens_before, self.step = self.tokens, 0
        self.left_out_before = self.left_out
        self.tells_loss = False
        self.trouble = ""
        self.unmoved = 0
        self.step_offered = self.tokens_offered = self.sequence_offered = 0
        self.tokens_per_s = 0.0
        self.version = -1

    def arrive(self, incarnation: int, *, in_run: bool) -> str:
        """A session begins; returns "joined", "relaunched", "reconnected", or "" when it goes on.

        in_run: the client is in this run already, welcomed by an earlier process of the server.
        """
        is_known, was_connected = self.incarnations > 0, self.connected
        self.connected, self.returning, self.doing = True, is_known, "joining"
        if incarnation > self.incarnation:
            self._begin(incarnation)
            return "relaunched" if is_known else "reconnected" if in_run else "joined"
        return "" if was_connected else "reconnected"


def client_dict(client: ClientState, now: float) -> dict[str, Any]:
    """Plain values for --json."""
    made = asdict(client, recurse=False)
    made |= {"losses": list(client.losses)[-20:], "up": asdict(client.up)}
    del made["training"]
    made["ends"] = {why: asdict(ended) for why, ended in client.ends.items()}
    made["tokens_lost"] = sum(ended.tokens_lost for ended in client.ends.values())
    made |= {"state": client.words(now), "loss": client.loss, "relaunches": client.relaunches}
    return made


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def lost_words(name: str, ends: Mapping[str, Ended]) -> str:
    """One line on what a client lost, the costliest reason first."""
    total = sum(ended.tokens_lost for ended in ends.values())
    ordered = sorted(ends.items(), key=lambda one: (-one[1].tokens_lost, one[0]))
    parts = [
        f"{ended.tokens_lost:,} ({why}, {counted(ended.times, 'time')})" for why, ended in ordered
    ]
    # What a killed process trained after its last heartbeat is not known.
    bound = "at least " if _WITHOUT_GOODBYE & set(ends) else ""
    return (
        f"{name} lost {bound}{counted(total, 'token')} when its processes ended: {', '.join(parts)}"
    )


MAX_NEWS = 100


@mutable
class NodeState:
    """The process that writes the journal, and those before it in the same directory."""

    role: str = ""
    run: str = ""
    name: str = ""
    """A client's name in the run; empty for a server."""
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


def _newest_news(news: Iterable[News]) -> deque[News]:
    return deque(news, MAX_NEWS)


@mutable
class NodeAndClients:
    """The node of a journal, the clients that it shows, and news about both."""

    node: NodeState = field(factory=NodeState)
    clients: dict[str, ClientState] = field(factory=dict)
    """By name; of a client's own journal none."""
    news: deque[News] = field(factory=deque, converter=_newest_news)
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

    def repeats_may_be_news(self) -> None:
        """Take a change: a note that was reported before is reported again."""
        self._told.clear()

    def take_news(self) -> list[News]:
        """The news since the last call; `news` keeps the newest MAX_NEWS of all."""
        taken, self._fresh = self._fresh, []
        self.news.extend(taken)
        return taken

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
