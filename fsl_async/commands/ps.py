"""`fsl-node --role ps`: run the parameter server and print the command for each client."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

from fsl_async.commands.client import check_base, check_corpus, check_data, check_task
from fsl_async.commands.output import Output
from fsl_async.config import address as addresses
from fsl_async.errors import ConfigError, UsageError, program
from fsl_async.process.memory import keep_freed_blocks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fsl_async.cluster.restarts import Launching
    from fsl_async.commands.node import NodeOptions
    from fsl_async.config.settings import Config
    from fsl_async.keys.folder import KeysFolder


Chosen = dict[str, tuple[str, str | int | None]]
"""Settings that options stand for: key -> (option, value); None: it is not given."""


def command(options: NodeOptions) -> int:
    """Resolve the configuration, then run the parameter server; returns the exit code."""
    from fsl_async.config.load import resolved
    from fsl_async.config.recipes import planned_rounds, with_implied
    from fsl_async.config.settings import MANY_ROUNDS
    from fsl_async.config.unused import line_of
    from fsl_async.nodes.ps.own_rules import with_base_rule
    from fsl_async.process.stopper import Stopper, stop_on_signals

    if options.upstream is not None:
        return _relay_sums(options, options.upstream)
    overrides, base = options.overrides, options.base
    chosen: Chosen = {"train.task": ("--task", check_task(options.task) if options.task else None)}
    if options.tokenizer is not None:
        from fsl_async.learn.data.tokenizer import facts_of

        found_facts = facts_of(options.tokenizer)
        chosen["model.tokenizer"] = "--tokenizer", found_facts.digest
        chosen["model.vocabulary"] = "--tokenizer", found_facts.vocabulary
    if base is not None:
        chosen["tune.base"] = "--base", str(check_base(base))
        if not any(one.startswith("tune.method") for one in overrides):
            overrides = ("tune.method=lora", *overrides)
    loaded, names = load_config(options, overrides, chosen)
    loaded = with_base_rule(loaded)
    filled = resolved(loaded)
    unused = line_of(loaded, overrides)
    check_corpus(filled, names)
    launchers = options.launchers
    launching = _read_launching(launchers) if launchers is not None else None
    listen = names.get("listen.address", "listen.address"), filled.listen.address
    found = listening_keys([listen], options, filled)
    output = Output(as_json=options.as_json, waits=False)
    if unused:
        output.warn(unused)
    if options.dry_run:
        own = "" if loaded.train.threads else "  # this machine's; each client counts its own"
        print_config(output, with_implied(filled), own)
        return 0
    rounds = planned_rounds(with_implied(filled))
    if rounds is not None and rounds < MANY_ROUNDS:
        output.warn(
            f"this run has about {rounds:.0f} rounds; a run should have {MANY_ROUNDS} and more, or"
            " its model is worse than need be: divide the same training into more rounds, or train"
            " longer"
        )
    keep_freed_blocks()
    from fsl_async.nodes.ps.node import serve

    stopper = Stopper()
    with stop_on_signals(stopper):
        summary = serve(
            loaded,
            loaded.run_dir,
            from_version=options.from_version,
            announce=_announcing(output, loaded, "" if found is None else found.pair().public),
            log=output.note,
            stop=stopper,
            record=output.record if output.as_json else None,
            launching=launching,
            keys=found,
        )
    output.result(summary)
    return stopper.exit_code


def _relay_sums(options: NodeOptions, upstream: str) -> int:
    """Serve a cell, and be a client of the server upstream; returns the exit code."""
    from fsl_async.cluster.name_slot import check_name
    from fsl_async.config.settings import ListenConfig
    from fsl_async.keys.dialling import keys_for_dialling
    from fsl_async.keys.folder import KeysFolder, site_policy
    from fsl_async.nodes.client.parts import ClientOptions
    from fsl_async.nodes.ps.node import serve
    from fsl_async.nodes.ps.upstream import UpstreamClient
    from fsl_async.process.stopper import Stopper, stop_on_signals

    refused = {"--config": options.config, "--task": options.task, "--base": options.base}
    refused |= {"--tokenizer": options.tokenizer, "--data": options.data}
    for name, value in refused.items():
        if value is not None:
            raise UsageError(f"{name} does not go with --upstream: the run there decides")
    if options.name is None:
        raise UsageError("--upstream: name this cell in the run there, like --name cell-a")
    listen = addresses.parse_listen(options.address or ListenConfig().address).tcp
    server = addresses.parse(upstream)
    own = [f"listen.address={listen}", *options.overrides]
    if options.run_dir is not None:
        own.append(f"run.directory={json.dumps(str(options.run_dir))}")
    if options.insecure:
        own.append("listen.insecure=true")
    dialled = keys_for_dialling(server, options.keys, insecure=options.insecure)
    site = ClientOptions(
        server.fsl if server.key else server.tcp,
        check_name(options.name),
        keys=dialled,
        policy=site_policy(dialled or KeysFolder(), None),
    )
    output, stopper, cell_stop = Output(as_json=options.as_json, waits=False), Stopper(), Stopper()
    with stop_on_signals(stopper):
        client = UpstreamClient(site, stop=stopper, log=output.note)
        try:
            config = client.wait_config(own)
            found = listening_keys([("LISTEN_ADDRESS", listen)], options, config)
            client.follow(cell_stop)
            summary = serve(
                config,
                config.run_dir,
                announce=_announcing(output, config, "" if found is None else found.pair().public),
                log=output.note,
                stop=cell_stop,
                record=output.record if output.as_json else None,
                keys=found,
                upstream=client.training,
            )
        finally:
            client.close()
    output.result(summary)
    client.raise_failure()
    return stopper.exit_code


def load_config(
    options: NodeOptions, overrides: tuple[str, ...], more: Chosen
) -> tuple[Config, dict[str, str]]:
    """Read the configuration of a server, and its options that stand for settings.

    more: what only this role takes. Returns the options' names by setting, too. Raises FslError.
    """
    from fsl_async.config.load import load

    listen, data, run_dir = options.address, options.data, options.run_dir
    chosen: Chosen = {
        "listen.address": (
            "LISTEN_ADDRESS",
            addresses.parse_listen(listen).tcp if listen else None,
        ),
        "run.name": ("--name", options.name),
        "run.directory": ("--run-dir", str(run_dir) if run_dir else None),
        "data.path": ("--data", check_data(data) if data else None),
        "listen.insecure": ("--insecure", options.insecure or None),
        **more,
    }
    given = {key: found for key, found in chosen.items() if found[1] is not None}
    names = {key: option for key, (option, _) in given.items()}
    # A JSON string is a TOML string.
    shorter = [
        f"{key}={json.dumps(value, ensure_ascii=False)}" for key, (_, value) in given.items()
    ]
    return load(options.config, [*overrides, *shorter], names), names


def print_config(output: Output, config: Config, threads: str = "") -> None:
    """Print a resolved configuration. threads: added to the line of train.threads."""
    from attrs import asdict

    from fsl_async.config.load import to_toml

    line = f"threads = {config.train.threads}\n"
    text = to_toml(config, comments=False).rstrip()
    output.answer(asdict(config), *text.replace(line, f"{line[:-1]}{threads}\n").split("\n"))


def listening_keys(
    listens: list[tuple[str, str]], options: NodeOptions, config: Config
) -> KeysFolder | None:
    """The keys folder of a server; None without encryption.

    listens: (setting, address) of its listeners. Raises FslError.
    """
    from fsl_async.keys.access_control import keys_for_listening

    if options.keys is not None and options.insecure:
        raise UsageError("--keys asks for encryption and --insecure for none: give one of them")
    return keys_for_listening(listens, options.keys, insecure=config.listen.insecure)


def _read_launching(path: Path) -> Launching:
    """Read a launch file; raises ConfigError."""
    from fsl_async.cluster.restarts import read_launching

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text"
        raise ConfigError(f"--launchers {path}: {why}") from None
    return read_launching(text, str(path))


def client_options(config: Config) -> str:
    """The options that every client of the run needs, each followed by a space."""
    from fsl_async.config.rules import is_own
    from fsl_async.config.site_policy import DELTAS, listed, needs_of

    own = {
        "--task": is_own(config.train.task),
        "--model": is_own(config.model.family),
        "--auxiliary": is_own(config.split.auxiliary),
    }
    options = [f"{option} FILE.py:FUNCTION" for option, is_needed in own.items() if is_needed]
    if config.tune.is_on:
        options.append("--base MODEL")
    if not config.train.task and (config.data.source == "site" or config.tune.is_on):
        options.append("--data PATH")
    if config.model.tokenizer:
        options.append("--tokenizer PATH")
    needed = needs_of(config)
    if set(needed) != {DELTAS}:
        options.append(f"--allow {listed(needed)}")
    return "".join(f"{option} " for option in options)


def join_line(config: Config, bound: str, public: str) -> str:
    """The command of each client of the parameter server at `bound`, with its public key."""
    listening = addresses.parse_listen(bound)
    reach = addresses.reachable_host(listening.host)
    server = shlex.quote(addresses.Address(reach, listening.port, public).fsl)
    return f"{program()} --role client --name SITE {client_options(config)}{server}"


def evaluator_line(config: Config, bound: str, public: str) -> str:
    """The command of the run's evaluator: it has other records, and lets out losses alone."""
    from fsl_async.config.site_policy import listed, needs_of

    name = f"--evaluate --name {shlex.quote(config.guard.evaluator)}"
    line = join_line(config, bound, public)
    if not config.tune.is_on and "--task" not in line:  # the built-in one is for fine-tuning
        name += " --task FILE.py:FUNCTION"
    for text, other in (
        ("--name SITE", name),
        ("--data PATH", "--data PROBE"),
        (f"--allow {listed(needs_of(config))} ", ""),
    ):
        line = line.replace(text, other)
    return line


def _announcing(output: Output, config: Config, public: str) -> Callable[[str], None]:
    """A function that prints the address at which clients can connect, and their command."""

    def announce(bound: str) -> None:
        line = join_line(config, bound, public)
        run_dir = config.run_dir
        output.record("listening", address=bound, join=line, run_dir=str(run_dir))
        said = [f"listening at {bound}, run directory {run_dir}", "on each client:", f"    {line}"]
        if config.guard.evaluator:
            said += ["on its evaluator:", f"    {evaluator_line(config, bound, public)}"]
        output.say(*said)

    return announce
