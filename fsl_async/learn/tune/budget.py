"""A site's privacy budget in a run: the plan, and the steps that are spent, in a durable file.

    {"run":"notes","client":"site-a","epsilon":6.0,"delta":1e-05,"sample_rate":0.015,
     "noise":0.6967,"steps":480,"done":37,"crc":"1c291ca3"}

One checksummed line, mode 0600, in a folder beside the site's keys. A step is counted there,
durably, before its records are drawn. A crash therefore loses training and never a count, and a
relaunch goes on with the same noise from the same count. Each count reads the file again under a
lock, so that two processes of one client spend one budget.

The name of the file is RUN@CLIENT.json: a budget is that of a client's name in a run's name. Two
runs are two budgets: a record that takes part in both has lost the sum of their epsilons (and of
their deltas), and so has one that is in the data of two clients. Nothing adds that up. A run that
begins anew under the same name goes on with the old budget. Removing the file forgets what
was spent.

No torch and no Opacus in here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attrs import asdict, fields_dict, frozen

from fsl_async.errors import PrivacyError, disk_words
from fsl_async.files.checksummed_json import from_checksummed, to_checksummed
from fsl_async.files.private_files import locked_folder, replace_bytes
from fsl_async.roles.names import NAME

_MAX_BYTES = 4096


@frozen(kw_only=True)
class Wanted:
    """What a run asks for.

    epsilon, delta: the budget of a record over all steps. sample_rate: probability with which a
    record takes part in a step. steps: of this client in the whole run.
    """

    epsilon: float
    delta: float
    sample_rate: float
    steps: int


@frozen(kw_only=True)
class Spent:
    """Content of the file. noise: standard deviation, in units of the clipping norm."""

    run: str
    client: str
    epsilon: float
    delta: float
    sample_rate: float
    noise: float
    steps: int
    done: int


class Budget:
    """The budget of `client` in `run`. Raises PrivacyError, in one line.

    folder: of the file. noise_for: the noise that keeps a plan within its budget; called once in a
    run. Later starts of the run keep the first plan, also where the run got longer meanwhile.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        client: str,
        wanted: Wanted,
        noise_for: Callable[[Wanted], float],
    ) -> None:
        if not NAME.fullmatch(run) or not NAME.fullmatch(client):
            raise PrivacyError(f"privacy budget: {run[:80]!r} or {client[:80]!r} is no name")
        self.path = folder / f"{run}@{client}.json"
        with self._locked():
            found = self._read()
            if found is None:
                noise = noise_for(wanted)
                found = Spent(run=run, client=client, noise=noise, done=0, **asdict(wanted))
                self._write(found)
        self.spent = found
        for name in ("run", "client", "epsilon", "delta", "sample_rate"):
            asked = {"run": run, "client": client, **asdict(wanted)}[name]
            planned = getattr(found, name)
            if planned != asked:
                raise PrivacyError(
                    f"{self.path}: the privacy budget was planned with {name} {planned}, and this"
                    f" start has {asked}; go on with the same data and settings, or take part in a"
                    " new run, which spends a budget of its own"
                )

    def charge(self) -> None:
        """Count one more step; it is durable on return. PrivacyError: none is left."""
        with self._locked():
            found = self._read()
            if found is None:
                raise PrivacyError(f"{self.path} is gone: restore it, it counts what was spent")
            # A file that was restored from a backup has an old count.
            done = max(found.done, self.spent.done)
            if done >= self.spent.steps:
                raise PrivacyError(
                    f"the privacy budget of run {found.run} is used up: {found.client} has made"
                    f" all {found.steps:,} steps that epsilon {found.epsilon:g} allows (steps lost"
                    f" in crashes count too); {self.path} has the count"
                )
            counted = Spent(**{**asdict(self.spent), "done": done + 1})
            self._write(counted)
        self.spent = counted

    def _read(self) -> Spent | None:
        try:
            with self.path.open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PrivacyError(f"{self.path}: {error.strerror}") from None
        found = _parsed(data)
        if found is None:
            raise PrivacyError(
                f"{self.path}: damaged; restore it from a backup: without it nothing tells how much"
                " of the privacy budget is spent"
            )
        return found

    def _write(self, spent: Spent) -> None:
        replace_bytes(self.path, to_checksummed(asdict(spent)) + b"\n")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with locked_folder(self.path.parent):
                yield
        except OSError as error:
            raise PrivacyError(f"privacy budget: {disk_words(error, advised=False)}") from None


def _parsed(data: bytes) -> Spent | None:
    """The content of a file; None: damaged."""
    members = from_checksummed(data.removesuffix(b"\n"))
    if members is None:
        return None
    kinds: dict[str, Any] = {"str": str, "float": float, "int": int}
    for name, one in fields_dict(Spent).items():
        if type(members.get(name)) is not kinds[str(one.type)]:
            return None
    if len(members) != len(fields_dict(Spent)) or not 0 <= members["done"] <= members["steps"]:
        return None
    return Spent(**members)
