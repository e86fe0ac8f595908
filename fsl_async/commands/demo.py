"""`fsl-node demo`: run a parameter server and clients here, and kill and restart a client."""

from __future__ import annotations

import sysconfig
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from fsl_async.commands.client import check_base, check_corpus, check_data
from fsl_async.commands.options import Finite, Preset, Whole
from fsl_async.commands.output import Output
from fsl_async.config.settings_tuning import AdapterRuleName
from fsl_async.errors import (
    ExitCode,
    FslError,
    InterruptedByUserError,
    PreemptedError,
    UsageError,
)
from fsl_async.roles.split.methods import names_of
from fsl_async.tools.clone import need_benchmarks
from fsl_async.tools.demo.run_dir import make_run_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from fsl_async.observe.ledger_audit import Audit
    from fsl_async.process.stopper import Stopper
    from fsl_async.tools.demo.groups import GroupsDemo
    from fsl_async.tools.demo.lora import LoraDemo
    from fsl_async.tools.demo.play import Demo, Played
    from fsl_async.tools.demo.settings import DemoNodes, DemoSettings, Places
    from fsl_async.tools.demo.split import SplitDemo
    from fsl_async.tools.evaluation import Evaluated

# Options of this command by setting, for errors.
_OPTIONS = {
    "run.seed": "--seed",
    "sync.every_s": "--every",
    "sync.clients": "--clients",
    "codec.up": "--format",
    "codec.down": "--format",
    "data.shards": "--clients",
    "data.path": "--data",
    "model.preset": "--preset",
    "model.context": "--preset",
    "tune.rank": "--rank",
    "tune.rule": "--rule",
}


_WHAT = ["pretrain", "split", "lora", "fsdp", "groups"]


