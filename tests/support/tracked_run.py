"""A journal of a parameter server with two clients, for what shows runs."""

import os
import socket

from deltas import delta_of
from facts import FactWriter, VersionFact, version_of

from fsl_async.observe.journal import JournalWriter
from fsl_async.roles.machine import ClientLeft, Finish, Offered, Received
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import DeltaKey, StoredDelta

VALUES, SENT, TOKENS, EVERY_S = 1000, 800, 100, 10.0


class TrackedRun:
    """Writes a run version by version: "a" and "b" train, and report losses 2 / v and 4 / v."""

    def __init__(self, folder, run="run-1"):
        self.folder, self.t, self.version = folder, 1_700_000_000.0, -1
        self.writer = JournalWriter(folder / "journal.jsonl", clock=lambda: self.t)
        self.facts = FactWriter(self.writer)
        self.start(run)

    def start(self, run="run-1", version=-1, tokens=0):
        """A process of the parameter server begins."""
        self.writer.note(
            "node_started", self.t, role="ps", run=run, address="tcp://h:1", pid=os.getpid(),
            host=socket.gethostname(), every_s=EVERY_S,
        )  # fmt: skip
        self.tokens = tokens
        self.write(VersionFact(version, "", tokens, "disk"))

    def write(self, *items):
        """Add events, facts and the end."""
        self.facts.write(items, self.t)

    def join(self, *names):
        """Version 0 is there and clients hold it."""
        self.version = 0
        self.write(VersionFact(0, "d0", 0))
        for name in names:
            self.write(
                ev.ClientHello(name, 5, "", -1, ""),
                ev.ModelAttached(name, "f", VALUES, None),
                Received(name, msg.Holding(0, "d0")),
            )

    def round(self, *names, cosine=0.5, base=None, metrics=None, facts=None):
        """A round of these clients, which makes a version."""
        self.t += EVERY_S
        number, self.version = self.version, self.version + 1
        losses = list[float]()
        for place, name in enumerate(names):
            key = DeltaKey(name, 5, number if base is None else base, self.version)
            told = {"loss": 2.0 * (place + 1) / self.version} | (metrics or {})
            delta = delta_of(key, tokens=TOKENS, number=number, metrics=told)
            delta.facts.update(facts or {})
            losses.append(told["loss"])
            self.write(
                Offered(name, msg.DeltaMeta(delta), "s"),
                ev.DeltaStored(name, StoredDelta(delta, SENT), None),
            )
        self.tokens += TOKENS * len(names)
        stale = number - (number if base is None else base)
        figures = {"staleness_mean": float(stale), "staleness_max": stale, "cosine": cosine}
        loss = sum(losses) / len(losses)
        self.write(version_of(self.version, names, tokens=self.tokens, loss=loss, **figures))

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
