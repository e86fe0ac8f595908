"""What a method of split learning decides, apart from its mathematics: the interface of `split.method`. Pure.

    method        trigger           uploads          answer     aligned     averaged at the ps   at the split server
    sl            sequential        every step       gradient               handed over          one x_s
    splitfed-v1   rounds (turns)    every step       gradient               x_c                  a replica per client, averaged after a round
    splitfed-v2   rounds (turns)    every step       gradient               x_c                  one x_s
    cse-fsl       rounds (turns)    every q-th step                         x_c, x_a             one x_s
    fsl-sage      rounds (turns)    every q-th step             per client  x_c                  one x_s, and x_a per client
    fedavg        rounds (turns)    none                                    x                    nothing: there is none

The trigger in brackets is that of lockstep, where one client trains at a time and has one upload in flight, so that a run is the same
computation as in one process. In free mode everybody trains at their own pace; uploads overlap computation.

To add a method: a file beside these, a line in `split_methods.METHODS`, and its mathematics in `fsl_async/learn/split/methods`.
"""

from __future__ import annotations

from abc import ABC
from typing import ClassVar

from attrs import frozen


@frozen
class SplitRules:
    """The run's configuration as far as it decides anything here. Times in seconds."""

    method: str = "fsl-sage"
    lockstep: bool = False
    labels_at_home: bool = False
    """U-shape: every step has two legs."""
    upload_every: int = 5
    align_every: int = 10
    in_flight: int = 2
    """Uploads of one client that are not settled."""
    retain: int = 2
    """Trained uploads that a client keeps until a checkpoint has them, to offer them again to a server that was killed."""
    checkpoint_every: int = 100
    """Uploads; also at the end of every round."""
    max_stale_rounds: int = 1
    """Uploads of an older round than this many behind the newest are declined."""
    max_clients: int = 1000
    reoffer_s: float = 5.0
    drain_s: float = 10.0
    retry_s: float = 30.0
    """Before a checkpoint is tried again."""
    alone_s: float = 0.0
    """A split server that has a run ends after so long without a client and without the parameter server; 0: it waits for ever."""


class Decisions(ABC):
    """One method's decisions. It holds rules and no state."""

    name: ClassVar[str]
    has_server: ClassVar[bool] = True
    replicas: ClassVar[bool] = False
    """Whether the server keeps one x_s per client, and averages them after a round."""
    gradients: ClassVar[bool] = False
    """Whether an upload is answered, and the client's step waits for that."""
    aligned: ClassVar[bool] = False
    """Whether the server keeps and aligns an auxiliary model per client."""
    averaged: ClassVar[tuple[str, ...]] = ("client",)
    """What the delta to the parameter server is made of, in this order: x_c ("client"), x_a ("auxiliary")."""

    def __init__(self, rules: SplitRules) -> None:
        self.rules = rules

    @property
    def trigger(self) -> str:
        """How the parameter server runs rounds (`sync.trigger`)."""
        return "turns" if self.rules.lockstep else "rounds"

    @property
    def in_flight(self) -> int:
        """How many uploads of one client may be under way. The legs of a U-shape come in pairs, one pair at a time."""
        return 1 if self.rules.lockstep or self.rules.labels_at_home else self.rules.in_flight

    @property
    def legs(self) -> int:
        """Uploads of a step."""
        return 2 if self.rules.labels_at_home and self.gradients else 1

    @property
    def waits_at_round_end(self) -> bool:
        """Whether a round ends at the client only when the server has noted it: others go by what it has then."""
        return self.has_server and (self.rules.lockstep or self.replicas)

    @property
    def max_stale_rounds(self) -> int:
        """How many rounds an upload may be behind. A replica has been replaced at the end of its round."""
        return 0 if self.replicas else self.rules.max_stale_rounds

    def uploads_at(self, step: int) -> bool:
        """Whether the batch of this local step, from 0 in each round, is sent."""
        return self.has_server

    def aligns_in(self, round_: int) -> bool:
        """Whether the auxiliary model is aligned in this round, after its first upload."""
        return False

    def waits_for_alignment(self) -> bool:
        """Whether the client's step waits for the aligned model; else it is used from when it is there."""
        return self.aligned and self.rules.lockstep