@click.command("demo")
@click.argument("what", default="pretrain", type=click.Choice(_WHAT))
@click.option(
    "--data",
    multiple=True,
    metavar="PATH",
    help="Train on this text; default: the source of Python's standard library. lora: a jsonl file"
    " of records, once for each client; default: the English of Python's help().",
)
@click.option(
    "--seconds", type=Finite(10.0, 86_400.0),
    help="Call the last round this long after the start; the end takes some seconds more."
    " [default: 40; more with long round trips; lora: when its rounds are done]",
)  # fmt: skip
@click.option(
    "--clients", type=Whole(1, 64),
    help="How many. [default: 3; lora: one for each --data]",
)  # fmt: skip
@click.option(
    "--format", "codec", default="uniform", show_default=True,
    type=click.Choice(["fp32", "bf16", "e4m3", "e5m2", "uniform"]),
    help="Number format of deltas and updates.",
)  # fmt: skip
@click.option(
    "--every", "every_s", type=Finite(1.0, 3600.0),
    metavar="SECONDS",
    help="Seconds from one sync to the next. [default: 5; more with long round trips]",
)  # fmt: skip
@click.option("--seed", default=0, show_default=True, type=Whole(0, 2**62))
@click.option(
    "--preset",
    default="",
    type=Preset(),
    help="The model's size. [default: 0.5m; split: 8 blocks, 0.4m]",
)
@click.option(
    "--run-dir", type=click.Path(path_type=Path), metavar="DIR",
    help="Where the run is kept; default: runs/demo-DATE-TIME.",
)  # fmt: skip
@click.option(
    "--dry-run", is_flag=True, help="Print the configuration of the run, resolved, and exit."
)
@click.option(
    "--net", metavar="PROFILE",
    help="Run servers and clients in sites of a network laboratory with such links: lan, campus,"
    " transatlantic, dsl, wireless, satellite. Needs root and a clone; docs/netlab.md.",
)  # fmt: skip
@click.option(
    "--links",
    is_flag=True,
    help="Put each client behind a proxy that `chaos` can cut; not with --net.",
)
@click.option(
    "--rounds",
    default=12,
    show_default=True,
    type=Whole(3, 10**6),
    help="split, lora: rounds to train.",
)
@click.option(
    "--method", default="fsl-sage", show_default=True, help="split: how to train.",
    type=click.Choice(names_of(lambda method: method.has_server)),
)  # fmt: skip
@click.option(
    "--base", type=click.Path(path_type=Path), metavar="MODEL_DIR",
    help="lora: the model to tune; default: a small one that the demo makes.",
)  # fmt: skip
@click.option(
    "--rule", default="fedit", show_default=True, type=click.Choice(get_args(AdapterRuleName)),
    help="lora: how adapters are merged.",
)  # fmt: skip
@click.option("--rank", type=Whole(1, 4096), help="lora: of the adapters. [default: 8; bank: 16]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON objects, the result last.")
def command(
    *,
    what: str,
    rounds: int,
    method: str,
    data: tuple[str, ...],
    seconds: float | None,
    clients: int | None,
    codec: str,
    every_s: float | None,
    seed: int,
    preset: str,
    run_dir: Path | None,
    dry_run: bool,
    net: str | None,
    links: bool,
    base: Path | None,
    rule: AdapterRuleName,
    rank: int | None,
    as_json: bool,
) -> int:
    """Show a whole run on this machine: real processes, real sockets, real training.

    A parameter server and its clients train a small GPT, or with `lora` adapters of a small Llama.
    One client gets SIGKILL, is launched again and catches up; with `fsdp` each client is two ranks
    that train one sharded model, and one rank gets it. With `groups` three parameter servers with
    clients of their own average now and then, and two of the servers get SIGKILL in a reduction.
    The exit code is 0 when all came back and no acknowledged delta was lost or merged twice, else
    1.
    """
    from attrs import evolve

    from fsl_async.config.load import load, resolved, to_dict, to_toml
    from fsl_async.process.stopper import Stopper, stop_on_signals
    from fsl_async.tools.demo.settings import DemoSettings, lengths

    output = Output(as_json=as_json, waits=False)
    _check_what(what, net, links=links)
    if what == "lora":
        from fsl_async.tools.demo.lora import LIMIT_S, STEPS, LoraDemo

        lora = LoraDemo(
            base="" if base is None else str(check_base(base)),
            files=tuple(Path(check_data(path)) for path in data),
            rule=rule,
            rank=rank or 0,
            rounds=rounds,
            steps=STEPS,
            seconds=LIMIT_S if seconds is None else seconds,
            clients=clients or len(data) or 3,
            format=codec,
            seed=seed,
            run_dir=Path(),
            late_s=_late_s(net),
        )
        return _lora(lora, run_dir, output, net, dry_run=dry_run)
    if len(data) > 1:
        raise UsageError(f"--data is given {len(data)} times, and demo {what} takes one text")
    if base is not None:
        raise UsageError("--base is for demo lora")
    text = str(check_data(data[0])) if data else ""
    if what == "groups":
        made = _groups_demo(
            data=text,
            seconds=seconds or 90.0,
            clients=clients or 2,
            codec=codec,
            every_s=every_s or 3.0,
            seed=seed,
            preset=preset,
        )
        return _groups(made, run_dir, output)
    clients = clients or (2 if what == "fsdp" else 3)
    if what == "split":
        from fsl_async.tools.demo.split import SplitDemo

        split = SplitDemo(
            data=text,
            clients=clients,
            rounds=rounds,
            seed=seed,
            preset=preset,
            method=method,
            number_format=codec,
            run_dir=Path(),
        )
        return _split(split, run_dir, output, net)
    late_s = _late_s(net)
    ranks, more_s = (2, 40.0) if what == "fsdp" else (1, 0.0)
    default_s, default_every_s = lengths(late_s)
    settings = DemoSettings(
        data=text,
        seconds=default_s + more_s if seconds is None else seconds,
        clients=clients,
        format=codec,
        every_s=default_every_s if every_s is None else every_s,
        seed=seed,
        preset=preset or "0.5m",
        run_dir=Path(),
        links=links,
        late_s=late_s,
        ranks=ranks,
    )
    # Bad settings or data raise here, before any process is started.
    config = resolved(load(None, settings.overrides(), _OPTIONS))
    check_corpus(config, _OPTIONS)
    network = _network(net, settings.names)
    if dry_run:
        if as_json:
            output.result(to_dict(config))
        else:
            output.say(*to_toml(config, comments=False).rstrip().split("\n"))
        return 0
    settings = settings.at(make_run_dir(run_dir, output.say))
    for line in _introduction(settings, net):
        output.say(line)
    stopper = Stopper()
    with stop_on_signals(stopper):
        with network(output) as places:
            played = _play(evolve(settings, places=places), output, stopper)
        if stopper.requested:
            kind = (
                InterruptedByUserError
                if stopper.exit_code == ExitCode.INTERRUPTED
                else PreemptedError
            )
            raise kind(
                f"the demo was ended by {stopper.reason}; its files are in {settings.run_dir}"
            )
        return _conclude(settings, played, output)


def _check_what(what: str, net: str | None, *, links: bool) -> None:
    """Raise UsageError for options that this demo, or this install, does not take."""
    if net is not None:
        need_benchmarks("--net")
    if links and (net is not None or what != "pretrain"):
        raise UsageError(
            "--links is for a demo on this machine without --net, where links can be cut anyway,"
            " and not for demo split, demo lora and demo groups"
        )
    if what == "groups" and net is not None:
        raise UsageError("--net is not for demo groups, whose servers meet on this machine")


