"""Decides how a split server ends, and when it leaves because it is alone. Pure.

There are two ways to end. The run is over, as a client or the parameter server reports: then it is
over for all. Or this process is asked to end while that is not known: then it leaves, and another
process goes on in its folder. A client that waits must be able to distinguish them, because uploads
of a run that is not over must not be given up.

The parameter server of another process keeps a session too, in which it sends one message: that the
run is over. While that session lasts the run goes on, although clients are away. Without it and
without a client, either all are down, or the run has ended and no peer could report it. These
cannot be distinguished, so the split server waits `alone_s` and then leaves: a process that is
started in its folder later goes on.
"""

from attrs import mutable

from fsl_async.roles.machine import Deadlines, Effect, Greeted, Refuse
from fsl_async.roles.split import effects as split
from fsl_async.roles.split.messages import PS_ROLE, PsHello, SplitWelcome
from fsl_async.roles.split.peers import Answer

ALONE = "alone"
"""The deadline's name."""


@mutable
class SplitShutdown:
    """The state of a split server's end. reason: None until it is to end."""

    reason: str | None = None
    run_over: bool = False  # reported by a peer: no later round averages the last one
    done: bool = False

    @property
    def asked(self) -> bool:
        """Whether the split server is to end."""
        return self.reason is not None

    @property
    def leaves(self) -> bool:
        """Whether the run goes on without this process."""
        return self.asked and not self.run_over

    def refusal(self) -> tuple[str, str] | None:
        """Why no client is admitted any more, as a code and a sentence; None while clients are."""
        if self.leaves:
            return (
                "leaving",
                "this split server is about to end; the run goes on with its next process",
            )
        return ("finished", "this run has ended") if self.asked else None

    def answer(self) -> Answer | None:
        """Why no upload is taken any more; None while they are."""
        if self.leaves:
            return Answer("later", "the split server is about to end")
        return Answer("ended", "the run has ended") if self.asked else None


@mutable
class Liveness:
    """The parameter server's session, and the deadline of a split server that is alone.

    It shares the split server's deadlines.
    """

    deadlines: Deadlines
    alone_s: float
    ps_incarnation: int | None = None  # of the parameter server that has a session

    def update(self, run: str, now: float, *, clients: bool) -> None:
        """A peer has come or gone.

        A split server that is in no run yet waits for its first peer without limit.
        """
        if not run or self.alone_s <= 0 or clients or self.ps_incarnation is not None:
            self.deadlines.cancel(ALONE)
        elif self.deadlines.when(ALONE) is None:
            self.deadlines.set(ALONE, now + self.alone_s)

    def admit(
        self, event: Greeted[PsHello], run: str, refusal: tuple[str, str] | None
    ) -> list[Effect]:
        """Welcome the parameter server of `run`, or of any run where that is empty."""
        theirs = event.message.run
        if refusal is None and event.peer != PS_ROLE:
            refusal = "name", f"a parameter server comes as {PS_ROLE}, and not as {event.peer}"
        if refusal is None and run and theirs != run:
            text = (
                f"this split server is in run {run}, and the parameter server in run {theirs}:"
                " give every run a split server, and a folder, of its own"
            )
            refusal = "run", text
        if refusal is not None:
            return [Refuse(event.peer, *refusal)]
        self.ps_incarnation = event.incarnation
        welcome = SplitWelcome(theirs, 0, "", -1)
        return [split.AdmitSplit(event.peer, event.incarnation, welcome)]

    def is_ps(self, peer: str) -> bool:
        """Whether a message comes from a parameter server that was admitted."""
        return peer == PS_ROLE and self.ps_incarnation is not None

    def left(self, incarnation: int) -> None:
        """The parameter server's session has ended."""
        if self.ps_incarnation == incarnation:
            self.ps_incarnation = None

    def reason(self) -> str:
        """Why a split server that is alone ends."""
        return (
            f"no client and no parameter server for {self.alone_s:g} s (split.alone_s): the run has"
            " ended, or all are away; what was trained is in the last checkpoint, and a start with"
            " the same --run-dir goes on"
        )
