"""`demo split`: both servers in one process, clients that hold one block, one of them killed."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen, mutable

from fsl_async.accounting.accounts import Account
from fsl_async.cluster.deaths import Deaths
from fsl_async.cluster.restarts import RestartRules
from fsl_async.cluster.supervisor import Child, ChildExited, ChildStarted, Supervisor
from fsl_async.errors import ExitCode, FslError
from fsl_async.observe.journal import JournalReader
from fsl_async.roles.phrasing import counted
from fsl_async.roles.split.methods import METHODS
from fsl_async.tools.demo.settings import HERE, SERVER, Places

if TYPE_CHECKING:
    from collections.abc import Callable

    from fsl_async.process.stopper import Stopper

LISTEN_S = 60.0
LIMIT_S = 600.0
LEAVE_S = 20.0
_TICK_S = 0.1
_VERSION = re.compile(r"\bversion (\d+): ")
_RULES = RestartRules(first_wait_s=0.5, longest_wait_s=4.0, budget=4)


DEEP: dict[str, str | float | int] = {
    "model.layers": 8,
    "model.width": 64,
    "model.heads": 4,
    "model.context": 128,
}
"""The demo's own model: 0.4 M parameters in many blocks, because a client saves memory by
blocks.
"""


@frozen(kw_only=True)
class SplitDemo:
    """The user's settings. preset: empty for the demo's own model."""

    data: str
    clients: int
    rounds: int
    seed: int
    preset: str
    method: str
    number_format: str
    run_dir: Path
    places: Places = HERE

    @property
    def names(self) -> list[str]:
        """The clients' names."""
        return [f"client-{number}" for number in range(1, self.clients + 1)]

    @property
    def victim(self) -> str:
        """The client that is killed."""
        return self.names[min(1, self.clients - 1)]

    @property
    def kill_at(self) -> int:
        """The version at which that happens."""
        return max(1, self.rounds // 3)

    def overrides(self) -> list[str]:
        """The run's configuration, as --set takes it."""
        chosen: dict[str, str | float | int] = {
            "run.name": "demo-split",
            "run.seed": self.seed,
            "run.rounds": self.rounds,
            "sync.clients": self.clients,
            "sync.min_clients": self.clients,
            "session.heartbeat_every_s": 0.5,
            "session.expire_after_s": 3.0,
            "split.method": self.method,
            "split.cut": 1,
            "split.listen": f"tcp://{self.places.host}:0",
            "split.samples": 64,
            "split.upload_every": 1,
            "split.align_every": 4,
            "split.align_passes": 4,
            "split.align_rate": 3e-3,
            "split.buffer_samples": 16,
            "split.up": self.number_format,
            "split.down": self.number_format,
            "data.source": "site" if self.data else "built-in",
            "data.path": self.data,
            **({"model.preset": self.preset} if self.preset else DEEP),
            "train.batch": 8,
            "train.learning_rate": 4e-3,
            "train.threads": 1,
            "train.device": "cpu",
        }
        return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in chosen.items()]

    def server(self) -> Child:
        """Both servers."""
        sets = [part for override in self.overrides() for part in ("--set", override)]
        listen = f"tcp://{self.places.host}:0"
        arguments = ["--role", "server", "--with-ps", listen, "--json"]
        return self.places.child(SERVER, [*arguments, "--run-dir", str(self.run_dir), *sets])

    def client(self, name: str, address: str) -> Child:
        """One client."""
        run_dir = str(self.run_dir / "clients" / name)
        arguments = ["--role", "client", address, "--name", name, "--json", "--run-dir", run_dir]
        arguments += ["--allow", "deltas,activations,labels,metrics"]
        arguments += ["--data", self.data] if self.data else []
        return self.places.child(name, arguments)


@mutable
class Seen:
    """Events that were observed, in seconds after the start."""

    address: str = ""
    version: int = 0
    killed_s: float | None = None
    back_s: float | None = None
    results: dict[str, dict[str, Any]] = field(factory=dict)
    faults: list[str] = field(factory=list)
    seconds: float = 0.0


