"""What the targets of this folder have in common: a table's entry, doubles of the world, inputs
that stand for several steps.
"""

# ruff: noqa: D102 - small doubles of documented protocols

import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgpack
import numpy as np
from attrs import frozen

from fsl_async.store.files import Files
from fsl_codecs import CodecSpec, encode
from fsl_transport.session import frames

HEAD_LIMIT = 1 << 22
CHUNK_LIMIT = 1 << 21
SESSION = b"sessions"
HONEST, CROOK = "honest", "crook"
NUMBER_FORMATS = ("fp32", "bf16", "e4m3", "e5m2", "uniform")


@frozen
class Target:
    """A parser: what it may raise, inputs to start from, and how many bytes it may hold at a time
    for each byte of input.
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


def room():
    """A folder in memory where there is one."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None)


def coded(values, seed=0):
    numbers = np.random.default_rng(seed).standard_normal(values).astype(np.float32)
    return [encode(numbers, CodecSpec(format=name)) for name in NUMBER_FORMATS]


class Loopback:
    """A link that a test speaks through: what is sent is kept by name."""

    address = "mem://ps"
    stripes_limit = 1

    def __init__(self):
        self.sent = {HONEST: [], CROOK: []}
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
    """Nothing is written down."""

    def event(self, event, now, cause=None):
        return 0

    effect = event


class Quiet:
    """Takes what a node tells, and keeps none of it."""

    journal = Journal()

    def say(self, note):
        pass

    finished = say


def steps_of(data):
    """The steps that an input stands for."""
    try:
        steps = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        steps = [data]
    return steps if type(steps) is list else [data]


def delivery(step, session):
    """Name, lane, frames and seconds to wait: of a head (a list, or bytes), of {"n": name, "h":
    head, "p": payload, "l": lane}, of a float.
    """
    name, payload_of, lane = CROOK, [], 0
    if type(step) is float:
        return name, lane, [], 0.0 if math.isnan(step) else min(abs(step), 15.0)
    if type(step) is dict:
        name = step.get("n", CROOK)
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
    """The whole first chunk of stream 1, as the first piece of stripe 0."""
    return {"h": [frames.CHUNK, 0, 1, 0, 0, 0, len(payload), 0, 1, True], "p": payload}


def play(world, step, honest_turn):
    """Deliver a step of the crook to a world, or wait, after which the honest peer has its turn."""
    name, lane, parts, wait_s = delivery(step, world.sessions[CROOK])
    if parts:
        # The link refuses other names; what comes under the honest one's has an origin of its own.
        strange = type(name) is not str or frames.NAME.fullmatch(name) is None or name == HONEST
        world.deliver(CROOK if strange else name, lane, parts)
    if wait_s:
        world.scheduler.run_until(world.scheduler.time() + wait_s)
        honest_turn()
