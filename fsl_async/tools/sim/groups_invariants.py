"""Invariants of the global rounds of all groups.

- One digest per global round, for ever; rounds and attempts go up, and no attempt decides twice.
- A token of a group is in at most one decided round: the cuts of a group follow one another.
- The global weights are those before and what the cuts of the round gained, to the bit.
- A group that adopts global weights holds these and what it merged that is in no round, to the bit.

After an orderly end: all groups have the newest global weights, and each token up to a group's last
cut is in exactly one decided round.
"""

from collections.abc import Callable, Mapping

import numpy as np
from attrs import field, mutable

from fsl_async.learn.client.ports import Vector
from fsl_async.roles.groups import effects as do
from fsl_async.roles.groups.events import Cut
from fsl_async.roles.groups.messages import View
from fsl_async.store.book.groups_state import Adoption
from fsl_async.store.disk.chunk_files import digest_of
from fsl_async.tools.sim.invariants import Lineage
from fsl_codecs import CodecSpec, decode, encode


@mutable
class GroupsInvariants:
    """The decided rounds so far. lineages: of all groups, by name."""

    violated: Callable[[str], None]
    lineages: Mapping[str, Lineage]
    codec: CodecSpec
    decisions: list[do.KeepDecision] = field(factory=list)
    """The decided global rounds."""
    weights: list[Vector] = field(factory=list)
    """The global weights of each round."""
    counted: dict[str, int] = field(factory=dict)
    """Group -> its tokens, from the first one, that are in decided rounds or in G_0."""
    _views: dict[int, View] = field(factory=dict)
    """By attempt."""
    _deciding: dict[int, do.KeepDecision] = field(factory=dict)
    """By attempt: decisions that the coordinator writes to its ledger."""
    _cuts: dict[str, Cut] = field(factory=dict)
    """Group -> its newest cut."""
    _adopted: dict[str, int] = field(factory=dict)
    """Group -> the round of the global weights that it holds."""
    _lost: Vector | None = None
    """The part of the global weights that coding has lost so far."""

    def reduces(self, view: View) -> None:
        """Take the view of an attempt."""
        self._views[view.attempt] = view

    def offers(self, name: str, cut: Cut) -> None:
        """Take the cut of a group."""
        self._cuts[name] = cut

    def decides(self, effect: do.KeepDecision) -> None:
        """Take a decision that the coordinator is about to write."""
        self._deciding[effect.attempt] = effect

    def begun(self, name: str, digest: str) -> None:
        """Take G_0, once it is there: the newest version of the coordinator's group then."""
        if self.weights:
            return
        lineage = self.lineages[name]
        for version in reversed(range(len(lineage.weights))):
            if digest_of(lineage.weights[version], weights=self._weights) == digest:
                self.weights.append(lineage.weights[version])
                self.counted[name], self._adopted[name] = lineage.tokens_of[version], 0
                return
        self.violated(f"{name} begins with global weights that are no version of it")

    def decided(self, attempt: int) -> None:
        """Take a decision of the coordinator: its line is in the ledger."""
        effect = self._deciding.pop(attempt, None)
        if effect is None:
            return
        number = effect.round
        if number != len(self.weights):
            self.violated(f"global round {number} is decided after {len(self.weights) - 1}")
        if any(one.attempt >= attempt for one in self.decisions):
            self.violated(f"attempt {attempt} decides after a later one, or twice")
        if len(effect.contributors) < 2:
            self.violated(f"global round {number} has {len(effect.contributors)} contributors")
        for name, (begin, end) in effect.contributors.items():
            if begin != self.counted.get(name, 0):
                text = f"{name}: tokens from {begin} follow {self.counted.get(name, 0)}"
                self.violated(f"{text} in global round {number}")
            self.counted[name] = end
        self._add(effect, self._views[attempt])
        self.decisions.append(effect)

    def _add(self, made: do.KeepDecision, view: View) -> None:
        """Make the global weights of a round again, with and without what coding lost before."""
        base, size = self.weights[-1], self._weights
        total = np.zeros_like(base)
        for rank, share in enumerate(view.members):
            lineage, cut = self.lineages[share.name], self._cuts[share.name]
            part = (base - lineage.weights[cut.version]) * np.float32(share.weight)
            if rank == 0 and self._lost is not None:
                part = part - self._lost
            total = total + part
        change = -total
        sent = np.concatenate([decode(encode(change[:size], self.codec)), change[size:]])
        self._lost = change - sent
        weights = base + sent
        self.weights.append(weights)
        if digest_of(weights, weights=size) != made.digest:
            self.violated(f"global weights {made.round} are not what the cuts gained")

    @property
    def _weights(self) -> int:
        return next(iter(self.lineages.values())).manifest.weights

    def adopts(self, name: str, adoption: Adoption) -> Vector:
        """Return what a group must hold that makes a version of global weights."""
        if adoption.round >= len(self.weights):
            self.violated(f"{name} adopts global weights {adoption.round}, which are not decided")
            return self.weights[-1]
        lineage, new = self.lineages[name], self.weights[adoption.round]
        reference = None
        cut = self._cuts.get(name)
        if name in self._adopted:
            reference = self.weights[self._adopted[name]]
            if adoption.counted:
                assert cut is not None, "a cut that was counted was offered"
                reference = lineage.weights[cut.version]
        self._adopted[name] = adoption.round
        if reference is None or np.array_equal(reference, lineage.weights[-1]):
            return new
        size = self._weights
        gained = lineage.weights[-1][:size] - reference[:size]
        return np.concatenate([new[:size] + gained, new[size:]])

    def ended(self) -> None:
        """Check after the end of all groups: the last global weights have what they merged."""
        for name, lineage in self.lineages.items():
            if self.counted.get(name, 0) != lineage.tokens:
                missing = lineage.tokens - self.counted.get(name, 0)
                self.violated(f"{missing} tokens of {name} are in no global weights at the end")

    def settled(self) -> None:
        """Check after an orderly end of global rounds."""
        for name in self.lineages:
            if self._adopted.get(name) != len(self.weights) - 1:
                self.violated(f"{name} ends with global weights {self._adopted.get(name)}")
