"""Memory for incoming streams: more senders than it holds, one after the other, none starving."""

import itertools

import pytest

from fsl_transport import Conditions, PeerUp, StreamOffered, StreamReceived, StreamSent
from fsl_transport.bulk.chunks import RESUMES_LIMIT
from fsl_transport.bulk.receive_budget import FRUITLESS_REQUESTS_LIMIT, ReceiveBudget, Reservation
from fsl_transport.session import frames
from fsl_transport.settings import TransportSettings

MIB = 1 << 20


@pytest.fixture
def memory(mem_world):
    """A world in memory."""
    return mem_world()


def test_unwritten_bytes_are_bounded_over_all_peers(memory, new_settings, new_source, new_sink):
    """The windows of all streams allow ten times the budget; all streams arrive in the end."""
    budget, chunk = 400_000, 50_000
    settings = new_settings(
        receive_budget_bytes=budget, chunk_limit_bytes=chunk, window_bytes=4 * chunk
    )
    ps = memory.listener(settings=settings)
    sinks = {}

    def take(event):
        sinks[event.peer] = new_sink(hold=True)
        ps.endpoint.accept(event.peer, event.stream_id, sinks[event.peer])

    ps.on[StreamOffered] = take
    for number in range(20):
        client = memory.dialer(f"c{number}", settings=settings, connect=False)
        client.on[PeerUp] = lambda _, client=client: client.endpoint.offer(
            "", "s", {}, new_source([bytes(chunk)] * 6)
        )
        client.endpoint.connect(dict)
    memory.until(lambda: len(sinks) == 20)
    most = 0
    for _ in range(400):
        memory.run(0.5)
        most = max(most, ps.endpoint.receive_budget.used_bytes)
        for sink in sinks.values():
            while sink.waiting:
                done, _ = sink.waiting.pop(0)
                done(True)
        if ps.count(StreamReceived) == 20:
            break
    assert ps.count(StreamReceived) == 20
    assert most <= budget
    assert ps.endpoint.receive_budget.used_bytes == 0


def test_memory_full_of_chunks_out_of_order_is_no_deadlock(
    memory, new_settings, new_source, new_sink
):
    """Later chunks of each stream may take all memory, and leave none for the first one."""
    chunk = 50_000
    settings = new_settings(
        receive_budget_bytes=4 * chunk, chunk_limit_bytes=chunk, window_bytes=4 * chunk
    )
    ps = memory.listener(settings=settings)
    ps.on[StreamOffered] = lambda e: ps.endpoint.accept(e.peer, e.stream_id, new_sink())
    clients = [memory.dialer(f"c{number}", settings=settings) for number in range(2)]
    memory.until(lambda: all(one.count(PeerUp) for one in clients))
    sources = [new_source([bytes(chunk)] * count, later=True) for count in (4, 2)]
    for one, source in zip(clients, sources, strict=True):
        one.endpoint.offer("", "s", {}, source)
    memory.until(lambda: all(source.waiting for source in sources))
    for one, source in zip(clients, sources, strict=True):
        streams = ps.endpoint._peers[one.name].streams.incoming
        for index in range(1, source.chunks):  # within their credit, and one of them incomplete
            part = bytes(9 if index == 3 else chunk)
            piece = frames.Chunk(b"", 1, 0, index, 0, chunk, 0, 1, False, part)
            streams._take_piece(streams._streams[1], piece, memory.scheduler.time())
    assert ps.endpoint.receive_budget.used_bytes == 4 * chunk
    begun = memory.scheduler.time()
    while not all(one.count(StreamSent) for one in clients):
        for source in sources:
            while source.waiting:
                deliver, data = source.waiting.pop(0)
                deliver(data)
        memory.run(0.05)
        for peer in ps.endpoint._peers.values():
            for one in peer.streams.incoming._streams.values():
                assert {*one.complete, *one.reassembly} == {*one.kept}, "dropped chunks are gone"
        assert memory.scheduler.time() < begun + 0.6
    assert ps.endpoint.receive_budget.used_bytes == 0


def incoming_of(ps, name):
    """The server's record of a client's first stream."""
    return ps.endpoint._peers[name].streams.incoming._streams[1]


