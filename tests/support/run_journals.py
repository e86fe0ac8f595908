"""Journals of runs that never were: the lines that a parameter server writes, without a run."""

import json


class JournalFile:
    """Writes a parameter server's journal line by line; times are seconds since `begin`."""

    def __init__(self, folder, begin=1_790_000_000.0, **started):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.begin, self.n = folder / "journal.jsonl", begin, 0
        self.tokens = dict[str, int]()
        facts = {"role": "ps", "run": "run-1", "address": "tcp://127.0.0.1:7100", "pid": 0}
        facts |= {"host": "elsewhere", "every_s": 10.0, "quorum": 0.5, "grace": [4.0, 1.0, 60.0]}
        self.add(0.0, "node_started", **{**facts, "encrypted": True, **started})

    def add(self, t, kind, **fields):
        """A line."""
        line = {"n": self.n, "t": self.begin + t, "now": t, "kind": "event", "type": kind}
        with self.path.open("a") as file:
            file.write(json.dumps({**line, "cause": None, **fields}) + "\n")
        self.n += 1

    def join(self, t, *names, incarnation=1):
        """Clients join, and hold the version 0."""
        for name in names:
            self.add(t, "client_hello", peer=name, incarnation=incarnation, run="")
            self.add(t, "model_attached", peer=name, values=1000, difference=None)
        self.add(t, "version_committed", version=0, digest="d0", cosine=None)
        for name in names:
            self.add(t, "version_held", peer=name, version=0)

    def round(self, t, number, losses, missing=(), facts=None):
        """A round: call, deltas of `losses` (client -> loss), version; `missing` are late."""
        for name in (*losses, *missing):
            self.add(t, "send", peer=name, message={"type": "call/1", "round": number})
        for at, (name, loss) in enumerate(losses.items()):
            self.delta(t + 1 + at / 100, name, number, loss, facts=facts)
        self.add(t + 2, "commit", version=number + 1)
        version = {"version": number + 1, "digest": "d", "cosine": 0.3, "product_norms": {}}
        self.add(t + 2.5, "version_committed", **version)
        for name in losses:
            self.add(t + 2.6, "version_held", peer=name, version=number + 1)

    def delta(self, t, name, number, loss, facts=None):
        """A delta comes and is stored."""
        key = f"{name}/1/{number}/{number + 1}"
        delta = {"key": key, "tokens": 100, "steps": 2, "round": number}
        delta |= {"metrics": {"loss": loss}, "facts": facts or {}}
        self.add(t, "delta_offered", peer=name, delta=delta)
        self.add(t + 0.2, "delta_stored", peer=name, stored={"delta": delta, "bytes": 1234})

    def traffic(self, t, size):
        """Bytes so far."""
        each = {"deltas up": size, "versions down": 2 * size}
        sockets = {"up": size // 2, "down": size}
        self.add(t, "traffic", payload=each, coded=each, sockets=sockets, error={})
