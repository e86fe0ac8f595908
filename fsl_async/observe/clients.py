"""The clients of a run as a server's journal shows them: what each does, trains and sends. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import asdict, field, frozen, mutable

from fsl_async.roles.phrasing import counted
from fsl_async.roles.sync.training_trouble import trouble_in

if TYPE_CHECKING:
    from fsl_async.observe.run_state import RunState

Line = Mapping[str, Any]
Handler = Callable[["RunState", Line], None]

MAX_LOSSES = 120

_VALUE_BYTES = 4

REASONS = {
    "expired": "nothing was heard from it",
    "bye": "it said goodbye",
    "superseded": "a new process took its name",
    "reset": "the connection was reset",
    "protocol": "it broke the protocol",
    "revoked": "its key is no longer on the allow-list",
}
"""Why a session ended, for people."""


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

    def add(self, values: int, sent: int) -> None:
        """Count one transfer of `values` values."""
        self.raw += _VALUE_BYTES * values
        self.sent += sent


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
    loss_first: float | None = None
    losses: deque[float] = field(factory=deque, converter=_newest)
    lag_p99_ms: float | None = None
    deltas_merged: int = 0
    deltas_refused: int = 0
    deltas_quarantined: int = 0
    uploads: int = 0  # that the split server trained
    up: Volume = field(factory=Volume)

    def saw_loss(self, loss: Any) -> None:
        """Keep a loss that it reported; one that is not finite is text in the journal."""
        if not isinstance(loss, int | float) or isinstance(loss, bool):
            return
        # In its first process only: a relaunched client starts from what others have trained.
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

    def lose(self, t: float, why: str) -> None:
        """Its session is over."""
        self.connected, self.doing = False, "gone"
        self.gone_at, self.gone_why = t, why
        self.tokens_per_s = 0.0

    def _begin(self, incarnation: int) -> None:
        """A new process of this name."""
        self.incarnation = incarnation
        self.incarnations += 1
        self.tokens_before, self.step = self.tokens, 0
        self.left_out_before = self.left_out
        self.tells_loss = False
        self.trouble = ""
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
    made |= {"state": client.words(now), "loss": client.loss, "relaunches": client.relaunches}
    return made


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# --- what the journal's lines change ---


def _connected(run: RunState) -> str:
    """How many clients have a session now, for lines about those that come and go."""
    run.repeats_may_be_news()
    here = sum(client.connected for client in run.clients.values())
    return f"{counted(here, 'client')} connected"


def _hello(run: RunState, line: Line) -> None:
    client = run.client_of(line)
    how = client.arrive(int(line["incarnation"]), in_run=bool(line.get("run")))
    words = {
        "joined": "joins",
        "relaunched": f"is back as a new process (relaunch {client.relaunches})",
        "reconnected": "is connected again",
    }
    if how:
        run.tell(how, f"{client.name} {words[how]}, {_connected(run)}", client.name)


def _admitted(run: RunState, line: Line) -> None:
    """At a split server: there is nothing that it would have to fetch first."""
    _hello(run, line)
    client = run.client_of(line)
    client.returning, client.doing = False, "training"


def _left(run: RunState, line: Line) -> None:
    client = run.client_of(line)
    if int(line["incarnation"]) != client.incarnation or not client.connected:
        return
    reason = str(line.get("reason", ""))
    if run.node.phase == "ended":
        client.connected, client.doing = False, "done"
        return
    client.lose(run.node.last_t, REASONS.get(reason, reason))
    level = "info" if reason == "bye" else "warning"
    text = f"{client.name} left: {client.gone_why}, {_connected(run)}"
    run.tell("gone", text, client.name, level)


def _refuse(run: RunState, line: Line) -> None:
    text = f"refused {line['peer']}: {line.get('text', '')}"
    run.tell("refused", text, str(line["peer"]), "warning")


def _fetch_asked(run: RunState, line: Line) -> None:
    run.client_of(line).doing = "fetching"


def _held(run: RunState, line: Line) -> None:
    client = run.client_of(line)
    client.version = int(line["version"])
    client.doing = "training"
    if client.version == run.ps.version and client.returning:
        client.returning = False
        text = f"{client.name} has caught up: it holds version {client.version}"
        run.tell("caught up", text, client.name)


def _stream_lost(run: RunState, line: Line) -> None:
    client = run.client_of(line)
    if client.doing in {"sending", "publishing"}:
        client.doing = "training" if client.version >= 0 else "joining"


def _beat(run: RunState, line: Line) -> None:
    client = run.client_of(line)
    payload = line["payload"]
    client.step = int(payload.get("step", client.step))
    client.tokens = client.tokens_before + int(payload.get("tokens", 0))
    client.tokens_per_s = float(payload.get("tokens_per_s", 0.0))
    client.left_out = client.left_out_before + int(payload.get("left_out", 0))
    lag = payload.get("lag_p99_ms")
    client.lag_p99_ms = float(lag) if isinstance(lag, int | float) else client.lag_p99_ms
    client.tells_loss = client.tells_loss or payload.get("loss") is not None
    client.saw_loss(payload.get("loss"))
    # Without a loss (its site keeps that) the heartbeat alone can tell that it is over.
    _look_for_trouble(run, client, payload, may_end="loss" not in payload)
    hung_s = payload.get("hung_s")
    hangs = isinstance(hung_s, int | float) and not isinstance(hung_s, bool)
    if hangs and not client.hangs:
        text = f"{client.name} hangs: its training has made no step for {hung_s:.0f} s"
        run.tell("hangs", text, client.name, "warning")
    elif client.hangs and not hangs:
        run.tell("hangs no more", f"{client.name} makes steps again", client.name)
    client.hangs = hangs


def _look_for_trouble(
    run: RunState, client: ClientState, metrics: Mapping[str, Any], *, may_end: bool
) -> None:
    """Tell when training begins to go wrong, and when that is over: a whole round went well."""
    trouble = trouble_in(metrics)
    if trouble and not client.trouble:
        text = f"{client.name} trains badly: {trouble}"
        run.tell("trains badly", text, client.name, "warning")
    elif client.trouble and may_end and not trouble:
        run.tell("trains well", f"{client.name} trains well again", client.name)
    if trouble or may_end:
        client.trouble = trouble


def _offered(run: RunState, line: Line) -> None:
    """A short process ends between two heartbeats: its deltas tell what it did.

    Steps without a delta are in heartbeats only.
    """
    client = run.client_of(line)
    client.doing = "sending"
    delta = line["delta"]
    key = str(delta["key"])
    sequence = int(key.rpartition("/")[2])
    if sequence <= client.sequence_offered:  # offered again after a loss
        return
    client.sequence_offered = sequence
    client.step_offered += int(delta["steps"])
    client.tokens_offered += int(delta["tokens"])
    client.step = max(client.step, client.step_offered)
    client.tokens = max(client.tokens, client.tokens_before + client.tokens_offered)
    metrics = delta.get("metrics") or {}
    _look_for_trouble(run, client, metrics, may_end="loss" in metrics)
    loss = metrics.get("loss")
    if isinstance(loss, int | float):
        run.ps.offered(key, float(loss))
    if not client.tells_loss:  # its heartbeats tell running means; this is the mean of a round
        client.saw_loss(loss)


HANDLERS: dict[str, Handler] = {
    "client_hello": _hello,
    "admit_split": _admitted,
    "client_left": _left,
    "refuse": _refuse,
    "fetch_asked": _fetch_asked,
    "version_held": _held,
    "stream_lost": _stream_lost,
    "heartbeat_received": _beat,
    "delta_offered": _offered,
}
