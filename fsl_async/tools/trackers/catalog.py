"""The figures of a run that other programs show: for Prometheus, and as series of points. Pure.

Names and units are Prometheus's conventions: base units (bytes, seconds), `_total` for what only
grows while the server goes on from its journal. A figure that is not known has no sample. Clients
that are gone keep their counters and lose the figures of the moment: a loss, a speed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

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


def _one(read: Callable[[RunState], float | None]) -> Read:
    return lambda reading: [((), read(reading.state))]


def _each(read: Callable[[ClientState], float | None], *, here: bool = False) -> Read:
    """Of each client; here: only of those that are connected."""
    return lambda reading: [
        ((client.name,), read(client))
        for client in clients_of(reading.state)
        if client.connected or not here
    ]


def _both_ways(up: Callable[[RunState], float], down: Callable[[RunState], float]) -> Read:
    return lambda reading: [(("up",), up(reading.state)), (("down",), down(reading.state))]


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


def _held_out(read: Callable[[Evaluation], float | None]) -> Read:
    return lambda reading: [
        ((one.data, one.of), read(one)) for one in reading.evaluations[:MAX_DATA]
    ]


def _speed(state: RunState) -> float | None:
    speeds = [one.tokens_per_s for one in state.clients.values() if one.connected]
    return math.fsum(speeds) if speeds else None


def _sum(read: Callable[[ClientState], float]) -> Callable[[RunState], float]:
    return lambda state: sum(map(read, state.clients.values()))


def _loss(client: ClientState) -> float | None:
    """Not that of the process before, while the client catches up."""
    return None if client.returning else client.loss


def _ms(value: float | None) -> float | None:
    return None if value is None else value / 1000


def _is_known(version: int) -> float | None:
    return version if version >= 0 else None


def _in_groups(read: Callable[[RunState], float | None]) -> Read:
    return _one(lambda state: read(state) if state.groups.is_on else None)


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
    Figure(
        "fsl_node_starts_total", "Processes that wrote this journal.",
        _one(lambda s: s.node.starts), roles=_ALL,
    ),
    Figure(
        "fsl_node_last_line_timestamp_seconds", "Time of the journal's newest line.",
        _one(lambda s: s.node.last_t or None), roles=_ALL,
    ),
    Figure(
        "fsl_node_unreadable_messages_total",
        "Connections and messages refused by their key, or not of this program.",
        _one(lambda s: s.node.garbage), series="node/unreadable_messages", roles=_SERVERS,
    ),
    Figure(
        "fsl_alarms_total",
        "Damage, deltas that are lost or diverged, versions that are gone, digests that differ.",
        _one(lambda s: s.ps.alarms), series="alarms",
    ),
    # --- rounds and versions ---
    Figure("fsl_version", "The newest version.", _one(lambda s: _is_known(s.ps.version))),
    Figure(
        "fsl_loss", "Mean loss of the clients in the newest version, where sites report it.",
        _one(lambda s: s.ps.loss), series="loss/mean",
    ),
    Figure(
        "fsl_held_out_loss", "Held-out loss; data is empty where a client evaluated its own.",
        _held_out(lambda one: one.loss), ("data", "of"),
    ),
    Figure(
        "fsl_held_out_version", "The version that the held-out loss is of.",
        _held_out(lambda one: one.version), ("data", "of"),
    ),
    Figure(
        "fsl_merged_tokens_total", "Tokens in the newest version.",
        _one(lambda s: s.ps.tokens), series="tokens/merged",
    ),
    Figure(
        "fsl_tokens_per_second", "Tokens trained, all connected clients.",
        _one(_speed), series="tokens/per_second",
    ),
    Figure(
        "fsl_merged_deltas_total", "Deltas in the newest version and those before.",
        _one(lambda s: s.ps.deltas_merged), series="deltas/merged",
    ),
    Figure(
        "fsl_pending_deltas", "Acknowledged and not merged yet.", _one(lambda s: s.ps.pending),
    ),
    Figure(
        "fsl_held_deltas", "Held back until an operator decides.",
        _one(lambda s: len(s.ps.held)), series="deltas/held",
    ),
    Figure(
        "fsl_called_clients_total", "Clients called, summed over merged rounds.",
        _one(lambda s: s.ps.called),
    ),
    Figure(
        "fsl_answered_clients_total", "Of these, those whose delta came in time.",
        _one(lambda s: s.ps.answered),
    ),
    Figure(
        "fsl_participation_ratio", "Answered over called, 0 to 1, whole run.",
        _one(lambda s: s.ps.participation), series="participation/called",
    ),
    Figure(
        "fsl_participation_alive_ratio", "Answered over those still here at the merge.",
        _one(lambda s: s.ps.participation_alive), series="participation/alive",
    ),
    Figure(
        "fsl_delta_cosine", "Mean cosine between the deltas of the newest round that has one.",
        _one(lambda s: s.ps.cosines[-1] if s.ps.cosines else None), series="cosine",
    ),
    Figure(
        "fsl_delta_staleness_versions", "Mean staleness of the deltas in the newest version.",
        _one(lambda s: s.ps.staleness_mean), series="staleness/mean",
    ),
    Figure(
        "fsl_delta_staleness_max_versions", "The largest staleness of these.",
        _one(lambda s: s.ps.staleness_max), series="staleness/max",
    ),
    Figure(
        "fsl_sync_interval_seconds", "Planned time between syncs.",
        _one(lambda s: s.ps.every_s or None),
    ),
    Figure(
        "fsl_next_sync_timestamp_seconds", "When clients are called next, seconds since 1970.",
        _one(lambda s: s.ps.next_sync_at),
    ),
    Figure("fsl_model_values", "Values that are exchanged.", _one(lambda s: s.ps.values or None)),
    Figure(
        "fsl_global_round", "Of the global weights held, in a run of groups.",
        _in_groups(lambda s: _is_known(s.groups.round)), series="groups/global_round",
    ),
    Figure(
        "fsl_global_attempts_failed_total", "Attempts at a global round that failed here.",
        _in_groups(lambda s: s.groups.failed), series="groups/attempts_failed",
    ),
    Figure(
        "fsl_split_round", "The newest round of split learning.",
        _one(lambda s: _is_known(s.split_server.round)), roles=(SPLIT_SERVER,),
    ),
    Figure(
        "fsl_split_loss", "Loss of the newest upload.",
        _one(lambda s: s.split_server.loss), series="loss/newest", roles=(SPLIT_SERVER,),
    ),
    Figure(
        "fsl_site_version", "The version that this client trains from.",
        _one(lambda s: _is_known(s.site.version)), roles=(CLIENT,),
    ),
    # --- bytes; directions are seen from the clients ---
    Figure(
        "fsl_transfer_raw_bytes_total", "Deltas up and versions down, as they are in fp32.",
        _both_ways(lambda s: s.ps.up.raw, lambda s: s.ps.down.raw), ("direction",),
        "bytes/{direction}_raw",
    ),
    Figure(
        "fsl_transfer_sent_bytes_total", "The same as they were sent.",
        _both_ways(lambda s: s.ps.up.sent, lambda s: s.ps.down.sent), ("direction",),
        "bytes/{direction}_sent",
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
    Figure(
        "fsl_clients_unlisted", f"Clients beyond {MAX_CLIENTS}, which have no labels.",
        _one(lambda s: max(0, len(s.clients) - MAX_CLIENTS)), roles=_SERVERS,
    ),
    Figure(
        "fsl_relaunches_total", "Clients that came back as a new process.",
        _one(lambda s: s.relaunches), series="clients/relaunches", roles=_SERVERS,
    ),
    Figure(
        "fsl_quarantined_deltas_total", "Deltas kept out for good, all clients.",
        _one(_sum(lambda c: c.deltas_quarantined)), series="deltas/quarantined",
    ),
    Figure(
        "fsl_clipped_deltas_total", "Deltas merged as if they were shorter, all clients.",
        _one(_sum(lambda c: c.deltas_clipped)), series="deltas/clipped",
    ),
    Figure(
        "fsl_client_connected", "1 while it has a session.",
        _each(lambda c: c.connected), ("client",), roles=_SERVERS,
    ),
    Figure(
        "fsl_client_hung", "1 while its training makes no step.",
        _each(lambda c: c.hangs, here=True), ("client",), roles=_SERVERS,
    ),
    Figure(
        "fsl_client_trouble", "1 while it reports that training goes wrong.",
        _each(lambda c: bool(c.trouble), here=True), ("client",), roles=_SERVERS,
    ),
    Figure(
        "fsl_client_last_seen_timestamp_seconds", "Its newest message, seconds since 1970.",
        _each(lambda c: c.last_seen or None), ("client",), roles=_SERVERS,
    ),
    Figure(
        "fsl_client_loss", "Its newest loss, where its site reports it.",
        _each(_loss, here=True), ("client",), "client_loss/{client}", _SERVERS,
    ),
    Figure(
        "fsl_client_version", "The version that it trains from.",
        _each(lambda c: _is_known(c.version), here=True), ("client",),
    ),
    Figure(
        "fsl_client_steps", "Steps of its present process.",
        _each(lambda c: c.step, here=True), ("client",), roles=_SERVERS,
    ),
    Figure(
        "fsl_client_tokens_total", "Tokens that it trained, all its processes.",
        _each(lambda c: c.tokens), ("client",), "client_tokens/{client}",
    ),
    Figure(
        "fsl_client_tokens_per_second", "Its speed, by its newest heartbeat.",
        _each(lambda c: c.tokens_per_s, here=True), ("client",),
        "client_tokens_per_second/{client}",
    ),
    Figure(
        "fsl_client_merged_deltas_total", "Its deltas in versions.",
        _each(lambda c: c.deltas_merged), ("client",),
    ),
    Figure(
        "fsl_client_refused_deltas_total", "Its deltas that were declined.",
        _each(lambda c: c.deltas_refused), ("client",),
    ),
    Figure(
        "fsl_client_quarantined_deltas_total", "Its deltas kept out for good.",
        _each(lambda c: c.deltas_quarantined), ("client",),
    ),
    Figure(
        "fsl_client_clipped_deltas_total", "Its deltas merged as if they were shorter.",
        _each(lambda c: c.deltas_clipped), ("client",),
    ),
    Figure(
        "fsl_client_uploads_total", "Its uploads that the split server trained.",
        _each(lambda c: c.uploads), ("client",), "client_uploads/{client}", (SPLIT_SERVER,),
    ),
    Figure(
        "fsl_client_left_out_steps_total", "Steps of split learning that came to nothing.",
        _each(lambda c: c.left_out), ("client",), roles=(SPLIT_SERVER,),
    ),
    Figure(
        "fsl_client_relaunches_total", "Times it came back as a new process.",
        _each(lambda c: c.relaunches), ("client",), roles=_SERVERS,
    ),
    Figure(
        "fsl_client_raw_bytes_total", "Its deltas, as they are in fp32.",
        _each(lambda c: c.up.raw), ("client",),
    ),
    Figure(
        "fsl_client_sent_bytes_total", "The same as they were sent.",
        _each(lambda c: c.up.sent), ("client",), "client_bytes_sent/{client}",
    ),
    Figure(
        "fsl_client_loop_lag_seconds", "99th percentile of its event loop's lateness.",
        _each(lambda c: _ms(c.lag_p99_ms), here=True), ("client",), roles=_SERVERS,
    ),
    # --- tuning ---
    Figure(
        "fsl_client_adapter_rank", "Rank of its adapters.",
        _each(lambda c: c.facts.get("rank")), ("client",), "client_rank/{client}",
    ),
    Figure(
        "fsl_client_product_norm", "How far it moved products of adapters in the newest version.",
        _each(lambda c: c.product_norm, here=True), ("client",), "client_product_norm/{client}",
    ),
    Figure(
        "fsl_client_privacy_epsilon", "Privacy budget that it has spent.",
        _each(lambda c: c.epsilon), ("client",), "client_epsilon/{client}",
    ),
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
