"""Real nodes with everything recorded that they print, journal or raise, and peers that put hostile
text into any field.

Five kinds of node read messages: a parameter server, a client, a split server, a split client, and
a parameter server's session with a split server. The fields are read from the tables of messages
and of the transport, so that a new one is covered.
"""

# ruff: noqa: D102 - small doubles of documented protocols

import contextlib
import random

import attrs
import msgpack
import parser_targets
import split_targets
from target_parts import ATTACKER, SESSION, Loopback, pack

import fsl_transport as tp
from fsl_async.cluster.relauncher import Relauncher
from fsl_async.cluster.restarts import Launching, LaunchRule
from fsl_async.config import load as configs
from fsl_async.errors import RefusedError, describe
from fsl_async.nodes import wire
from fsl_async.nodes.ps import run_end_notifier
from fsl_async.nodes.ps.relaunching import watched
from fsl_async.observe.journal_lines import as_fields
from fsl_async.observe.table import Reporter
from fsl_async.roles.messages import MessageError
from fsl_async.roles.split import messages as split
from fsl_async.roles.sync import messages as msg
from fsl_transport.session import frames

HOSTILE = "\x1b]0;owned\x07\nps: all good\r\u202e"
SHOWN = r"\u001b]0;owned\u0007\u000aps: all good\u000d\u202e"
OWN_EVENTS = (tp.PeerDown, tp.Refused, tp.StreamDeclined, tp.StreamFailed, tp.StreamReceived)
"""Transport events whose text the transport has read itself; message bodies are read above it."""


def texts_in(value):
    """Yield every text at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from texts_in(key)
            yield from texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner)


class Outputs:
    """Everything that a node prints, writes into its journal and raises."""

    def __init__(self):
        self.lines = []
        self.texts = []
        self.journal = Reporter(self, self.lines.append, lambda: 0.0)

    # The journal's methods.

    def event(self, item, now, cause=None):
        self.texts.extend(texts_in(as_fields(item)))
        return 0

    effect = fact = event

    def note(self, name, now, cause=None, /, **fields):
        self.texts.extend(texts_in(fields))
        return 0

    # The callbacks of shells.

    def say(self, note):
        self.lines.append(note.text)

    def finished(self, effect):
        self.texts.append(effect.reason)

    def raised(self, text):
        """Record an error, and the line with which it ends a process."""
        self.texts.append(text)
        self.lines.append(describe(RefusedError(text)).message)

    def seen(self, event):
        if isinstance(event, OWN_EVENTS):
            self.texts.extend(texts_in(attrs.asdict(event)))
        if isinstance(event, tp.StreamOffered):
            self.texts.append(event.stream_id)

    def check(self):
        """Check that no text moves the cursor, and that each line is one line."""
        for text in [*self.lines, *self.texts]:
            assert text.isprintable(), ascii(text)
            assert len(text) <= 10_000
        for line in self.lines:
            assert not line.startswith("ps: ")


def listening(node, shell, outputs, handle=None):
    """Record the transport's events, then pass them to the shell."""
    handle = handle or shell.on_transport

    def on_transport(event):
        outputs.seen(event)
        handle(event)

    node._context.events._on_event = on_transport


class Servers:
    """A ps or split server with two sessions, one of them the attacker's."""

    kinds = (frames.HELLO, frames.BEAT, frames.BYE, frames.DATA)

    def __init__(self, world, outputs):
        self.world, self.outputs = world, outputs
        self.incarnation = 1
        self.seq = 0

    def send(self, *fields):
        """Send a head in the attacker's session; open a new session if it is over."""
        if self.world.endpoint.last_received_ago_s(ATTACKER) is None:
            self.incarnation += 1
            self.world.sessions[ATTACKER] = self.world.enter(ATTACKER, self.incarnation)
            self.seq = 0
            self.began()
        kind, *rest = fields
        if kind == frames.DATA:
            self.seq += 1
            rest = [self.seq, 0, *rest]
        head = [kind, self.world.sessions[ATTACKER], *rest]
        self.world.deliver(ATTACKER, 0, [msgpack.packb(head)])

    def began(self):
        """Act after a session has begun."""

    def greet(self, body, role="client", name=ATTACKER):
        """Send a hello with this body; any outcome is allowed."""
        self.incarnation += 1
        head = (frames.HELLO, frames.PROTOCOL_VERSION, self.incarnation, 1, name, role, body)
        with contextlib.suppress(AssertionError):
            self.world.deliver(ATTACKER, 0, [pack(*head)])
        self.world.endpoint.disconnect(ATTACKER, "next")

    refuse = None

    def close(self):
        self.world.close()


