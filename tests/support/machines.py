"""Driving a pure machine by its events, and looking at what it wants done: for every test of a
role.
"""

import attrs

from fsl_async.roles.machine import Send, TimerFired
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev


def told(effects, peer=None):
    """The messages told (to `peer`, or to anybody), in order."""
    return [
        effect.message
        for effect in effects
        if isinstance(effect, Send) and peer in (None, effect.peer)
    ]


def of(effects, kind):
    """The effects of one class."""
    return [effect for effect in effects if isinstance(effect, kind)]


@attrs.define
class Driver:
    """A machine with a clock. Every method returns the effects of the event it feeds; a driver of a
    role names its events.
    """

    machine: object
    now: float = 0.0
    moving: tuple = ()  # whose transfers advance, when the machine asks

    def feed(self, event, after_s=0.0):
        """Give it an event."""
        self.now += after_s
        return self.look(self.machine.handle(event, self.now))

    def look(self, effects):
        """Answer the question for transfers, as the shell does."""
        made = []
        for effect in effects:
            if isinstance(effect, do.CheckTransfers):
                made += self.feed(ev.TransfersChecked(tuple(self.moving)))
            else:
                made.append(effect)
        return made

    def fire(self):
        """Let the clock reach the next deadline; it must be used up by that."""
        when = self.machine.next_deadline()
        assert when is not None, "no deadline is armed"
        self.now = max(self.now, when)
        effects = self.look(self.machine.handle(TimerFired(), self.now))
        after = self.machine.next_deadline()
        assert after is None or after > self.now, "a deadline that is due stays due: a timer storm"
        return effects
