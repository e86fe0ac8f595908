"""Drives a pure machine by its events and inspects its effects; for the tests of all roles."""

import attrs

from fsl_async.roles.machine import SERVER, Offered, Received, Send, TimerFired
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.progress import RunPosition


def told(effects, peer=None):
    """Return the messages sent (to `peer`, or to any peer), in order.

    Announcements are without the run's position, which the tests of progress check.
    """
    return [
        attrs.evolve(effect.message, position=RunPosition())
        if isinstance(effect.message, msg.Announce)
        else effect.message
        for effect in effects
        if isinstance(effect, Send) and peer in (None, effect.peer)
    ]


def of(effects, kind):
    """Return the effects of one class."""
    return [effect for effect in effects if isinstance(effect, kind)]


@attrs.define
class Driver:
    """A machine with a clock. Every method returns the effects of the event it feeds; a driver of a
    role names its events.
    """

    machine: object
    now: float = 0.0
    moving: tuple = ()  # the peers whose transfers advance, when the machine asks

    def feed(self, event, after_s=0.0):
        """Feed an event `after_s` seconds later; returns the effects."""
        self.now += after_s
        return self.look(self.machine.handle(event, self.now))

    def receive(self, message, peer=SERVER, stream="", after_s=0.0):
        """Feed a message of a peer, or the offer of a stream with it."""
        offered = Offered(peer, message, stream)
        return self.feed(offered if stream else Received(peer, message), after_s)

    def look(self, effects):
        """Answer `CheckTransfers`, as the shell does; returns all effects."""
        made = []
        for effect in effects:
            if isinstance(effect, do.CheckTransfers):
                made += self.feed(ev.TransfersChecked(tuple(self.moving)))
            else:
                made.append(effect)
        return made

    def fire(self):
        """Advance the clock to the next deadline and feed it; the deadline must not stay due."""
        when = self.machine.next_deadline()
        assert when is not None, "no deadline is armed"
        self.now = max(self.now, when)
        effects = self.look(self.machine.handle(TimerFired(), self.now))
        after = self.machine.next_deadline()
        assert after is None or after > self.now, "a deadline that is due stays due: a timer storm"
        return effects
