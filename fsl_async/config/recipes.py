"""Recipes: which settings go together, as one table; and what a kind of run implies. Pure.

`check` and the comments of `fsl-node init` read it, and the table of docs/ASYNCHRONOUS.md is made
of it. A row is a kind of run: when it holds, why it limits settings, and the values that it leaves
them. A run may be of several kinds. Settings that no row names are free. How many clients an
aggregation needs is in `fsl_async.nodes.ps.aggregation`. Below are the checks of the addresses of a
run's servers: its split server's, and those of groups.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from attrs import field, frozen

from fsl_async.config.address import parse_announced, parse_listen
from fsl_async.config.rules import LANGUAGE_FAMILIES, OWN, is_own, show
from fsl_async.config.settings import FINE_STEP, MANY_ROUNDS, SHORT_STEP, Config, GuardConfig
from fsl_async.config.settings_tuning import (
    BASIS_RULES,
    PRIVATE_RULES,
    PRODUCT_RULES,
    SUM_RULES,
)
from fsl_async.errors import ConfigError
from fsl_async.roles.split.methods import method_of

MOST_MOMENTUM = 0.5
"""The largest outer momentum in a run whose versions are made of few deltas each."""


@frozen
class Only:
    """The values that a setting may have, and what to do about others; by default, choose one.

    others: the setting may have any value but these. `OWN` stands for all file.py:Class.
    """

    values: tuple[Any, ...]
    advice: str = ""
    others: bool = field(default=False, kw_only=True)

    @property
    def shown(self) -> str:
        """The values, as the page and the comments of a configuration file show them."""
        values = ", ".join(f"`{plain(one)}`" for one in self.values).replace(OWN, "yours")
        return f"{'other than ' if self.others else ''}{values or 'smaller'}"

    def allows(self, value: Any) -> bool:
        """Whether the setting may have this value."""
        plain = OWN if isinstance(value, str) and is_own(value) else value
        return (plain in self.values) != self.others


@frozen
class Recipe:
    """A kind of run. why: begins with what makes it one; {x} is the setting of that name."""

    name: str
    holds: Callable[[Config], bool]
    why: str
    settings: Mapping[str, Only]


def _is_partial(config: Config) -> bool:
    """Whether a version may be of fewer deltas than there are clients."""
    return config.sync.trigger == "buffer" and config.sync.buffer_size < config.sync.clients


def keeps_no_momentum(config: Config) -> bool:
    """Whether "growing" stands for no momentum: it would move with each version of few clients.

    Nor do adapters have any, unless outer.optimizer = nesterov asks for it.
    """
    return config.tune.is_on or _is_partial(config) or config.outer.aggregation == "latest"


def _is_language(config: Config) -> bool:
    return config.split.is_on and config.model.family in LANGUAGE_FAMILIES


def _tunes(config: Config, rules: tuple[str, ...]) -> bool:
    return config.tune.method == "lora" and config.tune.rule in rules


_LEFT_OUT = "leave it out, or choose buffer"
_DEFAULTS = {"buffer": 0, "local_steps": 0, "pace": "run"}
_UNUSED = {f"sync.{key}": Only((value,), _LEFT_OUT) for key, value in _DEFAULTS.items()}
_ROUNDS = {
    "sync.trigger": Only(("rounds",), "leave it out"),
    "outer.optimizer": Only(("average",), "choose average: momentum would refer to other rounds"),
}

RECIPES: tuple[Recipe, ...] = (
    Recipe("pretraining by the built-in task",
           lambda c: not (c.tune.is_on or c.split.is_on or c.train.task),
           "needs a split.method: the built-in task of pretraining trains gpt", {
        "model.family": Only(("gpt",)),
    }),
    Recipe("a tokenizer (`--tokenizer`)", lambda c: bool(c.model.tokenizer),
           "--tokenizer (model.tokenizer) is of the built-in pretraining", {
        "split.method": Only(("none",), "leave out --tokenizer"),
        "tune.method": Only(("none",), "leave out --tokenizer"),
        "train.task": Only(("",), "leave out --tokenizer"),
    }),
    Recipe("clients are called: `clock`, `rounds`, `turns`, `sequential`",
           lambda c: c.sync.trigger != "buffer",
           "is for sync.trigger = buffer, and sync.trigger is {sync.trigger}", _UNUSED),
    Recipe("`sequential`", lambda c: c.sync.trigger == "sequential",
           "compares clients, and sync.trigger = sequential merges one at a time", {
        "outer.aggregation": Only(("mean",)),
    }),
    Recipe("`buffer` of fewer deltas than clients, and a momentum above 0.5",
           lambda c: _is_partial(c) and c.outer.momentum > MOST_MOMENTUM,
           "moves a momentum of {outer.momentum:g} with every {sync.buffer_size} deltas of"
           " {sync.clients} clients, which diverges", {
        "outer.optimizer": Only(("growing", "average", OWN),
                                f"choose average, or outer.momentum <= {MOST_MOMENTUM:g}"),
    }),
    Recipe("`sync.pace = own`", lambda c: c.sync.pace == "own",
           "with sync.pace = own each task calls fed.send when it likes", {
        "sync.local_steps": Only((0,), "leave out one of them"),
    }),
    Recipe("`sync.pace = own`, and no fine-tuning",
           lambda c: c.sync.pace == "own" and not c.tune.is_on,
           "with sync.pace = own each task calls fed.send when it likes", {
        "train.task": Only(("",), "which the built-in one does not: set train.task = own,"
                           " or sync.pace = run", others=True),
    }),
    Recipe("`sync.pace = speed`", lambda c: c.sync.pace == "speed",
           "is what sync.pace = speed divides by speed", {
        "sync.local_steps": Only((0,), "set sync.local_steps", others=True),
    }),
    Recipe("`latest`", lambda c: c.outer.aggregation == "latest",
           "outer.aggregation = latest uses the deltas of earlier versions again", {
        "sync.trigger": Only(("buffer",)),
        "sync.weighting": Only(("auto", "anarchic"),
                               "choose auto: a client's newest delta counts by its mean step"),
        "tune.method": Only(("none", "lora"), "choose lora"),
    }),
    Recipe("`latest` and momentum",
           lambda c: c.outer.aggregation == "latest" and c.outer.momentum > 0,
           "outer.aggregation = latest uses the deltas of earlier versions again", {
        "outer.optimizer": Only(("average",), "choose average: momentum would add up each use"),
    }),
    Recipe("an evaluator (`guard.evaluator`)", lambda c: bool(c.guard.evaluator),
           "guard.evaluator tries the deltas of a round, one by one", {
        "sync.trigger": Only(("rounds",)),
        "split.method": Only(("none",), "remove guard.evaluator"),
        "tune.method": Only(("none", "lora"), "remove guard.evaluator: scalars are not tried"),
    }),
    Recipe("groups (`groups.roster`)", lambda c: c.groups.is_on,
           "groups merge pretraining runs by the clock", {
        "split.method": Only(("none",), "remove groups.roster"),
        "tune.method": Only(("none",), "remove groups.roster"),
        "outer.channel": Only(("none",), "remove groups.roster"),
        "sync.trigger": Only(("clock",)),
    }),
    Recipe("split learning by rates that fall",
           lambda c: c.split.is_on and c.split.schedule != "constant",
           "split.schedule = {split.schedule} goes by the rounds of the run", {
        "run.rounds": Only((0,), "set run.rounds", others=True),
    }),
    Recipe("split learning on text", _is_language,
           "is for images, and model.family = {model.family} trains on text", {
        "data.flip": Only((False,)),
        "data.crop": Only((0,)),
    }),
    Recipe("full weights (`split.models = fp32`)", lambda c: c.split.sends_whole,
           "compares or adds up differences, and clients of this run send full weights", {
        "outer.aggregation": Only(("mean",), "set split.models to another format"),
        "outer.optimizer": Only(("average",)),
        "guard.clip_norm": Only((0,), "set split.models to another format"),
        "guard.outlier_median": Only((0,), "set split.models to another format"),
        "sync.weighting": Only(("batch", "arrivals"), "choose auto or tokens", others=True),
    }),
    Recipe("private fine-tuning (`tune.dp_epsilon`)", lambda c: c.tune.is_private,
           "tune.dp_epsilon is a budget for all rounds of the run", {
        "tune.method": Only(("lora",), "this one has no private training: choose lora"),
        "tune.rule": Only(PRIVATE_RULES, f"choose {' or '.join(PRIVATE_RULES)}, by which sites"
                          " train one factor of an adapter: noise on both is multiplied"),
        "run.rounds": Only((0,), "set run.rounds", others=True),
        "sync.trigger": Only(("rounds",), "tune.dp_epsilon needs rounds: leave it out"),
    }),
    Recipe("secure sums (`tune.secure`)", lambda c: c.tune.secure,
           "tune.secure shows the parameter server sums of three or more sites alone", {
        "tune.method": Only(("lora", "zeroth"), "choose lora or zeroth"),
        "tune.rule": Only(SUM_RULES, f"choose {', '.join(SUM_RULES)}"),
        "tune.merge": Only(("",), "leave it out"),
        "sync.trigger": Only(("rounds",), "leave it out"),
        "sync.weighting": Only(("uniform",), "leave it out: sites count equally"),
        "sync.clients": Only((0, 1, 2), "have at least three", others=True),
        "outer.aggregation": Only(("mean",), "choose mean"),
        "guard.clip_norm": Only((0,), "leave it out"),
        "guard.clip_median": Only((0,), "leave it out"),
        "guard.outlier_median": Only((0,), "leave it out"),
        "guard.evaluator": Only(("",), "leave it out"),
    }),
    Recipe("over the air (`outer.channel`)", lambda c: c.outer.channel != "none",
           "outer.channel = {outer.channel} delivers the sum of a round's deltas", {
        "sync.trigger": Only(("rounds",), "leave it out"),
        "outer.aggregation": Only(("mean",), "choose mean"),
        "tune.rule": Only(SUM_RULES, f"choose {', '.join(SUM_RULES)}"),
        "tune.merge": Only(("",), "leave it out"),
        "tune.secure": Only((False,), "leave out one of them"),
        "guard.evaluator": Only(("",), "leave it out"),
        "split.method": Only(("none",), "leave out one of them"),
    }),
    Recipe("fine-tuning (`tune.method`)", lambda c: c.tune.is_on,
           "a run tunes a base model or splits one", {
        "split.method": Only(("none",), "leave out tune.method or split.method"),
    }),
    Recipe("zeroth order (`tune.method = zeroth`)", lambda c: c.tune.method == "zeroth",
           "tune.method = zeroth needs rounds: scalars are of directions of one version", _ROUNDS),
    Recipe("rules of adapters by rounds: all but fedit and ffa",
           lambda c: c.tune.method == "lora" and c.tune.by_rounds,
           "tune.rule = {tune.rule} needs rounds", _ROUNDS),
    Recipe(f"rules that merge products: {', '.join(PRODUCT_RULES)}",
           lambda c: _tunes(c, PRODUCT_RULES),
           "tune.rule = {tune.rule} merges products of factors", {
        "outer.aggregation": Only(("mean",), "choose mean (others compare factors)"),
        "sync.max_staleness": Only((0,), "choose 0 (older versions have other bases)"),
        "sync.weighting": Only(("auto", "tokens", "uniform")),
    }),
)  # fmt: skip


def value_of(config: Config, key: str) -> Any:
    """Return a setting by its dotted key; of sync.max_staleness, what its default stands for."""
    table, _, name = key.partition(".")
    if key == "sync.max_staleness":
        return config.sync.staleness_limit
    return getattr(getattr(config, table), name)


def plain(value: Any) -> str:
    """Return a value as in TOML, texts without quotes."""
    return value if value and isinstance(value, str) else show(value)


def limits_of(key: str) -> list[str]:
    """Return a line for each kind of run that limits a setting."""
    limits = ((one.name, one.settings.get(key)) for one in RECIPES)
    return [f"only {only.shown} where: {name}" for name, only in limits if only is not None]


def check(config: Config) -> None:
    """Raise ConfigError, in one line, for the first setting that does not go with the kind of run.

    config: with what the kind of run implies.
    """
    for recipe in RECIPES:
        if not recipe.holds(config):
            continue
        for key, only in recipe.settings.items():
            value = value_of(config, key)
            if not only.allows(value):
                why = recipe.why.format(**attrs.asdict(config, recurse=False))
                advice = only.advice or f"choose {' or '.join(map(plain, only.values))}"
                raise ConfigError(f"{key}: {why}; {advice}, got {plain(value)}", key)
    if config.split.is_on:
        _check_trigger(config)


def _check_trigger(config: Config) -> None:
    """Raise ConfigError unless split learning has the trigger of its method and mode."""
    split, wanted = config.split, method_of(config.split).trigger
    if config.sync.trigger != wanted:
        raise ConfigError(
            f"sync.trigger is {config.sync.trigger}, and split.method = {split.method} in mode"
            f" {split.mode} needs {wanted}: leave it out",
            "sync.trigger",
        )


def planned_rounds(config: Config) -> float | None:
    """Rounds of a pretraining run by its limits; None where they set none, and for other runs."""
    run, sync = config.run, config.sync
    if config.split.is_on or config.tune.is_on:
        return None
    parts = [float(run.rounds)] if run.rounds else []
    if run.seconds and sync.trigger in {"clock", "auto"}:
        parts.append(run.seconds / sync.every_s)
    return min(parts) if parts else None


def usual_step(config: Config) -> float:
    """Return the step of uniform where none is set, in root mean squares of a block."""
    rounds = planned_rounds(config)
    if config.split.is_on or config.tune.is_on:
        return FINE_STEP
    return SHORT_STEP if rounds is not None and rounds < MANY_ROUNDS else 1.0


def keeps_error(config: Config) -> bool:
    """Whether clients keep what coding loses of a delta, and send it with the next.

    Full weights lose nothing that a later round lacks. What is kept of factors is of their basis,
    which some rules change with each version; and with rolora the factor that rests must be the
    same at all clients.
    """
    rule = config.tune.rule if config.tune.method == "lora" else None
    return not config.split.sends_whole and rule != "rolora" and rule not in BASIS_RULES


def with_implied(config: Config) -> Config:
    """Add the settings that the kind of run implies: trigger, plain average, staleness, coding.

    Raises ConfigError for settings that do not go together.
    """
    sync, changes = config.sync, dict[str, Any]()
    usual: Any = "clock" if config.outer.channel == "none" else "rounds"
    if config.tune.is_on:
        usual = "rounds"
        # Every site has data of its own.
        changes["data"] = attrs.evolve(config.data, sharding="local")
        if config.tune.by_rounds:
            sync = attrs.evolve(sync, max_staleness=0)
    elif config.split.is_on:
        usual, models = method_of(config.split).trigger, config.split.models
        changes["outer"] = attrs.evolve(config.outer, optimizer="average")
        changes["codec"] = attrs.evolve(config.codec, up=models, down=models)
    codec, step = changes.get("codec", config.codec), usual_step(config)
    changes["codec"] = attrs.evolve(
        codec, up_step=codec.up_step or step, down_step=codec.down_step or step
    )
    if config.split.sends_whole:
        # Norms of full weights are no lengths of changes.
        changes["guard"] = attrs.evolve(config.guard, clip_median=0.0)
    if config.tune.secure:
        if sync.weighting == "auto":
            sync = attrs.evolve(sync, weighting="uniform")
        if config.guard.clip_median == GuardConfig().clip_median:
            changes["guard"] = attrs.evolve(config.guard, clip_median=0.0)
    if sync.trigger == "auto":
        sync = attrs.evolve(sync, trigger=usual)
    if config.outer.optimizer == "growing" and keeps_no_momentum(config):
        changes["outer"] = attrs.evolve(config.outer, optimizer="average")
    made: Config = attrs.evolve(config, sync=sync, **changes)
    check(made)
    return made


def with_split_server(config: Config, key: str = "") -> Config:
    """Add the address of a split server in another process, from `split.listen`.

    key: this parameter server's public key; empty where it does not encrypt. Raises ConfigError
    where the split server listens at any free port, and where clients would come here encrypted and
    go there unencrypted.
    """
    split = config.split
    if not split.has_server:
        return config
    if split.server:
        address = parse_announced(split.server)
        if key and not address.key and not address.is_loopback and not config.listen.insecure:
            raise ConfigError(
                f"split.server: {split.server} has no key, so clients would reach the split server"
                " unencrypted; give the address that it prints, fsl://...?key=...",
                "split.server",
            )
        return config
    if parse_listen(split.listen).port == 0:
        raise ConfigError(
            "split.server is empty: say where clients reach the split server, which prints its"
            " address when it starts",
            "split.server",
        )
    at = split.listen if not key else attrs.evolve(parse_listen(split.listen), key=key).fsl
    return attrs.evolve(config, split=attrs.evolve(split, server=at))


def groups_host(config: Config) -> str:
    """The IP address at which the reduction listens. Raises ConfigError."""
    if config.groups.bind:
        return config.groups.bind
    host = parse_listen(config.listen.address).host
    host = "127.0.0.1" if host == "localhost" else host
    try:
        is_one = not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_one = False
    if not is_one:
        raise ConfigError(
            f"groups.bind: listen.address has no IP address of its own ({host}); set groups.bind to"
            " the address of this machine in the network of the other parameter servers",
            "groups.bind",
        )
    return host


def check_groups(config: Config) -> None:
    """Raise ConfigError, in one line, if this run cannot have groups as it is configured."""
    groups, name = config.groups, config.run.name
    if not groups.is_on:
        return
    servers = groups.servers
    if name not in servers:
        raise ConfigError(
            f"run.name: {name} is not in groups.roster ({', '.join(servers)}); say which one this"
            " is with --name",
            "run.name",
        )
    host = groups_host(config)
    address = ipaddress.ip_address(host)
    if address.is_global and not groups.insecure:
        raise ConfigError(
            f"groups.bind: {host} is a public address, and a reduction is neither encrypted nor"
            " authenticated: bind an address of a VPN or VPC, or accept it with groups.insecure",
            "groups.bind",
        )
