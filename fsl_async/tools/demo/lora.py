"""`demo lora`: a model that knows Python learns English at sites that keep their texts.

1  a small base model is made from the standard library's source (`lora_base`), unless given
2  English records are dealt to the sites (`lora_data`), unless given
3  a parameter server and the clients tune adapters by rounds; one client gets SIGKILL at a
   quarter of them, is launched again and catches up; the others go on meanwhile
4  the same number of steps is trained without federation, by each site alone and by one process
   on all records (`lora_compare`), and all are measured on the held-out records of all sites

A process of its own (`lora_work`) does 1, and 4 with a second one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from attrs import frozen

from fsl_async.cluster.restarts import RestartRules
from fsl_async.cluster.supervisor import Child, ChildExited, ChildStarted, Supervisor
from fsl_async.config.load import load
from fsl_async.errors import ConfigError, ExitCode, FslError, UsageError
from fsl_async.files.private_files import make_folder, replace_bytes
from fsl_async.observe.ledger_audit import LEDGER, audit_run, read_ledger
from fsl_async.process.program import to_install
from fsl_async.roles.phrasing import counted
from fsl_async.tools.demo import lora_data
from fsl_async.tools.demo.lora_summary import Summary, problems, summarize, text_lines, work_of
from fsl_async.tools.demo.play import Demo
from fsl_async.tools.demo.settings import EXPIRE_AFTER_S, HEARTBEAT_EVERY_S, ONE_THREAD, DemoNodes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from fsl_async.process.stopper import Stopper
    from fsl_async.tools.demo.play import Played

BASE_STEPS = 160
"""Steps in which the demo's base is made."""
STEPS = 4
"""Steps of a client in a round."""
LIMIT_S = 3600.0
"""The run ends then even if its rounds are not done."""
RATE, BATCH, CONTEXT = 1e-2, 4, 128
"""AdamW's rate for adapters of the demo's base, records in a step, tokens of a record at most."""
OTHER_RATE = 1e-3
"""The rate for a base of the user's."""
POOLED = "pooled"
ERROR = "error: "
"""Begins a worker's line that tells why it ends."""
ORDERS = "compare.json"
"""A file in the run's directory: a list of two jobs, one for each of the worker's processes."""
_TICK_S = 0.1
_ONCE = RestartRules(budget=0)


@frozen(kw_only=True)
class LoraDemo(DemoNodes):
    """The user's settings. base: empty for the demo's own; files: none for Python's topics.

    rank: 0 for the run's default.
    """

    base: str
    files: tuple[Path, ...]
    rule: str
    rank: int
    rounds: int
    steps: int
    base_steps: int = BASE_STEPS

    @property
    def kill_at(self) -> int:
        """The version at which a client is killed."""
        return max(1, self.rounds // 4)

    @property
    def base_folder(self) -> Path:
        """Where the base is."""
        return Path(self.base) if self.base else self.run_dir / "base"

    @property
    def sites(self) -> Path:
        """Where the sites' records are."""
        return self.run_dir / "sites"

    def overrides(self) -> list[str]:
        """The run's configuration, in the form of --set."""
        chosen: dict[str, str | float | int] = {
            "run.name": "demo-lora",
            "run.seed": self.seed,
            "sync.trigger": "rounds",
            "sync.clients": self.clients,
            "sync.min_clients": self.clients,
            "sync.grace_min_s": 3.0,
            "codec.up": self.format,
            "codec.down": self.format,
            "session.heartbeat_every_s": HEARTBEAT_EVERY_S,
            "session.expire_after_s": EXPIRE_AFTER_S + 4 * self.late_s,
            "data.holdout": 0.0,  # the test records are kept apart
            "tune.method": "lora",
            "tune.rule": self.rule,
            "tune.rank": self.rank,
            "tune.steps": self.steps,
            "tune.context": CONTEXT,
            "train.batch": BATCH,
            "train.learning_rate": OTHER_RATE if self.base else RATE,
            "train.schedule": "constant",
            "train.warmup_steps": 5,
            "train.rewarm_steps": 5,
            "train.threads": 1,
            "train.device": "cpu",
        }
        return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in chosen.items()]

    def server(self) -> Child:
        """The parameter server, on a free port."""
        sets = [part for override in self.overrides() for part in ("--set", override)]
        listen = f"tcp://{self.places.host}:0"
        arguments = ["--role", "ps", listen, "--run-dir", str(self.run_dir), "--json", *sets]
        return self.places.child("server", [*arguments, "--base", str(self.base_folder)])

    def client(self, name: str, address: str) -> Child:
        """One client. Its site lets adapters and metrics out, and nothing else."""
        arguments = ["--role", "client", address, "--name", name]
        arguments += ["--run-dir", str(self.run_dir / "clients" / name)]
        arguments += ["--base", str(self.base_folder), "--allow", "adapters,metrics"]
        data = self.sites / name / lora_data.TRAIN_FILE
        return self.places.child(name, [*arguments, "--data", str(data)])


