"""The relay's machine: who gets a line, when a line is dropped, when the relay may end. Pure.

A line is a connection that came in, and its twin towards the server. What passes is never looked at: after the first 64 bytes, which say
whether this is ZeroMQ and how the rest is protected, bytes only count.

Rules
  * Who says nothing, or something else than ZeroMQ, costs no connection to the server: the twin is dialled when the first ten bytes are
    there. A sealed door (the address behind it has a key) lets nothing but CURVE pass.
  * A line is a stranger's until `stranger_s` after the server has said its first word: by then it has thrown out who is not in its allow-list. Who gets one at all: `newcomers`.
  * A server that is away is dialled again, with growing waits, as long as a client waits for a greeting; then the client tries again by itself. One that stands and says nothing has `stranger_s`.
  * A line that holds bytes for a side that takes none for `stuck_s`, whatever passes the other way, and one that carries nothing at all for `idle_s`, is dropped.
    Bulk connections are rightly quiet from one sync to the next.
  * What waits on all lines, here and in the kernel, is weighed several times a second (by the shell). Where it is more than the memory, the lines that hold most are dropped until it is not. Strangers have a quarter of the memory to themselves, the others the rest. Of strangers the address counts
    of which most waits, since one can have many lines; of the others, who have keys, the line. So nobody is touched who holds no more than an equal share. What a dropped line carried resumes at the chunk. The address
    of a stranger's line that was dropped for it is shunned: who comes again at once would fill it as fast.
  * Asked to end: no new lines; those there are go on until all of them are quiet, at most `drain_s`. What is cut off resumes at the chunk,
    through whatever takes this one's place.

Line      state      event                          -> state      effects
          -          LineAccepted, there is room    -> SILENT     ReadGreeting
          -          LineAccepted, no room, ending  -> DROPPED    DropLine
          SILENT     LineSigned                     -> DIALLING   DialTwin
          SILENT     LineSigned, too fast           -> DROPPED    DropLine
          SILENT     LineGreeted "" or timer        -> DROPPED    DropLine
          DIALLING   LineDialled                    -> OPEN       Carry
          DIALLING   DialFailed, within dial_s      -> WAITING
          DIALLING   DialFailed later, or timer     -> DROPPED    DropLine
          WAITING    timer                          -> DIALLING   DialTwin
          OPEN       LineAnswered                   -> OPEN       (known after stranger_s)
          OPEN       LineGreeted, good              -> OPEN
          OPEN       LineGreeted, not sealed        -> DROPPED    DropLine
          OPEN       timer, greeting not whole,
                     or nothing of the server       -> DROPPED    DropLine
          OPEN       LinesLooked, stuck or idle     -> DROPPED    DropLine
          any        LinesWeighed, holds too much   -> DROPPED    DropLine
          any        LineEnded                      -> (gone)

Relay     SERVING    DrainAsked                     -> ENDING     StopListening, then LookAtLines until quiet
          ENDING     quiet, no lines, or drain_s    -> ENDED      Finish
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from typing import Final

from attrs import field, frozen, mutable

from fsl_async.roles.machine import Deadlines, DrainAsked, Effect, Event, Finish, Note, TimerFired
from fsl_async.roles.relay import effects as relay
from fsl_async.roles.relay import events as evr
from fsl_async.roles.relay.connection_limits import ConnectionLimits, ConnectionRules, Refusal
from fsl_async.roles.relay.load_shedding import heaviest

CURVE: Final = "CURVE"
STRANGERS_PART: Final = 4
"""Of the memory, for strangers."""


@frozen(kw_only=True)
class DoorRules:
    """One door: what the server behind it is called in notes, and whether only sealed traffic may pass."""

    name: str
    sealed: bool


@frozen(kw_only=True)
class RelayRules:
    """Numbers of lines, times in seconds, sizes in bytes."""

    doors: tuple[DoorRules, ...]
    newcomers: ConnectionRules = field(factory=ConnectionRules)
    stranger_s: float = 15.0
    greeting_s: float = 10.0
    dial_s: float = 9.0
    """After a failure later than that there is no other try: ZeroMQ gives a greeting 10 s."""
    redial_s: float = 0.25
    redial_most_s: float = 2.0
    stuck_s: float = 60.0
    idle_s: float = 3600.0
    look_every_s: float = 10.0
    tell_every_s: float = 60.0
    memory_bytes: int = 2048 * 1024 * 1024
    drain_s: float = 10.0
    drain_look_s: float = 0.5
    quiet_bytes: int = 64 * 1024
    """What heartbeats may carry on all lines from one look to the next while the relay ends."""


class LineStage(enum.Enum):
    """See the table."""

    SILENT = "silent"
    DIALLING = "dialling"
    WAITING = "waiting"
    OPEN = "open"
    DROPPED = "dropped"


@mutable
class Line:
    """What is known of one line."""

    number: int
    door: int
    source: str
    accepted_at: float
    stage: LineStage = LineStage.SILENT
    due: float = 0.0
    dialled_at: float = 0.0
    wait_s: float = 0.0
    is_stranger: bool = True
    is_greeted: bool = False
    is_answered: bool = False
    up: int = 0
    down: int = 0
    taken_up: int = 0
    taken_down: int = 0
    up_at: float = 0.0
    """When the server last took something, or nothing waited for it."""
    down_at: float = 0.0
    moved_at: float = 0.0

    def looked(self, state: evr.LineState, now: float) -> None:
        """Take over what it has carried."""
        if state.taken_up != self.taken_up or not (state.held_up or state.taken_up < state.up):
            self.taken_up, self.up_at = state.taken_up, now
        if state.taken_down != self.taken_down or not (
            state.held_down or state.taken_down < state.down
        ):
            self.taken_down, self.down_at = state.taken_down, now
        if (state.up, state.down) != (self.up, self.down):
            self.up, self.down, self.moved_at = state.up, state.down, now


@mutable
class _Totals:
    """Since the relay began."""

    up: int = 0
    down: int = 0
    accepted: int = 0
    dropped: Counter[str] = field(factory=Counter)


class RelayMachine:
    """See the module."""

    def __init__(self, rules: RelayRules) -> None:
        self.rules = rules
        self.lines: dict[int, Line] = {}
        self.totals = _Totals()
        self.deadlines = Deadlines()
        self.ending = ""
        self.ended = False
        self._heap: list[tuple[float, int, str]] = []
        self._newcomers = ConnectionLimits(rules.newcomers)
        self._away: set[int] = set()
        self._told: tuple[int, int, int] = (0, 0, 0)
        self._said: set[str] = set()
        self._drained_bytes = -1
        self._takes = {
            evr.LineAccepted: self._accepted,
            evr.LineSigned: self._signed,
            evr.LineGreeted: self._greeted,
            evr.LineDialled: self._dialled,
            evr.LineAnswered: self._answered,
            evr.DialFailed: self._undialled,
            evr.LineEnded: self._line_ended,
            evr.LinesLooked: self._looked,
            evr.LinesWeighed: self._weighed,
            DrainAsked: self._drain,
            TimerFired: self._timer,
        }

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event, return what is to be done."""
        if self.ended and type(event) is not evr.LinesLooked:
            return []
        take = self._takes[type(event)]
        effects: list[Effect] = take(event, now)  # type: ignore[operator]
        return effects

    def next_deadline(self) -> float | None:
        """When it wants a TimerFired."""
        if self.ended:
            return None
        heap = self._heap
        while heap and not self._is_live(*heap[0]):
            heapq.heappop(heap)
        common = self.deadlines.next()
        if not heap:
            return common
        return heap[0][0] if common is None else min(common, heap[0][0])

    @property
    def carried(self) -> tuple[int, int]:
        """Bytes up and down since the relay began, as far as was looked."""
        lines = self.lines.values()
        return (
            self.totals.up + sum(line.up for line in lines),
            self.totals.down + sum(line.down for line in lines),
        )

    # Lines.

    def _accepted(self, event: evr.LineAccepted, now: float) -> list[Effect]:
        rules = self.rules
        self.totals.accepted += 1
        line = Line(event.line, event.door, event.source, now, moved_at=now)
        refusal = self._newcomers.came(event.source, now)
        self.lines[event.line] = line
        if not self.ending and len(self.lines) == 1:
            self.deadlines.set("look", now + rules.look_every_s)
            if self.deadlines.when("tell") is None:
                self.deadlines.set("tell", now + rules.tell_every_s)
        if self.ending:
            return self._drop(line, "the relay is ending")
        if refusal is not None:
            return self._refuse(line, refusal)
        self._arm(line, now + rules.greeting_s, "due")
        return [relay.ReadGreeting(event.line)]

    def _signed(self, event: evr.LineSigned, now: float) -> list[Effect]:
        line = self._at(event.line, LineStage.SILENT)
        if line is None:
            return []
        refusal = self._newcomers.dials(line.source, now)
        if refusal is not None:
            return self._refuse(line, refusal)
        line.stage = LineStage.DIALLING
        line.dialled_at = now
        line.wait_s = self.rules.redial_s
        self._arm(line, now + self.rules.greeting_s, "due")
        return [relay.DialTwin(line.number)]

    def _greeted(self, event: evr.LineGreeted, now: float) -> list[Effect]:
        line = self._at(event.line, LineStage.SILENT, LineStage.OPEN)
        if line is None:
            return []
        if not event.mechanism:
            return self._drop(line, "something else than ZeroMQ", "no ZeroMQ")
        if self.rules.doors[line.door].sealed and event.mechanism != CURVE:
            text = f"a client at {line.source} does not encrypt: its address must end in ?key=..., as in the line that was printed here"
            return [*self._once("plain", text), *self._drop(line, "not encrypted", "unencrypted")]
        line.is_greeted = True
        line.due = 0.0
        if not line.is_answered:
            self._arm(line, now + self.rules.stranger_s, "due")
        return []

    def _dialled(self, event: evr.LineDialled, now: float) -> list[Effect]:
        line = self._at(event.line, LineStage.DIALLING)
        if line is None:
            return []
        effects: list[Effect] = []
        if line.door in self._away:
            self._away.discard(line.door)
            effects.append(Note(f"{self.rules.doors[line.door].name} is reached again"))
        line.stage = LineStage.OPEN
        line.moved_at = line.up_at = line.down_at = now
        self._arm(line, now + self.rules.greeting_s, "due")
        return [*effects, relay.Carry(line.number)]

    def _answered(self, event: evr.LineAnswered, now: float) -> list[Effect]:
        line = self._at(event.line, LineStage.OPEN)
        if line is not None and not line.is_answered:
            line.is_answered = True
            if line.is_greeted:
                line.due = 0.0
            self._arm(line, now + self.rules.stranger_s, "known")
        return []

    def _undialled(self, event: evr.DialFailed, now: float) -> list[Effect]:
        line = self._at(event.line, LineStage.DIALLING)
        if line is None:
            return []
        effects = self._unreached(line, event.reason)
        if now + line.wait_s > line.dialled_at + self.rules.dial_s:
            return [*effects, *self._drop(line, f"no server: {event.reason}", "no server")]
        line.stage = LineStage.WAITING
        self._arm(line, now + line.wait_s, "due")
        line.wait_s = min(2 * line.wait_s, self.rules.redial_most_s)
        return effects

    def _unreached(self, line: Line, reason: str) -> list[Effect]:
        """Say that the server is away, unless that is known."""
        if line.door in self._away:
            return []
        self._away.add(line.door)
        name = self.rules.doors[line.door].name
        text = f"cannot reach {name}: {reason}; it is tried whenever a client wants it"
        return [Note(text, "warning")]

    def _line_ended(self, event: evr.LineEnded, now: float) -> list[Effect]:
        line = self.lines.pop(event.line, None)
        if line is None:
            return []
        self._newcomers.gone(line.source, is_stranger=line.is_stranger)
        self.totals.up += event.up
        self.totals.down += event.down
        if not self.lines:
            self.deadlines.cancel("look")
            if self.ending:
                return self._finish()
        return []

    def _looked(self, event: evr.LinesLooked, now: float) -> list[Effect]:
        effects: list[Effect] = []
        rules = self.rules
        for state in event.lines:
            line = self._at(state.line, LineStage.OPEN)
            if line is None:
                continue
            line.looked(state, now)
            stuck_s = now - min(line.up_at, line.down_at)
            if stuck_s >= rules.stuck_s:
                effects += self._drop(line, f"one side took nothing for {stuck_s:.0f} s", "stuck")
            elif now - line.moved_at >= rules.idle_s:
                effects += self._drop(line, f"idle for {now - line.moved_at:.0f} s", "idle")
        if self.ended:  # a last look, for the totals
            return []
        if self.ending:
            carried = sum(self.carried)
            before, self._drained_bytes = self._drained_bytes, carried
            is_quiet = not any(state.held_up or state.held_down for state in event.lines)
            if is_quiet and before >= 0 and carried - before <= rules.quiet_bytes:
                return [*effects, *self._finish()]
        return effects

    def _weighed(self, event: evr.LinesWeighed, now: float) -> list[Effect]:
        weights = [
            (held, line)
            for number, held in event.held
            if (line := self.lines.get(number)) is not None and line.stage is not LineStage.DROPPED
        ]
        memory = self.rules.memory_bytes
        strangers = memory // STRANGERS_PART
        strange: dict[str, list[tuple[int, Line]]] = {}
        known: list[list[tuple[int, Line]]] = []
        for held, line in weights:
            if line.is_stranger:
                strange.setdefault(line.source, []).append((held, line))
            else:
                known.append([(held, line)])
        effects: list[Effect] = []
        for held, line in heaviest(strange.values(), strangers):
            self._newcomers.shun(line.source, now)
            effects += self._shed(held, line, strangers)
        for held, line in heaviest(known, memory - strangers):
            effects += self._shed(held, line, memory - strangers)
        return effects

    def _shed(self, held: int, line: Line, memory_bytes: int) -> list[Effect]:
        text = f"more waits here than {amount(memory_bytes)}: the connections on which most does are closed, and what they carried is sent again from the last chunk"
        return [
            *self._once("memory", text),
            *self._drop(line, f"it held {amount(held)}", "memory"),
        ]

    # The relay itself.

    def _drain(self, event: DrainAsked, now: float) -> list[Effect]:
        if self.ending:
            return []
        self.ending = event.reason
        self.deadlines.cancel("tell")
        effects: list[Effect] = [relay.StopListening()]
        if not self.lines:
            return [*effects, *self._finish()]
        self.deadlines.set("drain", now + self.rules.drain_s)
        self.deadlines.set("look", now + self.rules.drain_look_s)
        return [*effects, relay.LookAtLines()]

    def _finish(self) -> list[Effect]:
        self.ended = True
        return [Finish(self.ending)]

    def _timer(self, _: TimerFired, now: float) -> list[Effect]:
        effects: list[Effect] = []
        heap = self._heap
        while heap and heap[0][0] <= now:
            entry = heapq.heappop(heap)
            if not self._is_live(*entry):
                continue
            line = self.lines[entry[1]]
            if entry[2] == "known":
                self._know(line)
            else:
                effects += self._due(line, now)
        for name in self.deadlines.pop_due(now):
            if name == "look":
                every_s = self.rules.drain_look_s if self.ending else self.rules.look_every_s
                self.deadlines.set("look", now + every_s)
                effects.append(relay.LookAtLines())
            elif name == "tell":
                effects += self._send(now)
            else:
                effects += self._finish()
        return effects

    def _due(self, line: Line, now: float) -> list[Effect]:
        line.due = 0.0
        greeting_s, stranger_s = self.rules.greeting_s, self.rules.stranger_s
        if line.stage is LineStage.WAITING:
            line.stage = LineStage.DIALLING
            self._arm(line, max(now, line.dialled_at + greeting_s), "due")
            return [relay.DialTwin(line.number)]
        if line.stage is LineStage.DIALLING:
            reason = f"no answer within {greeting_s:g} s"
            return [*self._unreached(line, reason), *self._drop(line, reason, "no server")]
        if line.is_greeted:
            return self._drop(line, f"the server said nothing for {stranger_s:g} s", "no server")
        return self._drop(line, f"no greeting within {greeting_s:g} s", "silent")

    def _send(self, now: float) -> list[Effect]:
        """Say how much passed since the last time, if anything did."""
        self._said.clear()
        up, down = self.carried
        dropped = sum(self.totals.dropped.values())
        before, self._told = self._told, (up, down, dropped)
        if self.lines:
            self.deadlines.set("tell", now + self.rules.tell_every_s)
        if self._told == before:
            return []
        places = len({line.source for line in self.lines.values()})
        text = (
            f"{counted(len(self.lines), 'connection')} of {counted(places, 'address', 'addresses')}, "
            f"{amount(up - before[0])} up and {amount(down - before[1])} down in the last {self.rules.tell_every_s:g} s"
        )
        if dropped > before[2]:
            why = ", ".join(
                f"{count} {word}" for word, count in sorted(self.totals.dropped.items())
            )
            text += f"; dropped so far: {why}"
        facts: dict[str, int | float | str] = {
            "lines": len(self.lines),
            "addresses": places,
            "up": up,
            "down": down,
            "dropped": dropped,
        }
        return [Note(text, facts=facts)]

    # Inside.

    def _at(self, number: int, *stages: LineStage) -> Line | None:
        line = self.lines.get(number)
        return line if line is not None and line.stage in stages else None

    def _drop(self, line: Line, reason: str, word: str = "") -> list[Effect]:
        line.stage = LineStage.DROPPED
        line.due = 0.0
        if word:
            self.totals.dropped[word] += 1
        return [relay.DropLine(line.number, reason)]

    def _refuse(self, line: Line, refusal: Refusal) -> list[Effect]:
        return self._drop(line, refusal.text, refusal.word)

    def _know(self, line: Line) -> None:
        """It is no stranger any more."""
        line.is_stranger = False
        self._newcomers.known(line.source)

    def _arm(self, line: Line, when: float, what: str) -> None:
        if what == "due":
            line.due = when
        heapq.heappush(self._heap, (when, line.number, what))

    def _is_live(self, when: float, number: int, what: str) -> bool:
        line = self.lines.get(number)
        if line is None:
            return False
        return line.is_stranger if what == "known" else line.due == when

    def _once(self, topic: str, text: str) -> list[Effect]:
        """Say it, unless it was said since the last status line: whoever knocks ever again must not fill the log."""
        if topic in self._said:
            return []
        self._said.add(topic)
        return [Note(text, "warning")]


def counted(count: int, one: str, more: str = "") -> str:
    """How many of what."""
    return f"{count} {one if count == 1 else more or one + 's'}"


def amount(size: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} GB" if size < 1000 else f"{size:,.0f} GB"
