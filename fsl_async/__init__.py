"""fsl-async: train large models across institutions.

The program is `fsl-node`. A training script of your own calls `join`, inside of `clean_exit` to end
as the program does. A script around a `Trainer` calls `fsl_async.hf.patch`, one around Lightning
takes the callback `fsl_async.lightning.Sync`. Errors that a user can act on are `FslError`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsl_async.errors import FslError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from fsl_async.config.site_policy import Order
    from fsl_async.nodes.client.gang_joining import JoinedRank
    from fsl_async.nodes.client.joining import Joined
    from fsl_async.tools.sim.result import Result

__all__ = ["FslError", "clean_exit", "join", "simulate"]


def clean_exit() -> AbstractContextManager[None]:
    """Let a script end as `fsl-node` does. Call `join` inside of the block.

        if __name__ == "__main__":
            with fsl_async.clean_exit():
                main()

    An FslError ends the script with one line and the exit code that README.md documents. The first
    Ctrl-C (or SIGTERM) makes `fed.step` return False; the trained delta is sent, and the script
    exits with 130 (64) at the end of the block. The second one ends it at once. Exceptions of your
    own code pass through. Without the block an FslError that nothing catches ends a script in the
    same way, but for notebooks and interactive sessions, and Ctrl-C is a KeyboardInterrupt.
    """
    from fsl_async.process import script

    return script.clean_exit()


def join(
    server: str,
    *,
    name: str | None = None,
    device: str | None = None,
    run_dir: str | Path | None = None,
    log: Callable[[str], None] | None = None,
    keys: str | Path | None = None,
    insecure: bool = False,
    allow: str | Iterable[str] | None = None,
    rank: int = 0,
    order: Order | None = None,
    layers: str = "",
) -> Joined | JoinedRank:
    """Join a run from a script that you start yourself, with three more lines than training alone.

        with fsl_async.join("fsl://ps.example.org:7100?key=...") as fed:  # waits for the welcome
            fed.attach(model)                                 # the weights are now the run's
            for batch in loader:
                ...
                if not fed.step(tokens=batch.numel()): break  # the only exchange of weights

    A script that cannot use `with` calls `fed.close()`; one that ends without it sends what was
    trained last when Python ends.

    In a script under torchrun all ranks join, and are one client; rank 0 starts its node, a
    process of its own. FSDP2, HSDP and DDP are supported, on one machine.

    server: the parameter server's host:port or fsl:// address.
    name: this client's name in the run; by default the host's, numbered if a host has several.
    device: for `fed.device`; by default the run's setting.
    run_dir: folder for a journal; none by default.
    log: called with one line of text at a time; by default it is printed.
    keys: this site's keys folder, for an address with a key; by default that of `fsl-node keys`.
    insecure: accept an address of another machine without a key.
    allow: what may leave this machine, such as "deltas,metrics"; by default that of site.toml
        beside the keys, else only deltas (`fsl_async.config.site_policy`). Metrics are sent only if
        they are allowed.
    rank, order, layers: where the run tunes a base model, this site's --rank, --order and --layers
        (`fsl_async.config.site_policy`).
    Raises FslError with a remedy in one line: for a wrong address or name, or if the parameter
    server refuses this client (at the end of the `with` block: if it has removed this client).
    """
    from fsl_async.nodes.client import joining
    from fsl_async.process.script import print_line

    return joining.join(
        server,
        name=name,
        device=device,
        run_dir=run_dir,
        log=log or print_line,
        keys=keys,
        insecure=insecure,
        allow=allow,
        rank=rank,
        order=order,
        layers=layers,
    )


def simulate(
    task: str | Callable[[Any], object],
    *,
    clients: int = 100,
    settings: Mapping[str, Any] | None = None,
    config: str | Path | None = None,
    links: str | Iterable[str] | None = None,
    faults: str = "none",
    seed: int | None = None,
    hours: float | None = None,
    rates: Sequence[float] | None = None,
    step_seconds: float | None = None,
    workers: int = 1,
    resident: int | None = None,
    run_dir: str | Path | None = None,
    log: Callable[[str], None] | None = None,
) -> Result:
    """Simulate a run of many clients in this process, in virtual time, also in a notebook.

        result = fsl_async.simulate(
            "train.py:train", clients=100, settings={"run.rounds": 60, "sync.every_s": 600},
            step_seconds=0.5, rates=[1, 1, 0.3], links="10mbit:50mbit,30ms", faults="mild",
        )
        print(result)

    Each client runs the training function unchanged, in a thread of its own, one at a time; all
    else is the code of a real run. Clients share the process: the function builds its own model.

    task: a function that takes `fed`, or its name as for `--task`.
    settings: of the run, like {"sync.every_s": 60}, over those of the TOML file `config`.
    links: "RATE,DELAY[,LOSS%]" or "UP:DOWN,DELAY[,LOSS%]"; several, and `rates`, are those of the
        first clients, then of the next ones again.
    faults: none, mild or storm, as in `fsl-node sim`.
    seed: sets run.seed; it also decides faults and random generators.
    hours: of virtual time, where neither run.rounds, run.tokens nor run.seconds ends the run.
    step_seconds: virtual seconds of a step at rate 1; by default as long as it takes here, and then
        versions differ from one computer to the next.
    workers: processes, forked from this one, that compute the clients' steps; versions are the same
        to the bit. What the function changes outside of itself stays in its process.
    resident: clients whose models are in memory, the others in files; by default as many as fit.
    run_dir: a new run directory; by default runs/sim-1, or the next number.
    log: called with one line of text at a time; by default it is printed.
    Raises FslError with a remedy in one line, and TaskRaisedError where the function raises.
    """
    from fsl_async.process.script import print_line
    from fsl_async.tools.sim.simulate import start

    return start(
        task,
        clients=clients,
        config=config,
        settings=settings or {},
        links=links,
        faults=faults,
        seed=seed,
        hours=hours,
        rates=rates,
        step_seconds=step_seconds,
        workers=workers,
        resident=resident,
        run_dir=run_dir,
        log=log or print_line,
    )
