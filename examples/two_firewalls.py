"""Fine-tuning at two sites behind firewalls of their own, on slow links, through a relay.

    sudo bin/netlab-setup                              # once: what slow links need here
    sudo .venv/bin/python examples/two_firewalls.py    # about four minutes; Ctrl-C removes all

    site-a |firewall|---- 1 Mbit/s, 150 ms each way ----+
                                                        +-- relay --|firewall| ps
    site-b |firewall|---- 1 Mbit/s, 150 ms each way ----+

Four network namespaces on this machine (benchmarks/netlab). A site's firewall lets only
connections out, and only to the relay's port; the parameter server's lets only the relay in. All
nodes have keys, and the relay, which has none, forwards what it cannot read. Two runs tune a small
base model, whose weights are random, on records that the sites keep:

    lora     rule bank: site-a trains rank 8, site-b rank 4; adapters travel
    zeroth   a classification head; 8 numbers travel each way in a round (K 4, P 2)

In the middle of each run the link of site-b is cut for some seconds, and heals. Where links cannot
be shaped (bin/netlab-setup prints why) the runs go on over fast ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fsl_async.config.address import Address
from fsl_async.errors import ExitCode, FslError
from fsl_async.files.checksummed_json import from_checksummed
from fsl_async.observe.journal import JournalReader
from fsl_async.observe.ledger_audit import audit_run

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from netlab.host import MissingError, require
from netlab.laboratory import Laboratory, which

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PS, RELAY, SITES = "ps", "relay", ("site-a", "site-b")
CUT = SITES[1]
"""The site whose link is cut."""
PAIRS = [*((site, RELAY) for site in SITES), (RELAY, PS)]
LINK = ("rate=1mbit", "delay=150ms")
PORT, OTHER_PORT = 7100, 7101
LABELS = ("routine", "urgent")
LIMIT_S = 900.0
STOPPED = threading.Event()
"""A run that takes longer has failed."""

COMMON = {
    "run.seed": 3,
    "sync.clients": 2,
    "sync.min_clients": 2,
    "session.heartbeat_every_s": 2,
    "session.expire_after_s": 6,
    "data.holdout": 0.0,  # the test records are kept apart
    "store.keep_versions": 1000,
    "tune.objective": "classify",
    "tune.labels": ",".join(LABELS),
    "tune.context": 64,
    "train.batch": 16,
    "train.learning_rate": 2e-3,
    "train.schedule": "constant",
    "train.threads": 1,
    "train.device": "cpu",
}
RUNS: dict[str, dict[str, str | float]] = {
    "lora": {"tune.method": "lora", "tune.rule": "bank", "tune.rank": 8, "tune.steps": 6},
    "zeroth": {
        "tune.method": "zeroth",
        "tune.targets": "none",  # no adapters: the new head alone
        "tune.zo_steps": 4,
        "tune.zo_probes": 2,
        "tune.zo_mu": 1e-2,
        "tune.zo_rate": 3e-2,
    },
}
RANKS = {"site-a": 8, "site-b": 4}
ALLOWED = {"lora": "deltas,metrics", "zeroth": "scalars,metrics"}
"""What may leave a site; deltas, because a new head is no adapter."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
NODE = (sys.executable, "-P", "-m", "fsl_async.cli")


def say(text: str = "") -> None:
    """Print a line at once."""
    print(text, flush=True)


# --- the base and the records ---


