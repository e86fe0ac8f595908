"""How a split server ends. Pure.

Two ways. The run is over, as a client or the parameter server of this process says: then it is over for everybody. Or this process is asked to
end and nobody has said that: then it leaves, and another one goes on in its folder. Who waits must be able to tell one from the other,
for what was trained by a run that is not over is not to be given up.
"""

from __future__ import annotations

from attrs import mutable

from fsl_async.roles.split.peers import Answer


@mutable
class SplitShutdown:
    """`reason` is None until the server is to end."""

    reason: str | None = None
    run_over: bool = False  # somebody has said so: no later round averages the last one
    done: bool = False  # nothing is done any more

    @property
    def asked(self) -> bool:
        """Whether the server is to end."""
        return self.reason is not None

    @property
    def leaves(self) -> bool:
        """Whether the run goes on without this process."""
        return self.asked and not self.run_over

    def refusal(self) -> tuple[str, str] | None:
        """Why nobody is admitted any more, as a code and a sentence; None while somebody is."""
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
