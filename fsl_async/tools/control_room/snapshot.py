"""What the page shows of a node now, as plain values for JSON.

Times are seconds since 1970; the page counts from them, with `now` as the server's clock. Text is
plain text: the page sets it as text, never as HTML.

`WatchedNode` reads the journals of a run as they grow. A journal's newest segment begins with the
sum of those before it, the course over time included, so all is there after at most a segment (8
MiB, some seconds). It is read in turns, between which pages are served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import asdict

from fsl_async.errors import RunDirError, printable
from fsl_async.observe.clients import ClientState
from fsl_async.observe.evaluations import Evaluation, kept, line_of, newest
from fsl_async.observe.history import Course, History, Timeline
from fsl_async.observe.journal import JOURNAL, JournalReader
from fsl_async.observe.ledger_audit import LEDGER, Audit, SplitAudit, audit_run, audit_split_dir
from fsl_async.observe.node_folders import alive_words, find_nodes
from fsl_async.observe.run_state import CLIENT, PS, SPLIT_SERVER, RunState
from fsl_async.observe.table import header
from fsl_async.roles.phrasing import megabytes
from fsl_async.tools.trackers.catalog import OF_SITES

MAX_SITES = 400
"""Rows of the table: names come from the network."""
_NEWS = 30
_HELD = 50
_COMPLAINTS = 20
_MOST_TEXT = 300

ROLES = {PS: "parameter server", SPLIT_SERVER: "split server", "client": "client", "relay": "relay"}


def state_of(timeline: Timeline | None, client: ClientState) -> str:
    """One word: the newest of its timeline, which knows of late clients."""
    return (timeline.state if timeline is not None else "") or client.doing


def site(client: ClientState, timeline: Timeline | None) -> dict[str, Any]:
    """A row of the table of sites."""
    marks = list(timeline.marks) if timeline is not None else []
    launch = next((one for one in reversed(marks) if one[1] in _LAUNCHES), None)
    return {
        "name": client.name,
        "state": state_of(timeline, client),
        "catching_up": client.returning and client.doing in {"joining", "fetching"},
        "why": client.gone_why if client.doing == "gone" else "",
        "gone_at": client.gone_at if client.doing == "gone" else None,
        "trouble": _text(client.trouble),
        "loss": number(client.loss),
        "launch": [launch[1], launch[0], _text(timeline.launch)] if launch and timeline else None,
        "order": number(client.facts.get("order")),
        "labels": {_text(key): number(one) for key, one in client.label_shares.items()},
        "lag_ms": number(client.lag_p99_ms),
        **{name: number(get(client)) for name, get in OF_SITES.items()},
    }


_LAUNCHES = {"waiting", "launched", "left alone", "failed", "gave up"}


def node(number_of: int, watched: WatchedNode, now: float) -> dict[str, Any]:
    """All that is not a course over time."""
    state, history = watched.state, watched.history
    title = state.node.run or state.node.name or watched.folder.name
    goes_on_from = f"version {state.ps.version}" if state.ps.version >= 0 else "the beginning"
    role = state.node.role
    found = history.bytes.columns
    held_out = newest(state.ps.version, state.ps.evaluations, watched.evaluations)
    names = sorted(state.clients, key=lambda name: (not state.clients[name].connected, name))
    shown = sorted(names[:MAX_SITES])
    return {
        "id": number_of,
        "title": _text(title),
        "role": role,
        "role_words": ROLES.get(role, role or "starting"),
        "run": state.node.run,
        "header": _text(header(state)) if role in {PS, SPLIT_SERVER, "client"} else "",
        "alive": _text(alive_words(state.node, now, goes_on_from)),
        "ended": state.node.ended_at is not None,
        "phase": state.node.phase,
        "version": state.ps.version if role == PS else state.split_server.round,
        "tokens": state.ps.tokens,
        "counts": "samples" if role == SPLIT_SERVER else state.ps.counts,
        "encrypted": state.node.encrypted,
        "starts": state.node.starts,
        "job": _text(history.job),
        "requeues": history.requeues,
        "begins_at": state.node.started_at or history.begins_at or state.node.last_t,
        "last_t": state.node.last_t,
        "next_sync_at": state.ps.next_sync_at if state.node.ended_at is None else None,
        "window": state.ps.window() if role == PS else None,
        "sites": [site(state.clients[name], history.timelines.get(name)) for name in shown],
        "hidden": len(names) - len(shown),
        "groups": state.groups.words(),
        "relays": [
            {"server": _text(server), "open": one[0], "accepted": one[1], "up": one[2]}
            | {"down": one[3]}
            for server, one in history.relays.items()
        ],
        "bytes": {name: column[-1] if column else 0 for name, column in found.items()},
        "raw": state.ps.bytes_raw,
        "coded": state.ps.bytes_sent,
        "pending": state.ps.pending,
        "held": [[_text(key), _text(why)] for key, why in list(state.ps.held.items())[:_HELD]],
        "held_more": max(0, len(state.ps.held) - _HELD),
        "cosine": number(state.ps.cosines[-1]) if state.ps.cosines else None,
        "alarms": state.ps.alarms,
        "alarm": _text(state.ps.alarm),
        "garbage": state.node.garbage,
        "held_out_words": _text(line_of(held_out)) if held_out else "",
        "news": [
            {"t": one.t, "text": _text(one.text), "level": one.level}
            for one in list(state.news)[-_NEWS:]
        ],
        "loading": watched.is_loading,
        "audit": audit_words(watched.audit),
    }


def audit_words(audit: Mapping[str, Any]) -> dict[str, Any] | None:
    """The audit's verdict for people; None before the first one."""
    if not audit:
        return None
    if "skipped" in audit:
        words = f"not here, the ledger has {megabytes(audit['skipped'])}: fsl-node status RUN"
        return {"clean": None, "counts": {}, "complaints": [], "words": words}
    complaints = [_text(one) for one in audit.get("complaints") or audit.get("problems") or ()]
    if "merged" in audit:
        counts = {
            name: len(audit[name]) if isinstance(audit[name], tuple | list) else audit[name]
            for name in ("merged", "pending", "quarantined", "lost", "doubled")
        }
    else:
        counts = {name: audit[name] for name in ("trained", "declined", "dropped") if name in audit}
    is_clean = not complaints and bool(audit.get("clean"))
    named = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    return {
        "clean": is_clean,
        "counts": counts,
        "complaints": complaints[:_COMPLAINTS],
        "words": f"{'clean' if is_clean else 'NOT CLEAN'}: {named}",
    }


