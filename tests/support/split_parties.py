"""A split learning run of processes: arguments, files on disk, and checks of them after any kills.

A parameter server, a split server, clients. The caller starts the processes: tests and
`benchmarks/split_storm.py`.
"""

import json

from ports import free_ports

from fsl_async.observe.journal import JournalReader
from fsl_async.observe.ledger_audit import audit_run, audit_split_dir, read_ledger

SETTINGS = {
    "split.samples": 8,
    "split.upload_every": 2,
    "split.align_every": 2,
    "split.align_passes": 2,
    "split.buffer_samples": 8,
    "session.heartbeat_every_s": 0.5,
    "session.expire_after_s": 4,
    "model.layers": 2,
    "model.width": 32,
    "model.heads": 2,
    "model.context": 16,
    "train.batch": 2,
    "train.threads": 1,
    "train.device": "cpu",
}
TEXT = "the quick brown fox jumps over the lazy dog. " * 400
LISTENS = {"ps": "listening at", "server": "split server at", "relay": "relay at"}
"""The line that each process prints when it is up; a client prints "joined run"."""


def lines_of(path):
    """Return the complete lines of a journal; the last may be half written or cut off by a kill."""
    return list(JournalReader(path).read_all()) if path.exists() else []


def ledger_lines_of(path):
    """Return the complete lines of a ledger."""
    return read_ledger(path)[0] if path.exists() else []


class Parties:
    """The folder, settings (table.key -> value) and names of the processes: "ps", "server", the
    clients'.
    """

    def __init__(self, folder, clients, settings):
        self.folder, self.clients = folder, list(clients)
        self.ports = {"ps": free_ports(1)[0], "server": free_ports(1)[0]}
        (folder / "text.txt").write_text(TEXT)
        count = len(self.clients)
        here = {
            "split.listen": f"tcp://127.0.0.1:{self.ports['server']}",
            "sync.clients": count,
            "sync.min_clients": count,
            "data.shards": count,
            "data.path": str(folder / "text.txt"),
        }
        self.chosen = {**SETTINGS, **here, **settings}
        self.ps_dir, self.server_dir = folder / "ps", folder / "split" / "server"

    def arguments(self, name):
        """Return the arguments of one process."""
        sets = [f"{key}={json.dumps(value)}" for key, value in self.chosen.items()]
        flags = [part for one in sets for part in ("--set", one)]
        place = f"127.0.0.1:{self.ports['ps']}"
        if name == "ps":
            return ["--role", "ps", "--run-dir", str(self.ps_dir), *flags, place]
        if name == "server":
            return ["--role", "server", "--run-dir", str(self.server_dir.parent), *flags]
        given = ["--data", self.chosen["data.path"], "--allow", "deltas,activations,labels,metrics"]
        arguments = ["--role", "client", "--name", name, "--run-dir", str(self.folder / name)]
        return [*arguments, *given, place]

    def versions(self):
        """Return the clients merged into each version, in the order of the parameter server's
        ledger.
        """
        lines = ledger_lines_of(self.ps_dir / "ledger.jsonl")
        made = [line for line in lines if line.get("fact") == "version"]
        return {
            int(line["version"]): {str(one["key"]).split("/")[0] for one in line["merged"]}
            for line in made
        }

    def version(self):
        """Return the newest version; -1 if there is none."""
        return max(self.versions(), default=-1)

    def all_clients_since(self, version):
        """Return whether every client was merged after a version.

        In the newest version, or, where each version is one client's, in as many versions as
        clients.
        """
        newer = {number: names for number, names in self.versions().items() if number > version}
        relay = self.chosen.get("split.method") == "sl"
        last = sorted(newer)[-(len(self.clients) if relay else 1) :]
        return {name for number in last for name in newer[number]} == set(self.clients)

    def uploads(self):
        """Return (key, outcome) in the order of the split server's ledger."""
        lines = ledger_lines_of(self.server_dir / "ledger.jsonl")
        return [(line["key"], line["outcome"]) for line in lines if "key" in line]

    def journal(self, name):
        """Return a client's journal, over all its incarnations."""
        return lines_of(self.folder / name / "journal.jsonl")

    def acknowledged(self, name):
        """Return the keys of the uploads whose acknowledgement a client received."""
        lines = self.journal(name)
        return {
            line["key"]
            for line in lines
            if line.get("type") == "trained" or line.get("answer") == "here"
        }

    def problems(self):
        """Return one sentence for each violation in ledgers and journals.

        Merged or trained twice, lost though acknowledged, acknowledged and never trained. The audit
        judges what becomes of a trained upload when its split server dies: it may be offered again,
        or declined as too old.
        """
        audit = audit_run(self.ps_dir)
        found = [f"lost {each}" for each in audit.lost]
        found += [f"doubled {each}" for each in audit.doubled]
        found += [*audit.problems, *audit_split_dir(self.server_dir).problems]
        trained = {key for key, outcome in self.uploads() if outcome == "trained"}
        for name in self.clients:
            missing = sorted(self.acknowledged(name) - trained)
            found += [f"{name} received that {key} is trained, and it never was" for key in missing]
        return found
