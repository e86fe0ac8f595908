"""Checks of global rounds, over all groups of a simulation.

- One digest per global round, for ever; rounds and attempts go up, and no attempt decides twice.
- A token of a group is in at most one decided round: the cuts of a group follow one another.
- The global weights are those of version 0 and the cuts of all decided rounds, and no more.
- A cut that was counted is on its group's disk, as it was offered, until the group adopts.
- A group's weights are the global weights that it adopted and its tokens that are in no round.

After an orderly end: all groups have the newest global weights, and each token up to a group's last
cut is in exactly one decided round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import field, frozen, mutable

from fsl_async.roles.ring.events import Decision
from fsl_async.tools.sim.group_counting import GroupDisk, Weights


@frozen
class Decided:
    """A decided global round."""

    made: Decision
    contributors: dict[str, tuple[int, int]]


@mutable
class RingInvariants:
    """The decided rounds so far. `disks` has those of all groups."""

    violated: Callable[[str], None]
    disks: Mapping[str, GroupDisk]
    decisions: list[Decided] = field(factory=list)
    totals: list[Weights] = field(factory=list)
    """Global weights by round."""
    counted: dict[str, int] = field(factory=dict)
    """Group -> its tokens, from the first one, that are in decided rounds or in G_0."""

    def begun(self, weights: Weights, name: str) -> None:
        """Take G_0."""
        if self.totals:
            self.violated("there is a second G_0")
        self.totals.append(weights)
        self.counted[name] = self.disks[name].tokens_merged

    def decided(
        self, made: Decision, contributors: dict[str, tuple[int, int]], weights: Weights
    ) -> None:
        """Take a decision of the coordinator, as soon as its line is in the ledger."""
        if made.round != len(self.totals):
            self.violated(f"global round {made.round} is decided after {len(self.totals) - 1}")
        if any(one.made.attempt >= made.attempt for one in self.decisions):
            self.violated(f"attempt {made.attempt} decides after a later one, or twice")
        if len(contributors) < 2:
            self.violated(f"global round {made.round} has {len(contributors)} contributors")
        for name, (begin, end) in contributors.items():
            if begin != self.counted.get(name, 0):
                text = f"{name}: tokens from {begin} follow {self.counted.get(name, 0)}"
                self.violated(f"{text} in global round {made.round}")
            self.counted[name] = end
            cut = self.disks[name].book.cut
            if cut is None or (cut.round, cut.begin, cut.end) != (made.round - 1, begin, end):
                self.violated(f"{name} does not hold its cut of global round {made.round}")
        gained = sum(end - begin for begin, end in contributors.values())
        if weights.total != self.totals[-1].total + gained:
            self.violated(f"global weights {made.round} are not the sum of the cuts")
        self.totals.append(weights)
        self.decisions.append(Decided(made, contributors))

    def group_made_version(self, name: str) -> None:
        """Check the weights of a group, after every version of it."""
        disk = self.disks[name]
        newest, held = disk.models[-1], disk.book.adopted
        if held is None:
            base, since = disk.models[0].total, 0
        elif held.round >= len(self.totals) or self.totals[held.round].digest != held.digest:
            self.violated(f"{name} adopted global weights {held.round}, which were not decided")
            return
        else:
            base, since = self.totals[held.round].total, disk.book.reference
        if newest.total != base + disk.tokens_merged - since:
            self.violated(f"{name}: version {newest.version} has other tokens than its ledger")

    def ended(self) -> None:
        """Check after the end of all groups: the last global weights have what they merged."""
        merged = sum(disk.tokens_merged for disk in self.disks.values())
        if self.totals[-1].total != self.totals[0].total + merged:
            missing = self.totals[0].total + merged - self.totals[-1].total
            self.violated(f"{missing} tokens are in no global weights at the end")

    def settled(self) -> None:
        """Check after an orderly end of global rounds."""
        for name, disk in self.disks.items():
            book = disk.book
            if book.adopted_round != len(self.totals) - 1:
                self.violated(f"{name} ends with global weights {book.adopted_round}")
            if book.reference != self.counted.get(name, 0):
                text = f"{name}: {book.reference} tokens are in global weights by its ledger, and"
                self.violated(f"{text} {self.counted.get(name, 0)} by the coordinator's")
            if book.cut is not None:
                self.violated(f"{name} ends with a cut that is not decided")
