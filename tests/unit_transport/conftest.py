"""Worlds for one conformance suite: endpoints over memory in virtual time, or over ZeroMQ.

Tests are plain functions: ``world.until(condition)`` lets time pass until it holds. Times are in
units (``unit_s``): 1 s of virtual time, or a tenth of FSL_TEST_TIME_UNIT seconds (default 1) of
real time, so that slow machines can be given more.
"""

# ruff: noqa: D102, ASYNC110 - small doubles of documented protocols; tests poll for a condition

import asyncio
import contextlib
import functools
import os
import random
import threading

import pytest

from fsl_transport import (
    Conditions,
    DialerEndpoint,
    HeartbeatReceived,
    HelloReceived,
    ListenerEndpoint,
    MemNetwork,
    StreamOffered,
    TransportSettings,
    VirtualScheduler,
)
from fsl_transport.peer import Peer
from fsl_transport.zmq.curve import DialerCurve, KeyPair, ListenerCurve

UNIT_S = 0.1 * float(os.environ.get("FSL_TEST_TIME_UNIT", "1"))


def make_settings(unit_s=1.0, **changes):
    """Settings whose times are in units, small enough for tests."""
    values = {
        "heartbeat_every_s": 2 * unit_s,
        "expire_after_s": 10 * unit_s,
        "unreachable_every_s": 4 * unit_s,
        "hello_every_s": 1 * unit_s,
        "retransmit_after_s": 2 * unit_s,
        "ack_after_s": 0.5 * unit_s,
        "stall_s": 3 * unit_s,
        "window_bytes": 1 << 20,
        "window_limit_bytes": 1 << 20,
        "chunk_limit_bytes": 1 << 18,
    }
    values.update(changes)
    values.setdefault("eager_bytes", min(2 << 20, values["chunk_limit_bytes"]))
    return TransportSettings(**values)


class Source:
    """Chunks from a list; records what was read, may delay or fail."""

    def __init__(self, chunks, *, fail_at=None, later=False):
        self.data = chunks
        self.chunks = len(chunks)
        self.reads = []
        self.fail_at = fail_at
        self.waiting = [] if later else None

    def read(self, index, deliver):
        self.reads.append(index)
        data = None if index == self.fail_at else self.data[index]
        if self.waiting is None:
            deliver(data)
        else:
            self.waiting.append((deliver, data))


class Sink:
    """Keeps chunks; may delay the confirmation or fail."""

    def __init__(self, *, hold=False, fail_at=None):
        self.got = {}
        self.hold = hold
        self.fail_at = fail_at
        self.waiting = []
        self.unwritten = 0
        self.most_unwritten = 0

    def write(self, index, data, done):
        assert index not in self.got, "a chunk was delivered twice"
        self.got[index] = bytes(data)
        self.unwritten += len(data)
        self.most_unwritten = max(self.most_unwritten, self.unwritten)
        if self.hold:
            self.waiting.append((done, len(data)))
        else:
            self.unwritten -= len(data)
            done(index != self.fail_at)

    def release(self, count=None):
        for _ in range(len(self.waiting) if count is None else count):
            done, size = self.waiting.pop(0)
            self.unwritten -= size
            done(True)

    @property
    def content(self):
        return b"".join(self.got[index] for index in sorted(self.got))


class Node:
    """An endpoint, its events, and reactions to them (``on[event class] = function``)."""

    def __init__(self, world, name):
        self.world = world
        self.name = name
        self.events = []
        self.times = []
        self.on = {}
        self.endpoint = None
        self.link = None

    def take(self, event):
        self.events.append(event)
        self.times.append(self.world.scheduler.time())
        reaction = self.on.get(type(event))
        if reaction is not None:
            reaction(event)

    def all(self, kind):
        return [event for event in self.events if type(event) is kind]

    def count(self, kind):
        return len(self.all(kind))

    def last(self, kind):
        return self.all(kind)[-1]

    @property
    def story(self):
        """Every event but heartbeats."""
        return [event for event in self.events if type(event) is not HeartbeatReceived]


