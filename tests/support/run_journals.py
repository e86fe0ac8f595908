"""Journals of runs that never were: the lines that a parameter server writes, without a run."""

import json

from facts import RoundFact, VersionFact, call_of, client_of, line_of, version_of


class JournalFile:
    """Writes a parameter server's journal line by line; times are seconds since `begin`."""

    def __init__(self, folder, begin=1_790_000_000.0, **started):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.begin, self.n = folder / "journal.jsonl", begin, 0
        self.tokens = dict[str, int]()
        given = {"role": "ps", "run": "run-1", "address": "tcp://127.0.0.1:7100", "pid": 0}
        given |= {"host": "elsewhere", "every_s": 10.0, "quorum": 0.5, "grace": [4.0, 1.0, 60.0]}
        self.add(0.0, "node_started", **{**given, "encrypted": True, **started})

    def add(self, t, kind, **fields):
        """A line."""
        line = {"n": self.n, "t": self.begin + t, "now": t, "kind": "event", "type": kind}
        with self.path.open("a") as file:
            file.write(json.dumps({**line, "cause": None, **fields}) + "\n")
        self.n += 1

    def fact(self, t, fact):
        """A fact."""
        line = line_of(fact, t)
        for name in ("t", "now", "kind", "type"):
            del line[name]
        self.add(t, fact.tag, **line)

    def client(self, t, *given, **more):
        """The fact of a client."""
        self.fact(t, client_of(*given, **more))

    def join(self, t, *names, incarnation=1):
        """Clients join, and hold the version 0."""
        for name in names:
            self.client(t, name, "joining", incarnation=incarnation, begins=True)
            self.add(t, "model_attached", peer=name, values=1000, difference=None)
        self.merged = 0
        self.fact(t, VersionFact(0, "d0", 0))
        for name in names:
            self.client(t, name, "training", 0, incarnation)

    def round(self, t, number, losses, missing=(), facts=None):
        """A round: call, deltas of `losses` (client -> loss), version; `missing` are late."""
        self.fact(t, call_of(number, (*losses, *missing), t))
        for at, (name, loss) in enumerate(losses.items()):
            self.delta(t + 1 + at / 100, name, number, loss, facts=facts)
        self.merged += 100 * len(losses)
        called = {"called": len(losses) + len(missing), "late": tuple(missing), "cosine": 0.3}
        called["loss"] = sum(losses.values()) / len(losses)
        self.fact(t + 2.5, version_of(number + 1, losses, tokens=self.merged, **called))
        self.fact(t + 2.5, RoundFact("ready", number=number, late=tuple(missing)))
        for name in losses:
            self.client(t + 2.6, name, "training", number + 1)

    def delta(self, t, name, number, loss, facts=None):
        """A delta comes and is stored."""
        key = f"{name}/1/{number}/{number + 1}"
        delta = {"key": key, "tokens": 100, "steps": 2, "round": number}
        delta |= {"metrics": {"loss": loss}, "facts": facts or {}}
        self.client(t, name, "sending", number)
        self.add(t, "delta_meta", peer=name, delta=delta)
        self.client(t + 0.2, name, "training", number)
        self.add(t + 0.2, "delta_stored", peer=name, stored={"delta": delta, "bytes": 1234})

    def traffic(self, t, size):
        """Bytes so far."""
        each = {"deltas up": size, "versions down": 2 * size}
        sockets = {"up": size // 2, "down": size}
        self.add(t, "traffic", payload=each, coded=each, sockets=sockets, error={})