def _late_s(net: str | None) -> float:
    """A profile's round trip beyond `SHORT_TRIP_S`, in seconds. Raises UsageError."""
    from fsl_async.tools.demo.settings import SHORT_TRIP_S

    if net is None:
        return 0.0
    from netlab import profiles

    return max(0.0, round(2e-3 * profiles.profile(net).delay_ms - SHORT_TRIP_S, 3))


def _network(
    net: str | None, clients: list[str]
) -> Callable[[Output], AbstractContextManager[Places]]:
    """A function that opens the places of the nodes. Raises FslError without a laboratory."""
    from fsl_async.tools.demo.settings import HERE, SERVER, places_in

    if net is None:
        return lambda _: nullcontext(HERE)
    from netlab import profiles
    from netlab.laboratory import Laboratory, which

    settings = profiles.profile(net)
    which()

    @contextmanager
    def opened(output: Output) -> Iterator[Places]:
        with Laboratory([SERVER, *clients], profile=net) as lab:
            output.say(f"network laboratory ({lab.backend}), {net}: {profiles.words(settings)}")
            yield places_in(lab)

    return opened


def _split(demo: SplitDemo, run_dir: Path | None, output: Output, net: str | None) -> int:
    """Play `demo split`; returns the exit code."""
    import asyncio

    from attrs import evolve

    from fsl_async.config.load import load, resolved
    from fsl_async.process.stopper import Stopper, stop_on_signals
    from fsl_async.tools.demo.split import Play, summarize, words

    check_corpus(resolved(load(None, demo.overrides(), _OPTIONS)), _OPTIONS)
    network = _network(net, demo.names)
    where = make_run_dir(run_dir, output.say)
    demo = evolve(demo, run_dir=where)
    output.say(
        f"a parameter server and a split server in one process, {demo.clients} clients that hold"
        f" the embedding and one block of a GPT of {demo.preset or '0.4m'} parameters;"
        f" {demo.victim} gets SIGKILL at version {demo.kill_at}; files and logs: {where}"
    )
    stopper = Stopper()
    with stop_on_signals(stopper):
        with network(output) as places:
            placed = evolve(demo, places=places)
            seen = asyncio.run(Play(placed, output.say, stopper).play())
        if stopper.requested:
            raise stopper.error(f"the demo was ended by {stopper.reason}")
    found = summarize(demo, seen)
    for line in words(demo, found):
        output.say(line)
    if found.rounds < demo.rounds:
        seen.faults.append(f"{found.rounds} of {demo.rounds} rounds were done")
    if found.back_s is None:
        seen.faults.append(f"{demo.victim} was not killed and launched again")
    for fault in seen.faults:
        output.warn(fault)
    if output.as_json:
        output.result(found)
    return int(ExitCode.BUG) if seen.faults else 0


def _groups_demo(
    *, data: str, seconds: float, clients: int, codec: str, every_s: float, seed: int, preset: str
) -> GroupsDemo:
    """The settings of `demo groups`."""
    from fsl_async.tools.demo.groups import GroupsDemo, free_ports

    return GroupsDemo(
        data=data,
        groups=3,
        clients=clients,
        seconds=seconds,
        every_s=every_s,
        global_s=4 * every_s,
        preset=preset or "0.5m",
        number_format=codec,
        seed=seed,
        run_dir=Path(),
        ports=free_ports(3),
    )


def _groups(demo: GroupsDemo, run_dir: Path | None, output: Output) -> int:
    """Play `demo groups`; returns the exit code."""
    import asyncio

    from attrs import evolve

    from fsl_async.config.load import load, resolved
    from fsl_async.process.stopper import Stopper, stop_on_signals
    from fsl_async.tools.demo.groups import Play, summarize, words

    chosen = demo.overrides(demo.servers[0])
    check_corpus(resolved(load(None, chosen, _OPTIONS)), _OPTIONS)
    demo = evolve(demo, run_dir=make_run_dir(run_dir, output.say))
    output.say(
        f"{demo.groups} parameter servers with {demo.clients} clients each; a sync every"
        f" {demo.every_s:g} s, a global round every {demo.global_s:g} s; two of the servers get"
        f" SIGKILL in the middle of a reduction; files and logs: {demo.run_dir}"
    )
    stopper = Stopper()
    with stop_on_signals(stopper):
        seen = asyncio.run(Play(demo, output.say, stopper).play())
        if stopper.requested:
            raise stopper.error(f"the demo was ended by {stopper.reason}")
    found = summarize(demo, seen)
    for line in words(found):
        output.say(line)
    for fault in seen.faults:
        output.warn(fault)
    if output.as_json:
        output.result(found)
    return int(ExitCode.BUG) if seen.faults else 0