class World:
    """Common to all worlds."""

    unit_s = 1.0
    expire_units = 10
    stripes = 1
    scheduler = None

    def __init__(self):
        self.nodes = []

    def public(self, name):
        """The key that ``name`` uses."""
        return ""

    def settings(self):
        return make_settings(
            self.unit_s, expire_after_s=self.expire_units * self.unit_s, stripes_first=self.stripes
        )

    def listener(self, *, name="ps", incarnation=1, settings=None, seed=1, **options):
        node = Node(self, name)
        node.link = self._listener_link(name)
        node.endpoint = ListenerEndpoint(
            node.link,
            self.scheduler,
            settings or self.settings(),
            node.take,
            name,
            incarnation=incarnation,
            rng=random.Random(f"{seed}/{incarnation}"),
            **options,
        )
        node.on[HelloReceived] = lambda event: node.endpoint.welcome(event.peer, {"run": "r"})
        self.nodes.append(node)
        return node

    def dialer(
        self, name="c", *, incarnation=10, settings=None, connect=True, hello=dict, **options
    ):
        node = Node(self, name)
        node.link = self._dialer_link(name)
        node.endpoint = DialerEndpoint(
            node.link,
            self.scheduler,
            settings or self.settings(),
            node.take,
            name,
            incarnation=incarnation,
            rng=random.Random(f"{name}/{incarnation}"),
            **options,
        )
        self.nodes.append(node)
        if connect:
            node.endpoint.connect(hello)
        return node

    def accept_all(self, node, sink):
        node.on[StreamOffered] = lambda event: node.endpoint.accept(
            event.peer, event.stream_id, sink
        )


class MemWorld(World):
    """A network in memory, in virtual time."""

    kind = "mem"

    def __init__(self, conditions=None, seed=7, stripes=1):
        super().__init__()
        self.scheduler = VirtualScheduler()
        conditions = conditions or Conditions(delay_s=0.02)
        self.network = MemNetwork(self.scheduler, seed, conditions, stripes)

    def _listener_link(self, name):
        return self.network.listener(name)

    def _dialer_link(self, name):
        return self.network.dialer(name, "ps")

    def until(self, condition, units=300):
        end = self.scheduler.time() + units
        while not condition():
            assert (self.scheduler.next_time() or end) < end, "it did not happen in time"
            self.scheduler.run_next()

    def run(self, units):
        self.scheduler.run_until(self.scheduler.time() + units)

    def kill(self, node):
        self.network.kill(node.name)
        node.endpoint.close()

    def cut(self, node):
        self.network.cut(node.name, "ps")

    def heal(self, node):
        self.network.heal(node.name, "ps")

    def reset(self, node):
        self.network.reset(node.name, "ps")

    def close(self):
        for node in self.nodes:
            node.endpoint.close()


