"""Fuzz targets: parsers of a peer's bytes, as functions of bytes that raise only what hostile input
may.

An input is the bytes on the wire, or msgpack that encodes them (a list of steps, so that a mutator
can work on fields). Each target lists the errors it may raise; any other is a defect. `seeds` are
valid inputs to start from.
"""

# ruff: noqa: D102 - small doubles of documented protocols

import contextlib
import random
from pathlib import Path

import admission_targets
import attrs
import msgpack
import numpy as np
import split_targets
from attrs import evolve
from configs import config_of, guard_of
from target_parts import (
    ATTACKER,
    CHUNK_LIMIT,
    HEAD_LIMIT,
    HONEST,
    SESSION,
    Loopback,
    Quiet,
    QuietFiles,
    Target,
    attacker_dialer,
    coded,
    control,
    delivery,
    greeting,
    memory_folder,
    pack,
    piece,
    play,
    steps_of,
)
from torch import nn

import fsl_transport as tp
from fsl_async.config import address
from fsl_async.config import load as configs
from fsl_async.errors import AddressError, FslError, RefusedError
from fsl_async.learn.client.exchange import Exchange
from fsl_async.learn.client.ports import Harm, Orders, ScoreOrder
from fsl_async.learn.client.probes import EvaluatorExchange
from fsl_async.learn.client.training import Training
from fsl_async.learn.split import payload
from fsl_async.nodes import wire
from fsl_async.nodes.client.shell import ClientShell
from fsl_async.nodes.ps.shell import ParameterServerShell, Surroundings
from fsl_async.roles.goodbye import Goodbye
from fsl_async.roles.messages import MessageError
from fsl_async.roles.split import messages as split
from fsl_async.roles.split.messages import UploadKey
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.client import ClientMachine
from fsl_async.roles.sync.delta import Delta, DeltaKey
from fsl_async.roles.sync.evaluator import EvaluatorMachine
from fsl_async.roles.sync.ps import Merging, ParameterServerMachine
from fsl_async.roles.sync.roster import Roster
from fsl_async.roles.sync.weighting import weighting_named
from fsl_async.secure import lattice
from fsl_async.store.book.records import recordable
from fsl_async.store.deltas.delta_kind import Mixed, Seeds
from fsl_async.store.deltas.seed_step import Directions
from fsl_async.store.deltas.spool import key_of_file
from fsl_async.store.disk.chunk_files import digest_of
from fsl_async.store.errors import FrameRefused, LearnError, ManifestError, StoreError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.settings import StoreSettings
from fsl_async.store.store import Store
from fsl_async.tools.sim.training import VirtualWorker
from fsl_codecs import CodecError, CodecSpec, decode_seeds, encode, encode_seeds
from fsl_transport.session import frames
from fsl_transport.zmq.link import parse_routing_id, split_address

SCALARS = encode_seeds(0, np.full((1, 1, 3), 0.5, np.float32))
LINEAR = 64
"""Number of values of the model that the client trains."""
KEY = DeltaKey("a", 1, 0, 0)
UPLOAD = UploadKey("a", 1, 0, 0)
RUN = Directions(seed=1, steps=1, probes=3, rate=1e-3)
MODEL = Manifest.from_shapes([("w", (10, 5)), ("b", (9,))])


# --- one message, with everything that reads its content ---


def read_body(body):
    """Read a body as every role does before it reaches a machine."""
    for table in (msg, split):
        with contextlib.suppress(MessageError):
            read_message(table.from_wire(body))
    for kind in (wire.Hello, wire.Welcome):
        with contextlib.suppress(MessageError):
            found = kind.from_wire(body)
            if kind is wire.Welcome:
                with contextlib.suppress(FslError):
                    configs.from_wire(found.config)


def read_message(message):
    if isinstance(message, msg.Attach):
        with contextlib.suppress(ManifestError):
            Manifest.from_wire(message.manifest, message.frozen)
    key = getattr(message, "key", None)
    if isinstance(key, str):
        for kind in (DeltaKey, UploadKey):
            with contextlib.suppress(ValueError):
                # leading zeros mean the same number
                assert kind.parse(key).text == key or "0" in key
    if isinstance(message, msg.DeltaMeta):
        delta = message.delta
        recordable(evolve(delta, tokens=max(0, delta.tokens), steps=max(0, delta.steps)))


