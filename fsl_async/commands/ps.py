"""`fsl-node --role ps`: run the parameter server and print the command for each client."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from fsl_async.commands.client import check_base, check_corpus, check_data, check_task
from fsl_async.commands.options import overrides_of
from fsl_async.commands.output import Output
from fsl_async.config import address as addresses
from fsl_async.errors import ConfigError, UsageError
from fsl_async.process.heap import keep_freed_blocks
from fsl_async.process.program import program

if TYPE_CHECKING:
    from pathlib import Path

    from fsl_async.cluster.launch_file import Launching
    from fsl_async.config.load import Config
    from fsl_async.keys.folder import KeysFolder
    from fsl_async.process.stopper import Stopper


FEW_ROUNDS = 60
"""Below it the model is clearly worse than trained in one place (docs/QUALITY.md)."""


def command(
    *,
    address: str | None,
    config: Path | None,
    overrides: tuple[str, ...],
    name: str | None,
    data: str | None,
    task: str | None,
    tokenizer: str | None = None,
    base: Path | None = None,
    run_dir: Path | None,
    from_version: int | None,
    threads: int | None,
    launchers: Path | None,
    insecure: bool,
    keys: Path | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Resolve the configuration, then run the parameter server; returns the exit code."""
    from fsl_async.config.implied import with_implied
    from fsl_async.config.load import load, resolved, to_dict, to_toml
    from fsl_async.config.unused import line_of
    from fsl_async.process.stopper import Stopper, stop_on_signals

    if threads is not None:
        raise UsageError(
            "--threads is a client's; here --set train.threads=N is for every client of the run"
        )
    chosen: dict[str, tuple[str, str | int | None]] = {
        "listen.address": (
            "LISTEN_ADDRESS",
            addresses.parse_listen(address).tcp if address else None,
        ),
        "run.name": ("--name", name),
        "run.directory": ("--run-dir", str(run_dir) if run_dir else None),
        "data.path": ("--data", check_data(data) if data else None),
        "train.task": ("--task", check_task(task) if task else None),
        "listen.insecure": ("--insecure", True if insecure else None),
    }
    if tokenizer is not None:
        from fsl_async.learn.data.tokenizer import facts_of

        found_facts = facts_of(tokenizer)
        chosen["model.tokenizer"] = "--tokenizer", found_facts.digest
        chosen["model.vocabulary"] = "--tokenizer", found_facts.vocabulary
    if base is not None:
        chosen["tune.base"] = "--base", str(check_base(base))
        if not any(one.startswith("tune.method") for one in overrides):
            overrides = ("tune.method=lora", *overrides)
    shorter, options = overrides_of(chosen)
    loaded = load(config, [*overrides, *shorter], options)
    filled = resolved(loaded)
    unused = line_of(loaded, overrides)
    _check_tokenizer(filled)
    check_corpus(filled, options)
    launching = _read_launching(launchers) if launchers is not None else None
    listen = filled.listen
    found = listening_keys(
        [(options.get("listen.address", "listen.address"), listen.address)],
        keys,
        insecure=listen.insecure,
        insecure_option=insecure,
    )
    output = Output(as_json=as_json, waits=False)
    if unused:
        output.warn(unused)
    if dry_run:
        complete = with_implied(filled)
        if as_json:
            output.result(to_dict(complete))
        else:
            lines = to_toml(complete, comments=False).rstrip()
            if not loaded.train.threads:
                line = f"threads = {filled.train.threads}\n"
                lines = lines.replace(
                    line, f"{line[:-1]}  # this machine's; each client counts its own\n"
                )
            output.say(*lines.split("\n"))
        return 0
    rounds = planned_rounds(with_implied(filled))
    if rounds is not None and rounds < FEW_ROUNDS:
        output.warn(
            f"this run has about {rounds:.0f} rounds; a run should have {FEW_ROUNDS} and more, or"
            " its model is worse than need be: divide the same training into more rounds, or train"
            " longer"
        )
    keep_freed_blocks()
    stopper = Stopper()
    with stop_on_signals(stopper):
        summary = run_ps(
            loaded,
            loaded.run_dir,
            from_version=from_version,
            stop=stopper,
            output=output,
            launching=launching,
            keys=found,
        )
    output.result(summary)
    return stopper.exit_code


def _check_tokenizer(config: Config) -> None:
    """Raise ConfigError for a tokenizer in a run that does not train the built-in GPT whole."""
    if config.model.tokenizer and (config.split.is_on or config.tune.is_on or config.train.task):
        raise ConfigError(
            "--tokenizer (model.tokenizer) is of the built-in pretraining: leave it out with"
            " --task, --base or split.method",
            "model.tokenizer",
        )


def planned_rounds(config: Config) -> float | None:
    """Rounds of a pretraining run by its limits; None where they set none, and for other runs."""
    run, sync = config.run, config.sync
    if config.split.is_on or config.tune.is_on:
        return None
    parts = [float(run.rounds)] if run.rounds else []
    if run.seconds and sync.trigger == "clock":
        parts.append(run.seconds / sync.every_s)
    return min(parts) if parts else None


def listening_keys(
    listens: list[tuple[str, str]], keys: Path | None, *, insecure: bool, insecure_option: bool
) -> KeysFolder | None:
    """The keys folder of a parameter server; None without encryption.

    listens: (setting, address) of its listeners. insecure: by any setting.
    insecure_option: by --insecure. Raises FslError.
    """
    from fsl_async.keys.access_control import keys_for_listening

    if keys is not None and insecure_option:
        raise UsageError("--keys asks for encryption and --insecure for none: give one of them")
    return keys_for_listening(listens, keys, insecure=insecure)


def _read_launching(path: Path) -> Launching:
    """Read a launch file; raises ConfigError."""
    from fsl_async.cluster.launch_file import read_launching

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


def run_ps(
    config: Config,
    run_dir: Path,
    *,
    from_version: int | None,
    stop: Stopper,
    output: Output,
    launching: Launching | None = None,
    keys: KeysFolder | None = None,
) -> Any:
    """Serve the run until it ends or `stop` is requested; returns the summary."""
    from fsl_async.nodes.ps.node import serve

    public = "" if keys is None else keys.pair().public

    def announce(bound: str) -> None:
        listening = addresses.parse_listen(bound)
        reach = addresses.reachable_host(listening.host)
        server = shlex.quote(addresses.Address(reach, listening.port, public).fsl)
        node = f"{program()} --role client"
        line = f"{node} --name SITE {client_options(config)}{server}"
        output.record("listening", address=bound, join=line, run_dir=str(run_dir))
        output.say(
            f"listening at {bound}, run directory {run_dir}", "on each client:", f"    {line}"
        )

    def log(text: str) -> None:
        if output.as_json:
            output.record("note", text=text)
        else:
            output.say(text)

    return serve(
        config,
        run_dir,
        from_version=from_version,
        announce=announce,
        log=log,
        stop=stop,
        record=output.record if output.as_json else None,
        launching=launching,
        keys=keys,
    )
