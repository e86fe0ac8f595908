"""A journal of a parameter server with two clients, for what shows runs."""

import os
import socket

from deltas import delta_of

from fsl_async.observe.journal import JournalWriter
from fsl_async.roles.machine import ClientLeft, Finish, Note, Send
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import DeltaKey, StoredDelta

VALUES, SENT, TOKENS, EVERY_S = 1000, 800, 100, 10.0


class TrackedRun:
    """Writes a run version by version: "a" and "b" train, and report losses 2 / v and 4 / v."""

    def __init__(self, folder, run="run-1"):
        self.folder, self.t, self.version = folder, 1_700_000_000.0, -1
        self.writer = JournalWriter(folder / "journal.jsonl", clock=lambda: self.t)
        self.start(run)

    def start(self, run="run-1", version=-1, tokens=0):
        """A process of the parameter server begins."""
        self.writer.note(
            "node_started", self.t, role="ps", run=run, address="tcp://h:1", pid=os.getpid(),
            host=socket.gethostname(), every_s=EVERY_S,
        )  # fmt: skip
        self.write(ev.Recovered(version, "", tokens_total=tokens))

    def write(self, *items):
        """Add events and effects."""
        for item in items:
            is_effect = isinstance(item, (do.Commit, Send, Note, Finish))
            (self.writer.effect if is_effect else self.writer.event)(item, self.t)

    def join(self, *names):
        """Version 0 is there and clients hold it."""
        self.version = 0
        self.write(ev.VersionCommitted(0, "d0", 0, 0.1))
        for name in names:
            self.write(
                ev.ClientHello(name, 5, "", -1, ""),
                ev.ModelAttached(name, "f", VALUES, None),
                ev.VersionHeld(name, 0, "d0"),
            )

    def round(self, *names, cosine=0.5, base=None, metrics=None, facts=None):
        """A round of these clients, which makes a version."""
        self.t += EVERY_S
        number, self.version = self.version, self.version + 1
        self.write(*(Send(name, msg.Call(number)) for name in names))
        for place, name in enumerate(names):
            key = DeltaKey(name, 5, number if base is None else base, self.version)
            told = {"loss": 2.0 * (place + 1) / self.version} | (metrics or {})
            delta = delta_of(key, tokens=TOKENS, number=number, metrics=told)
            delta.facts.update(facts or {})
            self.write(
                ev.DeltaOffered(name, "s", delta),
                ev.DeltaStored(name, StoredDelta(delta, SENT), None),
            )
        called = {"round": number, "called": len(names), "answered": len(names)}
        self.write(
            Note("round", facts=called),
            do.Commit(self.version, (), 1.0),
            ev.VersionCommitted(self.version, f"d{self.version}", 10, 0.1, cosine),
        )

    def lose(self, name):
        """A client's session expires."""
        self.write(ClientLeft(name, 5, "expired"))

    def end(self):
        """The run is over."""
        self.write(Finish("done"))
        self.writer.note("node_ended", self.t)
        self.flush()

    def flush(self):
        """Readers have everything."""
        self.writer.flush()
