"""Targets: a split server with an honest and a hostile client, and a client of a hostile split
server.

Both have the real shells, machines and model parts, and the split server its real disk; sockets,
threads and clocks are test doubles. The model has a few weights, so an input takes milliseconds.
"""

# ruff: noqa: D102 - small doubles of documented protocols

import contextlib
import random
from pathlib import Path

import attrs
import msgpack
import numpy as np
import torch
from split_stand_ins import RunAlone
from target_parts import (
    ATTACKER,
    HEAD_LIMIT,
    HONEST,
    SESSION,
    Loopback,
    Quiet,
    QuietFiles,
    Target,
    attacker_dialer,
    control,
    delivery,
    greeting,
    memory_folder,
    pack,
    play,
    steps_of,
)
from torch import nn

import fsl_transport as tp
from fsl_async.accounting.traffic import Traffic
from fsl_async.config.settings import Config
from fsl_async.config.settings_training import SplitConfig
from fsl_async.learn.split.model_parts import (
    AlignSettings,
    ClientPart,
    ClientPartOptions,
    ServerPartOptions,
)
from fsl_async.learn.split.payload import encode_chunk, pack_labels, spec_for
from fsl_async.learn.split.remote import SplitTraining
from fsl_async.learn.split.server_disk import ServerDisk
from fsl_async.learn.split.server_training import ServerTraining, SplitServer, UploadShape
from fsl_async.nodes.client.split_shell import Facts, SplitClientShell
from fsl_async.nodes.split_server.shell import SplitServerShell, Workers
from fsl_async.roles.split import messages as msg
from fsl_async.roles.split.client import SplitClientMachine
from fsl_async.roles.split.messages import UploadKey
from fsl_async.roles.split.methods import method_of
from fsl_async.roles.split.server import SplitServerMachine
from fsl_async.tools.sim.training import VirtualWorker
from fsl_transport.session import frames

METHODS = ("fsl-sage", "splitfed-v1", "splitfed-v2")
"""Aligned; with replicas and gradients; with gradients alone. An input's first step, if a number,
chooses.
"""
INPUTS, WIDTH, CLASSES, SAMPLES = 5, 4, 3, 2


def chosen_by(steps):
    """Return the method that an input chooses, and its other steps."""
    if steps and type(steps[0]) is int:
        return METHODS[steps[0] % len(METHODS)], steps[1:]
    return METHODS[0], steps


