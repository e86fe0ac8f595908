"""`fsl-node demo`: run a parameter server and clients here, and kill and restart a client."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from fsl_async.commands.client import check_base, check_corpus, check_data
from fsl_async.commands.options import Finite, Preset, Whole
from fsl_async.commands.output import Output
from fsl_async.config.settings_tuning import AdapterRuleName
from fsl_async.errors import ExitCode, UsageError
from fsl_async.roles.split.methods import names_of
from fsl_async.tools.clone import need_benchmarks
from fsl_async.tools.demo.run_dir import make_run_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fsl_async.observe.table import View
    from fsl_async.process.stopper import Stopper
    from fsl_async.tools.demo.scenario import Choices, Places, Played, Scenario

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
"""Each is a function of its name, in a module of its name in `tools/demo`."""


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
    "--format", default="uniform", show_default=True,
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
    run_dir: Path | None,
    dry_run: bool,
    net: str | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Show a whole run on this machine: real processes, real sockets, real training.

    A parameter server and its clients train a small GPT, or with `lora` adapters of a small Llama.
    One client gets SIGKILL, is launched again and catches up; with `fsdp` each client is two ranks
    that train one sharded model, and one rank gets it. With `groups` three parameter servers with
    clients of their own average now and then, and two of the servers get SIGKILL in a reduction.
    The exit code is 0 when all came back and no acknowledged delta was lost or merged twice, else
    1.
    """
    import asyncio

    from attrs import evolve

    from fsl_async.config.load import load, resolved, to_dict, to_toml
    from fsl_async.process.stopper import Stopper, stop_on_signals
    from fsl_async.tools.demo.scenario import overrides

    output = Output(as_json=as_json, waits=False)
    chosen = _chosen(what, net, **given)
    scenario = _scenario(what, chosen)
    # Bad settings or data raise here, before any process is started.
    config = resolved(load(None, overrides(scenario.settings), _OPTIONS))
    scenario.check()
    check_corpus(config, _OPTIONS)
    if dry_run:
        if as_json:
            output.result(to_dict(config))
        else:
            output.say(*to_toml(config, comments=False).rstrip().split("\n"))
        return 0
    chosen = evolve(chosen, run_dir=make_run_dir(run_dir, output.say))
    stopper = Stopper()
    with stop_on_signals(stopper):
        with _network(net, scenario, output) as places:
            scenario = _scenario(what, evolve(chosen, places=places))
            output.say(*scenario.introduction)
            scenario.prepare()
            # In the main thread: on Linux children die with the thread that launched them.
            played = asyncio.run(_played(scenario, stopper, output))
        if stopper.requested:
            text = f"the demo was ended by {stopper.reason}; its files are in {chosen.run_dir}"
            raise stopper.error(text)
        found = scenario.conclude(played)
    output.say("", *found.lines)
    for problem in found.problems:
        output.warn(problem)
    if as_json:
        output.result(found.summary)
    return int(ExitCode.BUG) if found.problems else 0


def _chosen(
    what: str, net: str | None, *, data: tuple[str, ...], base: Path | None, **given: Any
) -> Choices:
    """The options as choices. Raises UsageError for those that this demo does not take."""
    from fsl_async.tools.demo.scenario import Choices

    if net is not None:
        need_benchmarks("--net")
    if given["links"] and (net is not None or what != "pretrain"):
        raise UsageError(
            "--links is for a demo on this machine without --net, where links can be cut anyway,"
            " and not for demo split, demo lora and demo groups"
        )
    if what == "groups" and net is not None:
        raise UsageError("--net is not for demo groups, whose servers meet on this machine")
    if what != "lora" and len(data) > 1:
        raise UsageError(f"--data is given {len(data)} times, and demo {what} takes one text")
    if what != "lora" and base is not None:
        raise UsageError("--base is for demo lora")
    late_s = _late_s(net)
    if net is not None:
        from netlab.laboratory import which

        which()
    return Choices(
        data=tuple(str(check_data(path)) for path in data),
        base="" if base is None else str(check_base(base)),
        late_s=late_s,
        **{name: value for name, value in given.items() if value is not None},
    )


def _scenario(what: str, chosen: Choices) -> Scenario:
    """The demo of that name, with the user's choices."""
    from importlib import import_module

    made: Scenario = getattr(import_module(f"fsl_async.tools.demo.{what}"), what)(chosen)
    return made


async def _played(scenario: Scenario, stopper: Stopper, output: Output) -> Played:
    """Play it, with a live view of its one server, or lines of several."""
    from fsl_async.observe.table import open_view
    from fsl_async.tools.demo.runner import Runner

    def opened() -> View:
        ends_at = None if scenario.ends_at_s is None else time.time() + scenario.ends_at_s
        return open_view(output, ends_at=ends_at, has_table=len(scenario.servers) == 1)

    return await Runner(scenario, stopper, output.say, opened).play()


def _late_s(net: str | None) -> float:
    """A profile's round trip beyond `SHORT_TRIP_S`, in seconds. Raises UsageError."""
    from fsl_async.tools.demo.pretrain import SHORT_TRIP_S

    if net is None:
        return 0.0
    from netlab import profiles

    return max(0.0, round(2e-3 * profiles.profile(net).delay_ms - SHORT_TRIP_S, 3))


@contextmanager
def _network(net: str | None, scenario: Scenario, output: Output) -> Iterator[Places]:
    """Open the places of the nodes. Raises FslError without a laboratory."""
    from fsl_async.tools.demo.scenario import HERE, places_in

    if net is None:
        yield HERE
        return
    from netlab import profiles
    from netlab.laboratory import Laboratory

    with Laboratory([node.name for node in scenario.nodes], profile=net) as lab:
        words = profiles.words(profiles.profile(net))
        output.say(f"network laboratory ({lab.backend}), {net}: {words}")
        yield places_in(lab)
