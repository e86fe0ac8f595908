"""`fsl-node --role server`: run the split server, alone or with the parameter server."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from fsl_async.commands.client import check_corpus, check_task
from fsl_async.commands.output import Output
from fsl_async.commands.ps import Chosen, join_line, listening_keys, load_config, print_config
from fsl_async.config import address as addresses
from fsl_async.errors import UsageError

if TYPE_CHECKING:
    from fsl_async.commands.node import NodeOptions


def command(options: NodeOptions) -> int:
    """Resolve the configuration, then run the split server; returns the exit code."""
    from fsl_async.config.load import resolved
    from fsl_async.config.recipes import with_implied
    from fsl_async.config.unused import line_of
    from fsl_async.process.stopper import Stopper, stop_on_signals

    with_ps, model, auxiliary = options.with_ps, options.model, options.auxiliary
    if not with_ps and (options.address is not None or options.from_version is not None):
        given = "LISTEN_ADDRESS" if options.address is not None else "--from-version"
        raise UsageError(
            f"{given} is the parameter server's: add --with-ps, or set split.listen with --set"
        )
    own = check_task(auxiliary, "--auxiliary") if auxiliary else None
    more: Chosen = {
        "model.family": ("--model", check_task(model, "--model") if model else None),
        "split.auxiliary": ("--auxiliary", own),
        "train.threads": ("--threads", options.threads),
    }
    read, names = load_config(options, options.overrides, more)
    loaded = with_implied(read)
    check_corpus(resolved(loaded), names)
    output = Output(as_json=options.as_json, waits=False)
    unused = line_of(read, options.overrides)
    if unused:
        output.warn(unused)
    listens = [("split.listen", loaded.split.listen)]
    if with_ps:
        listens.append((names.get("listen.address", "listen.address"), loaded.listen.address))
    found = listening_keys(listens, options, loaded)
    if options.dry_run:
        print_config(output, resolved(loaded))
        return 0
    from fsl_async.nodes.split_server.node import serve

    public = "" if found is None else found.pair().public

    def announce(role: str, bound: str) -> None:
        join = join_line(loaded, bound, public) if role == "ps" else ""
        output.record("listening", role=role, address=bound, join=join)
        what = "parameter server" if role == "ps" else "split server"
        more = ["on each client:", f"    {join}"] if join else []
        if public and not join and not with_ps:
            listening = addresses.parse_listen(bound)
            reach = addresses.reachable_host(listening.host)
            server = addresses.Address(reach, listening.port, public).fsl
            more = [f"for the parameter server: --set {shlex.quote(f'split.server={server}')}"]
        output.say(f"{what} at {bound}", *more)

    stopper = Stopper()
    with stop_on_signals(stopper):
        summary = serve(
            loaded,
            loaded.run_dir,
            with_ps=with_ps,
            from_version=options.from_version,
            announce=announce,
            log=output.say,
            stop=stopper,
            keys=found,
            record=output.record if output.as_json else None,
        )
    output.result(summary)
    return stopper.exit_code