@contextlib.contextmanager
def one_thread():
    """Use one torch thread: with a few weights, more threads only cost time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def linear(inputs, outputs):
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)


# --- the split server ---


class SplitWorld:
    """A split server with all its parts, an honest client, and an attacker that has a session
    too.
    """

    def __init__(self, folder, name, outputs=Quiet()):  # noqa: B008 - it has no state
        self.ended, self.is_over = [], False
        self.scheduler, self.link = tp.VirtualScheduler(), Loopback()
        rules = SplitConfig(method=name, align_every=1, up="fp32", down="fp32")
        server = SplitServer(
            linear(WIDTH, CLASSES),
            ServerPartOptions(
                replicas=name == "splitfed-v1",
                align=AlignSettings(passes=1),
                shape=(WIDTH,),
                classes=CLASSES,
            ),
            linear(WIDTH, CLASSES),
        )
        self.disk = ServerDisk(Path(folder) / "server", QuietFiles())
        self.training = ServerTraining(
            method_of(rules), server, UploadShape((WIDTH,), CLASSES, per_token=False), self.disk
        )
        workers = Workers(*(VirtualWorker(self.scheduler, lambda: 0.001) for _ in range(3)))
        machine = SplitServerMachine(Config(split=rules), {"method": name})
        machine.checkpoints.every = 2
        self.shell = SplitServerShell(
            machine,
            self.training,
            lambda take: tp.ListenerEndpoint(
                self.link,
                self.scheduler,
                tp.TransportSettings(),
                take,
                "server",
                incarnation=1,
                rng=random.Random(0),
            ),
            workers=workers,
            traffic=Traffic(),
            scheduler=self.scheduler,
            journal=outputs.journal,
            say=outputs.say,
            finished=self.ended.append,
        )
        self.endpoint = self.shell.endpoint
        self.shell.start()
        self.name = name
        self.sessions = {peer: self.enter(peer) for peer in (HONEST, ATTACKER)}
        self.seq = 0

    def enter(self, peer, incarnation=1):
        body = hello(self.name)
        head = pack(frames.HELLO, frames.PROTOCOL_VERSION, incarnation, 1, peer, "client", body)
        self.deliver(peer, 0, [head])
        sent = [frames.parse(parts, HEAD_LIMIT, 1 << 21) for parts in self.link.sent[peer]]
        return next(one.session for one in reversed(sent) if isinstance(one, frames.Welcome))

    def deliver(self, peer, lane, parts):
        # Any client's RunOver is accepted (docs/SECURITY.md, "Names"): that is no defect.
        self.is_over = self.is_over or any(b"RunOver" in part for part in parts)
        self.link.receive(peer, tp.Lane(lane), parts, b"")
        self.wait(0.01)

    def wait(self, seconds):
        self.scheduler.run_until(self.scheduler.time() + seconds)

    def control(self, peer, *fields):
        """Deliver a control message of a peer."""
        self.seq += 1
        self.deliver(peer, 0, [pack(frames.DATA, self.sessions[peer], self.seq, 0, *fields)])

    def honest_upload(self):
        """Check that the honest client's upload is received, trained, and answered."""
        if self.is_over:
            return
        # In the newest round that it counts: any client can raise that number (docs/LIMITS.md,
        # "What is not limited").
        key = UploadKey(HONEST, 1, max(0, self.shell.machine.round), self.seq)
        before = len(self.link.sent[HONEST])
        meta = msg.to_wire(meta_of(key))
        self.control(HONEST, frames.MESSAGE, msg.to_wire(msg.RoundDone(key.round, 1)))
        self.control(HONEST, frames.OFFER, self.seq, msg.upload_stream(key.text), 2, 0, meta)
        stream = self.seq - 1
        for index, data in enumerate(upload()):
            numbers = (stream, 0, index, 0, len(data), 0, self.seq * 2 + index, True)
            self.deliver(HONEST, 1, [pack(frames.CHUNK, self.sessions[HONEST], *numbers), data])
        self.wait(0.2)
        sent = [parts[0] for parts in self.link.sent[HONEST][before:]]
        assert any(b"round_acknowledged/1" in head for head in sent), (
            "the honest client is not answered"
        )
        answers = (b"gradient_meta/1", b"trained/1")
        text = key.text.encode()
        assert any(text in head and any(one in head for one in answers) for head in sent), (
            "the honest client's upload is not trained"
        )

    def close(self):
        self.endpoint.close()
        self.shell.node.close()
        self.disk.close()


def hello(name):
    return msg.to_wire(msg.SplitHello("r", msg.ROLE, 0, {"method": name}, -1, -1, 0))


def meta_of(key, **more):
    plain = msg.SmashedMeta(key, 0, -1, [SAMPLES, WIDTH], [], SAMPLES, SAMPLES, True, False)
    return attrs.evolve(plain, **more)


def upload():
    """Return an upload's two chunks: activations, labels."""
    values = np.linspace(-1, 1, SAMPLES * WIDTH, dtype=np.float32)
    coded = encode_chunk(values, 0, spec_for("fp32", WIDTH, 14))
    return bytes(coded), pack_labels(np.array([0, 2]), CLASSES)


