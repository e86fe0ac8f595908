"""Real nodes of which everything is kept that they tell, journal or raise, and peers that put hostile text into any field.

The five kinds of node that read messages: a parameter server, a client, a split server, a split client, and a parameter server's session with a
split server. Which fields there are is read from the tables of messages and of the transport, so that a new one is covered when it is there.
"""

# ruff: noqa: D102 - small doubles of documented protocols

import contextlib
import random

import attrs
import msgpack
import split_targets
import stranger_targets
from target_parts import CROOK, SESSION, Loopback, pack

import fsl_transport as tp
from fsl_async.cluster.launch_file import Launching, LaunchRule
from fsl_async.cluster.relauncher import Relauncher
from fsl_async.config import load as configs
from fsl_async.errors import RefusedError, describe
from fsl_async.nodes import wire
from fsl_async.nodes.ps import run_end_notifier
from fsl_async.nodes.ps.relaunching import watched
from fsl_async.observe.journal_lines import as_fields
from fsl_async.observe.reporter import Reporter
from fsl_async.roles.messages import MessageError
from fsl_async.roles.split import messages as split
from fsl_async.roles.sync import messages as msg
from fsl_transport.session import frames

HOSTILE = "\x1b]0;owned\x07\nps: all good\r\u202e"
SHOWN = r"\u001b]0;owned\u0007\u000aps: all good\u000d\u202e"
OWN_EVENTS = (tp.PeerDown, tp.Refused, tp.StreamDeclined, tp.StreamFailed, tp.StreamReceived)
"""What the transport tells whose text it has read itself; bodies are read above it."""


def texts_in(value):
    """Every text at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from texts_in(key)
            yield from texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner)


class Told:
    """All that a node tells people, writes into its journal and raises."""

    def __init__(self):
        self.lines = []
        self.texts = []
        self.journal = Reporter(self, self.lines.append, lambda: 0.0)

    # The journal behind the operator's lines.

    def event(self, item, now, cause=None):
        self.texts.extend(texts_in(as_fields(item)))
        return 0

    effect = event

    def note(self, name, now, cause=None, /, **fields):
        self.texts.extend(texts_in(fields))
        return 0

    # What shells are given.

    def say(self, note):
        self.lines.append(note.text)

    def finished(self, effect):
        self.texts.append(effect.reason)

    def raised(self, text):
        """What becomes the line with which a process ends."""
        self.texts.append(text)
        self.lines.append(describe(RefusedError(text)).message)

    def seen(self, event):
        if isinstance(event, OWN_EVENTS):
            self.texts.extend(texts_in(attrs.asdict(event)))
        if isinstance(event, tp.StreamOffered):
            self.texts.append(event.stream_id)

    def check(self):
        """Nothing moves a cursor, and each line is one."""
        for text in [*self.lines, *self.texts]:
            assert text.isprintable(), ascii(text)
            assert len(text) <= 10_000
        for line in self.lines:
            assert not line.startswith("ps: ")


def listening(node, shell, told, handle=None):
    """Keep what the transport tells a shell, and then hand it on."""
    handle = handle or shell.on_transport

    def on_transport(event):
        told.seen(event)
        handle(event)

    node._context.events._on_event = on_transport


class Servers:
    """A server with two sessions, one of which is the crook's: what both kinds of server have in common."""

    kinds = (frames.HELLO, frames.BEAT, frames.BYE, frames.DATA)

    def __init__(self, world, told):
        self.world, self.told = world, told
        self.incarnation = 1
        self.seq = 0

    def send(self, *fields):
        """A head of the crook's session; one that is over is begun anew."""
        if self.world.endpoint.last_received_ago_s(CROOK) is None:
            self.incarnation += 1
            self.world.sessions[CROOK] = self.world.enter(CROOK, self.incarnation)
            self.seq = 0
            self.began()
        kind, *rest = fields
        if kind == frames.DATA:
            self.seq += 1
            rest = [self.seq, 0, *rest]
        head = [kind, self.world.sessions[CROOK], *rest]
        self.world.deliver(CROOK, 0, [msgpack.packb(head)])

    def began(self):
        """A session has begun."""

    def greet(self, body, role="client", name=CROOK):
        """A hello with this body, and whatever becomes of it."""
        self.incarnation += 1
        head = (frames.HELLO, frames.PROTOCOL_VERSION, self.incarnation, 1, name, role, body)
        with contextlib.suppress(AssertionError):
            self.world.deliver(CROOK, 0, [pack(*head)])
        self.world.endpoint.disconnect(CROOK, "next")

    refuse = None

    def close(self):
        self.world.close()