def write_base(folder: Path) -> None:
    """A BERT of 3 blocks with random weights, and a tokenizer whose tokens are bytes."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    from fsl_async.learn.tune.base import Base, save_base

    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *letters])}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="[UNK]"))  # noqa: S106 - no password
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokens = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        # Wider than usual: what a random network adds to its input must show in its output.
        initializer_range=0.15,
    )
    torch.manual_seed(0)
    save_base(Base(transformers.BertModel(config), tokens, (), 64), folder)


MACHINES = {"site-a": ["pump", "turbine"], "site-b": ["furnace", "conveyor"]}
FOUND = {
    "routine": ["checked", "steady", "no change", "within limits", "as planned", "cleaned"],
    "urgent": ["ALARM", "smoke", "leaking!", "stopped", "OVERHEATED", "pressure lost!"],
}
URGENT = {"site-a": 0.3, "site-b": 0.6}
"""Shares of urgent records."""


def records(site: str, count: int, seed: str) -> Iterator[str]:
    """Lines of a log book, and whether they are urgent."""
    drawn = random.Random(f"{site} {seed}")  # noqa: S311 - no secret
    for _ in range(count):
        label = LABELS[drawn.random() < URGENT[site]]
        facts = drawn.sample(FOUND[label], 2)
        machine = f"{drawn.choice(MACHINES[site])} {drawn.randint(1, 99)}"
        yield json.dumps({"text": f"{machine}: {', '.join(facts)}", "label": label})


def write_data(folder: Path) -> None:
    """The base, the records of each site, and records of both that no site trains on."""
    write_base(folder / "base")
    for site in SITES:
        (folder / f"{site}.jsonl").write_text("\n".join(records(site, 300, "train")) + "\n")
    test = [line for site in SITES for line in records(site, 150, "test")]
    (folder / "test.jsonl").write_text("\n".join(test) + "\n")


# --- keys and firewalls ---


def make_keys(folder: Path) -> dict[str, str]:
    """A key pair for each node but the relay; the parameter server trusts the sites' keys.

    Returns the public keys.
    """

    def keys(*words: str, of: str) -> dict[str, Any]:
        argv = [*NODE, "keys", *words, "--keys", str(folder / f"keys-{of}"), "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)  # noqa: S603
        return dict(json.loads(done.stdout))

    public = {node: str(keys("new", of=node)["public"]) for node in (PS, *SITES)}
    for site in SITES:
        keys("trust", public[site], "--name", site, of=PS)
    return public


def rules(peer: str, *, dials: bool) -> str:
    """Rules of nftables that let TCP to `peer` (dials) or from it through, and nothing else.

    They need no connection tracking: a connection begins with a packet that has SYN and no ACK.
    """
    to, back = ("output", "input") if dials else ("input", "output")
    there, here = ("daddr", "saddr") if dials else ("saddr", "daddr")
    return f"""
    table ip firewall {{
        chain {to} {{
            type filter hook {to} priority 0; policy drop;
            ip {there} {peer} tcp dport {PORT} accept
        }}
        chain {back} {{
            type filter hook {back} priority 0; policy drop;
            ip {here} {peer} tcp sport {PORT} tcp flags & (syn | ack) != syn accept
        }}
    }}"""


TRY = """
import socket, sys
for place in sys.argv[1:]:
    host, port = place.split(":")
    try:
        socket.create_connection((host, int(port)), 1.5).close()
    except ConnectionRefusedError:
        pass  # it was reached, and nothing listens there
    except OSError:
        continue
    print(place)
