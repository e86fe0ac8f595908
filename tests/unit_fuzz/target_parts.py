"""Parts that the targets share: the table's entry, test doubles, inputs of several steps."""

# ruff: noqa: D102 - small doubles of documented protocols

import math
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgpack
import numpy as np
from attrs import frozen

import fsl_transport as tp
from fsl_async.files.files import Files
from fsl_codecs import CodecSpec, encode
from fsl_transport.session import frames

HEAD_LIMIT = 1 << 22
CHUNK_LIMIT = 1 << 21
SESSION = b"sessions"
HONEST, ATTACKER = "honest", "attacker"
NUMBER_FORMATS = ("fp32", "bf16", "e4m3", "e5m2", "uniform")


@frozen
class Target:
    """A parser, the errors it may raise, and its seed inputs.

    It may hold at most `constant` bytes, plus `amplification` bytes for each byte of input.
    """

    run: Callable[[bytes], object]
    refuses: tuple[type[Exception], ...]
    seeds: Callable[[], list[bytes]]
    amplification: int = 128
    constant: int = 1 << 18


def pack(*fields):
    return msgpack.packb(fields)


class QuietFiles(Files):
    """A disk that does not wait for the hardware."""

    def sync(self, descriptor):
        pass

    def sync_directory(self, path):
        pass


def memory_folder():
    """Make a temporary folder, in /dev/shm where there is one."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None)


def coded(values, seed=0):
    numbers = np.random.default_rng(seed).standard_normal(values).astype(np.float32)
    return [encode(numbers, CodecSpec(format=name)) for name in NUMBER_FORMATS]


class Loopback:
    """A link driven by a test, which keeps what is sent, by peer."""

    address = "mem://ps"
    stripes_limit = 1

    def __init__(self):
        self.sent = {HONEST: [], ATTACKER: []}
        self.receive = None

    def open_stripes(self, count):
        pass

    def adopt(self, settings):
        pass

    def send(self, peer, lane, parts, origin=b"", stripe=0):
        self.sent.setdefault(peer, []).append([bytes(part) for part in parts])

    def set_receiver(self, receive):
        self.receive = receive

    def close(self):
        pass

    def redial(self):
        pass

    def remote_address(self):
        return "192.0.2.1"


class Journal:
    """A journal that keeps nothing."""

    def event(self, event, now, cause=None):
        return 0

    effect = fact = event


class Quiet:
    """Discards what a node outputs."""

    journal = Journal()

    def say(self, note):
        pass

    finished = say


def steps_of(data):
    """Return the steps that an input encodes; bytes that are no list are one step."""
    try:
        steps = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        steps = [data]
    return steps if type(steps) is list else [data]


def delivery(step, session):
    """Return the name, lane, frames and seconds to wait of a step.

    A step is a head (a list or bytes), {"n": name, "h": head, "p": payload, "l": lane}, or a float.
    """
    name, payload_of, lane = ATTACKER, [], 0
    if type(step) is float:
        return name, lane, [], 0.0 if math.isnan(step) else min(abs(step), 15.0)
    if type(step) is dict:
        name = step.get("n", ATTACKER)
        payload_of = [step["p"]] if type(step.get("p")) is bytes else []
        lane = 1 if payload_of or step.get("l") else 0
        step = step.get("h")
    if type(step) is list and len(step) > 1 and step[1] == 0 and type(step[1]) is int:
        step = [step[0], session, *step[2:]]
    try:
        return name, lane, [step if type(step) is bytes else msgpack.packb(step), *payload_of], 0.0
    except (ValueError, TypeError, OverflowError):
        return name, lane, [], 0.0


def piece(payload):
    """Return the complete first chunk of stream 1, as the first piece of stripe 0."""
    return {"h": [frames.CHUNK, 0, 1, 0, 0, 0, len(payload), 0, 1, True], "p": payload}


def control(seq, *fields):
    """Return the head of a control message of the attacker's own session."""
    return [frames.DATA, 0, seq, 0, *fields]


def greeting(name, role, body):
    """Return a step: another peer's hello."""
    head = [frames.HELLO, frames.PROTOCOL_VERSION, 7, 1, name, role, body]
    return {"n": name, "h": head}


def play(world, step, honest_turn):
    """Deliver a step of the attacker, or wait and then call `honest_turn`."""
    name, lane, parts, wait_s = delivery(step, world.sessions[ATTACKER])
    if parts:
        # The link refuses invalid names, and the honest peer's name from another origin.
        is_refused = type(name) is not str or frames.NAME.fullmatch(name) is None or name == HONEST
        world.deliver(ATTACKER if is_refused else name, lane, parts)
    if wait_s:
        world.scheduler.run_until(world.scheduler.time() + wait_s)
        honest_turn()


def attacker_dialer(link, scheduler):
    """Return a function that makes the dialing endpoint of the attacked client."""
    return lambda take: tp.DialerEndpoint(
        link, scheduler, tp.TransportSettings(), take, ATTACKER, incarnation=1, rng=random.Random(0)
    )