def held_out_rows(watched: WatchedNode) -> list[dict[str, Any]]:
    """Held-out losses by version, for the chart."""
    found = newest(1 << 62, watched.state.ps.evaluations, watched.evaluations)
    return [
        asdict(one)
        | {"data": _text(one.data), "loss": number(one.loss)}
        | {"bits_per_byte": number(one.bits_per_byte), "accuracy": number(one.accuracy)}
        for one in found
    ]


def number(value: float | None) -> float | None:
    """A number that JSON has; one with a fraction with 6 digits."""
    if isinstance(value, int):
        return value
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def _text(text: str) -> str:
    found = printable(text)
    return found if len(found) <= _MOST_TEXT else f"{found[:_MOST_TEXT]}..."


AUDIT_EVERY_S = 10.0
AUDIT_MOST_BYTES = 100_000_000
"""Of a ledger and of acknowledged keys: an audit takes nearly as much memory."""
_LINES_A_TURN = 2000
"""Lines that are applied before other work gets its turn: some 50 ms."""


class WatchedNode:
    """One journal with its state and history."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.course = Course()
        self.revision = 0
        """Counts changes of anything that is shown."""
        self.is_loading = True
        """Whether the newest segment has not been read to its end yet."""
        self.audit: dict[str, Any] = {}
        self.evaluations: list[Evaluation] = []
        self._reader = JournalReader(folder / JOURNAL)
        self._lines: Iterator[dict[str, Any]] | None = None

    @property
    def state(self) -> RunState:
        """The node as it is now."""
        return self.course.state

    @property
    def history(self) -> History:
        """Its course over time."""
        return self.course.history

    @property
    def role(self) -> str:
        """Of the process that writes the journal."""
        return self.state.node.role

    def read(self, at_most: int = _LINES_A_TURN) -> bool:
        """Take new lines; returns whether there may be more."""
        if self._lines is None:
            self._lines = self._reader.read()
        taken = 0
        try:
            for line in self._lines:
                self.course.apply(line)
                taken += 1
                if taken >= at_most:
                    break
            else:
                self._lines = None
        except OSError:  # its folder is being moved or removed: what is known stays
            self._lines = None
        self.revision += taken > 0
        self.is_loading = self.is_loading and self._lines is not None
        return self._lines is not None

    def read_all(self) -> None:
        """Take all lines that are there."""
        while self.read():
            pass

    # --- files beside the journal; slow, for another thread ---

    def look(self) -> tuple[dict[str, Any], list[Evaluation]]:
        """Audit, and evaluations that `fsl-node evaluate` left."""
        audit = _AUDITS.get(self.role)
        if audit is None or (self.role == PS and not (self.folder / LEDGER).is_file()):
            return {}, kept(self.folder)
        size = sum(_size(self.folder / name) for name in (LEDGER, "journal.acknowledged"))
        if size > AUDIT_MOST_BYTES:
            return {"skipped": size}, kept(self.folder)
        try:
            found = audit(self.folder)
            complaints = found.complaints()
        except (OSError, KeyError, TypeError, ValueError) as error:
            return {"problems": [f"the ledger cannot be read: {error}"]}, kept(self.folder)
        words = {"complaints": complaints, "clean": not complaints}
        return asdict(found) | words, kept(self.folder)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


_AUDITS: dict[str, Callable[[Path], Audit | SplitAudit]] = {
    PS: audit_run,
    SPLIT_SERVER: audit_split_dir,
}


def watch(run_dir: Path) -> list[WatchedNode]:
    """The nodes of a run, the first lines of their newest segments read. Raises RunDirError."""
    nodes = [WatchedNode(folder) for folder in find_nodes(run_dir)]
    for node in nodes:
        node.read()
    if len(nodes) > 1:  # clients' own journals beside that of their server
        nodes = [node for node in nodes if node.role != CLIENT] or nodes
    if not any(node.history.lines for node in nodes):
        raise RunDirError(f"{nodes[0].folder / JOURNAL} has no line yet; is the server starting?")
    return nodes