class LoraPlay(Demo):
    """Plays the run. It ends after its rounds, when the killed client trains again."""

    settings: LoraDemo
    evaluates_here = False
    _back_at: int | None = None
    """The version at which the killed client had caught up."""

    def _is_time_to_kill(self) -> bool:
        state = self.played.state
        victim = state.clients.get(self.settings.victim)
        is_there = victim is not None and victim.version >= 0 and victim.connected
        return is_there and state.ps.version >= self.settings.kill_at

    def _stop_at(self) -> float:
        played = self.played
        version = played.state.ps.version
        if self._back_at is None and played.killed_s is not None:
            self._back_at = version if played.caught_up_s is not None else None
        # The killed client takes part in the round after the one that it missed.
        is_back = self._back_at is not None and version > self._back_at
        return 0.0 if is_back and version >= self.settings.rounds else self.settings.seconds


def introduction(demo: LoraDemo) -> list[str]:
    """What will happen, for people."""
    clients = counted(demo.clients, "client")
    base = demo.base or "a small Llama, which the demo first trains on Python's standard library"
    texts = "records of their own" if demo.files else "English of their own, from Python's help()"
    return [
        f"a parameter server and {clients}, each a process of its own",
        f"base: {base}",
        f"clients tune its adapters on {texts}; only adapters and metrics may leave a site",
        (
            f"{demo.rounds} rounds of {demo.steps} steps, merged by {demo.rule}; {demo.victim} gets"
            f" SIGKILL at version {demo.kill_at}, is launched again and has to catch up"
        ),
        f"files and logs: {demo.run_dir}",
        "",
    ]


def check(demo: LoraDemo) -> None:
    """Raise before anything is made: a missing extra, too few or too many files."""
    for name in ("transformers", "peft"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"demo lora needs {name}: {to_install('hf')}")
    if demo.files and len(demo.files) != demo.clients:
        raise UsageError(
            f"--data is given {len(demo.files)} times for {counted(demo.clients, 'client')}: give"
            " each client a file"
        )


def deal(demo: LoraDemo) -> None:
    """Deal the records to the sites. Raises DataError."""
    names = demo.names
    if demo.files:
        folders = lora_data.write_own(demo.sites, names, demo.files)
    else:
        folders = lora_data.write_topics(demo.sites, names)
    make_folder(demo.run_dir / POOLED)
    for part in (lora_data.TRAIN_FILE, lora_data.TEST_FILE):
        texts = [(folder / part).read_text(encoding="utf-8") for folder in folders]
        lora_data.write_lines(demo.run_dir / POOLED / part, "".join(texts).splitlines())


def digest_of(folder: Path) -> str:
    """SHA-256 over the names and contents of a base's files."""
    found = hashlib.sha256()
    files = [folder] if folder.is_file() else sorted(folder.rglob("*"))
    for path in files:
        if path.is_file():
            found.update(f"{path.name}\n".encode())
            with path.open("rb") as stream:
                found.update(hashlib.file_digest(stream, "sha256").digest())
    return found.hexdigest()


def orders(demo: LoraDemo, steps: Mapping[str, int]) -> list[dict[str, Any]]:
    """The jobs of the two processes that train without federation, and measure all.

    steps: that each site has trained in the run; the pooled records get their sum.
    """
    common = {
        "overrides": demo.overrides(),
        "base": str(demo.base_folder),
        "test": str(demo.run_dir / POOLED / lora_data.TEST_FILE),
    }
    alone = [
        {"name": name, "data": str(demo.sites / name / lora_data.TRAIN_FILE), "steps": count}
        for name, count in steps.items()
    ]
    together = {
        "name": POOLED,
        "data": str(demo.run_dir / POOLED / lora_data.TRAIN_FILE),
        "steps": sum(steps.values()),
    }
    return [
        {**common, "jobs": [together], "run": str(demo.run_dir)},
        {**common, "jobs": alone},
    ]


async def demonstrate(
    demo: LoraDemo,
    play: Callable[[], Awaitable[Played]],
    say: Callable[[str], None],
    stop: Stopper,
) -> Conclusion:
    """Make the base, play the run, compare, sum up. Raises FslError, or when the user ends it."""
    begun = time.monotonic()
    async with Worker(demo, say, stop) as worker:
        await worker.made_base()
        digest = digest_of(demo.base_folder)
        played = await play()
        if stop.requested:
            raise stop.error(f"the demo was ended by {stop.reason}")
        say("training without federation, to compare: each site alone, and all in one place")
        return await _conclude(demo, played, worker, digest=digest, stop=stop, begun=begun)


