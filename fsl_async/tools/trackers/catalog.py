"""The figures of a run that other programs show: for Prometheus, and as series of points. Pure.

Names and units are Prometheus's conventions: base units (bytes, seconds), `_total` for what only
grows while the server goes on from its journal. A figure that is not known has no sample. Clients
that are gone keep their counters and lose the figures of the moment: a loss, a speed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from attrs import field, frozen

from fsl_async.observe.clients import ClientState
from fsl_async.observe.evaluations import Evaluation
from fsl_async.observe.run_state import CLIENT, PS, SPLIT_SERVER, RunState

MAX_CLIENTS = 256
"""Names that become labels; those beyond are counted in `fsl_clients_unlisted`."""
MAX_DATA = 16
"""Data sets of held-out losses, likewise."""
PHASES = ("starting", "waiting", "ready", "collecting", "merging", "serving", "ended")
DOING = ("joining", "publishing", "fetching", "training", "sending", "gone", "done")

GAUGE, COUNTER = "gauge", "counter"


@frozen
class Reading:
    """A run at a moment. up: whether its process is there. evaluations: the newest of each data."""

    state: RunState
    up: bool = True
    evaluations: Sequence[Evaluation] = ()

    @property
    def role(self) -> str:
        """The node's; that of a parameter server where the journal lacks it."""
        role = self.state.node.role
        return role if role in {SPLIT_SERVER, CLIENT} else PS


Sample = tuple[tuple[str, ...], float]
Read = Callable[[Reading], Iterable[tuple[tuple[str, ...], float | None]]]

_SERVERS = (PS, SPLIT_SERVER)
_ALL = (*_SERVERS, CLIENT)


@frozen
class Figure:
    """One figure. name: Prometheus's, `_total` included. series: the trackers', with labels in
    braces; empty: not for them.
    """

    name: str
    help: str
    read: Read
    labels: tuple[str, ...] = ()
    series: str = ""
    roles: tuple[str, ...] = field(default=(PS,))

    @property
    def kind(self) -> str:
        """Counter or gauge."""
        return COUNTER if self.name.endswith("_total") else GAUGE

    def samples(self, reading: Reading) -> list[Sample]:
        """Label values and value, of what is known and finite."""
        if reading.role not in self.roles:
            return []
        found = self.read(reading)
        return [
            (labels, float(value))
            for labels, value in found
            if value is not None and math.isfinite(value)
        ]


def clients_of(state: RunState) -> list[ClientState]:
    """The clients that are listed: those that are here, then by arrival; MAX_CLIENTS at most."""
    known = sorted(state.clients.values(), key=lambda one: not one.connected)  # stable
    return known[:MAX_CLIENTS]


# --- how figures are read ---


_Value = str | Callable[[Any], float | None]
"""Of a state or a client: the path of the field that has it, or a function."""


def _reader(value: _Value) -> Callable[[Any], float | None]:
    return attrgetter(value) if isinstance(value, str) else value


def _one(
    name: str, help_: str, value: _Value, series: str = "", roles: tuple[str, ...] = (PS,)
) -> Figure:
    """A figure of a run's state, without labels."""
    read = _reader(value)
    return Figure(name, help_, lambda reading: [((), read(reading.state))], (), series, roles)


def _each(
    name: str,
    help_: str,
    value: _Value,
    series: str = "",
    roles: tuple[str, ...] = (PS,),
    *,
    here: bool = False,
) -> Figure:
    """A figure of each client; here: only of those that are connected."""
    read_one = _reader(value)

    def read(reading: Reading) -> Iterator[tuple[tuple[str, ...], float | None]]:
        for client in clients_of(reading.state):
            if client.connected or not here:
                yield (client.name,), read_one(client)

    named = f"client_{series}/{{client}}" if series else ""
    return Figure(f"fsl_client_{name}", help_, read, ("client",), named, roles)


def _both_ways(up: str, down: str) -> Read:
    ways = (("up", attrgetter(up)), ("down", attrgetter(down)))
    return lambda reading: [((name,), read(reading.state)) for name, read in ways]


