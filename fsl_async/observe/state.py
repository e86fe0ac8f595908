"""The state of a run, rebuilt from its journal alone: what `fsl-node status`, the live table and `demo` show. Pure.

`RunState.apply(line)` takes one line as `JournalReader` yields it, in order, and returns what in it is worth telling a person. It
never fails on a line: one of a newer release, or with fields of another type, changes nothing. Time comes from the lines (`t`,
seconds since 1970) or as the argument `now`.

    line                          what changes
    note   so_far                  everything: a new segment of the journal begins (`segments`)
    note   node_started            a new life of the parameter server: every client must say hello again
    event  Recovered              version, tokens and what is pending, as the disk has them
    event  ClientHello            client joins; a higher incarnation than before is a relaunch
    event  ModelAttached          size of the model; client fetches
    effect Tell Publish           client publishes the first weights
    event  FetchAsked, VersionHeld, DeltaOffered, DeltaStored, StreamLost      what the client does
    event  HeartbeatReceived              client's step, tokens, loss, lag
    event  DeltaOffered           the same, of a client that is gone before its next heartbeat
    event  DeltaStored, Served    bytes, raw (4 for each value) and as they were sent
    effect Tell Call or Turn, Note with `called`; event RoundSkipped                    round and participation
    effect Note with `alarm`      damage on disk, digests that differ: counted, and the newest one kept
    effect Quarantine, Release    what is held back
    effect Accumulate, Commit; event VersionCommitted                          what is pending, merging, merged
    event  ClientLeft             client is gone
    note   Leaving                a client's own journal: the run it is in, what leaves its machine, to whom
    event  Rebased                a client's own journal: the version that it trains from
    note   VersionFound           what a version that is on disk has merged, where the last process died before it could say so
    note   UnreadableMessages            bytes from the network that were no message of ours
    note   Traffic                bytes by category, see `accounts`
    effect Finish, note NodeEnded the end

A killed server loses up to a second of journal. What the disk knows better (version, tokens) `Recovered` puts right; counts of
single clients may then lack a delta.
"""

# ruff: noqa: SLF001 - the table of handlers at the end belongs to the class

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from attrs import fields, mutable

from fsl_async.observe import segments
from fsl_async.observe.client_state import (
    REASONS,
    ClientState,
    News,
    counted,
    mean,
    megabytes,
)
from fsl_async.observe.run_figures import MAX_NEWS, RunFigures
from fsl_async.roles.sync.training_trouble import trouble_in

MAX_OFFERED = 4096
"""Deltas whose loss is kept until they are merged: what a peer offers must not grow what each segment of the journal begins with."""

Line = Mapping[str, Any]


