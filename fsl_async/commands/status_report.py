"""Reports a node for `fsl-node status`, by its role: journal, ledger, checkpoints."""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import asdict

from fsl_async.accounting.sizes import account_lines
from fsl_async.errors import RunDirError
from fsl_async.observe.clients import News, NodeState, client_dict, lost_words
from fsl_async.observe.evaluations import Evaluation, kept, line_of, newest
from fsl_async.observe.journal import JOURNAL, JournalReader
from fsl_async.observe.ledger_audit import audit_run, audit_split_dir
from fsl_async.observe.node_folders import alive_words
from fsl_async.observe.rounds import idle_lines, site_lines
from fsl_async.observe.run_state import CLIENT, SPLIT_SERVER, RunState
from fsl_async.observe.table import client_lines, header, legend, news_line
from fsl_async.roles.phrasing import counted, megabytes

_NEWS = 8
_NAMED = 8


class NodeStatus:
    """A node's directory and the state of its journal. Raises RunDirError for an empty one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = RunState()
        self._reader = JournalReader(folder / JOURNAL)
        self.news = self.read()
        """News of the lines that were in the journal at the start."""
        if not self.state.node.starts and not self.state.node.last_t:
            raise RunDirError(f"{self._reader.path} has no line yet; is the server starting?")

    def read(self) -> list[News]:
        """Take the lines that are new; returns their news."""
        return [news for line in self._reader.read() for news in self.state.apply(line)]

    def checkpoints(self) -> list[int]:
        """Numbers of those that are kept: versions at a parameter server."""
        found = self.folder.glob("checkpoints/[vc]*/manifest.json")
        return sorted(
            int(path.parent.name[1:]) for path in found if path.parent.name[1:].isdecimal()
        )


def facts(status: NodeStatus, now: float) -> dict[str, Any]:
    """Return the plain values of --json."""
    made, _ = _REPORTS.get(status.state.node.role, _PARAMETER_SERVER)
    return made(status, now)


def lines(status: NodeStatus, now: float) -> list[str]:
    """Return the lines that `fsl-node status` prints."""
    _, made = _REPORTS.get(status.state.node.role, _PARAMETER_SERVER)
    return made(status, now)


def table(state: RunState, now: float) -> list[str]:
    """The table of clients, what its losses are, and the clients whose training goes wrong."""
    # Of the terminal; what other programs read may be as wide as it is.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    clients = [state.clients[name] for name in sorted(state.clients)]
    made = [*client_lines(state, now, width), legend(state)]
    made += [f"{one.name} trains badly: {one.trouble}" for one in clients if one.trouble][:_NEWS]
    made += idle_lines(clients, state.ps.alike)[:_NEWS]
    if state.node.keeps_deltas:
        ended = [(one.name, one.ends) for one in clients if one.ends]
        made += [lost_words(name, ends) for name, ends in ended[:_NAMED]]
        if len(ended) > _NAMED:
            made.append(f"and {counted(len(ended) - _NAMED, 'client')} more; --json has all")
    out = [f"{one.name} {one.left_out:,}" for one in clients if one.left_out]
    if out:
        named = ", ".join(out[:_NEWS]) + (", ..." if len(out) > _NEWS else "")
        made.append(
            f"steps left out, as no answer came or their one sample cannot be trained on: {named}"
        )
    return made


def _encrypted(of: str, node: NodeState) -> list[str]:
    if node.encrypted is None:
        return []
    if node.encrypted:
        return [f"{of} are encrypted, with an allow-list of keys"]
    return [f"{of} are not encrypted: any program that reaches the port may join"]


def _audit(folder: Path, audit: Callable[[Path], Any], whose: str) -> dict[str, Any]:
    try:
        return asdict(audit(folder))
    except (OSError, KeyError, TypeError, ValueError) as error:
        return {"problems": [f"{whose} cannot be read: {error}"]}


# --- a parameter server ---


def _ps_facts(status: NodeStatus, now: float) -> dict[str, Any]:
    node, ps = status.state.node, status.state.ps
    goes_on_from = f"version {ps.version}" if ps.version >= 0 else "the beginning"
    next_sync = None
    if ps.next_sync_at is not None and node.ended_at is None:
        next_sync = round(max(0.0, ps.next_sync_at - now), 1)
    beside = {
        "run_dir": str(status.folder),
        "server": alive_words(node, now, goes_on_from),
        "checkpoints": status.checkpoints(),
        "next_sync_in_s": next_sync,
        "secure": ps.secure,
        "rules": dict(ps.rules),
        "audit": _audit(status.folder, audit_run, "the ledger"),
    }
    made = beside | status.state.as_dict(now)
    evaluations = newest(ps.version, ps.evaluations, kept(status.folder))
    return made | {"evaluations": [asdict(one) for one in evaluations]}


def _ps_lines(status: NodeStatus, now: float) -> list[str]:
    state, found = status.state, _ps_facts(status, now)
    node, ps, audit = state.node, state.ps, found["audit"]
    made = [
        header(state),
        f"parameter server: {found['server']}",
        *_encrypted("connections", node),
    ]
    if ps.needs:
        needs = ", ".join(ps.needs)
        reads = " (masked: this server reads sums of 3 or more clients)" if ps.secure else ""
        made.append(f"clients send: {needs}{reads}; and metrics, where their sites allow them")
    made += [f"your own rule: {key} = {rule}" for key, rule in ps.rules.items()]
    made += state.groups.words()
    if found["next_sync_in_s"] is not None:
        made.append(f"next sync in {found['next_sync_in_s']:.0f} s")
    if node.starts > 1:
        made.append(f"the parameter server was started {node.starts} times")
    named = ", ".join(map(str, found["checkpoints"][-_NAMED:])) or "none"
    made.append(f"checkpoints kept: {named} (in {status.folder / 'checkpoints'})")
    made.append(
        f"up {megabytes(ps.up.raw)} as {megabytes(ps.up.sent)}, "
        f"down {megabytes(ps.down.raw)} as {megabytes(ps.down.sent)}"
    )
    evaluations = [Evaluation(**one) for one in found["evaluations"]]
    if evaluations:
        made.append(line_of(evaluations))
    if ps.cosines:
        recent = list(ps.cosines)[-10:]
        made.append(
            f"deltas agree: mean cosine {ps.cosines[-1]:.2f} in the newest round, median"
            f" {statistics.median(recent):.2f} of {len(recent)}"
        )
    made += ps.shares.lines(state.clients)
    made += site_lines(state.clients[name] for name in sorted(state.clients))
    made += account_lines("parameter server", found["traffic"])
    if node.garbage:
        made.append(
            f"{node.garbage:,} connections and messages were refused by their key, or were not of"
            " this program; a client that waits for `keys trust` asks again and again"
        )
    if ps.alarms:
        made.append(f"ALARM ({counted(ps.alarms, 'time')}): {ps.alarm}")
    if ps.gone:
        made.append(f"gone, by what clients held: {counted(ps.gone, 'version')}")
    if "merged" in audit:
        uses = audit["channel_uses"]
        made.append(
            f"ledger: {counted(audit['merged'], 'delta')} merged, {audit['pending']} pending,"
            f" {audit['quarantined']} quarantined, {len(audit['lost'])} lost,"
            f" {len(audit['doubled'])} doubled" + (f"; {uses:,} channel uses" if uses else "")
        )
    made += [f"held back: delta {key}: {why}" for key, why in list(ps.held.items())[:_NEWS]]
    made += [f"problem: {problem}" for problem in audit["problems"]]
    return [*made, *_clients_and_news(state, now)]


def _clients_and_news(state: RunState, now: float) -> list[str]:
    made = ["", *table(state, now)] if state.clients else []
    news = [news_line(state, one) for one in list(state.news)[-_NEWS:]]
    return [*made, "", *news] if news else made


# --- a split server ---


def _split_facts(status: NodeStatus, now: float) -> dict[str, Any]:
    state, kept = status.state, status.checkpoints()
    goes_on_from = f"checkpoint {kept[-1]}" if kept else "the beginning"
    clients = [state.clients[name] for name in sorted(state.clients)]
    return {
        "role": SPLIT_SERVER,
        "run": state.node.run,
        "method": state.split_server.method,
        "address": state.node.address,
        "encrypted": state.node.encrypted,
        "server": alive_words(state.node, now, goes_on_from),
        "starts": state.node.starts,
        "phase": state.node.phase,
        "round": state.split_server.round,
        "loss": state.split_server.loss,
        "clients_here": [client.name for client in clients if client.connected],
        "clients": [client_dict(client, now) for client in clients],
        "checkpoints": kept,
        "traffic": state.traffic(),
        "uploads": _audit(status.folder, audit_split_dir, "the split server's ledger"),
    }


def _split_lines(status: NodeStatus, now: float) -> list[str]:
    state, found = status.state, _split_facts(status, now)
    uploads = found["uploads"]
    made = [f"split server ({found['method']}): {found['server']}"]
    made += _encrypted("connections to the split server", state.node)
    if found["starts"] > 1:
        made.append(f"the split server was started {found['starts']} times")
    if "trained" in uploads:
        made.append(
            f"uploads: {uploads['trained']:,} trained ({uploads['came_back']:,} of them again,"
            f" after a server that died), {uploads['declined']:,} declined,"
            f" {uploads['dropped']:,} dropped; newest round {found['round']}"
        )
        kept = [f"{name} {version}" for name, version in uploads["auxiliary"].items()]
        if kept:
            made.append(f"versions of auxiliary models: {', '.join(kept[:_NAMED])}")
    here = found["clients_here"]
    made.append(f"{counted(len(here), 'client')} connected: {', '.join(here[:_NAMED]) or 'none'}")
    made += account_lines("split server", found["traffic"])
    made += [f"problem: {problem}" for problem in uploads["problems"]]
    return [*made, *_clients_and_news(state, now)]


# --- a client ---


def _client_facts(status: NodeStatus, now: float) -> dict[str, Any]:
    state = status.state
    return {
        "role": CLIENT,
        "name": state.node.name,
        "run": state.node.run,
        "client": alive_words(state.node, now, "the run's newest version"),
        "version": state.site.version,
        "leaves": list(state.site.leaving),
        "leaves_to": state.site.leaving_to,
        "traffic": state.traffic(),
    }


def _client_lines(status: NodeStatus, now: float) -> list[str]:
    site, found = status.state.site, _client_facts(status, now)
    leaves = f"{', '.join(site.leaving)}, to {site.leaving_to}" if site.leaving else "nothing yet"
    return [
        f"client: {found['client']}",
        header(status.state),
        f"leaves this machine: {leaves}",
        *account_lines("client", found["traffic"]),
    ]


_PARAMETER_SERVER = (_ps_facts, _ps_lines)
_REPORTS = {SPLIT_SERVER: (_split_facts, _split_lines), CLIENT: (_client_facts, _client_lines)}
