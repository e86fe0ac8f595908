"""`fsl-node demo`: run a parameter server and clients here, and kill and restart a client."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click
from attrs import asdict, evolve, fields_dict

from fsl_async.commands.client import check_base, check_corpus, check_data
from fsl_async.commands.options import Finite, Options, Whole, Words, argument, option, takes
from fsl_async.commands.output import Output
from fsl_async.config.presets import SIZES
from fsl_async.config.settings_tuning import AdapterRuleName
from fsl_async.errors import ExitCode, UsageError, need_benchmarks
from fsl_async.roles.split.methods import names_of

if TYPE_CHECKING:
    from fsl_async.tools.demo.places import Places
    from fsl_async.tools.demo.scenario import Choices, Scenario

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


_WHAT = ["pretrain", "split", "lora", "align", "fsdp", "groups", "air"]
"""Each is a function of its name, in a module of its name in `tools/demo`."""


class DemoOptions(Options):
    """The options of `fsl-node demo`. Those of `Choices` have its fields' names."""

    what: str = argument(click.Choice(_WHAT), default="pretrain")
    data: tuple[str, ...] = option(
        "Train on this text; default: the source of Python's standard library. lora: a jsonl file"
        " of records, once for each client; default: the English of Python's help().",
        metavar="PATH",
    )
    seconds: float | None = option(
        "Call the last round this long after the start; the end takes some seconds more."
        " [default: 40; more with long round trips; lora, air: when their rounds are done]",
        Finite(10.0, 86_400.0),
    )
    clients: int | None = option("How many. [default: 3; lora: one for each --data]", Whole(1, 64))
    format: str = option(
        "Number format of deltas and updates.",
        click.Choice(["fp32", "bf16", "e4m3", "e5m2", "uniform"]), default="uniform",
    )  # fmt: skip
    every_s: float | None = option(
        "Seconds from one sync to the next. [default: 5; more with long round trips]",
        Finite(1.0, 3600.0), "SECONDS", name="--every",
    )  # fmt: skip
    seed: int = option("", Whole(0, 2**62), default=0)
    preset: str = option(
        "The model's size. [default: 0.5m; split: 8 blocks, 0.4m]", Words(*SIZES), default=""
    )
    run_dir: Path | None = option(
        "Where the run is kept; default: runs/demo-DATE-TIME.", metavar="DIR"
    )
    dry_run: bool = option("Print the configuration of the run, resolved, and exit.")
    net: str | None = option(
        "Run servers and clients in sites of a network laboratory with such links: lan, campus,"
        " transatlantic, dsl, wireless, satellite; or with changes: dsl:up=2mbit:down=50mbit. Needs"
        " root and a clone; docs/netlab.md.",
        metavar="PROFILE[:KEY=VALUE...]",
    )
    links: bool = option("Put each client behind a proxy that `chaos` can cut; not with --net.")
    rounds: int = option("split, lora, align, air: rounds to train.", Whole(3, 10**6), default=12)
    method: str = option(
        "split: how to train.",
        click.Choice(names_of(lambda method: method.has_server)), default="fsl-sage",
    )  # fmt: skip
    base: Path | None = option(
        "lora: the model to tune; default: a small one that the demo makes.", metavar="MODEL_DIR"
    )
    rule: str = option(
        "lora: how adapters are merged.", click.Choice(get_args(AdapterRuleName)), default="fedit"
    )
    rank: int | None = option("lora: of the adapters. [default: 8; bank: 16]", Whole(1, 4096))
    as_json: bool = option("Print JSON objects, the result last.", name="--json")