@mutable
class RunState(RunFigures):
    """The figures of a run, from the lines of its journal in order."""

    def apply(self, line: Line) -> list[News]:
        """Take one line of the journal; returns what it has to tell, which `news` keeps too."""
        self._fresh = []
        self.account.apply(line)
        handler = _HANDLERS.get(str(line.get("type")))
        stamp = line.get("t")
        if isinstance(stamp, int | float):
            self.last_t = float(stamp)
        if handler is not None:
            try:
                handler(self, line)
            except (KeyError, TypeError, ValueError, AttributeError):
                self.lines_odd += 1  # of another release, or not ours
        self.news.extend(self._fresh)
        return self._fresh

    def _tell(self, kind: str, text: str, client: str = "", level: str = "info") -> None:
        self._fresh.append(News(self.last_t, kind, text, client, level))

    def _client(self, line: Line) -> ClientState:
        """The client a line is about; it has just been seen."""
        name = str(line["peer"])
        client = self.clients.get(name)
        if client is None:
            client = self.clients[name] = ClientState(name)
        client.last_seen = self.last_t
        return client

    # the server's life

    def _node_started(self, line: Line) -> None:
        self.role = str(line.get("role", ""))
        self.run = str(line.get("run", self.run))
        self.client = str(line.get("name", self.client)) if self.role == "client" else ""
        self.address = str(line.get("address", ""))
        self.encrypted = told if isinstance(told := line.get("encrypted"), bool) else None
        needs = line.get("needs")
        self.needs = tuple(map(str, needs)) if isinstance(needs, list) else ()
        self.pid = int(line.get("pid", 0))
        self.host = str(line.get("host", ""))
        self.every_s = float(line.get("every_s", 0.0))
        self.quorum = float(line.get("quorum", 0.0))
        self.starts += 1
        self.started_at = self.started_at or self.last_t
        self._garbage_before = self.garbage
        self.phase, self.ending, self.ended_at, self.exit_code = "starting", "", None, 0
        self.next_sync_at = None
        self._watch.open(-1)
        self._told.clear()
        for client in self.clients.values():
            if client.doing != "gone":
                self._lose(client, "the server was restarted")
        what = "listens" if self.starts == 1 else f"is back (start {self.starts}), listens"
        self._tell("server", f"the parameter server {what} at {self.address}, run {self.run}")

    def _leaving(self, line: Line) -> None:
        self.run = str(line["run"])
        self.leaving = tuple(map(str, line["kinds"]))
        self.leaving_to = str(line["to"])

    def _rebased(self, line: Line) -> None:
        self.version = int(line["version"])

    def _recovered(self, line: Line) -> None:
        self.version = int(line["version"])
        self.digest = str(line.get("digest", ""))
        self.tokens = int(line.get("tokens_total", 0))
        self.phase = "ready" if self.version >= 0 else "waiting"
        self._pending.clear()  # an Accumulate follows for each that is pending
        self._merging.clear()
        pending = line.get("pending", [])
        held = line.get("held", [])
        keys = set(self.held)
        if isinstance(held, list):
            keys = {str(entry["delta"]["key"]) for entry in held}
        self.held = {key: self.held.get(key, "held back before the restart") for key in keys}
        self._again.clear()
        self._uncounted.clear()
        for entry in pending if isinstance(pending, list) else []:
            delta = entry["delta"]
            key = str(delta["key"])
            if key not in self._round_of:
                self._uncounted[key] = int(entry.get("bytes", 0))
            self._tokens_of[key] = int(delta["tokens"])
            self._round_of[key] = int(delta["round"])
            self._again.add(key)
        waited_s = min(max(0.0, float(line.get("since_version_s", 0.0))), self.every_s)
        self._plan_sync(self.last_t - waited_s)

    def _found(self, line: Line) -> None:
        """A version of a process that was killed between making it and saying so."""
        version = int(line["version"])
        if not 0 <= self.version < version:
            return
        keys = [str(key) for key in line["merged"]]
        self._count_merged(dict.fromkeys(keys, 0))
        words = counted(len(keys), "delta")
        self._tell("version", f"version {version} was made before the restart, of {words}")

    def _count_merged(self, merged: Mapping[str, int]) -> None:
        for key, tokens in merged.items():
            self._pending.pop(key, None)
            self.tokens += tokens
            self.deltas_merged += 1
            sent = self._uncounted.pop(key, 0)
            client = self.clients.get(key.partition("/")[0])
            if client is not None:
                client.deltas_merged += 1
            if sent:
                self.up.add(self.values, sent)
                if client is not None:
                    client.up.add(self.values, sent)

    def _plan_sync(self, begun_at: float) -> None:
        self.next_sync_at = begun_at + self.every_s if self.every_s else None

    def _finish(self, line: Line) -> None:
        self.phase = "ended"
        self.ending = str(line.get("reason", ""))
        self.exit_code = int(line.get("exit_code", 0))
        self.next_sync_at = None
        level = "warning" if self.exit_code else "info"
        self._tell("end", f"the run ends: {self.ending}", level=level)

    def _garbage_seen(self, line: Line) -> None:
        """The line counts since the server's start, so what earlier starts counted is kept aside."""
        self.garbage = self._garbage_before + int(line.get("garbage", 0))

    def _node_ended(self, line: Line) -> None:
        self.phase = "ended"
        self.ending = self.ending or "stopped at once"
        self.ended_at = self.last_t
        self._garbage_seen(line)
        self.next_sync_at = None
        for client in self.clients.values():
            if client.connected:
                client.connected, client.doing = False, "done"

    def _so_far(self, line: Line) -> None:
        found = segments.restored(RunState, line["state"])
        for each in fields(RunState):
            if each.init:
                setattr(self, each.name, getattr(found, each.name))
        self.last_t = float(line["t"])

    # clients come and go

    def _hello(self, line: Line) -> None:
        known = str(line["peer"]) in self.clients
        client = self._client(line)
        incarnation = int(line["incarnation"])
        was_connected, client.connected = client.connected, True
        if incarnation > client.incarnation:
            client.incarnation = incarnation
            client.incarnations += 1
            client.tokens_before, client.step = client.tokens, 0
            client.left_out_before = client.left_out
            client.tells_loss = False
            client.trouble = ""
            client.step_offered = client.tokens_offered = client.sequence_offered = 0
            client.tokens_per_s = 0.0
            client.version = -1
            if known:
                text = f"{client.name} is back as a new process (relaunch {client.relaunches})"
                self._tell("relaunched", f"{text}, {self._here()}", client.name)
            elif line.get("run"):
                # It is in this run already: an earlier process of the server welcomed it.
                text = f"{client.name} is connected again, {self._here()}"
                self._tell("reconnected", text, client.name)
            else:
                self._tell("joined", f"{client.name} joins, {self._here()}", client.name)
        elif not was_connected:
            text = f"{client.name} is connected again, {self._here()}"
            self._tell("reconnected", text, client.name)
        client.returning = known
        client.doing = "joining"

    def _here(self) -> str:
        """How many clients have a session now, for the lines about those who come and go."""
        self._told.clear()
        here = sum(client.connected for client in self.clients.values())
        return f"{counted(here, 'client')} connected"

    def _left(self, line: Line) -> None:
        client = self._client(line)
        if int(line["incarnation"]) != client.incarnation or not client.connected:
            return
        reason = str(line.get("reason", ""))
        if self.phase == "ended":
            client.connected, client.doing = False, "done"
            return
        self._lose(client, REASONS.get(reason, reason))
        level = "info" if reason == "bye" else "warning"
        text = f"{client.name} left: {client.gone_why}, {self._here()}"
        self._tell("gone", text, client.name, level)

    def _lose(self, client: ClientState, why: str) -> None:
        client.connected, client.doing = False, "gone"
        client.gone_at, client.gone_why = self.last_t, why
        client.tokens_per_s = 0.0

    def _attached(self, line: Line) -> None:
        client = self._client(line)
        if line.get("difference") is None:
            self.values = int(line["values"])
            client.doing = "fetching" if self.version >= 0 else "joining"

    def _refuse(self, line: Line) -> None:
        text = f"refused {line['peer']}: {line.get('text', '')}"
        self._tell("refused", text, str(line["peer"]), "warning")

    def _fetch_asked(self, line: Line) -> None:
        self._client(line).doing = "fetching"

    def _held(self, line: Line) -> None:
        client = self._client(line)
        client.version = int(line["version"])
        client.doing = "training"
        if client.version == self.version and client.returning:
            client.returning = False
            text = f"{client.name} has caught up: it holds version {client.version}"
            self._tell("caught up", text, client.name)

    def _beat(self, line: Line) -> None:
        client = self._client(line)
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
        self._look_for_trouble(client, payload, may_end="loss" not in payload)
        hung_s = payload.get("hung_s")
        hangs = isinstance(hung_s, int | float) and not isinstance(hung_s, bool)
        if hangs and not client.hangs:
            text = f"{client.name} hangs: its training has made no step for {hung_s:.0f} s"
            self._tell("hangs", text, client.name, "warning")
        elif client.hangs and not hangs:
            self._tell("hangs no more", f"{client.name} makes steps again", client.name)
        client.hangs = hangs

    def _look_for_trouble(
        self, client: ClientState, metrics: Mapping[str, Any], *, may_end: bool
    ) -> None:
        """Tell when training begins to go wrong, and when that is over: a whole round went well."""
        trouble = trouble_in(metrics)
        if trouble and not client.trouble:
            text = f"{client.name} trains badly: {trouble}"
            self._tell("trains badly", text, client.name, "warning")
        elif client.trouble and may_end and not trouble:
            self._tell("trains well", f"{client.name} trains well again", client.name)
        if trouble or may_end:
            client.trouble = trouble

    # rounds, deltas, versions

    def _tells(self, line: Line) -> None:
        message = line["message"]
        kind = message.get("type")
        peer = str(line["peer"])
        if kind in {"call/1", "turn/1"}:
            if self.phase != "collecting" or self.round != int(message["round"]):
                self._watch.open(int(message["round"]))
                self.round_called_at = self.last_t
            self.phase, self.round = "collecting", int(message["round"])
            self.next_sync_at = None
            client = self.clients.get(peer)
            self._watch.asked[peer] = client.incarnation if client is not None else -1
        elif kind == "publish/1" and peer in self.clients:
            self.clients[peer].doing = "publishing"
        elif kind == "declined/1" and peer in self.clients:
            if message.get("code") != "later":
                self._watch.empty.add(peer)
            if message.get("code") == "quarantined":
                self.clients[peer].deltas_quarantined += 1
            elif message.get("code") != "later":
                self.clients[peer].deltas_refused += 1

    def _quarantined(self, line: Line) -> None:
        """Of a delta that is kept out for good its client is told, which counts it."""
        if line.get("held"):
            self.held[str(line["key"])] = str(line["reason"])

    def _released(self, line: Line) -> None:
        self.held.pop(str(line["key"]), None)

    def _note(self, line: Line) -> None:
        text, facts = str(line.get("text", "")), line.get("facts") or {}
        if "called" in facts:
            self.called += int(facts["called"])
            self.answered += int(facts["answered"])
            self.called_alive += len(self._watch.alive(self.clients))
        elif " closes without a new version" in text:
            self.phase = "ready"
            self._plan_sync(self.round_called_at)
        level = str(line.get("level", "info"))
        if "alarm" in facts:
            self.alarms += facts["alarm"] != "verdict"
            self.alarm = text
            self._tell("alarm", text, str(facts.get("client", "")), level=level)
            return
        if "called" in facts or _IN_OTHER_WORDS.search(text) or text in self._told:
            return
        # What goes on unchanged (a round that stays open, a client too few) is said once, until a client comes or leaves or
        # a version is made.
        if len(self._told) < MAX_NEWS:
            self._told.add(text)
        self._tell("note", text, level=level)

    def _skipped(self, line: Line) -> None:
        self._watch.empty.add(self._client(line).name)

    def _offered(self, line: Line) -> None:
        client = self._client(line)
        client.doing = "sending"
        delta = line["delta"]
        key = str(delta["key"])
        sequence = int(key.rpartition("/")[2])
        if sequence <= client.sequence_offered:  # again, after a loss
            return
        # A short life ends between two heartbeats: its deltas tell what it did. Steps without a delta are in heartbeats only.
        client.sequence_offered = sequence
        client.step_offered += int(delta["steps"])
        client.tokens_offered += int(delta["tokens"])
        client.step = max(client.step, client.step_offered)
        client.tokens = max(client.tokens, client.tokens_before + client.tokens_offered)
        metrics = delta.get("metrics") or {}
        self._look_for_trouble(client, metrics, may_end="loss" in metrics)
        loss = metrics.get("loss")
        if isinstance(loss, int | float):
            self._loss_of[key] = float(loss)
            while len(self._loss_of) > MAX_OFFERED:  # most of them were declined
                del self._loss_of[next(iter(self._loss_of))]
        if not client.tells_loss:  # its heartbeats tell running means; this is the mean of a round
            client.saw_loss(loss)

    def _stream_lost(self, line: Line) -> None:
        client = self._client(line)
        if client.doing in {"sending", "publishing"}:
            client.doing = "training" if client.version >= 0 else "joining"

    def _stored(self, line: Line) -> None:
        client = self._client(line)
        client.doing = "training"
        stored = line["stored"]
        delta, sent = stored["delta"], int(stored["bytes"])
        self.up.add(self.values, sent)
        client.up.add(self.values, sent)
        self._tokens_of[str(delta["key"])] = int(delta["tokens"])
        self._round_of[str(delta["key"])] = int(delta.get("round", -1))

    def _served(self, line: Line) -> None:
        self.down.add(self.values, int(line["bytes_coded"]))

    def _accumulate(self, line: Line) -> None:
        key = str(line["key"])
        self._pending[key] = self._tokens_of.pop(key, 0)

    def _commit(self, line: Line) -> None:
        self.phase = "merging"
        self._merging = dict(self._pending)

    def _commit_failed(self, line: Line) -> None:
        self._merging.clear()

    def _committed(self, line: Line) -> None:
        self.version, self.digest = int(line["version"]), str(line["digest"])
        self.phase = "ready"
        if self.version == 0:
            self._plan_sync(self.last_t)
            self._tell("version", "version 0, the first client's weights, is here: training starts")
            return
        merged, self._merging = self._merging, {}
        self._count_merged(merged)
        # The machine's own rule: by the clock, but never at once after a round that overran.
        if self.every_s:
            earliest = self.last_t + 0.1 * self.every_s
            self.next_sync_at = max(self.round_called_at + self.every_s, earliest)
        self._tell("version", f"version {self.version}: {self._merge_words(merged)}")
        self._told.clear()

    def _merge_words(self, merged: Mapping[str, int]) -> str:
        """Who was merged, their loss, tokens, and the bytes of both directions since the version before."""
        rounds = {key: self._round_of.pop(key, -1) for key in merged}
        parts = [self._watch.words(rounds, self.clients, self.quorum)]
        again = len(self._again & set(merged))
        if again:
            total = counted(len(merged), "delta")
            parts.append(f"{total} in all, {again:,} of them stored before the restart")
            self._again -= set(merged)
        loss, what = mean(self._loss_of.pop(key, None) for key in merged), "mean over the round"
        if loss is None:  # its deltas carried none
            names = {key.partition("/")[0] for key in merged}
            known = [one for name, one in self.clients.items() if name in names]
            loss = mean(one.loss for one in known if not one.trouble)
            what = "running mean"
            if loss is None and any(one.trouble for one in known):
                parts.append("no finite loss")
        if loss is not None:
            parts.append(f"loss {loss:.3f} ({what})")
        parts.append(f"{self.tokens:,} tokens (+{sum(merged.values()):,})")
        raw, sent = self.bytes_raw - self._bytes_told[0], self.bytes_sent - self._bytes_told[1]
        self._bytes_told = self.bytes_raw, self.bytes_sent
        if sent:
            parts.append(f"{megabytes(raw)} as {megabytes(sent)} ({raw / sent:.1f}x)")
        return "; ".join(parts)