def run_message(data):
    parts = [data]
    if data[:2] == b"\x92\xc4":  # two frames
        with contextlib.suppress(ValueError, msgpack.UnpackException):
            parts = [part for part in msgpack.unpackb(data) if type(part) is bytes]
    found = frames.parse(parts, HEAD_LIMIT, CHUNK_LIMIT)
    if isinstance(found, frames.Hello | frames.Welcome):
        read_body(found.body)
    elif isinstance(found, frames.Beat):
        read_body(found.payload)
    elif isinstance(found, frames.Data):
        for field in found.fields:
            if type(field) is dict:
                read_body(field)


def bodies():
    made = [
        msg.Attach(MODEL.fingerprint, MODEL.to_wire(), [["base", "float32 2", "a" * 16]]),
        msg.Fetch(-1, ""),
        msg.Holding(3, "d" * 32),
        msg.Skip(4, "nothing trained"),
        msg.Score(4, KEY, 1.0, -0.5, 0.25),
        msg.Evaluate(4, [[KEY.text, 0.5]]),
        msg.Rollout(4, b"\1\0\0\0", b"{}", [[b"\1\0\0\0", b"\0\0\0\0", 0.5]] * 2, "a"),
        msg.Disputed("a"),
        msg.Publish(),
        msg.Call(5),
        msg.Turn(5, last=True),
        msg.Accepted(KEY),
        msg.Declined(KEY, "later", "text"),
        msg.Announce(4, "d" * 32),
        msg.Reject("model", "text"),
        msg.Stop("done"),
        msg.Measured(0, "d" * 32, 10, 1, SCALARS),
        msg.SecureCall(4, 1),
        msg.SecureKey(4, 1, b"k" * 32, b"e" * 32),
        msg.SecureSet(
            Roster(4, 1, 0.5, 6, [[name, b"k" * 32, name.encode() * 32] for name in "abc"])
        ),
        msg.SecureShares(4, 1, [["b", b"s" * 148]]),
        msg.Unmask(4, 1, ["a", "b", "c"]),
        msg.SharesRefused(4, 1, ["b"]),
        msg.Unmasked(4, 1, [["b", b"s" * 66]]),
        msg.Scalars(1, "d" * 32, SCALARS),
    ]
    metas = [
        msg.InitialMeta(MODEL.fingerprint),
        msg.DeltaMeta(Delta(KEY, "d" * 32, 100, 3, 0, {"loss": 2.5})),
        msg.VersionMeta("update", 4),
    ]
    of_split = [
        split.SplitHello("r", split.ROLE, 0, {"method": "sl", "cut": "1"}, -1, -1, 0),
        split.SplitWelcome("r", 2, "", -1),
        split.RoundDone(1, 10, {"activations up": 0.1}),
        split.Trained(UPLOAD, 2.5),
        split.UploadRefused(UPLOAD, "later", "text"),
        split.SmashedMeta(UPLOAD, 0, -1, [2, 3, 4], [], 2, 8, True, False),
        split.GradientMeta(attrs.evolve(UPLOAD, leg=1), 1.0, 4),
        split.AuxiliaryMeta(3, 1),
    ]
    plain = [wire.Hello("", -1, "", -1).to_wire()]
    plain.append(wire.Welcome("r", 0, 2, configs.to_wire(configs.Config())).to_wire())
    first = [msg.to_wire(one) for one in made]
    return first + plain, [msg.to_wire(one) for one in metas] + [
        split.to_wire(one) for one in of_split
    ]


def message_seeds():
    said, metas = bodies()
    heads = [pack(frames.DATA, SESSION, 1, 0, frames.MESSAGE, body) for body in said]
    heads += [pack(frames.DATA, SESSION, 1, 0, frames.OFFER, 1, "s", 3, 0, meta) for meta in metas]
    for body in said[-2:] + metas:
        heads.append(pack(frames.HELLO, frames.PROTOCOL_VERSION, 5, 2, "c", "client", body))
        heads.append(pack(frames.WELCOME, frames.PROTOCOL_VERSION, 5, 2, SESSION, 9, body))
    heads += [
        pack(frames.HELLO, 99, 5, 2, [1]),
        pack(frames.REFUSE, frames.PROTOCOL_VERSION, 5, 2, "full", "no room", 0),
        pack(frames.UNKNOWN, SESSION),
        pack(frames.BEAT, SESSION, 4, True, {"loss": 2.5, "step": 4}),
        pack(frames.ACK, SESSION, 3, False),
        pack(frames.BYE, SESSION, "done"),
        msgpack.packb([pack(frames.CHUNK, SESSION, 1, 0, 7, 0, 7, 0, 1, True), b"payload"]),
    ]
    for op in ((2, 1, 0, 0, 0, 99), (3, 1, "no"), (4, 1, 100, 2), (5, 1), (6, 1, "x"), (7, 1, "x")):
        heads.append(pack(frames.DATA, SESSION, 1, 0, *op))
    return heads


