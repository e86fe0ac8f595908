"""fsl-async: train large models across institutions.

The program is `fsl-node`. From Python there is `join`, for a training script of your own, and
`clean_exit`, which lets such a script end as the program does. Errors that a user can act on are
`FslError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fsl_async.errors import FslError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from fsl_async.nodes.client.joining import Joined

__all__ = ["FslError", "clean_exit", "join"]


def clean_exit() -> AbstractContextManager[None]:
    """Let a script end as `fsl-node` does; `join` inside of it.

        if __name__ == "__main__":
            with fsl_async.clean_exit():
                main()

    An FslError ends the script with one line and the exit code that README.md documents. Ctrl-C (or
    SIGTERM) once makes `fed.step` return False; what was trained is sent, and the script ends with
    130 (64) when the block does. Twice ends it at once. Exceptions of your own code pass through.
    Without it `join` raises, and Ctrl-C is the KeyboardInterrupt that Python makes of it.
    """
    from fsl_async.process import script

    return script.clean_exit()


def join(
    server: str,
    *,
    name: str | None = None,
    device: str | None = None,
    run_dir: str | Path | None = None,
    log: Callable[[str], None] = print,
    keys: str | Path | None = None,
    insecure: bool = False,
    allow: str | Iterable[str] | None = None,
) -> Joined:
    """Join a run from a script that you start yourself; three lines more than training alone.

        with fsl_async.join("fsl://ps.example.org:7100?key=...") as fed:   # waits for the welcome
            fed.attach(model)                                    # the weights are the run's now
            for batch in loader:
                ...
                if not fed.step(tokens=batch.numel()): break     # weights are exchanged only here

    server: host:port or an fsl:// address. name: this client's name in the run; by default the
    host's, numbered where a host has several. device: where `fed.device` points; by default what
    the run says. run_dir: where to keep a journal; none by default.
    log: takes one line of text at a time. keys: this site's keys folder, for an address with a key;
    by default that of `fsl-node keys`.
    insecure: accept an address of another machine without one. allow: what may leave this machine,
    such as "deltas,metrics"; by default what site.toml beside the keys says, else only deltas
    (`fsl_async.config.site_policy`). Metrics that are not allowed are not sent. Raises FslError,
    which says in one line what to do: a wrong address or name, a server that will not have this
    client (also when the `with` block ends, if the server has put this client out meanwhile).
    """
    from fsl_async.nodes.client import joining

    return joining.join(
        server,
        name=name,
        device=device,
        run_dir=run_dir,
        log=log,
        keys=keys,
        insecure=insecure,
        allow=allow,
    )
