"""Effects of the machines of groups, as frozen values. A shell carries them out, in order.

Those that are events, too, go to the machine of the group's parameter server. TakeCut and Adopt are
effects of that machine again, once it makes no version (`fsl_async.roles.sync.group_hold`).
"""

from __future__ import annotations

from attrs import frozen

from fsl_async.roles.groups.events import Decision
from fsl_async.roles.groups.messages import View
from fsl_async.roles.machine import Effect, Event


@frozen
class TakeCut(Effect, Event, tag="take_cut"):
    """Hold merges, then make the newest version durable as the cut of `round`.

    Ends in CutTaken or CutFailed.
    """

    round: int


@frozen
class ResumeMerges(Effect, Event, tag="resume_merges"):
    """Let the group merge again."""


@frozen
class EndGroup(Effect, Event, tag="end_group"):
    """Answers GroupEnds: all groups end, and what they merged is in decided rounds."""


@frozen
class StartReduction(Effect, tag="start_reduction"):
    """Reduce with the members of a view. Ends in ReductionDone or ReductionFailed."""

    view: View
    rank: int


@frozen
class KillReduction(Effect, tag="kill_reduction"):
    """End the process of a reduction, which then ends in no event."""

    reason: str


@frozen
class PassAddress(Effect, tag="pass_address"):
    """Give the process of a reduction the address of another rank."""

    key: str
    blob: bytes


@frozen
class KeepAttempt(Effect, tag="keep_attempt"):
    """Write the number of an attempt to the ledger. Ends in Done.

    With a problem there is no line, and none may appear later.
    """

    round: int
    attempt: int


@frozen
class KeepDecision(Effect, tag="keep_decision"):
    """Write the decision of a round to the ledger. Ends in Done, like KeepAttempt.

    Once the line is there, the round is decided. contributors: name -> begin and end of the tokens
    of its cut.
    """

    round: int
    attempt: int
    digest: str
    contributors: dict[str, tuple[int, int]]


@frozen
class ReceiveGlobal(Effect, tag="receive_global"):
    """Find these global weights on disk, or fetch them. Ends in GlobalHeld or GlobalLost."""

    decision: Decision


@frozen
class SendGlobal(Effect, tag="send_global"):
    """Send the newest global weights to a member; with the model if `model`."""

    peer: str
    decision: Decision
    model: bool


@frozen
class Adopt(Effect, Event, tag="adopt"):
    """Make a version of decided weights, plus what the group merged that is not in them.

    counted: the group's cut is in them. Ends in Adopted or AdoptFailed; merges go on afterwards.
    """

    decision: Decision
    counted: bool