def _info(reading: Reading) -> Iterator[Sample]:
    node = reading.state.node
    yield (node.run, node.host, node.address), 1.0


def _phase(reading: Reading) -> Iterator[Sample]:
    yield from (((name,), float(reading.state.node.phase == name)) for name in PHASES)


def _doing(reading: Reading) -> Iterator[Sample]:
    found = Counter(client.doing for client in reading.state.clients.values())
    yield from (((name,), float(found[name])) for name in DOING)


def _by_category(kind: str) -> Read:
    def read(reading: Reading) -> Iterator[Sample]:
        for name, count in reading.state.account.as_dict()[kind].items():
            category, _, direction = name.rpartition(" ")
            yield (category, direction), float(count)

    return read


def _sockets(reading: Reading) -> Iterator[Sample]:
    found = reading.state.account.as_dict()["sockets"]
    yield from (((direction,), float(found.get(direction, 0))) for direction in ("up", "down"))


def _held_out(field_: str) -> Read:
    return lambda reading: [
        ((one.data, one.of), getattr(one, field_)) for one in reading.evaluations[:MAX_DATA]
    ]


def _speed(state: RunState) -> float | None:
    speeds = [one.tokens_per_s for one in state.clients.values() if one.connected]
    return math.fsum(speeds) if speeds else None


def _sum(name: str) -> Callable[[RunState], float]:
    return lambda state: sum(getattr(one, name) for one in state.clients.values())


def _loss(client: ClientState) -> float | None:
    """Not that of the process before, while the client catches up."""
    return None if client.returning else client.loss


def _lag_s(client: ClientState) -> float | None:
    return None if client.lag_p99_ms is None else client.lag_p99_ms / 1000


def _version(path: str) -> Callable[[Any], float | None]:
    """A version or a round: -1 is none."""
    read = attrgetter(path)
    return lambda found: version if (version := read(found)) >= 0 else None


def _unless_0(path: str) -> Callable[[Any], float | None]:
    read = attrgetter(path)
    return lambda found: read(found) or None


def _in_groups(read: Callable[[RunState], float | None]) -> Callable[[RunState], float | None]:
    return lambda state: read(state) if state.groups.is_on else None