@one_thread()
def run_split_server(data):
    """Run a split server; input: a number for the method, then steps of the attacker."""
    name, steps = chosen_by(steps_of(data))
    with memory_folder() as folder:
        world = SplitWorld(folder, name)
        try:
            for step in steps[:40]:
                play(world, step, world.honest_upload)
            assert world.endpoint.last_received_ago_s(HONEST) is not None, (
                "the honest session is gone"
            )
            world.honest_upload()
            assert world.is_over or not world.ended, world.ended
        finally:
            world.close()


def server_seeds():
    def say(seq, message):
        return control(seq, frames.MESSAGE, msg.to_wire(message))

    def offer(seq, stream, step, **more):
        key = UploadKey(ATTACKER, 1, 0, step)
        meta = msg.to_wire(meta_of(key, **more))
        return control(seq, frames.OFFER, stream, msg.upload_stream(key.text), 2, 0, meta)

    def chunks(stream, first=1):
        return [
            {"h": [frames.CHUNK, 0, stream, 0, n, 0, len(one), 0, first + n, True], "p": one}
            for n, one in enumerate(upload())
        ]

    due = {"wants_gradient": False, "alignment_due": True}
    complete = [offer(1, 1, 0), *chunks(1), 1.0]
    said = [
        msg.RoundDone(0, 2, {"activations up": 0.1}),
        msg.Trained(UploadKey("a", 1, 0, 0), 1.0),
        msg.RunOver("over"),
    ]
    again = greeting(ATTACKER, "client", hello(METHODS[1]))
    made = [
        *([number, *complete] for number in range(len(METHODS))),
        [0, offer(1, 1, 0, **due), *chunks(1), 1.0, offer(2, 2, 1), *chunks(2, 3), 1.0],
        [1, *complete, say(2, said[0]), offer(3, 2, 1), *chunks(2, 3), 2.0],
        [1, offer(1, 1, 0), chunks(1)[0], again, 1.0],
        [1, again, *complete, [frames.DATA, 0, 2, 0, 5, 1]],
        [2, offer(1, 1, 0), [frames.DATA, 0, 2, 0, 6, 1, "stopped"], 1.0],
        [2, *(say(n + 1, one) for n, one in enumerate(said)), 15.0],
        [0, greeting("b", "client", hello(METHODS[0]))],
        [0, greeting(msg.PS_ROLE, "ps", msg.to_wire(msg.PsHello("r", msg.PS_ROLE))), 6.0],
        [
            0,
            offer(1, 1, 0, lengths=[1, 1]),
            offer(2, 2, 1, shape=[1, 1 << 30]),
            offer(3, 3, 2, label_bytes=0),
        ],
    ]
    return [msgpack.packb(one) for one in made]


# --- a client of a hostile split server ---


def training_of(name):
    """Return a method's rules and a client's training, which never waits."""
    rules = SplitConfig(method=name, upload_every=1, align_every=1, up="fp32", down="fp32")
    chosen = method_of(rules)
    auxiliary = linear(WIDTH, CLASSES) if chosen.auxiliary != "none" else None
    training = SplitTraining(
        ClientPart(linear(INPUTS, WIDTH), ClientPartOptions(in_flight=2), auxiliary=auxiliary),
        chosen,
        RunAlone(running=False),
        CLASSES,
    )
    return rules, training


def train(training):
    """Train one step, with any gradients that have arrived."""
    labels = torch.tensor([0, 2])
    training.train_batch(torch.linspace(-1, 1, SAMPLES * INPUTS).reshape(SAMPLES, INPUTS), labels)


def client_of(scheduler, link, name, outputs=Quiet()):  # noqa: B008 - it has no state
    """Make a client that dials; returns its shell and its training."""
    rules, training = training_of(name)
    shell = SplitClientShell(
        SplitClientMachine(Config(split=rules), ATTACKER, 1),
        training,
        attacker_dialer(link, scheduler),
        facts=Facts("r", 0, {"method": name}),
        worker=VirtualWorker(scheduler, lambda: 0.001),
        traffic=Traffic(),
        scheduler=scheduler,
        journal=outputs.journal,
        say=outputs.say,
        finished=outputs.finished,
    )
    training._run.post_split = shell.node.feed
    shell.dial()
    return shell, training


