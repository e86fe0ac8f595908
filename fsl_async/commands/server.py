"""`fsl-node --role server`: run the split server, alone or with the parameter server."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from fsl_async.commands.client import check_corpus, check_data, check_task
from fsl_async.commands.options import overrides_of
from fsl_async.commands.output import Output
from fsl_async.commands.ps import client_options, listening_keys
from fsl_async.config import address as addresses
from fsl_async.errors import UsageError
from fsl_async.process.program import program

if TYPE_CHECKING:
    from pathlib import Path


def command(
    *,
    address: str | None,
    config: Path | None,
    overrides: tuple[str, ...],
    name: str | None,
    data: str | None,
    task: str | None,
    run_dir: Path | None,
    from_version: int | None,
    threads: int | None,
    model: str | None,
    auxiliary: str | None,
    insecure: bool,
    keys: Path | None,
    dry_run: bool,
    as_json: bool,
    with_ps: bool,
) -> int:
    """Resolve the configuration, then run the split server; returns the exit code.

    address: the parameter server's, with `with_ps`.
    """
    from fsl_async.config.implied import with_implied
    from fsl_async.config.load import load, resolved, to_dict, to_toml
    from fsl_async.config.unused import line_of
    from fsl_async.process.stopper import Stopper, stop_on_signals

    if task is not None:
        raise UsageError(
            "--task is a client's: a split server trains its part of the run's model"
            " (--model FILE.py:FUNCTION for your own)"
        )
    if not with_ps and (address is not None or from_version is not None):
        given = "LISTEN_ADDRESS" if address is not None else "--from-version"
        raise UsageError(
            f"{given} is the parameter server's: add --with-ps, or set split.listen with --set"
        )
    own_auxiliary = check_task(auxiliary, "--auxiliary") if auxiliary else None
    chosen: dict[str, tuple[str, str | int | None]] = {
        "listen.address": (
            "LISTEN_ADDRESS",
            addresses.parse_listen(address).tcp if address else None,
        ),
        "run.name": ("--name", name),
        "run.directory": ("--run-dir", str(run_dir) if run_dir else None),
        "data.path": ("--data", check_data(data) if data else None),
        "model.family": ("--model", check_task(model, "--model") if model else None),
        "split.auxiliary": ("--auxiliary", own_auxiliary),
        "train.threads": ("--threads", threads),
        "listen.insecure": ("--insecure", True if insecure else None),
    }
    shorter, options = overrides_of(chosen)
    read = load(config, [*overrides, *shorter], options)
    loaded = with_implied(read)
    check_corpus(resolved(loaded), options)
    output = Output(as_json=as_json, waits=False)
    unused = line_of(read, overrides)
    if unused:
        output.warn(unused)
    listens = [("split.listen", loaded.split.listen)]
    if with_ps:
        listens.append((options.get("listen.address", "listen.address"), loaded.listen.address))
    found = listening_keys(listens, keys, insecure=loaded.listen.insecure, insecure_option=insecure)
    if dry_run:
        filled = resolved(loaded)
        if as_json:
            output.result(to_dict(filled))
        else:
            output.say(*to_toml(filled, comments=False).rstrip().split("\n"))
        return 0
    from fsl_async.nodes.split_server.node import serve

    public = "" if found is None else found.pair().public

    def announce(role: str, bound: str) -> None:
        listening = addresses.parse_listen(bound)
        reach = addresses.reachable_host(listening.host)
        address = addresses.Address(reach, listening.port, public)
        join = ""
        if role == "ps":
            options = client_options(loaded)
            join = f"{program()} --role client --name SITE {options}{shlex.quote(address.fsl)}"
        output.record("listening", role=role, address=bound, join=join)
        what = "parameter server" if role == "ps" else "split server"
        more = ["on each client:", f"    {join}"] if join else []
        if public and not join and not with_ps:
            more = [f"for the parameter server: --set {shlex.quote(f'split.server={address.fsl}')}"]
        output.say(f"{what} at {bound}", *more)

    stopper = Stopper()
    with stop_on_signals(stopper):
        summary = serve(
            loaded,
            loaded.run_dir,
            with_ps=with_ps,
            from_version=from_version,
            announce=announce,
            log=output.say,
            stop=stopper,
            keys=found,
            record=output.record if output.as_json else None,
        )
    output.result(summary)
    return stopper.exit_code
