"""fsl-async: train large models across institutions.

The program is `fsl-node`. From Python there is one function, `join`, for a training script of your own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsl_async.node_client import Joined

__all__ = ["join"]


def join(
    server: str,
    *,
    name: str | None = None,
    device: str | None = None,
    run_dir: str | Path | None = None,
    log: Callable[[str], None] = print,
) -> Joined:
    """Join a run from a script that you start yourself; three lines more than training alone.

        with fsl_async.join("ps.example.org:7100") as fed:       # waits for the server's welcome
            fed.attach(model)                                    # from here on the weights are the run's
            for batch in loader:
                ...
                if not fed.step(tokens=batch.numel()): break     # the only point where weights are exchanged

    server: host:port or an fsl:// address. name: this client's name in the run; by default the host's, numbered where a host
    has several. device: where `fed.device` points; by default what the run says. run_dir: where to keep a journal; none by default.
    log: takes one line of text at a time.
    Raises fsl_async.errors.RefusedError where the server will not have this client.
    """
    from fsl_async import node_client

    return node_client.join(server, name=name, device=device, run_dir=run_dir, log=log)
