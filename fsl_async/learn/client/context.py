"""The context that a node gives a training function: its part of a run, and the settings."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch

from fsl_async.config.load import from_tables
from fsl_async.config.settings import Config
from fsl_async.config.site_policy import SiteChoices, SitePolicy
from fsl_async.errors import TaskError
from fsl_async.roles.machine import Event


def choose_device(text: str) -> torch.device:
    """Read `train.device`; "auto" is the first CUDA device if there is one. Raises TaskError."""
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise TaskError(
            f"train.device {text!r} cannot be used: {reason} (use --set train.device=auto)"
        ) from error
    return device


@attrs.frozen
class ClientContext:
    """The client's name, its share of the data, its device, and the run's configuration."""

    client_name: str
    seed: int = 0
    device: torch.device = attrs.field(factory=lambda: torch.device("cpu"))
    config: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    shard_index: int = 0
    shard_count: int = 1
    rank: int = 0
    ranks: int = 1
    """Processes that train one model together, of which this is number `rank`."""
    log: Callable[[str], None] = print
    policy: SitePolicy = attrs.field(factory=SitePolicy)
    """What may leave this site."""
    site: SiteChoices = attrs.field(factory=SiteChoices)
    """This site's choices where the run tunes a base model."""
    privacy_folder: Path | None = None
    """Where private training keeps what it has spent (`fsl_async.learn.tune.privacy`)."""
    position: Mapping[str, float] = attrs.field(factory=dict)
    """In the data, of this client's last acknowledged delta (`fsl_async.roles.sync.delta`)."""
    states_file: Path | None = None
    """Where states of streamed data are kept; None: nowhere."""
    is_leaving: Callable[[], bool] = lambda: False
    """Whether this process was asked to end: the time left is for the last delta."""

    @functools.cached_property
    def settings(self) -> Config:
        """`config`, checked: with attributes instead of keys, and defaults for what it lacks."""
        return from_tables(self.config)

    @property
    def part(self) -> tuple[int, int]:
        """The part of the data that is this rank's, of how many.

        Of the client's part, which is all of the data with local sharding, a rank of several has
        its share: part * ranks + rank, of count * ranks.
        """
        index, count = self.shard_index, self.shard_count
        if self.settings.data.sharding == "local":
            index, count = 0, 1
        return index * self.ranks + self.rank, count * self.ranks


class SplitRounds(Protocol):
    """Trains the rounds of split learning (`fsl_async.learn.split.remote.SplitTraining`)."""

    def begin_round(self, number: int) -> None:
        """Train round `number` from the next batch on."""

    def end_round(self) -> int:
        """Finish the round, and wait until it may go on. Returns its samples."""


class SplitPort(Protocol):
    """A client's session with the split server (`fsl_async.nodes.client.node.ClientRuntime`).

    For the training thread.
    """

    def open_split(self, training: Any, architecture: dict[str, str]) -> None:
        """Open it, once; its messages go to `training`."""

    def post_split(self, event: Event) -> None:
        """Give its machine an event; nothing happens before it is opened."""