# --- texts ---


def run_texts(data):
    text = data.decode("utf-8", "replace")
    parse_routing_id(data)
    key_of_file(text)
    for read, refusal in (
        (address.parse, AddressError),
        (address.parse_listen, AddressError),
        (lambda one: address.seen_from(one, "fsl://h:1"), AddressError),
        (lambda one: split_address(one, listening=True), tp.LocalError),
        (lambda one: split_address(one, listening=False), tp.LocalError),
        (DeltaKey.parse, ValueError),
        (UploadKey.parse, ValueError),
        (Goodbye.read, ()),
    ):
        with contextlib.suppress(refusal):
            read(text)


TEXTS = (
    "fsl://ps.example.org:7100?key=abc",
    "tcp://[::1%eth0]:1",
    "*:0",
    "10.0.0.1:65535/",
    "client-1/c/0123abcd",
    "a/1700000000000000000/3/4",
    "a/1/2/3/1",
    "a@1@2@3.frames",
    "relaunch 110: EC2 spot (terminate)",
)


# --- coded frames where they enter ---


def run_spool(data):
    """Store a delta of one chunk: it is stored or refused, and the store goes on."""
    with memory_folder() as folder:
        store = started_store(Path(folder) / "run")
        key = DeltaKey("a", 1, 0, 0)
        try:
            store.spool_begin(Delta(key, store.digest, 1, 1))
            store.spool_write(key, 0, data)
            store.spool_finish(key)
        finally:
            assert store.known(key) in {None, "accepted", "quarantined"}
            store.close()


def started_store(path):
    store = Store(path, StoreSettings(codec_down=CodecSpec()), files=QuietFiles())
    store.recover()
    store.begin_initial(MODEL)
    store.write_initial(0, encode(np.zeros(MODEL.values, np.float32), CodecSpec()))
    store.finish_initial()
    return store


def run_payload(data):
    """Decode an upload: activations of shape (2, 5, 4), and the last 10 bytes as labels."""
    frame, labels = data[:-10] or b"", data[-10:]
    payload.unpack_labels(labels, 10, 50)
    payload.decode_chunks([frame], 40)


# --- a parameter server ---


class World:
    """A parameter server with all its parts, an honest client, and an attacker that has a session
    too.
    """

    def __init__(self, folder, outputs=Quiet()):  # noqa: B008 - it has no state
        self.ended = []
        self.scheduler = tp.VirtualScheduler()
        self.link = Loopback()
        self.store = started_store(Path(folder) / "run")
        machine = ParameterServerMachine(
            config_of("sync", trigger="clock", every_s=5.0, shards=4, guard=guard_of()),
            Merging(),
            weighting_named("tokens"),
            "r",
        )

        def listener(handle):
            return tp.ListenerEndpoint(
                self.link,
                self.scheduler,
                tp.TransportSettings(),
                handle,
                "ps",
                incarnation=1,
                rng=random.Random(0),
            )

        self.shell = ParameterServerShell(
            machine,
            Surroundings(
                store=self.store,
                worker=VirtualWorker(self.scheduler, lambda: 0.001),
                scheduler=self.scheduler,
                journal=outputs.journal,
                listener=listener,
                say=outputs.say,
                finished=self.ended.append,
            ),
        )
        self.endpoint = self.shell.endpoint
        self.shell.start(self.store.recover())
        self.sessions = {name: self.enter(name) for name in (HONEST, ATTACKER)}
        self.seq = 0

    def enter(self, name, incarnation=1):
        hello = wire.Hello("", -1, "", -1).to_wire()
        head = pack(frames.HELLO, frames.PROTOCOL_VERSION, incarnation, 1, name, "client", hello)
        self.deliver(name, 0, [head])
        welcome = frames.parse(self.link.sent[name][-1], HEAD_LIMIT, 0)
        return welcome.session

    def deliver(self, name, lane, parts):
        self.link.receive(name, tp.Lane(lane), parts, b"")
        self.scheduler.run_until(self.scheduler.time() + 0.01)

    def honest_message(self):
        """Check that a message of the honest client is answered."""
        self.seq += 1
        before = len(self.link.sent[HONEST])
        body = msg.to_wire(msg.Fetch(self.store.version, self.store.digest))
        head = pack(frames.DATA, self.sessions[HONEST], self.seq, 0, frames.MESSAGE, body)
        self.deliver(HONEST, 0, [head])
        heads = self.link.sent[HONEST][before:]
        assert any(b"announce/2" in parts[0] for parts in heads), (
            "the honest client is not answered"
        )

    def close(self):
        self.endpoint.close()
        self.shell.node.close()
        self.store.close()