class Lone:
    """One stream whose source delivers nothing; the test hands pieces to the server."""

    CHUNK = 50_000

    def __init__(self, world, new_settings, new_source, new_sink):
        self.world, self.sink = world, new_sink()
        settings = new_settings(
            receive_budget_bytes=20 * self.CHUNK, chunk_limit_bytes=self.CHUNK, stall_s=3
        )
        self.ps, client = world.listener(settings=settings), world.dialer(settings=settings)
        world.until(lambda: client.count(PeerUp))
        world.accept_all(self.ps, self.sink)
        client.endpoint.offer("", "s", {}, new_source([bytes(self.CHUNK)] * 9, later=True))
        world.until(lambda: self.ps.count(StreamOffered))
        self.streams = self.ps.endpoint._peers[client.name].streams.incoming
        self.incoming = incoming_of(self.ps, client.name)
        self.budget = self.ps.endpoint.receive_budget

    def leave(self, chunks):
        """Leave memory for this many chunks; other streams have the rest, and write."""
        self.budget.used_bytes = (20 - chunks) * self.CHUNK
        self.budget.writing_bytes = self.budget.used_bytes

    def piece(self, index, size=CHUNK, *, round_=0):
        """The first ``size`` bytes of a chunk arrive."""
        piece = frames.Chunk(b"", 1, round_, index, 0, self.CHUNK, 0, 1, False, bytes(size))
        self.streams._take_piece(self.incoming, piece, self.world.scheduler.time())


@pytest.fixture
def lone(memory, new_settings, new_source, new_sink):
    return Lone(memory, new_settings, new_source, new_sink)


def test_a_lost_part_is_requested_while_its_stream_waits_for_memory(lone):
    """The chunk's memory is taken already, so silence about the rest of it is a stall."""
    lone.leave(1)
    lone.piece(0, 9)
    lone.piece(1)
    assert lone.budget.waiting == [lone.incoming.reservation]
    lone.world.run(2)
    assert lone.incoming.machine.round == 0
    lone.world.run(2)
    assert lone.incoming.machine.round == 1


def test_after_fruitless_requests_the_stall_timer_waits_for_memory_too(lone):
    """Within hours it would reach the number of resumes that its sender treats as an error."""
    for _ in range(FRUITLESS_REQUESTS_LIMIT):
        lone.incoming.reservation.requested(0)
    lone.leave(0)
    lone.piece(0)
    assert lone.budget.waiting == []
    lone.world.run(20)
    assert lone.incoming.machine.round == 0
    lone.leave(1)
    lone.world.run(5)
    assert lone.incoming.machine.round == 1


def test_fruitless_requests_are_bounded():
    """Another stream may take the memory each time, and a sender tolerates 64 fruitless resumes."""
    reservation = Reservation()
    for _ in range(FRUITLESS_REQUESTS_LIMIT):
        assert reservation.may_request(3)
        reservation.requested(3)
    assert not reservation.may_request(3)
    assert not reservation.may_request(2)
    assert reservation.may_request(4)
    reservation.requested(4)
    assert reservation.may_request(4)
    assert 2 * FRUITLESS_REQUESTS_LIMIT <= RESUMES_LIMIT


class Queue:
    """A budget of 20 MiB (chunks of 2 MiB), named reservations, and which were requested."""

    def __init__(self, names, *, used_mib=0, writing_mib=0):
        self.budget = ReceiveBudget(TransportSettings(receive_budget_bytes=20 * MIB))
        self.use(used_mib, writing_mib)
        self.requested = []
        self.reservations = {name: Reservation() for name in names}

    def use(self, used_mib, writing_mib):
        """Set how much is used, and how much of that is being written."""
        self.budget.used_bytes, self.budget.writing_bytes = used_mib * MIB, writing_mib * MIB

    def wait(self, name, *, needed=True):
        """Let a stream wait; ``needed`` is what its request returns."""

        def request():
            self.requested.append(name)
            return needed

        self.budget.wait(self.reservations[name], request)

    def admits(self, name):
        """Whether a chunk of 1 MiB fits."""
        return self.budget.admits(self.reservations[name], MIB)

    @property
    def waiting(self):
        """Names of the streams that wait."""
        names = {reservation: name for name, reservation in self.reservations.items()}
        return [names[reservation] for reservation in self.budget.waiting]


@pytest.mark.parametrize(
    ("used_mib", "writing_mib", "requests"),
    [(10, 1, True), (12, 1, False), (12, 0, True), (18, 0, True), (20, 0, False), (0, 0, True)],
)
def test_a_request_needs_half_the_budget_or_that_nothing_is_written(
    used_mib, writing_mib, requests
):
    """Memory that is half full of waiting chunks is of use nevertheless."""
    queue = Queue("ab", used_mib=used_mib, writing_mib=writing_mib)
    queue.wait("a")
    queue.wait("b")
    queue.budget.request_next()
    assert queue.requested == (["a"] if requests else [])
    assert queue.waiting == (["b"] if requests else ["a", "b"])