class Proxy:
    """A TCP proxy in front of the listener: can hold bytes back and break connections."""

    def __init__(self, world, target):
        self.world = world
        self.target = target
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.writers = []
        self.tasks = set()
        self.server = None
        self.port = 0

    async def start(self):
        self.server = await asyncio.start_server(self.take, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]

    async def take(self, reader, writer):
        with contextlib.suppress(OSError):
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target())
            self.writers += [writer, up_writer]
            for pair in ((reader, up_writer), (up_reader, writer)):
                task = asyncio.ensure_future(self.pump(*pair))
                self.tasks.add(task)
            return
        writer.close()

    async def pump(self, reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self.flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.close()

    def reset(self):
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()

    async def stop(self):
        self.server.close()
        self.reset()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.server.wait_closed()
        await asyncio.sleep(0.01)


class ZmqWorld(World):
    """Real sockets on loopback, each dialer behind a proxy."""

    kind = "zmq"
    unit_s = UNIT_S
    expire_units = 20  # real machines are sometimes busy with something else

    def __init__(self):
        super().__init__()
        self.scheduler = self.loop = asyncio.new_event_loop()
        self.port = 0
        self.proxies = {}

    def do(self, work):
        return self.loop.run_until_complete(work)

    def _target(self):
        return self.port

    def _listener_link(self, name):
        async def make():
            from fsl_transport.zmq.link import ZmqListener

            return ZmqListener(f"127.0.0.1:{self.port}", self.settings(), self.listener_curve())

        link = self.do(make())
        self.port = link.port
        return link

    def _dialer_link(self, name):
        async def make():
            from fsl_transport.zmq.link import ZmqDialer

            if name not in self.proxies:
                self.proxies[name] = proxy = Proxy(self, self._target)
                await proxy.start()
            address = f"127.0.0.1:{self.proxies[name].port}"
            return ZmqDialer(address, name, self.settings(), self.dialer_curve(name))

        return self.do(make())

    def listener_curve(self):
        return None

    def dialer_curve(self, name):
        return None

    def until(self, condition, units=300):
        async def wait():
            async with asyncio.timeout(units * self.unit_s):
                while not condition():
                    await asyncio.sleep(0.002)

        self.do(wait())

    def run(self, units):
        self.do(asyncio.sleep(units * self.unit_s))

    def kill(self, node):
        self.do(node.endpoint.aclose())

    def cut(self, node):
        self.proxies[node.name].flowing.clear()

    def heal(self, node):
        self.proxies[node.name].flowing.set()

    def reset(self, node):
        self.proxies[node.name].reset()

    def close(self):
        async def end():
            for node in self.nodes:
                await node.endpoint.aclose()
            for proxy in self.proxies.values():
                proxy.flowing.set()
                await proxy.stop()
            await self.loop.shutdown_default_executor()
            return [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]

        left = self.do(end())
        self.loop.close()
        assert left == [], "a link left tasks behind"
        # pyzmq keeps one thread of its own for buffers that were sent without a copy.
        ours = [thread.name for thread in threading.enumerate() if thread.name.startswith("fsl")]
        assert ours == [], "a link left a thread behind"


class CurveWorld(ZmqWorld):
    """Real sockets, encrypted. Each name has a key pair; those in ``allowed`` are accepted."""

    kind = "curve"

    def __init__(self):
        super().__init__()
        self.server = KeyPair.new()
        self.pairs = {}
        self.allowed = set()

    def pair_of(self, name):
        if name not in self.pairs:
            self.pairs[name] = KeyPair.new()
            self.allowed.add(self.pairs[name].public)
        return self.pairs[name]

    def public(self, name):
        return self.pair_of(name).public

    def listener_curve(self):
        return ListenerCurve(self.server, lambda key: key in self.allowed)

    def dialer_curve(self, name):
        return DialerCurve(self.pair_of(name), self.server.public)


class RelayWorld(CurveWorld):
    """Encrypted sockets, and two relays in a row between the proxies and the listener."""

    kind = "relay"

    def __init__(self):
        super().__init__()
        self.relays = []
        self.entry = 0

    def _listener_link(self, name):
        link = super()._listener_link(name)
        if not self.relays:
            self.do(self._open())
        return link

    async def _open(self):
        from fsl_async.nodes.relay.relay import Admission, Relay, Route

        self.entry = self.port
        for _ in range(2):
            relay = Relay(Admission(1000), None, lambda _: None)
            self.relays.append(relay)
            route = Route("127.0.0.1:0", f"127.0.0.1:{self.entry}", requires_curve=True)
            self.entry = relay.listen(route)[1]

    def _target(self):
        return self.entry

    def close(self):
        async def end():
            for node in self.nodes:
                await node.endpoint.aclose()
            for relay in self.relays:
                await relay.aclose()

        self.do(end())
        super().close()


WORLDS = {"mem": MemWorld, "zmq": ZmqWorld, "curve": CurveWorld, "relay": RelayWorld}


@pytest.fixture(params=["mem", "zmq", "curve"])
def world(request):
    """One of the worlds. Its teardown fails on leaked tasks and threads."""
    made = WORLDS[request.param]()
    yield made
    made.close()


@pytest.fixture
def curve_world():
    """The world of encrypted sockets."""
    made = CurveWorld()
    yield made
    made.close()


@pytest.fixture
def mem_world():
    """The world in memory, with chosen conditions."""
    made = []

    def make(conditions=None, seed=7, stripes=1):
        made.append(MemWorld(conditions, seed, stripes))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def zmq_world():
    """The world of real sockets."""
    made = ZmqWorld()
    yield made
    made.close()


@pytest.fixture
def intercept(monkeypatch):
    """Replace a method of a node's peers by ``replacement(plain, *arguments)``.

    ``plain`` is the bound original. Return a function that restores it.
    """

    def replace(node, name, replacement):
        original = getattr(Peer, name)

        def method(peer, *arguments):
            plain = functools.partial(original, peer)
            if peer._context is node.endpoint._context:
                return replacement(plain, *arguments)
            return plain(*arguments)

        monkeypatch.setattr(Peer, name, method)
        return lambda: monkeypatch.setattr(Peer, name, original)

    return replace


@pytest.fixture
def watch_operations(monkeypatch):
    """Record the stream operations that a node sends from now on: (peer's name, op, fields)."""

    def watch(node):
        operations, original = [], Peer.send_op

        def send_op(peer, op, fields):
            if peer._context is node.endpoint._context:
                operations.append((peer.name, op, fields))
            original(peer, op, fields)

        monkeypatch.setattr(Peer, "send_op", send_op)
        return operations

    return watch


@pytest.fixture(scope="session")
def new_settings():
    """``make_settings``."""
    return make_settings


@pytest.fixture
def new_source():
    """``Source``."""
    return Source


@pytest.fixture
def new_sink():
    """``Sink``."""
    return Sink