CATALOG: tuple[Figure, ...] = (
    # --- the node ---
    Figure(
        "fsl_node_info", "1; the run, and where its node is.", _info,
        ("run", "host", "address"), roles=_ALL,
    ),
    Figure(
        "fsl_node_up", "1 while the process is there, 0 once it has ended or was killed.",
        lambda reading: [((), float(reading.up))], roles=_ALL,
    ),
    Figure("fsl_node_phase", "1 for what it does now.", _phase, ("phase",), roles=_SERVERS),
    _one("fsl_node_starts_total", "Processes that wrote this journal.", "node.starts", "", _ALL),
    _one(
        "fsl_node_last_line_timestamp_seconds", "Time of the journal's newest line.",
        _unless_0("node.last_t"), "", _ALL,
    ),
    _one(
        "fsl_node_unreadable_messages_total",
        "Connections and messages refused by their key, or not of this program.",
        "node.garbage", "node/unreadable_messages", _SERVERS,
    ),
    _one(
        "fsl_alarms_total",
        "Damage, deltas that are lost or diverged, versions that are gone, digests that differ.",
        "ps.alarms", "alarms",
    ),
    # --- rounds and versions ---
    _one("fsl_version", "The newest version.", _version("ps.version")),
    _one(
        "fsl_loss", "Mean loss of the clients in the newest version, where sites report it.",
        "ps.loss", "loss/mean",
    ),
    Figure(
        "fsl_held_out_loss", "Held-out loss; data is empty where a client evaluated its own.",
        _held_out("loss"), ("data", "of"),
    ),
    Figure(
        "fsl_held_out_version", "The version that the held-out loss is of.",
        _held_out("version"), ("data", "of"),
    ),
    _one("fsl_merged_tokens_total", "Tokens in the newest version.", "ps.tokens", "tokens/merged"),
    _one(
        "fsl_tokens_per_second", "Tokens trained, all connected clients.",
        _speed, "tokens/per_second",
    ),
    _one(
        "fsl_merged_deltas_total", "Deltas in the newest version and those before.",
        "ps.deltas_merged", "deltas/merged",
    ),
    _one("fsl_pending_deltas", "Acknowledged and not merged yet.", "ps.pending"),
    _one(
        "fsl_held_deltas", "Held back until an operator decides.",
        lambda state: len(state.ps.held), "deltas/held",
    ),
    _one("fsl_called_clients_total", "Clients called, summed over merged rounds.", "ps.called"),
    _one(
        "fsl_answered_clients_total", "Of these, those whose delta came in time.", "ps.answered",
    ),
    _one(
        "fsl_participation_ratio", "Answered over called, 0 to 1, whole run.",
        "ps.participation", "participation/called",
    ),
    _one(
        "fsl_participation_alive_ratio", "Answered over those still here at the merge.",
        "ps.participation_alive", "participation/alive",
    ),
    _one(
        "fsl_delta_cosine", "Mean cosine between the deltas of the newest round that has one.",
        lambda state: state.ps.cosines[-1] if state.ps.cosines else None, "cosine",
    ),
    _one(
        "fsl_delta_staleness_versions", "Mean staleness of the deltas in the newest version.",
        "ps.staleness_mean", "staleness/mean",
    ),
    _one(
        "fsl_delta_staleness_max_versions", "The largest staleness of these.",
        "ps.staleness_max", "staleness/max",
    ),
    _one("fsl_sync_interval_seconds", "Planned time between syncs.", _unless_0("ps.every_s")),
    _one(
        "fsl_next_sync_timestamp_seconds", "When clients are called next, seconds since 1970.",
        "ps.next_sync_at",
    ),
    _one("fsl_model_values", "Values that are exchanged.", _unless_0("ps.values")),
    _one(
        "fsl_global_round", "Of the global weights held, in a run of groups.",
        _in_groups(_version("groups.round")), "groups/global_round",
    ),
    _one(
        "fsl_global_attempts_failed_total", "Attempts at a global round that failed here.",
        _in_groups(attrgetter("groups.failed")), "groups/attempts_failed",
    ),
    _one(
        "fsl_split_round", "The newest round of split learning.",
        _version("split_server.round"), "", (SPLIT_SERVER,),
    ),
    _one(
        "fsl_split_loss", "Loss of the newest upload.",
        "split_server.loss", "loss/newest", (SPLIT_SERVER,),
    ),
    _one(
        "fsl_site_version", "The version that this client trains from.",
        _version("site.version"), "", (CLIENT,),
    ),
    # --- bytes; directions are seen from the clients ---
    Figure(
        "fsl_transfer_raw_bytes_total", "Deltas up and versions down, as they are in fp32.",
        _both_ways("ps.up.raw", "ps.down.raw"), ("direction",), "bytes/{direction}_raw",
    ),
    Figure(
        "fsl_transfer_sent_bytes_total", "The same as they were sent.",
        _both_ways("ps.up.sent", "ps.down.sent"), ("direction",), "bytes/{direction}_sent",
    ),
    Figure(
        "fsl_payload_bytes_total", "Values in their number format, by what they are.",
        _by_category("payload"), ("category", "direction"), roles=_ALL,
    ),
    Figure(
        "fsl_coded_bytes_total", "The same after coding.",
        _by_category("coded"), ("category", "direction"), roles=_ALL,
    ),
    Figure(
        "fsl_socket_bytes_total", "All bytes at the node's sockets.",
        _sockets, ("direction",), "bytes/{direction}_sockets", _ALL,
    ),
    # --- clients ---
    Figure("fsl_clients", "Clients by what they do.", _doing, ("state",), "clients/{state}",
           _SERVERS),
    _one(
        "fsl_clients_unlisted", f"Clients beyond {MAX_CLIENTS}, which have no labels.",
        lambda state: max(0, len(state.clients) - MAX_CLIENTS), "", _SERVERS,
    ),
    _one(
        "fsl_relaunches_total", "Clients that came back as a new process.",
        "relaunches", "clients/relaunches", _SERVERS,
    ),
    _one(
        "fsl_quarantined_deltas_total", "Deltas kept out for good, all clients.",
        _sum("deltas_quarantined"), "deltas/quarantined",
    ),
    _one(
        "fsl_clipped_deltas_total", "Deltas merged as if they were shorter, all clients.",
        _sum("deltas_clipped"), "deltas/clipped",
    ),
    _each("connected", "1 while it has a session.", "connected", "", _SERVERS),
    _each("hung", "1 while its training makes no step.", "hangs", "", _SERVERS, here=True),
    _each(
        "trouble", "1 while it reports that training goes wrong.",
        lambda client: bool(client.trouble), "", _SERVERS, here=True,
    ),
    _each(
        "last_seen_timestamp_seconds", "Its newest message, seconds since 1970.",
        _unless_0("last_seen"), "", _SERVERS,
    ),
    _each(
        "loss", "Its newest loss, where its site reports it.", _loss, "loss", _SERVERS, here=True,
    ),
    _each("version", "The version that it trains from.", _version("version"), here=True),
    _each("steps", "Steps of its present process.", "step", "", _SERVERS, here=True),
    _each("tokens_total", "Tokens that it trained, all its processes.", "tokens", "tokens"),
    _each(
        "tokens_per_second", "Its speed, by its newest heartbeat.",
        "tokens_per_s", "tokens_per_second", here=True,
    ),
    _each("merged_deltas_total", "Its deltas in versions.", "deltas_merged"),
    _each("refused_deltas_total", "Its deltas that were declined.", "deltas_refused"),
    _each("quarantined_deltas_total", "Its deltas kept out for good.", "deltas_quarantined"),
    _each("clipped_deltas_total", "Its deltas merged as if they were shorter.", "deltas_clipped"),
    _each(
        "uploads_total", "Its uploads that the split server trained.",
        "uploads", "uploads", (SPLIT_SERVER,),
    ),
    _each(
        "left_out_steps_total", "Steps of split learning that came to nothing.",
        "left_out", "", (SPLIT_SERVER,),
    ),
    _each("relaunches_total", "Times it came back as a new process.", "relaunches", "", _SERVERS),
    _each("raw_bytes_total", "Its deltas, as they are in fp32.", "up.raw"),
    _each("sent_bytes_total", "The same as they were sent.", "up.sent", "bytes_sent"),
    _each(
        "loop_lag_seconds", "99th percentile of its event loop's lateness.",
        _lag_s, "", _SERVERS, here=True,
    ),
    # --- tuning ---
    _each(
        "adapter_rank", "Rank of its adapters.", lambda client: client.facts.get("rank"), "rank",
    ),
    _each(
        "product_norm", "How far it moved products of adapters in the newest version.",
        "product_norm", "product_norm", here=True,
    ),
    _each("privacy_epsilon", "Privacy budget that it has spent.", "epsilon", "epsilon"),
)  # fmt: skip


def prefix_of(role: str) -> str:
    """How the series of a node begin: a process may hold both servers."""
    return "split/" if role == SPLIT_SERVER else ""


def series_of(reading: Reading) -> dict[str, float]:
    """The figures of the trackers, by series; those of a split server begin with split/."""
    prefix = prefix_of(reading.role)
    found = {}
    for figure in CATALOG:
        if figure.series:
            for labels, value in figure.samples(reading):
                named = dict(zip(figure.labels, labels, strict=True))
                found[prefix + figure.series.format_map(named)] = value
    return found


def table() -> list[str]:
    """The catalog as a table in Markdown, for docs/TRACKERS.md."""
    rows = ["| Prometheus | labels | trackers | what |", "|---|---|---|---|"]
    for one in CATALOG:
        labels = ", ".join(one.labels)
        series = f"`{one.series}`" if one.series else ""
        rows.append(f"| `{one.name}` | {labels} | {series} | {one.help} |")
    return rows