class ParameterServer(Servers):
    """A parameter server with its relauncher, which reads why clients leave."""

    table = msg.TABLE

    def __init__(self, folder, outputs):
        world = parser_targets.World(folder, outputs)
        super().__init__(world, outputs)
        rules = (LaunchRule("*", "command", ("true",)),)
        relauncher = Relauncher(
            world.scheduler,
            Launching(rules),
            "tcp://h:1",
            lambda what, client, text: outputs.lines.append(text),
            wanted=lambda: True,
            launchers={},
        )
        listening(
            world.endpoint, world.shell, outputs, watched(world.shell.on_transport, relauncher)
        )
        for name in world.sessions:
            relauncher.seen(name)
        self.began()

    def began(self):
        model = parser_targets.MODEL
        attach = msg.to_wire(msg.Attach(model.fingerprint, model.to_wire(), []))
        self.send(frames.DATA, frames.MESSAGE, attach)


class SplitServer(Servers):
    """A split server whose attacker may claim to be a parameter server."""

    table = split.TABLE

    def __init__(self, folder, outputs):
        super().__init__(split_targets.SplitWorld(folder, "splitfed-v2", outputs), outputs)
        listening(self.world.endpoint, self.world.shell, outputs)


class Dialers:
    """A node that dials a hostile server."""

    kinds = (frames.WELCOME, frames.REFUSE, frames.BEAT, frames.BYE, frames.DATA)

    def __init__(self, outputs):
        self.outputs = outputs
        self.scheduler, self.link = tp.VirtualScheduler(), Loopback()
        self.seq = 0
        self.shell = self.made()
        listening(self.endpoint, self.shell, outputs)

    @property
    def endpoint(self):
        return self.shell.endpoint

    def deliver(self, *fields):
        self.link.receive("", tp.Lane.CONTROL, [msgpack.packb(fields)], b"")
        self.scheduler.run_until(self.scheduler.time() + 0.01)

    def answer(self, kind, *fields):
        """Send WELCOME or REFUSE for the present attempt."""
        self.shell.dial()
        machine = self.endpoint._machine
        self.deliver(kind, frames.PROTOCOL_VERSION, machine.incarnation, machine.attempt, *fields)

    def welcome(self, body):
        self.seq = 0
        self.answer(frames.WELCOME, SESSION, 9, body)

    def refuse(self, code, text):
        self.endpoint.disconnect(reason="next")
        self.answer(frames.REFUSE, code, text, 7)

    def greet(self, body, **_):
        """Send a welcome with this body; any outcome is allowed."""
        self.endpoint.disconnect(reason="next")
        self.welcome(body)
        self.endpoint.disconnect(reason="next")

    def send(self, kind, *rest):
        if not self.endpoint.is_up:
            self.welcome(self.body())
        if kind == frames.DATA:
            self.seq += 1
            rest = [self.seq, 0, *rest]
        self.deliver(kind, SESSION, *rest)

    def close(self):
        self.endpoint.close()
        self.shell.node.close()


class Client(Dialers):
    """A client whose learner raises the text of a refusal."""

    table = msg.TABLE

    def made(self):
        shell = parser_targets.client_of(self.scheduler, self.link, self.outputs)
        shell.learner.refuse = lambda _, text: self.outputs.raised(text)
        return shell

    def body(self):
        return wire.Welcome("r", 0, 2, configs.to_wire(configs.Config())).to_wire()


class SplitClient(Dialers):
    """A client of a split server."""

    table = split.TABLE

    def made(self):
        shell, _ = split_targets.client_of(self.scheduler, self.link, "splitfed-v2", self.outputs)
        return shell

    def body(self):
        return split.to_wire(split.SplitWelcome("r", 2, "", -1))