class ParameterServer(Servers):
    """With its relauncher, which reads why clients leave."""

    table = msg.TABLE

    def __init__(self, folder, told):
        world = stranger_targets.World(folder, told)
        super().__init__(world, told)
        rules = (LaunchRule("*", "command", ("true",)),)
        relauncher = Relauncher(
            world.scheduler,
            Launching(rules),
            "tcp://h:1",
            lambda what, client, text: told.lines.append(text),
            wanted=lambda: True,
            launchers={},
        )
        listening(world.endpoint, world.shell, told, watched(world.shell.on_transport, relauncher))
        for name in world.sessions:
            relauncher.seen(name)
        self.began()

    def began(self):
        model = stranger_targets.MODEL
        attach = msg.to_wire(msg.Attach(model.fingerprint, model.to_wire(), ""))
        self.send(frames.DATA, frames.MESSAGE, attach)


class SplitServer(Servers):
    """Beside a crook who may say that he is a parameter server."""

    table = split.TABLE

    def __init__(self, folder, told):
        super().__init__(split_targets.SplitWorld(folder, "splitfed-v2", told), told)
        listening(self.world.endpoint, self.world.shell, told)


class Dialers:
    """A node whose server is hostile."""

    kinds = (frames.WELCOME, frames.REFUSE, frames.BEAT, frames.BYE, frames.DATA)

    def __init__(self, told):
        self.told = told
        self.scheduler, self.link = tp.VirtualScheduler(), Loopback()
        self.seq = 0
        self.shell = self.made()
        listening(self.endpoint, self.shell, told)

    @property
    def endpoint(self):
        return self.shell.endpoint

    def deliver(self, *fields):
        self.link.receive("", tp.Lane.CONTROL, [msgpack.packb(fields)], b"")
        self.scheduler.run_until(self.scheduler.time() + 0.01)

    def answer(self, kind, *fields):
        """WELCOME or REFUSE for the attempt that is under way."""
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
        """A welcome with this body, and whatever becomes of it."""
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
    """With a learner that is to raise what the server says."""

    table = msg.TABLE

    def made(self):
        shell = stranger_targets.client_of(self.scheduler, self.link, self.told)
        shell.learner.refuse = lambda _, text: self.told.raised(text)
        return shell

    def body(self):
        return wire.Welcome("r", 0, 2, configs.to_wire(configs.Config())).to_wire()


class SplitClient(Dialers):
    """Of which the split server asks for uploads."""

    table = split.TABLE

    def made(self):
        shell, _ = split_targets.client_of(self.scheduler, self.link, "splitfed-v2", self.told)
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
            say=self.told.say,
        )

    def close(self):
        self.endpoint.close()


@contextlib.contextmanager
def node(kind, folder):
    """A node of a kind, and what it has told; checked at the end."""
    told = Told()
    made = kind(folder, told) if issubclass(kind, Servers) else kind(told)
    try:
        yield made, told
    finally:
        made.close()
    told.check()


NODES = (ParameterServer, Client, SplitServer, SplitClient, RunEndNotifier)
TABLES = {"messages": msg.TABLE, "messages of split learning": split.TABLE}
_TEXTS = ("r", f"{CROOK}/1/0/0", "d" * 32, "later", "update")


def sample(field, kind, form):
    """A value that a field takes."""
    if kind is str or form is not None:
        for text in _TEXTS:
            with contextlib.suppress(MessageError):
                return text if form is None else form.check(field, text)
        raise AssertionError(f"no text of the form of {field}: add one to _TEXTS")
    if field == "manifest":
        return stranger_targets.MODEL.to_wire()
    return {int: 0, bool: False, float: 0.5, dict: {}, list: [1]}[kind]


def bodies_of(table, name, text):
    """Each body of a message with `text` in one field, at a place where the field has text: (field, body)."""
    for field, body in _maps_of(table._fields[table.types[name]], text):
        yield field, {"m": name} | body


def _good(fields):
    """A map of fields that is read."""
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
            yield one.name, good | {one.name: [[text, [1], 0]]}
            yield one.name, good | {one.name: [text]}


def heads_of(text):
    """Each head of the transport with `text` in one field: kind and the fields behind the session's, or for HELLO, WELCOME and REFUSE all."""
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
    """A head of `heads_of`, at a node that reads its kind."""
    if kind == frames.HELLO:
        name = CROOK if fields[3] == "t" else fields[3]
        made.greet(fields[5], role=fields[4], name=name)
    elif kind == frames.WELCOME:
        made.greet(fields[5])
    elif kind == frames.REFUSE:
        made.refuse(fields[3], fields[4])
    else:
        made.send(kind, *(fields if kind == frames.DATA else fields[1:]))


def play_body(made, body):
    """One body wherever a peer may put one."""
    made.send(frames.DATA, frames.MESSAGE, body)
    number = made.seq + 1
    made.send(frames.DATA, frames.OFFER, number, f"up:{CROOK}/1/0/0", 1, 0, body)
    made.send(frames.DATA, frames.OFFER, number + 1, "full:0", 1, 0, body)
    made.send(frames.BEAT, 0, False, body)
    made.greet(body)
