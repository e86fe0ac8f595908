"""What the split server's machine remembers, and what follows from that alone. Pure.

The decisions are in `roles.split_server`; this is what they are about.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from fsl_async.roles.machine import Deadlines, Effect
from fsl_async.roles.phrasing import counted
from fsl_async.roles.split.checkpoints import Checkpoints
from fsl_async.roles.split.events import SplitProgress, UploadKey
from fsl_async.roles.split.liveness import Liveness
from fsl_async.roles.split.methods import SplitRules, method_of
from fsl_async.roles.split.peers import Answer, Peer, replicas_due
from fsl_async.roles.split.shutdown import SplitShutdown


class SplitServerState:
    """Whose uploads are where, what is being done, and how the end stands."""

    def __init__(self, rules: SplitRules, architecture: Mapping[str, str]) -> None:
        self.rules = rules
        self.method = method_of(rules)
        self.architecture = dict(architecture)
        self.run = ""
        self.round = -1
        self.averaged = -1
        self.uploads = 0
        self.peers: dict[str, Peer] = {}
        self.ready: deque[UploadKey] = deque()
        self.busy: Effect | None = None  # what the training thread does
        self.ending = SplitShutdown()
        self.deadlines = Deadlines()
        self.company = Liveness(self.deadlines, rules.alone_s)
        self.checkpoints = Checkpoints(self.deadlines, rules.checkpoint_every, rules.retry_s)

    @property
    def ended(self) -> bool:
        """Nothing is done any more."""
        return self.ending.done

    @property
    def run_over(self) -> bool:
        """It has ended, with its run."""
        return self.ending.done and not self.ending.leaves

    def life_of(self, name: str) -> int | None:
        """The life that has, or had, a session under this name; None: nobody."""
        if self.company.is_ps(name):
            return self.company.conductor
        peer = self.peers.get(name)
        return peer.incarnation if peer is not None else None

    def book(self) -> SplitProgress:
        """All that has to be remembered, as of now."""
        clients = {name: peer.book for name, peer in self.peers.items()}
        return SplitProgress(self.run, self.round, self.averaged, self.uploads, clients)

    def _look(self, now: float) -> None:
        if not self.ending.asked:
            clients = any(peer.connected for peer in self.peers.values())
            self.company.look(self.run, now, clients=clients)

    def _average(self, round_: int) -> Effect | None:
        """What must be averaged before an upload of this round is trained."""
        if not self.method.replicas:
            return None
        return replicas_due(self.peers.values(), self.averaged, round_)

    def _too_late(self, key: UploadKey) -> Answer | None:
        behind = self.round - key.round
        if behind > self.method.max_stale_rounds:
            return Answer("stale", f"{counted(behind, 'round')} behind the newest")
        return None
