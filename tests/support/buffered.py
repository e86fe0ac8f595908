"""A trigger in one file: every K deltas make a version, from any clients and rounds.

After FedBuff (Nguyen et al., arXiv:2106.06639), with calls instead of clients that push.
"""

from typing import ClassVar

from attrs import frozen

from fsl_async.roles.sync.triggers.completion import Verdict
from fsl_async.roles.sync.triggers.schedule import BackToBack, Periodic
from fsl_async.roles.sync.triggers.selection import Everyone
from fsl_async.roles.sync.triggers.trigger import Trigger

K = 3


@frozen
class Buffered:
    """Merges when K deltas wait; when all clients have answered and fewer wait, all are called
    again.
    """

    any_delta: ClassVar[bool] = True

    k: int = K

    def verdict(self, open_, history, now, *, pending):
        """Decide whether to merge, close, pass or wait."""
        buffered = f"{pending} of {self.k} deltas buffered"
        if pending >= self.k:
            return Verdict("merge", buffered)
        if not open_.missing():
            return Verdict("close", buffered)
        if now >= open_.called_at + open_.cap_s:
            return Verdict("pass", buffered)
        return Verdict("wait", buffered)


def buffered(config):
    """Return the trigger; an entry in TRIGGERS."""
    schedule = BackToBack(config.sync.every_s, config.session.drain_s)
    return Trigger(schedule, Everyone(skips_done=False), Buffered(), trains=False)


def buffered_by_clock(config):
    """Return the trigger with a periodic schedule."""
    schedule = Periodic(config.sync.every_s, config.session.drain_s)
    return Trigger(schedule, Everyone(skips_done=False), Buffered(), trains=False)
