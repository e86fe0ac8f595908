"""Starts the decay of learning rates by `fsl-node decay` or at a date, while the run goes on.

The command leaves a small file in the run directory, as one machine's user to the parameter
server's: so no key and no port is needed. It is read once a second, and removed when the machine
has taken it; the ledger then has the decay.

    run_dir/decay.json    {"rounds": N, "tokens": N, "seconds": S}, each 0 for none
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define

from fsl_async.errors import ConfigError, RunDirError, disk_words
from fsl_async.files.files import replace_bytes
from fsl_async.roles.sync.events import DecayAsked
from fsl_async.roles.sync.progress import RunLimits

if TYPE_CHECKING:
    import fsl_transport as tp
    from fsl_async.config.settings import Config
    from fsl_transport.link import Cancellable

FILE = "decay.json"
LOOK_S = 1.0
_MAX_BYTES = 4096


def write_request(run_dir: Path, more: RunLimits) -> Path:
    """Ask the parameter server of `run_dir` for a decay; replaces an older request.

    Raises RunDirError.
    """
    path = run_dir / FILE
    text = json.dumps({"rounds": more.rounds, "tokens": more.tokens, "seconds": more.seconds})
    try:
        replace_bytes(path, text.encode())
    except OSError as error:
        raise RunDirError(f"cannot write {path}: {disk_words(error)}") from None
    return path


def read_request(path: Path) -> RunLimits | None:
    """The limits that a request asks for; None where there is none, or it is not well-formed."""
    try:
        with path.open("rb") as file:
            found: Any = json.loads(file.read(_MAX_BYTES))
        rounds, tokens, seconds = found["rounds"], found["tokens"], float(found["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if type(rounds) is not int or type(tokens) is not int or not math.isfinite(seconds):
        return None
    if min(rounds, tokens, seconds) < 0:
        return None
    return RunLimits(rounds, tokens, seconds)


def check_date(config: Config) -> None:
    """Raise ConfigError if the run has a date of the decay that cannot mean anything."""
    if not config.train.decay_at:
        return
    run = config.run
    if not (run.rounds or run.tokens or run.seconds):
        raise ConfigError(
            "train.decay_at: needs a planned end: set run.rounds, run.tokens or run.seconds as"
            " well",
            "train.decay_at",
        )
    if config.train.schedule != "wsd":
        raise ConfigError(
            f"train.decay_at: train.schedule = {config.train.schedule} does not decay at a date;"
            " set wsd",
            "train.decay_at",
        )


@define(eq=False, slots=False)
class DecayRequests:
    """Feeds DecayAsked for a request file, and once at `at` (an ISO 8601 date; empty: never).

    has_begun: whether the run has a version; a date before that counts from version 0 on.
    was_asked: whether the run has a decay that was asked for; then the date does not count.
    """

    _run_dir: Path
    _feed: Callable[[DecayAsked], object]
    _scheduler: tp.Scheduler
    _at: str = ""
    _has_begun: Callable[[], bool] = lambda: True
    _was_asked: Callable[[], bool] = lambda: False
    _wall_clock: Callable[[], float] = time.time

    def __attrs_post_init__(self) -> None:
        self._path = self._run_dir / FILE
        self._date = datetime.fromisoformat(self._at).timestamp() if self._at else math.inf
        self._timer: Cancellable | None = None

    def start(self) -> None:
        """Begin to look, once the machine has its state."""
        self._look()

    def _look(self) -> None:
        # Once a second, by the wall clock: the machine may have slept, or its clock may be set.
        self._timer = self._scheduler.call_at(self._scheduler.time() + LOOK_S, self._look)
        if self._wall_clock() >= self._date and self._has_begun():
            self._date = math.inf
            if not self._was_asked():
                self._feed(DecayAsked())
        if self._path.exists():
            more = read_request(self._path)
            with suppress(OSError):
                self._path.unlink()
            if more is not None:
                self._feed(DecayAsked(more))

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