def run_server(data):
    """Run a parameter server; input: heads (session 0: its own), bulk payloads and waits of the
    attacker.
    """
    with memory_folder() as folder:
        world = World(folder)
        try:
            for step in steps_of(data)[:40]:
                play(world, step, world.honest_message)
            assert world.endpoint.last_received_ago_s(HONEST) is not None, (
                "the honest session is gone"
            )
            world.honest_message()
            assert not world.ended, world.ended
        finally:
            world.close()


def server_seeds():
    said, metas = bodies()
    delta = metas[1] | {"key": f"{ATTACKER}/1/0/0", "base_digest": ""}
    attach = control(1, frames.MESSAGE, said[0])
    offer = control(2, frames.OFFER, 1, f"delta:{ATTACKER}/1/0/0", 1, 1 << 62, delta)
    made = [
        [attach, offer, *(piece(frame) for frame in coded(MODEL.values)[:1])],
        *([attach, offer, piece(one)] for one in coded(MODEL.values)[1:]),
        [control(n + 1, frames.MESSAGE, body) for n, body in enumerate(said[:4])],
        [
            control(1, frames.MESSAGE, said[1]),
            {"h": [frames.DATA, 0, 2, 1, 2, 1, 0, 0, 0, 1 << 40]},
        ],
        [greeting("new", "client", said[-2])],
        [greeting(ATTACKER, "client", said[-2])],
        [[frames.BEAT, 0, 0, True, {"step": 4, "loss": 1.0}], 6.0, [frames.BYE, 0, "done"]],
        [attach, 6.0, control(2, frames.MESSAGE, said[3]), 12.0],
        [attach, *(control(2 + n, frames.MESSAGE, said[12]) for n in range(2))],
    ]
    return [msgpack.packb(one) for one in made]


def run_scalars(data):
    """Parse a frame of scalars, and store it in runs of both kinds that take it."""
    with contextlib.suppress(CodecError):
        found = decode_seeds(data)
        assert encode_seeds(found.first, found.scalars) == data
    for kind in (Seeds(RUN), Mixed(RUN)):
        for index in (0, 1):
            with contextlib.suppress(FrameRefused):
                kind.check(MODEL, index, data)


# --- a client of a hostile parameter server ---


def attached_learner(kind=Exchange):
    """Make a real learner with a model attached, which waits for a version."""
    orders = Orders()
    learner = kind(orders)
    learner.refuse("test", "does not wait")
    with contextlib.suppress(RefusedError):
        Training(orders, learner).attach(nn.Linear(7, 8))
    return learner


def run_learner(data):
    """Fetch a full version of one chunk: the frame is decoded or refused, and the base never half
    changed.
    """
    learner = attached_learner()
    learner.begin_fetch("full", 0)
    learner.put_fetch(0, 0, data)
    learner.finish_fetch(0)


def client_of(scheduler, link, outputs=Quiet(), learner=None):  # noqa: B008 - it has no state
    """Make a client that dials."""
    learner = attached_learner() if learner is None else learner
    kind = EvaluatorMachine if isinstance(learner, EvaluatorExchange) else ClientMachine
    shell = ClientShell(
        kind(ATTACKER, 1),
        learner,
        attacker_dialer(link, scheduler),
        worker=VirtualWorker(scheduler, lambda: 0.001),
        scheduler=scheduler,
        journal=outputs.journal,
        say=outputs.say,
        finished=outputs.finished,
        welcomed=lambda welcome: configs.from_wire(welcome.config),
        end_training=lambda _: None,
    )
    shell.node.feed(ev.Attached(learner.manifest.fingerprint, learner.manifest.values))
    shell.dial()
    return shell


class Scores(Orders):
    """The training thread of an evaluator, which scores at once."""

    def ask(self, order):
        """Score deltas by a loss that needs no model."""
        if isinstance(order, ScoreOrder):
            order.answer(lambda vector: float(np.abs(vector).sum()), Harm(0.1, 0.01))


def run_evaluator(data):
    """Run an evaluator that is on version 0; input: as for a client."""
    learner = attached_learner(EvaluatorExchange)
    learner._training = Scores()
    learner.adopt_initial()
    learner._base_version = learner.version = 0
    run_client(data, learner)