@one_thread()
def run_split_client(data):
    """Run a client; input: a number for the method, then heads, bulk payloads and waits of a split
    server.
    """
    name, steps = chosen_by(steps_of(data))
    scheduler, link = tp.VirtualScheduler(), Loopback()
    shell, training = client_of(scheduler, link, name)
    training.begin_round(0)
    for _ in range(2):
        train(training)
    for step in steps[:40]:
        _, lane, parts, wait_s = delivery(step, SESSION)
        if parts:
            link.receive("", tp.Lane(lane), parts, b"")
        scheduler.run_until(scheduler.time() + (wait_s or 0.01))
    train(training)
    training.end_round()
    scheduler.run_until(scheduler.time() + 0.1)
    shell.endpoint.close()
    shell.node.close()


def client_seeds():
    welcome_body = msg.to_wire(msg.SplitWelcome("r", 2, "", -1))
    welcome = [frames.WELCOME, frames.PROTOCOL_VERSION, 1, 1, SESSION, 9, welcome_body]
    names = [UploadKey(ATTACKER, 1, 0, step) for step in range(2)]
    values = np.linspace(-1, 1, SAMPLES * WIDTH, dtype=np.float32)
    gradient = bytes(encode_chunk(values, 0, spec_for("fp32", WIDTH, 14)))
    size = CLASSES * (WIDTH + 1)
    model = bytes(encode_chunk(np.zeros(size, np.float32), 0, spec_for("fp32", size, 14)))

    def say(seq, message):
        return control(seq, frames.MESSAGE, msg.to_wire(message))

    def answer(seq, stream, key, payload_of=gradient):
        meta = msg.to_wire(msg.GradientMeta(key, 1.0, 1))
        offer = control(seq, frames.OFFER, stream, msg.answer_stream(key.text), 1, 0, meta)
        return [offer, chunk(stream, payload_of), 0.1]

    def chunk(stream, data):
        return {"h": [frames.CHUNK, 0, stream, 0, 0, 0, len(data), 0, stream, True], "p": data}

    def auxiliary(payload_of):
        meta = msg.to_wire(msg.AuxiliaryMeta(1, 0))
        name = msg.auxiliary_stream(ATTACKER, 1)
        return [control(1, frames.OFFER, 1, name, 1, 1 << 62, meta), chunk(1, payload_of), 0.1]

    messages = [
        msg.Trained(names[0], 1.0),
        msg.AlreadyTrained(names[1], True),
        msg.UploadRefused(names[1], "later", ""),
        msg.Durable(names[0]),
        msg.RoundAcknowledged(0),
        msg.AuxiliaryStays(0, -1),
        msg.UploadRefused(names[0], "refused", "no"),
        msg.Ended("over"),
    ]
    refused = [frames.REFUSE, frames.PROTOCOL_VERSION, 1, 1, "leaving", "text", 7]
    made = [
        [1, welcome, *answer(1, 1, names[0]), *answer(2, 2, names[1])],
        [2, welcome, *answer(1, 1, names[0], model)],
        [0, welcome, *auxiliary(model)],
        [0, welcome, *auxiliary(gradient)],
        *(
            [number, welcome, *(say(n + 1, one) for n, one in enumerate(messages)), 6.0]
            for number in range(2)
        ),
        [
            1,
            welcome,
            say(1, messages[2]),
            6.0,
            *answer(2, 1, names[0]),
            [frames.UNKNOWN, SESSION],
            3.0,
        ],
        [0, welcome, [frames.BYE, 0, "done"], refused, 9.0, welcome],
    ]
    return [msgpack.packb(one) for one in made]


TARGETS = {
    "split server": Target(run_split_server, (), server_seeds, 512, 16 << 20),
    "split client": Target(run_split_client, (), client_seeds, 512, 16 << 20),
}