class Play:
    """One demo. `play` is the whole interface."""

    def __init__(self, demo: SplitDemo, say: Callable[[str], None], stop: Stopper) -> None:
        self.demo = demo
        self.seen = Seen()
        self._say, self._stop = say, stop
        self._begun = time.monotonic()
        self._ended: set[str] = set()
        self._deaths = Deaths()
        self._gave_up = self._ending = False

    async def play(self) -> Seen:
        """Play it to its end; no child is left behind.

        Raises FslError where children died before a version was made.
        """
        seen = self.seen
        async with Supervisor(
            log_path=self.demo.run_dir / "children.log",
            on_line=self._line,
            on_change=self._changed,
            rules=_RULES,
        ) as children:
            await self._run(children)
            self._ending = True
        seen.faults += self._deaths.lines()
        if self._deaths and not seen.version and not self._stop.requested:
            raise FslError("; ".join(seen.faults), ExitCode.BUG)
        seen.seconds = time.monotonic() - self._begun
        return seen

    async def _run(self, children: Supervisor) -> None:
        demo, seen = self.demo, self.seen
        children.start(demo.server())
        if not await self._until(lambda: bool(seen.address), LISTEN_S):
            if not self._deaths:
                seen.faults.append("the servers did not listen")
            return
        for name in demo.names:
            children.start(demo.client(name, seen.address))
        if await self._until(lambda: seen.version >= demo.kill_at, LIMIT_S):
            children.kill(demo.victim)
            seen.killed_s = time.monotonic() - self._begun
            self._say(f"SIGKILL to {demo.victim}")
        await self._until(lambda: SERVER in self._ended, LIMIT_S)
        await self._until(lambda: self._ended.issuperset(demo.names), LEAVE_S)

    async def _until(self, ready: Callable[[], bool], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not ready():
            late = time.monotonic() > deadline
            lost = self._gave_up or self._deaths.are_hopeless(self.demo.names)
            if self._stop.requested or late or lost:
                return ready()
            await asyncio.sleep(_TICK_S)
        return True

    def _line(self, name: str, text: str) -> None:
        seen = self.seen
        if text.startswith("{"):
            record = json.loads(text)
            if record.get("event") == "listening" and record.get("role") == "ps":
                seen.address = str(record["address"])
            if "traffic" in record:
                seen.results[name] = record
            return
        found = _VERSION.search(text)
        if name == SERVER and found is not None:
            seen.version = max(seen.version, int(found[1]))
        if name == SERVER and text.strip():
            self._say(text)

    def _changed(self, change: ChildStarted | ChildExited) -> None:
        if isinstance(change, ChildStarted):
            if change.launch > 1:
                self.seen.back_s = time.monotonic() - self._begun
                self._say(f"{change.name} is launched again")
            return
        final = change.relaunch_in_s is None
        if final:
            self._ended.add(change.name)
        if (
            change.code
            and not self._ending
            and not self._stop.requested
            and (final or change.code != -signal.SIGKILL)
        ):
            self._deaths.add(change)
            self._gave_up = self._gave_up or final
            self._say(f"{change.name} ended ({change.why}): {change.error}")


@frozen
class Summary:
    """The object that `demo split --json` ends with. Loss in nats per byte, sizes in bytes."""

    method: str
    rounds: int
    clients: int
    uploads: int
    eval_loss: float | None
    payload: dict[str, int]
    coded: dict[str, int]
    sockets: dict[str, int]
    client_memory: int
    whole_memory: int
    killed_s: float | None
    back_s: float | None
    back_uploads: int
    """Uploads of the killed client's later incarnations that were trained."""
    seconds: float
    run_dir: str


def summarize(demo: SplitDemo, seen: Seen) -> Summary:
    """Sum up. Evaluates the last weights; trains the whole model briefly to measure memory."""
    server = seen.results.get(SERVER, {})
    clients = [seen.results[name] for name in demo.names if name in seen.results]
    traffic = traffic_of(demo.run_dir)
    return Summary(
        method=demo.method,
        rounds=int((server.get("ps") or {}).get("version", 0)),
        clients=demo.clients,
        uploads=int(server.get("uploads", 0)),
        eval_loss=evaluate_split(demo) if server else None,
        payload=dict(sorted(traffic["payload"].items())),
        coded=dict(sorted(traffic["coded"].items())),
        sockets=dict(sorted(traffic["sockets"].items())),
        client_memory=max((client["memory_grown"] for client in clients), default=0),
        whole_memory=whole_memory(demo),
        killed_s=seen.killed_s,
        back_s=seen.back_s,
        back_uploads=_uploads_after(demo) if server else 0,
        seconds=round(seen.seconds, 1),
        run_dir=str(demo.run_dir),
    )


def _uploads_after(demo: SplitDemo) -> int:
    """Uploads of the victim's later incarnations, from the split server's ledger."""
    from fsl_async.observe.split_audit import trained_by_life

    counts = trained_by_life(demo.run_dir / "server", demo.victim)
    return sum(counts[1:])


def traffic_of(run_dir: Path) -> dict[str, Counter[str]]:
    """What both servers' journals count, all incarnations of all clients.

    Payload and coded bytes by category and direction, sockets by direction.
    """
    sums = {kind: Counter[str]() for kind in ("payload", "coded", "sockets")}
    for part in ("ps", "server"):
        account = Account()
        for line in JournalReader(run_dir / part / "journal.jsonl").read_all():
            account.apply(line)
        for kind, counter in sums.items():
            counter.update(account.as_dict()[kind])
    return sums


def whole_memory(demo: SplitDemo) -> int:
    """What training the whole model takes, in a process of its own."""
    argv = [sys.executable, "-P", "-m", "fsl_async.tools.demo.whole_memory", *demo.overrides()]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    try:
        return int(json.loads(done.stdout)["grown"])
    except (ValueError, KeyError):
        return 0


def evaluate_split(demo: SplitDemo) -> float:
    """Loss of x_c and x_s together on text that no client has trained on, nats per byte."""
    import torch

    from fsl_async.config.load import load, to_dict
    from fsl_async.config.split_rules import split_method
    from fsl_async.learn.client.pretrain import open_corpus
    from fsl_async.learn.data.corpus import held_out_windows
    from fsl_async.learn.models.forward import Batch
    from fsl_async.learn.models.gpt import gpt_config
    from fsl_async.learn.split import build, lockstep, weights
    from fsl_async.learn.split.server_disk import ServerDisk
    from fsl_async.tools.evaluation import load_last

    torch.set_num_threads(1)
    config = load(None, demo.overrides())
    parts = build.build_parts(config, at_client=False)
    options = build.client_options(config)
    part = build.client_part(split_method(config), parts.model, options, parts.auxiliary)
    load_last(demo.run_dir / "ps", weights.weights_of(part.part("client")))
    disk = ServerDisk(demo.run_dir / "server")
    state = disk.recover()
    disk.close()
    assert parts.model.server is not None
    assert state.common is not None
    weights.load_named(parts.model.server, "server/", state.common)
    sizes = gpt_config(to_dict(config))
    corpus = open_corpus(to_dict(config), sizes.context)
    batches = [
        Batch(window[:, :-1].contiguous(), window[:, 1:].contiguous())
        for window in (
            torch.from_numpy(each).long() for each in held_out_windows(corpus, batch=8, limit=64)
        )
    ]
    return round(lockstep.evaluate(parts.model, batches).loss, 4)


def words(demo: SplitDemo, found: Summary) -> list[str]:
    """The summary for people."""
    lines = [
        "",
        (
            f"{found.rounds} rounds of {found.method}, {found.uploads} uploads trained,"
            f" {found.seconds:.0f} s"
        ),
        f"loss {found.eval_loss} of both parts on text that no client has seen (nats/byte)"
        + (
            "; above it is that of auxiliary models"
            if METHODS[found.method].auxiliary != "none"
            else ""
        ),
        f"{'bytes, all clients':28}{'payload':>14}{'coded':>14}",
    ]
    lines += [
        f"  {name:26}{size:>14,}{found.coded.get(name, 0):>14,}"
        for name, size in found.payload.items()
    ]
    for direction in ("up", "down"):
        size = found.sockets.get(direction, 0)
        lines.append(f"  {'sockets ' + direction:26}{'':14}{size:>14,}")
    if found.whole_memory:
        share = found.client_memory / found.whole_memory
        lines.append(
            "peak memory of a client beyond what it takes without a model:"
            f" {found.client_memory / 1e6:.0f} MB, {share:.0%} of the"
            f" {found.whole_memory / 1e6:.0f} MB that training the whole model takes"
        )
    if found.killed_s is not None and found.back_s is not None:
        lines.append(
            f"{demo.victim}: killed at {found.killed_s:.1f} s,"
            f" launched again at {found.back_s:.1f} s, "
            + (
                f"{counted(found.back_uploads, 'upload')} trained after that"
                if found.back_uploads
                else "too late to train again before the run ended: give more --rounds"
            )
        )
    return [*lines, f"run directory: {found.run_dir}"]