def run_client(data, learner=None):
    """Run a client; input: heads, bulk payloads and waits of a parameter server."""
    scheduler, link = tp.VirtualScheduler(), Loopback()
    shell = client_of(scheduler, link, learner=learner)
    shell.machine.model_version = shell.learner.version
    for step in steps_of(data)[:40]:
        _, lane, parts, wait_s = delivery(step, SESSION)
        if parts:
            link.receive("", tp.Lane(lane), parts, b"")
        scheduler.run_until(scheduler.time() + (wait_s or 0.01))
    shell.endpoint.close()
    shell.node.close()


def client_seeds():
    said, metas = bodies()
    welcome = [frames.WELCOME, frames.PROTOCOL_VERSION, 1, 1, SESSION, 9, said[-1]]
    digest = digest_of(np.zeros(LINEAR, np.float32))
    announce = control(1, frames.MESSAGE, msg.to_wire(msg.Announce(0, digest)))
    offer = control(2, frames.OFFER, 1, "full:0", 1, 0, metas[2] | {"kind": "full", "version": 0})
    zeros = encode(np.zeros(LINEAR, np.float32), CodecSpec())
    chunk = piece(zeros)
    made = [
        [welcome, announce, offer, chunk, 5.0],
        [welcome, *(control(n + 1, frames.MESSAGE, body) for n, body in enumerate(said[4:8]))],
        [
            welcome,
            announce,
            *(control(n + 2, frames.MESSAGE, one) for n, one in enumerate(said[8:12])),
        ],
        [[frames.REFUSE, frames.PROTOCOL_VERSION, 1, 1, "superseded", "text", 7]],
        [welcome, [frames.UNKNOWN, SESSION], 3.0],
        [welcome, announce, offer, chunk, 5.0, control(3, frames.MESSAGE, said[13])],
    ]
    return [msgpack.packb(one) for one in made]


def evaluator_seeds():
    """Inputs with a question, and the delta that it is about in one frame, or in others."""
    said, metas = bodies()
    welcome = [frames.WELCOME, frames.PROTOCOL_VERSION, 1, 1, SESSION, 9, said[-1]]
    question = msg.to_wire(msg.Evaluate(0, [[KEY.text, 0.5]]))
    digest = digest_of(np.zeros(LINEAR, np.float32))
    announce = control(1, frames.MESSAGE, msg.to_wire(msg.Announce(0, digest)))
    begun = [welcome, announce, control(2, frames.MESSAGE, question)]
    stream = f"delta:{KEY.text}"
    made = [
        [*begun, control(3, frames.OFFER, 1, stream, 1, 0, metas[1]), piece(frame), 5.0]
        for frame in (*coded(LINEAR), SCALARS)
    ]
    made += [
        [*begun, control(3, frames.OFFER, 1, name, chunks, 0, metas[1]), 5.0]
        for name, chunks in (("delta:x", 2), (stream, 2), ("delta:x", 1))
    ]
    made += [[*made[0], control(4, frames.MESSAGE, question), 1.0]]
    return [msgpack.packb(one) for one in made]


TARGETS = {
    "message": Target(run_message, (tp.PeerError,), message_seeds),
    "texts": Target(run_texts, (), lambda: [text.encode() for text in TEXTS]),
    "spool": Target(
        run_spool, (FrameRefused, StoreError), lambda: coded(MODEL.values), 64, 8 << 20
    ),
    "scalars": Target(
        run_scalars,
        (),
        lambda: [SCALARS, encode_seeds(7, np.ones((2, 3, 4), np.float32)), coded(MODEL.values)[0]],
        64,
        8 << 20,
    ),
    "masked": Target(
        lambda data: lattice.unpack(data, 50),
        (CodecError,),
        lambda: [lattice.pack(np.arange(50, dtype="<u2"), 9)],
    ),
    "payload": Target(
        run_payload, (LearnError,), lambda: [frame + bytes(10) for frame in coded(40)], 64, 8 << 20
    ),
    "learner": Target(run_learner, (LearnError,), lambda: coded(LINEAR), 64, 8 << 20),
    "client": Target(run_client, (), client_seeds, 512, 16 << 20),
    "evaluator": Target(run_evaluator, (), evaluator_seeds, 512, 16 << 20),
    "server": Target(run_server, (), server_seeds, 512, 16 << 20),
    **split_targets.TARGETS,
    **admission_targets.TARGETS,
}
