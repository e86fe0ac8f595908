"""iperf3 beside our own streams, where it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from netlab.running import running

START_S = 20.0


def iperf3(
    address: str,
    server: Callable[[Sequence[str]], Sequence[str]],
    client: Callable[[Sequence[str]], Sequence[str]],
    seconds: int,
    *words: str,
) -> dict[str, Any] | None:
    """Send for `seconds` to `address`. Return the received `bytes`, `seconds`, `bits_per_second`.

    `server` and `client` put a command into the place of an end; `words` are further options of the
    client. None: it is not installed. Raises SystemExit where nothing was measured.
    """
    path = shutil.which("iperf3")
    if path is None:
        return None
    with running(server([path, "-s", "-1", "--forceflush", "-B", address])) as listener:
        while "listening" not in listener.line(START_S):
            continue
        done = subprocess.run(
            client([path, "-c", address, "-J", "-t", str(seconds), *words]),
            capture_output=True,
            text=True,
            timeout=3 * seconds + START_S,
            check=False,
        )
    received: dict[str, Any] | None
    received = json.loads(done.stdout or "{}").get("end", {}).get("sum_received")
    if not received:
        raise SystemExit(f"iperf3 measured nothing: {(done.stderr or done.stdout)[:200]}")
    return received
