"""`demo lora`: a model that knows Python learns English at sites that keep their texts.

1  a small base model is made from the standard library's source (`lora_base`), unless given
2  English records are dealt to the sites (`lora_data`), unless given
3  a parameter server and the clients tune adapters by rounds; one client gets SIGKILL at a
   third of them, is launched again and catches up; the others go on meanwhile
4  the same number of steps is trained without federation, by each site alone and by one process
   on all records (`lora_compare`), and all are measured on the held-out records of all sites
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
from typing import TYPE_CHECKING, Any

from attrs import frozen

from fsl_async.cluster.restarts import RestartRules
from fsl_async.cluster.supervisor import Child, ChildExited, ChildStarted, Supervisor
from fsl_async.config.load import load
from fsl_async.errors import ConfigError, ExitCode, FslError, UsageError
from fsl_async.files.private_files import make_folder
from fsl_async.observe.ledger_audit import LEDGER, audit_run, read_ledger
from fsl_async.roles.phrasing import counted
from fsl_async.tools.demo import lora_data
from fsl_async.tools.demo.lora_summary import Summary, problems, summarize, text_lines, work_of
from fsl_async.tools.demo.play import Demo
from fsl_async.tools.demo.settings import EXPIRE_AFTER_S, HEARTBEAT_EVERY_S, ONE_THREAD, DemoNodes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fsl_async.process.stopper import Stopper
    from fsl_async.tools.demo.play import Played

BASE_STEPS = 200
"""Steps in which the demo's base is made."""
STEPS = 6
"""Steps of a client in a round."""
LIMIT_S = 3600.0
"""The run ends then even if its rounds are not done."""
RATE, BATCH, CONTEXT = 1e-2, 8, 128
"""AdamW's rate for adapters of the demo's base, records in a step, tokens of a record at most."""
OTHER_RATE = 1e-3
"""The rate for a base of the user's."""
POOLED = "pooled"
_TICK_S = 0.1
_ONCE = RestartRules(budget=0)
_ERROR = "error: "


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
            raise ConfigError(f"demo lora needs {name}: pip install 'fsl-async[hf]'")
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


async def make_base(demo: LoraDemo, say: Callable[[str], None], stop: Stopper) -> None:
    """Make the base in a process of its own, unless it is there. Raises FslError."""
    if demo.base_folder.exists():
        return
    arguments = [str(demo.base_folder), str(demo.seed), str(demo.base_steps)]
    await _Workers(demo.run_dir, say).run({"base": ("lora_base", *arguments)}, stop)


async def compare(demo: LoraDemo, steps: dict[str, int], stop: Stopper) -> dict[str, Any]:
    """Train without federation, and measure all; by name the loss and trained tokens.

    steps: that each site has trained in the run. Raises FslError.
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
    jobs: dict[str, dict[str, Any]] = {
        "alone": {**common, "jobs": alone},
        POOLED: {**common, "jobs": [together], "run": str(demo.run_dir)},
    }
    found: dict[str, Any] = {}

    def take(line: str) -> None:
        if line.startswith("{"):
            record = json.loads(line)
            found[str(record.pop("name"))] = record

    workers = {name: ("lora_compare", json.dumps(job)) for name, job in jobs.items()}
    await _Workers(demo.run_dir, take).run(workers, stop)
    return found


@frozen
class Conclusion:
    """What a demo ends with."""

    summary: Summary
    lines: list[str]
    problems: list[str]


async def conclude(
    demo: LoraDemo, played: Played, digest: str, stop: Stopper, begun: float
) -> Conclusion:
    """Audit the run, compare, sum up.

    digest: of the base before the run. begun: time.monotonic() at the demo's start.
    """
    audit, work, fault = None, {}, ""
    with contextlib.suppress(OSError):
        audit = audit_run(demo.run_dir)
        work = work_of(read_ledger(demo.run_dir / LEDGER)[0])
    measured: dict[str, Any] = {}
    if work:
        try:
            measured = await compare(demo, {name: one.steps for name, one in work.items()}, stop)
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


class _Workers:
    """Modules of this package, run as processes side by side; `run` is the whole interface."""

    def __init__(self, run_dir: Path, on_line: Callable[[str], None]) -> None:
        self._log = run_dir / "children.log"
        self._on_line = on_line
        self._last: dict[str, str] = {}
        self._failed: FslError | None = None

    async def run(self, modules: Mapping[str, tuple[str, ...]], stop: Stopper) -> None:
        """Run them to their ends. Raises FslError if one fails, or when the user ends the demo.

        modules: by name of the process, a module and its arguments.
        """
        async with Supervisor(
            log_path=self._log, on_line=self._line, on_change=self._changed, rules=_ONCE
        ) as children:
            for name, (module, *arguments) in modules.items():
                argv = (sys.executable, "-P", "-m", f"fsl_async.tools.demo.{module}", *arguments)
                children.start(Child(name, argv, env=ONE_THREAD))
            waiting = asyncio.create_task(children.wait())
            while not waiting.done() and self._failed is None and not stop.requested:
                await asyncio.wait({waiting}, timeout=_TICK_S)
            if not waiting.done():
                await children.stop(grace_s=0.0)
            await waiting
        if stop.requested:
            raise stop.error(f"the demo was ended by {stop.reason}")
        if self._failed is not None:
            raise self._failed

    def _line(self, name: str, text: str) -> None:
        self._last[name] = text.strip() or self._last.get(name, "")
        if not text.startswith(_ERROR):
            self._on_line(text)

    def _changed(self, change: ChildStarted | ChildExited) -> None:
        if isinstance(change, ChildStarted) or not change.code or self._failed is not None:
            return
        text = self._last.get(change.name, "")
        if text.startswith(_ERROR):
            self._failed = FslError(text.removeprefix(_ERROR), change.code)
        else:
            what = f"{change.name} ended ({change.why}): {text}"
            self._failed = FslError(what, ExitCode.BUG)