def test_space_is_reserved_for_the_longest_waiting_until_its_chunk_arrives():
    """Streams that are being received renew their credit, and would take every free chunk."""
    queue = Queue("abcd", used_mib=19, writing_mib=19)
    for name in "abc":
        queue.wait(name)
    assert queue.admits("d")
    queue.budget.handle_timer(100.0)
    assert not queue.admits("d")
    assert queue.admits("a")
    queue.use(18, 18)
    queue.budget.request_next()
    assert queue.requested == ["a"]
    queue.budget.handle_timer(104.0)
    assert not queue.admits("b"), "a's chunk is in flight"
    queue.budget.on_chunk(queue.reservations["a"])
    assert queue.admits("b")
    queue.budget.handle_timer(104.0)
    assert queue.requested == ["a", "b"]
    queue.budget.handle_timer(109.0)
    assert not queue.admits("d")
    queue.budget.handle_timer(109.1)
    assert queue.requested == ["a", "b", "c"], "b did not answer"
    queue.budget.release(queue.reservations["c"])
    assert queue.admits("d")


class SlowDisk:
    """One writer for all streams: a chunk at a time."""

    def __init__(self, world, seconds):
        self.world, self.seconds, self.waiting = world, seconds, []

    def write(self, index, data, done):
        """Queue a chunk."""
        self.waiting.append(done)
        if len(self.waiting) == 1:
            self.begin()

    def begin(self):
        """Start writing the first one."""
        scheduler = self.world.scheduler
        scheduler.call_at(scheduler.time() + self.seconds, self.end)

    def end(self):
        """It is written."""
        self.waiting.pop(0)(True)
        if self.waiting:
            self.begin()


@pytest.mark.parametrize(("clients", "longest_s"), [(12, 2.0), (40, 5.0)])
def test_of_many_long_uploads_none_starves(mem_world, new_source, clients, longest_s):
    """None ends for a minute: the streams that got memory first must not keep it."""
    world = mem_world(Conditions(delay_s=0.02, bytes_per_s=125e6))
    settings = TransportSettings(receive_budget_bytes=32 << 20)
    ps, disk = world.listener(settings=settings), SlowDisk(world, 0.02)
    dialers = [world.dialer(f"c{number}", settings=settings) for number in range(clients)]
    world.until(lambda: all(one.count(PeerUp) for one in dialers))
    written = {}

    class Sink:
        def __init__(self, name):
            self.name = name

        def write(self, index, data, done):
            """Record when it arrived."""
            written.setdefault(self.name, []).append(world.scheduler.time())
            disk.write(index, data, done)

    ps.on[StreamOffered] = lambda e: ps.endpoint.accept(e.peer, e.stream_id, Sink(e.peer))
    chunk = bytes(1 << 20)
    for one in dialers:
        one.endpoint.offer("", "long", {}, new_source([chunk] * 4000))
    world.run(30)
    assert len(written) == clients
    begun = world.scheduler.time() - 20  # not the first seconds, in which all start
    for name, times in written.items():
        pauses = [b - a for a, b in itertools.pairwise([begun, *(t for t in times if t > begun)])]
        assert max(pauses) < longest_s, name
        assert times[-1] > world.scheduler.time() - longest_s, name
    assert sum(map(len, written.values())) > 0.95 * 30 / 0.02


@pytest.mark.parametrize(("clients", "budget_mib"), [(16, 96), (60, 64)])
def test_simultaneous_uploads_are_written_at_the_writers_pace(
    mem_world, new_source, clients, budget_mib
):
    """All clients of a round upload at once. Dropped chunks are requested when memory is free,
    not after a silence of 10 s.
    """
    world = mem_world(Conditions(delay_s=0.02, bytes_per_s=1.25e9))
    settings = TransportSettings(receive_budget_bytes=budget_mib << 20)
    ps = world.listener(settings=settings)
    dialers = [world.dialer(f"c{number}", settings=settings) for number in range(clients)]
    world.until(lambda: all(one.count(PeerUp) for one in dialers))
    disk, chunk, most = SlowDisk(world, 0.0), bytes(1 << 20), 0
    ps.on[StreamOffered] = lambda e: ps.endpoint.accept(e.peer, e.stream_id, disk)
    budget = ps.endpoint.receive_budget
    for one in dialers:  # measures the path
        one.endpoint.offer("", "first", {}, new_source([chunk] * 16))
        world.until(lambda one=one: one.count(StreamSent) == 1)
    disk.seconds = 0.01
    begun = world.scheduler.time()
    for one in dialers:
        one.endpoint.offer("", "second", {}, new_source([chunk] * 16))
    while not all(one.count(StreamSent) == 2 for one in dialers):
        world.run(0.05)
        most = max(most, budget.used_bytes)
        assert world.scheduler.time() - begun < 0.16 * clients + 1.0
    assert most <= budget_mib << 20
    assert (budget.used_bytes, budget.writing_bytes, budget.extra_bytes, budget.waiting) == (
        0,
        0,
        0,
        [],
    )