"""


def reached(lab: Laboratory, site: str, *places: tuple[str, int]) -> list[str]:
    """Those of the places (site, port) that a connection from `site` gets to."""
    names = {f"{lab.address(other)}:{port}": f"{other}:{port}" for other, port in places}
    argv = lab.command(site, [sys.executable, "-ISc", TRY, *names])
    done = subprocess.run(argv, capture_output=True, text=True, check=True)  # noqa: S603
    return [names[line] for line in done.stdout.split()]


def close_firewalls(lab: Laboratory) -> None:
    """Put firewalls at the sites and the parameter server, and try what gets through."""
    relay, has_rules = lab.address(RELAY), shutil.which("nft") is not None
    for site in (*SITES, PS):
        argv = lab.command(site, ["nft", "-f", "-"])
        text = rules(relay, dials=site != PS)
        has_rules = (
            has_rules
            and not subprocess.run(  # noqa: S603
                argv, input=text, capture_output=True, text=True, check=False
            ).returncode
        )
    if not has_rules:
        say("nftables is missing (bin/netlab-setup installs it): routes alone keep sites apart")
    for site in SITES:
        other = SITES[site == SITES[0]]
        tried = [(RELAY, PORT), (PS, PORT), (other, PORT)]
        tried += [(RELAY, OTHER_PORT)] if has_rules else []
        found = reached(lab, site, *tried)
        blocked = [f"{name}:{port}" for name, port in tried if f"{name}:{port}" not in found]
        say(f"  {site} reaches {', '.join(found)}; not {', '.join(blocked)}")
        if found != [f"{RELAY}:{PORT}"]:
            raise FslError(f"{site} should reach only {RELAY}:{PORT}")
    inward = [(PS, PORT), *((site, PORT) for site in SITES)]
    found = reached(lab, RELAY, *(inward if has_rules else inward[:1]))
    if found != [f"{PS}:{PORT}"]:
        raise FslError(f"the relay should reach only {PS}:{PORT}, and reaches {', '.join(found)}")
    say(f"  {RELAY} reaches {', '.join(found)}" + ("; no site" if has_rules else ""))


# --- a run ---


def merged(version: Mapping[str, Any]) -> list[str]:
    """The sites of which a version has a delta."""
    return sorted(entry["key"].split("/")[0] for entry in version["merged"])


class Run:
    """The nodes of one run, in their sites. Leaving the `with` block ends them."""

    def __init__(
        self, lab: Laboratory, folder: Path, method: str, rounds: int, public: dict[str, str]
    ) -> None:
        self.lab, self.data, self.method, self.rounds = lab, folder, method, rounds
        self.dir = folder / method
        self.log = folder / f"{method}.log"
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._public = public
        self.wire: list[tuple[int, dict[str, tuple[int, int]]]] = []
        """Bytes that the sites' interfaces have received and sent, by version."""
        self._untold: list[tuple[int, float, str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes.values():
            node.terminate()
        for node in self.nodes.values():
            with suppress(subprocess.TimeoutExpired):
                node.wait(3)
            node.kill()
            node.wait()

    def _start(self, name: str, *words: str) -> None:
        argv = self.lab.command(name, [*NODE, *words, "--json"])
        with self.log.open("ab") as log:
            # In a session of its own: Ctrl-C is for this program, which ends the nodes.
            self.nodes[name] = subprocess.Popen(  # noqa: S603
                argv, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def start(self) -> None:
        """Start the parameter server, the relay, and a client at each site."""
        settings = {**COMMON, **RUNS[self.method], "run.name": self.method}
        sets = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
        keys = {node: ("--keys", str(self.data / f"keys-{node}")) for node in self._public}
        server, relay = (Address(self.lab.address(node), PORT) for node in (PS, RELAY))
        key = self._public[PS]
        self._start(PS, "--role", "ps", "--run-dir", str(self.dir), *keys[PS], *sets, server.tcp)
        target = Address(server.host, PORT, key).fsl
        self._start(RELAY, "--role", "relay", "--listen", relay.tcp, target)
        for site in SITES:
            rank = ("--rank", str(RANKS[site])) if self.method == "lora" else ()
            self._start(
                site, "--role", "client", "--name", site, "--run-dir", str(self.dir / site),
                "--base", str(self.data / "base"), "--data", str(self.data / f"{site}.jsonl"),
                "--allow", ALLOWED[self.method], *keys[site], *rank,
                Address(relay.host, PORT, key).fsl,
            )  # fmt: skip

    def versions(self) -> list[dict[str, Any]]:
        """The ledger's lines about versions."""
        path = self.dir / "ledger.jsonl"
        facts = map(from_checksummed, path.read_bytes().splitlines()) if path.exists() else ()
        return [fact for fact in facts if fact and fact["fact"] == "version"]

    def _count(self, version: int) -> None:
        found = {}
        for site in SITES:
            # The table of the namespace that the process is in.
            path = Path(f"/proc/{self.nodes[site].pid}/net/dev")
            with suppress(OSError, StopIteration):
                line = next(line for line in path.read_text().splitlines() if "link" in line)
                numbers = line.partition(":")[2].split()
                found[site] = int(numbers[0]), int(numbers[8])
        if len(found) == len(SITES):
            self.wire.append((version, found))

    def _is_over(self) -> bool:
        """Whether all nodes but the relay have ended. Raises FslError when one has failed."""
        for name, node in self.nodes.items():
            fine = {None, 0, int(ExitCode.INTERRUPTED)} if name == PS else {None, 0}
            if node.poll() not in fine:
                lines = self.log.read_text(errors="replace").splitlines()
                why = next((line for line in lines if '"error"' in line), "".join(lines[-1:]))
                raise FslError(f"{name} ended with code {node.returncode}: {why}")
        return all(self.nodes[name].returncode is not None for name in (PS, *SITES))

    def play(self, cut_s: float) -> None:
        """Follow the run to its end; cut and heal a link in the middle.

        It ends after its rounds, but not before the site that was cut off takes part again.
        """
        shown, is_ending = 0, False
        begun = time.monotonic()
        cut_at = healed_at = 0.0
        while not self._is_over():
            if STOPPED.is_set():
                raise KeyboardInterrupt
            made, now = self.versions(), time.monotonic()
            if len(made) > shown:
                self._count(made[-1]["version"])
            for before, one in pairwise(made[max(0, shown - 1) :]):
                self._tell(one["version"], one["at"] - before["at"], ", ".join(merged(one)))
            shown = len(made)
            if not cut_at and shown > self.rounds // 2:
                self.lab.cut(f"{CUT}:{RELAY}")
                cut_at = now
                self._tell_rest(f"  the link of {CUT} is cut")
            if cut_at and not healed_at and now > cut_at + cut_s:
                self.lab.heal(f"{CUT}:{RELAY}")
                healed_at = now
                self._tell_rest(f"  the link of {CUT} is healed after {now - cut_at:.0f} s")
            is_whole = healed_at and CUT in merged(made[-1])
            if is_whole and shown > self.rounds and not is_ending:
                self.nodes[PS].send_signal(signal.SIGINT)  # one last round
                is_ending = True
            if now > begun + LIMIT_S:
                raise FslError(f"the run did not end within {LIMIT_S:.0f} s")
            time.sleep(0.1)
        self._tell_rest()

    def _tell(self, version: int, seconds: float, names: str) -> None:
        """Take a version; several of the same sites make one line where there are many."""
        if self._untold and (names != self._untold[0][2] or len(self._untold) >= self.rounds / 12):
            self._tell_rest()
        self._untold.append((version, seconds, names))

    def _tell_rest(self, event: str = "") -> None:
        if self._untold:
            versions, seconds, names = zip(*self._untold, strict=True)
            which = f"{versions[0]:3}" if len(versions) == 1 else f"{versions[0]:3}-{versions[-1]}"
            say(f"  version {which:6} {statistics.mean(seconds):5.1f} s a round: {names[0]}")
            self._untold.clear()
        if event:
            say(event)

    def digests(self) -> dict[str, str]:
        """The digest of the last version, as each node computed it over its own weights."""
        last = self.versions()[-1]
        found = {PS: str(last["digest"])}
        for site in SITES:
            for line in JournalReader(self.dir / site / "journal.jsonl").read_all():
                if (line["type"], line.get("version")) == ("base_replaced", last["version"]):
                    found[site] = str(line["digest"])
        return found

    def summary(self) -> dict[str, Any]:
        """Figures of the finished run."""
        made, audit = self.versions(), audit_run(self.dir)
        seconds = [after["at"] - before["at"] for before, after in pairwise(made)]
        digests = self.digests()
        complaints = audit.complaints()
        if len(digests) < 1 + len(SITES) or len(set(digests.values())) > 1:
            complaints.append(f"nodes have different weights: {digests}")
        if complaints:
            raise FslError("; ".join(complaints))
        argv = [*NODE, "status", str(self.dir), "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)  # noqa: S603
        clients = {one["name"]: one for one in json.loads(done.stdout)["clients"]}
        return {
            "rounds": made[-1]["version"],
            "round_s": statistics.median(seconds),
            "longest_s": max(seconds),
            "evaluations": self._evaluated(),
            "digest": digests[PS],
            "sites": {site: self._on_the_wire(site) | clients[site] for site in SITES},
        }

    def _on_the_wire(self, site: str) -> dict[str, float]:
        """Bytes of a round at a site's interface: medians of the rounds that it took part in."""
        names = [merged(one) for one in self.versions()]
        each = [
            [(b - a) / (last - first) for a, b in zip(before[site], after[site], strict=True)]
            for (first, before), (last, after) in pairwise(self.wire)
            if all(site in names[version] for version in range(first + 1, last + 1))
        ]
        down, up = (statistics.median(column) for column in zip(*each, strict=True))
        return {"wire_up": up, "wire_down": down}

    def _evaluated(self) -> list[dict[str, Any]]:
        """Loss and accuracy of the first and the last version on records of both sites."""
        import torch

        from fsl_async.tools.versions import VersionEvaluator

        torch.set_num_threads(1)  # the model is too small for more
        test, base = str(self.data / "test.jsonl"), self.data / "base"
        measure = VersionEvaluator(self.dir, data=test, limit_bytes=1 << 20, own=None, base=base)
        kept = measure.versions()
        loaded = [measure.load(version) for version in (kept[0], kept[-1])]
        return [measure.evaluate(one) for one in loaded if one is not None]


def show(found: dict[str, Any]) -> None:
    """Print the figures of a run."""
    first, last = found["evaluations"]
    say(
        f"  {found['rounds']} rounds, a round takes {found['round_s']:.1f} s (median; the longest"
        f" {found['longest_s']:.1f} s)"
    )
    say(
        f"  on records that no site trained on: loss {first['loss']:.3f} before,"
        f" {last['loss']:.3f} after; accuracy {first['accuracy']:.2f}, {last['accuracy']:.2f}"
    )
    say(f"  digest {found['digest']} at {', '.join((PS, *SITES))}")
    for site, one in found["sites"].items():
        facts, merged, up = one["facts"], one["deltas_merged"], one["up"]
        what = f"rank {facts['rank']:.0f}" if facts["order"] else "zeroth order"
        say(
            f"  {site}, {what}: {merged} deltas merged, {up['sent'] / max(merged, 1):,.0f} B each;"
            f" on the wire {one['wire_up']:,.0f} B up, {one['wire_down']:,.0f} B down a round"
        )


def laboratory() -> Laboratory:
    """The four namespaces, with slow links where this machine can have them.

    Raises MissingError without Linux or root.
    """
    require()
    shaped = True
    try:
        which()
    except MissingError as error:
        say(f"no shaping here, links are as fast as this machine is: {error.message}")
        shaped = False
    return Laboratory([*SITES, RELAY, PS], pairs=PAIRS, shaped=shaped)


def main() -> None:
    """Make the sites, run, remove them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lora", type=int, default=16, metavar="ROUNDS", help="0: not this run")
    parser.add_argument("--zeroth", type=int, default=60, metavar="ROUNDS", help="0: not this run")
    parser.add_argument("--cut", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--dir", type=Path, help="keep records, logs and run directories here")
    options = parser.parse_args()
    with ExitStack() as stack:
        lab = stack.enter_context(laboratory())
        stack.callback(signal.signal, signal.SIGINT, signal.SIG_IGN)  # cleaning up goes to its end
        if options.dir is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            folder = options.dir.absolute()
            folder.mkdir(parents=True)
        for site in SITES:
            if lab.backend != "veth without shaping":
                lab.set(f"{site}:{RELAY}", *LINK)
        trip = lab.round_trip_ms(SITES[0], RELAY)
        say(f"{', '.join((*SITES, RELAY, PS))} ({lab.backend}); {SITES[0]} to {RELAY} and back")
        say(f"takes {trip:.0f} ms; firewalls:")
        close_firewalls(lab)
        say("keys by fsl-node keys; a base and records are made")
        public = make_keys(folder)
        write_data(folder)
        for method in RUNS:
            rounds = getattr(options, method)
            if not rounds:
                continue
            say(f"\n{method}:")
            with Run(lab, folder, method, rounds, public) as run:
                run.start()
                run.play(options.cut)
            show(run.summary())


def stop(*_: object) -> None:
    """End as Ctrl-C does; an exception alone is lost where it meets a finalizer of Python."""
    STOPPED.set()
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        main()
    except FslError as error:
        print(f"error: {error.message}", file=sys.stderr)
        raise SystemExit(int(error.exit_code)) from None
    except KeyboardInterrupt:
        print("stopped; all namespaces and processes are removed", file=sys.stderr)
        raise SystemExit(int(ExitCode.INTERRUPTED)) from None