class RunEndNotifier(Dialers):
    """A parameter server's session with a split server elsewhere."""

    table = split.TABLE
    body = SplitClient.body

    def made(self):
        return run_end_notifier.RunEndNotifier(
            "r",
            lambda take: tp.DialerEndpoint(
                self.link,
                self.scheduler,
                tp.TransportSettings(),
                take,
                split.PS_ROLE,
                incarnation=1,
                rng=random.Random(0),
            ),
            scheduler=self.scheduler,
            say=self.outputs.say,
        )

    def close(self):
        self.endpoint.close()


@contextlib.contextmanager
def node(kind, folder):
    """Make a node of a kind; yields it and its outputs, which are checked at the end."""
    outputs = Outputs()
    made = kind(folder, outputs) if issubclass(kind, Servers) else kind(outputs)
    try:
        yield made, outputs
    finally:
        made.close()
    outputs.check()


NODES = (ParameterServer, Client, SplitServer, SplitClient, RunEndNotifier)
TABLES = {"messages": msg.TABLE, "messages of split learning": split.TABLE}
_TEXTS = ("r", f"{ATTACKER}/1/0/0", "d" * 32, "later", "update")


def sample(field, kind, form):
    """Return a valid value of a field."""
    if kind is str or form is not None:
        for text in _TEXTS:
            with contextlib.suppress(MessageError):
                return text if form is None else form.check(field, text)
        raise AssertionError(f"no text of the form of {field}: add one to _TEXTS")
    if field == "manifest":
        return parser_targets.MODEL.to_wire()
    if kind is bytes:
        return parser_targets.SCALARS
    return {int: 0, bool: False, float: 0.5, dict: {}, list: [1]}[kind]


def bodies_of(table, name, text):
    """Yield (field, body) of a message for each field that has text, with `text` there."""
    for field, body in _maps_of(table._fields[table.types[name]], text):
        yield field, {"m": name} | body


def _good(fields):
    """Return a valid map of fields."""
    return {
        one.name: sample(one.name, one.kind, one.form) if one.parts is None else _good(one.parts)
        for one in fields.fields
    }


def _maps_of(fields, text):
    good = _good(fields)
    for one in fields.fields:
        if one.parts is not None:
            for field, inner in _maps_of(one.parts, text):
                yield f"{one.name}.{field}", good | {one.name: inner}
        elif one.kind is str or one.form is not None:
            yield one.name, good | {one.name: text}
        elif one.kind is dict:
            yield one.name, good | {one.name: {text: 0.5}}
            yield one.name, good | {one.name: {"a": text}}
        elif one.kind is list:
            yield one.name, good | {one.name: [[text, [1], 0, False]]}
            yield one.name, good | {one.name: [text]}


def heads_of(text):
    """Yield (kind, fields) of each head of the transport, with `text` in one field."""
    for kind, (_, types, _) in frames._SHAPES.items():
        for at, of in enumerate(types):
            for value in {str: [text], dict: [{text: 1}, {"a": text}, {"a": [text]}]}.get(of, ()):
                fields = [_head_field(one) for one in types]
                fields[at] = value
                yield kind, fields
    for op, (types, _) in frames._OPS.items():
        for at, of in enumerate(types):
            for value in {str: [text], dict: [{text: 1}, {"m": text}]}.get(of, ()):
                fields = [_head_field(one) for one in types]
                fields[at] = value
                yield frames.DATA, [op, *fields]


def _head_field(of):
    return {int: 1, bool: True, str: "t", dict: {}, bytes: SESSION}[of]


def play_head(made, kind, fields):
    """Deliver a head of `heads_of` to a node that reads its kind."""
    if kind == frames.HELLO:
        name = ATTACKER if fields[3] == "t" else fields[3]
        made.greet(fields[5], role=fields[4], name=name)
    elif kind == frames.WELCOME:
        made.greet(fields[5])
    elif kind == frames.REFUSE:
        made.refuse(fields[3], fields[4])
    else:
        made.send(kind, *(fields if kind == frames.DATA else fields[1:]))


def play_body(made, body):
    """Deliver one body in every place where a peer may put one."""
    made.send(frames.DATA, frames.MESSAGE, body)
    number = made.seq + 1
    made.send(frames.DATA, frames.OFFER, number, f"up:{ATTACKER}/1/0/0", 1, 0, body)
    made.send(frames.DATA, frames.OFFER, number + 1, "full:0", 1, 0, body)
    made.send(frames.BEAT, 0, False, body)
    made.greet(body)