def tells_something(kind: str) -> bool:
    """Whether lines of this type change a state: most of a journal does not."""
    return kind in _HANDLERS


# Notes of the server's machine that the lines about versions, clients and the end say already.
_IN_OTHER_WORDS = re.compile(r" left \(.*goes on without it$|^version 0 is durable")

_HANDLERS: dict[str, Callable[[RunState, Line], None]] = {
    segments.SO_FAR: RunState._so_far,
    "node_started": RunState._node_started,
    "leaving": RunState._leaving,
    "rebased": RunState._rebased,
    "unreadable_messages": RunState._garbage_seen,
    "version_found": RunState._found,
    "node_ended": RunState._node_ended,
    "recovered": RunState._recovered,
    "finish": RunState._finish,
    "client_hello": RunState._hello,
    "client_left": RunState._left,
    "model_attached": RunState._attached,
    "refuse": RunState._refuse,
    "fetch_asked": RunState._fetch_asked,
    "version_held": RunState._held,
    "heartbeat_received": RunState._beat,
    "send": RunState._tells,
    "note": RunState._note,
    "delta_offered": RunState._offered,
    "round_skipped": RunState._skipped,
    "stream_lost": RunState._stream_lost,
    "delta_stored": RunState._stored,
    "version_sent": RunState._served,
    "accumulate": RunState._accumulate,
    "quarantine": RunState._quarantined,
    "release": RunState._released,
    "commit": RunState._commit,
    "commit_failed": RunState._commit_failed,
    "version_committed": RunState._committed,
}