@frozen
class Conclusion:
    """What a demo ends with."""

    summary: Summary
    lines: list[str]
    problems: list[str]


async def _conclude(
    demo: LoraDemo, played: Played, worker: Worker, *, digest: str, stop: Stopper, begun: float
) -> Conclusion:
    """digest: of the base before the run. begun: time.monotonic() at the demo's start."""
    audit, work, fault = None, {}, ""
    with contextlib.suppress(OSError):
        audit = audit_run(demo.run_dir)
        work = work_of(read_ledger(demo.run_dir / LEDGER)[0])
    measured: dict[str, Any] = {}
    if work:
        try:
            measured = await worker.compare({name: one.steps for name, one in work.items()})
        except FslError as error:
            if stop.requested:
                raise
            fault = error.message
    tune = load(None, demo.overrides()).tune
    summary = summarize(
        demo,
        played,
        audit,
        work,
        measured,
        rank=tune.adapter_rank,
        base_bytes=_size(demo.base_folder),
        base_unchanged=digest_of(demo.base_folder) == digest,
        seconds=time.monotonic() - begun,
    )
    found = [*problems(demo, played, audit, summary), *filter(None, [fault])]
    return Conclusion(summary, text_lines(demo, played, summary, audit), found)


def _size(folder: Path) -> int:
    """Bytes of the weights of a base."""
    files = [folder] if folder.is_file() else folder.glob("*.safetensors")
    return sum(path.stat().st_size for path in files)


class Worker:
    """The process that makes the base and compares: `lora_work`. Use as `async with`.

    It loads its libraries while the base is made or the run is played, not after.
    """

    module = "fsl_async.tools.demo.lora_work"

    def __init__(self, demo: LoraDemo, say: Callable[[str], None], stop: Stopper) -> None:
        self._demo = demo
        self._say = say
        self._stop = stop
        self._made = demo.base_folder.exists()
        self._found: dict[str, Any] = {}
        """Records of `lora_compare.compare`, by name."""
        self._last = self._error = ""
        self._exited: ChildExited | None = None
        self._end: asyncio.Task[Any] | None = None
        self._children = Supervisor(
            log_path=demo.run_dir / "children.log",
            on_line=self._line,
            on_change=self._changed,
            rules=_ONCE,
        )

    async def __aenter__(self) -> Self:
        demo = self._demo
        steps = 0 if self._made else demo.base_steps
        arguments = (str(demo.run_dir), str(demo.base_folder), str(demo.seed), str(steps))
        argv = (sys.executable, "-P", "-m", self.module, *arguments)
        self._children.start(Child("worker", argv, env=ONE_THREAD))
        self._end = asyncio.create_task(self._children.wait())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._children.stop(grace_s=0.0)

    async def made_base(self) -> None:
        """Wait until the base is there. Raises FslError."""
        await self._until(lambda: self._made)

    async def compare(self, steps: Mapping[str, int]) -> dict[str, Any]:
        """Train without federation, and measure all; by name the loss and trained tokens.

        steps: that each site has trained in the run. Raises FslError.
        """
        text = json.dumps(orders(self._demo, steps))
        replace_bytes(self._demo.run_dir / ORDERS, text.encode())
        assert self._end is not None
        await self._until(self._end.done)
        return self._found

    async def _until(self, is_done: Callable[[], bool]) -> None:
        assert self._end is not None
        while not self._stop.requested:
            if self._end.done():
                self._end.result()  # raises what reading its lines raised
                if (end := self._exited) is not None and (end.code or not is_done()):
                    what = f"the worker ended ({end.why}): {self._last}"
                    code = end.code if self._error else ExitCode.BUG
                    raise FslError(self._error or what, code)
            if is_done():
                return
            await asyncio.sleep(_TICK_S)
        raise self._stop.error(f"the demo was ended by {self._stop.reason}")

    def _line(self, _: str, text: str) -> None:
        self._last = text.strip() or self._last
        if text.startswith(ERROR):
            self._error = self._error or text.removeprefix(ERROR)
        elif text.startswith('{"made"'):
            self._made = True
        elif text.startswith("{"):
            record = json.loads(text)
            self._found[str(record.pop("name"))] = record
        elif not self._made:
            self._say(text)

    def _changed(self, change: ChildStarted | ChildExited) -> None:
        if isinstance(change, ChildExited):
            self._exited = change
