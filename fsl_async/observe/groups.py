"""What a parameter server's journal says about global rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import asdict, field, mutable

from fsl_async.roles.phrasing import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fsl_async.observe.run import Run

    Line = Mapping[str, Any]


@mutable
class GroupFigures:
    """Figures of a parameter server in a roster. round: of the global weights held; -1: none."""

    is_on: bool = False
    round: int = -1
    digest: str = ""
    here: list[str] = field(factory=list)
    """The other servers with a session; at a member at most the coordinator, which has no name."""
    decided: int = 0
    """Global rounds decided here, so at the coordinator only."""
    failed: int = 0
    """Attempts that failed here."""
    members: list[str] = field(factory=list)
    """The contributors of the newest decision here."""

    def on_ring_recovered(self, run: Run, line: Line) -> None:
        """The process began."""
        self.is_on, self.here = True, []
        self.on_adopted(run, line)

    def on_adopted(self, run: Run, line: Line) -> None:
        """Global weights are adopted."""
        self.round, self.digest = int(line["round"]), str(line["digest"])

    def on_ring_peer_here(self, run: Run, line: Line) -> None:
        """A session with another server is open."""
        self.here = sorted({*self.here, str(line["peer"])})

    def on_ring_peer_gone(self, run: Run, line: Line) -> None:
        """A session with another server ended."""
        self.here = [name for name in self.here if name != str(line["peer"])]

    def on_ring_failed(self, run: Run, line: Line) -> None:
        """An attempt failed."""
        self.failed += 1

    def on_keep_decision(self, run: Run, line: Line) -> None:
        """A decision is being written."""
        self.members = sorted(map(str, line["contributors"]))

    def on_decision_kept(self, run: Run, line: Line) -> None:
        """A decision is in the ledger."""
        self.decided += 1

    def as_dict(self) -> dict[str, Any] | None:
        """Plain values for --json; None for a parameter server alone."""
        return asdict(self) if self.is_on else None

    def words(self) -> list[str]:
        """A line for people, if there are other groups."""
        if not self.is_on:
            return []
        held = f"global weights {self.round} ({self.digest})" if self.round >= 0 else "none yet"
        parts = [f"groups: {held}"]
        if self.decided:
            rounds = counted(self.decided, "round")
            parts.append(f"{rounds} decided here, the newest of {', '.join(self.members)}")
        if self.failed:
            parts.append(f"{counted(self.failed, 'attempt')} failed here")
        named = [name or "the coordinator" for name in self.here]
        parts.append(f"connected: {', '.join(named) or 'none'}")
        return ["; ".join(parts)]