@click.command("demo")
@takes(DemoOptions)
def command(options: DemoOptions) -> int:
    """Show a whole run on this machine: real processes, real sockets, real training.

    A parameter server and its clients train a small GPT, or with `lora` adapters of a small Llama.
    One client gets SIGKILL, is launched again and catches up; with `fsdp` each client is two ranks
    that train one sharded model, and one rank gets it. With `groups` three parameter servers with
    clients of their own average now and then, and two of the servers get SIGKILL in a reduction.
    The exit code is 0 when all came back and no acknowledged delta was lost or merged twice, else
    1.
    """
    import asyncio

    from fsl_async.config.load import load, resolved, to_toml
    from fsl_async.observe.table import show_news
    from fsl_async.process.stopper import Stopper, stop_on_signals
    from fsl_async.tools.demo.runner import Runner, make_run_dir
    from fsl_async.tools.demo.scenario import Stage, overrides

    what = options.what
    output = Output(as_json=options.as_json, waits=False)
    chosen = _chosen(options)
    scenario = _scenario(what, chosen)
    # Bad settings or data raise here, before any process is started.
    config = resolved(load(None, overrides(scenario.settings), _OPTIONS))
    scenario.check()
    check_corpus(config, _OPTIONS)
    if options.dry_run:
        output.answer(asdict(config), *to_toml(config, comments=False).rstrip().split("\n"))
        return 0
    chosen = evolve(chosen, run_dir=make_run_dir(options.run_dir, output.say))
    note = f"; its files are in {chosen.run_dir}"
    stage = Stage(output.say, Stopper(), what="demo", note=note)
    with stop_on_signals(stage.stop):
        with closing(_places(options, chosen, scenario, output)) as places:
            scenario = _scenario(what, evolve(chosen, places=places))
            output.say(*scenario.introduction)
            scenario.prepare(stage)
            # In the main thread: on Linux children die with the thread that launched them.
            show = partial(show_news, output)
            played = asyncio.run(Runner(scenario, stage, show).play())
        stage.check()
        found = scenario.conclude(played, stage)
    output.say("", *found.lines)
    for problem in found.problems:
        output.warn(problem)
    if options.as_json:
        output.result(found.summary)
    return int(ExitCode.BUG) if found.problems else 0


def _chosen(options: DemoOptions) -> Choices:
    """The options as choices. Raises UsageError for those that this demo does not take."""
    from fsl_async.tools.demo.scenario import Choices

    what, net, data, base = options.what, options.net, options.data, options.base
    if net is not None:
        need_benchmarks("--net")
    if options.links and (net is not None or what != "pretrain"):
        raise UsageError(
            "--links is for a demo on this machine without --net, where links can be cut anyway,"
            " and not for the other demos"
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
    named = fields_dict(Choices).keys() - {"run_dir"}
    given = {name: value for name, value in vars(options).items() if name in named}
    given["data"] = tuple(str(check_data(path)) for path in data)
    given["base"] = None if base is None else str(check_base(base))
    given = {name: value for name, value in given.items() if value is not None}
    return Choices(late_s=late_s, **given)


def _scenario(what: str, chosen: Choices) -> Scenario:
    """The demo of that name, with the user's choices."""
    from importlib import import_module

    made: Scenario = getattr(import_module(f"fsl_async.tools.demo.{what}"), what)(chosen)
    return made


def _late_s(net: str | None) -> float:
    """A profile's round trip beyond `SHORT_TRIP_S`, in seconds. Raises UsageError."""
    from fsl_async.tools.demo.pretrain import SHORT_TRIP_S

    if net is None:
        return 0.0
    from netlab import profiles

    return max(0.0, round(2e-3 * profiles.profile(net).delay_ms - SHORT_TRIP_S, 3))


def _places(options: DemoOptions, chosen: Choices, scenario: Scenario, output: Output) -> Places:
    """Open the places of the nodes. Raises FslError without a laboratory."""
    from fsl_async.tools.chaos.targets import FOLDER
    from fsl_async.tools.demo.places import Linked, Places, Sites

    net = options.net
    if options.links:
        return Linked(chosen.run_dir / FOLDER)
    if net is None:
        return Places()
    from netlab import profiles

    places = Sites.opened(net, scenario.names)
    words = profiles.words(profiles.profile(net))
    output.say(f"network laboratory ({places.lab.backend}), {net}: {words}")
    return places
