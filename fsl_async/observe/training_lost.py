"""How much of a client's training was lost when its processes ended. Pure.

    trained    tokens that the process reported, on heartbeats and with deltas
    settled    of these, tokens of deltas that are on the parameter server's disk, or were declined
               for good
    lost       the rest, once the process has ended: it takes with it what it had not sent

A process that was killed trained a little more than its last heartbeat reported, so what it lost
is at least this. One whose session is lost may come back as the same process and send what it has:
until another process begins, its loss is open.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, mutable

from fsl_async.roles.phrasing import counted

REASONS = {
    "expired": "no message came from it",
    "bye": "it ended its session",
    "superseded": "a new process took its name",
    "reset": "the connection was reset",
    "protocol": "it broke the protocol",
    "revoked": "its key is no longer on the allow-list",
}
"""Why a session ended, for people."""
UNSEEN = "another process came"
"""Why a process ended whose end was not seen."""
OTHER = "other reasons"
_WITHOUT_GOODBYE = {*REASONS.values(), UNSEEN, OTHER} - {REASONS["bye"]}
MOST_REASONS = 16
"""Reasons of goodbyes are text of peers: further ones are counted together."""


@mutable
class Ended:
    """Processes that ended for one reason."""

    times: int = 0
    tokens_lost: int = 0


@mutable
class Training:
    """Tokens of a client's present process, and what became of those before it."""

    trained: int = 0
    settled: int = 0
    over: str = ""
    """Why the present process has ended; empty while it may come back."""
    offered: str = ""
    """Key of its newest delta, until that is settled, and the tokens of it."""
    offered_tokens: int = 0
    ends: dict[str, Ended] = field(factory=dict)

    @property
    def unsent(self) -> int:
        """Tokens that are lost if the process ends now."""
        return max(0, self.trained - self.settled)

    def has_trained(self, tokens: int) -> None:
        """Take the tokens of this process so far."""
        self.trained = max(self.trained, tokens)

    def offer(self, key: str, tokens: int) -> None:
        """A delta is offered, for the first time."""
        self.offered, self.offered_tokens = key, tokens

    def settle(self, key: str) -> None:
        """A delta is durable, or refused for good: it may be shortly after its process ended."""
        if key != self.offered:
            return
        before = self.unsent
        self.settled += self.offered_tokens
        self.offered = ""
        if self.over:
            self.ends[self.over].tokens_lost -= before - self.unsent

    def end(self, why: str) -> None:
        """The process has ended."""
        if self.over:
            return
        self.over = why if why in self.ends or len(self.ends) < MOST_REASONS else OTHER
        ended = self.ends.setdefault(self.over, Ended())
        ended.times += 1
        ended.tokens_lost += self.unsent

    def begin(self, why: str) -> None:
        """Another process begins. why: of the end of the one before, unless that is known."""
        self.end(why)
        self.trained = self.settled = 0
        self.over = self.offered = ""

    def ends_by(self, gone_why: str) -> dict[str, Ended]:
        """All ends; with that of a process whose session is lost, where `gone_why` is not empty."""
        if self.over or not gone_why:
            return self.ends
        open_end = self.ends.get(gone_why, Ended())
        added = Ended(open_end.times + 1, open_end.tokens_lost + self.unsent)
        return {**self.ends, gone_why: added}


def lost_words(name: str, ends: Mapping[str, Ended]) -> str:
    """One line on what a client lost, the costliest reason first."""
    total = sum(ended.tokens_lost for ended in ends.values())
    ordered = sorted(ends.items(), key=lambda one: (-one[1].tokens_lost, one[0]))
    parts = [
        f"{ended.tokens_lost:,} ({why}, {counted(ended.times, 'time')})" for why, ended in ordered
    ]
    # What a killed process trained after its last heartbeat is not known.
    bound = "at least " if _WITHOUT_GOODBYE & set(ends) else ""
    return (
        f"{name} lost {bound}{counted(total, 'token')} when its processes ended: {', '.join(parts)}"
    )