def _lora(
    demo: LoraDemo, run_dir: Path | None, output: Output, net: str | None, *, dry_run: bool
) -> int:
    """Play `demo lora`; returns the exit code."""
    import asyncio

    from attrs import evolve

    from fsl_async.config.load import load, resolved, to_dict, to_toml
    from fsl_async.process.stopper import Stopper, stop_on_signals
    from fsl_async.tools.demo import lora

    config = resolved(load(None, demo.overrides(), _OPTIONS))
    lora.check(demo)
    network = _network(net, demo.names)
    if dry_run:
        if output.as_json:
            output.result(to_dict(config))
        else:
            output.say(*to_toml(config, comments=False).rstrip().split("\n"))
        return 0
    demo = demo.at(make_run_dir(run_dir, output.say).resolve())
    for line in lora.introduction(demo):
        output.say(line)
    stopper = Stopper()

    async def play() -> Played:
        with network(output) as places:
            return await _played(evolve(demo, places=places), output, stopper, lora.LoraPlay)

    with stop_on_signals(stopper):
        lora.deal(demo)
        # In the main thread: on Linux children die with the thread that launched them.
        result = asyncio.run(lora.demonstrate(demo, play, output.say, stopper))
    for line in ["", *result.lines]:
        output.say(line)
    for line in result.problems:
        output.warn(line)
    if output.as_json:
        output.result(result.summary)
    return int(ExitCode.BUG) if result.problems else 0


def _play(settings: DemoSettings, output: Output, stopper: Stopper) -> Played:
    import asyncio

    from fsl_async.tools.demo.fsdp import FsdpDemo

    # In the main thread: on Linux children die with the thread that launched them.
    kind = FsdpDemo if settings.ranks > 1 else None
    return asyncio.run(_played(settings, output, stopper, kind))


async def _played(
    settings: DemoNodes, output: Output, stopper: Stopper, kind: type[Demo] | None = None
) -> Played:
    from fsl_async.observe.table import open_view
    from fsl_async.tools.demo.play import Demo

    view = open_view(output, ends_at=time.time() + settings.seconds if kind is None else None)
    try:
        return await (kind or Demo)(settings, view, stopper).play()
    finally:
        view.close()


def _conclude(settings: DemoSettings, played: Played, output: Output) -> int:
    """Audit, evaluate, print; returns the exit code."""
    from attrs import evolve

    from fsl_async.tools.demo.summary import problems, summarize, text_lines

    begun = time.monotonic()
    audit = _audit(settings)
    problem = ""
    evaluated = None
    try:
        evaluated = _evaluate(settings)
    except FslError as error:
        problem = error.message
    summary = summarize(settings, played, audit, evaluated)
    summary = evolve(summary, seconds=round(played.seconds + time.monotonic() - begun, 1))
    found = problems(settings, played, audit, evaluated)
    output.say("")
    for line in text_lines(settings, played, summary, audit):
        output.say(line)
    for line in [*found, problem]:
        if line:
            output.warn(line)
    if output.as_json:
        output.result(summary)
    return int(ExitCode.BUG) if found else 0


def _audit(settings: DemoSettings) -> Audit | None:
    from fsl_async.observe.ledger_audit import audit_run

    try:
        return audit_run(settings.run_dir)
    except OSError:
        return None


def _evaluate(settings: DemoSettings) -> Evaluated:
    from fsl_async.config.load import load, to_dict
    from fsl_async.tools.evaluation import evaluate_last

    return evaluate_last(settings.run_dir, to_dict(load(None, settings.overrides())))


def _introduction(settings: DemoSettings, net: str | None) -> list[str]:
    from fsl_async.roles.phrasing import counted
    from fsl_async.tools.demo.settings import SHORT_TRIP_S

    what = (
        settings.data or f"{sysconfig.get_path('stdlib')} (the source of Python's standard library)"
    )
    where = "on this machine (127.0.0.1)" if net is None else "each in a site of its own"
    own = "a part of its own" if settings.clients > 1 else "all of it"
    trip_s = settings.late_s + SHORT_TRIP_S
    slow = (
        [f"a round trip takes {trip_s:g} s here, so the demo takes longer than usual"]
        if settings.late_s
        else []
    )
    clients = counted(settings.clients, "client")
    victim, again = settings.victim, "is launched again"
    if settings.ranks > 1:
        clients += f" of {settings.ranks} ranks"
        victim, again = f"a rank of {victim}", "is started again by torchrun"
    return [
        f"a parameter server and {clients}, each a process of its own, {where}",
        f"train a GPT of {settings.preset} parameters on {what}, each client on {own}",
        (
            f"every {settings.every_s:g} s they send deltas, as {settings.format},"
            " and get the merged weights"
        ),
        (f"after {settings.kill_after_s:.0f} s {victim} gets SIGKILL, {again} and has to catch up"),
        *slow,
        f"the last round is at {settings.seconds:g} s; files and logs: {settings.run_dir}",
        "",
    ]
